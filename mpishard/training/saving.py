"""Functions that save or load one checkpoint, for users' own training loops; `Checkpoints` manages those of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpishard.arguments import shown
from mpishard.checkpoint import Checkpoints
from mpishard.checkpoint.index import check_facts
from mpishard.comm.agreement import opening
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.rank_state import parameters_alone
from mpishard.data_parallel.settings import agree_on_step
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.validation import check_place
from mpishard.parameters.flat import FlatParameters, check_flat

Array = Any


def save_checkpoint(
    folder: str | Path,
    parameters: Any,
    optimizer: ShardedOptimizer,
    *,
    keep: int | None = 2,
    compression: str | None = None,
    virtual: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint that any layout can load.

    Collective over the optimizer's mesh.

    Parameters
    ----------
    folder : path
        Folder of the run.  The checkpoint is its subfolder ``step-NNNNNNNN``, and ``latest`` points to it.  On a
        cluster all ranks must see this folder.
    parameters : model, FlatParameters or 1-D array
        The parameters that the optimizer trains.  A model is any object with a FlatParameters as its ``parameters``.
    optimizer : ShardedOptimizer
        Gradients that wait for `ShardedOptimizer.synchronize_optimizer_state` are not saved.
    keep : int or None
        Number of checkpoints to keep: older ones are removed; None: all are kept.  Only those saved with this optimizer
        count and, once it has loaded a checkpoint from the folder, all that exist, as for `Checkpoints`.
    compression : {None, "gzip"}
        HDF5 filter for all values.
    virtual : bool
        Whether the index shows every tensor whole to other HDF5 programs, as for `Checkpoints`.
    facts : mapping, optional
        Further values to save, by name: numbers, strings, booleans and 1-D arrays, and any JSON value under a name that
        ends in ``.json``.  Names of the optimizer's own facts, such as ``"steps"``, are not allowed.

    Returns
    -------
    Path
        The folder of the checkpoint, the same on all ranks.

    Raises
    ------
    OSError
        On every rank, if the disk fails or is full.  Earlier checkpoints stay complete, and memory is unchanged, except
        that workers of `LocalSGDOptimizer`, and the errors of compression, have been brought to one state.
    FloatingPointError
        On every rank, if a worker of `LocalSGDOptimizer` had a NaN or infinite gradient that no step has raised yet.
    ValueError, TypeError
        On every rank, if an argument of any rank is invalid, or arguments or parameters differ between ranks; on this
        rank, if `optimizer` is none.
    """
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"save_checkpoint: optimizer={shown(optimizer)} must be the optimizer that trains the parameters, such as "
            "DDPOptimizer: its state is saved too"
        )
    facts = {} if facts is None else facts
    with opening(optimizer.world, "save_checkpoint") as same:
        check_facts(facts)
        named = _named(parameters, optimizer)
        check_place(named, optimizer.mesh)
        named.carried.check_parameters()
        same |= {"folder": str(folder), "keep": keep, "facts": sorted(facts)}
        same |= {"compression": compression, "virtual": virtual}
    agree_on_step(optimizer.world, named, None, None, optimizer.settings)
    optimizer.bind(named)
    optimizer.state.consolidate()
    state = optimizer.state.capture().with_facts(facts)
    with _for_once(folder, optimizer.mesh, keep=keep, compression=compression, virtual=virtual) as checkpoints:
        known = optimizer.own_checkpoints.get(checkpoints.folder, [])
        if known is None:
            checkpoints.adopt()
        else:
            checkpoints.own = known
        written = checkpoints.save(state)
        optimizer.own_checkpoints[checkpoints.folder] = checkpoints.own
    assert written is not None
    return written


