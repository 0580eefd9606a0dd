"""Whoever dies, however and wherever: the grid of faults that an elastic run outlives.

    python tests/helpers/faults.py [--victim V] [--phase P] [--kind K] [--layout L] [--sample N] [--jobs N] ...

Each case is a run of its own, by Open MPI's ``mpirun --with-ft ulfm``: three or four workers and a spare train a small
GPT, one of them fails, and the run must end by itself with the parameters and losses of a run without faults, to the
last bit.  Without arguments the whole grid is run, which takes over an hour on two cores.  ``--several``: the cases
with more than one failure.  Prints each case as it ends, and a table.  With ``--resume FILE`` each is noted there, and
those that are there already are not run again.

After a death Open MPI sometimes hangs in MPI_Finalize, when all results are there: the table counts how often, and
`mpishard run` ends such a job.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fault_run
from fault_run import RECRUITING, SPAWNED, Case, Fault
from launching import ULFM, alive, execute, is_open_mpi, mpirun, scratch

from mpishard.record.reading import read_lines

VICTIMS = ("first", "middle", "last", "spawned", "spare")
PHASES = (
    *("forward", "reduction", "all-gather", "update", "buddy", "agreement", "committed", "validation"),
    *("save", "reported", "last-save", "resize", "heal"),
    *RECRUITING,
)
KINDS = ("kill", "exception", "stop", "exit", "code", "library")
# Strategy, tensor and pipeline size.
LAYOUTS = {
    "DDP": ("DDP", 1, 1),
    "ZeRO1": ("ZeRO1", 1, 1),
    "ZeRO2": ("ZeRO2", 1, 1),
    "ZeRO3": ("ZeRO3", 1, 1),
    "tensor": ("ZeRO2", 2, 1),
    "pipeline": ("ZeRO1", 1, 2),
}
TIME_LIMIT = 240.0


@dataclass(frozen=True)
class Ended:
    """What came of a case: `problem` is empty if it is as it must be; `how`: see `execute`."""

    case: Case
    problem: str
    how: str
    seconds: float
    output: str = ""


# -- the cases --------------------------------------------------------------------------------------------------------


def plain(name: str, layout: str, replicas: int = 4) -> Case:
    """A run without faults, of all replicas but one, which is a spare."""
    strategy, tensor, pipeline = LAYOUTS[layout]
    if tensor * pipeline > 1:
        replicas = 3
    processes = replicas * tensor * pipeline
    return Case(f"{name} {layout}", strategy, (), tensor, pipeline, replicas - 1, processes)


def process(case: Case, replica: int, place: int = 0) -> int:
    """Which one is at a place of a replica; places are tensor ranks, or stages."""
    replicas = case.processes // (case.tensor * case.pipeline)
    return replica * case.tensor + place if case.pipeline == 1 else place * replicas + replica


def single(victim: str, phase: str, kind: str, layout: str) -> Case | None:
    """A case of the grid; None where there is no such thing."""
    if layout == "DDP" and phase == "buddy":
        return None  # every rank has all of the state
    if phase in RECRUITING and (
        layout not in ("ZeRO1", "tensor")  # who knows no strategy
        or victim == "spare"  # with one nobody is spawned yet
        or (victim == "spawned" and (phase == "started" or kind == "stop"))  # it is not watched yet
    ):
        return None
    strategy, tensor, pipeline = LAYOUTS[layout]
    hybrid = tensor * pipeline > 1
    spawns = victim == "spawned" or phase in RECRUITING
    case = plain(f"{victim} {phase} {kind}", layout, 5 if phase == "heal" and not hybrid else 4)
    if spawns:  # the last worker comes later, and there is no spare
        case = replace(case, spawns=True, processes=(case.workers - 1) * tensor * pipeline)
        if hybrid and victim != "spawned":  # one replica alone has no copy of its state
            case = replace(case, workers=3, processes=2 * tensor * pipeline)
    founders = case.workers - spawns
    last = tensor * pipeline - 1
    who = {
        "first": 0,
        "middle": process(case, 0, 1) if hybrid else 1,
        "last": process(case, founders - 1, last),
        "spawned": SPAWNED,
        "spare": process(case, case.workers),
    }[victim]
    if phase == "heal":
        # First dies a worker that is no neighbour of the victim: it has no copy of its state.
        if not hybrid:
            before = 1 if spawns else (who + 2) % case.workers
        elif victim in ("spawned", "spare", "first"):
            before = process(case, founders - 1, 1)
        else:
            before = process(case, 1, 0) if victim == "middle" else process(case, 0, 0)
        faults = (Fault(before, "forward", "kill"), Fault(who, phase, kind, 0))
    elif phase == "last-save":
        faults = (Fault(who, "save", kind, fault_run.STEPS + 1),)
    else:
        faults = (Fault(who, phase, kind, _first_step(phase)),)
    return replace(case, faults=faults)


def _first_step(phase: str) -> int:
    """The step in which a fault is due; in a save it is that of the best checkpoint."""
    if phase in ("save", "reported"):
        return fault_run.BEST + 1
    return 0 if phase == "resize" or phase in RECRUITING else 4


def grid() -> list[Case]:
    cases = itertools.starmap(single, itertools.product(VICTIMS, PHASES, KINDS, LAYOUTS))
    moves = itertools.starmap(moving, itertools.product(VICTIMS, PHASES, KINDS))
    return [case for case in (*cases, *moves) if case is not None]


def moving(victim: str, phase: str, kind: str) -> Case | None:
    """A case in which four processes of one replica go on as three; None where there is no such thing."""
    case = Case(f"{victim} {phase} {kind} moves", "ZeRO1", (), 2, 2, 4, 4, moves=True)
    if phase in ("reduction", "all-gather") or phase in RECRUITING[:-1] or victim == "spare":
        return None  # there is one data rank, and no spare
    who = {"first": 0, "middle": 1, "last": 3, "spawned": SPAWNED}[victim]
    if victim == "spawned" or phase in RECRUITING:
        if phase not in ("update", "joined", "agreement", "resize") or (victim == "spawned" and kind == "stop"):
            return None
        case = replace(case, tensor=1, pipeline=1, processes=3, spawns=True)
        who = min(who, 2)
    at = _first_step(phase)
    if phase == "heal":
        # First dies one that is neither the victim's buddy nor its neighbour: then each copy has a holder.
        return replace(case, faults=(Fault((who + 2) % 4, "forward", "kill"), Fault(who, phase, kind, 0)))
    fault = Fault(who, "save", kind, fault_run.STEPS + 1) if phase == "last-save" else Fault(who, phase, kind, at)
    return replace(case, faults=(fault,))


def several(layout: str) -> list[Case]:
    """More than one failure."""
    after = plain("one-after-the-other", layout, 5)
    hybrid = after.tensor * after.pipeline > 1
    one, other = (process(after, 0), process(after, 1, 1)) if hybrid else (0, 2)
    neighbour = process(after, 1)
    at_once = replace(after, name=f"two-at-once {layout}")
    respawned = plain("respawned", layout)
    respawned = replace(respawned, processes=respawned.workers * after.tensor * after.pipeline, respawn=True)
    founder = Fault(process(respawned, 1), "forward", "kill", 3)
    neighbours = replace(after, name=f"neighbours-at-once {layout}", lost=layout != "DDP")
    return [
        replace(after, faults=(Fault(other, "forward", "kill", 2), Fault(one, "update", "kill", 5))),
        replace(at_once, faults=(Fault(one, "reduction", "kill"), Fault(other, "reduction", "kill"))),
        replace(neighbours, faults=(Fault(one, "forward", "kill", 6), Fault(neighbour, "forward", "kill", 6))),
        replace(respawned, faults=(founder, Fault(SPAWNED, "update", "kill", 7))),
    ]


def results_of(case: Case) -> int:
    """How many processes have the result: all survivors that are in a whole replica."""
    if case.moves:
        comes = case.spawns and not any(fault.phase in RECRUITING for fault in case.faults)
        return case.processes + comes - sum(comes or fault.victim != SPAWNED for fault in case.faults)
    if case.respawn:
        return case.workers * case.tensor * case.pipeline
    places = Counter[int]()
    # Without `respawn` those on their way are sent away after a death, and go if one of them dies.
    comes = case.spawns and not any(fault.phase in RECRUITING for fault in case.faults)
    replicas = case.processes // (case.tensor * case.pipeline)
    for number in range(case.processes):
        places[number % case.tensor if case.pipeline == 1 else number // replicas] += 1
    for place in range(case.tensor * case.pipeline):
        places[place] += comes
    for fault in case.faults:
        who = fault.victim
        if who == SPAWNED and not comes:
            continue
        if who == SPAWNED:
            places[0] -= 1
        else:
            places[who % case.tensor if case.pipeline == 1 else who // replicas] -= 1
    return min(places.values()) * case.tensor * case.pipeline


# -- how one is run ---------------------------------------------------------------------------------------------------


def launcher() -> list[str] | None:
    """Open MPI's ``mpirun`` with ULFM, if that is the MPI of this Python."""
    found, version = mpirun()
    return [found, *ULFM] if is_open_mpi(version) else None


