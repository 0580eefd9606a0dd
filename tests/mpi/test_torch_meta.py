"""PyTorch modules made on the device meta, of which a rank gets its own parts alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
from torch_plans import PLAN, RULE, WORDS, adamw, fresh, take_steps  # noqa: E402
from torch_stages import made, take_micro_steps  # noqa: E402

from mpishard.torch import layer_filler  # noqa: E402


def llama(**options):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=12, intermediate_size=7, num_hidden_layers=3, num_attention_heads=3, vocab_size=WORDS)
    words = dict(bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **words, **options))


def module_of(axis, name):
    """A module that can be cut over an axis, and the options for it."""
    if name == "llama":
        return fresh(kind=llama, tie_word_embeddings=axis == "pipeline"), {}  # its own plan cuts the head alone
    return (fresh(), {"plan": PLAN}) if axis == "tensor" else (made("streams"), {})


@pytest.fixture(params=["tensor", "pipeline"])
def axis(request):
    return request.param


@pytest.fixture
def cut_mesh(comm, axis):
    """Two ranks of the axis where they divide the ranks, else all."""
    with Mesh(comm, **{axis: 2 if comm.size % 2 == 0 else comm.size}, debug=True) as mesh:
        yield mesh


def store(comm, module, folder):
    """Write the tensors of a module into two files and their index, tied ones by their first name."""
    if comm.rank == 0:
        first = {each.data_ptr(): name for name, each in reversed(module.state_dict().items())}
        tensors = {name: each for name, each in module.state_dict().items() if first[each.data_ptr()] == name}
        files = {"model-1.safetensors": list(tensors)[::2], "model-2.safetensors": list(tensors)[1::2]}
        for file, names in files.items():
            safetensors.save_file({name: tensors[name] for name in names}, folder / file)
        weight_map = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    comm.Barrier()


def values(module):
    with mpishard.torch.summon_full_parameters(module, writeback=False):
        return {name: each.clone() for name, each in module.state_dict().items()}


def held(module):
    """The bytes of parameters that have values; those of other stages have another class."""
    own = [p for p in module.parameters() if type(p) is torch.nn.Parameter and p.device.type != "meta"]
    return sum(p.untyped_storage().nbytes() for p in own)


VARIANTS = [("plain", 0), ("plain", 3), ("llama", 1)]


@pytest.mark.parametrize(("name", "zero"), [*VARIANTS, pytest.param("plain", 2, marks=pytest.mark.full)])
def test_a_rank_reads_its_parts_alone(comm, cut_mesh, axis, folder, monkeypatch, name, zero):
    if axis == "pipeline" and zero == 3:
        pytest.skip("zero=3 does not go with a pipeline")
    counts = []

    def noted(how):
        own = getattr(layer_filler._Whole, how)

        def read(self, *args):
            found = own(self, *args)
            counts.append(found.numel() if self.stored.name in names else 0)
            return found

        return read

    for how in ("read", "narrow"):
        monkeypatch.setattr(layer_filler._Whole, how, noted(how))
    whole, options = module_of(axis, name)
    store(comm, whole, folder)
    names = {name for name, _ in whole.named_parameters()}
    with torch.device("meta"):
        module, _ = module_of(axis, name)
    optimizer = mpishard.torch.as_distributed(module, cut_mesh, RULE, zero=zero, materialize=folder, **options)
    if zero < 3:
        tensors = optimizer._state.tensors
        own = sum(p.numel() for p in (*tensors.trained.values(), *tensors.frozen.values()))
        assert sum(counts) == own and held(module) == 8 * own
    size = sum(p.numel() for p in whole.parameters())
    assert sum(counts) < size or comm.size == 1
    assert_equal(values(module), whole.state_dict())
    expected = take_steps(whole, adamw(whole), range(2))
    losses = take_micro_steps(module, optimizer, range(2), cut_mesh.data)
    means = cut_mesh.data.all_reduce(np.array(losses)) / cut_mesh.data.size
    np.testing.assert_allclose(means, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("zero", [1, *variants.full(0)])
def test_a_function_draws_the_numbers_of_one_process(cut_mesh, axis, zero):
    """Tied weights are filled twice.  The numbers of rank 0 count."""
    most = []

    def fill(layer):
        most.append(held(module))
        for each in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            each.random_(9)

    whole, options = module_of(axis, "plain")
    module = whole
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in whole.modules():
            fill(layer)
    most.clear()
    with torch.device("meta"):
        module, _ = module_of(axis, "plain")
    torch.manual_seed(5 + cut_mesh.rank)
    optimizer = mpishard.torch.as_distributed(module, cut_mesh, RULE, zero=zero, materialize=fill, **options)
    assert max(most) < held(whole) or cut_mesh.size == 1
    assert_equal(values(module), whole.state_dict())
    optimizer.close()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def test_errors_in_filling_are_raised_on_all_ranks(comm, cut_mesh, axis, folder):
    with torch.device("meta"):
        module, options = module_of(axis, "plain")
    last = comm.rank == comm.size - 1

    def fails(layer):
        if last and isinstance(layer, torch.nn.Embedding):
            raise ArithmeticError("no values")

    with pytest.raises(ArithmeticError if last else Exception, match="no values"):
        mpishard.torch.as_distributed(module, cut_mesh, RULE, materialize=fails, **options)
    store(comm, module_of(axis, "plain")[0], folder)
    with torch.device("meta"):
        module, _ = module_of(axis, "plain")
    file = folder if not last else folder / "model-1.safetensors"
    with pytest.raises(ValueError, match="model-1.safetensors lacks .*state_dict"):
        mpishard.torch.as_distributed(module, cut_mesh, RULE, materialize=file, **options)
    if axis == "tensor" and comm.size > 1:
        with pytest.raises(ValueError, match="materialize is a function.* zero=3 .*zero=2"):
            mpishard.torch.as_distributed(module, cut_mesh, RULE, zero=3, materialize=fails, **options)
    mpishard.torch.as_distributed(module, cut_mesh, RULE, materialize=folder, **options)


@pytest.mark.mpi(min_size=2)
def test_a_plan_that_does_not_fit_is_found_by_shapes(comm, folder):
    """Without a pass of the whole module."""
    whole = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 3))
    store(comm, whole, folder)
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 3))
    with Mesh(comm, tensor=comm.size) as mesh:
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, plan={"0": "colwise"}, materialize=folder)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(2, 3))
        optimizer.close()
