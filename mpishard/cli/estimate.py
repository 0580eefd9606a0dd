"""``mpishard estimate``: the cost of each layout of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.arguments import printable
from mpishard.cli.estimate_startup import estimate_startup
from mpishard.cli.estimate_text import console, details, new_table, overview, size
from mpishard.cli.machine import Network, Speeds
from mpishard.estimate import TYPICAL, Cluster, Workload, layouts, model_state_bytes, table
from mpishard.estimate.layouts import STAGES
from mpishard.nn.architecture import Architecture, DecoderArchitecture, LlamaArchitecture
from mpishard.pipeline.schedule import SCHEDULES

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_ZERO = {
    0: "nothing sharded",
    1: "optimizer state sharded",
    2: "and gradients",
    3: "and parameters",
}


# Options allowed together with --parameters, which replaces those of the model and lists all ZeRO stages.
_WITH_PARAMETERS = {"parameters", "ranks", "memory_limit", "as_json"}


# Options that --startup takes: assumptions, some of which mean the same elsewhere, and others.
_ASSUMED = {each.name for each in fields(Cluster)}
_ELSEWHERE = {"parameters", "ranks_per_node"}
_WITH_STARTUP = {
    *("startup", "ranks", "as_json", "profile", "flops", "bandwidth", "latency", "memory_bandwidth"),
    *("network_bandwidth", "network_latency"),
}


def _assumed(name: str, what: str) -> Any:
    """The option of an assumption of --startup, with its default."""
    return typer.Option(help=f"{what} ({getattr(Cluster, name):g}).")


def estimate(
    context_of_command: typer.Context,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Size of the vocabulary.")] = None,
    context: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    width: Annotated[int | None, typer.Option(help="Channels.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    key_value_heads: Annotated[
        int | None, typer.Option(help="A model like Llama, with so many heads of keys and values.")
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="A model like Llama, with so many channels in its MLP.")] = None,
    tied: Annotated[bool, typer.Option("--tied", help="The head uses the table of the embedding.")] = False,
    shards: Annotated[int, typer.Option(help="Slices by which the model is defined.")] = 1,
    parameters: Annotated[
        float | None, typer.Option(help="Instead of a model: so many parameters, and the memory of each ZeRO stage.")
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
    profile: Annotated[Path | None, typer.Option(help="What mpishard bench measured.")] = None,
    flops: Annotated[float | None, typer.Option(help="Instead: operations a second of a rank.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Instead: bytes a second between ranks.")] = None,
    latency: Annotated[float | None, typer.Option(help="Instead: seconds of a short message.")] = None,
    memory_bandwidth: Annotated[float | None, typer.Option(help="Bytes a second of a rank's memory.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node, with the two below.")] = None,
    network_bandwidth: Annotated[float | None, typer.Option(help="Bytes a second of a rank between nodes.")] = None,
    network_latency: Annotated[float | None, typer.Option(help="Seconds of a short message between nodes.")] = None,
    startup: Annotated[
        bool,
        typer.Option(
            "--startup",
            help="Instead of layouts: start, step, checkpoint and healing on 1,000 to 100,000 ranks (or --ranks), and "
            "what breaks first.  The start is measured here; the options below are assumptions.",
        ),
    ] = False,
    cores_per_node: Annotated[int | None, _assumed("cores_per_node", "Cores of a node")] = None,
    opens_per_second: Annotated[
        float | None, _assumed("opens_per_second", "Opens and questions that the file system answers a second")
    ] = None,
    file_bandwidth: Annotated[float | None, _assumed("file_bandwidth", "Bytes a second of the file system")] = None,
    days_between_failures: Annotated[
        float | None, _assumed("days_between_failures", "Days between two deaths of one node")
    ] = None,
    detection_seconds: Annotated[
        float | None, _assumed("detection_seconds", "Seconds until all ranks know of a death")
    ] = None,
    step_seconds: Annotated[float | None, _assumed("step_seconds", "Seconds of computing a step")] = None,
    rows: Annotated[int, typer.Option(help="Most lines of the table: the best layouts.")] = 10,
    show_all: Annotated[bool, typer.Option("--all", help="All layouts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Compare the layouts of a model on so many ranks: time of a step, memory and bytes sent of a rank.

    One that is left alone by --data, --tensor, --pipeline, --zero and --schedule is shown in detail.
    """
    limit = math.inf if memory_limit is None else parse_bytes(memory_limit)
    given = {option: name for name, option in _given(context_of_command)}
    if startup:
        if other := [option for option, name in given.items() if name not in {*_WITH_STARTUP, *_ASSUMED}]:
            raise ValueError(f"--startup is about many ranks, not about layouts: leave {', '.join(other)} out")
        machine = Speeds(profile, flops, bandwidth, latency, memory_bandwidth).machine()
        assumed = {name: context_of_command.params[name] for name in given.values() if name in _ASSUMED}
        if machine.network:
            assumed.setdefault("ranks_per_node", machine.ranks_per_node)
        cluster = Cluster(**assumed)
        if network_bandwidth is not None or network_latency is not None:
            machine = Network(cluster.ranks_per_node, network_bandwidth, network_latency).between(machine)
        estimate_startup(ranks, cluster, machine, as_json)
        return
    if other := [option for option, name in given.items() if name in _ASSUMED - _ELSEWHERE]:
        raise ValueError(f"{', '.join(other)}: only for --startup")
    if ranks is None:
        raise ValueError("the number of ranks is missing: give --ranks")
    if parameters is not None:
        _check_alone(context_of_command)
        _zero_table(parameters, ranks, limit, as_json)
        return
    sizes = {"vocabulary": vocabulary, "context": context, "width": width, "layers": layers, "heads": heads}
    llama = {"key_value_heads": key_value_heads, "hidden": hidden}
    architecture = _model(sizes, llama, tied, shards)
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"there is no schedule {schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if zero not in (None, *STAGES):
        raise ValueError(f"there is no ZeRO stage {zero}; choose one of 0, 1, 2, 3")
    if dtype not in ("float32", "float64"):
        raise ValueError(f"--dtype is {dtype!r}; choose float32 or float64")
    machine = Speeds(profile, flops, bandwidth, latency, memory_bandwidth).machine()
    machine = Network(ranks_per_node, network_bandwidth, network_latency).between(machine)
    for name, count in (("batch", batch), ("rows", rows)):
        if count is not None and count < 1:
            raise ValueError(f"--{name} is {count}; it must be at least 1")
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
        raise ValueError(
            f"no layout of {ranks} ranks is left: the sizes must multiply out to the ranks, the tensor size must "
            f"divide {f'{shards} shards' if shards > 1 else f'{architecture.query_groups} heads'}, and every stage "
            f"needs one of {layers} layers"
        )
    if as_json:
        typer.echo(json.dumps([{**each.as_dict(), "fits": each.memory.total <= limit} for each in found]))
        return
    tokens = batch * found[0].length
    if len(found) == 1:
        details(found[0], tokens, machine)
    overview(found, limit, len(found) if show_all else rows, tokens)
    nodes = f", {machine.ranks_per_node} ranks a node" if machine.network else ", all ranks on one node"
    if (device or half) and flops is None:
        typer.echo(
            f"Memory is that of GPUs, but times are those of processors: {printable(machine.name)}{nodes}.\n{_OF_GPUS}"
        )
    else:
        typer.echo(
            f"Times are predicted for {printable(machine.name)}" + (f"{nodes}." if machine is not TYPICAL else _MEASURE)
        )


