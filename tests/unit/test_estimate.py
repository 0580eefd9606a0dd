"""Estimates of memory, traffic and time, on processors and devices."""

from __future__ import annotations

import errno
import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.estimate import (
    TYPICAL,
    Layout,
    Link,
    MachineProfile,
    Workload,
    estimate,
    layouts,
    model_state_bytes,
    table,
)
from mpishard.estimate.profile import OPERATIONS
from mpishard.estimate.times import makespan, peak_in_flight
from mpishard.nn import device_attention, products
from mpishard.nn.architecture import Architecture
from mpishard.pipeline.schedule import make_schedule, simulate

# Estimates of bytes and times, by hand and against the model itself on one rank.

TINY = Architecture(vocabulary_size=11, context_length=6, width=8, layers=4, heads=2)
# Of one block of TINY: two norms, qkv and output, expand and contract; with biases.
BLOCK = 4 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
EMBEDDINGS, HEAD = 11 * 8 + 6 * 8, 2 * 8 + 8 * 11


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_table_1_of_the_zero_paper(zero_stage: int, gigabytes: float) -> None:
    assert model_state_bytes(7.5e9, 64, zero_stage) / 1e9 == pytest.approx(gigabytes, rel=3e-3)


@pytest.mark.parametrize(("parameters", "ranks", "stage"), [(0, 1, 0), (1, 0, 0), (1, 1, 4), (math.nan, 1, 0)])
def test_table_1_refuses(parameters: float, ranks: int, stage: int) -> None:
    with pytest.raises(ValueError, match="must be|unknown ZeRO stage"):
        model_state_bytes(parameters, ranks, stage)


def test_one_rank_by_hand() -> None:
    found = estimate(TINY, batch=3, length=5)
    (stage,) = found.stages
    size = EMBEDDINGS + 4 * BLOCK + HEAD
    assert stage.parameters == size
    rows = 15
    # A block keeps two norms with their statistics, queries, keys, values and what they mix, the normaliser of each
    # head, two hidden arrays, and what two projections give back to the residual stream.
    block = 2 * (8 + 2) + 4 * 8 + 2 + 2 * 32 + 2 * 8
    assert stage.memory.parameters == stage.memory.gradients == 4 * size
    assert stage.memory.state == 8 * size
    assert stage.memory.gathered == stage.memory.buckets == 0
    assert stage.memory.activations == 4 * rows * (8 + 4 * block + (8 + 2) + 11)
    assert not any(stage.sent.values())
    assert found.bubble_fraction == 0


@pytest.mark.parametrize(("tied", "recompute", "microbatches"), [(False, False, 1), (True, False, 3), (True, True, 3)])
def test_activations_are_what_the_model_measures(tied: bool, recompute: bool, microbatches: int) -> None:
    model = nn.GPT(
        vocabulary_size=67,
        context_length=32,
        width=24,
        layers=3,
        heads=4,
        tied=tied,
        recompute=recompute,
        microbatches=microbatches,
    )
    tokens = np.zeros((5, 32), np.int64)
    model.loss_and_gradient(tokens, tokens)
    found = estimate(model.architecture, batch=5, microbatches=microbatches, recompute=recompute)
    assert found.memory.parameters == model.parameters.nbytes
    assert found.memory.activations + found.memory.scratch == pytest.approx(model.activation_bytes, rel=0.01)


def test_values_and_their_fields_by_name_are_one_call() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2, zero_stage=2, schedule="gpipe", recompute=True)
    work = Workload(batch=3, length=5, microbatches=2, itemsize=8, slots=1, minimum_parameter_group_size=16)
    by_name = {**asdict(layout), **asdict(work)}
    found = estimate(TINY, layout, work)
    assert found == estimate(TINY, **by_name) == estimate(TINY, workload=work, **asdict(layout))
    assert (found.batch, found.length, found.microbatches) == (3, 5, 2)
    assert estimate(TINY) == estimate(TINY, Layout(sequence_parallel=True), Workload(), TYPICAL)
    many = dict(length=5, microbatches=2, itemsize=8, slots=1, minimum_parameter_group_size=16)
    assert table([layout], TINY, 5, **many) == table([layout], TINY, 5, work) == [found]


