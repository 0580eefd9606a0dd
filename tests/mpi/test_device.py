"""The network on a mesh with arrays that the host cannot touch: the same numbers as on one rank's host."""

from __future__ import annotations

import numpy as np
import pytest
import standin

from mpishard import Mesh, nn
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


@pytest.mark.parametrize("kind", [standin.DeviceArray, standin.AwareArray])
@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_the_same_as_on_the_host_of_one_rank(comm, kind, axis):
    layers = comm.size if axis == "pipeline" else 1
    loss, gradients, logits, text = alone(layers)
    module = arrays.module_of(standin.empty(1, kind=kind))
    shape = {"data": 1, "tensor": 1, "pipeline": 1, axis: comm.size}
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


def test_halves_travel_between_stages(comm):
    module = arrays.module_of(standin.empty(1))
    with Mesh(comm, pipeline=comm.size) as mesh:
        halves = {"wire_dtype": np.float16, "compute_dtype": np.float16}
        model = nn.GPT(VOCABULARY, LENGTH, WIDTH, comm.size, HEADS, mesh=mesh, module=module, microbatches=2, **halves)
        assert model.loss_and_gradient(TOKENS, TARGETS) == pytest.approx(alone(comm.size)[0], rel=2e-3)


@pytest.mark.parametrize("kind", ["half", "device"])
def test_copies_that_travel_live_until_the_call_is_done(mesh, kind):
    """mpi4py does not hold them, and freed memory is soon written to by something else."""
    axis = mesh.data
    host = np.full(300 * axis.size, axis.rank + 1, np.float16 if kind == "half" else np.float64)
    total = axis.size * (axis.size + 1) / 2

    def put(values):
        if kind == "half":
            return values.copy()
        device = standin.empty(values.shape, values.dtype)
        arrays.copy_to_device(values, device)
        return device

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
