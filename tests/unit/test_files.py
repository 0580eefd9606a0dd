"""Files of others, notes, and the log."""

from __future__ import annotations

import errno
import json
import logging
import os
import pwd
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from mpishard import SGD, DDPOptimizer, OptimizationProblem, RunRecord
from mpishard.checkpoint import Checkpoints
from mpishard.io import files, log
from mpishard.io.files import parsed, read_note, write_note
from mpishard.record.reading import JsonLinesWriter
from mpishard.record.stacks import StackReporter

# Files in folders that others may write into: links are not followed, and one warning names the others.


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


class TestLinks:
    def test_a_note_takes_the_place_of_a_link(self, tmp_path, secret):
        (tmp_path / "run").symlink_to(secret)
        with pytest.raises(OSError):
            read_note(tmp_path / "run")
        write_note(tmp_path / "run", [1])
        assert not (tmp_path / "run").is_symlink() and read_note(tmp_path / "run") == [1]

    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "run")
        for use in (read_note, files.open_to_append):
            with pytest.raises(OSError, match="it is a pipe"):
                use(tmp_path / "run")

    def test_lines_are_not_added_to_what_a_link_leads_to(self, tmp_path, secret):
        (tmp_path / "metrics.jsonl").symlink_to(secret)
        lines = JsonLinesWriter(tmp_path / "metrics.jsonl")
        lines.add({"step": 1})
        with pytest.raises(OSError, match=r"it is a link.*metrics\.jsonl"):
            lines.flush()

    @pytest.mark.parametrize("inner", ["processes", "tensorboard"])
    def test_a_record_is_not_written_into_a_folder_behind_a_link(self, tmp_path, mesh, inner):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / inner).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match=rf"rank 0 .*run/{inner}: it is a link"):
            RunRecord(tmp_path / "run", mesh).begin()
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_stack_is_not_written_to_what_a_link_leads_to(self, tmp_path, secret, mesh):
        (tmp_path / "processes").mkdir()
        where = StackReporter(tmp_path, mesh, lambda: None, lambda steps: None, 1.0)
        where.stack_path.symlink_to(secret)
        where.watch()
        where.end()


PIPES = """
import sys
from pathlib import Path
from mpishard.cli import main
from mpishard.data import HDF5Tokens, MegatronFile, TextFile, TokenFile
from mpishard.nn import import_pretrained

folder = Path(sys.argv[1])
for typed in sys.argv[2:]:
    assert main(typed.split()) == 2, typed
sources = [HDF5Tokens(folder / "a.h5"), TokenFile(folder / "a.bin"), TextFile(folder / "a.txt", list)]
calls = [source.open for source in (*sources, MegatronFile(folder / "b"))]
for call in (*calls, lambda: import_pretrained(folder / "model")):
    try:
        call()
    except OSError as error:
        print(error, file=sys.stderr)
"""


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    """Where nobody writes into it, to open it would wait for ever."""
    names = ["a.safetensors", "a.npz", "a.h5", "a.bin", "a.txt", "b.idx", "model/x.safetensors"]
    names += ["run/metrics.jsonl", "ends/ends.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "run" / "starts.jsonl").write_text("")
    (tmp_path / "ends" / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"wte": "x.safetensors"}}')
    typed = ["import a.safetensors new", "import a.npz new"]
    typed += [f"{name} {run}" for name, run in (("top", "run"), ("plot", "run"), ("top", "ends"), ("why", "ends"))]
    command = [sys.executable, "-c", PIPES, str(tmp_path), *typed]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    lines = finished.stderr.splitlines()
    assert finished.returncode == 0 and len(lines) == len(typed) + 5, finished.stderr
    assert all("it is a pipe, but must be a regular file" in line for line in lines), finished.stderr


class TestWhatIsRead:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
            (lambda path: path.mkdir(), "it is a folder"),
            (lambda path: path.write_bytes(bytes(11)), "11 bytes, .*10"),
            (lambda path: None, "No such file"),
        ],
    )
    def test_is_a_regular_file_of_a_size_within_reason(self, tmp_path, make, message):
        make(tmp_path / "file")
        with pytest.raises(OSError, match=rf"{message}.*file"):
            files.read(tmp_path / "file", 10)

    def test_may_be_behind_a_link(self, tmp_path):
        (tmp_path / "file").write_bytes(b"0123456789")
        (tmp_path / "link").symlink_to(tmp_path / "file")
        assert files.read(tmp_path / "link", 10) == b"0123456789"
        with pytest.raises(OSError, match="it is a link"):
            files.read(tmp_path / "link", links=False)

    @pytest.mark.parametrize(("depth", "fits"), [(100, True), (101, False), (100_000, False)])
    @pytest.mark.parametrize("parts", [("[", "]"), ('{"a":', "}")])
    def test_is_json_that_is_not_too_deep(self, tmp_path, depth, fits, parts):
        text = parts[0] * depth + "1" + parts[1] * depth
        (tmp_path / "note").write_text(text)
        if fits:
            assert read_note(tmp_path / "note") == json.loads(text)
        else:
            with pytest.raises(ValueError, match="note is not JSON: .*100 deep"):
                read_note(tmp_path / "note")
            assert parsed("[" + "[[1]]," * 1000 + "2]")[-1] == 2  # many lists side by side


