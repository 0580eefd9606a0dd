"""Runs that stop and go on, from checkpoints, with other ranks and in other layouts."""

from __future__ import annotations

import numpy as np
import pytest
import training_problems
from mpi4py import MPI

import mpishard
from mpishard import AdamW, Checkpoints, DDPOptimizer, HybridShardedOptimizer, OptimizationProblem, ZeRO2Optimizer, nn
from mpishard.layout.tensors import ModelParallelRank

RULE = AdamW(lr=mpishard.cosine(0.1, steps=9), eps=1e-3)
TOKENS = np.random.default_rng(1).integers(0, 11, (45, 6))


def problem(steps, **changes):
    return training_problems.problem(**{"batch_size": 8, "seed": 4, "steps": steps, **changes})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_where_it_stopped(mesh, folder, same_on_all, asynchronous, capsys):
    whole = DDPOptimizer(RULE, mesh).optimize(problem(9), progress=False)
    with Checkpoints(folder, mesh, every=2, asynchronous=asynchronous) as checkpoints:
        DDPOptimizer(RULE, mesh).optimize(problem(5), progress=False, checkpoints=checkpoints)
    with Checkpoints(folder, mesh) as checkpoints:
        optimizer = DDPOptimizer(RULE, mesh)
        result = optimizer.optimize(problem(9), progress=False, checkpoints=checkpoints, resume=True)
        assert (result.steps, result.resumed_steps, optimizer.steps) == (9, 5, 9)
        assert result.samples == whole.samples
        assert np.array_equal(result.loss_history, whole.loss_history)
        assert np.array_equal(result.parameters, whole.parameters)
        assert same_on_all(result.parameters)
        # Once more, with nothing left to do.
        capsys.readouterr()
        result = DDPOptimizer(RULE, mesh).optimize(problem(9), progress=False, checkpoints=checkpoints, resume=True)
        assert (result.steps, result.resumed_steps) == (9, 9)
        assert np.array_equal(result.parameters, whole.parameters)
        assert (f"resumes from step 9 of {folder}" in (said := capsys.readouterr().err)) == (mesh.rank == 0)
        nothing_left = "is already finished: it reached steps=9 at step 9; increase `steps` to continue"
        assert (nothing_left in said) == (mesh.rank == 0)


def gpt_problem(model, steps, **options):
    def batch(samples):
        return TOKENS[samples, :-1], TOKENS[samples, 1:]

    options = {"samples": len(TOKENS), "batch_size": 10, **options}
    return OptimizationProblem.for_model(model, batch, steps=steps, **options)


def test_a_rule_with_other_numbers_is_reported(mesh, folder, capsys):
    def check(expected):
        shown = "".join(line for line in capsys.readouterr().err.splitlines(True) if "resumes from" not in line)
        assert expected in shown and shown.count("mpishard:") == 1 if expected and mesh.rank == 0 else not shown

    lr, plain = mpishard.cosine(0.2, steps=9), AdamW(lr=0.1, weight_decay=0.0)
    grouped = AdamW(lr=0.1, weight_decay=0.0, groups=[mpishard.ParameterGroup("*", weight_decay=0, lr_factor=2)])
    clipped = mpishard.ShardingConfiguration(mesh, max_gradient_value=3)
    continues, groups = "mpishard: the saved state continues with ", "*: weight_decay=0.0 lr_factor=2.0"
    cases = (
        (RULE, mesh, ""),
        (RULE, mesh, ""),
        (AdamW(lr=lr, eps=1e-3), mesh, f"{continues}lr={lr} in place of {RULE.lr}\n"),
        (plain, mesh, f"{continues}lr=0.1 in place of {lr}, eps=1e-08 in place of 0.001, weight_decay=0.0 in"),
        (grouped, clipped, f"groups={groups} in place of none, max_gradient_value=3.0 in place of None"),
        (plain, mesh, f"groups=none in place of {groups}"),
    )
    for number, (rule, config, expected) in enumerate(cases, 1):
        optimizer = DDPOptimizer(rule, config)
        with Checkpoints(folder, mesh) as checkpoints:
            optimizer.optimize(problem(2 * number), progress=False, checkpoints=checkpoints, resume=True)
        check(expected)
    other, flat = DDPOptimizer(AdamW(lr=0.3, weight_decay=0.0), mesh), np.zeros(6)
    mpishard.load_checkpoint(folder, flat, other)
    check(f"{continues}lr=0.3 in place of 0.1\n")
    other.deserialize(optimizer.serialize())
    check(f"{continues}lr=0.3 in place of 0.1\n")
    mpishard.load_checkpoint(folder, flat, optimizer)
    unnamed = [DDPOptimizer(AdamW(lr=lambda step: 0.1), mesh) for _ in range(2)]
    for each in unnamed:
        each.step(flat, np.ones(6))
    unnamed[0].deserialize(unnamed[1].serialize())
    check("")


