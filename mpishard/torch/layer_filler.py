"""What gives a module on the device meta its values, layer by layer, so that a rank never has more than it keeps.

A *layer* is here any submodule, with the parameters and buffers that it has itself.  It is filled by a function of the
user's, or from safetensors files, of which a rank reads its own parts alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mpishard.arguments import listed, printable
from mpishard.comm.agreement import fingerprint
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.io.weight_files import DTYPES, StoredWeight, WeightFiles, stored_tensors
from mpishard.torch.memory import broadcast_values, give_memory
from mpishard.torch.staged_module import StagedModule
from mpishard.torch.tensor_parallel_module import TensorParallelModule
from mpishard.torch.units import plain_name, uncompiled


class LayerFiller:
    """Fills the layers of a module.  Nothing is changed before.

    `tensors` are its parameters by name, `cuts` and `stages` say which parts of them a rank keeps. Raises what is wrong
    with `materialize`, see `as_distributed`, and ValueError if the module has values.
    """

    def __init__(
        self,
        materialize: Any,
        module: Any,
        tensors: Mapping[str, Any],
        ranks: Axis,
        cuts: TensorParallelModule | None = None,
        stages: StagedModule | None = None,
    ) -> None:
        self._names = {id(p): name for name, p in tensors.items()}
        self.ranks = ranks  # those that fill the module together
        self._cuts = cuts
        self._stages = stages
        self._module = uncompiled(module)
        self._files: _ModuleFiles | None = None
        self._have_read: set[int] = set()  # ids of parameters
        self._without_values = {id(p) for p in tensors.values() if p.device.type == "meta"}
        self._marked: set[int] = set()  # ids of what was NaN before a function of the user's
        self._left: dict[int, str] = {}  # the names of those that are NaN after it
        self._paths = {id(layer): name for name, layer in self._module.named_modules()}
        self._fill: Callable[[Any], Any] = materialize
        if isinstance(materialize, str | os.PathLike):
            self._files = _ModuleFiles(Path(materialize), self._module)
            self._fill = self._read
        elif not callable(materialize):
            raise TypeError(
                "materialize must be a folder or file of safetensors, or a function of a submodule, got "
                f"{materialize!r}"
            )
        name, p = next(iter(tensors.items()))
        if p.device.type != "meta":
            raise ValueError(
                f"materialize fills a module on the device meta, and parameter {name!r} has values, on {p.device}: "
                'leave it out, or make the module within `with torch.device("meta"):`'
            )

    @property
    def reads_parts(self) -> bool:
        """Whether a layer may have the parts of a rank; else its parameters must be whole."""
        return self._files is not None

    @property
    def described(self) -> str:
        """What the module is filled with, as a text that must be the same on all ranks."""
        return "a function" if self._files is None else self._files.described

    def fill_module(self, device: Any) -> None:
        """Give all parameters and buffers memory and values, and leave this rank its parts of the parameters.

        A parameter of other stages has no elements then. Values that a function makes are those of rank 0; the layers
        come in the order of ``module.modules()``, as in one process. Collective over `ranks`.
        """
        layers = list(self._module.modules())
        # A parameter that layers share is whole until the last one is filled.
        last = {id(p): layer for layer in layers for p in layer._parameters.values()}
        for layer in layers:
            own = [p for p in layer._parameters.values() if p is not None]
            with raised_on_all(self.ranks):
                for p in own:
                    if p.device.type == "meta":
                        give_memory(p, torch.empty_like(self._kept(p) if self.reads_parts else p, device=device))
                self.fill(layer, device)
            for p in own:
                if last[id(p)] is layer and not self.reads_parts:
                    broadcast_values(p, self.ranks)
                    p.data = self._kept(p)
        self.check_filled()

    def fill(self, layer: Any, device: Any) -> None:
        """Give the buffers of a layer memory, and fill them and its parameters in place.  Not collective."""
        for key, buffer in layer._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                layer._buffers[key] = torch.empty_like(buffer, device=device)
                self._mark(layer._buffers[key])
        before = dict(layer._parameters)
        if not any(each is not None for each in (*before.values(), *layer._buffers.values())):
            return
        for p in before.values():
            if id(p) in self._without_values:
                self._mark(p)
        storages = {key: p.untyped_storage()._cdata for key, p in before.items() if p is not None}
        with torch.no_grad():
            self._fill(layer)
        for key, p in layer._parameters.items():
            if p is not before.get(key) or (p is not None and p.untyped_storage()._cdata != storages[key]):
                raise ValueError(
                    f"materialize has replaced {key!r} of a {type(layer).__name__}: fill parameters in place, as "
                    "reset_parameters() and functions of torch.nn.init do"
                )
        for key, each in (*layer._parameters.items(), *layer._buffers.items()):
            if id(each) in self._marked:
                name = f"{self._paths[id(layer)]}.{key}".removeprefix(".")
                self._left.pop(id(each), None)
                if each.isnan().all():
                    self._left[id(each)] = plain_name(name)

    def check_filled(self) -> None:
        """Raise ValueError if a function has left parameters or buffers without values.  Collective over `ranks`."""
        with raised_on_all(self.ranks):
            if self._left:
                raise ValueError(
                    f"materialize has left {listed(list(self._left.values()))} without values, or has given only NaN: "
                    "the function is called with each submodule that has parameters or buffers itself, and fills all "
                    "of these, as reset_parameters() does, or _init_weights() of a model of transformers"
                )

    def _mark(self, tensor: Any) -> None:
        """Make a tensor NaN, so that it is seen whether a function fills it.  Values of other ranks do not count."""
        if self.reads_parts or self.ranks.rank != 0 or id(tensor) in self._marked:
            return
        if tensor.numel() and tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.detach().fill_(float("nan"))
            self._marked.add(id(tensor))

    def _part(self, name: str, whole: Any) -> Any:
        """What this rank keeps of a parameter; None if it is on other stages."""
        if self._stages is not None and not self._stages.holds(name):
            return None
        return whole if self._cuts is None else self._cuts.own_part(name, whole)

    def _kept(self, p: Any) -> Any:
        part = self._part(self._names[id(p)], p.detach())
        return p.detach().new_empty(0) if part is None else part

    def _read(self, layer: Any) -> None:
        """Fill a layer from the files.  They are open for one layer: what is read of them stays in memory as long."""
        assert self._files is not None
        with self._files.opened() as files:
            self._files.make_buffers(layer)
            for tensor, stored in self._files.stored_in(layer):
                if id(tensor) in self._have_read:  # as one of another layer
                    continue
                self._have_read.add(id(tensor))
                name = self._names.get(id(tensor))
                whole = _Whole(files, stored)
                part = whole if name is None else self._part(name, whole)
                if part is not None:
                    tensor.copy_(part.read() if part is whole else part)


class _Whole:
    """A stored tensor, of which parts are read as they would be taken of a tensor."""

    def __init__(self, files: WeightFiles, stored: StoredWeight) -> None:
        self._files = files
        self.stored = stored

    def read(self) -> Any:
        return self._files.open(self.stored.file).get_tensor(self.stored.name)

    def narrow(self, dim: int, start: int, length: int) -> Any:
        part = self._files.open(self.stored.file).get_slice(self.stored.name)
        return part[(*[slice(None)] * dim, slice(start, start + length))]


class _ModuleFiles:
    """Where the tensors of a module are in safetensors files, by the names of its ``state_dict``.

    Raises OSError or ValueError if the files cannot be read, or do not have what the module needs.
    """

    def __init__(self, path: Path, module: Any) -> None:
        if not path.exists():
            raise FileNotFoundError(f"materialize={str(path)!r}: there is no such folder or file")
        self._folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
        stored = {each.name: each for each in stored_tensors(self._folder, file)}
        mark = fingerprint({each.name: str(each) for each in stored.values()})
        self.described = f"{len(stored)} tensors of safetensors files [{mark:x}]"
        self._found: dict[int, dict[str, StoredWeight]] = {}  # by the id of a layer and the key in it
        self._made: dict[int, list[str]] = {}  # keys of buffers that are in no file
        self._makers: dict[int, Any] = {}  # the model of transformers that a layer is in
        names: dict[int, list[str]] = {}  # a tensor may have several
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(plain_name(name))
        prefix = f"{base}." if (base := getattr(module, "base_model_prefix", "")) else ""
        missing: list[str] = []
        makers: dict[str, Any] = {}
        for path_in, layer in module.named_modules():
            outer = makers.get(path_in.rpartition(".")[0])
            self._makers[id(layer)] = makers[path_in] = layer if hasattr(layer, "_init_weights") else outer
            for key, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is None:
                    continue
                own = names[id(tensor)]
                spelled = [*own, *(each.removeprefix(prefix) for each in own), *(prefix + each for each in own)]
                found = next((stored[each] for each in spelled if each in stored), None)
                if found is not None:
                    _check_fits(own[0], tensor, found)
                    self._found.setdefault(id(layer), {})[key] = found
                elif tensor.device.type == "meta":
                    self._made.setdefault(id(layer), []).append(key)
                    if key not in layer._non_persistent_buffers_set:
                        missing.append(own[0])
                    elif makers[path_in] is None:
                        raise ValueError(
                            f"buffer {own[0]!r} is on the device meta and in no file, since it is not persistent: give "
                            "it values before as_distributed, or materialize a function of a submodule"
                        )
        if missing:
            raise ValueError(
                f"{path} lacks {listed(missing)} of the module, and has {listed(map(printable, stored))}: files need "
                "the names of the module's state_dict(), as save_pretrained() and safetensors.torch.save_model() give "
                "them"
            )

    def opened(self) -> WeightFiles:
        return WeightFiles(self._folder, "pt")

    def stored_in(self, layer: Any) -> Iterator[tuple[Any, StoredWeight]]:
        """The tensors that a layer has itself, and where they are."""
        tensors = {**layer._parameters, **layer._buffers}
        for key, stored in self._found.get(id(layer), {}).items():
            yield tensors[key], stored

    def make_buffers(self, layer: Any) -> None:
        """Let the model of transformers compute the buffers that are in no file."""
        if id(layer) not in self._made:
            return
        self._makers[id(layer)]._init_weights(layer)
        for key in self._made[id(layer)]:
            if not layer._buffers[key]._version:
                raise ValueError(
                    f"buffer {key!r} of a {type(layer).__name__} is in no file, and _init_weights() of its model does "
                    "not fill it: give it values before as_distributed"
                )


def _check_fits(name: str, tensor: Any, stored: StoredWeight) -> None:
    """Raise ValueError unless a stored tensor can be that of a module."""
    if tuple(tensor.shape) != stored.shape:
        raise ValueError(
            f"{printable(stored.name)!r} in {stored.file} has the shape {stored.shape}, and {name!r} of the module "
            f"{tuple(tensor.shape)}"
        )
    if tensor.is_floating_point() and stored.dtype not in DTYPES:
        raise ValueError(
            f"{printable(stored.name)!r} in {stored.file} is {stored.dtype}, and {name!r} of the module "
            f"{str(tensor.dtype).removeprefix('torch.')}; weights must be {', '.join(DTYPES)}"
        )
