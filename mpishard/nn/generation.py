"""Continues texts by sampled tokens, with keys and values of earlier tokens kept or computed again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, number, shown
from mpishard.backend.array import is_array, to_host
from mpishard.backend.random import generator
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.mesh import Mesh
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import TransformerBlock
from mpishard.nn.inputs import check_tokens
from mpishard.nn.units import EmbeddingUnit
from mpishard.nn.workspace import KeyValueCache
from mpishard.parameters.flat import FlatParameters

Array = Any


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; raises TypeError or ValueError if a field is of another type or out of range."""

    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_k: int | None = None  # draw from this many most likely tokens only
    top_p: float | None = None  # draw from the fewest most likely tokens whose probabilities have at least this sum
    stop_tokens: Sequence[int] = ()  # a text ends with the first of these that is drawn

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", number("temperature", self.temperature, least=0))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k, least=1))
        if self.top_p is not None:
            object.__setattr__(self, "top_p", number("top_p", self.top_p, above=0, most=1))
        stops: Any = self.stop_tokens
        if isinstance(stops, str) or not isinstance(stops, Sequence | Set | np.ndarray):
            raise TypeError(f"stop_tokens={shown(stops)} must be a sequence of tokens")
        stops = sorted({integer("each of stop_tokens", token) for token in stops})
        object.__setattr__(self, "stop_tokens", tuple(stops))


class TokenSampler:
    """Draws tokens; the same on all ranks that draw from the same logits.

    Each number `text` among several texts has separate draws.
    """

    def __init__(self, sampling: Sampling, seed: int, text: int = 0) -> None:
        self._sampling = sampling
        self._random = generator(seed, f"generate/{text}" if text else "generate")

    def next(self, logits_v: np.ndarray) -> int:
        """A token, from the logits of all of them, float64; -1 if the largest is NaN or infinite."""
        largest = logits_v.max()
        if not math.isfinite(largest):
            return -1
        if self._sampling.temperature == 0:
            return int(logits_v.argmax())
        with np.errstate(over="ignore"):  # close to temperature 0 all others have weight 0
            weights_v = np.exp((logits_v - largest) / self._sampling.temperature)
        self._cut(weights_v)
        edges_v = np.cumsum(weights_v)
        return min(int(np.searchsorted(edges_v, self._random.random() * edges_v[-1], "right")), len(edges_v) - 1)

    def _cut(self, weights_v: np.ndarray) -> None:
        """Set the weights of tokens that are not to be drawn to 0; of equally likely ones the first is kept."""
        top_k, top_p = self._sampling.top_k, self._sampling.top_p
        if top_k is None and top_p is None:
            return
        # To sort a whole vocabulary takes long: what is certainly cut goes first.
        least = 0.0
        if top_k is not None and top_k < len(weights_v):
            least = np.partition(weights_v, -top_k)[-top_k]
        kept = np.flatnonzero(weights_v >= least)
        if top_p is not None and top_k is None:  # all weights below this together are less than 1 - top_p of the sum
            kept = np.flatnonzero(weights_v >= 0.999 * (1 - top_p) * weights_v.sum() / len(weights_v))
        kept = kept[np.argsort(-weights_v[kept], kind="stable")][:top_k]
        if top_p is not None:
            sums = np.cumsum(weights_v[kept])
            whole = sums[-1] if top_k is not None else weights_v.sum()
            kept = kept[: int(np.searchsorted(sums, top_p * whole)) + 1]
        weights = weights_v[kept]
        weights_v[:] = 0
        weights_v[kept] = weights


def checked_prompts(prompt_tokens: Any, vocabulary_size: int) -> tuple[list[np.ndarray], bool]:
    """Prompts as int64 arrays of at least one token each, and whether they are several.

    Raises TypeError or ValueError if no prompt is given, or one has no tokens, other things, or tokens outside of the
    vocabulary.
    """
    if is_array(prompt_tokens):
        prompt_tokens = to_host(prompt_tokens)
    of_prompts = _is_sequence(prompt_tokens) and any(_is_sequence(each) for each in prompt_tokens)
    if not of_prompts:
        return [_checked_prompt("prompt_tokens", prompt_tokens, vocabulary_size)], False
    named = ((f"prompt_tokens[{number}]", prompt) for number, prompt in enumerate(prompt_tokens))
    return [_checked_prompt(what, prompt, vocabulary_size) for what, prompt in named], True


