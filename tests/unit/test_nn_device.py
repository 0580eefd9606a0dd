"""The network on arrays that the host cannot touch: the stand-in for device memory, and CuPy where there is a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import fake_cublas
import ml_dtypes
import numpy as np
import pytest
import standin
from layer_kernels import moved, use_formulas
from mpi4py import MPI
from waits import launches

from mpishard import Mesh, nn
from mpishard.backend import array as arrays
from mpishard.backend.streams import PendingNumber
from mpishard.nn import device_attention, products

VOCABULARY, CONTEXT = 11, 110  # longer than a block of attention on the host
SIZES = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=12, layers=2, heads=3)


@pytest.fixture
def module(device):
    """The module that makes device arrays of one kind."""
    return device.module


def pair(module, dtype, kind=nn.GPT, **options):
    """Two equal networks: on the host by formulas, and on the device."""
    host, device = kind(**SIZES, dtype=dtype, **options), kind(**SIZES, dtype=dtype, module=module, **options)
    use_formulas(host.chunks[0].units)
    return moved(host), moved(device)


def batch(size, length, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, (size, length)), random.integers(0, VOCABULARY, (size, length))


def run(model, *given):
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(*given)
    return loss, arrays.to_host(model.parameters.gradients.flat)


def assert_equal(host, device, *given):
    loss, gradient = run(host, *given)
    other_loss, other_gradient = run(device, *given)
    assert other_loss == pytest.approx(loss, rel=1e-13)
    np.testing.assert_allclose(other_gradient, gradient, rtol=1e-11, atol=1e-11)
    return loss


def test_the_host_queues_the_backward_pass_before_it_waits_for_the_loss(monkeypatch):
    module = arrays.module_of(standin.empty(1))
    model = pair(module, np.float32, microbatches=2)[1]
    run(model, *batch(4, 30))
    names, seen = launches(monkeypatch), []
    read = PendingNumber.__float__

    def reading(self):
        seen.append(len(names))
        return read(self)

    monkeypatch.setattr(PendingNumber, "__float__", reading)
    monkeypatch.delattr(standin.StandIn, "to_device")
    monkeypatch.delattr(standin.StandIn, "to_host")
    model.loss_and_gradient(*batch(4, 30))
    assert names.count("cross_entropy") == 2
    assert seen == [len(names)] * 2


def test_half_precision_needs_no_arrays_of_bfloat16(monkeypatch):
    # CuPy has them from version 14 on, and where it finds headers of CUDA.
    astype = standin.DeviceArray.astype

    def refusing(self, dtype, copy=True):
        assert np.dtype(dtype) != ml_dtypes.bfloat16
        return astype(self, dtype, copy)

    monkeypatch.setattr(standin.DeviceArray, "astype", refusing)
    module = arrays.module_of(standin.empty(1))
    loss, gradients = run(nn.GPT(**SIZES, compute_dtype=ml_dtypes.bfloat16, module=module), *batch(2, 8))
    assert np.isfinite(loss) and gradients.any()


def test_initial_values_are_those_of_the_host(module):
    host, device = nn.GPT(**SIZES), nn.GPT(**SIZES, module=module)
    assert arrays.is_device(device.parameters.flat)
    np.testing.assert_array_equal(arrays.to_host(device.parameters.flat), host.parameters.flat)


LLAMA = {"key_value_heads": 1, "bias": True, "head_norms": True, "microbatches": 2}


@pytest.mark.pairs(3)
@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(nn.GPT, {}, id="plain"),
        pytest.param(nn.GPT, {"tied": True, "microbatches": 2}, id="tied"),
        pytest.param(nn.GPT, {"recompute": True}, id="recompute"),
        pytest.param(nn.GPT, {"chunks": 2, "schedule": "interleaved", "microbatches": 2}, id="chunks"),
        pytest.param(nn.Llama, LLAMA | {"dropout": 0.2}, id="llama"),
    ],
)
def test_loss_and_gradients_equal_those_of_the_host(module, kind, options):
    host, device = pair(module, np.float64, kind, **options)
    for size, length in ((3, CONTEXT), (2, 7), (0, 4)):
        given = batch(size, length)
        loss = assert_equal(host, device, *given, range(size))
        if "dropout" not in options:
            assert device.loss(*given) == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize("kind, options", [(nn.GPT, {}), (nn.Llama, {"key_value_heads": 1})], ids=["gpt", "llama"])
@pytest.mark.parametrize("scores", [2 * 32 * 70, 7 * 32 * 70])
def test_attention_in_blocks(module, kind, options, scores, monkeypatch):
    """Of queries, of heads and of sequences."""
    monkeypatch.setattr(device_attention, "BLOCK", 32)
    monkeypatch.setattr(device_attention, "DEVICE_SCORES", scores)
    host, device = pair(module, np.float64, kind, **options)
    assert_equal(host, device, *batch(3, 70))


def test_storage_in_half_precision(module):
    host, device = pair(module, np.float32, storage_dtype=np.float16)
    given = batch(3, 20)
    loss, gradient = run(host, *given)
    other_loss, other_gradient = run(device, *given)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    # Numbers that differ in the last bit of float32 may be rounded to neighbours in float16.
    assert np.abs(other_gradient - gradient).max() < 1e-3 * np.abs(gradient).max()


@pytest.mark.pairs(4)
@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(nn.GPT, {}, id="gpt"),
        pytest.param(nn.GPT, {"tied": True, "microbatches": 2, "recompute": True}, id="recomputed"),
        pytest.param(nn.GPT, {"microbatches": 2, "schedule": "zb-h1"}, id="deferred"),
        pytest.param(nn.GPT, {"shards": 3}, id="slices"),
        pytest.param(nn.Llama, LLAMA, id="llama"),
    ],
)
def test_products_in_half_precision(module, half, kind, options, monkeypatch):
    # A run that an earlier test of this process made may have chosen a library.
    monkeypatch.setattr("mpishard.backend.gemm.has_fast_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="slower than float32"):
        host, device = pair(module, np.float32, kind, compute_dtype=half, **options)
    exact, _ = pair(module, np.float32, kind, **options)
    with pytest.warns(UserWarning, match="slower than float32"):
        nudged = [nudge(pair(module, np.float32, kind, compute_dtype=half, **options)[0], seed) for seed in range(4)]
    precision = float(ml_dtypes.finfo(half).eps) / 2
    for given in (batch(3, 20), batch(2, CONTEXT)):
        loss, gradient = run(host, *given)
        other_loss, other_gradient = run(device, *given)
        assert other_loss == pytest.approx(loss, rel=0.5 * precision)
        # Operands that differ in the last bits of float32 may be rounded to neighbours in half precision.  How far that
        # carries in this network is seen by the last bits of its weights.
        flips = max(difference(run(model, *given)[1], gradient) for model in nudged)
        rounding = difference(run(exact, *given)[1], gradient)
        assert rounding > precision and difference(other_gradient, gradient) < min(3 * flips, 0.5 * rounding)


def conversions(monkeypatch):
    """The shapes of arrays that are rounded from now on."""
    rounded, plain = [], products.convert
    monkeypatch.setattr(products, "convert", lambda a, b: rounded.append(a.shape) or plain(a, b))
    return rounded


def difference(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def nudge(model, seed):
    """The model with every weight moved to a neighbour in float32."""
    flat = model.parameters.flat
    away = np.random.default_rng(seed).choice(np.float32([-np.inf, np.inf]), flat.size)
    np.copyto(flat, np.nextafter(flat, away))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_rounded_once_a_step_and_anew_in_the_next(module, tied, sharded, monkeypatch):
    with Mesh(MPI.COMM_SELF) as mesh:
        options = {"tied": tied, "mesh": mesh, "microbatches": 4, "sharded_parameters": sharded}
        device = nn.GPT(**SIZES, dtype=np.float32, module=module, compute_dtype=np.float16, **options)
        weights = {tuple(sorted(spec.shape)) for spec in device.parameters.specs if len(spec.shape) == 2}
        weights.remove((12, CONTEXT))
        rounded = conversions(monkeypatch)
        given = batch(4, 20)  # 20 rows: no operand besides the weights has their shapes
        results = []
        for step in range(2):
            rounded.clear()
            results.append(run(device, *given))
            times = [sum(sorted(each) == sorted(shape) for each in rounded) for shape in sorted(weights)]
            if not sharded:
                # All at once, and by themselves at most the table of tokens, and in each of two layers one of a shape,
                # but for the two of the MLP: those that do not begin at a multiple of 16 bytes, and a padded table.
                assert rounded.count((device.parameters.size,)) == 1
                assert all(one <= most for one, most in zip(times, [1, 2, 2, 4], strict=True))
            else:
                assert min(times) >= 2 * 4
            if not step and not sharded:
                device.parameters.flat[...] += 0.1
        assert sharded or results[0][0] != results[1][0]
        monkeypatch.setattr(device, "_rounded_weights", nullcontext)
        loss, gradient = run(device, *given)
        assert loss == results[1][0]
        np.testing.assert_array_equal(gradient, results[1][1])


@pytest.mark.parametrize("kind, options", [(nn.GPT, {}), (nn.Llama, {"key_value_heads": 1})], ids=["gpt", "llama"])
def test_products_of_attention_round_nothing(module, kind, options, monkeypatch):
    """Heads, probabilities and their gradients are stored rounded by the kernels that compute them."""
    device = kind(**SIZES, dtype=np.float32, module=module, compute_dtype=np.float16, **options)
    rounded = conversions(monkeypatch)
    run(device, *batch(2, 20))
    assert {len(shape) for shape in rounded if shape != (device.parameters.size,)} == {2}


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_no_product_is_of_the_array_module(module, half, monkeypatch):
    """CuPy's batched product of bfloat16 fails, and that of float16 is one of float32."""
    if module.__name__ != "standin":
        pytest.skip("looks into the double of cuBLAS")
    device = nn.GPT(**SIZES, dtype=np.float32, module=module, compute_dtype=half)
    for name in ("matmul", "dot", "tensordot", "einsum"):
        monkeypatch.setattr(module, name, None, raising=False)
    monkeypatch.setattr(standin.DeviceArray, "__matmul__", None)
    fake_cublas.calls.clear()
    run(device, *batch(2, CONTEXT))
    called = {(routine, operands) for routine, _, operands in fake_cublas.calls}
    of_half = 2 if half is np.float16 else 14
    # Sums of columns stay in float32.
    assert called == {("gemmEx", of_half), ("gemmStridedBatchedEx", of_half), ("gemmEx", 0)}


