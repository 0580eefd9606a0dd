"""Commands that read the record of a run: `mpishard plot`, `trace`, `top` and `why`."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from records import process_line, write

from mpishard.cli import main
from mpishard.record import Run
from mpishard.record.reading import Follower
from mpishard.record.summary import read_trace


class TestPlot:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        metrics = [{"step": s, "loss": 1 / s, "seconds": 0.5, "workers": 2} for s in range(1, 1001)]
        lines = [process_line(0, 1, [0.5] * 1000, phases={"computation": 500.0})]
        starts = [{"problem": {"batch_size": 8, "tokens_per_sample": 16}}]
        return write(tmp_path / "run", metrics, [lines], starts)

    def test_a_picture(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plot", str(run)]) == 0
        assert capsys.readouterr().out.strip() == str(run / "run.png")
        assert (run / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    def test_data(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plot", str(run), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["logged"] == {}
        assert shown["metrics"]["loss"][:2] == [1, 0.5] and shown["phases"]["computation"][0] == 0.5
        assert not (run / "run.png").exists()

    def test_series_beside_the_loss(self, run: Path) -> None:
        metrics = [{"step": s, "loss": 1 / s, "learning_rate": 0.1} for s in range(1, 6)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
        logged = {"step": 3, "speed": 1, "held_out_loss": 0.5, "gradient norm": 2}  # names of panels, too
        (run / "logged.jsonl").write_text(json.dumps(logged) + "\n")
        assert main(["plot", str(run), "--log"]) == 0
        with Image.open(run / "run.png") as picture:
            assert picture.height == pytest.approx(5 * 247, abs=2)  # loss, 3 small ones in 2 rows, 2 rows

    def test_the_best_validation_loss_is_marked(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Any] = []
        monkeypatch.setattr("mpishard.cli.plot.save", lambda figure, path: drawn.extend(figure.axes))
        losses = {100: 0.5, 200: 0.25, 300: None, 400: 0.375}
        lines = [{"step": step, "validation_loss": loss} for step, loss in losses.items()]
        (run / "logged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["plot", str(run)]) == 0
        marks = [line for line in drawn[0].lines if line.get_marker() == "*"]
        assert [line.get_label() for line in marks] == ["best, step 200"]
        assert [line.get_xydata().tolist() for line in marks] == [[[200, 0.25]]]

    @pytest.mark.parametrize("steps", [1, 30])
    def test_a_panel_without_values_says_so(self, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[Any] = []
        monkeypatch.setattr("mpishard.cli.plot.save", lambda figure, path: drawn.extend(figure.axes))
        metrics = [{"step": step, "loss": None, "seconds": 0.5, "workers": 1} for step in range(1, steps + 1)]
        lines = [process_line(0, 1, [0.5] * steps, axes={"data": {"bytes": 2000 * steps, "seconds": 0}})]
        run = write(tmp_path / "run", metrics, [lines])
        (run / "logged.jsonl").write_text(json.dumps({"step": 1, "a_name_of_a_series_that_is_long": 1}) + "\n")
        assert main(["plot", str(run)]) == 0
        panels = {axis.get_ylabel(): [text.get_text() for text in axis.texts] for axis in drawn}
        empty = [label for label, texts in panels.items() if texts]
        assert empty == ["loss"] and panels["loss"] == ["nothing noted"]
        assert "a name of a series that is\nlong" in panels and "kB sent / step, all ranks" in panels
        assert len({axis.get_xlim() for axis in drawn}) == 1
        for axis in drawn:  # steps are whole
            assert all(float(tick).is_integer() for tick in axis.get_xticks())

    def test_a_loss_without_a_logarithm(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", [{"step": 1, "loss": -1.0}])
        assert main(["plot", str(run), "--log"]) == 2
        assert "no loss above 0" in capsys.readouterr().err

    def test_of_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plot", str(tmp_path)]) == 2
        assert "no record of a run" in capsys.readouterr().err
        write(tmp_path / "run")
        assert main(["plot", str(tmp_path / "run")]) == 2
        assert "no step yet" in capsys.readouterr().err


class TestTrace:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        folder = write(tmp_path / "run", [{"step": 1}])
        first = [["step 4", "step", 1000.0, 0.5], ["F0", "F", 1000.1, 0.2]]
        again = [["step 4", "step", 2000.0, 0.25], ["data.all_reduce", "data", 2000.125, 0.0625]]
        for rank in (0, 1):
            lines = [{"rank": rank, "step": step, "spans": spans} for step, spans in ((4, first), (4, again))]
            path = folder / "processes" / f"host-{rank}.trace.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    def test_of_a_step_taken_twice_the_last(self, run: Path) -> None:
        spans = read_trace(run)
        assert [(span.rank, span.name, span.start) for span in spans] == [
            (rank, name, start)
            for rank in (0, 1)
            for name, start in (("step 4", 2000.0), ("data.all_reduce", 2000.125))
        ]
        assert Run.read(run).processes == []

    def test_events_have_what_the_format_asks_for(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Complete events and metadata of the "Trace Event Format", times in microseconds."""
        assert main(["trace", str(run), "--png"]) == 0
        shown = json.loads((run / "trace.json").read_text())
        assert shown["displayTimeUnit"] == "ms"
        events = shown["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X"}
        whole = [event for event in events if event["ph"] == "X"]
        for event in whole:
            assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys() and event["dur"] >= 0
        assert [(event["ts"], event["dur"]) for event in whole[:2]] == [(0, 250_000), (125_000, 62_500)]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert names == ["rank 0", "rank 1"]
        assert (run / "trace.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        written, drawn, _, *rows = capsys.readouterr().out.splitlines()
        assert [written, drawn] == [str(run / "trace.json"), str(run / "trace.png")]
        figures = "250.00 0.00 (0%) 62.50 (25%) 187.50 (75%)".split()
        assert [row.split() for row in rows] == [["0", *figures], ["1", *figures], ["mean", "of", "2", *figures]]

    def test_a_chart_in_the_place_of_the_timeline(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trace", str(run), "--png", "-o", str(run / "a.png")]) == 2
        assert "a.json --png" in capsys.readouterr().err and not (run / "a.png").exists()

    def test_steps_that_were_not_traced(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["trace", str(run), "--first", "7"]) == 2
        assert "only 4 to 4" in capsys.readouterr().err
        assert main(["trace", str(write(run / "other", [{"step": 1}]))]) == 2
        assert "trace=(100, 104)" in capsys.readouterr().err


class TestTop:
    """Looks at a run from its record; the processes of this record are on no host."""

    @pytest.fixture(autouse=True)
    def on_a_wide_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lines are not broken, however long the folder's path is."""
        monkeypatch.setenv("COLUMNS", "300")

    @staticmethod
    def line(rank: int, step: int, steps: int, **more: Any) -> dict[str, Any]:
        axes = {"data": {"bytes": 10 * steps, "seconds": 0.02 * steps}}
        of_time = {"time": time.time() - 60, "seconds": [0.1] * steps, "busy": [0.08] * steps, "axes": axes}
        return process_line(rank, step, [], ranks=2) | of_time | more

    def test_shares_of_a_step_are_of_the_same_steps(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A short last line with long waits does not make more than a whole."""
        late = self.line(0, 101, 1, axes={"data": {"bytes": 0, "seconds": 0.1}})
        metrics = [{"step": 101, "time": time.time() + 1000, "seconds": 0.1, "workers": 1}]
        run = write(tmp_path / "run", metrics, [[self.line(0, 1, 100), late]])
        assert main(["top", "--once", str(run)]) == 0
        shown = capsys.readouterr().out
        assert "1 worker\n" in shown and "80%      21%       10 B" in shown

    def test_nothing_known_yet(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", processes=[[self.line(0, 0, 0, time=time.time(), axes={})]])
        assert main(["top", "--once", str(run)]) == 0
        assert "nan" not in capsys.readouterr().out
        assert main(["top", "--json", str(run)]) == 0
        assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ranks"][0]["seconds"] is None

    def test_the_newest_of_what_is_logged(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", [{"step": 30, "time": 0, "loss": 1.0}])
        lines = [{"step": 10, "a": 1}, {"step": 20, "a": 0.25}, *({"step": 5, f"b{n}": None} for n in range(9))]
        (run / "logged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["top", "--once", str(run)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "a 0.25 at step 20, b0 NaN at step 5" in shown and "b6 NaN at step 5, and 2 more" in shown
        assert main(["top", "--json", str(run)]) == 0
        assert json.loads(capsys.readouterr().out)["logged"]["a"] == {"step": 20, "value": 0.25}

    def test_names_do_not_steer_the_terminal(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        start = {"problem": {"steps": 1}}
        run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}], [[self.line(0, 1, 1)]], [start])
        (run / "processes" / "host-0.jsonl").rename(run / "processes" / "\x1b[31m[bold]host-0.jsonl")
        (run / "logged.jsonl").write_text(json.dumps({"step": 1, "a\x1b[2J": 1}) + "\n")
        assert main(["top", "--once", str(run)]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and r"a\x1b[2J 1 at step 1" in shown and r"\x1b[31m[bold]host-0" in shown
        (run / "ends.jsonl").write_text(json.dumps({"step": 1, "start": 1, "reason": "\x1b[2J"}) + "\n")
        for command in (["top", "--once"], ["why", "--wait", "0"]):
            assert main([*command, str(run)]) == 0
            shown = capsys.readouterr().out
            assert "\x1b" not in shown and r"\x1b[2J after step 1" in shown

    @pytest.mark.parametrize("stops", [True, False])
    def test_the_best_validation_loss(self, stops: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Of the steps that the last start has not taken back, and how long a better one is awaited."""
        early = {"stop_early": {"type": "EarlyStopping", "patience": 3, "min_delta": 0.0}} if stops else {}
        starts = [{"resumed_steps": 0, **early}, {"resumed_steps": 20, **early}]
        run = write(tmp_path / "run", [{"step": 20, "start": 1, "time": 0, "loss": 1.0}], starts=starts)
        lines = [{"step": step, "start": 1, "validation_loss": loss} for step, loss in ((10, 0.5), (20, 0.75), (30, 0))]
        lines += [{"step": 30, "start": 2, "validation_loss": 0.625}]
        (run / "logged.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["top", "--once", str(run)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        waited = ", 2 of 3 without a better one" if stops else ""
        assert f"validation_loss 0.625 at step 30 (best 0.5 at step 10{waited})" in shown
        assert main(["top", "--json", str(run)]) == 0
        assert json.loads(capsys.readouterr().out)["best_validation"] == {"step": 10, "value": 0.5}

    def test_many_silent_ranks_are_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", processes=[[self.line(rank, 1, 5, ranks=20)] for rank in range(20)])
        assert main(["top", "--once", "--rows", "1", str(run)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert re.search("silent: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more for 6[0-9] s ", shown)
        assert f"mpishard why {run} shows who waits for whom" in shown

    def test_a_run_that_hangs_has_no_time_to_go(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        now = time.time()
        starts = [{"time": now - 200, "every": 1.0, "problem": {"steps": 100}}]
        metrics = [{"step": 98, "start": 1, "time": now + 1000, "seconds": 0.01}]
        run = write(tmp_path / "run", metrics, starts=starts)
        assert main(["top", "--once", str(run)]) == 0
        assert "step 98 of 100, 10.0 ms a step, 1 s to go\n" in capsys.readouterr().out
        (run / "metrics.jsonl").write_text(json.dumps(metrics[0] | {"time": now - 40}) + "\n")
        assert main(["top", "--once", str(run)]) == 0
        shown = capsys.readouterr().out
        assert re.search("10.0 ms a step, no step for [4-9][0-9] s\n", shown) and "to go" not in shown
        # What is written every minute is not late after 40 seconds.
        (run / "starts.jsonl").write_text(json.dumps(starts[0] | {"every": 600}) + "\n")
        assert main(["top", "--once", str(run)]) == 0
        assert "1 s to go" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("resumed", "steps", "end", "headline", "ending"),
        [
            (20, 20, "steps", "step 20 of 20, loss 0.5\n", "nothing was left to do: 20 steps had been taken before"),
            (
                20,
                10,
                "steps",
                "step 20, loss 0.5\n",
                "nothing was left to do: 20 steps had been taken before, and 10 were asked for",
            ),
            (0, 10, None, "no step yet\n", ""),
            (15, 30, None, "step 15 of 30, loss 0.5\n", ""),
        ],
    )
    def test_a_finished_run_that_is_started_again(
        self,
        resumed: int,
        steps: int,
        end: str | None,
        headline: str,
        ending: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        starts = [
            {"resumed_steps": 0, "problem": {"steps": 20}},
            {"resumed_steps": resumed, "problem": {"steps": steps}},
        ]
        metrics = [{"step": step, "start": 1, "time": 0, "seconds": 0.1, "loss": 0.5} for step in range(1, 21)]
        now = self.line(0, 0, 0, axes={}, time=time.time())
        run = write(tmp_path / "run", metrics, [[self.line(0, 1, 20)], [now]], starts)
        ends = [
            {"step": 20, "start": 1, "reason": "steps"},
            *([{"step": 20, "start": 2, "reason": end}] if end else []),
        ]
        (run / "ends.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ends))
        (run / "logged.jsonl").write_text(json.dumps({"step": 18, "start": 1, "accuracy": 0.5}) + "\n")
        assert main(["top", "--once", str(run)]) == 0
        shown = capsys.readouterr().out
        assert headline in shown and ("accuracy" in shown) == (resumed >= 18)
        assert (f"ended: {ending}\n" in shown) if ending else ("ended" not in shown)
        assert main(["why", "--wait", "0.1", str(run)]) == 0
        assert (capsys.readouterr().out == f"the run has ended: {ending}\n") == bool(ending)

    def test_who_left_a_run_that_healed_is_not_missed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Rank 0 of 4 died and rank 3 waits as a spare: 1 and 2 are 0 and 1 now, and a spawned process is 2."""
        now = time.time()
        before = [self.line(rank, 1, 5, ranks=4, time=now - 60) for rank in range(4)]
        after = [self.line(rank, 6, 5, ranks=3, time=now + 1000) for rank in range(3)]
        lines = [[before[0]], [before[1], after[0]], [before[2], after[1]], [before[3]], [after[2]]]
        run = write(tmp_path / "run", [{"step": 10, "time": now, "seconds": 0.1}], lines)
        found = Follower(run)
        found.update()
        assert [process.name for process in found.processes] == ["host-1", "host-2", "host-4"]
        assert main(["top", "--once", str(run)]) == 0
        assert "silent" not in capsys.readouterr().out
        assert main(["why", "--wait", "0.1", "--json", str(run)]) == 0
        silent = json.loads(capsys.readouterr().out)["findings"]
        assert [finding["ranks"] for finding in silent] == [[0], [1], [2]]

    def test_a_run_that_was_stopped(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        starts = [{"time": 0, "resumed_steps": 0, "problem": {"steps": 9}}]
        metrics = [{"step": 5, "start": 1, "time": 0, "seconds": 0.1}]
        run = write(tmp_path / "run", metrics, [[self.line(0, 1, 5)]], starts)
        end = {"step": 5, "start": 1, "reason": "signal", "way_on": "the same command resumes"}
        (run / "ends.jsonl").write_text(json.dumps(end) + "\n")
        ending = "stopped by a signal, such as Ctrl-C, after step 5 of 9; the same command resumes"
        assert main(["top", "--once", str(run)]) == 0
        shown = capsys.readouterr().out
        assert f"ended: {ending}\n" in shown and "silent" not in shown
        assert main(["why", str(run)]) == 0
        assert capsys.readouterr().out == f"the run has ended: {ending}\n"
        assert main(["why", str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"fresh": False, "ending": ending, "findings": [], "answers": []}

    def test_a_run_whose_processes_are_gone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        starts = [{"time": 0, "problem": {"steps": 9}}]
        run = write(tmp_path / "run", [{"step": 5, "time": 0, "seconds": 0.1, "workers": 1}], starts=starts)
        line = json.dumps(self.line(0, 1, 5)) + "\n"
        with subprocess.Popen(["true"]) as child:
            child.wait()
        (run / "processes" / f"{os.uname().nodename}-{child.pid}.jsonl").write_text(line)
        assert main(["top", "--once", str(run)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "ended: none of its processes is left, and step 5 of 9 was the last" in shown and "silent" not in shown
        assert main(["why", "--wait", "0.1", str(run)]) == 0
        assert "the run has ended: none of its processes is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "7",
        "[" * 100_000,
        '{"rank": 0}',
        json.dumps({"time": 0, "rank": 0, "step": 9, "call": {"seconds": 9}, "recent": [], "stack": []}),
        json.dumps({"time": 0, "rank": 0, "step": 9, "call": None, "recent": [1], "stack": []}),
        json.dumps({"time": 0, "rank": 0, "step": 9, "call": None, "recent": [], "stack": [{}]}),
    ],
)
def test_a_damaged_answer_is_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = process_line(0, 1, [0.5], time=time.time()) | {"ranks": 1}
    run = write(tmp_path / "run", [{"step": 1}], [[line]])
    (run / "processes" / "host-0.where.json").write_text(text)
    assert main(["why", "--wait", "0", str(run)]) == 0
    assert "rank 0 does not answer: process 0 on host gave no answer" in capsys.readouterr().out


class TestWrongPlaces:
    @pytest.mark.parametrize("command", ["plot", "top", "why", "trace"])
    def test_are_told_with_the_right_one(
        self, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = write(tmp_path / "run")
        (tmp_path / "file").write_text("")
        for wrong, said in [
            (tmp_path / "missing", "does not exist"),
            (tmp_path / "file", "is a file"),
            (tmp_path, f"but there is one in {run}"),
            (run / "processes", f"but there is one in {run}"),
        ]:
            assert main([command, str(wrong)]) == 2
            assert said in capsys.readouterr().err

    @pytest.mark.parametrize(("size", "message"), [(2**27, "it has a line of more than"), (2**33, "it has 8589934592")])
    def test_a_file_that_is_none_of_lines_is_not_read_as_a_whole(
        self, tmp_path: Path, size: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "starts.jsonl").write_text("")
        (tmp_path / "metrics.jsonl").touch()
        os.truncate(tmp_path / "metrics.jsonl", size)
        for command in ("top", "plot"):
            assert main([command, str(tmp_path)]) == 2
            assert f"metrics.jsonl: {message}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            *(("metrics", {"loss": value}) for value in ({}, [1, 2], "x", 10**400)),
            ("metrics", {"step": 10**30}),
            ("metrics", {"seconds": "x"}),
            *(("processes/host-0", {"seconds": value}) for value in (3, ["x"], None)),
            *(("processes/host-0", {"axes": value}) for value in ([], {"data": 1}, {"data": {"seconds": 1}})),
            *(("processes/host-0", wrong) for wrong in ({"phases": {"a": "x"}}, {"step": "x"}, {"step": 2**70})),
            ("processes/host-0", {"time": "x"}),
            *(("starts", {"problem": value}) for value in ([], {"steps": "x"}, {"batch_size": "x"})),
            *(("starts", wrong) for wrong in ({"time": "x"}, {"every": "x"})),
            ("logged", {"a": {}}),
            *(("processes/host-0.trace", {"spans": value}) for value in (None, [], [["a"]], [["a", [], 5, 1]])),
            *(("processes/host-0.trace", {"spans": [["a", "b", "x", 0]], "rank": value}) for value in (0, [])),
        ],
    )
    def test_a_damaged_line_is_left_out(
        self, name: str, wrong: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = process_line(0, 1, [0.5], phases={"computation": 0.5}) | {"ranks": 1, "time": time.time()}
        run = write(tmp_path / "run", [{"step": 1, "time": 0, "loss": 1.0, "seconds": 0.5}], [[line]], [{"time": 0}])
        trace = {"rank": 0, "step": 1, "spans": [["step", "step", 0, 1]]}
        (run / "processes" / "host-0.trace.jsonl").write_text(json.dumps(trace) + "\n")
        path = run / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else ['{"step": 1}']
        with path.open("a") as file:
            file.write(json.dumps(json.loads(lines[-1]) | wrong) + "\n")
        for command in (["top", "--once"], ["plot", "--json"], ["why", "--wait", "0"], ["trace"]):
            assert main([*command, str(run)]) == 0, command

    def test_steps_that_no_memory_holds(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", [{"step": 1}], [[process_line(0, step, [0.5]) for step in (1, 2**40)]])
        assert main(["plot", "--json", str(run)]) == 2
        assert f"notes of {2**40} steps, from 1 on, but at most {2**27} are shown" in capsys.readouterr().err

    def test_lines_of_others_are_left_out(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", [{"epoch": 1}], [[{"x": 2}]], [{"a": 1}])
        assert main(["plot", str(run)]) == 2
        assert main(["top", str(run)]) == 0
        assert "no step yet" in " ".join(capsys.readouterr().out.split())

    def test_a_picture_that_cannot_be_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write(tmp_path / "run", [{"step": 1, "loss": 1.0, "seconds": 0.5, "workers": 1}])
        assert main(["plot", str(run), "-o", str(tmp_path / "a.xyz")]) == 2
        assert "end it with .png, .pdf or .svg" in capsys.readouterr().err
        assert main(["plot", str(run), "-o", str(tmp_path / "missing" / "a.png")]) == 2
        assert "cannot write" in capsys.readouterr().err
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        (run / "run.png").write_bytes(b"before")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
            assert main(["plot", str(run)]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert (run / "run.png").read_bytes() == b"before" and len(list(run.iterdir())) == 4