def _checked_prompt(what: str, prompt: Any, vocabulary_size: int) -> np.ndarray:
    if not _is_sequence(prompt) or any(_is_sequence(each) for each in prompt):
        raise TypeError(f"{what}={shown(prompt)} must be a sequence of tokens")
    if len(prompt) == 0:
        raise ValueError(f"{what} is empty; a prompt has at least one token")
    tokens = to_host(prompt) if is_array(prompt) else np.array(list(prompt))
    check_tokens(what, tokens, vocabulary_size)
    return tokens.astype(np.int64)


def _is_sequence(given: Any) -> bool:
    return (isinstance(given, Sequence) and not isinstance(given, str)) or (is_array(given) and given.ndim > 0)


# Logits of the tokens after some sequences of one length, (sequences, vocabulary), on ranks that have them.
Predict = Callable[[np.ndarray, KeyValueCache | None], Array | None]


@dataclass(frozen=True)
class GenerationRequest:
    """The arguments of `Decoder.generate`, checked."""

    prompts: list[np.ndarray]  # int64, at least one token each
    several: bool  # given as a sequence of prompts
    count: int  # the most tokens to add to each
    seed: int
    sampling: Sampling
    cache: bool

    @classmethod
    def of(
        cls, prompt_tokens: Any, vocabulary_size: int, *, count: Any, seed: Any, cache: Any, **sampling: Any
    ) -> GenerationRequest:
        """The request of these arguments; raises TypeError or ValueError if one makes no sense."""
        prompts, several = checked_prompts(prompt_tokens, vocabulary_size)
        count, seed = integer("count", count, least=0), integer("seed", seed)
        asked = Sampling(**sampling)
        if asked.stop_tokens:
            check_tokens("stop_tokens", np.array(asked.stop_tokens), vocabulary_size)
        return cls(prompts, several, count, seed, asked, flag("cache", cache))

    def facts(self) -> dict[str, str]:
        """By name, as text that differs where the arguments do."""
        digest = hashlib.blake2b(digest_size=8)
        for prompt in self.prompts:
            digest.update(np.int64(len(prompt)).tobytes() + prompt.tobytes())
        shown_prompts = shown([prompt.tolist() for prompt in self.prompts])
        found = {"prompt_tokens": shown_prompts, "prompt_tokens(digest)": digest.hexdigest()}
        found |= {name: repr(getattr(self, name)) for name in ("several", "count", "seed", "cache")}
        return found | {name: repr(value) for name, value in asdict(self.sampling).items()}


def agreed_request(ranks: Axis | ModelParallelGroup | None, *arguments: Any, **named: Any) -> GenerationRequest:
    """`GenerationRequest.of`, identical on all ranks; collective over them.

    Raises TypeError or ValueError on all ranks if it makes no sense on one, or differs.
    """
    with opening(ranks, "generate") as same:
        request = GenerationRequest.of(*arguments, **named)
        if ranks is not None:
            same |= request.facts()
    return request


def ranks_of_one_model(mesh: Mesh | None, parameters: FlatParameters) -> Axis | ModelParallelGroup | None:
    """The ranks that compute together, of one data coordinate or all that share parameters; None: this rank alone.

    Collective over the tensor and pipeline axes of the mesh.
    """
    if parameters.sharded is None:
        return None if mesh is None else ModelParallelGroup(mesh.tensor, mesh.pipeline, mesh.rank)
    return parameters.sharded.axis if mesh is None else mesh.world


