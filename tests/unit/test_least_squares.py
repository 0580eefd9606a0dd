"""`least_squares` on one process: answers of others, and bad input."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mgh import PROBLEMS
from residual_problems import Bundle, Curve, Diffusion

import mpishard
from mpishard import least_squares
from mpishard.comm.errors import OneRank
from mpishard.inverse.residuals import LOSSES, GaussNewtonFunctions, Loss, ResidualFunctions
from mpishard.minimizers.method import ELEMENTS, check_metadata
from mpishard.minimizers.newton import GaussNewton

# `least_squares` on one process: SciPy's answers in about as many evaluations, its arguments and its errors.

CURVE, FIELD = Curve(), Diffusion()
LIMITS = ([-1, 0, 0, -1], [1, 5, 2, 1])


def rosenbrock(x):
    return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def scipys(*given, **named):
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    return optimize.least_squares(*given, **named)


@pytest.mark.pairs(1)
@pytest.mark.parametrize("method", ["trf", "lm"])
def test_as_good_as_scipy_in_as_many_evaluations(method):
    counts = np.zeros(2, int)
    for problem in PROBLEMS:
        values, jacobian = (lambda x, k=k, f=problem.residuals: f(x)[k] for k in (0, 1))
        if method == "lm" and len(values(problem.start)) < problem.n:
            continue
        with np.errstate(all="ignore"):
            found = least_squares(values, problem.start, jacobian, method=method, max_nfev=3000)
            peer = scipys(values, problem.start, jacobian, method=method, max_nfev=3000)
        assert found.success and found.cost <= (1 + 1e-7) * peer.cost + 1e-16, problem.name
        counts += found.nfev, peer.nfev
    assert counts[0] <= 1.2 * counts[1]


@pytest.mark.parametrize("loss", ["linear", *LOSSES])
@pytest.mark.parametrize("limits", [(-np.inf, np.inf), LIMITS], ids=["free", "bounds"])
def test_outliers(loss, limits):
    given = {"loss": loss, "f_scale": 0.1, "bounds": limits}
    found = least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, **given)
    peer = scipys(CURVE.residuals, CURVE.start, CURVE.jacobian, **given)
    assert found.status == peer.status and found.cost == pytest.approx(peer.cost, rel=1e-9)
    assert np.allclose(found.x, peer.x, rtol=1e-5) and abs(found.nfev - peer.nfev) <= 1
    assert np.allclose(found.jac, peer.jac, rtol=1e-4, atol=1e-6) and np.allclose(found.grad, peer.grad, atol=1e-4)
    assert loss == "linear" or np.allclose(found.x, CURVE.truth, atol=0.05)


def test_bounds_of_a_field():
    given = {"bounds": (FIELD.lower, FIELD.upper)}
    found = least_squares(FIELD.residuals, FIELD.start, FIELD.jacobian, **given)
    peer = scipys(FIELD.residuals, FIELD.start, FIELD.jacobian, **given)
    assert found.cost == pytest.approx(peer.cost, rel=1e-8) and np.allclose(found.x, peer.x, atol=1e-3)
    assert found.nfev <= peer.nfev + 1 and np.array_equal(found.active_mask, peer.active_mask)
    many = least_squares(FIELD.residuals, FIELD.start, FIELD.jacobian, tr_solver="lsmr", **given)
    # A projection ends at bounds, and holds an element more that trust region reflective only comes near to.
    assert many.cost == pytest.approx(peer.cost, rel=1e-7) and (many.active_mask >= peer.active_mask).all()
    assert (found.x > FIELD.lower).all() and (found.x < FIELD.upper).all() and found.active_mask.any()


@pytest.mark.parametrize("solver", [None, "exact"])
@pytest.mark.parametrize("given", [{}, {"x_scale": "jac"}, {"loss": "soft_l1", "f_scale": 3e-3}], ids=str)
def test_a_bundle_of_sparse_rows(solver, given):
    pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")
    bundle = Bundle(points=12, cameras=4, views=3)
    ends = {"ftol": 1e-10, **given}
    found = least_squares(bundle.residuals, bundle.start, bundle.sparse, tr_solver=solver, **ends)
    peer = scipys(bundle.residuals, bundle.start, bundle.sparse, **ends)
    assert found.success and found.cost <= (1 + 1e-6) * peer.cost and found.nfev <= 1.2 * peer.nfev + 1
    assert ("nhev" in found) == (solver is None)
    if solver is None:  # an operator, and an array, take the same steps to rounding
        ends["tr_solver"] = "cg"
        for jacobian in (bundle.jacobian, bundle.jacobian_rows):
            if jacobian == bundle.jacobian_rows or "x_scale" not in given:
                same = least_squares(bundle.residuals, bundle.start, jacobian, **ends)
                assert same.nfev == found.nfev and np.allclose(same.x, found.x, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_perfect_fit_is_a_success(loss):
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")
    for seed in range(20):
        random = np.random.default_rng(seed)
        matrix = sparse.csr_matrix(random.standard_normal((12, 5)) * (random.random((12, 5)) < 0.6))
        data = matrix @ random.standard_normal(5)
        found = least_squares(lambda x, A=matrix, b=data: A @ x - b, np.zeros(5), lambda x, A=matrix: A, loss=loss)
        assert found.success and found.cost < 1e-12


class Operator:
    """A Jacobian of which only products are known."""

    def __init__(self, matrix):
        self.matrix, self.shape = matrix, matrix.shape

    def matvec(self, v):
        return self.matrix @ v

    def rmatvec(self, u):
        return self.matrix.T @ u


@pytest.mark.parametrize("loss", ["linear", *LOSSES])
def test_products_alone_come_to_the_same_minimum(loss):
    given = {"loss": loss, "f_scale": 0.1, "bounds": ([-1, 0, 0, -1], [0.45, 5, 2, 1]), "ftol": 1e-12}
    few = least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, **given)
    evaluated = []

    def jacobian(x):
        evaluated.append(x.copy())
        return Operator(CURVE.jacobian(x))

    many = least_squares(CURVE.residuals, CURVE.start, jacobian, **given)
    assert many.success and many.cost == pytest.approx(few.cost, rel=1e-7) and np.allclose(many.x, few.x, atol=1e-4)
    assert np.array_equal(many.active_mask, few.active_mask)
    assert len(evaluated) == len({each.tobytes() for each in evaluated}) == many.nfev == many.njev
    assert many.optimality <= 1e-8 or many.status in (2, 3)
    assert np.allclose(many.grad, few.grad, atol=1e-3) and np.array_equal(many.fun, CURVE.residuals(many.x))


def test_a_preconditioner_saves_products():
    random = np.random.default_rng(0)
    sizes = np.logspace(0, 3, 30)
    matrix = random.standard_normal((80, 30)) * sizes
    fun, jacobian = (lambda x: matrix @ (x - 1)), (lambda x: Operator(matrix))
    counts = []
    called = lambda v: (v[::-1] / sizes[::-1] ** 2)[::-1]  # noqa: E731
    for given in ({}, {"preconditioner": 1 / sizes**2}, {"preconditioner": called}, {"x_scale": 1 / sizes}):
        found = least_squares(fun, np.zeros(30), jacobian, gtol=1e-6, ftol=None, xtol=None, **given)
        assert np.allclose(found.x, 1, atol=1e-6) and found.status == 1
        counts.append(found.nhev)
    assert max(counts[1:]) < counts[0] / 3


def test_tolerances_of_products():
    """Those of SciPy: relative to the cost, also where that is small."""
    matrix = np.random.default_rng(2).standard_normal((20, 5))
    fun = lambda x: 1e-6 * (matrix @ np.tanh(x) - 1)  # noqa: E731
    jacobian = lambda x: Operator(1e-6 * matrix / np.cosh(x) ** 2)  # noqa: E731
    found = least_squares(fun, np.zeros(5), jacobian, gtol=None, xtol=None)
    peer = least_squares(fun, np.zeros(5), lambda x: jacobian(x).matrix, gtol=None, xtol=None)
    assert found.status == peer.status == 2 and found.cost == pytest.approx(peer.cost, rel=1e-7)
    by_step = least_squares(fun, np.zeros(5), jacobian, gtol=None, ftol=None, xtol=1e-3)
    assert by_step.status == 3 and by_step.nfev <= found.nfev + 1
    assert least_squares(fun, np.zeros(5), jacobian, gtol=None, max_nfev=2).status == 0


@pytest.mark.parametrize("condition", [1e8, 1e12])
@pytest.mark.parametrize("method", ["trf", "lm"])
def test_an_ill_conditioned_problem(condition, method):
    """The square of the condition number is beyond float64; the step is as good as by orthogonal factors."""
    random = np.random.default_rng(1)
    left, right = (np.linalg.qr(random.standard_normal(shape))[0] for shape in ((60, 6), (6, 6)))
    matrix = (left * np.logspace(0, -np.log10(condition), 6)) @ right.T
    given = dict(x_scale=1.0, method=method, ftol=1e-15, xtol=1e-15, gtol=None)
    found = least_squares(lambda x: matrix @ (x - 1), np.zeros(6), lambda x: matrix, **given)
    assert abs(found.x - 1).max() <= 1e-15 * condition
    assert abs(matrix @ (found.x - 1)).max() <= 1e-14


@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("limits", [(-np.inf, np.inf), ([-2, 1.5], 2), ([-1.2, 1.6], [1e-9 - 1.2, 2])])
def test_differences_stay_in_the_bounds(jac, limits):
    points = []

    def watched(x):
        points.append(np.real(x).copy())
        return rosenbrock(x)

    found = least_squares(watched, [-1.2, 1.7], jac, limits)
    peer = scipys(rosenbrock, [-1.2, 1.7], jac, limits)
    assert (np.array(points) >= limits[0]).all() and (np.array(points) <= limits[1]).all()
    assert found.cost == pytest.approx(peer.cost, rel=1e-6, abs=1e-12) and abs(found.nfev - peer.nfev) <= 2


def test_a_jacobian_that_is_written_into_one_array():
    """The point to which a refused step goes back keeps its own; so does the result."""
    matrix = np.empty((2, 2))

    def jacobian(x):
        matrix[:] = [[-20 * x[0], 10], [-1, 0]]
        return matrix

    found = least_squares(rosenbrock, [-1.2, 1.0], jacobian, tr_solver="cg")
    expected = least_squares(rosenbrock, [-1.2, 1.0], lambda x: jacobian(x).copy(), tr_solver="cg")
    assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev > expected.nit + 1
    assert np.array_equal(found.jac, expected.jac)


def tridiagonal(x):
    """Broyden's function, each residual of which has three unknowns at most."""
    return (3 - x) * x + 1 - np.append(0, x[:-1]) - 2 * np.append(x[1:], 0)


