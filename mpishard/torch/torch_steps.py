"""How the steps of an optimizer of PyTorch can be divided over ranks: by elements, or by whole tensors as of Adafactor.

In both ways the state is in arrays of the size of the parameters. That of an element-wise optimizer is, by itself; that
of a whole tensor, such as a row and a column, is packed end to end into the first elements of such arrays.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpishard.layout.run_state import brief

Shape = tuple[int, ...]

STEP_KEY = "step"  # the one number that PyTorch's element-wise optimizers keep in addition to arrays
REMEDY = "use an element-wise optimizer, such as torch.optim.RAdam"


class Division(NamedTuple):
    """The names of the arrays that an optimizer keeps, and of what is packed into them if it needs whole tensors."""

    slots: tuple[str, ...]
    packed: tuple[str, ...] | None = None


def arguments_of(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def division_of(kind: type, options: Mapping[str, Any], shapes: Sequence[Shape] | None = None) -> Division:
    """How the steps of an optimizer of `torch.optim` are divided; its arrays are in PyTorch's order.

    `options` are its arguments but for the parameters, and `shapes` those of the tensors of a module, if it is known.
    Raises TypeError or ValueError if what it does to a tensor depends on others.
    """
    given = tuple(sorted((name, value) for name, value in options.items() if value is not None))
    return _division_of(kind, given, None if shapes is None else tuple(sorted({_at_most(8, each) for each in shapes})))


@functools.cache
def _division_of(kind: type, options: tuple[tuple[str, Any], ...], shapes: tuple[Shape, ...] | None) -> Division:
    what, given = f"torch.optim.{kind.__name__}", dict(options)
    random = np.random.default_rng(0)
    start, slopes = random.standard_normal(6), random.standard_normal((3, 6))

    def after(elements: slice, *shape: int) -> tuple[Any, dict[str, Any]]:
        values = torch.from_numpy(start[elements].copy()).reshape(shape or -1)
        optimizer: Any = kind([values], **given)
        for slope in slopes:
            values.grad = torch.from_numpy(slope[elements].copy()).reshape(values.shape)
            optimizer.step()
        return values, dict(optimizer.state[values])

    try:
        whole, state = after(slice(None))
        parts = torch.cat([after(slice(number, number + 1))[0] for number in range(6)])
        matrix, of_matrix = after(slice(None), 2, 3)
    except Exception as error:
        text = brief(" ".join(str(error).split()))  # in one line
        remedy = REMEDY if kind.__name__ != "Muon" else "use mpishard.Muon, which has the same formula"
        raise TypeError(
            f"{what} cannot take a step of a flat array: {type(error).__name__}: {text}; {remedy}"
        ) from None
    slots = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.shape == whole.shape]
    left = {name for name, value in (*state.items(), *of_matrix.items()) if value is not None} - {STEP_KEY, *slots}
    if not left and all(torch.allclose(each, whole, rtol=1e-12, atol=0) for each in (parts, matrix.reshape(-1))):
        return Division(tuple(slots))
    try:
        return _by_tensor(kind, given, shapes)
    except Exception as error:
        text = brief(" ".join(str(error).split()))
        raise ValueError(f"{what} cannot be divided over ranks: {text}; {REMEDY}") from None


# Steps of whole tensors, one after the other.


def take_step(
    kind: type, arguments: Mapping[str, Any], values: Any, gradient: Any, slots: Sequence[Any], step: int
) -> None:
    """Take the step of an optimizer for one whole tensor in place; `slots` are flat, and have its packed state."""
    values.grad = gradient
    optimizer: Any = kind([values], **arguments)
    state = optimizer.state[values]
    if step > 1:
        layout = _layout_of(kind, arguments, values)
        number = layout.pop(STEP_KEY, None)
        if number is not None:
            state[STEP_KEY] = torch.full_like(number, step - 1) if isinstance(number, torch.Tensor) else step - 1
        left = torch.cat([values.new_zeros(0), *slots])
        for name, like in layout.items():
            state[name] = left[: like.numel()].reshape(like.shape).to(like.dtype)
            left = left[like.numel() :]
    optimizer.step()
    found = [each.reshape(-1).to(values.dtype) for each in _packed(state).values()]
    left = torch.cat([values.new_zeros(0), *found])
    if left.numel() > len(slots) * values.numel():
        raise ValueError(f"the state of a tensor of the shape {tuple(values.shape)} is more than {len(slots)} times it")
    for slot in slots:
        own = left[: slot.numel()]
        slot[: own.numel()], slot[own.numel() :] = own, 0
        left = left[slot.numel() :]


def _packed(state: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that an optimizer keeps of a tensor.  Raises ValueError if it keeps anything else."""
    found = {name: value for name, value in state.items() if name != STEP_KEY and value is not None}
    for name, value in found.items():
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            raise ValueError(f"it keeps {name!r} besides, which is no array of real numbers")
    return found


