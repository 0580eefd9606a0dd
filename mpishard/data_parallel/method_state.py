"""The state of an optimizer whose steps are the evaluations of a minimisation by a method, such as L-BFGS.

With it the space of its vectors, whose elements are divided over ranks, and its options about each element, cut down to
those that this rank updates.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import flag
from mpishard.backend import array as arrays
from mpishard.comm.agreement import fingerprint
from mpishard.comm.errors import CaughtError, raised_on_all
from mpishard.data_parallel.auxiliary_state import AuxiliaryState
from mpishard.data_parallel.optimizer_state import OptimizerState
from mpishard.data_parallel.ownership import spans_of
from mpishard.data_parallel.rank_state import RankState, cut_full, gather_slot
from mpishard.data_parallel.settings import Configured, settings_of_method
from mpishard.data_parallel.strategies import Strategy
from mpishard.data_parallel.validation import check_copies, check_method, name_of_kind
from mpishard.io import log
from mpishard.layout.run_state import SLOT, names_fact, whole_fact
from mpishard.layout.tensors import ParameterSpec, cut_holding
from mpishard.minimizers.elements import (
    OfThisRank,
    OperatorOfThisRank,
    applied,
    check_inverse,
    l1_of_this_rank,
    of_this_rank,
    operators,
    whole_limits,
)
from mpishard.minimizers.method import (
    ELEMENTS,
    FAILURES,
    Limits,
    Method,
    Minimizer,
    Progress,
    Wanted,
    check_metadata,
    lifted,
    log_projected_start,
)
from mpishard.minimizers.penalty import PenaltyOfVectors
from mpishard.minimizers.space import Space
from mpishard.optim.formulas import divide
from mpishard.parameters.flat import FlatParameters

if TYPE_CHECKING:
    from mpishard.data_parallel.full_state import FullState

Array = Any

# The point is saved apart from the parameters: those of a run that has ended are the last accepted iterate.
POINT = "point"
_METADATA = "minimizer.json"
_BATCHES = "batches"  # in the metadata
_ABOUT_ELEMENTS = ("bounds", "fixed", "inner_product", "preconditioner")  # and "l1", where it is given
_BLOCK = 1 << 14  # elements that are numbered at once
_ROUNDING = 1e-3  # the most by which losses of the ranks of one model may differ, as a share of them


def limits_of(method: Method, strategy: Strategy, functions: Mapping[str, Callable[[Array], Array]]) -> Limits:
    """This rank's part of the options of a method, with its `operators`, the functions.  Collective.

    Raises ValueError or TypeError on all ranks if an option does not fit the parameters; the message names the tensor
    or the element.
    """
    parameters, ranges = strategy.parameters, strategy.ownership.own
    with raised_on_all(strategy.mesh.world):
        given = whole_limits(method, parameters.specs, parameters.dtype)

    def own(option: np.ndarray | None, local: OfThisRank | None) -> Array | None:
        if option is None:
            return None
        found = cut_full(option, parameters, ranges) if local is None else _ranges(local.arranged(option), ranges)
        return np.asarray(found, like=parameters.like)

    *others, l1_weights, l1_reference = given
    local, local_l1 = of_this_rank(method), l1_of_this_rank(method)
    lower, upper, fixed, weights, scaling = (own(option, local) for option in others)
    l1_weights, l1_reference = own(l1_weights, local_l1), own(l1_reference, local_l1)
    l1 = {"l1_weights": l1_weights, "l1_reference": l1_reference}
    return Limits(lower, upper, fixed, weights, scaling, penalty=None, **l1, **functions)


def _ranges(flat: Array, ranges: Sequence[tuple[int, int]]) -> Array:
    """Ranges of a flat array, end to end."""
    return arrays.joined([flat[:0], *(flat[start:stop] for start, stop in ranges)])


def hash_of_elements(strategy: Strategy, limits: Limits) -> int:
    """A hash of options about elements that is the same however the elements are cut.  Collective.

    It is the sum over all elements of a hash of the element's number and what the options say of it.
    """
    parameters = strategy.parameters
    about = [limits.lower, limits.upper, limits.fixed, limits.weights, limits.scaling]
    about += [limits.l1_weights, limits.l1_reference]
    if limits.penalty is not None:
        about += [limits.penalty.own(each) for each in limits.penalty.terms.elements]
    given = [(place, arrays.to_host(option)) for place, option in enumerate(about) if option is not None]
    total = np.zeros(1, np.uint64)  # an array, whose sums wrap
    for spec, start, numbers in numbered_elements(strategy):
        for place, option in given if parameters.place.is_primary(spec) else ():
            values = option[start : start + len(numbers)].astype(np.float64) + 0.0
            words = _mixed(_mixed(numbers.astype(np.uint64) + np.uint64(place << 56)) ^ values.view(np.uint64))
            total += words.sum(dtype=np.uint64, keepdims=True)
    found = total.view(np.int64)
    strategy.sync_group.all_reduce(found, label="control")
    return int(found.view(np.uint64)[0])


def numbered_elements(strategy: Strategy) -> Iterator[tuple[ParameterSpec, int, np.ndarray]]:
    """The elements that this rank updates, in blocks that stay in the cache: tensor, place of the first, their numbers.

    The numbers, int64, are those in the flat order of the whole tensors.
    """
    parameters = strategy.parameters
    starts = itertools.accumulate((spec.size for spec in parameters.specs), initial=0)
    first = {spec.name: (spec, start) for spec, start in zip(parameters.specs, starts, strict=False)}
    for piece in cut_holding(parameters.holding, strategy.ownership.own):
        spec, number_of_first = first[piece.name]
        for start in range(0, piece.size, _BLOCK):
            numbers = np.arange(start, min(start + _BLOCK, piece.size))
            if piece.shape != spec.shape:
                within = np.unravel_index(numbers, piece.shape)
                places = tuple(each + begin for each, (begin, _) in zip(within, piece.box, strict=True))
                numbers = np.ravel_multi_index(places, spec.shape)
            yield spec, piece.start + start, numbers + number_of_first


def _mixed(words: np.ndarray) -> np.ndarray:
    """Scramble words of 64 bits: the finalizer of MurmurHash3 (Appleby, 2011)."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        words = (words ^ (words >> np.uint64(33))) * np.uint64(factor)
    return words ^ (words >> np.uint64(33))


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
        whole = gather_slot(self._strategy, vector, self._strategy.mesh.world)
        return np.asarray(whole, like=self.like)

    def own(self, whole: Array) -> Array:
        """This rank's elements of a whole vector of any memory, on the device of the vectors."""
        host = np.asarray(arrays.to_host(whole), self.like.dtype)
        part = cut_full(host, self._strategy.parameters, self._strategy.ownership.own)
        return np.asarray(part, like=self.like)

    def numbers(self) -> np.ndarray:
        found = np.empty(self.size, np.int64)
        for _, start, numbers in numbered_elements(self._strategy):
            found[start : start + len(numbers)] = numbers
        return found


