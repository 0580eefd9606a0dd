"""The buffers of a PyTorch module, such as the running averages of batch norms, kept identical on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.layout.run_state import brief
from mpishard.torch.memory import array_module, as_array, as_tensor, finish_stream

Array = Any

MODES = ("broadcast", "average", "local")
_FACT = "buffer.{}"
# Names of buffers that can be in that of a fact; one that ends in json would stand for JSON.
_PLAIN = re.compile(r"(?!(.*\.)?json$)\w+([.-]\w+)*", re.ASCII)
_REMEDY = "change it before as_distributed"
_FLOATS = (torch.float32, torch.float64)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_mode(buffers: Any) -> None:
    """Raise ValueError unless this is a treatment of buffers."""
    if buffers not in MODES:
        raise ValueError(f"buffers={buffers!r} must be one of {', '.join(MODES)}")


@contextmanager
def buffers_aside(modules: Iterable[Any], copied: Callable[[Any], Any] = torch.clone) -> Iterator[None]:
    """A context in which modules have copies of their buffers: what a pass writes to these is forgotten."""
    found = [(child._buffers, key, each) for child in modules for key, each in child._buffers.items()]
    copies = {id(each): copied(each) for *_, each in found if each is not None}
    try:
        for table, key, buffer in found:
            table[key] = copies.get(id(buffer))
        yield
    finally:
        for table, key, buffer in found:
            table[key] = buffer


class BufferOwner:
    """The buffers of one module at the time of `as_distributed`, without those of its submodules.

    `prefix` begins their names; `names` given has the names of persistent buffers by id of the tensor.
    """

    def __init__(self, prefix: str, module: Any, names: Mapping[int, str]) -> None:
        self.prefix: str = prefix
        self.table: dict[str, Any] = module._buffers  # where the module has them
        self.scratch: set[str] = module._non_persistent_buffers_set  # keys of those that are not persistent
        self.known: frozenset[str] = frozenset(self.table)  # all keys
        # By key the name of a persistent buffer.
        self.names: dict[str, str] = {
            key: names[id(each)] for key, each in self.table.items() if key not in self.scratch and id(each) in names
        }


class Buffers:
    """The persistent buffers of a module: views into one flat array for each dtype, so that a message takes all.

    From now on each of `tensors` is a view; its values stay. `mode` says what `synchronize` does: "broadcast" copies
    those of rank 0; "average" takes the mean of those that are floating-point, and copies the others; "local" does
    nothing. `owners` are all modules; where one has another tensor in the place of a buffer, as ``self.n = self.n + 1``
    leaves it, its values are taken.
    """

    def __init__(self, tensors: Mapping[str, Any], mode: str, owners: Sequence[BufferOwner] = ()) -> None:
        self._tensors = dict(tensors)
        self._owners = list(owners)
        self.mode: str = mode
        self.ranks: Sequence[int] | None = None  # those whose values count in `synchronize`, in their order; None: all
        by_dtype: dict[Any, list[Any]] = {}
        for tensor in self._tensors.values():
            if tensor.numel():
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        self._flats: list[tuple[Array, Any]] = [_flattened(each) for each in by_dtype.values()]

    @property
    def facts(self) -> dict[str, np.ndarray]:
        """Copies of the values, flat, by the names that they have among the facts of a state."""
        self.take_back()
        return {_fact_of(name): as_fact(tensor) for name, tensor in self._tensors.items()}

    def take_back(self) -> None:
        """Take the values of tensors that have replaced a buffer, and put the buffer back in its place.

        Raises ValueError if such a tensor has another shape, dtype or device; if a buffer is gone, a persistent one is
        new, or one of two names of a buffer now has another tensor.
        """
        found: dict[str, Any] = {}
        for owner in self._owners:
            for key, name in owner.names.items():
                if found.setdefault(name, owner.table.get(key)) is not owner.table.get(key):
                    raise ValueError(
                        f"buffer {name!r} had a second name when the module was made distributed, "
                        f"{owner.prefix + key!r}, and one of them is another tensor now; give each name its "
                        "own buffer before as_distributed"
                    )
        for owner in self._owners:
            for key, name in owner.names.items():
                now, ours = owner.table.get(key), self._tensors[name]
                if now is ours:
                    continue
                if now is None:
                    raise ValueError(f"buffer {name!r} is gone since the module was made distributed; {_REMEDY}")
                if (now.shape, now.dtype, now.device) != (ours.shape, ours.dtype, ours.device):
                    raise ValueError(
                        f"buffer {name!r} was {_form_of(ours)} when the module was made distributed, and is "
                        f"{_form_of(now)} now; {_REMEDY}"
                    )
                ours.detach().copy_(now.detach())
                owner.table[key] = ours
            if len(owner.table) > len(owner.known):
                new = [key for key, each in owner.table.items() if each is not None and key not in owner.known]
                new = [key for key in new if key not in owner.scratch]
                if new:
                    raise ValueError(
                        f"buffer {owner.prefix + new[0]!r} is new since the module was made distributed; {_REMEDY}, "
                        "or register it with persistent=False"
                    )
        for tensor in self._tensors.values():
            finish_stream(tensor)  # CuPy is to read what was copied

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless the facts of a saved state have values for all buffers, or for none.

        The state of an optimizer alone has none, as it has no parameters.
        """
        for name, tensor in self._tensors.items() if _are_in(facts) else ():
            saved, wanted = facts.get(_fact_of(name)), as_fact(tensor)
            if not isinstance(saved, np.ndarray) or saved.shape != wanted.shape or saved.dtype != wanted.dtype:
                there = "has none" if saved is None else f"has {_shown(saved)}"
                raise ValueError(
                    f"the saved state is of another module: buffer {name!r} has {wanted.size} {wanted.dtype} here, and "
                    f"it {there}"
                )

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take the values from facts that `check` accepts, if they have any."""
        self.take_back()
        for name, tensor in self._tensors.items() if _are_in(facts) else ():
            values = from_fact(facts[_fact_of(name)], tensor.dtype)
            tensor.detach().copy_(values.reshape(tensor.shape))

    def broadcast(self, axis: Axis) -> None:
        """Copy the values of rank 0. Collective."""
        self.take_back()
        for flat, _ in self._flats:
            axis.broadcast(flat, label="buffers")

    def synchronize(self, axis: Axis) -> None:
        """Make the values equal on all ranks, as the mode says. Collective."""
        if self.mode == "local" or axis.size == 1:
            return
        ranks = range(axis.size) if self.ranks is None else self.ranks
        for flat, dtype in self._flats:
            if self.mode == "average" and dtype.is_floating_point:
                if axis.rank not in ranks:
                    flat[...] = 0
                sums = flat
                if dtype not in _FLOATS:  # MPI adds up no shorter ones
                    wide = as_tensor(flat).view(dtype).float()
                    finish_stream(wide)
                    sums = as_array(wide)
                axis.all_reduce(sums, label="buffers")
                sums /= len(ranks)
                if sums is not flat:
                    arrays.ready(sums)
                    as_tensor(flat).view(dtype).copy_(as_tensor(sums))
            else:
                axis.broadcast(flat, root=ranks[0], label="buffers")

    def consolidate(self, axis: Axis) -> None:
        """`synchronize`, unless the values are equal, whose mean may differ from them by rounding. Collective."""
        if self.mode == "average" and axis.size > 1:
            own = arrays.digest(*(flat for flat, _ in self._flats))
            most, least = axis.all_reduce(np.array([own, -own], np.int64), op="max", label="control").tolist()
            if most == -least:
                return
        self.synchronize(axis)


def _form_of(tensor: Any) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _fact_of(name: str) -> str:
    """The name of a buffer's values among the facts: in hex, if a fact cannot have that of the buffer."""
    return _FACT.format(name if _PLAIN.fullmatch(name) else name.encode().hex())


