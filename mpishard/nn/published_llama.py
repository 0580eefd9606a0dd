"""Published weights of Llama 2 and 3, Qwen2 and Qwen3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mpishard.arguments import shown
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.llama import Llama
from mpishard.nn.llama_architecture import LlamaArchitecture
from mpishard.nn.published import Config, Published, Run
from mpishard.nn.rotary import RopeScaling, Rotary

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
        return Llama(architecture, **options)

    def queries_keys_values(self, name: str, columns: int, architecture: LlamaArchitecture) -> Iterator[Run]:
        channels, groups = architecture.head_width, architecture.key_value_heads
        assert channels is not None and groups is not None
        start = 0
        for group in range(groups):
            for which, heads in (("q", architecture.heads // groups), ("k", 1), ("v", 1)):
                count = heads * channels
                yield Run(start, start + count, name.format(which), group * count)
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
