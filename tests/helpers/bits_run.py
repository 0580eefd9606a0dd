"""A process of `bits.py`: trains what is to be compared, and the first rank writes digests of what came of it.

    python tests/helpers/bits_run.py OPTIONS

Public names only, so that it runs on any state of the package.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from grid_cases import Case, cases
from mpi4py import MPI
from threadpoolctl import threadpool_info

import mpishard
from mpishard import nn

Digests = dict[str, str]

# Each example, and what makes it short.
EXAMPLES = {
    "train_gpt": ["--steps", "24", "--width", "64", "--batch", "32", "--sample", "8"],
    "own_gradient": ["--steps", "20", "--grid", "32", "--experiments", "64"],
    "digits": [],
}
VOCABULARY, LENGTH, SAMPLES = 11, 8, 45
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (SAMPLES, LENGTH + 1))
LAYOUT_STEPS, LAYOUT_BATCH = 3, 13
# Of the checkpoints that are kept: where they were saved, and where the run has come to that goes on from there.
SAVED_AFTER, RESUMED_TO = 4, 6
# Of the elastic run: the number of workers with which it begins, the numbers that it has in turn, how many steps it
# stays at each, and how long a step lasts while a worker is on its way, for which the run has steps enough.
FOUNDERS, PLAN, STAY, PAUSE_S, ELASTIC_STEPS = 4, (4, 2, 4, 5, 3), 4, 0.25, 120


@dataclass(frozen=True)
class Options:
    """What the processes shall do, and where: `kept` has a folder for each kind of checkpoint, `work` is scratch."""

    jobs: tuple[str, ...]
    work: Path
    kept: Path
    results: Path
    layouts: int = 0
    heals: bool = False

    @classmethod
    def read(cls, text: str) -> Options:
        fields = json.loads(text)
        paths = {name: Path(fields[name]) for name in ("work", "kept", "results")}
        return cls(**{**fields, **paths, "jobs": tuple(fields["jobs"])})


def digest(*values: Any) -> str:
    """Of bytes, texts and arrays with their dtypes and shapes."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray) and value.dtype.kind == "O":
            value = value.tolist()  # texts: the array has where they are in memory
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype.str} {value.shape} ".encode())
            value = np.ascontiguousarray(value).tobytes()
        found.update(value if isinstance(value, bytes) else str(value).encode())
    return found.hexdigest()[:16]


def of_datasets(file: h5py.File) -> Iterator[tuple[str, str]]:
    """Name and digest of each data set, in order, and of the attributes of each object that has some."""
    names: list[str] = ["/"]
    file.visit(names.append)
    for name in sorted(names):
        thing = file[name]
        # Random in every run, or the time, or longer with each version of the package.
        attributes = {key: thing.attrs[key] for key in sorted(thing.attrs) if key not in CHANGING}
        if attributes:
            yield f"{name}@", digest(*(part for pair in attributes.items() for part in pair))
        if isinstance(thing, h5py.Dataset):
            yield name, digest(thing[()] if thing.dtype.kind == "O" else np.asarray(thing[()]))


CHANGING = ("id", "saved", "mpishard_version")

# -- the examples -----------------------------------------------------------------------------------------------------


def examples(options: Options) -> Digests:
    """As a user starts them; `optimize` hands what it returns to us, too."""
    found: Digests = {}
    results: list[Any] = []
    for kind in (mpishard.DDPOptimizer, mpishard.ZeRO1Optimizer):
        setattr(kind, "optimize", _handing_over(kind.optimize, results))  # noqa: B010
    folder = Path(mpishard.__file__).parents[1] / "examples"
    for name, words in EXAMPLES.items():
        output = [] if name == "digits" else ["--output", str(options.work / name)]
        sys.argv = [name, *words, *output]
        runpy.run_path(str(folder / f"{name}.py"))["main"]()  # shortened, it need not pass
        result = results.pop()
        found[f"example/{name}/losses"] = digest(result.loss_history)
        flat = result.parameters
        found[f"example/{name}/parameters"] = digest(flat if isinstance(flat, np.ndarray) else flat.gather())
    return found


def _handing_over(optimize: Callable[..., Any], results: list[Any]) -> Callable[..., Any]:
    def instead(*arguments: Any, **options: Any) -> Any:
        results.append(optimize(*arguments, **{**options, "progress": False}))
        return results[-1]

    return instead


# -- a sample of the layouts ------------------------------------------------------------------------------------------


def sample(count: int, seed: int = 0) -> list[Case]:
    """So many cases of the grid: the meshes take turns, each with cases drawn at random."""
    by_mesh: dict[tuple[int, int, int], list[Case]] = {}
    for ranks in (1, 2, 3, 4, 6, 8):
        for case in cases(ranks):
            by_mesh.setdefault((case.data, case.tensor, case.pipeline), []).append(case)
    drawing = random.Random(seed)
    shuffled = [drawing.sample(group, len(group)) for group in by_mesh.values()]
    turns = max(map(len, shuffled))
    return [group[turn] for turn in range(turns) for group in shuffled if turn < len(group)][:count]


