"""How the steps of an optimizer of PyTorch can be divided over ranks: by elements, or by whole tensors as of Adafactor.

In both ways the state is in arrays of the size of the parameters. That of an element-wise optimizer is, by itself; that
of a whole tensor, such as a row and a column, is packed end to end into the first elements of such arrays. An
element-wise one may also count in its groups, if all ranks come to the same numbers whatever their gradients are.
"""

from __future__ import annotations

import copy
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
REMEDY = (
    "give the optimizer itself to as_distributed with zero=0, where each rank takes its step of all tensors, or use an "
    "element-wise one, such as torch.optim.RAdam"
)

# Sizes of the gradients of a probe: steps may depend on other tensors for some sizes alone, as by clipping.
_SCALES = (1.0, 1.0, 1e-3, 1e3, 1.0, 1e6, 1e-6, 1.0)
_GROUP, _ATTRIBUTE = "param_groups[0][{!r}]", "its attribute {!r}"  # where a value is, for messages
# Attributes in which PyTorch notes that a step was taken, and that kernels of ``fused=True`` can take the tensors.
NOTES = ("_opt_called", "_need_device_dtype_check_for_fused")
_NUMBER = (bool, int, float, str)  # what a group brings back from a saved state
_PLAIN = (*_NUMBER, list, tuple, type(None))
_layouts: dict[Any, dict[str, Any]] = {}  # what `_layout_of` has found


class Division(NamedTuple):
    """What an optimizer keeps: the names of its arrays, and of what is packed into them if it needs whole tensors."""

    slots: tuple[str, ...]
    packed: tuple[str, ...] | None = None
    counts: bool = True  # it keeps a count of steps, too
    numbers: tuple[str, ...] = ()  # of its groups, which its steps change, the same on all ranks


