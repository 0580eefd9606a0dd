"""The record of a run, in a folder: its settings, its loss, and how every process spent its time.

Input: steps, spans and losses of a run.
Output: a folder with lines of JSON from each process, which can be read while the run trains.

Read ``run_record`` first, which writes ``record_files``, then ``reading``, ``follower``,
``audits`` and ``summary``; ``stacks`` for runs that hang, with the package `watch`.
"""

from mpishard.record.reading import Run
from mpishard.record.run_record import RunRecord

__all__ = ["Run", "RunRecord"]
