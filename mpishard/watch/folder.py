"""The folder of a job: who asks its ranks where they are, and what their files say.

Each watched job has a folder of its own in the one that the user names, with ``watch.json``, which rank 0 writes at the
start.  Each rank has two files in ``processes/``: ``HOST-PID.where.json``, its last answer, and ``HOST-PID.stack``,
which is empty unless it is in a call that keeps Python's lock.  The record of a run of mpishard has such answers, too.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpishard.io.files import read, read_note, time_of, write_note
from mpishard.launch.processes import state_here
from mpishard.launch.script import NOT_USERS
from mpishard.watch.calls import call_on_line
from mpishard.watch.sampler import (
    END,
    ENDED,
    FAILED,
    PROCESSES,
    REQUEST,
    RUNS,
    STACK,
    WAITS,
    WHERE,
    is_runner,
)

FOLDER = Path("mpishard-watch")
START = "watch.json"
_POLL_S = 0.1
# Ranks of one job start within so many seconds; older files are of another job, where a launcher gives jobs no names.
_SKEW_S = 30.0
# faulthandler writes it first, with the time after which it wrote.
_AFTER = re.compile(r"Timeout \((\d+):(\d+):([\d.]+)\)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

# The fields of an answer, with their types.
_ANSWER: dict[str, Any] = {
    **dict.fromkeys(("time", "began", "seconds"), int | float),
    **dict.fromkeys(("rank", "ranks", "process"), int),
    **dict.fromkeys(("host", "state", "file"), str),
    "call": dict | None,
    "stack": list,
}
_CALL = dict.fromkeys(("op", "on", "class"), str)
_FRAME_FIELDS = {"file": str, "line": int, "name": str, "text": str, "own": bool}


@dataclass(frozen=True)
class Asked:
    """The answers of ranks, and ranks without an answer with the state of their process."""

    answers: list[dict[str, Any]]
    absent: dict[int, str]
    ranks: int  # of the job
    since: float = 0.0  # when they were asked
    is_over: bool = False  # no rank answers now, or the job is being ended: these are older answers


def begin(folder: Path, ranks: int, command: Sequence[str]) -> None:
    """Note the start of a job, in rank 0."""
    for left in (REQUEST, END):
        (folder / left).unlink(missing_ok=True)
    write_note(folder / START, {"time": round(time.time(), 3), "ranks": ranks, "command": list(command)})


def jobs(folder: Path) -> list[Path]:
    """The folders of the jobs in a folder, the newest first; or that folder, if it is the one of a job itself.

    Raises ValueError if there is none.
    """
    starts = [folder / START] if (folder / START).exists() else list(folder.glob(f"*/{START}"))
    if not starts:
        raise ValueError(f"{folder} has no {START}, nor has a folder in it; give what the job named when it began")
    return [start.parent for start in sorted(starts, key=time_of, reverse=True)]


def read_folder(folder: Path) -> Asked:
    """The last answers of the ranks of a job.

    Ranks of a job that has ended count as absent if they had not answered when all were asked for the last time.
    """
    asked = _collect(folder, _last_request(folder))
    return asked if any(answer["state"] in (RUNS, WAITS) for answer in asked.answers) else _collect(folder, 0.0)


def ask(folder: Path, limit: float) -> Asked:
    """Ask the ranks of a job where they are, and wait up to `limit` seconds; with 0, read their last answers.

    Raises OSError if the folder cannot be written.
    """
    return ask_all(folder, limit, read_folder(folder), lambda since: _collect(folder, since))


def ask_all(folder: Path, limit: float, before: Asked, collect: Callable[[float], Asked]) -> Asked:
    """Ask all through a folder, and wait up to `limit` seconds for what `collect(since)` then reads.

    `before` is what they said last; it is returned if none answers, as that of a job that is over.
    """
    if limit == 0 or before.is_over:
        return before
    write_note(folder / REQUEST, None)
    since, deadline = time_of(folder / REQUEST), time.monotonic() + limit
    now = before
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = collect(since)
        if len(now.answers) == now.ranks:
            break
    return now if now.answers else replace(before, is_over=True)


def end_job(folder: Path, asked: Asked) -> None:
    """Ask all ranks to end the job, after these answers."""
    write_note(folder / END, {"asked": asked.since})


def _last_request(folder: Path) -> float:
    """When all were asked for the last time, or for the report that ended the job; 0 if they never were."""
    note = read_note(folder / END)
    return float(note["asked"]) if _has(note, {"asked": int | float}) else time_of(folder / REQUEST)


def _collect(folder: Path, since: float) -> Asked:
    """The answers written after a time; those of ranks that have ended whenever that was."""
    start = read_note(folder / START)
    if not _has(start, {"time": int | float, "ranks": int}):
        raise ValueError(f"{folder / START} is missing or damaged; give the folder that the job named when it began")
    ended = time_of(folder / END) or math.inf
    latest: dict[int, tuple[dict[str, Any], float]] = {}
    for answer, written in read_answers((folder / PROCESSES).glob(f"*{WHERE}")):
        if answer["began"] < start["time"] - _SKEW_S:
            continue
        if answer["state"] in (RUNS, WAITS):
            with contextlib.suppress(FileNotFoundError):
                if (frozen := _frozen(answer, folder / PROCESSES, since, ended)) is not None:
                    answer, written = frozen, max(written, since)
        known = latest.get(answer["rank"])
        if known is None or known[0]["began"] < answer["began"]:
            latest[answer["rank"]] = answer, written
    asked = sort_out(latest, since, (folder / END).exists())
    ranks = max([start["ranks"], *(answer["ranks"] for answer, _ in latest.values())])
    unseen = dict.fromkeys(range(ranks), "has no file here: it has not come to the start of the program")
    absent = asked.absent | {rank: text for rank, text in unseen.items() if rank not in latest}
    return replace(asked, absent=absent, ranks=ranks)


def read_answers(paths: Iterable[Path]) -> list[tuple[dict[str, Any], float]]:
    """The answers in some files, and when each was written; a damaged one is none."""
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError, ValueError):
            if _is_answer(answer := read_note(path)):
                found.append((answer, time_of(path)))
    return found


def sort_out(latest: Mapping[int, tuple[dict[str, Any], float]], since: float, is_over: bool = False) -> Asked:
    """Sort the ranks: those with an answer written `since` a question, and those without, with the reason.

    `latest` has by rank its last answer, and when that was written.  That of a rank that has ended counts always.
    """
    gone = {rank: _gone(answer) for rank, (answer, _) in latest.items()}
    is_over = is_over or (bool(gone) and all(gone.values()))
    answers, absent = [], {}
    for rank, (answer, written) in sorted(latest.items()):
        if answer["state"] in (ENDED, FAILED) or (written >= since and (is_over or not gone[rank])):
            answers.append(answer)
        else:
            blocked = f"process {answer['process']} on {answer['host']} did not answer: it is stopped, blocked or lost"
            absent[rank] = blocked if is_over or not gone[rank] else gone[rank]
    return Asked(answers, absent, len(latest), since, is_over)


def _gone(answer: Mapping[str, Any]) -> str:
    """The state of the process of an answer, if it is dead or stopped; "" if it runs, or on another host."""
    state = state_here(f"{answer['host']}-{answer['process']}")
    return f"process {answer['process']} on {answer['host']} {state}" if state else ""


def _frozen(answer: Mapping[str, Any], folder: Path, since: float, ended: float) -> dict[str, Any] | None:
    """The answer of a rank that has only written its stack; None if it has written none before the job `ended`.

    Its time is now; of a rank that is gone it is `since`, when all were asked, or when it wrote, if that was later.  A
    stopped rank, which a launcher continues to end it, writes its stack then.
    """
    path = folder / f"{answer['host']}-{answer['process']}{STACK}"
    text, written = read(path, links=False).decode(errors="replace"), time_of(path)
    if not text or written > ended:
        return None
    at = max(since, written) if _gone(answer) else time.time()
    match = _AFTER.match(text)
    after = sum(float(part) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0.0
    stack = frames_of(text, answer.get("thread"))
    return {**answer, **stands(stack), "time": at, "seconds": round(at - written + after, 1), "is_frozen": True}


def frames_of(text: str, thread: int | None) -> list[dict[str, Any]]:
    """The frames of a thread in a text of faulthandler, from the innermost outwards; default: of the last thread."""
    found: list[dict[str, Any]] = []
    for part in re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE):
        head = re.match(r"(?:Current t|T)hread (0x[0-9a-f]+)", part)
        if head and (thread is None or int(head[1], 16) == thread):
            found = [frame(file, int(line), name) for file, line, name in _FRAME.findall(part)]
    return [each for each in found if not is_runner(each["file"])]


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    """A frame as in an answer, from its place alone."""
    text = linecache.getline(file, line).strip()
    return {"file": file, "line": line, "name": name, "text": text, "own": not file.startswith(NOT_USERS)}


def stands(stack: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of an answer that follow from a stack whose innermost frame has not moved."""
    call = call_on_line(stack[0]["file"], stack[0]["line"]) if stack else None
    importing = itertools.takewhile(lambda each: each["file"].startswith("<frozen importlib"), stack)
    outer = stack[len(list(importing)) :]
    if outer and len(outer) < len(stack) and "mpi4py" in outer[0]["text"]:
        call, stack = {"op": "Init", "on": "MPI", "class": ""}, outer
    return {"state": WAITS if call else RUNS, "call": call, "stack": stack, "file": ""}


def _is_answer(found: Any) -> bool:
    if not _has(found, _ANSWER) or not all(_has(each, _FRAME_FIELDS) for each in found["stack"]):
        return False
    if not isinstance(found.get("recent", []), list):  # of a run of mpishard
        return False
    call = found["call"]
    if call is None:
        return True
    members, pairs = call.get("members") or [], call.get("unreceived", [])
    if not (_has(call, _CALL) and isinstance(members, list) and all(isinstance(rank, int) for rank in members)):
        return False
    return isinstance(pairs, list) and all(isinstance(p, list) and [*map(type, p)] == [int, int] for p in pairs)


def _has(found: Any, fields: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and all(
        name in found and isinstance(found[name], kind) for name, kind in fields.items()
    )
