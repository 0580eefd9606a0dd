"""Numbers and flags among the arguments of public calls: what is no such thing is refused in one line."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import (
    LBFGS,
    SGD,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    FlatParameters,
    HybridShardedOptimizer,
    LocalSGDOptimizer,
    Mesh,
    NonlinearCG,
    OptimizationProblem,
    ParameterSpec,
    RunRecord,
    ShardingConfiguration,
    as_distributed,
    check_gradient,
    nn,
    save_checkpoint,
)
from mpishard.arguments import config_or_kwargs, entries, flag, integer, mapping, number, printable, reject_unknown
from mpishard.compression import Int8Compressor, TopKCompressor


def test_what_is_taken_becomes_a_plain_value():
    for given, plain in ((3, 3), (np.int64(3), 3), (np.uint8(3), 3)):
        assert (integer("n", given, least=3), type(integer("n", given))) == (plain, int)
    for given in (0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        assert (number("x", given, least=0.5, below=0.6), type(number("x", given))) == (0.5, float)
    assert number("x", np.inf, above=0, finite=False) == np.inf
    for given in (True, np.True_):
        assert flag("f", given) is True
    for given in ([3, 4], (3, 4), {3: 1, 4: 1}.keys(), np.array([3, 4]), iter([3, 4])):
        assert entries("x", given, "steps") == (3, 4)
    assert mapping("x", given := {}, "names and values") is given


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: integer("n", True), TypeError, "n=True"),
        (lambda: integer("n", np.True_), TypeError, "n=np.True_"),
        (lambda: integer("n", 2.0, least=1), TypeError, "n=2.0 .*at least 1$"),
        (lambda: integer("n", 0, least=1), ValueError, "n=0 .*at least 1$"),
        (lambda: integer("n", [0] * 10**5), TypeError, r"n=\[0, 0, 0, 0, 0, 0, ...\]"),
        (lambda: number("x", "1", above=0), TypeError, "x='1' .*above 0$"),
        (lambda: number("x", np.nan, finite=False), ValueError, "x=nan"),
        (lambda: number("x", np.inf, least=0), ValueError, "x=inf .*at least 0$"),
        (lambda: number("x", 2, above=0, most=1), ValueError, "x=2 .*above 0 and at most 1$"),
        (lambda: number("x", 0, above=0, otherwise="None"), ValueError, "x=0 .*above 0, or None$"),
        (lambda: entries("x", 5, "steps"), TypeError, "x=5 .*steps$"),
        (lambda: entries("x", "ab", "steps"), TypeError, "x='ab' .*steps$"),
        (lambda: entries("x", {3}, "steps"), TypeError, r"x=\{3\} .*steps$"),
        (lambda: mapping("x", [], "names and values"), TypeError, r"x=\[\] .*names and values$"),
        (lambda: flag("f", 1), TypeError, "f=1"),
        (lambda: flag("f", "no"), TypeError, "f='no'"),
    ],
)
def test_what_is_refused(check, error, message):
    with pytest.raises(error, match=message):
        check()


def problem(samples=4, batch_size=4, **options):
    return OptimizationProblem(lambda *_: 0.0, np.ones(3), samples, batch_size, **options)


def pair(x):
    return float(x @ x), 2 * x


def step(mesh, **options):
    DDPOptimizer(SGD(), mesh).step(np.ones(3), np.ones(3), **options)


def config(mesh, **options):
    return ShardingConfiguration(mesh, **options)


def spec(name="a", shape=(2,), **options):
    return ParameterSpec(name, shape, **options)


def flat(*specs, **options):
    return FlatParameters([spec()], *specs, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: config(mesh, max_gradient_norm="1"), "max_gradient_norm='1'"),
        (lambda mesh: config(mesh, max_gradient_value="1"), "max_gradient_value='1'"),
        (lambda mesh: config(mesh, minimum_parameter_group_size=True), "group_size=True"),
        (lambda mesh: config(mesh, overlap_communication="no"), "communication='no'"),
        (lambda mesh: config(mesh, loss_scale=[1]), r"loss_scale=\[1\]"),
        (lambda mesh: config(mesh, minimum_parameter_group_size=0), "minimum_parameter_group_size=0"),
        (lambda mesh: config(mesh, max_gradient_norm=0.0), "max_gradient_norm=0.0"),
        (lambda mesh: config(mesh, nonfinite_gradients="pray"), "raise, skip, ignore"),
        (lambda mesh: DDPOptimizer(None, mesh), "needs an update rule"),
        (lambda mesh: HybridShardedOptimizer(SGD, mesh), "update rule .*class SGD"),
        (lambda mesh: DDPOptimizer(SGD(), Mesh), "Mesh .*class Mesh"),
        (lambda mesh: as_distributed(object(), mesh, SGD(), zero=1), "mpishard.torch.as_distributed"),
        (lambda mesh: problem(True), "samples=True"),
        (lambda mesh: problem(seed=1.5), "seed=1.5"),
        (lambda mesh: problem(steps=True), "steps=True"),
        (lambda mesh: problem(tolerance="1"), "tolerance='1'"),
        (lambda mesh: problem(seconds=True), "seconds=True"),
        (lambda mesh: problem(4, 5), "batch_size=5 .*samples=4.*batch_size=4"),
        (lambda mesh: problem(facts=["a"]), r"facts=\['a'\]"),
        (lambda mesh: step(mesh, count="3"), "count='3'"),
        (lambda mesh: step(mesh, count=True), "count=True"),
        (lambda mesh: DDPOptimizer(SGD(), mesh).optimize(problem(steps=1), resume="no"), "resume='no'"),
        (lambda mesh: DDPOptimizer(SGD(), mesh).optimize(problem(steps=1), progress=0), "progress=0"),
        (lambda mesh: HybridShardedOptimizer(SGD(), mesh, zero_stage=True), "zero_stage=True"),
        (lambda mesh: LocalSGDOptimizer(SGD(), mesh, True), "sync_every=True"),
        (lambda mesh: mpishard.as_distributed(SGD(), mesh, sync_every=2), r"ShardingConfiguration\(mesh, sync_every"),
        (lambda mesh: ElasticOptimizer(SGD(), mesh, True), "min_workers=True"),
        (lambda mesh: ElasticOptimizer(SGD(), mesh, failure_timeout="1"), "failure_timeout='1'"),
        (lambda mesh: ElasticOptimizer(SGD(), mesh, respawn="no"), "respawn='no'"),
        (lambda mesh: ElasticOptimizer(SGD(), mesh, scaling=[]), r"scaling=\[\]"),
        (lambda mesh: ElasticOptimizer(SGD(), mesh, rebuild=3), "rebuild=3"),
        (lambda mesh: ElasticOptimizer(SGD(), {}), "Mesh .*got dict"),
        (lambda mesh: save_checkpoint("no", np.ones(3), DDPOptimizer(SGD(), mesh), facts=[]), r"facts=\[\]"),
        (lambda mesh: save_checkpoint("no", None, None), "save_checkpoint: optimizer=None"),
        (lambda mesh: Checkpoints("nowhere", mesh, keep=True), "keep=True"),
        (lambda mesh: Checkpoints("nowhere", mesh, every=True), "every=True"),
        (lambda mesh: Checkpoints(None, mesh), "folder=None"),
        (lambda mesh: Checkpoints("a\0b", mesh), "folder='a.*zero byte"),
        (lambda mesh: RunRecord(5, mesh), "folder=5"),
        (lambda mesh: RunRecord("nowhere", mesh, tensorboard="no"), "tensorboard='no'"),
        (lambda mesh: RunRecord("nowhere", mesh, trace="ab"), "trace='ab'"),
        (lambda mesh: Mesh(mesh.world.comm, timeout=True), "timeout=True"),
        (lambda mesh: Mesh(mesh.world.comm, debug="no"), "debug='no'"),
        (lambda mesh: Mesh(4), r"comm=4 .*Mesh\(data=4"),
        (lambda mesh: Mesh("x"), "comm='x'"),
        (lambda mesh: Mesh(MPI.Intracomm()), "comm is a null communicator"),
        (lambda mesh: Mesh(MPI.COMM_NULL), "comm is a null communicator"),
        (lambda mesh: nn.GPT(vocabulary_size=5, context_length=4, width=4, layers=1, heads=1, seed=1.5), "seed=1.5"),
        (
            lambda mesh: nn.GPT(vocabulary_size=5, context_length=4, width=4, layers=1, heads=1, recompute="no"),
            "recompute='no'",
        ),
        (lambda mesh: Int8Compressor(True), "block=True"),
        (lambda mesh: TopKCompressor("1"), "fraction='1'"),
        (lambda mesh: spec("a\0b"), r"name 'a\\x00b'"),
        (lambda mesh: spec("\ud800"), r"name '\\ud800'"),
        (lambda mesh: spec(3), "name .*got 3"),
        (lambda mesh: spec(shape=3), "parameter 'a': shape=3"),
        (lambda mesh: spec(shape=(2.7,)), "parameter 'a': extent=2.7"),
        (lambda mesh: spec(shape={3}), r"parameter 'a': shape=\{3\}"),
        (lambda mesh: spec(shape={2: 3}), r"parameter 'a': shape=\{2: 3\}"),
        (lambda mesh: spec(stage=-1), "parameter 'a': stage=-1"),
        (lambda mesh: spec(copies=1), "parameter 'a': copies=1"),
        (lambda mesh: FlatParameters(5), "specs=5"),
        (lambda mesh: FlatParameters({}), r"specs=\{\}"),
        (lambda mesh: FlatParameters({spec()}), "specs={ParameterSpec"),
        (lambda mesh: FlatParameters(["a"]), "specs .*got 'a'"),
        (lambda mesh: FlatParameters.over(np.ones(2), 5), "specs=5"),
        (lambda mesh: FlatParameters.over(np.ones(2), ["a"]), "specs .*got 'a'"),
        (lambda mesh: flat(units=5), "units=5"),
        (lambda mesh: flat(units="a"), "units='a'"),
        (lambda mesh: flat(units=["a"]), r"units\[0\]='a'"),
        (lambda mesh: flat("int64"), "float64, got int64"),
        (lambda mesh: FlatParameters.of({}), "no tensors"),
        (lambda mesh: FlatParameters.of([np.ones(3)]), "mapping .*got list"),
        (lambda mesh: FlatParameters.of({"a": [1.0]}), "tensor 'a' is a list"),
        (lambda mesh: FlatParameters.of({"a": np.ones(2, ml_dtypes.bfloat16)}), "tensor 'a' .*bfloat16"),
        (lambda mesh: check_gradient(pair, np.ones(3), steps=5), "steps=5"),
        (lambda mesh: check_gradient(pair, np.ones(3), direction="a"), "direction='a'"),
        (lambda mesh: LBFGS(line_search=[]), r"LBFGS: line_search=\[\]"),
        (lambda mesh: NonlinearCG(line_search={}), r"NonlinearCG: line_search=\{\}"),
    ],
)
def test_public_calls_refuse(mesh, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(mesh)


ONES = np.ones(3)
WITH_A_MESH = {
    "minimize": lambda mesh: mpishard.minimize(pair, ONES, mesh=mesh),
    "elastic": lambda mesh: mpishard.minimize(pair, ONES, mesh=mesh, elastic=True, samples=4),
    "least_squares": lambda mesh: mpishard.least_squares(lambda x: x, ONES, np.diag, mesh=mesh),
    "covariance": lambda mesh: mpishard.covariance({}, mesh=mesh),
    "augmented_lagrangian": lambda mesh: mpishard.augmented_lagrangian(pair, ONES, abs, max, mesh=mesh),
    "ReverseCommunication": lambda mesh: mpishard.ReverseCommunication("L-BFGS-B", ONES, mesh=mesh),
    "check_gradient": lambda mesh: check_gradient(pair, ONES, mesh=mesh),
    "check_adjoint": lambda mesh: mpishard.check_adjoint(abs, abs, ONES, ONES, mesh=mesh),
    "map_runs": lambda mesh: mpishard.map_runs(max, [1], mesh),
    "regularized": lambda mesh: mpishard.regularized(pair, mpishard.Tikhonov(), mesh=mesh),
    "Partition": lambda mesh: mpishard.Partition(ONES, mesh),
    "Partition.of": lambda mesh: mpishard.Partition.of(ONES, mesh),
    "ShardingConfiguration": ShardingConfiguration,
    "Checkpoints": lambda mesh: Checkpoints("nowhere", mesh),
    "RunRecord": lambda mesh: RunRecord("nowhere", mesh),
    "GPT": lambda mesh: nn.GPT(vocabulary_size=8, context_length=8, width=8, layers=1, heads=2, mesh=mesh),
    "import_pretrained": lambda mesh: nn.import_pretrained("nowhere", mesh),
    "measure": mpishard.estimate.measure,
}


@pytest.mark.parametrize("call", WITH_A_MESH.values(), ids=WITH_A_MESH)
def test_what_is_no_mesh_is_refused(call):
    for given, made in ((4, r"Mesh\(\)"), (MPI.COMM_WORLD, r"Mesh\(comm\)")):
        with pytest.raises(TypeError, match=f"^mesh=.* must be a Mesh; .*{made}$"):
            call(given)


def test_options_of_checkpoints_that_ranks_have_agreed_on_stay(mesh, tmp_path):
    with Checkpoints(tmp_path, mesh, every=5, keep=None, on_error="warn") as checkpoints:
        assert (checkpoints.every, checkpoints.keep, checkpoints.on_error) == (5, None, "warn")
        for name in ("every", "keep", "on_error"):
            with pytest.raises(AttributeError):
                setattr(checkpoints, name, getattr(checkpoints, name))


@dataclass(frozen=True)
class Size:
    width: int = 1
    height: int = 2


def test_control_characters_are_escaped():
    assert printable("größe 1 \\") == "größe 1 \\"
    assert printable("a\x1b[2J\n\u202e \x9b\ud800") == r"a\x1b[2J\n\u202e \x9b\ud800"


def test_a_value_as_a_whole_or_by_its_fields():
    options = {"width": 3, "depth": 4}
    assert config_or_kwargs("call()", "size", Size, None, options) == Size(3)
    assert options == {"depth": 4}
    assert config_or_kwargs("call()", "size", Size, Size(5), options) == Size(5)
    with pytest.raises(TypeError, match="call.*'depth'"):
        reject_unknown("call()", options)
    with pytest.raises(TypeError, match="size and also height"):
        config_or_kwargs("call()", "size", Size, Size(), {"height": 1})
    with pytest.raises(TypeError, match="size .*got 7"):
        config_or_kwargs("call()", "size", Size, 7, {})
    reject_unknown("call()", {})
