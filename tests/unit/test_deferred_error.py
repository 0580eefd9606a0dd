"""Errors of the user's code that wait until all ranks can raise them; and what a run that has failed leaves."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm import axis as axis_module
from mpishard.comm.agreement import DeferredError
from mpishard.comm.axis import Axis
from mpishard.elastic.loop import ElasticLoop


class TwoRanks:
    """The axis of rank 0 of two, of which the other has called ``sys.exit(3)``."""

    rank, size = 0, 2
    raise_together = Axis.raise_together

    def all_reduce(self, buffer, op, label):
        return np.maximum(buffer, 1)

    def allgather_object(self, value):
        return [value, ("SystemExit", "SystemExit: 3", 3, "")]


@pytest.mark.parametrize("error", [KeyError("no data"), SystemExit(3)], ids=["error", "exit"])
def test_an_error_waits_for_the_others(error):
    deferred = DeferredError(TwoRanks(), transactional=False)
    with deferred.capture():
        raise error
    assert deferred.error is error
    with pytest.raises(type(error)) as raised:
        deferred.raise_on_all()
    assert raised.value is error and deferred.error is None


def test_all_ranks_end_with_the_code_of_one(capfd):
    with pytest.raises(SystemExit) as raised:
        DeferredError(TwoRanks(), transactional=False).raise_on_all()
    assert raised.value.code == 3
    assert "rank 1 called sys.exit in the run; all ranks end with its code 3" in capfd.readouterr().err


def test_other_ranks_say_where_one_has_failed():
    def gathered(_):
        try:
            raise KeyError("no data")
        except KeyError as error:
            return [None, ("KeyError", "KeyError: 'no data'", None, axis_module._place(error, 1))]

    other = TwoRanks()
    other.name, other.allgather_object = "world", gathered
    with pytest.raises(RuntimeError, match="^rank 1 of axis 'world': KeyError: 'no data'") as raised:
        DeferredError(other, transactional=False).raise_on_all()
    (note,) = raised.value.__notes__
    assert (
        note.startswith("On rank 1:\n") and f'File "{__file__}"' in note and note.endswith('raise KeyError("no data")')
    )
    # Over a second axis the same place.
    assert axis_module._place(raised.value, 0) == note


def test_without_an_error_nobody_meets():
    """In an elastic run `meet` sends the spares an order to fail, and a loss may be NaN without an error."""
    both_fine = TwoRanks()
    both_fine.all_reduce = lambda buffer, op, label: buffer
    deferred = DeferredError(both_fine, transactional=True)
    deferred.meet = lambda: pytest.fail("no rank has failed")
    deferred.raise_on_all()


def test_what_cannot_wait_is_raised_at_once(monkeypatch):
    for error, alone in (
        (KeyError("no data"), False),
        (MPI.Exception(MPI.ERR_OTHER), True),
        (KeyboardInterrupt(), True),
    ):
        deferred = DeferredError(TwoRanks(), transactional=False)
        with pytest.raises(type(error)), deferred.capture(alone):
            raise error
        assert deferred.error is None
    deferred = DeferredError(Axis.single(), transactional=False)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("no data")
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", "1")
    deferred = DeferredError(TwoRanks(), transactional=True)
    with pytest.raises(KeyError), deferred.capture():
        raise KeyError("a death")


def test_an_elastic_run_that_has_failed_is_not_kept():
    def function(parameters, samples, gradients):
        raise ArithmeticError("spoilt")

    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        problem = mpishard.OptimizationProblem(function, np.zeros(3), samples=4, batch_size=4, steps=2)
        optimizer = mpishard.ElasticOptimizer(mpishard.SGD(lr=0.1), mesh)
        before = sum(isinstance(each, ElasticLoop) for each in gc.get_objects())
        with pytest.raises(ArithmeticError):
            optimizer.optimize(problem, progress=False)
        gc.collect()
        assert sum(isinstance(each, ElasticLoop) for each in gc.get_objects()) == before
