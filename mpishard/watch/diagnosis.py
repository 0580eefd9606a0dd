"""Who waits for whom, and why none goes on: pure functions of what ranks have answered.

A rank waits for the members of a communicator that are not in its collective, for the receiver of what it sends, or for
the sender of what it receives.  A rank that others wait for, and which itself does not wait, is the cause.  If all
wait, it is two calls that cannot meet, or a circle.  The calls are those of mpi4py, or of the axes of mpishard.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.watch.calls import ANY, AXIS, COLLECTIVE_ON_WIN, COLLECTIVES, NULL, OUTSIDE, PAIRS, RECEIVES, SENDS
from mpishard.watch.sampler import ENDED, FAILED, WAITS

_LEAST_S = 1.0  # shorter waits are normal
_MOST = 12  # groups that are listed
# Collectives that some ranks leave before others have come.
_LEFT_EARLY = frozenset("bcast broadcast scatter scatterv reduce gather gatherv scan exscan".split())


@dataclass(frozen=True)
class Finding:
    """Ranks (ascending) of which something is true, its kind, and a description without the ranks."""

    ranks: tuple[int, ...]
    kind: str
    text: str


@dataclass(frozen=True)
class Wait:
    """The call of MPI in which a rank waits, with peers as ranks of MPI_COMM_WORLD; None: not known, or not one."""

    rank: int
    op: str
    on: str
    members: tuple[int, ...]
    identity: str
    root: int | None
    dest: int | str | None
    source: int | str | None
    tag: int | str | None
    recvtag: int | str | None
    unreceived: tuple[tuple[int, int], ...]  # messages that have come with other tags: their sources and tags
    is_collective: bool
    number: str  # of a call of an axis; else empty
    place: str  # ``file:line``

    @property
    def same(self) -> tuple[str, int | None, str]:
        """What must be the same on all members of a collective, beside who they are."""
        return self.op, self.root, f"{self.on} {self.number}" if self.number else ""

    @property
    def collective(self) -> tuple[tuple[str, int | None, str], tuple[int, ...]]:
        """What all ranks that wait in one collective have in common: `same`, and its members, ascending."""
        return self.same, tuple(sorted(self.members))

    @property
    def what(self) -> str:
        op = f"{self.op} {self.number}" if self.number else self.op
        return f"{op} of {self.on}" if self.on else op


def diagnose(answers: Sequence[Mapping[str, Any]], absent: Mapping[int, str], ranks: int) -> list[Finding]:
    """The likely causes of a hang, the likeliest first; empty if no rank waits and none is lost.

    `answers` are from `mpishard.watch.sampler.Sampler`, at most one a rank; `absent` has the ranks without one, and the
    state of their processes.  Kinds: ``"failed"``, ``"absent"``, ``"file"`` (stuck in the file system), ``"mismatch"``
    (other collectives), ``"root"``, ``"communicator"``, ``"tag"``, ``"ended"`` (a missing collective), ``"send"`` and
    ``"receive"`` (without the other), ``"computes"``, ``"late"`` (has just come to a call), ``"outside"`` (for
    processes of another job), ``"cycle"``, ``"request"``, or ``"arrived"`` (all are there).
    """
    by_rank = {int(answer["rank"]): answer for answer in answers}
    waits = _waits(by_rank, ranks)
    failed = [rank for rank, answer in by_rank.items() if answer["state"] == FAILED]
    found = [Finding((rank,), "failed", f"failed: {by_rank[rank].get('error', '')}") for rank in failed]
    awaited = {rank: _awaited(wait, waits) for rank, wait in waits.items()}
    causes = sorted(set().union(*awaited.values()) - waits.keys())
    if not waits:
        lost = [Finding((rank,), "absent", f"is lost: {state}") for rank, state in sorted(absent.items())]
        return found + lost + [_in_file(by_rank[rank]) for rank in by_rank if by_rank[rank]["file"]]
    found += [Finding((rank,), "absent", f"is waited for: {absent[rank]}") for rank in causes if rank in absent]
    found += [_in_file(by_rank[rank]) for rank in causes if rank in by_rank and by_rank[rank]["file"]]
    running = [rank for rank in causes if rank in by_rank and by_rank[rank]["state"] not in (ENDED, FAILED)]
    running = [rank for rank in running if not by_rank[rank]["file"]]
    mismatches = _mismatches(waits)
    if not (running and any(wait.op.lower() in _LEFT_EARLY for wait in waits.values())):
        found += mismatches
    left = {rank: by_rank[rank].get("code") for rank in causes if rank in by_rank and by_rank[rank]["state"] == ENDED}
    found += _other_tags({rank: wait for rank, wait in waits.items() if not awaited[rank] & set(running)}, waits)
    found += _ended(left, waits, awaited)
    found += _unmatched(waits)
    found += [_running(by_rank[rank]) for rank in running]
    found += [_outside(wait) for rank, wait in waits.items() if OUTSIDE in awaited[rank]]
    if not found:
        found += _circle(waits, awaited)
    if not found:
        found += _all_there(waits)
        if any(finding.kind == "request" for finding in found):
            found[:0] = _elsewhere([answer for rank, answer in by_rank.items() if rank not in waits])
    return found


def _waits(by_rank: Mapping[int, Mapping[str, Any]], ranks: int) -> dict[int, Wait]:
    """The calls in which ranks wait; members that a rank could not tell are those of another rank at the same place."""
    waiting = {r: a for r, a in by_rank.items() if a["state"] == WAITS and a["seconds"] >= _LEAST_S and a["call"]}
    known = {_place(answer): answer["call"] for answer in waiting.values() if "size" in answer["call"]}
    everybody = tuple(range(ranks))
    found = {}
    for rank, answer in waiting.items():
        call = answer["call"]
        origin = call if "size" in call else known.get(_place(answer), {})
        members = tuple(origin.get("members") or everybody)
        kind, name = call["class"], call["op"].lower()

        def world(peer: Any, members: tuple[int, ...] = members) -> Any:
            return members[peer] if isinstance(peer, int) and 0 <= peer < len(members) else peer

        if kind == "Win":
            is_collective = name in COLLECTIVE_ON_WIN
        elif kind == AXIS:
            is_collective = name not in SENDS | RECEIVES
        else:
            is_collective = kind == "File" or name in COLLECTIVES | {"init", "init_thread", "finalize"}
        found[rank] = Wait(
            rank,
            call["op"],
            call["on"],
            members,
            str(origin.get("identity", "")),
            world(call.get("root")),
            world(call.get("dest")),
            world(call.get("source")),
            call.get("tag"),
            call.get("recvtag") if name in PAIRS else call.get("tag"),
            tuple((world(source), tag) for source, tag in call.get("unreceived", [])),
            is_collective,
            call.get("number", ""),
            _place(answer),
        )
    return found


def _awaited(wait: Wait, waits: Mapping[int, Wait]) -> set[int]:
    """The ranks for which one waits, and which are not in the call that it waits for."""
    if wait.is_collective:
        there = {rank for rank, other in waits.items() if other.is_collective and other.collective == wait.collective}
        return set(wait.members) - there
    peers = [peer for peer in (wait.dest, wait.source) if isinstance(peer, int)]
    if wait.source == ANY and wait.dest is None:
        peers = [rank for rank in wait.members if rank != wait.rank]
    return {peer for peer in peers if not (peer in waits and _meet(wait, waits[peer]))}


def _meet(one: Wait, other: Wait) -> bool:
    """Return True if two calls name each other; `_unmatched` compares their communicators and tags."""
    return (one.dest == other.rank and other.source in (one.rank, ANY)) or (
        other.dest == one.rank and one.source in (other.rank, ANY)
    )


def _in_file(answer: Mapping[str, Any]) -> Finding:
    text = f"is stuck in the file system for {answer['seconds']:.0f} s, in {answer['file']}, at {_place(answer)}"
    return Finding((answer["rank"],), "file", text)


def _running(answer: Mapping[str, Any]) -> Finding:
    kind, how = "computes", "computes"
    if answer["seconds"] >= _LEAST_S:
        how = f"is in one call for {answer['seconds']:.0f} s"
    elif answer["call"] is not None:
        kind, how = "late", f"has just come to {answer['call']['op']} of {answer['call']['on']}"
    step = f" in step {answer['step']}" if answer.get("step") else ""
    last = f"; its last call was {answer['recent'][-1]}" if answer.get("recent") else ""
    return Finding((answer["rank"],), kind, f"is waited for, and {how} at {_place(answer)}{step}{last}")


def _elsewhere(answers: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The ranks that compute while others wait for a request, which does not tell for whom."""
    here = [answer for answer in answers if answer["state"] not in (ENDED, FAILED)]
    here = [answer for answer in here if not answer["file"] and answer["call"] is None]
    if not here:
        return []
    ranks = tuple(sorted(answer["rank"] for answer in here))
    places = ", ".join(sorted({_place(answer) for answer in here})[:3])
    return [Finding(ranks, "computes", f"{_verb(ranks, 'compute')} at {places}, and may be waited for")]


