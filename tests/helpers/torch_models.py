"""Modules of PyTorch, their samples, and which of these each rank has."""

from __future__ import annotations

import numpy as np
import torch

from mpishard import AdamW

SAMPLES = 48
RULE = AdamW(lr=1e-2)


def images():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=random)
    return x, torch.randint(0, 5, (SAMPLES,), generator=random)


def words():
    x = torch.randint(0, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) % 5).long()


def convolutional(bias=True):
    """Without the bias that a batch norm takes out, AdamW does not enlarge a gradient that is rounding alone."""
    layers = [torch.nn.Conv2d(3, 6, 3, bias=bias), torch.nn.BatchNorm2d(6), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(24, 5))


class Transformer(torch.nn.Module):
    """With an embedding that the output shares, a frozen scale, and a head that nothing uses."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(11, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unused = torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)).mean(1) * self.scale)[:, :5]


KINDS = {"convolutional": (convolutional, images), "transformer": (Transformer, words)}


def make(kind, rank=0):
    """The same module on all ranks, unless they have different seeds."""
    torch.manual_seed(3 + rank)
    make_module, make_data = KINDS[kind]
    return make_module(), *make_data()


def smooth():
    """A module without batch norm, whose losses do not depend on how a batch is cut."""
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    module.register_buffer("seen", torch.zeros(2))
    module.register_forward_pre_hook(lambda module, given: setattr(module, "seen", module.seen + 1))
    return module


def loss_of(module, x, y, own):
    return torch.nn.functional.cross_entropy(module(x[own]), y[own])


def samples_of(mesh, step):
    """This rank's samples of a step: equally many on each rank, as DistributedSampler does."""
    order = np.random.default_rng(step).permutation(SAMPLES)
    return order[: SAMPLES // 2 // mesh.size * mesh.size].reshape(mesh.size, -1)[mesh.rank]


def assert_same_parameters(one, other, rtol=0.0, atol=1e-12):
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=rtol, atol=atol)


def pytorch_ranks(mesh, folder):
    """A fixture: PyTorch's own ranks, in the same processes."""
    where = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=where, rank=mesh.rank, world_size=mesh.size)
    yield torch.nn.parallel.DistributedDataParallel
    torch.distributed.destroy_process_group()
