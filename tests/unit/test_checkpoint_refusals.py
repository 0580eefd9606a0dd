"""Checkpoints that are refused: altered, hostile, or of another model."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import zlib

import h5py
import numpy as np
import pytest
from checkpoint_files import ID, KINDS, parts, read
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from runs import KINDS as RUN_KINDS
from runs import assert_is_at, state

from mpishard import AdamW, DDPOptimizer, LocalSGDOptimizer, Mesh, OptimizationProblem, load_checkpoint, save_checkpoint
from mpishard.checkpoint import Checkpoints, pieces
from mpishard.checkpoint.folder import MANIFEST, FileEntry, Manifest, hash_file, read_manifest
from mpishard.checkpoint.index import read_index
from mpishard.checkpoint.pieces import pieces_file, write_pieces
from mpishard.layout.boxes import boxes_of_range, check_cover
from mpishard.parameters.flat import FlatParameters

# Files of a checkpoint that others may have written: nothing but what mpishard writes is taken for one.


def refused(folder, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_index(folder)
    assert "is refused" in str(caught.value) or "is missing" in str(caught.value)


def virtual(h5, path, maps, shape=(4, 6), dtype="f8"):
    """A virtual data set in place of the one there: ``(file, data set, offset, count, start in it, stride)`` each."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    for file, dataset, offset, count, start, *stride in maps:
        space = h5py.h5s.create_simple(shape)
        space.select_hyperslab(offset, count, *stride)
        size = int(np.prod(count))
        source = h5py.h5s.create_simple((start + size,))
        source.select_hyperslab((start,), (size,))
        plist.set_virtual(space, file.encode(), dataset.encode(), source)
    if path in h5:
        del h5[path]
    kind = h5py.h5t.py_create(np.dtype(dtype))
    h5py.h5d.create(h5.id, path.encode(), kind, h5py.h5s.create_simple(shape), plist)


def endless(h5, path, file):
    """Rows without end, each from a file whose name has its number; HDF5 looks for them to tell how many there are."""
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    unlimited = h5py.h5s.UNLIMITED
    space = h5py.h5s.create_simple((4, 6), (unlimited, 6))
    space.select_hyperslab((0, 0), (unlimited, 1), (1, 1), (1, 6))
    plist.set_virtual(space, file.encode(), b"/parameters", h5py.h5s.create_simple((1, 6)))
    del h5[path]
    h5py.h5d.create(h5.id, path.encode(), h5py.h5t.IEEE_F64LE, space, plist)


def replaced(path, **arguments):
    def change(h5):
        del h5[path]
        h5.create_dataset(path, **arguments)

    return change


def linked(path, link):
    def change(h5):
        if path in h5:
            del h5[path]
        h5[path] = link

    return change


def text(table, value):
    return replaced(
        f"json/{table}", data=value if isinstance(value, str) else json.dumps(value), dtype=h5py.string_dtype()
    )


def attribute(name, value):
    def change(h5):
        h5.attrs[name] = value

    return change