def _command(case: Case, folder: str, limit: float) -> list[str]:
    return [sys.executable, fault_run.__file__, json.dumps(asdict(case)), folder, str(limit)]


def _results(folder: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in Path(folder).glob("result-*")]


def expected(launch: Sequence[str], tensor: int = 1, pipeline: int = 1, moves: bool = False) -> dict[str, Any]:
    """Of a run of one replica, without faults."""
    with scratch() as folder:
        ranks = tensor * pipeline
        case = Case("alone", "DDP", (), tensor, pipeline, ranks if moves else 1, ranks, moves=moves)
        output, _ = execute([*launch, "-n", str(ranks), *_command(case, folder, TIME_LIMIT)], TIME_LIMIT)
        found = _results(folder)
        if len(found) != ranks or any(each != found[0] for each in found):
            raise RuntimeError(f"the run without faults failed:\n{output}")
        return found[0]


def reference_of(case: Case) -> tuple[int, int, bool]:
    """The arguments of `expected` for the run that a case is compared with."""
    return (1, 1, True) if case.moves else (case.tensor, case.pipeline, False)


def _may_grow(case: Case) -> bool:
    """Whether a process is spawned when the run asks for all workers again, which may be there before the end."""
    return case.moves and not case.spawns and any(fault.phase == "resize" for fault in case.faults)


