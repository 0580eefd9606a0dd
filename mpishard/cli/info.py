"""``mpishard info``: capabilities and problems of this MPI and this machine; or what is noted of a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from mpi4py import MPI

from mpishard.arguments import printable
from mpishard.backend.gemm.choice import VARIABLE
from mpishard.backend.gemm.libraries import NUMPY
from mpishard.cli.output import seconds, size
from mpishard.comm.abort import abort
from mpishard.environment import Facts, Finding, collect, findings, launch_of, launches
from mpishard.environment.findings import cores_of, count, limit_of, nodes
from mpishard.record.audits import described, promise
from mpishard.record.follower import Follower
from mpishard.record.reading import check_record

_SHOWN_NODES = 6
_SHOWN_FINDINGS = 8
# What mpishard uses libraries for GPUs for; those that are not here serve one of these.
_USED_FOR = {
    "cuBLAS": "products",
    "cuDNN frontend": "attention",
    "nvmath": "epilogues",
}


def show(facts: Sequence[Facts], found: Sequence[Finding]) -> None:
    """Print facts, those of rank 0 where they are of one process, and then the findings.

    Without colours: Open MPI gives its ranks a terminal even where their output ends in a file.
    """
    _print_columns(rows(facts))
    typer.echo()
    _print_columns([(finding.level, str(finding)) for finding in found])
    wrong, warnings = (sum(finding.level == level for finding in found) for level in ("wrong", "warning"))
    verdict = f"{count(wrong, 'thing')} {'is' if wrong == 1 else 'are'} wrong" if wrong else "Nothing is wrong"
    typer.echo(verdict + (f", with {count(warnings, 'warning')}." if warnings else "."))


def rows(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """Names and values in the order in which they are shown."""
    first, mpi, setup = facts[0], facts[0].mpi, facts[0].mpi_setup
    h5py = f"h5py {first.versions['h5py']}, built {'with' if first.h5py.h5py_mpi else 'without'} MPI (not needed)"
    versions = [f"{name} {version}" for name, version in first.versions.items() if name not in ("h5py", "HDF5")]
    found = [
        ("versions", ", ".join(versions)),
        ("MPI", f"{mpi.library} {mpi.version}, standard {'.'.join(map(str, mpi.standard))}, {setup.thread_level}"),
        *([("", setup.mpi_path)] if setup.mpi_path else []),
        ("", _build(setup.mpi_text)),
        ("", "any count in one call" if mpi.large_counts else "counts of 2**31 and more in several calls"),
        ("started by", _launch(first)),
        ("mpirun", f"{setup.mpirun.path} ({setup.mpirun.family})" if setup.mpirun else "none"),
    ]
    if setup.mpirun_on_path is not None:
        found.append(("", f"{setup.mpirun_on_path.path} ({setup.mpirun_on_path.family}) on the PATH"))
    found += [
        ("deaths", _deaths(first)),
        *zip(["GPUs", "", "", ""], _gpus(nodes(facts)[0]), strict=False),
        ("HDF5", f"{first.versions['HDF5']}, {h5py}"),
        ("BLAS", _blas(first)),
        ("products", _products(first)),
        ("kernels", _kernels(first)),
        ("memory", _memory(first)),
    ]
    every = nodes(facts)
    for index, node in enumerate(every[:_SHOWN_NODES]):
        found.append(("" if index else "nodes", _node(node)))
    if left := every[_SHOWN_NODES:]:
        found.append(("", f"and {len(left)} more with {count(sum(map(len, left)), 'rank')}"))
    return found


def _build(text: str) -> str:
    """Text that identifies the build of an MPI: one line of many under MPICH, the first line under others."""
    device = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("MPICH Device")]
    return f"device {device[0]}" if device else text.partition("\n")[0]


def _launch(first: Facts) -> str:
    launch = launch_of(first.process.launches, first.process.ranks)
    if launch is None:
        return "no launcher: one rank"
    return f"{launch.launcher}, {count(launch.ranks, 'rank')}; MPI_COMM_WORLD has {first.process.ranks}"


def _deaths(first: Facts) -> str:
    if first.mpi_setup.heals:
        return "healed in place (ULFM is on)"
    return "end the job; ULFM is available, but off" if first.mpi_setup.could_heal else "end the job"


def _gpus(node: Sequence[Facts]) -> list[str]:
    """Of the first node: its GPUs and who shares them, CuPy, how arrays travel, and libraries."""
    first, devices = node[0], node[0].devices
    if not first.memory.gpus:
        return ["none"]
    known = Counter((gpu.name, gpu.memory) for gpu in devices.gpu_list)
    gpus = ", ".join(f"{number} x {name} with {size(memory)}" for (name, memory), number in known.items())
    lines = [gpus or str(first.memory.gpus)]
    if devices.driver_cuda:
        lines[0] += f"; driver for CUDA {devices.driver_cuda}"
    if used := len({each.devices.own.uuid for each in node if each.devices.own is not None}):
        share = "one for each rank" if used == len(node) else f"{count(len(node), 'rank')} on {used}"
        lines[0] += f"; {share}"
    cupy = first.versions.get("CuPy")
    of_cuda = f" for CUDA {devices.cupy_cuda}" if devices.cupy_cuda else ""
    way = "MPI takes device pointers" if first.mpi.device_buffers else "arrays travel through pinned host memory"
    lines.append(f"CuPy {cupy}{of_cuda}; {way}" if cupy else "no CuPy")
    found = [
        f"{name} {version}" + (f" ({_USED_FOR[name]})" if name in _USED_FOR else "")
        for name, version in devices.device_libraries.items()
    ]
    if cupy:
        lines.append("; ".join(found) or "no libraries as packages; those of a CUDA toolkit are not looked for")
    return lines


def _blas(first: Facts) -> str:
    processor = first.processor
    if not processor.blas:
        return "unknown to threadpoolctl"
    blas = processor.blas[0]
    kernels = f" with {blas.kernels} kernels" if blas.kernels else ""
    limit = (
        f"by {processor.blas_chosen}" if processor.blas_chosen else "a mesh limits them to a rank's share of the cores"
    )
    return f"{blas.library} {blas.version}{kernels}, {count(blas.threads, 'thread')}: {limit}"


def _products(first: Facts) -> str:
    """The libraries for matrix products, and whether an extra brings faster ones for this processor."""
    processor = first.processor
    text, fast = processor.products or NUMPY, processor.products_fast or NUMPY
    found = "by BLAS" if text == NUMPY else _by_library(text)
    if processor.products_chosen:
        return f"{found}, chosen by {VARIABLE}"
    if fast not in (NUMPY, text):
        return f"{found}; pip install 'mpishard[fast]' brings what is faster on this processor, {_by_library(fast)}"
    return f"{found}; no other library is known to be faster on this processor" if text == NUMPY else found


def _by_library(products: str) -> str:
    """By library the dtypes or kinds that it does."""
    kinds: dict[str, list[str]] = {}
    for kind, _, library in (pair.partition("=") for pair in products.split(",")):
        kinds.setdefault(library, []).append(kind)
    return "; ".join(f"{library}: {', '.join(of)}" for library, of in sorted(kinds.items()))


def _kernels(first: Facts) -> str:
    if first.processor.kernels:
        return f"compiled for this processor, in {first.processor.kernels}"
    if first.processor.kernels_own:
        return f"compiled at their first call, and kept in folders such as {first.processor.kernels_own}"
    return "compiled by each process, as no folder can be written: mpishard compile --into FOLDER"


def _memory(first: Facts) -> str:
    memory = first.memory
    locked = (
        "any amount" if memory.locked_memory is None else size(memory.locked_memory) if memory.locked_memory else "none"
    )
    text = f"a process may lock {locked}"
    if memory.shared_memory is None or memory.shared_memory_free is None:
        return f"{text}; no /dev/shm"
    return f"{text}; /dev/shm has {size(memory.shared_memory_free)} free of {size(memory.shared_memory)}"


def _node(node: Sequence[Facts]) -> str:
    first, last = node[0].process.rank, node[-1].process.rank
    ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
    if last - first >= len(node):
        ranks = f"{len(node)} of the {ranks}"
    return f"{node[0].process.host}: {ranks} on {count(cores_of(node), 'core')}{limit_of(node)}"


def _show_run(folder: Path, as_json: bool) -> None:
    """Print with what the last start of a run was made, what its audit promises, and what audits have found."""
    check_record(folder)
    run = Follower(folder)
    run.update()
    start = run.start
    if as_json:
        facts = {"start": start, "ending": run.ending, "last_step": run.last_step}
        facts |= {"audit": run.audit, "audit_findings": run.findings, "audit_damage": run.audit_damage}
        typer.echo(json.dumps(facts))
        return
    last = f"step {run.last_step}" + (f" of {run.steps}" if run.steps else "")
    command = start.get("command", [])
    words = shlex.join(map(str, command)) if isinstance(command, list) else ""
    began = f"{start.get('started', 'at a time that is not noted')} on {start.get('host', 'unknown')}: {words}"
    found = [("run", f"{last}{f'; {run.ending}' if run.ending else ''}"), ("started", began)]
    for name in ("ranks", "mesh", "versions"):
        value = start.get(name)
        if value:
            text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
            found.append((name, text))
    audit = run.audit
    if audit is None:
        found.append(("audit", "none"))
    else:
        most, step = audit["most_steps"], run.step_seconds
        time = f", in {seconds(most * step)} with {seconds(step)} a step" if most and step else ""
        found.append(("audit", f"{promise(audit)}{time}"))
    named = [described(line) for line in run.findings[-_SHOWN_FINDINGS:]]
    if left := len(run.findings) - len(named):
        named.insert(0, f"{left} earlier")
    named += filter(None, [run.audit_damage])
    found += zip(["found", *[""] * len(named)], named or ["nothing"] * (audit is not None), strict=False)
    _print_columns([(name, printable(text)) for name, text in found])


def _print_columns(lines: Sequence[tuple[str, str]]) -> None:
    """Print names and values, wrapped to the terminal; no value is cut, so that it can be copied."""
    indent = max((len(name) for name, _ in lines), default=0) + 2
    # Under mpirun the output is a pipe even if it ends in a terminal, which may be narrow.
    width = shutil.get_terminal_size((80, 24)).columns
    for name, value in lines:
        wrapped = textwrap.wrap(value, max(width - indent, 20), break_long_words=False, break_on_hyphens=False)
        for index, line in enumerate(wrapped):
            typer.echo(f"{'' if index else name:{indent}}{line}")


_PATIENCE_S = 30.0


def info(
    run: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="The record of a run, to show that.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all facts and findings as JSON.")] = False,
) -> None:
    """Show what this MPI and machine can do, or what is noted of a run.

    \b
    mpirun -n 4 mpishard info
    mpishard info FOLDER

    Under mpirun one screen stands for all ranks.  What is wrong comes with the way out and makes the exit code 1;
    warnings and notes do not.

    Of a run: its last start, what its audit spends and when it sees what, and what audits have found.
    """
    if run is not None:
        _show_run(run, as_json)
        return
    world = MPI.COMM_WORLD
    launch = launch_of(launches(os.environ), world.size)
    # If MPI is broken each rank may be alone in its world; then only the launcher knows which rank is the first.
    if world.size == 1 and launch is not None and launch.rank > 0:
        return
    meet(world)
    facts = world.gather(collect(world))
    if facts is None:
        return
    found = findings(facts)
    wrong = any(finding.level == "wrong" for finding in found)
    if as_json:
        report = {
            "wrong": wrong,
            "findings": [asdict(finding) for finding in found],
            "ranks": [each.flat() for each in facts],
        }
        typer.echo(json.dumps(report))
    else:
        show(facts, found)
    if wrong:
        raise typer.Exit(1)


def meet(world: MPI.Intracomm) -> None:
    """Wait for all ranks with a time limit: this command must work if ranks cannot communicate."""

    def give_up() -> None:
        abort(
            f"mpishard: error: {world.size} ranks were started, but do not all answer within {_PATIENCE_S:.0f} s; is "
            "one of them stopped, or do they take a network that does not join the hosts? Choose it: for Open MPI "
            "--mca btl_tcp_if_include NAME, for MPICH -iface NAME"
        )

    timer = threading.Timer(_PATIENCE_S, give_up)
    timer.daemon = True
    if world.rank == 0 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        timer.start()
    world.Barrier()
    timer.cancel()
