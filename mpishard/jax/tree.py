"""A pytree of parameters as FlatParameters, and back: its leaves by name, checked."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpishard.arguments import listed, mark
from mpishard.backend import array as arrays
from mpishard.backend.array import joined, ready
from mpishard.backend.kinds import backend_of
from mpishard.backend.process import blas_threads
from mpishard.comm.axis import Axis
from mpishard.io import log
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import CarriedState, FlatParameters

Array = Any


# Arrays of mpishard and arrays of JAX that share their memory, and the precision and threads of XLA.

_THREADS = "tf_XLAEigen"  # the name of those of XLA that divide an operation


def as_jax(array: Array) -> Any:
    """An array of JAX of the same shape, dtype and device over the memory of an array, NumPy or CuPy and contiguous.

    JAX takes its arrays for constant: whoever changes the memory must have waited for all that was computed from it.
    JAX shares memory that begins at a multiple of 64 bytes on the host and of 16 on a GPU, as that of FlatParameters
    does; other memory is copied.  Raises ValueError for float64 if JAX would make it float32.
    """
    check_precision(array.dtype)
    if isinstance(array, np.ndarray):
        if array.ctypes.data % 64:
            array = arrays.aligned_copy(array)  # which JAX would make with a warning, or without
    elif backend_of(array).address(array) % 16:
        array = arrays.aligned_copy(array)  # JAX would share it, and each program of XLA refuse it
    return jnp.from_dlpack(array)


def as_array(values: Any, like: Array) -> Array:
    """An array of the kind of `like`, only to be read, over the memory of an array of JAX, once that is computed.

    `values` is of JAX on the device of `like`; nothing is copied, unless it is NumPy's for a device.  XLA takes memory
    that nobody holds without waiting for CuPy's stream: who reads the array waits (`mpishard.backend.array.ready`)
    before `values` and it are gone.
    """
    module = arrays.module_of(like)
    if module is np:
        found: Array = np.asarray(values)
        return found
    return (
        module.asarray(values) if isinstance(values, np.ndarray) else module.from_dlpack(jax.block_until_ready(values))
    )


def check_precision(dtype: Any) -> None:
    """Raise ValueError if JAX would compute in float32 with float64 parameters."""
    config: Any = jax.config
    if np.dtype(dtype) == np.float64 and not config.jax_enable_x64:
        raise ValueError(
            "parameters are float64, and JAX makes float32 of them: begin with "
            'jax.config.update("jax_enable_x64", True), or give float32 parameters'
        )


def xla_threads() -> int | None:
    """The number of threads with which XLA divides an operation on the host.

    None before JAX has made its first array, and where the system does not show them.
    """
    found = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found += task.read_text(errors="replace").strip() == _THREADS  # some names are cut within a letter
    return found or None


# -- leaves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeLeaves:
    """The leaves of a pytree whose parameters can be trained, in the order of the tree.

    A name is the path to the leaf, such as ``layers.0.weight``; an array alone has the name ``parameters``.
    """

    structure: Any
    named: dict[str, Any]
    module: Any  # which has arrays on their device: NumPy or CuPy

    @classmethod
    def of(cls, tree: Any) -> TreeLeaves:
        """The checked leaves of a pytree of arrays of JAX or NumPy; nothing is changed.

        Raises TypeError if a leaf is no array, or they are not all float32 or all float64.  Raises ValueError if the
        tree is empty, two leaves have one name, they are on several devices, on a platform other than CPU and NVIDIA
        or AMD GPU, or deleted, or they are float64 and JAX computes in float32.  Raises ModuleNotFoundError if they
        need CuPy and it is not installed.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        if not paths:
            raise ValueError(f"no parameters: this {type(tree).__name__} has no leaves")
        named: dict[str, Any] = {}
        for path, leaf in paths:
            name = name_of(path)
            if name in named:
                raise ValueError(f"two parameters have the name {name!r}; give the keys of dicts other names")
            named[name] = leaf
        for name, leaf in named.items():
            _check_leaf(name, leaf)
        _check_dtypes(named)
        return cls(structure, named, _module_of_device(named))

    @property
    def described(self) -> dict[str, str]:
        """The properties that must be the same on all ranks, as text by name."""
        each = [f"{name} {leaf.shape} {leaf.dtype}" for name, leaf in self.named.items()]
        text, size = "\n".join(each), sum(leaf.size for leaf in self.named.values())
        return {"parameters": f"{len(each)} arrays of {size} elements [{mark(text)}]"}


