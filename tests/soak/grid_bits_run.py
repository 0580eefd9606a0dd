"""mpirun -n 8 python tests/soak/grid_bits_run.py [--ranks 1 2 4] [--shapes 4 6 8] [--seeds 3 4 5] ...

Train one small GPT with ``reproducible=True`` in every layout of 1, 2, 3, 4, 6 and 8 ranks, under every schedule and
ZeRO stage, with and without sequence parallelism, recomputation and tied tables, and compare bits: one SHA-256 of
parameters and optimizer slots, gathered to whole tensors, and one of the losses, must be the same in all of them.
`tests/mpi/test_same_bits.py` runs a part of it.  Run it where sums, products or layouts change.

Cases are sub-meshes of one world, and run side by side in as many groups as fit.  Where ranks share cores, take the
variables of `setup.cfg` that make waiting ranks yield.  `--break` changes one thing in all cases but the first, which
must show (threads in the shape 4-large only, whose products are large enough for two).  `--first-difference` names the
step, and the tensors, that differ first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import breaks
from grid_bits import CLIP, RULE, SHAPES, BitsCase, Digests, Tensors, Watch, bits_cases, run, run_alone, train
from grid_cases import SCHEDULES

# Without clipping, which carries a difference of one element into all others; the slot is the gradient after a step.
GRADIENT_RULE = mpishard.SGD(lr=1e-2, momentum=0.5)
RANKS = (1, 2, 3, 4, 6, 8)
MOST_SHOWN = 12  # of what differs


def first_difference(case: BitsCase, mesh: mpishard.Mesh, breaking: str = "") -> str:
    """The first step, and what of it, that differs from one rank; empty if nothing does.  Collective over the mesh."""
    for rule, clip in ((GRADIENT_RULE, None), (RULE, CLIP)):
        expected: list[tuple[int, float, Tensors]] = []
        if mesh.rank == 0:
            with mpishard.Mesh(MPI.COMM_SELF) as alone:
                train(case.alone, alone, layers=case.layers, rule=rule, clip=clip, watch=_noting(expected))
        found: list[tuple[int, float, Tensors]] = []
        with breaks.broken(breaking):
            train(case, mesh, rule=rule, clip=clip, watch=_noting(found))
        text = "" if mesh.rank else _compared(found, expected)
        text = mesh.world.comm.bcast(text)
        if text:
            return f"{'SGD without clipping' if clip is None else 'AdamW with clipping'}: {text}"
    return ""


def _noting(notes: list[tuple[int, float, Tensors]]) -> Watch:
    return lambda *each: notes.append(each)


def _compared(found: list[tuple[int, float, Tensors]], expected: list[tuple[int, float, Tensors]]) -> str:
    for (step, loss, ours), (_, loss_alone, theirs) in zip(found, expected, strict=True):
        texts = [] if _same(loss, loss_alone) else [f"loss {loss!r}, alone {loss_alone!r}"]
        if ours.keys() != theirs.keys():
            texts.append(f"other tensors: {sorted(ours.keys() ^ theirs.keys())}")
        kinds = sorted((name for name in ours if name in theirs), key=lambda name: (" of " not in name, name))
        for name in kinds:  # slots first: those of SGD are gradients
            one, two = ours[name], theirs[name]
            if one.tobytes() != two.tobytes():
                where = np.flatnonzero(one.view(f"u{one.itemsize}") != two.view(f"u{two.itemsize}"))
                largest = np.abs(one - two).max()
                texts.append(f"{name}: {len(where)} of {one.size}, first {where[0]}, at most {largest:.1e}")
        if texts:
            more = [f"and {len(texts) - MOST_SHOWN} others"] if len(texts) > MOST_SHOWN else []
            return f"step {step}: " + "\n    ".join(texts[:MOST_SHOWN] + more)
    return ""


def _same(one: float, two: float) -> bool:
    return np.float64(one).tobytes() == np.float64(two).tobytes()


# -- many of them -----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How a case ended: "equal", "differs" or "refused", with a text."""

    case: BitsCase
    kind: str
    text: str = ""
    digests: Digests | None = None


