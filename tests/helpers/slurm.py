"""A Slurm of its own on this machine, of six nodes with four processors each, for as long as a test takes.

    with slurm() as cluster:
        job = cluster.submit("slurm/train.sbatch", "examples/train_gpt.py", options=["--ntasks=2"])
        cluster.wait_for(job, "COMPLETED")

Needs root and Debian's packages slurm-wlm and munge.  All daemons are children of this process and end with it; ports,
keys and files are their own, so that a Slurm of the machine and other such ones are not in the way.

Jobs are requeued after 6 seconds instead of 121 (`cred_expire`), and what a job in the partition ``hi`` needs is taken
from those in ``main``, which get SIGUSR1 at once and 10 seconds to leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

NODES = 6
_SOON_S = 120.0
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

# KillWait is Slurm's default.  With 5 seconds SIGKILL came as some batch scripts, which take about as long to queue
# themselves again, ended: then slurmstepd may wait for its own timer, for a minute, and drains the node.
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=30
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=10
PartitionName=hi Nodes=n[1-{count}] MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing() -> str:
    """Why there can be no such Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may start a Slurm"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    try:
        pwd.getpwnam("munge")
    except KeyError:
        return "no user munge"
    return ""


class Cluster:
    """A Slurm that runs; `folder` has its files, and nothing of its jobs."""

    def __init__(self, folder: Path, daemons: contextlib.ExitStack) -> None:
        self.folder = folder
        self._daemons = daemons
        self._environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        """What one of Slurm's commands prints; it must succeed."""
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=_SOON_S,
            check=False,
            cwd=cwd,
            env={**self._environment, **environment},
        )
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def submit(
        self,
        script: str | os.PathLike[str],
        *arguments: object,
        options: Sequence[str] = (),
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """The number of a new job."""
        words = ["sbatch", "--parsable", *options, os.fspath(script), *map(str, arguments)]
        return self.call(*words, cwd=cwd, **(environment or {}))

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by its names for it, such as JobState, Restarts and ExitCode."""
        words = self.call("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.facts(job)["JobState"]

    def wait_for(self, job: str, state: str, timeout: float = 60.0) -> dict[str, str]:
        """The facts of a job once it is in this state; raises TimeoutError."""

        def reached() -> bool:
            return self.state(job) == state

        wait_until(reached, timeout, lambda: f"job {job} is not {state} but {self.facts(job)}")
        return self.facts(job)

    def processes(self, *settings: str) -> list[int]:
        """Processes of jobs of this Slurm that have all of these settings, as NAME=VALUE, in their environment."""
        wanted = {word.encode() for word in (f"SLURM_CONF={self.folder / 'slurm.conf'}", *settings)}
        found = []
        for folder in Path("/proc").iterdir():
            # Of a process that has ended or is a zombie there is nothing to read.
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def start(self, node: str) -> None:
        """A node, for the first time or after it was lost."""
        words = ["slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node]
        _start(self._daemons, words, self.folder / f"{node}.out")

    def lose(self, node: str) -> None:
        """Kill all that runs on a node: its daemon, steps and tasks."""
        tasks = self.processes(f"SLURMD_NODENAME={node}")
        steps = [parent for parent in map(_parent, tasks) if parent is not None and _name(parent) == "slurmstepd"]
        _kill([int((self.folder / f"{node}.pid").read_text()), *steps, *tasks])

    def end_jobs(self) -> None:
        """No job is left, and no process of one."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.call("scancel", "--signal=KILL", "--full", "--user=root")
            self.call("scancel", "--user=root")
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: not self.call("squeue", "--noheader"), 5.0, lambda: "")


@contextlib.contextmanager
def slurm() -> Iterator[Cluster]:
    """A Slurm that answers, with all of its nodes."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)  # munged, which is not root, must reach its own folder
        names = [f"n{number}" for number in range(1, NODES + 1)]
        ports = _free_ports(NODES + 1)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for name, port in zip(names, ports[1:], strict=True)
        )
        text = _CONFIGURATION.format(host=socket.gethostname(), port=ports[0], folder=folder, nodes=nodes, count=NODES)
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        for name in names:
            (folder / name / "tmp").mkdir(parents=True)
        _start_munge(stack, folder / "munge")
        cluster = Cluster(folder, stack)
        # Last in, first out: jobs end before the nodes they are on, and what is left of them after those.
        stack.callback(lambda: _kill(cluster.processes()))
        _start(stack, ["slurmctld", "-D", "-f", str(folder / "slurm.conf")], folder / "slurmctld.out")
        for name in names:
            cluster.start(name)
        stack.callback(cluster.end_jobs)

        def answers() -> bool:
            try:
                return cluster.call("sinfo", "--noheader", "--partition=main", "-o", "%A") == f"0/{NODES}"
            except OSError:
                return False

        wait_until(answers, _SOON_S, lambda: f"no Slurm of {NODES} nodes:\n{_logs(folder)}")
        yield cluster


def wait_until(condition: Callable[[], bool], timeout: float, why: Callable[[], str]) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {timeout:g} s {why()}")
        time.sleep(0.1)


def _path() -> str:
    """With the folders where daemons are, which users' paths may lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start_munge(stack: contextlib.ExitStack, folder: Path) -> None:
    user = pwd.getpwnam("munge")
    folder.mkdir(mode=0o711)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    for path in (folder, folder / "key"):
        os.chown(path, user.pw_uid, user.pw_gid)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    words = ["munged", "--foreground", *(f"--{option}={folder / name}" for option, name in files.items())]
    _start(stack, words, folder.with_name("munged.out"), user="munge", group="munge", extra_groups=[])
    wait_until((folder / "socket").exists, _SOON_S, lambda: f"no munged:\n{_logs(folder.parent)}")


def _start(stack: contextlib.ExitStack, words: Sequence[str], log: Path, **options: object) -> None:
    """A daemon that ends with this thread, and with the stack before."""
    library = ctypes.CDLL(None)
    with log.open("w") as file:
        process = subprocess.Popen(  # type: ignore[call-overload]
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=lambda: library.prctl(1, signal.SIGTERM, 0, 0, 0),
            env={**os.environ, "PATH": _path()},
            **options,
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _kill(processes: Iterable[int]) -> None:
    for number in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _parent(process: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _name(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text().strip()
    return ""


def _logs(folder: Path) -> str:
    files = sorted([*folder.glob("*.out"), *folder.glob("*.log"), *folder.glob("munge/log")])
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)
