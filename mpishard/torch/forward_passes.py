"""Calls of a PyTorch module that a pipeline has cut, without gradients: all ranks get what the module returns.

Each rank runs the code of the module from its beginning to its end. It computes the layers of its own stages, and calls
those of others without values, so that what they leave behind has its shape there, as keys and values in a cache. Where
the calls come to a layer of another stage, all ranks get the values of the tensors that it takes, and at the end of
those that the module returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from mpishard.comm.agreement import OtherHasLeft, left_together
from mpishard.comm.axis import ModelParallelGroup
from mpishard.torch.memory import broadcast_values
from mpishard.torch.stage_passes import NEEDS_VALUES, Values, unfit_code, with_tensors
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.units import tensors_in


class ForwardPass:
    """One call of a module. `replica` are the tensor and pipeline ranks, which all make it."""

    def __init__(self, staged: StagedModule, replica: ModelParallelGroup) -> None:
        self._staged = staged
        self._replica = replica
        self._mesh = staged.mesh
        self._stage = 0  # that of the layer called last
        self._first = self._last = staged.layers[0].path  # the first called of this stage, and the last
        self._values = Values()
        self._is_over = False  # by an error, which all ranks of the replica raise

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns. Collective; an error of one rank is raised on all."""
        staged = self._staged
        problem: BaseException | None = None
        others = [layer for layer in staged.layers if not self._mesh.place.runs(layer.stage)]
        try:
            without = staged.buffers_without_values(others)
            with left_together(self._mesh.tensor), staged.following(self), without, staged.gradients_aside():
                output = staged.compute_whole(args, kwargs)
            self._share(output)
            values = {id(each): self._values.of(each) for each in tensors_in(output)}
            if any(value is None for value in values.values()):
                raise RuntimeError(
                    "the module returns a tensor that code outside of the layers has made of what several stages have: "
                    "give stages= a layer around that code"
                )
            return with_tensors(output, values)
        except OtherHasLeft:
            pass
        except NEEDS_VALUES as error:
            problem = unfit_code(repr(self._last), error)
        except (Exception, SystemExit) as error:
            if self._is_over:
                raise
            problem = error
        return self._exchanged((), problem, has_failed=True)  # raises

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a layer gives; without values where another rank has its stage.

        Collective where the layer is of another stage than the one before it.
        """
        staged, layer = self._staged, self._staged.layers[number]
        self._last = layer.path
        if layer.stage != self._stage:
            self._share((args, kwargs))
            self._stage, self._first = layer.stage, layer.path
        if self._mesh.place.runs(layer.stage):
            args, kwargs = self._values.given_to(layer.path, (args, kwargs), self._first)
            return staged.compute(number, args, kwargs)
        with nullcontext() if staged.cuts is None else staged.cuts.without_messages(), staged.mode:
            return staged.compute(number, args, kwargs)

    def _share(self, found: Any) -> None:
        """Get the values of tensors that some ranks lack from another: from the last stage that has them."""
        self._mesh.tensor.meet()
        axis, tensors = self._mesh.pipeline, list(tensors_in(found))
        lacks = [self._values.of(each) is None for each in tensors]
        by_rank = self._exchanged(tuple(lacks))[:: self._mesh.tensor.size]
        if len(counts := sorted(set(map(len, by_rank)))) > 1:
            raise RuntimeError(
                f"the code around {self._last!r} hands on {counts[0]} tensors on one rank and {counts[-1]} on another: "
                "it must not depend on whether a tensor has values"
            )
        for tensor, own, missing in zip(tensors, lacks, zip(*by_rank, strict=True), strict=True):
            if all(missing) or not any(missing):
                continue  # what all lack a layer that takes it refuses
            value = self._values.of(tensor)
            if own:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                self._values.note(tensor, value)
            broadcast_values(value, axis, axis.size - 1 - missing[::-1].index(False))

    def _exchanged(
        self, lacks: tuple[bool, ...], problem: BaseException | None = None, has_failed: bool = False
    ) -> list[tuple[bool, ...]]:
        """What each rank of the replica lacks, by rank; raises where one has failed. Collective over it."""
        found = self._replica.allgather_object((has_failed, lacks))
        if any(failed for failed, _ in found):
            self._is_over = True
            self._replica.raise_together(problem)
        return [each for _, each in found]
