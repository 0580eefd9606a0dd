"""The axis of one rank alone."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.comm.axis import allgather_values

# A model of its own, in a process where a call of MPI would abort.
WITHOUT_MPI = """
import mpi4py
mpi4py.rc.initialize = False
import numpy as np
import mpishard
from mpi4py import MPI

model = mpishard.nn.GPT(9, 8, width=8, layers=2, heads=2, stage_costs="measured", dtype="float64")
tokens = np.arange(16).reshape(2, 8) % 9
loss = model.loss_and_gradient(tokens, tokens)
assert np.isfinite(loss) and abs(model.loss(tokens, tokens) - loss) < 1e-9
axis = mpishard.Axis.single()
assert (axis.rank, axis.size, axis.members) == (0, 1, [0])
axis.revoke()
axis.free()
assert not MPI.Is_initialized()
"""


def test_a_model_without_a_mesh_makes_no_mpi_call() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MPI], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


NOT_STARTED = """
import mpi4py
mpi4py.rc.initialize = False  # as Devito has it
import numpy as np
from mpi4py import MPI
import mpishard

def function(x):
    return float(x @ x), 2 * x

def wrong(x):
    raise ArithmeticError

assert mpishard.check_gradient(function, np.ones(3), disp=False)
assert mpishard.check_adjoint(lambda x: 2 * x, lambda y: 2 * y, np.ones(3), np.ones(3), disp=False)
assert mpishard.minimize(function, np.ones(3)).success
try:
    mpishard.check_gradient(wrong, np.ones(3))
except ArithmeticError:
    pass
assert not MPI.Is_initialized()
with mpishard.Mesh() as mesh:
    assert mpishard.minimize(function, np.ones(3), mesh=mesh).success
"""


def test_mpi_is_started_by_a_mesh_where_nobody_has() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_STARTED], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_it_has_every_collective() -> None:
    axis = mpishard.Axis.single("alone")
    values, other = np.arange(3.0), np.zeros(3)
    assert axis.all_reduce(values) is values and axis.start_all_reduce(values, other).wait() is other
    assert np.array_equal(other, values)
    assert np.array_equal(axis.reduce_scatter(values), values) and np.array_equal(axis.all_gather(values), values)
    assert np.array_equal(axis.all_to_all(values, np.zeros(3)), values) and axis.broadcast(values) is values
    sent = axis.start_send(values, 0)
    assert np.array_equal(axis.recv(np.zeros(3), 0), values)
    sent.wait()
    axis.barrier()
    assert axis.allgather_object("x") == ["x"]
    assert axis.ledger.totals["alone", "all_reduce", ""].calls == 2
    with pytest.raises(ValueError, match="wrong"):
        axis.raise_if_any(ValueError("wrong"))
    part = axis.subgroup("part", [0])
    assert part is not None and part.all_reduce(values) is values
    axis.free()
    assert part.comm == MPI.COMM_NULL


def test_its_communicator_stays() -> None:
    axis = mpishard.Axis.single()
    axis.revoke()
    axis.free()
    assert MPI.COMM_SELF.size == 1 and mpishard.Axis.single().all_reduce(np.ones(2))[0] == 1


def test_two_of_them_have_a_ledger_each() -> None:
    assert mpishard.Axis.single().ledger is not mpishard.Axis.single().ledger


@pytest.mark.parametrize(("heals", "kind"), [(True, MPI.Exception), (False, pickle.UnpicklingError)])
def test_values_that_cannot_be_read_are_those_of_the_dead(monkeypatch, heals, kind):
    """Open MPI 5 may return from an allgather in which a rank dies, with values that nobody has sent."""

    class Dying:
        def allgather(self, value):
            return [value, pickle.loads(b"\xe4")]

    monkeypatch.setattr("mpishard.comm.axis.heals_in_place", lambda: heals)
    with pytest.raises(kind) as raised:
        allgather_values(Dying(), 1)
    assert not heals or raised.value.Get_error_class() == MPI.ERR_PROC_FAILED
