"""Pipeline schedules as data: the actions of every pipeline rank, in order."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """One pass of one micro-batch through one model chunk, in one direction.

    Parameters
    ----------
    kind : {"F", "B", "I", "W"}
        Forward, whole backward, or the backward in two parts: the input gradient (for which the previous stage waits)
        and the weight gradient (for which no stage waits).
    microbatch : int
        Counts from 0.
    chunk : int
        Number of the model chunk on this rank, from 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Schedule:
    """A program for every pipeline rank.

    Each rank runs its program in order.  A model chunk is a *virtual stage*, numbered ``chunk * stages + rank``, so
    that consecutive virtual stages are on consecutive ranks.  An F waits for the activation of the previous virtual
    stage, a B or I for the gradient of the next one.  The result of an action is sent without blocking.

    Parameters
    ----------
    name : str
        Its name in messages.
    stages : int
        Pipeline ranks.
    chunks : int
        Model chunks per rank.
    microbatches : int
        Micro-batches of a step, at least 1.
    programs : tuple of tuple of Action
        One program per rank.  Each runs F of every micro-batch and chunk once, and then either B, or I and later W;
        in a schedule for evaluation F alone.

    Raises
    ------
    ValueError
        If an action is missing, doubled, out of range, or comes before an action of its rank that it needs.  Deadlocks
        between ranks are not checked here; see `find_deadlock`.
    TypeError
        If `stages`, `chunks` or `microbatches` is no whole number.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    programs: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for field in ("stages", "chunks", "microbatches"):
            positive(field, getattr(self, field))
        if len(self.programs) != self.stages:
            raise ValueError(f"schedule {self.name!r} has {len(self.programs)} programs for {self.stages} stages")
        object.__setattr__(self, "programs", tuple(tuple(Action(*item) for item in one) for one in self.programs))
        for rank in range(self.stages):
            self._check_program(rank)

    @property
    def virtual_stages(self) -> int:
        """Model chunks in the whole pipeline."""
        return self.stages * self.chunks

    @property
    def trains(self) -> bool:
        """True if the schedule has backwards; False: it is for evaluation."""
        return any(action.kind != "F" for program in self.programs for action in program)

    def virtual_stage(self, rank: int, action: Action) -> int:
        """Number of the model chunk in the whole pipeline, counted from 0.

        Parameters
        ----------
        rank : int
            Pipeline rank.
        action : Action
            Of the program of that rank.

        Returns
        -------
        int
            ``chunk * stages + rank``.
        """
        return action.chunk * self.stages + rank

    def label(self, action: Action) -> str:
        """Short name, such as ``F3``; with several chunks ``F3.1``, the chunk after the point.

        Parameters
        ----------
        action : Action
            Of any program of this schedule.

        Returns
        -------
        str
            For figures and messages.
        """
        return str(action) if self.chunks == 1 else f"{action.kind}{action.microbatch}.{action.chunk}"

    def _check_program(self, rank: int) -> None:
        prefix = f"schedule {self.name!r}, rank {rank}"
        position: dict[Action, int] = {}
        for index, action in enumerate(self.programs[rank]):
            if action.kind not in KINDS:
                raise ValueError(f"{prefix}: {action.kind!r} is no kind of action; kinds are {', '.join(KINDS)}")
            for value, limit, what in (
                (action.microbatch, self.microbatches, "micro-batches"),
                (action.chunk, self.chunks, "chunks"),
            ):
                if not 0 <= value < limit:
                    raise ValueError(f"{prefix}: {action!r} is out of range: there are {limit} {what}, counted from 0")
            if action in position:
                raise ValueError(
                    f"{prefix}: {self.label(action)} is run twice, as actions {position[action]} and {index}"
                )
            position[action] = index
        trains = self.trains
        for microbatch in range(self.microbatches):
            for chunk in range(self.chunks):
                self._check_order(prefix, trains, position, microbatch, chunk)

    def _check_order(self, prefix: str, trains: bool, position: dict[Action, int], microbatch: int, chunk: int) -> None:
        forward, whole, inputs, weights = (Action(kind, microbatch, chunk) for kind in KINDS)
        apart = inputs in position or weights in position
        if whole in position and apart:
            part = self.label(inputs if inputs in position else weights)
            raise ValueError(f"{prefix}: {self.label(whole)} and {part} do the same work; use B, or I and W")
        order = [forward]
        if trains:
            order += [inputs, weights] if apart else [whole]
        for action in order:
            if action not in position:
                instead = " (or I and W)" if action.kind == "B" else ""
                raise ValueError(f"{prefix}: {self.label(action)}{instead} is missing")
        for first, second in zip(order[:-1], order[1:], strict=True):
            if position[first] > position[second]:
                raise ValueError(f"{prefix}: {self.label(second)} comes before {self.label(first)}, which it needs")


def positive(name: str, value: object) -> None:
    """Raise unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
