"""Terms on slabs over the tensor axis have the bits of the whole field, and count once however ranks are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import SmoothedTotalVariation, Tikhonov

SHAPE = (19, 4)
FIELD = np.random.default_rng(1).standard_normal(SHAPE)
MASK = np.random.default_rng(2).random(SHAPE) > 0.1
TARGET = np.random.default_rng(3).standard_normal(SHAPE)


@pytest.fixture
def mesh() -> Any:
    with mpishard.Mesh(data=1, tensor=-1) as mesh:
        yield mesh


def slab_of(mesh: mpishard.Mesh) -> mpishard.FlatParameters:
    parameters = mpishard.FlatParameters(
        [mpishard.ParameterSpec("k", SHAPE, tensor_dim=0)], np.float64, place=mesh.place
    )
    parameters["k"][...] = FIELD[slice(*parameters.box("k")[0])]
    return parameters


def test_slabs_have_the_bits_of_the_whole_field(mesh: mpishard.Mesh) -> None:
    parameters = slab_of(mesh)
    rows = slice(*parameters.box("k")[0])
    kinds: list[Any] = [
        *(lambda order=order, **options: Tikhonov(order=order, **options) for order in (0, 1, 2)),
        lambda **options: SmoothedTotalVariation(epsilon=0.2, **options),
    ]
    for kind in kinds:
        whole = kind(weight=0.3, mask=MASK)
        part = kind(weight=0.3, mask=MASK[rows], mesh=mesh)
        value, gradient = whole.value_and_gradient(FIELD)
        own_value, own_gradient = part.value_and_gradient(parameters["k"])
        assert own_value == value and np.array_equal(own_gradient, gradient[rows])
        product = part.product(parameters["k"], TARGET[rows])
        assert np.array_equal(product, whole.product(FIELD, TARGET)[rows])
        plain = mpishard.regularized(lambda p: (0.0, 0 * p.flat), part)
        assert mpishard.check_gradient(plain, parameters, mesh=mesh.reshaped(tensor=mesh.size), disp=False)


def test_slabs_that_are_too_thin_are_an_error_on_all(mesh: mpishard.Mesh) -> None:
    if mesh.size == 1:
        pytest.skip("one rank has all rows")
    with pytest.raises(ValueError, match="its neighbours need 2"):
        Tikhonov(order=2, mesh=mesh).value_and_gradient(np.zeros((2 - (mesh.rank == mesh.size - 1), 4)))


@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_term_counts_once_on_many_ranks(reduction: str | None) -> None:
    """Both axes at once, if the ranks allow it; the minimum is that of the whole problem on one rank."""
    term = Tikhonov(weight=0.5)
    alone = mpishard.minimize(
        mpishard.regularized(
            lambda x: (((x - TARGET.reshape(-1)) ** 2).sum(), 2 * (x - TARGET.reshape(-1))),
            Tikhonov(weight=0.5, shape=SHAPE),
        ),
        np.zeros(76),
        tol=1e-12,
    )
    tensor = 2 if MPI.COMM_WORLD.size % 2 == 0 else 1
    with mpishard.Mesh(tensor=tensor) as mesh:
        parameters = slab_of(mesh)
        parameters["k"][...] = 0
        rows = slice(*parameters.box("k")[0])

        def function(p: Any) -> tuple[float, np.ndarray]:
            error = p["k"] - TARGET[rows]
            value, gradient = float((error**2).sum()), 2 * error
            if reduction == "sum":
                return value / mesh.data.size, gradient / mesh.data.size
            return float(mesh.tensor.all_reduce(np.array([value]))[0]), gradient

        term = Tikhonov(weight=0.5, mesh=mesh)
        fun = mpishard.regularized(function, term, mesh=mesh, reduction=reduction)
        assert mpishard.check_gradient(fun, parameters, mesh=mesh, reduction=reduction, disp=False)
        result = mpishard.minimize(fun, parameters, mesh=mesh, reduction=reduction, tol=1e-12)
        assert result.fun == pytest.approx(alone.fun, rel=1e-9)
        assert np.allclose(parameters["k"], alone.x.reshape(SHAPE)[rows], rtol=0, atol=1e-5)


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

    with mpishard.Mesh() as mesh:
        result = mpishard.minimize(
            mpishard.regularized(summed, Tikhonov(weight=16.0)),
            np.zeros(30),
            mesh=mesh,
            samples=8,
            elastic=True,
            options={"gtol": 8e-9, "ftol": 0.0},
        )
        said = "the same minimum with weights 8 times smaller"
        assert (said in capsys.readouterr().err) == (mesh.rank == 0)
        problem = mpishard.OptimizationProblem(
            mpishard.regularized(mean, Tikhonov(weight=2.0)), np.zeros(30), samples=8, batch_size=8, steps=200
        )
        found = mpishard.ZeRO1Optimizer(mpishard.LBFGSB(gtol=1e-9, ftol=0.0), mesh).optimize(problem, progress=False)
        assert np.allclose(result.x, found.parameters, atol=1e-7)
