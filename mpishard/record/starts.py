"""What a start of a run tells of its surroundings, so that the run can be told from its folder a year later."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from mpishard.comm.capabilities import probe
from mpishard.comm.mesh import Mesh
from mpishard.version import versions

# What changes how MPI, BLAS, threads and devices behave, and the job that it was.
_TELLING = re.compile(
    r"(MPISHARD|OMP|OPENBLAS|MKL|BLIS|NUMBA|CUDA|UCX|FI|HDF5|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|SLURM)_\w+"
)
_SECRET = re.compile(r"TOKEN|JWT|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """When, where, by which command, on how many ranks and with which versions.  Not collective."""
    mpi = probe()
    return {
        "time": round(datetime.now(UTC).timestamp(), 3),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *sys.argv],
        "working_directory": os.getcwd(),
        "host": os.uname().nodename,
        "system": platform.platform(),
        "ranks": mesh.size,
        "mesh": mesh.shape,
        "ranks_by_node": list(Counter(mesh.nodes).values()),
        "blas_threads": mesh.blas_threads,
        "versions": {**versions(), mpi.library: mpi.version},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if _TELLING.fullmatch(name) and not _SECRET.search(name)
        },
    }


def plain(value: Any) -> Any:
    """Any setting as JSON has it: records as their fields with their type, what JSON lacks by its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        told = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__} | {name: plain(one) for name, one in told.items() if name != "mesh"}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
