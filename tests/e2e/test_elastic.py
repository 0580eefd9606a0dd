"""A sample of the grid of ``helpers/faults.py``: whichever rank fails, the bits are those of a run without faults."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import asdict

import fault_run
import faults
import launching
import pytest
from variants import quick

LAUNCH = faults.launcher()
pytestmark = [
    pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only"),
]
# Each victim, kind and layout, and most phases.
SAMPLE = [
    ("first", "reduction", "kill", "ZeRO2"),
    ("middle", "agreement", "exception", "DDP"),
    ("last", "all-gather", "stop", "ZeRO3"),
    ("spare", "resize", "exit", "ZeRO1"),
    ("first", "heal", "kill", "ZeRO1"),
    ("last", "forward", "exit", "pipeline"),
    ("spawned", "update", "kill", "tensor"),
    ("middle", "called", "kill", "ZeRO1"),
    ("last", "joined", "kill", "ZeRO1"),
    ("spawned", "joined", "exception", "ZeRO1"),
    ("first", "reported", "kill", "ZeRO1"),
    ("first", "last-save", "kill", "ZeRO1"),
    ("middle", "validation", "kill", "ZeRO3"),
    ("middle", "reduction", "code", "ZeRO1"),
    ("last", "forward", "library", "tensor"),
]
# The survivors of one replica of four processes take another mesh.
MOVES = [
    ("first", "validation", "kill"),
    ("middle", "heal", "kill"),
    ("last", "resize", "stop"),
    ("spawned", "joined", "exception"),
]
AT_ONCE, NEIGHBOURS, RESPAWNED = 1, 2, 3


@functools.cache
def reference(tensor=1, pipeline=1, moves=False):
    return faults.expected(LAUNCH, tensor, pipeline, moves)


def outlives(case):
    ended = faults.run(case, LAUNCH, reference(*faults.reference_of(case)))
    assert not ended.problem, f"{case.name}: {ended.problem}\n{ended.output}"


@pytest.mark.parametrize("parts", quick(SAMPLE, 1), ids=" ".join)
def test_one_process_fails(parts):
    outlives(faults.single(*parts))


@pytest.mark.parametrize("parts", MOVES, ids=" ".join)
def test_the_others_take_another_mesh(parts):
    outlives(faults.moving(*parts))


def test_two_processes_fail_at_once():
    outlives(faults.several("ZeRO3")[AT_ONCE])


def test_one_fails_who_came_for_another():
    outlives(faults.several("ZeRO2")[RESPAWNED])


def test_minimize_goes_on_with_the_same_bits(tmp_path):
    """Ranks are shot within an evaluation, in the callback of an iteration, where x0 is a tree, and in a Hessian."""
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard

rows = np.random.default_rng(5).standard_normal((40, 101))
targets = rows @ np.linspace(-2, 2, 101)
iteration, deadly = 0, ("nowhere", 0, 0)

# "From an iteration on": whoever was slow before is dealt few samples, and may have none to evaluate in one of them.
def shoot(where):
    if (where, MPI.COMM_WORLD.rank) == deadly[:2] and iteration >= deadly[2]:
        os.kill(os.getpid(), signal.SIGKILL)

def part(x, samples):
    shoot("evaluation")
    residual = rows[samples] @ x - targets[samples]
    bend = np.tanh(residual)
    return 0.5 * residual @ residual + bend.sum(), rows[samples].T @ (residual + 1 - bend * bend)

def whole(x):
    return part(x, np.arange(40))

def tree(x):
    return {"a": x[:60].reshape(20, 3), "b": [x[60:]]}

def flat(x):
    return x if isinstance(x, np.ndarray) else np.concatenate([x["a"].reshape(-1), x["b"][0]])

def of_tree(x, samples):
    value, gradient = part(flat(x), samples)
    return value, tree(gradient)

def hess(x, samples):
    shoot("hessian")
    bend = np.tanh(rows[samples] @ x - targets[samples])
    return rows[samples].T @ ((1 - 2 * bend * (1 - bend * bend))[:, None] * rows[samples])

def callback(intermediate_result):
    global iteration
    iteration = intermediate_result.nit
    shoot("callback")

def minimized(mesh, function, samples, start, more):
    options = {"maxiter": 12, "gtol": 0, "ftol": 0}
    found = mpishard.minimize(
        function, start, callback=callback, mesh=mesh, samples=samples, options=options, elastic={"respawn": False},
        **more)
    return flat(found.x).tobytes(), flat(found.jac).tobytes(), found.fun, found.nfev, found.message

start, bounds = np.zeros(101), {"bounds": (-1, 0.6)}
cases = [
    ((part, 40, start, bounds), ("evaluation", 1, 5)),
    ((whole, None, start, bounds), ("callback", 0, 5)),
    ((of_tree, 40, tree(start), bounds), ("evaluation", 2, 5)),
    ((part, 40, start, {"method": "Newton-CG", "hess": hess}), ("hessian", 3, 2)),
]
with mpishard.Mesh(MPI.COMM_SELF) as alone:
    expected = [minimized(alone, *case) for case, _ in cases]
with mpishard.Mesh() as mesh:
    for (case, deadly), undisturbed in zip(cases, expected, strict=True):
        iteration = 0
        same = mesh.world.allgather_object(minimized(mesh, *case) == undisturbed)
        if mesh.rank == 0:
            with open(sys.argv[1], "a") as file:
                print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "5", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 300, lambda: report.exists() and len(report.read_text().splitlines()) == 4)
    assert report.exists(), output
    assert report.read_text() == "".join(f"{[True] * left}\n" for left in (4, 3, 2, 1)), output


def test_groups_that_share_a_partition_go_on_with_the_same_bits(tmp_path):
    """One rank is shot within an evaluation, and its group dropped; then one of another, whose place is taken."""
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard

SIZE = 60
weights, wanted = np.linspace(1, 40, SIZE), np.sin(np.arange(SIZE))
deadly = {1: 4, 2: 8}  # iterations, by rank

class Model:
    def rebuild(self, mesh):
        self.comm = mesh.tensor.comm.Dup()
        self.numbers = np.random.default_rng(1).permutation(SIZE)[self.comm.rank :: self.comm.size]

    def __call__(self, x, samples):
        self.comm.barrier()
        if self.iteration >= deadly.get(MPI.COMM_WORLD.rank, 99) and mesh.size > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        neighbours = self.comm.allgather(x.size)  # ranks wait for each other here, too
        assert sum(neighbours) == SIZE
        r, w = x - wanted[self.numbers], weights[self.numbers]
        factor = float(len(samples) + samples.sum())
        # Multiples of a power of 2 that are far below 2**53: their sums are exact.
        value = np.rint(2.0**30 * factor * w * r**4).sum() * 2.0**-32
        return float(value), factor * np.rint(2.0**30 * w * r**3) * 2.0**-30

def minimized(mesh):
    model = Model()
    model.rebuild(mesh)
    model.iteration = 0

    def callback(intermediate_result):
        model.iteration = intermediate_result.nit

    numbers, first = model.numbers, model.comm
    start = mpishard.Partition(np.zeros(numbers.size), mesh, ids=numbers)
    found = mpishard.minimize(
        model, start, callback=callback, mesh=mesh, samples=6, reduction="sum", bounds=(-0.5, 0.75),
        inner_product=weights[numbers], options={"maxiter": 12, "gtol": 0, "ftol": 0},
        elastic={"respawn": False, "rebuild": model.rebuild})
    assert found.nit == 12 and (mesh.size == 1) == (model.comm is first)
    whole = np.empty(SIZE)
    for theirs, places in mesh.tensor.allgather_object((found.x, numbers)):
        whole[places] = theirs
    return whole.tobytes(), found.fun, found.nfev, found.message

with mpishard.Mesh(MPI.COMM_SELF) as mesh:
    undisturbed = minimized(mesh)
with mpishard.Mesh(tensor=2) as mesh:
    same = mesh.world.allgather_object(minimized(mesh) == undisturbed)
    if mesh.rank == 0:
        with open(sys.argv[1], "a") as file:
            print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "6", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 120, lambda: report.exists() and report.read_text().endswith("\n"))
    assert report.exists() and report.read_text() == f"{[True] * 4}\n", output


def test_least_squares_goes_on_with_the_same_bits(tmp_path):
    """A rank is shot within the residuals of an iteration, then one within a product with its Jacobian."""
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard

slopes = np.random.default_rng(5).standard_normal((40, 21))
targets = np.arctan(slopes @ np.linspace(-1, 1, 21))
iteration, deadly = 0, ("nowhere", 0)

def shoot(where):
    if (where, MPI.COMM_WORLD.rank) == deadly and iteration >= 2:
        os.kill(os.getpid(), signal.SIGKILL)

def residuals(x, samples):
    shoot("residuals")
    return np.arctan(slopes[samples] @ x) - targets[samples]

class Jacobian:
    def __init__(self, x, samples):
        self.rows = slopes[samples] / (1 + (slopes[samples] @ x) ** 2)[:, None]
        self.shape = self.rows.shape

    def matvec(self, v):
        shoot("product")
        return self.rows @ v

    def rmatvec(self, u):
        return self.rows.T @ u

def callback(intermediate_result):
    global iteration
    iteration = intermediate_result.nit

def fitted(mesh):
    found = mpishard.least_squares(
        residuals, np.zeros(21), Jacobian, bounds=(-1.5, 0.9), callback=callback, mesh=mesh, samples=40,
        loss="soft_l1", f_scale=0.1, elastic={"respawn": False}, max_nfev=7, tr_options={"maxcg": 6})
    assert found.nfev == 7 and found.nit > 3, found
    return found.x.tobytes(), found.grad.tobytes(), found.cost, found.nfev, found.nhev, found.message

with mpishard.Mesh(MPI.COMM_SELF) as alone:
    undisturbed = fitted(alone)
with mpishard.Mesh() as mesh:
    for deadly in (("residuals", 1), ("product", 0)):
        iteration = 0
        same = mesh.world.allgather_object(fitted(mesh) == undisturbed)
        if mesh.rank == 0:
            with open(sys.argv[1], "a") as file:
                print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "4", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 240, lambda: report.exists() and len(report.read_text().splitlines()) == 2)
    assert report.exists(), output
    assert report.read_text() == "[True, True, True]\n[True, True]\n", output


def test_augmented_lagrangian_goes_on_with_the_same_bits(tmp_path):
    """Ranks are shot within an evaluation of a later minimisation, after a correction, and within a product."""
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard

rows = np.random.default_rng(5).standard_normal((40, 21))
targets = rows @ np.linspace(-2, 2, 21)
minimizations, deadly = 0, ("nowhere", 0, 0)

def shoot(where):
    if (where, MPI.COMM_WORLD.rank) == deadly[:2] and minimizations >= deadly[2]:
        os.kill(os.getpid(), signal.SIGKILL)

def misfit(x):
    shoot("evaluation")
    residual = rows @ x - targets
    return 0.5 * residual @ residual, rows.T @ residual

def hessp(x, direction, y):
    shoot("product")
    found = rows.T @ (rows @ direction)
    found[:20] -= 2 * y[0] * direction[:20]
    return found

def callback(intermediate_result):
    global minimizations
    minimizations = intermediate_result.nit
    shoot("callback")

def minimized(mesh, more):
    found = mpishard.augmented_lagrangian(
        misfit, np.ones(21), lambda x: [x[:20] @ x[:20] - 9, x.sum() - 1],
        lambda x, v: np.append(2 * v[0] * x[:20], 0) + v[1], lower=[-np.inf, 0], bounds=(-1.5, 1.25),
        callback=callback, mesh=mesh, elastic={"respawn": False}, **more)
    assert found.success and found.nit > 4, found
    arrays = found.x, found.constr, found.multipliers, found.lagrangian_grad
    return *(each.tobytes() for each in arrays), found.fun, found.nfev, found.nit, found.message

newton = {"method": "trust-ncg", "hessp": hessp, "forward": lambda x, d: [2 * x[:20] @ d[:20], d.sum()]}
cases = [({}, ("evaluation", 1, 2)), ({}, ("callback", 0, 3)), (newton, ("product", 2, 1))]
with mpishard.Mesh(MPI.COMM_SELF) as alone:
    expected = [minimized(alone, more) for more, _ in cases]
with mpishard.Mesh() as mesh:
    for (more, deadly), undisturbed in zip(cases, expected, strict=True):
        minimizations = 0
        same = mesh.world.allgather_object(minimized(mesh, more) == undisturbed)
        if mesh.rank == 0:
            with open(sys.argv[1], "a") as file:
                print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "4", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 240, lambda: report.exists() and len(report.read_text().splitlines()) == 3)
    assert report.exists(), output
    assert report.read_text() == "".join(f"{[True] * left}\n" for left in (3, 2, 1)), output


def test_laplace_goes_on_with_the_same_bits(tmp_path):
    """A rank is shot within a product of the first pass, and one within a product of the power iteration."""
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard

rows = np.random.default_rng(5).standard_normal((40, 101))
directions, deadly = [], {1: 6, 0: 21}  # of a rank, and products by rank

def hessp(x, v, samples):
    if not (directions and np.array_equal(v, directions[-1])):
        directions.append(v.copy())
    if len(directions) >= deadly.get(MPI.COMM_WORLD.rank, 99) and mesh.size > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows[samples].T @ (rows[samples] @ v)

def numbers(mesh):
    directions.clear()
    posterior = mpishard.laplace(
        np.ones(101), hessp, mpishard.DiagonalPrior(2.0), rank=12, oversampling=4, power_iterations=1, mesh=mesh,
        samples=40, elastic={"respawn": False})
    found = posterior.eigenvalues, posterior.variance(), *posterior.samples(2)
    return posterior.products, posterior.information_gain, *(each.tobytes() for each in found)

with mpishard.Mesh(MPI.COMM_SELF) as mesh:
    undisturbed = numbers(mesh)
with mpishard.Mesh() as mesh:
    same = mesh.world.allgather_object(numbers(mesh) == undisturbed)
    if mesh.rank == 0:
        with open(sys.argv[1], "a") as file:
            print(same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "4", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 120, lambda: report.exists() and report.read_text().endswith("\n"))
    assert report.exists() and report.read_text() == "[True, True]\n", output


def test_modules_of_pytorch_go_on_with_the_same_bits(tmp_path):
    """One rank after the other is shot while the others gather its share or send it gradients."""
    pytest.importorskip("torch")
    script = """
