"""How an optimizer spreads its work over a mesh: one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mpishard.compression import Int8Compressor, PieceCompressor
from mpishard.mesh import Mesh

NONFINITE = ("raise", "skip", "ignore")


@dataclass(frozen=True)
class ShardingConfiguration:
    """Settings of a distributed optimizer or model.

    Parameters
    ----------
    mesh : Mesh
        Where it runs; gradients are reduced over ``mesh.data``, after the copies of a parameter on other axes.
    auto_sync_gradients : bool
        True: every `step` reduces gradients and updates.  False: `step` only adds this rank's gradient to what is
        there, with no communication, until `synchronize_optimizer_state` (or a model's `synchronize_gradients`).
    minimum_parameter_group_size : int
        Least number of elements in a communication bucket: consecutive tensors travel together until there are that
        many.  Large buckets cost fewer messages, small ones can travel earlier.
    overlap_communication : bool
        Reduce a bucket while the backward pass still computes the next ones.  Both settings give the same bits.
    max_gradient_norm : float, optional
        Scale the averaged gradient down to this global 2-norm where it is larger.
    nonfinite_gradients : {"raise", "skip", "ignore"}
        What all ranks do if a gradient is NaN or infinite on any of them: raise FloatingPointError that names tensor
        and rank, leave parameters and state as they are and count the step as skipped, or go on.
    loss_scale : float or "dynamic", optional
        Gradients arrive multiplied by this, so that small ones survive half precision: models multiply the gradient of
        their loss by ``parameters.loss_scale``, whose effect the optimizer divides out.  "dynamic": 2**16 at first;
        where a gradient overflows on any rank all skip the step and it halves, after 2000 steps without it doubles.
        What overflows at 1 still is treated as `nonfinite_gradients` says.
    reproducible : bool
        Sum gradients over the data axis along a fixed binary tree over the step's micro-batches, which are the same on
        any number of ranks.  A run of `optimize` then gives the same bits, parameters and losses, on any number of data
        ranks, under DDP and ZeRO-1 to 3 and with any MPI, if its function does so for one micro-batch.  For that, BLAS
        gets one thread a rank unless the environment says otherwise, and a problem without ``micro_batch_size`` has 16
        micro-batches.  In a loop of one's own, `step` takes each rank's gradient as one micro-batch: the same bits on
        the same number of ranks, with any MPI.  Sums inside a data coordinate, over tensor ranks and over the stages of
        a tie, stay the MPI's own: the same bits on the same tensor and pipeline sizes where it adds alike, as it must
        with two ranks.  What a model makes of one micro-batch, as a pipeline does, adds up as it comes.
    enable_gradient_compression : bool
        Send gradients over the data axis compressed, with error feedback: DDP, ZeRO-1 and ZeRO-2.  What is left over is
        no part of the saved state yet: a run that goes on from a checkpoint, or is resized, begins without.
    gradient_compressor : PieceCompressor, optional
        What compresses them, of `mpishard.compression`; given, it is used.  Default: `Int8Compressor`.
    """

    mesh: Mesh
    auto_sync_gradients: bool = field(default=True, kw_only=True)
    minimum_parameter_group_size: int = field(default=1024, kw_only=True)
    overlap_communication: bool = field(default=True, kw_only=True)
    max_gradient_norm: float | None = field(default=None, kw_only=True)
    nonfinite_gradients: str = field(default="raise", kw_only=True)
    loss_scale: float | str | None = field(default=None, kw_only=True)
    reproducible: bool = field(default=False, kw_only=True)
    enable_gradient_compression: bool = field(default=False, kw_only=True)
    gradient_compressor: PieceCompressor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"a ShardingConfiguration needs a Mesh, got {type(self.mesh).__name__}")
        size = self.minimum_parameter_group_size
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"minimum_parameter_group_size={size!r} must be a whole number of at least 1")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm={self.max_gradient_norm!r} must be above 0, or None for no clipping")
        if self.nonfinite_gradients not in NONFINITE:
            raise ValueError(f"nonfinite_gradients={self.nonfinite_gradients!r} must be one of {', '.join(NONFINITE)}")
        if self.reproducible and not self.auto_sync_gradients:
            raise ValueError(
                "reproducible=True orders the sum over the micro-batches of each step, auto_sync_gradients=False adds "
                "them up as they come; use one of the two"
            )
        if self.reproducible and self.compressor is not None:
            raise ValueError(
                "reproducible=True gives the same bits on any number of ranks, and what compression leaves out depends "
                "on that number; use one of the two"
            )
        scale = self.loss_scale
        if scale is not None and scale != "dynamic":
            if isinstance(scale, str) or isinstance(scale, bool) or not 0 < scale < math.inf:
                raise ValueError(f'loss_scale={scale!r} must be a number above 0, "dynamic", or None for no scaling')
        if scale == "dynamic" and self.nonfinite_gradients == "ignore":
            raise ValueError(
                'loss_scale="dynamic" looks for gradients that overflow, nonfinite_gradients="ignore" lets them pass; '
                'use "raise" or "skip"'
            )

    @property
    def compressor(self) -> PieceCompressor | None:
        """What makes gradients smaller on their way, if anything does."""
        return self.gradient_compressor or (Int8Compressor() if self.enable_gradient_compression else None)

    def settings(self) -> dict[str, Any]:
        """All but the mesh, as plain values."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "mesh"}
        compressor = self.gradient_compressor
        return plain | {"gradient_compressor": None if compressor is None else repr(compressor)}

    @classmethod
    def create_for_high_bandwidth(cls, mesh: Mesh, **options: Any) -> ShardingConfiguration:
        """For shared memory and fast interconnects: buckets of 2**18 elements, sent while the backward still runs."""
        return replace(cls(mesh, minimum_parameter_group_size=2**18, overlap_communication=True), **options)

    @classmethod
    def create_for_low_bandwidth(cls, mesh: Mesh, **options: Any) -> ShardingConfiguration:
        """For slow networks, where each message costs: all gradients in buckets of 2**23 elements, sent at the end."""
        return replace(cls(mesh, minimum_parameter_group_size=2**23, overlap_communication=False), **options)

    @classmethod
    def of(cls, mesh_or_config: Mesh | ShardingConfiguration) -> ShardingConfiguration:
        """A configuration as it is, or the default one of a mesh."""
        if isinstance(mesh_or_config, ShardingConfiguration):
            return mesh_or_config
        if isinstance(mesh_or_config, Mesh):
            return cls(mesh_or_config)
        raise TypeError(f"expected a Mesh or a ShardingConfiguration, got {type(mesh_or_config).__name__}")
