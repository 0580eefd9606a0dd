"""Converts checkpoints without a run: to another number of files, to one plain file, or from an archive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpishard.checkpoint import disk
from mpishard.checkpoint import manifest as manifests
from mpishard.checkpoint.contents import Contents
from mpishard.checkpoint.folder import Unfinished, named_step, provisional, publish, published
from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.manifest import INDEX, FileEntry, Manifest
from mpishard.checkpoint.pieces import BLOCK, StoredPiece, new_file, pieces_file, stored, write_pieces
from mpishard.checkpoint.sources import Source, Stored, blocks, total_bytes
from mpishard.io import hdf5
from mpishard.layout.boxes import Box, split
from mpishard.layout.run_state import link_name
from mpishard.layout.tensors import WHOLE, ParameterSpec, cut_holding


def write_checkpoint(source: Source, target: Path, *, files: int = 1, generation: int, id: str) -> None:
    """Write a checkpoint with the tensors of a source, cut evenly over some files, one piece at a time.

    Not collective.

    Parameters
    ----------
    source : Source
        What is written.
    target : Path
        Folder of the checkpoint, which must not exist; it appears as a whole or not at all.
    files : int
        Number of files with pieces; fewer if there are fewer elements.
    generation : int
        The newest checkpoint of a run has the largest one.
    id : str
        32 hexadecimal digits, unique to this checkpoint.

    Raises
    ------
    ValueError
        If the target exists, or the source cannot be read.
    OSError
        If the disk fails; nothing is left behind.
    """
    step = source.facts.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise ValueError(f"a checkpoint is of a step, a number of at least 0, not of {step!r}")
    if named_step(target) not in (None, step):
        raise ValueError(f"{target} is the name of a checkpoint of another step than {step}; give step-{step:08d}")
    if files < 1:
        raise ValueError(f"a checkpoint has at least 1 file of pieces, got {files}")
    specs = [ParameterSpec(name, shape) for name, shape in source.tensors.items()]
    whole = WHOLE.holding(specs)
    cuts = split(sum(spec.size for spec in specs), files)
    pieces: list[StoredPiece] = []
    with provisional(target, total_bytes(source, source.kinds)) as path:
        disk.make_folder(path)
        with disk.hold(path / manifests.NAME) as held:
            for writer, bounds in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
                layout = cut_holding(whole, [bounds])
                parts = [_Part(source, (kind, piece.name, piece.box)) for kind in source.kinds for piece in layout]
                if parts:
                    file = pieces_file(writer)
                    write_pieces(path / file, parts, id=id, writer=writer)
                    pieces += stored([part.where for part in parts], file)
            write_index(
                path / INDEX,
                id=id,
                generation=generation,
                tensors=source.tensors,
                kinds=source.kinds,
                pieces=pieces,
                facts=source.facts,
            )
            entries = {}
            for name in sorted({piece.file for piece in pieces} | {INDEX}):
                disk.sync(path / name)
                entries[name] = FileEntry(*manifests.hash_file(path / name))
            publish(Unfinished(path, target, id, generation, held), Manifest(id, generation, step, entries))


@dataclass(frozen=True)
class _Part:
    """A piece of a source, whose values are read when they are asked for."""

    source: Source
    where: tuple[str, str, Box]

    @property
    def values(self) -> np.ndarray:
        return self.source.read(*self.where)


def write_plain(contents: Contents, target: Path) -> None:
    """Write one HDF5 file with the facts of a checkpoint and its tensors as plain data sets, named as in its index.

    Not collective.

    Parameters
    ----------
    contents : Contents
        Those of a whole checkpoint.
    target : Path
        Must not exist; it appears as a whole or not at all.

    Raises
    ------
    ValueError
        If the target exists, or a piece does not match the index.
    OSError
        If the disk fails; nothing is left behind.
    """
    mark = f"mpishard plain {contents.id}\n".encode().ljust(BLOCK, b"\0")
    with Stored(contents) as source, published(target, total_bytes(source, source.kinds)) as path:
        with hdf5.open_to_read(contents.folder / INDEX) as index, new_file(path, mark, held=True) as (h5, file):
            h5.attrs.update(index.attrs)
            h5.attrs["format"] = "mpishard plain checkpoint"
            for group in ("json", "history"):
                if group in index:
                    index.copy(group, h5)
            del h5["json/pieces"]  # there are none
            for kind, dtype in contents.kinds.items():
                for name, shape in contents.tensors.items():
                    dataset = h5.create_dataset(f"{kind}/{link_name(name)}", shape, dtype)
                    for box in blocks(shape):
                        dataset[tuple(slice(*run) for run in box)] = source.read(kind, name, box)
                        file.check()
