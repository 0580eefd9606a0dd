"""Executes a pipeline schedule: each rank runs its program, and sends never block.

Before a forward action a rank waits for the activations of the previous stage, before a backward action for the
gradient of the next stage.  It starts to send the result of the action, and continues.  The simulator of
`mpishard.pipeline.schedule` has proven that such programs finish even if every send waits for its receiver.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.comm.channel import Request
from mpishard.parameters.flat import FlatParameters
from mpishard.pipeline.schedule import Action, Schedule, forward_only, make_schedule

Array = Any


ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


@dataclass
class MicrobatchInFlight:
    """One micro-batch inside one chunk, from its forward to the end of its backward: its memory and its messages.

    `sends` are messages from the memory `work` that are under way.
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


class LocalTransport:
    """Hands results of stages to the stages that need them, on a rank that runs all; all stages here are virtual."""

    def __init__(self) -> None:
        self._handed: dict[tuple[int, int], Array] = {}

    def begin(self) -> None:
        """Begin a call of the pipeline."""
        self._handed.clear()

    def abandon(self) -> None:
        """Forget what an exception left; RuntimeError if a message of that call could reach the next one."""
        self._handed.clear()

    def finish(self) -> None:
        """Wait for the messages that are not those of a flight."""

    def share(self, losses: np.ndarray) -> np.ndarray:
        """The losses of the last stage, on all ranks."""
        return losses

    def send_output(self, output: Array, stage: int, microbatch: int, flight: MicrobatchInFlight) -> None:
        """Hand the output of a stage to the next one; it must stay as it is until the flight is over."""
        self._handed[stage, microbatch] = output

    def send_gradient(self, dx: Array, stage: int, microbatch: int, flight: MicrobatchInFlight) -> None:
        """Hand the gradient of a stage's input to the stage before; it may change after this call."""
        self._handed[stage, microbatch] = dx.copy()

    def receive(
        self, what: str, source: int, microbatch: int, shape: tuple[int, ...], flight: MicrobatchInFlight
    ) -> Array:
        """The `ACTIVATIONS` or `GRADIENTS` that the stage `source` has sent."""
        return self._handed.pop((source, microbatch))


