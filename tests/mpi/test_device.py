"""The network on a mesh with arrays that the host cannot touch: the same numbers as on one rank's host."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from devices import CUPY_DIRECT

from mpishard import AdamW, CollectiveMismatchError, DDPOptimizer, Mesh, ZeRO3Optimizer, nn
from mpishard.backend import array as arrays

# Not enough micro-batches to fill a pipeline, but enough to add up.
pytestmark = pytest.mark.filterwarnings("ignore:2 micro-batches for:UserWarning")
VOCABULARY, LENGTH, WIDTH, HEADS = 11, 5, 24, 24
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 3, LENGTH))


def alone(layers):
    """Loss, gradients, logits and a text of one rank."""
    model = nn.GPT(VOCABULARY, LENGTH, WIDTH, layers, HEADS, np.float64)
    loss = model.loss_and_gradient(TOKENS, TARGETS)
    gradients = {name: model.parameters.gradient(name)[0].copy() for name in model.parameters}
    return loss, gradients, model.logits(TOKENS), model.generate([1, 2], 2)


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_the_same_as_on_the_host_of_one_rank(comm, device, axis):
    layers = comm.size if axis == "pipeline" else 1
    loss, gradients, logits, text = alone(layers)
    module, shape = device.module, {"data": 1, "tensor": 1, "pipeline": 1, axis: comm.size}
    with Mesh(comm, **shape) as mesh:
        options = {"sharded_parameters": axis == "data", "sequence_parallel": axis == "tensor", "microbatches": 2}
        model = nn.GPT(VOCABULARY, LENGTH, WIDTH, layers, HEADS, np.float64, mesh=mesh, module=module, **options)
        assert model.loss_and_gradient(TOKENS, TARGETS) == pytest.approx(loss, rel=1e-13)
        for spec, name in zip(model.parameters.local, model.parameters, strict=True):
            own = tuple(slice(*extent) for extent in model.parameters.box(name))
            found = arrays.to_host(model.parameters.gradient(name)[0])
            if spec.partial:
                mesh.tensor.all_reduce(found)
            np.testing.assert_allclose(found, gradients[name][own], rtol=1e-11, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(arrays.to_host(model.logits(TOKENS)), logits, rtol=1e-12, atol=1e-12)
        assert np.array_equal(model.generate([1, 2], 2), text)


def test_halves_travel_between_stages(comm, device):
    module = device.module
    with Mesh(comm, pipeline=comm.size) as mesh:
        halves = {"wire_dtype": np.float16, "compute_dtype": np.float16}
        model = nn.GPT(VOCABULARY, LENGTH, WIDTH, comm.size, HEADS, mesh=mesh, module=module, microbatches=2, **halves)
        assert model.loss_and_gradient(TOKENS, TARGETS) == pytest.approx(alone(comm.size)[0], rel=2e-3)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_products_in_half_precision(comm, device, half, sequence_parallel):
    def run(**options):
        model = nn.GPT(VOCABULARY, LENGTH, WIDTH, 2, HEADS, compute_dtype=half, module=device.module, **options)
        loss = model.loss_and_gradient(TOKENS, TARGETS)
        return loss, model, {name: arrays.to_host(model.parameters.gradient(name)[0]) for name in model.parameters}

    loss, _, gradients = run()
    precision = float(ml_dtypes.finfo(half).eps) / 2
    with Mesh(comm, data=1, tensor=comm.size) as mesh:
        found_loss, model, found = run(mesh=mesh, sequence_parallel=sequence_parallel)
        assert found_loss == pytest.approx(loss, rel=precision)
        for spec, name in zip(model.parameters.local, model.parameters, strict=True):
            if spec.partial:
                mesh.tensor.all_reduce(found[name])
            if name.endswith("qkv.bias"):
                continue  # the gradient by the bias of keys is rounding noise
            own = gradients[name][tuple(slice(*extent) for extent in model.parameters.box(name))]
            assert np.linalg.norm(found[name] - own) <= 4 * precision * np.linalg.norm(gradients[name]), name


def test_weights_that_an_optimizer_shards_are_rounded_where_they_are_gathered(mesh, device):
    """The units of a model are gathered in turns into the same memory."""
    losses = []
    for optimizer_of in (DDPOptimizer, ZeRO3Optimizer):
        model = nn.GPT(VOCABULARY, LENGTH, WIDTH, 4, HEADS, mesh=mesh, compute_dtype=np.float16, module=device.module)
        optimizer = optimizer_of(AdamW(lr=1e-2), mesh)
        losses.append([])
        for _ in range(3):
            losses[-1].append(model.loss_and_gradient(TOKENS, TARGETS))
            optimizer.step(model.parameters, count=mesh.data.size * TARGETS.size)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["half", "device"])
def test_copies_that_travel_live_until_the_call_is_done(mesh, device, kind):
    """mpi4py does not hold them, and freed memory is soon written to by something else."""
    axis = mesh.data
    host = np.full(300 * axis.size, axis.rank + 1, np.float16 if kind == "half" else np.float64)
    total = axis.size * (axis.size + 1) / 2

    def put(values):
        return values.copy() if kind == "half" else device.put(values)

    for _ in range(5):
        out, everywhere, gathered = put(host[:300]), put(host), put(host)
        pending = [
            axis.start_reduce_scatter(put(host), out, [300] * axis.size),
            axis.start_all_reduce(put(host), everywhere),
            axis.start_all_gather(gathered, put(host[:300]), [300] * axis.size),
        ]
        rubbish = [np.full(size, 1e4) for size in range(1, 3000, 13)]
        for each in pending:
            each.wait()
        del rubbish
        assert np.all(arrays.to_host(out) == total)
        assert np.all(arrays.to_host(everywhere) == total)
        assert np.array_equal(arrays.to_host(gathered), np.repeat(np.arange(1, axis.size + 1), 300))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", ["aware", CUPY_DIRECT], indirect=True)
@pytest.mark.parametrize("start", ["", "start_"])
def test_debug_mode_says_that_some_ranks_reduce_and_scatter_by_device_pointers(comm, device, start):
    """From some size on NumPy arrays are exchanged, but MPI itself reduces what device pointers lead to."""
    with Mesh(comm, debug=True) as mesh:
        axis = mesh.data
        host = np.ones(2**16 * axis.size)
        call = getattr(axis, f"{start}reduce_scatter")
        with pytest.raises(CollectiveMismatchError, match=r"reduce_scatter\(.*, sum\) by device pointers called at"):
            call(host if mesh.rank == 0 else device.put(host))
        for put in (np.copy, device.put):
            found = call(put(host))
            assert (arrays.to_host(found.wait() if start else found) == axis.size).all()
        # One buffer of a rank may be elsewhere: the way is that of the first.
        out = (device.empty if mesh.rank == 0 else np.empty)(2**16)
        found = call(np.copy(host), out)
        assert (arrays.to_host(found.wait() if start else found) == axis.size).all()


@pytest.mark.parametrize("start", ["", "start_"])
def test_the_ledger_knows_where_calls_of_device_memory_were_made(mesh, device, start):
    axis = mesh.data
    for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
        found = getattr(axis, f"{start}{name}")(device.put(np.ones(4)))
        if start:
            found.wait()
        call = mesh.ledger.recent[-1].call
        assert call.op == name and "test_device.py" in call.site
