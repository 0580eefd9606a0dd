"""`minimize` and reverse communication on one process: SciPy's conventions, requests and answers, and bad input."""

from __future__ import annotations

import copy
import errno
import math
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from descent import CENTER, Descent, bowl, curvature, rosenbrock

import mpishard
from mpishard import FlatParameters, OptimizeResult, ParameterSpec, ReverseCommunication, minimize
from mpishard.backend import array as arrays
from mpishard.inverse.functions import Hessian
from mpishard.inverse.result import make_method, pair_of_bounds
from mpishard.layout.tensors import ModelParallelRank
from mpishard.minimizers import NonlinearCG
from mpishard.minimizers.line_search import HagerZhang, MoreThuente

# `minimize` on one process: SciPy's conventions.


def test_tables_on_a_full_disk_end_no_run(monkeypatch):
    """On a mesh it would be the error of rank 0 alone, for which the others would wait."""
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=full, flush=full))
    assert minimize(rosenbrock, np.zeros(3), options={"disp": True}).success
    for solver in ("exact", "cg"):
        assert mpishard.least_squares(lambda x: x - 1, np.zeros(3), tr_solver=solver, verbose=2).success
    assert mpishard.lsqr(np.eye(2), np.ones(2), show=True).success
    assert mpishard.check_gradient(rosenbrock, np.ones(3) / 2)
    assert full.call_count > 10


def recorded(fun):
    """The function, and the points of its calls."""
    points = []

    def called(x):
        points.append(np.array(x, np.float64))
        return fun(x)

    return called, points


@pytest.mark.parametrize("scheme, calls", [("2-point", 1), ("3-point", 2)])
@pytest.mark.parametrize("bounds", [None, [(-1.2, 3), (None, 1 - 1e-9), (-1e-12, 2), (0, 1), (0.3, None)]])
def test_finite_differences_are_scipys(scheme, calls, bounds):
    """At the start the same points to the last bit, also near bounds; and then the same iterates, but for rounding."""
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    start = np.array([-1.2, 1.0, 0.0, 1.0, 1e4])
    fun, points = recorded(lambda x: rosenbrock(x / [1, 1, 1, 1, 1e4])[0])
    iterates = [], []
    given = {"jac": scheme, "bounds": bounds, "options": {"maxiter": 4}}
    ours = minimize(fun, start, callback=lambda x: iterates[0].append(x), **given)
    assert bounds is None or all((x <= [3, 1 - 1e-9, 2, 1, np.inf]).all() and x[2] >= -1e-12 for x in points)
    first = 1 + calls * start.size
    mine = sorted(points[:first], key=tuple)
    points.clear()
    peer = optimize.minimize(fun, start, method="L-BFGS-B", callback=lambda x: iterates[1].append(x.copy()), **given)
    assert np.array_equal(mine, sorted(points[:first], key=tuple))
    assert len(iterates[0]) == len(iterates[1]) == ours.nit == peer.nit
    for own, other in zip(*iterates, strict=True):
        assert np.allclose(own, other, rtol=1e-4, atol=1e-5)
    assert np.allclose(ours.fun, peer.fun, rtol=1e-4)


def test_finite_differences_move_only_what_may_move():
    fixed = np.array([False, True, False])
    fun, points = recorded(lambda x: bowl(x)[0])
    result = minimize(fun, np.zeros(3), jac="2-point", bounds=[(None, None), (None, None), (0, 0)], fixed=fixed)
    assert result.success and abs(result.x[0] - CENTER[0]) < 1e-5 and result.x[1:].tolist() == [0, 0]
    assert len(points) == 2 * result.nfev and result.jac[1:].tolist() == [0, 0]
    single = minimize(fun, np.zeros(3, "f4"), jac="3-point", tol=1e-3)
    assert single.x.dtype == np.float32 and np.allclose(single.x, CENTER, atol=1e-2)


def test_finite_differences_of_named_and_complex_unknowns():
    parameters = FlatParameters.of({"a": np.zeros(2), "b": np.ones(1)})

    def of_named(x):
        assert x is parameters
        return float(((x["a"] - 1) ** 2).sum() + (x["b"] ** 2).sum())

    found = minimize(of_named, parameters, jac="3-point")
    assert found.success and np.allclose(parameters.flat, [1, 1, 0], atol=1e-4)
    wanted = np.array([1 + 2j, -1j])
    found = minimize(lambda z: float((abs(z["z"] - wanted) ** 2).sum()), {"z": np.zeros(2, complex)}, jac="2-point")
    assert np.allclose(found.x["z"], wanted, atol=1e-4) and found.jac["z"].dtype == complex


def test_a_column_that_fails_is_a_failed_evaluation():
    """At a trial the step is shortened; at the start it is an error."""

    def beyond(most):
        def fun(x):
            # Where both elements are as large, as at the points of the method, it does not fail.
            if x.max() > most and x.max() - x.min() > 1e-6:
                raise mpishard.EvaluationFailed("too far")
            return float(((x - 2) ** 4).sum())

        return fun

    found = minimize(beyond(1.0), np.zeros(2), jac="3-point", options={"maxiter": 3})
    assert found.nit > 0 and 0 < found.x.max() <= 1.0 and "too far" in found.message
    with pytest.raises(mpishard.EvaluationFailed, match="too far"):
        minimize(beyond(0.0), np.zeros(2), jac="3-point")


def test_the_result_is_scipys_where_that_is_imported():
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    seen = []
    result = minimize(bowl, np.zeros(3), callback=lambda intermediate_result: seen.append(intermediate_result))
    for each in (result, seen[0], pickle.loads(pickle.dumps(result)), copy.copy(result)):
        assert isinstance(each, optimize.OptimizeResult) and isinstance(each, OptimizeResult) and each.x.shape == (3,)
    assert pickle.loads(pickle.dumps(result)).message == result.message


def test_the_result_has_scipys_fields_by_attribute_and_by_item():
    result = minimize(bowl, np.zeros(3), method=Descent())
    assert isinstance(result, OptimizeResult)
    assert list(result) == ["x", "fun", "jac", "nit", "nfev", "njev", "nhev", "status", "success", "message"]
    assert np.allclose(result.x, CENTER, atol=1e-5) and result["x"] is result.x
    assert np.allclose(result.jac, 2 * (result.x - CENTER)) and result.fun == bowl(result.x)[0]
    assert (result.status, result.success) == (0, True) and result.message.startswith("converged: the projected")
    assert result.nfev == result.njev == result.nit + 1 and result.nhev == 0
    assert "success: True" in repr(result) and "nit" in dir(result)
    long = repr(OptimizeResult(x=np.arange(500.0).reshape(250, 2), tree={"a": np.zeros(900)}))
    assert "..." in long and len(long.splitlines()) < 10
    with pytest.raises(AttributeError, match="no 'hess_inv'"):
        result.hess_inv  # noqa: B018


