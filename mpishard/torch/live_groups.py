"""The parameter groups of an optimizer of PyTorch, whose values schedulers and users change between two steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpishard.comm.agreement import fingerprint
from mpishard.torch.element_wise import STEP, WAY_OUT, arguments_of, slots_of

# How a step is computed, and not which: not compared, and not restored.
_HOW = ("foreach", "fused", "capturable", "differentiable")


class LiveGroups:
    """The groups of one optimizer of PyTorch, as they are now; the `LiveValues` of its rule.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Made for the parameters of a module, without a step.
    names : mapping of int to str
        By id of a parameter its name in the module.

    Attributes
    ----------
    kind : type
        Its class.
    slots : tuple of str
        The arrays that it keeps, the same for all groups.
    number_of : dict of str to int
        By name of a parameter the number of its group.

    Raises
    ------
    TypeError, ValueError
        If it has other parameters than the module, has taken steps, or is not element-wise; or its groups keep
        different arrays.
    """

    way_out = (
        "give the same on every rank; if it is a value of param_groups, set it there: a scheduler such as "
        "ReduceLROnPlateau needs one number on all ranks, such as the mean of their losses by mesh.world.all_reduce"
    )

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.kind = kind = type(optimizer)
        self._optimizer = optimizer
        if any(each and each.get(STEP, 1) for each in optimizer.state.values()):
            raise ValueError(
                f"this {kind.__name__} has taken steps; give a new one, and load_state_dict of what comes back"
            )
        groups = optimizer.param_groups
        if "lr" not in groups[0]:
            raise TypeError(f"this {kind.__name__} has no learning rate 'lr' in its parameter groups; {WAY_OUT}")
        _check_parameters(groups, names)
        self._options = [name for name in groups[0] if name in arguments_of(kind) and name != "params"]
        self._compared_options = [name for name in self._options if name not in _HOW]
        self._sizes = [len(group["params"]) for group in groups]
        self.number_of: dict[str, int] = {
            names[id(p)]: number for number, group in enumerate(groups) for p in group["params"] if id(p) in names
        }
        self.slots, *others = (slots_of(kind, self._probed(number)) for number in range(len(groups)))
        for number, slots in enumerate(others, 1):
            if slots != self.slots:
                raise ValueError(
                    f"param_groups[{number}] of this {kind.__name__} keeps {_listed(slots)}, and param_groups[0] "
                    f"{_listed(self.slots)}; give both the same options that decide this, as momentum and amsgrad do"
                )
        self._known: set[tuple[bool, ...]] = {self._switches(number) for number in range(len(groups))}
        self._checked: list[dict[str, Any]] = []
        self._compared: list[dict[str, Any]] = []
        self._fingerprint = 0

    def claim(self) -> None:
        """Let the optimizer take no step by itself any more, and free its state.  Not collective."""
        self._optimizer.state.clear()
        self._optimizer.register_step_pre_hook(_refuse)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups as they are, with their parameters.  Not collective."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def arguments(self, number: int) -> dict[str, Any]:
        """The arguments of the class for a group, as plain values.  Not collective.

        Parameters
        ----------
        number : int
            Of the group.

        Returns
        -------
        dict
            By name.
        """
        group = self._optimizer.param_groups[number]
        return {name: _plain(group[name]) for name in self._options}

    def rate(self, number: int) -> float:
        """The learning rate of a group.  Not collective.

        Parameters
        ----------
        number : int
            Of the group.

        Returns
        -------
        float
            As it is now.
        """
        return float(self._optimizer.param_groups[number]["lr"])

    @property
    def saved(self) -> list[dict[str, Any]]:
        """All values of each group but its parameters, for `restore`; also those that only schedulers use."""
        return [
            {name: _as_json(value) for name, value in group.items() if _is_saved(name, value)}
            for group in self._optimizer.param_groups
        ]

    # -- what LiveValues has ----------------------------------------------------------------------------------------

    @property
    def by_name(self) -> dict[str, str]:
        """The values of all groups now, as text."""
        return {
            f"{name} of param_groups[{number}]": _text(value)
            for number, values in enumerate(self._values())
            for name, value in values.items()
        }

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""
        values = self._values()
        if values != self._compared:
            self._compared, self._fingerprint = values, fingerprint(self.by_name)
        return self._fingerprint

    def check(self) -> None:
        """Raise ValueError unless the groups are those of the beginning, and a step can use their values."""
        optimizer, what = self._optimizer, f"this {self.kind.__name__}"
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != self._sizes:
            raise ValueError(
                f"{what} has parameter groups of {sizes} parameters, and had {self._sizes} when the module was made "
                "distributed; call add_param_group before as_distributed"
            )
        if any(optimizer.state.values()):
            raise ValueError(
                f"{what} has got a state of its own since the module was made distributed, which no step uses; call "
                "load_state_dict of what as_distributed returned, with what its state_dict returned"
            )
        values = self._values()
        for number, rate in enumerate(each["lr"] for each in values):
            if not 0.0 <= rate < math.inf:
                raise ValueError(f"lr of param_groups[{number}] of {what} must be at least 0 and finite, got {rate}")
            if values != self._checked and self._switches(number) not in self._known:
                self._check_slots(number)
        self._checked = values
        optimizer._opt_called = True  # or schedulers would warn that no step was taken

    def restore(self, configuration: Mapping[str, Any]) -> str:
        """Take the values of all groups, as PyTorch's `load_state_dict` does."""
        saved, groups = configuration.get("live"), self._optimizer.param_groups
        if not isinstance(saved, list) or not all(isinstance(each, Mapping) for each in saved):
            return ""  # of a rule without such values: what differs is reported as for other rules
        if len(saved) != len(groups):
            return (
                f"the saved state has {len(saved)} parameter groups and this {self.kind.__name__} {len(groups)}: their "
                "learning rates and other values stay as they are here"
            )
        for group, values in zip(groups, saved, strict=True):
            for name, value in values.items():
                if not _is_saved(name, value):
                    continue
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, float | int):
                    group[name].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
        return ""

    # -- inside -----------------------------------------------------------------------------------------------------

    def _values(self) -> list[dict[str, Any]]:
        """What decides a step, of each group."""
        return [
            {name: _plain(group[name]) for name in self._compared_options} for group in self._optimizer.param_groups
        ]

    def _switches(self, number: int) -> tuple[bool, ...]:
        """Which options of a group are on: only these decide what it keeps."""
        return tuple(map(bool, self._probed(number).values()))

    def _probed(self, number: int) -> dict[str, Any]:
        return {**self.arguments(number), "lr": 1e-3}

    def _check_slots(self, number: int) -> None:
        """Raise ValueError unless a group with other options keeps no more than before."""
        if more := [slot for slot in slots_of(self.kind, self._probed(number)) if slot not in self.slots]:
            raise ValueError(
                f"param_groups[{number}] of this {self.kind.__name__} was changed, and needs {_listed(more)} now, "
                "which did not exist when the module was made distributed; set such options before as_distributed"
            )
        self._known.add(self._switches(number))


