"""A checkpoint that is damaged in any way is passed over; a stop at any moment leaves a whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
from runs import assert_is_at, state
from variants import full

from mpishard.checkpoint import Checkpoints, disk
from mpishard.checkpoint import save as saving

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture
def run(tmp_path, mesh):
    """A folder with checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path / "run", mesh) as checkpoints:
        checkpoints.save(state(1))
        checkpoints.save(state(2))
    return tmp_path / "run"


def check_load(checkpoints, step):
    found = state(0, empty=True)
    assert checkpoints.load(found).facts["step"] == step
    assert_is_at(found, step)


def damages(saved, before, flipped, random):
    """``(file, bytes or None)``: what becomes of a file of the newest checkpoint, one after the other.

    `flipped` bits of each file are changed, and seven times as many of all of them.
    """
    files = sorted(saved.iterdir())
    for path in files:
        yield path, None
    for _ in range(20):
        path = files[random.integers(len(files))]
        data = path.read_bytes()
        yield path, data[: random.integers(len(data))]
    bits = np.cumsum([8 * path.stat().st_size for path in files])
    flips = random.integers(0, bits[-1], 7 * flipped).tolist()
    for number, path in enumerate(files):  # the small ones must not be missed
        flips += (bits[number] - 1 - random.integers(0, 8 * path.stat().st_size, flipped)).tolist()
    for bit in flips:
        number = int(np.searchsorted(bits, bit, side="right"))
        data = bytearray(files[number].read_bytes())
        place = int(bits[number]) - 1 - bit
        data[place // 8] ^= 1 << place % 8
        yield files[number], bytes(data)
    for path in files:
        yield path, (before / path.name).read_bytes()


@pytest.mark.parametrize("flipped", [2, *full(20)])
def test_whatever_happens_to_a_file_the_one_before_is_loaded(run, mesh, monkeypatch, flipped):
    saved, before = run / "step-00000002", run / "step-00000001"
    real = h5py.File

    def guarded(file, *arguments, **options):
        assert saved not in Path(os.fspath(file)).parents, f"HDF5 opens {file}, which is damaged"
        return real(file, *arguments, **options)

    count = 0
    with Checkpoints(run, mesh) as checkpoints:
        for path, data in damages(saved, before, flipped, np.random.default_rng(0)):
            whole = path.read_bytes()
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            with monkeypatch.context() as patch:
                patch.setattr(h5py, "File", guarded)
                with pytest.warns(RuntimeWarning, match="passed over") as caught:
                    check_load(checkpoints, 1)
            assert {each.filename for each in caught} == {__file__}  # the caller's line, not one of ours
            texts = [str(each.message) for each in caught]
            assert any(str(path) in text for text in texts), (path, texts)
            if path.name.startswith("pieces") and data == (before / path.name).read_bytes():
                assert any("stale" in text for text in texts), texts
            path.write_bytes(whole)
            count += 1
        check_load(checkpoints, 2)
    assert count == 3 + 20 + 10 * flipped + 3


@pytest.mark.parametrize("step", [7, *full(1)])  # coprime to the bits of a byte
def test_a_latest_that_is_damaged_is_told_of(run, mesh, step):
    link = run / "latest"
    target = os.readlink(link).encode()
    with Checkpoints(run, mesh) as checkpoints:
        for bit in range(0, 8 * len(target), step):
            name = bytearray(target)
            name[bit // 8] ^= 1 << bit % 8
            if 0 in name:
                continue
            link.unlink()
            os.symlink(bytes(name), os.fsencode(link))
            with pytest.warns(RuntimeWarning, match="latest points to"):
                check_load(checkpoints, 2)


class Stop(BaseException):
    """The machine stops here: nothing of the program runs any more."""


# In the middle of a write, and before what is no write.  What is on the disk after one step is there before the next.
STOPS = [
    pytest.param(False, True, id="in"),
    pytest.param(False, False, id="before", marks=pytest.mark.full),
    pytest.param(True, False, id="after", marks=pytest.mark.full),
]


@pytest.mark.parametrize("after, tear", STOPS)
def test_a_stop_at_any_step_leaves_a_whole_checkpoint(run, mesh, monkeypatch, after, tear):
    """Before or after the k-th thing that is done to the file system, for every k; or in the middle of a write."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only its place among the steps matters here
    monkeypatch.setattr(disk, "_LONG_S", -1.0)  # what has no lock yet would stay an hour
    seen, outcomes, held, make = run.parent / "seen", set(), [], disk.hold

    def hold(path):
        held.append(make(path))
        return held[-1]

    for stop in range(1000):
        shutil.copytree(run, seen, symlinks=True)
        count = 0

        def step_of(action, writes=False, stop=stop):
            def stepped(*arguments):
                nonlocal count
                count += 1
                if count <= stop or (after and count == stop + 1):
                    done = action(*arguments)
                elif count == stop + 1 and tear and writes:
                    target, data = arguments
                    data = memoryview(data).cast("B")
                    action(target, data[: len(data) // 2])
                if count > stop:
                    raise Stop
                return done

            return stepped

        write_step = step_of(disk.DiskFile.write, writes=True)

        def write(file, data, write_step=write_step):
            try:
                return write_step(file, data)
            except Stop as error:  # which must not get into HDF5, as no error of the disk does
                file.error = error
                return memoryview(data).nbytes

        finished = False
        with monkeypatch.context() as patch:
            for name in ("make_folder", "sync", "rename", "make_link", "replace_link", "remove"):
                patch.setattr(disk, name, step_of(getattr(disk, name)))
            patch.setattr(disk, "hold", step_of(hold))
            patch.setattr(disk, "write", step_of(disk.write, writes=True))
            patch.setattr(disk.DiskFile, "write", write)
            patch.setattr(saving.threading, "Thread", AtOnce)
            dying = Checkpoints(seen, mesh)
            try:
                dying.save(state(3))
                finished = True
            except Stop:
                while held:  # a process that is dead holds nothing
                    held.pop().close()
        with Checkpoints(seen, mesh) as checkpoints:
            found = state(0, empty=True)
            loaded = checkpoints.load(found).facts["step"]
            assert loaded == 3 or (loaded == 2 and not finished)
            assert_is_at(found, loaded)
            checkpoints.save(state(4))
            check_load(checkpoints, 4)
        assert not list(seen.glob(".*"))
        dying.close()
        shutil.rmtree(seen)
        outcomes.add(loaded)
        if finished:
            break
    assert stop == count > 15 and outcomes == {2, 3}


class AtOnce:
    """A thread that runs when it is started, so that a stop in it stops everything."""

    def __init__(self, target, name):
        self.start = target

    def join(self):
        pass


def test_a_last_save_that_fails_leaves_the_folder_without_a_holder(tmp_path, mesh, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(5, "Input/output error")

    checkpoints = Checkpoints(tmp_path, mesh, asynchronous=True)
    checkpoints.rehearse()
    assert (tmp_path / "holder").exists()
    monkeypatch.setattr(saving, "write_pieces", fail)
    checkpoints.save(state(1))
    with pytest.raises(OSError, match="step 1 was not saved"):
        checkpoints.close()
    assert not (tmp_path / "holder").exists()
