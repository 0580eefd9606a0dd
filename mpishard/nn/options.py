"""How a model is computed, in addition to its architecture: pipeline, precision, memory. Nothing is collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypedDict

import numpy as np

from mpishard.arguments import flag
from mpishard.backend.array import FLOATS
from mpishard.comm.agreement import text_of
from mpishard.comm.mesh import Mesh
from mpishard.nn.products import check_half


class ModelKeywords(TypedDict, total=False):
    """The keywords of `mpishard.nn.Decoder`, which every model takes."""

    mesh: Mesh | None
    seed: int
    module: Any
    schedule: str
    chunks: int
    microbatches: int | None
    stage_costs: str | Sequence[float] | None
    dtype: Any
    compute_dtype: Any
    storage_dtype: Any
    wire_dtype: Any
    recompute: bool
    sequence_parallel: bool
    sharded_parameters: bool


@dataclass(frozen=True)
class ModelOptions:
    """Keywords of `mpishard.nn.Decoder`, checked; ValueError or TypeError for those that cannot be."""

    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    stage_costs: str | Sequence[float] | None = None
    dtype: Any = np.float32
    compute_dtype: Any = None
    storage_dtype: Any = None
    wire_dtype: Any = None
    recompute: bool = False
    sequence_parallel: bool = False
    sharded_parameters: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stage_costs, str) and self.stage_costs != "measured":
            raise ValueError(f'stage_costs is {self.stage_costs!r}; it must be "measured", numbers or None')
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in FLOATS:
            raise TypeError(
                f"dtype is {self.dtype}; parameters must be float32 or float64, and compute_dtype is for half precision"
            )
        for name in ("compute_dtype", "storage_dtype", "wire_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_half(name, getattr(self, name)))
        if self.compute_dtype is not None and self.dtype != np.float32:
            raise TypeError(
                f"compute_dtype {self.compute_dtype} needs float32 weights, but dtype is {self.dtype}; pass "
                "dtype=numpy.float32"
            )
        for name in ("recompute", "sequence_parallel", "sharded_parameters"):
            flag(name, getattr(self, name))


def microbatches_on(ranks: int, microbatches: int | None) -> int:
    """The number of micro-batches on a pipeline of `ranks` ranks: as given, else 4 a rank, or 1 without a pipeline."""
    if microbatches is not None:
        return microbatches
    return 1 if ranks == 1 else 4 * ranks


def settings_of_model(architecture: Any, options: ModelOptions, ranks: int, seed: int) -> dict[str, str]:
    """The settings that ranks that train one model must have in common, as text by name, for `FlatParameters`.

    Costs of stages are left out: the cut that follows from them is in the specs of the parameters. `ranks` is the size
    of the pipeline axis. `seed` counts with dropout only: initial values are shared by the first step.
    """
    found: dict[str, Any] = {"architecture": type(architecture).__name__}
    for value in (architecture, options):
        if is_dataclass(value):
            found |= {field.name: getattr(value, field.name) for field in fields(value)}
    del found["stage_costs"]
    found["microbatches"] = microbatches_on(ranks, options.microbatches)
    if found.get("dropout"):
        found["dropout"] = f"{found['dropout']:g} with seed {seed}"
    return {f"the model's {name}": text_of(value) for name, value in found.items()}
