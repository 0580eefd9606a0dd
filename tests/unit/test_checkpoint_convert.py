"""Checkpoints made of others and of archives: the same bits, nothing half-made, and nothing believed unseen."""

from __future__ import annotations

import fcntl
import io
import json
import math
import struct
import warnings
import zipfile
from dataclasses import replace

import h5py
import numpy as np
import pytest
import safetensors.numpy
from sources import FACTS, KINDS, SHAPES, Arrays, write

from mpishard.checkpoint import disk, folder
from mpishard.checkpoint.archives import Archive, blocks, write_archive, write_plain
from mpishard.checkpoint.folder import FileEntry, hash_file, read_manifest
from mpishard.checkpoint.index import read_index
from mpishard.checkpoint.pieces import CheckpointReader
from mpishard.checkpoint.verify import Difference, Figures, differences, examine, figures, newest_whole, unlike
from mpishard.layout.boxes import whole_box
from mpishard.layout.run_state import link_name

SIZE = sum(math.prod(shape) for shape in SHAPES.values())
MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("mpishard.checkpoint.archives.BLOCK", 5)


@pytest.mark.parametrize("shape", [*SHAPES.values(), (3, 1, 7), (1,)])
def test_blocks_cover_in_order(shape):
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = [whole[(*(slice(*run) for run in box), ...)].reshape(-1) for box in blocks(shape)]
    assert all(part.size <= 5 for part in parts)
    assert np.array_equal(np.concatenate([whole[:0].reshape(-1) if shape else np.empty(0), *parts]), whole.reshape(-1))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 3, SIZE + 5])
def test_any_number_of_files(files, tmp_path):
    source = Arrays()
    write(source, tmp_path / "one", files, generation=7)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    examined, _ = newest_whole(tmp_path / "one")
    contents = examined.contents
    assert examined.manifest.generation == contents.generation == 7 and examined.manifest.step == 5
    with CheckpointReader(contents) as stored:
        assert source.same(stored)
    assert np.array_equal(contents.facts.pop("losses"), FACTS["losses"])
    assert contents.facts == {name: value for name, value in FACTS.items() if name != "losses"}

    sizes = dict.fromkeys((piece.file for piece in contents.pieces), 0)
    for piece in contents.pieces:
        if piece.kind == "parameters":
            sizes[piece.file] += math.prod(piece.shape)
    assert len(sizes) == min(files, SIZE) and max(sizes.values()) - min(sizes.values()) <= 1

    with h5py.File(tmp_path / "one" / "index.h5") as h5:
        for (kind, name), values in source.values.items():
            assert np.array_equal(h5[f"{kind}/{link_name(name)}"][()], values)


def test_plain_file(tmp_path):
    source = Arrays()
    folder = write(source, tmp_path / "one", 3)
    with open(folder / "index.h5") as file:  # as where a file system has no locks
        fcntl.flock(file, fcntl.LOCK_EX)
        write_plain(read_index(folder), tmp_path / "plain.h5")
    with h5py.File(folder / "index.h5") as index, h5py.File(tmp_path / "plain.h5") as plain:
        assert dict(plain.attrs) == dict(index.attrs) | {"format": "mpishard plain checkpoint"}
        assert json.loads(plain["json/rule"][()]) == FACTS["rule.json"]
        assert np.array_equal(plain["history/losses"][()], FACTS["losses"])
        for (kind, name), values in source.values.items():
            dataset = plain[f"{kind}/{link_name(name)}"]
            assert not dataset.is_virtual and dataset.dtype == KINDS[kind]
            assert np.array_equal(dataset[()], values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "plain.h5"]


class Failing(Arrays):
    reads = 0

    def read(self, kind, name, box):
        self.reads += 1
        if self.reads == 3:
            raise OSError(5, "Input/output error")
        return super().read(kind, name, box)


@pytest.mark.parametrize("name", ["folder", "x.npz", "x.safetensors"])
def test_nothing_half_made_is_left(name, tmp_path, monkeypatch):
    make = write if name == "folder" else write_archive
    with pytest.raises(OSError, match="Input/output error.*" + name):
        make(Failing(), tmp_path / name)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="does not exist"):
        make(Arrays(), tmp_path / "absent" / name)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "free_bytes", lambda path: 100)
        with pytest.raises(OSError, match="100 are free"):
            make(Arrays(), tmp_path / name)
    assert not list(tmp_path.iterdir())
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists already"):
        make(Arrays(), tmp_path / name)


