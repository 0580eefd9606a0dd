"""`minimize` and reverse communication on one process: SciPy's conventions, bad input, and states that go on."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest

import mpishard
from mpishard import FlatParameters, OptimizeResult, ParameterSpec, ReverseCommunication, minimize
from mpishard.inverse.bounds import pair_of_bounds
from mpishard.inverse.elastic_options import elastic_options
from mpishard.inverse.methods import make_method
from mpishard.layout.local_layout import ModelParallelRank
from mpishard.minimizers.method import Method
from mpishard.minimizers.minimizer import Minimizer, Progress, Wanted


@dataclass(frozen=True, kw_only=True)
class Descent(Method):
    """Projected gradient descent with a fixed step: the least that drives the loop."""

    bounds: object = None
    step: float = 0.1

    @property
    def slots(self):
        return ("base", "base_gradient")

    def make(self, space, vectors, point, limits):
        return DescentMinimizer(self, space, vectors, point, limits)


class DescentMinimizer(Minimizer):
    def __init__(self, method, space, vectors, point, limits):
        super().__init__(method.slots, space, vectors, point, limits)
        self.method = method

    def _project(self):
        before = self.point.copy()
        if self.limits.lower is not None:
            np.clip(self.point, self.limits.lower, self.limits.upper, out=self.point)
        return int((before != self.point).sum())

    def begin(self):
        return self._project()

    def tell(self, value, gradient):
        before, evaluations = self.progress, self.progress.evaluations + 1
        self.progress = replace(before, evaluations=evaluations, accepted=False)
        if not math.isfinite(value):
            return self._end("not finite")
        if value > before.value:
            return self._end("line search")
        self.row("base")[:], self.row("base_gradient")[:] = self.point, gradient
        if self.limits.fixed is not None:
            self.row("base_gradient")[self.limits.fixed] = 0
        (norm,) = self.space.largest(self.row("base_gradient"))
        self.point -= (
            self.method.step * self.row("base_gradient") * (1 if self.limits.scaling is None else self.limits.scaling)
        )
        self._project()
        (moved,) = self.space.largest(self.point - self.row("base"))
        projected = moved / self.method.step
        self.progress = Progress(
            before.iterations + (evaluations > 1), evaluations, 0, value, norm, projected, 0.1, evaluations > 1
        )
        if projected <= self.method.gtol:
            self._end("gradient")
        elif self.progress.iterations >= self.method.maxiter:
            self._end("iterations")
        elif evaluations >= self.method.maxfun:
            self._end("evaluations")

    def _end(self, reason):
        self.stop_reason, self.wanted = reason, Wanted.NOTHING
        if not math.isnan(self.progress.value):
            self.point[:] = self.row("base")

    def to_metadata(self):
        return {"progress": asdict(self.progress), "wanted": self.wanted.value, "stop_reason": self.stop_reason}

    def restore(self, metadata):
        try:
            progress, wanted = Progress(**metadata["progress"]), Wanted(metadata["wanted"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of Descent: {error!r}") from None
        self.progress, self.wanted, self.stop_reason = progress, wanted, metadata["stop_reason"]


CENTER = np.array([1.0, -2.0, 3.0])


def bowl(x, *args):
    return float((x - CENTER) @ (x - CENTER)), 2 * (x - CENTER)


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
        ({"x0": [1j, 0]}, TypeError, "x0 must be an array of real numbers"),
        ({"x0": [[1, 2], [3]]}, TypeError, "x0 must be an array of numbers"),
        ({"fun": 3}, TypeError, "fun=3 must be a function"),
        ({"jac": None}, ValueError, "jac=None: a gradient is needed"),
        ({"jac": "2-point"}, ValueError, "a gradient is needed"),
        ({"hessp": 1}, TypeError, "hessp=1 must be a function"),
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


def rosenbrock(x):
    forward, ahead = 1 - x[:-1], x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[:-1] = -2 * forward - 400 * x[:-1] * ahead
    gradient[1:] += 200 * ahead
    return float((forward**2).sum() + 100 * (ahead**2).sum()), gradient


def curvature(x, d):
    """The Hessian of `rosenbrock` times a direction."""
    product = np.zeros_like(x)
    product[:-1] = (2 - 400 * (x[1:] - 3 * x[:-1] ** 2)) * d[:-1] - 400 * x[:-1] * d[1:]
    product[1:] += 200 * d[1:] - 400 * x[:-1] * d[:-1]
    return product


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
        ({"method": "Newton-CG"}, ValueError, "this method needs products with the Hessian: give hessp"),
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
