"""Each public collective call with another argument on one rank: an error on all ranks, for which none waits."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import odd_rank
import pytest
from mpi4py import MPI
from odd_rank import LIMIT_S, Made, assert_raised_on_all, odd

import mpishard
from mpishard import (
    LBFGSB,
    SGD,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    Evaluation,
    FlatParameters,
    HybridShardedOptimizer,
    LocalSGDOptimizer,
    Mesh,
    OptimizationProblem,
    ParameterSpec,
    ReverseCommunication,
    RunRecord,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.data import TokenData, TokenFile
from mpishard.layout.run_state import RunState
from mpishard.nn import GPT, export_pretrained, import_pretrained


class Place:
    """What the calls are made on.  All of it is there before: one rank's arguments may need less than the others'."""

    def __init__(self, mesh: Mesh, debug: Mesh, folder: Path) -> None:
        self.mesh, self.folder = mesh, folder
        self.debug = debug  # another mesh, in the debug mode
        self.checkpoints = Checkpoints(folder / "checkpoints", mesh)
        self.record = RunRecord(folder / "record", mesh)
        self.trained = DDPOptimizer(SGD(lr=0.1), mesh)  # has taken a step
        self.trained.step(np.zeros(4), np.ones(4))
        self.saved = folder / "saved"  # has a checkpoint
        mpishard.save_checkpoint(self.saved, np.zeros(4), self.trained)
        self.method = ZeRO1Optimizer(LBFGSB(maxiter=2), mesh)  # has ended
        self.method.optimize(problem(), progress=False)
        self.inverse = minimize(self, options={"hess_inv": True}).hess_inv
        # Each rank has a part of the model, and its weights are in the folder, too.
        tensor = mesh.reshaped(tensor=mesh.size)
        heads, width = mesh.size, 8 * mesh.size
        self.model = GPT(vocabulary_size=16, context_length=8, layers=1, heads=heads, width=width, mesh=tensor)
        export_pretrained(self.model, folder / "pretrained")
        if mesh.rank == 0:
            np.arange(64, dtype=np.uint16).tofile(folder / "tokens.bin")
        mesh.world.barrier()
        self.tokens = TokenFile(folder / "tokens.bin")

    def state(self, step: int) -> RunState:
        captured = self.trained.state.capture()
        return RunState(captured.specs, captured.shards, {"step": step})


@pytest.fixture(scope="module")
def place(comm, tmp_path_factory):
    if comm.size == 1:
        pytest.skip("one rank differs from none")
    if comm.size > 3:
        pytest.skip("slow where cores are few, and nothing new")
    folder = Path(comm.bcast(tmp_path_factory.mktemp("odd")))
    with Mesh(comm, timeout=LIMIT_S) as mesh, Mesh(comm, timeout=LIMIT_S, debug=True) as debug:
        made = Place(mesh, debug, folder)
        yield made
        made.checkpoints.close()
        made.record.close()


# The calls, each as ranks make it, with the arguments that one of them gives otherwise.


def sphere(x):
    return float(x @ x), 2 * x


def residuals(x):
    return x - 1


def of_samples(parameters, samples, gradients):
    gradients += parameters * len(samples)
    return float(len(samples))


def loss_of_samples(parameters, samples):
    return float(len(samples))


def problem(**options):
    return OptimizationProblem(of_samples, np.ones(4), 8, 8, **({"steps": 2} | options))


def parameters(size=4):
    return FlatParameters((ParameterSpec("w", (size,)),))


class Model:
    def __init__(self, size=4):
        self.parameters = parameters(size)

    def loss_and_gradient(self, *batch):
        return 0.0


def laplace(at, result=(1.0, 1.0, 1.0, 1.0), prior=None, rank=2, **other):
    prior = mpishard.DiagonalPrior(1.0) if prior is None else prior
    return mpishard.laplace(np.array(result), lambda x, v: v, prior, rank=rank, mesh=at.mesh, **other)


def laplace_of_operators(at, precision=1.0, solve=1.0, factor=1.0):
    def times(number):
        return None if number is None else lambda v: number * v

    laplace(at, prior=mpishard.OperatorPrior(times(precision), times(solve), times(factor)))


def minimize(at, **other):
    return mpishard.minimize(sphere, np.ones(4), mesh=at.mesh, **other)


FIT = {"cost": 2.0, "fun": np.ones(4), "jac": np.arange(8.0).reshape(4, 2) % 3}


def least_squares(at, **other):
    return mpishard.least_squares(residuals, np.zeros(3), mesh=at.mesh, **other)


def grid_prior_on(at, x=np.zeros(12), **other):  # noqa: B008
    mpishard.BiLaplacianPrior((3, 4), **({"correlation_length": 2.0} | other)).on(x, at.mesh)


def linear(solver):
    def call(at, A=((1.0, 2.0), (0.0, 1.0)), b=(1.0, 3.0), **other):
        return solver(np.array(A), b, mesh=at.mesh, **other)

    return call


def augmented(at, **other):
    def along_x(x, y):
        return np.full(4, y[0])

    return mpishard.augmented_lagrangian(sphere, np.ones(4), lambda x: [x.sum() - 1], along_x, mesh=at.mesh, **other)


def step(at, parameters=None, gradients=None, count=None):
    parameters = np.zeros(4) if parameters is None else parameters
    DDPOptimizer(SGD(lr=0.1), at.mesh).step(parameters, np.ones(4) if gradients is None else gradients, count=count)


def optimize(at, problem=problem(), **other):  # noqa: B008
    return DDPOptimizer(SGD(lr=0.1), at.mesh).optimize(problem, progress=False, **other)


def elastic(at, optimizer=None, **other):
    with Mesh(at.mesh.world.comm, timeout=LIMIT_S) as mesh:
        ElasticOptimizer(SGD(lr=0.1) if optimizer is None else optimizer, mesh, **other)


def elastic_optimize(at, problem=problem(), **other):  # noqa: B008
    with Mesh(at.mesh.world.comm, timeout=LIMIT_S) as mesh:
        ElasticOptimizer(SGD(lr=0.1), mesh).optimize(problem, progress=False, **other)


def save(at, parameters=None, folder=None, **other):
    parameters = np.zeros(4) if parameters is None else parameters
    mpishard.save_checkpoint(folder or at.folder / "new", parameters, at.trained, **other)


def load(at, parameters=None, folder=None, **other):
    parameters = np.zeros(4) if parameters is None else parameters
    mpishard.load_checkpoint(folder or at.saved, parameters, mesh=at.mesh, **other)


def asked(at, then):
    optimizer = ReverseCommunication("L-BFGS-B", np.ones(4), mesh=at.mesh)
    optimizer.ask()
    then(optimizer)


def mesh_of(at, **other):
    Mesh(at.mesh.world.comm, **({"timeout": LIMIT_S} | other)).free()


def started(at, how, **other):
    """A collective of an axis in the debug mode."""
    arguments = {"buffer": np.ones(2 * at.mesh.size)} | ({"out": np.ones(2 * at.mesh.size)} if "to_all" in how else {})
    found = getattr(at.debug.world, how)(**(arguments | other))
    if how.startswith("start"):
        found.wait()


def collectives():
    """Those of an axis, which are compared in the debug mode alone."""
    shorter, other = Made(lambda at: np.ones(at.mesh.size)), Made(lambda at: np.ones(2 * at.mesh.size, "f"))
    given = {
        "all_reduce": ({"op": "max"}, {"buffer": shorter}),
        "reduce_scatter": ({"op": "max"}, {"buffer": shorter}),
        "all_gather": ({"buffer": shorter},),
        "broadcast": ({"root": 1}, {"buffer": shorter}),
        "all_to_all": ({"buffer": other, "out": other},),
    }
    for start in ("", "start_"):
        for name, others in given.items():
            how = start + name
            yield from odd(
                f"mpishard.Axis.{how}", functools.partial(started, how=how), *((each, name) for each in others)
            )


OPTIMIZER = "mpishard.data_parallel.sharded_optimizer.ShardedOptimizer"
CHECKPOINTS, RECORD = Made(lambda at: at.checkpoints), Made(lambda at: at.record)
TABLE = [
    *odd(
        "mpishard.Mesh",
        mesh_of,
        {"debug": True},
        {"debug": 3},
        ({"timeout": -1.0}, "-1"),
        {"tensor": MPI.COMM_WORLD.size},
        {"tensor": 7},
        {"space": MPI.COMM_SELF},
        {"space": 3},
    ),
    *odd(
        "mpishard.Mesh.reshaped",
        lambda at, **other: at.debug.reshaped(**other),
        {"tensor": MPI.COMM_WORLD.size},
        {"tensor": 7},
    ),
    *odd(
        "mpishard.Axis.subgroup",
        lambda at, ranks=(0,): at.mesh.world.subgroup("some", ranks),
        ({"ranks": (0, 1)}, "subgroup"),
    ),
    *odd(
        "mpishard.Axis.split",
        lambda at, name="a", color=0: at.mesh.world.split(name, color),
        ({"name": "b"}, "'b'"),
        *({"color": color} for color in (-1, "a", 2**40)),
    ),
    *collectives(),
    *odd(
        "mpishard.minimize",
        minimize,
        {"method": "CG"},
        {"method": "none"},
        {"reduction": "sum"},
        {"reduction": "max"},
        ({"options": {"gtol": 1e-3}}, "gtol"),
        ({"options": {"retries": 2}}, "retries"),
        ({"options": {"hess_inv": True}}, "hess_inv"),
        ({"options": {"return_all": True}}, "return_all"),
        {"jac": "2-point"},
        {"bounds": (0, 1)},
        {"bounds": 3},
        {"elastic": True},
        {"elastic": 3},
        {"resume": True},
        {"checkpoints": CHECKPOINTS},
        {"checkpoints": 3},
        {"record": RECORD},
        {"record": 3},
        {"constraints": {"type": "eq", "fun": sum}},
        {"constraints": {"type": "le", "fun": sum}},
    ),
    *odd(
        "mpishard.inverse.InverseHessian.matvec",
        lambda at, v=np.ones(4): at.inverse.matvec(v),  # noqa: B008
        ({"v": np.zeros(4)}, "v is"),
        ({"v": np.zeros(3)}, "v has 3 elements"),
    ),
    *odd(
        "mpishard.Partition",
        lambda at, local=np.zeros(3), **other: mpishard.Partition(local, at.mesh, **other),  # noqa: B008
        ({"local": np.zeros(4)}, "values of each rank"),
        ({"local": np.zeros(3, "f")}, "dtype of local"),
        {"local": "a"},
        {"ids": np.arange(3)},
        {"ids": np.arange(4)},
        {"shape": (3,), "box": ((0, 3),)},
        {"shape": (3,), "box": ((0, 4),)},
    ),
    *odd(
        "mpishard.BiLaplacianPrior.on",
        grid_prior_on,
        {"correlation_length": 3.0},
        ({"x": np.zeros(11)}, "11.*3, 4"),
        ({"x": {"a": np.zeros(12)}}, "one field"),
        {"mean": np.zeros(3)},
        {"standard_deviation": 2.0},
    ),
    *odd(
        "mpishard.least_squares",
        least_squares,
        {"method": "lm"},
        {"loss": "huber"},
        {"loss": "none"},
        {"max_nfev": 3},
        {"tr_solver": "cg"},
        {"jac_sparsity": np.ones((3, 3))},
        {"preconditioner": 2.0},
        {"tr_options": {"maxcg": 3}},
        {"elastic": True},
        {"resume": True},
        {"checkpoints": CHECKPOINTS},
        {"record": RECORD},
        {"record": 3},
    ),
    *(
        case
        for name in ("lsqr", "cgls")
        for case in odd(
            f"mpishard.{name}",
            linear(getattr(mpishard, name)),
            {"damp": 0.5},
            {"damp": -1},
            {"atol": 1e-3},
            {"iter_lim": 1},
            {"calc_var": True},
            ({"b": (1.0,)}, "b 1 elements"),
            ({"A": ((1.0,), (2.0,))}, "columns of A"),
            {"x0": np.ones(2)},
            {"resume": True},
            {"checkpoints": CHECKPOINTS},
            {"record": RECORD},
        )
    ),
    *odd(
        "mpishard.covariance",
        lambda at, x=(1.0, 2.0), **other: mpishard.covariance({**FIT, "x": np.array(x)}, mesh=at.mesh, **other),
        {"absolute_sigma": True},
        {"absolute_sigma": 3},
        {"x": (1.0, 3.0)},
        ({"x": (1.0, 2.0, 3.0)}, "3 unknowns"),
    ),
    *odd(
        "mpishard.laplace",
        laplace,
        {"rank": 3},
        {"rank": 0},
        {"oversampling": 0},
        {"power_iterations": 1},
        {"seed": 1},
        {"prior": mpishard.OperatorPrior(np.positive, np.positive)},
        {"prior": 3},
        ({"prior": mpishard.DiagonalPrior(np.array([1.0, 1.0, 1.0, 2.0]))}, "prior.variance is 1 on ranks? 0"),
        ({"prior": mpishard.DiagonalPrior(1.0, mean=2.0)}, "prior.mean is None on ranks? 0.*2 on rank"),
        ({"result": np.ones(5)}, "x0 is"),
        {"reduction": "sum"},
        {"elastic": True},
        {"resume": True},
        {"checkpoints": CHECKPOINTS},
        {"record": RECORD},
    ),
    *odd(
        "mpishard.laplace",
        laplace_of_operators,
        ({"precision": 1.01}, r"prior.precision\(v\) is \S+ on rank 0 and \S+ on rank"),
        ({"solve": 1.01}, "prior.covariance"),
        ({"factor": 1.01}, "prior.factor"),
        ({"factor": None}, "prior.factor is True on ranks? 0"),
    ),
    *odd(
        "mpishard.inverse.LaplacePosterior.samples",
        lambda at, n=1, **other: laplace(at).samples(n, **other),
        {"n": 2},
        {"n": -1},
        {"seed": 1},
    ),
    *odd(
        "mpishard.inverse.posterior.PosteriorCovariance.matvec",
        lambda at, size=4: laplace(at).covariance.matvec(np.ones(size)),
        ({"size": 3}, "3 elements"),
    ),
    *odd(
        "mpishard.augmented_lagrangian",
        augmented,
        {"method": "CG"},
        {"penalty": 20.0},
        {"penalty": -1},
        {"reduction": "sum"},
        {"multipliers": [0.0]},
        {"upper": -1.0},
        {"elastic": True},
        {"checkpoints": CHECKPOINTS},
        {"record": RECORD},
    ),
    *odd(
        "mpishard.ReverseCommunication",
        lambda at, method="CG", **other: ReverseCommunication(method, np.ones(4), mesh=at.mesh, **other),
        {"method": "L-BFGS-B"},
        {"method": "none"},
        {"reduction": "sum"},
    ),
    *odd(
        "mpishard.ReverseCommunication.stop",
        lambda at, reason="seconds": asked(at, lambda optimizer: optimizer.stop(reason)),
        {"reason": "callback"},
    ),
    *odd(
        "mpishard.ReverseCommunication.tell",
        lambda at, value=1.0, gradient=(1, 1, 1, 1): asked(at, lambda optimizer: optimizer.tell(value, gradient)),
        {"value": "much"},
        {"gradient": np.ones(3)},
        ({"gradient": np.ones(4) / 2}, "gradient"),
    ),
    *odd(
        "mpishard.ReverseCommunication.save",
        lambda at, folder="new": asked(at, lambda optimizer: optimizer.save(at.folder / folder)),
        {"folder": "other"},
    ),
    *odd(
        "mpishard.ReverseCommunication.load",
        lambda at, folder="saved": asked(at, lambda optimizer: optimizer.load(at.folder / folder)),
        {"folder": "other"},
    ),
    *odd(
        "mpishard.ReverseCommunication.tell_product",
        lambda at, how="tell", given=(1, (1, 1, 1, 1)): asked(at, lambda each: getattr(each, how)(*given)),
        ({"how": "tell_product", "given": [np.ones(4)]}, "product"),
    ),
    *odd(
        "mpishard.map_runs",
        lambda at, cases=(1, 2), **other: mpishard.map_runs(lambda case, mesh: case, cases, at.mesh, **other),
        ({"cases": (1, 3)}, "case 1"),
        ({"cases": (1, 2, 3)}, "case 2"),
        ({"cases": 3}, "cases=3"),
        {"ranks_each": MPI.COMM_WORLD.size},
        {"ranks_each": 7},
        {"folder": "runs"},
        {"resume": True},
    ),
    *odd(
        "mpishard.check_gradient",
        lambda at, x=(1.0, 2.0), **other: mpishard.check_gradient(
            sphere, np.array(x), mesh=at.mesh, disp=False, **other
        ),
        {"x": (1.0, 2.0, 3.0)},
        {"reduction": "sum"},
        {"seed": 3},
        {"steps": 3},
        {"hessp": lambda x, direction: 2 * direction},
    ),
    *odd(
        "mpishard.check_adjoint",
        lambda at, **other: mpishard.check_adjoint(
            lambda x: x, lambda y: y, np.ones(2), np.ones(2), mesh=at.mesh, **({"disp": False} | other)
        ),
        {"seed": 3},
        {"tolerance": -1},
        {"disp": 3},
    ),
    *odd(
        "mpishard.Checkpoints",
        lambda at, folder="new", **other: Checkpoints(at.folder / folder, at.mesh, **other).close(),
        {"folder": "other"},
        {"keep": 3},
        {"keep": 0},
        {"every": 0.5},
        {"asynchronous": True},
        {"compression": "none"},
    ),
    *odd(
        "mpishard.Checkpoints.save",
        lambda at, state=None, **other: at.checkpoints.save(at.state(1) if state is None else state, **other),
        {"state": 3},
        ({"state": Made(lambda at: at.state(2))}, "step"),
        ({"state": Made(lambda at: at.trained.state.capture())}, "facts"),
        {"asynchronous": True},
        {"best": True},
    ),
    *odd(
        "mpishard.Checkpoints.load",
        lambda at, state=None: at.checkpoints.load(at.state(1) if state is None else state),
        {"state": 3},
    ),
    *odd(
        "mpishard.save_checkpoint",
        save,
        ({"parameters": np.zeros(5)}, "parameters"),
        ({"parameters": "none"}, "parameters"),
        {"folder": "other"},
        {"keep": 3},
        {"compression": "none"},
        {"facts": {"steps": 3}},
    ),
    *odd("mpishard.load_checkpoint", load, {"parameters": np.zeros(5)}, {"parameters": 3}, {"folder": "other"}),
    *odd(
        "mpishard.reshard_state",
        lambda at, target=None, **other: mpishard.reshard_state(
            at.mesh.world, at.trained.state.capture(), target or at.trained.state.capture(), **other
        ),
        {"bucket_bytes": 0},
        {"target": 3},
    ),
    *odd(
        "mpishard.RunRecord.begin",
        lambda at, **other: at.record.begin(**other),
        {"facts": 3},
        {"stage": True},
    ),
    *odd(
        "mpishard.ElasticOptimizer",
        elastic,
        {"layouts": [{}]},
        {"layouts": 3},
        {"folder": "other"},
        {"min_workers": 2},
        {"min_workers": 0},
        {"scaling": "linear"},
        {"respawn": False},
        {"rebuild": print},
        {"rebuild": 3},
        {"audit": 0.5},
        {"audit": 2},
        ({"optimizer": 3}, "rule"),
    ),
    *odd(
        "mpishard.ElasticOptimizer.optimize",
        elastic_optimize,
        ({"problem": lambda mesh: problem()}, "layouts"),
        ({"problem": 3}, "int"),
        ({"problem": problem(steps=3)}, "steps"),
        {"checkpoints": CHECKPOINTS},
        {"resume": True},
        {"record": RECORD},
    ),
    *odd(
        f"{OPTIMIZER}.optimize",
        optimize,
        ({"problem": 3}, "int"),
        ({"problem": problem(steps=3)}, "steps"),
        {"checkpoints": CHECKPOINTS},
        {"checkpoints": 3},
        {"resume": True},
        {"record": RECORD},
        ({"evaluate": Evaluation(loss_of_samples, 4, every=1)}, "evaluation"),
        {"callback": 3},
    ),
    *odd(
        "mpishard.OptimizationProblem.minimize",
        lambda at, **other: problem().minimize(DDPOptimizer(SGD(lr=0.1), at.mesh), **({"progress": False} | other)),
        {"checkpoints": CHECKPOINTS},
        {"progress": 3},
    ),
    *odd(
        f"{OPTIMIZER}.step",
        step,
        ({"parameters": np.zeros(5)}, "parameters"),
        {"parameters": 3},
        {"gradients": np.ones(3)},
        {"count": 3.0},
        {"count": -1.0},
        {"count": "all"},
    ),
    *odd(
        f"{OPTIMIZER}.bind",
        lambda at, size=4: DDPOptimizer(SGD(lr=0.1), at.mesh).bind(parameters(size)),
        ({"size": 5}, "parameters"),
    ),
    *odd(
        f"{OPTIMIZER}.deserialize",
        lambda at, data=None: at.trained.deserialize(at.trained.serialize() if data is None else data),
        ({"data": b""}, "state"),
    ),
    *odd(
        f"{OPTIMIZER}.serialize",
        lambda at, optimizer=None: (optimizer or at.trained).serialize(),
        ({"optimizer": Made(lambda at: DDPOptimizer(SGD(lr=0.1), at.mesh))}, "first step"),
    ),
    *odd(
        f"{OPTIMIZER}.synchronize_optimizer_state",
        lambda at, optimizer=None: (optimizer or at.trained).synchronize_optimizer_state(),
        ({"optimizer": Made(lambda at: DDPOptimizer(SGD(lr=0.1), at.mesh))}, "step"),
    ),
    *odd(
        f"{OPTIMIZER}.begin_stage",
        lambda at, **other: at.method.begin_stage(**other),
        {"keep_history": True},
        {"keep_history": 3},
    ),
    *odd(
        "mpishard.ShardingConfiguration",
        lambda at, **other: ShardingConfiguration(at.mesh, **other),
        {"reproducible": True},
        {"max_gradient_norm": -1.0},
        {"gradient_compressor": 3},
    ),
    *(
        each
        for name in ("create_for_high_bandwidth", "create_for_low_bandwidth")
        for each in odd(
            f"mpishard.ShardingConfiguration.{name}",
            lambda at, name=name, **other: getattr(ShardingConfiguration, name)(at.mesh, **other),
            {"max_gradient_norm": 1.0},
            {"sync_every": 0},
        )
    ),
    *odd(
        "mpishard.ShardingConfiguration.of",
        lambda at, given=None: ShardingConfiguration.of(given or at.mesh),
        ({"given": Made(lambda at: ShardingConfiguration(at.mesh, sync_every=2))}, "sync_every"),
    ),
    *odd(
        OPTIMIZER,
        lambda at, kind=DDPOptimizer: kind(SGD(lr=0.1), at.mesh),
        ({"kind": ZeRO1Optimizer}, "optimizer is DDPOptimizer"),
    ),
    *(
        each
        for kind in (DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer)
        for each in odd(
            f"mpishard.{kind.__name__}",
            lambda at, kind=kind, rule=SGD(lr=0.1), given=None: kind(rule, given or at.mesh),  # noqa: B008
            {"rule": 3},
            ({"given": Made(lambda at: ShardingConfiguration(at.mesh, sync_every=2))}, "sync_every"),
        )
    ),
    *odd(
        "mpishard.LocalSGDOptimizer",
        lambda at, **other: LocalSGDOptimizer(SGD(lr=0.1), at.mesh, **other),
        {"sync_every": 3},
        {"sync_every": 0},
        {"outer": 3},
    ),
    *odd(
        "mpishard.HybridShardedOptimizer",
        lambda at, **other: HybridShardedOptimizer(SGD(lr=0.1), at.mesh, **other),
        {"zero_stage": 2},
        {"zero_stage": 4},
        {"tensor_parallel_size": MPI.COMM_WORLD.size},
    ),
    *(
        each
        for name in ("ShardedModel", "HybridShardedModel", "as_distributed")
        for each in odd(
            f"mpishard.{name}",
            lambda at, name=name, model=None, **other: getattr(mpishard, name)(
                model or Model(), ShardingConfiguration(at.mesh, **other)
            ),
            ({"model": Model(5)}, "parameters"),
            ({"model": 3}, "parameters"),
            {"reproducible": True},
        )
    ),
    *(
        each
        for name in ("as_distributed_for_high_bandwidth", "as_distributed_for_low_bandwidth")
        for each in odd(
            f"mpishard.{name}",
            lambda at, name=name, model=None, **other: getattr(mpishard, name)(model or Model(), at.mesh, **other),
            ({"model": Model(5)}, "parameters"),
            {"max_gradient_norm": 1.0},
            {"sync_every": 0},
        )
    ),
    *odd(
        "mpishard.data.TokenData",
        lambda at, sources=None, context_length=8, **other: TokenData(
            sources or at.tokens, context_length, mesh=at.mesh, **other
        ),
        {"sources": Made(lambda at: [at.tokens, at.tokens])},
        ({"sources": 3}, "3"),
        {"context_length": 4},
        {"context_length": 0},
        {"vocabulary_size": 64},
        {"check": False},
    ),
    *odd(
        "mpishard.nn.Decoder.generate",
        lambda at, count=2, **other: at.model.generate([1, 2], count, **other),
        {"count": 3},
        {"count": -1},
        {"seed": 3},
        {"temperature": -1.0},
    ),
    *odd(
        "mpishard.nn.export_pretrained",
        lambda at, **other: export_pretrained(at.model, at.folder / "exported", **other),
        {"dtype": "float64"},
        {"dtype": 3},
        {"file_bytes": 0},
    ),
    *odd(
        "mpishard.nn.import_pretrained",
        lambda at, folder="pretrained", **other: import_pretrained(at.folder / folder, mesh=at.mesh, **other),
        ({"folder": "none"}, "none"),
        {"dropout": 0.5},
        {"dropout": 2.0},
    ),
]


def test_a_call_that_one_rank_makes_alone_is_an_error_on_all(place):
    """As ``if rank == 0: optimizer.serialize()``."""
    alone = place.mesh.rank == 0
    with pytest.raises(ValueError, match=f"call is serialize on rank 0, save_checkpoint on .*{place.mesh.size - 1}"):
        place.trained.serialize() if alone else save(place)


def test_a_call_of_one_rank_while_the_others_take_a_step_is_an_error_on_all(place):
    alone = place.mesh.rank == 0
    steps = place.trained.steps
    with pytest.raises(ValueError, match=f"call is serialize on rank 0, step on .*{place.mesh.size - 1}"):
        place.trained.serialize() if alone else place.trained.step(np.zeros(4), np.ones(4))
    place.trained.step(np.zeros(4), np.ones(4))
    assert place.trained.steps == steps + 1


@pytest.mark.parametrize("case", TABLE, ids=str)
@pytest.mark.quick
def test_an_argument_that_differs_on_one_rank_is_an_error_on_all(place, case):
    assert_raised_on_all(case, place, place.mesh)


# By the reason why no rank can be refused for its arguments before it waits.
LEFT_OUT = {
    "it takes no argument, or what it takes may differ between ranks": f"""
        mpishard.Axis.allgather_object mpishard.Axis.barrier mpishard.Axis.finish mpishard.Axis.free
        mpishard.Axis.raise_if_any mpishard.Axis.raise_together mpishard.Checkpoints.close mpishard.Checkpoints.rehearse
        mpishard.Checkpoints.release mpishard.Checkpoints.wait mpishard.Mesh.free mpishard.Mesh.release
        mpishard.Mesh.unwatch mpishard.ReverseCommunication.ask mpishard.ReverseCommunication.gather_result
        mpishard.ReverseCommunication.tell_outcome mpishard.Signals.should_stop
        mpishard.Prior.on mpishard.ShardedModel.gather_full_parameters mpishard.ShardedModel.synchronize_gradients
        mpishard.environment.collect mpishard.estimate.measure mpishard.inverse.InverseHessian.diagonal
        mpishard.inverse.InverseHessian.todense mpishard.inverse.LaplacePosterior.standard_deviation
        mpishard.inverse.LaplacePosterior.variance {OPTIMIZER}.averaged_parameters
        """,
    "it is no call, or its own creation is not collective": """
        mpishard.BiLaplacianPrior mpishard.CollectiveMismatchError mpishard.FlatParameters mpishard.OperatorPrior
        mpishard.Prior mpishard.Request mpishard.RieszMap mpishard.RunRecord mpishard.Signals
        mpishard.comm.communicator.Communicator mpishard.inverse.InverseHessian
        mpishard.inverse.regularization.RegularizationTerm mpishard.regularized mpishard.backward_in_time
        mpishard.ReverseCommunication.serialize mpishard.ReverseCommunication.deserialize
        mpishard.compression.Compressor.make_sums mpishard.compression.PieceCompressor.make_sums
        mpishard.compression.PowerSGDCompressor.make_sums
        """,
    "an elastic run calls it where ranks may have died, on a communicator that it makes": """
        mpishard.Axis.rebind mpishard.Axis.regain_subgroups mpishard.Checkpoints.rebind mpishard.Mesh.rebind
        """,
    "it takes fields of other packages: test_adapters.py has those of an odd rank": """
        mpishard.Partition.of mpishard.pyadjoint.minimize
        """,
    "it is in each step, whose ranks have compared parameters and settings, and would be slower": f"""
        mpishard.Checkpoints.due mpishard.FlatParameters.gather mpishard.FlatParameters.prefetch
        mpishard.FlatParameters.use mpishard.LocalSGDOptimizer.update mpishard.Partition.put
        mpishard.ShardedModel.loss_and_gradient
        {OPTIMIZER}.update
        """,
}
NN = {f"mpishard.nn.{name}" for name in ("Decoder.generate", "import_pretrained", "export_pretrained")}
PAGES = [path.stem for path in odd_rank.PAGES.glob("*.md") if path.stem not in ("index", "torch", "jax")]


def test_the_table_has_each_collective_call_of_the_reference():
    """Those that are left out have a reason."""
    # Layers and passes of a model are in each step, too; the debug mode compares each of their collectives.
    names = {name for name in odd_rank.collective_names(PAGES) if not name.startswith("mpishard.nn.") or name in NN}
    assert names == {case.name for case in TABLE} | {name for names in LEFT_OUT.values() for name in names.split()}
