"""Programs of mpi4py under ``mpishard.watch``: which call a frame is in, what a rank says, and what follows from it."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import mpishard
from mpishard.cli import main
from mpishard.io.files import write_note
from mpishard.launch.detection import MPICH, OPEN_MPI, SLURM, Launch, name_of_job
from mpishard.watch import __main__ as command
from mpishard.watch import calls, guard, outside
from mpishard.watch.__main__ import main as watch
from mpishard.watch.calls import call_in, call_on_line
from mpishard.watch.diagnosis import diagnose, report, shortest_cycle
from mpishard.watch.folder import FOLDER, START, ask, begin, frames_of, jobs, read_folder
from mpishard.watch.sampler import END, PROCESSES, REQUEST, Watcher

# -- which call a frame is in ------------------------------------------------------------------------------------------

COMM = MPI.COMM_SELF


class Solver:
    def __init__(self, comm):
        self.comm, self.rows, self.peers = comm, {"row": comm}, [0]

    @property
    def runs_code(self):
        raise AssertionError("a property of the program was evaluated")


def seen(wait):
    """What `call_in` finds in the frame of a thread that has come to the call in which ``wait(Solver)`` receives."""
    comm = MPI.COMM_SELF.Dup()
    solver, found = Solver(comm), None
    thread = threading.Thread(target=wait, args=(solver,), daemon=True)
    thread.start()
    while found is None and thread.is_alive():
        frame = sys._current_frames().get(thread.ident)
        found = None if frame is None else call_in(frame)
    comm.Send(bytearray(8), dest=0, tag=7)
    thread.join()
    comm.Free()
    return found


def test_a_call_is_read_from_the_frame() -> None:
    def wait(solver):
        me = solver.comm.rank
        solver.comm.Recv(
            bytearray(8),
            source=solver.peers[0] + (me if me > 0 else me * 2),
            tag=7,
        )

    found = seen(wait)
    assert {name: found[name] for name in ("op", "on", "class", "source", "tag")} == {
        "op": "Recv",
        "on": "solver.comm",
        "class": "Comm",
        "source": 0,
        "tag": 7,
    }
    assert found["size"] == 1 and (found["members"] is None) == (MPI.COMM_WORLD.size == 1) and found["identity"]


@pytest.mark.parametrize("form", ["bound", "subscript", "any"])
def test_receivers_and_peers(form: str) -> None:
    def bound(solver):
        receive = solver.comm.Recv
        receive(bytearray(8), 0, 7)

    def subscript(solver):
        solver.rows["row"].Recv(bytearray(8), 0, 7)

    def any_source(solver):
        solver.comm.Recv(bytearray(8))

    found = seen({"bound": bound, "subscript": subscript, "any": any_source}[form])
    expected = {
        "bound": ("receive", 0, 7),
        "subscript": ("solver.rows['row']", 0, 7),
        "any": ("solver.comm", "any", "any"),
    }
    assert (found["op"], found["on"], found["source"], found["tag"]) == ("Recv", *expected[form])


@pytest.mark.parametrize("source", [0, MPI.ANY_SOURCE])
def test_messages_of_other_tags_are_seen_where_one_is_received(source: int) -> None:
    def wait(solver):
        started = solver.comm.Isend(bytearray(8), dest=0, tag=3)
        solver.comm.Recv(bytearray(8), source, 7)
        solver.comm.Recv(bytearray(8), 0, 3)
        started.Wait()

    assert seen(wait)["unreceived"] == [[0, 3]]


def test_a_file_is_not_asked_for_its_ranks(tmp_path: Path) -> None:
    """Its lock is held by the call that is looked at."""
    file = MPI.File.Open(MPI.COMM_SELF, str(tmp_path / "x"), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    assert calls._members(MPI, file) == {} and calls._members(MPI, MPI.COMM_SELF)["size"] == 1
    file.Close()


def test_no_code_of_the_program_runs() -> None:
    solver = Solver(COMM)
    names = {"solver": solver, "x": 3, "n": 0}
    node = calls.ast.parse("solver.runs_code.Barrier()", mode="eval").body
    assert calls._receiver(node, names) is None
    for text in ("solver.runs_code", "print(x)", "x / n", "x % n", "missing", "[1][x]", "solver.peers[solver.peers]"):
        assert calls._value(calls.ast.parse(text, mode="eval").body, names) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("self.comm.Bcast(x, root=2)", {"op": "Bcast", "on": "self.comm", "root": 2}),
        ("total = comm.allreduce(x)", {"op": "allreduce", "on": "comm"}),
        ("comm.Send(x, 3)", {"op": "Send", "dest": 3, "tag": 0}),
        ("comm.gather(x, 1)", {"op": "gather", "root": 1}),
        ("comm.Gather(x, y, 1)", {"op": "Gather", "root": 1}),
        ("comm.Reduce(x, y, MPI.SUM)", {"op": "Reduce", "root": 0}),
        ("comm.Sendrecv(x, 1, 5, y, 2)", {"dest": 1, "tag": 5, "source": 2, "recvtag": "any"}),
        ("comm.Recv(x, MPI.ANY_SOURCE)", {"source": "any", "tag": "any"}),
        ("comm.Recv(*arguments)", {"op": "Recv", "source": None}),
        ("MPI.Request.Waitall(requests)", {"op": "Waitall", "class": ""}),
        ("MPI.File.Open(comm, name)", {"op": "Open", "on": "MPI.File"}),
        ("MPI.Finalize()", {"op": "Finalize", "on": "MPI"}),
        ("socket.send(data)", None),
        ("MPI.COMM_WORLD.barrier()", {"op": "barrier"}),
        ("mpi_communicator.send(x, dest=2)", {"op": "send", "dest": 2}),
        ("comm.Irecv(x, 0).Wait()", {"op": "Wait"}),
        ("thread.wait()", None),
        ("words = text.split()", None),
        ("x = = 1", None),
    ],
)
def test_a_call_is_read_from_a_line(line: str, expected: dict | None, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"\n{line}\n")
    found = call_on_line(str(file), 2)
    assert found is None if expected is None else expected.items() <= found.items()
    assert call_on_line(str(file), 1) is None and call_on_line(str(tmp_path / "no.py"), 1) is None


# -- what follows from the answers -------------------------------------------------------------------------------------


def waits(rank, op, *, seconds=20.0, members=None, ranks=4, identity="", line=1, kind="Comm", **fields):
    size = ranks if members is None else len(members)
    call = {"op": op, "on": "comm", "class": kind, "size": size, "members": members, "identity": identity, **fields}
    return says(rank, "waits", seconds=seconds, call=call, line=line, ranks=ranks)


SUM = "data.all_reduce 7"


def on_axis(rank, call, *members):
    """In a call of mpishard; of a message `members` are this rank and the other."""
    axis, op, number = call.replace(".", " ").split()
    peers = {"recv": {"source": 1}}.get(op, {})
    return waits(rank, op, kind="Axis", on=axis, number=f"#{number}", members=list(members or range(4)), **peers)


def says(rank, state, *, seconds=0.0, call=None, line=1, ranks=4, file="", **fields):
    stack = [{"file": "train.py", "line": line, "name": "step", "text": f"line {line}", "own": True}]
    about = {"rank": rank, "ranks": ranks, "host": "vm", "process": 100 + rank, "time": 0.0, "began": 0.0}
    return about | {"state": state, "seconds": seconds, "call": call, "stack": stack, "file": file} | fields


CASES = {
    "nothing": ([says(rank, "runs") for rank in range(4)], {}, []),
    "passing": ([waits(rank, "Barrier", seconds=0.2) for rank in range(4)], {}, []),
    "mismatch": ([waits(0, "Bcast", root=0), *(waits(r, "Barrier") for r in (1, 2, 3))], {}, [("mismatch", (0,))]),
    "root": ([waits(r, "Bcast", root=int(r == 2)) for r in range(4)], {}, [("root", (2,))]),
    "ended": (
        [*(waits(r, "Barrier") for r in (0, 1)), *(says(r, "ended", code=0) for r in (2, 3))],
        {},
        [("ended", (2, 3))],
    ),
    "code": (
        [waits(0, "Barrier"), waits(1, "Barrier"), says(2, "ended", code=0), says(3, "ended", code=3)],
        {},
        [("ended", (3,)), ("ended", (2,))],
    ),
    "computes": ([says(0, "runs"), *(waits(r, "Reduce", root=0) for r in (1, 2, 3))], {}, [("computes", (0,))]),
    # The thread of rank 2 has not looked twice since it came.
    "late": (
        [
            *(waits(r, "Barrier") for r in (0, 1)),
            waits(2, "Barrier", seconds=0.0) | {"state": "runs"},
            waits(3, "Barrier", seconds=0.5),
        ],
        {},
        [("late", (2,)), ("late", (3,))],
    ),
    # Rank 1 has left the Reduce, to which rank 3 has not come.
    "left": (
        [waits(0, "Reduce", root=0), waits(1, "Barrier"), waits(2, "Barrier"), says(3, "runs")],
        {},
        [("computes", (3,))],
    ),
    "gone": ([waits(r, "Barrier") for r in (0, 1, 2)], {3: "process 103 is gone"}, [("absent", (3,))]),
    "file": (
        [says(0, "runs", seconds=9.0, file="read of /x"), *(waits(r, "Barrier") for r in (1, 2, 3))],
        {},
        [("file", (0,))],
    ),
    "failed": (
        [says(0, "failed", error="ValueError: x"), *(waits(r, "Barrier") for r in (1, 2, 3))],
        {},
        [("failed", (0,))],
    ),
    "ring": ([waits(r, "recv", source=(r + 1) % 4, tag=0) for r in range(4)], {}, [("cycle", (0, 1, 2, 3))]),
    "self": ([waits(0, "Recv", source=0, tag=0), *(waits(r, "Barrier") for r in (1, 2, 3))], {}, [("cycle", (0,))]),
    "tags": (
        [
            waits(0, "Ssend", dest=1, tag=1),
            waits(1, "Recv", source=0, tag=2),
            *(says(r, "ended", code=0) for r in (2, 3)),
        ],
        {},
        [("tag", (0, 1))],
    ),
    # Of rank 1 a message has come, rank 2 waits for its receiver, and rank 3 for an answer.
    "tags of any": (
        [
            waits(0, "recv", source="any", tag=5, unreceived=[[1, 3], [2, 4]]),
            says(1, "ended", code=0),
            waits(2, "Ssend", dest=0, tag=4),
            waits(3, "recv", source=0, tag=6),
        ],
        {},
        [("tag", (0, 1, 2)), ("receive", (1,))],
    ),
    # The right one may still come.
    "tags for later": (
        [waits(0, "recv", source="any", tag=5, unreceived=[[1, 3]]), *(says(r, "runs") for r in (1, 2, 3))],
        {},
        [("computes", (1,)), ("computes", (2,)), ("computes", (3,))],
    ),
    "send": ([waits(0, "Send", dest=1, tag=0), *(says(r, "ended", code=0) for r in (1, 2, 3))], {}, [("send", (1,))]),
    "receive": (
        [waits(0, "Recv", source=2, tag=0), *(says(r, "ended", code=0) for r in (1, 2, 3))],
        {},
        [("receive", (2,))],
    ),
    "in collective": (
        [waits(1, "Recv", source=0, tag="any"), *(waits(r, "Barrier") for r in (0, 2, 3))],
        {},
        [("receive", (1,))],
    ),
    "duplicate": (
        [waits(r, "Barrier", identity="A" if r else "B") | {"rank": r} for r in range(4)],
        {},
        [("communicator", (0, 1, 2, 3))],
    ),
    "rows": (
        [waits(0, "Barrier"), waits(1, "Barrier", members=[0, 1]), *(waits(r, "Barrier") for r in (2, 3))],
        {},
        [("communicator", (1,))],
    ),
    "subset": (
        [waits(2, "Send", members=[2, 3], dest=1, tag=0), *(says(r, "ended", code=0) for r in (0, 1, 3))],
        {},
        [("send", (3,))],
    ),
    "request": (
        [waits(1, "Wait", kind="Request"), *(says(r, "ended", code=0) for r in (0, 2, 3))],
        {},
        [("request", (1,))],
    ),
    # As after Iallreduce, to which ranks 1 and 2 have not come.
    "request of others": (
        [*(waits(r, "Wait", kind="Request") for r in (0, 3)), *(says(r, "runs") for r in (1, 2))],
        {},
        [("computes", (1, 2)), ("request", (0, 3))],
    ),
    "all": ([waits(r, "Allreduce") for r in range(4)], {}, [("arrived", (0, 1, 2, 3))]),
    "spawned": (
        [waits(0, "Recv", members=[-1, -1, 0], source=1, tag=0), *(waits(r, "Barrier") for r in (1, 2, 3))],
        {},
        [("outside", (0,))],
    ),
    "on an axis": ([*(on_axis(r, SUM) for r in (0, 1, 3)), says(2, "runs")], {}, [("computes", (2,))]),
    # Rank 0 waits for 1, which waits for 3, which computes; 2 waits for 0.
    "behind others": (
        [
            on_axis(0, SUM, 0, 1),
            on_axis(1, "tensor.all_reduce 9", 1, 3),
            on_axis(2, "world.recv 4", 2, 0),
            says(3, "runs"),
        ],
        {},
        [("computes", (3,))],
    ),
    "one call more": (
        [on_axis(r, "data.all_reduce 8" if r == 1 else SUM) for r in range(4)],
        {},
        [("mismatch", (1,))],
    ),
    "other axes": ([on_axis(r, "world.barrier 3" if r == 1 else SUM) for r in range(4)], {}, [("mismatch", (1,))]),
    "messages": ([on_axis(r, "world.recv 8", r, (r + 1) % 4) for r in range(4)], {}, [("cycle", (0, 1, 2, 3))]),
    "two messages": ([on_axis(r, "world.recv 8", r, 1 - r) for r in (0, 1)], {}, [("cycle", (0, 1))]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named(name: str) -> None:
    answers, absent, expected = CASES[name]
    found = diagnose(answers, absent, 4)
    assert [(finding.kind, finding.ranks) for finding in found[: len(expected)]] == expected
    assert bool(found) == bool(expected)
    lines = report(answers, absent, 4)
    assert len([line for line in lines if line.startswith("likely cause")]) == min(3, len(found))
    assert bool(found) == ("no rank has waited" not in lines[-1])


def test_roots_are_named_where_ranks_have_left_the_call() -> None:
    answers = [waits(0, "Gather", root=0), waits(1, "Barrier"), waits(2, "Gather", root=2), waits(3, "Barrier")]
    text = diagnose(answers, {}, 4)[0].text
    assert "with root 0" in text and "with root 2" in text and text.endswith("and give the same root")


def test_the_tags_of_a_receive_and_of_what_was_sent_are_named() -> None:
    text = diagnose(CASES["tags of any"][0], {}, 4)[0].text
    assert text == (
        "name other tags: rank 0 in recv of comm with tag 5 at train.py:1, "
        "rank 2 in Ssend of comm with tag 4 at train.py:1, rank 1 sent tag 3"
    )


def test_alike_ranks_are_in_one_line() -> None:
    answers = [waits(rank, "Barrier", ranks=40) for rank in range(40) if rank != 7] + [
        says(7, "runs", line=5, ranks=40)
    ]
    lines = report(answers, {}, 40)
    assert lines[0] == "ranks 0-6, 8-39: in Barrier of comm (40 ranks) for 20 s"
    assert lines[1] == "    train.py:1 (step)  line 1" and lines[2] == "rank 7: running"
    assert "rank 7 is waited for" in lines[-1] and "train.py:5" in lines[-1]


def test_a_rank_that_could_not_tell_is_in_the_communicator_of_others_at_its_place() -> None:
    silent = waits(3, "Allreduce", members=[2, 3])
    del silent["call"]["size"], silent["call"]["members"]
    answers = [says(0, "ended", code=0), says(1, "ended", code=0), waits(2, "Allreduce", members=[2, 3]), silent]
    assert [finding.kind for finding in diagnose(answers, {}, 4)] == ["arrived"]


def test_shortest_cycle() -> None:
    assert shortest_cycle({0: {1}, 1: {2, 3}, 2: {0}, 3: {1}}) == [1, 3]
    assert shortest_cycle({0: {1}, 1: {2}}) == []


# -- the files of a job ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "processes").mkdir()
    begin(tmp_path, 3, ["train.py"])
    return tmp_path


def write(folder, answer, *, age=0.0):
    answer = answer | {"began": time.time() - age, "time": time.time() - age}
    path = folder / "processes" / f"{answer['host']}-{answer['process']}.where.json"
    path.write_text(json.dumps(answer))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_answers_of_other_jobs_and_damaged_ones_do_not_count(folder: Path) -> None:
    write(folder, waits(0, "Barrier", ranks=3), age=3600)
    write(folder, waits(1, "Barrier", ranks=3) | {"host": "other"})
    write(folder, waits(2, "Barrier", ranks=3)).write_text('{"rank": 2')
    write(folder, waits(2, "Barrier", ranks=3, members=["x"]) | {"process": 7})
    write(folder, waits(2, "recv", ranks=3, unreceived=[[1]]) | {"process": 8})
    asked = read_folder(folder)
    assert [answer["rank"] for answer in asked.answers] == [1] and asked.absent.keys() == {0, 2} and asked.ranks == 3


def test_a_rank_that_is_gone_or_silent(folder: Path) -> None:
    write(folder, waits(0, "Barrier", ranks=3) | {"process": os.getpid(), "host": os.uname().nodename})
    write(folder, says(1, "runs", ranks=3) | {"process": 2**22 + 1, "host": os.uname().nodename})
    write(folder, says(2, "runs", ranks=3) | {"host": "other"})
    assert "is gone" in read_folder(folder).absent[1]
    asked = ask(folder, 0.05)  # none of them answers
    assert asked.is_over and "is gone" in asked.absent[1] and [a["rank"] for a in asked.answers] == [0, 2]


def test_a_rank_that_keeps_the_lock_has_written_its_stack(folder: Path) -> None:
    program = folder / "train.py"
    program.write_text("\n\ncomm.allreduce(1)\n")
    path = write(
        folder, says(0, "runs", ranks=3) | {"process": os.getpid(), "host": os.uname().nodename, "thread": 255}
    )
    stack = path.with_name(path.name.replace(".where.json", ".stack"))
    stack.write_text(
        'Timeout (0:00:05)!\nThread 0x00000000000000fe (most recent call first):\n  File "x.py", line 1 in wait\n\n'
        f'Thread 0x00000000000000ff (most recent call first):\n  File "{program}", line 3 in <module>\n'
    )
    answer, *_ = read_folder(folder).answers
    assert answer["state"] == "waits" and answer["call"]["op"] == "allreduce" and answer["seconds"] >= 5
    assert answer["stack"][0]["text"] == "comm.allreduce(1)"
    now = time.time()
    write(folder, waits(1, "Barrier", ranks=3) | {"host": "other"}, age=20)
    write_note(folder / END, {"asked": now - 25})
    os.utime(path, (now - 28, now - 28))
    os.utime(folder / END, (now - 10, now - 10))  # a stopped rank writes its stack when the launcher continues it
    assert read_folder(folder).absent.keys() == {0, 2}


def test_frames_of_a_real_dump() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    frames = frames_of(text, threading.get_ident())
    assert frames[0]["name"] == "test_frames_of_a_real_dump" and "dump_traceback" in frames[0]["text"]


def test_a_rank_in_mpi_init(folder: Path) -> None:
    (folder / "train.py").write_text("from mpi4py import MPI\n")
    stack = [
        {"file": "<frozen importlib._bootstrap>", "line": 241, "name": "create", "text": "", "own": False},
        {"file": "train.py", "line": 1, "name": "<module>", "text": "from mpi4py import MPI", "own": True},
    ]
    found = outside.stands(stack)
    assert found["state"] == "waits" and found["call"]["op"] == "Init" and found["stack"] == stack[1:]


def test_why_prints_the_report(folder: Path, capsys, monkeypatch) -> None:
    write(folder, waits(0, "Barrier", ranks=3) | {"process": os.getpid(), "host": os.uname().nodename})
    for rank in (1, 2):
        write(folder, says(rank, "ended", ranks=3, code=0) | {"host": f"n{rank}"})
    assert main(["why", str(folder), "--wait", "0"]) == 0
    assert "likely cause: ranks 1, 2 on n1, n2 have ended" in capsys.readouterr().out
    assert main(["why", str(folder), "--wait", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "ended"
    assert main(["why", str(folder / "no")]) == 2 and "mpishard.watch" in capsys.readouterr().err
    monkeypatch.chdir(folder)
    assert main(["why"]) == 2 and f"{FOLDER} does not exist" in capsys.readouterr().err
    FOLDER.mkdir()
    assert main(["why"]) == 2 and START in capsys.readouterr().err
    assert main(["why", str(folder), "--pid", "1"]) == 2 and "not both" in capsys.readouterr().err


def test_of_several_jobs_in_a_folder_the_newest_is_shown(tmp_path: Path, capsys) -> None:
    """Beside it those that run are named; not the one that has ended, nor a damaged one."""
    for number, name in enumerate(("damaged", "ended", "first", "second")):
        (tmp_path / name / "processes").mkdir(parents=True)
        begin(tmp_path / name, 1, ["train.py"])
        os.utime(tmp_path / name / START, (number, number))
        state = {"first": waits(0, "Barrier", ranks=1), "ended": says(0, "ended", ranks=1)}
        write(tmp_path / name, state.get(name, waits(0, "Finalize", ranks=1)) | {"host": "other"})
    (tmp_path / "damaged" / START).write_text("{")
    os.utime(tmp_path / "damaged" / START, (0, 0))
    assert [job.name for job in jobs(tmp_path)] == ["second", "first", "ended", "damaged"]
    assert main(["why", str(tmp_path), "--wait", "0"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{tmp_path / 'second'} is the newest job here; others run: {tmp_path / 'first'}"
    assert second == "rank 0: in Finalize of comm (1 ranks) for 20 s"
    assert main(["why", str(tmp_path / "first"), "--wait", "0"]) == 0
    assert capsys.readouterr().out.startswith("rank 0: in Barrier")


def test_ranks_on_several_hosts() -> None:
    """Their hosts are named, but not for what all are in."""
    answers = [waits(rank, "Barrier") | {"host": f"n{rank // 2}"} for rank in range(4)]
    assert report(answers, {}, 4)[0] == "ranks 0-3: in Barrier of comm (4 ranks) for 20 s"
    answers[3] = says(3, "runs") | {"host": "n1"}
    lines = report(answers, {}, 4)
    assert lines[0].startswith("ranks 0-2: in Barrier") and lines[2] == "rank 3 on n1: running"
    assert lines[-1].startswith("likely cause: rank 3 on n1 is waited for")


ENVIRONMENTS = [
    (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-vm-7@1"}, "prterun-vm-7@1"),
    (OPEN_MPI, {}, "job"),
    (SLURM, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}, "7.0.2"),
    (MPICH, {"I_MPI_HYDRA_UUID": "a/b"}, "a-b"),
    (MPICH, {"I_MPI_HYDRA_UUID": "a", "PMI_SPAWNED": "1"}, "a-spawned"),
]


@pytest.mark.parametrize(("family", "environment", "expected"), ENVIRONMENTS)
def test_the_name_of_a_job(family: str, environment: dict[str, str], expected: str) -> None:
    assert name_of_job(Launch("", family, 0, 2), environment) == expected
    assert name_of_job(None, environment) == f"{os.uname().nodename}-{os.getpid()}"


def test_the_name_of_a_job_of_hydra() -> None:
    """It is that of the proxy, which may have started a shell."""
    code = "from mpishard.launch.detection import *; print(name_of_job(Launch('', MPICH, 0, 1), {}))"
    shell = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[3:])", "--control-port", "n0:4711"]
    done = subprocess.run(
        [*shell, "sh", "-c", f'{sys.executable} -c "{code}"; true'],
        env=ALONE | {"PYTHONPATH": PACKAGE},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "n0-4711\n", done.stderr


def test_why_after_the_ranks_were_killed(folder: Path, capsys) -> None:
    for rank in range(3):
        write(folder, says(rank, "runs", ranks=3) | {"process": 2**22 + 1 + rank, "host": os.uname().nodename})
    assert main(["why", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("or the host was lost: 0, 1, 2")


# -- a program that is watched -----------------------------------------------------------------------------------------

PACKAGE = str(Path(mpishard.__file__).parents[1])
ALONE = {name: value for name, value in os.environ.items() if not name.startswith(mpishard._STARTED_BY)}
ALONE.pop("PYTHONSAFEPATH", None)  # of these tests: programs have their folder on the path


def watched(
    program: str, folder: Path, *options: str, stderr: Any = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    name = ("-m", "program") if "-m" in options else ("program.py",)
    options = tuple(option for option in options if option != "-m")
    command = [sys.executable, "-m", "mpishard.watch", "--folder", "watch", *options, *name, "--flag", "x"]
    variables = ALONE | {"PYTHONPATH": PACKAGE} | environment
    return subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, check=False
    )


def test_a_program_runs_as_it_does_alone(tmp_path: Path) -> None:
    program = """
