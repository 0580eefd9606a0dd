"""A dozen small modules of PyTorch, each with a property that a training library may get wrong, and ways to take steps.

All are float64 or complex128, and take the same samples: images for the convolutional one, words for the others.
"""

from __future__ import annotations

import numpy as np
import torch
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
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.inner(self.tokens(x)).mean(1))


class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.lstm(x)[0])


class Tied(Words):
    def __init__(self):
        super().__init__(torch.nn.Tanh())
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight


class SharedTwice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(WIDTH, WIDTH)
        self.unused = torch.nn.Linear(3, 2)

    def forward(self, x):
        return torch.tanh(self.used(x))


class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(11, WIDTH, mode="mean")
        self.head = torch.nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.bag(x))


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


class Checkpointed(torch.nn.Module):
    """Computes its activations again in the backward pass."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks = torch.nn.ModuleList(encoder_layer() for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def encoder_layer():
    return torch.nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)


def convolutional():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(64, 4)
    )


def frozen():
    module = Words(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)))
    module.tokens.requires_grad_(False)
    module.inner[2].weight.requires_grad_(False)
    return module


def spectral():
    norm = torch.nn.utils.parametrizations.spectral_norm
    return Words(torch.nn.Sequential(norm(torch.nn.Linear(WIDTH, WIDTH)), torch.nn.Tanh()))


MODULES = {
    "batch norm": convolutional,
    "lstm": lambda: Words(LSTM()),
    "attention": lambda: Words(encoder_layer()),
    "tied": Tied,
    "frozen": frozen,
    "unused": lambda: Words(Unused()),
    "shared twice": lambda: Words(SharedTwice()),
    "embedding bag": Bags,
    "group norm": lambda: Words(Channels()),
    "spectral norm": spectral,
    "complex": lambda: Words(Complex()),
    "checkpointed": lambda: Words(Checkpointed(use_reentrant=False)),
    "checkpointed reentrant": lambda: Words(Checkpointed(use_reentrant=True)),
    "compiled": lambda: torch.compile(Words(encoder_layer()), backend="aot_eager"),
}
# Units under zero=3: not those that others use without a call, as the attention of PyTorch does its output layer.
LAYERS = (
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.Linear,
    torch.nn.LSTM,
    torch.nn.TransformerEncoderLayer,
)
WAYS = ("plain", "accumulated", "clipped by torch", "clipped by ours", "gan", "scaler")
MAX_NORM = 0.05


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


def losses_of(way, loss):
    """The losses of a step, each for a backward pass of its own; ``loss(part, parts)`` is that of a part of a batch."""
    parts = 2 if way in ("accumulated", "gan") else 1
    return [lambda part=part: loss(part, parts) / parts for part in range(parts)]


def train_alone(name, way, steps):
    """PyTorch in one process: the norms of the gradients before clipping, and the parameters after the steps."""
    module = make(name)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found = []
    for step in range(steps):
        x, y = samples(name, step)
        optimizer.zero_grad()

        def loss(part, parts, x=x, y=y):
            own = slice(part * SAMPLES // parts, (part + 1) * SAMPLES // parts)
            return torch.nn.functional.cross_entropy(module(x[own]), y[own])

        for make_loss in losses_of(way, loss):
            scaled = scaler.scale(make_loss()) if way == "scaler" else make_loss()
            scaled.backward()
        if way.startswith("clipped"):
            found.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        if way == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return found, values_of(module)


def train(mesh, name, way, zero, steps):
    """Ours, as `train_alone`; a rank has its part of each part of a batch."""
    module = mpishard.torch.convert_sync_batchnorm(make(name), mesh)
    units = {"shard_units": lambda layer: type(layer) in LAYERS} if zero == 3 else {}
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.5, momentum=0.9), zero=zero, **units)
    before = optimizer.parameters.gather()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found = []
    for step in range(steps):
        x, y = samples(name, step)
        optimizer.zero_grad()

        def loss(part, parts, x=x, y=y):
            own = np.arange(SAMPLES).reshape(parts, mesh.size, -1)[part, mesh.rank]
            return torch.nn.functional.cross_entropy(module(x[own]), y[own])

        try:
            made = losses_of(way, loss)
            for number, make_loss in enumerate(made):
                if way == "accumulated" and number < len(made) - 1:
                    with optimizer.no_sync():
                        make_loss().backward()
                else:
                    scaled = scaler.scale(make_loss()) if way == "scaler" else make_loss()
                    scaled.backward()
            if way == "clipped by torch":
                found.append(torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM).item())
            if way == "clipped by ours":
                found.append(optimizer.clip_grad_norm_(MAX_NORM).item())
            if way == "scaler":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        except RuntimeError:
            assert np.array_equal(optimizer.parameters.gather(), before)
            optimizer.close()
            raise
    with mpishard.torch.summon_full_parameters(module):
        return found, values_of(module)


def values_of(module):
    return {name.replace("_orig_mod.", ""): value.detach().clone() for name, value in module.state_dict().items()}
