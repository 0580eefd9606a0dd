"""Texts that a model continues: with keys and values kept and without, and which tokens may be drawn."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from mpishard import nn
from mpishard.nn import generation
from mpishard.nn.generation import Sampling, TokenSampler, lengths_of_change

VOCABULARY, CONTEXT = 19, 24
SIZES = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=24, layers=2, heads=4)
LONG = nn.RopeScaling("longrope", 2.0, 12, short_factors=(1.0, 1.1, 1.2), long_factors=(1.0, 2.0, 3.0))
MODELS = {
    "gpt": (nn.GPT, {}),
    "gpt-tied": (nn.GPT, dict(tied=True, shards=2)),
    "llama": (nn.Llama, dict(hidden=40, key_value_heads=2, rotary=nn.Rotary(500.0, pairing="interleaved"))),
    "longrope": (nn.Llama, dict(hidden=40, key_value_heads=1, rotary=nn.Rotary(scaling=LONG))),
    "qwen3": (nn.Llama, dict(hidden=40, key_value_heads=2, head_norms=True, bias=True, head_width=8)),
}
PROMPTS = [[1, 2, 3], [4], list(range(15)), [5, 6, 7], list(range(18)) + list(range(12))]
OPTIONS = [dict(dtype=np.float64), dict(dtype=np.float32), dict(storage_dtype=ml_dtypes.bfloat16)]
OPTIONS += [dict(dtype=np.float64, recompute=True)]
DRAWS = [dict(temperature=0), dict(temperature=1.3, seed=5), dict(temperature=0.9, top_k=5, top_p=0.8, seed=2)]


def model(name="gpt", **options):
    """Away from its initial values, so that every tensor matters and no two tokens are almost equally likely."""
    kind, sizes = MODELS[name]
    decoder = kind(**{**SIZES, **sizes, **options})
    random = np.random.default_rng(0)
    decoder.parameters.flat[...] += 0.3 * random.standard_normal(decoder.parameters.size)
    return decoder


@pytest.fixture
def logits(monkeypatch):
    """By text the logits of which its tokens are drawn."""
    found = defaultdict(list)

    class Recording(TokenSampler):
        def __init__(self, sampling, seed, text):
            super().__init__(sampling, seed, text)
            self.text = text

        def next(self, logits_v):
            found[self.text].append(logits_v)
            return super().next(logits_v)

    monkeypatch.setattr(generation, "TokenSampler", Recording)
    return found


@pytest.mark.pairs(8)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_texts_and_logits_with_kept_keys_are_those_without(logits, name, options):
    """Prompts shorter and longer than the context, and texts that grow beyond it, and beyond a change of all keys."""
    decoder = model(name, **options)
    limit = 1e-12 if decoder.parameters.dtype == np.float64 else 1e-5
    for draw in DRAWS:
        logits.clear()
        kept = decoder.generate(PROMPTS, 14, **draw)
        logits_kept = dict(logits)
        logits.clear()
        for text, other in zip(kept, decoder.generate(PROMPTS, 14, cache=False, **draw), strict=True):
            np.testing.assert_array_equal(text, other)
        for number in range(len(PROMPTS)):
            size = np.abs(logits[number]).max()
            np.testing.assert_allclose(logits_kept[number], logits[number], rtol=limit, atol=limit * size)
    # The last ones are also those of a whole pass.
    for number, text in enumerate(kept):
        whole = decoder.logits(text[None, -CONTEXT - 1 : -1])[0, -1]
        np.testing.assert_allclose(logits[number][-1], whole, rtol=limit, atol=limit * np.abs(whole).max())


@pytest.mark.parametrize("name", ["gpt", "longrope"])
def test_a_text_among_several_is_that_alone(name):
    decoder = model(name, dtype=np.float64)
    together = decoder.generate(PROMPTS, 14, 0)
    for prompt, text in zip(PROMPTS, together, strict=True):
        alone = decoder.generate(prompt, 14, 0)
        assert alone.dtype == text.dtype == np.int64
        np.testing.assert_array_equal(text, alone)
        np.testing.assert_array_equal(text[: len(prompt)], prompt)
    drawn = decoder.generate([[1, 2], [1, 2]], 14, seed=3)
    np.testing.assert_array_equal(drawn[0], decoder.generate([1, 2], 14, seed=3))
    assert (drawn[1] != drawn[0]).any()  # it has numbers of its own
    assert [text.tolist() for text in decoder.generate([[1, 2], [3]], 0)] == [[1, 2], [3]]


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2], [3]], ([1, 2], (3,)), [np.array([1, 2], np.uint8), range(3, 4)], [b"\1\2", [np.int32(3)]]],
    ids=str,
)
def test_prompts_of_any_sequences(prompts):
    decoder = model()
    expected = decoder.generate([[1, 2], [3]], 3)
    found = decoder.generate(prompts, 3)
    assert isinstance(found, list) and [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert decoder.generate(prompts[0], 3).tolist() == expected[0].tolist()
    (row,) = decoder.generate(np.array([[1, 2]]), 3)
    assert row.tolist() == expected[0].tolist()


@pytest.fixture
def passes(monkeypatch):
    """The numbers of tokens of all passes."""
    found = []
    predict = nn.EmbeddingUnit.predict

    def counted(self, x, work, batch):
        found.append(batch.rows)
        return predict(self, x, work, batch)

    monkeypatch.setattr(nn.EmbeddingUnit, "predict", counted)
    return found


def test_with_kept_keys_a_token_is_computed_once_until_all_keys_change(passes):
    decoder = model()
    decoder.generate([1, 2, 3], 20)
    assert passes == [3] + 19 * [1]
    passes.clear()
    decoder.generate([1, 2, 3], 20, cache=False)
    assert passes == list(range(3, 23))
    passes.clear()
    decoder.generate([[1, 2], [3], [4, 5]], 4)
    assert passes == [1, 4, 3, 3, 3]  # prompts of one length together, then all
    passes.clear()
    model("longrope").generate([1] * 10, 5)
    assert passes == [10, 1, 1, 13, 1]


def test_a_text_ends_with_a_stop_token():
    decoder = model()
    texts = decoder.generate([[1, 2], [3], [4]], 20, seed=1)
    stop = [int(texts[0][7]), int(texts[1][12])]
    for cache in (True, False):
        found = decoder.generate([[1, 2], [3], [4]], 20, seed=1, stop_tokens=stop, cache=cache)
        for text, stopped in zip(texts, found, strict=True):
            prompt = 2 if text[0] == 1 else 1
            ends = [end for end in range(prompt, len(text)) if text[end] in stop]
            assert stopped.tolist() == text[: ends[0] + 1 if ends else None].tolist()
    assert len(decoder.generate([1, 2], 20, stop_tokens=set(range(VOCABULARY)))) == 3


def test_keys_are_given_back():
    decoder = model()
    decoder.generate(PROMPTS, 3)
    works = [part for chunk in decoder.chunks for work in chunk.workspaces for part in work._parts.values()]
    caches = [work.cache for work in works if work.cache is not None]
    assert caches and not any(cache._held for cache in caches)
    # A pass of another kind has none.
    tokens = np.array([[1, 2, 3]])
    np.testing.assert_array_equal(decoder.logits(tokens), model().logits(tokens))
    assert decoder.loss(tokens, tokens) == model().loss(tokens, tokens)


@dataclass(frozen=True)
class Own(nn.Architecture):
    """Of one's own: its attention, or its embeddings."""

    what: str = "attention"

    def build_embeddings(self):
        class Embeddings(nn.EmbeddingUnit):
            pass

        kind = Embeddings if self.what == "embeddings" else nn.EmbeddingUnit
        return kind(self.vocabulary_size, self.context_length, self.width)

    def build_block(self, name, sequence_parallel):
        class Attention(nn.CausalSelfAttention):
            pass

        block = nn.Block(name, self.width, self.heads)
        if self.what == "attention":
            attention = Attention(f"{name}.attention", self.width, self.heads)
            return nn.TransformerBlock(name, block.attention_norm, attention, block.mlp_norm, block.mlp)
        return block


