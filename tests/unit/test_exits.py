"""A rank that exits where others go on without it dies by a signal; elsewhere it exits as ever."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no signal for it"),
]
OS_EXIT, C_EXIT = "os._exit(3)", "ctypes.CDLL(None).exit(3)"
IN_FORK = "if os.fork() == 0: {}\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"


def run(*lines):
    script = "\n".join(["import ctypes, os, sys", "from mpishard.comm.abort import die_at_exit", *lines])
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("how", "code"),
    [(OS_EXIT, -signal.SIGKILL), (C_EXIT, -(signal.SIGRTMIN + 6)), ("sys.exit(3)", -(signal.SIGRTMIN + 6))],
)
def test_an_exit_is_a_death_by_a_signal_while_that_is_wanted(how, code):
    assert run("die_at_exit(True)", how).returncode == code
    assert run("die_at_exit(True)", "die_at_exit(False)", how).returncode == 3
    assert run("die_at_exit(True)", "die_at_exit(False)", "die_at_exit(True)", how).returncode == code


@pytest.mark.parametrize("how", [OS_EXIT, C_EXIT])
def test_it_is_none_in_a_fork(how):
    assert run("die_at_exit(True)", IN_FORK.format(how), "die_at_exit(False)").stdout == "3\n"


def test_nothing_is_changed_where_it_was_never_wanted():
    assert run("before = os._exit", "die_at_exit(False)", "assert os._exit is before", C_EXIT).returncode == 3
