"""What the tests without a launcher share besides ``tests/conftest.py``: folders with a small checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """That of `checkpoint_files`, in the version of the format that mpishard writes."""
    from checkpoint_files import save

    return save(tmp_path / "step")


@pytest.fixture(params=[1, 2], ids=["version1", "version2"])
def format_version(request: pytest.FixtureRequest) -> int:
    """Of the format: what mpishard wrote, and what it writes."""
    return request.param


@pytest.fixture
def old_or_new_folder(tmp_path: Path, format_version: int) -> Path:
    """That of `checkpoint_files`, in each version of the format."""
    from checkpoint_files import save

    return save(tmp_path / "step", version=format_version)
