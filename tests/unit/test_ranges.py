"""One launch for many ranges of device arrays: the bits of one call for each range of host arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import cuda_on_host
import numpy as np
import pytest
import standin
from waits import launches

from mpishard.backend import array as arrays
from mpishard.backend import elementwise as formula_source
from mpishard.backend.array import Kernel, elementwise, largest
from mpishard.backend.ranges import DeviceTable, Range, Ranges
from mpishard.minimizers import bounds
from mpishard.minimizers import formulas as lbfgs_formulas
from mpishard.optim import formulas


@elementwise
def taken_names(table, T, size, /, ranges, double, count, tops):
    """Names that CUDA and the function around the formula have other uses for."""
    own = table * double + T / tops
    own = own if own < size else size - count * ranges
    T = own + 1e-3
    size = sqrt(abs(T)) - min(own, size)
    return T, size


@elementwise
def taken_names_with_largest(table, T, /, count, tops):
    top0 = table * count
    T = T + tops * top0
    return T, largest(top0), largest(T)


pytestmark = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
RULES = [taken_names, *(kernel for kernel in vars(formulas).values() if isinstance(kernel, Kernel))]
OTHERS = [taken_names_with_largest, *vars(bounds).values(), *vars(lbfgs_formulas).values()]
WITH_LARGEST = [each for each in OTHERS if isinstance(each, Kernel) and each.largest]
each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])
# More than a chunk; odd; one element; none; a whole number of packs.
SIZES = [9001, 7, 1, 0, 64]
# With gaps and odd starts, nothing at the begin, in the middle and at the end, and three sets of scalars.
PARTS = [Range(0, 5, 5, 2), Range(0, 8, 4104, 0), Range(0, 4104, 4105, 1), Range(0, 4107, 9001, 2), Range(1, 0, 7, 1)]
PARTS += [Range(1, 7, 7, 0), Range(2, 0, 1, 2), Range(3, 0, 0, 0), Range(4, 0, 64, 0), Range(4, 64, 64, 1)]


def rows_of(kernel: Kernel, dtype: Any, seed: int = 0) -> list[list[np.ndarray]]:
    """Positive and negative numbers of several sizes; sums of squares are positive."""
    rng = np.random.default_rng(seed)
    rows = []
    for size in SIZES:
        values = np.exp(rng.uniform(-10, 5, (len(kernel.arrays), size))) * rng.choice([-1, 1], (1, size))
        for name, row in zip(kernel.arrays, values, strict=True):
            if name in ("v", "top", "total"):
                np.abs(row, out=row)
        rows.append(list(values.astype(dtype)))
    return rows


def scalars_of(kernel: Kernel, seed: int = 1) -> list[tuple[float, ...]]:
    return [tuple(each) for each in np.random.default_rng(seed).uniform(0.1, 1, (3, len(kernel.scalars))).tolist()]


def unaligned(host: np.ndarray, places: int) -> Any:
    """A device array that begins so many elements behind its memory."""
    device = standin.empty(host.size + places, host.dtype)[places:]
    if host.size:
        arrays.copy_to_device(host, device)
    return device


def assert_same(device_rows: Sequence[Sequence[Any]], rows: Sequence[Sequence[np.ndarray]]) -> None:
    for device_row, row in zip(device_rows, rows, strict=True):
        for device, host in zip(device_row, row, strict=True):
            assert arrays.to_host(device).tobytes() == host.tobytes()


@each_dtype
@pytest.mark.parametrize("kernel", RULES, ids=lambda kernel: kernel.name)
def test_the_bits_are_those_of_calls_on_the_host(kernel: Kernel, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, scalars, ranges = rows_of(kernel, dtype), scalars_of(kernel), Ranges(PARTS)
    device_rows = [[standin.on_device(array) for array in row] for row in rows]
    before = [[array.copy() for array in row] for row in rows]
    for row, start, stop, choice in PARTS:
        kernel(*(array[start:stop] for array in rows[row]), *scalars[choice])
    names = launches(monkeypatch)
    kernel.over_ranges(device_rows, ranges, scalars)
    assert names == [f"{kernel.name}_over_ranges"]
    assert_same(device_rows, rows)
    assert not np.array_equal(rows[0][kernel.arrays.index(kernel.written[0])], before[0][0])
    kernel.over_ranges(before, ranges, scalars)
    assert_same(rows, before)


@each_dtype
@pytest.mark.parametrize("backwards", ["", "1"])
def test_starts_anywhere(dtype: Any, backwards: str, environ: Callable[..., None]) -> None:
    """Arrays of a row that are a different number of elements away from a multiple of 16 bytes."""
    environ(MPISHARD_CUDA_BACKWARDS=backwards or None)
    kernel = formulas.adam
    rows, scalars = rows_of(kernel, dtype), scalars_of(kernel)
    device_rows = [[unaligned(array, place) for place, array in enumerate(row)] for row in rows]
    kernel.over_ranges(device_rows, Ranges(PARTS), scalars)
    kernel.over_ranges(rows, Ranges(PARTS), scalars)
    assert_same(device_rows, rows)


def test_what_lies_between_ranges_stays() -> None:
    rows = [[standin.on_device(np.ones(100)), standin.on_device(np.ones(100))]]
    formulas.moving_average.over_ranges(rows, Ranges([Range(0, 10, 20), Range(0, 31, 32)]), [(0.0, 5.0)])
    expected = np.ones(100)
    expected[10:20] = expected[31] = 5
    assert np.array_equal(arrays.to_host(rows[0][0]), expected)


def test_a_table_travels_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = standin.StandIn.start_to_device
    monkeypatch.setattr(
        standin.StandIn, "start_to_device", lambda self, *given: (copies.append(given[0].dtype), copy(self, *given))
    )
    monkeypatch.setattr(standin.StandIn, "to_device", None)  # a copy that is waited for
    kernel, ranges = formulas.moving_average, Ranges([Range(0, 0, 8), Range(1, 0, 8)])
    rows = [[standin.zeros(8), standin.zeros(8)] for _ in range(2)]
    for row in rows:
        row[1].fill(1)
    for step, expected in enumerate([[np.int64, np.float64], [np.float64], [], [np.int64], []]):
        if step == 3:
            rows[1][0] = standin.zeros(8)
        copies.clear()
        kernel.over_ranges(rows, ranges, [(1.0, float(min(step, 1)))])
        assert copies == expected, step
    # Nobody has waited: each launch has read the numbers of its own step.
    assert np.array_equal(arrays.to_host(rows[0][0]), np.full(8, 4.0))
    assert np.array_equal(arrays.to_host(rows[1][0]), np.full(8, 2.0))


def test_a_table_of_another_stream_is_copied_again() -> None:
    like, table = standin.zeros(1), DeviceTable()
    backend = arrays.backend_of(like)
    first = table.of(np.arange(3), like)
    other = backend.new_stream(like)
    with other:
        second = table.of(np.arange(3), like)
        assert np.array_equal(arrays.to_host(second), [0, 1, 2])
    assert second is not first and np.array_equal(arrays.to_host(first), [0, 1, 2])


def test_staging_memory_is_used_again_when_the_copy_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    like, table, plain = standin.zeros(1), DeviceTable(), standin.StandIn.pinned_empty
    made: list[int] = []

    def pinned_empty(backend: standin.StandIn, size: int, dtype: Any, like: Any) -> np.ndarray:
        made.append(size)
        return plain(backend, size, dtype, like)

    monkeypatch.setattr(standin.StandIn, "pinned_empty", pinned_empty)
    found = [table.of(np.full(4, number), like) for number in range(5)]
    assert [arrays.to_host(each).tolist() for each in found] == [[number] * 4 for number in range(5)]
    before = len(made)
    table.of(np.full(4, 9), like)
    assert len(made) == before
    arrays.ready(like)
    table.of(np.full(2, 9), like)
    table.of(np.full(4, 9), like)
    assert made[before:] == [2, 4]  # memory of another size is not kept


@each_dtype
@pytest.mark.parametrize("size", [1, 31, 1000, 2500])
@pytest.mark.parametrize("kernel", WITH_LARGEST, ids=lambda kernel: kernel.name)
def test_largest_values_besides_the_elements(
    kernel: Kernel, size: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 blocks of 256 threads: of 2500 elements each thread takes 2 or 3, of 1000 at most one.
    monkeypatch.setattr(formula_source, "_MOST_BLOCKS", 4)
    rng = np.random.default_rng(size)
    host = list(rng.standard_normal((len(kernel.arrays), size)).astype(dtype))
    scalars = rng.uniform(0.1, 1, len(kernel.scalars)).tolist()
    if "free" in kernel.written:  # which L-BFGS-B gives as a mask
        free = kernel.arrays.index("free")
        host[free] = host[free] > 0
    for place in (None, 0, size - 1):
        if place is not None:
            host[-1][place] = np.nan
        device = [standin.on_device(array) for array in host]
        expected = kernel(*host, *scalars)
        assert kernel.on_cupy(None, device, scalars) == expected
        for one, other in zip(device, host, strict=True):
            numbers = ~np.isnan(other)
            assert np.array_equal(arrays.to_host(one)[numbers], other[numbers])


def test_wrong_arguments() -> None:
    ranges = Ranges([Range(0, 0, 3)])
    row = [standin.zeros(3), standin.zeros(3)]
    with pytest.raises(TypeError, match="arrays a, p, got 1"):
        formulas.moving_average.over_ranges([row[:1]], ranges, [(1.0, 1.0)])
    with pytest.raises(TypeError, match="takes the scalars keep, rest"):
        formulas.moving_average.over_ranges([row], ranges, [(1.0,)])
    with pytest.raises(TypeError, match="must be of one dtype"):
        formulas.moving_average.over_ranges([row, [standin.zeros(3, np.float32)] * 2], ranges, [(1.0, 1.0)])
    with pytest.raises(TypeError, match="arguments a, p, keep, rest, got 3"):
        formulas.moving_average.over_ranges([[np.zeros(3)]], ranges, [(1.0, 1.0)])
    with pytest.raises(ValueError, match="flat, contiguous, of one size"):
        formulas.moving_average.over_ranges([[row[0], standin.zeros(4)]], ranges, [(1.0, 1.0)])
    with pytest.raises(AssertionError, match="ends behind its arrays"):
        formulas.moving_average.over_ranges([row], Ranges([Range(0, 0, 4)]), [(1.0, 1.0)])
    with pytest.raises(TypeError, match="returns largest values"):
        bounds.move_base.over_ranges([], ranges, [])
