"""A decoder-only transformer in the manner of GPT-2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.layers import GELU, Embedding, Layer, LayerNorm, Linear, PositionEmbedding, cross_entropy
from mpishard.nn.workspace import Workspace
from mpishard.parameters import FlatParameters
from mpishard.randomness import generator

Array = Any


class MLP(Layer):
    """``GELU(x W1 + b1) W2 + b2`` with four times as many channels inside."""

    def __init__(self, name: str, width: int, *, output_scale: float = 0.02) -> None:
        self.expand = Linear(f"{name}.expand", width, 4 * width, split=1)
        self.activation = GELU(f"{name}.activation")
        self.contract = Linear(f"{name}.contract", 4 * width, width, scale=output_scale, split=0)
        super().__init__(name, [self.expand, self.activation, self.contract])

    def forward(self, x_nc: Array, work: Workspace, residual_nc: Array | None = None) -> Array:
        """The output, plus `residual` where given; keeps `x`, which must stay as it is until `backward`."""
        hidden_nd = self.expand.product(x_nc, work.save(f"{self.expand.name}.y", len(x_nc), self.expand.outputs))
        work.kept[self.name] = x_nc
        return self.contract.forward(self.activation.forward(hidden_nd, work, self.expand.bias), work, residual_nc)

    def backward(self, dy_nc: Array, work: Workspace) -> Array:
        """Gradient by `x`."""
        x_nc = work.kept[self.name]
        dhidden_nd = self.contract.backward(dy_nc, work)
        bias_name = self.expand.bias_name
        assert bias_name is not None
        self.activation.backward(dhidden_nd, work, self._gradient_to_add_to(bias_name))
        self.parameters.finished(bias_name)
        dx_nc = self.expand.input_gradient(dhidden_nd, work.borrow(f"{self.role}.dx", *x_nc.shape))
        self.expand.weight_gradient(x_nc, dhidden_nd, work, with_bias=False)
        return dx_nc


class Block(Layer):
    """Pre-norm residual block: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``."""

    def __init__(self, name: str, width: int, heads: int, *, output_scale: float = 0.02) -> None:
        self.attention_norm = LayerNorm(f"{name}.attention_norm", width)
        self.attention = CausalSelfAttention(f"{name}.attention", width, heads, output_scale=output_scale)
        self.mlp_norm = LayerNorm(f"{name}.mlp_norm", width)
        self.mlp = MLP(f"{name}.mlp", width, output_scale=output_scale)
        super().__init__(name, [self.attention_norm, self.attention, self.mlp_norm, self.mlp])
        self.share_scratch(name)

    def forward(self, x_nc: Array, work: Workspace, length: int) -> Array:
        """Rows are sequences of `length` tokens end to end; keeps `x` until `backward`."""
        normed_nc = self.attention_norm.forward(x_nc, work)
        x_nc = self.attention.forward(normed_nc, work, length, residual_nc=x_nc)
        return self.mlp.forward(self.mlp_norm.forward(x_nc, work), work, residual_nc=x_nc)

    def backward(self, dy_nc: Array, work: Workspace, length: int) -> Array:
        """Gradient by `x`, in place of `dy`."""
        self.mlp_norm.backward(self.mlp.backward(dy_nc, work), work, residual_nc=dy_nc)
        self.attention_norm.backward(self.attention.backward(dy_nc, work, length), work, residual_nc=dy_nc)
        return dy_nc


class GPT(Layer):
    """Pre-norm decoder-only transformer with learned positions, a final norm and an untied output head.

    Initial values as in GPT-2 (Radford et al., 2019): normal with standard deviation 0.02, biases 0, and the
    projections back to the residual stream smaller by ``sqrt(2 * layers)``; keyed by `seed` and tensor names.

    Parameters
    ----------
    vocabulary_size : int
        Tokens are integers in ``[0, vocabulary_size)``.
    context_length : int
        Longest sequence.
    width, layers, heads : int
        Channels (a multiple of `heads`), number of blocks, and heads in each.
    dtype : dtype
        float32 or float64.
    seed : int
        Of the initial values.

    Attributes
    ----------
    parameters : FlatParameters
        All tensors.  The bias of the attention keys (in ``blocks.*.attention.qkv.bias``) has a gradient that is zero
        in exact arithmetic, see `CausalSelfAttention`.
    workspace : Workspace
        The memory that the methods use which take none.
    """

    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        dtype: Any = np.float32,
        seed: int = 0,
    ) -> None:
        sizes = dict(vocabulary_size=vocabulary_size, context_length=context_length, width=width, layers=layers)
        for what, size in sizes.items():
            if size < 1:
                raise ValueError(f"{what} is {size}; it must be at least 1")
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise TypeError(f"dtype is {np.dtype(dtype)}; GPT computes in float32 or float64")
        self.vocabulary_size, self.context_length, self.width = vocabulary_size, context_length, width
        output_scale = 0.02 / math.sqrt(2 * layers)
        self.tokens = Embedding("token_embedding", vocabulary_size, width, split=0)
        self.positions = PositionEmbedding("position_embedding", context_length, width)
        self.blocks = [Block(f"blocks.{i}", width, heads, output_scale=output_scale) for i in range(layers)]
        self.final_norm = LayerNorm("final_norm", width)
        self.head = Linear("head", width, vocabulary_size, bias=False, split=1)
        super().__init__("gpt", [self.tokens, self.positions, *self.blocks, self.final_norm, self.head])
        self.bind(FlatParameters(self.specs(), np.dtype(dtype)))
        self.initialize(seed)
        self.workspace = Workspace(dtype)

    def loss_and_gradient(self, tokens: Array, targets: Array) -> float:
        """Summed loss of a micro-batch; the gradient of that sum goes to ``parameters.gradient``.

        Parameters
        ----------
        tokens, targets : int array, (batch, length)
            Any batch size, ``length <= context_length``; `targets` holds the token that follows each of `tokens`.

        Returns
        -------
        float
            Cross-entropy in nats, summed over all tokens.
        """
        logits_nv, targets_n = self._logits_and_targets(tokens, targets)
        loss = cross_entropy(logits_nv, targets_n)
        self.backward(logits_nv, self.workspace, np.shape(tokens)[1])
        return loss

    def loss(self, tokens: Array, targets: Array) -> float:
        """Summed loss of a micro-batch, without gradients; arguments as for `loss_and_gradient`."""
        return cross_entropy(*self._logits_and_targets(tokens, targets))

    def logits(self, tokens: Array) -> Array:
        """Unnormalised log-probabilities of the next token, (batch, length, vocabulary_size), in a new array."""
        tokens_n = self._checked("tokens", tokens, self.workspace)
        logits_nv = self.forward(tokens_n, self.workspace, np.shape(tokens)[1])
        return logits_nv.reshape(*np.shape(tokens), self.vocabulary_size).copy()

    def generate(self, prompt_tokens: Sequence[int], count: int, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
        """Continue a prompt by `count` sampled tokens.

        Parameters
        ----------
        prompt_tokens : sequence of int
            At least one token; of more than ``context_length`` the last ones count.
        count : int
            Tokens to add.
        temperature : float
            Divides the logits; 0 takes the most likely token.
        seed : int
            Same seed, same text.

        Returns
        -------
        int64 array, (len(prompt_tokens) + count,)
            The prompt and its continuation.
        """
        tokens = np.array(prompt_tokens, ndmin=1)
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"the prompt must be a sequence of at least one token, got shape {tokens.shape}")
        if count < 0 or not temperature >= 0:
            raise ValueError(f"count and temperature must not be negative, got {count} and {temperature}")
        self._checked("prompt tokens", tokens[None, -self.context_length :], self.workspace)
        random = generator(seed, "generate")
        tokens = np.concatenate([tokens.astype(np.int64), np.zeros(count, np.int64)])
        for end in range(len(tokens) - count, len(tokens)):
            logits_v = self.logits(tokens[None, max(0, end - self.context_length) : end])[0, -1].astype(np.float64)
            if temperature == 0:
                tokens[end] = logits_v.argmax()
                continue
            weights_v = np.exp((logits_v - logits_v.max()) / temperature)
            edges_v = np.cumsum(weights_v)
            tokens[end] = min(np.searchsorted(edges_v, random.random() * edges_v[-1], "right"), len(edges_v) - 1)
        return tokens

    def forward(self, tokens_n: Array, work: Workspace, length: int) -> Array:
        """Logits, (tokens, vocabulary_size), of sequences of `length` tokens end to end, in memory of `work`."""
        x_nc = self.tokens.forward(tokens_n, work)
        self.positions.add_to(x_nc.reshape(-1, length, self.width))
        for block in self.blocks:
            x_nc = block.forward(x_nc, work, length)
        return self.head.forward(self.final_norm.forward(x_nc, work), work)

    def backward(self, dlogits_nv: Array, work: Workspace, length: int) -> None:
        """All gradients, from the gradient by the logits of the last `forward` with the same `work`."""
        dx_nc = self.final_norm.backward(self.head.backward(dlogits_nv, work), work)
        for block in reversed(self.blocks):
            dx_nc = block.backward(dx_nc, work, length)
        self.positions.backward_positions(dx_nc.reshape(-1, length, self.width))
        self.tokens.backward(dx_nc, work)

    def _logits_and_targets(self, tokens: Array, targets: Array) -> tuple[Array, Array]:
        if np.shape(tokens) != np.shape(targets):
            raise ValueError(f"tokens have shape {np.shape(tokens)}, but targets {np.shape(targets)}")
        tokens_n = self._checked("tokens", tokens, self.workspace)
        targets_n = self._checked("targets", targets, self.workspace)
        return self.forward(tokens_n, self.workspace, np.shape(tokens)[1]), targets_n

    def _checked(self, what: str, tokens: Array, work: Workspace) -> Array:
        """`tokens` as a flat int64 array of `work`, or an error."""
        tokens = np.asarray(tokens)
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"{what} must be integers, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"{what} must have shape (batch, length), got {tokens.shape}")
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"{what} are sequences of {tokens.shape[1]}, but the model's context_length is {self.context_length}"
            )
        if tokens.size == 0:
            raise ValueError(f"{what} of shape {tokens.shape} hold no token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocabulary_size:
            raise ValueError(
                f"{what} range from {low} to {high}, but the model's vocabulary_size is {self.vocabulary_size}: "
                f"valid tokens are 0 to {self.vocabulary_size - 1}"
            )
        flat = work.saved(what, (tokens.size,), np.int64)
        flat.reshape(tokens.shape)[...] = tokens
        return flat
