"""``mpishard estimate``: the cost of each layout of a model."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from mpishard.arguments import integer, listed, mapping, number, printable, shown
from mpishard.cli.output import console, new_table, print_table, seconds, size
from mpishard.estimate import (
    TYPICAL,
    Estimate,
    MachineProfile,
    Workload,
    layouts,
    model_state_bytes,
    table,
)
from mpishard.estimate.layouts import STAGES
from mpishard.estimate.profile import BY_HAND
from mpishard.io import files
from mpishard.io.weight_files import read_json
from mpishard.nn.architecture import Architecture, DecoderArchitecture
from mpishard.nn.model_facts import KINDS
from mpishard.nn.pretrained import table_of_config
from mpishard.nn.rotary import RopeScaling, Rotary
from mpishard.pipeline.schedule import SCHEDULES

# Estimates as tables.

_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "state": "optimizer",
    "gathered": "gathered",
    "buckets": "buckets",
    "activations": "activ.",
    "scratch": "scratch",
    "rounded": "rounded",
    "total": "total",
}


def overview(found: Sequence[Estimate], limit: float, most: int, tokens: int) -> None:
    """Print at most `most` layouts in this order, one a line; more than `limit` bytes a rank are marked.

    `tokens` is the number in a step of all ranks.
    """
    output = console()
    layouts = f"{len(found)} layouts" if len(found) > 1 else "1 layout"
    output.print(
        f"{layouts} of {found[0].layout.ranks} ranks, {tokens} tokens a step; bytes are those of a rank", style="bold"
    )
    rows = [_overview_row(each, limit, tokens) for each in found[:most]]
    columns = _fitting(rows, output.width)
    made = new_table(*columns, left=0)
    made.columns[columns.index("schedule")].justify = "left"
    for each, row in zip(found, rows, strict=False):
        made.add_row(*(row[column] for column in columns), style="dim" if each.memory.total > limit else None)
    print_table(output, made)
    if len(columns) < len(rows[0]):
        missing = ", ".join(column.replace("\n", " ") for column in rows[0] if column not in columns)
        output.print(f"(not shown in {output.width} columns: {missing})")
    if len(found) > most:
        output.print(f"... and {len(found) - most} more; --all shows them")
    over = sum(each.memory.total > limit for each in found)
    if over == len(found):
        least = min(found, key=lambda each: each.memory.total)
        output.print(f"No layout fits into {size(limit)} a rank; the least is {size(least.memory.total)}.")
    elif over:
        output.print(f"! {over} of {len(found)} layouts need more than the limit of {size(limit)} a rank.")


def _overview_row(each: Estimate, limit: float, tokens: int) -> dict[str, str]:
    """Cells by column."""
    layout, memory = each.layout, each.memory
    schedule = layout.schedule + (f" x{layout.chunks}" if layout.chunks > 1 else "")
    return {
        "data": str(layout.data),
        "tens": str(layout.tensor),
        "pipe": str(layout.pipeline),
        "zero": str(layout.zero_stage),
        "schedule": schedule if layout.pipeline > 1 else "-",
        "step": seconds(each.step_time),
        "tokens/s": f"{tokens / each.step_time:,.0f}",
        "bubble": f"{each.bubble_fraction:.0%}" if layout.pipeline > 1 else "-",
        "memory": ("!" if memory.total > limit else "") + size(memory.total),
        "model": size(memory.total - memory.activations - memory.scratch),
        "activ.": size(memory.activations + memory.scratch),
        "tensor\nsends": size(each.sent.get("tensor", 0)),
        "pipe\nsends": size(each.sent.get("pipeline", 0)),
        "data\nsends": size(each.sent.get("data", 0)),
    }


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns for a terminal of `width`: without room for all, optional columns are left out."""
    columns = list(rows[0])
    widths = {column: 2 + max(map(len, (*column.split("\n"), *(row[column] for row in rows)))) for column in columns}
    for column in ("activ.", "model", "tensor\nsends", "pipe\nsends", "data\nsends"):
        if sum(widths[kept] for kept in columns) > width + 2:
            columns.remove(column)
    return columns


