"""`augmented_lagrangian` on a mesh: the bits of one process, also from a checkpoint in the middle of a minimisation."""

from __future__ import annotations

import numpy as np
import pytest
from hock_schittkowski import PROBLEMS

import mpishard
from mpishard import augmented_lagrangian, minimize

PROBLEM = PROBLEMS[43]
NAMES = (
    *("x", "fun", "constr", "multipliers", "lagrangian_grad", "constr_violation", "complementarity", "optimality"),
    *("penalty", "nit", "nfev", "status", "message"),
)


class Stopped(Exception):
    """The run is over, as far as it has come."""


def solved(most=0, **given):
    """The function is called `most` times, if that is not 0."""
    calls = []

    def fun(x):
        calls.append(x)
        if len(calls) == most:
            raise Stopped(f"at the evaluation {most}")
        return PROBLEM.value_and_gradient(x)

    found = augmented_lagrangian(
        fun, PROBLEM.x0, PROBLEM.constraints, PROBLEM.adjoint, upper=PROBLEM.upper, bounds=(None, 1.5), **given
    )
    return found, len(calls)


@pytest.fixture(scope="module")
def alone():
    found, calls = solved()
    assert found.success and found.nit > 4 and calls == found.nfev
    return found


@pytest.mark.pairs(2)
@pytest.mark.parametrize(("every", "most"), [(1, 2), (5, 14), (10, 31), (9, 40)])
def test_it_continues_with_the_same_bits(mesh, alone, folder, every, most):
    def run(most=0, every=50, **given):
        with (
            mpishard.Checkpoints(folder, mesh, every=every) as checkpoints,
            mpishard.RunRecord(folder / "record", mesh) as record,
        ):
            return solved(most, mesh=mesh, checkpoints=checkpoints, record=record, resume=True, **given)

    with pytest.raises(Stopped):
        run(most, every)
    found, calls = run()
    assert all(np.array_equal(found[name], alone[name]) for name in NAMES)
    assert calls <= alone.nfev - most + 2 + every
    again, calls = run()  # it has ended: the best iterate alone is evaluated again
    assert all(np.array_equal(again[name], alone[name]) for name in NAMES) and calls == 1
    assert run(gtol=1e-9)[0].nit > alone.nit


@pytest.mark.quick
def test_elastic_runs_have_the_bits_of_one_process(mesh, alone, folder, same_on_all):
    def run(every=50, **given):
        with mpishard.Checkpoints(folder, mesh, every=every) as checkpoints:
            elastic = {"max_workers": max(1, mesh.size - 1)}
            return solved(mesh=mesh, checkpoints=checkpoints, resume=True, elastic=elastic, **given)[0]

    def second(intermediate_result):
        seen.append(intermediate_result)
        return intermediate_result.nit == 2

    seen = []
    stopped = run(callback=second)
    mine, seen = seen, []
    expected, _ = solved(callback=second)
    assert all(np.array_equal(stopped[name], expected[name]) for name in NAMES)
    assert [each.nit for each in mine] in ([1, 2], [])  # a spare sees none
    for each, other in zip(mine, seen, strict=False):
        assert all(np.array_equal(each[name], other[name]) for name in other)
    found = run(every=7)
    assert all(np.array_equal(found[name], alone[name]) for name in NAMES) and same_on_all(found.multipliers)
    again = run()  # it has ended
    assert all(np.array_equal(again[name], alone[name]) for name in NAMES)
    tighter = run(gtol=1e-9)
    assert tighter.nit > alone.nit and tighter.optimality <= 1e-9


