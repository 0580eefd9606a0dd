"""One rank's part of the state of an optimizer: numbers, arrays by slot of the rule, and their layouts.

Checkpoints and resizes move it rank by rank; `gather` makes full tensors of it. Rules that need whole tensors, as Muon
does, get them from the ranks that have parts of them by `Matrices`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.reshard import Transfer, transfers, view_of
from mpishard.data_parallel.gradient_norm import GradientInspection
from mpishard.data_parallel.ownership import RuleRanges
from mpishard.data_parallel.settings import Configured
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.boxes import Box, box_size, split
from mpishard.layout.run_state import (
    PARAMETERS,
    SLOT,
    Range,
    RunState,
    Shard,
    counted_pieces,
    finite_fact,
    pieces_of_ranges,
    whole_fact,
)
from mpishard.layout.tensors import LocalLayout, Piece, cut_holding, tensors_of
from mpishard.optim import Muon, Rule
from mpishard.optim.loss_scale import LossScale
from mpishard.parameters.flat import FlatParameters

Array = Any

# The exponential moving average of the parameters, after the slots of a rule.
EMA = "ema"
OUTER = "outer/"  # before the name of a slot of the outer rule, among the kinds of state


class Counters:
    """The numbers of one optimizer, which a run needs to continue; `loss_scale` is the setting of the `LossScale`."""

    def __init__(self, loss_scale: float | str | None) -> None:
        self.steps: int = 0  # updates taken
        self.skipped_steps: int = 0  # steps left out because of NaN or infinite gradients
        # Global 2-norm of the averaged gradient of the last step, before clipping; NaN where it was not measured; of a
        # method the largest element of the projected gradient.
        self.gradient_norm: float = math.nan
        self.learning_rate: float = math.nan  # of the last step; of a method the length of its last step
        self.scaling: LossScale = LossScale(loss_scale)  # chooses the loss scale

    @property
    def clock(self) -> int:
        """Steps so far, both taken and skipped."""
        return self.steps + self.skipped_steps

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers as facts of a `RunState`; `restore` reads them."""
        facts = {
            "step": self.clock,
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "loss_scale": self.scaling.value,
        }
        if self.scaling.dynamic:
            facts["good_steps"] = self.scaling.good_steps
        if not math.isnan(self.gradient_norm):
            facts["gradient_norm"] = self.gradient_norm
        return facts

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from `facts`."""
        self.steps, self.skipped_steps = int(facts["steps"]), int(facts["skipped_steps"])
        self.gradient_norm = float(facts.get("gradient_norm", math.nan))
        if "good_steps" in facts:
            self.scaling.restore((float(facts["loss_scale"]), int(facts["good_steps"])))


def check_numbers(facts: Mapping[str, Any]) -> None:
    """Raise ValueError unless the numbers among these facts are valid for `Counters.restore`."""
    for name in ("steps", "skipped_steps"):
        whole_fact(facts, name)
    for name in ("good_steps", "outer_steps"):
        whole_fact(facts, name, 0)
    if "good_steps" in facts or "loss_scale" in facts:
        finite_fact(facts, "loss_scale")
    finite_fact(facts, "gradient_norm", 0.0, above=-1.0)


def slot_names_of_rule(rule: Rule) -> tuple[str, ...]:
    """The names of the state arrays of a rule: its slots, and the average of the parameters if it keeps one."""
    return rule.slots if rule.ema_decay is None else (*rule.slots, EMA)


def slots_of_rule(rule: Rule, size: int, dtype: np.dtype, *, like: Array) -> dict[str, Array]:
    """New state of a rule for `size` elements, on the device of `like`."""
    slots: dict[str, Array] = {}
    for name in slot_names_of_rule(rule):
        slots[name] = arrays.zeros(size, dtype, like=like)
        if name in rule.slots and rule.initial(name):
            slots[name][...] = rule.initial(name)
    return slots


class RankState:
    """This rank's state arrays of one optimizer for one set of parameters, and the strategy that divides them.

    `make_slots` makes the arrays by name, for the parameters and a number of their elements.  Creation is collective
    over the mesh and makes all copies of the parameters equal.
    """

    def __init__(
        self,
        optimizer: Configured,
        parameters: FlatParameters,
        make_slots: Callable[[FlatParameters, int], dict[str, Array]],
    ) -> None:
        self._optimizer = optimizer
        config = optimizer.config
        self.strategy: Strategy = Strategy(optimizer.sharding.fitting(parameters), config, parameters)
        self.parameters.carried.broadcast(self.strategy.axis)
        self.inspection = GradientInspection(self.strategy, parameters, looks=config.nonfinite_gradients != "ignore")
        # The elements that the rule of each parameter group updates.
        self.rule_ranges = RuleRanges(self.strategy.ownership, parameters.specs)
        self._matrices: Matrices | None = None
        # Each array holds the ranges in ``strategy.ownership.own`` end to end.
        self.slots: dict[str, Array] = make_slots(parameters, self.strategy.ownership.size)

    def matrices(self, rule: Rule) -> Matrices:
        """The matrices that the rule needs whole. Collective over the strategy's sync group for a new rule."""
        rules = self.rule_ranges.by_tensor(rule)
        names = {spec.name for spec, each in zip(self.parameters.specs, rules, strict=True) if each.whole_tensors}
        if self._matrices is None or self._matrices.names != names:
            self._matrices = Matrices(self.strategy, names)
        return self._matrices

    @property
    def parameters(self) -> FlatParameters:
        """The parameters that the optimizer trains."""
        return self.strategy.parameters

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(int(slot.nbytes) for slot in self.slots.values())

    def prepare_step(self, counters: Counters) -> None:
        """Set the loss scale of the parameters, and the compression of the strategy, for the next step."""
        compresses = counters.steps >= self._optimizer.config.compress_after
        self.parameters.loss_scale = counters.scaling.value
        self.strategy.prepare_step(compresses, counters.scaling.value)

    def broadcast(self) -> None:
        """Make all copies of parameters and slots equal.  Collective over the mesh."""
        self.strategy.copies.broadcast(self.parameters)
        self.parameters.carried.broadcast(self.strategy.axis)
        for slot in self.slots.values():
            self.strategy.resync(slot)

    def resume(self, counters: Counters, loss_scale: float) -> None:
        """Prepare the next step after other parameters and state have replaced those of a step under way.

        `loss_scale` is that which the compression errors of the new state contain.
        """
        if self.strategy.compressed is not None:
            self.strategy.compressed.forget(self.strategy.error_scale(loss_scale))
        self.prepare_step(counters)
        self.parameters.reset_gradients()
        if self.parameters.sharded is not None:
            self.parameters.sharded.free_all()

    # -- arrays with their layouts, to be saved and moved -----------------------------------------------------------

    def shards(self) -> tuple[Shard, ...]:
        """The live arrays of this rank: parameters, slots, and the compression errors of the sums that it owns."""
        strategy, parameters, counted = self.strategy, self.parameters, self.strategy.ownership.counted
        if parameters.sharded is not None:
            values = Shard(PARAMETERS, parameters.sharded.shard, *self._slot_layouts())
        else:
            starts = [start for start, _ in counted]
            values = Shard(PARAMETERS, parameters.flat, parameters.holding, _counted(parameters, counted, starts))
        found = [values, *self.slot_shards(self.slots, SLOT)]
        if strategy.compressed is not None:
            left = cut_holding(parameters.holding, strategy.error_ranges)
            primary = counted_pieces(left, parameters.specs, parameters.place)
            found.append(Shard(strategy.sharding.errors_kind, strategy.compressed.owned, left, primary, required=False))
        return tuple(found)

    def slot_shards(self, slots: Mapping[str, Array], kind: str) -> list[Shard]:
        """State arrays by name with their layouts; `kind` is a template for their kinds, such as ``optimizer/{}``."""
        layouts = self._slot_layouts()
        return [Shard(kind.format(name), slot, *layouts) for name, slot in slots.items()]

    def _slot_layouts(self) -> tuple[LocalLayout, LocalLayout]:
        """This rank's part of an array with the ranges that it owns end to end, and its primary copies in it."""
        parameters, ownership = self.parameters, self.strategy.ownership
        offsets = accumulate((stop - start for start, stop in ownership.own), initial=0)
        pairs = zip(ownership.own, ownership.counted, offsets, strict=False)
        starts = [offset + first - start for (start, _), (first, _), offset in pairs]
        return cut_holding(parameters.holding, ownership.own), _counted(parameters, ownership.counted, starts)

    # -- full tensors -----------------------------------------------------------------------------------------------

    def gather(self, slots: Mapping[str, Array], world: Axis) -> dict[str, np.ndarray]:
        """State arrays by name with full tensors, on every rank.  Collective over `world`."""
        return {name: gather_slot(self.strategy, slot, world) for name, slot in slots.items()}

    def gather_errors(self, world: Axis) -> dict[str, np.ndarray]:
        """The compression errors with full tensors, by kind, on every rank; empty without compression.  Collective."""
        strategy = self.strategy
        if strategy.compressed is None:
            return {}
        left = arrays.to_host(strategy.compressed.owned) / strategy.compressed.scale
        return {strategy.sharding.errors_kind: gather_full(world, strategy.parameters, strategy.error_ranges, left)}

    def fill(self, slots: Mapping[str, Array], full: Mapping[str, np.ndarray]) -> None:
        """Fill state arrays from those with full tensors, by name."""
        for name, slot in slots.items():
            self._fill(self.strategy.ownership.own, slot, full[name])

    def fill_errors(self, full: Mapping[str, np.ndarray]) -> None:
        """Set the compression errors from those with full tensors, by kind, or to zero without them."""
        strategy = self.strategy
        if strategy.compressed is None:
            return
        left = strategy.compressed.owned
        if strategy.sharding.errors_kind in full:
            self._fill(strategy.error_ranges, left, full[strategy.sharding.errors_kind])
        else:
            left[...] = 0
        strategy.compressed.forget(scale=1.0)

    def _fill(self, ranges: Sequence[Range], target: Array, full: np.ndarray) -> None:
        """Fill a state array, which covers `ranges` of the flat parameters."""
        arrays.copy_to_device(cut_full(full, self.parameters, ranges), target)


