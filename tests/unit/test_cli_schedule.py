"""``mpishard schedule``: the picture, the figures below it, and errors of one line."""

from __future__ import annotations

import json

import pytest

from mpishard.cli import main

PICTURE = """\
1f1b: 2 stages, 3 micro-batches

time    |0             |5             |10
stage 0 F0 F1 ......B0--- F2 B1--- ...B2---
stage 1 ...F0 B0--- F1 B1--- F2 B2--- ......

(F forward, B backward, with the micro-batch; . idle)

time       12
bubble     25.0% of the time; 33.3% of the time computing
peak live  2 1 activations by stage (micro-batches of one chunk)
deadlock   none: with synchronous, non-blocking sends every stage ends its program, whatever the timing
"""


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


def schedule(*arguments):
    return main(["schedule", *map(str, arguments)])


def test_picture(capsys):
    assert schedule("1f1b", "--stages", 2, "--microbatches", 3) == 0
    output = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in output.split("\n")) == PICTURE


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ("gpipe", "--stages", 4, "--microbatches", 8),
        ("interleaved", "--stages", 4, "--microbatches", 6, "--chunks", 3),
        ("1f1b", "--stages", 12, "--microbatches", 100),
        ("1f1b", "--stages", 3, "--microbatches", 4, "--forward", "1,0.0001,2"),
        ("zb-h1", "--stages", 3, "--microbatches", 20, "--transfer", 0.3),
    ],
)
def test_pictures_keep_to_the_width(arguments, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert schedule(*arguments) == 0
    _, ruler_and_stages, *_ = capsys.readouterr().out.split("\n\n")
    ruler, *stages = ruler_and_stages.split("\n")
    assert len(stages) == arguments[2]
    assert ruler.startswith("time ")
    assert len({len(line) for line in stages}) == 1 and len(stages[0]) <= columns


def test_long_pictures_say_what_is_left_out(capsys):
    schedule("1f1b", "--stages", 4, "--microbatches", 100)
    output = capsys.readouterr().out
    assert "(micro-batch numbers do not fit into 120 columns; --png FILE draws them)" in output
    # 112 columns of 309: 55, the mark of the cut, and 54
    assert "(the time from 55 to 255 is left out)" in output
    (first,) = (line for line in output.split("\n") if line.startswith("stage 0"))
    assert first.startswith("stage 0 FFFF......B-FB-FB-F") and first.endswith("FB-.B-.B-.B-") and " ~ " in first


def test_json(capsys):
    assert schedule("1f1b", "--stages", 4, "--microbatches", 8, "--json", "--blocking-sends") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_live"] == [4, 3, 2, 1]
    assert figures["bubble_fraction"] == 3 / 11
    assert figures["makespan"] == 33
    assert figures["deadlock"] is None
    assert "waits until rank 3 takes it in F1" in figures["deadlock_blocking_sends"]
    assert len(figures["events"]) == 4 * 8 * 2
    assert figures["events"][-1] == {"rank": 3, "kind": "B", "microbatch": 7, "chunk": 0, "start": 25.0, "stop": 27.0}


def test_blocking_sends(capsys):
    schedule("gpipe", "--stages", 2, "--microbatches", 2, "--blocking-sends")
    assert "blocking   no deadlock with blocking sends either" in capsys.readouterr().out
    schedule("1f1b", "--stages", 2, "--microbatches", 2, "--blocking-sends")
    assert "blocking   schedule '1f1b' deadlocks with blocking sends: rank 0 in F1" in capsys.readouterr().out


def test_png(tmp_path, capsys):
    file = tmp_path / "picture.png"
    assert schedule("interleaved", "--stages", 2, "--microbatches", 3, "--png", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(file) in capsys.readouterr().out


def test_few_microbatches(capsys):
    assert schedule("1f1b", "--stages", 4, "--microbatches", 2) == 0
    errors = capsys.readouterr().err
    assert errors.startswith("mpishard: warning: 2 micro-batches for 4 pipeline stages") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", "--stages", 2), "Missing option '--microbatches'"),
        (("1f1b", "--stages", "two", "--microbatches", 2), "--stages"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--nonsense"), "--nonsense"),
        (("1f1b", "--stages", 0, "--microbatches", 2), "stages must be at least 1, got 0"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--chunks", 2), "schedule '1f1b' has 1 chunk a rank, got 2"),
        (("other", "--stages", 2, "--microbatches", 2), "unknown schedule 'other'; choose one of"),
        (("zb-h1", "--stages", 2, "--microbatches", 2, "--backward", 2), "'zb-h1' does not use --backward"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--forward", "1;2"), "--forward takes a number, or numbers"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--forward", "1,2,3"), "forward has 3 times for 2 virtual"),
        (("1f1b", "--stages", 2, "--microbatches", 2, "--png", "/no/such/folder/x.png"), "/no/such/folder/x.png"),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert schedule(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mpishard: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_help(capsys):
    assert main([]) == 0
    assert "schedule" in capsys.readouterr().out
    assert main(["no-such-command"]) == 2
