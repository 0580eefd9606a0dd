"""mpirun -n 8 python examples/seismic_inversion.py [--seed 0]

Full-waveform inversion: find the speed of sound under the sea from what hydrophones near its surface hear of shots.

The misfit of a shot is half the squared difference between its recording and the one that acoustic.py computes for a
medium, and its gradient comes from the exact adjoint. L-BFGS-B minimises the sum of the misfits, under bounds on the
velocity and with the water fixed, first for the low frequencies alone, which are right about the large scale, and from
there on for higher ones. The shots are divided among the ranks; the result has the same bits on any number of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from acoustic import Shot, Sound, check, in_words, ricker
from mpi4py import MPI

import mpishard
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer

SHAPE, SPACING = (50, 100), 0.025  # cells in depth and across; km
STEPS, TIME_STEP = 700, 0.003  # s
WATER = 8  # cells
SLOWEST, FASTEST = 1.45, 3.2  # km/s
Bands = list[tuple[float, int]]  # corners in Hz, and how many iterations each has


def geology() -> np.ndarray:
    """Velocities (depth, across) in km/s: water, four layers with bent boundaries, a slow lens and a fast one."""
    z, x = ((np.arange(n) + 0.5) / n for n in SHAPE)
    boundaries = [
        (0.34 + 0.05 * np.sin(2 * np.pi * x) - 0.04 * x, 2.1),
        (0.55 - 0.06 * np.cos(2 * np.pi * x + 0.5) + 0.05 * x, 2.4),
        (0.80 + 0.04 * np.sin(5 * x), 2.8),
    ]
    velocity = np.full(SHAPE, 1.8)
    for depth, below in boundaries:
        velocity[z[:, None] > depth] = below
    for z0, x0, height, width, change in [(0.42, 0.30, 0.09, 0.10, -0.35), (0.45, 0.68, 0.10, 0.09, 0.35)]:
        distance = ((z[:, None] - z0) / height) ** 2 + ((x - x0) / width) ** 2
        velocity += change * np.exp(-(distance**2))
    velocity[:WATER] = 1.5
    return velocity


def low_pass(signals: np.ndarray, corner: float) -> np.ndarray:
    """Signals (steps, any) through Butterworth's filter of fourth order, which is causal, with the corner in Hz."""
    length = 4 * len(signals)  # zeros until the filter is at rest
    poles = np.exp(0.125j * np.pi * np.array([5, 7, 9, 11]))
    s = 1j * np.fft.rfftfreq(length, TIME_STEP) / corner
    response = 1 / np.prod(s[:, None] - poles, axis=1)
    return np.fft.irfft(response[:, None] * np.fft.rfft(signals, length, axis=0), length, axis=0)[: len(signals)]


@dataclass(frozen=True)
class Survey:
    """Shots over the geology, and what was heard of them: their recordings (steps, receivers), with noise."""

    sound: Sound
    shots: list[Shot]
    observed: list[np.ndarray]

    @classmethod
    def at_sea(cls, sound: Sound, shots: int, noise: float, seed: int) -> Survey:
        """Shots and hydrophones along a line in the water. The recordings are computed; `noise` is relative to them."""
        random = np.random.default_rng(seed)  # every rank draws the same noise
        across = np.arange(0, SHAPE[1], 2)
        receivers = np.stack([np.full(len(across), 2), across], axis=1)
        wavelet = ricker(7.0, STEPS, TIME_STEP)[:, None]
        places = np.linspace(3, SHAPE[1] - 4, shots).astype(np.int64)
        made = [Shot(np.array([[1, place]]), wavelet, receivers) for place in places]
        observed = [sound.record(geology(), shot).traces for shot in made]
        observed = [clean + noise * clean.std() * random.standard_normal(clean.shape) for clean in observed]
        return cls(sound, made, observed)

    def below(self, corner: float) -> Survey:
        """The survey without the frequencies above a corner in Hz, in both wavelets and recordings."""
        shots = [Shot(shot.source, low_pass(shot.wavelet, corner), shot.receivers) for shot in self.shots]
        return replace(self, shots=shots, observed=[low_pass(heard, corner) for heard in self.observed])

    @cached_property
    def weight(self) -> float:
        """Makes the misfit of silence 100 for the mean shot."""
        return 200 * len(self.observed) / sum(float(np.sum(heard**2)) for heard in self.observed)

    def misfit_and_gradient(self, velocity: np.ndarray, samples: np.ndarray, gradient: np.ndarray) -> float:
        """Summed misfit of the shots `samples`; their summed gradient is added to `gradient`."""
        misfit = 0.0
        for sample in samples:
            recording = self.sound.record(velocity.reshape(SHAPE), self.shots[sample])
            residuals = recording.traces - self.observed[sample]
            misfit += 0.5 * self.weight * float(np.sum(residuals**2))
            gradient += self.weight * recording.gradient(residuals).ravel()
        return misfit

    def misfit(self, velocity: np.ndarray) -> float:
        """Mean misfit of all shots."""
        unused = np.zeros(velocity.size)
        return self.misfit_and_gradient(velocity, np.arange(len(self.shots)), unused) / len(self.shots)