def test_tensor_and_sequence_parallelism_by_hand() -> None:
    found = estimate(TINY, tensor=2, batch=2, length=6)
    half = estimate(TINY, tensor=2, batch=2, length=6, sequence_parallel=True)
    # Weights of blocks and the tables are halved, of 11 rows rank 0 has 6; norms, positions and the biases after sums
    # are replicas.
    replicas = 4 * (4 * 8 + 2 * 8) + 6 * 8 + 2 * 8
    split = 4 * (BLOCK - 6 * 8) // 2 + 2 * 6 * 8
    assert found.stages[0].parameters == replicas + split
    rows, each = 12, 12 * 8 * 4
    # An all-reduce sends 2 (2 - 1) times its bytes over both ranks: two forward and two backward a block, one for the
    # embedding, one for the head, and 3 numbers a token for the loss.
    sent = found.stages[0].sent
    assert sent["tensor", "activations"] == 2 * (2 * 4 + 1) * each + 2 * 3 * rows * 4
    assert sent["tensor", "activation gradients"] == 2 * (2 * 4 + 1) * each
    assert sent["tensor", "gradients"] == 0
    sent = half.stages[0].sent
    # The same in halves, and the inputs of two products a block and of the head once more.
    assert sent["tensor", "activations"] == (4 * 4 + 1 + 1 + 2 * 4 + 1) * each + 2 * 3 * rows * 4
    assert sent["tensor", "activation gradients"] == (4 * 4 + 1 + 1) * each
    assert sent["tensor", "gradients"] == 2 * 4 * (replicas - 6 * 8)
    assert half.memory.activations < found.memory.activations


def test_pipeline_by_hand() -> None:
    found = estimate(TINY, pipeline=2, microbatches=4, batch=4, length=6)
    first, last = found.stages
    assert (first.parameters, last.parameters) == (EMBEDDINGS + 2 * BLOCK, 2 * BLOCK + HEAD)
    bytes_ = 4 * 6 * 8 * 4
    assert (first.sent["pipeline", "activations"], first.sent["pipeline", "activation gradients"]) == (bytes_, 0)
    assert (last.sent["pipeline", "activations"], last.sent["pipeline", "activation gradients"]) == (0, bytes_)
    # Two micro-batches in flight on the first stage, one on the last.
    one = estimate(TINY, pipeline=2, microbatches=1, batch=1, length=6)
    assert first.memory.activations == 2 * one.stages[0].memory.activations
    assert last.memory.activations == one.stages[1].memory.activations
    gpipe = estimate(TINY, pipeline=2, microbatches=4, batch=4, length=6, schedule="gpipe")
    assert gpipe.stages[0].memory.activations == 4 * one.stages[0].memory.activations


def test_zero_stages_by_hand() -> None:
    size = EMBEDDINGS + 4 * BLOCK + HEAD
    options = dict(data=4, batch=1, minimum_parameter_group_size=10**9)
    by_stage = [estimate(TINY, zero_stage=stage, **options).stages[0] for stage in range(4)]  # type: ignore[arg-type]
    quarter = -(-size // 4)
    assert [stage.memory.state for stage in by_stage[:3]] == [8 * size, 8 * quarter, 8 * quarter]
    assert [stage.memory.gradients for stage in by_stage[:3]] == [4 * size, 4 * size, 4 * quarter]
    assert by_stage[2].memory.buckets == 4 * size
    # Units are cut one by one.
    units = [EMBEDDINGS, *[BLOCK] * 4, HEAD]
    assert by_stage[3].memory.parameters == 4 * sum(-(-unit // 4) for unit in units)
    # Embeddings and head use a small block in turns; on a device no block is kept.
    assert by_stage[3].memory.gathered == by_stage[3].memory.buckets == 4 * (2 * BLOCK + EMBEDDINGS)
    on_device = estimate(TINY, zero_stage=3, device=True, **options).stages[0]  # type: ignore[arg-type]
    assert on_device.memory.gathered == on_device.memory.buckets == 4 * 2 * BLOCK
    sent = [sum(count for (axis, _), count in stage.sent.items() if axis == "data") for stage in by_stage]
    # Over all four ranks: 2 (4 - 1) times the bytes, and 3 (4 - 1) for ZeRO-3.
    assert sent == [24 * size, 24 * size, 24 * size, 36 * size]


def test_ties() -> None:
    tied = Architecture(11, 6, 8, 4, 2, tied=True)
    found = estimate(tied, pipeline=2, microbatches=2, batch=2)
    assert [stage.parameters for stage in found.stages] == [EMBEDDINGS + 2 * BLOCK, 2 * BLOCK + HEAD]
    assert [stage.sent["ties", "gradients"] for stage in found.stages] == [4 * 88, 4 * 88]
    assert estimate(tied).stages[0].parameters == EMBEDDINGS + 4 * BLOCK + 16
    # ZeRO-3 gathers the embeddings for the head as well, twice a step in each of its two uses.
    sent = estimate(tied, data=2, zero_stage=3).stages[0].sent["data", "parameters"]
    assert sent == 4 * 2 * (2 * EMBEDDINGS + 4 * BLOCK + 16)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 6), (4, 16)])