def layouts(options: Options) -> Digests:
    """Each in one of as many groups of ranks as there are for its size."""
    world, found = MPI.COMM_WORLD, {}
    chosen = sample(options.layouts)
    for ranks in sorted({case.ranks for case in chosen}):
        groups, group = world.size // ranks, world.rank // ranks
        comm = world.Split(group if group < groups else MPI.UNDEFINED, world.rank)
        if comm != MPI.COMM_NULL:
            for case in [case for case in chosen if case.ranks == ranks][group::groups]:
                losses, parameters = train_in(case, comm)
                found[f"layout/{case}/losses"] = losses
                found[f"layout/{case}/parameters"] = parameters
            comm.Free()
    return {name: value for part in world.allgather(found) for name, value in part.items()}


def train_in(case: Case, comm: MPI.Intracomm) -> tuple[str, str]:
    strategies: list[Any] = [
        mpishard.DDPOptimizer,
        mpishard.ZeRO1Optimizer,
        mpishard.ZeRO2Optimizer,
        mpishard.ZeRO3Optimizer,
    ]
    rules = {"sgd": mpishard.SGD(lr=0.1, momentum=0.9), "adamw": mpishard.AdamW(lr=1e-3)}
    with mpishard.Mesh(comm, data=case.data, tensor=case.tensor, pipeline=case.pipeline) as mesh:
        model = nn.GPT(
            vocabulary_size=VOCABULARY,
            context_length=LENGTH,
            width=24,
            layers=case.layers,
            heads=case.heads,
            dtype=np.float64,
            seed=3,
            mesh=mesh,
            tied=case.tied,
            sequence_parallel=case.sequence_parallel,
            schedule=case.schedule,
            chunks=2 if case.schedule == "interleaved" else 1,
            microbatches=case.microbatches,
            sharded_parameters=case.zero == 3,
        )
        config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5)
        optimizer = strategies[case.zero](rules[case.rule], config)
        result = optimizer.optimize(problem(model, LAYOUT_STEPS, LAYOUT_BATCH), progress=False)
        return digest(result.loss_history), digest(whole(model, mesh))


def problem(model: Any, steps: int, batch_size: int, **more: Any) -> Any:
    def batch(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    sizes = {"samples": SAMPLES, "batch_size": batch_size, "tokens_per_sample": LENGTH}
    return mpishard.OptimizationProblem.for_model(model, batch, steps=steps, **sizes, **more)


def whole(model: Any, mesh: Any) -> np.ndarray:
    return mpishard.as_distributed(model, mesh).gather_full_parameters()


# -- checkpoints and record folders -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a checkpoint came about."""

    optimizer: str
    tensor: int = 1
    pipeline: int = 1
    of_optimizer: dict[str, Any] = field(default_factory=dict)
    of_config: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "ddp": Kind("DDPOptimizer"),
    "zero1": Kind("ZeRO1Optimizer"),
    "zero1-int8": Kind("ZeRO1Optimizer", of_config={"enable_gradient_compression": True}),
    "zero2": Kind("ZeRO2Optimizer"),
    "zero3": Kind("ZeRO3Optimizer"),
    "local-sgd": Kind("LocalSGDOptimizer", of_optimizer={"sync_every": 2}),
    "hybrid": Kind("HybridShardedOptimizer", 2, 2, of_optimizer={"zero_stage": 1}),
    "elastic": Kind("ZeRO1Optimizer", of_config={"reproducible": True}),
}


@dataclass(frozen=True)
class Made:
    """A model and an optimizer, for one of the kinds."""

    mesh: Any
    model: Any
    optimizer: Any

    @classmethod
    def of(cls, name: str, mesh: Any, seed: int = 3) -> Made:
        kind = KINDS[name]
        model = nn.GPT(
            vocabulary_size=VOCABULARY,
            context_length=LENGTH,
            width=16,
            layers=2,
            heads=2,
            dtype=np.float32,
            seed=seed,
            mesh=mesh,
        )
        config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5, **kind.of_config)
        rule = mpishard.AdamW(lr=mpishard.cosine(0.02, steps=2 * ELASTIC_STEPS, warmup=2))
        return cls(mesh, model, getattr(mpishard, kind.optimizer)(rule, config, **kind.of_optimizer))

    def train(self, optimizer: Any, folder: Path, steps: int, **options: Any) -> Any:
        """Trains until a number of steps is taken, with checkpoints and a record in the folder."""
        record = mpishard.RunRecord(folder, self.mesh)
        with mpishard.Checkpoints(folder / "checkpoints", self.mesh, virtual=True) as checkpoints:
            task = problem(self.model, steps, 16, micro_batch_size=2 if self.mesh.pipeline.size == 1 else None)
            return optimizer.optimize(task, checkpoints=checkpoints, record=record, progress=False, **options)


def mesh_of(name: str) -> Any:
    return mpishard.Mesh(tensor=KINDS[name].tensor, pipeline=KINDS[name].pipeline)