# The state of a model that has no optimizer.


def parameters_alone(parameters: FlatParameters, axis: Axis) -> RunState:
    """The state of a model without an optimizer: one shard, the live parameters.

    They are divided evenly among the ranks of the data axis.
    """
    if parameters.sharded is not None:
        layout = cut_holding(parameters.holding, parameters.sharded.own)
        counted = counted_pieces(layout, parameters.specs, parameters.place)
        shard = Shard(PARAMETERS, parameters.sharded.shard, layout, counted)
    else:
        cuts = split(parameters.size, axis.size)
        start, stop = cuts[axis.rank], cuts[axis.rank + 1]
        counted = _counted(parameters, [(start, stop)], [start])
        shard = Shard(PARAMETERS, parameters.flat, parameters.holding, counted)
    return RunState(parameters.specs, (shard,))


def _counted(parameters: FlatParameters, ranges: Sequence[Range], starts: Sequence[int]) -> LocalLayout:
    return counted_pieces(pieces_of_ranges(parameters.holding, ranges, starts), parameters.specs, parameters.place)


# Full tensors from the parts on the ranks of a mesh, and back: flat arrays in the order of the specs.


def gather_full(world: Axis, parameters: FlatParameters, ranges: Sequence[Range], values: np.ndarray) -> np.ndarray:
    """The full tensors, end to end in the order of `specs`, on every rank. Collective over `world`.

    `values` are those of `ranges`, end to end: ascending ranges of this rank's flat order; the ranges of all ranks of a
    data axis contain every element once. The bits are the same on every rank.
    """
    specs = parameters.specs
    number = {spec.name: index for index, spec in enumerate(specs)}
    pieces = [
        piece
        for piece in cut_holding(parameters.holding, ranges)
        if parameters.place.is_primary(specs[number[piece.name]])
    ]
    own = np.concatenate([values[:0], *(values[piece.start : piece.start + piece.size] for piece in pieces)])
    layouts = world.allgather_object(tuple((number[piece.name], piece.box) for piece in pieces))
    counts = [sum(box_size(box) for _, box in boxes) for boxes in layouts]
    joined = world.all_gather(np.empty(sum(counts), values.dtype), own, counts, label="state")
    full = np.empty(sum(spec.size for spec in specs), values.dtype)
    tensors = list(tensors_of(full, specs).values())
    offset = 0
    for boxes in layouts:
        for tensor, box in boxes:
            target = tensors[tensor][_slices(box)]
            target[...] = joined[offset : offset + box_size(box)].reshape(target.shape)
            offset += box_size(box)
    return full


