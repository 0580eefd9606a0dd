"""Published weights: from a folder of `transformers` to a model on a mesh, and back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 - gives NumPy the name of bfloat16
import numpy as np

from mpishard.arguments import integer, shown
from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.comm.reshard import reshard
from mpishard.layout.local_layout import LocalLayout, Piece, cut_holding
from mpishard.layout.run_state import PARAMETERS, Shard
from mpishard.nn.decoder import Decoder
from mpishard.nn.local_chunks import values_from_elsewhere
from mpishard.nn.published import DTYPES, Published, Weight
from mpishard.nn.published_gpt2 import PublishedGPT2
from mpishard.nn.published_llama import PublishedLlama, PublishedQwen2, PublishedQwen3
from mpishard.nn.weight_files import (
    CONFIG,
    INDEX,
    SINGLE,
    Reader,
    Stored,
    match,
    published_tensors,
    read_json,
    stored_tensors,
)
from mpishard.parameters.flat import FlatParameters

__all__ = ["export_pretrained", "import_pretrained"]
T = TypeVar("T")
TABLES: tuple[Published, ...] = (PublishedGPT2(), PublishedLlama(), PublishedQwen2(), PublishedQwen3())


def import_pretrained(folder: str | os.PathLike[str], mesh: Mesh | None = None, **options: Any) -> Decoder:
    """A model with the weights of a folder that `transformers` has written, or that was downloaded from its hub.

    The folder has ``config.json`` and ``model.safetensors``, or several files and their index.  Known are GPT-2, Llama
    2 and 3, Qwen2 and Qwen3.  Each rank reads the slices that it holds.  Vocabularies need not divide by anything.
    Logits are those of `transformers`; models here have no dropout, whatever the config says.

    Collective over all ranks of the mesh.

    Parameters
    ----------
    folder : path
        All ranks must see it; it need not be the same path.
    mesh : Mesh, optional
        Default: one rank alone.  In `Mesh.without_initial_values` the weights are not read.
    **options : any
        Options of `GPT` or `Llama` beside sizes: ``shards=2, schedule="gpipe", recompute=True``.  `dtype` is float64
        for weights of float64 unless given, and float32 for others.

    Returns
    -------
    GPT or Llama
        With the sizes of ``config.json``.

    Raises
    ------
    ValueError, TypeError, OSError
        On all ranks, and then there is no model: for an unknown architecture, a config that asks for what models here
        do not have, tensors that are missing, of another shape, or have no place, and files that cannot be read.
    """
    folder = Path(folder)
    world = Axis.single("world") if mesh is None else mesh.world
    config, stored = _shared(world, folder)
    table = table_of_config(config)
    architecture = replace(table.architecture(config), shards=options.pop("shards", 1))
    weights = table.weights(architecture)
    found = match(table, weights, stored, architecture.tied)
    if options.get("precision") is None and "dtype" not in options:
        options["dtype"] = np.float64 if any(each.dtype == "F64" for each in found.values()) else np.float32
    with values_from_elsewhere():
        model = table.build(architecture, mesh=mesh, **options)
    if mesh is None or mesh.initial_values:
        _together(world, True, lambda: _fill(model.parameters, folder, weights, found))
    return model


def export_pretrained(
    model: Decoder, folder: str | os.PathLike[str], *, dtype: Any = None, file_bytes: int = 5 * 10**9
) -> None:
    """Write a model as a folder that `transformers` loads: ``AutoModelForCausalLM.from_pretrained(folder)``.

    What `import_pretrained` has read is written with the same bytes, if `dtype` is that of the file.

    Collective over all ranks of the mesh.

    Parameters
    ----------
    model : GPT or Llama
        Trained on any mesh.
    folder : path
        Must not be there yet, or be empty.  It appears at once, when all is written, by the first rank.
    dtype : dtype, optional
        float64, float32, float16 or ``"bfloat16"``; default: that of the parameters.
    file_bytes : int
        A file has at most so many bytes of tensors, but at least one tensor; with several there is an index.  The first
        rank needs memory for two such files.

    Raises
    ------
    ValueError, TypeError, OSError
        On all ranks, and then nothing is written.
    """
    table = table_of_model(model)
    parameters = model.parameters
    stored_as = _export_dtype(parameters.dtype if dtype is None else dtype)
    limit = integer("file_bytes", file_bytes, least=1)
    world = Axis.single("world") if model.mesh is None else model.mesh.world
    files = _files(table.weights(model.architecture), limit // stored_as.itemsize)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    config = {**table.whole_config(model.architecture), "torch_dtype": stored_as.name}
    target = Path(folder)
    beside = target.parent / f".{target.name}-{os.getpid()}-{secrets.token_hex(4)}"
    writes = world.rank == 0
    try:
        _together(world, writes, lambda: _begin(target, beside))
        weight_map: dict[str, str] = {}
        for name, weights in zip(names, files, strict=True):
            values = _gathered(world, parameters, weights)
            _together(world, writes, lambda: _write(beside / name, weights, values, stored_as, weight_map))  # noqa: B023
        _together(world, writes, lambda: _finish(target, beside, config, weight_map, len(files) > 1))
    finally:
        if writes:
            shutil.rmtree(beside, ignore_errors=True)


def table_of_config(config: dict[str, Any]) -> Published:
    """The table for a ``config.json``; ValueError for an unknown architecture, or what models here do not have."""
    asked = config.get("model_type")
    for table in TABLES:
        if table.model_type == asked:
            table.check(config)
            return table
    known = ", ".join(table.model_type for table in TABLES)
    raise ValueError(f"config.json has model_type={shown(asked)}; the known ones are {known}")


def table_of_model(model: Any) -> Published:
    """The table for a model of this package; TypeError for another object."""
    if not isinstance(model, Decoder):
        raise TypeError(f"export_pretrained needs a model of mpishard.nn, got {shown(model)}")
    for table in TABLES:
        if table.describes(model.architecture):
            return table
    raise ValueError(f"no model of transformers is known that is like {model.architecture}")


def _shared(world: Axis, folder: Path) -> tuple[dict[str, Any], list[Stored]]:
    """The config and the headers, as the first rank reads them, on all ranks."""
    text = _together(world, world.rank == 0, lambda: _described(folder))
    config, stored = json.loads(world.allgather_object(text)[0])
    return config, [Stored(name, file, dtype, tuple(shape)) for name, file, dtype, shape in stored]


def _described(folder: Path) -> str:
    """The config and the headers, as JSON."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; download the model first")
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}; it is no folder of a model of transformers")
    return json.dumps([read_json(folder / CONFIG), stored_tensors(folder)])