def arguments_of(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def check_step(kind: type) -> None:
    """Raise TypeError if the step of an optimizer needs an argument, as that of LBFGS does, or sparse gradients."""
    if issubclass(kind, torch.optim.SparseAdam):
        raise TypeError(f"{kind.__name__} needs sparse gradients, and those of ranks are dense; use torch.optim.Adam")
    known = inspect.signature(kind.step).parameters.values()  # type: ignore[attr-defined]
    needed = [each.name for each in known if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if more := needed[1:]:
        raise TypeError(
            f"the step of {kind.__name__} needs {more[0]!r}, to evaluate the function several times, and here it "
            "follows one backward pass of all ranks; use another optimizer"
        )


def division_of(kind: type, options: Mapping[str, Any], shapes: Sequence[Shape] | None = None) -> Division:
    """How the steps of an optimizer of `torch.optim` are divided; its arrays are in PyTorch's order.

    `options` are its arguments but for the parameters, and `shapes` those of the tensors of a module, if it is known.
    Raises TypeError or ValueError if what it does to a tensor depends on others.
    """
    check_step(kind)
    given = tuple(sorted((name, value) for name, value in options.items() if value is not None))
    return _division_of(kind, given, None if shapes is None else tuple(sorted({_at_most(8, each) for each in shapes})))


def _values_besides(optimizer: Any) -> dict[tuple[str, str], Any]:
    """What an optimizer of one group keeps in addition to its state: values of the group, and its own attributes."""
    (group,) = optimizer.param_groups
    found = {(_GROUP, name): each for name, each in group.items() if name != "params"}
    found |= {(_ATTRIBUTE, name): each for name, each in vars(optimizer).items() if name not in NOTES}
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    return {key: copy.copy(value) for key, value in plain.items() if isinstance(value, _PLAIN)}


@functools.cache
def _division_of(kind: type, options: tuple[tuple[str, Any], ...], shapes: tuple[Shape, ...] | None) -> Division:
    """`division_of`, by a probe: 13 elements take steps as three tensors of one optimizer, and each by itself.

    Where both come to the same, the optimizer is element-wise; else `_division_by_tensor` tries whole tensors.
    """
    what, given = f"torch.optim.{kind.__name__}", dict(options)
    if callable(getattr(kind, "eval", None)):  # as of those without a schedule
        raise ValueError(
            f"{what} cannot be divided over ranks: its eval() changes parameters between two steps, and each rank has "
            f"the state of its own elements; {REMEDY}"
        )
    random = np.random.default_rng(0)
    start, slopes = random.standard_normal(13), random.standard_normal((len(_SCALES), 13)) * np.c_[list(_SCALES)]

    def after(*parts: tuple[slice, tuple[int, ...]]) -> tuple[Any, list[dict[str, Any]], dict[tuple[str, str], Any]]:
        """Parameters, states and what else has changed, after steps of one optimizer for some parts of them."""
        tensors = [torch.from_numpy(start[part].copy()).reshape(shape) for part, shape in parts]
        optimizer: Any = kind(tensors, **given)
        before = _values_besides(optimizer)
        for slope in slopes:
            for values, (part, _) in zip(tensors, parts, strict=True):
                values.grad = torch.from_numpy(slope[part].copy()).reshape(values.shape)
            optimizer.step()
        now = _values_besides(optimizer)
        changed = {key: now.get(key) for key in {**before, **now} if before.get(key) != now.get(key)}
        flat = torch.cat([values.reshape(-1) for values in tensors])
        return flat, [dict(optimizer.state[values]) for values in tensors], changed

    try:
        together, states, changed = after((slice(6), (6,)), (slice(6, 12), (2, 3)), (slice(12, 13), (1,)))
        each_alone = [after((slice(number, number + 1), (1,))) for number in range(13)]
    except Exception as error:
        text = brief(" ".join(str(error).split()))  # in one line
        remedy = REMEDY if kind.__name__ != "Muon" else "use mpishard.Muon, which has the same formula"
        raise TypeError(
            f"{what} cannot take a step of a flat array: {type(error).__name__}: {text}; {remedy}"
        ) from None
    all_changed = [changed, *(own for *_, own in each_alone)]
    kept = [key for key, value in changed.items() if key[0] == _GROUP and isinstance(value, _NUMBER)]
    kept = [key for key in kept if all(own.get(key) == changed[key] for own in all_changed)]
    if mixed := {where.format(name) for own in all_changed for where, name in own if (where, name) not in kept}:
        raise ValueError(
            f"{what} cannot be divided over ranks: its step changes {', '.join(sorted(mixed))}, which depend on all "
            f"tensors, or are no numbers of its groups; {REMEDY}"
        )
    of_vector, of_matrix = states[:2]
    slots = [name for name, value in of_vector.items() if isinstance(value, torch.Tensor) and value.shape == (6,)]
    left = {name for name, value in (*of_vector.items(), *of_matrix.items()) if value is not None} - {STEP_KEY, *slots}
    alone = torch.cat([flat for flat, *_ in each_alone])
    if not left and torch.allclose(alone, together, rtol=1e-9, atol=1e-12):
        return Division(tuple(slots), counts=STEP_KEY in of_vector, numbers=tuple(name for _, name in kept))
    if kept:
        raise ValueError(
            f"{what} cannot be divided over ranks: what it does to an element depends on others, and its step changes "
            f"{', '.join(where.format(name) for where, name in kept)}; {REMEDY}"
        )
    try:
        return _division_by_tensor(kind, given, shapes)
    except Exception as error:
        text = brief(" ".join(str(error).split()))
        raise ValueError(f"{what} cannot be divided over ranks: {text}; {REMEDY}") from None


def _division_by_tensor(kind: type, given: Mapping[str, Any], shapes: Sequence[Shape] | None) -> Division:
    """The arrays for packed state.  Raises ValueError unless steps of single tensors are those of all together.

    They are tried for tensors that are as small as those of the module can be, and for larger ones, whose state must
    fit into equally many arrays.
    """
    known = [(8,), (8, 8), (4, 4, 4)] if shapes is None else [shape for shape in shapes if 0 not in shape]
    small = {_at_most(1 if shapes is None else 2, shape) for shape in known}
    grown = [(*_at_most(2, each[:i]), each[i], *_at_most(2, each[i + 1 :])) for each in known for i in range(len(each))]
    tried, random = [*small, *grown, *known], np.random.default_rng(0)
    start, *slopes = [
        [torch.as_tensor(scale * random.standard_normal((*each,))) for each in tried] for scale in (1.0, *_SCALES)
    ]

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
    names = tuple(sorted({name for own in packed for name in own}))
    division = Division(tuple(f"state{number}" for number in range(1, count + 1)), names)
    for number, values in enumerate(start):
        slots = [torch.full((values.numel(),), math.nan, dtype=values.dtype) for _ in range(count)]
        for step, slope in enumerate(slopes, 1):
            take_step(kind, given, division, values, slope[number].clone(), slots, step)
        if not torch.allclose(values, together[number], rtol=1e-12, atol=0):
            raise ValueError("what it does to a tensor depends on others, or on more than the arrays that it keeps")
    return division


def _at_most(size: int, shape: Shape) -> Shape:
    return tuple(min(size, each) for each in shape)


# Steps of tensors or of ranges of elements, one after the other, and what becomes of their state in slots.


def take_step(
    kind: type,
    arguments: Mapping[str, Any],
    division: Division,
    values: Any,
    gradient: Any,
    slots: Sequence[Any],
    step: int,
) -> None:
    """Take the step of an optimizer for one tensor in place; `slots` are flat, and have its state."""
    values.grad = gradient
    optimizer: Any = kind([values], **arguments)
    state = optimizer.state[values]
    if step > 1:
        state |= state_after(kind, arguments, division, values, slots, step - 1)
    (group,) = optimizer.param_groups
    before = dict(group)
    optimizer.step()
    if division.packed is not None:
        pack(_packed(state), values, slots)
        return
    if changed := [name for name, value in group.items() if value is not before.get(name)]:
        raise ValueError(
            f"step {step} of {kind.__name__} changed {changed[0]!r} of its param_groups, which a rule cannot keep; "
            f"{REMEDY}"
        )
    adopt(state, dict(zip(division.slots, slots, strict=True)))


def state_after(
    kind: type, arguments: Mapping[str, Any], division: Division, values: Any, slots: Sequence[Any], steps: int
) -> dict[str, Any]:
    """The state of an optimizer for one tensor after some steps, from its slots; arrays may be views into these."""
    if division.packed is not None:
        return unpack(kind, arguments, values, slots, steps)
    state: dict[str, Any] = dict(zip(division.slots, slots, strict=True))
    if division.counts:
        # PyTorch's fused kernels read it where the parameters are, all else on the host.
        on_device = arguments.get("fused") or arguments.get("capturable")
        state[STEP_KEY] = torch.tensor(float(steps), device=values.device if on_device else None)
    return state


def adopt(state: dict[str, Any], views: Mapping[str, Any]) -> None:
    """Put views of slots into the place of arrays that an element-wise optimizer has made, with their values."""
    for key, view in views.items():
        found = state.get(key)
        if found is view or not isinstance(found, torch.Tensor) or found.shape != view.shape:
            continue  # none without a momentum, where it was set to 0 between two steps
        view.copy_(found)
        state[key] = view


def unpack(kind: type, arguments: Mapping[str, Any], values: Any, slots: Sequence[Any], steps: int) -> dict[str, Any]:
    """The state of an optimizer for one tensor after some steps, from flat slots; arrays may be views into these."""
    state: dict[str, Any] = {}
    layout = _layout_of(kind, arguments, values)
    number = layout.pop(STEP_KEY, None)
    if number is not None:
        state[STEP_KEY] = torch.full_like(number, steps) if isinstance(number, torch.Tensor) else steps
    left = torch.cat([values.new_zeros(0), *slots])
    if not values.numel():  # whose slots have no room for numbers; any will do
        left = values.new_ones(sum(like.numel() for like in layout.values()))
    for name, like in layout.items():
        state[name] = left[: like.numel()].reshape(like.shape).to(like.dtype)
        left = left[like.numel() :]
    return state


def pack(arrays: Mapping[str, Any], values: Any, slots: Sequence[Any]) -> None:
    """Write the arrays that an optimizer keeps of one tensor into flat slots, end to end."""
    found = [each.reshape(-1).to(values.dtype) for name, each in arrays.items() if name != STEP_KEY]
    left = torch.cat([values.new_zeros(0), *(found if values.numel() else ())])
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
