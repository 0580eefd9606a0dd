"""The mesh: MPI_COMM_WORLD split into data, tensor and pipeline sub-communicators.

Ranks are numbered with tensor fastest, then data, then pipeline, so that the ranks that talk most are neighbours.
An `Axis` is a communicator with collectives; a mesh is three of them and the world.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from mpi4py import MPI

from mpishard.arguments import flag, shown
from mpishard.backend.process import limit_blas_threads
from mpishard.comm.abort import abort_on_exception, start_mpi
from mpishard.comm.agreement import agree_on_gemm_libraries, opening
from mpishard.comm.axis import Axis, allgather_values
from mpishard.comm.call_matching import CallMatching
from mpishard.comm.capabilities import agree_on_device_buffers, heals_in_place
from mpishard.comm.channel import CommunicatorsExhaustedError, Family
from mpishard.comm.deferred import flush
from mpishard.comm.errors import CaughtError
from mpishard.comm.groups import OtherOrderError, Places
from mpishard.comm.ledger import Ledger
from mpishard.comm.mesh_checks import check_launcher, exchange_facts, sizes_for, time_limit
from mpishard.comm.supervisor_reports import note_cell
from mpishard.comm.watchdog import Watchdog, arrival
from mpishard.launch.detection import spawned_cell
from mpishard.layout.tensors import ModelParallelRank

Array = Any


class Mesh:
    """Communicators for data, tensor and pipeline parallelism.  Creation and `free` are collective over `comm`.

    As a context manager it frees them at the end, unless an exception leaves the block: other ranks may not come to
    the end then.  Code that catches that exception on all ranks calls `free` itself.  A mesh that was dropped on all of
    its ranks is freed when they make the next one (not under ULFM, where a rank may have died); hold it while another
    library uses its communicators.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks to arrange; default all of them.  It is duplicated and can be freed afterwards.
    data, tensor, pipeline : int
        Sizes; their product must be the number of ranks.  One of them may be -1 and is inferred.  Processes
        that were spawned have the tensor and pipeline sizes of the run that they join, whatever is given here.
    space : mpi4py.MPI.Intracomm, optional
        Instead of sizes: the communicator of this rank's group, in which the application has distributed its field.
        All groups have the same number of ranks.  `tensor` then has the ranks of `space` in its order, and `data` one
        rank of each group.
    groups : mpi4py.MPI.Intracomm, optional
        With `space`: the communicator of those ranks, one of each group, that have the same rank in `space`; `data`
        has its order.  Default: groups are in the order in which their first ranks are in `comm`.  The two are
        ``ensemble.comm`` and ``ensemble.ensemble_comm`` of Firedrake's Ensemble.  Both are duplicated, as `comm` is.
        `world` has the ranks of the first group, then those of the second.
    timeout : float, optional
        Seconds a collective may wait before the job is ended with a report of who waits where; default from
        ``MPISHARD_TIMEOUT``.  Without either: ten times the longest step so far, and at least 120.  Until the first
        step has ended: 1800, or 120 once every rank is blocked in a call.
    debug : bool, optional
        Compare every collective across ranks before it starts, and raise `CollectiveMismatchError` on all ranks where
        they differ; compare the copies of replicated parameters after every step; and at the start of `optimize` check
        that the function of the problem returns sums.  Default from ``MPISHARD_DEBUG`` (1 or 0).

    Attributes
    ----------
    world, data, tensor, pipeline : Axis
    node : Axis
        The ranks that share memory with this one.
    nodes : list of int
        For each rank of the world the first one that shares memory with it.
    device : int or None
        Number of the GPU for this rank: its rank on the node modulo the number of visible GPUs; None without a GPU.
        Make it current with ``cupy.cuda.Device(mesh.device).use()``.
    blas_threads : int
        Threads that BLAS may use in this rank; see `mpishard.backend.process`.
    timeout : float or None
        The time limit of a collective in seconds; None where the longest step decides.
    ledger : Ledger
        What this rank has communicated over all axes.
    family : Family
        Its communicators.
    initial_values : bool
        Whether models made for the mesh draw their initial values, see `without_initial_values`.

    Raises
    ------
    ValueError
        On every rank, if the product of some rank's sizes is not the number of ranks; if `space` and `groups` make no
        grid of the ranks of `comm`, or come with sizes; or if each rank is alone in its world since the launcher
        belongs to another MPI (not checked with MPI.COMM_SELF).  On every rank, too, if a size, `debug`, or the version
        of mpishard differs between ranks.
    TypeError, ValueError
        On every rank, if `timeout` or `debug` of any make no sense; on this rank, if `comm` is no communicator.
    RuntimeError
        On every rank, if MPI has no communicator left.
    """

    timeout: float | None
    debug: bool
    ledger: Ledger
    shape: dict[str, int]
    coordinates: dict[str, int]
    world: Axis
    data: Axis
    tensor: Axis
    pipeline: Axis
    node: Axis
    blas_threads: int
    family: Family
    initial_values: bool = True

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        data: int = -1,
        tensor: int = 1,
        pipeline: int = 1,
        space: MPI.Intracomm | None = None,
        groups: MPI.Intracomm | None = None,
        timeout: float | None = None,
        debug: bool | None = None,
    ) -> None:
        start_mpi()
        if comm is None:
            comm = MPI.COMM_WORLD
        if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
            raise ValueError(
                "comm is a null communicator: it was freed, or this rank is not in it; free it after the mesh is made, "
                "and make the mesh only on ranks that are in it"
            )
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(
                f"comm={shown(comm)} must be a communicator of mpi4py, such as MPI.COMM_WORLD; "
                "sizes are given by name, as Mesh(data=4)"
            )
        if comm == MPI.COMM_WORLD:
            check_launcher()
        cell = spawned_cell()
        if cell is not None and comm.size == MPI.COMM_WORLD.size:
            data, (tensor, pipeline), space, groups = -1, cell, None, None
        self.timeout, self.debug = None, False
        sizes = comm.size, 1, 1
        places: Places | None = None
        with CaughtError() as caught:  # raised when the others know of it: they are on their way
            places = Places.of(space, groups, comm)
            if places is None:
                sizes = sizes_for(comm.size, data=data, tensor=tensor, pipeline=pipeline)
            elif (data, tensor, pipeline) != (-1, 1, 1):
                raise ValueError(
                    f"the sizes of a mesh follow from space and groups, but pipeline={pipeline} x data={data} x "
                    f"tensor={tensor} was asked for, too; leave them out"
                )
            else:  # which all ranks check when they know of each other
                sizes = comm.size // places.space.size, places.space.size, 1
            self.timeout = time_limit(timeout)
            by_variable = os.environ.get("MPISHARD_DEBUG", "0") not in ("", "0")
            self.debug = by_variable if debug is None else flag("debug", debug)
        problem = caught.error
        self.ledger = Ledger()
        self._parent: Mesh | None = None
        flush()
        Family.collect_garbage()
        problem = self._made(comm, sizes, problem, places)
        if isinstance(problem, OtherOrderError):
            with Family.creating():
                ordered = cast(MPI.Intracomm, comm.Split(0, problem.numbers[comm.rank]))
            problem = self._made(ordered, sizes)
            ordered.Free()
        if problem is not None:
            raise problem
        self._note_cell()

    def _made(
        self,
        comm: MPI.Intracomm,
        sizes: tuple[int, int, int],
        problem: Exception | None = None,
        places: Places | None = None,
    ) -> Exception | None:
        """As `_make`, also where meshes that were dropped have the last communicators of MPI.  Collective."""
        try:
            return self._make(comm, sizes, problem, places)
        except CommunicatorsExhaustedError:
            gc.collect()
            if not Family.free_orphans(allgather_values(comm, Family.orphans())):
                raise
            return self._make(comm, sizes, problem, places)

    def _note_cell(self) -> None:
        """Tell a supervisor, if any, what the number of ranks of its next start must be a multiple of."""
        cell = self.tensor.size * self.pipeline.size
        if cell > 1 and self.size == MPI.COMM_WORLD.size:
            note_cell(cell)

    def _make(
        self, comm: MPI.Intracomm, sizes: tuple[int, int, int], problem: Exception | None, places: Places | None
    ) -> Exception | None:
        """Make the communicators and the watchdog, or none of them.  Collective; see `_split`."""
        self._axes: dict[str, Axis] = {}
        self.family = Family(comm.size)
        try:
            with Family.creating(), arrival(comm, self.timeout):
                world = comm.Dup()
                self.family.add(world)
                self._watchdog: Watchdog | None = Watchdog(world, self.ledger, self.timeout)
                self.family.ends.append(self._watchdog.close)
                abort_on_exception(self.ledger, gather_failures=self._watchdog.gather_failures)
                problem = self._split(world, *sizes, problem, places)
                if problem is not None:
                    self.family.remove(world)
                    self.family.free()
                    world.Free()
                return problem
        except CommunicatorsExhaustedError:
            self.family.free()
            raise

    def _split(
        self,
        world: MPI.Intracomm,
        data: int,
        tensor: int,
        pipeline: int,
        problem: Exception | None = None,
        places: Places | None = None,
    ) -> Exception | None:
        """Make the axes over the ranks of `world`, or bind existing ones to them. Collective.

        `problem` is why this rank cannot have the mesh. Returned is what to raise, on every rank, if some rank cannot,
        or if ranks differ in what must be the same; nothing is made then. `places`: see `exchange_facts`.
        """
        self.shape = {"pipeline": pipeline, "data": data, "tensor": tensor}
        self._children: dict[tuple[int, int, int], Mesh] = {}
        self._freed = False
        problem = exchange_facts(world, self.sizes, self.debug, self.family, problem, places)
        if problem is not None:
            return problem
        if self._parent is None:
            self._matching = CallMatching(world) if self.debug else None
            if self._matching is not None:
                self.family.ends.insert(0, self._matching.free)
        else:
            self._matching = self._parent._matching
        rank = world.rank
        tensor_rank, data_rank, stage = rank % tensor, rank // tensor % data, rank // (tensor * data)
        self.coordinates = {"pipeline": stage, "data": data_rank, "tensor": tensor_rank}

        # All are made from `world`, which every rank has: a rank that fails here revokes `world` and so wakes the ranks
        # that wait for it; it could not revoke a communicator that it never got.
        def axis(name: str, now: MPI.Comm, later: MPI.Comm) -> Axis:
            assert isinstance(now, MPI.Intracomm) and isinstance(later, MPI.Intracomm)
            members = MPI.Group.Translate_ranks(now.group, None, world.group)
            of_now: dict[str, Any] = {"members": members, "later": later, "matching": self._matching}
            if name in self._axes:
                self._axes[name].rebind(now, **of_now)
            else:
                self._axes[name] = Axis(name, now, self.ledger, **of_now, family=self.family)
            return self._axes[name]

        def split(color: int, place: int) -> list[MPI.Comm]:
            return [world.Split(color, place) for _ in range(2)]

        self.world = axis("world", world, world.Dup())
        self.data = axis("data", *split(stage * tensor + tensor_rank, data_rank))
        self.tensor = axis("tensor", *split(stage * data + data_rank, tensor_rank))
        pipelines = data_rank * tensor + tensor_rank
        self.pipeline = axis("pipeline", *split(pipelines, stage))
        self.pipeline.regain_subgroups(world, pipelines)  # ties between stages, which stay whatever the data size is
        self.node = axis("node", *(world.Split_type(MPI.COMM_TYPE_SHARED, rank) for _ in range(2)))
        self.nodes: list[int] = allgather_values(world, min(self.node.members))
        self.blas_threads = limit_blas_threads(world, self.node.members)
        withhold = not agree_on_device_buffers(world)
        for each in self._axes.values():
            each.withhold_device_buffers(withhold)
        agree_on_gemm_libraries(self.world)
        return None

    @property
    def place(self) -> ModelParallelRank:
        """The tensor and pipeline ranks and sizes, which decide which parameters this rank holds."""
        return ModelParallelRank(self.tensor.rank, self.tensor.size, self.pipeline.rank, self.pipeline.size)

    @property
    def rank(self) -> int:
        """Rank in the world."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def device(self) -> int | None:
        """Number of the GPU for this rank; None without a GPU."""
        from mpishard.backend.array import device_count

        devices = device_count()
        return self.node.rank % devices if devices else None

    def __repr__(self) -> str:
        return f"Mesh({self.sizes}, rank={self.rank})"

    @property
    def sizes(self) -> str:
        """Its shape in words."""
        return " x ".join(f"{name}={size}" for name, size in self.shape.items())

    def reshaped(self, *, data: int = -1, tensor: int = 1, pipeline: int = 1) -> Mesh:
        """A mesh of the same ranks in another shape; this mesh itself if it has that shape.

        Collective.  A second call with the same shape returns the same mesh.  It shares this mesh's ledger and is freed
        with this mesh.

        Parameters
        ----------
        data, tensor, pipeline : int
            Its sizes, as for `Mesh`.

        Returns
        -------
        Mesh
            Over duplicates of this mesh's communicators.

        Raises
        ------
        ValueError
            On every rank, if the sizes do not fit the number of ranks or differ between ranks, or if this mesh is split
            in another way already.
        """
        with opening(self.world, "Mesh.reshaped") as same:
            data, tensor, pipeline = shape = sizes_for(self.size, data=data, tensor=tensor, pipeline=pipeline)
            same |= {"data": data, "tensor": tensor, "pipeline": pipeline}
            is_same = shape == (self.data.size, self.tensor.size, self.pipeline.size)
            if self.data.size != self.size and not is_same:
                raise ValueError(
                    f"the mesh is {self.sizes} already, but pipeline={pipeline} x data={data} x tensor={tensor} was "
                    "asked for; leave the sizes out to use the mesh as it is, or start from a purely data-parallel one"
                )
        if is_same:
            return self
        if shape not in self._children:
            self._children[shape] = _ReshapedMesh(self, data, tensor, pipeline)
        return self._children[shape]

    @property
    def is_reshaped(self) -> bool:
        """True if there is another mesh of the same ranks, by `reshaped`."""
        return self._parent is not None or bool(self._children)

    def rebind(self, comm: MPI.Intracomm, *, tensor: int | None = None, pipeline: int | None = None) -> None:
        """Split the ranks of `comm` in place: the axes stay the objects that models and optimizers hold.

        The data size follows from the number of ranks.  Collective over `comm`, which the mesh owns from now on.  The
        old communicators are not freed, see `release`.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            The ranks of the mesh from now on.
        tensor, pipeline : int, optional
            Their sizes from now on, for models that are made again; default: as they were.

        Raises
        ------
        ValueError
            On every rank, if the number of ranks is no multiple of the tensor and pipeline sizes, or if a size, `debug`
            or the version of mpishard differs between ranks.
        """
        assert not self.is_reshaped
        flush()
        self.family.close()
        if tensor is not None or pipeline is not None:
            self.pipeline.forget_subgroups()  # other models have other ties, and make their axes again
        sizes = {"tensor": tensor or self.shape["tensor"], "pipeline": pipeline or self.shape["pipeline"]}
        problem = self._split(comm, *sizes_for(comm.size, data=-1, **sizes))
        if problem is not None:
            raise problem

    def release(self) -> None:
        """Free the communicators, to `rebind` afterwards.  Collective."""
        for axis in (self.node, self.pipeline, self.tensor, self.data, self.world):
            axis.free()
        if self._matching is not None and self._parent is None:
            self._matching.free()

    def revoke(self) -> None:
        """Make every operation on the mesh fail on all ranks, so that none waits for a dead rank.  Not collective."""
        for axis in (self.node, self.pipeline, self.tensor, self.data, self.world):
            axis.revoke()
        if self._matching is not None:
            self._matching.revoke()

    @contextmanager
    def without_initial_values(self) -> Iterator[None]:
        """A context in which models of `mpishard.nn` that are made for the mesh stay zero.  Not collective.

        For models whose values come from elsewhere: to draw them takes time, and pages of memory that is only zero are
        not taken yet.

        Yields
        ------
        None
        """
        before, self.initial_values = self.initial_values, False
        try:
            yield
        finally:
            self.initial_values = before

    def unwatch(self, wholly: bool = False) -> None:
        """End the time limits.  Collective.

        Parameters
        ----------
        wholly : bool
            Whether a rank that dies is no longer named, either, where its death ends the job.
        """
        if self._watchdog is None:
            return
        if wholly or heals_in_place():
            self._watchdog.close()
            self._watchdog = None
        else:
            self._watchdog.stop()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an exception the other ranks may not take part in a collective free.
        if kind is None:
            self.free()

    def free(self) -> None:
        """Free every communicator that the mesh made.  Collective; a second call does nothing.

        Collectives that were started and not waited for are finished first.
        """
        if self._freed:
            return
        self._freed = True
        for child in self._children.values():
            child.free()
        for axis in (self.node, self.pipeline, self.tensor, self.data, self.world):
            axis.finish()
        if self._watchdog is not None:
            self._watchdog.close()
        self.release()
        if self._parent is None:
            self.family.close()


class _ReshapedMesh(Mesh):
    """A mesh of the ranks of another one, which has the watchdog, and the ledger and the matching of calls of both."""

    def __init__(self, parent: Mesh, data: int, tensor: int, pipeline: int) -> None:
        self.debug, self.ledger = parent.debug, parent.ledger
        self._watchdog = None
        self._parent = parent
        self._axes = {}
        self.family = parent.family
        with Family.creating():
            world = parent.world.comm.Dup()
            problem = self._split(world, data, tensor, pipeline)
        if problem is not None:
            world.Free()
            raise problem
        self._note_cell()


def checked_mesh(mesh: Any) -> Mesh:
    """The `mesh` that a call was given. Raises TypeError if it is none, such as a communicator or a number of ranks."""
    if isinstance(mesh, Mesh):
        return mesh
    made = "mpishard.Mesh(comm)" if isinstance(mesh, MPI.Comm) else "mpishard.Mesh()"
    raise TypeError(f"mesh={shown(mesh)} must be a Mesh; give {made}")
