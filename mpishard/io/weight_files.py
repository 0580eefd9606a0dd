"""Files of weights as safetensors has them: one, or a folder as `transformers` reads and writes it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from mpishard.arguments import listed, printable, shown
from mpishard.io import files
from mpishard.io.files import parsed
from mpishard.lazy import of_extra

# In a folder: one file, or several with an index.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Dtypes of weights, as safetensors calls them.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class StoredWeight(NamedTuple):
    """A stored tensor: its name in the file, the file in the folder, its dtype and its shape."""

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


def stored_tensors(folder: Path, file: str | None = None) -> list[StoredWeight]:
    """All tensors of a folder, or of one file in it, from the headers of the files."""
    weight_map = None
    # Beside one file `transformers` heeds no index: it leaves that of an earlier save there.
    is_one = file is not None or (folder / SINGLE).is_file()
    if not is_one and (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ValueError(f"{folder / INDEX} has no weight_map from names of tensors to files next to it")
    elif not is_one:
        raise ValueError(
            f"{folder} has neither {SINGLE} nor {INDEX}; other files of weights are not read: load them in "
            "transformers, and call save_pretrained"
        )
    found = []
    with WeightFiles(folder) as opened_files:
        for each in sorted({file or SINGLE} if weight_map is None else set(weight_map.values())):
            if weight_map is not None and not (folder / each).exists():
                raise FileNotFoundError(
                    f"{folder / INDEX} names {printable(each)!r}, and there is no such file next to it"
                )
            opened = opened_files.open(each)
            for name in opened.keys():
                if weight_map is None or weight_map.get(name) == each:
                    part = opened.get_slice(name)
                    found.append(StoredWeight(name, each, part.get_dtype(), tuple(part.get_shape())))
    absent = sorted(set(weight_map or ()) - {each.name for each in found})
    if absent:
        raise ValueError(f"{folder / INDEX} names {listed(map(printable, absent))}, which the files do not have")
    return found


class WeightFiles:
    """The files of a folder, open as they are used; a context manager that closes them.

    They give arrays of NumPy, or of another `framework` that safetensors knows.
    """

    def __init__(self, folder: Path, framework: str = "np") -> None:
        self._folder = folder
        self._framework = framework
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def open(self, file: str) -> Any:
        """A file of the folder, which stays open; ValueError if it is damaged."""
        safetensors = of_extra("safetensors", "weights", "a folder of published weights")

        if file not in self._files:
            path = self._folder / file
            files.check(path)
            try:
                self._files[file] = self._stack.enter_context(safetensors.safe_open(path, framework=self._framework))
            except safetensors.SafetensorError as error:
                raise ValueError(f"{path} is no safetensors file, or damaged: {printable(str(error))}") from None
        return self._files[file]
