"""Hosts on one machine, each a set of namespaces: processes, network, name, memory files and mounts of its own.

    with hosts(3) as (first, second, third):
        first.run(["ssh", second.name, "hostname"])
        third.cut()

They are joined by a switch, which is a namespace too, so that several such sets do not see each other, and they are
reached by ``ssh`` (`remote_shell`) over that network.  They share the file system but for ``/dev/shm``, where the
temporary files of a host are.  With ``hosts(2, rate_mbit=100, delay_ms=5)`` what each host sends goes over a slow line:
a process in the switch passes the frames on, since not every kernel has what ``tc`` needs to delay them.

Nothing is left of them afterwards: the kernel ends all that is in a namespace with its first process, and that one with
whoever made the hosts.  Needs root, and Linux with ``unshare``, ``nsenter`` and ``ip``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

DEVICE = "eth0"
_SHELL = Path(__file__).resolve().with_name("remote_shell.py")
_SOON_S = 120.0
# Of <linux/if_packet.h> and <asm/socket.h>, which `socket` does not name.
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING, _RECEIVE_BUFFER = 263, 15, 23, 33
_ALL_PROTOCOLS = 3
_HEADER = 10  # bytes in front of each frame that say how the kernel shall finish it
_LARGEST = 2**17  # bytes; the kernel hands over up to 64 KiB of one connection as one frame
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

    def repair(self) -> None:
        """Bring its link up again."""
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        _call("nsenter", "-t", str(self._switch), "--net", "ip", "link", "set", self.name, state)


@contextlib.contextmanager
def hosts(count: int, *, rate_mbit: float | None = None, delay_ms: float = 0.0) -> Iterator[tuple[Host, ...]]:
    """So many hosts, named ``h1``, ``h2`` and so on, that reach each other.

    Parameters
    ----------
    rate_mbit : float, optional
        What each host can send, in 10**6 bits a second; what it receives has no limit of its own, so that between two
        hosts each direction has this rate.  Default: as fast as the machine can.
    delay_ms : float
        From when the last bit of a frame is sent to when it arrives; between two hosts a ping takes twice that.  Only
        with a rate.  What has to wait for the line waits as long as it takes: nothing is lost.
    """
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
            joined = [] if rate_mbit else ["master", "bridge"]
            _call("nsenter", "-t", str(switch), "--net", "ip", "link", "set", name, "up", *joined)
            _call("nsenter", "-t", str(first), "--net", "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            _call("nsenter", "-t", str(first), "--net", "ip", "link", "set", DEVICE, "up")
        if rate_mbit:
            carrier = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(rate_mbit), str(delay_ms), *names]
            stack.enter_context(_process(["nsenter", "-t", str(switch), "--net", *carrier]))
        for host in made:
            _wait_for(lambda host=host: made[0].run(["ssh", host.name, "true"]).returncode == 0)  # type: ignore[misc]
        yield tuple(made)


def carry(rate_mbit: float, delay_ms: float, devices: Sequence[str]) -> NoReturn:
    """Pass on what arrives at each device to all others, at a limited rate and with a delay, for ever.

    Frames stay as the kernel makes them, so that a large one, which a real device would cut up, is one frame here; its
    last bit arrives at the same time.
    """
    # A line does not wait for the ranks to leave it a core.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    queues: dict[socket.socket, deque[tuple[float, bytes]]] = {}
    for name in devices:
        device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        device.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
        device.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        device.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, 2**26)
        device.bind((name, _ALL_PROTOCOLS))
        queues[device] = deque()
    free = dict.fromkeys(queues, 0.0)  # when the line of each has sent what came before
    bit_s, delay_s = 1e-6 / rate_mbit, 1e-3 * delay_ms
    while True:
        due = min((queue[0][0] for queue in queues.values() if queue), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select(list(queues), [], [], wait)
        now = time.monotonic()
        for device in ready:
            with contextlib.suppress(OSError):  # of a link that was taken down
                frame = device.recv(_LARGEST)
                free[device] = max(free[device], now) + 8 * (len(frame) - _HEADER) * bit_s
                queues[device].append((free[device] + delay_s, frame))
        for device, queue in queues.items():
            while queue and queue[0][0] <= now:
                _, frame = queue.popleft()
                for other in queues.keys() - {device}:
                    with contextlib.suppress(OSError):
                        other.send(frame)


@contextlib.contextmanager
def _first_process(spaces: Sequence[str], words: Sequence[str]) -> Iterator[int]:
    """Number of the first process in new namespaces, which ends with this one, and with it all others in them."""
    with _process(["unshare", "--fork", "--kill-child", *spaces, *words]) as outer:
        children = Path(f"/proc/{outer}/task/{outer}/children")
        _wait_for(lambda: bool(children.read_text()))
        yield int(children.read_text())


@contextlib.contextmanager
def _process(words: Sequence[str]) -> Iterator[int]:
    """Number of a process that ends with this one."""
    library = ctypes.CDLL(None)
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: library.prctl(1, signal.SIGKILL, 0, 0, 0),
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


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


if __name__ == "__main__":
    carry(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
