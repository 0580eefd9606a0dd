"""Long sequences: a model of transformers whose tokens are divided over the tensor axis, ``plan="sequence"``.

Each rank computes all layers on a run of the tokens.  Attention alone needs other tokens: there ranks exchange tokens
of all heads for all tokens of some heads, and exchange the result back.  Jacobs et al., "DeepSpeed Ulysses" (2023),
section 3.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mpishard.arguments import listed
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import run_lengths, split
from mpishard.nn.tensor_parallel import BACKWARD, FORWARD, Reduce
from mpishard.torch.adapters import model_within, wrappers_of
from mpishard.torch.divided_logits import IGNORED
from mpishard.torch.plan_checks import PassRecord, check_numbers, copied
from mpishard.torch.tensor_ops import all_to_all, moved
from mpishard.torch.tensor_parallel_module import TensorParallelModule
from mpishard.torch.units import tensors_in, uncompiled

PLAN = "sequence"
_ATTENTION = "mpishard_sequence"  # its name in transformers
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "labels", "shift_labels")
_CHECKED = 8  # tokens a rank in the pass that is compared with one of the whole module
# What attentions of some models add to their scores.
_NOT_TAKEN = ("softcap", "s_aux", "position_bias")


# Heads and tokens.  Axes: b samples, h heads, t tokens, d channels of a head.


@dataclass
class DividedTokens:
    """The tokens of a pass: rank r of an axis has ``[offsets[r], offsets[r + 1])``."""

    axis: Axis
    offsets: tuple[int, ...]
    is_used: bool = False  # by an attention

    @property
    def counts(self) -> list[int]:
        """Those of each rank."""
        return run_lengths(self.offsets)

    def own(self, x: Any) -> Any:
        """This rank's part of a tensor whose second dimension has the tokens."""
        start, stop = self.offsets[self.axis.rank : self.axis.rank + 2]
        return x[:, start:stop]


def to_heads(x_bhtd: Any, tokens: DividedTokens, heads: Sequence[range]) -> Any:
    """From a rank's tokens of all heads to all tokens of its heads, ``heads[rank]``; the adjoint adds up. Collective.

    Several ranks may have the same head, and each head has one.
    """
    return _Exchange.apply(x_bhtd, tokens, heads, True)


def to_tokens(x_bhtd: Any, tokens: DividedTokens, heads: Sequence[range]) -> Any:
    """The adjoint of `to_heads`, and, where no two ranks have the same head, its inverse. Collective."""
    return _Exchange.apply(x_bhtd, tokens, heads, False)


class _Exchange(torch.autograd.Function):
    """`to_heads` and `to_tokens`, each the adjoint of the other."""

    @staticmethod
    def forward(ctx: Any, x: Any, tokens: DividedTokens, heads: Sequence[range], gathers_tokens: bool) -> Any:
        ctx.how = tokens, heads, gathers_tokens
        return (_gather_tokens if gathers_tokens else _gather_heads)(x, tokens, heads, FORWARD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> tuple[Any, None, None, None]:
        tokens, heads, gathers_tokens = ctx.how
        return (_gather_heads if gathers_tokens else _gather_tokens)(dy, tokens, heads, BACKWARD), None, None, None


def _gather_tokens(x_bhtd: Any, tokens: DividedTokens, heads: Sequence[range], label: str) -> Any:
    samples, _, _, channels = x_bhtd.shape
    sent = [x_bhtd[:, each.start : each.stop] for each in heads]
    own = len(heads[tokens.axis.rank])
    shapes = [(samples, own, count, channels) for count in tokens.counts]
    return torch.cat(_all_to_all(tokens.axis, sent, shapes, label), 2)


def _gather_heads(x_bhtd: Any, tokens: DividedTokens, heads: Sequence[range], label: str) -> Any:
    samples, _, _, channels = x_bhtd.shape
    count = tokens.counts[tokens.axis.rank]
    shapes = [(samples, len(each), count, channels) for each in heads]
    found_bhtd = x_bhtd.new_zeros(samples, max(each.stop for each in heads), count, channels)
    parts = _all_to_all(tokens.axis, x_bhtd.split(tokens.counts, 2), shapes, label)
    for each, part in zip(heads, parts, strict=True):
        found_bhtd[:, each.start : each.stop] += part
    return found_bhtd


def _all_to_all(axis: Axis, parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], label: str) -> list[Any]:
    """Send a part to each rank, and receive one of a shape from each."""
    out_counts = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([part.reshape(-1) for part in parts])
    found = all_to_all(flat, axis, [part.numel() for part in parts], out_counts, label)
    return [part.view(shape) for part, shape in zip(found.split(out_counts), shapes, strict=True)]


