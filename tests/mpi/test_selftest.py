"""``mpishard selftest`` on ranks: well as installed, and what it says of faults on one rank or on all."""

from __future__ import annotations

import h5py
import numba
import numpy as np
import pytest

from mpishard.cli import main, selftest
from mpishard.comm.communicator import Communicator
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.environment import Finding

CHECKS = ["MPI", "layout", "ZeRO step", "checkpoint", "HDF5", "Numba", "CuPy"]


@pytest.fixture
def run(comm, tmp_path, capsys):
    def run():
        """The exit code, the same on all ranks, and rank 0's lines of what is well and what is wrong."""
        codes = comm.allgather(main(["selftest", "--folder", comm.bcast(str(tmp_path))]))
        assert codes == [codes[0]] * comm.size and not list(tmp_path.iterdir())
        shown = capsys.readouterr().out
        lines = [line for line in comm.bcast(shown).splitlines() if line.startswith(("ok", "WRONG"))]
        assert bool(shown) == (comm.rank == 0)
        return codes[0], {line[7:19].strip(): line for line in lines}

    return run


def test_an_installation_that_is_well(run, comm):
    code, lines = run()
    assert code == 0 and list(lines) == CHECKS, lines
    assert all(line.startswith("ok") for line in lines.values()), lines
    assert f"{comm.size} rank" in lines["MPI"] and str(h5py.version.version) in lines["HDF5"]


def patched(monkeypatch, owner, name, change):
    """Have a method of `owner` return what `change` makes of its result and its arguments."""
    method = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: change(method(*given, **named), *given))


def of_a_collective(monkeypatch):
    def change(result, axis, buffer):
        result[-1:] += buffer.size == selftest._SIZE  # no other sum is of so many
        return result

    patched(monkeypatch, Communicator, "all_reduce", change)


def of_a_step(monkeypatch):
    def change(result, optimizer, parameters, *gradients):
        if (
            isinstance(optimizer, selftest.ZeRO2Optimizer)
            and optimizer.steps == 3
            and isinstance(parameters, np.ndarray)
        ):
            parameters[7] *= 1 + 1e-9

    patched(monkeypatch, ShardedOptimizer, "step", change)


def of_reading(monkeypatch):
    def change(result, folder, parameters, optimizer):
        parameters["weight"][0] += 1e-6

    patched(monkeypatch, selftest, "load_checkpoint", change)


def of_hdf5(monkeypatch):
    def change(result, dataset, *given):
        return result + 1 if dataset.name == "/values" else result

    patched(monkeypatch, h5py.Dataset, "__getitem__", change)


def of_numba(monkeypatch):
    monkeypatch.setattr(numba, "njit", lambda function: lambda *given: function(*given) + 1)


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        (of_a_collective, "layout", "a sum over the tensor axis: element 1002 is"),
        (of_a_step, "ZeRO step", "parameters differ from those of one rank by"),
        (of_reading, "checkpoint", "parameters from the checkpoint differ"),
        (of_hdf5, "HDF5", "what a file gives back: element 0 is 1, not 0"),
        (of_numba, "Numba", "a compiled sum of squares: element 0 is 328351, not 328350"),
    ],
)
def test_a_fault_of_one_rank(fault, check, said, run, comm, monkeypatch):
    if comm.rank == comm.size - 1:
        fault(monkeypatch)
    code, lines = run()
    assert code == 1 and lines[check].startswith("WRONG"), lines
    assert f"rank {comm.size - 1}: {said}" in lines[check], lines
    assert [name for name, line in lines.items() if line.startswith("WRONG")] == [check], lines


def test_a_fault_of_all_ranks(run, comm, monkeypatch):
    def altered(folder, *given):
        if comm.rank == 0:
            file = max(saved(folder, *given).glob("*.h5"), key=lambda path: path.stat().st_size)
            file.write_bytes(file.read_bytes()[:-1])
        else:
            saved(folder, *given)
        comm.Barrier()

    saved = selftest.save_checkpoint
    monkeypatch.setattr(selftest, "save_checkpoint", altered)
    code, lines = run()
    assert code == 1 and lines["checkpoint"].startswith("WRONG") and ".h5" in lines["checkpoint"], lines
    assert ("rank 0: " if comm.size == 1 else f"all {comm.size} ranks: ") in lines["checkpoint"], lines


def test_what_info_finds(run, comm, monkeypatch):
    finding = Finding("wrong", "launch", "the mpirun is of another MPI", "use the other")
    monkeypatch.setattr(selftest, "findings", lambda facts: [finding])
    code, lines = run()
    assert code == 1 and "the mpirun is of another MPI; use the other" in lines["MPI"], lines
