"""Random models and random layouts of them, for tests of what moves between two layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpishard.layout.boxes import split
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec, Piece, cut_holding

LAYERS = 4


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model before anybody knows on how many stages the model will be."""

    name: str
    shape: tuple[int, ...]
    layer: int
    tensor_dim: int | None
    tied: bool

    def spec(self, stages):
        stage = self.layer * stages // LAYERS
        copies = (stages - 1,) if self.tied and stage != stages - 1 else ()
        return ParameterSpec(self.name, self.shape, stage, self.tensor_dim, copies=copies)


def random_model(random):
    """A few tensors of zero to three dimensions; some are empty, replicated over the tensor axis, or tied."""
    tensors = []
    for number in range(random.integers(1, 7)):
        shape = tuple(random.integers(0, 7, random.integers(0, 4)).tolist())
        dim = int(random.integers(len(shape))) if shape and random.random() < 0.6 else None
        tied = bool(random.random() < 0.2)
        tensors.append(Tensor(f"t{number}", shape, int(random.integers(LAYERS)), dim, tied))
    return tensors


@dataclass(frozen=True)
class Layout:
    """A mesh, what every data rank holds of its slice of the model, and on how many more ranks nothing is."""

    data: int
    tensor: int
    pipeline: int
    chunks: int
    zero: int
    idle: int

    @property
    def ranks(self):
        return self.data * self.tensor * self.pipeline + self.idle

    def holdings(self, model, random):
        """By rank of the mesh: tensor ranks vary fastest, then data ranks; idle ranks come last.

        With ZeRO the slice of a place in the mesh is cut into buckets at random tensors, and each of these over the
        data ranks.
        """
        specs = [tensor.spec(self.pipeline * self.chunks) for tensor in model]
        first_of_bucket = {spec.name for spec in specs if random.random() < 0.3}
        found = []
        for number in range(self.data * self.tensor * self.pipeline):
            rest, tensor_rank = divmod(number, self.tensor)
            stage, data_rank = divmod(rest, self.data)
            holding = ModelParallelRank(tensor_rank, self.tensor, stage, self.pipeline).holding(specs)
            if self.zero:
                bounds = {piece.start for piece in holding if piece.name in first_of_bucket}
                starts = sorted({0, *bounds, sum(piece.size for piece in holding)})
                ranges = []
                for start, stop in zip(starts[:-1], starts[1:], strict=True):
                    cuts = split(stop - start, self.data)
                    ranges.append((start + cuts[data_rank], start + cuts[data_rank + 1]))
                holding = cut_holding(holding, ranges)
            found.append(holding)
        return found + [()] * self.idle


def random_layout(random, ranks):
    """A layout on at most this many ranks; the others idle."""
    while True:
        sizes = random.integers(1, 5, 3).tolist()
        if np.prod(sizes) <= ranks:
            break
    chunks, zero = int(random.integers(1, 3)), int(random.integers(0, 2))
    return Layout(*sizes, chunks, zero, ranks - int(np.prod(sizes)))


def tensors_of(model):
    """Tensors whose elements are all different, from 1 on."""
    found, start = {}, 1
    for tensor in model:
        size = int(np.prod(tensor.shape))
        found[tensor.name] = np.arange(start, start + size).reshape(tensor.shape)
        start += size
    return found


def filled(holding, tensors, dtype=np.int64):
    """The array of a rank with this holding."""
    array = np.zeros(sum(piece.size for piece in holding), dtype)
    for piece in holding:
        view(array, piece, piece.box)[...] = tensors[piece.name][(*(slice(*run) for run in piece.box), ...)]
    return array


def view(array, piece: Piece, box):
    """What a box of a piece is in the array."""
    inside = (slice(a - first, b - first) for (a, b), (first, _) in zip(box, piece.box, strict=True))
    return array[piece.start : piece.start + piece.size].reshape(piece.shape)[(*inside, ...)]


def lower_bound(source, target, tensors):
    """How many elements each rank has to receive at least: those of its target that it does not hold.

    Found element by element, of one array of a model.
    """
    pairs = zip(source, target, strict=True)
    return [int(np.isin(filled(new, tensors), filled(old, tensors), invert=True).sum()) for old, new in pairs]
