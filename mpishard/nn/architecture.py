"""The sizes, units and pipeline stages of GPT, Llama and similar models, without memory or ranks.

`described` gives them as plain values for files: a checkpoint has the architecture of its model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpishard.arguments import flag, integer, number, shown
from mpishard.layout.boxes import split
from mpishard.layout.tensors import ParameterSpec, merge_ties
from mpishard.nn.attention import AttentionOptions, CausalSelfAttention
from mpishard.nn.block import Block, GatedMLP, TransformerBlock
from mpishard.nn.layers import checked_rate
from mpishard.nn.norms import RMSNorm
from mpishard.nn.rotary import Rotary
from mpishard.nn.units import EMBEDDINGS, OUTPUT_HEAD, EmbeddingUnit, OutputHead, Unit


class DecoderArchitecture(ABC):
    """A decoder-only transformer: embeddings, blocks, and an output head, for `Decoder`.

    A model of one's own is a frozen dataclass with this base, with the fields below and its own, and a `build_block`.

    No method is collective.

    Attributes
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int
        Longest sequence.
    width : int
        Channels.
    layers : int
        Number of blocks.
    heads : int
        Heads of queries in each block.
    tied : bool
        Whether the output head uses the table of the token embedding.
    shards : int
        Number of slices by which the model is defined, a divisor of `query_groups`; see `Architecture`.
    dropout : float
        Rate of dropout, which its layers have, too.
    """

    vocabulary_size: int
    context_length: int
    width: int
    layers: int
    heads: int
    tied: bool = False
    shards: int = 1
    dropout: float = 0.0

    @property
    def query_groups(self) -> int:
        """Heads of keys and values, each with the queries that it serves: attention is cut by these."""
        return self.heads

    def check_sizes(self) -> None:
        """Raise unless the sizes are whole numbers of at least 1, and make them Python's; for ``__post_init__``.

        Raises
        ------
        TypeError
            If a size is no integer, `tied` is neither True nor False, or `dropout` is no number.
        ValueError
            If a size is below 1, or `dropout` is outside of 0 <= rate < 1.
        """
        for what in ("vocabulary_size", "context_length", "width", "layers", "heads", "shards"):
            self._set(**{what: integer(what, getattr(self, what), least=1)})
        self._set(tied=flag("tied", self.tied), dropout=checked_rate(self.dropout))

    def check_shards(self) -> None:
        """Raise unless heads can be cut into shards; for ``__post_init__``.

        Raises
        ------
        ValueError
            If `shards` does not divide `query_groups`.
        """
        if self.query_groups % self.shards:
            heads = "attention heads" if self.query_groups == self.heads else "heads of keys and values"
            raise ValueError(
                f"{self.query_groups} {heads} cannot be cut into {self.shards} shards; choose a number of shards "
                "that divides the number of heads"
            )

    def units(self) -> list[str]:
        """Names of the units in order.

        Returns
        -------
        list of str
            ``"embeddings"``, ``"blocks.0"`` and so on, ``"output_head"``.
        """
        return [EMBEDDINGS, *(f"blocks.{index}" for index in range(self.layers)), OUTPUT_HEAD]

    def build(self, unit: str, *, sequence_parallel: bool = False) -> Unit:
        """The layers of one unit, not bound to parameters.

        Parameters
        ----------
        unit : str
            One of `units`.
        sequence_parallel : bool
            Whether tensor ranks hold some rows each between the layers that are split by columns.

        Returns
        -------
        Layer
            With the sizes of the whole network; `Layer.bind` gives it memory.

        Raises
        ------
        TypeError
            If a `build_...` method of the architecture returns no unit of its kind.
        """
        # With several shards layers take sums over rows themselves: no gradient is partial.
        sequence_parallel = sequence_parallel and self.shards == 1
        built: Unit
        kind: type[Unit]
        if unit == EMBEDDINGS:
            built, kind, method = self.build_embeddings(), EmbeddingUnit, "build_embeddings"
        elif unit == OUTPUT_HEAD:
            built, kind, method = self.build_head(sequence_parallel), OutputHead, "build_head"
        else:
            built, kind, method = self.build_block(unit, sequence_parallel), TransformerBlock, "build_block"
        if not isinstance(built, kind):
            raise TypeError(f"{type(self).__name__}.{method} returned {shown(built)}; it must be of {kind.__name__}")
        return built

    def build_embeddings(self) -> EmbeddingUnit:
        """The first unit, for `build`: here token embeddings alone.

        Returns
        -------
        EmbeddingUnit
            Not bound to parameters.
        """
        return EmbeddingUnit(self.vocabulary_size, None, self.width)

    @abstractmethod
    def build_block(self, name: str, sequence_parallel: bool) -> TransformerBlock:
        """A block, for `build`.

        Parameters
        ----------
        name : str
            Prefix of the names of its layers.
        sequence_parallel : bool
            For its layers.

        Returns
        -------
        TransformerBlock
            Not bound to parameters.
        """

    def build_head(self, sequence_parallel: bool) -> OutputHead:
        """The last unit, for `build`: here with a layer norm.

        Parameters
        ----------
        sequence_parallel : bool
            For its norm.

        Returns
        -------
        OutputHead
            Not bound to parameters.
        """
        return OutputHead(self.width, self.vocabulary_size, tied=self.tied, sequence_parallel=sequence_parallel)

    def specs_of(self, unit: str, *, sequence_parallel: bool = False) -> list[ParameterSpec]:
        """The tensors of one unit, in the order in which it uses them.

        Parameters
        ----------
        unit : str
            One of `units`.
        sequence_parallel : bool
            As for `build`.

        Returns
        -------
        list of ParameterSpec
            Those that are split are cut into `shards` slices; of stage 0.
        """
        specs = self.build(unit, sequence_parallel=sequence_parallel).specs()
        if self.shards == 1:
            return specs
        # Sums over heads, too, are taken by the layers.
        return [
            replace(spec, partial=False) if spec.tensor_dim is None else replace(spec, slices=self.shards)
            for spec in specs
        ]

    def check(self, tensor: int = 1, stages: int = 1) -> None:
        """Raise unless the model can be split over `tensor` ranks and cut into `stages` stages.

        Parameters
        ----------
        tensor : int
            Tensor ranks.
        stages : int
            Virtual stages: pipeline ranks times chunks per rank.

        Raises
        ------
        ValueError
            If `tensor` does not divide `shards` (above 1) or `query_groups`, or there are more stages than layers.
        """
        if self.shards > 1 and self.shards % tensor:
            raise ValueError(
                f"a model of {self.shards} shards cannot be split over {tensor} tensor-parallel ranks; choose a tensor "
                "size that divides the number of shards, or build the model with shards=1"
            )
        if self.query_groups % tensor:
            grouped = self.query_groups != self.heads
            raise ValueError(
                f"{self.query_groups} {'heads of keys and values' if grouped else 'attention heads'} cannot be split "
                f"over {tensor} tensor-parallel ranks; choose a tensor size that divides the number of heads"
            )
        if stages > self.layers:
            raise ValueError(
                f"{stages} pipeline stages, but the model has {self.layers} layers; every stage needs one: "
                "use fewer pipeline ranks or chunks"
            )

    def cut(self, stages: int, costs: Sequence[float] | None = None) -> list[list[str]]:
        """Units by virtual stage, in order.

        Parameters
        ----------
        stages : int
            Number of stages; each gets at least one unit.
        costs : sequence of float, optional
            Time of each of `units`; the cut then minimises the time of the slowest stage.  Default: blocks are divided
            evenly; the embeddings belong to the first stage, the output head to the last.

        Returns
        -------
        list of list of str
            For each stage its units.

        Raises
        ------
        ValueError
            For more stages than layers, or costs that are not one number of at least 0 per unit.
        """
        self.check(stages=stages)
        units = self.units()
        if costs is not None:
            given = costs
            try:
                costs = [float(cost) for cost in given]
            except (TypeError, ValueError):
                costs = []
            if len(costs) != len(units) or not all(0 <= cost < math.inf for cost in costs):
                raise ValueError(
                    f"stage_costs are {given}; a model of {self.layers} layers needs {len(units)} numbers of at "
                    "least 0, of the embeddings, of each block and of the output head"
                )
            cuts = _cut_by_slowest_stage(costs, stages)
        else:
            cuts = [0, *(1 + stop for stop in split(self.layers, stages)[1:-1]), len(units)]
        return [units[first:last] for first, last in zip(cuts[:-1], cuts[1:], strict=True)]

    def specs(
        self, stages: int = 1, sequence_parallel: bool = False, costs: Sequence[float] | None = None
    ) -> list[ParameterSpec]:
        """All tensors of the model, in the order in which it uses them.

        With `sequence_parallel`, gradients of tensors that are applied row by row are partial: each tensor rank has the
        terms of its rows.

        Parameters
        ----------
        stages : int
            Number of virtual stages.
        sequence_parallel : bool
            Whether tensor ranks hold some rows each between the layers that are split by columns.
        costs : sequence of float, optional
            As for `cut`.

        Returns
        -------
        list of ParameterSpec
            Each with its stage; a tied tensor once.

        Raises
        ------
        ValueError
            As `cut`; and if two layers have tensors of one name, except for the tied table of embeddings and output
            head.
        """
        specs: list[ParameterSpec] = []
        owners: dict[str, str] = {}
        for stage, units in enumerate(self.cut(stages, costs)):
            here: set[str] = set()
            for unit in units:
                for spec in self.specs_of(unit, sequence_parallel=sequence_parallel):
                    owner = owners.get(spec.name)
                    if owner is not None and (owner, unit) != (EMBEDDINGS, OUTPUT_HEAD):
                        raise ValueError(
                            f"{spec.name!r} is a tensor of {owner}, and again of {unit}; names must be unique: begin "
                            "those of a block with the name that build_block gets"
                        )
                    owners[spec.name] = unit
                    # A tie inside one stage is one tensor with two uses.
                    if spec.name not in here:
                        here.add(spec.name)
                        specs.append(replace(spec, stage=stage))
        return merge_ties(specs)

    def tensors_by_unit(self, *, sequence_parallel: bool = False) -> list[list[str]]:
        """Names of the tensors of each of `units`; a tied tensor belongs to the first unit that uses it.

        Parameters
        ----------
        sequence_parallel : bool
            As for `build`.

        Returns
        -------
        list of list of str
            In the order of `units`.
        """
        known: set[str] = set()
        names = []
        for name in self.units():
            layer = self.build(name, sequence_parallel=sequence_parallel)
            names.append([spec.name for spec in layer.specs() if spec.name not in known])
            known.update(names[-1])
        return names

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _cut_by_slowest_stage(costs: Sequence[float], stages: int) -> list[int]:
    """Cut units into stages so that the slowest stage takes as little time as possible; `costs`: the time of each unit.

    Of several such cuts it takes the one with the smallest sum of squares, so that the other stages are even, too.
    Returns the offsets of the stages, with 0 and the number of units.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: the cut of the first n units into the stages so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for stage in range(1, stages + 1):
        candidates: dict[int, tuple[float, float, list[int]]] = {}
        for stop in range(stage, len(costs) - (stages - stage) + 1):
            candidates[stop] = min(
                (max(most, run), squares + run * run, [*cuts, stop])
                for start, (most, squares, cuts) in best.items()
                if start < stop
                for run in [sums[stop] - sums[start]]
            )
        best = candidates
    return best[len(costs)][2]


