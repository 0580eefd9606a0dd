"""The files of a checkpoint as HDF5 shows them."""

from __future__ import annotations

import itertools
import json
import resource
import shutil
import subprocess
from enum import StrEnum

import h5py
import numpy as np
import pytest
from checkpoint_files import FACTS, ID, KINDS, TENSORS, read, save, values
from hypothesis import given
from hypothesis import strategies as st

from mpishard.checkpoint import pieces as pieces_module
from mpishard.checkpoint.index import read_index, write_index
from mpishard.checkpoint.load import check_fits
from mpishard.checkpoint.pieces import (
    CheckpointReader,
    PieceValues,
    pieces_file,
    pieces_mark,
    stored_pieces,
    write_pieces,
)
from mpishard.layout.run_state import RunState, link_name
from mpishard.layout.tensors import ParameterSpec


@pytest.mark.parametrize(("writers", "compression"), [(1, None), (2, "gzip"), (5, "gzip")])
def test_what_was_written_is_read(tmp_path, writers, compression):
    contents = read_index(save(tmp_path / "step", writers, compression=compression))
    assert (contents.id, contents.generation, contents.kinds) == (ID, 7, KINDS)
    assert list(contents.tensors.items()) == list(TENSORS.items()) and contents.facts.keys() == FACTS.keys()
    for name, value in FACTS.items():
        assert np.array_equal(contents.facts[name], value) and type(contents.facts[name]) is type(value)
    for kind, name in itertools.product(KINDS, TENSORS):
        assert np.array_equal(read(contents, kind, name), values(kind, name))
    corner = read(contents, "parameters", "plain.weight", ((1, 3), (2, 5)))
    assert np.array_equal(corner, values("parameters", "plain.weight")[1:3, 2:5])


@pytest.mark.parametrize(("compression", "long_row", "most"), [("gzip", 2**16, 6), (None, 2**16, 6), (None, 0, 5)])
def test_a_box_with_gaps_is_read_a_block_at_a_time(tmp_path, monkeypatch, compression, long_row, most):
    """So that memory for a second copy is never needed."""
    monkeypatch.setattr(pieces_module, "_BLOCK", 4)
    monkeypatch.setattr(pieces_module, "_LONG_ROW", long_row)
    taken, real = [], CheckpointReader._read

    def read(*arguments):
        taken.append(arguments[-1].size)
        real(*arguments)

    monkeypatch.setattr(CheckpointReader, "_read", read)
    contents = read_index(save(tmp_path / "step", 1, compression=compression))
    (piece,) = [each for each in contents.pieces if (each.kind, each.name) == ("parameters", "plain.weight")]
    out = np.full((4, 9), np.nan)
    with CheckpointReader(contents) as reader:
        reader.read_piece(piece, ((1, 4), (1, 6)), out[1:, 2:7])
    assert np.array_equal(out[1:, 2:7], values("parameters", "plain.weight")[1:4, 1:6])
    assert np.isnan(out[0]).all() and np.isnan(out[:, [0, 1, 7, 8]]).all()
    assert sum(taken) in (15, 18) and max(taken) <= most


def test_any_reader_of_hdf5_sees_whole_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = save(tmp_path / "made", virtual=True).rename(tmp_path / "moved")
    with h5py.File(moved / "index.h5") as h5:
        for kind, name in itertools.product(KINDS, TENSORS):
            dataset = h5[kind][link_name(name)]
            assert (dataset.shape, dataset.dtype) == (TENSORS[name], KINDS[kind]) and np.isnan(dataset.fillvalue)
            assert np.array_equal(dataset[()], values(kind, name))
        assert (h5.attrs["steps"], h5.attrs["rule"], h5.attrs["version"]) == (50, "AdamW", 2)
        assert json.loads(h5["json/rule"][()]) == FACTS["rule.json"]
        # Files that a user has open in this process, which HDF5 has locked.
        assert np.array_equal(read(read_index(moved), "parameters", "plain.weight"), h5["parameters/plain.weight"][()])
    if shutil.which("h5dump"):  # of an older version
        command = ["h5dump", "-y", "-w", "0", "-d", "/parameters/plain.weight", str(moved / "index.h5")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        shown = done.stdout.partition("DATA {")[2].partition("}")[0].replace(",", " ").split()
        assert [float(each) for each in shown] == values("parameters", "plain.weight").ravel().tolist()
    contents = read_index(moved)
    (moved / pieces_file(1)).unlink()
    with h5py.File(moved / "index.h5") as h5:  # a piece that is gone reads as NaN
        assert np.isnan(h5["parameters/plain.weight"][()]).sum() == 8
    plain = save(tmp_path / "plain")
    assert read_index(plain).pieces == contents.pieces
    with h5py.File(plain / "index.h5") as h5:
        assert sorted(h5) == ["history", "json"]


def test_a_checkpoint_of_another_model_is_told_apart_with_a_way_out(checkpoint_folder):
    contents = read_index(checkpoint_folder)
    shapes = {**TENSORS, "plain.weight": (6, 4), "first": (2,), "second": (2,), "third": (2,)}
    del shapes["scalar"]
    with pytest.raises(ValueError) as found:
        check_fits(contents, RunState(tuple(ParameterSpec(*each) for each in shapes.items()), ()))
    assert str(found.value) == (
        f"the checkpoint {checkpoint_folder} is of another model: it has {len(TENSORS)} tensors and this model "
        f"{len(TENSORS) + 2}; first (2,) is not in it; second (2,) is not in it; it has scalar () besides; "
        "plain.weight is (4, 6) there and (6, 4) here; and 1 more differ.  Make the model as it was when the "
        f"checkpoint was saved (mpishard inspect {checkpoint_folder} shows its tensors), or name another folder"
    )
    check_fits(contents, RunState(tuple(ParameterSpec(*each) for each in TENSORS.items()), ()))


def test_a_link_in_the_place_of_a_new_file_is_not_followed(tmp_path):
    """Another user may have put it there, with a file of the owner's at its other end."""
    own, link = tmp_path / "own", tmp_path / pieces_file(0)
    own.write_text("secret")
    link.symlink_to(own)
    with pytest.raises(FileExistsError):
        write_pieces(link, [], id=ID, writer=0)
    assert own.read_text() == "secret"


def test_a_writer_with_nothing_to_write(tmp_path):
    write_pieces(tmp_path / pieces_file(0), [], id=ID, writer=0)
    empty = PieceValues("parameters", "empty", ((0, 0), (0, 3)), np.empty((0, 3)))
    write_pieces(tmp_path / pieces_file(1), [empty], id=ID, writer=1)
    with h5py.File(tmp_path / pieces_file(1)) as h5:
        assert stored_pieces([empty.where], pieces_file(1)) == [] == list(h5)


def test_values_that_do_not_fit_are_not_written(tmp_path):
    for wrong in (np.zeros((2, 2)), np.zeros(3, np.int64), np.zeros(3, complex)):
        with pytest.raises(ValueError, match=r"floating-point .*\(3,\)"):
            write_pieces(tmp_path / "x.h5", [PieceValues("parameters", "a", ((0, 3),), wrong)], id=ID, writer=0)
        (tmp_path / "x.h5").unlink()
    with pytest.raises(ValueError, match="compression 'zip'"):
        write_pieces(tmp_path / "x.h5", [], id=ID, writer=0, compression="zip")


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        ({"a/b": 1}, "cannot be named 'a/b'"),
        ({"version": 1}, "cannot be named 'version'"),
        ({"tensors.json": []}, "cannot be named 'tensors.json'"),
        ({"x": None}, "'x' is a NoneType"),
        ({"x": np.zeros((2, 2))}, "1-D"),
        ({"x": np.array(["a"])}, "of numbers"),
        ({"x": 2**64}, "64 bits"),
    ],
)
def test_facts_that_cannot_be_stored(tmp_path, fact, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "step", facts=fact)


