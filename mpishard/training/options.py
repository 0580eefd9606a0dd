"""The options of `ShardedOptimizer.optimize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpishard.data_parallel.results import TrainingState
from mpishard.record import RunRecord

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


@dataclass(frozen=True)
class RunOptions:
    """The checked options of a run; `watching` says whether any rank has a callback or a time limit."""

    callback: Callable[[TrainingState[Any]], bool | None] | None
    progress: bool
    watching: bool
    checkpoints: Checkpoints | None
    resume: bool
    record: RunRecord | None
