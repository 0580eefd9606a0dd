"""Modules on the device meta, and files of their weights: what fits, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from mpishard.comm.axis import Axis  # noqa: E402
from mpishard.torch.layer_filler import LayerFiller  # noqa: E402


class Table(torch.nn.Module):
    """Has a buffer that is in no file."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Model(torch.nn.Module):
    base_model_prefix = "base"

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(3, 3, bias=False)


class Computed(Model):
    """As models of transformers make such buffers."""

    def __init__(self):
        super().__init__()
        self.rope = Table()

    def _init_weights(self, layer):
        if isinstance(layer, Table):
            layer.table.copy_(torch.arange(3.0))


class Forgotten(Computed):
    def _init_weights(self, layer):
        pass


def on_meta(kind=Model):
    with torch.device("meta"):
        return kind()


def filler_of(module, materialize):
    return LayerFiller(materialize, module, dict(module.named_parameters()), Axis.single("world"))


def filled(module, path):
    filler_of(module, path).fill_module(torch.device("cpu"))
    return module


@pytest.mark.parametrize("change", [dict, lambda stored: {name.removeprefix("base."): stored[name] for name in stored}])
def test_names_have_the_prefix_of_the_base_model_or_not(tmp_path, change):
    """And what is stored in half precision, or is not of the module, does no harm."""
    whole = Computed().bfloat16()
    file = tmp_path / "weights.safetensors"
    safetensors.save_file({**change(whole.state_dict()), "other": torch.ones(2)}, file)
    module = filled(on_meta(Computed), file)
    for name, each in whole.state_dict().items():
        found = module.state_dict()[name]
        assert torch.equal(found, each.to(found.dtype)) and found.dtype in (torch.float32, torch.int64)
    assert module.rope.table.tolist() == [0, 1, 2]


def test_buffers_with_values_stay(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Table())
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), Table())
    with pytest.raises(ValueError, match=r"'1\.table' .*not persistent: give it values"):
        filler_of(module, tmp_path)
    module[1].table = torch.full((3,), 7.0)
    assert filled(module, tmp_path)[1].table.tolist() == [7, 7, 7]
    assert torch.equal(module[0].weight, model[0].weight)


def without(stored, *names):
    return {name: each for name, each in stored.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: without(stored, "base.1.running_var"), r"lacks base\.1\.running_var of the module"),
        (lambda stored: {**stored, "head.weight": torch.ones(3, 4)}, r"'head.weight' .*\(3, 4\), .*\(3, 3\)"),
        (lambda stored: {**stored, "head.weight": torch.ones(3, 3, dtype=torch.int8)}, "'head.weight' .*I8.*float32"),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    safetensors.save_file(change(Model().state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        filler_of(on_meta(), tmp_path)


def test_what_cannot_fill_a_module_is_refused(tmp_path):
    with pytest.raises(TypeError, match="materialize .*got 5"):
        filler_of(on_meta(), 5)
    with pytest.raises(FileNotFoundError, match="materialize=.*nothing"):
        filler_of(on_meta(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="'base.0.weight' has values"):
        filler_of(Model(), print)
    safetensors.save_file(Forgotten().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'table' of a Table"):
        filled(on_meta(Forgotten), tmp_path)
    with pytest.raises(ValueError, match="materialize has replaced 'weight'"):
        filled(on_meta(), lambda layer: layer.register_parameter("weight", torch.nn.Parameter(torch.ones(2))))


def reset(layer):
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()


def test_what_a_function_leaves_without_values_is_named():
    """As the weight of a norm that has no reset_parameters(), which would have what was in memory before."""
    with pytest.raises(ValueError, match=r"has left base\.0\.weight, base\.0\.bias, .* and 2 more without values"):
        filled(on_meta(), lambda layer: None)
    with pytest.raises(ValueError, match=r"has left rope\.table without values"):
        filled(on_meta(Computed), reset)
    assert filled(on_meta(), reset).base[1].running_var.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.Linear])
def test_tied_weights_are_filled_by_one_of_their_layers(kind):
    def fill(layer):
        if isinstance(layer, kind):
            torch.nn.init.ones_(layer.weight)

    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False))
    module[1].weight = module[0].weight
    assert (filled(module, fill)[1].weight == 1).all()


def test_parameters_with_values_keep_them():
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    module[1].weight = torch.nn.Parameter(torch.full((2, 3), 7.0))
    filled(module, lambda layer: [torch.nn.init.ones_(p) for p in layer.parameters() if p is not module[1].weight])
    assert (module[1].weight == 7).all() and (module[1].bias == 1).all()


def test_a_file_of_an_index_that_is_not_there_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"head.weight": "second.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"index\.json names 'second\.safetensors', and there is no such file"):
        filler_of(on_meta(), tmp_path)
