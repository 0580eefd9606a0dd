"""How long it takes to start: imports, commands, and the first step with a cold and with a warm cache of kernels.

    python benchmarks/start.py --ranks 8

Medians of --repeats processes and jobs, in seconds.  A job is `mpirun -n RANKS` of a GPT of width 64 with 2 layers; its
first step is that of the slowest rank.  Without ranks no jobs are started.  Files are those that Python itself opens.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from children import environment, mpirun

FILES = """
import runpy, sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(args[0]))
sys.argv = sys.argv[1:]
try:
    exec(sys.argv[1]) if sys.argv[0] == "-c" else runpy.run_module("mpishard", run_name="__main__")
except SystemExit:
    pass
print(len(set(map(str, opened))))
"""
COMMANDS = {
    "python": ["-c", "pass"],
    "import numpy": ["-c", "import numpy"],
    "import mpishard": ["-c", "import mpishard"],
    "mpishard --help": ["-m", "mpishard", "--help"],
    "mpishard --version": ["-m", "mpishard", "--version"],
}


def seconds(arguments: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def files(arguments: list[str]) -> int:
    given = arguments if arguments[0] == "-c" else arguments[1:]
    command = [sys.executable, "-c", FILES, *given]
    finished = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return int(finished.stdout.splitlines()[-1])


def first_step(ranks: int, cache: str) -> float:
    command = mpirun(ranks, [sys.executable, os.path.abspath(__file__), "--job"])
    cached = environment() | {"NUMBA_CACHE_DIR": cache}
    finished = subprocess.run(command, env=cached, capture_output=True, text=True, check=True)
    found = re.search(r"first step (\S+)", finished.stdout)  # Open MPI gives rank 0 a terminal, and colours
    assert found, finished.stdout
    return float(found[1])


def job() -> None:
    import numpy as np
    from mpi4py import MPI

    import mpishard
    from mpishard import nn

    with mpishard.Mesh() as mesh:
        model = nn.GPT(vocabulary_size=256, context_length=64, width=64, layers=2, heads=4)
        optimizer = mpishard.ZeRO2Optimizer(mpishard.AdamW(), mpishard.ShardingConfiguration(mesh, max_gradient_norm=1))
        texts = np.random.default_rng(0).integers(0, 256, (64, 65))
        problem = mpishard.OptimizationProblem.for_model(
            model, lambda s: (texts[s, :-1], texts[s, 1:]), samples=64, batch_size=16, tokens_per_sample=64, steps=1
        )
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        optimizer.optimize(problem, progress=False)
        slowest = MPI.COMM_WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
        if mesh.rank == 0:
            print(f"first step {slowest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job()
        return
    times: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        for name, arguments in COMMANDS.items():
            times.setdefault(name, []).append(seconds(arguments))
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm") if options.ranks else ():
                times.setdefault(f"first step, {state}", []).append(first_step(options.ranks, cache))
    for name, each in times.items():
        opened = f"{files(COMMANDS[name]):5} files" if name in COMMANDS else ""
        print(f"{name:20} {statistics.median(each):6.2f} s  {min(each):6.2f} to {max(each):5.2f}  {opened}")


if __name__ == "__main__":
    main()
