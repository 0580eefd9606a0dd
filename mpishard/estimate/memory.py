"""Memory and traffic of the ranks of one pipeline stage: `EstimateSettings.memory` is the memory of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from mpishard.estimate.layouts import Layout
from mpishard.estimate.sizes import (
    HALF_BYTES,
    Activations,
    BatchShape,
    Holding,
    VirtualStage,
    Workload,
    buckets_of,
    holding,
)
from mpishard.estimate.times import (
    Sent,
    Times,
    data_traffic,
    peak_in_flight,
    pipeline_traffic,
    replica_traffic,
    row_sum_traffic,
    tensor_traffic,
)
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.parameters.buckets import block_sizes

# Buckets or units that have memory at once: one bucket is filled while another is sent, one unit is used while the next
# is gathered.  The table of a tied model, which is in the first of them, has memory all the time.
_AT_ONCE = 2


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank of a pipeline stage that needs most.

    Parameters
    ----------
    parameters, gradients, state : int
        Permanent arrays: parameters, gradients and optimizer state, or the rank's shard of them.
    gathered : int
        Units of parameters that are gathered for use and then freed (ZeRO-3).
    buckets : int
        Gradients until they have been reduced to their owners (ZeRO-2 and 3).
    activations : int
        Activations of all micro-batches in flight.
    scratch : int
        Memory that layers use in turns.
    rounded : int
        Parameters in half precision, from the first product in a step to the end of the step, and the weights that
        cannot be multiplied as they lie there; on devices only, and none with ZeRO-3.
    """

    parameters: int
    gradients: int
    state: int
    gathered: int
    buckets: int
    activations: int
    scratch: int
    rounded: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class StageEstimate:
    """Memory, traffic and times of the ranks of one pipeline stage.

    Parameters
    ----------
    rank : int
        Rank on the pipeline axis.
    parameters : int
        Number of parameters on a rank.
    memory : Memory
        Memory of the rank that needs most.
    sent : Counter
        Bytes sent per step by (axis, label), as in the ledger, summed over all ranks of the stage.
    forward, backward : tuple of float
        Seconds of one micro-batch by chunk.
    """

    rank: int
    parameters: int
    memory: Memory
    sent: Sent
    forward: tuple[float, ...]
    backward: tuple[float, ...]


class Seconds(NamedTuple):
    """Seconds of a rank: (forward, backward) of a micro-batch by chunk; data axis and update per step."""

    chunks: list[tuple[float, float]]
    data: float
    update: float