def load_checkpoint(
    folder: str | Path, parameters: Any, optimizer: ShardedOptimizer | None = None, *, mesh: Mesh | None = None
) -> dict[str, Any]:
    """Read the newest complete checkpoint, of any layout, into parameters and optimizer.

    Collective over the mesh.  All hashes, facts and decompressed values are checked first.  Then one rank reads each
    element, directly into its final memory, and MPI sends copies to the other ranks.  A rank therefore needs only some
    megabytes of memory for messages, and no second copy of any array.

    Parameters
    ----------
    folder : path
        Folder of a run: damaged checkpoints are skipped, with a warning that names the damage.  Or folder of one
        checkpoint, which must be complete.
    parameters : model, FlatParameters or 1-D array
        Overwritten in place.
    optimizer : ShardedOptimizer, optional
        Its slots, steps and loss scale are restored, and its gradients reset.  Without it only parameters are read.
    mesh : Mesh, optional
        The mesh of the parameters; needed without an optimizer, which has one.

    Returns
    -------
    dict
        The facts of the checkpoint, the same on all ranks.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError, TypeError
        If all checkpoints are damaged, or the newest complete one has other tensors or another rule; if the parameters
        of any rank are read-only, or differ from those of other ranks; or if facts are invalid, such as ``steps`` below
        0.  On every rank, and before anything has changed, except that an optimizer without a step has set all copies
        of the parameters to those of data rank 0, as its first step would.
    OSError
        On every rank, if the folder cannot be listed; or if the disk fails in the second of two readings of the same
        bytes, and no older checkpoint can be read.  Only in that case parameters and state are partly overwritten, and
        the message says so.
    """
    if optimizer is None and not isinstance(mesh, Mesh):
        raise TypeError(
            "load_checkpoint needs an optimizer, or mesh=..., to know which ranks hold the parameters; got the mesh "
            f"{mesh!r}"
        )
    given, mesh = mesh, mesh if optimizer is None else optimizer.mesh
    assert mesh is not None
    with opening(mesh.world, "load_checkpoint") as same:
        if given is not None and getattr(given, "ledger", None) is not mesh.ledger:
            raise ValueError(f"mesh={shown(given)} is not that of the optimizer; leave it out")
        named = _named(parameters, optimizer)
        check_place(named, mesh)
        named.carried.check_parameters()
        same |= {"folder": str(folder), "optimizer": optimizer is not None}
    agree_on_step(mesh.world, named, None, None, None if optimizer is None else optimizer.settings)
    if optimizer is not None:
        optimizer.bind(named)
        with raised_on_all(mesh.world):  # a buffer of this rank alone may have been replaced by one of another kind
            state = optimizer.state.capture()
        check = optimizer.state.check
    else:
        state, check = parameters_alone(named, mesh.data), None
    with _for_once(folder, mesh) as checkpoints:
        found = checkpoints.load(state, check=check)
    if found is None:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    if optimizer is not None:
        if optimizer.state.has_gradients():  # of passes with other tensors, perhaps: then a sum waits for another rank
            named.gradients.finalize()
        optimizer.own_checkpoints[checkpoints.folder] = None
        optimizer.state.restore_settings(found.facts)
        optimizer.state.restore(found.facts)
    elif named.sharded is not None:
        named.sharded.free_all()
    return dict(found.facts)


@contextmanager
def _for_once(folder: str | Path, mesh: Mesh, **options: Any) -> Iterator[Checkpoints]:
    """Checkpoints that are closed at the end, also after errors that all ranks raise."""
    checkpoints = Checkpoints(folder, mesh, **options)
    try:
        yield checkpoints
    except (OSError, ValueError):
        checkpoints.close()
        raise
    checkpoints.close()


def _named(parameters: Any, optimizer: ShardedOptimizer | None) -> FlatParameters:
    """The parameters by name: those of a model, or those that the optimizer has for the same flat array."""
    named = getattr(parameters, "parameters", parameters)
    if isinstance(named, FlatParameters):
        return named
    check_flat("parameters", named, written=True)
    known = None if optimizer is None else optimizer.parameters
    if known is not None and known.sharded is None and known.flat is named:
        return known
    return FlatParameters.over(named)
