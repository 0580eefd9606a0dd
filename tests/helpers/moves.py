"""mpirun -n 8 python tests/helpers/moves.py [--how memory|disk] [--every K]

Train one small GPT for some steps in one layout, move the run to another layout, through memory or through a
checkpoint, and go on there: losses and parameters must be those of the uninterrupted run on one rank, and those of a
run that stayed where it was to the last bit where the two layouts are one.  All pairs of the layouts below, with and
without tied embeddings.  `tests/mpi/test_moves.py` runs a part of it.  With --every K only each K-th pair is run.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grid
import numpy as np
from mpi4py import MPI

import mpishard
from mpishard.checkpoint import Checkpoints
from mpishard.comm.reshard import reshard_state
from mpishard.layout.run_state import RunState

BEFORE, AFTER = 4, 20
# Small enough for several rounds.
BUCKET_BYTES = 2**15


@dataclass(frozen=True)
class Layout:
    """A mesh on the first ranks, and how one model is trained on it."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    tied: bool = False

    # What `grid.expected_of` asks for, the same for all layouts.
    model = "gpt"
    heads = 24
    layers = 4
    rule = "adamw"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        tied = "-tied" if self.tied else ""
        return f"{self.data}x{self.tensor}x{self.pipeline}-zero{self.zero}-{self.schedule}{tied}"


LAYOUTS = [
    Layout(),
    Layout(data=2, zero=1),
    Layout(tensor=2),
    Layout(pipeline=2, schedule="interleaved"),
    Layout(data=3, zero=1),
    Layout(tensor=3),
    Layout(data=2, tensor=2, zero=3),
    Layout(pipeline=4, schedule="zb-h1"),
    Layout(data=5, zero=2),
    Layout(tensor=3, pipeline=2, schedule="interleaved"),
    Layout(data=3, pipeline=2, zero=3),
    Layout(data=7, zero=3),
    Layout(data=2, tensor=2, pipeline=2, zero=2),
    Layout(data=4, pipeline=2, zero=1, schedule="interleaved"),
    Layout(data=2, tensor=4, zero=0),
]


class Session:
    """A model in a layout and its optimizer, on the ranks of `comm`."""

    def __init__(self, layout: Layout, comm: MPI.Intracomm, seed: int) -> None:
        self.mesh = mpishard.Mesh(comm, data=layout.data, tensor=layout.tensor, pipeline=layout.pipeline)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
            options: dict[str, Any] = {
                "chunks": 2 if layout.schedule == "interleaved" else 1,
                "microbatches": layout.pipeline,
            }
            options |= {"schedule": layout.schedule, "sharded_parameters": layout.zero == 3, "mesh": self.mesh}
            self.model = grid.make(layout.model, layout.layers, layout.heads, layout.tied, seed, **options)
        # Few buckets, for time: several in every layout, and tensors that they cut.
        config = mpishard.ShardingConfiguration(
            self.mesh, max_gradient_norm=grid.CLIP, minimum_parameter_group_size=5000
        )
        self.optimizer = grid.STRATEGIES[layout.zero](grid.RULES[layout.rule], config)
        self.optimizer.bind(self.model.parameters)

    @property
    def state(self) -> RunState:
        return self.optimizer.state.capture()

    def train(self, last: int) -> list[float]:
        losses = []
        for step in range(self.optimizer.clock + 1, last + 1):
            losses.append(grid.loss_and_gradient(self.model, self.mesh, step))
            self.optimizer.update(grid.count_of(step))
        return losses

    def parameters(self) -> np.ndarray:
        return np.array(self.model.parameters.gather())


class Group:
    """The first ranks of all, with a mesh of their own, and the others, which wait."""

    def __init__(self, world: MPI.Intracomm, ranks: int) -> None:
        self.world = world
        self.comm = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        self.inside = world.rank < ranks

    def session(self, layout: Layout, seed: int) -> Session | None:
        return Session(layout, self.comm, seed) if self.inside else None

    def meet(self) -> None:
        """Wait for all ranks, and leave the cores to those who compute."""
        request = self.world.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)

    def free(self, session: Session | None) -> None:
        if session is not None:
            session.mesh.free()
            self.comm.Free()


