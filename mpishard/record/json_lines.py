"""Files with one JSON object per line, appended during a run, and readable up to the line that a crash has cut.

Not HDF5 that is read while it is written: if a process is killed, such a file loses its last line, but an HDF5 file
does not open again before ``h5clear``.  And any program can read a line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpishard.io.atomic_json import parsed
from mpishard.io.files import open_to_append, open_to_read

_END = 65536
_BLOCK = 2**20
_LONGEST_LINE = 2**26
_MOST = 2**32  # bytes that are read of a file


class JsonLinesWriter:
    """Appends lines to a file, which it opens at the first write: a process may have nothing to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._waiting: list[str] = []

    def add(self, content: dict[str, Any]) -> None:
        """Keep a line for the next `flush`."""
        # NaN becomes null: JSON has no NaN, and a loss of NaN must not make the file unreadable.
        try:
            line = json.dumps(content, allow_nan=False, default=float)
        except ValueError:
            line = json.dumps(_finite(content), default=_finite_number)
        self._waiting.append(line)

    def flush(self) -> None:
        """Write all lines that wait.  Raises OSError with the path; the lines are lost then."""
        if not self._waiting:
            return
        data = ("\n".join(self._waiting) + "\n").encode()
        self._waiting.clear()
        try:
            if self._descriptor < 0:
                self._descriptor = open_to_append(self.path)
                data = self._after_a_torn_line() + data
            # In one call, so that concurrent readers see whole lines.
            if os.write(self._descriptor, data) < len(data):
                raise OSError(28, os.strerror(28))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Flush and close; a later `flush` opens the file again."""
        try:
            self.flush()
        finally:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _after_a_torn_line(self) -> bytes:
        size = os.fstat(self._descriptor).st_size
        return b"\n" if size and os.pread(self._descriptor, 1, size - 1) != b"\n" else b""


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read a file from byte `start` on; returns its objects, and the byte at which to continue.

    Lines that a crash has cut are left out.  A last line without its end may be incomplete; it is read later.  Raises
    OSError with the path if it is no file, or no file of lines.
    """
    found: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError), os.fdopen(open_to_read(path, start + _MOST), "rb") as file:
        file.seek(start)
        waiting: list[bytes] = []  # of a line whose end is not read yet
        while block := file.read(_BLOCK):
            lines, end, rest = block.rpartition(b"\n")
            if end:
                data = b"".join([*waiting, lines, end])
                found += _objects(data)
                start += len(data)
                waiting.clear()
            waiting.append(rest)
            if sum(map(len, waiting)) > _LONGEST_LINE:
                raise OSError(errno.EFBIG, f"it has a line of more than {_LONGEST_LINE} bytes", str(path))
    return found, start


def read_end(path: Path) -> list[dict[str, Any]]:
    """The lines within the last 64 KiB of a file."""
    size = path.stat().st_size if path.exists() else 0
    return read_lines(path, max(0, size - _END))[0]


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            content = parsed(line)
            if isinstance(content, dict):
                yield content


def _finite_number(value: Any) -> float | None:
    """A NumPy number as a value for JSON."""
    number: float | None = _finite(float(value))
    return number


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and (content != content or content in (float("inf"), float("-inf"))):
        return None
    return content
