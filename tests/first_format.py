"""Checkpoints of version 1 of the format, in which each piece is a data set of its own, for tests that read them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import h5py
import numpy as np

from mpishard.checkpoint.index import index_mark
from mpishard.checkpoint.manifest import FileEntry, Manifest, hash_file
from mpishard.checkpoint.pieces import PieceValues, pieces_file, pieces_mark
from mpishard.layout.run_state import link_name

TEXT = h5py.string_dtype()


def save(folder, parts, *, id, generation, tensors, kinds, facts, compression=None):
    """Write an index and files with the parts of each writer; not the manifest."""
    folder = Path(folder)
    sources = {(kind, name): [] for kind in kinds for name in tensors}
    for writer, own in enumerate(parts):
        numbers = Counter()
        path = folder / pieces_file(writer)
        with h5py.File(path, "w", libver=("earliest", "v110"), userblock_size=512) as h5:
            h5.attrs.update(format="mpishard pieces", version=1, id=id, writer=writer)
            for part in own:
                if not part.values.size:
                    continue
                link = f"/{part.kind}/{link_name(part.name)}/{numbers[part.kind, part.name]}"
                numbers[part.kind, part.name] += 1
                filters = {"compression": compression, "shuffle": True} if compression and part.values.ndim else {}
                h5.create_dataset(link, data=part.values, **filters)
                sources[part.kind, part.name].append((part.box, path.name, link))
        mark(path, pieces_mark(id, writer))
    with h5py.File(folder / "index.h5", "w", libver=("earliest", "v110"), userblock_size=512) as h5:
        h5.attrs.update(format="mpishard checkpoint", version=1, mpishard_version="0.1", id=id)
        h5.attrs.update(generation=generation, saved="2026-01-01T00:00:00+00:00")
        texts = {"tensors": [[name, list(shape)] for name, shape in tensors.items()]}
        texts["kinds"] = {kind: np.dtype(dtype).name for kind, dtype in kinds.items()}
        for name, value in facts.items():
            if name.endswith(".json"):
                texts[name.removesuffix(".json")] = value
            elif isinstance(value, np.ndarray):
                h5.create_dataset(f"history/{name}", data=value)
            else:
                h5.attrs[name] = value
        for name, text in texts.items():
            h5.create_dataset(f"json/{name}", data=json.dumps(text, sort_keys=True), dtype=TEXT)
        for kind, dtype in kinds.items():
            group = h5.create_group(kind).id
            for name, shape in tensors.items():
                _virtual(group, link_name(name), shape, np.dtype(dtype), sources[kind, name])
    mark(folder / "index.h5", index_mark(id))


def _virtual(group, link, shape, dtype, sources):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_value(np.array(np.nan, dtype))
    for box, file, dataset in sources:
        sizes = tuple(stop - start for start, stop in box)
        space = _space(shape)
        if shape:
            space.select_hyperslab(tuple(start for start, _ in box), sizes)
        plist.set_virtual(space, file.encode(), dataset.replace("%", "%%").encode(), _space(sizes))
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    h5py.h5d.create(group, link.encode(), h5py.h5t.py_create(dtype, logical=True), _space(shape), plist, links)


def _space(shape):
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def mark(path, data):
    with open(path, "r+b") as file:
        file.write(data)


def save_state(folder, states, *, id="0" * 32, generation=1):
    """A whole checkpoint of the states of all ranks."""
    folder.mkdir(parents=True)
    parts = [
        [
            PieceValues(shard.kind, piece.name, piece.box, values.reshape(piece.shape))
            for shard in state.shards
            for piece in shard.counted
            for values in [shard.array[piece.start : piece.start + piece.size]]
        ]
        for state in states
    ]
    first = states[0]
    tensors = {spec.name: spec.shape for spec in first.specs}
    kinds = {shard.kind: shard.array.dtype for shard in first.shards}
    save(folder, parts, id=id, generation=generation, tensors=tensors, kinds=kinds, facts=first.facts)
    files = {path.name: FileEntry(*hash_file(path)) for path in folder.iterdir()}
    (folder / "manifest.json").write_bytes(Manifest(id, generation, first.facts["step"], files).encode())
