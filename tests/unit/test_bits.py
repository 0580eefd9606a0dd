"""`tests/helpers/bits.py` compares what it says it does, and runs on other states of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import bits_run
import grid_cases
import h5py
import numpy as np

import mpishard


def test_the_sample_has_every_mesh_stage_schedule_and_rule():
    chosen = bits_run.sample(60)
    assert len(set(chosen)) == 60 and chosen == bits_run.sample(60)
    every = [case for ranks in (1, 2, 3, 4, 6, 8) for case in grid_cases.cases(ranks)]
    for setting in ("zero", "schedule", "rule", "tied", "sequence_parallel"):
        assert {getattr(case, setting) for case in chosen} == {getattr(case, setting) for case in every}
    meshes = [{(case.data, case.tensor, case.pipeline) for case in some} for some in (chosen, every)]
    assert meshes[0] == meshes[1]


def test_the_grid_has_every_schedule():
    assert set(grid_cases.SCHEDULES) == set(mpishard.pipeline.schedule.SCHEDULES)


def test_a_digest_sees_values_dtypes_and_shapes():
    values = [np.zeros(4), -np.zeros(4), np.zeros(4, np.float32), np.zeros(8, np.float32), np.zeros((2, 2))]
    assert len({bits_run.digest(value) for value in values}) == len(values)
    assert bits_run.digest(np.arange(6)[::2]) == bits_run.digest(np.array([0, 2, 4]))
    texts = [np.array([b"some", b"words, " * times], object) for times in (2, 2, 3)]
    first, same, other = map(bits_run.digest, texts)
    assert first == same != other


def test_data_sets_are_compared_but_for_what_is_drawn_anew(tmp_path):
    found = []
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.attrs.update(id=f"{number}", step=number // 2)
            file["b"], file["a/c"], file["text"], file["texts"] = np.arange(3), 1.0, "words", ["some", "words"]
            found.append(dict(bits_run.of_datasets(file)))
    assert list(found[0]) == ["/@", "a/c", "b", "text", "texts"] and found[0] == found[1]
    assert [name for name in found[0] if found[0][name] != found[2][name]] == ["/@"]


def test_modules_that_may_move_are_not_named():
    """States of the package before and after a move have `mpishard` itself, and what README names of it."""
    for name in ("bits.py", "bits_run.py", "launching.py", "grid_cases.py"):
        tree = ast.parse((Path(bits_run.__file__).parent / name).read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not [module for module in modules if module and module.startswith("mpishard.")]
