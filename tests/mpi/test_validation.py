"""Validation sets: evaluated on all ranks while a run trains, with the same bits in any layout."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import (
    LBFGS,
    SGD,
    AdamW,
    Checkpoints,
    DDPOptimizer,
    EarlyStopping,
    ElasticOptimizer,
    Evaluation,
    LocalSGDOptimizer,
    Mesh,
    OptimizationProblem,
    RunRecord,
    ShardingConfiguration,
    ZeRO1Optimizer,
)
from mpishard.record import Run

ROWS = np.random.default_rng(0).standard_normal((37, 6))
STEPS, EVERY = 9, 2


def least_squares(parameters, samples, gradients):
    residual = ROWS[samples, :5] @ parameters - ROWS[samples, 5]
    gradients += ROWS[samples, :5].T @ residual
    return 0.5 * residual @ residual


def validation(parameters, samples):
    residual = ROWS[samples + 20, :5] @ parameters - ROWS[samples + 20, 5]
    return 0.5 * residual @ residual


def problem(steps=STEPS, **options):
    return OptimizationProblem(least_squares, np.zeros(5), 20, 16, steps=steps, micro_batch_size=2, **options)


def optimizer(strategy, mesh):
    return strategy(AdamW(lr=0.1), ShardingConfiguration(mesh, reproducible=True))


def bits(result):
    steps, losses = result.validation_steps.tolist(), result.validation_losses.tolist()
    return result.parameters.tobytes(), result.loss_history.tolist(), steps, losses


def alone(steps=STEPS, samples=17):
    with Mesh(MPI.COMM_SELF) as mesh:
        evaluate = Evaluation(validation, samples, every=EVERY)
        return optimizer(DDPOptimizer, mesh).optimize(problem(steps), progress=False, evaluate=evaluate)


@pytest.mark.parametrize("samples", [17, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.pairs(4)
def test_losses_have_the_bits_of_one_rank(mesh, strategy, samples):
    """Also of a set that is smaller than the number of ranks."""
    calls, told = [], []

    def noting(parameters, chosen):
        calls.append(chosen.copy())
        return validation(parameters, chosen)

    result = optimizer(strategy, mesh).optimize(
        problem(),
        progress=False,
        evaluate=Evaluation(noting, samples, every=EVERY),
        callback=lambda state: told.append(state.validation_loss),
    )
    expected = alone(samples=samples)
    assert bits(result) == bits(expected)
    assert result.validation_steps.tolist() == [2, 4, 6, 8]
    assert np.isnan(told[0]) and told[1:] == np.repeat(expected.validation_losses, 2).tolist()
    seen = np.concatenate(mesh.world.allgather_object(np.concatenate([np.empty(0, int), *calls])))
    assert np.array_equal(np.sort(seen), np.repeat(np.arange(samples), 4))  # each once in each of 4 evaluations
    flat = alone(steps=8, samples=samples).parameters
    assert result.validation_losses[-1] == pytest.approx(validation(flat, np.arange(samples)) / samples, rel=1e-12)


def test_losses_go_on_from_a_checkpoint_and_are_in_the_record(mesh, folder, capsys):
    expected = alone()
    for steps, strategy in ((5, STRATEGIES[1]), (STEPS, STRATEGIES[2])):
        with Checkpoints(folder / "checkpoints", mesh) as checkpoints, RunRecord(folder, mesh) as record:
            options = {"checkpoints": checkpoints, "resume": True, "record": record, "progress": False}
            evaluate = Evaluation(validation, 17, every=EVERY)
            result = optimizer(strategy, mesh).optimize(problem(steps), evaluate=evaluate, **options)
    assert bits(result) == bits(expected)
    mesh.world.barrier()
    steps, losses = Run.read(folder).logged["validation_loss"]
    assert (steps.tolist(), losses.tolist()) == ([2, 4, 6, 8], expected.validation_losses.tolist())
    # Without a set the losses stay in the checkpoints; those of another set are not compared with them.
    for evaluate, found in ((None, 4), (Evaluation(validation, 9, every=10), 0)):
        capsys.readouterr()
        with Checkpoints(folder / "checkpoints", mesh) as checkpoints:
            options = {"checkpoints": checkpoints, "resume": True, "evaluate": evaluate, "progress": False}
            result = optimizer(STRATEGIES[0], mesh).optimize(problem(STEPS + 1), **options)
        words = "the validation set is another one, {'samples': 9, 'tokens_per_sample': 1} in place of"
        assert (words in capsys.readouterr().err) == (evaluate is not None and mesh.rank == 0)
        assert len(result.validation_losses) == found


def test_workers_that_come_and_go_change_no_bit(mesh):
    elastic = ElasticOptimizer(optimizer(ZeRO1Optimizer, mesh))

    def resize(state):
        elastic.resize(1 + state.step % mesh.world.comm.size if state.step < STEPS else 1)

    evaluate = Evaluation(validation, 17, every=EVERY)
    result = elastic.optimize(problem(), callback=resize, progress=False, evaluate=evaluate)
    assert bits(result) == bits(alone())


def test_workers_of_local_sgd_meet_for_it(mesh, same_on_all):
    local = LocalSGDOptimizer(AdamW(lr=0.1), mesh, sync_every=3)
    result = local.optimize(problem(steps=4), progress=False, evaluate=Evaluation(validation, 17, every=4))
    assert same_on_all(result.validation_losses)
    expected = validation(result.parameters, np.arange(17)) / 17
    assert result.validation_losses[0] == pytest.approx(expected, rel=1e-12)


def falling_until(best):
    """A validation loss that is lowest after step `best`: the first parameter counts the steps."""
    return lambda parameters, samples: len(samples) * abs(parameters[0] + best)


def counting(steps, **options):
    """Each step takes 1 from the parameter."""

    def function(parameters, samples, gradients):
        gradients += len(samples)
        return float(len(samples))

    return OptimizationProblem(function, np.zeros(1), 8, 8, steps=steps, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_checkpoint_is_kept(mesh, folder, asynchronous):
    """Also by a run that goes on, and beside those that `keep` counts."""
    options = {"progress": False, "evaluate": Evaluation(falling_until(4), 3, every=2), "resume": True}
    for steps, strategy in ((5, STRATEGIES[0]), (9, STRATEGIES[1])):
        kept = {"every": 3, "keep": 1, "asynchronous": asynchronous, "best": "validation loss"}
        with Checkpoints(folder, mesh, **kept) as checkpoints:
            strategy(SGD(lr=1.0), mesh).optimize(counting(steps), checkpoints=checkpoints, **options)
        mesh.world.barrier()
        assert (folder / "best").resolve().name == "step-00000004"
        found = sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))
        assert found == ["step-00000004", f"step-{steps:08d}"]
        mesh.world.barrier()
    flat = np.zeros(1)
    facts = mpishard.load_checkpoint(folder / "best", flat, mesh=mesh)
    assert (flat[0], facts["step"]) == (-4, 4)
    assert facts["validation_loss"].tolist() == [2, 0]


@pytest.mark.parametrize("how", ["added", "without its link"])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_run_that_goes_on_keeps_the_best_that_it_begins_with(mesh, folder, how, elastic):
    """The option is new, or the run was killed between the save and its link."""
    options = {"progress": False, "evaluate": Evaluation(falling_until(4), 3, every=2), "resume": True}
    for steps in (4, 9):
        best = None if how == "added" and steps == 4 else "validation loss"
        with Checkpoints(folder, mesh, keep=1, best=best) as checkpoints:
            optimizer = DDPOptimizer(SGD(lr=1.0), mesh)
            optimizer = ElasticOptimizer(optimizer) if elastic else optimizer
            optimizer.optimize(counting(steps), checkpoints=checkpoints, **options)
        mesh.world.barrier()
        if mesh.rank == 0 and steps == 4:
            (folder / "best").unlink(missing_ok=True)
        mesh.world.barrier()
    assert (folder / "best").resolve().name.startswith("step-00000004")
    assert (folder / "best" / "manifest.json").is_file()


def test_a_run_stops_early_wherever_it_goes_on(mesh, folder, capsys):
    options = {"evaluate": Evaluation(falling_until(4), 3, every=2), "stop_early": EarlyStopping(patience=3)}
    options |= {"resume": True, "progress": False}
    for steps, strategy, taken, reason in (
        (7, STRATEGIES[0], 7, "steps"),
        (20, STRATEGIES[1], 10, "patience"),
        (20, STRATEGIES[2], 10, "patience"),
    ):
        with Checkpoints(folder, mesh) as checkpoints:
            result = strategy(SGD(lr=1.0), mesh).optimize(counting(steps), checkpoints=checkpoints, **options)
        assert (result.steps, result.stop_reason) == (taken, reason)
        assert result.validation_losses.tolist() == [2, 0, 2, 4, 6][: taken // 2]
    assert ("is already finished: it reached patience=3 at step 10" in capsys.readouterr().err) == (mesh.rank == 0)


def test_an_elastic_run_stops_early_with_its_best_checkpoint(mesh, folder):
    rule = SGD(lr=1.0, groups=[mpishard.ParameterGroup("param*", weight_decay=0)], ema_decay=0.5)
    config = ShardingConfiguration(mesh, reproducible=True, max_gradient_value=5)
    elastic = ElasticOptimizer(DDPOptimizer(rule, config))

    def resize(state):
        elastic.resize(1 + state.step % mesh.world.comm.size)

    ends = {"stop_early": EarlyStopping(patience=2, min_delta=0.5), "progress": False, "callback": resize}
    evaluate = Evaluation(falling_until(4), 3, every=2)
    with Checkpoints(folder, mesh, best="validation loss") as checkpoints, RunRecord(folder, mesh) as record:
        files = {"checkpoints": checkpoints, "record": record}
        result = elastic.optimize(counting(20), evaluate=evaluate, **files, **ends)
    assert (result.steps, result.stop_reason) == (8, "patience")
    assert (folder / "best").resolve().name == "step-00000004"
    mesh.world.barrier()
    run = Run.read(folder)
    assert [each.tolist() for each in run.logged["validation_loss"]] == [[2, 4, 6, 8], [2, 0, 2, 4]]
    assert run.starts[0]["stop_early"] == {"type": "EarlyStopping", "patience": 2, "min_delta": 0.5}
    assert run.starts[0]["best"] == "validation loss"
    noted = run.starts[0]["rule"], run.starts[0]["configuration"]["max_gradient_value"]
    assert (noted[0]["groups"], noted[0]["ema_decay"], noted[1]) == ("param*: weight_decay=0.0", 0.5, 5)


@pytest.mark.parametrize(
    ("losses", "options", "stops"),
    [
        ([], {}, False),
        ([3, 2, 2], {}, False),  # the same is no better
        ([3, 2, 2, 2], {}, True),
        ([3, 2, 4, 1], {}, False),
        ([3, 2.9, 2.8], {"min_delta": 0.25}, True),
        ([3, 2.9, 2.7], {"min_delta": 0.25}, False),
    ],
)
def test_when_a_run_stops_early(losses, options, stops):
    assert EarlyStopping(patience=2, **options).stops(losses) is stops


def optimized(mesh, **options):
    return optimizer(DDPOptimizer, mesh).optimize(problem(), progress=False, **options)


def broken(value):
    return lambda parameters, samples: value if 3 in samples else validation(parameters, samples)


def changing(parameters, samples):
    parameters += 1
    return 0.0


def failing(parameters, samples):
    if 16 in samples:  # of the last micro-batch
        raise KeyError("no such sample")
    return validation(parameters, samples)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (broken(np.nan), FloatingPointError, "after step 2 .*nan of validation samples 2, 3"),
        (broken(np.inf), FloatingPointError, "after step 2 .*inf of validation samples 2, 3"),
        (changing, ValueError, "changes the parameters"),
        (failing, (KeyError, RuntimeError), "no such sample"),
        (lambda *_: None, TypeError, "loss .*got None"),
        (lambda *_: np.zeros(2), TypeError, "got a ndarray"),
    ],
    ids=["nan", "inf", "changes", "raises", "none", "array"],
)
def test_what_a_function_does_wrong_is_raised_on_all_ranks(mesh, function, error, words):
    with pytest.raises(error, match=words):
        optimized(mesh, evaluate=Evaluation(function, 17, every=2, micro_batch_size=2))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda: {"evaluate": Evaluation(validation, 17, every=0)}, ValueError, "every=0"),
        (lambda: {"evaluate": Evaluation(validation, 0, every=1)}, ValueError, "Evaluation: samples=0"),
        (lambda: {"evaluate": Evaluation(17, 17, every=1)}, TypeError, "function .*got int"),
        (lambda: {"evaluate": validation}, TypeError, "evaluate .*got function"),
        (lambda: {"evaluate": Evaluation.for_model(tuple, 17, every=1)}, TypeError, "needs a model with loss"),
        (lambda: {"stop_early": EarlyStopping(2)}, ValueError, "stop_early .*evaluate="),
        (lambda: {"stop_early": 2}, TypeError, "stop_early .*EarlyStopping"),
        (lambda: {"stop_early": EarlyStopping(0)}, ValueError, "patience=0"),
        (lambda: {"stop_early": EarlyStopping(1, min_delta=-1)}, ValueError, "min_delta=-1"),
    ],
)
def test_what_cannot_be_evaluated(mesh, given, error, words):
    with pytest.raises(error, match=words):
        optimized(mesh, **given())


def test_a_best_checkpoint_needs_validation_losses(mesh, folder):
    with Checkpoints(folder, mesh, best="validation loss") as checkpoints:
        with pytest.raises(ValueError, match="best=...[)] .*validation losses"):
            optimized(mesh, checkpoints=checkpoints)
    with pytest.raises(ValueError, match="best='loss'"):
        Checkpoints(folder, mesh, best="loss")


def test_what_ranks_must_have_alike(mesh):
    if mesh.size == 1:
        pytest.skip("one rank differs from none")
    with pytest.raises(ValueError, match="evaluation is .*'every': 3.* on rank 0"):
        optimized(mesh, evaluate=Evaluation(validation, 17, every=3 if mesh.rank == 0 else 2))


def test_a_method_has_line_searches_between_its_iterates(mesh):
    with pytest.raises(ValueError, match="evaluate= .*LBFGS"):
        mpishard.as_distributed(LBFGS(), mesh).optimize(
            problem(), progress=False, evaluate=Evaluation(validation, 17, every=2)
        )
