"""Memory and work of a rank: its parameters and states, the activations that it keeps, and the work of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpishard.arguments import flag, integer
from mpishard.estimate.layouts import Layout
from mpishard.layout.boxes import box_size, nested_split, run_lengths, split
from mpishard.layout.tensors import ModelParallelRank
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.attention import BLOCK, GROUP_SCORES
from mpishard.nn.block import GatedMLP
from mpishard.nn.device_attention import BLOCK as DEVICE_BLOCK
from mpishard.nn.device_attention import group_sizes
from mpishard.nn.norms import LayerNorm
from mpishard.nn.options import microbatches_on
from mpishard.nn.products import ALIGNED, padded_extent
from mpishard.nn.tensor_parallel import most_sums, nodes_by_rank, summed_by_mpi
from mpishard.nn.units import EMBEDDINGS, OUTPUT_HEAD
from mpishard.parameters.buckets import make_buckets, make_runs

TABLE = "token_embedding.weight"


class VirtualStage(NamedTuple):
    """The units of one virtual stage: the embeddings, some blocks, the output head."""

    embeddings: bool
    blocks: int
    head: bool


class Tensor(NamedTuple):
    """A tensor as the ranks of one pipeline stage hold it."""

    size: int  # elements on tensor rank 0, which never has fewer than the others
    everywhere: int  # elements on all tensor ranks together, copies included
    partial: bool  # its gradients are summed over the tensor axis
    tied: bool  # another stage holds it too
    shared: bool  # two units on this rank use it
    stage: int  # virtual stage on this rank
    unit: int  # unit in the virtual stage
    # Elements that it has as an operand of products in half precision, with the zeros that the outputs of a head get; 0
    # for what is no operand: a vector, or a matrix of which rows are looked up only.
    multiplied: int
    apart: bool  # the operand does not lie in memory as the tensor does: it has zeros, or is cut by columns


@dataclass(frozen=True)
class Holding:
    """The local layout of the ranks of one pipeline stage; `tensors` are in flat order."""

    parts: tuple[VirtualStage, ...]
    tensors: tuple[Tensor, ...]

    @functools.cached_property
    def size(self) -> int:
        """Elements on tensor rank 0."""
        return sum(tensor.size for tensor in self.tensors)

    def units(self) -> list[int]:
        """Elements of each unit that ZeRO-3 gathers at once."""
        sizes: dict[tuple[int, int, int], int] = {}
        for index, tensor in enumerate(self.tensors):
            key = tensor.stage, tensor.unit, index if tensor.tied else -1
            sizes[key] = sizes.get(key, 0) + tensor.size
        return list(sizes.values())

    def twice(self) -> int:
        """Elements, on all tensor ranks together, of the unit that a pass uses twice: the one with a shared table."""
        shared = next((tensor for tensor in self.tensors if tensor.shared), None)
        if shared is None:
            return 0
        alone = shared.tied
        unit = shared.stage, shared.unit
        return sum(t.everywhere for t in self.tensors if t is shared or (not alone and (t.stage, t.unit) == unit))

    def rounded(self) -> int:
        """Elements of the weights in half precision that are kept in a step: all tensors at once, and some apart."""
        apart, start, at_once = 0, 0, False
        for tensor in self.tensors:
            if tensor.apart or start % ALIGNED:  # products load what begins elsewhere more slowly
                apart += tensor.multiplied
            else:
                at_once |= tensor.multiplied > 0
            start += tensor.size
        return apart + self.size * at_once

    def buckets(self, minimum: int, by_unit: bool) -> list[int]:
        """Elements of each gradient bucket: at least `minimum`, or with `by_unit` one unit; a tied tensor is alone."""
        runs = make_runs((t.stage, (t.stage, t.unit) if by_unit else t.stage, t.tied) for t in self.tensors)
        found = make_buckets(self.tensors, max(1, self.size) if by_unit else minimum, runs)  # type: ignore[arg-type]
        return [bucket.size for bucket in found]


def virtual_stages_of(architecture: DecoderArchitecture, layout: Layout) -> list[tuple[VirtualStage, ...]]:
    """The parts of the chunks of each pipeline rank; ValueError if the model does not allow this layout."""
    architecture.check(layout.tensor, layout.pipeline * layout.chunks)
    by_stage = [
        VirtualStage(EMBEDDINGS in units, sum(unit.startswith("blocks.") for unit in units), OUTPUT_HEAD in units)
        for units in architecture.cut(layout.pipeline * layout.chunks)
    ]
    return [tuple(by_stage[rank :: layout.pipeline]) for rank in range(layout.pipeline)]


@functools.lru_cache(maxsize=1024)
def holding(
    architecture: DecoderArchitecture, parts: tuple[VirtualStage, ...], tensor: int, sequence_parallel: bool
) -> Holding:
    """The local layout of a rank that runs `parts`, on a tensor axis of `tensor` ranks."""
    whole = len(parts) == 1 and parts[0].embeddings and parts[0].head
    both = any(part.embeddings for part in parts) and any(part.head for part in parts)
    tensors: list[Tensor] = []
    for stage, part in enumerate(parts):
        kinds = [*([EMBEDDINGS] * part.embeddings), *(["blocks.0"] * part.blocks), *([OUTPUT_HEAD] * part.head)]
        for unit, kind in enumerate(kinds):
            of_unit = _tensors(architecture, kind, tensor, sequence_parallel)
            for name, size, everywhere, partial, matrix, by_columns in of_unit:
                used_twice = architecture.tied and name == TABLE
                tied, shared = used_twice and not whole, used_twice and both
                multiplied = size if matrix and (kind != EMBEDDINGS or shared) else 0
                if multiplied and (kind == OUTPUT_HEAD or shared) and tensor == architecture.shards == 1:
                    multiplied = padded_extent(architecture.vocabulary_size) * architecture.width
                apart = multiplied != size or (by_columns and architecture.shards > tensor)
                found = Tensor(size, everywhere, partial, tied, shared, stage, unit, multiplied, apart)
                if not (used_twice and kind == OUTPUT_HEAD):
                    tensors.append(found)
                elif not both:
                    # The specs of a model list a tied table at its first use.
                    tensors.insert(0, found)
    return Holding(parts, tuple(tensors))


@functools.lru_cache(maxsize=1024)
def buckets_of(
    architecture: DecoderArchitecture,
    parts: tuple[VirtualStage, ...],
    tensor: int,
    sequence_parallel: bool,
    minimum: int,
    by_unit: bool,
) -> list[int]:
    """`Holding.buckets` of `holding`."""
    return holding(architecture, parts, tensor, sequence_parallel).buckets(minimum, by_unit)


@functools.lru_cache(maxsize=256)
def _tensors(
    architecture: DecoderArchitecture, unit: str, tensor: int, sequence_parallel: bool
) -> Sequence[tuple[str, int, int, bool, bool, bool]]:
    found = []
    for spec in architecture.specs_of(unit, sequence_parallel=sequence_parallel):
        size = box_size(ModelParallelRank(0, tensor).box(spec))
        everywhere = spec.size * (tensor if spec.tensor_dim is None else 1)
        partial, matrix = spec.partial and tensor > 1, len(spec.shape) == 2
        found.append((spec.name, size, everywhere, partial, matrix, matrix and spec.tensor_dim == 1))
    return found


def rows_of(batch: int, microbatches: int, length: int) -> list[int]:
    """Rows of each micro-batch, in order."""
    return [count * length for count in run_lengths(split(batch, microbatches))]


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block and of the output head of the whole network, not of a rank, read off their layers."""

    heads: int  # of queries
    groups: int  # heads of keys and of values
    head_width: int  # channels of a head
    qkv: int  # columns of queries, keys and values together
    mixed: int  # columns of the attention's result
    hidden: int  # channels inside the MLP
    gated: bool  # the MLP has a gate
    turned: bool  # heads are changed after their product: by norms or rotary positions
    normed_heads: int  # heads of queries and keys that are normed
    statistics: int  # numbers that a norm keeps for each row
    row_sums: int  # vectors of the width that a block adds row by row, as norms and biases do
    head_row_sums: int  # the same for the output head


