"""Estimates against runs: bytes held within 10 %, bytes sent to the last one."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import standin

from mpishard import AdamW, HybridShardedOptimizer, Mesh, ShardingConfiguration
from mpishard.backend import array as arrays
from mpishard.estimate import estimate, measure
from mpishard.estimate.benchmark import measure_collectives
from mpishard.estimate.profile import OPERATIONS
from mpishard.nn import GPT, Llama, products

pytestmark = pytest.mark.pairs(1)

# A vocabulary and a width that most sizes cut unevenly, and 24 heads, which all sizes divide.
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 67, 16, 72, 8, 24
BATCH, LENGTH = 6, 16


def shape(what: str, size: int) -> dict[str, int]:
    """Sizes of the mesh with all ranks on one axis, or spread over the axes as evenly as may be."""
    if what != "all":
        return {"data": 1, "tensor": 1, "pipeline": 1, what: size}
    tensor = 2 if size % 2 == 0 else 1
    pipeline = 2 if size % 4 == 0 else 1
    return {"data": size // tensor // pipeline, "tensor": tensor, "pipeline": pipeline}


@pytest.mark.parametrize(
    ("what", "zero_stage", "options"),
    [
        ("data", 0, {}),
        ("data", 1, {}),
        ("data", 2, {"microbatches": 2}),
        ("data", 3, {"microbatches": 2}),
        ("data", 3, {"tied": True}),
        ("tensor", 0, {}),
        ("tensor", 0, {"sequence_parallel": True, "recompute": True, "tied": True}),
        ("tensor", 0, {"shards": 24, "microbatches": 2}),
        ("tensor", 0, {"shards": 12, "sequence_parallel": True}),
        ("data", 0, {"shards": 4}),
        ("pipeline", 0, {"schedule": "gpipe", "tied": True}),
        ("pipeline", 1, {"schedule": "1f1b", "recompute": True}),
        ("pipeline", 0, {"schedule": "zb-h1"}),
        ("all", 1, {"schedule": "interleaved", "chunks": 2, "sequence_parallel": True}),
        ("all", 2, {"schedule": "zb-h1", "tied": True}),
        ("all", 2, {"schedule": "1f1b", "shards": 4, "sequence_parallel": True, "recompute": True}),
        ("all", 3, {"schedule": "1f1b", "sequence_parallel": True, "tied": True}),
        ("data", 2, {"microbatches": 2, "llama": {"key_value_heads": 12}}),
        ("tensor", 0, {"llama": {"bias": True}, "sequence_parallel": True, "recompute": True}),
        ("tensor", 0, {"llama": {"head_norms": True, "head_width": 4}, "shards": 24, "microbatches": 2}),
        ("all", 2, {"llama": {"key_value_heads": 8, "head_norms": True}, "tied": True}),
        ("pipeline", 0, {"llama": {"key_value_heads": 8}, "schedule": "zb-h1"}),
    ],
)
@pytest.mark.usefixtures("without_debug")
def test_bytes_of_a_step(comm, what, zero_stage, options):
    sizes = shape(what, comm.size)
    model_options = dict(options)
    llama = model_options.pop("llama", None)
    architecture = {name: model_options.pop(name) for name in ("tied", "shards") if name in options}
    if architecture.get("shards", comm.size) % sizes["tensor"]:
        pytest.skip(f"{sizes['tensor']} tensor ranks cannot share {architecture['shards']} shards")
    with Mesh(comm, **sizes) as mesh:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            kind, sizes_of_kind = (GPT, {}) if llama is None else (Llama, {"head_width": 6, **llama})
            model = kind(
                vocabulary_size=VOCABULARY,
                context_length=CONTEXT,
                width=WIDTH,
                layers=LAYERS,
                heads=HEADS,
                mesh=mesh,
                **architecture,
                **sizes_of_kind,
                **model_options,
            )
        config = ShardingConfiguration(mesh, minimum_parameter_group_size=2**13)
        optimizer = HybridShardedOptimizer(AdamW(lr=1e-3), config, zero_stage=zero_stage)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))
        for _ in range(2):
            mesh.ledger.clear()
            model.loss_and_gradient(tokens, tokens)
            optimizer.step(model.parameters, count=mesh.data.size * tokens.size)
        found = estimate(
            model.architecture,
            **sizes,
            zero_stage=zero_stage,
            batch=BATCH,
            length=LENGTH,
            minimum_parameter_group_size=2**13,
            **model_options,
        )
        stage = found.stages[mesh.pipeline.rank]
        memory = stage.memory
        measured = {
            "parameters": (model.parameters.nbytes, memory.parameters + memory.gathered),
            "gradients": (optimizer.state.gradient_bytes, memory.gradients + memory.buckets),
            "state": (optimizer.state.nbytes, memory.state),
            "activations": (model.activation_bytes, memory.activations + memory.scratch),
        }
        for kind, (bytes_, estimated) in measured.items():
            # The estimate is that of the first rank of an axis; with uneven cuts others hold a little less.
            assert estimated == pytest.approx(bytes_, rel=0.1), kind
        assert memory.total == sum(asdict(memory).values())

        sent: Counter[tuple[str, str]] = Counter()
        for (axis, _, label), total in mesh.ledger.totals.items():
            if axis != "world" and label != "control":
                sent[axis.split()[0], label] += total.sent
        by_stage: dict[int, Counter[tuple[str, str]]] = {}
        for rank, theirs in comm.allgather((mesh.pipeline.rank, sent)):
            by_stage.setdefault(rank, Counter()).update(theirs)
        for rank, total in by_stage.items():
            assert +total == +found.stages[rank].sent, f"stage {rank}"


@pytest.mark.parametrize(
    ("what", "zero_stage", "options"),
    [
        ("tensor", 0, {}),
        ("data", 3, {"microbatches": 2}),
        ("tensor", 0, {"sequence_parallel": True, "tied": True}),
        ("pipeline", 0, {"schedule": "zb-h1"}),
    ],
)
@pytest.mark.full
def test_half_precision_on_devices(comm, what, zero_stage, options, monkeypatch):
    """Rounded weights to the byte, and what layers keep; operands of single products are in the tests without MPI."""
    kept = {}

    def rounded_weight(product, weight, padded=None):
        halves = plain(product, weight, padded)
        weights = products._thread.weights
        kept.update({id(each): each.nbytes for each in (weights.kept if weights else ())})
        return halves

    plain = products.DeviceProduct.rounded_weight
    monkeypatch.setattr(products.DeviceProduct, "rounded_weight", rounded_weight)
    sizes, module = shape(what, comm.size), arrays.module_of(standin.empty(1))
    layout = {name: value for name, value in options.items() if name != "tied"}
    with Mesh(comm, **sizes) as mesh:
        model_options = {"mesh": mesh, "module": module, "compute_dtype": np.float16, **options}
        model = GPT(
            vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS, **model_options
        )
        optimizer = HybridShardedOptimizer(AdamW(lr=1e-3), ShardingConfiguration(mesh), zero_stage=zero_stage)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, LENGTH))
        model.loss_and_gradient(tokens, tokens)
        optimizer.step(model.parameters, count=mesh.data.size * tokens.size)  # which shards the parameters
        kept.clear()
        model.loss_and_gradient(tokens, tokens)
        found = estimate(
            model.architecture, **sizes, zero_stage=zero_stage, batch=BATCH, device=True, half=True, **layout
        )
        memory = found.stages[mesh.pipeline.rank].memory
        assert memory.rounded == pytest.approx(sum(kept.values()), rel=0.02)
        measured = model.activation_bytes  # without operands, which the estimate counts as scratch
        assert measured * 0.9 <= memory.activations + memory.scratch <= 1.5 * measured


def test_measured_profile(mesh, same_on_all, monkeypatch):
    monkeypatch.setattr("mpishard.estimate.benchmark.SIZES", (16,))
    monkeypatch.setattr("mpishard.estimate.benchmark.LARGE", 2**12)
    profile = measure(mesh)
    assert same_on_all(asdict(profile))
    assert set(profile.node) == (set(OPERATIONS) if mesh.size > 1 else set())
    assert all(link.latency > 0 and link.bandwidth > 0 for link in profile.node.values())
    assert profile.efficiency > 0


def test_collectives_are_timed_by_axis_and_size(comm, same_on_all):
    tensor = 2 if comm.size % 2 == 0 else 1
    with Mesh(comm, tensor=tensor) as mesh:
        timings = measure_collectives(mesh, sizes=(64, 4096))
        assert same_on_all([asdict(timing) for timing in timings])
        axes = [axis for axis in (mesh.data, mesh.tensor) if axis.size > 1]
        assert {(timing.axis, timing.ranks) for timing in timings} == {(axis.name, axis.size) for axis in axes}
        assert len(timings) == len(axes) * 4 * 2
        for timing in timings:
            assert timing.seconds > 0 and timing.bare > 0 and 0 < timing.nbytes <= 4096
            if timing.operation == "all_reduce":  # by the ring
                assert timing.sent == 2 * (timing.ranks - 1) * timing.nbytes // timing.ranks
