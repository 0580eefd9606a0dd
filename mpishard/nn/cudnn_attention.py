"""Causal attention by cuDNN: one kernel forward and few backward, which never store scores.

Dao, "FlashAttention-2" (2023).  cuDNN describes it as a graph, which is built once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of
from mpishard.backend.optional_library import OptionalLibrary

Array = Any

# What cuDNN takes on all processors, see its "SDPA" support matrix.
WIDEST_HEAD, HEAD_MULTIPLE = 128, 8
# Building takes a good part of a second; texts of ever other lengths are left to the products in blocks.
MOST_SHAPES = 32


class Shape(NamedTuple):
    """Sequences, heads of queries, heads of keys and values, positions, and channels of a head.

    With `in_rows` a position has a row in memory, in which the query, key and value of each head are next to each
    other, and mixed values have separate rows. Else each array is C-contiguous of shape (batch, heads, length, width).
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
    groups, length, width), in memory as `Shape` says. Query head i uses the keys and values of group ``i // (heads //
    groups)``.
    """

    def __init__(self, cudnn: Any, like: Array) -> None:
        self._cudnn = cudnn
        self._backend = backend_of(like)
        with self._backend.on_device_of(like):
            self._handle = cudnn.create_handle()
        self._graphs: dict[tuple[Shape, np.dtype, float], tuple[_Graph, _Graph] | None] = {}
        # Whether it was right on a small problem, by what was tried; filled by callers.
        self.proven: dict[Any, bool] = {}

    def builds(self, shape: Shape, half: np.dtype, scale: float, like: Array) -> bool:
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

    def forward(self, scale: float, in_rows: bool, q: Array, k: Array, v: Array, mixed: Array, stats: Array) -> None:
        """Mixed values, and the logarithm of each query's normaliser (float32, shape (batch, heads, length))."""
        self._built(scale, in_rows, q, k)[0].execute(self._cudnn, self._handle, q=q, k=k, v=v, o=mixed, stats=stats)

    def backward(
        self,
        scale: float,
        in_rows: bool,
        q: Array,
        k: Array,
        v: Array,
        mixed: Array,
        dmixed: Array,
        stats: Array,
        dq: Array,
        dk: Array,
        dv: Array,
    ) -> None:
        """Gradients by queries, keys and values, from the results of `forward` and the gradient by the mixed values."""
        graph = self._built(scale, in_rows, q, k)[1]
        graph.execute(self._cudnn, self._handle, q=q, k=k, v=v, o=mixed, do=dmixed, stats=stats, dq=dq, dk=dk, dv=dv)

    def _built(self, scale: float, in_rows: bool, q: Array, k: Array) -> tuple[_Graph, _Graph]:
        batch, heads, length, width = q.shape
        built = self._graphs[Shape(batch, heads, k.shape[1], length, width, in_rows), q.dtype, scale]
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

    def _forward_graph(self, shape: Shape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        places = _places(shape)
        tensors = {name: tensor(name, *places[name]) for name in ("q", "k", "v")}
        tensors["o"], tensors["stats"] = graph.sdpa(
            name="attention", **tensors, is_inference=False, attn_scale=scale, use_causal_mask=True
        )
        _mark_output(tensors["o"], *places["o"])
        _mark_output(tensors["stats"], *places["stats"]).set_data_type(self._cudnn.data_type.FLOAT)
        return _Graph(self._cudnn, graph, tensors)

    def _backward_graph(self, shape: Shape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        places = _places(shape)
        tensors = {name: tensor(name, *places[name]) for name in ("q", "k", "v", "o", "do", "stats")}
        named = {{"do": "dO"}.get(name, name): each for name, each in tensors.items()}
        tensors["dq"], tensors["dk"], tensors["dv"] = graph.sdpa_backward(
            name="gradient",
            **named,
            attn_scale=scale,
            use_causal_mask=True,
            # Else gradients by queries are added up in an order that changes from run to run.
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


def _places(shape: Shape) -> dict[str, tuple[list[int], list[int]]]:
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