def _holding(parameters: FlatParameters) -> LocalLayout:
    """The pieces in ``parameters.held``."""
    if parameters.sharded is None:
        return parameters.pieces
    return cut_holding(parameters.pieces, parameters.sharded.own)


def _fill(parameters: FlatParameters, folder: Path, weights: Sequence[Weight], stored: dict[str, Stored]) -> None:
    """Read what this rank holds."""
    by_name = {weight.spec.name: weight for weight in weights}
    like = parameters.held
    with Reader(folder, stored) as reader:
        for piece in _holding(parameters):
            values = reader.read(by_name[piece.name], piece.box, parameters.dtype)
            like[piece.start : piece.start + piece.size] = arrays.module_of(like).asarray(values.reshape(-1))


def _export_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.name not in DTYPES.values():
        raise TypeError(f"dtype={dtype!r} must be one of {', '.join(DTYPES.values())}")
    return found


def _files(weights: Sequence[Weight], most: int) -> list[list[Weight]]:
    """Runs of tensors of at most so many elements together, or one."""
    files: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if files[-1] and size + weight.spec.size > most:
            files.append([])
            size = 0
        files[-1].append(weight)
        size += weight.spec.size
    return files


def _gathered(world: Axis, parameters: FlatParameters, weights: Sequence[Weight]) -> list[np.ndarray]:
    """Whole tensors on the first rank, none on others.  Collective over `world`."""
    names = {weight.spec.name for weight in weights}
    own = tuple(piece for piece in _holding(parameters) if piece.name in names)
    source = Shard(PARAMETERS, parameters.held, own, ())
    target, pieces, size = None, [], 0
    if world.rank == 0:
        for weight in weights:
            pieces.append(Piece(weight.spec.name, weight.spec.box, size))
            size += weight.spec.size
        target = Shard(PARAMETERS, arrays.empty(size, parameters.dtype, like=parameters.like), tuple(pieces), ())
    reshard(world, source, target)
    if target is None:
        return []
    flat = arrays.to_host(target.array)
    return [flat[piece.start : piece.start + piece.size].reshape(piece.shape) for piece in pieces]


def _together(world: Axis, works: bool, work: Callable[[], T]) -> T | None:
    """What the work of this rank returns, if it works; raise on all ranks what it raises on one."""
    problem: Exception | None = None
    result: T | None = None
    if works:
        try:
            result = work()
        except Exception as error:  # whatever one rank alone has met, the others must not go on
            problem = error
    world.raise_if_any(problem)
    return result


def _begin(target: Path, beside: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} is there already, and not an empty folder; export to a new one")
    beside.mkdir(parents=True)


def _write(
    path: Path, weights: Sequence[Weight], values: Sequence[np.ndarray], dtype: Any, weight_map: dict[str, str]
) -> None:
    from safetensors.numpy import save_file  # imported at the first use, not with the package

    tensors: dict[str, np.ndarray] = {}
    for weight, array in zip(weights, values, strict=True):
        tensors.update(published_tensors(weight, array, dtype))
    save_file(tensors, path, metadata={"format": "pt"})  # without it `transformers` refuses the file
    weight_map.update(dict.fromkeys(tensors, path.name))


def _finish(target: Path, beside: Path, config: dict[str, Any], weight_map: dict[str, str], index: bool) -> None:
    if index:
        size = sum(path.stat().st_size for path in beside.iterdir())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
        (beside / INDEX).write_text(text + "\n", "utf-8")
    (beside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    os.rename(beside, target)
