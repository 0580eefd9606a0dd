"""What slow_link.py measures, in PyTorch: one rank of a DDP run over gloo, with its communication hooks.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=h1 MASTER_PORT=29500 python benchmarks/slow_link_torch.py KIND FOLDER STEPS TARGET

The samples of each step are in FOLDER; the ranks' losses, which DDP does not need, are averaged every few steps.  Rank
0 prints the result as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from slow_link import BETAS, CLIP, CONTEXT, HEADS, LAYERS, LEARNING_RATE, VOCABULARY, WARM_UP, WIDTH, Record
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch_gpt import GPT

REDUCE_EVERY = 10  # steps
INITIAL = 0.02  # standard deviation


def gpt() -> GPT:
    """With initial values of the distribution of those of `mpishard.nn.GPT`."""
    made = GPT(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS)
    for name, values in made.named_parameters():
        if values.ndim == 2:
            residual = name.endswith(("output.weight", "contract.weight"))
            nn.init.normal_(values, std=INITIAL / (2 * LAYERS) ** 0.5 if residual else INITIAL)
        elif name.endswith("bias"):
            nn.init.zeros_(values)
    return made


def main() -> None:
    kind, folder, steps, target = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = np.load(Path(folder, "batches.npy"))
    own = torch.from_numpy(np.array_split(samples, ranks, axis=1)[rank].astype(np.int64))
    # A limit that is given holds for the first bucket too, so that there is one.  Of two, the hook for PowerSGD starts
    # the sums as they come, in another order on each rank, and gloo hangs or fails (PyTorch 2.13).
    limits = {"bucket_cap_mb": 25} if kind == "torch-power-sgd" else {}
    model = nn.parallel.DistributedDataParallel(gpt(), gradient_as_bucket_view=True, **limits)
    if kind == "torch-float16":
        model.register_comm_hook(None, fp16_compress_hook)
    if kind == "torch-power-sgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARM_UP))
    record = Record(target)
    dist.barrier()
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        logits = model(own[step, :, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), own[step, :, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        record.note(float(loss.detach()))
        if (step + 1) % REDUCE_EVERY == 0:
            losses = torch.tensor(record.losses[-REDUCE_EVERY:])
            dist.all_reduce(losses)
            record.losses[-REDUCE_EVERY:] = (losses / ranks).tolist()
            if any(record.is_reached(step + 1 - earlier) for earlier in range(REDUCE_EVERY)):
                break
    if rank == 0:
        blas = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
        print(json.dumps(record.result() | {"blas": blas}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
