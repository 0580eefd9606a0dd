"""python benchmarks/exact_dot.py

Exact dot products of the rows of a history with one vector, sums of these rows, and their Gram matrices with a tenth of
the elements fixed and when 1 % change sides; in gigabytes of rows a second on one core, against `numpy.dot` for each
product (of all elements) and additions of multiples by NumPy, in turn.  The ratio is NumPy's time over mpishard's:
above 1, mpishard is faster.
"""

from __future__ import annotations

import argparse
import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # read when NumPy is imported

import statistics
import time
from collections.abc import Callable

import numpy as np

from mpishard.backend.exact import combine, row_dot_words
from mpishard.backend.exact_rows import changed_words


def compare(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of `ours`, and the median of the paired ratios of both times."""
    ours()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        times.append((middle - start, time.perf_counter() - middle))
    return statistics.median(own for own, _ in times), statistics.median(other / own for own, other in times)


def cases(size: int, pairs: int, dtype: type) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By what is computed of rows of a history: mpishard's way, and NumPy's."""
    random, count, spans = np.random.default_rng(0), 2 * pairs, [(0, size)]
    rows = random.standard_normal((count, size)).astype(dtype)
    vector, out = rows[0].copy(), np.empty(size, dtype)
    free = random.random(size) < 0.9
    other = free.copy()
    other[random.integers(0, size, size // 100)] ^= True
    # S'Y on and above the diagonal, and Y'Y.
    products = [(i, pairs + j) for j in range(pairs) for i in (*range(j + 1), *range(pairs, pairs + j + 1))]
    tops = [64.0] * len(products)

    def sum_by_numpy() -> None:
        np.copyto(out, vector)
        for row in rows:
            np.add(out, 0.1 * row, out=out)

    def products_by_numpy() -> None:
        for i, j in products:
            rows[i].dot(rows[j])

    return {
        "dots": (
            lambda: row_dot_words(rows, range(count), vector, tops[:count], spans),
            lambda: [row.dot(vector) for row in rows],
        ),
        "sum of rows": (lambda: combine(rows, range(count), [0.1] * count, vector, 1.0, out), sum_by_numpy),
        "Gram matrices": (lambda: changed_words(rows, products, tops, None, free, spans), products_by_numpy),
        "1 % change": (lambda: changed_words(rows, products, tops, free, other, spans), products_by_numpy),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2_000_000, help="elements of a row")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of the history, of two rows each")
    parser.add_argument("--repeats", type=int, default=11, help="calls of each, in turn")
    arguments = parser.parse_args()
    count = 2 * arguments.pairs
    print(f"{count} rows of {arguments.size:,d} values, one core, medians of {arguments.repeats}")
    for dtype in (np.float64, np.float32):
        nbytes = count * arguments.size * np.dtype(dtype).itemsize
        for name, (ours, theirs) in cases(arguments.size, arguments.pairs, dtype).items():
            seconds, ratio = compare(ours, theirs, arguments.repeats)
            speed = nbytes / seconds / 1e9
            print(f"{dtype.__name__} {name:15} {seconds * 1e3:8.2f} ms {speed:7.1f} GB/s   ratio {ratio:6.2f}")


if __name__ == "__main__":
    main()
