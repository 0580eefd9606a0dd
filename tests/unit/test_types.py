"""What editors and type checkers know of the public names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import mpishard
from mpishard.data_parallel.configuration import ConfigurationOptions

ROOT = Path(__file__).parents[2]


def test_mypy_takes_right_uses_and_finds_wrong_ones():
    pytest.importorskip("mypy", reason="mypy is not installed (extra: test)")
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", "tests/helpers/typed_uses.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("optimizer", [mpishard.DDPOptimizer, mpishard.LocalSGDOptimizer, mpishard.ElasticOptimizer])
def test_help_shows_the_options_of_optimize(optimizer):
    options = list(inspect.signature(optimizer.optimize).parameters)
    assert options == [
        "self",
        "problem",
        "callback",
        "progress",
        "checkpoints",
        "resume",
        "record",
        "evaluate",
        "stop_early",
    ]


def test_presets_take_every_setting():
    settings = {field.name: field.type for field in fields(mpishard.ShardingConfiguration) if field.name != "mesh"}
    assert ConfigurationOptions.__annotations__.keys() == settings.keys()
    for name, annotation in ConfigurationOptions.__annotations__.items():
        assert annotation.__forward_arg__ == settings[name], name