import sys, atexit
print(sys.argv, __name__, __file__, sys.path[0], {"mpishard", "mpi4py.MPI"} & set(sys.modules))
import mpishard
print("mpi4py.MPI" in sys.modules, mpishard.__version__)
sys.exit(5)
"""
    done = watched(program, tmp_path, PMI_RANK="0", PMI_SIZE="1", MPISHARD_RUN="")
    assert done.returncode == 5, done.stderr
    first, second = done.stdout.splitlines()
    path = str(tmp_path / "program.py")
    assert first == f"['program.py', '--flag', 'x'] __main__ {path} {tmp_path} set()"
    assert second == f"True {mpishard.__version__}"  # as in every rank, importing mpishard has started MPI
    (answer,) = read_folder(*jobs(tmp_path / "watch")).answers
    assert (answer["state"], answer["code"]) == ("ended", 5)


def test_a_module_runs_as_it_does_alone(tmp_path: Path) -> None:
    program = "import sys\nprint(sys.argv, __name__, __spec__.name)\n"
    done = watched(program, tmp_path, "-m")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[str(tmp_path / 'program.py'), '--flag', 'x']} __main__ program\n"


def test_a_message_that_is_not_received_is_named(tmp_path: Path) -> None:
    program = "from mpi4py import MPI\nrequest = MPI.COMM_WORLD.Isend(bytearray(8), dest=0, tag=3)\n"
    done = watched(program, tmp_path)
    assert "mpishard: rank 0 ends without receiving what rank 0 has sent with tag 3\n" in done.stderr


def test_a_failure_is_noted(tmp_path: Path) -> None:
    """Not that of a process that the program forks."""
    program = """
