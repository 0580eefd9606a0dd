"""Published weights: from a folder of `transformers` to a model on a mesh, and back."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - gives NumPy the name of bfloat16
import numpy as np

from mpishard.arguments import integer, listed, printable, reject_unknown, shown
from mpishard.backend import array as arrays
from mpishard.comm.agreement import fingerprint, opening, text_of
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.comm.reshard import reshard
from mpishard.io.weight_files import DTYPES, INDEX, SINGLE, StoredWeight, WeightFiles, read_json, stored_tensors
from mpishard.launch.processes import remove_leftovers
from mpishard.layout.boxes import Box, box_shape
from mpishard.layout.run_state import PARAMETERS, Shard
from mpishard.layout.tensors import LocalLayout, Piece, cut_holding
from mpishard.lazy import of_extra
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.chunk import values_from_elsewhere
from mpishard.nn.decoder import Decoder
from mpishard.nn.options import ModelKeywords, ModelOptions, settings_of_model
from mpishard.nn.published import (
    HEAD,
    ColumnRange,
    Published,
    PublishedGPT2,
    PublishedLlama,
    PublishedQwen2,
    PublishedQwen3,
    Weight,
)
from mpishard.parameters.flat import FlatParameters

# In a folder as `transformers` reads and writes it, beside the files of weights.
CONFIG = "config.json"


def match(
    table: Published, weights: Sequence[Weight], stored: Iterable[StoredWeight], tied: bool
) -> dict[str, StoredWeight]:
    """The stored tensors by their published names, with the copy of a tied output head, if any.

    Raises ValueError if one is missing, there are others, or a shape or a dtype differs.
    """
    wanted = {name: shape for weight in weights for name, shape in weight.published_shapes().items()}
    # With the prefix or without.
    full = {name.removeprefix(table.prefix): name for name in wanted}
    found: dict[str, StoredWeight] = {}
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
        raise ValueError(f"the weights lack {listed(map(printable, missing))}, which a model of this config.json has")
    if extra:
        raise ValueError(
            f"the weights have {listed(map(printable, extra))}, for which a model of this config.json has no place"
        )
    for name, each in found.items():
        if tuple(each.shape) != wanted[name]:
            raise ValueError(f"{each.name} has the shape {tuple(each.shape)}, but config.json asks for {wanted[name]}")
        if each.dtype not in DTYPES:
            raise ValueError(f"{each.name} is {each.dtype}; weights must be {', '.join(DTYPES)}")
    return found


class Reader(WeightFiles):
    """Reads boxes of tensors from the files of a folder."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredWeight]) -> None:
        super().__init__(folder)
        self._stored = stored

    def __enter__(self) -> Reader:
        return self

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
        copy = replace(weight, runs=(ColumnRange(0, weight.spec.shape[-1], HEAD),))
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


# What an import of published weights comes to, before any memory is taken.  Nothing is collective.

TABLES: tuple[Published, ...] = (PublishedGPT2(), PublishedLlama(), PublishedQwen2(), PublishedQwen3())
CALL = "import_pretrained()"
# Fields of an architecture that a config does not decide.
_OWN = ("shards", "dropout")
# Numbers of special tokens, which an export writes again.
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# A longer value of a config is compared by a number.
_MOST_TEXT = 60


