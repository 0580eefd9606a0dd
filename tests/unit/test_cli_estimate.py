"""``mpishard estimate`` and ``mpishard bench``."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from mpishard.cli import main
from mpishard.cli.bench import draw
from mpishard.cli.estimate import parse_bytes
from mpishard.cli.output import seconds, size
from mpishard.estimate import TYPICAL, MachineProfile
from mpishard.estimate.benchmark import Timing

# ``mpishard estimate`` and ``mpishard bench`` as a user calls them.

MODEL = "--vocabulary 256 --context 64 --width 64 --layers 8 --heads 8"
# The same model in a file.
TOML = "vocabulary_size = 256\ncontext_length = 64\nwidth = 64\nlayers = 8\nheads = 8\n"
LLAMA = TOML + 'kind = "LlamaArchitecture"\nkey_value_heads = 4\nhidden = 128\n'
CONFIG = {
    **{"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 64, "hidden_size": 64},
    **{"intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4},
}


@pytest.fixture
def run(environ, capsys):
    """What the command prints, which is what is wrong and nothing else if it fails."""
    environ(COLUMNS="120")

    def run(arguments, code=0, command="estimate"):
        assert main([command, *arguments.split()]) == code
        shown = capsys.readouterr()
        assert not (shown.out if code else shown.err)
        return shown.err if code else shown.out

    return run


def test_zero_table(run):
    lines = run("--parameters 7.5e9 --ranks 64").splitlines()
    assert [line.split()[-2:] for line in lines[-4:]] == [["120", "GB"], ["31.4", "GB"], ["16.6", "GB"], ["1.88", "GB"]]
    assert json.loads(run("--parameters 7.5e9 --ranks 64 --json"))["bytes"]["3"] == 16 * 7.5e9 / 64
    lines = run("--parameters 7.5e9 --ranks 64 --memory-limit 20GB").splitlines()
    assert [line.split()[-2] for line in lines[-5:-1]] == ["!120", "!31.4", "16.6", "1.88"]
    assert lines[-1] == "! 2 of 4 stages need more than the limit of 20.0 GB a rank."


def test_table_of_layouts(run):
    text = run(f"{MODEL} --ranks 8 --batch 16 --memory-limit 8MB --all")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120 and "…" not in text  # in which cut values would end
    assert "72 layouts of 8 ranks, 1024 tokens a step" in lines[0] and "mpishard bench" in lines[-1]
    assert all(8 == np.prod([int(size) for size in line.split()[:3]]) for line in lines[3:75])
    marked = sum("!" in line for line in lines[3:75])
    assert f"! {marked} of 72 layouts" in text and "need more than the limit of 8.00 MB" in text
    lines = run(f"{MODEL} --ranks 8 --batch 16").splitlines()
    assert [line for line in lines if line[:1] == " " and line.split()[0].isdigit()] == lines[3:13]
    assert lines[13] == "... and 62 more; --all shows them"


def test_half_precision_on_devices(run):
    one = f"{MODEL} --ranks 8 --data 8 --batch 16"
    found = {}
    for options in ("", "--device", "--half"):
        (each,) = json.loads(run(f"{one} --zero 1 {options} --json"))
        found[options] = each["memory"]
    assert found[""]["rounded"] == found["--device"]["rounded"] == 0
    assert 0 < found["--half"]["rounded"] == found["--half"]["parameters"] / 2  # all at once, and none by itself
    assert found["--half"]["activations"] < found["--device"]["activations"] == found[""]["activations"]
    assert found[""]["scratch"] != found["--device"]["scratch"]
    assert "rounded" in run(f"{one} --zero 1 --half") and "rounded" not in run(f"{one} --zero 3 --half")


def test_times_of_processors_beside_memory_of_gpus_are_named(tmp_path, run):
    file = tmp_path / "profile.json"
    TYPICAL.save(file)
    of_processors = "Memory is that of GPUs, but times are those of processors: a typical core, 64 ranks a node.\n"
    by_hand = tmp_path / "gpus.toml"
    by_hand.write_text("flops = 1e14\nbandwidth = 1e11\nlatency = 1e-6\nmemory_bandwidth = 1e12")
    for options, named in (
        ("", False),
        ("--device", True),
        (f"--device --half --profile {file}", True),
        (f"--half --profile {by_hand}", False),
    ):
        text = run(f"{MODEL} --ranks 8 {options}")
        assert (of_processors in text) == named
        assert ("Times are predicted for a" in text) != named


def test_a_model_in_a_file(run, tmp_path):
    """With half the heads of keys and a narrow network a Llama has fewer parameters, and fewer tensor sizes."""
    config, llama, gpt = tmp_path / "config.json", tmp_path / "llama.toml", tmp_path / "gpt.toml"
    config.write_text(json.dumps(CONFIG))
    llama.write_text(LLAMA)
    gpt.write_text(TOML)
    parameters = []
    for alike in ((MODEL, f"--model {gpt}"), (f"--model {llama}", f"--model {config}")):
        text, other = (run(f"{options} --ranks 8 --json") for options in alike)
        assert text == other
        found = json.loads(text)
        parameters.append(next(each["stages"][0]["parameters"] for each in found if each["data"] == 8))
        assert max(each["tensor"] for each in found) == (8 if alike[0] == MODEL else 4)
    # Blocks of GPT-2 have 12 squares of the width; these have 3 in the attention and 6 in the network, and no biases.
    assert parameters[0] - parameters[1] == 8 * (3 * 64 * 64 + 11 * 64) + 64 * 64 + 64


@pytest.mark.parametrize("columns", [60, 100, 120])
def test_a_narrow_terminal_cuts_no_figures(columns, run, environ):
    environ(COLUMNS=str(columns))
    text = run(f"{MODEL} --ranks 8 --data 2 --tensor 2 --memory-limit 8MB --all")
    rows = [line.split() for line in text.splitlines() if line.startswith("   2     2     2")]
    assert len(rows) == 16 and "…" not in text
    assert ("not shown in" in text) == (columns < 120)
    assert max(map(len, text.splitlines()[:-1])) <= max(columns, 80)
    assert "…" not in run(f"{MODEL} --ranks 8 --data 2 --tensor 2 --zero 0 --schedule 1f1b")


def test_json_is_sorted_by_time_and_says_what_fits(run):
    found = json.loads(run(f"{MODEL} --ranks 4 --batch 16 --memory-limit 8MB --json"))
    assert [each["step_time"] for each in found] == sorted(each["step_time"] for each in found)
    assert all(each["fits"] == (each["memory"]["total"] <= 8e6) for each in found)
    assert {each["fits"] for each in found} == {False, True}


def test_one_layout_in_detail(run, tmp_path):
    file = tmp_path / "tied.toml"
    file.write_text(TOML + "tied = true\n")
    layout = "--data 2 --tensor 2 --zero 2 --schedule interleaved --sequence-parallel"
    text = run(f"--model {file} --ranks 8 {layout}")
    for expected in ("2 chunks", "sequence parallel", "bubble", "activation gradients", "ties", "optimizer"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 120


def test_profiles(tmp_path, run):
    file, by_hand = tmp_path / "profile.json", tmp_path / "machine.toml"
    TYPICAL.save(file)
    by_hand.write_text("flops = 1e12\nbandwidth = 1e10\nlatency = 2e-6")
    times = []
    for machine in ("", f"--profile {file}", f"--profile {by_hand}"):
        (found,) = json.loads(run(f"{MODEL} --ranks 2 --data 2 --zero 1 --json {machine}"))
        times.append(found["step_time"])
    assert times[0] == times[1] > times[2]


MACHINE = "flops = 1e10\nbandwidth = 1e9\nlatency = 1e-6\n"
NETWORK = "[network]\nranks_per_node = 4\nbandwidth = 1e6\nlatency = 1e-3\n"


@pytest.mark.parametrize("measured", [False, True])
def test_axes_between_nodes_have_the_networks_speed(measured, run, tmp_path):
    one, many, profile = (tmp_path / name for name in ("one.toml", "many.toml", "profile.json"))
    MachineProfile.given(1e10, 1e9, 1e-6).save(profile)
    text = 'profile = "profile.json"\n' if measured else MACHINE
    one.write_text(text)
    many.write_text(text + NETWORK)
    times = []
    for machine in (one, many):
        times.append([])
        for shape in ("--data 1 --tensor 4 --pipeline 2", "--data 2 --tensor 4 --pipeline 1"):
            (found,) = json.loads(run(f"{MODEL} --ranks 8 --zero 0 --schedule 1f1b {shape} --profile {machine} --json"))
            times[-1].append(found["communication"])
    near, far = times
    # Without data ranks there is nothing to send between them; else all of their bytes go over the slower link.
    assert near[0] == far[0] == 0 and far[1] > 500 * near[1] > 0
    text = run(f"{MODEL} --ranks 8 --zero 0 --data 2 --tensor 4 --pipeline 1 --profile {many}")
    assert "tensor      4  within a node" in text and "data        2  between nodes" in text
    assert "4 ranks a node" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 8", "a model needs --vocabulary, --context, --width, --layers, --heads too"),
        (f"{MODEL} --ranks 8 --parameters 1e9", "not both"),
        (f"{MODEL} --ranks 0", "number of ranks is 0"),
        (f"{MODEL} --ranks 8 --layers 99999999999", "number of layers is 99999999999"),
        ("--layers 8 --model gpt.toml --ranks 8", "leave --layers out"),
        ("--model gpt.yaml --ranks 8", "--model is gpt.yaml; give a config.json"),
        ("--model absent.toml --ranks 8", "absent.toml: No such file"),
        (f"{MODEL} --ranks 7 --tensor 7", "8 attention heads cannot be split over 7"),
        (f"{MODEL} --ranks 9 --pipeline 9", "9 pipeline stages, but the model has 8 layers"),
        (f"{MODEL} --ranks 8 --data 3", "sizes must multiply out to the ranks"),
        (f"{MODEL} --ranks 8 --zero 4", "unknown ZeRO stage 4"),
        (f"{MODEL} --ranks 8 --schedule best", "unknown schedule 'best'"),
        (f"{MODEL} --ranks 8 --profile absent.json", "--profile absent.json does not exist; make one"),
        (f"{MODEL} --ranks 8 --profile .", "--profile . is no file; make one"),
        (f"{MODEL} --ranks 8 --width 63", "width 63 is not a multiple of 8 heads"),
        (f"{MODEL} --ranks 8 --dtype float16", "choose float32 or float64"),
        (f"{MODEL} --ranks 8 --dtype float64 --half", "--half rounds operands of float32 products"),
        (f"{MODEL} --ranks eight", "'--ranks'"),
        ("--parameters inf --ranks 8", "must be finite and above 0"),
        ("--parameters 1e9 --ranks 8 --tensor 2", "leave --tensor out"),
        ("--parameters 1e9 --ranks 8 --batch 4 --dtype float64 --all", "leave --batch, --dtype, --all out"),
        ("--parameters 1e9 --ranks 8 --memory-limit 80XB", "--memory-limit is '80XB'"),
        (f"{MODEL} --ranks 8 --vocabulary 0", "vocabulary_size=0 must be"),
        (f"{MODEL} --ranks 8 --heads 0", "heads=0 must be"),
        (f"{MODEL} --ranks 8 --batch 0", "--batch is 0; it must be at least 1"),
        (f"{MODEL} --ranks 8 --slots -1", "slots=-1"),
        (f"{MODEL} --ranks 8 --chunks 0", "needs at least 2 chunks a rank, got 0"),
        ("--parameters 1e9", "the number of ranks is missing"),
    ],
)
def test_errors_are_one_line(arguments, message, run):
    shown = run(arguments, code=2)
    assert len(shown.splitlines()) == 1 and message in shown


@pytest.mark.parametrize(
    ("name", "text", "messages"),
    [
        ("model.toml", "width = ", ["is not TOML"]),
        ("model.toml", TOML + "hidden = 128", ["no field hidden; Architecture has vocabulary_size, context_length"]),
        ("model.toml", 'kind = "Llama"', ["kind is 'Llama'; choose one of Architecture, LlamaArchitecture"]),
        ("model.toml", "width = 64\nheads = 8", ["Architecture needs vocabulary_size, context_length, layers too"]),
        ("model.toml", TOML.replace("8", "'8'"), ["layers='8' must be"]),
        ("model.toml", LLAMA + "rotary.scaling.sort = 1", ["no field sort; scaling has kind, factor"]),
        ("model.toml", TOML + "shards = 3", ["8 attention heads cannot be cut into 3 shards"]),
        ("config.json", "{", ["is not JSON"]),
        ("config.json", json.dumps({"model_type": "mamba"}), ["model_type='mamba'", "gpt2, llama, qwen2, qwen3"]),
        ("config.json", json.dumps({**CONFIG, "hidden_size": None}), ["no hidden_size"]),
        ("config.json", json.dumps({**CONFIG, "mlp_bias": True}), ["mlp_bias=True; models here have False only"]),
        ("machine.toml", "flops", ["is not TOML"]),
        ("machine.toml", "flops = 1e9", ["a machine needs bandwidth, latency too"]),
        ("machine.toml", MACHINE + "flop = 1", ["no field flop; a machine has flops, bandwidth, latency, memory_"]),
        ("machine.toml", MACHINE + "memory_bandwidth = '1'", ["memory_bandwidth='1' must be a finite number"]),
        ("machine.toml", MACHINE + "memory_bandwidth = 0", ["memory_bandwidth of a machine profile is 0"]),
        (
            "machine.toml",
            'profile = "p.json"\nflops = 1',
            ["no field flops; a machine with a profile has profile, net"],
        ),
        ("machine.toml", MACHINE + "network = 3", ["network=3"]),
        ("machine.toml", MACHINE + "network.ranks_per_node = 4", ["a network needs latency, bandwidth too"]),
        ("machine.toml", MACHINE + NETWORK.replace("4", "0"), ["ranks_per_node=0"]),
        ("profile.json", "{}", ["not a machine profile"]),
        (
            "profile.json",
            json.dumps({"mpishard_profile": 1, **asdict(TYPICAL), "ranks_per_node": "x"}),
            ["not a machine profile"],
        ),
    ],
)
def test_a_bad_file_is_one_line(name, text, messages, run, tmp_path):
    file = tmp_path / name
    file.write_text(text)
    option = f"--model {file}" if name in ("model.toml", "config.json") else f"{MODEL} --profile {file}"
    shown = run(f"{option} --ranks 8", code=2)
    assert len(shown.splitlines()) == 1 and all(each in shown for each in [str(file), *messages])


def test_sizes_are_read():
    sizes = {"4GB": 4e9, "500 MB": 5e8, "2GiB": 2**31, "1.5kB": 1500, "1e9": 1e9, "7": 7, "1TiB": 2**40, "3g": 3e9}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "-4GB", "0", "inf", "4 apples", "nan"):
        with pytest.raises(ValueError, match="--memory-limit"):
            parse_bytes(text)


def test_figures_have_three_digits():
    assert [size(count) for count in (0, 999, 1000, 9994, 99960, 999600, 4e9, 2.5e15)] == [
        *("-", "999 B", "1.00 kB", "9.99 kB", "100 kB", "1.00 MB", "4.00 GB", "2500 TB")
    ]
    assert [seconds(time) for time in (12.34, 0.5, 2e-6, 1e-9)] == ["12.3 s", "500 ms", "2.00 us", "0.00 us"]


def test_bench_on_one_rank(tmp_path, run, monkeypatch):
    monkeypatch.setattr("mpishard.estimate.benchmark.SIZES", (16, 32))
    file = tmp_path / "profile.json"
    assert "products of width 16" in run(f"--output {file}", command="bench")
    profile = MachineProfile.load(file)
    assert [width for width, _ in profile.products] == [16, 32] and not profile.node
    run(f"{MODEL} --ranks 1 --profile {file}")
    assert "measured on 1 rank" in run(f"{MODEL} --ranks 2 --profile {file}", code=2)
    for output in (tmp_path / "no-folder" / "profile.json", tmp_path):
        assert "cannot write" in run(f"--output {output}", code=2, command="bench")
    assert "one rank has nobody to communicate with" in run("--collectives", code=2, command="bench")
    for options in ("--tensor 2", "--plot x.png", "--json", f"--collectives --output {file}"):
        assert " is for " in run(options, code=2, command="bench")


def test_collectives_are_drawn(tmp_path):
    timings = [Timing("data", 4, "all_reduce", nbytes, 1e-4, 9e-5, 2 * nbytes) for nbytes in (1024, 4096)]
    draw(timings, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
