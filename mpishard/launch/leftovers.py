"""What MPI libraries leave on this host of a job that was killed: shared memory, and the launcher's folder.

Removed is what is certainly of the job: segments by the names of MPI libraries that a process of it had in its memory
and that no process has any more, and the folder with the launcher's own process number.  Linux only; needs no MPI.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from mpishard.launch.processes import descendants

# From one look to the next, at first and once there is something: some segments are made later than others.
_SOON_S, _EVERY_S = 1.0, 5.0
# By MPICH, Open MPI and UCX; whatever else is there may be the user's.
_SEGMENT = re.compile(r"/dev/shm/(mpich_sh\w+|(sm|vader)_segment\.\S+|ucx_shm_\w+)$")


class Leftovers:
    """Remembers what the processes of one start of a job have in their memory, and removes it after them."""

    def __init__(self) -> None:
        self._segments: set[Path] = set()
        self._next = time.monotonic() + _SOON_S

    def look(self) -> None:
        """At the descendants of this process, now and then."""
        if time.monotonic() >= self._next:
            self._segments |= _mapped(descendants())
            self._next = time.monotonic() + (_EVERY_S if self._segments else _SOON_S)

    def remove(self, launcher: int) -> None:
        """What is left of processes that are dead; `launcher`: the process number of theirs."""
        if self._segments:
            everybody = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
            for path in self._segments - _mapped(everybody):
                with contextlib.suppress(OSError):
                    path.unlink()
        folder = Path(tempfile.gettempdir()) / f"ompi.{launcher}"  # Open MPI's
        with contextlib.suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)


def _mapped(processes: Iterable[int]) -> set[Path]:
    """The segments by which MPI libraries share memory that these processes have in theirs."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                if match := _SEGMENT.search(line):
                    found.add(Path(match[0]))
    return found
