"""Parameters: named tensors that are views into one flat buffer, the only link between layers and optimizers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.layout.boxes import Box
from mpishard.layout.local_layout import WHOLE, LocalLayout, ModelParallelRank
from mpishard.layout.specs import ParameterSpec
from mpishard.parameters.carried_state import CarriedState
from mpishard.parameters.flat_arrays import check_flat, flat_of_tensors
from mpishard.parameters.gradient_buckets import make_buckets
from mpishard.parameters.gradient_reducer import GradientReducer
from mpishard.parameters.tensor_layout import TensorLayout
from mpishard.parameters.zero3_units import ShardedUnits

Array = Any


class FlatParameters:
    """One flat parameter buffer, one flat gradient buffer, and named views into both.

    Not collective, unless a method says otherwise.  The class is long and has many members since users, layers and
    optimizers share it; its methods are a line or two over the layout, the units of ZeRO-3 and the gradients.

    Parameters
    ----------
    specs : sequence of ParameterSpec
        The tensors of the whole model, in the order in which it uses them; they are stored in this order.  A tensor
        that several stages list is tied between them, see `mpishard.layout.specs.merge_ties`.
    dtype : dtype
        float32 or float64.
    module : module
        ``numpy`` (default) or ``cupy``: where the buffers live.
    place : ModelParallelRank
        Decides which tensors, and which slices of them, this rank holds; default: all.
    units : sequence of sequences of str
        Names of consecutive tensors that are used together; under ZeRO-3 they are gathered together.  Default: all
        tensors are one unit.
    sharded_over : Axis, optional
        From the start hold only an even share of every unit (ZeRO-3), never all parameters at once.

    Attributes
    ----------
    layout : TensorLayout
        Which tensors are held here, and where they are in the flat buffer.
    specs, place, local, pieces, units, size
        Those of the layout.
    held : 1-D array
        What is always held here: all parameters of the model-parallel rank, or this rank's share under ZeRO-3.
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
        By name what the model computes beside its tensors, such as its rate of dropout, and how.  The model sets it;
        ranks compare it when training begins and with each step.
    carried : CarriedState or None
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
    def over(cls, flat: Array, specs: Sequence[ParameterSpec] | None = None) -> FlatParameters:
        """Named views of an existing flat array, which is not copied.

        Parameters
        ----------
        flat : 1-D array
            Contiguous, float32 or float64, of NumPy or CuPy.
        specs : sequence of ParameterSpec, optional
            Names and shapes, in order; default: one tensor named ``"parameters"``.

        Returns
        -------
        FlatParameters
            Its `flat` is the array.

        Raises
        ------
        TypeError, ValueError
            If the array is not as above, or the specs do not have its size.
        """
        check_flat("parameters", flat)
        layout = TensorLayout([ParameterSpec("parameters", (flat.size,))] if specs is None else specs)
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
        self.units: list[tuple[int, int]] = layout.units
        self.size: int = layout.size
        self.second_uses: dict[str, int] = {}
        self.lent = False
        self.loss_scale: float = 1.0
        self.step: int = 0
        self.layout_dependence: str = ""
        self.sums_by_mpi: bool = False
        self.model_settings: Mapping[str, str] = {}
        self.carried: CarriedState | None = None

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
        buckets = make_buckets(self.pieces, max(1, self.size), self.layout.gradient_runs())
        self.gradients: GradientReducer = GradientReducer(self.pieces, buckets, self.like)

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
        """Bytes of parameters held now, units gathered for use included.  Not collective."""
        return int(self.held.nbytes) if self.sharded is None else self.sharded.nbytes

    @functools.cached_property
    def fingerprint(self) -> int:
        """A hash of 62 bits of the specs, their order, and the dtype."""
        return _fingerprint(self.specs, self.dtype.name)

    @functools.cached_property
    def whole_fingerprint(self) -> int:
        """A hash of 62 bits of names, shapes and dtype of the whole model's tensors, the same on every mesh."""
        return _fingerprint(sorted((spec.name, spec.shape) for spec in self.specs), self.dtype.name)

    @functools.cached_property
    def model_fingerprint(self) -> int:
        """A hash of 62 bits of `model_settings`."""
        return _fingerprint(sorted(self.model_settings.items()))

    def digest(self) -> int:
        """A hash of 62 bits of the values held here.  Not collective.

        Returns
        -------
        int
            Equal for equal bits of `held`.
        """
        import xxhash  # imported at the first use, not with the package

        return int(xxhash.xxh3_64_intdigest(arrays.to_host(self.held).data)) >> 2

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
            Start and stop in each dimension of the whole tensor.
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

        Not collective, but all ranks must hold equal values.

        Parameters
        ----------
        axis : Axis
            The ranks that share each unit evenly.
        """
        if self.sharded is not None:
            return
        sharded = ShardedUnits(self.pieces, self.units, axis, self.like)
        sharded.take(self.flat)
        self._bind(None, sharded)

    def renew(self) -> None:
        """Make new gradients without a reducer; if sharded, also new shares of zeros over the axis as it is now."""
        sharded = self.sharded
        if sharded is not None:
            sharded = ShardedUnits(self.pieces, self.units, sharded.axis, self.like)
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


def _fingerprint(*facts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little") >> 2