def test_predictions(module):
    host, device = pair(module, np.float64)
    tokens, _ = batch(2, 9)
    logits = device.logits(tokens)
    assert arrays.is_device(logits)
    np.testing.assert_allclose(arrays.to_host(logits), host.logits(tokens), rtol=1e-12, atol=1e-12)
    prompts = [[1, 2, 3], [4, 5]]
    for options in (dict(temperature=0), dict(), dict(cache=False)):
        texts, others = (model.generate(prompts, 5, **options) for model in (host, device))
        assert len(texts) == len(others) == 2 and all(map(np.array_equal, texts, others))


def test_tokens_may_be_on_the_device(module):
    _, device = pair(module, np.float64)
    given = batch(2, 9)
    on_device = [module.asarray(each) for each in given]
    loss, gradient = run(device, *given)
    other_loss, other_gradient = run(device, *on_device)
    # Sums over tokens may be taken in another order on a GPU.
    assert other_loss == pytest.approx(loss, rel=1e-14)
    np.testing.assert_allclose(other_gradient, gradient, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="valid tokens are 0 to 10"):
        device.loss(module.asarray(given[0] + VOCABULARY), on_device[1])


def test_measured_stage_costs(module):
    device = nn.GPT(**SIZES, module=module, stage_costs="measured")
    assert device.loss(*batch(1, 4)) > 0