class PointToPointTransport:
    """What `LocalTransport` does, between ranks: sends never block.

    Rank r of the pipeline axis, which has several ranks, runs the virtual stages ``r, r + axis.size, ...``.  Messages
    are sent in `wire_dtype` if it is given.
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

    def abandon(self) -> None:
        if self._axis.times_bound == self._bound:
            raise RuntimeError(
                "an exception ended an earlier pipeline pass, and the next would receive its messages that are still "
                "in flight; restart the job, or create another mesh without freeing this one"
            )
        for send in self._gradient_sends.values():
            send.abandon()

    def finish(self) -> None:
        for send in self._gradient_sends.values():
            send.wait()

    def share(self, losses: np.ndarray) -> np.ndarray:
        return self._axis.broadcast(losses, root=self._axis.size - 1, label="loss")

    def send_output(self, output: Array, stage: int, microbatch: int, flight: MicrobatchInFlight) -> None:
        staged = output
        if self._wire_dtype is not None:
            staged = flight.work.saved(f"sent {ACTIVATIONS}", output.shape, self._wire_dtype)
            staged[...] = output
        flight.sends.append(self._start_send(ACTIVATIONS, staged, stage, stage + 1, microbatch))

    def send_gradient(self, dx: Array, stage: int, microbatch: int, flight: MicrobatchInFlight) -> None:
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

    def receive(
        self, what: str, source: int, microbatch: int, shape: tuple[int, ...], flight: MicrobatchInFlight
    ) -> Array:
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


Batch = Any


class PipelineChunk(Protocol):
    """The layers of one virtual stage, as a pipeline uses them; micro-batches may have 0 rows."""

    virtual_stage: int

    def input_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the input from the previous stage, and of its gradient; not called for stage 0."""

    def output_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the output to the next stage, and of its gradient; not called for the last stage."""

    def workspace(self) -> Any:
        """Memory for one more micro-batch in flight: a `mpishard.nn.Workspace`."""

    def forward(self, x: Array | None, work: Any, batch: Batch) -> Any:
        """Return the output, valid until the backward with `work` is done; the last stage returns its summed loss."""

    def infer(self, x: Array | None, work: Any, batch: Batch) -> Array:
        """Like `forward`, but the last stage returns its predictions."""

    def backward(self, dy: Array | None, work: Any, batch: Batch) -> Array | None:
        """Return the gradient of `x`, valid until the next call; None on stage 0.

        `dy` is None on the last stage; its content may be overwritten.
        """

    def input_gradient(self, dy: Array | None, work: Any, batch: Batch) -> Array | None:
        """The part of `backward` for which the previous stage waits."""

    def weight_gradient(self, work: Any) -> None:
        """The rest of `backward`."""


class Executed(NamedTuple):
    """An executed action, with its start and stop in seconds of `time.perf_counter`."""

    action: Action
    start: float
    stop: float


class Pipeline:
    """The chunks of one rank, run by a schedule.  All methods are collective over the pipeline axis.

    After an exception in one of them messages between ranks may be under way.  On several ranks all methods then raise
    RuntimeError, until the axis has other communicators (`Axis.rebind`).

    Chunk c runs the virtual stage ``c * axis.size + axis.rank``; `schedule` is one of
    `mpishard.pipeline.schedule.SCHEDULES`.  The pipeline marks the begin and end of the backward passes of a virtual
    stage in the gradients of `parameters`.  With `wire_dtype`, float16 or ml_dtypes.bfloat16, activations and their
    gradients are sent in it, to halve the bytes.

    `executed` has the actions of the last call, `peak_in_flight` its largest number of micro-batches in flight, over
    all chunks.
    """

    def __init__(
        self,
        axis: Axis,
        chunks: Sequence[PipelineChunk],
        schedule: str,
        parameters: FlatParameters,
        *,
        wire_dtype: Any = None,
    ) -> None:
        self.axis = axis
        self.chunks: tuple[PipelineChunk, ...] = tuple(chunks)
        self.schedule = schedule
        self.parameters = parameters
        self.virtual_stages: int = axis.size * len(self.chunks)
        self.wire_dtype: np.dtype | None = None if wire_dtype is None else np.dtype(wire_dtype)
        self.executed: list[Executed] = []
        self.peak_in_flight: int = 0
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._idle: list[list[MicrobatchInFlight]] = [[] for _ in self.chunks]
        self._flights: dict[tuple[int, int], MicrobatchInFlight] = {}
        self._transport: LocalTransport | PointToPointTransport = LocalTransport()
        if axis.size > 1:
            self._transport = PointToPointTransport(axis, self.virtual_stages, self.wire_dtype)
        self._losses: dict[int, SupportsFloat] = {}  # by micro-batch, on the last stage
        self._unfinished = False

    def train(self, batches: Sequence[Batch]) -> float:
        """Forward and backward of this data rank's micro-batches, some of which may be empty; returns the summed loss.

        The batches, and the loss, are the same on all stages.
        """
        self._train(batches)
        return self._loss_sum()

    def train_each(self, batches: Sequence[Batch]) -> list[float]:
        """Like `train`, with the loss of each micro-batch."""
        self._train(batches)
        return self._losses_of(len(batches))

    def _train(self, batches: Sequence[Batch]) -> None:
        schedule = self._schedule(self.schedule, len(batches))
        program = schedule.programs[self.axis.rank]
        ends = {action.chunk: index for index, action in enumerate(program) if action.kind in "BW"}
        gradients = self.parameters.gradients
        self._begin()
        for index, action in enumerate(program):
            start = time.perf_counter()
            chunk, batch = self.chunks[action.chunk], batches[action.microbatch]
            if action.kind == "F":
                self._forward(action, batch)
            elif action.kind == "I":
                gradients.begin_input_gradient(chunk.virtual_stage)
                self._backward(action, batch, chunk.input_gradient)
                gradients.end_input_gradient()
            else:
                gradients.begin_virtual_stage(chunk.virtual_stage, index == ends[action.chunk])
                if action.kind == "B":
                    self._backward(action, batch, chunk.backward)
                else:
                    chunk.weight_gradient(self._flights[action.chunk, action.microbatch].work)
                self._release(action)
                gradients.end_virtual_stage(chunk.virtual_stage)
            self.executed.append(Executed(action, start, time.perf_counter()))
            self.axis.ledger.note(f"{action.kind}{action.microbatch} stage {chunk.virtual_stage}", action.kind, start)
        self._finish()

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Forward of this data rank's micro-batches; returns their summed loss.  Both are the same on all stages."""
        self._evaluate(batches)
        return self._loss_sum()

    def evaluate_each(self, batches: Sequence[Batch]) -> list[float]:
        """Like `evaluate`, with the loss of each micro-batch."""
        self._evaluate(batches)
        return self._losses_of(len(batches))

    def _evaluate(self, batches: Sequence[Batch]) -> None:
        program = self._schedule("", len(batches)).programs[self.axis.rank]
        self._begin()
        for action in program:
            self._forward(action, batches[action.microbatch])
            self._release(action)
        self._finish()

    def infer(self, batch: Batch) -> Array | None:
        """The predictions for one batch, the same on all stages, on the ranks of the last stage; None on others."""
        self._begin()
        prediction = None
        for number in range(len(self.chunks)):
            action = Action("F", 0, number)
            prediction = self._forward(action, batch, infer=True)
            self._release(action)
        self._finish()
        return prediction if self.axis.rank == self.axis.size - 1 else None

    def _schedule(self, name: str, microbatches: int) -> Schedule:
        known = self._schedules.get((name, microbatches))
        if known is None:
            sizes = self.axis.size, microbatches, len(self.chunks)
            known = make_schedule(name, *sizes) if name else forward_only(*sizes)
            self._schedules[name, microbatches] = known
        return known

    def _begin(self) -> None:
        if self._unfinished:  # an exception has ended an earlier call
            self._abandon()
        self._transport.begin()
        self._unfinished = True
        self.executed = []
        self.peak_in_flight = 0
        self._losses = {}

    def _abandon(self) -> None:
        """Take back all memory after an exception, if no message of the old call can reach a new one."""
        self._transport.abandon()
        for (chunk, _), flight in self._flights.items():
            self._idle[chunk].append(flight)
        self._flights.clear()
        for idle in self._idle:
            for flight in idle:
                flight.abandon()

    def _finish(self) -> None:
        self._transport.finish()
        for idle in self._idle:
            for flight in idle:
                flight.wait()
        self._unfinished = False

    def _losses_of(self, microbatches: int) -> list[float]:
        """The loss of each micro-batch, on all stages."""
        losses = np.array([float(self._losses.get(number, 0.0)) for number in range(microbatches)], np.float64)
        found: list[float] = self._transport.share(losses).tolist()
        return found

    def _loss_sum(self) -> float:
        """The loss of all micro-batches, on all stages."""
        total = 0.0
        for loss in self._losses.values():  # one by one: the `sum` of Python 3.12 rounds in another way
            total += float(loss)
        return float(self._transport.share(np.array([total]))[0])

    def _forward(self, action: Action, batch: Batch, infer: bool = False) -> Array:
        chunk = self.chunks[action.chunk]
        flight = self._idle_flight(action.chunk) or MicrobatchInFlight(chunk.workspace())
        self._flights[action.chunk, action.microbatch] = flight
        self.peak_in_flight = max(self.peak_in_flight, len(self._flights))
        x = None
        if chunk.virtual_stage > 0:
            shape = chunk.input_shape(batch)
            x = self._transport.receive(ACTIVATIONS, chunk.virtual_stage - 1, action.microbatch, shape, flight)
        output = (chunk.infer if infer else chunk.forward)(x, flight.work, batch)
        if chunk.virtual_stage == self.virtual_stages - 1:
            if not infer:
                self._losses[action.microbatch] = output
        else:
            self._transport.send_output(output, chunk.virtual_stage, action.microbatch, flight)
        return output

    def _backward(self, action: Action, batch: Batch, compute: Any) -> None:
        chunk = self.chunks[action.chunk]
        flight = self._flights[action.chunk, action.microbatch]
        dy = None
        if chunk.virtual_stage < self.virtual_stages - 1:
            shape = chunk.output_shape(batch)
            dy = self._transport.receive(GRADIENTS, chunk.virtual_stage + 1, action.microbatch, shape, flight)
        dx = compute(dy, flight.work, batch)
        if chunk.virtual_stage > 0:
            self._transport.send_gradient(dx, chunk.virtual_stage, action.microbatch, flight)

    def _idle_flight(self, chunk: int) -> MicrobatchInFlight | None:
        """The memory of a finished micro-batch, or None if new memory is needed."""
        idle = self._idle[chunk]
        if not idle:
            return None
        if not idle[-1].sends:
            return idle.pop()
        # In forward passes alone outputs may still be under way: with two buffers in turn the next pass can start.
        if len(idle) == 1:
            return None
        flight = idle.pop(0)
        flight.wait()
        return flight

    def _release(self, action: Action) -> None:
        flight = self._flights.pop((action.chunk, action.microbatch))
        if action.kind != "F":
            flight.wait()
        self._idle[action.chunk].append(flight)
