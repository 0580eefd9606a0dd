"""What an audit finds, how soon, and what it costs.

    mpiexec -n 3 python benchmarks/audit.py detect [--runs N] [--models MODEL ...] [--audits SHARE ...] [--output FILE]
    mpiexec -n 3 python benchmarks/audit.py clean [the same]
    python benchmarks/audit.py table FILE ...
    mpiexec -n 2 python benchmarks/audit.py cost [--runs N]

detect: runs of a small GPT, of a module of PyTorch and of an elastic `minimize` in which one rank is wrong; which one,
from which step on, and which bit are drawn for each run.  A bit of the gradient of one micro-batch flips, or of all
from there on, or of those with an element above a size, or one of a parameter in memory, or one in each of its sums
over ranks.  Nothing of mpishard knows of it: functions are wrapped from outside.  clean: runs without a fault.  Both
write a line of JSON for each run, and table adds up those of several calls: in how many runs the rank was seen, after
how many steps, beside the formula for a rank that is always wrong, and how many ended with the bits of a run without
fault and audit.  cost: steps of the GPT of heal.py with an audit, in ratio to those without, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import heal
import numpy as np
from mpi4py import MPI

import mpishard
from mpishard.backend.random import key
from mpishard.parameters.reducer import GradientReducer
from mpishard.reduction import ordered
from mpishard.training.audit import REPLICAS, AuditedRunner, expected_steps
from mpishard.training.step_runner import StepRunner

PARTS = 8  # micro-batches a step
KINDS = ("once", "always", "above a size", "parameters", "sum")
STEPS = {0.05: 24, 0.2: 16, 1.0: 8, REPLICAS: 16}  # of a run, by its audit: a rank that is always wrong is seen
COSTS = (None, 0.01, 0.05, REPLICAS)
ROWS = np.random.default_rng(0).standard_normal((64, 24)) * np.logspace(0, -2, 24)
TOKENS = np.random.default_rng(1).integers(0, 11, (64, 9))


# Faults from outside.


@dataclass(frozen=True)
class Fault:
    """What a rank does wrongly from step `first` on: `bit` of the largest element of an array flips.

    "once": in its micro-batch number `place` from there on.  `size`: of an element, for "above a size".
    """

    kind: str
    rank: int
    first: int
    place: int
    bit: int
    size: float


class Injection(contextlib.ExitStack):
    """Wraps functions that a run calls, within its ``with`` block; without a fault it only looks.

    `step`: the one under way.  `since`: the first one in which this rank was wrong, 0 before.  `sizes`: of the largest
    element of the gradient of each micro-batch.
    """

    def __init__(self, mesh: Any, fault: Fault | None = None) -> None:
        super().__init__()
        self.step = self.since = 0
        self.sizes: list[float] = []
        self._fault = fault if fault is not None and fault.rank == mesh.rank else None
        self._own = 0  # its micro-batches since the fault has begun
        self._checks = False  # the micro-batch is one of another rank
        self._wrap(StepRunner, "losses_and_gradient", self._begin)
        self._wrap(AuditedRunner, "_compute_alone", self._check)
        self._wrap(GradientReducer, "mark_ready", self._ready)
        self._wrap(ordered, "add_by_tree", self._sum)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)
        self.enter_context(mock.patch.object(owner, name, lambda *arguments: around(inner, *arguments)))

    def see(self, gradient: np.ndarray) -> None:
        """Take the gradient of a micro-batch, and make it wrong if that is due."""
        largest = float(np.abs(gradient).max())
        self.sizes.append(largest)
        fault = self._fault
        if fault is None or self.step < fault.first:
            return
        self._own += not self._checks
        now = {
            "always": True,
            "once": not self._checks and self._own == fault.place + 1,
            "above a size": largest > fault.size,
        }
        if now.get(fault.kind):
            self._flip(gradient)

    def _begin(self, inner: Any, runner: StepRunner, batch: np.ndarray) -> Any:
        self.step = runner.optimizer.clock + 1
        if self._is("parameters") and not self.since:
            self._flip(runner.parameters.held)
        return inner(runner, batch)

    def _check(self, inner: Any, runner: AuditedRunner, part: int) -> Any:
        self._checks = True
        try:
            return inner(runner, part)
        finally:
            self._checks = False

    def _ready(self, inner: Any, reducer: GradientReducer, name: str) -> None:
        if name == reducer._pieces[-1].name:
            self.see(reducer.memory.view(name))
        inner(reducer, name)

    def _sum(self, inner: Any, *arguments: Any) -> None:
        inner(*arguments)
        if self._is("sum") and arguments[-1].size:
            self._flip(arguments[-1])

    def _is(self, kind: str) -> bool:
        fault = self._fault
        return fault is not None and fault.kind == kind and self.step >= fault.first

    def _flip(self, array: np.ndarray) -> None:
        assert self._fault is not None
        flat = array.reshape(-1)
        place = int(np.abs(flat).argmax())
        hit = flat[place : place + 1].view(f"u{flat.itemsize}")
        hit ^= hit.dtype.type(1 << self._fault.bit)
        self.since = self.since or self.step


class Alarm(logging.Handler):
    """Notes the step in which an audit has found something, and whether it has named that rank."""

    def __init__(self, injection: Injection, rank: int) -> None:
        super().__init__()
        self.injection, self.name_of_rank = injection, f"rank {rank} on "
        self.seen, self.named = 0, False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "the audit found" in text and not self.seen:
            self.seen, self.named = self.injection.step, self.name_of_rank in text


# What is run.


def train_gpt(mesh: Any, audit: Any, order: int, steps: int, injection: Injection) -> bytes:
    model = mpishard.nn.GPT(vocabulary_size=11, context_length=8, width=16, layers=1, heads=2, dtype=np.float64, seed=3)
    problem = mpishard.OptimizationProblem.for_model(
        model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=64,
        batch_size=2 * PARTS,
        micro_batch_size=2,
        tokens_per_sample=8,
        steps=steps,
        seed=order,
    )
    result = mpishard.ElasticOptimizer(mpishard.AdamW(lr=1e-2), mesh, audit=audit).optimize(problem, progress=False)
    check_end(result.stop_reason)
    return result.parameters.flat.tobytes()


def train_torch(mesh: Any, audit: Any, order: int, steps: int, injection: Injection) -> bytes:
    import torch

    torch.manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Tanh(), torch.nn.Linear(16, 24))
    rows = torch.tensor(ROWS, dtype=torch.float32)

    def losses(module: Any, samples: np.ndarray) -> Any:
        return (module(rows[samples]) - rows[samples].roll(1, 1)).square().mean(1)

    options: Any = {"micro_batch_size": 2, "steps": steps, "seed": order}
    problem = mpishard.torch.problem(module, losses, 64, 2 * PARTS, **options)
    result = mpishard.ElasticOptimizer(mpishard.AdamW(lr=1e-2), mesh, audit=audit).optimize(problem, progress=False)
    check_end(result.stop_reason)
    return b"".join(p.detach().numpy().tobytes() for p in module.parameters())


def run_minimize(mesh: Any, audit: Any, order: int, steps: int, injection: Injection) -> bytes:
    targets = ROWS[:PARTS] @ np.random.default_rng(order).standard_normal(24)

    def shots(x: np.ndarray, samples: np.ndarray) -> tuple[float, np.ndarray]:
        residual = ROWS[samples] @ x - targets[samples]
        bend = np.tanh(residual)
        gradient = ROWS[samples].T @ (residual + 1 - bend * bend)
        injection.see(gradient)
        return 0.5 * residual @ residual + bend.sum(), gradient

    options = {"maxfun": steps, "gtol": 0, "ftol": 0}
    elastic = {} if audit is None else {"audit": audit}
    result = mpishard.minimize(shots, np.full(24, 0.1), mesh=mesh, samples=PARTS, elastic=elastic, options=options)
    check_end(result.message)
    return result.x.tobytes()


def check_end(reason: str) -> None:
    """Raise RuntimeError if a signal has stopped the run: its bits are those of fewer steps, and no wrong ones."""
    if "signal" in reason or "Ctrl-C" in reason:
        raise RuntimeError("a signal has stopped this run, which has no line then")


MODELS = {"gpt": train_gpt, "torch": train_torch, "minimize": run_minimize}


def run(
    mesh: Any, model: str, audit: Any, order: int, steps: int, fault: Fault | None = None
) -> tuple[bytes, dict[str, Any], float]:
    """The bits of the result, what was seen in which step, and a size that a tenth of the gradients exceed."""
    log = logging.getLogger("mpishard")
    with Injection(mesh, fault) as injection:
        alarm = Alarm(injection, -1 if fault is None else fault.rank)
        log.addHandler(alarm)
        try:
            bits = MODELS[model](mesh, audit, order, steps, injection)
        finally:
            log.removeHandler(alarm)
    own = injection.since, alarm.seen, alarm.named, injection.sizes
    since, seen, named, sizes = zip(*MPI.COMM_WORLD.allgather(own), strict=True)
    facts = {"since": max(since), "seen": max(seen), "named": any(named)}
    return bits, facts, float(np.quantile(np.concatenate(sizes), 0.9))


def drawn(what: str, below: int, *of: Any) -> int:
    return key(0, what, *of) % below


def observe(mesh: Any, given: argparse.Namespace) -> None:
    """Take the runs of `detect` or `clean`, and write their lines."""
    kinds = given.kinds if given.part == "detect" else ["none"]

    @functools.cache
    def right(model: str, order: int, steps: int) -> tuple[bytes, dict[str, Any], float]:
        return run(mesh, model, None, order, steps)

    for number, model, audit, kind in itertools.product(range(given.runs), given.models, given.audits, kinds):
        of, steps = (model, kind, number, mesh.size), given.steps or STEPS.get(audit, 24)
        order, fault = drawn("order", given.orders, *of), None
        expected, _, size = right(model, order, steps)
        if given.part == "detect":
            fault = Fault(
                kind,
                rank=drawn("rank", mesh.size, *of),
                first=1 + drawn("step", max(1, steps // 4), *of),
                place=drawn("place", max(1, PARTS // mesh.size), *of),
                bit=drawn("bit", 23 if model == "torch" else 52, *of),
                size=size,
            )
        bits, facts, _ = run(mesh, model, audit, order, steps, fault)
        same = all(MPI.COMM_WORLD.allgather(bits == expected))
        line = {"model": model, "audit": audit, "kind": kind, "ranks": mesh.size, **facts, "same": same}
        if mesh.rank == 0:
            with given.output.open("a") as file:
                print(json.dumps(line), file=file)


def table(files: list[Path]) -> None:
    """Print the lines of runs, added up by audit and kind, as a table of Markdown."""
    rows = defaultdict(list)
    for file in files:
        for line in map(json.loads, file.read_text().splitlines()):
            rows[line["audit"], line["kind"]].append(line)
    print("| audit | a rank is wrong | runs | seen | steps until then: mean, most | by the formula | right bits |")
    print("|---|---|---|---|---|---|---|")
    for (audit, kind), lines in sorted(rows.items(), key=str):
        wrong = [line for line in lines if line["since"] or kind == "none"]
        seen = [line for line in wrong if line["seen"]]
        waits = [line["seen"] - line["since"] + 1 for line in seen]
        formula = [] if audit == REPLICAS else [expected_steps(audit, PARTS, line["ranks"]) for line in seen]
        said = f"{statistics.fmean(mean for mean, _ in formula):.1f}, {max(m for _, m in formula)}" if formula else ""
        steps = f"{statistics.fmean(waits):.1f}, {max(waits)}" if waits else ""
        misnamed = sum(not line["named"] for line in seen)
        found = f"{len(seen)}" + (f", {misnamed} by another name" if misnamed else "")
        same = sum(line["same"] for line in wrong)
        print(f"| {audit} | {kind} | {len(wrong)} | {found} | {steps} | {said} | {same} |")
    print()
    for audit in sorted({audit for audit, _ in rows}, key=str):
        lines = [line for (each, kind), of in rows.items() if each == audit and kind != "none" for line in of]
        by_model = {m: [line for line in lines if line["model"] == m and line["since"]] for m in MODELS}
        shown = ", ".join(f"{m} {sum(bool(line['seen']) for line in of)} of {len(of)}" for m, of in by_model.items())
        print(f"audit={audit}: seen: {shown}")


def cost(mesh: Any, given: argparse.Namespace) -> None:
    runs = given.runs
    times: dict[Any, list[float]] = {audit: [] for audit in COSTS}
    for _ in range(runs + 1):
        for audit in COSTS:
            stamps: list[float] = []
            optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=1e-3), mesh, audit=audit)
            problem = heal.problem_on(mesh, **{**heal.LARGE, "micro_batch_size": 1}, steps=21)
            callback: Callable[[Any], None] = lambda _, stamps=stamps: stamps.append(time.perf_counter())  # noqa: E731
            optimizer.optimize(problem, callback=callback, progress=False)
            times[audit].append((stamps[-1] - stamps[0]) / 20)
    for audit in COSTS[1:]:
        pairs = sorted(own / plain for own, plain in zip(times[audit][1:], times[None][1:], strict=True))
        say(mesh, f"audit={audit}: {statistics.median(pairs):.3f} ({pairs[0]:.3f} to {pairs[-1]:.3f}) of {runs} pairs")


def share(text: str) -> float | str:
    return text if text == REPLICAS else float(text)


def say(mesh: Any, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("detect", "clean", "table", "cost"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=10, help="for each model, audit and kind of fault")
    parser.add_argument("--steps", type=int, help="of each run; more for smaller shares unless it is given")
    parser.add_argument("--orders", type=int, default=4, help="in which the samples come")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--audits", nargs="+", type=share, default=list(STEPS), metavar="SHARE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=Path, default=Path("/dev/stdout"), help="lines are added to this file")
    given = parser.parse_args()
    if given.part == "table":
        table(given.files)
        return
    logging.getLogger("mpishard").addHandler(logging.NullHandler())
    with mpishard.Mesh() as mesh:
        {"detect": observe, "clean": observe, "cost": cost}[given.part](mesh, given)


if __name__ == "__main__":
    main()
