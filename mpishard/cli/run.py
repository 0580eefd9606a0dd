"""``mpishard run``: start a job, watch it, and start it again when it has lost ranks or hosts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mpishard.launch import supervisor_main
from mpishard.launch.launchers import HostSettings, parse_hosts
from mpishard.launch.restart_policy import Policy, ProgressLimits
from mpishard.launch.supervisor import Job
from mpishard.watch.folder import FOLDER


def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, such as: python train.py.")],
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Default: the slots of the hosts, or the cores.")
    ] = None,
    hosts: Annotated[str, typer.Option(help="NAME:SLOTS,NAME:SLOTS...; without them, this host.")] = "",
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Start the job again when it fails, on the hosts that answer.")
    ] = False,
    replace: Annotated[
        bool, typer.Option(help="Start again with as many ranks, where the hosts have room; or on those left.")
    ] = True,
    min_workers: Annotated[int, typer.Option(help="Fewest ranks to continue with.")] = 1,
    multiple_of: Annotated[int, typer.Option(help="Ranks are a multiple of this: tensor x pipeline sizes.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="Most restarts in succession without a new step.")] = 3,
    folder: Annotated[Path | None, typer.Option(help="The run's own folder, seen by all hosts.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Watch a program of mpi4py; if it hangs: mpishard why.")
    ] = False,
    watch_folder: Annotated[Path, typer.Option(help="For mpishard why, seen by all hosts.")] = FOLDER,
    timeout: Annotated[
        float | None, typer.Option(help="With --watch: longest wait in MPI, in seconds; then a report, and the end.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for the output of each rank, rank-N.log.")] = None,
    launcher: Annotated[str | None, typer.Option(help="Default: the mpirun next to this Python.")] = None,
    remote_shell: Annotated[str | None, typer.Option(help="What reaches a host; default: ssh.")] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that ranks get to leave on SIGTERM.")] = 30.0,
    start_limit: Annotated[
        float, typer.Option(min=0, help="Seconds until all ranks have imported mpishard.")
    ] = ProgressLimits.start,
    step_limit: Annotated[
        float, typer.Option(min=0, help="Seconds without a step of an elastic run, or thrice its longest step.")
    ] = ProgressLimits.step,
    heal_limit: Annotated[
        float, typer.Option(min=0, help="Seconds from a death that is survived to a step.")
    ] = ProgressLimits.heal,
    end_limit: Annotated[
        float, typer.Option(min=0, help="Seconds from the script's end to the launcher's.")
    ] = ProgressLimits.end,
    probe_every: Annotated[float, typer.Option(min=0, help="Seconds between looks at the hosts.")] = 5.0,
    probe_limit: Annotated[float, typer.Option(min=0, help="Seconds in which a host answers.")] = 10.0,
) -> None:
    """Run a command on several ranks, and again when some are lost.

    \b
    mpishard run --elastic -n 4 python train.py

    It reports how the run itself ended.
    The script imports mpishard, which notes that it came to its end; without that note no exit code of a launcher
    counts as success.  With --elastic the same command is started again when ranks or hosts are lost; the script goes
    on from its newest checkpoint by Checkpoints(...) and resume=True.  A failure that comes back at the same step ends
    the run.

    With --watch the program need not import mpishard: an uncaught exception of one rank ends the job, and
    mpishard why FOLDER says where the ranks are.  With --timeout a rank that waits longer in a call of MPI ends the job
    with that report, and code 1.

    With --log-dir what the ranks write goes to their files and not to the terminal; a start adds to what is there.
    Workers that an elastic run spawns later still write to the terminal.

    SIGTERM and Ctrl-C let the ranks leave (they see SIGTERM, under Open MPI SIGUSR1) and then end them; SIGUSR1 is
    passed on.  A command that begins with python, or with a file NAME.py, means this Python.  A script or module that
    Python runs is run by mpishard.launch.worker, which notes how it ended.
    """
    if hosts:
        parse_hosts(hosts)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"--timeout {timeout:g} must be more than 0 seconds")
    if timeout is not None and not watch:
        raise ValueError(f"--timeout {timeout:g} limits the waiting that --watch sees; give --watch, too")
    watched = ("--folder", str(watch_folder.absolute()), *(() if timeout is None else ("--timeout", str(timeout))))
    job = Job(
        _words(command, elsewhere=bool(hosts)),
        ranks,
        HostSettings(hosts, remote_shell, probe_every, probe_limit),
        Policy(elastic, replace, min_workers, multiple_of, max_restarts),
        None if folder is None else str(folder),
        launcher,
        grace,
        ProgressLimits(start_limit, step_limit, heal_limit, end_limit),
        None if log_dir is None else str(log_dir.absolute()),
        watched if watch else None,
    )
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    # The supervisor replaces this process: it runs without MPI, which may be running here if a launcher started this.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        mpi.Finalize()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup set it, before MPI installed a handler
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    fields = asdict(job)
    words = fields.pop("command")
    arguments = [sys.executable, "-I", supervisor_main.__file__, json.dumps(fields), *words]
    os.execve(sys.executable, arguments, os.environ)  # an MPI library's own variables are not in os.environ


def _words(command: list[str], elsewhere: bool) -> tuple[str, ...]:
    """The command of each rank; ValueError if it cannot be executed here, unless the ranks are elsewhere."""
    program = command[0]
    if program.endswith(".py"):
        return (sys.executable, *command)
    if program in ("python", "python3"):
        return (sys.executable, *command[1:])
    if not elsewhere and shutil.which(program) is None:
        raise ValueError(f"{program!r} cannot be executed: the program does not exist; a script is run by python FILE")
    return tuple(command)
