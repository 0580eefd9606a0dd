"""Checkpoints: the state of a run on disk, which any layout can load."""

from mpishard.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
