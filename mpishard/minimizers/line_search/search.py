"""The base of line searches: a search takes value and slope at a step, and returns what comes next.

A search looks for a step along a direction of descent at which a function of one number is low enough. It calls
nothing: the caller evaluates. Its whole state is frozen, of plain numbers, so that an interrupted search continues
elsewhere with the next evaluation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from mpishard.arguments import integer, shown

_FAR = 10  # steps, each longer than the one before, after which a value that still falls has no limit
NOT_FINITE_LIMIT = 10  # times in a row that a search shortens its step where value or slope are not finite


class Verdict(Enum):
    """The answer of a line search to a value and a slope."""

    EVALUATE = "evaluate"  # at the state's step
    ACCEPT = "accept"  # the step that was just evaluated
    FAIL = "fail"  # for the state's reason; the state's best step may still be of use


class Trial(NamedTuple):
    """A step, with the value and the slope there."""

    step: float
    value: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class LineSearchState:
    """Where a line search stands.

    Parameters
    ----------
    step : float
        Where the next evaluation is wanted; after `Verdict.ACCEPT` the accepted step.
    most : float
        The longest step; may be infinite.
    start : Trial
        Step 0.
    best : Trial
        The lowest value so far, `start` included.
    wall : float
        The shortest step beyond `best` at which value or slope were not finite.
    evaluations : int
        How many it has taken.
    not_finite : int
        How many of the last ones in a row were not finite.
    farthest : float
        The longest step at which value and slope were finite.
    unbounded : bool
        Whether the value fell without limit, as far as can be seen.
    reason : str
        Why it has failed, in plain words; empty unless it has.
    """

    step: float
    most: float
    start: Trial
    best: Trial
    wall: float = math.inf
    evaluations: int = 0
    not_finite: int = 0
    farthest: float = 0.0
    unbounded: bool = False
    reason: str = ""

    @property
    def anchor(self) -> float:
        """The step from which the next one goes out, and to which it is shortened where the function is not finite."""
        return self.best.step

    def to_metadata(self) -> dict[str, Any]:
        """All fields by name: numbers, strings and lists of three floats; every bit is kept.

        Returns
        -------
        dict
            Infinities and NaN are among the floats.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, Trial) else value for name, value in values.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """The state that gave this metadata.

        Parameters
        ----------
        metadata : mapping
            From `to_metadata` of a state of this class.

        Returns
        -------
        LineSearchState
            Equal to it.

        Raises
        ------
        ValueError
            If a field is missing or has another type.
        """
        values = {}
        for field in fields(cls):
            if field.name not in metadata:
                raise ValueError(f"{cls.__name__}: {field.name} is missing; it has {', '.join(sorted(metadata))}")
            try:
                values[field.name] = _READERS[str(field.type)](metadata[field.name])
            except (TypeError, ValueError):
                found = f"{field.name}={metadata[field.name]!r}"
                raise ValueError(f"{cls.__name__}: {found} must be of type {field.type}") from None
        return cls(**values)


# By the name of a field's type.
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "Trial": lambda values: Trial(*map(float, values)),
}

State = TypeVar("State", bound=LineSearchState)


