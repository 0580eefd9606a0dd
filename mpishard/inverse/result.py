"""The result of a minimisation, with the fields and the status numbers of SciPy's ``OptimizeResult``.

With it the parts of `minimize` that users see: bounds, methods and options by SciPy's names, the table of progress.
"""

from __future__ import annotations

import difflib
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpishard import minimizers
from mpishard.arguments import flag, integer, number, shown
from mpishard.io import terminal
from mpishard.minimizers.method import FAILURES, Method, Minimizer, Progress
from mpishard.minimizers.penalty import AtReference

# By reason of the end SciPy's status, and a sentence with the values of `Progress` and the method's options, and with
# "gradient" or "subgradient".
# 0: converged, 1: a limit is reached, 2: it cannot continue, 99: stopped by the callback, -1: it has not ended.
_OUTCOMES = {
    "": (-1, "not ended: it wants another evaluation"),
    "gradient": (0, "converged: the projected {gradient}'s largest element {projected_norm:.3g} <= gtol={gtol:g}"),
    "decrease": (
        0,
        "converged: the last iteration decreased the value by at most ftol={ftol:g}, relatively; the projected "
        "{gradient}'s largest element is {projected_norm:.3g}",
    ),
    "step": (
        0,
        "converged: the last iteration moved no element by more than xtol={xtol:g}, relatively; the projected "
        "{gradient}'s largest element is {projected_norm:.3g}",
    ),
    "rank": (0, "ended: the products of both passes are known"),
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
# Such trials are shortened, and a minimum at the edge of such a region may be taken for one of the function.
_NOT_FINITE = (
    "the value or gradient was NaN or infinite at {} trial points of line searches, whose steps were shortened"
)
_HELD = (
    "the start is held at bounds beyond which descent leads; if it should move, the gradient may have the wrong sign: "
    "mpishard.check_gradient tests it"
)


# Attributes that a result has on request, and what is said where one is missing.
_ASKED_FOR = {
    "hess_inv": ", which options={'hess_inv': True} asks for",
    "allvecs": ", which options={'return_all': True} asks for",
}


class OptimizeResult(dict[str, Any]):
    """The result of `minimize`: a dictionary whose items are attributes too.

    Where ``scipy.optimize`` is imported, it is an instance of SciPy's ``OptimizeResult``, too.

    Parameters
    ----------
    *given
        A mapping, or pairs of names and values, as for ``dict``.
    **items
        Further values by name.

    Attributes
    ----------
    x : 1-D array, FlatParameters, or dict, list or tuple of arrays
        The best iterate, in the structure of the start; a FlatParameters is the start itself.
    fun : float
        The value there.
    jac : 1-D array, or dict, list or tuple of arrays
        The gradient there, of a FlatParameters flat; with a start that is split over ranks this rank's part.  With
        `L1` and `GroupL1` terms the subgradient of least norm, with `TotalVariation` that of its dual field: it is 0 at
        a minimum.
    nit, nfev, njev, nhev : int
        Iterations, values, gradients and Hessian products.
    status : int
        0: converged; 1: a limit on iterations, evaluations or time is reached; 2: the method cannot continue; 99:
        the callback or Ctrl-C has stopped it; -1: it has not ended.
    success : bool
        Whether it converged.
    message : str
        Why it has ended, in words.
    hess_inv : InverseHessian
        With ``options={"hess_inv": True}``: the inverse Hessian there, see `mpishard.inverse.InverseHessian`.
    allvecs : list
        With ``options={"return_all": True}``: copies of the start and of the iterate after each iteration.
    at_reference : int
        With `L1` terms: how many of the elements with such a term are exactly zero, or at its reference; with `GroupL1`
        terms, how many groups.
    duality_gap : float
        With `TotalVariation` terms: by how much the terms at `x` are above their linear form by `jac`.
    """

    def __new__(cls, *given: Any, **items: Any) -> OptimizeResult:
        theirs = getattr(sys.modules.get("scipy.optimize"), "OptimizeResult", None)
        return super().__new__(_joined(theirs) if cls is OptimizeResult and theirs is not None else cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizeResult, (dict(self),)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            way = _ASKED_FOR.get(name, "")
            raise AttributeError(f"the result has no {name!r}{way}; it has {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def __dir__(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        with np.printoptions(threshold=12, edgeitems=2):  # arrays are abbreviated as in a result of SciPy
            short = {**self, "allvecs": f"{len(self['allvecs'])} iterates"} if "allvecs" in self else self
            lines = {name: repr(value).replace("\n", "\n" + " " * (width + 2)) for name, value in short.items()}
        return "\n".join(f"{name:>{width}}: {line}" for name, line in lines.items())


@cache
def _joined(theirs: type) -> type[OptimizeResult]:
    """The class of results that are SciPy's too."""
    return type("OptimizeResult", (OptimizeResult, theirs), {"__doc__": OptimizeResult.__doc__})


def result_of(
    x: Any,
    gradient: Any,
    reason: str,
    method: Method,
    progress: Progress,
    hint: str = "",
    at_reference: AtReference | None = None,
    duality_gap: float | None = None,
) -> OptimizeResult:
    """The result of a minimisation that has ended for this reason.

    `x` is the best iterate, and `gradient` that there, which this function makes NaN where no value was finite.
    `reason` is of `Minimizer.stop_reason`, or "callback" or "seconds", and empty while the minimisation continues;
    `hint` goes into the message: what may be wrong, such as the ranks whose value or gradient is not finite.
    `at_reference` and `duality_gap` are those of the `Minimizer`.
    """
    if math.isnan(progress.value):
        gradient[...] = math.nan
    status, text = _OUTCOMES.get(reason, (2, f"failed: {reason}"))
    if reason == "not finite":
        text += ", also after shorter steps" if progress.evaluations > 1 else " at the start"
    values = {name: getattr(method, name) for name in ("gtol", "ftol", "xtol", "maxiter", "maxfun")}
    hints = [hint] if hint else []
    if progress.asymmetry > _ASYMMETRIC and reason != "gradient":
        hints.append(_NOT_SYMMETRIC.format(progress.asymmetry))
    if reason == "gradient" and not progress.iterations and progress.gradient_norm > method.gtol:
        hints.append(_HELD)
    if progress.not_finite and reason != "not finite":
        hints.append(_NOT_FINITE.format(progress.not_finite))
    found: dict[str, Any] = {}
    values["gradient"] = "gradient"
    counts = ""
    if at_reference is not None:
        found["at_reference"], values["gradient"] = at_reference.here, "subgradient"
        where = "zero" if at_reference.is_zero else "at its reference"
        counts = f"; {at_reference.here} of {at_reference.total} {at_reference.what} are exactly {where}"
    if duality_gap is not None:
        found["duality_gap"], values["gradient"] = duality_gap, "subgradient"
        counts = f"; the duality gap is {duality_gap:.3g}"
    message = text.format(projected_norm=progress.projected_norm, **values) + (f": {'; '.join(hints)}" if hints else "")
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
        message=message + counts,
        **found,
    )


class Ranks(Protocol):
    """The ranks of a minimisation, each with its part of the vectors of the method."""

    @property
    def world(self) -> Any: ...

    @property
    def minimizer(self) -> Minimizer: ...

    def gather(self, vector: Any) -> Any: ...

    def own(self, given: Any) -> Any: ...


class MinimizationOutcome(NamedTuple):
    """The result of a minimisation, the reason for its end in a word, and the ranks, which still have its vectors."""

    result: OptimizeResult
    progress: Progress
    reason: str
    ranks: Ranks


# Bounds in the forms that SciPy knows, and by tensor name, as the pair that a method takes.

_FORMS = (
    "a pair (lower, upper) for each element of x0, one pair of numbers or arrays for all of them, "
    "scipy.optimize.Bounds(lower, upper), or such pairs by tensor name"
)


def pair_of_bounds(bounds: Any, size: int, is_part: bool = False) -> Any:
    """Lower and upper bounds of all elements: numbers or flat arrays, infinite without a bound; None for None.

    A sequence of as many pairs as there are elements is read as SciPy does: a pair for each element, also for two
    elements. A mapping gives such pairs by tensor name. Two arrays for a part of the elements (`is_part`) are all lower
    and all upper bounds, also where it has two. Raises TypeError or ValueError for other forms.
    """
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        return {name: _ends(_pair(pair, f"bounds of {name!r}")) for name, pair in bounds.items()}
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        return _ends((bounds.lb, bounds.ub))
    if isinstance(bounds, Iterator):  # such as a zip
        bounds = list(bounds)
    if isinstance(bounds, str) or not isinstance(bounds, Sequence | np.ndarray):
        raise TypeError(f"bounds={shown(bounds)} must be {_FORMS}")
    are_sides = is_part and len(bounds) == 2 and not isinstance(bounds, np.ndarray)
    are_sides = are_sides and any(isinstance(each, np.ndarray) for each in bounds)
    if len(bounds) == size and not are_sides and all(_is_pair(each) for each in bounds):
        return tuple(
            np.array([_number(each[side], index, none) for index, each in enumerate(bounds)], np.float64)
            for side, none in enumerate((-np.inf, np.inf))
        )
    if len(bounds) == size and size != 2:
        index = next(index for index, each in enumerate(bounds) if not _is_pair(each))
        raise ValueError(f"bounds[{index}]={shown(bounds[index])} is no pair (lower, upper); give {_FORMS}")
    if len(bounds) != 2:
        raise ValueError(f"bounds have {len(bounds)} entries, but x0 has {size} elements; give {_FORMS}")
    return _ends((bounds[0], bounds[1]))


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if hasattr(value, "lb") and hasattr(value, "ub"):
        return value.lb, value.ub
    if not _is_pair(value):
        raise ValueError(f"{what} must be a pair (lower, upper), got {shown(value)}")
    return value[0], value[1]


def _ends(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """The pair with infinities for None."""
    lower, upper = pair
    return (-np.inf if lower is None else lower, np.inf if upper is None else upper)


def _is_pair(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == (2,)
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _number(value: Any, index: int, none: float) -> float:
    if value is None:
        return none
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"bounds of element {index} must be numbers or None, got {shown(value)}") from None


# Methods by SciPy's names, and their options by SciPy's names.

# The class of each method, and the options that SciPy's `tol` sets.
_METHODS = {
    "L-BFGS-B": ("LBFGSB", ("ftol", "gtol")),
    "L-BFGS": ("LBFGS", ("ftol", "gtol")),
    "CG": ("NonlinearCG", ("gtol",)),
    "Newton-CG": ("TruncatedNewton", ("gtol", "xtol")),
    "trust-ncg": ("TruncatedNewton", ("gtol",)),
}
# Methods without SciPy's limits of L-BFGS-B: no `ftol`, no `maxfun`, and a `maxiter` that grows with the unknowns.
_FREE = {"cg", "newton-cg", "trust-ncg"}
_ITERATIONS = 200  # for each unknown
# SciPy's names of options that are called otherwise here.
_RENAMED = {"maxcor": "history", "initial_trust_radius": "initial_radius", "max_trust_radius": "max_radius"}
_COUNTS = {"maxiter", "maxfun", "maxls", "history", "maxcg"}
# Fields of methods that are arguments of `minimize`.
_ARGUMENTS = {"bounds", "fixed", "inner_product", "preconditioner", "l1", "penalty"}
# SciPy's names for the conditions of Wolfe, and those of the line searches.
_WOLFE = {"c1": ("ftol", "delta"), "c2": ("gtol", "sigma")}
# What is here for methods and options of SciPy, TAO and ROL that are not.
_SECOND_ORDER = "'trust-ncg', with hessp= or hess="
_ELSEWHERE = {
    "bfgs": "'L-BFGS-B', whose options={'maxcor': n} keeps n pairs in place of a matrix",
    "lmvm": "'L-BFGS'",
    "blmvm": "'L-BFGS-B'",
    "tnc": "'L-BFGS-B', or with bounds and Hessian products 'trust-ncg'",
    **dict.fromkeys(("nls", "ntr", "ntl", "bnls", "bntr", "bntl", "trust-krylov", "dogleg"), _SECOND_ORDER),
    "trust-exact": _SECOND_ORDER,
    "slsqp": "'L-BFGS-B' for bounds, and mpishard.augmented_lagrangian for constraints",
    "trust-constr": "'trust-ncg' for bounds, and mpishard.augmented_lagrangian for constraints",
    "almm": "mpishard.augmented_lagrangian",
    **dict.fromkeys(("pounders", "brgn", "lm", "trf", "dogbox"), "mpishard.least_squares"),
    **dict.fromkeys(("nelder-mead", "powell", "cobyla", "cobyqa"), "'L-BFGS-B' with jac='2-point'"),
}
_STEPS = "jac='2-point' and '3-point' take SciPy's default step for each element, and for others jac=function; "
_INSTEAD = {
    "eps": _STEPS,
    "finite_diff_rel_step": _STEPS,
    "iprint": "disp=True shows a line an iteration; ",
    "workers": "with mesh=mpishard.Mesh() the ranks share the elements of jac='2-point'; ",
    "norm": "gtol bounds the largest element of the gradient; ",
    "maxfev": "maxfun limits the evaluations; ",
    "eta": "a step is accepted where the value falls; ",
}


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop and not of the method."""

    disp: bool = False  # show a table
    maxtime: float | None = None  # stop after the iteration in which this number of seconds is over
    retries: int = 0  # how often an evaluation that has failed is tried again
    hess_inv: bool = False  # the result has the inverse Hessian
    return_all: bool = False  # the result has all iterates

    def expect_no_more_results(self, call: str) -> None:
        """Raise ValueError if the result is to have more than that of a call has."""
        for name in ("hess_inv", "return_all"):
            if getattr(self, name):
                raise ValueError(f"{call} has no option {name!r}, which is of minimize")


def make_method(
    method: str | Method, options: Mapping[str, Any] | None, tol: float | None, size: int, **elements: Any
) -> tuple[Method, LoopOptions]:
    """A method with its options, by SciPy's names or those of its class, and the options of the loop.

    A name is SciPy's, in upper or lower case; a Method keeps its options except for those in `options`. `tol` is the
    default of the tolerances that stop the method, `size` the number of unknowns over all ranks; `elements` are
    ``bounds``, ``l1``, ``penalty``, ``fixed``, ``inner_product`` and ``preconditioner``, None for that of the method.
    Raises ValueError or TypeError if a method or option does not exist or is invalid.
    """
    kind, tolerances = _class_of(method)
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise TypeError(f"options={shown(options)} must be a dictionary of names and values")
    names = {field.name for field in fields(kind)}
    given: dict[str, Any] = {}
    if isinstance(method, str) and method.lower() in _FREE:
        given = {"ftol": 0.0, "maxiter": _ITERATIONS * size, "maxfun": sys.maxsize}
    if tol is not None:
        value = number("tol", tol, least=0)
        given |= {name: value for name in tolerances if name in names}
    loop = _loop_options(options)
    for name, value in options.items():
        own = _RENAMED.get(name, name)
        if own in names - _ARGUMENTS:
            given[own] = count_of(value) if own in _COUNTS else value
        elif name not in {field.name for field in fields(LoopOptions)} and not (name in _WOLFE and "maxls" in names):
            known = _known(names)
            hint = _INSTEAD.get(name) or _nearest(name, known)
            raise ValueError(f"{_label(method)} has no option {name!r}; {hint}its options are {', '.join(known)}")
    for name, value in elements.items():
        if value is None:
            continue
        what = {"l1": "L1 terms", "penalty": f"{getattr(value, 'kinds', name)} terms"}.get(name, name)
        if name not in names:
            raise ValueError(f"{_label(method)} takes no {what}; method='L-BFGS-B' does")
        if name in ("l1", "penalty") and any(getattr(method, each, None) is not None for each in ("l1", "penalty")):
            raise ValueError(f"{_label(method)} and regularized both have {what}: give all of them to regularized")
        given[name] = value
    made: Method = replace(method, **given) if isinstance(method, Method) else kind(**given)
    return _with_wolfe(made, options), loop


def _with_wolfe(method: Any, options: Mapping[str, Any]) -> Any:
    """The method, whose line search has SciPy's `c1` and `c2` if these are among the options."""
    given = {name: number(name, options[name]) for name in _WOLFE if name in options}
    if not given:
        return method
    search = method.search
    ours = {field.name for field in fields(search)}
    names = {name: next(each for each in own if each in ours) for name, own in _WOLFE.items()}
    c1, c2 = (given.get(name, getattr(search, own)) for name, own in names.items())
    if not 0 < c1 < c2 < 1:
        left = [name for name in names if name not in given]
        remedy = f"; {left[0]} is the default of this method, give both" if left else ""
        raise ValueError(f"'c1' and 'c2' must have 0 < c1 < c2 < 1, got c1={c1:g} and c2={c2:g}{remedy}")
    return replace(method, line_search=replace(search, **{names["c1"]: c1, names["c2"]: c2}))


def _nearest(name: Any, known: Sequence[str]) -> str:
    """The name that was perhaps meant, as a part of a message; empty if none is near."""
    near = difflib.get_close_matches(str(name).lower(), [each.lower() for each in known], 1)
    return "".join(f"perhaps {each!r} is meant; " for each in known if each.lower() in near)


def count_of(value: Any) -> Any:
    """A number such as 1e4, as SciPy takes it for a count, as an int; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _class_of(method: str | Method) -> tuple[type[Method], tuple[str, ...]]:
    if isinstance(method, Method):
        kind = type(method)
        return kind, next((each for name, each in _METHODS.values() if name == kind.__name__), ("ftol", "gtol"))
    if not isinstance(method, str):
        raise TypeError(f"method={shown(method)} must be one of {', '.join(_METHODS)}, or a method such as LBFGSB()")
    known = {name.lower(): entry for name, entry in _METHODS.items()}
    if method.lower() not in known:
        ours = _ELSEWHERE.get(method.lower())
        hint = f"take {ours}; " if ours else _nearest(method, list(_METHODS))
        raise ValueError(f"there is no method {method!r}; {hint}there are {', '.join(_METHODS)}")
    name, tolerances = known[method.lower()]
    return getattr(minimizers, name), tolerances


def _loop_options(options: Mapping[str, Any]) -> LoopOptions:
    disp, maxtime = options.get("disp"), options.get("maxtime")
    if disp is not None:
        disp = bool(integer("disp", disp)) if not isinstance(disp, bool) else flag("disp", disp)
    if maxtime is not None:
        maxtime = number("maxtime", maxtime, least=0, finite=False)
    more = {name: bool(flag(name, options.get(name, False))) for name in ("hess_inv", "return_all")}
    return LoopOptions(bool(disp), maxtime, integer("retries", options.get("retries", 0), least=0), **more)


def reject_keywords(call: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError if any keyword is left that nothing has taken; one of an option says where it belongs."""
    for name in given:
        own = _RENAMED.get(name, name)
        is_option = name in _WOLFE or any(
            own in {field.name for field in fields(kind)}
            for kind in (LoopOptions, *(getattr(minimizers, name) for name, _ in _METHODS.values()))
        )
        hint = f'; it is an option: options={{"{name}": {shown(given[name])}}}' * is_option
        raise TypeError(f"{call} got an unexpected keyword argument {name!r}{hint}")


def _known(names: set[str]) -> list[str]:
    scipys = {own: name for name, own in _RENAMED.items()}
    own = {scipys.get(name, name) for name in names - _ARGUMENTS} | (set(_WOLFE) if "maxls" in names else set())
    return sorted(own | {field.name for field in fields(LoopOptions)})


def _label(method: str | Method) -> str:
    return f"method {method!r}" if isinstance(method, str) else type(method).__name__


# The table of a minimisation: a line an iteration.

_HEAD = f"{'iteration':>9} {'value':>17} {'|g|':>9} {'|proj g|':>9} {'step':>9} {'evaluations':>11} {'seconds':>9}"


class Table:
    """Writes a line for the start and for each iteration, with its header before the first one, where it `shows`."""

    def __init__(self, shows: bool) -> None:
        self._shows = shows
        self._has_head = False
        self._began = time.perf_counter()

    def row(self, progress: Progress) -> None:
        if not self._shows:
            return
        if not self._has_head:
            terminal.show(_HEAD)
            self._has_head = True
        seconds = time.perf_counter() - self._began
        terminal.show(
            f"{progress.iterations:>9} {progress.value:>17.10e} {progress.gradient_norm:>9.2e} "
            f"{progress.projected_norm:>9.2e} {progress.step_length:>9.2e} {progress.evaluations:>11} {seconds:>9.2f}"
        )

    def end(self, message: str) -> None:
        if self._shows:
            terminal.show(message)