@pytest.mark.parametrize(
    ("start", "dtype"),
    [([0, 0, 0], "f8"), (np.zeros((3, 1)), "f8"), (np.zeros(3, "f4"), "f4"), (np.zeros(3, ">f8"), "f8")],
)
def test_starts_are_flat_and_real_and_neither_changed_nor_kept(start, dtype):
    before, seen = np.copy(start), []

    def spoils(x):
        assert x.shape == (3,) and x.dtype == np.dtype(dtype) and x.flags.writeable
        answer = bowl(x)
        seen.append(x)
        x[:] = 7
        return answer

    if isinstance(start, np.ndarray):
        start.flags.writeable = False
    assert np.allclose(minimize(spoils, start, method=Descent(), tol=1e-3).x, CENTER, atol=1e-3)
    assert np.array_equal(start, before) and len({id(x) for x in seen}) == len(seen)


def test_fun_and_jac_apart_with_arguments():
    def value(x, a, b):
        return np.array([(x - a) @ (x - a) * b])

    def gradient(x, a, b):
        return [2 * b * each for each in x - a]

    result = minimize(value, np.zeros(3), (CENTER, 0.5), Descent(), gradient)
    assert np.allclose(result.x, CENTER, atol=1e-4)
    assert minimize(lambda x, a: bowl(x + a), np.zeros(3), 1.0, Descent()).success


def test_callbacks_as_scipy_tells_them_apart():
    points, results = [], []

    def keyword(intermediate_result):
        results.append(intermediate_result)
        if len(results) == 4:
            raise StopIteration

    for seen in (lambda x: points.append(x), lambda x: 1):  # what is not True stops nothing
        assert minimize(bowl, np.zeros(3), method=Descent(), callback=seen).status == 0
    result = minimize(bowl, np.zeros(3), method=Descent(), callback=keyword)
    assert result.status == 99 and result.nit == 4 and "StopIteration" in result.message
    for number, (point, intermediate) in enumerate(zip(points, results, strict=False), 1):
        assert np.array_equal(point, intermediate.x)
        assert (intermediate.nit, intermediate.fun) == (number, bowl(point)[0])
    assert np.array_equal(result.x, points[3])
    result = minimize(bowl, np.zeros(3), method=Descent(), callback=lambda x: x.sum() > 0)  # np.True_, of an expression
    assert (result.nit, result.status) == (1, 99) and not result.success
    assert np.allclose(result.x, 0.2 * CENTER) and np.allclose(result.jac, -1.6 * CENTER)
    assert result.fun == pytest.approx(bowl(result.x)[0])
    # That of the last iteration changes no outcome.
    result = minimize(bowl, np.zeros(3), method=Descent(maxiter=3), callback=lambda xk: True if xk[0] > 0.4 else None)
    assert (result.nit, result.status) == (3, 1) and "maxiter=3" in result.message


def test_errors_of_the_user_come_through():
    def fails(*_, **__):
        raise KeyError("mine")

    for given in ({"fun": fails}, {"fun": bowl, "callback": fails}):
        with pytest.raises(KeyError, match="mine"):
            minimize(x0=np.zeros(3), method=Descent(), **given)


def test_ends_without_success():
    for options, fun, status, words in (
        ({"maxiter": 2}, bowl, 1, "iterations reached maxiter=2"),
        ({"maxfun": 4}, bowl, 1, "evaluations reached maxfun=4"),
        ({"maxtime": 0}, bowl, 1, "maxtime"),
        ({}, lambda x: (math.nan, x), 2, "NaN or infinite"),
        ({}, lambda x: (bowl(x)[0], -bowl(x)[1]), 2, "mpishard.check_gradient"),
    ):
        result = minimize(fun, np.zeros(3), method=Descent(), options=options)
        assert (result.status, result.success) == (status, False) and words in result.message
        if status == 2:
            assert result.nit == 0 and np.array_equal(result.x, np.zeros(3))
        if "NaN" in words:
            assert result.nfev == 1 and np.isnan(result.jac).all()
        else:
            assert result.fun == bowl(result.x)[0]


@pytest.mark.parametrize("method", ["L-BFGS-B", "CG", "trust-ncg"])
@pytest.mark.parametrize("form", [np.asarray, lambda g: {"a": g}], ids=["array", "tree"])
def test_a_function_in_float32_of_unknowns_in_float64(method, form):
    numbers = np.random.default_rng(0)
    matrix, right = (numbers.standard_normal(shape).astype(np.float32) for shape in ((60, 20), 60))

    def rounded(x):
        misfit = matrix @ plain(x).astype(np.float32) - right
        return float(misfit @ misfit), form(2 * matrix.T @ misfit)

    def plain(x):
        return x["a"] if isinstance(x, dict) else x

    product = {"hessp": lambda x, d: form(2 * matrix.T @ (matrix @ plain(d)))} if method == "trust-ncg" else {}
    result = minimize(rounded, form(np.full(20, -0.7)), method=method, **product)
    least = np.linalg.lstsq(matrix.astype(float), right.astype(float))[1][0]
    assert result.success and result.fun == pytest.approx(least, rel=1e-6) and result.nfev < 50


@pytest.mark.parametrize("method", ["L-BFGS-B", "L-BFGS", "CG", "trust-ncg"])
@pytest.mark.parametrize("beyond", [math.nan, math.inf])
def test_a_wall_of_values_that_are_not_finite_is_no_minimum(method, beyond):
    def parabola(x):
        if x[0] >= 1:
            return beyond, np.full(2, beyond)
        return (x - 3) @ (x - 3), 2 * (x - 3)

    result = minimize(parabola, np.zeros(2), method=method, hessp=lambda x, d: 2 * d)
    assert result.status == 2 and not result.success and result.x[0] == pytest.approx(1, abs=1e-5)
    assert "NaN or infinite" in result.message and "does not fit" not in result.message


def test_a_function_may_change_what_it_is_given():
    def spoils(x):
        value = bowl(x)[0]
        x[:] = math.nan
        return value

    given = minimize(spoils, np.zeros(3), method=Descent(), jac=lambda x: bowl(x)[1])
    assert given.success and np.allclose(given.x, CENTER, atol=1e-4)
    term = mpishard.Tikhonov(weight=1.0)
    own = mpishard.regularized(lambda x: (spoils(x), np.zeros(3)), term)(np.arange(3.0))
    assert own[0] == bowl(np.arange(3.0))[0] + term.value_and_gradient(np.arange(3.0))[0]