class Meshes:
    """One mesh at a time: making one takes longer than a small case."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._sizes: dict[str, int] = {}
        self._mesh: mpishard.Mesh | None = None

    def of(self, case: BitsCase) -> mpishard.Mesh:
        if self._mesh is None or self._sizes != case.sizes:
            self.free()
            self._sizes, self._mesh = case.sizes, mpishard.Mesh(self._comm, **case.sizes)
        return self._mesh

    def free(self) -> None:
        if self._mesh is not None:
            self._mesh.free()
        self._mesh = None


def chosen(options: argparse.Namespace, ranks: int) -> list[BitsCase]:
    """The cases of a number of ranks, by the options."""
    found = []
    for shape in options.shapes:
        for number, case in enumerate(bits_cases(ranks, shape, every_schedule=options.every_schedule)):
            if options.cover and number and not _covers(case, options.shapes):
                continue
            for seed, tied in itertools.product(options.seeds, options.tied):
                turn = case.zero + SCHEDULES.index(case.schedule) + case.sequence_parallel + case.recompute
                by_turns = bool(turn % 2) if tied is None else tied
                found.append(replace(case, seed=seed, tied=by_turns, dtype=options.dtype, storage=options.storage))
    found = [case for case in dict.fromkeys(found) if all(part in str(case) for part in options.only)]
    return found[:: options.every]


def _covers(case: BitsCase, shapes: list[str]) -> bool:
    """Whether this shape is the first that allows the tensor size of the case."""
    return case.shape == next(shape for shape in shapes if SHAPES[shape].shards % case.tensor == 0)


def compare(
    cases: list[BitsCase], world: MPI.Intracomm, ranks: int, known: dict[Any, Digests], options: argparse.Namespace
) -> list[Outcome]:
    """Run cases of one number of ranks in groups of the world.  Collective over it."""
    groups, group = world.size // ranks, world.rank // ranks
    missing = list(dict.fromkeys(case.model for case in cases if case.model not in known))
    models = {case.model: case for case in reversed(cases)}
    mine = {model: run_alone(models[model]) for model in missing[world.rank :: world.size]}
    for part in world.allgather(mine):
        known |= part
    comm = world.Split(group if group < groups else MPI.UNDEFINED, world.rank)
    outcomes: list[Outcome] = []
    if comm != MPI.COMM_NULL:
        meshes = Meshes(comm)
        for case in cases[group::groups]:
            outcomes.append(_outcome(case, meshes, known[case.model], options))
            if comm.rank == 0 and outcomes[-1].kind != "equal" and not options.quiet:
                print(f"{outcomes[-1].kind.upper()} {case}: {outcomes[-1].text}", flush=True)
        meshes.free()
        outcomes = outcomes if comm.rank == 0 else []
        comm.Free()
    return [each for part in world.allgather(outcomes) for each in part]


def _outcome(case: BitsCase, meshes: Meshes, expected: Digests, options: argparse.Namespace) -> Outcome:
    breaking = options.breaks if case != case.alone else ""
    try:
        with breaks.broken(breaking):
            found = run(case, meshes.of(case))
    except (ValueError, TypeError) as error:  # on all ranks
        return Outcome(case, "refused", f"{type(error).__name__}: {error}")
    if found == expected:
        return Outcome(case, "equal", digests=found)
    what = [name for name, one, two in zip(found._fields, found, expected, strict=True) if one != two]
    text = " and ".join(what)
    if options.first_difference:
        text += "\n    " + first_difference(case, meshes.of(case), breaking)
    return Outcome(case, "differs", text, found)


def table(outcomes: list[Outcome], known: Mapping[Any, Digests]) -> str:
    """How many cases of each mesh have the bits of one rank, and these bits."""
    lines = [f"{'shape':8s}{'data x tensor x pipeline':26s}{'cases':>7s}{'equal':>7s}{'differ':>8s}{'refused':>9s}"]
    by_mesh: dict[tuple[str, int, str], Counter[str]] = {}
    for each in outcomes:
        case = each.case
        size = f"{case.data} x {case.tensor} x {case.pipeline}"
        by_mesh.setdefault((case.shape, case.ranks, size), Counter())[each.kind] += 1
    for (shape, _, size), counts in sorted(by_mesh.items(), key=lambda item: (item[0][0], item[0][1])):
        numbers = counts["equal"], counts["differs"], counts["refused"]
        lines.append(f"{shape:8s}{size:26s}{counts.total():7d}" + "".join(map("{:{}d}".format, numbers, (7, 8, 9))))
    lines.append(f"{'model':54s}{'parameters and slots':26s}losses")
    for (layers, alone), (state, losses) in sorted(known.items(), key=str):
        kind = f"{alone.shape}, {layers} layers, {'tied' if alone.tied else 'untied'}, seed {alone.seed}, {alone.dtype}"
        kind += f", {alone.storage}" * bool(alone.storage) + ", again" * alone.recompute
        lines.append(f"{kind:54s}{state[:24]:26s}{losses[:24]}")
    return "\n".join(lines)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), help="numbers of ranks")
    parser.add_argument("--shapes", nargs="+", default=["4", "6", "8"], choices=list(SHAPES), help="of the model")
    parser.add_argument("--cover", action="store_true", help="every tensor size with one of the shapes only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3])
    parser.add_argument("--tied", choices=["turns", "both", "yes", "no"], default="turns")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--storage", choices=["", "float16"], default="", help="storage_dtype of activations")
    parser.add_argument("--every", type=int, default=1, help="run each K-th case only (default all)")
    parser.add_argument("--every-schedule", action="store_true", help="all schedules without a pipeline, too")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names contain all of these")
    parser.add_argument("--first-difference", action="store_true", help="say what differs first")
    parser.add_argument("--break", dest="breaks", choices=list(breaks.BREAKS), default="", help="must show")
    parser.add_argument("--quiet", action="store_true", help="print the table only")
    options = parser.parse_args(words)
    options.tied = {"turns": [None], "both": [False, True], "yes": [True], "no": [False]}[options.tied]
    warnings.filterwarnings("ignore", message=".*micro-batches for .* pipeline stages")
    world = MPI.COMM_WORLD
    if max(options.ranks) > world.size or options.every < 1:
        parser.error(f"--ranks {max(options.ranks)} of {world.size}: start as many, or take --ranks {world.size}")
    known: dict[Any, Digests] = {}
    outcomes: list[Outcome] = []
    for ranks in options.ranks:
        began, cases = time.monotonic(), chosen(options, ranks)
        outcomes += compare(cases, world, ranks, known, options)
        if world.rank == 0:
            counts = Counter(each.kind for each in outcomes if each.case.ranks == ranks)
            seconds = time.monotonic() - began
            print(f"{ranks} ranks: {len(cases)} cases, {dict(counts)}, in {seconds:.0f} s", flush=True)
    if world.rank:
        return 0
    print(MPI.Get_library_version().splitlines()[0].strip(" \0"))
    print(table(outcomes, known))
    kinds = Counter(each.kind for each in outcomes)
    shown = kinds["differs"] > 0 if options.breaks else kinds["equal"] == len(outcomes) > 0
    print(f"{'PASS' if shown else 'FAIL'}: {kinds['equal']} of {len(outcomes)} cases have the bits of one rank")
    return int(not shown)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
