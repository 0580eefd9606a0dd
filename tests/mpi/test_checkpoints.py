"""Saving and loading the state of a run: whole checkpoints whatever fails, on any disk, by a share of the time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from runs import assert_is_at, at, check_load, check_nothing_unfinished, state, values, warns_on_rank_0
from training_problems import problem

import mpishard
from mpishard import Checkpoints, Mesh
from mpishard.checkpoint import disk, folder
from mpishard.checkpoint import load as loading
from mpishard.checkpoint import save as saving
from mpishard.checkpoint.save import Fault
from mpishard.layout.run_state import Shard
from mpishard.layout.tensors import Piece

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")

# Saving and loading the state of a run: what a crash, a full disk or a damaged file leaves is a whole checkpoint.


@pytest.fixture
def run(comm, tmp_path):
    """A folder that all ranks see; not made yet."""
    return Path(comm.bcast(str(tmp_path / "run")))


@pytest.fixture
def single():
    with Mesh(MPI.COMM_SELF) as single:
        yield single


@pytest.mark.parametrize(("asynchronous", "compression"), [(False, "gzip"), (True, None)])
@pytest.mark.quick
def test_save_and_load(comm, run, single, asynchronous, compression):
    with Mesh(comm, debug=True) as mesh:
        with Checkpoints(run, mesh, asynchronous=asynchronous, compression=compression) as checkpoints:
            assert checkpoints.load(at(0, mesh)) is None
            for step in (1, 2, 3):
                saved = checkpoints.save(at(step, mesh))
                assert saved == run / f"step-0000000{step}"
            contents = check_load(checkpoints, 3)
            assert contents.generation == 3
            assert contents.facts["note"] == "step 3" and contents.facts["history.json"] == [3]
            assert np.array_equal(contents.facts["loss"], [0, 1, 2])
            assert sorted(os.listdir(run)) == ["latest", "step-00000002", "step-00000003"]
            mesh.world.barrier()
        with Checkpoints(run, single) as checkpoints:
            check_load(checkpoints, 3)
        with Checkpoints(run / "latest", single) as checkpoints:
            check_load(checkpoints, 3)
        mesh.world.barrier()
        if mesh.rank == 0:
            with Checkpoints(run, single) as checkpoints:
                checkpoints.save(state(4))
        mesh.world.barrier()
        with Checkpoints(run, mesh) as checkpoints:
            check_load(checkpoints, 4)


@pytest.fixture
def writing(monkeypatch):
    """``writing(instead)``: this rank's pieces are written by ``instead(write, path)``, or None: as always."""
    usual = saving.write_pieces

    def change(instead):
        def write(path, *arguments, **options):
            return instead(lambda: usual(path, *arguments, **options), path)

        monkeypatch.setattr(saving, "write_pieces", usual if instead is None else write)

    return change


@pytest.fixture
def permits(writing):
    """Pieces are written once there is something in this list."""
    permits = []

    def late(write, path):
        while not permits:
            time.sleep(0.001)
        write()

    writing(late)
    return permits


def test_changes_after_an_asynchronous_save_do_not_reach_the_file(mesh, run, permits):
    with Checkpoints(run, mesh, asynchronous=True) as checkpoints:
        for step in (1, 2):  # the second one takes its copy into the memory of the first
            live = at(step, mesh)
            checkpoints.save(live)
            for shard in live.shards:
                shard.array[:] = -1
            live.facts["history.json"][0] = live.facts["loss"][:] = -1
            permits.append(None)
            contents = check_load(checkpoints, step)
            assert contents.facts["history.json"] == [step]
            assert np.array_equal(contents.facts["loss"], range(step))
            permits.clear()


