"""Parts of gpu.py: memory of ranks, bandwidths of kernels, a checkpoint, and inverse problems."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
from gpu_machine import Setting, median_ratio, model_sizes, timed

STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def peak_of_pool(module: Any) -> Any:
    """A hook of CuPy's memory pool that notes the most bytes in use at once, in ``most``."""
    pool = module.get_default_memory_pool()

    class Peak(module.cuda.MemoryHook):  # type: ignore[misc]
        name = "peak"
        most = 0

        def malloc_postprocess(self, **given: Any) -> None:
            self.most = max(self.most, pool.used_bytes())

    return Peak()


def child_memory(setting: Setting, kind: str) -> dict[str, Any] | None:
    """Bytes of each rank after and at the peak of steps of the GPT with one sequence a rank."""
    import ml_dtypes
    import numpy as np

    import mpishard

    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    sizes = setting.gpt
    length = min(sizes["context"], 256)
    on_gpu = setting.module == "cupy"
    hook = peak_of_pool(module) if on_gpu else None
    if hook is not None:
        hook.__enter__()
    options = {"tied": True, "compute_dtype": ml_dtypes.bfloat16, "sharded_parameters": kind == "ZeRO-3"}
    model = mpishard.nn.GPT(**model_sizes(setting.gpt), mesh=mesh, module=module, **options)
    config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh)
    strategies = (mpishard.DDPOptimizer, mpishard.ZeRO1Optimizer, mpishard.ZeRO2Optimizer, mpishard.ZeRO3Optimizer)
    optimizer: Any = dict(zip(STRATEGIES, strategies, strict=True))[kind](mpishard.AdamW(lr=1e-4), config)
    tokens = np.random.default_rng(mesh.rank).integers(0, sizes["vocabulary"], (1, length + 1))
    for _ in range(3):
        loss = model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])
        optimizer.step(model.parameters, count=length * mesh.size)
    if hook is not None:
        hook.__exit__(None, None, None)
        pool = module.get_default_memory_pool()
        own = {"used": int(pool.used_bytes()), "peak": int(hook.most), "held": int(pool.total_bytes())}
    else:
        own = {"used": 0, "peak": children.peak_bytes(), "held": 0}
    every = mesh.world.allgather_object(own)
    found = {name: max(each[name] for each in every) for name in own}
    return {**found, "loss": float(loss) / length, "ranks": mesh.size} if mesh.rank == 0 else None


def child_bandwidth(setting: Setting) -> dict[str, Any]:
    """Bytes a second that each kernel moves at the least, and the ratio to a copy in the same turn.

    Each call is that of a step of the GPT with products in bfloat16: what only products take is stored in it.
    """
    import ml_dtypes
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays
    from mpishard.data_parallel.update import Factors, apply_rule
    from mpishard.nn.layers import operations
    from mpishard.nn.products import make_matmul, rounded_dtype

    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    rows, width, vocabulary, heads, length, size = 131072, 768, 50257, 96, 1024, 2**27
    if setting.small:
        rows, width, vocabulary, heads, length, size = 32, 24, 101, 3, 16, 4096
    real = np.dtype(np.float32)
    half = rounded_dtype(make_matmul(module, ml_dtypes.bfloat16)) or real

    def filled(*shape: int) -> Any:
        array = module.empty(shape, real)
        array.fill(0.5)
        return array

    source, target = filled(size), filled(size)
    ops = operations(source)
    # An optimizer with the tensors of the GPT updates them as in training: all ranges in one launch.
    model = mpishard.nn.GPT(
        **model_sizes(setting.gpt),
        mesh=mesh,
        module=module,
        tied=True,
        compute_dtype=ml_dtypes.bfloat16,
    )
    rule = mpishard.AdamW(lr=1e-3)
    optimizer = mpishard.DDPOptimizer(rule, mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh))
    optimizer.bind(model.parameters)
    model.parameters.gradients.flat.fill(1e-3)
    parameters = model.parameters.flat.nbytes
    on_rank = optimizer.state.on_rank

    x, dy, dx = (filled(rows, width) for _ in range(3))
    weight, bias = filled(width), filled(width)
    mean, scale = filled(rows), filled(rows)
    normed = module.empty((rows, width), half)
    scores, dscores = filled(heads, length, length), filled(heads, length, length)
    logsum, inner, scratch = filled(heads, length), filled(heads, length), filled(length)
    # Else products take the softmax as it is, in its place: on the host.
    on_device = arrays.is_device(source)
    rounded = [module.empty(scores.shape, half) for _ in range(2)] if on_device else []
    tokens = rows // 16
    logits, targets = filled(tokens, vocabulary), module.zeros(tokens, np.int64)
    of_norm, of_weights = (x, mean, scale, weight), (weight.copy(), bias.copy())
    stored = half.itemsize / real.itemsize if on_device else 1

    # The least bytes: AdamW reads 4 arrays and writes 3.  Of scores only the causal half is read, but all is written.
    works: dict[str, tuple[Callable[[], Any], float, int]] = {
        "device copy": (lambda: target.__setitem__(..., source), 2 * source.nbytes, 10),
        "AdamW": (lambda: apply_rule(rule, on_rank, 1, Factors(1.0, 1.0, 1.0)), 7 * parameters, 10),
        "layer norm": (
            lambda: ops.layer_norm(x, weight, bias, normed, mean, scale, 1e-5),
            x.nbytes + normed.nbytes,
            10,
        ),
        "layer norm, backward": (lambda: ops.layer_norm_backward(dy, *of_norm, dx, *of_weights), 4 * x.nbytes, 10),
        "causal softmax": (
            lambda: ops.causal_softmax(scores, logsum, scratch, 0, 0.125, *rounded[:1]),
            (0.5 + stored) * scores.nbytes,
            10,
        ),
        "causal softmax, backward": (
            lambda: ops.causal_softmax_backward(scores, dscores, logsum, inner, 0.125, *rounded),
            2 * (0.5 + stored) * scores.nbytes,
            10,
        ),
        "cross-entropy": (lambda: ops.cross_entropy(logits, targets), 2 * logits.nbytes, 2),
    }

    def rate_of(work: Callable[[], Any], nbytes: float, calls: int) -> Callable[[], float]:
        return lambda: nbytes / timed(source, work, calls)

    rates = children.in_turns({name: rate_of(*each) for name, each in works.items()}, setting.repeats)
    return {
        name: {
            "bytes_per_second": statistics.median(each),
            "to_copy": median_ratio(each, rates["device copy"]),
            "bytes": works[name][1],
        }
        for name, each in rates.items()
    }


