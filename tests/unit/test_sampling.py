"""Random numbers by name, and samples by step: the same on any number of ranks."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend.random import normal, permuted
from mpishard.data.sampling import Sampler, micro_batches, share


@given(st.integers(1, 3000), st.integers(0, 5))
def test_permuted_is_a_permutation(size, seed):
    order = permuted(np.arange(size), size, seed, "epoch", 0)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_permuted_depends_on_seed_and_name_and_not_on_the_slice():
    whole = permuted(np.arange(1000), 1000, 1, "a")
    assert np.array_equal(permuted(np.arange(300, 400), 1000, 1, "a"), whole[300:400])
    for other in ((2, "a"), (1, "b"), (1, "a", 0)):
        assert (permuted(np.arange(1000), 1000, *other) != whole).mean() > 0.9


def test_permuted_is_even():
    """Where the first of 10 goes, over 4000 seeds: each place within five standard deviations of 400."""
    places = np.bincount([permuted(np.arange(1), 10, seed)[0] for seed in range(4000)], minlength=10)
    assert abs(places - 400).max() < 5 * np.sqrt(400 * 0.9)


def test_permuted_of_a_large_range_costs_little():
    indices = permuted(np.arange(10), 10**15, 0)
    assert len(set(indices.tolist())) == 10
    assert 0 <= indices.min() and indices.max() < 10**15


def test_normal_is_keyed_by_name():
    one = normal(0, "w", (100, 100), 0.5, np.float64)
    assert np.array_equal(normal(0, "w", (100, 100), 0.5, np.float64), one)
    assert np.array_equal(normal(0, "w", (100, 100), 0.5, np.float32), one.astype(np.float32))
    assert not np.array_equal(normal(0, "v", (100, 100), 0.5, np.float64), one)
    assert not np.array_equal(normal(1, "w", (100, 100), 0.5, np.float64), one)
    assert abs(one.mean()) < 0.025
    assert abs(one.std() - 0.5) < 0.025


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 7)),
    st.integers(1, 9),
)
def test_shares_are_the_batch(samples, batch_size, ranks, micro, step):
    batch = Sampler(samples, batch_size, seed=3).batch(step)
    shares = [share(batch, rank, ranks, micro) for rank in range(ranks)]
    assert len({len(parts) for parts in shares}) == 1
    assert np.array_equal(np.concatenate([part for parts in shares for part in parts]), batch)
    if micro is not None:
        alone = [part.tolist() for part in share(batch, 0, 1, micro)]
        spread = [part.tolist() for parts in shares for part in parts if len(part)]
        assert spread == alone  # the same micro-batches on any number of ranks


@pytest.mark.parametrize(("samples", "sizes"), [(40, [3] * 8 + [2] * 8), (16, [1] * 16), (5, [1] * 5)])
def test_sixteen_micro_batches_by_default(samples, sizes):
    batch = Sampler(samples, samples).batch(1)
    micro = micro_batches(batch)
    assert [len(part) for part in micro] == sizes
    assert np.array_equal(np.concatenate(micro), batch)


@pytest.mark.parametrize("samples", [1, 9, 10, 11])
def test_an_epoch_takes_every_sample_once_and_reorders_them(samples):
    sampler = Sampler(samples, 4)
    steps = sampler.steps_per_epoch
    epochs = [np.concatenate([sampler.batch(epoch * steps + place + 1) for place in range(steps)]) for epoch in (0, 1)]
    assert all(np.array_equal(np.sort(epoch), np.arange(samples)) for epoch in epochs)
    assert samples < 9 or not np.array_equal(*epochs)
    assert [sampler.consumed(step) for step in (0, steps, 2 * steps)] == [0, samples, 2 * samples]
    assert sampler.consumed(1) == min(4, samples)


@given(st.integers(1, 60), st.integers(1, 20), st.lists(st.integers(1, 80), max_size=30), st.integers(0, 3))
def test_batches_of_any_sizes_take_every_sample_once_an_epoch(samples, batch_size, sizes, seed):
    """In the order of batches of one size, whatever their sizes are."""
    sampler = Sampler(samples, batch_size, seed)
    consumed, taken = 0, []
    for size in sizes:
        batch = sampler.following(consumed, size)
        left = samples - consumed % samples
        assert len(batch) == min(size, left)  # an epoch's last batch is cut short
        consumed += len(batch)
        taken += batch.tolist()
    steps = -(-consumed // batch_size) + consumed // samples + 1
    order = np.concatenate([sampler.batch(step + 1) for step in range(steps)])
    assert taken == order[:consumed].tolist()
    for epoch in range(consumed // samples):
        assert sorted(taken[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(st.integers(1, 60), st.integers(1, 80), st.integers(1, 40))
def test_batches_of_one_size_follow_one_another(samples, batch_size, step):
    sampler = Sampler(samples, batch_size)
    consumed = sum(len(sampler.batch(each)) for each in range(1, step))
    assert consumed == sampler.consumed(step - 1)
    assert np.array_equal(sampler.following(consumed, batch_size), sampler.batch(step))
