"""The stages of a PyTorch module on a pipeline: the layers that they run, in the order of their calls, and its splits.

A *layer* is here a submodule that one stage runs, such as an embedding, a block, or a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from mpishard.arguments import kind_of, listed
from mpishard.layout.boxes import split
from mpishard.torch.batch_norm import has_norms_over_ranks
from mpishard.torch.units import plain_name

_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_HOW = (
    "name the submodules at which a stage begins, in the order of their calls, as stages=['layers.2', 'layers.4'] for "
    "three stages"
)


@dataclass(frozen=True)
class StageLayer:
    """A layer, and the virtual stage that runs it."""

    path: str
    module: Any
    stage: int


def layers_on(module: Any, stages: Any, ranks: int, chunks: int = 1) -> list[StageLayer]:
    """The `layers_of` a module for pipeline ranks, with `chunks` virtual stages each.

    Raises TypeError or ValueError if they cannot divide it.
    """
    with_pipeline = f"with pipeline={ranks}"
    if has_norms_over_ranks(module):
        raise ValueError(
            f"batch norms over ranks {with_pipeline}: stages pass micro-batches by themselves; use torch's own batch "
            "norms, or make the mesh with pipeline=1"
        )
    if hasattr(module, "_orig_mod"):
        raise ValueError(
            f"a module of torch.compile {with_pipeline}: the stages call its layers one by one; give the module "
            "before torch.compile, or make the mesh with pipeline=1"
        )
    layers = layers_of(module, stages, ranks * chunks)
    inside = {id(p) for layer in layers for p in layer.module.parameters()}
    on_all = any(p.requires_grad and id(p) not in inside for p in module.parameters())
    for rank in range(ranks):
        own = [layer for layer in layers if layer.stage % ranks == rank]
        if not on_all and not any(p.requires_grad for layer in own for p in layer.module.parameters()):
            raise ValueError(
                f"pipeline rank {rank} would have no parameter to train, of {listed(layer.path for layer in own)}: "
                "give stages= other cuts, or make the mesh with fewer pipeline ranks"
            )
    return layers


def layers_of(module: Any, stages: Any, count: int) -> list[StageLayer]:
    """The layers of a module, in the order of their calls, cut into `count` virtual stages.

    `stages` has the names of the layers at which the second and later stages begin, or is a plan of transformers, whose
    keys are in the order of their calls; None: the module's own plan, or that it is a `Sequential` or has one list of
    layers. Without names each stage gets equally many of the layers of the lists; where these are fewer than stages, of
    all layers that the plan names.

    What comes before and after the list belongs to the first and to the last stage. Submodules without parameters and
    persistent buffers are no layers, unless a stage begins there: each stage runs them.

    Raises TypeError or ValueError if `stages` does not fit the module, or there are fewer layers than stages.
    """
    named = {plain_name(path): child for path, child in module.named_modules()}
    splits: Sequence[str] | None = None
    if stages is None or isinstance(stages, Mapping):
        blocks = _blocks_of(module, named, stages)
    else:
        splits = blocks = _names(stages, named)
    # All modules around a block; what they have beside each other are layers.
    around = {outer for path in blocks for outer in _around(path)}
    found = [path for path in named if path and path not in around and path.rpartition(".")[0] in around]
    found = [path for path in found if path in (splits or ()) or _has_values(named[path])]
    if isinstance(stages, Mapping) or (stages is None and _own_plan(module, named)):
        found = _in_order(found, blocks)
    if splits is None:
        dealt = [path for path in blocks if _has_values(named[path])]
        in_lists = [path for path in dealt if isinstance(named[path.rpartition(".")[0]], _LISTS)]
        splits = _even_splits(in_lists if len(in_lists) >= count else dealt, count)
    elif len(splits) != count - 1:
        raise ValueError(
            f"stages names {len(splits)} layers at which a stage begins, which makes {len(splits) + 1} stages, and the "
            f"mesh and chunks have {count}: name {count - 1}"
        )
    elif unfit := [path for path in splits if path not in found[1:]]:
        raise ValueError(
            f"a stage cannot begin at {unfit[0]!r}, which is the first layer or has another of the names of stages "
            f"within it; the layers are {listed(found)}"
        )
    elif list(splits) != (ordered := [path for path in found if path in splits]):
        raise ValueError(
            f"stages names {listed(splits)}, and the module has them in the order {listed(ordered)}: name them so; for "
            "calls in another order give a dictionary whose keys are the names of submodules and lists in the order of "
            "their calls"
        )
    numbers = accumulate(int(path in splits) for path in found)
    return [StageLayer(path, named[path], number) for path, number in zip(found, numbers, strict=True)]


def _around(path: str) -> Iterator[str]:
    """The paths of all modules around a submodule."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _names(stages: Any, named: Mapping[str, Any]) -> list[str]:
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise TypeError(f"stages must be a list of names of submodules, or a plan, got {kind_of(stages)}; {_HOW}")
    for path in stages:
        if path not in named or not path:
            near = [each for each in named if each.endswith(f".{path}")] or filter(None, named)
            raise ValueError(f"stages names {path!r}, and the module has {listed(near)}; {_HOW}")
    if len(set(stages)) < len(stages):
        raise ValueError(f"stages names a layer twice: {', '.join(stages)}")
    return list(stages)


