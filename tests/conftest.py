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
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import left_out
import numpy as np
import pytest
import suite

HERE = Path(__file__).parent
AFTER_FAILURE = 20.0  # seconds that the other ranks get to reach the agreement once one has failed
QUIET = 2.0  # seconds after which a failed rank that is still alone says so itself
# With --sample all of tests/mpi runs at the number of ranks that finds most: a third with --short, the others without.
WHOLE = 3
# Which third of the tests a run with --third has: 0, 1 or 2; else it has all.  Those of three days in turn have all.
THIRD = os.environ.get("MPISHARD_TEST_THIRD", "all")
SHARE = 3  # a sample has one of this many variants of a test, of 8 ranks, where each takes longest, half as many,
# and in half of the places, which take about as long as the other half.
HALVES = [
    {("MPICH", 8), ("Open MPI", 4), ("MPICH", 1), ("Open MPI", 2)},
    {("Open MPI", 8), ("MPICH", 4), ("Open MPI", 1), ("MPICH", 2)},
]

# Ranks must draw the same examples, and a run must be repeatable.
hypothesis.settings.register_profile("mpishard", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("mpishard")

# Shorter than pytest's own limit: mpishard names what waits for what, a stack dump only where.
os.environ.setdefault("MPISHARD_TIMEOUT", "60")
# Else JAX takes three quarters of a GPU that several ranks share, and tests that run beside each other.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class Agreement:
    """A pytest plugin for runs on several ranks: each phase of a test has one outcome, the worst of all."""

    def __init__(self, config: pytest.Config, world: Any) -> None:
        from mpishard.comm import abort
        from mpishard.comm.abort import DeathMonitor

        self.world = world.Dup()  # a communicator of its own: a test's leftovers cannot match its messages
        self.rank, self.size = world.rank, world.size
        # Messages of each to each have one round; a collective has several, and each waits until ranks look again.
        self.failed = np.zeros(self.size, dtype=np.int8)
        flags = [self.failed[rank : rank + 1] for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.requests = [self.world.Recv_init(flags[rank], rank) for rank in others]
        self.requests += [self.world.Send_init(flags[self.rank], rank) for rank in others]
        self.limit = float(config.getini("faulthandler_timeout") or 120)
        self.collection_errors: list[str] = []
        self.death_monitor = DeathMonitor.over(world)  # one for all meshes of these ranks
        # The true stderr; later, pytest captures file descriptor 2.
        self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
        abort._print = self.say_last

    def say(self, text: str) -> None:
        self.stderr.write("".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines()))
        self.stderr.flush()

    def say_last(self, text: str) -> None:
        """Say why mpishard ends the job, which would be lost with all that pytest has captured."""
        self.say(text)
        time.sleep(0.2)  # launchers drop what is still in the pipe

    def exchange(self, where: str, failure: str | None) -> dict[int, str]:
        """Failures by rank; ends the job if the others stay away.

        Polls, because a blocked MPI call can be neither timed out nor interrupted.
        """
        from mpi4py import MPI

        self.failed[self.rank] = failure is not None
        MPI.Prequest.Startall(self.requests)
        start, reported = time.monotonic(), False
        limit = self.limit if failure is None else AFTER_FAILURE
        while not MPI.Prequest.Testall(self.requests):
            waited = time.monotonic() - start
            if failure is not None and not reported and waited > QUIET:
                self.say(f"failed in {where}:\n{failure}")
                reported = True
            if waited > limit:
                self.say(f"{where}: other ranks did not follow within {limit:.0f} s; ending the job")
                self.world.Abort(1)
            time.sleep(0.0005)
        if not self.failed.any():
            return {}
        texts = self.world.allgather(failure)
        return {rank: text for rank, text in enumerate(texts) if text is not None}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        error = "\n".join(self.collection_errors) or None
        others = self.exchange("collection", error)
        if others and error is None:
            rank, text = next(iter(others.items()))
            pytest.exit(f"collection failed on rank {rank}:\n{text}", returncode=2)
        tests = hashlib.sha256("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
        if not others and len(set(self.world.allgather(tests))) > 1:
            pytest.exit("ranks collected different tests; parameters must not depend on the rank", 2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        own = (report.longreprtext or f"{report.when} failed") if report.failed else None
        others = self.exchange(f"{item.nodeid} ({report.when})", own)
        others.pop(self.rank, None)
        if others:
            rank, text = next(iter(others.items()))
            if own is not None:
                report.sections.append((f"also failed on ranks {sorted(others)}; rank {rank}", text))
            else:
                report.outcome = "failed"
                report.longrepr = f"failed on ranks {sorted(others)}; rank {rank}:\n{text}"
        return report

    def pytest_unconfigure(self) -> None:
        # Open MPI ends the job at the first rank that exits with an error: let rank 0 have its say first.
        sys.stdout.flush()
        self.death_monitor.dismiss()
        request, start = self.world.Ibarrier(), time.monotonic()
        while not request.Test() and time.monotonic() - start < AFTER_FAILURE:
            time.sleep(0.001)


def with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi"))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "every_variant(short=True): part of every sample, since its variants follow the ranks; short=False: of all but"
        " the short ones",
    )
    config.addinivalue_line("markers", "third(number): of one third of the tests, that of one day of three in .ci/run")
    if THIRD not in ("0", "1", "2", "all"):
        raise pytest.UsageError(f"MPISHARD_TEST_THIRD={THIRD!r} must be 0, 1, 2 or all")
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
    text = f"a sample of tests/mpi, another for each MPI and number of ranks; at {WHOLE} ranks they make up all of it"
    parser.addoption("--sample", action="store_true", help=text)
    text = "fewer steps and combinations, as plain `tox` takes; `tox -e full` has all of them"
    parser.addoption("--short", action="store_true", help=text)
    text = "of all tests, or of those marked `faults`, the third that MPISHARD_TEST_THIRD names; all if it names none"
    parser.addoption("--third", choices=["all", "faults"], help=text)
    text = "of tests/unit what plain `tox` leaves out or shortens, see left_out.py"
    parser.addoption("--left-out", action="store_true", help=text)
    text = "check CUDA functions on the host for races and accesses outside of arrays, see cuda_checks.cpp; wants g++"
    parser.addoption("--cuda-checks", action="store_true", help=text)


def in_turn(config: pytest.Config) -> bool | None:
    """Whether this is the day on which tests beside PyTorch and JAX run in this place; None where they always do.

    Their imports take each rank as long as the collection of all other tests.  So where a third of the tests runs each
    day, all of these run on one day of three, and on the others no rank imports the packages.  With these days, and
    those of Slurm's tests, all three take as long as each other.
    """
    if THIRD == "all" or config.getoption("--third") != "all" or not with_mpi(config):
        return None
    from mpi4py import MPI

    vendor, ranks = MPI.get_vendor()[0], MPI.COMM_WORLD.size
    days = {1: 1, 2: 0, 4: 2, 8: 2 if vendor == "MPICH" else 0}
    return None if ranks == WHOLE else days.get(ranks, 0) == int(THIRD)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    if config.getoption("--left-out") and HERE / "unit" in collection_path.parents:
        return not left_out.tests_of(collection_path) or None
    if HERE / "mpi" in collection_path.parents and in_turn(config) is False:
        return left_out.is_skipped_whole(collection_path) or None
    return None


def chosen(items: list[pytest.Item], where: tuple[str, int], short: bool = False) -> set[str]:
    """The names of the sample that runs in one place: under an MPI, at a number of ranks.

    At `WHOLE` ranks the `short` sample has every third variant of each test in ``tests/mpi``, and the other sample the
    rest.  Elsewhere half of the tests, and of each a share of the variants, at least one; other places have others.
    Chosen by a hash of names, since a fixed stride would leave out whole values of a parameter.  Tests marked
    ``every_variant`` are part of every sample, those marked ``every_variant(short=False)`` of all but the short ones.
    Tests that the `short` sample shortens run whole in the other at `WHOLE` ranks.  Variants on CuPy are part of every
    sample, of none where there is no CuPy: hundreds of tests that all ranks skip together take seconds.
    """
    has_cupy = importlib.util.find_spec("cupy") is not None
    kept: set[str] = set()
    variants: dict[str, list[str]] = {}
    ranks = where[1]
    for item in items:
        whole = not short and ranks == WHOLE and "short" in getattr(item, "fixturenames", ())
        every = item.get_closest_marker("every_variant")
        on_gpu = item.get_closest_marker("gpu") is not None
        every_variant = every is not None and (not short or every.kwargs.get("short", True))
        if HERE / "mpi" not in item.path.parents or every_variant or whole or on_gpu:
            if has_cupy or not on_gpu:
                kept.add(item.nodeid)
        else:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    for test, names in variants.items():
        number = zlib.crc32(test.encode())
        if ranks == WHOLE:
            names.sort(key=lambda name: zlib.crc32(name.encode()))
            every_third = set(names[number % SHARE :: SHARE])
            kept.update(every_third if short else set(names) - every_third)
        elif where in HALVES[number % 2]:
            names.sort(key=lambda name: zlib.crc32(f"{where} {name}".encode()))
            kept.update(names[: -(-len(names) // (2 * SHARE if ranks == 8 else SHARE))])
    return kept


def is_left_out(item: pytest.Item, short: bool = True) -> bool:
    """Whether plain `tox` leaves out or shortens a test; see `left_out`."""
    names = left_out.tests_of(item.path, short)
    return not names.isdisjoint({getattr(item, "originalname", item.name), *(each.name for each in item.listchain())})


def third_of(item: pytest.Item) -> int:
    """In which third of all tests one is."""
    marker = item.get_closest_marker("third")
    return zlib.crc32(item.nodeid.encode()) % 3 if marker is None else int(marker.args[0])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = {item.nodeid for item in items}
    if with_mpi(config) and config.getoption("--sample"):
        from mpi4py import MPI

        kept = chosen(items, (MPI.get_vendor()[0], MPI.COMM_WORLD.size), config.getoption("--short"))
    if THIRD != "all" and (of := config.getoption("--third")):
        marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
        whole = {name for name, its in marks.items() if of == "faults" and its.isdisjoint({"faults", "third"})}
        if (turn := in_turn(config)) is not None:
            beside_others = {item.nodeid for item in items if is_left_out(item, short=False)}
            whole, kept = whole | beside_others, kept if turn else kept - beside_others
        today = {item.nodeid for item in items if third_of(item) == int(THIRD)}
        kept &= whole | today
    if config.getoption("--left-out"):
        kept = {item.nodeid for item in items if item.nodeid in kept and is_left_out(item)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
    items[:] = [item for item in items if item.nodeid in kept]
    for item in items:
        if HERE / "mpi" in item.path.parents:
            item.add_marker(pytest.mark.mpi)
        elif HERE / "e2e" in item.path.parents:
            item.add_marker(pytest.mark.mpi_skip)  # starts jobs of its own, which a rank must not


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let garbage collections skip what is there before the tests: PyTorch and JAX make most of their time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run of a third may have no test: all of its files are those of another day."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and THIRD != "all" and session.config.getoption("--third"):
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def short(request: pytest.FixtureRequest) -> bool:
    """Whether to take fewer steps and combinations: ``--short``."""
    return bool(request.config.getoption("--short"))


@pytest.fixture(params=["standin", pytest.param("cupy", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    """Each kind of device arrays, see ``devices.py``; ``mpi/conftest.py`` has more of them for tests on ranks."""
    from devices import make_device

    return make_device(request.param)


@pytest.fixture(scope="module", params=["standin", pytest.param("cupy", marks=pytest.mark.gpu)])
def chosen_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """For files of tests of CUDA functions: their ``devices.chosen`` makes arrays of each kind in turn."""
    import cuda_on_host
    import devices

    if request.param == "standin" and cuda_on_host.COMPILER is None:
        pytest.skip("no C++ compiler, which the stand-in needs for CUDA functions")
    devices.chosen.device = devices.make_device(request.param)
    yield
    devices.chosen.device = None


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
def without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is sent, and when: with MPISHARD_DEBUG=1 ranks send more, and wait.  By `usefixtures`."""
    monkeypatch.delenv("MPISHARD_DEBUG", raising=False)


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
