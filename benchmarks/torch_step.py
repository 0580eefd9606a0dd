"""Steps of PyTorch modules: `mpishard.torch` against DistributedDataParallel and FSDP2, with the same module.

    python benchmarks/torch_step.py [conv] [transformer] [gpt2] [--kinds K ...] [--steps N] [--repeats R] [--small]

conv: a residual network with batch norm, 1.2 M parameters, 32 images of 3x32x32 a step.  transformer: the encoder of
torch.nn, 4 layers of width 256.  gpt2: that of `transformers`, random, 4 layers of width 256; needs transformers.
float32, AdamW (fused in PyTorch), 2 ranks of one thread.

The kinds take each step in turn, in the same processes, so that whatever else the machine does meets all of them.
A run's ratio is the median over its steps; of the ratios of all runs the median, the least and the largest are shown.

Each kind begins with the same parameters and sees the same samples, so that the largest difference of the losses of two
kinds is shown too: with --small --steps 197 --repeats 1 over 200 steps, of sizes that take a minute.  conv has SiLU and
transformer GELU: at the kink of a ReLU the last bit of an activation decides a gradient, and losses part.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import children

RANKS = 2
SEQUENCES, CONTEXT, WIDTH, LAYERS, HEADS, VOCABULARY = 16, 128, 256, 4, 8, 256
IMAGES, PIXELS, CLASSES = 32, 32, 10
LEARNING_RATE = 1e-3
WARM_UP = 3
TIME_LIMIT = 500
SMALL = {"SEQUENCES": 8, "CONTEXT": 16, "WIDTH": 32, "LAYERS": 2, "HEADS": 2, "IMAGES": 16, "PIXELS": 16}
MODELS = ("conv", "transformer", "gpt2")
KINDS = {
    "ddp": "mpishard.torch, zero=0",
    "no-overlap": "mpishard.torch, zero=0, without overlap",
    "zero1": "mpishard.torch, zero=1",
    "zero2": "mpishard.torch, zero=2",
    "zero3": "mpishard.torch, zero=3",
    "torch-ddp": "PyTorch DDP (gloo)",
    "torch-fsdp2": "PyTorch FSDP2 (gloo)",
}
DDP, FSDP2 = "torch-ddp", "torch-fsdp2"
PAIRS = [("ddp", DDP), ("no-overlap", DDP), ("zero1", DDP), ("zero2", FSDP2), ("zero3", FSDP2)]


def make(model: str) -> tuple[Any, list[Any]]:
    """The module, and the parts of it that FSDP2 and ``zero=3`` divide one by one."""
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    if model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        gpt = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **off))
        return gpt, list(gpt.transformer.h)
    if model == "transformer":
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        made = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, nn.Linear(WIDTH, VOCABULARY))
        return made, list(encoder.layers)

    class Block(nn.Module):
        def __init__(self, width: int, wider: int) -> None:
            super().__init__()
            self.way = nn.Sequential(
                nn.Conv2d(width, wider, 3, 2, 1, bias=False),
                nn.BatchNorm2d(wider),
                nn.SiLU(),
                nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
                nn.BatchNorm2d(wider),
            )
            self.short = nn.Conv2d(width, wider, 1, 2)

        def forward(self, x: Any) -> Any:
            return functional.silu(self.way(x) + self.short(x))

    blocks = [Block(3, 32), Block(32, 64), Block(64, 128), Block(128, 256)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES)), blocks


def batches(model: str, rank: int, count: int) -> Any:
    """Inputs and targets of this rank, by step."""
    import numpy as np
    import torch

    if model == "conv":
        draw = np.random.default_rng(0)
        targets = draw.integers(0, CLASSES, (count, IMAGES))
        means = draw.standard_normal((CLASSES, 3, PIXELS, PIXELS), np.float32)
        inputs = means[targets] + draw.standard_normal((count, IMAGES, 3, PIXELS, PIXELS), np.float32)
    else:
        inputs, targets = children.batches(count, SEQUENCES, CONTEXT, VOCABULARY)
    return [torch.from_numpy(np.ascontiguousarray(each[:, rank::RANKS])) for each in (inputs, targets)]


@contextlib.contextmanager
def process_group() -> Iterator[Any]:
    """The mesh of ranks of one thread, which are a process group of PyTorch, too."""
    import torch
    import torch.distributed as dist

    import mpishard

    torch.set_num_threads(1)
    mesh = mpishard.Mesh()
    with tempfile.TemporaryDirectory() as folder:
        at = mesh.world.allgather_object(f"file://{folder}/rendezvous")[0]
        dist.init_process_group("gloo", init_method=at, rank=mesh.rank, world_size=mesh.size)
        yield mesh
        dist.destroy_process_group()


def take_turns(mesh: Any, sides: Mapping[str, Callable[[int], float]], steps: int) -> dict[str, Any]:
    """Seconds and losses by kind: each takes its steps by their numbers, and returns the loss."""
    seconds: dict[str, list[float]] = {kind: [] for kind in sides}
    losses: dict[str, list[float]] = {kind: [] for kind in sides}
    order = random.Random(0)
    for index in range(WARM_UP + steps):
        # In another order each time: what a kind leaves in the caches is not always found by the same one.
        for kind in order.sample(list(sides), len(sides)):
            mesh.world.barrier()
            start = time.perf_counter()
            losses[kind].append(sides[kind](index))
            mesh.world.barrier()
            seconds[kind].append(time.perf_counter() - start)
    return {"seconds": {kind: each[WARM_UP:] for kind, each in seconds.items()}, "losses": losses}


def child(model: str, kinds: list[str], steps: int) -> None:
    """One rank: steps of all kinds in turn; rank 0 prints seconds and losses of each as a line of JSON."""
    with process_group() as mesh:
        data = batches(model, mesh.rank, WARM_UP + steps)
        found = take_turns(mesh, {kind: step_of(*make_side(kind, model, mesh), *data) for kind in kinds}, steps)
        if mesh.rank == 0:
            print(json.dumps(found))


def step_of(module: Any, optimizer: Any, inputs: Any, targets: Any) -> Callable[[int], float]:
    """A step with a batch by its number."""
    from torch.nn import functional

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = module(inputs[index])
        logits = getattr(logits, "logits", logits)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets[index].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def make_side(kind: str, model: str, mesh: Any) -> tuple[Any, Any]:
    """The module of a kind, and its optimizer."""
    import torch

    import mpishard

    module, parts = make(model)
    if kind == FSDP2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for part in (*parts, module):
            fully_shard(part, mesh=init_device_mesh("cpu", (RANKS,)))
    elif kind == DDP:
        module = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        overlap = kind != "no-overlap"
        # What a mesh alone stands for, but for the overlap, which this chooses.
        config = mpishard.ShardingConfiguration.create_for_high_bandwidth(
            mesh, overlap_communication=overlap, minimum_parameter_group_size=2**21
        )
        zero = {"zero1": 1, "zero2": 2, "zero3": 3}.get(kind, 0)
        units = {"shard_units": type(parts[0])} if zero == 3 else {}
        rule = mpishard.AdamW(lr=LEARNING_RATE)
        return module, mpishard.torch.as_distributed(module, config, rule, zero=zero, **units)
    return module, torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)


def show(
    runs: Sequence[Any], names: Mapping[str, str], pairs: Sequence[tuple[str, str]], other_models: Collection[str] = ()
) -> None:
    """Print seconds a step and ratios of what `take_turns` has returned in some runs, and differences of losses.

    By the names of the kinds that have run. Losses of kinds of `other_models` are not those of others.
    """
    losses = runs[0]["losses"]
    for kind, name in names.items():
        first, last = losses[kind][0], losses[kind][-1]
        each = 1e3 * statistics.median(second for run in runs for second in run["seconds"][kind])
        print(f"{name:55s} {each:8.1f} ms a step; loss {first:.4f} -> {last:.4f}")
    for ours, theirs in pairs:
        if ours not in names or theirs not in names:
            continue
        both = [zip(run["seconds"][ours], run["seconds"][theirs], strict=True) for run in runs]
        ratios = [statistics.median(other / one for one, other in each) for each in both]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        apart = max(abs(one - other) for one, other in zip(losses[ours], losses[theirs], strict=True))
        same = f"; losses of {len(losses[ours])} steps differ by at most {apart:.1e}" * (theirs not in other_models)
        print(f"{names[ours]} is {ratio} times as fast as {names[theirs]}{same}", flush=True)


def options_of(description: str | None, kinds: Sequence[str], repeats: int) -> argparse.ArgumentParser:
    """A parser with the options of a benchmark whose kinds take turns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(kinds), default=list(kinds), help="default all")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a kind in a run (default 40)")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"runs (default {repeats})")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def given_to(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given to a parser of `options_of`."""
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    return arguments


def main() -> None:
    parser = options_of(__doc__, list(KINDS), 5)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(MODELS)} (default all)")
    parser.add_argument("--small", action="store_true", help="smaller modules, to compare losses of many steps")
    arguments = given_to(parser)
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"no model {min(unknown)!r}; choose from {', '.join(MODELS)}")
    if arguments.small:
        globals().update(SMALL)
    if arguments.child:
        child(arguments.models[0], arguments.kinds, arguments.steps)
        return
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None and (package == "torch" or "gpt2" in arguments.models):
            sys.exit(f"this benchmark needs {package}, which is not installed")
    models = arguments.models or [m for m in MODELS if m != "gpt2" or importlib.util.find_spec("transformers")]
    for model in models:
        options = ["--kinds", *arguments.kinds, "--steps", str(arguments.steps), *["--small"] * arguments.small]
        command = [sys.executable, __file__, model, "--child", *options]
        runs = [children.run_on_ranks(model, command, RANKS, TIME_LIMIT) for _ in range(arguments.repeats)]
        show(runs, {kind: f"{model}: {KINDS[kind]}" for kind in arguments.kinds}, PAIRS)


if __name__ == "__main__":
    main()