@pytest.mark.parametrize("method", ["L-BFGS-B", "L-BFGS", "CG", "trust-ncg"])
def test_results_may_be_columns_of_matrices(method):
    def column(vector):
        return np.stack([vector, vector], axis=1)[:, 0]

    given = {} if method == "L-BFGS-B" else {"preconditioner": lambda v: column(0.4 * v).astype(">f8")}
    found = minimize(
        lambda x: (bowl(x)[0], column(bowl(x)[1])),
        np.zeros(3),
        method=method,
        hessp=lambda x, d: column(2 * d),
        **given,
    )
    assert found.success and np.allclose(found.x, CENTER, atol=1e-4)


@pytest.mark.parametrize("method", ["L-BFGS-B", "trust-ncg"])
def test_elements_with_equal_bounds_may_have_no_gradient(method):
    def without(x):
        value, gradient = bowl(x)
        gradient[1] = math.nan
        return value, gradient

    bounds = [(None, None), (0.25, 0.25), (None, None)]
    result = minimize(without, np.zeros(3), method=method, hessp=lambda x, d: 2 * d, bounds=bounds)
    assert result.success and np.allclose(result.x, [CENTER[0], 0.25, CENTER[2]], atol=1e-4)


def test_a_start_that_is_held_at_its_bounds_is_said():
    wrong = minimize(lambda x: (bowl(x)[0], -bowl(x)[1]), [0, 0, 0], bounds=[(0, 2), (-2, 0), (0, 2)])
    assert (wrong.nit, wrong.status) == (0, 0) and "held at bounds" in wrong.message
    assert "held at" not in minimize(bowl, CENTER, bounds=(-3, 3)).message


class Bounds:
    """As scipy.optimize.Bounds."""

    def __init__(self, lb, ub):
        self.lb, self.ub = lb, ub


@pytest.mark.parametrize(
    "bounds",
    [
        [(-1, 0.5), (-1, 0.5), (-1, 0.5)],
        [(-1, 0.5), (-1, None), (None, 0.5)],
        (-1, 0.5),
        (np.full(3, -1), np.full(3, 0.5)),
        ([-1, -1, -1], 0.5),
        Bounds(-1, 0.5),
        Bounds([-1, -1, -np.inf], [0.5, np.inf, 0.5]),
        np.array([[-1, 0.5]] * 3),
    ],
)
def test_bounds_in_all_forms(bounds):
    result = minimize(bowl, np.zeros(3), method=Descent(), bounds=bounds)
    assert np.allclose(result.x, [0.5, -1, 0.5], atol=1e-5) and result.success


def test_two_pairs_for_two_elements_are_read_as_scipy_does():
    for bounds in ([(0, 1), (2, None)], ([0, 1], [2, math.inf]), (np.array([0, 1]), np.array([2, math.inf]))):
        lower, upper = pair_of_bounds(bounds, 2)
        assert lower.tolist() == [0, 2] and upper.tolist() == [1, math.inf]
    assert pair_of_bounds(Bounds([0, 1], [2, math.inf]), 2) == ([0, 1], [2, math.inf])
    assert pair_of_bounds((0, 1), 2) == (0, 1) and pair_of_bounds((None, 1), 2) == (-math.inf, 1)
    assert pair_of_bounds(None, 2) is None


def test_a_start_outside_of_its_bounds_is_projected_and_said_once(capsys):
    first = []
    minimize(lambda x: (first.append(x.copy()), bowl(x))[1], [9, 0, -9], method=Descent(), bounds=(-1, 0.5))
    assert first[0].tolist() == [0.5, 0, -1]
    said = "mpishard: 2 elements of the start lie outside of their bounds, and begin at the nearest bound\n"
    assert capsys.readouterr().err == said
    first = ReverseCommunication(Descent(), [9, 0, -9], bounds=(-1, 0.5))
    first.tell(*bowl(first.ask().x))
    assert capsys.readouterr().err == said
    second = ReverseCommunication(Descent(), [9, 0, -9], bounds=(-1, 0.5))
    second.deserialize(first.serialize())
    second.tell(*bowl(second.ask().x))
    assert not capsys.readouterr().err


def test_fixed_elements_and_scales():
    result = minimize(bowl, np.zeros(3), method=Descent(), fixed=[False, True, False], inner_product=[1, 1, 0.5])
    assert np.allclose(result.x, [1, 0, 3], atol=1e-4)


def test_a_start_with_names():
    start = FlatParameters.of({"a": np.zeros((2, 1)), "b": np.zeros(())})
    start_flat = start.flat

    def named(p):
        assert p is start
        residual = {"a": p["a"] - [[1.0], [-2.0]], "b": p["b"] - 3}
        return sum((each**2).sum() for each in residual.values()), {name: 2 * each for name, each in residual.items()}

    bounds = {"a": (None, [[0.5], [9.0]]), "b": Bounds(0, 2)}
    result = minimize(named, start, method=Descent(), bounds=bounds, fixed={"b": False})
    assert result.x is start and start.flat is start_flat
    assert np.allclose(start.flat, [0.5, -2, 2], atol=1e-5) and result.jac.shape == (3,)
    free = minimize(named, start, method="trust-ncg", hess=lambda p: 2 * np.eye(3))
    assert free.x is start and np.allclose(start.flat, [1, -2, 3], atol=1e-5)


def hessian(x):
    """The Hessian of `rosenbrock`, by its products."""
    return np.stack([curvature(x, each) for each in np.eye(len(x))], 1)


@pytest.mark.parametrize("form", ["array", "list", "csr", "operator"])
def test_a_hessian_as_scipy_takes_it(form):
    sparse, linalg = (pytest.importorskip(f"scipy.sparse{inner}") for inner in ("", ".linalg"))
    forms = {"array": np.asarray, "list": np.ndarray.tolist}
    made = {**forms, "csr": sparse.csr_array, "operator": linalg.aslinearoperator}[form]
    points = []

    def hess(x, scale):
        points.append(x.copy())
        return made(scale * hessian(x))

    options = {"method": "trust-ncg", "args": (1.0,)}
    start = np.full(8, -1.2)
    result = minimize(lambda x, scale: rosenbrock(x), start, hess=hess, **options)
    products = minimize(lambda x, s: rosenbrock(x), start, hessp=lambda x, d, s: hessian(x) @ d, **options)
    assert result.success and np.allclose(result.x, products.x, atol=1e-6) and result.nhev > 2 * len(points)
    assert len({point.tobytes() for point in points}) == len(points)


class Pair(NamedTuple):
    """A tuple with names."""

    a: np.ndarray
    b: np.ndarray


TREE = {"layers": [np.zeros((2, 2)), Pair(np.zeros(1), [0, 0])], "offset": 0.0}


