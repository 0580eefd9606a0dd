"""An axis of a mesh: a communicator with a name, sub-groups, and agreement of its ranks on errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from mpi4py import MPI

from mpishard.arguments import entries, integer, shown
from mpishard.comm.call_matching import CallMatching
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.channel import NOTHING, Family
from mpishard.comm.communicator import Communicator
from mpishard.comm.errors import ErrorForOthers, on_any, raised_on_all
from mpishard.comm.ledger import Ledger
from mpishard.io import log
from mpishard.launch.job_notes import raised_by_all

Array = Any


def allgather_values(comm: MPI.Comm, value: Any) -> list[Any]:
    """The values of all ranks of `comm`, by rank; MPI.Exception if a rank has died (ULFM).  Collective."""
    try:
        return list(comm.allgather(value))
    except MPI.Exception:
        raise
    except Exception as error:
        # What ranks have sent can be read.  Open MPI 5 was seen to return success from a call in which a rank died,
        # with memory that nobody had written.  That is a death, no failure of this rank.
        if heals_in_place():
            raise MPI.Exception(MPI.ERR_PROC_FAILED) from error
        raise


def rank_in_job() -> tuple[int, int]:
    """The rank of this process among those of its launch, and their number; 0 and 1 where nobody has started MPI."""
    return (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) if MPI.Is_initialized() else (0, 1)


def ranks_in(comm: MPI.Comm, world: Communicator) -> list[int]:
    """The ranks of `world` that a communicator of the application has, in ascending order; -1 for any other process.

    Not collective.
    """
    return sorted(max(rank, -1) for rank in MPI.Group.Translate_ranks(comm.group, None, world.comm.group))


class Axis(Communicator):
    """One direction of a mesh: the ranks that differ in one coordinate only, and the collectives over them.

    It is a `Communicator` of a mesh.  That means: it stays the same object when its ranks change (`rebind`); it makes
    axes of some of its ranks (`subgroup`, `split`) and frees them; and its ranks exchange small values
    (`allgather_object`) and errors (`raise_if_any`), so that no rank continues while another raises.

    Parameters
    ----------
    name : str
        As the ledger and messages name it.
    comm : mpi4py.MPI.Intracomm
        Its ranks.  The axis owns it from now on, unless it is MPI.COMM_SELF.
    ledger : Ledger
        Where calls are noted.
    members : sequence of int, optional
        Ranks of the whole mesh, by rank of `comm`; default: those of `comm`.
    later : mpi4py.MPI.Intracomm, optional
        A duplicate of `comm` for the ``start_*`` forms; default: made here, collectively.
    matching : CallMatching, optional
        In debug mode: compares the calls of the ranks.
    family : Family, optional
        Of its communicators, and of those of its sub-groups.
    """

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        ledger: Ledger,
        *,
        members: Sequence[int] | None = None,
        later: MPI.Intracomm | None = None,
        matching: CallMatching | None = None,
        family: Family | None = None,
    ) -> None:
        super().__init__(name, comm, ledger, members=members, later=later, matching=matching, family=family)
        # The names of `subgroup` by ranks, which stay; and the axes by ranks, or by the name of `split`.
        self._names: dict[tuple[int, ...], str] = {}
        self._subgroups: dict[tuple[int, ...] | str, Axis | None] = {}
        # What the public call that begins has entered so far, see `mpishard.comm.agreement.opening`.
        self.opened: dict[str, Any] | None = None
        # What operations of a pass call before they begin, see `mpishard.comm.agreement.left_together`.
        self.meet: Callable[[], None] = lambda: None

    def withhold_device_buffers(self, withhold: bool) -> None:
        """Stop handing device memory to MPI until `rebind`, or go back to what `probe` has found.  Not collective.

        Parameters
        ----------
        withhold : bool
            True to stop, False to go back.  The same on all ranks.  Sub-groups follow.
        """
        self._channel.withholds_device_buffers = self._channel_of_started.withholds_device_buffers = withhold
        for part in self._subgroups.values():
            if part is not None:
                part.withhold_device_buffers(withhold)

    @classmethod
    def single(cls, name: str = "single") -> Axis:
        """Make the axis of this rank alone, for code that has no mesh.  Not collective, and no MPI call.

        Parameters
        ----------
        name : str
            As its ledger names it, which is a new one.

        Returns
        -------
        Axis
            Of size 1, over MPI.COMM_SELF.
        """
        return cls(name, MPI.COMM_SELF, Ledger(), members=[0], later=MPI.COMM_SELF)

    @property
    def compares_calls(self) -> bool:
        """True in debug mode on several ranks: they compare their calls before these start."""
        return self._matching is not None and self.size > 1

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank={self.rank}, size={self.size})"

    # -- its ranks change ---------------------------------------------------------------------------------------------

    def rebind(
        self,
        comm: MPI.Intracomm,
        *,
        members: Sequence[int] | None = None,
        later: MPI.Intracomm | None = None,
        matching: CallMatching | None = None,
    ) -> None:
        """Become the axis of other ranks; every holder of this object sees the change.  Collective over `comm`.

        The old communicators are not freed, and its sub-groups are forgotten; see `regain_subgroups`.

        Parameters
        ----------
        comm, members, later, matching : as for `Axis`
            Of the new ranks.
        """
        self._bind(comm, members, later, matching)
        self._subgroups = {}

    def revoke(self) -> None:
        """Make every operation on its communicators fail on all ranks, also those under way.  Not collective (ULFM)."""
        for part in self._subgroups.values():
            if part is not None:
                part.revoke()
        self._channel.revoke()
        self._channel_of_started.revoke()

    def finish(self) -> None:
        """Wait until MPI is done with the collectives that were started and not waited for; errors are ignored.

        Collective, if there are any.
        """
        for part in self._subgroups.values():
            if part is not None:
                part.finish()
        self._channel_of_started.finish()

    def free(self) -> None:
        """Free its communicators, and those of its sub-groups.  Collective."""
        for part in self._subgroups.values():
            if part is not None:
                part.free()
        self._channel_of_started.free()
        self._channel.free()

    # -- sub-groups ---------------------------------------------------------------------------------------------------

    def subgroup(self, name: str, ranks: Sequence[int]) -> Axis | None:
        """Make the axis of some of its ranks, in ascending order.  Collective over this axis.

        Parameters
        ----------
        name : str
            Of the new axis.
        ranks : sequence of int
            Ranks of this axis, the same on all of them.

        Returns
        -------
        Axis or None
            None on the other ranks.  A second call with the same ranks returns the same axis, under its first name.  It
            is freed with this axis.

        Raises
        ------
        TypeError, ValueError
            On this rank, if `ranks` are no ranks of this axis, or one is named twice.
        """
        key = tuple(sorted(integer("a rank of the subgroup", rank) for rank in entries("ranks", ranks, "ranks")))
        if not key or len(set(key)) < len(key) or not 0 <= key[0] <= key[-1] < self.size:
            raise ValueError(
                f"subgroup({name!r}, ranks={shown(list(key))}) must be different ranks from 0 to {self.size - 1}, "
                f"those of axis {self.name!r}"
            )
        if key not in self._subgroups:
            self._compare("subgroup", key)
            self._names.setdefault(key, name)
            self._subgroups[key] = self._part(key, self.comm, 0)
        return self._subgroups[key]

    def regain_subgroups(self, parent: MPI.Intracomm, color: int) -> None:
        """Make the axes of `subgroup` again after `rebind`.  Collective over `parent`.

        Parameters
        ----------
        parent : mpi4py.MPI.Intracomm
            The ranks of all axes that were rebound together.
        color : int
            A different one for each of these axes.
        """
        for key in self._names:
            self._subgroups[key] = self._part(key, parent, color)

    def forget_subgroups(self) -> None:
        """Let `regain_subgroups` make none of the axes of `subgroup` so far.  Not collective; before `rebind`."""
        self._names = {}

    def split(self, name: str, color: int) -> Axis:
        """Make the axis of the ranks that give the same color.  Collective over this axis.

        Parameters
        ----------
        name : str
            Of the new axis.
        color : int
            Not negative, and below 2**31.

        Returns
        -------
        Axis
            A second call with the same name returns the same axis, until `rebind`.  It is freed with this axis.

        Raises
        ------
        TypeError, ValueError
            On every rank, if one has no such color, or another name.
        """
        part = self._subgroups.get(name)
        if part is None:
            with raised_on_all(self):
                given = integer("color", int(color) if isinstance(color, bool) else color, least=0)
                if given >= 2**31:
                    raise ValueError(f"color={given} must be below 2**31")
            self._compare("split", name)
            now, later = self._split(self.comm, color)
            ranks = [0] if self._channel.is_self else MPI.Group.Translate_ranks(now.group, None, self.comm.group)
            members = [self.members[rank] for rank in ranks]
            part = self._axis_of(name, now, later, members)
            self._subgroups[name] = part
        return part

    def _compare(self, call: str, what: Any) -> None:
        """Raise ValueError on all ranks unless they make the same axis.  Collective."""
        if self._channel.is_self:
            return
        given = self.allgather_object((call, what))
        other = next((rank for rank, each in enumerate(given) if each != given[0]), None)
        if other is not None:
            error = ValueError(
                f"all ranks of axis {self.name!r} must make the same axis, but rank 0 gives {given[0][1]!r} to "
                f"{given[0][0]}() and rank {other} gives {given[other][1]!r} to {given[other][0]}()"
            )
            raise raised_by_all(error, self.size)

    def _part(self, key: tuple[int, ...], parent: MPI.Intracomm, color: int) -> Axis | None:
        now, later = self._split(parent, color if self.rank in key else MPI.UNDEFINED)
        if self.rank not in key:
            return None
        members = [self.members[rank] for rank in key]
        return self._axis_of(self._names[key], now, later, members)

    def _split(self, parent: MPI.Intracomm, color: int) -> list[MPI.Intracomm]:
        """Communicators for blocking and for started calls.  MPI.COMM_SELF stays what it is, without a call of MPI."""
        if parent == MPI.COMM_SELF:
            return [parent, parent]
        with Family.creating():
            return [cast(MPI.Intracomm, parent.Split(color, self.rank)) for _ in range(2)]

    def _axis_of(self, name: str, now: MPI.Intracomm, later: MPI.Intracomm, members: list[int]) -> Axis:
        shared: dict[str, Any] = {"matching": self._matching, "family": self._family}
        part = Axis(name, now, self.ledger, members=members, later=later, **shared)
        part.withhold_device_buffers(self._channel.withholds_device_buffers)
        return part

    # -- small values, and errors -------------------------------------------------------------------------------------

    def allgather_object(self, value: Any) -> list[Any]:
        """Exchange a small plain value.  Collective.

        Parameters
        ----------
        value : object
            Numbers, strings, and tuples of them; no arrays.

        Returns
        -------
        list
            The values of all ranks, by rank.

        Raises
        ------
        MPI.Exception
            If a rank has died (ULFM).
        """
        ledger = self.ledger
        ledger.active = call = self._channel.begin("allgather_object", NOTHING, "control")
        try:
            values = allgather_values(self.comm, value)
        finally:
            ledger.active = None
        ledger.enter(call, 0, ledger.spend(call, call[0]))
        return values

    def raise_if_any(self, problem: BaseException | None) -> None:
        """Raise on all ranks if any rank has a problem.  Collective.

        No rank continues while another raises, so no rank is left waiting.

        Parameters
        ----------
        problem : Exception or None
            What this rank has found.

        Raises
        ------
        Exception
            `problem`, or else that of the first rank with one, of the same class if that is a common one.
        SystemExit
            If the first rank with one has called ``sys.exit``: with the same code.
        """
        given: Any = problem
        if not isinstance(given, BaseException | None):
            problem = TypeError(f"raise_if_any takes an exception or None, got {shown(given)}")
        if self._channel.is_self and problem is not None:
            raise problem  # code without a mesh may run where nobody has started MPI
        if on_any(self, problem is not None):
            self.raise_together(problem)

    def raise_together(self, problem: BaseException | None) -> None:
        """Raise on all ranks, which know that some rank has a problem: half of `raise_if_any`.  Collective.

        Parameters
        ----------
        problem : Exception or None
            What this rank has found.

        Raises
        ------
        Exception
            As `raise_if_any`.
        """
        own = None if problem is None else ErrorForOthers.of(problem, self.members[self.rank])
        problems = self.allgather_object(own)
        first = next(known for known in problems if known is not None)
        if first.exit_code is not None and self.rank == 0 and self.size > 1:
            log.warn(f"rank {first.rank} called sys.exit in the run; all ranks end with its code {first.exit_code}")
        if problem is not None:
            if all(known is not None and known[:2] == first[:2] for known in problems):
                raised_by_all(problem, self.size)
            raise problem
        raise first.made()


# The ranks that together hold one copy of a model, as one axis.


class ModelParallelGroup:
    """The ranks of one data coordinate, with the methods of `Axis` that agreements and norms need.

    It needs no separate communicator: each method runs over the tensor axis, then over the pipeline axis. All methods
    and the constructor are collective over these ranks.
    """

    def __init__(self, tensor: Axis, pipeline: Axis, rank: int) -> None:
        self._axes = [axis for axis in (tensor, pipeline) if axis.size > 1]
        self.members: list[int] = self.allgather_object(rank)  # world ranks of the group; `rank` is this one
        self.opened: dict[str, Any] | None = None  # as `Axis.opened`

    def all_reduce(self, buffer: Array, op: str = "sum", *, label: str = "") -> Array:
        """As `Axis.all_reduce`, in place."""
        for axis in self._axes:
            axis.all_reduce(buffer, op=op, label=label)
        return buffer

    def allgather_object(self, value: Any) -> list[Any]:
        """As `Axis.allgather_object`, in the order of `members`."""
        values = [value]
        for axis in self._axes:
            values = [each for theirs in axis.allgather_object(tuple(values)) for each in theirs]
        return values

    def raise_if_any(self, problem: BaseException | None) -> None:
        """As `Axis.raise_if_any`."""
        for axis in self._axes:
            try:
                axis.raise_if_any(problem)
            except (Exception, SystemExit) as error:
                problem = error  # of this rank or of another; ranks of the next axis must learn of it too
        if problem is not None:
            raise problem

    raise_together = raise_if_any  # as that of `Axis`
