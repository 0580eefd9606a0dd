"""Parameters: named tensors that are views into one flat buffer, the only link between layers and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.array import FLOATS, is_array
from mpishard.comm.agreement import fingerprint
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import Box
from mpishard.layout.tensors import WHOLE, LocalLayout, ModelParallelRank, ParameterSpec
from mpishard.parameters.buckets import make_buckets
from mpishard.parameters.reducer import GradientReducer
from mpishard.parameters.tensor_layout import TensorLayout
from mpishard.parameters.zero3_units import ShardedUnits

Array = Any


# State that comes with the parameters of a model, such as the buffers of a PyTorch module.


class CarriedState:
    """State of a model besides its parameters, which no optimizer changes and which a run needs to continue.

    It is small: its values are facts of a `RunState`, the same on all ranks after `synchronize`. Here there are none.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """Copies of its values, as facts of a `RunState`."""
        return {}

    @property
    def arithmetic(self) -> Mapping[str, str]:
        """The additions of its library to the facts on which bits depend, see `mpishard.backend.process`.

        Empty where NumPy and BLAS say all.
        """
        return {}

    @property
    def calls(self) -> Mapping[str, str]:
        """What all ranks must have done alike since the last step, as text by name; `step` compares the ranks."""
        return {}

    def check_intact(self) -> None:
        """Raise ValueError if the model was changed so that its parameters are not the optimizer's any more.

        `step` compares the ranks.
        """

    def check_parameters(self) -> None:
        """Raise ValueError if the model has other parameters than those of the flat array, which a save would miss."""

    def check_split(self, tensor: int, pipeline: int) -> None:
        """Raise ValueError if the model cannot be made for a mesh of so many tensor and pipeline ranks."""

    def check_reproducible(self, pipeline: int) -> None:
        """Raise ValueError if the bits of a gradient would be others on so many pipeline ranks."""

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless `restore` can read these facts of a saved state."""

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the values from facts of a saved state."""

    def broadcast(self, axis: Axis) -> None:
        """Copy the values, and what else the model has besides its parameters, from rank 0 of the data axis.

        Collective.
        """

    def synchronize(self, axis: Axis) -> None:
        """Make the values equal on all ranks, after each update that all take together. Collective over the axis."""

    def consolidate(self, mesh: Mesh) -> None:
        """Make the values equal on all ranks before a save, and change none that are.  Collective over the mesh.

        Raises ValueError on all ranks if values of one have another shape or dtype now.
        """

    def round_masters(self) -> None:
        """Give parameters of another dtype the values of their masters in the flat array, which have changed."""

    def release(self) -> None:
        """Let the model go: it was made again for another mesh, and this one is used no more."""


# Flat arrays that callers give: checked, or made of tensors.


def check_flat(what: str, array: Array, *, written: bool = False) -> None:
    """Raise unless `array` is a contiguous 1-D float32 or float64 array, and writeable where `written`.

    `what` names it in messages. Raises TypeError if it is no array or has another dtype, ValueError if it is not flat,
    contiguous and aligned, is read-only, or is on another GPU than the current one.
    """
    if type(array) is np.ndarray and array.ndim == 1 and array.dtype in FLOATS and array.flags.carray:
        return  # contiguous, aligned and writeable: asked at every step
    if not is_array(array):
        raise TypeError(f"{what} must be a flat NumPy or CuPy array, got {type(array).__name__}")
    if array.ndim != 1:
        raise ValueError(f"{what} must be flat (1-D), got shape {array.shape}; pass array.reshape(-1)")
    if array.dtype not in FLOATS:
        raise TypeError(f"{what} must be float32 or float64, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} must be contiguous in memory; pass a copy (array.copy())")
    if not getattr(array.flags, "aligned", True):
        raise ValueError(
            f"{what} must begin at a multiple of {array.itemsize} bytes in memory, as a view of bytes may not; "
            "pass a copy (array.copy())"
        )
    if written and not getattr(array.flags, "writeable", True):
        raise ValueError(f"{what} are read-only, but are written to; pass a copy (array.copy())")
    arrays.check_current(array)