def name_of(path: Any) -> str:
    """The name of a leaf: the keys of its path with dots between them."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"


def _check_leaf(name: str, leaf: Any) -> None:
    """Raise unless this is an array with values."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise TypeError(
            f"parameter {name!r} is a {type(leaf).__name__}, and must be an array of JAX or NumPy; keep what is not "
            "trained out of the tree, as equinox.partition does"
        )
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(f"parameter {name!r} has no values under jit, grad or vmap: give the tree outside of them")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            f"parameter {name!r} was deleted, as jit with donate_argnums does; give an array that still exists"
        )


def _check_dtypes(named: dict[str, Any]) -> None:
    """Raise TypeError unless all leaves are float32, or all float64."""
    of_dtype: dict[str, str] = {}
    for name, leaf in named.items():
        of_dtype.setdefault(str(leaf.dtype), name)
    unfit = {dtype: name for dtype, name in of_dtype.items() if dtype not in ("float32", "float64")}
    found = " and ".join(f"{name!r} is {dtype}" for dtype, name in (unfit or of_dtype).items())
    if unfit:
        raise TypeError(
            f"parameters must be float32 or float64, but {found}; keep what is not trained out of the tree, and cast "
            "to other dtypes in the function"
        )
    if len(of_dtype) > 1:
        raise TypeError(f"parameters must have one dtype, but {found}; cast them: jax.tree.map(jnp.float32, tree)")
    check_precision(next(iter(of_dtype)))


def _module_of_device(named: dict[str, Any]) -> Any:
    """The module that has arrays on the one device of all leaves of JAX; NumPy where all leaves are NumPy's."""
    on: dict[Any, str] = {}
    for name, leaf in named.items():
        if isinstance(leaf, jax.Array):
            for device in leaf.devices():
                on.setdefault(device, name)
    if len(on) > 1:
        found = " and ".join(f"{name!r} on {device}" for device, name in list(on.items())[:3])
        raise ValueError(
            f"all parameters must be on one device, here {found}: jax.device_put(tree, jax.devices()[0]); mpishard "
            "divides over ranks, each with its device"
        )
    platform = next((device.platform for device in on), "cpu")
    if platform == "cpu":
        return np
    if platform not in ("gpu", "cuda", "rocm"):
        raise ValueError(f"parameters are on {platform}, and must be on cpu or gpu: jax.device_put(tree, device)")
    return arrays.device_module()


