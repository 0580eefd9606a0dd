"""`as_distributed` for PyTorch modules."""

from __future__ import annotations

from typing import Any

import torch

from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.whole_models import configuration_of, optimizer_for
from mpishard.torch.buffers import MODES
from mpishard.torch.memory import array_module
from mpishard.torch.module_optimizer import ModuleOptimizer
from mpishard.torch.module_state import check_unchanged, state_of
from mpishard.torch.module_tensors import ModuleTensors
from mpishard.torch.torch_rule import TorchRule, rule_of_optimizer


def as_distributed(
    module: Any,
    mesh: Mesh | ShardingConfiguration,
    rule: Any,
    *,
    zero: int = 0,
    buffers: str = "broadcast",
) -> ModuleOptimizer:
    """Make a PyTorch module train on all ranks of a mesh; what is returned takes the place of its optimizer.

    The module has no wrapper and is used as before.  Its parameters become views into one flat array, with the values
    of rank 0 on all ranks, and hooks send each gradient as soon as autograd has finished it.  PyTorch gets as many
    threads as the mesh has for a rank.  `ModuleOptimizer.close`, or nobody's holding the result any more, ends that.

    Collective over the mesh.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters are float32 or float64, all of one dtype, on one device.  Change it before: freeze, move, load.
        ``torch.compile`` may come before or after.
    mesh : Mesh or ShardingConfiguration
        Data-parallel only.  Settings such as `max_gradient_norm`, which clips, are in a configuration; a mesh alone
        stands for ``ShardingConfiguration.create_for_high_bandwidth(mesh)``.
    rule : Rule, torch.optim.Optimizer or ShardedOptimizer
        Such as ``mpishard.AdamW(lr=1e-3)``, whose `lr` may be a schedule; or an element-wise optimizer of PyTorch that
        was made for the parameters of the module, whose steps are then taken here, with the learning rates and other
        values that its parameter groups have then, as a scheduler sets them; or an optimizer of this mesh with options
        of its own, such as ``LocalSGDOptimizer(rule, mesh, outer=...)``.
    zero : int
        What ranks divide: 0 nothing (DDP), 1 the optimizer state, 2 the gradients too.
    buffers : {"broadcast", "average", "local"}
        What becomes of persistent buffers, such as the running averages of batch norms, after each step: all ranks take
        those of rank 0, as with DistributedDataParallel; or the mean over ranks, where they are floating-point; or they
        stay as they are, and only a checkpoint has those of rank 0.

    Returns
    -------
    ModuleOptimizer
        With `step`, `zero_grad`, `no_sync` and `close`.

    Raises
    ------
    TypeError, ValueError
        On every rank, if the module or an argument of any rank is unfit, or they differ between ranks.  The module is
        unchanged then.
    """
    config = configuration_of(mesh)
    problem: Exception | None = None
    optimizer, tensors, own = None, None, {}
    try:
        tensors = ModuleTensors.of(module)
        array_module(tensors.device)  # raises for a device that has no arrays
        check_unchanged(module)
        if isinstance(rule, torch.optim.Optimizer):
            rule = rule_of_optimizer(rule, {id(p): name for name, p in tensors.trained.items()})
        optimizer = optimizer_for("a PyTorch module", rule, config, zero)
        if buffers not in MODES:
            raise ValueError(f"buffers={buffers!r} must be one of {', '.join(MODES)}")
        own = {"zero": str(zero), "buffers": buffers, **tensors.described}
    except Exception as error:  # of a class of the user's, too
        problem = error
    agree_on_settings(config.mesh.world, own, problem, what="module and arguments of as_distributed")
    assert optimizer is not None and tensors is not None
    torch.set_num_threads(config.mesh.blas_threads)
    state = state_of(module, tensors, buffers)
    try:
        optimizer.bind(state.parameters)
        arrays.ready(state.parameters.held)  # PyTorch may go on in another stream of a GPU
    except BaseException:
        state.release()
        raise
    if isinstance(rule, TorchRule) and rule.live is not None:
        rule.live.claim()
    return ModuleOptimizer(state, optimizer)
