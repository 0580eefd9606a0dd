"""A model without layers, laid out over any mesh: specs of every kind, and gradients whose sum is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI
from steps import write_gradients

import mpishard
from mpishard import DDPOptimizer, ShardingConfiguration
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import FlatParameters

LAYERS = 4


def factorisations(ranks):
    """``(data, tensor, pipeline)``, all of them."""
    return [
        (data, tensor, ranks // data // tensor)
        for data in range(1, ranks + 1)
        if ranks % data == 0
        for tensor in range(1, ranks // data + 1)
        if ranks // data % tensor == 0
    ]


def meshes(base):
    """The ranks of a data-parallel mesh in every shape; on many ranks in a few, for the time it takes."""
    shapes = factorisations(base.size)
    for data, tensor, pipeline in shapes if base.size <= 4 else shapes[:1] + shapes[2::3]:
        yield base.reshaped(data=data, tensor=tensor, pipeline=pipeline)


def specs(stages=1):
    """Layers dealt out to stages, of which some may get none, and ties between the first stage and the last."""
    ties = (stages - 1,) if stages > 1 else ()
    found = [
        ParameterSpec("table", (7, 3), tensor_dim=0, copies=ties),
        ParameterSpec("gain", (), partial=True, copies=ties),
    ]
    for layer in range(LAYERS):
        stage = layer * stages // LAYERS
        found += [
            ParameterSpec(f"{layer}.norm", (4,), stage, partial=True),
            ParameterSpec(f"{layer}.wide", (3, 5), stage, tensor_dim=1),
            ParameterSpec(f"{layer}.none", (0, 2), stage, tensor_dim=layer % 2),
            ParameterSpec(f"{layer}.bias", (2,), stage),
            ParameterSpec(f"{layer}.shift", (3,), stage, partial=True),
        ]
    return found


def units():
    """Names of each layer; the rest is a unit too."""
    layers = [[spec.name for spec in specs() if spec.name.startswith(f"{layer}.")] for layer in range(LAYERS)]
    return [["table", "gain"], *layers]


SIZES = [spec.size for spec in specs()]
SIZE = sum(SIZES)
START = np.linspace(-1, 1, SIZE)


def tensors(whole):
    """The tensors of a flat array of the whole model."""
    parts = np.split(whole, np.cumsum(SIZES)[:-1])
    return {spec.name: part.reshape(spec.shape) for spec, part in zip(specs(), parts, strict=True)}


def model(mesh, chunks=1, start=START, **options):
    """The parameters of this rank, as a model has them."""
    parameters = FlatParameters(
        specs(mesh.pipeline.size * chunks), np.float64, place=mesh.place, units=units(), **options
    )
    whole = tensors(start)
    for name in parameters:
        parameters.assign(name, slice_of(whole[name], parameters.box(name)))
    return parameters


def slice_of(tensor, box):
    return tensor[(*(slice(*run) for run in box), ...)]


def whole_gradient(step, data_rank, data_size):
    """Small whole numbers, of which sums are exact in any order."""
    return np.random.default_rng([step, data_rank, data_size]).integers(-8, 9, SIZE).astype(float)


def local_gradient(parameters, mesh, step):
    """What this rank's backward pass finds: its slices, and a term of the sum for partial and tied tensors."""
    whole = tensors(whole_gradient(step, mesh.data.rank, mesh.data.size))
    parts = [np.empty(0)]
    for spec, piece in zip(parameters.local, parameters.pieces, strict=True):
        part = slice_of(whole[spec.name], piece.box)
        holders = mesh.place.holders(spec)
        terms = len(holders) * (mesh.tensor.size if spec.partial else 1)
        number = holders.index(mesh.pipeline.rank) * (mesh.tensor.size if spec.partial else 1)
        number += mesh.tensor.rank if spec.partial else 0
        parts.append((part - 2 * sum(range(terms)) if number == 0 else np.full(part.shape, 2.0 * number)).ravel())
    return np.concatenate(parts)


def one_pass(parameters, mesh, step):
    """A forward and a backward pass, as far as parameters and gradients see them."""
    local = [[name for name in unit if name in parameters] for unit in units()]
    local = [unit for unit in local if unit] or [[]]
    for order in (local, local[::-1]):
        for unit, following in zip(order, [*order[1:], []], strict=True):
            parameters.use(unit)
            parameters.prefetch(following)
            for name in unit:
                assert parameters[name].shape == tuple(stop - start for start, stop in parameters.box(name))
            parameters.release(unit)
    write_gradients(parameters, local_gradient(parameters, mesh, step))


def train(optimizer, parameters, steps=range(3), as_array=False):
    norms = []
    for step in steps:
        if as_array:
            optimizer.step(parameters, local_gradient(parameters, optimizer.mesh, step))
        else:
            one_pass(parameters, optimizer.mesh, step)
            optimizer.step(parameters)
        norms.append(optimizer.gradient_norm)
    return norms


def gathered(parameters, config):
    """All parameters of the model, in one flat array."""
    wrapped = mpishard.as_distributed(SimpleNamespace(parameters=parameters), config)
    return wrapped.gather_full_parameters()


@dataclass(frozen=True)
class Run:
    """Where a run has come to."""

    parameters: np.ndarray
    norms: list[float]
    state: bytes


@functools.cache
def alone_here(rule, data_size, first=0, last=3, limit=None, chain=None):
    """Steps on one rank, with the sum of the gradients of a number of data ranks.

    With `chain`, the run goes on where the first steps of a run along the gradients of that many data ranks ended.
    """
    before = alone_here(rule, chain, 0, first, limit) if chain else None
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        parameters = model(mesh, start=before.parameters if before else START)
        optimizer = DDPOptimizer(rule, ShardingConfiguration(mesh, max_gradient_norm=limit))
        if before:
            optimizer.deserialize(before.state)
        norms = []
        for step in range(first, last):
            total = sum(whole_gradient(step, rank, data_size) for rank in range(data_size))
            optimizer.step(parameters, total, count=data_size)
            norms.append(optimizer.gradient_norm)
        return Run(parameters.flat.copy(), norms, optimizer.serialize())


def alone(mesh, *arguments, **options):
    """The same, found on rank 0 for all.  Collective over the mesh."""
    return mesh.world.comm.bcast(alone_here(*arguments, **options) if mesh.rank == 0 else None)
