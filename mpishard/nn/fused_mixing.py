"""Causal attention on devices by a library that computes it as a whole, where it is there and proven."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.convert import convert
from mpishard.nn import cudnn_attention
from mpishard.nn.cudnn_attention import CudnnAttention, Shape
from mpishard.nn.device_mixing import DeviceMixing
from mpishard.nn.products import Matmul, rounded_dtype
from mpishard.nn.workspace import Workspace

Array = Any

# Positions of the small problem on which attention is proven: more than a tile of any kernel, and not whole tiles.
TRIAL_LENGTH = 150
# Of the norm: by how many roundings of half precision two right results may differ.
TRIAL_ROUNDINGS = 8


class FusedMixing:
    """What `mpishard.nn.device_mixing.DeviceMixing` does, with the same arguments; axes as there.

    Not collective.  The statistics are of the library: they lie in the memory of `logsum` in its own order, and only
    `backward` of this class may read them.  It rounds the mixed values again, which gives what `forward` had.

    Parameters
    ----------
    attention : CudnnAttention
        Which has been asked whether it builds the shape.
    half : dtype
        Of the operands: float16, or uint16 for bits of bfloat16.
    scale : float
        Factor of the scores.
    """

    def __init__(self, attention: CudnnAttention, half: np.dtype, scale: float) -> None:
        self._attention = attention
        self._half = half
        self._scale = scale

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, mixed_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """See `CausalMixing.forward`; there are as many keys as queries, and `logsum` is C-contiguous."""
        q = self._by_group(q_sbhtd)
        mixed = arrays.empty(q.shape, self._half, like=q)
        stats = arrays.empty(q.shape[:3], logsum_sbht.dtype, like=q)
        self._attention.forward(self._scale, q, self._rounded(k_bhtd), self._rounded(v_bhtd), mixed, stats)
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
        kinds = len(dmixed_sbhtd)
        q, mixed, dmixed = (self._by_group(each) for each in (heads_sbhtd[:kinds], mixed_sbhtd, dmixed_sbhtd))
        k, v = (self._rounded(heads_sbhtd[kinds + number]) for number in range(2))
        dq, dk, dv = (arrays.empty(each.shape, self._half, like=each) for each in (q, k, v))
        # A copy is aligned as cuDNN wants it; the place of one slice among others need not be.
        stats = logsum_sbht.copy().reshape(q.shape[:3])
        self._attention.backward(self._scale, q, k, v, mixed, dmixed, stats, dq, dk, dv)
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


def _by_kind(array_bntd: Array, kinds: int) -> Array:
    """The inverse of `FusedMixing._by_group`, as a view of axes (kind, batch, key head, position, channel)."""
    batch, heads, *rest = array_bntd.shape
    return array_bntd.reshape(batch, heads // kinds, kinds, *rest).transpose(2, 0, 1, 3, 4)


def choose_mixing(
    matmul: Matmul, ops: Any, scale: float, q_sbhtd: Array, keys: int, work: Workspace
) -> DeviceMixing | FusedMixing:
    """By a library where it can be, else in blocks; the same in the backward pass as in the forward pass before it.

    Not collective.

    Parameters
    ----------
    matmul : callable
        As `mpishard.nn.products.make_matmul` gives it for devices.
    ops : module
        ``formulas``, or what has its functions.
    scale : float
        Factor of the scores.
    q_sbhtd : array
        Queries, of the axes of `mpishard.nn.mixing.CausalMixing`.
    keys : int
        Positions of keys.
    work : Workspace
        Memory of the micro-batch.

    Returns
    -------
    DeviceMixing or FusedMixing
        The latter only if operands are rounded, keys and queries are of the same positions, and a small problem of
        such heads was computed right.
    """
    blocks = DeviceMixing(matmul, ops, scale)
    kinds, batch, groups, length, width = q_sbhtd.shape
    half = rounded_dtype(matmul)
    # Texts that are generated have another length with every token, and a cache has more keys than queries.
    if half is None or work.cache is not None or length != keys:
        return blocks
    attention = cudnn_attention.LIBRARY.on_device(q_sbhtd)
    shape = Shape(batch, groups * kinds, groups, length, width)
    if attention is None or not attention.builds(shape, half, scale, q_sbhtd):
        return blocks
    fused = FusedMixing(attention, half, scale)
    tried = kinds, width, half, scale
    if tried not in attention.proven:
        attention.proven[tried] = _is_right(attention, fused, blocks, kinds, width, half, scale, q_sbhtd)
    return fused if attention.proven[tried] else blocks


def _is_right(
    attention: CudnnAttention,
    fused: FusedMixing,
    blocks: DeviceMixing,
    kinds: int,
    width: int,
    half: np.dtype,
    scale: float,
    like: Array,
) -> bool:
    """Whether forward and backward of a small problem are those in blocks, within the precision."""
    batch, groups = 2, 2
    shape = Shape(batch, groups * kinds, groups, TRIAL_LENGTH, width)
    if not attention.builds(shape, half, scale, like):
        return False
    random = np.random.default_rng(0)
    extents = batch, groups, TRIAL_LENGTH, width
    # As `CausalSelfAttention` gives them: rounded.
    heads, dmixed = (arrays.empty((number, *extents), half, like=like) for number in (kinds + 2, kinds))
    for each in (heads, dmixed):
        convert(arrays.on_device_of(random.standard_normal(each.shape).astype(np.float32), like), each)
    try:
        results = [_trial(each, heads, dmixed, like) for each in (fused, blocks)]
    except Exception as error:  # of several classes, some of them cuDNN's own
        cudnn_attention.LIBRARY.warn_once(f"cuDNN's attention fails ({error})")
        return False
    precision = 2.0**-11 if half == np.float16 else 2.0**-8
    for found, expected in zip(*results, strict=True):
        distance = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        if not distance < TRIAL_ROUNDINGS * precision:  # NaN is no smaller
            what = f"cuDNN's attention of heads of {width} channels"
            cudnn_attention.LIBRARY.warn_once(f"{what} differs by {distance:.1e} from that by products")
            return False
    return True


def _trial(mixing: DeviceMixing | FusedMixing, heads: Array, dmixed: Array, like: Array) -> list[np.ndarray]:
    """Mixed values and the gradients by queries, keys and values, on the host."""
    work = Workspace(np.float32, arrays.module_of(like))
    mixed, dheads, values = (arrays.empty(each.shape, np.float32, like=like) for each in (dmixed, heads, dmixed))
    logsum = arrays.empty(dmixed.shape[:-1], np.float32, like=like)
    kinds = len(dmixed)
    mixing.forward(heads[:kinds], heads[kinds], heads[kinds + 1], mixed, logsum, work)
    convert(dmixed, values)
    inner = (values * mixed).sum(axis=-1)
    mixing.backward(heads, logsum, mixed, dmixed, inner, dheads, work)
    gradients = arrays.to_host(dheads)
    return [arrays.to_host(mixed), gradients[:kinds], gradients[kinds], gradients[kinds + 1]]
