"""What it costs to lose workers, to gain them, and to be ready for it.

    python benchmarks/heal.py [kill] [mesh] [torch] [resize] [cost] [--repeats N]

kill: from ``kill -9`` of one of four workers to the next committed step, by shrinking and with a spare, and to the
first step of four workers where another one is spawned (Open MPI with ULFM).  mesh: from ``kill -9`` of one of the
eight ranks of a mesh 2 x 2 x 2, each in turn, to the next committed step, by the seven others.  torch: the same as
kill for PyTorch DDP and its elastic launcher, which starts all processes again from the newest checkpoint.  resize:
from a request for eight workers where there are four, to the first step of eight; the other four are spares or are
spawned.  cost: steps of an elastic run without a fault against those of a plain run, both with ``reproducible=True``,
on two ranks, of the GPT of gpt_step.py.  All with ZeRO-1, whose state has one owner and a copy at its buddy; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children

PARTS = ("kill", "mesh", "torch", "resize", "cost")
TIME_LIMIT = 300
KILL_AFTER = 5  # steps
TORCH_KILL_AFTER, TORCH_SAVE_EVERY = 7, 5
MOST_STEPS = 5000  # of a run that ends when its workers are as many as it waits for
MESHES = [{"data": 2, "tensor": 2, "pipeline": 2}, {"data": 7}]
SMALL = {
    "sizes": dict(vocabulary_size=64, context_length=32, width=64, layers=2, heads=4),
    "sequences": 16,
    "micro_batch_size": 1,
}
LARGE = {
    "sizes": dict(vocabulary_size=256, context_length=256, width=256, layers=4, heads=8),
    "sequences": 16,
    "micro_batch_size": 8,
}


def optimizer_and_problem(mesh: Any, **options: Any) -> Any:
    import mpishard

    config = mpishard.ShardingConfiguration(mesh, reproducible=True)
    return mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), config), problem_on(mesh, **options)


def problem_on(mesh: Any, sizes: Any, sequences: int, micro_batch_size: int, steps: int, shards: int = 1) -> Any:
    import numpy as np

    import mpishard

    shape = 4 * sequences, sizes["context_length"] + 1
    tokens = np.random.default_rng(0).integers(0, sizes["vocabulary_size"], shape)
    model = mpishard.nn.GPT(**sizes, mesh=mesh, shards=shards)
    return mpishard.OptimizationProblem.for_model(
        model,
        lambda samples: (tokens[samples, :-1], tokens[samples, 1:]),
        samples=len(tokens),
        batch_size=sequences,
        micro_batch_size=micro_batch_size,
        tokens_per_sample=sizes["context_length"],
        steps=steps,
    )


def kill(folder: str, spares: int, respawn: bool) -> None:
    """One of four workers is killed; rank 0 writes when the next step was committed, or the next one of four."""
    import mpishard
    from mpishard.elastic.membership import is_joining

    with mpishard.Mesh() as mesh:
        victim = mesh.rank == 2 and not is_joining()
        steps = MOST_STEPS if respawn else KILL_AFTER + 3
        inner, problem = optimizer_and_problem(mesh, **SMALL, steps=steps)
        elastic = mpishard.ElasticOptimizer(inner, max_workers=4, respawn=respawn)

        def callback(state: Any) -> bool:
            now = time.monotonic()
            if state.step == KILL_AFTER and victim:
                Path(folder, "killed").write_text(repr(now))
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == KILL_AFTER + 1 and mesh.rank == 0:
                Path(folder, "healed").write_text(repr(now))
            whole = respawn and state.step > KILL_AFTER and elastic.current_workers == 4
            if whole and mesh.rank == 0:
                Path(folder, "restored").write_text(repr(now))
            return whole

        elastic.optimize(problem, callback=callback, progress=False)


def kill_of_mesh(folder: str, victim: int) -> None:
    """One of the eight ranks of a mesh is killed; rank 0 writes when the others have committed the next step."""
    import mpishard

    with mpishard.Mesh(tensor=2, pipeline=2) as mesh:
        shot = mesh.rank == victim
        config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=1.0)
        inner = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), config)
        elastic = mpishard.ElasticOptimizer(inner, layouts=MESHES, respawn=False)

        def callback(state: Any) -> None:
            now = time.monotonic()
            if state.step == KILL_AFTER and shot:
                Path(folder, "killed").write_text(repr(now))
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step == KILL_AFTER + 1 and mesh.rank == 0 and elastic.current_workers == 7:
                Path(folder, "healed").write_text(repr(now))

        def problem(mesh: Any) -> Any:
            return problem_on(mesh, **SMALL, steps=KILL_AFTER + 3, shards=2)

        elastic.optimize(problem, callback=callback, progress=False)


def grow() -> float:
    """Seconds from a request for eight workers, where there are four processes, to the end of their first step."""
    import mpishard

    with mpishard.Mesh() as mesh:
        inner, problem = optimizer_and_problem(mesh, **SMALL, steps=MOST_STEPS)
        elastic = mpishard.ElasticOptimizer(inner, max_workers=8)
        began = 0.0

        def callback(state: Any) -> bool:
            nonlocal began
            if state.step == KILL_AFTER:
                elastic.resize(8)
                began = time.perf_counter()
            return elastic.current_workers == 8

        elastic.optimize(problem, callback=callback, progress=False)
        return time.perf_counter() - began if mesh.rank == 0 else 0.0


def resize(repeats: int) -> list[float]:
    """Seconds from a request for eight workers to the end of their first step, of which the step is a part."""
    import mpishard

    seconds: list[float] = []
    with mpishard.Mesh() as mesh:
        inner, problem = optimizer_and_problem(mesh, **SMALL, steps=4 * repeats + 4)
        elastic = mpishard.ElasticOptimizer(inner)
        asked = [0.0]

        def callback(state: Any) -> None:
            now = time.perf_counter()
            if elastic.current_workers == 8 and asked[0]:
                seconds.append(now - asked[0])
                asked[0] = 0.0
            if state.step % 4 == 1:
                elastic.resize(4)
            if state.step % 4 == 3:
                elastic.resize(8)
                asked[0] = time.perf_counter()

        elastic.optimize(problem, callback=callback, progress=False)
    return seconds


def cost(repeats: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step, of plain and elastic runs in turns."""
    import mpishard

    found: dict[str, list[float]] = {"plain": [], "elastic": []}
    for _ in range(repeats + 1):
        for name, times in found.items():
            with mpishard.Mesh() as mesh:
                stamps: list[float] = []
                optimizer, problem = optimizer_and_problem(mesh, **LARGE, steps=steps + 1)
                runner: Any = mpishard.ElasticOptimizer(optimizer) if name == "elastic" else optimizer
                runner.optimize(problem, callback=lambda _, s=stamps: s.append(time.perf_counter()), progress=False)
                times.append((stamps[-1] - stamps[0]) / steps)
    return {name: times[1:] for name, times in found.items()}  # the first of each compiles


