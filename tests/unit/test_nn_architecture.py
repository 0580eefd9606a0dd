"""Units of a GPT, how they are cut into stages, and what is known of the tensors before any exists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard import nn

ARCHITECTURE = nn.Architecture(11, 6, 8, 5, 4)
SHARDED = nn.Architecture(11, 6, 8, 5, 4, shards=2)


def test_specs_are_those_of_the_model():
    gpt = nn.GPT(11, 6, 8, 5, 4)
    assert gpt.parameters.specs == tuple(ARCHITECTURE.specs())
    assert ARCHITECTURE.specs()[0].name == "token_embedding.weight"
    assert ARCHITECTURE.specs()[-1].name == "head.weight"
    assert all(spec.stage == 0 and not spec.partial and not spec.copies for spec in ARCHITECTURE.specs())


def test_blocks_are_dealt_out_evenly():
    cut = ARCHITECTURE.cut(3)
    assert cut == [["embeddings", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"], ["blocks.4", "output_head"]]
    stages = {spec.name: spec.stage for spec in ARCHITECTURE.specs(3)}
    assert stages["position_embedding.weight"] == 0 and stages["blocks.3.mlp.expand.weight"] == 1
    assert stages["final_norm.bias"] == stages["head.weight"] == 2
    assert [len(units) for units in ARCHITECTURE.cut(5)] == [2, 1, 1, 1, 2]


@given(st.lists(st.integers(0, 9), min_size=5, max_size=9), st.data())
def test_cut_by_costs_is_the_best_there_is(costs, data):
    architecture = nn.Architecture(11, 6, 8, len(costs) - 2, 4)
    stages = data.draw(st.integers(1, architecture.layers))
    cut = architecture.cut(stages, costs)
    assert [unit for units in cut for unit in units] == architecture.units()
    assert len(cut) == stages and all(cut)
    cost = dict(zip(architecture.units(), costs, strict=True))
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(cost[unit] for unit in units) for units in cut) == best


def test_stages_without_the_slowest_unit_are_even_too():
    assert ARCHITECTURE.cut(3, [1, 1, 1, 1, 1, 1, 9]) == [
        ["embeddings", "blocks.0", "blocks.1"],
        ["blocks.2", "blocks.3", "blocks.4"],
        ["output_head"],
    ]


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_tied_table_is_one_tensor(stages):
    tied = nn.Architecture(11, 6, 8, 5, 4, tied=True)
    specs = {spec.name: spec for spec in tied.specs(stages)}
    assert len(specs) == len(tied.specs(stages)) == len(ARCHITECTURE.specs()) - 1
    table = specs.pop("token_embedding.weight")
    assert (table.shape, table.tensor_dim, table.stage) == ((11, 8), 0, 0)
    assert table.copies == (() if stages == 1 else (stages - 1,))
    assert not any(spec.copies for spec in specs.values())


def test_gradients_of_what_is_used_row_by_row_are_partial():
    partial = {spec.name for spec in ARCHITECTURE.specs(sequence_parallel=True) if spec.partial}
    assert "blocks.0.attention.output.bias" in partial and "final_norm.weight" in partial
    assert len(partial) == 6 * ARCHITECTURE.layers + 2
    assert all(spec.tensor_dim is None for spec in ARCHITECTURE.specs() if spec.name in partial)


class OneName(nn.Architecture):
    def build_block(self, name, sequence_parallel):
        return super().build_block("same", sequence_parallel)


class NoBlock(nn.Architecture):
    def build_block(self, name, sequence_parallel):
        return None


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_of_ones_own_have_names_of_their_own(stages):
    message = "'same.attention_norm.weight' is a tensor of blocks.0, and again of blocks.1; names must be unique"
    with pytest.raises(ValueError, match=message):
        OneName(11, 6, 8, 2, 4).specs(stages)
    with pytest.raises(TypeError, match="NoBlock.build_block returned None; it must be of TransformerBlock"):
        NoBlock(11, 6, 8, 2, 4).specs(stages)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 6, 8, 5, 4), "vocabulary_size is 0; it must be at least 1"),
        ((11, 6, 8, 0, 4), "layers is 0"),
        ((11, 6, 8, 5, 3), "width 8 is not a multiple of 3 heads"),
        ((11, 6, 8, 5, 0), "width 8 is not a multiple of 0 heads"),
        ((11, 6, 8, 5, 4, False, 3), "4 attention heads cannot be cut into 3 shards; choose a number"),
        ((11, 6, 8, 5, 4, False, 0), "shards is 0; it must be at least 1"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.Architecture(*arguments)


@pytest.mark.parametrize(
    "place, what", list(enumerate(("vocabulary_size", "context_length", "width", "layers", "heads")))
)
def test_sizes_are_integers(place, what):
    sizes = [11, 6, 8, 5, 4]
    for wrong in (float(sizes[place]), str(sizes[place]), None, True):
        with pytest.raises(TypeError, match=f"{what} is .*; it must be an integer"):
            nn.Architecture(*sizes[:place], wrong, *sizes[place + 1 :])
    assert nn.Architecture(*map(np.int64, sizes)) == ARCHITECTURE


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ARCHITECTURE.check(tensor=3), "4 attention heads cannot be split over 3 tensor-parallel ranks"),
        (lambda: SHARDED.check(tensor=4), "a model of 2 shards cannot be split over 4 tensor-parallel ranks; choose a"),
        (lambda: ARCHITECTURE.check(stages=6), "6 pipeline stages, but the model has 5 layers.*fewer pipeline ranks"),
        (lambda: ARCHITECTURE.cut(6, [1] * 7), "6 pipeline stages, but the model has 5 layers"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6), "a model of 5 layers needs 7 numbers"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + [-1]), "needs 7 numbers of at least 0"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + [np.nan]), "needs 7 numbers of at least 0"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + ["fast"]), "'fast'.*needs 7 numbers of at least 0"),
        (lambda: ARCHITECTURE.cut(2, 3.0), "stage_costs are 3.0; .*needs 7 numbers of at least 0"),
    ],
)
def test_what_cannot_be_cut(call, message):
    with pytest.raises(ValueError, match=message):
        call()
