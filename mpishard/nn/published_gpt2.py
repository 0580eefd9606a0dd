"""Published weights of GPT-2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mpishard.arguments import shown
from mpishard.nn.architecture import Architecture
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.gpt import GPT
from mpishard.nn.published import Config, Published, Run


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
        return GPT(architecture, **options)

    def queries_keys_values(self, name: str, columns: int, architecture: Architecture) -> Iterator[Run]:
        channels = architecture.width // architecture.heads
        for start in range(0, columns, channels):
            head, which = divmod(start // channels, 3)
            yield Run(start, start + channels, name, which * architecture.width + head * channels)
