"""The inverse Hessian of a result on a mesh: the bits of one process, whichever rank has what."""

from __future__ import annotations

import numpy as np
import pytest
from descent import curvature, rosenbrock

import mpishard
from mpishard import FlatParameters, ParameterSpec, Partition, minimize

pytestmark = pytest.mark.pairs(1)

SIZE = 13
START = np.where(np.arange(SIZE) % 2, 1.0, -1.2)
VECTOR = np.cos(np.arange(SIZE))
WANTED = np.sin(np.arange(SIZE))
STIFFNESS = np.linspace(1, 40, SIZE)
BOUNDS = np.full(SIZE, -0.5), np.full(SIZE, 0.75)
OPTIONS = {"hess_inv": True, "maxiter": 9}
PAIRS = ("L-BFGS-B", {"bounds": (-1.5, 0.9), "inner_product": STIFFNESS})
METHODS = [
    PAIRS,
    (mpishard.LBFGS(history=5), {"preconditioner": lambda v: v / STIFFNESS, "fixed": np.arange(SIZE) < 2}),
    ("trust-ncg", {"hessp": lambda x, d: curvature(x, d) + 2000 * d}),
]


def asked(method, given, fun=rosenbrock, start=START, **more):
    return minimize(fun, start, method=method, options={**OPTIONS, **more.pop("options", {})}, **given, **more)


@pytest.mark.parametrize(("method", "given"), METHODS)
def test_it_has_the_bits_of_one_process(mesh, same_on_all, folder, method, given):
    """Of a run that resumes in the middle, of one that had ended, and of an elastic one."""
    expected = asked(method, given).hess_inv
    with mpishard.Checkpoints(folder, mesh, every=5) as checkpoints:
        files = {"checkpoints": checkpoints, "resume": True, "mesh": mesh}
        assert asked(method, given, **files, options={"maxiter": 4}).nit == 4
        runs = [asked(method, given, **files), asked(method, given, **files)]
    if given is not METHODS[1][1]:
        runs.append(asked(method, given, mesh=mesh, elastic=True))
    if method == PAIRS[0]:
        assert np.array_equal(runs[0].hess_inv.diagonal(), expected.diagonal())
        assert np.array_equal(runs[0].hess_inv.todense(), expected.todense())
    for run in runs:
        found = run.hess_inv @ VECTOR
        assert np.array_equal(found, expected @ VECTOR) and same_on_all(found)


class Misfit:
    """Half the sum of ``w (x - wanted)^4`` and its Hessian, in numbers whose sums are exact."""

    def __init__(self, places, ranks=1):
        self.w, self.wanted, self.share = STIFFNESS[places], WANTED[places], 1 / ranks

    def __call__(self, x):
        r = x - self.wanted
        value = np.rint(2.0**30 * self.w * r**4).sum() * 2.0**-31
        return self.share * float(value), self.share * 2 * np.rint(2.0**30 * self.w * r**3) * 2.0**-30

    def times(self, x, d):
        return self.share * np.rint(2.0**30 * (6 * self.w * (x - self.wanted) ** 2 + 1)) * 2.0**-30 * d


@pytest.mark.parametrize("kind", ["runs", "numbers"])
@pytest.mark.parametrize("method", ["L-BFGS-B", "trust-ncg"])
def test_it_is_that_of_a_partition(comm, kind, method):
    """Also of fields whose values ranks have by number, in an elastic run, and of slabs."""
    every = np.arange(SIZE)
    order = every if kind == "runs" else np.random.default_rng(1).permutation(SIZE)
    own = np.array_split(order, comm.size)[comm.rank]
    whole, part = Misfit(every), Misfit(own)
    products = {"hessp": whole.times} if method == "trust-ncg" else {}
    expected = asked(method, {"bounds": BOUNDS, **products}, whole, np.zeros(SIZE))
    assert 0 < (expected.hess_inv.diagonal() == 0).sum() < SIZE
    own_products = {"hessp": part.times} if method == "trust-ncg" else {}
    given = {"bounds": tuple(bound[own] for bound in BOUNDS), "reduction": "sum", **own_products}
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        field = Partition(np.zeros(own.size), mesh, **({} if kind == "runs" else {"ids": own}))
        runs = [asked(method, given, part, field, mesh=mesh)]
        if products:
            given["hessp"] = lambda x, d, samples: part.times(x, d)
        more = {"samples": 1, "elastic": True, "mesh": mesh}
        runs.append(asked(method, given, lambda x, samples: part(x), field, **more))
        for result in runs:
            found = result.hess_inv
            assert found.shape == (SIZE, SIZE) and np.array_equal(
                found @ VECTOR[own], (expected.hess_inv @ VECTOR)[own]
            )
            if comm.size > 1:
                with pytest.raises(ValueError, match="x is split"):
                    found.todense()
        if not products:
            assert np.array_equal(runs[0].hess_inv.diagonal(), expected.hess_inv.diagonal()[own])


