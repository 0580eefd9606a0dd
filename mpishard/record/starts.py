"""The environment of a start of a run, recorded so that the run can be understood a year later."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from mpishard.backend.arithmetic import arithmetic
from mpishard.comm.capabilities import probe
from mpishard.comm.mesh import Mesh
from mpishard.version import versions

# Variables that change the behaviour of MPI, BLAS, threads and devices, or identify the job.
_RELEVANT = re.compile(
    r"(MPISHARD|OMP|OPENBLAS|MKL|BLIS|NUMBA|CUDA|UCX|FI|HDF5|OMPI_MCA|PRTE_MCA|PMIX_MCA|MPIR_CVAR|SLURM)_\w+"
)
# Not tokenizers and numbers of heads of keys, which language models have.
_SECRET = re.compile(
    r"key(?![_-]value)|token(?!i[sz])|jwt|secret|passw|passphrase|auth(?!or\b)|credential", re.IGNORECASE
)
_MASK = "***"
# An argument that has its value with it, as --token=VALUE or api.key=VALUE; a path before = is no name.
_WITH_VALUE = re.compile(r"(-{0,2}[\w.-]+)=.+", re.DOTALL)


def surroundings(mesh: Mesh) -> dict[str, Any]:
    """Time, host, command, number of ranks and versions; secrets are masked.  Not collective."""
    mpi = probe()
    return {
        "time": round(datetime.now(UTC).timestamp(), 3),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [sys.executable, *without_secrets(sys.argv)],
        "working_directory": os.getcwd(),
        "host": os.uname().nodename,
        "system": platform.platform(),
        "ranks": mesh.size,
        "mesh": mesh.shape,
        "ranks_by_node": list(Counter(mesh.nodes).values()),
        "blas_threads": mesh.blas_threads,
        "arithmetic": arithmetic(),
        "versions": {**versions(), mpi.library: mpi.version},
        "environment": {
            name: _MASK if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _RELEVANT.fullmatch(name)
        },
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line, where the values of options such as ``--api-key VALUE`` and ``--token=VALUE`` are masked."""
    shown: list[str] = []
    secret = False  # the option before has a secret name, and no value yet
    for argument in arguments:
        pair = _WITH_VALUE.fullmatch(argument)
        name = pair[1] if pair else argument
        named = bool(_SECRET.search(name))
        if secret and not argument.startswith("--"):
            shown.append(_MASK)
        else:
            shown.append(f"{name}={_MASK}" if pair and named else argument)
        secret = named and not pair and argument.startswith("-")
    return shown


def plain(value: Any) -> Any:
    """A setting as a value for JSON: dataclasses as their fields with their type, other objects by their repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__} | {name: plain(one) for name, one in fields.items() if name != "mesh"}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