import os, sys
from mpi4py import MPI
child = os.fork()
if not child:
    sys.excepthook(KeyError, KeyError("of a fork"), None)
    os._exit(0)
os.waitpid(child, 0)
raise ValueError("a bad packing")
"""
    done = watched(program, tmp_path)
    assert done.returncode == 1
    assert "ValueError: a bad packing" in done.stderr and "mpishard/watch" not in done.stderr
    (answer,) = read_folder(*jobs(tmp_path / "watch")).answers
    assert (answer["state"], answer["error"]) == ("failed", "ValueError: a bad packing")


RECEIVES = """
from mpi4py import MPI
def step(comm):
    comm.Recv(bytearray(8), source=0, tag=3)
step(MPI.COMM_WORLD)
"""


def test_a_wait_ends_after_its_time_limit(tmp_path: Path) -> None:
    done = watched(RECEIVES, tmp_path, "--timeout", "1.2")  # shorter waits have no cause
    assert done.returncode == 1
    assert "rank 0: in Recv of comm (1 ranks)" in done.stderr and "program.py:4 (step)" in done.stderr
    assert "likely cause: rank 0 waits for itself" in done.stderr
    asked = read_folder(*jobs(tmp_path / "watch"))
    assert [finding.kind for finding in diagnose(asked.answers, asked.absent, asked.ranks)] == ["cycle"]


@pytest.mark.parametrize("limit", ["inf", "1e12"])
def test_a_time_limit_without_end(limit: str, tmp_path: Path) -> None:
    done = watched("import time; time.sleep(1)", tmp_path, "--timeout", limit)
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_a_wait_with_the_lock_ends_too(tmp_path: Path) -> None:
    """As in the first collective of objects: no thread of Python runs, and the guard kills the process."""
    program = """
