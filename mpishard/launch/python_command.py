"""The command line of a Python script: its parts, and the runner that is put before the script."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

RUNNER = str(Path(__file__).resolve().with_name("worker.py"))
_RUNNER_MODULE = ["-m", "mpishard.launch.worker"]
_PYTHON = re.compile(r"python(3(\.\d+)?t?)?")
_FLAGS = "[bBdEhiIOPqRsSuvVx]*"
_TAKES_VALUE = re.compile(f"-{_FLAGS}[XW]|--check-hash-based-pycs")
# Options with which a script runs under the runner as without; not -i, -x, and those that run no script.
_KEPT = re.compile("-[bBdEIOPqRsSuv]*([XW].*)?|--check-hash-based-pycs")


def parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments of the interpreter into its options and the script's part: ``-c ...``, ``-m ...`` or a path.

    Together the two are the arguments again, with flags before ``-c`` or ``-m`` as a separate word.
    """
    arguments = list(arguments)
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        runs = re.match(f"-({_FLAGS})([cm])(.*)", arguments[at], re.DOTALL)
        if runs:
            flags, kind, value = runs.groups()
            script = [f"-{kind}", *([value] if value else []), *arguments[at + 1 :]]
            return arguments[:at] + ([f"-{flags}"] if flags else []), script
        at += 2 if _TAKES_VALUE.fullmatch(arguments[at]) else 1
    return arguments[:at], arguments[at:]


def with_runner(command: Sequence[str], *, elsewhere: bool = False) -> list[str]:
    """The command with `mpishard.launch.worker` before its script, if it runs a file or a module by Python.

    Any other command is left alone, and one with an option that the runner could not keep.  `elsewhere`: other hosts
    run it too.  These have the runner's file if they have this Python; a command with another Python is left alone.
    """
    python, *arguments = command
    options, script = parted(arguments)
    is_python = _PYTHON.fullmatch(os.path.basename(python)) and (python == sys.executable or not elsewhere)
    if not (is_python and _can_keep(options) and _can_run(script)):
        return list(command)
    return [python, *options, RUNNER, *script]


def without_runner(script: Sequence[str]) -> list[str]:
    """The script part of a command, as `parted` returns it, without the runner."""
    if list(script[:2]) == _RUNNER_MODULE:
        return list(script[2:])
    return list(script[1:] if script and os.path.realpath(script[0]) == RUNNER else script)


def _can_keep(options: Sequence[str]) -> bool:
    words = iter(options)
    for word in words:
        if not _KEPT.fullmatch(word):
            return False
        if _TAKES_VALUE.fullmatch(word):
            next(words, None)
    return True


def _can_run(script: Sequence[str]) -> bool:
    """Return True if the runner can run the script part of a command: a module, or a file of Python source."""
    if not script or without_runner(script) != list(script):
        return False
    if script[0].startswith("-"):
        return script[0] == "-m" and len(script) > 1
    path = script[0]
    return os.path.isfile(path) and not path.endswith(".pyc") and not zipfile.is_zipfile(path)
