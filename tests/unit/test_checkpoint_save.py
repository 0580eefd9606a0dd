"""When a checkpoint is saved, the copy of the state, and the writer that runs next to the training."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import standin
from hypothesis import given
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.checkpoint import save as saving
from mpishard.checkpoint.save import Snapshot
from mpishard.checkpoint.save_interval import Measured, Pace, save_interval
from mpishard.comm.channel import Request
from mpishard.comm.ledger import Ledger
from mpishard.layout.run_state import Shard
from mpishard.layout.tensors import Piece

# When saves are due that may take a share of the time, on clocks of the tests' own.


class Ranks:
    """Ranks with a clock each, which take steps and save when it is due."""

    def __init__(self, share, clocks):
        self.now = list(clocks)
        self.paces = [Pace(share, lambda rank=rank: self.now[rank]) for rank in range(len(clocks))]
        self.asked, self.saved = [], []

    def due(self, step):
        asks = {pace.asks(step) for pace in self.paces}
        assert len(asks) == 1  # else some would wait for the others
        if not asks.pop():
            return False
        self.asked.append(step)
        all_measured = [pace.measured(step) for pace in self.paces]
        answers = {pace.decide(step, all_measured) for pace in self.paces}
        assert len(answers) == 1
        return answers.pop()

    def step(self, step, seconds, stalls):
        """Take a step, and save if that is due, which keeps each rank for so long."""
        self.now = [now + seconds for now in self.now]
        if self.due(step):
            began = list(self.now)
            self.now = [now + stall for now, stall in zip(self.now, stalls, strict=True)]
            for pace, moment in zip(self.paces, began, strict=True):
                pace.note(step, moment)
            self.saved.append(step)
            assert not self.due(step)  # never twice


def test_the_first_save_follows_the_first_step_and_the_slowest_rank_counts():
    ranks = Ranks(0.25, [0.0, 100.0, -7.0])
    for step in range(1, 41):
        ranks.step(step, 1.0, [0.5, 1.5, 1.0])
    # After a save of 1.5 s at 0.25 six seconds have to pass: the next one is due in the fifth or sixth step, by the
    # clock of the rank that waited least.
    assert ranks.saved[0] == 1
    assert {later - earlier for earlier, later in zip(ranks.saved, ranks.saved[1:], strict=False)} == {6}


def test_saves_that_take_longer_are_fewer():
    ranks = Ranks(0.1, [0.0])
    for step in range(1, 201):
        ranks.step(step, 1.0, [0.4 if step < 50 else 2.0])
    gaps = [later - earlier for earlier, later in zip(ranks.saved, ranks.saved[1:], strict=False)]
    assert gaps[:12] == [4] * 12 and set(gaps[13:]) == {18}  # 18 steps and a save are 20 s


def test_ranks_ask_each_other_seldom():
    ranks = Ranks(0.02, [0.0, 5.0])
    for step in range(1, 15001):
        ranks.step(step, 1 / 64, [2.0, 1.0])  # every 100 s, 99 of them for steps on the rank that waits least
    assert ranks.saved == [1, 6337, 12673]
    assert len(ranks.asked) < 180


def test_slow_steps_are_noticed():
    ranks = Ranks(0.02, [0.0])
    for step in range(1, 1001):
        ranks.step(step, 0.01 if step < 300 else 1.0, [1.0])
    # Of the 50 s that had to pass, fast steps were 3; the ranks did not ask each other in between.
    assert 345 < ranks.saved[1] <= 402


@given(
    st.sampled_from([0.01, 0.02, 0.1, 0.5, 0.9]),
    st.lists(st.tuples(st.floats(1e-3, 2), st.floats(1e-3, 5), st.floats(1e-3, 5)), min_size=1, max_size=300),
)
def test_all_saves_but_the_last_take_no_more_than_the_share(share, history):
    ranks = Ranks(share, [0.0, 1000.0])
    stalls = []
    for step, (seconds, one, other) in enumerate(history, 1):
        before = len(ranks.saved)
        ranks.step(step, seconds, [one, other])
        if len(ranks.saved) > before:
            stalls.append(max(one, other))
    run = min(ranks.now[0], ranks.now[1] - 1000)
    assert ranks.saved[0] == 1
    assert sum(stalls[:-1]) <= share * run * (1 + 1e-9)


def test_other_ranks_than_before():
    """Those who were in no save follow those who were, and if nobody was, the next step is saved."""
    old, new = Pace(0.5, lambda: 10.0), Pace(0.5, lambda: 3.0)
    old.note(7, began=8.0)
    assert not old.asks(7) and new.asks(8)
    old.ranks_changed()
    new.ranks_changed()
    all_measured = [new.measured(8), old.measured(8)]
    assert all_measured == [None, Measured(stall=2.0, elapsed=2.0, step=0.0)]
    assert [pace.decide(8, all_measured) for pace in (new, old)] == [False, False]
    assert [pace.asks(9) for pace in (new, old)] == [True, True]
    assert new.decide(8, [None, None])


def test_another_run_of_the_loop_counts_its_steps_from_the_beginning():
    ranks = Ranks(0.25, [0.0])
    for step in range(1, 100):
        ranks.step(step, 1.0, [1.5])
    before, ranks.saved = ranks.saved[-1], []
    for step in range(1, 20):
        ranks.step(step, 1.0, [1.5])
    assert ranks.saved == [step for step in range(1, 20) if (99 - before + step) % 5 == 0]


@pytest.mark.parametrize("elapsed", [4.0, 9.0])
def test_exactly_due(elapsed):
    assert Pace(0.5).decide(3, [Measured(2.0, elapsed, 1.0)])
    assert not Pace(0.5).decide(3, [Measured(2.0, 3.999, 1.0)])


def test_steps_between_saves_need_no_communication():
    due = [step for step in range(10) if save_interval(3).due(step, None)]
    assert due == [3, 6, 9]
    assert not any(save_interval(None).due(step, None) for step in range(10))


@pytest.mark.parametrize("every", [0, -1, 1.0, 0.0, -0.5, float("nan"), True, "2"])
def test_neither_steps_nor_a_share(every):
    with pytest.raises(ValueError, match=f"every={every!r} must be a whole number of steps of at least 1, a share"):
        save_interval(every)


# Waiting asleep for what ranks tell each other, though some of them die.


class Lost:
    """The request of a message whose other end has died, as Open MPI 5 has it: `Get_status` never sees that."""

    def Get_status(self, status=None):
        return False

    def Test(self, status=None):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)

    Wait = Test


def pending(*requests):
    ledger = Ledger()
    call = ledger.begin("checkpoint", 1, "recv", np.dtype(np.uint8), 1, "", (0, 1))
    return Request(ledger, call, 0, requests, lambda: "arrived")


def test_a_message_of_the_dead_is_not_waited_for():
    raised = []

    def wait():
        try:
            saving.finish(pending(Lost()))
        except MPI.Exception as error:
            raised.append(error.Get_error_class())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(5)
    assert raised == [MPI.ERR_PROC_FAILED]


def test_of_several_messages_one_may_end_before_another():
    out, heard = np.arange(4.0), np.empty(4)
    comm = MPI.COMM_SELF
    receives = [comm.Irecv(heard[2:], 0, 2), comm.Irecv(heard[:2], 0, 1)]
    message = pending(*receives)
    assert not message.test()
    comm.Send(out[2:], 0, 2)
    while receives[0]:
        assert not message.test()
    comm.Send(out[:2], 0, 1)
    assert saving.finish(message) == "arrived" and message.wait() == "arrived"
    assert np.array_equal(heard, out)
    with pytest.raises(MPI.Exception):
        pending(Lost()).wait()


# What a save copies of device arrays: all of it after their computation, to memory that is kept.


def shards(place, factor):
    pieces = [Piece("a", ((0, 4),), 0), Piece("b", ((0, 3),), 6)]  # with a gap between them
    made = [place(np.arange(9.0)), place(np.arange(9, dtype=np.float32))]
    for each in made:
        each *= each.dtype.type(factor)  # on a device it is computed late
    return [Shard(f"kind {number}", each, tuple(pieces), tuple(pieces)) for number, each in enumerate(made)]


def content(parts):
    return {(part.kind, part.name): part.values.tolist() for part in parts}


def test_pinned_memory_of_another_size_goes_back_to_the_system(monkeypatch):
    released = []
    monkeypatch.setattr(standin.StandIn, "release_pinned", lambda self: released.append(True))
    snapshot, piece = Snapshot(), (Piece("a", ((0, 5),), 0),)
    for _ in range(2):
        snapshot.take(shards(standin.on_device, 2))
    assert not released
    snapshot.take([Shard("kind 0", standin.on_device(np.arange(5.0)), piece, piece)])
    assert released and list(snapshot._buffers) == ["kind 0"]


def test_device_arrays_are_saved_as_host_arrays_are():
    snapshot = Snapshot()
    kept = None
    for factor in (2, 3):
        given = shards(standin.on_device, factor)
        parts = snapshot.take(given)
        found = content(parts)
        for shard in given:
            shard.array.fill(0)
            arrays.ready(shard.array)
        assert content(parts) == found == content(Snapshot().take(shards(np.copy, factor)))
        addresses = {name: buffer.ctypes.data for name, buffer in snapshot._buffers.items()}
        assert kept in (None, addresses)
        kept = addresses
