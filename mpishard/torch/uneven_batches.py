"""Uneven numbers of batches: ranks that have run out take part in the sums and steps of the others, with zeros."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.launch.job_notes import raised_by_all
from mpishard.torch.batch_norm import has_norms_over_ranks
from mpishard.torch.loop_hooks import CLIP, DROP, PASS, STEP, MeanHooks

if TYPE_CHECKING:
    from mpishard.torch.module_optimizer import ModuleOptimizer

_meshes_in_use: set[int] = set()  # the ids of the meshes of the contexts that have begun
_IN_WORDS = {PASS: "make a backward pass", CLIP: "call clip_grad_norm_", STEP: "call step", DROP: "call zero_grad"}


def join(
    optimizer: ModuleOptimizer,
    *,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Join:
    """A context for a loop in which ranks have different numbers of batches, as ``torch.distributed``'s Join.

    ``with mpishard.torch.join(optimizer):`` around the loop over batches.  A rank that leaves the loop waits there,
    takes part in the sums of the others with gradients of zero, and takes their steps, with the values of their
    parameter groups; so all ranks end with the same parameters and optimizer state.  Within the loop a rank makes
    backward passes, and calls `step`, `zero_grad`, `no_sync` and `clip_grad_norm_` of this optimizer, and nothing else
    that needs all ranks.  A scheduler makes its steps outside of it, or ranks make different numbers of them.

    The entry is collective over the mesh, and so is the exit.

    Parameters
    ----------
    optimizer : ModuleOptimizer
        That of the loop.  One at a time on a mesh.
    divide_by_initial_world_size : bool
        Whether a mean gradient is the sum divided by the number of all ranks, also when some have run out; else by
        that of the ranks that have batches.  Not used by ``step(count=)``.
    enable : bool
        With False the context does nothing, for ranks that are known to have equally many batches.
    throw_on_early_termination : bool
        Raise RuntimeError on all ranks as soon as one has run out.

    Returns
    -------
    context manager
        For one ``with`` statement.

    Raises
    ------
    ValueError
        At the entry and on every rank, if workers take steps by themselves (`LocalSGDOptimizer`), gradients wait for
        `synchronize_optimizer_state`, a batch norm sums over ranks, or tensor or pipeline ranks have cut the module.
    RuntimeError
        On every rank, if ranks that have batches do different things, as a step and another backward pass.
    """
    return Join(optimizer, divide_by_initial_world_size, enable, throw_on_early_termination)


class Join:
    """The context of `join`.  Ranks that have batches call its `announce` before they do what needs all ranks."""

    def __init__(self, optimizer: ModuleOptimizer, by_all: bool, enable: bool, throw: bool) -> None:
        self._optimizer = optimizer
        self._by_all = by_all
        self._enable = enable
        self._throw = throw
        self._axis: Axis = optimizer.optimizer.mesh.data
        self._hooks, self._buffers = optimizer._hooks, optimizer._state.buffers

    def __enter__(self) -> None:
        with opening(self._axis, "join") as same:
            same |= {"enable": self._enable, "divide_by_initial_world_size": self._by_all}
            same["throw_on_early_termination"] = self._throw
            if self._enable:
                self._check()
        if self._enable:
            self._hooks.announce = self.announce
            _meshes_in_use.add(id(self._optimizer.optimizer.mesh))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._enable:
            return
        self._hooks.announce = None
        try:
            if kind is None:
                if self._hooks.has_begun_sums:  # of a pass that others use in their next step
                    self._hooks.end_pass()
                else:
                    self._optimizer.zero_grad()
                self._shadow()
            elif not self._hooks.has_begun_sums:  # the others know nothing of a pass that the error has ended
                self._optimizer.zero_grad()
        finally:
            self._hooks.divide_by, self._buffers.ranks = 0, None
            _meshes_in_use.discard(id(self._optimizer.optimizer.mesh))

    def announce(self, what: int, values: Callable[[], tuple[Any, ...]] = tuple) -> None:
        """Announce the next action; ranks that have run out learn the values. Collective over the data axis."""
        self._exchange(what, values)

    def _check(self) -> None:
        optimizer = self._optimizer.optimizer
        if id(optimizer.mesh) in _meshes_in_use:
            raise ValueError("join is for one optimizer at a time on a mesh: leave the first context before")
        if optimizer.sharding.workers_differ or not optimizer.config.auto_sync_gradients:
            raise ValueError(
                f"join is for steps that all ranks take together, and those of {type(optimizer).__name__} with "
                f"auto_sync_gradients={optimizer.config.auto_sync_gradients} are not; leave it out, and give ranks "
                "equally many batches"
            )
        if self._optimizer._state.units is not None:
            raise ValueError(
                "under zero=3 all ranks make every forward pass, which gathers parameters: use zero=2 within join, or "
                "give ranks equally many batches"
            )
        if self._optimizer._state.cuts is not None or self._optimizer._state.stages is not None:
            raise ValueError(
                "tensor and pipeline ranks of a module make every pass together: make the mesh with tensor=1 within "
                "join, and pipeline=1, or give ranks equally many batches"
            )
        if has_norms_over_ranks(self._optimizer.module):
            raise ValueError(
                "the module has batch norms that sum over ranks, whose forward passes all ranks must make: give ranks "
                "equally many batches, as DistributedSampler does, in the place of join"
            )

    def _exchange(self, what: int, values: Callable[[], tuple[Any, ...]]) -> tuple[int, Any]:
        """The next action of the ranks that have batches, and the values of the first of them if some have run out."""
        codes = np.zeros(self._axis.size, np.int64)
        codes[self._axis.rank] = what
        self._axis.all_reduce(codes, label="control")
        active = np.flatnonzero(codes).tolist()
        if not active:
            return 0, ()
        kinds = {int(codes[rank]) for rank in active}
        if len(kinds) > 1:
            each = [f"ranks {np.flatnonzero(codes == kind).tolist()} {_IN_WORDS[kind]}" for kind in sorted(kinds)]
            error = f"within join all ranks that have batches must do the same, but {', '.join(each)}"
            raise raised_by_all(RuntimeError(error), self._axis.size)
        out = len(active) < self._axis.size
        if out and self._throw:
            gone = [rank for rank in range(self._axis.size) if rank not in active]
            error = f"ranks {gone} have run out of batches, and throw_on_early_termination=True"
            raise raised_by_all(RuntimeError(error), self._axis.size)
        self._buffers.ranks = active if out else None
        self._hooks.divide_by = 0 if self._by_all else len(active)
        (kind,) = kinds
        found: Any = ()
        if out and kind in (STEP, CLIP):
            found = json.loads(self._axis.allgather_object(json.dumps(values() if what else ()))[active[0]])
        if out and kind == STEP and isinstance(self._hooks, MeanHooks):
            # A loop may have changed them, as clipping does, and only ranks that have batches know how.
            flat = self._hooks.mean_gradients
            self._axis.broadcast(flat, root=active[0], label="gradients")
            arrays.ready(flat)
        return kind, found

    def _shadow(self) -> None:
        """Do the same as the others until all have run out."""
        optimizer, hooks = self._optimizer, self._hooks
        while True:
            what, values = self._exchange(0, tuple)
            if what == PASS:
                hooks.pass_without_samples()
            elif what == CLIP:
                optimizer.clip_grad_norm_(*values)
            elif what == STEP:
                count, groups = values
                with contextlib.suppress(TypeError, ValueError):  # which the step raises, on all ranks
                    optimizer._groups.restore({"live": groups})
                optimizer._take_step(count)
            elif what == DROP:
                optimizer.zero_grad()
            else:
                return
