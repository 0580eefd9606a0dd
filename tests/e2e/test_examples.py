"""The examples, run as a user runs them, but shorter."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOPS = [("lora.py", 2, 2), ("fabric.py", 3, 1)]
NAMES = sorted({path.name for path in EXAMPLES.glob("*.py")} - {name for name, *_ in LOOPS})
PNG = b"\x89PNG\r\n"
MISSING = [
    tool
    for tool in ("gfortran", "mpicc")
    if not (shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent)))
]
needs_fortran = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")


# What an example needs and mpishard does not.
NEEDS = {
    "fabric.py": ("torch", "lightning", "sklearn"),
    "jax_model.py": ("jax",),
    "lora.py": ("torch", "transformers", "peft"),
    "torch_model.py": ("torch",),
}


def skip_without(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_help_begins_with_the_line_that_runs_it(name: str, mpirun: Callable[..., Any]) -> None:
    skip_without(*NEEDS.get(name, ()))
    finished = mpirun(1, EXAMPLES / name, "--help")
    assert finished.code == 0, finished.all
    assert f"python examples/{name}" in finished.output and "--seed" in finished.output
    assert (EXAMPLES / name).read_text("utf-8").startswith('"""mpirun -n ')


def test_digits(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, EXAMPLES / "digits.py")
    assert finished.code == 0, finished.all
    assert finished.output.count("PASS") == 1


