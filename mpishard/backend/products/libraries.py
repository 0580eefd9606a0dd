"""The libraries for matrix products that are installed in addition to NumPy's."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import site
import sys
import warnings
from pathlib import Path
from typing import Protocol

from threadpoolctl import threadpool_info

from mpishard.backend.products.shapes import Call, Product

NUMPY, MKL, ONEDNN = "numpy", "mkl", "onednn"
# By library the dtypes that it multiplies; see `onednn` for why that one has no more.
TAKES = {MKL: ("float32", "float64", "bfloat16"), ONEDNN: ("bfloat16",)}
# By name: the file, without its version, and the variable that names the folder of an installation by other means.
_FILES = {MKL: ("libmkl_rt.so", "MKLROOT"), ONEDNN: ("libdnnl.so", "DNNLROOT")}
_SETTINGS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


class Library(Protocol):
    """A library that multiplies matrices with one thread."""

    version: str  # as the library reports it

    def call(self, product: Product) -> Call | None:
        """The function of the addresses of `a`, `b` and `out` that computes a product; None: the library cannot.

        Two threads must not call it at once.
        """


@functools.cache
def installed() -> dict[str, Path]:
    """The files of the libraries that are installed, by name; nothing is loaded."""
    found = {}
    loaded = {pool["internal_api"] for pool in threadpool_info() if pool["user_api"] == "blas"}
    for name, (file, variable) in _FILES.items():
        if name == MKL and loaded == {MKL}:
            continue  # NumPy multiplies by it already, with its own settings
        folders = [Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix, site.getuserbase())]
        if root := os.environ.get(variable):
            folders += [Path(root, "lib"), Path(root, "lib", "intel64")]
        for folder in folders:
            if paths := sorted(folder.glob(f"{file}*")):
                found[name] = paths[0]
                break
    return found


@functools.cache
def load(name: str) -> Library:
    """The library of that name, loaded; raises OSError if it cannot be."""
    path = installed()[name]
    if name == MKL:
        from mpishard.backend.products.mkl import Mkl

        return Mkl(path)
    from mpishard.backend.products.onednn import OneDnn

    return OneDnn(path)


@functools.cache
def loadable() -> dict[str, str]:
    """The versions of the installed libraries that can be loaded, by name; warns of one that cannot."""
    found: dict[str, str] = {}
    try:
        paths = installed()
    except OSError as error:  # of the file system; the other ranks wait for this one
        warnings.warn(f"no library for matrix products is looked for: {error}", UserWarning, stacklevel=2)
        return found
    for name, path in paths.items():
        try:
            found[name] = load(name).version
        except (OSError, AttributeError, RuntimeError) as error:  # a file that is no library, or lacks a function
            warnings.warn(f"{path} cannot be used for matrix products: {error}", UserWarning, stacklevel=2)
    return found


def settings() -> dict[str, str]:
    """The variables of the environment that change what the libraries do, those that are set."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def multiplies_bfloat16() -> bool:
    """Return True if the processor has instructions for products of bfloat16."""
    return bool({"avx512_bf16", "amx_bf16"}.intersection(_described("flags").split()))


def processor() -> str:
    """The name of the processor, and a mark of its instructions."""
    mark = hashlib.blake2b(_described("flags").encode(), digest_size=4).hexdigest()
    return f"{_described('model name')} ({mark})"


@functools.cache
def _described(what: str) -> str:
    """A line of Linux's description of the first core; empty where it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == what:
                return value.strip()
    return ""