def gather_slot(strategy: Strategy, slot: Array, world: Axis) -> np.ndarray:
    """A state array, which has the ranges that this rank owns end to end, as `gather_full` returns it. Collective."""
    ownership = strategy.ownership
    counted = ownership.counted_views(ownership.state_views(slot))
    values = np.concatenate([np.empty(0, slot.dtype), *map(arrays.to_host, counted)])
    return gather_full(world, strategy.parameters, ownership.counted, values)


def cut_full(full: np.ndarray, parameters: FlatParameters, ranges: Sequence[Range]) -> np.ndarray:
    """The values of `ranges` of this rank's flat order, end to end, from a flat array of the full tensors."""
    tensors = tensors_of(full, parameters.specs)
    pieces = cut_holding(parameters.holding, ranges)
    return np.concatenate([full[:0], *(tensors[piece.name][_slices(piece.box)].reshape(-1) for piece in pieces)])


def _slices(box: Box) -> tuple[Any, ...]:
    return (*(slice(start, stop) for start, stop in box), ...)


# Whole matrices for Muon: each is gathered at one rank, which orthogonalizes it, and goes back to those that own it.
# Gradients, state and parameters stay divided as the strategy has them, in pieces of matrices.  For other rules that
# need whole tensors, a rank gets all of these, and takes the step.


