"""``mpishard info``: capabilities and problems of this MPI and this machine."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from typing import Annotated

import typer
from mpi4py import MPI

from mpishard.cli.info_text import show
from mpishard.comm.abort import abort
from mpishard.environment import collect, findings, launch_of, launches

_PATIENCE_S = 30.0


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print all facts and findings as JSON.")] = False,
) -> None:
    """Show what this MPI and this machine can do, and what is wrong.

    \b
    mpirun -n 4 mpishard info

    Under mpirun one screen stands for all ranks.  What is wrong comes with the way out and makes the exit code 1;
    warnings and notes do not.
    """
    world = MPI.COMM_WORLD
    launch = launch_of(launches(os.environ), world.size)
    # If MPI is broken each rank may be alone in its world; then only the launcher knows which rank is the first.
    if world.size == 1 and launch is not None and launch.rank > 0:
        return
    _meet(world)
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


def _meet(world: MPI.Intracomm) -> None:
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
