"""What all commands share: their list, and errors that are one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from mpi4py import MPI

from mpishard.cli.bench import bench
from mpishard.cli.checkpoint import convert, diff, export, import_, inspect, verify
from mpishard.cli.estimate import estimate
from mpishard.cli.info import info
from mpishard.cli.plot import plot
from mpishard.cli.resize import resize
from mpishard.cli.run import run
from mpishard.cli.schedule import schedule
from mpishard.cli.top import top
from mpishard.cli.trace import trace
from mpishard.cli.why import why
from mpishard.version import VERSION

app = typer.Typer(
    help="Look at the machine, layouts and schedules before a run, run it, watch it, and look at its checkpoints.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(info)
app.command()(schedule)
app.command(short_help="Compare the layouts of a model on so many ranks.")(estimate)
app.command()(bench)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(resize)
app.command()(plot)
app.command()(top)
app.command()(why)
app.command()(trace)
app.command()(inspect)
app.command()(verify)
app.command()(convert)
app.command()(export)
app.command("import")(import_)
app.command()(diff)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpishard {VERSION}")
        raise typer.Exit()


@app.callback()
def _of_all(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (default: that of the process) and return its exit code.

    What a user got wrong (ValueError, OSError, usage) is one line on stderr and code 2; wrong usage and values, which
    all ranks under mpirun have alike, are told by the first.
    """
    alike = True
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return app(given or ["--help"], prog_name="mpishard", standalone_mode=False) or 0
    except typer.Abort:
        return 130
    except OSError as error:
        message, alike = str(error), False
    except ValueError as error:
        message = str(error)
    except Exception as error:
        # Usage errors have no public base class that is the same in all versions of typer.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        where = getattr(getattr(error, "ctx", None), "command_path", "mpishard")
        message = f"{message.rstrip('.')}; see {where} --help"
    if not alike or MPI.COMM_WORLD.rank == 0:
        typer.echo(f"mpishard: error: {' '.join(message.split())}", err=True)
    return 2
