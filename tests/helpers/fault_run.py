"""A process of a run in which some fail: trains a small GPT, and fails where its case wants it to.

    python tests/helpers/fault_run.py CASE FOLDER

`faults.py` and `soak/long_run.py` make the cases and start these processes, which leave notes for each other in
the folder.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The validation loss, after every second step, ends the run; it is lowest before the rates of the last two steps.
STEPS, SAVE_EVERY, BEST, VALIDATED_EVERY = 10, 4, 8, 2
# The meshes of 4, 3, 2 and 1 ranks of a run that moves.
MESHES = [{"tensor": 2, "pipeline": 2, "data": 1}, {"data": 3}, {"pipeline": 2, "data": 1}, {}]
SHRUNK_AFTER, GROWN_AFTER = 2, 4
# The meshes of the long run, how long it is, and how long its first worker sleeps after a step while there is a note
# that asks for it.
LONG_MESHES = [
    *({"data": 2, "tensor": 2, "pipeline": 2}, {"data": 4, "pipeline": 2}, {"data": 8}, {"data": 2, "tensor": 4}),
    *({"data": 7}, {"data": 3, "tensor": 2}, {"tensor": 2, "pipeline": 3, "data": 1}, {"data": 5}),
    *({"tensor": 4, "data": 1}, {"data": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2, "data": 1}),
    *({"pipeline": 3, "data": 1}, {"data": 3}, {"pipeline": 2, "data": 1}, {"tensor": 2, "data": 1}, {"data": 1}),
]
LONG_STEPS, LONG_SAVE_EVERY = 300, 10
SLOW_S = 3.0
# Seconds after which a stopped process counts as dead.
FAILURE_TIMEOUT = 0.7
# The victim is the first process that was not there at the start; those after it have numbers below.
SPAWNED = -1
# Moments of a recruitment: spawned processes start, run the script, wait, have been called in, meet the others, have.
RECRUITING = ("started", "import", "here", "called", "meeting", "joined")
PATIENCE = 20.0


@dataclass(frozen=True)
class Fault:
    """One process, by its rank at the start, fails in a phase of the step `at` or the first time after it."""

    victim: int
    phase: str
    kind: str
    at: int = 4


@dataclass(frozen=True)
class Case:
    """A run and what happens to it.

    `processes` are there at the start, and up to `workers` replicas of the model train, of tensor x pipeline processes
    each; with `spawns` the run begins with fewer, and with `respawn` others are spawned for the dead.  `lost`: that it
    must end, since nobody is left who has some state, or who could learn of a death.  `moves`: the survivors take the
    mesh for their number, and a worker is one process.  `long`: so does the long run, in which no process fails by
    itself; it notes what it does.
    """

    name: str
    strategy: str
    faults: tuple[Fault, ...] = ()
    tensor: int = 1
    pipeline: int = 1
    workers: int = 3
    processes: int = 4
    spawns: bool = False
    respawn: bool = False
    lost: bool = False
    moves: bool = False
    long: bool = False

    @classmethod
    def read(cls, text: str) -> Case:
        fields = json.loads(text)
        return cls(**{**fields, "faults": tuple(Fault(**each) for each in fields["faults"])})


class Notes:
    """Files in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, name: str, text: str = "") -> None:
        beside = self.folder / f".{name}-{os.getpid()}"
        beside.write_text(text)
        beside.rename(self.folder / name)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def append(self, name: str, *values: Any) -> None:
        with open(self.folder / name, "a") as file:
            file.write(json.dumps(values) + "\n")

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def take_numbers(self, count: int) -> int:
        """Take `count` numbers that no other process takes; returns the first."""
        first = len(list(self.folder.glob("taken-*")))
        for number in range(first, first + count):
            self.leave(f"taken-{number}")
        return first

    def wait(self, *names: str, limit: float = PATIENCE) -> None:
        end = time.monotonic() + limit
        while not all(map(self.has, names)) and time.monotonic() < end:
            time.sleep(0.001)


