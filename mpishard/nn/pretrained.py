"""Published weights: from a folder of `transformers` to a model on a mesh, and back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the name of bfloat16
import numpy as np

from mpishard.arguments import integer, shown
from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.comm.reshard import reshard
from mpishard.layout.local_layout import LocalLayout, Piece, cut_holding
from mpishard.layout.run_state import PARAMETERS, Shard
from mpishard.nn.decoder import Decoder
from mpishard.nn.import_plan import TABLES, Plan
from mpishard.nn.local_chunks import values_from_elsewhere
from mpishard.nn.published import DTYPES, Published, Weight
from mpishard.nn.weight_files import CONFIG, INDEX, SINGLE, Reader, published_tensors
from mpishard.parameters.flat import FlatParameters

__all__ = ["export_pretrained", "import_pretrained"]


def import_pretrained(folder: str | os.PathLike[str], mesh: Mesh | None = None, **options: Any) -> Decoder:
    """A model with the weights of a folder that `transformers` has written, or that was downloaded from its hub.

    The folder has ``config.json`` and ``model.safetensors``, or several files and their index.  Known are GPT-2, Llama
    2 and 3, Qwen2 and Qwen3.  Each rank reads the slices that it holds.  Vocabularies need not divide by anything.
    Logits are those of `transformers`; the model has no dropout unless `dropout` is given, whatever the config says.

    Collective over all ranks of the mesh; arguments and files must be the same on all of them.

    Parameters
    ----------
    folder : path
        All ranks must see it; it need not be the same path.
    mesh : Mesh, optional
        Default: one rank alone.  In `Mesh.without_initial_values` the weights are not read.
    **options : any
        Options of `GPT` or `Llama` beside the architecture: ``dropout=0.1, shards=2, schedule="gpipe",
        recompute=True``.  `dtype` is float64 for weights of float64 unless given, and float32 for others.

    Returns
    -------
    GPT or Llama
        With the sizes of ``config.json``; `token_ids` has the numbers of its special tokens.

    Raises
    ------
    ValueError, TypeError, OSError
        On all ranks, and then there is no model: for an unknown architecture, a config that asks for what models here
        do not have, tensors that are missing, of another shape, or have no place, files that cannot be read, and
        arguments or files that differ between ranks.
    """
    world = Axis.single("world") if mesh is None else mesh.world
    plan, problem = None, None
    try:
        plan = Plan.of(folder, 1 if mesh is None else mesh.pipeline.size, options)
    except Exception as error:  # whatever one rank alone has met, the others must not go on
        problem = error
    agree_on_settings(
        world,
        {} if plan is None else plan.facts,
        problem,
        what="arguments of import_pretrained(), and files in its folder",
    )
    assert plan is not None
    with values_from_elsewhere():
        model = plan.table.build(plan.architecture, mesh=mesh, **plan.options)
    model.token_ids = plan.token_ids
    if mesh is None or mesh.initial_values:
        _together(world, True, lambda: _fill(model.parameters, plan))
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
    if not isinstance(model, Decoder):
        raise TypeError(f"export_pretrained needs a model of mpishard.nn, got {shown(model)}")
    parameters = model.parameters
    world = Axis.single("world") if model.mesh is None else model.mesh.world
    facts, problem = {}, None
    try:
        table = table_of_model(model)
        stored_as = _export_dtype(parameters.dtype if dtype is None else dtype)
        limit = integer("file_bytes", file_bytes, least=1)
        if not os.fspath(folder):
            raise ValueError("export_pretrained needs the name of a folder, got an empty one")
        facts = {"dtype": stored_as.name, "file_bytes": str(limit)}
    except (TypeError, ValueError) as error:
        problem = error
    agree_on_settings(world, facts, problem, what="arguments of export_pretrained()")
    files = _files(table.weights(model.architecture), limit // stored_as.itemsize)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    config = {**table.whole_config(model.architecture), **model.token_ids, "torch_dtype": stored_as.name}
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


def table_of_model(model: Decoder) -> Published:
    """The table for a model of this package; ValueError if there is none."""
    for table in TABLES:
        if table.describes(model.architecture):
            return table
    raise ValueError(f"no model of transformers is known that is like {model.architecture}")


def _holding(parameters: FlatParameters) -> LocalLayout:
    """The pieces in ``parameters.held``."""
    if parameters.sharded is None:
        return parameters.pieces
    return cut_holding(parameters.pieces, parameters.sharded.own)


def _fill(parameters: FlatParameters, plan: Plan) -> None:
    """Read what this rank holds."""
    by_name = {weight.spec.name: weight for weight in plan.weights}
    like = parameters.held
    with Reader(plan.folder, plan.stored) as reader:
        for piece in _holding(parameters):
            weight = by_name[piece.name]
            values = reader.read(weight, piece.box, parameters.dtype)
            if plan.has_copy_of_table and weight.is_table:
                reader.check_copy_of_table(weight, piece.box, values)
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


def _together(world: Axis, works: bool, work: Callable[[], None]) -> None:
    """Do the work of this rank, if it works; raise on all ranks what it raises on one.  Collective over `world`."""
    problem: Exception | None = None
    if works:
        try:
            work()
        except Exception as error:  # whatever one rank alone has met, the others must not go on
            problem = error
    world.raise_if_any(problem)


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
