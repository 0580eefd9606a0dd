"""Plans for tensor parallelism: which layers of a PyTorch module are cut over the tensor axis, and how.

A plan maps patterns of layers to styles: the names of transformers, or objects of
`torch.distributed.tensor.parallel`.  Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from mpishard.arguments import integer, kind_of, listed
from mpishard.layout.boxes import run_lengths, split
from mpishard.torch.adapters import matrices_of, named_layers, named_parameters, wrappers_of


@dataclass(frozen=True)
class Style:
    """What is cut of a layer."""

    # What is cut: "outputs", "inputs", of experts the "features" between their two layers, "experts" where each stays
    # whole on one rank, or "" for a layer that stays whole.  The inputs of an embedding are its rows.
    cuts: str
    whole: bool = False  # these features are whole outside of the layer: gathered behind it, or cut in front of it
    sums: bool = False  # each rank has a term of the gradients of the layer
    packed: int = 1  # the features are those of so many layers in one, of one size, each of which is cut


_STYLES = {
    "colwise": Style("outputs"),
    "colwise_gather_output": Style("outputs", whole=True),
    "colwise_rep": Style("outputs", whole=True),
    "rowwise": Style("inputs"),
    "rowwise_split_input": Style("inputs", whole=True),
    "rowwise_rep": Style("inputs", whole=True),
    "embedding_rowwise": Style("inputs"),
    "embedding_colwise": Style("outputs", whole=True),
    "replicate": Style(""),
    "replicated_with_grad_allreduce": Style("", sums=True),
    "packed_colwise": Style("outputs", packed=2),
    "packed_rowwise": Style("inputs", packed=2),
    "moe_tp_experts": Style("features"),
    "ep_dispatch_experts": Style("experts"),
    "grouped_gemm": Style("experts"),  # of a parameter of these
}
EXPERTS = "experts"  # the plan of a module itself for these
# The dimension of a parameter that is cut, by the kind of layer and the features.
_DIMENSIONS = {
    ("Linear", "outputs"): {"weight": 0, "bias": 0},
    ("Linear", "inputs"): {"weight": 1},
    ("Conv1D", "outputs"): {"weight": 1, "bias": 0},
    ("Conv1D", "inputs"): {"weight": 0},
    ("Embedding", "outputs"): {"weight": 1},
    ("Embedding", "inputs"): {"weight": 0},
}
# What is cut of a layer with several in it, by the styles that take their number.
_PACKED = {"packed_colwise": "outputs", "packed_rowwise": "inputs"}
# The attributes of an attention with the size of a head, and with the number of heads, in libraries and papers.
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
# Those with the number of heads of queries for one of keys and values.
_REPEATS = ("num_key_value_groups", "n_rep")
_COUNT_OF_EXPERTS = "num_experts"  # of experts of transformers


@dataclass(frozen=True)
class HeadCount:
    """An attribute of an attention that counts heads of the whole module; rank r has `values[r]` of them.

    Or one of experts that counts these.
    """

    attention: Any
    name: str
    values: tuple[int, ...]

    @classmethod
    def of(cls, attention: Any, names: Sequence[str], whole: int, values: Sequence[int]) -> list[HeadCount]:
        """Those of some attributes that have this value."""
        own = {name: value for name, value in vars(attention).items() if type(value) is int}
        return [cls(attention, name, tuple(values)) for name in names if own.get(name) == whole]


@dataclass(frozen=True)
class SharedHeads:
    """Heads of keys or values that are fewer than ranks: their layer stays whole, and rank r computes `heads[r]`."""

    size: int
    heads: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayerCut:
    """A layer that is cut: rank r of the tensor axis has the features ``[offsets[r], offsets[r + 1])``.

    Of each of the layers that are packed in it. `dimensions` has by the name of a parameter the dimension that is cut,
    and how many are packed there; the other parameters stay whole, as all do of a layer of `shared` heads. `counts` are
    attributes of the attention that are to count the heads of the rank.
    """

    path: str
    layer: Any
    kind: str  # "Linear", "Conv1D", "Embedding" or "experts"
    style: Style
    offsets: tuple[int, ...]
    dimensions: Mapping[str, tuple[int, int]]
    counts: Sequence[HeadCount] = ()
    shared: SharedHeads | None = None
    is_adapter: bool = False  # a matrix of LoRA beside a layer


def planned(module: Any, plan: Any, ranks: int) -> tuple[dict[str, Style], list[LayerCut]]:
    """The styles of a plan, or of the module's own, and the layers that it cuts over several ranks."""
    styles = styles_of(module, plan)
    cuts = cuts_of(module, styles, ranks)
    if ranks > 1 and not cuts:
        raise ValueError(
            f"the mesh has tensor={ranks}, and {'the plan' if plan else 'this ' + type(module).__name__} cuts no "
            "layer: give a plan of layers that ranks divide, as plan={'layers.*.up': 'colwise', 'layers.*.down': "
            "'rowwise'}, or make the mesh with tensor=1"
        )
    return styles, cuts


