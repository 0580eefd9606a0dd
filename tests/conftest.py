"""What the tests share: one outcome on all ranks, a terminal for rank 0 alone, and a few fixtures.

Tests under ``tests/mpi`` need ``mpiexec -n N python -m pytest --with-mpi tests/mpi``; the others need no
launcher. Every phase of a test ends in an agreement of the ranks: a failure on one is a failure on all, shown
by rank 0 with the rank it comes from, and none goes on to a collective that the failed one will never join.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import suite
import variants
from one_outcome import Agreement

HERE = Path(__file__).parent
# Ranks must draw the same examples, and a run must be repeatable.
hypothesis.settings.register_profile("mpishard", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("mpishard")

# Shorter than pytest's own limit: mpishard names what waits for what, a stack dump only where.
os.environ.setdefault("MPISHARD_TIMEOUT", "60")
# Else JAX takes three quarters of a GPU that several ranks share, and tests that run beside each other.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi"))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cuda-checks"):
        import cuda_on_host

        if not cuda_on_host.CAN_CHECK:
            raise pytest.UsageError("--cuda-checks wants g++ and addr2line")
        cuda_on_host.checked = True
    if with_mpi(config):
        from mpi4py import MPI

        if MPI.COMM_WORLD.size > 1:
            config.pluginmanager.register(Agreement(config, MPI.COMM_WORLD), "agreement")
        if MPI.COMM_WORLD.rank > 0:
            config.pluginmanager.unregister(name="terminalreporter")
            return
    suite.record(config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    spec = importlib.util.find_spec("mpishard")
    lines = [f"mpishard: {spec.origin if spec else 'not found'}"]
    if with_mpi(config):
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        lines.append(f"MPI: {library}, {MPI.COMM_WORLD.size} ranks")
    return lines


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "check CUDA functions on the host for races and accesses outside of arrays, see cuda_checks.cpp; wants g++"
    parser.addoption("--cuda-checks", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    variants.mark_beyond_pairs(items)
    for item in items:
        if HERE / "mpi" in item.path.parents:
            item.add_marker(pytest.mark.mpi)
        elif HERE / "e2e" in item.path.parents:
            item.add_marker(pytest.mark.mpi_skip)  # starts jobs of its own, which a rank must not


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let garbage collections skip what is there before the tests: PyTorch and JAX make most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["standin", pytest.param("cupy", marks=pytest.mark.hardware)])
def device(request: pytest.FixtureRequest) -> Any:
    """Each kind of device arrays, see ``devices.py``; ``mpi/conftest.py`` has more of them for tests on ranks."""
    from devices import make_device

    return make_device(request.param)


@pytest.fixture(scope="module", params=["standin", pytest.param("cupy", marks=pytest.mark.hardware)])
def chosen_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """For files of tests of CUDA functions: their ``devices.chosen`` makes arrays of each kind in turn."""
    import cuda_on_host
    import devices

    if request.param == "standin" and cuda_on_host.COMPILER is None:
        pytest.skip("no C++ compiler, which the stand-in needs for CUDA functions")
    devices.chosen.device = devices.make_device(request.param)
    yield
    devices.chosen.device = None


@pytest.fixture(scope="session", autouse=True)
def _quiet_compilation() -> None:
    """Which test compiles a kernel first depends on the others, and what it writes should not."""
    from mpishard.backend import jit_function

    jit_function.PATIENCE_S = 1e6


@pytest.fixture(scope="session")
def comm() -> Any:
    """``MPI.COMM_WORLD``."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def mesh(comm: Any) -> Iterator[Any]:
    """A data-parallel ``Mesh`` over all ranks, freed after the test. Collective."""
    import mpishard

    with mpishard.Mesh(comm) as mesh:
        yield mesh


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``environ(NAME="value", OTHER=None)``: the first variable is in the test's environment, the second is not."""

    def change(**variables: str | None) -> None:
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return change


@pytest.fixture
def without_debug(environ: Callable[..., None]) -> None:
    """For tests of what is sent, and when: with MPISHARD_DEBUG=1 ranks send more, and wait.  By `usefixtures`."""
    environ(MPISHARD_DEBUG=None)


@pytest.fixture
def folder(comm: Any) -> Iterator[Path]:
    """A folder that all ranks see, removed at the end.  Collective."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(comm.bcast(name))
        comm.Barrier()


@pytest.fixture
def same_on_all(comm: Any) -> Callable[[Any], bool]:
    """``same_on_all(value)``: whether all ranks hold the same value, arrays to the last bit. Collective."""

    def same(value: Any) -> bool:
        if isinstance(value, np.ndarray):
            value = (value.dtype.str, value.shape, hashlib.sha256(np.ascontiguousarray(value)).hexdigest())
        return all(other == value for other in comm.allgather(value))

    return same