def _outside(wait: Wait) -> Finding:
    text = f"waits in {wait.what} at {wait.place} for processes of another job, as Spawn makes them: ask those, too"
    return Finding((wait.rank,), "outside", text)


def _mismatches(waits: Mapping[int, Wait]) -> list[Finding]:
    """Members of one communicator that wait in different collectives of it, or with different roots."""
    collectives = [wait for wait in waits.values() if wait.is_collective]
    found = []
    for members in {wait.collective[1] for wait in collectives}:
        here = [wait for wait in collectives if wait.collective[1] == members]
        calls: dict[tuple[str, int | None, str], list[Wait]] = defaultdict(list)
        for wait in here:
            calls[wait.same].append(wait)
        if len(calls) < 2:
            continue
        by_size = sorted(calls.values(), key=lambda each: (-len(each), each[0].rank))
        ops = [op for op, *_ in calls]
        same_op = len({(op, number) for op, _, number in calls}) == 1
        odd = [wait.rank for each in by_size[1:] for wait in each]
        roots = {root for _, root, _ in calls} - {None}
        parts = [
            f"{_ranks(w.rank for w in each)} {_is(each)} in {each[0].what}"
            f"{f' with root {each[0].root}' * bool(roots and ops.count(each[0].op) > 1)} at {each[0].place}"
            for each in by_size
        ]
        rule = "must give the same root" if same_op else "must make the same collectives in one order"
        rule += ", and give the same root" * (not same_op and len(roots) > 1 and len(set(ops)) < len(ops))
        text = f"not with the others: {', '.join(parts)}; all ranks of a communicator {rule}"
        found.append(Finding(tuple(sorted(odd)), "root" if same_op else "mismatch", f"{_is(odd)} {text}"))
    return found or _other_communicators(collectives)