HUGE = 2**45
EXTERNAL = h5py.ExternalLink("pieces-00001.h5", "/optimizer/exp_avg")
HOSTILE = {
    "external link in place of the tables": (linked("json", EXTERNAL), "link to elsewhere"),
    "soft link in place of a table": (linked("json/tensors", h5py.SoftLink("/json/kinds")), "link to elsewhere"),
    "no tables": (lambda h5: h5.__delitem__("json"), "'tensors'"),
    "huge array": (replaced("history/losses", shape=(HUGE,), dtype="f8", chunks=(1024,)), "losses"),
    "array never written": (replaced("history/losses", shape=(HUGE,), dtype="f8"), "never written"),
    "array of text": (replaced("history/losses", data=["x"]), "losses"),
    "array of arrays": (replaced("history/losses", data=np.zeros((2, 2))), "losses"),
    "table of numbers": (replaced("json/tensors", data=1.0), "not text"),
    "table of fixed text": (replaced("json/tensors", data=np.bytes_("[]")), "not text"),
    "tables of nothing": (replaced("json/tensors", data=h5py.Empty("f8")), "json/tensors: it has no values"),
    "no JSON": (text("tensors", "{"), "Expecting"),
    "deep JSON": (text("tensors", "[" * 100_000), "refused"),
    "tensors of another form": (text("tensors", {"a": 1}), "refused"),
    "extents below zero": (text("tensors", [["a", [-1]]]), "table of tensors"),
    "extents that are no numbers": (text("tensors", [["a", [True]]]), "table of tensors"),
    "huge extents": (text("tensors", [["a", [2**40, 2**40]]]), "table of tensors"),
    "two of a name": (text("tensors", [["a", [1]], ["a", [1]]]), "table of tensors"),
    "half a character": (text("tensors", '[["\\ud800", [1]]]'), "refused"),
    "no name": (text("tensors", [["", [1]]]), "table of tensors"),
    "kind outside": (text("kinds", {"../x": "float64"}), "cannot be the kind"),
    "kind in the tables": (text("kinds", {"json": "float64"}), "cannot be the kind"),
    "unknown dtype": (text("kinds", {"parameters": "object"}), "are object"),
    "dtype that is none": (text("kinds", {"parameters": ["float64"]}), "refused"),
    "later version": (attribute("version", 3), "version 3 of the format"),
    "earlier version": (attribute("version", 1), "version 1 .*reads version 2"),
    "other format": (attribute("format", "x"), "format is 'x'"),
    "other id": (attribute("id", "f" * 32), "not that of its first bytes"),
    "odd id": (attribute("id", "../"), "its id '../'"),
    "generation of text": (attribute("generation", "7"), "'generation' is '7'"),
    "array for a number": (attribute("generation", np.zeros(3)), "not a single value"),
    "nothing for a number": (attribute("generation", h5py.Empty("f8")), "not a single value"),
    "no generation": (lambda h5: h5.attrs.__delitem__("generation"), "'generation' is None"),
    "no format": (lambda h5: h5.attrs.__delitem__("format"), "format is None"),
    "reference": (lambda h5: h5.attrs.create("fact", h5.ref, dtype=h5py.ref_dtype), "neither a number nor text"),
}


def rows(cut):
    """The table of pieces has other rows."""

    def change(h5):
        table = json.loads(h5["json/pieces"][()])
        table["parameters"] = cut(table["parameters"])
        text("pieces", table)(h5)

    return change


def row(*placed):
    return rows(lambda all: [list(placed), *all[1:]])


