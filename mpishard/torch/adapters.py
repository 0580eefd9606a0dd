"""Layers of a module by the names that plans have for them, also where peft has wrapped them, and their LoRA."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mpishard.torch.units import plain_name


def named_layers(module: Any) -> dict[str, Any]:
    """The submodules of a module by name; in the place of one that peft has wrapped, the layer within.

    A model of peft has the names of the model in it.
    """
    found: dict[str, Any] = {}
    for path, layer in model_within(module).named_modules():
        name = plain_name(path)
        outer = name.removesuffix(".base_layer")
        found[outer if outer != name and is_wrapper(found[outer]) else name] = layer
    return found


def named_parameters(module: Any) -> list[str]:
    """The names of the parameters, as those of `named_layers`."""
    return [plain_name(name) for name, _ in model_within(module).named_parameters()]


def wrappers_of(module: Any) -> dict[str, Any]:
    """The wrappers of peft, by the names of the layers in them."""
    named = model_within(module).named_modules()
    return {plain_name(path): layer for path, layer in named if is_wrapper(layer)}


def is_wrapper(layer: Any) -> bool:
    """Whether this is a layer of peft around another one."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(layer, peft.BaseTunerLayer)


def matrices_of(path: str, wrapper: Any, name: str) -> Mapping[str, Any]:
    """The matrices "lora_A" or "lora_B" of a wrapper, by adapter.

    Raises ValueError if it is no plain LoRA of a layer that multiplies.
    """
    kind = type(wrapper)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or wrapper.lora_variant:
        variants = ", ".join(type(each).__name__ for each in getattr(wrapper, "lora_variant", {}).values())
        raise ValueError(
            f"{path!r} is wrapped by {kind.__module__}.{kind.__name__}{f' with {variants}' if variants else ''} of "
            "peft, and the plan cuts it: what can be cut is the plain LoRA of a Linear or Conv1D; leave it out of the "
            "plan, so that it is whole on each rank"
        )
    matrices: Mapping[str, Any] = getattr(wrapper, name)
    return matrices


def model_within(module: Any) -> Any:
    """The model in a model of peft; another module itself."""
    peft = sys.modules.get("peft.peft_model")
    return module.get_base_model() if peft is not None and isinstance(module, peft.PeftModel) else module
