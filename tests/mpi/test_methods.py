"""Methods in the place of rules: the same bits on any ranks, resumed, resized, divided, and what they refuse."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from methods import EVALUATIONS, INPUTS, METHOD, SAMPLES, SIZE, TARGETS, optimizer_on, problem
from mpi4py import MPI

import mpishard
from mpishard import FlatParameters, OptimizationProblem, ParameterSpec, ShardingConfiguration, nn
from mpishard.checkpoint import Checkpoints
from mpishard.compression import Int8Compressor
from mpishard.layout.boxes import split
from mpishard.minimizers.lbfgs import LBFGS
from mpishard.record.reading import Run

# Methods in the place of rules: the same bits on any ranks, resumed within a line search, resized, and divided.


@pytest.fixture(scope="module")
def alone():
    """The result of one rank, on every rank."""
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return optimizer_on(mesh).optimize(problem(), progress=False)


def test_a_method_ends_by_itself(mesh):
    result = optimizer_on(mesh, LBFGS(maxiter=2)).optimize(problem(None), progress=False)
    assert result.stop_reason == "iterations"


def assert_same(result, alone):
    np.testing.assert_array_equal(result.loss_history, alone.loss_history)
    np.testing.assert_array_equal(result.parameters, alone.parameters)


@pytest.mark.parametrize("kind", [mpishard.ZeRO1Optimizer, mpishard.ZeRO2Optimizer, mpishard.ZeRO3Optimizer])
@pytest.mark.quick
def test_bits_are_those_of_one_rank(mesh, alone, kind):
    optimizer = kind(METHOD, ShardingConfiguration(mesh, reproducible=True))
    result = optimizer.optimize(problem(), progress=False)
    assert_same(result, alone)
    searches = np.diff([0, *(optimizer.minimizer.progress.iterations for _ in range(1))])
    assert 0 < searches[0] < result.steps  # some line searches took more than one evaluation


def test_vectors_are_divided_over_the_data_axis(mesh):
    optimizer = optimizer_on(mesh)
    optimizer.optimize(problem(steps=3), progress=False)
    own = np.diff(split(SIZE, mesh.data.size))[mesh.data.rank]
    vectors = 2 * METHOD.history + 4
    assert optimizer.state.on_rank.nbytes == vectors * own * 8


def test_that_a_start_is_outside_of_its_bounds_is_said_once(mesh, tmp_path, capsys):
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    for steps, said in ((2, 1), (4, 0)):
        with Checkpoints(folder, mesh) as checkpoints:
            method = mpishard.LBFGSB(bounds=(-1.0, 1.0))
            options = {"checkpoints": checkpoints, "resume": True, "progress": False}
            optimizer_on(mesh, method).optimize(problem(steps=steps), **options)
        words = f"{SIZE} elements of the start lie outside of their bounds"
        assert capsys.readouterr().err.count(words) == said * (mesh.rank == 0)


def test_a_run_resumes_within_a_line_search(mesh, alone, tmp_path):
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    for steps in (1, 2, 5, 12, EVALUATIONS):
        with Checkpoints(folder, mesh, keep=1) as checkpoints:
            result = optimizer_on(mesh).optimize(
                problem(steps=steps), progress=False, checkpoints=checkpoints, resume=True
            )
    assert result.resumed_steps == 12
    assert_same(result, alone)


def test_a_state_goes_on_by_its_bytes(mesh, alone):
    first = optimizer_on(mesh)
    first.optimize(problem(steps=7), progress=False)
    second = optimizer_on(mesh)
    second.deserialize(first.serialize())
    result = second.optimize(problem(steps=EVALUATIONS - 7), progress=False)
    np.testing.assert_array_equal(result.parameters, alone.parameters)


def test_a_checkpoint_of_the_result_goes_on_in_the_line_search(mesh, alone, tmp_path):
    """Its parameters are the last iterate; the point that is wanted next is saved apart from them."""
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    start = mpishard.FlatParameters.over(np.full(SIZE, 2.0))
    function = problem().function

    def by_name(steps):
        def flat(parameters, samples, gradients):
            view, accumulate = parameters.gradient("parameters")
            if not accumulate:
                view[...] = 0
            return function(parameters.flat, samples, view)

        return OptimizationProblem(flat, start, SAMPLES, SAMPLES, micro_batch_size=4, steps=steps)

    first = optimizer_on(mesh)
    first.optimize(by_name(7), progress=False)
    first.synchronize_optimizer_state()
    path = mpishard.save_checkpoint(folder, start, first)
    start.flat[:] = 0
    second = optimizer_on(mesh)
    mpishard.load_checkpoint(path, start, second)
    second.optimize(by_name(EVALUATIONS - 7), progress=False)
    np.testing.assert_array_equal(start.flat, alone.parameters)


def test_workers_may_change_within_line_searches(mesh, alone):
    most = mesh.data.size
    plan = {3: 1, 4: max(1, most - 1), 9: most, 14: max(1, most // 2), 21: most}
    optimizer = mpishard.ElasticOptimizer(optimizer_on(mesh), max_workers=most)
    workers = set()

    def callback(state):
        workers.add(optimizer.current_workers)
        if state.step in plan:
            optimizer.resize(plan[state.step])

    result = optimizer.optimize(problem(), progress=False, callback=callback)
    seen = {number for theirs in mesh.world.allgather_object(workers) for number in theirs}
    assert seen == {1, *plan.values(), most}
    assert_same(result, alone)


def test_the_result_is_the_last_accepted_iterate(mesh):
    optimizer = optimizer_on(mesh)
    losses = {}

    def callback(state):
        losses[state.parameters.tobytes()] = state.loss

    result = optimizer.optimize(problem(steps=6), progress=False, callback=callback)
    minimizer = optimizer.minimizer
    np.testing.assert_array_equal(minimizer.space.own(result.parameters), minimizer.best)
    again = optimizer_on(mesh).optimize(problem(steps=1), progress=False)
    assert again.steps == 1
    assert minimizer.progress.value == min(result.loss_history)


def test_another_call_goes_on_in_the_line_search(mesh, alone):
    optimizer = optimizer_on(mesh)
    for steps in (4, 5, EVALUATIONS - 9):
        result = optimizer.optimize(problem(steps=steps), progress=False)
    np.testing.assert_array_equal(result.parameters, alone.parameters)


def test_a_gpt_takes_the_same_steps_on_every_layout(mesh):
    tokens = np.random.default_rng(1).integers(0, 11, (8, 9))

    def losses(comm, **sizes):
        with mpishard.Mesh(comm, **sizes) as own:
            model = nn.GPT(
                vocabulary_size=11, context_length=8, width=16, layers=2, heads=2, dtype=np.float64, seed=3, mesh=own
            )
            gpt = OptimizationProblem.for_model(
                model,
                lambda samples: (tokens[samples, :-1], tokens[samples, 1:]),
                **{"samples": 8, "batch_size": 8, "steps": 12, "tokens_per_sample": 8},
            )
            kind = mpishard.ZeRO1Optimizer
            return kind(LBFGS(history=3), own).optimize(gpt, progress=False).loss_history

    size = mesh.size
    wanted = losses(MPI.COMM_SELF)
    assert wanted[-1] < 0.9 * wanted[0]
    for sizes in ({"tensor": 2}, {"pipeline": 2}) if size % 2 == 0 else ({},):
        np.testing.assert_allclose(losses(MPI.COMM_WORLD, **sizes), wanted, rtol=1e-9)


@pytest.mark.usefixtures("without_debug")
def test_dear_samples_are_dealt_out_by_their_cost(mesh):
    """The bits stay; the dear micro-batch's rank has fewer others."""
    own: list[int] = []
    cheap = problem().function

    def function(parameters, samples, gradients):
        own.append(int(samples[0]) // 4)
        return cheap(parameters, samples, gradients)

    base = problem()
    optimizer = optimizer_on(mesh)
    dear = OptimizationProblem(
        function, np.full(SIZE, 2.0), SAMPLES, batch_size=SAMPLES, micro_batch_size=4, steps=EVALUATIONS
    )
    result = optimizer.optimize(dear, progress=False)
    counts = mesh.world.allgather_object(len(own))
    assert sum(counts) == EVALUATIONS * SAMPLES // 4
    np.testing.assert_array_equal(result.loss_history, optimizer_on(mesh).optimize(base, progress=False).loss_history)


def curved(parameters, direction, samples, products):
    residual = INPUTS[samples] @ parameters - TARGETS[samples]
    bent = np.tanh(residual)
    products += INPUTS[samples].T @ ((1 - bent * (1 - bent * bent)) * (INPUTS[samples] @ direction))


def test_newton_by_hessian_products(mesh):
    """A start near the minimum, where the products are those of a positive definite matrix on the whole."""
    method = mpishard.TruncatedNewton(gtol=1e-10, ftol=0.0)

    def run(own):
        optimizer = optimizer_on(own, method)
        newton = problem(steps=200, product=curved)
        return optimizer.optimize(newton, progress=False), optimizer.minimizer.progress

    result, progress = run(mesh)
    with mpishard.Mesh(MPI.COMM_SELF) as own:
        alone, _ = run(own)
    assert_same(result, alone)
    assert progress.products > progress.evaluations > 1
    assert result.steps == progress.products + progress.evaluations
    assert progress.projected_norm < 1e-6


@pytest.mark.parametrize("keep_history", [False, True])
def test_a_stage_goes_on_with_another_function(mesh, keep_history):
    def runs(own):
        optimizer = optimizer_on(own)
        first = optimizer.optimize(problem(steps=9), progress=False).parameters.copy()
        optimizer.begin_stage(keep_history=keep_history)
        second = optimizer.optimize(stage(first), progress=False)
        return first, second, optimizer.minimizer.progress

    def stage(start):
        whole = problem().function

        def function(parameters, samples, gradients):
            low = samples[samples < SAMPLES // 2]
            return whole(parameters, low, gradients) if len(low) else 0.0

        return OptimizationProblem(function, start, SAMPLES, SAMPLES, micro_batch_size=4, steps=12)

    first, second, progress = runs(mesh)
    assert progress.evaluations == 12
    there = stage(first).function(first, np.arange(SAMPLES), np.zeros(SIZE)) / SAMPLES
    np.testing.assert_allclose(second.loss_history[0], there, rtol=1e-12)
    assert second.loss_history[-1] < second.loss_history[0]
    with mpishard.Mesh(MPI.COMM_SELF) as own:
        assert_same(second, runs(own)[1])


def test_the_record_has_iterations(mesh, tmp_path):
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    record = mpishard.RunRecord(folder, mesh)
    result = optimizer_on(mesh).optimize(problem(steps=8), progress=False, record=record)
    record.close()
    mesh.world.barrier()
    run = Run.read(folder)
    iterations, accepted = run.metrics["iteration"], run.metrics["accepted_loss"]
    assert not run.further
    assert len(iterations) == 8
    assert set(np.diff(iterations)) <= {0, 1}
    np.testing.assert_array_equal(accepted, np.minimum.accumulate(result.loss_history))


def test_a_stage_follows_another_and_is_the_same_on_all_ranks(mesh):
    optimizer = optimizer_on(mesh)
    with pytest.raises(ValueError, match="begin_stage"):
        optimizer.begin_stage()
    optimizer.optimize(problem(steps=3), progress=False)
    if mesh.size > 1:
        with pytest.raises(ValueError, match="keep_history is False on rank 0, True on"):
            optimizer.begin_stage(keep_history=mesh.rank > 0)
    with pytest.raises(Exception, match="keep_history=3"):
        optimizer.begin_stage(keep_history=3 if mesh.rank == mesh.size - 1 else False)
    assert optimizer.minimizer.progress.evaluations == 3


def test_iterations_of_other_samples(mesh, tmp_path):
    """A batch stays for the evaluations of one iteration; the next begins with another one at the same point."""
    batches: list[tuple[int, ...]] = [()]
    folder = mesh.world.allgather_object(str(tmp_path))[0]

    def function(parameters, samples, gradients):
        batches[-1] += tuple(samples.tolist())
        return problem().function(parameters, samples, gradients)

    def of_batches(steps):
        options = {"batch_size": 12, "micro_batch_size": 4, "steps": steps}
        return OptimizationProblem(function, np.full(SIZE, 2.0), SAMPLES, **options)

    def run(own):
        optimizer = optimizer_on(own)
        iterations = [0]

        def callback(state):
            iterations.append(optimizer.minimizer.progress.iterations)
            batches.append(())

        batches[:] = [()]
        result = optimizer.optimize(of_batches(EVALUATIONS), progress=False, callback=callback)
        return result, np.diff(iterations).astype(bool)

    with mpishard.Mesh(MPI.COMM_SELF) as own:
        alone, ended = run(own)
        used = [tuple(sorted(each)) for each in batches[:-1]]
    assert all(len(each) == 12 for each in used)
    changed = [before != after for before, after in itertools.pairwise(used)]
    assert changed == ended[:-1].tolist()
    assert alone.loss_history[-1] < 0.1 * alone.loss_history[0]
    assert_same(run(mesh)[0], alone)

    # Another call, a state and a checkpoint go on with the batch of the line search in which they were.
    optimizer, losses, samples = optimizer_on(mesh), [], 0
    for steps in (5, 6, 4, EVALUATIONS - 15):
        result = optimizer.optimize(of_batches(steps), progress=False)
        losses.extend(result.loss_history)
        samples += result.samples
        if steps == 6:
            before, optimizer = optimizer, optimizer_on(mesh)
            optimizer.deserialize(before.serialize())
        elif steps == 4:
            mpishard.save_checkpoint(folder, optimizer.parameters, optimizer)
            optimizer = optimizer_on(mesh)
            with Checkpoints(folder, mesh) as checkpoints:
                options = {"checkpoints": checkpoints, "resume": True}
                optimizer.optimize(of_batches(15), progress=False, **options)
    np.testing.assert_array_equal(losses, alone.loss_history)
    assert samples == alone.samples

    elastic = mpishard.ElasticOptimizer(optimizer_on(mesh), max_workers=mesh.size)
    losses = []
    for steps in (5, EVALUATIONS - 5):
        result = elastic.optimize(of_batches(steps), progress=False, callback=lambda state: elastic.resize(1))
        losses.extend(result.loss_history)
    np.testing.assert_array_equal(losses, alone.loss_history)


def test_an_iteration_sends_two_words_a_dot_product_and_one_iterate(mesh):
    """With m pairs: 1 product for the line search, 2 m for the pairs, 2 m for the Gram matrices, 2 for the slope."""
    m, size = METHOD.history, mesh.size

    def whole(x):
        gradient = np.zeros(SIZE)
        return problem().function(x, np.arange(SAMPLES), gradient), gradient

    method = mpishard.ReverseCommunication(METHOD, np.full(SIZE, 2.0), mesh=mesh)
    for _ in range(m + 8):
        method.tell(*whole(method.ask().x))
    ended = []
    for _ in range(8):
        before = mesh.ledger.summary()
        method.tell(*whole(method.ask().x))
        after = mesh.ledger.summary()
        ended.append(method.progress.accepted)

        def sent(kind, before=before, after=after):
            own = after.get(kind, {"bytes": 0})["bytes"] - before.get(kind, {"bytes": 0})["bytes"]
            return sum(mesh.world.allgather_object(own))

        # Maxima: of the gradient; at the end of an iteration also of both vectors of the pair, and of the direction.
        words = 1 + 2 * 1 + (2 + 1 + 2 * (2 * m + 2 * m + 2) if ended[-1] else 0)
        assert sent("world.all_reduce dots") == 8 * words * 2 * (size - 1)
        assert sent("data.all_gather parameters") == 8 * SIZE * (size - 1)
    assert any(ended)


# Methods in the place of rules: what they refuse, and how they end where they cannot go on, on all ranks alike.


def test_a_state_of_other_bounds_is_refused(mesh):
    first = optimizer_on(mesh, mpishard.LBFGSB(bounds=(-5.0, 5.0)))
    first.optimize(problem(steps=3), progress=False)
    second = optimizer_on(mesh, mpishard.LBFGSB(bounds=(-0.5, 0.5)))
    with pytest.raises(ValueError, match="other bounds, .*fixed elements"):
        second.deserialize(first.serialize())


def test_a_state_within_another_line_search_changes_nothing(mesh, tmp_path):
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    start = mpishard.FlatParameters.over(np.full(SIZE, 2.0))
    first = optimizer_on(mesh)
    first.optimize(problem(steps=2), progress=False)
    mpishard.save_checkpoint(folder, first.parameters, first)
    second = optimizer_on(mesh, LBFGS(history=5, line_search="hager-zhang"))
    second.bind(start)
    before = {name: slot.copy() for name, slot in second.state.on_rank.slots.items()}
    for attempt in (
        lambda: second.deserialize(first.serialize()),
        lambda: mpishard.load_checkpoint(folder, start, second),
    ):
        with pytest.raises(ValueError, match="MoreThuente, but LBFGS .*HagerZhang"):
            attempt()
        np.testing.assert_equal(second.state.on_rank.slots, before)
        assert (start.flat == 2).all() and not second.clock


def test_a_preconditioner_that_fails_on_one_rank_is_an_error_of_all(mesh):
    def wrong(vector):
        if mesh.rank == mesh.size - 1:
            raise ZeroDivisionError("of one rank")
        return vector

    with pytest.raises(ZeroDivisionError if mesh.rank == mesh.size - 1 else Exception, match="of one rank"):
        optimizer_on(mesh, LBFGS(preconditioner=wrong)).optimize(problem(steps=3), progress=False)
    with pytest.raises(ValueError, match="preconditioner returned"):
        optimizer_on(mesh, LBFGS(preconditioner=lambda v: v[:-1])).optimize(problem(steps=3), progress=False)


REFUSED = {
    "ddp": (lambda mesh: mpishard.DDPOptimizer(METHOD, mesh), "divides its vectors over the data axis"),
    "local sgd": (lambda mesh: mpishard.LocalSGDOptimizer(METHOD, mesh), "divides its vectors over the data axis"),
    "clipping": (lambda mesh: optimizer_on(mesh, max_gradient_norm=1.0), "leave out max_gradient_norm"),
    "compression": (
        lambda mesh: mpishard.as_distributed(
            METHOD, ShardingConfiguration(mesh, enable_gradient_compression=True, gradient_compressor=Int8Compressor())
        ),
        "leave out gradient compression",
    ),
    "batches": (
        lambda mesh: optimizer_on(mesh, mpishard.NonlinearCG()).optimize(
            problem(batch_size=SAMPLES - 4), progress=False
        ),
        "the same in every evaluation",
    ),
    "fixed": (
        lambda mesh: optimizer_on(mesh, LBFGS(fixed=np.zeros(SIZE - 1, bool))).optimize(problem(), progress=False),
        "fixed have the shape",
    ),
    "weights": (
        lambda mesh: optimizer_on(mesh, LBFGS(inner_product=-1.0)).optimize(problem(), progress=False),
        "inner_product .*positive",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_method_cannot_have_is_refused(mesh, case):
    attempt, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        attempt(mesh)


FAILURES = {
    "not finite": (math.nan, "stopped: the value, the gradient or .* is NaN or infinite.*'parameters' on rank 1"),
    "line search": (-1.0, "stopped: the line search found no lower value.*mpishard.check_gradient"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_method_that_cannot_go_on_says_why_once(mesh, capsys, reason):
    factor, words = FAILURES[reason]
    odd = min(1, mesh.size - 1)

    def function(parameters, samples, gradients):
        own = np.zeros(SIZE)
        loss = problem().function(parameters, samples, own)
        gradients += own * (factor if mesh.rank == odd or reason == "line search" else 1.0)
        return loss

    result = optimizer_on(mesh).optimize(problem(function=function), progress=False)
    assert result.stop_reason == reason
    said = capsys.readouterr().err
    assert len(re.findall(words.replace("rank 1", f"rank {odd}"), said)) == (mesh.rank == 0)


def test_ranks_of_one_model_return_one_loss(comm):
    if comm.size == 1:
        pytest.skip("one rank returns one loss")

    def function(parameters, samples, gradients):
        view, _ = parameters.gradient("x")
        view[...] = parameters["x"]
        return 1.0 + comm.rank

    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = FlatParameters([ParameterSpec("x", (8,), tensor_dim=0)], np.float64, place=mesh.place)
        split = OptimizationProblem(function, start, 1, 1, steps=1)
        with pytest.raises(ValueError, match="loss of a step is 1 on rank 0 and 2 on rank 1"):
            mpishard.as_distributed(METHOD, mesh).optimize(split, progress=False)


def test_step_has_no_value_to_decide_by(mesh):
    with pytest.raises(TypeError, match="decides by the value"):
        optimizer_on(mesh).step(np.zeros(SIZE), np.ones(SIZE))


def test_newton_without_products_is_refused(mesh):
    with pytest.raises(ValueError, match="TruncatedNewton needs Hessian products"):
        optimizer_on(mesh, mpishard.TruncatedNewton()).optimize(problem(), progress=False)


def test_a_rule_has_no_stages(mesh):
    with pytest.raises(TypeError, match="Adam .*no stages"):
        mpishard.as_distributed(mpishard.Adam(), mesh).begin_stage()


def test_a_method_stays(mesh):
    optimizer = optimizer_on(mesh)
    with pytest.raises(TypeError, match="Adam .*place of LBFGS"):
        optimizer.rule = mpishard.Adam()
    with pytest.raises(TypeError, match="LBFGS .*place of LBFGS"):
        optimizer.rule = LBFGS(history=5, maxiter=3)
    of_rule = mpishard.as_distributed(mpishard.Adam(), mesh)
    with pytest.raises(TypeError, match="LBFGS .*place of Adam"):
        of_rule.rule = METHOD
    assert optimizer.rule is METHOD
