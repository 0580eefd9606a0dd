"""The record of a run, in a folder: what it was, how its loss went, and what every process spent its time on."""

from mpishard.record.reading import Run
from mpishard.record.run_record import RunRecord

__all__ = ["Run", "RunRecord"]
