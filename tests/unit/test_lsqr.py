"""`lsqr` and `cgls` on one process: SciPy's answers in as many iterations, every resume, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import mpishard
from mpishard.comm.errors import OneRank
from mpishard.inverse.operators import MatrixOnRanks, OwnRows
from mpishard.minimizers.linear_least_squares import CGLS, LSQR, Tolerances, reason_to_stop
from mpishard.minimizers.space import LocalSpace

linalg = pytest.importorskip("scipy.sparse.linalg", reason="SciPy is not installed (extra: test)")
sparse = pytest.importorskip("scipy.sparse")

RANDOM = np.random.default_rng(7)
TALL = sparse.random(200, 40, density=0.1, random_state=1, format="csr")
B, WIDE_B = RANDOM.standard_normal(200), RANDOM.standard_normal(40)
SCALED = RANDOM.standard_normal((60, 30)) * np.logspace(0, -2, 30)
DEFICIENT = RANDOM.standard_normal((60, 5)) @ RANDOM.standard_normal((5, 30))
ONES = np.ones(40)
TIGHT = {"atol": 1e-12, "btol": 1e-12}
# The matrix, the right-hand side, options, and SciPy's istop.
PROBLEMS = {
    "least squares": (TALL, B, {}, 2),
    "tight": (TALL, B, TIGHT, 2),
    "damped": (TALL, B, {"damp": 0.5}, 2),
    "from x0": (TALL, B, {"x0": ONES}, 2),
    "damped from x0": (TALL, B, {"damp": 0.5, "x0": ONES}, 2),
    "a system": (TALL, TALL @ ONES, {}, 1),
    "more unknowns than rows": (TALL.T.tocsr(), WIDE_B, {}, 1),
    "rank deficient": (DEFICIENT, B[:60], {"atol": 1e-9, "btol": 1e-9}, 2),
    "rank deficient, damped": (DEFICIENT, B[:60], {"atol": 1e-9, "btol": 1e-9, "damp": 1e-3}, 2),
    # Beyond a condition of 60 its vectors are orthogonal no more, and SciPy's numbers change with the order of rows.
    "conlim": (SCALED, B[:60], {"conlim": 30.0, "atol": 0, "btol": 0}, 3),
    "iter_lim": (TALL, B, {"iter_lim": 3}, 7),
    "zero": (TALL, np.zeros(200), {}, 0),
}
SOLVERS = {"lsqr": (mpishard.lsqr, LSQR), "cgls": (mpishard.cgls, CGLS)}


def both():
    return pytest.mark.parametrize("solver", [mpishard.lsqr, mpishard.cgls], ids=["lsqr", "cgls"])


@pytest.mark.parametrize("name", PROBLEMS)
def test_scipys_answers_in_as_many_iterations(name):
    matrix, b, given, istop = PROBLEMS[name]
    x, *expected, _ = linalg.lsqr(matrix, b, **given)
    own = mpishard.lsqr(matrix, b, **given)
    assert own.istop == istop == expected[0] and own.itn == expected[1]
    # The gradient and what follows from it are small differences of large numbers.
    assert np.allclose(own[2:7], expected[1:6], rtol=1e-4) and own.xnorm == pytest.approx(expected[7], rel=1e-5)
    assert own.arnorm == pytest.approx(expected[6], rel=0.05, abs=1e-9)
    assert np.allclose(own.x, x, rtol=0, atol=1e-5 * max(1, abs(x).max())) and own.success == (istop not in (3, 7))
    # Conjugate gradients lose other digits: the gradients by which they end are equal to a factor near 1.
    other = mpishard.cgls(matrix, b, **given)
    assert other.istop == istop and abs(other.itn - own.itn) <= (name == "tight")
    assert np.allclose(other.x, x, rtol=0, atol=1e-3 * max(1, abs(x).max()))
    assert np.allclose(other[3:5], expected[2:4], rtol=1e-4) and np.allclose(other[5:7], expected[4:6], rtol=0.1)


@both()
def test_the_norms_are_those_of_their_definitions(solver):
    damp = 0.3
    found = solver(TALL, B, damp=damp, x0=ONES, iter_lim=6, calc_var=True)
    moved, residual = found.x - ONES, B - TALL @ found.x
    assert found.r1norm == pytest.approx(np.linalg.norm(residual), rel=1e-9)
    assert found.r2norm == pytest.approx(np.hypot(found.r1norm, damp * np.linalg.norm(moved)), rel=1e-9)
    assert found.xnorm == pytest.approx(np.linalg.norm(moved), rel=1e-9)
    assert found.arnorm == pytest.approx(np.linalg.norm(TALL.T @ residual - damp**2 * moved), rel=1e-6)


@both()
def test_one_number(solver):
    assert solver([[2.0]], [3.0])[:7] == ([1.5], 1, 1, 0.0, 0.0, 2.0, 1.0)


@both()
def test_variances(solver):
    matrix = RANDOM.standard_normal((30, 6))
    found = solver(matrix, B[:30], damp=0.5, calc_var=True, atol=1e-14, btol=1e-14, conlim=0)
    exact = np.linalg.inv(matrix.T @ matrix + 0.25 * np.eye(6)).diagonal()
    assert np.allclose(found.var, exact, rtol=1e-6)
    assert solver(matrix, B[:30]).var is None


class Operator:
    """A matrix with products only; `calls` counts them."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.calls = matrix, matrix.shape, 0

    def matvec(self, v):
        self.calls += 1
        return self.matrix @ v

    def rmatvec(self, u):
        self.calls += 1
        return self.matrix.T @ u


