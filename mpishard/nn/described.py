"""Architectures as plain values, for files: a checkpoint has the one of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from mpishard.nn.architecture import Architecture
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.llama_architecture import LlamaArchitecture

_KINDS: dict[str, type[Any]] = {"Architecture": Architecture, "LlamaArchitecture": LlamaArchitecture}


def described(architecture: Any) -> dict[str, Any] | None:
    """The fields of a model's architecture, and its kind; None if it is no dataclass.  Not collective.

    Parameters
    ----------
    architecture : object
        Of any model.

    Returns
    -------
    dict or None
        Of plain values; for an `Architecture` without a kind, as earlier versions read it.
    """
    if not is_dataclass(architecture) or isinstance(architecture, type):
        return None
    fields = asdict(architecture)
    for name, usual in (("shards", 1), ("dropout", 0.0)):
        if fields.get(name) == usual:
            del fields[name]  # so that earlier versions, which have no such field, read the file too
    kind = type(architecture).__name__
    if isinstance(architecture, DecoderArchitecture) and kind != Architecture.__name__:
        fields["kind"] = kind
    return fields


def architecture_of(fields: Mapping[str, Any]) -> DecoderArchitecture | None:
    """The architecture that was described.  Not collective.

    Parameters
    ----------
    fields : mapping
        Of `described`, maybe from a file.

    Returns
    -------
    DecoderArchitecture or None
        None if it is of a kind that is not in this package.
    """
    given = dict(fields)
    kind = _KINDS.get(given.pop("kind", "Architecture"))
    found: DecoderArchitecture | None = None if kind is None else kind(**given)
    return found
