"""Causal attention on devices: by products of many heads and large blocks of queries, or by cuDNN as a whole.

Small pieces cost more to launch than the masked half of short sequences costs to compute.  cuDNN has one kernel forward
and few backward, which never store scores (Dao, "FlashAttention-2", 2023), as a graph that is built once for each
shape; it is taken where it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.convert import convert
from mpishard.backend.kinds import backend_of
from mpishard.backend.optional_library import OptionalLibrary
from mpishard.nn.products import Matmul, multiply_into, rounded_dtype, shared_operand
from mpishard.nn.workspace import Workspace

Array = Any


# cuDNN's graph for one shape.

# What cuDNN takes on all processors, see its "SDPA" support matrix.
WIDEST_HEAD, HEAD_MULTIPLE = 128, 8
# Building takes a good part of a second; texts of ever other lengths are left to the products in blocks.
MOST_SHAPES = 32


class AttentionShape(NamedTuple):
    """Sequences, heads of queries, heads of keys and values, positions, and channels of a head.

    With `in_rows` a position has a row in memory, in which the query, key and value of each head are next to each
    other, and outputs have separate rows. Else each array is C-contiguous of shape (batch, heads, length, width).
    """

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    in_rows: bool = False

    def strides(self, heads: int, in_row: int) -> list[int]:
        """Those of an array by batch, head, position and channel, of which `in_row` lie side by side in a row."""
        if not self.in_rows:
            return _strides([self.batch, heads, self.length, self.width])
        row = heads * in_row * self.width
        return [self.length * row, in_row * self.width, row, 1]


class CudnnAttention:
    """Attention by cuDNN on one device, for one thread; operands and results are in half precision.

    Queries, their results and their gradients are of shape (batch, heads, length, width), keys and values of (batch,
    groups, length, width), in memory as `AttentionShape` says. Query head i uses the keys and values of group
    ``i // (heads // groups)``.
    """

    def __init__(self, cudnn: Any, like: Array) -> None:
        self._cudnn = cudnn
        self._backend = backend_of(like)
        with self._backend.on_device_of(like):
            self._handle = cudnn.create_handle()
        self._graphs: dict[tuple[AttentionShape, np.dtype, float], tuple[_Graph, _Graph] | None] = {}

    def builds(self, shape: AttentionShape, half: np.dtype, scale: float, like: Array) -> bool:
        """Return True if cuDNN has forward and backward for this shape, which are then built."""
        if shape.width > WIDEST_HEAD or shape.width % HEAD_MULTIPLE or 0 in shape[:-1]:
            return False
        key = shape, half, scale
        if key not in self._graphs:
            if len(self._graphs) >= MOST_SHAPES:
                return False
            try:
                with self._backend.on_device_of(like):
                    self._graphs[key] = self._forward_graph(*key), self._backward_graph(*key)
            except Exception as error:  # of several classes, some of them cuDNN's own
                for in_rows in (False, True):
                    self._graphs[shape._replace(in_rows=in_rows), half, scale] = None
                LIBRARY.warn_once(f"cuDNN builds no attention of {shape} in {half} ({error})")
        return self._graphs[key] is not None

    def forward(self, scale: float, in_rows: bool, q: Array, k: Array, v: Array, o: Array, stats: Array) -> None:
        """The output, and the logarithm of each query's normaliser (float32, shape (batch, heads, length))."""
        self._built(scale, in_rows, q, k)[0].execute(self._cudnn, self._handle, q=q, k=k, v=v, o=o, stats=stats)

    def backward(
        self,
        scale: float,
        in_rows: bool,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        do: Array,
        stats: Array,
        dq: Array,
        dk: Array,
        dv: Array,
    ) -> None:
        """Gradients with respect to queries, keys and values, from results of `forward` and the output's gradient."""
        graph = self._built(scale, in_rows, q, k)[1]
        graph.execute(self._cudnn, self._handle, q=q, k=k, v=v, o=o, do=do, stats=stats, dq=dq, dk=dk, dv=dv)

    def _built(self, scale: float, in_rows: bool, q: Array, k: Array) -> tuple[_Graph, _Graph]:
        batch, heads, length, width = q.shape
        built = self._graphs[AttentionShape(batch, heads, k.shape[1], length, width, in_rows), q.dtype, scale]
        assert built is not None
        return built

    def _new_graph(self, half: np.dtype) -> tuple[Any, Callable[..., Any]]:
        """A graph, and what makes its tensors of half precision or, for statistics, float32."""
        kinds = self._cudnn.data_type
        kind = kinds.HALF if half == np.float16 else kinds.BFLOAT16
        graph = self._cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self._handle,
        )

        def tensor(name: str, extents: list[int], strides: list[int]) -> Any:
            data_type = kinds.FLOAT if name == "stats" else kind
            return graph.tensor(name=name, dim=extents, stride=strides, data_type=data_type)

        return graph, tensor

    def _forward_graph(self, shape: AttentionShape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        places = _places(shape)
        tensors = {name: tensor(name, *places[name]) for name in ("q", "k", "v")}
        tensors["o"], tensors["stats"] = graph.sdpa(
            name="attention", **tensors, is_inference=False, attn_scale=scale, use_causal_mask=True
        )
        _mark_output(tensors["o"], *places["o"])
        _mark_output(tensors["stats"], *places["stats"]).set_data_type(self._cudnn.data_type.FLOAT)
        return _Graph(self._cudnn, graph, tensors)

    def _backward_graph(self, shape: AttentionShape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        places = _places(shape)
        tensors = {name: tensor(name, *places[name]) for name in ("q", "k", "v", "o", "do", "stats")}
        named = {{"do": "dO"}.get(name, name): each for name, each in tensors.items()}
        tensors["dq"], tensors["dk"], tensors["dv"] = graph.sdpa_backward(
            name="gradient",
            **named,
            attn_scale=scale,
            use_causal_mask=True,
            # Else gradients with respect to queries are added up in an order that changes from run to run.
            use_deterministic_algorithm=True,
        )
        for name in ("dq", "dk", "dv"):
            _mark_output(tensors[name], *places[name])
        return _Graph(self._cudnn, graph, tensors)


class _Graph:
    """A graph with its plan, and its tensors by name."""

    def __init__(self, cudnn: Any, graph: Any, tensors: Mapping[str, Any]) -> None:
        self._graph = graph
        self._tensors = dict(tensors)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._workspace_bytes = max(1, int(graph.get_workspace_size()))

    def execute(self, cudnn: Any, handle: Any, **operands: Array) -> None:
        """Queue it on the current stream."""
        like = operands["q"]
        backend = backend_of(like)
        workspace = arrays.empty(self._workspace_bytes, np.uint8, like=like)
        addresses = {self._tensors[name]: backend.address(each) for name, each in operands.items()}
        with backend.on_device_of(like):
            cudnn.set_stream(handle=handle, stream=backend.current_stream(like).ptr)
            self._graph.execute(addresses, backend.address(workspace), handle=handle)


def _places(shape: AttentionShape) -> dict[str, tuple[list[int], list[int]]]:
    """Extents and strides of each operand and result, by name."""
    batch, heads, groups, length, width, _ = shape
    statistics = [batch, heads, length, 1]
    places = {"stats": (statistics, _strides(statistics))}
    for names, count, in_row in ((("q", "dq"), heads, 3), (("k", "v", "dk", "dv"), groups, 3), (("o", "do"), heads, 1)):
        for name in names:
            places[name] = [batch, count, length, width], shape.strides(count, in_row)
    return places


def _mark_output(tensor: Any, extents: list[int], strides: list[int]) -> Any:
    return tensor.set_output(True).set_dim(extents).set_stride(strides)


def _strides(extents: list[int]) -> list[int]:
    """Of a C-contiguous array, in elements."""
    strides = [1]
    for extent in reversed(extents[1:]):
        strides.insert(0, strides[0] * extent)
    return strides


LIBRARY = OptionalLibrary(
    title="cuDNN",
    package="nvidia-cudnn-frontend",
    module="cudnn",
    variable="MPISHARD_CUDNN_ATTENTION",
    instead="attention is computed by matrix products in blocks instead",
    # A handle of cuDNN is for one thread at a time.
    start=CudnnAttention,
)


# Attention by products.

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
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, o_sbhtd: Array, logsum_sbht: Array, work: Workspace
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
                q, o = q_sbhtd[kind][group], o_sbhtd[kind][group]
                logsum_gt = _by_group(logsum_sbht[kind][group], 1)
                for first in range(0, length, block):
                    last = min(first + block, length)
                    seen = before + last
                    scores = _scores(work, "scores", *q.shape[:2], seen, last - first)
                    matmul(k[:, :, :seen], q[:, :, first:last].swapaxes(2, 3), out=scores)
                    weights, rounded = self._results_for_products(scores)
                    given = _by_group(scores, 2), logsum_gt, total, before + first, self._scale
                    self._ops.causal_softmax(*given, *rounded)
                    matmul(weights.swapaxes(2, 3), v[:, :, :seen], out=o[:, :, first:last])

    def backward(
        self,
        heads_sbhtd: Array,
        logsum_sbht: Array,
        o_sbhtd: Array,
        do_sbhtd: Array,
        delta_sbht: Array,
        dheads_sbhtd: Array,
        work: Workspace,
    ) -> None:
        """See `CausalMixing.backward`; `logsum` and `delta` are C-contiguous, `o` is not used."""
        matmul, (kinds, batch, count, length, _) = self._matmul, do_sbhtd.shape
        heads_sbhtd, do_sbhtd = shared_operand(matmul, heads_sbhtd), shared_operand(matmul, do_sbhtd)
        for group in _groups(batch, count, min(length, BLOCK) * length):
            k, v = heads_sbhtd[kinds][group], heads_sbhtd[kinds + 1][group]
            dk, dv = dheads_sbhtd[kinds][group], dheads_sbhtd[kinds + 1][group]
            for kind in range(kinds):
                q, dq, do = (each[kind][group] for each in (heads_sbhtd, dheads_sbhtd, do_sbhtd))
                statistics = [_by_group(each[kind][group], 1) for each in (logsum_sbht, delta_sbht)]
                self._backward_of_group(q, k, v, do, statistics, dq, dk, dv, kind > 0, work)

    def _backward_of_group(
        self,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
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
            matmul(v[:, :, first:last], do[:, :, first:].swapaxes(2, 3), out=dweights)
            (weights, rounded), (dscores, drounded) = map(self._results_for_products, (scores, dweights))
            given = [_by_group(each, 2) for each in (scores, dweights)]
            self._softmax_backward(given, statistics, rounded + drounded, first)
            add_product(weights, do[:, :, first:], dv[:, :, first:last], accumulate)
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


# The choice between the two.

# In bytes, of each operand.
ALIGNMENT = 16


class FusedMixing:
    """Computes `mpishard.nn.attention.CausalMixing` by a library, with the same arguments and axes.

    The statistics are the library's: they lie in the memory of `logsum` in its order, and only `backward` of this class
    may read them. It rounds the output again, which gives what `forward` had. With `in_rows` the arguments are
    views of rows (`mpishard.nn.device_attention.AttentionShape`), rounded as all operands and results are.
    """

    def __init__(self, attention: CudnnAttention, half: np.dtype, scale: float, in_rows: bool = False) -> None:
        self._attention = attention
        self._half = half
        self._scale = scale
        self._in_rows = in_rows

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, o_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """See `CausalMixing.forward`; there are as many keys as queries, and `logsum` is C-contiguous."""
        if self._in_rows:
            (logsum,) = logsum_sbht
            stats = _aligned(logsum)
            self._attention.forward(self._scale, True, q_sbhtd[0], k_bhtd, v_bhtd, o_sbhtd[0], stats)
            if stats is not logsum:
                logsum[...] = stats
            return
        q = self._by_group(q_sbhtd)
        o = arrays.empty(q.shape, self._half, like=q)
        stats = arrays.empty(q.shape[:3], logsum_sbht.dtype, like=q)
        self._attention.forward(self._scale, False, q, self._rounded(k_bhtd), self._rounded(v_bhtd), o, stats)
        convert(_by_kind(o, len(q_sbhtd)), o_sbhtd)
        logsum_sbht.reshape(-1)[...] = stats.reshape(-1)

    def backward(
        self,
        heads_sbhtd: Array,
        logsum_sbht: Array,
        o_sbhtd: Array,
        do_sbhtd: Array,
        delta_sbht: Array,
        dheads_sbhtd: Array,
        work: Workspace,
    ) -> None:
        """See `CausalMixing.backward`; `delta` is not used."""
        if self._in_rows:
            operands, gradients = (list(each) for each in (heads_sbhtd, dheads_sbhtd))
            operands += o_sbhtd[0], do_sbhtd[0], _aligned(logsum_sbht[0])
            self._attention.backward(self._scale, True, *operands, *gradients)
            return
        kinds = len(do_sbhtd)
        q, o, do = (self._by_group(each) for each in (heads_sbhtd[:kinds], o_sbhtd, do_sbhtd))
        k, v = (self._rounded(heads_sbhtd[kinds + number]) for number in range(2))
        dq, dk, dv = (arrays.empty(each.shape, self._half, like=each) for each in (q, k, v))
        stats = _aligned(logsum_sbht).reshape(q.shape[:3])
        self._attention.backward(self._scale, False, q, k, v, o, do, stats, dq, dk, dv)
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

    The library is used only if operands are rounded, and keys and queries are of the same positions.
    """
    kinds, batch, groups, length, width = q_sbhtd.shape
    fused = None
    if length == keys:
        fused = fused_mixing(matmul, scale, AttentionShape(batch, groups * kinds, groups, length, width), q_sbhtd, work)
    return fused or DeviceMixing(matmul, ops, scale)


def fused_mixing(
    matmul: Matmul, scale: float, shape: AttentionShape, like: Array, work: Workspace
) -> FusedMixing | None:
    """That for a shape; None where it cannot be, see `choose_mixing`."""
    half = rounded_dtype(matmul)
    # Texts that are generated have another length with every token, and a cache has more keys than queries.
    if half is None or work.cache is not None:
        return None
    attention = LIBRARY.on_device(like)
    if attention is None or not attention.builds(shape, half, scale, like):
        return None
    return FusedMixing(attention, half, scale, shape.in_rows)
