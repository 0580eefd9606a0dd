"""The version of mpishard, and those of Python and of the packages that it computes with.

No MPI.  It imports nothing of mpishard, so that every package can import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VERSION = "0.1.0"

# The distributions of CuPy, all with the same files: of the wheels for a version of CUDA, and one that pip has built.
CUPY_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")
_PACKAGES = {
    "NumPy": ("numpy",),
    "mpi4py": ("mpi4py",),
    "h5py": ("h5py",),
    "numba": ("numba",),
    "ml_dtypes": ("ml_dtypes",),
    "CuPy": CUPY_PACKAGES,
}


def versions() -> dict[str, str]:
    """Of mpishard, Python and the packages that it computes with, those that are installed, by name."""
    import platform

    return {"mpishard": VERSION, "Python": platform.python_version(), **installed(_PACKAGES)}


def installed(packages: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Versions of what is installed, by name; nothing is imported.

    `packages` has by name the distributions that may bring it, of which the first that is installed counts.
    """
    from importlib import metadata

    found: dict[str, str] = {}
    for name, distributions in packages.items():
        for distribution in distributions:
            try:
                found.setdefault(name, metadata.version(distribution))
            except metadata.PackageNotFoundError:
                continue
    return found
