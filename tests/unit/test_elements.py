"""What a user says about elements: numbers, arrays, and mappings by tensor name, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers.elements import element_name, whole_bounds, whole_elements

SPECS = (ParameterSpec("a", (2, 3)), ParameterSpec("b", (4,)))
REAL = np.dtype(np.float64)
INF = np.inf


def test_one_number_is_for_all_elements():
    lower, upper = whole_bounds((0, None), SPECS, REAL)
    np.testing.assert_array_equal(lower, np.zeros(10))
    assert upper is None


def test_a_flat_array_is_in_the_order_of_the_tensors():
    given = np.arange(10.0)
    lower, upper = whole_bounds((given, given + 1), SPECS, REAL)
    np.testing.assert_array_equal(lower, given)
    np.testing.assert_array_equal(upper, given + 1)


def test_tensors_that_are_not_named_have_no_bounds():
    lower, upper = whole_bounds({"b": (0, [1, 2, 3, 4])}, SPECS, REAL)
    np.testing.assert_array_equal(lower, [-INF] * 6 + [0] * 4)
    np.testing.assert_array_equal(upper, [INF] * 6 + [1, 2, 3, 4])


def test_an_array_of_a_tensors_shape():
    mask = np.array([[True, False, False], [False, False, True]])
    fixed = whole_elements("fixed", {"a": mask}, SPECS, np.dtype(bool), missing=False)
    np.testing.assert_array_equal(np.flatnonzero(fixed), [0, 5])


def test_an_element_is_named_by_its_tensor():
    assert element_name(5, SPECS) == "element (1, 2) of 'a'"
    assert element_name(6, SPECS) == "element (0) of 'b'"


WRONG = {
    "crossed": (lambda: whole_bounds((1.0, {"b": 0.5}), SPECS, REAL), r"the bounds of 4 elements cross: element \(0\)"),
    "infinite": (lambda: whole_bounds((INF, INF), SPECS, REAL), "10 elements cross: .* lower bound inf and the upper"),
    "no lower": (lambda: whole_bounds(({"b": INF}, None), SPECS, REAL), r"4 elements cross: element \(0\) of 'b'"),
    "below": (lambda: whole_bounds((None, -INF), SPECS, REAL), "10 elements cross"),
    "nan": (lambda: whole_bounds((np.full(10, np.nan), None), SPECS, REAL), "contain NaN"),
    "no pair": (lambda: whole_bounds((1.0,), SPECS, REAL), "must be a pair"),
    "no pair by name": (lambda: whole_bounds({"a": 1.0}, SPECS, REAL), "bounds of 'a' must be a pair"),
    "size": (lambda: whole_bounds((np.zeros(9), None), SPECS, REAL), r"have the shape \(9,\)"),
    "shape": (lambda: whole_bounds({"a": (np.zeros((3, 2)), 1)}, SPECS, REAL), r"have the shape \(3, 2\)"),
    "tensor": (lambda: whole_bounds({"c": (0, 1)}, SPECS, REAL), "there is no tensor 'c'; there are a, b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    attempt, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError, match="lower bounds must be numbers"):
        whole_bounds(("low", None), SPECS, REAL)
