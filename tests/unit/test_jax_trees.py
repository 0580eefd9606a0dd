"""Pytrees of JAX and transformations of optax: what is taken, what is refused, and whether the numbers are theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import standin

import mpishard
from mpishard import FlatParameters, ParameterGroup, ShardingConfiguration
from mpishard.backend.array import backend_of, to_host
from mpishard.data.text import windows

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from mpishard.jax import as_distributed, optax_rule, parameters_of, problem, rule_of, tree_of  # noqa: E402
from mpishard.jax import tree as tree_states  # noqa: E402
from mpishard.jax.tree import TreeLeaves, xla_threads  # noqa: E402


def tree():
    layers = [{"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(3)}]
    return {"layers": layers, "scale": np.float32([2.0]), "none": None}


def test_a_tree_and_back():
    parameters = parameters_of(tree())
    assert list(parameters) == ["layers.0.b", "layers.0.w", "scale"]
    assert parameters.flat.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 2]
    before = tree_of(parameters)
    assert jax.tree.structure(before) == jax.tree.structure(tree())
    assert jnp.from_dlpack(parameters.flat).unsafe_buffer_pointer() == parameters.flat.ctypes.data
    parameters.flat[...] = 7
    assert jax.tree.all(jax.tree.map(np.array_equal, before, tree()))
    assert tree_of(parameters)["layers"][0]["w"].tolist() == [[7] * 3] * 2
    alone = parameters_of(jnp.ones(3))
    assert list(alone) == ["parameters"]
    copy = tree_of(alone)
    alone.flat[...] = 0
    assert copy.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="tree_of .*got a FlatParameters"):
        tree_of(FlatParameters.over(np.zeros(3)))


@pytest.mark.parametrize("first", [0, 1, 2, 4, 7])
def test_programs_of_xla_get_device_arrays_where_they_take_them(first, monkeypatch):
    """On a GPU JAX shares any address, and XLA raises for arguments that begin at no multiple of 16 bytes."""
    monkeypatch.setattr(tree_states, "jnp", SimpleNamespace(from_dlpack=lambda array: array))
    values = np.arange(20, dtype=np.float32)
    part = standin.on_device(values)[first:]
    given = tree_states.as_jax(part)
    address, before = (backend_of(each).address(each) for each in (given, part))
    assert address % 16 == 0 and (address == before) == (first % 4 == 0)
    assert np.array_equal(to_host(given), values[first:])


class MemoryOfXla:
    """Device memory under arrays of JAX, which others get when nobody holds it."""

    def __init__(self):
        self.lent = []

    def as_array(self, values, like):
        self.lent.append(standin.on_device(np.asarray(values)))
        return self.lent[-1]

    def reuse(self):
        for array in self.lent:
            with array.opened() as host:
                host[...] = np.nan


def test_gradients_are_copied_before_others_get_their_memory(monkeypatch):
    """XLA waits for no stream of CuPy's, on which the copies are."""
    xla, state = MemoryOfXla(), tree_states.TreeState(TreeLeaves.of({"a": jnp.zeros(3), "b": jnp.zeros(2)}))
    buffers = {name: standin.zeros(size, np.float32) for name, size in (("a", 3), ("b", 2))}
    reducer = SimpleNamespace(gradient=lambda name: (buffers[name], name == "a"), mark_ready=lambda name: None)
    state.parameters = SimpleNamespace(gradients=reducer, loss_scale=1.0)
    monkeypatch.setattr(tree_states, "as_array", xla.as_array)
    state.add([jnp.arange(3.0), jnp.ones(2)])
    xla.reuse()
    assert [to_host(buffers[name]).tolist() for name in "ab"] == [[0, 1, 2], [1, 1]]


def test_the_tree_is_copied_before_others_get_its_memory(monkeypatch):
    waited = []
    monkeypatch.setattr(tree_states, "ready", waited.append)
    parameters = parameters_of(tree())
    assert any(array is parameters.flat for array in waited)