@pytest.mark.parametrize("jac", ["2-point", "3-point", "cs"])
@pytest.mark.parametrize("upper", [np.inf, -0.5])
def test_unknowns_that_share_no_residual_move_together(jac, upper):
    sparse = pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")
    size, calls = 20, []

    def watched(x):
        calls.append(x)
        return tridiagonal(x)

    given = {"jac": jac, "bounds": (-np.inf, upper), "max_nfev": 5}
    expected = least_squares(tridiagonal, np.full(size, -1.0), tr_solver="cg", **given)
    near = abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 1
    for sparsity in (near, sparse.coo_array(near.astype(float))):
        calls.clear()
        found = least_squares(watched, np.full(size, -1.0), jac_sparsity=sparsity, **given)
        assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev > 2
        assert np.array_equal(found.jac.tocsr().toarray(), expected.jac)
        assert len(calls) == found.nfev * (1 + 3 * (2 if jac == "3-point" else 1))
    exact = least_squares(tridiagonal, np.full(size, -1.0), lambda x: found.jac, jac_sparsity="of no use", max_nfev=1)
    assert exact.nfev == 1


def test_a_parabola_through_three_points():
    """At a bound the 3-point difference is one-sided, and still exact for parabolas."""
    found = least_squares(lambda x: 1 + 3 * x + 5 * x * x, [1.0], "3-point", (1.0 - 1e-15, 3), max_nfev=1)
    assert found.jac[0, 0] == pytest.approx(13, rel=1e-9) and found.status == 0