_MEASURE = "; measure yours: mpirun -n N mpishard bench --output FILE, then --profile FILE."
# mpishard bench measures processors only.
_OF_GPUS = "For times of GPUs give their speeds: --flops, --bandwidth, --latency and --memory-bandwidth."


def _model(
    sizes: Mapping[str, int | None], llama: Mapping[str, int | None], tied: bool, shards: int
) -> DecoderArchitecture:
    """The model of these options, like Llama if one of those is given; ValueError if any of the sizes is missing."""
    if missing := [f"--{name}" for name, value in sizes.items() if value is None]:
        raise ValueError(f"a model needs {', '.join(missing)} too (or --parameters for ZeRO alone)")
    vocabulary, context, width, layers, heads = (value for value in sizes.values() if value is not None)
    given = vocabulary, context, width, layers, heads
    if any(value is not None for value in llama.values()):
        return LlamaArchitecture(
            *given, key_value_heads=llama["key_value_heads"], hidden=llama["hidden"], tied=tied, shards=shards
        )
    return Architecture(*given, tied, shards)


def _check_alone(context: typer.Context) -> None:
    """Raise ValueError if an option was given with --parameters that does not go with it."""
    if other := [option for name, option in _given(context) if name not in _WITH_PARAMETERS]:
        raise ValueError(
            "--parameters stands for a whole model, all ranks on the data axis and every ZeRO stage: "
            f"leave {', '.join(other)} out, or give --vocabulary, --context, ... in its place, not both"
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
