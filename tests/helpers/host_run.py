"""A rank of the runs of `hosts`: python host_run.py FOLDER [layouts]

Trains a small GPT, goes on from the newest checkpoint in the folder, notes every step there and what came of it.  With
``layouts`` each of three hosts of two ranks has a stage of it, which no other host has, and fewer ranks take another
mesh.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import mpishard
from mpishard import nn

STEPS, EVERY = 40, 5
STEP_S = 0.03
LAYOUTS = [{"tensor": 2, "pipeline": 3, "data": 1}, {"data": 2, "tensor": 2}, {}]

folder, moves = Path(sys.argv[1]), sys.argv[2:] == ["layouts"]
tokens = np.random.default_rng(1).integers(0, 11, (45, 9))
models = []


def build(mesh: mpishard.Mesh) -> mpishard.OptimizationProblem[nn.GPT]:
    models[:] = [
        nn.GPT(vocabulary_size=11, context_length=8, width=16, layers=3, heads=2, dtype=np.float32, mesh=mesh, shards=2)
    ]
    return mpishard.OptimizationProblem.for_model(
        models[0],
        lambda samples: (tokens[samples, :-1], tokens[samples, 1:]),
        samples=45,
        batch_size=16,
        tokens_per_sample=8,
        steps=STEPS,
        micro_batch_size=2,
    )


with mpishard.Mesh() as mesh:
    config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=0.5, reproducible=True)
    inner = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=0.01), config)
    elastic = mpishard.ElasticOptimizer(inner, layouts=LAYOUTS if moves else None)

    def callback(state: mpishard.TrainingState) -> None:
        if mesh.rank == 0:
            line = time.monotonic(), int(os.environ.get("MPISHARD_ATTEMPT", 0)), state.step, mesh.size
            with open(folder / "steps", "a") as file:
                file.write(f"{json.dumps(line)}\n")
            time.sleep(STEP_S if mesh.size > 1 else 0)

    problem = build if moves else build(mesh)
    with mpishard.Checkpoints(folder / "checkpoints", mesh, every=EVERY, asynchronous=True) as checkpoints:
        result = elastic.optimize(problem, callback=callback, progress=False, checkpoints=checkpoints, resume=True)
    full = mpishard.as_distributed(models[0], mesh).gather_full_parameters()
    if mesh.rank == 0:
        found = [hashlib.sha256(each.tobytes()).hexdigest() for each in (full, result.loss_history)]
        (folder / "result").write_text(json.dumps(found))