class TreeState(CarriedState):
    """The parameters of a pytree as FlatParameters, and the structure from which the pytree is made again.

    There are no further values.  The leaves are copied into one flat
    array, and are parameters by their names.  `rank` is of this process on the data axis, once there is an optimizer.
    `unfit` is the error in the gradients of this rank; `step` raises it on all ranks.
    """

    def __init__(self, leaves: TreeLeaves) -> None:
        self.structure: Any = leaves.structure
        specs = [ParameterSpec(name, tuple(leaf.shape)) for name, leaf in leaves.named.items()]
        like = leaves.module.empty(0, str(next(iter(leaves.named.values())).dtype))
        flat = joined([as_array(leaf, like) for leaf in leaves.named.values()])
        ready(flat)  # before the leaves are gone, see `as_array`
        self.parameters: FlatParameters = FlatParameters.over(flat, specs)
        self.parameters.carried = self
        self.rank = 0
        self.unfit: Exception | None = None
        self._names = list(leaves.named)
        self._shapes = [tuple(leaf.shape) for leaf in leaves.named.values()]
        self._copies: Any = jax.jit(lambda flat: jax.tree.map(jnp.copy, self.cut(flat)))
        self._tells = True

    def cut(self, flat: Any) -> Any:
        """The tree of slices of a flat array of JAX; within jit they need no further memory."""
        ends = [(piece.start, piece.start + piece.size) for piece in self.parameters.pieces]
        slices = [flat[start:stop].reshape(shape) for (start, stop), shape in zip(ends, self._shapes, strict=True)]
        return jax.tree.unflatten(self.structure, slices)

    @property
    def tree(self) -> Any:
        """The tree with the values that the parameters have now, copied."""
        return jax.block_until_ready(self._copies(as_jax(self.parameters.flat)))

    def leaves_of(self, gradients: Any) -> list[Any]:
        """The leaves of gradients, checked to be like the parameters; also under jit."""
        paths, structure = jax.tree_util.tree_flatten_with_path(gradients)
        if structure != self.structure:
            raise ValueError(f"gradients must have the structure of the parameters: {self._other(paths, structure)}")
        leaves = [leaf for _, leaf in paths]
        for name, shape, leaf in zip(self._names, self._shapes, leaves, strict=True):
            if not hasattr(leaf, "dtype") or tuple(leaf.shape) != shape or leaf.dtype != self.parameters.dtype:
                found = f"{leaf.dtype} of shape {tuple(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
                raise TypeError(
                    f"the gradient of {name!r} is {found}, and its parameter {self.parameters.dtype} of shape {shape}"
                )
        return leaves

    def add(self, leaves: list[Any]) -> None:
        """Add gradients to those of the parameters, and let each travel.  It may wait for other ranks under ZeRO-2."""
        reducer, scale = self.parameters.gradients, self.parameters.loss_scale
        for name, leaf in zip(reversed(self._names), reversed(leaves), strict=True):
            view, adds = reducer.gradient(name)
            gradient = as_array(leaf, view)
            if scale != 1.0:
                gradient = gradient * view.dtype.type(scale)
            if adds:
                view += gradient
            else:
                view[...] = gradient
            reducer.mark_ready(name)
        ready(view)  # before the leaves are gone, see `as_array`

    def _other(self, paths: Any, structure: Any) -> str:
        """How a structure differs."""
        found = [name_of(path) for path, _ in paths]
        missing = [repr(name) for name in self._names if name not in found]
        more = [repr(name) for name in found if name not in self._names]
        differences = [f"{listed(missing)} missing"] if missing else []
        differences += [f"{listed(more)} unknown"] if more else []
        return "; ".join(differences) or f"{self.structure} there, {structure} here"

    # -- `CarriedState` -----------------------------------------------------------------------------------------------

    @property
    def arithmetic(self) -> dict[str, str]:
        """The version of JAX, and the threads that decide where XLA cuts a product."""
        jax.devices()  # which makes the threads, if there was no array of JAX yet: a tree may be of NumPy
        return {"JAX": jax.__version__, "XLA threads": str(xla_threads() or "unknown")}

    def check_intact(self) -> None:
        """Raise the error in the gradients of this rank."""
        if self.unfit is not None:
            raise self.unfit

    def check_split(self, tensor: int, pipeline: int) -> None:
        """Raise ValueError unless all ranks are data-parallel."""
        if tensor * pipeline > 1:
            raise ValueError("a function of JAX cannot be split over tensor or pipeline ranks")

    def broadcast(self, axis: Axis) -> None:
        """Note the rank, and warn of threads that disturb the other ranks; there are no values to spread."""
        self.rank = axis.rank
        threads, share = xla_threads() or 0, blas_threads() or 0
        if self._tells and axis.rank == 0 and threads > share > 0:
            log.inform(
                f"XLA has {threads} threads on rank 0, whose share of the cores is {share}: make the mesh before the "
                f"first array of JAX, or set NPROC={share}"
            )
        self._tells = False


def parameters_of(tree: Any) -> FlatParameters:
    """A pytree of parameters as FlatParameters: one flat array, and named views into it.

    Not collective.  This is for your own code; `as_distributed` and `problem` take trees.

    Parameters
    ----------
    tree : pytree
        Of arrays of JAX or NumPy, all float32 or all float64.  They are copied, once.

    Returns
    -------
    FlatParameters
        A leaf has the path to it as its name, such as ``layers.0.weight``.  ``jnp.from_dlpack(parameters.flat)`` shares
        the memory with JAX.

    Raises
    ------
    TypeError, ValueError
        If a leaf is no array, or of another dtype or device than others, or the tree is empty.
    """
    return TreeState(TreeLeaves.of(tree)).parameters


def tree_of(parameters: FlatParameters) -> Any:
    """The pytree of parameters that `parameters_of` has made, or that a result of `optimize` has.

    Not collective.

    Parameters
    ----------
    parameters : FlatParameters
        Such as ``result.parameters``.

    Returns
    -------
    pytree
        Of arrays of JAX, copies: later steps do not change them.

    Raises
    ------
    TypeError
        If the parameters were not made of a pytree.
    """
    state = getattr(parameters, "carried", None)
    if not isinstance(state, TreeState):
        raise TypeError(f"tree_of needs parameters that were made of a pytree, got a {type(parameters).__name__}")
    return state.tree
