"""Boxes, tuples of one ``(start, stop)`` pair per dimension of a global tensor; and cuts of a range into runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod
from types import EllipsisType

Box = tuple[tuple[int, int], ...]
# Each dimension that is cut doubles the number of corners of a box.
_MOST_CORNERS = 2**22


def split(size: int, parts: int) -> list[int]:
    """Offsets that cut elements into runs as equal as can be: the first ``size % parts`` runs have one element more.

    Run ``r`` of ``parts + 1`` offsets is ``[offsets[r], offsets[r + 1])``; runs are empty where there are more parts
    than elements.  Raises ValueError if a number is out of its range.
    """
    if size < 0 or parts < 1:
        raise ValueError(f"cannot split {size} elements into {parts} parts")
    quotient, remainder = divmod(size, parts)
    return [part * quotient + min(part, remainder) for part in range(parts + 1)]


def nested_split(size: int, parts: int, slices: int = 1) -> list[int]:
    """Offsets that cut elements into runs of whole slices: `split` makes the slices, each run has equally many.

    For one number of slices all cuts nest, also where elements do not divide evenly: with 4 slices each quarter lies in
    one half.  `slices` is a multiple of `parts`, or 1 for no slices, and `split` makes the runs; ValueError otherwise.
    """
    if slices == 1:
        return split(size, parts)
    if slices % parts:
        raise ValueError(
            f"{slices} slices cannot be shared by {parts} ranks; choose a number of ranks that divides the number of "
            "slices"
        )
    return split(size, slices)[:: slices // parts]


def run_lengths(offsets: Sequence[int]) -> list[int]:
    """Lengths of the runs between consecutive offsets."""
    return [stop - start for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]


def starts_of(counts: Sequence[int]) -> list[int]:
    """The starts of runs of these lengths that lie end to end in a buffer."""
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def run_of(lengths: Sequence[int], number: int) -> slice:
    """The run with a number, of runs of these lengths that lie end to end in a buffer."""
    start = sum(lengths[:number])
    return slice(start, start + lengths[number])


def whole_box(shape: Sequence[int]) -> Box:
    """The box that covers a whole tensor."""
    return tuple([(0, extent) for extent in shape])


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple([stop - start for start, stop in box])


def box_size(box: Box) -> int:
    """The number of elements of a box; 1 for a scalar, whose box has no dimensions."""
    return prod([stop - start for start, stop in box])


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major range ``[start, stop)`` of a tensor into boxes, in order.

    At most ``2 * len(shape) - 1`` boxes: a ragged head, whole rows, and a ragged tail, dimension by dimension.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        rest = boxes_of_range(shape[1:], start - first * row, stop - first * row)
        return [((first, first + 1), *box) for box in rest]
    boxes: list[Box] = []
    if start % row:
        boxes += boxes_of_range(shape, start, (first + 1) * row)
        first += 1
    whole = stop // row
    if whole > first:
        boxes.append(((first, whole), *whole_box(shape[1:])))
    if stop % row:
        boxes += boxes_of_range(shape, whole * row, stop)
    return boxes


def intersect(one: Box, other: Box) -> Box | None:
    """The box common to two boxes of one tensor; None where they have no element in common."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def subtract(box: Box, hole: Box) -> list[Box]:
    """Boxes that cover `box` without `hole`, which lies inside it."""
    rest: list[Box] = []
    done: Box = ()
    for dim, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(box, hole, strict=True)):
        if start < hole_start:
            rest.append((*done, (start, hole_start), *box[dim + 1 :]))
        if hole_stop < stop:
            rest.append((*done, (hole_stop, stop), *box[dim + 1 :]))
        done = (*done, (hole_start, hole_stop))
    return rest


def inside(box: Box, outer: Box) -> tuple[slice | EllipsisType, ...]:
    """The index of a box in an array of the box around it; it always gives a view, also of a scalar."""
    slices = (slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True))
    return (*slices, ...)


def run_start(box: Box, outer: Box) -> int | None:
    """The place of a box in the row-major values of a box around it, if its values lie there end to end, else None."""
    start, stride, partial = 0, 1, False
    for (first, stop), (begin, end) in zip(reversed(box), reversed(outer), strict=True):
        if partial and stop - first > 1:
            return None
        partial = partial or stop - first < end - begin
        start += (first - begin) * stride
        stride *= end - begin
    return start


def check_cover(shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise ValueError unless boxes cover each element of a tensor exactly once.

    A box is a signed sum of the orthants at its corners, and two sums of orthants are equal only if their terms are.
    So all corners must cancel, except those of the whole tensor.  The time is linear in the number of boxes.
    """
    whole = whole_box(shape)
    boxes = list(boxes)
    if 0 in shape:
        if boxes:
            raise ValueError("it has pieces of a tensor without elements")
        return
    if not boxes:
        raise ValueError("no piece covers any of its elements")
    if _end_to_end(whole, boxes):
        return
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= a < b <= extent for (a, b), extent in zip(box, shape, strict=True)):
            raise ValueError(f"a piece {box} lies outside of its shape {tuple(shape)}")
    cut = [dim for dim in range(len(shape)) if any(box[dim] != whole[dim] for box in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        raise ValueError(
            f"its {len(boxes)} pieces are cut along {len(cut)} dimensions and have more than {_MOST_CORNERS} corners; "
            "make it a tensor of fewer dimensions"
        )
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in (*((box, 1) for box in boxes), (whole, -1)):
        for choice in itertools.product((0, 1), repeat=len(cut)):
            corners[tuple(box[dim][end] for dim, end in zip(cut, choice, strict=True))] += sign * (-1) ** sum(choice)
    wrong = [corner for corner, count in corners.items() if count]
    if wrong and not cut:
        raise ValueError(f"each of its {len(boxes)} pieces is the whole tensor, of shape {tuple(shape)}")
    if wrong:
        where = ", ".join(str(start) for start in min(wrong))
        raise ValueError(f"its pieces leave elements out or have some twice, near [{where}] of dimensions {cut}")


def _end_to_end(whole: Box, boxes: Sequence[Box]) -> bool:
    """Return True if boxes are runs of the row-major elements of a tensor, end to end: ranks cut tensors so."""
    runs = []
    for box in boxes:
        if len(box) != len(whole) or any(not 0 <= a < b <= end for (a, b), (_, end) in zip(box, whole, strict=True)):
            return False
        start = run_start(box, whole)
        if start is None:
            return False
        runs.append((start, start + box_size(box)))
    runs.sort()
    ends = [0, *(stop for _, stop in runs)]
    return [start for start, _ in runs] == ends[:-1] and ends[-1] == box_size(whole)