@dataclass(frozen=True)
class Architecture(DecoderArchitecture):
    """A decoder-only transformer of the kind that `GPT` builds.

    No method is collective.

    Parameters
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int
        Longest sequence.
    width : int
        Channels, a multiple of `heads`.
    layers : int
        Number of blocks.
    heads : int
        Attention heads in each block.
    tied : bool
        Whether the output head uses the table of the token embedding.
    shards : int
        Number of slices by which the model is defined, a divisor of `heads`: each has some heads, hidden channels and
        vocabulary.  With more than 1, a tensor rank computes its slices one by one, and sums over slices and over rows
        have one order.  So the bits of losses and gradients are the same for any tensor size that divides `shards`,
        also with sequence parallelism.  1: every tensor rank has one slice, which is fastest, and the bits depend on
        the tensor size.
    dropout : float
        Rate of dropout of embeddings and of the results of attention and MLP, in training; see `nn.Dropout`.

    Raises
    ------
    TypeError
        If a size is no integer.
    ValueError
        If a size is below 1, `width` is no multiple of `heads`, or `heads` no multiple of `shards`.
    """

    vocabulary_size: int
    context_length: int
    width: int
    layers: int
    heads: int
    tied: bool = False
    shards: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads; all heads need equally many channels"
            )
        self.check_shards()

    def build_embeddings(self) -> EmbeddingUnit:
        return EmbeddingUnit(self.vocabulary_size, self.context_length, self.width, dropout=self.dropout)

    def build_block(self, name: str, sequence_parallel: bool) -> Block:
        scale = 0.02 / math.sqrt(2 * self.layers)
        rows = {"sequence_parallel": sequence_parallel}
        return Block(name, self.width, self.heads, output_scale=scale, dropout=self.dropout, **rows)


