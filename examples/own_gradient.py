"""mpirun -n 4 python examples/own_gradient.py

A gradient of your own, over MPI ranks: recover how well each place of a plate conducts heat.

The plate is heated at a spot and cools while sensors record noisy temperatures; this is done again with other
spots. The unknown is the diffusivity field k(x, y) of

    du/dt = div(k grad u),   no flux through the edges,   k = exp(m).

``HeatExperiments.loss_and_gradient`` is the part to replace by your own: it returns the summed misfit of the
given experiments and adds their summed gradient with respect to m, from one forward and one adjoint solve.
mpishard decides which rank computes which experiments, adds up over ranks and takes the optimizer's step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import mpishard


class HeatExperiments:
    """Heat spots on an n by n grid of the unit square, and what sensors saw of them.

    Cell-centred finite differences in space, implicit Euler in time: (I + dt A(m)) u_k = u_(k-1) with
    A = D' K D / h^2, where D takes differences over cell faces and K = diag(k at the faces).
    """

    def __init__(self, n: int, experiments: int, noise: float, smoothness: float, seed: int) -> None:
        self.n, self.size, self.experiments = n, n * n, experiments
        self.smoothness = smoothness
        self.steps, self.time_step = 12, 2e-3
        self.observed = (2, 4, 8, 12)  # the steps after which the sensors are read

        cells = np.arange(self.size).reshape(n, n)
        self.left = np.concatenate([cells[:, :-1].ravel(), cells[:-1, :].ravel()])  # the cells on both sides
        self.right = np.concatenate([cells[:, 1:].ravel(), cells[1:, :].ravel()])  # of each face
        self.sensors = cells[1::3, 1::3].ravel()

        centres = (np.arange(n) + 0.5) / n
        self.x, self.y = np.meshgrid(centres, centres)
        random = np.random.default_rng(seed)  # every rank draws the same experiments
        spots = random.uniform(0.1, 0.9, (experiments, 2))
        self.initial = np.stack([self.bump(x, y, 0.08).ravel() for x, y in spots], axis=1)

        self.truth = 1.2 * self.bump(0.3, 0.65, 0.13) - 1.0 * self.bump(0.68, 0.35, 0.16)
        self.truth = (self.truth + 0.3 * np.sin(2 * np.pi * self.x) * self.y).ravel()
        clean = np.stack([u[self.sensors] for u in self.observations(self.truth, self.initial)])
        self.sigma = noise * np.abs(clean).mean()
        self.data = clean + self.sigma * random.standard_normal(
            clean.shape
        )  # (readings, sensors, experiments)

    def bump(self, x: float, y: float, width: float) -> np.ndarray:
        return np.exp(-((self.x - x) ** 2 + (self.y - y) ** 2) / (2 * width**2))

    def conductance(self, m: np.ndarray) -> np.ndarray:
        """dt k / h^2 at the faces, k being the geometric mean of the cells on both sides."""
        return self.time_step * self.n**2 * np.exp((m[self.left] + m[self.right]) / 2)

    def stepper(self, conductance: np.ndarray) -> np.ndarray:
        """(I + dt A)^-1, dense: one matrix serves all time steps of all experiments, forward and adjoint."""
        matrix = np.zeros((self.size, self.size))
        matrix[self.left, self.right] = matrix[self.right, self.left] = -conductance
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
        return np.linalg.inv(matrix)

    def trajectory(self, step: np.ndarray, initial: np.ndarray) -> list[np.ndarray]:
        states = [initial]
        for _ in range(self.steps):
            states.append(step @ states[-1])
        return states

    def observations(self, m: np.ndarray, initial: np.ndarray) -> list[np.ndarray]:
        states = self.trajectory(self.stepper(self.conductance(m)), initial)
        return [states[k] for k in self.observed]

    def loss_and_gradient(self, m: np.ndarray, samples: np.ndarray, gradient: np.ndarray) -> float:
        """Summed loss of the experiments `samples`; their summed gradient is added to `gradient`.

        The loss of one experiment is half its squared residuals over the noise's variance, plus its share of
        the smoothness term, so that the sum over all experiments holds that term once.
        """
        conductance = self.conductance(m)
        step = self.stepper(conductance)
        states = self.trajectory(step, self.initial[:, samples])

        residuals = {
            k: (states[k][self.sensors] - self.data[i][:, samples]) / self.sigma**2
            for i, k in enumerate(self.observed)
        }
        loss = 0.5 * self.sigma**2 * sum(float(np.sum(r**2)) for r in residuals.values())

        # The adjoint runs backwards: (I + dt A)' lambda_k = lambda_(k+1) + S' r_k, and A is symmetric.
        # A face then feels -dt/h^2 (D lambda_k)(D u_k), summed over steps and experiments.
        by_face = np.zeros_like(conductance)
        adjoint = np.zeros_like(states[0])
        for k in range(self.steps, 0, -1):
            if k in residuals:
                adjoint[self.sensors] += residuals[k]
            adjoint = step @ adjoint
            by_face -= np.sum(
                (adjoint[self.left] - adjoint[self.right]) * (states[k][self.left] - states[k][self.right]),
                axis=1,
            )
        by_face *= conductance / 2  # d conductance / dm, the same for the cells on both sides
        slope = self.smoothness * len(samples) / self.experiments * (m[self.left] - m[self.right])
        loss += 0.5 * float(np.sum(slope * (m[self.left] - m[self.right])))

        gradient += np.bincount(self.left, by_face + slope, self.size)
        gradient += np.bincount(self.right, by_face - slope, self.size)
        return loss

    def gradient_error(self, m: np.ndarray, seed: int = 0) -> float:
        """Relative difference of the adjoint gradient from a central difference in a random direction."""
        samples = np.arange(min(2, self.experiments))
        direction = np.random.default_rng(seed).standard_normal(self.size)
        gradient, unused = np.zeros(self.size), np.zeros(self.size)
        self.loss_and_gradient(m, samples, gradient)
        width = 1e-5
        up = self.loss_and_gradient(m + width * direction, samples, unused)
        down = self.loss_and_gradient(m - width * direction, samples, unused)
        difference = (up - down) / (2 * width)
        return abs(gradient @ direction - difference) / abs(difference)

    def error(self, m: np.ndarray) -> float:
        """Relative error of the diffusivity field exp(m)."""
        return float(np.linalg.norm(np.exp(m) - np.exp(self.truth)) / np.linalg.norm(np.exp(self.truth)))


def picture(problem: HeatExperiments, fields: dict[str, np.ndarray], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    low, high = float(np.exp(problem.truth).min()), float(np.exp(problem.truth).max())
    axes = figure.subplots(1, len(fields), sharey=True)
    for axis, (title, field) in zip(axes, fields.items(), strict=True):
        image = axis.imshow(
            np.exp(field).reshape(problem.n, problem.n),
            origin="lower",
            extent=(0, 1, 0, 1),
            vmin=low,
            vmax=high,
            cmap="viridis",
        )
        error = problem.error(field)
        axis.set(title=title if error == 0 else f"{title}: relative error {error:.1%}", xlabel="x")
    axes[0].set_ylabel("y")
    axes[0].plot(
        problem.x.ravel()[problem.sensors], problem.y.ravel()[problem.sensors], "w.", ms=3, label="sensor"
    )
    axes[0].legend(loc="upper right", labelcolor="white", facecolor="0.3")
    figure.colorbar(image, ax=axes, label="diffusivity k", shrink=0.8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", type=int, default=32, help="cells along each edge (default 32)")
    parser.add_argument("--experiments", type=int, default=64, help="heat spots (default 64)")
    parser.add_argument("--batch", type=int, default=16, help="experiments a step (default 16)")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--noise", type=float, default=0.05, help="of the mean temperature (default 0.05)")
    parser.add_argument("--smoothness", type=float, default=300.0, help="weight of |grad m|^2 (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("own-gradient-output"), help="folder for the picture"
    )
    options = parser.parse_args()

    with mpishard.Mesh() as mesh:
        heat = HeatExperiments(
            options.grid, options.experiments, options.noise, options.smoothness, options.seed
        )
        start = np.zeros(heat.size)
        gradient_error = heat.gradient_error(start)

        # The lines that make it distributed.
        rule = mpishard.Adam(lr=mpishard.cosine(0.06, steps=options.steps))
        optimizer = mpishard.as_distributed(rule, mesh)
        result = optimizer.optimize(
            mpishard.OptimizationProblem(
                heat.loss_and_gradient,
                start,
                samples=heat.experiments,
                batch_size=options.batch,
                steps=options.steps,
                seed=options.seed,
            )
        )

        before, after = heat.error(start), heat.error(result.parameters)
        passed = gradient_error < 1e-6 and after < before / 5
        if mesh.world.rank == 0:
            options.output.mkdir(parents=True, exist_ok=True)
            path = options.output / "diffusivity.png"
            picture(heat, {"truth": heat.truth, "start": start, "recovered": result.parameters}, path)
            print(f"{result.steps} steps of {options.batch} experiments, {mesh.world.size} ranks", end=", ")
            print(
                f"{result.seconds:.1f} s; loss {result.loss_history[0]:.0f} -> {result.loss_history[-1]:.0f}"
            )
            print(f"adjoint gradient against finite differences: relative difference {gradient_error:.1e}")
            print(f"picture: {path}")
            print("PASS:" if passed else "FAIL:", end=" ")
            print(
                f"relative error of the diffusivity {before:.3f} -> {after:.3f}; wanted: < {before / 5:.3f}"
            )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
