"""A rank that fails ends the job soon, with an error code and a message that names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

TIME_LIMIT = 4  # seconds that a collective may wait, given to the scripts as MPISHARD_TIMEOUT
SOON = 120  # seconds from launch to end where no time limit has to expire first, on a busy machine

SCRIPT = """
import os, sys, time
import numpy as np
import mpishard

mesh = mpishard.Mesh()
total = np.ones(3)
for step in range(5):
    if mesh.rank == 1 and step == 3:
        {failure}
    mesh.data.all_reduce(total)
print("finished")
"""
LINE_OF_FAILURE = 10
LINE_OF_COLLECTIVE = 11


@pytest.fixture
def failing(tmp_path: Path, mpirun: Callable[..., Any]) -> Callable[..., Any]:
    """``failing(failure)``: the script above on three ranks, where rank 1 does `failure` before its fourth sum."""

    def run(failure: str, *, via: str = "file", **environment: str) -> Any:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(failure=failure))
        start = {"file": [script], "-c": ["-c", script.read_text()], "mpi4py": ["-m", "mpi4py", script]}[via]
        finished = mpirun(3, *start, MPISHARD_TIMEOUT=str(TIME_LIMIT), **environment)
        assert finished.code != 0, finished.all
        assert "finished" not in finished.output
        return finished

    return run


@pytest.mark.parametrize("via", ["file", "-c", "mpi4py"])
def test_exception_on_one_rank(failing: Callable[..., Any], via: str) -> None:
    finished = failing("raise ArithmeticError('spoilt')", via=via)
    assert "ArithmeticError: spoilt" in finished.errors
    assert f"line {LINE_OF_FAILURE}" in finished.errors
    assert "rank 1" in finished.errors
    assert finished.seconds < SOON


def test_ctrl_c_is_no_failure(failing: Callable[..., Any]) -> None:
    finished = failing("raise KeyboardInterrupt")
    assert finished.code == 128 + signal.SIGINT
    assert "mpishard: Ctrl-C ends the job" in finished.errors and "Traceback" not in finished.errors, finished.all
    assert finished.seconds < SOON


def test_ctrl_c_while_ranks_start(mpirun: Callable[..., Any]) -> None:
    """In the middle of imports and before MPI has begun, where mpishard could not write a line."""
    script = """
import signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py.MPI":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
import mpishard
print("finished")
"""
    finished = mpirun(2, "-c", script)
    assert finished.code == 128 + signal.SIGINT and "finished" not in finished.output, finished.all
    assert finished.errors.count("mpishard: Ctrl-C ends the job") == 1 and "Traceback" not in finished.errors


def test_mpi_is_started_where_nobody_has(mpirun: Callable[..., Any]) -> None:
    script = "import mpi4py; mpi4py.rc.initialize = False; import mpishard; print(mpishard.Mesh().world.size)"
    finished = mpirun(2, "-c", script)
    assert (finished.code, finished.output.split()) == (0, ["2", "2"]), finished.all


def test_a_script_without_a_handler_dies_of_sigusr1(mpirun: Callable[..., Any]) -> None:
    """Also under MPICH, which catches it."""
    script = "import mpishard, os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('lives')"
    finished = mpirun(1, "-c", script)
    assert finished.code != 0 and "lives" not in finished.output, finished.all


def test_exception_in_a_thread(failing: Callable[..., Any]) -> None:
    finished = failing(
        "import threading; threading.Thread(target=lambda: 1 / 0).start(); time.sleep(600)",
    )
    assert "rank 1 of 3 failed" in finished.errors and "ZeroDivisionError" in finished.errors
    assert finished.seconds < SOON


def test_exception_before_the_mesh(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import mpishard\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1:\n    raise FileNotFoundError('no data here')\n"
        "mpishard.Mesh().world.barrier()\n"
    )
    finished = mpirun(3, script)
    assert finished.code != 0
    assert "rank 1 of 3 failed" in finished.errors and "no data here" in finished.errors
    assert finished.seconds < SOON


MESH_OF_ONE = """
import sys, time
from mpi4py import MPI
import mpishard
from mpishard.comm import watchdog
watchdog._ARRIVAL_SAID_S, watchdog._ARRIVAL_LEAST_S = 1.0, {limit}
if MPI.COMM_WORLD.rank == 1:
    mpishard.Mesh(MPI.COMM_SELF)
    time.sleep({seconds})
