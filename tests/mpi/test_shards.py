"""A model cut into shards: the same bits on every tensor size that divides their number."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import AdamW, DDPOptimizer, Mesh, ShardingConfiguration, nn
from mpishard.backend.process import fix_blas_threads
from mpishard.comm.axis import Axis
from mpishard.nn import tensor_parallel as slices_module
from mpishard.nn.tensor_parallel import Slices

pytestmark = pytest.mark.pairs(1)

# 13 tokens leave uneven slices, some of which have none at 24 shards; 3 * 7 and 2 * 5 rows uneven blocks.
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 13, 8, 48, 2, 24
MODEL = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS)
BATCHES = [(3, 7), (2, 5), (1, 1)]
# Numbers of shards by the number of ranks: the bits of each on one rank are those of the others.
SHARDS = {1: (6,), 2: (4, 6), 3: (6, 24), 4: (4, 24), 8: (8, 24)}
Bits = dict[str, Any]


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def digests(gpt, kind, arrays) -> Bits:
    """Of the tensors of which every rank has its parts; copies must be alike.  Collective over the tensor axis."""
    parts = [{name: (gpt.parameters.box(name), np.array(array)) for name, array in arrays.items()}]
    if gpt.mesh is not None:
        parts = gpt.mesh.tensor.allgather_object(parts[0])
    found = {}
    for spec in gpt.parameters.specs:
        tensor = np.full(spec.shape, np.nan, gpt.parameters.dtype)
        for rank in parts:
            box, values = rank[spec.name]
            tensor[tuple(slice(*extent) for extent in box)] = values
            assert spec.tensor_dim is not None or values.tobytes() == parts[0][spec.name][1].tobytes(), spec.name
        found[f"{kind} {spec.name}"] = digest(tensor)
    return found


LLAMA = dict(kind=nn.Llama, heads=2 * HEADS, key_value_heads=HEADS, head_width=2, hidden=20, bias=True, head_norms=True)
LLAMA |= dict(dropout=0.1)


def train(mesh, kind=nn.GPT, **options) -> Bits:
    """Losses, gradients and parameters of three steps, away from the initial values; logits and a text."""
    gpt = kind(mesh=mesh, **(MODEL | options))
    dtype = gpt.parameters.dtype
    for number, spec in enumerate(gpt.parameters.specs):
        box = tuple(slice(*extent) for extent in gpt.parameters.box(spec.name))
        change = 0.3 * np.random.default_rng(number).standard_normal(spec.shape)
        gpt.parameters[spec.name][...] += change.astype(dtype)[box]
    optimizer = DDPOptimizer(AdamW(lr=0.01), ShardingConfiguration(mesh, max_gradient_norm=1.0))
    found: Bits = {}
    for step, shape in enumerate(BATCHES):
        tokens, targets = np.random.default_rng(step).integers(0, gpt.vocabulary_size, (2, *shape))
        # Taken apart from the step, whose reductions would leave the gradients undefined.
        with gpt.parameters.gradients.no_sync():
            found[f"loss {step}"] = gpt.loss_and_gradient(tokens, targets, range(len(tokens)))
        gradients = {name: gpt.parameters.gradient(name)[0] for name in gpt.parameters}
        found |= digests(gpt, f"gradient {step}", gradients)
        gpt.parameters.reset_gradients()
        gpt.loss_and_gradient(tokens, targets, range(len(tokens)))
        optimizer.step(gpt.parameters, count=tokens.size)
        found[f"evaluated {step}"] = gpt.loss(tokens, targets)
    found |= digests(gpt, "parameter", {name: gpt.parameters[name] for name in gpt.parameters})
    found["logits"] = digest(gpt.logits(tokens))
    found["text"] = gpt.generate([1, 2, 0], 6, seed=1).tolist()
    return found


@functools.cache
def on_one_rank(**options) -> Bits:
    fix_blas_threads()
    with Mesh(MPI.COMM_SELF.Dup()) as mesh:
        return train(mesh, **options)


@pytest.fixture
def mesh(comm):
    with Mesh(comm, tensor=comm.size) as mesh:
        fix_blas_threads()
        yield mesh


def assert_same(found: Bits, expected: Bits) -> None:
    assert list(found) == list(expected)
    assert not [name for name in expected if found[name] != expected[name]]


def shards_of(comm) -> tuple[int, ...]:
    if comm.size not in SHARDS:
        pytest.skip(f"no number of shards is a multiple of {comm.size}")
    return SHARDS[comm.size]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_bits_are_those_of_one_rank(mesh, comm, tied, sequence_parallel):
    for shards in shards_of(comm):
        found = train(mesh, shards=shards, tied=tied, sequence_parallel=sequence_parallel)
        assert_same(found, on_one_rank(shards=shards, tied=tied))


@pytest.mark.parametrize(
    "options",
    [
        dict(recompute=True),
        dict(microbatches=2),
        dict(dtype=np.float64),
        dict(vocabulary_size=3),
        dict(storage_dtype=np.float16),
    ],
)
def test_options_change_no_bit(mesh, comm, options):
    """Each with rows split: what is recomputed or rounded, a micro-batch of none, and ranks without vocabulary."""
    shards = shards_of(comm)[-1]
    others = {name: value for name, value in options.items() if name != "recompute"}
    found = train(mesh, shards=shards, sequence_parallel=True, **options)
    assert_same(found, on_one_rank(shards=shards, **others))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bits_of_llama_are_those_of_one_rank(mesh, comm, sequence_parallel):
    """Heads of keys and values are cut with their queries; the norms of heads are summed over all of them."""
    shards = shards_of(comm)[-1]
    found = train(mesh, shards=shards, sequence_parallel=sequence_parallel, recompute=sequence_parallel, **LLAMA)
    assert_same(found, on_one_rank(shards=shards, **LLAMA))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_another_order_has_other_bits(mesh, comm, monkeypatch, sequence_parallel):
    """Were sums taken in another order, or blocks cut elsewhere, the comparisons above would fail."""
    shards = shards_of(comm)[-1]
    expected = on_one_rank(shards=shards)

    def last_first(parts, total):
        if (parts[0].start, parts[-1].stop) != (0, total):
            return tree_merges(parts, total)
        return [*([0] * (len(parts) - 1)), len(parts) - 1]

    tree_merges = slices_module.tree_merges
    slices_module._merges.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(slices_module, "tree_merges", last_first)
        found = train(mesh, shards=shards, sequence_parallel=sequence_parallel)
    slices_module._merges.cache_clear()
    assert found["gradient 0 final_norm.weight"] != expected["gradient 0 final_norm.weight"]

    whole_blocks = Slices.row_blocks

    def cut_elsewhere(self, rows, splits_rows):
        blocks = whole_blocks(self, rows, splits_rows)
        return [slice(0, blocks[-1].stop), *(slice(0, 0) for _ in blocks[1:])]

    with monkeypatch.context() as patch:
        patch.setattr(Slices, "row_blocks", cut_elsewhere)
        found = train(mesh, shards=shards, sequence_parallel=sequence_parallel)
    assert found["loss 0"] == expected["loss 0"]
    assert found["gradient 0 final_norm.weight"] != expected["gradient 0 final_norm.weight"]


def test_close_to_one_shard(mesh, comm):
    """More shards change a loss by rounding errors only."""
    tokens, targets = np.random.default_rng(0).integers(0, VOCABULARY, (2, 3, 7))
    losses = [
        nn.GPT(**MODEL, dtype=np.float64, mesh=mesh, shards=shards).loss(tokens, targets)
        for shards in (1, shards_of(comm)[-1])
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)


@pytest.mark.mpi(min_size=3)
def test_tensor_sizes_that_do_not_divide_the_shards(mesh, comm):
    with pytest.raises(ValueError, match=f"2 shards .*{comm.size} tensor-parallel ranks"):
        nn.GPT(**MODEL, mesh=mesh, shards=2)


def sums_of_own(slices, terms):
    """The sums that a rank has of its own terms."""

    def write(index, out):
        out[...] = terms[slices.own.start + index]

    return slices.add(write, functools.cache(lambda depth: np.empty_like(terms[0])))


@pytest.mark.parametrize("rows", [7, 1, 0])
def test_sums_of_slices(mesh, comm, rows):
    """All ranks get the sum of the tree over all slices, in parts or as a whole."""
    axis: Axis = mesh.tensor
    for shards in (3 * comm.size, 5 * comm.size, 24):
        slices, alone = Slices(axis, shards), Slices(Axis.single("tensor"), shards)
        terms = np.random.default_rng(shards).standard_normal((shards, rows, 3)).astype(np.float32)
        (expected,) = sums_of_own(alone, terms)
        assert slices.all_reduce(sums_of_own(slices, terms), "test").tobytes() == expected.tobytes()
        cuts = slices.rank_cuts(rows)
        own = slice(cuts[axis.rank], cuts[axis.rank + 1])
        out = np.empty_like(expected[own])
        if axis.size > 1:
            pieces = [3 * (stop - start) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
            slices.reduce_scatter(sums_of_own(slices, terms), out, pieces, "test")
            assert out.tobytes() == expected[own].tobytes()
