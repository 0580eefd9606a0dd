"""Gradients that are spread over ranks in any way are checked as on one rank, and a wrong one fails on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpishard

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


def test_an_operator_over_ranks(mesh: mpishard.Mesh) -> None:
    """A rank has 3 elements of x and of y; the operator is the sum of all that comes before, itself included."""

    def forward(x: np.ndarray) -> np.ndarray:
        return np.concatenate(MPI.COMM_WORLD.allgather(x)).cumsum()[3 * mesh.rank : 3 * mesh.rank + 3]

    def adjoint(y: np.ndarray) -> np.ndarray:
        whole = np.concatenate(MPI.COMM_WORLD.allgather(y))
        return whole[::-1].cumsum()[::-1][3 * mesh.rank : 3 * mesh.rank + 3]

    assert mpishard.check_adjoint(forward, adjoint, np.zeros(3), np.zeros(3), mesh=mesh, disp=False)
    assert not mpishard.check_adjoint(forward, forward, np.zeros(3), np.zeros(3), mesh=mesh, disp=False)
