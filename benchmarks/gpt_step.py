"""Training steps of a small GPT, tokens a second: `mpishard` against PyTorch, and layouts against each other.

    python benchmarks/gpt_step.py [ddp] [zero3] [layouts] [llama] [--steps N] [--repeats R]

ddp: against PyTorch DistributedDataParallel, in float32 and in bfloat16.  zero3: ZeRO-3 against PyTorch FSDP2
(fully_shard).  layouts: tensor and pipeline parallelism on two ranks against data parallelism on two ranks, with the
same sequences a step.  llama: a Llama (4 heads of keys and values, 688 hidden channels) against that of `transformers`
under DistributedDataParallel.

4 layers, width 256, 8 heads, sequence 256, 16 sequences a step, vocabulary 256, float32, AdamW; 2 ranks of one thread
each.  All kinds run in turns, so that a machine that slows down slows all; the figure that counts is the median of the
ratios.  OpenBLAS chooses its kernels by itself: OPENBLAS_CORETYPE is taken out of the environment.

Of mpishard DDP the bound is shown too: the arithmetic of the products of a step, causal attention counted by half, at
the best rate that products of these shapes reached with the libraries of the run, on all ranks at once, right after
the steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import children

RANKS = 2
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 256, 256, 256, 4, 8
SIZES: Any = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS)
SEQUENCES = 16  # a step, over all ranks
KEY_VALUE_HEADS, HIDDEN = 4, 688  # of the Llama
LEARNING_RATE = 1e-3
WARM_UP = 3
# Seconds for one child: compiling kernels on a cold cache is the slowest part.
TIME_LIMIT = 300
KINDS = {
    "ddp": "mpishard DDP",
    "bfloat16": "mpishard DDP, compute_dtype=bfloat16",
    "zero3": "mpishard ZeRO-3",
    "tensor": "mpishard, tensor=2",
    "sequence": "mpishard, tensor=2, sequence-parallel",
    "pipeline": "mpishard, pipeline=2, 1F1B, 8 micro-batches",
    "llama": "mpishard DDP, Llama",
    "torch-ddp": "PyTorch DDP (gloo)",
    "torch-bfloat16": "PyTorch DDP (gloo), bfloat16 autocast",
    "torch-fsdp2": "PyTorch FSDP2 (gloo)",
    "torch-llama": "PyTorch DDP (gloo), Llama of transformers",
}
COMPARISONS = {
    "ddp": [("ddp", "torch-ddp"), ("ddp", "torch-bfloat16"), ("bfloat16", "torch-bfloat16")],
    "zero3": [("zero3", "torch-fsdp2")],
    "layouts": [("tensor", "ddp"), ("sequence", "ddp"), ("pipeline", "ddp")],
    "llama": [("llama", "torch-llama")],
}


def batches(rank: int, ranks: int, count: int) -> Any:
    """Tokens and targets of this data rank, by step."""
    return children.batches(count, SEQUENCES, CONTEXT, VOCABULARY, rank, ranks)


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


def bound_s(sequences: int, barrier: Callable[[], Any]) -> float:
    """Seconds of a rank's products in one step of the GPT, at the best rate of products of these shapes."""
    import numpy as np

    from mpishard.backend import gemm

    rows = sequences * CONTEXT
    linear = 2 * rows * (12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH)
    attention = 2 * LAYERS * rows * CONTEXT * WIDTH  # two products, by half
    rate = 0.0
    random = np.random.default_rng(0)
    for n, k, m in ((rows, WIDTH, 3 * WIDTH), (rows, WIDTH, 4 * WIDTH), (rows, 4 * WIDTH, WIDTH), (WIDTH, rows, WIDTH)):
        one, other = random.random((n, k), np.float32), random.random((k, m), np.float32)
        out = np.empty((n, m), np.float32)
        barrier()
        for _ in range(20):
            began = time.perf_counter()
            gemm.matmul(one, other, out)
            rate = max(rate, 2 * n * k * m / (time.perf_counter() - began))
    return 3 * (linear + attention) / rate


