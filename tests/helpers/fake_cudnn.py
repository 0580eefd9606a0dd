"""A double of the package ``cudnn``: causal attention at raw addresses, on the stand-in's stream.

It has what mpishard asks of graphs, and refuses what cuDNN refuses.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import standin

__name__ = "cudnn"


class data_type(enum.Enum):
    HALF, BFLOAT16, FLOAT = np.float16, ml_dtypes.bfloat16, np.float32


class heur_mode(enum.Enum):
    A, FALLBACK = range(2)


class Handle:
    stream: Any = None


# What was executed, by name of the node.
executed: list[str] = []


def create_handle() -> Handle:
    return Handle()


def set_stream(handle: Handle, stream: int) -> None:
    handle.stream = stream


def _setter(name: str) -> Callable[[Tensor, Any], Tensor]:
    return lambda tensor, value: tensor.__dict__.update({name: value}) or tensor


class Tensor:
    def __init__(self, name: str, dim: list[int], stride: list[int], kind: Any) -> None:
        self.name, self.dim, self.stride, self.kind, self.output = name, dim, stride, kind, False

    set_output, set_dim, set_stride, set_data_type = map(_setter, ("output", "dim", "stride", "kind"))

    def at(self, address: int) -> Any:
        size = np.dtype(self.kind.value).itemsize
        assert address % 16 == 0, "misaligned"
        return standin.array_at(address, tuple(self.dim), self.kind.value, tuple(s * size for s in self.stride))


class pygraph:
    def __init__(self, *, io_data_type: Any, intermediate_data_type: Any, compute_data_type: Any, handle: Handle):
        assert {intermediate_data_type, compute_data_type} == {data_type.FLOAT}
        self._kind, self._done = io_data_type, 0
        self._work: Callable[..., None]

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Any) -> Tensor:
        return Tensor(name, dim, stride, data_type)

    def sdpa(self, *, name: str, q: Tensor, k: Tensor, v: Tensor, is_inference: bool, attn_scale: float,
             use_causal_mask: bool) -> list[Tensor]:  # fmt: skip
        assert use_causal_mask and not is_inference and len({q.kind, k.kind, v.kind}) == 1
        self._node, self._scale = name, attn_scale
        self._inputs, self._outputs = [q, k, v], [Tensor(each, [], [], self._kind) for each in ("o", "stats")]
        self._work = _forward
        return self._outputs

    def sdpa_backward(
        self, *, name: str, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor,
        attn_scale: float, use_causal_mask: bool, use_deterministic_algorithm: bool,
    ) -> list[Tensor]:  # fmt: skip
        assert use_causal_mask and stats.kind is data_type.FLOAT
        self._node, self._scale = name, attn_scale
        self._inputs, self._outputs = [q, k, v, o, dO, stats], [Tensor(each, [], [], self._kind) for each in "qkv"]
        self._work = _backward
        return self._outputs

    def validate(self) -> None:
        assert self._done == 0 and all(each.output and each.stride[-1] == 1 for each in self._outputs)
        self._done = 1

    def build_operation_graph(self) -> None:
        assert self._done == 1
        self._done = 2

    def create_execution_plans(self, modes: list[heur_mode]) -> None:
        assert self._done == 2 and modes
        self._done = 3

    def check_support(self) -> None:
        assert self._done == 3
        if self._inputs[0].dim[3] == 40:
            raise RuntimeError("cudnnGraphNotSupportedError")
        self._done = 4

    def build_plans(self) -> None:
        assert self._done == 4
        self._done = 5

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensors: dict[Tensor, int], workspace: int, handle: Handle) -> None:
        assert self._done == 5 and type(workspace) is int
        assert handle.stream == standin.current_stream().ptr
        assert set(tensors) == {*self._inputs, *self._outputs}
        executed.append(self._node)
        scale, work = self._scale, self._work
        operands = [each.at(tensors[each]) for each in (*self._inputs, *self._outputs)]
        standin.current_stream().launch(lambda *hosts: work(scale, *hosts), *operands)


def _probabilities(scale: float, q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = scale * (q @ k.swapaxes(2, 3))
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    stats = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
    return np.exp(scores - stats), stats


def _wide(array: np.ndarray, heads: int) -> np.ndarray:
    """In float32, with as many heads as there are of queries."""
    return np.repeat(array.astype(np.float32), heads // array.shape[1], axis=1)


def _forward(scale: float, q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray, stats: np.ndarray) -> None:
    p, stats[...] = _probabilities(scale, *(_wide(each, q.shape[1]) for each in (q, k)))
    o[...] = (p.astype(q.dtype).astype(np.float32) @ _wide(v, q.shape[1])).astype(o.dtype)


def _backward(scale: float, *arrays: np.ndarray) -> None:
    heads = arrays[0].shape[1]
    *wide, stats = (_wide(each, heads) for each in arrays[:6])
    q, k, v, o, do = wide
    p, expected = _probabilities(scale, q, k)
    # Activations that were stored rounded move scores a little.
    assert np.allclose(stats, expected, rtol=0.02, atol=0.2), "statistics of another forward pass"
    ds = scale * p * (do @ v.swapaxes(2, 3) - (do * o).sum(axis=-1, keepdims=True))
    gradients = ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
    assert math.isfinite(float(gradients[0].sum()))
    for out, gradient in zip(arrays[6:], gradients, strict=True):
        batch, _, *rest = gradient.shape
        out[...] = gradient.reshape(batch, out.shape[1], -1, *rest).sum(axis=2).astype(out.dtype)
