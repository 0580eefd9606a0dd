"""The options of `Checkpoints`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mpishard.arguments import flag, integer
from mpishard.checkpoint.pieces import COMPRESSIONS
from mpishard.checkpoint.save_interval import check_every
from mpishard.comm.axis import Axis


@dataclass(frozen=True)
class CheckpointOptions:
    """The options of `Checkpoints`, whose docstring explains each.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.
    """

    folder: str | Path
    every: float | None = None
    keep: int | None = 2
    asynchronous: bool = False
    compression: str | None = None
    on_error: Literal["raise", "warn"] = "raise"
    best: Literal["validation loss"] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None:
            object.__setattr__(self, "keep", integer("keep", self.keep, least=1))
        object.__setattr__(self, "asynchronous", flag("asynchronous", self.asynchronous))
        check_every(self.every)
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r} is none of {', '.join(map(str, COMPRESSIONS))}")
        if self.on_error not in ("raise", "warn"):
            raise ValueError(f"on_error={self.on_error!r} must be 'raise' or 'warn'")
        if self.best not in (None, "validation loss"):
            raise ValueError(f"best={self.best!r} must be 'validation loss', or None")
        # A script may change the working directory.
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    @classmethod
    def agreed(cls, world: Axis, options: Mapping[str, Any]) -> CheckpointOptions:
        """The options that all ranks give; ValueError on every rank if they differ.  Collective over `world`."""
        all_options = world.allgather_object({name: str(value) for name, value in options.items()})
        for name in options:
            if any(other[name] != all_options[0][name] for other in all_options):
                values = ", ".join(other[name] for other in all_options)
                raise ValueError(f"{name} must be the same on all ranks, got {values} by rank")
        return cls(**options)
