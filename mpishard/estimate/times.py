"""Times of computation and communication of a rank, of its pipeline stage and of the pipeline, from the bytes sent and
the speeds in a `MachineProfile`; no overlap is assumed.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from mpishard.estimate.layouts import Layout
from mpishard.estimate.profile import MachineProfile
from mpishard.estimate.sizes import (
    Activations,
    Holding,
    VirtualStage,
    sizes_of,
)
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.attention import BLOCK
from mpishard.nn.tensor_parallel import nodes_by_rank, summed_by_mpi
from mpishard.pipeline.schedule import SCHEDULES, make_schedule, simulate

# -- times -------------------------------------------------------------------------------------------------------------

# Bytes sent in a step by axis and purpose, counted as in the ledger: those of the ring algorithms.
#
# Every figure is the sum over all ranks of one pipeline stage.  Sums are exact for any sizes: over n ranks the ring
# all-reduce of e elements sends 2 (n - 1) e, all-gather and reduce-scatter (n - 1) e.

Sent = Counter[tuple[str, str]]


def passes_of(layout: Layout, microbatches: int) -> int:
    """Reductions of each gradient per step: ZeRO-2 and 3 have no memory to accumulate those of all micro-batches."""
    return microbatches if layout.zero_stage >= 2 else 1


def data_traffic(holding: Holding, layout: Layout, microbatches: int, itemsize: int) -> Sent:
    """Traffic over the data axis: gradients, and parameters if the update is sharded.

    With P parameters and n ranks a rank sends 2 (n - 1) / n P elements for the stages 0 to 2 and 3 (n - 1) / n P for
    stage 3 (Rajbhandari et al. 2020, section 7), with one micro-batch per step.  A tied table is reduced once.
    """
    sent: Sent = Counter()
    tied = sum(tensor.everywhere for tensor in holding.tensors if tensor.tied)
    rest = sum(tensor.everywhere for tensor in holding.tensors) - tied
    each = (layout.data - 1) * itemsize
    passes = passes_of(layout, microbatches)
    sent["data", "gradients"] = each * (passes * rest + tied) * (2 if layout.zero_stage == 0 else 1)
    if layout.zero_stage in (1, 2):
        sent["data", "parameters"] = each * (rest + tied)
    elif layout.zero_stage == 3:
        sent["data", "parameters"] = each * 2 * microbatches * (rest + tied + holding.twice())
    return sent


def tensor_traffic(
    architecture: DecoderArchitecture, parts: tuple[VirtualStage, ...], layout: Layout, rows: int, itemsize: int
) -> Sent:
    """Traffic over the tensor axis, for `rows` tokens per data rank: sums of activations and of their gradients.

    A block has two all-reduces forward and two backward (Shoeybi et al. 2019, section 3).  With sequence parallelism
    each of them is an all-gather and a reduce-scatter, and the inputs of two products are gathered once more for their
    weight gradients (Korthikanti et al. 2022, section 4.2.2).  With several shards a rank sends as many partial sums as
    its slices are nodes of the tree, where else it sends one term.
    """
    sent: Sent = Counter()
    ring = (layout.tensor - 1) * rows * layout.data * itemsize
    each = ring * architecture.width
    terms = _partial_sums(architecture, layout)
    blocks = sum(part.blocks for part in parts)
    embeddings = sum(part.embeddings for part in parts)
    head = sum(part.head for part in parts)
    again = 2 if layout.recompute else 1
    if layout.sequence_parallel:
        forward = again * 2 * blocks * (1 + terms) + embeddings + head
        backward = 2 * blocks * (1 + terms) + embeddings + head * terms
        forward += 2 * blocks + head
    else:
        forward = (1 + terms) * again * 2 * blocks + 2 * embeddings
        backward = (1 + terms) * (2 * blocks + head)
    # The loss needs a maximum and two sums a token.
    sent["tensor", "activations"] = int(each * forward + 2 * (1 + 1 + terms) * ring * head)
    sent["tensor", "activation gradients"] = int(each * backward)
    return sent


def _partial_sums(architecture: DecoderArchitecture, layout: Layout) -> Fraction:
    """Number of partial sums that a tensor rank has of its slices, in the mean over the ranks."""
    if architecture.shards == 1:
        return Fraction(1)
    return Fraction(sum(map(len, nodes_by_rank(architecture.shards, layout.tensor))), layout.tensor)


def row_sum_traffic(
    architecture: DecoderArchitecture, parts: tuple[VirtualStage, ...], layout: Layout, microbatches: int, itemsize: int
) -> Sent:
    """Traffic of sums over rows, which a model of several shards takes in each micro-batch where rows are split.

    They are the gradients of the weights and biases of norms, two in a block and one in the head, and of two other
    biases in a block of GPT-2.  Sums over heads, as of the norms of queries and keys, are taken also where rows are not
    split.
    """
    sent: Sent = Counter()
    if architecture.shards > 1:
        sizes = sizes_of(architecture)
        elements = sum(part.blocks for part in parts) * (2 * sizes.head_width if sizes.normed_heads else 0)
        if layout.sequence_parallel:
            vectors = sum(sizes.row_sums * part.blocks + sizes.head_row_sums * part.head for part in parts)
            elements += vectors * architecture.width
        each = (layout.tensor - 1) * layout.data * itemsize * microbatches * elements
        sent["tensor", "gradients"] = int(each * (1 + _partial_sums(architecture, layout)))
    return sent


def replica_traffic(holding: Holding, layout: Layout, microbatches: int, itemsize: int) -> Sent:
    """Traffic of gradients that are sums over the tensor ranks, and of gradients of tables tied over two stages."""
    sent: Sent = Counter()
    partial = sum(tensor.size for tensor in holding.tensors if tensor.partial)
    passes = passes_of(layout, microbatches)
    sent["tensor", "gradients"] = 2 * (layout.tensor - 1) * partial * passes * layout.data * itemsize
    tied = sum(tensor.everywhere for tensor in holding.tensors if tensor.tied)
    # The sum is over two ranks: each of them sends half of 2 (2 - 1).
    sent["ties", "gradients"] = tied * layout.data * itemsize if layout.pipeline > 1 else 0
    return sent


def pipeline_traffic(
    architecture: DecoderArchitecture,
    parts: tuple[VirtualStage, ...],
    layout: Layout,
    rank: int,
    rows: int,
    itemsize: int,
) -> Sent:
    """Traffic that stage `rank` sends over the pipeline axis, for `rows` tokens per data rank.

    Activations go to the next stage, their gradients to the previous one.  Without sequence parallelism every tensor
    rank sends all of their elements.
    """
    sent: Sent = Counter()
    if layout.pipeline == 1:
        return sent
    copies = 1 if layout.sequence_parallel else layout.tensor
    each = copies * rows * architecture.width * layout.data * itemsize
    sent["pipeline", "activations"] = each * sum(not part.head for part in parts)
    sent["pipeline", "activation gradients"] = each * sum(not part.embeddings for part in parts)
    # The last stage broadcasts the loss, 8 bytes, around the ring.
    sent["pipeline", "loss"] = 8 * layout.data * layout.tensor if rank != layout.pipeline - 2 else 0
    return sent


def messages(part: VirtualStage, layout: Layout, shards: int = 1) -> tuple[int, int]:
    """Numbers of collectives on the tensor axis for one micro-batch in a part: forward, and backward."""
    again = 2 if layout.recompute else 1
    if layout.tensor == 1:
        return 0, 0
    # An ordered sum takes two where each rank gets all of it.
    calls = 1 if summed_by_mpi(shards, layout.tensor) else 2
    if not layout.sequence_parallel:
        forward = 2 * calls * part.blocks + part.embeddings + (1 + calls) * part.head
        return forward, calls * (2 * again * part.blocks + part.head)
    # The sums of `row_sum_traffic`: four in a block, one in the head.
    row_sums = calls if shards > 1 else 0
    forward = 4 * part.blocks + part.embeddings + (2 + calls) * part.head
    backward = (2 + 4 * again + 4 * row_sums) * part.blocks + part.embeddings + (2 + row_sums) * part.head
    return forward, backward


# Arrays of (rows, width) that are read or written outside of products by a block: those that tensor ranks hold whole
# (norms, residuals) and those that they split (heads, hidden units).
_WHOLE_FORWARD, _SPLIT_FORWARD = 10, 19
_WHOLE_BACKWARD, _SPLIT_BACKWARD = 10, 18
# Cost of an attention score in addition to its products, in GELUs with their derivative: a maximum, an exponential, a
# sum and a scaling.
_SOFTMAX = 2.0
# An exponential of the loss, in the same unit.
_LOSS = 0.5


@dataclass(frozen=True)
class Times:
    """Seconds on a rank of one layout, with `length` tokens in a sequence and `itemsize` bytes in an element."""

    architecture: DecoderArchitecture
    layout: Layout
    profile: MachineProfile
    length: int
    itemsize: int

    def of_part(self, part: VirtualStage, rows: int) -> tuple[float, float]:
        """Forward and backward of a micro-batch of `rows` tokens in one model chunk, with communication."""
        block_forward, block_backward = self._block(rows)
        head_forward, head_backward = self._head(rows)
        forward = part.blocks * block_forward + part.head * head_forward + part.embeddings * self._passes(rows, 4, 0)
        backward = part.blocks * block_backward + part.head * head_backward + part.embeddings * self._passes(rows, 5, 0)
        if self.layout.recompute:
            backward += part.blocks * block_forward
        forward, backward = forward / self.profile.efficiency, backward / self.profile.efficiency
        if self.layout.tensor > 1 and rows:
            there, back = self._tensor(part, rows)
            forward += there
            backward += back
        return forward, backward

    def message(self, rows: int) -> float:
        """Time of a message from stage to stage."""
        if self.layout.pipeline == 1:
            return 0.0
        sent = Activations(self.architecture, self.layout, self.length).passed(rows) * self.itemsize
        return self.profile.link("send", self.layout.span("pipeline")).seconds(2, sent)

    def update(self, holding: Holding, slots: int) -> float:
        """Time of the optimizer: over its own shard a rank passes gradients twice, and reads and writes the rest."""
        owned = holding.size / (self.layout.data if self.layout.zero_stage else 1)
        return owned * (4 + 2 * slots) * self.itemsize / self.profile.memory_bandwidth

    def data(self, holding: Holding, sent: Sent, buckets: int, microbatches: int) -> float:
        """Time of all communication over the data axis in a step."""
        layout = self.layout
        if layout.data == 1:
            return 0.0
        ranks, span = layout.data * layout.tensor, layout.span("data")
        reduction = "reduce_scatter" if layout.zero_stage else "all_reduce"
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * microbatches}[layout.zero_stage]
        gather_calls = gathers * (len(holding.units()) if layout.zero_stage == 3 else buckets)
        return self.profile.link(reduction, span).seconds(
            layout.data, sent["data", "gradients"] / ranks, buckets * passes_of(layout, microbatches)
        ) + self.profile.link("all_gather", span).seconds(layout.data, sent["data", "parameters"] / ranks, gather_calls)

    def _product(self, rows: int, inputs: int, outputs: int) -> float:
        return 2 * rows * inputs * outputs / self.profile.flops(min(inputs, outputs))

    def _passes(self, rows: int, whole: int, split: int) -> float:
        size = Activations(self.architecture, self.layout, self.length)
        elements = whole * size.passed(rows) + split * rows * size.share(self.architecture.width)
        return elements * self.itemsize / self.profile.memory_bandwidth

    def _block(self, rows: int) -> tuple[float, float]:
        size, width = Activations(self.architecture, self.layout, self.length), self.architecture.width
        sizes = size.block
        split, hidden = size.share(sizes.mixed), size.share(sizes.hidden)
        products = (
            self._product(rows, width, size.share(sizes.qkv))
            + self._product(rows, split, width)
            + (1 + sizes.gated) * self._product(rows, width, hidden)
            + self._product(rows, hidden, width)
        )
        # Queries are computed in blocks, which skip most of the masked scores.
        seen = min(1.0, (1 + BLOCK / self.length) / 2)
        attention = 2 * 2 * rows * seen * self.length * split / self.profile.flops(sizes.head_width)
        scores = rows * seen * self.length * self.architecture.heads / self.layout.tensor
        softmax = _SOFTMAX * scores / self.profile.exponentials
        activation = rows * hidden / self.profile.exponentials
        forward = products + attention + softmax + activation + self._passes(rows, _WHOLE_FORWARD, _SPLIT_FORWARD)
        # The backward recomputes the scores, then computes the gradients of scores, queries, keys and values.
        backward = 2 * products + 2.5 * attention + softmax + self._passes(rows, _WHOLE_BACKWARD, _SPLIT_BACKWARD)
        return forward, backward

    def _head(self, rows: int) -> tuple[float, float]:
        size = Activations(self.architecture, self.layout, self.length)
        columns = size.share(self.architecture.vocabulary_size)
        product = self._product(rows, self.architecture.width, columns)
        logits = 3 * rows * columns * self.itemsize / self.profile.memory_bandwidth
        loss = _LOSS * rows * columns / self.profile.exponentials
        return product + loss + logits + self._passes(rows, 2, 0), 2 * product + self._passes(rows, 4, 0)

    def _tensor(self, part: VirtualStage, rows: int) -> tuple[float, float]:
        """Time on the tensor axis, forward and backward; each kind of collective is taken to send equally many
        bytes.
        """
        layout, span = self.layout, self.layout.span("tensor")
        sent = tensor_traffic(self.architecture, (part,), layout, rows, self.itemsize)
        total = sum(sent.values()) / (layout.tensor * layout.data)
        forward_calls, backward_calls = messages(part, layout, self.architecture.shards)
        calls = forward_calls + backward_calls
        if not calls:
            return 0.0, 0.0
        if layout.sequence_parallel:
            links = [self.profile.link(operation, span) for operation in ("all_gather", "reduce_scatter")]
        else:
            links = [self.profile.link("all_reduce", span)]
        seconds = sum(link.seconds(layout.tensor, total, calls) for link in links) / len(links)
        return seconds * forward_calls / calls, seconds * backward_calls / calls


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
    simulated: int = _SIMULATED,
) -> tuple[float, float]:
    """Seconds that all micro-batches take in the pipeline, and the fraction of that time in which ranks are idle.

    `forward` and `backward` are seconds of one micro-batch by virtual stage; zb-h1 does one half of a backward first
    and the other half later.  `transfer` is seconds per message between stages.

    Schedules of at most `simulated` actions are simulated.  For others, with t the time of a micro-batch on a rank and
    p stages, the idle time is (p - 1) t for GPipe and 1F1B, a chunk's part of it for the interleaved schedule
    (Narayanan et al. 2021, section 2.2), and (p - 1) (F + I - W) for ZB-H1 (Qi et al. 2023, section 2.3), on top of the
    work of the slowest rank.
    """
    on_rank = [sum(forward[rank::stages]) + sum(backward[rank::stages]) for rank in range(stages)]
    if stages == 1:
        return microbatches * on_rank[0], 0.0
    if stages * microbatches * chunks * 2 <= simulated:
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
