"""How programs among the tests start jobs: this Python's MPI, what it needs in the environment, a bound on the time."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

GRACE = 10.0  # seconds that the launcher gets to end after the work is done
ULFM = ("--with-ft", "ulfm", "--mca", "coll", "^han")


def mpirun() -> tuple[str, str]:
    """The launcher of the MPI of this Python, and what it says of its version: nothing if there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return "mpirun", ""
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return found, version


def is_open_mpi(version: str) -> bool:
    return "Open MPI" in version


def environment() -> dict[str, str]:
    """For processes that have the modules beside this one, and the same mpishard as this Python."""
    package = importlib.util.find_spec("mpishard")
    assert package is not None and package.origin is not None
    folders = [str(Path(package.origin).parents[1]), str(Path(__file__).resolve().parent)]
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        # As `mpishard run --elastic` has it.
        "PRTE_MCA_state_base_recoverable": "1",
        "OMPI_MCA_async_mpi_finalize": "1",
        "OMPI_MCA_btl": "^ofi",  # it sleeps a second in MPI_Init
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",  # processes that start again and again
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for what a run writes: in memory, where a sync costs nothing."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, ignore_cleanup_errors=True)


def alive(folder: str) -> list[int]:
    """Processes that have not ended, of those that have left a note of themselves in the folder of their run."""
    found = []
    for file in Path(folder).glob("process-*"):
        number = int(file.name.removeprefix("process-"))
        with contextlib.suppress(OSError):
            if folder.encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                found.append(number)
    return sorted(found)


def execute(command: Sequence[str], limit: float, done: Callable[[], bool] = lambda: False) -> tuple[str, str]:
    """What it printed, and how it ended: "in order", "done" (the work is, the launcher does not end), or "hangs".

    Nothing of it is left afterwards.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
        end, how = time.monotonic() + limit, "hangs"
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
            if how == "hangs" and done():
                end, how = min(end, time.monotonic() + GRACE), "done"
        if process.poll() is not None:
            how = "in order"
        else:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return log.read(), how
