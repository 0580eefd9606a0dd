"""A checkpoint with right hashes and absurd content is refused before anything in memory has changed."""

from __future__ import annotations

import math
import shutil
import zlib

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from runs import KINDS, assert_is_at, state

from mpishard import AdamW, DDPOptimizer, LocalSGDOptimizer, Mesh, OptimizationProblem, load_checkpoint, save_checkpoint
from mpishard.checkpoint import Checkpoints, pieces
from mpishard.checkpoint.folder import MANIFEST, FileEntry, Manifest, hash_file, read_manifest
from mpishard.parameters.flat import FlatParameters

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:the checkpoint .* is damaged:RuntimeWarning")
LAST = "optimizer/exp_avg"
MANY = np.arange(100_000)


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
            del h5[f"json/{name.removesuffix('.json')}"]
            h5.create_dataset(f"json/{name.removesuffix('.json')}", data=value, dtype=h5py.string_dtype())
        elif isinstance(value, np.ndarray):
            if name == "loss":
                del h5["history/loss"]
            h5.create_dataset(f"history/{name}", data=value)
        elif value is not None:
            h5.attrs[name] = value

    return change


NUMBERS = {
    "steps": (None, math.inf, math.nan, "many", -5, 2.0, True, 2**60, MANY),
    "skipped_steps": (None, -1, "x"),
    "loss_scale": (math.nan, -1.0, 0.0, math.inf, "large"),
    "good_steps": (-1, "few"),
    "outer_steps": (-1, 0.5),
    "gradient_norm": (math.inf, "x"),
}
CASES = [(name, value) for name, values in NUMBERS.items() for value in values]
CASES += [("rule", "x" * 100_000), ("slots.json", "7"), ("slots.json", "[[1]]")]
OF_LOOP = [("samples_consumed", -1), ("samples_consumed", "x"), ("first_workers", 0), ("loss", MANY), ("samples", MANY)]


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


@pytest.mark.parametrize(("name", "value"), OF_LOOP, ids=lambda value: str(value)[:12])
def test_absurd_facts_of_a_loop_are_refused(tmp_path, mesh, saved, name, value):
    folder = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    forge(folder / "step-00000003", "index.h5", fact(name, value))
    with pytest.raises(ValueError, match="losses" if name == "loss" else name) as caught:
        optimized(mesh, 5, folder, LocalSGDOptimizer)
    assert len(str(caught.value)) < 1500


def test_facts_that_are_right_are_taken(mesh, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "run", symlinks=True)
    result, optimizer = optimized(mesh, 5, folder, LocalSGDOptimizer)
    assert result.resumed_steps == 3 and optimizer.steps == 5
    # Where no number of the optimizer is saved, none is asked for.
    forge(saved / "step-00000003", "index.h5", fact("loss_scale", None))
    load_checkpoint(saved, np.zeros(5), LocalSGDOptimizer(AdamW(lr=0.1), mesh))


# -- values -----------------------------------------------------------------------------------------------------------


def chunk(data, skipped=0, place=32, **options):
    """One chunk of the last piece that is read is other than HDF5 would write it."""

    def change(h5):
        values = h5[LAST][()]
        del h5[LAST]
        dataset = h5.create_dataset(LAST, data=values, chunks=(16,), **options)
        dataset.id.write_direct_chunk((place,), data, filter_mask=skipped)

    return change


def never_written(h5):
    values = h5[LAST][()]
    del h5[LAST]
    dataset = h5.create_dataset(LAST, shape=values.shape, dtype=values.dtype, chunks=(16,))
    dataset[:32] = values[:32]


def compressed_twice(h5):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((16,))
    plist.set_deflate(1)
    plist.set_deflate(1)
    values = h5[LAST][()]
    del h5[LAST]
    space = h5py.h5s.create_simple(values.shape)
    dataset = h5py.h5d.create(h5.id, LAST.encode(), h5py.h5t.IEEE_F64LE, space, plist)
    h5py.Dataset(dataset)[...] = values


