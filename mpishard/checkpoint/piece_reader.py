"""Reads files of pieces, written in any layout, into the arrays of a run, in any layout."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import h5py
import numpy as np

from mpishard.backend import array as arrays
from mpishard.checkpoint import checks, polling
from mpishard.checkpoint.index import Contents
from mpishard.checkpoint.pieces import StoredPiece, pieces_mark, read_mark, writer_of
from mpishard.comm.axis import Axis
from mpishard.comm.reshard import reshard
from mpishard.io import hdf5
from mpishard.layout.boxes import Box, boxes_of_range, intersect
from mpishard.layout.run_state import RunState, Shard, check_same_tensors

Array = Any

# Files stay open for the next piece, but a process may only have about a thousand open files.
_OPEN_FILES = 64
# Elements read at a time where they are not contiguous in their array.
_BLOCK = 2**22
_MOST_SHOWN = 3


class PieceReader:
    """Reads pieces of one checkpoint.  A context manager, which closes the files; not collective.

    It opens files with HDF5; compare their hashes with the manifest before.

    Parameters
    ----------
    contents : Contents
        The result of `read_index`.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._files: OrderedDict[str, h5py.File] = OrderedDict()
        self._opened: tuple[StoredPiece, h5py.h5d.DatasetID] | None = None

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None
        while self._files:
            self._files.popitem()[1].close()

    def read(self, piece: StoredPiece, inside: Box, out: np.ndarray) -> None:
        """Read the box `inside` of the global tensor, which must be inside the piece, into `out`.

        Parameters
        ----------
        piece : StoredPiece
            One of ``contents.pieces``.
        inside : Box
            A box of the global tensor, not relative to the piece.  Only its rows are read.
        out : array
            Host memory shaped like `inside`, of the dtype of the piece's kind; may have gaps.

        Raises
        ------
        ValueError
            With file and data set, if either is missing, belongs to another checkpoint, or is not as `write_pieces`
            writes this piece.
        """
        shape = tuple(stop - start for start, stop in inside)
        assert intersect(inside, piece.box) == inside and out.shape == shape, (inside, piece, out.shape)
        with checks.refusing(self._contents.folder / piece.file):
            dataset = self._dataset(piece)
            if out.dtype != dataset.dtype:
                raise ValueError(f"{piece.dataset} is {dataset.dtype}, wanted {out.dtype}")
            first = [start - origin for (start, _), (origin, _) in zip(inside, piece.box, strict=True)]
            if out.flags.c_contiguous:
                _read_box(dataset, first, out)
                return
            for begin in range(0, out.size, _BLOCK):
                for box in boxes_of_range(shape, begin, min(begin + _BLOCK, out.size)):
                    part = np.empty([stop - start for start, stop in box], out.dtype)
                    _read_box(dataset, [a + start for a, (start, _) in zip(first, box, strict=True)], part)
                    out[_within(box, tuple((0, extent) for extent in shape))] = part

    def check(self, piece: StoredPiece) -> None:
        """Raise ValueError, as `read` does, unless all of a piece can be read; decodes its chunks."""
        with checks.refusing(self._contents.folder / piece.file), checks.naming_tensor(piece.kind, piece.name):
            hdf5.check_chunks(self._dataset(piece))

    def _dataset(self, piece: StoredPiece) -> h5py.h5d.DatasetID:
        """Open the data set of a piece, and check it."""
        if self._opened is not None and self._opened[0] is piece:
            return self._opened[1]
        file = self._file(piece.file)
        path = ""
        for name in piece.dataset.strip("/").split("/"):
            path = f"{path}/{name}"
            hdf5.check_hard_link(file, path)
        dataset = h5py.h5d.open(file.id, path.encode())
        hdf5.check_lies_here(dataset)
        dtype = self._contents.kinds[piece.kind]
        if dataset.shape != piece.shape or dataset.dtype != dtype:
            raise ValueError(f"{path} is {dataset.dtype} {dataset.shape}, in the index {dtype} {piece.shape}")
        hdf5.check_written(dataset)
        self._opened = piece, dataset
        return dataset

    def _file(self, name: str) -> h5py.File:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        path = checks.file_inside(self._contents.folder, name)
        mark, wanted = read_mark(path), pieces_mark(self._contents.id, writer_of(name))
        if mark != wanted:
            raise ValueError(f"its first bytes {mark[:55]!r} are not those of this checkpoint, {wanted[:55]!r}")
        if len(self._files) == _OPEN_FILES:
            self._opened = None
            self._files.popitem(last=False)[1].close()
        self._files[name] = h5py.File(path, "r", locking=False)
        return self._files[name]