BOX = [[0, 1], [0, 6]]
HOSTILE |= {
    "no table": (lambda h5: h5.__delitem__("json/pieces"), "'pieces'"),
    "no kinds": (text("pieces", {}), "its table of pieces has ; wanted parameters, optimizer/exp_avg"),
    "no rows": (text("pieces", {"parameters": 1, "optimizer/exp_avg": 2}), "refused"),
    "a tensor before the first": (row(-1, 0, BOX), r"table of pieces has \[-1, 0"),
    "a tensor after the last": (row(99, 0, BOX), r"table of pieces has \[99, 0"),
    "a writer that is not there": (row(0, 7, BOX), "pieces-00007.h5 is missing"),
    "a writer that is no number": (row(0, "../x", BOX), "table of pieces has"),
    "a number that is none": (row(True, 0, BOX), "table of pieces has"),
    "bounds that are none": (row(0, 0, [[0, 1.0], [0, 6]]), "table of pieces has"),
    "a box beyond the tensor": (row(0, 0, [[0, 1], [0, 2**70]]), "outside of its shape"),
    "a box of other dimensions": (row(0, 0, [[0, 1]]), "outside of its shape"),
    "an empty box": (row(0, 0, [[0, 0], [0, 6]]), "outside of its shape"),
    "a box with nothing of it": (row(0), "refused"),
    "two boxes": (row(0, 0, BOX, BOX), "table of pieces has"),
    "a piece less": (rows(lambda all: all[1:]), "leave elements out"),
    "a piece twice": (rows(lambda all: [all[0], *all]), "leave elements out or have some twice"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_index_with_anything_else_in_it_is_refused(checkpoint_folder, what):
    change, message = HOSTILE[what]
    with h5py.File(checkpoint_folder / "index.h5", "r+") as h5:
        change(h5)
    refused(checkpoint_folder, message)


@pytest.mark.parametrize("path", ["json/tensors", "history/losses"])
def test_sources_outside_are_not_even_opened(checkpoint_folder, path):
    """Opening a pipe waits until a process writes into it."""
    os.mkfifo(checkpoint_folder / "pipe0.h5")
    with h5py.File(checkpoint_folder / "index.h5", "r+") as h5:
        endless(h5, path, "pipe%b.h5")
    refused(checkpoint_folder, "of another, virtual data set")


def test_files_that_are_no_index_are_refused(checkpoint_folder):
    path = checkpoint_folder / "index.h5"
    data = path.read_bytes()
    for wrong in (b"", data[:100], data[:512], data[:3000], b"x" * 5000, bytes(512) + data[512:], data[512:]):
        path.write_bytes(wrong)
        refused(checkpoint_folder, "is refused")
    path.unlink()
    refused(checkpoint_folder, "index.h5 is missing")
    for make in (path.mkdir, lambda: path.rmdir() or os.mkfifo(path)):
        make()
        with pytest.raises(ValueError, match="is not a file"):
            read_index(checkpoint_folder)


def test_files_that_lie_elsewhere_are_refused(checkpoint_folder, tmp_path):
    path = checkpoint_folder / pieces_file(1)
    path.rename(tmp_path / path.name)
    refused(checkpoint_folder, "pieces-00001.h5 is missing")
    path.symlink_to(tmp_path / path.name)
    refused(checkpoint_folder, "outside of its folder")
    path.unlink()
    path.symlink_to("pieces-00000.h5")
    bad_piece(checkpoint_folder, "not those of this checkpoint")


def bad_piece(folder, message, name="plain.weight"):
    with pytest.raises(ValueError, match=message) as caught:
        contents = read_index(folder)
        for kind in KINDS:
            read(contents, kind, name)
    assert "pieces-" in str(caught.value) and "is refused" in str(caught.value)


def test_a_file_of_another_checkpoint_is_refused(checkpoint_folder):
    path = checkpoint_folder / pieces_file(1)
    for id, writer in (("f" * 32, 1), (ID, 2)):
        path.unlink()
        write_pieces(path, parts(1, 3), id=id, writer=writer)
        bad_piece(checkpoint_folder, f"not those of this checkpoint.*{ID}")


def instead(path="parameters", **options):
    """Another data set in the place of one of pieces, of its shape if no values are given."""

    def change(h5):
        shape, dtype = h5[path].shape, h5[path].dtype
        given = {name: value(shape) if callable(value) else value for name, value in options.items()}
        replaced(path, **({} if "data" in given else {"shape": shape, "dtype": dtype}), **given)(h5)

    return change


def elsewhere(h5):
    shape = h5["parameters"].shape
    virtual(h5, "parameters", [("pieces-00001.h5", "/x", (0,), shape, 0)], shape)


HOSTILE_PIECES = {
    "missing": (lambda h5: h5.__delitem__("parameters"), "/parameters is missing"),
    "external link": (linked("parameters", EXTERNAL), "link to elsewhere"),
    "soft link": (linked("parameters", h5py.SoftLink("/optimizer")), "link to elsewhere"),
    "other shape": (instead(data=lambda shape: np.zeros((*shape, 1))), r"1\), in the index float64 \("),
    "other byte order": (instead(data=lambda shape: np.zeros(shape, ">f8")), ">f8"),
    "raw data outside": (instead(external=lambda shape: [("/etc/passwd", 0, 8 * int(np.prod(shape)))]), "file outside"),
    "never written": (instead(), "never written"),
    "chunks never written": (instead(chunks=(2,)), "never written"),
    "huge chunks": (instead("optimizer/exp_avg", maxshape=(None,), chunks=(2**18,)), "larger than itself"),
    "unknown filter": (instead(data=np.zeros, chunks=(2,), fletcher32=True), "wanted shuffling or none"),
    "virtual": (elsewhere, "virtual"),
}


@pytest.mark.parametrize("what", HOSTILE_PIECES)
def test_a_piece_that_is_not_what_the_index_says_is_refused(checkpoint_folder, what):
    change, message = HOSTILE_PIECES[what]
    with h5py.File(checkpoint_folder / pieces_file(0), "r+") as h5:
        change(h5)
    bad_piece(checkpoint_folder, message)


# -- covers -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_cover_is_right_exactly_if_every_element_is_there_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    size = int(np.prod(shape, dtype=int))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
    boxes = [box for a, b in itertools.pairwise(cuts) for box in boxes_of_range(shape, a, b)]
    check_cover(shape, boxes)
    if data.draw(st.booleans()):
        runs = ([(a, b) for a in range(extent) for b in range(a + 1, extent + 1)] for extent in shape)
        boxes[data.draw(st.integers(0, len(boxes) - 1))] = tuple(data.draw(st.sampled_from(each)) for each in runs)
    seen = np.zeros(shape, int)
    for box in boxes:
        seen[tuple(slice(*run) for run in box)] += 1
    if (seen == 1).all():
        check_cover(shape, boxes)
    else:
        with pytest.raises(ValueError, match="leave elements out"):
            check_cover(shape, boxes)


def test_covers_of_many_pieces_and_dimensions():
    check_cover((50_000, 2), [((row, row + 1), (0, 2)) for row in range(50_000)])
    with pytest.raises(ValueError, match="twice"):
        check_cover((50_000, 2), [((row, row + 1), (0, 2)) for row in (*range(49_999), 0)])
    check_cover((2**20,) * 3 + (1,) * 28, [((0, 2**20),) * 3 + ((0, 1),) * 28])
    shape = (2,) * 12
    ranges = [boxes_of_range(shape, start, stop) for start, stop in ((0, 1365), (1365, 4096))]
    check_cover(shape, sum(ranges, []))
    with pytest.raises(ValueError, match="cut along 31 dimensions"):
        check_cover((2,) * 31, [((0, 1),) * 31])
    for box in (((0, 5),), ((-1, 3),), ((2, 2),), ((0, 4), (0, 1))):
        with pytest.raises(ValueError, match="outside of its shape"):
            check_cover((4,), [box])


# A checkpoint with right hashes and absurd content is refused before anything in memory has changed.

MANY = np.arange(100_000)
damaged = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:the checkpoint .* is damaged:RuntimeWarning")


@pytest.fixture(scope="module")
def mesh():
    with Mesh(MPI.COMM_SELF) as mesh:
        yield mesh


def forge(step, file, change):
    """Change a file of a checkpoint, and write all hashes again."""
    with h5py.File(step / file, "r+") as h5:
        change(h5)
    was = read_manifest(step)
    files = {name: FileEntry(*hash_file(step / name)) for name in was.files}
    (step / MANIFEST).write_bytes(Manifest(was.id, was.generation, was.step, files).encode())


# -- facts ------------------------------------------------------------------------------------------------------------


def loss_and_gradient(parameters, samples, gradients):
    gradients += len(samples)
    return float(len(samples))


def optimized(mesh, steps, folder, kind=DDPOptimizer):
    optimizer = kind(AdamW(lr=0.1), mesh)
    problem = OptimizationProblem(loss_and_gradient, np.zeros(5), samples=8, batch_size=4, steps=steps)
    with Checkpoints(folder, mesh) as checkpoints:
        return optimizer.optimize(problem, checkpoints=checkpoints, resume=True, progress=False), optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mesh):
    folder = tmp_path_factory.mktemp("saved")
    optimized(mesh, 3, folder / "run", LocalSGDOptimizer)
    return folder / "run"


def fact(name, value):
    def change(h5):
        h5.attrs.pop(name, None)
        if isinstance(value, str) and name.endswith(".json"):
            text(name.removesuffix(".json"), value)(h5)
        elif isinstance(value, np.ndarray):
            if name == "loss":
                del h5["history/loss"]
            h5.create_dataset(f"history/{name}", data=value)
        elif value is not None:
            h5.attrs[name] = value

    return change


NUMBERS = {
    "steps": (None, math.nan, "many", -5, 2.0, True, 2**60, MANY),
    "skipped_steps": (None, -1),
    "loss_scale": (math.nan, 0.0, math.inf, "large"),
    "good_steps": (-1, "few"),
    "outer_steps": (-1, 0.5),
    "gradient_norm": (math.inf, "x"),
}
CASES = [(name, value) for name, values in NUMBERS.items() for value in values]
CASES += [("rule", "x" * 100_000), ("slots.json", "7"), ("slots.json", "[[1]]")]
OF_LOOP = [("samples_consumed", -1), ("samples_consumed", "x"), ("first_workers", 0), ("loss", MANY), ("samples", MANY)]


@damaged
@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda value: str(value)[:12])
def test_absurd_facts_are_refused_and_nothing_has_changed(tmp_path, mesh, saved, name, value):
    folder = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    forge(folder / "step-00000003", "index.h5", fact(name, value))
    optimizer, parameters = LocalSGDOptimizer(AdamW(lr=0.1), mesh), np.full(5, -7.0)
    optimizer.step(parameters, np.ones(5))
    before, image = parameters.copy(), optimizer.serialize()
    with pytest.raises(ValueError, match=name.partition("_")[0].removesuffix(".json")) as caught:
        load_checkpoint(folder, parameters, optimizer)
    assert len(str(caught.value)) < 1500
    assert np.array_equal(parameters, before) and optimizer.serialize() == image


