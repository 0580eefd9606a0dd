"""The hosts of a job, which of them answer, what is left on them, and the command lines of the launchers of MPI."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpishard.launch.detection import MPICH, OPEN_MPI

_POLL_S = 0.02
_AGAIN_S = 1.0  # until a host that did not answer is asked again
_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=3"

# Kills all processes with this entry in their environment.
_SWEEP = """
grep -slzxF {entry} /proc/[0-9]*/environ | while IFS=/ read -r _ _ process _; do kill -9 "$process" 2>/dev/null; done
true
"""


@dataclass(frozen=True)
class Host:
    name: str
    slots: int = 1

    @property
    def is_local(self) -> bool:
        return self.name in _local_names()


@dataclass(frozen=True)
class HostSettings:
    """The hosts of a job, and how they are reached."""

    names: str = ""  # ``NAME:SLOTS,...``; empty: this host
    shell: str | None = None  # reaches a host, as ``SHELL HOST COMMAND``; default ssh
    probe_every: float = 5.0  # seconds between two probes of the hosts
    probe_limit: float = 10.0  # seconds in which a host must answer


@functools.cache
def _local_names() -> tuple[str, ...]:
    return "localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``NAME[:SLOTS],...``; slots are numbers of ranks, 1 if not given.

    Raises ValueError if the text has another form, or names a host twice.
    """
    found = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not name or name.startswith("-") or (colon and not (slots.isdecimal() and int(slots))):
            raise ValueError(f"hosts {text!r}: {part!r} is not NAME or NAME:SLOTS, such as node1:4,node2:4")
        found.append(Host(name, int(slots) if colon else 1))
    if len({host.name for host in found}) < len(found):
        raise ValueError(f"hosts {text!r} name one twice; give its slots as NAME:SLOTS")
    return tuple(found)


def check_shell(hosts: Sequence[Host], shell: str | None) -> None:
    """Raise ValueError if the program that reaches the hosts does not exist."""
    try:
        program = shlex.split(shell or _SHELL)[0]
    except (ValueError, IndexError):  # a quote that does not end, or blanks
        raise ValueError(f"--remote-shell is {shell!r}; give a program and its options, such as 'ssh -q'") from None
    if not all(host.is_local for host in hosts) and shutil.which(program) is None:
        raise ValueError(f"{program} to reach the hosts with does not exist; give another one as --remote-shell")


