"""Memory of a Llama of `transformers` on tensor and pipeline ranks, built on the device meta and read from safetensors.

    mpirun -n 8 python benchmarks/torch_meta.py [--tensor 2] [--pipeline 2] [--zero 1] [--steps 10] [--width 1024] ...

355 M parameters by default, float32, AdamW.  The first rank writes random weights into a temporary folder, tensor by
tensor.  The largest of the resident bytes of a rank, beyond those of the libraries, beside the bytes of its parameters,
gradients and state: by formula and as counted.  --values: each rank makes the whole module first, with values.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import children
import numpy as np
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mpishard

VOCABULARY = 32000
MIB = 2**20


def make(given: argparse.Namespace, device: str) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=given.width,
        intermediate_size=given.width * 5 // 2,
        num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64,
        use_cache=False,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def write(model: Any, folder: Path) -> None:
    """Random weights of a model on the device meta, each tensor in a file of its own, and their index."""
    weight_map = {}
    for number, (name, p) in enumerate(model.state_dict().items()):
        weight_map[name] = f"model-{number}.safetensors"
        values = torch.ones(p.shape) if p.dim() == 1 else torch.randn(p.shape) * 0.02
        safetensors.torch.save_file({name: values}, folder / weight_map[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def loss_of(model: Any, tokens: Any) -> Any:
    return model(input_ids=tokens, labels=tokens).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(tensor=1, pipeline=1, zero=1, steps=10, width=1024, layers=24, context=16, microbatches=2)
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--values", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    with mpishard.Mesh(tensor=given.tensor, pipeline=given.pipeline) as mesh, tempfile.TemporaryDirectory() as own:
        folder = Path(mesh.world.allgather_object(own)[0])
        model = make(given, "cpu" if given.values else "meta")
        if mesh.rank == 0 and not given.values:
            write(model, folder)
        mesh.world.barrier()
        libraries = 0.0 if given.values else children.peak_bytes() / MIB

        def show(what: str) -> None:
            peak = children.peak_bytes() / MIB
            most = mesh.world.all_reduce(np.array([peak, peak - libraries]), op="max")
            if mesh.rank == 0:
                print(
                    f"{what}: at most {most[0]:.0f} MiB resident on a rank, {most[1]:.0f} above those before",
                    flush=True,
                )

        show("before")
        start = time.perf_counter()
        optimizer = mpishard.torch.as_distributed(
            model,
            mesh,
            mpishard.AdamW(lr=1e-4),
            zero=given.zero,
            materialize=None if given.values else folder,
            check_plan=False,
            microbatches=given.microbatches,
        )
        show(f"as_distributed, {time.perf_counter() - start:.1f} s")
        random = np.random.default_rng(mesh.data.rank)
        for step in range(given.steps):
            start = time.perf_counter()
            tokens = torch.from_numpy(random.integers(0, VOCABULARY, (given.microbatches, given.context)))
            loss = optimizer.loss_and_gradient(loss_of, tokens)
            optimizer.step()
            show(f"step {step + 1}, loss {loss:.4f}, {time.perf_counter() - start:.1f} s")
        parameters, state = optimizer.parameters, optimizer.optimizer.state
        count = parameters.size
        counted = parameters.nbytes + state.nbytes + state.gradient_bytes
        formula = mpishard.estimate.model_state_bytes(
            count, mesh.data.size, given.zero, parameter_bytes=4, gradient_bytes=4, state_bytes=8
        )
        most = mesh.world.all_reduce(np.array([count, formula, counted], np.int64), op="max")
        if mesh.rank == 0:
            every = sum(spec.size for spec in parameters.specs)
            print(
                f"{every} parameters of {4 * every / MIB:.0f} MiB on {mesh.sizes}, zero={given.zero}; at most "
                f"{most[0]} on a rank: parameters, gradients and state take {most[1] / MIB:.0f} MiB by the formula, "
                f"{most[2] / MIB:.0f} as counted after a step"
            )


if __name__ == "__main__":
    main()
