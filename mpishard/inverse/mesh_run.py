"""A minimisation on the ranks of a mesh, which divide the vectors of the method between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend.exact import largest
from mpishard.comm.agreement import agree_on_settings, text_of
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.optimizers import ZeRO1Optimizer
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import ZeRO1
from mpishard.data_parallel.update import tell_product, tell_value
from mpishard.data_parallel.validation import warn_if_initial_parameters_differ
from mpishard.inverse.comparison import Comparison, check_alike, exchange
from mpishard.inverse.functions import Unknowns
from mpishard.launch.signals import Interrupts
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers.method import Method, Minimizer
from mpishard.parameters.flat import FlatParameters

Array = Any


# The evaluations of a method whose values and gradients come from outside of a training loop.


class MethodEvaluations:
    """Passes values and gradients to the minimisation of an optimizer, and moves vectors between parts and parameters.

    The optimizer has a method, under ZeRO-1. Methods are collective over the mesh, and so is the creation, which binds
    `parameters`, the start and then the point of each evaluation.
    """

    def __init__(self, optimizer: ShardedOptimizer, parameters: FlatParameters) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        strategy, state = optimizer.bind(parameters), optimizer.state.method
        assert isinstance(strategy, ZeRO1) and state is not None
        self._strategy = strategy
        self._state = state
        self._inspection = optimizer.state.binding.on_rank.inspection

    @property
    def minimizer(self) -> Minimizer:
        return self._state.minimizer

    def publish(self, vector: Array) -> None:
        """Make this rank's part of a vector of the minimisation the parameters, on all ranks."""
        self._state.publish(vector)

    def whole(self, vector: Array) -> Array:
        """This rank's part of a vector of the minimisation as a new flat array like the parameters of this rank."""
        return self._state.whole(vector)

    def own_part(self, flat: Array) -> Array:
        """This rank's part of a vector like the parameters that all ranks have, until the next call; not collective."""
        return self._state.own_part(flat)

    def own_part_of_sum(self, flat: Array) -> Array:
        """This rank's part of the sum of vectors over the data axis, and over the copies of tensors that are partial.

        `flat` is this rank's term, like the parameters, and only read. The result is valid until the next call for
        another vector.
        """
        strategy = self._strategy
        if strategy.axis.size == 1 and strategy.compressed is None and not strategy.copies.sums:
            return self.own_part(flat)
        reducer = strategy.reducer
        reducer.is_last_pass = True
        for piece in self._parameters.pieces:
            view, _ = self._parameters.gradient(piece.name)
            view[...] = flat[piece.start : piece.start + piece.size].reshape(piece.shape)
            self._parameters.mark_ready(piece.name)
        reducer.finalize()
        own = self._state.gradient(1.0)
        reducer.reset()
        return own

    def tell(self, value: float, gradient: Array) -> None:
        """Pass value, the same on all ranks, and this rank's part of the gradient; parameters stay until `publish`."""
        tell_value(self._optimizer, self._optimizer.state.binding, self._state, value, gradient)

    def culprits(self, what: str, value: float, flat: Array) -> str:
        """The tensors and ranks whose value or vector is not finite, as text, the same on all ranks.

        `value` and `flat` are this rank's terms, the latter like the parameters; `what` names the vector.
        """
        inspection = self._inspection
        inspection.nonfinite_loss = "" if math.isfinite(value) else str(value)
        for bucket in self._strategy.reducer.buckets:
            inspection.look(bucket, flat[bucket.start : bucket.start + bucket.size])
        found = inspection.culprits(self._optimizer.clock, what)
        inspection.forget()
        return found

    def tell_product(self, product: Array) -> None:
        """Pass this rank's part of a Hessian product."""
        tell_product(self._optimizer, self._optimizer.state.binding, self._state, product)


# A minimisation.


def agreed(mesh: Any, problem: Exception | None) -> None:
    """Raise on all ranks of the mesh if any has a problem. Collective over the mesh.

    Raises TypeError, on this rank, if `mesh` is not a Mesh.
    """
    if isinstance(mesh, Mesh):
        mesh.world.raise_if_any(problem)
    else:
        raise TypeError(f"mesh={shown(mesh)} must be mpishard.Mesh()")


def same_start(mesh: Mesh, start: np.ndarray, settings: Mapping[str, Any]) -> None:
    """Give all ranks the start of rank 0, in place, and raise on all if settings differ.  Collective over the mesh."""
    known = {name: text_of(value) for name, value in settings.items()}
    agree_on_settings(mesh.world, {"x0": f"{start.size} elements"} | known)
    warn_if_initial_parameters_differ(mesh, FlatParameters.over(start, (ParameterSpec("x", start.shape),)))
    mesh.world.broadcast(start, label="x0")


