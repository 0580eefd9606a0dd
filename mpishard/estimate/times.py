"""Times of computation and communication of a rank, from the speeds in a `MachineProfile`; no overlap is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.estimate.activations import Activations
from mpishard.estimate.holdings import Holding, VirtualStage
from mpishard.estimate.layouts import Layout
from mpishard.estimate.profile import MachineProfile
from mpishard.estimate.traffic import Sent, messages, passes_of, tensor_traffic
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.mixing import BLOCK

# Arrays of (rows, width) that are read or written outside of products by a block: those that tensor ranks hold whole
# (norms, residuals) and those that they split (heads, hidden units).
_WHOLE_FORWARD, _SPLIT_FORWARD = 10, 19
_WHOLE_BACKWARD, _SPLIT_BACKWARD = 10, 18
# What an attention score costs beside its products, in GELUs with their derivative: a maximum, an exponential, a sum
# and a scaling.
_SOFTMAX = 2.0
# An exponential of the loss, in the same unit.
_LOSS = 0.5


@dataclass(frozen=True)
class Times:
    """Seconds on a rank of one layout.

    Parameters
    ----------
    architecture : DecoderArchitecture
    layout : Layout
    profile : MachineProfile
    length : int
        Tokens of a sequence.
    itemsize : int
        Bytes of an element.
    """

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
        """Time on the tensor axis, forward and backward; each kind of collective is assumed to send as many bytes."""
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
