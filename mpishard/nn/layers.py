"""Layers with forward and backward written by hand: their base class, and GELU.

A layer looks up its tensors by name in one ``FlatParameters`` at every use. ``forward`` stores in a ``Workspace`` the
arrays that ``backward`` needs. ``backward`` takes the output's gradient of the (summed) loss, writes the gradients
of the tensors into views of ``FlatParameters.gradient``, marks each ready, and returns the gradient of the input. Of a
layer with weights it is two calls, ``input_gradient`` and ``weight_gradient``, which a workspace can defer.

Sizes are those of the whole network; rows are tokens, n = b * t, of this rank. Arrays that a layer returns belong to
the workspace and are overwritten by the next pass; where `Layer.only_multiplies`, they may be bits of numbers rounded
to bfloat16 (uint16), on devices float16 too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import number
from mpishard.backend.array import module_of
from mpishard.backend.random import key, normal
from mpishard.layout.boxes import box_shape
from mpishard.layout.tensors import ParameterSpec
from mpishard.nn import device_kernels, kernels
from mpishard.nn.products import Matmul, make_matmul, rounded_dtype
from mpishard.nn.tensor_parallel import ALONE, TensorParallel
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

Array = Any


def operations(array: Array) -> Any:
    """The module with what layers do besides products, for arrays like `array`."""
    return kernels if isinstance(array, np.ndarray) else device_kernels


class Layer:
    """Named tensors and the layers inside.

    Layers that communicate are collective over the tensor axis, and say so.

    Parameters
    ----------
    name : str
        Prefix of the names of its tensors, e.g. ``"blocks.0.mlp"``.
    children : sequence of Layer
        Layers inside, in the order of the forward pass.

    Attributes
    ----------
    role : str
        Names its memory in a workspace.  Layers of one role share scratch memory, and so must not be neighbours; what
        they save goes to different workspaces.
    only_multiplies : bool
        Of the class: `forward` does nothing with its rows but multiply them by `matmul`, so that they may come as the
        bits of bfloat16.  False for a class that has its own `forward` and does not say it.
    gives_bits : bool
        Whether `forward` may return the bits of bfloat16, since the layer that takes them only multiplies.
    """

    only_multiplies = False
    gives_bits = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            cls.only_multiplies = vars(cls).get("only_multiplies", False)

    def __init__(self, name: str, children: Sequence[Layer] = ()) -> None:
        self.role: str
        self.name = self.role = name
        self.children: tuple[Layer, ...] = tuple(children)

    def share_scratch(self, prefix: str) -> None:
        """Drop a prefix from the roles.

        Several networks of one kind that run in turn then share scratch memory.

        Parameters
        ----------
        prefix : str
            Such as ``"blocks.0"``.
        """
        self.role = self.role.removeprefix(prefix)
        for child in self.children:
            child.share_scratch(prefix)

    def specs(self) -> list[ParameterSpec]:
        """The layer's tensors in the order of the forward pass.

        Returns
        -------
        list of ParameterSpec
            With the shapes of the whole network.
        """
        return [spec for child in self.children for spec in child.specs()]

    def bind(self, parameters: FlatParameters, tensor: TensorParallel = ALONE, compute_dtype: Any = None) -> None:
        """Use the tensors of `parameters`, which must hold all of `specs`.

        Parameters
        ----------
        parameters : FlatParameters
            The values and the gradients of this rank.
        tensor : TensorParallel
            The axis over which the tensors are split.
        compute_dtype : dtype, optional
            Products take operands in this half precision, see `mpishard.nn.products.make_matmul`.
        """
        self.parameters = parameters
        self.tensor = tensor
        self.module: Any = module_of(parameters.like)
        self.ops: Any = operations(parameters.like)
        self.matmul: Matmul = make_matmul(self.module, compute_dtype)
        for child in self.children:
            child.bind(parameters, tensor, compute_dtype)

    def initialize(self, seed: int) -> None:
        """Fill the tensors with their initial values.

        Parameters
        ----------
        seed : int
            The values depend on it and on the names of the tensors, not on the ranks.
        """
        for child in self.children:
            child.initialize(seed)

    def _draw(self, seed: int, name: str, shape: tuple[int, ...], scale: float) -> None:
        """Fill a tensor with normal numbers, drawn for the whole global `shape`, so that all layouts start
        identically.
        """
        own = tuple(slice(*extent) for extent in self.parameters.box(name))
        self._assign(name, normal(seed, name, shape, scale, np.float64)[own])

    def _fill(self, name: str, value: float) -> None:
        self._assign(name, np.full(box_shape(self.parameters.box(name)), value))

    def _assign(self, name: str, values: np.ndarray) -> None:
        self.parameters.assign(name, self.module.asarray(values.astype(self.parameters.dtype)))

    def _gradient_to_add_to(self, name: str) -> Array:
        """The gradient view of `name`, zero if nothing was added to it yet."""
        view, accumulate = self.parameters.gradient(name)
        if not accumulate:
            view.fill(0)
        return view

    def _add_to_gradient(self, name: str, term: Array) -> None:
        """Add an array to the gradient of `name`, whether or not something was added before."""
        view, accumulate = self.parameters.gradient(name)
        if accumulate:
            view += term
        else:
            view[...] = term

    def _save_result(self, work: Workspace, *shape: int) -> Array:
        """Memory for the result of `forward`."""
        return self._save_for_products(work, *shape) if self.gives_bits else work.save(f"{self.role}.y", *shape)

    def _save_for_products(self, work: Workspace, *shape: int) -> Array:
        """Memory for a result that only products take; in half precision if they would round it, in either pass."""
        half = rounded_dtype(self.matmul)
        # Rows that ranks exchange before the product are exchanged as they are.
        if half is None or self.tensor.splits_rows:
            return work.save(f"{self.role}.y", *shape)
        return work.save(f"{self.role}.y", *shape, dtype=half)

    def _finished(self, name: str, work: Workspace) -> None:
        """Mark the gradient of `name` ready, now or with the deferred work of `work`."""
        if work.deferred is None:
            self.parameters.mark_ready(name)
        else:
            work.deferred.append(functools.partial(self.parameters.mark_ready, name))


class GELU(Layer):
    """Gaussian error linear unit in its tanh form (Hendrycks and Gimpel, 2016), with the bias of what comes before.

    Each rank computes with its own columns, of which all its slices have equally many.

    Parameters
    ----------
    name : str
        Prefix of its memory in a workspace; it has no tensors.
    children : sequence of Layer
        None.
    """

    def forward(self, x_nc: Array, work: Workspace, bias_c: Array | None = None) -> Array:
        """``GELU(x + bias)``.

        Parameters
        ----------
        x_nc : array, shape (n, c)
            Overwritten by the derivative, which `backward` needs.
        work : Workspace
            Memory of the micro-batch.
        bias_c : array, shape (c,), optional
            Default: zeros.

        Returns
        -------
        array, shape (n, c)
            In the memory of `work`; in half precision if products round it and `gives_bits` is set.
        """
        if bias_c is None:
            bias_c = work.scratch("no bias", (x_nc.shape[1],), work.dtype)
            bias_c.fill(0)
        y_nc = self._save_result(work, *x_nc.shape)
        work.kept[self.role] = x_nc
        for x, bias, y in zip(self._apart(x_nc), self._cut(bias_c), self._apart(y_nc), strict=True):
            self.ops.gelu(x, bias, y)
        return y_nc

    def backward(self, dy_nc: Array, work: Workspace, dbias_c: Array | None = None) -> Array:
        """Gradient with respect to `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, c)
            Gradient of the loss with respect to the output; overwritten by the result.
        work : Workspace
            That of the forward pass.
        dbias_c : array, shape (c,), optional
            The column sums of the result are added to it.

        Returns
        -------
        array, shape (n, c)
            `dy_nc` itself.
        """
        if dbias_c is None:
            dbias_c = work.scratch("no bias", (dy_nc.shape[1],), work.dtype)
            dbias_c.fill(0)
        slope_nc = work.kept[self.role]
        for dy, slope, dbias in zip(self._apart(dy_nc), self._apart(slope_nc), self._cut(dbias_c), strict=True):
            self.ops.gelu_backward(dy, slope, dbias)
        return dy_nc

    def _apart(self, x_nc: Array) -> Sequence[Array]:
        return self.tensor.slices.column_slices(x_nc, x_nc.shape[1] * self.tensor.size)

    def _cut(self, bias_c: Array) -> Sequence[Array]:
        return self.tensor.slices.cut(bias_c, bias_c.size * self.tensor.size, 0)


# Dropout (Srivastava et al., 2014), with masks that are a function of the seed, the step, the sample and the layer.


@dataclass(frozen=True)
class Draws:
    """The key of the masks of a micro-batch, apart from the layer."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the number of each sequence in the data
    length: int  # tokens of a sequence


class Dropout(Layer):
    """Sets a random part of the channels to 0, and multiplies the others so that the mean stays.

    The mask of a sequence is keyed by seed, step, number of the sample, and name, and counted by position and channel:
    it is the same in every layout, in whatever order samples come, and after a resume.  No mask is stored.

    Each rank computes with its own rows.

    Parameters
    ----------
    name : str
        Its key, and the prefix of its memory in a workspace; it has no tensors.
    rate : float
        The part that becomes 0, at least 0 and below 1.

    Raises
    ------
    TypeError, ValueError
        If the rate is no such number.
    """

    def __init__(self, name: str, rate: float) -> None:
        super().__init__(name)
        self.rate: float = checked_rate(rate)

    def apply(self, x_nc: Array, work: Workspace) -> Array:
        """Drop channels, in place: the same function forward and backward, since it is linear and its own adjoint.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows that this rank holds.
        work : Workspace
            Of the micro-batch; without `Workspace.draws`, as outside of training, nothing is dropped.

        Returns
        -------
        array, shape (n, width)
            `x_nc` itself.

        Raises
        ------
        ValueError
            If there are more rows than the samples of `Workspace.draws` have.
        """
        draws: Draws | None = work.draws
        if draws is None or not self.rate:
            return x_nc
        first = self.tensor.first_row(work.rows)
        if first + len(x_nc) > len(draws.samples) * draws.length:
            raise ValueError(
                f"x_nc has {len(x_nc)} rows from row {first} on, but {len(draws.samples)} samples of length="
                f"{draws.length} have {len(draws.samples) * draws.length}"
            )
        # Most samples have many rows: one key each.
        keys_b = np.array(
            [key(draws.seed, "dropout", draws.step, each, self.name) for each in draws.samples], np.uint64
        )
        samples_n, positions_n = _places(first, first + len(x_nc), draws.length, self.module)
        self.ops.drop(x_nc, self.module.asarray(keys_b.view(np.int64))[samples_n], positions_n, self.rate)
        return x_nc


# One entry serves all layers of a model, forward and backward.
@functools.lru_cache(maxsize=16)
def _places(start: int, stop: int, length: int, module: Any) -> tuple[Array, Array]:
    """For the rows from `start` to `stop`: the number of the sequence, and the position in it."""
    rows_n = np.arange(start, stop)
    return module.asarray(rows_n // length), module.asarray(rows_n % length)


def checked_rate(rate: Any) -> float:
    """`rate` as a float of at least 0 and below 1; raises TypeError or ValueError if it is not."""
    return number("dropout", rate, least=0, below=1)
