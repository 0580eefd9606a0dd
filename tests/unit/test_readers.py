"""Files are read whole, by several threads where a part is large."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mpishard.io import readers
from mpishard.io.readers import Readers


@pytest.mark.parametrize("cores", [1, 3, 100])
def test_a_part_of_a_file_is_read_by_so_many_threads(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(readers, "own_cores", lambda: set(range(2 * cores)))
    monkeypatch.setattr(readers, "cpu_quota", lambda: 1000.0)
    monkeypatch.setattr(readers, "_LEAST_SHARE", 1000)
    real, calls = readers.read_into, []
    monkeypatch.setattr(readers, "read_into", lambda *arguments: (calls.append(arguments), real(*arguments)))
    whole = np.random.default_rng(0).bytes(100_003)
    (tmp_path / "file").write_bytes(whole)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    with Readers(processes=2) as reading:
        for size in (100_000, 999, 0):
            calls.clear()
            out = np.zeros(size, np.uint8)
            reading.read(file, 3, out)
            assert out.tobytes() == whole[3 : 3 + size]
            assert len(calls) == (min(cores, 8) if size > 1000 else 1)
        with pytest.raises(OSError, match="ends at byte 100003, 2 bytes too early"):
            reading.read(file, 5, np.zeros(100_000, np.uint8))
        assert reading.map(abs, [-1, 2, -3]) == [1, 2, 3]
    os.close(file)
