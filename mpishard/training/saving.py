"""One checkpoint at a time, for those who have a loop of their own; `Checkpoints` keeps those of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpishard.checkpoint import Checkpoints
from mpishard.checkpoint.index import check_facts
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.optimizer_state import parameters_alone
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import agree_on_step, check_place
from mpishard.parameters.flat import FlatParameters, check_flat

Array = Any


def save_checkpoint(
    folder: str | Path,
    parameters: Any,
    optimizer: ShardedOptimizer,
    *,
    keep: int | None = None,
    compression: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint that any layout can load, and return its folder.  Collective over the optimizer's mesh.

    Parameters
    ----------
    folder : path
        Of the run; the checkpoint is ``step-NNNNNNNN`` in it, and ``latest`` points to it.  On a cluster all ranks must
        see this folder.
    parameters : model, FlatParameters or 1-D array
        What the optimizer trains: a model is anything with a FlatParameters as its ``parameters``.
    optimizer : ShardedOptimizer
        Gradients that wait for `ShardedOptimizer.synchronize_optimizer_state` are not saved.
    keep : int, optional
        Remove all but so many of the checkpoints in the folder, the oldest first.
    compression : {None, "gzip", "lzf"}
        Filter of HDF5 for all values.
    facts : mapping, optional
        What else to keep: numbers, strings and booleans by name, 1-D arrays, and under names that end in ``.json`` what
        JSON can hold.  Not under the names that the optimizer has facts for, such as ``"steps"``.

    Raises
    ------
    OSError
        On every rank if the disk fails or is full; earlier checkpoints are whole, and in memory nothing has changed but
        what `ShardedOptimizer.prepare_save` does.
    ValueError, TypeError
        On every rank if any cannot take its parameters or facts, or parameters differ between ranks.
    """
    facts = facts or {}
    optimizer.bind(_agreed(parameters, optimizer, optimizer.mesh, facts))
    optimizer.prepare_save()
    state = optimizer.run_state().with_facts(facts)
    with _for_once(folder, optimizer.mesh, keep=keep, compression=compression) as checkpoints:
        checkpoints.adopt()
        written = checkpoints.save(state)
    assert written is not None
    return written


def load_checkpoint(
    folder: str | Path, parameters: Any, optimizer: ShardedOptimizer | None = None, *, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Read the newest whole checkpoint, of any layout, into parameters and optimizer, in place, and return its facts.

    Collective over the mesh.  Everything is checked first: hashes, facts, what compressed values decode to.  Then every
    element is read by one rank, straight into its place, and copies travel over MPI.  So a rank needs memory for what
    travels at a time, some megabytes, and not for a second copy of anything.

    Parameters
    ----------
    folder : path
        Of a run; damaged checkpoints are passed over with a warning that names what is damaged.  Or of one checkpoint,
        which then must be whole.
    parameters : model, FlatParameters or 1-D array
    optimizer : ShardedOptimizer, optional
        Gets its slots, steps and loss scale, and forgets gradients; without one only the parameters are read.
    mesh : Mesh, optional
        Of the parameters; needed if there is no optimizer.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError, TypeError
        If all are damaged, or the newest whole one is of other tensors or of another rule; if the parameters of any
        rank cannot be written to, or are others than those of the rest; or facts make no sense, such as ``steps``
        below 0.  On every rank, and before anything has changed; only an optimizer that has taken no step has made all
        copies of the parameters those of data rank 0, as its first step would.
    OSError
        On every rank, if the folder cannot be listed; or if the disk fails in the second of two readings of the same
        bytes, and no older checkpoint can be read: only then are parameters and state partly overwritten, and the
        message says so.
    """
    if optimizer is None and not isinstance(mesh, Mesh):
        raise TypeError(
            "load_checkpoint needs an optimizer, or mesh=..., to know which ranks hold the parameters; got the mesh "
            f"{mesh!r}"
        )
    mesh = mesh if optimizer is None else optimizer.mesh
    assert mesh is not None
    named = _agreed(parameters, optimizer, mesh)
    if optimizer is not None:
        optimizer.bind(named)
        state, check = optimizer.run_state(), optimizer.check_facts
    else:
        state, check = parameters_alone(named, mesh.data), None
    with _for_once(folder, mesh) as checkpoints:
        found = checkpoints.load(state, check=check)
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    if optimizer is not None:
        optimizer.tell_of_changes(found.facts)
        optimizer.restore(found.facts)
    elif named.sharded is not None:
        named.sharded.drop()
    return dict(found.facts)


@contextmanager
def _for_once(folder: str | Path, mesh: Mesh, **options: Any) -> Iterator[Checkpoints]:
    """Checkpoints that are closed again, after the errors that all ranks raise too."""
    checkpoints = Checkpoints(folder, mesh, **options)
    try:
        yield checkpoints
    except (OSError, ValueError):
        checkpoints.close()
        raise
    checkpoints.close()


def _agreed(
    parameters: Any, optimizer: ShardedOptimizer | None, mesh: Mesh, facts: Mapping[str, Any] | None = None
) -> FlatParameters:
    """The parameters by name, if all ranks have theirs, and facts that can be saved.  Collective."""
    named: FlatParameters | None = None
    problem = None
    try:
        check_facts(facts or {})
        named = _named(parameters, optimizer)
        check_place(named, mesh)
    except (ValueError, TypeError) as error:
        problem = error
    agree_on_step(mesh.world, named, None, problem, None if optimizer is None else optimizer.settings)
    assert named is not None
    return named


def _named(parameters: Any, optimizer: ShardedOptimizer | None) -> FlatParameters:
    """The parameters by name: those of a model, or those that the optimizer knows by the same array."""
    named = getattr(parameters, "parameters", parameters)
    if isinstance(named, FlatParameters):
        return named
    check_flat("parameters", named, written=True)
    known = None if optimizer is None else optimizer.parameters
    if known is not None and known.sharded is None and known.flat is named:
        return known
    return FlatParameters.over(named)
