"""Models of `transformers` with random weights, what they compute, and where a gradient here has its place there."""

from __future__ import annotations

import numpy as np

from mpishard.nn.published import table_of_model
from mpishard.nn.weight_files import published_tensors

# 4 heads can be split over 1, 2 and 4 ranks; 19 tokens leave uneven slices.
SIZES = dict(vocab_size=19, n_positions=8, n_embd=24, n_layer=4, n_head=4)
BATCH, LENGTH = 4, 7
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}


def tokens_and_targets(vocabulary=19):
    return tuple(np.random.default_rng(0).integers(0, vocabulary, (2, BATCH, LENGTH)))


def write_gpt2(folder, dtype="float32", save=(), **options):
    """Write a GPT-2 with random weights; returns its logits, summed loss, and the gradients by name."""
    import torch
    import transformers

    torch.manual_seed(0)
    dropouts = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(**{**SIZES, **dropouts, **options})
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():  # away from zeros and ones, so that every tensor matters
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder, **dict(save))
    return computed(model, config.vocab_size)


def computed(model, vocabulary=19):
    import torch

    tokens, targets = (torch.from_numpy(each) for each in tokens_and_targets(vocabulary))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), gradients


def assert_equals(model, expected):
    """Logits, loss, and this rank's slices of the gradients, against `computed`.  Collective over the mesh."""
    logits, loss, gradients = expected
    limit = TOLERANCE[model.parameters.dtype.name]
    pair = tokens_and_targets(logits.shape[-1])
    np.testing.assert_allclose(model.logits(pair[0]), logits, rtol=limit, atol=limit * np.abs(logits).max())
    model.parameters.reset_gradients()
    np.testing.assert_allclose(model.loss_and_gradient(*pair), loss, rtol=limit)
    table = table_of_model(model)
    specs = {spec.name: spec for spec in model.parameters.specs}
    for weight in table.weights(model.architecture):
        name = weight.spec.name
        spec = specs[name]
        box = model.parameters.place.box(spec)
        found = np.zeros([stop - start for start, stop in box], model.parameters.dtype)
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
