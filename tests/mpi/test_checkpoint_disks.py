"""Checkpoints on disks that are full, read-only, not shared, or gone: the last whole checkpoint stays."""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import assert_is_at, at, check_load, check_nothing_unfinished, warns_on_rank_0

from mpishard.checkpoint import Checkpoints, disk
from mpishard.checkpoint import save as saving

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture
def run(comm, tmp_path):
    """A folder that all ranks see; not made yet."""
    return Path(comm.bcast(str(tmp_path / "run")))


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_places_where_nothing_can_be_written(mesh, run, on_error):
    """`run` is a file."""
    if mesh.rank == 0:
        run.write_text("in the way")
    mesh.world.barrier()
    with Checkpoints(run, mesh, on_error=on_error) as checkpoints:
        if on_error == "raise":
            with pytest.raises(OSError, match="rank 0 failed at .*run.*give the path of a folder"):
                checkpoints.save(at(1, mesh))
        else:
            with warns_on_rank_0(mesh, "rank 0 failed at .*run"):
                assert checkpoints.save(at(1, mesh)) is None
        with pytest.raises(OSError, match="cannot look for checkpoints"):
            checkpoints.load(at(0, mesh))


def test_a_folder_that_goes_while_it_is_written(mesh, run, monkeypatch):
    write = saving.write_pieces

    def write_and_lose(path, *arguments, **options):
        write(path, *arguments, **options)
        mesh.world.barrier()
        if mesh.rank == 0:
            shutil.rmtree(path.parent)

    with Checkpoints(run, mesh) as checkpoints:
        checkpoints.save(at(1, mesh))
        with monkeypatch.context() as patch:
            patch.setattr(saving, "write_pieces", write_and_lose)
            with pytest.raises(OSError, match="one and the same folder"):
                checkpoints.save(at(2, mesh))
        check_load(checkpoints, 1)


@pytest.mark.mpi(min_size=2)
def test_disks_that_are_not_shared(mesh, run, monkeypatch):
    here = run / str(mesh.rank)
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with Checkpoints("run", mesh) as checkpoints:
        with pytest.raises(OSError, match="rank 1 failed at .* all ranks must see one and the same folder"):
            checkpoints.save(at(1, mesh))


@pytest.fixture
def small_disk(comm, tmp_path):
    """A file system of 64 MB, and a function that makes it read-only or not; skips where none can be made."""
    path = Path(comm.bcast(str(tmp_path / "disk")))

    def mount(*options):
        try:
            return subprocess.run(["mount", *options, str(path)], capture_output=True, check=False).returncode == 0
        except OSError:
            return False

    mounted = False
    if comm.rank == 0:
        path.mkdir()
        mounted = mount("-t", "tmpfs", "-o", "size=64m", "none")
    if not comm.bcast(mounted):
        pytest.skip("no file system can be mounted here")
    yield path, lambda readable: comm.bcast(comm.rank or mount("-o", f"remount,{readable}"))
    comm.Barrier()
    if comm.rank == 0:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_fills_up(mesh, small_disk, asynchronous):
    path, _ = small_disk
    run, large = path / "run", {"elements": 1_500_000}  # 24 MB with the slot: two of them fit, and no third
    with Checkpoints(run, mesh, keep=None) as checkpoints:
        live = at(3, mesh, **large)
        for step in (1, 2):
            checkpoints.save(at(step, mesh, **large))
        free = disk.free_bytes(path)
        match = r"rank \d failed at .*pieces-0000\d\.h5: No space left on device \(\d+\.\d MB are free\)"
        with pytest.raises(OSError, match=match + ".*; make room there") as caught:
            checkpoints.save(live, asynchronous=asynchronous)
            checkpoints.wait()
        assert caught.value.errno == errno.ENOSPC
        # Nothing unfinished is left to fill the disk, what was there is whole, and so is what is in memory.
        check_nothing_unfinished(mesh, run)
        assert disk.free_bytes(path) == free
        check_load(checkpoints, 2, **large)
        assert_is_at(live, 3, mesh.rank, mesh.size, **large)
    with Checkpoints(run, mesh, keep=1, on_error="warn", asynchronous=asynchronous) as checkpoints:
        with warns_on_rank_0(mesh, match):
            checkpoints.save(live)
            checkpoints.wait()
        check_load(checkpoints, 2, **large)
        # Smaller ones still fit, and the old ones then make room.
        checkpoints.save(at(4, mesh))
        checkpoints.save(live)
        check_load(checkpoints, 3, **large)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_disk_that_becomes_read_only(mesh, small_disk, on_error):
    path, remount = small_disk
    with Checkpoints(path / "run", mesh, on_error=on_error) as checkpoints:
        checkpoints.save(at(1, mesh))
        remount("ro")
        if on_error == "raise":
            with pytest.raises(OSError, match="Read-only file system; give a folder that all ranks may write to"):
                checkpoints.save(at(2, mesh))
        else:
            with warns_on_rank_0(mesh, "Read-only file system"):
                assert checkpoints.save(at(2, mesh)) is None
        check_load(checkpoints, 1)
        remount("rw")
        checkpoints.save(at(3, mesh))
        check_load(checkpoints, 3)
