"""The fastest libraries for matrix products on this machine: measured once, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from mpishard.backend import process
from mpishard.backend.gemm.choice import Choice
from mpishard.backend.gemm.libraries import (
    BATCHED,
    KINDS,
    NUMPY,
    PLAIN,
    SCORES,
    TRANSPOSED,
    load,
    multiplies_bfloat16,
    processor,
    product_of,
    settings,
)

# Sizes of products: (count, m, k, n), with count 0 for matrices.
_TIMED = {
    PLAIN: [(0, 256, 256, 1024), (0, 256, 1024, 256)],
    TRANSPOSED: [(0, 256, 512, 1024)],
    BATCHED: [(8, 96, 256, 32), (8, 96, 128, 64)],
    SCORES: [(8, 192, 32, 96), (8, 96, 64, 256)],
}
_KEPT_AS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.float32}
_REPEATS = 8
# A library that is not that much faster than NumPy's is not taken, so that a noisy measurement changes little.
_FASTER = 1.05
# Products of bfloat16 must be that much faster than those of float32, since operands are rounded before.
_FASTER_WITH_ROUNDING = 1.5
_FORMAT = 1  # of the kept file


def fastest(libraries: Collection[str]) -> Choice:
    """The fastest on this machine for each kind of product, of NumPy's and `libraries` that can be loaded.

    The first call on a machine measures for some tenths of a second, and keeps the result in the user's cache folder:
    processes that find it make the same choice. One thread is measured whatever a rank has, so that the number of ranks
    does not change the choice.
    """
    facts = {
        "processor": processor(),
        NUMPY: np.__version__,
        "OpenBLAS kernels": os.environ.get("OPENBLAS_CORETYPE", "its own choice"),
        **{name: load(name).version for name in sorted(libraries)},
        **settings(),
        "format": _FORMAT,
    }
    mark = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    folder = _cache_folder()
    path = None if folder is None else folder / f"products-{mark}.json"
    kept = None if path is None else _kept(path)
    if kept is None:
        try:
            with threadpool_limits(1):
                rates = dict(_rates(libraries))
        except RuntimeError as error:  # of a library; ranks wait for an answer
            warnings.warn(f"matrix products are NumPy's: {error}", UserWarning, stacklevel=2)
            return Choice()
        kept = _of_rates(rates)
        if path is not None:
            kept = _keep(path, {"libraries": str(kept), "GFLOP/s": rates, "of": facts})
    return kept.limited_to(libraries)


def _kept(path: Path) -> Choice | None:
    """The choice in a kept file; None if it is missing or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return Choice.parse(json.loads(path.read_text())["libraries"])
    return None


def _cache_folder() -> Path | None:
    """Where the result is kept; None for a user without a home."""
    with contextlib.suppress(RuntimeError):
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mpishard")
    return None


def _keep(path: Path, found: Mapping[str, object]) -> Choice:
    """Write a file at once, unless another process was faster, and return the choice in the file.

    Where no file can be written the next start measures again.
    """
    own = path.with_suffix(f".{platform.node()}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(found, indent=1))
        try:
            if path.exists() and _kept(path) is None:
                os.replace(own, path)
            else:
                os.link(own, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(own, path)
        own.unlink(missing_ok=True)
    return _kept(path) or Choice.parse(str(found["libraries"]))


def _rates(libraries: Collection[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """GFLOP/s of each library by dtype and kind, each product in turn with all libraries."""
    random = np.random.default_rng(0)
    for dtype, kind in ((dtype, kind) for dtype, kinds in KINDS.items() for kind in kinds):
        if dtype == "bfloat16" and not multiplies_bfloat16():
            continue
        seconds: dict[str, list[float]] = {}
        work = 0
        for count, m, k, n in _TIMED[kind]:
            batch = (count,) if count else ()
            a, b = (random.random(shape).astype(_KEPT_AS[dtype]) for shape in ((*batch, m, k), (*batch, k, n)))
            if dtype == "bfloat16":  # its bits are the upper half of those of float32
                a, b = ((each.view(np.uint32) >> 16).astype(np.uint16) for each in (a, b))
            if kind == TRANSPOSED:
                a = np.ascontiguousarray(a.T).T
            work += 2 * max(1, count) * m * k * n
            for name, best in _seconds(a, b, libraries).items():
                seconds.setdefault(name, []).append(best)
        all_of = {name: times for name, times in seconds.items() if len(times) == len(_TIMED[kind])}
        yield f"{dtype}.{kind}", {name: round(work / sum(times) / 1e9, 1) for name, times in all_of.items()}


def _seconds(a: np.ndarray, b: np.ndarray, libraries: Collection[str]) -> dict[str, float]:
    """The shortest time of a product, by library."""
    half = a.dtype == np.uint16
    out = np.empty((*a.shape[:-1], b.shape[-1]), np.float32 if half else a.dtype)
    product = product_of(a, b, out)
    assert product is not None
    calls = {name: load(name).call(product) for name in libraries}
    best: dict[str, float] = {}
    for _ in range(_REPEATS):
        for name in ([] if half else [NUMPY]) + [name for name, call in calls.items() if call is not None]:
            call = calls.get(name)
            began = time.perf_counter()
            if call is None:
                process.matmul(a, b, out=out)
            else:
                call(a.ctypes.data, b.ctypes.data, out.ctypes.data)
            took = time.perf_counter() - began
            best[name] = min(best.get(name, took), took)
    return best


def _of_rates(rates: Mapping[str, Mapping[str, float]]) -> Choice:
    chosen = {}
    for name, by_library in rates.items():
        dtype, _, kind = name.partition(".")
        if dtype == "bfloat16":
            least = _FASTER_WITH_ROUNDING * max(rates[f"float32.{kind}"].values())
        else:
            least = _FASTER * by_library[NUMPY]
        library = max(by_library, key=by_library.__getitem__, default=NUMPY)
        if library != NUMPY and by_library[library] >= least:
            chosen[name] = library
    halves = [name for name in chosen if name.startswith("bfloat16.")]
    if len(halves) < len(KINDS["bfloat16"]):  # else a model in bfloat16 would be slower in the kind that is left
        chosen = {name: library for name, library in chosen.items() if name not in halves}
    return Choice(chosen)