def flat_of_tensors(tensors: Mapping[str, Any], module: Any) -> tuple[Array, list[ParameterSpec]]:
    """A new flat array with copies of tensors, and their names and shapes: see `FlatParameters.of`."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError("there are no tensors to name: the mapping is empty")
    values = {name: _from_dlpack(name, tensor, module) for name, tensor in tensors.items()}
    dtypes = sorted({str(value.dtype) for value in values.values()})
    if len(dtypes) > 1:
        raise TypeError(f"tensors must be all float32 or all float64, got {' and '.join(dtypes)}")
    flat = arrays.joined(list(values.values()))
    return flat, [ParameterSpec(name, each.shape) for name, each in values.items()]


def _from_dlpack(name: str, tensor: Any, module: Any) -> Array:
    try:
        return module.from_dlpack(tensor)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = f"{type(tensor).__name__} of {tensor.dtype}" if hasattr(tensor, "dtype") else type(tensor).__name__
        raise TypeError(
            f"tensor {name!r} is a {kind}, and must be one of float32 or float64 that {module.__name__}.from_dlpack "
            f"takes: {error}"
        ) from None


class FlatParameters:
    """The parameters of a model on one rank by name: views into one flat buffer, or under ZeRO-3 into gathered units.

    Their gradients are in `gradients`: one flat buffer, or under ZeRO-2 and 3 memory for a bucket at a time.  Methods
    that are collective say so.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        The tensors of the whole model, in the order in which it uses them; they are stored in this order.  A tensor
        that several stages list is tied between them, see `mpishard.layout.tensors.merge_ties`.
    dtype : dtype
        float32 or float64.
    module : module
        ``numpy`` (default) or ``cupy``: where the buffers live.
    place : ModelParallelRank
        Decides which tensors, and which slices of them, this rank holds; default: all.
    units : sequence of sequences of str, optional
        Names of consecutive tensors that are used together; under ZeRO-3 they are gathered together.  Default: all
        tensors are one unit.
    sharded_over : Axis, optional
        From the start hold only an even share of every unit (ZeRO-3), never all parameters at once.

    Attributes
    ----------
    layout : TensorLayout
        Which tensors are held here, and where they are in the flat buffer.
    specs, place, local, pieces, holding, units, size
        Those of the layout.
    held : 1-D array
        What is always held here: all parameters of the model-parallel rank, or this rank's share under ZeRO-3.
    sharded : ShardedUnits or None
        This rank's shares and the units that are gathered now, under ZeRO-3; else None.
    like : array
        An empty array of the parameters' dtype and device.
    dtype : dtype
    gradients : GradientReducer
    second_uses : dict of str to int
        Tied tensors with two uses on this rank, and the virtual stage of the second one, which asks for its gradient by
        ``gradient(name, second=True)``.  A model sets it; reproducible runs keep the two apart.
    lent : bool
        Whether the flat buffer is the caller's, so that it must stay whole.
    step : int
        The number of steps before this one, for models with random numbers, which they key by it; a training loop sets
        it.
    loss_scale : float
        A backward pass multiplies the gradient of its loss by this, so that half-precision gradients keep small
        values.  The optimizer sets it, and divides it out again.
    layout_dependence : str
        What makes the bits of the model depend on the layout, in words, such as a rounding where stages meet; empty if
        nothing does.  The model sets it; ``reproducible=True`` refuses such a model.
    sums_by_mpi : bool
        Whether MPI takes the sums of the model over its tensor ranks, so that their number decides bits.  The model
        sets it; a reproducible run then keeps this number.
    model_settings : mapping of str to str
        By name what the model computes in addition to its tensors, such as its rate of dropout, and how.  The model
        sets it; ranks compare it when training begins and with each step.
    carried : CarriedState
        State of the model besides the parameters, such as the buffers of a PyTorch module.  The model sets it.

    Raises
    ------
    TypeError
        If `dtype` is neither, `specs` or `units` are no lists of the above, or `module` is no module of arrays.
    RuntimeError
        For CuPy without a GPU.
    ValueError
        If two tensors have one name, ties do not fit each other, or a tensor is in no unit.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        dtype: Any = np.float32,
        *,
        module: Any = np,
        place: ModelParallelRank = WHOLE,
        units: Sequence[Sequence[str]] | None = None,
        sharded_over: Axis | None = None,
    ) -> None:
        dtype = np.dtype(dtype)
        if dtype not in arrays.FLOATS:
            raise TypeError(f"parameters must be float32 or float64, got {dtype}")
        arrays.check_module(module)
        self._set_layout(TensorLayout(specs, place, units))
        if sharded_over is not None:
            self.like: Array = module.zeros(0, dtype)
            self._bind(None, ShardedUnits(self.pieces, self.units, sharded_over, self.like))
        else:
            self._bind(module.zeros(self.size, dtype), None)

    @classmethod
    def over(
        cls, flat: Array, specs: Sequence[ParameterSpec] | None = None, place: ModelParallelRank = WHOLE
    ) -> FlatParameters:
        """Named views of an existing flat array, which is not copied.

        Parameters
        ----------
        flat : 1-D array
            Contiguous, float32 or float64, of NumPy or CuPy.
        specs : sequence of ParameterSpec, optional
            Names and shapes, in order; default: one tensor named ``"parameters"``.
        place : ModelParallelRank
            As for the constructor; the array has what this rank holds.

        Returns
        -------
        FlatParameters
            Its `flat` is the array.

        Raises
        ------
        TypeError, ValueError
            If the array is not as described, or the specs do not have its size.
        """
        check_flat("parameters", flat)
        layout = TensorLayout([ParameterSpec("parameters", (flat.size,))] if specs is None else specs, place)
        if layout.size != flat.size:
            raise ValueError(f"the specs name {layout.size} elements, but the flat array has {flat.size}")
        self = cls.__new__(cls)
        self._set_layout(layout)
        self._bind(flat, None)
        self.lent = True
        return self

    @classmethod
    def of(cls, tensors: Mapping[str, Any], *, module: Any = np) -> FlatParameters:
        """Named views of a new flat array that holds copies of tensors, such as those of a PyTorch module.

        The module then uses the views ``parameters[name]``, which the optimizer updates.

        Parameters
        ----------
        tensors : mapping of str to tensor
            Anything that ``module.from_dlpack`` takes, e.g. ``p.detach()`` of PyTorch's parameters; all of one dtype.
        module : module
            ``numpy`` (default) or ``cupy``: where the tensors are.

        Returns
        -------
        FlatParameters
            With the tensors in the order of the mapping.

        Raises
        ------
        TypeError
            If a tensor cannot be taken, or they are not of one dtype, float32 or float64.
        ValueError
            If there is no tensor.
        """
        return cls.over(*flat_of_tensors(tensors, module))

    def _set_layout(self, layout: TensorLayout) -> None:
        self.layout = layout
        self.specs: tuple[ParameterSpec, ...] = layout.specs
        self.place: ModelParallelRank = layout.place
        self.local: tuple[ParameterSpec, ...] = layout.local
        self.pieces: LocalLayout = layout.pieces
        self.holding: LocalLayout = layout.holding
        self.units: list[tuple[int, int]] = layout.units
        self.size: int = layout.size
        self.second_uses: dict[str, int] = {}
        self.lent = False
        self.loss_scale: float = 1.0
        self.step: int = 0
        self.layout_dependence: str = ""
        self.sums_by_mpi: bool = False
        self.model_settings: Mapping[str, str] = {}
        self.carried: CarriedState = CarriedState()

    def _bind(self, flat: Array | None, sharded: ShardedUnits | None) -> None:
        self._flat = flat
        self.sharded = sharded
        if flat is not None:
            self.held: Array = flat
            self.like = flat[:0]
            self._views = {p.name: flat[p.start : p.start + p.size].reshape(p.shape) for p in self.pieces}
        else:
            assert sharded is not None
            self.held = sharded.shard
            self._views = sharded.views
        self.dtype: np.dtype = np.dtype(self.like.dtype)
        self.gradients: GradientReducer = gradients_of_one_rank(self)

    @property
    def flat(self) -> Array:
        """The flat buffer of all parameters of this model-parallel rank.

        Raises
        ------
        ValueError
            Under ZeRO-3, where there is no such array.
        """
        if self._flat is None:
            raise ValueError(
                "these parameters are sharded over the data axis (ZeRO-3) and have no flat array; "
                "gather_full_parameters() of the model makes one, `sharded.shard` is this rank's share"
            )
        return self._flat

    @property
    def nbytes(self) -> int:
        """Bytes of parameters held now, units gathered for use included."""
        return int(self.held.nbytes) if self.sharded is None else self.sharded.nbytes

    @functools.cached_property
    def fingerprint(self) -> int:
        """A hash of 62 bits of the specs, their order, and the dtype."""
        return fingerprint({"tensors": repr(self.specs), "dtype": self.dtype.name})

    @functools.cached_property
    def whole_fingerprint(self) -> int:
        """A hash of 62 bits of names, shapes and dtype of the whole model's tensors, the same on every mesh."""
        tensors = sorted((spec.name, spec.shape) for spec in self.specs)
        return fingerprint({"tensors": repr(tensors), "dtype": self.dtype.name})

    @functools.cached_property
    def model_fingerprint(self) -> int:
        """A hash of 62 bits of `model_settings`."""
        return fingerprint(self.model_settings)

    def digest(self) -> int:
        """A hash of 62 bits of the values held here.

        Returns
        -------
        int
            Equal for equal bits of `held`.
        """
        return arrays.digest(self.held)

    @property
    def description(self) -> str:
        """The number and size of the tensors, as a text."""
        return self.layout.describe(self.dtype)

    def __getitem__(self, name: str) -> Array:
        """The slice of tensor `name` that this rank holds.

        Ask again for every use: under ZeRO-3 it exists only between `use` and `release`, each time in other memory.
        """
        try:
            return self._views[name]
        except KeyError:
            if self.sharded is None or name not in self:
                raise
            raise RuntimeError(
                f"parameter {name!r} is sharded (ZeRO-3) and not gathered now; call use([{name!r}]) on all ranks before"
            ) from None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The flat buffer, for NumPy's functions: ``np.save(path, parameters)``."""
        return np.array(self.flat, dtype, copy=copy)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.piece_of)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.piece_of

    def __len__(self) -> int:
        return len(self.layout.piece_of)

    def box(self, name: str) -> Box:
        """The box of this rank's slice of a tensor.

        Parameters
        ----------
        name : str
            A tensor that is held here.

        Returns
        -------
        tuple of (int, int)
            Start and stop in each dimension of the whole tensor; of a packed one, whose slice is several boxes, of the
            slice.
        """
        return self.layout.piece_of[name].box

    def assign(self, name: str, values: Array) -> None:
        """Set this rank's slice of a tensor; also for sharded parameters.

        Parameters
        ----------
        name : str
            A tensor that is held here.
        values : array
            Of the shape of the slice, on its device; copied.
        """
        if self.sharded is None:
            self._views[name][...] = values
        else:
            self.sharded.assign(self.layout.piece_of[name], self.layout.unit_of[name], values)

    def use(self, names: Sequence[str]) -> None:
        """Gather tensors under ZeRO-3; else nothing happens.

        Collective over the data axis under ZeRO-3.

        Parameters
        ----------
        names : sequence of str
            Their whole units are gathered; each use takes one `release`.
        """
        if self.sharded is not None:
            self.sharded.use(self.layout.units_of(names))

    def prefetch(self, names: Sequence[str]) -> None:
        """Start to gather the tensors of the next `use`.

        Collective like `use`.

        Parameters
        ----------
        names : sequence of str
            As for `use`.
        """
        if self.sharded is not None:
            self.sharded.prefetch(self.layout.units_of(names))

    def release(self, names: Sequence[str]) -> None:
        """Free gathered tensors that are not needed for now.

        Parameters
        ----------
        names : sequence of str
            As for `use`.

        Raises
        ------
        RuntimeError
            If they are not in use.
        """
        if self.sharded is not None:
            self.sharded.release(self.layout.units_of(names))

    def shard(self, axis: Axis) -> None:
        """Keep only this rank's share of every unit from now on.

        All ranks must hold equal values.

        Parameters
        ----------
        axis : Axis
            The ranks that share each unit evenly.
        """
        if self.sharded is not None:
            return
        sharded = ShardedUnits(self.pieces, self.units, axis, self.like)
        sharded.fill(self.flat)
        self._bind(None, sharded)

    def renew(self) -> None:
        """Make new gradients without a reducer; if sharded, also new shares of zeros over the axis as it is now."""
        sharded = self.sharded
        if sharded is not None:
            memory = sharded.memory
            sharded.free_all()  # an error, as at a death of a rank, leaves some gathered
            sharded = ShardedUnits(self.pieces, self.units, sharded.axis, self.like)
            sharded.memory = memory
        self._bind(self._flat, sharded)

    def gather(self) -> Array:
        """All parameters of this model-parallel rank as a new flat array.

        Collective over the data axis under ZeRO-3.

        Returns
        -------
        1-D array
            Of `size` elements, of the dtype and device of the parameters.
        """
        if self.sharded is None:
            return self.flat.copy()
        flat = arrays.empty(self.size, self.dtype, like=self.like)
        self.sharded.gather(flat)
        return flat

    def gradient(self, name: str, second: bool = False) -> tuple[Array, bool]:
        """The memory for the gradient of a tensor in a backward pass.

        Ask again in every pass: under ZeRO-2 the memory changes.

        Parameters
        ----------
        name : str
            A tensor that is held here.
        second : bool
            Whether it is the second use of the tensor on this rank, see `second_uses`.

        Returns
        -------
        (array, bool)
            A view of the shape of the slice, and whether to add to it.  If False, it holds garbage and must be
            overwritten.
        """
        return self.gradients.gradient(name, second)

    def mark_ready(self, name: str) -> None:
        """Mark a gradient as complete in this backward pass, so that its reduction may start.

        The order of the calls does not matter: buckets are reduced in a fixed order.  It may wait for other ranks
        (ZeRO-2).

        Parameters
        ----------
        name : str
            A tensor that is held here.
        """
        self.gradients.mark_ready(name)

    def reset_gradients(self) -> None:
        """Discard the gradients; the next backward pass starts from zero.

        Optimizers do this after each step.
        """
        self.gradients.reset()