def _own_plan(module: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan that a model of transformers brings for pipelines, by the names of its submodules; else empty."""
    base = getattr(module, "base_model_prefix", "")
    prefix = f"{base}." if base in named and base else ""
    plan = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    return {prefix + path: each for path, each in plan.items()} | (getattr(module, "_pp_plan", None) or {})


def _blocks_of(module: Any, named: Mapping[str, Any], plan: Mapping[str, Any] | None) -> list[str]:
    """The paths of the layers that are dealt out to the stages, of a plan in its order."""
    own = plan is None
    if plan is None:
        plan = _own_plan(module, named)
    elif missing := [path for path in plan if path not in named]:
        raise ValueError(f"the plan of stages names {missing[0]!r}, and the module has {listed(filter(None, named))}")
    if found := [path for path in plan if path in named]:
        return [each for path in found for each in (_children(path, named) or [path])]
    if not own:
        raise ValueError(f"the plan of stages names nothing; {_HOW}")
    if isinstance(module, torch.nn.Sequential):
        return _children("", named)
    lists = [path for path, child in named.items() if isinstance(child, torch.nn.ModuleList) and _children(path, named)]
    lists = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    if len(lists) != 1:
        has = f"{len(lists)} lists of layers, {listed(lists)}" if lists else "no list of layers"
        raise ValueError(f"this {type(module).__name__} is no Sequential and has {has}: {_HOW}")
    return _children(lists[0], named)


def _children(path: str, named: Mapping[str, Any]) -> list[str]:
    """The layers of a list; empty for another module."""
    if not isinstance(named[path], _LISTS):
        return []
    return [each for each in named if each and each.rpartition(".")[0] == path]


def _has_values(module: Any) -> bool:
    """Return True if a module has parameters, or buffers that are in its `state_dict`."""
    if next(module.parameters(), None) is not None:
        return True
    return any(set(child._buffers) - child._non_persistent_buffers_set for child in module.modules())


def _in_order(found: Sequence[str], planned: Sequence[str]) -> list[str]:
    """Layers in the order of a plan; those that it does not name are before or after all of these, as they are made."""
    first = next(number for number, path in enumerate(found) if path in planned)
    others = [path for path in found[first:] if path not in planned]
    return [*found[:first], *(path for path in planned if path in found), *others]


def _even_splits(blocks: Sequence[str], count: int) -> list[str]:
    """The first layers of all stages but the first, of which each has equally many of these layers."""
    if len(blocks) < count:
        raise ValueError(
            f"{len(blocks)} layers with parameters are to be dealt out, {listed(blocks)}, to {count} stages: make the "
            f"mesh with fewer pipeline ranks, or {_HOW}"
        )
    return [blocks[start] for start in split(len(blocks), count)[1:-1]]