def run_ours(kind: str, steps: int) -> dict[str, Any] | None:
    import ml_dtypes
    import threadpoolctl

    import mpishard
    from mpishard.backend.gemm.choice import active

    sizes = {"tensor": {"tensor": 2}, "sequence": {"tensor": 2}, "pipeline": {"pipeline": 2}}.get(kind, {})
    mesh = mpishard.Mesh(**sizes)
    options: dict[str, Any] = {
        "pipeline": {"microbatches": 8},
        "sequence": {"sequence_parallel": True},
        "bfloat16": {"compute_dtype": ml_dtypes.bfloat16},
    }.get(kind, {})
    model: Any
    if kind == "llama":
        options = {"key_value_heads": KEY_VALUE_HEADS, "hidden": HIDDEN}
        model = mpishard.nn.Llama(**SIZES, mesh=mesh, **options)
    else:
        model = mpishard.nn.GPT(**SIZES, mesh=mesh, **options)
    config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    strategy = mpishard.ZeRO3Optimizer if kind == "zero3" else mpishard.DDPOptimizer
    optimizer = strategy(mpishard.AdamW(lr=LEARNING_RATE), config)
    tokens, targets = batches(mesh.data.rank, mesh.data.size, WARM_UP + steps)

    def step(index: int) -> float:
        loss = model.loss_and_gradient(tokens[index], targets[index])
        optimizer.step(model.parameters, count=SEQUENCES * CONTEXT)
        return loss / targets[index].size

    result: dict[str, Any] = timed(step, mesh.world.barrier, steps)
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy, where it is there, brings an OpenBLAS of its own.
    result["blas"] = "; ".join(
        sorted({f"{b['internal_api']} {b.get('architecture', '')}, {b['num_threads']} thread(s)" for b in pools})
    )
    result["blas"] += f"; products: {active()}"
    if kind == "ddp":
        result["bound"] = bound_s(SEQUENCES // mesh.data.size, mesh.world.barrier)
    total = sum(entry.seconds for entry in mesh.ledger.totals.values())
    result["communication"] = total / (WARM_UP + steps)
    return result if mesh.rank == 0 else None


def run_torch(kind: str, steps: int) -> dict[str, Any] | None:
    import torch
    import torch.distributed as dist
    from torch.nn import functional, parallel
    from torch_gpt import GPT

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=RANKS)
    model: Any = llama_of_transformers() if kind == "torch-llama" else GPT(VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS)
    if kind == "torch-fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device_mesh = init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
    else:
        model = parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    tokens, targets = map(torch.from_numpy, batches(rank, RANKS, WARM_UP + steps))

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "torch-bfloat16"):
            logits = model(tokens[index])
            logits = getattr(logits, "logits", logits)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets[index].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    result: dict[str, Any] = timed(step, dist.barrier, steps)
    result["blas"] = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    dist.destroy_process_group()
    return result if rank == 0 else None


def llama_of_transformers() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        intermediate_size=HIDDEN,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def child(kind: str, steps: int) -> None:
    """One rank; rank 0 prints its result as a line of JSON."""
    result = run_torch(kind, steps) if kind.startswith("torch") else run_ours(kind, steps)
    if result is not None:
        print(json.dumps(result), flush=True)


def launch(kind: str, steps: int) -> dict[str, Any]:
    """Run all ranks of one kind; returns what rank 0 printed, and tokens a second of all ranks."""
    command = [sys.executable, __file__, "--child", kind, "--steps", str(steps)]
    result = children.run_on_ranks(KINDS[kind], command, RANKS, TIME_LIMIT, torch=kind.startswith("torch"))
    result["rate"] = SEQUENCES * CONTEXT * steps / result["seconds"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "comparisons",
        nargs="*",
        metavar="comparison",
        help=f"of {', '.join(COMPARISONS)} (default all; llama only where transformers is)",
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a run (default 20)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--no-bfloat16", action="store_true", help="leave PyTorch under bfloat16 autocast out")
    parser.add_argument("--child", choices=list(KINDS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    if unknown := set(arguments.comparisons) - set(COMPARISONS):
        parser.error(f"no comparison {min(unknown)!r}; choose from {', '.join(COMPARISONS)}")
    if arguments.child:
        child(arguments.child, arguments.steps)
        return
    default = [name for name in COMPARISONS if name != "llama" or importlib.util.find_spec("transformers")]
    pairs = [pair for name in arguments.comparisons or default for pair in COMPARISONS[name]]
    if arguments.no_bfloat16:
        pairs = [pair for pair in pairs if "torch-bfloat16" not in pair]
    kinds = list(dict.fromkeys(kind for pair in pairs for kind in pair))
    if any(kind.startswith("torch") for kind in kinds) and importlib.util.find_spec("torch") is None:
        sys.exit("this benchmark compares with PyTorch, which is not installed: pip install torch==2.13.0")
    if "torch-llama" in kinds and importlib.util.find_spec("transformers") is None:
        sys.exit("llama compares with transformers, which is not installed: pip install 'mpishard[peers]'")
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    launch("ddp", 1)  # fills the cache of compiled kernels
    for repeat in range(arguments.repeats):
        for kind in kinds:
            result = launch(kind, arguments.steps)
            rates[kind].append(result["rate"])
            if repeat == 0:
                note = f"; loss {result['loss']:.3f} after {arguments.steps} steps"
                if "communication" in result:
                    note += f"; {1e3 * result['communication']:.0f} ms of a step inside communication calls (rank 0)"
                if "bound" in result:
                    step = result["seconds"] / arguments.steps
                    note += f"; a step {1e3 * step:.0f} ms, {step / result['bound']:.2f} of its bound"
                print(f"{KINDS[kind]}: {result['blas']}{note}")
        print(f"repeat {repeat + 1}: " + ", ".join(f"{kind} {rates[kind][-1]:,.0f}" for kind in kinds) + " tokens/s")
    print(f"median over {arguments.repeats} repeats, {RANKS} ranks of one thread:")
    for kind in kinds:
        print(f"  {KINDS[kind]:45s}{statistics.median(rates[kind]):12,.0f} tokens/s")
    for ours, theirs in pairs:
        ratios = [one / other for one, other in zip(rates[ours], rates[theirs], strict=True)]
        low, high = min(ratios), max(ratios)
        print(f"{KINDS[ours]} to {KINDS[theirs]}: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
