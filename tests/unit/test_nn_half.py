"""Products in half precision, and `nn.GPT` on a device in float32, float16 and bfloat16."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from devices import Device

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.backend import gemm
from mpishard.backend.gemm import choice, libraries
from mpishard.backend.gemm.libraries import Offer
from mpishard.nn.products import make_matmul, way_to_fast_products

# Products in half precision: against float64, in a run, and refused where they cannot be.

HALVES = [np.float16, ml_dtypes.bfloat16]
VOCABULARY, CONTEXT = 11, 100
SIZES = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=24, layers=2, heads=3)
CHECKING = pytest.mark.filterwarnings("ignore:compute_dtype=.* on NumPy arrays:UserWarning")


def epsilon(half):
    """Largest relative error of rounding to a dtype."""
    return float(ml_dtypes.finfo(half).eps) / 2


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "shapes", [((40, 30), (30, 20)), ((3, 40, 30), (3, 30, 20)), ((30,), (30, 20)), ((0, 3), (3, 4))]
)
def test_operands_are_rounded_and_sums_are_not(half, shapes):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    out = np.empty((a.astype(np.float64) @ b).shape, np.float32)
    assert make_matmul(np, half)(a, b, out=out) is out
    exact = a.astype(half).astype(np.float64) @ b.astype(half).astype(np.float64)
    bound = np.abs(a) @ np.abs(b)
    assert np.all(np.abs(out - exact) <= 1e-6 * bound)
    error = np.abs(out - a.astype(np.float64) @ b)
    assert np.all(error <= 2.1 * epsilon(half) * bound)
    assert out.size == 0 or error.max() > 0.01 * epsilon(half)


def test_sums_beyond_the_range_of_float16_are_finite_and_operands_beyond_it_are_not():
    matmul, out = make_matmul(np, np.float16), np.empty((1, 1), np.float32)
    matmul(np.full((1, 4), 3e4, np.float32), np.full((4, 1), 2.0, np.float32), out=out)
    assert out[0, 0] == 240000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matmul(np.full((1, 4), 1e5, np.float32), np.full((4, 1), 2.0, np.float32), out=out)
        assert out[0, 0] == np.inf
        matmul(np.full((1, 4), 1e5, np.float32), np.zeros((4, 1), np.float32), out=out)
        assert np.isnan(out[0, 0])


def test_without_a_dtype_it_is_the_plain_product():
    assert make_matmul(np) is gemm.matmul
    gpt = nn.GPT(**SIZES)
    assert all(layer.matmul is gemm.matmul for layer in (gpt.blocks[0].attention, gpt.blocks[0].mlp.expand))


@pytest.fixture(autouse=True)
def numpys_library():
    """The choice before a mesh is made."""
    before = choice.active()
    choice.activate(choice.Choice())
    yield
    choice.activate(before)


@pytest.fixture(params=["rounded", *(name for name in libraries.installed() if libraries.multiplies_bfloat16())])
def library(request, numpys_library):
    """What multiplies bfloat16."""
    if request.param != "rounded":
        choice.activate(choice.Choice.parse(request.param))
    return request.param


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("tied", [False, True])
@CHECKING
def test_loss_and_gradients_are_those_of_float64_within_the_precision(half, tied):
    random = np.random.default_rng(1)
    tokens, targets = random.integers(0, VOCABULARY, (2, 3, CONTEXT))
    results = []
    for dtype, compute_dtype in ((np.float64, None), (np.float32, half)):
        gpt = nn.GPT(**SIZES, dtype=dtype, tied=tied, compute_dtype=compute_dtype)
        gpt.parameters.flat[:] += (0.1 * np.random.default_rng(5).standard_normal(gpt.parameters.size)).astype(dtype)
        assert gpt.parameters.dtype == dtype
        loss = gpt.loss_and_gradient(tokens, targets)
        results.append((loss, gpt.parameters.gradients.flat))
    (loss, gradient), (half_loss, half_gradient) = results
    assert half_gradient.dtype == np.float32
    # Some tens of products follow each other; their errors are independent, and add up like a random walk.
    assert half_loss == pytest.approx(loss, rel=10 * epsilon(half))
    error = np.linalg.norm(half_gradient - gradient) / np.linalg.norm(gradient)
    assert 0.1 * epsilon(half) < error < 20 * epsilon(half)


@CHECKING
def test_the_scale_of_the_loss_saves_small_gradients():
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 50))
    exact = nn.GPT(**SIZES)
    small = 2.0**-20  # the weight of this batch in some larger loss: its gradients underflow in float16
    errors = []
    exact.loss_and_gradient(tokens, tokens)
    for scale in (1.0, 2.0**20):
        gpt = nn.GPT(**SIZES, compute_dtype=np.float16)
        gpt.parameters.loss_scale = scale * small
        gpt.loss_and_gradient(tokens, tokens)
        wanted, found = (each.parameters.gradient("blocks.0.attention.qkv.weight")[0] for each in (exact, gpt))
        errors.append(np.linalg.norm(found / (scale * small) - wanted) / np.linalg.norm(wanted))
    assert errors[0] > 0.5
    assert errors[1] < 2 * epsilon(np.float16)


@CHECKING
def test_predictions_take_halves_too():
    exact, gpt = nn.GPT(**SIZES), nn.GPT(**SIZES, compute_dtype=np.float16)
    tokens = np.arange(10).reshape(2, 5)
    difference = np.abs(gpt.logits(tokens) - exact.logits(tokens)).max()
    assert 0 < difference < 20 * epsilon(np.float16) * np.abs(exact.logits(tokens)).max()
    assert len(gpt.generate([1], 3)) == 4


def test_numpy_is_slow_and_says_so_once():
    with pytest.warns(UserWarning, match="slower than float32") as caught:
        gpt = nn.GPT(**SIZES, compute_dtype=np.float16)
        gpt.loss_and_gradient([[1, 2]], [[2, 3]])
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("half", "multiplies", "installed", "chosen", "way_out"),
    [
        ("bfloat16", False, [], "", "AVX512_BF16"),
        ("float16", True, ["onednn"], "", "compute_dtype='bfloat16'"),
        ("bfloat16", True, [], "", r"mpishard\[fast\]"),
        ("bfloat16", True, ["mkl"], "", r"mpishard\[fast\]"),  # which is slow on processors of others than Intel
        ("bfloat16", True, ["onednn"], "numpy", "MPISHARD_PRODUCTS=numpy .* bfloat16=onednn"),
        ("bfloat16", True, ["onednn"], "", "mesh="),
    ],
)
def test_slow_products_come_with_what_is_fast_on_the_processor(half, multiplies, installed, chosen, way_out):
    offer = Offer(dict.fromkeys(installed, "1.0"), intel=False, bfloat16=multiplies)
    assert re.search(way_out, way_to_fast_products(np.dtype(half), offer, chosen))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(compute_dtype=np.float32), "compute_dtype is float32"),
        (dict(compute_dtype=np.int16), "compute_dtype is int16"),
        (dict(compute_dtype=np.float16, dtype=np.float64), "dtype is float64"),
    ],
)
def test_what_is_no_half_precision(options, message):
    with pytest.raises(TypeError, match=message):
        nn.GPT(**SIZES, **options)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.filterwarnings("ignore:compute_dtype=.* on NumPy")
def test_half_precision_by_name(half):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 9))
    by_name, by_type = (
        nn.GPT(**SIZES, compute_dtype=each, storage_dtype=each, wire_dtype=each) for each in (np.dtype(half).name, half)
    )
    assert by_name.loss_and_gradient(tokens, tokens) == by_type.loss_and_gradient(tokens, tokens)
    assert by_name.parameters.model_settings == by_type.parameters.model_settings


@pytest.mark.parametrize("options, share", [(dict(storage_dtype=np.float16), 0.6), (dict(recompute=True), 0.8)])
def test_without_a_backward_pass_nothing_is_kept(options, share):
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 50))
    trained, evaluated = nn.GPT(**SIZES, **options), nn.GPT(**SIZES, **options)
    loss = trained.loss_and_gradient(tokens, tokens)
    assert evaluated.loss(tokens, tokens) == loss
    evaluated.logits(tokens)
    evaluated.generate([1, 2], 3)
    assert evaluated.chunks[0].saved_bytes < share * trained.chunks[0].saved_bytes
    # And the next passes are as before.
    gradient = trained.parameters.gradients.flat.copy()
    assert evaluated.loss_and_gradient(tokens, tokens) == loss
    np.testing.assert_array_equal(evaluated.parameters.gradients.flat, gradient)
    assert evaluated.chunks[0].saved_bytes == trained.chunks[0].saved_bytes


@pytest.mark.parametrize("library", sorted(libraries.installed()), indirect=True)
def test_a_library_for_bfloat16_is_not_slow_and_gives_no_warning(library):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpt = nn.GPT(**SIZES, compute_dtype=ml_dtypes.bfloat16)
        gpt.loss_and_gradient([[1, 2]], [[2, 3]])


def gradients(half=ml_dtypes.bfloat16, **options):
    gpt = nn.GPT(**SIZES, compute_dtype=half, **options)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (4, CONTEXT))
    for _ in range(2):  # the second pass finds the memory of the first
        gpt.parameters.reset_gradients()
        gpt.loss_and_gradient(tokens, tokens)
    return gpt, gpt.parameters.gradients.flat.copy()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("options", [dict(recompute=True), dict(schedule="zb-h1"), dict(storage_dtype=np.float16)])
@pytest.mark.parametrize("half", HALVES)
@CHECKING
def test_rounded_results_are_found_again_however_activations_are_kept(half, options):
    _, expected = gradients(half, microbatches=2)
    _, found = gradients(half, microbatches=2, **options)
    if "storage_dtype" in options:
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 10 * epsilon(np.float16)
    else:
        np.testing.assert_array_equal(found, expected)


class Squashed(nn.MLP):
    """A layer of a user's own, which does more with its rows than to multiply them."""

    def forward(self, x_nc, work, residual_nc=None):
        return super().forward(np.tanh(x_nc), work, residual_nc)