def test_checkpoints_of_others_are_refused(mesh, folder):
    with mpishard.Checkpoints(folder, mesh) as checkpoints:
        given = {"mesh": mesh, "checkpoints": checkpoints, "resume": True}
        minimize(PROBLEM.value_and_gradient, PROBLEM.x0, bounds=(None, 1.5), **given)
        with pytest.raises(ValueError, match="without constraints"):
            solved(**given)
    with mpishard.Checkpoints(folder / "other", mesh) as checkpoints:
        given = {"mesh": mesh, "checkpoints": checkpoints, "resume": True}
        solved(maxiter=2, **given)
        with pytest.raises(ValueError, match="augmented_lagrangian"):
            minimize(PROBLEM.value_and_gradient, PROBLEM.x0, bounds=(None, 1.5), **given)
        with pytest.raises(ValueError, match="multipliers of 3 constraints.* 1"):
            augmented_lagrangian(
                PROBLEM.value_and_gradient,
                PROBLEM.x0,
                lambda x: PROBLEM.constraints(x)[:1],
                lambda x, v: PROBLEM.adjoint(x, np.append(v, [0.0, 0.0])),
                upper=np.inf,
                bounds=(None, 1.5),
                **given,
            )
    with mpishard.Checkpoints(folder / "elastic", mesh) as checkpoints:
        elastic = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, "elastic": True}
        solved(maxiter=2, **elastic)
        with pytest.raises(ValueError, match="elastic is of augmented_lagrangian.* without constraints"):
            minimize(PROBLEM.value_and_gradient, PROBLEM.x0, bounds=(None, 1.5), **elastic)


def test_limits_of_parts(mesh, same_on_all, folder):
    """Each rank has some of the sides of a box in whole numbers, with their limits; from a checkpoint, too."""
    size = 13
    wanted, own = np.arange(size) - 6.0, slice(mesh.rank, None, mesh.size)
    half = float(mesh.rank == mesh.size - 1)  # of the function, which one rank has
    columns = np.eye(size)[:, own]

    def run(**given):
        def fun(x):
            return half * 0.5 * (x - wanted) @ (x - wanted), half * (x - wanted)

        return augmented_lagrangian(
            fun,
            np.ones(size),
            lambda x: x[own],
            lambda x, v: columns @ v,
            lower=-2.0,
            upper=np.full(size, 3.0)[own],
            mesh=mesh,
            reduction="sum",
            **given,
        )

    found = run()
    assert found.success and np.allclose(found.x, np.clip(wanted, -2, 3), atol=1e-5) and same_on_all(found.x)
    assert np.allclose(found.multipliers, (np.clip(wanted, -2, 3) - wanted)[own], atol=1e-5)
    assert same_on_all(found.complementarity) and found.constr_violation <= 1e-6
    with mpishard.Checkpoints(folder, mesh, every=10) as checkpoints:
        given = {"checkpoints": checkpoints, "resume": True}
        run(maxiter=2, **given)
        resumed = run(**given)
    assert all(np.array_equal(resumed[name], found[name]) for name in NAMES)
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ValueError, match="lower=4 and upper=3"):
        augmented_lagrangian(
            lambda x: (x @ x, 2 * x),
            np.ones(2),
            lambda x: x,
            lambda x, v: v,
            lower=4.0 if odd else -4.0,
            upper=3.0,
            mesh=mesh,
        )
    if mesh.size > 1:
        with pytest.raises(
            ValueError, match=f"1 numbers on rank 0, and 2 on rank {mesh.size - 1}"
        ):  # of which one holds
            augmented_lagrangian(
                lambda x: (x @ x, 2 * x),
                np.ones(2),
                lambda x: x[: 1 + odd],
                lambda x, v: v,
                lower=-4.0,
                upper=3.0,
                mesh=mesh,
            )


def test_scipys_constraints_have_the_bits_of_one_process(mesh, alone):
    constraints = {"type": "ineq", "fun": PROBLEM.constraints, "jac": PROBLEM.jacobian}
    given = {"bounds": (None, 1.5), "constraints": constraints}
    expected, *others = (
        minimize(PROBLEM.value_and_gradient, PROBLEM.x0, **given, **each)
        for each in ({}, {"mesh": mesh}, {"mesh": mesh, "elastic": True})
    )
    for found in others:
        assert all(np.array_equal(found[name], expected[name]) for name in NAMES)
    assert np.allclose(expected.x, alone.x, atol=1e-5)
