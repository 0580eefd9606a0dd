"""serialize and deserialize: any number of ranks, any strategy, and nothing but what serialize wrote."""

from __future__ import annotations

import io
import itertools

import h5py
import numpy as np
import pytest
from grid_cases import every_pair
from mpi4py import MPI

import mpishard
from mpishard import LAMB, SGD, Adagrad, Adam, AdamW, DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer, nn
from mpishard.data_parallel.full_state import decode
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.flat import FlatParameters

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]
SPECS = [ParameterSpec("layer.a", (3, 5)), ParameterSpec("layer/b", (0,)), ParameterSpec("c", (1,))]


def gradient(step):
    return np.random.default_rng(step).integers(-8, 9, 16).astype(np.float64)


def run(optimizer, flat, steps):
    """Every rank has the same gradient, so that any number of ranks takes the same steps."""
    parameters = FlatParameters.over(flat, SPECS)
    for step in steps:
        optimizer.step(parameters, gradient(step))
    return optimizer


@pytest.mark.parametrize("rule", [SGD(lr=0.1, momentum=0.9), Adam(lr=0.1, amsgrad=True), LAMB(lr=0.1), SGD(lr=0.1)])
def test_state_moves_between_strategies_and_numbers_of_ranks(comm, short, rule, same_on_all):
    moves = list(itertools.product(STRATEGIES, STRATEGIES, ("all to all", "all to one", "one to all")))
    if short:
        moves = every_pair(moves, lambda move: dict(enumerate(move)))
    with mpishard.Mesh(MPI.COMM_SELF) as single, mpishard.Mesh(comm) as mesh:
        meshes = {"all": mesh, "one": single}
        expected = np.linspace(-1, 1, 16)
        run(DDPOptimizer(rule, single), expected, range(6))
        for before, after, sizes in moves:
            mesh_before, mesh_after = (meshes[size] for size in sizes.split(" to "))
            flat = np.linspace(-1, 1, 16)
            data = run(before(rule, mesh_before), flat, range(3)).serialize()
            assert same_on_all(data)
            optimizer = after(rule, mesh_after)
            optimizer.deserialize(data)
            assert optimizer.serialize() == data  # before it is bound to parameters
            run(optimizer, flat, range(3, 6))
            assert np.array_equal(flat, expected)
            assert optimizer.steps == 6


def test_deserialize_into_a_running_optimizer(mesh):
    flat = np.linspace(-1, 1, 16)
    optimizer = run(ZeRO1Optimizer(AdamW(lr=0.1), mesh), flat, range(3))
    data, saved = optimizer.serialize(), flat.copy()
    run(optimizer, flat, range(3, 6))
    after = flat.copy()
    flat[:] = saved
    optimizer.deserialize(data)
    run(optimizer, flat, range(3, 6))
    assert np.array_equal(flat, after)


def test_the_bytes_are_an_hdf5_file_that_anybody_can_read(mesh):
    optimizer = run(ZeRO2Optimizer(AdamW(lr=0.1), mesh), np.linspace(-1, 1, 16), range(3))
    with h5py.File(io.BytesIO(optimizer.serialize()), "r") as file:
        assert file.attrs["steps"] == 3
        assert file.attrs["rule"] == "AdamW"
        moment = file["slots/exp_avg/layer.a"][()]
    assert moment.shape == (3, 5)
    expected = np.zeros(16)
    for step in range(3):
        expected = 0.9 * expected + 0.1 * gradient(step)
    assert np.allclose(moment.ravel(), expected[:15], rtol=1e-12)


def image(mesh):
    return run(DDPOptimizer(AdamW(lr=0.1), mesh), np.linspace(-1, 1, 16), range(2)).serialize()


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: data[:-1], ValueError, "cut short"),
        (lambda data: data[: len(data) // 2], ValueError, "cut short"),
        (lambda data: data[:100], ValueError, "no optimizer state of mpishard"),
        (lambda data: b"", ValueError, "no optimizer state of mpishard"),
        (lambda data: data + b"\0", ValueError, "cut short or padded"),
        (lambda data: b"\x89HDF\r\n\x1a\n" + bytes(5000), ValueError, "no optimizer state of mpishard"),
        (lambda data: data[:3000] + bytes([data[3000] ^ 1]) + data[3001:], ValueError, "damaged"),
        (lambda data: data.decode("latin-1"), TypeError, "takes the bytes that serialize returned, got str"),
        (lambda data: None, TypeError, "got NoneType"),
    ],
)
def test_bad_bytes_on_one_rank_raise_on_all(mesh, bound, change, error, message):
    data = image(mesh)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    if bound:
        run(optimizer, np.linspace(-1, 1, 16), range(2))
    with pytest.raises(error, match=message):
        optimizer.deserialize(change(data) if mesh.rank == mesh.size - 1 else data)
    if bound:
        assert optimizer.serialize() == data
    else:
        assert optimizer.steps == 0


