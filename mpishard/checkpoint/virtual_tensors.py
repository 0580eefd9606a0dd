"""The tensors of an index as virtual data sets: how they are written, and what they must be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import h5py
import numpy as np

from mpishard.checkpoint import checks
from mpishard.checkpoint.contents import INDEX, Contents
from mpishard.checkpoint.pieces import StoredPiece
from mpishard.io import hdf5
from mpishard.io.virtual_datasets import Source, VirtualDataset
from mpishard.layout.run_state import link_name

_PIECES = re.compile(r"pieces-[0-9]{5,}\.h5")


def of(
    tensors: Mapping[str, Sequence[int]],
    kinds: Iterable[str],
    pieces: Mapping[tuple[str, str], Sequence[StoredPiece]],
) -> Iterator[tuple[str, list[VirtualDataset]]]:
    """For each kind the data sets of all tensors.  Not collective.

    Parameters
    ----------
    tensors : mapping of str to shape
    kinds : iterable of str
    pieces : mapping of (str, str) to sequence of StoredPiece
        By kind and tensor.
    """
    for kind in kinds:
        found = []
        for name, shape in tensors.items():
            sources = [Source(piece.box, piece.file, piece.dataset, piece.start) for piece in pieces[kind, name]]
            found.append(VirtualDataset(link_name(name), tuple(shape), sources))
        yield kind, found


def check(contents: Contents) -> None:
    """Raise ValueError unless other programs find in the index exactly the tensors that mpishard reads.

    Nothing that mpishard loads depends on it.  Not collective.

    Parameters
    ----------
    contents : Contents
        The result of `read_index`.

    Raises
    ------
    ValueError
        With the path, if links or virtual data sets lead elsewhere, or there are others.
    """
    path = contents.folder / INDEX
    with checks.refusing(path), hdf5.open_to_read(path, locking=False) as h5:
        checks.check_links(h5, _expected(h5, contents.tensors, contents.kinds))
        found = {
            piece
            for kind, dtype in contents.kinds.items()
            for name, shape in contents.tensors.items()
            for piece in _mapped(h5, kind, name, shape, dtype)
        }
        for one in found ^ set(contents.pieces):
            with checks.naming_tensor(one.kind, one.name):
                raise ValueError("its virtual data set takes other values than its table of pieces says")


def _expected(h5: h5py.File, tensors: Iterable[str], kinds: Iterable[str]) -> set[str]:
    """The paths of all links of an index with these tables."""
    links = [link_name(name) for name in tensors]
    paths = {f"{kind}/{link}" for kind in kinds for link in links}
    paths |= {*kinds, *(kind.partition("/")[0] for kind in kinds)}
    for group in ("json", "history"):
        if h5.id.links.exists(group.encode()):
            paths |= {group, *(f"{group}/{name}" for name in hdf5.children(h5, group))}
    return paths


def _mapped(h5: h5py.File, kind: str, name: str, shape: tuple[int, ...], dtype: np.dtype) -> list[StoredPiece]:
    """The pieces of a virtual data set."""
    dataset = h5py.h5d.open(h5.id, f"{kind}/{link_name(name)}".encode())
    with checks.naming_tensor(kind, name):
        pieces: list[StoredPiece] = []
        if 0 in shape:
            hdf5.check_lies_here(dataset)
        else:
            plist = dataset.get_create_plist()
            if plist.get_layout() != h5py.h5d.VIRTUAL:
                raise ValueError("it is not a virtual data set over pieces")
            pieces = [_source(plist, number, kind, name) for number in range(plist.get_virtual_count())]
        # Last: to get the shape HDF5 may open the sources.
        if dataset.shape != shape or dataset.dtype != dtype:
            raise ValueError(f"it is {dataset.dtype} {dataset.shape}, in the tables {dtype} {shape}")
        return pieces


def _source(plist: h5py.h5p.PropDCID, number: int, kind: str, name: str) -> StoredPiece:
    file = plist.get_virtual_filename(number)
    if not _PIECES.fullmatch(file):
        raise ValueError(f"it takes values from {file!r}, which is no file of pieces in this folder")
    dataset = plist.get_virtual_dsetname(number).replace("%%", "%")
    run = checks.box_of(plist.get_virtual_srcspace(number))
    if dataset != f"/{kind}" or len(run) != 1:
        raise ValueError(f"it takes values from {dataset!r} of {file}; wanted a run of /{kind}")
    return StoredPiece(kind, name, checks.box_of(plist.get_virtual_vspace(number)), file, run[0][0])
