"""Part of gpu.py: losses and gradients of models in half and single precision beside PyTorch's, and float64's."""

from __future__ import annotations

import functools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_machine import Setting, model_sizes

MODELS: dict[str, dict[str, Any]] = {"GPT": {}, "GPT, tied": {"tied": True}, "Llama": {}}
DTYPES = ("float32", "float16", "bfloat16")
TORCH = "torch"  # the kind of child that computes what the others compare with
# Of the loss in the backward pass: the first with which no gradient is infinite.
SCALES = {"float32": (1.0,), "float16": (1024.0, 64.0, 4.0, 1.0), "bfloat16": (1.0,)}
EPSILON = 1e-5  # of all norms
THETA = 1e4  # of rotary positions
CHANGE = 0.05  # the standard deviation of what is added to initial values, so that every tensor matters


def sizes_of(setting: Setting) -> dict[str, int]:
    """Of all models; heads have 64 channels, which cuDNN's attention takes."""
    if setting.small:
        return {"vocabulary": 101, "context": 16, "width": 24, "layers": 2, "heads": 3, "groups": 1, "sequences": 2}
    return {"vocabulary": 1000, "context": 256, "width": 256, "layers": 4, "heads": 4, "groups": 2, "sequences": 4}


def make_model(setting: Setting, name: str, **options: Any) -> Any:
    """A model of mpishard."""
    import mpishard

    sizes = sizes_of(setting)
    options |= MODELS[name]
    if name == "Llama":
        options |= {"key_value_heads": sizes["groups"], "epsilon": EPSILON}
    return getattr(mpishard.nn, name.split(",")[0])(**model_sizes(sizes), **options)


def child(setting: Setting, kind: str) -> dict[str, Any]:
    """By a kind "model/torch" errors of PyTorch in all dtypes; later by "model/dtype" those of mpishard in one."""
    name, _, dtype = kind.partition("/")
    return child_torch(setting, name) if dtype == TORCH else child_mpishard(setting, name, dtype)


def file_of(setting: Setting, name: str) -> Path:
    """What the child of PyTorch leaves for those of mpishard: weights, tokens, and gradients in float64."""
    return Path(setting.output) / f"{name}.npz"


