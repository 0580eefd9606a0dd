"""Text as bytes: the source of the standard library, which comes with every Python, and windows over it."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Not the library itself (tests, installed packages, demonstrations), or tables rather than text.
SKIPPED = frozenset(
    {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_bundled",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "turtledemo",
    }
)
LEAST = 100_000  # bytes; a library that has been stripped of its sources has a few files left at most


def standard_library_text(limit_bytes: int | None = None) -> np.ndarray:
    """The Python sources of the running interpreter's standard library, one after the other.

    Not collective: each rank reads the files itself.

    Parameters
    ----------
    limit_bytes : int, optional
        Stop after this many bytes; files beyond are not read. By default all, some 9 MB.

    Returns
    -------
    ndarray of uint8
        Files in the order of their paths, so the same bytes on every rank that runs the same Python.

    Raises
    ------
    ValueError
        If `limit_bytes` is below 1.
    FileNotFoundError
        Where the library has no sources: some distributions ship compiled files only.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"limit_bytes is {limit_bytes}, but a text has at least 1 byte; None reads all")
    archives = [Path(entry) for entry in sys.path if entry.endswith(".zip")]
    return sources_of([Path(sysconfig.get_paths()["stdlib"]), *archives], limit_bytes)


def sources_of(places: Sequence[Path], limit: int | None = None, least: int = LEAST) -> np.ndarray:
    """The Python sources in the first of these folders and archives that has some, as `standard_library_text`.

    FileNotFoundError if they have fewer than `least` bytes.
    """
    text = next((text for text in (_read(place, limit) for place in places) if text), b"")
    wanted = least if limit is None else min(limit, least)
    if len(text) < wanted:
        raise FileNotFoundError(
            f"{len(text)} bytes of Python source in {', '.join(map(str, places))}, but {wanted} are needed: "
            "this Python comes without the sources of its library; take another text or another Python"
        )
    return np.frombuffer(text, dtype=np.uint8)


def _read(place: Path, limit: int | None) -> bytes:
    chunks, size = [], 0
    for _, read in sorted(_sources(place), key=lambda source: source[0]):
        chunks.append(read())
        size += len(chunks[-1])
        if limit is not None and size >= limit:
            break
    return b"".join(chunks)[:limit]


def _sources(place: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(path, reader) of each Python source in a folder or a zip file."""
    if place.is_dir():
        for folder, folders, files in os.walk(place):
            folders[:] = [name for name in folders if name not in SKIPPED]
            for file in (Path(folder, name) for name in files if name.endswith(".py")):
                yield file.relative_to(place).as_posix(), file.read_bytes
    elif zipfile.is_zipfile(place):
        archive = zipfile.ZipFile(place)
        for name in archive.namelist():
            if name.endswith(".py") and SKIPPED.isdisjoint(name.split("/")[:-1]):
                yield name, functools.partial(archive.read, name)


@dataclass(frozen=True)
class Windows:
    """Pieces of a text that do not overlap, each with the same piece one byte on: what follows each byte.

    Make them with `windows`.  No method is collective.

    Parameters
    ----------
    inputs, targets : ndarray of uint8, shape (windows, length), read-only
        Views of the text, so they take no further memory.
    """

    inputs: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The windows with the given numbers, copied.

        Parameters
        ----------
        samples : ndarray of int, shape (n,)
            Numbers of windows, from 0 on.

        Returns
        -------
        (ndarray of uint8, ndarray of uint8)
            Inputs and targets, each of shape (n, length).
        """
        return self.inputs[samples], self.targets[samples]

    def split(self, held_out: float) -> tuple[Windows, Windows]:
        """All but the last windows, and the last.

        Parameters
        ----------
        held_out : float
            The fraction of the windows that goes to the second.

        Returns
        -------
        (Windows, Windows)
            For training and for validation, as views.

        Raises
        ------
        ValueError
            If one of the two would be empty.
        """
        cut = len(self) - round(len(self) * held_out)
        if not 0 < cut < len(self):
            raise ValueError(f"held_out={held_out} leaves one side of {len(self)} windows empty")
        return (
            Windows(self.inputs[:cut], self.targets[:cut]),
            Windows(self.inputs[cut:], self.targets[cut:]),
        )


def windows(text: np.ndarray, length: int) -> Windows:
    """Cut a text into windows; what is left over at the end is not used.

    Not collective.

    Parameters
    ----------
    text : ndarray of uint8, shape (n,)
        The windows are views of it.
    length : int
        Bytes of a window, from 1 to n - 1.

    Returns
    -------
    Windows
        (n - 1) // length of them.

    Raises
    ------
    TypeError
        If the text is not a 1-D array of uint8.
    ValueError
        If the length is not from 1 to n - 1.
    """
    if text.ndim != 1 or text.dtype != np.uint8:
        raise TypeError(f"a text is a 1-D array of uint8, not {text.ndim}-D of {text.dtype}")
    if not 1 <= length < len(text):
        raise ValueError(f"windows of {length} bytes from a text of {len(text)}: take a length of 1 to {len(text) - 1}")
    count = (len(text) - 1) // length
    inputs = text[: count * length].reshape(count, length)
    targets = text[1 : count * length + 1].reshape(count, length)
    for view in (inputs, targets):
        view.flags.writeable = False
    return Windows(inputs, targets)
