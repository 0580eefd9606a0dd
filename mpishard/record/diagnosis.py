"""Finds out why a run hangs, from the answers of its processes: which rank waits for which, and which is missing.

A rank in a collective waits for the members that are not in it.  A rank for which others wait, and which itself waits
for no rank, is the cause; if all ranks wait, the cause is a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LEAST_S = 1.0  # shorter waits are normal


@dataclass(frozen=True)
class Finding:
    """Ranks (ascending) in the same state, its `kind` as `diagnose` says, and a description without the ranks."""

    ranks: tuple[int, ...]
    kind: str
    text: str


def diagnose(answers: Sequence[Mapping[str, Any]], silent: Mapping[int, str]) -> list[Finding]:
    """Diagnose a run from the answers of its ranks.

    `answers` are from `mpishard.record.stack_reporter.StackReporter.answer`, at most one per rank; `silent` has the
    ranks that do not answer, and the state of their process.  Kinds: ``"waits"``, ``"missing"`` (runs code while others
    wait), ``"silent"``, ``"mismatch"`` (members of one communicator wait in different calls), ``"cycle"``, or
    ``"runs"`` if no rank waits for long.
    """
    by_rank = {int(answer["rank"]): answer for answer in answers}
    waiting = {rank: a["call"] for rank, a in by_rank.items() if a["call"] and a["call"]["seconds"] >= _LEAST_S}
    if not waiting:
        running = [Finding((rank,), "runs", _place(answer)) for rank, answer in sorted(by_rank.items())]
        return [*running, *_silent(silent, set())]
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank, call in sorted(waiting.items()):
        groups[_key(rank, call)].append(rank)
    findings = [_waits(ranks, waiting) for ranks in groups.values()]
    wanted = {rank: _awaited(rank, waiting, groups) for rank in waiting}
    awaited = set().union(*wanted.values())
    findings += _mismatches(waiting, wanted)
    causes = sorted(awaited - waiting.keys())
    findings += [
        Finding((rank,), "missing", f"is waited for, and {_place(by_rank[rank])}") for rank in causes if rank in by_rank
    ]
    findings += _silent(silent, awaited)
    if not causes and not any(finding.kind == "mismatch" for finding in findings):
        cycle = _cycle(wanted)
        if cycle:
            chain = ", ".join(f"{rank} for {other}" for rank, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
            findings.append(Finding(tuple(cycle), "cycle", f"wait for each other in a circle ({chain}): a deadlock"))
    return findings


def _key(rank: int, call: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is the same for all ranks that wait in the same call."""
    alone = (rank,) if call["op"] in ("send", "recv") else ()
    return call["axis"], tuple(call["members"]), call["op"], call["sequence"], *alone


def _awaited(rank: int, waiting: Mapping[int, Any], groups: Mapping[Any, list[int]]) -> set[int]:
    """The members of the call in which `rank` waits that are not in that call."""
    call = waiting[rank]
    there = set(groups[_key(rank, call)])
    return {member for member in call["members"] if member not in there}


def _waits(ranks: list[int], waiting: Mapping[int, Any]) -> Finding:
    call = waiting[ranks[0]]
    longest = max(waiting[rank]["seconds"] for rank in ranks)
    sites = {waiting[rank]["site"] for rank in ranks}
    others = "" if len(sites) == 1 else f" (others at {', '.join(sorted(sites - {call['site']}))})"
    missing = sorted(set(call["members"]) - set(ranks))
    verb = "wait" if len(ranks) > 1 else "waits"
    without = f", without {_ranks(missing)}" if missing else ", all are there"
    return Finding(tuple(ranks), "waits", f"{verb} {longest:.0f} s in {_call(call)}{others}{without}")


def _mismatches(waiting: Mapping[int, Any], wanted: Mapping[int, set[int]]) -> list[Finding]:
    """Members of a communicator that wait in different calls on it, since their scripts took different paths."""
    found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for rank, others in wanted.items():
        call = waiting[rank]
        for other in others & waiting.keys():
            there = waiting[other]
            if (there["axis"], there["members"]) == (call["axis"], call["members"]) and call["op"] not in (
                "send",
                "recv",
            ):
                found[call["axis"], tuple(call["members"])] |= {rank, other}
    findings = []
    for (axis, _), ranks in found.items():
        calls = "; ".join(f"rank {rank} in {_call(waiting[rank])}" for rank in sorted(ranks))
        text = f"are in different calls of the {axis} axis, which can never meet: {calls}"
        findings.append(Finding(tuple(sorted(ranks)), "mismatch", text))
    return findings


def _cycle(wanted: Mapping[int, set[int]]) -> list[int]:
    """A shortest cycle in the graph of waits."""
    best: list[int] = []
    for first in sorted(wanted):
        ways, seen = [[first]], {first}
        while ways and not (best and len(ways[0]) >= len(best)):
            way = ways.pop(0)
            for following in sorted(wanted.get(way[-1], ())):
                if following == first:
                    best, ways = way, []
                    break
                if following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return best


def _silent(silent: Mapping[int, str], awaited: Any) -> list[Finding]:
    return [
        Finding((rank,), "silent", f"{'is waited for, and ' if rank in awaited else ''}does not answer: {what}")
        for rank, what in sorted(silent.items())
    ]


def _place(answer: Mapping[str, Any]) -> str:
    stack = answer["stack"]
    last = f"; its last collective was {_call(answer['recent'][-1])}" if answer["recent"] else ""
    return f"runs {' < '.join(stack[:3]) or 'unknown code'} in step {answer['step']}{last}"


def _call(call: Mapping[str, Any]) -> str:
    label = f" [{call['label']}]" if call["label"] else ""
    what = f"{call['axis']}.{call['op']} #{call['sequence']} of {call['elements']} {call['dtype']}{label}"
    return f"{what} called at {call['site']}" if call["site"] else what


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
