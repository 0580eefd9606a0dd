"""The record of a run, in a folder: its settings, its loss, and how every process spent its time."""

from mpishard.record.reading import Run
from mpishard.record.run_record import RunRecord

__all__ = ["Run", "RunRecord"]