def everything_while_training(comm, steps, zero_stage, tensor=1, pipeline=1, folder=None):
    """Losses, validation losses, parameters and their average, with parameter groups and clipping by value."""
    without_decay = mpishard.ParameterGroup(["*norm.weight", "*.bias"], weight_decay=0)
    groups = [without_decay, mpishard.ParameterGroup("*_embedding.*", lr_factor=0.5)]
    rule = AdamW(lr=0.05, weight_decay=0.1, ema_decay=0.5, groups=groups)
    with mpishard.Mesh(comm, tensor=tensor, pipeline=pipeline) as mesh:
        model = nn.GPT(
            vocabulary_size=11,
            context_length=5,
            width=8,
            layers=2,
            heads=2,
            mesh=mesh,
            shards=2,
            sharded_parameters=zero_stage == 3,
        )
        config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_value=0.02)
        optimizer = HybridShardedOptimizer(rule, config, zero_stage=zero_stage)
        task = gpt_problem(model, steps, samples=40, batch_size=13, micro_batch_size=3, tokens_per_sample=5)

        def held_out(samples):
            return TOKENS[40 + samples, :-1], TOKENS[40 + samples, 1:]

        evaluation = mpishard.Evaluation.for_model(held_out, 5, every=2, tokens_per_sample=5, averaged=True)
        stop_early = mpishard.EarlyStopping(patience=3, min_delta=10.0)  # stops after the fourth evaluation
        options = {"evaluate": evaluation, "stop_early": stop_early, "progress": False}
        if folder is None:
            result = optimizer.optimize(task, **options)
        else:
            with Checkpoints(folder, mesh, best="validation loss") as checkpoints:
                result = optimizer.optimize(task, checkpoints=checkpoints, resume=True, **options)
        own = mpishard.as_distributed(model, mesh)
        whole = own.gather_full_parameters()
        with optimizer.averaged_parameters():
            average = own.gather_full_parameters()
        return [result.loss_history, result.validation_steps, result.validation_losses, whole, average], result


