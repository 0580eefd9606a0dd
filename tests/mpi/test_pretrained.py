"""Published weights on meshes: what `transformers` computes on one rank, and round trips."""

from __future__ import annotations

import importlib.util
import math

import pytest
from pretrained_runs import assert_gradients, assert_logits, stored, write_ours, write_theirs

from mpishard import Mesh, nn


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
    """Meshes of so many ranks, with options of the model: it has 4 heads of keys, and 4 layers."""
    most = size if size < 4 else math.gcd(size, 4)
    found = [dict(tensor=most), dict(pipeline=most), dict(tensor=most, sequence_parallel=True)]
    found += [dict(), dict(sharded_parameters=True)]
    if size in (4, 8):
        found += [dict(tensor=2, pipeline=size // 2), dict(tensor=2, shards=4)]
        found += [dict(pipeline=2, sharded_parameters=True)]
    return [each for each in found if size != 3 or "tensor" not in each]


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [
        ("gpt2", "float32", True),
        ("gpt2", "float64", True),
        ("gpt2", "float64", False),
        ("llama3", "float32", False),
        ("qwen2", "float32", True),
        ("qwen3", "float32", False),
    ],
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
        model = nn.GPT(11, 5, width=8, layers=2, heads=8, mesh=mesh)
        nn.export_pretrained(model, folder / "gpt2")
        # Rank by rank: only the last one sees a folder without weights.
        seen = folder / ("gpt2" if comm.rank < comm.size - 1 else "absent")
        with pytest.raises(FileNotFoundError, match="absent"):
            nn.import_pretrained(seen, mesh)
        with pytest.raises(FileExistsError, match="there already"):
            nn.export_pretrained(model, folder / "gpt2")
        if comm.size == 1:
            return
        other = comm.rank == comm.size - 1
        if comm.rank == 0:
            nn.export_pretrained(nn.GPT(11, 5, width=8, layers=1, heads=8), folder / "other")
        comm.barrier()
        for options, message in [
            (dict(recompute=True), "the model's recompute is False on rank.*, True on rank"),
            (dict(dtype="float64"), "the model's dtype is float32 on rank.*, float64 on rank"),
            (dict(depth=3), "unexpected keyword argument 'depth'"),
        ]:
            with pytest.raises((ValueError, TypeError), match=message):
                nn.import_pretrained(folder / "gpt2", mesh, **(options if other else {}))
        with pytest.raises(ValueError, match="config.json's n_layer is 2 on rank"):
            nn.import_pretrained(folder / ("other" if other else "gpt2"), mesh)
        with pytest.raises(ValueError, match="file_bytes is 9 on rank"):
            nn.export_pretrained(model, folder / "again", file_bytes=8 if other else 9)