def start() -> np.ndarray:
    """What is known before: the water, and that velocity grows with depth."""
    velocity = np.repeat(np.linspace(1.7, 2.9, SHAPE[0])[:, None], SHAPE[1], axis=1)
    velocity[:WATER] = 1.5
    return velocity.ravel()


def water() -> np.ndarray:
    """Where the velocity is known."""
    known = np.zeros(SHAPE, bool)
    known[:WATER] = True
    return known.ravel()


def error(velocity: np.ndarray) -> float:
    """Root mean square error below the water, in km/s."""
    return float(np.sqrt(np.mean((velocity - geology().ravel())[~water()] ** 2)))


@dataclass(frozen=True)
class Stage:
    """What came of one band."""

    corner: float
    history: np.ndarray  # misfits of all evaluations
    iterations: int
    velocity: np.ndarray
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.iterations:10} {len(self.history):11}"
        misfits = f"{self.history[0]:9.4f} -> {self.history[-1]:.4f}"
        return f"{self.corner:5g} Hz {counts} {misfits} {error(self.velocity):14.4f} km/s {self.seconds:8.1f} s"


Optimize = Callable[[ShardedOptimizer, mpishard.OptimizationProblem, str], mpishard.OptimizationResult]


def invert(mesh: mpishard.Mesh, survey: Survey, bands: Bands, optimize: Optimize, show: bool) -> list[Stage]:
    """The result of each band, which the next one begins with.  Collective."""
    stages: list[Stage] = []
    if show:
        print("   below iterations evaluations     mean misfit     error of velocity       time")
    for corner, most in bands:
        band = survey.below(corner)
        shots = len(band.shots)

        # The lines that make it distributed.
        config = mpishard.ShardingConfiguration(mesh, reproducible=True)
        method = mpishard.LBFGSB(bounds=(SLOWEST, FASTEST), fixed=water(), maxiter=most, gtol=0.0, ftol=0.0)
        optimizer = mpishard.as_distributed(method, config)
        problem = mpishard.OptimizationProblem(
            band.misfit_and_gradient,
            stages[-1].velocity if stages else start(),
            samples=shots,
            batch_size=shots,
            micro_batch_size=1,
            steps=4 * most,
        )
        result = optimize(optimizer, problem, f"{corner:g}Hz")

        assert optimizer.minimizer is not None
        iterations = optimizer.minimizer.progress.iterations
        stages.append(Stage(corner, result.loss_history, iterations, result.parameters, result.seconds))
        if show:
            print(stages[-1], flush=True)
    return stages


def undisturbed(
    optimizer: ShardedOptimizer, problem: mpishard.OptimizationProblem, name: str
) -> mpishard.OptimizationResult:
    return optimizer.optimize(problem, progress=False)


