"""Tokens from files on ranks: one training run on any number of them, and one error on all."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import nn
from mpishard.data import Mixture, ReadAhead, TextFile, TokenData, TokenFile


def write(mesh, path, values, dtype="u2"):
    if mesh.rank == 0:
        np.asarray(values).astype(dtype).tofile(path)
    mesh.world.barrier()
    return TokenFile(path, dtype)


@pytest.mark.usefixtures("without_debug")
def test_a_mixture_trains_alike_on_any_ranks(mesh, folder):
    values = np.random.default_rng(0).integers(0, 20, (2, 700))
    sources = [write(mesh, folder / f"{name}.bin", row) for name, row in zip("ab", values, strict=True)]

    def losses(ranks, reader=None):
        with mpishard.Mesh(ranks) as own:
            data = TokenData(Mixture(sources, [0.7, 0.3], seed=1), 8, vocabulary_size=20, mesh=own)
            model = nn.GPT(vocabulary_size=20, context_length=8, width=8, layers=1, heads=2, mesh=own)
            config = mpishard.ShardingConfiguration(own, reproducible=True)
            batch = data.batch if reader is None else reader.of(data.batch)
            options = dict(samples=len(data), batch_size=24, steps=8, tokens_per_sample=data.tokens_per_sample)
            problem = mpishard.OptimizationProblem.for_model(model, batch, **options)
            optimizer = mpishard.ZeRO1Optimizer(mpishard.Adam(lr=1e-2), config)
            return optimizer.optimize(problem, progress=False).loss_history

    expected = losses(MPI.COMM_SELF).tolist()
    assert losses(mesh.world.comm).tolist() == expected
    reader = Reader()
    assert losses(mesh.world.comm, reader).tolist() == expected
    # What is expected is what is asked for, on each rank and in each step.
    assert set(reader.asked) <= set(reader.expected)
    assert len(reader.asked) == 8 * (16 // mesh.size + (mesh.rank < 16 % mesh.size))


class Reader:
    """Notes what a run expects and asks for, around a reader."""

    def __init__(self):
        self.expected, self.asked = [], []

    def of(self, batch):
        self.ahead = ReadAhead(batch)
        return self

    def expect(self, micro_batches):
        self.expected += [samples.tobytes() for samples in micro_batches]
        self.ahead.expect(micro_batches)

    def __call__(self, samples):
        self.asked.append(samples.tobytes())
        return self.ahead(samples)


@pytest.mark.parametrize("strategy", [mpishard.ZeRO1Optimizer, mpishard.ZeRO2Optimizer])
@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {}])
@pytest.mark.usefixtures("without_debug")
def test_what_a_rank_reads_is_expected(mesh, strategy, options):
    reader = Reader().of(lambda samples: (samples[:, None] % 20, samples[:, None] % 20))
    model = nn.GPT(vocabulary_size=20, context_length=1, width=8, layers=1, heads=2, mesh=mesh)
    problem = mpishard.OptimizationProblem.for_model(model, reader, samples=50, batch_size=20, steps=7, **options)
    strategy(mpishard.SGD(lr=0.1), mesh).optimize(problem, progress=False)
    assert {asked for asked in reader.asked if asked} <= set(reader.expected)
    assert any(map(any, mesh.world.allgather_object(reader.asked)))  # not on all ranks, if there are many


def test_errors_are_on_all_ranks(mesh, folder):
    last = mesh.size - 1
    here = folder / ("absent.bin" if mesh.rank == last else "a.bin")
    write(mesh, folder / "a.bin", np.arange(1000) % 50)
    with pytest.raises(FileNotFoundError, match=r"absent\.bin does not exist"):
        TokenData(TokenFile(here), 10, mesh=mesh)
    with pytest.raises(TypeError, match="context_length='ten'"):
        TokenData(TokenFile(folder / "a.bin"), "ten" if mesh.rank == last else 10, mesh=mesh)
    if mesh.size > 1:
        with pytest.raises(ValueError, match=rf"digest .*sources\[0\] is .* on rank {last}"):
            TokenData(TextFile(folder / "a.bin", lambda text: [int(mesh.rank == last)] * 30), 10, mesh=mesh)
        with pytest.raises(ValueError, match=rf"dtype of sources\[0\] is <u2 on rank.* 0.*, <i2 on rank {last}"):
            TokenData(TokenFile(folder / "a.bin", "<i2" if mesh.rank == last else "<u2"), 10, mesh=mesh)
        with pytest.raises(ValueError, match=f"context_length is 10 on rank.* 0.*, 11 on rank {last}"):
            TokenData(TokenFile(folder / "a.bin"), 11 if mesh.rank == last else 10, mesh=mesh)


def test_a_token_outside_of_the_vocabulary_is_found_by_some_rank(mesh, folder):
    values = np.arange(1000) % 50
    values[[777, 778]] = 50  # in the share of one rank, on up to 8 of them
    source = write(mesh, folder / "a.bin", values)
    with pytest.raises(ValueError, match=r"a\.bin: token 50 at position 777"):
        TokenData(source, 10, vocabulary_size=50, mesh=mesh)
    assert len(TokenData(source, 10, vocabulary_size=51, mesh=mesh)) == 99
