"""Functions of JAX on ranks, with rules of mpishard and transformations of optax, beside JAX alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import (
    AdamW,
    Checkpoints,
    DDPOptimizer,
    ElasticOptimizer,
    LocalSGDOptimizer,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
)
from mpishard.data.sampling import Sampler

jax = pytest.importorskip("jax", reason="JAX is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = jax.numpy
SAMPLES, BATCH, STEPS = 48, 16, 6


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 5)).astype("f")
    return x, np.tanh(x @ random.standard_normal(5).astype("f"))


def start(seed=1):
    random = np.random.default_rng(seed)
    return {
        "hidden": {"w": 0.5 * random.standard_normal((5, 7)).astype("f"), "b": jnp.zeros(7)},
        "out": [jnp.asarray(random.standard_normal(7).astype("f"))],
    }


def summed_loss(tree, x, y):
    return jnp.sum((jnp.tanh(x @ tree["hidden"]["w"] + tree["hidden"]["b"]) @ tree["out"][0] - y) ** 2)


VALUE_AND_GRAD = jax.jit(jax.value_and_grad(summed_loss))


def schedule_and_rule():
    def weights(tree):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    return optax.adamw(optax.cosine_decay_schedule(1e-1, 2 * STEPS), weight_decay=0.1, mask=weights)


@pytest.fixture(scope="module")
def rules():
    """Made once: each new one is compiled again."""
    return {"mpishard": AdamW(lr=1e-2), "optax": mpishard.jax.rule_of(schedule_and_rule(), tree=start())}


def forget(rule):
    """The counts of a rule are no longer known, as in a new process."""
    for steps in rule.by_name.values():
        steps.note(0, np.dtype("f"), [])


def problem(data, function=VALUE_AND_GRAD, **changes):
    options = {"samples": SAMPLES, "batch_size": BATCH, "steps": STEPS, "seed": 2, **changes}
    return mpishard.jax.problem(start(), function, lambda own: (data[0][own], data[1][own]), **options)


@pytest.fixture(scope="module")
def alone(data):
    """Losses and parameters of JAX and optax on one rank."""
    transformation, tree, history = schedule_and_rule(), jax.tree.map(jnp.asarray, start()), []
    state, update = transformation.init(tree), jax.jit(transformation.update)
    for step in range(1, STEPS + 1):
        own = Sampler(SAMPLES, BATCH, 2).batch(step)
        loss, gradients = VALUE_AND_GRAD(tree, data[0][own], data[1][own])
        updates, state = update(jax.tree.map(lambda g: g / BATCH, gradients), state, tree)
        tree = optax.apply_updates(tree, updates)
        history.append(float(loss) / BATCH)
    return np.array(history), tree


def same(one, other, **tolerance):
    return jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, **tolerance), one, other))


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_loop_of_the_users_own(mesh, data, alone, folder, rules, zero):
    """Its steps are those of optax on one rank, also after a checkpoint that another `zero` reads."""
    config = ShardingConfiguration(mesh, minimum_parameter_group_size=16)
    rule = schedule_and_rule() if zero == 1 else rules["optax"]
    optimizer = mpishard.jax.as_distributed(start(1 + mesh.rank), config, rule, zero=zero)
    tree, losses = optimizer.tree, []  # rank 0's
    for step in range(1, STEPS + 1):
        if step == 4:
            optimizer.save_checkpoint(folder)
            forget(rules["optax"])
            optimizer = mpishard.jax.as_distributed(start(3), config, rules["optax"], zero=2 - zero)
            optimizer.load_checkpoint(folder)
            assert same(tree, optimizer.tree, rtol=0, atol=0)
            tree = optimizer.tree
        own = np.array_split(Sampler(SAMPLES, BATCH, 2).batch(step), mesh.size)[mesh.rank]
        loss, gradients = VALUE_AND_GRAD(tree, data[0][own], data[1][own])
        before = jax.tree.map(np.copy, tree)
        after = optimizer.step(gradients, count=BATCH)
        assert same(tree, before, rtol=0, atol=0)  # arrays of JAX do not change
        tree = after
        losses.append(sum(mesh.world.allgather_object(float(loss))) / BATCH)
    assert np.allclose(losses, alone[0], rtol=1e-5)
    assert same(tree, alone[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("strategy", "micro"), [(DDPOptimizer, 3), (ZeRO1Optimizer, None), (ZeRO2Optimizer, 3)])
def test_a_problem_has_the_losses_of_jax_alone(mesh, data, alone, rules, strategy, micro):
    made = problem(data, micro_batch_size=micro)
    result = strategy(rules["optax"], mesh).optimize(made, progress=False)
    assert np.allclose(result.loss_history, alone[0], rtol=1e-5)
    assert same(mpishard.jax.tree_of(result.parameters), alone[1], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def one_rank(data, rules):
    """The bits of the parameters that one rank trains with a rule, by its name."""

    @functools.cache
    def trained(name):
        with mpishard.Mesh(MPI.COMM_SELF) as mesh:
            config = ShardingConfiguration(mesh, reproducible=True)
            made = problem(data, micro_batch_size=2)
            return DDPOptimizer(rules[name], config).optimize(made, progress=False).parameters.flat.copy()

    return trained


@pytest.mark.parametrize("name", ["mpishard", "optax"])
def test_fewer_ranks_save_and_all_go_on_with_the_bits_of_one(mesh, comm, data, folder, rules, one_rank, name):
    rule = rules[name]
    fewer = comm.Split(comm.rank < max(1, comm.size - 1), comm.rank)
    if comm.rank < max(1, comm.size - 1):
        with mpishard.Mesh(fewer) as part:
            optimizer = ZeRO2Optimizer(rule, ShardingConfiguration(part, reproducible=True))
            with Checkpoints(folder, part) as checkpoints:
                optimizer.optimize(problem(data, micro_batch_size=2, steps=3), progress=False, checkpoints=checkpoints)
    fewer.Free()
    comm.Barrier()
    optimizer = ZeRO1Optimizer(rule, ShardingConfiguration(mesh, reproducible=True))
    with Checkpoints(folder, mesh) as checkpoints:
        task = problem(data, micro_batch_size=2)
        result = optimizer.optimize(task, progress=False, checkpoints=checkpoints, resume=True)
    assert result.resumed_steps == 3
    assert np.array_equal(result.parameters.flat, one_rank(name))


def test_workers_that_leave_and_come_change_no_bit(mesh, data, rules, one_rank):
    optimizer = ElasticOptimizer(ZeRO2Optimizer(rules["optax"], ShardingConfiguration(mesh, reproducible=True)))

    def resize(state):
        if state.step in (2, 4):
            optimizer.resize(1 if state.step == 2 else mesh.size)

    result = optimizer.optimize(problem(data, micro_batch_size=2), callback=resize, progress=False)
    assert np.array_equal(result.parameters.flat, one_rank("optax"))


def test_workers_that_take_steps_by_themselves(mesh, data, same_on_all):
    rule = mpishard.jax.rule_of(optax.sgd(0.02, momentum=0.9))
    result = LocalSGDOptimizer(rule, mesh, sync_every=2).optimize(problem(data, steps=12), progress=False)
    assert result.loss_history[-1] < result.loss_history[0]
    assert same_on_all(result.parameters.flat)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda tree: {"hidden": tree["hidden"]}, ValueError, ".out.0. missing"),
        (lambda tree: jax.tree.map(lambda leaf: leaf * np.nan, tree), FloatingPointError, "NaN|nan"),
    ],
)
def test_gradients_of_one_rank_are_refused_on_all(mesh, data, change, kind, message, zero):
    optimizer = mpishard.jax.as_distributed(start(), mesh, AdamW(lr=1e-2), zero=zero)
    _, gradients = VALUE_AND_GRAD(optimizer.tree, *data)
    for step in (1, 2):
        before = optimizer.parameters.flat.copy()
        last = mesh.rank == mesh.size - 1
        with pytest.raises(kind, match=message):
            optimizer.step(change(gradients) if last else gradients)
        assert np.array_equal(optimizer.parameters.flat, before) and optimizer.optimizer.steps == step - 1
        optimizer.step(gradients)
        assert not np.array_equal(optimizer.parameters.flat, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("tree", "arguments", "kind", "message"),
    [
        ({"n": np.arange(3)}, {}, TypeError, "'n' is int64"),
        (None, {"zero": 3}, ValueError, "zero=3"),
        (None, {"rule": optax.lamb(1e-3)}, ValueError, "mpishard.LAMB has trust ratios"),
        ({"w": np.ones(3, "f")}, {}, ValueError, "as_distributed, but parameters is 3"),
    ],
)
def test_bad_arguments_of_one_rank_are_refused_on_all(mesh, tree, arguments, kind, message):
    last = mesh.rank == mesh.size - 1
    given = {"rule": AdamW(lr=1e-2), **(arguments if last else {})}
    with pytest.raises(kind, match=message):
        mpishard.jax.as_distributed(start() if tree is None or not last else tree, mesh, **given)


def test_a_function_of_one_rank_that_returns_no_scalar_is_refused_on_all(mesh, data):
    def losses(tree, x, y):
        return (x @ tree["hidden"]["w"]).sum(1), tree

    last = mesh.rank == mesh.size - 1
    made = problem(data, losses if last else VALUE_AND_GRAD)
    with pytest.raises(TypeError, match="one real number, got float32"):
        DDPOptimizer(AdamW(lr=1e-2), mesh).optimize(made, progress=False)
