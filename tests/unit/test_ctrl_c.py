"""Ctrl-C: for what it waits, that it is not lost, and the exit code of a script that it has stopped in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpishard
from mpishard.comm.abort import _try_again
from mpishard.launch.signals import deferred


@pytest.fixture(autouse=True)
def python_takes_ctrl_c() -> Iterator[None]:
    """As in a program that was not started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_the_end_of_a_start() -> None:
    went_on = False
    with pytest.raises(KeyboardInterrupt), deferred():
        signal.raise_signal(signal.SIGINT)
        went_on = True
    assert went_on and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="another"), deferred():
        raise ValueError("another")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_takes_it_already_gets_it_at_once() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with deferred():
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]


def test_it_comes_again_where_python_has_ignored_it() -> None:
    ignored: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        _try_again(ignored)
        threading.Event().wait(60)


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("note_run(True)", 130),
        ("note_run(True); sys.exit()", 130),
        ("note_run(True); sys.exit(0)", 130),
        ("note_run(True); sys.exit(75)", 75),
        ("note_run(True); raise SystemExit(3)", 3),
        ("note_run(True); raise ArithmeticError", 1),
        ("note_run(True); note_run(False)", 0),
        ("note_run(False)", 0),
    ],
)
def test_the_exit_code_of_a_script_whose_run_was_stopped(lines: str, code: int, tmp_path: Path) -> None:
    """And all is closed in order first."""
    program = (
        f"import sys; from mpishard.launch.script import note_run; file = open('out', 'w'); file.write('x'); {lines}"
    )
    environment = {"PYTHONPATH": str(Path(mpishard.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    assert finished.returncode == code, finished.stderr
    assert (tmp_path / "out").read_text() == "x"