class MeshRun:
    """A minimisation by the ranks of a mesh: a `Run`. Collective over the mesh, its creation too.

    The point is on every rank, and all take the start of rank 0; the vectors of the method are divided over the data
    axis as by ZeRO-1: a rank gives the minimizer its part of the gradient, and one all-gather an evaluation brings the
    next point together. `tell` takes the whole value and gradient, or with `reduction` "sum" a rank's part of both.
    Raises ValueError or TypeError on all ranks if an argument is invalid or differs between ranks.
    """

    def __init__(self, method: Method, unknowns: Unknowns, mesh: Mesh, reduction: str | None) -> None:
        self.method = method
        self.unknowns = unknowns
        self.mesh = mesh
        self.speaks: bool = mesh.rank == 0
        self.value = math.nan
        self.interrupted = False
        self.culprits = ""
        self._interrupts = Interrupts(speaks=self.speaks)
        self._sums = reduction == "sum"
        self.optimizer = ZeRO1Optimizer(method, mesh)
        problem: Exception | None = None
        parameters: FlatParameters
        try:
            named = unknowns.parameters
            parameters = FlatParameters.over(unknowns.flat, unknowns.specs) if named is None else named
            if reduction not in (None, "sum"):
                raise ValueError(f"reduction={shown(reduction)} must be None or 'sum'")
        except (TypeError, ValueError) as error:
            problem = error
        mesh.world.raise_if_any(problem)
        self.parameters = parameters
        start = f"{parameters.description} ({parameters.fingerprint:x})"
        self.optimizer.settings.agree({"x0": start, "reduction": str(reduction)})
        warn_if_initial_parameters_differ(mesh, parameters)
        self._evaluations = MethodEvaluations(self.optimizer, parameters)
        self._comparison = Comparison(mesh, parameters, self._sums)

    @property
    def minimizer(self) -> Minimizer:
        return self._evaluations.minimizer

    def watching(self) -> AbstractContextManager[Any]:
        return self._interrupts

    # -- vectors ------------------------------------------------------------------------------------------------------

    def publish(self, vector: Array) -> None:
        self._evaluations.publish(vector)

    def whole(self, vector: Array) -> Array:
        return self._evaluations.whole(vector)

    # -- an evaluation ------------------------------------------------------------------------------------------------

    def tell(self, value: float, gradient: Any, problem: BaseException | None) -> None:
        flat, self.value = self._agree(value, "the gradient", gradient, problem)
        self._evaluations.tell(self.value, self._own(flat))
        self._look_for_culprits("gradient", value, flat)

    def value_of(self, value: float, gradient: Any, problem: BaseException | None) -> float:
        return self._agree(value, "the gradient", gradient, problem)[1]

    def tell_product(self, product: Any, problem: BaseException | None) -> None:
        flat, _ = self._agree(0.0, "the Hessian product", product, problem)
        self._evaluations.tell_product(self._own(flat))
        self._look_for_culprits("Hessian product", 0.0, flat)

    def _look_for_culprits(self, what: str, value: float, flat: Array) -> None:
        """If a number that is not finite has ended the run, find the ranks that gave it, unless all did."""
        if self.minimizer.stop_reason == "not finite":
            finite = math.isfinite(value) and math.isfinite(largest(flat))
            if self._sums or (self.any(finite) and self.any(not finite)):
                self.culprits = self._evaluations.culprits(what, value, flat)

    def _agree(self, value: float, what: str, given: Any, problem: BaseException | None) -> tuple[Array, float]:
        """This rank's vector, and the value of all ranks; raises on all if any has a problem, or if they differ."""
        flat = None
        if problem is None:
            try:
                flat = self.unknowns.vector(what, given)
            except (TypeError, ValueError) as error:
                problem = error
        numbers = [self._interrupts.came, *self._comparison.hashes(flat)]
        values, facts = exchange(self.mesh.world, problem, value, numbers)
        assert flat is not None
        self.interrupted = bool(facts[:, 0].any())
        if not self._sums:
            check_alike("values", values)
        self._comparison.check(what, flat, facts[:, 1:])
        return flat, _sum(values.tolist()) if self._sums else float(values[0])

    def _own(self, flat: Array) -> Array:
        """This rank's elements of a vector, which is the sum of those of all ranks if they give parts."""
        return self._evaluations.own_part_of_sum(flat) if self._sums else self._evaluations.own_part(flat)

    # -- ranks --------------------------------------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        return bool(self.mesh.world.all_reduce(np.array([flag], np.int64), op="max", label="control")[0])

    def raise_if_any(self, problem: BaseException | None) -> None:
        self.mesh.world.raise_if_any(problem)

    # -- saving -------------------------------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Raises: on a mesh the state is saved as a checkpoint."""
        raise ValueError("on a mesh save(folder) writes a checkpoint, which any number of ranks can load()")

    def deserialize(self, data: bytes) -> None:
        """Raises: on a mesh the state is saved as a checkpoint."""
        self.serialize()

    def save(self, folder: str | Path) -> Path:
        from mpishard.training.saving import save_checkpoint  # with h5py: only for those who save

        self.publish(self.minimizer.point)
        return save_checkpoint(folder, self.parameters, self.optimizer)

    def load(self, folder: str | Path) -> None:
        from mpishard.training.saving import load_checkpoint

        load_checkpoint(folder, self.parameters, self.optimizer)


def _sum(values: list[float]) -> float:
    """The sum, rounded once, so that the order of the ranks does not matter; not finite if a value is not."""
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