@dataclass(frozen=True)
class Shooting:
    """Runs whose last rank is shot, once, between two evaluations of a line search.

    Open MPI's survivors continue; under other MPIs `mpishard run --elastic` starts the job again from its checkpoints.
    """

    folder: Path

    def optimize(
        self, optimizer: ShardedOptimizer, problem: mpishard.OptimizationProblem, name: str
    ) -> mpishard.OptimizationResult:
        mesh = optimizer.mesh

        def look(state: mpishard.TrainingState) -> None:
            assert optimizer.minimizer is not None
            progress = optimizer.minimizer.progress
            if progress.evaluations > 1 and not progress.accepted and mesh.rank == mesh.size - 1 and not self.done:
                self.folder.joinpath("shot").touch()
                where = f"after evaluation {state.step} at {name}, in line search {progress.iterations + 1}"
                print(f"rank {mesh.rank} is shot {where}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        elastic = mpishard.ElasticOptimizer(optimizer, respawn=False)
        with mpishard.Checkpoints(self.folder / name, mesh, every=1, keep=2) as checkpoints:
            return elastic.optimize(problem, callback=look, progress=False, checkpoints=checkpoints, resume=True)

    @property
    def done(self) -> bool:
        return self.folder.joinpath("shot").exists()


def bits(stages: list[Stage]) -> str:
    """A name for all bits of the misfit curve and of the velocities."""
    return f"{zlib.crc32(b''.join(stage.history.tobytes() + stage.velocity.tobytes() for stage in stages)):08x}"


def picture(stages: list[Stage], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2)
    found = stages[-1].velocity
    fields = {
        "truth": geology(),
        f"start: {error(start()):.3f} km/s off": start(),
        f"found: {error(found):.3f} km/s off": found,
    }
    for axis, (title, field) in zip(axes.flat, fields.items(), strict=False):
        extent = (0, SHAPE[1] * SPACING, SHAPE[0] * SPACING, 0)
        image = axis.imshow(field.reshape(SHAPE), extent=extent, vmin=1.5, vmax=3.0, cmap="viridis")
        axis.set(title=title, xlabel="km", ylabel="depth (km)")
    figure.colorbar(image, ax=axes, label="velocity (km/s)", location="bottom", shrink=0.5)
    before = 1
    for stage in stages:
        evaluations = np.arange(before, before + len(stage.history))
        axes[1, 1].semilogy(evaluations, stage.history, ".-", label=f"below {stage.corner:g} Hz")
        before = int(evaluations[-1]) + 1
    axes[1, 1].set(title="misfit", xlabel="evaluation")
    axes[1, 1].legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=16, help="default 16")
    parser.add_argument("--bands", type=float, nargs="+", default=[3.0, 6.0, 10.0], help="in Hz (default 3 6 10)")
    parser.add_argument("--iterations", type=int, nargs="+", default=[15, 20, 30], help="of each (default 15 20 30)")
    parser.add_argument("--noise", type=float, default=0.02, help="of the recordings' deviation (default 0.02)")
    parser.add_argument(
        "--kept", type=int, default=100, help="time steps kept in memory, see acoustic.py (default 100)"
    )
    parser.add_argument("--history", default="float64", choices=["float64", "float32"], help="how they are kept")
    parser.add_argument("--check", action="store_true", help="only test the gradient, and draw it")
    parser.add_argument(
        "--kill", action="store_true", help="shoot a rank; start it with mpishard run --elastic -n 4 --"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--output", type=Path, default=Path("seismic-output"), help="folder for the picture")
    options = parser.parse_args()
    if len(options.bands) != len(options.iterations):
        parser.error("--bands and --iterations: give as many of one as of the other")
    bands: Bands = list(zip(options.bands, options.iterations, strict=True))

    with mpishard.Mesh() as mesh:
        sound = Sound(SHAPE, SPACING, TIME_STEP, kept=options.kept, history=options.history)
        if mesh.rank == 0:  # it compiles, the others wait and load what it compiled
            options.output.mkdir(parents=True, exist_ok=True)
            few = Survey.at_sea(replace(sound, history="float64"), 1, options.noise, options.seed).below(bands[0][0])
            taylor = options.output / "taylor.png" if options.check else None
            checks = check(few.sound, start().reshape(SHAPE), few.shots[0], few.observed[0], options.seed, taylor)
            print(in_words(*checks), flush=True)
        mesh.world.barrier()
        if options.check:
            return 0 if mesh.world.allgather_object(mesh.rank > 0 or all(checks))[0] else 1

        survey = Survey.at_sea(sound, options.shots, options.noise, options.seed)
        shooting = Shooting(options.output / "kill")
        stages = invert(mesh, survey, bands, shooting.optimize if options.kill else undisturbed, mesh.rank == 0)
        passed = False
        if mesh.rank == 0:
            found = stages[-1].velocity
            picture(stages, options.output / "seismic.png")
            print(f"picture: {options.output / 'seismic.png'}; bits of curve and velocities: {bits(stages)}")
            last = survey.below(bands[-1][0])
            better, closer = last.misfit(start()) / last.misfit(found), error(start()) / error(found)
            passed = all(checks) and better > 20 and closer > 2
            same = ""
            if options.kill:
                with mpishard.Mesh(MPI.COMM_SELF) as alone:
                    expected = invert(alone, survey, bands, undisturbed, False)
                passed = passed and shooting.done and bits(stages) == bits(expected)
                same = (
                    f"; a rank was shot: {shooting.done}, the same bits on one rank: {bits(stages) == bits(expected)}"
                )
                shutil.rmtree(shooting.folder)
            print("PASS:" if passed else "FAIL:", end=" ")
            print(
                f"misfit down {better:.0f} times (wanted: 20), error of velocity {closer:.1f} times (wanted: 2){same}"
            )
        passed = mesh.world.allgather_object(passed)[0]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
