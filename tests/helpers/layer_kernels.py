"""Arguments of the functions of layers, and models whose layers compute by the formulas to compare them with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import layer_formulas
import numpy as np

from mpishard.backend import array as arrays
from mpishard.nn.layers import Layer

# The arrays of a function, by the letters of their extents, and the numbers after them.
SIGNATURES: dict[str, list[Any]] = {
    "add_bias": ["nc c nc"],
    "layer_norm": ["nc c c nc n n", 1e-5],
    "layer_norm_backward": ["nc nc n n c nc c c"],
    "rms_norm": ["nc c nc n", 1e-5],
    "rms_norm_backward": ["nc nc n c nc c"],
    "gelu": ["nc c nc"],
    "gelu_backward": ["nc nc c"],
    "swiglu": ["nc nc nc"],
    "swiglu_backward": ["nc nc nc"],
    "split_heads": ["nc c sbhtd"],
    "merge_heads": ["nc sbhtd"],
    "split_with_products": ["nc nc sbhtd sbht"],
}
HEADS = [name for name, (shapes, *_) in SIGNATURES.items() if "s" in shapes]
SUMS = ["row_maximum", "exponentials", "cross_entropy_of_sums"]
ROWS = [*(name for name in SIGNATURES if name not in HEADS), "drop", "cross_entropy", "lookup", "scatter_add", *SUMS]
# Where the result is that may be stored in half precision.
RESULTS = {"layer_norm": 3, "rms_norm": 2, "gelu": 2, "swiglu": 2}
RESULTS_OF_HEADS = {"split_heads": 2, "merge_heads": 0, "split_with_products": 2}
# The first and the last key of a block.
KEYS = [(0, 20), (0, 7), (7, 13), (13, 20), (19, 20)]


def use_formulas(layers: Iterable[Layer]) -> None:
    """Let layers compute by formulas in the place of kernels."""
    for layer in layers:
        layer.ops = layer_formulas
        use_formulas(layer.children)


def moved(model: Any) -> Any:
    """The model away from its initial values, so that every tensor matters; the same on every device."""
    flat = model.parameters.flat
    noise = np.random.default_rng(5).standard_normal(flat.size).astype(flat.dtype)
    values = arrays.to_host(flat) + flat.dtype.type(0.3) * noise
    arrays.copy_to_device(values, flat) if arrays.is_device(flat) else np.copyto(flat, values)
    return model


def normal(dtype: Any, *shapes: Any, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def arguments(name: str, dtype: Any, **extents: int) -> list[Any]:
    """Those of a function of SIGNATURES."""
    shapes, *numbers = SIGNATURES[name]
    given = normal(dtype, *([extents[letter] for letter in shape] for shape in shapes.split()))
    if name in ("gelu", "swiglu"):
        given[0] *= 4
    if name == "layer_norm":
        given[0] += 3
    return [*given, *numbers]


def of_rows(name: str, dtype: Any, rows: int, columns: int) -> list[list[Any]]:
    """Arguments of one of ROWS, in each way that it may be called."""
    if name in SIGNATURES:
        return [arguments(name, dtype, n=rows, c=columns)]
    random = np.random.default_rng(2)
    x, y, table = normal(dtype, (rows, columns), (rows, columns), (4, columns))
    if name == "drop":
        return [[x, random.integers(-(2**63), 2**63 - 1, rows), random.integers(0, 1000, rows), 0.3]]
    if name == "cross_entropy":
        return [[5 * x, random.integers(0, columns, rows)]]
    if name == "lookup":
        return [[table, np.arange(rows) % 7 - 1, y, first, 5] for first in (0, 2, 9)]
    if name == "scatter_add":
        return [[x, random.integers(0, 7, rows), table, first] for first in (0, 2, 9)]
    total, picked = normal(dtype, rows, rows, seed=1)
    targets = random.integers(0, columns + 20, rows)
    if name == "row_maximum":
        return [[x, total]]
    if name == "exponentials":
        return [[5 * x, targets, 5 * x.max(axis=1), total, picked, 10, columns + 15]]
    return [[x, targets, np.abs(total) + 1, picked, 10]]


def of_heads(name: str, dtype: Any, kinds: int, batch: int, heads: int, length: int, width: int) -> list[Any]:
    extents = dict(s=kinds, b=batch, h=heads, t=length, d=width)
    return arguments(name, dtype, n=batch * length, c=kinds * heads * width, **extents)


def of_softmax(dtype: Any, length: int, first: int, last: int) -> list[Any]:
    scores, logsum = normal(dtype, (3, last, last - first), (3, length))
    return [9 * scores, logsum, np.empty(last - first, dtype), first, 0.4]


def of_softmax_backward(dtype: Any, length: int, first: int, last: int) -> list[list[Any]]:
    """Gradients of all keys and queries, and of these keys alone and the queries that see them."""
    keys, queries = last - first, length - first
    scores = (3, keys, queries)
    every = normal(dtype, scores, (3, length, length), (3, length), (3, length))
    alone = normal(dtype, scores, scores, (3, queries), (3, queries))
    return [[*every, 0.4], [*alone, 0.4]]