def _other_communicators(collectives: Sequence[Wait]) -> list[Finding]:
    """Ranks that make the same collective on communicators of other members, or on ones that overlap in a circle."""
    found = []
    for one, other in itertools.combinations(collectives, 2):
        missed = one.collective[1] != other.collective[1] and other.rank in one.members and one.rank in other.members
        if missed and one.op == other.op:
            odd = one if len(one.members) < len(other.members) else other
            both = (f"rank {w.rank} in {w.what} ({len(w.members)} ranks) at {w.place}" for w in (one, other))
            text = f"is in the same collective of another communicator: {', '.join(both)}"
            found.append(Finding((odd.rank,), "communicator", text))
    return found[:1]


def _ended(
    ended: Mapping[int, int | None], waits: Mapping[int, Wait], awaited: Mapping[int, set[int]]
) -> list[Finding]:
    """Ranks that have ended their program (with which code) without what others wait for; those with an error first."""
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, code in ended.items():
        groups[not code, tuple(other for other in sorted(awaited) if rank in awaited[other])].append(rank)
    found = []
    for (in_order, others), ranks in sorted(groups.items()):
        waiting = [waits[other] for other in others]
        collectives = [wait for wait in waiting if wait.is_collective]
        first, who = (collectives or waiting)[0], _ranks(others)
        call = f"{first.what} at {first.place}"
        if collectives:
            kind, text = "ended", f"{call}, in which {who} {_verb(others, 'wait')}: a call is missing"
        elif first.dest in ranks:
            kind, text = "send", f"receiving what {who} {_verb(others, 'send')} ({call}): a send without a receive"
        else:
            kind, text = "receive", f"sending what {who} {_verb(others, 'wait')} for ({call}): a receive without a send"
        how = "" if in_order else f" with code {ended[ranks[0]]}"
        has, their = ("have", "their programs") if len(ranks) > 1 else ("has", "its program")
        text = f"{has} ended {their}{how} without {text}"
        found.append(Finding(tuple(ranks), kind, text))
    return found


def _unmatched(waits: Mapping[int, Wait]) -> list[Finding]:
    """Pairs of a send and a receive that name each other, and do not meet."""
    found = []
    for send, receive in itertools.permutations(waits.values(), 2):
        if send.dest != receive.rank or receive.source != send.rank:
            continue
        if sorted(send.members) != sorted(receive.members) or send.identity != receive.identity:
            both = (f"rank {wait.rank} in {wait.what} at {wait.place}" for wait in (send, receive))
            text = f"send and receive on two communicators ({send.on} and {receive.on}): {', '.join(both)}"
            found.append(Finding(tuple(sorted((send.rank, receive.rank))), "communicator", text))
    return found