@both()
def test_the_forms_of_a(solver):
    expected = solver(TALL, B)
    dense = solver(TALL.toarray(), list(B))
    assert np.array_equal(dense.x, solver(sparse.csr_matrix(TALL.toarray()), B[:, None]).x)
    operator = Operator(TALL)
    others = [solver(operator, B), solver((operator.matvec, operator.rmatvec), B, x0=np.zeros(40))]
    others += [dense, solver(linalg.aslinearoperator(TALL), B), solver(TALL.tocoo(), B)]

    def spoiling(product):
        def called(vector):
            found = product(vector)
            vector[:] = np.nan
            return found

        return called

    others.append(solver((spoiling(TALL.dot), spoiling(TALL.T.dot)), B, x0=np.zeros(40)))
    assert operator.calls == 2 * (2 * expected.itn + 1)  # none for a start at 0
    for each in others:
        assert np.allclose(each.x, expected.x, rtol=1e-9) and each.itn == expected.itn


@both()
def test_numbers_of_any_size(solver):
    expected = solver(TALL, B)
    found = solver(TALL * 2.0**-200, B * 2.0**150)
    assert np.array_equal(found.x, expected.x * 2.0**350) and found.itn == expected.itn


def test_the_result_is_scipys_tuple_with_names(capsys):
    found = mpishard.lsqr(TALL, B, show=True)
    x, istop, itn, r1norm = found[:4]
    assert x is found.x and (istop, itn, r1norm) == (2, found.itn, found.r1norm) and len(found) == 10
    shown = repr(found).splitlines()
    assert shown[0].startswith("message: 'converged: the least-squares solution") and "  istop: 2" in shown
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == itn + 2 and lines[0].split()[:2] == ["iteration", "r1norm"] and lines[-1] == found.message


@both()
def test_unknowns_in_a_structure(solver):
    start = {"a": np.ones((5, 2)), "b": [np.zeros(30)]}
    found = solver(TALL, B, x0=start, calc_var=True)
    flat = solver(TALL, B, x0=np.append(np.ones(10), np.zeros(30)), calc_var=True)
    assert found.x["a"].shape == found.var["a"].shape == (5, 2)
    assert np.array_equal(np.append(found.x["a"], found.x["b"][0]), flat.x) and found[1:9] == flat[1:9]


@both()
def test_a_callback_sees_each_iterate_and_stops(solver):
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result)
        return intermediate_result.itn == 4

    found = solver(TALL, B, callback=callback)
    assert [each.itn for each in seen] == [1, 2, 3, 4] and found.istop == 8 and not found.success
    assert np.array_equal(seen[-1].x, found.x) and seen[-1].r2norm == found.r2norm
    assert np.array_equal(seen[1].x, solver(TALL, B, iter_lim=2).x)


def method_of(kind, matrix=TALL, b=B, start=None, damp=0.5):
    rows, columns = matrix.shape
    on_ranks = MatrixOnRanks(OwnRows(matrix, "A"), rows, LocalSpace(columns, np.empty(0)), OneRank(), OneRank())
    made = kind(on_ranks, damp, True)
    made.begin(b.copy(), start)
    return made


@pytest.mark.parametrize("kind", [LSQR, CGLS])
def test_it_resumes_at_any_iteration_with_the_same_bits(kind):
    limits = Tolerances(1e-8, 1e-8, 1e8, 80)
    method, saved = method_of(kind, start=ONES), []
    while (istop := reason_to_stop(method.progress, method.bnorm, limits)) is None:
        saved.append((json.dumps(method.numbers()), {name: each.copy() for name, each in method.vectors().items()}))
        method.step()
    assert istop == 2 and len(saved) > 8
    for numbers, vectors in saved:
        other = method_of(kind, start=ONES)
        other.restore(json.loads(numbers))
        for name, vector in other.vectors().items():
            vector[...] = vectors[name]
        while reason_to_stop(other.progress, other.bnorm, limits) is None:
            other.step()
        assert other.progress == method.progress and np.array_equal(other.iterate(), method.iterate())
        assert np.array_equal(other.variances, method.variances)


@pytest.mark.parametrize("damp", [0.0, 0.5])
@pytest.mark.parametrize("start", [None, ONES], ids=["0", "x0"])
@pytest.mark.parametrize("kind", [LSQR, CGLS])
def test_rows_in_another_order_are_found_at_any_iteration(kind, start, damp):
    swapped = np.arange(200)
    swapped[[70, 71]] = 71, 70
    method, rounded, *turned = (
        method_of(kind, *rows, start, damp)
        for rows in ((TALL, B), ((1 + 1e-7) * TALL, B), (TALL[::-1], B[::-1]), (TALL[swapped], B[swapped]))
    )
    for each in (method, rounded, *turned):
        each.note_order()
    for _ in range(20):
        rounded.restore(method.numbers())
        for other in turned:
            with pytest.raises(ValueError, match="A: its rows had another order"):
                other.restore(method.numbers())
        method.step()
    method.restore({name: each for name, each in rounded.numbers().items() if name != "order"})  # of earlier code
    assert method.progress == rounded.progress


