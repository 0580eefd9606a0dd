"""Where a model's tensors are cut into buckets: runs of consecutive tensors whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpishard.layout.local_layout import Piece


class Run(NamedTuple):
    """Tensors `first` to `last` (exclusive) of a model, whose gradients are complete together.

    `key` separates neighbouring runs of one virtual stage.  A `tied` tensor is a run by itself: it waits for the last
    backward pass of the step, since another virtual stage adds to its gradient.

    Parameters
    ----------
    first, last : int
        Numbers of tensors.
    virtual_stage : int
        The one that has them.
    key : object
        What its tensors have in common.
    tied : bool
        Whether it is one tied tensor.
    """

    first: int
    last: int
    virtual_stage: int = 0
    key: object = None
    tied: bool = False


def make_runs(tensors: Iterable[tuple[int, object, bool]]) -> list[Run]:
    """Join neighbouring tensors with the same key into runs; a tied tensor stays alone.

    `tensors` are ``(virtual_stage, key, tied)`` in flat order.

    Not collective.

    Parameters
    ----------
    tensors : iterable of (int, object, bool)
        As above.

    Returns
    -------
    list of Run
        They cover all tensors, in order.
    """
    runs: list[Run] = []
    for index, (virtual_stage, key, tied) in enumerate(tensors):
        if runs and not tied and not runs[-1].tied and runs[-1].key == key:
            runs[-1] = runs[-1]._replace(last=index + 1)
        else:
            runs.append(Run(index, index + 1, virtual_stage, key, tied))
    return runs


@dataclass(frozen=True)
class Bucket:
    """Tensors `first` to `last` (exclusive) of a model: elements ``[start, stop)`` of its flat buffer.

    `virtual_stage` and `tied` are those of its `Run`.  With `second_use` it is the second gradient of one tensor, which
    has another place in memory than the range of the tensor.

    Parameters
    ----------
    index : int
        Its number.
    first, last : int
        Numbers of tensors.
    start, stop : int
        Elements of the flat buffer.
    virtual_stage : int
        The one that has its tensors.
    tied : bool
        Whether it is one tied tensor.
    second_use : bool
        Whether it has the gradient of the second use of its tensor, kept apart from that of the first.
    """

    index: int
    first: int
    last: int
    start: int
    stop: int
    virtual_stage: int = 0
    tied: bool = False
    second_use: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def names_in(bucket: Bucket, pieces: Sequence[Piece]) -> list[str]:
    """The names under which a reducer has the gradients of a bucket; that of a second use is no tensor's name.

    Not collective.

    Parameters
    ----------
    bucket : Bucket
        One of a model.
    pieces : sequence of Piece
        All tensors of it in flat order.

    Returns
    -------
    list of str
        In the order of the tensors.
    """
    names = [piece.name for piece in pieces[bucket.first : bucket.last]]
    return [second_use(name) for name in names] if bucket.second_use else names


def second_use(name: str) -> str:
    """The name of the gradient of a tensor's second use.

    Not collective.

    Parameters
    ----------
    name : str
        Of the tensor.

    Returns
    -------
    str
        One that no tensor can have.
    """
    return f"{name}\0second use"


def make_buckets(
    pieces: Sequence[Piece], minimum: int, runs: Sequence[Run] | None = None, sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Group consecutive tensors of a run until a bucket holds `minimum` elements; a short rest joins the last bucket.

    `sizes` replace the sizes of the pieces in this, so that ranks with pieces of other sizes cut alike.

    Not collective.

    Parameters
    ----------
    pieces : sequence of Piece
        All tensors in flat order.
    minimum : int
        Elements of a bucket, at least 1.
    runs : sequence of Run, optional
        No bucket spans two of them.  Default: one run of all pieces.
    sizes : sequence of int, optional
        As above.

    Returns
    -------
    tuple of Bucket
        They cover the pieces, in flat order.

    Raises
    ------
    ValueError
        If `minimum` is below 1.
    """
    if minimum < 1:
        raise ValueError(f"minimum_parameter_group_size is {minimum}, but a bucket holds at least 1 element")
    sizes = [piece.size for piece in pieces] if sizes is None else sizes
    buckets: list[Bucket] = []
    for run in [Run(0, len(pieces))] if runs is None else runs:
        cuts = [run.first]
        size = 0
        for index in range(run.first, run.last):
            size += sizes[index]
            if size >= minimum:
                cuts.append(index + 1)
                size = 0
        if len(cuts) > 1:
            cuts[-1] = run.last
        else:
            cuts.append(run.last)
        for first, last in zip(cuts[:-1], cuts[1:], strict=True):
            start = buckets[-1].stop if buckets else 0
            stop = start + sum(piece.size for piece in pieces[first:last])
            buckets.append(Bucket(len(buckets), first, last, start, stop, run.virtual_stage, run.tied))
    return tuple(buckets)
