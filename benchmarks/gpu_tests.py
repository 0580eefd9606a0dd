"""Part of gpu.py: the tests of device arrays on CuPy, a process for each file.

An error of a kernel spoils the CUDA context of its process: in a process of its own, it spoils no other file's tests.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpu_launcher import OutOfTime
from gpu_machine import Setting

ROOT = Path(__file__).resolve().parent.parent
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed|xpassed)")
MARK = re.compile(r"chosen_device|pytest\.mark\.hardware|\bCUPY\b|use_over_mpi|def \w+\([^)]*\bdevice\b")
QUICK = ("test_array.py", "test_nn_device.py", "test_device.py")
RANKS = (1, 2, 4)

Runner = Callable[..., tuple[int | None, str]]


@functools.cache
def files(folder: str, quick: bool) -> tuple[str, ...]:
    """Test files that may have tests on a GPU, by what they mention; those of the kernels first."""
    every = sorted((ROOT / "tests" / folder).glob("test_*.py"), key=lambda path: ("device" not in path.name, path.name))
    found = [path for path in every if MARK.search(path.read_text("utf-8"))]
    return tuple(str(path.relative_to(ROOT)) for path in found if not quick or path.name in QUICK)


def counts(text: str) -> dict[str, int]:
    """What pytest counted in its last line."""
    lines = [line for line in text.splitlines() if COUNT.search(line)]
    return {name: int(number) for number, name in COUNT.findall(lines[-1])} if lines else {}


def run_tests(
    setting: Setting,
    run: Runner,
    limit: float,
    mark: str = "hardware",
    why_no_ranks: str = "",
    *,
    earlier: Sequence[dict[str, Any]] = (),
    so_far: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Run all of them; what each file counted, the tests that failed, and the whole texts in files of the output.

    `earlier` has files of a run before, as the result has them, which are not run again if they came to an end.
    `so_far` gets the result after each file.
    """
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed: pip install pytest pytest-mpi hypothesis")
    jobs: list[tuple[str, int, list[str]]] = []
    for file in files("unit", setting.quick or setting.small):
        jobs.append((file, 0, [file]))
    if importlib.util.find_spec("pytest_mpi") is None:
        why_no_ranks = why_no_ranks or "pytest-mpi is not installed"
    if not why_no_ranks:
        for ranks in RANKS:
            jobs += [(file, ranks, ["--with-mpi", file]) for file in files("mpi", setting.quick or setting.small)]
    folder = Path(setting.output) / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    ended = {(each["file"], each["ranks"]): each for each in earlier if each.get("ended")}
    results: dict[tuple[str, int], dict[str, Any]] = {}
    for file, ranks, _ in jobs:
        none = {"file": file, "ranks": ranks, "counts": {}, "failures": [f"{file}, {ranks} ranks: did not run"]}
        results[file, ranks] = ended.get((file, ranks), none)

    def one(job: tuple[str, int, list[str]]) -> dict[str, Any] | None:
        file, ranks, arguments = job
        command = ["-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-m", mark, *arguments]
        try:
            code, text = run(command, ranks, limit)
        except OutOfTime:
            return None
        (folder / f"{Path(file).stem}-{ranks}.txt").write_text(text)
        found = counts(text)
        failures = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        # 5: no test was selected.
        if code not in (0, 1, 5):
            failures.append(f"{file}: {'no end within the time limit' if code is None else f'ended with code {code}'}")
        return {"file": file, "ranks": ranks, "counts": found, "failures": failures, "ended": code is not None}

    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(max(1, min(8, cores // 2)))
    waiting = [pool.submit(one, job) for job in jobs if (job[0], job[1]) not in ended]
    try:
        for done in as_completed(waiting):
            found = done.result()
            if found is not None:
                results[found["file"], found["ranks"]] = found
                so_far(_summed(list(results.values()), why_no_ranks))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nobody waits for the tests that run
    return _summed(list(results.values()), why_no_ranks)


def _summed(results: list[dict[str, Any]], why_no_ranks: str) -> dict[str, Any]:
    total: dict[str, dict[str, int]] = {}
    for each in results:
        where = f"{each['ranks']} ranks" if each["ranks"] else "no launcher"
        for name, number in each["counts"].items():
            total.setdefault(where, {}).setdefault(name, 0)
            total[where][name] += number
    missing = [f"no tests on ranks: {why_no_ranks}"] if why_no_ranks else []
    if not any(each.get("passed") for each in total.values()):
        missing.append("no test ran to its end: the files in tests/ of the results say why")
    return {
        "files": results,
        "total": total,
        "failures": missing + [line for each in results for line in each["failures"]],
    }
