"""Local layouts of the ranks of a pipeline stage; stages with the same units share one result."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpishard.estimate.layouts import Layout
from mpishard.layout.boxes import box_size, counts, split
from mpishard.layout.local_layout import ModelParallelRank
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.device_products import ALIGNED, padded_extent
from mpishard.nn.units import EMBEDDINGS, OUTPUT_HEAD
from mpishard.parameters.gradient_buckets import make_buckets, make_runs

TABLE = "token_embedding.weight"


class VirtualStage(NamedTuple):
    """The units of one virtual stage: the embeddings, some blocks, the output head."""

    embeddings: bool
    blocks: int
    head: bool


class Tensor(NamedTuple):
    """A tensor as the ranks of one pipeline stage hold it.

    Parameters
    ----------
    size : int
        Elements on tensor rank 0, which never has fewer than the others.
    everywhere : int
        Elements on all tensor ranks together, copies included.
    partial : bool
        Whether its gradients are summed over the tensor axis.
    tied : bool
        Whether another stage holds it too.
    shared : bool
        Whether two units on this rank use it.
    stage, unit : int
        Virtual stage on this rank, and unit in it.
    multiplied : int
        Elements that it has as an operand of products in half precision, with the zeros that the outputs of a head get;
        0 for what is no operand: a vector, or a matrix of which rows are looked up only.
    apart : bool
        Whether the operand does not lie in memory as the tensor does: it has zeros, or is cut by columns.
    """

    size: int
    everywhere: int
    partial: bool
    tied: bool
    shared: bool
    stage: int
    unit: int
    multiplied: int
    apart: bool


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
    """By pipeline rank: the parts of its chunks.

    Raises
    ------
    ValueError
        If the model does not allow this layout.
    """
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
    return [count * length for count in counts(split(batch, microbatches))]
