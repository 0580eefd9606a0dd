"""Stragglers by what processes have noted."""

from __future__ import annotations

import numpy as np

from mpishard.record.reading import Process, stragglers


def process(rank: int, busy: list[float], first: int = 1, pipeline: int = 0) -> Process:
    """Two lines, as two flushes leave them."""
    middle = len(busy) // 2
    lines = [
        {"rank": rank, "pipeline": pipeline, "step": first, "busy": busy[:middle], "seconds": busy[:middle]},
        {"rank": rank, "pipeline": pipeline, "step": first + middle, "busy": busy[middle:], "seconds": busy[middle:]},
    ]
    return Process(f"node-7-{1000 + rank}", lines)


def test_the_slow_one_is_named() -> None:
    found = stragglers([process(0, [0.1] * 20), process(1, [0.2] * 20), process(2, [0.1] * 20)])
    (slow,) = found
    assert (slow.rank, slow.host) == (1, "node-7")
    assert slow.slower == 2 and "rank 1 on node-7 computes 200 ms a step, 2 times" in str(slow)


def test_noise_names_nobody() -> None:
    random = np.random.default_rng(0)
    everybody = [process(rank, random.uniform(0.08, 0.16, 20).tolist()) for rank in range(8)]
    assert stragglers(everybody) == []


def test_slow_now_and_then_is_no_straggler() -> None:
    assert stragglers([process(0, [0.1] * 20), process(1, [0.1, 0.3] * 10), process(2, [0.1] * 20)]) == []


def test_a_few_steps_tell_nothing() -> None:
    assert stragglers([process(0, [0.1] * 4), process(1, [0.9] * 4)]) == []


def test_stages_are_compared_with_their_own() -> None:
    fast = [process(rank, [0.1] * 20) for rank in (0, 1)]
    slow_stage = [process(rank, [0.3] * 20, pipeline=1) for rank in (2, 3)]
    assert stragglers([*fast, *slow_stage]) == []
    (found,) = stragglers([*fast, *slow_stage, process(4, [0.6] * 20, pipeline=1)])
    assert found.rank == 4


def test_who_has_stopped_writing_is_left_out() -> None:
    assert (
        stragglers([process(0, [0.1] * 20, first=100), process(1, [0.9] * 20), process(2, [0.1] * 20, first=100)]) == []
    )


def test_the_slowest_comes_first() -> None:
    everybody = [process(rank, [0.1 + 0.1 * max(0, rank - 4)] * 20) for rank in range(7)]
    assert [slow.rank for slow in stragglers(everybody)] == [6, 5]
