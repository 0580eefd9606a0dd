"""What the bits of a computation depend on besides the program: libraries, the kernels that they chose, threads.

OpenBLAS sums in another order under other kernels, and with another number of threads; NumPy and Numba use the vector
instructions of the processor at hand, and the mathematical functions of the C library.  Of mpishard itself a release
may change the compiled kernels.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from mpishard.backend.compiled import KERNELS
from mpishard.backend.products.choice import Choice, in_force
from mpishard.backend.products.libraries import load, settings


def arithmetic() -> dict[str, str]:
    """The facts of this process, at this moment, on which bits depend.

    It takes about a millisecond.  Not collective.

    Returns
    -------
    dict of str to str
        By name, such as ``"BLAS kernels"``; the same names in every process.
    """
    blas = _numpys_blas()
    library = f"{blas.get('internal_api', 'unknown')} {blas.get('version') or ''}".strip()
    return {
        "BLAS": library,
        "BLAS kernels": str(blas.get("architecture", "unknown")),
        # It decides where OpenBLAS cuts a product in blocks; the processor's own size is told by its name below.
        "OPENBLAS_L2_SIZE": os.environ.get("OPENBLAS_L2_SIZE", "unset"),
        "BLAS threads": str(blas.get("num_threads", "unknown")),
        "kernels": str(KERNELS),
        **of_products(in_force()),
        **_of_processor(),
    }


def of_products(choice: Choice) -> dict[str, str]:
    """The libraries that multiply in place of NumPy's, and for what, among the facts of `arithmetic`.

    Not collective.

    Parameters
    ----------
    choice : Choice
        That in force, or one that could be.

    Returns
    -------
    dict of str to str
        The choice, and the versions of its libraries.
    """
    found = [f"{name} {load(name).version}" for name in sorted({*choice.libraries.values()})]
    if found:
        found += [f"{name}={value}" for name, value in settings().items()]
    return {"products": str(choice), "libraries for products": ", ".join(found) or "none"}


def _numpys_blas() -> dict[str, Any]:
    """What threadpoolctl tells of the BLAS of NumPy; empty if it does not know that one."""
    found = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    # SciPy brings a library of its own.
    return min(found, key=lambda pool: "numpy" not in pool["filepath"], default={})


@functools.cache
def _of_processor() -> dict[str, str]:
    """What does not change in a process."""
    import numba  # takes a fifth of a second, which every run with compiled kernels takes anyway
    from llvmlite import binding

    options: Any = numba.config
    processor = options.CPU_NAME or binding.get_host_cpu_name()
    features = options.CPU_FEATURES or binding.get_host_cpu_features().flatten()
    # Virtual machines on one kind of processor may hide different instructions.
    mark = hashlib.blake2b(features.encode(), digest_size=4).hexdigest()
    vector = np.show_config(mode="dicts")["SIMD Extensions"]
    found = [*vector.get("baseline", []), *vector.get("found", [])]
    return {
        "NumPy": f"{np.__version__} with {found[-1] if found else 'no vector instructions'}",
        "Numba": f"{numba.__version__}{' with SVML' if options.USING_SVML else ''}",
        "processor of compiled kernels": f"{processor} ({mark})",
        "C library": " ".join(platform.libc_ver()).strip() or platform.system(),
    }
