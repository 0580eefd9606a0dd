"""`minimize` and reverse communication on one process: SciPy's conventions, requests and answers, and bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from descent import CENTER, Descent, bowl, curvature, rosenbrock

import mpishard
from mpishard import FlatParameters, OptimizeResult, ParameterSpec, ReverseCommunication, minimize
from mpishard.inverse.minimization import elastic_options
from mpishard.inverse.result import make_method, pair_of_bounds
from mpishard.layout.tensors import ModelParallelRank

# `minimize` on one process: SciPy's conventions, and bad input.


def test_the_result_has_scipys_fields_by_attribute_and_by_item():
    result = minimize(bowl, np.zeros(3), method=Descent())
    assert isinstance(result, OptimizeResult)
    assert list(result) == ["x", "fun", "jac", "nit", "nfev", "njev", "nhev", "status", "success", "message"]
    assert np.allclose(result.x, CENTER, atol=1e-5) and result["x"] is result.x
    assert np.allclose(result.jac, 2 * (result.x - CENTER)) and result.fun == bowl(result.x)[0]
    assert (result.status, result.success) == (0, True) and result.message.startswith("converged: the projected")
    assert result.nfev == result.njev == result.nit + 1 and result.nhev == 0
    assert "success: True" in repr(result) and "nit" in dir(result)
    with pytest.raises(AttributeError, match="has no 'hess_inv'; it has x, fun"):
        result.hess_inv  # noqa: B018


def test_the_start_is_neither_changed_nor_kept():
    start = np.arange(3)
    start.flags.writeable = False
    seen = []

    def spoils(x):
        assert x.dtype == np.float64 and x.flags.writeable
        answer = bowl(x)
        seen.append(x)
        x[:] = 7
        return answer

    result = minimize(spoils, start, method=Descent())
    assert result.success and np.array_equal(start, [0, 1, 2]) and start.dtype.kind == "i"
    assert len({id(x) for x in seen}) == len(seen)


@pytest.mark.parametrize(
    ("start", "dtype"),
    [([0, 0, 0], "f8"), (np.zeros((3, 1)), "f8"), (np.zeros(3, "f4"), "f4"), (np.zeros(3, ">f8"), "f8")],
)
def test_starts_are_flat_and_real(start, dtype):
    def checked(x):
        assert x.shape == (3,) and x.dtype == np.dtype(dtype)
        return bowl(x)

    assert np.allclose(minimize(checked, start, method=Descent(), tol=1e-3).x, CENTER, atol=1e-3)


def test_fun_and_jac_apart_with_arguments():
    def value(x, a, b):
        return np.array([(x - a) @ (x - a) * b])

    def gradient(x, a, b):
        return [2 * b * each for each in x - a]

    result = minimize(value, np.zeros(3), (CENTER, 0.5), Descent(), gradient)
    assert np.allclose(result.x, CENTER, atol=1e-4)
    assert minimize(lambda x, a: bowl(x + a), np.zeros(3), 1.0, Descent()).success


@pytest.mark.parametrize(
    ("callback", "nit", "status"),
    [
        (lambda x: x.sum() > 0, 60, 0),  # np.True_ is an answer, the value of an expression
        (lambda x: 1, 60, 0),
        (lambda x: None, 60, 0),
    ],
)
def test_callbacks_that_go_on_and_stop(callback, nit, status):
    result = minimize(bowl, np.zeros(3), method=Descent(), callback=callback)
    if callback(np.ones(3)) is np.True_:
        assert (result.nit, result.status) == (1, 99) and not result.success
        assert np.allclose(result.x, 0.2 * CENTER) and np.allclose(result.jac, -1.6 * CENTER)
        assert result.fun == pytest.approx(bowl(result.x)[0])
    else:
        assert result.status == 0


def test_callbacks_as_scipy_tells_them_apart():
    points, results = [], []

    def keyword(intermediate_result):
        results.append(intermediate_result)
        if len(results) == 4:
            raise StopIteration

    minimize(bowl, np.zeros(3), method=Descent(), callback=points.append)
    result = minimize(bowl, np.zeros(3), method=Descent(), callback=keyword)
    assert result.status == 99 and result.nit == 4 and "StopIteration" in result.message
    for number, (point, intermediate) in enumerate(zip(points, results, strict=False), 1):
        assert np.array_equal(point, intermediate.x)
        assert (intermediate.nit, intermediate.fun) == (number, bowl(point)[0])
    assert np.array_equal(result.x, points[3])


def test_the_callback_of_the_last_iteration_changes_no_outcome():
    result = minimize(bowl, np.zeros(3), method=Descent(maxiter=3), callback=lambda xk: True if xk[0] > 0.4 else None)
    assert (result.nit, result.status) == (3, 1) and "maxiter=3" in result.message


def test_errors_of_the_user_come_through():
    def fails(*_, **__):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        minimize(fails, np.zeros(3), method=Descent())
    with pytest.raises(KeyError, match="mine"):
        minimize(bowl, np.zeros(3), method=Descent(), callback=fails)


def test_limits_on_iterations_evaluations_and_time():
    for options, status, words in (
        ({"maxiter": 2}, 1, "iterations reached maxiter=2"),
        ({"maxfun": 4}, 1, "evaluations reached maxfun=4"),
        ({"maxtime": 0}, 1, "maxtime"),
    ):
        result = minimize(bowl, np.zeros(3), method=Descent(), options=options)
        assert (result.status, result.success) == (status, False) and words in result.message
        assert result.fun == bowl(result.x)[0]


def test_a_value_that_is_never_finite():
    result = minimize(lambda x: (math.nan, x), np.zeros(3), method=Descent())
    assert (result.status, result.nit, result.nfev) == (2, 0, 1) and "NaN or infinite" in result.message
    assert np.array_equal(result.x, np.zeros(3)) and np.isnan(result.jac).all()


def test_a_wrong_gradient_is_named():
    result = minimize(lambda x: (bowl(x)[0], -bowl(x)[1]), np.zeros(3), method=Descent())
    assert result.status == 2 and "mpishard.check_gradient" in result.message
    assert result.fun == bowl(result.x)[0] and np.array_equal(result.x, np.zeros(3))


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
    lower, upper = pair_of_bounds([(0, 1), (2, None)], 2)
    assert lower.tolist() == [0, 2] and upper.tolist() == [1, math.inf]
    assert pair_of_bounds((0, 1), 2) == (0, 1) and pair_of_bounds((None, 1), 2) == (-math.inf, 1)
    assert pair_of_bounds(None, 2) is None


@pytest.mark.parametrize(
    ("bounds", "error", "words"),
    [
        ([(0, 1), (2, 1), (0, 1)], ValueError, r"element \(1\) of 'x' has the lower bound 2 and the upper bound 1"),
        ([(0, 1)] * 4, ValueError, "bounds have 4 entries, but x0 has 3 elements"),
        (([0, 0], 1), ValueError, r"lower bounds have the shape \(2,\), but the parameters \(3,\)"),
        (Bounds(np.zeros(4), 1), ValueError, r"lower bounds have the shape \(4,\)"),
        ([(0, "a"), (0, 1), (0, 1)], TypeError, "bounds of element 0 must be numbers or None, got 'a'"),
        ((math.nan, 1), ValueError, "lower bounds contain NaN"),
        ("ab", TypeError, "must be a pair"),
        (3, TypeError, "must be a pair"),
        ({"y": (0, 1)}, ValueError, "there is no tensor 'y'; there are x"),
        ({"x": 1}, ValueError, r"bounds of 'x' must be a pair \(lower, upper\)"),
    ],
)
def test_bounds_that_do_not_fit(bounds, error, words):
    with pytest.raises(error, match=words):
        minimize(bowl, np.zeros(3), method=Descent(), bounds=bounds)


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
    for name in ("inner_product", "preconditioner"):
        with pytest.raises(ValueError, match=rf"{name} must be positive and finite, but element \(1\) of 'x' is 0"):
            minimize(bowl, np.zeros(3), method=Descent(), **{name: [1, 0, 1]})
    with pytest.raises(TypeError, match="minimize got an unexpected keyword argument 'mask'"):
        minimize(bowl, np.zeros(3), method=Descent(), mask=1)


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
    for wrong, error, words in (
        ({"a": np.zeros(2)}, ValueError, "must have all tensors; 'b' is missing"),
        ({"a": np.zeros(3), "b": 0}, ValueError, "gradient of 'a' has 3 elements of shape"),
    ):
        with pytest.raises(error, match=words):
            minimize(lambda p, wrong=wrong: (0.0, wrong), start, method=Descent())


def hessian(x):
    """The Hessian of `rosenbrock`, by its products."""
    return np.stack([curvature(x, each) for each in np.eye(len(x))], 1)


@pytest.mark.parametrize("form", ["array", "list", "csr", "operator"])
def test_a_hessian_as_scipy_takes_it(form):
    sparse = pytest.importorskip("scipy.sparse")
    linalg = pytest.importorskip("scipy.sparse.linalg")
    forms = {
        "array": np.asarray,
        "list": np.ndarray.tolist,
        "csr": sparse.csr_array,
        "operator": linalg.aslinearoperator,
    }
    points = []

    def hess(x, scale):
        points.append(x.copy())
        return forms[form](scale * hessian(x))

    options = {"method": "trust-ncg", "args": (1.0,)}
    start = np.full(8, -1.2)
    result = minimize(lambda x, scale: rosenbrock(x), start, hess=hess, **options)
    products = minimize(lambda x, s: rosenbrock(x), start, hessp=lambda x, d, s: hessian(x) @ d, **options)
    assert result.success and np.allclose(result.x, products.x, atol=1e-6) and result.nhev > 2 * len(points)
    assert len({point.tobytes() for point in points}) == len(points)


def test_a_hessian_of_a_tree_and_of_names():
    diagonal = np.arange(1.0, 6.0)

    def fun(x):
        return 0.5 * (x["a"] @ (diagonal[:2] * x["a"]) + x["b"] @ (diagonal[2:] * x["b"])) - x["b"].sum(), {
            "a": diagonal[:2] * x["a"],
            "b": diagonal[2:] * x["b"] - 1,
        }

    for start in ({"a": np.ones(2), "b": np.ones(3)}, FlatParameters.of({"a": np.ones(2), "b": np.ones(3)})):
        found = minimize(fun, start, method="trust-ncg", hess=lambda x: np.diag(diagonal)).x
        assert np.allclose(found["b"], 1 / diagonal[2:]) and np.allclose(found["a"], 0, atol=1e-6)


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


def test_a_start_that_is_a_tree():
    points = []

    def fun(x):
        assert type(x["layers"]) is list and type(x["layers"][1]) is Pair and list(x) == list(TREE)
        answer = of_tree(x)
        x["offset"][...] = 9  # a copy
        return answer

    bounds = {"layers": [None, (None, (0, [5.5, 5.5]))]}
    options = {"bounds": bounds, "fixed": {"offset": True}, "callback": points.append}
    result = minimize(fun, TREE, method=Descent(), inner_product=2.0, **options)
    flat = minimize(
        lambda x: flattened(x),
        np.zeros(8),
        method=Descent(),
        inner_product=np.full(8, 2.0),
        bounds=FLAT,
        fixed=np.arange(8) == 7,
    )
    assert (result.nit, result.nfev, result.message) == (flat.nit, flat.nfev, flat.message)
    for tree, array in ((result.x, flat.x), (result.jac, flat.jac), (points[-1], flat.x)):
        assert type(tree["layers"][1]) is Pair and np.array_equal(joined(tree), array)
    assert not TREE["layers"][0].any() and result.x["layers"][0].shape == (2, 2)
    everywhere = minimize(of_tree, TREE, bounds=(0, 2)).x
    scaled = minimize(of_tree, TREE, method="L-BFGS", preconditioner=lambda x: x).x
    assert np.allclose(joined(scaled), np.arange(8))
    assert np.array_equal(joined(everywhere), np.minimum(np.arange(8), 2))
    newton = minimize(of_tree, TREE, method="trust-ncg", hessp=lambda x, d: {**d, "offset": 2 * d["offset"] / 2}).x
    assert np.allclose(joined(newton), np.arange(8)) and mpishard.check_gradient(of_tree, TREE, disp=False)
    single = {"a": np.zeros(3, "f4"), "b": 1.0}  # a number of Python takes the dtype of the others
    assert minimize(lambda x: (x["b"] ** 2, {"a": x["a"], "b": 2 * x["b"]}), single).x["b"].dtype == np.float32


def joined(tree):
    return np.concatenate([np.ravel(each) for each in (tree["layers"][0], *tree["layers"][1], tree["offset"])])


FLAT = [(None, None)] * 5 + [(0, 5.5)] * 2 + [(None, None)]


def flattened(x):
    """`of_tree` of a flat array."""
    value, gradient = of_tree({"layers": [x[:4].reshape(2, 2), Pair(x[4:5], x[5:7])], "offset": x[7]})
    return value, joined(gradient)


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        (np.zeros(8), ValueError, "x0 is a dictionary of 'layers', 'offset', here an array of shape .8,"),
        ({"offset": 0.0}, ValueError, "the gradient must have the structure of x0: .* here 'layers' missing"),
        ({"offset": 0.0, "layers": [1.0]}, ValueError, "x0 of 'layers' is a list of 2, here 1"),
        (
            {"offset": 0.0, "layers": [np.zeros((2, 2)), (0.0, [0, 0])]},
            ValueError,
            r"the gradient of 'layers.1.0' has the shape \(\), but x0 has \(1,\) there",
        ),
        (
            {"offset": 1j, "layers": [np.zeros((2, 2)), ([0.0], [0, 0])]},
            TypeError,
            "the gradient of 'offset' is complex128, but x0 has real numbers there; take the real part",
        ),
    ],
)
def test_gradients_unlike_a_tree(gradient, error, words):
    with pytest.raises(error, match=words):
        minimize(lambda x: (0.0, gradient), TREE)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bounds": {"ofset": (0, 1)}}, ValueError, "bounds must have the structure of x0.* here 'ofset' unknown"),
        ({"bounds": [(0, 1)] * 8}, ValueError, "bounds must have the structure of x0"),
        ({"bounds": {"offset": 1}}, ValueError, r"bounds of 'offset' must be a pair \(lower, upper\), got 1"),
        ({"bounds": {"layers": [(np.zeros(3), 1), None]}}, ValueError, r"bounds of 'layers.0' have the shape \(3,\)"),
        ({"fixed": np.ones(8, bool)}, ValueError, "fixed must have the structure of x0"),
        (
            {"method": "CG", "preconditioner": lambda x: 1.0},
            ValueError,
            "the result of preconditioner must have the structure of x0",
        ),
    ],
)
def test_options_unlike_a_tree(options, error, words):
    with pytest.raises(error, match=words):
        minimize(of_tree, TREE, **options)


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
    tree = minimize(
        lambda x: (modes(x["z"])[0], {"z": modes(x["z"])[1]}), {"z": np.zeros(2, dtype)}, fixed={"z": [False, True]}
    )
    assert np.allclose(tree.x["z"], [MODES[0], 0], atol=1e-4)
    found = minimize(modes, [0j, 0j], method="trust-ncg", hessp=lambda z, d: 2 * d)
    assert np.allclose(found.x, MODES) and found.x.dtype == np.complex128


def test_what_is_wrong_of_complex_unknowns_is_said():
    conjugate = minimize(lambda z: (modes(z)[0], modes(z)[1].conj()), np.zeros(2, complex))
    assert conjugate.status == 2 and "df/da + i df/db, as of PyTorch; JAX gives its conjugate" in conjugate.message
    assert not mpishard.check_gradient(lambda z: (modes(z)[0], modes(z)[1].conj()), np.ones(2, complex), disp=False)
    with pytest.raises(ValueError, match="bounds are for real numbers, and x0 is complex; give its real and imaginary"):
        minimize(modes, np.zeros(2, complex), bounds=(0, 1))
    with pytest.raises(TypeError, match="the gradient of 'x' is float64, but x0 has complex numbers there; the gradi"):
        minimize(lambda z: (0.0, z.real), np.zeros(2, complex))


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (1.0, TypeError, r"must return \(value, gradient\), as jac=True says; it returned a float"),
        ((1.0, np.zeros(3), 2), TypeError, "it returned a tuple"),
        (("a", np.zeros(3)), TypeError, "value as one real number, got 'a'"),
        ((np.ones(2), np.zeros(3)), TypeError, "value as one real number"),
        ((1j, np.zeros(3)), TypeError, "value as one real number"),
        ((1.0, np.zeros(2)), ValueError, r"the gradient has 2 elements of shape \(2,\), but x0 has 3"),
        ((1.0, None), TypeError, "the gradient must be an array of real numbers, got None"),
        ((1.0, np.zeros(3, complex)), TypeError, "real numbers"),
        ((1.0, {"x": np.zeros(3)}), TypeError, "like x0, which has no names"),
    ],
)
def test_functions_that_return_something_else(answer, error, words):
    with pytest.raises(error, match=words):
        minimize(lambda x: answer, np.zeros(3), method=Descent())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x0": []}, ValueError, "x0 is empty"),
        ({"x0": [0, math.nan, 0]}, ValueError, "x0 must be finite, but element 1 is nan"),
        ({"x0": ["a"]}, TypeError, "x0 must be an array of real numbers"),
        ({"x0": [[1, 2], [3]]}, TypeError, r"x0 must be an array of numbers, got \[\[1, 2\], \[3\]\]$"),
        ({"x0": {}}, ValueError, "x0 is empty: there are no arrays in this dict"),
        ({"x0": {"a": np.ones(2), "b": None}}, TypeError, "x0 of 'b' must be an array of numbers, got None"),
        ({"x0": {"a": {"b": np.ones(2)}, "a.b": 1.0}}, ValueError, "x0 has two arrays of the name 'a.b'"),
        ({"x0": {"a": [[1, 2], [3]]}}, TypeError, "x0 of 'a' must be an array of numbers"),
        ({"x0": [np.ones(2), np.full(2, math.inf)]}, ValueError, r"finite, but element \(0\) of '1' is inf"),
        ({"x0": [np.ones(1), np.ones(1, "f4")]}, TypeError, "one precision, but '0' is float64 and '1' is float32"),
        ({"fun": 3}, TypeError, "fun=3 must be a function"),
        ({"jac": None}, ValueError, "jac=None: a gradient is needed"),
        ({"jac": "2-point"}, ValueError, "a gradient is needed"),
        ({"hessp": 1}, TypeError, "hessp=1 must be a function"),
        (
            {"constraints": {"type": "eq", "fun": bowl}},
            ValueError,
            r"no constraints: c\(x\) = 0 is for mpishard.augmented_lagrangian\(fun, x0, constraints, adjoint\)",
        ),
        ({"callback": 1}, TypeError, "callback=1 must be a function"),
        ({"method": "SLSQP"}, ValueError, "there is no method 'SLSQP'; there are L-BFGS-B, L-BFGS, CG"),
        ({"method": None}, TypeError, "method=None must be one of"),
        ({"options": {"eps": 1}}, ValueError, "Descent has no option 'eps'; its options are disp, ftol, gtol"),
        ({"options": {"bounds": 1}}, ValueError, "has no option 'bounds'"),
        ({"options": 3}, TypeError, "options=3 must be a dictionary"),
        ({"options": {"maxtime": -1}}, ValueError, "maxtime=-1 must be a number of at least 0"),
        ({"tol": -1}, ValueError, "tol=-1 must be"),
        ({"reduction": "sum"}, ValueError, "reduction='sum' is for functions on a mesh"),
    ],
)
def test_arguments_that_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        minimize(**{"fun": bowl, "x0": np.zeros(3), "method": Descent(), **change})


def test_a_part_of_split_parameters_needs_a_mesh():
    place = ModelParallelRank(tensor_rank=1, tensor_size=2)
    part = FlatParameters([ParameterSpec("field", (5, 4), tensor_dim=0)], np.float64, place=place)
    with pytest.raises(ValueError, match="x0 is split over tensor=2 and pipeline=1 ranks.*give the mesh of its place"):
        minimize(lambda p: (0.0, p.flat), part)
    with pytest.raises(ValueError, match="hess= needs all elements of x0, which is split over ranks; give hessp="):
        minimize(lambda p: (0.0, p.flat), part, hess=lambda p: np.eye(10))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"samples": 3}, ValueError, "samples= .*needs elastic=True.*reduction='sum'"),
        ({"elastic": True}, ValueError, "give mesh="),
        ({"elastic": 2}, TypeError, "elastic=2 must be True, or a dictionary"),
        ({"elastic": {"scaling": "linear"}, "mesh": 3}, ValueError, "elastic= has no option 'scaling'; its options"),
        ({"elastic": True, "mesh": 3, "reduction": "sum"}, ValueError, "give samples=N"),
        ({"elastic": True, "mesh": 3, "samples": 0}, ValueError, "samples=0"),
    ],
)
def test_arguments_of_elastic_runs(change, error, words):
    elastic, samples, reduction, mesh = (change.get(name) for name in ("elastic", "samples", "reduction", "mesh"))
    with pytest.raises(error, match=words):
        elastic_options(elastic or False, samples, reduction, mesh)
    if "mesh" not in change:
        with pytest.raises(error, match=words):
            minimize(lambda x: (x @ x, 2 * x), np.ones(2), **change)


def test_the_table(capsys):
    result = minimize(bowl, np.zeros(3), method=Descent(maxiter=2), options={"disp": True})
    lines = [line.removeprefix("mpishard: ") for line in capsys.readouterr().err.splitlines()]
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


@pytest.mark.parametrize(("method", "limit"), [("CG", 600), ("trust-ncg", 600), ("L-BFGS-B", 15000)])
def test_limits_are_those_of_scipy(method, limit):
    """200 iterations for each unknown, and any number of evaluations; or a number of both."""
    made, _ = make_method(method, None, None, 3)
    assert (made.maxiter, made.maxfun) == (limit, 15000 if limit == 15000 else sys.maxsize)


def test_products_that_are_not_symmetric_are_named():
    twist = np.triu(np.ones((8, 8)))
    found = minimize(
        lambda x: (0.5 * x @ x - x.sum(), x - 1),
        np.linspace(-3, 4, 8),
        method="trust-ncg",
        hessp=lambda x, p: 5 * twist @ p,
        options={"maxiter": 3},
    )
    assert "not symmetric" in found.message and "check_gradient(fun, x, hessp=hessp)" in found.message
    right = minimize(rosenbrock, np.full(8, -1.2), method="trust-ncg", hessp=curvature, options={"maxiter": 3})
    assert "symmetric" not in right.message


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"options": {"maxcor": 0}}, ValueError, "LBFGSB: history=0 must be a whole number of at least 1"),
        ({"options": {"gtol": math.nan}}, ValueError, "LBFGSB: gtol=nan must be"),
        (
            {"options": {"history": 3, "norm": 2}},
            ValueError,
            "'L-BFGS-B' has no option 'norm'.*disp, .*maxcor",
        ),
        (
            {"method": "L-BFGS", "bounds": (0, 1)},
            ValueError,
            "takes no bounds; method='L-BFGS-B' does",
        ),
        ({"method": "Newton-CG"}, ValueError, "this method needs products with the Hessian: give hessp.* or hess="),
        ({"hess": "2-point"}, TypeError, "hess='2-point' must be a function; there are no finite differences"),
        ({"hess": hessian, "hessp": curvature}, ValueError, "hess and hessp are both the Hessian; give one"),
        ({"method": "trust-ncg", "hess": lambda x: np.eye(2)}, ValueError, r"shape \(2, 2\), but x0 has 3 elements"),
        ({"method": "trust-ncg", "hess": lambda x: "a"}, TypeError, "hess must return a matrix"),
        (
            {"method": "trust-ncg", "hess": hessian, "x0": np.zeros(2, complex), "fun": lambda z: modes(z)},
            ValueError,
            "hess= is for real numbers, and x0 is complex",
        ),
    ],
)
def test_options_of_methods_that_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        minimize(**{"fun": rosenbrock, "x0": np.zeros(3), **change})


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


def test_public_names():
    assert mpishard.minimize is minimize and mpishard.ReverseCommunication is ReverseCommunication


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
        (others.serialize(), ValueError, "of 4 unknowns of float64, but these are 3"),
    ):
        with pytest.raises(error, match=words):
            optimizer.deserialize(wrong)
    assert optimizer.serialize() == before
    searching = ReverseCommunication("L-BFGS", np.full(4, -1.2))
    trajectory(searching, 2, rosenbrock)
    words = "within a line search by MoreThuente, but LBFGS has the line_search Armijo"
    wider = ReverseCommunication("L-BFGS-B", np.zeros(4), bounds=(-2, 2))
    with pytest.raises(ValueError, match="the state is of a run with other bounds, fixed elements"):
        wider.deserialize(ReverseCommunication("L-BFGS-B", np.zeros(4), bounds=(-1, 2)).serialize())
    other = ReverseCommunication("L-BFGS", np.zeros(4), options={"line_search": "armijo"})
    before = other.serialize()
    with pytest.raises(ValueError, match=words):
        other.deserialize(searching.serialize())
    assert other.serialize() == before


def test_what_was_not_asked_for_is_refused():
    optimizer = ReverseCommunication(Descent(), np.zeros(3))
    with pytest.raises(RuntimeError, match=r"a Hessian product was told, but value and gradient \(tell\) is wanted"):
        optimizer.tell_product(np.zeros(3))
    with pytest.raises(RuntimeError, match="told, but not asked for"):
        optimizer.tell(1.0, np.zeros(3))
    optimizer.ask()
    with pytest.raises(ValueError, match="the gradient has 2 elements"):
        optimizer.tell(1.0, np.zeros(2))
    assert optimizer.progress.evaluations == 0
    optimizer.tell(*bowl(optimizer.result.x))
    with pytest.raises(RuntimeError, match="not asked for since the last answer"):
        optimizer.tell(*bowl(optimizer.result.x))
    assert optimizer.progress.evaluations == 1
    optimizer.stop()
    with pytest.raises(RuntimeError, match="but nothing is wanted"):
        optimizer.tell(1.0, np.zeros(3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
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