def test_a_run_in_float64():
    with jax.enable_x64(True):
        parameters = parameters_of({"a": np.ones(3), "b": jnp.zeros((2, 0))})
        assert parameters.dtype == np.float64 and tree_of(parameters)["a"].dtype == np.float64
        random = np.random.default_rng(0)
        data, made = random.standard_normal((8, 3)), random.standard_normal(3)
        function = jax.value_and_grad(lambda p, x: jnp.sum((x @ (p["w"] - made)) ** 2))
        run = problem({"w": np.zeros(3)}, function, lambda samples: (data[samples],), 8, 8, steps=400)
        with mpishard.Mesh() as mesh:
            result = mpishard.DDPOptimizer(mpishard.SGD(lr=0.2), mesh).optimize(run, progress=False)
        assert np.allclose(tree_of(result.parameters)["w"], made, rtol=1e-12)


def deleted():
    leaf = jnp.ones(2)
    leaf.delete()
    return {"a": leaf}


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: {"a": jnp.ones(2), "n": jnp.arange(3)}, TypeError, "'n' is int32"),
        (lambda: {"c": jnp.ones(2, "complex64")}, TypeError, "'c' is complex64"),
        (lambda: {"k": jax.random.key(0)}, TypeError, "'k' is key<fry>"),
        (lambda: {"h": jnp.ones(2, "bfloat16")}, TypeError, "'h' is bfloat16"),
        (lambda: {"a": np.ones(2, "f"), "b": np.ones(2)}, TypeError, "'a' is float32 and 'b' is float64"),
        (lambda: {"a": {"b": 1.0}}, TypeError, "parameter 'a.b' is a float"),
        (lambda: [jnp.ones(1), "text"], TypeError, "parameter '1' is a str"),
        (lambda: {"a": None}, ValueError, "dict has no leaves"),
        (lambda: {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, ValueError, "two parameters have the name 'a.b'"),
        (lambda: {"a": np.ones(2)}, ValueError, "float64, and JAX makes float32"),
        (deleted, ValueError, "parameter 'a' was deleted"),
    ],
)
def test_a_tree_that_cannot_be_trained(make, kind, message):
    with pytest.raises(kind, match=message):
        TreeLeaves.of(make())


def test_a_tree_under_jit_has_no_values():
    with pytest.raises(TypeError, match="parameter 'a' .*under jit"):
        jax.jit(parameters_of)({"a": jnp.ones(2)})


def squares(parameters, x):
    return jnp.sum((x @ parameters["w"]) ** 2)


def pair(*outcome):
    return lambda parameters, x: outcome


W = {"w": np.ones(3, "f")}
aux = jax.value_and_grad(lambda p, x: (squares(p, x), x), has_aux=True)


@pytest.mark.parametrize(
    ("function", "batch", "kind", "message"),
    [
        (squares, lambda samples: (X[samples],), TypeError, "a value and its gradient"),
        (pair(jnp.ones(2), W), lambda samples: (X,), TypeError, r"one real number, got float32 .*\(2,\)"),
        (pair(jnp.int32(1), W), lambda samples: (X,), TypeError, "one real number, got int32"),
        (aux, lambda samples: (X,), TypeError, "got a tuple .has_aux=True"),
        (pair(1.0, {"v": W["w"]}), lambda samples: (X,), ValueError, "'w' missing; 'v' unknown"),
        (pair(1.0, [W["w"]]), lambda samples: (X,), ValueError, "'w' missing; '0' unkno"),
        (pair(1.0, {"w": jnp.ones(2)}), lambda samples: (X,), TypeError, r"'w' is float32 of shape \(2,\)"),
        (pair(1.0, {"w": jnp.ones(3, "float16")}), lambda samples: (X,), TypeError, "'w' is float16 of shape"),
        (pair(1.0, {"w": 1.0}), lambda samples: (X,), TypeError, "the gradient of 'w' is float"),
        (jax.value_and_grad(squares), lambda samples: X, TypeError, "tuple of arguments, got a ndarray"),
        (None, lambda samples: (X,), TypeError, "value_and_grad .*got NoneType"),
        (squares, windows(np.zeros(3, np.uint8), 1).batch, ValueError, "samples=4, .*data has 2"),
        (squares, (X := np.ones((4, 3), "f"),), TypeError, "batch .*got tuple"),
    ],
)
def test_functions_that_are_no_problems(function, batch, kind, message):
    with pytest.raises(kind, match=message):
        made = problem(W, function, batch, 4, 4, steps=1)
        made.function(made.start, np.arange(4), made.start.gradients)