class Matrices:
    """The matrices of a model, or other tensors, that a rule needs whole, by name.

    Creation is collective over the strategy's sync group.
    A rank's work on a matrix is taken as proportional to its products; the largest go to ranks first.
    """

    def __init__(self, strategy: Strategy, names: set[str]) -> None:
        parameters, ownership, group = strategy.parameters, strategy.ownership, strategy.sync_group
        self.names = names
        own = [each for each in cut_holding(parameters.holding, ownership.own) if each.name in names]
        # A worker of Local SGD that is one data rank, or several that take the same step, has all matrices.
        self._axis = group if isinstance(group, Axis) and group.size > 1 else None
        members, rank = (1, 0) if self._axis is None else (self._axis.size, self._axis.rank)
        layouts = [tuple(own)]
        if self._axis is not None:
            described = tuple((each.name, each.box, each.start) for each in own)
            layouts = [tuple(Piece(*each) for each in theirs) for theirs in self._axis.allgather_object(described)]
        work, sizes = [0] * members, [0] * members
        held: list[list[Piece]] = [[] for _ in range(members)]
        matrices = [spec for spec in parameters.specs if spec.name in names]
        for spec in sorted(matrices, key=lambda spec: -spec.size * min(spec.shape, default=1)):
            owner = min(range(members), key=lambda each: (work[each], each))
            held[owner].append(Piece(spec.name, spec.box, sizes[owner]))
            sizes[owner] += spec.size
            work[owner] += spec.size * min(spec.shape, default=1) + 1
        self._held, self._size = held[rank], sizes[rank]
        self._there = _Exchange(transfers(layouts, [tuple(each) for each in held]), members, rank)
        self._back = _Exchange(transfers([tuple(each) for each in held], layouts), members, rank)

    def orthogonalize(self, directions: Array, rules: Mapping[str, Rule]) -> None:
        """Orthogonalize the matrices in place, of which each rank has pieces in `directions`, by the rules by name.

        `directions` has the ranges that this rank owns, end to end. Collective over the sync group.
        """
        whole = arrays.empty(self._size, directions.dtype, like=directions)
        self._there.move(self._axis, directions, whole)
        for piece in self._held:
            rule = rules[piece.name]
            assert isinstance(rule, Muon)
            matrix = view_of(whole, piece, piece.box)
            matrix[...] = rule.orthogonalized(matrix)
        self._back.move(self._axis, whole, directions)

    def update(
        self,
        values: Array,
        gradients: Array,
        slots: Sequence[Array],
        rules: Mapping[str, Rule],
        step: int,
        *,
        divisor: float,
        clip: float,
    ) -> None:
        """Take a step of all tensors in place, by the rules by name; arrays as for `orthogonalize`, and collective.

        An error of a rule is raised on all ranks, before any of the arrays has changed.
        """
        given = [values, gradients, *slots]
        wholes = [arrays.empty(self._size, each.dtype, like=each) for each in given]
        for each, whole in zip(given, wholes, strict=True):
            self._there.move(self._axis, each, whole)
        with raised_on_all(self._axis):
            for piece in self._held:
                own, gradient = (view_of(whole, piece, piece.box) for whole in wholes[:2])
                state = [whole[piece.start : piece.start + piece.size] for whole in wholes[2:]]
                rules[piece.name].update(own, gradient, state, step, divisor=divisor, clip=clip)
        for each, whole in zip([values, *slots], [wholes[0], *wholes[2:]], strict=True):
            self._back.move(self._axis, whole, each)