@dataclass(frozen=True)
class ImportPlan:
    """The model of a folder, and where its weights are."""

    folder: Path
    table: Published
    architecture: DecoderArchitecture
    options: Mapping[str, Any]
    weights: list[Weight]
    stored: Mapping[str, StoredWeight]  # by published name
    token_ids: dict[str, Any]
    facts: Mapping[str, str]  # what must be the same on all ranks, by name

    @classmethod
    def of(cls, folder: str | os.PathLike[str], ranks: int, options: Mapping[str, Any]) -> ImportPlan:
        """The plan for a folder and the keywords of `import_pretrained`, on a pipeline of `ranks` ranks.

        Raises ValueError, TypeError or OSError if they make no sense.
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
        if "dtype" not in given:
            given["dtype"] = np.float64 if any(each.dtype == "F64" for each in found.values()) else np.float32
        reject_unknown(CALL, {name: given[name] for name in given if name not in ModelKeywords.__annotations__})
        seed, module = integer("seed", given.pop("seed", 0)), given.pop("module", np)
        checked = ModelOptions(**given)
        names = fingerprint({each.name: str(each) for each in stored})
        facts = {
            **{f"{CONFIG}'s {name}": _text(value) for name, value in config.items()},
            "content of the files": f"{len(stored)} tensors ({names:x})",
            **settings_of_model(architecture, checked, ranks, seed),
            "stage_costs": text_of(checked.stage_costs),
            "module": text_of(getattr(module, "__name__", module)),
        }
        ids = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
        whole = {**given, "seed": seed, "module": module}
        return cls(folder, table, architecture, whole, weights, found, ids, facts)

    @property
    def has_copy_of_table(self) -> bool:
        """Return True if the output head is tied, and the files have it all the same."""
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


def _read(folder: Path) -> tuple[dict[str, Any], list[StoredWeight]]:
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


# Published weights: from a folder of `transformers` to a model on a mesh, and back.

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
        Options of `GPT` or `Llama` in addition to the architecture: ``dropout=0.1, shards=2, schedule="gpipe",
        recompute=True``.  `dtype` is float64 for weights of float64 unless given, and float32 for others.

    Returns
    -------
    GPT or Llama
        With the sizes of ``config.json``; `token_ids` has the numbers of its special tokens.

    Raises
    ------
    ValueError, TypeError, OSError
        On all ranks, and then there is no model: if the architecture is unknown, or the config asks for what models
        here do not have; if a tensor is missing, has another shape, or has no place; if a file cannot be read; or if
        arguments or files differ between ranks.
    """
    world = Axis.single("world") if mesh is None else checked_mesh(mesh).world
    with opening(world, "import_pretrained") as same:
        plan = ImportPlan.of(folder, 1 if mesh is None else mesh.pipeline.size, options)
        same |= plan.facts  # of the files in the folder, too
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
        Must not exist yet, or be empty.  It appears at once, when all is written, by the first rank.
    dtype : dtype, optional
        float64, float32, float16 or ``"bfloat16"``; default: that of the parameters.
    file_bytes : int
        The most bytes of tensors in a file, which has at least one tensor; several files have an index.  The first
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
    with opening(world, "export_pretrained") as same:
        table = table_of_model(model)
        stored_as = _export_dtype(parameters.dtype if dtype is None else dtype)
        limit = integer("file_bytes", file_bytes, least=1)
        if not os.fspath(folder):
            raise ValueError("export_pretrained needs the name of a folder, got an empty one")
        target = Path(folder).resolve()  # no folder can take the place of a link to one
        same |= {"dtype": stored_as.name, "file_bytes": limit}
    files = _files(table.weights(model.architecture), limit // stored_as.itemsize)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    )
    config = {**table.whole_config(model.architecture), **model.token_ids, "torch_dtype": stored_as.name}
    temporary = target.parent / f".{target.name}-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    writes = world.rank == 0
    try:
        _together(world, writes, lambda: _begin(target, temporary))
        weight_map: dict[str, str] = {}
        for name, weights in zip(names, files, strict=True):
            values = _gathered(world, parameters, weights)
            _together(world, writes, lambda: _write(temporary / name, weights, values, stored_as, weight_map))  # noqa: B023
        _together(world, writes, lambda: _finish(target, temporary, config, weight_map, len(files) > 1))
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


def table_of_model(model: Decoder) -> Published:
    """The table for a model of this package; ValueError if this package has none."""
    for table in TABLES:
        if table.describes(model.architecture):
            return table
    raise ValueError(f"no model of transformers is known that is like {model.architecture}")


def _holding(parameters: FlatParameters) -> LocalLayout:
    """The pieces in ``parameters.held``."""
    if parameters.sharded is None:
        return parameters.pieces
    return cut_holding(parameters.pieces, parameters.sharded.own)


def _fill(parameters: FlatParameters, plan: ImportPlan) -> None:
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
    """Runs of tensors of at most `most` elements together, or one."""
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
    with raised_on_all(world):
        if works:
            work()


def _begin(target: Path, temporary: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists, and is not an empty folder; export to a new one")
    remove_leftovers(target.parent, re.escape(target.name))
    temporary.mkdir(parents=True)


def _write(
    path: Path, weights: Sequence[Weight], values: Sequence[np.ndarray], dtype: Any, weight_map: dict[str, str]
) -> None:
    safetensors = of_extra("safetensors.numpy", "weights", "a folder of published weights")
    tensors: dict[str, np.ndarray] = {}
    for weight, array in zip(weights, values, strict=True):
        tensors.update(published_tensors(weight, array, dtype))
    try:
        safetensors.save_file(tensors, path, metadata={"format": "pt"})  # without it `transformers` refuses the file
    except of_extra("safetensors", "weights", "a folder of published weights").SafetensorError as error:
        raise OSError(f"{path.name} cannot be written into {path.parent}: {error}") from None
    weight_map.update(dict.fromkeys(tensors, path.name))


def _finish(target: Path, temporary: Path, config: dict[str, Any], weight_map: dict[str, str], index: bool) -> None:
    if index:
        size = sum(path.stat().st_size for path in temporary.iterdir())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2)
        (temporary / INDEX).write_text(text + "\n", "utf-8")
    (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    os.rename(temporary, target)
