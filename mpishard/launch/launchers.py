"""The command lines of the launchers of MPI libraries."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpishard.launch.hosts import Host

_NAMES = ("mpirun", "mpiexec")
_OPEN_MPI, _HYDRA = "Open MPI", "MPICH"
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

    @property
    def leave_signal(self) -> signal.Signals:
        """The signal to the launcher that reaches every rank and leaves it time to stop.

        Not SIGTERM for Open MPI, whose launcher ends the ranks half a second after it.
        """
        return signal.SIGUSR1 if self.family == _OPEN_MPI else signal.SIGTERM

    @property
    def end_signal(self) -> signal.Signals:
        """The signal to the launcher that ends the ranks at once; MPICH's launcher passes SIGTERM on and waits."""
        return signal.SIGTERM if self.family == _OPEN_MPI else signal.SIGINT

    @property
    def prints_when_ended(self) -> bool:
        """True if the launcher prints a message when it is ended; then it is killed, which leaves only its ranks."""
        return self.family != _OPEN_MPI

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
        if self.family == _OPEN_MPI:
            if elastic:
                # Its hierarchical collectives crash after a death.
                words += ["--with-ft", "ulfm", "--mca", "coll", "^han"]
            if hosts:
                words += ["-H", listed]
                for name in sorted(filter(_FORWARDED.fullmatch, environment)):
                    words += ["-x", name]
                if shell is not None:
                    words += ["--prtemca", "plm_ssh_agent", shell]
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
        if self.family != _OPEN_MPI:
            return dict(given)
        settings: dict[str, str] = {}
        if os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if elastic or ranks > slots:
            settings |= {_MAPPING: "slot:oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}
        if elastic:
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
    beside = [Path(sys.executable).with_name(name) for name in _NAMES]
    found = path or next((str(each) for each in beside if os.access(each, os.X_OK)), None)
    found = shutil.which(found) if found else next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise ValueError(
            f"there is no launcher {path}" if path else "no mpirun beside this Python or on the PATH; give --launcher"
        )
    try:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{found} --version does not end") from None
    text = version.stdout + version.stderr
    return Launcher(found, _OPEN_MPI if "Open MPI" in text or "PRTE" in text or "PRRTE" in text else _HYDRA)
