"""What came of a minimisation, with the fields and the status numbers of SciPy's ``OptimizeResult``."""

from __future__ import annotations

import math
from typing import Any

from mpishard.minimizers.method import Method
from mpishard.minimizers.minimizer import Progress
from mpishard.minimizers.stopping import FAILURES

# Why a minimisation has ended: SciPy's status, and a sentence with the values of `Progress` and the method's options.
# 0: converged, 1: a limit is reached, 2: it cannot go on, 99: stopped by the callback, -1: it has not ended.
_OUTCOMES = {
    "": (-1, "not ended: it wants another evaluation"),
    "gradient": (0, "converged: the projected gradient's largest element {projected_norm:.3g} <= gtol={gtol:g}"),
    "decrease": (0, "converged: the last iteration decreased the value by less than ftol={ftol:g}, relatively"),
    "step": (0, "converged: the last iteration moved no element by more than xtol={xtol:g}, relatively"),
    "iterations": (1, "stopped: the number of iterations reached maxiter={maxiter}"),
    "evaluations": (1, "stopped: the number of evaluations reached maxfun={maxfun}"),
    "seconds": (1, "stopped: the time maxtime is over"),
    **{reason: (2, f"failed: {text}") for reason, text in FAILURES.items()},
    "signal": (99, "stopped: Ctrl-C, or the end of the job"),
    "callback": (99, "stopped: the callback raised StopIteration or returned True"),
}
# Products of a Hessian, or of finite differences, are symmetric to this share of their size.
_ASYMMETRIC = 1e-3
_NOT_SYMMETRIC = (
    "the Hessian products are not symmetric, a'(H b) and b'(H a) differ by {:.1g} of their size, which conjugate "
    "gradients need; mpishard.check_gradient(fun, x, hessp=hessp) tests them"
)


class OptimizeResult(dict[str, Any]):
    """The result of `minimize`: a dictionary whose items are attributes too.  Not collective.

    Attributes
    ----------
    x : 1-D array or FlatParameters
        The best iterate; the parameters themselves if the start had tensor names.
    fun : float
        The value there.
    jac : 1-D array
        The gradient there; with a start that is split over ranks this rank's part.
    nit, nfev, njev, nhev : int
        Iterations, values, gradients and Hessian products.
    status : int
        0: converged; 1: a limit on iterations, evaluations or time is reached; 2: the method cannot go on; 99: the
        callback or Ctrl-C has stopped it; -1: it has not ended.
    success : bool
        Whether it converged.
    message : str
        Why it has ended, in words.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}; it has {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def __dir__(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:>{width}}: {value!r}" for name, value in self.items())


def result_of(
    x: Any, gradient: Any, reason: str, method: Method, progress: Progress, culprits: str = ""
) -> OptimizeResult:
    """The result of a minimisation that has ended for this reason.

    Not collective.

    Parameters
    ----------
    x : 1-D array or FlatParameters
        The best iterate.
    gradient : 1-D array
        There; this function makes it NaN where no value was finite.
    reason : str
        Of `Minimizer.stop_reason`, or ``"callback"`` or ``"seconds"``; empty while it goes on.
    method : Method
        Its options are in the message.
    progress : Progress
        How far it has come.
    culprits : str
        Whose value or gradient is not finite, if that is known.

    Returns
    -------
    OptimizeResult
        With all of its fields.
    """
    if math.isnan(progress.value):
        gradient[...] = math.nan
    status, text = _OUTCOMES.get(reason, (2, f"failed: {reason}"))
    values = {name: getattr(method, name) for name in ("gtol", "ftol", "xtol", "maxiter", "maxfun")}
    if progress.asymmetry > _ASYMMETRIC and reason != "gradient":
        culprits += "; " * bool(culprits) + _NOT_SYMMETRIC.format(progress.asymmetry)
    message = text.format(projected_norm=progress.projected_norm, **values) + (f": {culprits}" if culprits else "")
    return OptimizeResult(
        x=x,
        fun=progress.value,
        jac=gradient,
        nit=progress.iterations,
        nfev=progress.evaluations,
        njev=progress.evaluations,
        nhev=progress.products,
        status=status,
        success=status == 0,
        message=message,
    )
