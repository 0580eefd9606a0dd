"""What a checkpoint says of its model: the fields of an architecture, and the architecture that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np

from mpishard.comm.agreement import text_of
from mpishard.nn.architecture import Architecture, DecoderArchitecture, LlamaArchitecture

MODEL = "model.json"  # the fact of a checkpoint that has them
# Fields that are left out where they have these values: earlier versions have no such fields, and read the file too.
_USUAL = {"shards": 1, "dropout": 0.0}
KINDS: dict[str, type[Any]] = {"Architecture": Architecture, "LlamaArchitecture": LlamaArchitecture}


def fields_of(architecture: Any) -> dict[str, Any] | None:
    """The fields of a model's architecture as plain values, and its kind; None if it is no dataclass.

    That of an `Architecture` has no kind, as earlier versions read it.  Of an architecture of one's own, what JSON
    cannot hold is a text.
    """
    if not is_dataclass(architecture) or isinstance(architecture, type):
        return None
    fields = asdict(architecture)
    for name, usual in _USUAL.items():
        if fields.get(name) == usual:
            del fields[name]
    kind = type(architecture).__name__
    if isinstance(architecture, DecoderArchitecture) and kind != Architecture.__name__:
        fields["kind"] = kind
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=_plain, skipkeys=True))
    return plain


def _plain(value: Any) -> Any:
    """A number of NumPy as that of Python, and anything else as a text."""
    return value.item() if isinstance(value, np.generic) else text_of(value)


def architecture_of(fields: Mapping[str, Any]) -> DecoderArchitecture | None:
    """The architecture that `fields_of` described, maybe in a file; None if this package has no such kind."""
    given = dict(fields)
    kind = KINDS.get(given.pop("kind", "Architecture"))
    found: DecoderArchitecture | None = None if kind is None else kind(**given)
    return found


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two results of `described` differ, as JSON stores them: the values now and then, or None."""
    new, old = {**_USUAL, **now}, {**_USUAL, **then}
    pairs = {name: (new.get(name), old.get(name)) for name in {**new, **old}}
    return {name: pair for name, pair in pairs.items() if len({json.dumps(each, sort_keys=True) for each in pair}) > 1}
