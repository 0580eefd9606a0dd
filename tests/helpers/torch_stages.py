"""Modules of PyTorch that a pipeline can cut, and their steps in micro-batches."""

from __future__ import annotations

import torch
from torch_plans import RULE, WORDS, fresh, loss_of, words_of

import mpishard
from mpishard.torch.cut_module import CutModule
from mpishard.torch.live_groups import groups_of
from mpishard.torch.micro_batches import PipelinedPasses, PipelineSettings
from mpishard.torch.module import state_of
from mpishard.torch.module_optimizer import ModuleOptimizer
from mpishard.torch.module_tensors import ModuleTensors
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.stages import layers_of

MICRO = 3
SIZES = dict(vocab_size=WORDS, bos_token_id=0, eos_token_id=0)


def sequential():
    """Whose activations are overwritten, one of them used twice, and whose head is beside a norm without parameters."""
    act = torch.nn.ReLU(inplace=True)
    layers = [torch.nn.Embedding(WORDS, 6), act, torch.nn.Linear(6, 8), act, torch.nn.Linear(8, 6)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(6, elementwise_affine=False), torch.nn.Linear(6, WORDS))


class Layer(torch.nn.Module):
    """Takes what an encoder has made, and perhaps a mask; returns both numbers and a mask."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.other = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.number = number

    def forward(self, x, *, seen, mask=None):
        if self.training:
            self.calls += 1
        y = torch.tanh(self.linear(x)) + self.other(seen)
        y = y if mask is None else y.masked_fill(mask[..., None], 0.25)
        return {"x": x + y, "mask": (y.detach().sum(-1) > 0) if self.number else None}


class TwoStreams(torch.nn.Module):
    """Layers that all get the result of the first one, a mask from the second on, and a scale that belongs to none."""

    def __init__(self, layers=4):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((6,), 0.5))
        self.tokens = torch.nn.Embedding(WORDS, 6)
        self.encoder = torch.nn.Linear(6, 6)
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(layers))
        self.head = torch.nn.Linear(6, WORDS)

    def forward(self, words):
        x = self.tokens(words)
        seen, mask = self.encoder(x), None
        for layer in self.layers:
            x, mask = layer(x, seen=seen, mask=mask).values()
        return self.head(x) * self.scale.sum()


def llama(**options):
    import transformers

    sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **sizes, **options))


def gpt2():
    import transformers

    sizes = dict(n_embd=8, n_layer=3, n_head=2, n_positions=16)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **sizes, **rates))


KINDS = {"sequential": sequential, "streams": TwoStreams, "llama": llama, "gpt2": gpt2}


def made(name):
    return fresh(kind=KINDS[name])


def take_micro_steps(module, optimizer, steps, axis=None, clip=None):
    """The losses of steps in micro-batches, of a rank of the data axis or of all samples."""
    ends = (0, 1) if axis is None else (axis.rank, axis.size)
    losses = []
    for step in steps:
        losses.append(optimizer.loss_and_gradient(loss_of, words_of(step, *ends)))
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
    return losses


def passes_of_stages(module, mesh, count, stages=None, schedule="interleaved", plan=None, takes_numbers=False):
    """The state and the passes of a module that one rank runs as several stages, as a pipeline of as many would."""
    tensors = ModuleTensors.of(module)
    cuts = CutModule.of(module, plan, mesh, tensors.trained, tensors.frozen, checks_pass=True)
    layers = layers_of(module, stages, count)
    staged = StagedModule(module, mesh, layers, tensors.trained, tensors.frozen, cuts)
    state = state_of(module, tensors, "broadcast", cuts=cuts, stages=staged)
    order = PipelineSettings.of(schedule, count, MICRO, 1)
    return state, PipelinedPasses(order, staged, state.parameters, torch.device("cpu"), takes_numbers)


def virtual_stages(module, mesh, count, **options):
    """An optimizer of such a module."""
    state, passes = passes_of_stages(module, mesh, count, **options)
    optimizer = mpishard.DDPOptimizer(RULE, mesh)
    optimizer.bind(state.parameters)
    return ModuleOptimizer(state, optimizer, groups_of(RULE, state.all_trained), passes)
