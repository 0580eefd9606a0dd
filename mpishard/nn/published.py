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
from mpishard.nn.architecture import Architecture
from mpishard.nn.gpt import GPT

Config = Mapping[str, Any]
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
    unused : Pattern
        Published tensors, without the prefix, that have no weights, such as masks.
    required : mapping of str to tuple
        Fields of ``config.json`` with the values that the model here computes; the first is that of a config without
        the field.
    """

    model_type: str
    class_name: str
    prefix: str
    unused: re.Pattern[str]
    required: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def architecture(self, config: Config) -> Any:
        """The architecture for a ``config.json``."""

    @abstractmethod
    def config(self, architecture: Any) -> dict[str, Any]:
        """The ``config.json`` for an architecture."""

    @abstractmethod
    def build(self, architecture: Any, **options: Any) -> GPT:
        """The model."""

    @abstractmethod
    def weight(self, spec: ParameterSpec, architecture: Any) -> Weight:
        """Of which published tensors a tensor consists."""

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

    def size(self, config: Config, name: str) -> Any:
        """A field of ``config.json`` that must be there."""
        if config.get(name) is None:
            raise ValueError(f"config.json has no {name}, which a model of model_type={self.model_type!r} needs")
        return config[name]


class PublishedGPT2(Published):
    """GPT-2 (Radford et al., 2019).

    Its products store weights (inputs, outputs), as here.  The columns of its ``c_attn`` are ordered by query, key,
    value, then head; here by head first.  Its causal masks are no weights.
    """

    model_type = "gpt2"
    class_name = "GPT2LMHeadModel"
    prefix = "transformer."
    unused = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
    required = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    _SIZES = {
        "vocabulary_size": "vocab_size",
        "context_length": "n_positions",
        "width": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
    }
    _NAMES = {
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.expand": "mlp.c_fc",
        "mlp.contract": "mlp.c_proj",
        "final_norm": "ln_f",
    }

    def architecture(self, config: Config) -> Architecture:
        sizes = {ours: self.size(config, theirs) for ours, theirs in self._SIZES.items()}
        found = Architecture(**sizes, tied=config.get("tie_word_embeddings", True))
        if config.get("n_inner") not in (None, 4 * found.width):
            raise ValueError(
                f"config.json asks for n_inner={shown(config['n_inner'])}; models here have 4 * n_embd = "
                f"{4 * found.width} hidden channels"
            )
        return found

    def config(self, architecture: Architecture) -> dict[str, Any]:
        sizes = {theirs: getattr(architecture, ours) for ours, theirs in self._SIZES.items()}
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        fixed = {name: values[0] for name, values in self.required.items()}
        tokens = {"bos_token_id": None, "eos_token_id": None}
        return {**sizes, **dropouts, **fixed, **tokens, "tie_word_embeddings": architecture.tied}

    def build(self, architecture: Architecture, **options: Any) -> GPT:
        return GPT(architecture, **options)

    def weight(self, spec: ParameterSpec, architecture: Architecture) -> Weight:
        columns = spec.shape[-1]
        if spec.name == "head.weight":
            return Weight(spec, (Run(0, columns, "lm_head.weight"),), transposed=True)
        layer, kind = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(?:weight|bias)", spec.name).groups()  # type: ignore[union-attr]
        leaf = spec.name.rpartition(".")[2]
        name = f"{self.prefix}{'' if layer is None else f'h.{layer}.'}{self._NAMES[kind]}.{leaf}"
        if kind != "attention.qkv":
            return Weight(spec, (Run(0, columns, name),))
        return Weight(spec, tuple(_by_head(name, architecture.width, architecture.heads)))


def _by_head(name: str, width: int, heads: int) -> Iterator[Run]:
    """The columns of queries, keys and values by head; in the published tensor those of all heads follow each other."""
    channels = width // heads
    for start in range(0, 3 * width, channels):
        head, which = divmod(start // channels, 3)
        yield Run(start, start + channels, name, which * width + head * channels)


TABLES: tuple[Published, ...] = (PublishedGPT2(),)


def table_of_config(config: Config) -> Published:
    """The table for a ``config.json``; ValueError for an unknown architecture, or what models here do not have."""
    asked = config.get("model_type")
    for table in TABLES:
        if table.model_type == asked:
            table.check(config)
            return table
    known = ", ".join(table.model_type for table in TABLES)
    raise ValueError(f"config.json has model_type={shown(asked)}; the known ones are {known}")


def table_of_model(model: Any) -> Published:
    """The table for a model of this package; TypeError for another object."""
    if isinstance(model, GPT):
        return TABLES[0]
    raise TypeError(f"export_pretrained needs a model of mpishard.nn, got {shown(model)}")
