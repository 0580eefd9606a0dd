"""A host is lost, and the run goes on: three hosts, one of which fails in the middle of a run.

    python tests/helpers/hosts.py [--case processes|stage|host|link] [--repeats N] [--keep FOLDER]

``mpishard run --elastic`` on the first host trains a small GPT on all three, by the MPI of this Python.  Then all ranks
of the last host are killed, or that host with its daemons, or its link is cut.  The run must go on on the others, end
with code 0 and the parameters of a run of one rank, to the last bit, and leave no process anywhere.  Prints a
table: how the run went on, and the seconds from the fault to the first step beyond the last one before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import namespaces

CASES = {
    "processes": "all ranks of a host are killed, its daemon lives",
    "stage": "the same, and that host alone had a stage of the model",
    "host": "a host is killed with its daemon",
    "link": "a host's link is cut",
}
RANKS_A_HOST = 2
FAULT_AFTER = 17
TIME_LIMIT = 240.0
# After the supervisor has ended nothing of the run may live longer; on a host that was cut off, once it is back.
LEAVE_S = 2.0
LINES = 30  # of what a run wrote, if it failed
# Where Open MPI has the files of its shared memory, and its launcher and daemons theirs.
SEGMENTS, SESSIONS = "OMPI_MCA_btl_sm_backing_directory", "PRTE_MCA_prte_tmpdir_base"


@dataclass(frozen=True)
class Step:
    """One step of the run: when it was committed, in which start, its number, and by how many workers."""

    time: float
    start: int
    number: int
    workers: int


@dataclass(frozen=True)
class Ended:
    """What came of a case: `problem` is empty if it is as it must be."""

    how: str
    seconds: float
    lost: int
    problem: str
    output: str


def script(folder: Path, case: str = "") -> list[str]:
    words = [sys.executable, str(Path(__file__).resolve().with_name("host_run.py")), str(folder)]
    return [*words, "layouts"] if case == "stage" else words


def environment() -> dict[str, str]:
    here = Path(__file__).resolve()
    paths = [str(here.parents[2]), str(here.parent), os.environ.get("PYTHONPATH", "")]
    # Hosts have their own /dev/shm and TMPDIR.
    given = {name: value for name, value in os.environ.items() if name not in (SEGMENTS, SESSIONS)}
    return {**given, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OPENBLAS_NUM_THREADS": "1"}


def expected() -> list[str]:
    """Of a run of one rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = [sys.executable, "-m", "mpishard", "run", "-n", "1", *script(folder)]
        done = subprocess.run(
            alone, capture_output=True, text=True, timeout=TIME_LIMIT, check=False, env=environment(), cwd=folder
        )
        if done.returncode:
            sys.exit(f"the run of one rank failed:\n{done.stdout}{done.stderr}")
        return list(json.loads((folder / "result").read_text()))


def steps(folder: Path) -> list[Step]:
    path = folder / "steps"
    return [Step(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def run(case: str, reference: list[str], folder: Path) -> Ended:
    """One run on three hosts of its own, in an empty folder."""
    with namespaces.hosts(3) as hosts, open(folder / "output", "w") as log:
        listed = ",".join(f"{host.name}:{RANKS_A_HOST}" for host in hosts)
        supervised = [sys.executable, "-m", "mpishard", "run", "--elastic", "--hosts", listed, *script(folder, case)]
        process = subprocess.Popen(
            hosts[0].command(supervised, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(),
        )
        end = time.monotonic() + TIME_LIMIT
        while process.poll() is None and len(steps(folder)) < FAULT_AFTER and time.monotonic() < end:
            time.sleep(0.01)
        victim = hosts[-1]
        before, fault = steps(folder), time.monotonic()
        struck = process.poll() is None and bool(before)
        if case in ("processes", "stage"):
            struck = len(victim.kill_processes("host_run.py")) >= RANKS_A_HOST
        elif case == "host":
            victim.kill()
        else:
            victim.cut()
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        code = process.poll()
        orphans = _wait_for_none(hosts[:-1]) if case == "link" else _wait_for_none(hosts)
        if case == "link":
            victim.repair()
            orphans += _wait_for_none(hosts[-1:])
    output = (folder / "output").read_text(errors="replace")
    beyond = [each for each in steps(folder) if each.number > before[-1].number and each.time > fault] if before else []
    result = folder / "result"
    problem = ""
    if not struck:
        problem = "it did not come to the fault"
    elif code != 0:
        problem = "it does not end" if code is None else f"exit code {code}"
    elif orphans:
        problem = f"processes are left: {orphans}"
    elif not beyond or not result.exists():
        problem = "it did not go on"
    elif json.loads(result.read_text()) != reference:
        problem = "other bits than on one rank"
    if not beyond:
        return Ended("-", 0.0, 0, problem, output)
    last = [each for each in steps(folder) if each.time <= beyond[0].time and each.time > fault]
    replayed = sum(each.number <= before[-1].number for each in last)
    how = "healed in place" if beyond[0].start == 0 else f"restarted, {beyond[0].workers} ranks"
    return Ended(how, beyond[0].time - fault, replayed, problem, output)


def _wait_for_none(hosts: tuple[namespaces.Host, ...]) -> list[str]:
    """Command lines of the processes that do not leave these hosts in time."""
    end = time.monotonic() + LEAVE_S
    while True:
        left = [f"{host.name}: {line}" for host in hosts for line in host.processes().values()]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="put what the runs write here")
    options = parser.parse_args()
    if reason := namespaces.missing():
        sys.exit(reason)
    reference, failures = expected(), 0
    print(f"{'case':<60}{'went on':<24}{'next step':>10}{'replayed':>10}", flush=True)
    for case in [options.case] if options.case else CASES:
        for number in range(options.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) if options.keep is None else options.keep / f"{case}-{number}"
                folder.mkdir(parents=True, exist_ok=True)
                ended = run(case, reference, folder)
            seen = f"{CASES[case]:<60}{ended.how:<24}{ended.seconds:>8.2f} s{ended.lost:>10}"
            print(f"{seen}  {ended.problem}".rstrip(), flush=True)
            if ended.problem:
                failures += 1
                print("\n".join(ended.output.splitlines()[-LINES:]), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