def test_a_function_is_compiled_once_for_each_shape(capfd):
    traced = []

    def loss(parameters, x):
        traced.append(x.shape)
        return squares(parameters, x)

    data = np.random.default_rng(0).standard_normal((40, 3)).astype("f")
    made = problem(W, jax.value_and_grad(loss), lambda samples: (data[samples],), 40, 40, steps=1)
    for _ in range(2):
        for count in (3, 4, 4, 0):
            made.start.reset_gradients()
            value = made.function(made.start, np.arange(count), made.start.gradients)
    assert traced == [(3, 3), (4, 3)] and value == 0.0
    made.function(made.start, np.arange(2), made.start.gradients)
    made.function(made.start, np.arange(2, 5), made.start.gradients)
    wanted = 2 * data[:5].T @ data[:5] @ W["w"]
    assert np.allclose(made.start.gradients.flat, wanted, rtol=1e-6)
    assert "shapes" not in capfd.readouterr().err
    for count in range(5, 12):
        made.function(made.start, np.arange(count), made.start.gradients)
    assert capfd.readouterr().err.count("JAX has compiled the function for 8 shapes of a batch, and will for each") == 1


# -- optax ------------------------------------------------------------------------------------------------------


@pytest.fixture
def optax():
    return pytest.importorskip("optax", reason="optax is not installed")


CHAINS = {
    "adamw": lambda optax: optax.adamw(optax.cosine_decay_schedule(1e-2, 6), weight_decay=0.1),
    "belief": lambda optax: optax.adabelief(1e-2),
    "adagrad": lambda optax: optax.adagrad(1e-2, initial_accumulator_value=0.3),
    "chain": lambda optax: optax.chain(optax.clip(0.5), optax.trace(0.9), optax.scale(-0.1), optax.ema(0.5)),
    "accumulating": lambda optax: optax.MultiSteps(optax.adam(1e-2), 2),
    "injected": lambda optax: optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 5), momentum=0.9),
    "half": lambda optax: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "schedule-free": lambda optax: optax.contrib.schedule_free_sgd(0.1, warmup_steps=2),
    "plain": lambda optax: optax.sgd(0.1),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CHAINS), ("adamw", "float64")])
def test_rules_take_the_steps_of_optax(name, dtype, optax):
    """On two pieces, with state in arrays of mpishard, of which the counts are no part."""
    with jax.enable_x64(dtype == "float64"):
        transformation, random = CHAINS[name](optax), np.random.default_rng(3)
        rule = rule_of(transformation)
        values = random.standard_normal(7).astype(dtype)
        wanted = {"a": jnp.asarray(values[:6].reshape(2, 3)), "b": jnp.asarray(values[6:])}
        theirs, update = transformation.init(wanted), jax.jit(transformation.update)
        state = [np.full(7, np.nan, dtype) for _ in rule.slots]
        for step in range(1, 6):
            gradient = random.standard_normal(7).astype(dtype)
            updates, theirs = update({"a": gradient[:6].reshape(2, 3) / 4, "b": gradient[6:] / 4}, theirs, wanted)
            wanted = jax.tree.map(np.add, wanted, updates)
            common = rule.steps.common(step, np.dtype(dtype))
            for piece in (slice(0, 3), slice(3, 7)):
                assert rule.steps.common(step, np.dtype(dtype)) is common  # not counted again from the first step
                rule.update(values[piece], gradient[piece], [each[piece] for each in state], step, divisor=4.0)
        # Compiled by parts or whole, a moment of few bits is rounded otherwise.
        tolerance = 1e-3 if name == "half" else 2e-6 if dtype == "float32" else 1e-12
        assert np.allclose(values, np.concatenate([wanted["a"].reshape(-1), wanted["b"]]), rtol=tolerance, atol=1e-7)
        noted = rule.steps.common(6, np.dtype(dtype))
        rule.steps.note(0, np.dtype(dtype), [])
        for kept, again in zip(noted, rule.steps.common(6, np.dtype(dtype)), strict=True):  # as after a restart
            assert np.allclose(kept, again, rtol=1e-6)


