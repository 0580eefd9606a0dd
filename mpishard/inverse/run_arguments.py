"""Arguments of a call that say how it runs on a mesh: by which ranks, and with which files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishard.arguments import flag, integer, shown
from mpishard.inverse.unknowns import Unknowns

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.record import RunRecord

_ELASTIC_OPTIONS = "min_workers max_workers folder discover failure_timeout respawn rebuild audit".split()


class ElasticArguments(NamedTuple):
    """The further arguments of an elastic run; `options` are those of `ElasticOptimizer`."""

    options: dict[str, Any]
    samples: int | None


@dataclass(frozen=True)
class RunArguments:
    """The ranks and the files of a call; `elastic` is None on ranks that stay.  `files_given` checks the files."""

    mesh: Mesh | None
    reduction: str | None = None
    elastic: ElasticArguments | None = None
    checkpoints: Checkpoints | None = None
    resume: bool = False
    record: RunRecord | None = None

    @classmethod
    def checked(
        cls,
        unknowns: Unknowns,
        mesh: Any,
        reduction: Any,
        samples: Any,
        elastic: Any,
        checkpoints: Any,
        resume: Any,
        record: Any,
    ) -> RunArguments:
        """Check the arguments of `minimize` that make a run elastic, or not.

        Raises TypeError or ValueError if they are invalid or do not fit together.
        """
        files = checkpoints, resume, record
        if not isinstance(elastic, bool | Mapping):
            raise TypeError(f"elastic={shown(elastic)} must be True, or a dictionary of options of ElasticOptimizer")
        if elastic is False:
            if samples is not None:
                raise ValueError(
                    "samples= deals the samples out to ranks that come and go, and needs elastic=True; on ranks that "
                    "stay, let fun return the part of its rank, to minimize with reduction='sum'"
                )
            return cls(mesh, reduction, None, *files)
        options = {} if elastic is True else dict(elastic)
        unknown = [name for name in options if name not in _ELASTIC_OPTIONS]
        if unknown:
            raise ValueError(f"elastic= has no option {unknown[0]!r}; its options are {', '.join(_ELASTIC_OPTIONS)}")
        if mesh is None:
            raise ValueError("elastic= is for ranks that come and go; give mesh=mpishard.Mesh()")
        if reduction is not None and not (unknowns.has_fields and reduction == "sum" and samples is not None):
            more = ", or with a Partition as x0 both" * (reduction == "sum")
            raise ValueError(
                f"reduction={shown(reduction)} is for ranks that stay, each with its own part; with elastic= give "
                f"samples=N and fun(x, samples){more}, and the samples of a rank that dies go to the others"
            )
        count = None if samples is None else integer("samples", samples, least=1)
        return cls(mesh, reduction, ElasticArguments(options, count), *files)

    def files_given(self) -> dict[str, Any]:
        """The files that this rank gives, for `opening`; TypeError or ValueError if they are unfit."""
        mesh, resume = self.mesh, self.resume
        checkpoints: Any = self.checkpoints
        record: Any = self.record
        if mesh is None:
            if checkpoints is not None or resume or record is not None:
                raise ValueError("checkpoints, resume and record are for a mesh; give mesh=mpishard.Mesh()")
            return {"checkpoints": False, "resume": False, "record": False}
        from mpishard.record import RunRecord  # with MPI: only for those who have a mesh

        if flag("resume", resume) and checkpoints is None:
            raise ValueError("resume=True needs to know from where; give checkpoints=Checkpoints(folder, mesh)")
        if not (checkpoints is None or hasattr(checkpoints, "due")):
            raise TypeError(f"checkpoints={shown(checkpoints)} must be Checkpoints(folder, mesh)")
        if checkpoints is not None and checkpoints.mesh.world is not mesh.world:
            raise ValueError("the checkpoints are of another mesh; make them with the mesh of minimize")
        if not (record is None or isinstance(record, RunRecord)):
            raise TypeError(f"record={shown(record)} must be RunRecord(folder, mesh)")
        if record is not None and record.mesh.ledger is not mesh.ledger:
            raise ValueError("the record is of another mesh; make it with the mesh of minimize")
        return {"checkpoints": checkpoints is not None, "resume": resume, "record": record is not None}
