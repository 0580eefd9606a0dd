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

METHODS = {
    "l-bfgs": mpishard.LBFGS(),
    "l-bfgs-b": mpishard.LBFGSB(bounds=(-3.0, 3.0)),  # of m, the logarithm of the diffusivity
    "cg": mpishard.NonlinearCG(),
}


def transposed(field: np.ndarray) -> np.ndarray:
    """Columns for rows."""
    return field.transpose(1, 0, 2)


class HeatExperiments:
    """Heat spots on an n by n grid of the unit square, and what sensors saw of them.

    Cell-centred finite differences in space, implicit in time, one direction after the other (Yanenko's fractional
    steps), so that each solve is along lines of n cells:

        (I + dt A_x(m)) v_k = u_(k-1)        (I + dt A_y(m)) u_k = v_k        A = D' K D / h^2

    where D takes differences across cell faces and K holds k there. Fields are arrays (y, x, experiment).
    """

    def __init__(self, n: int, experiments: int, noise: float, smoothness: float, seed: int) -> None:
        self.n, self.experiments, self.smoothness = n, experiments, smoothness
        self.steps, self.time_step = 24, 1e-3
        self.observed = (4, 8, 16, 24)  # the steps after which the sensors are read
        self.sensors = (slice(1, None, 4), slice(1, None, 4))

        centres = (np.arange(n) + 0.5) / n
        self.x, self.y = np.meshgrid(centres, centres)
        truth = 1.2 * self.bump(0.3, 0.65, 0.13) - 1.0 * self.bump(0.68, 0.35, 0.16)
        self.truth = (truth + 0.3 * np.sin(2 * np.pi * self.x) * self.y).ravel()

        random = np.random.default_rng(seed)  # every rank draws the same experiments
        spots = random.uniform(0.1, 0.9, (experiments, 2))
        self.initial = np.stack([self.bump(x, y, 0.08) for x, y in spots], axis=-1)
        states = self.forward(*self.solvers(*self.conductances(self.truth)), self.initial)
        self.readings = {k: states[k][1][self.sensors] for k in self.observed}
        self.sigma = noise * np.mean([np.abs(clean).mean() for clean in self.readings.values()])
        for clean in self.readings.values():
            clean += self.sigma * random.standard_normal(clean.shape)

    def bump(self, x: float, y: float, width: float) -> np.ndarray:
        return np.exp(-((self.x - x) ** 2 + (self.y - y) ** 2) / (2 * width**2))

    def conductances(self, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """dt k / h^2 at the faces in x and in y, k being the geometric mean of the cells on both sides."""
        m_yx = m.reshape(self.n, self.n)
        scale = self.time_step * self.n**2
        across = scale * np.exp((m_yx[:, 1:] + m_yx[:, :-1]) / 2)
        down = scale * np.exp((m_yx[1:, :] + m_yx[:-1, :]) / 2)
        return across, down

    def solvers(self, across: np.ndarray, down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(I + dt A_x)^-1 of each row and (I + dt A_y)^-1 of each column: symmetric n by n matrices."""

        def inverses(faces: np.ndarray) -> np.ndarray:
            lines, left = np.zeros((self.n, self.n, self.n)), np.arange(self.n - 1)
            lines[:, left, left + 1] = lines[:, left + 1, left] = -faces
            lines[:, np.arange(self.n), np.arange(self.n)] = 1 - lines.sum(axis=2)
            return np.linalg.inv(lines)

        return inverses(across), inverses(down.T)

    def forward(self, rows: np.ndarray, columns: np.ndarray, u: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(v_k, u_k) of all steps, the initial state first."""
        states = [(u, u)]
        for _ in range(self.steps):
            v = rows @ states[-1][1]
            states.append((v, transposed(columns @ transposed(v))))
        return states

    def loss_and_gradient(self, m: np.ndarray, samples: np.ndarray, gradient: np.ndarray) -> float:
        """Summed loss of the experiments `samples`; their summed gradient is added to `gradient`.

        The loss of one experiment is half its squared residuals over the noise's variance, plus its share of
        the smoothness term, so that the sum over all experiments holds that term once.
        """
        across, down = self.conductances(m)
        rows, columns = self.solvers(across, down)
        states = self.forward(rows, columns, self.initial[:, :, samples])

        # The adjoint runs the steps backwards with the transposed solves, which are the same ones, fed by the
        # residuals. A face feels -dt/h^2 (D adjoint)(D state), summed over steps and experiments.
        loss = 0.0
        by_across, by_down = np.zeros_like(across), np.zeros_like(down)
        adjoint = np.zeros_like(states[0][1])
        for k in range(self.steps, 0, -1):
            v, u = states[k]
            if k in self.observed:
                residual = (u[self.sensors] - self.readings[k][:, :, samples]) / self.sigma
                loss += 0.5 * float(np.sum(residual**2))
                adjoint[self.sensors] += residual / self.sigma
            adjoint = transposed(columns @ transposed(adjoint))
            by_down -= np.einsum("yxs,yxs->yx", np.diff(adjoint, axis=0), np.diff(u, axis=0))
            adjoint = rows @ adjoint
            by_across -= np.einsum("yxs,yxs->yx", np.diff(adjoint, axis=1), np.diff(v, axis=1))

        m_yx, gradient_yx = m.reshape(self.n, self.n), gradient.reshape(self.n, self.n)
        weight = self.smoothness * len(samples) / self.experiments
        rise = np.diff(m_yx, axis=1), np.diff(m_yx, axis=0)
        loss += 0.5 * weight * float(np.sum(rise[0] ** 2) + np.sum(rise[1] ** 2))
        by_across *= across / 2  # d conductance / dm, the same for the cells on both sides
        by_down *= down / 2
        gradient_yx[:, 1:] += by_across + weight * rise[0]
        gradient_yx[:, :-1] += by_across - weight * rise[0]
        gradient_yx[1:, :] += by_down + weight * rise[1]
        gradient_yx[:-1, :] += by_down - weight * rise[1]
        return loss

    def gradient_error(self, m: np.ndarray, seed: int = 0) -> float:
        """Relative difference of the adjoint gradient from a central difference in a random direction."""
        samples = np.arange(min(2, self.experiments))
        direction = np.random.default_rng(seed).standard_normal(m.size)
        gradient, unused = np.zeros(m.size), np.zeros(m.size)
        self.loss_and_gradient(m, samples, gradient)
        width = 1e-5
        up = self.loss_and_gradient(m + width * direction, samples, unused)
        down = self.loss_and_gradient(m - width * direction, samples, unused)
        difference = (up - down) / (2 * width)
        return float(abs(gradient @ direction - difference) / abs(difference))

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
    axes[0].plot(problem.x[problem.sensors].ravel(), problem.y[problem.sensors].ravel(), "w.", ms=3, label="sensor")
    axes[0].legend(loc="upper right", labelcolor="white", facecolor="0.3")
    figure.colorbar(image, ax=axes, label="diffusivity k", shrink=0.8)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["adam", *METHODS], default="adam", help="what takes the steps")
    parser.add_argument("--grid", type=int, default=48, help="cells along each edge (default 48)")
    parser.add_argument("--experiments", type=int, default=128, help="heat spots (default 128)")
    parser.add_argument("--batch", type=int, default=32, help="experiments a step of Adam (default 32)")
    parser.add_argument("--steps", type=int, default=100, help="steps of Adam, or evaluations (default 100)")
    parser.add_argument("--noise", type=float, default=0.05, help="of the mean temperature (default 0.05)")
    parser.add_argument("--smoothness", type=float, default=1000.0, help="weight of |grad m|^2 (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("own-gradient-output"), help="folder for the picture")
    options = parser.parse_args()
    if options.noise <= 0 or options.steps < 1:
        parser.error("--noise must be above 0, since residuals are divided by it, and --steps at least 1")

    with mpishard.Mesh() as mesh:
        if mesh.rank == 0:
            options.output.mkdir(parents=True, exist_ok=True)  # before the work, in case it cannot be
        heat = HeatExperiments(options.grid, options.experiments, options.noise, options.smoothness, options.seed)
        start = np.zeros(heat.truth.size)
        gradient_error = heat.gradient_error(start)

        # The lines that make it distributed.
        if options.method == "adam":
            optimizer = mpishard.as_distributed(mpishard.Adam(lr=mpishard.cosine(0.06, steps=options.steps)), mesh)
            batch = options.batch
        else:  # a line search needs one function: all experiments in each evaluation
            optimizer = mpishard.as_distributed(METHODS[options.method], mesh)
            batch = options.experiments
        result = optimizer.optimize(
            mpishard.OptimizationProblem(
                heat.loss_and_gradient,
                start,
                samples=heat.experiments,
                batch_size=batch,
                steps=options.steps,
                seed=options.seed,
            )
        )

        before, after = heat.error(start), heat.error(result.parameters)
        passed = gradient_error < 1e-6 and after < before / 5
        if mesh.rank == 0:
            path = options.output / "diffusivity.png"
            picture(heat, {"truth": heat.truth, "start": start, "recovered": result.parameters}, path)
            print(f"{result.steps} steps of {batch} experiments, {mesh.size} ranks", end=", ")
            print(f"{result.seconds:.1f} s; loss {result.loss_history[0]:.0f} -> {result.loss_history[-1]:.0f}")
            print(f"adjoint gradient against finite differences: relative difference {gradient_error:.1e}")
            print(f"picture: {path}")
            print("PASS:" if passed else "FAIL:", end=" ")
            print(f"relative error of the diffusivity {before:.3f} -> {after:.3f}; wanted: < {before / 5:.3f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