@dataclass(frozen=True, kw_only=True)
class LineSearch(ABC, Generic[State]):
    """Base of the line searches: frozen records of options, with the rules by which a state changes.

    A caller begins, evaluates at ``state.step``, and tells the search until its verdict is no longer
    `Verdict.EVALUATE`::

        state = search.begin(value, slope, first_step, most)
        verdict = Verdict.FAIL if state.reason else Verdict.EVALUATE
        while verdict is Verdict.EVALUATE:
            state, verdict = search.advance(state, *evaluate(state.step))

    Where value or slope are NaN or infinite, the step is shortened towards the last good one, at most ten times
    in a row.

    Parameters
    ----------
    maxls : int
        The most evaluations, without the one at step 0.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    maxls: int = 20

    state_type: ClassVar[type[LineSearchState]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "maxls", integer(f"{type(self).__name__}: maxls", self.maxls, least=1))

    def begin(self, value: float, slope: float, first_step: float, most: float = math.inf) -> State:
        """The state before the first evaluation.

        Parameters
        ----------
        value, slope : float
            At step 0: of the function, and of its derivative along the direction.
        first_step : float
            The first step to try; it is cut to `most`.
        most : float
            The longest step that is allowed.

        Returns
        -------
        LineSearchState
            With a reason if no search is possible: the slope is not negative, no step is allowed, or a number is not
            finite.
        """
        value, slope, most = float(value), float(slope), float(most)
        start = Trial(0.0, value, slope)
        step = min(float(first_step), most)
        reason = ""
        if not (math.isfinite(value) and math.isfinite(slope)):
            reason = f"value {value:g} or slope {slope:g} at the start is not finite"
        elif slope >= 0:
            reason = f"the slope along the direction is {slope:g}, not negative"
        elif not (0 < step < math.inf and most > 0):
            reason = f"the first step is {step:g}, and must be positive and finite (the longest is {most:g})"
        return self._first(self.state_type(step=step, most=most, start=start, best=start, reason=reason))  # type: ignore[arg-type]

    def advance(self, state: State, value: float, slope: float) -> tuple[State, Verdict]:
        """Take value and slope at ``state.step``, and decide what comes next.

        Parameters
        ----------
        state : LineSearchState
            From `begin` or `advance`.
        value, slope : float
            At its step; NaN or infinite outside of the domain of the function.

        Returns
        -------
        state : LineSearchState
            With the next step, the accepted one, or the reason of the failure.
        verdict : Verdict
            What comes next.
        """
        if state.reason:
            return state, Verdict.FAIL
        evaluations, trial = state.evaluations + 1, Trial(state.step, float(value), float(slope))
        if math.isfinite(trial.value) and math.isfinite(trial.slope):
            best = trial if trial.value < state.best.value else state.best
            farthest = max(state.farthest, trial.step)
            state = replace(state, evaluations=evaluations, best=best, not_finite=0, farthest=farthest)
            state, verdict = self._decide(state, trial)
        else:
            state, verdict = self._shorten(replace(state, evaluations=evaluations), trial)
        if verdict is Verdict.EVALUATE and state.evaluations >= self.maxls:
            falls = trial.slope < 0 and state.best.step == state.farthest == trial.step
            state = replace(state, unbounded=state.unbounded or (falls and self.maxls >= _FAR))
            return failed(state, f"no acceptable step in {self.maxls} evaluations (maxls)")
        return state, verdict

    def restore(self, metadata: Mapping[str, Any]) -> State:
        """The state of this search that gave this metadata.

        Parameters
        ----------
        metadata : mapping
            From `LineSearchState.to_metadata`.

        Returns
        -------
        LineSearchState
            Equal to it.

        Raises
        ------
        ValueError
            If a field is missing or has another type.
        """
        return self.state_type.from_metadata(metadata)  # type: ignore[return-value]

    def _first(self, state: State) -> State:
        """Complete the first state with the further fields of this search."""
        return state

    @abstractmethod
    def _decide(self, state: State, trial: Trial) -> tuple[State, Verdict]:
        """The state and verdict after a finite trial at the state's step; the caller counts and limits evaluations."""

    def _shorten(self, state: State, trial: Trial) -> tuple[State, Verdict]:
        """Go back towards the anchor: by a half, then to a quarter of what is left, then an eighth, and so on."""
        count = state.not_finite + 1
        state = replace(state, not_finite=count, unbounded=state.unbounded or trial.value == -math.inf)
        if state.anchor < trial.step:
            state = replace(state, wall=min(state.wall, trial.step))
        step = state.anchor + (trial.step - state.anchor) * math.ldexp(1.0, -count)
        if count > NOT_FINITE_LIMIT or step == state.anchor:
            where = f"step {trial.step:g} (value {trial.value:g}, slope {trial.slope:g})"
            return failed(state, f"the function is still not finite at {where} after {count} such steps")
        return replace(state, step=step), Verdict.EVALUATE


def check_line_search(owner: str, given: Any, known: Iterable[str]) -> None:
    """Raise ValueError unless this is a line search or a known name; `owner` is the method with this option."""
    names = tuple(known)
    if not isinstance(given, LineSearch) and given not in names:
        raise ValueError(f"{owner}: line_search={shown(given)} must be {', '.join(map(repr, names))} or a line search")


def failed(state: State, reason: str) -> tuple[State, Verdict]:
    """The state with the reason of its failure, in plain words, and `Verdict.FAIL`."""
    return replace(state, reason=reason), Verdict.FAIL


def settle(state: State, trial: Trial, why: str) -> tuple[State, Verdict]:
    """End at a trial that no further one can improve: accept it if it has decreased the value, or else fail."""
    if trial.step > 0 and trial.value < state.start.value:
        return replace(state, step=trial.step), Verdict.ACCEPT
    return failed(state, f"{why}, and the value is not below the one at the start")