def of_tree(x):
    """Half the squared distance of a tree like TREE to whole numbers."""
    first, (a, b) = x["layers"]
    residual = [first - np.arange(4.0).reshape(2, 2), a - 4, b - np.array([5.0, 6.0]), x["offset"] - 7]
    value = sum(float(np.sum(each * each)) for each in residual) / 2
    return value, {"offset": residual[3], "layers": (residual[0], (residual[1], residual[2]))}


def joined(tree):
    return np.concatenate([np.ravel(each) for each in (tree["layers"][0], *tree["layers"][1], tree["offset"])])


def flattened(x):
    """`of_tree` of a flat array."""
    value, gradient = of_tree({"layers": [x[:4].reshape(2, 2), Pair(x[4:5], x[5:7])], "offset": x[7]})
    return value, joined(gradient)


def test_a_start_that_is_a_tree():
    points = []

    def fun(x):
        assert type(x["layers"]) is list and type(x["layers"][1]) is Pair and list(x) == list(TREE)
        answer = of_tree(x)
        x["offset"][...] = 9  # a copy
        return answer

    given = {"bounds": {"layers": [None, (None, (0, [5.5, 5.5]))]}, "fixed": {"offset": True}, "inner_product": 2.0}
    of_flat = {"bounds": [(None, None)] * 5 + [(0, 5.5)] * 2 + [(None, None)], "fixed": np.arange(8) == 7}
    result = minimize(fun, TREE, method=Descent(), callback=points.append, **given)
    flat = minimize(flattened, np.zeros(8), method=Descent(), inner_product=np.full(8, 2.0), **of_flat)
    assert (result.nit, result.nfev, result.message) == (flat.nit, flat.nfev, flat.message)
    for tree, array in ((result.x, flat.x), (result.jac, flat.jac), (points[-1], flat.x)):
        assert type(tree["layers"][1]) is Pair and np.array_equal(joined(tree), array)
    assert not TREE["layers"][0].any() and result.x["layers"][0].shape == (2, 2)
    everywhere = minimize(of_tree, TREE, bounds=(0, 2)).x
    scaled = minimize(of_tree, TREE, method="L-BFGS", preconditioner=lambda x: x).x
    assert np.allclose(joined(scaled), np.arange(8))
    assert np.array_equal(joined(everywhere), np.minimum(np.arange(8), 2))
    newton = minimize(of_tree, TREE, method="trust-ncg", hessp=lambda x, d: {**d, "offset": 2 * d["offset"] / 2}).x
    matrix = minimize(of_tree, TREE, method="trust-ncg", hess=lambda x: np.eye(8)).x
    assert np.allclose(joined(newton), np.arange(8)) and np.allclose(joined(matrix), np.arange(8))
    assert mpishard.check_gradient(of_tree, TREE, disp=False)
    single = {"a": np.zeros(3, "f4"), "b": 1.0}  # a number of Python takes the dtype of the others
    assert minimize(lambda x: (x["b"] ** 2, {"a": x["a"], "b": 2 * x["b"]}), single).x["b"].dtype == np.float32


MODES = np.array([1 + 2j, -1j])


def modes(z):
    return float(np.sum(abs(z - MODES) ** 2)), 2 * (z - MODES)


@pytest.mark.parametrize(("dtype", "real"), [("c8", "f4"), ("c16", "f8")])
def test_complex_unknowns(dtype, real):
    def checked(z):
        assert z.dtype == dtype and z.shape == (2,)
        return modes(z)

    result = minimize(checked, np.zeros((2, 1), dtype), options={"gtol": 1e-6})
    parts = lambda x: (modes(x.view(dtype))[0], modes(x.view(dtype))[1].astype(dtype).view(real))  # noqa: E731
    pairs = minimize(parts, np.zeros(4, real), options={"gtol": 1e-6})
    assert result.x.dtype == result.jac.dtype == dtype and np.array_equal(result.x.view(real), pairs.x)
    assert np.allclose(result.x, MODES, atol=1e-4) and result.nfev == pairs.nfev
    of_tree = lambda x: (modes(x["z"])[0], {"z": modes(x["z"])[1]})  # noqa: E731
    tree = minimize(of_tree, {"z": np.zeros(2, dtype)}, fixed={"z": [False, True]})
    assert np.allclose(tree.x["z"], [MODES[0], 0], atol=1e-4)
    found = minimize(modes, [0j, 0j], method="trust-ncg", hessp=lambda z, d: 2 * d)
    assert np.allclose(found.x, MODES) and found.x.dtype == np.complex128
    conjugate = minimize(lambda z: (modes(z)[0], modes(z)[1].conj()), np.zeros(2, complex))
    assert conjugate.status == 2 and "df/da + i df/db, as of PyTorch; JAX gives its conjugate" in conjugate.message
    assert not mpishard.check_gradient(lambda z: (modes(z)[0], modes(z)[1].conj()), np.ones(2, complex), disp=False)


def test_options_of_a_list_of_arrays_of_several_shapes():
    def fun(x):
        return sum((each @ each) for each in x) / 2, list(x)

    for name in ("inner_product", "preconditioner"):
        assert minimize(fun, [np.ones(2), np.ones(3)], **{name: [np.ones(2), np.ones(3)]}).success
    bounds = [(np.full(2, 0.5), None), (None, np.ones(3))]
    found = minimize(fun, [np.ones(2), np.ones(3)], fixed=[np.array([True, False]), False], bounds=bounds)
    assert np.array_equal(found.x[0], [1, 0.5]) and not found.x[1].any()


# What is refused.


def answers(*answer):
    """A function that returns this."""
    return {"fun": lambda x: answer if len(answer) > 1 else answer[0]}


def of_trees(gradient):
    return {**answers(0.0, gradient), "x0": TREE}


