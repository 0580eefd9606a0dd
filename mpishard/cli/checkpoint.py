"""``mpishard inspect``, ``verify``, ``convert``, ``export``, ``import`` and ``diff``: checkpoints without a run."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.arguments import listed, printable
from mpishard.checkpoint.archives import Archive, Source, write_archive, write_checkpoint, write_plain
from mpishard.checkpoint.folder import candidates, dangling_links, next_generation
from mpishard.checkpoint.pieces import CheckpointReader, Contents
from mpishard.checkpoint.verify import (
    Difference,
    Examination,
    differences,
    examine,
    figures,
    found_at,
    is_checkpoint,
    newest_whole,
    unlike,
)
from mpishard.cli.output import cell, console, new_table, print_table, size

_CORNER = 6  # entries of a tensor printed along each dimension


def show_facts(contents: Contents) -> None:
    """Print the facts of the run in a checkpoint."""
    made = new_table("fact", "value", left=2)
    made.columns[1].no_wrap = False
    made.add_row("generation", f"{contents.generation} (id {contents.id})")
    made.add_row("saved", cell(f"{contents.saved} by mpishard {contents.mpishard_version}"))
    for name, value in sorted(contents.facts.items(), key=lambda item: (item[0] != "step", item[0])):
        if isinstance(value, np.ndarray):
            text = f"{value.size} numbers" + (f", the last {value[-1]:.6g}" if value.size else "")
        elif isinstance(value, Mapping):
            text = ", ".join(f"{key}={_short(each)}" for key, each in value.items())
        else:
            text = _short(value)
        made.add_row(cell(name.replace(".json", " (settings)")), cell(text))
    made.add_row("tensors", f"{len(contents.tensors)} of {sum(map(prod, contents.tensors.values()))} elements")
    made.add_row("files of pieces", str(len({piece.file for piece in contents.pieces})))
    console().print(made)


def show_kinds(contents: Contents) -> None:
    """Print the kinds of arrays in a checkpoint; each kind has one value per element of the model."""
    elements = sum(map(prod, contents.tensors.values()))
    pieces = Counter(piece.kind for piece in contents.pieces)
    made = new_table("kind", "dtype", "pieces", "bytes", left=2)
    for kind, dtype in contents.kinds.items():
        made.add_row(cell(kind), dtype.name, str(pieces[kind]), size(elements * dtype.itemsize))
    print_table(console(), made)


def show_tensors(contents: Contents) -> None:
    """Print the tensors of a checkpoint."""
    pieces = Counter(piece.name for piece in contents.pieces)
    width = sum(dtype.itemsize for dtype in contents.kinds.values())
    dtypes = "/".join(sorted({dtype.name for dtype in contents.kinds.values()}))
    made = new_table("tensor", "shape", "dtype", "kinds", "pieces", "bytes", left=3)
    for name, shape in contents.tensors.items():
        extents = " x ".join(map(str, shape)) or "scalar"
        made.add_row(
            cell(name), extents, dtypes, str(len(contents.kinds)), str(pieces[name]), size(prod(shape) * width)
        )
    print_table(console(), made)


def show_tensor(source: Source, name: str) -> None:
    """Print figures of one tensor and its first entries, kind by kind."""
    shape = source.tensors[name]
    output = console()
    output.print(cell(f"{name}: {' x '.join(map(str, shape)) or 'scalar'}", "bold"))
    made = new_table("kind", "dtype", "least", "largest", "mean", "rms", "NaN", "inf", left=2)
    digits = 6 if output.width >= 100 else 3  # what fits
    for kind, dtype in source.kinds.items():
        found = figures(source, kind, name)
        numbers = (f"{value:.{digits}g}" for value in (found.least, found.largest, found.mean, found.rms))
        made.add_row(cell(kind), dtype.name, *numbers, str(found.nans), str(found.infinities))
    print_table(output, made)
    if not prod(shape):
        return
    corner = tuple((0, min(extent, _CORNER)) for extent in shape)
    cut = any(extent > _CORNER for extent in shape)
    for kind in source.kinds:
        output.print(cell(f"{kind}{', the first entries' if cut else ''}", "bold"))
        output.print(np.array2string(source.read(kind, name, corner), precision=8), markup=False, soft_wrap=True)


def show_run(rows: Sequence[tuple[str, str, str, str, str]]) -> None:
    """Print the checkpoints of a run: name, step, generation, size, and whether it is whole."""
    made = new_table("checkpoint", "step", "generation", "size", "state")
    made.columns[-1].justify = "left"
    for row in rows:
        made.add_row(*map(cell, row))
    print_table(console(), made)


def show_differences(found: Sequence[Difference]) -> None:
    """Print tensors that differ."""
    made = new_table("kind", "tensor", "largest difference", "relative", left=2)
    for each in found:
        made.add_row(cell(each.kind), cell(each.name), f"{each.absolute:.3e}", f"{each.relative:.3e}")
    print_table(console(), made)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


_Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, a link to one, or the folder of a run's checkpoints.")]


def inspect(
    path: _Checkpoint,
    tensor: Annotated[str | None, typer.Option(help="Show values of this tensor instead.")] = None,
) -> None:
    """Show what is in a checkpoint, or in the newest of a run.

    The newest whole one is taken; of a damaged one what can be read is shown.
    """
    examined = [examine(candidate) for candidate in found_at(path)]
    whole = (each for each in examined if not each.problems)
    chosen = next(whole, examined[0])
    if _is_run(path):
        show_run([_row(each) for each in examined])
        typer.echo("")
    state = "damaged" if chosen.problems else f"whole; {_files(chosen)}"
    typer.echo(printable(f"{chosen.folder}: {state}"))
    for problem in chosen.problems:
        typer.echo(printable(f"  {problem}"))
    if chosen.contents is None:
        if tensor is not None:
            raise ValueError(f"{chosen.folder} is damaged; its tensors cannot be read")
        return
    if tensor is None:
        show_facts(chosen.contents)
        typer.echo("")
        show_kinds(chosen.contents)
        typer.echo("")
        show_tensors(chosen.contents)
        return
    if chosen.problems:
        raise ValueError(f"{chosen.folder} is damaged; the values of its tensors are not shown")
    if tensor not in chosen.contents.tensors:
        raise ValueError(f"no tensor {tensor!r} in {chosen.folder}; inspect without --tensor lists them")
    with CheckpointReader(chosen.contents) as reader:
        show_tensor(reader, tensor)


def verify(path: _Checkpoint) -> None:
    """Check a checkpoint, or all of a run, for damage.

    Sizes, hashes, the index against the pieces, and that all values are finite.
    The exit code is 0 if all are good and 1 if one is not.
    """
    found = found_at(path)
    bad = 0
    if _is_run(path) and (problem := dangling_links(path)):
        bad += 1
        typer.echo(printable(problem))
    for candidate in found:
        examined = examine(candidate, finite=True)
        bad += bool(examined.problems)
        if examined.problems:
            typer.echo(printable(f"{candidate.path}: bad"))
            for problem in examined.problems:
                typer.echo(printable(f"  {problem}"))
        else:
            assert examined.contents is not None
            count = len(examined.contents.tensors)
            typer.echo(printable(f"{candidate.path}: good; {_files(examined)}, {count} tensors, all values finite"))
    if bad:
        raise typer.Exit(1)


def convert(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run's checkpoints (the newest).")],
    target: Annotated[Path, typer.Argument(help="What to make; it must not be there yet.")],
    files: Annotated[int | None, typer.Option(help="A checkpoint, cut evenly over this number of files.")] = None,
    plain_file: Annotated[bool, typer.Option("--plain", help="One HDF5 file that needs no others next to it.")] = False,
) -> None:
    """Write a checkpoint as another number of files, or as one.

    With --files it is a checkpoint as before, with --plain one plain HDF5 file.
    """
    if (files is not None) == plain_file:
        raise ValueError("give either --files N, for a checkpoint, or --plain, for one HDF5 file")
    chosen = _newest_whole(source)
    assert chosen.contents is not None
    if files is None:
        write_plain(chosen.contents, target)
    else:
        with CheckpointReader(chosen.contents) as reader:
            id = secrets.token_hex(16)
            write_checkpoint(reader, target, files=files, generation=chosen.contents.generation, id=id)
    typer.echo(printable(f"written to {target}"))


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run's checkpoints (the newest).")],
    target: Annotated[Path, typer.Argument(help="FILE.safetensors or FILE.npz, which must not be there yet.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Optimizer state too: optimizer/SLOT/TENSOR.")] = False,
) -> None:
    """Write the model in a checkpoint as safetensors or NumPy archive."""
    chosen = _newest_whole(source)
    assert chosen.contents is not None
    with CheckpointReader(chosen.contents) as reader:
        write_archive(reader, target, optimizer=optimizer)
        buffers = [name.removeprefix("buffer.") for name in reader.facts if name.startswith("buffer.")]
    without = f", without the buffers of the module: {listed(sorted(buffers))}" if buffers else ""
    typer.echo(printable(f"written to {target}{without}"))


def import_(
    source: Annotated[Path, typer.Argument(help="FILE.safetensors or FILE.npz.")],
    target: Annotated[Path, typer.Argument(help="The checkpoint to make; it must not be there yet.")],
    step: Annotated[int | None, typer.Option(help="Steps taken (what the file says; 0 if it says nothing).")] = None,
) -> None:
    """Make a checkpoint of safetensors or of a NumPy archive.

    Tensors named optimizer/SLOT/TENSOR are taken for optimizer state.
    """
    if step is not None and step < 0:
        raise ValueError(f"--step is {step}; it must be at least 0")
    with Archive(source) as archive:
        archive.facts = {"step": 0, **archive.facts}
        if step is not None:
            archive.facts |= {"step": step, "steps": step, "skipped_steps": 0}
        generation = next_generation(candidates(target.parent))
        write_checkpoint(archive, target, generation=generation, id=secrets.token_hex(16))
        typer.echo(printable(f"written to {target}: {len(archive.tensors)} tensors, {', '.join(archive.kinds)}"))


def diff(
    one: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run's checkpoints (the newest).")],
    other: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference that is none (without it: the last bit counts).")
    ] = None,
) -> None:
    """Show how far two checkpoints are apart, tensor by tensor.

    Largest differences, absolute and relative.
    The exit code is 0 if they are equal and 1 if they are not.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"--tolerance is {tolerance}; it must be at least 0")
    chosen = [_newest_whole(path) for path in (one, other)]
    first, second = (each.contents for each in chosen)
    assert first is not None and second is not None
    with CheckpointReader(first) as a, CheckpointReader(second) as b:
        only = unlike(a, b)
        found = list(differences(a, b))
    changed = [each for each in found if not each.same_bits]
    for line in only:
        typer.echo(printable(line))
    if changed:
        show_differences(changed)
    typer.echo(f"{len(found) - len(changed)} of {len(found)} arrays are equal to the last bit")
    beyond = changed if tolerance is None else [each for each in changed if each.absolute > tolerance]
    if tolerance is not None and changed:
        typer.echo(f"{len(changed) - len(beyond)} of the others are within {tolerance:g}")
    if only or beyond:
        raise typer.Exit(1)


def _is_run(path: Path) -> bool:
    return not is_checkpoint(path.resolve())


def _newest_whole(path: Path) -> Examination:
    """The checkpoint at a path, or the newest whole one of a run, whose name is then printed."""
    chosen, problems = newest_whole(path)
    if chosen.folder != path.absolute():
        damaged = f", since others are damaged: {'; '.join(problems)}" if problems else ""
        typer.echo(printable(f"{path}: taking {chosen.folder.name}{damaged}"))
    return chosen


def _row(each: Examination) -> tuple[str, str, str, str, str]:
    if each.manifest is None:
        return each.folder.name, "?", "?", "?", "damaged"
    total = sum(entry.size for entry in each.manifest.files.values())
    state = "damaged" if each.problems else "whole"
    return each.folder.name, str(each.manifest.step), str(each.manifest.generation), size(total), state


def _files(each: Examination) -> str:
    assert each.manifest is not None
    count = len(each.manifest.files)
    return f"{count} files, {size(sum(entry.size for entry in each.manifest.files.values()))}"
