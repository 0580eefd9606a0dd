"""A small checkpoint of known values, written without training."""

from __future__ import annotations

import itertools

import numpy as np

from mpishard.checkpoint.index import write_index
from mpishard.checkpoint.pieces import CheckpointReader, PieceValues, pieces_file, stored_pieces, write_pieces
from mpishard.layout.boxes import box_shape, boxes_of_range, whole_box

ID = "0123456789abcdef" * 2
TENSORS = {
    "plain.weight": (4, 6),
    "with/slash": (3,),
    "percent%b": (2, 3, 2),
    "100%": (2,),
    ".": (5,),
    "ünï.çödé": (2, 2),
    "scalar": (),
    "empty": (0, 3),
}
KINDS = {"parameters": np.dtype("f8"), "optimizer/exp_avg": np.dtype("f4")}
FACTS = {
    "steps": 50,
    "seed": 2**63 + 1,
    "rule": "AdamW",
    "loss_scale": 1.5,
    "shuffled": True,
    "rule.json": {"lr": [0.1, None, "ä"]},
    "losses": np.linspace(0, 1, 4),
    "none.yet": np.zeros(0),
}


def values(kind, name):
    shape = TENSORS[name]
    start = 1000 * list(TENSORS).index(name) + 0.5 * list(KINDS).index(kind)
    return (start + np.arange(np.prod(shape, dtype=int))).astype(KINDS[kind]).reshape(shape)


def parts(writer, writers):
    """Each writer an even run of every tensor, which cuts rows."""
    found = []
    for kind, (name, shape) in itertools.product(KINDS, TENSORS.items()):
        whole = values(kind, name)
        cuts = [whole.size * part // writers for part in range(writers + 1)]
        for box in boxes_of_range(shape, cuts[writer], cuts[writer + 1]):
            found.append(PieceValues(kind, name, box, whole[tuple(slice(*run) for run in box)]))
    return found


def save(folder, writers=3, *, facts=FACTS, compression=None, virtual=False):
    folder.mkdir()
    pieces = []
    for writer in range(writers):
        mine = parts(writer, writers)
        write_pieces(folder / pieces_file(writer), mine, id=ID, writer=writer, compression=compression)
        pieces += stored_pieces([part.where for part in mine], pieces_file(writer))
    index = {"tensors": TENSORS, "kinds": KINDS, "pieces": pieces, "facts": facts}
    write_index(folder / "index.h5", id=ID, generation=7, **index, virtual=virtual)
    return folder


def read(contents, kind, name, box=None):
    """A box of a tensor, by way of the pieces."""
    box = whole_box(TENSORS[name]) if box is None else box
    out = np.full(box_shape(box), np.nan, KINDS[kind])
    with CheckpointReader(contents) as reader:
        for piece in contents.pieces:
            if (piece.kind, piece.name) == (kind, name):
                common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece.box, strict=True)]
                if all(a < b for a, b in common):
                    place = (slice(a - c, b - c) for (a, b), (c, _) in zip(common, box, strict=True))
                    reader.read_piece(piece, tuple(common), out[(*place, ...)])
    return out
