"""The estimate of one layout, and a table of the estimates of many layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from mpishard.arguments import config_or_kwargs, entries, integer, reject_unknown, shown
from mpishard.estimate.layouts import Layout, expect_architecture
from mpishard.estimate.memory import EstimateSettings, Memory, StageEstimate
from mpishard.estimate.profile import TYPICAL, MachineProfile
from mpishard.estimate.sizes import BatchShape, Workload, virtual_stages_of
from mpishard.estimate.times import Times, makespan
from mpishard.nn.architecture import DecoderArchitecture


@dataclass(frozen=True)
class Estimate:
    """Cost of a layout.

    No method is collective.

    Parameters
    ----------
    layout : Layout
        As it was given; with one tensor rank there is no sequence parallelism.
    shape : BatchShape
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
    shape: BatchShape
    stages: tuple[StageEstimate, ...]
    compute: float
    communication: float
    update: float
    bubble_fraction: float

    @property
    def batch(self) -> int:
        """Sequences per data rank and step."""
        return self.shape.batch

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        return self.shape.length

    @property
    def microbatches(self) -> int:
        """Number of micro-batches."""
        return self.shape.microbatches

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
        """The estimate as plain numbers, for JSON.

        Returns
        -------
        dict
            The fields of layout and batch, seconds, bytes, and a list of the stages.
        """
        return {
            **asdict(self.layout),
            "ranks": self.layout.ranks,
            **asdict(self.shape),
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
    architecture: DecoderArchitecture,
    layout: Layout | None = None,
    workload: Workload | None = None,
    profile: MachineProfile = TYPICAL,
    **options: Any,
) -> Estimate:
    """Estimate the cost of training a model in a layout.

    Needs neither the ranks nor the memory.

    Parameters
    ----------
    architecture : DecoderArchitecture
        The sizes of the model.
    layout : Layout, optional
        Default: one rank.
    workload : Workload, optional
        Default: one sequence.
    profile : MachineProfile
        Speeds of the machine.
    **options : object
        Fields of `Layout` in place of `layout`, and of `Workload` in place of `workload`: ``estimate(gpt, data=8,
        zero_stage=2, batch=4)``.

    Returns
    -------
    Estimate
        Memory, bytes and seconds by stage, and of the whole.

    Raises
    ------
    ValueError
        If the model does not allow this layout, or a number is too small.
    TypeError
        If an option is a field of neither, or is given in addition to the whole; or an argument is of another type.
    """
    expect_architecture(architecture)
    if not isinstance(profile, MachineProfile):
        raise TypeError(f"profile={shown(profile)} must be a MachineProfile")
    layout = config_or_kwargs("estimate()", "layout", Layout, layout, options)
    workload = config_or_kwargs("estimate()", "workload", Workload, workload, options)
    reject_unknown("estimate()", options)
    if layout.tensor == 1:
        layout = replace(layout, sequence_parallel=False)
    shape = workload.batch_shape(architecture, layout)
    rows, microbatches = shape.rows, shape.microbatches
    settings = EstimateSettings(architecture, layout, workload, shape)
    by_rank = virtual_stages_of(architecture, layout)
    times = Times(architecture, layout, profile, shape.length, workload.itemsize)
    mean_rows = -(-sum(rows) // microbatches)
    costs = {parts: settings.seconds(times, parts, mean_rows) for parts in set(by_rank)}
    pipeline = layout.pipeline
    stages = tuple(settings.stage(rank, parts, costs[parts]) for rank, parts in enumerate(by_rank))
    compute, bubble = makespan(
        layout.schedule,
        pipeline,
        microbatches,
        layout.chunks,
        tuple(stages[number % pipeline].forward[number // pipeline] for number in range(pipeline * layout.chunks)),
        tuple(stages[number % pipeline].backward[number // pipeline] for number in range(pipeline * layout.chunks)),
        times.message(mean_rows),
    )
    return Estimate(
        layout,
        shape,
        stages,
        compute,
        max(cost.data for cost in costs.values()),
        max(cost.update for cost in costs.values()),
        bubble,
    )


def table(
    candidates: Iterable[Layout],
    architecture: DecoderArchitecture,
    batch: int,
    workload: Workload | None = None,
    profile: MachineProfile = TYPICAL,
    **options: Any,
) -> list[Estimate]:
    """Estimate many layouts and sort them, the fastest first.

    Parameters
    ----------
    candidates : iterable of Layout
        For example from `layouts`.
    architecture : DecoderArchitecture
        The sizes of the model.
    batch : int
        Sequences per step over all data ranks, the same for all layouts, in place of `Workload.batch`.  The estimate is
        that of the data rank that has most of them.
    workload : Workload, optional
        As for `estimate`.
    profile : MachineProfile
        Speeds of the machine.
    **options : object
        Fields of `Workload` in place of `workload`; none of the layout.

    Returns
    -------
    list of Estimate
        Of equally fast ones that with less memory comes first.

    Raises
    ------
    ValueError, TypeError
        As `estimate`.
    """
    chosen, batch = entries("candidates", candidates, "Layouts"), integer("batch", batch)
    for layout in chosen:
        if not isinstance(layout, Layout):
            raise TypeError(f"candidates must be Layouts, got {shown(layout)}")
    workload = config_or_kwargs("table()", "workload", Workload, workload, options)
    reject_unknown("table()", options)
    found = [
        estimate(architecture, layout, replace(workload, batch=-(-batch // layout.data)), profile) for layout in chosen
    ]
    return sorted(found, key=lambda each: (each.step_time, each.memory.total))
