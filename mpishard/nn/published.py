"""How published models of `transformers` map to models of this package: one table an architecture.

A table says which sizes a ``config.json`` has, what else it may ask for, and of which published tensors each tensor
here consists.  Nothing here is collective or reads a file.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import shown
from mpishard.layout.specs import ParameterSpec
from mpishard.nn.decoder import Decoder
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.units import TABLE

Config = Mapping[str, Any]
# The output head has this name in all models, without a prefix.
HEAD = "lm_head.weight"
# Dtypes of published tensors, as safetensors calls them.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Run:
    """Some columns of a tensor, which are columns of a published tensor.

    Parameters
    ----------
    start, stop : int
        The columns of the tensor here: its last dimension.
    published : str
        Name of the published tensor.
    first : int
        The column of the published tensor at which they begin.
    """

    start: int
    stop: int
    published: str
    first: int = 0


@dataclass(frozen=True)
class Weight:
    """Of which published tensors a tensor consists.

    Parameters
    ----------
    spec : ParameterSpec
        The tensor here, of one or two dimensions.
    runs : tuple of Run
        All its columns, in order.
    transposed : bool
        Whether the published tensors are stored (outputs, inputs); tensors here are (inputs, outputs).
    """

    spec: ParameterSpec
    runs: tuple[Run, ...]
    transposed: bool = False

    @property
    def is_table(self) -> bool:
        """Whether it is the table of the token embedding."""
        return self.spec.name == f"{TABLE}.weight"

    def published_shapes(self) -> dict[str, tuple[int, ...]]:
        """The published tensors, and the shape of each."""
        columns: dict[str, int] = {}
        for run in self.runs:
            columns[run.published] = columns.get(run.published, 0) + run.stop - run.start
        rows = self.spec.shape[:-1]
        return {name: (count, *rows) if self.transposed else (*rows, count) for name, count in columns.items()}


class Published(ABC):
    """The table of one architecture.

    Attributes
    ----------
    model_type : str
        As ``config.json`` has it.
    class_name : str
        The class of `transformers` that has these weights.
    prefix : str
        Begins the names of all tensors but the output head; files of the bare model leave it out.
    layers : str
        What a block is called there.
    names : mapping of str to str
        Layers here, within a block where they are in one, and what they are called there.
    transposed : bool
        Whether products there store their weights (outputs, inputs); here they are (inputs, outputs).
    unused : Pattern
        Published tensors, without the prefix, that have no weights, such as masks.
    sizes : mapping of str to str
        Fields of the architecture, and those of ``config.json`` that it must have.
    required : mapping of str to tuple
        Fields of ``config.json`` with the values that the model here computes; the first is that of a config without
        the field.
    """

    model_type: str
    class_name: str
    prefix: str
    layers: str
    names: Mapping[str, str]
    transposed: bool
    unused: re.Pattern[str]
    sizes: Mapping[str, str]
    required: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def describes(self, architecture: DecoderArchitecture) -> bool:
        """Whether models of this architecture can be stored so."""

    @abstractmethod
    def architecture(self, config: Config) -> Any:
        """The architecture for a ``config.json``."""

    @abstractmethod
    def config(self, architecture: Any) -> dict[str, Any]:
        """The fields of ``config.json`` for an architecture, besides its sizes and what is required."""

    @abstractmethod
    def build(self, architecture: Any, **options: Any) -> Decoder:
        """The model."""

    @abstractmethod
    def queries_keys_values(self, name: str, columns: int, architecture: Any) -> Iterator[Run]:
        """The columns of the product of queries, keys and values; `name`: what ``attention.qkv`` is called there."""

    def weight(self, spec: ParameterSpec, architecture: Any) -> Weight:
        """Of which published tensors a tensor consists."""
        columns = spec.shape[-1]
        block, kind, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", spec.name).groups()  # type: ignore[union-attr]
        if kind == "head":
            return Weight(spec, (Run(0, columns, HEAD),), transposed=True)
        within = "" if block is None else f"{self.layers}.{block}."
        name = f"{self.prefix}{within}{self.names[kind]}.{leaf}"
        transposed = self.transposed and block is not None and len(spec.shape) > 1
        if kind == "attention.qkv":
            return Weight(spec, tuple(self.queries_keys_values(name, columns, architecture)), transposed)
        return Weight(spec, (Run(0, columns, name),), transposed)

    def weights(self, architecture: Any) -> list[Weight]:
        """That of all tensors of a model, in the order in which it uses them."""
        return [self.weight(spec, architecture) for spec in architecture.specs()]

    def check(self, config: Config) -> None:
        """Raise ValueError if a ``config.json`` asks for what the model here does not have."""
        for name, values in self.required.items():
            if (asked := config.get(name, values[0])) not in values:
                known = " or ".join(map(repr, values))
                raise ValueError(f"config.json asks for {name}={shown(asked)}; models here have {known} only")
        if config.get("quantization_config") is not None:
            raise ValueError("config.json asks for quantization_config; save the model without quantization first")

    def sizes_in(self, config: Config) -> dict[str, Any]:
        """The fields of the architecture that ``config.json`` must have."""
        for name in self.sizes.values():
            if config.get(name) is None:
                raise ValueError(f"config.json has no {name}, which a model of model_type={self.model_type!r} needs")
        return {ours: config[theirs] for ours, theirs in self.sizes.items()}

    def whole_config(self, architecture: Any) -> dict[str, Any]:
        """The ``config.json`` for an architecture."""
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            **{theirs: getattr(architecture, ours) for ours, theirs in self.sizes.items()},
            **{name: values[0] for name, values in self.required.items()},
            "tie_word_embeddings": architecture.tied,
            # An export writes those of the config that the model was imported from, if it was.
            "bos_token_id": None,
            "eos_token_id": None,
            **self.config(architecture),
        }
