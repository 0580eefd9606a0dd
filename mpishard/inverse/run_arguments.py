"""Arguments of a call that say how it runs on a mesh: by which ranks, and with which files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpishard.arguments import integer, shown
from mpishard.inverse.unknowns import Unknowns

_ELASTIC_OPTIONS = "min_workers max_workers folder discover failure_timeout respawn rebuild audit".split()


class ElasticArguments(NamedTuple):
    """The further arguments of an elastic run; `options` are those of `ElasticOptimizer`."""

    options: dict[str, Any]
    samples: int | None


def elastic_options(
    elastic: Any, samples: Any, reduction: Any, mesh: Any, unknowns: Unknowns
) -> ElasticArguments | None:
    """Check the arguments of `minimize` that make a run elastic; None for a run that is not.

    Raises TypeError or ValueError if arguments are invalid or do not fit together.
    """
    if not isinstance(elastic, bool | Mapping):
        raise TypeError(f"elastic={shown(elastic)} must be True, or a dictionary of options of ElasticOptimizer")
    if elastic is False:
        if samples is not None:
            raise ValueError(
                "samples= deals the samples out to ranks that come and go, and needs elastic=True; on ranks that stay, "
                "let fun return the part of its rank, to minimize with reduction='sum'"
            )
        return None
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
    return ElasticArguments(options, None if samples is None else integer("samples", samples, least=1))


def files_given(mesh: Any, checkpoints: Any, resume: Any, record: Any) -> dict[str, Any]:
    """The files of a run that a rank gives, for `opening`; TypeError or ValueError if they are unfit."""
    if mesh is not None:
        from mpishard.inverse.run_files import check_files

        check_files(checkpoints, resume, record, mesh)
    elif checkpoints is not None or resume or record is not None:
        raise ValueError("checkpoints, resume and record are for a mesh; give mesh=mpishard.Mesh()")
    return {"checkpoints": checkpoints is not None, "resume": resume, "record": record is not None}
