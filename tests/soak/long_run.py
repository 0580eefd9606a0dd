"""One long run that is re-laid-out and shot many times: its bits are those of one rank that nobody disturbs.

    python tests/soak/long_run.py [--moves N] [--shots N] [--seed S] [--strategy ZeRO1|ZeRO2|ZeRO3|DDP]

``mpishard run --elastic`` starts eight processes that train a small GPT for 300 steps, by the MPI of this Python.
Meanwhile this process asks for other meshes, of one to eight ranks, by ``mpishard resize``, and kills processes, at
random moments: whichever process of the run, whatever it is doing.  A third of the shots wait for a change of the mesh,
so that they come in the middle of it.  Open MPI heals in place and spawns processes for the dead; the job starts again
from its newest checkpoint where all who had some state are dead, and after each shot under another MPI.

Run it where `mpishard/elastic/` changes.
Prints a line for each move and shot, and in the end the SHA-256 of parameters, slots and losses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from mpishard.elastic.mesh_choice import MeshSizes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import fault_run
from fault_run import LONG_MESHES, LONG_STEPS, Case
from launching import alive, environment, scratch

RANKS = 8
# Steps of the run in which something happens; the last of it may take many.
FIRST, LAST = 4, 230
TIME_LIMIT = 2400.0
# The longest time from a shot to a step beyond those before it, and from a request for a mesh to a step with it.
STEP_LIMIT_S, MOVE_LIMIT_S = 120.0, 240.0
# A shot comes at a random moment of so many seconds after a step, or in a change of the mesh.
AFTER_STEP_S, IN_MOVE_S = 0.5, 0.12
# After every second event the next one waits for up to so many seconds.
REST_S = 6.0
WAIT_S = 8  # of the command
LINES = 60  # of what the run wrote, if it failed


class Step(NamedTuple):
    """When a step was committed, in which start, its number, and on which mesh."""

    time: float
    start: int
    number: int
    mesh: str


@dataclass(frozen=True)
class Event:
    """What happens once the run has come to a step: another mesh is asked for, a process is shot, or both."""

    step: int
    moves: bool = False
    shoots: bool = False


class LongRunFailed(Exception):
    """The run did not go on as it must."""


def plan(moves: int, shots: int, draw: random.Random) -> list[Event]:
    """The events in order; a third of the shots come in moves."""
    both = min(moves, shots // 3)
    kinds = [(True, number < both) for number in range(moves)] + [(False, True)] * (shots - both)
    draw.shuffle(kinds)
    steps = [FIRST + (LAST - FIRST) * number // len(kinds) + draw.randrange(3) for number in range(len(kinds))]
    return [Event(step, *kind) for step, kind in zip(steps, kinds, strict=True)]


class LongRun:
    """A run in a folder of its own, seen and disturbed from outside."""

    def __init__(self, folder: Path, case: Case, log: IO[str]) -> None:
        words = [fault_run.__file__, json.dumps(asdict(case)), str(folder), str(2 * TIME_LIMIT)]
        supervised = ["-m", "mpishard", "run", "--elastic", "-n", str(case.processes), sys.executable, *words]
        self.folder = folder
        self.end = time.monotonic() + TIME_LIMIT
        self.process = subprocess.Popen(
            [sys.executable, *supervised],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
            cwd=folder,
        )

    # -- what is seen -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[Step]:
        path = self.folder / "steps"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # of a process that was shot while it wrote
                found.append(Step(*json.loads(line)))
        return found

    @property
    def furthest(self) -> int:
        return max((step.number for step in self.steps), default=0)

    @property
    def moving(self) -> set[int]:
        """Living processes that are in a change of the mesh."""
        found = {int(path.name.removeprefix("moving-")) for path in self.folder.glob("moving-*")}
        return found & set(alive(str(self.folder)))

    def until(self, what: str, limit: float) -> Iterator[None]:
        """Turns of a loop that is left when something has come about."""
        end = min(time.monotonic() + limit, self.end)
        while True:
            if self.process.poll() is not None:
                raise LongRunFailed(f"the run has ended with code {self.process.returncode} before {what}")
            if time.monotonic() > end:
                raise LongRunFailed(f"no {what} in {limit:g} s")
            yield
            time.sleep(0.01)

    # -- what is done -----------------------------------------------------------------------------------------------

    def slow(self, is_slow: bool) -> None:
        path = self.folder / "slow"
        path.touch() if is_slow else path.unlink(missing_ok=True)

    def reach(self, number: int) -> None:
        self.slow(False)
        for _ in self.until(f"step {number}", STEP_LIMIT_S):
            if self.furthest >= number:
                break
        self.slow(True)

    def shoot(self, draw: random.Random) -> tuple[str, list[Step], float]:
        """Kill a process; returns which one that was and in what, the steps before that, and when it was."""
        for _ in self.until("process to shoot", STEP_LIMIT_S):  # there is none while the job starts again
            if processes := alive(str(self.folder)):
                break
        victim, moving, steps = draw.choice(processes), self.moving, self.steps
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        shot, seen = time.monotonic(), self.steps
        step, rank = -1, 0
        with contextlib.suppress(OSError):
            step, rank = json.loads((self.folder / f"at-{victim}").read_text())
        where = f"in a move, {len(moving)} in it" if moving else f"after step {steps[-1].number}"
        who = f"rank {rank}" if step >= steps[-1].number - 1 else "a process that waits or comes"
        return f"{who} of {steps[-1].mesh}, {where}", seen, shot

    def go_on(self, before: list[Step], shot: float) -> str:
        """Wait for a step beyond those before a shot; returns how the run went on."""
        last = max(step.number for step in before)
        for _ in self.until(f"step beyond {last} after a shot", STEP_LIMIT_S):
            beyond = next((step for step in self.steps[len(before) :] if step.number > last and step.time > shot), None)
            if beyond is not None:
                break
        assert beyond is not None
        how = "started again" if beyond.start > before[-1].start else "goes on"
        return f"{how}: step {beyond.number} of {beyond.mesh} {beyond.time - shot:.2f} s after it"

    def ask(self, mesh: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "mpishard", "resize", "checkpoints", "--mesh", mesh, "--wait", str(WAIT_S)]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=self.folder
        )

    def await_move(self, mesh: str, command: subprocess.Popen[str], before: int) -> str:
        """Wait for a step with a mesh, and ask again as a user would; returns when it came, and the last answer."""
        asked, began = 1, time.monotonic()
        for _ in self.until(f"step with {mesh}", MOVE_LIMIT_S):
            found = next((step for step in self.steps[before:] if step.mesh == mesh), None)
            if found is not None:
                break
            if command.poll() is not None:
                output, _ = command.communicate()
                print(f"      {output.strip()}", flush=True)
                command, asked = self.ask(mesh), asked + 1
        assert found is not None
        command.communicate()
        times = "" if asked == 1 else f", asked {asked} times"
        return f"step {found.number} of {mesh} {time.monotonic() - began:.1f} s after it was asked for{times}"

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for number in alive(str(self.folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def _named(sizes: dict[str, int]) -> str:
    return str(MeshSizes.of(sizes))


def disturb(run: LongRun, events: list[Event], draw: random.Random) -> Counter[str]:
    """Have all events happen; returns how many of each kind came about."""
    counts: Counter[str] = Counter()
    for event in events:
        run.reach(event.step)
        before = run.steps
        others = [mesh for mesh in map(_named, LONG_MESHES) if mesh != before[-1].mesh]
        mesh = draw.choice(others) if event.moves else ""
        if mesh:
            command = run.ask(mesh)
        if mesh and event.shoots:
            for _ in run.until("move", MOVE_LIMIT_S):
                if run.moving or command.poll() is not None:
                    break
        if event.shoots:
            run.slow(False)
            time.sleep(draw.uniform(0, IN_MOVE_S if mesh else AFTER_STEP_S))
            text, seen, shot = run.shoot(draw)
            run.slow(True)
            after = run.go_on(seen, shot)
            counts["shots"] += 1
            counts["in a move"] += "in a move" in text
            print(f"step {event.step:3d}: shot {counts['shots']:2d}: {text}; {after}", flush=True)
        if mesh:
            text = run.await_move(mesh, command, len(before))
            counts["moves"] += 1
            print(f"step {event.step:3d}: move {counts['moves']:2d}: {before[-1].mesh} -> {text}", flush=True)
        rests = time.monotonic() + draw.choice([0, draw.uniform(0, REST_S)])
        while time.monotonic() < rests and run.furthest < event.step + (LAST - FIRST) // len(events):
            time.sleep(0.05)
    counts["starts"] = 1 + max((step.start for step in run.steps), default=0)
    return counts


def train(case: Case, events: list[Event], draw: random.Random) -> dict[str, Any]:
    """What the processes have found, which must be alike in all of them."""
    with scratch() as name:
        folder = Path(name)
        with open(folder / "output", "w") as log:
            run = LongRun(folder, case, log)
            try:
                counts = disturb(run, events, draw)
                run.slow(False)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(max(0, run.end - time.monotonic()))
                if run.process.returncode != 0:
                    raise LongRunFailed(f"at its end the run returns {run.process.returncode}")
                found = [json.loads(file.read_text()) for file in folder.glob("result-*")]
                if not found or any(each != found[0] for each in found):
                    raise LongRunFailed(f"other results in other processes: {found}")
                if left := alive(name):
                    raise LongRunFailed(f"processes are left: {left}")
            except LongRunFailed:
                print("\n".join((folder / "output").read_text(errors="replace").splitlines()[-LINES:]), flush=True)
                raise
            finally:
                run.close()
    if events:
        print(", ".join(f"{count} {kind}" for kind, count in counts.items()), flush=True)
    return found[0]


def main(strategy: str, moves: int, shots: int, seed: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with an end of the run, too
    draw, began = random.Random(seed), time.monotonic()
    alone = Case("long", "DDP", (), 1, 1, 1, 1, long=True)
    disturbed = Case("long", strategy, (), 1, 1, RANKS, RANKS, respawn=True, long=True)
    try:
        reference = train(alone, [], draw)
        found = train(disturbed, plan(moves, shots, draw), draw)
    except LongRunFailed as error:
        print(f"FAIL: {error}")
        return 1
    for name in ("parameters", "slots", "losses"):
        print(f"{name:10s} {found[name]}  {'as' if found[name] == reference[name] else 'NOT as'} on one rank")
    seconds = time.monotonic() - began
    if found != reference:
        print(f"FAIL in {seconds:.0f} s: {found} instead of {reference}")
        return 1
    print(f"PASS: {LONG_STEPS} steps in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["ZeRO1", "ZeRO2", "ZeRO3", "DDP"], default="ZeRO1")
    for name, default in (("moves", 20), ("shots", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    sys.exit(main(**vars(parser.parse_args())))
