"""Audits of a run, which find a rank that computes wrongly without a word.

Some processors do (Hochschild et al., "Cores that don't count", HotOS 2021).  In a reproducible run the gradient of a
micro-batch has the same bits on whichever rank computes it, so that any rank can check another one: `AuditedRunner`.

It does so in rounds.  In a round each rank computes a micro-batch of one other rank, so that the share of micro-batches
is also the share of time.  `draw` says who computes what again, from the number of the step alone.  Compared are
digests of the gradient, before it is added to anything, and of the loss.  Where two differ all ranks compute that
micro-batch, and the majority is right: `verdict`.

In a step with such a round sums over ranks are checked, too: `SumsAgain` has each part of a sum added up by a second
rank.  Where two differ the step's gradient is computed once more, and a third rank adds up that part.

A bit may also flip in memory: `compare_replicas` compares what all ranks hold.
"""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import listed
from mpishard.backend import array as arrays
from mpishard.backend.random import key, permuted
from mpishard.comm.agreement import DeferredError, agree_on_settings
from mpishard.comm.axis import Axis
from mpishard.comm.errors import known_to_all
from mpishard.data.sampling import micro_batches
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.io import log
from mpishard.layout.run_state import PARAMETERS
from mpishard.parameters.buckets import Bucket
from mpishard.record.audits import MENDED, SUMS, promise
from mpishard.reduction.ordered import OrderedSums
from mpishard.reduction.tree_sum import TermAssignment
from mpishard.training.objective import Objective
from mpishard.training.step_runner import StepRunner

Array = Any
# Periods from any moment to the next round, on average, where the round of each period comes at any moment of it.
_MEAN_WAIT = 7 / 12
REPLICAS = "replicas"  # the audit of what all ranks hold
REPLICAS_EVERY = 10  # steps from one comparison to the next
LEAST_SHARE = 1e-9  # a smaller one finds nothing within any run


# Who computes what again: functions of the step alone, the same on all ranks.


class Check(NamedTuple):
    """A micro-batch of `owner` that `auditor` computes too; both are ranks of the data axis."""

    micro_batch: int  # its number in the step
    owner: int
    auditor: int


def rounds_of(step: int, rate: float) -> int:
    """The number of rounds in a step; on average `rate`, with one round in each period of ``1 / rate`` steps.

    At which moment of its period a round comes is random, keyed by the number of the period.
    """
    begin, end = (step - 1) * rate, step * rate
    moments = (period + key(0, "audit", period) / 2**64 for period in range(math.floor(begin), math.ceil(end)))
    return sum(begin <= moment < end for moment in moments)


def draw(share: float, assignment: TermAssignment, step: int) -> list[Check]:
    """The checks of a step: in each round each rank is checked by one other rank, and checks one.

    A rank has at most as many checks as micro-batches; with a `share` of 1 all micro-batches are checked.
    """
    ranks, own = assignment.ranks, [assignment.terms(rank) for rank in range(assignment.ranks)]
    if ranks == 1:
        return []
    most = max(map(len, own))
    rounds = most if share == 1 else min(most, rounds_of(step, share * assignment.total / ranks))
    if not rounds:
        return []
    shifts = [1 + key(0, "auditor", step, number) % (ranks - 1) for number in range(rounds)]
    found = []
    for owner, numbers in enumerate(own):
        places = permuted(np.arange(min(rounds, len(numbers))), len(numbers), 0, "part", step, owner).tolist()
        pairs = zip(places, shifts, strict=False)
        found += [Check(numbers[place], owner, (owner + shift) % ranks) for place, shift in pairs]
    return found


def expected_steps(share: float, count: int, ranks: int) -> tuple[float, int]:
    """The steps until a rank that is always wrong is seen, on average and at most, of `count` micro-batches each."""
    if share == 1:
        return 1.0, 1
    period = ranks / (share * count)
    return max(1.0, _MEAN_WAIT * period + 0.5), math.ceil(2 * period)


def verdict(check: Check, first: tuple[int, int], again: Sequence[int]) -> list[int] | None:
    """The ranks that were wrong about a micro-batch, ascending; None if no majority says what is right.

    `first` are the digests of its owner and its auditor, `again` those of all ranks, which then have computed it.  Of
    two ranks neither is a majority, though one of them may have changed its mind.
    """
    digest, votes = Counter(again).most_common(1)[0]
    if len(again) < 3 or 2 * votes <= len(again):
        return None
    wrong = {rank for rank, found in enumerate(again) if found != digest}
    wrong |= {rank for rank, found in zip(check[1:], first, strict=True) if found != digest}
    return sorted(wrong)


