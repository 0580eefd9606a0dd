"""Folders as `transformers` reads and writes them: ``config.json`` and safetensors files, maybe with an index.

Not collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import printable, shown
from mpishard.io import files
from mpishard.io.atomic_json import parsed
from mpishard.layout.boxes import Box, box_shape
from mpishard.nn.published import DTYPES, HEAD, Published, Run, Weight

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MOST_SHOWN = 3


class Stored(NamedTuple):
    """A published tensor: its name in the file, the file in the folder, its dtype and its shape."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file; ValueError if it is none."""
    try:
        found = parsed(files.read(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} has no JSON object, but {shown(found)}")
    return found


def stored_tensors(folder: Path) -> list[Stored]:
    """All tensors of a folder, from the headers of its files."""
    weight_map = None
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ValueError(f"{folder / INDEX} has no weight_map from names of tensors to files beside it")
    elif not (folder / SINGLE).is_file():
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; other files of weights are not read: load them in "
            "transformers, and call save_pretrained"
        )
    found = []
    with Reader(folder) as reader:
        for file in sorted({SINGLE} if weight_map is None else set(weight_map.values())):
            opened = reader.open(file)
            for name in opened.keys():
                if weight_map is None or weight_map.get(name) == file:
                    part = opened.get_slice(name)
                    found.append(Stored(name, file, part.get_dtype(), tuple(part.get_shape())))
    absent = sorted(set(weight_map or ()) - {each.name for each in found})
    if absent:
        raise ValueError(f"{folder / INDEX} names {_list(absent)}, which the files do not have")
    return found


def match(table: Published, weights: Sequence[Weight], stored: Iterable[Stored], tied: bool) -> dict[str, Stored]:
    """The stored tensors by their published names; with the copy of a tied output head, if there is one.

    Raises
    ------
    ValueError
        If one is missing, or there are others; if a shape or a dtype is another one.
    """
    wanted = {name: shape for weight in weights for name, shape in weight.published_shapes().items()}
    # The prefix is there or not.
    full = {name.removeprefix(table.prefix): name for name in wanted}
    found: dict[str, Stored] = {}
    extra = []
    for each in stored:
        short = each.name.removeprefix(table.prefix)
        if short in full:
            if full[short] in found:
                raise ValueError(f"the weights have {each.name} and {found[full[short]].name}, which are one tensor")
            found[full[short]] = each
        elif tied and each.name == HEAD:  # some files have a copy of a tied head
            found[HEAD] = each
            wanted[HEAD] = next(weight.spec.shape for weight in weights if weight.is_table)
        elif not table.unused.fullmatch(short):
            extra.append(each.name)
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(f"the weights lack {_list(missing)}, which a model of this config.json has")
    if extra:
        raise ValueError(f"the weights have {_list(extra)}, for which a model of this config.json has no place")
    for name, each in found.items():
        if tuple(each.shape) != wanted[name]:
            raise ValueError(f"{each.name} has the shape {tuple(each.shape)}, but config.json asks for {wanted[name]}")
        if each.dtype not in DTYPES:
            raise ValueError(f"{each.name} is {each.dtype}; weights must be {', '.join(DTYPES)}")
    return found


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(map(printable, names[:_MOST_SHOWN])) + more


class Reader:
    """Reads boxes of tensors from the files of a folder; a context manager that closes the files.

    Parameters
    ----------
    folder : Path
    stored : mapping of str to Stored, optional
        By published name.
    """

    def __init__(self, folder: Path, stored: Mapping[str, Stored] | None = None) -> None:
        self._folder = folder
        self._stored = stored or {}
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(self, file: str) -> Any:
        """A file of the folder, which stays open; ValueError if it is damaged."""
        from safetensors import SafetensorError, safe_open  # imported at the first use, not with the package

        if file not in self._files:
            path = self._folder / file
            files.check(path)
            try:
                self._files[file] = self._stack.enter_context(safe_open(path, framework="np"))
            except SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file, or damaged: {printable(str(error))}") from None
        return self._files[file]

    def read(self, weight: Weight, box: Box, dtype: Any) -> np.ndarray:
        """A box of a tensor, from those parts of the files that have it."""
        values = np.empty(box_shape(box), dtype)
        first, last = box[-1]
        for run in weight.runs:
            start, stop = max(first, run.start), min(last, run.stop)
            if start >= stop:
                continue
            columns = slice(run.first + start - run.start, run.first + stop - run.start)
            rows = [slice(*extent) for extent in box[:-1]]
            stored = self._stored[run.published]
            part = self.open(stored.file).get_slice(stored.name)
            index = (columns, *rows) if weight.transposed else (*rows, columns)
            found = part[index]
            values[..., start - first : stop - first] = found.T if weight.transposed else found
        return values

    def check_copy_of_table(self, weight: Weight, box: Box, values: np.ndarray) -> None:
        """ValueError unless a tied output head is stored with these values, those of a box of the table."""
        copy = replace(weight, runs=(Run(0, weight.spec.shape[-1], HEAD),))
        if not np.array_equal(self.read(copy, box, values.dtype), values, equal_nan=True):
            raise ValueError(
                f"{self._folder} has {HEAD} with other values than {weight.runs[0].published}, but {CONFIG} ties them: "
                'give it "tie_word_embeddings": false, or leave the tensor out'
            )


def published_tensors(weight: Weight, values: np.ndarray, dtype: Any) -> dict[str, np.ndarray]:
    """The published tensors of which a tensor consists, in new memory."""
    tensors = {name: np.empty(shape, dtype) for name, shape in weight.published_shapes().items()}
    for run in weight.runs:
        target = tensors[run.published].T if weight.transposed else tensors[run.published]
        target[..., run.first : run.first + run.stop - run.start] = values[..., run.start : run.stop]
    return tensors
