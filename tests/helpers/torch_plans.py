"""A small transformer of PyTorch whose layers tensor ranks can divide, and its steps."""

from __future__ import annotations

import numpy as np
import torch

import mpishard

WORDS, WIDTH, HEADS, HEAD = 11, 6, 3, 4
BATCH, LENGTH = 8, 5
RULE = mpishard.AdamW(lr=1e-2, weight_decay=0.1)
PLAN = {
    "tokens": "embedding_rowwise",
    "layers.*.[qkv]": "colwise",
    "layers.*.norm": "replicated_with_grad_allreduce",
    "layers.*.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.gates": "packed_colwise",
    "layers.*.gated": "rowwise",
    "layers.*.mix": "colwise_gather_output",
    "layers.*.thin": "rowwise_split_input",
    "head": "colwise_rep",
}


class Layer(torch.nn.Module):
    """Attention of three heads with a norm of each, perceptrons of seven and of five gated features, and others."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.head_dim = HEAD
        self.q, self.k, self.v = (torch.nn.Linear(WIDTH, HEADS * HEAD, bias=name != "k") for name in "qkv")
        self.o = torch.nn.Linear(HEADS * HEAD, WIDTH)
        self.norm = torch.nn.LayerNorm(HEAD)
        self.up, self.down = torch.nn.Linear(WIDTH, 7), torch.nn.Linear(7, WIDTH, bias=False)
        self.gates, self.gated = torch.nn.Linear(WIDTH, 2 * 5), torch.nn.Linear(5, WIDTH, bias=False)
        self.mix, self.thin = torch.nn.Linear(WIDTH, 5).requires_grad_(False), torch.nn.Linear(5, WIDTH)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(self.norm(q), self.norm(k), v, is_causal=True)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(2)))
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.gated(torch.nn.functional.glu(self.gates(x)))
        return x + self.thin(torch.tanh(self.mix(x)))


class Transformer(torch.nn.Module):
    """With a head that is the embedding, in which a word is padding."""

    def __init__(self, layers=2, dropout=0.0):
        super().__init__()
        self.tokens = torch.nn.Embedding(WORDS, WIDTH, padding_idx=7)
        self.layers = torch.nn.ModuleList(Layer(dropout) for _ in range(layers))
        self.last = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, words):
        x = self.tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x)) * self.scale


def fresh(seed=0, kind=Transformer, **options):
    torch.manual_seed(seed)
    return kind(**options).double()


def tensor_size(comm):
    """Two tensor ranks where they divide the ranks, else all."""
    return 2 if comm.size % 2 == 0 else comm.size


def words_of(step, rank=0, ranks=1):
    words = torch.from_numpy(np.random.default_rng(step).integers(0, WORDS, (BATCH, LENGTH + 1)))
    return words[rank::ranks]


def loss_of(module, words):
    logits = module(words[:, :-1])
    logits = getattr(logits, "logits", logits)  # of transformers
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def take_steps(module, optimizer, steps, axis=None):
    """The losses of steps of all samples, of which a rank of the data axis has its part."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(module, words_of(step) if axis is None else words_of(step, axis.rank, axis.size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adamw(module):
    """The rule as an optimizer of PyTorch, for one process."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=RULE.lr, weight_decay=RULE.weight_decay)
