"""Uses of the public names, right and wrong, for mypy: an ignored error that it does not find is an error."""

from collections.abc import Callable
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import mpishard
from mpishard import nn

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


def loss_and_gradient(parameters: NDArray[np.float64], samples: NDArray[np.int64], gradients: Any) -> float:
    gradients += parameters
    return float(len(samples))


def log(state: mpishard.TrainingState[Any]) -> None:
    print(state.step, state.loss, state.los)  # type: ignore[attr-defined]


def own_gradient(mesh: mpishard.Mesh, record: mpishard.RunRecord, start: Vector) -> None:
    problem = mpishard.OptimizationProblem(loss_and_gradient, start=start, samples=10, batch_size=5, steps=3)
    mpishard.OptimizationProblem(loss_and_gradient, start, 10, batch_size="5")  # type: ignore[arg-type]
    mpishard.OptimizationProblem(loss_and_gradient, start, samples=10)  # type: ignore[call-arg]
    optimizer = mpishard.as_distributed(mpishard.Adam(lr=0.1), mesh)
    result = optimizer.optimize(problem, callback=log, record=record)
    assert_type(result.parameters, Vector)
    assert_type(result.stop_reason, str)
    print(result.losses)  # type: ignore[attr-defined]
    print(mpishard.AdamX)  # type: ignore[attr-defined]
    optimizer.optimize(problem, resum=True)  # type: ignore[call-arg]
    optimizer.optimize(None)  # type: ignore[arg-type]
    optimizer.optimize(problem, record="run")  # type: ignore[arg-type]
    optimizer.optimize(problem, callback=lambda state: state.step)  # type: ignore[arg-type, return-value]
    optimizer.step(start, start, count=len(start))
    optimizer.step(start, start, cuont=3)  # type: ignore[call-arg]
    record.step(3, loss=0.5)
    record.step(loss=0.5)  # type: ignore[call-arg]


def model(mesh: mpishard.Mesh, batch: Callable[[NDArray[np.int64]], tuple[Any, ...]]) -> None:
    gpt = nn.GPT(vocabulary_size=256, context_length=64, width=64, layers=2, heads=4, mesh=mesh)
    nn.GPT(vocabulary_size=256, context_length=64, width=64, layers=2, headss=4)  # type: ignore[call-arg]
    nn.Decoder(gpt.architecture, mesh=mesh, schedule="gpipe", microbatches=8)
    nn.Decoder(gpt.architecture, recompute="gpipe")  # type: ignore[arg-type]
    problem = mpishard.OptimizationProblem.for_model(gpt, batch, samples=10, batch_size=5, steps=40)
    mpishard.OptimizationProblem.for_model(gpt, batch, samples=10, batchsize=5)  # type: ignore[call-arg]
    mpishard.OptimizationProblem.for_model(gpt, batch, samples=10, batch_size=5, stepps=3)  # type: ignore[call-arg]
    mpishard.OptimizationProblem.for_model(gpt, batch, samples=10, batch_size=5, steps="3")  # type: ignore[arg-type]
    mpishard.OptimizationProblem.for_model(3, batch, samples=10, batch_size=5)  # type: ignore[arg-type]
    config = mpishard.ShardingConfiguration(mesh, max_gradient_norm=1.0, loss_scale="dynamic")
    mpishard.ShardingConfiguration(mesh, max_gradient_nrm=1.0)  # type: ignore[call-arg]
    mpishard.ShardingConfiguration(mesh, nonfinite_gradients="skipp")  # type: ignore[arg-type]
    rule = mpishard.AdamW(lr=mpishard.cosine(3e-3, steps=40, warmup=5))
    mpishard.AdamW(learning_rate=1e-3)  # type: ignore[call-arg]
    optimizer = mpishard.ZeRO3Optimizer(rule, config)
    result = optimizer.optimize(problem, progress=False)
    assert_type(result.parameters, mpishard.FlatParameters)
    sharded = mpishard.as_distributed(gpt, config)
    sharded.loss_and_gradient(*batch(np.arange(3)))
    mpishard.as_distributed(3, mesh)  # type: ignore[call-overload]
    low = mpishard.as_distributed_for_low_bandwidth(rule, mesh, max_gradient_norm=1.0)
    low.optimize(problem)
    mpishard.as_distributed_for_low_bandwidth(rule, mesh, max_norm=1.0)  # type: ignore[call-overload]
    with mpishard.Checkpoints("run", mesh, every=50) as checkpoints:
        elastic = mpishard.ElasticOptimizer(rule, mesh, min_workers=2)
        assert_type(elastic.optimize(problem, checkpoints=checkpoints, resume=True).parameters, mpishard.FlatParameters)
        elastic.optimize(problem, checkpoints="run")  # type: ignore[arg-type]
    mpishard.ElasticOptimizer(rule, mesh, scaling="cubic")  # type: ignore[arg-type]
