"""How often `mpishard why` is right: ``python tests/helpers/why_score.py [NAME...]`` runs the programs of `hanging`.

Each runs on four ranks of this Python's MPI under ``python -m mpishard.watch --timeout 4``.  Right: the first cause
that is named is of the expected kind, with the ranks to blame.  Half: its kind or its ranks, or a later cause.

``python tests/helpers/why_score.py --debug [NAME...]`` runs them under ``MPISHARD_DEBUG=1`` in place of the watch: as
they are, which it does not see, and written with an axis of mpishard, where that has their calls.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hanging import PROGRAMS, UNSEEN, Wrong
from launching import environment, mpirun

from mpishard.watch.diagnosis import Finding, diagnose, report
from mpishard.watch.folder import jobs, read_folder

RANKS, LIMIT_S = 4, 90
PLAIN_S, DEBUG_S = 8.0, 6.0  # what a plain program gets; the time limit of one that is written with an axis


def run(*words: str, limit: float = LIMIT_S, **variables: str) -> tuple[str, int]:
    """What a job of this Python prints, and its exit code; -1 if it did not end by itself."""
    given = environment() | variables
    # With these a job goes on after the death of a rank, and ranks end without the others.
    del given["PRTE_MCA_state_base_recoverable"], given["OMPI_MCA_async_mpi_finalize"]
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(
            [mpirun()[0], "-n", str(RANKS), sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=given,
            start_new_session=True,
        )
        try:
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        log.seek(0)
        return log.read(), code


def watched(name: str, folder: str | Path, timeout: float = 4.0) -> tuple[list[Finding], str, int]:
    """What is found, what was printed and the last answers, and the exit code; -1 if the job did not end by itself."""
    program = Path(__file__).with_name("hanging.py")
    options = ["--folder", str(folder), "--timeout", str(timeout)]
    text, code = run("-m", "mpishard.watch", *options, str(program), name)
    asked = read_folder(*jobs(Path(folder)))
    for answer in asked.answers:  # of a stopped rank, which no launcher can end
        try:
            os.kill(answer["process"], signal.SIGKILL)
        except OSError:
            pass
    text += "\n".join(["last answers:", *report(asked.answers, asked.absent, asked.ranks)])
    return diagnose(asked.answers, asked.absent, asked.ranks), text, code


def grade(program: Wrong, found: Sequence[Finding]) -> str:
    def is_right(finding: Finding) -> bool:
        return finding.kind in program.kinds and (program.ranks is None or set(finding.ranks) <= set(program.ranks))

    if found and is_right(found[0]):
        return "right"
    near = [f for f in found if f.kind in program.kinds or set(f.ranks) == set(program.ranks or ())]
    return "half" if near else "wrong"


def show(grades: Counter[tuple[str, str]], columns: Sequence[str]) -> None:
    width = max(map(len, columns)) + 1
    print(f"\n{'':24}" + "".join(f"{column:>{width}}" for column in columns))
    for group in (*dict.fromkeys(program.group for program in PROGRAMS.values()), "all"):
        here = [sum(n for (of, at), n in grades.items() if group in (of, "all") and at == each) for each in columns]
        print(f"{group:24}" + "".join(f"{count:>{width}}" for count in here))


# -- the debug mode ----------------------------------------------------------------------------------------------------


class Written:
    """What the programs call of a communicator of mpi4py, written with an axis of mpishard; others cannot be."""

    def __init__(self, axis: Any) -> None:
        self._axis, self.rank, self.size = axis, axis.rank, axis.size

    def Barrier(self) -> None:
        self._axis.barrier()

    def Bcast(self, buffer: Any, root: int = 0) -> None:
        self._axis.broadcast(_numbers(buffer), root)

    def Allreduce(self, buffer: Any, _: Any = None) -> None:
        self._axis.all_reduce(_numbers(buffer))

    def Send(self, buffer: Any, dest: int, tag: int = 0) -> None:
        self._axis.send(_numbers(buffer), dest, tag)

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> SimpleNamespace:
        return SimpleNamespace(Wait=self._axis.start_send(_numbers(buffer), dest, tag).wait)

    def Irecv(self, buffer: Any, source: int = -1, tag: int = 0) -> SimpleNamespace:
        from mpi4py import MPI

        peer = source if source >= 0 else MPI.ANY_SOURCE
        return SimpleNamespace(Wait=self._axis.start_recv(_numbers(buffer), peer, tag).wait)

    def Recv(self, buffer: Any = None, source: int = -1, tag: int = 0) -> str:
        from mpi4py import MPI

        self._axis.recv(_numbers(buffer), source if source >= 0 else MPI.ANY_SOURCE, tag)
        return "stop"

    def recv(self, source: int = -1, tag: int = 0) -> str:
        return self.Recv(None, source, tag)

    barrier, bcast, allreduce, send, Ssend = Barrier, Bcast, Allreduce, Send, Send


def _numbers(buffer: Any) -> Any:
    import numpy as np

    return np.zeros(1) if buffer is None or isinstance(buffer, int | float | str) else np.asarray(buffer)


def run_written(name: str) -> None:
    """A program as one rank runs it, written with mpishard."""
    import mpishard

    with mpishard.Mesh() as mesh:
        PROGRAMS[name].run(Written(mesh.world), mesh.rank)


# What it prints, in the order in which one rules out the next.
SAID = {
    "cannot be written": "'Written' object|got Written",
    "at the call": "CollectiveMismatchError",
    "time limit": "mpishard: a collective has waited",
    "exception": "Traceback",
}


def said(text: str) -> str:
    return next((what for what, pattern in SAID.items() if re.search(pattern, text)), "nothing")


def debug(names: Sequence[str]) -> None:
    plain: Counter[tuple[str, str]] = Counter()
    written: Counter[tuple[str, str]] = Counter()
    program = str(Path(__file__).with_name("hanging.py"))
    for name in names:
        group = PROGRAMS[name].group
        text, _ = run(program, name, limit=PLAIN_S, MPISHARD_DEBUG="1")
        plain[group, said(text)] += 1
        limit = f"{DEBUG_S:g}"
        other, code = run(__file__, "--written", name, limit=40, MPISHARD_DEBUG="1", MPISHARD_TIMEOUT=limit)
        written[group, said(other)] += 1
        print(f"{name:22} plain: {said(text)}; written: {said(other)}, code {code}", flush=True)
        print("       " + other.replace("\n", "\n       "), flush=True)
    for title, counted in (("as they are", plain), ("written with an axis", written)):
        print(f"\n{title}")
        show(counted, [*SAID, "nothing"])


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--written"]:
        run_written(words[1])
        return
    if words[:1] == ["--debug"]:
        debug(words[1:] or [name for name, program in PROGRAMS.items() if program.group != UNSEEN])
        return
    grades: Counter[tuple[str, str]] = Counter()
    for name in words or PROGRAMS:
        program = PROGRAMS[name]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            began = time.monotonic()
            found, text, code = watched(name, folder)
            each = grade(program, found)
            grades[program.group, each] += 1
            print(f"{each:6} {name:22} code {code:3}, {time.monotonic() - began:4.1f} s", end="  ")
            print("; ".join(f"{f.kind} {f.ranks}" for f in found) or "nothing found", flush=True)
            if each != "right" or code != 1:
                print("       " + text.replace("\n", "\n       "), flush=True)
    show(grades, ["right", "half", "wrong"])


if __name__ == "__main__":
    main()