_layouts: dict[Any, dict[str, Any]] = {}


def _layout_of(kind: type, arguments: Mapping[str, Any], values: Any) -> dict[str, Any]:
    """Tensors without memory like those that an optimizer keeps of a tensor after a step, and its count of steps."""
    key = kind, values.shape, values.dtype, *map(bool, arguments.values())  # the rate of a schedule changes
    if key not in _layouts:
        probe = torch.ones_like(values)
        probe.grad = torch.ones_like(values)
        optimizer: Any = kind([probe], **arguments)
        optimizer.step()
        state = optimizer.state[probe]
        _layouts[key] = {name: torch.empty_like(each, device="meta") for name, each in _packed(state).items()}
        _layouts[key] |= {STEP_KEY: state[STEP_KEY]} if STEP_KEY in state else {}
    return dict(_layouts[key])


def _by_tensor(kind: type, given: Mapping[str, Any], shapes: Sequence[Shape] | None) -> Division:
    """The arrays for packed state.  Raises ValueError unless steps of single tensors are those of all together.

    They are tried for tensors that are as small as those of the module can be, and for larger ones, whose state must
    fit into equally many arrays.
    """
    known = [(8,), (8, 8), (4, 4, 4)] if shapes is None else [shape for shape in shapes if 0 not in shape]
    small = {_at_most(1 if shapes is None else 2, shape) for shape in known}
    grown = [(*_at_most(2, each[:i]), each[i], *_at_most(2, each[i + 1 :])) for each in known for i in range(len(each))]
    tried, random = [*small, *grown, *known], np.random.default_rng(0)
    start, *slopes = [[torch.from_numpy(random.standard_normal((*each,))) for each in tried] for _ in range(5)]

    together = [each.clone() for each in start]
    optimizer: Any = kind(together, **given)
    for slope in slopes:
        for values, gradient in zip(together, slope, strict=True):
            values.grad = gradient.clone()
        optimizer.step()
    packed = [_packed(optimizer.state[values]) for values in together]
    held = [sum(each.numel() for each in own.values()) for own in packed]
    sizes = [number / values.numel() for number, values in zip(held, together, strict=True)]
    count = math.ceil(max(sizes[: len(small)], default=0))
    if max(sizes, default=0) > count:
        raise ValueError(f"it keeps more than {count} times the elements of some matrices")
    for number, values in enumerate(start):
        slots = [torch.full((values.numel(),), math.nan, dtype=values.dtype) for _ in range(count)]
        for step, slope in enumerate(slopes, 1):
            take_step(kind, given, values, slope[number].clone(), slots, step)
        if not torch.allclose(values, together[number], rtol=1e-12, atol=0):
            raise ValueError("what it does to a tensor depends on others, or on more than the arrays that it keeps")
    names = tuple(sorted({name for own in packed for name in own}))
    return Division(tuple(f"state{number}" for number in range(1, count + 1)), names)


def _at_most(size: int, shape: Shape) -> Shape:
    return tuple(min(size, each) for each in shape)