NAMED = FlatParameters.of({"a": np.zeros((2, 1)), "b": np.zeros(())})
BLOCK = np.zeros((2, 2))
NEWTON = {"fun": rosenbrock, "method": "trust-ncg"}
PRECONDITIONED = {"fun": of_tree, "x0": TREE, "method": "CG"}
COMPLEX = {"fun": modes, "x0": np.zeros(2, complex)}
OPERATOR = SimpleNamespace(shape=(3, 3), matvec=abs)
REFUSED = [
    # The start, and what belongs to it.
    ({"x0": []}, ValueError, "x0 is empty"),
    ({"x0": [0, math.nan, 0]}, ValueError, "x0 .*element 1 is nan"),
    ({"x0": ["a"]}, TypeError, r"x0 .*got \['a'\]$"),
    ({"x0": [[1, 2], [3]]}, TypeError, r"x0 .*got \[\[1, 2\], \[3\]\]$"),
    ({"x0": {}}, ValueError, "x0 is empty: .*dict"),
    ({"x0": {"a": np.ones(2), "b": None}}, TypeError, "x0 of 'b' .*got None"),
    ({"x0": {"a": {"b": np.ones(2)}, "a.b": 1.0}}, ValueError, "x0 .*'a.b'"),
    ({"x0": {"a": [[1, 2], [3]]}}, TypeError, "x0 of 'a'"),
    ({"x0": [np.ones(2), np.full(2, math.inf)]}, ValueError, r"element \(0\) of '1' is inf"),
    ({"x0": [np.ones(1), np.ones(1, "f4")]}, TypeError, "'0' is float64 and '1' is float32"),
    ({"bounds": [(0, 1), (2, 1), (0, 1)]}, ValueError, r"element \(1\) of 'x' .*lower bound 2"),
    ({"bounds": [(0, 1)] * 4}, ValueError, "bounds have 4 .*x0 has 3"),
    ({"bounds": [(0, 1), None, (0, 1)]}, ValueError, r"bounds\[1\]=None is no pair"),
    ({"fixed": [2]}, ValueError, r"fixed must be True or False .*got \[2\]"),
    ({"fixed": [0, 1, 2]}, ValueError, r"fixed must be True or False .*got \[0, 1, 2\]"),
    ({"bounds": Bounds(np.zeros(4), 1)}, ValueError, r"lower bounds .*\(4,\), .*\(3,\)"),
    ({"bounds": [(0, "a"), (0, 1), (0, 1)]}, TypeError, "element 0 .*got 'a'"),
    ({"bounds": "ab"}, TypeError, "must be a pair"),
    ({"bounds": 3}, TypeError, "must be a pair"),
    ({"bounds": {"y": (0, 1)}}, ValueError, "no tensor 'y'"),
    ({"inner_product": [1, 0, 1]}, ValueError, r"inner_product .*element \(1\) of 'x' is 0"),
    ({"preconditioner": [1, 0, 1]}, ValueError, r"preconditioner .*element \(1\) of 'x' is 0"),
    ({"mask": 1}, TypeError, "minimize .*'mask'"),
    ({"x0": TREE, "bounds": {"ofset": (0, 1)}}, ValueError, "structure of x0.*'ofset' unknown"),
    ({"x0": TREE, "bounds": [(0, 1)] * 8}, ValueError, "bounds .*structure of x0"),
    ({"x0": TREE, "bounds": {"offset": 1}}, ValueError, "'offset' .*got 1"),
    ({"x0": TREE, "bounds": {"layers": [(np.zeros(3), 1), None]}}, ValueError, r"'layers.0' .*\(3,\)"),
    ({"x0": TREE, "fixed": np.ones(8, bool)}, ValueError, "fixed .*structure of x0"),
    ({**PRECONDITIONED, "preconditioner": lambda x: 1.0}, ValueError, "result of preconditioner"),
    ({**COMPLEX, "bounds": (0, 1)}, ValueError, "bounds are for real numbers"),
    # What functions return.
    (answers(1.0), TypeError, r"\(value, gradient\), .*returned a float"),
    (answers(1.0, np.zeros(3), 2), TypeError, "it returned a tuple"),
    (answers("a", np.zeros(3)), TypeError, "one real number, got 'a'"),
    (answers(np.ones(2), np.zeros(3)), ValueError, r"one number, got an array .*\(2,\)"),
    (answers(1j, np.zeros(3)), TypeError, "value as one real number"),
    (answers(10**400, np.zeros(3)), TypeError, "value as one real number"),
    (answers(1.0, np.zeros(2)), ValueError, "gradient has 2 elements .*x0 has 3"),
    (answers(1.0, None), TypeError, "gradient .*got None"),
    (answers(1.0, np.zeros(3, complex)), TypeError, "real numbers"),
    (answers(1.0, {"x": np.zeros(3)}), TypeError, "like x0, which has no names"),
    ({**answers(0.0, np.zeros(2)), "x0": np.zeros(2, complex)}, TypeError, "'x' is float64, .*complex"),
    ({**answers(0.0, {"a": np.zeros(2)}), "x0": NAMED}, ValueError, "'b' is missing"),
    ({**answers(0.0, {"a": np.zeros(3), "b": 0}), "x0": NAMED}, ValueError, "gradient of 'a' has 3 elements"),
    (of_trees(np.zeros(8)), ValueError, "'layers', 'offset', here an array .*8,"),
    (of_trees({"offset": 0.0}), ValueError, "gradient .*structure of x0: .*'layers' missing"),
    (of_trees({"offset": 0.0, "layers": [1.0]}), ValueError, "'layers' is a list of 2, here 1"),
    (of_trees({"offset": 0.0, "layers": [BLOCK, (0.0, [0, 0])]}), ValueError, "of .layers.1.0. has the shape"),
    (of_trees({"offset": 1j, "layers": [BLOCK, ([0.0], [0, 0])]}), TypeError, "take the real part"),
    # Functions, methods and their options.
    ({"fun": 3}, TypeError, "fun=3"),
    ({"jac": None}, ValueError, "jac=None"),
    ({"jac": "cs"}, ValueError, "jac='cs': .*'2-point', '3-point'"),
    ({"jac": "2-point"}, TypeError, "fun must return its value"),
    ({"hessp": 1}, TypeError, "hessp=1"),
    ({"constraints": {"type": "eq"}}, ValueError, "'type', .*'fun'"),
    ({"callback": 1}, TypeError, "callback=1"),
    ({"method": "SLSQP"}, ValueError, "no method 'SLSQP'; .*L-BFGS-B"),
    ({"method": "lmvm"}, ValueError, "no method 'lmvm'; take 'L-BFGS'; there are"),
    ({"method": "LBFGS-B"}, ValueError, "perhaps 'L-BFGS-B' is meant"),
    ({"method": "nls"}, ValueError, "take 'trust-ncg'.*hessp="),
    ({"method": 3}, TypeError, "method=3"),
    ({"maxiter": 3}, TypeError, r"'maxiter'; .*options={\"maxiter\": 3}"),
    ({"maxcor": 3}, TypeError, "options="),
    ({"max_iter": 3}, TypeError, "unexpected keyword argument 'max_iter'$"),
    ({"method": "CG", "options": {"c1": 0.4, "c2": 0.1}}, ValueError, "c1=0.4 and c2=0.1"),
    (
        {"method": "CG", "options": {"c1": 0.1}},
        ValueError,
        "c2=0.1; c2 is the default of this method, give both",
    ),
    ({"method": "trust-ncg", "options": {"c1": 0.4}}, ValueError, "'trust-ncg' has no option 'c1'"),
    (
        {"method": "trust-ncg", "options": {"initial_trust_radius": 2, "max_trust_radius": 2}},
        ValueError,
        "=2 .*max_radius=2",
    ),
    ({"method": "CG", "options": {"maxIter": 2}}, ValueError, "perhaps 'maxiter' is meant"),
    ({"options": {"return_all": 1}}, TypeError, "return_all=1"),
    ({"inner_product": np.eye(3)}, ValueError, r"inner_product is a matrix of shape \(3, 3\): .*RieszMap"),
    ({"preconditioner": OPERATOR}, ValueError, "preconditioner is a matrix .*function"),
    ({"options": {"eps": 1}}, ValueError, "Descent has no option 'eps'; jac='2-point' .*gtol"),
    ({"options": {"bounds": 1}}, ValueError, "has no option 'bounds'"),
    ({"options": 3}, TypeError, "options=3"),
    ({"options": {"maxtime": -1}}, ValueError, "maxtime=-1"),
    ({"tol": -1}, ValueError, "tol=-1"),
    ({"samples": 3}, ValueError, "samples= .*elastic=True.*reduction=.sum."),
    ({"elastic": True}, ValueError, "give mesh="),
    ({"elastic": 2}, TypeError, "elastic=2"),
    ({"reduction": "sum"}, ValueError, "reduction='sum' .*mesh"),
    ({"method": "L-BFGS-B", "options": {"maxcor": 0}}, ValueError, "LBFGSB: history=0"),
    ({"method": "L-BFGS-B", "options": {"gtol": math.nan}}, ValueError, "LBFGSB: gtol=nan"),
    ({"method": "L-BFGS-B", "options": {"norm": 2}}, ValueError, "'L-BFGS-B' has no option 'norm'.*maxcor"),
    ({"method": "L-BFGS", "bounds": (0, 1)}, ValueError, "no bounds; method='L-BFGS-B'"),
    ({"method": "Newton-CG"}, ValueError, "Hessian: give hessp.*hess="),
    ({"hess": "2-point"}, TypeError, "hess='2-point'"),
    ({**NEWTON, "hess": lambda x: np.eye(2)}, ValueError, r"\(2, 2\), but x0 has 3"),
    ({**NEWTON, "hess": lambda x: "a"}, TypeError, "hess .*matrix"),
    ({**COMPLEX, "method": "trust-ncg", "hess": hessian}, ValueError, "real numbers, and x0 is complex"),
]


