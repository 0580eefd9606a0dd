"""The options of `ShardedOptimizer.optimize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpishard.data.evaluation import EarlyStopping, Evaluation
from mpishard.data_parallel.results import TrainingState
from mpishard.record import RunRecord

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints  # with h5py: only for those who have checkpoints


@dataclass(frozen=True)
class RunOptions:
    """The checked options of a run; those without a text here are explained at `ShardedOptimizer.optimize`.

    Parameters
    ----------
    callback : callable or None
        As there.
    progress : bool
        As there.
    watching : bool
        Whether any rank has a callback or a time limit.
    checkpoints : Checkpoints or None
        As there.
    resume : bool
        As there.
    record : RunRecord or None
        As there.
    evaluate : Evaluation or None
        As there.
    stop_early : EarlyStopping or None
        As there.
    """

    callback: Callable[[TrainingState[Any]], bool | None] | None
    progress: bool
    watching: bool
    checkpoints: Checkpoints | None
    resume: bool
    record: RunRecord | None
    evaluate: Evaluation | None = None
    stop_early: EarlyStopping | None = None
