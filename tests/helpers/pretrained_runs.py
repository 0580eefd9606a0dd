"""Models of `transformers` with random weights, what they compute, and where a gradient here has its place there."""

from __future__ import annotations

import json
import types

import numpy as np
import safetensors
import safetensors.numpy

from mpishard import nn
from mpishard.layout.boxes import box_shape
from mpishard.nn.pretrained import published_tensors, table_of_config, table_of_model

# 4 heads can be split over 1, 2 and 4 ranks; 19 tokens leave uneven slices.
GPT2 = dict(vocab_size=19, n_positions=8, n_embd=24, n_layer=4, n_head=4)
GPT2 |= dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
LLAMA = dict(vocab_size=19, max_position_embeddings=8, hidden_size=24, intermediate_size=40, num_hidden_layers=4)
LLAMA |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=4, rms_norm_eps=1e-4, tie_word_embeddings=False)
LLAMA3 = dict(rope_theta=500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG = dict(rope_type="longrope", factor=2.0, short_factor=[1.0, 1.5], long_factor=[1.0, 3.0])
# The class of `transformers`, and its config.
FAMILIES = {
    "gpt2": ("GPT2", GPT2),
    "llama2": ("Llama", dict(LLAMA, num_key_value_heads=8)),
    "llama3": ("Llama", dict(LLAMA, rope_parameters=dict(LLAMA3, original_max_position_embeddings=4))),
    "longrope": ("Llama", dict(LLAMA, rope_parameters=dict(LONG, rope_theta=1e4, original_max_position_embeddings=4))),
    "qwen2": ("Qwen2", dict(LLAMA, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(LLAMA, head_dim=6)),
}
BATCH, LENGTH = 4, 7
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


def tokens_and_targets(vocabulary=19):
    return tuple(np.random.default_rng(0).integers(0, vocabulary, (2, BATCH, LENGTH)))


def stored(folder):
    """The bytes of all tensors of a folder by name, of all files."""
    files = [safetensors.deserialize(path.read_bytes()) for path in folder.glob("*.safetensors")]
    return {name: (each["dtype"], each["shape"], bytes(each["data"])) for file in files for name, each in file}


def write_theirs(folder, family="gpt2", dtype="float32", save=(), **options):
    """Write a model with random weights; returns its logits, summed loss, and the gradients by name."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **dict(bos_token_id=0, eos_token_id=0), **options})
    kind = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = kind(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # away from zeros and ones, so that every tensor matters
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder, **dict(save))
    return computed(model, config.vocab_size)


def write_ours(folder, family="gpt2", dtype="float32", **options):
    """As `write_theirs`, without PyTorch: what the model here computes on one rank."""
    name, sizes = FAMILIES[family]
    config = dict(sizes, model_type=name.lower(), **options)
    table = table_of_config(config)
    weights, random = table.weights(table.architecture(config)), np.random.default_rng(0)
    shapes = {name: shape for weight in weights for name, shape in weight.published_shapes().items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: (0.1 + 0.3 * random.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    model, (tokens, targets) = nn.import_pretrained(folder), tokens_and_targets()
    logits, loss, gradients = model.logits(tokens).copy(), model.loss_and_gradient(tokens, targets), {}
    for weight in weights:
        gradients |= published_tensors(weight, model.parameters.gradient(weight.spec.name)[0], dtype)
    return logits, loss, gradients


def computed(model, vocabulary=19):
    import torch

    if model.dtype == torch.float64:
        in_float64(model)
    tokens, targets = (torch.from_numpy(each) for each in tokens_and_targets(vocabulary))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), gradients


def in_float64(model):
    """Let norms and rotary positions of `transformers`, which are of float32, compute in float64."""
    import torch

    config = model.config.to_dict()
    ours = table_of_config(config).architecture(config)

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def turn(self, x, position_ids):
        cos, sin = ours.rotary.tables(ours.head_width, position_ids.shape[1], np.float64)
        return tuple(torch.tensor(np.concatenate([each, each], axis=1))[None] for each in (cos, sin))

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith(("RMSNorm", "RotaryEmbedding")):
            module.forward = types.MethodType(norm if kind.endswith("RMSNorm") else turn, module)


def their_texts(folder, prompts, count):
    """The most likely continuation of each prompt by `transformers`, alone; keys are computed again for each token."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    choice = dict(do_sample=False, use_cache=False, eos_token_id=None, pad_token_id=0, max_new_tokens=count)
    prompts = [torch.tensor([prompt]) for prompt in prompts]
    return [model.generate(prompt, attention_mask=torch.ones_like(prompt), **choice)[0].tolist() for prompt in prompts]


def assert_equals(model, expected):
    """Logits, loss and gradients against `computed`.  Collective over the mesh."""
    assert_logits(model, expected)
    assert_gradients(model, expected)


def assert_logits(model, expected):
    """Those of `computed`.  Collective over the mesh."""
    logits = expected[0]
    limit = TOLERANCE[model.parameters.dtype.name]
    found = model.logits(tokens_and_targets(logits.shape[-1])[0])
    np.testing.assert_allclose(found, logits, rtol=limit, atol=limit * np.abs(logits).max())


def assert_gradients(model, expected):
    """The loss, and this rank's slices of the gradients, against `computed`.  Collective over the mesh."""
    logits, loss, gradients = expected
    limit = TOLERANCE[model.parameters.dtype.name]
    model.parameters.reset_gradients()
    np.testing.assert_allclose(model.loss_and_gradient(*tokens_and_targets(logits.shape[-1])), loss, rtol=limit)
    table = table_of_model(model)
    specs = {spec.name: spec for spec in model.parameters.specs}
    for weight in table.weights(model.architecture):
        name = weight.spec.name
        spec = specs[name]
        box = model.parameters.place.box(spec)
        found = np.zeros(box_shape(box), model.parameters.dtype)
        if name in model.parameters:
            found[...] = model.parameters.gradient(name)[0]
        if spec.partial and model.mesh is not None:
            model.mesh.tensor.all_reduce(found)
        if spec.copies:  # tied over stages
            model.mesh.pipeline.all_reduce(found)
        elif name not in model.parameters:
            continue
        # What the whole gradient is here, from that of the published tensors.
        whole = np.empty(weight.spec.shape)
        places = np.arange(whole.size).reshape(whole.shape)
        for published, place in published_tensors(weight, places, np.int64).items():
            whole.reshape(-1)[place] = gradients[published]
        own = whole[tuple(slice(*extent) for extent in box)]
        np.testing.assert_allclose(found, own, rtol=0, atol=10 * limit * np.abs(whole).max(), err_msg=name)