def test_what_scipy_takes_in_other_forms():
    """Bounds of a zip, counts such as 1e4, and both forms of a Hessian, of which the matrix counts."""
    start = np.array([-1.0, 0.7, 0.3])
    plain = minimize(rosenbrock, start, bounds=[(-2, 0.5)] * len(start), options={"maxiter": 4})
    ends = [-2] * len(start), [0.5] * len(start)
    found = minimize(rosenbrock, start, bounds=zip(*ends, strict=True), options={"maxiter": 4.0, "maxfun": 1e4})
    assert np.array_equal(found.x, plain.x) and found.nit == 4
    with pytest.raises(TypeError, match="maxiter=4.5"):
        minimize(rosenbrock, start, options={"maxiter": 4.5})
    by_matrix = minimize(x0=start, **NEWTON, hess=hessian)
    both = minimize(x0=start, **NEWTON, hess=hessian, hessp=lambda x, p: 0 * p)
    assert np.array_equal(both.x, by_matrix.x) and both.nit > 1


def test_a_hessian_is_kept_where_its_array_is_written_again():
    matrix, x = np.eye(2), np.ones(2)
    hessian = Hessian(lambda x: matrix, ())
    assert hessian.product(x, x).tolist() == [1, 1]
    matrix[:] = 7  # as a function may do at a trial that is refused
    assert hessian.product(x, x).tolist() == [1, 1]


@pytest.mark.parametrize("rows", [[[2.0, 1.0], [0.0, 3.0]], [[4.0]]], ids=["matrix", "number"])
def test_a_hessian_on_a_device_multiplies_there(device, rows):
    """One number stands for a matrix of one row, as on the host."""
    matrix = np.array(rows)
    given = device.put(matrix if matrix.size > 1 else matrix.reshape(-1))
    x = np.arange(1.0, 1.0 + len(matrix))
    found = Hessian(lambda x: given, ()).product(device.put(x), device.put(x))
    assert np.array_equal(arrays.to_host(found), matrix @ x)


@pytest.mark.parametrize(("change", "error", "words"), REFUSED, ids=[words[:30] for *_, words in REFUSED])
def test_what_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        minimize(**{"fun": bowl, "x0": np.zeros(3), "method": Descent(), **change})


def test_a_part_of_split_parameters_needs_a_mesh():
    place = ModelParallelRank(tensor_rank=1, tensor_size=2)
    part = FlatParameters([ParameterSpec("field", (5, 4), tensor_dim=0)], np.float64, place=place)
    with pytest.raises(ValueError, match="x0 is split over tensor=2 and pipeline=1"):
        minimize(lambda p: (0.0, p.flat), part)
    with pytest.raises(ValueError, match="hess= .*give hessp="):
        minimize(lambda p: (0.0, p.flat), part, hess=lambda p: np.eye(10))


# Methods by SciPy's names.


def test_the_table(capsys):
    result = minimize(bowl, np.zeros(3), method=Descent(maxiter=2), options={"disp": True})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["iteration", "value", "|g|", "|proj", "g|", "step", "evaluations", "seconds"]
    assert [int(line.split()[0]) for line in lines[1:4]] == [0, 1, 2] and lines[4:] == [result.message]
    assert float(lines[1].split()[1]) == 14.0 and len({len(line) for line in lines[:4]}) == 1


@pytest.mark.parametrize(
    ("method", "options", "bounds"),
    [
        ("L-BFGS-B", {}, None),
        ("l-bfgs-b", {"maxcor": 4, "gtol": 1e-8, "ftol": 0.0}, [(-1.5, 0.8)] * 8),
        ("L-BFGS-B", {"maxiter": 5}, [(None, 0.5)] * 4 + [(0.2, None)] * 4),
        ("CG", {}, None),
        ("Newton-CG", {}, None),
        ("trust-ncg", {"gtol": 1e-6, "initial_trust_radius": 0.5, "max_trust_radius": 10}, None),
    ],
)
def test_calls_of_scipy_work_as_they_are(method, options, bounds):
    optimize = pytest.importorskip("scipy.optimize")
    call = {"jac": True, "method": method, "options": options, "bounds": bounds}
    if method in ("Newton-CG", "trust-ncg"):
        call["hessp"] = curvature
    theirs = optimize.minimize(rosenbrock, np.full(8, -1.2), **call)
    ours = minimize(rosenbrock, np.full(8, -1.2), **call)
    assert (ours.status, ours.success) == (theirs.status, theirs.success)
    assert {"x", "fun", "jac", "nit", "nfev", "njev", "status", "success", "message"} <= set(ours) & {*theirs, "njev"}
    if "maxiter" in options:
        assert ours.nit == theirs.nit == 5
    else:
        assert np.allclose(ours.x, theirs.x, atol=1e-3 if "Newton" in method else 1e-4)
        assert ours.fun <= theirs.fun + 1e-8
    if bounds and "maxiter" not in options:
        assert np.allclose(ours.jac, theirs.jac, atol=1e-4)
        same = minimize(rosenbrock, np.full(8, -1.2), **{**call, "bounds": optimize.Bounds(-1.5, 0.8)})
        assert str(same) == str(ours)


