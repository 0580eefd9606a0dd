"""Debug mode: checks with one micro-batch and its two halves that a function returns sums over its samples."""

from __future__ import annotations

import numpy as np

from mpishard.data.sampling import share
from mpishard.training.step_runner import StepRunner

# A mean in place of a sum differs by a factor of two, rounding in half precision by a thousandth.
_TOLERANCE = 0.02
_AGAIN = 1e-5  # the tolerance between two calls for the same samples


def check_sums(runner: StepRunner, batch: np.ndarray) -> None:
    """Raise ValueError on all ranks unless loss and gradient of a micro-batch are the sums over its two halves.

    Each rank uses its first micro-batch of `batch`.  Parameters and state do not change.  There is no check for models
    whose ranks synchronize inside a backward pass (ZeRO-2 and 3, tensor and pipeline ranks), nor for functions that
    give two results for the same samples.  Collective.
    """
    if runner.together:
        return
    samples = share(batch, runner.axis.rank, runner.axis.size, runner.problem.micro_batch_size)[0]
    half = len(samples) // 2
    problem: Exception | None = None
    if half:
        try:
            problem = _difference(runner, samples[:half], samples[half : 2 * half])
        except Exception as error:  # of the user's function: all ranks must learn of it
            problem = error
        runner.parameters.reset_gradients()
        problem = runner.misuse or problem
    runner.optimizer.world.raise_if_any(problem)


def _difference(runner: StepRunner, first: np.ndarray, second: np.ndarray) -> ValueError | None:
    """The error of a function that does not return sums, or None."""
    both = np.concatenate([first, second])
    (loss,), (gradient,) = runner.sums_of(both)
    losses, (of_first, of_halves) = runner.sums_of(first, second)
    loss_of_halves = sum(losses)
    pairs = (loss, loss_of_halves), (gradient, of_halves)
    if all(_alike(whole, halves) for whole, halves in pairs):
        return None
    (again,), (gradient_again,) = runner.sums_of(both)
    if not (_alike(loss, again, _AGAIN) and _alike(gradient, gradient_again, _AGAIN)):
        return None  # a random function, or one that is not finite
    sums = (
        f"the loss of {len(both)} samples is {loss:.6g} and those of their two halves {losses[0]:.6g} and "
        f"{losses[1]:.6g}, the norm of the gradient {np.linalg.norm(gradient):.6g} and that of the halves', added up, "
        f"{np.linalg.norm(of_halves):.6g}"
    )
    if all(_alike(whole, halves) or _alike(2 * whole, halves) for whole, halves in pairs):
        return ValueError(
            f"the function returns a mean where it must return a sum: {sums}; return the sum over the samples, and add "
            "the sum of their gradients: the one division is by the number of samples of all ranks"
        )
    if _alike(gradient - of_first, of_halves):
        return ValueError(
            f"the function overwrites the gradients where it must add to them: {sums}; use gradients += ..."
        )
    return ValueError(f"the function does not return sums over its samples: {sums}")


def _alike(one: np.ndarray | float, other: np.ndarray | float, tolerance: float = _TOLERANCE) -> bool:
    """Whether the difference is at most `tolerance` times the largest element."""
    most = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(np.subtract(one, other)).max(initial=0) <= tolerance * most)
