"""The minimisation that a method runs in an optimizer: its numbers, its point, and who evaluates next.

With it the space of its vectors, whose elements are divided over ranks, and its options about each element, cut down to
those that this rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.agreement import fingerprint
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.data_parallel.ownership import spans_of
from mpishard.data_parallel.rank_state import Counters, RankState, cut_full, gather_full
from mpishard.data_parallel.settings import Configured, settings_of_rule
from mpishard.data_parallel.strategies import Strategy, ZeRO1
from mpishard.layout.run_state import Shard, whole_fact
from mpishard.minimizers.elements import preconditioned, whole_limits
from mpishard.minimizers.method import (
    ELEMENTS,
    Limits,
    Method,
    Minimizer,
    Wanted,
    check_metadata,
    lifted,
    warn_projected_start,
)
from mpishard.minimizers.space import Space
from mpishard.parameters.flat import FlatParameters

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState

Array = Any


def limits_of(method: Method, strategy: Strategy, precondition: Callable[[Array], Array] | None) -> Limits:
    """This rank's part of the options of a method; `precondition` is a function of this rank's elements.

    Raises ValueError or TypeError if an option does not fit the parameters; the message names the tensor or the
    element.
    """
    parameters = strategy.parameters

    def own(whole: np.ndarray | None) -> Array | None:
        if whole is None:
            return None
        return arrays.on_device_of(cut_full(whole, parameters, strategy.ownership.own), parameters.like)

    lower, upper, fixed, weights, scaling = map(own, whole_limits(method, parameters.specs, parameters.dtype))
    return Limits(lower, upper, fixed, weights, scaling, precondition)


class ShardedSpace(Space):
    """The elements that this rank updates, end to end; every element of the model counts on one rank.

    Raises ValueError on all ranks if there are more elements than a sum can have.
    """

    def __init__(self, strategy: Strategy) -> None:
        ownership, parameters = strategy.ownership, strategy.parameters
        starts = np.cumsum([0, *(stop - start for start, stop in ownership.own)]).tolist()
        spans = [(starts[own] + start, starts[own] + stop) for own, start, stop in spans_of(ownership.counted_parts)]
        total = sum(spec.size for spec in parameters.specs)
        super().__init__(ownership.size, total, parameters.like, spans)
        self._strategy = strategy

    def add(self, numbers: np.ndarray) -> None:
        """Replace an int64 array by its sum over the ranks.  Collective; one all-reduce."""
        self._strategy.sync_group.all_reduce(numbers.reshape(-1), label="dots")

    def maximize(self, numbers: np.ndarray) -> None:
        """Replace a float64 array without NaN by its maximum over the ranks.  Collective; one all-reduce."""
        self._strategy.sync_group.all_reduce(numbers, op="max", label="dots")

    def whole(self, vector: Array) -> Array:
        """All elements of a vector on every rank, in memory like its own, in the order of the specs.  Collective."""
        strategy = self._strategy
        views = strategy.ownership.counted_views(strategy.ownership.state_views(vector))
        values = np.concatenate([np.empty(0, vector.dtype), *map(arrays.to_host, views)])
        whole = gather_full(strategy.mesh.world, strategy.parameters, strategy.ownership.counted, values)
        return arrays.on_device_of(whole, self.like)

    def own(self, whole: Array) -> Array:
        """This rank's elements of a whole vector of any memory, on the device of the vectors."""
        host = np.asarray(arrays.to_host(whole), self.like.dtype)
        part = cut_full(host, self._strategy.parameters, self._strategy.ownership.own)
        return arrays.on_device_of(part, self.like)


@arrays.elementwise
def _divide(gradient, /, divisor):  # type: ignore[no-untyped-def]
    """``gradient /= divisor``"""
    gradient = gradient / divisor
    return gradient


_METADATA = "minimizer.json"
_BATCHES = "batches"  # in the metadata
_ABOUT_ELEMENTS = ("bounds", "fixed", "inner_product", "preconditioner")


