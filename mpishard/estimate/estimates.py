"""The estimate of one layout, and a table of the estimates of many layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mpishard.estimate.holdings import parts_of, rows_of
from mpishard.estimate.layouts import Layout
from mpishard.estimate.pipeline_time import makespan
from mpishard.estimate.profile import TYPICAL, MachineProfile
from mpishard.estimate.stages import Memory, Plan, StageEstimate
from mpishard.estimate.times import Times
from mpishard.nn.architecture import Architecture


@dataclass(frozen=True)
class Estimate:
    """Cost of a layout.

    Parameters
    ----------
    layout : Layout
    batch, length, microbatches : int
        Sequences per data rank and step, tokens per sequence, and number of micro-batches.
    stages : tuple of StageEstimate
        By pipeline rank.
    compute, communication, update : float
        Seconds of a step: in the pipeline (with its bubble and the communication inside), between data ranks, and in
        the optimizer.  No overlap is assumed.
    bubble_fraction : float
        Fraction of the time in the pipeline in which ranks are idle.
    """

    layout: Layout
    batch: int
    length: int
    microbatches: int
    stages: tuple[StageEstimate, ...]
    compute: float
    communication: float
    update: float
    bubble_fraction: float

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return self.compute + self.communication + self.update

    @cached_property
    def memory(self) -> Memory:
        """Memory per rank of the stage that needs most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes that a rank sends in a step, by axis: the mean over the ranks of the stage that sends most."""
        ranks = self.layout.data * self.layout.tensor
        by_axis: dict[str, float] = {}
        for stage in self.stages:
            here: Counter[str] = Counter()
            for (axis, _), count in stage.sent.items():
                here[axis] += count
            for axis, count in here.items():
                by_axis[axis] = max(by_axis.get(axis, 0.0), count / ranks)
        return by_axis

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain numbers, for JSON."""
        return {
            **asdict(self.layout),
            "ranks": self.layout.ranks,
            "batch": self.batch,
            "length": self.length,
            "microbatches": self.microbatches,
            "step_time": self.step_time,
            "compute": self.compute,
            "communication": self.communication,
            "update": self.update,
            "bubble_fraction": self.bubble_fraction,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "sent": self.sent,
            "stages": [
                {
                    "rank": stage.rank,
                    "parameters": stage.parameters,
                    "memory": {**asdict(stage.memory), "total": stage.memory.total},
                    "sent": {f"{axis} {label}": count for (axis, label), count in stage.sent.items()},
                    "forward": stage.forward,
                    "backward": stage.backward,
                }
                for stage in self.stages
            ],
        }


def estimate(
    architecture: Architecture,
    *,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    zero_stage: int = 0,
    batch: int = 1,
    length: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    sequence_parallel: bool = False,
    recompute: bool = False,
    itemsize: int = 4,
    slots: int = 2,
    minimum_parameter_group_size: int = 1024,
    profile: MachineProfile = TYPICAL,
) -> Estimate:
    """Estimate the cost of training a model in a layout; needs neither the ranks nor the memory.

    Parameters
    ----------
    architecture : Architecture
    data, tensor, pipeline, zero_stage, schedule, chunks, sequence_parallel, recompute
        See `Layout`.
    batch : int
        Sequences of each data rank in a step.
    length : int, optional
        Tokens of a sequence; default the context length.
    microbatches : int, optional
        Default as in `mpishard.nn.GPT`: 1 without a pipeline, else 4 per pipeline rank.
    itemsize : int
        Bytes of each element of parameters, gradients, activations and optimizer state: 4 for float32.
    slots : int
        Elements of optimizer state per parameter: 2 for Adam.
    minimum_parameter_group_size : int
        As in `mpishard.ShardingConfiguration`.
    profile : MachineProfile
        Speeds of the machine.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If the model does not allow this layout, or a number is too small.
    """
    layout = Layout(data, tensor, pipeline, zero_stage, schedule, chunks, sequence_parallel and tensor > 1, recompute)
    length = architecture.context_length if length is None else length
    if not 1 <= length <= architecture.context_length:
        raise ValueError(f"sequences of {length} tokens, but the model takes 1 to {architecture.context_length}")
    microbatches = (1 if pipeline == 1 else 4 * pipeline) if microbatches is None else microbatches
    for what, value, least in (
        ("batch", batch, 0),
        ("microbatches", microbatches, 1),
        ("slots", slots, 0),
        ("itemsize", itemsize, 1),
    ):
        if value < least:
            raise ValueError(f"{what}={value} must be at least {least}")
    rows = rows_of(batch, microbatches, length)
    plan = Plan(architecture, layout, rows, length, itemsize, slots, minimum_parameter_group_size)
    by_rank = parts_of(architecture, layout)
    times = Times(architecture, layout, profile, length, itemsize)
    mean_rows = -(-sum(rows) // microbatches)
    costs = {parts: plan.seconds(times, parts, mean_rows) for parts in set(by_rank)}
    stages = tuple(plan.stage(rank, parts, costs[parts]) for rank, parts in enumerate(by_rank))
    compute, bubble = makespan(
        schedule,
        pipeline,
        microbatches,
        chunks,
        tuple(stages[number % pipeline].forward[number // pipeline] for number in range(pipeline * chunks)),
        tuple(stages[number % pipeline].backward[number // pipeline] for number in range(pipeline * chunks)),
        times.message(mean_rows),
    )
    return Estimate(
        layout,
        batch,
        length,
        microbatches,
        stages,
        compute,
        max(cost.data for cost in costs.values()),
        max(cost.update for cost in costs.values()),
        bubble,
    )


def table(
    candidates: Iterable[Layout],
    architecture: Architecture,
    batch: int,
    **options: Any,
) -> list[Estimate]:
    """Estimate many layouts and sort them, the fastest first.

    Parameters
    ----------
    candidates : iterable of Layout
        For example from `layouts`.
    architecture : Architecture
    batch : int
        Sequences per step over all data ranks, the same for all layouts.  The estimate is that of the data rank that
        has most of them.
    options
        As for `estimate`: length, microbatches, itemsize, slots, profile.
    """
    found = [
        estimate(
            architecture,
            data=layout.data,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            zero_stage=layout.zero_stage,
            schedule=layout.schedule,
            chunks=layout.chunks,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            batch=-(-batch // layout.data),
            **options,
        )
        for layout in candidates
    ]
    return sorted(found, key=lambda each: (each.step_time, each.memory.total))
