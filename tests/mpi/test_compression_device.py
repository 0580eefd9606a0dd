"""Compressed gradients in memory that the host cannot touch: the same training as with NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from steps import STRATEGIES

from mpishard import AdamW, FlatParameters, ParameterSpec, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PowerSGDCompressor,
    SignCompressor,
    TopKCompressor,
)

COMPRESSORS = [
    Float16Compressor(),
    BFloat16Compressor(),
    Int8Compressor(block=16),
    SignCompressor(block=12),
    TopKCompressor(0.05),
]
SIZE, STEPS = 211, 6


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize(("strategy", "dtype"), [(STRATEGIES[0], np.float64), (STRATEGIES[2], np.float32)])
def test_the_same_as_on_the_host(mesh, device, strategy, compressor, dtype):
    """Several buckets, uneven parts; a step whose gradient is not finite is skipped."""
    found = []
    for place in (np.copy, device.put):
        configuration = ShardingConfiguration(
            mesh, gradient_compressor=compressor, minimum_parameter_group_size=50, nonfinite_gradients="skip"
        )
        optimizer = strategy(AdamW(lr=0.01), configuration)
        parameters = place(np.ones(SIZE, dtype))
        for step in range(STEPS):
            gradient = np.random.default_rng([step, mesh.rank]).standard_normal(SIZE).astype(dtype)
            if step == 3 and mesh.rank == mesh.size - 1:
                gradient[17] = np.inf
            optimizer.step(parameters, place(gradient))
        assert optimizer.skipped_steps == 1
        found.append(arrays.to_host(parameters))
    np.testing.assert_array_equal(*found)
    assert (found[0] != 1).all()


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[2]])
def test_products_of_thin_matrices(mesh, device, strategy):
    """PowerSGD, whose products are those of the arrays' own library."""
    specs = [ParameterSpec("matrix", (12, 10)), ParameterSpec("vector", (SIZE - 120,))]
    found = []
    for place in (np.copy, device.put):
        configuration = ShardingConfiguration(mesh, gradient_compressor=PowerSGDCompressor(2))
        optimizer, parameters = strategy(AdamW(lr=0.01), configuration), place(np.ones(SIZE))
        named = FlatParameters.over(parameters, specs)
        optimizer.bind(named)
        for step in range(STEPS):
            optimizer.step(named, place(np.random.default_rng([step, mesh.rank]).standard_normal(SIZE)))
        found.append(arrays.to_host(parameters))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    assert (found[0] != 1).all()