@pytest.mark.parametrize("name", ["folder", "x.npz", "x.safetensors"])
def test_what_killed_ones_left_goes(name, tmp_path):
    def begin(target, id):
        path = folder.unfinished_path(tmp_path / target, id)
        if name == "folder":
            path.mkdir()
        return path, disk.hold(path / "manifest.json" if name == "folder" else path)

    _, dead = begin(name, 8 * "1")
    dead.close()
    other, dead = begin("other", 8 * "2")
    dead.close()
    at_work, held = begin(name, 8 * "3")
    (tmp_path / f".unfinished-{name}-44444444.unheld").touch()  # killed before it had its lock
    (write if name == "folder" else write_archive)(Arrays(), tmp_path / name)
    assert set(tmp_path.iterdir()) == {tmp_path / name, other, at_work}
    held.close()


@pytest.mark.parametrize(("facts", "files", "message"), [({"step": -1}, 1, "not of -1"), ({}, 0, "at least 1 file")])
def test_what_no_checkpoint_has_is_refused(facts, files, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write(Arrays(facts=facts), tmp_path / "one", files)
    assert not list(tmp_path.iterdir())


def test_indexes_and_manifests_that_contradict(tmp_path):
    one, two = write(Arrays(), tmp_path / "one", 2), write(Arrays(1), tmp_path / "two", 2, generation=2)
    manifest = read_manifest(two)
    kept = {"index.h5": manifest.files["index.h5"], "pieces-00000.h5": manifest.files["pieces-00000.h5"]}
    (two / "manifest.json").write_bytes(replace(manifest, files=kept).encode())
    with pytest.raises(ValueError, match=r"pieces-00001\.h5, .*manifest"):
        newest_whole(two)
    (two / "index.h5").write_bytes((one / "index.h5").read_bytes())
    files = {**manifest.files, "index.h5": FileEntry(*hash_file(two / "index.h5"))}
    (two / "manifest.json").write_bytes(replace(manifest, files=files).encode())
    with pytest.raises(ValueError, match="generation 1.*generation 2"):
        newest_whole(two)


def test_what_is_examined(tmp_path):
    arrays = Arrays()
    next(values for values in arrays.values.values() if values.size > 1).reshape(-1)[0] = np.nan
    not_finite, altered, indexless = (write(arrays, tmp_path / name, 2) for name in "abc")
    for path in (altered / "pieces-00001.h5", indexless / "index.h5"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    (tmp_path / "d").mkdir()
    assert not examine(folder.candidate(not_finite)).problems
    found = [examine(folder.candidate(tmp_path / name), finite=True) for name in "abcd"]
    for each, problem in zip(found, ("1 NaN", "altered", "altered", "manifest.json is missing"), strict=True):
        assert len(each.problems) == 1 and problem in each.problems[0]
    # Of a damaged checkpoint the command line shows what can be read.
    assert [each.contents is not None for each in found] == [True, True, False, False]


# -- archives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_archives_go_and_come_back(suffix, tmp_path):
    source = Arrays()
    source.values["parameters", "gain"] = np.array(0x7FF8000000000123, np.uint64).view(float)  # a NaN like no other
    file = tmp_path / f"x.{suffix}"
    write_archive(source, tmp_path / f"parameters.{suffix}")
    with Archive(tmp_path / f"parameters.{suffix}") as archive:
        assert list(archive.kinds) == ["parameters"] and archive.tensors.keys() == SHAPES.keys()
    write_archive(source, file, optimizer=True)
    with Archive(file) as archive:
        assert source.same(archive)
        assert archive.facts == {name: value for name, value in FACTS.items() if name != "losses"}
        write(archive, tmp_path / "one")
    with CheckpointReader(newest_whole(tmp_path / "one")[0].contents) as stored:
        assert source.same(stored)

    theirs = dict(np.load(file)) if suffix == "npz" else safetensors.numpy.load_file(file)
    labels = {name if kind == "parameters" else f"{kind}/{name}": (kind, name) for kind, name in source.values}
    assert theirs.keys() == labels.keys()
    for label, key in labels.items():
        assert theirs[label].tobytes() == source.values[key].tobytes()
        assert theirs[label].shape == source.values[key].shape and theirs[label].dtype == source.values[key].dtype


def test_files_of_other_programs(tmp_path):
    swapped = {"w": np.asfortranarray(MODEL["w"]).astype(">f4"), "b": MODEL["b"]}
    np.savez(tmp_path / "a.npz", **swapped)
    np.savez_compressed(tmp_path / "b.npz", **MODEL)
    safetensors.numpy.save_file(MODEL, tmp_path / "c.safetensors", metadata={"format": "pt"})
    for name in ("a.npz", "b.npz", "c.safetensors"):
        with Archive(tmp_path / name) as archive:
            assert archive.facts == {}
            for tensor, values in MODEL.items():
                found = archive.read("parameters", tensor, whole_box(values.shape))
                assert found.dtype == np.float32 and np.array_equal(found, values)
            assert np.array_equal(archive.read("parameters", "w", ((1, 2), (0, 2))), [[3, 4]])


def npz(**members):
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def npy(shape, descr="<f4", data=b"", more=""):
    """A member whose header claims what it likes."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, {more}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(*members, method=zipfile.ZIP_STORED, comment=b""):
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of names that come twice
        for name, data in members:
            archive.writestr(name, data)
        archive.comment = comment
    return file.getvalue()


def tensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD_NPZ = npz(**MODEL)
GOOD_TENSORS = safetensors.numpy.save(MODEL)
TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)
WRONG_CRC = GOOD_NPZ.replace(MODEL["w"].tobytes(), MODEL["w"].tobytes()[::-1])
SMALL = npy("(1,)", data=bytes(4))
# The directory says that 2 GiB come out of the few bytes that are there.
CLAIMING = bytearray(zipped(("w.npy", SMALL), method=zipfile.ZIP_DEFLATED))
struct.pack_into("<I", CLAIMING, CLAIMING.index(b"PK\x01\x02") + 24, 2**31)


@pytest.mark.parametrize(
    ("suffix", "data", "message"),
    [
        ("npz", b"", "not a zip file"),
        ("npz", npz(w=np.array([{"a": 1}], object)), "Python objects"),
        ("npz", npz(w=np.arange(3)), "'w' is int64"),
        ("npz", npz(w=np.zeros(3, "f4,f8")), "convert it to float32 or float64"),
        ("npz", npz(w=np.zeros(3), b=np.zeros(3, np.float32)), "convert them to one dtype"),
        ("npz", npz(**MODEL, **{"optimizer/exp_avg/w": np.zeros((2, 3))}), "'b' is in only one of"),
        ("npz", npz(w=np.zeros(2), **{"optimizer/exp_avg/w": np.zeros(3)}), r"is \(2,\), but \(3,\) in optimizer"),
        ("npz", npz(**{"optimizer/exp_avg/w": np.zeros(3)}), "no tensor of a model"),
        ("npz", npz(w=np.zeros(2), **{"optimizer//w": np.zeros(2)}), "slot without a name"),
        ("npz", npz(**{"": np.zeros(2)}), "names no tensor"),
        ("npz", zipped(("w.txt", b"hello")), "is no array"),
        ("npz", zipped(("w.npy", b"hello")), "cannot be read"),
        ("npz", zipped(("w.npy", npy("(1,)")), ("w.npy", npy("(1,)"))), "'w.npy' is in it 2 times"),
        ("npz", zipped(("w.npy", npy("(1000000000000000,)", data=bytes(4)))), "which is not its"),
        ("npz", zipped(("w.npy", npy("(-1, -1)", data=bytes(4)))), "which no tensor has"),
        ("npz", zipped(("w.npy", npy(f"(0, {2**70})"))), "which no tensor has"),
        ("npz", zipped(("w.npy", npy((1,) * 40, data=bytes(4)))), "which no tensor has"),
        ("npz", zipped(("w.npy", npy("(1,)", data=bytes(4), more="'x': 1"))), "cannot be read"),
        ("npz", zipped(("w.npy", SMALL), method=zipfile.ZIP_LZMA), "compressed by method 14"),
        ("npz", zipped(("w.npy", SMALL), comment=b'{"mpishard": [1]}'), "facts of its run"),
        ("npz", zipped(("w.npy", SMALL), comment=b'{"mpishard": {"x": []}}'), "'x' of its run"),
        ("npz", CLAIMING, f"claims {2**31} bytes of"),
        ("npz", WRONG_CRC, "Bad CRC"),
        ("safetensors", b"", "cannot be read"),
        ("safetensors", GOOD_TENSORS[:-1], "cannot be read"),
        ("safetensors", tensors({}, length=2**62), "cannot be read"),
        ("safetensors", tensors(b"[" * 10_000), "cannot be read"),
        ("safetensors", tensors(TWICE, bytes(4)), "'a' is in it 2 times"),
        ("safetensors", tensors({"a": entry("BF16", (2,))}, bytes(4)), "'a' is BF16"),
        ("safetensors", tensors({"a": entry("F16", (2,))}, bytes(4)), "'a' is float16"),
        ("safetensors", tensors({"a": entry(shape=(2**40, 2**40))}, bytes(4)), "cannot be read"),
        ("safetensors", tensors({"a": entry(offsets=(0, 2**40), shape=(2**38,))}, bytes(4)), "cannot be read"),
        ("safetensors", tensors({"a": entry(), "__metadata__": {"mpishard": "[" * 99_999}}, bytes(4)), "be read"),
        ("safetensors", tensors({"a": entry(), "__metadata__": {"mpishard": "nonsense"}}, bytes(4)), "be read"),
        ("pt", b"\x80\x04.", "name it"),
    ],
)
def test_bad_archives_are_refused(suffix, data, message, tmp_path):
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=message), Archive(file) as archive:
        write(archive, tmp_path / "one")
    assert list(tmp_path.iterdir()) == [file]


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path):
    member = npy(f"({2**24},)", data=bytes(2**26))
    (tmp_path / "x.npz").write_bytes(zipped(("w.npy", member), method=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match=r"x\.npz .*unpack to 67108\d+"):
        Archive(tmp_path / "x.npz")


@pytest.mark.parametrize(("suffix", "good"), [("npz", GOOD_NPZ), ("safetensors", GOOD_TENSORS)])
def test_damaged_archives_are_refused_or_read(suffix, good, tmp_path):
    generator = np.random.default_rng(0)
    file = tmp_path / f"x.{suffix}"
    refused = 0
    for number in range(300):
        data = bytearray(good)
        if number % 3 == 0:
            del data[generator.integers(len(data)) :]
        for _ in range(number % 3):
            data[generator.integers(len(data))] ^= 1 << generator.integers(8)
        file.write_bytes(data)
        try:
            with Archive(file) as archive:
                for name, shape in archive.tensors.items():
                    assert archive.read("parameters", name, whole_box(shape)).shape == shape
        except ValueError:
            refused += 1
    assert refused > 100


def test_what_no_archive_can_hold(tmp_path):
    for name in ("optimizer/exp_avg/w", "__metadata__", "a\0b"):
        with pytest.raises(ValueError, match="rename it"):
            write_archive(Arrays(shapes={name: (1,)}), tmp_path / "x.npz")
    with pytest.raises(ValueError, match="export to"):
        write_archive(Arrays(facts={"notes": "x" * 70_000}), tmp_path / "x.npz")
    write_archive(Arrays(facts={"notes": "x" * 70_000}), tmp_path / "x.safetensors")


# -- figures and differences ------------------------------------------------------------------------------------------


def source(values, dtype=np.float64):
    array = np.array(values, dtype)
    made = Arrays(shapes={"w": array.shape}, kinds={"parameters": array.dtype})
    made.values["parameters", "w"] = array
    return made


def test_figures():
    found = figures(source([1, -2, np.nan, 3, np.inf, -np.inf, 2, 0, 0, 4, np.inf]), "parameters", "w")
    assert found == Figures(-2, 4, 8 / 7, math.sqrt(34 / 7), 1, 3)
    found = figures(source([np.nan]), "parameters", "w")
    assert math.isnan(found.least) and math.isnan(found.rms) and (found.nans, found.infinities) == (1, 0)


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative", "same_bits"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 0, 0, True),
        ([1, 2], np.array([1, 3], np.float32), 1, 1 / 3, False),
        ([1, 2], np.array([1, 2], np.float32), 0, 0, False),
        ([4, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 8], 3, 0.75, False),
        ([0.0], [-0.0], 0, 0, False),
        ([np.nan, 1], [np.nan, 1], 0, 0, True),
        ([np.nan, 1], [1, 1], math.inf, math.inf, False),
        ([np.nan, 1], [-np.nan, 1], 0, 0, False),
        ([np.inf], [-np.inf], math.inf, math.inf, False),
        ([np.inf, 1], [np.inf, 2], 1, 0.5, False),
        ([1e308], [-1e308], math.inf, math.inf, False),
        (0.5, 0.25, 0.25, 0.5, False),
        (np.empty((0, 3)), np.empty((0, 3)), 0, 0, True),
    ],
)
def test_differences(one, other, absolute, relative, same_bits):
    a, b = source(one), source(other, getattr(other, "dtype", float))
    assert list(differences(a, b)) == [Difference("parameters", "w", absolute, relative, same_bits)]
    assert unlike(a, b) == []


def test_what_only_one_has():
    a = Arrays(shapes={"x": (2,), "y": (3,)})
    b = Arrays(shapes={"x": (4,), "z": (1,)}, kinds={"parameters": np.float64})
    assert unlike(a, b) == [
        "optimizer/exp_avg is only in the first",
        "tensor y is only in the first",
        "tensor z is only in the second",
        "tensor x is (2,) in the first, (4,) in the second",
    ]
    assert list(differences(a, b)) == []