class MethodState:
    """The state of an optimizer with a method in addition to the method's vectors: an `AuxiliaryState`.

    `direction`, `whole`, `publish`, `show_best`, `show_point`, `begin_stage` and `make` are collective over the mesh.
    """

    # Most of its members are those of `AuxiliaryState`.
    may_differ = False
    synchronizes_next_step = True
    compares_next_step = True
    needs_consolidation = False

    def __init__(self, optimizer: Configured, method: Method) -> None:
        self._optimizer = optimizer
        self._method = method
        # Iterations so far, each of which has had a separate batch of samples; stages continue the count.
        self.batches = 0
        self._moved = 0  # elements of the start that were outside of their bounds, until that is said
        self._minimizer: Minimizer | None = None
        self._on_rank: RankState
        self._whole: FlatParameters | None = None

    @property
    def minimizer(self) -> Minimizer:
        """The minimisation, once parameters are bound."""
        assert self._minimizer is not None
        return self._minimizer

    # -- a step -----------------------------------------------------------------------------------------------------

    def gradient(self, divisor: float) -> Array:
        """This rank's elements of the summed gradient, end to end, divided."""
        strategy, gradient = self._on_rank.strategy, self._gradient
        for part, own in zip(strategy.ownership.state_views(gradient), strategy.gradients(), strict=True):
            part[...] = own
        if divisor != 1 and gradient.size:
            _divide(gradient, divisor)
        return gradient

    def own_part(self, flat: Array) -> Array:
        """This rank's elements of a flat array like the parameters, until the next call: maybe the array itself."""
        ownership, gradient = self._on_rank.strategy.ownership, self._gradient
        starts, stops = ([own[side] for own in ownership.own] for side in (0, 1))
        is_plain = flat.flags.c_contiguous and getattr(flat.flags, "writeable", True)
        if is_plain and [*starts, flat.size] == [0, *stops]:  # all, in their order
            return flat
        for part, (start, stop) in zip(ownership.state_views(gradient), ownership.own, strict=True):
            part[...] = flat[start:stop]
        return gradient

    def direction(self) -> FlatParameters | None:
        """The vector to multiply by the Hessian, laid out as the parameters; None if value and gradient are wanted."""
        minimizer, strategy = self.minimizer, self._on_rank.strategy
        if minimizer.wanted is not Wanted.PRODUCT:
            return None
        assert isinstance(strategy, ZeRO1)
        parameters = strategy.parameters
        if self._whole is None or self._whole.specs != parameters.specs:
            module = arrays.module_of(parameters.like)
            self._whole = FlatParameters(parameters.specs, parameters.dtype, module=module, place=parameters.place)
        self._whole.flat[...] = strategy.gather(minimizer.direction, "direction")
        return self._whole

    def whole(self, vector: Array) -> Array:
        """A vector of which this is this rank's part, as a new flat array like the parameters."""
        strategy = self._on_rank.strategy
        assert isinstance(strategy, ZeRO1)
        return strategy.gather(vector, "vectors")

    def publish(self, values: Array) -> None:
        """Make these elements of this rank the parameters, on all ranks."""
        strategy = self._on_rank.strategy
        for own, part in zip(strategy.values(), strategy.ownership.state_views(values), strict=True):
            own[...] = part
        strategy.publish_parameters()

    def report_start(self) -> None:
        """Warn on rank 0, with the first evaluation, that bounds have moved the start."""
        if self._optimizer.world.rank == 0:
            warn_projected_start(self._moved)
        self._moved = 0

    def show_best(self) -> None:
        """Make the last accepted iterate the parameters: the result of a run that has ended."""
        if not self.minimizer.stop_reason:
            self.publish(self.minimizer.best)

    def show_point(self) -> None:
        """Make the point that is to be evaluated next the parameters: a run resumes. Collective over the mesh."""
        self.publish(self.minimizer.point)

    def begin_stage(self, keep_history: bool) -> None:
        """Begin to minimise another function at the last accepted iterate."""
        minimizer = self.minimizer
        minimizer.point[...] = minimizer.best
        if not keep_history:
            minimizer.forget()
        minimizer.begin()
        self.publish(minimizer.point)

    # -- the interface of auxiliary state -----------------------------------------------------------------------------

    @property
    def settings(self) -> Mapping[str, Any]:
        """Empty: the options of the method are compared elsewhere."""
        return {}

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers of the minimisation as a fact of a `RunState`."""
        return {_METADATA: self._metadata}

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient's copy."""
        return 0 if self._minimizer is None else int(self._gradient.nbytes)

    def make(self, on_rank: RankState, counters: Counters) -> None:
        """Begin a minimisation at the parameters; bounds may move them."""
        strategy, like = on_rank.strategy, on_rank.parameters.like
        self._on_rank = on_rank
        self._space = ShardedSpace(strategy)
        size = strategy.ownership.size
        self._gradient = arrays.empty(size, like.dtype, like=like)
        *_, point = on_rank.slot_rows
        with raised_on_all(self._optimizer.world):
            limits = limits_of(self._method, strategy, self._precondition())
            self._minimizer = self._method.make(self._space, on_rank.slot_rows[:-1], point, limits)
        self._read_point()
        self._moved = self.minimizer.begin()
        if self._moved:
            self.publish(point)

    @property
    def versions(self) -> dict[str, int]:
        """By slot of the method, the versions of its vectors, if it has any (see `Minimizer`)."""
        return dict(zip(self._method.slots, self.minimizer.versions, strict=False))

    def shards(self) -> tuple[Shard, ...]:
        """Empty: the vectors are the slots of the method, and the point is the parameters."""
        return ()

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless these facts have a minimisation."""
        if not isinstance(facts.get(_METADATA), Mapping):
            raise ValueError(f"the state has no {_METADATA}: it is not of a run by {type(self._method).__name__}")
        self.batches_in(facts)
        check_metadata(self._method, facts[_METADATA], self._elements)

    def batches_in(self, facts: Mapping[str, Any]) -> int:
        """The value of `batches` in these facts; ValueError if it is invalid."""
        return whole_fact(facts[_METADATA], _BATCHES, 0)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from these facts, after parameters and slots were filled."""
        self._resume(facts[_METADATA])

    def add_to(self, full: FullState, world: Axis) -> FullState:
        """A full state with the numbers of the minimisation."""
        return replace(full, minimizer=self._metadata)

    def fill(self, full: FullState) -> None:
        """Continue from a full state, which does not contain the parameters."""
        self._resume(full.minimizer)

    def broadcast(self) -> None:
        """Nothing: the copies of slots have become equal."""

    def consolidate(self) -> None:
        """Nothing: no rank has anything that only it needs."""

    def abandon(self) -> None:
        """Nothing is pending between two steps."""

    @property
    def _metadata(self) -> dict[str, Any]:
        """All numbers of the minimisation, without the vectors."""
        if self._minimizer is None:
            return {}
        return {**self._minimizer.to_metadata(), ELEMENTS: self._elements, _BATCHES: self.batches}

    @property
    def _elements(self) -> str:
        """A hash of the options about elements."""
        options = settings_of_rule(self._method)
        return f"{fingerprint({name: options.get(name, '') for name in _ABOUT_ELEMENTS}):x}"

    def _resume(self, metadata: Mapping[str, Any]) -> None:
        """Continue from these numbers, after the slots were filled."""
        self.minimizer.restore(metadata)
        self._moved = 0
        self.batches = int(metadata.get(_BATCHES, 0))
        self.minimizer.note_written()
        if lifted(self._method, self.minimizer.progress, self.minimizer.stop_reason):
            self.minimizer.reopen()

    def _read_point(self) -> None:
        """Take the point from the parameters."""
        strategy, point = self._on_rank.strategy, self.minimizer.point
        for part, own in zip(strategy.ownership.state_views(point), strategy.values(), strict=True):
            part[...] = own

    def _precondition(self) -> Any:
        """The preconditioner as a function of this rank's elements; None if the method has none."""
        function = self._method.preconditioner
        if not callable(function):
            return None

        def own_part(vector: Array) -> Array:
            with raised_on_all(self._optimizer.world):  # of the user's function: all ranks must learn of it
                found = preconditioned(function, self._space.whole(vector))
            return self._space.own(found)

        return own_part
