"""What an import of published weights comes to, before any memory is taken.  Nothing is collective."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import integer, no_others, printable, shown, whole_or_fields
from mpishard.comm.agreement import fingerprint, text_of
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.options import MemoryOptions, PipelineOptions, Precision, settings_of_model
from mpishard.nn.published import HEAD, Published, Weight
from mpishard.nn.published_gpt2 import PublishedGPT2
from mpishard.nn.published_llama import PublishedLlama, PublishedQwen2, PublishedQwen3
from mpishard.nn.weight_files import CONFIG, Stored, match, read_json, stored_tensors

TABLES: tuple[Published, ...] = (PublishedGPT2(), PublishedLlama(), PublishedQwen2(), PublishedQwen3())
CALL = "import_pretrained()"
# Fields of an architecture that a config does not decide.
_OWN = ("shards", "dropout")
# Numbers of special tokens, which an export writes again.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# A longer value of a config is compared by a number.
_MOST_TEXT = 60


@dataclass(frozen=True)
class Plan:
    """The model of a folder, and where its weights are.

    Parameters
    ----------
    folder : Path
    table : Published
    architecture : DecoderArchitecture
    options : mapping
        For `Published.build`.
    weights : list of Weight
        All tensors of the model.
    stored : mapping of str to Stored
        By published name.
    token_ids : dict
        Of the config.
    facts : mapping of str to str
        What must be the same on all ranks, by name.
    """

    folder: Path
    table: Published
    architecture: DecoderArchitecture
    options: Mapping[str, Any]
    weights: list[Weight]
    stored: Mapping[str, Stored]
    token_ids: dict[str, Any]
    facts: Mapping[str, str]

    @classmethod
    def of(cls, folder: str | os.PathLike[str], ranks: int, options: Mapping[str, Any]) -> Plan:
        """The plan for a folder and the keywords of `import_pretrained`, on a pipeline of so many ranks.

        Raises
        ------
        ValueError, TypeError, OSError
            If they make no sense.
        """
        folder, given = Path(folder), dict(options)
        config, stored = _read(folder)
        try:
            table = table_of_config(config)
            architecture = table.architecture(config)
            _check_names(table, architecture, config, given)
            own = {name: given.pop(name) for name in _OWN if name in given}
            architecture = replace(architecture, **own)
            weights = table.weights(architecture)
            found = match(table, weights, stored, architecture.tied)
        except (TypeError, ValueError) as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(f"{folder}: {printable(str(error))}") from None
        if given.get("precision") is None and "dtype" not in given:
            given["dtype"] = np.float64 if any(each.dtype == "F64" for each in found.values()) else np.float32
        parts = {
            "pipeline": whole_or_fields(CALL, "pipeline", PipelineOptions, given.pop("pipeline", None), given),
            "precision": whole_or_fields(CALL, "precision", Precision, given.pop("precision", None), given),
            "memory": whole_or_fields(CALL, "memory", MemoryOptions, given.pop("memory", None), given),
        }
        seed, module = integer("seed", given.pop("seed", 0)), given.pop("module", np)
        no_others(CALL, given)
        names = fingerprint({each.name: str(each) for each in stored})
        facts = {
            **{f"{CONFIG}'s {name}": _text(value) for name, value in config.items()},
            "content of the files": f"{len(stored)} tensors ({names:x})",
            **settings_of_model(architecture, parts["pipeline"], ranks, parts["precision"], parts["memory"], seed),
            "stage_costs": text_of(parts["pipeline"].stage_costs),
            "module": text_of(getattr(module, "__name__", module)),
        }
        ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
        whole = {**parts, "seed": seed, "module": module}
        return cls(folder, table, architecture, whole, weights, found, ids, facts)

    @property
    def has_copy_of_table(self) -> bool:
        """Whether the output head is tied, and the files have it all the same."""
        return self.architecture.tied and HEAD in self.stored


def table_of_config(config: dict[str, Any]) -> Published:
    """The table for a ``config.json``; ValueError for an unknown architecture, or what models here do not have."""
    asked = config.get("model_type")
    for table in TABLES:
        if table.model_type == asked:
            table.check(config)
            return table
    known = ", ".join(table.model_type for table in TABLES)
    raise ValueError(f"config.json has model_type={shown(asked)}; the known ones are {known}")


def _read(folder: Path) -> tuple[dict[str, Any], list[Stored]]:
    """The config and the headers."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; download the model first")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; it is no folder of a model of transformers")
    return read_json(folder / CONFIG), stored_tensors(folder)


def _check_names(table: Published, architecture: Any, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError for keywords that ask for another architecture than the config has."""
    for name in ("architecture", *(field.name for field in fields(architecture))):
        if name in given and name not in _OWN:
            has = f", which has {theirs}={shown(config[theirs])}" if (theirs := table.sizes.get(name)) else ""
            more = "; batches may have shorter sequences" if name == "context_length" else ""
            raise TypeError(f"{CALL} takes no {name}=: the architecture is that of {CONFIG}{has}{more}")


def _text(value: Any) -> str:
    """A value of a config, as text that differs where it does."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}... ({fingerprint({'': text}):x})"