NAMED = "adam adamw adabelief adagrad lion nadam radam rmsprop rprop sgd clip ema".split()
# That `docs/how-to/jax.md` names, and chains of them in which two have state of one name.
SAVED = {
    **{name: lambda optax, name=name: getattr(optax, name)(1e-2) for name in NAMED},
    "momentum": lambda optax: optax.sgd(0.1, momentum=0.9),
    "ema in a chain": lambda optax: optax.chain(optax.ema(0.9), optax.adam(0.1)),
    "twice": lambda optax: optax.chain(optax.adam(0.1), optax.scale_by_adam()),
    "named": lambda optax: optax.named_chain(("a.b", optax.ema(0.1)), ("a_b", optax.ema(0.2)), ("größe", optax.ema(1))),
    **{name: CHAINS[name] for name in ("accumulating", "injected")},
    "masked": lambda optax: optax.masked(optax.chain(optax.ema(0.9), optax.adam(0.1)), {"w": True, "b": False}),
    "partition": lambda optax: optax.partition(
        {"x-y": optax.adam(0.2), "z": optax.chain(optax.adam(0.1), optax.scale_by_adam())}, {"w": "x-y", "b": "z"}
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_the_state_of_a_transformation_is_saved_and_loaded(name, optax, tmp_path):
    w = {"w": np.ones((2, 3), "f"), "b": np.ones(3, "f")}
    rule = rule_of(SAVED[name](optax), tree=w)
    with mpishard.Mesh() as mesh:
        saved, loaded = (as_distributed(w, mesh, rule) for _ in range(2))
        written, read = (each.optimizer.state.on_rank.slots for each in (saved, loaded))
        for number, slot in enumerate(written.values(), 1):
            slot[...] = number
        saved.save_checkpoint(tmp_path)
        loaded.load_checkpoint(tmp_path)
    assert list(read) == list(rule.slots) and all(np.array_equal(read[slot], written[slot]) for slot in read)


def test_cuts_change_no_bit(optax):
    """Where ranks cut, and how long an array is: in blocks of one size there is one program."""
    rule, random, size = rule_of(CHAINS["adamw"](optax)), np.random.default_rng(4), 2**16 + 1003
    start, slopes = random.standard_normal(size, np.float32), random.standard_normal((3, size), np.float32)
    ends = []
    for cuts in ([0, size], [0, 1, 999, 2**16 - 3, size]):
        values, state = start.copy(), [np.zeros(size, "f") for _ in rule.slots]
        for step, slope in enumerate(slopes, 1):
            for piece in map(slice, cuts, cuts[1:]):
                rule.update(values[piece], slope[piece], [each[piece] for each in state], step)
        ends.append(np.concatenate([values, *state]))
    assert np.array_equal(*ends) and not np.array_equal(ends[0][:size], start)


def test_results_of_optax_are_copied_before_others_get_their_memory(optax, monkeypatch):
    rule, xla, random = rule_of(CHAINS["adamw"](optax)), MemoryOfXla(), np.random.default_rng(5)
    values, slopes = random.standard_normal((2, 7), np.float32)
    state = [np.zeros(7, "f") for _ in rule.slots]
    values_d, slopes_d, *state_d = map(standin.on_device, (values, slopes, *state))
    rule.update(values, slopes, state, 1)
    monkeypatch.setattr(optax_rule, "as_jax", lambda array: jnp.asarray(to_host(array)))
    monkeypatch.setattr(optax_rule, "as_array", xla.as_array)
    rule.update(values_d, slopes_d, state_d, 1)
    xla.reuse()
    for there, here in zip((values_d, *state_d), (values, *state), strict=True):
        assert np.array_equal(to_host(there), here)


def over_its_size(tree):
    return jax.tree.map(lambda leaf: leaf.shape[0] > 1, tree)


def by_extent(tree):
    return jax.tree.map(lambda leaf: "a" if leaf.shape[-1] == 3 else "b", tree)


def rates(optax, kind):
    return {name: optax.sgd(kind(rate)) for name, rate in (("a", 0.1), ("b", 0.2))}


def with_a_key(key):
    return lambda updates, params: jax.tree.map(lambda each: each * jax.random.normal(key, each.shape), updates)


REFUSED = {
    "clip": (
        lambda optax: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        ValueError,
        "clip_by_global_norm, scale_by_adam.*max_gradient_norm=",
    ),
    "lamb": (lambda optax: optax.lamb(1e-3), ValueError, "scale_by_trust_ratio.*mpishard.LAMB"),
    "masked": (lambda optax: optax.adamw(1e-3, mask={"w": True, "b": False}), ValueError, "masked .*tree=tree"),
    "factored": (lambda optax: optax.scale_by_factored_rms(), ValueError, "depends on the shapes"),
    "finite": (lambda optax: optax.apply_if_finite(optax.sgd(1.0), 3), ValueError, 'nonfinite_gradients="skip"'),
    "noise": (lambda optax: optax.add_noise(0.1, 0.5, 1), ValueError, "depends on others"),
    "key": (lambda optax: optax.stateless(with_a_key(jax.random.key(1))), ValueError, "depends on"),
    "line": (lambda optax: optax.lbfgs(), TypeError, "flat array: TypeError: .*'value'"),
    "none": (lambda optax: optax.adamw, TypeError, "got the function adamw"),
}
TREE = {"w": np.ones((2, 3), "f")}
REFUSED_WITH_A_TREE = {
    "other": (lambda optax: optax.masked(optax.lamb(0.1), {"v": True}), TypeError, "this tree, at 'w': ValueError"),
    "lamb": (lambda optax: optax.masked(optax.lamb(0.1), {"w": True}), ValueError, "mpishard.LAMB has trust ratios"),
    "shape": (lambda optax: optax.adamw(0.1, mask=over_its_size), ValueError, r"'w' depends on its shape \(2, 3\)"),
    "muon": (lambda optax: optax.contrib.muon(0.1), ValueError, "muon.* cannot be divided|depends on its shape"),
    "rates": (lambda optax: optax.partition(rates(optax, float), by_extent), ValueError, "'w' depends on its shape"),
    "of JAX": (lambda optax: optax.partition(rates(optax, jnp.float32), by_extent), ValueError, "'w' depends on its"),
}


@pytest.mark.parametrize(
    ("tree", "name"), [*((None, name) for name in REFUSED), *((TREE, name) for name in REFUSED_WITH_A_TREE)]
)
def test_transformations_that_are_no_rules(tree, name, optax):
    make, kind, message = (REFUSED if tree is None else REFUSED_WITH_A_TREE)[name]
    with pytest.raises(kind, match=message):
        rule_of(make(optax), tree=tree)


def masks(optax):
    def by_path(p):
        return jax.tree_util.tree_map_with_path(lambda path, leaf: "scale" not in jax.tree_util.keystr(path), p)

    def weights(p):
        return jax.tree.map(lambda leaf: leaf.ndim != 1, p)

    labels = {"layers": [{"w": "a", "b": "b"}], "scale": "a", "none": None}
    moments = optax.sgd(optax.linear_schedule(0.1, 0, 9), momentum=0.9)
    return {
        "callable": optax.adamw(0.1, weight_decay=0.5, mask=weights),
        "injected": optax.inject_hyperparams(optax.adamw, "mask")(0.1, weight_decay=0.5, mask=by_path),
        "tree": optax.masked(optax.adam(0.1), {"layers": [{"w": False, "b": True}], "scale": True, "none": None}),
        "partition": optax.partition({"a": moments, "b": optax.adam(0.2)}, labels),
        "rates of JAX": optax.partition({"a": optax.sgd(jnp.float32(0.1)), "b": optax.sgd(jnp.float32(0.2))}, labels),
    }


@pytest.mark.parametrize("name", ["callable", "injected", "tree", "partition", "rates of JAX"])
def test_masks_choose_tensors(name, optax):
    transformation, wanted = masks(optax)[name], jax.tree.map(jnp.asarray, tree())
    theirs, update = transformation.init(wanted), jax.jit(transformation.update)
    random = np.random.default_rng(5)
    with mpishard.Mesh() as mesh:
        optimizer = as_distributed(tree(), mesh, transformation)
        for _ in range(3):
            slopes = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype("f"), wanted)
            updates, theirs = update(slopes, theirs, wanted)
            wanted = optax.apply_updates(wanted, updates)
            found = optimizer.step(slopes)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted))
    with pytest.raises(ValueError, match="rule_of got another tree .*'x'"):
        rule_of(transformation, tree=tree()).by_tensor(["layers.0.b", "layers.0.w", "x"])


