"""Everything that is asked of mpishard on a GPU, by one command on a machine with one GPU.

    python benchmarks/gpu.py [OUT] [--only PART ...] [--quick] [--within SECONDS] [--rest] [--mpi PREFIX]

facts: the GPU, its driver, CUDA, CuPy, MPI, and which optional libraries are there.  tests: the device tests on CuPy,
without a launcher and with 1, 2 and 4 ranks (`-m hardware`).  training: tokens a second of a GPT of 124 M parameters
(12 layers, width 768, 12 heads, vocabulary 50257, 16 sequences of 1024, products in bfloat16, AdamW) with mpishard,
PyTorch and torch.compile, in turns.  trace: what the GPU does in one step, by class of kernel, and as a picture.
graph: which parts of that step a CUDA graph takes, how fast they are, and where the capture of others ends.  bandwidth:
bytes a second of AdamW, both passes of layer norm and of causal softmax, and cross-entropy, beside a copy.  all_reduce:
of 2 ranks, 1 kB to 256 MB, through pinned host memory and by device pointers, beside the copies and the MPI that
staging is made of.  pointers: whether every call of an axis, training, `minimize` and modules of PyTorch give the same
by device pointers as staged, and the copies to the host that they make.  inverse: a `Partition`, a posterior and a plan
of 2 ranks, beside the host.  sanitizer: two steps under the tools of compute-sanitizer.  memory: of a rank under DDP
and ZeRO-1, 2 and 3 with 2 and 4 ranks on the one GPU.  checkpoint: how long an asynchronous save keeps a run, beside
the copy to the host.  minimize: an iteration of L-BFGS-B of ten million unknowns in bounds.  parity: how far losses and
gradients of small GPTs and a Llama in float32, float16 and bfloat16 are from those of PyTorch in float64, beside how
far PyTorch's own are.  Figures are medians; ratios are medians of ratios of the same turn.

Every part runs in processes of its own with a time limit: one that crashes or hangs ends no other.  OUT (default:
``gpu-results``) gets results.json and tables.md after each part and during long ones, texts of the tests, and
trace.png.  Where a command may take ten minutes only, ``--within 570`` ends before, and the same command with
``--rest`` goes on: with the parts that failed or did not come to their end, and of the tests with the files that did
not come to theirs.

It needs CuPy, mpi4py and an MPI, and numpy, numba, h5py, ml_dtypes, threadpoolctl and xxhash; the parts beside PyTorch
need torch, the picture matplotlib, tests need pytest, pytest-mpi and hypothesis, and some of them tqdm, typer and rich.
It runs from a checkout; mpishard need not be installed.  Where nothing can be installed, unpack a folder of wheels with
``pip install --no-index --no-deps --ignore-installed --prefix PREFIX wheels/*.whl``, add
``PREFIX/lib/pythonX.Y/site-packages`` to PYTHONPATH, and name the prefix with --mpi if the MPI is among them.

Results of parts that ran before stay in OUT, if they were of the same module and sizes.  Ctrl-C ends all processes; the
parts that were done are written.  The exit code is 0 if all went well, 1 if something failed, 2 for wrong options.

``--module numpy --small`` runs all parts at tiny sizes without a GPU, to try the script: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_graph
import gpu_machine
import gpu_mpi
import gpu_parity
import gpu_parts
import gpu_sanitizer
import gpu_tables
import gpu_tests
import gpu_trace
import gpu_training
from gpu_launcher import LIMIT, NO_MPIRUN, Failed, Launcher, OutOfTime
from gpu_machine import Setting

NEEDED = ("numpy", "mpi4py", "numba", "h5py", "ml_dtypes", "threadpoolctl", "xxhash")
Found = dict[str, Any]
SoFar = Callable[[Found], None]  # what a part calls with its results while it goes on
ROUNDS = 3  # of the kinds of training, in turns
CHILDREN: dict[str, Callable[..., dict[str, Any] | None]] = {
    "facts": lambda setting, kind: gpu_machine.facts(setting),
    "training": gpu_training.child,
    "peak": lambda setting, kind: gpu_training.child_peak(setting),
    "trace": gpu_trace.child,
    "memory": gpu_parts.child_memory,
    "bandwidth": lambda setting, kind: gpu_parts.child_bandwidth(setting),
    "all_reduce": lambda setting, kind: gpu_mpi.child_all_reduce(setting),
    "pointers": gpu_mpi.child_pointers,
    "graph": gpu_graph.child,
    "inverse": gpu_parts.child_inverse,
    "sanitizer": gpu_sanitizer.child,
    "checkpoint": lambda setting, kind: gpu_parts.child_checkpoint(setting),
    "minimize": lambda setting, kind: gpu_parts.child_minimize(setting),
    "parity": gpu_parity.child,
}


def is_there(package: str) -> bool:
    """Whether a package can be imported; the stand-in is one of the tests' own."""
    return package == "standin" or importlib.util.find_spec(package) is not None


