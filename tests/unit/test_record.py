"""The record of a run: written, read, and what is derived from it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import process_line, write, write_lines

import mpishard
from mpishard.cli import main
from mpishard.comm.ledger import Ledger
from mpishard.nn.decoder import TracedProducts
from mpishard.nn.layers import Layer
from mpishard.nn.products import make_matmul, shared_operand
from mpishard.record import Run
from mpishard.record.follower import Follower
from mpishard.record.reading import JsonLinesWriter, Process, read_lines, stragglers
from mpishard.record.record_files import RecordFiles, plain, surroundings, without_secrets
from mpishard.record.stacks import StackReporter
from mpishard.record.summary import (
    TimeSplit,
    Traced,
    binned,
    ranks_by_step,
    read_trace,
    spent,
    split_times,
    takeovers,
)

# The record of a run on one rank: files that survive crashes, full disks and NaN, and what is read from them.


class TestLines:
    def test_are_there_once_flushed_and_what_is_not_finite_is_null(self, tmp_path: Path) -> None:
        lines = JsonLinesWriter(tmp_path / "a")
        lines.add({"step": 1, "loss": float("nan"), "deep": {"of": [1.5, float("-inf")]}})
        assert not (tmp_path / "a").exists()
        lines.flush()
        lines.add({"step": 2})
        lines.close()
        found = [{"step": 1, "loss": None, "deep": {"of": [1.5, None]}}, {"step": 2}]
        assert read_lines(tmp_path / "a")[0] == [json.loads(line) for line in open(tmp_path / "a")] == found

    def test_a_torn_line_is_left_out_and_the_next_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.write_text('{"step": 1}\n{"step": 2, "lo')
        found, end = read_lines(path)
        assert found == [{"step": 1}] and end == 12
        lines = JsonLinesWriter(path)
        lines.add({"step": 3})
        lines.close()
        assert read_lines(path)[0] == [{"step": 1}, {"step": 3}]
        assert read_lines(path, end)[0] == [{"step": 3}]

    def test_lines_may_be_longer_than_what_is_read_at_once(self, tmp_path: Path) -> None:
        lines = [{"step": step, "text": "x" * 400_000} for step in range(8)] + [{"step": 8, "text": "x" * 3_000_000}]
        text = '{"step": ' + "[" * 100_000 + "\n"  # nested too deep: left out
        text += "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "a").write_text(text + '{"step"')
        assert read_lines(tmp_path / "a") == (lines, len(text))
        assert read_lines(tmp_path / "a", len(text)) == ([], len(text))

    def test_no_kill_leaves_more_than_one_line_torn(self, tmp_path: Path) -> None:
        """Killed at many moments, and appended to by the next one, every line that was flushed is there."""
        script = (
            "import sys, itertools; from pathlib import Path; from mpishard.record.reading import JsonLinesWriter\n"
            "lines, start = JsonLinesWriter(Path(sys.argv[1])), int(sys.argv[2])\n"
            "for number in itertools.count(start):\n"
            "    lines.add({'number': number, 'padding': 'x' * 3000}); lines.flush(); print(number, flush=True)"
        )
        path, printed = tmp_path / "a", []
        for start in (0, 10**6, 2 * 10**6):
            with subprocess.Popen(
                [sys.executable, "-c", script, str(path), str(start)], stdout=subprocess.PIPE, text=True
            ) as child:
                assert child.stdout is not None
                printed.append(int(child.stdout.readline()))
                time.sleep(0.02)
                child.send_signal(signal.SIGKILL)
                printed.extend(int(line) for line in child.stdout.read().splitlines() if line)
        there = [line["number"] for line in read_lines(path)[0]]
        assert len(printed) > 10 and set(printed) <= set(there) and len(there) - len(printed) <= 3

    def test_a_full_disk_is_reported_with_the_path(self, tmp_path: Path) -> None:
        before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        lines = JsonLinesWriter(tmp_path / "a")
        lines.add({"padding": "x" * 1000})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
            with pytest.raises(OSError, match=str(tmp_path / "a")):
                lines.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert read_lines(tmp_path / "a")[0] == []


class TestRun:
    def test_steps_are_in_order_with_gaps_and_a_start_from_a_checkpoint_takes_some_again(self, tmp_path: Path) -> None:
        metrics = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}, {"step": 4}]
        follower = Follower(write(tmp_path / "run", metrics))
        follower.update()
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "loss": 2.0, "gradient_norm": 5}) + "\n")
        follower.update()
        assert [line["step"] for line in follower.metrics] == [1, 2, 3] and follower.last_step == 3
        found = Run.read(tmp_path / "run").metrics
        np.testing.assert_array_equal(found["step"], [1, 2, 3])
        assert found["step"].dtype == np.int64
        np.testing.assert_array_equal(found["loss"], [3, np.nan, 2])
        np.testing.assert_array_equal(found["gradient_norm"], [np.nan, np.nan, 5])

    def test_no_record_is_an_error_that_says_how_to_write_one(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no record of a run.*RunRecord"):
            Run.read(tmp_path)

    def test_a_folder_beside_it_may_be_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "closed").mkdir(mode=0)
        is_file = Path.is_file

        def denied(path: Path) -> bool:  # as root is not
            if path.parent.name == "closed":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return is_file(path)

        monkeypatch.setattr(Path, "is_file", denied)
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")
        with pytest.raises(ValueError, match="no record of a run"):
            Run.read(tmp_path)

    def test_times_of_a_process_by_step(self, tmp_path: Path) -> None:
        lines = [process_line(1, 1, [0.5]), process_line(1, 2, [0.25, 0.125])]
        process = Run.read(write(tmp_path / "run", processes=[lines])).processes[0]
        steps, seconds = process.by_step("seconds")
        np.testing.assert_array_equal(steps, [1, 2, 3])
        np.testing.assert_array_equal(seconds, [0.5, 0.25, 0.125])

    def test_logged_values_of_a_step_that_a_later_start_has_repeated_do_not_count(self, tmp_path: Path) -> None:
        starts = {1: 1, 2: 1, 3: 2, 4: 2}  # by step; from a checkpoint of step 2, after the first had come to step 4
        run = write(tmp_path / "run", [{"step": step, "start": start, "loss": 1.0} for step, start in starts.items()])
        logged = [(0, 1), (2, 1), (3, 1), (4, 2)]
        write_lines(run / "logged.jsonl", *({"step": step, "start": start, "a": start} for step, start in logged))
        steps, values = Run.read(run).logged["a"]
        assert (steps.tolist(), values.tolist()) == ([0, 2, 4], [1, 1, 2])

    def test_logged_values_are_the_last_of_each_step(self, tmp_path: Path) -> None:
        run = write(tmp_path / "run", [{"step": s, "loss": 1.0, "rank_of": s if s == 2 else None} for s in (1, 2, 3)])
        lines = [(2, 0.1), (9, 0.2), (2, 0.3), (3, None)]  # step 9 was taken before a start from a checkpoint
        text = "".join(json.dumps({"step": step, "time": 0, "accuracy": value}) + "\n" for step, value in lines)
        (run / "logged.jsonl").write_text(text)
        found = Run.read(run)
        steps, values = found.logged["accuracy"]
        assert steps.tolist() == [2, 3] and values[0] == 0.3 and np.isnan(values[1])
        # What `step` was given besides is drawn like it.
        assert list(found.further) == ["rank_of", "accuracy"] and found.further["rank_of"][0] == [2]


def test_what_can_be_logged(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path / "run", mesh) as record:
        record.begin()
        record.step(1, loss=np.float32(0.5))
        record.log(1, accuracy=np.float64("nan"), top=np.int64(3))
        with pytest.raises(ValueError, match="loss is a series"):
            record.log(1, loss=0.5)
        for wrong in ("high", True, None):
            with pytest.raises(TypeError, match=f"accuracy={wrong!r}"):
                record.log(1, accuracy=wrong)
        for step, error in ((None, TypeError), (-3, ValueError)):
            with pytest.raises(error, match=f"step={step}"):
                record.log(step, accuracy=1)
        with pytest.raises(ValueError, match="no series for step 1"):
            record.log(1)
        with pytest.raises(ValueError, match="step=-3"):
            record.step(-3, loss=1.0)
        with pytest.raises(TypeError, match="loss='high'"):
            record.step(2, loss="high")
        with pytest.raises(ValueError, match="time is a field"):
            record.step(2, time=0.1)
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[0][0]["loss"] == 0.5
    (line,) = read_lines(tmp_path / "run" / "logged.jsonl")[0]
    assert (line["step"], line["accuracy"], line["top"]) == (1, None, 3)


def test_what_is_logged_is_written_at_once(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh, every=60) as record:
        record.log(0, accuracy=0.1)  # before there is a folder
        record.begin()
        for step in (1, 2):
            record.step(step, loss=1.0)
            record.log(step, accuracy=0.5)
            assert [line["step"] for line in read_lines(tmp_path / "logged.jsonl")[0]] == [*range(step + 1)]
        assert not (tmp_path / "metrics.jsonl").exists()


def test_steps_to_trace_are_set_and_a_phase_is_a_function(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh) as record:

        @record.phase("data")
        def read() -> int:
            return 3

        record.begin()
        record.step(1, loss=1.0)
        record.trace = (3, 3)
        for step in (2, 3, 4):
            assert read() == 3
            record.step(step, loss=1.0)
        assert record.trace == (3, 3)
    (path,) = (tmp_path / "processes").glob("*.trace.jsonl")
    (line,) = read_lines(path)[0]
    assert line["step"] == 3 and [span[0] for span in line["spans"]] == ["data", "step 3"]


def test_a_run_that_resumes_after_the_steps_to_trace_traces_none(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh, trace=(1, 2)) as record:
        record.begin()
        record.step(3, loss=1.0)
    assert not list((tmp_path / "processes").glob("*.trace.jsonl"))


def test_a_phase_within_another_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mpishard.Mesh() as mesh:
        now = [0.0]
        monkeypatch.setattr(time, "perf_counter", lambda: now[0])
        with mpishard.RunRecord(tmp_path, mesh, every=60) as record:
            record.begin()
            with record.phase("validation"):
                now[0] += 1
                with record.phase("data"):
                    now[0] += 2
            now[0] += 4
            record.step(1, loss=1.0)
    (process,) = Run.read(tmp_path).processes
    assert process.lines[-1]["phases"] == {"computation": 4, "data": 2, "validation": 1}


def test_what_an_error_has_ended_does_not_run_into_the_next_start(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh, every=60) as record:
        for steps in ((5, 6), (3, 4)):  # the second resumes from a checkpoint
            record.begin()
            for step in steps:
                record.step(step, loss=1.0)
    (process,) = Run.read(tmp_path).processes
    assert process.by_step("seconds")[0].tolist() == [5, 6, 3, 4]


def test_a_loop_of_ones_own_notes_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mpishard.Mesh() as mesh:
        for folder in (tmp_path / "other", tmp_path):  # the second is there
            mpishard.RunRecord(folder, mesh).step(1, loss=1.0)
            assert capsys.readouterr().err.count("RunRecord.begin makes it") == 1
        for reason in ("", "stopped by its queue"):
            with mpishard.RunRecord(tmp_path, mesh) as record:
                record.begin()
                record.step(3, loss=1.0)
                if reason:
                    record.end(3, reason)
        run = Follower(tmp_path)
        run.update()
        assert run.ending == "stopped by its queue after step 3"
        with contextlib.suppress(ArithmeticError), mpishard.RunRecord(tmp_path, mesh) as record:
            record.begin()
            record.step(4, loss=1.0)
            raise ArithmeticError
    ends = read_lines(tmp_path / "ends.jsonl")[0]
    assert [(end["step"], end["start"], end["reason"]) for end in ends] == [
        (3, 1, "closed"),
        (3, 2, "stopped by its queue"),
    ]
    run.update()
    assert run.last_step == 4 and not run.ended_in_order


class TestSpent:
    def test_means_over_processes_and_sums_of_bytes(self, tmp_path: Path) -> None:
        def sums(computation, data, sent):
            axes = {"data": {"bytes": sent, "seconds": data}}
            return {"phases": {"computation": computation}, "axes": axes}

        lines = [
            [process_line(0, 1, [1, 1], **sums(1.0, 1.0, 100)), process_line(0, 3, [1], **sums(1.0, 0.0, 8))],
            [process_line(1, 1, [1, 1, 1], **sums(3.0, 0.0, 30))],
        ]
        found = spent(Run.read(write(tmp_path / "run", processes=lines)))
        np.testing.assert_array_equal(found.steps, [1, 2, 3])
        np.testing.assert_allclose(found.phases["computation"], [0.75, 0.75, 1.0])
        np.testing.assert_allclose(found.phases["data axis"], [0.25, 0.25, 0.0], atol=1e-15)
        np.testing.assert_allclose(found.sent["data"], [60, 60, 18])

    def test_ranks_without_a_file_are_taken_to_be_like_the_others(self, tmp_path: Path) -> None:
        line = process_line(0, 1, [1], axes={"data": {"bytes": 5, "seconds": 0.0}}, ranks=4)
        found = spent(Run.read(write(tmp_path / "run", processes=[[line]])))
        np.testing.assert_allclose(found.sent["data"], [20])
        found = spent(Run.read(write(tmp_path / "nothing yet", [{"step": 1}])))
        assert len(found.steps) == 0 and not found.phases


@pytest.mark.parametrize(
    ("values", "most", "expected"),
    [(range(5), 10, range(5)), (range(5), 2, [1, 3.5]), ([1, np.nan, np.nan, np.nan], 2, [1, np.nan])],
)
def test_binned(values: Sequence[float], most: int, expected: Sequence[float]) -> None:
    np.testing.assert_array_equal(binned(np.array(values, float), most), expected)


def worked(first: int, last: int, ranks: int, time: float = 11) -> dict[str, Any]:
    """A line of a process that took these steps, of so many ranks."""
    return process_line(0, first, [0.5] * (last + 1 - first), time=time) | {"ranks": ranks}


# By what happens: the lines of each process, and the steps after which a spare took over.  The run has started at
# second 10, and again, from step 4, at second 20.
CHANGES: dict[str, tuple[list[list[dict[str, Any]]], list[int]]] = {
    "nothing": ([[worked(1, 9, 2)], [worked(1, 5, 2), worked(6, 9, 2)]], []),
    "a spare": ([[worked(1, 4, 2), worked(5, 9, 2)], [worked(1, 4, 2)], [worked(5, 9, 2)]], [4]),
    "a spare, the last line lost": ([[worked(1, 4, 2), worked(5, 9, 2)], [worked(1, 2, 2)], [worked(5, 9, 2)]], [4]),
    "a spare, all lines lost but the first": (
        [[process_line(0, 0, [], time=11), worked(1, 4, 2), worked(5, 9, 2)], [process_line(1, 0, [], time=11)]]
        + [[process_line(2, 0, [], time=11), worked(5, 9, 2)]],
        [4],
    ),
    "a spare that worked before": (
        [[worked(1, 3, 3), worked(4, 6, 2), worked(7, 9, 2)], [worked(1, 3, 3), worked(4, 6, 2)]]
        + [[worked(1, 3, 3), worked(7, 9, 2)]],
        [6],
    ),
    "two spares": (
        [[worked(1, 4, 2), worked(5, 6, 2), worked(7, 9, 2)], [worked(1, 4, 2)], [worked(5, 6, 2)], [worked(7, 9, 2)]],
        [4, 6],
    ),
    "two at once": ([[worked(1, 4, 2)], [worked(1, 4, 2)], [worked(5, 9, 2)], [worked(5, 9, 2)]], [4]),
    "no spare is left": ([[worked(1, 4, 2), worked(5, 9, 1)], [worked(1, 4, 2)]], []),
    "a worker more": ([[worked(1, 4, 1), worked(5, 9, 2)], [worked(5, 9, 2)]], []),
    "another in its place later": (
        [[worked(1, 4, 2), worked(5, 6, 1), worked(7, 9, 2)], [worked(1, 4, 2)], [worked(7, 9, 2)]],
        [],
    ),
    "a line of a living process is lost": ([[worked(1, 9, 2)], [worked(1, 4, 2), worked(6, 9, 2)]], []),
    "a start from a checkpoint": (
        [[worked(1, 6, 2)], [worked(1, 6, 2)], [worked(5, 9, 2, 21)], [worked(5, 9, 2, 21)]],
        [],
    ),
    "a spare after a start": (
        [[worked(1, 6, 2)], [worked(5, 7, 2, 21), worked(8, 9, 2, 21)], [worked(5, 7, 2, 21)], [worked(8, 9, 2, 21)]],
        [7],
    ),
    "steps of a loop that counts by fives": (
        [[worked(5, 7, 2), worked(20, 22, 2)], [worked(5, 19, 2), worked(80, 81, 2)]],
        [],
    ),
    "nothing is noted": ([[process_line(0, 0, [])]], []),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_spare_takes_over_where_a_process_has_ended(tmp_path: Path, what: str) -> None:
    lines, expected = CHANGES[what]
    run = write(tmp_path / "run", [{"step": 1}], lines, [{"time": 10}, {"time": 20}])
    assert takeovers(Run.read(run)) == expected


def test_the_number_of_ranks_is_that_of_the_last_time_a_step_was_taken(tmp_path: Path) -> None:
    lines = [[worked(2, 6, 4)], [worked(5, 8, 2, 21)]]
    run = Run.read(write(tmp_path / "run", [{"step": step} for step in (1, 2, 3, 5, 6, 8, 9)], lines))
    np.testing.assert_array_equal(ranks_by_step(run), [np.nan, 4, 4, 2, 2, 2, np.nan])


def test_settings_become_plain() -> None:
    mesh = mpishard.Mesh()
    settings = plain(mpishard.ShardingConfiguration(mesh, gradient_compressor=mpishard.compression.Int8Compressor(64)))
    mesh.free()
    assert "mesh" not in settings and settings["gradient_compressor"] == {"type": "Int8Compressor", "block": 64}
    assert plain({"a": np.int64(3), "b": (1, None), "c": len}) == {"a": 3, "b": [1, None], "c": repr(len)}
    json.dumps(plain([np.complex64(1j), np.datetime64("2020-01-01"), np.bytes_(b"a"), np.longdouble(1)]))


def test_surroundings_hold_no_secret(environ: Callable[..., None]) -> None:
    names = "SLURM_JWT MPISHARD_API_KEY UCX_Auth_Mode OMPI_MCA_PASSWD MPISHARD_Credentials".split()
    environ(**dict.fromkeys(names, "hunter2"), SLURM_JOB_ID="42")
    with mpishard.Mesh() as mesh:
        found = surroundings(mesh)
    assert found["environment"]["MPISHARD_API_KEY"] == found["environment"]["UCX_Auth_Mode"] == "***"
    assert found["environment"]["SLURM_JOB_ID"] == "42" and "hunter2" not in json.dumps(found)
    assert found["versions"]["NumPy"] == np.__version__ and found["ranks"] == 1 and found["command"][1:] == sys.argv


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--api-key VALUE --lr 1", "--api-key *** --lr 1"),
        ("--token=VALUE file", "--token=*** file"),
        ("--password -VALUE", "--password ***"),
        ("-Passwd VALUE x", "-Passwd *** x"),
        ("tracker.api_key=VALUE=", "tracker.api_key=***"),
        ("--secret token --key=VALUE", "--secret *** --key=***"),
        ("--use-auth --steps 3", "--use-auth --steps 3"),
        ("--key --auth", "--key --auth"),
        ("keys/train.py --tokenizer llama --key-value-heads 2", None),
        ("--data=/secret/x key --folder=runs/key=3", None),
    ],
)
def test_a_command_line_holds_no_secret(given: str, kept: str | None) -> None:
    assert " ".join(without_secrets(given.split())) == (kept or given)


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path / "run", mesh, tensorboard=True) as record:
        record.begin()
        for step in (1, 2, 3):
            record.step(step, loss=1 / step if step != 2 else float("nan"))
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 1.0), (3, np.float32(1 / 3))]
    assert {"loss", "seconds", "workers"} == set(events.Tags()["scalars"])


def test_no_tensorboard_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with mpishard.Mesh() as mesh, pytest.raises(ModuleNotFoundError, match=r"pip install 'mpishard\[tensorboard\]'"):
        mpishard.RunRecord(tmp_path / "run", mesh, tensorboard=True)


def test_tensorboard_takes_no_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with mpishard.Mesh() as mesh, pytest.raises(ValueError, match="UTF-8, got .*leave tensorboard out"):
        mpishard.RunRecord(tmp_path / "\udcff", mesh, tensorboard=True)


def test_the_next_first_rank_writes_what_a_dead_one_has_not(tmp_path: Path, environ: Callable[..., None]) -> None:
    class Placed(mpishard.Mesh):
        rank = 0

    environ(OMPI_MCA_mpi_ft_enable="1")
    # A start before went further, and has taken the same steps.
    write(tmp_path, [{"step": step, "start": 1, "loss": 0.0} for step in (1, 2, 3, 9)], starts=[{}])
    with Placed() as first, Placed() as other:
        other.rank = 1
        dying, living = (mpishard.RunRecord(tmp_path, mesh, every=60) for mesh in (first, other))
        dying.begin()
        for step in range(2, 7):
            for record in (dying, living):
                record.step(step, loss=1 / step)
            if step == 4:
                dying.flush()
        other.rank = 0  # the other one has died
        living.step(7, loss=1 / 7)
        living.step(8, loss=1 / 8)
        living.close()
        lines = read_lines(tmp_path / "metrics.jsonl")[0][4:]
        assert [(line["step"], line["start"], line["loss"]) for line in lines] == [(s, 2, 1 / s) for s in range(2, 9)]
        assert set(lines[3]) == set(lines[0])  # of the one and of the other
        dying._files.metrics._waiting.clear()  # which a death takes along
        dying.close()


def test_a_record_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path / "run", mesh, every=0) as record:
        record.begin()
        record.step(1, loss=1.0)
        os.rename(tmp_path / "run", tmp_path / "gone")
        record.close()
        for step in (2, 3):
            record.step(step, loss=1.0)
    shown = capsys.readouterr().err
    assert shown.count("the record of the run ends here") == 1 and str(tmp_path / "run") in shown
    assert len(read_lines(tmp_path / "gone" / "metrics.jsonl")[0]) == 1


def test_a_folder_that_fails_at_the_end_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def full(descriptor: int) -> None:  # as a network file system may tell of it
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if path.endswith("ends.jsonl"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with mpishard.Mesh() as mesh:
        first, second = (mpishard.RunRecord(tmp_path / name, mesh) for name in ("first", "second"))
        first.begin()
        os.rename(tmp_path / "first", tmp_path / "gone")
        (tmp_path / "first").touch()
        first.end(1, "steps")
        second.begin()
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", full)
            second.end(1, "steps")
    shown = capsys.readouterr().err
    assert shown.count("the record of the run ends here") == 2 and f"[Errno {errno.EDQUOT}]" in shown


def test_events_that_cannot_be_written_do_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh, tensorboard=True, every=60) as record:
        record.begin()
        (tmp_path / "tensorboard").touch()
        for step in (1, 2):
            record.step(step, loss=1.0)
    assert capsys.readouterr().err.count("the record of the run ends here") == 1
    assert len(read_lines(tmp_path / "metrics.jsonl")[0]) == 2


def test_the_end_of_a_posterior_is_in_words(tmp_path: Path) -> None:
    with mpishard.Mesh() as mesh:
        record = mpishard.RunRecord(tmp_path, mesh)
        mpishard.laplace(np.zeros(3), lambda x, v: v, mpishard.DiagonalPrior(1.0), rank=1, mesh=mesh, record=record)
    run = Follower(tmp_path)
    run.update()
    assert "products of both passes are known after" in run.ending


def test_a_script_that_changes_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with mpishard.Mesh() as mesh, mpishard.RunRecord("run", mesh) as record:
        record.begin()
        monkeypatch.chdir("other")
        record.step(1, loss=1.0)
    run = Follower(tmp_path / "run")
    run.update()
    assert run.last_step == 1 and run.ended_in_order


@pytest.mark.parametrize("what", ["broken", "broken at the start", "without a file"])
def test_what_no_file_takes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with mpishard.Mesh() as mesh, mpishard.RunRecord(tmp_path, mesh, every=60) as record:
        files = record._files
        if what == "without a file":
            monkeypatch.setattr(RecordFiles, "has_process", False)
        if what == "broken at the start":
            files.give_up(OSError(errno.ENOSPC, "full"))
        record.begin()
        if what == "broken":
            files.give_up(OSError(errno.ENOSPC, "full"))
        for step in (1, 2, 3):
            record.step(step, loss=1.0)
        if what == "broken":
            record.flush()  # as its thread does
        assert not record._times._durations and not files.process._waiting


# Stragglers by what processes have noted.


def process(rank: int, busy: list[float], first: int = 1, pipeline: int = 0) -> Process:
    """Two lines, as two flushes leave them."""
    middle, of_rank = len(busy) // 2, {"rank": rank, "pipeline": pipeline}
    halves = (first, busy[:middle]), (first + middle, busy[middle:])
    return Process(f"node-7-{1000 + rank}", [of_rank | {"step": step, "busy": x, "seconds": x} for step, x in halves])


def processes(*seconds: float, **options: int) -> list[Process]:
    return [process(rank, [each] * 20, **options) for rank, each in enumerate(seconds)]


STAGES = [*processes(0.1, 0.1), *(process(rank, [0.3] * 20, pipeline=1) for rank in (2, 3))]
NOISE = np.random.default_rng(0).uniform(0.08, 0.16, (8, 20)).tolist()
STRAGGLERS: dict[str, tuple[list[Process], list[int]]] = {
    "the slow one": (processes(0.1, 0.2, 0.1), [1]),
    "the slowest first": (processes(0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3), [6, 5]),
    "noise": ([process(rank, busy) for rank, busy in enumerate(NOISE)], []),
    "slow now and then": ([*processes(0.1, 0.1), process(2, [0.1, 0.3] * 10)], []),
    "a few steps": ([process(0, [0.1] * 4), process(1, [0.9] * 4)], []),
    "a slow stage": (STAGES, []),
    "a slow rank of a slow stage": ([*STAGES, process(4, [0.6] * 20, pipeline=1)], [4]),
    "one that has stopped writing": ([*processes(0.1, 0.2, 0.1, first=100), process(3, [0.9] * 20)], [1]),
}


@pytest.mark.parametrize("what", STRAGGLERS)
def test_stragglers_are_named(what: str) -> None:
    everybody, slow = STRAGGLERS[what]
    found = stragglers(everybody)
    assert [each.rank for each in found] == slow
    if what == "the slow one":
        assert (found[0].host, found[0].slower) == ("node-7", 2)
        assert "rank 1 on node-7 computes 200 ms a step, 2 times" in str(found[0])


def test_an_answer_has_the_call_of_the_ledger(tmp_path: Path, mesh: mpishard.Mesh) -> None:
    reporter = StackReporter(tmp_path, mesh, lambda: None, lambda steps: None, 1.0)
    assert reporter.answer()["state"] == "runs"
    mesh.ledger.active = mesh.ledger.begin("data", 7, "recv", np.dtype("f4"), 10, "loss", (0, 3))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(reporter.answer).result()
    mesh.ledger.active = None
    call = {"op": "recv", "on": "data", "class": "Axis", "number": "#7", "buffer": "10 float32 [loss]"}
    assert answer["call"] == call | {"size": 2, "members": [0, 3], "source": 1}
    assert answer["state"] == "waits" and answer["step"] == 0
    own = [frame for frame in answer["stack"] if frame["own"]]
    assert own[0]["text"] == "answer = pool.submit(reporter.answer).result()"


# The split of traced steps in matrix products, communication and the rest, with a clock of the test's own.


def spans_of(rank: int, step: int, *parts: tuple[str, float, float]) -> list[Traced]:
    return [Traced(rank, step, kind, kind, start, seconds) for kind, start, seconds in parts]


def test_parts_add_up_and_no_moment_counts_twice() -> None:
    spans = spans_of(
        1,
        4,
        ("step", 8.0, 16.0),
        ("function", 9.0, 10.0),
        ("F", 9.0, 4.0),
        ("product", 9.0, 2.0),
        ("product", 11.0, 1.0),
        ("data", 12.0, 2.0),
        ("node", 13.0, 2.0),  # begins within the last
        ("product", 14.5, 1.0),  # half of it within the last
        ("world", 23.0, 4.0),  # ends after the step
    )
    (split,) = split_times(spans)
    assert split == TimeSplit(1, 16.0, 3.5, 4.0)
    assert split.rest == 8.5


def test_the_split_is_the_mean_of_a_ranks_steps() -> None:
    spans = [
        *spans_of(0, 1, ("step", 0.0, 2.0), ("product", 0.5, 1.0)),
        *spans_of(0, 2, ("step", 2.0, 4.0), ("data", 3.0, 1.0)),
        *spans_of(1, 1, ("step", 0.0, 3.0)),
    ]
    assert split_times(spans) == [TimeSplit(0, 3.0, 0.5, 0.5), TimeSplit(1, 3.0, 0.0, 0.0)]


class Clock:
    """Time passes in products and where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.products: list[int] = []  # by step
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def slow(self, matmul: Any) -> Any:
        def product(a: Any, b: Any, out: Any) -> Any:
            self.now += 1.0
            self.products[-1] += 1
            return matmul(a, b, out=out)

        return product


