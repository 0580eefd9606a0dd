"""Counts the elements of activations that a rank keeps for the backward pass, and of scratch memory.

The arrays are those that `mpishard.nn` keeps.  The count follows Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models" (2022), section 4, for layers that never store attention scores.  With c channels, h heads
and t tensor ranks a block of GPT-2 keeps ``4 c + 4 + (12 c + h) / t`` elements per token, or with sequence parallelism
``(16 c + 4 + h) / t``.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.estimate.block_sizes import BlockSizes, sizes_of
from mpishard.estimate.holdings import VirtualStage
from mpishard.estimate.layouts import Layout
from mpishard.layout.boxes import nested_split
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.device_mixing import BLOCK as DEVICE_BLOCK
from mpishard.nn.device_mixing import group_sizes
from mpishard.nn.device_products import padded_extent
from mpishard.nn.mixing import BLOCK, GROUP_SCORES
from mpishard.nn.slices import most_sums, nodes_by_rank, summed_by_mpi

HALF_BYTES = 2


@dataclass(frozen=True)
class Activations:
    """Sizes of activations in elements per rank, for the ranks of one tensor axis.

    Parameters
    ----------
    architecture : DecoderArchitecture
    layout : Layout
    length : int
        Tokens of a sequence.
    device, half : bool
        As in `mpishard.estimate.Workload`; with `half` the elements are of float32, and two in half precision are one.
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
        """Whether the gradient of the logits is computed in half precision, beside them."""
        return self.half and self.layout.tensor == self.architecture.shards == 1

    def of_block(self, rows: int) -> int:
        """Elements that one block keeps, without its input."""
        block = self.block
        norms = 2 * (self.for_products(self.passed(rows)) + block.statistics * self.own_rows(rows))
        attention = self.halved(rows * self.share(block.qkv))
        attention += rows * (self.share(block.mixed) + block.heads // self.layout.tensor)
        attention += rows * block.normed_heads // self.layout.tensor * (block.head_width + 1)
        hidden = rows * self.share(block.hidden)
        hidden = (block.kept_hidden - 1) * hidden + self.for_products(hidden)
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
        # Recomputed blocks have no memory of their own in which operands could be kept.
        blocks = 0 if self.layout.recompute else part.blocks
        # Gate and up have the gradients of their outputs in memory of their own.
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
        """Elements of the blocks of scores, and of what is computed with them."""
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
