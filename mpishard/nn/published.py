"""How published models of `transformers` map to models of this package: one table an architecture.

A table says which sizes a ``config.json`` has, what else it may ask for, and of which published tensors each tensor
here consists. Nothing here is collective or reads a file.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import shown
from mpishard.layout.tensors import ParameterSpec
from mpishard.nn.architecture import Architecture, DecoderArchitecture, LlamaArchitecture
from mpishard.nn.decoder import Decoder
from mpishard.nn.models import GPT, Llama
from mpishard.nn.rotary import RopeScaling, Rotary
from mpishard.nn.units import TABLE

Config = Mapping[str, Any]
# The output head has this name in all models, without a prefix.
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ColumnRange:
    """Some columns of a tensor, the last dimension, which are columns of a published tensor from `first` on."""

    start: int
    stop: int
    published: str
    first: int = 0


@dataclass(frozen=True)
class Weight:
    """The published tensors of which a tensor of one or two dimensions consists."""

    spec: ParameterSpec
    runs: tuple[ColumnRange, ...]  # all its columns, in order
    transposed: bool = False  # published tensors are stored (outputs, inputs); tensors here are (inputs, outputs)

    @property
    def is_table(self) -> bool:
        """Return True if it is the table of the token embedding."""
        return self.spec.name == f"{TABLE}.weight"

    def published_shapes(self) -> dict[str, tuple[int, ...]]:
        """The published tensors, and the shape of each."""
        columns: dict[str, int] = {}
        for run in self.runs:
            columns[run.published] = columns.get(run.published, 0) + run.stop - run.start
        rows = self.spec.shape[:-1]
        return {name: (count, *rows) if self.transposed else (*rows, count) for name, count in columns.items()}


class Published(ABC):
    """The table of one architecture."""

    model_type: str  # as in ``config.json``
    class_name: str  # the class of `transformers` that has these weights
    prefix: str  # begins the names of all tensors but the output head; files of the bare model leave it out
    layers: str  # what a block is called there
    names: Mapping[str, str]  # layers here, within a block where they are in one, and their names there
    transposed: bool  # products there store their weights (outputs, inputs); here they are (inputs, outputs)
    unused: re.Pattern[str]  # published tensors, without the prefix, that have no weights, such as masks
    sizes: Mapping[str, str]  # fields of the architecture, and those of ``config.json`` that it must have
    # Fields of ``config.json`` with the values that the model here computes; the first: of a config without it.
    required: Mapping[str, tuple[Any, ...]]

    @abstractmethod
    def describes(self, architecture: DecoderArchitecture) -> bool:
        """Return True if models of this architecture can be stored so."""

    @abstractmethod
    def architecture(self, config: Config) -> Any:
        """The architecture for a ``config.json``."""

    @abstractmethod
    def config(self, architecture: Any) -> dict[str, Any]:
        """The fields of ``config.json`` for an architecture, other than its sizes and what is required."""

    @abstractmethod
    def build(self, architecture: Any, **options: Any) -> Decoder:
        """The model."""

    @abstractmethod
    def queries_keys_values(self, name: str, columns: int, architecture: Any) -> Iterator[ColumnRange]:
        """The columns of the product of queries, keys and values; `name`: what ``attention.qkv`` is called there."""

    def weight(self, spec: ParameterSpec, architecture: Any) -> Weight:
        """Of which published tensors a tensor consists."""
        columns = spec.shape[-1]
        block, kind, leaf = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)\.(weight|bias)", spec.name).groups()  # type: ignore[union-attr]
        if kind == "head":
            return Weight(spec, (ColumnRange(0, columns, HEAD),), transposed=True)
        within = "" if block is None else f"{self.layers}.{block}."
        name = f"{self.prefix}{within}{self.names[kind]}.{leaf}"
        transposed = self.transposed and block is not None and len(spec.shape) > 1
        if kind == "attention.qkv":
            return Weight(spec, tuple(self.queries_keys_values(name, columns, architecture)), transposed)
        return Weight(spec, (ColumnRange(0, columns, name),), transposed)

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


# Published weights of GPT-2.


class PublishedGPT2(Published):
    """GPT-2 (Radford et al., 2019).

    Its products store weights (inputs, outputs), as here.  The columns of its ``c_attn`` are ordered by query, key,
    value, then head; here by head first.
    """

    model_type = "gpt2"
    class_name = "GPT2LMHeadModel"
    prefix = "transformer."
    layers = "h"
    names = {
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
    transposed = False
    unused = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks
    sizes = {
        "vocabulary_size": "vocab_size",
        "context_length": "n_positions",
        "width": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
    }
    required = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }

    def describes(self, architecture: DecoderArchitecture) -> bool:
        return isinstance(architecture, Architecture)

    def architecture(self, config: Config) -> Architecture:
        found = Architecture(**self.sizes_in(config), tied=config.get("tie_word_embeddings", True))
        if config.get("n_inner") not in (None, 4 * found.width):
            raise ValueError(
                f"config.json asks for n_inner={shown(config['n_inner'])}; models here have 4 * n_embd = "
                f"{4 * found.width} hidden channels"
            )
        return found

    def config(self, architecture: Architecture) -> dict[str, Any]:
        return dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)

    def build(self, architecture: Architecture, **options: Any) -> GPT:
        return GPT(**vars(architecture), **options)

    def queries_keys_values(self, name: str, columns: int, architecture: Architecture) -> Iterator[ColumnRange]:
        channels = architecture.width // architecture.heads
        for start in range(0, columns, channels):
            head, which = divmod(start // channels, 3)
            yield ColumnRange(start, start + channels, name, which * architecture.width + head * channels)


# Published weights of Llama 2 and 3, Qwen2 and Qwen3.

# Fields of `RopeScaling`, and those of a config.
_SCALING = {
    "factor": "factor",
    "original_context": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "attention_factor": "attention_factor",
}
# Those that a kind of scaling must have.
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "original_context", "low_frequency_factor", "high_frequency_factor"),
    "longrope": ("original_context", "short_factors", "long_factors"),
}


class PublishedLlama(Published):
    """Llama 2 and 3 (Touvron et al., 2023).

    Its products store weights (outputs, inputs), and queries, keys and values are three.
    """

    model_type = "llama"
    class_name = "LlamaForCausalLM"
    prefix = "model."
    layers = "layers"
    names = {
        "token_embedding": "embed_tokens",
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.{}_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "final_norm": "norm",
    }
    transposed = True
    unused = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    sizes = {
        "vocabulary_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "width": "hidden_size",
        "hidden": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
    }
    required: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    # Fields of the architecture that this family has.
    bias = head_norms = False

    def describes(self, architecture: DecoderArchitecture) -> bool:
        return isinstance(architecture, LlamaArchitecture) and (architecture.bias, architecture.head_norms) == (
            self.bias,
            self.head_norms,
        )

    def architecture(self, config: Config) -> LlamaArchitecture:
        return LlamaArchitecture(
            **self.sizes_in(config),
            key_value_heads=config.get("num_key_value_heads"),
            head_width=config.get("head_dim"),
            rotary=_rotary(config),
            bias=self.bias,
            head_norms=self.head_norms,
            epsilon=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
        )

    def config(self, architecture: LlamaArchitecture) -> dict[str, Any]:
        rotary = architecture.rotary
        if rotary.pairing != "half-split":
            raise ValueError(
                f"transformers pairs channels half-split, but the model here has rotary pairing={rotary.pairing!r}; "
                "train it with half-split to export it"
            )
        scaling = rotary.scaling
        given = {} if scaling is None else {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}
        fields = {name: value for name, value in given.items() if value not in (None, ())}
        return {
            "num_key_value_heads": architecture.key_value_heads,
            "head_dim": architecture.head_width,
            "rms_norm_eps": architecture.epsilon,
            "attention_dropout": 0.0,
            "rope_theta": rotary.theta,
            "rope_scaling": None if scaling is None else {"rope_type": scaling.kind, **fields},
        }

    def build(self, architecture: LlamaArchitecture, **options: Any) -> Llama:
        return Llama(**vars(architecture), **options)

    def queries_keys_values(self, name: str, columns: int, architecture: LlamaArchitecture) -> Iterator[ColumnRange]:
        channels, groups = architecture.head_width, architecture.key_value_heads
        assert channels is not None and groups is not None
        start = 0
        for group in range(groups):
            for which, heads in (("q", architecture.heads // groups), ("k", 1), ("v", 1)):
                count = heads * channels
                yield ColumnRange(start, start + count, name.format(which), group * count)
                start += count


class PublishedQwen2(PublishedLlama):
    """Qwen2: queries, keys and values have biases."""

    model_type = "qwen2"
    class_name = "Qwen2ForCausalLM"
    required = {"hidden_act": ("silu",), "use_sliding_window": (False,)}
    bias = True


class PublishedQwen3(PublishedLlama):
    """Qwen3: the queries and keys of each head are normed."""

    model_type = "qwen3"
    class_name = "Qwen3ForCausalLM"
    required = {"hidden_act": ("silu",), "use_sliding_window": (False,), "attention_bias": (False,)}
    head_norms = True


def _rotary(config: Config) -> Rotary:
    """The rotary positions, as configs have them from version 5 of `transformers` on, or before."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, dict) or fields.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"config.json asks for rotary positions {shown(fields)}, which models here do not have")
    thetas = [theta for theta in (fields.get("rope_theta"), config.get("rope_theta")) if theta is not None]
    theta = thetas[0] if thetas else 10_000.0
    given = {ours: fields[theirs] for ours, theirs in _SCALING.items() if fields.get(theirs) is not None}
    kind = fields.get("rope_type", fields.get("type"))
    if kind == "default" or (kind is None and not given):
        return Rotary(theta)
    if kind == "longrope":
        original = given.setdefault("original_context", config.get("original_max_position_embeddings"))
        if original and "factor" not in given:
            given["factor"] = config["max_position_embeddings"] / original
    if absent := [_SCALING[name] for name in _NEEDED.get(str(kind), ()) if given.get(name) is None]:
        raise ValueError(f"config.json asks for the rope scaling {kind} without {', '.join(absent)}; give all of them")
    return Rotary(theta, scaling=RopeScaling(str(kind), **given))