@pytest.mark.parametrize("solver", ["exact", "cg"])
@pytest.mark.parametrize("jac", ["2-point", "3-point"])
@pytest.mark.parametrize("problem", ["curve", "rosenbrock", "linear", "in bounds"])
def test_residuals_in_float32(problem, jac, solver):
    numbers = np.random.default_rng(0)
    matrix, right = numbers.standard_normal((30, 8)), numbers.standard_normal(30)
    fun, start, limits = {
        "curve": (CURVE.residuals, CURVE.start, (-np.inf, np.inf)),
        "rosenbrock": (rosenbrock, [-1.2, 1.0], (-np.inf, np.inf)),
        "linear": (lambda x: matrix.astype(x.dtype) @ x - right, np.zeros(8), (-np.inf, np.inf)),
        "in bounds": (rosenbrock, [-2.0, 0.5], (-2.5, 0.8)),
    }[problem]

    def rounded(x):
        return fun(x.astype(np.float32)).astype(np.float32)

    found = least_squares(rounded, np.array(start, np.float32), jac, limits, tr_solver=solver)
    peer = scipys(rounded, start, jac, limits)
    assert found.success and found.cost == pytest.approx(peer.cost, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_of_losses(name):
    z, h = np.linspace(0, 3, 31)[1:] + 0.013, 1e-5
    (value, first, second), (after, *_), (before, *_) = (LOSSES[name](each) for each in (z, z + h, z - h))
    assert np.allclose((after - before) / (2 * h), first, rtol=1e-8)
    slopes = (LOSSES[name](z + h)[1] - LOSSES[name](z - h)[1]) / (2 * h)
    assert np.allclose(slopes, second, rtol=1e-7) and (value <= z).all()


def test_a_loss_of_ones_own_is_the_one_by_name():
    def cauchy(z):
        return np.stack([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])

    given = [CURVE.residuals, CURVE.start, CURVE.jacobian]
    own, named = (least_squares(*given, loss=loss, f_scale=0.1) for loss in (cauchy, "cauchy"))
    assert np.allclose(own.x, named.x, rtol=1e-9) and own.nfev == named.nfev


def test_unknowns_of_very_different_sizes_need_a_scale():
    """Meyer's, whose solution has elements of 0.006 and of 6181, by products alone."""
    meyer = next(problem for problem in PROBLEMS if "Meyer" in problem.name)
    jacobian = lambda x: Operator(meyer.residuals(x)[1])  # noqa: E731
    scale = 1 / np.sqrt((meyer.residuals(meyer.start)[1] ** 2).sum(axis=0))
    found = least_squares(lambda x: meyer.residuals(x)[0], meyer.start, jacobian, x_scale=scale, max_nfev=1000)
    assert 2 * found.cost == pytest.approx(meyer.minimum, rel=1e-6)


def test_without_a_mesh_there_is_no_mpi():
    script = """
import sys
import numpy as np
from mpishard import least_squares
for solver in ("exact", "cg"):
    least_squares(lambda x: x * x - 2, [1.0], lambda x: np.diag(2 * x), tr_solver=solver)
assert "mpi4py.MPI" not in sys.modules and "h5py" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_arguments_reach_both_functions():
    def fun(x, a, b=0.0):
        return a * x - b

    found = least_squares(fun, 1.0, lambda x, a, b: np.array([[a]]), args=(2.0,), kwargs={"b": 6.0})
    assert found.x == pytest.approx([3]) and found.fun.shape == (1,) and found.jac.shape == (1, 1)


def test_residuals_that_are_not_finite_shorten_the_step():
    found = least_squares(lambda x: np.where(x < 0.5, np.log(np.maximum(x, 1e-300)) + 3, np.nan), [0.4])
    assert found.success and found.x == pytest.approx([np.exp(-3)], rel=1e-6)


def test_the_callback_sees_iterates_and_stops():
    seen = []

    def callback(intermediate_result):
        seen.append((intermediate_result.nit, intermediate_result.cost))
        if len(seen) == 3:
            raise StopIteration

    found = least_squares(rosenbrock, [-1.2, 1], callback=callback)
    assert [nit for nit, _ in seen] == [1, 2, 3] and found.status == -2 and not found.success
    assert found.cost == seen[-1][1] and found.nit == 3


@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_the_callback_sees_the_last_iteration(solver):
    seen = []
    found = least_squares(rosenbrock, [-1.2, 1], callback=seen.append, tr_solver=solver)
    assert found.success and len(seen) == found.nit and np.array_equal(seen[-1], found.x)


def test_what_it_shows(capfd):
    least_squares(rosenbrock, [-1.2, 1], verbose=2, max_nfev=5)
    shown = capfd.readouterr().out
    assert "cost" in shown and "max_nfev" in shown and len(shown.splitlines()) >= 4


WRONG = [
    ({"fun": 3}, TypeError, "fun=3"),
    ({"jac": "4-point"}, ValueError, "2-point"),
    ({"method": "dogbox"}, ValueError, "'trf' or 'lm'"),
    ({"method": "lm", "bounds": (0, 3)}, ValueError, "takes no bounds"),
    ({"method": "lm", "loss": "huber"}, ValueError, "linear"),
    ({"loss": "l1"}, ValueError, "soft_l1"),
    ({"loss": lambda z: z}, ValueError, r"\(3, 2\)"),
    ({"f_scale": 0}, ValueError, "f_scale"),
    ({"bounds": ([0, 0, 0], 1)}, ValueError, "shape"),
    ({"bounds": (2, 1)}, ValueError, "cross"),
    ({"bounds": ([1, 0], [1, 2])}, ValueError, "below the upper one, and bounds are .lower, upper"),
    ({"bounds": 3}, ValueError, "must be"),
    ({"bounds": (2, 3)}, ValueError, "x0 is outside"),
    ({"x_scale": -1}, ValueError, "positive"),
    ({"x_scale": "auto"}, ValueError, "'jac'"),
    ({"x_scale": 1 + 2j}, ValueError, "x_scale"),
    ({"ftol": -1}, ValueError, "ftol"),
    ({"max_nfev": 0}, ValueError, "max_nfev"),
    ({"verbose": 3}, ValueError, "0, 1 or 2"),
    ({"kwargs": 3}, TypeError, "kwargs"),
    ({"maxiter": 3}, TypeError, "'maxiter': max_nfev"),
    ({"options": {}}, TypeError, "arguments, such as max_nfev="),
    ({"maxcg": 3}, TypeError, "'maxcg'.*tr_options"),
    ({"max_n": 3}, TypeError, "unexpected keyword argument 'max_n'$"),
    ({"x0": [np.nan, 1]}, ValueError, "finite"),
    ({"x0": [1, 1e160]}, ValueError, "x0 has an element of 1e\\+160.*units"),
    ({"fun": lambda x: np.array([np.nan, 1.0])}, ValueError, "not finite at x0"),
    ({"fun": lambda x: x[:, None] * x}, ValueError, "one dimension"),
    ({"fun": lambda x: ["a", "b"]}, TypeError, "real numbers"),
    ({"jac": lambda x: np.ones((3, 2))}, ValueError, r"\(3, 2\).*2 residuals of 2"),
    ({"jac": lambda x: np.full((2, 2), np.inf)}, ValueError, "column 0"),
    ({"tr_solver": "lu"}, ValueError, "'exact' or 'cg'"),
    ({"tr_solver": "cg", "method": "lm"}, ValueError, "not for method='lm'"),
    ({"tr_solver": "exact", "preconditioner": 1.0}, ValueError, "preconditioner .*tr_solver='exact'"),
    ({"preconditioner": 1.0, "x_scale": 2.0}, ValueError, "give one of them"),
    ({"tr_options": {"damp": 1}}, ValueError, "forcing"),
    ({"tr_options": {}, "method": "lm"}, ValueError, "tr_options .*method='lm'"),
    ({"tr_options": 3}, TypeError, "tr_options"),
    ({"jac_sparsity": [1, 1, 1]}, ValueError, r"jac_sparsity .*\(1, 3\).*2 unknowns"),
    ({"jac_sparsity": [1, 1]}, ValueError, "jac_sparsity has 1 rows.* 2 residuals"),
    ({"jac_sparsity": np.eye(2), "method": "lm"}, ValueError, "jac_sparsity .*method='lm'"),
    ({"jac_sparsity": np.eye(2), "tr_solver": "exact"}, ValueError, "jac_sparsity .*tr_solver='exact'"),
    ({"tr_options": {"forcing": 2}}, ValueError, "forcing"),
    ({"elastic": True, "method": "lm"}, ValueError, "method='lm' .*checkpoints="),
    ({"samples": 3, "tr_solver": "exact"}, ValueError, "tr_solver='exact' .*checkpoints="),
    ({"samples": 3}, ValueError, "needs elastic=True"),
    ({"elastic": True}, ValueError, "mesh"),
    ({"resume": True}, ValueError, "for a mesh"),
    ({"jac": lambda x: Operator(np.ones((2, 2))), "x_scale": "jac"}, ValueError, "x_scale='jac'"),
    ({"jac": lambda x: Operator(np.ones((2, 2))), "method": "lm"}, ValueError, "needs the elements"),
    ({"jac": lambda x: Operator(np.ones((3, 2)))}, ValueError, "returned the shape"),
    ({"fun": lambda x: np.array([np.nan, 1.0]), "tr_solver": "cg"}, ValueError, "not finite at x0"),
    ({"x0": mpishard.FlatParameters.of({"a": np.ones(2)}), "method": "lm"}, ValueError, "x0 with names"),
    ({"x0": mpishard.FlatParameters.of({"a": np.ones(2)})}, ValueError, "needs a function"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_bad_input_raises_one_clear_error(change, error, text):
    with pytest.raises(error, match=text):
        least_squares(**({"fun": rosenbrock, "x0": [0.5, 0.5]} | change))


def test_scales_of_another_start_are_named():
    with pytest.raises(ValueError, match="x_scale='jac' the same x0"):
        check_metadata(GaussNewton(), {ELEMENTS: "1"}, "2")


def test_the_number_of_residuals_stays():
    with pytest.raises(ValueError, match="3 residuals, but 2"):
        least_squares(lambda x: np.ones(2 if (x == 1).all() else 3), [1.0])


def test_weights_of_the_loss_are_positive():
    first, second = Loss("cauchy", 1.0).weights(np.array([0.0, 10.0, 1e100]))
    assert (second > 0).all() and first[0] == 1


def test_a_start_that_is_a_tree():
    times = np.linspace(0, 10, 50)
    measured = 0.5 + 2 * np.exp(-0.7 * times)

    def residuals(x):
        return x["offset"] + x["decay"][0] * np.exp(-x["decay"][1] * times) - measured

    def blocks(x):
        fall = np.exp(-x["decay"][1] * times)
        return {"decay": np.stack([fall, -x["decay"][0] * times * fall], 1), "offset": np.ones(50)}

    def flat(x):
        return residuals({"offset": x[0], "decay": x[1:]})

    start, seen = {"offset": 1.0, "decay": np.ones(2)}, []
    expected = least_squares(flat, np.ones(3), bounds=([-np.inf, 0, 0], [np.inf, 1.5, 10]), x_scale=[1, 2, 1])
    bounds, scale = {"decay": (0, [1.5, 10])}, {"offset": 1, "decay": [2, 1]}
    found = least_squares(residuals, start, bounds=bounds, x_scale=scale, callback=seen.append)
    for name in ("x", "grad", "active_mask"):
        assert np.array_equal([found[name]["offset"], *found[name]["decay"]], expected[name])
    assert found.nfev == expected.nfev and seen[-1]["decay"].shape == (2,)
    for jac, solver in ((blocks, "exact"), (blocks, "cg"), ("cs", "exact")):
        found = least_squares(residuals, start, jac, tr_solver=solver)
        assert np.allclose([found.x["offset"], *found.x["decay"]], [0.5, 2, 0.7], atol=1e-6)
    with pytest.raises(ValueError, match="jac of .decay. .*50,.*fun returned 50 numbers.*return .50,"):
        least_squares(residuals, start, lambda x: {**blocks(x), "decay": np.ones(50)})
    with pytest.raises(ValueError, match="bounds .*structure of x0"):
        least_squares(residuals, start, bounds=([0, 0, 0], 1))
    with pytest.raises(ValueError, match="least_squares .*real numbers"):
        least_squares(residuals, {"offset": 1j, "decay": np.ones(2)})


def test_a_rank_computes_again_what_another_one_has_not_kept():
    """As one that has come to an elastic run: the residuals of a field may be collective."""

    class Ranks(OneRank):
        other_is_new = False

        def all_reduce(self, buffer, *, op="sum", label=""):
            return buffer | self.other_is_new if (op, label) == ("max", "control") else buffer

    def fun(x):
        calls.append(x)
        return x - 1.0

    calls, ranks, x, limits = [], Ranks(), np.zeros(2), np.full(2, np.inf)
    part = SimpleNamespace(is_split=True, tree=None, vector=lambda what, given: given, like_x0=lambda given: given)
    functions = ResidualFunctions(fun, lambda x: np.eye(2), (), None, None, -limits, limits, part)
    squares = GaussNewtonFunctions(functions, Loss("linear", 1.0), ranks, part)
    squares.product(x, x)
    squares.product(x, x)
    assert len(calls) == 1
    ranks.other_is_new = True
    squares.product(x, x)
    assert len(calls) == 2