@pytest.mark.parametrize(
    ("method", "line_search"),
    [
        ("CG", MoreThuente(ftol=0.01, gtol=0.3)),
        ("L-BFGS-B", MoreThuente(ftol=0.01, gtol=0.3)),
        (NonlinearCG(line_search="hager-zhang"), HagerZhang(delta=0.01, sigma=0.3, epsilon=1e-12, maxls=20)),
    ],
    ids=["CG", "L-BFGS-B", "Hager-Zhang"],
)
def test_c1_and_c2_are_those_of_the_line_search(method, line_search):
    own, _ = make_method(method, {"c1": 0.01, "c2": 0.3}, None, 3)
    assert own.search == line_search
    few, _ = make_method(method, {"maxls": 7, "c2": 0.5}, None, 3)
    assert few.search == replace(
        make_method(method, {"maxls": 7}, None, 3)[0].search, **{fields(line_search)[2].name: 0.5}
    )


@pytest.mark.parametrize("method", ["L-BFGS-B", "CG", "trust-ncg"])
def test_all_iterates(method):
    """From the start, which is projected, to the result, in its structure; printed they are counted."""
    given = {"method": method, "hessp": None if method == "CG" else curvature, "options": {"return_all": True}}
    result = minimize(rosenbrock, np.full(8, -1.2), **given)
    iterates = result.allvecs
    assert len(iterates) == result.nit + 1 and not any(np.shares_memory(each, result.x) for each in iterates)
    assert np.array_equal(iterates[0], np.full(8, -1.2)) and np.array_equal(iterates[-1], result.x)
    values = [rosenbrock(x)[0] for x in iterates]
    assert values == sorted(values, reverse=True) and values[-1] == result.fun
    assert f"{len(iterates)} iterates" in repr(result)
    parameters = FlatParameters.of({"a": np.ones(3), "b": np.zeros(5)})
    named = minimize(lambda p: rosenbrock(p.flat), parameters, **{**given, "hessp": lambda p, d: curvature(p.flat, d)})
    assert np.array_equal(named.allvecs[0]["a"], np.ones(3)) and np.array_equal(named.allvecs[-1].flat, parameters.flat)


@pytest.mark.parametrize(("method", "limit"), [("CG", 600), ("trust-ncg", 600), ("L-BFGS-B", 15000)])
def test_limits_are_those_of_scipy(method, limit):
    """200 iterations for each unknown, and any number of evaluations; or a number of both."""
    made, _ = make_method(method, None, None, 3)
    assert (made.maxiter, made.maxfun) == (limit, 15000 if limit == 15000 else sys.maxsize)


def test_products_that_are_not_symmetric_are_named():
    twist = np.triu(np.ones((8, 8)))
    given, few = np.linspace(-3, 4, 8), {"method": "trust-ncg", "options": {"maxiter": 3}}
    found = minimize(lambda x: (0.5 * x @ x - x.sum(), x - 1), given, hessp=lambda x, p: 5 * twist @ p, **few)
    assert "not symmetric" in found.message and "check_gradient(fun, x, hessp=hessp)" in found.message
    right = minimize(rosenbrock, np.full(8, -1.2), hessp=curvature, **few)
    assert "symmetric" not in right.message


def test_tolerances_of_zero_end_with_the_last_bit():
    result = minimize(rosenbrock, np.zeros(4), tol=0)
    assert result.fun < 1e-20 and result.status in (0, 2)


def test_a_method_keeps_its_options():
    method = mpishard.LBFGSB(history=3, maxiter=2)
    assert minimize(rosenbrock, np.zeros(4), method=method).nit == 2
    assert minimize(rosenbrock, np.zeros(4), method=method, options={"maxiter": 4}).nit == 4
    bounded = minimize(rosenbrock, np.zeros(4), method=mpishard.LBFGSB(bounds=(None, 0.5)))
    assert bounded.x.max() == 0.5 and bounded.success


