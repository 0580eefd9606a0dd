"""Plans for tensor parallelism of PyTorch modules: which layers they cut where, and what they cannot cut."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch_plans import PLAN, Transformer  # noqa: E402

from mpishard.torch.distributed import cross_entropy  # noqa: E402
from mpishard.torch.plan_checks import PassRecord  # noqa: E402
from mpishard.torch.plans import Style, cuts_of, styles_of, terms_of  # noqa: E402


def offsets(module, plan, ranks):
    return {cut.path: cut.offsets for cut in cuts_of(module, styles_of(module, plan), ranks)}


def test_heads_stay_whole_and_other_features_are_cut_evenly():
    module = Transformer()
    found = offsets(module, PLAN, 2)
    assert {path.rpartition(".")[2]: cut for path, cut in found.items()} == {
        **dict.fromkeys("qkvo", (0, 8, 12)),
        **dict.fromkeys(("up", "down"), (0, 4, 7)),
        **dict.fromkeys(("mix", "thin", "gates", "gated"), (0, 3, 5)),
        **dict.fromkeys(("tokens", "head"), (0, 6, 11)),
    }
    assert len(found) == 2 + 2 * 10
    assert [*terms_of(module, styles_of(module, PLAN))] == [p for each in module.layers for p in each.norm.parameters()]


def test_an_adapter_is_cut_as_its_layer():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q", "o", "gates"])
    module = peft.get_peft_model(Transformer(layers=1), config)
    found = {cut.path: cut for cut in cuts_of(module, styles_of(module, PLAN), 2)}
    expected = offsets(Transformer(layers=1), PLAN, 2)
    for layer, matrix, dimensions in (
        ("layers.0.q", "lora_B", {"weight": (0, 1)}),
        ("layers.0.o", "lora_A", {"weight": (1, 1)}),
        ("layers.0.gates", "lora_B", {"weight": (0, 2)}),
    ):
        cut = found[f"{layer}.{matrix}.default"]
        assert (cut.offsets, cut.dimensions) == (expected[layer], dimensions)
    assert {path: cut.offsets for path, cut in found.items() if not cut.is_adapter} == expected


class Attention(torch.nn.Module):
    def __init__(self, heads, of_keys, **attributes):
        super().__init__()
        self.q, self.k = torch.nn.Linear(8, heads * 4), torch.nn.Linear(8, of_keys * 4)
        self.o = torch.nn.Linear(heads * 4, 8)
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("attention", "ranks", "q", "k"),
    [
        (Attention(6, 3, head_dim=4), 2, (0, 16, 24), (0, 8, 12)),
        (Attention(6, 2, head_size=4), 2, (0, 12, 24), (0, 4, 8)),
        (Attention(3, 3, n_heads=3), 2, (0, 8, 12), (0, 8, 12)),
        (Attention(3, 3), 2, (0, 6, 12), (0, 6, 12)),
    ],
    ids=["grouped", "groups", "number", "none"],
)
def test_queries_are_cut_where_keys_are(attention, ranks, q, k):
    module = torch.nn.ModuleDict({"attention": attention})
    plan = {"attention.[qk]": "colwise", "*.o": "rowwise"}
    assert offsets(module, plan, ranks) == {"attention.q": q, "attention.k": k, "attention.o": q}


@pytest.mark.parametrize(
    ("attributes", "heads", "repeats"),
    [({}, ((0, 0), (0, 1), (1, 1)), (1, 1, 1)), ({"num_key_value_groups": 3}, ((0,), (0, 1), (1,)), (2, 1, 2))],
    ids=["as_many", "repeated"],
)
def test_ranks_share_keys_of_fewer_heads(attributes, heads, repeats):
    attention = Attention(6, 2, head_dim=4, **attributes)
    module = torch.nn.ModuleDict({"attention": attention})
    plan = {"attention.[qk]": "colwise", "*.o": "rowwise"}
    found = {cut.path: cut for cut in cuts_of(module, styles_of(module, plan), 3)}
    assert found["attention.q"].offsets == found["attention.o"].offsets == (0, 8, 16, 24)
    k = found["attention.k"]
    assert k.shared.heads == heads and not k.dimensions
    assert {each.name: each.values for each in k.counts} == dict.fromkeys(attributes, repeats)


def test_attributes_count_the_heads_of_a_rank():
    attention = Attention(6, 3, head_dim=4, num_heads=6, num_key_value_heads=3, num_key_value_groups=2, is_causal=True)
    module = torch.nn.ModuleDict({"attention": attention})
    found = cuts_of(module, styles_of(module, {"attention.[qk]": "colwise", "*.o": "rowwise"}), 2)
    counts = {(each.name, each.values) for cut in found for each in cut.counts}
    assert counts == {("num_heads", (4, 2)), ("num_key_value_heads", (2, 1))}


def test_styles_of_pytorch():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    module = Transformer(1)
    given = {
        ColwiseParallel(): Style("outputs"),
        ColwiseParallel(output_layouts=Replicate()): Style("outputs", whole=True),
        RowwiseParallel(): Style("inputs"),
        RowwiseParallel(input_layouts=Replicate()): Style("inputs", whole=True),
    }
    for theirs, style in given.items():
        assert styles_of(module, {"layers.0.up": theirs}) == {"layers.0.up": style}
    others = [
        SequenceParallel(),
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
        ColwiseParallel(use_local_output=False),
        3,
    ]
    for name, cuts in (("packed_colwise", "outputs"), ("packed_rowwise", "inputs")):
        assert styles_of(module, {"layers.0.up": (name, 3)}) == {"layers.0.up": Style(cuts, packed=3)}
    for theirs in others:
        with pytest.raises(ValueError, match=r"layers\.0\.up.*Replicate"):
            styles_of(module, {"layers.0.up": theirs})


def frequent():
    return torch.nn.ModuleDict({"tokens": torch.nn.Embedding(9, 4, scale_grad_by_freq=True)})


def wrapped():
    module = Transformer(1)
    module.layers[0].up.forward = module.layers[0].up.forward
    return module


@pytest.mark.parametrize(
    ("make", "plan", "ranks", "message"),
    [
        (Transformer, {"layers.*.up": "column"}, 2, r"'column' for 'layers\.\*\.up'.*colwise"),
        (Transformer, {"layers.*.nothing": "colwise"}, 2, r"'layers\.\*\.nothing'.*it has tokens"),
        (Transformer, {"*.up": "colwise"}, 2, r"it has 'layers\.0\.up', and \* is one part"),
        (Transformer, {"layers.0.up": "colwise", "layers.*.up": "rowwise"}, 2, r"'layers\.0\.up' two styles"),
        (Transformer, {"last": "colwise"}, 2, "'last' is a LayerNorm"),
        (Transformer, {"layers.*.q": "colwise", "layers.*.o": "rowwise"}, 4, "3 heads for tensor=4"),
        (Transformer, {"layers.*.up": "colwise"}, 8, "7 outputs for tensor=8"),
        (lambda: Transformer(dropout=0.5), {"layers.*.up": "colwise"}, 2, "drops out 0.5"),
        (lambda: torch.nn.TransformerEncoderLayer(8, 2), {"self_attn.out_proj": "rowwise"}, 2, "out_proj"),
        (frequent, {"tokens": "embedding_rowwise"}, 2, "scale_grad_by_freq"),
        (wrapped, {"layers.0.up": "colwise"}, 2, "'layers.0.up' is a Linear"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_plan_cannot_cut_is_refused_by_name(make, plan, ranks, message):
    with pytest.raises(ValueError, match=message):
        offsets(make(), plan, ranks)


@pytest.mark.parametrize("plan", [["up"], {1: "colwise"}], ids=["list", "number"])
def test_plans_are_mappings_of_names(plan):
    with pytest.raises(TypeError, match="plan"):
        styles_of(Transformer(1), plan)


def test_the_plan_of_the_module_itself_may_name_what_is_not_there():
    module = Transformer(1)
    assert styles_of(module, None) == {}
    module.tp_plan = {"layers.*.up": "colwise", "layers.*.kv_a": "mla_kv_a_proj"}
    assert styles_of(module, None) == {"layers.0.up": Style("outputs")}
    module.tp_plan = {"layers.*.up": "mla_kv_a_proj"}
    with pytest.raises(ValueError, match="own plan has 'mla_kv_a_proj'"):
        styles_of(module, None)
    module.tp_plan = {"layers.*.up.weight": "colwise"}
    with pytest.raises(ValueError, match=r"the parameter 'layers\.0\.up\.weight'"):
        styles_of(module, None)


class Experts(torch.nn.Module):
    def __init__(self, features=4, **attributes):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 2 * features, 5))
        self.down_proj = torch.nn.Parameter(torch.zeros(3, 5, 4))
        for name, value in attributes.items():
            setattr(self, name, value)


EXPERTS = {"0": "moe_tp_experts", "0.gate_up_proj": "packed_colwise", "0.down_proj": "rowwise"}


def test_experts_are_cut_by_the_features_between_their_layers():
    module = torch.nn.Sequential(Experts())
    (cut,) = cuts_of(module, styles_of(module, EXPERTS), 3)
    assert cut.offsets == (0, 2, 3, 4)
    assert cut.dimensions == {"gate_up_proj": (1, 2), "down_proj": (2, 1)}


def test_transposed_experts_are_cut_in_the_other_dimensions():
    experts = Experts(is_transposed=True)
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 5, 2 * 4))
    experts.down_proj = torch.nn.Parameter(torch.zeros(3, 4, 5))
    plan = {"0": "moe_tp_experts", "0.gate_up_proj": "packed_rowwise", "0.down_proj": "colwise"}
    (cut,) = cuts_of(torch.nn.Sequential(experts), styles_of(torch.nn.Sequential(experts), plan), 3)
    assert cut.offsets == (0, 2, 3, 4)
    assert cut.dimensions == {"gate_up_proj": (2, 2), "down_proj": (1, 1)}


def test_experts_that_are_dealt_out_are_cut_by_their_number():
    """By the module's own plan, of which a pattern may match nothing, also in a plan that has more."""
    experts = Experts(num_experts=3, has_bias=True)
    experts.down_proj_bias = torch.nn.Parameter(torch.zeros(3, 5))
    module = torch.nn.Sequential(experts, torch.nn.Linear(5, 4))
    module.ep_plan = {"0": "ep_dispatch_experts", "*.gate_up_proj": "grouped_gemm", "9": "ep_dispatch_experts"}
    for plan in ("experts", module.ep_plan | {"1": "colwise"}):
        cut, *others = cuts_of(module, styles_of(module, plan), 2)
        assert cut.offsets == (0, 2, 3)
        assert cut.dimensions == dict.fromkeys(("gate_up_proj", "down_proj", "down_proj_bias"), (0, 1))
        assert [(each.name, each.values) for each in cut.counts] == [("num_experts", (2, 1))]
        assert len(others) == (plan != "experts")