def _are_in(facts: Mapping[str, Any]) -> bool:
    """Return True if a saved state has values of buffers."""
    return any(name.startswith(_FACT.format("")) for name in facts)


def _flattened(tensors: Sequence[Any]) -> tuple[Array, Any]:
    """Move tensors of one dtype into one flat array; returns it, and the dtype."""
    first = tensors[0]
    floating = first.dtype in _FLOATS
    size = sum(tensor.numel() for tensor in tensors)
    module = array_module(first.device)
    # MPI moves those of other dtypes as bytes.
    flat = module.empty(size, str(first.dtype).removeprefix("torch.")) if floating else None
    memory = module.empty(size * first.element_size(), np.uint8) if flat is None else flat
    whole = as_tensor(memory).view(first.dtype)
    start = 0
    for tensor in tensors:
        view = whole[start : start + tensor.numel()].view(tensor.shape)
        view.copy_(tensor.detach())
        tensor.data = view
        start += tensor.numel()
    return memory, first.dtype


def as_fact(tensor: Any) -> np.ndarray:
    """A copy of the values as a flat array that a fact can be: bytes where NumPy or a fact lacks the dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype not in (*_FLOATS, *_WHOLE):
        flat = flat.view(torch.uint8)
    values: np.ndarray = flat.numpy()
    return values.copy()


def from_fact(values: np.ndarray, dtype: Any) -> Any:
    """A flat tensor with the values that `as_fact` has returned for one of a dtype."""
    return torch.from_numpy(np.array(values)).view(dtype)


def _shown(saved: Any) -> str:
    return f"{saved.size} {saved.dtype}" if isinstance(saved, np.ndarray) else brief(saved)
