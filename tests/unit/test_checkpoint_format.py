"""The files of a checkpoint as HDF5 shows them."""

from __future__ import annotations

import io
import itertools
import json
import resource
import shutil
import subprocess

import h5py
import numpy as np
import pytest
from checkpoint_files import FACTS, ID, KINDS, TENSORS, read, save, values
from hypothesis import given
from hypothesis import strategies as st

from mpishard.checkpoint import pieces as pieces_module
from mpishard.checkpoint.index import check_virtual_datasets, read_index, write_index
from mpishard.checkpoint.load import check_fits
from mpishard.checkpoint.pieces import PieceReader, PieceValues, pieces_file, pieces_mark, stored, write_pieces
from mpishard.io.hdf5 import VirtualDataset, VirtualSource, fill_groups, group_address, lookup3
from mpishard.layout.boxes import whole_box
from mpishard.layout.run_state import RunState, link_name
from mpishard.layout.tensors import ParameterSpec


@pytest.mark.parametrize(("writers", "compression"), [(1, None), (2, "gzip"), (5, "gzip")])
def test_what_was_written_is_read(tmp_path, writers, compression):
    contents = read_index(save(tmp_path / "step", writers, compression=compression))
    check_virtual_datasets(contents)
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
    taken, real = [], PieceReader._read

    def read(*arguments):
        taken.append(arguments[-1].size)
        real(*arguments)

    monkeypatch.setattr(PieceReader, "_read", read)
    contents = read_index(save(tmp_path / "step", 1, compression=compression))
    (piece,) = [each for each in contents.pieces if (each.kind, each.name) == ("parameters", "plain.weight")]
    out = np.full((4, 9), np.nan)
    with PieceReader(contents) as reader:
        reader.read(piece, ((1, 4), (1, 6)), out[1:, 2:7])
    assert np.array_equal(out[1:, 2:7], values("parameters", "plain.weight")[1:4, 1:6])
    assert np.isnan(out[0]).all() and np.isnan(out[:, [0, 1, 7, 8]]).all()
    assert sum(taken) in (15, 18) and max(taken) <= most


def test_any_reader_of_hdf5_sees_whole_tensors(checkpoint_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = checkpoint_folder.rename(tmp_path / "moved")
    with h5py.File(moved / "index.h5") as h5:
        for kind, name in itertools.product(KINDS, TENSORS):
            dataset = h5[kind][link_name(name)]
            assert (dataset.shape, dataset.dtype) == (TENSORS[name], KINDS[kind])
            assert np.array_equal(dataset[()], values(kind, name))
        assert (h5.attrs["steps"], h5.attrs["rule"], h5.attrs["version"]) == (50, "AdamW", 2)
        assert json.loads(h5["json/rule"][()]) == FACTS["rule.json"]
        (moved / pieces_file(1)).unlink()
    with h5py.File(moved / "index.h5") as h5:  # a piece that is gone reads as NaN
        assert np.isnan(h5["parameters/plain.weight"][()]).sum() == 8


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
        assert stored([empty.where], pieces_file(1)) == [] == list(h5)


def test_values_that_do_not_fit_are_not_written(tmp_path):
    for wrong in (np.zeros((2, 2)), np.zeros(3, np.int64), np.zeros(3, complex)):
        with pytest.raises(ValueError, match=r"wanted floating-point numbers of shape \(3,\)"):
            write_pieces(tmp_path / "x.h5", [PieceValues("parameters", "a", ((0, 3),), wrong)], id=ID, writer=0)
        (tmp_path / "x.h5").unlink()
    with pytest.raises(ValueError, match="compression 'zip' is not one of"):
        write_pieces(tmp_path / "x.h5", [], id=ID, writer=0, compression="zip")


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        ({"a/b": 1}, "cannot be named 'a/b'"),
        ({"version": 1}, "cannot be named 'version'"),
        ({"tensors.json": []}, "cannot be named 'tensors.json'"),
        ({"x": None}, "'x' is a NoneType; name it 'x.json'"),
        ({"x": np.zeros((2, 2))}, "1-D"),
        ({"x": np.array(["a"])}, "of numbers"),
        ({"x": 2**64}, "64 bits"),
    ],
)
def test_facts_that_cannot_be_stored(tmp_path, fact, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "step", facts=fact)


def test_an_index_must_have_each_element_once(tmp_path):
    pieces = stored([("parameters", "a", ((0, 2),)), ("parameters", "a", ((1, 4),))], pieces_file(0))
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


# The bytes of many virtual data sets: the HDF5 library finds in them what it would have written itself.

OWN = "beside.h5"


def made(path, groups, userblock=512):
    """A file with groups of virtual data sets, and something else in it."""
    with io.FileIO(path, "w+") as file:
        with h5py.File(file, "w", libver=("earliest", "v110"), userblock_size=userblock) as h5:
            h5.attrs["fact"] = 7
            h5["history/loss"] = np.arange(3.0)
            places = {name: group_address(h5.create_group(name)) for name in groups}
        fill_groups(file, [(places[name], np.dtype(dtype), sets) for name, (dtype, sets) in groups.items()])
    return path