# The default number of hidden channels is a multiple of it.
_HIDDEN_MULTIPLE = 32


@dataclass(frozen=True)
class LlamaArchitecture(DecoderArchitecture):
    """A decoder-only transformer of the kind that `Llama` builds.

    No method is collective.

    Parameters
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int
        Longest sequence.
    width : int
        Channels; a multiple of `heads`, unless `head_width` is given.
    layers : int
        Number of blocks.
    heads : int
        Heads of queries in each block.
    key_value_heads : int, optional
        Heads of keys and values, a divisor of `heads`; default: `heads`.
    hidden : int, optional
        Channels inside the gated network; default: 8/3 of the width, and then the next multiple of 32.
    head_width : int, optional
        Channels of a head, an even number; default: ``width / heads``.
    rotary : Rotary or mapping
        The rotary positions; a mapping has its fields.
    bias : bool
        Whether queries, keys and values have biases, as in Qwen2.
    head_norms : bool
        Whether the queries and keys of each head are normed, as in Qwen3.
    epsilon : float
        Of all norms.
    tied : bool
        Whether the output head uses the table of the token embedding.
    shards : int
        Number of slices by which the model is defined, a divisor of `key_value_heads`; see `Architecture`.
    dropout : float
        Rate of dropout of embeddings and of the results of attention and MLP, in training; see `nn.Dropout`.

    Raises
    ------
    TypeError
        If a size is no integer, or another value is of the wrong type.
    ValueError
        If a size is below 1, or sizes do not divide each other as required.
    """

    vocabulary_size: int
    context_length: int
    width: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    hidden: int | None = None
    head_width: int | None = None
    rotary: Rotary = Rotary()
    bias: bool = False
    head_norms: bool = False
    epsilon: float = 1e-5
    tied: bool = False
    shards: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes()
        rotary: Any = self.rotary
        if isinstance(rotary, Mapping):
            self._set(rotary=Rotary(**rotary))
        elif not isinstance(rotary, Rotary):
            raise TypeError(f"rotary={rotary!r} must be a Rotary")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads; give head_width, or every head needs as "
                "many channels"
            )
        multiples = -(-8 * self.width // (3 * _HIDDEN_MULTIPLE))
        self._set(
            key_value_heads=self._size("key_value_heads", self.heads),
            hidden=self._size("hidden", multiples * _HIDDEN_MULTIPLE),
            head_width=self._size("head_width", self.width // self.heads),
            bias=flag("bias", self.bias),
            head_norms=flag("head_norms", self.head_norms),
            epsilon=number("epsilon", self.epsilon, least=0),
        )
        if self.heads % self.query_groups:
            raise ValueError(
                f"{self.heads} heads of queries cannot share {self.key_value_heads} heads of keys and values evenly; "
                "choose a divisor of the heads of queries"
            )
        self.rotary.check(self._given(self.head_width))
        self.check_shards()

    def _size(self, name: str, default: int) -> int:
        value = getattr(self, name)
        return default if value is None else integer(name, value, least=1)

    @staticmethod
    def _given(size: int | None) -> int:
        """A size whose default is set."""
        assert size is not None
        return size

    @property
    def query_groups(self) -> int:
        return self._given(self.key_value_heads)

    def build_block(self, name: str, sequence_parallel: bool) -> TransformerBlock:
        rows = {"sequence_parallel": sequence_parallel}
        scale = 0.02 / math.sqrt(2 * self.layers)
        options = AttentionOptions(
            self.key_value_heads,
            self.head_width,
            bias=self.bias,
            output_bias=False,
            rotary=self.rotary,
            norm_epsilon=self.epsilon if self.head_norms else None,
        )
        return TransformerBlock(
            name,
            self._norm(f"{name}.attention_norm", sequence_parallel),
            CausalSelfAttention(f"{name}.attention", self.width, self.heads, options, output_scale=scale, **rows),
            self._norm(f"{name}.mlp_norm", sequence_parallel),
            GatedMLP(f"{name}.mlp", self.width, self._given(self.hidden), output_scale=scale, **rows),
            self.dropout,
        )

    def build_embeddings(self) -> EmbeddingUnit:
        return EmbeddingUnit(self.vocabulary_size, None, self.width, dropout=self.dropout)

    def build_head(self, sequence_parallel: bool) -> OutputHead:
        norm = self._norm("final_norm", sequence_parallel)
        return OutputHead(self.width, self.vocabulary_size, norm=norm, tied=self.tied)

    def _norm(self, name: str, sequence_parallel: bool) -> RMSNorm:
        return RMSNorm(name, self.width, epsilon=self.epsilon, sequence_parallel=sequence_parallel)
