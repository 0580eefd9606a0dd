"""What the tests on ranks share besides ``tests/conftest.py``: device arrays, and how they reach MPI."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import standin
from devices import KINDS_OVER_MPI, Device, use_over_mpi


@pytest.fixture(params=KINDS_OVER_MPI)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each kind of device arrays, staged through the host or handed to MPI as it is; see `devices`."""
    return use_over_mpi(request.param, monkeypatch)


@pytest.fixture(params=[standin.DeviceArray, standin.AwareArray], ids=lambda kind: kind.__name__)
def standin_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[standin.DeviceArray]:
    """The stand-in's arrays alone, staged through the host or handed to MPI as they are."""
    # Here, since not every run of tests has an MPI.
    from mpishard.comm import staging

    if request.param is standin.AwareArray:  # an MPI that takes device pointers, as far as the stand-in goes
        aware = replace(staging.probe(), device_buffers=True)
        monkeypatch.setattr(staging, "probe", lambda device=False: aware)
    return request.param


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 32 bytes, so that small buffers are staged in several."""
    from mpishard.comm import staged_collectives

    monkeypatch.setattr(staged_collectives, "PIECE_BYTES", 32)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> Callable[[range], None]:
    """``exchange(sizes)``: buffers of so many bytes are summed by an exchange of pieces, others by the MPI library."""
    from mpishard.comm import collectives
    from mpishard.comm.capabilities import probe

    return lambda sizes: monkeypatch.setitem(collectives.EXCHANGED_BYTES, probe().library, sizes)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Presses Ctrl-C in this process, which may have been started where it is ignored, as in the background."""
    from mpishard.launch.exit_codes import ScriptEnding

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    ScriptEnding.interrupted = False  # or the tests would end with its exit code


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of an elastic run that gets a signal does not wait for others to get it, too."""
    monkeypatch.setattr("mpishard.launch.signals._SKEW_S", 0.0)


@pytest.fixture(scope="module")
def shared_mesh(comm: Any) -> Iterator[Any]:
    """As `mesh`, for all tests of a file.  Collective."""
    import mpishard

    with mpishard.Mesh(comm) as mesh:
        yield mesh
