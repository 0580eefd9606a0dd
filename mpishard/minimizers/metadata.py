"""Frozen dataclasses of numbers, flags and strings as metadata of a run, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

T = TypeVar("T")


def plain(record: Any) -> dict[str, Any]:
    """The fields of a dataclass by name; every bit is kept.

    Parameters
    ----------
    record : dataclass
        With fields of type float, int, bool or str only.

    Returns
    -------
    dict
        Infinities and NaN are among the floats.
    """
    return asdict(record)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


# By the name of a field's type.
_READERS: dict[str, Callable[[Any], Any]] = {"float": float, "int": int, "bool": _flag, "str": _text}


def read(kind: type[T], metadata: Any) -> T:
    """The dataclass that gave this metadata.

    Parameters
    ----------
    kind : type
        Of the dataclass.
    metadata : mapping
        From `plain`.

    Returns
    -------
    instance of `kind`
        Equal to it.

    Raises
    ------
    ValueError
        If a field is missing or has another type.
    """
    if not isinstance(metadata, Mapping):
        raise ValueError(f"{kind.__name__}: {metadata!r} must be a mapping with its fields")
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name not in metadata:
            raise ValueError(f"{kind.__name__}: {field.name} is missing; there are {', '.join(sorted(metadata))}")
        try:
            values[field.name] = _READERS[str(field.type)](metadata[field.name])
        except (TypeError, ValueError):
            shown = f"{field.name}={metadata[field.name]!r}"
            raise ValueError(f"{kind.__name__}: {shown} must be of type {field.type}") from None
    return kind(**values)