def gradients_of_one_rank(parameters: FlatParameters) -> GradientReducer:
    """New gradients of parameters, in one flat buffer, which no sums over ranks take."""
    layout = parameters.layout
    buckets = make_buckets(layout.pieces, max(1, layout.size), layout.gradient_runs())
    return GradientReducer(layout.pieces, buckets, parameters.like)


class Model(Protocol):
    """A model: its parameters, and a function of a batch that writes their gradients.

    ``loss_and_gradient(*batch)`` returns the loss summed over the batch. It writes the gradients to the views that
    ``parameters.gradient(name)`` returns, or adds to them.

    A model that keeps micro-batches apart, as a pipeline does, also has ``losses_and_gradient(batches)``: the losses of
    several batches, each summed over its samples. In the backward pass each virtual stage calls
    ``parameters.gradients.begin_virtual_stage`` and `end_virtual_stage` for each of them, in their order, as
    `mpishard.pipeline.runtime.Pipeline.train_each` does. With ``reproducible=True`` a training loop passes all
    micro-batches of a rank through a pipeline together; a model without the method is called once a micro-batch.
    """

    @property
    def parameters(self) -> FlatParameters:
        """The parameters that an optimizer trains."""

    @property
    def loss_and_gradient(self) -> Callable[..., float]:
        """The function of a batch."""
