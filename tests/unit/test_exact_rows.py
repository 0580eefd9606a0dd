"""Products of rows with several vectors in one pass are those of each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.backend.exact_changes import changed_words
from mpishard.backend.exact_dot import normalized, row_dot_words
from mpishard.backend.exact_rows import Changes, Factor, words_with

SIZE = 10_007


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [(0.9, 0.9, 0.01, 0.0), (0.01, 0.9, 0.9, 0.9), (0.5,), (0.01,)])
def test_each_vector_with_each_row(device, dtype, parts):
    random = np.random.default_rng(len(parts))
    rows = random.standard_normal((5, SIZE)).astype(dtype)
    free, before = random.random((2, SIZE)) < 0.7
    before[5000:] = free[5000:]
    spans, indices = [(3, 5000), (5100, 9999)], [4, 0, 2]
    factors = []
    for number, part in enumerate(parts):
        vector = np.where(random.random(SIZE) < part, random.standard_normal(SIZE), 0).astype(dtype)
        factors.append(Factor(vector, [32.0 * 2**k for k in range(3)], (None, True, False)[number % 3]))
    pairs = [(4, 0), (2, 0), (4, 4)]
    changes = Changes(before, pairs, [40.0, 50.0, 60.0])
    words, changed = words_with(rows, indices, factors, spans, free, changes)
    for found, (vector, tops, of_free) in zip(words, factors, strict=True):
        counts = vector if of_free is None else np.where(free == of_free, vector, 0).astype(dtype)
        assert np.array_equal(found, row_dot_words(rows, indices, counts, tops, spans))
    assert np.array_equal(normalized(changed), changed_words(rows, pairs, changes.tops, before, free, spans))
    far = [Factor(device.put(vector), tops, of_free) for vector, tops, of_free in factors]
    there = changes._replace(before=device.put(before))
    there = words_with(device.put(rows), indices, far, spans, device.put(free), there)
    assert np.array_equal(there[0], words) and np.array_equal(normalized(there[1]), normalized(changed))


def test_without_rows_or_elements():
    rows = np.ones((2, 5))
    factor = Factor(rows[0].copy(), [], None)
    assert words_with(rows, [], [factor], [(0, 5)])[0].shape == (1, 0, 2)
    assert not words_with(rows, [0], [factor._replace(tops=[1.0])], [])[0].any()
