"""Waiting asleep for what ranks tell each other, though some of them die."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpishard.checkpoint import polling


class Lost:
    """A message of which MPI never says that it has failed, unless it is waited for."""

    def test(self):
        return False

    def wait(self):
        raise MPI.Exception(MPI.ERR_OTHER)


def test_a_message_on_a_revoked_axis_is_not_waited_for():
    axis = SimpleNamespace(revoked=False)
    ended = threading.Event()

    def wait():
        with pytest.raises(MPI.Exception):
            polling.finish(axis, Lost())
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not ended.wait(0.1)
    axis.revoked = True
    assert ended.wait(5)
