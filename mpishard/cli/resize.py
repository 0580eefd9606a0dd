"""``mpishard resize``: request another number of workers, or another mesh, for a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import printable
from mpishard.elastic.control import request_resize
from mpishard.elastic.mesh_choice import MeshSizes


def resize(
    run: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Of the run, its checkpoints, or ElasticOptimizer(folder=).")
    ],
    workers: Annotated[int | None, typer.Argument(min=1, help="How many shall train.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Instead: sizes such as data=2,tensor=2.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Most seconds until the run has taken it over.")] = 60.0,
) -> None:
    """Change the number of workers of a run in progress, or its mesh.

    \b
    mpishard resize run/ 4
    mpishard resize run/ --mesh data=2,tensor=2

    Only the user who started the run can.  The run takes the request over between two steps.  A mesh is for runs with
    ElasticOptimizer(..., layouts=...), whose workers are ranks.
    """
    if (workers is None) == (mesh is None):
        raise ValueError("give the number of workers, or --mesh with the sizes of a mesh")
    sizes = None if mesh is None else MeshSizes.parse(mesh)
    wanted = sizes or workers
    assert wanted is not None
    answer = request_resize(run, wanted, wait)
    text = f"{run}: {answer.before} -> {answer.after} workers after step {answer.step}"
    if answer.mesh:
        text += f", mesh {answer.mesh}"
    has_it = answer.after == workers if sizes is None else answer.mesh == str(sizes)
    if not has_it:
        text += f"; too few processes for {wanted}, and no more could be spawned: see what the run prints"
    typer.echo(printable(text))