def test_it_is_that_of_slabs_and_of_sums(comm, mesh):
    expected = asked("L-BFGS-B", {"bounds": BOUNDS}, Misfit(np.arange(SIZE)), np.zeros(SIZE)).hess_inv
    by_solves = asked("trust-ncg", {"hessp": Misfit(np.arange(SIZE)).times}, Misfit(np.arange(SIZE)), np.zeros(SIZE))
    with mpishard.Mesh(comm, tensor=comm.size) as cut:
        start = FlatParameters([ParameterSpec("field", (SIZE,), tensor_dim=0)], np.float64, place=cut.place)
        ((first, last),) = start.box("field")
        part = Misfit(slice(first, last))
        given = {"bounds": BOUNDS, "mesh": cut, "reduction": "sum"}
        found = asked("L-BFGS-B", given, lambda p: part(p["field"]), start).hess_inv
        assert np.array_equal(found @ VECTOR[first:last], (expected @ VECTOR)[first:last])
        assert np.array_equal(found @ {"field": VECTOR[first:last]}, found @ VECTOR[first:last])
        assert np.array_equal(found.diagonal(), expected.diagonal()[first:last])
    if comm.size in (1, 2, 4, 8):  # whose shares are exact
        term = Misfit(np.arange(SIZE), comm.size)
        sums = {"hessp": term.times, "reduction": "sum", "mesh": mesh}
        assert np.array_equal(
            asked("trust-ncg", sums, term, np.zeros(SIZE)).hess_inv @ VECTOR, by_solves.hess_inv @ VECTOR
        )


def test_solves_after_an_elastic_run_deal_out_the_samples(comm, mesh, same_on_all):
    """70 of them, in 35 parts whose sum does not depend on the ranks; a product may fail on one."""
    rows = np.random.default_rng(7).normal(size=(70, SIZE))
    seen, failed = [], []

    def fun(x, samples):
        residual = rows[samples] @ (x - 1)
        return 0.5 * residual @ residual, rows[samples].T @ residual

    def product(x, d, samples):
        if failed:  # after the end
            seen.extend(samples.tolist())
            if 3 in samples and len(failed) < 2:
                failed.append(3)
                raise mpishard.EvaluationFailed("by chance")
        return rows[samples].T @ (rows[samples] @ d)

    given = {"hessp": product, "samples": 70, "elastic": True}
    with mpishard.Mesh(comm.Split(comm.rank)) as alone:
        expected = asked("trust-ncg", given, fun, mesh=alone).hess_inv @ VECTOR
    result = asked("trust-ncg", given, fun, mesh=mesh, options={"retries": 1})
    failed.append(0)
    found = result.hess_inv @ VECTOR
    assert np.array_equal(found, expected) and same_on_all(found)
    assert np.allclose(found, np.linalg.solve(rows.T @ rows, VECTOR))
    assert len(comm.allreduce(failed)) == comm.size + 1
    every = np.bincount(comm.allreduce(seen), minlength=70)
    assert len(set(np.delete(every, [2, 3]))) == 1 and every[2] == every[3] == every[0] + 1


def test_what_one_rank_does_wrong_is_an_error_on_all(mesh):
    odd = mesh.rank == mesh.size - 1
    found = asked(*PAIRS, mesh=mesh).hess_inv
    with pytest.raises(ValueError, match="v has 3 elements"):
        found @ VECTOR[: 3 if odd else None]
    if mesh.size > 1:
        with pytest.raises(ValueError, match="v is"):
            found @ (VECTOR + odd)
        with pytest.raises(ValueError, match="diagonal"):
            found.diagonal() if odd else found.todense()

    def product(x, d):
        if odd and not x.any():
            raise ZeroDivisionError("of one rank")
        return d

    solves = minimize(lambda x: (x @ x, 2 * x), START, method="trust-ncg", hessp=product, mesh=mesh, options=OPTIONS)
    with pytest.raises((ZeroDivisionError, RuntimeError), match="of one rank"):
        solves.hess_inv @ VECTOR
    with pytest.raises(ValueError, match="return_all=True"):
        minimize(rosenbrock, START, options={"return_all": True}, mesh=mesh, elastic=True)
