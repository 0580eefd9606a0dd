"""What the bits of an optimizer's steps depend on besides its settings: the arithmetic of the machine and the layout.

`ShardingConfiguration.reproducible` promises the same bits on any layout, but not with another BLAS kernel, another
number of shards or other micro-batches. A run that would resume with other ones raises, or records that it continued
with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from mpishard.backend import array as arrays
from mpishard.backend.gemm import choice
from mpishard.backend.process import arithmetic, fix_blas_threads, of_products
from mpishard.comm.agreement import agree_on_settings, fingerprint, gather_difference
from mpishard.comm.axis import Axis
from mpishard.data_parallel.configuration import SHARDING, ShardingConfiguration
from mpishard.io import log
from mpishard.layout.run_state import brief
from mpishard.parameters.flat import FlatParameters

# Names among the facts of a state.
ARITHMETIC, DIFFERENT_BITS = "arithmetic.json", "different_bits.json"
_PROMISE = "arithmetic for the same bits on any layout (reproducible=True)"
_ALLOWED = "ShardingConfiguration(..., allow_different_bits=True) continues, and records it"
_ON_TENSOR = " on "  # before the number of tensor ranks, among which MPI takes the sums
# By fact how to have the value that the saved run had; others are of the machine and its libraries.
_REMEDIES = {
    "kernels": "run it with the release of mpishard that made the state",
    "BLAS kernels": "set OPENBLAS_CORETYPE={}",
    "BLAS threads": "set OPENBLAS_NUM_THREADS={}",
    "products": "set MPISHARD_PRODUCTS={}",
    "libraries for products": "have {} on all ranks",
    "XLA threads": "set NPROC={}",
    "shards": "make the model with shards={}",
    "micro_batch_size": "give the problem micro_batch_size={}",
    "dtype": "make the model with dtype={}",
}


class Arithmetic:
    """What the bits of one optimizer's steps depend on besides its settings, as facts of this rank.

    A reproducible run compares them between its ranks, and with the facts of a checkpoint from which it resumes.
    """

    def __init__(self) -> None:
        self.own: dict[str, str] = {}  # the facts as texts, once there are parameters
        # What the run continued with in place of other facts, with ``allow_different_bits=True``; the same on all ranks
        self.changes: list[str] = []
        self._products = choice.Choice()

    def take(self, parameters: FlatParameters, config: ShardingConfiguration, world: Axis) -> None:
        """Note the facts of this process, and compare those of all ranks of a reproducible run. Collective.

        Raises ValueError on all ranks if they differ, unless the configuration allows it.
        """
        self.fix_threads(config)  # a mesh created after the optimizer has changed their number
        before, self._products = self.own.get("shards"), choice.active()
        self.own |= {
            **arithmetic(),
            **parameters.carried.arithmetic,
            "arrays": arrays.module_of(parameters.like).__name__,
            "dtype": parameters.dtype.name,
            "shards": _shards(parameters),
        }
        self.agree(config, world)
        if config.reproducible and before not in (None, self.own["shards"]):  # another mesh
            self._change(f"the bits change with the mesh: shards was {before} and is {self.own['shards']}", world.rank)
        if config.reproducible and parameters.layout_dependence:
            self._change(f"the bits depend on the layout: the model has {parameters.layout_dependence}", world.rank)

    def fix_threads(self, config: ShardingConfiguration) -> None:
        """Take one thread for products from now on, if the bits of the run must not depend on their number."""
        if config.reproducible:
            fix_blas_threads()

    def note_products(self) -> None:
        """Note the libraries for matrix products, after this process has taken a choice of others.

        The ranks of the run do not: if one that joins lacks their library, they differ.
        """
        self._products = choice.active()
        self.own |= of_products(self._products)

    def keep_products(self, config: ShardingConfiguration) -> None:
        """Continue with the libraries for products that the ranks have agreed on, if another mesh has changed them."""
        if config.reproducible and choice.active() is not self._products:
            choice.activate(self._products)

    def note_micro_batches(self, size: int | None) -> None:
        """Note the problem's `micro_batch_size`."""
        self.own["micro_batch_size"] = "a 16th of the batch" if size is None else str(size)

    def agree(self, config: ShardingConfiguration, ranks: Axis, *, places: bool = True) -> None:
        """Compare the facts of ranks that take part in a reproducible run, or are about to. Collective over them.

        `places`: all have one mesh. Raises ValueError on all ranks if they differ, unless the configuration allows it.
        """
        if not config.reproducible:
            return
        own = self.own if places else self.own | {"shards": self.own["shards"].partition(_ON_TENSOR)[0]}
        if not config.allow_different_bits:
            agree_on_settings(ranks, own, what=_PROMISE, remedy=f"use nodes of one kind; {_ALLOWED}")
        elif len(set(ranks.allgather_object(fingerprint(own)))) > 1:
            self._change(str(gather_difference(ranks, own, _PROMISE, "the bits depend on the layout")), ranks.rank)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for a `RunState`."""
        changes = {DIFFERENT_BITS: list(self.changes)} if self.changes else {}
        return {ARITHMETIC: dict(self.own), **changes} if self.own else changes

    @property
    def record(self) -> dict[str, Any]:
        """The facts for the record of a run."""
        return {name.removesuffix(".json"): value for name, value in self.facts.items()}

    def check(self, saved: Mapping[str, Any], config: ShardingConfiguration) -> None:
        """Raise ValueError unless a reproducible run resumes from saved facts with the same bits, or may differ."""
        if not config.reproducible or config.allow_different_bits or not _was_reproducible(saved):
            return
        if found := self._differences(saved):
            raise ValueError(
                f"with reproducible=True the saved run must go on with what its bits depend on, but {_both(found)}; "
                f"{', '.join(starmap(_way_back, found))}; or {_ALLOWED}"
            )

    def note(self, saved: Mapping[str, Any], config: ShardingConfiguration, rank: int) -> None:
        """Note, and warn on rank 0, what a run continues with in place of saved facts that have passed `check`."""
        if not config.reproducible or SHARDING not in saved:  # no checkpoint, or not of an optimizer
            return
        step, text = saved.get("steps", 0), ""
        if not _was_reproducible(saved):
            text = "its earlier steps were without reproducible=True"
        elif not _saved_facts(saved):
            text = "the checkpoint does not say with which BLAS kernels, shards and micro-batches it was made"
        elif found := self._differences(saved):
            self._change(f"from step {step} on other bits than in one run: {_both(found)}", rank)
        if text and rank == 0:
            log.inform(f"reproducible=True holds from step {step} on: {text}")

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from saved facts that have passed `check`, with their list of changes."""
        earlier = saved.get(DIFFERENT_BITS, [])
        if isinstance(earlier, list | tuple):
            self.changes = list(dict.fromkeys([*map(brief, earlier), *self.changes]))

    def _differences(self, saved: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """The name, the saved and the own value of each fact that would differ; a fact that one side lacks does not."""
        theirs = _saved_facts(saved)
        pairs = [(name, theirs[name], own) for name, own in self.own.items() if name in theirs]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def _change(self, text: str, rank: int) -> None:
        if text not in self.changes:
            self.changes.append(text)
            if rank == 0:
                log.inform(f"allow_different_bits=True: {text}")


def _shards(parameters: FlatParameters) -> str:
    """The slices over which a model is defined; its tensor ranks, if MPI takes the sums over them."""
    shards = max((spec.slices for spec in parameters.specs), default=1)
    tensor = parameters.place.tensor_size
    return f"1{_ON_TENSOR}{tensor} tensor ranks" if parameters.sums_by_mpi and tensor > 1 else str(shards)


def _saved_facts(saved: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a state on which bits depend, each as a short text; none if the state has no facts."""
    theirs = saved.get(ARITHMETIC)
    return {name: brief(value) for name, value in theirs.items()} if isinstance(theirs, Mapping) else {}


def _was_reproducible(saved: Mapping[str, Any]) -> bool:
    """Return True if a state is of a reproducible run, or does not say."""
    settings = saved.get(SHARDING)
    return not isinstance(settings, Mapping) or bool(settings.get("reproducible", True))


def _way_back(name: str, then: str, own: str) -> str:
    """How to have the saved value of a fact."""
    if name == "shards" and _ON_TENSOR in then + own:  # a model without slices
        return f"make the mesh with tensor={then.partition(_ON_TENSOR)[2].partition(' ')[0] or 1}"
    return _REMEDIES.get(name, f"run it where {name} is {{}}").format(then)


def _both(found: list[tuple[str, str, str]]) -> str:
    return ", ".join(f"{name} is {then} there and {own} here" for name, then, own in found)
