"""What the record of a run and the ledger cost of a step.

    python benchmarks/record_cost.py [--ranks N] [--steps N] [--repeats N]

The byte-level GPT of examples/train_gpt.py with its settings (width 128, 2 layers, context 64, 64 windows a step,
ZeRO-1), recorded as that example records it.  Every call of the record and of the ledger is timed where it is made, by
the processor time of its thread: where ranks share cores, the wall clock would count what others do meanwhile.  What
the same timing says of a function that does nothing is taken off.  The first steps, which compile, are left out.
Printed are medians over the repeats of the shares of the processor time of a rank, the one where they are largest.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import children
from slow_link import blas

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 64, 128, 2, 4, 64
COMPILING = 5  # steps
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


def train(steps: int, folder: str) -> None:
    """One rank; the first one prints the result as a line of JSON."""
    import mpishard
    from mpishard.data.text import standard_library_text, windows

    with mpishard.Mesh() as mesh:
        text = windows(standard_library_text(), CONTEXT)
        model = mpishard.nn.GPT(256, CONTEXT, WIDTH, LAYERS, HEADS, mesh=mesh)
        record = mpishard.RunRecord(folder, mesh)
        meters = {name: Meter() for name in ("record", "thread", "ledger")}
        meters["thread"].wrap(record, "flush")
        meters["record"].wrap(record, "step")
        for name in ("begin", "spend", "enter"):
            meters["ledger"].wrap(mesh.ledger, name)
        own = cost_of_timing()
        started: dict[str, float] = {}

        def note(state: Any) -> None:
            if state.step == COMPILING:
                started.update({name: meter.seconds - own * meter.calls for name, meter in meters.items()})
                started.update(processor=time.process_time(), wall=time.perf_counter())

        optimizer = mpishard.ZeRO1Optimizer(
            mpishard.AdamW(lr=3e-3, betas=(0.9, 0.95)), mpishard.ShardingConfiguration(mesh, max_gradient_norm=1.0)
        )
        problem = mpishard.OptimizationProblem.for_model(
            model, text.batch, samples=len(text), batch_size=BATCH, steps=steps, tokens_per_sample=CONTEXT
        )
        optimizer.optimize(problem, callback=note, record=record, progress=False)
        step = (time.perf_counter() - started["wall"]) / (steps - COMPILING)
        processor = time.process_time() - started["processor"]
        shares = {
            name: (meter.seconds - own * meter.calls - started[name]) / processor for name, meter in meters.items()
        }
        told = mesh.world.exchange(tuple(shares.values()))
        if mesh.rank == 0:
            worst = {name: max(values) for name, values in zip(shares, zip(*told, strict=True), strict=True)}
            print(json.dumps({"step_s": step, "shares": worst, "blas": blas()}), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        train(int(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="default 8")
    parser.add_argument("--steps", type=int, default=60, help="default 60")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    options = parser.parse_args()
    if options.steps <= COMPILING:
        parser.error(f"--steps must be above {COMPILING}")
    found = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            own = [sys.executable, __file__, "--child", str(options.steps), folder]
            (text,) = children.run("record", [(children.mpirun(options.ranks, own), {})], TIME_LIMIT)
        lines = [line for line in text.splitlines() if line.startswith('{"step_s"')]
        if not lines:
            sys.exit(f"the run told no result:\n{text}")
        found.append(json.loads(lines[0]))
    print(found[0]["blas"])
    step = statistics.median(run["step_s"] for run in found)
    print(f"{options.ranks} ranks, {step * 1e3:.1f} ms a step; of its processor time")
    for name, words in (("record", "record, in the step"), ("thread", "record, its thread"), ("ledger", "ledger")):
        shares = [100 * run["shares"][name] for run in found]
        print(f"  {words:22}{statistics.median(shares):8.3f} %  ({min(shares):.3f} to {max(shares):.3f})")


if __name__ == "__main__":
    main()