@pytest.mark.parametrize(
    ("experts", "plan", "message"),
    [
        (
            Experts(num_experts=4),
            {"0": "ep_dispatch_experts"},
            r"=4 and 'gate_up_proj' of shape \(3, 8, 5\)",
        ),
        (Experts(has_bias=True), EXPERTS, "'0' have biases"),
        (Experts(), {"0": "moe_tp_experts", "0.down_proj": "rowwise"}, "cuts down_proj"),
        (Experts(features=5), EXPERTS, r"'0' has 10 features of 2 in 'gate_up_proj', 4 features of 1 in 'down_proj'"),
        (torch.nn.Linear(4, 7), {"0": "packed_colwise"}, "'0' has 7 features of 2"),
        (torch.nn.Embedding(4, 8), {"0": "packed_rowwise"}, "'0' is a Embedding"),
    ],
    ids=["number", "biases", "one", "unlike", "odd", "embedding"],
)
def test_packed_layers_that_cannot_be_cut_are_refused(experts, plan, message):
    module = torch.nn.Sequential(experts)
    with pytest.raises(ValueError, match=message):
        offsets(module, plan, 2)


def _record(x):
    record = PassRecord()
    record.note("x", x)
    return record


def test_passes_that_differ_by_rounding_or_in_few_elements_are_alike():
    whole = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    whole[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    other = whole * (1 + 1e-9)
    other[100:150] += 1  # tokens of another expert
    _record(other).check(_record(whole))
    _record(torch.zeros(5)).check(_record(torch.zeros(5)))
    half = whole[3:].bfloat16()
    _record(half * 1.1).check(_record(half))  # after many layers
    with pytest.raises(ValueError, match="by 0.5 of its size"):
        _record(half * 1.3).check(_record(half))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, 2), r"shape \(4, 2\), and \(4, 4\)"),
        (torch.full((4, 4), 1.01), "by 0.01 of its size"),
        (torch.full((4, 4), torch.nan), "by inf"),
    ],
    ids=["shape", "values", "nan"],
)
def test_passes_that_differ_are_found(x, message):
    with pytest.raises(ValueError, match=message):
        _record(x).check(_record(torch.ones(4, 4)))


def test_the_loss_of_a_layer_that_is_whole_is_that_of_pytorch():
    layer = torch.nn.Linear(4, 5)
    logits, targets = layer(torch.linspace(-1, 1, 24).reshape(2, 3, 4)).bfloat16(), torch.tensor([[0, 4, 7], [1, 2, 7]])
    found = cross_entropy(logits, targets, layer, ignore_index=7, reduction="sum")
    expected = torch.nn.functional.cross_entropy(logits.float().mT, targets, ignore_index=7, reduction="sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="4 columns, and the layer has 5"):
        cross_entropy(logits[..., :4], targets, layer)
    with pytest.raises(ValueError, match="reduction='none'"):
        cross_entropy(logits, targets, layer, reduction="none")
    with pytest.raises(TypeError, match="layer must be"):
        cross_entropy(logits, targets, layer.weight)
