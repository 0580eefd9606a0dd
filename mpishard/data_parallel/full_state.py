"""The full state of an optimizer as one value, which every layout can take up, and as bytes.

The bytes are an HDF5 file image with a seal, checked before HDF5 opens it, see `mpishard.io.hdf5`. It stores every
state array with full tensors by name, so that any layout can read it. Nothing is pickled.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from mpishard.backend.array import FLOATS
from mpishard.data_parallel.rank_state import OUTER, check_numbers
from mpishard.io import hdf5
from mpishard.io.hdf5 import USER_BLOCK, FileImage
from mpishard.layout.run_state import brief, link_name
from mpishard.layout.tensors import ParameterSpec, tensors_of

_IMAGE = FileImage(b"mpishard optimizer state\0", 1, "optimizer state")
_MOST_DIMENSIONS = 32  # of HDF5
_EXTENT_LIMIT = 2**60  # sizes of longer tensors would overflow int64


@dataclass(frozen=True)
class FullState:
    """The whole state of an optimizer: `slots` maps a slot's name to its flat array over all tensors in `specs`."""

    # One field for each thing in the file that `encode` writes.
    rule: str
    configuration: Mapping[str, Any]
    steps: int
    skipped_steps: int
    specs: tuple[ParameterSpec, ...]
    dtype: np.dtype
    slots: Mapping[str, np.ndarray]
    loss_scale: tuple[float, int] | None = None  # a dynamic loss scale and the number of steps since it last changed
    outer_rule: str = ""
    outer_steps: int = 0  # steps of the rule `outer_rule` along averages of the parameters
    others: Mapping[str, np.ndarray] = field(default_factory=dict)  # further flat arrays over all tensors, by kind
    minimizer: Mapping[str, Any] = field(default_factory=dict)  # the numbers of a method's minimisation

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of this state for a `RunState`."""
        outer = [kind.removeprefix(OUTER) for kind in self.others if kind.startswith(OUTER)]
        return {
            "rule": self.rule,
            "rule.json": self.configuration,
            "slots.json": list(self.slots),
            "steps": self.steps,
            "skipped_steps": self.skipped_steps,
            "outer_rule": self.outer_rule,
            "outer_slots.json": outer,
            "outer_steps": self.outer_steps,
            **({"minimizer.json": self.minimizer} if self.minimizer else {}),
        }

    def identity(self, data: bytes) -> dict[str, str]:
        """The values that must be the same on all ranks of this state, which was read from `data`, by name."""
        numbers = {"steps": self.steps, "skipped_steps": self.skipped_steps, "loss_scale": self.loss_scale}
        facts = {f"{name} of the state": str(value) for name, value in numbers.items()}
        return facts | {"SHA-256 of the state": f"{_IMAGE.digest(data).hex()[:16]}..."}

    def check_parameters(self, specs: Sequence[ParameterSpec], dtype: np.dtype) -> None:
        """Raise ValueError unless the state belongs to parameters of these names, shapes and dtype, in this order."""
        saved, wanted = ([(spec.name, spec.shape) for spec in each] for each in (self.specs, specs))
        if saved != wanted:
            pairs = itertools.zip_longest(saved, wanted, fillvalue=("no tensor", ()))
            (name, shape), (other, other_shape) = next(pair for pair in pairs if pair[0] != pair[1])
            raise ValueError(
                f"the state is of other parameters: it has {len(saved)} tensors and this model {len(wanted)}; "
                f"they differ first at {brief(name)} {shape} against {brief(other)} {other_shape}; "
                "make the model as it was when the state was saved, or begin without its state"
            )
        if self.dtype != dtype:
            raise ValueError(f"the state is {self.dtype}, but the parameters are {dtype}")


def encode(state: FullState) -> bytes:
    """Encode a state as an HDF5 file image."""
    file = io.BytesIO()
    with h5py.File(file, "w", userblock_size=USER_BLOCK) as h5:
        h5.attrs["format"] = "mpishard optimizer state"
        h5.attrs["version"] = _IMAGE.version
        h5.attrs["rule"] = state.rule
        h5.attrs["configuration"] = json.dumps(dict(state.configuration), sort_keys=True)
        h5.attrs["steps"] = state.steps
        h5.attrs["skipped_steps"] = state.skipped_steps
        h5.attrs["dtype"] = state.dtype.name
        if state.loss_scale is not None:
            h5.attrs["loss_scale"], h5.attrs["good_steps"] = state.loss_scale
        names = [spec.name for spec in state.specs]
        h5.create_dataset("names", data=names, dtype=h5py.string_dtype())
        h5.create_dataset("shapes", data=[json.dumps(spec.shape) for spec in state.specs], dtype=h5py.string_dtype())
        if state.outer_rule:
            h5.attrs["outer_rule"], h5.attrs["outer_steps"] = state.outer_rule, state.outer_steps
        if state.minimizer:
            h5.attrs["minimizer"] = json.dumps(dict(state.minimizer), sort_keys=True)
        for slot, flat in state.slots.items():
            _write(h5.create_group(f"slots/{slot}"), flat, state.specs)
        for kind, flat in state.others.items():
            _write(h5.create_group(f"others/{link_name(kind)}"), flat, state.specs)
    return _IMAGE.seal(file.getvalue())


def _write(group: h5py.Group, flat: np.ndarray, specs: Sequence[ParameterSpec]) -> None:
    for name, values in tensors_of(flat, specs).items():
        group.create_dataset(link_name(name), data=values)


def decode(data: bytes) -> FullState:
    """Decode a file image of `encode`.

    Raises TypeError if `data` is not bytes, ValueError if they are not a state, or are truncated, altered or of another
    version.
    """
    _IMAGE.check(data)
    try:
        with h5py.File(io.BytesIO(data), "r") as h5:
            return _read(h5, len(data))
    except Exception as error:  # h5py raises errors of many kinds for invalid content
        # The SHA-256 is right, so that the bytes are not damaged: another program than `encode` wrote them.
        reason = brief(str(error) or type(error).__name__)
        raise ValueError(f"these bytes are no optimizer state that this mpishard understands: {reason}") from None


def _read(h5: h5py.File, length: int) -> FullState:
    names, shapes = _texts(h5, "names", length), [json.loads(shape) for shape in _texts(h5, "shapes", length)]
    for shape in shapes:
        if len(shape) > _MOST_DIMENSIONS or not all(type(extent) is int and extent < _EXTENT_LIMIT for extent in shape):
            raise ValueError(f"a tensor of shape {brief(shape)}")
    specs = tuple(ParameterSpec(name, shape) for name, shape in zip(names, shapes, strict=True))
    facts = {name: hdf5.attribute(h5, name) for name in h5.attrs}
    dtype = np.dtype(facts["dtype"])
    if dtype not in FLOATS:
        raise ValueError(f"state of dtype {dtype}")
    check_numbers(facts)
    groups, others = _children(h5, "slots"), _children(h5, "others")
    size, count = sum(spec.size for spec in specs), len(groups) + len(others)
    if size * dtype.itemsize * count > length:
        raise ValueError(f"{count} arrays of {size} values do not fit in {length} bytes")
    return FullState(
        rule=facts["rule"],
        configuration=json.loads(facts["configuration"]),
        steps=facts["steps"],
        skipped_steps=facts["skipped_steps"],
        specs=specs,
        dtype=dtype,
        slots={slot: _flat(group, specs, dtype) for slot, group in groups.items()},
        loss_scale=(float(facts["loss_scale"]), facts["good_steps"]) if "loss_scale" in facts else None,
        outer_rule=facts.get("outer_rule", ""),
        outer_steps=facts.get("outer_steps", 0),
        others={kind.replace("%2F", "/"): _flat(group, specs, dtype) for kind, group in others.items()},
        minimizer=json.loads(facts.get("minimizer", "{}")),
    )


def _texts(h5: h5py.File, name: str, length: int) -> list[str]:
    """The texts in a data set; raises ValueError if their total length is more than the image's."""
    dataset = hdf5.open_plain(h5, name)
    if dataset.ndim != 1 or h5py.check_string_dtype(dataset.dtype) is None:
        raise ValueError(f"{name} is {dataset.dtype} {dataset.shape}, not texts")
    found: list[str] = []
    for index in range(len(dataset)):  # one at a time: all may refer to one long text
        found.append(dataset[index].decode())
        length -= len(found[-1])
        if length < 0:
            raise ValueError(f"{name} is longer than the image")
    return found


def _children(h5: h5py.File, name: str) -> dict[str, h5py.Group]:
    """The groups in the group `name`; empty if it is missing.  Raises for links to other files."""
    if name not in h5:
        return {}
    hdf5.check_hard_link(h5, name)
    for child in h5[name]:
        hdf5.check_hard_link(h5[name], child)
    return dict(h5[name].items())


def _flat(group: h5py.Group, specs: Sequence[ParameterSpec], dtype: np.dtype) -> np.ndarray:
    flat = np.empty(sum(spec.size for spec in specs), dtype)
    for name, values in tensors_of(flat, specs).items():
        stored = hdf5.open_plain(group, link_name(name))
        if stored.shape != values.shape or stored.dtype != dtype:
            raise ValueError(f"{name} is {stored.dtype} {stored.shape} there, and not {dtype} {values.shape}")
        values[...] = stored[()]
    return flat
