"""The record of a run, in a folder: its settings, its loss, and the time that every process spent on what."""

from mpishard.record.reading import Run
from mpishard.record.run_record import RunRecord

__all__ = ["Run", "RunRecord"]
