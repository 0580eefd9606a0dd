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
    """Of attention: sequences, heads of queries, heads of keys and values, positions, channels of a head."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int


class CudnnAttention:
    """Attention on one device, for one thread; operands and results are in half precision.

    Queries, their results and the gradients by these are C-contiguous of shape (batch, heads, length, width), keys and
    values (batch, groups, length, width).  Query head number i uses those of number ``i // (heads // groups)``.

    Parameters
    ----------
    cudnn : module
        ``cudnn``, of the package nvidia-cudnn-frontend.
    like : array
        Any of the device.

    Attributes
    ----------
    proven : dict
        Whether it was right on a small problem, by what was tried; kept here for whoever tries.
    """

    def __init__(self, cudnn: Any, like: Array) -> None:
        self._cudnn = cudnn
        self._backend = backend_of(like)
        with self._backend.on_device_of(like):
            self._handle = cudnn.create_handle()
        self._graphs: dict[tuple[Shape, np.dtype, float], tuple[_Graph, _Graph] | None] = {}
        self.proven: dict[Any, bool] = {}

    def builds(self, shape: Shape, half: np.dtype, scale: float, like: Array) -> bool:
        """Whether cuDNN has forward and backward for this shape; builds them if so."""
        if shape.width > WIDEST_HEAD or shape.width % HEAD_MULTIPLE or 0 in shape:
            return False
        key = shape, half, scale
        if key not in self._graphs:
            if len(self._graphs) >= MOST_SHAPES:
                return False
            try:
                with self._backend.on_device_of(like):
                    self._graphs[key] = self._forward_graph(*key), self._backward_graph(*key)
            except Exception as error:  # of several classes, some of them cuDNN's own
                self._graphs[key] = None
                LIBRARY.warn_once(f"cuDNN builds no attention of {shape} in {half} ({error})")
        return self._graphs[key] is not None

    def forward(self, scale: float, q: Array, k: Array, v: Array, mixed: Array, stats: Array) -> None:
        """Mixed values, and the logarithm of each query's normaliser (float32, shape (batch, heads, length))."""
        self._built(scale, q, k)[0].execute(self._cudnn, self._handle, q=q, k=k, v=v, o=mixed, stats=stats)

    def backward(
        self,
        scale: float,
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
        graph = self._built(scale, q, k)[1]
        graph.execute(self._cudnn, self._handle, q=q, k=k, v=v, o=mixed, do=dmixed, stats=stats, dq=dq, dk=dk, dv=dv)

    def _built(self, scale: float, q: Array, k: Array) -> tuple[_Graph, _Graph]:
        batch, heads, length, width = q.shape
        built = self._graphs[Shape(batch, heads, k.shape[1], length, width), q.dtype, scale]
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

        def tensor(name: str, extents: list[int]) -> Any:
            data_type = kinds.FLOAT if name == "stats" else kind
            return graph.tensor(name=name, dim=extents, stride=_strides(extents), data_type=data_type)

        return graph, tensor

    def _forward_graph(self, shape: Shape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        batch, heads, groups, length, width = shape
        queries, keys = [batch, heads, length, width], [batch, groups, length, width]
        tensors = {"q": tensor("q", queries), "k": tensor("k", keys), "v": tensor("v", keys)}
        tensors["o"], tensors["stats"] = graph.sdpa(
            name="attention", **tensors, is_inference=False, attn_scale=scale, use_causal_mask=True
        )
        self._mark_output(tensors["o"], queries)
        self._mark_output(tensors["stats"], [batch, heads, length, 1]).set_data_type(self._cudnn.data_type.FLOAT)
        return _Graph(self._cudnn, graph, tensors)

    def _backward_graph(self, shape: Shape, half: np.dtype, scale: float) -> _Graph:
        graph, tensor = self._new_graph(half)
        batch, heads, groups, length, width = shape
        queries, keys = [batch, heads, length, width], [batch, groups, length, width]
        tensors = {name: tensor(name, keys if name in ("k", "v") else queries) for name in ("q", "k", "v", "o", "do")}
        tensors["stats"] = tensor("stats", [batch, heads, length, 1])
        named = {{"do": "dO"}.get(name, name): each for name, each in tensors.items()}
        tensors["dq"], tensors["dk"], tensors["dv"] = graph.sdpa_backward(
            name="gradient",
            **named,
            attn_scale=scale,
            use_causal_mask=True,
            # Else gradients by queries are added up in an order that changes from run to run.
            use_deterministic_algorithm=True,
        )
        for name, extents in (("dq", queries), ("dk", keys), ("dv", keys)):
            self._mark_output(tensors[name], extents)
        return _Graph(self._cudnn, graph, tensors)

    def _mark_output(self, tensor: Any, extents: list[int]) -> Any:
        return tensor.set_output(True).set_dim(extents).set_stride(_strides(extents))


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
        assert all(each.flags.c_contiguous for each in operands.values())
        workspace = arrays.empty(self._workspace_bytes, np.uint8, like=like)
        addresses = {self._tensors[name]: backend.address(each) for name, each in operands.items()}
        with backend.on_device_of(like):
            cudnn.set_stream(handle=handle, stream=backend.current_stream(like).ptr)
            self._graph.execute(addresses, backend.address(workspace), handle=handle)


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
