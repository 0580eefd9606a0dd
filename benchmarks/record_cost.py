"""What the record of a run and the ledger cost of a step.

    python benchmarks/record_cost.py [--ranks N] [--steps N] [--repeats N]

The byte-level GPT of examples/train_gpt.py with its settings (width 128, 2 layers, context 64, 64 windows a step,
ZeRO-1), recorded as that example records it.  Two ways to measure, each in runs of its own.

In turns: every ten steps record and ledger are switched off or on again, and the median times of steps with and
without are compared, on the first rank.

By parts: every call of the record and of the ledger is timed where it is made, by the processor time of its thread:
where ranks share cores, the wall clock would count what others do meanwhile.  What the same timing says of a function
that does nothing is taken off.  Shares are those of the rank where they are largest.

The first steps, which compile, are left out; printed are medians over the repeats.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import children
from slow_link import blas

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 64, 128, 2, 4, 64
COMPILING = 5  # steps
TURN = 10
TIME_LIMIT = 300


class Meter:
    """Adds up the time inside functions of one kind; nested calls count once."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._inside = False

    def wrap(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return plain(*arguments, **options)
            self._inside = True
            self.calls += 1
            began = time.thread_time()
            try:
                return plain(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began
                self._inside = False

        # The ledger looks for the first caller outside mpishard, and it must look as far as it does without this one.
        timed.__code__ = timed.__code__.replace(co_filename=inspect.getfile(type(owner)))
        setattr(owner, name, timed)


class Idle:
    """Does nothing."""

    def call(self) -> None:
        pass


def cost_of_timing() -> float:
    """Seconds that a `Meter` finds in a call that does nothing."""
    meter, idle = Meter(), Idle()
    meter.wrap(idle, "call")
    for _ in range(1000):
        idle.call()
    return meter.seconds / meter.calls


class Switch:
    """Replaces methods by others that do nothing, and puts them back."""

    def __init__(self) -> None:
        self.on = True
        self._idle: list[tuple[Any, str, Any]] = []

    def add(self, owner: Any, name: str, idle: Any) -> None:
        self._idle.append((owner, name, idle))

    def turn(self) -> None:
        self.on = not self.on
        for owner, name, idle in self._idle:
            if self.on:
                delattr(owner, name)
            else:
                setattr(owner, name, idle)


def in_turns(record: Any, ledger: Any) -> tuple[Callable[[Any], None], Callable[[], dict[str, float]]]:
    """A callback that switches both off and on, and what comes of it."""
    switch = Switch()
    call = ledger.begin("data", 0, "all_reduce", None, 0, "", ())
    switch.add(ledger, "begin", lambda *_: call)
    switch.add(ledger, "spend", lambda *_: 0.0)
    switch.add(ledger, "enter", lambda *_: None)
    switch.add(record, "step", lambda *_, **__: None)
    times: dict[bool, list[float]] = {True: [], False: []}
    ended = time.perf_counter()

    def note(state: Any) -> None:
        nonlocal ended
        began, ended = ended, time.perf_counter()
        # The first step after each turn finds other code in the caches.
        if state.step > COMPILING and state.step % TURN != 1:
            times[switch.on].append(ended - began)
        if state.step % TURN == 0:
            switch.turn()

    def ratio() -> dict[str, float]:
        if not switch.on:
            switch.turn()
        return {"turns": statistics.median(times[True]) / statistics.median(times[False]) - 1}

    return note, ratio


def by_parts(record: Any, ledger: Any) -> tuple[Callable[[Any], None], Callable[[], dict[str, float]]]:
    """A callback that waits until all is compiled, and the shares of what comes then."""
    meters = {name: Meter() for name in ("record", "thread", "ledger")}
    meters["thread"].wrap(record, "flush")
    meters["record"].wrap(record, "step")
    for name in ("begin", "spend", "enter"):
        meters["ledger"].wrap(ledger, name)
    own = cost_of_timing()
    started: dict[str, float] = {}

    def now() -> dict[str, float]:
        return {name: meter.seconds - own * meter.calls for name, meter in meters.items()}

    def note(state: Any) -> None:
        if state.step == COMPILING:
            started.update(now(), processor=time.process_time())

    def shares() -> dict[str, float]:
        processor = time.process_time() - started["processor"]
        return {name: (seconds - started[name]) / processor for name, seconds in now().items()}

    return note, shares


def train(way: str, steps: int, folder: str) -> None:
    """One rank; the first one prints the result as a line of JSON."""
    import mpishard
    from mpishard.data.text import standard_library_text, windows

    with mpishard.Mesh() as mesh:
        text = windows(standard_library_text(), CONTEXT)
        model = mpishard.nn.GPT(
            vocabulary_size=256, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS, mesh=mesh
        )
        record = mpishard.RunRecord(folder, mesh)
        note, found = (in_turns if way == "turns" else by_parts)(record, mesh.ledger)
        config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh, max_gradient_norm=1.0)
        optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=3e-3, betas=(0.9, 0.95)), config)
        problem = mpishard.OptimizationProblem.for_model(
            model, text.batch, samples=len(text), batch_size=BATCH, steps=steps, tokens_per_sample=CONTEXT
        )
        began = time.perf_counter()
        optimizer.optimize(problem, callback=note, record=record, progress=False)
        step = (time.perf_counter() - began) / steps
        own = found()
        gathered = mesh.world.allgather_object(tuple(own.values()))
        if mesh.rank == 0:
            worst = {name: max(values) for name, values in zip(own, zip(*gathered, strict=True), strict=True)}
            shares = own if way == "turns" else worst  # the steps of all ranks take the same time
            print(json.dumps({"step_s": step, "shares": shares, "blas": blas()}), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="default 8")
    parser.add_argument("--steps", type=int, default=400, help="default 400")
    parser.add_argument("--repeats", type=int, default=5, help="default 5")
    options = parser.parse_args()
    if options.steps < 4 * TURN:
        parser.error(f"--steps must be at least {4 * TURN}")
    found: dict[str, list[dict[str, Any]]] = {"turns": [], "parts": []}
    for _ in range(options.repeats):
        for way, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                own = [sys.executable, __file__, "--child", way, str(options.steps), folder]
                runs.append(children.run_on_ranks("record", own, options.ranks, TIME_LIMIT))
    print(found["turns"][0]["blas"])
    step = statistics.median(run["step_s"] for run in found["turns"])
    print(f"{options.ranks} ranks, {step * 1e3:.1f} ms a step")
    print_shares("with record and ledger, and without", found["turns"], "turns")
    print("of the processor time, by parts")
    for name, words in (("record", "record, in the step"), ("thread", "record, its thread"), ("ledger", "ledger")):
        print_shares(words, found["parts"], name)


def print_shares(words: str, runs: list[dict[str, Any]], name: str) -> None:
    shares = [100 * run["shares"][name] for run in runs]
    print(f"  {words:38}{statistics.median(shares):8.2f} %  ({min(shares):.2f} to {max(shares):.2f})")


if __name__ == "__main__":
    main()