def test_every_flipped_bit_is_noticed(mesh):
    if mesh.rank:
        pytest.skip("one rank is enough to read: all of them call `decode`")
    with mpishard.Mesh(MPI.COMM_SELF) as single:
        data = bytearray(image(single))
    random = np.random.default_rng(0)
    for place in (*random.integers(0, 512, 100), *random.integers(512, len(data), 200)):
        bit = 1 << int(random.integers(8))
        data[place] ^= bit
        with pytest.raises(ValueError):
            decode(bytes(data))
        data[place] ^= bit
    assert decode(bytes(data)).steps == 2


def test_state_of_another_rule_or_of_other_options(mesh):
    data = image(mesh)
    with pytest.raises(ValueError, match="of the rule AdamW .* has Adagrad"):
        DDPOptimizer(Adagrad(lr=0.1), mesh).deserialize(data)
    with pytest.raises(ValueError, match="max_exp_avg_sq"):
        DDPOptimizer(AdamW(lr=0.1, amsgrad=True), mesh).deserialize(data)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_of_other_parameters(mesh, strategy):
    data = image(mesh)
    other = FlatParameters([ParameterSpec("layer.a", (5, 3)), *SPECS[1:]], np.float64)
    bound = strategy(AdamW(lr=0.1), mesh)
    bound.step(other, np.ones(16))
    with pytest.raises(ValueError, match=r"of other parameters: .*\(3, 5\).*\(5, 3\); make the model"):
        bound.deserialize(data)
    unbound = strategy(AdamW(lr=0.1), mesh)
    unbound.deserialize(data)
    with pytest.raises(ValueError, match="of other parameters"):
        unbound.step(other, np.ones(16))
    single = FlatParameters(SPECS, np.float32)
    with pytest.raises(ValueError, match="the state is float64, but the parameters are float32"):
        unbound.step(single, np.ones(16, np.float32))


def test_no_state_before_the_first_step(mesh):
    with pytest.raises(ValueError, match="before the first step"):
        DDPOptimizer(AdamW(lr=0.1), mesh).serialize()


def test_the_state_of_a_gpt(mesh):
    """Its specs say more than names and shapes."""
    model = nn.GPT(vocabulary_size=7, context_length=4, width=4, layers=1, heads=1, dtype=np.float64)
    tokens = np.arange(8).reshape(2, 4) % 7
    optimizer = ZeRO1Optimizer(AdamW(lr=0.1), mesh)
    model.loss_and_gradient(tokens, tokens)
    optimizer.step(model.parameters)
    data = optimizer.serialize()
    optimizer.deserialize(data)
    fresh = ZeRO2Optimizer(AdamW(lr=0.1), mesh)
    fresh.deserialize(data)
    model.loss_and_gradient(tokens, tokens)
    model.parameters.gradients.finalize()
    assert optimizer.serialize() == data


def test_names_that_look_like_folders(mesh):
    specs = [
        ParameterSpec("a", (2,)),
        ParameterSpec("a/b", (3,)),
        ParameterSpec(".", (1,)),
        ParameterSpec("a%2Fb", (1,)),
    ]
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    optimizer.step(FlatParameters(specs, np.float64), np.arange(7.0))
    again = DDPOptimizer(AdamW(lr=0.1), mesh)
    again.deserialize(optimizer.serialize())
    again.step(FlatParameters(specs, np.float64), np.arange(7.0))
    assert again.steps == 2


def test_skipped_steps_are_part_of_the_state(mesh):
    config = mpishard.ShardingConfiguration(mesh, nonfinite_gradients="skip")
    optimizer = DDPOptimizer(SGD(lr=0.1), config)
    flat = np.zeros(3)
    for value in (1.0, np.nan, 1.0):
        optimizer.step(flat, np.full(3, value))
    again = DDPOptimizer(SGD(lr=0.1), config)
    again.deserialize(optimizer.serialize())
    assert (again.steps, again.skipped_steps, again.clock) == (2, 1, 3)