def test_a_rule_says_what_it_is(optax):
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    rule = rule_of(optax.adamw(schedule, b1=0.8), groups=[ParameterGroup("b", lr_factor=0.5)], ema_decay=0.9)
    found = rule.configuration()
    assert "scale_by_adam(b1=0.8, b2=0.999" in found["transformation"] and "end_value=0.0" in found["transformation"]
    assert found["groups"] == "b: lr_factor=0.5" and found["ema_decay"] == 0.9
    assert rule.slots == ("mu", "nu") and np.isnan(rule.learning_rate(1))
    slow = rule.by_tensor(["a", "b"])[1]
    fast, values, gradient = np.ones(3, "f"), np.ones(3, "f"), np.float32([1, -2, 3])
    rule.update(fast, gradient, [np.zeros(3, "f") for _ in rule.slots], 1)
    slow.update(values, gradient, [np.zeros(3, "f") for _ in rule.slots], 1)
    assert np.allclose(2 * (1 - values), 1 - fast, atol=1e-6)
    other = rule_of(optax.adamw(schedule, b1=0.7))
    assert other.configuration()["transformation"] != found["transformation"]
    with pytest.raises(ValueError, match="weight_decay, .*OptaxRule"):
        rule_of(optax.sgd(0.1), groups=[ParameterGroup("b", weight_decay=0.0)])
    with pytest.raises(ValueError, match="'ema', .*ema_decay"):
        rule_of(optax.ema(0.9), ema_decay=0.5)
    assert rule_of(optax.chain(optax.ema(0.9)), ema_decay=0.5).slots == ("0_ema",)
    rule = rule_of(optax.sgd(0.1))
    with pytest.raises(ValueError, match="JAX makes float32 of them"):
        rule.update(np.ones(3), np.ones(3), [], 1)


