"""``mpishard bench``: measure what this machine can do, for ``mpishard estimate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from mpishard.cli.estimate_text import console, new_table, seconds
from mpishard.estimate import MachineProfile, measure
from mpishard.mesh import Mesh


def bench(
    output: Annotated[Path | None, typer.Option(help="Write the profile, JSON, to this file.")] = None,
) -> None:
    """Measure products, memory and communication of all ranks at once: mpirun -n 4 mpishard bench --output FILE

    Use as many ranks a node as the training will; with several nodes the links between them are measured too.
    """
    began = time.perf_counter()
    with Mesh() as mesh:
        problem: Exception | None = None
        if mesh.rank == 0 and output is not None:
            try:
                output.open("a").close()
            except OSError as error:
                problem = ValueError(f"cannot write the profile: {error}")
        try:
            mesh.world.agree(problem)
        except ValueError:
            mesh.free()
            if mesh.rank == 0:
                raise
            raise typer.Exit(2) from None  # one line of rank 0 is enough
        profile = measure(mesh)
        if mesh.rank == 0:
            show(profile)
            typer.echo(f"measured in {time.perf_counter() - began:.0f} s")
            if output is not None:
                profile.save(output)
                typer.echo(f"written to {output}; use it with mpishard estimate --profile {output}")


def show(profile: MachineProfile) -> None:
    """Print a profile as tables."""
    output = console()
    output.print(f"speeds of a rank ({profile.name})", style="bold")
    compute = new_table("what", "speed")
    for width, flops in profile.products:
        compute.add_row(f"products of width {width}", f"{flops / 1e9:.1f} GFLOP/s")
    compute.add_row("memory", f"{profile.memory_bandwidth / 1e9:.2f} GB/s")
    compute.add_row("GELU and derivative", f"{profile.exponentials / 1e9:.2f} G/s")
    output.print(compute)
    for where, links in (("within a node", profile.node), ("between nodes", profile.network)):
        if links:
            output.print(f"communication {where}", style="bold")
            made = new_table("operation", "latency", "bandwidth")
            for operation, link in links.items():
                made.add_row(operation, seconds(link.latency), f"{link.bandwidth / 1e9:.2f} GB/s")
            output.print(made)
