"""Texts that a model on a mesh continues, and published weights: those of one rank, and the same errors."""

from __future__ import annotations

import importlib.util
import math

import ml_dtypes
import numpy as np
import pytest
from pretrained_runs import assert_gradients, assert_logits, stored, write_ours, write_theirs

from mpishard import AdamW, Mesh, ShardingConfiguration, ZeRO3Optimizer, nn
from mpishard.nn import generation
from mpishard.nn.generation import TokenSampler

pytestmark = pytest.mark.pairs(1)

# Texts that a model on a mesh continues: those of one rank, and the same errors on all ranks.

SIZES = dict(vocabulary_size=19, context_length=12, width=24, layers=4, heads=4)
LONG = nn.RopeScaling("longrope", 2.0, 8, short_factors=(1.0, 1.1, 1.2), long_factors=(1.0, 2.0, 3.0))
MODELS = {
    "gpt": (nn.GPT, dict(tied=True)),
    "llama": (nn.Llama, dict(hidden=40, key_value_heads=4, heads=8, head_width=6, rotary=nn.Rotary(scaling=LONG))),
}
# Some have fewer tokens than there are ranks; others grow beyond a change of keys and beyond the context.
PROMPTS = [[1, 2, 3], [4], [5, 6, 7], list(range(9)), list(range(14))]
DRAW = dict(temperature=1.2, seed=3, top_k=7, top_p=0.9, stop_tokens=[3])


def texts(decoder, *arguments, **options):
    return [text.tolist() for text in decoder.generate(PROMPTS, *arguments, **options)]


def model(name, mesh=None, **options):
    """Away from its initial values; the same on every mesh."""
    kind, sizes = MODELS[name]
    decoder = kind(mesh=mesh, dtype=np.float64, **{**SIZES, **sizes, **options})
    for number, spec in enumerate(decoder.parameters.specs):
        if spec.name in decoder.parameters:
            box = tuple(slice(*extent) for extent in decoder.parameters.box(spec.name))
            decoder.parameters[spec.name][...] += 0.3 * np.random.default_rng(number).standard_normal(spec.shape)[box]
    return decoder


def most(size):
    """Of so many ranks those that one axis may have: there are 4 layers, and 4 heads, also of keys."""
    return size if size < 4 else math.gcd(size, 4)


