"""``mpishard bench``: measure the speeds of this machine, for ``mpishard estimate``; with a figure of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpishard.cli.output import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    check_format,
    console,
    new_table,
    print_table,
    save,
    seconds,
    size,
)
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.estimate import MachineProfile, measure
from mpishard.estimate.benchmark import Timing, measure_collectives


def bench(
    output: Annotated[Path | None, typer.Option(help="Write the profile, JSON, to this file.")] = None,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Collectives by size and axis, against mpi4py alone; no profile.")
    ] = False,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor ranks of the mesh, for --collectives.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline ranks of the mesh, for --collectives.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw --collectives into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="--collectives as data.")] = False,
) -> None:
    """Measure how fast the ranks compute and communicate.

    \b
    mpirun -n 4 mpishard bench --output FILE

    All ranks measure at once: products, memory, and communication between them.
    Use as many ranks a node as the training will; with several nodes the links between them are measured too.
    """
    of_collectives = {"--tensor": tensor > 1, "--pipeline": pipeline > 1, "--plot": plot, "--json": as_json}
    unused = {"--output": output} if collectives else of_collectives
    if given := [name for name, value in unused.items() if value]:
        what = "a profile; leave out it or --collectives" if collectives else "--collectives; add that, or leave it out"
        raise ValueError(f"{given[0]} is for {what}")
    began = time.perf_counter()
    with Mesh(tensor=tensor, pipeline=pipeline) as mesh:
        _check_writable(mesh, plot if collectives else output, picture=collectives)
        if collectives:
            _bench_collectives(mesh, plot, as_json)
            return
        profile = measure(mesh)
        if mesh.rank == 0:
            show(profile)
            typer.echo(f"measured in {time.perf_counter() - began:.0f} s")
            if output is not None:
                profile.save(output)
                typer.echo(f"written to {output}; use it with mpishard estimate --profile {output}")


def _check_writable(mesh: Mesh, path: Path | None, picture: bool) -> None:
    """Raise on all ranks, before the measurement, if its result cannot be written; only rank 0 prints the error."""
    try:
        with raised_on_all(mesh.world):
            if mesh.rank == 0 and path is not None:
                if picture:
                    check_format(path)
                there = path.exists()
                try:
                    path.open("a").close()
                except OSError as error:
                    raise ValueError(f"cannot write {path}: {error.strerror}") from None
                if not there:
                    path.unlink()
    except ValueError:
        mesh.free()
        if mesh.rank == 0:
            raise
        raise typer.Exit(2) from None


def _bench_collectives(mesh: Mesh, plot: Path | None, as_json: bool) -> None:
    timings = measure_collectives(mesh)
    if mesh.rank > 0:
        return
    if not timings:
        raise ValueError("one rank has nobody to communicate with: mpirun -n 4 mpishard bench --collectives")
    if plot is not None:
        draw(timings, plot)
    if as_json:
        typer.echo(json.dumps([asdict(timing) for timing in timings]))
        return
    made = new_table("axis", "operation", "bytes", "time", "mpi4py", "ratio", "sent", left=2)
    for timing in timings:
        made.add_row(
            f"{timing.axis} ({timing.ranks})",
            timing.operation,
            size(timing.nbytes),
            seconds(timing.seconds),
            seconds(timing.bare),
            f"{timing.seconds / timing.bare:.2f}",
            f"{timing.bandwidth / 1e9:.3f} GB/s",
        )
    print_table(console(), made)


def show(profile: MachineProfile) -> None:
    """Print a profile as tables."""
    output = console()
    output.print(f"speeds of a rank ({profile.name})", style="bold")
    compute = new_table("what", "speed")
    for width, flops in profile.products:
        compute.add_row(f"products of width {width}", f"{flops / 1e9:.1f} GFLOP/s")
    compute.add_row("memory", f"{profile.memory_bandwidth / 1e9:.2f} GB/s")
    compute.add_row("GELU and derivative", f"{profile.exponentials / 1e9:.2f} G/s")
    compute.add_row("a transformer reaches", f"{profile.efficiency:.0%}")
    output.print(compute)
    for where, links in (("within a node", profile.node), ("between nodes", profile.network)):
        if links:
            output.print(f"communication {where}", style="bold")
            made = new_table("operation", "latency", "bandwidth")
            for operation, link in links.items():
                made.add_row(operation, seconds(link.latency), f"{link.bandwidth / 1e9:.2f} GB/s")
            output.print(made)


_STYLES = [(BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"), (ORANGE, "v")]


def draw(timings: Sequence[Timing], path: Path) -> None:
    """Draw one panel per axis: time over size, solid lines for mpishard, dotted ones for mpi4py alone."""
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(timing.axis for timing in timings))
    figure = Figure(figsize=(4.4 * len(axes), 4), layout="constrained")
    for panel, axis in zip(figure.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        own = [timing for timing in timings if timing.axis == axis]
        operations = dict.fromkeys(timing.operation for timing in own)
        for operation, (colour, marker) in zip(operations, _STYLES, strict=False):
            rows = [timing for timing in own if timing.operation == operation]
            sizes = [timing.nbytes for timing in rows]
            own_ms, bare_ms = ([1e3 * getattr(timing, which) for timing in rows] for which in ("seconds", "bare"))
            panel.plot(sizes, own_ms, color=colour, marker=marker, ms=4, label=operation)
            panel.plot(sizes, bare_ms, color=colour, ls=":", lw=1.2)
        panel.set(title=f"{axis} axis, {own[0].ranks} ranks", xlabel="buffer (bytes)", ylabel="time (ms)")
        panel.set(xscale="log", yscale="log")
        panel.grid(alpha=0.3)
        (alone,) = panel.plot([], [], "0.3", ls=":", lw=1.2, label="mpi4py alone")
    drawn = [*panel.get_lines()[:-1:2], alone]  # all panels have the same lines
    figure.legend(handles=drawn, fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)
