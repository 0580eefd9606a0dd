"""Removes what MPI libraries leave on this host after a job was killed: shared memory, and the launcher's folder.

Only leftovers that certainly belong to the job are removed: segments with names of MPI libraries that a process of the
job had mapped and no process maps any more, and the folder with the launcher's own process number.  Linux only; needs
no MPI.
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

# Seconds between two looks, at first and after a segment was found: some segments are made later than others.
_SOON_S, _EVERY_S = 1.0, 5.0
# Segments of MPICH, Open MPI and UCX; other files there may be the user's.
_SEGMENT = re.compile(r"/dev/shm/(mpich_sh\w+|(sm|vader)_segment\.\S+|ucx_shm_\w+)$")


class Leftovers:
    """Remembers the segments that the processes of one start of a job have mapped, and removes them afterwards."""

    def __init__(self) -> None:
        self._segments: set[Path] = set()
        self._next = time.monotonic() + _SOON_S

    def look(self) -> None:
        """Note the segments of the descendants of this process; most calls return at once."""
        if time.monotonic() >= self._next:
            self._segments |= _mapped(descendants())
            self._next = time.monotonic() + (_EVERY_S if self._segments else _SOON_S)

    def remove(self, launcher: int) -> None:
        """Remove the leftovers of dead processes; `launcher` is the process number of their launcher."""
        if self._segments:
            everybody = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
            for path in self._segments - _mapped(everybody):
                with contextlib.suppress(OSError):
                    path.unlink()
        folder = Path(tempfile.gettempdir()) / f"ompi.{launcher}"  # of Open MPI
        with contextlib.suppress(OSError):
            if folder.stat(follow_symlinks=False).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)


def _mapped(processes: Iterable[int]) -> set[Path]:
    """The shared-memory segments of MPI libraries that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                if match := _SEGMENT.search(line):
                    found.add(Path(match[0]))
    return found
