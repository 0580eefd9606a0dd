"""Changes to the arithmetic that must change bits, so that a comparison of bits shows that it can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import threadpoolctl

import mpishard.backend.blas_threads
import mpishard.training.step_runner


@contextlib.contextmanager
def broken(what: str) -> Iterator[None]:
    """One of `BREAKS` in this context; nothing if `what` is empty."""
    with contextlib.ExitStack() as stack:
        if what:
            BREAKS[what](stack)
        yield


def _tree(stack: contextlib.ExitStack) -> None:
    """The micro-batches of a step are leaves of the tree in the opposite order."""
    runner = mpishard.training.step_runner
    cut = runner.micro_batches

    def reversed_cut(*arguments: Any) -> list[np.ndarray]:
        return cut(*arguments)[::-1]

    stack.enter_context(mock.patch.object(runner, "micro_batches", reversed_cut))


def _threads(stack: contextlib.ExitStack) -> None:
    """Every product takes one BLAS thread more."""

    def two_threads() -> None:
        threadpoolctl.threadpool_limits(2)

    before = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    stack.callback(threadpoolctl.threadpool_limits, max(before, default=1))
    stack.enter_context(mock.patch.object(mpishard.training.step_runner, "fix_blas_threads", two_threads))
    stack.enter_context(mock.patch.object(mpishard.backend.blas_threads, "matmul", np.matmul))


BREAKS: dict[str, Callable[[contextlib.ExitStack], None]] = {"tree": _tree, "threads": _threads}
