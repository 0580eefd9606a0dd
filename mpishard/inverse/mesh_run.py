"""A minimisation on the ranks of a mesh, which divide the vectors of the method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.backend.exact_norms import largest
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.errors import on_any, raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.method_state import MinimizationState
from mpishard.data_parallel.optimizers import ZeRO1Optimizer
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import warn_if_initial_parameters_differ
from mpishard.inverse.functions import EvaluationFailed, digits_of, failure_in_words, sum_of_values
from mpishard.inverse.unknowns import Unknowns
from mpishard.launch.job_notes import ECHO
from mpishard.launch.signals import Interrupts
from mpishard.layout.run_state import brief
from mpishard.layout.tensors import ParameterSpec, Piece
from mpishard.minimizers.method import Method, Minimizer, Wanted
from mpishard.parameters.flat import FlatParameters

Array = Any
HOW_TO_SUM = "say reduction='sum'"


def parameters_of(unknowns: Unknowns) -> FlatParameters:
    """The unknowns by name, on the same memory."""
    named: FlatParameters | None = unknowns.parameters
    return FlatParameters.over(unknowns.flat, unknowns.specs, unknowns.place) if named is None else named


def broadcast_start(mesh: Mesh, start: np.ndarray) -> None:
    """Give all ranks the start of rank 0, in place.  Collective over the mesh."""
    warn_if_initial_parameters_differ(mesh, FlatParameters.over(start, (ParameterSpec("x", start.shape),)))
    mesh.world.broadcast(start, label="x0")


class MinimizingRanks:
    """The ranks of a mesh, each with its part of the vectors of a method. Collective, but for `minimizer`."""

    def __init__(self, unknowns: Unknowns, mesh: Mesh, optimizer: ShardedOptimizer) -> None:
        state = optimizer.state
        assert isinstance(state, MinimizationState)
        self.mesh, self.world = mesh, mesh.world
        self._unknowns, self._state = unknowns, state

    @property
    def minimizer(self) -> Minimizer:
        return self._state.minimization

    def gather(self, vector: Array) -> Array:
        """A vector of the minimizer as a new flat array, in the order that the user sees."""
        return self._unknowns.as_given(self._state.whole(vector))

    def own(self, given: Array) -> Array:
        """The reverse of `gather`, a copy."""
        return self._state.own_part(self._unknowns.arranged(given)).copy()


class MeshRanks(MinimizingRanks):
    """The ranks of a mesh that minimise together. Collective over the mesh, its creation too.

    The point is on every rank, and all take the start of rank 0; the vectors of the method are divided over the data
    axis as by ZeRO-1: a rank gives the minimizer its part of the gradient, and one all-gather an evaluation brings the
    next point together. `tell` takes the whole value and gradient, or with `reduction` "sum" a rank's part of both.
    Raises ValueError or TypeError on all ranks if an argument is invalid or differs between ranks.
    """

    def __init__(self, method: Method, unknowns: Unknowns, mesh: Mesh, reduction: str | None) -> None:
        self.optimizer = ZeRO1Optimizer(method, mesh)
        super().__init__(unknowns, mesh, self.optimizer)
        self.value = math.nan  # of the last evaluation
        self.interrupted = False  # Ctrl-C came on any rank before the last evaluation, inside of `watching`
        # The ranks whose value or gradient is not finite, if that has ended it and ranks differ; or the last failure.
        self.culprits = ""
        self._interrupts = Interrupts(speaks=mesh.rank == 0)
        self._sums = reduction == "sum"
        with raised_on_all(mesh.world):
            parameters = parameters_of(unknowns)
            if reduction not in (None, "sum"):
                raise ValueError(f"reduction={shown(reduction)} must be None or 'sum'")
            if mesh.size > mesh.data.size and not unknowns.is_split:
                raise ValueError(
                    f"x0 is whole, and the mesh has {mesh.sizes}, which cut it: give a mesh with a data axis alone, "
                    "mpishard.Mesh(), or this rank's part of x0, Partition(local, mesh) or FlatParameters(specs, "
                    "place=mesh.place)"
                )
        self.parameters = parameters
        start = f"{parameters.description} ({parameters.fingerprint:x})"
        self.optimizer.settings.agree({"x0": start, "reduction": str(reduction)})
        unknowns.take(unknowns.given)  # those of a Partition with ids may have changed since it was made
        warn_if_initial_parameters_differ(mesh, parameters)
        self._strategy = self.optimizer.bind(parameters)
        self._comparison = Comparison(mesh, parameters, self._sums)
        # The ranks of which a function may be collective: of parts of a sum those that share a field, else all.
        self.together: Axis | ModelParallelGroup = self.world
        if self._sums:
            self.together = ModelParallelGroup(mesh.tensor, mesh.pipeline, mesh.rank)

    def watching(self) -> AbstractContextManager[Any]:
        """The context in which Ctrl-C ends the loop in order."""
        return self._interrupts

    def publish(self, vector: Array) -> None:
        """Make a vector of the minimizer the values of the unknowns, on all ranks."""
        self._state.publish(vector)
        self._unknowns.show()

    # -- an evaluation ------------------------------------------------------------------------------------------------

    def tell(self, what: str, value: float, vector: Any, problem: BaseException | None) -> None:
        """Check the results of the user's function on every rank, combine them, and give them to the minimizer.

        `what` names the vector, a gradient or a Hessian product. Raises on all ranks if any has a problem.
        """
        may_fail = self.minimizer.wanted is Wanted.GRADIENT and self.minimizer.progress.evaluations > 0
        found = self.combined(what, value, vector, problem, may_fail)
        if found is None:
            self.value = math.inf
            point = self.minimizer.point
            self._state.tell_value(math.inf, arrays.zeros(point.size, point.dtype, like=point))
            return
        flat, total, digits = found
        own = self._own_part_of_result(flat)
        if self.minimizer.wanted is Wanted.PRODUCT:
            self._state.tell_product(own)
        else:
            self.minimizer.take_digits(digits)
            self._state.tell_value(total, own)
            self.value = total + self.minimizer.added_value
        if self.minimizer.stop_reason == "not finite":
            self._find_culprits(what.removeprefix("the "), value, flat, total, own)

    def combined_product(self, given: Any, problem: BaseException | None) -> Array:
        """This rank's part of a Hessian product of which each rank has the user's result; valid until the next call."""
        found = self.combined("the Hessian product", 0.0, given, problem)
        assert found is not None
        return self._own_part_of_result(found[0])

    def combined(
        self, what: str, value: float, given: Any, problem: BaseException | None, may_fail: bool = False
    ) -> tuple[Array, float, int] | None:
        """This rank's vector, the value of all ranks, and the fewest `digits_of` their vectors.

        None if the evaluation has failed on any rank (`EvaluationFailed`), which it may. Raises on all ranks if any has
        another problem, or if they differ.
        """
        flat, failed, reason, digits = None, False, "", digits_of(0.0)
        if may_fail and isinstance(problem, EvaluationFailed):
            reason = "" if hasattr(problem, ECHO) else f"{problem}" or type(problem).__name__
            failed, problem = True, None
        elif problem is None:
            try:
                flat, digits = self._unknowns.vector(what, given), digits_of(given)
            except Exception as error:  # any, of an array that is computed or read only now
                problem = error
        numbers = [self._interrupts.came, failed, digits, *self._comparison.hashes(flat)]
        values, facts = exchange(self.world, problem, value, numbers)
        self.interrupted = bool(facts[:, 0].any())
        if facts[:, 1].any():
            reasons = self.world.allgather_object(reason)
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            self.culprits = failure_in_words(self.minimizer, reasons[rank], rank if self.world.size > 1 else None)
            return None
        assert flat is not None
        if not self._sums:
            check_identical("values", values)
        self._comparison.check(what, flat, facts[:, 3:])
        flat = self._unknowns.arranged(flat)
        return flat, sum_of_values(values.tolist()) if self._sums else float(values[0]), int(facts[:, 2].min())

    def _own_part_of_result(self, flat: Array) -> Array:
        """This rank's part of a vector of the user's function, or of its sum over the ranks.

        That is over the data axis, and over the copies of tensors that are partial. `flat` is this rank's result, like
        the parameters, and only read. What is returned is valid until the next call for another vector.
        """
        strategy = self._strategy
        if not self._sums:
            return self._state.own_part(flat)
        if strategy.axis.size == 1 and strategy.compressed is None and not strategy.copies.sum_changes:
            return self._state.own_part(flat)
        reducer = strategy.reducer
        for piece in self.parameters.pieces:
            view, _ = self.parameters.gradient(piece.name)
            view[...] = flat[piece.start : piece.start + piece.size].reshape(piece.shape)
            self.parameters.mark_ready(piece.name)
        reducer.finalize()
        own = self._state.gradient(1.0)
        reducer.reset()
        return own

    def _find_culprits(self, what: str, value: float, flat: Array, total: float, own: Array) -> None:
        """Find the tensors and ranks whose number that is not finite has ended the run, unless all have one.

        `value` and `flat` are this rank's terms, `total` and `own` the sum of all values and this rank's part of that
        of vectors. All are finite where only trials before them were not.
        """
        finite = math.isfinite(value) and math.isfinite(largest(flat))
        summed = math.isfinite(total) and math.isfinite(largest(own))
        if not on_any(self.world, not (finite and summed)):
            return
        if not (self._sums or (on_any(self.world, finite) and on_any(self.world, not finite))):
            return
        inspection = self.optimizer.state.on_rank.inspection
        inspection.nonfinite_loss = "" if math.isfinite(value) else str(value)
        tensor = None
        if self._unknowns.has_fields:  # ranks have given other values than those that they update
            tensor = self._unknowns.nonfinite_name(self._unknowns.as_given(flat))
        else:
            for bucket in self._strategy.reducer.buckets:
                inspection.look(bucket, flat[bucket.start : bucket.start + bucket.size])
        self.culprits = inspection.culprits(self.optimizer.clock, what, tensor)
        inspection.forget()

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        from mpishard.training.saving import save_checkpoint  # with h5py: only for those who save

        self.publish(self.minimizer.point)
        return save_checkpoint(folder, self.parameters, self.optimizer)

    def load(self, folder: str | Path) -> None:
        from mpishard.training.saving import load_checkpoint

        load_checkpoint(folder, self.parameters, self.optimizer)


# The results that must be identical on the user's ranks, their comparison, and the error where they differ.


class Comparison:
    """Compares vectors by their hashes: the first one that ranks give, in debug mode all.

    Ranks that hold the same slices of the parameters give the same vector, unless they give terms of a sum. Ranks of
    one tensor axis give the same for each tensor that all of them hold, unless its terms are summed over that axis.
    `sums`: vectors are summed over the data axis, and those of `partial` tensors over the tensor axis.
    """

    def __init__(self, mesh: Mesh, parameters: FlatParameters, sums: bool) -> None:
        self._mesh = mesh
        self._sums = sums
        pieces = zip(parameters.local, parameters.pieces, strict=True)
        self._replicas: list[Piece] = [
            piece
            for spec, piece in pieces
            if mesh.tensor.size > 1 and not spec.is_split and not (sums and spec.partial)
        ]
        self._is_due = True

    def hashes(self, flat: Array | None) -> tuple[int, int]:
        """Hashes of a vector, and of its tensors that all tensor ranks hold, which ranks exchange before `check`.

        0 where nothing is to be compared, and for a missing vector (None), of which other ranks learn elsewhere.
        """
        if not self._is_due or flat is None:
            return 0, 0
        return 0 if self._sums else arrays.digest(flat), arrays.digest(*self._parts(flat))

    def check(self, what: str, flat: Array, hashes: np.ndarray) -> None:
        """Raise ValueError on all ranks if two differ that must not; `hashes` has a row for each rank.

        Collective over the mesh if a comparison is due.
        """
        if not self._is_due:
            return
        world, place = self._mesh.world, self._mesh.coordinates
        own = (place["pipeline"], "slice", place["tensor"]), (place["pipeline"], "copies", place["data"])
        groups = world.allgather_object(own)
        if _first_difference([group for group, _ in groups], hashes[:, 0].tolist()) is not None:
            raise _difference_error(f"values of {what}", hashes[:, 0])
        copies = [group for _, group in groups]
        if _first_difference(copies, hashes[:, 1].tolist()) is not None:
            raise self._replica_error(what, flat, copies)
        self._is_due = self._mesh.debug

    def _parts(self, flat: Array) -> list[Array]:
        return [flat[piece.start : piece.start + piece.size] for piece in self._replicas]

    def _replica_error(self, what: str, flat: Array, groups: Sequence[Any]) -> ValueError:
        """The error for a tensor that differs between tensor ranks.  Collective over the mesh."""
        own = {piece.name: arrays.digest(part) for piece, part in zip(self._replicas, self._parts(flat), strict=True)}
        by_rank = self._mesh.world.allgather_object(own)
        names = dict.fromkeys(name for each in by_rank for name in each)
        pairs = ((name, _first_difference(groups, [each.get(name) for each in by_rank])) for name in names)
        name, (rank, other) = next((name, pair) for name, pair in pairs if pair is not None)
        parts = f"say ParameterSpec({name!r}, ..., partial=True) if each gives its part of a sum, or " * self._sums
        return ValueError(
            f"the function gives different values of {what} of {name!r} on rank {rank} and on rank {other}, which both "
            f"hold this tensor whole, and their copies would drift apart: {parts}give the same on both"
        )


def exchange(
    world: Axis, problem: BaseException | None, value: float, numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange the results of an evaluation on each rank. Collective over the axis, in one call.

    `numbers` are as many on each rank. Returns the values by rank, with one NaN and one zero, and a row of the numbers
    for each rank. Raises on all ranks if any has a problem.
    """
    bits = np.float64(math.nan if math.isnan(value) else value + 0.0).view(np.int64)
    own = np.array([problem is not None, bits, *numbers], np.int64)
    facts = np.empty(own.size * world.size, np.int64)
    facts = world.all_gather(facts, own, [own.size] * world.size, label="control").reshape(-1, own.size)
    if facts[:, 0].any():
        world.raise_together(problem)
    return np.ascontiguousarray(facts[:, 1]).view(np.float64), facts[:, 2:]


