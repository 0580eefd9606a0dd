"""Causal attention on devices by a library that computes it as a whole, where it exists and is proven."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.convert import convert
from mpishard.backend.kinds import backend_of
from mpishard.nn import cudnn_attention
from mpishard.nn.cudnn_attention import CudnnAttention, Shape
from mpishard.nn.device_mixing import DeviceMixing
from mpishard.nn.products import Matmul, rounded_dtype
from mpishard.nn.workspace import Workspace

Array = Any

# In bytes, of each operand.
ALIGNMENT = 16
# Positions of the small problem on which attention is proven: more than a tile of any kernel, and not whole tiles.
TRIAL_LENGTH = 150
# Of the norm: by how many roundings of half precision two right results may differ.
TRIAL_ROUNDINGS = 8


class FusedMixing:
    """Computes `mpishard.nn.attention.CausalMixing` by a library, with the same arguments and axes.

    The statistics are the library's: they lie in the memory of `logsum` in its order, and only `backward` of this class
    may read them. It rounds the mixed values again, which gives what `forward` had. With `in_rows` the arguments are
    views of rows (`mpishard.nn.cudnn_attention.Shape`), rounded as all operands and results are.
    """

    def __init__(self, attention: CudnnAttention, half: np.dtype, scale: float, in_rows: bool = False) -> None:
        self._attention = attention
        self._half = half
        self._scale = scale
        self._in_rows = in_rows

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, mixed_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """See `CausalMixing.forward`; there are as many keys as queries, and `logsum` is C-contiguous."""
        if self._in_rows:
            (logsum,) = logsum_sbht
            stats = _aligned(logsum)
            self._attention.forward(self._scale, True, q_sbhtd[0], k_bhtd, v_bhtd, mixed_sbhtd[0], stats)
            if stats is not logsum:
                logsum[...] = stats
            return
        q = self._by_group(q_sbhtd)
        mixed = arrays.empty(q.shape, self._half, like=q)
        stats = arrays.empty(q.shape[:3], logsum_sbht.dtype, like=q)
        self._attention.forward(self._scale, False, q, self._rounded(k_bhtd), self._rounded(v_bhtd), mixed, stats)
        convert(_by_kind(mixed, len(q_sbhtd)), mixed_sbhtd)
        logsum_sbht.reshape(-1)[...] = stats.reshape(-1)

    def backward(
        self,
        heads_sbhtd: Array,
        logsum_sbht: Array,
        mixed_sbhtd: Array,
        dmixed_sbhtd: Array,
        inner_sbht: Array,
        dheads_sbhtd: Array,
        work: Workspace,
    ) -> None:
        """See `CausalMixing.backward`; `inner` is not used."""
        if self._in_rows:
            operands, gradients = (list(each) for each in (heads_sbhtd, dheads_sbhtd))
            operands += mixed_sbhtd[0], dmixed_sbhtd[0], _aligned(logsum_sbht[0])
            self._attention.backward(self._scale, True, *operands, *gradients)
            return
        kinds = len(dmixed_sbhtd)
        q, mixed, dmixed = (self._by_group(each) for each in (heads_sbhtd[:kinds], mixed_sbhtd, dmixed_sbhtd))
        k, v = (self._rounded(heads_sbhtd[kinds + number]) for number in range(2))
        dq, dk, dv = (arrays.empty(each.shape, self._half, like=each) for each in (q, k, v))
        stats = _aligned(logsum_sbht).reshape(q.shape[:3])
        self._attention.backward(self._scale, False, q, k, v, mixed, dmixed, stats, dq, dk, dv)
        convert(_by_kind(dq, kinds), dheads_sbhtd[:kinds])
        convert(dk, dheads_sbhtd[kinds])
        convert(dv, dheads_sbhtd[kinds + 1])

    def _rounded(self, array: Array) -> Array:
        """C-contiguous, in half precision; `array` itself if it is."""
        if array.dtype == self._half and array.flags.c_contiguous:
            return array
        halves = arrays.empty(array.shape, self._half, like=array)
        convert(array, halves)
        return halves

    def _by_group(self, array_sbhtd: Array) -> Array:
        """The same, with the heads of queries that share a key side by side: (batch, heads, length, width)."""
        halves_bhstd = self._rounded(array_sbhtd.transpose(1, 2, 0, 3, 4))
        batch, groups, kinds, *rest = halves_bhstd.shape
        return halves_bhstd.reshape(batch, groups * kinds, *rest)


def _aligned(array: Array) -> Array:
    """The array, or a copy that is aligned as cuDNN wants it; the place of one slice among others need not be."""
    return array.copy() if backend_of(array).address(array) % ALIGNMENT else array


def _by_kind(array_bntd: Array, kinds: int) -> Array:
    """The inverse of `FusedMixing._by_group`, as a view of axes (kind, batch, key head, position, channel)."""
    batch, heads, *rest = array_bntd.shape
    return array_bntd.reshape(batch, heads // kinds, kinds, *rest).transpose(2, 0, 1, 3, 4)


def choose_mixing(
    matmul: Matmul, ops: Any, scale: float, q_sbhtd: Array, keys: int, work: Workspace
) -> DeviceMixing | FusedMixing:
    """By a library where it can be, else in blocks; the same in the backward pass as in the forward pass before it.

    The library is used only if operands are rounded, keys and queries are of the same positions, and a small problem of
    such heads was computed right.
    """
    kinds, batch, groups, length, width = q_sbhtd.shape
    fused = None
    if length == keys:
        fused = fused_mixing(matmul, ops, scale, Shape(batch, groups * kinds, groups, length, width), q_sbhtd, work)
    return fused or DeviceMixing(matmul, ops, scale)


def fused_mixing(
    matmul: Matmul, ops: Any, scale: float, shape: Shape, like: Array, work: Workspace
) -> FusedMixing | None:
    """That for a shape; None where it cannot be, see `choose_mixing`."""
    half = rounded_dtype(matmul)
    # Texts that are generated have another length with every token, and a cache has more keys than queries.
    if half is None or work.cache is not None:
        return None
    attention = cudnn_attention.LIBRARY.on_device(like)
    if attention is None or not attention.builds(shape, half, scale, like):
        return None
    fused = FusedMixing(attention, half, scale, shape.in_rows)
    kinds = shape.heads // shape.groups
    tried, otherwise = ((in_rows, kinds, shape.width, half, scale) for in_rows in (shape.in_rows, not shape.in_rows))
    if tried not in attention.proven:
        small = shape._replace(batch=2, heads=2 * kinds, groups=2, length=TRIAL_LENGTH)
        blocks = DeviceMixing(matmul, ops, scale)
        attention.proven[tried] = _is_right(attention, fused, blocks, small, half, scale, like)
        if not attention.proven[tried]:
            attention.proven[otherwise] = False
    return fused if attention.proven[tried] else None


def _is_right(
    attention: CudnnAttention,
    fused: FusedMixing,
    blocks: DeviceMixing,
    shape: Shape,
    half: np.dtype,
    scale: float,
    like: Array,
) -> bool:
    """Return True if forward and backward of a small problem are those in blocks, within the precision."""
    if not attention.builds(shape, half, scale, like):
        return False
    random = np.random.default_rng(0)
    kinds = shape.heads // shape.groups
    extents = shape.batch, shape.groups, shape.length, shape.width
    # As `CausalSelfAttention` gives them: rounded.
    heads, dmixed = (arrays.empty((number, *extents), half, like=like) for number in (kinds + 2, kinds))
    for each in (heads, dmixed):
        convert(arrays.on_device_of(random.standard_normal(each.shape).astype(np.float32), like), each)
    try:
        results = [
            _trial(each, heads, dmixed, in_rows, like) for each, in_rows in ((fused, shape.in_rows), (blocks, False))
        ]
    except Exception as error:  # of several classes, some of them cuDNN's own
        cudnn_attention.LIBRARY.warn_once(f"cuDNN's attention fails ({error})")
        return False
    precision = 2.0**-11 if half == np.float16 else 2.0**-8
    for found, expected in zip(*results, strict=True):
        distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        if not distance < TRIAL_ROUNDINGS * precision:  # NaN is no smaller
            what = f"cuDNN's attention of heads of {shape.width} channels"
            cudnn_attention.LIBRARY.warn_once(f"{what} differs by {distance:.1e} from that by products")
            return False
    return True


def _trial(
    mixing: DeviceMixing | FusedMixing, heads: Array, dmixed: Array, in_rows: bool, like: Array
) -> list[np.ndarray]:
    """Mixed values and the gradients by queries, keys and values, on the host."""
    work = Workspace(np.float32, arrays.module_of(like))
    kinds, dtype = len(dmixed), heads.dtype if in_rows else np.dtype(np.float32)
    mixed, dheads = (arrays.empty(each.shape, dtype, like=like) for each in (dmixed, heads))
    if in_rows:
        heads, dmixed, mixed, dheads = map(_in_rows, (heads, dmixed, mixed, dheads))
    logsum = arrays.empty(dmixed.shape[:-1], np.float32, like=like)
    mixing.forward(heads[:kinds], heads[kinds], heads[kinds + 1], mixed, logsum, work)
    inner = logsum if in_rows else (_wide(dmixed) * mixed).sum(axis=-1)
    mixing.backward(heads, logsum, mixed, dmixed, inner, dheads, work)
    gradients = arrays.to_host(_wide(dheads))
    return [arrays.to_host(_wide(mixed)), gradients[:kinds], gradients[kinds], gradients[kinds + 1]]


def _in_rows(array_sbhtd: Array) -> Array:
    """A copy whose channels of a position lie in a row, ordered by head, kind and channel."""
    rows = arrays.module_of(array_sbhtd).ascontiguousarray(array_sbhtd.transpose(1, 3, 2, 0, 4))
    return rows.transpose(3, 0, 2, 1, 4)


def _wide(array: Array) -> Array:
    """In float32."""
    if array.dtype == np.float32:
        return array
    wide = arrays.empty(array.shape, np.float32, like=array)
    convert(array, wide)
    return wide
