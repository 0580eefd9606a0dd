"""How activations and their gradients go from stage to stage: as messages, or within the rank that runs all stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.comm.request import Request

Array = Any
ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


@dataclass
class Flight:
    """One micro-batch inside one chunk, from its forward to the end of its backward.

    Parameters
    ----------
    work : Workspace
        Its memory.
    sends : list of Request
        Messages from that memory that are under way.
    """

    work: Any
    sends: list[Request] = field(default_factory=list)

    def wait(self) -> None:
        """Wait for the messages."""
        for send in self.sends:
            send.wait()
        self.sends.clear()

    def abandon(self) -> None:
        """Give up the messages, after an exception."""
        for send in self.sends:
            send.abandon()
        self.sends.clear()


class Handover(Protocol):
    """Hands results of stages to the stages that need them; all stages here are virtual stages."""

    def begin(self) -> None:
        """A call of the pipeline begins."""

    def give_up(self) -> None:
        """Forget what an exception left; RuntimeError if a message of that call could reach the next one."""

    def finish(self) -> None:
        """Wait for the messages that are not those of a flight."""

    def share(self, losses: np.ndarray) -> np.ndarray:
        """The losses of the last stage, on all ranks."""

    def send_output(self, output: Array, stage: int, microbatch: int, flight: Flight) -> None:
        """Hand the output of a stage to the next one; it must stay as it is until the flight is over."""

    def send_gradient(self, dx: Array, stage: int, microbatch: int, flight: Flight) -> None:
        """Hand the gradient of a stage's input to the stage before; it may change after this call."""

    def receive(self, what: str, source: int, microbatch: int, shape: tuple[int, ...], flight: Flight) -> Array:
        """What the stage `source` has sent: `ACTIVATIONS` or `GRADIENTS`."""


class WithinRank:
    """The `Handover` of a rank that runs all stages."""

    def __init__(self) -> None:
        self._handed: dict[tuple[int, int], Array] = {}

    def begin(self) -> None:
        self._handed.clear()

    def give_up(self) -> None:
        self._handed.clear()

    def finish(self) -> None:
        pass

    def share(self, losses: np.ndarray) -> np.ndarray:
        return losses

    def send_output(self, output: Array, stage: int, microbatch: int, flight: Flight) -> None:
        self._handed[stage, microbatch] = output

    def send_gradient(self, dx: Array, stage: int, microbatch: int, flight: Flight) -> None:
        self._handed[stage, microbatch] = dx.copy()

    def receive(self, what: str, source: int, microbatch: int, shape: tuple[int, ...], flight: Flight) -> Array:
        return self._handed.pop((source, microbatch))


class Messages:
    """The `Handover` between ranks: sends never block.

    Parameters
    ----------
    axis : Axis
        Pipeline axis, of several ranks; rank r runs the stages ``r, r + axis.size, ...``.
    virtual_stages : int
        Number of them.
    wire_dtype : dtype or None
        Send in this dtype.
    """

    def __init__(self, axis: Axis, virtual_stages: int, wire_dtype: np.dtype | None) -> None:
        self._axis = axis
        self._virtual_stages = virtual_stages
        self._wire_dtype = wire_dtype
        self._bound = axis.times_bound
        # By stage of this rank: the last message to the stage before, and its memory.
        self._gradient_sends: dict[int, Request] = {}
        self._gradient_buffers: dict[int, Array] = {}

    def begin(self) -> None:
        self._bound = self._axis.times_bound
        self._gradient_sends.clear()

    def give_up(self) -> None:
        if self._axis.times_bound == self._bound:
            raise RuntimeError(
                "an earlier pass over this pipeline was left by an exception, and the next would take what is still on "
                "its way for its own; start the job again, or go on with another mesh, without freeing this one"
            )
        for send in self._gradient_sends.values():
            send.abandon()

    def finish(self) -> None:
        for send in self._gradient_sends.values():
            send.wait()

    def share(self, losses: np.ndarray) -> np.ndarray:
        return self._axis.broadcast(losses, root=self._axis.size - 1, label="loss")

    def send_output(self, output: Array, stage: int, microbatch: int, flight: Flight) -> None:
        staged = output
        if self._wire_dtype is not None:
            staged = flight.work.saved(f"sent {ACTIVATIONS}", output.shape, self._wire_dtype)
            staged[...] = output
        flight.sends.append(self._start_send(ACTIVATIONS, staged, stage, stage + 1, microbatch))

    def send_gradient(self, dx: Array, stage: int, microbatch: int, flight: Flight) -> None:
        # `dx` is valid only until the next backward, and the message may take longer.  So it is copied to a buffer of
        # the stage, after the stage's last message is sent.
        if stage in self._gradient_sends:
            self._gradient_sends[stage].wait()
        dtype = self._wire_dtype or dx.dtype
        buffer = self._gradient_buffers.get(stage)
        if buffer is None or buffer.size < dx.size or buffer.dtype != dtype:
            buffer = self._gradient_buffers[stage] = flight.work.module.empty(dx.size, dtype)
        staged = buffer[: dx.size].reshape(dx.shape)
        staged[...] = dx
        self._gradient_sends[stage] = self._start_send(GRADIENTS, staged, stage, stage - 1, microbatch)

    def receive(self, what: str, source: int, microbatch: int, shape: tuple[int, ...], flight: Flight) -> Array:
        work = flight.work
        received = work.save(f"received {what}", *shape)
        staged = received if self._wire_dtype is None else work.saved(f"wire {what}", shape, self._wire_dtype)
        self._axis.recv(staged, source % self._axis.size, self._tag(what, source, microbatch), label=what)
        if staged is not received:
            received[...] = staged
        return received

    def _start_send(self, what: str, staged: Array, source: int, target: int, microbatch: int) -> Request:
        tag = self._tag(what, source, microbatch)
        return self._axis.start_send(staged, target % self._axis.size, tag, label=what)

    def _tag(self, what: str, source: int, microbatch: int) -> int:
        """A tag that is unique among the messages of a step between two ranks, which may have several chunks."""
        return 2 * (microbatch * self._virtual_stages + source) + (what == ACTIVATIONS)
