"""A process dies while survivors of another death make their communicator."""

from __future__ import annotations

from typing import cast

import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import Ledger
from mpishard.elastic.membership import Membership


class Survivors(MPI.Intracomm):
    """The communicator that a shrink has given; `hears` is what other ranks say in an agreement."""

    calls: list[str]
    hears: bool
    dies: bool

    def Agree(self, flag):
        self.calls.append(f"agree {flag}")
        return int(flag and self.hears)

    def Dup(self, info=MPI.INFO_NULL):
        self.calls.append("dup")
        if self.dies:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        self.hears = False  # another rank has noticed the death
        return MPI.COMM_SELF.Dup()

    def Revoke(self):
        self.calls.append("revoke")


class Broken(MPI.Intracomm):
    survivors: Survivors

    def Shrink(self):
        return self.survivors


@pytest.mark.parametrize("dies", [True, False])
def test_survivors_make_their_communicator_together_or_not_at_all(monkeypatch, dies):
    monkeypatch.setattr("mpishard.elastic.membership.heals_in_place", lambda: True)
    monkeypatch.setattr(Membership, "lost", False)
    broken, survivors = Broken(MPI.COMM_SELF), Survivors(MPI.COMM_SELF)
    survivors.calls, survivors.hears, survivors.dies = [], True, dies
    broken.survivors = survivors
    membership = object.__new__(Membership)
    membership.axis = Axis("crew", broken, Ledger(), later=MPI.COMM_SELF)
    with pytest.raises(MPI.Exception) as raised:
        membership.shrink()
    assert raised.value.Get_error_class() == MPI.ERR_PROC_FAILED
    # A rank that gives up wakes those that wait in the duplicate, and all learn that one has given up.
    assert survivors.calls == ["agree 1", "dup", *(["revoke", "agree 0"] if dies else ["agree 1"])]
    assert membership.axis.comm is broken


def test_an_axis_that_cannot_be_made_again_stays_as_it_was():
    survivors = Survivors(MPI.COMM_SELF)
    survivors.calls, survivors.dies = [], True
    axis = mpishard.Axis.single()
    before = axis.comm
    with pytest.raises(MPI.Exception):
        axis.rebind(cast(MPI.Intracomm, survivors))
    assert axis.comm is before
