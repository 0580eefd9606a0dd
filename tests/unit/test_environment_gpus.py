"""GPUs in the environment: what a driver says of them, and what is found in made-up facts."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from facts import GOOD, OPEN_MPI, VERSIONS, changed, job, only

from mpishard.cli.info import rows
from mpishard.environment import Facts, findings
from mpishard.environment.facts import Gpu, collect_devices, gpus_of_driver, version_of_nccl


def test_gpus() -> None:
    assert findings([changed(GOOD, locked_memory=0)]) == []
    with_gpu = changed(GOOD, gpus=2, locked_memory=None)
    finding = only([with_gpu])
    assert finding.level == "note" and "n1 has 2 GPUs, but this Python has no CuPy" in finding.what
    with_cupy = changed(with_gpu, versions={**VERSIONS, "CuPy": "13.6"}, pins_memory=True)
    finding = only([with_cupy])
    assert finding.level == "note" and "arrays travel through the host" in finding.what
    aware = changed(with_cupy, mpi=replace(OPEN_MPI, device_buffers=True))
    assert findings([aware]) == []
    finding = only([changed(aware, locked_memory=8 * 2**20)])
    assert finding.level == "warning" and "lock 8 MiB" in finding.what and "ulimit -l" in finding.way_out
    assert only([changed(aware, pins_memory=False)]).level == "wrong"


H100S = tuple(Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, f"0{index}" * 16) for index in range(2))


def on_gpus(*ranks_on_hosts: int, **changes: Any) -> list[Facts]:
    """As `job`, on hosts with two GPUs each, CuPy, and an MPI that takes their pointers."""
    given: dict[str, Any] = {
        "gpus": 2,
        "locked_memory": None,
        "pins_memory": True,
        "gpu_list": H100S,
        "driver_cuda": "13.0",
        "cupy_cuda": "13",
        "claims_device_buffers": True,
        "versions": {**VERSIONS, "CuPy": "14.2"},
        "mpi": replace(OPEN_MPI, device_buffers=True),
        **changes,
    }
    facts = job(*ranks_on_hosts, **given)
    return [changed(each, gpu_of_rank=(each.process.rank - each.process.node) % 2) for each in facts]


def test_which_gpus() -> None:
    assert findings(on_gpus(2, 2)) == []
    shown = [value for name, value in rows(on_gpus(2))]
    assert "2 x NVIDIA H100 80GB HBM3 with 80.0 GB; driver for CUDA 13.0; one for each rank" in shown
    assert "CuPy 14.2 for CUDA 13; MPI takes device pointers" in shown
    assert "no libraries as packages; those of a CUDA toolkit are not looked for" in shown
    libraries = {"cuBLAS": "13.1", "cuDNN": "9.12", "cuDNN frontend": "1.16", "nvmath": "1.0", "NCCL": "2.28.3"}
    shown = [value for name, value in rows(on_gpus(4, device_libraries=libraries))]
    assert any(value.endswith("; 4 ranks on 2") for value in shown)
    assert (
        "cuBLAS 13.1 (products); cuDNN 9.12; cuDNN frontend 1.16 (attention); nvmath 1.0 (epilogues); "
        "NCCL 2.28.3 (Mesh(collectives='nccl'))" in shown
    )
    staged = on_gpus(2, mpi=OPEN_MPI, claims_device_buffers=False)
    assert any("arrays travel through pinned host memory" in value for name, value in rows(staged))
    without = on_gpus(2, versions=VERSIONS, cupy_cuda="", pins_memory=False)
    assert "no CuPy" in [value for name, value in rows(without)]
    assert only(without).way_out == "to compute there, pip install 'mpishard[cuda13x]', as its driver needs"


def test_a_cupy_that_is_too_new_for_the_driver() -> None:
    finding = only(on_gpus(2, driver_cuda="12.4", pins_memory=False))
    assert (finding.level, finding.about) == ("wrong", "gpu")
    assert finding.what == "CuPy 14.2 is for CUDA 13, but the driver of n1 takes CUDA 12.4 at most"
    assert "pip uninstall cupy-cuda13x, then pip install 'mpishard[cuda12x]'" in finding.way_out
    assert findings(on_gpus(2, cupy_cuda="12")) == []  # drivers take what is older


def test_two_cupys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.2.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("mpishard.environment.facts.libraries", dict)
    devices = collect_devices(1, 0, False)
    assert devices.cupy_packages == ("cupy-cuda13x", "cupy-cuda12x") and devices.cupy_cuda == "13"
    # Whether the files are those of the older one is not known, so that CuPy is not said to be too new for the driver.
    finding = only(on_gpus(2, cupy_packages=devices.cupy_packages, driver_cuda="12.4"))
    assert (finding.level, finding.about) == ("warning", "gpu")
    assert finding.what == "cupy-cuda13x and cupy-cuda12x are installed at once, and each overwrites files of the other"
    assert finding.way_out == (
        "pip uninstall cupy-cuda13x cupy-cuda12x, then pip install 'mpishard[cuda12x]', as its driver needs"
    )
    del installed["cupy-cuda13x"]
    devices = collect_devices(1, 0, False)
    assert devices.cupy_packages == ("cupy-cuda12x",) and devices.cupy_cuda == "12"
    assert findings(on_gpus(2, cupy_packages=devices.cupy_packages)) == []


def test_an_mpi_that_claims_to_take_device_pointers_and_does_not() -> None:
    finding = only(on_gpus(2, mpi=OPEN_MPI))
    assert finding.level == "warning"
    assert "Open MPI says that it takes device pointers, but a trial of it on n1 failed" in finding.what


def test_ranks_that_share_a_gpu_where_there_is_nccl() -> None:
    finding = only(on_gpus(2, 3, device_libraries={"NCCL": "2.28.3"}))
    assert finding.level == "note" and finding.what.startswith("3 ranks of n2 share 2 GPUs, which NCCL refuses")
    assert findings(on_gpus(2, 2, device_libraries={"NCCL": "2.28.3"})) == findings(on_gpus(3)) == []


class Driver:
    """A driver with GPUs, some of whose functions may refuse."""

    def __init__(self, *refusing: str) -> None:
        self.refusing = refusing

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: int(name in self.refusing or bool(getattr(Driver, f"_{name}")(*arguments)))

    @staticmethod
    def _cuInit(flags: int) -> None:
        assert flags == 0

    @staticmethod
    def _cuDriverGetVersion(version: Any) -> None:
        version._obj.value = 12040

    @staticmethod
    def _cuDeviceGetCount(count: Any) -> None:
        count._obj.value = 2

    @staticmethod
    def _cuDeviceGet(device: Any, index: int) -> None:
        device._obj.value = index

    @staticmethod
    def _cuDeviceGetName(name: Any, size: int, device: Any) -> None:
        name.value = f"GPU {device.value}".encode()

    @staticmethod
    def _cuDeviceTotalMem_v2(memory: Any, device: Any) -> None:
        memory._obj.value = 2**36

    @staticmethod
    def _cuDeviceGetUuid(uuid: Any, device: Any) -> None:
        uuid.raw = bytes([device.value] * 16)


def test_what_a_driver_says() -> None:
    gpus, version = gpus_of_driver(Driver())
    assert version == "12.4"
    assert gpus == tuple(Gpu(f"GPU {index}", 2**36, f"0{index}" * 16) for index in range(2))
    assert gpus_of_driver(Driver("cuDeviceGetCount")) == ((), "12.4")
    assert gpus_of_driver(Driver("cuDeviceGetUuid")) == ((), "12.4")
    assert gpus_of_driver(Driver("cuInit")) == ((), "")


def test_nothing_is_asked_about_gpus_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpishard.environment.facts.libraries", lambda: pytest.fail("was asked"))
    assert collect_devices(0, 0, False) == GOOD.devices
    assert [version_of_nccl(code) for code in (22304, 2708)] == ["2.23.4", "2.7.8"]