@dataclass(frozen=True)
class EstimateSettings:
    """The settings of an estimate: arguments of `mpishard.estimate.estimate`, and the batch of a data rank."""

    architecture: DecoderArchitecture
    layout: Layout
    workload: Workload
    shape: BatchShape

    def held(self, parts: tuple[VirtualStage, ...]) -> Holding:
        """The local layout of the ranks that run `parts`."""
        return holding(self.architecture, parts, self.layout.tensor, self.layout.sequence_parallel)

    def buckets(self, parts: tuple[VirtualStage, ...]) -> list[int]:
        """Elements of each gradient bucket."""
        layout = self.layout
        sizes = layout.tensor, layout.sequence_parallel, self.workload.minimum_parameter_group_size
        return buckets_of(self.architecture, parts, *sizes, layout.zero_stage == 3)

    def seconds(self, times: Times, parts: tuple[VirtualStage, ...], rows: int) -> Seconds:
        """Times of ranks that run `parts`, with micro-batches of `rows` tokens."""
        held, microbatches = self.held(parts), self.shape.microbatches
        sent = data_traffic(held, self.layout, microbatches, self.workload.itemsize)
        return Seconds(
            [times.of_part(part, rows) for part in parts],
            times.data(held, sent, len(self.buckets(parts)), microbatches),
            times.update(held, self.workload.slots),
        )

    def stage(self, rank: int, parts: tuple[VirtualStage, ...], seconds: Seconds) -> StageEstimate:
        """All figures of pipeline rank `rank`, which runs `parts`."""
        held, layout, itemsize = self.held(parts), self.layout, self.workload.itemsize
        microbatches, tokens = self.shape.microbatches, sum(self.shape.rows)
        sent = data_traffic(held, layout, microbatches, itemsize)
        sent += tensor_traffic(self.architecture, parts, layout, tokens, itemsize)
        sent += replica_traffic(held, layout, microbatches, itemsize)
        sent += row_sum_traffic(self.architecture, parts, layout, microbatches, itemsize)
        sent += pipeline_traffic(self.architecture, parts, layout, rank, tokens, itemsize)
        return StageEstimate(
            rank,
            held.size,
            self.memory(rank, parts),
            sent,
            tuple(forward for forward, _ in seconds.chunks),
            tuple(backward for _, backward in seconds.chunks),
        )

    def memory(self, rank: int, parts: tuple[VirtualStage, ...]) -> Memory:
        """Bytes on rank 0 of the tensor and data axes, which never holds less than the others."""
        held, layout, microbatches = self.held(parts), self.layout, self.shape.microbatches
        buckets, units = self.buckets(parts), held.units()
        owned = sum(-(-size // layout.data) for size in (units if layout.zero_stage == 3 else buckets))
        twice = any(tensor.tied or tensor.shared for tensor in held.tensors)
        # One of the buckets is of a sum under way, which one data rank does not have.  With zb-h1 the first half of a
        # backward pass begins all gradients, and the second half finishes them.
        open_buckets = _AT_ONCE - (layout.data == 1) if layout.schedule != "zb-h1" else len(buckets)
        workload = self.workload
        activations = Activations(self.architecture, layout, self.shape.length, workload.device, workload.half)
        peaks = peak_in_flight(layout.schedule, layout.pipeline, microbatches, layout.chunks, rank)
        elements = dict(
            parameters=owned if layout.zero_stage == 3 else held.size,
            gradients=owned if layout.zero_stage >= 2 else held.size,
            state=self.workload.slots * (owned if layout.zero_stage else held.size),
            gathered=in_turns(units, _AT_ONCE, twice, workload.device) if layout.zero_stage == 3 else 0,
            buckets=in_turns(buckets, open_buckets, twice, workload.device) if layout.zero_stage >= 2 else 0,
            activations=sum(
                activations.in_flight(part, rows)
                for part, peak in zip(parts, peaks, strict=True)
                for rows in self.largest_rows(peak)
            ),
            scratch=activations.scratch(parts, self.shape.rows[0], microbatches),
        )
        memory = {what: workload.itemsize * count for what, count in elements.items()}
        # Tokens and targets of the batch, in 8 bytes each.
        memory["scratch"] += 2 * 8 * sum(self.shape.rows)
        if workload.half:
            memory["scratch"] += HALF_BYTES * activations.operands(parts, self.shape.rows[0])
            if layout.zero_stage == 3:
                memory["scratch"] += HALF_BYTES * max((tensor.multiplied for tensor in held.tensors), default=0)
            else:
                memory["rounded"] = HALF_BYTES * held.rounded()
        return Memory(**memory)

    def largest_rows(self, flights: int) -> list[int]:
        """The largest number of tokens that each memory block of `flights` micro-batches in flight ever holds.

        The block released last is reused first, so the order of the blocks is reversed from step to step.
        """
        return [max(self.shape.rows[index], self.shape.rows[flights - 1 - index]) for index in range(flights)]


def in_turns(sizes: Sequence[int], at_once: int, twice: bool, device: bool) -> int:
    """Most elements of the memory that buckets or units of these sizes use in turns, as `BlockPool` gives it out.

    `at_once` is the number of neighbours that have memory at once.  `twice`: the first one has memory all the time.
    `device`: the memory is that of devices, where it is free after each use.
    """
    sets = [
        [*sizes[first : first + at_once], *(sizes[:1] if twice and first else ())]
        for first in range(max(1, len(sizes) - at_once + 1))
    ]
    if device:
        return max(map(sum, sets))
    blocks = block_sizes(sizes)
    most: Counter[int] = Counter()
    for each in sets:
        most |= Counter(blocks[size] for size in each)
    return sum(size * count for size, count in most.items())
