"""A rank dies in a run of a PyTorch module on tensor or pipeline ranks: the run goes on as without the death."""

from __future__ import annotations

import sys

import faults
import pytest

LAUNCH = faults.launcher()
pytestmark = [
    pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only"),
    pytest.mark.full,
]
SCRIPT = """
import os, signal, sys
import numpy as np
import torch
from mpi4py import MPI
from transformers import LlamaConfig, LlamaForCausalLM
import mpishard
from mpishard.checkpoint import Checkpoints

folder, report, axis = sys.argv[1:4]
size, steps, layouts, victim, deadly = map(int, sys.argv[4:])
step, words = 0, torch.from_numpy(np.random.default_rng(0).integers(0, 11, (40, 9)))

def losses(module, samples):
    logits = module(input_ids=words[samples, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.mT, words[samples, 1:], reduction="none").mean(1)

def shoot(module, _):
    is_compared = not module.training  # the plan, before the first step
    if MPI.COMM_WORLD.rank == victim and step == deadly and is_compared == (deadly == 0):
        os.kill(os.getpid(), signal.SIGKILL)

models = []

def problem(mesh):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=10, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, bos_token_id=0, eos_token_id=0)).double()
    model.model.layers[1].register_forward_pre_hook(shoot)  # in the middle of a pass, whose sums others wait for
    models[:] = [model]
    return mpishard.torch.problem(model, losses, 40, 8, steps=steps, mesh=mesh)

def callback(state):
    global step
    step = state.step

def trained(mesh, elastic=False, checkpoints=None):
    config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5)
    optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-2), config)
    given = problem(mesh)
    if elastic:
        more = {"layouts": [{axis: 2}, {}]} if layouts else {"respawn": False}
        optimizer = mpishard.ElasticOptimizer(optimizer, **more)
        given = problem if layouts else given
    result = optimizer.optimize(
        given, callback=callback, progress=False, checkpoints=checkpoints, resume=checkpoints is not None)
    with mpishard.torch.summon_full_parameters(models[0]):
        values = torch.cat([p.detach().flatten() for p in models[0].parameters()])
    return result.loss_history, values.numpy()

own, victim = victim, -1
with mpishard.Mesh(MPI.COMM_SELF) as alone:
    expected = trained(alone)
step, victim = 0, own
with mpishard.Mesh(**{axis: size}) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
    found = trained(mesh, deadly >= 0, checkpoints)
    apart = max(float(np.abs(one - other).max()) for one, other in zip(found, expected))
    apart = max(mesh.world.allgather_object(apart))
    if mesh.rank == 0:
        with open(report, "a") as file:
            print(*map(mesh.shape.get, ("data", "tensor", "pipeline")), len(found[0]), apart < 1e-12, apart, file=file)
"""


@pytest.mark.parametrize(
    ("axis", "layouts", "deadly", "left", "others"),
    [
        ("tensor", False, 4, "1 2 1", [("tensor", 4, "1 4 1"), ("pipeline", 4, "1 1 4")]),
        ("tensor", False, 0, "1 2 1", [("tensor", 4, "1 4 1")]),
        ("tensor", True, 4, "3 1 1", [("tensor", 4, "1 4 1")]),
        ("pipeline", False, 4, "1 1 2", [("tensor", 2, "2 2 1"), ("pipeline", 4, "1 1 4"), ("data", 4, "4 1 1")]),
        ("pipeline", True, 4, "3 1 1", [("pipeline", 2, "2 1 2")]),
    ],
    ids=["replica", "first pass", "layouts", "stage", "layouts of stages"],
)
def test_a_rank_is_shot_in_a_pass_and_the_run_goes_on_on_other_meshes(tmp_path, axis, layouts, deadly, left, others):
    """In the first pass it is shot while the plan is compared with the whole module."""
    pytest.importorskip("transformers")
    report = tmp_path / "report"

    def launch(lines, *arguments):
        words = [*LAUNCH, "-n", "4", sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(report)]
        words += [each if isinstance(each, str) else str(int(each)) for each in arguments]
        return faults.execute(words, 240, lambda: report.exists() and report.read_text().count("\n") == lines)[0]

    output, expected = launch(1, axis, 2, 6, layouts, 3, deadly), [f"{left} 6 True"]
    assert report.exists(), output
    for steps, (other, size, shape) in enumerate(others, 8):
        expected.append(f"{shape} {steps} True")
        output += launch(len(expected), other, size, steps, False, -1, -1)
    found = [line.rpartition(" ")[0] for line in report.read_text().splitlines()]
    assert found == expected, report.read_text() + output
