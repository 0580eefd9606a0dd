"""GELU in the epilogues of products, on the stand-in for device memory, with a double of cuBLASLt at raw addresses."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import devices
import fake_cublaslt
import ml_dtypes
import numpy as np
import pytest
import standin

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.backend import cublas

HALVES = [np.float16, ml_dtypes.bfloat16]
SIZES = 11, 20, 32, 2, 2
MODULE = arrays.module_of(standin.empty(1))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double in the place of cuBLASLt, with nothing proven yet."""
    found = {"library": fake_cublaslt}
    unused = replace(cublas.LIBRARY)
    monkeypatch.setattr(unused, "module_for", lambda name: found["library"])
    monkeypatch.setattr(cublas, "LIBRARY", unused)
    monkeypatch.setattr(fake_cublaslt, "factor", 1.0)
    fake_cublaslt.executed.clear()
    return found


def model(half: Any, kind: Any = nn.GPT, sizes: Any = SIZES, **options: Any) -> Any:
    made = kind(*sizes, dtype=np.float32, module=MODULE, compute_dtype=half, **options)
    noise = np.random.default_rng(5).standard_normal(made.parameters.size).astype(np.float32)
    arrays.copy_to_device(arrays.to_host(made.parameters.flat) + np.float32(0.3) * noise, made.parameters.flat)
    return made


def run(model: Any, batch: int = 2) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and gradients by name."""
    given = np.random.default_rng(1).integers(0, 11, (2, batch, SIZES[1]))
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(*given)
    return loss, {name: arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2},
        {"microbatches": 2, "recompute": True},
        {"microbatches": 2, "storage_dtype": np.float16},
    ],
    ids=["whole", "accumulated", "recomputed", "stored"],
)
def test_loss_and_gradients_are_those_by_kernels(library: Any, half: Any, options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, gradients = run(model(half, **options))
    passes = SIZES[3] * options.get("microbatches", 1)
    # One is the proof.
    assert len(fake_cublaslt.executed) == passes * (2 if options.get("recompute") else 1) + 1
    library["library"] = None
    other_loss, others = run(model(half, **options))
    precision = float(ml_dtypes.finfo(half).eps) / 2
    assert loss == pytest.approx(other_loss, rel=2 * precision)
    errors = {name: np.linalg.norm(gradients[name] - each) / np.linalg.norm(each) for name, each in others.items()}
    assert 0 < max(errors.values()) < 8 * precision, errors


def test_a_weight_gradient_that_is_done_later(library: Any) -> None:
    from mpishard.nn.block import MLP
    from mpishard.nn.workspace import Workspace
    from mpishard.parameters.flat import FlatParameters

    gradients = []
    work_done_later: list[Any] = []
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


@pytest.mark.parametrize(
    "half, kind, options",
    [(None, nn.GPT, {}), (np.float16, nn.GPT, {"shards": 2}), (np.float16, nn.Llama, {})],
    ids=["float32", "slices", "llama"],
)
def test_where_they_are_not_used(half: Any, kind: Any, options: Any) -> None:
    run(model(half, kind, **options))
    assert not fake_cublaslt.executed


def test_widths_whose_rows_are_not_aligned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model(np.float16, sizes=(11, 20, 36, 1, 2)))
    assert not fake_cublaslt.executed


def test_text_generation_chooses_no_kernel_for_every_length() -> None:
    assert len(model(np.float16).generate([1, 2], 4)) == 6
    assert not fake_cublaslt.executed


def test_no_more_shapes_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "MOST_SHAPES", 3)
    made = model(np.float16)
    for batch in (1, 2, 3, 4):
        run(made, batch)
    assert len(fake_cublaslt.executed) == 1 + 2 * SIZES[3]  # one shape is that of the proof


def test_without_a_shape_left_for_the_proof_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "MOST_SHAPES", 1)
    run(model(np.float16))
    assert not fake_cublaslt.executed


def test_wrong_results_are_found_and_warned_of_once(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr(fake_cublaslt, "factor", 1.1)
    made = model(np.float16)
    with pytest.warns(
        RuntimeWarning, match="GELU differs by .* from that by kernels; bias and GELU are computed after"
    ):
        loss, _ = run(made)
    assert len(fake_cublaslt.executed) == 1
    monkeypatch.setattr(fake_cublaslt, "factor", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model(ml_dtypes.bfloat16))
    assert len(fake_cublaslt.executed) == 1
    library["library"] = None
    assert run(made)[0] == loss


@pytest.mark.parametrize(
    "name, message",
    [
        ("create", "does not start on this device .CUBLAS_STATUS"),
        ("matmul_algo_get_heuristic", "has no kernel with the epilogue for .* .CUBLAS_STATUS"),
        ("matmul", "a product of cuBLASLt with epilogues fails .CUBLAS_STATUS"),
    ],
)
def test_a_failure_is_warned_of_and_kernels_take_over(
    monkeypatch: pytest.MonkeyPatch, library: Any, name: str, message: str
) -> None:
    def fail(*_: Any) -> None:
        raise fake_cublaslt.cuBLASLtError("CUBLAS_STATUS_NOT_SUPPORTED (15)")

    monkeypatch.setattr(fake_cublaslt, name, fail)
    made = model(np.float16)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        loss, _ = run(made)
        run(made)
    assert len(caught) == 1 and not fake_cublaslt.executed
    library["library"] = None
    assert run(made)[0] == loss


def test_no_kernel_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cublaslt, "matmul_algo_get_heuristic", lambda *_: None)
    with pytest.warns(RuntimeWarning, match="it finds none"):
        run(model(np.float16))


@pytest.mark.gpu
def test_they_are_right_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("nvmath.bindings.cublasLt")
    cupy = devices.make_device("cupy").module
    half = np.dtype(np.float16)
    made = nn.GPT(*SIZES, dtype=np.float32, module=cupy, compute_dtype=half)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(made)
    found = cublas.cublaslt_on_device(made.parameters.flat)
    assert found is not None and half in found.proven


def test_the_double_has_the_names_of_nvmath() -> None:
    real = pytest.importorskip("nvmath.bindings.cublasLt")
    for kind in (
        fake_cublaslt.Epilogue, fake_cublaslt.MatmulDescAttribute, fake_cublaslt.MatmulPreferenceAttribute
    ):  # fmt: skip
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