class _Exchange:
    """One rank's part of transfers between all ranks."""

    def __init__(self, plan: Sequence[Transfer], members: int, rank: int) -> None:
        self._own = [each for each in plan if each.source_rank == each.target_rank == rank]
        ends = [each for each in plan if each.source_rank != each.target_rank]
        self._outgoing = sorted(
            (each for each in ends if each.source_rank == rank), key=lambda each: each.target_rank
        )  # stable: those to one rank are in the order of the plan, as at the source
        self._incoming = sorted((each for each in ends if each.target_rank == rank), key=lambda each: each.source_rank)
        self._out_counts, self._in_counts = [0] * members, [0] * members
        for each in self._outgoing:
            self._out_counts[each.target_rank] += box_size(each.box)
        for each in self._incoming:
            self._in_counts[each.source_rank] += box_size(each.box)
        self._moves = bool(ends)

    def move(self, axis: Axis | None, source: Array, target: Array) -> None:
        """Fill the pieces of `target` from those of `source`.  Collective over `axis`, None if nothing travels."""
        for each in self._own:
            view_of(target, each.target, each.box)[...] = view_of(source, each.source, each.box)
        if axis is None or not self._moves:
            return
        packed = arrays.empty(sum(self._out_counts), source.dtype, like=source)
        arrived = arrays.empty(sum(self._in_counts), source.dtype, like=source)
        offset = 0
        for each in self._outgoing:
            size = box_size(each.box)
            packed[offset : offset + size] = view_of(source, each.source, each.box).reshape(-1)
            offset += size
        axis.all_to_all(packed, arrived, self._out_counts, self._in_counts, label="matrices")
        offset = 0
        for each in self._incoming:
            view = view_of(target, each.target, each.box)
            view[...] = arrived[offset : offset + view.size].reshape(view.shape)
            offset += view.size
