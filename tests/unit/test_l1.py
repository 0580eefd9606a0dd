"""L1 terms: minima beside coordinate descent, exact zeros, optimality by the smallest subgradient, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import Device
from minimizer_runs import Problem, Vector, check_device, check_ranks, check_restarts, minimized, rosenbrock

import mpishard
from mpishard import L1, LBFGSB, SmoothedTotalVariation, Tikhonov, check_gradient, minimize, regularized
from mpishard.minimizers.method import Limits

TIGHT = {"gtol": 1e-9, "ftol": 0.0}  # where rounding of the value lets it, and else to the last bit of the value


class LeastSquares:
    """Half of the squares of the residuals of a random system, of which few unknowns are not 0."""

    def __init__(self, seed: int, rows: int = 40, columns: int = 60) -> None:
        rng = np.random.default_rng(seed)
        self.matrix = rng.standard_normal((rows, columns))
        truth = np.where(rng.random(columns) < 0.15, 3 * rng.standard_normal(columns), 0)
        self.data = self.matrix @ truth + 0.1 * rng.standard_normal(rows)
        self.weight = 0.05 * float(abs(self.matrix.T @ self.data).max())
        self.zeros = np.zeros(columns)

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        residual = self.matrix @ x - self.data
        return 0.5 * float(residual @ residual), self.matrix.T @ residual

    def descended(self, weights: Any, reference: Any = 0.0, lower: float = -np.inf) -> Vector:
        """The minimum by coordinate descent, with terms ``weights |x - reference|`` and a bound."""
        gram, x = self.matrix.T @ self.matrix, self.zeros.copy()
        right, sizes = self.matrix.T @ self.data, np.diag(gram)
        weights, reference = np.broadcast_to(weights, x.shape), np.broadcast_to(reference, x.shape)
        moved = 1.0
        while moved > 1e-13:
            moved = 0.0
            for j in range(x.size):
                free = x[j] + (right[j] - gram[j] @ x) / sizes[j] - reference[j]
                new = reference[j] + np.sign(free) * max(abs(free) - weights[j] / sizes[j], 0.0)
                new = max(new, lower)
                moved, x[j] = max(moved, abs(new - x[j])), new
        return x


def total(function: Callable, terms: L1 | list[L1], x: Vector) -> float:
    return function(x)[0] + sum(term.value(x) for term in (terms if isinstance(terms, list) else [terms]))


FORMS = {
    "one number": lambda w, n: (L1(w), {"weights": w}, {}),
    "an array": lambda w, n: (L1(w * np.linspace(0.5, 2, n)), {"weights": w * np.linspace(0.5, 2, n)}, {}),
    "a bound": lambda w, n: (L1(w), {"weights": w, "lower": 0.0}, {"bounds": (0, None)}),
    "references": lambda w, n: (
        L1(w, reference=np.arange(n) % 7 / 10),
        {"weights": w, "reference": np.arange(n) % 7 / 10},
        {},
    ),
    "a bound on one side of references": lambda w, n: (
        L1(w, reference=0.3),
        {"weights": w, "reference": 0.3, "lower": 0.1},
        {"bounds": (0.1, None)},
    ),
    "a mask": lambda w, n: (L1(w, mask=np.arange(n) % 4 > 0), {"weights": w * (np.arange(n) % 4 > 0)}, {}),
    "two terms": lambda w, n: (
        [L1(w / 4), L1(np.full(n, w), mask=np.arange(n) < 30)],
        {"weights": w / 4 + w * (np.arange(n) < 30)},
        {},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_minima_are_those_of_coordinate_descent(form: str) -> None:
    function = LeastSquares(len(form))  # of another seed each
    terms, of_descent, given = FORMS[form](function.weight, 60)
    expected = function.descended(**of_descent)
    found = minimize(regularized(function, terms), function.zeros, options=TIGHT, **given)
    assert found.success and found.fun == pytest.approx(total(function, terms, found.x), rel=1e-14)
    assert found.fun <= total(function, terms, expected) * (1 + 1e-13)
    reference = np.broadcast_to(of_descent.get("reference", 0.0), 60)
    assert np.array_equal(found.x == reference, expected == reference)  # the very bits
    assert np.allclose(found.x, expected, rtol=0, atol=1e-6)  # the root of the rounding of a value of 1000
    assert found.at_reference == ((found.x == reference) & (np.broadcast_to(of_descent["weights"], 60) > 0)).sum()


def logistic(x: Vector) -> tuple[float, Vector]:
    rng = np.random.default_rng(5)
    rows, signs = rng.standard_normal((80, 30)), np.where(rng.random(80) < 0.5, 1.0, -1.0)
    margins = signs * (rows @ x)
    return float(np.logaddexp(0, -margins).sum()), -rows.T @ (signs / (1 + np.exp(margins)))


@pytest.mark.parametrize(("weight", "scaled"), [(2.0, False), (3.0, False), (3.0, True)])
def test_the_conditions_of_optimality_are_met_to_a_tight_tolerance(weight: float, scaled: bool) -> None:
    """Of a function without a formula for its minimum, from a start without zeros; with scales, too."""
    given = {"inner_product": np.linspace(1, 3, 30), "preconditioner": np.linspace(0.1, 4, 30)} if scaled else {}
    found = minimize(
        regularized(logistic, L1(weight)),
        np.full(30, 0.7),
        bounds=(-0.4, np.inf),
        options={**TIGHT, "gtol": 2e-7},
        **given,
    )
    x, gradient = found.x, logistic(found.x)[1]
    zero, held = x == 0, x == -0.4
    assert "<= gtol" in found.message and 3 < zero.sum() == found.at_reference < 30
    assert (abs(gradient[zero]) <= weight).all()
    free = ~zero & ~held
    slope = gradient + weight * np.sign(x)
    assert abs(slope[free]).max() <= 2e-7 and (slope[held] >= 0).all()
    assert np.array_equal(found.jac, np.where(zero, 0, slope))
    assert f"; {zero.sum()} of 30 elements with an L1 term are exactly zero" in found.message
    assert "subgradient's largest element" in found.message


@pytest.mark.parametrize("start", [1e-30, -1e-30, 4.0])
def test_elements_cross_their_reference(start: float) -> None:
    """An iteration that moves all elements by next to nothing, to their reference, is no convergence."""
    goal = np.array([-3.0, 2.0, -1.0, 0.5])
    found = minimize(regularized(lambda x: (0.5 * ((x - goal) ** 2).sum(), x - goal), L1(0.75)), np.full(4, start))
    assert np.allclose(found.x, [-2.25, 1.25, -0.25, 0], atol=1e-6) and found.x[3] == 0
    assert found.at_reference == 1 and found.success


def test_steps_beyond_length_one_end_at_references_too() -> None:
    """Rounding would leave an element next to its reference, where no gradient says that it should be there."""
    reference = np.array([0.1, 1 / 3, -7.3, 1e5 / 7])

    def slope(x: Vector) -> tuple[float, Vector]:
        return 1e-3 * float((x - reference).sum()), np.full(4, 1e-3)

    for shift in (0.3, 11.7, 1e4 / 3):
        found = minimize(regularized(slope, L1(1.0, reference=reference)), reference + shift)
        assert np.array_equal(found.x, reference) and found.fun == 0
        assert "4 of 4 elements with an L1 term are exactly at its reference" in found.message


def test_fixed_elements_count_in_the_value_alone() -> None:
    function = LeastSquares(0)
    fixed, start = np.arange(60) % 6 == 0, np.where(np.arange(60) % 6, 0.0, 0.5)
    found = minimize(regularized(function, L1(function.weight)), start, fixed=fixed, options=TIGHT)
    assert np.array_equal(found.x[fixed], start[fixed])
    assert found.fun == pytest.approx(total(function, L1(function.weight), found.x), rel=1e-14)
    assert abs(found.jac[~fixed]).max() <= 1e-6 and not found.jac[fixed].any()


def test_trees_and_names() -> None:
    function = LeastSquares(1)
    weight, plain = function.weight, np.zeros(60)
    expected = minimize(regularized(function, L1({"x": weight}, mask=np.arange(60) < 40)), plain, options=TIGHT)
    assert (expected.x[:40] == 0).any() and (expected.x[40:] != 0).all()

    def of_tree(p: dict[str, Any]) -> tuple[float, Any]:
        value, gradient = function(np.concatenate([p["a"][0].reshape(-1), p["b"]]))
        return value, {"a": [gradient[:40].reshape(4, 10)], "b": gradient[40:]}

    tree = minimize(
        regularized(of_tree, L1({"a": [weight]})), {"a": [np.zeros((4, 10))], "b": np.zeros(20)}, options=TIGHT
    )
    assert np.array_equal(tree.x["a"][0].reshape(-1), expected.x[:40]) and np.array_equal(tree.x["b"], expected.x[40:])
    named = mpishard.FlatParameters.of({"a": np.zeros((4, 10)), "b": np.zeros(20)})
    fun = regularized(lambda p: function(p.flat), L1({"a": np.full((4, 10), weight)}))
    minimize(fun, named, options=TIGHT)
    assert np.array_equal(named.flat, expected.x)


@pytest.mark.full  # compiles much that no other test here needs
def test_zeros_in_float32_are_those_in_float64() -> None:
    function = LeastSquares(1)
    fun = regularized(function, L1(function.weight))
    narrow, wide = minimize(fun, np.zeros(60, np.float32)), minimize(fun, np.zeros(60), options=TIGHT)
    assert narrow.x.dtype == np.float32 and np.array_equal(narrow.x == 0, wide.x == 0)


def test_smooth_terms_beside_it_and_functions_with_terms_twice() -> None:
    function = LeastSquares(2)
    smooth, sparse = Tikhonov(weight=3.0, order=0), L1(function.weight)
    both = minimize(regularized(function, [smooth, sparse]), function.zeros, options=TIGHT)
    for twice in (
        regularized(regularized(function, sparse), smooth),
        regularized(regularized(function, smooth), sparse),
    ):
        assert np.array_equal(minimize(twice, function.zeros, options=TIGHT).x, both.x)
    assert both.fun == pytest.approx(total(function, sparse, both.x) + smooth.value_and_gradient(both.x)[0], rel=1e-14)


def test_a_loop_of_ones_own_and_its_states() -> None:
    """The method has the terms; a state is of its weights and references."""
    function = LeastSquares(3)
    expected = minimize(regularized(function, L1(function.weight, reference=0.1)), function.zeros)

    def begun(weight: float, reference: float | None) -> mpishard.ReverseCommunication:
        return mpishard.ReverseCommunication(LBFGSB(l1=(weight, reference)), function.zeros)

    optimizer = begun(function.weight, 0.1)
    while (request := optimizer.ask()) is not None:
        optimizer.tell(*function(request.x))
        if optimizer.progress.evaluations == 7:
            saved = optimizer.serialize()
            optimizer = begun(function.weight, 0.1)
            optimizer.deserialize(saved)
    assert np.array_equal(optimizer.result.x, expected.x) and optimizer.result.nfev == expected.nfev
    for other in (
        begun(function.weight, None),
        begun(1.0, 0.1),
        mpishard.ReverseCommunication(LBFGSB(), function.zeros),
    ):
        with pytest.raises(ValueError, match="L1 terms"):
            other.deserialize(saved)


# The same bits from metadata at every call, on any ranks, and in device memory.


def limits(size: int, everything: bool) -> Limits:
    """Terms around references; and bounds, a fixed element and scales."""
    weights = np.where(np.arange(size) % 5 == 4, 0, np.linspace(0.5, 30, size))
    terms = {"l1_weights": weights, "l1_reference": np.arange(size) % 3 / 4}
    if not everything:
        return Limits(**terms)
    sides = [np.linspace(*ends, size) for ends in ((-1.3, 0.2), (0.8, 2.0), (1, 2), (0.5, 2))]
    return Limits(*sides[:2], fixed=np.arange(size) == 3, weights=sides[2], scaling=sides[3], **terms)


@pytest.mark.parametrize("everything", [False, True])
def test_it_goes_on_from_its_metadata_at_every_call(everything: bool) -> None:
    found = check_restarts(LBFGSB(history=4, maxiter=20), rosenbrock(12), limits(12, everything))
    assert found.progress.iterations > 8 and 0 < found.at_reference.here < 12


@pytest.mark.parametrize("everything", [False, True])
def test_same_bits_on_any_ranks(everything: bool) -> None:
    found, all_reduces = check_ranks(
        LBFGSB(history=4, maxiter=20), rosenbrock(17), limits(17, everything), [0, 0, 1, 2, 7, 17, 17]
    )
    # One more an evaluation than with bounds alone, for the value of the terms.
    assert all_reduces <= 3 * found.progress.evaluations + 10 * (found.progress.iterations + 1)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.pairs(1)
def test_same_bits_on_a_device(device: Device, everything: bool) -> None:
    check_device(device, LBFGSB(history=4, maxiter=12), rosenbrock(17), limits(17, everything))


def test_weights_of_zero_are_no_terms() -> None:
    problem = rosenbrock(12)
    terms = Limits(l1_weights=np.zeros(12), l1_reference=np.ones(12))
    found = minimized(LBFGSB(maxiter=15), problem, terms)
    bounds = Limits(lower=np.full(12, -np.inf), upper=np.full(12, np.inf))
    assert np.array_equal(found.point, minimized(LBFGSB(maxiter=15), problem, bounds).point)
    assert found.at_reference == (0, 0, False)


def test_values_that_are_not_finite_end_it_at_the_best_point() -> None:
    def wall(x: Vector) -> tuple[float, Vector]:
        return (-float(np.log(x).sum()), -1 / x) if (x > 0).all() else (np.nan, x)

    found = minimized(
        LBFGSB(gtol=1e-9, ftol=0), Problem(wall, None, np.full(3, 5.0)), Limits(l1_weights=np.full(3, 2.0))
    )
    assert found.stop_reason == "gradient" and np.allclose(found.point, 0.5, rtol=1e-8)


# What is refused, and what is checked.


def squares(x: Vector) -> tuple[float, Vector]:
    return float(x @ x), 2 * x


ZEROS = np.zeros(6)


def run(term: L1 | list[L1], x0: Any = ZEROS, **given: Any) -> Any:
    return minimize(regularized(squares, term), x0, **given)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: L1(-1.0), "L1: weight=-1.0 .*at least 0"),
        (lambda: L1(np.nan), "L1: weight=nan"),
        (lambda: L1(None), "L1: weight=None"),
        (lambda: L1(1.0, reference=np.inf), "L1: reference=inf"),
        (lambda: run(L1(np.ones(5))), r"L1: the weights .*\(5,\).*\(6,\)"),
        (lambda: run(L1(np.ones((6, 1)))), r"L1: the weights .*\(6, 1\).*\(6,\)"),
        (lambda: run(L1(1.0, reference=np.ones(7))), r"L1: the references .*\(7,\).*\(6,\)"),
        (lambda: run(L1(1.0, mask=np.ones(4, bool))), r"L1: the elements of mask .*\(4,\).*\(6,\)"),
        (lambda: run(L1(1.0, mask=np.full(6, 0.5))), "L1: the elements of mask must be True or False"),
        (lambda: run(L1(1.0, mask=np.full(6, np.nan))), "L1: the elements of mask contain NaN, at 0"),
        (lambda: run(L1([1.0, 1, 1, -2, 1, 1])), r"L1: the weight of element \(3\) of 'x' is -2"),
        (lambda: run(L1([1.0, 1, 1, np.inf, 1, 1])), r"L1: the weight of element \(3\) of 'x' is inf"),
        (lambda: run(L1(1.0, reference=[0, np.inf, 0, 0, 0, 0])), r"the reference of element \(1\) of 'x' is inf"),
        (lambda: run(L1({"y": 1.0})), "L1: the weights.*'y'"),
        (lambda: run([L1(1.0, reference=0.5), L1(np.arange(6))]), r"two references of element \(1\) .*0.5 and 0"),
        (lambda: run(L1(1.0), ZEROS + 1j), "L1 is for real numbers"),
        (lambda: run(L1(1.0), method="CG"), "'CG' takes no L1 terms; method='L-BFGS-B'"),
        (lambda: run(L1(1.0), method=mpishard.LBFGS()), "LBFGS takes no L1 terms; method='L-BFGS-B'"),
        (lambda: run(L1(1.0), method="trust-ncg", hessp=lambda x, d: 2 * d), "'trust-ncg' takes no L1 terms"),
        (lambda: run(L1(1.0), method=LBFGSB(l1=(1.0, None))), "both have L1 terms"),
        (lambda: run(L1(1.0), inner_product=mpishard.RieszMap(np.copy, np.copy)), "L1 terms takes no RieszMap"),
        (lambda: run(L1(1.0), preconditioner=np.copy), "L1 terms takes no function as preconditioner"),
        (lambda: run(L1(1.0), options={"l1": (1.0, 0.0)}), "no option 'l1'"),
        (lambda: minimize(squares, ZEROS, method=LBFGSB(l1=1.0)), r"l1=1.0 .*pair \(weight, reference\)"),
        (lambda: minimize(squares, ZEROS, method=LBFGSB(l1=(None, 0.0))), "l1=.*pair"),
        (lambda: minimize(squares, ZEROS, method=LBFGSB(l1=(-1.0, None))), r"l1: the weight of element \(0\) of 'x'"),
        (lambda: regularized(squares, L1(1.0))(ZEROS), "L1 term.*mpishard.minimize.*LBFGSB.l1="),
        (lambda: regularized(squares, L1(1.0))(ZEROS, np.arange(3), ZEROS), "L1 term.*mpishard.minimize"),
        (lambda: mpishard.least_squares(regularized(squares, L1(1.0)), ZEROS), "regularized.*minimize"),
        (
            lambda: mpishard.augmented_lagrangian(regularized(squares, L1(1.0)), ZEROS, squares, squares, method="CG"),
            "'CG' takes no L1 terms",
        ),
        (lambda: regularized(squares, [L1(1.0), 3]), "3"),
    ],
)
def test_what_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_arrays_without_dimensions_are_numbers() -> None:
    term = L1(np.array(1.5), reference=np.array(0.5))
    assert term == L1(1.5, reference=0.5) and type(term.weight) is type(term.reference) is float
    assert Tikhonov(weight=np.array(1.5)).weight == 1.5
    with pytest.raises(TypeError, match=r"L1: weight=1j"):
        L1(np.array(1j))


def test_the_rest_of_a_function_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check = check_gradient(regularized(squares, L1(100.0)), ZEROS + 1)
    assert check.passed and "without the L1 terms" in check.verdict and check.value == 6
    assert "without the L1 terms" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Tikhonov, lambda **given: SmoothedTotalVariation(epsilon=0.1, **given)])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"weight": np.ones((4, 1))}, r"weight .*\(4, 1\).*\(4, 5\)"),
        ({"reference": np.ones(5)}, r"reference .*\(5,\).*\(4, 5\)"),
        ({"reference": np.full((4, 5), np.inf)}, "reference is from inf to inf"),
        ({"reference": np.nan}, "reference is from nan to nan"),
        ({"mask": np.ones((5, 4), bool)}, r"mask .*\(5, 4\).*\(4, 5\)"),
        ({"mask": np.full((4, 5), 2)}, "mask is from 2 to 2"),
        ({"mask": np.full((4, 5), 0.5)}, "mask is from 0.5 to 0.5.*weight"),
        ({"shape": (3, 5)}, r"shape=\(3, 5\) has 15 cells.* 20"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_arrays_of_other_terms_are_checked(kind: Any, given: dict[str, Any], words: str) -> None:
    for call in ("value_and_gradient", "product"):
        with pytest.raises(ValueError, match=words):
            getattr(kind(**given), call)(*[np.zeros((4, 5))] * (1 + (call == "product")))


def test_references_may_be_numbers_or_flat() -> None:
    x = np.arange(20.0).reshape(4, 5)
    value, gradient = Tikhonov(order=0, reference=2.0).value_and_gradient(x)
    assert value == 0.5 * ((x - 2) ** 2).sum() and np.array_equal(gradient, x - 2)
    flat = Tikhonov(order=0, reference=(x - 1).reshape(-1), weight=np.ones(20).tolist()).value_and_gradient(x)
    assert flat[0] == 10 and np.array_equal(flat[1], np.ones((4, 5)))
