"""Losses and gradients of a batch in micro-batches, of a module that a rank has whole or that a pipeline has cut."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from mpishard.arguments import integer
from mpishard.comm.agreement import agree_on_settings, text_of
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.errors import CaughtError, raised_on_all
from mpishard.layout.boxes import split
from mpishard.nn.options import microbatches_on
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import NoSync
from mpishard.pipeline.runtime import Pipeline
from mpishard.pipeline.schedule import make_schedule
from mpishard.pipeline.schedule.generators import warn_if_bubbly
from mpishard.torch.buffers import as_fact
from mpishard.torch.forward_passes import ForwardPass
from mpishard.torch.plan_checks import is_plain
from mpishard.torch.stage_passes import (
    Inputs,
    MicroBatch,
    PassEnd,
    StageChunk,
    StageErrors,
    Survey,
    check_loss,
    with_tensors,
)
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.units import check_not_summoned, tensors_in

_MOST_SURVEYS = 256  # that are kept, of micro-batches of different shapes
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PipelineSettings:
    """How a pipeline works: see `mpishard.torch.as_distributed`."""

    name: str
    chunks: int
    microbatches: int
    has_weights_apart: bool  # it computes their gradients in passes of their own

    @classmethod
    def of(cls, name: Any, chunks: Any, microbatches: Any, ranks: int) -> PipelineSettings:
        """The schedule for a number of pipeline ranks.  Raises TypeError or ValueError if there is none."""
        if microbatches is not None:
            integer("microbatches", microbatches, least=1)
        count = microbatches_on(ranks, microbatches)
        made = make_schedule(name, ranks, count, chunks)
        return cls(name, chunks, count, any(action.kind == "W" for action in made.programs[0]))

    def warn(self, ranks: int) -> None:
        """Warn if there are fewer micro-batches than stages. One rank is enough to call it."""
        warn_if_bubbly(make_schedule(self.name, ranks, self.microbatches, self.chunks))


def most_of_all(ranks: Axis, batch: tuple[Any, ...], most: int) -> int:
    """The most micro-batches, `most` at most, into which each rank can cut its batch. Collective."""
    samples = min((len(each) for each in tensors_in(batch) if each.dim()), default=most)
    fewest = np.array([max(1, min(most, samples))])
    return int(ranks.all_reduce(fewest, op="min", label="control")[0])


def micro_batches_of(batch: tuple[Any, ...], most: int, reduction: str) -> list[tuple[tuple[Any, ...], float]]:
    """A batch cut along the first dimension of its tensors: micro-batches, and the factors of their losses.

    Raises ValueError if its tensors have no or different numbers of samples.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum', what the loss is of its samples")
    tensors = [each for each in tensors_in(batch) if each.dim()]
    sizes = sorted({len(each) for each in tensors})
    if len(sizes) != 1 or not sizes[0]:
        kinds = f"but {', '.join(type(each).__name__ for each in batch)}" if batch else "since nothing was given"
        given = f"tensors of {' and '.join(map(str, sizes))} samples" if sizes else f"no tensor with samples, {kinds}"
        raise ValueError(
            f"the batch has {given}, and is cut along the first dimension: give tensors of equally many samples, one "
            "at least, and what has no samples in the function"
        )
    (samples,) = sizes
    found = []
    for start, stop in pairwise(split(samples, min(most, samples))):
        parts = {id(each): each[start:stop] for each in tensors}
        factor = (stop - start) / samples if reduction == "mean" else 1.0
        found.append((with_tensors(batch, parts), factor))
    return found


def _code_of(function: Any) -> Any:
    """What tells the passes of a function from those of others, also of one that is made anew in each step."""
    if isinstance(function, partial):
        return _code_of(function.func), text_of(function.args), text_of(function.keywords)
    return getattr(function, "__code__", type(function))


class PassTaker(Protocol):
    """What passes of a pipeline need of a `mpishard.torch.ModuleOptimizer`, or of the function of a problem."""

    def scale(self, loss: Any) -> Any: ...

    def zero_grad(self) -> None: ...


