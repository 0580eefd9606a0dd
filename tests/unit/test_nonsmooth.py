"""Total variation and norms of groups: minima beside primal-dual methods, exact zeros, states, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from minimizer_runs import Vector

import mpishard
from mpishard import (
    L1,
    GroupL1,
    SmoothedTotalVariation,
    Tikhonov,
    TotalVariation,
    check_gradient,
    minimize,
    regularized,
)
from mpishard.inverse.stencils import forward, forward_adjoint
from mpishard.inverse.total_variation import TotalVariations
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.proximal_quasi_newton import Model, ModelHistory
from mpishard.minimizers.space import LocalSpace

TIGHT = {"gtol": 1e-9, "ftol": 0.0}


class LinearMisfit:
    """Half of the squares of ``matrix x - data``."""

    def __init__(self, matrix: np.ndarray, data: np.ndarray) -> None:
        self.matrix, self.data = matrix, data

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        residual = self.matrix @ x - self.data
        return 0.5 * float(residual @ residual), self.matrix.T @ residual


def blur(size: int, width: float) -> np.ndarray:
    place = np.arange(size)
    found = np.exp(-0.5 * ((place[:, None] - place) / width) ** 2)
    return found / found.sum(1, keepdims=True)


def rays(shape: tuple[int, int]) -> np.ndarray:
    """The sums of an image along its rows, columns and diagonals."""
    i, j = np.indices(shape)
    lines = [place == number for place in (i, j, i + j, i - j) for number in np.unique(place)]
    return np.array([line.reshape(-1) for line in lines], float)


def image(shape: tuple[int, ...]) -> np.ndarray:
    """Piecewise constant."""
    places = np.indices(shape)
    return (places[0] > shape[0] // 3) * 1.0 + (places[-1] < shape[-1] // 2) * (places[0] < 3 * shape[0] // 4) * 0.5


def noisy(matrix: np.ndarray, shape: tuple[int, ...]) -> LinearMisfit:
    rng = np.random.default_rng(len(matrix))
    return LinearMisfit(matrix, matrix @ image(shape).reshape(-1) + 0.05 * rng.standard_normal(len(matrix)))


def primal_dual(
    misfit: LinearMisfit, shape: tuple[int, ...], bound: np.ndarray, lower: float, upper: float, count: int
) -> Vector:
    """The minimum with total variation and bounds by the method of Chambolle and Pock (2011).

    `bound` has the weight of each cell. The bounds are another dual variable, and a solve is the proximal map of the
    misfit.
    """
    size, dims = int(np.prod(shape)), range(len(shape))
    step = 1 / np.sqrt(4 * len(shape) + 1)
    inverse = np.linalg.inv(np.eye(size) + step * misfit.matrix.T @ misfit.matrix)
    right = step * (misfit.matrix.T @ misfit.data)
    x = ahead = np.zeros(size)
    p, q = np.zeros((len(shape), *shape)), np.zeros(size)
    for _ in range(count):
        field = ahead.reshape(shape)
        p = p + step * np.array([forward(field, dim, 1.0) for dim in dims])
        p /= np.maximum(np.sqrt((p * p).sum(0)) / bound, 1.0)
        q = q + step * ahead
        q -= step * np.clip(q / step, lower, upper)
        flow = sum(forward_adjoint(component, dim, 1.0) for component, dim in zip(p, dims, strict=True))
        new = inverse @ (x - step * (flow.reshape(-1) + q) + right)
        x, ahead = new, 2 * new - x
    return np.clip(x, lower, upper)


def total(misfit: LinearMisfit, term: Any, x: Vector, shape: tuple[int, ...]) -> float:
    return misfit(x)[0] + term.value(x.reshape(shape))


@pytest.mark.parametrize(
    ("kind", "shape", "weight", "bounds"),
    [
        ("denoising", (40,), 0.2, None),
        ("denoising", (8, 9), 0.1, (0.2, 1.2)),
        ("denoising", (4, 3, 5), 0.1, None),
        ("deblurring", (9, 7), 0.01, (0.0, 1.4)),
        ("tomography", (8, 8), 0.05, None),
    ],
)
def test_total_variation_beside_a_primal_dual_method(
    kind: str, shape: tuple[int, ...], weight: float, bounds: tuple[float, float] | None
) -> None:
    size = int(np.prod(shape))
    matrix = np.eye(size)
    if kind == "deblurring":
        matrix = np.kron(blur(shape[0], 1.0), blur(shape[1], 1.0))
    elif kind == "tomography":
        matrix = rays((shape[0], shape[-1]))
    misfit, term = noisy(matrix, shape), TotalVariation(weight, shape=shape)
    lower, upper = (-np.inf, np.inf) if bounds is None else bounds
    expected = primal_dual(misfit, shape, np.full(shape, weight), lower, upper, 4000)
    found = minimize(regularized(misfit, term), np.zeros(size), bounds=bounds, options=TIGHT)
    assert found.fun == pytest.approx(total(misfit, term, found.x, shape), rel=1e-13)
    assert found.fun <= total(misfit, term, expected, shape) * (1 + 1e-8)
    assert np.allclose(found.x, expected, atol=1e-3) and ((found.x >= lower) & (found.x <= upper)).all()
    assert 0 <= found.duality_gap < 1e-8 and f"the duality gap is {found.duality_gap:.3g}" in found.message
    if bounds is None:
        assert abs(found.jac).max() < 1e-5


def test_weights_masks_spacing_and_references() -> None:
    """Cells without weight and differences that a mask leaves out do not count, nor what the reference has."""
    shape, rng = (6, 5), np.random.default_rng(3)
    misfit = LinearMisfit(np.eye(30), rng.standard_normal(30))
    reference, mask = rng.standard_normal(shape), rng.random(shape) < 0.8
    weight = np.where(rng.random(shape) < 0.2, 0.0, 0.1 + rng.random(shape))
    given = {"spacing": (0.5, 2.0), "reference": reference, "mask": mask}
    found = minimize(regularized(misfit, TotalVariation(weight, **given)), np.zeros(shape), options=TIGHT)
    nearly = SmoothedTotalVariation(weight=weight, epsilon=1e-9, shape=shape, **given)
    assert found.fun == pytest.approx(misfit(found.x)[0] + nearly.value_and_gradient(found.x)[0], abs=1e-7)
    smooth = SmoothedTotalVariation(weight=weight, epsilon=1e-3, shape=shape, **given)
    beside = minimize(regularized(misfit, smooth), np.zeros(30), options={**TIGHT, "maxiter": 3000, "maxfun": 5000})
    assert beside.fun <= found.fun <= beside.fun + 1e-3 * 30 and np.allclose(found.x, beside.x, atol=0.02)


def test_fixed_elements_several_fields_and_smooth_terms() -> None:
    goal = {"a": np.array([0.0, 1.2, 1.0, 3.0]), "b": np.array([[5.0, 1.0], [0.0, 1.0]]), "c": np.array([7.0])}

    def misfit(x: dict[str, Vector]) -> tuple[float, dict[str, Vector]]:
        gradient = {name: x[name] - goal[name] for name in x}
        return 0.5 * sum(float((each**2).sum()) for each in gradient.values()), gradient

    terms = [TotalVariation(0.3, name="a"), TotalVariation(10.0, name="b"), Tikhonov(weight=1.0, order=0, name="c")]
    start = {name: np.zeros_like(value) for name, value in goal.items()}
    start["a"][3] = -2.0
    fixed = {"a": np.array([False, False, False, True])}
    found = minimize(regularized(misfit, terms), start, fixed=fixed, options=TIGHT)
    assert np.allclose(found.x["b"], 1.75, atol=1e-7) and np.allclose(found.x["c"], 3.5) and found.x["a"][3] == -2
    # The first one rises by 0.3; the mean of the next two falls by half of 0.3 for each neighbour.
    assert np.allclose(found.x["a"], [0.3, 0.8, 0.8, -2.0], atol=1e-6)
    assert found.jac["a"][3] == 0


def cosh(x: Vector) -> tuple[float, Vector]:
    far = 3 * (x - (image((30,)) + 0.1 * np.sin(17 * np.arange(30.0))))
    return float((np.cosh(far) / 3).sum()), np.sinh(far)


def test_a_function_that_is_no_quadratic() -> None:
    term = TotalVariation(0.5)
    found = minimize(regularized(cosh, term), np.full(30, 3.0), options=TIGHT)
    assert found.success and found.nfev < 60
    beside = SmoothedTotalVariation(weight=0.5, epsilon=1e-3)
    smooth = minimize(regularized(cosh, beside), np.full(30, 3.0), options={**TIGHT, "maxfun": 3000})
    assert smooth.fun <= found.fun <= cosh(smooth.x)[0] + term.value(smooth.x)


@pytest.mark.full  # compiles much that no other test here needs
def test_float32_is_near_float64() -> None:
    fun = regularized(cosh, TotalVariation(0.5))
    narrow, wide = minimize(fun, np.full(30, 3.0, np.float32)), minimize(fun, np.full(30, 3.0), options=TIGHT)
    assert narrow.x.dtype == np.float32 and np.allclose(narrow.x, wide.x, atol=2e-3)


# Groups.


def shrunk(goal: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    found = goal.copy()
    for number, weight in enumerate(weights):
        here = groups == number
        norm = np.sqrt((goal[here] ** 2).sum())
        found[here] *= max(0.0, 1 - weight / norm)
    return found


def test_norms_of_groups_have_their_formula() -> None:
    rng = np.random.default_rng(1)
    goal, groups, weights = rng.standard_normal(40), np.arange(40) % 9 - 1, np.linspace(0.0, 4.0, 8)
    misfit = LinearMisfit(np.eye(40), goal)
    expected = shrunk(goal, groups, weights)
    found = minimize(regularized(misfit, GroupL1(weights, groups=groups)), np.ones(40), options=TIGHT)
    assert np.allclose(found.x, expected, atol=1e-8) and np.array_equal(found.x == 0, expected == 0)
    zeros = sum((expected[groups == number] == 0).all() for number in range(8))
    assert 0 < zeros == found.at_reference < 7
    assert f"{zeros} of 7 groups are exactly zero" in found.message  # one has no weight
    off = minimize(regularized(misfit, GroupL1(weights, groups=groups, reference=0.1)), np.ones(40), options=TIGHT)
    assert np.allclose(off.x, 0.1 + shrunk(goal - np.where(groups < 0, 0, 0.1), groups, weights) - 0.1 * (groups < 0))
    assert (off.x == 0.1).sum() > 5 and "groups are exactly at its reference" in off.message
    nothing = GroupL1(1.0, groups=[], name="a")  # as on a rank without elements
    assert nothing.value({"a": np.zeros(0), "b": np.ones(2)}) == 0
    far = GroupL1([0.0, 1.0], groups=[0, 0, 1, 1])  # as small beside the other group as its rounding
    assert far.value([3e20, 4e20, 3.0, 4.0]) == 5.0 and far.value([3.0, 4.0, 0.0, 0.0]) == 0.0


@pytest.mark.parametrize("bounds", [None, (0.0, 0.6), (-0.3, 2.0)])
def test_groups_of_a_system_are_optimal(bounds: tuple[float, float] | None) -> None:
    """By the subgradient of least norm between bounds, by hand, and beside proximal gradients."""
    rng = np.random.default_rng(2)
    matrix = rng.standard_normal((30, 48))
    truth = np.where(np.arange(16) % 4 == 0, 1.0, 0.0)[:, None] * rng.standard_normal((16, 3))
    misfit = LinearMisfit(matrix, matrix @ truth.reshape(-1) + 0.1 * rng.standard_normal(30))
    weight = 0.15 * float(np.sqrt((misfit(np.zeros(48))[1].reshape(16, 3) ** 2).sum(1)).max())
    found = minimize(regularized(misfit, GroupL1(weight, axis=1)), np.zeros((16, 3)), bounds=bounds, options=TIGHT)
    x, gradient = found.x.reshape(16, 3), misfit(found.x)[1].reshape(16, 3)
    lower, upper = (-np.inf, np.inf) if bounds is None else bounds
    norms = np.sqrt((x * x).sum(1))
    held = ((gradient > 0) & (x <= lower)) | ((gradient < 0) & (x >= upper))
    zero = norms == 0
    assert 3 < zero.sum() == found.at_reference < 14
    assert (np.sqrt((np.where(held, 0, gradient)[zero] ** 2).sum(1)) <= weight * (1 + 1e-9)).all()
    slope = gradient[~zero] + weight * x[~zero] / norms[~zero, None]
    outward = ((slope > 0) & (x[~zero] <= lower)) | ((slope < 0) & (x[~zero] >= upper))
    assert abs(np.where(outward, 0, slope)).max() < 1e-5
    assert not found.jac.reshape(16, 3)[zero & ~held.any(1)].any()


def test_bounds_cut_a_group_while_another_one_is_nearly_zero() -> None:
    """Its norm is found to the last bits, too, so that a run ends by `gtol`, and not where steps have become wrong."""
    goal = np.array([3.0, 4.0, 0.6, 0.8 + 1e-7])
    found = minimize(
        regularized(lambda x: (0.5 * ((x - goal) ** 2).sum(), x - goal), GroupL1(1.0, groups=[0, 0, 1, 1])),
        np.zeros(4),
        bounds=(-1.0, 2.5),
        options={"ftol": 0.0, "gtol": 1e-12},
    )
    norm = np.hypot(0.6, 0.8 + 1e-7)
    assert np.allclose(found.x[2:], goal[2:] * (norm - 1) / norm, rtol=1e-4, atol=0) and found.x[1] == 2.5
    assert np.isclose(found.x[0] * (1 + 1 / np.hypot(found.x[0], 2.5)), 3.0, rtol=1e-12)


def test_groups_of_one_element_are_an_l1_term() -> None:
    rng = np.random.default_rng(4)
    misfit = LinearMisfit(rng.standard_normal((20, 30)), rng.standard_normal(20))
    one = minimize(regularized(misfit, L1(2.0)), np.zeros(30), options=TIGHT)
    other = minimize(regularized(misfit, GroupL1(2.0, groups=np.arange(30))), np.zeros(30), options=TIGHT)
    assert other.fun == pytest.approx(one.fun, rel=1e-12) and np.array_equal(one.x == 0, other.x == 0)


# The model, states, values that are not finite.


def test_the_model_has_the_hessian_of_the_updates() -> None:
    """Of BFGS, one pair after the other, of which the newest four are kept."""
    rng = np.random.default_rng(0)
    space, form = LocalSpace(7, np.zeros(7)), np.diag(np.geomspace(0.1, 10, 7)) + 0.1
    history, pairs = ModelHistory(space, np.zeros((8, 7))), []
    for _ in range(6):
        s = rng.standard_normal(7)
        pairs.append((s, form @ s))
        for row, vector in zip(history.open(), pairs[-1], strict=True):
            row[:] = vector
        history.set_tops(*(float(abs(vector).max()) for vector in pairs[-1]))
        history.learn()
    theta = 1 / history.gamma()
    hessian = theta * np.eye(7)
    for s, y in pairs[-4:]:
        moved = hessian @ s
        hessian += np.outer(y, y) / (s @ y) - np.outer(moved, moved) / (s @ moved)
    model, vector, out = Model(space, history, theta), rng.standard_normal(7), np.zeros(7)
    products = model.products(vector, float(abs(vector).max()))
    model.times(vector, products, out)
    assert np.allclose(out, hessian @ vector, rtol=1e-12)
    assert model.bend(vector @ vector, products) == pytest.approx(vector @ hessian @ vector, rel=1e-12)


def test_it_goes_on_from_its_state_at_every_call() -> None:
    misfit = noisy(np.kron(blur(5, 0.7), blur(6, 0.7)), (5, 6))
    starts = {"whole": np.zeros((5, 6))}

    def begun(weight: float = 0.02, spacing: float = 1.0) -> mpishard.ReverseCommunication:
        term = TotalVariation(weight, spacing=spacing)
        method = mpishard.LBFGSB(
            penalty=TotalVariations([term], Unknowns(starts["whole"]), None), history=3, maxiter=12, bounds=(0.1, 1.3)
        )
        return mpishard.ReverseCommunication(method, starts["whole"])

    whole, parts = begun(), begun()
    while (request := whole.ask()) is not None:
        whole.tell(*misfit(request.x))
    while (request := parts.ask()) is not None:
        parts.tell(*misfit(request.x))
        saved = parts.serialize()
        parts = begun()
        parts.deserialize(saved)
    assert np.array_equal(parts.result.x, whole.result.x) and parts.result.nfev == whole.result.nfev > 8
    assert np.array_equal(parts.result.jac, whole.result.jac)
    for other in (begun(weight=0.03), begun(spacing=2.0)):
        with pytest.raises(ValueError, match=r"L1 terms \(or other terms"):
            other.deserialize(saved)


def test_steps_are_shortened_where_values_are_not_finite() -> None:
    def wall(x: Vector) -> tuple[float, Vector]:
        return (-float(np.log(x).sum()), -1 / x) if (x > 0).all() else (np.nan, x)

    found = minimize(regularized(wall, GroupL1(1.0, groups=np.zeros(4, int))), np.full(4, 0.01), options=TIGHT)
    assert found.success and np.allclose(found.x, 2.0)  # -1 / x + x / |x| = 0


def test_a_start_at_the_minimum_has_converged() -> None:
    found = minimize(regularized(lambda x: (0.5 * x @ x, x), TotalVariation(1.0)), np.zeros(5))
    assert found.success and found.nfev == 1 and not found.x.any()


ZEROS = np.zeros(6)


def squares(x: Vector) -> tuple[float, Vector]:
    return float(x @ x), 2 * x


def run(term: Any, x0: Any = ZEROS, **given: Any) -> Any:
    return minimize(regularized(squares, term), x0, **given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: TotalVariation(-1.0), "TotalVariation: weight=-1.0 .*at least 0"),
        (lambda: TotalVariation(None), "TotalVariation: weight=None"),
        (lambda: TotalVariation(1.0, spacing=0), "TotalVariation: spacing=0"),
        (lambda: GroupL1(1.0), "GroupL1 takes either groups=.*axis="),
        (lambda: GroupL1(1.0, axis=0, groups=[0]), "GroupL1 takes either groups=.*axis="),
        (lambda: run(TotalVariation(np.ones(5))), r"TotalVariation: weight .*\(5,\).*\(6,\)"),
        (lambda: run(TotalVariation(ZEROS + 1j)), "TotalVariation: weight=.*real"),
        (lambda: run(TotalVariation(1.0, reference=ZEROS + 1j)), "TotalVariation: reference=.*real"),
        (lambda: TotalVariation(1.0, shape=2.5), "TotalVariation: shape=2.5 .*whole number"),
        (lambda: run(TotalVariation([1.0, 1, 1, np.inf, 1, 1])), "TotalVariation: weight has the value inf"),
        (lambda: run(TotalVariation(1.0, mask=np.full(6, 2))), "TotalVariation: mask has the value 2"),
        (lambda: run(TotalVariation(1.0, mask=np.full(6, 0.5))), "TotalVariation: mask has the value 0.5.*weight"),
        (lambda: run(TotalVariation(1.0, shape=(2, 4))), r"TotalVariation: shape=\(2, 4\).*\(6,\)"),
        (lambda: run(TotalVariation(1.0, shape=(3, 2)), np.zeros((2, 3))), r"shape=\(3, 2\), but .*\(2, 3\)"),
        (lambda: run(TotalVariation(1.0, reference=ZEROS.astype(object))), "TotalVariation: reference=.*real"),
        (lambda: run(TotalVariation(1.0, mask=["1"] * 6)), "TotalVariation: mask=.*real"),
        (lambda: run(TotalVariation(1.0, spacing=(1, 2))), "spacing has 2 numbers.* 1 dimension"),
        (lambda: run(TotalVariation(1.0), np.zeros((1, 1, 1, 2))), "one to three dimensions"),
        (lambda: run(TotalVariation(1.0), {"a": ZEROS, "b": ZEROS}), "2 arrays.*TotalVariation"),
        (lambda: run(TotalVariation(1.0, name="c"), {"a": ZEROS}), "no array 'c'"),
        (lambda: run([TotalVariation(1.0), TotalVariation(2.0)]), "2 TotalVariation terms are of the array 'x'"),
        (lambda: run([TotalVariation(1.0), L1(2.0)]), "TotalVariation and L1"),
        (lambda: run(TotalVariation(1.0), ZEROS + 1j), "TotalVariation is for real numbers"),
        (lambda: run(TotalVariation(1.0), method="CG"), "'CG' takes no TotalVariation terms; method='L-BFGS-B'"),
        (lambda: run(TotalVariation(1.0), method=mpishard.LBFGSB(l1=(1.0, None))), "both have TotalVariation terms"),
        (lambda: run(TotalVariation(1.0), inner_product=2.0), "TotalVariation takes no inner_product"),
        (lambda: run(TotalVariation(1.0), preconditioner=np.copy), "TotalVariation takes no inner_product"),
        (lambda: run(TotalVariation(1.0), options={"c1": 1e-3}), "line search of its own"),
        (lambda: run(TotalVariation(1.0), options={"hess_inv": True}), "hess_inv.*TotalVariation"),
        (
            lambda: run(TotalVariation(1.0), constraints={"type": "eq", "fun": sum}),
            "TotalVariation terms do not go with constraints",
        ),
        (lambda: regularized(squares, TotalVariation(1.0))(ZEROS), "TotalVariation term.*mpishard.minimize"),
        (
            lambda: mpishard.augmented_lagrangian(regularized(squares, GroupL1(1.0, axis=0)), ZEROS, squares, squares),
            "GroupL1 terms do not go with constraints",
        ),
        (lambda: run(GroupL1(1.0, groups=[0, 1])), r"GroupL1: groups have the shape \(2,\).*\(6,\)"),
        (lambda: run(GroupL1(1.0, groups=[0, 1, -2, 0, 0, 0])), "GroupL1: the number -2"),
        (lambda: run(GroupL1(1.0, groups=[0.5] * 6)), "GroupL1: groups=.*whole numbers"),
        (lambda: run(GroupL1(1.0, groups=[[0], [1, 2]])), r"GroupL1: groups=\[\[0\], \[1, 2\]\] .*whole numbers"),
        (lambda: run(GroupL1(1.0, groups=np.full(6, 2**63, np.uint64))), "the number 9223372036854775808 .*2\\*\\*63"),
        (lambda: run(GroupL1(ZEROS + 1j, groups=[0] * 6)), "GroupL1: weight=.*real"),
        (lambda: run(GroupL1(["a"], groups=[0] * 6)), r"GroupL1: weight=\['a'\] must be"),
        (lambda: run(GroupL1(1.0, axis=1)), r"GroupL1: axis=\(1,\).*\(6,\)"),
        (lambda: run(GroupL1([1.0, 2.0], groups=[0, 1, 2, 0, 0, 0])), "2 weights, and none for the group 2"),
        (lambda: run(GroupL1([1.0, -2.0], groups=[0, 1, 1, 0, 0, 0])), "weight -2"),
        (lambda: run([GroupL1(1.0, axis=0), GroupL1(2.0, axis=0)]), "2 GroupL1 terms are of the array 'x'"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (L1({"a": 0.25}), [0, 0.75, 1.75]),
        (TotalVariation(0.25, name="a"), [0.25, 1, 1.75]),
        (GroupL1(1.0, axis=0, name="a"), np.arange(3) * (1 - 5**-0.5)),
    ],
)
def test_a_real_array_beside_a_complex_one(term: Any, expected: Any) -> None:
    def fun(t: dict[str, Any]) -> tuple[float, Any]:
        off = {"a": t["a"] - np.arange(3.0), "z": t["z"] - 1j}
        return 0.5 * float(sum((abs(each) ** 2).sum() for each in off.values())), off

    found = minimize(regularized(fun, term), {"a": np.zeros(3), "z": np.zeros(2, complex)}, options=TIGHT)
    assert found.success and np.allclose(found.x["z"], 1j) and np.allclose(found.x["a"], expected, atol=1e-5)


def test_the_rest_of_a_function_is_checked() -> None:
    check = check_gradient(regularized(squares, TotalVariation(100.0)), ZEROS + 1, disp=False)
    assert check.passed and "without the TotalVariation terms" in check.verdict and check.value == 6