def test_micro_batches_in_flight_are_the_simulators(schedule: str, stages: int, microbatches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    timeline = simulate(make_schedule(schedule, stages, microbatches, chunks))
    for rank, peak in enumerate(timeline.peak_live):
        by_chunk = peak_in_flight(schedule, stages, microbatches, chunks, rank)
        assert sum(by_chunk) == peak if chunks == 1 else sum(by_chunk) >= peak >= max(by_chunk)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_long_schedules_follow_the_formula_of_short_ones(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    costs = (1.0 / chunks,) * 4 * chunks, (2.0 / chunks,) * 4 * chunks
    simulated = makespan(schedule, 4, 16, chunks, *costs)
    assert makespan(schedule, 4, 16, chunks, *costs, simulated=0) == pytest.approx(simulated)


def test_bubble_is_the_papers() -> None:
    same = MachineProfile.given(flops=1e12, bandwidth=1e12, latency=0)
    found = estimate(Architecture(1, 8, 64, 8, 8), pipeline=4, microbatches=8, batch=8, profile=same)
    # All stages have two blocks; the head of a vocabulary of 1 costs next to nothing.
    assert found.bubble_fraction == pytest.approx(3 / 11, rel=1e-2)


def test_time_of_a_given_machine() -> None:
    machine = MachineProfile.given(flops=1e9, bandwidth=1e6, latency=1e-3)
    alone = estimate(TINY, batch=4, length=6, profile=machine)
    # 24 c^2 operations a token and block forward, 4 t c in the attention, 2 c v in the head; twice that backward, and
    # the attention 2.5 times.
    rows = 24
    products, attention = rows * (4 * 24 * 8**2 + 2 * 8 * 11), rows * 4 * 4 * 6 * 8
    assert alone.compute == pytest.approx((3 * products + 3.5 * attention) / 1e9)
    assert alone.communication == alone.update == 0
    shared = estimate(TINY, data=2, batch=2, length=6, profile=machine, minimum_parameter_group_size=10**9)
    size = EMBEDDINGS + 4 * BLOCK + HEAD
    assert shared.communication == pytest.approx(1e-3 + 4 * size / 1e6)


def test_layouts_are_all_that_there_are() -> None:
    model = Architecture(64, 32, 24, 4, 6)
    found = list(layouts(12, model))
    assert len(set(found)) == len(found)
    assert all(layout.ranks == 12 for layout in found)
    shapes = {(layout.data, layout.tensor, layout.pipeline) for layout in found}
    # The tensor size divides 6 heads, and 4 layers take at most 4 stages.
    expected = {(d, t, p) for t in (1, 2, 3, 6) for p in (1, 2, 3, 4) for d in (1, 2, 3, 4, 6, 12) if d * t * p == 12}
    assert shapes == expected
    assert {layout.zero_stage for layout in found if layout.data > 1} == {0, 1, 2, 3}
    assert {layout.zero_stage for layout in found if layout.data == 1} == {0}
    assert {layout.schedule for layout in found if layout.pipeline == 2} == {"gpipe", "1f1b", "interleaved", "zb-h1"}
    assert {layout.schedule for layout in found if layout.pipeline == 3} == {"gpipe", "1f1b", "zb-h1"}
    assert list(layouts(12, model, tensor=4)) == []
    only = list(layouts(12, model, data=6, pipeline=2, zero_stages=(1,), schedules=("1f1b",)))
    assert only == [Layout(6, 1, 2, 1, "1f1b")]


@pytest.mark.full
def test_table_is_sorted_for_many_ranks() -> None:
    model = Architecture(50257, 2048, 12288, 96, 96)
    found = table(layouts(2**12, model), model, batch=2**12)
    assert len(found) > 400
    assert [each.step_time for each in found] == sorted(each.step_time for each in found)
    smallest = min(found, key=lambda each: each.memory.total)
    assert smallest.layout.zero_stage == 3
    assert json.dumps(found[0].as_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pipeline=2, schedule="interleaved", microbatches=2000), "at least 2 chunks"),
        (dict(pipeline=2, chunks=2, microbatches=2000), "'1f1b' .*got 2"),
        (dict(data=0), "data=0"),
        (dict(length=7), "7 tokens, .*1 to 6"),
        (dict(batch=-1), "batch=-1"),
        (dict(microbatches=0), "microbatches=0"),
        (dict(itemsize=0), "itemsize=0"),
        (dict(half=True), "half=True .*device=True .*itemsize=4"),
        (dict(half=True, device=True, itemsize=8), "half=True .*device=True .*itemsize=4"),
        (dict(zero=1), "estimate.*'zero'"),
        (dict(layout=Layout(), data=2, tensor=2), "layout and also data, tensor"),
        (dict(workload=3), "workload .*got 3"),
    ],
)
def test_refused(options: dict, message: str) -> None:
    kind = TypeError if {"zero", "layout", "workload"} & options.keys() else ValueError
    with pytest.raises(kind, match=message):
        estimate(TINY, **options)


