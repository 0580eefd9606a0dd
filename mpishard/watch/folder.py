"""The folder of a watched job: who asks its ranks where they are, and what their files say.

Rank 0 writes ``watch.json`` at the start.  Each rank has two files in ``processes/``: ``HOST-PID.where.json``, its last
answer, and ``HOST-PID.stack``, which is empty unless it is in a call that keeps Python's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.io.files import read, read_note, write_note
from mpishard.launch.processes import state_here
from mpishard.launch.script import NOT_USERS
from mpishard.watch.calls import call_on_line
from mpishard.watch.sampler import (
    ENDED,
    FAILED,
    FROZEN_S,
    PROCESSES,
    REQUEST,
    RUNS,
    STACK,
    WAITS,
    WHERE,
    is_runner,
)

FOLDER = Path("mpishard-watch")
START, REPORT = "watch.json", "report.txt"
_POLL_S = 0.1
# Ranks of one job start within so many seconds; older files are of another job.
_SKEW_S = 30.0
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

# The fields of an answer, with their types.
_ANSWER = dict.fromkeys(("time", "began", "seconds"), int | float) | dict.fromkeys(("rank", "ranks", "process"), int)
_ANSWER |= dict.fromkeys(("host", "state", "file"), str) | {"call": dict | None, "stack": list}
_CALL = dict.fromkeys(("op", "on", "class"), str)
_FRAME_FIELDS = {"file": str, "line": int, "name": str, "text": str, "own": bool}


@dataclass(frozen=True)
class Asked:
    """The answers of ranks, and ranks without an answer with the state of their process."""

    answers: list[dict[str, Any]]
    absent: dict[int, str]
    ranks: int  # of the job


def read_folder(folder: Path) -> Asked:
    """The last answers of the ranks of the last job in this folder."""
    return _collect(folder, since=0.0)


def ask(folder: Path, limit: float) -> Asked:
    """Ask all ranks where they are, and wait up to `limit` seconds; with 0, read their last answers.

    Raises OSError if the folder cannot be written.
    """
    asked = read_folder(folder)
    if limit == 0 or not any(answer["state"] in (RUNS, WAITS) and not _gone(answer) for answer in asked.answers):
        return asked
    write_note(folder / REQUEST, None)
    since = (folder / REQUEST).stat().st_mtime
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        asked = _collect(folder, since)
        if len(asked.answers) == asked.ranks:
            break
    return asked


def _collect(folder: Path, since: float) -> Asked:
    """The answers written after a time; those of ranks that have ended whenever that was."""
    start = read_note(folder / START)
    if not _has(start, {"time": int | float, "ranks": int}):
        raise ValueError(f"{folder / START} is missing or damaged: python -m mpishard.watch writes it")
    latest: dict[int, tuple[dict[str, Any], bool]] = {}
    for path in sorted((folder / PROCESSES).glob(f"*{WHERE}")):
        with contextlib.suppress(OSError, ValueError):  # a damaged answer is none
            answer, written = read_note(path), path.stat().st_mtime
            if not _is_answer(answer) or answer["began"] < start["time"] - _SKEW_S:
                continue
            stack = path.with_name(path.name.removesuffix(WHERE) + STACK)
            frozen = _frozen(answer, stack) if answer["state"] in (RUNS, WAITS) else None
            answer, is_new = (answer, written >= since) if frozen is None else (frozen, True)
            known = latest.get(answer["rank"])
            if known is None or known[0]["began"] < answer["began"]:
                latest[answer["rank"]] = answer, is_new or answer["state"] in (ENDED, FAILED)
    ranks = max([start["ranks"], *(answer["ranks"] for answer, _ in latest.values())])
    answers, absent = [], {}
    for rank in range(ranks):
        answer, is_new = latest.get(rank, ({}, False))
        state = _gone(answer) if answer else "has no file here: it has not come to the start of the program"
        if answer and answer["state"] == ENDED:
            answers.append(answer | {"gone": bool(state)})
        elif answer and answer["state"] == FAILED or (is_new and (not state or since == 0)):
            answers.append(answer)
        else:
            absent[rank] = state or f"process {answer['process']} on {answer['host']} does not answer: it is blocked"
    return Asked(answers, absent, ranks)


def _gone(answer: Mapping[str, Any]) -> str:
    """The state of the process of an answer, if it is dead or stopped; "" if it runs, or on another host."""
    state = state_here(f"{answer['host']}-{answer['process']}")
    return f"process {answer['process']} on {answer['host']} {state}" if state else ""


def _frozen(answer: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The answer of a rank that has only written its stack; None if that is empty."""
    text = read(path).decode(errors="replace")
    if not text:
        return None
    written = path.stat().st_mtime
    seconds = time.time() - written + FROZEN_S
    return {
        **answer,
        **stands(frames_of(text, answer.get("thread"))),
        "time": time.time(),
        "seconds": round(seconds, 1),
    }


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
    call = found["call"]
    if call is None:
        return True
    members = call.get("members") or []
    return _has(call, _CALL) and isinstance(members, list) and all(isinstance(rank, int) for rank in members)


def _has(found: Any, fields: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in fields.items())
