"""Learning-rate schedules: values at the steps that matter, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mpishard.optim.lr_schedules import Schedule, constant, cosine, inverse_square_root, linear, warmup

ALL = [
    constant(0.1),
    constant(0.1, warmup=5),
    warmup(0.1, 5),
    linear(0.1, 20),
    linear(0.1, 20, warmup=5, floor=0.01),
    cosine(0.1, 20),
    cosine(0.1, 20, warmup=5, floor=0.01),
    inverse_square_root(0.1, warmup=5),
    inverse_square_root(0.1, warmup=5, floor=0.06),
]
each = pytest.mark.parametrize("schedule", ALL, ids=repr)


@each
def test_rises_to_its_peak_and_never_below_its_floor_again(schedule: Schedule) -> None:
    rates = [schedule(step) for step in range(1, 41)]
    top = max(1, schedule.warmup)
    assert rates[top - 1] == schedule.peak == max(rates)
    for step in range(1, schedule.warmup):
        assert rates[step - 1] == pytest.approx(schedule.peak * step / schedule.warmup, rel=1e-15)
    falling = rates[top - 1 :]
    assert all(later <= earlier for earlier, later in zip(falling[:-1], falling[1:], strict=True))
    assert min(falling) >= schedule.floor
    if schedule.steps is not None:
        assert set(rates[schedule.steps - 1 :]) == {schedule.floor}


def test_linear_and_cosine_half_way() -> None:
    assert linear(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 21, floor=0.1)(11) == pytest.approx(0.2, rel=1e-15)
    assert cosine(0.3, 25, warmup=5, floor=0.1)(10) == pytest.approx(0.1 + 0.2 * (1 + math.cos(math.pi / 4)) / 2)


def test_inverse_square_root_halves_at_four_times_the_warmup() -> None:
    schedule = inverse_square_root(0.4, warmup=100)
    assert schedule(400) == pytest.approx(0.2, rel=1e-15)
    assert schedule(10**12) == pytest.approx(0.4e-5, rel=1e-12)


@each
def test_is_a_value_with_a_repr_that_makes_it(schedule: Schedule) -> None:
    again = eval(repr(schedule))
    assert again == schedule and hash(again) == hash(schedule)
    assert [again(step) for step in range(1, 40)] == [schedule(step) for step in range(1, 40)]


def test_repr_is_short() -> None:
    assert repr(cosine(1e-3, 1000, warmup=100)) == "cosine(peak=0.001, steps=1000, warmup=100)"
    assert repr(warmup(1, 10)) == "warmup(peak=1.0, steps=10)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constant(-0.1), "constant: peak=-0.1 must be a finite number of at least 0"),
        (lambda: constant(math.inf), "peak=inf must be a finite number"),
        (lambda: cosine("0.1", 10), "peak='0.1' must be a finite number of at least 0"),  # type: ignore[arg-type]
        (lambda: cosine(0.1, 10, floor=0.2), "cosine: floor=0.2 is above peak=0.1"),
        (lambda: cosine(0.1, 10, floor=-0.2), "floor=-0.2 must be a finite number of at least 0"),
        (lambda: cosine(0.1, 10, warmup=10), "steps=10 must be above warmup=10"),
        (lambda: linear(0.1, 0), "steps=0 must be above warmup=0"),
        (lambda: linear(0.1, 10.5), "steps=10.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: linear(0.1, 10, warmup=-1), "warmup=-1 must be a whole number of at least 0"),
        (lambda: warmup(0.1, 0), "warmup: steps=0 must be a whole number of at least 1"),
        (lambda: inverse_square_root(0.1, warmup=0), "warmup=0 must be a whole number of at least 1"),
    ],
)
def test_nonsense_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
