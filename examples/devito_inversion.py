"""mpirun -n 2 python examples/devito_inversion.py [--seed 0]

Full-waveform inversion by Devito (Louboutin et al., doi:10.5194/gmd-12-1165-2019), which compiles finite differences
from symbols: eight shots dealt out to the ranks, velocities in a box, and a Tikhonov term that keeps them smooth. Its
gradient is that of the discrete equations. The result has the same bits on any number of ranks, and with --kill after
one of them has died: start it with `mpishard run --elastic -n 3 --` in place of `mpirun -n 2`. Needs devito.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpishard

SHAPE, SPACING = (61, 41), 0.025  # points across and in depth; km
STEPS, TIME_STEP = 400, 0.003  # s
WATER, LAYER = 5, 8  # points: of the sea, and of the absorbing layer at all sides but the surface
SLOWEST, FASTEST = 1.45, 3.0  # km/s
PEAK = 6.0  # Hz, of the wavelet


def geology() -> np.ndarray:
    """Velocities in km/s: water, and sediments with a slow lens and a fast one."""
    x, z = np.meshgrid(*(np.arange(n) / (n - 1) for n in SHAPE), indexing="ij")
    velocity = start()
    for x0, z0, change in [(0.35, 0.45, -0.3), (0.65, 0.55, 0.3)]:
        velocity += change * np.exp(-(((x - x0) / 0.12) ** 2) - ((z - z0) / 0.15) ** 2)
    velocity[:, :WATER] = 1.5
    return velocity


def start() -> np.ndarray:
    """What is known before: the water, and that velocity grows with depth."""
    velocity = np.tile(np.linspace(1.6, 2.6, SHAPE[1]), (SHAPE[0], 1))
    velocity[:, :WATER] = 1.5
    return velocity


class Waves:
    """The acoustic wave equation in Devito, forward and adjoint, for shots along the surface."""

    def __init__(self, shots: int) -> None:
        import devito

        # Shots are divided over ranks by mpishard; Devito runs on each rank alone.
        devito.configuration["mpi"] = False
        devito.configuration["language"] = "C"
        devito.configuration["log-level"] = "ERROR"
        extent = tuple((n - 1) * SPACING for n in SHAPE)
        grid = devito.Grid(SHAPE, extent, dtype=np.float64)
        self.m = devito.Function(name="m", grid=grid)  # 1 / velocity^2
        self.gradient = devito.Function(name="gradient", grid=grid)
        damp = devito.Function(name="damp", grid=grid)
        damp.data[:] = self._damping()
        u = devito.TimeFunction(name="u", grid=grid, time_order=2, space_order=4, save=STEPS)
        v = devito.TimeFunction(name="v", grid=grid, time_order=2, space_order=4)
        points = {"grid": grid, "nt": STEPS}
        source = devito.SparseTimeFunction(name="source", npoint=1, **points)
        receivers = devito.SparseTimeFunction(name="receivers", npoint=SHAPE[0] - 2 * LAYER, **points)
        receivers.coordinates.data[:, 0] = np.arange(LAYER, SHAPE[0] - LAYER) * SPACING
        receivers.coordinates.data[:, 1] = 2 * SPACING
        time = np.arange(STEPS) * TIME_STEP - 1 / PEAK
        source.data[:, 0] = (1 - 2 * (np.pi * PEAK * time) ** 2) * np.exp(-((np.pi * PEAK * time) ** 2)) / SPACING**2
        self.places = np.linspace(LAYER, SHAPE[0] - 1 - LAYER, shots) * SPACING
        self.u, self.v, self.source, self.receivers = u, v, source, receivers

        scale = grid.stepping_dim.spacing**2 / self.m  # there is no damping at sources and receivers
        ahead = devito.Eq(u.forward, devito.solve(self.m * u.dt2 - u.laplace + damp * u.dt, u.forward))
        self.forward = devito.Operator(
            [ahead, source.inject(u.forward, expr=source * scale), receivers.interpolate(u)], name="Forward"
        )
        back = devito.Eq(v.backward, devito.solve(self.m * v.dt2 - v.laplace + damp * v.dt.T, v.backward))
        self.adjoint = devito.Operator(
            [
                back,
                receivers.inject(v.backward, expr=receivers * scale),
                devito.Inc(self.gradient, -u.dt2 * v),
            ],
            name="Adjoint",
        )

    @staticmethod
    def _damping() -> np.ndarray:
        """Zero inside, and growing to the sides and the bottom."""
        x, z = np.meshgrid(*(np.arange(n) for n in SHAPE), indexing="ij")
        inside = np.minimum(np.minimum(x, SHAPE[0] - 1 - x), SHAPE[1] - 1 - z)
        return 20 * (np.maximum(LAYER - inside, 0) / LAYER) ** 2

    def record(self, velocity: np.ndarray, shot: int) -> np.ndarray:
        """What the receivers hear of a shot, (STEPS, receivers)."""
        self.m.data[:] = velocity.reshape(SHAPE) ** -2.0
        self.source.coordinates.data[:] = self.places[shot], 3 * SPACING
        self.u.data[:] = 0
        self.receivers.data[:] = 0  # the loop leaves out the first and the last step
        self.forward.apply(time_m=1, time_M=STEPS - 2, dt=TIME_STEP)
        return np.array(self.receivers.data)

    def derivative(self, velocity: np.ndarray, residuals: np.ndarray) -> np.ndarray:
        """The adjoint of the derivative of `record`, which has run before, times residuals: flat, in velocities."""
        self.receivers.data[:] = residuals
        self.v.data[:] = 0
        self.gradient.data[:] = 0
        self.adjoint.apply(time_m=1, time_M=STEPS - 2, dt=TIME_STEP)
        return np.array(self.gradient.data).ravel() * (-2 * velocity.ravel() ** -3.0)


def misfit_of(waves: Waves, observed: list[np.ndarray]) -> Callable[..., Any]:
    """Value and gradient of the misfit of some shots, scaled so that silence has 100 a shot."""
    weight = 100 * len(observed) / sum(float(np.sum(heard**2)) for heard in observed)

    def misfit(velocity: np.ndarray, shots: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = 0.0, np.zeros(velocity.size)
        for shot in shots:
            residuals = waves.record(velocity, shot) - observed[shot]
            value += 0.5 * weight * float(np.sum(residuals**2))
            gradient += weight * waves.derivative(velocity, residuals)
        return value, gradient

    return misfit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=8, help="default 8")
    parser.add_argument("--iterations", type=int, default=20, help="default 20")
    parser.add_argument("--kill", action="store_true", help="shoot the last rank after five iterations")
    parser.add_argument("--output", type=Path, default=Path("devito-output"), help="folder for checkpoints of --kill")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    options = parser.parse_args()
    if importlib.util.find_spec("devito") is None:
        print("this example needs devito: pip install devito", file=sys.stderr)
        return 1

    with mpishard.Mesh() as mesh:
        for turn in (True, False):  # rank 0 compiles, the others load what it compiled
            if (mesh.rank == 0) is turn:
                waves = Waves(options.shots)
                waves.derivative(start(), waves.record(start(), 0))
            mesh.world.barrier()
        random = np.random.default_rng(options.seed)  # every rank draws the same noise
        observed = [waves.record(geology(), shot) for shot in range(options.shots)]
        observed = [clean + 0.02 * clean.std() * random.standard_normal(clean.shape) for clean in observed]
        misfit = misfit_of(waves, observed)
        check = mpishard.check_gradient(lambda x: misfit(x, np.arange(1)), start().ravel(), disp=mesh.rank == 0)

        shot = options.output / "shot"

        def after_iteration(intermediate_result: Any) -> None:
            if options.kill and intermediate_result.nit == 5 and mesh.rank == mesh.size - 1 and not shot.exists():
                shot.touch()
                print(f"rank {mesh.rank} is shot after iteration 5", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        # The lines that make it distributed.
        smooth = mpishard.Tikhonov(weight=0.01, shape=SHAPE, spacing=SPACING)
        checkpoints = mpishard.Checkpoints(options.output / "steps", mesh, every=1, keep=2) if options.kill else None
        known = np.zeros(SHAPE, bool)
        known[:, :WATER] = True
        result = mpishard.minimize(
            mpishard.regularized(misfit, [smooth]),
            start().ravel(),
            bounds=(SLOWEST, FASTEST),
            fixed=known.ravel(),
            callback=after_iteration,
            options={"maxiter": options.iterations, "disp": True},
            mesh=mesh,
            samples=options.shots,
            elastic={"respawn": False},
            checkpoints=checkpoints,
            resume=options.kill,
        )

        inside = (slice(LAYER, -LAYER), slice(WATER, -LAYER))
        before, after = (
            float(np.sqrt(np.mean((velocity.reshape(SHAPE) - geology())[inside] ** 2)))
            for velocity in (start(), result.x)
        )
        passed = bool(check) and after < before / 2 and (shot.exists() or not options.kill)
        if mesh.rank == 0:
            bits = zlib.crc32(np.float64(result.fun).tobytes() + result.x.tobytes())
            print(f"{result.nit} iterations, {result.nfev} evaluations, value {result.fun!r}; bits: {bits:08x}")
            print("PASS:" if passed else "FAIL:", end=" ")
            print(f"error of velocity {before:.3f} -> {after:.3f} km/s; wanted: < {before / 2:.3f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
