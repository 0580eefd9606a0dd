"""Nothing that leaves a device is older than the last kernel that wrote to it, and nothing that arrives is read early.

The kernel is late on purpose: on a GPU one that spins goes before it; the stand-in does nothing before it must.
"""

from __future__ import annotations

import numpy as np
import pytest
from steps import STRATEGIES

from mpishard import SGD, Checkpoints, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.layout.run_state import RunState, Shard
from mpishard.layout.tensors import ParameterSpec, Piece

SIZE = 700  # elements of a rank
OLD = -5


@pytest.fixture(params=["float32", "float16", "float64"])
def late(request, device):
    """``late(values)``: an array with an old value, and a late kernel under way that writes `values` to it."""

    def make(values):
        new = device.put(np.asarray(values, request.param))
        array = device.put(np.full(new.shape, OLD, request.param))
        device.be_late()
        array[...] = new
        return array

    return make


@pytest.fixture(params=["blocking", "started"])
def call(request, mesh):
    """``call(name, ...)``: what a method of the data axis gives, or its started form after other work of the host."""

    def make(name, *arguments):
        if request.param == "blocking":
            return getattr(mesh.data, name)(*arguments)
        pending = getattr(mesh.data, f"start_{name}")(*arguments)
        assert sum(range(1000)) == 499500
        return pending.wait()

    return make


def check(found, expected):
    """Compare what `found` has, and what a kernel that is queued right now makes of it."""
    doubled = found + found
    assert np.array_equal(arrays.to_host(found), expected)
    assert np.array_equal(arrays.to_host(doubled), 2 * np.asarray(expected))


def own(axis, runs=1):
    """The values of this rank: its number from 1, in as many runs as asked, one more in each."""
    return axis.rank + 1 + np.repeat(np.arange(runs), SIZE)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.pairs
def test_all_reduce(mesh, late, call, in_place):
    axis = mesh.data
    found = call("all_reduce", late(own(axis)), None if in_place else late(np.zeros(SIZE)))
    check(found, np.full(SIZE, axis.size * (axis.size + 1) // 2))


@pytest.mark.pairs
def test_reduce_scatter(mesh, late, call):
    axis = mesh.data
    found = call("reduce_scatter", late(own(axis, axis.size)), late(np.zeros(SIZE)), [SIZE] * axis.size)
    check(found, np.full(SIZE, axis.size * (axis.size + 1) // 2 + axis.size * axis.rank))


@pytest.mark.pairs
def test_all_gather(mesh, late, call):
    axis = mesh.data
    piece = late(own(axis))
    found = call("all_gather", late(np.zeros(SIZE * axis.size)), piece, [SIZE] * axis.size)
    check(found, np.repeat(np.arange(1, axis.size + 1), SIZE))


@pytest.mark.pairs
def test_all_to_all(mesh, late, call):
    axis = mesh.data
    found = call("all_to_all", late(own(axis, axis.size)), late(np.zeros(SIZE * axis.size)))
    check(found, np.repeat(np.arange(1, axis.size + 1) + axis.rank, SIZE))


@pytest.mark.pairs
def test_broadcast_from_every_root(mesh, late, call):
    axis = mesh.data
    for root in range(axis.size):
        check(call("broadcast", late(own(axis)), root), np.full(SIZE, root + 1))


@pytest.mark.parametrize("way", ["blocking", "started"])
@pytest.mark.pairs
def test_messages_round_the_ring(mesh, late, way):
    axis = mesh.data
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    buffer, got = late(own(axis)), late(np.zeros(SIZE))
    if way == "blocking":
        arriving = axis.start_recv(got, source)
        axis.send(buffer, to)
        found = arriving.wait()
    else:
        leaving = axis.start_send(buffer, to)
        found = axis.recv(got, source)
        leaving.wait()
    check(found, np.full(SIZE, source + 1))


def test_several_calls_under_way(mesh, late):
    """Each with a late kernel of its own before it, waited for in the other order."""
    axis = mesh.data
    buffers = [late(own(axis) + number) for number in range(3)]
    pending = [axis.start_all_reduce(buffer) for buffer in buffers]
    total = axis.size * (axis.size + 1) // 2
    for number in reversed(range(3)):
        check(pending[number].wait(), np.full(SIZE, total + number * axis.size))


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs
def test_gradients_of_a_step(mesh, device, strategy, reproducible):
    """And parameters that are read as soon as the step has returned."""
    config = ShardingConfiguration(mesh, reproducible=reproducible)
    optimizer, on_host = (strategy(SGD(lr=0.5, momentum=0.5), config) for _ in range(2))
    host, there = np.ones(SIZE, np.float32), device.put(np.ones(SIZE, np.float32))
    for step in range(3):
        own = np.arange(SIZE, dtype=np.float32) + mesh.rank + step
        new, gradient = device.put(own), device.put(np.full(SIZE, OLD, np.float32))
        device.be_late()
        gradient[...] = new
        optimizer.step(there, gradient)
        on_host.step(host, own)
        check(there, host)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints(mesh, folder, device, asynchronous):
    """The file has the new values, also where the array is written to again before it is there."""
    specs = (ParameterSpec("weight", (SIZE,)),)
    pieces = (Piece("weight", ((0, SIZE),), 0),)
    counted = pieces if mesh.rank == 0 else ()
    live, new = device.put(np.full(SIZE, float(OLD))), device.put(np.arange(SIZE, dtype=float))
    facts = {"step": 1}
    with Checkpoints(folder / "run", mesh, asynchronous=asynchronous) as checkpoints:
        device.be_late()
        live[...] = new
        checkpoints.save(RunState(specs, (Shard("parameters", live, pieces, counted),), facts))
        live.fill(OLD)
        checkpoints.wait()
        found = np.zeros(SIZE)
        checkpoints.load(RunState(specs, (Shard("parameters", found, pieces, counted),), dict(facts)))
    assert np.array_equal(found, np.arange(SIZE))


@pytest.mark.parametrize("device", [pytest.param("cupy", marks=pytest.mark.hardware)], indirect=True)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_what_other_frameworks_are_handed(device, framework):
    """And what they hand back, on their current stream."""
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch finds no GPU")
        from mpishard.torch.memory import as_array, as_tensor, finish_stream
    else:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        if jax.default_backend() not in ("gpu", "cuda"):
            pytest.skip("this JAX finds no GPU")
        from mpishard.jax.tree import as_array, as_jax

    array = device.put(np.full(SIZE, OLD, np.float32))
    device.be_late()
    array.fill(3)
    if framework == "torch":
        tripled = as_tensor(array) * 3
        finish_stream(tripled)
        back = as_array(tripled)
    else:
        back = as_array(as_jax(array) * 3, array)
    check(back, np.full(SIZE, 9))
