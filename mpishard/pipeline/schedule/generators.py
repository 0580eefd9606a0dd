"""The schedules of the papers, for any number of stages and micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

from mpishard.pipeline.schedule.actions import Action, Schedule, positive
from mpishard.pipeline.schedule.simulator import check_deadlock_free, simulate

# (rank, stages, micro-batches, chunks) -> the program of that rank
Generator = Callable[[int, int, int, int], list[Action]]

_ABSENT = -1


def gpipe(rank: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019), in the same order, so that no gradient waits long.

    Keeps the activations of all micro-batches.
    """
    order = range(microbatches)
    return [Action("F", index) for index in order] + [Action("B", index) for index in order]


def one_forward_one_backward(rank: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B with a flush (Narayanan et al. 2021, section 2.2.1; PipeDream-Flush in their earlier work).

    It takes as long as GPipe, but rank r keeps at most ``stages - r`` activations.
    """
    forwards = [Action("F", index) for index in range(microbatches)]
    backwards = [Action("B", index) for index in range(microbatches)]
    return _alternate(forwards, backwards, stages - 1 - rank)


def interleaved(rank: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2), in the order of Megatron-LM.

    The bubble is that of 1F1B divided by `chunks`.  A group of micro-batches, one per rank, passes one chunk before it
    passes the next.  The paper needs complete groups.  Here an incomplete group is laid out as if it were complete, and
    the missing micro-batches are then left out.  That adds no wait, so the program is as free of deadlock as one with
    complete groups, takes no longer and keeps no more.
    """
    order = [
        (microbatch, chunk)
        for group in _groups(stages, microbatches)
        for chunk in range(chunks)
        for microbatch in [*group, *[_ABSENT] * (stages - len(group))]
    ]
    forwards = [Action("F", microbatch, chunk) for microbatch, chunk in order]
    backwards = [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in order]
    program = _alternate(forwards, backwards, (chunks - 1) * stages + 2 * (stages - 1 - rank))
    return [action for action in program if action.microbatch != _ABSENT]


def zero_bubble_h1(rank: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, section 2.1): 1F1B with delayed weight gradients, which fill idle time.

    Rank r starts like 1F1B and delays `r` weight gradients, so that every rank keeps up to `stages` activations: as
    many as the first rank of 1F1B, and no more.  The delayed ones are computed at the end.
    """
    forwards = [Action("F", index) for index in range(microbatches)]
    inputs = [Action("I", index) for index in range(microbatches)]
    program: list[Action] = []
    for action in _alternate(forwards, inputs, stages - 1 - rank):
        program.append(action)
        if action.kind == "I" and action.microbatch >= rank:
            program.append(Action("W", action.microbatch - rank))
    return program + [Action("W", index) for index in range(max(0, microbatches - rank), microbatches)]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards to warm up, then forward and backward in turn, then the other backwards."""
    program = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        program += [forward, backward]
    return program + backwards[len(forwards[ahead:]) :]


def _groups(stages: int, microbatches: int) -> list[range]:
    """Runs of at most `stages` micro-batches: as few runs as possible, nearly equal, the smaller ones first.

    Of the cuts that were simulated this one has the least idle time.
    """
    count = -(-microbatches // stages)
    size, larger = divmod(microbatches, count)
    cuts = [index * size + max(0, index - (count - larger)) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


SCHEDULES: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule by name, proven free of deadlock.

    Parameters
    ----------
    name : {"gpipe", "1f1b", "interleaved", "zb-h1"}
        The keys of `SCHEDULES`.
    stages : int
        Pipeline ranks.
    microbatches : int
        May be fewer than the stages and need not be a multiple of them; see `warn_if_bubbly`.
    chunks : int
        Model chunks per rank: at least 2 for "interleaved", 1 for all others.

    Returns
    -------
    Schedule
        With a program for each stage.

    Raises
    ------
    ValueError
        For an unknown name, sizes below 1, or chunks that the schedule cannot use.
    TypeError
        If a size is no whole number.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        positive(what, value)
    check_chunks(name, chunks)
    programs = tuple(tuple(SCHEDULES[name](rank, stages, microbatches, chunks)) for rank in range(stages))
    schedule = Schedule(name, stages, chunks, microbatches, programs)
    check_deadlock_free(schedule)
    return schedule


def check_chunks(name: str, chunks: int) -> None:
    """Raise unless the schedule can use this number of chunks.

    Parameters
    ----------
    name : str
        As for `make_schedule`.
    chunks : int
        Model chunks per rank.

    Raises
    ------
    ValueError
        If "interleaved" has fewer than 2, or another schedule has not 1.
    """
    if name == "interleaved" and chunks < 2:
        raise ValueError(f"schedule 'interleaved' needs at least 2 chunks a rank, got {chunks}; with 1 it is '1f1b'")
    if name != "interleaved" and chunks != 1:
        raise ValueError(f"schedule {name!r} has 1 chunk a rank, got {chunks}; 'interleaved' takes more")


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards alone, for evaluation: chunks in the order of "interleaved".

    Parameters
    ----------
    stages : int
        Pipeline ranks.
    microbatches : int
        At least 1.
    chunks : int
        Model chunks per rank.

    Returns
    -------
    Schedule
        With the name ``"forward-only"``.

    Raises
    ------
    ValueError
        For sizes below 1.
    TypeError
        If a size is no whole number.
    """
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        positive(what, value)
    program = tuple(
        Action("F", microbatch, chunk)
        for group in _groups(stages, microbatches)
        for chunk in range(chunks)
        for microbatch in group
    )
    schedule = Schedule("forward-only", stages, chunks, microbatches, (program,) * stages)
    check_deadlock_free(schedule)
    return schedule


def warn_if_bubbly(schedule: Schedule) -> None:
    """Warn if there are fewer micro-batches than stages.

    The UserWarning names the bubble.  One rank is enough to call it.

    Parameters
    ----------
    schedule : Schedule
        Of at least one micro-batch.

    Warns
    -----
    UserWarning
        If ranks must be idle.
    """
    if schedule.microbatches < schedule.stages:
        idle = simulate(schedule).bubble_fraction
        warnings.warn(
            f"{schedule.microbatches} micro-batches for {schedule.stages} pipeline stages: with schedule "
            f"{schedule.name!r} the bubble is {idle:.0%} of the time (backward twice as long as forward); "
            f"use at least {schedule.stages} micro-batches",
            UserWarning,
            stacklevel=3,
        )