class Own(nn.Architecture):
    def build_block(self, name, sequence_parallel):
        norms = [nn.LayerNorm(f"{name}.{part}_norm", self.width) for part in ("attention", "mlp")]
        attention = nn.CausalSelfAttention(f"{name}.attention", self.width, self.heads)
        return nn.TransformerBlock(name, norms[0], attention, norms[1], Squashed(f"{name}.mlp", self.width))


@pytest.mark.usefixtures("library")
@CHECKING
def test_a_layer_of_ones_own_gets_numbers_not_bits():
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (4, CONTEXT))
    losses = []
    for dtype in (None, ml_dtypes.bfloat16):
        model = nn.Decoder(Own(VOCABULARY, CONTEXT, 32, 1, 4, tied=True), compute_dtype=dtype)
        model.parameters.flat[:] += 0.1 * np.random.default_rng(5).standard_normal(model.parameters.size)
        losses.append(model.loss(tokens, tokens))
    assert losses[1] == pytest.approx(losses[0], rel=epsilon(ml_dtypes.bfloat16))


@CHECKING
def test_results_that_only_products_take_need_half_the_memory(library):
    gpt, _ = gradients()
    kept = gpt.chunks[0].saved_bytes
    choice.activate(choice.Choice())
    plain, _ = gradients()
    width, layers = SIZES["width"], SIZES["layers"]
    # Two norms and the wide result of GELU in each layer, and the last norm.
    halves = 2 * 4 * CONTEXT * width * (6 * layers + 1)
    assert plain.chunks[0].saved_bytes - kept == (0 if library == "rounded" else halves)