class Mode(StrEnum):
    FAST = "fast"


def test_texts_of_other_classes_are_texts(tmp_path):
    save(tmp_path / "step", facts={"host": np.str_("node7"), "mode": Mode.FAST})
    assert read_index(tmp_path / "step").facts == {"host": "node7", "mode": "fast"}


def test_an_index_must_have_each_element_once(tmp_path):
    pieces = stored_pieces([("parameters", "a", ((0, 2),)), ("parameters", "a", ((1, 4),))], pieces_file(0))
    for wrong in (pieces, pieces[:1], pieces[1:], []):
        with pytest.raises(ValueError, match="parameters of tensor 'a'"):
            tables = {"tensors": {"a": (4,)}, "kinds": {"parameters": np.dtype("f8")}, "pieces": wrong, "facts": {}}
            write_index(tmp_path / "index.h5", id=ID, generation=1, **tables)
        assert not (tmp_path / "index.h5").exists()


# -- errors of the disk -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_disk_that_fails_at_any_byte_leaves_nothing_open(tmp_path, compression):
    """A limit on the size of files stands for the full disk."""
    path = tmp_path / pieces_file(0)
    many = [PieceValues("parameters", f"t{i}", ((0, 300),), np.random.default_rng(i).random(300)) for i in range(60)]
    write_pieces(path, many, id=ID, writer=0, compression=compression)
    size = path.stat().st_size
    path.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    opened = h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_GROUP | h5py.h5f.OBJ_DATASET
    before = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, opened)
    for limit in (0, 100, 511, 512, 600, *range(1000, size - 1, size // 40), size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"File too large: '.*pieces-00000\.h5'") as caught:
                write_pieces(path, many, id=ID, writer=0, compression=compression)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.filename == str(path)
        assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, opened) == before
        assert path.read_bytes()[:512] != pieces_mark(ID, 0)
        path.unlink()
    write_pieces(path, many, id=ID, writer=0, compression=compression)
    assert path.stat().st_size == size
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_pieces(tmp_path / "nowhere" / path.name, many, id=ID, writer=0)


@given(st.data())
def test_any_box_of_a_piece_is_read_into_an_array_with_gaps(data):
    """Values lie end to end in the file."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    ends = [st.sets(st.integers(0, extent), min_size=2, max_size=2) for extent in shape]
    box = tuple(tuple(sorted(data.draw(each))) for each in ends)
    whole = np.arange(np.prod(shape, dtype=int), dtype="f4").reshape(shape)
    gaps = data.draw(st.booleans())
    out = np.full([(1 + gaps) * (stop - start) for start, stop in box], np.nan, "f4")
    view = out[(*(slice(0, stop - start) for start, stop in box), ...)]
    flat = whole.reshape(-1)

    def read(element, run):
        assert run.flags.c_contiguous and run.ndim == 1
        run[:] = flat[element : element + run.size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "_BLOCK", data.draw(st.sampled_from([1, 7, 1000])))
        patch.setattr(pieces_module, "_LONG_ROW", data.draw(st.sampled_from([0, 20, 1000])))
        pieces_module._read_rows(read, shape, [start for start, _ in box], view)
    assert np.array_equal(view, whole[(*(slice(*run) for run in box), ...)])
