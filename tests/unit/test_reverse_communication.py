"""Minimisation by reverse communication on one process: requests, answers, and states that go on."""

from __future__ import annotations

import numpy as np
import pytest
from descent import Descent, bowl, curvature, rosenbrock

from mpishard import FlatParameters, ReverseCommunication, minimize


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