def whole(name, shape, start):
    return VirtualDataset(name, shape, [VirtualSource(whole_box(shape), OWN, "/values", start)])


@pytest.mark.parametrize("count", [1, 8, 9, 257, 20_000])
def test_every_name_is_found(tmp_path, count):
    """In trees of one to three levels, and in one heap or many."""
    with h5py.File(tmp_path / OWN, "w") as h5:
        h5["values"] = np.arange(2.0 * count, dtype="f4")
    sets = [whole(f"tensor.{number}", (2,), 2 * number) for number in range(count)]
    path = made(tmp_path / "x.h5", {"all": ("f4", sets), "group/more": ("f4", sets[:1])})
    with h5py.File(path) as h5:
        assert h5.attrs["fact"] == 7 and h5["history/loss"][2] == 2
        assert len(h5["group/more"]) == 1 and list(h5["all"]) == sorted(each.name for each in sets)
        for number in {*range(0, count, max(1, count // 300)), count - 1}:
            assert h5[f"all/tensor.{number}"][()].tolist() == [2 * number, 2 * number + 1]
        assert "tensor.x" not in h5["all"] and "a" not in h5["all"]


@pytest.mark.parametrize(("dtype", "userblock"), [("f2", 512), ("f4", 1024), ("f8", 512)])
def test_data_sets_of_every_kind(tmp_path, dtype, userblock):
    values = np.arange(60).astype(dtype)
    with h5py.File(tmp_path / OWN, "w") as h5:
        h5["100%b"] = values

    def source(start, *box, file=OWN):
        return VirtualSource(box, file, "/100%b", start)

    sets = [
        VirtualDataset("scalar", (), [source(3)]),
        VirtualDataset("empty", (0, 3), []),
        VirtualDataset("part", (3, 2, 5), [source(7, (1, 3), (0, 2), (2, 5))]),
        VirtualDataset("two", (4,), [source(0, (2, 4)), source(50, (0, 2))]),
        VirtualDataset("none", (2,), [source(0, (0, 2), file="gone.h5")]),
        VirtualDataset("large", (2**33,), [source(9, (2**32, 2**32 + 4))]),
        VirtualDataset("far", (4,), [source(2**40, (0, 4))]),
        VirtualDataset("ünï", (2,), [source(1, (0, 2))]),
        VirtualDataset("x" * 3000, (1,), [source(0, (0, 1))]),
        VirtualDataset("many", (60,), [source(59 - n, (n, n + 1)) for n in range(60)]),
    ]
    path = made(tmp_path / "x.h5", {"all": (dtype, sets)}, userblock)
    with h5py.File(path) as h5:
        group = h5["all"]
        assert {each.name: each.shape for each in sets} == {name: each.shape for name, each in group.items()}
        assert all(each.dtype == np.dtype(dtype) and np.isnan(each.fillvalue) for each in group.values())
        assert group["scalar"][()] == 3 and group["empty"].size == 0
        part = group["part"][()]
        assert np.array_equal(part[1:3, 0:2, 2:5].ravel(), values[7:19]) and np.isnan(part).sum() == 18
        assert group["two"][()].tolist() == [50, 51, 0, 1] and np.isnan(group["none"][()]).all()
        assert group["large"][2**32 : 2**32 + 4].tolist() == [9, 10, 11, 12]
        assert np.isnan(group["large"][2**32 - 2 : 2**32]).all()
        (far,) = group["far"].virtual_sources()
        assert far.src_space.get_select_bounds() == ((2**40,), (2**40 + 3,))
        assert group["ünï"][()].tolist() == [1, 2] and group["x" * 3000][()].tolist() == [0]
        assert group["many"][()].tolist() == list(range(59, -1, -1))
    if shutil.which("h5dump"):  # of an older version
        command = ["h5dump", "-y", "-w", "0", "-d", "/all/many", "-d", "/all/scalar", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True)
        many, scalar = (part.partition("}")[0].replace(",", " ").split() for part in done.stdout.split("DATA {")[1:])
        assert [float(each) for each in many] == list(range(59, -1, -1)) and scalar == ["3"]
    with h5py.File(path, "r+") as h5:  # the library can go on with it
        del h5["all/two"]
        h5["all/more"] = np.zeros(3)
        h5["all/part"].attrs["note"] = "x"
    with h5py.File(path) as h5:
        assert "two" not in h5["all"] and h5["all/more"].shape == (3,) and h5["all/scalar"][()] == 3


def test_lookup3():
    """The values in lookup3.c."""
    assert lookup3(np.frombuffer(b"Four score and seven years ago", np.uint8)[None]).tolist() == [0x17770551]
    rows = np.random.default_rng(0).integers(0, 256, (5, 24), np.uint8)
    assert lookup3(rows).tolist() == [int(lookup3(row[None])[0]) for row in rows]
