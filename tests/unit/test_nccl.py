"""What of NCCL needs no ranks: who can use it, its numbers, calls that are queued, deaths, and CuPy's signatures."""

from __future__ import annotations

import inspect
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import nccl_double
import numpy as np
import pytest
import standin
from mpi4py import MPI

from mpishard.comm import nccl
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger
from mpishard.comm.nccl import NcclFacts, NcclLink, NcclQueue, _Queued, connect, new_id, starts, why_not

GOOD = [NcclFacts("", 2, "0000:17:00.0", 23203), NcclFacts("", 2, "0000:18:00.0", 23203)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"problem": "it is not there"}, "rank 1: it is not there"),
        ({"neighbours": 1}, "several nodes"),
        ({"device": "0000:17:00.0"}, "ranks 0 and 1 share GPU 0000:17:00.0"),
        ({"version": 22005}, "rank 0 has version 23203 of NCCL and rank 1 has 22005"),
    ],
)
def test_who_can_use_it(change: dict[str, Any], reason: str) -> None:
    found = why_not([GOOD[0], GOOD[1]._replace(**change)])
    assert reason in found if reason else not found


def test_the_number_of_a_communicator_in_both_forms_of_cupy() -> None:
    """CuPy 14 takes bytes, CuPy 13 a tuple of signed numbers."""
    number = bytes(range(64, 192))
    signed = tuple(np.frombuffer(number, np.int8).tolist())
    assert new_id(SimpleNamespace(get_unique_id=lambda: number)) == number
    assert new_id(SimpleNamespace(get_unique_id=lambda: signed)) == number

    def of_tuples(size: int, identity: object, rank: int) -> tuple[Any, ...]:
        if not isinstance(identity, tuple):
            raise TypeError("expected tuple")
        return size, identity, rank

    assert connect(SimpleNamespace(NcclCommunicator=of_tuples), 3, number, 1) == (3, signed, 1)
    assert connect(SimpleNamespace(NcclCommunicator=lambda *given: given), 3, number, 1) == (3, number, 1)


def test_where_runs_begin() -> None:
    assert starts([2, 0, 3]) == [0, 2, 2] and starts([4]) == [0]


def test_the_watchdog_sees_a_call_that_no_host_waits_for() -> None:
    ledger, over = Ledger(), {1: False, 2: False}
    first, second = (
        ledger.begin("data", number, "all_reduce", np.dtype(np.float32), 5, "", [0, 1]) for number in (1, 2)
    )
    ledger.note_queued(first, lambda: over[1])
    ledger.note_queued(second, lambda: over[2])
    assert ledger.waiting is not None and ledger.waiting.sequence == 1
    over[1] = True
    assert ledger.waiting is not None and ledger.waiting.sequence == 2
    over[2] = True
    assert ledger.waiting is None
    ledger.note_queued(first, lambda: False)
    assert len(ledger._queued) == 1
    ledger.active = second
    assert ledger.waiting.sequence == 2


def test_a_thread_that_only_asks_has_the_device_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread without a device CUDA would take the first one, and make a context there."""
    like, used = standin.zeros(3), []
    monkeypatch.setattr(standin.StandIn, "use_device", lambda self, number: used.append(number))
    monkeypatch.setattr(standin.StandIn, "device_number", lambda self, array: 2)
    queue = NcclQueue(None, None, 0, like)
    event = queue.queue(like, lambda: None)
    event.synchronize()
    assert queue.is_over(event) and not used
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(queue.is_over, event).result() and used == [2]


def test_a_device_that_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, event: object) -> bool:
        raise RuntimeError("cudaErrorIllegalAddress")

    like = standin.zeros(3)
    queue = NcclQueue(None, None, 0, like)
    event = queue.queue(like, lambda: None)
    monkeypatch.setattr(standin.StandIn, "is_over", fail)
    assert queue.is_over(event)


def test_calls_that_wait_for_a_copy_begin_before_communicators_are_freed() -> None:
    class Waiting:
        ledger, fields = Ledger(), (0.0, "data", 1, "send", np.dtype(np.float32), 5, "", None, 0, [0, 1], False)
        looks = 0

        def begin(self) -> bool:
            self.looks += 1
            return self.looks > 2

        def advance(self) -> bool:
            return True

    link, waiting = NcclLink(cast(Any, None), set()), []
    link._queues = [cast(Any, SimpleNamespace(free=lambda: waiting.append(len(DEFERRED.waiting))))]
    DEFERRED.add(Waiting())
    assert DEFERRED.waiting
    link.free()
    assert waiting == [0]


@pytest.mark.parametrize("dies", [False, True])
def test_the_host_waits_where_others_survive_a_death(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setattr(nccl, "heals_in_place", lambda: True)
    asked, done = [], []

    class Queue:
        aborted = False

        def is_over(self, event: object) -> bool:
            return len(asked) == 3 and not dies

        def let_wait(self, like: object, event: object, queued_on: object) -> None:
            done.append((event, queued_on))

    def ask() -> None:
        asked.append(True)
        if dies and len(asked) == 3:
            raise MPI.Exception(MPI.ERR_OTHER)

    def abort() -> None:
        queue.aborted = True

    queue = Queue()
    comm, link = SimpleNamespace(Iprobe=ask), SimpleNamespace(abort=abort)
    queued = _Queued(cast(Any, queue), cast(Any, comm), cast(Any, link), "event", np.zeros(1), "stream")
    if dies:
        for _ in range(2):  # and whoever waits again
            with pytest.raises(MPI.Exception):
                queued.Wait()
    else:
        queued.Wait()
    assert len(asked) == 3 and queue.aborted is dies and done == ([] if dies else [("event", "stream")])


def test_the_double_has_the_signatures_of_cupy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = pytest.importorskip("cupy.cuda.nccl")
    if not real.available:
        pytest.skip("there is no NCCL library")
    for name in ("get_version", "get_unique_id", "groupStart", "groupEnd"):
        assert callable(getattr(real, name))
    for name in ("UINT8", "INT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64"):
        assert getattr(real, f"NCCL_{name}") == getattr(nccl_double, f"NCCL_{name}")
    for name in ("SUM", "PROD", "MAX", "MIN"):
        assert getattr(real, f"NCCL_{name}") == getattr(nccl_double, f"NCCL_{name}")
    for name, own in vars(nccl_double.NcclCommunicator).items():
        if name.startswith("_"):
            continue
        text = getattr(real.NcclCommunicator, name).__doc__.partition("\n")[0]
        found = re.fullmatch(rf"NcclCommunicator\.{name}\((.*)\)", text)
        assert found is not None, text
        theirs = [each.split()[-1] for each in found[1].split(",")]
        assert theirs == list(inspect.signature(own).parameters), name
