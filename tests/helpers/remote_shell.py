"""A remote shell without keys and accounts, for hosts that are namespaces.

    python remote_shell.py serve                   in a host: run what it is sent
    python remote_shell.py [OPTIONS] HOST COMMAND  elsewhere, in the place of ssh

It goes through the network as ssh does: a host that is cut off does not answer, what runs there goes on, and nothing of
it descends from who called.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from typing import IO, NoReturn

PORT = 22
_OUTPUT, _ERRORS, _ENDED = 1, 2, 3
_FRAME = struct.Struct("!BI")
_BLOCK = 65536


def serve() -> NoReturn:
    """Run commands for ever; this is the first process of its host, which all orphans come to."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.create_server(("", PORT), backlog=64) as server:
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                server.close()
                _run(connection)
                os._exit(0)
            connection.close()


def _run(connection: socket.socket) -> None:
    """One command, with its input and output over the connection."""
    (size,) = struct.unpack("!I", _receive(connection, 4))
    command = _receive(connection, size).decode()
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    sending = threading.Lock()

    def pass_on(kind: int, stream: IO[bytes]) -> None:
        while block := os.read(stream.fileno(), _BLOCK):
            try:
                with sending:
                    connection.sendall(_FRAME.pack(kind, len(block)) + block)
            except OSError:  # who called has gone
                break
        stream.close()

    def feed(stream: IO[bytes]) -> None:
        try:
            while block := connection.recv(_BLOCK):
                stream.write(block)
                stream.flush()
        except OSError:
            pass
        stream.close()

    threading.Thread(target=feed, args=(process.stdin,), daemon=True).start()
    pumps = [
        threading.Thread(target=pass_on, args=each) for each in ((_OUTPUT, process.stdout), (_ERRORS, process.stderr))
    ]
    for pump in pumps:
        pump.start()
    for pump in pumps:
        pump.join()
    code = process.wait()
    try:
        connection.sendall(_FRAME.pack(_ENDED, code if code >= 0 else 128 - code))
    except OSError:
        pass


def call(arguments: list[str]) -> int:
    """What ``ssh`` does with these arguments; of its options only ConnectTimeout counts."""
    limit: float | None = None
    words = list(arguments)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-o", "-l", "-p", "-i", "-F"):
            name, _, value = words.pop(0).partition("=")
            if name == "ConnectTimeout":
                limit = float(value)
    host, *command = words
    try:
        connection = socket.create_connection((host, PORT), limit)
    except OSError as error:
        print(f"{host}: {error}", file=sys.stderr)
        return 255
    connection.settimeout(None)
    text = " ".join(command).encode()
    connection.sendall(struct.pack("!I", len(text)) + text)
    threading.Thread(target=_feed, args=(connection,), daemon=True).start()
    try:
        while True:
            kind, size = _FRAME.unpack(_receive(connection, _FRAME.size))
            if kind == _ENDED:
                return int(size)
            (sys.stdout if kind == _OUTPUT else sys.stderr).buffer.write(_receive(connection, size))
            (sys.stdout if kind == _OUTPUT else sys.stderr).buffer.flush()
    except OSError as error:
        print(f"{host}: {error}", file=sys.stderr)
        return 255


def _feed(connection: socket.socket) -> None:
    try:
        while block := os.read(0, _BLOCK):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        block = connection.recv(size - len(found))
        if not block:
            raise ConnectionError("the connection was closed")
        found += block
    return bytes(found)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    status = call(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the thread may be reading standard input