def keep(options: Options) -> Digests:
    """Leaves a folder with checkpoint and record for each kind but the elastic one, which is `elastic`'s."""
    found: Digests = {}
    for name in KINDS:
        if name == "elastic":
            continue
        with mesh_of(name) as mesh:
            made = Made.of(name, mesh)
            result = made.train(made.optimizer, options.kept / name, SAVED_AFTER)
            found[f"kept/{name}/losses"] = digest(result.loss_history)
            found[f"kept/{name}/parameters"] = digest(whole(made.model, mesh))
    return found


def load(options: Options) -> Digests:
    """What is in the kept checkpoints, and where runs come to that go on from copies of them."""
    found: Digests = {}
    for name in KINDS:
        folder = options.work / "resumed" / name
        if MPI.COMM_WORLD.rank == 0:
            shutil.copytree(options.kept / name, folder, symlinks=True)
        MPI.COMM_WORLD.Barrier()
        with mesh_of(name) as mesh:
            made = Made.of(name, mesh, seed=4)  # other values than those that are loaded
            facts = mpishard.load_checkpoint(folder / "checkpoints", made.model, made.optimizer)
            found[f"loaded/{name}/parameters"] = digest(whole(made.model, mesh))
            found[f"loaded/{name}/facts"] = digest(*(part for pair in sorted(facts.items()) for part in pair))
            with h5py.File(io.BytesIO(made.optimizer.serialize())) as state:
                found[f"loaded/{name}/state"] = digest(*(part for pair in of_datasets(state) for part in pair))
        with mesh_of(name) as mesh:
            made, steps = Made.of(name, mesh), RESUMED_TO
            optimizer = made.optimizer
            if name == "elastic":
                optimizer, steps = mpishard.ElasticOptimizer(optimizer, max_workers=FOUNDERS), ELASTIC_STEPS + 2
            result = made.train(optimizer, folder, steps, resume=True)
            found[f"resumed/{name}/losses"] = digest(result.loss_history)
            found[f"resumed/{name}/parameters"] = digest(whole(made.model, mesh))
    return found


# -- a run whose workers come and go ----------------------------------------------------------------------------------


def elastic(options: Options) -> Digests:
    """Shrinks, grows to its spares, has a worker spawned, shrinks; where MPI heals in place the first rank is shot.

    Its bits do not depend on when any of this happens, and it fails if something does not.
    """
    with mpishard.Mesh() as mesh:
        made = Made.of("elastic", mesh)
        optimizer = mpishard.ElasticOptimizer(made.optimizer, max_workers=max(PLAN))
        plan, stayed = [*PLAN, *PLAN[-1:] * options.heals], 0

        def follow(state: Any) -> None:
            """All count, the first rank gives the orders: with its successor it is there at every step."""
            nonlocal stayed
            if not plan:
                return
            if optimizer.current_workers == plan[0]:
                stayed += 1
            elif plan[0] > FOUNDERS:
                time.sleep(PAUSE_S)
            if stayed < STAY:
                return
            del plan[0]
            stayed = 0
            if mesh.rank == 0 and options.heals and len(plan) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if mesh.rank == 0 and plan:
                optimizer.resize(plan[0])

        result = made.train(optimizer, options.kept / "elastic", ELASTIC_STEPS, callback=follow)
        parameters = whole(made.model, mesh)
        if all(mesh.world.comm.allgather(bool(plan))):
            raise RuntimeError(f"after {ELASTIC_STEPS} steps the elastic run has yet to be of {plan} workers")
        found = {"elastic/losses": digest(result.loss_history), "elastic/parameters": digest(parameters)}
        return found if mesh.rank == 0 else {}


# -- what a rank does -------------------------------------------------------------------------------------------------

JOBS = {"examples": examples, "layouts": layouts, "keep": keep, "load": load, "elastic": elastic}


def surroundings() -> list[str]:
    """On what the bits may depend besides the package."""
    model = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    blas = {
        f"{each['internal_api']} {each['version']}, {each.get('architecture', 'unknown')} kernels, threads: "
        f"{each['num_threads']}"
        for each in threadpool_info()
        if each["user_api"] == "blas"
    }
    library = MPI.Get_library_version().splitlines()[0].strip(" \0")
    return [
        f"MPI {library}",
        f"processor {model[0] if model else 'unknown'}",
        *(f"BLAS {text}" for text in sorted(blas)),
        f"Python {sys.version.split()[0]}, NumPy {np.__version__}, h5py {h5py.__version__}",
    ]


def main() -> None:
    options, around = Options.read(sys.argv[1]), surroundings()  # later there may be BLAS of others than NumPy
    warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
    found: Digests = {}
    for job in options.jobs:
        found |= JOBS[job](options)
    if found and ("elastic" in options.jobs or MPI.COMM_WORLD.rank == 0):
        beside = options.results.with_suffix(".new")
        beside.write_text(json.dumps({"surroundings": around, "digests": found}))
        beside.rename(options.results)


if __name__ == "__main__":
    main()
