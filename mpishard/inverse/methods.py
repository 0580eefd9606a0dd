"""Methods by SciPy's names, and their options by SciPy's names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpishard import minimizers
from mpishard.arguments import flag, integer, number, shown
from mpishard.minimizers.method import Method

# The class of each method, and the options that SciPy's `tol` sets.
_METHODS = {
    "L-BFGS-B": ("LBFGSB", ("ftol", "gtol")),
    "L-BFGS": ("LBFGS", ("ftol", "gtol")),
    "CG": ("NonlinearCG", ("gtol",)),
    "Newton-CG": ("TruncatedNewton", ("gtol", "xtol")),
    "trust-ncg": ("TruncatedNewton", ("gtol",)),
}
# Methods that in SciPy do not stop for a small decrease, take so many iterations for each unknown, and evaluate freely.
_FREE = {"cg", "newton-cg", "trust-ncg"}
_ITERATIONS = 200
# SciPy's names of options that are called otherwise here.
_RENAMED = {"maxcor": "history", "initial_trust_radius": "initial_radius", "max_trust_radius": "max_radius"}
# Fields of methods that are arguments of `minimize`.
_ARGUMENTS = {"bounds", "fixed", "inner_product", "preconditioner"}


@dataclass(frozen=True)
class LoopOptions:
    """Options of the loop and not of the method.

    Parameters
    ----------
    disp : bool
        Whether to show a table.
    maxtime : float or None
        Stop after the iteration in which so many seconds are over.
    """

    disp: bool = False
    maxtime: float | None = None


def make_method(
    method: str | Method, options: Mapping[str, Any] | None, tol: float | None, size: int, **elements: Any
) -> tuple[Method, LoopOptions]:
    """A method with its options.

    Parameters
    ----------
    method : str or Method
        SciPy's name, in upper or lower case; or a method, whose options stay except for those in `options`.
    options : mapping, optional
        By SciPy's names, or by those of the method's class.
    tol : float, optional
        The default of the tolerances that stop the method.
    size : int
        Number of unknowns, over all ranks.
    **elements
        ``bounds``, ``fixed``, ``inner_product``, ``preconditioner``; None leaves that of the method.

    Returns
    -------
    (Method, LoopOptions)
        The method, and what concerns the loop.

    Raises
    ------
    ValueError, TypeError
        If there is no such method or option, or one is invalid.
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
            given[own] = value
        elif name not in {field.name for field in fields(LoopOptions)}:
            raise ValueError(f"{_label(method)} has no option {name!r}; its options are {', '.join(_known(names))}")
    for name, value in elements.items():
        if value is None:
            continue
        if name not in names:
            raise ValueError(f"{_label(method)} takes no {name}; method='L-BFGS-B' does")
        given[name] = value
    if isinstance(method, Method):
        return replace(method, **given), loop
    made: Method = kind(**given)
    return made, loop


def _class_of(method: str | Method) -> tuple[type[Method], tuple[str, ...]]:
    if isinstance(method, Method):
        kind = type(method)
        return kind, next((each for name, each in _METHODS.values() if name == kind.__name__), ("ftol", "gtol"))
    if not isinstance(method, str):
        raise TypeError(f"method={shown(method)} must be one of {', '.join(_METHODS)}, or a method such as LBFGSB()")
    known = {name.lower(): entry for name, entry in _METHODS.items()}
    if method.lower() not in known:
        raise ValueError(f"there is no method {method!r}; there are {', '.join(_METHODS)}")
    name, tolerances = known[method.lower()]
    return getattr(minimizers, name), tolerances


def _loop_options(options: Mapping[str, Any]) -> LoopOptions:
    disp, maxtime = options.get("disp"), options.get("maxtime")
    if disp is not None:
        disp = bool(integer("disp", disp)) if not isinstance(disp, bool) else flag("disp", disp)
    if maxtime is not None:
        maxtime = number("maxtime", maxtime, least=0, finite=False)
    return LoopOptions(bool(disp), maxtime)


def _known(names: set[str]) -> list[str]:
    scipys = {own: name for name, own in _RENAMED.items()}
    own = {scipys.get(name, name) for name in names - _ARGUMENTS}
    return sorted(own | {field.name for field in fields(LoopOptions)})


def _label(method: str | Method) -> str:
    return f"method {method!r}" if isinstance(method, str) else type(method).__name__
