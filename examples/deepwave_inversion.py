"""mpirun -n 4 python examples/deepwave_inversion.py [--seed 0]

The inversion of seismic_inversion.py by the gradients of Deepwave, which propagates waves for PyTorch (Richardson,
doi:10.5281/zenodo.8381177): the same recordings and the same lines that make it distributed. Its gradients are compared
with those of acoustic.py, which differ by how the absorbing layers are discretised. Needs deepwave.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import numpy as np
from acoustic import Sound
from seismic_inversion import (
    FASTEST,
    SHAPE,
    SPACING,
    TIME_STEP,
    Survey,
    error,
    invert,
    start,
    undisturbed,
    water,
)

import mpishard


class DeepwaveSurvey(Survey):
    """A survey whose misfits and gradients come from Deepwave."""

    def misfit_and_gradient(self, velocity: np.ndarray, samples: np.ndarray, gradient: np.ndarray) -> float:
        import deepwave
        import torch

        shots = [self.shots[sample] for sample in samples]
        medium = torch.tensor(velocity.reshape(SHAPE), requires_grad=True)
        # Its sources have the other sign. It records before a step and acoustic.py after it: it takes one more.
        wavelets = torch.tensor(np.stack([-shot.wavelet.T / SPACING**2 for shot in shots]))
        *_, traces = deepwave.scalar(
            medium,
            SPACING,
            TIME_STEP,
            source_amplitudes=torch.nn.functional.pad(wavelets, (0, 1)),
            source_locations=torch.tensor(np.stack([shot.source for shot in shots])),
            receiver_locations=torch.tensor(np.stack([shot.receivers for shot in shots])),
            accuracy=8,
            pml_width=20,
            pml_freq=7.0,
            max_vel=FASTEST,
        )
        residuals = traces[..., 1:] - torch.tensor(np.stack([self.observed[sample].T for sample in samples]))
        misfit = 0.5 * self.weight * residuals.square().sum()
        misfit.backward()
        assert medium.grad is not None
        gradient += medium.grad.numpy().ravel()
        return float(misfit.item())


def difference(mine: Survey, theirs: Survey) -> float:
    """Relative difference of the gradients at the start, below the water."""
    gradients = np.zeros((2, start().size))
    for survey, gradient in zip((mine, theirs), gradients, strict=True):
        survey.misfit_and_gradient(start(), np.arange(len(survey.shots)), gradient)
    ours, other = gradients[:, ~water()]
    return float(np.linalg.norm(other - ours) / np.linalg.norm(ours))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, default=8, help="default 8")
    parser.add_argument("--iterations", type=int, nargs=2, default=[12, 12], help="below 3 and 6 Hz (default 12 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    options = parser.parse_args()

    with mpishard.Mesh() as mesh:
        if importlib.util.find_spec("deepwave") is None:
            if mesh.rank == 0:
                print("this example needs deepwave: pip install deepwave", file=sys.stderr)
            return 1
        import torch

        torch.set_num_threads(mesh.blas_threads)
        ours = Survey.at_sea(Sound(SHAPE, SPACING, TIME_STEP, kept=100), options.shots, 0.02, options.seed)
        theirs = DeepwaveSurvey(ours.sound, ours.shots, ours.observed)
        passed = False
        if mesh.rank == 0:
            differences = [difference(ours.below(corner), theirs.below(corner)) for corner in (3.0, 6.0)]
        stages = invert(
            mesh, theirs, list(zip((3.0, 6.0), options.iterations, strict=True)), undisturbed, mesh.rank == 0
        )
        if mesh.rank == 0:
            closer = error(start()) / error(stages[-1].velocity)
            passed = max(differences) < 1e-2 and closer > 2
            print(f"{'PASS' if passed else 'FAIL'}: error of velocity {closer:.1f} times smaller (wanted: 2)", end="; ")
            print(
                f"gradients below 3 and 6 Hz differ by {' and '.join(f'{d:.1e}' for d in differences)} (wanted: 1e-2)"
            )
        passed = mesh.world.allgather_object(passed)[0]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