GZIP, LZF = {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}
FULL = bytes(128)
CHUNKS = {
    "short": (chunk(zlib.compress(FULL[:5]), **GZIP), "decodes to 5 bytes instead of 128"),
    "long": (chunk(zlib.compress(FULL + FULL), **GZIP), "decodes to 129 bytes or more instead of 128"),
    "empty": (chunk(zlib.compress(b""), **GZIP), "decodes to 0 bytes"),
    "noise": (chunk(b"no zlib", **GZIP), "cannot be decoded"),
    "cut": (chunk(zlib.compress(np.random.default_rng(0).bytes(128))[:-9], **GZIP), "cannot be decoded"),
    "far too long": (chunk(bytes(1000), **GZIP), "too long"),
    "all filters skipped": (chunk(FULL, 3, **GZIP), "skips the filters"),
    "shuffling skipped": (chunk(zlib.compress(FULL), 1, **GZIP), "skips the filters"),
    "compression skipped": (chunk(FULL[:9], 2, **GZIP), "decodes to 9 bytes"),
    "lzf, short": (chunk(b"\x04" + FULL[:5], **LZF), "decodes to 5 bytes"),
    "lzf, long": (chunk(b"\x00\x00\xe0\xff\x00", **LZF), "decodes to 265 bytes or more"),
    "lzf, from before its start": (chunk(b"\x00\x00\xe0\xff\x01", **LZF), "cannot be decoded"),
    "lzf, cut": (chunk(b"\x1f" + FULL[:5], **LZF), "cannot be decoded"),
    "two compressions": (compressed_twice, "wanted shuffling or none, then one compression or none"),
    "never written": (never_written, "never written"),
}


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


@pytest.mark.parametrize("compression", ["gzip", "lzf"])
def test_what_hdf5_compresses_itself_is_read(tmp_path, mesh, compression):
    """LZF is skipped for the chunks that it does not make smaller."""
    optimizer, random = DDPOptimizer(AdamW(lr=0.1), mesh), np.random.default_rng(0)
    parameters = np.concatenate([random.integers(0, 2**63, 80_000).view(np.float64), np.zeros(80_000), np.arange(40e3)])
    parameters[~np.isfinite(parameters)] = 0
    named = FlatParameters.over(parameters)
    optimizer.bind(named)
    save_checkpoint(tmp_path, named, optimizer, compression=compression)
    masks = set()
    with h5py.File(tmp_path / "latest" / "pieces-00000.h5") as h5:
        dataset = h5["parameters"].id
        masks = {dataset.get_chunk_info(i).filter_mask for i in range(dataset.get_num_chunks())}
    assert masks == ({0} if compression == "gzip" else {0, 2})
    found = np.full_like(parameters, np.nan)
    load_checkpoint(tmp_path, found, mesh=mesh)
    assert np.array_equal(found, parameters)


def test_a_disk_that_fails_after_all_was_checked_is_told_of(tmp_path, mesh, monkeypatch):
    with Checkpoints(tmp_path, mesh) as checkpoints:
        checkpoints.save(state(1))
        checkpoints.save(state(2))
        real, failing = pieces.PieceReader.read_runs, ["step-00000002"]

        def read(reader, runs, out):
            runs = list(runs)
            if reader._contents.folder.name in failing and runs[0].source.kind == KINDS[-1]:
                raise ValueError("input/output error")
            real(reader, runs, out)

        monkeypatch.setattr(pieces.PieceReader, "read_runs", read)
        found = state(0, empty=True)
        with pytest.warns(RuntimeWarning, match="input/output error"):
            assert checkpoints.load(found).facts["step"] == 1
        assert_is_at(found, 1)

        def refuse(facts):
            if facts["step"] == 1:
                raise ValueError("not this one")

        with pytest.raises(OSError, match="not this one.*partly overwritten"):
            checkpoints.load(state(0, empty=True), check=refuse)
        failing.append("step-00000001")
        with pytest.raises(OSError, match="partly overwritten"):
            checkpoints.load(state(0, empty=True))