def lengths_of_change(architecture: DecoderArchitecture) -> frozenset[int] | None:
    """Lengths of a text beyond which the keys of all its tokens change; None if keys cannot be kept at all.

    Embeddings and attention of a user's class may not know where in a text a pass begins. Everything else takes each
    token by itself.
    """
    names = architecture.units()
    if type(architecture.build(names[0])) is not EmbeddingUnit:
        return None
    changes = set()
    for name in names[1:-1]:
        block = architecture.build(name)
        if not isinstance(block, TransformerBlock) or type(block).forward is not TransformerBlock.forward:
            return None
        if type(block.attention) is not CausalSelfAttention:
            return None
        if block.attention.rotary is not None:
            changes.add(block.attention.rotary.changes_after)
    return frozenset(length for length in changes if length is not None)


class Generation:
    """Some texts that grow; only the last `context_length` tokens of each count."""

    def __init__(self, request: GenerationRequest, context_length: int, changes: Collection[int] | None) -> None:
        self.texts: list[list[int]] = [prompt.tolist() for prompt in request.prompts]
        self._request = request
        self._context = context_length
        self._changes: Collection[int] = changes or ()
        self._cache: KeyValueCache | None = None
        if request.cache and changes is not None:
            longest = max(map(len, self.texts)) + request.count
            self._cache = KeyValueCache(len(self.texts), min(longest, context_length))
        # Tokens of each text whose keys and values are kept.
        self._held = [0] * len(self.texts)

    def run(self, predict: Predict, share: Callable[[np.ndarray], Any]) -> list[np.ndarray]:
        """Add tokens to all texts and return them; collective if the functions are.

        `share` broadcasts tokens in place from the ranks that have logits.  Raises FloatingPointError if these are NaN
        or infinite.
        """
        request = self._request
        samplers = [TokenSampler(request.sampling, request.seed, number) for number in range(len(self.texts))]
        active = list(range(len(self.texts)))
        try:
            for _ in range(request.count):
                drawn = np.zeros(len(self.texts), np.int64)
                for numbers, windows_bt, cache in self._passes(active):
                    logits_bv = predict(windows_bt, cache)
                    if logits_bv is not None:
                        for number, logits_v in zip(numbers, to_host(logits_bv), strict=True):
                            drawn[number] = samplers[number].next(logits_v.astype(np.float64))
                share(drawn)
                for number in active:
                    if drawn[number] < 0:
                        raise FloatingPointError(
                            f"the logits of text {number} after {len(self.texts[number])} tokens are NaN or infinite: "
                            "no token can be drawn; look whether parameters are finite"
                        )
                    self.texts[number].append(int(drawn[number]))
                active = [number for number in active if self.texts[number][-1] not in request.sampling.stop_tokens]
                if not active:
                    break
        finally:
            if self._cache is not None:
                self._cache.clear()
        return [np.array(text, np.int64) for text in self.texts]

    def _passes(self, active: Sequence[int]) -> list[tuple[list[int], np.ndarray, KeyValueCache | None]]:
        """Texts, tokens and cache of the passes that give the next token of all: texts of one length go together."""
        continued = [number for number in active if self._continues(number)]
        by_length: dict[int, list[int]] = {}
        for text in active:
            if text not in continued:
                by_length.setdefault(min(len(self.texts[text]), self._context), []).append(text)
        return [
            *(self._pass(numbers, length) for length, numbers in sorted(by_length.items())),
            *([self._pass(continued, 1)] if continued else []),
        ]

    def _continues(self, number: int) -> bool:
        """Return True if the keys and values of all tokens but the last are kept, and still right."""
        length, held = len(self.texts[number]), self._held[number]
        return 0 < held == length - 1 and length <= self._context and held not in self._changes

    def _pass(self, numbers: list[int], tokens: int) -> tuple[list[int], np.ndarray, KeyValueCache | None]:
        lengths = [len(self.texts[number]) for number in numbers]
        windows_bt = np.array([self.texts[number][-tokens:] for number in numbers], np.int64)
        # Beyond the context the positions of all tokens change with every step.
        if self._cache is None or max(lengths) > self._context:
            return numbers, windows_bt, None
        for text, length in zip(numbers, lengths, strict=True):
            self._held[text] = length
        return numbers, windows_bt, self._cache.over(numbers, [length - tokens for length in lengths])
