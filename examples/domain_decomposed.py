"""mpirun -n 4 python examples/domain_decomposed.py

Find the conductivity of a plate of which each rank has a slab.  Heat spreads from hot spots by du/dt = div(m grad u)
in hundreds of explicit steps, thermometers on a grid read the temperature now and then, and m is found between bounds
by L-BFGS-B.  The package knows the slabs only as parts of one tensor (`tensor_dim=0`, `place=mesh.place`).  The rows
that neighbours need of each other are sent here, by mpi4py; so is the gradient, by hand: the adjoint steps run
backward in time.  The first run ends early and is resumed, with its slabs cut again for one rank less.  Ends with PASS
if the gradient passes its Taylor test, m is recovered, and the run that was interrupted has the bits of one rank.

With --shots the other axis of the mesh is used, too: hot spots are divided over this many groups of ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishard

BOUNDS = (0.2, 3.0)
READ_EVERY, SENSOR_EVERY = 20, 2


def neighbours(comm: MPI.Comm, rows: np.ndarray) -> np.ndarray:
    """The rows of a slab with the last row of the slab before and the first row of the slab after.

    At the edges of the plate they are copies of the nearest row, across which no heat flows.
    """
    wide = np.ascontiguousarray(np.concatenate([rows[:1], rows, rows[-1:]]))
    before = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    after = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    comm.Sendrecv(wide[1], before, recvbuf=wide[-1], source=after)
    comm.Sendrecv(wide[-2], after, recvbuf=wide[0], source=before)
    return wide


class Plate:
    """Hot spots on a plate of n by n cells; every rank has a slab of rows of all fields.

    The time step is as long as explicit steps are stable for the largest m that the bounds allow.
    """

    def __init__(self, mesh: mpishard.Mesh, n: int, spots: int, steps: int, seed: int) -> None:
        self.comm = mesh.tensor.comm
        self.n, self.spots, self.steps = n, spots, steps
        self.m = mpishard.FlatParameters(
            [mpishard.ParameterSpec("m", (n, n), tensor_dim=0)], np.float64, place=mesh.place
        )
        self.own = slice(*self.m.box("m")[0])
        self.ratio = 0.24 / BOUNDS[1]  # of the time step to the square of the width of a cell
        y, x = np.meshgrid((np.arange(n) + 0.5) / n, (np.arange(n) + 0.5) / n, indexing="ij")
        self.truth = 1.0 + 0.8 * np.exp(-40 * ((x - 0.35) ** 2 + (y - 0.6) ** 2))
        self.truth -= 0.5 * np.exp(-60 * ((x - 0.7) ** 2 + (y - 0.3) ** 2))
        at = np.random.default_rng(seed).uniform(0.1, 0.9, (2, spots))
        hot = np.exp(-((x[..., None] - at[0]) ** 2 + (y[..., None] - at[1]) ** 2) / 0.02)
        self.start = hot[self.own]
        self.sensors = np.zeros((n, 1, 1)), np.zeros((1, n, 1))
        self.sensors[0][1::SENSOR_EVERY] = self.sensors[1][:, 1::SENSOR_EVERY] = 1
        self.where = self.sensors[0][self.own] * self.sensors[1]
        self.readings: dict[int, np.ndarray] = {}
        states = self.forward(self.truth[self.own], np.arange(spots))
        self.readings = {k: states[k] for k in range(READ_EVERY, steps + 1, READ_EVERY)}

    def faces(self, m: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Conductivity of the faces above and below each row, and between columns; 0 around the plate."""
        wide = neighbours(self.comm, m)
        down = 0.5 * (wide[1:] + wide[:-1])
        return down[..., None], 0.5 * (m[:, 1:] + m[:, :-1])[..., None]

    def flow(self, faces: tuple[np.ndarray, np.ndarray], u: np.ndarray) -> np.ndarray:
        """The heat that flows into each cell in a step.  It is its own adjoint."""
        wide = neighbours(self.comm, u)
        down = faces[0] * np.diff(wide, axis=0)
        across = faces[1] * np.diff(u, axis=1)
        inflow = down[1:] - down[:-1]
        inflow[:, :-1] += across
        inflow[:, 1:] -= across
        return self.ratio * inflow

    def forward(self, m: np.ndarray, samples: np.ndarray) -> list[np.ndarray]:
        """The temperatures after all steps, the initial ones first."""
        faces, states = self.faces(m), [self.start[..., samples]]
        for _ in range(self.steps):
            states.append(states[-1] + self.flow(faces, states[-1]))
        return states

    def loss_and_gradient(self, p: mpishard.FlatParameters, samples: np.ndarray, gradients: dict) -> float:
        """Half of the squared errors at the thermometers, summed; every rank has the sum of all slabs.

        Collective over the slabs.  All ranks add up the squares of all thermometers, in one order, so that the bits do
        not depend on how the plate is cut; neither do those of the gradient, which is computed cell by cell.
        """
        states, faces = self.forward(p["m"], samples), self.faces(p["m"])
        squares = np.zeros((self.n, self.n, len(samples)))
        by_down, by_across = np.zeros_like(faces[0]), np.zeros_like(faces[1])
        adjoint = np.zeros_like(states[0])
        for k in range(self.steps, 0, -1):
            if k in self.readings:
                error = self.where * (states[k] - self.readings[k][..., samples])
                squares[self.own] += 0.5 * error**2
                adjoint += error
            u, a = neighbours(self.comm, states[k - 1]), neighbours(self.comm, adjoint)
            by_down -= self.ratio * (np.diff(u, axis=0) * np.diff(a, axis=0)).sum(axis=-1, keepdims=True)
            flows = np.diff(states[k - 1], axis=1) * np.diff(adjoint, axis=1)
            by_across -= self.ratio * flows.sum(axis=-1, keepdims=True)
            adjoint = adjoint + self.flow(faces, adjoint)
        gradient = 0.5 * (by_down[1:, :, 0] + by_down[:-1, :, 0])
        gradient[:, 1:] += 0.5 * by_across[..., 0]
        gradient[:, :-1] += 0.5 * by_across[..., 0]
        if len(samples):
            gradients["m"] += gradient
        self.comm.Allreduce(MPI.IN_PLACE, squares)  # of each cell on one rank, so that nothing is rounded
        return float(squares.sum())


