"""Waiting asleep for what ranks tell each other, though some of them die."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from mpi4py import MPI

from mpishard.checkpoint import save as saving
from mpishard.comm.channel import Request
from mpishard.comm.ledger import Ledger


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
