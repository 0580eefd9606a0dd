"""Products of rows with several vectors in one pass are those of each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.backend.exact import approximate_values, row_dot_words, values
from mpishard.backend.exact_rows import Factor, sorted_words, words_with

SIZE = 10_007


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [(0.9, 0.9, 0.01, 0.0), (0.01, 0.9, 0.9, 0.9), (0.5,), (0.01,)])
def test_each_vector_with_each_row(device, dtype, parts):
    random = np.random.default_rng(len(parts))
    rows = random.standard_normal((5, SIZE)).astype(dtype)
    free = random.random(SIZE) < 0.7
    spans, indices = [(3, 5000), (5100, 9999)], [4, 0, 2]
    factors = []
    for number, part in enumerate(parts):
        vector = np.where(random.random(SIZE) < part, random.standard_normal(SIZE), 0).astype(dtype)
        factors.append(Factor(vector, [32.0 * 2**k for k in range(3)], (None, True, False)[number % 3]))
    words = words_with(rows, indices, factors, spans, free)
    for found, (vector, tops, of_free) in zip(words, factors, strict=True):
        counts = vector if of_free is None else np.where(free == of_free, vector, 0).astype(dtype)
        assert np.array_equal(found, row_dot_words(rows, indices, counts, tops, spans))
    far = [Factor(device.put(vector), tops, of_free) for vector, tops, of_free in factors]
    assert np.array_equal(words_with(device.put(rows), indices, far, spans, device.put(free)), words)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("starts", [[0, 4, 4, 5003, 9000], [7, 7, 8], [3, 3], [0, 0, 0]])
def test_each_group_of_elements(device, dtype, starts):
    random = np.random.default_rng(len(starts))
    rows, vectors = random.standard_normal((4, SIZE)).astype(dtype), random.standard_normal((2, SIZE))
    index = random.permutation(SIZE)[: starts[-1]].astype(np.int64)
    indices, tops = [3, 1], [[32.0, 64.0], [40.0, 0.0]]
    factors = [vector.astype(dtype).astype(np.float64)[index] for vector in vectors]
    words = sorted_words(rows, indices, index, np.array(starts), factors, tops)
    assert words.shape == (len(starts) - 1, 2, 2, 2)
    for group, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        there = np.isin(np.arange(SIZE), index[start:stop])
        for found, vector, each in zip(words[group], vectors, tops, strict=True):
            counts = np.where(there, vector, 0).astype(dtype)
            expected = row_dot_words(rows, indices, counts, each, [(0, SIZE)])
            assert np.array_equal(found, expected)
            np.testing.assert_allclose(approximate_values(found, each), values(found, each), rtol=1e-15)
    far = [device.put(factor) for factor in factors]
    assert np.array_equal(
        sorted_words(device.put(rows), indices, device.put(index), np.array(starts), far, tops), words
    )


def test_without_rows_or_elements():
    rows = np.ones((2, 5))
    factor = Factor(rows[0].copy(), [], None)
    assert words_with(rows, [], [factor], [(0, 5)]).shape == (1, 0, 2)
    assert not words_with(rows, [0], [factor._replace(tops=[1.0])], []).any()
