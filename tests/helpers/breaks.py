"""Changes to the arithmetic that must change bits, so that a comparison of bits shows that it can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import threadpoolctl

import mpishard.backend.process
import mpishard.nn.tensor_parallel
import mpishard.training.step_runner
from mpishard.nn.tensor_parallel import Slices


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
    stack.enter_context(mock.patch.object(mpishard.backend.process, "matmul", np.matmul))


def _slices(stack: contextlib.ExitStack) -> None:
    """Slices, and blocks of rows, are added one after the other where a rank has all of a tree."""
    merges = mpishard.nn.tensor_parallel._merges

    def one_by_one(start: int, stop: int, total: int) -> Any:
        along_the_tree = merges(start, stop, total)
        count = stop - start
        return [0, *[1] * (count - 1)] if sum(along_the_tree) == count - 1 else along_the_tree

    stack.enter_context(mock.patch.object(mpishard.nn.tensor_parallel, "_merges", one_by_one))


def _block(stack: contextlib.ExitStack) -> None:
    """The first block of rows ends a row earlier."""
    row_blocks = Slices.row_blocks

    def cut_earlier(self: Slices, rows: int, splits_rows: bool) -> list[slice]:
        blocks = row_blocks(self, rows, splits_rows)
        if len(blocks) > 1 and blocks[0].stop > blocks[0].start:
            cut = blocks[0].stop - 1
            blocks[:2] = [slice(blocks[0].start, cut), slice(cut, blocks[1].stop)]
        return blocks

    stack.enter_context(mock.patch.object(Slices, "row_blocks", cut_earlier))


BREAKS: dict[str, Callable[[contextlib.ExitStack], None]] = {
    "tree": _tree,
    "slices": _slices,
    "block": _block,
    "threads": _threads,
}
