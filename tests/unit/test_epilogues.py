"""GELU in the epilogues of products, and attention by cuDNN, on the stand-in for device memory.

Doubles of cuBLASLt and cuDNN work at raw addresses.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import devices
import fake_cublaslt
import fake_cudnn
import ml_dtypes
import numpy as np
import pytest
import standin
from layer_kernels import moved

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.backend import cublas
from mpishard.nn import device_attention
from mpishard.nn.block import MLP
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

HALVES = [np.float16, ml_dtypes.bfloat16]
SIZES = dict(vocabulary_size=11, context_length=20, width=32, layers=2, heads=2)
MODULE = arrays.module_of(standin.empty(1))


def doubled(monkeypatch, module, double):
    """A double in the place of a library."""
    found = {"library": double}
    unused = replace(module.LIBRARY)
    monkeypatch.setattr(unused, "module_for", lambda name: found["library"])
    monkeypatch.setattr(module, "LIBRARY", unused)
    double.executed.clear()
    return found


@pytest.fixture
def cublaslt(monkeypatch):
    return doubled(monkeypatch, cublas, fake_cublaslt)


@pytest.fixture
def cudnn(monkeypatch):
    return doubled(monkeypatch, device_attention, fake_cudnn)


def model(half, kind=nn.GPT, module=MODULE, **options):
    return moved(kind(**SIZES | options, dtype=np.float32, module=module, compute_dtype=half))


def run(model, batch=2, length=SIZES["context_length"]):
    """Loss, and gradients by name."""
    given = np.random.default_rng(1).integers(0, 11, (2, batch, length))
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(*given)
    return loss, {name: arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters}


def run_without_warning(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run(*arguments)


def assert_close_by_tensor(found, others, half):
    """Not the same bits, but the same up to some roundings."""
    precision = float(ml_dtypes.finfo(half).eps) / 2
    assert found[0] == pytest.approx(others[0], rel=2 * precision)
    errors = {name: np.linalg.norm(found[1][name] - each) / np.linalg.norm(each) for name, each in others[1].items()}
    assert 0 < max(errors.values()) < 8 * precision, errors


@pytest.mark.pairs(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 2}, {"microbatches": 2, "recompute": True}, {"microbatches": 2, "storage_dtype": np.float16}],
    ids=["whole", "accumulated", "recomputed", "stored"],
)
def test_loss_and_gradients_are_those_by_kernels(cublaslt, half, options):
    loss, gradients = run(model(half, **options))
    passes = SIZES["layers"] * options.get("microbatches", 1)
    assert len(fake_cublaslt.executed) == passes * (2 if options.get("recompute") else 1)
    cublaslt["library"] = None
    assert_close_by_tensor((loss, gradients), run(model(half, **options)), half)


@pytest.mark.usefixtures("cublaslt")
def test_a_weight_gradient_that_is_done_later():
    gradients = []
    work_done_later = []
    x, dy = (standin.on_device(np.random.default_rng(s).standard_normal((24, 32)).astype(np.float32)) for s in (1, 2))
    for deferred in (None, work_done_later):
        mlp = MLP("mlp", 32)
        parameters = FlatParameters(mlp.specs(), module=MODULE, dtype=np.float32)
        mlp.bind(parameters, compute_dtype=ml_dtypes.bfloat16)
        mlp.initialize(3)
        work = Workspace(np.float32, MODULE)
        mlp.forward(x, work)
        work.deferred = deferred
        mlp.backward(dy, work)
        # The next micro-batch borrows the same memory.
        work.scratch("gradient before GELU", (24, 128), np.dtype(np.uint16)).fill(0)
        for finish in deferred or []:
            finish()
        gradients.append(arrays.to_host(parameters.gradients.flat))
    assert fake_cublaslt.executed
    assert work_done_later
    np.testing.assert_array_equal(gradients[0], gradients[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("cublaslt")
@pytest.mark.parametrize(
    "half, kind, options",
    [
        pytest.param(None, nn.GPT, {}, id="float32"),
        pytest.param(np.float16, nn.GPT, {"shards": 2}, id="slices"),
        pytest.param(np.float16, nn.Llama, {}, id="llama"),
        pytest.param(np.float16, nn.GPT, {"width": 36, "layers": 1}, id="rows that are not aligned"),
    ],
)
def test_where_they_are_not_used(half, kind, options):
    run(model(half, kind, **options))
    assert not fake_cublaslt.executed


@pytest.mark.usefixtures("cublaslt")
def test_text_generation_chooses_no_kernel_for_every_length():
    assert len(model(np.float16).generate([1, 2], 4)) == 6
    assert not fake_cublaslt.executed


@pytest.mark.usefixtures("cublaslt")
@pytest.mark.parametrize("most", [1, 2])
def test_no_more_shapes_than_a_limit(monkeypatch, most):
    monkeypatch.setattr(cublas, "MOST_SHAPES", most)
    made = model(np.float16)
    for batch in (1, 2, 3, 4):
        run(made, batch)
    assert len(fake_cublaslt.executed) == most * SIZES["layers"]


def fail(*_):
    raise fake_cublaslt.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED (15)")


@pytest.mark.parametrize(
    "name, replaced, message",
    [
        ("create", fail, "does not start .*CUBLAS_STATUS"),
        ("matmul_algo_get_heuristic", fail, "no kernel .*CUBLAS_STATUS"),
        ("matmul_algo_get_heuristic", lambda *_: None, "it finds none"),
    ],
)
def test_a_failure_is_warned_of_and_kernels_take_over(monkeypatch, cublaslt, name, replaced, message):
    monkeypatch.setattr(fake_cublaslt, name, replaced)
    made = model(np.float16)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        loss, _ = run(made)
        run(made)
    assert len(caught) == 1 and not fake_cublaslt.executed
    cublaslt["library"] = None
    assert run(made)[0] == loss


# Rows and positions that are more than a tile of any kernel of a library, and not whole tiles.
LENGTH_ON_A_GPU = 150


def run_on_a_gpu(library, kind, name, monkeypatch, make):
    """Loss and gradients with a library, in which it was called, and without."""
    calls, plain = [], getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *arguments: calls.append(name) or plain(*arguments))
    found = run(make(), 2, LENGTH_ON_A_GPU)
    assert calls
    calls.clear()
    monkeypatch.setattr(library, "module_for", lambda arrays: None)
    others = run(make(), 2, LENGTH_ON_A_GPU)
    assert not calls
    return found, others


@pytest.mark.hardware
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("half", HALVES)
def test_on_a_gpu_epilogues_are_right(half, monkeypatch):
    pytest.importorskip("nvmath.bindings.cublasLt")
    module, sizes = devices.make_device("cupy").module, dict(context_length=LENGTH_ON_A_GPU, width=64)
    found, others = run_on_a_gpu(
        cublas.LIBRARY, cublas.CublasLt, "forward", monkeypatch, lambda: model(half, module=module, **sizes)
    )
    assert_close_by_tensor(found, others, half)


def test_the_double_has_the_names_of_nvmath():
    real = pytest.importorskip("nvmath.bindings.cublasLt")
    kinds = fake_cublaslt.Epilogue, fake_cublaslt.MatmulDescAttribute, fake_cublaslt.MatmulPreferenceAttribute
    for kind in kinds:
        assert {each.name: getattr(getattr(real, kind.__name__), each.name) for each in kind} == kind.__members__
    for attribute, dtype in fake_cublaslt.DESC_DTYPES.items():
        assert real.get_matmul_desc_attribute_dtype(attribute) == dtype
    for attribute, dtype in fake_cublaslt.PREFERENCE_DTYPES.items():
        assert real.get_matmul_preference_attribute_dtype(attribute) == dtype
    assert real.matmul_heuristic_result_dtype == fake_cublaslt.matmul_heuristic_result_dtype
    assert {"ptr", "state", "workspace_size"} <= set(dir(real.MatmulHeuristicResult()))
    for name, function in inspect.getmembers(fake_cublaslt, inspect.isfunction):
        if not name.startswith("_"):
            theirs = getattr(real, name).__doc__.partition("(")[2].partition(")")[0]
            arguments = [each.split()[-1] for each in theirs.split(",") if each]
            assert list(inspect.signature(function).parameters) == arguments, name


# Attention by cuDNN.

SIZES_OF_ATTENTION = dict(context_length=70, width=48, heads=3)  # heads of 16 channels


def assert_close(found, others, half):
    """As `assert_close_by_tensor`, of all gradients together."""
    precision = float(ml_dtypes.finfo(half).eps) / 2
    assert found[0] == pytest.approx(others[0], rel=2 * precision)
    one, other = (np.concatenate([each.ravel() for each in gradients.values()]) for _, gradients in (found, others))
    assert 0 < np.linalg.norm(one - other) / np.linalg.norm(other) < 8 * precision


def attending(half, kind=nn.GPT, **options):
    return model(half, kind, **SIZES_OF_ATTENTION | options)


@pytest.mark.pairs(4)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(nn.GPT, {}, id="gpt"),
        pytest.param(nn.GPT, {"microbatches": 2, "recompute": True}, id="recomputed"),
        pytest.param(nn.GPT, {"microbatches": 2, "storage_dtype": np.float16}, id="stored"),
        pytest.param(nn.GPT, {"shards": 3}, id="slices"),
        pytest.param(nn.Llama, {"key_value_heads": 1, "head_norms": True}, id="llama"),
    ],
)
def test_loss_and_gradient_are_those_of_attention_in_blocks(cudnn, half, kind, options):
    loss, gradients = run(attending(half, kind, **options), 2, 70)
    passes = SIZES["layers"] * options.get("microbatches", 1) * options.get("shards", 1)
    assert fake_cudnn.executed.count("attention") == passes * (2 if options.get("recompute") else 1)
    assert fake_cudnn.executed.count("gradient") == passes
    cudnn["library"] = None
    assert_close((loss, gradients), run(attending(half, kind, **options), 2, 70), half)


@pytest.mark.hardware
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "kind, options", [(nn.GPT, {}), (nn.Llama, {"key_value_heads": 1, "head_norms": True})], ids=["gpt", "llama"]
)
def test_on_a_gpu_attention_is_right(half, kind, options, monkeypatch):
    """As heads lie in the rows of a product, and apart, with heads of queries that share a key."""
    pytest.importorskip("cudnn")
    options = options | dict(module=devices.make_device("cupy").module, context_length=LENGTH_ON_A_GPU)
    attention = device_attention.CudnnAttention
    found, others = run_on_a_gpu(
        device_attention.LIBRARY, attention, "forward", monkeypatch, lambda: attending(half, kind, **options)
    )
    assert_close(found, others, half)


@pytest.mark.usefixtures("cudnn")
def test_cudnn_is_used_neither_without_half_precision_nor_for_every_length_of_a_text():
    run(attending(None), 2, 40)
    assert len(attending(np.float16).generate([1, 2], 4)) == 6
    assert not fake_cudnn.executed


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("width, warns", [(4, False), (136, False), (40, True)])
def test_heads_that_cudnn_does_not_take(width, warns):
    made = attending(np.float16, context_length=30, width=width, layers=1, heads=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(made, 1, 20)
    assert [each.category for each in caught] == [RuntimeWarning] * warns
    assert not fake_cudnn.executed


@pytest.mark.usefixtures("cudnn")
def test_no_more_graphs_than_a_limit(monkeypatch):
    monkeypatch.setattr(device_attention, "MOST_SHAPES", 2)
    made = attending(np.float16)
    for length in (10, 20, 30, 40):
        made.loss(*np.zeros((2, 1, length), int))
    assert fake_cudnn.executed.count("attention") == 2 * SIZES["layers"]
