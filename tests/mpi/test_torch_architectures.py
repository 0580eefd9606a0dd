"""Models of transformers whose layers tensor ranks divide and a pipeline passes, beside the models in one process."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch_architectures import ARCHITECTURES, batch_of, loss_of, take_steps  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import RULE, adamw  # noqa: E402

# Float32 within a model of float64 sums over the samples, as in the norms of Gemma.
SUMS_OVER_SAMPLES = ("Gemma", "Gemma2", "Gemma3")
# Those in which float32 of a norm, router or rotation was seen to differ between one process and tensor ranks, and
# CLIP, in which the gradient of the biases of keys is nothing but rounding.  AdamW enlarges both.
ROUNDED = ("Gemma3", "Mixtral", "Qwen3Moe", "Llama4", "DeepseekV3", "CLIP")
ROUNDED_OVER_SAMPLES = ("Cohere", "Helium")  # on several data ranks too: their norms have weights in float32
IN_THE_GATE = ("Qwen3Moe", "OPT")


@pytest.fixture
def tensor_mesh(comm):
    """Two tensor ranks where they divide the ranks, else all; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size, debug=True) as mesh:
        yield mesh


WORKING = [name for name, each in ARCHITECTURES.items() if not each.refused and name not in IN_THE_GATE]


@pytest.mark.parametrize("name", [*IN_THE_GATE, *variants.full(*WORKING)])
def test_steps_of_models_of_transformers_are_those_of_one_process(tensor_mesh, name):
    mesh, architecture = tensor_mesh, ARCHITECTURES[name]
    if name in SUMS_OVER_SAMPLES and mesh.data.size > 1:
        pytest.skip("sums over samples in float32")
    whole, module = (architecture.made(transformers, name) for _ in range(2))
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1, plan=architecture.plan)
    if mesh.tensor.size > 1:
        assert sum(bool(spec.parts) for spec in optimizer.parameters.specs) >= 4
    expected = take_steps(whole, adamw(whole), architecture.inputs, 10)
    losses = take_steps(module, optimizer, architecture.inputs, 10, mesh.data)
    is_rounded = name in ROUNDED or (name in ROUNDED_OVER_SAMPLES and mesh.data.size > 1)
    means = mesh.data.all_reduce(np.array(losses)) / mesh.data.size
    np.testing.assert_allclose(means, expected, rtol=0, atol=1e-6 if is_rounded else 1e-11)
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-5 if is_rounded else 1e-10)


def test_the_plan_of_a_page_is_the_one_that_is_run():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "torch-plans.md"
    (plan,) = re.findall(r'^plan = (\{\n    "transformer.*?^\})', page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert ast.literal_eval(plan) == ARCHITECTURES["GPT2"].plan


LAYOUTS = {"pipeline": dict(pipeline=2), "both": dict(pipeline=2, tensor=2)}


def mesh_of(comm, layout):
    """A mesh of two pipeline ranks, with or without tensor ranks, on which copies are compared after every step."""
    sizes = LAYOUTS[layout]
    if comm.size % math.prod(sizes.values()):
        pytest.skip(f"{sizes} on {comm.size} ranks")
    return Mesh(comm, **sizes, debug=True)


def cases_of(names):
    """Each architecture in each layout; four ranks take no test that is marked `full`."""
    for name in names:
        yield pytest.param(name, "pipeline", marks=[] if name in IN_THE_GATE else pytest.mark.full)
        if not ARCHITECTURES[name].refused:
            yield name, "both"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "layout"), cases_of(name for name, each in ARCHITECTURES.items() if not each.refused_stages)
)
def test_steps_of_stages_are_those_of_one_process(comm, name, layout):
    architecture = ARCHITECTURES[name]
    with mesh_of(comm, layout) as mesh:
        whole, module = (architecture.made(transformers, name, in_stages=True) for _ in range(2))
        plan = architecture.plan if mesh.tensor.size > 1 else None
        options = dict(plan=plan, stages=architecture.stages, microbatches=2)
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1, **options)
        expected = take_steps(whole, adamw(whole), architecture.inputs, 10)
        losses = take_steps(module, optimizer, architecture.inputs, 10, mesh.data, in_stages=True)
        is_rounded = name in (*ROUNDED, *ROUNDED_OVER_SAMPLES, *SUMS_OVER_SAMPLES)
        means = mesh.data.all_reduce(np.array(losses)) / mesh.data.size
        np.testing.assert_allclose(means, expected, rtol=0, atol=1e-6 if is_rounded else 1e-11)
        optimizer.close()
        assert_same_parameters(module, whole, atol=1e-5 if is_rounded else 1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "layout"), cases_of(name for name, each in ARCHITECTURES.items() if each.refused_stages)
)
def test_models_that_a_pipeline_cannot_pass_are_refused_in_their_first_pass(comm, name, layout):
    architecture = ARCHITECTURES[name]
    with mesh_of(comm, layout) as mesh:
        module = architecture.made(transformers, name)
        plan = architecture.plan if mesh.tensor.size > 1 else None
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, plan=plan, stages=architecture.stages)
        with pytest.raises((ValueError, RuntimeError), match=architecture.refused_stages):
            optimizer.loss_and_gradient(loss_of, *batch_of(architecture.inputs, 0))
        optimizer.close()


@pytest.mark.full
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.refused])
def test_models_that_cannot_be_cut_are_refused_in_their_first_pass(tensor_mesh, name):
    architecture = ARCHITECTURES[name]
    module = architecture.made(transformers, name)
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, RULE, plan=architecture.plan)
    with pytest.raises((ValueError, RuntimeError), match=architecture.refused):
        loss_of(module, *batch_of(architecture.inputs, 0))
    optimizer.close()