def styles_of(module: Any, plan: Any) -> dict[str, Style]:
    """The style of each layer that a plan names, by its path; without one, or for "experts", of the module's own.

    Also of parameters, where a plan names those of experts.

    Raises TypeError or ValueError if the plan is no mapping, has a style that is not known, names what is not there,
    or gives a layer two styles.  Patterns of the module's own plans may match nothing.
    """
    of_layers, of_experts = (getattr(module, name, None) or {} for name in ("tp_plan", "ep_plan"))
    own = plan is None or plan == EXPERTS
    if own:
        plan = of_layers if plan is None else of_experts
    if not isinstance(plan, Mapping):
        raise TypeError(
            "plan must map patterns of layers to styles, as {'layers.*.up': 'colwise'}, or be 'sequence' or 'experts' "
            f"in as_distributed, got {kind_of(plan)}"
        )
    paths, names = list(filter(None, named_layers(module))), named_parameters(module)
    found: dict[str, tuple[str, Style]] = {}
    for pattern, value in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern of the plan must be the name of a layer, in which * is a part, got {pattern!r}")
        matches = [each for each in (*paths, *names) if _fits(pattern, each)]
        if not matches and (pattern in of_layers or pattern in of_experts):
            continue
        style = _style_of(pattern, value, "the module's own plan" if own else "the plan")
        if not matches:
            raise ValueError(
                f"the plan names {pattern!r}, and the module has no such layer; it has "
                f"{_alike(pattern, paths) or listed(paths)}: see module.named_modules()"
            )
        for each in matches:
            before, known = found.setdefault(each, (pattern, style))
            if known != style:
                raise ValueError(f"{before!r} and {pattern!r} of the plan give {each!r} two styles: leave one out")
    styles = {each: style for each, (_, style) in found.items()}
    for name in filter(styles.__contains__, names):
        owner = styles.get(name.rpartition(".")[0])
        if owner is None or owner.cuts not in ("features", "experts"):
            raise ValueError(
                f"{found[name][0]!r} of the plan is the parameter {name!r}: name its layer; only parameters of "
                "experts, which have 'moe_tp_experts' or 'ep_dispatch_experts', have styles of their own"
            )
    return styles


def _alike(pattern: str, paths: Sequence[str]) -> str:
    """The first layer whose name ends as a pattern that fits none, or no text."""
    last = pattern.rpartition(".")[2]
    found = [path for path in paths if fnmatchcase(path.rpartition(".")[2], last)]
    if last == "*" or not found:
        return ""
    return f"{found[0]!r}, and * is one part of a name, between two dots"


def _fits(pattern: str, path: str) -> bool:
    wanted, parts = pattern.split("."), path.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _style_of(pattern: str, value: Any, whose: str) -> Style:
    if isinstance(value, tuple) and len(value) == 2 and value[0] in _PACKED:
        return Style(_PACKED[value[0]], packed=integer(f"the number of layers in {pattern!r}", value[1], least=1))
    if isinstance(value, str):
        if value not in _STYLES:
            raise ValueError(
                f"{whose} has {value!r} for {pattern!r}, and mpishard has {', '.join(_STYLES)}; give a plan without "
                "it, as plan={name: style, ...}: layers that no plan names are whole on each rank"
            )
        return _STYLES[value]
    style = _style_of_pytorch(value)
    if style is None:
        raise ValueError(
            f"{whose} has {value!r} for {pattern!r}; mpishard has ColwiseParallel and RowwiseParallel with local "
            f"outputs and layouts Replicate() or Shard(-1), and the names {', '.join(_STYLES)}"
        )
    return style


