"""The evaluations of a method whose values and gradients come from outside of a training loop."""

from __future__ import annotations

import math
from typing import Any

from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import ShardedState
from mpishard.data_parallel.update import tell_product, tell_value
from mpishard.minimizers.minimizer import Minimizer
from mpishard.parameters.flat import FlatParameters

Array = Any


class MethodEvaluations:
    """Passes values and gradients to the minimisation of an optimizer, and moves vectors between parts and parameters.

    The optimizer has a method, under ZeRO-1. Methods are collective over the mesh, and so is the creation, which binds
    `parameters`, the start and then the point of each evaluation.
    """

    def __init__(self, optimizer: ShardedOptimizer, parameters: FlatParameters) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        strategy, state = optimizer.bind(parameters), optimizer.state.method
        assert isinstance(strategy, ShardedState) and state is not None
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
