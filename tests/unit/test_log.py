"""What mpishard says goes to stderr, or to where the script wants it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mpishard.io import log


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger as a script finds it."""
    before = log.LOGGER.handlers[:], log.LOGGER.propagate, log.LOGGER.level
    log.LOGGER.handlers, log.LOGGER.propagate = [], True
    log.LOGGER.setLevel(logging.NOTSET)
    yield log.LOGGER
    log.LOGGER.handlers, log.LOGGER.propagate = before[:2]
    log.LOGGER.setLevel(before[2])


def test_on_stderr_and_once(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    log.inform("3 -> 2 workers, 100 %")
    log.warn("no slots")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "mpishard: 3 -> 2 workers, 100 %\nmpishard: no slots\n")
    assert not caplog.records  # which handlers of all loggers would show again


def test_what_comes_from_files_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log.warn("a\x1b[2J\nb\r")
    assert capsys.readouterr().err == "mpishard: a\\x1b[2J\nb\\r\n"


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
    with open("/dev/null", "w") as file:
        monkeypatch.setattr("sys.stderr", file)
    log.inform("to nobody")
