"""The work of a step: how many sequences a data rank trains on, and in which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpishard.estimate.holdings import rows_of
from mpishard.estimate.layouts import Layout
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.options import PipelineOptions


@dataclass(frozen=True)
class Workload:
    """What a data rank computes in a step, and the memory of its numbers.

    No method is collective.

    Parameters
    ----------
    batch : int
        Sequences of each data rank in a step.
    length : int, optional
        Tokens of a sequence; default the context length.
    microbatches : int, optional
        Default as in `mpishard.nn.GPT`: 1 without a pipeline, else 4 per pipeline rank.
    itemsize : int
        Bytes of each element of parameters, gradients, activations and optimizer state: 4 for float32.
    slots : int
        Elements of optimizer state per parameter: 2 for Adam.
    minimum_parameter_group_size : int
        As in `mpishard.ShardingConfiguration`.
    device : bool
        Whether arrays are on devices, where attention is computed in larger blocks.
    half : bool
        Whether products round their operands to half precision there, as with `compute_dtype` of `mpishard.nn.GPT`.
        Attention and GELU are taken to be computed by mpishard, not by cuDNN and cuBLASLt, which need less memory.

    Raises
    ------
    ValueError
        If a number is too small, or `half` is given without `device` or with another `itemsize` than 4.
    """

    batch: int = 1
    length: int | None = None
    microbatches: int | None = None
    itemsize: int = 4
    slots: int = 2
    minimum_parameter_group_size: int = 1024
    device: bool = False
    half: bool = False

    def __post_init__(self) -> None:
        for what, least in (("batch", 0), ("microbatches", 1), ("slots", 0), ("itemsize", 1)):
            value = getattr(self, what)
            if value is not None and value < least:
                raise ValueError(f"{what}={value} must be at least {least}")
        if self.half and not (self.device and self.itemsize == 4):
            raise ValueError(
                f"half=True needs device=True and itemsize=4, got device={self.device} and itemsize={self.itemsize}"
            )

    def batch_shape(self, architecture: DecoderArchitecture, layout: Layout) -> BatchShape:
        """The batch of a data rank, with the defaults of this model and layout.

        Parameters
        ----------
        architecture : DecoderArchitecture
            Its context length is the default length.
        layout : Layout
            Its pipeline ranks decide the default number of micro-batches.

        Returns
        -------
        BatchShape
            With all numbers given.

        Raises
        ------
        ValueError
            If the model does not take sequences of this length.
        """
        length = architecture.context_length if self.length is None else self.length
        if not 1 <= length <= architecture.context_length:
            raise ValueError(f"sequences of {length} tokens, but the model takes 1 to {architecture.context_length}")
        microbatches = PipelineOptions(microbatches=self.microbatches).microbatches_on(layout.pipeline)
        return BatchShape(self.batch, length, microbatches)


@dataclass(frozen=True)
class BatchShape:
    """The batch of a data rank.

    Parameters
    ----------
    batch : int
        Sequences.
    length : int
        Tokens of each.
    microbatches : int
        Number of micro-batches into which it is cut.
    """

    batch: int
    length: int
    microbatches: int

    @cached_property
    def rows(self) -> list[int]:
        """Tokens of each micro-batch, in order."""
        return rows_of(self.batch, self.microbatches, self.length)