def test_on_one_rank(optax, capfd, monkeypatch):
    monkeypatch.setattr("mpishard.jax.tree.xla_threads", lambda: 9)
    monkeypatch.setattr("mpishard.jax.tree.blas_threads", lambda: 2)
    with mpishard.Mesh() as mesh:
        config = ShardingConfiguration(mesh, reproducible=True)
        reproducible = as_distributed({"w": jnp.ones(3)}, config, optax.sgd(0.5)).optimizer
        assert reproducible.state.facts["arithmetic.json"]["XLA threads"] == "9"
        said = "XLA has 9 threads on rank 0, whose share of the cores is 2: make the mesh before the first array of JAX"
        assert capfd.readouterr().err.count(said) == 1
        optimizer = as_distributed({"w": jnp.ones(3)}, mesh, optax.sgd(0.5))
        assert optimizer.step({"w": jnp.ones(3)})["w"].tolist() == [0.5] * 3
        assert optimizer.step({"w": np.ones(3, "f")}, count=2)["w"].tolist() == [0.25] * 3
    assert (xla_threads() or 0) > 0


def test_a_tree_of_numpy_knows_the_threads_of_the_first_array_of_jax():
    """A checkpoint that said "unknown" was refused by a run that had made an array before."""
    made = "TreeState(TreeLeaves.of({'w': np.ones(3, 'f')}))"
    script = f"import numpy as np; from mpishard.jax.tree import *; print({made}.arithmetic['XLA threads'])"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, check=True)
    assert int(done.stdout) > 0


def test_a_gradient_is_checked_after_a_run_with_a_loss_scale():
    data = np.random.default_rng(0).standard_normal((8, 3)).astype("f")
    made = problem(W, jax.value_and_grad(squares), lambda samples: (data[samples],), 8, 8, steps=1)
    with mpishard.Mesh() as mesh:
        config = ShardingConfiguration(mesh, loss_scale=8.0)
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.01), config).optimize(made, progress=False)
    assert mpishard.check_gradient(made, disp=False)


def test_a_transformation_is_taken_where_jax_raises_for_nan(optax):
    with jax.debug_nans(True), jax.debug_infs(True):
        assert rule_of(optax.adam(0.1)).slots == ("mu", "nu")


def test_an_outer_rule_that_chooses_tensors_is_refused(optax):
    outer = rule_of(optax.masked(optax.sgd(0.1), {"w": True}), tree=TREE)
    with mpishard.Mesh() as mesh, pytest.raises(ValueError, match="outer rule chooses .*buckets"):
        mpishard.LocalSGDOptimizer(mpishard.SGD(lr=0.1), mesh, outer=outer)
