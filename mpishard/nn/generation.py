"""Continues texts by sampled tokens, with keys and values of earlier tokens kept or computed again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, shown
from mpishard.backend.array import to_host
from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh, ModelParallelGroup
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import TransformerBlock
from mpishard.nn.cache import KeyValueCache
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.sampling import Sampling, TokenSampler, checked_prompts
from mpishard.nn.units import EmbeddingUnit
from mpishard.parameters.flat import FlatParameters

Array = Any
# Logits of the tokens after some sequences of one length, (sequences, vocabulary), on ranks that have them.
Predict = Callable[[np.ndarray, KeyValueCache | None], Array | None]


@dataclass(frozen=True)
class Request:
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
    ) -> Request:
        """The request of these arguments; raises TypeError or ValueError if one makes no sense."""
        prompts, several = checked_prompts(prompt_tokens, vocabulary_size)
        count, seed = integer("count", count, least=0), integer("seed", seed)
        asked = Sampling(**sampling)
        asked.check_stop_tokens(vocabulary_size)
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


def agreed_request(ranks: Axis | ModelParallelGroup | None, *arguments: Any, **named: Any) -> Request:
    """`Request.of`, identical on all ranks; collective over them.

    Raises TypeError or ValueError on all ranks if it makes no sense on one, or differs.
    """
    if ranks is None:
        return Request.of(*arguments, **named)
    request, problem = None, None
    try:
        request = Request.of(*arguments, **named)
    except (TypeError, ValueError) as error:
        problem = error
    facts = {} if request is None else request.facts()
    agree_on_settings(ranks, facts, problem, what="arguments of generate()")
    assert request is not None
    return request


def ranks_of_one_model(mesh: Mesh | None, parameters: FlatParameters) -> Axis | ModelParallelGroup | None:
    """The ranks that compute together, of one data coordinate or all that share parameters; None: this rank alone.

    Collective over the tensor and pipeline axes of the mesh.
    """
    if parameters.sharded is None:
        return None if mesh is None else ModelParallelGroup(mesh)
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
        changes.add(block.attention.keys_change_after)
    return frozenset(length for length in changes if length is not None)


class Generation:
    """Some texts that grow; only the last `context_length` tokens of each count."""

    def __init__(self, request: Request, context_length: int, changes: Collection[int] | None) -> None:
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

        `share` broadcasts tokens in place from the ranks that have logits.
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
        for number in active:
            if number not in continued:
                by_length.setdefault(min(len(self.texts[number]), self._context), []).append(number)
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
        for number, length in zip(numbers, lengths, strict=True):
            self._held[number] = length
        return numbers, windows_bt, self._cache.over(numbers, [length - tokens for length in lengths])
