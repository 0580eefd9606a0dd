"""Methods that choose their own steps from values and gradients: quasi-Newton, conjugate gradients, Newton.  No MPI."""

from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.lbfgsb import LBFGSB
from mpishard.minimizers.method import Method
from mpishard.minimizers.newton import TruncatedNewton
from mpishard.minimizers.nonlinear_cg import NonlinearCG

__all__ = ["LBFGS", "LBFGSB", "Method", "NonlinearCG", "TruncatedNewton"]
