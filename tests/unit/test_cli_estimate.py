"""``mpishard estimate`` and ``mpishard bench``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpishard.cli import main
from mpishard.cli.bench import draw
from mpishard.cli.estimate import parse_bytes
from mpishard.cli.output import seconds, size
from mpishard.estimate import TYPICAL, Cluster, MachineProfile, StartParts, costs
from mpishard.estimate.benchmark import Timing

# ``mpishard estimate`` and ``mpishard bench`` as a user calls them.

MODEL = "--vocabulary 256 --context 64 --width 64 --layers 8 --heads 8"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def run(arguments: str) -> int:
    return main(["estimate", *arguments.split()])


def test_zero_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--parameters 7.5e9 --ranks 64") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines[-4:]] == [["120", "GB"], ["31.4", "GB"], ["16.6", "GB"], ["1.88", "GB"]]
    assert run("--parameters 7.5e9 --ranks 64 --json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["3"] == 16 * 7.5e9 / 64
    assert run("--parameters 7.5e9 --ranks 64 --memory-limit 20GB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in lines[-5:-1]] == ["!120", "!31.4", "16.6", "1.88"]
    assert lines[-1] == "! 2 of 4 stages need more than the limit of 20.0 GB a rank."


def test_table_of_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{MODEL} --ranks 8 --batch 16 --memory-limit 8MB --all") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert shown.err == ""
    assert max(map(len, lines)) <= 120
    assert "72 layouts of 8 ranks, 1024 tokens a step" in lines[0]
    rows = [line.split() for line in lines[3:75]]
    assert all(8 == int(row[0]) * int(row[1]) * int(row[2]) for row in rows)
    assert "need more than the limit of 8.00 MB" in shown.out
    # Cut values would end in an ellipsis.
    assert "…" not in shown.out
    marked = sum("!" in line for line in lines[3:75])
    assert f"! {marked} of 72 layouts" in shown.out
    assert "mpishard bench" in lines[-1]


def test_half_precision_on_devices(capsys: pytest.CaptureFixture[str]) -> None:
    one = f"{MODEL} --ranks 8 --data 8 --batch 16"
    found = {}
    for options in ("", "--device", "--half"):
        assert run(f"{one} --zero 1 {options} --json") == 0
        (each,) = json.loads(capsys.readouterr().out)
        found[options] = each["memory"]
    assert found[""]["rounded"] == found["--device"]["rounded"] == 0
    assert 0 < found["--half"]["rounded"] == found["--half"]["parameters"] / 2  # all at once, and none by itself
    assert found["--half"]["activations"] < found["--device"]["activations"] == found[""]["activations"]
    assert found[""]["scratch"] != found["--device"]["scratch"]
    for zero, shown in ((1, True), (3, False)):
        assert run(f"{one} --zero {zero} --half") == 0
        assert ("rounded" in capsys.readouterr().out) == shown


def test_times_of_processors_beside_memory_of_gpus_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.json"
    TYPICAL.save(file)
    of_processors = "Memory is that of GPUs, but times are those of processors: a typical core, 64 ranks a node.\n"
    given = "--flops 1e14 --bandwidth 1e11 --latency 1e-6 --memory-bandwidth 1e12"
    for options, named in (
        ("", False),
        ("--device", True),
        ("--half", True),
        (f"--device --half --profile {file}", True),
        (f"--half {given}", False),
    ):
        assert run(f"{MODEL} --ranks 8 {options}") == 0
        text = capsys.readouterr().out
        assert (of_processors in text) == named
        assert ("Times are predicted for a" in text) != named


def test_a_model_like_llama(capsys: pytest.CaptureFixture[str]) -> None:
    """With half the heads of keys and a narrow network it has fewer parameters, and fewer tensor sizes."""
    parameters = []
    for options in ("", "--key-value-heads 4 --hidden 128"):
        assert run(f"{MODEL} {options} --ranks 8 --json") == 0
        found = json.loads(capsys.readouterr().out)
        parameters.append(next(each["stages"][0]["parameters"] for each in found if each["data"] == 8))
        assert max(each["tensor"] for each in found) == (4 if options else 8)
    # Blocks of GPT-2 have 12 squares of the width; these have 3 in the attention and 6 in the network, and no biases.
    assert parameters[0] - parameters[1] == 8 * (3 * 64 * 64 + 11 * 64) + 64 * 64 + 64


def test_the_ten_best_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{MODEL} --ranks 8 --batch 16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line[:1] == " " and line.split()[0].isdigit()] == lines[3:13]
    assert lines[13] == "... and 62 more; --all shows them"


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 200])
def test_a_narrow_terminal_cuts_no_figures(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(f"{MODEL} --ranks 8 --data 2 --tensor 2 --memory-limit 8MB --all") == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith("   2     2     2")]
    assert len(rows) == 16 and "…" not in text
    assert ("not shown in" in text) == (columns < 120)
    assert max(map(len, text.splitlines()[:-1])) <= max(columns, 80)
    assert run(f"{MODEL} --ranks 8 --data 2 --tensor 2 --zero 0 --schedule 1f1b") == 0
    assert "…" not in capsys.readouterr().out


def test_json_is_sorted_by_time_and_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{MODEL} --ranks 4 --batch 16 --memory-limit 8MB --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["step_time"] for each in found] == sorted(each["step_time"] for each in found)
    assert all(each["fits"] == (each["memory"]["total"] <= 8e6) for each in found)
    assert {each["fits"] for each in found} == {False, True}


def test_one_layout_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{MODEL} --ranks 8 --data 2 --tensor 2 --zero 2 --schedule interleaved --sequence-parallel --tied") == 0
    text = capsys.readouterr().out
    for expected in ("2 chunks", "sequence parallel", "bubble", "activation gradients", "ties", "optimizer"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 120


def test_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    TYPICAL.save(file)
    only = f"{MODEL} --ranks 2 --data 2 --zero 1 --json"
    times = []
    for machine in ("", f"--profile {file}", "--flops 1e12 --bandwidth 1e10 --latency 2e-6"):
        assert run(f"{only} {machine}") == 0
        (found,) = json.loads(capsys.readouterr().out)
        times.append(found["step_time"])
    assert times[0] == times[1] > times[2]


def test_axes_between_nodes_have_the_networks_speed(capsys: pytest.CaptureFixture[str]) -> None:
    machine = "--flops 1e10 --bandwidth 1e9 --latency 1e-6"
    network = "--ranks-per-node 4 --network-bandwidth 1e6 --network-latency 1e-3"
    times = []
    for more in ("", network):
        found = {}
        for shape in ("--data 1 --tensor 4 --pipeline 2", "--data 2 --tensor 4 --pipeline 1"):
            assert run(f"{MODEL} --ranks 8 --zero 0 --schedule 1f1b {shape} {machine} {more} --json") == 0
            (found[shape],) = json.loads(capsys.readouterr().out)
        times.append([each["communication"] for each in found.values()])
    near, far = times
    # Without data ranks there is nothing to send between them; else all of their bytes go over the slower link.
    assert near[0] == far[0] == 0 and far[1] > 500 * near[1] > 0
    assert run(f"{MODEL} --ranks 8 --zero 0 --data 2 --tensor 4 --pipeline 1 {machine} {network}") == 0
    text = capsys.readouterr().out
    assert "tensor      4  within a node" in text and "data        2  between nodes" in text
    assert "4 ranks a node" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 8", "a model needs --vocabulary, --context, --width, --layers, --heads too"),
        (f"{MODEL} --ranks 8 --parameters 1e9", "not both"),
        (f"{MODEL} --ranks 0", "number of ranks is 0"),
        (f"{MODEL} --ranks 7 --tensor 7", "8 attention heads cannot be split over 7"),
        (f"{MODEL} --ranks 9 --pipeline 9", "9 pipeline stages, but the model has 8 layers"),
        (f"{MODEL} --ranks 8 --data 3", "sizes must multiply out to the ranks"),
        (f"{MODEL} --ranks 8 --zero 4", "unknown ZeRO stage 4"),
        (f"{MODEL} --ranks 8 --schedule best", "unknown schedule 'best'"),
        (f"{MODEL} --ranks 8 --memory-limit many", "--memory-limit is 'many'"),
        (f"{MODEL} --ranks 8 --flops 1e9", "--bandwidth and --latency too"),
        (f"{MODEL} --ranks 8 --memory-bandwidth 1e9", "goes with --flops"),
        (f"{MODEL} --ranks 8 --profile absent --flops 1", "--profile brings all speeds"),
        (f"{MODEL} --ranks 8 --profile absent.json", "--profile absent.json does not exist; make one"),
        (f"{MODEL} --ranks 8 --profile .", "--profile . is no file; make one"),
        (f"{MODEL} --ranks 8 --width 63", "width 63 is not a multiple of 8 heads"),
        (f"{MODEL} --ranks 8 --dtype float16", "choose float32 or float64"),
        (f"{MODEL} --ranks 8 --dtype float64 --half", "--half rounds operands of float32 products"),
        (f"{MODEL} --ranks eight", "'--ranks'"),
        ("--parameters -1 --ranks 8", "must be finite and above 0"),
        ("--parameters inf --ranks 8", "must be finite and above 0"),
        ("--parameters 1e9 --ranks 8 --tensor 2", "leave --tensor out"),
        ("--parameters 1e9 --ranks 8 --batch 4 --dtype float64 --all", "leave --batch, --dtype, --all out"),
        ("--parameters 1e9 --ranks 8 --memory-limit 80XB", "--memory-limit is '80XB'"),
        (f"{MODEL} --ranks 8 --vocabulary 0", "vocabulary_size is 0; it must be at least 1"),
        (f"{MODEL} --ranks 8 --heads 0", "not a multiple of 0 heads"),
        (f"{MODEL} --ranks 8 --batch 0", "--batch is 0; it must be at least 1"),
        (f"{MODEL} --ranks 8 --batch -5", "--batch is -5"),
        (f"{MODEL} --ranks 8 --rows 0", "--rows is 0"),
        (f"{MODEL} --ranks 8 --slots -1", "slots=-1"),
        (f"{MODEL} --ranks 8 --schedule interleaved --chunks 1", "needs at least 2 chunks a rank, got 1"),
        (f"{MODEL} --ranks 8 --chunks 0", "needs at least 2 chunks a rank, got 0"),
        (f"{MODEL} --ranks 8 --flops inf --bandwidth inf --latency 0", "finite speeds"),
        (f"{MODEL} --ranks 8 --flops 1 --bandwidth 1 --latency 0 --memory-bandwidth 0", "memory_bandwidth of a"),
        (f"{MODEL} --ranks 8 --ranks-per-node 4", "needs --network-bandwidth and --network-latency too"),
        (f"{MODEL} --ranks 8 --ranks-per-node 0 --network-bandwidth 1 --network-latency 0", "ranks_per_node=0"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4GB", 4e9),
        ("500 MB", 5e8),
        ("2GiB", 2**31),
        ("1.5kB", 1500),
        ("1e9", 1e9),
        ("7", 7),
        ("1TiB", 2**40),
        ("3g", 3e9),
    ],
)
def test_sizes_are_read(text: str, count: float) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "0", "inf", "4 apples", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--memory-limit"):
        parse_bytes(text)


def test_figures_have_three_digits() -> None:
    assert [size(count) for count in (0, 999, 1000, 9994, 99960, 999600, 4e9, 2.5e15)] == [
        *("-", "999 B", "1.00 kB", "9.99 kB", "100 kB", "1.00 MB", "4.00 GB", "2500 TB")
    ]
    assert [seconds(time) for time in (12.34, 0.5, 2e-6, 1e-9)] == ["12.3 s", "500 ms", "2.00 us", "0.00 us"]


def test_bench_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpishard.estimate.benchmark.SIZES", (16, 32))
    file = tmp_path / "profile.json"
    assert main(["bench", "--output", str(file)]) == 0
    assert "products of width 16" in capsys.readouterr().out
    profile = MachineProfile.load(file)
    assert [width for width, _ in profile.products] == [16, 32]
    assert not profile.node
    assert run(f"{MODEL} --ranks 1 --profile {file}") == 0
    capsys.readouterr()
    assert run(f"{MODEL} --ranks 2 --profile {file}") == 2
    assert "measured on 1 rank" in capsys.readouterr().err
    assert main(["bench", "--output", str(tmp_path / "no folder" / "profile.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["bench", "--output", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["bench", "--collectives"]) == 2
    assert "one rank has nobody to communicate with" in capsys.readouterr().err


def test_collectives_are_drawn(tmp_path: Path) -> None:
    timings = [Timing("data", 4, "all_reduce", nbytes, 1e-4, 9e-5, 2 * nbytes) for nbytes in (1024, 4096)]
    draw(timings, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ``mpishard estimate --startup`` as a user calls it.

PARTS = StartParts(processor_seconds=0.5, opens=600, lookups=400, bytes_read=10**8, object_seconds=1e-6)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("mpishard.cli.estimate.measure_start", lambda: PARTS)


def run_of_startup(arguments: str) -> int:
    return main(["estimate", "--startup", *arguments.split()])


def test_table_and_what_breaks_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_of_startup("") == 0
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
    assert run_of_startup("--ranks 5000 --parameters 1e9 --cores-per-node 32 --json") == 0
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
        assert run_of_startup(f"--profile {file} --json {options}") == 0
        assert json.loads(capsys.readouterr().out)["assumed"]["ranks_per_node"] == ranks_per_node
    speeds = "--flops 1e9 --bandwidth 1e9 --latency 1e-6"
    assert run_of_startup(speeds) == 0
    assert "which knows no network" in capsys.readouterr().out
    assert run_of_startup(f"{speeds} --network-latency 1e-3 --network-bandwidth 1e6 --ranks 64 --json") == 0
    one_node = json.loads(capsys.readouterr().out)["costs"][0]["step"]["rounds of collectives"]
    assert run_of_startup(f"{speeds} --network-latency 1e-3 --network-bandwidth 1e6 --ranks 65 --json") == 0
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
def test_errors_are_one_line_of_startup(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_of_startup(arguments) == 2
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
    assert run_of_startup(f"--profile {file}") == 2
    assert "measured on 1 rank" in capsys.readouterr().err
