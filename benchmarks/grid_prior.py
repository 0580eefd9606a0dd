"""mpiexec -n 2 python benchmarks/grid_prior.py

A sample of `BiLaplacianPrior` on grids that the ranks share in slabs: seconds of this process's CPU, the least of some
repeats, on the slowest rank.  On one rank beside SciPy: cosine transforms, which are the eigenvectors of the operator,
and a sparse factorisation with its set-up, where memory allows it.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # read when NumPy is imported

import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI
from scipy import fft, sparse
from scipy.sparse.linalg import splu

from mpishard import BiLaplacianPrior, FlatParameters, Mesh, ParameterSpec

GRIDS = {(48, 48): 10.0, (256, 256): 20.0, (40, 40, 40): 8.0, (64, 64, 64): 10.0}
MOST = 2e5  # cells of a grid that is factorised


def least(call: Callable[[np.ndarray], Any], argument: np.ndarray, repeats: int = 10) -> float:
    """Seconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call(argument)
        times.append(time.process_time() - start)
    return MPI.COMM_WORLD.allreduce(min(times), op=MPI.MAX)


def operator(prior: BiLaplacianPrior) -> sparse.csc_matrix:
    """A of the prior, of the same correlation length in all dimensions."""
    shape, dimensions = prior.shape, len(prior.shape)
    weight = prior.correlation_length[0] ** 2 / (8 * (2 - dimensions / 2))
    found = sparse.identity(prod(shape))
    for dim, extent in enumerate(shape):
        differences = sparse.diags([-1.0, 1.0], [0, 1], (extent - 1, extent))
        parts = sparse.identity(prod(shape[:dim])), differences.T @ differences, sparse.identity(prod(shape[dim + 1 :]))
        found = found + weight * sparse.kron(parts[0], sparse.kron(*parts[1:]))
    return found.tocsc()


def beside_scipy(prior: BiLaplacianPrior) -> str:
    white = np.random.default_rng(0).standard_normal(prior.shape)
    waves = [(2 * np.sin(np.pi * np.arange(extent) / (2 * extent))) ** 2 for extent in prior.shape]
    weight = prior.correlation_length[0] ** 2 / (8 * (2 - len(prior.shape) / 2))
    values = 1 + weight * sum(np.meshgrid(*waves, indexing="ij"))

    def by_cosines(white: np.ndarray) -> np.ndarray:
        return fft.idctn(fft.dctn(white, norm="ortho") / values, norm="ortho")

    found = f"{least(by_cosines, white):.4f} by cosines"
    if prod(prior.shape) < MOST:
        matrix = operator(prior)
        start = time.process_time()
        factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
        setup = time.process_time() - start
        found += f"; {least(factors.solve, white.ravel()):.4f} by a sparse factorisation, after {setup:.2f} s and "
        found += f"in {24e-6 * factors.L.nnz:.0f} MB"
    return found


with Mesh(tensor=MPI.COMM_WORLD.size) as mesh:
    for shape, length in GRIDS.items():
        field = FlatParameters([ParameterSpec("x", shape, tensor_dim=0)], np.float64, place=mesh.place)
        prior = BiLaplacianPrior(shape, correlation_length=length)
        white = np.random.default_rng(mesh.rank).standard_normal(field["x"].shape)
        own = prior.on(field, mesh)
        own.factor(white)  # compiled
        text = f"{shape}, length {length:g}: {least(own.factor, white):.4f} s"
        more = f"; {beside_scipy(prior)}" if mesh.size == 1 else ""
        if mesh.rank == 0:
            print(text + more, flush=True)
