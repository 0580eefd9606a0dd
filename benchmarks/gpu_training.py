"""Part of gpu.py: steps of one GPT with mpishard, with PyTorch, and with torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import children
from gpu_machine import Setting, model_sizes

KINDS = {
    "mpishard": "mpishard",
    "torch": "PyTorch, eager",
    "torch-compile": "PyTorch, torch.compile",
}
WARM_UP = 5
LEARNING_RATE = 3e-4
EPSILON = 1e-8


def parameters_of(sizes: dict[str, int]) -> int:
    """How many parameters the GPT has: biases, learned positions, and a head tied to the embedding."""
    width, layers = sizes["width"], sizes["layers"]
    block = 12 * width**2 + 13 * width
    return (sizes["vocabulary"] + sizes["context"]) * width + layers * block + 2 * width


def flops_of_token(sizes: dict[str, int]) -> float:
    """Of a training step: ``6 N + 12 layers context width`` (Chowdhery et al. 2022, appendix B)."""
    return 6 * parameters_of(sizes) + 12 * sizes["layers"] * sizes["context"] * sizes["width"]


def steps_of(setting: Setting) -> int:
    return 2 if setting.small else 10 if setting.quick else 20


def batches(setting: Setting, count: int) -> Any:
    """Tokens and targets of the GPT, by step."""
    return children.batches(count, *(setting.gpt[name] for name in ("sequences", "context", "vocabulary")))


def child(setting: Setting, kind: str) -> dict[str, Any]:
    """Time steps of one kind in this process."""
    steps = steps_of(setting)
    make = mpishard_step if kind == "mpishard" else torch_step
    step, synchronize, memory, count = make(setting, kind)
    losses, times = [], []
    for index in range(WARM_UP + steps):
        synchronize()
        start = time.perf_counter()
        losses.append(step(index))
        synchronize()
        times.append(time.perf_counter() - start)
    return {
        "seconds": times[WARM_UP:],
        "first_steps": times[:WARM_UP],
        "losses": losses,
        "tokens": setting.gpt["sequences"] * setting.gpt["context"],
        "memory": memory(),
        "parameters": count,
    }


Step = tuple[Callable[[int], float], Callable[[], Any], Callable[[], int], int]


def mpishard_parts(setting: Setting, **options: Any) -> tuple[Any, Any]:
    """The GPT, and the optimizer that trains it on one rank; `options` of its configuration."""
    import ml_dtypes

    import mpishard

    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    of_model = {"tied": True, "compute_dtype": ml_dtypes.bfloat16}
    model = mpishard.nn.GPT(**model_sizes(setting.gpt), mesh=mesh, module=module, **of_model)
    config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh, **options)
    return model, mpishard.DDPOptimizer(mpishard.AdamW(lr=LEARNING_RATE, eps=EPSILON), config)


def mpishard_step(setting: Setting, kind: str = "mpishard") -> Step:
    """A step of mpishard on one rank, what waits for it, its memory, and the number of parameters."""
    import numpy as np

    from mpishard.backend import array as arrays

    model, optimizer = mpishard_parts(setting)
    tokens, targets = batches(setting, WARM_UP + steps_of(setting))

    def step(index: int) -> float:
        loss = model.loss_and_gradient(tokens[index], targets[index])
        optimizer.step(model.parameters, count=targets[index].size)
        return float(loss) / targets[index].size

    def memory() -> int:
        return int(setting.array_module().get_default_memory_pool().total_bytes()) if setting.module == "cupy" else 0

    size = sum(int(np.prod(spec.shape)) for spec in model.parameters.specs)
    return step, lambda: arrays.ready(model.parameters.flat), memory, size


def torch_step(setting: Setting, kind: str) -> Step:
    """The same of PyTorch: bfloat16 by autocast, fused AdamW, attention by scaled_dot_product_attention."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch_gpt import GPT

    class WithLoss(GPT):
        def forward(self, tokens: Any, targets: Any) -> Any:
            return functional.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())

    device = "cuda" if setting.module == "cupy" else "cpu"
    torch.manual_seed(0)
    model: Any = WithLoss(*(setting.gpt[name] for name in ("vocabulary", "context", "width", "layers", "heads")))
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
    model.head.weight = model.tokens.weight
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=True)
    size = sum(each.numel() for each in model.parameters())
    run = torch.compile(model) if kind == "torch-compile" else model
    given, wanted = (torch.from_numpy(each).to(device) for each in batches(setting, WARM_UP + steps_of(setting)))

    def step(index: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = run(given[index], wanted[index])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def memory() -> int:
        return int(torch.cuda.max_memory_reserved()) if device == "cuda" else 0

    return step, torch.cuda.synchronize if device == "cuda" else lambda: None, memory, size


def child_peak(setting: Setting) -> dict[str, Any]:
    """The rate that one large product in half precision reaches: flop/s, the best of several."""
    import numpy as np
    from gpu_machine import timed

    module = setting.array_module()
    n = 64 if setting.small else 8192
    out = module.empty((n, n), np.float16)
    # Equal numbers would take less power, which lets a GPU run faster than it can with those of a training.
    random = np.random.default_rng(0)
    given = [random.standard_normal((n, n), np.float32).astype(np.float16) for _ in range(2)]
    one, other = (np.asarray(each, like=out) for each in given)
    rates = []
    for _ in range(3 if setting.small else 20):
        rates.append(2 * n**3 / timed(out, lambda: module.matmul(one, other, out=out), 1 if setting.small else 5))
    return {"flops": max(rates), "size": n}
