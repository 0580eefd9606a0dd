"""Commands that read the record of a run: `mpishard plot`, `trace`, `top` and `why`."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
from matplotlib.text import Text
from records import process_line, write, write_lines
from rich.console import Console

from mpishard.arguments import printable
from mpishard.cli import main
from mpishard.cli.top import screen
from mpishard.record import Run
from mpishard.record.follower import Follower
from mpishard.record.summary import read_trace

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def shown(capsys):
    """What a command prints, of which the exit code is that expected."""

    def shown(*words, code=0):
        assert main([str(word) for word in words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return shown


def labelled(figure):
    """The axes of a figure by their labels."""
    return {axis.get_ylabel(): axis for axis in figure.axes}


def by_place(figure):
    """The axes of a figure from the top left, by rows."""
    grid = [(axis.get_subplotspec(), axis) for axis in figure.axes]
    return [axis for _, axis in sorted(grid, key=lambda each: (each[0].rowspan.start, each[0].colspan.start))]


def below(figure):
    """The lines of text under the panels."""
    return figure.get_supxlabel().splitlines()


class TestPlot:
    @pytest.fixture
    def run(self, tmp_path):
        metrics = [{"step": s, "loss": 1 / s, "seconds": 0.5, "workers": 2} for s in range(1, 1001)]
        lines = [process_line(0, 1, [0.5] * 1000, phases={"computation": 500.0})]
        return write(tmp_path / "run", metrics, [lines], [{"problem": {"batch_size": 8, "tokens_per_sample": 16}}])

    @pytest.fixture
    def drawn(self, monkeypatch):
        """The figures that are not saved."""
        drawn = []
        monkeypatch.setattr("mpishard.cli.plot.save", lambda figure, path: drawn.append(figure))
        return drawn

    def test_a_picture_and_its_data(self, run, shown):
        found = json.loads(shown("plot", run, "--json"))
        assert found["logged"] == {} and not (run / "run.png").exists()
        assert found["metrics"]["loss"][:2] == [1, 0.5] and found["phases"]["computation"][0] == 0.5
        assert shown("plot", run).strip() == str(run / "run.png")
        assert (run / "run.png").read_bytes()[:8] == PNG

    def test_series_beside_the_loss(self, run, drawn, shown):
        metrics = [{"step": s, "loss": 1 / s, "learning_rate": 0.1 * s, "gradient_norm": 3 / s} for s in range(1, 6)]
        write_lines(run / "metrics.jsonl", *metrics)
        # Names of panels, too.
        logged = [{"step": s, "speed": s, "held_out_loss": 0.5, "weight norm": 2.0 * s, "sent": -s} for s in (1, 3)]
        write_lines(run / "logged.jsonl", *logged)
        shown("plot", run, "--log")
        axes = labelled(drawn[0])
        own = ["loss", "learning rate", "gradient norm", "weight norm", "data-parallel workers"]
        assert set(axes) == {
            *own,
            "speed",
            "sent",
            "tokens / s",
            "ms / step, mean of ranks",
            "bytes sent / step, all ranks",
        }
        assert drawn[0].get_figheight() == pytest.approx(6 * 2.47)  # the loss, 7 lines in 4 rows, and a row
        assert [line.get_label() for line in axes["loss"].lines] == ["loss", "held out loss"]
        logarithmic = {label for label, axis in axes.items() if axis.get_yscale() == "log"}
        assert logarithmic == {"loss", "gradient norm", "weight norm"}
        shown("plot", run)
        assert {axis.get_yscale() for axis in drawn[1].axes} == {"linear"}

    def test_the_best_validation_loss_is_marked(self, run, drawn, shown):
        losses = {100: 0.5, 200: 0.25, 300: None, 400: 0.375}
        write_lines(run / "logged.jsonl", *({"step": step, "validation_loss": loss} for step, loss in losses.items()))
        shown("plot", run)
        marks = [line for line in labelled(drawn[0])["loss"].lines if line.get_marker() == "*"]
        assert [line.get_label() for line in marks] == ["best, step 200"]
        assert [line.get_xydata().tolist() for line in marks] == [[[200, 0.25]]]

    @pytest.mark.parametrize("steps", [1, 30])
    def test_a_panel_without_values_says_so(self, steps, tmp_path, drawn, shown):
        metrics = [{"step": step, "loss": None, "seconds": 0.5 * step, "workers": 1} for step in range(1, steps + 1)]
        lines = [process_line(0, 1, [0.5], axes={"data": {"bytes": 900, "seconds": 0}})]
        if steps > 1:
            lines.append(process_line(0, 2, [0.5] * 29, axes={"data": {"bytes": 29 * 2000, "seconds": 0}}))
        run = write(tmp_path / "run", metrics, [lines])
        write_lines(run / "logged.jsonl", {"step": 1, "a_name_of_a_series_that_is_long": None})
        shown("plot", run)
        panels = {axis.get_ylabel(): [text.get_text() for text in axis.texts] for axis in drawn[0].axes}
        empty = {label: texts for label, texts in panels.items() if texts}
        assert empty == dict.fromkeys(["loss", "a name of a series that is\nlong"], ["nothing noted"])
        assert ("steps / s" in panels) == ("kB sent / step, all ranks" in panels) == (steps > 1)
        assert len({axis.get_xlim() for axis in drawn[0].axes}) == 1
        for axis in drawn[0].axes:  # steps are whole
            assert all(float(tick).is_integer() for tick in axis.get_xticks())

    def test_a_constant_series_is_a_line_of_text(self, tmp_path, drawn, shown):
        metrics = [
            {"step": s, "loss": 0.5, "learning_rate": 0.1, "gradient_norm": None if s == 2 else 1.0, "workers": 4}
            for s in range(1, 4)
        ]
        sent = {"data": {"bytes": 2000, "seconds": 0}, "world": {"bytes": 0, "seconds": 0}}
        twice = {axis: each | {"bytes": 2 * each["bytes"]} for axis, each in sent.items()}
        lines = [process_line(0, 1, [0.25] * 2, axes=twice), process_line(0, 3, [0.25], axes=sent)]  # of 2 ranks
        run = write(tmp_path / "run", [each | {"seconds": 0.25} for each in metrics], [lines])
        write_lines(run / "logged.jsonl", {"step": 2, "accuracy": 0.75}, {"step": 3, "a": 1}, {"step": 1, "a": 2})
        shown("plot", run)
        said = ["learning rate: 0.1", "accuracy: 0.75 at step 2", "steps / s: 4", "data-parallel workers: 4"]
        assert below(drawn[0]) == [*said, "sent / step, all ranks: data axis 4.00 kB, world axis 0 B"]
        assert set(labelled(drawn[0])) == {"loss", "gradient norm", "a", "ms / step, mean of ranks"}
        shown("plot", run, "--panels", "workers,sent")
        assert list(labelled(drawn[1])) == ["data-parallel workers", "kB sent / step, all ranks"]
        assert below(drawn[1]) == []

    @pytest.fixture
    def minimisation(self, tmp_path):
        """The record of a minimisation, of 2 ranks at first and then of 3, in a folder of this name."""

        def made(name, scale=1.0, method="LBFGSB"):
            metrics = [
                {"step": s, "loss": scale / s, "learning_rate": 1 / s, "gradient_norm": 5 / s, "workers": 1}
                | {"iteration": s // 2, "accepted_loss": 2 * scale / s, "seconds": 0.1 * s}
                for s in range(1, 9)
            ]
            lines = [process_line(0, 1, [0.5] * 4), process_line(0, 5, [0.5] * 4) | {"ranks": 3}]
            return write(tmp_path / name, metrics, [lines], [{"optimizer": "minimize", "rule": {"rule": method}}])

        return made

    def test_a_minimisation_is_told_in_its_own_words(self, minimisation, drawn, shown):
        shown("plot", minimisation("run"), "--log")
        axes = labelled(drawn[0])
        own = {"value", "step length", "norm of the gradient", "iterations", "evaluations / s", "ranks"}
        assert set(axes) == own | {"ms / evaluation, mean of\nranks", "bytes sent / evaluation, all\nranks"}
        assert [line.get_label() for line in axes["value"].lines] == ["value", "value at the last iterate"]
        assert axes["ranks"].lines[0].get_ydata().tolist() == [2] * 4 + [3] * 4
        assert {axis.get_xlabel() for axis in axes.values()} == {"evaluation"}
        assert {each for each in axes if axes[each].get_yscale() == "log"} == {"value", "norm of the gradient"}
        words = " ".join(text.get_text() for text in drawn[0].findobj(Text))
        assert not re.search(r"\b(loss|learning|workers|data-parallel|steps?)\b", words.replace("step length", ""))

    def test_hessian_products_are_steps_too(self, minimisation, drawn, shown):
        shown("plot", minimisation("run", method="TruncatedNewton"))
        assert {axis.get_xlabel() for axis in drawn[0].axes} == {"evaluation or Hessian product"}
        assert "evaluations and products / s" in labelled(drawn[0])

    def test_panels_are_chosen_in_their_order(self, run, minimisation, drawn, shown):
        minimised = minimisation("minimised")
        shown("plot", minimised, "--panels", "gradient_norm, ranks,speed,value,speed")
        assert [axis.get_ylabel() for axis in by_place(drawn[0])] == [
            *("norm of the gradient", "ranks", "evaluations / s", "value")
        ]
        shown("plot", minimised, "--panels", "sent")
        assert len(drawn[1].axes) == 1
        has = "value, step_length, gradient_norm, iteration, speed, ranks, phases, sent"
        assert f"minimised has no panel 'loss'; --panels takes {has}" in shown(
            "plot", minimised, "--panels", "value,loss", code=2
        )
        assert "no panel ''" in shown("plot", run, "--panels", "", code=2)
        assert "no panel 'value'; --panels takes loss, speed, workers, phases, sent" in shown(
            "plot", run, "--panels", "value", code=2
        )
        assert "--json" in shown("plot", run, "--panels", "loss", "--json", code=2)
        assert len(drawn) == 2

    def test_several_runs_have_a_line_each(self, minimisation, drawn, shown, tmp_path, monkeypatch):
        runs = [minimisation(f"weight-{scale}", scale) for scale in (1, 10, 100)]
        write_lines(runs[1] / "logged.jsonl", {"step": 2, "rough_loss": 3}, {"step": 4, "rough_loss": 1})
        monkeypatch.chdir(tmp_path)
        assert shown("plot", *runs, "--log").strip() == "runs.png"
        axes = labelled(drawn[0])
        assert set(axes) == {
            *("value at the last iterate", "step length", "norm of the gradient", "iterations", "rough loss"),
            *("evaluations / s", "ranks"),
        }
        main = axes["value at the last iterate"]
        assert [line.get_ydata()[0] for line in main.lines] == [2, 20, 200] and main.get_yscale() == "log"
        assert {label: len(axis.lines) for label, axis in axes.items() if len(axis.lines) != 3} == {"rough loss": 1}
        (legend,) = drawn[0].legends
        assert [text.get_text() for text in legend.get_texts()] == ["weight-1", "weight-10", "weight-100"]
        # The only line of a panel has the colour of its run.
        colours = [line.get_color() for line in main.lines]
        assert len(set(colours)) == 3 and axes["rough loss"].lines[0].get_color() == colours[1]
        assert "several runs has no panel 'phases'" in shown("plot", *runs, "--panels", "phases", code=2)
        assert "given twice" in shown("plot", runs[0], tmp_path / "x" / ".." / "weight-1", code=2)
        found = json.loads(shown("plot", *runs, "--json"))
        assert {name: data["metrics"]["loss"][0] for name, data in found.items()} == {
            str(run): scale for run, scale in zip(runs, (1, 10, 100), strict=True)
        }

    def test_a_training_beside_a_minimisation(self, run, minimisation, drawn, shown):
        """They share the words of a training, and a speed in steps; runs of one name are told apart by their paths."""
        other = minimisation("other/run")
        shown("plot", run, other)
        axes = labelled(drawn[0])
        assert {"loss", "steps / s", "data-parallel workers"} <= set(axes)
        assert axes["loss"].lines[1].get_ydata()[0] == 1  # the loss, and not that at the last iterate
        assert axes["data-parallel workers"].lines[1].get_ydata().tolist() == [1] * 8
        assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [str(run), str(other)]

    def test_constants_of_several_runs(self, tmp_path, drawn, shown):
        def made(name, rate):
            metrics = [{"step": s, "loss": rate / s, "learning_rate": rate, "workers": 2} for s in (1, 2)]
            return write(tmp_path / name, [each | {"seconds": each["step"]} for each in metrics])

        shown("plot", made("a", 0.1), made("b", 0.2))
        assert below(drawn[0]) == ["data-parallel workers: 2"] and "learning rate" in labelled(drawn[0])

    def test_marks_of_a_start_and_of_a_spare(self, tmp_path, drawn, shown):
        """Process 1 dies in step 4 and has not written its last line; process 2, a spare, is there from step 4 on."""
        metrics = [{"step": s, "loss": 1 / s, "seconds": s, "workers": 2, "start": 1} for s in range(1, 9)]
        lines = [
            [process_line(0, 1, [0.5] * 3, time=11), process_line(0, 4, [0.5] * 3, time=12)],
            [process_line(1, 1, [0.5], time=11)],
            [process_line(1, 4, [9, 0.5, 0.5], time=12)],
            [process_line(rank, 6, [0.5] * 3, time=22) for rank in (0,)],
        ]
        starts = [{"time": 10, "resumed_steps": 0}, {"time": 20, "resumed_steps": 5}]
        run = write(tmp_path / "run", metrics, lines, starts)
        shown("plot", run)
        shown("plot", run, "--panels", "speed")
        shown("plot", run, "--panels", "phases")
        for figure, label in zip(drawn, ("loss", "steps / s"), strict=False):
            lines = labelled(figure)[label].lines
            marks = {line.get_label(): line.get_xdata()[0] for line in lines if "_" not in line.get_label()}
            assert marks == {"started again": 5, "a spare took over": 3}
            assert {text.get_text() for text in labelled(figure)[label].get_legend().get_texts()} == set(marks)
        assert not drawn[2].axes[0].lines

    @pytest.mark.parametrize("name", ["a.pdf", "a.svg", "a.PNG"])
    def test_the_name_of_the_output_says_its_format(self, name, run, shown, tmp_path):
        assert shown("plot", run, "--panels", "loss", "-o", tmp_path / name).strip() == str(tmp_path / name)
        begins = {"a.pdf": b"%PDF", "a.svg": b"<?xml", "a.PNG": PNG}[name]
        assert (tmp_path / name).read_bytes().startswith(begins)

    @pytest.mark.parametrize("name", ["a$b_$", os.fsdecode(b"\xff")])
    def test_any_name_of_a_folder(self, name, run, shown, tmp_path):
        """Two dollars are no formula, and bytes that are no text can be printed."""
        run = run.rename(tmp_path / name)
        spans = [["step 1", "step", 1.0, 0.5]]
        write_lines(run / "processes" / "host-0.trace.jsonl", {"rank": 0, "step": 1, "spans": spans})
        assert shown("plot", run).strip() == printable(str(run / "run.png"))
        assert shown("trace", run).splitlines()[0] == printable(str(run / "trace.json"))

    def test_without_matplotlib_there_are_data_and_a_hint(self, run, shown, monkeypatch):
        class Without:
            def find_spec(self, name, *rest):
                if name == "matplotlib":
                    raise ModuleNotFoundError(name, name=name)

        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
        said = shown("plot", run, code=2)
        assert "needs the package matplotlib: pip install 'mpishard[cli]'" in said and said.count("\n") == 1
        assert json.loads(shown("plot", run, "--json"))["metrics"]["step"][-1] == 1000

    def test_of_nothing(self, tmp_path, shown):
        assert "no record of a run" in shown("plot", tmp_path, code=2)
        assert "no step yet" in shown("plot", write(tmp_path / "run"), code=2)
        without_logarithm = write(tmp_path / "other", [{"step": 1, "loss": -1.0}])
        assert "no loss above 0" in shown("plot", without_logarithm, "--log", code=2)
        shown("plot", without_logarithm, "--log", "--panels", "workers")


class TestTrace:
    @pytest.fixture
    def run(self, tmp_path):
        folder = write(tmp_path / "run", [{"step": 1}])
        first = [["step 4", "step", 1000.0, 0.5], ["F0", "F", 1000.1, 0.2]]
        again = [["step 4", "step", 2000.0, 0.25], ["data.all_reduce", "data", 2000.125, 0.0625]]
        for rank in (0, 1):
            lines = [{"rank": rank, "step": 4, "spans": spans} for spans in (first, again)]
            write_lines(folder / "processes" / f"host-{rank}.trace.jsonl", *lines)
        return folder

    def test_of_a_step_taken_twice_the_last(self, run):
        spans = [(span.rank, span.name, span.start) for span in read_trace(run)]
        last = (("step 4", 2000.0), ("data.all_reduce", 2000.125))
        assert spans == [(rank, *each) for rank in (0, 1) for each in last] and Run.read(run).processes == []

    def test_events_have_what_the_format_asks_for(self, run, shown):
        """Complete events and metadata of the "Trace Event Format", times in microseconds."""
        written, drawn, _, *rows = shown("trace", run, "--png").splitlines()
        assert [written, drawn] == [str(run / "trace.json"), str(run / "trace.png")]
        found = json.loads((run / "trace.json").read_text())
        assert found["displayTimeUnit"] == "ms"
        events = found["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X"}
        whole = [event for event in events if event["ph"] == "X"]
        for event in whole:
            assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys() and event["dur"] >= 0
        assert [(event["ts"], event["dur"]) for event in whole[:2]] == [(0, 250_000), (125_000, 62_500)]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert names == ["rank 0", "rank 1"] and (run / "trace.png").read_bytes()[:8] == PNG
        figures = "250.00 0.00 (0%) 62.50 (25%) 187.50 (75%)".split()
        assert [row.split() for row in rows] == [["0", *figures], ["1", *figures], ["mean", "of", "2", *figures]]

    def test_what_cannot_be_shown(self, run, shown):
        assert "a.json --png" in shown("trace", run, "--png", "-o", run / "a.png", code=2)
        assert not (run / "a.png").exists()
        assert "only 4 to 4" in shown("trace", run, "--first", 7, code=2)
        assert "trace=(100, 104)" in shown("trace", write(run / "other", [{"step": 1}]), code=2)


class TestTop:
    """Looks at a run from its record; the processes of this record are on no host."""

    @pytest.fixture(autouse=True)
    def on_a_wide_terminal(self, environ):
        """Lines are not broken, however long the folder's path is."""
        environ(COLUMNS="300")

    @staticmethod
    def line(rank, step, steps, **more):
        axes = {"data": {"bytes": 10 * steps, "seconds": 0.02 * steps}}
        of_time = {"time": time.time() - 60, "seconds": [0.1] * steps, "busy": [0.08] * steps, "axes": axes}
        return process_line(rank, step, [], ranks=2) | of_time | more

    def test_a_terminal_without_a_cursor_gets_one_look(self, tmp_path, shown, environ, monkeypatch):
        environ(TERM="dumb")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr("mpishard.cli.top.time.sleep", lambda seconds: pytest.fail("it looks again"))
        assert "no step yet\n" in shown("top", write(tmp_path / "run"))

    def test_a_narrow_terminal_cuts_no_figures(self, tmp_path, shown, environ):
        environ(COLUMNS="60")
        axes = dict.fromkeys(("data", "tensor", "pipeline", "world"), {"bytes": 10, "seconds": 0.1})
        run = write(tmp_path / "run", [{"step": 1, "time": 0, "seconds": 0.1}])
        for rank in range(2):
            line = self.line(rank, 1, 5, axes=axes, time=time.time())
            write_lines(run / "processes" / f"a-host-with-a-long-name-123{rank}.jsonl", line)
        rows = [line.split() for line in shown("top", "--once", run).splitlines()[-2:]]
        assert [row[:3] for row in rows] == [
            [str(rank), f"a-host-with-a-long-name-123{rank}", "5"] for rank in range(2)
        ]
        assert not any("…" in word for row in rows for word in row)
        found = Follower(run)
        found.update()
        for width in (90, 60, 30):  # of lines that cannot wrap
            live = Console(width=width, file=io.StringIO())
            live.print(screen(found, 2, width))
            fitting = [line.split() for line in live.file.getvalue().splitlines()[-2:]]
            assert fitting == [row[: len(fitting[0])] for row in rows], width

    def test_shares_of_a_step_are_of_the_same_steps(self, tmp_path, shown):
        """A short last line with long waits does not make more than a whole."""
        late = self.line(0, 101, 1, axes={"data": {"bytes": 0, "seconds": 0.1}})
        metrics = [{"step": 101, "time": time.time() + 1000, "seconds": 0.1, "workers": 1}]
        text = shown("top", "--once", write(tmp_path / "run", metrics, [[self.line(0, 1, 100), late]]))
        assert "1 worker\n" in text and "80%      21%       10 B" in text

    def test_a_minimisation_has_a_value(self, tmp_path, shown):
        lines = [{"step": step, "start": 1, "loss": 1 / step, "workers": 2, "iteration": step - 1} for step in (1, 2)]
        run = write(tmp_path / "run", lines, starts=[{"time": 0}])
        assert "step 2, iteration 1, value 0.5, 2 ranks\n" in shown("top", "--once", run)
        write_lines(run / "ends.jsonl", {"step": 2, "start": 1, "reason": "decrease"})
        assert "ended: the value decreased by at most ftol after step 2\n" in shown("top", "--once", run)
        write_lines(run / "starts.jsonl", {"time": 0}, {"time": 1, "resumed_steps": 2})  # the second takes no step
        write_lines(run / "ends.jsonl", {"step": 2, "start": 2, "reason": "decrease"})
        text = shown("top", "--once", run)
        assert "value 0.5\n" in text and "ended: the value decreased" in text

    def test_nothing_known_yet(self, tmp_path, shown):
        run = write(tmp_path / "run", processes=[[self.line(0, 0, 0, time=time.time(), axes={})]])
        assert "nan" not in shown("top", "--once", run)
        assert json.loads(shown("top", "--json", run), parse_constant=pytest.fail)["ranks"][0]["seconds"] is None

    def test_the_newest_of_what_is_logged(self, tmp_path, shown):
        run = write(tmp_path / "run", [{"step": 30, "time": 0, "loss": 1.0}])
        lines = [{"step": 10, "a": 1}, {"step": 20, "a": 0.25}, *({"step": 5, f"b{n}": None} for n in range(9))]
        write_lines(run / "logged.jsonl", *lines)
        text = " ".join(shown("top", "--once", run).split())
        assert "a 0.25 at step 20, b0 NaN at step 5" in text and "b6 NaN at step 5 and 2 more" in text
        assert json.loads(shown("top", "--json", run))["logged"]["a"] == {"step": 20, "value": 0.25}

    def test_names_do_not_steer_the_terminal(self, tmp_path, shown):
        start = {"problem": {"steps": 1}}
        run = write(tmp_path / "run", [{"step": 1, "loss": 1.0}], [[self.line(0, 1, 1)]], [start])
        (run / "processes" / "host-0.jsonl").rename(run / "processes" / "\x1b[31m[bold]host-0.jsonl")
        write_lines(run / "logged.jsonl", {"step": 1, "a\x1b[2J": 1})
        text = shown("top", "--once", run)
        assert "\x1b" not in text and r"a\x1b[2J 1 at step 1" in text and r"\x1b[31m[bold]host-0" in text
        write_lines(run / "ends.jsonl", {"step": 1, "start": 1, "reason": "\x1b[2J"})
        for command in (["top", "--once"], ["why", "--wait", 0]):
            text = shown(*command, run)
            assert "\x1b" not in text and r"\x1b[2J after step 1" in text

    @pytest.mark.parametrize("stops", [True, False])
    def test_the_best_validation_loss(self, stops, tmp_path, shown):
        """Of the steps that the last start has not taken back, and how long a better one is awaited."""
        early = {"stop_early": {"type": "EarlyStopping", "patience": 3, "min_delta": 0.0}} if stops else {}
        starts = [{"resumed_steps": 0, **early}, {"resumed_steps": 20, **early}]
        run = write(tmp_path / "run", [{"step": 20, "start": 1, "time": 0, "loss": 1.0}], starts=starts)
        lines = [{"step": step, "start": 1, "validation_loss": loss} for step, loss in ((10, 0.5), (20, 0.75), (30, 0))]
        write_lines(run / "logged.jsonl", *lines, {"step": 30, "start": 2, "validation_loss": 0.625})
        waited = ", 2 of 3 without a better one" if stops else ""
        text = " ".join(shown("top", "--once", run).split())
        assert f"validation_loss 0.625 at step 30 (best 0.5 at step 10{waited})" in text
        assert json.loads(shown("top", "--json", run))["best_validation"] == {"step": 10, "value": 0.5}

    def test_many_silent_ranks_are_one_line(self, tmp_path, shown):
        run = write(tmp_path / "run", processes=[[self.line(rank, 1, 5, ranks=20)] for rank in range(20)])
        text = " ".join(shown("top", "--once", "--rows", 1, run).split())
        assert re.search("silent: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more for 6[0-9] s ", text)
        assert f"mpishard why {run} shows who waits for whom" in text

    def test_a_run_that_hangs_has_no_time_to_go(self, tmp_path, shown):
        now = time.time()
        start = {"time": now - 200, "every": 1.0, "problem": {"steps": 100}}
        step = {"step": 98, "start": 1, "time": now + 1000, "seconds": 0.01}
        run = write(tmp_path / "run", [step], starts=[start])
        assert "step 98 of 100, 10.0 ms a step, 1 s to go\n" in shown("top", "--once", run)
        write_lines(run / "metrics.jsonl", step | {"time": now - 40})
        text = shown("top", "--once", run)
        assert re.search("10.0 ms a step, no step for [4-9][0-9] s\n", text) and "to go" not in text
        # What is written every minute is not late after 40 seconds.
        write_lines(run / "starts.jsonl", start | {"every": 600})
        assert "1 s to go" in shown("top", "--once", run)

    @pytest.mark.parametrize(
        ("resumed", "steps", "end", "headline", "ending"),
        [
            (20, 20, "steps", "step 20 of 20, loss 0.5\n", ""),
            (20, 10, "steps", "step 20, loss 0.5\n", ", and 10 were asked for"),
            (0, 10, None, "no step yet\n", None),
            (15, 30, None, "step 15 of 30, loss 0.5\n", None),
        ],
    )
    def test_a_finished_run_that_is_started_again(self, resumed, steps, end, headline, ending, tmp_path, shown):
        starts = [{"resumed_steps": n, "problem": {"steps": last}} for n, last in ((0, 20), (resumed, steps))]
        metrics = [{"step": step, "start": 1, "time": 0, "seconds": 0.1, "loss": 0.5} for step in range(1, 21)]
        now = self.line(0, 0, 0, axes={}, time=time.time())
        run = write(tmp_path / "run", metrics, [[self.line(0, 1, 20)], [now]], starts)
        ends = [
            {"step": 20, "start": number, "reason": reason} for number, reason in ((1, "steps"), (2, end)) if reason
        ]
        write_lines(run / "ends.jsonl", *ends)
        write_lines(run / "logged.jsonl", {"step": 18, "start": 1, "accuracy": 0.5})
        text, why = shown("top", "--once", run), shown("why", "--wait", 0.1, run)
        assert headline in text and ("accuracy" in text) == (resumed >= 18)
        if ending is None:
            assert "ended" not in text and not why.startswith("the run has ended")
        else:
            ending = f"nothing was left to do: 20 steps had been taken before{ending}\n"
            assert f"ended: {ending}" in text and why == f"the run has ended: {ending}"

    def test_who_left_a_run_that_healed_is_not_missed(self, tmp_path, shown):
        """Rank 0 of 4 died and rank 3 waits as a spare: 1 and 2 are 0 and 1 now, and a spawned process is 2."""
        now = time.time()
        before = [self.line(rank, 1, 5, ranks=4, time=now - 60) for rank in range(4)]
        after = [self.line(rank, 6, 5, ranks=3, time=now + 1000) for rank in range(3)]
        lines = [[before[0]], [before[1], after[0]], [before[2], after[1]], [before[3]], [after[2]]]
        run = write(tmp_path / "run", [{"step": 10, "time": now, "seconds": 0.1}], lines)
        found = Follower(run)
        found.update()
        assert [process.name for process in found.processes] == ["host-1", "host-2", "host-4"]
        assert "silent" not in shown("top", "--once", run)
        silent = json.loads(shown("why", "--wait", 0.1, "--json", run))["findings"]
        assert [finding["ranks"] for finding in silent] == [[0], [1], [2]]

    def test_a_run_that_was_stopped(self, tmp_path, shown):
        starts = [{"time": 0, "resumed_steps": 0, "problem": {"steps": 9}}]
        metrics = [{"step": 5, "start": 1, "time": 0, "seconds": 0.1}]
        run = write(tmp_path / "run", metrics, [[self.line(0, 1, 5)]], starts)
        end = {"step": 5, "start": 1, "reason": "signal", "way_on": "the same command resumes"}
        write_lines(run / "ends.jsonl", end)
        ending = "stopped by a signal, such as Ctrl-C, after step 5 of 9; the same command resumes"
        text = shown("top", "--once", run)
        assert f"ended: {ending}\n" in text and "silent" not in text
        assert shown("why", run) == f"the run has ended: {ending}\n"
        found = json.loads(shown("why", run, "--json"))
        assert found == {"fresh": False, "ending": ending, "findings": [], "answers": [], "absent": {}}

    def test_a_run_whose_processes_are_gone(self, tmp_path, shown):
        starts = [{"time": 0, "problem": {"steps": 9}}]
        run = write(tmp_path / "run", [{"step": 5, "time": 0, "seconds": 0.1, "workers": 1}], starts=starts)
        with subprocess.Popen(["true"]) as child:
            child.wait()
        write_lines(run / "processes" / f"{os.uname().nodename}-{child.pid}.jsonl", self.line(0, 1, 5))
        text = " ".join(shown("top", "--once", run).split())
        assert "ended: none of its processes is left, and step 5 of 9 was the last" in text and "silent" not in text
        assert "the run has ended: none of its processes is left" in shown("why", "--wait", 0.1, run)
        deaths = [{"time": time, "rank": rank, "ranks": 3, "process": f"n{rank}-7"} for time, rank in ((-1, 0), (4, 2))]
        write_lines(run / "deaths.jsonl", *deaths)
        write_lines(run / "starts.jsonl", starts[0] | {"checkpoints": str(tmp_path / "none")})
        said = shown("why", "--wait", 0.1, run)
        assert "ended: rank 2 (n2-7) has died, none of" in said and f"checkpoints in {tmp_path}/none there is" in said


