"""Runs in which one rank computes wrongly: it is found, and the bits are those of a run in which it was right."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI
from training_problems import gpt_problem, problem
from variants import full

import mpishard
from mpishard import ElasticOptimizer, ShardingConfiguration, minimize
from mpishard.backend import process
from mpishard.layout.run_state import GRADIENT_ERRORS
from mpishard.record import Run
from mpishard.record.reading import read_lines
from mpishard.reduction import ordered
from mpishard.training import audit

pytestmark = pytest.mark.pairs(2)

OPTIONS = {"batch_size": 16, "micro_batch_size": 2, "steps": 10}  # 8 micro-batches a step, of three steps an epoch
WRONG = 1  # the rank that is wrong
LATER = 5  # from this step on


def inner(strategy, mesh, **options):
    return strategy(mpishard.AdamW(lr=0.05), ShardingConfiguration(mesh, reproducible=True, **options))


def bits(result):
    found = result.parameters
    parameters = found.flat if isinstance(found, mpishard.FlatParameters) else found
    return parameters.tobytes(), result.loss_history.tobytes(), result.samples, result.stop_reason


class Faults:
    """A function around that of a problem, on the rank that is wrong: a bit of what it computes is another one."""

    def __init__(self, kind, mesh, optimizer):
        self.kind, self.wrong, self.optimizer = kind, mesh.rank == WRONG, optimizer
        self.calls = 0

    @property
    def strikes(self):
        """Whether this call is wrong."""
        if not self.wrong or self.optimizer.optimizer.clock + 1 < LATER:
            return False
        self.calls += 1
        return {"once": self.calls == 1, "second": self.calls == 2}.get(self.kind, True)

    def of_array(self, function):
        def wrapped(parameters, samples, gradients):
            loss = function(parameters, samples, gradients)
            if self.strikes:
                if self.kind == "loss":
                    return float(np.nextafter(loss, np.inf))
                hit = gradients[3:4].view(np.uint64)
                if self.kind != "above a size" or abs(gradients[3]) > 10:
                    hit ^= 1 << 3
            return loss

        return wrapped

    def of_model(self, several, parameters):
        """The model computes with a parameter that is another one, which it is not afterwards."""

        def wrapped(values, micro, gradients):
            memory, strikes = parameters.held[11:12].view(np.uint64), self.strikes
            memory ^= np.uint64(strikes << 40)
            try:
                return several(values, micro, gradients)
            finally:
                memory ^= np.uint64(strikes << 40)

        return wrapped


@functools.cache
def alone(make_problem):
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        return bits(inner(mpishard.DDPOptimizer, mesh).optimize(make_problem(), progress=False))


def of_array(faults=None):
    made = problem(**OPTIONS)
    return made if faults is None else replace(made, function=faults.of_array(made.function))


def of_model(faults=None):
    made = gpt_problem(**OPTIONS)
    return made if faults is None else replace(made, several=faults.of_model(made.several, made.start))


def of_one_micro_batch(faults=None):
    return problem(batch_size=8, micro_batch_size=8, steps=3)


def of_sums(monkeypatch, faults):
    """A problem in which parts of sums that a rank adds up are wrong: first its own part, then that of another one."""
    add_by_tree = ordered.add_by_tree

    def wrapped(*arguments):
        add_by_tree(*arguments)
        if faults.strikes:
            arguments[-1][:1].view(np.uint64)[...] ^= np.uint64(1)

    monkeypatch.setattr(ordered, "add_by_tree", wrapped)
    return of_array()


def trained(mesh, make_problem, kind, share, strategy=mpishard.DDPOptimizer, **more):
    """The bits of a run, and by the steps in which each rank of the beginning took part the number of workers.

    `kind`: of the fault.
    """
    optimizer, workers = ElasticOptimizer(inner(strategy, mesh), audit=share), {}
    faults = None if kind is None else Faults(kind, mesh, optimizer)
    world = mesh.world.comm.Dup()
    found = optimizer.optimize(
        make_problem(faults),
        callback=lambda state: workers.update({state.step: optimizer.current_workers}),
        progress=False,
        **more,
    )
    gathered = world.allgather(workers)
    world.Free()
    return bits(found), gathered


def noted(mesh, folder):
    """The one line of the record about what the audit has found."""
    mesh.world.comm.barrier()
    (line,) = read_lines(folder / "run" / "audits.jsonl")[0]
    return line


@pytest.mark.mpi(min_size=2)
def test_ranks_without_micro_batches_add_up_parts_of_sums(mesh):
    """As slow ranks of an elastic run may be."""
    assert trained(mesh, of_one_micro_batch, None, 1.0)[0] == alone(of_one_micro_batch)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("strategy", [mpishard.DDPOptimizer, mpishard.ZeRO1Optimizer])
@pytest.mark.parametrize(
    ("make_problem", "kind"),
    [
        (of_array, "once"),
        (of_array, "always"),
        (of_array, "above a size"),
        (of_array, "loss"),
        (of_model, "once"),
        (of_model, "always"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_odd_one_is_put_out_and_its_part_taken_from_others(mesh, make_problem, kind, strategy, capfd):
    ranks = mesh.size
    found, workers = trained(mesh, make_problem, kind, 1.0, strategy)
    assert found == alone(make_problem)
    expected = {step: ranks - (step >= LATER) for step in range(1, OPTIONS["steps"] + 1)}
    before = dict.fromkeys(range(1, LATER), ranks)
    assert workers == [before if rank == WRONG else expected for rank in range(ranks)]
    told = [line for line in capfd.readouterr().err.splitlines() if "computed wrongly" in line]
    for message in mesh.world.comm.allreduce(told):
        for part in (f"rank {WRONG} on ", "micro-batch ", f"step {LATER} ", "nothing that it computed wrongly"):
            assert part in message
    assert len(mesh.world.comm.allreduce(told)) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", [mpishard.DDPOptimizer, *full(mpishard.ZeRO1Optimizer)])
@pytest.mark.parametrize("kind", ["once", "second", "always"])
def test_a_third_rank_decides_whose_sum_is_wrong(mesh, kind, strategy, monkeypatch, folder):
    make_problem = functools.partial(of_sums, monkeypatch)
    record = mpishard.RunRecord(folder / "run", mesh)
    if mesh.size == 2:
        with pytest.raises(RuntimeError, match=f"sums of gradients of step {LATER}, of rank 0 on .*rank 1 on"):
            trained(mesh, make_problem, kind, 1.0, strategy, record=record)
        assert noted(mesh, folder)["outcome"] == "stopped"
        pytest.skip("the rest needs three ranks")
    found, workers = trained(mesh, make_problem, kind, 1.0, strategy, record=record)
    monkeypatch.undo()
    assert found == alone(of_array)
    assert max(workers[WRONG]) == LATER - 1
    assert max(workers[0]) == OPTIONS["steps"]
    line = noted(mesh, folder)
    assert (line["step"], line["kind"], line["last_right"], line["outcome"]) == (LATER, "sums", LATER - 1, "put out")
    assert [each["rank"] for each in line["wrong"]] == [WRONG]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("share", [0.1, *full(0.5)])
def test_a_rank_that_is_always_wrong_is_seen_in_time_and_noted(mesh, share, folder):
    host, pid = mesh.world.allgather_object((platform.node(), os.getpid()))[WRONG]
    _, most = audit.expected_steps(share, 8, mesh.size)
    with mpishard.RunRecord(folder / "run", mesh) as record:
        _, workers = trained(mesh, of_array, "always", share, record=record)
        line = noted(mesh, folder)
    seen = len(workers[WRONG]) + 1  # the step that it did not finish
    assert LATER <= seen < LATER + most
    assert (line["step"], line["start"], line["outcome"]) == (seen, 1, "put out")
    assert line["wrong"] == [{"rank": WRONG, "host": host, "pid": pid}]
    assert 0 <= line["micro_batch"] < 8
    assert 0 <= line["last_right"] < seen


@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("make_problem", [of_array, of_model])
def test_right_ranks_raise_no_alarm(mesh, make_problem, share, capfd):
    found, workers = trained(mesh, make_problem, None, share)
    assert found == alone(make_problem)
    assert {number for each in workers for number in each.values()} == {mesh.size}
    assert "computed wrongly" not in capfd.readouterr().err


@pytest.mark.mpi(min_size=2)
def test_two_ranks_stop_and_name_the_part(comm, folder):
    part = comm.Split(comm.rank < 2, comm.rank)
    if comm.rank < 2:
        with mpishard.Mesh(part) as mesh, mpishard.RunRecord(folder / "run", mesh) as record:
            with pytest.raises(RuntimeError, match=f"micro-batch .* of step {LATER} ") as found:
                trained(mesh, of_array, "always", 1.0, record=record)
            line = noted(mesh, folder)
        assert "rank 0 on" in str(found.value)
        assert "rank 1 on" in str(found.value)
        assert (line["step"], line["outcome"], line["wrong"]) == (LATER, "stopped", [])
        assert [each["rank"] for each in line["differ"]] in ([0, 1], [1, 0])
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_too_few_are_left(mesh, folder):
    optimizer = ElasticOptimizer(inner(mpishard.DDPOptimizer, mesh), min_workers=mesh.size, audit=1)
    record = mpishard.RunRecord(folder / "run", mesh)
    with pytest.raises(RuntimeError, match=f"step {LATER} .*rank {WRONG} on"):
        optimizer.optimize(of_array(Faults("always", mesh, optimizer)), progress=False, record=record)
    line = noted(mesh, folder)
    assert ([each["rank"] for each in line["wrong"]], line["outcome"]) == ([WRONG], "stopped")


@pytest.mark.mpi(min_size=3)
def test_a_random_function_is_no_case(mesh):
    rng = np.random.default_rng(mesh.rank)

    def function(parameters, samples, gradients):
        gradients += rng.standard_normal()
        return 1.0

    random = replace(of_array(), function=function)
    with pytest.raises(RuntimeError, match="random numbers") as found:
        ElasticOptimizer(inner(mpishard.DDPOptimizer, mesh), audit=1).optimize(random, progress=False)
    assert "three ranks or more" not in str(found.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["parameters", "optimizer/exp_avg"])
def test_a_bit_that_flips_in_memory_is_mended(mesh, kind, capfd, folder):
    """After step 10, where all ranks compare what they hold; of two ranks nobody knows which one is right."""
    made = problem(**{**OPTIONS, "steps": 12})
    optimizer = ElasticOptimizer(inner(mpishard.DDPOptimizer, mesh), audit="replicas")

    def flip(state):
        if state.step == audit.REPLICAS_EVERY and mesh.rank == WRONG:
            (array,) = [each.array for each in optimizer.optimizer.state.capture().shards if each.kind == kind]
            array[3:4].view(np.uint64)[...] ^= np.uint64(1 << 40)

    record = mpishard.RunRecord(folder / "run", mesh)
    if mesh.size == 2:
        with pytest.raises(RuntimeError, match=f"{kind} on each of rank 0 on .*rank 1 on"):
            optimizer.optimize(made, callback=flip, progress=False, record=record)
        line = noted(mesh, folder)
        assert ([each["rank"] for each in line["differ"]], line["outcome"]) == ([0, 1], "stopped")
        pytest.skip("the rest needs three ranks")
    found = bits(optimizer.optimize(made, callback=flip, progress=False, record=record))
    line = noted(mesh, folder)
    assert (line["step"], line["kind"], line["last_right"], line["outcome"]) == (10, kind, 0, "mended")
    assert [each["rank"] for each in line["wrong"]] == [WRONG]
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        assert found == bits(inner(mpishard.DDPOptimizer, one).optimize(made, progress=False))
    told = [line for line in capfd.readouterr().err.splitlines() if f"other {kind} on rank {WRONG} on" in line]
    assert len(told) == (mesh.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [3, 10, 12])
def test_a_bit_that_flips_in_the_last_step_is_seen(mesh, steps, folder):
    made = problem(**{**OPTIONS, "steps": steps})
    optimizer = ElasticOptimizer(inner(mpishard.DDPOptimizer, mesh), audit="replicas")

    def flip(state):
        if state.step == steps and mesh.rank == WRONG:
            (array,) = [each.array for each in optimizer.optimizer.state.capture().shards if each.kind == "parameters"]
            array[3:4].view(np.uint64)[...] ^= np.uint64(1 << 40)

    def found():
        return bits(optimizer.optimize(made, callback=flip, progress=False, record=record))

    with mpishard.RunRecord(folder / "run", mesh) as record:
        if mesh.size == 2:
            with pytest.raises(RuntimeError, match="parameters on each of rank 0 on .*rank 1 on"):
                found()
        else:
            with mpishard.Mesh(MPI.COMM_SELF) as one:
                assert found() == bits(inner(mpishard.DDPOptimizer, one).optimize(made, progress=False))
        line = noted(mesh, folder)
    outcome = "stopped" if mesh.size == 2 else "mended"
    assert (line["step"], line["last_right"], line["outcome"]) == (steps, 10 * (steps > 10), outcome)


@pytest.mark.mpi(min_size=2)
def test_what_compression_leaves_out_differs_and_is_not_compared(mesh):
    configuration = ShardingConfiguration(mesh, enable_gradient_compression=True)
    optimizer = ElasticOptimizer(mpishard.DDPOptimizer(mpishard.AdamW(lr=0.05), configuration), audit="replicas")
    assert optimizer.optimize(problem(**OPTIONS), progress=False).steps == 10
    (left,) = [each.array for each in optimizer.optimizer.state.capture().shards if each.kind == GRADIENT_ERRORS]
    assert len(set(mesh.world.allgather_object(left.tobytes()))) > 1


ROWS = np.random.default_rng(5).standard_normal((24, 31))
TARGETS = np.linspace(-1, 1, 24)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("method", ["L-BFGS-B", *full("Newton-CG")])
def test_samples_of_a_minimisation(mesh, method, same_on_all):
    calls, is_wrong = 0, mesh.rank == WRONG  # whatever its number is later

    def shots(x, samples):
        nonlocal calls
        residual = ROWS[samples] @ x - TARGETS[samples]
        bend = np.tanh(residual)
        gradient = ROWS[samples].T @ (residual + 1 - bend * bend)
        calls += 1
        if wrong and is_wrong and calls > 40:
            gradient.view(np.uint64)[3] ^= np.uint64(1)
        return 0.5 * residual @ residual + bend.sum(), gradient

    def hessp(x, direction, samples):
        bend = np.tanh(ROWS[samples] @ x - TARGETS[samples])
        return ROWS[samples].T @ ((1 - 2 * bend * (1 - bend * bend)) * (ROWS[samples] @ direction))

    def found(**elastic):
        more = {"hessp": hessp} if method == "Newton-CG" else {"bounds": (-1, 0.6)}
        result = minimize(
            shots, np.zeros(31), method=method, mesh=mesh, samples=24, elastic=elastic, options={"maxiter": 5}, **more
        )
        return result.x.tobytes(), result.jac.tobytes(), result.fun, result.nfev, result.message

    wrong = False
    expected = found(respawn=False)
    assert found(audit=0.3) == expected
    calls, wrong = 0, True
    assert found(audit=1.0, respawn=False) == expected
    assert same_on_all(expected)


def test_the_record_says_what_is_seen_when(mesh, folder):
    for share in (0.25, "replicas"):
        with mpishard.RunRecord(folder / "run", mesh) as record:
            trained(mesh, of_array, None, share, record=record)
    if mesh.rank == 0:
        mean, most = audit.expected_steps(0.25, 8, mesh.size)
        first, second = {"share": 0.25}, {"every": 10}
        for facts, steps in ((first, (round(mean, 2), most)), (second, (5.5, 10))):
            facts |= dict(zip(("mean_steps", "most_steps"), steps if mesh.size > 1 else (None, None), strict=True))
        assert [start["audit"] for start in Run.read(folder / "run").starts] == [first, second]


def test_what_cannot_be_audited_is_refused(mesh):
    def config(**options):
        return ShardingConfiguration(mesh, **options)

    adam = mpishard.AdamW(lr=0.01)
    cases = [
        (mpishard.ZeRO2Optimizer(adam, config(reproducible=True)), of_model(), "DDP or ZeRO-1"),
        (mpishard.DDPOptimizer(adam, config()), of_array(), "reproducible=True"),
    ]
    for optimizer, made, words in cases:
        with pytest.raises(ValueError, match=words):
            ElasticOptimizer(optimizer, audit=0.1).optimize(made, progress=False)
    with pytest.raises(ValueError, match="'replicas' .*ZeRO3"):
        sharded = mpishard.ZeRO3Optimizer(adam, config(reproducible=True))
        ElasticOptimizer(sharded, audit="replicas").optimize(of_model(), progress=False)
    with pytest.raises(ValueError, match="samples=N"):
        minimize(lambda x: (x @ x, 2 * x), np.ones(3), mesh=mesh, elastic={"audit": 0.1})
    wrong = (0, ValueError), (1.5, ValueError), (5e-324, ValueError), ("other", TypeError), (True, TypeError)
    for share, error in wrong:
        with pytest.raises(error, match="audit="):
            ElasticOptimizer(adam, mesh, audit=share)
    with pytest.raises(ValueError, match="audit= .*layouts="):
        ElasticOptimizer(adam, mesh, audit=0.1, layouts=[{}])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("share", "allowed"), [(0.1, {"allow_different_bits": True}), ("replicas", {})])
def test_processors_of_two_kinds_are_refused(mesh, monkeypatch, share, allowed):
    """Also where a run without an audit would begin: its bits may differ, or no reproducible ones are asked for."""
    facts = process._of_processor() | {"processor of compiled kernels": "znver4" if mesh.rank else "icelake-server"}
    monkeypatch.setattr(process, "_of_processor", lambda: facts)
    configuration = ShardingConfiguration(mesh, reproducible=bool(allowed), **allowed)
    optimizer = ElasticOptimizer(mpishard.DDPOptimizer(mpishard.AdamW(lr=0.01), configuration), audit=share)
    with pytest.raises(ValueError, match="audit compares.*processor.*icelake-server.*znver4.*audit="):
        optimizer.optimize(of_array(), progress=False)
