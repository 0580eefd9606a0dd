"""Bytes sent in a step by axis and purpose, counted as in the ledger: those of the ring algorithms.

Every figure is the sum over all ranks of one pipeline stage.  Sums are exact for any sizes: over n ranks the ring
all-reduce of e elements sends 2 (n - 1) e, all-gather and reduce-scatter (n - 1) e.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from mpishard.estimate.block_sizes import sizes_of
from mpishard.estimate.holdings import Holding, VirtualStage
from mpishard.estimate.layouts import Layout
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.slices import nodes_by_rank, summed_by_mpi

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
    """How many partial sums a tensor rank has of its slices, in the mean over the ranks."""
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