class Probe:
    """Runs `command` on several hosts at once, each ``SHELL HOST COMMAND``, without waiting.

    `shell`, such as ``ssh``, is not used for this machine.  A host that has not ended after `limit` seconds counts as
    not answering.
    """

    def __init__(self, hosts: Sequence[Host], shell: str | None, limit: float, command: str = "true") -> None:
        self._hosts = hosts
        self._deadline = time.monotonic() + limit
        words = shlex.split(shell or _SHELL)
        self._running = {
            host: subprocess.Popen(
                [*words, host.name, command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for host in hosts
            if not host.is_local
        }

    def poll(self) -> tuple[Host, ...] | None:
        """The hosts that answered, in their order; None while some may still answer."""
        if time.monotonic() < self._deadline and any(each.poll() is None for each in self._running.values()):
            return None
        for each in self._running.values():
            if each.poll() is None:
                each.kill()
                each.wait()
        return tuple(host for host in self._hosts if host not in self._running or not self._running[host].returncode)

    def wait(self) -> tuple[Host, ...]:
        """`poll` until all have answered or the time limit is over."""
        while (answered := self.poll()) is None:
            time.sleep(_POLL_S)
        return answered


class HostMonitor:
    """Probes hosts every `every` seconds, except this machine.  Further parameters are those of `Probe`."""

    def __init__(self, hosts: Sequence[Host], shell: str | None, every: float, limit: float) -> None:
        self._hosts = [host for host in hosts if not host.is_local]
        self._shell = shell
        self._every = every
        self._limit = limit
        self._probe: Probe | None = None
        self._asked = time.monotonic()
        self._missed: set[Host] = set()

    def look(self) -> set[Host]:
        """The hosts that did not answer twice in succession, since once may be chance.  Does not wait."""
        pause = min(_AGAIN_S, self._every) if self._missed else self._every
        if self._hosts and self._probe is None and time.monotonic() - self._asked >= pause:
            self._asked = time.monotonic()
            with contextlib.suppress(OSError):  # this machine starts no process now, which says nothing of hosts
                self._probe = Probe(self._hosts, self._shell, self._limit)
        answered = None if self._probe is None else self._probe.poll()
        if answered is None:
            return set()
        self._probe, self._asked = None, time.monotonic()
        silent = set(self._hosts) - set(answered)
        lost, self._missed = silent & self._missed, silent
        return lost


def sweep(hosts: Sequence[Host], shell: str | None, limit: float, variable: str, value: str) -> tuple[Host, ...]:
    """Kill the processes with ``variable=value`` in their environment on other hosts; returns those that answered."""
    return Probe(hosts, shell, limit, _SWEEP.format(entry=shlex.quote(f"{variable}={value}"))).wait()


# Launchers.

_NAMES = ("mpirun", "mpiexec")
_MAPPING = "PRTE_MCA_rmaps_default_mapping_policy"
# Variables that the launcher of Open MPI passes to processes on other hosts only where its command names them.
_FORWARDED = re.compile(
    r"MPISHARD_\w+|PYTHON\w+|(OMP|OPENBLAS|MKL|BLIS|NUMEXPR|NUMBA)_\w+|CUDA_\w+|PATH|LD_LIBRARY_PATH|VIRTUAL_ENV"
)


@dataclass(frozen=True)
class Launcher:
    """The launcher of one MPI library."""

    path: str
    family: str  # "Open MPI", or "MPICH" for all launchers with the options of Hydra
    older: bool = False  # of Open MPI 4 or before: it has no ULFM, and other settings

    @property
    def leave_signal(self) -> signal.Signals:
        """The signal to the launcher that reaches every rank and leaves it time to stop.

        Not SIGTERM for Open MPI, whose launcher ends the ranks half a second after it.
        """
        return signal.SIGUSR1 if self.family == OPEN_MPI else signal.SIGTERM

    @property
    def end_signal(self) -> signal.Signals:
        """The signal to the launcher that ends the ranks at once; MPICH's launcher passes SIGTERM on and waits."""
        return signal.SIGTERM if self.family == OPEN_MPI else signal.SIGINT

    @property
    def prints_when_ended(self) -> bool:
        """True if the launcher prints a message when it is ended; then it is killed, which leaves only its ranks."""
        return self.family != OPEN_MPI

    def command(
        self,
        command: Sequence[str],
        ranks: int,
        *,
        hosts: Sequence[Host] = (),
        elastic: bool = False,
        shell: str | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> list[str]:
        """The command line that starts `command` on this number of ranks.

        No hosts: this host.  `elastic`: ranks may survive the death of others.  `shell` reaches the hosts, by default
        that of the launcher; `environment` is the one with which this job is started.
        """
        words = [self.path, "-n", str(ranks)]
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.family == OPEN_MPI:
            if elastic and not self.older:
                # Its hierarchical collectives crash after a death.
                words += ["--with-ft", "ulfm", "--mca", "coll", "^han"]
            if hosts:
                words += ["-H", listed]
                for name in sorted(filter(_FORWARDED.fullmatch, environment)):
                    words += ["-x", name]
                if shell is not None:
                    words += ["--mca", "plm_rsh_agent", shell] if self.older else ["--prtemca", "plm_ssh_agent", shell]
        elif hosts:
            words += ["-hosts", listed]
            if shell is not None:
                words += ["-launcher", "ssh", "-launcher-exec", shell]
        return [*words, *command]

    def environment(self, given: Mapping[str, str], ranks: int, slots: int, elastic: bool = False) -> dict[str, str]:
        """The environment of the launcher: the given one, and default settings that it does not override.

        They are in the environment since spawned processes get settings of Open MPI only from there.  `slots` is the
        number of ranks for which the job's hosts have cores; `elastic`: ranks may survive the death of others.
        """
        if self.family != OPEN_MPI:
            return dict(given)
        settings: dict[str, str] = {}
        if os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if (elastic or ranks > slots) and self.older:
            settings |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
        elif elastic or ranks > slots:
            settings |= {_MAPPING: "slot:oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}
        if elastic and not self.older:
            settings |= {
                # Otherwise, when one process dies, the launcher kills all that were spawned with it.
                "PRTE_MCA_state_base_recoverable": "1",
                # Otherwise MPI_Finalize may wait for ever in its barrier after a death.
                "OMPI_MCA_async_mpi_finalize": "1",
            }
        settings |= given
        # Without a policy before the colon all ranks were seen on the first host, whatever its slots.
        if settings.get(_MAPPING, "").startswith(":"):
            settings[_MAPPING] = f"slot{settings[_MAPPING]}"
        return settings


def find_launcher(path: str | None = None) -> Launcher:
    """The launcher at `path`, a program or its name on the PATH; default: next to this Python, or on the PATH.

    Raises ValueError if it does not exist, or does not end when it is asked for its version.
    """
    next_to_python = [Path(sys.executable).with_name(name) for name in _NAMES]
    found = path or next((str(each) for each in next_to_python if os.access(each, os.X_OK)), None)
    found = shutil.which(found) if found else next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise ValueError(
            f"launcher {path} does not exist" if path else "no mpirun next to Python or on the PATH; give --launcher"
        )
    try:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{found} --version does not end") from None
    text = version.stdout + version.stderr
    # The launcher of Open MPI 4 calls itself OpenRTE where its file is not named mpirun, that of 5 by PRRTE's name.
    number = re.search(r"\(Open MPI\) (\d+)", text)
    older = "(OpenRTE)" in text or (number is not None and int(number[1]) < 5)
    of_open_mpi = older or any(name in text for name in ("Open MPI", "PRTE", "PRRTE"))
    return Launcher(found, OPEN_MPI if of_open_mpi else MPICH, older)
