"""Tracebacks show the user's frames, and where mpishard refuses what it was given."""

from __future__ import annotations

import re

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.launch.script import describe


def failing(parameters, samples, gradients):
    raise ArithmeticError("spoilt") from KeyError("its cause")


def train(function, **options):
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        problem = mpishard.OptimizationProblem(function, np.zeros(3), samples=9, batch_size=9, steps=1)
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mesh).optimize(problem, progress=False, **options)


def refused():
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mesh).step(np.zeros(5), np.zeros(4))


def text_and_files(call, *arguments, **options):
    """The text for the exception of a call, and the files of its frames."""
    try:
        call(*arguments, **options)
    except Exception as error:
        text = describe(error, error.__traceback__)
        return text, re.findall(r'File "([^"]*)", line', text)
    pytest.fail("it did not fail")


def test_of_a_users_function_only_the_users_frames():
    text, files = text_and_files(train, failing)
    assert files == [__file__] * 3
    assert "frames of mpishard are left out; MPISHARD_TRACEBACK=1" in text
    assert text.endswith("ArithmeticError: spoilt\n") and "KeyError: 'its cause'" in text


def test_in_a_library_that_the_users_function_calls():
    _, files = text_and_files(train, lambda parameters, samples, gradients: np.linalg.inv(np.zeros((2, 3))))
    assert files[:3] == [__file__] * 3
    assert all("numpy" in file for file in files[3:])


def test_of_refused_arguments_the_users_frames_and_who_refuses():
    text, files = text_and_files(refused)
    assert files[:-1] == [__file__] * 2
    assert files[-1].endswith("validation.py")
    assert text.endswith("ValueError: gradients have 4 elements, but parameters have 5\n")


def test_a_fault_inside_of_mpishard_is_told_whole(monkeypatch):
    monkeypatch.setattr("mpishard.data.sampling.permuted", lambda *arguments: None)
    text, files = text_and_files(train, lambda *arguments: 0.0)
    assert "left out" not in text
    assert len(files) > 5


@pytest.mark.parametrize(
    ("line", "frames"), [("raise ValueError(what)", 1), ("raise ValueError(what[9])", 2), ("what[9]", 2)]
)
def test_a_fault_in_the_words_of_a_refusal_is_told_whole(line, frames, tmp_path, monkeypatch):
    inside, between = tmp_path / "inside.py", tmp_path / "between.py"
    inside.write_text(f"def refuse(what):\n    {line}\n")
    between.write_text("def check(refuse):\n    refuse([])\n")
    monkeypatch.setattr("mpishard.launch.script._PACKAGE", str(tmp_path))
    functions: dict = {}
    for path in (inside, between):
        exec(compile(path.read_text(), path, "exec"), functions)
    _, files = text_and_files(functions["check"], functions["refuse"])
    assert [file for file in files if file.startswith(str(tmp_path))] == [str(between), str(inside)][-frames:]


def test_whole_if_asked_for(monkeypatch):
    monkeypatch.setenv("MPISHARD_TRACEBACK", "1")
    text, files = text_and_files(refused)
    assert "left out" not in text
    assert any(file.endswith("settings.py") for file in files)
