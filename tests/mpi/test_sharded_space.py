"""Sums over vectors that are divided over the ranks of any mesh: the bits of one process."""

from __future__ import annotations

import numpy as np
import pytest
from hybrid import SIZE, meshes, model
from steps import STRATEGIES

from mpishard import SGD, Mesh, ShardingConfiguration
from mpishard.data_parallel.method_state import ShardedSpace
from mpishard.minimizers.history import Gram
from mpishard.minimizers.space import LocalSpace

S_ROWS, Y_ROWS = [0, 1, 2], [5, 4, 3]


@pytest.fixture(scope="module")
def base(comm):
    with Mesh(comm) as mesh:
        yield mesh


def vectors():
    random = np.random.default_rng(1)
    return random.standard_normal((6, SIZE)) * 10.0 ** random.integers(-9, 10, (6, SIZE))


def space_of(mesh, strategy):
    config, parameters = ShardingConfiguration(mesh), model(mesh)
    return ShardedSpace(strategy(SGD(), config).strategy.fitting(parameters)(config, parameters))


def everything(space, rows, masks):
    """All that a space computes of some rows, and Gram matrices while masks change."""
    tops = space.largest(*rows)
    found = [tops, space.dots([(rows[0], rows[1]), (rows[2], rows[2])], [tops[0] * tops[1], tops[2] ** 2])]
    gram = Gram(space, rows, S_ROWS, Y_ROWS)
    for pair, mask in zip([1, 0, 2, 1], masks, strict=True):
        gram.add(pair, tops[S_ROWS[pair]], tops[Y_ROWS[pair]])
        gram.update(mask)
        found += [gram.sy.tolist(), gram.yy.tolist()]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_layout_has_the_sums_of_one_process(base, strategy):
    whole, random = vectors(), np.random.default_rng(2)
    masks = [None, random.random(SIZE) < 0.7, random.random(SIZE) < 0.7, None]
    expected = everything(LocalSpace(SIZE, whole[0]), whole, masks)
    for mesh in meshes(base):
        space = space_of(mesh, strategy)
        rows = np.stack([space.own(row) for row in whole])
        own_masks = [None if mask is None else space.own(mask.astype(float)) > 0 for mask in masks]
        assert space.total == SIZE and rows.shape == (6, space.size)
        assert everything(space, rows, own_masks) == expected, mesh
        assert space.count(sum(stop - start for start, stop in space.spans), 2) == [SIZE, 2 * base.size]
        assert np.array_equal(space.whole(rows[3]), whole[3])


def test_one_rank_that_has_nan_is_seen_on_all(base):
    whole = vectors()
    whole[0, SIZE // 2], whole[1, 3] = np.nan, -np.inf
    for mesh in meshes(base):
        space = space_of(mesh, STRATEGIES[0])
        assert space.largest(*(space.own(row) for row in whole[:3])) == [np.inf, np.inf, abs(whole[2]).max()]
