"""Digests of what the package computes, so that its state before a change and the one after can be compared.

    python tests/helpers/bits.py [--layouts 60] [--save FOLDER] > before       and with the other state after, and diff
    python tests/helpers/bits.py --load FOLDER

A refactoring must change no bit of losses and final parameters of three examples, a sample of the layouts of
`grid.py` and an elastic run with resizes, nor of the data sets of a checkpoint.  Each is a line, the same in
every run of one state of the package, which PYTHONPATH chooses, under one MPI and with one kind of processor and set of
BLAS kernels, which the first lines name.  What --save keeps, a checkpoint and a record folder of every kind, another
state of the package reads with --load, and all that it prints must be among what was printed when they were saved.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import bits_run
import h5py
from launching import ULFM, environment, execute, is_open_mpi, mpirun

TIME_LIMIT = 600.0  # seconds for one launch, on a busy machine
RANKS = 8


class Failed(Exception):
    """A run that was to be digested did not come to its end."""


def run(jobs: Sequence[str], ranks: int, work: Path, kept: Path, count: int = 0) -> tuple[list[str], bits_run.Digests]:
    """What the processes of one launch found: what they ran on, and digests."""
    launcher, version = mpirun()
    heals = is_open_mpi(version) and "elastic" in jobs
    results = work / f"results-{jobs[0]}.json"
    options = {"jobs": jobs, "layouts": count, "heals": heals}
    options |= {"work": str(work), "kept": str(kept), "results": str(results)}
    script = [sys.executable, bits_run.__file__, json.dumps(options)]
    command, began = [launcher, *(ULFM if heals else ()), "-n", str(ranks), *script], time.monotonic()
    output, how = execute(command, TIME_LIMIT, results.exists)
    print(f"{', '.join(jobs)}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if not results.exists():
        raise Failed(f"{', '.join(jobs)}: no results ({how})\n{output}")
    found = json.loads(results.read_text())
    return found["surroundings"], found["digests"]


def of_checkpoint(kept: Path) -> bits_run.Digests:
    """Of each data set in each file of the checkpoint of tensor, pipeline and data ranks."""
    found = {}
    for path in sorted((kept / "hybrid" / "checkpoints" / "latest").glob("*.h5")):
        with h5py.File(path) as file:
            found |= {f"checkpoint/{path.stem}/{name.strip('/')}": value for name, value in bits_run.of_datasets(file)}
    return found


def of_commands(kept: Path, work: Path) -> bits_run.Digests:
    """How commands take to kept folders; of what they print, which may be put better, what does not depend on time.

    They get copies, since they may write there.
    """
    found = {}
    for name in ("hybrid", "elastic"):
        folder = work / "commands" / name
        shutil.copytree(kept / name, folder, symlinks=True)
        for words in (
            ("inspect", str(folder / "checkpoints")),
            ("verify", str(folder / "checkpoints")),
            ("plot", str(folder), "--json"),
            ("top", str(folder), "--once"),
            ("why", str(folder), "--wait", "0"),
        ):
            command = [sys.executable, "-m", "mpishard", *words]
            done = subprocess.run(
                command, env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT, check=False
            )
            value = f"exit-{done.returncode}" if done.returncode else "ok"
            if value == "ok" and words[0] == "plot":
                metrics = json.loads(done.stdout)["metrics"]
                value = bits_run.digest(*(metrics[key] for key in ("step", "loss", "learning_rate", "samples")))
            found[f"command/{name}/{words[0]}"] = value
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=60, help="how many of the grid (default 60)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep checkpoints and record folders there")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="only load what was kept there")
    options = parser.parse_args()
    if options.save is not None and options.save.exists() and any(options.save.iterdir()):
        parser.error(f"{options.save} is not empty; give --save a new folder")
    if options.load is not None and not options.load.is_dir():
        parser.error(f"--load: there is no folder {options.load}")
    if options.layouts < 1:
        parser.error("--layouts must be at least 1")
    found: bits_run.Digests = {}
    with tempfile.TemporaryDirectory(prefix="mpishard-bits-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        kept = (options.load or options.save or work / "kept").absolute()
        kept.mkdir(parents=True, exist_ok=True)
        try:
            if options.load is None:
                found |= run(["examples"], 4, work, kept)[1]
                found |= run(["elastic"], bits_run.FOUNDERS, work, kept)[1]
            jobs = ["load"] if options.load else ["layouts", "keep", "load"]
            surroundings, digests = run(jobs, RANKS, work, kept, options.layouts)
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
        found |= digests | of_checkpoint(kept) | of_commands(kept, work)
    print(*(f"# {line}" for line in surroundings), *(f"{name} {found[name]}" for name in sorted(found)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
