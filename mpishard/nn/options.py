"""How a model is trained, in addition to its architecture: pipeline, precision, memory. Nothing is collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypedDict, TypeVar, get_type_hints

import numpy as np

from mpishard.arguments import config_or_kwargs, flag
from mpishard.backend.array import FLOATS
from mpishard.comm.agreement import text_of
from mpishard.nn.products import check_half

T = TypeVar("T")
Init = TypeVar("Init", bound=Callable[..., None])


@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into pipeline stages, and in which order the stages work.

    Parameters
    ----------
    schedule : str
        One of `mpishard.pipeline.schedule.SCHEDULES`.
    chunks : int
        Model chunks of a pipeline rank, for the interleaved schedule.
    microbatches : int, optional
        Number of micro-batches into which a batch is cut along its first dimension; some may be empty.  Default: 1; on
        a pipeline 4 times the number of its ranks.  A training loop with ``reproducible=True`` cuts batches itself,
        in the same way on every mesh, and leaves this out.
    stage_costs : "measured" or sequence of float, optional
        The times of the `Architecture.units` by which the model is cut into stages, given or measured on the mesh's
        first rank.  Default: blocks evenly.

    Raises
    ------
    ValueError
        If `stage_costs` is another word.
    """

    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    stage_costs: str | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stage_costs, str) and self.stage_costs != "measured":
            raise ValueError(f'stage_costs is {self.stage_costs!r}; it must be "measured", numbers or None')

    def microbatches_on(self, ranks: int) -> int:
        """Number of micro-batches, with the default.

        Parameters
        ----------
        ranks : int
            Size of the pipeline axis.

        Returns
        -------
        int
            As given, or the default for that number of ranks.
        """
        if self.microbatches is not None:
            return self.microbatches
        return 1 if ranks == 1 else 4 * ranks


@dataclass(frozen=True)
class Precision:
    """The dtypes of a model.

    Parameters
    ----------
    dtype : dtype
        float32 or float64: parameters, gradients and activations.
    compute_dtype : dtype, optional
        Multiply matrices in float16 or ml_dtypes.bfloat16, with weights and activations in float32, see
        `mpishard.nn.products.make_matmul`.  Train in float16 with ``ShardingConfiguration(loss_scale="dynamic")``.
        It is fast for arrays of CuPy, attention included.  For those of NumPy it is fast in bfloat16 where a library
        multiplies it, see `mpishard.backend.gemm`, and products of attention stay in float32 then; otherwise it is
        slow, and a warning says so.
    storage_dtype : dtype, optional
        Keep activations between forward and backward in float16 or ml_dtypes.bfloat16.
    wire_dtype : dtype, optional
        Send activations and their gradients between stages in one of these.

    Raises
    ------
    TypeError
        If a dtype is none of these.
    """

    dtype: Any = np.float32
    compute_dtype: Any = None
    storage_dtype: Any = None
    wire_dtype: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype not in FLOATS:
            raise TypeError(
                f"dtype is {self.dtype}; parameters must be float32 or float64, and compute_dtype is for half precision"
            )
        for name in ("storage_dtype", "wire_dtype"):
            if getattr(self, name) is not None:
                check_half(name, getattr(self, name))


@dataclass(frozen=True)
class MemoryOptions:
    """Ways to save memory, which cost time or communication.

    Parameters
    ----------
    recompute : bool
        Activation checkpointing: keep only the input of each block, and compute the rest again in the backward pass.
    sequence_parallel : bool
        Megatron's sequence parallelism: between tensor-parallel layers, each tensor rank has the activations of its
        share of the tokens.
    sharded_parameters : bool
        Create the parameters divided (ZeRO-3), so that no rank ever has the whole model.

    Raises
    ------
    TypeError
        If one is neither True nor False.
    """

    recompute: bool = False
    sequence_parallel: bool = False
    sharded_parameters: bool = False

    def __post_init__(self) -> None:
        for name in ("recompute", "sequence_parallel", "sharded_parameters"):
            flag(name, getattr(self, name))


