"""The contents of a checkpoint, as its index says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.checkpoint.pieces import StoredPiece

INDEX = "index.h5"


@dataclass(frozen=True)
class Origin:
    """Which checkpoint an index belongs to, and what wrote it.

    Parameters
    ----------
    id : str
        32 hexadecimal digits, unique to this checkpoint.
    generation : int
        Counts the checkpoints of a run.
    saved : str
        Time of the save: ISO 8601, UTC.
    mpishard_version : str
        The version that wrote it.
    """

    id: str
    generation: int
    saved: str = ""
    mpishard_version: str = ""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint, without the values.

    Parameters
    ----------
    folder : Path
        That of the checkpoint.
    origin : Origin
        What has saved it.
    facts : dict
        As in `RunState.facts`.
    tensors : dict
        Names to global shapes, in the order of the model.
    kinds : dict
        The kinds of arrays stored for each tensor, with their dtypes: ``"parameters"``, ``"optimizer/exp_avg"``.
    pieces : tuple of StoredPiece
        Together they cover each element of each tensor and kind once.
    """

    folder: Path
    origin: Origin
    facts: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    kinds: dict[str, np.dtype]
    pieces: tuple[StoredPiece, ...]

    @property
    def id(self) -> str:
        """`Origin.id`."""
        return self.origin.id

    @property
    def generation(self) -> int:
        """`Origin.generation`."""
        return self.origin.generation

    @property
    def saved(self) -> str:
        """`Origin.saved`."""
        return self.origin.saved

    @property
    def mpishard_version(self) -> str:
        """`Origin.mpishard_version`."""
        return self.origin.mpishard_version