import os, signal, sys
import torch
from mpi4py import MPI
import mpishard

x = torch.randn(45, 8, generator=torch.Generator().manual_seed(0))
step, deadly = 0, ("nowhere", 0)

def shoot(where):
    if (where, MPI.COMM_WORLD.rank) == deadly and step >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

class Layer(torch.nn.Linear):
    def forward(self, x):
        shoot("forward")
        x = torch.tanh(super().forward(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: shoot("backward"))
        return x

def callback(state):
    global step
    step = state.step

def losses(module, samples):
    return (module(x[samples]) - x[samples].roll(1, 1)).square().mean(1)

def trained(strategy, mesh, elastic=True):
    torch.manual_seed(1)
    module = torch.nn.Sequential(Layer(8, 8), Layer(8, 8), torch.nn.Linear(8, 8))
    divides = strategy is mpishard.ZeRO3Optimizer
    problem = mpishard.torch.problem(
        module, losses, 45, 16, micro_batch_size=3, steps=6,
        **({"mesh": mesh, "shard_units": torch.nn.Linear} if divides else {}))
    config = mpishard.ShardingConfiguration(mesh, reproducible=True)
    optimizer = strategy(mpishard.AdamW(lr=1e-2), config)
    if elastic:
        optimizer = mpishard.ElasticOptimizer(optimizer, respawn=False)
    result = optimizer.optimize(problem, callback=callback, progress=False)
    with mpishard.torch.summon_full_parameters(module):
        values = [p.detach().clone().numpy().tobytes() for p in module.parameters()]
    return values, result.loss_history.tobytes(), result.steps

cases = [
    (mpishard.ZeRO3Optimizer, "forward", 1),
    (mpishard.ZeRO1Optimizer, "backward", 4),
    (mpishard.ZeRO2Optimizer, "backward", 3),
    (mpishard.DDPOptimizer, "forward", 5),
    (mpishard.ZeRO3Optimizer, "backward", 0),
]
with mpishard.Mesh(MPI.COMM_SELF) as alone:
    undisturbed = trained(mpishard.DDPOptimizer, alone, elastic=False)
with mpishard.Mesh() as mesh:
    for strategy, *deadly in cases:
        step, deadly = 0, tuple(deadly)
        same = mesh.world.allgather_object(trained(strategy, mesh) == undisturbed)
        if mesh.rank == 0:
            with open(sys.argv[1], "a") as file:
                print(strategy.__name__, same, file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "6", sys.executable, "-c", script, str(report)]
    output, _ = faults.execute(words, 300, lambda: report.exists() and len(report.read_text().splitlines()) == 5)
    assert report.exists(), output
    cases = (("ZeRO3", 5), ("ZeRO1", 4), ("ZeRO2", 3), ("DDP", 2), ("ZeRO3", 1))
    expected = [f"{name}Optimizer {[True] * ranks}" for name, ranks in cases]
    assert report.read_text().splitlines() == expected, output


def test_the_record_tells_where_a_spare_took_over(tmp_path):
    script = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
import mpishard
from mpishard.record import Run
from mpishard.record.summary import takeovers

def function(parameters, samples, gradients):
    gradients += len(samples) * parameters
    return 0.5 * len(samples) * float(parameters @ parameters)

def callback(state):
    if state.step == 5 and MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

with mpishard.Mesh() as mesh:
    optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh, max_workers=2, respawn=False)
    problem = mpishard.OptimizationProblem(function, np.ones(3), samples=8, batch_size=8, steps=12)
    record = mpishard.RunRecord(sys.argv[1] + "/run", mesh)
    result = optimizer.optimize(problem, callback=callback, progress=False, record=record)
    mesh.world.barrier()  # all have written their lines
    if mesh.rank == 0:
        with open(sys.argv[1] + "/report", "w") as file:
            print(result.steps, mesh.size, takeovers(Run.read(record.folder)), file=file)
