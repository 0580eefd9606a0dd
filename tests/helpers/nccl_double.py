"""A double of ``cupy.cuda.nccl`` on the memory of the stand-in, over MPI.

It has the functions of CuPy 14 that mpishard calls, with their signatures, and takes raw addresses and streams.  Calls
are done when their stream is waited for, and no sooner; a device does them in the order in which they were queued,
whatever their streams.  It refuses what NCCL refuses, and what would hang in it: ranks that share a device, a
communicator that was destroyed, calls that do not match.  Sums begin with the last rank, unlike those of MPI.

`installed` puts it in place.  While it is in place the device goes on whenever this rank makes a call of MPI.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import standin
from mpi4py import MPI

from mpishard.comm.ledger import Ledger

available = True

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = 0, 1, 2, 3, 4, 5
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = 6, 7, 8
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = 0, 1, 2, 3
_DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
_OPS: list[Callable[..., Any]] = [np.add, np.multiply, np.maximum, np.minimum]
_ID_BYTES = 128


class NcclError(RuntimeError):
    """What a call of NCCL that fails raises."""


@dataclass
class State:
    """Of the double in this process."""

    version: int = 23203
    alive: int = 0  # communicators that were made and neither destroyed nor aborted
    ids: int = 0
    fails: str = ""  # the call that fails on this rank
    wrong: str = ""  # the call that gives wrong values on this rank
    goes_on: bool = True  # whether the device does its work while this rank is in calls of MPI
    world: MPI.Intracomm | None = None


state = State()
calls: list[tuple[str, int, str]] = []  # that were queued: name, elements, dtype
_queued: list[tuple[NcclCommunicator, standin.Stream, int]] = []  # and how far the streams must run
_group: list[_Call] | None = None
# What the messages of that group read and write.
_sent: list[standin.DeviceArray] = []
_received: list[standin.DeviceArray] = []


@dataclass
class _Call:
    """A call, to be done later: `facts` must be alike on all ranks, `start` begins it and returns what ends it."""

    communicator: NcclCommunicator
    stream: int
    name: str
    facts: tuple[Any, ...]
    start: Callable[[], Callable[[], None]]


@contextlib.contextmanager
def installed() -> Iterator[State]:
    """The stand-in has this NCCL.  Collective over MPI.COMM_WORLD."""
    before, begin = standin.nccl_module, Ledger.begin
    standin.nccl_module = sys.modules[__name__]
    state.__init__(world=MPI.COMM_WORLD.Dup())  # type: ignore[misc]
    calls.clear()

    def begin_later(ledger: Ledger, *arguments: Any) -> Any:
        if state.goes_on:
            run()
        return begin(ledger, *arguments)

    Ledger.begin = begin_later  # type: ignore[method-assign,assignment]
    try:
        yield state
        run()
    finally:
        Ledger.begin = begin  # type: ignore[method-assign]
        standin.nccl_module = before
        _queued.clear()
        if state.world is not None:
            state.world.Free()


def run(most: int | None = None) -> None:
    """Do what is queued, in order: all of it, or so many calls."""
    while _queued and (most is None or most > 0):
        _, stream, number = _queued[0]
        most = None if most is None else most - 1
        stream.run_to(number)


def get_version() -> int:
    return state.version


def get_unique_id() -> bytes:
    _fail_if("get_unique_id")
    assert state.world is not None
    state.ids += 1
    head = np.array([state.world.rank, state.ids], np.int64).tobytes()
    return head + os.urandom(_ID_BYTES - len(head))


def groupStart() -> None:
    global _group
    assert _group is None
    _group = []
    _sent.clear()
    _received.clear()


def groupEnd() -> None:
    global _group
    assert _group is not None
    group, _group = _group, None
    for source in _sent:
        for target in _received:
            _refuse_overlap(source, target, inside=-1)
    if group:
        _enqueue(group)


def _fail_if(name: str) -> None:
    if state.fails == name:
        raise NcclError(f"NCCL_ERROR_SYSTEM_ERROR: {name} was told to fail")


class NcclCommunicator:
    def __init__(self, ndev: int, commId: bytes, rank: int, config: object = None) -> None:
        if not isinstance(commId, bytes):
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        assert len(commId) == _ID_BYTES and config is None and state.world is not None
        self._rank, self._size = rank, ndev
        self._comm, devices = _meet(state.world, ndev, commId, rank)
        self._open = self._comm is not None
        if len(set(devices)) < ndev:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
        if self._comm is None:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: another rank has failed")
        state.alive += 1

    def destroy(self) -> None:
        if self._open:
            assert all(each is not self for each, *_ in _queued), "destroyed while in use"
            self._close()
            assert self._comm is not None
            self._comm.Free()

    def abort(self) -> None:
        if self._open:
            self._close()  # the MPI communicator stays: its other ranks may be dead

    def _close(self) -> None:
        self._open = False
        state.alive -= 1

    def check_async_error(self) -> None:
        _fail_if("check_async_error")
        self._check()

    def _check(self) -> None:
        if not self._open:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: the communicator was destroyed")

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        source, target = _at(sendbuf, count, datatype), _at(recvbuf, count, datatype)
        _refuse_overlap(source, target, inside=sendbuf)
        work = self._work(source, target, lambda data: self._reduced(data, op))
        self._add("allReduce", count, datatype, stream, work, op)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        source, target = _at(sendbuf, recvcount * self._size, datatype), _at(recvbuf, recvcount, datatype)
        _refuse_overlap(source, target, inside=sendbuf + self._rank * target.nbytes)
        work = self._work(source, target, lambda data: self._reduced(data, op).reshape(self._size, -1)[self._rank])
        self._add("reduceScatter", recvcount, datatype, stream, work, op)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        source, target = _at(sendbuf, count, datatype), _at(recvbuf, count, datatype)
        _refuse_overlap(source, target, inside=sendbuf)
        work = self._work(source, target if self._rank == root else None, lambda data: self._reduced(data, op))
        self._add("reduce", count, datatype, stream, work, op, root)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        source, target = _at(sendbuf, count, datatype), _at(recvbuf, count * self._size, datatype)
        _refuse_overlap(target, source, inside=recvbuf + self._rank * source.nbytes)
        work = self._work(source, target, lambda data: self._gathered(data).reshape(-1))
        self._add("allGather", count, datatype, stream, work)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        source, target = _at(sendbuff, count, datatype), _at(recvbuff, count, datatype)
        _refuse_overlap(source, target, inside=sendbuff)
        work = self._work(source, target, lambda data: self._gathered(data)[root])
        self._add("broadcast", count, datatype, stream, work, root)

    def _work(self, source: Any, target: Any, result: Callable[[np.ndarray], np.ndarray]) -> Any:
        """What begins a collective, and with it ends it: `result` of `source`, in `target` if there is one."""

        def start() -> Callable[[], None]:
            values = result(_read(source))
            if target is not None:
                _write(target, values)
            return lambda: None

        return start

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        source = _at(sendbuf, count, datatype)

        def start() -> Callable[[], None]:
            assert self._comm is not None
            data = _read(source)
            request = self._comm.Isend(data, peer)
            return lambda: request.Wait() and data  # which lives until then

        self._add("send", count, datatype, stream, start)
        _sent.append(source)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        target = _at(recvbuf, count, datatype)
        _received.append(target)

        def start() -> Callable[[], None]:
            assert self._comm is not None
            data = np.empty(count, target.dtype)
            request, status = self._comm.Irecv(data, peer), MPI.Status()

            def end() -> None:
                request.Wait(status)
                assert status.Get_count(MPI.BYTE) == data.nbytes, "a message of another length"
                _write(target, data)

            return end

        self._add("recv", count, datatype, stream, start)

    def _add(self, name: str, count: int, datatype: int, stream: int, start: Any, *alike: int) -> None:
        _fail_if(name)
        self._check()
        assert count > 0, "mpishard makes no call of nothing"
        calls.append((name, count, _DTYPES[datatype]))
        facts = () if name in ("send", "recv") else (name, count, datatype, *alike)
        call = _Call(self, stream, name, facts, start)
        if _group is None:
            _enqueue([call])
        else:
            _group.append(call)

    def _gathered(self, data: np.ndarray) -> np.ndarray:
        assert self._comm is not None
        everything = np.empty((self._size, data.size), data.dtype)
        self._comm.Allgather(data.view(np.uint8), everything.view(np.uint8))
        return everything

    def _reduced(self, data: np.ndarray, op: int) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return functools.reduce(_OPS[op], self._gathered(data)[::-1])


def _enqueue(group: list[_Call]) -> None:
    """Queue calls as one."""
    ((communicator, number),) = {(each.communicator, each.stream) for each in group}
    stream = standin.Stream.by_ptr[number]

    def work() -> None:
        while _queued[0] != (communicator, stream, place):  # a device does what was queued first
            run(1)
        _queued.pop(0)
        if not communicator._open:  # aborted: its kernels end without a result
            return
        assert communicator._comm is not None
        facts = [each.facts for each in group if each.facts]
        if facts:  # of messages only the two ranks take part
            said = communicator._comm.allgather(facts)
            assert all(each == said[0] for each in said), f"the ranks make calls that do not match: {said}"
        for end in [each.start() for each in group]:
            end()
        if group[0].name == state.wrong:
            _spoil()

    stream.launch(work, waits_for_ranks=True)
    place = stream.queued
    _queued.append((communicator, stream, place))


_last_write: list[tuple[standin.DeviceArray, np.ndarray]] = []


def _spoil() -> None:
    target, values = _last_write[-1]
    _write(target, values + values.dtype.type(1))


def _meet(
    world: MPI.Intracomm, size: int, identity: bytes, rank: int
) -> tuple[MPI.Intracomm | None, list[tuple[str, str]]]:
    """A communicator of the ranks that come with one number, and the device of each; None if some rank fails."""
    root, tag = (int(each) for each in np.frombuffer(identity[:16], np.int64))
    own = (rank, world.rank, MPI.Get_processor_name(), standin.device_name, state.fails == "NcclCommunicator")
    if world.rank == root:
        came = sorted([own, *(world.recv(tag=2 * tag) for _ in range(size - 1))])
        for _, other, *_ in came:
            if other != root:
                world.send(came, other, 2 * tag + 1)
    else:
        world.send(own, root, 2 * tag)
        came = world.recv(source=root, tag=2 * tag + 1)
    assert [each[0] for each in came] == list(range(size))
    devices = [(node, device) for _, _, node, device, _ in came]
    _fail_if("NcclCommunicator")
    if any(fails for *_, fails in came) or len(set(devices)) < size:
        return None, devices
    return world.Create_group(world.group.Incl([each[1] for each in came]), tag), devices


def _at(address: int, count: int, datatype: int) -> standin.DeviceArray:
    """The array at an address.  The call holds its memory, as a pool of CuPy gives it to later work only."""
    return standin.array_at(address, (count,), _DTYPES[datatype])


def _read(array: standin.DeviceArray) -> np.ndarray:
    with array.opened() as host:
        return host.copy()


def _write(array: standin.DeviceArray, values: np.ndarray) -> None:
    with array.opened() as host:
        host[...] = values
    _last_write[:] = [(array, values)]


def _refuse_overlap(one: standin.DeviceArray, other: standin.DeviceArray, *, inside: int) -> None:
    """Two buffers may overlap in place only, where the second begins at `inside`."""
    at, other_at = one._host.ctypes.data, other._host.ctypes.data
    overlap = max(at, other_at) < min(at + one.nbytes, other_at + other.nbytes)
    assert not overlap or other_at == inside, "buffers overlap, and not in place"
