"""The arguments of `least_squares`, checked: the start, bounds, scales and tolerances, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mpishard.arguments import integer, number, shown
from mpishard.inverse.residuals import Rows
from mpishard.inverse.result import OptimizeResult, count_of, pair_of_bounds
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.elements import whole_bounds, whole_elements
from mpishard.minimizers.least_squares import Options, State, levenberg_marquardt, reflective, strictly_inside

_METHODS = ("trf", "lm")
_FLOAT = np.dtype(np.float64)


@dataclass(frozen=True)
class LeastSquaresSettings:
    """The arguments that the ways to find a step share."""

    unknowns: Unknowns
    start: np.ndarray  # flat, in the order that the user sees
    lower: np.ndarray
    upper: np.ndarray
    method: str
    options: Options
    loss: Any
    f_scale: float
    steps: np.ndarray | None
    verbose: int
    bounds: Any  # as they were given; those of a FlatParameters are checked where it is minimised
    is_scaled: bool  # x_scale is given

    @classmethod
    def checked(
        cls,
        unknowns: Unknowns,
        bounds: Any,
        method: Any,
        tolerances: tuple[Any, Any, Any],
        x_scale: Any,
        loss: Any,
        f_scale: Any,
        diff_step: Any,
        max_nfev: Any,
        verbose: Any,
    ) -> LeastSquaresSettings:
        size, tree = unknowns.given_size, unknowns.tree
        if tree is not None and tree.complex_leaf is not None:
            raise ValueError("x0 is complex, and least_squares takes real numbers; give real and imaginary parts apart")
        start = np.array(unknowns.given, np.float64)
        if method not in _METHODS:
            raise ValueError(f"method={shown(method)} must be 'trf' or 'lm'; there is no other")
        lower, upper = np.full(size, -np.inf), np.full(size, np.inf)
        if unknowns.parameters is None:
            lower, upper = _bounds(bounds, unknowns)
            _check_start(start, lower, upper)
            start = strictly_inside(start, lower, upper, 1e-10)
        if method == "lm":
            if np.isfinite(lower).any() or np.isfinite(upper).any():
                raise ValueError("method='lm' takes no bounds; method='trf' does")
            if not (isinstance(loss, str) and loss == "linear"):
                raise ValueError(f"method='lm' takes loss='linear' only, got {shown(loss)}; method='trf' takes all")
        f_scale = number("f_scale", f_scale, above=0)
        ftol, xtol, gtol = (
            0.0 if each is None else number(name, each, least=0)
            for name, each in zip(("ftol", "xtol", "gtol"), tolerances, strict=True)
        )
        max_nfev = 100 * unknowns.total if max_nfev is None else integer("max_nfev", count_of(max_nfev), least=1)
        if integer("verbose", verbose, least=0) > 2:
            raise ValueError(f"verbose={verbose} must be 0, 1 or 2")
        if tree is not None:
            x_scale = x_scale if isinstance(x_scale, str) else tree.by_name("x_scale", x_scale)
            diff_step = tree.by_name("diff_step", diff_step)
        scale = _scale(x_scale, method, unknowns)
        steps = whole_elements("diff_step", diff_step, unknowns.option_specs, _FLOAT, missing=0)
        options = Options(ftol, xtol, gtol, max_nfev, scale)
        is_scaled = x_scale is not None
        return cls(unknowns, start, lower, upper, method, options, loss, f_scale, steps, verbose, bounds, is_scaled)

    @property
    def cg_start(self) -> str:
        """What the start is, for messages, if it is for conjugate gradients alone; else empty."""
        if self.unknowns.has_fields:
            return "a Partition as x0"
        return "" if self.unknowns.parameters is None else "an x0 with names"

    # Where ranks have options of their own elements, what was given decides, and not its values: all must decide alike.

    @property
    def scales(self) -> bool:
        """Return True if the unknowns have a scale."""
        if self.options.scale is None or self.unknowns.is_cut_by_application:
            return self.options.scale is not None and self.is_scaled
        return bool((self.options.scale != 1).any())

    @property
    def limits(self) -> bool:
        """Return True if there are bounds, those of a FlatParameters apart."""
        if self.unknowns.has_fields:
            return not _is_unbounded(self.bounds)
        return bool(np.isfinite(self.lower).any() or np.isfinite(self.upper).any())

    def iterate(self, rows: Rows, saved: State | None) -> Iterator[State]:
        """The method at work, from the start or from a saved state."""
        start = self.start if saved is None else saved
        if self.method == "lm":
            return levenberg_marquardt(rows.cost, rows.gram, start, self.options)
        return reflective(rows.cost, rows.gram, start, self.lower, self.upper, self.options)

    def with_trees(self, result: OptimizeResult) -> OptimizeResult:
        """A result with trees where it has vectors like the start, if that is a tree of whole arrays."""
        if self.unknowns.tree is not None and not self.unknowns.has_fields:
            like_x0 = {name: result[name] for name in ("x", "grad", "active_mask") if name in result}
            result |= {name: self.unknowns.like_x0(vector) for name, vector in like_x0.items()}
        return result

    def active_mask(self, x: np.ndarray) -> np.ndarray:
        """-1 where the lower bound is active, 1 where the upper one is, else 0."""
        share = self.options.xtol
        mask = np.zeros(len(x), int)
        below, above = x - self.lower, self.upper - x
        with np.errstate(invalid="ignore"):  # of infinities, which are not used
            low = np.isfinite(self.lower) & (below <= np.minimum(above, share * np.maximum(1, abs(self.lower))))
            high = np.isfinite(self.upper) & (above <= np.minimum(below, share * np.maximum(1, abs(self.upper))))
        mask[low], mask[high] = -1, 1
        return mask


def _bounds(bounds: Any, unknowns: Unknowns) -> tuple[np.ndarray, np.ndarray]:
    if unknowns.tree is not None:
        bounds = pair_of_bounds(unknowns.tree.bounds(bounds), unknowns.total)
    elif hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        bounds = bounds.lb, bounds.ub
    elif isinstance(bounds, str | Mapping) or not hasattr(bounds, "__len__") or len(bounds) != 2:
        raise ValueError(
            f"bounds={shown(bounds)} must be (lower, upper), each a number or an array of {unknowns.given_size} "
            "elements, or scipy.optimize.Bounds"
        )
    pair = whole_bounds(bounds if isinstance(bounds, Mapping) else tuple(bounds), unknowns.option_specs, _FLOAT)
    lower, upper = (
        np.full(unknowns.given_size, none) if each is None else np.broadcast_to(each, unknowns.given_size).copy()
        for each, none in zip(pair, (-np.inf, np.inf), strict=True)
    )
    return lower, upper


def _is_unbounded(bounds: Any) -> bool:
    """Return True for bounds that `_bounds` takes if they are none, or one pair of infinite numbers."""
    pair = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") and hasattr(bounds, "ub") else bounds
    if pair is None or isinstance(pair, Mapping):
        return pair is None
    return all(each is None or (isinstance(each, Real) and math.isinf(each)) for each in pair)


def _check_start(start: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> None:
    equal = np.flatnonzero(lower >= upper)
    if len(equal):
        k = int(equal[0])
        raise ValueError(
            f"the bounds of element {k} are {lower[k]:g} and {upper[k]:g}: each lower bound must be below the upper "
            "one, and bounds are (lower, upper), not a pair for each element; leave elements that keep their value out "
            "of x0"
        )
    outside = np.flatnonzero((start < lower) | (start > upper))
    if len(outside):
        k = int(outside[0])
        raise ValueError(
            f"x0 is outside of the bounds: element {k} is {start[k]:g}, its bounds are {lower[k]:g} and {upper[k]:g}; "
            "start inside, as from numpy.clip(x0, lower, upper)"
        )


def _scale(x_scale: Any, method: str, unknowns: Unknowns) -> np.ndarray | None:
    if x_scale is None:
        x_scale = "jac" if method == "lm" else 1.0
    if isinstance(x_scale, str):
        if x_scale != "jac":
            raise ValueError(f"x_scale={shown(x_scale)} must be 'jac', or positive numbers")
        return None
    try:
        scale = whole_elements("x_scale", x_scale, unknowns.option_specs, _FLOAT, missing=1)
    except TypeError as error:
        raise ValueError(str(error)) from None  # as SciPy
    assert scale is not None
    if not ((scale > 0) & np.isfinite(scale)).all():
        k = int(np.flatnonzero(~((scale > 0) & np.isfinite(scale)))[0])
        raise ValueError(f"x_scale must be positive and finite, but element {k} is {scale[k]:g}")
    return scale