HAS_TORCH = is_there("torch")
Part = Callable[[Launcher, Setting, SoFar], Found]


# -- the parts ---------------------------------------------------------------------------------------------------------


def part_facts(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return {**launcher.child("facts", setting), "mpirun": launcher.mpirun}


def part_tests(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    mark = "hardware" if setting.module == "cupy" else "not hardware"
    limit, why = min(LIMIT["tests"], launcher.limit), "" if launcher.mpirun else NO_MPIRUN
    known = earlier(setting).get("tests", {}).get("files", []) if setting.rest else []
    return gpu_tests.run_tests(setting, launcher.run, limit, mark, why, earlier=known, so_far=so_far)


def of_kind(launcher: Launcher, name: str, setting: Setting, kind: str, ranks: int = 0) -> tuple[Found, dict[str, str]]:
    """By kind the result of a child, or how it failed; OutOfTime goes through."""
    try:
        return {kind: launcher.child(name, setting, kind, ranks)}, {}
    except OutOfTime:
        raise
    except Failed as error:
        return {}, {kind: str(error)}


def part_training(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    kinds = list(gpu_training.KINDS) if HAS_TORCH else ["mpishard"]
    turns: list[Found] = []
    failures: dict[str, str] = {}
    peak: Found = {}
    for turn in range(1 if setting.small or setting.quick else ROUNDS):
        turns.append({})
        for kind in list(kinds):
            found, failed = of_kind(launcher, "training", setting, kind)
            turns[-1] |= found
            failures |= failed
            kinds = [kind for kind in kinds if kind not in failed]
            if found:
                so_far(_of_turns(setting, turns, peak, failures))
        if not turn:
            peak, failed = of_kind(launcher, "peak", setting, "peak")
            failures |= failed
    if not any(turns):
        raise Failed("\n".join(failures.values()))
    return _of_turns(setting, turns, peak, failures)


def _of_turns(setting: Setting, turns: list[Found], peak: Found, failures: dict[str, str]) -> Found:
    """What the turns so far say."""
    rates: dict[str, list[float]] = {}
    for turn in turns:
        for kind, each in turn.items():
            rates.setdefault(kind, []).append(each["tokens"] / statistics.median(each["seconds"]))
    ratios = {
        kind: statistics.median(
            turn["mpishard"]["tokens"]
            / statistics.median(turn["mpishard"]["seconds"])
            / (turn[kind]["tokens"] / statistics.median(turn[kind]["seconds"]))
            for turn in turns
            if "mpishard" in turn and kind in turn
        )
        for kind in rates
        if any("mpishard" in turn and kind in turn for turn in turns)
    }
    return {
        "turns": turns,
        "tokens_per_second": {kind: statistics.median(each) for kind, each in rates.items()},
        "mpishard_to": {kind: ratio for kind, ratio in ratios.items() if kind != "mpishard"},
        "flops_of_token": gpu_training.flops_of_token(setting.gpt),
        "parameters": gpu_training.parameters_of(setting.gpt),
        "measured_peak": peak.get("peak"),
        "has_torch": HAS_TORCH,
        "failures": failures,
    }


def part_trace(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    result: Found = {"kinds": {}, "picture": None, "failures": {}}
    for kind in ("mpishard", "torch") if HAS_TORCH else ("mpishard",):
        found, failed = of_kind(launcher, "trace", setting, kind)
        result["kinds"] |= found
        result["failures"] |= failed
        picture = gpu_trace.draw(Path(setting.output))
        result["picture"] = picture.name if picture else None
        so_far(result)
    return result


def part_bandwidth(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return launcher.child("bandwidth", setting)


def part_all_reduce(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return launcher.child("all_reduce", setting, ranks=2)


def part_pointers(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return gpu_mpi.part_pointers(launcher, setting, so_far, of_kind)


def part_kinds(
    launcher: Launcher, setting: Setting, so_far: SoFar, *, name: str, kinds: Sequence[str], ranks: int = 0
) -> Found:
    """A part that is a child for each kind."""
    result: Found = {"kinds": {}, "failures": {}}
    for kind in kinds:
        found, failed = of_kind(launcher, name, setting, kind, ranks)
        result["kinds"] |= found
        result["failures"] |= failed
        so_far(result)
    return result


def part_memory(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    found: Found = {}
    failures: dict[str, str] = {}
    result = {"ranks": found, "parameters": gpu_training.parameters_of(setting.gpt), "failures": failures}
    for ranks in (2,) if setting.small else (2, 4):
        found[str(ranks)] = {}
        for kind in gpu_parts.STRATEGIES:
            each, failed = of_kind(launcher, "memory", setting, kind, ranks)
            found[str(ranks)] |= each
            failures |= {f"{kind}, {ranks} ranks": text for text in failed.values()}
            so_far(result)
    return result


def part_checkpoint(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return launcher.child("checkpoint", setting)


def part_minimize(launcher: Launcher, setting: Setting, so_far: SoFar) -> Found:
    return launcher.child("minimize", setting)


def part_parity(launcher: Launcher, setting: Setting, so_far: SoFar, has_torch: bool = HAS_TORCH) -> Found:
    result: Found = {"cases": {}, "losses": {}, "failures": {}, "has_torch": has_torch}
    if not has_torch:
        return result
    # Each in a process of its own: an error of CUDA ends the process, and libraries of PyTorch and CuPy may differ.
    with tempfile.TemporaryDirectory() as folder:
        there = replace(setting, output=folder)
        for model in gpu_parity.MODELS:
            kind = f"{model}/{gpu_parity.TORCH}"
            found, failed = of_kind(launcher, "parity", there, kind)
            result["failures"] |= failed
            if failed:
                continue
            theirs = found[kind]
            result["losses"][model] = theirs["loss of a token"]
            result["failures"] |= {f"PyTorch, {model}/{dtype}": why for dtype, why in theirs["failures"].items()}
            for dtype in gpu_parity.DTYPES:
                kind = f"{model}/{dtype}"
                found, failed = of_kind(launcher, "parity", there, kind)
                result["failures"] |= failed
                if found:
                    result["cases"][kind] = gpu_parity.joined(found[kind], theirs["dtypes"].get(dtype))
                so_far(result)
    return result


# In the order in which they are wanted, should the time not be enough for all.
PARTS: dict[str, Part] = {
    "facts": part_facts,
    "training": part_training,
    "bandwidth": part_bandwidth,
    "trace": part_trace,
    "graph": functools.partial(part_kinds, name="graph", kinds=list(gpu_graph.KINDS)),
    "pointers": part_pointers,
    "all_reduce": part_all_reduce,
    "inverse": functools.partial(part_kinds, name="inverse", kinds=gpu_parts.INVERSE, ranks=2),
    "tests": part_tests,
    "sanitizer": gpu_sanitizer.part_sanitizer,
    "memory": part_memory,
    "checkpoint": part_checkpoint,
    "minimize": part_minimize,
    "parity": part_parity,
}


def earlier(setting: Setting) -> dict[str, Any]:
    """The results that are in the output folder; ValueError if they cannot stand beside those of `setting`."""
    file = Path(setting.output) / "results.json"
    if not file.exists():
        return {}
    try:
        results: dict[str, Any] = json.loads(file.read_text())
        of = Setting(**results["setting"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); remove it, or name another folder") from None
    if (of.module, of.small) != (setting.module, setting.small):
        theirs, ours = (f"{each.module}{' --small' if each.small else ''}" for each in (of, setting))
        raise ValueError(f"{file} has results of --module {theirs}, not of {ours}; name another folder")
    return results


def write(path: Path, text: str) -> bool:
    """Write a file whole or leave it as it was; says so and returns False where it cannot be written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        print(f"cannot write {path}: {error}; the results are on this screen only", file=sys.stderr, flush=True)
        return False
    return True


def run_parts(launcher: Launcher, setting: Setting, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Run parts one after the other; results are written after each, beside those of parts that ran before.

    Those of a part that takes long are written while it goes on, too.  What is not started for lack of time keeps what
    it had, and is printed with when that was.
    """
    output = Path(setting.output)
    results = earlier(setting)
    of_before = set(results)
    written: list[bool] = []
    for name, part in parts.items():
        start = time.monotonic()

        def keep(found: Found, name: str = name, start: float = start, *, unfinished: bool = False) -> None:
            results[name] = {**found, "part_seconds": round(time.monotonic() - start, 1), "unfinished": unfinished}
            results[name]["when"] = time.strftime("%Y-%m-%d %H:%M %Z")
            of_before.discard(name)
            results["setting"] = json.loads(setting.to_json())
            texts = {"results.json": json.dumps(results, indent=1), "tables.md": gpu_tables.all_tables(results)}
            written[:] = [write(output / file, text) for file, text in texts.items()]

        print(f"-- {name}", flush=True)
        try:
            found = part(launcher, setting, functools.partial(keep, unfinished=True))
        except OutOfTime as error:
            if name not in results:
                keep({"failed": str(error)})
            why = str(error)
            if name in of_before:
                why += f"; what follows is of an earlier run, {results[name].get('when', 'which does not say when')}"
            print(f"{name}: {why}\n\n{gpu_tables.table_of(name, results)}", flush=True)
            continue
        except (Failed, RuntimeError, OSError, ValueError) as error:
            found = {"failed": str(error)}
        keep(found)
        print(gpu_tables.table_of(name, results), flush=True)
    if not all(written):
        raise OSError(f"not all results are in {output}: see above")
    return results


def is_done(found: dict[str, Any] | None) -> bool:
    """Whether a part came to its end and nothing in it failed."""
    return found is not None and not ("failed" in found or found.get("failures") or found.get("unfinished"))


def seconds(text: str) -> float:
    """A time limit of the command line."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds above 0")
    return value


def without_gpu(launcher: Launcher) -> str:
    """Why CuPy has no GPU here, or cannot compile for it; empty if it can."""
    program = "import cupy; assert cupy.ones(2).sum() == 2; print('GPUs:', cupy.cuda.runtime.getDeviceCount())"
    _, text = launcher.run(["-c", program], 0, LIMIT["facts"])
    last = (text.strip().splitlines() or ["nothing"])[-1]
    return "" if re.fullmatch("GPUs: [1-9][0-9]*", last) else last


def main(arguments: Sequence[str] | None = None, every: Mapping[str, Part] = PARTS) -> int:
    """The command, of the arguments of this process; tests give others, and other parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument("--only", nargs="+", choices=list(every), default=list(every), help="these parts")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and a few files of tests")
    parser.add_argument("--within", type=seconds, metavar="SECONDS", help="end before; what is left is for --rest")
    parser.add_argument("--rest", action="store_true", help="those that did not end well in OUT, or are not there")
    parser.add_argument("--limit", type=seconds, default=900, help="the most seconds for one process (default 900)")
    parser.add_argument("--mpi", type=Path, metavar="PREFIX", help="a folder with bin/mpirun and lib")
    parser.add_argument(
        "--module", choices=["cupy", "numpy", "standin"], default="cupy", help="to try it without a GPU"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try it")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--kind", default="", help=argparse.SUPPRESS)
    parser.add_argument("--setting", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        found = CHILDREN[options.child](Setting(**json.loads(options.setting)), options.kind)
        if found is not None:
            print(json.dumps(found), flush=True)
        return 0
    if options.mpi is not None and not (options.mpi / "bin").is_dir():
        parser.error(f"--mpi {options.mpi} has no folder bin")
    if missing := [name for name in (*NEEDED, options.module) if not is_there(name)]:
        way_out = "install them, or add a folder that has them to PYTHONPATH"
        if "cupy" in missing:
            way_out += "; cupy comes as cupy-cuda13x or cupy-cuda12x"
        sys.exit(f"not installed: {', '.join(missing)}; {way_out}")
    setting = Setting(options.module, options.small, options.quick, str(options.output.resolve()), options.rest)
    launcher = Launcher(options.mpi, options.limit, options.within or float("inf"))
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.output).close()
        known = earlier(setting)
    except (OSError, ValueError) as error:
        parser.error(f"cannot keep results in {options.output}: {error}")
    parts = {name: every[name] for name in options.only if not (options.rest and is_done(known.get(name)))}
    try:
        # The facts say more about a GPU that CuPy does not find.
        if options.module == "cupy" and parts.keys() - {"facts"} and (why := without_gpu(launcher)):
            sys.exit(f"CuPy finds no GPU ({why}); --only facts says what is there, --module numpy --small needs none")
        results = run_parts(launcher, setting, parts)
    except KeyboardInterrupt:
        launcher.end()
        print(f"\nstopped; {options.output} has the parts that were done", file=sys.stderr)
        return 130
    except (OSError, OutOfTime) as error:
        sys.exit(str(error))
    print(f"results.json and tables.md are in {options.output}")
    return int(not all(is_done(results.get(name)) for name in options.only))


if __name__ == "__main__":
    sys.exit(main())
