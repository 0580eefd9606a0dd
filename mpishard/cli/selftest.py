"""``mpishard selftest``: whether this installation communicates, computes and stores what it should, on these ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import h5py
import numba
import numpy as np
import typer
from mpi4py import MPI

from mpishard.arguments import listed
from mpishard.backend import array as arrays
from mpishard.cli.info import meet
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.optimizers import DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer
from mpishard.environment import Facts, collect, findings, launch_of, launches
from mpishard.environment.findings import count
from mpishard.layout.tensors import ParameterSpec
from mpishard.optim import AdamW
from mpishard.parameters.flat import FlatParameters
from mpishard.training.saving import load_checkpoint, save_checkpoint
from mpishard.version import VERSION

_PATIENCE_S = 60.0  # of a collective, after which the job is ended with a report of who waits
_SIZE, _SAMPLES, _STEPS = 1003, 24, 3  # the parameters are divided unevenly
_CLOSE = 1e-12  # in float64, for sums in another order


class _WrongError(Exception):
    """Something is other than it should be; the message says what, without the rank."""


def selftest(
    folder: Annotated[
        Path | None,
        typer.Option(help="For a checkpoint, seen by all nodes; default: the working directory, or /tmp on one node."),
    ] = None,
) -> None:
    """Test this installation on these ranks, in some seconds and without a network.

    \b
    mpirun -n 2 mpishard selftest

    MPI and its collectives, a layout over the axes of a mesh, a ZeRO step beside that of one rank, a checkpoint that
    another layout reads, HDF5, Numba, and CuPy where there is a GPU.  A line says what each has found.  If one of them
    is wrong on any rank, the line names the rank, and the exit code is 1 on all ranks.
    """
    began = time.perf_counter()
    world = MPI.COMM_WORLD
    launch = launch_of(launches(os.environ), world.size)
    # If MPI is broken each rank may be alone in its world; then only the launcher knows which rank is the first.
    apart = launch is not None and launch.ranks != world.size
    speaks = (launch.rank if launch is not None and apart else world.rank) == 0
    meet(world)
    facts = world.allgather(collect(world))
    well = _try(world, "MPI", lambda: _check_mpi(world, facts), speaks)
    if apart:  # a mesh would be refused
        raise typer.Exit(1)
    with Mesh(timeout=_PATIENCE_S) as mesh, Mesh(MPI.COMM_SELF) as alone, _shared(mesh, folder) as shared:
        checks: dict[str, Callable[[], str]] = {
            "layout": lambda: _check_layout(mesh),
            "ZeRO step": lambda: _check_step(mesh, alone, np),
            "checkpoint": lambda: _check_checkpoint(mesh, alone, shared),
            "HDF5": lambda: _check_hdf5(facts[world.rank]),
            "Numba": _check_numba,
            "CuPy": lambda: _check_cupy(mesh, alone, facts[world.rank]),
        }
        for name, check in checks.items():
            well &= _try(world, name, check, speaks)
    if speaks:
        verdict = "all is well" if well else "something is wrong"
        took = time.perf_counter() - began
        typer.echo(f"{verdict} with mpishard {VERSION} on {count(world.size, 'rank')}, {took:.1f} s")
    if not well:
        raise typer.Exit(1)


def _try(world: MPI.Intracomm, name: str, check: Callable[[], str], speaks: bool) -> bool:
    """Run a check on all ranks and print its line; returns whether it is well on all of them.  Collective.

    The answers travel by mpi4py alone, not by what is checked.
    """
    said, problem = "", ""
    try:
        said = check()
    except _WrongError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = world.allgather(problem)
    if speaks:
        for text in dict.fromkeys(filter(None, problems)):
            ranks = [rank for rank, each in enumerate(problems) if each == text]
            where = f"all {len(ranks)} ranks" if len(ranks) == world.size > 1 else f"rank {listed(ranks, 8)}"
            typer.echo(f"{'WRONG':7}{name:12}{where}: {' '.join(text.split())}")
        if not any(problems):
            typer.echo(f"{'ok':7}{name:12}{said}")
    return not any(problems)


@contextmanager
def _shared(mesh: Mesh, given: Path | None) -> Iterator[Path]:
    """A new folder that all ranks see, removed at the end; OSError on all ranks if it cannot be made.  Collective."""
    parent = given or (None if len(set(mesh.nodes)) == 1 else Path.cwd())
    made: tuple[str, OSError | None] = "", None
    if mesh.rank == 0:
        try:
            made = tempfile.mkdtemp(prefix="mpishard-selftest-", dir=parent), None
        except OSError as error:
            made = "", error
    path, problem = mesh.world.comm.bcast(made)
    if problem is not None:
        raise problem
    try:
        yield Path(path)
    finally:
        mesh.world.comm.Barrier()
        if mesh.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def _equal(what: str, found: Any, expected: Any) -> None:
    if not np.array_equal(found, expected):
        at = np.flatnonzero(np.ravel(found) != np.ravel(expected))
        raise _WrongError(
            f"{what}: element {at[0]} is {np.ravel(found)[at[0]]:g}, not {np.ravel(expected)[at[0]]:g}"
            f"; {len(at)} of {np.size(expected)} are wrong"
        )


def _close(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    apart = np.abs(found - expected).max() / np.abs(expected).max()
    if not apart <= _CLOSE:  # NaN is not
        raise _WrongError(f"{what} differ from those of one rank by {apart:.2g} of the largest")


def _check_mpi(world: MPI.Intracomm, facts: Sequence[Facts]) -> str:
    """What `mpishard info` would call wrong; a sum, and a megabyte to the next rank, by mpi4py alone."""
    wrong = [str(each) for each in findings(facts) if each.level == "wrong"]
    if wrong:
        raise _WrongError("; ".join(wrong))
    rank, ranks = world.rank, world.size
    total = np.arange(_SIZE) + rank
    world.Allreduce(MPI.IN_PLACE, total)
    sent, got = np.full(2**17, float(rank)), np.empty(2**17)
    world.Sendrecv(sent, (rank + 1) % ranks, recvbuf=got, source=(rank - 1) % ranks)
    _equal("a sum over all ranks", total, ranks * np.arange(_SIZE) + ranks * (ranks - 1) // 2)
    _equal("a message of 1 MB", got, np.full(2**17, float((rank - 1) % ranks)))
    mpi, nodes = facts[0].mpi, len({each.process.node for each in facts})
    return f"{mpi.library} {mpi.version}, {count(ranks, 'rank')} on {count(nodes, 'node')}"


def _tensor_size(ranks: int) -> int:
    """The smallest divisor above 1, for a mesh of two axes where the number of ranks allows."""
    return next((size for size in range(2, ranks) if ranks % size == 0), ranks)


def _check_layout(mesh: Mesh) -> str:
    results = []  # compared when no rank waits for another any more
    with Mesh(mesh.world.comm, tensor=_tensor_size(mesh.size), timeout=_PATIENCE_S) as divided:
        for axis in (divided.tensor, divided.data, divided.world):
            first, ranks = np.arange(float(_SIZE)), axis.size
            total = ranks * first + ranks * (ranks - 1) // 2
            counts = [_SIZE // ranks + (rank < _SIZE % ranks) for rank in range(ranks)]
            begin = sum(counts[: axis.rank])
            own = slice(begin, begin + counts[axis.rank])
            summed = axis.all_reduce(first + axis.rank)
            piece = axis.reduce_scatter(first + axis.rank, counts=counts).copy()
            gathered = axis.all_gather(np.zeros(_SIZE), first[own].copy(), counts=counts)
            results += [(f"a sum over the {axis.name} axis", summed, total)]
            results += [(f"this rank's piece of a sum over the {axis.name} axis", piece, total[own])]
            results += [(f"what the {axis.name} axis has gathered", gathered, first)]
        sizes = f"tensor={divided.tensor.size} x data={divided.data.size}"
    for result in results:
        _equal(*result)
    return f"{sizes}: sums, scatters and gathers of {_SIZE} elements over each axis are exact"


def _trained(mesh: Mesh, optimizer: Any, module: Any) -> np.ndarray:
    """Parameters after some steps on samples that are dealt out to the ranks; `module` says where the arrays are."""
    own = np.arange(mesh.data.rank, _SAMPLES, mesh.data.size)
    targets = (7 * own[:, None] + np.arange(_SIZE)) % 11
    parameters, pull = module.zeros(_SIZE), module.asarray(targets.sum(0, dtype=float))
    for _ in range(_STEPS):
        optimizer.step(parameters, len(own) * parameters - pull, count=_SAMPLES)
    return arrays.to_host(parameters)


def _check_step(mesh: Mesh, alone: Mesh, module: Any) -> str:
    found = _trained(mesh, ZeRO2Optimizer(AdamW(lr=0.1), mesh), module)
    expected = _trained(alone, DDPOptimizer(AdamW(lr=0.1), alone), np)
    _close("parameters", found, expected)
    return f"{_STEPS} steps of ZeRO-2 by {count(mesh.size, 'rank')} are those of one rank"


def _check_checkpoint(mesh: Mesh, alone: Mesh, folder: Path) -> str:
    """Half of the steps divided by tensor and data ranks; the others by data ranks, from the checkpoint."""
    shape = (3 * mesh.size, 5)
    targets = np.arange(float(np.prod(shape))).reshape(shape)

    def take_steps(parameters: FlatParameters, optimizer: Any) -> None:
        for _ in range(_STEPS):
            rows = slice(*parameters.box("weight")[0])
            parameters.gradients["weight"] += parameters["weight"] - targets[rows]
            optimizer.step(parameters)

    def new(of: Mesh) -> FlatParameters:
        return FlatParameters([ParameterSpec("weight", shape, tensor_dim=0)], np.float64, place=of.place)

    with Mesh(mesh.world.comm, tensor=_tensor_size(mesh.size), timeout=_PATIENCE_S) as divided:
        written, optimizer = new(divided), ZeRO2Optimizer(AdamW(lr=0.1), divided)
        take_steps(written, optimizer)
        save_checkpoint(folder, written, optimizer)
        sizes = f"tensor={divided.tensor.size} x data={divided.data.size}"
    read, other = new(mesh), ZeRO1Optimizer(AdamW(lr=0.1), mesh)
    load_checkpoint(folder, read, other)
    loaded = read["weight"].copy()
    take_steps(read, other)
    expected, one = new(alone), DDPOptimizer(AdamW(lr=0.1), alone)
    take_steps(expected, one)
    _close("parameters from the checkpoint", loaded, expected["weight"])
    take_steps(expected, one)
    _close("parameters after it", read["weight"], expected["weight"])
    return f"written by {sizes}, read and continued by data={mesh.size}"


def _check_hdf5(facts: Facts) -> str:
    values = np.arange(5000.0).reshape(50, 100)
    with tempfile.TemporaryDirectory(prefix="mpishard-selftest-") as folder:
        path = Path(folder, "values.h5")
        with h5py.File(path, "w") as file:
            file.create_dataset("values", data=values, chunks=(7, 100), compression="gzip", fletcher32=True)
        with h5py.File(path) as file:
            _equal("what a file gives back", file["values"][()], values)
    return f"HDF5 {facts.versions['HDF5']}, h5py {facts.versions['h5py']}: a file gives back what was written"


def _check_numba() -> str:
    def total(values: np.ndarray) -> float:
        found = 0.0
        for value in values:
            found += value * value
        return found

    values = np.arange(100.0)
    _equal("a compiled sum of squares", numba.njit(total)(values), values @ values)
    return f"Numba {numba.__version__} compiles"


def _check_cupy(mesh: Mesh, alone: Mesh, facts: Facts) -> str:
    version = facts.versions.get("CuPy")
    # All ranks take the steps, or none does.
    if not all(mesh.world.allgather_object(version is not None and mesh.device is not None)):
        return f"CuPy {version}, but not each rank has a GPU: not tested" if version else "not installed, not tested"
    module = arrays.device_module()
    module.cuda.Device(mesh.device).use()
    return f"CuPy {version}: {_check_step(mesh, alone, module)} on the host"
