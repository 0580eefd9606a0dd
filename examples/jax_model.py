"""mpirun -n 4 python examples/jax_model.py [--seed 0]

A JAX function trained by ZeRO-2 over MPI ranks: a surrogate of Kepler's equation M = E - e sin E, which finds E - M for
an orbit's mean anomaly M and eccentricity e. Beside it its original, JAX alone on one rank. Needs jax.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import mpishard
from mpishard.data.sampling import Sampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seed", type=int, default=0)
seed = parser.parse_args().seed
random = np.random.default_rng(seed)  # all ranks draw the same bits
anomaly, eccentricity = random.uniform([-np.pi, 0], [np.pi, 0.9], (2000, 2)).astype("f").T  # E and e
shift = eccentricity * np.sin(anomaly)
orbits = np.stack([anomaly - shift, eccentricity], axis=1)
tensors = {"w": random.standard_normal((2, 64), np.float32), "b": np.zeros(64, "f"), "v": np.zeros(64, "f")}

with mpishard.Mesh() as mesh:  # before the first array of JAX: it limits the threads of XLA
    start, unravel = ravel_pytree(tensors)

    def summed_loss(flat: jax.Array, orbits: jax.Array, shift: jax.Array) -> jax.Array:
        p = unravel(flat)
        return jnp.sum((jnp.tanh(orbits @ p["w"] + p["b"]) @ p["v"] - shift) ** 2)

    def loss_and_gradient(parameters: np.ndarray, samples: np.ndarray, gradients: np.ndarray) -> float:
        # JAX shares the parameters, NumPy its gradient; JAX copies the batch. XLA writes results to its own memory
        # only, hence the sum. The optimizer changes the parameters in place: JAX must be done with them before.
        results = value_and_grad(jnp.from_dlpack(parameters), orbits[samples], shift[samples])
        loss, gradient = jax.block_until_ready(results)
        gradients += np.from_dlpack(gradient)
        return float(loss)

    value_and_grad = jax.jit(jax.value_and_grad(summed_loss))
    optimizer = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=2e-3), mesh)
    problem = mpishard.OptimizationProblem(loss_and_gradient, np.asarray(start), 2000, 128, steps=200, seed=seed)
    history, worst, alone = optimizer.optimize(problem).loss_history, 0.0, []
    if mesh.rank == 0:
        p, m, v = start, 0 * start, 0 * start
        for step in range(1, 201):
            samples = Sampler(2000, 128, seed).batch(step)
            loss, g = (total / len(samples) for total in value_and_grad(p, orbits[samples], shift[samples]))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            p = (1 - 2e-3 * 0.01) * p - 2e-3 * m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)
            alone.append(loss.item())
        worst = np.max(np.abs(history / alone - 1))
        print(f"loss {history[0]:.3f} -> {history[-1]:.5f} on {mesh.size} ranks; JAX alone: {alone[-1]:.5f}")
        print(f"{'PASS' if worst < 1e-6 else 'FAIL'}: losses differ by at most {worst:.1e}; wanted: below 1e-6")
sys.exit(0 if worst < 1e-6 else 1)
