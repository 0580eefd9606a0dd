"""Llama and its relatives, and published weights, on one rank: against `transformers`, round trips, and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from mpi4py import MPI
from pretrained_runs import FAMILIES, assert_equals, computed, stored, their_texts, write_theirs

import mpishard
from mpishard import Mesh, nn
from mpishard.checkpoint.index import check_facts
from mpishard.nn.layers import Draws
from mpishard.nn.model_facts import architecture_of, changes, fields_of
from mpishard.parameters.flat import FlatParameters

# Llama and its relatives: between options, and on bad input.

SIZES = dict(vocabulary_size=19, context_length=24, width=24, layers=2, heads=4)
LONG = nn.RopeScaling("longrope", 2.0, 12, short_factors=(1.0, 1.1, 1.2), long_factors=(1.0, 2.0, 3.0))
MODELS = {
    "llama2": {},
    "llama3": dict(key_value_heads=2, rotary=nn.Rotary(500.0, scaling=nn.RopeScaling("llama3", 8.0, 16))),
    "qwen3": dict(key_value_heads=2, head_width=8, head_norms=True),
}


def model(name="llama3", **options):
    """A small network, away from its initial values so that every tensor matters."""
    llama = nn.Llama(**{**SIZES, "dtype": np.float64, "hidden": 40, "epsilon": 1e-6, **MODELS[name], **options})
    for number, spec in enumerate(llama.parameters.specs):
        llama.parameters[spec.name][...] += 0.3 * np.random.default_rng(number).standard_normal(spec.shape)
    return llama


def batch(size=3, length=10, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, SIZES["vocabulary_size"], (2, size, length)))


def run(llama, *pair):
    """Loss, and a copy of all gradients by name."""
    llama.parameters.reset_gradients()
    loss = llama.loss_and_gradient(*pair)
    return loss, {name: llama.parameters.gradient(name)[0].copy() for name in llama.parameters}


def test_pairings_are_one_model_with_channels_in_another_order():
    llama = model("llama2")
    rotary = dataclasses.replace(llama.architecture.rotary, pairing="interleaved")
    other, (tokens, _) = model("llama2", rotary=rotary), batch()
    order = np.arange(6).reshape(2, 3).T.ravel()  # channels 0 3 1 4 2 5
    for layer in range(2):
        name = f"blocks.{layer}.attention.qkv.weight"
        weight, new = (each.parameters[name].reshape(24, 4, 3, 6) for each in (llama, other))
        new[:, :, :2] = weight[:, :, :2][..., order]
    np.testing.assert_allclose(other.logits(tokens), llama.logits(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [dict(), dict(recompute=True), dict(schedule="zb-h1")])
def test_the_gradient_of_a_matrix_is_ready_before_another_is_written(options, monkeypatch):
    """Under ZeRO-2 both would have memory, beside that of a sum under way; in a bucket of their own they are large."""
    written, ready, steps = FlatParameters.gradient, FlatParameters.mark_ready, []

    def gradient(parameters, name, second=False):
        steps.append((name, "written"))
        return written(parameters, name, second)

    def mark_ready(parameters, name):
        steps.append((name, "ready"))
        ready(parameters, name)

    monkeypatch.setattr(FlatParameters, "gradient", gradient)
    monkeypatch.setattr(FlatParameters, "mark_ready", mark_ready)
    llama = model("qwen3", **options)
    llama.loss_and_gradient(*batch())
    matrices = [spec.name for spec in llama.parameters.specs if len(spec.shape) == 2 and "blocks" in spec.name]
    assert len(matrices) == 2 * 5
    of_matrices = [step for step in steps if step[0] in matrices]
    assert of_matrices == [(name, what) for name in matrices[::-1] for what in ("written", "ready")]


def test_sizes_of_its_own():
    found = nn.LlamaArchitecture(11, 8, width=48, layers=1, heads=4)
    assert (found.key_value_heads, found.hidden, found.head_width) == (4, 128, 12)
    scaled = nn.LlamaArchitecture(11, 8, 48, 1, 4, rotary=nn.Rotary(scaling=LONG), head_width=6)
    fields = json.loads(json.dumps(fields_of(scaled)))
    assert changes(fields_of(scaled), fields) == {}
    assert architecture_of(fields) == scaled
    assert architecture_of(fields).rotary.scaling == LONG
    assert architecture_of({**fields, "kind": "Mine"}) is None
    assert architecture_of(fields_of(nn.Architecture(8, 8, 8, 1, 2))) == nn.Architecture(8, 8, 8, 1, 2)


def test_a_model_with_fields_that_json_cannot_hold_is_saved():
    @dataclasses.dataclass(frozen=True)
    class Own(nn.Architecture):
        scale: Any = np.float32(0.5)
        gains: Any = ()
        size: Any = len

    found, other = (fields_of(Own(8, 8, 8, 1, 2, gains=gains)) for gains in (np.ones(3), np.zeros(3)))
    check_facts({"model.json": found})
    assert found["scale"] == 0.5 and changes(found, other).keys() == {"gains"}


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(key_value_heads=3), ValueError, "4 heads of queries .*3 heads of keys"),
        (dict(key_value_heads=2, shards=4), ValueError, "2 heads of keys .*4 shards"),
        (dict(head_width=5), ValueError, "5 channels; .* make it even"),
        (dict(width=23), ValueError, "width 23 .*4 heads; give head_width"),
        (dict(rotary=1e4), TypeError, "rotary=10000.0"),
        (dict(hidden=0), ValueError, "hidden=0"),
        (dict(bias=1), TypeError, "bias=1"),
        (dict(theta=3.0), TypeError, "argument 'theta'"),
    ],
)
def test_bad_sizes(options, error, message):
    with pytest.raises(error, match=message):
        nn.Llama(**{**SIZES, **options})


class TestDropout:
    """Masks are a function of seed, step, sample and name."""

    SAMPLES = np.array([4, 0, 7])

    def run(self, order=(0, 1, 2), step=2, samples=SAMPLES, **options):
        llama, order = model("qwen3", dropout=0.3, **options), list(order)
        llama.parameters.step = step
        tokens, targets = batch()
        return run(llama, tokens[order], targets[order], samples[order])

    def test_they_do_not_depend_on_order_or_cut(self):
        loss, gradients = self.run()
        cuts = dict(microbatches=2), dict(recompute=True), dict(shards=2), dict(schedule="zb-h1")
        for options in (dict(order=(2, 0, 1)), *cuts):
            found_loss, found = self.run(**options)
            assert found_loss == pytest.approx(loss, rel=1e-13)
            for name, gradient in found.items():
                np.testing.assert_allclose(gradient, gradients[name], rtol=1e-11, atol=1e-11, err_msg=name)

    def test_other_steps_samples_and_seeds_have_others(self):
        losses = [self.run(**options)[0] for options in ({}, dict(step=3), dict(samples=self.SAMPLES + 1))]
        assert len(set(losses)) == 3 and self.run()[0] == losses[0]

    def test_they_do_not_need_initial_values(self):
        """As on a rank that joins an elastic run, which gets its values from the others."""
        drawn = model("qwen3", dropout=0.3, seed=5)
        with mpishard.Mesh(MPI.COMM_SELF) as mesh, mesh.without_initial_values():
            joined = model("qwen3", dropout=0.3, seed=5, mesh=mesh)
            joined.parameters.held[...] = drawn.parameters.held
            assert run(joined, *batch(), self.SAMPLES)[0] == run(drawn, *batch(), self.SAMPLES)[0]

    def test_predictions_drop_nothing(self):
        dropping, plain = model("qwen3", dropout=0.3), model("qwen3")
        assert dropping.loss(*batch()) == plain.loss(*batch())
        np.testing.assert_array_equal(dropping.logits(batch()[0]), plain.logits(batch()[0]))

    def test_the_mean_stays(self):
        layer, work, x = nn.Dropout("a", 0.25), nn.Workspace(np.float64), np.ones((400, 50))
        layer.bind(FlatParameters([], np.float64))
        work.rows, work.draws = 400, Draws(0, 0, tuple(range(40)), 10)
        layer.apply(x, work)
        assert set(np.unique(x)) == {0, 1 / 0.75}
        assert x.mean() == pytest.approx(1, abs=0.02)
        assert len(np.unique(x, axis=0)) == 400

    def test_training_gives_the_numbers_of_samples_and_steps(self):
        """The same run with other micro-batches."""
        tokens, targets = batch(12)
        ends = []
        for micro in (None, 2):
            with mpishard.Mesh() as mesh:
                llama = model("llama3", dropout=0.2)
                problem = mpishard.OptimizationProblem.for_model(
                    llama, lambda s: (tokens[s], targets[s]), samples=12, batch_size=5, micro_batch_size=micro, steps=4
                )
                mpishard.DDPOptimizer(mpishard.SGD(lr=0.01), mesh).optimize(problem, progress=False)
                assert llama.parameters.step == 3
                ends.append(llama.parameters.flat.copy())
        np.testing.assert_allclose(ends[1], ends[0], rtol=1e-11, atol=1e-11)

    def test_samples_that_are_missing(self):
        with pytest.raises(ValueError, match="dropout=0.3 .*samples="):
            model(dropout=0.3).loss_and_gradient(*batch())
        with pytest.raises(ValueError, match=r"samples .*\(2,\), .*3 sequences"):
            model(dropout=0.3).loss_and_gradient(*batch(), [1, 2])
        with pytest.raises(ValueError, match="dropout=1.0"):
            model(dropout=1.0)


# Published weights on one rank: what `transformers` computes, round trips, and bad folders.

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
LINEAR = dict(rope_theta=1e4, rope_type="linear", factor=4.0)
SHORT = dict(FAMILIES["longrope"][1]["rope_parameters"], original_max_position_embeddings=8)  # no sequence is longer


@pytest.fixture
def transformers():
    pytest.importorskip("torch", reason="compares with PyTorch, which is not installed")
    return pytest.importorskip("transformers", reason="compares with transformers, which is not installed")


@pytest.fixture
def folder(tmp_path):
    """A GPT-2 of our own, as `transformers` would store it."""
    nn.export_pretrained(
        nn.GPT(vocabulary_size=11, context_length=5, width=8, layers=2, heads=2, tied=True), tmp_path / "gpt2"
    )
    return tmp_path / "gpt2"


def test_no_initial_values_are_drawn_and_weights_are_read_only_if_wanted(folder, monkeypatch):
    def drawn(*arguments):
        raise AssertionError("initial values are drawn")

    monkeypatch.setattr("mpishard.nn.layers.normal", drawn)
    with Mesh(MPI.COMM_SELF) as mesh:
        for model in (nn.import_pretrained(folder), nn.import_pretrained(folder, mesh)):
            assert model.parameters.held.any()
        with mesh.without_initial_values():
            with mesh.without_initial_values():
                pass
            assert not nn.import_pretrained(folder, mesh).parameters.held.any()
        assert mesh.initial_values


@pytest.mark.parametrize("family", FAMILIES)
def test_continued_texts_are_those_of_transformers(transformers, tmp_path, family):
    """Those of longrope grow beyond the length at which all keys change: without keys kept, there."""
    context = {"n_positions" if family == "gpt2" else "max_position_embeddings": 32}
    write_theirs(tmp_path, family, "float64", **context)
    expected = their_texts(tmp_path, PROMPTS, 12)
    model = nn.import_pretrained(tmp_path)
    for cache in (True, False):
        assert [text.tolist() for text in model.generate(PROMPTS, 12, 0, cache=cache)] == expected


@pytest.mark.parametrize(
    ("family", "dtype", "options", "save"),
    [
        ("gpt2", "float32", {}, {}),
        ("gpt2", "float64", dict(tie_word_embeddings=False), dict(max_shard_size="20KB")),
        ("gpt2", "float32", dict(vocab_size=64), dict(max_shard_size="20KB")),
        ("llama2", "float32", {}, {}),
        ("llama2", "float32", dict(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=LINEAR), {}),
        ("llama3", "float64", {}, {}),
        ("llama3", "float32", dict(tie_word_embeddings=True), dict(max_shard_size="20KB")),
        ("longrope", "float32", {}, {}),
        ("longrope", "float32", dict(rope_parameters=SHORT), {}),
        *((family, dtype, {}, {}) for family in ("qwen2", "qwen3") for dtype in ("float32", "float64")),
    ],
)
def test_logits_gradients_and_bytes_are_those_of_transformers(transformers, tmp_path, family, dtype, options, save):
    expected = write_theirs(tmp_path / "theirs", family, dtype, save, **options)
    model = nn.import_pretrained(tmp_path / "theirs")
    assert model.parameters.dtype == dtype
    assert_equals(model, expected)
    nn.export_pretrained(model, tmp_path / "ours", file_bytes=20_000 if save else 10**9)
    assert stored(tmp_path / "ours") == stored(tmp_path / "theirs")
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == bool(save)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    np.testing.assert_array_equal(computed(again.eval(), options.get("vocab_size", 19))[0], expected[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_written_back_with_the_same_bytes(folder, tmp_path, dtype):
    nn.export_pretrained(nn.import_pretrained(folder), tmp_path / "half", dtype=dtype)
    model = nn.import_pretrained(tmp_path / "half")
    assert model.parameters.dtype == np.float32
    nn.export_pretrained(model, tmp_path / "again", dtype=dtype)
    assert stored(tmp_path / "again") == stored(tmp_path / "half")


def test_names_without_prefix_masks_and_a_copy_of_a_tied_head_are_known(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 5, 5), np.float32), "h.1.attn.masked_bias": np.full((), -1e4, np.float32)}
    bare["lm_head.weight"] = bare["wte.weight"]
    expected = nn.import_pretrained(folder).parameters.flat
    safetensors.numpy.save_file(bare, folder / "model.safetensors")
    np.testing.assert_array_equal(nn.import_pretrained(folder).parameters.flat, expected)


def test_beside_one_file_no_index_counts_as_for_transformers(folder):
    """`save_pretrained` leaves there that of an earlier save in several files."""
    expected = nn.import_pretrained(folder).parameters.flat
    old = {"weight_map": {"wte": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(old))
    np.testing.assert_array_equal(nn.import_pretrained(folder).parameters.flat, expected)


def test_another_copy_of_a_tied_head_is_refused(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    message = "lm_head.weight .*transformer.wte.weight, .*config.json"
    with pytest.raises(ValueError, match=message):
        nn.import_pretrained(folder)
    config(tie_word_embeddings=False)(folder)
    model = nn.import_pretrained(folder)
    np.testing.assert_array_equal(model.parameters["head.weight"].T, tensors["lm_head.weight"])


def test_options_may_follow(folder, tmp_path):
    """Dropout too, but no other architecture; an export has the special tokens of the config that was imported."""
    config(bos_token_id=3, eos_token_id=[1, 2])(folder)
    model = nn.import_pretrained(folder, dropout=0.1, recompute=True, dtype="float64")
    assert model.dropout == 0.1 and model.parameters.dtype == np.float64
    nn.export_pretrained(model, tmp_path / "tuned", dtype="float32")
    assert stored(tmp_path / "tuned") == stored(folder)
    fields = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (3, [1, 2])
    for options, message in [
        (dict(context_length=3), "context_length=: .*n_positions=5"),
        (dict(architecture=model.architecture), "takes no architecture="),
        (dict(layer=3), "import_pretrained.*'layer'"),
    ]:
        with pytest.raises(TypeError, match=message):
            nn.import_pretrained(folder, **options)


def config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def weights(**changed):
    """Other tensors by the end of their names; None takes one away."""

    def change(folder):
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        for name, value in changed.items():
            full = next((each for each in tensors if each.endswith(name)), name)
            tensors.pop(full, None)
            if value is not None:
                tensors[full] = value
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")

    return change


def index(**weight_map):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=weight_map)))

    return change


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


BAD = [
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "has no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), ValueError, "config.json is not JSON"),
    (lambda folder: (folder / "config.json").write_text("[1]"), ValueError, "config.json has no JSON object"),
    (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        ValueError,
        "config.json is not JSON: its lists",
    ),
    (config(x=json.loads("[" * 500 + "]" * 500)), ValueError, "config.json is not JSON: its lists"),
    (weights(**{"h.1.\x1b[2Jadapter": np.zeros(3)}), ValueError, r"h\.1\.\\x1b\[2Jadapter"),
    (index(**{"\x1b[2J": "part.safetensors"}), ValueError, r"names \\x1b\[2J"),
    (config(model_type="mamba"), ValueError, "model_type='mamba'; .*qwen3"),
    (config(n_embd=None), ValueError, "config.json has no n_embd"),
    (config(n_head=3), ValueError, "width 8 .*3 heads"),
    (config(n_layer="2"), TypeError, "layers='2'"),
    (config(n_layer=3), ValueError, "lack transformer.h.2.ln_1.weight, .*7 more"),
    (config(n_layer=1), ValueError, "weights have transformer.h.1."),
    (config(vocab_size=12), ValueError, r"wte.weight .*\(11, 8\), .*\(12, 8\)"),
    (config(activation_function="relu"), ValueError, "activation_function='relu'"),
    (config(n_inner=12), ValueError, "n_inner=12; .*= 32"),
    (config(scale_attn_by_inverse_layer_idx=True), ValueError, "scale_attn_by_inverse_layer_idx=True"),
    (config(quantization_config={"bits": 4}), ValueError, "quantization_config"),
    (config(tie_word_embeddings=False), ValueError, "lack lm_head.weight"),
    (weights(**{"h.1.ln_2.bias": None}), ValueError, "lack transformer.h.1.ln_2.bias"),
    (weights(**{"h.1.adapter": np.zeros(3)}), ValueError, "weights have h.1.adapter"),
    (weights(**{"wpe.weight": np.zeros((5, 8), np.int8)}), ValueError, "wpe.weight is I8"),
    (weights(**{"wpe.weight": np.zeros((4, 8))}), ValueError, r"wpe.weight .*\(4, 8\)"),
    (cut, ValueError, "model.safetensors .*damaged"),
    (lambda folder: (folder / "model.safetensors").unlink(), ValueError, "has neither model.safetensors nor"),
    (index(wte="../part.safetensors"), ValueError, "has no weight_map"),
    (index(wte="absent.safetensors"), FileNotFoundError, "absent.safetensors"),
    (index(wte="part.safetensors"), ValueError, "names wte"),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_a_bad_folder_is_refused_in_one_line(folder, change, kind, message):
    change(folder)
    with pytest.raises(kind, match=message) as caught:
        nn.import_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'; .*'silu'"),
        (dict(intermediate_size=None), "config.json has no intermediate_size"),
        (dict(num_key_value_heads=1), "k_proj.weight has the shape"),
        (dict(rope_scaling={"type": "yarn", "factor": 2.0}), "there is no rope scaling 'yarn'"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "asks for rotary positions"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "llama3 .*original_max_position_embeddings"),
        (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "linear without factor"),
        (dict(rope_scaling={"factor": 2.0}), "there is no rope scaling 'None'"),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 0}), "theta of rotary positions.* 0"),
        (dict(model_type="qwen2"), "lack model.layers.0.self_attn.q_proj.bias"),
        (dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window=True"),
    ],
)
def test_a_bad_config_of_a_llama_is_refused(tmp_path, fields, message):
    nn.export_pretrained(
        nn.Llama(vocabulary_size=11, context_length=5, width=8, layers=1, heads=2, hidden=16), tmp_path / "llama"
    )
    config(**fields)(tmp_path / "llama")
    with pytest.raises(ValueError, match=message):
        nn.import_pretrained(tmp_path / "llama")


def test_a_model_that_transformers_does_not_have_is_not_exported(tmp_path):
    sizes = dict(vocabulary_size=11, context_length=5, width=8, layers=1, heads=2)
    for options, message in [
        (dict(rotary=nn.Rotary(pairing="interleaved")), "pairing='interleaved'"),
        (dict(bias=True, head_norms=True), "no model of transformers is known"),
    ]:
        with pytest.raises(ValueError, match=message):
            nn.export_pretrained(nn.Llama(**sizes, **options), tmp_path / "x")
    with pytest.raises(ValueError, match="needs the name of a folder"):
        nn.export_pretrained(nn.GPT(**(sizes | dict(heads=2))), "")
    assert not list(tmp_path.iterdir())


def test_what_is_there_already_is_not_overwritten(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = nn.import_pretrained(folder)
    with pytest.raises(FileExistsError, match="not an empty folder"):
        nn.export_pretrained(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_full_disk_is_an_error_of_the_file(folder, tmp_path):
    model = nn.import_pretrained(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="model.safetensors cannot be written into .*too large"):
            nn.export_pretrained(model, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if "full" in path.name]


def test_what_a_killed_export_left_goes(folder, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = os.uname().nodename
    left, alive, other = (
        tmp_path / f".{name}-{host}-{process}-01234567"
        for name, process in (("tuned", ended.pid), ("tuned", os.getpid()), ("other", ended.pid))
    )
    for path in (left, alive, other):
        path.mkdir()
    nn.export_pretrained(nn.import_pretrained(folder), tmp_path / "tuned")
    assert not left.exists() and alive.exists() and other.exists()


def test_an_export_is_where_a_link_leads_to(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    nn.export_pretrained(nn.import_pretrained(folder), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stored(tmp_path / "empty") == stored(folder)


def test_bad_arguments_are_named(folder, tmp_path):
    model = nn.import_pretrained(folder)
    with pytest.raises(TypeError, match="dtype='int8'"):
        nn.export_pretrained(model, tmp_path / "x", dtype="int8")
    with pytest.raises(ValueError, match="file_bytes"):
        nn.export_pretrained(model, tmp_path / "x", file_bytes=0)
    with pytest.raises(TypeError, match="model of mpishard.nn, got 3"):
        nn.export_pretrained(3, tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        nn.import_pretrained(tmp_path / "absent")
    with pytest.raises(TypeError, match="argument 'heads_'"):
        nn.import_pretrained(folder, heads_=2)
    assert not (tmp_path / "x").exists()
