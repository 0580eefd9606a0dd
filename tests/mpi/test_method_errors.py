"""Methods in the place of rules: what they refuse, and how they end where they cannot go on, on all ranks alike."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from methods import METHOD, SAMPLES, SIZE, optimizer_on, problem

import mpishard
from mpishard import FlatParameters, OptimizationProblem, ParameterSpec, ShardingConfiguration
from mpishard.compression import Int8Compressor
from mpishard.minimizers.lbfgs import LBFGS


def test_a_state_of_other_bounds_is_refused(mesh):
    first = optimizer_on(mesh, mpishard.LBFGSB(bounds=(-5.0, 5.0)))
    first.optimize(problem(steps=3), progress=False)
    second = optimizer_on(mesh, mpishard.LBFGSB(bounds=(-0.5, 0.5)))
    with pytest.raises(ValueError, match="other bounds, fixed elements"):
        second.deserialize(first.serialize())


def test_a_state_within_another_line_search_changes_nothing(mesh, tmp_path):
    folder = mesh.world.allgather_object(str(tmp_path))[0]
    start = mpishard.FlatParameters.over(np.full(SIZE, 2.0))
    first = optimizer_on(mesh)
    first.optimize(problem(steps=2), progress=False)
    mpishard.save_checkpoint(folder, first.parameters, first)
    second = optimizer_on(mesh, LBFGS(history=5, line_search="armijo"))
    second.bind(start)
    before = second.state.on_rank.slot_rows.copy()
    for attempt in (
        lambda: second.deserialize(first.serialize()),
        lambda: mpishard.load_checkpoint(folder, start, second),
    ):
        with pytest.raises(
            ValueError, match="within a line search by MoreThuente, but LBFGS has the line_search Armijo"
        ):
            attempt()
        np.testing.assert_array_equal(second.state.on_rank.slot_rows, before)
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
        "inner_product must be positive and finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_method_cannot_have_is_refused(mesh, case):
    attempt, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        attempt(mesh)


FAILURES = {
    "not finite": (math.nan, "cannot go on: the value, the gradient or .* is NaN or infinite.*'parameters' on rank 1"),
    "line search": (-1.0, "cannot go on: the line search found no lower value.*mpishard.check_gradient"),
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
        with pytest.raises(ValueError, match="mean loss of a step is 1 on rank 0 and 2 on rank 1"):
            mpishard.as_distributed(METHOD, mesh).optimize(split, progress=False)


def test_step_has_no_value_to_decide_by(mesh):
    with pytest.raises(TypeError, match="decides by the value"):
        optimizer_on(mesh).step(np.zeros(SIZE), np.ones(SIZE))


def test_newton_without_products_is_refused(mesh):
    with pytest.raises(ValueError, match="TruncatedNewton needs Hessian products"):
        optimizer_on(mesh, mpishard.TruncatedNewton()).optimize(problem(), progress=False)


def test_a_rule_has_no_stages(mesh):
    with pytest.raises(TypeError, match="Adam is a rule and has no stages"):
        mpishard.as_distributed(mpishard.Adam(), mesh).begin_stage()


def test_a_method_stays(mesh):
    optimizer = optimizer_on(mesh)
    with pytest.raises(TypeError, match="Adam cannot take the place of LBFGS.*Make a new optimizer"):
        optimizer.rule = mpishard.Adam()
    with pytest.raises(TypeError, match="LBFGS cannot take the place of LBFGS"):
        optimizer.rule = LBFGS(history=5, maxiter=3)
    of_rule = mpishard.as_distributed(mpishard.Adam(), mesh)
    with pytest.raises(TypeError, match="LBFGS cannot take the place of Adam"):
        of_rule.rule = METHOD
    assert optimizer.rule is METHOD
