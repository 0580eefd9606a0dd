"""mpirun -n 8 python tests/helpers/grid.py [--every K] [--models llama]

Train one small GPT and one small Llama in every layout of 1, 2, 3, 4, 6 and 8 ranks, under every ZeRO stage and
schedule, and compare it with the same run on one rank: losses, gradient norms, every gradient of every step and every
parameter at the end.  `tests/mpi/test_layouts.py` runs a part of it.  With --every K only each K-th case is run, with
--models only these models.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from grid_cases import MODELS, Case, cases
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import nn
from mpishard.data.sampling import Sampler, share
from mpishard.layout.tensors import tensors_of

STEPS = 50
VOCABULARY, LENGTH, WIDTH, SEED = 11, 5, 24, 3
SAMPLES, BATCH = 45, 13
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (SAMPLES, LENGTH + 1))
# Adam divides by the size of the gradient, which magnifies rounding where that is tiny, or zero but for rounding as for
# the bias of the attention keys; epsilon bounds by how much.  Under SGD there is no such place.
RULES = {"sgd": mpishard.SGD(lr=0.1, momentum=0.9), "adamw": mpishard.AdamW(lr=1e-3, eps=1e-3)}
CLIP = 0.5
# Of losses, gradients and parameters: |a - b| over 1 + |b|; of norms: relative.
TOLERANCE, NORM_TOLERANCE = 1e-12, 1e-13


@dataclass(frozen=True)
class Run:
    """What one rank alone found, by step; `gradients` and `parameters` (after it) are flat over the whole model."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: np.ndarray
    parameters: np.ndarray


def make(name: str, layers: int, heads: int, tied: bool, seed: int = SEED, **options: Any) -> nn.GPT | nn.Llama:
    """A model of the grid; the Llama has grouped queries, all that Qwen2 and Qwen3 add, and dropout."""
    options |= dict(
        vocabulary_size=VOCABULARY, context_length=LENGTH, width=WIDTH, layers=layers, heads=heads, dtype=np.float64
    )
    options |= dict(seed=seed, tied=tied)
    if name == "gpt":
        return nn.GPT(**options)
    own = dict(key_value_heads=heads // 2, head_width=4, hidden=20, rotary=nn.Rotary(10.0), epsilon=1e-2, dropout=0.1)
    return nn.Llama(bias=True, head_norms=True, **own, **options)


@functools.cache
def alone(name: str, heads: int, layers: int, tied: bool, rule: str, steps: int) -> Run:
    """The same training on one rank."""
    losses, norms, gradients, parameters = [], [], [], []
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        model = make(name, layers, heads, tied)
        optimizer = mpishard.DDPOptimizer(RULES[rule], mpishard.ShardingConfiguration(mesh, max_gradient_norm=CLIP))
        strategy = optimizer.bind(model.parameters)
        for step in range(1, steps + 1):
            losses.append(loss_and_gradient(model, mesh, step))
            strategy.reducer.finalize()
            gradients.append(np.concatenate(strategy.gradients()))
            optimizer.update(count_of(step))
            norms.append(optimizer.gradient_norm)
            parameters.append(model.parameters.flat.copy())
        return Run(*map(np.array, (losses, norms, gradients, parameters)))


def expected_of(case: Case, comm: MPI.Intracomm, steps: int = STEPS) -> Run:
    """`alone`, computed on one rank and read by the others from files, of which the node keeps one copy."""
    path = None
    if comm.rank == 0:
        key = case.model, case.heads, case.layers, case.tied, case.rule, steps
        path = Path(_folder(), "-".join(map(str, key)))
        if not path.exists():
            run = alone(*key)
            path.mkdir()
            for field in fields(Run):
                np.save(path / f"{field.name}.npy", getattr(run, field.name))
    path = comm.bcast(path)
    return Run(*[np.load(path / f"{field.name}.npy", mmap_mode="r") for field in fields(Run)])


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="mpishard-grid-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def loss_and_gradient(model: nn.GPT | nn.Llama, mesh: mpishard.Mesh, step: int) -> float:
    (samples,) = share(Sampler(SAMPLES, BATCH).batch(step), mesh.data.rank, mesh.data.size)
    model.parameters.step = step  # with the samples it decides the masks of dropout
    loss = np.array([model.loss_and_gradient(TOKENS[samples, :-1], TOKENS[samples, 1:], samples)])
    return float(mesh.data.all_reduce(loss)[0])


def count_of(step: int) -> int:
    sampler = Sampler(SAMPLES, BATCH)
    return LENGTH * (sampler.consumed(step) - sampler.consumed(step - 1))


def local(parameters: mpishard.FlatParameters, flat: np.ndarray) -> np.ndarray:
    """What this rank's place in the mesh holds of a flat array over the whole model."""
    whole = tensors_of(flat, parameters.specs)
    parts = [whole[piece.name][tuple(slice(*run) for run in piece.box)].ravel() for piece in parameters.pieces]
    return np.concatenate([np.empty(0), *parts])


def difference(found: Any, expected: Any) -> float:
    worst = float((np.abs(found - expected) / (1 + np.abs(expected))).max(initial=0.0))
    return worst if worst == worst else np.inf  # NaN has no maximum


class Worst(dict[str, float]):
    """The largest differences so far, by quantity."""

    def note(self, what: str, value: float) -> None:
        self[what] = max(self[what], value)


def errors(case: Case, comm: MPI.Intracomm, steps: int = STEPS) -> dict[str, float]:
    """Largest differences from the run on one rank, over all ranks and steps.  Collective over `comm`."""
    expected = expected_of(case, comm, steps)
    worst = Worst.fromkeys(("loss", "gradient", "norm", "parameter"), 0.0)
    chosen = dict(
        schedule=case.schedule, chunks=2 if case.schedule == "interleaved" else 1, microbatches=case.microbatches
    )
    chosen |= dict(sequence_parallel=case.sequence_parallel, sharded_parameters=case.zero == 3)
    with mpishard.Mesh(comm, data=case.data, tensor=case.tensor, pipeline=case.pipeline) as mesh:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
            model = make(case.model, case.layers, case.heads, case.tied, mesh=mesh, **chosen)
        config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=CLIP)
        optimizer = STRATEGIES[case.zero](RULES[case.rule], config)
        strategy = optimizer.bind(model.parameters)
        for step in range(1, steps + 1):
            loss = loss_and_gradient(model, mesh, step)
            strategy.reducer.finalize()
            gradient = local(model.parameters, expected.gradients[step - 1])
            for (start, stop), part in zip(strategy.ownership.own, strategy.gradients(), strict=True):
                worst.note("gradient", difference(part, gradient[start:stop]))
            optimizer.update(count_of(step))
            worst.note("loss", difference(np.array(loss), expected.losses[step - 1]))
            worst.note("norm", difference(np.array(optimizer.gradient_norm / expected.norms[step - 1]), np.array(1.0)))
        end = local(model.parameters, expected.parameters[steps - 1])
        worst.note("parameter", difference(model.parameters.gather(), end))
    values = np.array(list(worst.values()))
    comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
    return dict(zip(worst, values.tolist(), strict=True))