def meshes(size):
    """Sizes of the axes for so many ranks, and options of the model; 4 heads cannot be cut into 3."""
    found = [(dict(), {}), (dict(pipeline=most(size)), {})]
    if size != 3:
        found += [(dict(tensor=most(size)), dict(sequence_parallel=on)) for on in (False, True)]
        found += [(dict(tensor=most(size)), dict(shards=4, sequence_parallel=True))]
    if size > 1:
        found += [(dict(pipeline=most(size)), dict(storage_dtype=ml_dtypes.bfloat16))]
    if size == 2:
        found += [(dict(pipeline=2), dict(chunks=2, schedule="interleaved"))]
    if size in (4, 8):
        found += [(dict(tensor=2, pipeline=size // 2), dict(sequence_parallel=on)) for on in (False, True)]
    return found


@pytest.fixture
def logits(monkeypatch):
    """All logits of which this rank has drawn tokens."""
    found = []

    class Recording(TokenSampler):
        def next(self, logits_v):
            found.append(logits_v)
            return super().next(logits_v)

    monkeypatch.setattr(generation, "TokenSampler", Recording)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_one_rank_on_every_mesh(comm, same_on_all, name):
    """Drawn with kept keys and without, and the most likely ones."""
    draws = [dict(temperature=0), DRAW, DRAW | dict(cache=False)]
    reference = model(name)
    expected = [texts(reference, 6, **draw) for draw in draws]
    for axes, options in meshes(comm.size):
        with Mesh(comm, **axes) as mesh:
            decoder = model(name, mesh, **options)
            found = [texts(decoder, 6, **draw) for draw in draws]
        assert found == expected, (axes, options)
        assert same_on_all(repr(found))


@pytest.mark.parametrize("name", MODELS)
def test_shards_have_the_same_bits_on_all_ranks_and_on_one(comm, same_on_all, logits, name):
    if comm.size == 3:
        pytest.skip("4 heads cannot be cut into 3")
    for cache in (True, False):
        logits.clear()
        expected = texts(model(name, shards=4), 6, cache=cache)
        bits = np.array(logits).tobytes()
        with Mesh(comm, tensor=most(comm.size)) as mesh:
            logits.clear()
            assert texts(model(name, mesh, shards=4, sequence_parallel=True), 6, cache=cache) == expected
        assert np.array(logits).tobytes() == bits


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_with_sharded_parameters(comm, axis):
    size = 2 if comm.size == 4 else 1
    with Mesh(comm, **{axis: size}) as mesh:
        decoder = model("llama", mesh)
        expected = texts(decoder, 6, seed=2)
        optimizer = ZeRO3Optimizer(AdamW(lr=1e-2), ShardingConfiguration(mesh))
        optimizer.bind(decoder.parameters)
        assert texts(decoder, 6, seed=2) == expected
        # Between steps, and with gathers ahead.
        pair = np.arange(10).reshape(2, 5), np.arange(1, 11).reshape(2, 5)
        for _ in range(2):
            decoder.loss_and_gradient(*pair)
            optimizer.step(decoder.parameters, count=10 * mesh.data.size)
            assert texts(decoder, 3, 0, cache=True) == texts(decoder, 3, 0, cache=False)


def test_each_data_coordinate_may_continue_texts_of_its_own(comm):
    with Mesh(comm) as mesh:
        decoder, own = model("gpt", mesh), [1 + mesh.data.rank]
        for count in range(mesh.data.rank, 3):
            assert decoder.generate(own, count, 0).tolist() == model("gpt").generate(own, count, 0).tolist()


@pytest.mark.parametrize("axes", [dict(pipeline=-1), dict(pipeline=2, tensor=2), dict()], ids=str)
def test_different_arguments_are_one_error_on_all_ranks(comm, same_on_all, axes):
    if comm.size == 1 or (len(axes) == 2 and comm.size != 4):
        pytest.skip(f"{axes} is another mesh or none on {comm.size} ranks")
    with Mesh(comm, **({"data": 1} | axes if axes else {})) as mesh:
        decoder = nn.GPT(**SIZES | dict(layers=max(4, comm.size)), mesh=mesh, sharded_parameters=not axes)
        here = mesh.size - 1
        last = mesh.rank == here
        given = dict(prompt_tokens=[[1, 2], [3]], count=2)
        for change, message in [
            (dict(count=3), f"count is 2 on .*3 on rank {here}"),
            (dict(prompt_tokens=[[1, 2], [4]]), rf"\[\[1, 2\], \[4\]\] on rank {here}"),
            (dict(prompt_tokens=[[1, 2] + 40 * [3], [4]]), "prompt_tokens is"),
            (dict(temperature=0), "temperature is 1.0 on"),
            (dict(stop_tokens=[2]), r"stop_tokens is \(\) on"),
            (dict(cache=False), "cache is True on"),
        ]:
            with pytest.raises(ValueError, match=message) as info:
                decoder.generate(**{**given, **(change if last else {})})
            assert same_on_all(str(info.value))
        # What is wrong on one is an error of all.
        for change, error, message in [
            (dict(prompt_tokens=[]), ValueError, "prompt_tokens is empty"),
            (dict(top_k=0), ValueError, "top_k=0"),
            (dict(prompt_tokens=[1, "a"]), TypeError, "must be integers"),
        ]:
            with pytest.raises(error, match=message):
                decoder.generate(**{**given, **(change if last else {})})
        assert [text.tolist()[:1] for text in decoder.generate(**given)] == [[1], [3]]


# Published weights on meshes: what `transformers` computes on one rank, and round trips.


def made(comm, folder, family, dtype, **options):
    """The first rank writes a model, and runs it: with `transformers` where ranks have all kinds of layouts, if it is
    there; its import takes longer than all tests here.  Else with the model of one rank, of which tests/unit knows
    that it computes the same.
    """
    expected = None
    if comm.rank == 0:
        theirs = comm.size >= 4 and importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
        expected = (write_theirs if theirs else write_ours)(folder / "theirs", family, dtype, **options)
    return comm.bcast(expected)


def layouts(size):
    """Meshes of so many ranks, with options of the model."""
    found = [dict(pipeline=most(size)), dict(), dict(sharded_parameters=True)]
    found += [dict(tensor=most(size)), dict(tensor=most(size), sequence_parallel=True)]
    if size in (4, 8):
        found += [dict(tensor=2, pipeline=size // 2), dict(tensor=2, shards=4)]
        found += [dict(pipeline=2, sharded_parameters=True)]
    return [each for each in found if size != 3 or "tensor" not in each]


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [("gpt2", "float32", True), ("gpt2", "float64", False), ("llama3", "float32", False), ("qwen2", "float32", True)]
    + [("qwen3", "float32", False)],
)
def test_every_layout_computes_what_transformers_does_and_writes_the_same_bytes(comm, folder, family, dtype, tied):
    expected = made(comm, folder, family, dtype, tie_word_embeddings=tied)
    for number, layout in enumerate(layouts(comm.size)):
        axes = {name: layout[name] for name in ("tensor", "pipeline") if name in layout}
        options = {name: value for name, value in layout.items() if name not in axes}
        with Mesh(comm, **axes) as mesh:
            model = nn.import_pretrained(folder / "theirs", mesh, **options)
            assert model.parameters.dtype == dtype
            assert_logits(model, expected)
            if not options.get("sharded_parameters"):  # their gradients are summed over ranks
                assert_gradients(model, expected)
            nn.export_pretrained(model, folder / str(number))
        if comm.rank == 0:
            assert stored(folder / str(number)) == stored(folder / "theirs"), layout


def test_all_ranks_raise_what_one_finds(comm, folder, same_on_all):
    with Mesh(comm, tensor=comm.size if comm.size != 3 else 1) as mesh:
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            nn.import_pretrained(folder / "absent", mesh)
        model = nn.GPT(vocabulary_size=11, context_length=5, width=8, layers=2, heads=8, mesh=mesh)
        nn.export_pretrained(model, folder / "gpt2")
        # Rank by rank: only the last one sees a folder without weights.
        seen = folder / ("gpt2" if comm.rank < comm.size - 1 else "absent")
        with pytest.raises(FileNotFoundError, match="absent"):
            nn.import_pretrained(seen, mesh)
        with pytest.raises(FileExistsError, match="not an empty folder"):
            nn.export_pretrained(model, folder / "gpt2")
        if comm.size == 1:
            pytest.skip("the rest needs two ranks")
        other = comm.rank == comm.size - 1
        if comm.rank == 0:
            nn.export_pretrained(
                nn.GPT(vocabulary_size=11, context_length=5, width=8, layers=1, heads=8), folder / "other"
            )
        comm.barrier()
        for options, message in [
            (dict(recompute=True), "recompute is False on rank.*, True on rank"),
            (dict(dtype="float64"), "dtype is float32 on rank.*, float64 on rank"),
            (dict(depth=3), "argument 'depth'"),
        ]:
            with pytest.raises((ValueError, TypeError), match=message):
                nn.import_pretrained(folder / "gpt2", mesh, **(options if other else {}))
        with pytest.raises(ValueError, match="n_layer is 2 on rank"):
            nn.import_pretrained(folder / ("other" if other else "gpt2"), mesh)
        with pytest.raises(ValueError, match="file_bytes is 9 on rank"):
            nn.export_pretrained(model, folder / "again", file_bytes=8 if other else 9)