def _check_parameters(groups: list[dict[str, Any]], names: Mapping[int, str]) -> None:
    """Raise ValueError unless the groups have the parameters of the module that are trained, and no others."""
    held = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    if missing := [name for number, name in names.items() if number not in held]:
        raise ValueError(
            f"parameter {missing[0]!r} of the module is not in the optimizer; give it all, or set requires_grad=False"
        )
    if len(held) > len(names):
        raise ValueError(f"the optimizer has {len(held) - len(names)} parameters that the module has not")


def _refuse(optimizer: Any, *_: Any) -> None:
    """A hook before each step that an optimizer would take by itself."""
    raise RuntimeError(
        f"mpishard takes the steps of this {type(optimizer).__name__}: call step() of what as_distributed returned, "
        "and give that to a GradScaler"
    )


def _plain(value: Any) -> Any:
    if type(value) in (float, int, bool, type(None)):  # nearly all are, and each step asks
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    single = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if single or isinstance(value, np.generic) else value


def _as_json(value: Any) -> Any:
    plain = _plain(value)
    return list(plain) if isinstance(plain, tuple) else plain


def _is_saved(name: str, value: Any) -> bool:
    plain = _plain(value)
    each = plain if isinstance(plain, tuple) else (plain,)
    return name not in ("params", *_HOW) and all(isinstance(number, float | int | str) for number in each)


def _text(value: Any) -> str:
    """To nine digits, since processors may differ in the last."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _listed(slots: Any) -> str:
    return ", ".join(slots) or "no state"
