"""Sums by nodes: the same as over all ranks at once, with less between the nodes."""

from __future__ import annotations

import numpy as np
import pytest
from steps import SPECS, gradients, start, train

from mpishard import AdamW, DDPOptimizer, FlatParameters, Mesh, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.reduction.hierarchical import node_axes, nodes_of_data

SIZE = 601


def sent(mesh, axis):
    """Bytes of gradients that this rank has sent on an axis, by the beginning of its name."""
    return sum(
        total["bytes"] for name, total in mesh.ledger.summary().items() if name.startswith(axis) and "gradients" in name
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("nodes", [True, 2, 3, 4])
def test_the_sum_is_the_same_to_the_last_bit(mesh, same_on_all, nodes, overlap):
    found = []
    for hierarchical in (False, nodes):
        config = ShardingConfiguration(
            mesh,
            hierarchical=hierarchical,
            overlap_communication=overlap,
            minimum_parameter_group_size=10,
            max_gradient_norm=0.5,
        )
        flat = start(sum(spec.size for spec in SPECS))
        optimizer = DDPOptimizer(AdamW(lr=0.1), config)
        optimizer.bind(FlatParameters.over(flat, SPECS))
        found.append(train(optimizer, flat).tobytes())
        by_nodes = isinstance(hierarchical, int) and hierarchical > 1 and mesh.size % hierarchical == 0
        assert (sent(mesh, "data across nodes") > 0) == (by_nodes and mesh.size > hierarchical)
    assert found[0] == found[1]
    assert same_on_all(found)


def test_bytes_between_nodes(mesh):
    """With n ranks on m nodes, ``2 (m - 1) / n`` of the gradient, where a sum at once sends ``2 (n - 1) / n``."""
    size = 64 * mesh.size
    config = ShardingConfiguration(mesh, hierarchical=2)
    flat = start(size)
    DDPOptimizer(AdamW(), config).step(flat, gradients(0, mesh.size, size)[mesh.rank])
    nodes = mesh.size // 2
    if mesh.size % 2 or nodes < 2:
        assert sent(mesh, "data across") == 0
        assert sent(mesh, "data") == 2 * (mesh.size - 1) * 4 * size // mesh.size
    else:
        assert sent(mesh, "data across") == 2 * (nodes - 1) * 4 * size // mesh.size
        assert sent(mesh, "data within") == 4 * size  # half of it each way


def test_device_arrays(mesh, device):
    config = ShardingConfiguration(mesh, hierarchical=2)
    host, optimizer = start(SIZE), DDPOptimizer(AdamW(lr=0.1), config)
    train(optimizer, host)
    there = device.put(start(SIZE))
    optimizer = DDPOptimizer(AdamW(lr=0.1), config)
    for step in range(3):
        gradient = device.put(gradients(step, mesh.size, SIZE)[mesh.rank])
        assert arrays.is_device(gradient)
        optimizer.step(there, gradient)
    assert np.array_equal(arrays.to_host(there), host)


def test_nodes(comm, mesh):
    assert mesh.nodes == [0] * mesh.size  # one machine
    assert nodes_of_data(mesh, True) == [0] * mesh.size
    assert node_axes(mesh, True) is None
    even = mesh.size % 2 == 0 and mesh.size > 2
    assert nodes_of_data(mesh, 2) == ([rank // 2 for rank in range(mesh.size)] if even else [0] * mesh.size)
    axes = node_axes(mesh, 2)
    assert (axes is not None) == even
    if axes is not None:
        assert axes.within.members == [mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1]
        assert axes.across.members == list(range(mesh.rank % 2, mesh.size, 2))
        assert node_axes(mesh, 2) == axes
    if mesh.size == 8:
        with Mesh(comm, tensor=2) as halves:
            axes = node_axes(halves, 2)
            assert axes is not None
            first = mesh.rank // 4 * 4 + mesh.rank % 2
            assert axes.within.members == [first, first + 2]


def test_what_it_refuses(mesh):
    for wrong in (1, -2, 0.5, "2"):
        with pytest.raises(ValueError, match="hierarchical=.* must be True, False, or a number of ranks above 1"):
            ShardingConfiguration(mesh, hierarchical=wrong)
    with pytest.raises(ValueError, match="reproducible=True sums in one order"):
        ShardingConfiguration(mesh, hierarchical=True, reproducible=True)
