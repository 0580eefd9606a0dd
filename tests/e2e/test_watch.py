"""Programs of mpi4py that hang and know nothing of mpishard: ``mpishard.watch`` names the cause."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hanging import PROGRAMS, UNSEEN
from launching import is_open_mpi, mpirun
from why_score import grade, run, watched

from mpishard.cli import main
from mpishard.watch.folder import jobs, read_folder

# All ranks are in MPI_Finalize, or in another call that keeps Python's lock: none can call MPI_Abort.
LOCKED = {"no_object"}
# Some ranks have left the collective and wait in the next one: which rank is wrong cannot be seen.
DIFFICULT = {"root_of_bcast"}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.group != UNSEEN])
def test_the_cause_of_a_hang_is_named(name: str, tmp_path: Path) -> None:
    found, text, code = watched(name, tmp_path)
    if name == "exits_early" and code == 3:
        pytest.skip("Open MPI's launcher ends a job for the exit code of a rank")
    crashed = [-signal.SIGSEGV] if is_open_mpi(mpirun()[1]) else []  # its launcher, on a busy machine
    assert code in (1, *([9, 137] if name in LOCKED else []), *crashed), text
    wanted = ("right", "half") if name in DIFFICULT else ("right",)
    assert grade(PROGRAMS[name], found) in wanted, text


SUPERVISED = """
import sys
from mpi4py import MPI

if "raises" in sys.argv and MPI.COMM_WORLD.rank == 1:
    raise ValueError("a bad packing")
print("sum", MPI.COMM_WORLD.allreduce(1), "mpishard" in sys.modules)
"""


@pytest.mark.quick
def test_a_supervised_program(alone, tmp_path: Path, capfd) -> None:
    """``mpishard run --watch``: of a program that ends, and of one that raises on one rank."""
    script, folder = tmp_path / "program.py", tmp_path / "watch"
    script.write_text(SUPERVISED)
    command = ["-m", "mpishard", "run", "--watch", "--watch-folder", folder, "-n", 2, "--", "python", script]
    ended = alone(*command)
    assert ended.code == 0, ended.all
    assert ended.output.splitlines() == 2 * ["sum 2 False"]
    failed = alone(*command, "raises")
    assert failed.code == 1, failed.all
    assert "ValueError: a bad packing" in failed.errors and "failed by ValueError" in failed.errors
    assert main(["why", str(folder)]) == 0
    assert "rank 1 failed: ValueError: a bad packing" in capfd.readouterr().out


SPAWNS = """
import sys
from mpi4py import MPI

other = MPI.Comm.Get_parent()
if other == MPI.COMM_NULL:
    words = ["-m", "mpishard.watch", "--folder", sys.argv[1], sys.argv[0], sys.argv[1]]
    other = MPI.COMM_WORLD.Spawn(sys.executable, words)
other.Recv(bytearray(8), source=0)
"""


@pytest.mark.full
def test_who_was_spawned_has_a_folder_of_its_own(tmp_path: Path) -> None:
    if is_open_mpi(mpirun()[1]):
        pytest.skip("the launcher of Open MPI was seen not to end after the abort of a job that has spawned another")
    script, folder = tmp_path / "program.py", tmp_path / "watch"
    script.write_text(SPAWNS)
    text, code = run("-m", "mpishard.watch", "--folder", str(folder), "--timeout", "8", str(script), str(folder))
    assert code == 1 and "likely cause: rank 0 waits in Recv of other" in text, text
    spawned, first = jobs(folder)
    assert (read_folder(spawned).ranks, read_folder(first).ranks) == (1, 4)
    assert spawned.name == f"{first.name}-spawned"