"""
    report = tmp_path / "report"
    words = [*LAUNCH, "-n", "3", sys.executable, "-c", script, str(tmp_path)]
    output, _ = faults.execute(words, 120, lambda: report.exists() and report.read_text().endswith("\n"))
    assert report.exists() and report.read_text() == "12 2 [5]\n", output


def test_an_error_of_mpi_that_tells_of_no_death_ends_the_run(tmp_path):
    script = """
import numpy as np
from mpi4py import MPI
import mpishard

def function(parameters, samples, gradients):
    return 0.5 * parameters @ parameters

def callback(state):
    raise MPI.Exception(MPI.ERR_TRUNCATE)

with mpishard.Mesh() as mesh:
    optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
    problem = mpishard.OptimizationProblem(function, np.ones(3), samples=8, batch_size=8, steps=10)
    optimizer.optimize(problem, callback=callback, progress=False)
"""
    output, how = faults.execute([*LAUNCH, "-n", "2", sys.executable, "-c", script], 60)
    assert how == "in order" and "in callback" in output and "MPI_ERR_TRUNCATE" in output, output


def test_a_communicator_with_a_dead_rank_ends_the_run():
    """That of a callback; to heal would not help."""
    script = """
import os, signal
import numpy as np
from mpi4py import MPI
import mpishard