def settings_of_model(
    architecture: Any, pipeline: PipelineOptions, ranks: int, precision: Precision, memory: MemoryOptions, seed: int
) -> dict[str, str]:
    """The settings that ranks that train one model must have in common, as text by name, for `FlatParameters`.

    Costs of stages are left out: the cut that follows from them is in the specs of the parameters. `ranks` is the size
    of the pipeline axis. `seed` counts with dropout only: initial values are shared by the first step.
    """
    found: dict[str, Any] = {"architecture": type(architecture).__name__}
    if is_dataclass(architecture):
        found |= {field.name: getattr(architecture, field.name) for field in fields(architecture)}
    found |= {"schedule": pipeline.schedule, "chunks": pipeline.chunks, "microbatches": pipeline.microbatches_on(ranks)}
    halves = {field.name: getattr(precision, field.name) for field in fields(precision)}
    found |= {name: None if dtype is None else np.dtype(dtype) for name, dtype in halves.items()}
    found |= {field.name: getattr(memory, field.name) for field in fields(memory)}
    if found.get("dropout"):
        found["dropout"] = f"{found['dropout']:g} with seed {seed}"
    return {f"the model's {name}": text_of(value) for name, value in found.items()}


class ModelOptions(TypedDict, total=False):
    """Keywords of every model that are fields of these values, for those who write them out in the call."""

    tied: bool
    shards: int
    dropout: float
    schedule: str
    chunks: int
    microbatches: int | None
    stage_costs: str | Sequence[float] | None
    compute_dtype: Any
    storage_dtype: Any
    wire_dtype: Any
    recompute: bool
    sequence_parallel: bool
    sharded_parameters: bool
    module: Any


class GPTOptions(ModelOptions, total=False):
    """Keywords of `GPT` that are fields of values."""


class LlamaOptions(ModelOptions, total=False):
    """Keywords of `Llama` that are fields of values."""

    key_value_heads: int | None
    hidden: int | None
    head_width: int | None
    rotary: Any
    bias: bool
    head_norms: bool
    epsilon: float


# Names of the arguments of `GPT` and `Llama` that may be given by their position.
_BY_POSITION = ("vocabulary_size", "context_length", "width", "layers", "heads", "dtype", "seed")


def shows_fields(*kinds: type) -> Callable[[Init], Init]:
    """A decorator that lets `help` and `inspect.signature` show the fields that ``**options`` of an ``__init__`` take.

    Of `kinds`, dataclasses, the fields that may be given by position come first, the others by keyword after the
    arguments of ``__init__``. It sets ``__signature__``; a subclass with another ``__init__`` has its own.
    """
    keyword, either = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    sizes, options = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

    def decorate(init: Init) -> Init:
        written = inspect.signature(init, eval_str=True)
        own = written.parameters.values()
        shown = {each.name: each for each in own if each.kind not in (sizes, options)}
        for kind in kinds:
            hints = get_type_hints(kind)
            for field in fields(kind):
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                parameter = inspect.Parameter(field.name, keyword, default=default, annotation=hints[field.name])
                shown[field.name] = parameter
        if any(each.kind is sizes for each in own):
            by_position = {name: shown.pop(name).replace(kind=either) for name in ("self", *_BY_POSITION)}
            shown = by_position | shown
        init.__signature__ = written.replace(parameters=list(shown.values()))  # type: ignore[attr-defined]
        return init

    return decorate


def named_architecture(call: str, kind: type[T], given: Sequence[Any], options: dict[str, Any]) -> T:
    """The architecture of a call of `GPT` or `Llama`; its dtype and seed stay in `options`, or are put there.

    `given` is an architecture; or its sizes, dtype and seed; or nothing. Raises TypeError if there are too many, or one
    is among the keywords as well.
    """
    names = ("architecture",) if given and isinstance(given[0], kind) else _BY_POSITION
    if len(given) > len(names):
        raise TypeError(f"{call} takes at most {len(names)} positional arguments, {', '.join(names)}; got {len(given)}")
    for name, value in zip(names, given, strict=False):
        if name in options:
            raise TypeError(f"{call} got multiple values for argument {name!r}")
        options[name] = value
    return config_or_kwargs(call, "architecture", kind, options.pop("architecture", None), options)
