"""Training steps of a small GPT: `mpishard` against PyTorch DistributedDataParallel, tokens a second.

    python benchmarks/gpt_step.py [--steps N] [--repeats R]

4 layers, width 256, 8 heads, sequence 256, batch 8 a rank, vocabulary 256, float32, AdamW; 2 ranks of one thread each.
Both run in turns, so that a machine that slows down slows both; the figure that counts is the median of the ratios.
OpenBLAS chooses its kernels by itself: OPENBLAS_CORETYPE is taken out of the environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 2
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 256, 256, 256, 4, 8, 8
LEARNING_RATE = 1e-3
WARM_UP = 3
# Seconds for one child: compiling kernels on a cold cache is the slowest part.
TIME_LIMIT = 300
KINDS = {
    "ours": "mpishard, float32",
    "torch": "PyTorch DDP (gloo), float32",
    "torch-bfloat16": "PyTorch DDP (gloo), bfloat16 autocast",
}


def batches(rank: int, count: int) -> Any:
    """Tokens and targets, (count, BATCH, CONTEXT): text-like enough to be learned, of a rank's own."""
    import numpy as np

    random = np.random.default_rng(rank)
    words = random.integers(0, VOCABULARY, (64, 8))
    text = words[random.integers(0, 64, (count, BATCH, CONTEXT // 8 + 1))].reshape(count, BATCH, -1)
    return text[..., :CONTEXT].copy(), text[..., 1 : CONTEXT + 1].copy()


def timed(step: Callable[[int], float], barrier: Callable[[], Any], steps: int) -> dict[str, float]:
    """Run `step` after a warm-up; all ranks start together, and the time is that of the slowest."""
    for index in range(WARM_UP):
        step(index)
    barrier()
    start = time.perf_counter()
    for index in range(WARM_UP, WARM_UP + steps):
        loss = step(index)
    barrier()
    return {"seconds": time.perf_counter() - start, "loss": loss}


def run_ours(steps: int) -> dict[str, Any] | None:
    import threadpoolctl

    import mpishard

    mesh = mpishard.Mesh()
    model = mpishard.nn.GPT(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS)
    config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    optimizer = mpishard.DDPOptimizer(mpishard.AdamW(lr=LEARNING_RATE), config)
    tokens, targets = batches(mesh.data.rank, WARM_UP + steps)

    def step(index: int) -> float:
        loss = model.loss_and_gradient(tokens[index], targets[index])
        optimizer.step(model.parameters, count=mesh.data.size * BATCH * CONTEXT)
        return loss / (BATCH * CONTEXT)

    result: dict[str, Any] = timed(step, mesh.data.barrier, steps)
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy, where it is there, brings an OpenBLAS of its own.
    result["blas"] = "; ".join(
        sorted({f"{b['internal_api']} {b['architecture']}, {b['num_threads']} thread(s)" for b in pools})
    )
    return result if mesh.data.rank == 0 else None


def run_torch(steps: int, autocast: bool) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.contract(functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            return self.head(self.norm(self.blocks(x)))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=RANKS)
    model = nn.parallel.DistributedDataParallel(GPT(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens, targets = map(torch.from_numpy, batches(rank, WARM_UP + steps))

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens[index])
            loss = functional.cross_entropy(logits.flatten(0, 1), targets[index].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    result: dict[str, Any] = timed(step, dist.barrier, steps)
    result["blas"] = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    dist.destroy_process_group()
    return result if rank == 0 else None


def child(kind: str, steps: int) -> None:
    """One rank; rank 0 prints its result as a line of JSON."""
    result = run_ours(steps) if kind == "ours" else run_torch(steps, kind == "torch-bfloat16")
    if result is not None:
        print(json.dumps(result), flush=True)


def launch(kind: str, steps: int) -> dict[str, Any]:
    """Run all ranks of one kind; returns what rank 0 printed, and tokens a second of all ranks."""
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = "1"
    # Open MPI as root, or with fewer cores than ranks; other MPI libraries do not read these.
    environment |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = [sys.executable, __file__, "--child", kind, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        if kind == "ours":
            near = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            mpirun = shutil.which("mpirun", path=near)
            if mpirun is None:
                sys.exit("no mpirun beside this Python nor on PATH; install an MPI, e.g. pip install mpich")
            commands = [([mpirun, "-n", str(RANKS), *command], environment)]
        else:
            environment["RENDEZVOUS"] = f"file://{folder}/rendezvous"
            commands = [(command, environment | {"RANK": str(rank)}) for rank in range(RANKS)]
        # Output goes to files: a full pipe would stop a rank that nobody reads.
        logs = [open(Path(folder, f"log{i}"), "w+") for i in range(len(commands))]
        processes = [
            subprocess.Popen(words, env=environ, stdout=log, stderr=subprocess.STDOUT)
            for (words, environ), log in zip(commands, logs, strict=True)
        ]
        end = time.monotonic() + TIME_LIMIT
        try:
            codes = [process.wait(max(1, end - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            sys.exit(f"{KINDS[kind]}: not done within {TIME_LIMIT} s")
        finally:
            for process in processes:
                process.kill()
                process.wait()
            texts = []
            for log in logs:
                log.seek(0)
                texts.append(log.read())
                log.close()
    lines = [line for text in texts for line in text.splitlines() if line.startswith('{"seconds"')]
    if any(codes) or not lines:
        sys.exit(f"{KINDS[kind]} failed with {codes}:\n" + "\n".join(texts))
    result: dict[str, Any] = json.loads(lines[0])
    result["rate"] = RANKS * BATCH * CONTEXT * steps / result["seconds"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a run (default 20)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--no-bfloat16", action="store_true", help="leave PyTorch under bfloat16 autocast out")
    parser.add_argument("--child", choices=list(KINDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    if arguments.child:
        child(arguments.child, arguments.steps)
        return
    if importlib.util.find_spec("torch") is None:
        sys.exit("this benchmark compares with PyTorch, which is not installed: pip install torch==2.13.0")
    kinds = [kind for kind in KINDS if kind != "torch-bfloat16" or not arguments.no_bfloat16]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    launch("ours", 1)  # fills the cache of compiled kernels
    for repeat in range(arguments.repeats):
        for kind in kinds:
            result = launch(kind, arguments.steps)
            rates[kind].append(result["rate"])
            if repeat == 0:
                print(f"{KINDS[kind]}: {result['blas']}; loss {result['loss']:.3f} after {arguments.steps} steps")
        print(f"repeat {repeat + 1}: " + ", ".join(f"{kind} {rates[kind][-1]:,.0f}" for kind in kinds) + " tokens/s")
    print(f"median over {arguments.repeats} repeats, {RANKS} ranks of one thread:")
    for kind in kinds:
        print(f"  {KINDS[kind]:40s}{statistics.median(rates[kind]):12,.0f} tokens/s")
    for kind in kinds[1:]:
        ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates[kind], strict=True)]
        low, high = min(ratios), max(ratios)
        print(f"ratio to {KINDS[kind]}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