def _other_tags(receives: Mapping[int, Wait], waits: Mapping[int, Wait]) -> list[Finding]:
    """Receives of one tag to which others are sent, or have come."""
    found = []
    for receive in receives.values():
        sends = [w for w in waits.values() if w.dest == receive.rank and receive.source in (w.rank, ANY)]
        if receive.recvtag in (None, ANY) or any(send.tag in (None, receive.recvtag) for send in sends):
            continue
        sent: dict[str, list[int]] = defaultdict(list)
        for send in sends:
            sent[f"in {send.what} with tag {send.tag} at {send.place}"].append(send.rank)
        for source, tag in receive.unreceived:
            if source not in (OUTSIDE, *(send.rank for send in sends)):
                sent[f"sent tag {tag}"].append(source)
        if sent:
            senders = ", ".join(f"{_ranks(ranks)} {what}" for what, ranks in sent.items())
            ranks = tuple(sorted({receive.rank, *itertools.chain(*sent.values())}))
            own = f"rank {receive.rank} in {receive.what} with tag {receive.recvtag} at {receive.place}"
            found.append(Finding(ranks, "tag", f"name other tags: {own}, {senders}"))
    return found


def _circle(waits: Mapping[int, Wait], awaited: Mapping[int, set[int]]) -> list[Finding]:
    """A circle of waits, named by the message that is missing where a collective is part of it."""
    cycle = shortest_cycle(awaited)
    if not cycle:
        return []
    chain = ", ".join(
        f"{rank} for {other} in {waits[rank].what} at {waits[rank].place}"
        for rank, other in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    )
    here = [waits[rank] for rank in cycle]
    messages = [wait for wait in here if not wait.is_collective]
    if messages and len(messages) < len(here):
        first = messages[0]
        kind = "send" if isinstance(first.dest, int) and first.op.lower() not in PAIRS else "receive"
        what = "a send without a receive" if kind == "send" else "a receive without a send"
        ranks = (first.rank,)
        text = f"waits in {first.what} for a rank that is in a collective, and waits for it: {what} (waits: {chain})"
        return [Finding(ranks, kind, text)]
    why = "a deadlock"
    if all(wait.op.lower() in SENDS for wait in here):
        why = "all send before any receives"
    elif all(wait.op.lower() in RECEIVES for wait in here):
        why = "all receive before any sends"
    kind = "cycle"
    text = f"waits for itself: {chain}" if len(cycle) == 1 else f"wait for each other in a circle ({chain}): {why}"
    return [Finding(tuple(cycle), kind, text)]


def _all_there(waits: Mapping[int, Wait]) -> list[Finding]:
    """What is left where no rank waits for one that is elsewhere."""
    collectives = [wait for wait in waits.values() if wait.is_collective]
    names = {wait.identity for wait in collectives} | {wait.on for wait in collectives}
    ranks = tuple(sorted(wait.rank for wait in collectives))
    if collectives and len({wait.identity for wait in collectives} - {""}) > 1 and len(names) > 1:
        parts: dict[tuple[str, str], list[int]] = defaultdict(list)
        for wait in collectives:
            parts[wait.identity, f"{wait.what} at {wait.place}"].append(wait.rank)
        each = "; ".join(f"{_ranks(here)} in {what}" for (_, what), here in parts.items())
        return [Finding(ranks, "communicator", f"are in one collective, but not of one communicator: {each}")]
    others = tuple(sorted(wait.rank for wait in waits.values() if not wait.is_collective))
    if others:
        text = "a send or receive that was started has no counterpart, or is of another tag or communicator"
        return [Finding(others, "request", f"{_verb(others, 'wait')} for a message that does not come: {text}")]
    text = "have all come to one collective: sizes or types may differ, or the network is slow or broken"
    return [Finding(ranks, "arrived", text)]


def shortest_cycle(awaited: Mapping[int, set[int]]) -> list[int]:
    """A shortest cycle in a graph of waits: who waits for whom."""
    best: list[int] = []
    for first in sorted(awaited):
        ways, seen = [[first]], {first}
        while ways and not (best and len(ways[0]) >= len(best)):
            way = ways.pop(0)
            for following in sorted(awaited.get(way[-1], ())):
                if following == first:
                    best, ways = way, []
                    break
                if following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return best


# -- text --------------------------------------------------------------------------------------------------------------


