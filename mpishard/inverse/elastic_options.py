"""The arguments of `minimize` that make a run elastic, checked without MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.arguments import integer, shown

_OPTIONS = ("min_workers", "max_workers", "folder", "discover", "failure_timeout", "respawn")


def elastic_options(elastic: Any, samples: Any, reduction: Any, mesh: Any) -> tuple[dict[str, Any] | None, int | None]:
    """Check the arguments of `minimize` that make a run elastic.

    Returns the options of `ElasticOptimizer`, None for a run that is not elastic, and the number of samples. Raises
    TypeError or ValueError if arguments are invalid or do not fit together.
    """
    if not isinstance(elastic, bool | Mapping):
        raise TypeError(f"elastic={shown(elastic)} must be True, or a dictionary of options of ElasticOptimizer")
    if elastic is False:
        if samples is not None:
            raise ValueError(
                "samples= deals the samples out to ranks that come and go, and needs elastic=True; on ranks that stay, "
                "let fun return the part of its rank and say reduction='sum'"
            )
        return None, None
    options = {} if elastic is True else dict(elastic)
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise ValueError(f"elastic= has no option {unknown[0]!r}; its options are {', '.join(_OPTIONS)}")
    if mesh is None:
        raise ValueError("elastic= is for ranks that come and go; give mesh=mpishard.Mesh()")
    if reduction is not None:
        raise ValueError(
            f"reduction={shown(reduction)} is for ranks that stay, each with its own part; with elastic= give "
            "samples=N and fun(x, samples), and the samples of a rank that dies go to the others"
        )
    return options, None if samples is None else integer("samples", samples, least=1)