@damaged
@pytest.mark.parametrize(("name", "value"), OF_LOOP, ids=lambda value: str(value)[:12])
def test_absurd_facts_of_a_loop_are_refused(tmp_path, mesh, saved, name, value):
    folder = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    forge(folder / "step-00000003", "index.h5", fact(name, value))
    with pytest.raises(ValueError, match="losses" if name == "loss" else name) as caught:
        optimized(mesh, 5, folder, LocalSGDOptimizer)
    assert len(str(caught.value)) < 1500


@damaged
def test_facts_that_are_right_are_taken(mesh, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    result, optimizer = optimized(mesh, 5, folder, LocalSGDOptimizer)
    assert result.resumed_steps == 3 and optimizer.steps == 5
    # Where no number of the optimizer is saved, none is asked for.
    forge(saved / "step-00000003", "index.h5", fact("loss_scale", None))
    load_checkpoint(saved, np.zeros(5), LocalSGDOptimizer(AdamW(lr=0.1), mesh))


# -- values -----------------------------------------------------------------------------------------------------------


LAST = "optimizer/exp_avg"  # the last piece that is read


def chunk(data, skipped=0, **options):
    """One chunk is other than HDF5 would write it."""

    def change(h5):
        replaced(LAST, data=h5[LAST][()], chunks=(16,), **options)(h5)
        h5[LAST].id.write_direct_chunk((32,), data, filter_mask=skipped)

    return change


def never_written(h5):
    values = h5[LAST][()]
    replaced(LAST, shape=values.shape, dtype=values.dtype, chunks=(16,))(h5)
    h5[LAST][:32] = values[:32]


def in_lzf(h5):
    replaced(LAST, data=h5[LAST][()], chunks=(16,), compression="lzf")(h5)


def compressed_twice(h5):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((16,))
    plist.set_deflate(1)
    plist.set_deflate(1)
    values = h5[LAST][()]
    del h5[LAST]
    space = h5py.h5s.create_simple(values.shape)
    h5py.Dataset(h5py.h5d.create(h5.id, LAST.encode(), h5py.h5t.IEEE_F64LE, space, plist))[...] = values


GZIP = {"compression": "gzip", "shuffle": True}
FULL = bytes(128)
CHUNKS = {
    "short": (chunk(zlib.compress(FULL[:5]), **GZIP), "5 bytes .*128"),
    "long": (chunk(zlib.compress(FULL + FULL), **GZIP), "129 bytes or more .*128"),
    "noise": (chunk(b"no zlib", **GZIP), "cannot be decoded"),
    "cut": (chunk(zlib.compress(np.random.default_rng(0).bytes(128))[:-9], **GZIP), "cannot be decoded"),
    "far too long": (chunk(bytes(1000), **GZIP), "too long"),
    "all filters skipped": (chunk(FULL, 3, **GZIP), "skips the filters"),
    "shuffling skipped": (chunk(zlib.compress(FULL), 1, **GZIP), "skips the filters"),
    "compression skipped": (chunk(FULL[:9], 2, **GZIP), "decodes to 9 bytes"),
    "another compression": (in_lzf, "shuffling or none, then gzip"),
    "two compressions": (compressed_twice, "shuffling or none, then gzip"),
    "never written": (never_written, "never written"),
}


@damaged
@pytest.mark.parametrize("what", CHUNKS)
def test_chunks_that_lack_values_are_refused_and_nothing_has_changed(tmp_path, mesh, what):
    change, message = CHUNKS[what]
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(state(1))
        checkpoints.save(state(2))
        forge(tmp_path / "step-00000002", "pieces-00000.h5", change)
        found = state(0, empty=True)
        with pytest.warns(RuntimeWarning, match=message):  # and the one before is loaded
            assert checkpoints.load(found).facts["step"] == 1
        assert_is_at(found, 1)
    with Checkpoints(tmp_path / "step-00000002", mesh) as checkpoints:
        found = state(0, empty=True)
        with pytest.raises(ValueError, match=message):
            checkpoints.load(found)
        assert all(np.isnan(shard.array).all() for shard in found.shards)


@damaged
def test_what_hdf5_compresses_itself_is_read(tmp_path, mesh):
    optimizer, random = DDPOptimizer(AdamW(lr=0.1), mesh), np.random.default_rng(0)
    parameters = np.concatenate([random.integers(0, 2**63, 80_000).view(np.float64), np.zeros(80_000), np.arange(40e3)])
    parameters[~np.isfinite(parameters)] = 0
    named = FlatParameters.over(parameters)
    optimizer.bind(named)
    save_checkpoint(tmp_path, named, optimizer, compression="gzip")
    with h5py.File(tmp_path / "latest" / "pieces-00000.h5") as h5:
        dataset = h5["parameters"].id
        masks = {dataset.get_chunk_info(i).filter_mask for i in range(dataset.get_num_chunks())}
    assert masks == {0}
    found = np.full_like(parameters, np.nan)
    load_checkpoint(tmp_path, found, mesh=mesh)
    assert np.array_equal(found, parameters)


@damaged
def test_a_disk_that_fails_after_all_was_checked_is_told_of(tmp_path, mesh, monkeypatch):
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(state(1))
        checkpoints.save(state(2))
        real, failing = pieces.CheckpointReader.read_ranges, [2]

        def read(reader, ranges, out):
            ranges = list(ranges)
            if reader.facts["step"] in failing and ranges[0].piece.kind == RUN_KINDS[-1]:
                raise ValueError("input/output error")
            real(reader, ranges, out)

        monkeypatch.setattr(pieces.CheckpointReader, "read_ranges", read)
        found = state(0, empty=True)
        with pytest.warns(RuntimeWarning, match="input/output error"):
            assert checkpoints.load(found).facts["step"] == 1
        assert_is_at(found, 1)

        def refuse(facts):
            if facts["step"] == 1:
                raise ValueError("not this one")

        with pytest.raises(OSError, match="not this one.*overwritten"):
            checkpoints.load(state(0, empty=True), check=refuse)
        failing.append(1)
        with pytest.raises(OSError, match="partly overwritten"):
            checkpoints.load(state(0, empty=True))