def run(case: Case, launch: Sequence[str], reference: dict[str, Any], limit: float = TIME_LIMIT) -> Ended:
    with scratch() as folder:
        began, results = time.monotonic(), results_of(case)
        command = [*launch, "-n", str(case.processes), *_command(case, folder, limit)]
        output, how = execute(command, limit, lambda: len(list(Path(folder).glob("result-*"))) >= results)
        seconds = time.monotonic() - began
        found = _results(folder)
        newest = Path(folder, "checkpoints", "latest").resolve().name
        steps = [line["step"] for line in read_lines(Path(folder, "metrics.jsonl"))[0]]
        # A new first rank repeats the newest one, which the first rank before may not have written.
        validated = sorted({line["step"] for line in read_lines(Path(folder, "logged.jsonl"))[0]})
        seen = sorted(int(path.name.removeprefix("seen-")) for path in Path(folder).glob("seen-*"))
        happened = len(list(Path(folder).glob("fault-*")))
        left = alive(folder)
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    problem = ""
    if how == "hangs":
        problem = f"not done in {limit:g} s"
    elif happened != len(case.faults):
        problem = f"{happened} of {len(case.faults)} faults came about"
    elif left and how == "in order":
        problem = f"processes {left} are left"
    elif case.lost:
        if found or "newest checkpoint" not in output:
            problem = "it did not end with word of the newest checkpoint"
    elif len(found) not in range(results, results + 1 + _may_grow(case)):
        problem = f"{len(found)} of {results} processes came to the end"
    elif any(each != reference for each in found):
        problem = f"other bits: {found} instead of {reference}"
    elif not newest.startswith(f"step-{fault_run.STEPS:08d}"):
        problem = f"the newest checkpoint is {newest}, and the last step was {fault_run.STEPS}"
    elif steps != list(range(1, fault_run.STEPS + 1)):
        problem = f"the record has the steps {steps}"
    elif seen != list(range(1, fault_run.STEPS + 1)):
        problem = f"the callback has seen the steps {seen}"
    elif validated != list(range(fault_run.VALIDATED_EVERY, fault_run.STEPS + 1, fault_run.VALIDATED_EVERY)):
        problem = f"the record has the validation losses of the steps {validated}"
    return Ended(case, problem, how, seconds, output)


