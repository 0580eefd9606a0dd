"""How often `mpishard why` is right: ``python tests/helpers/why_score.py [NAME...]`` runs the programs of `hanging`.

Each runs on four ranks of this Python's MPI under ``python -m mpishard.watch --timeout 4``.  Right: the first cause
that is named is of the expected kind, with the ranks to blame.  Half: its kind or its ranks, or a later cause.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hanging import PROGRAMS, Wrong
from launching import environment, mpirun

from mpishard.watch.diagnosis import Finding, diagnose
from mpishard.watch.folder import jobs, read_folder

RANKS, LIMIT_S = 4, 90


def watched(name: str, folder: str | Path, timeout: float = 4.0) -> tuple[list[Finding], str, int]:
    """What is found, what was printed, and the exit code; -1 if the job did not end by itself."""
    program = Path(__file__).with_name("hanging.py")
    options = ["--folder", str(folder), "--timeout", str(timeout)]
    command = [mpirun()[0], "-n", str(RANKS), sys.executable, "-m", "mpishard.watch", *options, str(program), name]
    given = environment()
    # With these a job goes on after the death of a rank, and ranks end without the others.
    del given["PRTE_MCA_state_base_recoverable"], given["OMPI_MCA_async_mpi_finalize"]
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=given, start_new_session=True
        )
        try:
            code = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        log.seek(0)
        text = log.read()
    asked = read_folder(jobs(Path(folder))[0])
    for answer in asked.answers:  # of a stopped rank, which no launcher can end
        try:
            os.kill(answer["process"], signal.SIGKILL)
        except OSError:
            pass
    return diagnose(asked.answers, asked.absent, asked.ranks), text, code


def grade(program: Wrong, found: Sequence[Finding]) -> str:
    def is_right(finding: Finding) -> bool:
        return finding.kind in program.kinds and (program.ranks is None or set(finding.ranks) <= set(program.ranks))

    if found and is_right(found[0]):
        return "right"
    near = [f for f in found if f.kind in program.kinds or set(f.ranks) == set(program.ranks or ())]
    return "half" if near else "wrong"


def main() -> None:
    grades: Counter[tuple[str, str]] = Counter()
    for name in sys.argv[1:] or PROGRAMS:
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
    print(f"\n{'':24} right half wrong")
    for group in dict.fromkeys(PROGRAMS[name].group for name in PROGRAMS):
        print(f"{group:24} {grades[group, 'right']:5} {grades[group, 'half']:4} {grades[group, 'wrong']:5}")
    total = [sum(count for (_, each), count in grades.items() if each == which) for which in ("right", "half", "wrong")]
    print(f"{'all':24} {total[0]:5} {total[1]:4} {total[2]:5}")


if __name__ == "__main__":
    main()
