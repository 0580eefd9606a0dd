"""The text data set: the standard library's source, and windows over a text."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mpishard.data import text as module
from mpishard.data.text import standard_library_text, windows


def library_at(monkeypatch: pytest.MonkeyPatch, folder: Path, archive: Path | None = None) -> None:
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(folder)})
    monkeypatch.setattr(sys, "path", [*([str(archive)] if archive else [])])


def test_standard_library_is_text_and_repeats() -> None:
    text = standard_library_text(500_000)
    assert text.dtype == np.uint8 and text.shape == (500_000,)
    assert np.array_equal(text, standard_library_text(500_000))
    assert np.array_equal(text[:1000], standard_library_text(1000))
    source = text.tobytes().decode("utf-8", "replace")
    assert "import " in source and "def __init__(self" in source


def test_order_is_by_path_and_skips_what_is_not_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.py", "a/z.py", "a/b/c.py", "test/x.py", "a/tests/y.py", "site-packages/p/q.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name};")
    monkeypatch.setattr(module, "LEAST", 1)
    library_at(monkeypatch, tmp_path)
    assert standard_library_text().tobytes() == b"a/b/c.py;a/z.py;b.py;"


def test_zipped_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        archive.writestr("b.py", "b" * module.LEAST)
        archive.writestr("a/test/t.py", "t")
        archive.writestr("a/a.py", "a")
        archive.writestr("c.pyc", "c")
    library_at(monkeypatch, tmp_path / "missing", tmp_path / "library.zip")
    assert standard_library_text().tobytes() == b"a" + b"b" * module.LEAST
    assert standard_library_text(3).tobytes() == b"abb"


def test_library_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("pass")
    library_at(monkeypatch, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"4 bytes of Python source in .* 100000 are needed"):
        standard_library_text()


def test_windows_are_views_shifted_by_one() -> None:
    text = np.arange(23, dtype=np.uint8)
    cut = windows(text, 5)
    assert len(cut) == 4
    assert np.array_equal(cut.inputs.ravel(), np.arange(20)) and np.array_equal(cut.targets, cut.inputs + 1)
    assert np.shares_memory(cut.inputs, text) and not cut.inputs.flags.writeable and text.flags.writeable
    assert len(windows(text, 22)) == 1 and len(windows(text, 1)) == 22


def test_batch_and_split() -> None:
    cut = windows(np.arange(101, dtype=np.uint8), 10)
    train, held_out = cut.split(0.25)
    assert (len(train), len(held_out)) == (8, 2) and held_out.inputs[0, 0] == 80
    inputs, targets = cut.batch(np.array([7, 2]))
    assert inputs[:, 0].tolist() == [70, 20] and targets[:, -1].tolist() == [80, 30]


@pytest.mark.parametrize("length", [0, -1, 10, 11])
def test_windows_of_a_wrong_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"windows of {length} bytes from a text of 10"):
        windows(np.zeros(10, np.uint8), length)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="1-D array of uint8, not 2-D of float64"):
        windows(np.zeros((2, 2)), 1)
    with pytest.raises(ValueError, match="limit_bytes is 0"):
        standard_library_text(0)
    with pytest.raises(ValueError, match="leaves one side of 9 windows empty"):
        windows(np.zeros(10, np.uint8), 1).split(1.0)
