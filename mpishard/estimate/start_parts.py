"""What the start of one rank takes, measured in processes of its own: processor time, and what it asks of files."""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import integer, number
from mpishard.launch.detection import launches

_REPEATS = 3
_TIME_LIMIT_S = 120.0
# A step of a small model, without MPI.  What is not in Numba's cache is compiled, and cached for the next process.
_START = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
import numpy as np
import mpishard
mpishard.Mesh, mpishard.ZeRO1Optimizer
model, tokens = mpishard.nn.GPT(64, 16, 32, 2, 2), np.zeros((2, 16), int)
model.loss_and_gradient(tokens, tokens)
rule, parameters = mpishard.AdamW(), np.ones(4, np.float32)
rule.update(parameters, parameters.copy(), [np.zeros(4, np.float32) for _ in rule.slots], 1)
"""
_TIMED = """
import resource
exec({start!r})
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime)
"""
# Files that Python opens, libraries that the process has mapped, and Python's questions after files and folders.
_COUNTED = """
import os, posix, sys
opened, questions, asked = [], [], (posix.stat, posix.lstat, posix.listdir, posix.scandir)
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(arguments[0]))
sys.setprofile(lambda frame, event, function: event == "c_call" and function in asked and questions.append(function))
exec({start!r})
sys.setprofile(None)
mapped = {{line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}}
opens = [path for path in opened if isinstance(path, (str, bytes)) and not os.fsdecode(path).startswith("/proc/")]
files = {{path for path in (*map(os.fsdecode, opens), *mapped) if os.path.isfile(path)}}
print([len(opens) + len(mapped), len(questions), sum(os.path.getsize(path) for path in files)])
"""


@dataclass(frozen=True)
class StartParts:
    """What one rank takes from its first instruction to the end of its first step.

    Not collective.

    Parameters
    ----------
    processor_seconds : float
        Processor time, without that of MPI's own start.
    opens : int
        Files that it opens, libraries included.
    lookups : int
        Questions after files and folders, such as where a module is.
    bytes_read : int
        Sizes of these files together.
    object_seconds : float
        Processor time to read the small object that one rank has sent to all.

    Raises
    ------
    TypeError
        If a figure is no number, or a count no whole number.
    ValueError
        If one is negative or not finite.
    """

    processor_seconds: float
    opens: int
    lookups: int
    bytes_read: int
    object_seconds: float

    def __post_init__(self) -> None:
        for name in ("processor_seconds", "object_seconds"):
            number(name, getattr(self, name), least=0)
        for name in ("opens", "lookups", "bytes_read"):
            integer(name, getattr(self, name), least=0)


def measure_start() -> StartParts:
    """Measure the start of a rank on this machine, in a few seconds; the first time kernels are compiled.

    Not collective, and needs no MPI: the processes that it starts load the MPI library, but do not start it.

    Returns
    -------
    StartParts
        Processor time is the median of three processes.

    Raises
    ------
    ValueError
        In a process that a launcher has started, since processes of a rank are no ranks; if one of them fails, or takes
        more than two minutes.
    """
    if found := launches(os.environ):
        raise ValueError(f"the start of a rank is measured by one process alone: call it without {found[0].launcher}")
    seconds = statistics.median(_run(_TIMED) for _ in range(_REPEATS))
    opens, lookups, bytes_read = _run(_COUNTED)
    return StartParts(seconds, opens, lookups, bytes_read, _object_seconds())


def _run(script: str) -> Any:
    """What a script with a start in it prints, in a process of its own."""
    command = [sys.executable, "-c", script.format(start=_START)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the start of a process took more than {_TIME_LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the start of a process cannot be measured, since it failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _object_seconds() -> float:
    received, count = pickle.dumps((1, "a node", 2**64)), 10_000
    began = time.process_time()
    for _ in range(count):
        pickle.loads(received)
    return (time.process_time() - began) / count
