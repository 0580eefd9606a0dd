"""PyTorch modules on MPI ranks: `as_distributed` for a loop of your own, `problem` for `optimize`, `rule_of` for rules.

Input: a module, and a rule or an optimizer of PyTorch.
Output: the same module, whose parameters are views into one flat array, and an optimizer of PyTorch for the user's
loop.

Read ``distributed`` and ``module_optimizer`` first, then ``module``, and ``gradient_hooks`` and ``loop_hooks``, which
take gradients; ``torch_rule`` with ``live_groups`` and ``torch_steps``, for optimizers and schedulers of PyTorch;
``own_steps`` for the steps that these take themselves; ``sharded_module``, for modules whose parameters are divided;
``tensor_parallel_module``, for those on tensor ranks, with ``plans``, ``cut_module``, ``tensor_ops`` and
``divided_logits`` where layers are cut, ``sequences`` where sequences are, and ``expert_module`` with ``experts`` where
experts are; ``stages``, ``staged_module``, ``stage_passes`` and ``micro_batches``, for pipelines; ``problem`` for
`optimize`; the rest by name.

`convert_sync_batchnorm` lets batch norms see the samples of all ranks; `join` is for uneven numbers of batches;
`summon_full_parameters` shows the parameters of a module whose ranks have shares of them; `cross_entropy` is the loss
of logits that tensor ranks have divided.

PyTorch is imported with the first of these names.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.torch.batch_norm import convert_sync_batchnorm
    from mpishard.torch.distributed import as_distributed, cross_entropy, summon_full_parameters
    from mpishard.torch.module_optimizer import ModuleOptimizer
    from mpishard.torch.problem import problem
    from mpishard.torch.torch_rule import rule_of
    from mpishard.torch.uneven_batches import join

__all__ = [
    "ModuleOptimizer",
    "as_distributed",
    "convert_sync_batchnorm",
    "cross_entropy",
    "join",
    "problem",
    "rule_of",
    "summon_full_parameters",
]

if not TYPE_CHECKING:  # a type checker has the names from above
    __getattr__ = names_when_used(
        __name__,
        {
            "batch_norm": "convert_sync_batchnorm",
            "distributed": "as_distributed cross_entropy summon_full_parameters",
            "module_optimizer": "ModuleOptimizer",
            "problem": "problem",
            "torch_rule": "rule_of",
            "uneven_batches": "join",
        },
        needs="PyTorch",
    )


def __dir__() -> list[str]:
    return list(__all__)
