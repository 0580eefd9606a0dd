"""Which libraries for GPUs are said to be installed, and which to install."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from mpishard.backend.optional_library import device_libraries
from mpishard.environment.findings import cupy_for


def test_versions_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "nvidia-cudnn-cu12": "9.1",
        "nvidia-cudnn-cu13": "9.2",
        "nvidia-nccl-cu12": "2.3",
        "nvmath-python": "1.0",
    }

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert device_libraries() == {"cuDNN": "9.2", "nvmath": "1.0", "NCCL": "2.3"}


def test_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cudnn", "nvidia", "nvmath"):
        monkeypatch.setitem(sys.modules, name, None)
    before = set(sys.modules)
    assert all(isinstance(version, str) for version in device_libraries().values())
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    ("driver", "way_out"),
    [
        ("12.4", "pip install 'mpishard[cuda12x]', as its driver needs"),
        ("14.1", "pip install 'mpishard[cuda13x]', as its driver needs"),
        ("", "pip install 'mpishard[cuda13x or cuda12x]', as its driver needs"),
        ("11.8", "update its driver, which takes CUDA 11.8 at most, to one for CUDA 12 or later"),
    ],
)
def test_the_cupy_that_a_driver_needs_is_one_of_the_extras(driver: str, way_out: str) -> None:
    assert cupy_for(driver) == way_out
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(re.findall(r"cuda\d+x", way_out)) <= set(extras)
