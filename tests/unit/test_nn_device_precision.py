"""`nn.GPT` on a device in float32, float16 and bfloat16: losses and gradients, tensor by tensor, against float64.

The same network in PyTorch says how exact each precision can be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import Device

from mpishard import nn
from mpishard.backend import array as arrays

# Vocabulary, context, width, layers, heads; sequences.  The larger one takes a GPU: it has the wide rows and the heads
# that kernels are made for.
SMALL, LARGE = ((97, 40, 64, 2, 4), 3), ((1001, 256, 256, 3, 4), 4)
EACH_SIZE = [
    pytest.param("standin", SMALL, id="standin-small"),
    pytest.param("cupy", SMALL, id="cupy-small", marks=pytest.mark.gpu),
    pytest.param("cupy", LARGE, id="cupy-large", marks=pytest.mark.gpu),
]
each_size = pytest.mark.parametrize(("device", "sizes"), EACH_SIZE, indirect=["device"])
# Half the distance of 1 to the next number, of the products' operands.
ROUNDING = {None: 2.0**-24, np.float16: 2.0**-11, ml_dtypes.bfloat16: 2.0**-8}
each_dtype = pytest.mark.parametrize("compute_dtype", ROUNDING, ids=["float32", "float16", "bfloat16"])
# Of rounding, what a tensor's gradient may be off by in the norm: some ten roundings on the way to it, which partly
# cancel, and in float32 sums of as many terms as a row is wide.
MOST = {None: 40.0, np.float16: 6.0, ml_dtypes.bfloat16: 6.0}

Gradients = dict[str, np.ndarray]


def batch(sizes: Any) -> tuple[np.ndarray, np.ndarray]:
    (vocabulary, context, *_), sequences = sizes
    random = np.random.default_rng(3)
    return random.integers(0, vocabulary, (sequences, context)), random.integers(0, vocabulary, (sequences, context))


def exact(sizes: Any) -> tuple[nn.GPT, float, Gradients]:
    """The network on the host in float64, with biases and gains that are not those of the start."""
    model = nn.GPT(*sizes[0], dtype=np.float64)
    noise = np.random.default_rng(4).standard_normal(model.parameters.size)
    # Numbers of float32, so that all have the same.
    model.parameters.flat[:] = (model.parameters.flat + 0.05 * noise).astype(np.float32)
    return model, *run(model, sizes)


def run(model: nn.GPT, sizes: Any) -> tuple[float, Gradients]:
    """The loss of a token, and gradients on the host by name."""
    tokens, targets = batch(sizes)
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(tokens, targets) / targets.size
    found = {name: arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters}
    return float(loss), {name: each.astype(np.float64) / targets.size for name, each in found.items()}


def on_device(device: Device, reference: nn.GPT, sizes: Any, compute_dtype: Any) -> tuple[float, Gradients]:
    model = nn.GPT(*sizes[0], module=device.module, compute_dtype=compute_dtype)
    arrays.copy_to_device(reference.parameters.flat.astype(np.float32), model.parameters.flat)
    return run(model, sizes)


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    """By tensor: the norm of the difference, over the norm of the tensor."""
    assert found.keys() == expected.keys()
    return {
        name: float(np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])) for name in expected
    }


@each_size
@each_dtype
def test_losses_and_gradients(device: Device, sizes: Any, compute_dtype: Any) -> None:
    reference, expected_loss, expected = exact(sizes)
    loss, gradients = on_device(device, reference, sizes, compute_dtype)
    most = MOST[compute_dtype] * ROUNDING[compute_dtype]
    assert loss == pytest.approx(expected_loss, rel=most)
    off = errors(gradients, expected)
    assert not {name: error for name, error in off.items() if not error < most}, (off, most)
    if compute_dtype is not None:  # and that it was asked for
        assert max(off.values()) > ROUNDING[compute_dtype] / 20


def with_torch(torch: Any, reference: nn.GPT, sizes: Any, half: Any, where: str) -> tuple[float, Gradients]:
    """Loss and gradients of the same network in PyTorch, in float32 or with autocast to `half`."""
    functional = torch.nn.functional
    (_, length, width, layers, heads), sequences = sizes
    values = {name: np.float32(reference.parameters[name]) for name in reference.parameters}
    p = {name: torch.from_numpy(each.copy()).to(where).requires_grad_() for name, each in values.items()}
    tokens, targets = (torch.from_numpy(each).to(where) for each in batch(sizes))

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, p[f"{name}.weight"].T, p[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (width,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    with torch.autocast(where, half or torch.bfloat16, enabled=half is not None):
        x = p["token_embedding.weight"][tokens] + p["position_embedding.weight"][:length]
        for block in (f"blocks.{index}" for index in range(layers)):
            qkv = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
            q, k, v = qkv.view(sequences, length, heads, 3, width // heads).permute(3, 0, 2, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(sequences, length, width)
            x = x + linear(mixed, f"{block}.attention.output")
            wide = functional.gelu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.expand"), approximate="tanh")
            x = x + linear(wide, f"{block}.mlp.contract")
        logits = functional.linear(norm(x, "final_norm"), p["head.weight"].T)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    return float(loss.detach()), {name: each.grad.cpu().numpy().astype(np.float64) for name, each in p.items()}


@each_size
@each_dtype
def test_as_exact_as_pytorch(device: Device, sizes: Any, compute_dtype: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    where = "cpu"
    if device.name == "cupy":
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch finds no GPU")
        where = "cuda"
    reference, expected_loss, expected = exact(sizes)
    half = {None: None, np.float16: torch.float16, ml_dtypes.bfloat16: torch.bfloat16}[compute_dtype]
    loss, gradients = on_device(device, reference, sizes, compute_dtype)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    try:
        their_loss, theirs = with_torch(torch, reference, sizes, half, where)
    finally:
        torch.set_float32_matmul_precision(precision)
    rounding = ROUNDING[compute_dtype]
    assert abs(loss - expected_loss) < 2 * abs(their_loss - expected_loss) + rounding * expected_loss
    ours, peers = errors(gradients, expected), errors(theirs, expected)
    typical = float(np.median(list(peers.values())))
    worse = {name: (ours[name], peers[name]) for name in ours if not ours[name] < 2 * max(peers[name], typical)}
    assert not worse, (worse, typical)


@pytest.mark.parametrize("model", ["GPT, tied", "Llama"])
def test_the_benchmark_beside_pytorch(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part `parity` of ``benchmarks/gpu.py``, on NumPy."""
    pytest.importorskip("torch", reason="compares with PyTorch, which is not installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_machine
    import gpu_parity

    setting = gpu_machine.Setting("numpy", small=True, output=str(tmp_path))
    theirs = gpu_parity.child(setting, f"{model}/{gpu_parity.TORCH}")
    for dtype, step in {"float32": 2.0**-23, "bfloat16": 2.0**-7}.items():
        found = gpu_parity.joined(gpu_parity.child(setting, f"{model}/{dtype}"), theirs["dtypes"][dtype])
        for who in ("ours", "theirs"):
            assert found[who]["loss"] < 8 * step and found[who]["largest"] < 8 * step
            assert len(found[who]["tensors"]) > 15
        assert 0 < found["ratio"] == found["ratios"][found["worst"]] < 8
