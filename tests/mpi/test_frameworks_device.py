"""Modules of PyTorch, functions of JAX and minimisations on a GPU, beside the same without mpishard.

`place` is where arrays are; ``MPISHARD_TEST_PLACE=cpu`` runs the same tests without a GPU.
"""

from __future__ import annotations

import copy
import functools
import os

import numpy as np
import pytest
from devices import Device, use_over_mpi

import mpishard
from mpishard import AdamW, FlatParameters, ParameterSpec
from mpishard.backend import array as arrays

PLACE = os.environ.get("MPISHARD_TEST_PLACE", "cuda")
pytestmark = pytest.mark.hardware
STEPS, SAMPLES = 4, 24


@pytest.fixture(params=["cupy", "cupy-direct"])
def place(request, monkeypatch):
    """Each rank has a GPU of its own where there are as many; arrays are staged, or MPI gets their addresses."""
    if PLACE == "cpu":
        if request.param == "cupy-direct":
            pytest.skip("MPI gets addresses of the host anyway")
        return Device("numpy", np)
    return use_over_mpi(request.param, monkeypatch)


# -- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch(place):
    """PyTorch with products in float32, and the GPU of this rank."""
    torch = pytest.importorskip("torch")
    if PLACE == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("PyTorch finds no GPU")
        torch.cuda.set_device(place.module.cuda.Device().id)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield torch
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def networks():
    """By name how to make a module, and its samples."""
    import torch_models
    import torch_zoo
    from torch import nn

    class Recurrent(nn.Module):
        """Two layers of an LSTM, which read the rows of an image."""

        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(24, 10, num_layers=2, batch_first=True)
            self.head = nn.Linear(10, 5)

        def forward(self, x):
            return self.head(self.lstm(x.transpose(1, 2).flatten(2))[0][:, -1])

    def mlp():
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))

    return {
        "mlp": (mlp, torch_models.images),
        "tied": (torch_zoo.tied, torch_models.words),
        "lstm": (Recurrent, torch_models.images),
        "convolutional": (functools.partial(torch_models.convolutional, bias=False), torch_models.images),
        "transformer": torch_models.KINDS["transformer"],
    }