def test_no_mpi_where_there_is_no_mesh():
    code = """
import sys
sys.modules["mpi4py"] = None  # importing it fails
import numpy as np, mpishard
print(mpishard.minimize(lambda x: (x @ x, 2 * x), np.ones(3)).success, "h5py" in sys.modules)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["True", "False"], output


# Minimisation by reverse communication on one process: requests, answers, and states that go on.


def trajectory(optimizer, most=10**6, function=bowl):
    points = []
    while len(points) < most and (request := optimizer.ask()) is not None:
        points.append((request.x.copy(), request.direction))
        if request.direction is None:
            optimizer.tell(*function(request.x))
        else:
            optimizer.tell_product(curvature(request.x, request.direction))
    return points


def same_requests(ours, theirs):
    return len(ours) == len(theirs) and all(
        np.array_equal(a, c) and (b is d is None or np.array_equal(b, d))
        for (a, b), (c, d) in zip(ours, theirs, strict=True)
    )


def test_reverse_communication_takes_the_steps_of_minimize():
    seen = []
    result = minimize(lambda x: (seen.append(x), bowl(x))[1], np.zeros(3), method=Descent(), bounds=(-1, None))
    optimizer = ReverseCommunication(Descent(), np.zeros(3), bounds=(-1, None))
    assert optimizer.result.status == -1 and np.array_equal(optimizer.result.x, np.zeros(3))
    assert np.array_equal([x for x, _ in trajectory(optimizer)], seen)
    assert optimizer.ask() is None
    assert str(optimizer.result) == str(result)


@pytest.mark.pairs(2)
@pytest.mark.parametrize(
    ("method", "bounds"), [("L-BFGS-B", (-1.5, 0.8)), ("L-BFGS", None), ("trust-ncg", None), (Descent(step=1e-3), None)]
)
def test_a_state_goes_on_elsewhere_with_the_same_request(method, bounds):
    expected = trajectory(ReverseCommunication(method, np.full(4, -1.2), bounds=bounds), 50, rosenbrock)
    for stop in range(0, len(expected), 3):
        first = ReverseCommunication(method, np.full(4, -1.2), bounds=bounds)
        trajectory(first, stop, rosenbrock)
        first.ask()
        second = ReverseCommunication(method, np.zeros(4), bounds=bounds)
        second.deserialize(first.serialize())
        assert same_requests(trajectory(second, 50 - stop, rosenbrock), expected[stop:])
    with pytest.raises(ValueError, match="checkpoints need a mesh"):
        second.save("nowhere")


@pytest.mark.parametrize("method", ["L-BFGS-B", "CG", "trust-ncg"])
@pytest.mark.parametrize("limit", [{"maxiter": 4}, {"maxfun": 6}, {"gtol": 10.0}])
def test_a_run_that_has_reached_a_limit_goes_on_with_another(method, limit):
    first = ReverseCommunication(method, np.full(4, -1.2), options=limit)
    trajectory(first, function=rosenbrock)
    assert first.ask() is None
    same = ReverseCommunication(method, np.zeros(4), options=limit)
    same.deserialize(first.serialize())
    assert same.ask() is None and str(same.result) == str(first.result)
    second = ReverseCommunication(method, np.zeros(4))
    second.deserialize(first.serialize())
    assert np.array_equal(second.ask().x, first.result.x)
    trajectory(second, function=rosenbrock)
    result = second.result
    assert result.success and result.fun < 1e-6 and result.nfev > first.result.nfev and result.nit > first.result.nit


@pytest.mark.pairs(10)
@pytest.mark.parametrize(
    ("method", "limit", "bounds"),
    [
        ("L-BFGS", "maxiter", None),
        ("L-BFGS-B", "maxiter", (-2, 0.9)),
        ("CG", "maxiter", None),
        ("trust-ncg", "maxiter", None),
        ("trust-ncg", "maxiter", (-2, 0.9)),
        ("trust-ncg", "maxfun", None),  # has no line search that could be cut off
        ("trust-ncg", "maxfun", (-2, 0.9)),
    ],
)
@pytest.mark.parametrize("stop", [1, 2, 7, 18])
def test_a_run_that_reached_a_limit_comes_to_the_bits_of_one_that_was_not_stopped(method, limit, bounds, stop):
    """After one evaluation more, of its last iterate."""

    def run(most, state=None):
        options = {"maxiter": 1000, limit: most, "gtol": 0, "ftol": 0}
        made = ReverseCommunication(method, np.full(6, -1.2), options=options, bounds=bounds)
        if state is not None:
            made.deserialize(state)
        return made, trajectory(made, function=rosenbrock)

    (whole, seen), (first, begun) = run(20), run(stop)
    second, rest = run(20 + (limit == "maxfun"), first.serialize())
    assert len(begun) < len(seen) and same_requests(rest[1:], seen[len(begun) :])
    assert np.array_equal(second.result.x, whole.result.x) and second.result.fun == whole.result.fun
    assert (second.result.nit, second.result.nfev) == (whole.result.nit, whole.result.nfev + 1)


def test_states_that_are_refused_change_nothing():
    optimizer = ReverseCommunication(Descent(), np.zeros(3))
    trajectory(optimizer, 3)
    before, data = optimizer.serialize(), bytearray(optimizer.serialize())
    data[-1] ^= 1
    others = ReverseCommunication(Descent(), np.zeros(4))
    for wrong, error, words in (
        (bytes(data), ValueError, "is damaged"),
        (before[:-1], ValueError, "cut short"),
        (b"", ValueError, "no minimisation state of mpishard"),
        (3, TypeError, "takes the bytes"),
        (others.serialize(), ValueError, "4 unknowns of float64, .*3"),
    ):
        with pytest.raises(error, match=words):
            optimizer.deserialize(wrong)
    assert optimizer.serialize() == before
    searching = ReverseCommunication("L-BFGS", np.full(4, -1.2))
    trajectory(searching, 2, rosenbrock)
    words = "MoreThuente, but LBFGS .*HagerZhang"
    wider = ReverseCommunication("L-BFGS-B", np.zeros(4), bounds=(-2, 2))
    with pytest.raises(ValueError, match="other bounds, .*fixed elements"):
        wider.deserialize(ReverseCommunication("L-BFGS-B", np.zeros(4), bounds=(-1, 2)).serialize())
    other = ReverseCommunication("L-BFGS", np.zeros(4), options={"line_search": "hager-zhang"})
    before = other.serialize()
    with pytest.raises(ValueError, match=words):
        other.deserialize(searching.serialize())
    assert other.serialize() == before


def test_what_was_not_asked_for_is_refused():
    optimizer = ReverseCommunication(Descent(), np.zeros(3))
    with pytest.raises(RuntimeError, match=r"Hessian product was told, .*\(tell\)"):
        optimizer.tell_product(np.zeros(3))
    with pytest.raises(RuntimeError, match="told, but not asked for"):
        optimizer.tell(1.0, np.zeros(3))
    optimizer.ask()
    with pytest.raises(ValueError, match="gradient has 2 elements"):
        optimizer.tell(1.0, np.zeros(2))
    assert optimizer.progress.evaluations == 0
    optimizer.tell(*bowl(optimizer.result.x))
    with pytest.raises(RuntimeError, match="not asked for since the last answer"):
        optimizer.tell(*bowl(optimizer.result.x))
    assert optimizer.progress.evaluations == 1
    optimizer.stop()
    with pytest.raises(RuntimeError, match="but nothing is wanted"):
        optimizer.tell(1.0, np.zeros(3))
    with pytest.raises(TypeError, match="argument 'mask'"):
        ReverseCommunication(Descent(), np.zeros(3), mask=1)


def test_a_result_leaves_the_request_as_it_is():
    start = FlatParameters.of({"a": np.zeros((2, 1)), "b": np.zeros(())})
    optimizer = ReverseCommunication(Descent(), start)
    first = optimizer.ask().x
    optimizer.tell(*bowl(first.flat))
    request = optimizer.ask()
    point = request.x.flat.copy()
    result = optimizer.result
    assert request.x is start and np.array_equal(start.flat, point)
    assert np.array_equal(result.x["a"], np.zeros((2, 1))) and result.x is not start and point.any()
    optimizer.tell(*bowl(request.x.flat))
    assert optimizer.result.x is start and np.array_equal(start.flat, point)


@pytest.mark.parametrize("keep", [None, lambda x: x, lambda x: x.reshape(2, -1)[1], lambda x: memoryview(x)])
def test_a_point_that_is_kept_stays_as_it_was(keep):
    """The memory of one that is not kept is used again."""
    points, places = [], []

    def fun(x):
        places.append(x.ctypes.data)
        if keep is not None:
            points.append((keep(x), np.array(keep(x))))
        return float((x**4).sum()), 4 * x**3

    minimize(fun, np.linspace(0.5, 1, 1 << 18), options={"maxiter": 3, "maxcor": 2})
    assert len(places) > 3
    if keep is None:
        assert len(set(places)) == 1
    assert all(np.array_equal(np.array(kept), value) for kept, value in points)