def run(
    mesh: mpishard.Mesh, options: argparse.Namespace, evaluations: int, folder: Path | None = None, resume: bool = False
) -> tuple:
    """Minimise on these ranks; the check of the gradient if there is no folder, the whole field, result and truth."""
    plate = Plate(mesh, options.grid, options.spots, options.steps, options.seed)
    plate.m["m"][...] = 1.0
    smooth = mpishard.Tikhonov(weight=options.smoothness, mesh=mesh)
    problem = mpishard.OptimizationProblem(
        mpishard.regularized(plate.loss_and_gradient, smooth),
        plate.m,
        samples=options.spots,
        batch_size=options.spots,
        micro_batch_size=2,
        steps=evaluations,
        seed=options.seed,
    )
    check = mpishard.check_gradient(problem, mesh=mesh, disp=False) if folder is None else None
    config = mpishard.ShardingConfiguration(mesh, reproducible=True)
    optimizer = mpishard.as_distributed(mpishard.LBFGSB(bounds=BOUNDS, gtol=0.0, ftol=0.0), config)
    checkpoints = None if folder is None else mpishard.Checkpoints(folder, mesh, every=5)
    result = optimizer.optimize(problem, progress=False, checkpoints=checkpoints, resume=resume)
    whole = np.concatenate(mesh.tensor.comm.allgather(plate.m["m"]))
    return check, whole, result, plate.truth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, default=24, help="cells along each edge (default 24)")
    parser.add_argument("--spots", type=int, default=4, help="hot spots (default 4)")
    parser.add_argument("--steps", type=int, default=200, help="time steps (default 200)")
    parser.add_argument("--evaluations", type=int, default=60, help="of the function and its gradient (default 60)")
    parser.add_argument("--smoothness", type=float, default=1e-5, help="weight of |grad m|^2 (default 1e-5)")
    parser.add_argument("--shots", type=int, default=1, help="groups of ranks that share the hot spots (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("domain-decomposed-output"), help="folder for checkpoints")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    slabs = world.size // max(1, options.shots)
    if options.grid < slabs:
        parser.error(f"--grid {options.grid} leaves some of {slabs} ranks without a row: give at least {slabs}")

    with mpishard.Mesh(data=options.shots, tensor=-1) as mesh:
        run(mesh, options, options.evaluations // 2, options.output)
    # One rank has gone; the others cut the plate anew.
    fewer = max(1, world.size - options.shots)
    comm = world.Split(0 if world.rank < fewer else 1, world.rank)
    passed = True
    if world.rank < fewer:
        assert isinstance(comm, MPI.Intracomm)
        with mpishard.Mesh(comm, data=min(options.shots, fewer), tensor=-1) as mesh:
            _, found, result, truth = run(mesh, options, options.evaluations, options.output, resume=True)
        if comm.rank == 0:
            with mpishard.Mesh(MPI.COMM_SELF) as alone:
                check, expected, _, _ = run(alone, options, options.evaluations)
            before, after = (float(np.abs(m - truth).max()) for m in (np.ones_like(truth), found))
            same = bool(np.array_equal(found, expected))
            passed = bool(check) and same and after < before / 4
            print(check)
            print(f"{world.size} ranks, then {fewer}: {result.steps} evaluations, {result.stop_reason}")
            print(f"loss {result.loss_history[0]:.3g} -> {result.loss_history[-1]:.3g}; bits of one rank: {same}")
            print("PASS:" if passed else "FAIL:", end=" ")
            print(f"largest error of the conductivity {before:.3f} -> {after:.3f}; wanted: < {before / 4:.3f}")
    return 0 if world.bcast(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
