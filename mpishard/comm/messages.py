"""How a message goes from one rank to another: on the array itself or a staged copy, in one call or in parts.

A message of device memory is staged as one piece, unless MPI takes it: its other end may be in memory of the host.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.channel import Channel
from mpishard.comm.deferred_request import DeferredRequest
from mpishard.comm.request import Fields, Request
from mpishard.comm.staged_request import Piece, StagedRequest
from mpishard.comm.staging import is_staged, stage_in, stage_out

Array = Any


class Messages:
    """The messages over one channel; `Communicator` says what the arguments are.  Nothing here is collective."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, buffer: Array, to: int, tag: int, label: str) -> Request:
        """Start to send."""
        channel = self._channel
        on_device = arrays.is_device(buffer)
        call = channel.begin("send", buffer, label, peer=to, deferred=on_device)
        if channel.matching is not None:
            channel.note_message("send", to, tag)

        def start(wire: Array) -> list[MPI.Request]:
            return [channel.comm.Isend(part, to, tag) for part in channel.parts(wire)]

        if on_device and self._is_staged(buffer):
            return self._staged(call, buffer.nbytes, buffer, Piece(buffer.size, _whole(buffer), [], start))
        wire = stage_out(buffer)
        given = channel.ledger, call, buffer.nbytes
        if on_device:
            return DeferredRequest(*given, lambda: start(wire), lambda: buffer, [buffer], [buffer])
        return Request(*given, start(wire), lambda: buffer)

    def recv(self, buffer: Array, source: int, tag: int, label: str) -> Request:
        """Start to receive."""
        channel = self._channel
        on_device = arrays.is_device(buffer)
        call = channel.begin("recv", buffer, label, peer=source, deferred=on_device)
        if channel.matching is not None:
            channel.note_message("recv", source, tag)
        statuses: list[MPI.Status] = []

        def check() -> None:
            got = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if got != buffer.nbytes:
                raise ValueError(f"rank {source} sent {got} bytes to a buffer of {buffer.nbytes}; sizes must agree")

        def start(wire: Array) -> list[MPI.Request]:
            requests = [channel.comm.Irecv(part, source, tag) for part in channel.parts(wire)]
            statuses.extend(MPI.Status() for _ in requests)
            return requests

        if on_device and self._is_staged(buffer):
            piece = Piece(buffer.size, [], _whole(buffer), start, lambda _: check(), statuses)
            return self._staged(call, 0, buffer, piece)
        wire = stage_out(buffer)

        def finish() -> Array:
            check()
            return stage_in(wire, buffer)

        if on_device:
            return DeferredRequest(channel.ledger, call, 0, lambda: start(wire), finish, [buffer], [buffer], statuses)
        return Request(channel.ledger, call, 0, start(wire), finish, statuses=statuses)

    def _is_staged(self, buffer: Array) -> bool:
        return is_staged(buffer, withheld=self._channel.withholds_device_buffers)

    def _staged(self, call: Fields, sent: int, buffer: Array, piece: Piece) -> StagedRequest:
        return StagedRequest(self._channel.ledger, call, sent, [piece], buffer, buffer, started=True, read=(buffer,))

    def wait(self, request: Request, peer: int, tag: int) -> Array:
        """Finish a message to or from `peer`; in debug mode raise if both ends wait in calls that do not match."""
        self._channel.wait_for_message(request.call, peer, tag, request.test)
        return request.wait()


def _whole(buffer: Array) -> list[tuple[Array, int]]:
    return [(buffer.reshape(-1), 0)]
