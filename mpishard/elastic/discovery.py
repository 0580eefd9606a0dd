"""Asks a file, a program or a function again and again for the wanted number of workers."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from mpishard.io import files
from mpishard.io.log import warn
from mpishard.launch.hosts import parse_hosts

_POLL_S = 1.0
_LIMIT_S = 30.0


class Discovery:
    """Asks in a thread, so that the run does not wait for the answer.

    `source` is a function without arguments that returns the number; a file with the number, or with hosts whose slots
    add up to it, see `count_slots`; or an executable file that prints one of these.
    """

    def __init__(self, source: Callable[[], int] | str | os.PathLike[str]) -> None:
        if callable(source):
            self._ask = source
        else:
            path = Path(source).absolute()  # a script may change its directory
            self._ask = lambda: _ask_file(path)
        self.known: int = -1  # the last number that the run has got
        self._news: int | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def news(self) -> int | None:
        """The number, once after each change; else None.  The first call starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpishard-discovery", daemon=True)
            self._thread.start()
        with self._lock:
            news, self._news = self._news, None
        if news is not None:
            self.known = news
        return news

    def close(self) -> None:
        """Stop asking, without waiting for an answer that is under way."""
        self._end.set()

    def _run(self) -> None:
        known, problem = self.known, ""
        while not self._end.is_set():
            try:
                found = int(self._ask())
            except Exception as error:  # any failure: the run can continue without the answer
                if str(error) != problem:
                    problem = str(error)
                    warn(f"discover failed, the workers stay as they are: {error}")
            else:
                problem = ""
                if found != known:
                    known = found
                    with self._lock:
                        self._news = found
            self._end.wait(_POLL_S)


def count_slots(text: str) -> int:
    """The number of workers that a host file asks for; ValueError if a line has another form than these.

    The file has one number; or one host per line, as ``NAME``, ``NAME:SLOTS`` or ``NAME slots=SLOTS``, and the number
    is the sum of the slots.  Empty lines and text after a ``#`` are ignored.
    """
    lines = [line.partition("#")[0].strip().replace(" slots=", ":") for line in text.splitlines()]
    lines = [line for line in lines if line]
    if len(lines) == 1 and lines[0].isdecimal():
        return int(lines[0])
    return sum(host.slots for host in parse_hosts(",".join(lines)))


def _ask_file(path: Path) -> int:
    if not os.access(path, os.X_OK):
        return count_slots(files.read(path).decode())
    done = subprocess.run(
        [str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True
    )
    return count_slots(done.stdout)
