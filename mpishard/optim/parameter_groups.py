"""Parameter groups: tensors, chosen by their names, that a rule updates with their own hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from mpishard.arguments import number, shown

_SHOWN = 5  # tensors that a message names


class GroupValues(NamedTuple):
    """The values of a rule's groups for one tensor."""

    weight_decay: float | None = None  # None: the rule's own
    lr_factor: float = 1.0  # on the rule's learning rate


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that a rule updates with their own weight decay or learning rate.

    Give groups to a rule: ``AdamW(lr=1e-3, weight_decay=0.1, groups=[ParameterGroup("*.bias", weight_decay=0)])``.

    Parameters
    ----------
    patterns : str or sequence of str
        The group has the tensors whose names match any of these patterns, as file names in a shell: ``*`` stands for
        any characters, ``?`` for one, ``[...]`` for one of several.
    weight_decay : float, optional
        In place of the rule's.
    lr_factor : float, optional
        Multiplies the rule's learning rate at all steps; with 0 the tensors stay as they are.

    Raises
    ------
    TypeError, ValueError
        If a pattern is no text or empty, a number is below 0, or neither number is given.
    """

    patterns: str | Sequence[str]
    weight_decay: float | None = field(default=None, kw_only=True)
    lr_factor: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        patterns = (self.patterns,) if isinstance(self.patterns, str) else self.patterns
        if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
            raise TypeError(f'ParameterGroup: patterns={shown(self.patterns)} must be texts such as "*.bias"')
        if not patterns or not all(patterns):
            raise ValueError(f'ParameterGroup: patterns={shown(self.patterns)} name no tensor; give some as "*.bias"')
        object.__setattr__(self, "patterns", tuple(patterns))
        if self.weight_decay is None and self.lr_factor is None:
            raise ValueError(f"{self._name} has no value of its own; give weight_decay or lr_factor")
        for name in ("weight_decay", "lr_factor"):
            if getattr(self, name) is not None:
                value = number(f"{self._name}: {name}", getattr(self, name), least=0)
                object.__setattr__(self, name, value)

    @property
    def _name(self) -> str:
        return f"ParameterGroup({', '.join(map(repr, self.patterns))})"

    def __str__(self) -> str:
        values = {"weight_decay": self.weight_decay, "lr_factor": self.lr_factor}
        return f"{', '.join(self.patterns)}: " + " ".join(
            f"{name}={value}" for name, value in values.items() if value is not None
        )

    def matching(self, names: Iterable[str]) -> list[str]:
        """The names that any of its patterns matches.

        Parameters
        ----------
        names : iterable of str
            Of all tensors of a model.

        Returns
        -------
        list of str
            In their order.

        Raises
        ------
        ValueError
            If a pattern matches none of them.
        """
        names = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise ValueError(
                    f"{self._name}: {pattern!r} matches none of the tensors {', '.join(names[:_SHOWN])}{more}; "
                    "give a pattern that matches some, or leave it out"
                )
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)]


def values_by_tensor(groups: Sequence[ParameterGroup], names: Sequence[str]) -> list[GroupValues]:
    """The values of a rule's groups for each tensor of the model, in the order of the names.

    Raises ValueError if a pattern matches no tensor, or two groups have different values for one.
    """
    weight_decay: dict[str, tuple[float, ParameterGroup]] = {}
    lr_factor: dict[str, tuple[float, ParameterGroup]] = {}
    for group in groups:
        for name in group.matching(names):
            for what, known, value in (
                ("weight_decay", weight_decay, group.weight_decay),
                ("lr_factor", lr_factor, group.lr_factor),
            ):
                if value is None:
                    continue
                earlier, other = known.setdefault(name, (value, group))
                if earlier != value:
                    raise ValueError(
                        f"{name!r} is in two parameter groups that differ: {what} is {earlier} in ({other}) and "
                        f"{value} in ({group}); give patterns that do not overlap, or the same value"
                    )
    return [
        GroupValues(
            weight_decay[name][0] if name in weight_decay else None, lr_factor[name][0] if name in lr_factor else 1.0
        )
        for name in names
    ]