ANSWER = dict.fromkeys(("time", "began", "seconds", "rank", "process", "step"), 0) | {"ranks": 1, "state": "runs"}
ANSWER |= {"host": "host", "file": "", "call": None, "stack": []}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "7",
        "[" * 100_000,
        '{"rank": 0}',
        json.dumps({name: value for name, value in ANSWER.items() if name != "call"}),
        *(json.dumps(ANSWER | wrong) for wrong in ({"call": {"seconds": 9}}, {"step": "x"}, {"stack": [{}]})),
    ],
)
def test_a_damaged_answer_is_none(text, tmp_path, shown):
    line = process_line(0, 1, [0.5], time=time.time()) | {"ranks": 1}
    run = write(tmp_path / "run", [{"step": 1}], [[line]])
    (run / "processes" / "host-0.where.json").write_text(text)
    assert "rank 0: process 0 on host did not answer" in shown("why", "--wait", 0, run)


class TestAudits:
    """What `mpishard info` and `top` show of the audits of a run."""

    FIRST, SECOND = ({"rank": rank, "host": "n2", "pid": 7 + rank} for rank in (0, 1))
    OUT = {"wrong": [SECOND], "differ": [], "last_right": 12, "outcome": "put out"}
    LINES = (
        {"step": 16, "start": 1, "micro_batch": 5, **OUT},
        {"step": 20, "start": 1, "kind": "parameters", **OUT, "last_right": 10, "outcome": "mended"},
        {"step": 21, "start": 1, "kind": "sums", "wrong": [], "differ": [FIRST, SECOND], "outcome": "stopped"},
        {"step": 22, "start": 1, "kind": "parameters"},  # of another program
        {"step": 23, "wrong": [{"rank": 1}], "kind": ""},
    )
    TEXTS = (
        "step 16: rank 1 on n2 (pid 8) computed micro-batch 5 wrongly; right after step 12; it works no more",
        "step 20: rank 1 on n2 (pid 8) held wrong parameters; right after step 10; it took those of the others",
        "step 21: rank 0 on n2 (pid 7) and rank 1 on n2 (pid 8) added up gradients differently, and no majority says "
        "which is right; the run has ended",
    )

    @pytest.fixture
    def run(self, tmp_path, environ):
        environ(COLUMNS="300")
        metrics = [{"step": step, "start": 1, "time": 0, "seconds": 0.5} for step in range(1, 24)]
        start = {"started": "today", "host": "n1", "command": ["python", "a b.py"], "mesh": {"data": 3}, "problem": {}}
        audit = {"share": 0.05, "mean_steps": 3.42, "most_steps": 10}
        run = write(tmp_path / "run", metrics, starts=[start | {"audit": audit}])
        write_lines(run / "audits.jsonl", *self.LINES)
        return run

    def test_what_info_shows_of_a_run(self, run, shown):
        lines = [line.split("  ") for line in shown("info", run).splitlines()]
        text = {words[0]: words[-1].strip() for words in lines if words[0]}
        assert text["run"] == "step 23"
        assert text["started"] == "today on n1: python 'a b.py'"
        assert text["audit"].startswith("5 % of the micro-batches are computed twice; ")
        assert text["audit"].endswith("in step 3.42 on average, 10 at the latest, in 5.00 s with 500 ms a step")
        assert [words[-1].strip() for words in lines[-3:]] == list(self.TEXTS)
        found = json.loads(shown("info", run, "--json"))
        assert (found["last_step"], found["audit"]["share"], len(found["audit_findings"])) == (23, 0.05, 3)

    @pytest.mark.parametrize(
        ("audit", "text"),
        [
            ({"every": 10, "mean_steps": 5.5, "most_steps": 10}, "compared every 10 steps; .* after 5.5 steps on av"),
            ({"share": 1.0, "mean_steps": 1.0, "most_steps": 1}, "all micro-batches and sums are computed twice"),
            ({"share": 0.1, "mean_steps": None, "most_steps": None}, "there is one worker"),
            (None, "none"),
            ("replicas", "none"),
            ({"share": "much"}, "none"),
        ],
    )
    def test_what_an_audit_promises(self, audit, text, run, shown):
        (run / "audits.jsonl").unlink()
        write_lines(run / "starts.jsonl", {"audit": audit})
        output = shown("info", run)
        assert re.search(f"^audit +.*{text}", output, re.MULTILINE)
        assert ("found" in output) == (text != "none")

    def test_top_shows_what_was_found_since_the_last_start(self, run, shown):
        assert all(f"audit: {text}\n" in shown("top", "--once", run) for text in self.TEXTS)
        assert len(json.loads(shown("top", "--json", run))["audit_findings"]) == 3
        write_lines(run / "starts.jsonl", {}, {})
        assert "audit:" not in shown("top", "--once", run)

    @pytest.mark.parametrize(
        ("content", "said", "found"),
        [
            ("{}\n{}\n{{}}\n", "", 2),
            ("{}\n\x00\n{}\n{{\n", "line 2 on: of 4 lines 2 can be read", 2),
            ("{}\n{}", "line 2 on: of 2 lines 1 can be read", 1),
            ("\x00", "line 1 on: of 1 lines 0 can be read", 0),
        ],
    )
    def test_a_damaged_file_is_not_one_without_findings(self, content, said, found, run, shown):
        (run / "audits.jsonl").write_text(content.format(*map(json.dumps, self.LINES)))
        for command in (["info"], ["top", "--once"]):
            text = shown(*command, run)
            assert all(each in text for each in self.TEXTS[:found]) and "nothing" not in text
            assert re.findall("is damaged from (.*)", text) == [said] * bool(said)
            data = json.loads(shown(*command, "--json", run))
            assert data["audit_damage"].endswith(said) and len(data["audit_findings"]) == found