def passes(found: dict[str, float]) -> bool:
    """Whether all differences are within the tolerances."""
    return all(value <= (NORM_TOLERANCE if name == "norm" else TOLERANCE) for name, value in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="run each K-th case only (default all)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8], help="numbers of ranks")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS, help="which models (default all)")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    possible = [count for count in options.ranks if 1 <= count <= world.size]
    if options.every < 1 or not possible:
        parser.error(f"--every must be at least 1, and one of --ranks 1 to {world.size}, which is how many there are")
    if world.rank == 0 and possible != options.ranks:
        print(f"{world.size} ranks cannot run all of {options.ranks}; running {possible}", flush=True)
    failed = 0
    for ranks in possible:
        # As many groups of this size as the ranks allow; each runs other cases.
        groups, group = world.size // ranks, world.rank // ranks
        comm = world.Split(group if group < groups else MPI.UNDEFINED, world.rank)
        todo = [case for model in options.models for case in cases(ranks, model)][:: options.every]
        began, results = time.monotonic(), []
        if comm != MPI.COMM_NULL:
            for case in todo[group::groups]:
                results.append(errors(case, comm))
                if comm.rank == 0 and not passes(results[-1]):
                    print(f"FAIL {case}: {results[-1]}", flush=True)
            results = results if comm.rank == 0 else []
            comm.Free()
        gathered = [found for part in world.allgather(results) for found in part]
        bad = sum(not passes(found) for found in gathered)
        failed += bad
        if world.rank == 0:
            text = ", ".join(f"{name} {max(found[name] for found in gathered):.1e}" for name in gathered[0])
            outcome = f"{len(gathered)} cases, {bad} failed, in {time.monotonic() - began:.0f} s"
            print(f"{ranks} ranks: {outcome}; largest: {text}", flush=True)
    if world.rank == 0:
        print("FAIL" if failed else "PASS")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
