"""``mpishard estimate --startup``: the time of start, step, checkpoint and healing on very many ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer

from mpishard.cli.estimate_text import console, new_table, print_table, seconds, size
from mpishard.estimate import TYPICAL, Break, Cluster, Costs, MachineProfile, StartParts, breaks, costs, measure_start
from mpishard.estimate.many_ranks import LIMITS, THINGS

_RANKS = (10**3, 10**4, 10**5)
_WAYS_OUT = {
    "processor time": "give each rank a core of its own",
    "opening files": "keep Python and its packages on the nodes' own disks, or in one image file",
    "reading files": "keep Python and its packages on the nodes' own disks",
    "bytes of gradients and parameters": "larger batches, compressed gradients, or tensor and pipeline ranks",
    "rounds of collectives": "larger batches, or buckets (minimum_parameter_group_size)",
    "writing": "fewer checkpoints, or a faster file system",
    "creating files": "fewer checkpoints, or fewer ranks a node with more threads each",
}


def estimate_startup(ranks: int | None, cluster: Cluster, machine: MachineProfile, as_json: bool) -> None:
    """Measure the start of one rank here, and print the costs on `ranks` ranks, or on 10^3, 10^4 and 10^5 (None).

    `cluster` has what is assumed, `machine` its links; `as_json` prints JSON in place of tables.  Raises ValueError for
    another number of ranks, a machine without links, or where the start cannot be measured.
    """
    counts = _RANKS if ranks is None else (ranks,)
    for count in counts:
        costs(count, StartParts(0.0, 0, 0, 0, 0.0), cluster, machine)  # before it measures for seconds
    parts = measure_start()
    found, broken = [costs(count, parts, cluster, machine) for count in counts], breaks(parts, cluster, machine)
    if as_json:
        figures = {
            "measured": asdict(parts),
            "assumed": asdict(cluster),
            "links": machine.name,
            "costs": [asdict(each) for each in found],
            "breaks": [{**asdict(each), "limit": LIMITS[each.what]} for each in broken],
        }
        typer.echo(json.dumps(figures))
        return
    _table(found)
    _measured(parts)
    _assumed(cluster)
    typer.echo(_links(machine))
    for place, each in enumerate(each for each in broken if each.ranks):
        way_out = f"  A way out: {_WAYS_OUT[each.part]}." if each.part in _WAYS_OUT else ""
        typer.echo(f"{'Then' if place else 'What breaks first'}: {_break(each)}.{way_out}")
    if holding := [each.what for each in broken if not each.ranks]:
        typer.echo(f"Up to ten million ranks nothing breaks of: {', '.join(holding)}.")


def _table(found: Sequence[Costs]) -> None:
    output = console()
    output.print("predicted times on many ranks", style="bold")
    made = new_table("ranks", *(f"{each.ranks:,}" for each in found))
    for what in THINGS:
        times = [getattr(each, what) for each in found]
        made.add_row(what, *(seconds(sum(each.values())) for each in times), style="bold")
        for part in times[0]:
            made.add_row(f"  {part}", *(seconds(each[part]) for each in times))
    made.add_row("days between deaths", *(f"{1 / each.deaths_per_second / 86400:.3g}" for each in found), style="bold")
    print_table(output, made)


def _measured(parts: StartParts) -> None:
    output = console()
    output.print("\nmeasured here, of one rank until its first step", style="bold")
    made = new_table("what", "figure")
    made.add_row("processor time", seconds(parts.processor_seconds))
    made.add_row("files that it opens", f"{parts.opens:,}")
    made.add_row("their sizes together", size(parts.bytes_read))
    made.add_row("questions where files are", f"{parts.lookups:,}")
    made.add_row("reading a small object of another rank", seconds(parts.object_seconds))
    print_table(output, made)


def _assumed(cluster: Cluster) -> None:
    output = console()
    output.print("\nassumed, not measured", style="bold")
    made = new_table("what", "figure", "option")
    made.columns[2].justify = "left"
    for what, figure, option in (
        ("cores of a node", str(cluster.cores_per_node), "cores-per-node"),
        ("ranks of a node", str(cluster.ranks_per_node), "ranks-per-node"),
        ("opens and questions of all ranks a second", f"{cluster.opens_per_second:,.0f}", "opens-per-second"),
        ("file system a second, each file once a node", size(cluster.file_bandwidth), "file-bandwidth"),
        ("days between two deaths of one node", f"{cluster.days_between_failures:g}", "days-between-failures"),
        ("until all know of a death", seconds(cluster.detection_seconds), "detection-seconds"),
        ("parameters: data parallel, float32, Adam", f"{cluster.parameters:.3g}", "parameters"),
        ("computing of a step", seconds(cluster.step_seconds), "step-seconds"),
    ):
        made.add_row(what, figure, f"--{option}")
    print_table(output, made)


def _links(machine: MachineProfile) -> str:
    if machine is TYPICAL:
        found = "a typical core; measure yours: mpirun -n N mpishard bench --output FILE, then --profile FILE"
    elif not machine.network:
        found = f"{machine.name}, which knows no network: nodes are as near to each other as ranks of one node"
    else:
        found = machine.name
    return f"\nLinks are those of {found}.\nNot in it: the launcher, MPI's own start, and waiting for slower ranks."


def _break(found: Break) -> str:
    where = (
        f"{found.what}, on {found.ranks:,} rank{'s' * (found.ranks > 1)}"
        if found.ranks
        else f"nothing below ten million ranks; {found.what}"
    )
    return f"{where}: it {LIMITS[found.what]}; {found.share:.0%} of that is {found.part}"