# -- the command ------------------------------------------------------------------------------------------------------


def _run_all(cases: Iterable[Case], launch: Sequence[str], limit: float, jobs: int, file: Path | None) -> list[Ended]:
    """Run the cases, a few at a time; results that are in the file already are taken from there."""
    known = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            fields = json.loads(line)
            known[fields["case"]] = fields
    references: dict[tuple[int, int, bool], dict[str, Any]] = {}
    todo = [case for case in cases if case.name not in known]
    for case in todo:
        if reference_of(case) not in references:
            references[reference_of(case)] = expected(launch, *reference_of(case))

    def carry_out(case: Case) -> Ended:
        ended = run(case, launch, references[reference_of(case)], limit)
        verdict = ended.problem or ("ends and says why" if case.lost else "bit-equal")
        if ended.how == "done":
            verdict += ", but the launcher does not end"
        text = f"{case.name:36s} {ended.seconds:6.1f} s  {verdict}\n" + (ended.output if ended.problem else "")
        sys.stdout.write(text)
        sys.stdout.flush()
        if file is not None:
            fields = {"problem": ended.problem, "how": ended.how, "seconds": round(ended.seconds, 2)}
            output = {"output": ended.output} if ended.problem else {}
            with file.open("a") as stream:
                stream.write(json.dumps({"case": case.name, **fields, **output}) + "\n")
        return ended

    before = [
        Ended(case, *(known[case.name][name] for name in ("problem", "how", "seconds")))
        for case in cases
        if case.name in known
    ]
    with ThreadPoolExecutor(jobs) as pool:
        return before + list(pool.map(carry_out, todo))


def table(all_ended: Sequence[Ended]) -> str:
    """How many of how many cases are as they must be."""
    lines = []
    words = [ended.case.name.split() for ended in all_ended]
    for rows, columns in ((0, 1), (2, 3)):
        tried: Counter[tuple[str, str]] = Counter()
        good: Counter[tuple[str, str]] = Counter()
        for each, ended in zip(words, all_ended, strict=True):
            if len(each) == 4:
                tried[each[rows], each[columns]] += 1
                good[each[rows], each[columns]] += not ended.problem
        across = [
            name for name in ((), PHASES, (), (*LAYOUTS, "moves"))[columns] if any(key[1] == name for key in tried)
        ]
        if not across:
            continue
        lines.append(" " * 12 + "".join(f"{name:>11s}" for name in across))
        for row in (VICTIMS, (), KINDS)[rows]:
            cells = [f"{good[row, name]}/{tried[row, name]}" if tried[row, name] else "-" for name in across]
            lines.append(f"{row:12s}" + "".join(f"{cell:>11s}" for cell in cells))
        lines.append("")
    failed = [ended for ended in all_ended if ended.problem]
    lines += [f"{ended.case.name}: {ended.problem}" for ended in failed]
    unended = sum(ended.how == "done" for ended in all_ended)
    seconds = statistics.median(ended.seconds for ended in all_ended) if all_ended else 0.0
    lines.append(
        f"{len(all_ended) - len(failed)} of {len(all_ended)} as they must be, in {seconds:.1f} s each (median); "
        f"{unended} launchers did not end"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    parser.add_argument("--phase", choices=PHASES, action="append")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--layout", choices=[*LAYOUTS, "moves"], action="append")
    parser.add_argument("--several", action="store_true", help="the cases with more than one failure instead")
    parser.add_argument("--sample", type=int, help="so many of the cases only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT, help="seconds for one case")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    options = parser.parse_args()
    launch = launcher()
    if launch is None:
        sys.exit("faults heal in place under Open MPI only, which is not the MPI of this Python")
    cases = [case for layout in LAYOUTS for case in several(layout)] if options.several else grid()
    for chosen in (options.victim, options.phase, options.kind, options.layout):
        if chosen:
            cases = [case for case in cases if set(chosen) & set(case.name.split())]
    if options.sample is not None:
        cases = random.Random(options.seed).sample(cases, min(options.sample, len(cases)))
    found = _run_all(cases, launch, options.limit, options.jobs, options.resume)
    print(table(found))
    return 1 if any(ended.problem for ended in found) else 0


if __name__ == "__main__":
    sys.exit(main())
