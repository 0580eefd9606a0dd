"""Ranks that were not started by ``mpishard.watch``, looked at from outside by py-spy, if that is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpishard.io.files import parsed
from mpishard.launch.detection import Launch, launches
from mpishard.launch.processes import descendants
from mpishard.watch.folder import Asked, frame, stands
from mpishard.watch.sampler import is_runner

_PROGRAM = "py-spy"
_LIMIT_S = 30.0


def look(process: int, between: float) -> Asked:
    """Where the ranks below a process of this host stand, such as a launcher, or that process itself.

    Each is looked at twice, `between` seconds apart: what has not moved meanwhile waits.  Raises ValueError if no rank
    is found, and OSError if the system, or a missing py-spy, does not let this process look.
    """
    found = _ranks_below(process)
    if not found:
        raise ValueError(f"--pid {process}: no rank of an MPI job is below this process, on this host")
    first = {rank: _stack(number) for rank, (number, _) in found.items()}
    began = time.monotonic()
    time.sleep(between)
    answers = []
    for rank, (number, launch) in sorted(found.items()):
        stack, seconds = _stack(number), round(time.monotonic() - began, 1)
        facts = {"rank": rank, "ranks": launch.ranks, "host": os.uname().nodename, "process": number}
        moved = stack != first[rank]
        answers.append(facts | stands(stack) | {"time": time.time(), "seconds": 0.0 if moved else seconds})
    ranks = max(launch.ranks for _, launch in found.values())
    absent = {rank: f"not below process {process} on this host" for rank in range(ranks) if rank not in found}
    return Asked(answers, absent, ranks)


def _ranks_below(process: int) -> dict[int, tuple[int, Launch]]:
    """By rank the process and its launch; not the processes that ranks have started, which have their variables."""
    found: dict[int, tuple[int, Launch]] = {}
    for number in sorted({process, *descendants(process)}):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace").split("\0")
            environment = dict(word.partition("=")[::2] for word in words)
            program = os.path.basename(os.readlink(f"/proc/{number}/exe"))
            launch = next(iter(launches(environment)), None)
            if launch is not None and program.startswith("python"):
                found.setdefault(launch.rank, (number, launch))
    return found


def _stack(process: int) -> list[dict[str, Any]]:
    """The frames of the main thread of a process, from the innermost outwards."""
    beside = Path(sys.executable).with_name(_PROGRAM)
    program = str(beside) if beside.exists() else shutil.which(_PROGRAM)
    if program is None:
        raise OSError("--pid needs py-spy, which looks at running processes: pip install py-spy")
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(process)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"py-spy does not answer within {_LIMIT_S:g} s for process {process}") from None
    if done.returncode:
        raise OSError(f"py-spy cannot look at process {process}: {' '.join(done.stderr.split())}")
    threads: Sequence[Mapping[str, Any]] = parsed(done.stdout)
    frames: list[dict[str, Any]] = next(
        (thread["frames"] for thread in threads if thread["os_thread_id"] == process), []
    )
    stack = [frame(each["filename"], each["line"], each["name"]) for each in frames]
    return [each for each in stack if not is_runner(each["file"])]