def details(found: Estimate, tokens: int, machine: MachineProfile) -> None:
    """Print one layout by pipeline stage, with the links of its axes."""
    layout = found.layout
    extras = [f"schedule {layout.schedule}"] if layout.pipeline > 1 else []
    extras += [f"{layout.chunks} chunks"] if layout.chunks > 1 else []
    extras += [what.replace("_", " ") for what in ("sequence_parallel", "recompute") if getattr(layout, what)]
    output = console()
    output.print(
        f"data {layout.data} x tensor {layout.tensor} x pipeline {layout.pipeline}, ZeRO {layout.zero_stage}"
        + "".join(f", {extra}" for extra in extras)
        + f"; {found.batch} sequences of {found.length} tokens a data rank, {found.microbatches} micro-batches",
        style="bold",
    )
    output.print(
        f"step {seconds(found.step_time)} ({tokens / found.step_time:,.0f} tokens/s): "
        f"forward and backward {seconds(found.compute)} with a bubble of {found.bubble_fraction:.1%}, "
        f"data axis {seconds(found.communication)}, update {seconds(found.update)}"
    )
    if layout.ranks > 1:
        output.print("\nlinks", style="bold")
        print_table(output, _links(found, machine))
    rows: dict[tuple[str, ...], list[int]] = {}
    for stage in found.stages:
        row = (f"{stage.parameters:,}", *(size(getattr(stage.memory, what)) for what in _MEMORY))
        rows.setdefault(row, []).append(stage.rank)
    output.print("\nmemory of a rank", style="bold")
    # A kind of memory that no stage needs has no column, so that the others fit a terminal.
    used = [place for place, cells in enumerate(zip(*rows, strict=True)) if set(cells) != {"-"}]
    names = ["tensors", *_MEMORY.values()]
    made = new_table("stage", *(names[place] for place in used))
    for row, ranks in rows.items():
        made.add_row(_ranks(ranks), *(row[place] for place in used))
    print_table(output, made)
    output.print("sent by a rank in a step, mean of the stage", style="bold")
    made = new_table("stage", "axis", "what", "bytes", left=3)
    rows = {}
    for stage in found.stages:
        for (axis, label), count in stage.sent.items():
            if count:
                rows.setdefault((axis, label, size(count / (layout.data * layout.tensor))), []).append(stage.rank)
    for row, ranks in rows.items():
        made.add_row(_ranks(ranks), *row)
    if rows:
        print_table(output, made)
    else:
        output.print("nothing")


def _links(found: Estimate, machine: MachineProfile) -> Table:
    """For each axis of a layout: its link, and the speed of its most important operation."""
    layout = found.layout
    operations = {
        "tensor": "all_gather" if layout.sequence_parallel else "all_reduce",
        "data": "reduce_scatter" if layout.zero_stage else "all_reduce",
        "pipeline": "send",
    }
    made = new_table("axis", "ranks", "where", "operation", "latency", "bandwidth")
    made.columns[2].justify = made.columns[3].justify = "left"
    for axis, operation in operations.items():
        ranks, span = getattr(layout, axis), layout.span(axis)
        if ranks > 1:
            link = machine.link(operation, span)
            where = "within a node" if machine.within_node(span) else "between nodes"
            made.add_row(axis, str(ranks), where, operation, seconds(link.latency), f"{link.bandwidth / 1e9:.3g} GB/s")
    return made