def child_mpishard(setting: Setting, name: str, dtype: str) -> dict[str, Any]:
    """Errors of the loss and of gradients of mpishard."""
    import ml_dtypes
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    warned = noted_warnings()
    half = {"float32": None, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    mesh = mpishard.Mesh()
    model = make_model(setting, name, mesh=mesh, module=setting.use_device(mesh), compute_dtype=half)
    parameters = model.parameters
    with np.load(file_of(setting, name)) as file:
        given = dict(file)
    for each in parameters:
        parameters.assign(each, np.asarray(given[f"weight {each}"], like=parameters.flat))
    tokens, targets = given["tokens"], given["targets"]
    alone = float(model.loss(tokens, targets))
    calls = counted_calls_of_cudnn()

    def run(scale: float) -> tuple[float, dict[str, Any]]:
        parameters.reset_gradients()
        parameters.loss_scale = scale
        loss = float(model.loss_and_gradient(tokens, targets))
        return loss, {each: arrays.to_host(parameters.gradient(each)[0]).copy() for each in parameters}

    most = float(given[f"scale {dtype}"])
    found = errors_of(run, [scale for scale in SCALES[dtype] if scale <= most], given)
    found["loss alone"] = relative(alone, float(given["loss"]))
    return found | {"attention": "cuDNN" if calls else "products", "warnings": list(dict.fromkeys(warned))}


def noted_warnings() -> list[str]:
    """A list that gets the text of each warning from now on, which is printed, too."""
    texts: list[str] = []

    def show(message: Warning | str, *given: Any) -> None:
        texts.append(str(message))
        print(message, file=sys.stderr)

    warnings.showwarning = show  # type: ignore[assignment]
    return texts


def counted_calls_of_cudnn() -> list[str]:
    """A list that gets longer with each forward pass of cuDNN's attention from now on."""
    from mpishard.nn.device_attention import CudnnAttention

    calls: list[str] = []
    forward = CudnnAttention.forward

    def counted(self: Any, *given: Any, **named: Any) -> None:
        calls.append("forward")
        forward(self, *given, **named)

    CudnnAttention.forward = counted  # type: ignore[method-assign]
    return calls


Run = Callable[[float], tuple[float, dict[str, Any]]]


def errors_of(run: Run, scales: Sequence[float], truth: dict[str, Any]) -> dict[str, Any]:
    """Of the loss, and of each gradient; at the first scale at which all are finite, else at the last."""
    import numpy as np

    for scale in scales:
        loss, gradients = run(scale)
        if all(np.isfinite(each).all() for each in gradients.values()):
            break
    tensors = {each: distance(g.astype(np.float64) / scale, truth[f"truth {each}"]) for each, g in gradients.items()}
    return {"loss": relative(loss, float(truth["loss"])), "scale": scale, "tensors": tensors}


def relative(found: float, expected: float) -> float:
    """The relative error of a number; infinite where one is not finite."""
    return abs(found - expected) / abs(expected) if math.isfinite(found) else math.inf


def distance(found: Any, expected: Any) -> float:
    """The norm of a difference in parts of the norm of what is expected; infinite where a number is not finite."""
    import numpy as np

    of_difference, whole = (float(np.linalg.norm(each)) for each in (found - expected, expected))
    return of_difference / (whole or 1.0) if math.isfinite(of_difference) else math.inf


def joined(ours: dict[str, Any], theirs: dict[str, Any] | None) -> dict[str, Any]:
    """A case: errors of both, the largest and the median over tensors, and where ours is worst beside theirs."""
    found: dict[str, Any] = {key: ours[key] for key in ("attention", "warnings")}
    for who, each in (("ours", ours), ("theirs", theirs)):
        if each is not None:
            errors = each["tensors"].values()
            found[who] = {key: value for key, value in each.items() if key not in found}
            found[who] |= {"largest": max(errors), "median": statistics.median(errors)}
    if theirs is not None:
        found["ratios"] = {name: ratio(error, theirs["tensors"][name]) for name, error in ours["tensors"].items()}
        found["worst"] = max(found["ratios"], key=found["ratios"].__getitem__)
        found["ratio"] = found["ratios"][found["worst"]]
    return found


def ratio(one: float, other: float) -> float:
    """Of two errors; infinite if ours alone is, or theirs alone is none."""
    if one == other:
        return 1.0
    if not math.isfinite(other):
        return 0.0
    return one / other if other else math.inf


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def child_torch(setting: Setting, name: str) -> dict[str, Any]:
    """The truth in float64, which goes to a file with weights and tokens, and errors by dtype."""
    import numpy as np
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if setting.module == "cupy" else "cpu"
    sizes = sizes_of(setting)
    random = np.random.default_rng(0)
    parameters = make_model(setting, name).parameters
    weights = {each: parameters[each] + CHANGE * normal(random, parameters[each].shape) for each in parameters}
    pair = random.integers(0, sizes["vocabulary"], (2, sizes["sequences"], sizes["context"]))
    tokens, targets = (torch.from_numpy(each).to(device) for each in pair)
    loss_of = torch_llama if name == "Llama" else torch_gpt

    def run(dtype: str, scale: float) -> tuple[float, dict[str, Any]]:
        real = torch.float64 if dtype == "float64" else torch.float32
        tensors: dict[str, Any] = {
            n: torch.tensor(w, dtype=real, device=device, requires_grad=True) for n, w in weights.items()
        }
        half = dtype in ("float16", "bfloat16")
        with torch.autocast(device, getattr(torch, dtype) if half else None, enabled=half):
            loss = loss_of(tensors, sizes, tokens, targets)
        (loss * scale).backward()
        return float(loss.detach()), {n: tensor.grad.cpu().numpy() for n, tensor in tensors.items()}

    loss, gradients = run("float64", 1.0)
    kept: dict[str, Any] = {"loss": np.float64(loss), "tokens": pair[0], "targets": pair[1]}
    kept |= {f"weight {each}": weight for each, weight in weights.items()}
    kept |= {f"truth {each}": gradient for each, gradient in gradients.items()}
    found: dict[str, Any] = {"loss of a token": loss / tokens.numel(), "dtypes": {}, "failures": {}}
    for dtype in DTYPES:
        kept[f"scale {dtype}"] = np.float64(SCALES[dtype][0])
        try:
            each = errors_of(functools.partial(run, dtype), SCALES[dtype], kept)
        except Exception as error:  # any of PyTorch's own
            found["failures"][dtype] = f"{type(error).__name__}: {error}"
            continue
        found["dtypes"][dtype] = each
        kept[f"scale {dtype}"] = np.float64(each["scale"])
    np.savez(file_of(setting, name), **kept)
    return found


def normal(random: Any, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers in float32."""
    import numpy as np

    return random.standard_normal(shape, np.float32)


def torch_gpt(tensors: dict[str, Any], sizes: dict[str, int], tokens: Any, targets: Any) -> Any:
    """The summed loss of the GPT by PyTorch's functions."""
    from torch.nn import functional

    width, heads = sizes["width"], sizes["heads"]

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (width,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], EPSILON)

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, tensors[f"{name}.weight"].T, tensors[f"{name}.bias"])

    size, length = tokens.shape
    x = functional.embedding(tokens, tensors["token_embedding.weight"]) + tensors["position_embedding.weight"][:length]
    for name in blocks(sizes):
        qkv = linear(norm(x, f"{name}.attention_norm"), f"{name}.attention.qkv")
        q, k, v = qkv.view(size, length, heads, 3, width // heads).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(size, length, width), f"{name}.attention.output")
        hidden = functional.gelu(linear(norm(x, f"{name}.mlp_norm"), f"{name}.mlp.expand"), approximate="tanh")
        x = x + linear(hidden, f"{name}.mlp.contract")
    return torch_head(tensors, norm(x, "final_norm"), targets)


def torch_llama(tensors: dict[str, Any], sizes: dict[str, int], tokens: Any, targets: Any) -> Any:
    """The summed loss of the Llama by PyTorch's functions: norms and rotary positions in the dtype of the weights."""
    import torch
    from torch.nn import functional

    width, heads, groups = sizes["width"], sizes["heads"], sizes["groups"]
    channels, kinds = width // heads, heads // groups + 2

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * tensors[f"{name}.weight"]

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, tensors[f"{name}.weight"].T)

    size, length = tokens.shape
    x = functional.embedding(tokens, tensors["token_embedding.weight"])
    frequencies = THETA ** (-torch.arange(0, channels, 2, dtype=x.dtype, device=x.device) / channels)
    angles = torch.arange(length, dtype=x.dtype, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()

    def turned(heads_of: Any) -> Any:
        one, other = heads_of.to(x.dtype).chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    for name in blocks(sizes):
        qkv = linear(norm(x, f"{name}.attention_norm"), f"{name}.attention.qkv")
        by_group = qkv.view(size, length, groups, kinds, channels).permute(0, 2, 3, 1, 4)
        q = turned(by_group[:, :, :-2]).flatten(1, 2)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (turned(by_group[:, :, -2]), by_group[:, :, -1]))
        mixed = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(size, length, width), f"{name}.attention.output")
        normed = norm(x, f"{name}.mlp_norm")
        hidden = functional.silu(linear(normed, f"{name}.mlp.gate")) * linear(normed, f"{name}.mlp.up")
        x = x + linear(hidden, f"{name}.mlp.down")
    return torch_head(tensors, norm(x, "final_norm"), targets)


def blocks(sizes: dict[str, int]) -> Iterator[str]:
    """Names of the blocks."""
    return (f"blocks.{block}" for block in range(sizes["layers"]))


def torch_head(tensors: dict[str, Any], x: Any, targets: Any) -> Any:
    """The summed loss by the rows of the final norm, of logits that are no less than float32."""
    from torch.nn import functional

    table = tensors["head.weight"].T if "head.weight" in tensors else tensors["token_embedding.weight"]
    logits = functional.linear(x, table).flatten(0, 1)
    return functional.cross_entropy(logits.to(table.dtype), targets.flatten(), reduction="sum")
