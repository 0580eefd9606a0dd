"""Progress in a log: often enough to see that it goes on, and seldom enough to be read."""

from __future__ import annotations

import pytest

from mpishard.training import progress


def test_lines_of_a_day(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    shown = progress.ProgressBar(86_400, shown=True)
    times, before = [], 0
    for _ in range(86_400):
        now[0] += 1
        shown.advance("loss 1")
        if now[0] < 700 or now[0] > 86_000:
            lines = capsys.readouterr().err
            times += [now[0]] * bool(lines)
            before += len(lines.splitlines())
    shown.close()
    assert times[:5] == [1, 6, 11, 16, 21] and times[-1] == 86_400
    assert before + len(capsys.readouterr().err.splitlines()) < 1600