# `nn.GPT` on a device in float32, float16 and bfloat16: losses and gradients, tensor by tensor, against float64.
#
# The same network in PyTorch says how exact each precision can be.

# Those of the model; sequences.  The larger one takes a GPU: it has the wide rows and the heads
# that kernels are made for.
SMALL = dict(vocabulary_size=97, context_length=40, width=64, layers=2, heads=4), 3
LARGE = dict(vocabulary_size=1001, context_length=256, width=256, layers=3, heads=4), 4
EACH_SIZE = [
    pytest.param("standin", SMALL, id="standin-small"),
    pytest.param("cupy", SMALL, id="cupy-small", marks=pytest.mark.hardware),
    pytest.param("cupy", LARGE, id="cupy-large", marks=pytest.mark.hardware),
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
    of_model, sequences = sizes
    shape = 2, sequences, of_model["context_length"]
    tokens, targets = np.random.default_rng(3).integers(0, of_model["vocabulary_size"], shape)
    return tokens, targets


def exact(sizes: Any) -> tuple[nn.GPT, float, Gradients]:
    """The network on the host in float64, with biases and gains that are not those of the start."""
    model = nn.GPT(**sizes[0], dtype=np.float64)
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
    model = nn.GPT(**sizes[0], module=device.module, compute_dtype=compute_dtype)
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


def with_torch(
    torch: Any, reference: nn.GPT, sizes: Any, half: Any = None, where: str = "cpu", dtype: Any = np.float32
) -> tuple[float, Gradients]:
    """Loss and gradients of the same network in PyTorch, in `dtype` or with autocast to `half`."""
    functional = torch.nn.functional
    of_model, sequences = sizes
    length, width, layers, heads = (of_model[name] for name in ("context_length", "width", "layers", "heads"))
    values = {name: reference.parameters[name].astype(dtype) for name in reference.parameters}
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
        loss = functional.cross_entropy(logits.flatten(0, 1).to(p["head.weight"].dtype), targets.flatten())
    loss.backward()
    return float(loss.detach()), {name: each.grad.cpu().numpy().astype(np.float64) for name, each in p.items()}


LONG = dict(vocabulary_size=11, context_length=140, width=12, layers=2, heads=3)


@pytest.mark.parametrize("sizes", [(LONG, 2), (LONG | {"context_length": 1}, 1)], ids=["long", "one token"])
def test_float64_is_that_of_pytorch(sizes: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    reference, loss, gradients = exact(sizes)
    their_loss, theirs = with_torch(torch, reference, sizes, dtype=np.float64)
    assert loss == pytest.approx(their_loss, rel=1e-10)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, theirs[name], rtol=1e-10, atol=1e-13, err_msg=name)


@each_size
@each_dtype
def test_as_exact_as_pytorch(device: Device, sizes: Any, compute_dtype: Any) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    where = "cuda" if device.name == "cupy" else "cpu"
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch finds no GPU")
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