def child_checkpoint(setting: Setting) -> dict[str, Any]:
    """How long an asynchronous save keeps a run, beside a copy of the same bytes to pinned memory."""
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    width, layers = (16, 2) if setting.small else (768, 12)
    specs = [mpishard.ParameterSpec(f"blocks.{index}.weight", (12 * width, width)) for index in range(layers)]
    parameters = mpishard.FlatParameters(specs, module=module)
    parameters.flat.fill(0.5)
    optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), mesh)
    optimizer.bind(parameters)
    state = optimizer.state.capture()
    held = [shard.array for shard in state.shards if arrays.is_array(shard.array)]
    pinned = [arrays.pinned_empty(array.shape, array.dtype, like=array) for array in held]
    for each in pinned:
        each.fill(0)
    folder = Path(tempfile.mkdtemp(dir=setting.output, prefix="checkpoint-"))
    like = parameters.flat

    def copy() -> None:
        for array, into in zip(held, pinned, strict=True):
            arrays.copy_to_host(array, into)

    try:
        with mpishard.Checkpoints(folder / "run", mesh, keep=1) as checkpoints:

            def save() -> float:
                seconds = timed(like, lambda: checkpoints.save(state, asynchronous=True))
                checkpoints.wait()
                return seconds

            def whole() -> float:
                return timed(like, lambda: checkpoints.save(state, asynchronous=False))

            works = {"save": save, "copy": lambda: timed(like, copy), "whole": whole}
            found = children.in_turns(works, setting.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    nbytes = int(np.sum([array.nbytes for array in held]))
    return {
        "bytes": nbytes,
        "seconds": {name: statistics.median(each) for name, each in found.items()},
        "stall_to_copy": median_ratio(found["save"], found["copy"]),
    }


def child_minimize(setting: Setting) -> dict[str, Any]:
    """Seconds an iteration of L-BFGS-B, with a history of 10, of the bounded problem of tao.py, by percentage."""
    import numpy as np
    from tao_problem import HISTORY, LOWER, UPPER, Rosenbrock, start, upper_bounds

    import mpishard

    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    pairs, iterations = (500, 4) if setting.small else (5_000_000, 20)
    seconds: dict[str, float] = {}
    for percent in UPPER:
        gradient, function = module.empty((pairs, 2)), Rosenbrock()
        began: list[float] = []

        def one_iteration(intermediate_result: Any, began: list[float] = began) -> None:
            began.append(time.perf_counter())

        def value_and_gradient(x: Any, function: Any = function, gradient: Any = gradient) -> tuple[float, Any]:
            return function(x.reshape(-1, 2), gradient), gradient.reshape(-1)

        found = mpishard.minimize(
            value_and_gradient,
            module.asarray(start(np.arange(pairs), percent).reshape(-1)),
            method="L-BFGS-B",
            bounds=(LOWER, upper_bounds(np.arange(pairs), percent).reshape(-1)),
            callback=one_iteration,
            options={"maxiter": iterations, "maxcor": HISTORY, "ftol": 0, "gtol": 0},
            mesh=mesh,
        )
        if found.nit != iterations:
            raise RuntimeError(f"L-BFGS-B ended after {found.nit} of {iterations} iterations: {found.message}")
        seconds[str(percent)] = float(np.median(np.diff(began)))
    return {"unknowns": 2 * pairs, "seconds": seconds}


INVERSE = ("partition", "posterior", "plan")


def child_inverse(setting: Setting, kind: str) -> dict[str, Any] | None:
    """How far results on the GPU are from the host's, in parts of the largest value; the two ranks share a field.

    partition: `minimize` over values of a `Partition`, by their numbers.  posterior: eigenvalues, deviations and a
    sample of `laplace`.  plan: losses of a module of PyTorch whose layers the ranks divide, beside the whole module.
    """
    import numpy as np

    import mpishard

    with mpishard.Mesh(tensor=2) as mesh:
        module = setting.use_device(mesh)
        if kind == "plan":
            pairs = [_plan_losses(setting, mesh)]
        else:
            work = {"partition": _of_partition, "posterior": _of_posterior}[kind]
            size = 400 if setting.small else 1_000_000 if kind == "partition" else 20_000
            pairs = list(zip(work(mesh, module, size), work(mesh, np, size), strict=True))
        apart = np.array([np.abs(one - other).max() / np.abs(other).max() for one, other in pairs])
        mesh.world.all_reduce(apart, op="max")
        return {"apart": float(apart.max())} if mesh.rank == 0 else None


def _of_partition(mesh: Any, module: Any, size: int) -> list[Any]:
    """The least of a quartic function in bounds."""
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    numbers = np.random.default_rng(0).permutation(size)[mesh.tensor.rank :: 2]
    start = mpishard.Partition(module.zeros(len(numbers), np.float64), mesh, ids=numbers)
    wanted, weight = (np.asarray(each, like=start.local) for each in (np.sin(numbers), 1.0 + numbers % 40))

    def function(x: Any) -> tuple[float, Any]:
        r = x - wanted
        return float((0.25 * weight * r * r * r * r).sum()), weight * r * r * r

    options = {"maxiter": 20, "ftol": 0.0, "gtol": 0.0}
    found = mpishard.minimize(
        function, start, mesh=mesh, reduction="sum", method="L-BFGS-B", bounds=(-0.5, 0.7), options=options
    )
    return [np.array([found.fun]), arrays.to_host(found.x).copy()]


def _of_posterior(mesh: Any, module: Any, size: int) -> list[Any]:
    """The posterior of a field of which 30 mean values are seen."""
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    numbers = np.arange(size)[mesh.tensor.rank * size // 2 : (mesh.tensor.rank + 1) * size // 2]
    start = mpishard.Partition(module.zeros(len(numbers), np.float64), mesh)
    rows = np.asarray(np.cos(np.outer(np.arange(1, 31), np.pi * (numbers + 0.5) / size)), like=start.local)

    def product(x: Any, direction: Any) -> Any:
        seen = arrays.to_host(rows @ direction).copy()
        mesh.tensor.all_reduce(seen)
        return rows.T @ np.asarray(seen, like=rows)

    prior = mpishard.DiagonalPrior(np.asarray(0.5 + numbers / size, like=start.local))
    found = mpishard.laplace(start, product, prior, rank=20, oversampling=5, mesh=mesh)
    vectors = [found.standard_deviation(), *found.samples(1, seed=4)]
    return [found.eigenvalues, *(arrays.to_host(each).copy() for each in vectors)]


def _plan_losses(setting: Setting, mesh: Any) -> tuple[Any, Any]:
    """Losses of steps of the transformer of the tests, divided by its plan; and of the whole one on the host."""
    import sys

    import numpy as np

    import mpishard

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
    import torch_plans

    place = "cuda" if setting.module == "cupy" else "cpu"
    whole = torch_plans.fresh()
    module = torch_plans.fresh().to(place)
    optimizer = mpishard.torch.as_distributed(module, mesh, torch_plans.RULE, plan=torch_plans.PLAN)
    theirs = torch_plans.adamw(whole)
    losses: list[list[float]] = [[], []]
    for step in range(4):
        words = torch_plans.words_of(step)
        for model, of_model, its in zip((module, whole), (optimizer, theirs), losses, strict=True):
            of_model.zero_grad()
            loss = torch_plans.loss_of(model, words.to(place) if model is module else words)
            loss.backward()
            of_model.step()
            its.append(loss.item())
    return np.array(losses[0]), np.array(losses[1])
