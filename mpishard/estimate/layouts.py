"""Layouts of a model over a number of ranks, and the stages of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import flag, integer, number, shown
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.pipeline.schedule import SCHEDULES
from mpishard.pipeline.schedule.generators import check_chunks

# Memory per rank for each stage of ZeRO, from the number of parameters alone.
#
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), figure 1 and table
# 1.

STAGES = (0, 1, 2, 3)


def model_state_bytes(
    parameters: float,
    ranks: int,
    zero_stage: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    state_bytes: float = 12,
) -> float:
    """Bytes per rank for parameters, gradients and optimizer state, without activations and buffers.

    With P parameters, N ranks and 2, 2 and 12 bytes (half precision, and a float32 copy, momentum and variance) these
    are 16 P, 4 P + 12 P / N, 2 P + 14 P / N and 16 P / N for the stages 0 to 3.

    Parameters
    ----------
    parameters : float
        Number of parameters.
    ranks : int
        Data-parallel ranks.
    zero_stage : int
        0: nothing is sharded, 1: optimizer state, 2: gradients too, 3: parameters too.
    parameter_bytes, gradient_bytes, state_bytes : float
        Bytes per parameter of each kind.

    Returns
    -------
    float
        Bytes on each rank, for shares that are all equal.

    Raises
    ------
    ValueError
        For counts that are not positive, or another stage.
    TypeError
        For what is no number.
    """
    for name, size in {"parameter": parameter_bytes, "gradient": gradient_bytes, "state": state_bytes}.items():
        number(f"{name}_bytes", size, least=0)
    if not 0 < number("parameters", parameters, finite=False) < math.inf:
        raise ValueError(f"the number of parameters is {parameters:g}; it must be finite and above 0")
    if integer("ranks", ranks) < 1:
        raise ValueError(f"the number of ranks is {ranks}; it must be at least 1")
    if zero_stage not in STAGES:
        raise ValueError(f"unknown ZeRO stage {zero_stage!r}; choose one of 0, 1, 2, 3")
    shares = [1 / ranks if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    return parameters * (parameter_bytes * shares[0] + gradient_bytes * shares[1] + state_bytes * shares[2])


# -- layouts -----------------------------------------------------------------------------------------------------------

# MPI counts them by ints of C.
_MOST_RANKS = 2**31 - 1
# The time of an estimate grows with the square of their number; that of these is some seconds.
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class Layout:
    """One way to train a model on ``data * tensor * pipeline`` ranks.

    No method is collective.

    Parameters
    ----------
    data, tensor, pipeline : int
        Sizes of the axes of the mesh.
    zero_stage : int
        0 to 3: which arrays are sharded over the data axis.
    schedule : str
        One of `mpishard.pipeline.schedule.SCHEDULES`.
    chunks : int
        Model chunks per pipeline rank; above 1 for "interleaved" only.
    sequence_parallel : bool
        Whether norms and residuals are split over the tensor axis by rows.
    recompute : bool
        Whether a block keeps its input only, and recomputes its activations before its backward.

    Raises
    ------
    ValueError
        For sizes below 1, an unknown stage or schedule, or a number of chunks that the schedule cannot use.
    TypeError
        For sizes that are no whole numbers, and flags that are none.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        for what in ("data", "tensor", "pipeline", "chunks"):
            if integer(what, getattr(self, what)) < 1:
                raise ValueError(f"the layout has {what}={getattr(self, what)}; it must be at least 1")
        if self.zero_stage not in STAGES:
            raise ValueError(f"unknown ZeRO stage {self.zero_stage!r}; choose one of 0, 1, 2, 3")
        if not isinstance(self.schedule, str) or self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
        for what in ("sequence_parallel", "recompute"):
            flag(what, getattr(self, what))
        check_chunks(self.schedule, self.chunks)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.tensor * self.pipeline

    def span(self, axis: str) -> int:
        """How far apart in the world the ranks lie with which one rank communicates on an axis.

        Tensor varies fastest, then data, then pipeline.  In the pipeline only neighbours exchange messages.

        Parameters
        ----------
        axis : {"tensor", "data", "pipeline"}
            Name of the axis.

        Returns
        -------
        int
            Length of the range of consecutive world ranks that has all of them.
        """
        return {
            "tensor": self.tensor,
            "data": self.tensor * self.data,
            "pipeline": self.tensor * self.data * min(2, self.pipeline),
        }[axis]


def layouts(
    ranks: int,
    architecture: DecoderArchitecture,
    *,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    zero_stages: Sequence[int] = STAGES,
    schedules: Sequence[str] = tuple(SCHEDULES),
    chunks: int = 2,
    sequence_parallel: bool = False,
    recompute: bool = False,
) -> Iterator[Layout]:
    """Yield every layout of `ranks` ranks that the model allows, without layouts that equal another in effect.

    Parameters
    ----------
    ranks : int
        Number of ranks, at least 1.
    architecture : DecoderArchitecture
        The tensor size must divide its shards, or its heads of keys and values if that is 1; every (virtual) stage
        needs a layer.
    data, tensor, pipeline : int, optional
        Only layouts with this size of the axis.
    zero_stages, schedules : sequence
        Only layouts with these.  With one data rank only stage 0 is listed, with one pipeline rank only "1f1b".
    chunks : int
        Chunks per rank for "interleaved", at least 2 if that is one of the schedules.
    sequence_parallel, recompute : bool
        For all layouts; `sequence_parallel` for those with several tensor ranks only.

    Yields
    ------
    Layout
        In order of tensor size, then pipeline size.

    Raises
    ------
    ValueError
        If `ranks` is below 1 or above 2**31 - 1, a model has more than 4096 layers, or `chunks` is below 2 with
        "interleaved".
    TypeError
        If a size is no whole number, or the architecture none, or what `Layout` refuses.
    """
    expect_architecture(architecture)
    for name, size in {"data": data, "tensor": tensor, "pipeline": pipeline, "chunks": chunks}.items():
        if size is not None:
            integer(name, size)
    if integer("ranks", ranks) < 1:
        raise ValueError(f"the number of ranks is {ranks}; it must be at least 1")
    if ranks > _MOST_RANKS:
        raise ValueError(f"the number of ranks is {ranks}; MPI has at most {_MOST_RANKS}")
    if architecture.layers > _MOST_LAYERS:
        raise ValueError(f"the number of layers is {architecture.layers}; estimates take at most {_MOST_LAYERS}")
    if "interleaved" in schedules:
        check_chunks("interleaved", chunks)
    for tensor_size in _divisors(ranks):
        slices = architecture.query_groups if architecture.shards == 1 else architecture.shards
        if slices % tensor_size or tensor not in (None, tensor_size):
            continue
        for pipeline_size in _divisors(ranks // tensor_size):
            data_size = ranks // tensor_size // pipeline_size
            if pipeline not in (None, pipeline_size) or data not in (None, data_size):
                continue
            for schedule in schedules if pipeline_size > 1 else ("1f1b",):
                parts = chunks if schedule == "interleaved" else 1
                if pipeline_size * parts > architecture.layers:
                    continue
                for zero_stage in zero_stages if data_size > 1 else (0,):
                    yield Layout(
                        data_size,
                        tensor_size,
                        pipeline_size,
                        zero_stage,
                        schedule,
                        parts,
                        sequence_parallel and tensor_size > 1,
                        recompute,
                    )


def expect_architecture(given: Any) -> None:
    """Raise TypeError for what is no architecture, such as a model."""
    if not isinstance(given, DecoderArchitecture):
        raise TypeError(f"architecture={shown(given)} must be an architecture, such as model.architecture of an nn.GPT")


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor**2 != number]