# What transformers calls.


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    divided_tokens: DividedTokens | None = None,
    **options: Any,
) -> tuple[Any, None]:
    """Attention of tokens that ranks have divided, as transformers calls it. Collective.

    A rank has equally many heads of queries as the others or one more, and computes the keys and values of these.
    """
    if divided_tokens is None:
        raise RuntimeError(
            f"{type(module).__name__} was called outside of a pass of the module that as_distributed has got with "
            f"plan={PLAN!r}, or its model gives it no keyword arguments: call that module, and not its parts; another "
            "model of the same configuration needs a copy.deepcopy of it"
        )
    unfit = [name for name in _NOT_TAKEN if options.get(name) is not None]
    if unfit:
        raise ValueError(f"{type(module).__name__} wants {listed(unfit)}, which plan={PLAN!r} has not: {_OTHER_PLAN}")
    tokens, heads, groups = divided_tokens, query.shape[1], query.shape[1] // key.shape[1]
    tokens.is_used = True
    size, rank = tokens.axis.size, tokens.axis.rank
    _check_heads(heads, size)
    of_queries = [range(*ends) for ends in itertools.pairwise(split(heads, size))]
    of_keys = [range(each.start // groups, (each.stop - 1) // groups + 1) for each in of_queries]
    query = to_heads(query, tokens, of_queries)
    key, value = (to_heads(each, tokens, of_keys) for each in (key, value))
    if groups > 1:
        shared = [head // groups - of_keys[rank].start for head in of_queries[rank]]
        key, value = key[:, shared], value[:, shared]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    found = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=bool(causal) and attention_mask is None,
    )
    return to_tokens(found, tokens, of_queries).transpose(1, 2).contiguous(), None


def _mask(*, q_length: int, kv_length: int, q_offset: Any = 0, **options: Any) -> Any:
    """The mask of all tokens, as queries and keys, in a pass of a rank's tokens; None for a causal one."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(q_length=kv_length, kv_length=kv_length, q_offset=0, **options)


_OTHER_PLAN = "leave plan= out, so that tensor ranks divide its layers, or make the mesh with tensor=1"


def _check_heads(heads: int, ranks: int) -> None:
    if heads < ranks:
        raise ValueError(
            f"an attention has {heads} heads for tensor={ranks} ranks, and plan={PLAN!r} needs one for each: make the "
            f"mesh with tensor={heads} or less"
        )


# The module.


class SequenceModule(TensorParallelModule):
    """A model of transformers on the tokens that a rank has; its parameters are whole on all.

    Of their gradients each rank has a term.
    """

    def __init__(self, module: Any, mesh: Mesh, tensors: Mapping[str, Any], checks_pass: bool) -> None:
        super().__init__(module, mesh, tensors, {}, frozenset(tensors), [], checks_pass)
        self._sum = Reduce(self._axis)
        self._signature = inspect.signature(module.forward)
        self._their_attention: str = module.config._attn_implementation
        self._sums_loss = False  # of the pass under way
        self._tokens: DividedTokens | None = None

    @classmethod
    def of(
        cls, module: Any, mesh: Mesh, trained: Mapping[str, Any], frozen: Mapping[str, Any], *, checks_pass: bool
    ) -> SequenceModule | None:
        """The module of `as_distributed`; None on a mesh of one tensor rank. Not collective.

        Raises ValueError if its sequences cannot be divided.
        """
        module, ranks = uncompiled(module), mesh.tensor.size
        why = _why_not(module)
        if why:
            raise ValueError(
                f"plan={PLAN!r} divides the sequences of decoders of transformers, and this {type(module).__name__} "
                f"{why}; {_OTHER_PLAN}"
            )
        if mesh.pipeline.size > 1:
            raise ValueError(
                f"plan={PLAN!r} on the mesh {mesh.sizes}: the stages of a pipeline take whole sequences; make the mesh "
                "with pipeline=1, or leave plan= out"
            )
        _check_heads(module.config.get_text_config().num_attention_heads, ranks)
        return None if ranks == 1 else cls(module, mesh, {**trained, **frozen}, checks_pass)

    @property
    def described(self) -> str:
        return "sequences"

    def _replace_code(self) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(_ATTENTION, torch.compiler.disable(_attention))
        AttentionMaskInterface.register(_ATTENTION, _mask)

    def _restore_code(self) -> None:
        """Nothing: `_set_attentions` gives the model its own."""

    def _set_attentions(self, *, whole: bool) -> None:
        self._module.set_attn_implementation(self._their_attention if whole else _ATTENTION)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _before(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self.is_summoned:
            return None
        self._agree_on_inputs(args, kwargs)
        return (), self._divided(self._named(args, kwargs))

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        tokens, self._tokens = self._tokens, None
        if tokens is None or output is None:  # of a whole module, or after an error
            return None
        if not tokens.is_used:
            raise RuntimeError(
                f"no attention of this {type(module).__name__} was called with the keyword arguments of its model, "
                f"which plan={PLAN!r} needs: {_OTHER_PLAN}"
            )
        if self._sums_loss:
            if getattr(output, "loss", None) is None:
                raise ValueError(f"plan={PLAN!r} sums the loss of labels, as output.loss: leave return_dict=False out")
            output.loss = moved(output.loss.reshape(1), self._sum).reshape(())
        return output

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments of a pass by name."""
        found = dict(self._signature.bind(*args, **kwargs).arguments)
        others = found.pop(list(self._signature.parameters)[-1], {})  # the last one takes keyword arguments
        return found | others

    def _divided(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a pass of this rank's tokens."""
        count, size = tokens_of(given), self._axis.size
        if count < size:
            raise ValueError(f"sequences of {count} tokens for tensor={size} ranks: each needs a token at least")
        tokens = self._tokens = DividedTokens(self._axis, tuple(split(count, size)))
        wanted = dict(given)
        words = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        if wanted.get("position_ids") is None:
            wanted["position_ids"] = torch.arange(count, device=words.device)[None]
        if wanted.get("attention_mask") is None:
            # With it models know how many tokens there are, and take no part of a sequence for several packed in one.
            wanted["attention_mask"] = torch.ones(words.shape[:2], dtype=torch.bool, device=words.device)
        rows = getattr(self._module.get_input_embeddings(), "num_embeddings", None)
        if rows is not None and given.get("input_ids") is not None:
            check_numbers("input_ids", words, rows)
        self._sums_loss = given.get("labels") is not None
        if self._sums_loss:
            targets = given.get("shift_labels")
            ignored = given.get("ignore_index", IGNORED)
            if targets is None:
                targets = torch.nn.functional.pad(given["labels"], (0, 1), value=ignored)[:, 1:]
            check_numbers("labels", targets[targets != ignored], self._module.config.get_text_config().vocab_size)
            wanted["shift_labels"] = targets
            if given.get("num_items_in_batch") is None:
                wanted["num_items_in_batch"] = (targets != ignored).sum()
        for name in _BY_TOKEN:
            if wanted.get(name) is not None:
                wanted[name] = tokens.own(wanted[name]).contiguous()
        return wanted | {"use_cache": False, "divided_tokens": tokens}

    def _compared_passes(self, gathered: Any, module: Any, args: Any, kwargs: Any) -> tuple[PassRecord, PassRecord]:
        """Passes of the first tokens."""
        given = self._named(args, kwargs)
        count = min(tokens_of(given), _CHECKED * self._axis.size)
        for name in (*_BY_TOKEN, "attention_mask"):
            if given.get(name) is not None:
                given[name] = given[name][:, :count]
        given.pop("num_items_in_batch", None)  # counts those of more tokens
        with self._without_trace(module, gathered):
            tokens_given = self._divided(copied(given))
            tokens = self._tokens
            assert tokens is not None
            parts = self._after(module, (), module.forward(**tokens_given))
            with self.summoned(False, False), raised_on_all(self._axis):
                wholes = module.forward(**(copied(given) | {"use_cache": False}))
        expected = []
        for part, x in zip(tensors_in(parts), tensors_in(wholes), strict=True):
            is_divided = x.dim() > 1 and x.shape[1] == count and part.shape[1] == tokens.counts[self._axis.rank]
            expected.append(tokens.own(x) if is_divided else x)
        own, whole = PassRecord(), PassRecord()
        own.note_output(parts)
        whole.note_output(expected)
        return own, whole

    def _misfit(self, error: ValueError) -> str:
        return (
            f"this {type(self._module).__name__} computes something else on a part of its tokens: {error}.  Beside its "
            f"attentions, each token must be for itself: {_OTHER_PLAN}"
        )

    def compare_gradients(self) -> None:
        """In the first steps find gradients of passes that were not divided; `problem` is what is wrong."""
        if self._gradients.compare() is not None:
            self.problem = ValueError(
                "all tensor ranks have the same gradients, which are terms of a sum: passes were of whole sequences; "
                "call the module that as_distributed has got, and not its parts, nor within summon_full_parameters"
            )


def _why_not(module: Any) -> str:
    """Why the sequences of a module cannot be divided; empty if they can."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        return "is none"
    if not isinstance(module, PreTrainedModel):
        if model_within(module) is not module and wrappers_of(module):
            return "is wrapped around one: give its get_base_model(), whose layers have the adapters"
        return "is none"
    from transformers import __version__, masking_utils

    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        return f"is of transformers {__version__}, whose masks are other ones than those from 5.4 on"
    takes = inspect.signature(module.forward).parameters
    if not {"input_ids", "position_ids", "attention_mask", "use_cache"} <= takes.keys():
        return "takes no input_ids, position_ids, attention_mask and use_cache"
    if getattr(module.config, "is_encoder_decoder", False):
        return "has an encoder"
    if getattr(module.config, "output_router_logits", False):
        return "takes the balance of its experts over all tokens: set output_router_logits=False"
    if list(takes.values())[-1].kind is not inspect.Parameter.VAR_KEYWORD or not module._can_set_attn_implementation():
        return "does not give its attentions keyword arguments"
    return ""


def tokens_of(given: Mapping[str, Any]) -> int:
    """The number of tokens of a sequence.  Raises ValueError for arguments that cannot be divided."""
    words = given.get("input_ids")
    words = given.get("inputs_embeds") if words is None else words
    if words is None or words.dim() < 2:
        raise ValueError(f"plan={PLAN!r} needs input_ids of shape (samples, tokens), or inputs_embeds")
    count = words.shape[1]
    for name, x in given.items():
        if x is None or not isinstance(x, torch.Tensor) or (x.dim() == 0 and name not in _BY_TOKEN):
            continue
        if name not in (*_BY_TOKEN, "attention_mask"):
            raise ValueError(
                f"plan={PLAN!r} cannot divide {name}, of shape {tuple(x.shape)}: it divides {', '.join(_BY_TOKEN)}"
            )
        if x.shape[1:2] != (count,) or (x.dim() != 2 and name != "inputs_embeds"):
            raise ValueError(f"{name} has the shape {tuple(x.shape)}, and must have {count} tokens: (samples, {count})")
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None and mask is not None and not bool(mask[:, 0].all()):
        raise ValueError(
            "attention_mask has padding in front of tokens, and models count positions from the first or from the "
            "first without padding: give position_ids too, or pad behind the tokens"
        )
    if positions is not None and mask is None and bool((positions.diff(dim=1) != 1).any()):
        raise ValueError(
            f"position_ids that begin anew stand for several sequences packed in one, which plan={PLAN!r} does not "
            "keep apart: give them as samples of their own"
        )
    if given.get("past_key_values") is not None or given.get("logits_to_keep", 0) != 0:
        raise ValueError(
            f"plan={PLAN!r} takes no past_key_values and logits_to_keep: generate within summon_full_parameters"
        )
    return int(count)
