"""What the tests without a launcher share besides ``tests/conftest.py``: folders with a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """That of `checkpoint_files`."""
    from checkpoint_files import save

    return save(tmp_path / "step")
