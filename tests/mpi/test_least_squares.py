"""`least_squares` on a mesh: the bits of one process on any ranks, and one outcome on all of them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from residual_problems import Bundle, Curve, Diffusion

import mpishard
from mpishard import FlatParameters, ParameterSpec, covariance, least_squares
from mpishard.inverse.iteration_files import IterationFiles, Vectors
from mpishard.inverse.run_arguments import RunArguments
from mpishard.record import Run

pytestmark = pytest.mark.pairs(1)

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


MANY = {
    "bundle": (BUNDLE, "sparse", {"tr_options": {"maxcg": 20}, "max_nfev": 5}),
    "bundle, soft_l1": (BUNDLE, "sparse", {"loss": "soft_l1", "f_scale": 3e-3, "x_scale": "jac", "max_nfev": 5}),
    "field": (
        FIELD,
        "jacobian",
        {"bounds": (FIELD.lower, FIELD.upper), "tr_solver": "cg", "tr_options": {"maxcg": 6}, "max_nfev": 6},
    ),
    "outliers": (CURVE, "jacobian", {"loss": "cauchy", "f_scale": 0.1, "tr_solver": "cg", "x_scale": "jac"}),
}


def own_rows(mesh, rows):
    """Uneven parts, of which the last one of several is empty."""
    edges = np.linspace(0, 1, max(mesh.size, 2)) ** 2 if mesh.size > 1 else np.array([0.0, 1.0])
    starts = [*(edges * rows).astype(int).tolist(), rows]
    return slice(starts[mesh.rank], starts[mesh.rank + 1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
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


@pytest.mark.parametrize("case", ["lm", "cauchy in bounds", "bundle"])
def test_the_covariance_has_the_bits_of_one_process(mesh, same_on_all, case):
    problem, given = CASES[case]
    own = own_rows(mesh, len(problem.residuals(problem.start)))
    alone = least_squares(problem.residuals, problem.start, problem.jacobian_rows, **given)
    fit = least_squares(
        lambda x: problem.residuals(x)[own], problem.start, lambda x: problem.jacobian_rows(x)[own], mesh=mesh, **given
    )
    expected, found = covariance(alone), covariance(fit, mesh=mesh)
    assert np.array_equal(found, expected) and same_on_all(found.matrix)
    assert (found.sigma, found.degrees_of_freedom) == (expected.sigma, expected.degrees_of_freedom)
    assert 0 < found.standard_errors.max() < np.inf
    if mesh.size > 1:
        with pytest.raises(ValueError, match="cost of the fit .*give mesh="):
            covariance(alone, mesh=mesh)
        if own.stop - own.start < len(alone.fun):
            with pytest.raises(ValueError, match="cost of the fit .*give mesh="):
                covariance(fit)


def test_differences_of_own_rows(mesh, same_on_all):
    own = own_rows(mesh, 200)
    alone = least_squares(CURVE.residuals, CURVE.start, "3-point")
    result = least_squares(lambda x: CURVE.residuals(x)[own], CURVE.start, "3-point", mesh=mesh)
    assert np.array_equal(result.x, alone.x) and result.nfev == alone.nfev and same_on_all(result.x)


@pytest.mark.parametrize("solver", ["exact", "cg"])
def test_differences_of_residuals_of_which_one_rank_has_float32(mesh, same_on_all, solver):
    dtype, points = (np.float64 if mesh.rank else np.float32), []

    def residuals(x):
        points.append(x.copy())
        return (CURVE.residuals(x) * (mesh.rank == 0)).astype(dtype)

    result = least_squares(residuals, CURVE.start, tr_solver=solver, mesh=mesh, max_nfev=30)
    assert same_on_all(np.array(points))
    assert result.cost == pytest.approx(least_squares(CURVE.residuals, CURVE.start).cost, rel=1e-6)


def test_unknowns_that_share_no_residual_on_any_rank_move_together(mesh, same_on_all):
    pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")
    size, points = 12, []
    near = abs(np.subtract.outer(np.arange(size), np.arange(size))) <= 1
    given = {"jac": "3-point", "max_nfev": 4}

    def residuals(x, own=slice(None)):
        points.append(x.copy())
        return (near @ x**2 - x)[own]

    alone = least_squares(residuals, np.linspace(1, 2, size), jac_sparsity=near, **given)
    calls, own = len(points), own_rows(mesh, size)
    points.clear()
    result = least_squares(residuals, np.linspace(1, 2, size), jac_sparsity=near[own], args=(own,), mesh=mesh, **given)
    assert np.array_equal(result.x, alone.x) and np.array_equal(result.jac.toarray(), alone.jac.toarray()[own])
    assert same_on_all(np.array(points)) and len(points) == calls
    with pytest.raises(ValueError, match="jac_sparsity has"):
        rows = near[own] if mesh.rank else np.vstack([near[own], near[:1]])
        least_squares(residuals, np.ones(size), jac_sparsity=rows, args=(own,), mesh=mesh)


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


@pytest.mark.parametrize("given", [{}, {"tr_solver": "cg"}, {"method": "lm"}])
def test_a_failed_evaluation_shortens_the_step_on_all_ranks(mesh, same_on_all, given):
    own = own_rows(mesh, 200)

    def run(at_trial, trials=(2, 3)):
        calls = []

        def fun(x):
            calls.append(x)
            found = CURVE.residuals(x)[own]
            return at_trial(found) if mesh.rank == 0 and len(calls) in trials else found

        return least_squares(fun, CURVE.start, lambda x: CURVE.jacobian_rows(x)[own], mesh=mesh, **given)

    def fails(found):
        raise mpishard.EvaluationFailed("no convergence")

    found, expected = run(fails), run(lambda found: np.full_like(found, np.inf))
    assert all(np.array_equal(found[name], expected[name]) for name in SAME) and same_on_all(found.x)
    assert np.array_equal(found.fun, expected.fun) and found.success
    with pytest.raises(mpishard.EvaluationFailed, match="no convergence"):
        run(fails, trials=(1,))


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
    assert mesh.rank or "initial parameters differ" in str(told[0].message)


def test_any_rank_stops(mesh):
    def callback(x):
        return mesh.rank == mesh.size - 1

    result = least_squares(CURVE.residuals, CURVE.start, CURVE.jacobian, callback=callback, mesh=mesh)
    assert result.status == -2 and result.nit == 1


# Many unknowns, by products.


@pytest.mark.parametrize("case", MANY)
def test_products_of_rows_have_the_bits_of_one_process(mesh, same_on_all, case):
    problem, name, given = MANY[case]
    if name == "sparse":
        pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)")
    jacobian = getattr(problem, name)
    alone = least_squares(problem.residuals, problem.start, jacobian, **given)
    own = own_rows(mesh, len(problem.residuals(problem.start)))
    result = least_squares(
        lambda x: problem.residuals(x)[own], problem.start, lambda x: jacobian(x)[own], mesh=mesh, **given
    )
    assert all(np.array_equal(result[name], alone[name]) for name in [*SAME, "nhev"]) and same_on_all(result.x)
    assert np.array_equal(result.fun, alone.fun[own]) and alone.nhev > 4 and alone.nfev > 4


def observed_by(mesh, bundle=BUNDLE):
    """The observations of a bundle that this rank has."""
    return np.arange(bundle.observations)[mesh.rank :: mesh.size]


def test_operators_of_own_rows(mesh, same_on_all):
    """What an operator adds up itself has other roundings: the same minimum, the same on all ranks."""
    own = observed_by(mesh)
    alone = least_squares(BUNDLE.residuals, BUNDLE.start, BUNDLE.jacobian)
    result = least_squares(
        lambda x: BUNDLE.residuals(x, own), BUNDLE.start, lambda x: BUNDLE.jacobian(x, own), mesh=mesh
    )
    assert np.allclose(result.x, alone.x, atol=1e-7) and same_on_all(result.x) and result.nfev == alone.nfev


def test_errors_in_products_are_raised_on_all(mesh):
    last = mesh.size - 1

    class Failing:
        def __init__(self, matrix):
            self.matrix, self.shape = matrix, matrix.shape

        def matvec(self, v):
            if mesh.rank == last:
                raise RuntimeError("no product")
            return self.matrix @ v

        def rmatvec(self, u):
            return self.matrix.T @ u

    with pytest.raises(RuntimeError, match="no product"):
        least_squares(CURVE.residuals, CURVE.start, lambda x: Failing(CURVE.jacobian(x)), mesh=mesh)
    Failing.matvec = lambda self, v: self.matrix @ v
    Failing.rmatvec = lambda self, u: (self.matrix.T @ u)[: 3 if mesh.rank == last else None]
    with pytest.raises(ValueError, match="rmatvec .*3 elements"):
        least_squares(CURVE.residuals, CURVE.start, lambda x: Failing(CURVE.jacobian(x)), mesh=mesh)


SMALL = Bundle(points=5, cameras=3, views=3)
GIVEN = {"loss": "soft_l1", "f_scale": 3e-3, "tr_options": {"maxcg": 5}, "max_nfev": 7}


@pytest.mark.quick
def test_elastic_runs_have_the_bits_of_one_rank(comm, mesh, same_on_all):
    def run(mesh, jac=None, **more):
        points = []
        given = {**GIVEN, "callback": points.append, "mesh": mesh, "elastic": True, **more}
        jacobian = jac or (SMALL.jacobian if "samples" in more else SMALL.jacobian_rows)
        return points, least_squares(SMALL.residuals, SMALL.start, jacobian, **given)

    with mpishard.Mesh(comm.Split(comm.rank)) as alone:
        for more in ({"samples": SMALL.observations}, {}, {"jac": "2-point"}):
            points, result = run(mesh, **more)
            expected, found = run(alone, **more)
            assert np.array_equal(points, expected) and same_on_all(result.x) and result.nfev == 7
            assert all(np.array_equal(result[name], found[name]) for name in SAME)
            assert ("fun" in result) == ("samples" not in more)


def test_it_is_saved_and_goes_on(mesh, folder, same_on_all):
    """Killed within an iteration, it continues with the next evaluation or product, with the same bits."""
    own, calls = observed_by(mesh, SMALL), []

    def fun(x):
        calls.append(x)
        if len(calls) == stop and mesh.rank == mesh.size - 1:
            raise RuntimeError("a node is gone")
        return SMALL.residuals(x, own)

    def run(**files):
        return least_squares(fun, SMALL.start, lambda x: SMALL.jacobian_rows(x, own), mesh=mesh, **GIVEN, **files)

    stop = 0
    whole = run(tr_solver="cg")
    assert whole.nfev == 7
    calls.clear()
    stop = 4
    with mpishard.Checkpoints(folder / "c", mesh, every=3) as checkpoints:
        files = {"checkpoints": checkpoints, "resume": True}
        with pytest.raises(RuntimeError, match="a node is gone"):
            run(**files)
        stop = 0
        with mpishard.RunRecord(folder / "r", mesh) as record:
            result = run(record=record, **files)
        again = run(**files)
    assert all(np.array_equal(result[name], whole[name]) for name in SAME) and same_on_all(result.x)
    assert np.array_equal(again.x, result.x) and again.message == result.message
    if mesh.rank == 0:
        steps = Run.read(folder / "r").metrics["step"]
        assert 1 < steps[0] and steps[-1] == result.nfev + result.nhev


@pytest.mark.parametrize("case", ["lm", "cauchy in bounds", "bundle"])
def test_an_exact_method_is_saved_and_continues(comm, mesh, folder, case):
    """Stopped within an iteration, it continues from the last checkpoint with the same bits, on any ranks."""
    problem, given = CASES[case]
    given = {**given, "max_nfev": 9}
    whole = least_squares(problem.residuals, problem.start, problem.jacobian_rows, **given)
    own, calls, stop = own_rows(mesh, len(problem.residuals(problem.start))), [], 4

    def fun(x):
        calls.append(x)
        if len(calls) == stop and mesh.rank == mesh.size - 1:
            raise RuntimeError("a node is gone")
        return problem.residuals(x)[own]

    def run(mesh, fun=fun, **files):
        files = {"checkpoints": checkpoints, "resume": True, **given, **files}
        rows = own if mesh.size == comm.size else slice(None)
        return least_squares(fun, problem.start, lambda x: problem.jacobian_rows(x)[rows], mesh=mesh, **files)

    with mpishard.Checkpoints(folder, mesh, every=1) as checkpoints:
        with pytest.raises(RuntimeError, match="a node is gone"):
            run(mesh)
        stop, calls = 0, []
        run(mesh, max_nfev=4)
        assert len(calls) < 4
        with pytest.raises(ValueError, match="is of other residuals"):
            run(mesh, lambda x: 2 * problem.residuals(x)[own])
        if case == "cauchy in bounds":
            with pytest.raises(ValueError, match="of other bounds"):
                run(mesh, bounds=(problem.start - 1e-9, problem.start + 1e-9))
        if case == "lm":
            with pytest.raises(ValueError, match="by lm, .*by trf"):
                run(mesh, method="trf", x_scale=1.0)
    with mpishard.Mesh(comm.Split(comm.rank)) as alone:
        for rank in range(comm.size):
            if rank == comm.rank:
                with mpishard.Checkpoints(folder, alone) as checkpoints:
                    found = [run(alone, problem.residuals) for _ in range(2)]
                assert all(np.array_equal(each[name], whole[name]) for each in found for name in SAME)
            comm.Barrier()


@pytest.mark.parametrize(
    ("name", "words"), [("\x1b[31mother", r"is of .*\\x1b\[31mother"), (None, "damaged numbers.*x1b")]
)
def test_a_forged_checkpoint_writes_no_escapes(mesh, folder, name, words):
    name = name or "least_squares by trf, without x_scale='jac'"
    vectors = Vectors.whole(mesh, {"x": 4, "inverse scale": 4})
    numbers = dict.fromkeys(("cost", "optimality", "radius", "multiplier", "iterations", "nfev", "njev", "status"), 0.0)
    numbers |= {"cost": "\x1b[31m", "tolerances": []}
    with mpishard.Checkpoints(folder, mesh) as checkpoints:
        forged = IterationFiles(RunArguments(mesh, checkpoints=checkpoints), "least_squares", name, vectors)
        forged.end(1, lambda: (numbers, [CURVE.start, np.zeros(4)]))
        with pytest.raises(ValueError, match=words) as raised:
            least_squares(CURVE.residuals, CURVE.start, mesh=mesh, checkpoints=checkpoints, resume=True)
    assert "\x1b" not in str(raised.value)


def test_unknowns_that_are_split(comm, same_on_all):
    """A field in slabs: the residuals are those of a step that smooths, and each rank has those of its rows."""
    rows, width = 3 * comm.size, 4

    def bend(values):
        return values + 0.1 * values**3

    def run(mesh, first, last, field):
        target = bend(np.sin(np.arange(float(rows * width))).reshape(rows, width)[first:last])

        class Slab:
            def __init__(self, values):
                self.slope = (1 + 0.3 * values**2).reshape(-1)
                self.shape = (self.slope.size,) * 2

            def matvec(self, v):
                return self.slope * v

            rmatvec = matvec

        fun = lambda p: (bend(p["field"]) - target).reshape(-1)  # noqa: E731
        return least_squares(fun, field, lambda p: Slab(p["field"].copy()), mesh=mesh, bounds={"field": (-0.9, 2)})

    spec = ParameterSpec("field", (rows, width), tensor_dim=0)
    whole = FlatParameters([spec], np.float64)
    alone = run(None, 0, rows, whole)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        field = FlatParameters([spec], np.float64, place=mesh.place)
        (first, last), _ = field.box("field")
        result = run(mesh, first, last, field)
        assert result.x is field and np.array_equal(field["field"], whole["field"][first:last])
        names = ["cost", "optimality", "nfev", "nhev", "status", "message"]
        assert all(result[name] == alone[name] for name in names) and same_on_all(result.cost)
        assert result.success and field["field"].min() >= -0.9 and alone.nfev > 3
