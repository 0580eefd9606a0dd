"""A test that an optimizer of PyTorch treats each element by itself, and the names of the arrays that it keeps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpishard.layout.run_state import brief

STEP = "step"  # the one number that PyTorch's element-wise optimizers keep in addition to arrays
REMEDY = "use an element-wise optimizer, such as torch.optim.RAdam"


def arguments_of(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind).parameters


def slots_of(kind: type, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the arrays that an optimizer of `torch.optim` keeps, such as ``exp_avg``, in PyTorch's order.

    `options` are its arguments but for the parameters. Raises TypeError or ValueError unless it treats each element by
    itself.
    """
    return _slots_of(kind, tuple(sorted((name, value) for name, value in options.items() if value is not None)))


@functools.cache
def _slots_of(kind: type, options: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    what, given = f"torch.optim.{kind.__name__}", dict(options)
    random = np.random.default_rng(0)
    start, slopes = random.standard_normal(3), random.standard_normal((3, 3))

    def after(elements: slice) -> tuple[Any, dict[str, Any]]:
        values = torch.from_numpy(start[elements].copy())
        optimizer: Any = kind([values], **given)
        for slope in slopes:
            values.grad = torch.from_numpy(slope[elements].copy())
            optimizer.step()
        return values, dict(optimizer.state[values])

    try:
        whole, state = after(slice(None))
        parts = [after(slice(number, number + 1)) for number in range(3)]
    except Exception as error:
        text = brief(" ".join(str(error).split()))  # in one line
        remedy = REMEDY if kind.__name__ != "Muon" else "use mpishard.Muon, which has the same formula"
        raise TypeError(
            f"{what} cannot take a step of a flat array: {type(error).__name__}: {text}; {remedy}"
        ) from None
    slots, other = [], []
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == whole.shape:
            slots.append(name)
        elif name != STEP and value is not None:
            other.append(name)
    if other or not torch.allclose(whole, torch.cat([part for part, _ in parts]), rtol=1e-12, atol=0):
        why = f"it keeps {other[0]!r} besides" if other else "what it does to an element depends on others"
        raise ValueError(f"{what} cannot be divided over ranks: {why}; {REMEDY}")
    return tuple(slots)
