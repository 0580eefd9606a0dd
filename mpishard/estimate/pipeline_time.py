"""Micro-batches in flight on a pipeline rank, time of all micro-batches in the pipeline, and idle time."""

from __future__ import annotations

import functools

from mpishard.pipeline.schedule import SCHEDULES, make_schedule, simulate

# Most actions of all ranks for which a schedule is simulated; for more the papers' formulas are used.
_SIMULATED = 1024


@functools.lru_cache(maxsize=4096)
def peak_in_flight(schedule: str, stages: int, microbatches: int, chunks: int, rank: int) -> tuple[int, ...]:
    """By chunk: the largest number of micro-batches whose activations `rank` keeps at once."""
    live, peak = [0] * chunks, [0] * chunks
    for action in SCHEDULES[schedule](rank, stages, microbatches, chunks):
        if action.kind == "F":
            live[action.chunk] += 1
            peak[action.chunk] = max(peak[action.chunk], live[action.chunk])
        elif action.kind in "BW":
            live[action.chunk] -= 1
    return tuple(peak)


@functools.lru_cache(maxsize=256)
def makespan(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: float = 0.0,
) -> tuple[float, float]:
    """Seconds that all micro-batches take in the pipeline, and the fraction of that time in which ranks are idle.

    Parameters
    ----------
    schedule : str
    stages, microbatches, chunks : int
        Pipeline ranks, micro-batches, chunks per rank.
    forward, backward : tuple of float
        Seconds of one micro-batch by virtual stage; zb-h1 does one half of a backward first and the other half later.
    transfer : float
        Seconds per message between stages.

    Notes
    -----
    Small schedules are simulated.  For others, with t the time of a micro-batch on a rank and p stages, the idle time
    is (p - 1) t for GPipe and 1F1B, a chunk's part of it for the interleaved schedule (Narayanan et al. 2021, section
    2.2), and (p - 1) (F + I - W) for ZB-H1 (Qi et al. 2023, section 2.3), on top of the work of the slowest rank.
    """
    on_rank = [sum(forward[rank::stages]) + sum(backward[rank::stages]) for rank in range(stages)]
    if stages == 1:
        return microbatches * on_rank[0], 0.0
    if stages * microbatches * chunks * 2 <= _SIMULATED:
        halves = [time / 2 for time in backward]
        timeline = simulate(
            _schedule(schedule, stages, microbatches, chunks),
            forward=forward,
            backward=backward,
            input_gradient=halves,
            weight_gradient=halves,
            transfer=transfer,
        )
        return timeline.makespan, timeline.bubble_fraction
    slowest = max(on_rank)
    idle = sum(on_rank) - slowest
    if schedule == "interleaved":
        idle /= chunks
    elif schedule == "zb-h1":
        idle *= sum(forward) / (sum(forward) + sum(backward))
    total = microbatches * slowest + idle + 2 * (stages * chunks - 1) * transfer
    return total, 1 - microbatches * sum(on_rank) / (stages * total)


_schedule = functools.lru_cache(maxsize=256)(make_schedule)