@pytest.mark.parametrize("kind", [LSQR, CGLS])
def test_a_state_of_another_problem_is_refused(kind):
    numbers = method_of(kind).numbers()
    for other in (method_of(kind, b=2 * B), method_of(kind, matrix=1.1 * TALL), method_of(kind, start=ONES)):
        before = other.numbers()
        with pytest.raises(ValueError, match="of another problem"):
            other.restore(numbers)
        assert other.numbers() == before


class NoShape:
    """An operator whose shape is none."""

    def __init__(self, shape=None):
        self.shape, self.matvec, self.rmatvec = shape, TALL.dot, TALL.T.dot


WRONG = {
    "damp": ({"damp": -1}, ValueError, "damp"),
    "atol": ({"atol": np.nan}, ValueError, "atol"),
    "iter_lim": ({"iter_lim": 1.5}, TypeError, "iter_lim"),
    "rows": ({"b": B[:9]}, ValueError, r"\(200, 40\), and b 9"),
    "dimensions": ({"b": np.ones((100, 2))}, ValueError, r"b .*\(100, 2\)"),
    "complex b": ({"b": 1j * B}, TypeError, "b must be .*real"),
    "complex A": ({"A": 1j * TALL}, TypeError, "A is complex"),
    "no A": ({"A": "matrix"}, TypeError, "A must be"),
    "a vector": ({"A": np.ones(200)}, ValueError, r"\(200,\)"),
    "no columns": ({"A": np.ones((200, 0))}, ValueError, r"\(200, 0\), and no columns"),
    "an operator without a shape": ({"A": NoShape()}, TypeError, r"operator whose shape is None; give it \(rows"),
    "an operator with another shape": ({"A": NoShape("ab")}, TypeError, "operator whose shape is 'ab'"),
    "small": ({"A": TALL * 1e-200}, ValueError, r"A'\(b - A x0\) is too small .* scale A"),
    "small beside b": ({"A": TALL * 1e-80, "b": B * 1e100}, ValueError, "^x in iteration 1 is too large .* scale A"),
    "a pair": ({"A": (np.sin, np.cos)}, ValueError, "x0"),
    "x0": ({"x0": np.ones(3)}, ValueError, "40 columns, but x0 has 3"),
    "parameters": ({"x0": mpishard.FlatParameters([mpishard.ParameterSpec("x", (40,))])}, TypeError, "FlatParameters"),
    "complex x0": ({"x0": {"a": 1j * ONES}}, TypeError, "x0 is complex"),
    "NaN in A": ({"A": np.where(np.arange(40) == 3, np.nan, np.ones((200, 40)))}, ValueError, "column 3 of A"),
    "NaN in b": ({"b": np.where(np.arange(200) == 3, np.nan, B)}, ValueError, "^b has"),
    "infinite product": ({"A": Operator(TALL * 1e200)}, ValueError, "A' *.* too large"),
    "short product": ({"A": (lambda v: v, lambda u: u[:40]), "x0": ONES}, ValueError, "matvec of A .*40 elements"),
    "complex product": ({"A": (lambda v: 1j * B, lambda u: u[:40]), "x0": ONES}, TypeError, "matvec of A"),
    "show": ({"show": 3}, TypeError, "show"),
    "callback": ({"callback": 3}, TypeError, "callback"),
    "checkpoints": ({"resume": True}, ValueError, "mesh"),
}


@both()
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(solver, name):
    change, error, words = WRONG[name]
    with pytest.raises(error, match=words):
        solver(**({"A": TALL, "b": B} | change))


def test_a_wrong_adjoint_is_named():
    with pytest.raises(ValueError, match="check_adjoint"):
        mpishard.cgls((lambda v: np.zeros(40), lambda u: u), WIDE_B, x0=np.zeros(40))


@both()
def test_a_wrong_adjoint_is_named_after_the_first_iteration(solver, capsys):
    scaled, single = 1.001 * TALL, TALL.astype(np.float32)
    for adjoint, warns in ((TALL[::-1].T, True), (scaled.T, True), (single.T, False)):
        found = solver((lambda v: TALL @ v, lambda u, adjoint=adjoint: adjoint @ u), B, x0=ONES, iter_lim=20)
        assert found.itn > 1 and ("check_adjoint" in capsys.readouterr().err) == warns


def test_without_a_mesh_it_uses_no_mpi():
    code = """
import sys
import numpy as np
from mpishard import cgls, lsqr
assert cgls(np.eye(3), np.ones(3)).itn == lsqr(np.eye(3), np.ones(3)).itn == 1
assert "mpi4py.MPI" not in sys.modules and "h5py" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
