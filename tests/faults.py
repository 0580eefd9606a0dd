"""Whoever dies, however and wherever: the grid of faults that an elastic run outlives.

    python tests/faults.py [--sample N] [--seed S] [--strategy S] [--phase P] [--victim V] [--kind K]

Each case is a run of its own, by Open MPI's ``mpirun --with-ft ulfm``: four workers and a spare train a small GPT, one
of them fails, and the run must end by itself with the parameters and losses of a run of one rank, to the last bit.
Without arguments the whole grid is run, which takes more than an hour on two cores.  Prints a table.

After a death Open MPI sometimes hangs in MPI_Finalize, when all results are there: the table says so, and
`mpishard run` ends such a job.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORKERS = 4
VICTIMS = {"first": 0, "middle": 1, "last": WORKERS - 1, "spare": WORKERS}
PHASES = ("forward", "reduction", "all-gather", "update", "buddy", "agreement", "committed", "save", "resize", "heal")
KINDS = ("kill", "exception", "exit")
STRATEGIES = ("DDP", "ZeRO1", "ZeRO2", "ZeRO3")
STEPS, SHRUNK_AFTER, GROWN_AFTER = 9, 3, 6
TIME_LIMIT = 120.0
GRACE = 5.0  # that the launcher gets to end after the work is done


@dataclass(frozen=True)
class Fault:
    """One process fails, at the step `at` or the first time that the phase comes after it."""

    victim: int
    phase: str
    kind: str
    at: int = 5


@dataclass(frozen=True)
class Case:
    """A run and what happens to it; `lost`: that state which nobody keeps is lost, so that it must end."""

    name: str
    strategy: str
    faults: tuple[Fault, ...]
    processes: int = WORKERS + 1
    lost: bool = False


@dataclass(frozen=True)
class Ended:
    """What came of a case: `problem` is empty if it is as it must be; `how`: see `execute`."""

    case: Case
    problem: str
    how: str
    seconds: float
    output: str


def single(victim: str, phase: str, kind: str, strategy: str) -> Case:
    """A case of the grid."""
    name = f"{victim} {phase} {kind} {strategy}"
    who = VICTIMS[victim]
    if phase != "heal":
        at = SHRUNK_AFTER if phase == "resize" else 4 if phase == "save" else 5
        return Case(name, strategy, (Fault(who, phase, kind, at),))
    # A worker that is no neighbour of the victim dies first.
    before = Fault((who + 2) % WORKERS, "forward", "kill")
    return Case(name, strategy, (before, Fault(who, "heal", kind)))


def grid() -> list[Case]:
    return [single(*each) for each in itertools.product(VICTIMS, PHASES, KINDS, STRATEGIES)]


def several(strategy: str) -> list[Case]:
    """More than one failure."""
    return [
        Case(
            f"one after the other {strategy}", strategy, (Fault(1, "forward", "kill", 2), Fault(0, "update", "kill", 7))
        ),
        Case(f"two at once {strategy}", strategy, (Fault(0, "reduction", "kill"), Fault(2, "reduction", "kill"))),
        Case(
            f"neighbours at once {strategy}",
            strategy,
            (Fault(1, "forward", "kill"), Fault(2, "forward", "kill")),
            lost=strategy != "DDP",
        ),
    ]


# -- the launcher's side ----------------------------------------------------------------------------------------------


def launcher() -> list[str] | None:
    """Open MPI's ``mpirun`` with ULFM, if that is the MPI of this Python."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return [found, "--with-ft", "ulfm", "--mca", "coll", "^han"] if "Open MPI" in version else None


def environment() -> dict[str, str]:
    root, beside = Path(__file__).resolve().parents[1], Path(__file__).resolve().parent
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OPENBLAS_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(beside), os.environ.get("PYTHONPATH", "")]),
    }


def execute(command: Sequence[str], limit: float, done: Callable[[], bool] = lambda: False) -> tuple[str, str]:
    """What it printed, and how it ended: "in order", "done" (the work is, the launcher does not end), or "hangs".

    Nothing of it is left afterwards.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment() | {"FAULTS_LIMIT": str(limit)},
            start_new_session=True,
        )
        end, how = time.monotonic() + limit, "hangs"
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
            if how == "hangs" and done():
                end, how = min(end, time.monotonic() + GRACE), "done"
        if process.poll() is not None:
            how = "in order"
        else:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        return log.read(), how


def expected() -> dict[str, Any]:
    """Of a run of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case("alone", "DDP", (), processes=1)
        output, _ = execute(_worker(case, folder), TIME_LIMIT)
        found = _results(folder)
        if len(found) != 1:
            sys.exit(f"the run of one rank failed:\n{output}")
        return found[0]