def _read_box(dataset: h5py.h5d.DatasetID, first: Sequence[int], out: np.ndarray) -> None:
    """Read a box of a data set, which begins at the indices `first`, into the contiguous array `out`."""
    space = dataset.get_space()
    if out.shape:
        space.select_hyperslab(tuple(first), out.shape)
    memory = h5py.h5s.create_simple(out.shape) if out.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset.read(memory, space, out)


def damages(contents: Contents, pieces: Iterable[StoredPiece]) -> list[str]:
    """Texts for the problems of these pieces of a checkpoint, the first few.  Not collective.

    Empty: all their values can be read, unless the disk fails.
    """
    found: list[str] = []
    with PieceReader(contents) as reader:
        for piece in pieces:
            try:
                reader.check(piece)
            except ValueError as error:
                found.append(str(error))
                if len(found) == _MOST_SHOWN:
                    break
    return found


def check_fits(contents: Contents, state: RunState) -> None:
    """Raise ValueError unless a checkpoint has all parts of a state.

    It must have the same tensors, in any order, and all required kinds of arrays (it may have more), with the same
    dtypes.
    """
    what = f"the checkpoint {contents.folder}"
    check_same_tensors(what, list(contents.tensors.items()), [(spec.name, spec.shape) for spec in state.specs])
    for shard in state.shards:
        dtype = contents.kinds.get(shard.kind)
        if dtype is None and not shard.required:
            continue
        if dtype is None:
            raise ValueError(
                f"{what} has no {shard.kind}, but {', '.join(contents.kinds)}; make the optimizer as it was when "
                "the checkpoint was saved, or load the parameters alone"
            )
        if dtype != shard.array.dtype:
            raise ValueError(
                f"{what} has {shard.kind} in {dtype}, and this run in {np.dtype(shard.array.dtype)}; make the model "
                f"with dtype {dtype}"
            )


def fill(contents: Contents, state: RunState, axis: Axis, patient: Axis) -> None:
    """Fill the arrays of a state from a checkpoint without `damages`.  Collective; the ranks count each element once.

    Each rank reads the elements that it stands for, straight into its arrays, so that every element is read from the
    disk once; copies come from that rank.

    Parameters
    ----------
    contents : Contents
    state : RunState
        Its arrays are written.
    axis, patient : Axis
        The ranks of the state: for moving elements, and for waiting for a disk.

    Raises
    ------
    ValueError
        On all ranks: before anything is written if the checkpoint is of something else, as `check_fits` tells, or
        when a piece cannot be read, with the arrays partly filled.
    """
    problem: Exception | None = None
    try:
        check_fits(contents, state)
    except ValueError as error:
        problem = error
    axis.raise_if_any(problem)
    problems = []
    try:
        with PieceReader(contents) as reader:
            for shard in state.shards:
                if shard.kind in contents.kinds:
                    _read_counted(reader, contents, shard)
                else:
                    shard.array[...] = 0
    except ValueError as error:
        problems = [str(error)]
    problems = polling.gather_lists(patient, problems)
    if problems:
        raise ValueError("; ".join(problems[:_MOST_SHOWN]))
    lacking = [sum(p.size for p in shard.counted) < sum(p.size for p in shard.holding) for shard in state.shards]
    some = axis.all_reduce(np.array([*lacking, False], np.int64), op="max", label="control")
    for shard, copies in zip(state.shards, some[:-1], strict=True):
        if copies:
            reshard(axis, replace(shard, holding=shard.counted), shard)


def _read_counted(reader: PieceReader, contents: Contents, shard: Shard) -> None:
    """Read what this rank stands for into the shard's array."""
    stored: dict[str, list[StoredPiece]] = defaultdict(list)
    for piece in contents.pieces:
        if piece.kind == shard.kind:
            stored[piece.name].append(piece)
    staging = None
    if arrays.is_device(shard.array):
        most = max((piece.size for piece in shard.counted), default=0)
        staging = arrays.pinned_empty(most, shard.array.dtype, shard.array)
    for wanted in shard.counted:
        target = shard.array[wanted.start : wanted.start + wanted.size]
        host = target if staging is None else staging[: wanted.size]
        values = host.reshape(wanted.shape)
        for source in stored[wanted.name]:
            common = intersect(wanted.box, source.box)
            if common is not None:
                reader.read(source, common, values[_within(common, wanted.box)])
        if staging is not None:
            arrays.copy_to_device(host, target)


def _within(box: Box, outer: Box) -> tuple[Any, ...]:
    """The index of `box` in an array of the values of `outer`; a view of a scalar too."""
    return (*(slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True)), ...)
