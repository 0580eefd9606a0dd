"""Audits of jobs as users start them: with deaths that MPI heals, and of two ranks, which end."""

import subprocess
import sys

import faults
import launching
import pytest

LAUNCH = faults.launcher()


@pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only")
def test_one_rank_is_wrong_and_another_one_dies(tmp_path):
    """A module of PyTorch, and a minimisation: the bits are those of one rank, on which nothing happened."""
    pytest.importorskip("torch")
    script = """
import os, signal, sys
import numpy as np
import torch
from mpi4py import MPI
import mpishard

me, step, deadly = MPI.COMM_WORLD.rank, 0, (0, 0)
x = torch.randn(45, 8, generator=torch.Generator().manual_seed(0))
rows, targets = np.random.default_rng(5).standard_normal((40, 31)), np.linspace(-1, 1, 40)

def strike():
    if me == deadly[1] and step >= 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return me == deadly[0] and step == 2

def losses(module, samples):
    found = (module(x[samples]) - x[samples].roll(1, 1)).square().mean(1)
    return found * (1 + 1e-6) if strike() else found

def shots(point, samples):
    residual = rows[samples] @ point - targets[samples]
    bend, wrong = np.tanh(residual), strike()
    return 0.5 * residual @ residual + bend.sum(), (1 + 1e-12 * wrong) * rows[samples].T @ (residual + 1 - bend * bend)

def note(intermediate_result):
    global step
    step = getattr(intermediate_result, "step", None) or intermediate_result.nit

def trained(mesh):
    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    problem = mpishard.torch.problem(module, losses, 44, 16, micro_batch_size=4, steps=8)
    optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=1e-2), mesh, respawn=False, audit=1.0)
    result = optimizer.optimize(problem, callback=note, progress=False)
    return [p.detach().clone().numpy().tobytes() for p in module.parameters()], result.loss_history.tobytes()

def minimized(mesh):
    found = mpishard.minimize(shots, np.zeros(31), bounds=(-1, 0.6), mesh=mesh, samples=40, callback=note,
        options={"maxiter": 10, "gtol": 0, "ftol": 0}, elastic={"respawn": False, "audit": 1.0})
    return found.x.tobytes(), found.jac.tobytes(), found.fun, found.nfev

cases = [(trained, (1, 3)), (minimized, (2, 0))]
deadly = (-1, -1)
with mpishard.Mesh(MPI.COMM_SELF) as alone:
    expected = [run(alone) for run, _ in cases]
with mpishard.Mesh() as mesh:
    for (run, deadly), undisturbed in zip(cases, expected, strict=True):
        step = 0
        same = mesh.world.allgather_object(run(mesh) == undisturbed)
        if mesh.rank == 0:
            with open(sys.argv[1], "a") as file:
                print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "5", sys.executable, "-c", script, str(report)]
    output, _ = launching.execute(words, 300, lambda: report.exists() and len(report.read_text().splitlines()) == 2)
    assert report.exists(), output
    assert report.read_text().splitlines() == [str([True] * 4), str([True] * 3)], output
    assert output.count("computed wrongly by rank") == 2


def test_two_ranks_end_with_code_1_and_name_the_part(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import numpy as np
import mpishard

def function(parameters, samples, gradients):
    gradients += parameters + (mesh.rank == 1 and optimizer.optimizer.clock == 3)
    return 0.5 * float(parameters @ parameters)

mesh = mpishard.Mesh()
optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh, audit=1.0)
optimizer.optimize(mpishard.OptimizationProblem(function, np.ones(3), 8, 8, steps=9), progress=False)
""")
    launcher, _ = launching.mpirun()
    words = [launcher, "-n", "2", sys.executable, str(script)]
    ended = subprocess.run(words, env=launching.environment(), capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 1, ended.stderr
    for part in ("WrongPart", "micro-batch", "of step 4", "rank 0 on", "rank 1 on"):
        assert part in ended.stderr
