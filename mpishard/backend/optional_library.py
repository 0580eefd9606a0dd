"""Optional libraries that compute on devices: each is started once, and a failure is warned of once."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mpishard.backend.kinds import backend_of
from mpishard.version import installed

Array = Any


Started = TypeVar("Started")


@dataclass(eq=False)
class OptionalLibrary(Generic[Started]):
    """A library for CuPy's arrays, where it is installed and wanted."""

    title: str  # its name in warnings
    package: str  # the package that brings it
    module: str  # what is imported of it
    variable: str  # an environment variable that turns it off if it is 0
    instead: str  # what happens without it, a sentence for warnings
    # ``start(module, like)`` gives what uses it on the device of `like`, for one thread
    start: Callable[[Any, Array], Started]
    _threads: threading.local = field(init=False, default_factory=threading.local)
    _warned: bool = field(init=False, default=False)

    def on_device(self, like: Array) -> Started | None:
        """The result of `start` for this thread and the device of an array; it is tried once for each.

        None where the library is not installed, not wanted, or does not start.
        """
        backend = backend_of(like)
        module = self.module_for(backend.module.__name__)
        if module is None:
            return None
        started: dict[int, Started | None] = self._threads.__dict__.setdefault("started", {})
        device = backend.device_number(like)
        if device not in started:
            try:
                started[device] = self.start(module, like)
            except Exception as error:  # of several classes, some of them the library's own
                started[device] = None
                self.warn_once(f"{self.title} does not start on this device ({error})")
        return started[device]

    def module_for(self, arrays: str) -> Any:
        """The imported library for the arrays of a module, named as ``"cupy"``.

        None for others than CuPy's, and where the library is not installed, not wanted, or cannot be imported.
        """
        return self._imported if arrays == "cupy" else None

    @functools.cached_property
    def _imported(self) -> Any:
        wanted = os.environ.get(self.variable, "1") != "0"
        if not wanted or importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return None
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # a library that is missing or too old is no ImportError
            self.warn_once(f"the package {self.package} is installed, but cannot be imported ({error})")
            return None

    def warn_once(self, problem: str) -> None:
        """Warn, once in a process, why the library is not used; `problem` starts the message."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{problem}; {self.instead}; {self.variable}=0 turns {self.title} off without a warning",
                RuntimeWarning,
                stacklevel=3,
            )


_PACKAGES = {
    "cuBLAS": ("nvidia-cublas", "nvidia-cublas-cu12"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cuDNN frontend": ("nvidia-cudnn-frontend",),
    "nvmath": ("nvmath-python",),
}


def device_libraries() -> dict[str, str]:
    """Versions of the libraries for GPUs that mpishard can use, besides those of a CUDA toolkit; nothing is imported.

    Attention by cuDNN needs ``"cuDNN frontend"``, and cuDNN from a package or elsewhere; products need cuBLAS, from a
    package or a CUDA toolkit, and those with bias and GELU also ``"nvmath"``.
    """
    return installed(_PACKAGES)