mpishard.Mesh()
print("made")
"""


@pytest.mark.parametrize("limit, seconds", [(60.0, 4.0), (3.0, 600.0)], ids=["comes", "never comes"])
def test_a_mesh_for_which_a_rank_is_missing_says_so(
    tmp_path: Path, mpirun: Callable[..., Any], limit: float, seconds: float
) -> None:
    script = tmp_path / "script.py"
    script.write_text(MESH_OF_ONE.format(limit=limit, seconds=seconds))
    finished = mpirun(3, script, MPISHARD_TIMEOUT="1")
    comes = seconds < limit
    assert (finished.code == 0, finished.output.count("made")) == (comes, 3 if comes else 0), finished.all
    said = r"Mesh\(\) at script.py:\d+ waits for other ranks: all 3 of its communicator make it.* the job ends after"
    assert re.search(said, finished.errors), finished.all
    assert finished.seconds < SOON


def test_what_all_ranks_raise_is_shown_once(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mpishard\nmesh = mpishard.Mesh()\nmpishard.cosine(float('nan'), steps=9)\n")
    finished = mpirun(3, script)
    assert finished.code != 0
    assert finished.errors.count("Traceback") == 1 and "all 3 ranks failed" in finished.errors, finished.all
    assert finished.errors.count("cosine: peak=nan must be a finite number") == 1, finished.all


@pytest.mark.quick
def test_killed_rank(failing: Callable[..., Any]) -> None:
    finished = failing("os.kill(os.getpid(), 9)")
    # MPICH's launcher names a process, and often not the one that was killed first.
    assert "rank 1" in finished.errors, finished.all
    assert finished.seconds < SOON


def test_killed_rank_of_an_elastic_run(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    script = """
import os
import numpy as np
import mpishard

def callback(state):
    if mesh.rank == 1 and state.step == 3:
        os.kill(os.getpid(), 9)

with mpishard.Mesh() as mesh:
    problem = mpishard.OptimizationProblem(lambda p, s, g: 0.0, np.ones(3), samples=9, batch_size=9, steps=9)
    mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh).optimize(problem, callback=callback, progress=False)
"""
    finished = mpirun(3, "-c", script)
    assert finished.code != 0 and "rank 1 of 3" in finished.errors and "has died" in finished.errors, finished.all
    assert finished.seconds < SOON


def test_rank_that_leaves_early(failing: Callable[..., Any]) -> None:
    finished = failing("sys.exit(0)")
    assert "rank 1 has ended its script" in finished.errors
    assert "rank 0 waits" in finished.errors and f"script.py:{LINE_OF_COLLECTIVE}" in finished.errors
    assert finished.seconds < SOON + TIME_LIMIT


def test_rank_that_never_comes(failing: Callable[..., Any]) -> None:
    finished = failing("time.sleep(1000)")
    assert f"past the time limit of {TIME_LIMIT} s" in finished.errors
    assert "rank 1 is in no collective" in finished.errors and f"script.py:{LINE_OF_FAILURE}" in finished.errors
    assert finished.seconds < SOON + TIME_LIMIT


@pytest.mark.usefixtures("without_debug")
def test_mismatched_collectives_wait_no_longer_than_the_limit(failing: Callable[..., Any]) -> None:
    finished = failing("mesh.data.broadcast(total)")
    assert f"rank 0 waits {TIME_LIMIT}" in finished.errors and f"script.py:{LINE_OF_COLLECTIVE}" in finished.errors
    assert f"rank 1 waits {TIME_LIMIT}" in finished.errors and f"script.py:{LINE_OF_FAILURE}" in finished.errors
    assert finished.seconds < SOON + TIME_LIMIT


def test_mismatched_collectives_in_debug_mode(failing: Callable[..., Any]) -> None:
    finished = failing("mesh.data.broadcast(total)", MPISHARD_DEBUG="1")
    assert "CollectiveMismatchError" in finished.errors
    for rank, call, line in ((0, "all_reduce", LINE_OF_COLLECTIVE), (1, "broadcast", LINE_OF_FAILURE)):
        (site, *_) = [text for text in finished.errors.splitlines() if text.strip().startswith(f"rank {rank}: {call}")]
        assert f"script.py:{line}" in site
    assert finished.seconds < SOON


def test_rank_that_leaves_early_is_noticed_long_before_the_limit(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(failure="sys.exit('bad input')"))
    finished = mpirun(3, script, MPISHARD_TIMEOUT="600")
    assert finished.code != 0
    assert "can never end, since rank 1 has ended its script" in finished.errors, finished.all
    assert finished.seconds < SOON + 10


# Ranks ask others after half a second in place of five.
LATE = """
import sys, time
import numpy as np
import mpishard
from mpishard.comm import watchdog

watchdog._SUSPICION_S = 0.5
with mpishard.Mesh() as mesh:
    for _ in range(3):  # numbered apart from what is not started
        mesh.world.start_{collective}(np.ones(4)).wait()
    mesh.world.barrier()
    if mesh.rank == 2:
        {late}
    mesh.world.{collective}(np.ones(4))
    if mesh.rank == 1:
        time.sleep({then})
