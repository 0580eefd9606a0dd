"""The costs of very many ranks: formulas against cases by hand, where they break, and the measured start of a rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from mpi4py import MPI

from mpishard import Mesh
from mpishard.estimate import Cluster, MachineProfile, StartParts, breaks, costs, measure_start
from mpishard.estimate.many_ranks import COMMUNICATORS, LIMITS, burdens

PARTS = StartParts(processor_seconds=0.5, opens=600, lookups=400, bytes_read=10**8, object_seconds=1e-6)
CLUSTER = Cluster(
    cores_per_node=4,
    ranks_per_node=8,
    opens_per_second=1e4,
    file_bandwidth=1e9,
    days_between_failures=100.0,
    detection_seconds=0.25,
    parameters=1e6,
    step_seconds=2.0,
)
# Within a node nothing takes time; between nodes a round takes 1 ms, and 4 MB one second.
MACHINE = MachineProfile.given(flops=1e9, bandwidth=math.inf, latency=0.0).with_network(1e-3, 4e6, 8)


def test_costs_by_hand() -> None:
    found = costs(16, PARTS, CLUSTER, MACHINE)
    gathers = 11 * (4 * 1e-3 + 15 * 8 / 4e6)  # 16 ranks are 4 rounds; a rank passes on 8 bytes of each of 15 others
    objects = 4 * 1e-3 + 15 * 64 / 4e6 + 16 * 1e-6
    step = {
        "computing": 2.0,
        "bytes of gradients and parameters": 2 * 15 / 16 * 4e6 / 4e6,
        "rounds of collectives": 22 * 4 * 1e-3,
    }
    assert found.start == pytest.approx(
        {
            "processor time": 1.0,  # 8 ranks on 4 cores
            "opening files": 1.6,
            "reading files": 0.2,  # once for each of 2 nodes
            "communicators": gathers,
            "objects of all ranks": 2 * objects,
        }
    )
    assert found.step == pytest.approx(step)
    assert found.checkpoint == pytest.approx(
        {"writing": 0.012, "creating files": 16 / 1e4, "objects of all ranks": 2 * objects}
    )
    assert found.heal == pytest.approx(
        {
            "noticing a death": 0.25,
            "communicators": gathers,
            "objects of all ranks": 4 * objects,
            "state from a buddy": 1e-3 + 12e6 / 16 / 4e6,
            "the step again": sum(step.values()),
        }
    )
    assert found.deaths_per_second == pytest.approx(2 / (100 * 86400))


def test_one_rank_communicates_with_nobody() -> None:
    found = costs(1, PARTS, CLUSTER, MACHINE)
    assert found.step == {"computing": 2.0, "bytes of gradients and parameters": 0.0, "rounds of collectives": 0.0}
    assert found.start["communicators"] == 0
    assert found.start["processor time"] == 0.5


def test_more_ranks_than_any_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks=10000001 is more than the 10,000,000"):
        costs(10**7 + 1, PARTS, CLUSTER, MACHINE)


def test_within_a_node_nothing_goes_over_the_network() -> None:
    assert costs(8, PARTS, CLUSTER, MACHINE).start["communicators"] == 0
    assert costs(9, PARTS, CLUSTER, MACHINE).start["communicators"] > 0


def test_rounds_grow_with_the_logarithm_and_files_with_the_ranks() -> None:
    few, many = (costs(ranks, PARTS, CLUSTER, MACHINE) for ranks in (2**10, 2**20))
    assert many.step["rounds of collectives"] == pytest.approx(2 * few.step["rounds of collectives"])
    assert many.start["opening files"] == pytest.approx(2**10 * few.start["opening files"])
    assert many.start["processor time"] == few.start["processor time"]
    # An all-reduce in a ring sends at most twice its bytes, on however many ranks.
    assert few.step["bytes of gradients and parameters"] < many.step["bytes of gradients and parameters"] < 2


def test_more_ranks_take_no_less_but_for_the_copy_of_a_smaller_state() -> None:
    found = [costs(10**exponent, PARTS, CLUSTER, MACHINE) for exponent in range(8)]
    for few, many in zip(found, found[1:], strict=False):
        for what in LIMITS:
            before, after = getattr(few, what), getattr(many, what)
            assert all(after[part] >= before[part] for part in before if part != "state from a buddy")
    assert found[7].heal["state from a buddy"] < found[3].heal["state from a buddy"]


def test_what_breaks_first() -> None:
    # Of 600 s for the start 0.5 s go to the processor and next to nothing elsewhere; an open takes 1/10 s of each rank.
    fast = replace(CLUSTER, cores_per_node=8, opens_per_second=1e4, file_bandwidth=1e15)
    found = breaks(PARTS, fast, MachineProfile.given(flops=1e9, bandwidth=1e15, latency=0.0))
    first = found[0]
    assert (first.what, first.part) == ("start", "opening files")
    assert first.ranks == pytest.approx(5995, abs=5)
    assert 0.99 < first.share < 1
    assert sorted(each.what for each in found) == sorted(LIMITS)
    numbers = [each.ranks or math.inf for each in found]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("what", LIMITS)
def test_each_limit_is_crossed_at_the_number_found(what: str) -> None:
    slow = replace(CLUSTER, parameters=4e6, file_bandwidth=1e8, opens_per_second=100.0, days_between_failures=1.0)
    (found,) = (each for each in breaks(PARTS, slow, MACHINE) if each.what == what)
    assert found.ranks is not None
    assert burdens(costs(found.ranks, PARTS, slow, MACHINE))[what] > 1
    assert found.ranks == 1 or burdens(costs(found.ranks - 1, PARTS, slow, MACHINE))[what] <= 1


def test_limits_in_numbers() -> None:
    found = costs(16, PARTS, CLUSTER, MACHINE)
    near = burdens(found)
    assert near["start"] == pytest.approx(sum(found.start.values()) / 600)
    assert near["step"] == pytest.approx((sum(found.step.values()) - 2) / 2)
    assert near["checkpoint"] == pytest.approx(sum(found.checkpoint.values()) / 360)
    assert near["heal"] == pytest.approx(sum(found.heal.values()) * found.deaths_per_second * 10)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_run_has_ranks(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks={ranks} must be a whole number of at least 1"):
        costs(ranks, PARTS, CLUSTER, MACHINE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cores_per_node": 0},
        {"ranks_per_node": -1},
        {"opens_per_second": 0.0},
        {"file_bandwidth": math.nan},
        {"days_between_failures": math.inf},
        {"detection_seconds": -1.0},
        {"parameters": 0.0},
        {"step_seconds": -2.0},
    ],
)
def test_assumptions_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
        replace(CLUSTER, **wrong)


def test_parts_are_checked() -> None:
    with pytest.raises(ValueError, match="opens=-1"):
        replace(PARTS, opens=-1)
    with pytest.raises(ValueError, match="processor_seconds=nan"):
        replace(PARTS, processor_seconds=math.nan)


def test_a_mesh_makes_as_many_communicators() -> None:
    with Mesh(MPI.COMM_SELF) as mesh:
        assert 2 * len(mesh._axes) + 1 == COMMUNICATORS


def test_the_start_of_a_rank_is_measured() -> None:
    found = measure_start()
    # Python, NumPy, Numba and this package are hundreds of modules, each of them looked for, and megabytes.
    assert found.opens > 300
    assert found.lookups > found.opens
    assert found.bytes_read > 10**7
    assert 0 < found.object_seconds < found.processor_seconds


def test_a_rank_cannot_measure_the_start_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="call it without mpirun of Open MPI"):
        measure_start()


def test_a_start_that_fails_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpishard.estimate.many_ranks._START", "raise SystemExit('no such thing')")
    with pytest.raises(ValueError, match="cannot be measured, since it failed: no such thing"):
        measure_start()
