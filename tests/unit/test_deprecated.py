"""Public names that have changed: the old ones work, and say so once, on rank 0."""

from __future__ import annotations

import warnings
from operator import attrgetter

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import deprecated
from mpishard.data_parallel import renamed_members


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecated, "_warned", set())


def test_a_class() -> None:
    with pytest.warns(DeprecationWarning, match=r"mpishard\.Pending is called mpishard\.Request now") as caught:
        assert mpishard.Pending is mpishard.Request
    assert caught[0].filename == __file__
    assert "Pending" not in dir(mpishard)


def test_methods() -> None:
    parameters = mpishard.FlatParameters([mpishard.ParameterSpec("w", (2,))], np.float64)
    with pytest.warns(DeprecationWarning, match=r"FlatParameters\.finished is called FlatParameters\.mark_ready now"):
        parameters.finished("w")
    with pytest.warns(DeprecationWarning, match=r"FlatParameters\.layout\.gradient_runs now") as caught:
        assert parameters.gradient_runs(by_unit=True) == parameters.layout.gradient_runs(by_unit=True)
    assert caught[0].filename == __file__
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        with pytest.warns(DeprecationWarning, match=r"Axis\.exchange is called Axis\.allgather_object now") as caught:
            assert mesh.world.exchange(3) == [3]
        assert caught[0].filename == __file__
        with pytest.warns(DeprecationWarning, match=r"Axis\.agree is called Axis\.raise_if_any now"):
            mesh.world.agree(None)


def test_a_method_of_compressors() -> None:
    class Maker:
        def of_pieces(self, compressor: object) -> object:
            return compressor

    compressor = mpishard.compression.SignCompressor()
    with pytest.warns(DeprecationWarning, match=r"Compressor\.make_reducer is called Compressor\.make_sums now"):
        assert compressor.make_reducer(Maker()) is compressor


def test_the_virtual_stage_of_a_chunk() -> None:
    model = mpishard.nn.GPT(11, 6, 8, 2, 2)
    with pytest.warns(DeprecationWarning, match=r"Chunk\.stage is called Chunk\.virtual_stage now"):
        assert model.chunks[0].stage == model.chunks[0].virtual_stage == 0


def test_members_of_an_optimizer_behind_its_state() -> None:
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mesh)
        optimizer.step(np.ones(2), np.ones(2))
        name = r"ShardedOptimizer\.run_state is called ShardedOptimizer\.state\.capture now"
        with pytest.warns(DeprecationWarning, match=name) as caught:
            assert optimizer.run_state().facts["steps"] == 1
        assert caught[0].filename == __file__
        with pytest.warns(DeprecationWarning):
            assert optimizer.gradient_bytes == optimizer.state.gradient_bytes
        assert not hasattr(optimizer, "learning_rate")
        assert all(attrgetter(new)(optimizer) is not None for new in renamed_members.RENAMED.values())


def test_once_a_process() -> None:
    with mpishard.Mesh(MPI.COMM_SELF) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [mesh.world.exchange(number) for number in range(3)] == [[0], [1], [2]]
    assert len(caught) == 1


def test_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        rank = 1

    monkeypatch.setattr(MPI, "COMM_WORLD", Elsewhere())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mpishard.Pending is mpishard.Request


@pytest.mark.parametrize("old, new", [("stem", "embeddings"), ("top", "output_head")])
def test_units_of_a_model(old: str, new: str) -> None:
    architecture = mpishard.nn.Architecture(11, 6, 8, 2, 2)
    with pytest.warns(DeprecationWarning, match=f'the unit "{old}" of a model is called "{new}" now') as caught:
        unit = architecture.build(old)
    assert (unit.name, caught[0].filename) == (new, __file__)
