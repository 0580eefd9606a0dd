"""Part of gpu.py: child processes with time limits, with or without an MPI launcher, that end with the benchmark."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import children
from gpu_machine import Setting

HERE = Path(__file__).resolve().parent
NO_MPIRUN = "no mpirun beside this Python nor on PATH: install an MPI, or name its prefix with --mpi"
# Seconds for one process; torch.compile and kernels compiled at first use are the slowest.
LIMIT = {"facts": 180, "tests": 600, "training": 420, "trace": 300, "memory": 240, "bandwidth": 240, "sanitizer": 80}
# With these Intel's MPI, on one machine and without libfabric, takes addresses of device memory; without a driver it
# starts no rank with them.
INTEL = {"MPI4PY_MPIABI": "mpich", "I_MPI_FABRICS": "shm"}
INTEL_ON_CUDA = {"I_MPI_OFFLOAD": "1", "I_MPI_OFFLOAD_MODE": "cuda", "I_MPI_OFFLOAD_CUDA_LIBRARY": "libcuda.so.1"}
# A child takes as long to import its packages.
LEAST = 10


class Failed(RuntimeError):
    """A child crashed, hung, or printed no result."""


class OutOfTime(Failed):
    """A child that was not started, as the time of the whole benchmark is over."""


class Launcher:
    """Starts children, with the MPI of a prefix if one is given.

    Parameters
    ----------
    prefix : Path or None
        A folder with ``bin/mpirun`` and ``lib``.
    limit : float
        The most seconds for a child, whatever it asks for.
    within : float, optional
        Seconds from now on until all children have ended.
    least : float
        Seconds below which nothing is started.
    """

    def __init__(self, prefix: Path | None, limit: float, within: float = math.inf, least: float = LEAST) -> None:
        self.limit, self.least = limit, least
        self._end = time.monotonic() + within
        self._running: set[subprocess.Popen[Any]] = set()
        self._ended = False
        self._lock = threading.Lock()
        self.environment = children.environment()
        if not os.access(Path.home(), os.W_OK):  # where CuPy keeps what it has compiled, else at every start anew
            self.environment.setdefault("CUPY_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"cupy-{os.getuid()}"))
        near = [str(Path(sys.executable).parent), self.environment.get("PATH", "")]
        for each in [prefix] if prefix else prefixes():
            mpirun = each / "bin" / "mpirun"
            if mpirun.exists() and not os.access(mpirun, os.X_OK):  # some tools that unpack lose the mode of all files
                for file in (each / "bin").iterdir():
                    file.chmod(0o755)
            near.insert(0, str(each / "bin"))
            libraries = [str(each / "lib"), self.environment.get("LD_LIBRARY_PATH", "")]
            self.environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
            if (each / "opt" / "mpi" / "etc").is_dir():
                self.environment = INTEL | (INTEL_ON_CUDA if has_driver() else {}) | self.environment
        self.environment["PATH"] = path = os.pathsep.join(near)  # where Intel's mpirun looks for what it starts
        self.mpirun = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)

    @property
    def left(self) -> float:
        """Seconds until all children must have ended."""
        return self._end - time.monotonic()

    def run(self, arguments: list[str], ranks: int, limit: float, under: Sequence[str] = ()) -> tuple[int | None, str]:
        """Run Python with these arguments: its exit code, None if it was ended at its limit, and what it printed.

        With 0 ranks there is no launcher.  `under` is a command that starts it.
        """
        command = [*under, sys.executable, *arguments]
        if self.left < self.least:
            raise OutOfTime("no time was left")
        if ranks:
            if self.mpirun is None:
                raise Failed(NO_MPIRUN)
            command = [self.mpirun, "-n", str(ranks), *command]
        # Output goes to a file: a full pipe would stop a rank that nobody reads.
        with tempfile.TemporaryFile("w+") as log:
            with self._lock:
                if self._ended:
                    raise Failed("the benchmark was ended")
                process = subprocess.Popen(
                    command,
                    cwd=HERE.parent,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                code: int | None = process.wait(min(limit, self.limit, self.left))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
                self._running.discard(process)
            log.seek(0)
            return code, log.read()

    def end(self) -> None:
        """Kill what runs in any thread, and start nothing more."""
        with self._lock:
            self._ended = True
            for process in list(self._running):
                end_group(process)

    def of_child(self, name: str, setting: Setting, kind: str) -> list[str]:
        """The arguments of a child of `CHILDREN`."""
        return [str(HERE / "gpu.py"), "--child", name, "--kind", kind, "--setting", setting.to_json()]

    def child(self, name: str, setting: Setting, kind: str = "", ranks: int = 0) -> dict[str, Any]:
        """The result of a child of `CHILDREN`."""
        limit = min(LIMIT.get(name, 240), self.limit, self.left)
        code, text = self.run(self.of_child(name, setting, kind), ranks, limit)
        lines = [line for line in text.splitlines() if line.startswith('{"')]
        if code == 0 and lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        how = f"no end within {limit:.3g} s" if code is None else f"ended with code {code}"
        raise Failed(f"{name} {kind} {f'on {ranks} ranks ' if ranks else ''}{how}:\n{text[-4000:]}")


def end_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def has_driver() -> bool:
    """Whether NVIDIA's driver is here."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def prefixes() -> list[Path]:
    """The first folder with an mpirun among those above the entries of PYTHONPATH; empty if none has one."""
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        for prefix in (Path(entry), *Path(entry).parents[:3]) if entry else ():
            if prefix.is_absolute() and (prefix / "bin" / "mpirun").exists() and (prefix / "lib").is_dir():
                return [prefix]
    return []
