"""The supervisor: starts a job, watches it, ends its remaining processes, and restarts it.

It trusts the run's own completion marker, not the exit code of a launcher.  It leaves no process of the job behind: it
adopts orphans, and the kernel kills the launcher when the supervisor dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from mpishard.io.files import opened
from mpishard.io.terminal import say
from mpishard.launch.exit_codes import exit_code
from mpishard.launch.job_notes import JobNotes, patiently, was_begun_here
from mpishard.launch.launchers import (
    Host,
    HostMonitor,
    HostSettings,
    Launcher,
    check_shell,
    find_launcher,
    parse_hosts,
    sweep,
)
from mpishard.launch.processes import Leftovers, Offspring, adopt_orphans, descendants, die_with_parent, end_descendants
from mpishard.launch.restart_policy import (
    JobHistory,
    JobOutcome,
    Policy,
    ProgressLimits,
    ProgressMonitor,
    Start,
    Stop,
    decide,
    reported,
    signal_name,
)
from mpishard.launch.script import RUNNER, with_runner

_POLL_S = 0.02
_LOOK_S = 0.2  # between two looks into the run's folder
_END_S = 3.0  # for a launcher to end its job
_END_WITHOUT_S = 0.5  # the same, if it waits for a host that does not answer
_ALONE_S = 10.0  # and after all its processes are gone: Open MPI's was seen to wait for ever after an abort
# Runs a command with its output in the file of its rank below a folder; every start of a job adds to it.
_INTO_FILE = 'mkdir -p "$0" && exec "$@" >>"$0/rank-${OMPI_COMM_WORLD_RANK-$PMI_RANK}.log" 2>&1'
_STOP, _PASS_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIGUSR1
_FOLDER = ".mpishard-run-"  # the name of a temporary folder begins so
_WIDTH = 100  # of the command line that is shown


@dataclass(frozen=True)
class Job:
    """A job: the command, and how it is run."""

    command: tuple[str, ...]  # runs on each rank
    ranks: int | None = None  # default: the slots of the hosts, or the cores of this host
    hosts: HostSettings = HostSettings()
    policy: Policy = Policy()
    # The run's folder, shared by all hosts; default: a temporary one, in the working directory if there are hosts.
    folder: str | None = None
    launcher: str | None = None  # default: the launcher of the MPI next to this Python
    grace: float = 30.0  # seconds for ranks to stop after SIGTERM
    limits: ProgressLimits = ProgressLimits()
    log_dir: str | None = None  # folder for a file of each rank's output; default: the launcher passes it on
    watch: tuple[str, ...] | None = None  # the options of `mpishard.watch`, if that watches the command


class Supervisor:
    """Runs one job to its end; creation raises ValueError if the job cannot be started in this way."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hosts: tuple[Host, ...] = parse_hosts(job.hosts.names) if job.hosts.names else ()
        self.slots: int = sum(host.slots for host in self.hosts) or len(os.sched_getaffinity(0))
        ranks = self.slots if job.ranks is None else job.ranks
        policy = job.policy
        if ranks < policy.min_workers or ranks % policy.multiple_of:
            wanted = f"at least {policy.min_workers} and a multiple of {policy.multiple_of}"
            raise ValueError(f"{ranks} ranks were asked for, which is not {wanted}")
        if self.hosts and ranks > self.slots:
            raise ValueError(f"{ranks} ranks do not fit the {self.slots} slots of {job.hosts.names}; give NAME:SLOTS")
        check_shell(self.hosts, job.hosts.shell)
        self.ranks = ranks
        self.launcher: Launcher = find_launcher(job.launcher)
        runner = (RUNNER,) if job.watch is None else ("-m", "mpishard.watch", *job.watch)
        self._command = with_runner(job.command, elsewhere=bool(self.hosts), runner=runner)
        if job.watch is not None and self._command == list(job.command):
            raise ValueError(
                f"--watch needs a command that runs a file or a module by Python, not {shlex.join(job.command)}"
            )
        if job.log_dir is not None:
            self._command = ["sh", "-c", _INTO_FILE, job.log_dir, *self._command]
        self._line = ""  # the command line of the last start, as a user would type it
        self._leftovers = Leftovers()  # of the last start
        self._signals: list[int] = []
        self._stopped = 0
        self._stop_began = 0.0
        self._asked_to_leave = False
        self._at_once = False  # end the launcher without waiting for its report

    def run(self) -> int:
        """Run the job to its end; returns the exit code of the run."""
        adopt_orphans()
        for number in (*_STOP, _PASS_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._take_signal)
        given = self.job.folder
        place = contextlib.nullcontext(given) if given is not None else _temporary_folder("." if self.hosts else None)
        with place as path:
            try:
                return self._run(JobNotes.create(Path(path)))
            finally:
                self._end_all()

    def _run(self, folder: JobNotes) -> int:
        history = JobHistory(self.ranks, self.ranks)
        start = Start(self.ranks, self.hosts, history)
        ended = 0.0
        for number in itertools.count(1):
            self._leftovers = Leftovers()
            process = self._start(start, folder)
            if number > 1:
                where = f" on {', '.join(host.name for host in start.hosts)}" if start.hosts else ""
                waited = time.monotonic() - ended
                self._say(f"start {number}, {start.ranks} ranks{where}, {waited:.2f} s after the end")
            monitor = ProgressMonitor(folder, self.job.limits)
            silent = self._watch(process, start, folder, monitor, ended)
            ended = time.monotonic()
            outcome = self._end_job(process, folder, monitor, bool(silent))
            if _is_taken(folder):
                self._say(f"{folder.path} is gone, or another mpishard run has taken it; the run ends")
                code = reported(outcome)
                return (exit_code(outcome.code) or 1) if code is None else code
            folder = patiently(folder.next)  # processes that cannot be reached see this and end themselves
            asked = tuple(host for host in self.hosts if host not in silent)
            answering = sweep(asked, self.job.hosts.shell, self.job.hosts.probe_limit, "MPISHARD_RUN", str(folder.path))
            follows = decide(self.job.policy, history, outcome, self.hosts, answering)
            if isinstance(follows, Stop):
                if follows.why:
                    self._say(f"the job {follows.why}; the run ends with code {follows.code}")
                return follows.code
            self._say(f"the job {follows.why}; last step seen: {outcome.notes.step or 'none'}")
            start, history = follows, follows.history
        raise AssertionError("unreachable")

    def _end_job(
        self, process: subprocess.Popen[bytes], folder: JobNotes, monitor: ProgressMonitor, host_lost: bool
    ) -> JobOutcome:
        """End the job if it still runs; returns its outcome."""
        notes = patiently(lambda: folder.notes)  # before the job is ended, since that may add notes of the ranks
        code = process.poll()
        if code is None:
            self._end(process, _END_WITHOUT_S if host_lost else _END_S)
            code = exit_code(process.returncode)  # a signal from here does not count
        self._end_all()
        self._leftovers.remove(process.pid)
        stopped = self._stopped or next((number for number in self._signals if number in _STOP), 0)
        notes = replace(notes, step=max(notes.step, monitor.furthest))
        return JobOutcome(code, notes, monitor.half_started, host_lost, stopped, self._asked_to_leave)

    def _start(self, start: Start, folder: JobNotes) -> subprocess.Popen[bytes]:
        job, elastic = self.job, self.job.policy.elastic
        given = {**os.environ, **folder.environment()}
        environment = self.launcher.environment(given, start.ranks, self.slots, elastic)
        words = self.launcher.command(
            (), start.ranks, hosts=start.hosts, elastic=elastic, shell=job.hosts.shell, environment=environment
        )
        own = [f"{name}={shlex.quote(value)}" for name, value in environment.items() if given.get(name) != value]
        line = _in_lines([*own, *map(shlex.quote, [*words, *job.command])])
        if line != self._line:
            self._line = line
            self._say(f"starts {line}")
            if job.log_dir is not None:
                self._say(f"the output of rank 0 goes to {job.log_dir}/rank-0.log, and so for the others")
        return subprocess.Popen(
            [*words, *self._command],
            stdin=subprocess.DEVNULL,
            # MPICH's launcher fails where one of these is closed.
            stdout=subprocess.DEVNULL if sys.stdout is None else None,
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def _watch(
        self, process: subprocess.Popen[bytes], start: Start, folder: JobNotes, monitor: ProgressMonitor, ended: float
    ) -> set[Host]:
        """Watch until the launcher ends or must be ended; returns the lost hosts, if these are the reason."""
        job, hosts, step = self.job, start.hosts, start.history.step
        host_monitor = HostMonitor(hosts, job.hosts.shell, job.hosts.probe_every, job.hosts.probe_limit)
        offspring = Offspring(process.pid, _ALONE_S)
        looked = time.monotonic()
        awaited = step > 0
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self._handle_signals(process, folder) or (self._stopped and now - self._stop_began > job.grace):
                return set()
            if now - looked >= _LOOK_S:
                looked = now
                self._leftovers.look()
                offspring.look(monitor.started)
                reason = ""
                with contextlib.suppress(OSError):  # a shared disk may fail for a while
                    reason = monitor.look(offspring.ranks_gone)
                if awaited and monitor.step:
                    awaited = False
                    self._say(f"step {monitor.step}, {now - ended:.2f} s after the end; step {step} was seen before it")
                if reason:
                    self._say(reason)
                    return set()
            # Ranks on other hosts are no descendants of this process.
            if not hosts and not monitor.has_ended and offspring.gone:
                self._say(f"all ranks are gone; the launcher is not after {_ALONE_S:g} s and is ended")
                return set()
            lost = set() if monitor.has_ended else host_monitor.look()
            if lost:
                self._say(f"{', '.join(sorted(host.name for host in lost))} does not answer; the job is ended")
                return lost
        return set()

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _handle_signals(self, process: subprocess.Popen[bytes], folder: JobNotes) -> bool:
        """Handle the received signals; returns True if the job must end now."""
        while self._signals:
            number = self._signals.pop(0)
            if number == _PASS_ON:
                self._asked_to_leave = True
                process.send_signal(number)
                continue
            name = signal_name(number)
            if self._stopped:
                self._at_once = True
                self._say(f"{name} again: the ranks are killed, and save nothing more")
                return True
            self._stopped, self._stop_began = number, time.monotonic()
            begun = True
            with contextlib.suppress(OSError):
                begun = folder.notes.started
            if number == signal.SIGINT and not begun:
                self._at_once = True
                self._say("Ctrl-C before the ranks have begun: they are killed")
                return True
            self._say(
                f"{name}: the run ends after its step, and saves if it has checkpoints; the ranks have "
                f"{self.job.grace:g} s for that.  Once more, and they are killed"
            )
            with contextlib.suppress(OSError):
                folder.note_ending()
            process.send_signal(self.launcher.leave_signal)
        return False

    def _end(self, process: subprocess.Popen[bytes], limit: float) -> None:
        """End a launcher: in order if it ends within `limit` seconds, else by SIGKILL."""
        if not self._at_once or self.hosts or not self.launcher.prints_when_ended:
            process.send_signal(self.launcher.end_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
                return
        process.kill()
        process.wait()

    def _end_all(self) -> None:
        """End all processes of the job that are left on this host."""
        if descendants():
            left = end_descendants()
            if left:
                self._say(f"processes {sorted(left)} could not be killed")

    def _say(self, text: str) -> None:
        say(f"mpishard run: {text}")


def _is_taken(folder: JobNotes) -> bool:
    """Return True if another supervisor, which this one must leave alone, has begun a start in the folder."""
    return patiently(lambda: folder.is_over)


@contextlib.contextmanager
def _temporary_folder(parent: str | None) -> Iterator[str]:
    """A new folder for a run, removed at the end; those that killed supervisors of this user have left go first.

    The kernel holds the lock on a folder as long as its supervisor lives, whatever number that has in its container.
    On some shared disks, such as BeeGFS, other machines do not see it: each removes the folders of its own alone.
    """
    for left in Path(parent or tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError, ValueError):
            if left.lstat().st_uid == os.geteuid():
                with opened(left, private=True) as descriptor:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if was_begun_here(left):
                        shutil.rmtree(left)
    while True:
        path = tempfile.mkdtemp(prefix=_FOLDER, dir=parent)
        with opened(Path(path), private=True) as descriptor:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not os.path.exists(path):  # another supervisor has seen it without its lock
                continue
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return


def _in_lines(words: Sequence[str]) -> str:
    """The words of a command line, broken as a shell reads it."""
    lines = [""]
    for word in words:
        if lines[-1].strip() and len(lines[-1]) + len(word) > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
