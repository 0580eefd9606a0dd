"""`least_squares` on a mesh: the bits of one process on any ranks, and one outcome on all of them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from residual_problems import Bundle, Curve, Diffusion

from mpishard import least_squares

CURVE, FIELD = Curve(), Diffusion()
BUNDLE = Bundle(points=12, cameras=4, views=3)
CASES = {
    "lm": (CURVE, {"method": "lm"}),
    "cauchy in bounds": (CURVE, {"loss": "cauchy", "f_scale": 0.1, "bounds": ([-1, 0, 0, -1], [0.45, 5, 2, 1])}),
    "arctan": (CURVE, {"loss": "arctan", "f_scale": 0.1}),
    "field": (FIELD, {"bounds": (FIELD.lower, FIELD.upper)}),
    "bundle": (BUNDLE, {"x_scale": "jac", "max_nfev": 6}),
}
SAME = ["x", "cost", "grad", "optimality", "active_mask", "nfev", "njev", "status", "message"]


def own_rows(mesh, rows):
    """Uneven parts, of which the last one of several is empty."""
    edges = np.linspace(0, 1, max(mesh.size, 2)) ** 2 if mesh.size > 1 else np.array([0.0, 1.0])
    starts = [*(edges * rows).astype(int).tolist(), rows]
    return slice(starts[mesh.rank], starts[mesh.rank + 1])


@pytest.mark.parametrize("case", CASES)
def test_the_bits_of_one_process(mesh, same_on_all, case):
    problem, given = CASES[case]
    alone = least_squares(problem.residuals, problem.start, problem.jacobian_rows, **given)
    own = own_rows(mesh, len(problem.residuals(problem.start)))
    result = least_squares(
        lambda x: problem.residuals(x)[own],
        problem.start,
        lambda x: problem.jacobian_rows(x)[own],
        mesh=mesh,
        **given,
    )
    assert all(np.array_equal(result[name], alone[name]) for name in SAME) and same_on_all(result.x)
    assert np.array_equal(result.fun, alone.fun[own]) and np.array_equal(result.jac, alone.jac[own])
    assert alone.nfev > 3


def test_differences_of_own_rows(mesh, same_on_all):
    own = own_rows(mesh, 200)
    alone = least_squares(CURVE.residuals, CURVE.start, "3-point")
    result = least_squares(lambda x: CURVE.residuals(x)[own], CURVE.start, "3-point", mesh=mesh)
    assert np.array_equal(result.x, alone.x) and result.nfev == alone.nfev and same_on_all(result.x)


def test_errors_of_one_rank_are_raised_on_all(mesh):
    last = mesh.size - 1

    def failing(x):
        if mesh.rank == last and (x != CURVE.start).any():
            raise RuntimeError("no such point")
        return CURVE.residuals(x)

    def short(x):
        return CURVE.jacobian(x)[: 3 if mesh.rank == last else None]

    def infinite(x):
        return np.full((200, 4), np.inf if mesh.rank == last else 1.0)

    with pytest.raises(RuntimeError, match="no such point"):
        least_squares(failing, CURVE.start, CURVE.jacobian, mesh=mesh)
    with pytest.raises(ValueError, match="jac returned the shape"):
        least_squares(CURVE.residuals, CURVE.start, short, mesh=mesh)
    with pytest.raises(ValueError, match="column 0 of the Jacobian"):
        least_squares(CURVE.residuals, CURVE.start, infinite, mesh=mesh)
    with pytest.raises(ValueError, match="ftol"):
        least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, ftol=-1 if mesh.rank == last else 1, mesh=mesh)


def test_ranks_agree_on_arguments_and_take_one_start(mesh, same_on_all):
    if mesh.size == 1:
        pytest.skip("for several ranks")
    with pytest.raises(ValueError, match="gtol is"):
        least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, gtol=1e-8 * (1 + mesh.rank), mesh=mesh)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        moved = CURVE.start + 0.01 * mesh.rank
        result = least_squares(CURVE.residuals, moved, CURVE.jacobian, mesh=mesh)
    assert same_on_all(result.x) and result.success
    assert mesh.rank or "different parameters" in str(told[0].message)


def test_any_rank_stops(mesh):
    def callback(x):
        return mesh.rank == mesh.size - 1

    result = least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, callback=callback, mesh=mesh)
    assert result.status == -2 and result.nit == 1
