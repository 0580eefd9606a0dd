"""Methods that choose their own steps from values and gradients: quasi-Newton, conjugate gradients, Newton.  No MPI.

Input: value and gradient at the point that a minimiser wants, by `tell`; its vectors are this rank's part.
Output: the next point, and at the end the reason; a state that can be saved at any evaluation.

Read ``method`` first, the interfaces; then ``descent``, the loop of line searches, and ``line_search``; the methods:
``lbfgs``, ``history``, ``gram`` and ``cauchy`` with ``lbfgsb``, ``nonlinear_cg``, ``newton`` with ``steihaug``,
``least_squares``, ``double_pass``; ``inverses`` of the Hessian at their end; vectors and options: ``space``,
``elements`` and ``bounds``; arithmetic: ``formulas`` of each element, ``small`` of a few numbers.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.minimizers.lbfgs import LBFGS
    from mpishard.minimizers.lbfgsb import LBFGSB
    from mpishard.minimizers.method import Method, RieszMap
    from mpishard.minimizers.newton import TruncatedNewton
    from mpishard.minimizers.nonlinear_cg import NonlinearCG

__all__ = ["LBFGS", "LBFGSB", "Method", "NonlinearCG", "RieszMap", "TruncatedNewton"]

if not TYPE_CHECKING:  # a type checker has the names from above
    __getattr__ = names_when_used(
        __name__,
        {
            "lbfgs": "LBFGS",
            "lbfgsb": "LBFGSB",
            "method": "Method RieszMap",
            "newton": "TruncatedNewton",
            "nonlinear_cg": "NonlinearCG",
        },
    )


def __dir__() -> list[str]:
    return list(__all__)
