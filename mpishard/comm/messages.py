"""How a message goes from one rank to another: on the array itself or a staged copy, in one call or in parts."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpishard.comm.channel import Channel
from mpishard.comm.request import Request
from mpishard.comm.staging import stage_in, stage_out

Array = Any


class Messages:
    """The messages over one channel; `Communicator` says what the arguments are.  Nothing here is collective."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, buffer: Array, to: int, tag: int, label: str) -> Request:
        """Start to send."""
        channel = self._channel
        call = channel.begin("send", buffer, label, peer=to)
        if channel.matching is not None:
            channel.note_message("send", to, tag)
        requests = [channel.comm.Isend(part, to, tag) for part in channel.parts(stage_out(buffer))]
        return Request(channel.ledger, call, buffer.nbytes, requests, lambda: buffer)

    def recv(self, buffer: Array, source: int, tag: int, label: str) -> Request:
        """Start to receive."""
        channel = self._channel
        call = channel.begin("recv", buffer, label, peer=source)
        if channel.matching is not None:
            channel.note_message("recv", source, tag)
        staged = stage_out(buffer, reads=False)
        requests = [channel.comm.Irecv(part, source, tag) for part in channel.parts(staged)]
        statuses = [MPI.Status() for _ in requests]

        def finish() -> Array:
            got = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if got != buffer.nbytes:
                raise ValueError(f"rank {source} sent {got} bytes to a buffer of {buffer.nbytes}; sizes must agree")
            return stage_in(staged, buffer)

        return Request(channel.ledger, call, 0, requests, finish, statuses=statuses)

    def wait(self, request: Request, peer: int, tag: int) -> Array:
        """Finish a message to or from `peer`; in debug mode raise if both ends wait in calls that do not match."""
        self._channel.wait_for_message(request.call, peer, tag, request.test)
        return request.wait()