def test_other_types_are_refused() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: estimate("gpt"),
        lambda: estimate(TINY, data="2"),
        lambda: estimate(TINY, batch=1.5),
        lambda: estimate(TINY, half="no"),
        lambda: estimate(TINY, profile="fast"),
        lambda: list(layouts("8", TINY)),
        lambda: list(layouts(8, TINY, tensor="2")),
        lambda: table([Layout()], TINY, "8"),
        lambda: table([8], TINY, 8),
        lambda: model_state_bytes("7B", 8, 1),
        lambda: Link("fast", 1.0),
        lambda: MachineProfile((("a", 1.0),)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="must be"):
            call()


def test_profile_comes_back_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    TYPICAL.save(file)
    assert MachineProfile.load(file) == TYPICAL

    def full(path: Path, data: bytes) -> int:
        path.write_text(data[:9].decode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"cannot write .*profile\.json: No space"):
        patch.setattr(Path, "write_bytes", full)
        MachineProfile.given(1e10, 1e9, 1e-6).save(file)
    assert MachineProfile.load(file) == TYPICAL and list(tmp_path.iterdir()) == [file]
    surplus = json.dumps({"mpishard_profile": 1, **asdict(TYPICAL), "x": 1})
    for text in ("", "{}", "[]", '{"mpishard_profile": 0}', surplus):
        file.write_text(text)
        with pytest.raises(ValueError, match="is not a machine profile"):
            MachineProfile.load(file)
    with pytest.raises(OSError):
        MachineProfile.load(tmp_path / "absent")


def test_profile_speeds() -> None:
    profile = MachineProfile(products=((32, 1e10), (64, 3e10)))
    assert [profile.flops(width) for width in (16, 48, 1000)] == [0.5e10, 2e10, 3e10]
    assert Link(1e-6, 1e9).seconds(8, 1e9, calls=2) == pytest.approx(1 + 6e-6)
    assert Link(1e-6, 1e9).seconds(1, 1e9) == 0
    near, far = (dict.fromkeys(OPERATIONS, Link(0, bandwidth)) for bandwidth in (1, 2))
    profile = MachineProfile(products=((1, 1.0),), node=near, network=far, ranks_per_node=4)
    assert profile.link("all_reduce", 4).bandwidth == 1
    assert profile.link("all_reduce", 8).bandwidth == 2


def test_efficiency_divides_computing_alone() -> None:
    machine = MachineProfile.given(flops=1e9, bandwidth=1e6, latency=0)
    slower = replace(machine, efficiency=0.5)
    one, other = (estimate(TINY, tensor=2, data=2, batch=2, profile=profile) for profile in (machine, slower))
    messages = estimate(TINY, tensor=2, data=2, batch=2, profile=replace(machine, products=((1, 1e30),))).compute
    assert other.compute - messages == pytest.approx(2 * (one.compute - messages)) and messages > 0
    assert (other.communication, other.update) == (one.communication, one.update)


@pytest.mark.parametrize(
    "fields",
    [
        *(dict(products=products) for products in ((), ((0, 1.0),), ((1, 0.0),))),
        *(dict(efficiency=0), dict(memory_bandwidth=0), dict(exponentials=-1), dict(node={"all_reduce": Link(0, 1)})),
    ],
)
def test_impossible_profiles_are_refused(fields: dict) -> None:
    with pytest.raises(ValueError, match="profile|links|memory"):
        MachineProfile(**{"products": ((1, 1.0),), **fields})