def launch(ranks: int, arguments: list[str]) -> str:
    """What rank 0 printed."""
    (text,) = children.run(arguments[0], [(children.mpirun(ranks, own(*arguments)), {})], TIME_LIMIT)
    return text.splitlines()[-1]


def own(*arguments: str) -> list[str]:
    return [sys.executable, __file__, "--child", *arguments]


def time_kill(spares: int, respawn: bool) -> dict[str, float]:
    """Seconds from a kill to the next step, and to the first one of as many workers as before where one is spawned."""
    command = healing(4 + spares, own("kill", "FOLDER", str(spares), str(int(respawn))))
    return watch(command, ["healed", "restored"] if respawn else ["healed"])


def time_mesh(victim: int) -> float:
    """Seconds from a kill of one of eight ranks to the next step of the others."""
    return watch(healing(8, own("mesh", "FOLDER", str(victim))), ["healed"])["healed"]


def healing(ranks: int, words: list[str]) -> list[str]:
    """The command line under which Open MPI survives deaths."""
    mpirun, *rest = children.mpirun(ranks, words)
    return [mpirun, "--with-ft", "ulfm", "--mca", "coll", "^han", *rest]


def time_torch() -> dict[str, float]:
    """Seconds from a kill to the next step that is done, again or not, and to the next one that had not been."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = [str(Path(__file__).with_name("heal_torch.py")), "FOLDER", str(TORCH_KILL_AFTER), str(TORCH_SAVE_EVERY)]
    return watch([*launcher, "--max-restarts", "3", "--monitor-interval", "0.1", *script], ["again", "new"])


def watch(command: list[str], names: list[str]) -> dict[str, float]:
    """Seconds from what the children wrote into the file "killed" of a folder to what they wrote into these.

    The exit code of a launcher that has lost a rank says nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["timeout", "-k", "5", str(TIME_LIMIT), *(folder if word == "FOLDER" else word for word in command)],
            env=children.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            killed, *then = (float(Path(folder, name).read_text()) for name in ("killed", *names))
        except FileNotFoundError:
            sys.exit(f"the run did not heal:\n{done.stdout}\n{done.stderr}")
    return {name: moment - killed for name, moment in zip(names, then, strict=True)}


