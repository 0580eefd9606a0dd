"""The evaluations of a method whose values and gradients come from outside of a training loop."""

from __future__ import annotations

import math
from typing import Any

from mpishard.data_parallel.method_update import tell_product, tell_value
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import ShardedState
from mpishard.minimizers.minimizer import Minimizer
from mpishard.parameters.flat import FlatParameters

Array = Any


class MethodEvaluations:
    """Tells the minimisation of an optimizer, and moves vectors between its parts and the parameters.

    Methods are collective over the mesh, and so is the creation, which binds the parameters and begins.

    Parameters
    ----------
    optimizer : ShardedOptimizer
        With a method, under ZeRO-1.
    parameters : FlatParameters
        The start; then the point of each evaluation.
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
        """The minimisation."""
        return self._state.minimizer

    def publish(self, vector: Array) -> None:
        """Make a vector of the minimisation the parameters, on all ranks.

        Parameters
        ----------
        vector : 1-D array
            This rank's part.
        """
        self._state.publish(vector)

    def whole(self, vector: Array) -> Array:
        """A vector of the minimisation as a new flat array like the parameters of this rank.

        Parameters
        ----------
        vector : 1-D array
            This rank's part.

        Returns
        -------
        1-D array
            As long as the parameters.
        """
        return self._state.whole(vector)

    def own_part(self, flat: Array) -> Array:
        """This rank's part of a vector that every rank has.  Not collective.

        Parameters
        ----------
        flat : 1-D array
            Like the parameters.

        Returns
        -------
        1-D array
            Valid until the next call for another vector.
        """
        return self._state.own_part(flat)

    def own_part_of_sum(self, flat: Array) -> Array:
        """This rank's part of the sum of vectors over the data axis, and over the copies of tensors that are partial.

        Parameters
        ----------
        flat : 1-D array
            This rank's term, like the parameters; only read.

        Returns
        -------
        1-D array
            Valid until the next call for another vector.
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
        """Tell value and gradient; the parameters stay where they are until `publish`.

        Parameters
        ----------
        value : float
            The same on all ranks.
        gradient : 1-D array
            This rank's part.
        """
        tell_value(self._optimizer, self._optimizer.state.binding, self._state, value, gradient)

    def culprits(self, what: str, value: float, flat: Array) -> str:
        """Whose value or vector is not finite.

        Parameters
        ----------
        what : str
            What the vector is.
        value : float
            This rank's term of the value.
        flat : 1-D array
            That of the vector, like the parameters.

        Returns
        -------
        str
            With the tensors and their ranks, the same on all ranks.
        """
        inspection = self._inspection
        inspection.nonfinite_loss = "" if math.isfinite(value) else str(value)
        for bucket in self._strategy.reducer.buckets:
            inspection.look(bucket, flat[bucket.start : bucket.start + bucket.size])
        found = inspection.culprits(self._optimizer.clock, what)
        inspection.forget()
        return found

    def tell_product(self, product: Array) -> None:
        """Tell a Hessian product.

        Parameters
        ----------
        product : 1-D array
            This rank's part.
        """
        tell_product(self._optimizer, self._optimizer.state.binding, self._state, product)