import ctypes, types
comm = types.SimpleNamespace(allreduce=ctypes.PyDLL(None).sleep)
comm.allreduce(600)
"""
    done = watched(program, tmp_path, "--timeout", "0.5")
    assert done.returncode == -signal.SIGKILL
    assert "rank 0: in allreduce of comm for" in done.stderr and "program.py:4 (<module>)  comm.allre" in done.stderr


PATIENCE = """
import shutil, threading
(thread,) = [each for each in threading.enumerate() if each.name == "mpishard-where"]
type(thread).look.__globals__["_LATE_S"] = {}
"""
BY_GUARD, BY_RANK = PATIENCE.format(1e9), PATIENCE.format(0.0) + "shutil.rmtree('watch')"


def test_a_wait_ends_where_the_folder_cannot_be_used(tmp_path: Path) -> None:
    """As on a disk that fills: the rank itself ends the job, here without more patience than that of the guard."""
    done = watched(BY_RANK + RECEIVES, tmp_path, "--timeout", "0.5")
    assert done.returncode == 1
    assert "rank 0 has waited longer than 0.5 s (--timeout) in Recv at" in done.stderr
    assert "comm.Recv(bytearray(8), source=0, tag=3)" in done.stderr and "cannot be asked" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ends", [BY_GUARD, BY_RANK], ids=["guard", "rank"])
def test_a_wait_ends_where_stderr_cannot_be_written(ends: str, tmp_path: Path) -> None:
    """As a file on a full disk."""
    with open("/dev/full", "w") as full:
        done = watched(ends + RECEIVES, tmp_path, "--timeout", "0.5", stderr=full)
    assert done.returncode == 1


@pytest.mark.parametrize("words", [(), ("-m",), ("--timeout",), ("--timeout", "0", "program.py"), ("-c", "1")])
def test_wrong_usage(words: tuple[str, ...], monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["watch", *words])
    with pytest.raises(SystemExit, match="2"):
        watch()
    assert "error: " in capsys.readouterr().err


def test_a_rank_does_not_answer_after_the_report(tmp_path: Path, monkeypatch) -> None:
    """As one that was stopped, and that the launcher continues when the job ends."""
    ended = []
    monkeypatch.setattr(Watcher, "_end_job", lambda self: ended.append(self.path.exists()))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", faulthandler.dump_traceback_later)  # restored at the end
    (tmp_path / PROCESSES).mkdir()
    watcher = Watcher(tmp_path, Launch("MPICH", "", 1, 2), None, limit=60.0)
    watcher.watch()
    watcher.end()
    watcher.path.unlink()
    write_note(tmp_path / END, {"asked": 0.0})
    write_note(tmp_path / REQUEST, None)
    watcher.look()
    faulthandler.cancel_dump_traceback_later()
    assert ended == [False] and not watcher.path.exists()


def test_a_rank_answers_where_the_clock_was_set_back(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", faulthandler.dump_traceback_later)  # restored at the end
    (tmp_path / PROCESSES).mkdir()
    write_note(tmp_path / REQUEST, None)
    os.utime(tmp_path / REQUEST, (time.time() + 3600,) * 2)
    watcher = Watcher(tmp_path, Launch("MPICH", "", 1, 2), None, limit=None)
    watcher.watch()
    watcher.end()
    watcher.path.unlink()
    write_note(tmp_path / REQUEST, None)
    watcher.look()
    faulthandler.cancel_dump_traceback_later()
    assert watcher.path.exists()


def test_a_rank_whose_queue_of_calls_is_full_is_not_stuck(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", faulthandler.dump_traceback_later)  # restored at the end
    monkeypatch.setattr(ctypes.pythonapi, "Py_AddPendingCall", lambda call, argument: -1)
    (tmp_path / PROCESSES).mkdir()
    watcher = Watcher(tmp_path, Launch("MPICH", "", 1, 2), None, limit=None)
    watcher.watch()
    watcher.end()
    for _ in range(2):
        watcher.look()
    faulthandler.cancel_dump_traceback_later()
    assert watcher.waited() == 0.0


def test_a_rank_without_a_place_ends_the_job(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "file").touch()
    aborted = []
    monkeypatch.setattr(command, "launches", lambda _: [Launch("MPICH", "", 0, 2)])
    monkeypatch.setattr(command, "_abort", lambda: aborted.append(True))
    monkeypatch.setattr(sys, "argv", ["watch", "--folder", str(tmp_path / "file" / "watch"), "program.py"])
    with pytest.raises(SystemExit, match="2"):
        watch()
    assert aborted and "give --folder a place" in capsys.readouterr().err


def test_a_job_that_does_not_come_out_of_finalize_ends(folder: Path, monkeypatch, capsys) -> None:
    """Not while one of its ranks runs."""
    killed, (reader, writer) = [], os.pipe()
    monkeypatch.setattr(guard, "_TEARDOWN_S", 10.0)
    monkeypatch.setattr(os, "kill", lambda *which: killed.append(which))
    for last in ("runs", "ended"):
        for rank in range(3):
            write(folder, says(rank, last if rank == 2 else "ended", ranks=3, code=0), age=20)
        assert guard._is_in_finalize(read_folder(folder), 0.2) == (last == "ended")
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert guard.guard(folder, 0.2) == 1
    assert killed == [(os.getppid(), signal.SIGKILL)] and "MPI_Finalize" in capsys.readouterr().err


def test_wrong_usage_of_run() -> None:
    assert main(["run", "--timeout", "3", "python", "x.py"]) == 2
    assert main(["run", "--watch", "--timeout", "0", "python", "x.py"]) == 2


# -- a program that is not watched -------------------------------------------------------------------------------------

SPY = """#!{python}
import json, sys
frame = dict(filename={program!r}, line=3, name="<module>")
pid = int(sys.argv[-1])
print(json.dumps([dict(os_thread_id=pid + 1, frames=[]), dict(os_thread_id=pid, frames=[frame])]))
"""


def test_ranks_below_a_process_are_looked_at_by_py_spy(tmp_path: Path, environ, monkeypatch) -> None:
    program = tmp_path / "train.py"
    program.write_text("\n\ncomm.Recv(x, source=1)\n")
    spy = tmp_path / "py-spy"
    spy.write_text(SPY.format(python=sys.executable, program=str(program)))
    spy.chmod(0o755)
    environ(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(outside.sys, "executable", str(tmp_path / "python"))
    environment = ALONE | {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    rank = subprocess.Popen([sys._base_executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        while b"PMI_RANK" not in Path(f"/proc/{rank.pid}/environ").read_bytes():
            pass
        asked = outside.look(os.getpid(), 1.0)
        with pytest.raises(ValueError, match=f"--pid {2**22 + 1}"):
            outside.look(2**22 + 1, 0.0)
    finally:
        rank.communicate(b"\n")
    (answer,) = asked.answers
    assert (answer["rank"], answer["process"], answer["state"]) == (0, rank.pid, "waits")
    assert answer["call"]["op"] == "Recv" and answer["call"]["source"] == 1 and asked.absent.keys() == {1}
    spy.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(outside, "_LIMIT_S", 0.1)
    with pytest.raises(OSError, match="does not answer within 0.1 s"):
        outside._stack(rank.pid)
    spy.unlink()
    with pytest.raises(OSError, match="pip install py-spy"):
        outside._stack(rank.pid)