print("finished")
"""


def test_a_rank_that_leaves_while_others_wait_is_noticed(mpirun: Callable[..., Any]) -> None:
    late = "time.sleep(2); sys.exit('bad input')"
    finished = mpirun(3, "-c", LATE.format(late=late, collective="all_reduce", then=0))
    assert finished.code != 0
    assert "can never end, since rank 2 has ended its script" in finished.errors, finished.all
    assert finished.seconds < SOON


# One rank of a group of `map_runs` raises, in its second case, while the other waits for it.
GROUPS = """
import numpy as np
import mpishard
from mpishard.comm import watchdog

watchdog._SUSPICION_S = 0.5

def run(case, mesh):
    if case == 1 and mesh.rank == 1:
        raise ArithmeticError("spoilt")
    return float(mesh.world.{call}[0])

print(mpishard.map_runs(run, [0, 1], mpishard.Mesh(), ranks_each=2))
"""


@pytest.mark.usefixtures("without_debug")
@pytest.mark.parametrize("call", ["all_reduce(np.ones(1))", "all_reduce(np.ones(1, np.int64), op='max')"])
def test_an_error_on_one_rank_of_a_group_ends_the_wait_of_the_others(call: str, mpirun: Callable[..., Any]) -> None:
    finished = mpirun(2, "-c", GROUPS.format(call=call), MPISHARD_TIMEOUT="600")
    assert finished.code != 0 and not finished.output.strip(), finished.all
    assert "can never end, since rank 1 has raised ArithmeticError: spoilt" in finished.errors, finished.all
    assert finished.seconds < SOON


def test_a_late_rank_is_waited_for_where_the_root_has_left(mpirun: Callable[..., Any]) -> None:
    """MPICH sends to rank 3 through rank 2; ranks 0 and 1 are over long before."""
    finished = mpirun(4, "-c", LATE.format(late="time.sleep(3)", collective="broadcast", then=0))
    assert finished.code == 0 and finished.output.count("finished") == 4, finished.all


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="Open MPI sends from the root to each rank of a few")
@pytest.mark.usefixtures("without_debug")
def test_a_rank_that_leaves_beside_others_that_took_part_is_noticed(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(4, "-c", LATE.format(late="sys.exit('bad input')", collective="broadcast", then=600))
    assert finished.code != 0
    assert "can never end, since rank 2 has ended its script" in finished.errors, finished.all
    assert "rank 0 took part, and has freed its mesh" in finished.errors, finished.all
    assert "rank 1 took part, and is in no collective" in finished.errors
    assert "rank 3 waits" in finished.errors
    assert finished.seconds < SOON


@pytest.mark.usefixtures("without_debug")
def test_a_set_up_is_waited_for_unless_nobody_is_at_work(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time, numpy as np, mpishard\n"
        "from mpishard.comm import watchdog\n"
        "watchdog._IDLE_S = watchdog._LOOK_S = 1.0\n"
        "with mpishard.Mesh() as mesh:\n"
        "    time.sleep(4 * (mesh.rank == 0))\n"
        "    mesh.world.barrier()\n"
        "    if mesh.rank == 0:\n"
        "        mesh.data.all_reduce(np.ones(3))\n"
        "    mesh.world.barrier()\n"
    )
    finished = mpirun(3, script, MPISHARD_TIMEOUT="")
    assert finished.code != 0
    assert "no rank has been at work for 1 s" in finished.errors, finished.all
    for rank, call, line in ((0, "data.all_reduce", 8), (1, "world.barrier #2", 9), (2, "world.barrier #2", 9)):
        (line_of_rank,) = [text for text in finished.errors.splitlines() if text.startswith(f"  rank {rank} waits")]
        assert call in line_of_rank and f"script.py:{line}" in line_of_rank


def test_rank_that_leaves_the_mesh_early(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, mpishard\n"
        "with mpishard.Mesh() as mesh:\n"
        "    for _ in range(3 - (mesh.rank == 1)):\n"
        "        mesh.data.all_reduce(np.ones(3))\n"
    )
    finished = mpirun(3, script, MPISHARD_TIMEOUT="600")
    assert finished.code != 0
    assert "rank 1 has freed its mesh" in finished.errors, finished.all


def test_ends_well_whatever_is_left_open(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    for last in ("", "MPI.Finalize()", "mesh.free()", "time.sleep(0.5 * mesh.rank)", "mpishard.Mesh(); mesh.free()"):
        script = tmp_path / "script.py"
        script.write_text(
            "import time, mpishard, numpy as np\nfrom mpi4py import MPI\nmesh = mpishard.Mesh()\n"
            f"mesh.data.all_reduce(np.ones(3))\n{last}\n"
        )
        finished = mpirun(3, script)
        assert finished.code == 0, f"{last}: {finished.all}"
        assert "has died" not in finished.errors and "Traceback" not in finished.errors, finished.all
