"""Minimisation along directions of descent: all but the choice of the direction.

The vectors of the state begin with the last iterate (`base`), its gradient, and the direction from there. The point is
the trial point of the line search; between a line search and the next direction it serves as working memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from mpishard.minimizers.bounds import Bounds
from mpishard.minimizers.line_search.search import LineSearch, LineSearchState, Verdict
from mpishard.minimizers.method import (
    LARGEST_PRODUCT,
    Limits,
    Method,
    Minimizer,
    Progress,
    Wanted,
    converged,
    exhausted,
    out_of_range,
)
from mpishard.minimizers.space import Space

Array = Any
_RESOLVED, _NOISE = 4, 1000  # units in the last place of a value
_STEEP = 0.5  # part of the first slope of a search that is left at a wall of values that are not finite
SLOTS = ("base", "base_gradient", "direction")
_BASE, _GRADIENT, _DIRECTION = range(len(SLOTS))


class Descent(Minimizer):
    """A minimisation by line searches. Methods are collective over the ranks of the space.

    Rows of `vectors` are as `Method.slots`, which begin with `SLOTS`.
    """

    def __init__(
        self, method: Method, line_search: LineSearch[Any], space: Space, vectors: Array, point: Array, limits: Limits
    ) -> None:
        super().__init__(method.slots, space, vectors, point, limits)
        self.versions = [0] * len(method.slots)
        self.method = method
        self.line_search = line_search
        self.bounds = Bounds(limits, space)
        self.base, self.base_gradient, self._direction = vectors[_BASE], vectors[_GRADIENT], vectors[_DIRECTION]
        self._search: LineSearchState | None = None
        self._gradient_top = self._direction_top = 0.0
        self._met_wall = False  # a line search since the last steepest descent has ended at a wall
        self.added_slope = 0.0  # what a penalty adds to slopes along the direction

    @property
    def longest_finite_step(self) -> float:
        return super().longest_finite_step if self._search is None else self._search.farthest

    def begin(self) -> int:
        self.progress, self.stop_reason, self.wanted, self._search = Progress(), "", Wanted.GRADIENT, None
        self._met_wall = False
        (outside,) = self.space.count(self.bounds.outside(self.point))
        self.bounds.project(self.point)
        self.base[:] = self.point
        self.note_written()
        return outside

    def tell(self, value: float, gradient: Array) -> None:
        if self.wanted is not Wanted.GRADIENT:
            raise ValueError(f"this minimisation has ended ({self.stop_reason}); begin() starts another at its point")
        value, gradient, top = self._objective(value, self.bounds.moving(gradient))
        finite = math.isfinite(value) and math.isfinite(top)
        self.progress = replace(self.progress, evaluations=self.progress.evaluations + 1, accepted=False)
        if self._search is not None and not finite:
            self.progress = replace(self.progress, not_finite=self.progress.not_finite + 1)
        if self._search is not None:
            self._advance_line_search(self._search, value, gradient, top, finite)
        elif finite:
            self._end_iteration(value, gradient, top, math.nan, 0.0)
        else:
            self._end("not finite")

    def to_metadata(self) -> dict[str, Any]:
        return {
            "progress": asdict(self.progress),
            "wanted": self.wanted.value,
            "stop_reason": self.stop_reason,
            "gradient_top": self._gradient_top,
            "direction_top": self._direction_top,
            "met_wall": self._met_wall,
            "line_search": self._search.to_metadata() if self._search else None,
            "search": type(self.line_search).__name__,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            progress = Progress(**metadata["progress"])
            wanted, reason = Wanted(metadata["wanted"]), str(metadata["stop_reason"])
            tops = float(metadata["gradient_top"]), float(metadata["direction_top"])
            search = metadata["line_search"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(self.method).__name__}: the saved state cannot be restored: {error!r}") from None
        own, theirs = type(self.line_search).__name__, str(metadata.get("search", ""))
        if search is not None and theirs not in ("", own):
            raise ValueError(
                f"the saved state is within a line search by {theirs}, but {type(self.method).__name__} has the "
                f"line_search {own}; give the one of then, or take the parameters alone as a start"
            )
        self._search = self.line_search.restore(search) if search is not None else None
        self.progress, self.wanted, self.stop_reason = progress, wanted, reason
        self._gradient_top, self._direction_top = tops
        self._met_wall = bool(metadata.get("met_wall", False))

    def reopen(self) -> None:
        super().reopen()
        self._search = None

    # -- what each method of descent has for itself --------------------------------------------------------------------

    @abstractmethod
    def forget(self) -> bool:
        """Drop what was learned from earlier iterates; return True if there was anything."""

    @abstractmethod
    def _learn(self, gradient: Array, step: float, slope: float, slope_before: float) -> None:
        """Take note of the step from the base to the point, before the base goes there."""

    def _objective(self, value: float, gradient: Array) -> tuple[float, Array, float]:
        """The value and gradient that are minimised, from those of the function at the point; the largest element."""
        (top,) = self.space.largest(gradient)
        return value, gradient, top

    @property
    def gradient(self) -> Array:
        """The gradient by which the base is measured; it may be in working memory."""
        return self.base_gradient

    def _further_vectors(self) -> tuple[Array, ...]:
        """Vectors to measure with the base and its gradient, in one all-reduce; called after the base has moved."""
        return ()

    def _take_further_tops(self, tops: list[float]) -> None:
        """Take the largest elements of `_further_vectors`."""

    def _continues_after_small_change(self) -> bool:
        """Return True to continue, maybe in another way, where the last iteration has changed too little."""
        return False

    @abstractmethod
    def _find_direction(self) -> tuple[float, float, float, float]:
        """Write the direction; return its largest element, its slope, the first step to try and the longest one."""

    # -- the loop of line searches -------------------------------------------------------------------------------------

    def _advance_line_search(
        self, search: LineSearchState, value: float, gradient: Array, top: float, finite: bool
    ) -> None:
        """Give a trial to the line search, and act on its verdict.

        The trial is taken, and ends the iteration, if the search accepts it, or if it is the best one when evaluations
        or the search itself come to an end.  Else another step is tried; without one the method forgets what it has
        learned and begins another search, and where there is nothing to forget the minimisation ends.
        """
        slope = math.nan
        if finite:
            (slope,) = self.space.dots([(gradient, self._direction)], [top * self._direction_top])
            slope += self.added_slope
        state, verdict = self.line_search.advance(search, value, slope)
        self._search, left = state, self.method.maxfun - self.progress.evaluations
        best = finite and value < search.start.value and state.best.step == search.step
        # With one evaluation left, the best trial is taken or asked for again, so that it is not lost.
        taken = verdict is Verdict.ACCEPT or (best and left <= 1 and verdict is Verdict.EVALUATE)
        if verdict is not Verdict.ACCEPT and _is_rounding(search, value, self.epsilon):
            # The decrease that the model expects is below the rounding errors, and so no line search can find it.
            taken = abs(slope) < abs(search.start.slope) and value <= search.start.value
            if not taken:
                if self._forgets_for_wall():
                    self._begin_line_search()
                else:
                    self._end("decrease")
                return
        at_wall = math.isfinite(state.wall) and slope < _STEEP * search.start.slope
        self._met_wall = self._met_wall or at_wall
        if taken:
            self._learn(gradient, search.step, slope, search.start.slope)
            self._end_iteration(value, gradient, top, search.start.value, search.step, at_wall=at_wall)
        elif verdict is Verdict.FAIL and best:
            failure = "" if self.forget() else _failure(state, self.epsilon)
            self._end_iteration(value, gradient, top, math.nan, search.step, failure)
        elif left <= 0:
            self._end("evaluations")
        elif state.best.step > 0 and not search.reason and (verdict is Verdict.FAIL or left == 1):
            self._search = replace(state, step=state.best.step)
            self._try_step(state.best.step)
        elif verdict is Verdict.EVALUATE:
            self._try_step(state.step)
        elif self.forget():
            self._begin_line_search()
        else:
            self._end(_failure(state, self.epsilon))

    def _forgets_for_wall(self) -> bool:
        """Forget, and return True, before a small change counts as convergence, if line searches have ended at a wall.

        What was learned there may lead along the wall, or only in steps that are too short to reach it again.
        """
        met, self._met_wall = self._met_wall, False
        return met and self.forget()

    def _end_iteration(
        self,
        value: float,
        gradient: Array,
        top: float,
        value_before: float,
        step: float,
        failure: str = "",
        at_wall: bool = False,
    ) -> None:
        """The point becomes the base, after an iteration or the first evaluation.

        Without a value before (NaN), only a small gradient is convergence. If the iteration ended `at_wall`, beyond
        which values are not finite, a small change is none. `failure` is the reason to end without convergence.
        """
        # The direction, too: `_measure` and `_begin_line_search` write there.
        self.note_written(_BASE, _GRADIENT, _DIRECTION)
        self._gradient_top = top
        base_top, riesz_top, projected_top = self._move_base(gradient)
        started = self._search is not None
        self.progress = replace(
            self.progress,
            iterations=self.progress.iterations + started,
            value=value,
            gradient_norm=riesz_top,
            projected_norm=projected_top,
            step_length=step,
            accepted=started,
        )
        self._search = None
        reason = converged(self.method, self.progress, value_before, step * self._direction_top, base_top)
        if reason in ("decrease", "step") and self._continues_after_small_change():
            reason = ""
        if reason in ("decrease", "step") and at_wall:
            reason = "wall"
        elif reason in ("decrease", "step") and self._forgets_for_wall():
            reason = ""
        reason = reason or failure or exhausted(self.method, self.progress)
        if reason:
            self._end(reason)
        elif self.stochastic and started:
            self.point[:] = self.base
        else:
            self._begin_line_search()

    def _move_base(self, gradient: Array) -> tuple[float, float, float]:
        """The point becomes the base; returns the numbers of `_measure`."""
        self.base[:] = self.point
        self.base_gradient[:] = gradient
        return self._measure()

    def _measure(self) -> tuple[float, float, float]:
        """The largest elements of the base, of its gradient, and of its projected gradient."""
        gradient = self.gradient
        bounded, riesz = self.bounds.any, self.limits.riesz(gradient)
        measured = gradient if riesz is None else riesz
        vectors = [self.base] if self.method.xtol else []
        if measured is not self.base_gradient:
            vectors.append(measured)
        if bounded:
            vectors.append(self.bounds.projected_gradient(self.base, measured, self._direction))
        more = self._further_vectors()
        found = iter(self.space.largest(*vectors, *more) if vectors or more else ())
        base_top = next(found) if self.method.xtol else 0.0
        riesz_top = self._gradient_top if measured is self.base_gradient else next(found)
        projected_top = next(found) if bounded else riesz_top
        self._take_further_tops(list(found))
        return base_top, riesz_top, projected_top

    def _begin_line_search(self) -> None:
        """Begin a line search from the base."""
        self.note_written(_DIRECTION)
        while True:
            self._direction_top, *numbers = self._find_direction()
            self._search = self.line_search.begin(self.progress.value, *numbers)
            if not self._search.reason:
                self._try_step(self._search.step)
                return
            if not self.forget():
                break
        tops = self._gradient_top, self._direction_top
        in_range = 0 < tops[0] * tops[1] < LARGEST_PRODUCT or min(tops) == 0
        self._end("line search" if in_range else out_of_range(self.progress))

    def _try_step(self, step: float) -> None:
        self.bounds.advance(self.point, self.base, self._direction, step)

    def _end(self, reason: str) -> None:
        """The last iterate is the result; before the first iteration, the start."""
        self.point[:] = self.base
        self.wanted, self.stop_reason = Wanted.NOTHING, reason


def _is_rounding(search: LineSearchState, value: float, epsilon: float) -> bool:
    """Return True if rounding hides the decrease that was expected of the first step.

    A value has errors of some units in its last place, but of many more where it is a sum of larger terms.
    """
    start, unit = search.start, epsilon * abs(search.start.value)
    hidden = search.evaluations == 0 and -start.slope * search.step <= _RESOLVED * unit
    return hidden and abs(value - start.value) <= _NOISE * unit


def _failure(search: LineSearchState, epsilon: float) -> str:
    """The reason for which a minimisation ends whose line search has failed."""
    if search.unbounded or search.not_finite:
        return "unbounded" if search.unbounded else "not finite"
    # Steps that are short enough for finite values may be too short to be felt in the value.
    felt = -search.start.slope * search.farthest > _NOISE * epsilon * abs(search.start.value)
    return "wall" if math.isfinite(search.wall) and (search.best.step > 0 or not felt) else "line search"
