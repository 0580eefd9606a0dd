"""Calls of device memory that are abandoned or fail leave nothing behind.

A trial of device memory that fails on one rank decides for all.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import standin
from buffers import late, read
from mpi4py import MPI

import mpishard
from mpishard.backend import array as arrays
from mpishard.backend import streams
from mpishard.comm import capabilities, staging
from mpishard.comm.deferred import DEFERRED


@pytest.mark.usefixtures("small_pieces")
def test_abandoned_calls_leave_nothing_behind(mesh, standin_kind):
    axis = mesh.data
    values = [late(np.ones(30), standin_kind) for _ in range(3)]
    refs = [weakref.ref(each._memory) for each in values]
    pending = [axis.start_all_reduce(each) for each in values]
    pending[0].test()
    for each in reversed(pending):
        each.abandon()
        each.abandon()
    assert not DEFERRED.waiting and not DEFERRED._begun
    del values, pending, each
    gc.collect()
    standin.current_stream().synchronize()
    assert all(ref() is None for ref in refs)
    assert (read(axis.start_all_reduce(late(np.ones(30), standin_kind)).wait()) == axis.size).all()


class Revoked:
    """A communicator after `Revoke`."""

    def __getattr__(self, name):
        raise MPI.Exception(MPI.ERR_OTHER)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("then", ["wait", "abandon"])
def test_calls_on_a_revoked_axis_fail_alone(mesh, monkeypatch, then, standin_kind):
    """Other calls that begin them raise nothing."""
    axis = mesh.data
    with monkeypatch.context() as patch:
        for owner in (axis._started, axis._started._staged):
            patch.setattr(owner, "_comm", Revoked())
        pending = axis.start_all_reduce(late(np.ones(30), standin_kind))
        mesh.world.barrier()
        assert not DEFERRED.waiting and mesh.ledger.active is None
    if then == "wait":
        with pytest.raises(MPI.Exception):
            pending.test()
        with pytest.raises(MPI.Exception):
            pending.wait()
    pending.abandon()
    assert mesh.ledger.active is None and not DEFERRED._begun
    assert (read(axis.all_reduce(late(np.ones(30), standin_kind))) == axis.size).all()


@pytest.mark.usefixtures("small_pieces")
def test_a_blocking_call_that_fails_leaves_no_copy_under_way(mesh, monkeypatch):
    axis, values = mesh.data, late(np.ones(30))
    pool = streams.copy_streams(values).pinned
    axis.all_reduce(values)
    standin.current_stream().synchronize()
    kept = pool.kept_bytes
    with monkeypatch.context() as patch:
        patch.setattr(axis._blocking._staged, "_comm", Revoked())
        with pytest.raises(MPI.Exception):
            axis.all_reduce(values)
    assert not streams.copy_streams(values).out.queue and pool.kept_bytes == kept
    assert mesh.ledger.active is None


def test_a_trial_of_device_memory_that_fails_on_one_rank_decides_for_all_of_its_mesh(comm, monkeypatch):
    failing = [0]
    monkeypatch.setattr(capabilities, "claims_device_buffers", lambda: True)
    monkeypatch.setattr(capabilities, "device_count", lambda: 1)
    known = capabilities.probe()
    for module in (capabilities, staging):
        monkeypatch.setattr(
            module, "probe", lambda device=False: replace(known, device_buffers=comm.rank not in failing)
        )
    array, arrived = (standin.zeros(10, kind=standin.AwareArray) for _ in range(2))
    # A mesh of one rank that is made in between decides for itself.
    with mpishard.Mesh(comm) as mesh, mpishard.Mesh(MPI.COMM_SELF) as alone:
        axes = mesh.data, mesh.world, mesh.node, mesh.data.subgroup("part", range(mesh.size))
        assert all(each._is_staged(array) for axis in axes for each in (axis._blocking, axis._started))
        assert alone.data._blocking._is_staged(array) is (comm.rank == 0)
        array.fill(mesh.rank)
        send, recv = mesh.data.start_send(array, mesh.rank), mesh.data.start_recv(arrived, mesh.rank)
        assert isinstance(send, staging.StagedRequest) and isinstance(recv, staging.StagedRequest)
        assert np.all(arrays.to_host(recv.wait()) == mesh.rank)
        send.wait()
        assert np.all(arrays.to_host(mesh.data.all_reduce(array)) == sum(range(mesh.size)))
        failing.clear()
        mesh.release()
        mesh.rebind(comm.Dup())
        assert not mesh.data._blocking._is_staged(array)
