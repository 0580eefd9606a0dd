"""Architectures of transformers, small and with random weights, for tensor and pipeline ranks, and their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch_plans import BATCH, LENGTH, WORDS, fresh, words_of

SIZES = dict(vocab_size=WORDS, hidden_size=24, intermediate_size=10, num_hidden_layers=2, max_position_embeddings=16)
HEADS = dict(num_attention_heads=6, num_key_value_heads=3)  # on two ranks the parts are unlike
GROUPED = dict(**HEADS, head_dim=4)
# Those whose layers behind an attention have another parent are cut evenly.
EVEN = dict(SIZES, intermediate_size=12, num_attention_heads=6)
EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NO_DROPOUT_OF_BERT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, options of its configuration, and what it takes; without a plan it has its own.

    `refused` is a part of the message with which tensor ranks refuse it, `refused_stages` that of a pipeline; `stages`
    are where this cuts it.
    """

    options: dict[str, Any]
    plan: dict[str, str] | None = None
    kind: str = "ForCausalLM"
    config: str = ""
    inputs: str = "words"
    refused: str = ""
    stages: Any = None
    refused_stages: str = ""
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # other configurations in this one

    def made(self, transformers: Any, name: str, in_stages: bool = False) -> Any:
        """The model, in float64; `in_stages` with experts whose shapes do not follow from values."""
        is_fixed = in_stages and "experts_implementation" in self.options
        own = self.options | (dict(experts_implementation="batched_mm") if is_fixed else {})
        given = {key: getattr(transformers, config)(**options) for key, (config, options) in self.parts.items()}
        tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
        config = getattr(transformers, self.config or f"{name}Config")(**tokens | own | given)
        return fresh(kind=lambda: getattr(transformers, f"{name}{self.kind}")(config))


def _attention(path: str, out: str, front: str = "[qkv]_proj") -> dict[str, str]:
    return {f"{path}.{front}": "colwise", f"{path}.{out}": "rowwise"}


def _perceptron(up: str, down: str) -> dict[str, str]:
    return {up: "colwise", down: "rowwise"}


