"""mpirun -n 3 python examples/lora.py [--zero 1] [--seed 0]

LoRA over MPI ranks: adapters of peft in a GPT-2 of transformers, trained by the loop of a Trainer, with accumulation,
clipping, a schedule of transformers and evaluation.  The model is made from a config, with random weights, so that
nothing is downloaded; the text is the source of Python's standard library.  Next to it the same loop without mpishard,
on one rank with the whole batch.  Needs torch, transformers and peft.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import mpishard.torch
from mpishard.data.text import standard_library_text

CONTEXT, BATCH, ACCUMULATE, LR = 32, 24, 2, 2e-2  # BATCH sequences of all ranks in each of ACCUMULATE backward passes

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2), help="what ranks divide (default 1)")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", type=Path, help="folder for the adapters, as peft saves them")
options = parser.parse_args()


def made() -> Any:
    """The model with adapters, the same bits on every rank.  Dropout is off, so that both loops compute the same."""
    torch.manual_seed(options.seed)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, **off, **ends)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def trained(
    model: Any, optimizer: Any, loader: Any, held_out: torch.Tensor, mean_over_ranks: Callable[[float], float]
) -> list[float]:
    """The loop.  Returns the loss of each step, and last that of the held-out sequences."""
    steps = options.epochs * (len(loader) // ACCUMULATE)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=steps)
    clip = getattr(optimizer, "clip_grad_norm_", lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
    history = []
    for epoch in range(options.epochs):
        loader.sampler.set_epoch(epoch)
        losses: list[float] = []
        for (tokens,) in loader:
            sends = len(losses) == ACCUMULATE - 1 or not hasattr(optimizer, "no_sync")
            with contextlib.nullcontext() if sends else optimizer.no_sync():
                loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATE
                loss.backward()
            losses.append(loss.item())
            if len(losses) == ACCUMULATE:
                clip(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                history.append(mean_over_ranks(sum(losses)))
                losses.clear()
    with torch.no_grad():
        return [*history, model(input_ids=held_out, labels=held_out).loss.item()]


with mpishard.Mesh() as mesh:
    if BATCH % mesh.data.size:
        sys.exit(f"{mesh.data.size} ranks do not divide a batch of {BATCH}: take 1, 2, 3, 4, 6 or 8")
    text = torch.tensor(standard_library_text(600 * CONTEXT)[: 600 * CONTEXT], dtype=torch.long).view(-1, CONTEXT)
    data, held_out = TensorDataset(text[:480]), text[480:]

    # The lines that make it distributed.
    model = made()
    optimizer = mpishard.torch.as_distributed(model, mesh, mpishard.AdamW(lr=LR), zero=options.zero)
    sampler: Any = DistributedSampler(data, mesh.data.size, mesh.data.rank, seed=options.seed)
    loader = DataLoader(data, BATCH // mesh.data.size, sampler=sampler)

    def mean_over_ranks(loss: float) -> float:
        return mesh.world.all_reduce(np.array([loss]))[0] / mesh.size

    history = np.array(trained(model, optimizer, loader, held_out, mean_over_ranks))
    passed = False
    if mesh.rank == 0:
        if options.output:
            model.save_pretrained(options.output)
        alone = made()
        adamw = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=LR)
        sampler = DistributedSampler(data, 1, 0, seed=options.seed)
        expected = trained(alone, adamw, DataLoader(data, BATCH, sampler=sampler), held_out, float)
        worst = float(np.max(np.abs(history / expected - 1)))
        passed = worst < 1e-5 and history[-2] < history[0]
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print(f"{count} parameters of adapters, zero={options.zero}, {mesh.size} ranks", end=": ")
        print(f"{len(history) - 1} steps, loss {history[0]:.4f} -> {history[-2]:.4f}")
        print(f"held-out loss {history[-1]:.6f}; PyTorch and peft alone {expected[-1]:.6f}")
        print(f"{'PASS' if passed else 'FAIL'}: losses differ by at most {worst:.1e} of them; wanted: below 1e-5")
    passed = mesh.world.allgather_object(passed)[0]
sys.exit(0 if passed else 1)
