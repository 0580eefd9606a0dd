"""What a process has: BLAS threads, pauses of garbage collection, and what the bits of a run depend on."""

from __future__ import annotations

import gc
import json
import math
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import mpishard
from mpishard import SGD, DDPOptimizer, Mesh, OptimizationProblem, ShardingConfiguration, nn
from mpishard.backend import process
from mpishard.backend.garbage import no_garbage_collection, objects_stay
from mpishard.backend.jit_function import KERNELS
from mpishard.backend.process import arithmetic, cpu_quota
from mpishard.comm.agreement import fingerprint
from mpishard.data_parallel.arithmetic import ARITHMETIC, DIFFERENT_BITS, Arithmetic
from mpishard.data_parallel.configuration import SHARDING
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.elastic.mesh_limits import MeshLimits
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.parameters.flat import FlatParameters

# The number of BLAS threads: what limits it.


CGROUP, V1 = "proc/self/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({CGROUP: "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 50000\n"}, 2.0),
        ({CGROUP: "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "what is this\n"}, math.inf),
        (
            {
                CGROUP: "4:memory:/a\n3:cpu,cpuacct:/a\n",
                f"{V1}/a/cpu.cfs_quota_us": "300000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
            },
            3.0,
        ),
    ],
)
def test_quota_of_cpu_time(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


NOT_CHOSEN = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"])


@pytest.mark.parametrize(
    ("a", "b", "given"),
    [
        ((64, 64), (64, 64), [1, 4]),
        ((9, 64, 64), (9, 64, 64), [1, 4]),  # each of them is small
        ((64,), (64, 64), [1, 4]),
        ((512, 256), (256, 256), []),
    ],
)
def test_small_products_have_one_thread(
    a: tuple[int, ...], b: tuple[int, ...], given: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(process, "_openblas", lambda: (lambda: 4, set_to.append))
    assert np.array_equal(process.matmul(np.ones(a), np.ones(b)), np.matmul(np.ones(a), np.ones(b)))
    assert set_to == given


def test_the_number_of_threads_is_what_it_was_after_a_product(environ: Callable[..., None]) -> None:
    environ(**NOT_CHOSEN)
    process._openblas.cache_clear()
    found = process._openblas()
    if found is None:
        pytest.skip("NumPy has another BLAS here")
    get_threads, _ = found
    with threadpool_limits(2):
        with pytest.raises(ValueError):
            process.matmul(np.ones((2, 3)), np.ones((2, 3)))
        assert get_threads() == 2
    process._openblas.cache_clear()


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_a_choice_of_the_user_stands(variable: str, environ: Callable[..., None]) -> None:
    environ(**{variable: "2"})
    process._openblas.cache_clear()
    assert process._openblas() is None
    process._openblas.cache_clear()


def test_xla_gets_as_many_threads_where_the_user_chose_none(environ: Callable[..., None]) -> None:
    environ(OPENBLAS_NUM_THREADS="2", NPROC="7")
    assert process.limit_blas_threads(MPI.COMM_SELF, [0]) == 2 and os.environ["NPROC"] == "7"
    environ(NPROC=None)
    assert process.limit_blas_threads(MPI.COMM_SELF, [0]) == 2 and os.environ["NPROC"] == "2"
    environ(**NOT_CHOSEN)
    with threadpool_limits(2):
        process.fix_blas_threads()
    assert os.environ["NPROC"] == "1"


# Pauses of garbage collection, and objects that the next collections pass over.


class Ring:
    """An object that only garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collection_as_before() -> Iterator[None]:
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()  # no collection but those of the test
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()
    if enabled:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_as_before_after_a_pause(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(KeyError), no_garbage_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled


def test_pauses_of_several_threads_end_with_the_last() -> None:
    gc.enable()
    one, other = no_garbage_collection(), no_garbage_collection()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.parametrize("frozen_by_user", [False, True])
def test_young_collections_pass_over_what_stays_and_a_full_one_does_not(frozen_by_user: bool) -> None:
    """Where the user has frozen objects, none are passed over and those stay frozen."""
    gc.collect()
    kept = gc.get_freeze_count()  # a full collection of Python 3.12 freezes what is immortal
    gc.unfreeze()
    if frozen_by_user:
        gc.freeze()
    before, ring = gc.get_freeze_count(), Ring()
    found = weakref.ref(ring)
    objects_stay()
    assert not frozen_by_user or gc.get_freeze_count() == before > 0
    del ring
    gc.collect(1)
    assert (found() is None) == frozen_by_user
    gc.collect()
    assert found() is None
    assert frozen_by_user or gc.get_freeze_count() == kept


# What the bits of a run depend on besides its settings: told, compared with a checkpoint's, and recorded.


@pytest.fixture(scope="module")
def mesh():
    with Mesh() as mesh:
        yield mesh


def parameters_of(specs=None, sums_by_mpi=False, **place):
    found = FlatParameters(specs or [ParameterSpec("a", (4, 6))], place=ModelParallelRank(**place))
    found.sums_by_mpi = sums_by_mpi
    return found


def taken(mesh, parameters=None, **options):
    """The facts of parameters, and a configuration."""
    config = ShardingConfiguration(mesh, **({"reproducible": True} | options))
    noted = Arithmetic()
    noted.take(parameters_of() if parameters is None else parameters, config, mesh.world)
    noted.own["micro_batch_size"] = "3"
    return noted, config


def saved(noted, **changes):
    """Facts of a checkpoint, of which some are others."""
    return {SHARDING: {"reproducible": True}, "steps": 7, ARITHMETIC: {**noted.own, **changes}}


def test_the_facts_are_of_this_process_now():
    with threadpoolctl.threadpool_limits(1):
        found = arithmetic()
    assert found["BLAS threads"] == "1"
    assert np.__version__ in found["NumPy"]
    assert all(isinstance(text, str) and text for text in found.values())
    kernels = {pool.get("architecture", "unknown") for pool in threadpoolctl.threadpool_info()}
    assert found["BLAS kernels"] in kernels | {"unknown"}


def test_shards_are_those_of_the_tensors_or_of_the_tensor_ranks(mesh):
    def shards(slices=1, **options):
        parameters = parameters_of([ParameterSpec("a", (4, 6), tensor_dim=1, slices=slices)], **options)
        return taken(mesh, parameters)[0].own["shards"]

    of = {"tensor_rank": 1, "tensor_size": 2}
    assert taken(mesh)[0].own["shards"] == "1"
    assert shards(2) == shards(2, **of) == "2"
    assert shards(**of) == "1"  # what its sums depend on is the user's
    assert shards(**of, sums_by_mpi=True) == "1 on 2 tensor ranks"


@pytest.mark.parametrize(
    ("sums_by_mpi", "options"),
    [(False, {}), (True, {}), (True, {"reproducible": False}), (True, {"allow_different_bits": True})],
)
def test_an_elastic_run_has_the_tensor_sizes_from_which_a_checkpoint_can_go_on(mesh, sums_by_mpi, options):
    split = [ParameterSpec("a", (4, 6), tensor_dim=1)]
    parameters, wide = (parameters_of(split, sums_by_mpi, tensor_rank=0, tensor_size=size) for size in (1, 2))
    (noted, config), (other, _) = taken(mesh, parameters, **options), taken(mesh, wide, **options)
    problem = OptimizationProblem(lambda *_: 0.0, parameters, 8, 8, steps=1)
    why_not = MeshLimits(DDPOptimizer(SGD(0.1), config), problem)
    assert why_not(MeshSizes(1)) == ""
    refused = "with reproducible=True a model without shards keeps its tensor size of 1, since 2 changes the bits"
    if sums_by_mpi and not options:
        assert why_not(MeshSizes(1, tensor=2)).startswith(refused)
        with pytest.raises(
            ValueError, match="shards is 1 there and 1 on 2 tensor ranks here; make the mesh with tensor=1;"
        ):
            other.check(saved(noted), config)
        with pytest.raises(ValueError, match="make the mesh with tensor=2;"):
            noted.check(saved(other), config)
    else:
        assert why_not(MeshSizes(1, tensor=2)) == ""
        other.check(saved(noted), config)


CHANGES = {
    "BLAS kernels": ("Zen", "set OPENBLAS_CORETYPE=Zen"),
    "BLAS threads": ("9", "set OPENBLAS_NUM_THREADS=9"),
    "shards": ("4", "make the model with shards=4"),
    "micro_batch_size": ("2", "give the problem micro_batch_size=2"),
    "C library": ("musl", "run it where C library is musl"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_facts_are_refused_with_both_sides_and_the_way_out(mesh, name):
    then, remedy = CHANGES[name]
    noted, config = taken(mesh)
    noted.check(saved(noted), config)
    with pytest.raises(ValueError, match="allow_different_bits=True") as caught:
        noted.check(saved(noted, **{name: then}), config)
    assert f"{name} is {then} there and {noted.own[name]} here" in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_they_are_allowed_and_recorded(mesh, capsys):
    noted, config = taken(mesh, allow_different_bits=True)
    facts = saved(noted, shards="4") | {DIFFERENT_BITS: ["from step 3 on something"]}
    noted.check(facts, config)
    noted.note(facts, config, rank=0)
    noted.restore(facts)
    assert "shards is 4 there and 1 here" in capsys.readouterr().err
    assert noted.facts[DIFFERENT_BITS][0] == "from step 3 on something"
    assert noted.facts[DIFFERENT_BITS][1].startswith("from step 7 on")
    assert noted.facts[ARITHMETIC] == noted.own
    assert len(noted.facts[DIFFERENT_BITS]) == 2


LATER = {"of a later version": "x", "kernels": str(KERNELS)}


@pytest.mark.parametrize("facts", [{}, {ARITHMETIC: 3}, {ARITHMETIC: LATER}])
def test_a_checkpoint_without_facts_goes_on_with_a_line(mesh, capsys, facts):
    noted, config = taken(mesh)
    facts = {SHARDING: {"reproducible": True}, "steps": 7, **facts}
    noted.check(facts, config)
    noted.note(facts, config, rank=0)
    told = capsys.readouterr().err
    assert told.count("\n") == (not isinstance(facts.get(ARITHMETIC), dict))
    assert not noted.changes


def test_only_reproducible_runs_compare(mesh, capsys):
    """One that was not goes on with a line."""
    for now in (True, False):
        noted, config = taken(mesh, reproducible=now)
        facts = saved(noted, shards="4") | {SHARDING: {"reproducible": not now}}
        noted.check(facts, config)
        noted.note(facts, config, rank=0)
        assert ("holds from step 7 on" in (said := capsys.readouterr().err)) == now and bool(said) == now
        assert now or noted.facts[ARITHMETIC]["shards"] == "1"


class Ranks:
    """Two ranks, of which the other has other facts."""

    rank, members = 0, (0, 1)

    def __init__(self, other):
        self._other = other

    def all_reduce(self, values, *, op, label):
        number = fingerprint(self._other)
        np.maximum(values[:3], [0, number, -number], out=values[:3])

    def allgather_object(self, thing):
        return [thing, self._other if isinstance(thing, dict) else fingerprint(self._other)]


def test_ranks_of_one_job_that_differ_are_told(mesh, capsys):
    noted, config = taken(mesh)
    ranks = Ranks({**noted.own, "BLAS kernels": "Zen"})
    with pytest.raises(ValueError, match="BLAS kernels is .*rank 0, Zen on rank 1"):
        noted.agree(config, ranks)
    noted, config = taken(mesh, allow_different_bits=True)
    noted.agree(config, ranks)
    noted.agree(config, ranks)
    told = capsys.readouterr().err
    assert told.count("Zen on rank 1") == 1
    assert len(noted.changes) == 1


def test_a_model_that_rounds_where_stages_meet_is_refused(mesh, capsys):
    model = nn.GPT(vocabulary_size=11, context_length=4, width=8, layers=2, heads=2, mesh=mesh, wire_dtype=np.float16)
    with pytest.raises(ValueError, match="wire_dtype"):
        DDPOptimizer(SGD(lr=0.1), ShardingConfiguration(mesh, reproducible=True)).bind(model.parameters)
    optimizer = DDPOptimizer(SGD(lr=0.1), ShardingConfiguration(mesh, reproducible=True, allow_different_bits=True))
    optimizer.bind(model.parameters)
    assert "wire_dtype" in optimizer.state.facts[DIFFERENT_BITS][0]
    assert "wire_dtype" in capsys.readouterr().err
    with pytest.raises(ValueError, match="reproducible=True"):  # there must be something to allow
        ShardingConfiguration(mesh, allow_different_bits=True)


def test_the_record_of_a_run_has_them(mesh, tmp_path):
    def function(parameters, samples, gradients):
        gradients += len(samples) * parameters
        return float(len(samples))

    optimizer = mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), ShardingConfiguration(mesh, reproducible=True))
    problem = mpishard.OptimizationProblem(function, np.ones(3), 4, 4, steps=1, micro_batch_size=2)
    optimizer.optimize(problem, progress=False, record=mpishard.RunRecord(tmp_path, mesh))
    (line,) = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    assert line["arithmetic"] == {**arithmetic(), **optimizer.settings.arithmetic.own}
    assert line["arithmetic"]["micro_batch_size"] == "2"
    page = (Path(__file__).parents[2] / "docs/reference/record-folder.md").read_text("utf-8")
    assert [name for name in line if f"`{name}`" not in page] == []