def test_one_save_at_a_time(mesh, run, writing):
    under_way, most = [], []

    def counted(write, path):
        under_way.append(None)
        most.append(len(under_way))
        time.sleep(0.05)
        write()
        under_way.pop()

    writing(counted)
    with Checkpoints(run, mesh, asynchronous=True, keep=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(at(step, mesh))
        checkpoints.wait()
        assert most == [1, 1, 1] and not under_way
        assert [each.manifest.step for each in folder.candidates(run)] == [3, 2, 1]


def fail_on_last(mesh, writing, error):
    def fail(write, path):
        raise error(path)

    if mesh.rank == mesh.size - 1:
        writing(fail)


@pytest.mark.parametrize(
    ("asynchronous", "call"), [(False, "wait"), *((True, call) for call in ("wait", "save", "load", "close"))]
)
@pytest.mark.quick
def test_an_error_on_one_rank_is_raised_on_all(mesh, run, writing, asynchronous, call):
    checkpoints = Checkpoints(run, mesh)
    checkpoints.save(at(1, mesh))
    broken = at(2, mesh)
    fail_on_last(mesh, writing, lambda path: OSError(errno.EIO, "Input/output error", str(path)))
    last = mesh.size - 1
    match = rf"step 2 was not saved: rank {last} .*pieces-0000{last}\.h5: Input/output error"
    with pytest.raises(OSError, match=match) as caught:
        checkpoints.save(broken, asynchronous=asynchronous)
        if call == "save":
            checkpoints.save(at(3, mesh))
        else:
            getattr(checkpoints, call)(*([at(0, mesh)] if call == "load" else []))
    assert caught.value.errno == errno.EIO
    writing(None)
    assert_is_at(broken, 2, mesh.rank, mesh.size)
    check_nothing_unfinished(mesh, run)
    if call == "close":
        checkpoints = Checkpoints(run, mesh)
    check_load(checkpoints, 1)
    checkpoints.save(at(4, mesh))
    check_load(checkpoints, 4)
    checkpoints.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_is_a_warning_if_so_configured(mesh, run, writing, asynchronous):
    with Checkpoints(run, mesh, on_error="warn", asynchronous=asynchronous) as checkpoints:
        checkpoints.save(at(1, mesh))
        checkpoints.wait()
        fail_on_last(mesh, writing, lambda path: OSError(errno.EIO, "Input/output error", str(path)))
        with warns_on_rank_0(mesh, "step 2 was not saved"):
            saved = checkpoints.save(at(2, mesh))
            checkpoints.wait()
        assert asynchronous or saved is None
        fail_on_last(mesh, writing, lambda path: RuntimeError("a bug"))
        with pytest.raises(RuntimeError, match=f"rank {mesh.size - 1} failed .*: a bug"):
            checkpoints.save(at(2, mesh))
            checkpoints.wait()
        check_load(checkpoints, 1)


def test_a_remark_that_is_an_error_is_raised_on_all(mesh, run):
    if mesh.rank == 0:
        (run / "latest").mkdir(parents=True)  # as `cp -rL` leaves it
    mesh.world.barrier()
    with Checkpoints(run, mesh, on_error="warn") as checkpoints:
        with pytest.raises((RuntimeWarning, RuntimeError), match="latest does not point to"):
            checkpoints.save(at(1, mesh))
        mesh.world.barrier()
        if mesh.rank == 0:
            shutil.rmtree(run)
            run.write_text("a file")
        mesh.world.barrier()
        with pytest.raises((RuntimeWarning, RuntimeError), match="step 2 was not saved"):
            checkpoints.save(at(2, mesh))


def test_a_rank_that_cannot_write_is_found_before_the_first_save(mesh, run, monkeypatch):
    with Checkpoints(run, mesh) as checkpoints:
        checkpoints.rehearse()
        check_nothing_unfinished(mesh, run)
        for missing in (False, True):  # a disk that refuses, and another folder than that of rank 0
            with monkeypatch.context() as patch:
                fault = None if missing else Fault(mesh.rank, "there", "Read-only", "OSError", errno.EROFS).plain
                if mesh.rank == mesh.size - 1:
                    patch.setattr(saving, "_write_a_little", lambda *_, fault=fault: {"fault": fault, "entry": (9, "")})
                match = (
                    "rank 0 failed .*: No such file" if missing else f"rank {mesh.size - 1} failed at there: Read-only"
                )
                with pytest.raises(OSError, match=f"checkpoints cannot be saved: {match}"):
                    checkpoints.rehearse()
            check_nothing_unfinished(mesh, run)


def test_callers_errors_are_raised_on_all_ranks(mesh, run):
    with Checkpoints(run, mesh) as checkpoints:
        if mesh.size > 1:
            with pytest.raises(ValueError, match=r"facts\['step'\] is 0 on rank 0, 1 on rank"):
                checkpoints.save(at(mesh.rank, mesh))
        with pytest.raises(ValueError, match=r"facts\['step'\]=None"):
            no_step = at(1, mesh)
            if mesh.rank == mesh.size - 1:
                del no_step.facts["step"]
            checkpoints.save(no_step)
        with pytest.raises(ValueError, match=r"facts\['step'\]=-1"):
            checkpoints.save(at(-1, mesh))
        assert not run.exists()
        odd = at(1, mesh)
        odd.facts["lock.json"] = threading.Lock() if mesh.rank == mesh.size - 1 else {}
        with pytest.raises(TypeError, match="cannot pickle"):
            checkpoints.save(odd)
        check_nothing_unfinished(mesh, run)
        with pytest.raises(ValueError, match="cannot be named"):
            checkpoints.save(at(1, mesh).with_facts({"not a name": 1}))
        checkpoints.save(at(1, mesh))
        other = at(0, mesh, elements=51, empty=True)
        with pytest.raises(ValueError, match="of another model"):
            checkpoints.load(other)

        def refuse(facts):
            if mesh.rank == mesh.size - 1:
                raise ValueError(f"not step {facts['step']}")

        with pytest.raises(ValueError, match="not step 1"):
            checkpoints.load(other := at(0, mesh, empty=True), check=refuse)
        assert np.isnan(other.shards[0].array).all()
    with pytest.raises(ValueError, match="closed"):
        checkpoints.save(at(1, mesh))
    for name, value in {"every": 0, "keep": 0, "compression": "zip", "on_error": "ignore"}.items():
        with pytest.raises(ValueError, match=name):
            Checkpoints(run, mesh, **{name: value})
        if mesh.size > 1:
            with pytest.raises(ValueError, match=name):
                Checkpoints(run, mesh, **({name: value} if mesh.rank == mesh.size - 1 else {}))
    if mesh.size > 1:
        with pytest.raises(ValueError, match="folder is .*0 on rank 0, .*1 on"):
            Checkpoints(run / str(mesh.rank), mesh)


def test_a_script_that_changes_its_directory(mesh, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    with Checkpoints("run", mesh, asynchronous=True) as checkpoints:
        checkpoints.save(at(1, mesh))
        monkeypatch.chdir("/")
        assert checkpoints.save(at(2, mesh)) == run / "step-00000002"
        check_load(checkpoints, 2)


def test_a_checkpoint_is_no_folder_for_others(mesh, run):
    with Checkpoints(run, mesh) as checkpoints:
        saved = checkpoints.save(at(1, mesh))
    with Checkpoints(saved, mesh, on_error="warn") as checkpoints:
        check_load(checkpoints, 1)
        with pytest.raises(ValueError, match="step-00000001: .*itself a checkpoint"):
            checkpoints.save(at(2, mesh))
        check_load(checkpoints, 1)


def kept(mesh, run):
    mesh.world.barrier()
    found = [each.manifest.step for each in folder.candidates(run)]
    mesh.world.barrier()
    return found


def test_a_run_removes_its_own_only(mesh, run):
    with Checkpoints(run, mesh, keep=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(at(step, mesh))
    # A script that begins again, by mistake.
    with Checkpoints(run, mesh, keep=1, asynchronous=True) as checkpoints:
        for step in (1, 2):
            checkpoints.save(at(step, mesh))
    assert kept(mesh, run) == [2, 3, 2, 1]
    # One that goes on takes all for its own.
    with Checkpoints(run, mesh, keep=3) as checkpoints:
        check_load(checkpoints, 2)
        checkpoints.save(at(3, mesh))
    assert kept(mesh, run) == [3, 2, 3]


@pytest.mark.mpi(min_size=2)
def test_all_ranks_know_what_keep_counts(mesh, run):
    """The first one may die."""
    for _ in range(2):
        with Checkpoints(run, mesh) as checkpoints:
            checkpoints.load(at(0, mesh, empty=True))
            checkpoints.save(at(1, mesh))
            known = mesh.world.allgather_object(checkpoints.own)
    assert known == [known[0]] * mesh.size and len(known[0]) == 2


def test_two_that_save_into_one_folder_at_a_time(mesh, run, writing):
    begun = []

    def late(write, path):
        begun.append(path)
        while len(begun) < 2:
            time.sleep(0.001)
        write()

    writing(late)
    with Checkpoints(run, mesh, asynchronous=True, keep=1) as first, Checkpoints(run, mesh, keep=1) as second:
        first.save(at(1, mesh))
        assert second.save(at(1, mesh)) == run / "step-00000001-2"
        first.wait()
        assert kept(mesh, run) == [1, 1]
        check_nothing_unfinished(mesh, run)


def test_nothing_with_a_time_limit_waits_for_a_disk(mesh, run, monkeypatch):
    begin = folder.begin

    def slow(*arguments):
        time.sleep(1)
        return begin(*arguments)

    def waited_s():
        return sum(kind["seconds"] for kind in mesh.ledger.summary().values())

    monkeypatch.setattr(folder, "begin", slow)
    with Checkpoints(run, mesh) as checkpoints:
        mesh.world.barrier()
        before = waited_s()
        checkpoints.save(at(1, mesh))
        assert waited_s() - before < 0.7


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_a_save_is_waited_for(mesh, run, permits):
    with Checkpoints(run, mesh) as checkpoints:
        checkpoints.save(at(1, mesh), asynchronous=True)
        for call in (checkpoints.wait, checkpoints.close):
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                call()
        permits.append(None)
        check_load(checkpoints, 1)


def test_each_file_is_hashed_by_one_rank(mesh, run, single, monkeypatch):
    if mesh.rank == 0:
        with Checkpoints(run, single) as checkpoints:
            checkpoints.save(state(1))
    hash_file, hashed = folder.hash_file, []
    monkeypatch.setattr(folder, "hash_file", lambda path: hashed.append(path.name) or hash_file(path))
    mesh.world.barrier()
    with Checkpoints(run, mesh) as checkpoints:
        check_load(checkpoints, 1)
    assert sorted(sum(mesh.world.allgather_object(hashed), [])) == ["index.h5", "pieces-00000.h5"]


@pytest.mark.quick
def test_damaged_ones_are_passed_over_on_all_ranks(mesh, run):
    last = run / "step-00000002" / f"pieces-{mesh.size - 1:05d}.h5"
    with Checkpoints(run, mesh) as checkpoints:
        for step in (1, 2):
            checkpoints.save(at(step, mesh))
        if mesh.rank == 0:
            with open(last, "r+b") as file:
                file.truncate(600)
        mesh.world.barrier()
        found = at(0, mesh, empty=True)
        with pytest.raises((RuntimeWarning, RuntimeError), match="is damaged"):  # warnings are errors here
            checkpoints.load(found)
        with warns_on_rank_0(mesh, f"step-00000002 is damaged .*{last.name} is cut short"):
            check_load(checkpoints, 1)
        if mesh.rank == 0:
            (run / "step-00000001" / "manifest.json").unlink()
        mesh.world.barrier()
        with pytest.raises((RuntimeWarning, RuntimeError), match="manifest.json is missing"):
            checkpoints.load(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="no checkpoint in .* is whole: .*manifest.json is missing.*cut short"):
                checkpoints.load(found)
        assert np.isnan(found.shards[0].array).all()


@pytest.mark.mpi(min_size=2)
def test_an_error_that_says_nothing_of_the_checkpoint_is_raised_on_all(mesh, run, monkeypatch):
    """As where one rank is short of memory: no older one takes its place."""

    def short_of_memory(*_):
        raise MemoryError("no room")

    with Checkpoints(run, mesh) as checkpoints:
        for step in (1, 2):
            checkpoints.save(at(step, mesh))
        with monkeypatch.context() as patch:
            if mesh.rank == 1:
                patch.setattr(loading, "_read", short_of_memory)
            with pytest.raises(MemoryError if mesh.rank == 1 else RuntimeError, match="no room"):
                checkpoints.load(at(0, mesh))
        check_load(checkpoints, 2)


@pytest.mark.mpi(min_size=2)
def test_the_folder_has_a_holder_when_its_first_rank_has_gone(comm, folder):
    """Whichever rank is the first then, as after a death."""

    def holder():
        mesh.world.barrier()
        return json.loads((folder / "holder").read_text())["process"]

    with Mesh(comm) as mesh:
        checkpoints = Checkpoints(folder, mesh)
        checkpoints.rehearse()
        assert holder() == mesh.world.allgather_object(os.getpid())[0]
        checkpoints.release()
        mesh.release()
        mesh.rebind(comm.Split(0, -comm.rank))
        checkpoints.rebind()
        assert mesh.rank == comm.size - 1 - comm.rank
        assert holder() == mesh.world.allgather_object(os.getpid())[0]
        checkpoints.close()
        mesh.world.barrier()
        assert not (folder / "holder").exists()


def test_the_thread_waits_asleep(mesh, run, writing):
    def slow(write, path):
        if mesh.rank == mesh.size - 1:
            time.sleep(0.6)
        write()

    writing(slow)
    with Checkpoints(run, mesh) as checkpoints:
        checkpoints.save(at(1, mesh))
        checkpoints.save(at(2, mesh), asynchronous=True)
        before = time.process_time()
        checkpoints.wait()
        assert time.process_time() - before < 0.2


def test_a_block_left_by_an_exception_still_gets_its_checkpoint_and_close_frees_the_communicators(mesh, run):
    with pytest.raises(KeyError), Checkpoints(run, mesh, asynchronous=True) as checkpoints:
        checkpoints.save(at(1, mesh))
        comm = checkpoints._writer.axis.comm
        raise KeyError
    assert (run / "step-00000001").is_dir()
    for _ in range(2):
        checkpoints.close()
    assert comm == MPI.COMM_NULL


@pytest.mark.parametrize("asynchronous", [False, True])
def test_arrays_in_device_memory(mesh, run, device, asynchronous):
    with Checkpoints(run, mesh, asynchronous=asynchronous) as checkpoints:
        for step in (1, 2):
            live = at(step, mesh, convert=device.put)
            checkpoints.save(live)
            live.shards[0].array.fill(-1)
        check_load(checkpoints, 2)


def test_a_copy_takes_what_lies_end_to_end_at_once_and_keeps_its_memory(comm, monkeypatch):
    # Two runs, the second before the first in memory and of two pieces, one without elements between them.
    counted = (Piece("x", ((0, 4), (0, 5)), 30), Piece("y", ((2, 5),), 3), Piece("none", ((0, 0),), 6))
    counted += (Piece("z", (), 6),)
    snapshot, copies, copy = saving.Snapshot(), [], saving.copy_together

    def counting(pairs):
        copies.extend((source.size, target) for source, target in pairs)
        copy(pairs)

    monkeypatch.setattr(saving, "copy_together", counting)
    for step in (1, 2):
        array = values(step, "parameters", 60)
        parts = snapshot.take([Shard("parameters", array, counted, counted)])
        assert [(part.name, part.box) for part in parts] == [(p.name, p.box) for p in counted[1::2] + counted[:1]]
        assert np.array_equal(parts[0].values, array[3:6]) and parts[1].values == array[6]
        assert np.array_equal(parts[2].values, array[30:50].reshape(4, 5))
        assert not any(np.shares_memory(part.values, array) for part in parts)
    assert [size for size, _ in copies] == [4, 20] * 2
    assert np.shares_memory(copies[0][1], copies[2][1])


# Checkpoints on disks that are full, read-only, not shared, or gone: the last whole checkpoint stays.


def test_places_where_nothing_can_be_written(mesh, run):
    """`run` is a file."""
    if mesh.rank == 0:
        run.write_text("in the way")
    mesh.world.barrier()
    with Checkpoints(run, mesh) as checkpoints:
        with pytest.raises(OSError, match="rank 0 .*run.*path of a folder"):
            checkpoints.save(at(1, mesh))
    with Checkpoints(run, mesh, on_error="warn") as checkpoints:
        with warns_on_rank_0(mesh, "rank 0 .*run"):
            assert checkpoints.save(at(1, mesh)) is None
        with pytest.raises(OSError, match="cannot look for checkpoints"):
            checkpoints.load(at(0, mesh))


def test_a_folder_that_goes_while_it_is_written(mesh, run, writing):
    def write_and_lose(write, path):
        write()
        mesh.world.barrier()
        if mesh.rank == 0:
            shutil.rmtree(path.parent)

    with Checkpoints(run, mesh) as checkpoints:
        checkpoints.save(at(1, mesh))
        writing(write_and_lose)
        with pytest.raises(OSError, match="one and the same folder"):
            checkpoints.save(at(2, mesh))
        check_load(checkpoints, 1)


@pytest.mark.mpi(min_size=2)
def test_disks_that_are_not_shared(mesh, run, monkeypatch):
    here = run / str(mesh.rank)
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with Checkpoints("run", mesh) as checkpoints:
        with pytest.raises(OSError, match="rank 1 .*one and the same folder"):
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
        match = r"rank \d .*pieces-0000\d\.h5: No space left on device \(\d+\.\d MB"
        with pytest.raises(OSError, match=match + ".*make room") as caught:
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


def test_a_disk_that_becomes_read_only(mesh, small_disk):
    path, remount = small_disk
    with Checkpoints(path / "run", mesh) as checkpoints:
        checkpoints.save(at(1, mesh))
        remount("ro")
        with pytest.raises(OSError, match="Read-only file system"):
            checkpoints.save(at(2, mesh))
        check_load(checkpoints, 1)
        remount("rw")
        checkpoints.save(at(3, mesh))
        check_load(checkpoints, 3)


# Checkpoints by a share of the run's time.


class Timed(Checkpoints):
    """Notes the step of each save, which may be made longer."""

    def __init__(self, *arguments, longer=0.0, **options):
        self.saved, self.longer = [], longer
        super().__init__(*arguments, **options)

    def _save(self, state, asynchronous, best):
        time.sleep(self.longer)
        path = super()._save(state, asynchronous, best)
        self.saved.append(state.facts["step"])
        return path


def test_the_ranks_agree_by_the_time_that_the_slowest_was_kept(mesh, folder, monkeypatch):
    """By clocks that only saves and steps move: after a save of 6 s at 0.25 the next one comes when 24 s are over."""
    now = [1000.0 * mesh.rank]
    stall = 6.0 if mesh.rank == mesh.size - 1 else 3.0
    with Timed(folder, mesh, every=0.25) as checkpoints:
        monkeypatch.setattr(checkpoints._interval, "clock", lambda: now[0])
        save = checkpoints._save

        def slow(*arguments):
            now[0] += stall
            return save(*arguments)

        def callback(state):
            now[0] += 1.0 + 6.0 - stall if state.step in (2, 20) else 1.0

        monkeypatch.setattr(checkpoints, "_save", slow)
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.05), mesh).optimize(
            problem(steps=50), checkpoints=checkpoints, callback=callback, progress=False
        )
    assert checkpoints.saved == [1, 19, 37, 50]


@pytest.mark.quick
def test_workers_that_come_and_go(mesh, folder):
    """Whoever comes saves with the others, and nobody waits for an answer that is not given."""
    optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=0.05), mesh)
    workers = {}

    def callback(state):
        workers[state.step] = optimizer.current_workers
        optimizer.resize({0: 1, 1: mesh.size, 2: max(1, mesh.size - 1), 3: (mesh.size + 1) // 2}[state.step // 5 % 4])

    with Timed(folder, mesh, every=0.9, asynchronous=True, longer=0.001) as checkpoints:
        result = optimizer.optimize(problem(steps=60), checkpoints=checkpoints, callback=callback, progress=False)
    assert result.steps == 60
    # A rank takes part in all saves that follow steps of its own; rank 0 always works.
    first = mesh.world.allgather_object(tuple(checkpoints.saved))[0]
    assert first[0] == 1 and first[-1] == 60 and len(first) > 3
    assert checkpoints.saved == [step for step in first if step in workers]
