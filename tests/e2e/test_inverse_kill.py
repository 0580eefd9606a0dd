"""An inversion whose job is shot within a product or an evaluation goes on, on more ranks, with the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"

# ``script.py FOLDER SOLVER CALL`` shoots the last rank at a call of the user's function; ``script.py FOLDER`` goes on.
SCRIPT = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
sys.path.insert(0, {helpers!r})
from hock_schittkowski import PROBLEMS
import mpishard

rows = np.random.default_rng(5).standard_normal((50, 20))
targets = rows @ np.linspace(-2, 2, 20) + np.sin(np.arange(50))
folder, name, deadly = (sys.argv[1:] + ["", "0"])[:3]
calls = 0

def called(mesh):
    global calls
    calls += 1
    if calls == int(deadly) and mesh.rank == mesh.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)

def laplace(mesh, **files):
    def product(x, v):
        called(mesh)
        return rows.T @ (rows @ v)

    prior = mpishard.DiagonalPrior(np.linspace(1, 2, 20))
    found = mpishard.laplace(np.zeros(20), product, prior, rank=6, oversampling=2, mesh=mesh, **files)
    return found.eigenvalues, found.variance(), *found.samples(2)

def lsqr(mesh, **files):
    own = slice(*np.linspace(0, 50, mesh.size + 1).astype(int)[mesh.rank : mesh.rank + 2])

    def forward(v):
        called(mesh)
        return (rows[own] * v).sum(axis=1)

    def adjoint(u):  # multiples of 2**-40, whose sums are exact
        return np.rint(rows[own] * u[:, None] * 2.0**40).sum(axis=0) * 2.0**-40

    found = mpishard.lsqr((forward, adjoint), targets[own], x0=np.zeros(20), mesh=mesh, **files)
    return found.x, [found.itn, found.r1norm, found.arnorm]

def augmented_lagrangian(mesh, **files):
    problem = PROBLEMS[43]

    def function(x):
        called(mesh)
        return problem.value_and_gradient(x)

    found = mpishard.augmented_lagrangian(
        function, problem.x0, problem.constraints, problem.adjoint, upper=problem.upper, mesh=mesh, **files)
    return found.x, found.multipliers, [found.fun, found.nfev, found.nit]

def run(solver, mesh):
    with mpishard.Checkpoints(f"{{folder}}/{{solver.__name__}}", mesh, every=3) as checkpoints:
        return solver(mesh, checkpoints=checkpoints, resume=True)

with mpishard.Mesh() as mesh, mpishard.Mesh(MPI.COMM_SELF) as alone:
    if name:
        run(globals()[name], mesh)
    for solver in () if name else (laplace, lsqr, augmented_lagrangian):
        calls = 0
        expected = solver(alone)
        whole, calls = calls, 0
        same = all(map(np.array_equal, run(solver, mesh), expected))
        every = mesh.world.allgather_object((same, whole - calls))
        if mesh.rank == 0:
            print(solver.__name__, *set(every))
"""


@pytest.mark.full
def test_a_job_that_is_shot_goes_on_with_the_same_bits(mpirun, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(helpers=str(HELPERS)))
    # In the second pass, in an iteration, and in a minimisation that is not the first.
    deadly = {"laplace": 12, "lsqr": 8, "augmented_lagrangian": 26}
    with ThreadPoolExecutor(len(deadly)) as pool:
        shot = pool.map(lambda case: mpirun(2, script, tmp_path, *case), deadly.items())
    for name, ended in zip(deadly, shot, strict=True):
        assert ended.code != 0 and (tmp_path / name / "latest").exists(), ended.all
    resumed = mpirun(3, script, tmp_path)
    # By how many calls fewer they made: those before the last save, less one or two by which a resume is checked.
    assert resumed.output.splitlines() == [
        "laplace (True, 9)",
        "lsqr (True, 5)",
        "augmented_lagrangian (True, 22)",
    ], resumed.all