def callback(state):
    if state.step == 3 and MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.allreduce(state.step)

with mpishard.Mesh() as mesh:
    optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh, respawn=False)
    problem = mpishard.OptimizationProblem(lambda p, s, g: 0.0, np.ones(3), samples=8, batch_size=8, steps=9)
    optimizer.optimize(problem, callback=callback, progress=False)
"""
    output, how = faults.execute([*LAUNCH, "-n", "3", sys.executable, "-c", script], 60)
    assert how == "in order" and "RunLost: MPI reports a death after step 3 again and again" in output, output


def test_an_error_of_all_that_the_script_catches_is_no_death():
    """They go on with another run, and end in order."""
    script = """
import numpy as np
import mpishard

spoils = True

def function(parameters, samples, gradients):
    gradients += np.nan if spoils else 1.0
    return 1.0

with mpishard.Mesh() as mesh:
    optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
    problem = mpishard.OptimizationProblem(function, np.ones(3), samples=8, batch_size=8, steps=3)
    try:
        optimizer.optimize(problem, progress=False)
    except FloatingPointError:
        spoils = False
    print("steps:", optimizer.optimize(problem, progress=False).steps, flush=True)
"""
    output, how = faults.execute([*LAUNCH, "-n", "2", sys.executable, "-c", script], 60)
    assert how == "in order" and output.count("steps: 3") == 2 and "leaves the run" not in output, output


def test_neighbours_fail_at_once_and_the_run_begins_again(tmp_path):
    """In place it can only say so; `mpishard run` goes on from the newest checkpoint."""
    case = faults.several("ZeRO1")[NEIGHBOURS]
    outlives(case)
    script = [sys.executable, fault_run.__file__, json.dumps(asdict(case)), str(tmp_path), "100"]
    done = subprocess.run(
        [sys.executable, "-m", "mpishard", "run", "--elastic", "-n", str(case.processes), *script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=launching.environment(),
        timeout=240,
    )
    assert done.returncode == 0, done
    assert "newest checkpoint" in done.stderr and "start 2" in done.stderr, done
    found = [json.loads(file.read_text()) for file in tmp_path.glob("result-*")]
    assert found and all(each == reference() for each in found), found