@pytest.mark.filterwarnings("ignore:.*micro-batches for .* pipeline stages")
def test_what_happens_while_training_has_the_same_bits_in_other_layouts(comm, folder):
    expected, alone = everything_while_training(MPI.COMM_SELF, 9, 0)
    layouts = [{"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 1}]
    if comm.size % 2 == 0:
        layouts = [{"zero_stage": 3, "tensor": 2}, {"zero_stage": 1, "pipeline": 2}, {"zero_stage": 2}]
    for steps, layout in zip((3, 6, 9), layouts, strict=True):
        found, result = everything_while_training(comm, steps, folder=folder, **layout)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    assert (result.steps, result.stop_reason) == (alone.steps, alone.stop_reason) == (8, "patience")
    comm.Barrier()
    best = alone.validation_steps[np.argmin(alone.validation_losses)]
    assert (folder / "best").resolve().name == f"step-{best:08d}"


def test_a_model_with_other_heads_is_reported(mesh, folder, capsys):
    for steps, heads, dropout, expected in (
        (2, 4, 0.0, ""),
        (4, 4, 0.0, ""),
        (6, 2, 0.1, "heads=2 in place of 4"),
        (8, 2, 0.0, "dropout=0.0 in place of 0.1"),
    ):
        model = nn.GPT(vocabulary_size=11, context_length=5, width=8, layers=2, heads=heads, mesh=mesh, dropout=dropout)
        with Checkpoints(folder, mesh) as checkpoints:
            DDPOptimizer(RULE, mesh).optimize(
                gpt_problem(model, steps), progress=False, checkpoints=checkpoints, resume=True
            )
        shown = capsys.readouterr().err
        assert shown.count("mpishard: the saved model continues with") == int(bool(expected) and mesh.rank == 0)
        assert mesh.rank or expected in shown


def test_without_a_checkpoint_a_run_begins(mesh, folder):
    with Checkpoints(folder / "new", mesh, every=100) as checkpoints:
        result = DDPOptimizer(RULE, mesh).optimize(problem(3), progress=False, checkpoints=checkpoints, resume=True)
        assert (result.steps, result.resumed_steps) == (3, 0)
    with pytest.raises(ValueError, match="resume=True"):
        DDPOptimizer(RULE, mesh).optimize(problem(3), resume=True)


@pytest.mark.parametrize(
    ("changes", "rule", "message"),
    [
        ({"batch_size": 9}, RULE, "batch_size=8 there and 9 here"),
        ({"seed": 5}, RULE, "seed=4 there and 5 here"),
        ({}, mpishard.SGD(lr=0.1), r"AdamW \(.*SGD \(slots: none\)"),
        ({}, AdamW(lr=0.1, amsgrad=True), "max_exp_avg_sq"),
    ],
)
def test_another_run_does_not_go_on(mesh, folder, changes, rule, message):
    with Checkpoints(folder, mesh) as checkpoints:
        DDPOptimizer(RULE, mesh).optimize(problem(3), progress=False, checkpoints=checkpoints)
        optimizer = DDPOptimizer(rule, mesh)
        with pytest.raises(ValueError, match=message):
            optimizer.optimize(problem(9, **changes), progress=False, checkpoints=checkpoints, resume=True)
        assert optimizer.steps == 0


def test_a_rule_with_fewer_slots_does_not_drop_the_others(mesh, folder):
    flat, optimizer = np.zeros(6), DDPOptimizer(mpishard.SGD(lr=0.1, momentum=0.9), mesh)
    optimizer.step(flat, np.ones(6))
    mpishard.save_checkpoint(folder, flat, optimizer)
    other = DDPOptimizer(mpishard.SGD(lr=0.1), mesh)
    dropped = r"momentum_buffer.*SGD \(slots: none\)"
    with pytest.raises(ValueError, match=dropped):
        mpishard.load_checkpoint(folder, np.zeros(6), other)
    with pytest.raises(ValueError, match=dropped):
        other.deserialize(optimizer.serialize())


def test_a_run_that_reached_its_tolerance_takes_no_more_steps(mesh, folder):
    with Checkpoints(folder, mesh) as checkpoints:
        runs = [
            DDPOptimizer(RULE, mesh).optimize(
                problem(9, tolerance=tolerance), progress=False, checkpoints=checkpoints, resume=True
            )
            for tolerance in (1e3, 1e3, 1e-9)
        ]
    assert [(run.steps, run.stop_reason) for run in runs] == [(1, "tolerance"), (1, "tolerance"), (9, "steps")]


def test_a_run_goes_on_from_a_loop_of_ones_own(mesh, folder):
    flat, optimizer = np.zeros(6), DDPOptimizer(RULE, mesh)
    for step in range(3):
        optimizer.step(flat, np.full(6, step + 1.0))
    mpishard.save_checkpoint(folder, flat, optimizer, facts={"loss": 2.5, "validation_loss": 3.5})
    with Checkpoints(folder, mesh) as checkpoints:
        result = DDPOptimizer(RULE, mesh).optimize(problem(5), progress=False, checkpoints=checkpoints, resume=True)
    assert (result.steps, result.resumed_steps, result.samples) == (5, 3, 40)
    assert np.isnan(result.loss_history[:3]).all() and np.isfinite(result.loss_history[3:]).all()


def test_a_seed_of_many_bits_goes_on(mesh, folder):
    with Checkpoints(folder, mesh) as checkpoints:
        options = {"progress": False, "checkpoints": checkpoints, "resume": True}
        for _ in range(2):
            DDPOptimizer(RULE, mesh).optimize(problem(3, seed=2**127 + 1), **options)
        with pytest.raises(ValueError, match="other samples: seed="):
            DDPOptimizer(RULE, mesh).optimize(problem(3, seed=2**127), **options)


def test_what_cannot_be_saved_is_refused_before_the_first_step(mesh, folder):
    optimizer = DDPOptimizer(RULE, mesh)
    for facts, message in [
        ({"x": object()}, "the fact 'x' is a object"),
        ({"x.json": object()}, "JSON cannot hold the fact 'x.json'"),
        ({"x": "a\0b"}, "zero byte"),
        ({"steps": 7}, "'steps' is one of the run's own"),
    ]:
        with Checkpoints(folder, mesh) as checkpoints, pytest.raises(ValueError, match=message):
            optimizer.optimize(problem(3, facts=facts), progress=False, checkpoints=checkpoints)
        with pytest.raises(ValueError, match=message):
            mpishard.save_checkpoint(folder, np.zeros(6), optimizer, facts=facts)
    with Checkpoints(folder, mesh) as checkpoints, pytest.raises(ValueError, match="'seed' is one of the run's own"):
        optimizer.optimize(problem(3, facts={"seed": 7}), progress=False, checkpoints=checkpoints)
    assert optimizer.steps == 0 and not list(folder.iterdir())


def test_checkpoints_are_of_the_optimizers_ranks(mesh, folder):
    if mesh.size == 1:
        pytest.skip("there is but one mesh")
    with mpishard.Mesh(MPI.COMM_SELF) as other, Checkpoints(folder, other) as checkpoints:
        with pytest.raises(ValueError, match="make both with one mesh"):
            DDPOptimizer(RULE, mesh).optimize(problem(3), progress=False, checkpoints=checkpoints)


def test_checkpoints_say_what_made_them(mesh, folder):
    model = nn.GPT(vocabulary_size=11, context_length=5, width=8, layers=2, heads=2, mesh=mesh)
    task = gpt_problem(model, 7, facts={"note": "first try"})
    with Checkpoints(folder, mesh) as checkpoints:
        ZeRO2Optimizer(RULE, mesh).optimize(task, progress=False, checkpoints=checkpoints)
    facts = mpishard.load_checkpoint(folder, model, mesh=mesh)
    assert (facts["step"], facts["samples_consumed"], facts["seed"], facts["note"]) == (7, 65, 0, "first try")
    assert facts["model.json"]["width"] == 8 and facts["mesh.json"]["data"] == mesh.size
    assert facts["rule.json"]["beta1"] == 0.9 and facts["optimizer"] == "ZeRO2Optimizer"


def test_one_at_a_time_with_a_loop_of_ones_own(mesh, folder):
    flat = np.linspace(-1, 1, 7)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    for step in range(3):
        optimizer.step(flat, np.full(7, step + 1.0))
    written = mpishard.save_checkpoint(folder, flat, optimizer, facts={"temperature": 2.5})
    assert (written / "manifest.json").exists()
    saved = flat.copy()
    optimizer.step(flat, np.ones(7))
    expected = flat.copy()

    flat[:] = 0
    assert mpishard.load_checkpoint(folder, flat, optimizer)["temperature"] == 2.5
    assert np.array_equal(flat, saved) and optimizer.steps == 3
    optimizer.step(flat, np.ones(7))
    assert np.array_equal(flat, expected)

    fresh, other = np.zeros(7), ZeRO2Optimizer(AdamW(lr=0.1), mesh)
    mpishard.load_checkpoint(written, fresh, other)
    other.step(fresh, np.ones(7))
    assert np.array_equal(fresh, expected)

    alone = np.zeros(7)
    mpishard.load_checkpoint(folder, alone, mesh=mesh)
    assert np.array_equal(alone, saved)


def test_a_loop_of_ones_own_keeps_the_two_newest_of_its_own_run(mesh, folder):
    def saved():
        mesh.world.barrier()
        found = [path.name.lstrip("step-0") for path in sorted(folder.glob("step-*"))]
        mesh.world.barrier()
        return found

    flat, first, second = np.linspace(-1, 1, 7), *(DDPOptimizer(AdamW(lr=0.1), mesh) for _ in range(2))
    for keep in (None, None, 2, 2, 3):
        first.step(flat, np.ones(7))
        mpishard.save_checkpoint(folder, flat, first, **{} if keep == 2 else {"keep": keep})
    assert saved() == ["3", "4", "5"]
    second.step(flat, np.ones(7))
    mpishard.save_checkpoint(folder, flat, second, keep=1)
    assert saved() == ["1", "3", "4", "5"]
    mpishard.load_checkpoint(folder, flat, second)
    for _ in range(2):
        second.step(flat, np.ones(7))
    mpishard.save_checkpoint(folder, flat, second)
    assert saved() == ["1", "3-2"]


def test_a_load_after_passes_in_which_ranks_had_other_tensors(mesh, folder):
    parameters = mpishard.FlatParameters([mpishard.ParameterSpec(name, (3,)) for name in "abc"])
    optimizer = DDPOptimizer(RULE, mpishard.ShardingConfiguration(mesh, minimum_parameter_group_size=1))
    optimizer.bind(parameters)
    mpishard.save_checkpoint(folder, parameters, optimizer)
    for name in "cba"[: mesh.rank]:
        parameters.gradients[name] += 1
        parameters.mark_ready(name)
    mpishard.load_checkpoint(folder, parameters, optimizer)
    assert not parameters.gradients.has_content
    parameters.gradients["a"] += 1
    optimizer.step(parameters)
    assert parameters["a"].all() and not parameters["b"].any()


def test_what_cannot_be_loaded_changes_nothing(mesh, folder):
    flat = np.linspace(-1, 1, 7)
    optimizer = DDPOptimizer(AdamW(lr=0.1), mesh)
    optimizer.step(flat, np.ones(7))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        mpishard.load_checkpoint(folder, flat, optimizer)
    with pytest.raises(TypeError, match="needs an optimizer, or mesh="):
        mpishard.load_checkpoint(folder, flat)
    with mpishard.Mesh(tensor=-1, data=1) as another, pytest.raises(ValueError, match="not that of the optimizer"):
        mpishard.load_checkpoint(folder, flat, optimizer, mesh=another)
    mpishard.save_checkpoint(folder, flat, optimizer)
    for other, message in [(np.zeros(8), "another model"), (np.zeros(7, np.float32), "float64")]:
        with pytest.raises(ValueError, match=message):
            mpishard.load_checkpoint(folder, other, DDPOptimizer(AdamW(lr=0.1), mesh))
        assert not other.any()


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_what_fits_one_rank_alone_is_refused_on_all(mesh, folder, with_optimizer):
    flat, optimizer = np.zeros(7), DDPOptimizer(RULE, mesh)
    written = mpishard.save_checkpoint(folder, flat, optimizer)
    read_only = np.zeros(7)
    read_only.flags.writeable = mesh.rank > 0
    refused = [(read_only, ValueError, "read-only"), ([0.0] if mesh.rank == 0 else flat, TypeError, "got list")]
    if mesh.size > 1:
        refused.append((np.zeros(7 + mesh.rank), ValueError, "all ranks must have the same parameters"))
        other = ModelParallelRank(tensor_rank=mesh.rank, tensor_size=mesh.size)
        model = mpishard.FlatParameters([mpishard.ParameterSpec("t", (7,), tensor_dim=0)], place=other)
        refused.append((model, ValueError, "laid out for rank"))
    for parameters, kind, message in refused:
        options = {"optimizer": DDPOptimizer(RULE, mesh)} if with_optimizer else {"mesh": mesh}
        with pytest.raises(kind, match=message):
            mpishard.load_checkpoint(written, parameters, **options)
    with pytest.raises(ValueError, match="read-only"):
        mpishard.save_checkpoint(folder, read_only, DDPOptimizer(RULE, mesh))


def test_communicators_are_freed_after_an_error(mesh, folder, monkeypatch):
    made = []

    class Recorded(Checkpoints):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr("mpishard.training.saving.Checkpoints", Recorded)
    mpishard.save_checkpoint(folder, np.zeros(6), DDPOptimizer(RULE, mesh))
    with pytest.raises(ValueError, match="another model"):
        mpishard.load_checkpoint(folder, np.zeros(7), mesh=mesh)
    assert len(made) == 2
    for checkpoints in made:
        with pytest.raises(ValueError, match="are closed"):
            checkpoints.load(None)
