"""What heal.py measures, in PyTorch: a process of a DDP run that its elastic launcher starts again after a death.

    python -m torch.distributed.run --standalone --nproc-per-node 4 --max-restarts 3 \\
        benchmarks/heal_torch.py FOLDER STEP EVERY

Rank 2 is killed after step STEP of the first start; a checkpoint is written every EVERY steps.  Writes into FOLDER when
the kill was, when the first step after it was done ("again"), and when the first one was that had not been done before
("new").
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH = 64


def main() -> None:
    folder, killed_after, every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    start, rank, size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    first_start = start == 0
    # The launcher's store outlives a restart (PyTorch 2.13), and gloo would find the addresses of the dead in it.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(start), store), rank=rank, world_size=size)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < killed_after + 3:
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        dist.barrier()  # as in an elastic run of ours: none goes on before all have done the step
        step += 1
        if rank == 0 and step % every == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
        if first_start:
            if step == killed_after and rank == 2:
                (folder / "killed").write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 0:
            for name, reached in (("again", True), ("new", step > killed_after)):
                if reached and not (folder / name).exists():
                    (folder / name).write_text(repr(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