class SumsAgain:
    """Has the sums of a step added up a second time: the part of each rank by the one `shift` ranks before it.

    `digests`: by owner of a part, of the sum by the owner and by the other rank; 0 where others know them.
    """

    def __init__(self, sums: OrderedSums, axis: Axis, shift: int) -> None:
        self.shift = shift
        self.digests: np.ndarray = np.zeros((axis.size, 2), np.int64)
        self._sums, self._axis = sums, axis
        self._other = (axis.rank + shift) % axis.size  # whose part this rank adds up, too

    def __call__(self, bucket: Bucket, partial: Sequence[Array], pieces: Sequence[int]) -> Callable[[Array], None]:
        """Start to add up the other rank's part of a bucket, as `OrderedSums.observer`.  Collective."""
        again = OrderedSums(self._axis, partial[-1][:0])
        again.assignment = self._sums.assignment
        first = sum(pieces[: self.shift])
        turned = [arrays.joined([each[first:], each[:first]]) for each in partial]
        found = arrays.empty(pieces[self._other], partial[-1].dtype, like=partial[-1])
        pending = again.start(bucket, turned, [*pieces[self.shift :], *pieces[: self.shift]], found)

        def tell(own: Array) -> None:
            self.digests[self._axis.rank, 0] ^= _digest(own, bucket)
            self.digests[self._other, 1] ^= _digest(pending.wait(), bucket)

        return tell


