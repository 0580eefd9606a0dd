"""Who is to blame for a run that does not go on, from what its ranks say."""

from __future__ import annotations

from typing import Any

from mpishard.record.stacks import diagnose


def call(axis: str, op: str, sequence: int, members: list[int], seconds: float = 30.0, site: str = "a.py:1 (f)") -> Any:
    return {
        "axis": axis,
        "sequence": sequence,
        "op": op,
        "dtype": "float32",
        "elements": 10,
        "label": "",
        "site": site,
        "members": members,
        "seconds": seconds,
    }


def answer(rank: int, waits: Any = None, stack: str = "train.py:7 (slow)") -> dict[str, Any]:
    return {"rank": rank, "step": 5, "call": waits, "recent": [], "stack": [stack]}


def kinds_of(answers: list[dict[str, Any]], silent: dict[int, str] | None = None) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in diagnose(answers, silent or {})]


ALL = [0, 1, 2, 3]


def test_one_that_computes_is_missing() -> None:
    answers = [answer(rank, call("data", "all_reduce", 7, ALL)) for rank in (0, 1, 3)] + [answer(2)]
    assert kinds_of(answers) == [("waits", (0, 1, 3)), ("missing", (2,))]
    texts = [finding.text for finding in diagnose(answers, {})]
    assert "wait 30 s in data.all_reduce #7" in texts[0] and "without rank 2" in texts[0]
    assert "runs train.py:7 (slow)" in texts[1]


def test_one_that_is_gone_is_named() -> None:
    answers = [answer(rank, call("data", "all_reduce", 7, ALL)) for rank in (0, 1, 3)]
    assert kinds_of(answers, {2: "process 5 on n1 is gone"}) == [("waits", (0, 1, 3)), ("silent", (2,))]


def test_the_cause_is_found_behind_others_that_wait() -> None:
    """Rank 0 waits for 1, which waits for 3, which computes; 2 waits for 0."""
    answers = [
        answer(0, call("data", "all_reduce", 3, [0, 1])),
        answer(1, call("tensor", "all_reduce", 9, [1, 3])),
        answer(2, call("world", "recv", 4, [2, 0])),
        answer(3),
    ]
    assert [one for one in kinds_of(answers) if one[0] != "waits"] == [("missing", (3,))]


def test_different_calls_of_one_axis_are_a_mismatch() -> None:
    answers = [answer(0, call("data", "all_reduce", 7, [0, 1])), answer(1, call("data", "broadcast", 7, [0, 1]))]
    assert kinds_of(answers) == [("waits", (0,)), ("waits", (1,)), ("mismatch", (0, 1))]
    text = diagnose(answers, {})[-1].text
    assert "all_reduce" in text and "broadcast" in text


def test_different_axes_are_a_circle() -> None:
    answers = [
        answer(0, call("data", "all_reduce", 7, [0, 1, 2])),
        answer(1, call("world", "barrier", 3, [0, 1, 2])),
        answer(2, call("data", "all_reduce", 7, [0, 1, 2])),
    ]
    assert kinds_of(answers)[-1] == ("cycle", (0, 1))


def test_a_ring_that_receives_before_it_sends() -> None:
    answers = [answer(rank, call("world", "recv", 8, [rank, (rank + 1) % 4])) for rank in ALL]
    found = diagnose(answers, {})
    assert [finding.kind for finding in found] == ["waits"] * 4 + ["cycle"]
    assert set(found[-1].ranks) == set(ALL) and "0 for 1" in found[-1].text


def test_a_run_that_goes_on_has_no_cause() -> None:
    answers = [answer(0, call("data", "all_reduce", 7, [0, 1], seconds=0.01)), answer(1)]
    assert kinds_of(answers) == [("runs", (0,)), ("runs", (1,))]
    assert kinds_of([]) == []


def test_call_sites_that_differ_are_all_told() -> None:
    answers = [answer(rank, call("data", "all_reduce", 7, [0, 1, 2], site=f"a.py:{rank} (f)")) for rank in (0, 1)]
    text = diagnose([*answers, answer(2)], {})[0].text
    assert "a.py:0 (f)" in text and "a.py:1 (f)" in text