@pytest.mark.parametrize("what", ["attention", "embeddings"])
def test_keys_of_attention_of_ones_own_are_not_kept(passes, what):
    own = nn.Decoder(Own(**SIZES, what=what))
    assert lengths_of_change(own.architecture) is None
    assert own.generate([1, 2], 3).tolist() == nn.GPT(**SIZES).generate([1, 2], 3).tolist()
    assert passes == [2, 3, 4, 2, 1, 1]


def reference_weights(logits, temperature, top_k, top_p):
    """Probabilities of tokens, by sorting all."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")[:top_k]
    if top_p is not None:
        sums = np.cumsum(weights[order])
        order = order[: np.argmax(sums >= top_p * sums[-1] * (1 - 1e-12)) + 1]
    found = np.zeros(len(weights))
    found[order] = weights[order]
    return found / found.sum()


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.one_of(st.none(), st.integers(1, 45)),
    st.one_of(st.none(), st.sampled_from([0.01, 0.37, 0.9, 0.999, 1.0])),
)
def test_only_the_most_likely_tokens_are_drawn(logits, temperature, top_k, top_p):
    """Equally likely ones are many here."""
    logits = np.array(logits) + 0.1
    sampler = TokenSampler(Sampling(temperature, top_k, top_p), 0)
    weights = np.exp((logits - logits.max()) / temperature)
    sampler._cut(weights)
    expected = reference_weights(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(weights / weights.sum(), expected, rtol=1e-9)
    assert expected[sampler.next(logits)] > 0


def test_tokens_are_drawn_by_their_probabilities():
    """5000 draws: each token within five standard deviations."""
    logits = np.log([0.1, 0.4, 0.05, 0.3, 0.15])
    for top_k, top_p in ((None, None), (3, None), (None, 0.65), (3, 0.8)):
        sampler = TokenSampler(Sampling(1.0, top_k, top_p), 0)
        counts = np.bincount([sampler.next(logits) for _ in range(5000)], minlength=5)
        expected = reference_weights(logits, 1.0, top_k, top_p)
        assert (abs(counts - 5000 * expected) <= 5 * np.sqrt(5000 * expected * (1 - expected))).all()


def test_close_to_temperature_0_the_most_likely_token_is_drawn():
    logits = np.array([1.0, 1.5, -3.0])
    for temperature in (0, 1e-3, 5e-324):
        assert TokenSampler(Sampling(temperature), 0).next(logits) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(prompt_tokens=[]), ValueError, "prompt_tokens is empty"),
        (dict(prompt_tokens=np.empty((0, 3), int)), ValueError, "prompt_tokens is empty"),
        (dict(prompt_tokens=[[1], []]), ValueError, r"prompt_tokens\[1\] is empty"),
        (dict(prompt_tokens=[[1], 2]), TypeError, r"prompt_tokens\[1\]=2"),
        (dict(prompt_tokens=[[[1]]]), TypeError, r"prompt_tokens\[0\]=\[\[1\]\]"),
        (dict(prompt_tokens="abc"), TypeError, "prompt_tokens='abc'"),
        (dict(prompt_tokens={1, 2}), TypeError, "must be a sequence of tokens"),
        (dict(prompt_tokens=[1.0, 2]), TypeError, "prompt_tokens .*got float64"),
        (dict(prompt_tokens=[[1], [True]]), TypeError, r"prompt_tokens\[1\] .*got bool"),
        (dict(prompt_tokens=[1, 19]), ValueError, "1 to 19, .*vocabulary_size is 19"),
        (dict(prompt_tokens=[-1] + 40 * [0]), ValueError, "range from -1 to 0"),  # not in the context
        (dict(count=-1), ValueError, "count=-1"),
        (dict(count=1.5), TypeError, "count=1.5"),
        (dict(temperature=-0.5), ValueError, "temperature=-0.5"),
        (dict(temperature=float("nan")), ValueError, "temperature=nan"),
        (dict(temperature="hot"), TypeError, "temperature='hot'"),
        (dict(seed=None), TypeError, "seed=None"),
        (dict(top_k=0), ValueError, "top_k=0"),
        (dict(top_p=0), ValueError, "top_p=0"),
        (dict(top_p=1.1), ValueError, "top_p=1.1"),
        (dict(stop_tokens=5), TypeError, "stop_tokens=5"),
        (dict(stop_tokens="a"), TypeError, "stop_tokens='a'"),
        (dict(stop_tokens=[0, 2.5]), TypeError, "stop_tokens=2.5"),
        (dict(stop_tokens=[0, 19]), ValueError, "stop_tokens range from 0 to 19"),
        (dict(cache=1), TypeError, "cache=1"),
    ],
    ids=str,
)
def test_bad_requests(arguments, error, message):
    with pytest.raises(error, match=message):
        model().generate(**{**dict(prompt_tokens=[1, 2], count=3), **arguments})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_is_drawn_from_logits_that_are_not_finite(value, temperature):
    broken = model()
    broken.parameters["head.weight"][-1] = value
    with pytest.raises(FloatingPointError, match="text 0 after 2 tokens"):
        broken.generate([1, 2], 3, temperature)