def _ranks(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


# The model, as the sizes of a GPT or in a file, and the machine, in a file.

# Fields of a model that have fields themselves.
_PARTS = {"rotary": Rotary, "scaling": RopeScaling}


def _model(sizes: Mapping[str, int | None], file: Path | None) -> DecoderArchitecture:
    """The model of a file, or the GPT of these sizes; ValueError if both are given, or one of the sizes is missing."""
    given = {name: value for name, value in sizes.items() if value is not None}
    if file is not None:
        if given:
            raise ValueError(f"--model brings the sizes: leave {', '.join(f'--{name}' for name in given)} out")
        return model_in(file)
    if missing := [f"--{name}" for name in sizes if name not in given]:
        raise ValueError(f"a model needs {', '.join(missing)} too (or --model, or --parameters for ZeRO alone)")
    vocabulary, context, width, layers, heads = given.values()
    return Architecture(vocabulary, context, width, layers, heads)


def model_in(file: Path) -> DecoderArchitecture:
    """The model of a ``config.json`` of transformers, or of a TOML file with the fields of an architecture."""
    if file.suffix not in (".json", ".toml"):
        raise ValueError(f"--model is {file}; give a config.json of transformers, or a .toml with fields of a model")
    given = read_json(file) if file.suffix == ".json" else _toml(file)
    try:
        if file.suffix == ".json":
            found: DecoderArchitecture = table_of_config(given).architecture(given)
            return found
        name = given.pop("kind", Architecture.__name__)
        if name not in KINDS:
            raise ValueError(f"kind is {shown(name)}; choose one of {', '.join(KINDS)}")
        _check_fields(name, _fields(KINDS[name]), given)
        return KINDS[name](**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def machine_in(file: Path) -> MachineProfile:
    """The machine that ``mpishard bench`` measured, or of a TOML file with its speeds.

    The TOML file has arguments of `MachineProfile.given`, or the name of a measured `profile` next to it, and maybe a
    table `network` with those of `MachineProfile.with_network`.
    """
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"
        raise ValueError(f"--profile {file} {what}; make one: mpirun -n N mpishard bench --output FILE")
    if file.suffix != ".toml":
        return MachineProfile.load(file)
    given = _toml(file)
    try:
        measured = "profile" in given
        speeds = {} if measured else _fields(MachineProfile.given)
        what = "a machine with a profile" if measured else "a machine"
        _check_fields(what, {**speeds, "profile": False, "network": False}, given)
        network = mapping("network", given.pop("network", {}), "names to numbers")
        if measured:
            machine = MachineProfile.load(file.parent / str(given["profile"]))
        else:
            machine = MachineProfile.given(**_numbers(given))
        if network:
            _check_fields("a network", _fields(machine.with_network), network)
            machine = machine.with_network(**_numbers(network))
        return machine
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(files.read(file).decode())
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from None


def _fields(call: Callable[..., Any]) -> dict[str, bool]:
    """The arguments of a function or a class, and whether it needs them."""
    return {name: each.default is Parameter.empty for name, each in signature(call).parameters.items()}


def _check_fields(what: str, needed: Mapping[str, bool], given: Mapping[str, Any]) -> None:
    """Raise ValueError if a file has a field that there is not, or lacks one that is needed."""
    if others := [name for name in given if name not in needed]:
        raise ValueError(f"there is no field {listed(others)}; {what} has {', '.join(needed)}")
    if missing := [name for name in needed if needed[name] and name not in given]:
        raise ValueError(f"{what} needs {', '.join(missing)} too")
    for name, value in given.items():
        if name in _PARTS and isinstance(value, dict):
            _check_fields(name, _fields(_PARTS[name]), value)


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a machine, checked to be numbers."""
    return {name: (integer if name == "ranks_per_node" else number)(name, value) for name, value in given.items()}


# -- the command -------------------------------------------------------------------------------------------------------

_BEST = 10  # layouts that are shown without --all
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_ZERO = {
    0: "nothing sharded",
    1: "optimizer state sharded",
    2: "and gradients",
    3: "and parameters",
}


# Options allowed together with --parameters, which replaces those of the model and lists all ZeRO stages.
_WITH_PARAMETERS = {"parameters", "ranks", "memory_limit", "as_json"}


def estimate(
    context_of_command: typer.Context,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="A GPT: size of the vocabulary.")] = None,
    context: Annotated[int | None, typer.Option(help="A GPT: longest sequence.")] = None,
    width: Annotated[int | None, typer.Option(help="A GPT: channels.")] = None,
    layers: Annotated[int | None, typer.Option(help="A GPT: blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="A GPT: attention heads.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Instead of a GPT: config.json of transformers, or .toml of an architecture.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Instead of a model: its parameters; shows the memory of each ZeRO stage.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step of all ranks together (1 a rank).")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence (the context).")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches a step (1; in a pipeline 4 a rank).")] = None,
    data: Annotated[int | None, typer.Option(help="Only layouts with this data size.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Only layouts with this tensor size.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Only layouts with this pipeline size.")] = None,
    zero: Annotated[int | None, typer.Option(help="Only this ZeRO stage, 0 to 3.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"Only this one of {', '.join(SCHEDULES)}.")] = None,
    chunks: Annotated[int, typer.Option(help="Model chunks a rank of the interleaved schedule.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help="Split norms by rows.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute blocks again for the backward.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Annotated[bool, typer.Option("--device", help="Memory is that of GPUs.")] = False,
    half: Annotated[bool, typer.Option("--half", help="With compute_dtype on GPUs; implies --device.")] = False,
    slots: Annotated[int, typer.Option(help="Numbers of optimizer state a parameter (2 for Adam).")] = 2,
    bucket: Annotated[int, typer.Option(help="minimum_parameter_group_size of the configuration.")] = 1024,
    memory_limit: Annotated[str | None, typer.Option(help="Mark layouts above it: 4GB, 500MB, ...")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The machine: what mpishard bench measured, or .toml of one given by hand.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show all layouts, and not the ten best.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Compare the layouts of a model on a number of ranks: time of a step, memory and bytes sent of a rank.

    One that is left alone by --data, --tensor, --pipeline, --zero and --schedule is shown in detail.
    """
    limit = math.inf if memory_limit is None else parse_bytes(memory_limit)
    if ranks is None:
        raise ValueError("the number of ranks is missing: give --ranks")
    if parameters is not None:
        _check_alone(context_of_command)
        _zero_table(parameters, ranks, limit, as_json)
        return
    sizes = {"vocabulary": vocabulary, "context": context, "width": width, "layers": layers, "heads": heads}
    architecture = _model(sizes, model)
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if zero not in (None, *STAGES):
        raise ValueError(f"unknown ZeRO stage {zero}; choose one of 0, 1, 2, 3")
    if dtype not in ("float32", "float64"):
        raise ValueError(f"--dtype is {dtype!r}; choose float32 or float64")
    machine = TYPICAL if profile is None else machine_in(profile)
    if batch is not None and batch < 1:
        raise ValueError(f"--batch is {batch}; it must be at least 1")
    batch = ranks if batch is None else batch
    candidates = layouts(
        ranks,
        architecture,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        zero_stages=STAGES if zero is None else (zero,),
        schedules=tuple(SCHEDULES) if schedule is None else (schedule,),
        chunks=chunks,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    if half and dtype != "float32":
        raise ValueError(f"--half rounds operands of float32 products, but --dtype is {dtype}")
    itemsize = np.dtype(dtype).itemsize
    workload = Workload(1, length, microbatches, itemsize, slots, bucket, device or half, half)
    found = table(candidates, architecture, batch, workload, machine)
    if not found:
        architecture.check(tensor or 1, pipeline or 1)
        shards = architecture.shards
        raise ValueError(
            f"no layout of {ranks} ranks is left: the sizes must multiply out to the ranks, the tensor size must "
            f"divide {f'{shards} shards' if shards > 1 else f'{architecture.query_groups} heads'}, and every stage "
            f"needs one of {architecture.layers} layers"
        )
    if as_json:
        typer.echo(json.dumps([{**each.as_dict(), "fits": each.memory.total <= limit} for each in found]))
        return
    tokens = batch * found[0].length
    if len(found) == 1:
        details(found[0], tokens, machine)
    overview(found, limit, len(found) if show_all else _BEST, tokens)
    nodes = f", {machine.ranks_per_node} ranks a node" if machine.network else ", all ranks on one node"
    if (device or half) and machine.name != BY_HAND:
        typer.echo(
            f"Memory is that of GPUs, but times are those of processors: {printable(machine.name)}{nodes}.\n{_OF_GPUS}"
        )
    else:
        typer.echo(
            f"Times are predicted for {printable(machine.name)}" + (f"{nodes}." if machine is not TYPICAL else _MEASURE)
        )


_MEASURE = "; measure yours: mpirun -n N mpishard bench --output FILE, then --profile FILE."
# mpishard bench measures processors only.
_OF_GPUS = (
    "For times of GPUs give their speeds: --profile machine.toml with flops, bandwidth, latency and memory_bandwidth."
)


def _check_alone(context: typer.Context) -> None:
    """Raise ValueError if an option was given with --parameters that does not go with it."""
    if other := [option for name, option in _given(context) if name not in _WITH_PARAMETERS]:
        raise ValueError(
            "--parameters stands for a whole model, all ranks on the data axis and every ZeRO stage: "
            f"leave {', '.join(other)} out, or give --model in its place, not both"
        )


def _given(context: typer.Context) -> list[tuple[str, str]]:
    """Name and spelling of each option that was given."""
    options = {str(each.name): each.opts[0] for each in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options}
    return [(name, options[name]) for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def parse_bytes(text: str) -> float:
    """Parse ``4GB``, ``500 MB`` or ``1e9`` as bytes; factors are powers of 1000, or of 1024 with an i (GiB)."""
    plain = text.strip().lower().removesuffix("b")
    binary = plain.endswith("i")
    plain = plain.removesuffix("i")
    unit = plain[-1:] if plain[-1:] in _FACTORS and plain else ""
    try:
        value = float(plain.removesuffix(unit))
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise ValueError(f"--memory-limit is {text!r}; give a size such as 4GB, 500MB or 2GiB")
    factor = _FACTORS[unit]
    return value * (1024 ** round(math.log(factor, 1000)) if binary else factor)


def _zero_table(parameters: float, ranks: int, limit: float, as_json: bool) -> None:
    found = {stage: model_state_bytes(parameters, ranks, stage) for stage in _ZERO}
    if as_json:
        fits = {stage: count <= limit for stage, count in found.items()}
        typer.echo(json.dumps({"parameters": parameters, "ranks": ranks, "bytes": found, "fits": fits}))
        return
    output = console()
    output.print(
        f"{parameters:g} parameters on {ranks} data ranks, mixed precision, Adam (Rajbhandari et al. 2020, table 1)",
        style="bold",
    )
    made = new_table("ZeRO", "what", "bytes a rank", left=2)
    for stage, what in _ZERO.items():
        made.add_row(str(stage), what, ("!" if found[stage] > limit else "") + size(found[stage]))
    output.print(made)
    if over := sum(count > limit for count in found.values()):
        output.print(f"! {over} of {len(found)} stages need more than the limit of {size(limit)} a rank.")