def _worker(case: Case, folder: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(case)), folder]


def _results(folder: str) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("result-*"))]


def _end_left(folder: str) -> list[int]:
    """Kill the processes of a run that are still there; returns them."""
    left = []
    for pid in map(int, Path(folder, "pids").read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                left.append(pid)
    return left


def run(case: Case, launch: Sequence[str], reference: dict[str, Any], limit: float = TIME_LIMIT) -> Ended:
    survivors = case.processes - len(case.faults)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [*launch, "-n", str(case.processes), *_worker(case, folder)]
        output, how = execute(command, limit, lambda: len(list(Path(folder).glob("result-*"))) == survivors)
        seconds = time.monotonic() - began
        found = _results(folder)
        happened = len(list(Path(folder).glob("fault-*")))
        alive = _end_left(folder)
    problem = ""
    if how == "hangs":
        problem = f"not done in {limit:g} s"
    elif happened != len(case.faults):
        problem = f"{happened} of {len(case.faults)} faults came about"
    elif alive and how == "in order":
        problem = f"processes {alive} are left"
    elif case.lost:
        if found or "newest checkpoint" not in output:
            problem = "it did not end with word of the newest checkpoint"
    elif len(found) != survivors:
        problem = f"{len(found)} of {survivors} survivors came to the end"
    elif any(each != reference for each in found):
        problem = f"other bits: {found} instead of {reference}"
    return Ended(case, problem, how, seconds, output)


# -- a process of the run ---------------------------------------------------------------------------------------------


def worker(case: Case, folder: Path) -> None:
    import hashlib

    import numpy as np
    from mpi4py import MPI

    import mpishard
    from mpishard import nn
    from mpishard.checkpoint import Checkpoints
    from mpishard.elastic.optimizer import ElasticOptimizer

    me = MPI.COMM_WORLD.rank
    faulthandler.dump_traceback_later(float(os.environ.get("FAULTS_LIMIT", TIME_LIMIT)) / 2)
    with open(folder / "pids", "a") as file:
        file.write(f"{os.getpid()}\n")
    tokens = np.random.default_rng(1).integers(0, 11, (45, 9))
    strategy: Any = getattr(mpishard, f"{case.strategy}Optimizer")
    with mpishard.Mesh() as mesh:
        model = nn.GPT(11, 8, 16, 2, 2, np.float32, mesh=mesh)
        config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5, reproducible=True)
        inner = strategy(mpishard.AdamW(lr=0.01), config)
        elastic = ElasticOptimizer(inner, max_workers=WORKERS)
        clock = SimpleNamespace(now=lambda: inner.clock + 1)
        hit = None

        def batch(samples: Any) -> Any:
            if hit is not None:
                hit("forward")
            return tokens[samples, :-1], tokens[samples, 1:]

        def callback(state: Any) -> None:
            if mesh.size > 1 and state.step == SHRUNK_AFTER:
                elastic.resize(WORKERS - 1)
            if mesh.size > 1 and state.step == GROWN_AFTER:
                elastic.resize(WORKERS)

        options = {"samples": 45, "batch_size": 16, "tokens_per_sample": 8, "steps": STEPS, "micro_batch_size": 2}
        problem = mpishard.OptimizationProblem.for_model(model, batch, **options)
        with Checkpoints(folder / "checkpoints", mesh, every=4) as checkpoints:
            hit = strike(case, me, folder, mesh, checkpoints, clock)
            resizes = any(fault.phase == "resize" for fault in case.faults)
            result = elastic.optimize(
                problem, callback=callback if resizes else None, progress=False, checkpoints=checkpoints
            )
        full = mpishard.as_distributed(model, mesh).gather_full_parameters()
        found = {
            "parameters": hashlib.sha256(full.tobytes()).hexdigest(),
            "losses": hashlib.sha256(result.loss_history.tobytes()).hexdigest(),
            "steps": result.steps,
            "samples": result.samples,
        }
    (folder / f"result-{me}").write_text(json.dumps(found))


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        sys.exit(3)
    raise ArithmeticError("a fault of this process")


