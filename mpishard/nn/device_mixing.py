"""Causal attention on devices: many heads in one product, and few large blocks of queries.

Small pieces cost more to launch than the masked half of short sequences costs to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from mpishard.backend import array as arrays
from mpishard.nn.products import Matmul, multiply_into, rounded_dtype, shared_operand
from mpishard.nn.workspace import Workspace

Array = Any

# Queries (forward) or keys (backward) at a time; blocks that are masked entirely are not computed.
BLOCK = 1024
# Scores at a time, so that memory stays bounded: heads, and sequences, are computed together up to this number.
DEVICE_SCORES = 2**27


class DeviceMixing:
    """Computes `mpishard.nn.attention.CausalMixing` on devices, with the same arguments and axes.

    If `matmul` rounds operands, the probabilities are rounded too.
    """

    def __init__(self, matmul: Matmul, ops: Any, scale: float) -> None:
        self._matmul = matmul
        self._ops = ops
        self._scale = scale

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, mixed_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """See `CausalMixing.forward`; `logsum` is C-contiguous."""
        matmul, (kinds, batch, count, length, _) = self._matmul, q_sbhtd.shape
        keys = k_bhtd.shape[2]
        before, block = keys - length, min(length, BLOCK)
        total = work.borrow("attention total", block)
        q_sbhtd, k_bhtd, v_bhtd = (shared_operand(matmul, each) for each in (q_sbhtd, k_bhtd, v_bhtd))
        for group in _groups(batch, count, block * keys):
            k, v = k_bhtd[group], v_bhtd[group]
            for kind in range(kinds):
                q, mixed = q_sbhtd[kind][group], mixed_sbhtd[kind][group]
                logsum_gt = _by_group(logsum_sbht[kind][group], 1)
                for first in range(0, length, block):
                    last = min(first + block, length)
                    seen = before + last
                    scores = _scores(work, "scores", *q.shape[:2], seen, last - first)
                    matmul(k[:, :, :seen], q[:, :, first:last].swapaxes(2, 3), out=scores)
                    weights, rounded = self._results_for_products(scores)
                    given = _by_group(scores, 2), logsum_gt, total, before + first, self._scale
                    self._ops.causal_softmax(*given, *rounded)
                    matmul(weights.swapaxes(2, 3), v[:, :, :seen], out=mixed[:, :, first:last])

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
        """See `CausalMixing.backward`; `logsum` and `inner` are C-contiguous, `mixed` is not used."""
        matmul, (kinds, batch, count, length, _) = self._matmul, dmixed_sbhtd.shape
        heads_sbhtd, dmixed_sbhtd = shared_operand(matmul, heads_sbhtd), shared_operand(matmul, dmixed_sbhtd)
        for group in _groups(batch, count, min(length, BLOCK) * length):
            k, v = heads_sbhtd[kinds][group], heads_sbhtd[kinds + 1][group]
            dk, dv = dheads_sbhtd[kinds][group], dheads_sbhtd[kinds + 1][group]
            for kind in range(kinds):
                q, dq, dmixed = (each[kind][group] for each in (heads_sbhtd, dheads_sbhtd, dmixed_sbhtd))
                statistics = [_by_group(each[kind][group], 1) for each in (logsum_sbht, inner_sbht)]
                self._backward_of_group(q, k, v, dmixed, statistics, dq, dk, dv, kind > 0, work)

    def _backward_of_group(
        self,
        q: Array,
        k: Array,
        v: Array,
        dmixed: Array,
        statistics: list[Array],
        dq: Array,
        dk: Array,
        dv: Array,
        accumulate: bool,
        work: Workspace,
    ) -> None:
        """The gradients of one kind of queries; keys and values may have some of other kinds."""
        matmul, length = self._matmul, q.shape[2]

        def add_product(a: Array, b: Array, out: Array, accumulate: bool) -> None:
            multiply_into(matmul, a, b, out, accumulate, lambda: _scores(work, "attention product", *out.shape))

        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            shape = *q.shape[:2], last - first, length - first
            scores, dweights = (_scores(work, name, *shape) for name in ("scores", "dscores"))
            matmul(k[:, :, first:last], q[:, :, first:].swapaxes(2, 3), out=scores)
            matmul(v[:, :, first:last], dmixed[:, :, first:].swapaxes(2, 3), out=dweights)
            (weights, rounded), (dscores, drounded) = map(self._results_for_products, (scores, dweights))
            given = [_by_group(each, 2) for each in (scores, dweights)]
            self._softmax_backward(given, statistics, rounded + drounded, first)
            add_product(weights, dmixed[:, :, first:], dv[:, :, first:last], accumulate)
            add_product(dscores, q[:, :, first:], dk[:, :, first:last], accumulate)
            add_product(dscores.swapaxes(2, 3), k[:, :, first:last], dq[:, :, first:], first > 0)

    def _results_for_products(self, scores: Array) -> tuple[Array, list[Array]]:
        """The place where the softmax leaves its results of `scores` for products, and by group if that is elsewhere.

        Products that round operands would round it there: the softmax stores it rounded.
        """
        half = rounded_dtype(self._matmul)
        if half is None:
            return scores, []
        rounded = arrays.empty(scores.shape, half, like=scores)
        return rounded, [_by_group(rounded, 2)]

    def _softmax_backward(self, given: list[Array], statistics: list[Array], results: list[Array], first: int) -> None:
        """That of a block of keys from number `first` on and the queries from there on, all that the function sees."""
        later = [each[:, first:].copy() if first else each for each in statistics]
        _, keys, queries = given[0].shape
        # The function takes heads to be as far apart as if all keys were there.
        heads = [slice(None)] if keys == queries else [slice(head, head + 1) for head in range(len(given[0]))]
        for each in heads:
            arguments = [one[each] for one in (*given, *later)]
            self._ops.causal_softmax_backward(*arguments, self._scale, *(one[each] for one in results))


def _groups(batch: int, heads: int, scores_of_head: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads that are computed at a time."""
    sequences, size = group_sizes(heads, scores_of_head)
    for sequence in range(0, batch, sequences):
        for head in range(0, heads, size):
            yield slice(sequence, sequence + sequences), slice(head, head + size)


def group_sizes(heads: int, scores_of_head: int) -> tuple[int, int]:
    """The most sequences and heads to compute at a time: all heads of several sequences, or some of one."""
    size = max(1, DEVICE_SCORES // max(1, scores_of_head))
    return max(1, size // max(1, heads)), min(size, heads)


def _by_group(array: Array, last: int) -> Array:
    """A view of a contiguous array, with all but the last dimensions as one."""
    assert array.flags.c_contiguous
    return array.reshape(-1, *array.shape[array.ndim - last :])


def _scores(work: Workspace, name: str, *shape: int) -> Array:
    return work.scratch(name, (prod(shape),), work.dtype).reshape(shape)