@functools.lru_cache(maxsize=64)
def sizes_of(architecture: DecoderArchitecture) -> BlockSizes:
    block, head = architecture.build_block("block", True), architecture.build_head(True)
    attention, mlp = block.attention, block.mlp
    groups, mixed = architecture.query_groups, attention.output.inputs
    heads = mixed // attention.head_width
    norms = attention.norms
    skipped = () if norms is None else norms.weight_names
    return BlockSizes(
        heads,
        groups,
        attention.head_width,
        attention.qkv.outputs,
        mixed,
        mlp.gate.outputs if isinstance(mlp, GatedMLP) else mlp.expand.outputs,
        isinstance(mlp, GatedMLP),
        norms is not None or attention.rotary is not None,
        0 if norms is None else heads + groups,
        2 if isinstance(block.mlp_norm, LayerNorm) else 1,
        sum(spec.partial for spec in block.specs() if spec.name not in skipped),
        sum(spec.partial for spec in head.specs()),
    )


HALF_BYTES = 2


@dataclass(frozen=True)
class Activations:
    """Elements of activations that a rank of one tensor axis keeps for the backward pass, and of scratch memory.

    The arrays are those that `mpishard.nn` keeps.  The count follows Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models" (2022), section 4, for layers that never store attention scores.  With c
    channels, h heads and t tensor ranks a block of GPT-2 keeps ``4 c + 4 + (12 c + h) / t`` elements per token, or with
    sequence parallelism ``(16 c + 4 + h) / t``.

    `length` is the number of tokens of a sequence, `device` and `half` are as in `mpishard.estimate.Workload`; with
    `half` the elements are of float32, and two in half precision are one.
    """

    architecture: DecoderArchitecture
    layout: Layout
    length: int
    device: bool = False
    half: bool = False

    def share(self, size: int) -> int:
        """The largest part that a tensor rank gets of `size` columns or rows."""
        if self.architecture.shards == 1:
            return self.slice_of(size)  # counted often, for tables of many layouts
        return nested_split(size, self.layout.tensor, self.architecture.shards)[1]

    @property
    def block(self) -> BlockSizes:
        """Sizes of the whole network's blocks."""
        return sizes_of(self.architecture)

    @property
    def slices(self) -> int:
        """Slices of a tensor rank, which it computes one by one."""
        return max(1, self.architecture.shards // self.layout.tensor)

    def slice_of(self, size: int) -> int:
        """The largest of the slices into which all tensor ranks together cut `size` columns."""
        return -(-size // (self.slices * self.layout.tensor))

    def of_sums(self, rows: int) -> int:
        """Elements of memory for sums over slices, of a rank's and of those of other ranks."""
        shards, ranks, width = self.architecture.shards, self.layout.tensor, self.architecture.width
        if shards == 1:
            return 0
        needed = (most_sums(0, self.slices, shards) - 1) * rows * width
        if ranks > 1 and not summed_by_mpi(shards, ranks):
            mine, *others = (len(each) for each in nodes_by_rank(shards, ranks))
            needed += sum(others) * self.share(rows * width) + (mine * rows * width if mine > 1 else 0)
        blocks = self.slices if self.layout.sequence_parallel else shards
        return needed + most_sums(0, blocks, shards) * self.block.statistics * width

    def own_rows(self, rows: int) -> int:
        """Rows that a rank holds between attention and MLP: a part of `rows` with sequence parallelism."""
        return self.share(rows) if self.layout.sequence_parallel else rows

    def passed(self, rows: int) -> int:
        """Elements of the activation passed from unit to unit and from stage to stage."""
        return self.own_rows(rows) * self.architecture.width

    def halved(self, elements: int) -> int:
        """Elements of memory for what is stored rounded with `half`."""
        return -(-elements // 2) if self.half else elements

    def for_products(self, elements: int) -> int:
        """Elements of memory for a result that only products take, which is rounded unless ranks exchange its rows."""
        return elements if self.layout.sequence_parallel else self.halved(elements)

    @property
    def rounds_logits(self) -> bool:
        """True if the gradient of the logits is computed in half precision, in addition to the logits."""
        return self.half and self.layout.tensor == self.architecture.shards == 1

    def of_block(self, rows: int) -> int:
        """Elements that one block keeps, without its input."""
        block = self.block
        norms = 2 * (self.for_products(self.passed(rows)) + block.statistics * self.own_rows(rows))
        attention = self.halved(rows * self.share(block.qkv))
        attention += rows * (self.share(block.mixed) + block.heads // self.layout.tensor)
        attention += rows * block.normed_heads // self.layout.tensor * (block.head_width + 1)
        hidden = rows * self.share(block.hidden)
        hidden = (2 if block.gated else 1) * hidden + self.for_products(hidden)
        return norms + attention + hidden + 2 * self.passed(rows)

    def of_head(self, rows: int) -> int:
        """Elements that the output head keeps: its norm, and the logits, whose memory their gradient may reuse."""
        norm = self.for_products(self.passed(rows)) + self.block.statistics * self.own_rows(rows)
        vocabulary = self.architecture.vocabulary_size
        if not self.rounds_logits:
            return norm + rows * self.share(vocabulary)
        logits = rows * padded_extent(vocabulary)
        return norm + logits + self.halved(logits)

    def put_off(self, part: VirtualStage, rows: int) -> int:
        """Elements of the outputs' gradients of all products, kept until the weight gradients are computed (zb-h1)."""
        if self.layout.schedule != "zb-h1":
            return 0
        width = self.architecture.width
        # Recomputed blocks have no separate memory in which operands could be kept.
        blocks = 0 if self.layout.recompute else part.blocks
        # Gate and up have the gradients of their outputs in separate memory.
        hidden = 0 if self.block.gated else self.share(self.block.hidden)
        block = rows * (2 * width + self.share(self.block.qkv) + hidden)
        logits = rows * self.share(self.architecture.vocabulary_size)
        return blocks * block + part.head * (self.halved(logits) if self.rounds_logits else logits)

    def in_flight(self, part: VirtualStage, rows: int) -> int:
        """Elements that a micro-batch of `rows` tokens keeps in one model chunk while it is in flight."""
        if rows == 0:
            return 0
        received = (not part.embeddings) + (not part.head)
        kept = received * self.passed(rows)
        if part.embeddings:
            kept += self.passed(rows)
        if self.layout.recompute:
            kept += part.blocks * self.passed(rows)
        else:
            kept += part.blocks * self.of_block(rows)
        if part.head:
            kept += self.of_head(rows)
        return kept + self.put_off(part, rows)

    def _host_scores(self) -> int:
        """Elements of the blocks of scores, and of the arrays that are computed with them."""
        sizes, length = self.block, self.length
        group = min(self.slice_of(sizes.groups), max(1, GROUP_SCORES // length**2))
        scores = group * length * (length + min(BLOCK, length))
        if sizes.heads > sizes.groups:
            scores += group * min(BLOCK, length) * sizes.head_width
        return scores

    def device_scores(self, rows: int) -> int:
        """Elements of the largest block of scores on a device, of a micro-batch of `rows` tokens."""
        of_head = min(self.length, DEVICE_BLOCK) * self.length
        sequences, heads = group_sizes(self.slice_of(self.block.groups), of_head)
        return min(rows // self.length, sequences) * heads * of_head

    def operands(self, parts: tuple[VirtualStage, ...], rows: int) -> int:
        """Elements of the most operands that are in half precision at once for a product, without weights."""
        sizes, width = self.block, self.architecture.width
        needed = 0
        if any(part.blocks for part in parts):
            attention = 2 * self.device_scores(rows)  # probabilities, and gradients by scores
            needed = max(attention, rows * (self.share(sizes.hidden) + width), rows * (self.share(sizes.qkv) + width))
        if any(part.head for part in parts) and not self.rounds_logits:
            needed = max(needed, rows * self.share(self.architecture.vocabulary_size))
        return needed

    def scratch(self, parts: tuple[VirtualStage, ...], rows: int, microbatches: int) -> int:
        """Elements of memory that all micro-batches and chunks of a rank use in turns."""
        if rows == 0:
            return 0
        architecture = self.architecture
        width, length = architecture.width, self.length
        blocks, head = any(part.blocks for part in parts), any(part.head for part in parts)
        own = self.passed(rows)
        needed = 0
        if blocks:
            sizes = self.block
            scores = 2 * self.device_scores(rows) if self.device else self._host_scores()
            hidden, mixed, qkv = (self.share(each) for each in (sizes.hidden, sizes.mixed, sizes.qkv))
            gradients = rows * (hidden + 2 * width + mixed + qkv) + self.halved(rows * self.slice_of(sizes.mixed))
            gradients += rows * (sizes.gated * width + sizes.turned * qkv)
            gradients += rows * self.slice_of(sizes.normed_heads) * sizes.head_width
            needed += scores + gradients + rows * self.slice_of(sizes.heads)
            needed += min(length, DEVICE_BLOCK) if self.device else BLOCK
            needed += own if architecture.dropout else 0
        if head:
            needed += rows * width + own + (3 * rows if max(self.layout.tensor, architecture.shards) > 1 else 0)
        if self.layout.sequence_parallel:
            # Gathered activations with all rows, terms of sums over the ranks, and gradients of this rank's rows.
            needed += 2 * rows * width + (2 * blocks + head) * own
        if microbatches > 1 and not self.device:  # devices add products to gradients as they compute them
            sizes, vocabulary = self.block, self.slice_of(architecture.vocabulary_size)
            columns = max(self.slice_of(sizes.hidden), self.slice_of(sizes.qkv))
            needed += max(blocks * width * columns, head * width * vocabulary)
        if self.layout.recompute and blocks:
            needed += self.of_block(rows)
        return needed + self.of_sums(rows) + rows


@dataclass(frozen=True)
class Workload:
    """The sequences of a data rank's step, and the memory of its numbers.

    No method is collective.

    Parameters
    ----------
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
    device : bool
        Whether arrays are on devices, where attention is computed in larger blocks.
    half : bool
        Whether products round their operands to half precision there, as with `compute_dtype` of `mpishard.nn.GPT`.
        Attention and GELU are taken to be computed by mpishard, not by cuDNN and cuBLASLt, which need less memory.

    Raises
    ------
    ValueError
        If a number is too small, or `half` is given without `device` or with another `itemsize` than 4.
    TypeError
        For counts that are no whole numbers, and flags that are none.
    """

    batch: int = 1
    length: int | None = None
    microbatches: int | None = None
    itemsize: int = 4
    slots: int = 2
    minimum_parameter_group_size: int = 1024
    device: bool = False
    half: bool = False

    def __post_init__(self) -> None:
        for what in ("device", "half"):
            flag(what, getattr(self, what))
        counts = {"batch": 0, "length": 1, "microbatches": 1, "itemsize": 1, "slots": 0}
        for what, least in {**counts, "minimum_parameter_group_size": 1}.items():
            value = getattr(self, what)
            is_default = value is None and what in ("length", "microbatches")
            if not is_default and integer(what, value) < least:
                raise ValueError(f"{what}={value} must be at least {least}")
        if self.half and not (self.device and self.itemsize == 4):
            raise ValueError(
                f"half=True needs device=True and itemsize=4, got device={self.device} and itemsize={self.itemsize}"
            )

    def batch_shape(self, architecture: DecoderArchitecture, layout: Layout) -> BatchShape:
        """The batch of a data rank, with the defaults of this model and layout.

        Parameters
        ----------
        architecture : DecoderArchitecture
            Its context length is the default length.
        layout : Layout
            Its pipeline ranks decide the default number of micro-batches.

        Returns
        -------
        BatchShape
            With all numbers given.

        Raises
        ------
        ValueError
            If the model does not take sequences of this length.
        """
        length = architecture.context_length if self.length is None else self.length
        if not 1 <= length <= architecture.context_length:
            raise ValueError(f"sequences of {length} tokens, but the model takes 1 to {architecture.context_length}")
        microbatches = microbatches_on(layout.pipeline, self.microbatches)
        return BatchShape(self.batch, length, microbatches)


@dataclass(frozen=True)
class BatchShape:
    """The batch of a data rank.

    Parameters
    ----------
    batch : int
        Sequences.
    length : int
        Tokens of each.
    microbatches : int
        Number of micro-batches into which it is cut.
    """

    batch: int
    length: int
    microbatches: int

    @cached_property
    def rows(self) -> list[int]:
        """Tokens of each micro-batch, in order."""
        return rows_of(self.batch, self.microbatches, self.length)
