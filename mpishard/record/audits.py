"""What the record of a run has of its audits, and texts for it: what an audit spends, and what it has found.

`mpishard.training.audit` writes both: the field ``audit`` of a start, and lines of ``audits.jsonl``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpishard.record.reading import is_number

# What has come of a finding, and texts for it.
PUT_OUT, MENDED, STOPPED = "put out", "mended", "stopped"
SUMS = "sums"  # the field `kind` of sums over ranks
_OUTCOMES = {
    PUT_OUT: "it works no more",
    MENDED: "it took those of the others",
    STOPPED: "the run has ended",
}


def promise(audit: Mapping[str, Any]) -> str:
    """What an audit spends, and when it sees what, by the field ``audit`` of a start."""
    share, mean, most = (audit.get(name) for name in ("share", "mean_steps", "most_steps"))
    if mean is None or most is None:
        return "there is one worker, which no other one can check"
    if share is None:
        return (
            f"what all workers hold is compared every {audit['every']} steps; a bit that flips in memory is seen after "
            f"{mean:.3g} steps on average, {most:.6g} at the latest"
        )
    if share == 1:
        return "all micro-batches and sums are computed twice; what a worker computes wrongly is seen before it is used"
    return (
        f"{100 * share:.3g} % of the micro-batches are computed twice; a worker that is always wrong is seen in step "
        f"{mean:.3g} on average, {most:.6g} at the latest"
    )


def known_promise(audit: Any) -> dict[str, Any] | None:
    """The field ``audit`` of a start, if `promise` can take it; None without an audit."""
    if not isinstance(audit, dict) or not (is_number(audit.get("share")) or is_number(audit.get("every"))):
        return None
    return audit if all(v is None or is_number(v) for v in audit.values()) else None


def known_findings(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of ``audits.jsonl`` that `described` can take."""
    return [line for line in lines if _is_finding(line)]


def _is_finding(line: Mapping[str, Any]) -> bool:
    part = is_number(line.get("micro_batch")) or isinstance(line.get("kind"), str)
    who = [line.get("wrong"), line.get("differ", [])]
    if not (part and isinstance(line.get("step"), int) and all(isinstance(each, list) for each in who)):
        return False
    processes = [process for each in who for process in each]
    return bool(processes) and all(isinstance(p, dict) and {"rank", "host", "pid"} <= p.keys() for p in processes)


def described(finding: Mapping[str, Any]) -> str:
    """A line of ``audits.jsonl`` in words."""
    processes = finding["wrong"] or finding["differ"]
    who = " and ".join(f"rank {each['rank']} on {each['host']} (pid {each['pid']})" for each in processes)
    wrongly = "wrongly" if finding["wrong"] else "differently"
    if "micro_batch" in finding:
        what = f"computed micro-batch {finding['micro_batch']} {wrongly}"
    elif finding["kind"] == SUMS:
        what = f"added up gradients {wrongly}"
    else:
        what = f"held {'wrong' if finding['wrong'] else 'different'} {finding['kind']}"
    what += "" if finding["wrong"] else ", and no majority says which is right"
    right = f"; right after step {finding['last_right']}" if finding.get("last_right") else ""
    ended = _OUTCOMES.get(str(finding.get("outcome")), "")
    return f"step {finding['step']}: {who} {what}{right}{f'; {ended}' if ended else ''}"