class TestWrongPlaces:
    @pytest.mark.parametrize("command", ["plot", "top", "why", "trace", "info"])
    def test_are_told_with_the_right_one(self, command, tmp_path, shown):
        run = write(tmp_path / "run")
        (tmp_path / "file").write_text("")
        for wrong, said in (("missing", "does not exist"), ("file", "is a file")):
            assert said in shown(command, tmp_path / wrong, code=2)
        for wrong in (tmp_path, run / "processes"):
            assert f"but there is one in {run}" in shown(command, wrong, code=2)

    @pytest.mark.parametrize(("size", "message"), [(2**27, "it has a line of more than"), (2**33, "it has 8589934592")])
    def test_a_file_that_is_none_of_lines_is_not_read_as_a_whole(self, tmp_path, size, message, shown):
        (tmp_path / "starts.jsonl").write_text("")
        (tmp_path / "metrics.jsonl").touch()
        os.truncate(tmp_path / "metrics.jsonl", size)
        for command in ("top", "plot"):
            assert f"metrics.jsonl: {message}" in shown(command, tmp_path, code=2)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            *(("metrics", {"loss": value}) for value in ({}, [1, 2], "x", 10**400)),
            ("metrics", {"step": 10**30}),
            ("metrics", {"seconds": "x"}),
            *(("processes/host-0", {"seconds": value}) for value in (3, ["x"], None)),
            *(("processes/host-0", {"axes": value}) for value in ([], {"data": 1}, {"data": {"seconds": 1}})),
            *(("processes/host-0", wrong) for wrong in ({"phases": {"a": "x"}}, {"step": "x"}, {"step": 2**70})),
            *(("processes/host-0", wrong) for wrong in ({"time": "x"}, {"pipeline": []})),
            *(("starts", {"problem": value}) for value in ([], {"steps": "x"}, {"batch_size": "x"})),
            *(("starts", wrong) for wrong in ({"time": "x"}, {"every": "x"}, {"command": 3, "mesh": []})),
            *(("logged", {"a": value}) for value in ({}, "x")),
            *(("processes/host-0.trace", {"spans": value}) for value in (None, [], [["a"]], [["a", [], 5, 1]])),
            *(("processes/host-0.trace", {"spans": [["a", "b", "x", 0]], "rank": value}) for value in (0, [])),
        ],
    )
    def test_a_damaged_line_is_left_out(self, name, wrong, tmp_path, shown):
        line = process_line(0, 1, [0.5], phases={"computation": 0.5}) | {"ranks": 1, "time": time.time()}
        run = write(tmp_path / "run", [{"step": 1, "time": 0, "loss": 1.0, "seconds": 0.5}], [[line]], [{"time": 0}])
        trace = {"rank": 0, "step": 1, "spans": [["step", "step", 0, 1]]}
        write_lines(run / "processes" / "host-0.trace.jsonl", trace)
        path = run / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else ['{"step": 1}']
        with path.open("a") as file:
            file.write(json.dumps(json.loads(lines[-1]) | wrong) + "\n")
        for command in (["top", "--once"], ["plot", "--json"], ["why", "--wait", 0], ["trace"], ["info"]):
            shown(*command, run)

    def test_processes_that_cannot_be_listed(self, tmp_path, shown):
        run = write(tmp_path / "run", [{"step": 1, "loss": 1.0, "seconds": 0.5, "workers": 1}])
        (run / "processes").rename(tmp_path / "processes")
        (run / "processes").touch()
        for command in ("plot", "top", "trace"):
            assert f"{run / 'processes'}: Not a directory" in shown(command, run, code=2)

    def test_steps_that_no_memory_holds(self, tmp_path, shown):
        run = write(tmp_path / "run", [{"step": 1}], [[process_line(0, step, [0.5]) for step in (1, 2**40)]])
        said = f"notes of {2**40} steps, from 1 on, but at most {2**27} are shown"
        assert said in shown("plot", "--json", run, code=2)

    def test_lines_of_others_are_left_out(self, tmp_path, shown):
        run = write(tmp_path / "run", [{"epoch": 1}], [[{"x": 2}]], [{"a": 1}])
        shown("plot", run, code=2)
        assert "no step yet" in " ".join(shown("top", run).split())

    def test_a_picture_that_cannot_be_written(self, tmp_path, shown):
        run = write(tmp_path / "run", [{"step": 1, "loss": 1.0, "seconds": 0.5, "workers": 1}])
        assert "end it with .png, .pdf or .svg" in shown("plot", run, "-o", tmp_path / "a.xyz", code=2)
        assert "cannot write" in shown("plot", run, "-o", tmp_path / "missing" / "a.png", code=2)
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        (run / "run.png").write_bytes(b"before")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
            shown("plot", run, code=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert (run / "run.png").read_bytes() == b"before" and len(list(run.iterdir())) == 4
