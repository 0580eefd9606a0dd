"""The units of one virtual pipeline stage, run forward and backward one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpishard.nn.activations import ActivationCheckpointing, BlockUnit, KeepAll, Spot
from mpishard.nn.block import TransformerBlock
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.units import Batch, Unit
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

Array = Any


class Chunk:
    """One virtual stage, for `mpishard.pipeline.runtime`.

    All methods that compute are collective over the tensor axis, and under ZeRO-3 over the data axis.  Each unit is
    then gathered once in each direction, while the previous one computes.

    Parameters
    ----------
    virtual_stage : int
        Its number.
    units : sequence of EmbeddingUnit, TransformerBlock or OutputHead
        In order, bound to `parameters`.
    parameters : FlatParameters
        The tensors of this rank.
    tensor : TensorParallel
        The axis over which rows and columns are split.
    memory : Workspace
        The workspace whose scratch memory is used.
    keeping : KeepAll or ActivationCheckpointing
        Which activations of blocks are kept.

    Attributes
    ----------
    workspaces : list of Workspace
        One for each micro-batch that was in flight at the same time.
    """

    def __init__(
        self,
        virtual_stage: int,
        units: Sequence[Unit],
        parameters: FlatParameters,
        tensor: TensorParallel,
        memory: Workspace,
        keeping: KeepAll | ActivationCheckpointing,
    ) -> None:
        self.virtual_stage = virtual_stage
        self.units: tuple[Unit, ...] = tuple(units)
        self.workspaces: list[Workspace] = []
        self._parameters = parameters
        self._tensor = tensor
        self._memory = memory
        self._names = {unit.name: [spec.name for spec in unit.specs()] for unit in units}
        kinds = [False, *(isinstance(unit, TransformerBlock) for unit in units), False]
        spots = [Spot(number, kinds[number], kinds[number + 2]) for number in range(len(units))]
        self._called: list[Any] = [
            BlockUnit(unit, keeping, spot) if isinstance(unit, TransformerBlock) else unit
            for unit, spot in zip(units, spots, strict=True)
        ]
        self._width = units[0].width

    def input_shape(self, batch: Batch) -> tuple[int, int]:
        """Shape of the input from the previous stage.

        Parameters
        ----------
        batch : Batch
            A micro-batch.

        Returns
        -------
        (int, int)
            The rows of this tensor rank, and the width.
        """
        return self._tensor.rows(batch.rows), self._width

    def output_shape(self, batch: Batch) -> tuple[int, int]:
        """Shape of the output to the next stage.

        Parameters
        ----------
        batch : Batch
            A micro-batch.

        Returns
        -------
        (int, int)
            The rows of this tensor rank, and the width.
        """
        return self._tensor.rows(batch.rows), self._width

    def workspace(self) -> Workspace:
        """Make memory for one more micro-batch in flight.

        Returns
        -------
        Workspace
            Added to `workspaces`.
        """
        work = Workspace(self._memory.dtype, self._memory.module, self._memory)
        self.workspaces.append(work)
        return work

    @property
    def saved_bytes(self) -> int:
        """Bytes held for micro-batches, without scratch."""
        return sum(work.saved_bytes for work in self.workspaces)

    def forward(self, x: Array | None, work: Workspace, batch: Batch) -> Any:
        """Output of the stage, or the summed loss of the batch.

        Parameters
        ----------
        x : array, shape (n, width), or None
            Output of the previous stage; None for the first.  Kept until the backward pass.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Tokens for the first stage, targets for the last.

        Returns
        -------
        array of shape (n, width), or float
            The last stage returns the loss in nats, summed over its tokens; on a device a `PendingNumber`.
        """
        work.rows, work.draws, work.deferred, work.cache = batch.rows, batch.draws, None, None
        for unit in self._gathered(self._called):
            x = unit.forward(x, work, batch)
        return x

    def infer(self, x: Array | None, work: Workspace, batch: Batch) -> Array:
        """Like `forward`, but the last stage returns the logits of the whole vocabulary.

        Parameters
        ----------
        x : array, shape (n, width), or None
            Output of the previous stage; None for the first.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Tokens for the first stage.

        Returns
        -------
        array
            Of shape (n, width); of the last stage (rows, vocabulary_size), a new array.
        """
        work.rows, work.draws, work.deferred, work.cache = batch.rows, batch.draws, None, batch.cache
        for unit in self._gathered(self._called):
            x = unit.predict(x, work, batch)
        return x

    def backward(self, dy: Array | None, work: Workspace, batch: Batch) -> Array | None:
        """Gradient of the stage's input; writes all gradients and marks them ready.

        Parameters
        ----------
        dy : array, shape (n, width), or None
            Gradient of the loss by the output, which is overwritten; None for the last stage.
        work : Workspace
            That of the forward pass.
        batch : Batch
            That of the forward pass.

        Returns
        -------
        array of shape (n, width), or None
            None of the first stage.
        """
        for unit in self._gathered(self._called[::-1]):
            dy = unit.backward(dy, work, batch)
        return dy

    def input_gradient(self, dy: Array | None, work: Workspace, batch: Batch) -> Array | None:
        """Like `backward`, but defer the products for weight gradients, and mark no gradient ready.

        Parameters
        ----------
        dy : array, shape (n, width), or None
            Gradient of the loss by the output, which is overwritten; None for the last stage.
        work : Workspace
            That of the forward pass; it keeps the deferred work.
        batch : Batch
            That of the forward pass.

        Returns
        -------
        array of shape (n, width), or None
            None of the first stage.
        """
        work.deferred = []
        return self.backward(dy, work, batch)

    def weight_gradient(self, work: Workspace) -> None:
        """Do the deferred work of `input_gradient`.

        Parameters
        ----------
        work : Workspace
            That of the micro-batch.
        """
        deferred, work.deferred = work.deferred, None
        assert deferred is not None
        for each in deferred:
            each()

    def _gathered(self, units: Sequence[Any]) -> Iterator[Any]:
        """Yield the units, each while its parameters are gathered."""
        for index, unit in enumerate(units):
            names = self._names[unit.name]
            self._parameters.use(names)
            if index + 1 < len(units):
                self._parameters.prefetch(self._names[units[index + 1].name])
            yield unit
            self._parameters.release(names)
