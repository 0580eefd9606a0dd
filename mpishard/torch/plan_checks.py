"""The checks that a plan fits the code of a module: a pass beside one of the whole module, and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mpishard.arguments import listed
from mpishard.comm.axis import Axis
from mpishard.torch.memory import as_reals
from mpishard.torch.units import tensors_in

# The pass of a module whose layers are cut, beside that of the whole module.

_SAMPLED = 4096  # elements of a tensor that are compared
_COMPARED = 0.9  # of these: a token that is routed to another expert by rounding alone changes fewer
# Of the root mean square of the elements: what rounding may change, and what a wrong plan exceeds.
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-3}
_ALLOWED_OF_HALF = 0.2  # of 32 layers of Olmo2 in bfloat16 it is 0.08, of a wrong plan over 1
_PLAIN = (torch.Tensor, bool, int, float, complex, str, torch.dtype, torch.device)


def is_plain(given: Any) -> bool:
    """Whether the arguments of a pass can be given twice: tensors, constants, and lists, tuples and dicts of them.

    A cache that the pass extends cannot.
    """
    if type(given) in (list, tuple):
        return all(map(is_plain, given))
    if type(given) is dict:
        return all(map(is_plain, given.values()))
    return given is None or isinstance(given, _PLAIN)


def copied(given: Any) -> Any:
    """A copy of plain arguments, which a pass may change."""
    if isinstance(given, torch.Tensor):
        return given.detach().clone()
    if isinstance(given, dict):
        return {key: copied(value) for key, value in given.items()}
    return type(given)(map(copied, given)) if isinstance(given, list | tuple) else given


def check_numbers(name: str, numbers: Any, count: int) -> None:
    """Raise IndexError unless all are from 0 to below `count`: the rank alone that has a wrong one would fail later."""
    if numbers.numel() and not (0 <= int(numbers.min()) and int(numbers.max()) < count):
        raise IndexError(
            f"{name} has numbers from {int(numbers.min())} to {int(numbers.max())}, and the model has {count}, "
            "counted from 0"
        )


@dataclass(frozen=True)
class _Sample:
    shape: tuple[int, ...]
    dtype: Any
    values: Any


@dataclass
class PassRecord:
    """Samples of what the layers of a module got in a pass, and of what it returned."""

    _samples: dict[str, _Sample] = field(default_factory=dict)

    def note(self, what: str, x: Any) -> None:
        """Note a tensor, the first by its name."""
        if what not in self._samples and x.is_floating_point() and x.numel():
            places = torch.randint(x.numel(), (min(x.numel(), _SAMPLED),), generator=torch.Generator().manual_seed(0))
            values = x.detach().reshape(-1)[places.to(x.device)].double()
            self._samples[what] = _Sample(tuple(x.shape), x.dtype, values)

    def note_output(self, output: Any) -> None:
        """Note the tensors that the module has returned."""
        for number, x in enumerate(tensors_in(output)):
            self.note(f"tensor {number} of its output", x)

    def check(self, whole: PassRecord) -> None:
        """Raise ValueError where this pass differs from that of the whole module, by the first name in that."""
        dtypes = {each.dtype for each in (*self._samples.values(), *whole._samples.values())}
        dtypes |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        allowed = max((_ALLOWED.get(dtype, _ALLOWED_OF_HALF) for dtype in dtypes), default=0.0)
        for what, theirs in whole._samples.items():
            own = self._samples.get(what)
            if own is None:
                continue
            if own.shape != theirs.shape:
                raise ValueError(f"{what} has the shape {own.shape}, and {theirs.shape} in the whole module")
            apart = _deviation(own.values, theirs.values)
            if apart > allowed:
                raise ValueError(
                    f"{what} differs from that of the whole module by {apart:.1g} of its size, of which rounding "
                    f"may change {allowed:g}"
                )


def _deviation(own: Any, theirs: Any) -> float:
    """By how much of their root mean square most elements differ at most."""
    is_same = (own == theirs) | (own.isnan() & theirs.isnan())
    apart = torch.where(is_same, 0.0, (own - theirs).abs()).nan_to_num(nan=torch.inf)
    most = float(apart.sort().values[int(_COMPARED * (len(apart) - 1))])
    size = float(theirs[theirs.isfinite()].square().mean().sqrt()) if most else 1.0
    return most / size if size > 0 else np.inf


# Gradients of what all tensor ranks have whole.

# The first steps in which they are compared.
FIRST_STEPS = 2
# Of the sum of absolute values: what rounding may change, and what a wrong plan exceeds.
_TOLERANCE = 1e-3
_ALIKE = 1e-6  # what rounding may change of gradients that ranks compute of the same numbers
_SMALLEST = 1e-6  # of the largest of these sums: smaller ones may be rounding alone


class ReplicaGradients:
    """The gradients of what all ranks of the tensor axis have whole, compared in the first steps.

    They are the same but for rounding if the plan fits the code of the module. `tensors` are parameters by name, of
    whose gradients each rank has a term where they are in `terms`; `activations` names what layers take and return.
    """

    def __init__(
        self, axis: Axis, tensors: Mapping[str, Any], terms: frozenset[str], activations: Sequence[str]
    ) -> None:
        self._axis = axis
        self.tensors = tensors
        self._names = [*tensors, *activations]
        self._is_term = np.array([name in terms for name in self._names], bool)
        # One number of half precision may be the same by chance.
        self._has_many = np.array([name in tensors and tensors[name].numel() > 1 for name in self._names], bool)
        self._sums: dict[str, tuple[float, float]] = {}  # of gradients by name, and of absolute values
        self.steps = 0  # in which they were compared

    @property
    def are_compared(self) -> bool:
        """Whether the gradients of this step are."""
        return self.steps < FIRST_STEPS

    def begin_after(self, steps: int) -> None:
        """Forget what has come of a step that was broken off, and that `steps` were compared."""
        self._sums.clear()
        self.steps = steps

    def note(self, name: str, gradient: Any) -> None:
        """Add up a gradient of this step."""
        if self.are_compared and gradient is not None:
            values = as_reals(gradient.detach())
            values = values.to_dense() if values.is_sparse else values
            both = values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + float(both[0]), before[1] + float(both[1])

    def watch(self, name: str, x: Any) -> Any:
        """Note the gradient of an activation when it is there; return the activation."""
        if self.are_compared and torch.is_grad_enabled() and x.requires_grad:
            x.register_hook(lambda gradient: self.note(name, gradient))
        return x

    def compare(self) -> ValueError | None:
        """Compare the gradients of this step, and return what is wrong. Collective over the axis in the first steps."""
        if not self.are_compared:
            return None
        self.steps += 1
        sums = np.array([self._sums.pop(name, (0.0, 0.0)) for name in self._names]).reshape(-1, 2)
        shared = np.concatenate([sums[:, 0], -sums[:, 0], sums[:, 1], -sums[:, 1]])
        self._axis.all_reduce(shared, op="max", label="control")
        most, least, most_abs, least_abs = shared.reshape(4, -1)
        smallest = np.zeros_like(most_abs)
        count = len(self.tensors)
        for kind in (slice(None, count), slice(count, None)):
            smallest[kind] = _SMALLEST * most_abs[kind][~self._is_term[kind]].max(initial=0.0)
        apart = np.maximum(most + least, most_abs + least_abs)
        differ = np.flatnonzero((apart > _TOLERANCE * np.maximum(most_abs, smallest)) & ~self._is_term)
        if len(differ):
            of_tensors = [self._names[at] for at in differ if at < count]
            # The last one is the first in the backward pass.
            last = [f"of {self._names[at]}" for at in differ[-1:] if at >= count]
            found = " and ".join([f"of {listed(of_tensors)}"] * bool(of_tensors) + last)
            return ValueError(
                f"the gradients {found} differ between tensor ranks, which have these whole: "
                "the plan does not fit the code of the module.  Give 'replicated_with_grad_allreduce' to a layer that "
                "works on features which others have cut, as the norm of a head; let a layer whose outputs are cut be "
                "followed by one whose inputs are cut, or give it 'colwise_gather_output', as where the code between "
                "them uses a tensor that is whole.  Or ranks drew unlike random numbers, or had unlike targets: seed "
                "all tensor ranks alike"
            )
        is_same = self._is_term & self._has_many & (apart <= _ALIKE * most_abs) & (most_abs > 0)
        same = [self._names[at] for at in np.flatnonzero(is_same)]
        if same:
            return ValueError(
                f"the gradients of {listed(same)} are the same on all tensor ranks, and the plan has "
                "'replicated_with_grad_allreduce' for them, which would add them up: that is for a layer whose input "
                "is a rank's part, as the norm of heads that are cut; give 'replicate', or no style, to a layer whose "
                "input is whole"
            )
        return None
