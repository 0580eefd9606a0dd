"""Files of JSON objects, one a line: appended as things happen, and readable up to where a crash has cut them.

Lines, and not HDF5 written while it is read: a process killed at any moment costs such a file its last line, an HDF5
file its consistency flags (it does not open again before ``h5clear``), and a line can be read by anything.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpishard.io.files import open_to_append

_END = 65536


class JsonLinesWriter:
    """Appends to a file.  Opened at the first write, since a process may have nothing to say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._waiting: list[str] = []

    def add(self, content: dict[str, Any]) -> None:
        """Keep a line for the next `flush`."""
        # NaN as null: it is no JSON, and a NaN loss must not make a file that others cannot read.
        try:
            line = json.dumps(content, allow_nan=False, default=float)
        except ValueError:
            line = json.dumps(_finite(content), default=_finite_number)
        self._waiting.append(line)

    def flush(self) -> None:
        """Write what waits.

        Raises
        ------
        OSError
            With the path; the lines that waited are gone.
        """
        if not self._waiting:
            return
        data = ("\n".join(self._waiting) + "\n").encode()
        self._waiting.clear()
        try:
            if self._descriptor < 0:
                self._descriptor = open_to_append(self.path)
                data = self._after_a_torn_line() + data
            # In one call, so that those who read meanwhile see whole lines.
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
    """What a file holds from byte `start` on, and where to go on reading; what a crash has cut is left out.

    A last line without its end may still be being written: it is read when it is whole.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(start)
        data = file.read()
        end = data.rfind(b"\n") + 1
        return list(_objects(data[:end])), start + end
    return [], start


def read_end(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file, as far as they lie within its last 64 KiB."""
    size = path.stat().st_size if path.exists() else 0
    return read_lines(path, max(0, size - _END))[0]


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                yield content


def _finite_number(value: Any) -> float | None:
    """What JSON has for a number of NumPy's."""
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
