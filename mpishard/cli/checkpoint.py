"""``mpishard inspect``, ``verify``, ``convert``, ``export``, ``import`` and ``diff``: checkpoints without a run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from mpishard.arguments import printable
from mpishard.checkpoint.archives import Archive, write_archive
from mpishard.checkpoint.comparing import differences, unlike
from mpishard.checkpoint.converting import write_checkpoint, write_plain
from mpishard.checkpoint.examining import Examination, examine, found_at, is_checkpoint, newest_whole, not_finite
from mpishard.checkpoint.folder import astray, candidates, next_generation
from mpishard.checkpoint.sources import Stored
from mpishard.cli.checkpoint_text import (
    show_differences,
    show_facts,
    show_kinds,
    show_run,
    show_tensor,
    show_tensors,
)
from mpishard.cli.estimate_text import size

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
    typer.echo(printable(f"{chosen.folder}: {_state(chosen)}"))
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
        raise ValueError(f"there is no tensor {tensor!r} in {chosen.folder}; inspect without --tensor lists them")
    with Stored(chosen.contents) as source:
        show_tensor(source, tensor)


def verify(path: _Checkpoint) -> None:
    """Check a checkpoint, or all of a run, for damage.

    Sizes, hashes, the index against the pieces, and that all values are finite.
    The exit code is 0 if all are good and 1 if one is not.
    """
    found = found_at(path)
    bad = 0
    if _is_run(path) and (problem := astray(path)):
        bad += 1
        typer.echo(printable(problem))
    for candidate in found:
        examined = examine(candidate)
        problems = list(examined.problems)
        if examined.contents is not None and not problems:
            try:
                problems += not_finite(examined.contents)
            except ValueError as error:
                problems.append(str(error))
        bad += bool(problems)
        if problems:
            typer.echo(printable(f"{candidate.path}: bad"))
            for problem in problems:
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
    files: Annotated[int | None, typer.Option(help="A checkpoint, evenly cut over so many files.")] = None,
    plain_file: Annotated[bool, typer.Option("--plain", help="One HDF5 file that needs no others beside it.")] = False,
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
        with Stored(chosen.contents) as stored:
            id = secrets.token_hex(16)
            write_checkpoint(stored, target, files=files, generation=chosen.contents.generation, id=id)
    typer.echo(printable(f"written to {target}"))


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run's checkpoints (the newest).")],
    target: Annotated[Path, typer.Argument(help="FILE.safetensors or FILE.npz, which must not be there yet.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Optimizer state too: optimizer/SLOT/TENSOR.")] = False,
) -> None:
    """Write the model in a checkpoint as safetensors or NumPy archive."""
    chosen = _newest_whole(source)
    assert chosen.contents is not None
    with Stored(chosen.contents) as stored:
        write_archive(stored, target, optimizer=optimizer)
    typer.echo(printable(f"written to {target}"))


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
    with Stored(first) as a, Stored(second) as b:
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
    chosen = newest_whole(path)
    if chosen.folder != path.absolute():
        typer.echo(printable(f"{path}: taking {chosen.folder.name}"))
    return chosen


def _row(each: Examination) -> tuple[str, str, str, str, str]:
    if each.manifest is None:
        return each.folder.name, "?", "?", "?", "damaged"
    total = sum(entry.size for entry in each.manifest.files.values())
    state = "damaged" if each.problems else "whole"
    return each.folder.name, str(each.manifest.step), str(each.manifest.generation), size(total), state


def _state(each: Examination) -> str:
    return "damaged" if each.problems else f"whole; {_files(each)}"


def _files(each: Examination) -> str:
    assert each.manifest is not None
    count = len(each.manifest.files)
    return f"{count} files, {size(sum(entry.size for entry in each.manifest.files.values()))}"