class Stages(AuxiliaryState, ABC):
    """What decides, where a minimisation has ended, whether another one begins; with state that travels."""

    @abstractmethod
    def told(self, minimizer: Minimizer) -> None:
        """Let a minimisation that has ended begin again, to go on.  Called after each evaluation, and collective.

        It is part of the step of that evaluation, which may be taken back and taken again.
        """


class MinimizationState(OptimizerState):
    """The state of an optimizer with a method: its slots are the method's vectors, and then the point.

    `direction`, `whole`, `publish`, `tell_value`, `tell_product` and `update` are collective over the mesh.  Raises
    ValueError if the method cannot work with the optimizer's configuration.
    """

    def __init__(self, optimizer: Configured, method: Method) -> None:
        check_method(type(optimizer).__name__, method, optimizer.config, optimizer.sharding)
        self._method = method
        super().__init__(optimizer)
        self._batches = 0  # iterations so far, each of which has had a batch of its own; stages continue the count
        self._moved = 0  # elements of the start that were outside of their bounds, until that is said
        self._hash: int | None = None  # of the options about elements, where each rank has those of its part
        self._hash_text = ""  # what a penalty says besides
        self._minimizer: Minimizer | None = None
        self._strategy: Strategy
        self._rows: Array  # the slots, one below the other, the point last
        self._gradient: Array
        self._space: ShardedSpace
        self._direction: FlatParameters | None = None
        self._stages: Stages | None = None
        self._progress = Progress()  # after the evaluation of the last step

    # -- the method ---------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> Method:
        return self._method

    @property
    def minimizer(self) -> Minimizer | None:
        return self._minimizer if self.is_bound else None

    @property
    def minimization(self) -> Minimizer:
        """The minimisation, once parameters are bound."""
        assert self._minimizer is not None
        return self._minimizer

    @property
    def slot_names(self) -> tuple[str, ...]:
        return (*self._method.slots, POINT)

    def continue_by(self, stages: Stages) -> None:
        """Let `stages` decide what follows a minimisation that has ended; before the first step."""
        self.auxiliary, self._stages = (stages,), stages

    def options(self) -> dict[str, str]:
        return super().options() | settings_of_method(self._method)

    def make_slots(self, parameters: FlatParameters, size: int) -> dict[str, Array]:
        names, like = self.slot_names, parameters.like
        self._rows = arrays.zeros(len(names) * size, like.dtype, like=like).reshape(len(names), size)
        return dict(zip(names, self._rows, strict=True))

    def begin_stage(self, keep_history: Any) -> None:
        if not self.is_bound:
            raise ValueError(
                "begin_stage continues from the last iterate, and this optimizer has no parameters yet: call it "
                "between two calls of optimize, or after load_checkpoint; the first stage needs none"
            )
        with CaughtError() as caught:
            keep_history = flag("keep_history", keep_history)
        self.settings.agree({"keep_history": str(keep_history)}, caught.error)
        minimizer = self.minimization
        minimizer.point[...] = minimizer.best
        if not keep_history:
            minimizer.forget()
        minimizer.begin()
        self.publish(minimizer.point)

    # -- a step: an evaluation of its line search ---------------------------------------------------------------------

    def check_step(self) -> None:
        raise TypeError(
            f"{type(self._method).__name__} decides by the value, which step() does not have; use "
            "optimizer.optimize(problem)"
        )

    def update(self, count: float, *, loss: float, rate_factor: float, exchange_status: bool) -> bool:
        """Pass to the minimisation the evaluation that it wanted, and make its next point the parameters.

        It wanted loss and gradient at the parameters, or a Hessian product, which then is where a gradient would be.
        `count` divides the summed gradient; `loss` is the mean. Returns True if loss and gradient were finite. Raises
        RuntimeError if the minimisation has ended.
        """
        strategy, minimizer = self._strategy, self.minimization
        if minimizer.wanted is Wanted.NOTHING:
            raise RuntimeError(
                f"this minimisation has ended ({minimizer.stop_reason}): there is no next step; make a new optimizer "
                "to start another one"
            )
        strategy.reducer.finalize()
        gradient = self.gradient(float(count))
        value, finite = self._agreed_loss(loss)
        if minimizer.wanted is Wanted.PRODUCT:
            self.tell_product(gradient)
        else:
            self.tell_value(value if finite else math.inf, gradient)
            self._batches += minimizer.progress.accepted
        self._progress = minimizer.progress
        self.counters.learning_rate = self._progress.step_length
        if self._stages is not None:
            self._stages.told(minimizer)
        self.publish(minimizer.point)
        self._report_failure()
        self.on_rank.inspection.forget()
        strategy.reducer.reset()
        if self._optimizer.config.mesh.debug:
            check_copies(strategy, self.counters.steps)
        return finite

    def _agreed_loss(self, loss: float) -> tuple[float, bool]:
        """The largest loss of all ranks, which all take where they differ in the last bit, and whether it is finite.

        All ranks learn of an interrupt, too.  Raises ValueError if losses differ by more than rounding.
        """
        strategy, inspection, progress = self._strategy, self.on_rank.inspection, self.minimization.progress
        known = loss if math.isfinite(loss) else math.inf  # which stands for NaN
        status = [bool(inspection.nonfinite_loss), inspection.interrupted]
        shared = np.array([known, -known, *status, *strategy.unit_marks])
        strategy.sync_group.all_reduce(shared, op="max", label="control")
        strategy.agree_on_units(shared[4:].tolist())
        value, least = float(shared[0]), -float(shared[1])
        finite, inspection.interrupted = math.isfinite(value) and not shared[2], bool(shared[3])
        compares = progress.evaluations == 0 or self._optimizer.config.mesh.debug
        if finite and compares and value - least > _ROUNDING * max(abs(value), abs(least)):
            inspection.forget()
            strategy.reducer.reset()
            raise _different_losses(strategy, loss)
        return value, finite

    def tell_value(self, value: float, gradient: Array) -> None:
        """Pass a value, the same on all ranks, and this rank's elements of the gradient, and count the step."""
        self._count_step()
        if self._optimizer.world.rank == 0:
            log_projected_start(self._moved)
        self._moved = 0
        self.minimization.tell(value, gradient)
        self.counters.gradient_norm = self.minimization.progress.projected_norm

    def tell_product(self, product: Array) -> None:
        """Pass this rank's elements of a Hessian product, and count the step."""
        self._count_step()
        self.minimization.tell_product(product)

    def _count_step(self) -> None:
        self.counters.steps += 1
        self._optimizer.config.mesh.ledger.step = self.counters.clock

    def _report_failure(self) -> None:
        """Report on rank 0 why the minimisation cannot continue, if it has just come to that.  Collective."""
        reason = self.minimization.stop_reason
        if reason in FAILURES:
            what = f": {self.on_rank.inspection.culprits(self.counters.clock)}" if reason == "not finite" else ""
            if self._optimizer.world.rank == 0:
                log.inform(f"{type(self._method).__name__} stopped: {FAILURES[reason]}{what}")

    def gradient(self, divisor: float) -> Array:
        """This rank's elements of the summed gradient, end to end, divided."""
        strategy, gradient = self._strategy, self._gradient
        for part, own in zip(strategy.ownership.state_views(gradient), strategy.gradients(), strict=True):
            part[...] = own
        if divisor != 1 and gradient.size:
            divide(gradient, divisor)
        return gradient

    def own_part(self, flat: Array) -> Array:
        """This rank's elements of a flat array like the parameters, until the next call: maybe the array itself."""
        ownership, gradient = self._strategy.ownership, self._gradient
        starts, stops = ([own[side] for own in ownership.own] for side in (0, 1))
        is_plain = flat.flags.c_contiguous and getattr(flat.flags, "writeable", True)
        if is_plain and [*starts, flat.size] == [0, *stops]:  # all, in their order
            return flat
        for part, (start, stop) in zip(ownership.state_views(gradient), ownership.own, strict=True):
            part[...] = flat[start:stop]
        return gradient

    def whole(self, vector: Array) -> Array:
        """A vector from this rank's part of it, as a new flat array like this rank's parameters.

        `ShardedSpace.whole` has it in the order of the specs, of all tensor and pipeline ranks.
        """
        return self._strategy.gather(vector, "vectors")

    def publish(self, values: Array) -> None:
        """Make these elements of this rank the parameters, on all ranks."""
        strategy = self._strategy
        for own, part in zip(strategy.values(), strategy.ownership.state_views(values), strict=True):
            own[...] = part
        strategy.publish_parameters()
        strategy.parameters.carried.round_masters()

    @property
    def agrees_in_update(self) -> bool:
        return True

    # -- a run --------------------------------------------------------------------------------------------------------

    evaluates_one_function = True
    ends_by_itself = True

    def check_run(self, *, samples: int, batch_size: int, scaling: str, has_product: bool) -> None:
        name = type(self._method).__name__
        if scaling != "constant":
            raise ValueError(f"scaling={scaling!r} changes the learning rate, which {name} has not")
        if batch_size != samples and not self._method.takes_batches:
            raise ValueError(
                f"batch_size={batch_size} of samples={samples}: {name} needs one function, the same in every "
                f"evaluation; give batch_size={samples}"
            )
        if self._method.needs_products and not has_product:
            raise ValueError(
                f"{name} needs Hessian products: give the problem "
                "product=function(parameters, direction, samples, products)"
            )

    def check_evaluation(self, averaged: bool) -> None:
        raise ValueError(
            f"evaluate= is for rules: the steps of {type(self._method).__name__} are evaluations of its line "
            "searches; evaluate in a callback, at accepted iterates"
        )

    def begin_run(self, is_full_batch: bool) -> None:
        self.minimization.stochastic = not is_full_batch

    def direction(self) -> FlatParameters | None:
        """The vector to multiply by the Hessian, laid out as the parameters; None if value and gradient are wanted."""
        if self.minimization.wanted is not Wanted.PRODUCT:
            return None
        parameters = self._strategy.parameters
        if self._direction is None or self._direction.specs != parameters.specs:
            module = arrays.module_of(parameters.like)
            self._direction = FlatParameters(parameters.specs, parameters.dtype, module=module, place=parameters.place)
        self._direction.flat[...] = self._strategy.gather(self.minimization.direction, "direction")
        return self._direction

    def loss_of_step(self, measured: float) -> float:
        """The value at the iterate in place of the losses of a Hessian product, which are 0."""
        return self.minimization.progress.value if self.minimization.wanted is Wanted.PRODUCT else measured

    @property
    def added_loss(self) -> float:
        return self.minimization.added_value

    @property
    def ended_batch(self) -> bool:
        return self._progress.accepted

    @property
    def record(self) -> dict[str, float]:
        return {"iteration": self._progress.iterations, "accepted_loss": self._progress.value}

    @property
    def stop_reason(self) -> str:
        return self.minimization.stop_reason

    def show_point(self) -> None:
        self.publish(self.minimization.point)

    def show_result(self) -> None:
        """The last accepted iterate."""
        if not self.minimization.stop_reason:
            self.publish(self.minimization.best)

    # -- saves and moves ----------------------------------------------------------------------------------------------

    @property
    def batches(self) -> int:
        return self._batches

    def batches_in(self, facts: Mapping[str, Any]) -> int:
        return whole_fact(facts[_METADATA], _BATCHES, 0)

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, _METADATA: self._metadata}

    @property
    def nbytes(self) -> int:
        return super().nbytes + (int(self._gradient.nbytes) if self.is_bound else 0)

    @property
    def versions(self) -> dict[str, int]:
        versions = zip(self._method.slots, self.minimization.versions, strict=False)
        return {SLOT.format(slot): number for slot, number in versions}

    def _begin(self, on_rank: RankState) -> None:
        """Begin a minimisation at the parameters; bounds may move them."""
        super()._begin(on_rank)
        self._strategy = strategy = on_rank.strategy
        like = on_rank.parameters.like
        self._space = ShardedSpace(strategy)
        self._gradient = arrays.empty(strategy.ownership.size, like.dtype, like=like)
        *_, point = self._rows
        functions = operators(self._method, self._operator)
        limits = limits_of(self._method, strategy, functions)
        if "solve" in functions:
            ones = arrays.zeros(strategy.ownership.size, like.dtype, like=like) + like.dtype.type(1)
            product = functions["solve"](functions["apply"](ones))
            with raised_on_all(self._optimizer.world):
                check_inverse(product)
        if (penalty := getattr(self._method, "penalty", None)) is not None:
            vectors = PenaltyOfVectors(
                penalty, self.whole, lambda whole: _ranges(whole, strategy.ownership.own), like[:0]
            )
            limits = replace(limits, penalty=vectors)
            penalty.begin()
            self._hash = hash_of_elements(strategy, limits)
            self._hash_text = penalty.text
        with raised_on_all(self._optimizer.world):
            self._minimizer = self._method.make(self._space, self._rows[:-1], point, limits)
        if of_this_rank(self._method) is not None or l1_of_this_rank(self._method) is not None:
            self._hash = hash_of_elements(strategy, limits)
        for part, own in zip(strategy.ownership.state_views(point), strategy.values(), strict=True):
            part[...] = own
        self._moved = self._minimizer.begin()
        if self._moved:
            self.publish(point)

    def check(self, facts: Mapping[str, Any]) -> None:
        saved, own = map(name_of_kind, (facts.get("rule", "none"), type(self._method).__name__))
        if saved != own:
            raise ValueError(
                f"the state is of {saved}, and this is {own}; give each its own folder, or begin with the saved "
                "parameters alone"
            )
        metadata, slots = facts.get(_METADATA), names_fact(facts, "slots.json")
        if isinstance(metadata, Mapping) and sorted(slots) != sorted(self.slot_names):
            check_metadata(self._method, metadata, self._element_options)  # names the option that differs
        super().check(facts)
        if not isinstance(metadata, Mapping):
            raise ValueError(f"the state has no {_METADATA}: it is not of a run by {type(self._method).__name__}")
        self.batches_in(facts)
        check_metadata(self._method, metadata, self._element_options)

    def restore(self, facts: Mapping[str, Any]) -> None:
        self._resume(facts[_METADATA])
        super().restore(facts)

    def gather(self) -> FullState:
        full = super().gather()
        return replace(full, minimizer=self._metadata) if self.is_bound else full

    def _fill(self, on_rank: RankState, full: FullState) -> None:
        super()._fill(on_rank, full)
        self._resume(full.minimizer)

    def _resume(self, metadata: Mapping[str, Any]) -> None:
        """Continue from these numbers, after the slots were filled."""
        minimizer = self.minimization
        minimizer.restore(metadata)
        self._moved = 0
        self._batches = int(metadata.get(_BATCHES, 0))
        minimizer.note_written()
        if lifted(self._method, minimizer.progress, minimizer.stop_reason):
            minimizer.reopen()

    @property
    def _metadata(self) -> dict[str, Any]:
        """All numbers of the minimisation, without the vectors."""
        if self._minimizer is None:
            return {}
        return {**self._minimizer.to_metadata(), ELEMENTS: self._element_options, _BATCHES: self._batches}

    @property
    def _element_options(self) -> str:
        """A hash of the options about elements."""
        if self._hash is not None:
            return f"{self._hash:x}{self._hash_text}"
        options = self.options()
        names = (*_ABOUT_ELEMENTS, *(["l1"] if getattr(self._method, "l1", None) is not None else []))
        return f"{fingerprint({name: options.get(name, '') for name in names}):x}"

    def _operator(self, what: str, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """A user's operator, named `what`, as one of this rank's elements."""

        def own_part(vector: Array) -> Array:
            is_local = isinstance(function, OperatorOfThisRank)
            given = self.whole(vector) if is_local else self._space.whole(vector)
            with raised_on_all(self._optimizer.world):  # of the user's function: all ranks must learn of it
                found = applied(what, function, given)
            return _ranges(found, self._strategy.ownership.own) if is_local else self._space.own(found)

        return own_part


def _different_losses(strategy: Strategy, loss: float) -> ValueError:
    """The error for ranks that return different losses of the same samples.  Collective over the mesh."""
    losses, members = strategy.sync_group.allgather_object(loss), strategy.sync_group.members
    rank = next(rank for rank, each in enumerate(losses) if each != losses[0])
    return ValueError(
        f"the mean loss of a step is {losses[0]:.9g} on rank {members[0]} and {losses[rank]:.9g} on rank "
        f"{members[rank]}, but all ranks must have one: ranks that share the tensors of a model return "
        "the loss of all of them, as mesh.tensor.all_reduce sums it"
    )