def report(answers: Sequence[Mapping[str, Any]], absent: Mapping[int, str], ranks: int) -> list[str]:
    """Lines that say where the ranks stand, alike ones together, and what is likely wrong."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for answer in sorted(answers, key=lambda each: int(each["rank"])):
        groups[_head(answer), _place(answer)].append(answer)
    hosts = {answer["rank"]: answer["host"] for answer in answers}
    lines = []
    for members in sorted(groups.values(), key=lambda each: -len(each))[:_MOST]:
        lines += _group(members, hosts)
    if len(groups) > _MOST:
        lines.append(f"... and {len(groups) - _MOST} more groups")
    by_state: dict[str, list[int]] = defaultdict(list)
    for rank, state in sorted(absent.items()):
        by_state[state].append(rank)
    lines += [f"{_ranks(each)}: {state}" for state, each in list(by_state.items())[:_MOST]]
    causes = diagnose(answers, absent, ranks)
    lines += [f"likely cause: {_ranks(each.ranks)}{_on(each.ranks, hosts)} {each.text}" for each in causes[:3]]
    if not causes:
        lines.append("no rank has waited for long: the program goes on, computes, or has ended")
    return lines


def _head(answer: Mapping[str, Any]) -> str:
    """What ranks in one group have in common, beside the place."""
    if answer["state"] == FAILED:
        return f"failed: {answer.get('error', '')}"
    if answer["state"] == ENDED:
        code = f" with code {answer.get('code')}" if answer.get("code") else ""
        return f"ended{code}"
    call = answer["call"]
    if answer["state"] != WAITS or call is None:
        return f"in {answer['file']}" if answer["file"] else "running" if answer["stack"] else "started"
    size = f" ({call['size']} ranks)" if "size" in call else ""
    on = f" of {call['on']}{size}" if call["on"] else ""
    root = f", root {call['root']}" if call.get("root") is not None else ""
    number, buffer = f" {call['number']}" if call.get("number") else "", call.get("buffer")
    return f"in {call['op']}{number}{on}{root}{f', {buffer}' if buffer else ''}"


def _group(members: Sequence[Mapping[str, Any]], hosts: Mapping[int, str]) -> list[str]:
    first = members[0]
    longest = max(answer["seconds"] for answer in members)
    since = f" for {longest:.0f} s" if longest >= _LEAST_S else ""
    peers = [_peers(answer["call"]) for answer in members if answer["call"]]
    several = len(set(peers)) > 1
    ranks = [answer["rank"] for answer in members]
    line = f"{_ranks(ranks)}{_on(ranks, hosts)}: {_head(first)}{since}{'' if several or not peers else peers[0]}"
    if several:
        line += "".join(f"; rank {a['rank']}{peer}" for a, peer in list(zip(members, peers, strict=False))[:_MOST])
    stack = _users(first["stack"])
    return [line, *(f"    {_path(f['file'])}:{f['line']} ({f['name']})  {f['text']}" for f in stack[:2])]


def _peers(call: Mapping[str, Any]) -> str:
    parts = [(" to rank", call.get("dest")), (" from rank", call.get("source")), (", tag", call.get("tag"))]
    return "".join(f"{word} {value}" for word, value in parts if value not in (None, NULL))


def _users(stack: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The frames of the program itself; all of them if they are all of libraries."""
    return [frame for frame in stack if frame["own"]] or list(stack)


def _place(answer: Mapping[str, Any]) -> str:
    """``file:line`` of the innermost frame of the program itself."""
    frames = _users(answer["stack"])
    return f"{_path(frames[0]['file'])}:{frames[0]['line']}" if frames else "an unknown line"


def _path(file: str) -> str:
    """A path as short as it is seen from the working directory."""
    return file.removeprefix(f"{os.getcwd()}{os.sep}")


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2-5``."""
    every = sorted(set(ranks))
    runs = [list(run) for _, run in itertools.groupby(enumerate(every), lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 2 else ", ".join(str(rank) for _, rank in run) for run in runs]
    return f"rank{'s' if len(every) > 1 else ''} {', '.join(parts)}"


def _on(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """The hosts of ranks, such as `` on n1, n2``; empty if the job has one host, or these ranks all of several."""
    here, everywhere = ({hosts[rank] for rank in some if rank in hosts} for some in (ranks, hosts))
    first = sorted(here)[:_MOST]
    return f" on {', '.join(first)}{', ...' * (len(here) > _MOST)}" if here and here != everywhere else ""


def _verb(some: Sequence[Any], verb: str) -> str:
    return verb if len(some) > 1 else f"{verb}s"


def _is(some: Sequence[Any]) -> str:
    return "are" if len(some) > 1 else "is"
