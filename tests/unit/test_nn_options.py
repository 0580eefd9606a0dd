"""The two ways of writing a call of GPT: with frozen values, or with their fields by name."""

from __future__ import annotations

import dataclasses
import inspect

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn
from mpishard.nn.options import GPTOptions

TINY = nn.Architecture(8, 8, 8, 1, 2)


def test_values_and_their_fields_by_name_are_one_call():
    """The sizes one by one or an Architecture, and options by name or in their values."""
    sizes = 11, 6, 8, 3, 2
    half = ml_dtypes.bfloat16
    options = dict(schedule="gpipe", microbatches=2, stage_costs=[1.0] * 5)
    architecture = nn.Architecture(*sizes, tied=True)
    pipeline = nn.PipelineOptions(**options)
    precision, memory = nn.Precision(np.float64, storage_dtype=half), nn.MemoryOptions(recompute=True)
    options |= dict(storage_dtype=half, recompute=True)
    models = [
        nn.GPT(*sizes, np.float64, 3, tied=True, **options),
        nn.GPT(**dataclasses.asdict(architecture), dtype=np.float64, seed=3, **options),
        nn.GPT(architecture, pipeline=pipeline, precision=precision, memory=memory, seed=3),
        nn.GPT(architecture=architecture, dtype=np.float64, seed=3, **options),
        nn.GPT(architecture, precision=precision, schedule="gpipe", microbatches=2, recompute=True, seed=3),
    ]
    tokens, targets = np.random.default_rng(0).integers(0, 11, (2, 3, 5))
    losses = [gpt.loss_and_gradient(tokens, targets) for gpt in models]
    for gpt, loss in zip(models, losses, strict=True):
        assert (gpt.architecture, gpt.microbatches, gpt.pipeline.schedule, loss) == (
            architecture,
            2,
            "gpipe",
            losses[0],
        )
        assert gpt.activation_bytes == models[0].activation_bytes
        np.testing.assert_array_equal(gpt.parameters.flat, models[0].parameters.flat)
        np.testing.assert_array_equal(gpt.parameters.gradients.flat, models[0].parameters.gradients.flat)


def test_options_by_name_are_the_fields_of_the_values():
    values = nn.Architecture, nn.PipelineOptions, nn.Precision, nn.MemoryOptions
    fields = {field.name for value in values for field in dataclasses.fields(value)}
    by_position = {"vocabulary_size", "context_length", "width", "layers", "heads", "dtype"}
    assert set(GPTOptions.__annotations__) == fields - by_position | {"module"}


@pytest.mark.parametrize("model, architecture", [(nn.GPT, nn.Architecture), (nn.Llama, nn.LlamaArchitecture)])
def test_the_signature_of_a_model_has_its_options(model, architecture):
    """Sizes may be given by position; every field of the values is there by its name, with its default."""
    shown = inspect.signature(model).parameters
    by_position = [each.name for each in shown.values() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == ["vocabulary_size", "context_length", "width", "layers", "heads", "dtype", "seed"]
    for value in (architecture, nn.PipelineOptions, nn.Precision, nn.MemoryOptions):
        for field in dataclasses.fields(value):
            missing = field.default is dataclasses.MISSING
            assert shown[field.name].default == (inspect.Parameter.empty if missing else field.default)
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in list(shown.values())[7:])
    assert shown["microbatches"].annotation == int | None and shown["mesh"].default is None
    inspect.signature(model).bind(8, 8, 8, 1, 2, np.float64, 3, tied=True, schedule="gpipe", recompute=True)


def test_a_model_of_ones_own_has_its_own_signature():
    class Mine(nn.GPT):
        def __init__(self, size: int) -> None:
            super().__init__(8, 8, size, 1, 2)

    assert list(inspect.signature(Mine).parameters) == ["size"]


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((8, 8, 8), {"layers": 1, "headss": 2}, r"missing 1 required positional argument: 'heads'"),
        ((8, 8, 8, 1, 2), {"head": 2}, r"GPT\(\) got an unexpected keyword argument 'head'"),
        ((8, 8, 8, 1, 2), {"width": 8}, r"GPT\(\) got multiple values for argument 'width'"),
        ((8, 8, 8, 1, 2, np.float32, 0, True), {}, r"at most 7 positional arguments, vocabulary_size, .*, seed; got 8"),
        ((TINY, 8), {}, r"GPT\(\) takes at most 1 positional arguments, architecture; got 2"),
        ((TINY,), {"width": 8}, r"got architecture and also width; put all into architecture=Architecture\(...\)"),
        (
            (TINY,),
            {"pipeline": nn.PipelineOptions(), "chunks": 2},
            r"got pipeline and also chunks; put all into",
        ),
        ((TINY,), {"pipeline": "gpipe"}, "pipeline must be a PipelineOptions, got 'gpipe'"),
        ((8, 8, 8, 1, 2), {"tied": 1}, "tied=1 must be True or False"),
    ],
)
def test_calls_that_say_too_much_or_too_little(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        nn.GPT(*arguments, **options)
