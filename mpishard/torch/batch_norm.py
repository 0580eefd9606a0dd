"""Batch norms that normalize by the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.comm.agreement import held_by, opening
from mpishard.comm.axis import Axis
from mpishard.comm.call_matching import CollectiveMismatchError
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.launch.job_notes import raised_by_all
from mpishard.torch.memory import as_array, finish_stream

# Norms sum in the forward and in the backward pass, between the sums of gradients that are under way: by themselves.
_GROUP = "batch norms"


def convert_sync_batchnorm(module: Any, mesh: Mesh) -> Any:
    """Let all batch norms of a module normalize by the samples of all data ranks, as ``torch.nn.SyncBatchNorm`` does.

    Call it before `as_distributed` or `problem`.  The names in the ``state_dict`` stay.  In training each layer
    then sums over the ranks in its forward and in its backward pass: all ranks make the same passes, of any numbers of
    samples.

    Collective over the mesh.

    Parameters
    ----------
    module : torch.nn.Module
        Its layers of the kinds BatchNorm1d, 2d, 3d and SyncBatchNorm are replaced, and keep their parameters and
        buffers.
    mesh : Mesh
        Data-parallel.

    Returns
    -------
    torch.nn.Module
        `module`; or what takes its place, if it is a batch norm itself.

    Raises
    ------
    TypeError
        If it is no module.
    ValueError
        If one of these layers has a forward pass of its own, as with an activation.
    """
    with opening(checked_mesh(mesh).world, "convert_sync_batchnorm"):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"convert_sync_batchnorm needs a torch.nn.Module, got a {type(module).__name__}")
        for path, layer in module.named_modules():
            _check_forward(path, layer)
    return _converted(module, _Ranks(mesh.data))


def has_norms_over_ranks(module: Any) -> bool:
    """Return True if a module has batch norms made by `convert_sync_batchnorm`, over more than one rank."""
    return any(isinstance(each, _OverRanks) and each._ranks.data.size > 1 for each in module.modules())


class _Ranks:
    """The ranks that sum, and the names of the layers by number; copies of a layer sum over the same."""

    def __init__(self, data: Axis) -> None:
        self.data = data
        self.names: list[str] = []
        self._axis, self._bound = self._own_axis(), data.times_bound

    @property
    def axis(self) -> Axis:
        """Their own axis.  Collective over them at the first call after the data axis has got other ranks."""
        if self._bound != self.data.times_bound:
            self._axis, self._bound = self._own_axis(), self.data.times_bound
        return self._axis

    def _own_axis(self) -> Axis:
        axis = self.data.subgroup(_GROUP, range(self.data.size))
        assert axis is not None
        return axis

    def difference(self, number: int) -> CollectiveMismatchError:
        """The error for ranks that were in different layers. Collective."""
        layers = [repr(name) for name in self.axis.allgather_object(self.names[number])]
        found = ", ".join(held_by(self.axis.members, layers))
        error = CollectiveMismatchError(
            f"ranks have summed over different batch norms, {found}: all ranks must call the same layers in one order"
        )
        return raised_by_all(error, self.axis.size)

    def __deepcopy__(self, memo: Any) -> _Ranks:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module after convert_sync_batchnorm belongs to its mesh and cannot be pickled, as torch.save(module) "
            "does; save its state_dict(), and load that into a module with or without convert_sync_batchnorm"
        )


def _check_forward(path: str, layer: Any) -> None:
    """Raise ValueError for a batch norm that computes something else than those of PyTorch."""
    known = torch.nn.modules.batchnorm._BatchNorm, torch.nn.SyncBatchNorm, _OverRanks
    if isinstance(layer, known[0]) and type(layer).forward not in [each.forward for each in known]:
        raise ValueError(
            f"{path!r} is a {type(layer).__name__}, a batch norm with a forward pass of its own, which would be lost: "
            "make it a batch norm of torch.nn and another layer, as an activation"
        )


def _converted(module: Any, ranks: _Ranks, path: str = "") -> Any:
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        ranks.names.append(path)
        return _OverRanks(module, ranks)
    for name, child in module._modules.items():  # a layer may have two names here
        if child is not None:
            setattr(module, name, _converted(child, ranks, f"{path}.{name}" if path else name))
    return module


class _OverRanks(torch.nn.modules.batchnorm._BatchNorm):
    """A batch norm over the ranks, with the parameters and buffers of another one."""

    def __init__(self, layer: Any, ranks: _Ranks) -> None:
        options = layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        super().__init__(layer.num_features, *options, device="meta")
        for name, each in (*layer._parameters.items(), *layer._buffers.items()):  # None too, as without a bias
            setattr(self, name, each)
        self.training = layer.training
        self._ranks = ranks
        self._number = len(ranks.names) - 1

    def _check_input_dim(self, x: Any) -> None:
        if x.dim() < 2:
            raise ValueError(f"a batch norm takes (samples, channels, ...), got {x.dim()} dimensions")

    def forward(self, x: Any) -> Any:
        if self._ranks.data.size == 1 or not self.training:  # in evaluation no rank waits for others
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, variance, count = _Normalize.apply(x, self.weight, self.bias, self.eps, self._ranks, self._number)
        batches, averages = self.num_batches_tracked, (self.running_mean, self.running_var)
        if batches is not None:
            batches.add_(1)
            share = 1 / float(batches) if self.momentum is None else self.momentum
            for average, now in zip(averages, (mean, variance * (count / (count - 1))), strict=True):
                assert average is not None
                average.mul_(1 - share).add_(now.to(average.dtype), alpha=share)
        return y


class _Normalize(torch.autograd.Function):
    """The normalization of Ioffe and Szegedy (2015), with sums over ranks in float64."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, ranks: _Ranks, number: int) -> Any:
        axis = ranks.axis
        # The number of the layer travels too: MPI would add up the sums of two layers of one size.
        own = x.new_tensor([x.numel() // max(1, x.shape[1]), number, number**2], dtype=torch.float64)
        sums = _sums_over_ranks(axis, own, *_moments(x))
        count, numbers, squares = sums[:3].tolist()
        if numbers**2 != axis.size * squares:
            raise ranks.difference(number)
        if count < 2:
            raise ValueError(f"a batch norm needs more than {count:.0f} values a channel over all ranks in training")
        mean, variance = sums[3:].reshape(2, -1) / count
        variance = (variance - mean.square()).clamp_min(0)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.axis, ctx.count, ctx.biased = axis, count, bias is not None
        y = _normalized(x, mean, scale)
        if weight is not None:
            y = y * _by_channel(weight, y)
        if bias is not None:
            y = y + _by_channel(bias, y)
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        normalized = _normalized(x, mean, scale)
        dy = dy.to(normalized.dtype)
        own = [each.sum(_all_but_channels(x), dtype=torch.float64) for each in (dy, dy * normalized)]
        dweight = None if weight is None else own[1].to(weight.dtype)
        dbias = own[0].to(dy.dtype) if ctx.biased else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, dbias, None, None, None
        plain, along = _sums_over_ranks(ctx.axis, *own).reshape(2, -1) / ctx.count
        dx = (dy - _by_channel(plain, dy) - normalized * _by_channel(along, dy)) * _by_channel(scale, dy)
        if weight is not None:
            dx = dx * _by_channel(weight, dx)
        return dx.to(x.dtype), dweight, dbias, None, None, None


def _moments(x: Any) -> tuple[Any, Any]:
    """The sums of a channel's values and of their squares."""
    dims = _all_but_channels(x)
    return x.sum(dims, dtype=torch.float64), torch.linalg.vector_norm(x, dim=dims, dtype=torch.float64).square()


def _sums_over_ranks(axis: Axis, *parts: Any) -> Any:
    sums = torch.cat([part.to(torch.float64) for part in parts])
    finish_stream(sums)
    axis.all_reduce(as_array(sums), label="batch norm")
    return sums


def _normalized(x: Any, mean: Any, scale: Any) -> Any:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide - _by_channel(mean, wide)) * _by_channel(scale, wide)


def _by_channel(values: Any, like: Any) -> Any:
    return values.to(like.dtype).reshape(1, -1, *[1] * (like.dim() - 2))


def _all_but_channels(x: Any) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
