"""Memory of a GPT-2 of `transformers` under ``zero=3`` of `mpishard.torch`, which no rank ever has whole.

    mpirun -n 8 python benchmarks/torch_memory.py [--layers 24] [--width 1024] [--heads 16] [--steps 20] [--fsdp2]

Random values by its configuration, from the device meta, each layer a unit; float32, AdamW, one sequence a rank.  After
each step the first rank prints the loss, and the largest bytes of parameters, gradients and state of any rank so far,
while a step runs and after it, with the largest resident memory; at the end the formula of
``docs/how-to/torch-zero3.md``.
--fsdp2: the same model by PyTorch's FSDP2 over gloo, of which only the resident memory is known.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import children
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import mpishard

VOCABULARY = 50257
MIB = 2**20


def make(layers: int, width: int, heads: int, context: int) -> Any:
    """The model, without values."""
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"n_positions": context, "n_embd": width, "n_layer": layers, "n_head": heads}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **off))


def fill(layer: Any) -> None:
    """Draw the parameters of a layer as GPT-2 has them, and make the causal mask of an attention."""
    for p in layer.parameters(recurse=False):
        if p.dim() == 1:
            p.fill_(1.0 if isinstance(layer, torch.nn.LayerNorm) and p is layer.weight else 0.0)
        else:
            p.normal_(0, 0.02)
    for buffer in layer.buffers(recurse=False):
        buffer.copy_(torch.ones(buffer.shape).tril() if buffer.dim() == 4 else torch.full(buffer.shape, -1e4))


def take_steps(mesh: mpishard.Mesh, model: Any, optimizer: Any, given: argparse.Namespace) -> Iterator[str]:
    """Train; yield a line on each step.  Collective."""
    random = np.random.default_rng(mesh.rank)
    for step in range(given.steps):
        start = time.perf_counter()
        tokens = torch.from_numpy(random.integers(0, VOCABULARY, (1, given.context)))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        resident = children.peak_bytes() / MIB
        mean = mesh.world.all_reduce(np.array([loss.item()])) / mesh.size
        most = mesh.world.all_reduce(np.array([resident]), op="max")
        seconds = time.perf_counter() - start
        yield f"step {step + 1}: loss {mean[0]:.4f}, {seconds:.1f} s; resident {most[0]:.0f} MiB"


def by_fsdp2(mesh: mpishard.Mesh, given: argparse.Namespace) -> None:
    """The same training by PyTorch alone, on the ranks of a mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{mesh.world.allgather_object(folder)[0]}/rendezvous"
        dist.init_process_group("gloo", init_method=where, rank=mesh.rank, world_size=mesh.size)
        dist.barrier()
    model = make(given.layers, given.width, given.heads, given.context)
    devices = init_device_mesh("cpu", (mesh.size,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=devices)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for layer in model.modules():
            fill(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for line in take_steps(mesh, model, optimizer, given):
        if mesh.rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 24), ("width", 1024), ("heads", 16), ("context", 32), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fsdp2", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    with mpishard.Mesh() as mesh:
        if given.fsdp2:
            by_fsdp2(mesh, given)
            return
        model = make(given.layers, given.width, given.heads, given.context)
        rule = mpishard.AdamW(lr=1e-4)
        optimizer = mpishard.torch.as_distributed(model, mesh, rule, zero=3, shard_units=GPT2Block, materialize=fill)
        parameters, state = optimizer.parameters, optimizer.optimizer.state
        peak = 0

        def look(*values: Any) -> None:
            nonlocal peak
            given = sum(each.nbytes for each in values if isinstance(each, torch.Tensor))
            peak = max(peak, given + parameters.nbytes + state.nbytes + state.gradient_bytes)

        for block in model.transformer.h:
            block.ln_1.register_forward_hook(lambda *_: look())
        for p in model.parameters():
            p.register_hook(look)  # with the gradient, which autograd still has
        for line in take_steps(mesh, model, optimizer, given):
            after = parameters.nbytes + state.nbytes + state.gradient_bytes
            peak_most, most = mesh.world.all_reduce(np.array([peak, after], np.int64), op="max") / MIB
            if mesh.rank == 0:
                what = "parameters, gradients and state"
                print(f"{line}; at most {peak_most:.0f} MiB of {what}, {most:.0f} after the step", flush=True)
        if mesh.rank == 0:
            units = sorted(4 * sum(p.numel() for p in block.parameters()) for block in model.transformer.h)
            root = 4 * parameters.size - sum(units)
            kept = mpishard.estimate.model_state_bytes(
                parameters.size, mesh.size, 3, parameter_bytes=4, gradient_bytes=4, state_bytes=8
            )
            largest = 4 * model.transformer.wte.weight.numel()
            peak_by_formula = kept + root + units[-1] + max(root, units[-1]) + largest
            print(
                f"{parameters.size} parameters of {4 * parameters.size / MIB:.0f} MiB on {mesh.size} ranks; by the "
                f"formula at most {peak_by_formula / MIB:.0f} MiB on a rank, of which {kept / MIB:.0f} are always kept"
            )


if __name__ == "__main__":
    main()
