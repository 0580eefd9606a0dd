"""Arguments of public calls, checked: numbers, flags, paths, lists, mappings, and values given whole or field by field.

Numbers and flags become plain Python values.  NumPy's are taken too.  True and False are no numbers, and numbers or
strings are no flags.  Errors name the argument, `name`.  No MPI.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def integer(name: str, value: Any, *, least: int | None = None) -> int:
    """A whole number of at least `least` as an int.

    Raises TypeError if it is no whole number, ValueError if it is too small.
    """
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={shown(value)} must be {wanted}")
    if least is not None and value < least:
        raise ValueError(f"{name}={shown(value)} must be {wanted}")
    return int(value)


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
    finite: bool = True,
    otherwise: str = "",
) -> float:
    """A number as a float, never NaN, within these limits: ``>= least``, ``> above``, ``< below`` and ``<= most``.

    It is finite unless `finite` is False.  Raises TypeError if it is no number, ValueError if it is NaN or outside
    of the limits.  `otherwise` says in the message what else the argument may be, such as ``"None for no clipping"``.
    """
    limits = {"at least": least, "above": above, "below": below, "at most": most}
    limits_text = " and ".join(f"{relation} {limit:g}" for relation, limit in limits.items() if limit is not None)
    wanted = "a finite number" if finite and below is None and most is None else "a number"
    wanted += f"{' of' if limits_text.startswith('at') else ''} {limits_text}" if limits_text else ""
    wanted += f", or {otherwise}" if otherwise else ""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={shown(value)} must be {wanted}")
    plain = float(value)
    inside = (least is None or plain >= least) and (above is None or plain > above)
    inside = inside and (below is None or plain < below) and (most is None or plain <= most)
    if not inside or math.isnan(plain) or (finite and math.isinf(plain)):
        raise ValueError(f"{name}={shown(value)} must be {wanted}")
    return plain


def without_dimensions(value: Any) -> Any:
    """The number in an array without dimensions, such as JAX's and PyTorch's reductions return; else `value` itself."""
    return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value


def returned(value: Any) -> float:
    """The number, or array or tensor of one number, that a function of the user's gave, as a float, maybe NaN.

    Raises TypeError if it is anything else; text, True and complex numbers are no real numbers.
    """
    kind = str(getattr(value, "dtype", type(value).__name__))
    if not hasattr(value, "__float__") or "bool" in kind or "complex" in kind:
        raise TypeError(f"{shown(value)} is no number")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False as a bool; NumPy's booleans are taken too.  Raises TypeError for anything else."""
    if not isinstance(value, bool | np.bool):
        raise TypeError(f"{name}={shown(value)} must be True or False")
    return bool(value)


def path(name: str, value: Any) -> Path:
    """The path of a folder or a file.  Raises TypeError for anything else, bytes included; ValueError for no path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}={shown(value)} must be a path")
    if "\0" in str(value):
        raise ValueError(f"{name}={shown(value)} must be a path, which has no zero byte")
    return Path(value)


def entries(name: str, value: Any, kind: str) -> tuple[Any, ...]:
    """The entries of a list, a tuple, or what else has an order, as a tuple; they are not checked.

    Raises TypeError if it has no entries, or is a text, a mapping, or a set, whose order can differ between ranks.
    `kind` says in the message what the entries must be, in the plural.
    """
    if isinstance(value, str | bytes | Mapping | set | frozenset) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={shown(value)} must be a list of {kind}")
    return tuple(value)


def mapping(name: str, value: Any, kind: str) -> Mapping[Any, Any]:
    """A mapping, such as a dict, as it is; its items are not checked.

    Raises TypeError if it is no mapping.  `kind` says in the message what it must map, such as ``"names to values"``.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={shown(value)} must be a dictionary of {kind}")
    return value


def shown(value: Any) -> str:
    """The repr of a value for a message, shortened where it is long."""
    return reprlib.repr(value)


def listed(items: Iterable[Any], most: int = 5) -> str:
    """The first few items for a message, and the number of the others: ``"a, b, c and 4 more"``."""
    every = list(items)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(map(str, every[:most])) + more


def mark(text: str) -> str:
    """A short word for a long text, in names and messages: eight characters that differ where texts do."""
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def kind_of(value: Any) -> str:
    """What a value is, for a message: the name of its class, or "the class" and its own name where it is one."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def printable(text: str) -> str:
    """A text of unknown origin, such as a name in a file, for a message or a terminal.

    Control characters, with which a text could change a terminal or forge a line, are escaped as in a repr.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def config_or_kwargs(call: str, name: str, kind: type[T], config: T | None, options: dict[str, Any]) -> T:
    """The value `config`, or a new one of those `options` that are its fields, which are removed from `options`.

    `call` and `name` are the function and its argument, for messages; `kind` is a dataclass.  Raises TypeError if
    `config` is of another type, or is given together with some of its fields.
    """
    given = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}  # type: ignore[arg-type]
    if config is None:
        return kind(**given)
    if not isinstance(config, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {shown(config)}")
    if given:
        raise TypeError(f"{call} got {name} and also {', '.join(given)}; put all into {name}={kind.__name__}(...)")
    return config


def reject_unknown(call: str, options: dict[str, Any]) -> None:
    """Raise TypeError if any of the keywords, which nothing has taken, is left."""
    for name in options:
        raise TypeError(f"{call} got an unexpected keyword argument {name!r}")