def move(how: str, world: mpishard.Mesh, folder: str, source: Session | None, target: Session | None) -> None:
    """Bring the run from one session to the other; through a checkpoint it was saved before."""
    facts: Any
    if how == "memory":
        mine, other = (session.state if session is not None else None for session in (source, target))
        facts = reshard_state(world.world, mine, other, bucket_bytes=BUCKET_BYTES)
    elif target is not None:
        with Checkpoints(folder, target.mesh) as checkpoints:
            found = checkpoints.load(target.state, check=target.optimizer.state.check)
        assert found is not None
        facts = found.facts
    if target is not None:
        target.optimizer.state.check(facts)
        target.optimizer.state.restore(facts)


def moves_from(
    world: mpishard.Mesh, layout: Layout, targets: Sequence[Layout], hows: Sequence[str], after: int = AFTER
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train in one layout, move to each target and go on there; largest differences over all ranks.  Collective.

    ``"bits"`` says on how many ranks anything differs from the run that stays, where the target is the same layout.
    """
    comm = world.world.comm
    last = BEFORE + after
    expected = grid.expected_of(layout, comm, last)  # type: ignore[arg-type]
    group = Group(comm, layout.ranks)
    source = group.session(layout, grid.SEED)
    found: list[tuple[str, dict[str, float]]] = []
    twins: list[tuple[int, list[float], np.ndarray]] = []
    folder = comm.bcast(tempfile.mkdtemp(prefix="mpishard-moves-") if comm.rank == 0 else None)
    try:
        if source is not None:
            source.train(BEFORE)
            if "disk" in hows:
                with Checkpoints(folder, source.mesh) as checkpoints:
                    checkpoints.save(source.state)
        for target_layout, how in itertools.product(targets, hows):
            worst = grid.Worst.fromkeys(("loss", "parameter", "bits"), 0.0)
            other = Group(comm, target_layout.ranks)
            # Other initial values: what is not moved is seen.
            target = other.session(target_layout, grid.SEED + 1)
            other.meet()
            move(how, world, folder, source, target)
            if target is not None:
                losses = target.train(last)
                worst.note("loss", grid.difference(np.array(losses), expected.losses[BEFORE:last]))
                end = grid.local(target.model.parameters, expected.parameters[last - 1])
                worst.note("parameter", grid.difference(target.parameters(), end))
                if target_layout == layout:
                    twins.append((len(found), losses, target.parameters()))
            other.meet()
            other.free(target)
            found.append((f"{layout} to {target_layout} by {how}", worst))
        if source is not None and twins:
            losses, parameters = source.train(last), source.parameters()
            for number, twin_losses, twin_parameters in twins:
                same = losses == twin_losses and parameters.tobytes() == twin_parameters.tobytes()
                found[number][1]["bits"] = float(not same)
        group.meet()
        group.free(source)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    for name, worst in found:
        values = np.array(list(worst.values()))
        comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
        yield name, dict(zip(worst, values.tolist(), strict=True))


def passes(found: dict[str, float]) -> bool:
    """Whether losses and parameters are within the tolerance, and bits alike where they have to be."""
    return found["bits"] == 0 and max(found["loss"], found["parameter"]) <= grid.TOLERANCE


def tied(layouts: Sequence[Layout]) -> list[Layout]:
    """The same layouts for the model whose output head uses the table of the embedding."""
    return [replace(layout, tied=True) for layout in layouts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["memory", "disk"], action="append", help="one way only (default both)")
    parser.add_argument("--every", type=int, default=1, help="run each K-th pair only (default all)")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(range(1, 9)), help="sizes of layouts to take")
    options = parser.parse_args()
    world = mpishard.Mesh()
    possible = [layout for layout in LAYOUTS if layout.ranks in options.ranks and layout.ranks <= world.size]
    if options.every < 1 or not possible:
        parser.error(f"--every must be at least 1, and some layout must be of --ranks and at most {world.size} ranks")
    began, results = time.monotonic(), []
    for layouts in (possible, tied(possible)):
        pairs = list(itertools.product(layouts, layouts))[:: options.every]
        for source, moved in itertools.groupby(pairs, lambda pair: pair[0]):
            targets = [target for _, target in moved]
            for name, found in moves_from(world, source, targets, options.how or ["memory", "disk"]):
                results.append(found)
                if world.rank == 0 and not passes(found):
                    print(f"FAIL {name}: {found}", flush=True)
            if world.rank == 0:
                print(f"{source}: done, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    failed = sum(not passes(found) for found in results)
    if world.rank == 0:
        text = ", ".join(f"{name} {max(found[name] for found in results):.1e}" for name in results[0])
        seconds = time.monotonic() - began
        print(f"{len(possible)} layouts, {len(results)} moves, {failed} failed, in {seconds:.0f} s; largest: {text}")
        print("FAIL" if failed else "PASS")
    world.free()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