class TestPrivateFolders:
    def test_only_ones_own(self, tmp_path, monkeypatch):
        folder = tmp_path / "control"
        with pytest.raises(FileNotFoundError), files.opened(folder, private=True):
            pass
        folder.mkdir(mode=0o700)
        write_note(folder / "run", 1, private=True)
        assert read_note(folder / "run", private=True) == 1 and read_note(folder / "request", private=True) is None
        (tmp_path / "link").symlink_to(folder)
        folder.chmod(0o750)
        for path in (folder / "run", tmp_path / "link" / "run"):
            for use in (read_note, lambda path, private: write_note(path, 2, private=private)):
                with pytest.raises(files.NotPrivateError, match="nobody else may open"):
                    use(path, private=True)
        folder.chmod(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(files.NotPrivateError, match="and this is user 4242"):
            write_note(folder / "run", 2, private=True)


class TestOthers:
    @pytest.mark.parametrize(("mode", "count"), [(0o755, 0), (0o777, 1), (0o1777, 1)])
    def test_are_reported_once(self, tmp_path, mode, count):
        tmp_path.chmod(mode)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            for _ in range(2):
                files.warn_of_writers(tmp_path)
        assert ["all users" in str(each.message) for each in found] == [True] * count

    def test_a_group_of_ones_own_is_nobody_else(self, tmp_path, monkeypatch):
        tmp_path.chmod(0o775)
        own = pwd.getpwuid(os.geteuid()).pw_name
        group = type("Group", (), {"gr_name": own, "gr_mem": []})
        monkeypatch.setattr(files.grp, "getgrgid", lambda gid: group)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            files.warn_of_writers(tmp_path)
            group.gr_name = "project"
            with pytest.raises(RuntimeWarning, match="the users of group"):
                files.warn_of_writers(tmp_path)
            group.gr_name = own
            stranger = SimpleNamespace(st_uid=os.geteuid() + 1, st_gid=0, st_mode=0o40755)
            monkeypatch.setattr(os, "stat", lambda path: stranger)
            with pytest.raises(RuntimeWarning, match="who may write into it"):
                files.warn_of_writers(tmp_path)


class TestTheStartOfARun:
    def optimize(self, mesh, **options):
        def function(parameters, samples, gradients):
            return 0.0

        problem = OptimizationProblem(function, np.zeros(3), samples=4, batch_size=4, steps=2)
        return DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem, progress=False, **options).steps

    @pytest.mark.parametrize("every", [None, 1000])
    def test_a_folder_that_cannot_hold_checkpoints_is_found_before_a_step(self, tmp_path, mesh, secret, every):
        refused = r"^\[Errno 20\] checkpoints cannot be saved: rank 0"
        with Checkpoints(secret / "run", mesh, every=every) as checkpoints, pytest.raises(OSError, match=refused):
            self.optimize(mesh, checkpoints=checkpoints)
        with Checkpoints(secret / "run", mesh, every=every, on_error="warn") as checkpoints:
            with pytest.warns(RuntimeWarning, match="checkpoints cannot be saved"):
                assert self.optimize(mesh, checkpoints=checkpoints) == 2

    def test_nothing_is_left_of_looking(self, tmp_path, mesh):
        with Checkpoints(tmp_path / "run", mesh) as checkpoints:
            checkpoints.rehearse()
            assert os.listdir(tmp_path / "run") == ["holder"]
        assert os.listdir(tmp_path / "run") == []

    def test_a_record_that_cannot_be_written_says_that_it_is_the_record(self, mesh, secret):
        refused = "record .*rank 0 .*secret.*: Not a d"
        with pytest.raises(OSError, match=refused):
            self.optimize(mesh, record=RunRecord(secret / "run", mesh))

    def test_a_disk_that_is_full_at_the_beginning_does_not_end_the_run(self, tmp_path, mesh, monkeypatch, capfd):
        def full(lines):
            raise OSError(errno.ENOSPC, "No space left on device", str(lines.path))

        monkeypatch.setattr(JsonLinesWriter, "flush", full)
        assert self.optimize(mesh, record=RunRecord(tmp_path / "run", mesh, every=0)) == 2
        shown = capfd.readouterr().err
        assert (
            shown.count("\n") == 1
            and "the record of the run cannot be written" in shown
            and "continues without" in shown
        )


# What mpishard says goes to stderr, or to where the script wants it.


@pytest.fixture(autouse=True)
def untouched() -> Iterator[logging.Logger]:
    """The logger as a script finds it."""
    before = log.LOGGER.handlers[:], log.LOGGER.propagate, log.LOGGER.level
    log.LOGGER.handlers, log.LOGGER.propagate = [], True
    log.LOGGER.setLevel(logging.NOTSET)
    yield log.LOGGER
    log.LOGGER.handlers, log.LOGGER.propagate = before[:2]
    log.LOGGER.setLevel(before[2])


def test_on_stderr_once_and_without_steering_the_terminal(capsys, caplog):
    log.inform("3 -> 2 workers, 100 %")
    log.warn("a\x1b[2J\nb\r")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "mpishard: 3 -> 2 workers, 100 %\nmpishard: a\\x1b[2J\nb\\r\n")
    assert not caplog.records  # which handlers of all loggers would show again


def test_a_script_takes_it(untouched: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[tuple[str, str]] = []

    class Own(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            taken.append((record.levelname, record.getMessage()))

    untouched.addHandler(Own())
    untouched.setLevel(logging.WARNING)
    log.inform("left out")
    log.warn("taken")
    assert taken == [("WARNING", "taken")] and capsys.readouterr().err == ""


def test_a_closed_stderr_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is none, as of a process without a terminal."""
    with open("/dev/null", "w") as file:
        monkeypatch.setattr("sys.stderr", file)
    log.inform("to nobody")
    monkeypatch.setattr("sys.stderr", None)
    log.inform("to nobody")