def test_an_example_that_falls_short_says_so(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(2, EXAMPLES / "digits.py", "--steps", 1)
    assert finished.code != 0
    assert "FAIL" in finished.output and "PASS" not in finished.output


def test_own_gradient(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    finished = mpirun(2, EXAMPLES / "own_gradient.py", "--grid", 24, "--output", tmp_path / "new" / "folder")
    assert finished.code == 0, finished.all
    assert "PASS" in finished.output
    assert (tmp_path / "new" / "folder" / "diffusivity.png").read_bytes().startswith(PNG)


def test_seismic_inversion(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ["--shots", 6, "--bands", 3, "--iterations", 20, "--output", tmp_path]
    finished = mpirun(2, EXAMPLES / "seismic_inversion.py", *sizes, timeout=150)
    assert finished.code == 0, finished.all
    assert "PASS" in finished.output
    assert (tmp_path / "seismic.png").read_bytes().startswith(PNG)


@needs_fortran
def test_fortran_loop(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, EXAMPLES / "fortran_loop.py", timeout=150)
    assert finished.code == 0, finished.all
    assert finished.output.count("PASS") == 1
    assert "converged" in finished.output and "on 3 ranks" in finished.output


@needs_fortran
def test_an_error_of_one_rank_in_fortran_ends_all(mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, EXAMPLES / "fortran_loop.py", "--broken", 399)
    assert finished.code != 0 and "PASS" not in finished.output
    assert "all 3 ranks failed" in finished.errors
    assert finished.errors.count("invert: the misfit of this rank's cells is not finite (status 3)") == 1


@pytest.mark.parametrize("needs", ["deepwave", "devito"])
def test_an_example_says_what_it_needs(needs: str, mpirun: Callable[..., Any]) -> None:
    if importlib.util.find_spec(needs) is not None:
        pytest.skip(f"{needs} is installed")
    finished = mpirun(1, EXAMPLES / f"{needs}_inversion.py")
    assert finished.code == 1 and f"pip install {needs}" in finished.errors


@pytest.mark.parametrize(("name", "ranks", "zero"), LOOPS)
def test_a_loop_of_another_library(mpirun: Callable[..., Any], name: str, ranks: int, zero: int) -> None:
    skip_without(*NEEDS[name])
    finished = mpirun(ranks, EXAMPLES / name, "--zero", zero, timeout=150, HF_HUB_OFFLINE="1")
    assert finished.code == 0, finished.all
    assert finished.output.count("PASS") == 1 and f"zero={zero}, {ranks} ranks" in finished.output


def test_domain_decomposed(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ["--grid", 16, "--steps", 80, "--evaluations", 40]
    finished = mpirun(3, EXAMPLES / "domain_decomposed.py", *sizes, "--output", tmp_path)
    assert finished.code == 0, finished.all
    assert "3 ranks, then 2: 40 evaluations" in finished.output and "PASS: largest error" in finished.output
    refused = mpirun(3, EXAMPLES / "domain_decomposed.py", "--grid", 2)
    assert refused.code == 2 and "--grid 2 leaves some of 3 ranks without a row" in refused.errors


def test_train_elastic(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    finished = mpirun(3, EXAMPLES / "train_elastic.py", "--output", tmp_path)
    assert finished.code == 0, finished.all
    assert "PASS: the same bits as on one rank" in finished.output
    assert (tmp_path / "elastic.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "zero1"), (3, "zero2")])
def test_train_gpt(mpirun: Callable[..., Any], tmp_path: Path, ranks: int, optimizer: str) -> None:
    sizes = ["--steps", 60, "--layers", 1, "--width", 32, "--heads", 2, "--context", 32, "--batch", 33]
    options = [
        *sizes,
        "--lr",
        1e-2,
        "--optimizer",
        optimizer,
        "--sample",
        20,
        "--output",
        tmp_path,
        "--checkpoint-every",
        50,
    ]
    finished = mpirun(ranks, EXAMPLES / "train_gpt.py", *options, timeout=100)
    assert finished.code == 0, finished.all
    assert "PASS" in finished.output
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert (tmp_path / "sample.txt").read_text("utf-8").startswith("def ")
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-00000050", "step-00000060"]
    with h5py.File(checkpoints / "latest" / "index.h5") as file:
        assert file.attrs["step"] == 60 and '"width": 32' in file["json/model"][()].decode()
        assert file["parameters/token_embedding.weight"].shape == (256, 32)
        assert np.isfinite(file["optimizer/exp_avg/token_embedding.weight"]).all()


def test_train_gpt_goes_on_with_other_ranks_in_another_layout(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ["--layers", 2, "--width", 32, "--heads", 2, "--context", 32, "--batch", 33, "--sample", 5]
    ends = []
    for folder, ranks, steps, layout in [
        ("whole", 2, 40, []),
        ("parts", 4, 15, ["--tensor", 2, "--pipeline", 2, "--checkpoint-every", 5]),
        ("parts", 3, 25, ["--optimizer", "zero3", "--resume", "--checkpoint-every", 0.05]),
        ("parts", 2, 40, ["--resume", "--optimizer", "ddp"]),
    ]:
        options = [*sizes, *layout, "--lr", 1e-2, "--steps", steps, "--output", tmp_path / folder]
        finished = mpirun(ranks, EXAMPLES / "train_gpt.py", *options, timeout=100)
        # So few steps may not be enough to pass; that is not what this is about.
        assert "checkpoint readable: True" in finished.output, finished.all
        ends.append(finished.output)
    assert "15 steps in" in ends[3] and "after 25 before the checkpoint" in ends[3]
    starts = [re.findall(r"loss: (\S+) -> ", output)[0] for output in ends]
    assert starts[0] == starts[3]


def test_train_gpt_learns_the_same_in_three_dimensions(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    sizes = ["--steps", 40, "--layers", 2, "--width", 32, "--heads", 2, "--context", 32, "--batch", 33, "--tied"]
    ends = []
    for ranks, layout in [
        (2, []),
        (4, ["--tensor", 2, "--pipeline", 2, "--schedule", "zb-h1", "--sequence-parallel"]),
        (4, ["--pipeline", 2, "--optimizer", "zero3", "--recompute"]),
    ]:
        options = [*sizes, *layout, "--lr", 1e-2, "--sample", 5, "--output", tmp_path]
        finished = mpirun(ranks, EXAMPLES / "train_gpt.py", *options, timeout=100)
        assert finished.code == 0, finished.all
        (loss,) = re.findall(r"loss: \S+ -> (\S+) nats", finished.output)
        ends.append(float(loss))
    assert max(ends) - min(ends) < 0.02, ends


@pytest.fixture(scope="module")
def heat() -> Any:
    return load("own_gradient.py").HeatExperiments(n=6, experiments=5, noise=0.05, smoothness=3.0, seed=1)


def test_adjoint_against_finite_differences(heat: Any) -> None:
    m = 0.3 * np.random.default_rng(0).standard_normal(36)
    samples, unused = np.array([0, 3, 4]), np.zeros(36)
    gradient, numerical = np.zeros(36), np.zeros(36)
    loss = heat.loss_and_gradient(m, samples, gradient)
    for i in range(36):
        step = np.zeros(36)
        step[i] = 1e-5
        up, down = (heat.loss_and_gradient(m + sign * step, samples, unused) for sign in (1, -1))
        numerical[i] = (up - down) / 2e-5
    assert loss > 0
    np.testing.assert_allclose(gradient, numerical, rtol=1e-6, atol=1e-6 * np.abs(numerical).max())


def test_own_gradient_adds_and_samples_sum_to_the_whole(heat: Any) -> None:
    m = np.random.default_rng(2).standard_normal(36)
    whole, parts = np.zeros(36), np.zeros(36)
    loss = heat.loss_and_gradient(m, np.arange(5), whole)
    losses = [heat.loss_and_gradient(m, np.array([sample]), parts) for sample in range(5)]
    assert sum(losses) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12 * np.abs(whole).max())


def test_heat_is_conserved(heat: Any) -> None:
    states = heat.forward(*heat.solvers(*heat.conductances(heat.truth)), heat.initial)
    for _, u in states[1:]:
        np.testing.assert_allclose(u.sum(axis=(0, 1)), heat.initial.sum(axis=(0, 1)), rtol=1e-12)


def test_the_truth_leaves_only_noise(heat: Any) -> None:
    readings = sum(reading.size for reading in heat.readings.values())
    rough = heat.smoothness * 0.5 * sum(np.sum(np.diff(heat.truth.reshape(6, 6), axis=axis) ** 2) for axis in (0, 1))
    loss = heat.loss_and_gradient(heat.truth, np.arange(5), np.zeros(36)) - rough
    assert loss == pytest.approx(readings / 2, rel=5 / np.sqrt(readings))


@pytest.fixture(scope="module")
def acoustic() -> Any:
    sys.path.insert(0, str(EXAMPLES))  # compiled functions are loaded by the name of their module
    try:
        return importlib.import_module("acoustic")
    finally:
        sys.path.remove(str(EXAMPLES))


def shot_of(acoustic: Any, steps: int = 120) -> Any:
    receivers = np.stack([np.full(8, 1), np.arange(0, 24, 3)], axis=1)
    return acoustic.Shot(np.array([[3, 10]]), acoustic.ricker(12.0, steps, 0.003)[:, None], receivers)


def test_derivative_of_sound_is_exact(acoustic: Any) -> None:
    truth, velocity = np.random.default_rng(3).uniform(1.5, 2.5, (2, 18, 24))
    shot, gradients = shot_of(acoustic), []
    for options in ({}, {"kept": 13}, {"history": "float32"}):
        sound = acoustic.Sound((18, 24), 0.02, 0.003, layer=6, **options)
        observed = sound.record(truth, shot).traces
        recording = sound.record(velocity, shot)
        gradients.append(recording.gradient(recording.traces - observed))
        if sound.history == "float64":
            adjoint, taylor = acoustic.check(sound, velocity, shot, observed)
            assert abs(adjoint.forward - adjoint.adjoint) < 1e-12 * abs(adjoint.forward), adjoint
            assert taylor and taylor.order == pytest.approx(2, abs=0.05), taylor
    exact, fewer_kept, rounded = gradients
    np.testing.assert_array_equal(fewer_kept, exact)
    np.testing.assert_allclose(rounded, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


def test_little_comes_back_through_the_matched_layer(acoustic: Any) -> None:
    sound = acoustic.Sound((18, 24), 0.02, 0.003)
    shot, margin = shot_of(acoustic), 40  # cells, so many that nothing comes back within these steps
    wide = acoustic.Sound((18 + 2 * margin, 24 + 2 * margin), 0.02, 0.003)
    moved = acoustic.Shot(shot.source + margin, shot.wavelet, shot.receivers + margin)
    near, far = (
        where.record(np.full(where.shape, 2.0), heard).traces for where, heard in ((sound, shot), (wide, moved))
    )
    assert np.linalg.norm(near - far) < 1e-3 * np.linalg.norm(far)


def test_a_velocity_that_makes_the_scheme_unstable_is_refused(acoustic: Any) -> None:
    with pytest.raises(ValueError, match="stable below 0.55"):
        acoustic.Sound((18, 24), 0.02, 0.003).record(np.full((18, 24), 3.8), shot_of(acoustic))