class Both:
    """A module under mpishard on all ranks, and a copy of it that PyTorch alone trains on the samples of all."""

    def __init__(self, torch, mesh, kind, zero, rule=None, dtype=None):
        self.torch, self.mesh, self.zero, self.dtype = torch, mesh, zero, dtype
        torch.manual_seed(3)
        make, data = networks()[kind]
        self.ours = make().to(PLACE)
        self.x, self.y = (each.to(PLACE) for each in data())
        self.alone = copy.deepcopy(self.ours)
        self.theirs = torch.optim.AdamW(self.alone.parameters(), lr=1e-2, weight_decay=0.01)
        rule = AdamW(lr=1e-2) if rule is None else rule(self.ours.parameters())
        self.optimizer = mpishard.torch.as_distributed(self.ours, mesh, rule, zero=zero)

    def loss(self, module, own):
        with self.torch.autocast(PLACE, self.torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.torch.nn.functional.cross_entropy(module(self.x[own]), self.y[own])

    def step_alone(self, shares):
        """A step of PyTorch: the mean over the shares, since a batch norm sees those of one rank."""
        losses, before = [], [buffer.clone() for buffer in self.alone.buffers()]
        for own in reversed(shares):  # at the end those of rank 0, whose running averages count
            for buffer, value in zip(self.alone.buffers(), before, strict=True):
                buffer.copy_(value)
            losses.insert(0, self.loss(self.alone, own))
            (losses[0] / len(shares)).backward()
        self.theirs.step()
        self.theirs.zero_grad()
        return [loss.item() for loss in losses]

    def train(self, late=lambda: None):
        """Losses of all ranks at each step: those of PyTorch alone, and those of mpishard."""
        history = []
        for step in range(STEPS):
            order = np.random.default_rng(step).permutation(48)[: SAMPLES // self.mesh.size * self.mesh.size]
            shares = [self.torch.from_numpy(each).to(PLACE) for each in np.split(order, self.mesh.size)]
            late()
            loss = self.loss(self.ours, shares[self.mesh.rank])
            late()
            loss.backward()
            self.optimizer.step()
            losses = self.mesh.world.allgather_object(loss.item())
            history.append([self.step_alone(shares), losses])
        return np.array(history).swapaxes(0, 1)

    def check(self, tolerance=1e-4, **late):
        alone, ours = self.train(**late)
        assert np.allclose(ours, alone, rtol=tolerance, atol=tolerance)
        assert ours[-1].mean() != ours[0].mean()
        for one, other in zip(self.ours.buffers(), self.alone.buffers(), strict=True):
            assert one.device == other.device
            assert self.torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
        for name, p in self.ours.named_parameters():
            assert p.device.type == PLACE and p.grad is None
            if p.requires_grad and self.zero < 3:
                view = self.optimizer.parameters[name]
                assert p.data_ptr() == (view.ctypes.data if PLACE == "cpu" else view.data.ptr)


KINDS = ["mlp", "tied", "lstm", "convolutional", "transformer"]
UNPACKED = pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")


@UNPACKED
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_modules_are_those_of_pytorch_alone(torch, mesh, kind, zero):
    Both(torch, mesh, kind, zero).check()


@UNPACKED
@pytest.mark.parametrize("kind", KINDS)
def test_losses_under_autocast_are_near_those_of_pytorch_alone(torch, mesh, kind):
    both = Both(torch, mesh, kind, 1, dtype="bfloat16")
    both.check(tolerance=0.05)
    assert all(p.dtype == torch.float32 for p in both.ours.parameters())


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=["default", "plain", "fused"])
@pytest.mark.parametrize("zero", [0, 2])
def test_an_optimizer_of_pytorch(torch, mesh, zero, options):
    def rule(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01, **options)

    Both(torch, mesh, "convolutional", zero, rule).check()


@pytest.mark.parametrize("theirs", [False, True], ids=["mpishard", "pytorch"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stream_of_the_users_own(torch, mesh, zero, theirs):
    """Its kernels come late, so that whoever does not wait for them reads old gradients and buffers."""
    if PLACE == "cpu":
        pytest.skip("the host has no streams")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        rule = (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)) if theirs else None
        Both(torch, mesh, "convolutional", zero, rule).check(late=lambda: torch.cuda._sleep(20_000_000))
    torch.cuda.synchronize()


# -- JAX --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax(place, mesh):
    """JAX with products in float32, on the GPU of this rank."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        devices = jax.devices("gpu" if PLACE == "cuda" else "cpu")
    except RuntimeError:
        pytest.skip("JAX finds no GPU")
    device = devices[place.module.cuda.Device().id % len(devices) if PLACE == "cuda" else 0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        yield jax


def function(jax, kind):
    """Summed loss of (tree, x, y), a start, and the inputs."""
    jnp, random = jax.numpy, np.random.default_rng(4)

    def some(*shape):
        return jnp.asarray(0.5 * random.standard_normal(shape), jnp.float32)

    y = np.tanh(random.standard_normal(48)).astype("f")
    if kind == "mlp":
        tree = {"hidden": {"w": some(5, 7), "b": some(7)}, "out": [some(7)]}
        predict = lambda tree, x: jnp.tanh(x @ tree["hidden"]["w"] + tree["hidden"]["b"]) @ tree["out"][0]  # noqa: E731
        x = random.standard_normal((48, 5)).astype("f")
    else:  # attention over the embeddings of words, and a scale that is a scalar
        tree = {"tokens": some(11, 6), "qkv": some(3, 6, 6), "out": some(6), "scale": some()}
        x = random.integers(0, 11, (48, 4))

        def predict(tree, x):
            q, k, v = jnp.einsum("nld,hde->hnle", tree["tokens"][x], tree["qkv"])
            mixed = jax.nn.softmax(jnp.einsum("nle,nme->nlm", q, k)) @ v
            return tree["scale"] * mixed.mean(1) @ tree["out"]

    return jax.value_and_grad(lambda tree, x, y: jnp.sum((predict(tree, x) - y) ** 2)), tree, (x, y)


def same(jax, one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-4), one, other))


@pytest.mark.parametrize("theirs", [False, True], ids=["mpishard", "optax"])
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_losses_of_functions_are_those_of_jax_alone(jax, mesh, kind, zero, theirs):
    """In a loop of the user's own and in that of mpishard; under mpishard's AdamW and optax's."""
    optax = pytest.importorskip("optax", reason="optax is not installed")
    value_and_grad, tree, data = function(jax, kind)
    platform = next(iter(jax.tree.leaves(tree)[0].devices())).platform
    assert (platform == "cpu") == (PLACE == "cpu")
    adamw = optax.adamw(1e-2, weight_decay=0.01)
    compiled, alone, state, expected = jax.jit(value_and_grad), tree, adamw.init(tree), []
    rule = adamw if theirs else AdamW(lr=1e-2)
    optimizer = mpishard.jax.as_distributed(tree, mesh, rule, zero=zero)
    ours, losses = optimizer.tree, []
    batch = lambda own: tuple(each[own] for each in data)  # noqa: E731
    sampler = mpishard.data.sampling.Sampler(48, SAMPLES, 2)
    for step in range(1, STEPS + 1):
        everyone = sampler.batch(step)
        own = np.array_split(everyone, mesh.size)[mesh.rank]
        loss, gradients = compiled(ours, *batch(own))
        ours = optimizer.step(gradients, count=SAMPLES)
        losses.append(sum(mesh.world.allgather_object(float(loss))))
        loss, gradients = compiled(alone, *batch(everyone))
        updates, state = adamw.update(jax.tree.map(lambda g: g / SAMPLES, gradients), state, alone)
        alone = optax.apply_updates(alone, updates)
        expected.append(float(loss))
    assert np.allclose(losses, expected, rtol=1e-4) and same(jax, ours, alone)
    assert all(leaf.devices() == jax.tree.leaves(tree)[0].devices() for leaf in jax.tree.leaves(ours))
    problem = mpishard.jax.problem(tree, value_and_grad, batch, 48, SAMPLES, steps=STEPS, seed=2)
    strategy = [mpishard.DDPOptimizer, mpishard.ZeRO1Optimizer, mpishard.ZeRO2Optimizer][zero]
    rule = mpishard.jax.rule_of(adamw) if theirs else rule
    result = strategy(rule, mesh).optimize(problem, progress=False)
    assert np.allclose(result.loss_history, np.array(expected) / SAMPLES, rtol=1e-4)
    assert same(jax, mpishard.jax.tree_of(result.parameters), alone)


# -- minimize ---------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 60, 50
TARGET = np.random.default_rng(5).standard_normal((ROWS, COLUMNS))


def field(module, first, last):
    """Value and gradient, and Hessian products, of some rows of a convex function of a field."""
    target = module.asarray(TARGET[first:last])

    def smoothing(u):
        change, found = u[:, 1:] - u[:, :-1], module.zeros_like(u)
        found[:, 1:] += change
        found[:, :-1] -= change
        return found

    def fun(p):
        u = p["field"]
        slopes = smoothing(u)
        value = (0.5 * u**2 + 0.25 * u**4 - target * u).sum() + 0.5 * (u * slopes).sum()
        return float(value), {"field": u + u**3 - target + slopes}

    def hessp(p, direction):
        u = p["field"]
        d = direction.reshape(u.shape)
        return (d + 3 * u**2 * d + smoothing(d)).reshape(-1)

    return fun, hessp


@pytest.mark.parametrize("split", ["tensor", "data"])
@pytest.mark.parametrize("method", ["L-BFGS", "CG", "Newton-CG", "L-BFGS-B"])
def test_minimisations_of_a_field_are_those_of_numpy(comm, place, method, split):
    """Rows of the field are divided over tensor ranks; or all have it, and each computes its rows."""
    results = {}
    with mpishard.Mesh(comm, tensor=comm.size if split == "tensor" else 1) as mesh:
        for module in (np, place.module):
            spec = ParameterSpec("field", (ROWS, COLUMNS), tensor_dim=0 if split == "tensor" else None)
            start = FlatParameters([spec], np.float64, place=mesh.place, module=module)
            first, last = start.box("field")[0] if split == "tensor" else (0, ROWS)
            fun, hessp = field(module, first, last)
            options = {"hessp": hessp} if method == "Newton-CG" else {}
            options |= {"bounds": {"field": (-0.3, 0.4)}} if method == "L-BFGS-B" else {}
            reduction = "sum" if split == "tensor" else None
            options["options"] = {"maxiter": 200, **({"ftol": 0.0} if method.startswith("L-BFGS") else {})}
            result = mpishard.minimize(fun, start, mesh=mesh, reduction=reduction, method=method, tol=1e-7, **options)
            assert result.success and isinstance(start["field"], module.ndarray)
            results[module] = result.fun, arrays.to_host(start["field"]).copy()
    (wanted, expected), (value, found) = results[np], results[place.module]
    assert value == pytest.approx(wanted, rel=1e-8) and np.allclose(found, expected, rtol=0, atol=1e-5)
    if method == "L-BFGS-B":
        assert found.min() == -0.3 and found.max() == 0.4
