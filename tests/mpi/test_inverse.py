"""Gradient checks, terms on slabs and sums of vectors over ranks: the bits of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hybrid import SIZE, meshes, model
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import SGD, Mesh, ShardingConfiguration, SmoothedTotalVariation, Tikhonov
from mpishard.data_parallel.method_state import ShardedSpace
from mpishard.data_parallel.strategies import Strategy
from mpishard.minimizers.gram import Gram
from mpishard.minimizers.space import LocalSpace

# Gradients that are spread over ranks in any way are checked as on one rank, and a wrong one fails on all ranks.

SHAPE = (13, 4)
WEIGHTS = np.linspace(0.5, 1.5, 52).reshape(SHAPE)
ROW = np.linspace(-1, 1, 4)


def value_and_gradient(field: np.ndarray, weights: np.ndarray, factor: float) -> tuple[float, np.ndarray]:
    return float((weights * np.exp(field)).sum()), factor * weights * np.exp(field)


@pytest.fixture
def mesh() -> Any:
    with mpishard.Mesh() as mesh:
        yield mesh


@pytest.mark.parametrize("factor", [1.0, 1.01])
@pytest.mark.quick
def test_all_forms_give_one_check(mesh: mpishard.Mesh, factor: float) -> None:
    x = np.sin(np.arange(52.0))

    def whole(x: np.ndarray) -> tuple[float, np.ndarray]:
        return value_and_gradient(x, WEIGHTS.reshape(-1), factor)

    def term(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = whole(x)
        return value * share, gradient * share

    def slab(p: Any) -> tuple[float, np.ndarray]:
        rows = slice(*p.box("x")[0])
        value, gradient = value_and_gradient(p["x"], WEIGHTS[rows], factor)
        return value, gradient

    share = 2.0 * (mesh.rank + 1) / (mesh.size * (mesh.size + 1))
    alone = mpishard.check_gradient(whole, x, disp=False)
    assert alone.passed == (factor == 1)
    assert mesh.size == 1 or f"on rank {mesh.rank} of {mesh.size} alone" in alone.verdict
    split = mesh.reshaped(tensor=mesh.size)
    parameters = mpishard.FlatParameters(
        [mpishard.ParameterSpec("x", SHAPE, tensor_dim=0)], np.float64, place=split.place
    )
    rows = slice(*parameters.box("x")[0])
    parameters["x"][...] = x.reshape(SHAPE)[rows]
    checks = [
        mpishard.check_gradient(whole, x, mesh=mesh, disp=False),
        mpishard.check_gradient(term, x, mesh=mesh, reduction="sum", disp=False),
        mpishard.check_gradient(slab, parameters, mesh=split, reduction="sum", disp=False),
    ]
    for check in checks:
        assert check.passed == alone.passed
        assert check.value == pytest.approx(alone.value, rel=1e-14)
    assert checks[0].derivative == pytest.approx(checks[1].derivative, rel=1e-12)
    assert np.array_equal(parameters["x"], x.reshape(SHAPE)[rows])
    assert len(set(MPI.COMM_WORLD.allgather(str(checks)))) == 1


@pytest.mark.parametrize("factor", [1.0, 0.99])
def test_problems_over_ranks_of_data_and_tensors(mesh: mpishard.Mesh, factor: float) -> None:
    tensor = 2 if mesh.size % 2 == 0 else 1
    split = mesh.reshaped(tensor=tensor)
    specs = [mpishard.ParameterSpec("x", SHAPE, tensor_dim=0), mpishard.ParameterSpec("row", (4,))]
    parameters = mpishard.FlatParameters(specs, np.float64, place=split.place)
    parameters["x"][...] = 0.1
    parameters["row"][...] = ROW

    def function(p: Any, samples: np.ndarray, gradients: Any) -> float:
        own = WEIGHTS[slice(*p.box("x")[0])]
        wave = np.exp(p["x"] * p["row"])
        sums = np.array([(own * wave).sum(), *(own * wave * p["x"]).sum(axis=0)])
        if len(samples):
            gradients["x"] += own * wave * p["row"] * len(samples)
            gradients["row"] += factor * split.tensor.all_reduce(sums)[1:] * len(samples)
        return float(split.tensor.all_reduce(np.array([(own * wave).sum()]))[0] * len(samples))

    problem = mpishard.OptimizationProblem(function, parameters, samples=16, batch_size=16, steps=1)
    assert mpishard.check_gradient(problem, mesh=split, disp=False).passed == (factor == 1)
    mpishard.ZeRO2Optimizer(mpishard.SGD(1e-6), split).optimize(
        problem, progress=False
    )  # whose gradients come in buckets
    assert mpishard.check_gradient(problem, mesh=split, disp=False).passed == (factor == 1)


def test_what_ranks_do_wrong_is_an_error_on_all(mesh: mpishard.Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.ones(5)

    def breaks(x: np.ndarray) -> tuple[float, np.ndarray]:
        if mesh.rank == mesh.size - 1:
            raise ValueError("no such shot")
        return x @ x, 2 * x

    with pytest.raises(ValueError, match="no such shot"):
        mpishard.check_gradient(breaks, x, mesh=mesh, reduction="sum")
    if mesh.size > 1:
        with pytest.raises(ValueError, match='reduction="sum"'):
            mpishard.check_gradient(lambda x: (x @ x * (mesh.rank + 1), 2 * x * (mesh.rank + 1)), x, mesh=mesh)
    capsys.readouterr()
    assert mpishard.check_gradient(lambda x: (x @ x, 2 * x), x, mesh=mesh)
    assert ("PASS" in capsys.readouterr().out) == (mesh.rank == 0)
    with pytest.raises(OSError, match="missing"):  # the first rank alone writes it
        mpishard.check_gradient(lambda x: (x @ x, 2 * x), x, mesh=mesh, plot="missing/folder.png", disp=False)


def test_an_operator_over_ranks(mesh: mpishard.Mesh) -> None:
    """A rank has 3 elements of x and of y; the operator is the sum of all that comes before, itself included."""

    def forward(x: np.ndarray) -> np.ndarray:
        return np.concatenate(MPI.COMM_WORLD.allgather(x)).cumsum()[3 * mesh.rank : 3 * mesh.rank + 3]

    def adjoint(y: np.ndarray) -> np.ndarray:
        whole = np.concatenate(MPI.COMM_WORLD.allgather(y))
        return whole[::-1].cumsum()[::-1][3 * mesh.rank : 3 * mesh.rank + 3]

    assert mpishard.check_adjoint(forward, adjoint, np.zeros(3), np.zeros(3), mesh=mesh, disp=False)
    assert not mpishard.check_adjoint(forward, forward, np.zeros(3), np.zeros(3), mesh=mesh, disp=False)


# Terms on slabs over the tensor axis have the bits of the whole field, and count once however ranks are used.

REGULARIZATION_SHAPE = (19, 4)
FIELD = np.random.default_rng(1).standard_normal(REGULARIZATION_SHAPE)
MASK = np.random.default_rng(2).random(REGULARIZATION_SHAPE) > 0.1
TARGET = np.random.default_rng(3).standard_normal(REGULARIZATION_SHAPE)


@pytest.fixture
def slab_mesh() -> Any:
    with mpishard.Mesh(data=1, tensor=-1) as slab_mesh:
        yield slab_mesh


def slab_of(slab_mesh: mpishard.Mesh) -> mpishard.FlatParameters:
    parameters = mpishard.FlatParameters(
        [mpishard.ParameterSpec("k", REGULARIZATION_SHAPE, tensor_dim=0)],
        np.float64,
        place=slab_mesh.place,
    )
    parameters["k"][...] = FIELD[slice(*parameters.box("k")[0])]
    return parameters


@pytest.mark.quick
def test_slabs_have_the_bits_of_the_whole_field(slab_mesh: mpishard.Mesh) -> None:
    parameters = slab_of(slab_mesh)
    rows = slice(*parameters.box("k")[0])
    kinds: list[Any] = [
        *(lambda order=order, **options: Tikhonov(order=order, **options) for order in (0, 1, 2)),
        lambda **options: SmoothedTotalVariation(epsilon=0.2, **options),
    ]
    for kind in kinds:
        whole = kind(weight=0.3, mask=MASK)
        part = kind(weight=0.3, mask=MASK[rows], mesh=slab_mesh)
        value, gradient = whole.value_and_gradient(FIELD)
        own_value, own_gradient = part.value_and_gradient(parameters["k"])
        assert own_value == value and np.array_equal(own_gradient, gradient[rows])
        product = part.product(parameters["k"], TARGET[rows])
        assert np.array_equal(product, whole.product(FIELD, TARGET)[rows])
        plain = mpishard.regularized(lambda p: (0.0, 0 * p.flat), part)
        assert mpishard.check_gradient(plain, parameters, mesh=slab_mesh.reshaped(tensor=slab_mesh.size), disp=False)


def test_slabs_that_are_too_thin_are_an_error_on_all(slab_mesh: mpishard.Mesh) -> None:
    if slab_mesh.size == 1:
        pytest.skip("one rank has all rows")
    with pytest.raises(ValueError, match="its neighbours need 2"):
        Tikhonov(order=2, mesh=slab_mesh).value_and_gradient(np.zeros((2 - (slab_mesh.rank == slab_mesh.size - 1), 4)))


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_term_counts_once_on_many_ranks(reduction: str | None) -> None:
    """Both axes at once, if the ranks allow it; the minimum is that of the whole problem on one rank."""
    term = Tikhonov(weight=0.5)
    alone = mpishard.minimize(
        mpishard.regularized(
            lambda x: (((x - TARGET.reshape(-1)) ** 2).sum(), 2 * (x - TARGET.reshape(-1))),
            Tikhonov(weight=0.5, shape=REGULARIZATION_SHAPE),
        ),
        np.zeros(76),
        tol=1e-12,
    )
    tensor = 2 if MPI.COMM_WORLD.size % 2 == 0 else 1
    with mpishard.Mesh(tensor=tensor) as slab_mesh:
        parameters = slab_of(slab_mesh)
        parameters["k"][...] = 0
        rows = slice(*parameters.box("k")[0])

        def function(p: Any) -> tuple[float, np.ndarray]:
            error = p["k"] - TARGET[rows]
            value, gradient = float((error**2).sum()), 2 * error
            if reduction == "sum":
                return value / slab_mesh.data.size, gradient / slab_mesh.data.size
            return float(slab_mesh.tensor.all_reduce(np.array([value]))[0]), gradient

        term = Tikhonov(weight=0.5, mesh=slab_mesh)
        fun = mpishard.regularized(function, term, mesh=slab_mesh, reduction=reduction)
        assert mpishard.check_gradient(fun, parameters, mesh=slab_mesh, reduction=reduction, disp=False)
        result = mpishard.minimize(fun, parameters, mesh=slab_mesh, reduction=reduction, tol=1e-12)
        assert result.fun == pytest.approx(alone.fun, rel=1e-9)
        assert np.allclose(parameters["k"], alone.x.reshape(REGULARIZATION_SHAPE)[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "term", "words"),
    [
        ({"tensor_dim": 0}, {}, ""),
        ({"tensor_dim": 0}, {"order": 0}, ""),
        ({"tensor_dim": 0, "slices": 12}, {"order": 2}, ""),
        ({"tensor_dim": 1}, {"order": 0}, ""),
        ({"tensor_dim": 1}, {}, "cut along dimension 1"),
        ({}, {}, ""),
        ({"partial": True}, {}, ""),
        ({}, {"mesh": True}, "whole on all tensor ranks"),
    ],
)
def test_a_term_without_a_mesh_has_that_of_the_call(spec: Any, term: Any, words: str) -> None:
    """Cut or whole on the tensor ranks, over which a gradient may be summed: the minimum is that of one rank."""
    if MPI.COMM_WORLD.size > 4:
        pytest.skip("the field has four columns")
    whole = mpishard.minimize(
        mpishard.regularized(
            lambda p: (((p["k"] - TARGET) ** 2).sum(), 2 * (p["k"] - TARGET)), Tikhonov(order=term.get("order", 1))
        ),
        mpishard.FlatParameters.of({"k": FIELD}),
        tol=1e-10,
    )
    with mpishard.Mesh(tensor=-1, data=1) as mesh:
        parameters = mpishard.FlatParameters(
            [mpishard.ParameterSpec("k", REGULARIZATION_SHAPE, **spec)], np.float64, place=mesh.place
        )
        box = tuple(slice(*ends) for ends in parameters.box("k"))
        parameters["k"][...] = FIELD[box]
        copies = 1 if spec.get("tensor_dim") is not None else mesh.size

        def part(p: Any) -> tuple[float, np.ndarray]:
            error = p["k"] - TARGET[box]
            return float((error**2).sum()) / copies, 2 * error / (copies if spec.get("partial") else 1)

        own = Tikhonov(**{**term, **({"mesh": mesh} if "mesh" in term else {})})
        given: dict[str, Any] = {"mesh": mesh, "reduction": "sum"}
        fun = mpishard.regularized(part, own, **given)
        if words and mesh.size > 1:
            with pytest.raises(ValueError, match=words):
                mpishard.minimize(fun, parameters, **given)
        else:
            result = mpishard.minimize(fun, parameters, tol=1e-10, **given)
            assert result.fun == pytest.approx(whole.fun, rel=1e-9)
            assert np.allclose(parameters["k"], whole.x["k"][box], rtol=0, atol=1e-5)


def test_terms_that_would_not_count_once_are_refused(slab_mesh: mpishard.Mesh) -> None:
    term, zeros = Tikhonov(), np.zeros(8)

    def nothing(x: Any) -> Any:
        return 0.0, 0 * (x if isinstance(x, np.ndarray) else x.flat)

    def samples(x: Any, these: Any, gradients: Any) -> float:
        return 0.0

    if slab_mesh.size > 1:
        with pytest.raises(ValueError, match="Tikhonov has no mesh"):
            mpishard.minimize(mpishard.regularized(nothing, term), slab_of(slab_mesh), mesh=slab_mesh)
    with mpishard.Mesh() as mesh:
        given: dict[str, Any] = {"mesh": mesh, "reduction": "sum"}
        if mesh.size > 1:
            with pytest.raises(ValueError, match=f"has the mesh .*tensor={mesh.size}"):
                mpishard.regularized(nothing, Tikhonov(mesh=slab_mesh), **given)
            with pytest.raises(ValueError, match=f"has the mesh .* cut over {mesh.size}"):
                mpishard.minimize(
                    mpishard.regularized(nothing, term, **given), slab_of(slab_mesh), mesh=slab_mesh, reduction="sum"
                )
        with pytest.raises(ValueError, match="reduction=None, .*reduction='sum'"):
            mpishard.minimize(mpishard.regularized(nothing, term), zeros, **given)
        with pytest.raises(ValueError, match="reduction='sum', .*reduction=None"):
            mpishard.minimize(mpishard.regularized(nothing, term, **given), zeros, mesh=mesh)
        problem = mpishard.OptimizationProblem(
            mpishard.regularized(samples, term, **given), zeros, samples=8, batch_size=8, steps=1
        )
        with pytest.raises(ValueError, match="leave it out of regularized"):
            mpishard.ZeRO1Optimizer(mpishard.LBFGSB(), mesh).optimize(problem, progress=False)
    with pytest.raises(TypeError, match="mesh=3"):
        mpishard.regularized(nothing, term, mesh=3)  # type: ignore[arg-type]


def test_weights_for_a_sum_and_for_a_mean(capsys: Any) -> None:
    """`minimize` sums over samples, a problem takes their mean: with the factor that is said, one minimum."""
    data = np.random.default_rng(4).standard_normal((8, 30))

    def summed(x: Any, samples: Any) -> Any:
        residual = x - data[samples]
        return 0.5 * (residual**2).sum(), residual.sum(axis=0)

    def mean(x: Any, samples: Any, gradients: Any) -> float:
        value, gradient = summed(x, samples)
        gradients += gradient
        return float(value)

    with mpishard.Mesh() as slab_mesh:
        result = mpishard.minimize(
            mpishard.regularized(summed, Tikhonov(weight=16.0)),
            np.zeros(30),
            mesh=slab_mesh,
            samples=8,
            elastic=True,
            options={"gtol": 8e-9, "ftol": 0.0},
        )
        said = "the same minimum with weights 8 times smaller"
        assert (said in capsys.readouterr().err) == (slab_mesh.rank == 0)
        problem = mpishard.OptimizationProblem(
            mpishard.regularized(mean, Tikhonov(weight=2.0)), np.zeros(30), samples=8, batch_size=8, steps=200
        )
        found = mpishard.ZeRO1Optimizer(mpishard.LBFGSB(gtol=1e-9, ftol=0.0), slab_mesh).optimize(
            problem, progress=False
        )
        assert np.allclose(result.x, found.parameters, atol=1e-7)


# Sums over vectors that are divided over the ranks of any mesh: the bits of one process.

S_ROWS, Y_ROWS = [0, 1, 2], [5, 4, 3]


@pytest.fixture(scope="module")
def base(comm):
    with Mesh(comm) as mesh:
        yield mesh


def vectors():
    random = np.random.default_rng(1)
    return random.standard_normal((6, SIZE)) * 10.0 ** random.integers(-9, 10, (6, SIZE))


def space_of(mesh, strategy):
    config, parameters = ShardingConfiguration(mesh), model(mesh)
    return ShardedSpace(Strategy(strategy(SGD(), config).sharding.fitting(parameters), config, parameters))


def everything(space, rows, masks):
    """All that a space computes of some rows, and Gram matrices while masks change."""
    tops = space.largest(*rows)
    found = [tops, space.dots([(rows[0], rows[1]), (rows[2], rows[2])], [tops[0] * tops[1], tops[2] ** 2])]
    gram = Gram(space, rows, S_ROWS, Y_ROWS)
    for pair, mask in zip([1, 0, 2, 1], masks, strict=True):
        gram.add(pair, tops[S_ROWS[pair]], tops[Y_ROWS[pair]])
        gram.update(mask)
        found += [gram.sy.tolist(), gram.yy.tolist()]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_layout_has_the_sums_of_one_process(base, strategy):
    whole, random = vectors(), np.random.default_rng(2)
    masks = [None, random.random(SIZE) < 0.7, random.random(SIZE) < 0.7, None]
    expected = everything(LocalSpace(SIZE, whole[0]), whole, masks)
    for mesh in meshes(base):
        space = space_of(mesh, strategy)
        rows = np.stack([space.own(row) for row in whole])
        own_masks = [None if mask is None else space.own(mask.astype(float)) > 0 for mask in masks]
        assert space.total == SIZE and rows.shape == (6, space.size)
        assert everything(space, rows, own_masks) == expected, mesh
        assert space.count(sum(stop - start for start, stop in space.spans), 2) == [SIZE, 2 * base.size]
        assert np.array_equal(space.whole(rows[3]), whole[3])


def test_one_rank_that_has_nan_is_seen_on_all(base):
    whole = vectors()
    whole[0, SIZE // 2], whole[1, 3] = np.nan, -np.inf
    for mesh in meshes(base):
        space = space_of(mesh, STRATEGIES[0])
        assert space.largest(*(space.own(row) for row in whole[:3])) == [np.inf, np.inf, abs(whole[2]).max()]