def _style_of_pytorch(value: Any) -> Style | None:
    """The style that an object of `torch.distributed.tensor.parallel` stands for; None if there is none."""
    layouts = [getattr(value, name, None) for name in ("input_layouts", "output_layouts")]
    is_whole = [_is_whole(layout) for layout in layouts]
    if None in is_whole or not getattr(value, "use_local_output", False):
        return None
    takes_whole, gives_whole = is_whole
    kind = type(value).__name__
    if kind == "ColwiseParallel" and takes_whole:
        return Style("outputs", whole=bool(gives_whole))
    if kind == "RowwiseParallel" and gives_whole:
        return Style("inputs", whole=bool(takes_whole))
    return None


def _is_whole(layouts: Any) -> bool | None:
    """True for the layout Replicate(), False for a last dimension that is cut, None for another."""
    placements = layouts if isinstance(layouts, tuple) else (layouts,)
    if len(placements) != 1:
        return None
    (placement,) = placements
    is_replicated = getattr(placement, "is_replicate", lambda: False)()
    return is_replicated or (False if getattr(placement, "dim", None) == -1 else None)


def cuts_of(module: Any, styles: Mapping[str, Style], ranks: int) -> list[LayerCut]:
    """The layers of a module to cut over tensor ranks.

    Raises ValueError if a style cannot cut a layer, or there are fewer features or heads than ranks.
    """
    layers, wrappers = named_layers(module), wrappers_of(module)
    cut = {path: style for path, style in styles.items() if style.cuts and path in layers}
    kinds = {path: _kind_of(path, layers, style) for path, style in cut.items()}
    dimensions = {path: _dimensions(path, layers[path], kind, styles) for path, kind in kinds.items()}
    extents = {path: _extent(path, layers[path], dimensions[path]) for path in kinds}
    with_heads = [each for each, kind in kinds.items() if kind in ("Linear", "Conv1D") and not styles[each].whole]
    found = []
    for path, kind in kinds.items():
        style, extent = styles[path], extents[path]
        parent = path.rpartition(".")[0]
        attention = layers[parent]
        beside = [extents[each] for each in with_heads if each.rpartition(".")[0] == parent]
        has_heads = path in with_heads
        heads = _heads(attention, extent, beside) if has_heads else None
        size = _head_size(attention) or extent // (heads or 1) or 1
        queries = max(beside, default=0) // size
        if heads is not None and heads < ranks <= queries and not queries % (extent // size):
            if extent == queries * size:
                heads = queries
            elif style == _STYLES["colwise"]:
                found.append(_share_heads(path, layers[path], attention, size, queries, ranks))
                continue
        parts = extent if heads is None else heads
        if parts < ranks:
            raise ValueError(_too_few(path, style, extent, heads, ranks))
        offsets = tuple(cut * (extent // parts) for cut in split(parts, ranks))
        lengths = run_lengths(offsets)
        counts = [] if heads is None else [length // size for length in lengths]
        own = HeadCount.of(attention, (*_HEADS, *_KEY_HEADS), extent // size, counts) if counts else []
        if style.cuts == "experts":
            own = HeadCount.of(layers[path], [_COUNT_OF_EXPERTS], extent, lengths)
        found.append(LayerCut(path, layers[path], kind, style, offsets, dimensions[path], own))
        if len(set(lengths)) > 1 and has_heads and (rate := dropout_rate(attention)):
            raise ValueError(
                f"{path!r} is cut into {listed(lengths, 8)} {style.cuts}, and {parent or 'the module'!r} "
                f"drops out {rate:g} of its elements: ranks with unlike parts would draw unlike random numbers; set "
                f"the rate to 0, or make the mesh with a tensor size that divides {parts}"
            )
    return found + [adapter for cut in found if cut.path in wrappers for adapter in _adapters(cut, wrappers[cut.path])]


def _adapters(cut: LayerCut, wrapper: Any) -> Iterator[LayerCut]:
    """The cuts of LoRA beside a layer, alike: of the outputs of B, or of the inputs of A; the other matrix is whole."""
    name = "lora_B" if cut.style.cuts == "outputs" else "lora_A"
    for adapter, layer in matrices_of(cut.path, wrapper, name).items():
        own = {key: p for key, p in layer._parameters.items() if p is not None and cut.dimensions}
        dimensions = _DIMENSIONS["Linear", cut.style.cuts]
        yield replace(
            cut,
            path=f"{cut.path}.{name}.{adapter}",
            layer=layer,
            kind="Linear",
            dimensions={key: (dimensions[key], cut.style.packed) for key in own if key in dimensions},
            counts=(),
            is_adapter=True,
        )


def _share_heads(path: str, layer: Any, attention: Any, size: int, queries: int, ranks: int) -> LayerCut:
    """The cut of a layer of keys or values with fewer heads than ranks, each for equally many heads of queries.

    A rank computes those of its queries. Where it has several queries for each, and the attention says by how many it
    repeats a head, it computes this once, else for each query.
    """
    count = layer.weight.shape[0] // size
    repeats_heads = any(vars(attention).get(name) == queries // count for name in _REPEATS)
    heads: list[tuple[int, ...]] = []
    times: list[int] = []
    for start, stop in itertools.pairwise(split(queries, ranks)):
        served = [query * count // queries for query in range(start, stop)]
        numbers = set(map(served.count, served))
        is_even = repeats_heads and len(numbers) == 1
        heads.append(tuple(sorted(set(served)) if is_even else served))
        times.append(numbers.pop() if is_even else 1)
    counts = HeadCount.of(attention, _KEY_HEADS, count, [len(each) for each in heads])
    counts += HeadCount.of(attention, _REPEATS, queries // count, times)
    return LayerCut(path, layer, "Linear", _STYLES["colwise"], (), {}, counts, SharedHeads(size, tuple(heads)))


def _too_few(path: str, style: Style, extent: int, heads: int | None, ranks: int) -> str:
    if heads is None:
        return f"{path!r} has {extent} {style.cuts} for tensor={ranks} ranks; make it with tensor={extent} or less"
    return (
        f"{path!r} has {heads} heads for tensor={ranks} ranks; make the mesh with tensor={heads} or less, or give the "
        "layers in front of the attention 'colwise_gather_output', and that behind it 'rowwise_split_input': each rank "
        "then computes the attention whole"
    )


def _kind_of(path: str, layers: Mapping[str, Any], style: Style) -> str:
    layer, parent = layers[path], layers[path.rpartition(".")[0]]
    if style.cuts == "experts":
        return "experts"
    if style.cuts == "features":
        if getattr(layer, "has_bias", False):
            raise ValueError(
                f"the experts {path!r} have biases, and what can be cut have none: give them 'ep_dispatch_experts', so "
                "that each is whole on one rank, or a plan without them"
            )
        return "experts"
    has_weight = isinstance(layer._parameters.get("weight"), torch.nn.Parameter)
    if has_weight and isinstance(layer, torch.nn.Embedding) and style.packed == 1:
        if style.cuts == "inputs" and layer.scale_grad_by_freq:
            raise ValueError(f"{path!r} has scale_grad_by_freq=True, which counts over all rows: give it 'replicate'")
        return "Embedding"
    # MultiheadAttention does not call its layers.
    is_called = "forward" not in vars(layer) and not isinstance(parent, torch.nn.MultiheadAttention)
    if has_weight and is_called:
        if type(layer).forward is torch.nn.Linear.forward:
            return "Linear"
        if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and style.packed == 1:
            return "Conv1D"
    raise ValueError(
        f"{path!r} is a {type(layer).__name__}, and the plan cuts its {style.cuts}: what can be cut are Linear and "
        "Embedding that their module calls, and the Conv1D of transformers, of which nothing is packed; name layers "
        "within it, or leave it out of the plan, so that it is whole on each rank"
    )


def _dimensions(path: str, layer: Any, kind: str, styles: Mapping[str, Style]) -> dict[str, tuple[int, int]]:
    """The dimension of each parameter of a layer that is cut, and how many layers are packed along it."""
    own = {key: p for key, p in layer._parameters.items() if p is not None}
    style = styles[path]
    if style.cuts == "experts":
        count = getattr(layer, _COUNT_OF_EXPERTS, None)
        unlike = [f"{key!r} of shape {tuple(p.shape)}" for key, p in own.items() if p.shape[:1] != (count,)]
        if unlike or not own:
            raise ValueError(
                f"{path!r} is a {type(layer).__name__} with num_experts={count} and {', '.join(unlike) or 'nothing'}: "
                "what can be dealt out are experts whose parameters have these as their first dimension"
            )
        return dict.fromkeys(own, (0, 1))
    if kind != "experts":
        dimensions = _DIMENSIONS[kind, style.cuts]
        return {key: (dim, style.packed) for key, dim in dimensions.items() if key in own}
    found = {}
    for key, p in own.items():  # of the shape (experts, outputs, inputs)
        each = styles.get(f"{path}.{key}")
        if each is not None and each.cuts in ("outputs", "inputs") and not each.whole and p.dim() == 3:
            found[key] = 1 if each.cuts == "outputs" else 2, each.packed
    if {dim for dim, _ in found.values()} != {1, 2}:
        raise ValueError(
            f"the experts {path!r} have the parameters {', '.join(own)}, of which the plan cuts "
            f"{', '.join(found) or 'none'}: it needs 'colwise' or 'packed_colwise' for those in front, and 'rowwise' "
            "for those behind, or where weights are transposed 'packed_rowwise' and 'colwise', each with three "
            "dimensions"
        )
    return found


def _extent(path: str, layer: Any, dimensions: Mapping[str, tuple[int, int]]) -> int:
    """The number of features that are cut, of each of the layers that are packed in a layer."""
    sizes = {key: layer._parameters[key].shape[dim] for key, (dim, _) in dimensions.items()}
    extents = {sizes[key] // packed for key, (_, packed) in dimensions.items()}
    if len(extents) > 1 or any(sizes[key] % packed for key, (_, packed) in dimensions.items()):
        each = [f"{sizes[key]} features of {packed} in {key!r}" for key, (_, packed) in dimensions.items()]
        raise ValueError(f"{path!r} has {', '.join(each)}: packed layers must have one number of features")
    return int(extents.pop())


def _heads(parent: Any, extent: int, beside: Sequence[int]) -> int | None:
    """The number of heads by which a layer of an attention is cut; None if it has none.

    `beside` are the extents of all layers of the attention that are cut.  Keys and values may have fewer heads than
    queries, which are then cut where keys and values are.
    """
    size = _head_size(parent)
    if size:
        return None if extent % size else math.gcd(*(each // size for each in beside if not each % size))
    heads = next((each for name in _HEADS if isinstance(each := getattr(parent, name, None), int)), 0)
    return heads if heads and not extent % heads else None


def _head_size(parent: Any) -> int:
    """The size of a head of an attention; 0 if it does not say."""
    return next((each for name in _HEAD_SIZES if isinstance(each := getattr(parent, name, None), int)), 0)


def dropouts_of(parent: Any) -> list[tuple[Any, str]]:
    """The rates of dropout in a module: submodules, each with the name of the attribute that has its rate."""
    found = []
    for child in parent.modules():
        is_layer = isinstance(child, torch.nn.modules.dropout._DropoutNd)
        named = [name for name, value in vars(child).items() if "dropout" in name and isinstance(value, float)]
        found += [(child, name) for name in (*named, *["p"] * is_layer)]
    return found


def dropout_rate(parent: Any) -> float:
    """The largest rate of dropout in a module, as a layer or a number by that name; 0 if there is none."""
    return max((getattr(*each) for each in dropouts_of(parent)), default=0.0)


def terms_of(module: Any, styles: Mapping[str, Style]) -> Iterator[Any]:
    """The parameters of layers that stay whole, of whose gradients each rank has a term."""
    for path, layer in named_layers(module).items():
        style = styles.get(path)
        if style is not None and style.sums:
            yield from layer.parameters()
