"""The bytes of many virtual data sets: the HDF5 library finds in them what it would have written itself."""

from __future__ import annotations

import io
import shutil
import subprocess

import h5py
import numpy as np
import pytest

from mpishard.io.hdf5 import VirtualDataset, VirtualSource, fill_groups, group_address, lookup3
from mpishard.layout.boxes import whole_box

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


@pytest.mark.parametrize("count", [1, 8, 9, 256, 257, 20_000])
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


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("userblock", [512, 1024])
def test_data_sets_of_every_kind(tmp_path, dtype, userblock):
    values = np.arange(60).astype(dtype)
    with h5py.File(tmp_path / OWN, "w") as h5:
        h5["100%b"] = values
    box = ((1, 3), (0, 2), (2, 5))
    sets = [
        VirtualDataset("scalar", (), [VirtualSource((), OWN, "/100%b", 3)]),
        VirtualDataset("empty", (0, 3), []),
        VirtualDataset("part", (3, 2, 5), [VirtualSource(box, OWN, "/100%b", 7)]),
        VirtualDataset(
            "two", (4,), [VirtualSource(((2, 4),), OWN, "/100%b", 0), VirtualSource(((0, 2),), OWN, "/100%b", 50)]
        ),
        VirtualDataset("none", (2,), [VirtualSource(((0, 2),), "gone.h5", "/x", 0)]),
        VirtualDataset("large", (2**33,), [VirtualSource(((2**32, 2**32 + 4),), OWN, "/100%b", 9)]),
        VirtualDataset("far", (4,), [VirtualSource(((0, 4),), OWN, "/100%b", 2**40)]),
        VirtualDataset("ünï", (2,), [VirtualSource(((0, 2),), OWN, "/100%b", 1)]),
        VirtualDataset("x" * 3000, (1,), [VirtualSource(((n, n + 1),), OWN, "/100%b", n) for n in range(1)]),
        VirtualDataset("many", (60,), [VirtualSource(((n, n + 1),), OWN, "/100%b", 59 - n) for n in range(60)]),
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


def test_the_library_writes_the_same_mapping(tmp_path):
    """To the byte, with its checksum."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space, source = h5py.h5s.create_simple((4, 6)), h5py.h5s.create_simple((100,))
    space.select_hyperslab((1, 2), (2, 3))
    source.select_hyperslab((10,), (6,))
    plist.set_virtual(space, OWN.encode(), b"/values", source)
    with h5py.File(tmp_path / "theirs.h5", "w", libver=("earliest", "v110")) as h5:
        h5py.h5d.create(h5.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4, 6)), plist)
    ours = VirtualDataset("x", (4, 6), [VirtualSource(((1, 3), (2, 5)), OWN, "/values", 10)])
    found = []
    for path in (tmp_path / "theirs.h5", made(tmp_path / "ours.h5", {"all": ("f4", [ours])})):
        data = path.read_bytes()
        heap = data.index(b"GCOL") + 16
        size = int.from_bytes(data[heap + 8 : heap + 16], "little")
        found.append(data[heap + 16 : heap + 16 + size])
    assert found[0] == found[1] and OWN.encode() in found[0]


def test_lookup3():
    """The values in lookup3.c."""
    assert lookup3(np.frombuffer(b"Four score and seven years ago", np.uint8)[None]).tolist() == [0x17770551]
    rows = np.random.default_rng(0).integers(0, 256, (5, 24), np.uint8)
    assert lookup3(rows).tolist() == [int(lookup3(row[None])[0]) for row in rows]