@known_to_all
class WrongPart(RuntimeError):
    """Ranks have computed something differently: `ranks` wrongly, or none of them if there is no majority.

    `facts`: what the record has of it, see `RunRecord.audit_found`.
    """

    def __init__(self, text: str, facts: Mapping[str, Any] | None = None, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.facts: Mapping[str, Any] = {} if facts is None else facts
        self.ranks = tuple(ranks)


# The checks of a run.


class AuditedRunner(StepRunner):
    """A `StepRunner` some of whose micro-batches and sums other ranks check, and which checks some of theirs.

    `share` is above 0 and at most 1.
    """

    def __init__(
        self,
        problem: Objective[Any],
        optimizer: ShardedOptimizer,
        checks_inputs: bool,
        deferred_error: DeferredError,
        share: float,
    ) -> None:
        super().__init__(problem, optimizer, checks_inputs, deferred_error)
        self._share = share
        self._reported = 0  # the number of ranks in the last report
        self._seen_right: dict[int, int] = {}  # by rank the last step in which a check found it right
        # Of the step under way.
        self._micro: list[np.ndarray] = []
        self._checks: list[Check] = []
        self._digests = np.empty((0, 2), np.int64)  # of owner and auditor, by check; 0 where others know them
        self._numbers: dict[int, int] = {}  # by micro-batch of this rank that is checked, the number of its check
        self._current = -1  # the micro-batch whose gradient the reducer sees next
        self._sums: SumsAgain | None = None

    @property
    def facts(self) -> dict[str, float | None]:
        """For the record: the share, and the steps until a rank that is always wrong is seen, None with one rank."""
        if self.axis.size == 1:
            return {"share": self._share, "mean_steps": None, "most_steps": None}
        count = len(micro_batches(np.empty(self.problem.batch_size), self.problem.micro_batch_size))
        mean, most = expected_steps(self._share, count, self.axis.size)
        return {"share": self._share, "mean_steps": round(mean, 2), "most_steps": most}

    def attach(self) -> None:
        """As `StepRunner.attach`; ValueError on all ranks unless any can compute what another one has, bit by bit."""
        super().attach()
        optimizer, audit = self.optimizer, f"audit={self._share:g}"
        if self.ordered is None:
            raise ValueError(f"{audit} compares bits, and needs reproducible=True")
        if self.problem.everywhere:
            raise ValueError(f"{audit} is for samples that ranks share: give samples=N; ranks compare a whole function")
        if self.together or self.reducer.on_demand or optimizer.sharding.workers_differ:
            raise ValueError(
                f"{audit} needs micro-batches that a rank computes alone: use DDP or ZeRO-1, on a mesh with a data "
                f"axis alone; this is {optimizer.sharding.name} on {optimizer.mesh.sizes}"
            )
        _agree_on_arithmetic(optimizer, audit)
        self._seen_right.clear()  # ranks have other numbers now
        self._sums = None

    def _report(self) -> None:
        """Say on the first rank what is spent, and what it brings, if the number of ranks has changed."""
        if self.axis.size == self._reported:
            return
        self._reported = self.axis.size
        if self.axis.rank == 0:
            log.inform(f"audit: {promise(self.facts)}")

    # -- a step -------------------------------------------------------------------------------------------------------

    def losses_and_gradient(self, batch: np.ndarray) -> tuple[np.ndarray, int]:
        """As that of `StepRunner`.  Raises WrongPart on all ranks where two have computed something differently."""
        shift = 1 + key(0, "sums", self._step) % max(1, self.axis.size - 1)
        found = self._checked_step(batch, shift)
        if self._checks:
            self._compare(batch)
        return found

    def _checked_step(self, batch: np.ndarray, shift: int) -> tuple[np.ndarray, int]:
        """Compute losses and gradient, and digests of what is checked.  If anything is, the gradient is summed then."""
        assert self.ordered is not None
        self._report()
        self._micro = micro_batches(batch, self.problem.micro_batch_size)
        self._checks = draw(self._share, self._assignment(len(self._micro)), self._step)
        if self._checks:
            self._sums = self.ordered.observer = SumsAgain(self.ordered, self.axis, shift)
        self.reducer.observers.append(self._observe)
        try:
            found = super().losses_and_gradient(batch)
            if self._checks:
                self.reducer.finalize()
        finally:
            self.reducer.observers.remove(self._observe)
            self.ordered.observer = None
        return found

    def _forward_backward_terms(self, batch: np.ndarray, ordered: OrderedSums) -> np.ndarray:
        """Compute what this rank checks first, and have the reducer show what others check of its own."""
        self._digests = np.zeros((len(self._checks), 2), np.int64)
        self._current, self._numbers = -1, {}
        for number, check in enumerate(self._checks):
            if check.auditor == self.axis.rank:
                self._digests[number, 1] = self._compute_alone(check.micro_batch)
            if check.owner == self.axis.rank:
                self._numbers[check.micro_batch] = number
        return super()._forward_backward_terms(batch, ordered)

    def _term(self, number: int, micro: list[np.ndarray]) -> float:
        self._current = number
        loss = super()._term(number, micro)
        if number in self._numbers:
            self._digests[self._numbers[number], 0] ^= _digest(np.array([loss]))
        return loss

    def _observe(self, bucket: Bucket, gradient: Array) -> None:
        """Add a bucket of one of this rank's micro-batches to its digest, if it is checked."""
        if self._current in self._numbers:
            self._digests[self._numbers[self._current], 0] ^= _digest(gradient, bucket)

    def _compute_alone(self, micro_batch: int) -> int:
        """The digest of a micro-batch, computed as a term of the step is; nothing else comes of it."""
        self.parameters.reset_gradients()
        if not self.of_model:
            self._gradients[...] = 0
        carried = self.parameters.carried
        before = dict(carried.facts)
        with self._another_follows:
            loss = self._forward_backward(self._micro[micro_batch])
        carried.restore(before)  # running averages count a micro-batch once
        found = _digest(np.array([loss]))
        for bucket in self.reducer.buckets:
            own = self.reducer.completed(bucket) if self.of_model else self._gradients[bucket.start : bucket.stop]
            found ^= _digest(own, bucket)
        self.parameters.reset_gradients()
        return found

    @property
    def _step(self) -> int:
        return self.optimizer.clock + 1

    # -- what comes of it ---------------------------------------------------------------------------------------------

    def _compare(self, batch: np.ndarray) -> None:
        """Compare the step's digests, before anything comes of its gradients.  Collective over the data axis."""
        assert self._sums is not None
        failed = self._deferred_error.error is not None  # all are about to raise it
        own = np.concatenate([self._digests, self._sums.digests]).reshape(-1)
        shared = self.axis.all_reduce(np.append(own, failed), label="audit")
        if shared[-1]:
            return
        digests = shared[:-1].reshape(-1, 2).tolist()
        for check, (first, second) in zip(self._checks, digests, strict=False):
            if first != second:
                raise self._judged(check, (first, second))
        sums = digests[len(self._checks) :]
        if any(first != second for first, second in sums):
            raise self._judged_sums(batch, sums)
        for check in self._checks:
            self._seen_right |= {check.owner: self._step, check.auditor: self._step}

    def _judged(self, check: Check, first: tuple[int, int]) -> WrongPart:
        """Have all ranks compute a micro-batch, and find who was wrong.  Collective over the data axis."""
        again = self.axis.allgather_object(self._compute_alone(check.micro_batch))
        places, wrong = _places(self.axis), verdict(check, first, again)
        names = _names(places)
        what = (
            f"micro-batch {check.micro_batch} of step {self._step} (samples {listed(self._micro[check.micro_batch])})"
        )
        facts = {"step": self._step, "micro_batch": check.micro_batch}
        if wrong is not None:
            return self._wrong(f"{what} computed", facts, places, wrong)
        changed = [names[rank] for rank, found in zip(check[1:], first, strict=True) if found != again[rank]]
        asked = f"{' and '.join(changed) or 'neither'} found another one when asked again. "
        return self._undecided(what, facts, places, check[1:], asked)

    def _judged_sums(self, batch: np.ndarray, sums: Sequence[tuple[int, int]]) -> WrongPart:
        """Have third ranks add up the step's sums, and find who was wrong.  Collective over the data axis.

        `sums`: by owner, the digests of the owner and of the other rank.
        """
        assert self._sums is not None
        size, shift = self.axis.size, self._sums.shift
        self.parameters.reset_gradients()
        if self.costs is not None:
            self.costs.begin(len(self._micro))  # what a rank has measured in this step the others do not know
        self._checked_step(batch, shift % (size - 1) + 1)  # of two ranks there is no other
        thirds = self.axis.all_reduce(self._sums.digests[:, 1].copy(), label="audit").tolist()
        asked: set[int] = set()
        wrong: set[int] = set()
        for owner, (found, third) in enumerate(zip(sums, thirds, strict=True)):
            pair = owner, (owner - shift) % size
            if found[0] != found[1]:
                asked.update(pair)
                if size > 2 and third in found:
                    wrong.add(pair[found[0] == third])
        places, facts = _places(self.axis), {"step": self._step, "kind": SUMS}
        what = f"sums of gradients of step {self._step}"
        if wrong:
            return self._wrong(f"{what} added up", facts, places, sorted(wrong))
        return self._undecided(what, facts, places, sorted(asked))

    def _wrong(
        self, what: str, facts: Mapping[str, Any], places: Sequence[tuple[str, int]], ranks: Sequence[int]
    ) -> WrongPart:
        """The error that names the ranks that are wrong."""
        right = self._last_right(ranks)
        seen = f"after step {right}, the last one in which it was seen right," if right else "before"
        used = f"steps and checkpoints {seen} may have wrong parts of it"
        if self._share == 1:
            used = "nothing that it computed wrongly was used"
        names = _names(places)
        text = f"the audit found {what} wrongly by {listed(names[rank] for rank in ranks)}; {used}"
        return WrongPart(text, {**facts, "last_right": right, **_who(places, ranks, ranks)}, ranks)

    def _undecided(
        self,
        what: str,
        facts: Mapping[str, Any],
        places: Sequence[tuple[str, int]],
        ranks: Sequence[int],
        asked: str = "",
    ) -> WrongPart:
        """The error for ranks that differ without a majority."""
        names = _names(places)
        more = "; with three ranks or more the odd one is found" if len(names) < 3 else ""
        return WrongPart(
            f"the audit found two results for {what}, of {' and '.join(names[rank] for rank in ranks)}, and no "
            f"majority for either; {asked}Test their processors and memory{more}. A function that draws random "
            "numbers, or keeps anything between calls, is no case for audit=",
            {**facts, "last_right": self._last_right(ranks), **_who(places, ranks, None)},
        )

    def _last_right(self, ranks: Sequence[int]) -> int:
        """The last step in which all of these ranks were seen right; with a share of 1 all that was used had been."""
        return self._step - 1 if self._share == 1 else min(self._seen_right.get(rank, 0) for rank in ranks)


# What all ranks hold.


def check_replicas(optimizer: ShardedOptimizer) -> dict[str, float | None]:
    """Raise ValueError on all ranks unless they hold the same parameters, and change them alike.  Collective.

    Returns, for the record, the steps between two comparisons, and until a bit that has flipped is seen, None with one
    rank.
    """
    sharding, mesh, audit = optimizer.sharding, optimizer.mesh, f"audit={REPLICAS!r}"
    if sharding.workers_differ or sharding.shards_parameters or mesh.size > mesh.data.size:
        raise ValueError(
            f"{audit} compares what all ranks hold: use DDP, or ZeRO-1 or 2 for parameters alone, on a mesh "
            f"with a data axis alone; this is {sharding.name} on {mesh.sizes}"
        )
    _agree_on_arithmetic(optimizer, audit)
    mean, most = ((REPLICAS_EVERY + 1) / 2, REPLICAS_EVERY) if mesh.size > 1 else (None, None)
    return {"every": REPLICAS_EVERY, "mean_steps": mean, "most_steps": most}


def compare_replicas(
    optimizer: ShardedOptimizer, note: Callable[[Mapping[str, Any]], None], *, last: bool = False
) -> None:
    """Between two steps, compare parameters and state of all ranks if that is due; who differs takes them from others.

    It is due every `REPLICAS_EVERY` steps, and after the `last` one.

    Collective over the data axis.  `note` gets the facts of what is mended, for the record.  Raises WrongPart on all
    ranks if there is no majority.
    """
    axis, step = optimizer.axis, optimizer.clock
    if (step % REPLICAS_EVERY and not last) or axis.size == 1:
        return
    sharding = optimizer.sharding
    whole = [
        shard
        for shard in optimizer.state.capture().shards
        # Of the errors of compression each rank has its own.
        if shard.kind == PARAMETERS or not (sharding.divides_state or shard.kind == sharding.errors_kind)
    ]
    digests = np.zeros((axis.size, len(whole)), np.int64)
    digests[axis.rank] = [_digest(shard.array) for shard in whole]
    axis.all_reduce(digests.reshape(-1), label="audit")
    for shard, found in zip(whole, digests.T.tolist(), strict=True):
        digest, votes = Counter(found).most_common(1)[0]
        if votes == axis.size:
            continue
        places, right = _places(axis), max(0, (step - 1) // REPLICAS_EVERY * REPLICAS_EVERY)
        facts = {"step": step, "kind": shard.kind, "last_right": right}
        names, since = _names(places), f"steps and checkpoints after step {right} may have wrong parts of it"
        if axis.size < 3 or 2 * votes <= axis.size:
            text = f"the audit found other {shard.kind} on each of {listed(names)}, and no majority; {since}"
            raise WrongPart(text, facts | _who(places, range(axis.size), None))
        axis.broadcast(shard.array, root=found.index(digest), label="audit")
        wrong = [rank for rank, own in enumerate(found) if own != digest]
        note(facts | _who(places, wrong, wrong) | {"outcome": MENDED})
        if axis.rank == 0:
            on = listed(names[rank] for rank in wrong)
            log.warn(f"the audit found other {shard.kind} on {on}, which takes those of the others; {since}")


def _agree_on_arithmetic(optimizer: ShardedOptimizer, audit: str) -> None:
    """Raise ValueError on all ranks unless their processors and libraries give the same bits.  Collective."""
    remedy = f"leave {audit} out, or use nodes of one kind"
    what, own = "arithmetic, whose bits an audit compares", optimizer.settings.arithmetic.own
    agree_on_settings(optimizer.world, own, what=what, remedy=remedy)


def _places(axis: Axis) -> list[tuple[str, int]]:
    """The host and the process of each rank of an axis.  Collective."""
    return axis.allgather_object((platform.node(), os.getpid()))


def _names(places: Sequence[tuple[str, int]]) -> list[str]:
    """Ranks with their hosts and processes, for messages."""
    return [f"rank {rank} on {host} (pid {process})" for rank, (host, process) in enumerate(places)]


def _who(places: Sequence[tuple[str, int]], ranks: Sequence[int], wrong: Sequence[int] | None) -> dict[str, Any]:
    """Ranks for the record: those who are wrong, or without a majority those who differ."""
    who = [{"rank": rank, "host": places[rank][0], "pid": places[rank][1]} for rank in ranks]
    return {"wrong": [], "differ": who} if wrong is None else {"wrong": who, "differ": []}


def _digest(array: Array, bucket: Bucket | None = None) -> int:
    """A hash of a bucket's gradient, or of a loss, that fits int64; at least 0."""
    return arrays.digest(array, seed=0 if bucket is None else bucket.index + 1)
