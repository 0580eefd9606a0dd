"""Hosts on one machine, each a set of namespaces: processes, network, name, memory files and mounts of its own.

    with hosts(3) as (first, second, third):
        first.run(["ssh", second.name, "hostname"])
        third.cut()

They are joined by a switch, which is a namespace too, so that several such sets do not see each other, and they are
reached by ``ssh`` (`remote_shell`) over that network.  They share the file system but for ``/dev/shm``, where the
temporary files of a host are.  Shape a link with ``host.run(["tc", ...])`` on its device `DEVICE`.

Nothing is left of them afterwards: the kernel ends all that is in a namespace with its first process, and that one with
whoever made the hosts.  Needs root, and Linux with ``unshare``, ``nsenter`` and ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DEVICE = "eth0"
_SHELL = Path(__file__).resolve().with_name("remote_shell.py")
_SOON_S = 20.0
_SPACES = ("--pid", "--mount-proc", "--uts", "--ipc", "--net")

# Of the first process of a host: arguments are its name, the text of /etc/hosts, the Python and the shell's file.
_BOOT = """
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mkdir /dev/shm/bin
printf '%s' "$2" >/dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
printf '#!/bin/sh\\nexec "%s" -I -S "%s" "$@"\\n' "$3" "$4" >/dev/shm/bin/ssh
chmod 755 /dev/shm/bin/ssh
ip link set lo up
export PATH="/dev/shm/bin:$PATH" TMPDIR=/dev/shm
exec "$3" -I -S "$4" serve
"""


def missing() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    try:
        done = subprocess.run(
            ["unshare", "--fork", *_SPACES, "ip", "link", "add", "type", "veth"],
            capture_output=True,
            text=True,
            timeout=_SOON_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces: {error}"
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Host:
    """One host; `name` and `address` are those by which the others reach it."""

    def __init__(self, name: str, address: str, first: int, switch: int) -> None:
        self.name = name
        self.address = address
        self._first = first
        self._switch = switch
        self._space = os.readlink(f"/proc/{first}/ns/pid")

    def command(self, words: Sequence[str], folder: str | os.PathLike[str] = "/") -> list[str]:
        """What runs these words in a folder of the host, for `subprocess`."""
        settings = [f"PATH=/dev/shm/bin:{os.environ.get('PATH', os.defpath)}", "TMPDIR=/dev/shm"]
        enter = ["nsenter", "-t", str(self._first), "--mount", "--uts", "--ipc", "--net", "--pid"]
        return [*enter, f"--wd={os.fspath(folder)}", "--", "env", *settings, *words]

    def run(self, words: Sequence[str], timeout: float = _SOON_S) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        return subprocess.run(self.command(words), capture_output=True, text=True, timeout=timeout, check=False)

    def processes(self, words: str = "") -> dict[int, str]:
        """Command lines, with these words in them, of the processes there, but for the remote shell."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == self._space:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and words in line and not line.endswith(f"{_SHELL} serve"):
                        found[int(folder.name)] = line
        return found

    def kill_processes(self, words: str = "") -> list[int]:
        """Kill those processes; returns them."""
        killed = []
        for number in self.processes(words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
                killed.append(number)
        return killed

    def kill(self) -> None:
        """End the host and all that runs there; it does not answer any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)

    def cut(self) -> None:
        """Take its link down; what runs there goes on."""
        self._set_link("down")

    def mend(self) -> None:
        """Bring its link up again."""
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        _call("nsenter", "-t", str(self._switch), "--net", "ip", "link", "set", self.name, state)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """So many hosts, named ``h1``, ``h2`` and so on, that reach each other."""
    names = {f"h{number}": f"10.99.0.{number}" for number in range(1, count + 1)}
    table = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_first_process(["--net"], ["sleep", "infinity"]))
        _call("nsenter", "-t", str(switch), "--net", "ip", "link", "add", "bridge", "up", "type", "bridge")
        made = []
        for name, address in names.items():
            boot = ["bash", "-ec", _BOOT, "boot", name, table, sys.executable, str(_SHELL)]
            first = stack.enter_context(_first_process(_SPACES, boot))
            made.append(Host(name, address, first, switch))
            ends = ["name", name, "netns", str(switch), "type", "veth", "peer", "name", DEVICE, "netns", str(first)]
            _call("ip", "link", "add", *ends)
            _call("nsenter", "-t", str(switch), "--net", "ip", "link", "set", name, "up", "master", "bridge")
            _call("nsenter", "-t", str(first), "--net", "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            _call("nsenter", "-t", str(first), "--net", "ip", "link", "set", DEVICE, "up")
        for host in made:
            _wait_for(lambda host=host: host.run(["ssh", host.name, "true"]).returncode == 0)  # type: ignore[misc]
        yield tuple(made)


@contextlib.contextmanager
def _first_process(spaces: Sequence[str], words: Sequence[str]) -> Iterator[int]:
    """Number of the first process in new namespaces, which ends with this one."""
    library = ctypes.CDLL(None)
    outer = subprocess.Popen(
        ["unshare", "--fork", "--kill-child", *spaces, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: library.prctl(1, signal.SIGKILL, 0, 0, 0),
    )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    try:
        _wait_for(lambda: bool(children.read_text()))
        yield int(children.read_text())
    finally:
        outer.kill()  # and the kernel the first process, and with that all others
        outer.wait()


def _call(*words: str) -> Any:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SOON_S, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _wait_for(condition: Any) -> None:
    end = time.monotonic() + _SOON_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the hosts do not come up")
        time.sleep(0.01)