def run(case: Case, folder: Path) -> None:
    notes = Notes(folder)
    notes.leave(f"process-{os.getpid()}")
    sys.modules["scipy"] = None  # type: ignore[assignment]  # Numba would load it, which takes its time

    from mpi4py import MPI

    me, joining = MPI.COMM_WORLD.rank, MPI.Comm.Get_parent() != MPI.COMM_NULL
    if joining:
        me = SPAWNED - MPI.COMM_WORLD.bcast(notes.take_numbers(MPI.COMM_WORLD.size) if me == 0 else 0) - me
        notes.leave("spawned")
        for number, fault in enumerate(case.faults):
            if (fault.victim, fault.phase) == (me, "import"):
                notes.leave(f"fault-{number}")
                fail(fault.kind)

    import hashlib

    import numpy as np

    import mpishard
    from mpishard import nn
    from mpishard.checkpoint import Checkpoints
    from mpishard.elastic import requests
    from mpishard.elastic.spawning import SpawnRequest

    notes.leave(f"rank-{me}", str(os.getpid()))
    tokens = np.random.default_rng(1).integers(0, 11, (45, 9))
    strategy: Any = getattr(mpishard, f"{case.strategy}Optimizer")
    resizes = any(fault.phase == "resize" for fault in case.faults)

    with mpishard.Mesh(tensor=case.tensor, pipeline=case.pipeline) as mesh:
        models: list[Any] = []
        config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5, reproducible=True)
        group = mpishard.ParameterGroup(["*norm.weight", "*.bias"], weight_decay=0, lr_factor=0.5)

        def rate(step: int) -> float:
            return 0.01 if case.long or step <= BEST else 1.0

        inner = strategy(mpishard.AdamW(lr=rate, groups=[group], ema_decay=0.75), config)
        elastic = mpishard.ElasticOptimizer(
            inner,
            max_workers=case.workers,
            failure_timeout=FAILURE_TIMEOUT,
            respawn=case.respawn,
            layouts=LONG_MESHES if case.long else MESHES if case.moves else None,
        )
        hits: list[Callable[[str], None]] = []
        recruitments: list[SpawnRequest] = []

        def batch(samples: Any) -> Any:
            for hit in hits if case.tensor == case.pipeline == 1 else []:
                hit("forward")
            return tokens[samples, :-1], tokens[samples, 1:]

        def validated(samples: Any) -> Any:
            hits[0]("validation")
            return tokens[samples, :-1], tokens[samples, 1:]

        def resize(state: Any) -> None:
            if state.step in (SHRUNK_AFTER, GROWN_AFTER):
                notes.leave("resizes")
                elastic.resize(case.workers - (state.step == SHRUNK_AFTER))

        def recruit(*arguments: Any) -> SpawnRequest:
            recruitments.append(SpawnRequest(*arguments))
            notes.leave("recruits")
            return recruitments[-1]

        requests.SpawnRequest = recruit  # type: ignore[assignment, misc]

        def grow(state: Any) -> None:
            """Training does not wait for those who are on their way; here it does, or it would end before."""
            if case.spawns and state.step == 1:
                notes.leave("resizes")
                elastic.resize(case.workers)
            if not notes.has("recruits") or elastic.agreed_size <= elastic.current_workers:
                return
            hits[0]("started")
            notes.wait("spawned")
            hits[0]("import")
            end = time.monotonic() + PATIENCE
            while recruitments and not (recruitments[-1].here or recruitments[-1].problem) and time.monotonic() < end:
                time.sleep(0.001)
            if any(fault.phase == "here" for fault in case.faults):
                notes.wait("here")
            hits[0]("here")

        steps = LONG_STEPS if case.long else STEPS
        options = {"samples": 45, "batch_size": 16, "tokens_per_sample": 8, "steps": 2 * steps}

        def problem(mesh: Any) -> Any:
            stages, shards = mesh.pipeline.size, 4 if case.long else 2 if case.moves else 1
            blocks, heads = (3, 4) if case.long else (2, 2)
            models[:] = [
                nn.GPT(
                    vocabulary_size=11,
                    context_length=8,
                    width=16,
                    layers=blocks,
                    heads=heads,
                    dtype=np.float32,
                    mesh=mesh,
                    microbatches=stages,
                    shards=shards,
                )
            ]
            size = 3 if case.long else 4 if case.moves else 2 * case.pipeline
            return mpishard.OptimizationProblem.for_model(models[0], batch, micro_batch_size=size, **options)

        every, best = (LONG_SAVE_EVERY, None) if case.long else (SAVE_EVERY, "validation loss")
        with Checkpoints(folder / "checkpoints", mesh, every=every, best=best) as checkpoints:
            hits.append(strike(case, me, notes, mesh, checkpoints, lambda: inner.clock + 1))
            callback: Any = grow if case.spawns or case.respawn else resize if resizes else None
            if case.long:
                callback = note_moves_and_steps(notes, mesh)

            def called(state: Any) -> None:
                notes.leave(f"seen-{state.step}")
                if callback is not None:
                    callback(state)

            record = mpishard.RunRecord(folder, mesh)
            given: Any = problem if case.moves or case.long else problem(mesh)
            validation = mpishard.Evaluation.for_model(
                validated, 7, every=VALIDATED_EVERY, micro_batch_size=2, tokens_per_sample=8, averaged=True
            )
            result = elastic.optimize(
                given,
                callback=called,
                progress=False,
                checkpoints=checkpoints,
                resume=True,
                record=record,
                evaluate=validation,
                stop_early=mpishard.EarlyStopping(steps // VALIDATED_EVERY - 1, min_delta=10.0),
            )
        full, losses = mpishard.as_distributed(models[0], mesh).gather_full_parameters(), result.loss_history
        with inner.averaged_parameters():
            average = mpishard.as_distributed(models[0], mesh).gather_full_parameters()
        losses = np.concatenate([losses, result.validation_steps, result.validation_losses])
        slots = inner.state.gather().slots
        found = {
            "parameters": hashlib.sha256(full.tobytes()).hexdigest(),
            "slots": hashlib.sha256(b"".join(slots[name].tobytes() for name in sorted(slots))).hexdigest(),
            "average": hashlib.sha256(average.tobytes()).hexdigest(),
            "losses": hashlib.sha256(losses.tobytes()).hexdigest(),
            "steps": result.steps,
            "stop_reason": result.stop_reason,
            "samples": result.samples,
            "best": "" if best is None else os.readlink(folder / "checkpoints" / "best")[: len("step-00000000")],
        }
    notes.leave(f"result-{os.getpid()}", json.dumps(found))


def note_moves_and_steps(notes: Notes, mesh: Any) -> Callable[[Any], None]:
    """Note when this process changes the mesh; returns a callback that notes steps and, if asked to, waits."""
    from mpishard.elastic.mesh_choice import MeshSizes
    from mpishard.elastic.resizing import Resizing

    own, original = os.getpid(), Resizing.resize
    start = int(os.environ.get("MPISHARD_ATTEMPT", 0))

    def resize(self: Resizing, order: Any) -> None:
        notes.leave(f"moving-{own}")
        original(self, order)
        notes.drop(f"moving-{own}")

    def callback(state: Any) -> None:
        notes.leave(f"at-{own}", json.dumps([state.step, mesh.rank]))
        if mesh.rank == 0:
            notes.append("steps", time.monotonic(), start, state.step, str(MeshSizes(**mesh.shape)))
            end = time.monotonic() + SLOW_S
            while notes.has("slow") and time.monotonic() < end:
                time.sleep(0.005)

    Resizing.resize = resize  # type: ignore[method-assign]
    return callback


def fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PATIENCE)
    if kind == "exit":
        sys.exit(3)
    if kind == "code":
        os._exit(3)
    if kind == "library":
        ctypes.CDLL(None).exit(3)
    raise ArithmeticError("a fault of this process")