def layers_of(model: mpishard.nn.GPT) -> Iterator[Layer]:
    found: list[Any] = [unit for chunk in model.chunks for unit in chunk.units]
    while found:
        layer = found.pop()
        yield layer
        found += layer.children


def test_products_count_in_traced_steps_and_nothing_is_called_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.arange(16).reshape(2, 8) % 5
    with mpishard.Mesh() as mesh:
        model = mpishard.nn.GPT(vocabulary_size=5, context_length=8, width=4, layers=2, heads=2, mesh=mesh)
        clock = Clock(monkeypatch)
        for layer in layers_of(model):
            layer.matmul = clock.slow(layer.matmul)
        plain = [layer.matmul for layer in layers_of(model)]
        with mpishard.RunRecord(tmp_path, mesh, trace=(2, 3)) as record:
            record.begin()
            for step in (1, 2, 3, 4):
                clock.products.append(0)
                model.loss_and_gradient(tokens, tokens)
                # The first step is noted too, since a trace is asked for, and then left out.
                assert ([layer.matmul for layer in layers_of(model)] == plain) == (step == 4)
                clock.now += 0.5
                record.step(step, loss=1.0)
    assert min(clock.products) > 0
    (split,) = split_times(read_trace(tmp_path))
    count = sum(clock.products[1:3]) / 2
    assert (split.products, split.communication) == (pytest.approx(count, abs=1e-3), 0.0)
    assert split.step == pytest.approx(count + 0.5, abs=1e-3)
    assert main(["trace", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == ["rank", "ms/step", "products", "communication", "rest"]
    assert row.split()[:2] == ["0", f"{(count + 0.5) * 1e3:.2f}"]
    assert row.split()[-2:] == ["500.00", f"({0.5 / (count + 0.5):.0%})"]


def test_an_operand_is_rounded_once_in_a_traced_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    monkeypatch.setattr("mpishard.backend.gemm.has_fast_bfloat16", lambda: True)
    layer, ledger = Layer("layer"), Ledger()
    layer.module, layer.matmul = np, make_matmul(np, ml_dtypes.bfloat16)
    operand = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    bits = shared_operand(layer.matmul, operand).copy()
    assert bits.dtype == np.uint16
    ledger.spans = []
    TracedProducts([layer], ledger).follow_trace()
    assert not hasattr(layer.matmul, "shared")
    np.testing.assert_array_equal(shared_operand(layer.matmul, operand), bits)