def child(name: str, *arguments: str) -> None:
    if name == "kill":
        kill(arguments[0], int(arguments[1]), arguments[2] == "1")
        return
    if name == "mesh":
        kill_of_mesh(arguments[0], int(arguments[1]))
        return
    from mpi4py import MPI

    from mpishard.elastic.membership import is_joining

    parts: dict[str, Callable[..., Any]] = {"resize": resize, "grow": grow, "cost": cost}
    founder = not is_joining()
    found = parts[name](*map(int, arguments))
    if MPI.COMM_WORLD.rank == 0 and founder:
        print(json.dumps(found), flush=True)


def report(what: str, times: list[float], unit: float = 1.0, name: str = "s") -> None:
    low, high = min(times) * unit, max(times) * unit
    print(f"{what:44s}{statistics.median(times) * unit:8.3f} {name} ({low:.3f} to {high:.3f}, {len(times)} times)")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)} (default all)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps of a run whose cost is measured")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {min(unknown)!r}; choose from {', '.join(PARTS)}")
    parts = options.parts or PARTS
    version = subprocess.run([children.mpirun(1, [])[0], "--version"], capture_output=True, text=True, check=True)
    if "kill" in parts and "Open MPI" in version.stdout:
        for spares, what in ((0, "kill to next step, by shrinking to 3"), (1, "kill to next step, with a spare")):
            report(what, [time_kill(spares, respawn=False)["healed"] for _ in range(options.repeats)])
        times = [time_kill(0, respawn=True) for _ in range(options.repeats)]
        report("the same, while one is spawned", [each["healed"] for each in times])
        report("kill to first step of 4 again, one spawned", [each["restored"] for each in times])
    if "mesh" in parts and "Open MPI" in version.stdout:
        seconds = [time_mesh(number % 8) for number in range(options.repeats)]
        report("kill of one of 2 x 2 x 2 to next step, by 7", seconds)
        print("each: " + ", ".join(f"{each:.3f}" for each in seconds))
    if "torch" in parts:
        times = [time_torch() for _ in range(options.repeats)]
        lost = TORCH_KILL_AFTER % TORCH_SAVE_EVERY
        report("PyTorch: kill to next step", [each["again"] for each in times])
        report(f"PyTorch: to next new one, {lost} done again", [each["new"] for each in times])
    if "resize" in parts:
        report("resize 4 to 8 by spares, with a step", json.loads(launch(8, ["resize", str(options.repeats)])))
        report("resize 4 to 8 by spawn, with a step", [json.loads(launch(4, ["grow"])) for _ in range(options.repeats)])
    if "cost" in parts:
        found = json.loads(launch(2, ["cost", str(options.repeats), str(options.steps)]))
        for name, times in found.items():
            report(f"step of a run that is {name}", times, 1e3, "ms")
        ratios = [one / two for one, two in zip(found["elastic"], found["plain"], strict=True)]
        print(f"elastic to plain: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