def check_identical(what: str, by_rank: np.ndarray, remedy: str = HOW_TO_SUM) -> None:
    """Raise ValueError, the same on all ranks, if ranks have different results for one point.

    `what` names in the plural the values from `exchange`, or hashes of vectors, the same array on all ranks. `remedy`
    is for a function of which each rank gives its part of a sum.
    """
    if len(set(by_rank.view(np.int64).tolist())) > 1:
        raise _difference_error(what, by_rank, remedy)


def _difference_error(what: str, by_rank: np.ndarray, remedy: str = HOW_TO_SUM) -> ValueError:
    """The error of ranks that give different results for one point."""
    hashed = by_rank.dtype == np.int64
    values = [f"{each:x}" if hashed else repr(each) for each in by_rank.tolist()]
    first = values[0]
    other = next(rank for rank, value in enumerate(values) if value != first)
    same = [rank for rank, value in enumerate(values) if value == first]
    return ValueError(
        f"the function gives different {what}{' (here by their hashes)' * hashed} for one point: {first} on ranks "
        f"{brief(same)} and {values[other]} on rank {other}.  If each rank gives its part of the sum, {remedy}; else "
        "make it deterministic, the same on all ranks"
    )


def _first_difference(groups: Sequence[Any], values: Sequence[Any]) -> tuple[int, int] | None:
    """The first two ranks of one group that have different values."""
    first: dict[Any, int] = {}
    for rank, group in enumerate(groups):
        if values[first.setdefault(group, rank)] != values[rank]:
            return first[group], rank
    return None
