"""Forward and backward of a batch: a rank's micro-batches one after the other, and their gradients into the buckets."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from mpishard.arguments import returned
from mpishard.backend import array as arrays
from mpishard.backend.array import aligned_copy
from mpishard.backend.blas_threads import fix_blas_threads
from mpishard.data.sampling import micro_batches, share
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import GradientBuckets
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.tree_sum import TermAssignment
from mpishard.training.input_checks import Untouched
from mpishard.training.objective import Objective

_NAMED = 5  # samples that a message lists


class StepRunner:
    """Calls the function of a problem for this rank's part of each batch, from a first `attach` on.

    Parameters
    ----------
    problem : Objective
        Its FlatParameters are trained in place, an array is copied.
    optimizer : ShardedOptimizer
    looks : bool
        Whether the first call of the function is checked for changes of what it must only read; with ``debug`` of the
        mesh all calls are.

    Attributes
    ----------
    parameters : FlatParameters
        That the function gets, as `values`.
    misuse : Exception or None
        What a call of the function has changed that it must not.
    nonfinite_loss : str
        The first loss of this rank in the last batch that is not finite, in words.
    together : bool
        Whether ranks wait for each other inside the function, so that all must call it equally often.

    Raises
    ------
    ValueError
        If the optimizer has a loss scale, and the problem no model that multiplies its gradients by it.
    """

    buckets: GradientBuckets
    ordered: OrderedSums | None
    together: bool
    # What the function adds to: the buckets, or a flat array for a function of one.
    _gradients: Any

    def __init__(self, problem: Objective[Any], optimizer: ShardedOptimizer, looks: bool) -> None:
        self.problem = problem
        self.optimizer = optimizer
        self.axis = optimizer.axis
        start = problem.start
        self.of_model = isinstance(start, FlatParameters)
        self.parameters = start if isinstance(start, FlatParameters) else FlatParameters.over(aligned_copy(start))
        self.parameters.reset_gradients()  # what a backward pass left before is no part of this run
        if not self.of_model and optimizer.config.loss_scale is not None:
            raise ValueError(
                "loss_scale is for models, which multiply their gradients by it; the gradient of a function of a flat "
                "array comes as it is: leave loss_scale out"
            )
        self._looks = looks
        self.misuse: Exception | None = None
        self.nonfinite_loss = ""

    @property
    def values(self) -> Any:
        """The parameters as the user's function, callback and result have them: by name, or as one flat array."""
        return self.parameters if self.of_model else self.parameters.flat

    def attach(self) -> None:
        """Let the optimizer reduce the gradients; all ranks start from the parameters of the first.  Collective."""
        optimizer = self.optimizer
        strategy = optimizer.bind(self.parameters)
        strategy.replicas.spread()
        self.buckets = strategy.buckets
        self.ordered = strategy.ordered
        if self.ordered is not None:
            fix_blas_threads()  # a mesh made since the optimizer was has set their number again
        split = self.parameters.sharded is not None or optimizer.mesh.data.size < optimizer.mesh.size
        # A rank whose peers wait for it inside the model must run it even without samples: for its part of the model,
        # or since they reduce each of the micro-batches that the model may make.
        self.together = split or (self.of_model and self.buckets.on_demand)
        self._gradients = self.buckets
        if not self.of_model:
            self._gradients = arrays.zeros(self.parameters.size, self.parameters.dtype, like=self.parameters.like)

    def detach(self) -> None:
        """Leave the buckets as the configuration wants them for gradients that come from elsewhere."""
        self.buckets.no_sync = not self.optimizer.config.auto_sync_gradients

    def losses_and_gradient(self, batch: np.ndarray) -> tuple[np.ndarray, int]:
        """Summed losses of a batch, whose sum over ranks is to be added up, and the global number of its terms."""
        self.nonfinite_loss = ""
        if self.ordered is None:
            losses = np.array([self._forward_backward_shares(batch)])
        else:
            losses = self._forward_backward_terms(batch, self.ordered)
        if not self.of_model:
            self.buckets.use_external(self._gradients)
        # Ranks without samples start their reductions here, the others did so in the backward pass: no other
        # collective may come before.
        self.buckets.end_pass()
        return losses, len(batch) * self.problem.tokens_per_sample

    def sums_of(self, *parts: np.ndarray) -> tuple[list[float], list[np.ndarray]]:
        """The summed losses of some samples on this rank alone, and the gradient as it has added up after each part.

        Not where ranks meet in a backward pass.  The caller forgets the gradients.
        """
        self.parameters.reset_gradients()
        losses, gradients = [], []
        if not self.of_model:
            self._gradients[...] = 0
        for samples in parts:
            self.buckets.no_sync = True
            losses.append(self._forward_backward(samples))
            if self.of_model:
                self.buckets.end_pass(last=False)
            values = self.buckets.flat if self.of_model else self._gradients
            gradients.append(np.array(arrays.to_host(values), np.float64))
        return losses, gradients

    def _forward_backward_shares(self, batch: np.ndarray) -> float:
        """Forward and backward of this rank's samples, whose gradients add up; returns their summed loss."""
        shares = share(batch, self.axis.rank, self.axis.size, self.problem.micro_batch_size)
        loss_sum = 0.0
        if not self.of_model:
            self._gradients[...] = 0
        for number, samples in enumerate(shares, start=1):
            last = number == len(shares)
            self.buckets.no_sync = not last
            loss_sum += self._forward_backward(samples)
            if self.of_model and not last:
                self.buckets.end_pass(last=False)
        return loss_sum

    def _forward_backward_terms(self, batch: np.ndarray, ordered: OrderedSums) -> np.ndarray:
        """The same where each micro-batch is a term of an ordered sum; returns the losses of all, 0 for others' own."""
        micro = micro_batches(batch, self.problem.micro_batch_size)
        in_turns = self.of_model and self.buckets.on_demand
        ordered.deal = deal = TermAssignment(len(micro), self.axis.size, in_turns)
        own = deal.terms(self.axis.rank)
        tree_merges = deal.tree_merges(self.axis.rank) or [0]
        losses = np.zeros(len(micro))
        # A rank that lacks a term takes part in what the others do in the model all the same.
        rounds = deal.exchanges if in_turns else max(1, len(own))
        for number in range(rounds):
            last = number == rounds - 1
            self.buckets.no_sync = not last
            self.buckets.tree_merges = tree_merges[-1] if last else 0
            if not self.of_model:
                self._gradients[...] = 0
            if number < len(own):
                losses[own[number]] = self._forward_backward(micro[own[number]])
            else:
                self._forward_backward(micro[0][:0])
            if last:
                break
            if not self.of_model:
                self._gradients = self.buckets.swap_external(self._gradients, tree_merges[number])
            elif in_turns:
                self.buckets.end_pass(last=False)
            else:
                self.buckets.push_partial(tree_merges[number])
        return losses

    def _forward_backward(self, samples: np.ndarray) -> float:
        """Forward and backward of one micro-batch; returns its summed loss."""
        if not len(samples) and not self.together:
            return 0.0
        look = Untouched(self.parameters, samples) if self._looks and len(samples) else None
        began = time.perf_counter()
        loss = self.problem.function(self.values, samples, self._gradients)
        self.optimizer.mesh.ledger.note(f"{len(samples)} samples", "function", began)
        if look is not None:
            self.misuse = self.misuse or look.problem()
            self._looks = self.optimizer.mesh.debug
        try:
            loss = returned(loss)
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor of PyTorch with more elements
            what = f"a {type(loss).__name__}"
            raise TypeError(f"the function must return the summed loss as one number, got {what}") from None
        if not math.isfinite(loss) and not self.nonfinite_loss:
            self.nonfinite_loss = f"{loss} of {_listed(samples)}"
        return loss


def _listed(samples: np.ndarray) -> str:
    """Sample indices in words, the first few of them."""
    named = ", ".join(map(str, samples[:_NAMED].tolist()))
    more = f" and {len(samples) - _NAMED} more" if len(samples) > _NAMED else ""
    return f"samples {named}{more}" if named else "no samples"