def strike(case: Case, me: int, folder: Path, mesh: Any, checkpoints: Any, clock: Any) -> Callable[[str], None]:
    """Lay the faults of this process in its way; returns what tells that it is in a phase.

    A spare is in no phase of a step: it fails as soon as rank 0 is in that phase, which waits for it there.
    """
    from mpishard.checkpoint import saver
    from mpishard.elastic import crew, loop
    from mpishard.optim import optimizer

    here = [(number, fault) for number, fault in enumerate(case.faults) if fault.victim == me]
    afar = [(number, fault) for number, fault in enumerate(case.faults) if fault.victim >= WORKERS and me == 0]

    def note(name: str) -> Path:
        return folder / name

    def hit(phase: str) -> None:
        for number, fault in afar:
            if fault.phase == phase and clock.now() >= fault.at and not note(f"order-{number}").exists():
                note(f"order-{number}").touch()
                end = time.monotonic() + 5
                while not note(f"fault-{number}").exists() and time.monotonic() < end:
                    time.sleep(0.001)
        for number, fault in here:
            if fault.victim < WORKERS and fault.phase == phase and clock.now() >= fault.at:
                note(f"fault-{number}").touch()
                fail(fault.kind)

    def before(owner: Any, name: str, phase: str, applies: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Fail instead of a call."""
        original = getattr(owner, name)

        def instead(*arguments: Any, **options: Any) -> Any:
            if applies(*arguments, **options):
                hit(phase)
            return original(*arguments, **options)

        setattr(owner, name, instead)

    def within(owner: Any, name: str, phase: str, applies: Callable[..., bool] = lambda *_, **__: True) -> None:
        """Fail once a call has returned, so that what it started is under way."""
        original = getattr(owner, name)

        def instead(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            if applies(*arguments, **options):
                hit(phase)
            return result

        setattr(owner, name, instead)

    # The parameters of ZeRO-3 are gathered in the forward pass, those of ZeRO-1 and 2 and gradients of DDP after it.
    within(mesh.data, "start_all_to_all", "reduction")
    within(mesh.data, "start_all_gather", "all-gather")
    within(optimizer, "take_step", "update")
    within(mesh.data, "start_send", "buddy", lambda *_, **options: options.get("label") == "buddy")
    before(loop.ElasticLoop, "_agree", "agreement")
    before(loop.ElasticLoop, "_commit", "committed")
    if any(fault.kind == "kill" for _, fault in here):
        before(saver, "write_pieces", "save")
    else:
        before(checkpoints, "save", "save")
    healing = []
    before(loop, "reshard_state", "resize", lambda *_, **__: not healing)
    before(loop, "reshard_state", "heal", lambda *_, **__: bool(healing))
    mark = loop.ElasticLoop._bury

    def bury(self: Any, error: Any) -> Any:
        healing.append(error)
        return mark(self, error)

    loop.ElasticLoop._bury = bury  # type: ignore[method-assign]
    ordered = [(number, fault) for number, fault in here if fault.victim >= WORKERS]
    if ordered:
        nap = time.sleep

        def sleep(seconds: float) -> None:
            for number, fault in ordered:
                if note(f"order-{number}").exists():
                    note(f"fault-{number}").touch()
                    fail(fault.kind)
            nap(seconds)

        crew.time = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)  # type: ignore[assignment]
    return hit


# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        fields = json.loads(sys.argv[2])
        fields["faults"] = tuple(Fault(**each) for each in fields["faults"])
        worker(Case(**fields), Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many cases of the grid only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", choices=STRATEGIES)
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--victim", choices=VICTIMS)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--several", action="store_true", help="the cases with more than one failure instead")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT, help="seconds for one case")
    options = parser.parse_args()
    launch = launcher()
    if launch is None:
        sys.exit("faults heal in place under Open MPI only, which is not the MPI of this Python")
    chosen = [options.victim, options.phase, options.kind, options.strategy]
    if options.several:
        cases = [case for strategy in STRATEGIES for case in several(strategy) if chosen[3] in (None, strategy)]
    else:
        cases = [case for case in grid() if all(part in (None, *case.name.split()) for part in chosen)]
    if options.sample is not None:
        cases = random.Random(options.seed).sample(cases, min(options.sample, len(cases)))
    reference, failed = expected(), 0
    for case in cases:
        ended = run(case, launch, reference, options.limit)
        failed += bool(ended.problem)
        verdict = ended.problem or ("ends and says why" if case.lost else "bit-equal")
        if ended.how == "done":
            verdict += ", but the launcher does not end"
        print(f"{case.name:36s} {ended.seconds:6.1f} s  {verdict}", flush=True)
        if ended.problem:
            print(ended.output, flush=True)
    print(f"{len(cases) - failed} of {len(cases)} as they must be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
