"""A dozen small modules of PyTorch, each with a property that a training library may get wrong, and ways to take steps.

All are float64 or complex128, and take the same samples: images for the convolutional one, words for the others.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch.nn import Linear, Sequential, Tanh
from torch.utils.checkpoint import checkpoint

import mpishard

SAMPLES = 48  # two parts of a batch are divided over 1, 2, 3, 4 and 8 ranks
WIDTH = 6


class Words(torch.nn.Module):
    """Classifies words: an embedding, an inner part of (samples, 5, WIDTH), and a head."""

    def __init__(self, inner):
        super().__init__()
        self.tokens = torch.nn.Embedding(11, WIDTH)
        self.inner = inner
        self.head = Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.inner(self.tokens(x)).mean(1))


class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.down = Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.lstm(x)[0])


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = square()
        self.unused = Linear(3, 2)

    def forward(self, x):
        return torch.tanh(self.used(x))


class Channels(torch.nn.Module):
    """Channels first, as group norms want them."""

    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        return self.norm(self.mix(x.transpose(1, 2))).transpose(1, 2)


class Complex(torch.nn.Module):
    """Filters words, as a Fourier layer does."""

    def __init__(self):
        super().__init__()
        self.filter = torch.nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=5, dim=1)


class Checkpointed(Sequential):
    """Computes its activations again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__(encoder_layer(), encoder_layer())
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def encoder_layer():
    return torch.nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)


def square():
    return Linear(WIDTH, WIDTH)


def convolutional():
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), Tanh(), torch.nn.Flatten(), Linear(64, 4)]
    return Sequential(*layers)


def tied():
    module = Words(Tanh())
    module.head = Linear(WIDTH, 11, bias=False)
    module.head.weight = module.tokens.weight
    return module


def shared_twice():
    layer = square()
    return Words(Sequential(layer, Tanh(), layer))


def frozen():
    module = Words(Sequential(square(), Tanh(), square()))
    module.tokens.requires_grad_(False)
    module.inner[2].weight.requires_grad_(False)
    return module


MODULES = {
    "batch norm": convolutional,
    "lstm": lambda: Words(LSTM()),
    "attention": lambda: Words(encoder_layer()),
    "tied": tied,
    "frozen": frozen,
    "unused": lambda: Words(Unused()),
    "shared twice": shared_twice,
    "embedding bag": lambda: Sequential(torch.nn.EmbeddingBag(11, WIDTH, mode="mean"), Linear(WIDTH, 4)),
    "group norm": lambda: Words(Channels()),
    "spectral norm": lambda: Words(Sequential(torch.nn.utils.parametrizations.spectral_norm(square()), Tanh())),
    "complex": lambda: Words(Complex()),
    "checkpointed": lambda: Words(Checkpointed(use_reentrant=False)),
    "checkpointed reentrant": lambda: Words(Checkpointed(use_reentrant=True)),
    "compiled": lambda: torch.compile(Words(Sequential(square(), Tanh(), square())), backend="aot_eager"),
}
# Units under zero=3: not those that others use without a call, as the attention of PyTorch does its output layer.
LAYERS = [Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.LSTM]
LAYERS += [torch.nn.TransformerEncoderLayer]
WAYS = ("plain", "accumulated", "clipped by torch", "clipped by ours", "gan", "scaler")
MAX_NORMS = (0.05, 1e6)  # of steps in turn


def is_unit(layer):
    return type(layer) in LAYERS


def make(name):
    """The same on all ranks."""
    torch.manual_seed(7)
    return MODULES[name]().double()


def samples(name, step):
    """The inputs and labels of a step: of all ranks."""
    random = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (SAMPLES,), generator=random)
    if name == "batch norm":
        return torch.randn(SAMPLES, 3, 6, 6, generator=random, dtype=torch.float64), labels
    return torch.randint(0, 11, (SAMPLES, 5), generator=random), labels


def train(name, way, steps, mesh=None, zero=0):
    """Norms of the gradients before clipping, and the parameters after the steps; without a mesh those of PyTorch in
    one process.  On a mesh a rank has its part of each part of a batch.
    """
    module, ranks, rank = make(name), 1, 0
    if mesh is None:
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
    else:
        module, ranks, rank = mpishard.torch.convert_sync_batchnorm(module, mesh), mesh.size, mesh.rank
        units = {"shard_units": is_unit} if zero == 3 else {}
        # Of several buckets, and with norms of their own.
        several = {"max_gradient_norm": 1e6, "minimum_parameter_group_size": 64} if way == "accumulated" else {}
        config, rule = mpishard.ShardingConfiguration(mesh, **several), mpishard.SGD(lr=0.5, momentum=0.9)
        optimizer = mpishard.torch.as_distributed(module, config, rule, zero=zero, **units)
        before = optimizer.parameters.gather()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=way == "scaler")
    parts = 2 if way in ("accumulated", "gan") else 1  # of a batch, each with a backward pass of its own
    norms = []
    try:
        for step in range(steps):
            x, y = samples(name, step)
            optimizer.zero_grad()
            for part, own in enumerate(np.arange(SAMPLES).reshape(parts, ranks, -1)[:, rank]):
                sums_later = mesh is not None and way == "accumulated" and part == 0
                with optimizer.no_sync() if sums_later else contextlib.nullcontext():
                    loss = torch.nn.functional.cross_entropy(module(x[own]), y[own]) / parts
                    scaler.scale(loss).backward()
            if way == "clipped by ours" and mesh is not None:
                norms.append(optimizer.clip_grad_norm_(MAX_NORMS[step]).item())
            elif way.startswith("clipped"):
                norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORMS[step]).item())
            elif way == "accumulated" and mesh is None:
                norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]).item())
            scaler.step(optimizer)
            if way == "accumulated" and mesh is not None:
                norms.append(optimizer.optimizer.gradient_norm)
            scaler.update()
    except RuntimeError:
        assert np.array_equal(optimizer.parameters.gather(), before)
        optimizer.close()
        raise
    with contextlib.nullcontext() if mesh is None else mpishard.torch.summon_full_parameters(module):
        values = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return norms, {name.replace("_orig_mod.", ""): value for name, value in values.items()}