class WholeTaker(PassTaker, Protocol):
    """What passes of a whole module need."""

    @property
    def module(self) -> Any: ...

    def no_sync(self) -> NoSync: ...


class ModulePasses:
    """The passes of a module that this rank has whole, or its part of each layer.

    `trains_with` and `evaluates_with` are the ranks that make each pass together, with gradients and without: all cut
    a batch into equally many micro-batches then.  None: each rank cuts its own.
    """

    def __init__(
        self, settings: PipelineSettings, trains_with: Axis | None = None, evaluates_with: Axis | None = None
    ) -> None:
        self.settings = settings
        self._trains_with = trains_with
        self._evaluates_with = evaluates_with

    def train(self, optimizer: WholeTaker, function: Any, batch: tuple[Any, ...], reduction: str) -> float:
        """The loss of a batch; adds its gradient."""
        total = 0.0
        before: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.settings.microbatches > 1:
            before = optimizer.no_sync()  # raises where no pass may come before the last one
        micro = self._cut(batch, reduction, self._trains_with)
        for number, (arguments, factor) in enumerate(micro, 1):
            with contextlib.nullcontext() if number == len(micro) else before:
                loss = function(optimizer.module, *arguments)
                check_loss(loss)
                optimizer.scale(loss * factor).backward()
            total += float(loss.detach()) * factor
        return total

    def evaluate(self, optimizer: WholeTaker, function: Any, batch: tuple[Any, ...], reduction: str) -> float:
        """The loss of a batch."""
        total = 0.0
        with torch.no_grad():
            for arguments, factor in self._cut(batch, reduction, self._evaluates_with):
                loss = function(optimizer.module, *arguments)
                check_loss(loss)
                total += float(loss) * factor
        return total

    def _cut(self, batch: tuple[Any, ...], reduction: str, ranks: Axis | None) -> list[tuple[tuple[Any, ...], float]]:
        most = self.settings.microbatches
        if ranks is not None and most > 1:
            most = most_of_all(ranks, batch, most)
        return micro_batches_of(batch, most, reduction)


class PipelinedPasses(ModulePasses):
    """The passes of a module that a pipeline has cut. Methods are collective over the mesh.

    `takes_numbers`: batches are numbers of samples, which the function reads; these may be of any length.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        staged: StagedModule,
        parameters: FlatParameters,
        device: Any,
        takes_numbers: bool = False,
    ) -> None:
        super().__init__(settings)
        mesh, axis = staged.mesh, staged.mesh.pipeline
        self._staged = staged
        self._errors = StageErrors(mesh.world, mesh.tensor)
        stages = range(axis.rank, staged.count, axis.size)
        chunks = [StageChunk(staged, stage, device, self._errors) for stage in stages]
        self._pipeline = Pipeline(axis, chunks, settings.name, parameters)
        self._surveys: dict[Any, Survey] = {}
        self._takes_numbers = takes_numbers
        self._replica = ModelParallelGroup(mesh.tensor, axis, mesh.rank)
        self._checks_plan = staged.cuts is not None and staged.cuts.check_is_due  # in the next pass
        staged.forward = self.forward

    def train(self, optimizer: PassTaker, function: Any, batch: tuple[Any, ...], reduction: str) -> float:
        loss = self._pipeline.train(self._prepared(optimizer, function, batch, reduction, True))
        try:
            self._errors.raise_on_all()
        except (Exception, SystemExit):
            # Ranks that have failed have begun no sums, and others have.
            self._pipeline.parameters.gradients.end_pass()
            optimizer.zero_grad()
            if self._staged.cuts is not None:
                self._staged.cuts.forget_gradients()
            raise
        return loss

    def evaluate(self, optimizer: PassTaker, function: Any, batch: tuple[Any, ...], reduction: str) -> float:
        loss = self._pipeline.evaluate(self._prepared(optimizer, function, batch, reduction, False))
        self._errors.raise_on_all()
        return loss

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module returns without gradients. Collective over the ranks of a data rank."""
        self._compare(tensors_in((args, kwargs)), "inputs of the module")
        if self._checks_plan and is_plain((args, kwargs)):
            with raised_on_all(self._replica):
                self._check_plan(lambda module: module(*args, **kwargs), ())
            self._checks_plan = False
        return ForwardPass(self._staged, self._replica).run(args, kwargs)

    def _compare(self, tensors: Iterable[Any], what: str, problem: Exception | None = None) -> None:
        """Raise on all ranks of a data rank if one has a problem, or they have different tensors."""
        agree_on_settings(
            self._replica,
            {
                f"tensor {number} of the {what}": f"{tuple(each.shape)} {text_of(as_fact(each))}"
                for number, each in enumerate(tensors)
            },
            problem,
            what=what,
            remedy="tensor and pipeline ranks of a data rank need the same: DistributedSampler(data, mesh.data.size, "
            "mesh.data.rank), and the same seed",
        )

    def _prepared(
        self, optimizer: PassTaker, function: Any, batch: tuple[Any, ...], reduction: str, trains: bool
    ) -> list[MicroBatch]:
        """The micro-batches, after all ranks have found that they can pass the stages."""
        check_not_summoned(self._staged, "a pass of the stages", would="compute the whole module")
        mesh, found, gradients = self._staged.mesh, [], self._pipeline.parameters.gradients
        self._errors.forget()
        most = self.settings.microbatches
        if gradients.on_demand:  # zero=2 sums one by one: all data ranks have equally many
            most = most_of_all(mesh.world, batch, most)
        with raised_on_all(mesh.world):
            with CaughtError() as caught:
                if not callable(function):
                    raise TypeError(f"give function(module, *batch), which returns the loss, got {function!r}")
                scale = optimizer.scale(1.0) if trains else 1.0
                for arguments, factor in micro_batches_of(batch, most, reduction):
                    survey = self._survey(function, arguments, trains)
                    apart = trains and self.settings.has_weights_apart
                    found.append(MicroBatch(function, arguments, factor, scale, survey, trains, apart))
            self._compare(tensors_in(batch), "samples", caught.error)
        if self._checks_plan:
            with raised_on_all(mesh.world):
                self._check_plan(function, found[0].arguments)
            self._checks_plan = False
        return found

    def _check_plan(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Compare a pass of the layers that tensor ranks divide with one of the whole module."""

        def compare(module: Any, args: Any, kwargs: Any) -> None:
            assert self._staged.cuts is not None
            self._staged.cuts.check_pass(contextlib.nullcontext, module, args, kwargs)
            raise PassEnd

        module = self._staged.module
        handle = module.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)
        try:
            with self._staged.with_all_stages(False):
                function(module, *arguments)
        except PassEnd:
            pass
        finally:
            handle.remove()

    def _survey(self, function: Callable[..., Any], arguments: Sequence[Any], trains: bool) -> Survey:
        """What the stages hand on of a micro-batch, known from one of these shapes."""
        tensors = list(tensors_in(arguments))
        inputs = tensors if not self._takes_numbers else list(tensors_in(self._inputs_of(function, arguments)))
        kinds = {each.device.type for each in inputs}
        key = (
            _code_of(function),
            tuple((tuple(each.shape), each.dtype) for each in inputs),
            text_of(with_tensors(arguments, dict.fromkeys(map(id, tensors)))),
            trains,
            self._staged.module.training,
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
        )
        known = self._surveys.get(key)
        if known is None:
            if len(self._surveys) == _MOST_SURVEYS:
                self._surveys.clear()
            known = Survey(self._staged)
            known.run(function, arguments, trains)
            self._surveys[key] = known
        return known

    def _inputs_of(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """What a function gives the module."""
        module, inputs = self._staged.module, Inputs()
        handle = module.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.call(0, args, kwargs), prepend=True, with_kwargs=True
        )
        try:
            with self._staged.following(inputs):
                function(module, *arguments)
        except PassEnd:
            pass
        finally:
            handle.remove()
        return inputs.given
