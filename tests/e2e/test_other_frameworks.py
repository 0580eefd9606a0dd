"""The examples of PyTorch, JAX, Deepwave and Devito, which compare themselves with their originals, and accelerate."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import launching
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# What the framework works on, where the function of the problem ends: the memory that the optimizer knows.
SHARED = {
    "jax": (
        "        return float(loss)\n",
        "        assert jnp.from_dlpack(parameters).unsafe_buffer_pointer() == parameters.ctypes.data\n"
        "        assert np.from_dlpack(gradient).ctypes.data == gradient.unsafe_buffer_pointer()\n",
    ),
    "torch": (
        "        return loss.item()\n",
        "        for name, p in module.named_parameters():\n"
        "            assert p.data_ptr() == parameters[name].ctypes.data\n"
        "            assert np.shares_memory(parameters[name], parameters.flat)\n",
    ),
}


@pytest.fixture(params=["jax", "torch"])
def framework(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def changed(framework: str, folder: Path, old: str, new: str) -> Path:
    """The example with other lines."""
    source = (EXAMPLES / f"{framework}_model.py").read_text("utf-8")
    assert source.count(old) == 1
    path = folder / "changed.py"
    path.write_text(source.replace(old, new), "utf-8")
    return path


def test_examples_are_short(framework: str) -> None:
    assert len((EXAMPLES / f"{framework}_model.py").read_text("utf-8").splitlines()) < 60


def test_losses_are_those_of_the_original(framework: str, mpirun: Callable[..., Any]) -> None:
    finished = mpirun(3, EXAMPLES / f"{framework}_model.py", "--seed", 3, timeout=100, OMP_NUM_THREADS="1")
    assert finished.code == 0, finished.all
    assert finished.output.count("PASS") == 1 and "on 3 ranks" in finished.output


def test_a_learning_rate_that_differs_by_a_hundredth_is_seen(
    framework: str, tmp_path: Path, mpirun: Callable[..., Any]
) -> None:
    rate = {"jax": "2e-3", "torch": "1e-3"}[framework]
    path = changed(framework, tmp_path, f"mpishard.AdamW(lr={rate})", f"mpishard.AdamW(lr=1.01 * {rate})")
    finished = mpirun(2, path, timeout=100, OMP_NUM_THREADS="1")
    assert finished.code != 0
    assert "FAIL" in finished.output and "PASS" not in finished.output


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ZeRO2Optimizer"), (2, "ZeRO3Optimizer")])
def test_nothing_is_copied(
    framework: str, ranks: int, strategy: str, tmp_path: Path, mpirun: Callable[..., Any]
) -> None:
    end, checks = SHARED[framework]
    path = changed(framework, tmp_path, end, checks + end)
    path.write_text(path.read_text("utf-8").replace("ZeRO2Optimizer", strategy), "utf-8")
    finished = mpirun(ranks, path, timeout=100, OMP_NUM_THREADS="1")
    assert finished.code == 0, finished.all
    assert "PASS" in finished.output


# The loop of docs/how-to/torch-libraries.md, and what takes the place of each line that changes.
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(72, 5).double(), torch.randn(72, 1).double())
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=12)
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for inputs, targets in [*loader] * 3:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    losses.append(loss.item())
print("losses", *losses)
"""
MPISHARD = {
    "from accelerate import Accelerator": "import mpishard\nfrom torch.utils.data import DistributedSampler",
    "accelerator = Accelerator(cpu=True)": "mesh = mpishard.Mesh()",
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)": (
        "optimizer = mpishard.torch.as_distributed(model, mesh, optimizer, zero=1)\n"
        "sampler = DistributedSampler(data, mesh.size, mesh.rank, shuffle=False)\n"
        "loader = DataLoader(data, batch_size=12 // mesh.size, sampler=sampler)"
    ),
    "accelerator.backward(loss)": "loss.backward()",
    "accelerator.clip_grad_norm_(model.parameters(), 0.1)": "optimizer.clip_grad_norm_(0.1)",
    "losses.append(loss.item())": "losses.append(sum(mesh.world.allgather_object(loss.item())) / mesh.size)",
    'print("losses"': 'mesh.rank or print("losses"',
}


def test_the_loop_of_accelerate_has_the_same_losses(tmp_path: Path, mpirun: Callable[..., Any]) -> None:
    pytest.importorskip("accelerate")
    ours = ACCELERATE
    for old, new in MPISHARD.items():
        assert ours.count(old) == 1
        ours = ours.replace(old, new)
    found = []
    for ranks, source in ((1, ACCELERATE), (2, ours)):
        path = tmp_path / f"on_{ranks}.py"
        path.write_text(source, "utf-8")
        finished = mpirun(ranks, path, timeout=100, OMP_NUM_THREADS="1")
        assert finished.code == 0, finished.all
        (line,) = re.findall("^losses (.*)$", finished.output, re.MULTILINE)
        found.append([float(loss) for loss in line.split()])
    assert len(found[0]) == 18 and found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_deepwave_gives_the_same_gradients(mpirun: Callable[..., Any]) -> None:
    pytest.importorskip("deepwave")
    finished = mpirun(2, EXAMPLES / "deepwave_inversion.py", timeout=300, OMP_NUM_THREADS="1")
    assert finished.code == 0, finished.all
    assert finished.output.count("PASS") == 1


ENDS: dict[int, tuple[str, str]] = {}  # by ranks: the value in the end, and a name for all bits


def devito_on(ranks: int, mpirun: Callable[..., Any]) -> tuple[str, str]:
    if ranks not in ENDS:
        finished = mpirun(ranks, EXAMPLES / "devito_inversion.py", timeout=150)
        assert finished.code == 0, finished.all
        ENDS[ranks] = end_of(finished.output)
    return ENDS[ranks]


def end_of(output: str) -> tuple[str, str]:
    (end,) = re.findall(r"evaluations, value (\S+); bits: (\S+)", output)
    return end


@pytest.mark.parametrize("ranks", [2, 3])
def test_devito_finds_the_bits_of_one_rank(ranks: int, mpirun: Callable[..., Any]) -> None:
    pytest.importorskip("devito")
    assert devito_on(ranks, mpirun) == devito_on(1, mpirun)


def test_devito_finds_them_after_a_death(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("devito")
    script = [EXAMPLES / "devito_inversion.py", "--kill", "--output", tmp_path]
    killed = subprocess.run(
        [sys.executable, "-m", "mpishard", "run", "--elastic", "-n", "3", "--", *script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=launching.environment(),
        cwd=tmp_path,
        timeout=170,
        check=False,
    )
    assert killed.returncode == 0 and "rank 2 is shot" in killed.stdout, killed
    assert end_of(killed.stdout) == devito_on(1, mpirun)
