"""How benchmarks run what they measure: in child processes of one thread each, as users have them."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Command = tuple[Sequence[str], Mapping[str, str]]


def environment() -> dict[str, str]:
    """One thread a rank, this tree's package, no choice of BLAS kernels, and modules that are compiled once."""
    unusual = ("OPENBLAS_CORETYPE", "PYTHONDONTWRITEBYTECODE")
    variables = {name: value for name, value in os.environ.items() if name not in unusual}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        variables[name] = "1"
    # Open MPI as root, or with fewer cores than ranks; other MPI libraries do not read these.
    variables |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    root = str(Path(__file__).resolve().parent.parent)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    return variables


def mpirun(ranks: int, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` on so many ranks."""
    near = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("mpirun", path=near)
    if found is None:
        sys.exit("no mpirun beside this Python nor on PATH; install an MPI, e.g. pip install mpich")
    return [found, "-n", str(ranks), *command]


def run(what: str, commands: Sequence[Command], limit: float) -> list[str]:
    """Run commands side by side, each with some variables of its own, and return what each printed.

    Ends the benchmark with all of it if one fails, or takes longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Output goes to files: a full pipe would stop a rank that nobody reads.
        logs = [open(Path(folder, f"log{number}"), "w+") for number in range(len(commands))]
        processes = [
            subprocess.Popen(words, env=environment() | dict(own), stdout=log, stderr=subprocess.STDOUT)
            for (words, own), log in zip(commands, logs, strict=True)
        ]
        end = time.monotonic() + limit
        try:
            codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            sys.exit(f"{what}: not done within {limit:g} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
            texts = []
            for log in logs:
                log.seek(0)
                texts.append(log.read())
                log.close()
    if any(codes):
        sys.exit(f"{what} failed with {codes}:\n" + "\n".join(texts))
    return texts


def run_on_ranks(what: str, command: Sequence[str], ranks: int, limit: float, *, torch: bool = False) -> dict[str, Any]:
    """Run `command` on so many ranks, and return the `result` of one of them.

    Under mpirun; those of PyTorch get RANK and RENDEZVOUS in its place.
    """
    with tempfile.TemporaryDirectory() as folder:
        if torch:
            rendezvous = {"RENDEZVOUS": f"file://{folder}/rendezvous"}
            commands: list[Command] = [(command, rendezvous | {"RANK": str(rank)}) for rank in range(ranks)]
        else:
            commands = [(mpirun(ranks, command), {})]
        return result(what, run(what, commands, limit))


def peak_bytes() -> int:
    """The most resident memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def result(what: str, texts: Sequence[str]) -> dict[str, Any]:
    """The line of JSON that one of the commands has printed."""
    lines = [line for text in texts for line in text.splitlines() if line.startswith(('{"', "{}"))]
    if not lines:
        sys.exit(f"{what} printed no result:\n" + "\n".join(texts))
    found: dict[str, Any] = json.loads(lines[0])
    return found


def batches(count: int, sequences: int, context: int, vocabulary: int, rank: int = 0, ranks: int = 1) -> Any:
    """Tokens and targets of a rank by step: random words of a small lexicon, so that losses fall."""
    import numpy as np

    random = np.random.default_rng(0)
    words = random.integers(0, vocabulary, (64, 8))
    text = words[random.integers(0, 64, (count, sequences, context // 8 + 1))].reshape(count, sequences, -1)
    text = text[:, rank::ranks]
    return text[..., :context].copy(), text[..., 1 : context + 1].copy()


def in_turns(works: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Call all in turns after a first turn that does not count: what each returned."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            value = work()
            if repeat:
                found[name].append(value)
    return found


def processor() -> str:
    """The processor, as Linux names it, with its family and model."""
    try:
        with open("/proc/cpuinfo") as lines:
            facts = dict(line.strip().replace("\t", "").split(":", 1) for line in lines if ":" in line)
    except OSError:
        return platform.processor() or platform.machine()
    family, model = facts.get("cpu family", "").strip(), facts.get("model", "").strip()
    return f"{facts.get('model name', platform.machine()).strip()}, family {family}, model {model}"