ARCHITECTURES = {
    "Llama": Architecture(dict(**SIZES, **GROUPED)),
    "Mistral": Architecture(dict(**SIZES, **GROUPED)),
    "Qwen2": Architecture(dict(**SIZES, **HEADS)),
    "Qwen3": Architecture(dict(**SIZES, **GROUPED, tie_word_embeddings=True)),
    "Gemma": Architecture(dict(**SIZES, **GROUPED)),
    "Gemma2": Architecture(dict(**SIZES, **GROUPED)),
    "Gemma3": Architecture(dict(**SIZES, **GROUPED), config="Gemma3TextConfig"),
    "Phi": Architecture(dict(**SIZES, **HEADS)),
    "Phi3": Architecture(dict(**SIZES, **HEADS)),
    "Olmo": Architecture(dict(**SIZES, **HEADS)),
    "Olmo2": Architecture(dict(**SIZES, **HEADS)),
    "GPTNeoX": Architecture(dict(**SIZES, num_attention_heads=3)),
    "Starcoder2": Architecture(dict(**SIZES, **HEADS)),
    "Granite": Architecture(dict(**SIZES, **HEADS)),
    "Cohere": Architecture(dict(**SIZES, **HEADS)),
    "Glm": Architecture(dict(**SIZES, **GROUPED)),
    "SmolLM3": Architecture(dict(**SIZES, **HEADS)),
    "Nemotron": Architecture(dict(**SIZES, **GROUPED)),
    "Helium": Architecture(dict(**SIZES, **GROUPED)),
    "Ernie4_5": Architecture(dict(**SIZES, **GROUPED)),
    "Mixtral": Architecture(dict(**SIZES, **GROUPED, **EXPERTS, num_local_experts=4)),
    "Qwen2Moe": Architecture(
        dict(**SIZES, **HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=5, shared_expert_intermediate_size=7)
    ),
    # On three ranks one of them needs both heads of keys and values.
    "Qwen3Moe": Architecture(
        dict(**SIZES, **GROUPED | {"num_key_value_heads": 2}, **EXPERTS, num_experts=4, moe_intermediate_size=5)
        | dict(tie_word_embeddings=True)
    ),
    # Its experts are transposed, and get tokens that are weighted already.
    "Llama4": Architecture(
        dict(**SIZES, **GROUPED, intermediate_size_mlp=7, num_local_experts=3, attention_chunk_size=8),
        config="Llama4TextConfig",
    ),
    # Its attention is whole on each rank.
    "DeepseekV3": Architecture(
        dict(**SIZES, **EXPERTS, num_attention_heads=6, num_key_value_heads=6, q_lora_rank=8, kv_lora_rank=8)
        | dict(qk_rope_head_dim=2, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4, n_group=2, topk_group=1)
        | dict(moe_intermediate_size=5, n_shared_experts=1, first_k_dense_replace=1)
    ),
    "GPT2": Architecture(
        dict(vocab_size=WORDS, n_embd=12, n_layer=2, n_head=3, n_positions=16, **NO_DROPOUT),
        {
            "transformer.wte": "embedding_rowwise",
            "lm_head": "colwise_gather_output",
            "transformer.h.*.attn.c_attn": "colwise_gather_output",
            "transformer.h.*.attn.c_proj": "rowwise_split_input",
            **_perceptron("transformer.h.*.mlp.c_fc", "transformer.h.*.mlp.c_proj"),
        },
        kind="LMHeadModel",
    ),
    "GPTJ": Architecture(
        dict(vocab_size=WORDS, n_embd=24, n_layer=2, n_head=3, n_positions=16, rotary_dim=4, **NO_DROPOUT),
        _attention("transformer.h.*.attn", "out_proj")
        | _perceptron("transformer.h.*.mlp.fc_in", "transformer.h.*.mlp.fc_out"),
    ),
    "OPT": Architecture(
        dict(vocab_size=WORDS, hidden_size=12, ffn_dim=10, num_hidden_layers=2, num_attention_heads=3)
        | dict(word_embed_proj_dim=12, max_position_embeddings=16, dropout=0.0),
        _attention("model.decoder.layers.*.self_attn", "out_proj")
        | _perceptron("model.decoder.layers.*.fc1", "model.decoder.layers.*.fc2"),
        stages=dict.fromkeys(("model.decoder.layers", "model.decoder.final_layer_norm")),
    ),
    "StableLm": Architecture(
        dict(**SIZES, **HEADS, rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
        _attention("model.layers.*.self_attn", "o_proj")
        | {"model.layers.*.mlp.gate_proj": "colwise"}
        | _perceptron("model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"),
    ),
    "Bloom": Architecture(
        dict(vocab_size=WORDS, hidden_size=12, n_layer=2, n_head=3, hidden_dropout=0.0, attention_dropout=0.0),
        _attention("transformer.h.*.self_attention", "dense", "query_key_value"),
        refused="size|shape",  # of the biases of all heads
    ),
    "Bert": Architecture(
        dict(**EVEN, **NO_DROPOUT_OF_BERT),
        {
            "bert.encoder.layer.*.attention.self.query": "colwise",
            "bert.encoder.layer.*.attention.self.key": "colwise",
            "bert.encoder.layer.*.attention.self.value": "colwise",
            "bert.encoder.layer.*.attention.output.dense": "rowwise",
            **_perceptron("bert.encoder.layer.*.intermediate.dense", "bert.encoder.layer.*.output.dense"),
        },
        kind="ForMaskedLM",
    ),
    "T5": Architecture(
        dict(vocab_size=WORDS, d_model=12, d_kv=4, d_ff=10, num_layers=2, num_heads=3, dropout_rate=0.0)
        | dict(decoder_start_token_id=0),
        {
            **_attention("*.block.*.layer.*.*Attention", "o", "[qkv]"),
            "*.block.*.layer.*.SelfAttention.relative_attention_bias": "colwise",
            **_perceptron("*.block.*.layer.*.DenseReluDense.wi", "*.block.*.layer.*.DenseReluDense.wo"),
        },
        kind="ForConditionalGeneration",
        inputs="pairs",
        stages=["decoder"],
    ),
    "Whisper": Architecture(
        dict(vocab_size=WORDS, d_model=12, encoder_layers=1, decoder_layers=2, num_mel_bins=4, dropout=0.0)
        | dict(encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=10, decoder_ffn_dim=10)
        | dict(max_source_positions=6, max_target_positions=16, decoder_start_token_id=0),
        {
            **_attention("model.*.layers.*.self_attn", "out_proj"),
            **_attention("model.decoder.layers.*.encoder_attn", "out_proj"),
            **_perceptron("model.*.layers.*.fc1", "model.*.layers.*.fc2"),
        },
        kind="ForConditionalGeneration",
        inputs="sound",
        stages=["model.decoder"],
    ),
    "ViT": Architecture(
        dict(image_size=8, patch_size=4, num_channels=1, hidden_size=24, intermediate_size=10, num_hidden_layers=2)
        | dict(num_attention_heads=3, num_labels=WORDS, **NO_DROPOUT_OF_BERT),
        _attention("vit.layers.*.attention", "o_proj") | _perceptron("vit.layers.*.mlp.fc1", "vit.layers.*.mlp.fc2"),
        kind="ForImageClassification",
        inputs="images",
    ),
    "CLIP": Architecture(
        dict(projection_dim=8),
        _attention("*_model.encoder.layers.*.self_attn", "out_proj")
        | _perceptron("*_model.encoder.layers.*.mlp.fc1", "*_model.encoder.layers.*.mlp.fc2"),
        kind="Model",
        inputs="captions",
        stages=dict.fromkeys(("vision_model", "visual_projection", "text_model", "text_projection")),
        refused_stages="the loss depends on layers of earlier stages",  # by the projections of images
        parts={
            "text_config": ("CLIPTextConfig", dict(**SIZES, num_attention_heads=3, eos_token_id=0)),
            "vision_config": (
                "CLIPVisionConfig",
                dict(SIZES, num_attention_heads=3, image_size=8, patch_size=4, num_channels=1),
            ),
        },
    ),
}


def _numbers(step: int, *shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng([7, step]).standard_normal((BATCH, *shape)))


def batch_of(inputs: str, step: int, rank: int = 0, ranks: int = 1) -> tuple[dict[str, Any], Any]:
    """This rank's samples of a batch: what the module takes, and the words that it is to name."""
    words = words_of(step)
    given = {"words": {"input_ids": words[:, :-1]}, "images": {"pixel_values": _numbers(step, 1, 8, 8)}}
    given["pairs"] = {"input_ids": words, "decoder_input_ids": words[:, :-1]}
    given["sound"] = {"input_features": _numbers(step, 4, 12), "decoder_input_ids": words[:, :-1]}
    given["captions"] = given["images"] | {"input_ids": words}
    targets = words[:, 1:] if inputs != "images" else words[:, 0]
    assert inputs == "images" or targets.shape[1] == LENGTH
    return {key: values[rank::ranks] for key, values in given[inputs].items()}, targets[rank::ranks]


def loss_of(module: Any, given: dict[str, Any], targets: Any) -> Any:
    """The mean loss of some samples."""
    found = module(**given)
    if hasattr(found, "logits_per_text"):
        return found.logits_per_text.diagonal().square().mean()
    return torch.nn.functional.cross_entropy(found.logits.flatten(0, -2), targets.flatten())


def take_steps(
    module: Any, optimizer: Any, inputs: str, steps: int, axis: Any = None, in_stages: bool = False
) -> list[float]:
    """The losses of steps of all samples, of which a data rank has its part; `in_stages`: those of a pipeline."""
    losses = []
    for step in range(steps):
        batch = batch_of(inputs, step, *((axis.rank, axis.size) if axis is not None else ()))
        if in_stages:
            losses.append(optimizer.loss_and_gradient(loss_of, *batch))
        else:
            optimizer.zero_grad()
            loss = loss_of(module, *batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses
