"""Passes of micro-batches through the stages of a PyTorch module, as a pipeline schedule orders them.

Every stage calls the user's function, which calls the module. The layers of earlier stages return tensors without
values; the first layer of the stage gets in their place what the stage before has sent; and where the first layer of
the next stage is called, its arguments are sent, and the pass ends. What is sent, each stage knows without a message: a
`Survey`, a pass without values, has found the tensors that depend on layers, with their shapes.

Where a stage fails, its messages say so, and no other stage waits for it: `StageChunk`.

Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training" (2021), section 2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
)

from mpishard.backend import array as arrays
from mpishard.comm.agreement import DeferredError, OtherHasLeft, left_together
from mpishard.comm.axis import Axis
from mpishard.nn.workspace import Workspace
from mpishard.torch.memory import array_module, as_tensor, finish_stream
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.units import tensors_in
from mpishard.torch.weight_products import WeightProducts

Array = Any

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_ALIGNMENT = 16  # bytes, of each tensor in a message


class PassEnd(BaseException):
    """Ends a pass through the module, as where the layers of the next stage begin."""


def with_tensors(found: Any, others: Mapping[int, Any]) -> Any:
    """What a pass takes or returns, with other tensors in the places of some, which are given by their ids."""
    if isinstance(found, torch.Tensor):
        return others.get(id(found), found)
    if not any(id(each) in others for each in tensors_in(found)):
        return found
    if isinstance(found, Mapping):
        made: Any = copy.copy(found)
        for key, each in found.items():
            made[key] = with_tensors(each, others)
        return made
    if isinstance(found, (list, tuple, set)):
        items = [with_tensors(each, others) for each in found]
        return type(found)(*items) if hasattr(found, "_fields") else type(found)(items)
    if is_dataclass(found):
        made = copy.copy(found)
        for each in fields(found):
            if hasattr(found, each.name):  # a field may have no value
                value = with_tensors(getattr(found, each.name), others)
                (object.__setattr__ if made.__dataclass_params__.frozen else setattr)(made, each.name, value)
        return made
    return found


def _unknown_in(found: Any) -> list[Any]:
    """The tensors without values in what a layer takes, each once."""
    return list({id(each): each for each in tensors_in(found) if isinstance(each, FakeTensor)}.values())


class Values:
    """The values of tensors without them, which code outside of the layers must not change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, Any]] = {}  # by id: the tensor, its version, and what has its values

    def note(self, tensor: Any, value: Any) -> None:
        """Note what has the values of a tensor."""
        self._known[id(tensor)] = tensor, _version_of(tensor), value

    def of(self, tensor: Any) -> Any:
        """What has the values of a tensor, which may have them itself; None if they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        _, version, value = self._known.get(id(tensor), (None, -1, None))
        return value if version == _version_of(tensor) else None

    def given_to(self, path: str, given: Any, first: str) -> Any:
        """What a layer takes, with its values; `first`: the layer of its stage that has got those noted here."""
        values = {id(each): self.of(each) for each in _unknown_in(given)}
        if any(value is None for value in values.values()):
            raise RuntimeError(
                f"{path!r} gets a tensor that code outside of the layers has made of what other stages have, and "
                f"{first!r}, the first layer of this stage, does not get it: give stages= a layer around both, or one "
                "that gets all that follows from the layers before"
            )
        return with_tensors(given, values)


def _version_of(tensor: Any) -> int:
    """How often a tensor was changed in place; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def unfit_code(where: str, error: Exception) -> ValueError:
    """The error for code that needs the values of tensors that have none."""
    return ValueError(
        f"the code of the module or of {where} decides by values of tensors, which the other stages lack, as experts "
        f"and a mask made of activations do ({type(error).__name__}): for experts of transformers give its "
        "configuration experts_implementation='batched_mm', else make the mesh with pipeline=1"
    )


class Message:
    """Some tensors as one run of bytes, the first of which says whether the sender has failed."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._forms = [(tuple(each.shape), each.dtype) for each in tensors]
        self._starts: list[int] = []
        self.nbytes: int = _ALIGNMENT
        for each in tensors:
            self._starts.append(self.nbytes)
            self.nbytes += -(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT

    def pack(self, tensors: Sequence[Any], memory: Array) -> None:
        """Copy tensors into the bytes.  Raises RuntimeError if they are others than those that the ranks expect."""
        for each, form, place in zip(tensors, self._forms, self._places(memory), strict=True):
            if (tuple(each.shape), each.dtype) != form:
                raise RuntimeError(
                    f"a layer hands on {each.dtype} {tuple(each.shape)}, and the next stage waits for {form[1]} "
                    f"{form[0]}, which a pass without values has found: shapes must not depend on values, and numbers "
                    "on which they depend come with the batch, function(module, *batch, number)"
                )
            place.copy_(each.detach())
        self._mark(memory, has_failed=False)

    def pack_failure(self, memory: Array) -> None:
        """Write into the bytes that there are no tensors."""
        self._mark(memory, has_failed=True)

    @staticmethod
    def has_failed(memory: Array) -> bool:
        """Return True if the bytes have no tensors."""
        arrays.ready(memory)
        return bool(as_tensor(memory)[0])

    def unpack(self, memory: Array) -> list[Any]:
        """New tensors of the bytes."""
        arrays.ready(memory)  # PyTorch may continue in another stream of a GPU
        return [place.clone() for place in self._places(memory)]

    def _mark(self, memory: Array, has_failed: bool) -> None:
        whole = as_tensor(memory)
        whole[0] = has_failed
        finish_stream(whole)

    def _places(self, memory: Array) -> list[Any]:
        whole, found = as_tensor(memory), []
        for (shape, dtype), start in zip(self._forms, self._starts, strict=True):
            stop = start + prod(shape) * dtype.itemsize
            found.append(whole[start:stop].view(dtype).view(shape))
        return found


class Boundary:
    """What the first layer of a stage gets from the layers before: places among its tensors, and their messages."""

    def __init__(self, args: Any) -> None:
        unknown = _unknown_in(args)
        ids = [id(each) for each in tensors_in(args)]
        self._places = [ids.index(id(each)) for each in unknown]
        self.has_gradient = [each.is_floating_point() or each.is_complex() for each in unknown]
        self.activations = Message(unknown)
        self.gradients = Message(self.differentiable(unknown))

    def differentiable(self, tensors: Sequence[Any]) -> list[Any]:
        """Those of its tensors that have a gradient."""
        return [each for each, has in zip(tensors, self.has_gradient, strict=True) if has]

    def picked(self, args: Any) -> list[Any]:
        """Its tensors, of arguments that have values."""
        tensors = list(tensors_in(args))
        if self._places and max(self._places) >= len(tensors):
            raise RuntimeError(
                f"the first layer of a stage gets {len(tensors)} tensors, and more in a pass without values"
            )
        return [tensors[place] for place in self._places]


class Returned:
    """What a layer returns, without values; arguments that it returns are those of another call there."""

    def __init__(self, outputs: Any, args: Any) -> None:
        places = {id(each): place for place, each in enumerate(tensors_in(args))}
        others = {id(each): each for each in tensors_in(outputs)}
        known = {key: each for key, each in others.items() if key in places or isinstance(each, FakeTensor)}
        others |= {key: each.detach() for key, each in known.items()}
        self._outputs = with_tensors(outputs, others)
        # By the id of a tensor of the outputs the place of the argument that it is.
        self._places = {id(others[key]): places[key] for key in others if key in places}

    def in_call(self, args: Any) -> Any:
        """What it returns in a call with these arguments, in containers that the code around it may change."""
        tensors = list(tensors_in(args))
        others = {id(each): each for each in tensors_in(self._outputs)}
        return with_tensors(self._outputs, others | {key: tensors[place] for key, place in self._places.items()})


class Inputs:
    """A pass that ends where the module, or one of its layers, is called; `given` are the arguments."""

    given: Any = ()

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.given = args, kwargs
        raise PassEnd


class Survey:
    """A pass of all layers without values: in which order they are called, what they return, and the boundaries.

    After it `outputs` has what each layer returns, by its number, and `boundaries` those of the virtual stages from 1.
    """

    def __init__(self, staged: StagedModule) -> None:
        self._staged = staged
        self._last = -1
        self.outputs: dict[int, Returned] = {}
        self.boundaries: dict[int, Boundary] = {}

    def run(self, function: Callable[..., Any], arguments: Sequence[Any], trains: bool) -> None:
        """Make the pass.  Raises TypeError or ValueError if the module or the function is unfit."""
        staged, loss = self._staged, None
        silent = nullcontext() if staged.cuts is None else staged.cuts.without_messages()
        without = staged.buffers_without_values(staged.layers)
        around, aside = staged.buffers_around(), staged.gradients_aside()
        with staged.following(self), silent, without, around, aside, torch.set_grad_enabled(trains):
            try:
                loss = function(staged.module, *arguments)
            except NEEDS_VALUES as error:  # a loss may look at its value
                if len(self.boundaries) < staged.count - 1:
                    where = repr(staged.layers[self._last].path) if self._last >= 0 else "the beginning"
                    raise unfit_code(where, error) from error
            finally:
                torch.clear_autocast_cache()  # which has weights of this pass, without values
        if len(self.boundaries) < staged.count - 1:
            missing = staged.layers[staged.firsts[len(self.boundaries) + 1]].path
            raise ValueError(
                f"function(module, *batch) has not called {missing!r}, at which a stage begins: call the whole module "
                "once, and give stages= layers that its forward pass calls"
            )
        if loss is not None:
            check_loss(loss)

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        staged, layer = self._staged, self._staged.layers[number]
        if number in self.outputs:
            raise ValueError(
                f"{layer.path!r} is called twice in a pass, and pipeline stages work one after the other: call the "
                "module once in function(module, *batch), or make the mesh with pipeline=1"
            )
        begins = number == staged.firsts[layer.stage]
        if number < self._last or layer.stage > len(self.boundaries) + begins:
            is_late = number < self._last
            other = staged.layers[self._last if is_late else staged.firsts[len(self.boundaries) + 1]].path
            raise ValueError(
                f"{layer.path!r} is called {'after' if is_late else 'before'} {other!r}, another order than that in "
                "which the module has them: give stages= a dictionary whose keys are the names of the submodules and "
                "lists in the order of their calls"
            )
        self._last = number
        if layer.stage and begins:
            self.boundaries[layer.stage] = Boundary((args, kwargs))
        try:
            with staged.mode:
                outputs = staged.compute(number, args, kwargs)
        except Exception as error:
            if staged.cuts is not None:
                staged.cuts.explain(error)
            raise
        self.outputs[number] = Returned(outputs, (args, kwargs))
        return outputs


class StagePass:
    """The pass of a micro-batch through the layers of one virtual stage.

    `received` are the tensors of its boundary.  After `run` it has `ends`, the tensors for the next stage, or of the
    last stage its loss.  `products` has what `backward` leaves of the gradients of weights.
    """

    def __init__(
        self,
        staged: StagedModule,
        survey: Survey,
        stage: int,
        received: Sequence[Any],
        trains: bool,
        products: WeightProducts | None = None,
    ) -> None:
        self.products = products
        self._staged = staged
        self._survey = survey
        self._stage = stage
        self._trains = trains
        # The gradients of what was received, after the backward pass.
        self.gradients: list[Any] = []
        self._received = list(received)
        if trains and stage:
            boundary = survey.boundaries[stage]
            self.gradients = [torch.zeros_like(each) for each in boundary.differentiable(received)]
            anchor = torch.empty((), requires_grad=True)
            self._received = list(_Received.apply(anchor, self._received, boundary.has_gradient, self.gradients))
        self._values = Values()
        self.ends: list[Any] = []

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        staged = self._staged
        with staged.following(self), torch.set_grad_enabled(self._trains), self.products or nullcontext():
            try:
                loss = function(staged.module, *arguments)
            except PassEnd:
                return
        if self._stage < staged.count - 1:
            raise RuntimeError(f"this pass has not called {staged.layers[staged.firsts[self._stage + 1]].path!r}")
        if isinstance(loss, FakeTensor):
            raise RuntimeError(
                "the loss depends on layers of earlier stages in another way than through the arguments of "
                f"{staged.layers[staged.firsts[self._stage]].path!r}, the first layer of the last stage: cut elsewhere"
            )
        check_loss(loss)
        self.ends = [loss]

    def backward(self, gradients: Sequence[Any]) -> None:
        """The backward pass along the gradients of `ends`, some of which may need none."""
        pairs = [(end, each) for end, each in zip(self.ends, gradients, strict=True) if end.requires_grad]
        if pairs:
            with self._staged.following(self):  # activation checkpoints call layers again
                torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        self.ends.clear()

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        staged, layer = self._staged, self._staged.layers[number]
        given = args, kwargs
        if layer.stage < self._stage:
            return self._survey.outputs[number].in_call(given)
        if layer.stage > self._stage:
            self.ends = self._survey.boundaries[layer.stage].picked(self._with_values(given, layer.path))
            raise PassEnd
        if self._stage and number == staged.firsts[self._stage]:
            if self._trains and not torch.is_grad_enabled():
                raise RuntimeError(
                    f"{layer.path!r}, the first layer of a stage, is called without gradients in training, as by a "
                    "reentrant activation checkpoint: give use_reentrant=False"
                )
            for tensor, value in zip(_unknown_in(given), self._received, strict=True):
                self._values.note(tensor, value)
        args, kwargs = self._with_values(given, layer.path)
        return staged.compute(number, args, kwargs)

    def _with_values(self, given: Any, path: str) -> Any:
        return self._values.given_to(path, given, self._staged.layers[self._staged.firsts[self._stage]].path)


class _Received(torch.autograd.Function):
    """What a stage has received, as a function of nothing here: its backward pass keeps the gradients to be sent."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, received: list[Any], has_gradient: list[bool], gradients: list[Any]) -> Any:
        ctx.has_gradient, ctx.gradients = has_gradient, gradients
        ctx.mark_non_differentiable(*(each for each, has in zip(received, has_gradient, strict=True) if not has))
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gradients[:] = [each for each, has in zip(gradients, ctx.has_gradient, strict=True) if has]
        return None, None, None, None


def check_loss(loss: Any) -> None:
    """Raise TypeError or ValueError unless this is one number that autograd knows."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"function(module, *batch) must return the loss, a tensor, got a {type(loss).__name__}")
    if loss.dim():
        raise ValueError(
            f"function(module, *batch) must return the loss as one number, of shape (), got shape {tuple(loss.shape)}; "
            "take its mean, or with reduction='sum' its sum"
        )


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, as a pipeline hands it to its stages."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    factor: float  # of its loss in the loss of the batch
    loss_scale: float
    survey: Survey
    trains: bool
    has_weights_apart: bool = False  # the backward pass leaves gradients of weights to another


class StageErrors(DeferredError):
    """The first error of this rank in its stages, of which its tensor ranks learn at once, and all at the end."""

    def __init__(self, world: Axis, tensor: Axis) -> None:
        super().__init__(world, transactional=False)
        self._tensor = tensor
        self._other_has_failed = False

    def forget(self) -> None:
        """Begin passes: a death may have left an error of others. Not collective."""
        self.error, self._other_has_failed = None, False

    @property
    def has_failed(self) -> bool:
        """Whether this rank has, or another tensor rank of its stages."""
        return self.error is not None or self._other_has_failed

    @contextmanager
    def capture(self, alone: bool = True) -> Iterator[None]:
        """Keep an error of the block, a pass, which all tensor ranks leave then. Collective over the tensor axis."""
        with super().capture(alone):
            try:
                with left_together(self._tensor):
                    yield
            except OtherHasLeft:
                self._other_has_failed = True


class StageChunk:
    """One virtual stage, for `mpishard.pipeline.runtime`, whose arrays are bytes here.

    An error on this rank goes to `errors`, which all stages of a rank share. From then on it computes nothing, as the
    other tensor ranks, and sends messages without tensors, which the other stages hand on, so that all come to the end
    of the schedule.
    """

    def __init__(self, staged: StagedModule, virtual_stage: int, device: Any, errors: StageErrors) -> None:
        self.virtual_stage = virtual_stage
        self._staged = staged
        self._errors = errors
        self._is_last = virtual_stage == staged.count - 1
        self._module = array_module(device)

    def input_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        return (batch.survey.boundaries[self.virtual_stage].activations.nbytes,)

    def output_shape(self, batch: MicroBatch) -> tuple[int, ...]:
        return (batch.survey.boundaries[self.virtual_stage + 1].gradients.nbytes,)

    def workspace(self) -> Workspace:
        return Workspace(np.uint8, self._module)

    def forward(self, x: Array | None, work: Workspace, batch: MicroBatch) -> Any:
        survey, stage = batch.survey, self.virtual_stage
        message = None if self._is_last else survey.boundaries[stage + 1].activations
        output = 0.0 if message is None else work.save("sent", message.nbytes)
        if not self._has_failed(x):
            with self._errors.capture():
                received = [] if x is None else survey.boundaries[stage].activations.unpack(x)
                products = WeightProducts() if batch.has_weights_apart else None
                passed = StagePass(self._staged, survey, stage, received, batch.trains, products)
                passed.run(batch.function, batch.arguments)
                if message is None:
                    output = passed.ends[0].detach() * batch.factor
                else:
                    message.pack(passed.ends, output)
                if batch.trains:
                    work.kept["pass"] = passed
        if message is not None and self._has_failed(x):
            message.pack_failure(output)
        return output

    infer = forward

    def backward(self, dy: Array | None, work: Workspace, batch: MicroBatch) -> Array | None:
        survey, stage = batch.survey, self.virtual_stage
        message = survey.boundaries[stage].gradients if stage else None
        dx = None if message is None else work.save("gradients", message.nbytes)
        passed: StagePass | None = work.kept.pop("pass", None)
        if passed is not None and not self._has_failed(dy):
            with self._errors.capture():
                if dy is None:
                    gradients = [torch.full_like(passed.ends[0], batch.factor * batch.loss_scale)]
                else:
                    after = survey.boundaries[stage + 1]
                    passed.ends = after.differentiable(passed.ends)
                    gradients = after.gradients.unpack(dy)
                passed.backward(gradients)
                if message is not None:
                    message.pack(passed.gradients, dx)
        if message is not None and (passed is None or self._has_failed(dy)):
            message.pack_failure(dx)
        return dx

    def _has_failed(self, message: Array | None) -> bool:
        """Return True if this rank, or the stage that has sent a message, has failed."""
        return self._errors.has_failed or (message is not None and Message.has_failed(message))

    def input_gradient(self, dy: Array | None, work: Workspace, batch: MicroBatch) -> Array | None:
        passed: StagePass | None = work.kept.get("pass")
        work.kept["products"] = None if passed is None else passed.products
        return self.backward(dy, work, batch)

    def weight_gradient(self, work: Workspace) -> None:
        products: WeightProducts | None = work.kept.pop("products")
        if products is not None and not self._errors.has_failed:
            with self._errors.capture():
                products.add()
