"""The command line: the list of commands, and errors as one line."""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import mpi4py
import typer
from typer.core import TyperCommand, TyperGroup

from mpishard.launch.detection import explain_unloadable
from mpishard.version import VERSION

# The module of each command, and its line in the list of commands.  A module is imported when its command is run:
# the list opens no files that it does not need, and starts no MPI.
_COMMANDS = {
    "example": ("example", "Write an example to the current folder, or list all of them."),
    "info": ("info", "Show what this MPI and machine can do, or what is noted of a run."),
    "selftest": ("selftest", "Test this installation on these ranks, in some seconds."),
    "compile": ("compile", "Compile the kernels once for all who use this installation."),
    "schedule": ("schedule", "Draw a pipeline schedule, with its bubble and its memory."),
    "estimate": ("estimate", "Compare the layouts of a model on a number of ranks."),
    "bench": ("bench", "Measure how fast the ranks compute and communicate."),
    "run": ("run", "Run a command on several ranks, and again when some are lost."),
    "script": ("script", "Print a batch script for Slurm."),
    "resize": ("resize", "Change the number of workers of a run in progress."),
    "plot": ("plot", "Draw a run, or several in one picture: series, speed, time, bytes."),
    "top": ("top", "Show live how a run stands, and what its ranks spend time on."),
    "why": ("why", "Say why a run hangs: which ranks wait, where, and for whom."),
    "trace": ("trace", "Write a timeline of all ranks, and draw it as a Gantt chart."),
    "inspect": ("checkpoint", "Show what is in a checkpoint, or in the newest of a run."),
    "verify": ("checkpoint", "Check a checkpoint, or all of a run, for damage."),
    "convert": ("checkpoint", "Write a checkpoint as another number of files, or as one."),
    "export": ("checkpoint", "Write the model in a checkpoint as safetensors or NumPy archive."),
    "import": ("checkpoint", "Make a checkpoint of safetensors or of a NumPy archive."),
    "diff": ("checkpoint", "Show how far two checkpoints are apart, tensor by tensor."),
}
# Commands that communicate with other ranks, or ask MPI what it can do; `info` of a folder does neither.  The others at
# most load MPI, for code that they share with training: Open MPI started without its mpirun leaves a folder and a
# segment of shared memory behind.
_WITH_MPI = ("info", "selftest", "bench")
# The shells that typer knows, and what it does for them.
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_COMPLETION = ("--install-completion", "--show-completion")
_SETTINGS: dict[str, dict[str, Any]] = {"run": {"allow_interspersed_args": False}}


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in _COMMANDS:
            return None
        module = import_module(f"mpishard.cli.{_COMMANDS[name][0]}")
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        function = getattr(module, "import_" if name == "import" else name)
        alone.command(name, context_settings=_SETTINGS.get(name))(function)
        return typer.main.get_command(alone)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in _COMMANDS and not ctx.resilient_parsing:
            raise ValueError(f"unknown command {args[0]!r}; {_nearest(args[0])}see mpishard --help")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        # Commands with a name and a line of help only: none of their modules is imported.
        listed: Any = {name: TyperCommand(name, help=summary) for name, (_, summary) in _COMMANDS.items()}
        command, ctx.command = ctx.command, TyperGroup(commands=listed)
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            ctx.command = command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


app = typer.Typer(
    cls=_Commands,
    help="Look at the machine, layouts and schedules before a run, run it, watch it, and look at its checkpoints.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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


def _nearest(word: str) -> str:
    """The part of a message that names the commands nearest to a misspelled word."""
    begun = [name for name in _COMMANDS if word and name.startswith(word)]
    found = begun or difflib.get_close_matches(word.lower(), _COMMANDS)
    return f"did you mean {' or '.join(found)}?  Or " if found else ""


def _complete(option: str, shell: str) -> None:
    """Install or show the completion of a named shell; typer's own options ignore the name."""
    if shell not in _SHELLS:
        raise ValueError(f"{option} has no shell {shell!r}; choose one of {', '.join(_SHELLS)}, or name none: it looks")
    completion = import_module("typer.completion")
    of_this = {"prog_name": "mpishard", "complete_var": "_MPISHARD_COMPLETE", "shell": shell}
    if option == "--show-completion":
        typer.echo(completion.get_completion_script(**of_this))
        return
    _, file = completion.install(**of_this)
    typer.echo(f"{shell} completion installed in {file}; it works in the next terminal")


def _place() -> tuple[int, int]:
    """Rank and number of ranks of this process; only in a rank has the import of mpishard started MPI."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (0, 1) if mpi is None or not mpi.Is_initialized() else (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    What a user got wrong (ValueError, OSError, usage) is one line on stderr and code 2; wrong usage and values, which
    all ranks under mpirun share, are shown by the first.  Collective for the commands that run on several ranks,
    ``info``, ``selftest`` and ``bench``.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those after ``mpishard``; default: those of the process.

    Returns
    -------
    int
        The exit code.
    """
    same_on_all = True
    rank, ranks = _place()
    if ranks > 1:
        # No colours: Open MPI gives its ranks a terminal even if their output goes to a file.
        os.environ["TERM"] = "dumb"
    for name in ("stdout", "stderr"):  # closed, as by `>&-`; tables ask whether they are a terminal
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # this process runs only the command
        name, *others = [word for word in given if not word.startswith("-")] or [""]
        of_run = name == "info" and others
        mpi4py.rc.initialize = name in _WITH_MPI and not of_run and "--help" not in given
    try:
        if len(given) > 1 and given[0] in _COMPLETION:
            _complete(given[0], given[1])
            return 0
        return app(given or ["--help"], prog_name="mpishard", standalone_mode=False) or 0
    except typer.Abort:
        return 130
    except SystemExit as left:
        # Typer leaves with 1 where nobody reads the pipe any more, as in `| head -1`; of verify 1 says "damaged".
        if left.code != 1:
            raise
        return 128 + signal.SIGPIPE
    except OSError as error:
        message, same_on_all = str(error), False
        if error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "rich", "safetensors"):
            raise
        message = str(error)
        if error.name != "safetensors":
            message = f"this command needs the package {error.name}: pip install 'mpishard[cli]'"
    except (ImportError, RuntimeError) as error:
        message = explain_unloadable(error)
        if not message:
            raise
    except Exception as error:
        # Usage errors have no public base class that is the same in all versions of typer.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        where = getattr(getattr(error, "ctx", None), "command_path", "mpishard")
        message = f"{message.rstrip('.')}; see {where} --help"
    if not same_on_all or rank == 0:
        from mpishard.arguments import printable  # which loads NumPy

        typer.echo(f"mpishard: error: {printable(' '.join(message.split()))}", err=True)
    return 2
