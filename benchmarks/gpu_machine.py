"""What the parts of gpu.py share: sizes, the module of arrays, waiting for a device, and facts about a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import children

# Dense products in bfloat16 with sums in float32: teraflop/s by words of the GPU's name, the first that fits, as
# NVIDIA's data sheets have them without sparsity.
PEAKS = {
    "B200": 2250,
    "GH200": 990,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "A40": 150,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
# Distributions whose version decides what is measured.
PACKAGES = (
    "cupy-cuda11x",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvmath-python",
    "torch",
    "triton",
    "mpi4py",
    "numpy",
    "numba",
    "h5py",
    "ml_dtypes",
    "pytest",
)
FASTER = ("nvidia-cudnn-frontend", "nvmath-python")  # attention as one kernel; bias and GELU in those of products


def model_sizes(sizes: dict[str, int]) -> dict[str, Any]:
    """Keywords of a model of mpishard."""
    names = {"vocabulary_size": "vocabulary", "context_length": "context"}
    return {name: sizes[names.get(name, name)] for name in (*names, "width", "layers", "heads")}


@dataclass(frozen=True)
class Setting:
    """What the command line chose, as children get it.

    Parameters
    ----------
    module : {"cupy", "numpy", "standin"}
        Where arrays live; the last two are for trying the script where there is no GPU.
    small, quick : bool
        Tiny sizes; and fewer repeats.
    output : str
        The folder of results.
    rest : bool
        Whether results in the folder stay, and only what is missing or failed runs.
    """

    module: str = "cupy"
    small: bool = False
    quick: bool = False
    output: str = "."
    rest: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def repeats(self) -> int:
        return 2 if self.small else 3 if self.quick else 7

    @property
    def gpt(self) -> dict[str, int]:
        """Sizes of the GPT and of a step, over all ranks."""
        if self.small:
            sizes = {"vocabulary": 101, "context": 16, "width": 24, "layers": 2, "heads": 3, "sequences": 2}
        else:
            sizes = {"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12, "sequences": 16}
        return sizes

    def array_module(self) -> Any:
        """The module that makes arrays."""
        if self.module == "numpy":
            import numpy

            return numpy
        if self.module == "standin":
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
            import standin

            from mpishard.backend import array as arrays

            return arrays.module_of(standin.empty(1))
        import cupy

        return cupy

    def use_device(self, mesh: Any) -> Any:
        """The module that makes arrays, on the GPU of this rank."""
        module = self.array_module()
        if self.module == "cupy":
            module.cuda.Device(mesh.device).use()
        return module


def timed(like: Any, work: Callable[[], Any], calls: int = 1) -> float:
    """Seconds of a call on the device of `like`: of so many that are queued at once, by their number."""
    from mpishard.backend import array as arrays

    arrays.ready(like)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    arrays.ready(like)
    return (time.perf_counter() - start) / calls


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ``ours / theirs`` of the same turn."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def peak_tflops(name: str) -> float | None:
    """Of a GPU by its name; None for one that is not in the table."""
    words = re.split(r"[\s-]+", name)
    return next((float(peak) for part, peak in PEAKS.items() if all(word in words for word in part.split())), None)


def nvidia_smi() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU, as the driver's own tool says; empty where there is none."""
    fields = ("name", "memory.total", "driver_version", "uuid", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, (part.strip() for part in line.split(",")), strict=False)) for line in lines]


def facts(setting: Setting) -> dict[str, Any]:
    """Facts about the machine and the packages; what cannot be asked has the error in its place."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "processor": children.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "arrays": setting.module,
        "gpus": nvidia_smi(),
        "versions": {},
    }
    for package in PACKAGES:
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in FASTER:
                found["versions"][package] = "not installed: training takes longer without"
    found["mpi"] = _asked(_mpi)
    if setting.module == "cupy":
        found["cupy"] = _asked(_cupy)
    found["torch"] = _asked(_torch) if importlib.util.find_spec("torch") else "not installed"
    return found


def _asked(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # any of the libraries' own
        return f"{type(error).__name__}: {error}"


def _mpi() -> dict[str, Any]:
    from mpishard.comm.capabilities import probe

    found = probe(device=True)
    return {
        "library": f"{found.library} {found.version}",
        "threads": found.threads,
        "takes device pointers": found.device_buffers,
    }


def _cupy() -> dict[str, Any]:
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "version": cupy.__version__,
        "device": properties["name"].decode(),
        "memory": int(properties["totalGlobalMem"]),
        "compute capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": int(properties["multiProcessorCount"]),
        "CUDA runtime": runtime.runtimeGetVersion(),
        "CUDA driver": runtime.driverGetVersion(),
        "NVRTC": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cuBLAS": _asked(_cublas_version),
    }


def _cublas_version() -> int:
    from cupy.cuda import cublas, device

    return int(cublas.getVersion(device.get_cublas_handle()))


def _torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "CUDA": torch.version.cuda, "sees a GPU": torch.cuda.is_available()}
