"""``mpishard estimate --startup`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpishard.cli import main
from mpishard.estimate import TYPICAL, Cluster, MachineProfile, StartParts, costs

PARTS = StartParts(processor_seconds=0.5, opens=600, lookups=400, bytes_read=10**8, object_seconds=1e-6)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("mpishard.cli.estimate.measure_start", lambda: PARTS)


def run(arguments: str) -> int:
    return main(["estimate", "--startup", *arguments.split()])


def test_table_and_what_breaks_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("") == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    rows = {line[:35].strip(): line[35:].split("  ") for line in shown.out.splitlines()}
    assert [cell.strip() for cell in rows["ranks"] if cell.strip()] == ["1,000", "10,000", "100,000"]
    assert [cell.strip() for cell in rows["opening files"] if cell.strip()] == ["20.0 s", "200 s", "2000 s"]
    assert "measured here" in shown.out and "assumed, not measured" in shown.out
    # 1000 opens and questions of each rank at 50,000 a second: ten minutes are 30,000 ranks, but for the rest.
    (line,) = (line for line in shown.out.splitlines() if line.startswith("What breaks first: "))
    assert line.startswith("What breaks first: start, on 29,")
    assert "opening files" in line and "A way out: " in line
    assert shown.out.splitlines()[-1] == "Up to ten million ranks nothing breaks of: step, checkpoint, heal."


def test_json_has_the_figures_of_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--ranks 5000 --parameters 1e9 --cores-per-node 32 --json") == 0
    found = json.loads(capsys.readouterr().out)
    (costs_found,) = found["costs"]
    expected = costs(5000, PARTS, Cluster(cores_per_node=32, parameters=1e9), TYPICAL)
    assert costs_found["start"] == expected.start and costs_found["heal"] == expected.heal
    assert found["measured"]["opens"] == 600
    assert found["assumed"]["cores_per_node"] == 32
    assert [each["what"] for each in found["breaks"]][0] == "step"  # 4 GB at 1 GB/s, beside a second of computing


def test_the_links_and_nodes_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    MachineProfile.given(1e9, 1e9, 1e-6).with_network(1e-3, 1e6, 4).save(file)
    for options, ranks_per_node in (("", 4), ("--ranks-per-node 2", 2)):
        assert run(f"--profile {file} --json {options}") == 0
        assert json.loads(capsys.readouterr().out)["assumed"]["ranks_per_node"] == ranks_per_node
    speeds = "--flops 1e9 --bandwidth 1e9 --latency 1e-6"
    assert run(speeds) == 0
    assert "which knows no network" in capsys.readouterr().out
    assert run(f"{speeds} --network-latency 1e-3 --network-bandwidth 1e6 --ranks 64 --json") == 0
    one_node = json.loads(capsys.readouterr().out)["costs"][0]["step"]["rounds of collectives"]
    assert run(f"{speeds} --network-latency 1e-3 --network-bandwidth 1e6 --ranks 65 --json") == 0
    assert json.loads(capsys.readouterr().out)["costs"][0]["step"]["rounds of collectives"] > 100 * one_node


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 0", "ranks=0 must be a whole number of at least 1"),
        ("--ranks -5", "ranks=-5"),
        ("--ranks many", "'--ranks'"),
        ("--width 64", "leave --width out"),
        ("--memory-limit 4GB --all", "leave --memory-limit, --all out"),
        ("--cores-per-node 0", "cores_per_node=0"),
        ("--ranks-per-node -1", "ranks_per_node=-1"),
        ("--opens-per-second 0", "opens_per_second=0.0 must be a finite number above 0"),
        ("--file-bandwidth nan", "file_bandwidth=nan"),
        ("--parameters -1", "parameters=-1.0"),
        ("--step-seconds inf", "step_seconds=inf"),
        ("--detection-seconds soon", "'--detection-seconds'"),
        ("--network-latency 1", "needs --network-bandwidth too"),
        ("--profile absent.json", "does not exist"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 8 --cores-per-node 4 --step-seconds 1", "--cores-per-node, --step-seconds: only for --startup"),
        ("--parameters 1e9", "the number of ranks is missing"),
    ],
)
def test_without_it_its_options_are_refused(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_profile_of_one_rank_knows_no_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    MachineProfile(((32, 1e9),)).save(file)
    assert run(f"--profile {file}") == 2
    assert "measured on 1 rank" in capsys.readouterr().err