def strike(
    case: Case, me: int, notes: Notes, mesh: Any, checkpoints: Any, step: Callable[[], int]
) -> Callable[[str], None]:
    """Lay the faults of this process in its way; returns what tells that it is in a phase.

    A spare is in no phase of a step: the first process strikes it as soon as that is in the phase itself.
    """
    from mpishard.checkpoint import save as saving
    from mpishard.comm import json_exchange
    from mpishard.data_parallel import rule_state
    from mpishard.elastic import loop, membership, resizing, spawning, transactions

    together = ("resize", "heal")  # in which spares take part
    faults = list(enumerate(case.faults))
    spares = set(range(case.processes)) - set(workers_of(case))
    afar = [each for each in faults if me == 0 and each[1].victim in spares and each[1].phase not in together]
    here = [each for each in faults if each[1].victim == me and (me not in spares or each[1].phase in together)]

    def hit(phase: str) -> None:
        for number, fault in afar:
            if fault.phase == phase and step() >= fault.at and not notes.has(f"fault-{number}"):
                shoot(int(notes.read(f"rank-{fault.victim}")), number, fault.kind)
        for number, fault in here:
            if fault.phase == phase and step() >= fault.at and not notes.has(f"fault-{number}"):
                notes.leave(f"fault-{number}")
                others = [other for other, each in faults if (each.phase, each.at) == (phase, fault.at)]
                notes.wait(*(f"fault-{other}" for other in others))  # they fail at once
                fail(fault.kind)

    def shoot(process: int, number: int, kind: str) -> None:
        notes.leave(f"fault-{number}")
        os.kill(process, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind, signal.SIGUSR2))
        if kind not in ("kill", "stop"):
            notes.wait(f"shot-{process}")

    def is_shot(*_: Any) -> None:
        notes.leave(f"shot-{os.getpid()}")
        fail(next(fault.kind for _, fault in faults if fault.victim == me))

    signal.signal(signal.SIGUSR2, is_shot)

    def around(owner: Any, name: str, phase: str, when: Callable[..., bool], within: bool) -> None:
        original = getattr(owner, name)

        def instead(*arguments: Any, **options: Any) -> Any:
            if not within and when(**options):
                hit(phase)
            result = original(*arguments, **options)
            if within and when(**options):
                hit(phase)
            return result

        setattr(owner, name, instead)

    def before(owner: Any, name: str, phase: str, when: Callable[..., bool] = lambda **_: True) -> None:
        """Fail instead of a call."""
        around(owner, name, phase, when, within=False)

    def within(owner: Any, name: str, phase: str, when: Callable[..., bool] = lambda **_: True) -> None:
        """Fail once a call has returned, so that what it started is under way."""
        around(owner, name, phase, when, within=True)

    # In the middle of a pass whose ranks wait for each other.
    within(mesh.tensor, "all_reduce", "forward", lambda **_: case.tensor > 1)
    within(mesh.pipeline, "start_send", "forward")
    # The parameters of ZeRO-3 are gathered in the forward pass, those of ZeRO-1 and 2 and gradients of DDP after it.
    within(mesh.data, "start_all_to_all", "reduction")
    within(mesh.data, "start_all_gather", "all-gather")
    within(rule_state, "apply_rule", "update")
    within(mesh.world if case.moves else mesh.data, "start_send", "buddy", lambda label="", **_: label == "buddy")
    before(transactions.Agreements, "agree_as_workers", "agreement")
    before(transactions.Transactions, "commit", "committed")
    # An exception in the writing of files is the disk's and no fault of the process.
    raises = all(fault.kind in ("exception", "exit") for _, fault in here)
    before(saving, "write_pieces", "save", lambda **_: not raises)
    before(checkpoints, "save", "save", lambda **_: raises)
    # Those who write tell the first what they wrote, and how long that is.
    within(json_exchange, "_sizes", "reported")
    deaths = []
    before(resizing, "reshard_state", "resize", lambda **_: notes.has("resizes") and not deaths)
    if me == 0:
        within(spawning.SpawnRequest, "call", "called")
    else:
        before(membership.Membership, "call_in", "called")
    before(membership.Membership, "take_in", "meeting")
    within(membership, "meet", "joined")
    within(spawning.JoiningProcess, "join", "joined")
    tell = spawning.JoiningProcess._tell

    def telling(self: Any, tag: int, text: str = "") -> None:
        if tag == spawning.COMES:
            hit("called")
        tell(self, tag, text)
        if tag == spawning.HERE:
            notes.leave("here")
            hit("here")
        if tag == spawning.COMES:
            hit("meeting")

    spawning.JoiningProcess._tell = telling  # type: ignore[method-assign]
    before(resizing, "reshard_state", "heal", lambda **_: bool(deaths))
    heal = loop.heal

    def note_healing(run: Any) -> Any:
        deaths.append(run)
        return heal(run)

    loop.heal = note_healing
    return hit


def workers_of(case: Case) -> list[int]:
    """The processes of the start that train: tensor ranks are numbered fastest, then replicas, then stages."""
    if case.moves:
        return list(range(case.processes))
    replicas = case.processes // (case.tensor * case.pipeline)
    return [number for number in range(case.processes) if number // case.tensor % replicas < case.workers]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[3]) / 2)
    run(Case.read(sys.argv[1]), Path(sys.argv[2]))