def test_a_profile_of_one_rank_knows_no_communication() -> None:
    alone = MachineProfile(products=((1, 1e9),), name="here, 1 rank")
    assert estimate(TINY, profile=alone).step_time > 0
    with pytest.raises(ValueError, match="measured on 1 rank"):
        estimate(TINY, data=2, profile=alone)
    for latency, bandwidth, wrong in ((0, 0, "bandwidth"), (math.inf, 1, "latency")):
        with pytest.raises(ValueError, match=f"{wrong} of a link"):
            Link(latency, bandwidth)


# Estimates of memory on devices against models on the stand-in: blocks of attention, operands in half precision.

MODULE = arrays.module_of(standin.empty(1))
LENGTH = 32


class Rounded:
    """Bytes of operands that are rounded and not freed, apart from weights that stay to the end of the step."""

    def __init__(self) -> None:
        self.weights = self.most_operands = 0
        self._alive: list[weakref.ref[Any]] = []

    def note(self, halves: Any) -> None:
        arrays.ready(halves)  # the stand-in keeps operands until its work is done
        held = products._thread.weights.kept
        self.weights = sum(each.nbytes for each in held)
        known = {id(each) for each in held}
        self._alive = [each for each in self._alive if each() is not None]
        self._alive.append(weakref.ref(halves))
        others = {id(each()): each().nbytes for each in self._alive if id(each()) not in known}  # type: ignore[union-attr]
        self.most_operands = max(self.most_operands, sum(others.values()))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounded]:
    noted = Rounded()
    plain = products.DeviceProduct.rounded

    def round_and_note(self: Any, array: Any) -> Any:
        halves = plain(self, array)
        if halves is not array:
            noted.note(halves)
        return halves

    results = device_attention.DeviceMixing._results_for_products

    def note_results(self: Any, scores: Any) -> Any:
        found = results(self, scores)
        if found[0] is not scores:
            noted.note(found[0])
        return found

    monkeypatch.setattr(products.DeviceProduct, "rounded", round_and_note)
    monkeypatch.setattr(device_attention.DeviceMixing, "_results_for_products", note_results)
    yield noted


def step(half: Any, kind: Any = nn.GPT, **options: Any) -> Any:
    sizes = {"key_value_heads": 2} if kind is nn.Llama else {}
    model = kind(
        vocabulary_size=72,
        context_length=LENGTH,
        width=32,
        layers=3,
        heads=4,
        module=MODULE,
        compute_dtype=half,
        dtype=np.float32,
        **sizes,
        **options,
    )
    tokens = np.zeros((5, LENGTH), np.int64)
    model.loss_and_gradient(tokens, tokens)
    return model


@pytest.mark.pairs(4)
@pytest.mark.parametrize("half", [None, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.GPT, {"microbatches": 2, "tied": True}),
        (nn.GPT, {"recompute": True}),
        (nn.GPT, {"shards": 2}),
        (nn.Llama, {"microbatches": 2}),
    ],
    ids=["tied", "recomputed", "slices", "llama"],
)
def test_a_step_holds_what_is_estimated(rounded: Rounded, half: Any, kind: Any, options: dict[str, Any]) -> None:
    model = step(half, kind, **options)
    of_work = {name: value for name, value in options.items() if name in ("microbatches", "recompute")}
    found = estimate(model.architecture, batch=5, device=True, half=half is not None, **of_work).memory
    assert found.parameters == model.parameters.nbytes
    assert found.rounded == rounded.weights
    measured = model.activation_bytes + rounded.most_operands
    assert found.activations + found.scratch == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("most", [LENGTH**2 // 2, 3 * LENGTH**2, 9 * LENGTH**2])
def test_blocks_of_attention(rounded: Rounded, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(device_attention, "DEVICE_SCORES", most)
    monkeypatch.setattr(device_attention, "BLOCK", LENGTH // 2)
    monkeypatch.setattr("mpishard.estimate.sizes.DEVICE_BLOCK", LENGTH // 2)
    model = step(np.float16)
    found = estimate(model.architecture, batch=5, device=True, half=True).memory
    measured = model.activation_bytes + rounded.most_operands
    assert found.activations + found.scratch == pytest.approx(measured, rel=0.02)
