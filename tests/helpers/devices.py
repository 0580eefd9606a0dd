"""Kinds of device arrays for tests: the stand-in, and CuPy where there is a GPU.

A test takes the fixture `device` of ``conftest.py``, and then runs on every kind::

    def test_a_copy(device):
        array = device.put(np.ones(3))

Under ``tests/mpi`` these kinds come twice: as arrays that are staged through the host, and as arrays that MPI is
handed the addresses of, on CuPy only where a probe has shown that this MPI takes them.  For some kinds only:
``pytest.mark.parametrize("device", ["standin", CUPY], indirect=True)``.

A file of tests of CUDA functions whose helpers make arrays takes two lines to run on both: ``from devices import chosen
as standin`` in the place of ``import standin``, and ``pytestmark = pytest.mark.usefixtures("chosen_device")``.

Variants on CuPy have the mark `hardware`: ``python -m pytest -m hardware tests/unit`` runs these and no others.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import standin

from mpishard.backend import array as arrays

CUPY = pytest.param("cupy", marks=pytest.mark.hardware)
CUPY_DIRECT = pytest.param("cupy-direct", marks=pytest.mark.hardware)
KINDS = ["standin", CUPY]
KINDS_OVER_MPI = ["standin", "aware", CUPY, CUPY_DIRECT]
# Cycles for which a GPU is kept busy before late work: some 50 ms at the clocks of today's.
LATE_CYCLES = 100_000_000
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""


@dataclass(frozen=True)
class Device:
    """How a test makes arrays of one kind."""

    name: str  # of the kind
    module: Any  # CuPy, or what has its functions for the stand-in

    @property
    def array_type(self) -> type:
        return self.module.ndarray

    @property
    def is_direct(self) -> bool:
        """Whether these arrays are for an MPI that is handed addresses of device memory."""
        return self.name in ("aware", "cupy-direct")

    def put(self, host: np.ndarray) -> Any:
        """A copy of an array of the host."""
        array = self.empty(host.shape, host.dtype)
        arrays.copy_to_device(np.asarray(host, order="C"), array)
        return array

    def empty(self, shape: Any, dtype: Any = np.float64) -> Any:
        return self.module.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Any:
        return self.module.zeros(shape, dtype)

    def be_late(self) -> None:
        """Keep a GPU busy, so that what is queued next is done much later; on the stand-in it is anyway."""
        if self.name.startswith("cupy"):
            self.module.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(LATE_CYCLES),))


class Chosen:
    """Makes arrays of the kind that the fixture `chosen_device` has chosen, by the names that ``standin.py`` has."""

    device: Device | None = None

    def __getattr__(self, name: str) -> Any:
        assert self.device is not None, "the fixture chosen_device was not asked for"
        return getattr(self.device, {"DeviceArray": "array_type", "on_device": "put"}.get(name, name))


chosen = Chosen()


def make_device(name: str) -> Device:
    """A kind of arrays by name; skips the test where it is CuPy's and there is no CuPy or no GPU."""
    if not name.startswith("cupy"):
        kind = {"standin": standin.DeviceArray, "aware": standin.AwareArray}[name]
        return Device(name, arrays.module_of(standin.empty(1, kind=kind)))
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    import cupy

    if not cupy.is_available():
        pytest.skip("CuPy finds no GPU")
    return Device(name, cupy)


def use_over_mpi(name: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """As `make_device`, and until the test ends mpishard hands MPI such arrays as the kind says.

    Each rank takes a GPU of its own where there are as many.
    """
    # Here, since not every run of tests has an MPI.
    from mpi4py import MPI

    from mpishard.comm import staging
    from mpishard.comm.capabilities import probe

    device = make_device(name)
    if name.startswith("cupy"):
        device.module.cuda.Device(MPI.COMM_WORLD.rank % device.module.cuda.runtime.getDeviceCount()).use()
    if name == "cupy-direct" and not probe(device=True).device_buffers:
        pytest.skip("this MPI was not seen to take device pointers")
    found = replace(probe(), device_buffers=device.is_direct)
    monkeypatch.setattr(staging, "probe", lambda device=False: found)
    return device
