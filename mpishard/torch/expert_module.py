"""A model of transformers whose experts are dealt out over the tensor axis, ``plan="experts"``.

Its ranks have samples of their own, as data ranks have, and each some of the experts, for the tokens of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from mpishard.comm.agreement import agree_on_settings
from mpishard.comm.mesh import Mesh
from mpishard.nn.tensor_parallel import Copy, Reduce
from mpishard.torch.cut_module import CutModule
from mpishard.torch.experts import dealt
from mpishard.torch.plan_checks import FIRST_STEPS, is_plain
from mpishard.torch.plans import EXPERTS, cuts_of, styles_of
from mpishard.torch.tensor_ops import moved
from mpishard.torch.units import uncompiled

_OF_BALANCE = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")


class ExpertModule(CutModule):
    """A model whose experts are dealt out; of the gradients of all that is whole each rank has a term."""

    divides_samples = True
    _dealt = staticmethod(dealt)
    _remedy = "Experts must take each token for itself, and count as many as num_experts: leave plan= out"
    _mask: Any = None  # of the pass under way

    @classmethod
    def of_experts(
        cls, module: Any, mesh: Mesh, trained: Mapping[str, Any], frozen: Mapping[str, Any], *, checks_pass: bool
    ) -> ExpertModule | None:
        """The module of `as_distributed`; None on a mesh of one tensor rank. Not collective.

        Raises ValueError if it has no experts to deal out, or fewer than ranks.
        """
        module, ranks, tensors = uncompiled(module), mesh.tensor.size, {**trained, **frozen}
        styles = {path: style for path, style in styles_of(module, EXPERTS).items() if style.cuts == "experts"}
        cuts = cuts_of(module, styles, ranks)
        if not cuts:
            raise ValueError(
                f"plan={EXPERTS!r} deals out experts as the ep_plan of a model of transformers names them, and this "
                f"{type(module).__name__} has none: leave plan= out, or give one of its layers"
            )
        if mesh.pipeline.size > 1:
            raise ValueError(
                f"plan={EXPERTS!r} on the mesh {mesh.sizes}: the stages of a pipeline pass the same samples on all "
                "tensor ranks; make the mesh with pipeline=1, or give plan=model.tp_plan | model.ep_plan"
            )
        of_experts = {id(p) for cut in cuts for p in cut.layer.parameters(recurse=False)}
        terms = frozenset(name for name, p in tensors.items() if id(p) not in of_experts)
        return None if ranks == 1 else cls(module, mesh, cuts, tensors, terms, checks_pass)

    def watch_gradients(self) -> None:
        """Compare none: ranks have other samples."""
        self._gradients.begin_after(FIRST_STEPS)

    def _agree_on_inputs(self, args: Any, kwargs: Any) -> None:
        self._check_alive()
        agree_on_settings(
            self._axis,
            {"tensors and plain values alone": str(is_plain((args, kwargs)))},
            what="inputs of the module",
            remedy="give all tensor ranks arguments of the same kinds",
        )

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        self._check_alive()
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        self._mask = {**given, **kwargs}.get("attention_mask")

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        """The output of a pass, whose loss of the balance of experts is that of the tokens of all ranks."""
        mask, self._mask = self._mask, None
        own = getattr(output, "aux_loss", None)
        if own is None or self.is_summoned:
            return None
        missing = [name for name in _OF_BALANCE if not hasattr(module, name)]
        if missing:
            raise ValueError(
                f"this {type(module).__name__} has no {', '.join(missing)}, by which plan={EXPERTS!r} takes the loss "
                "of the balance of experts over all ranks: call it with output_router_logits=False"
            )
        output.aux_loss = self._balance_loss(module, output.router_logits, mask)
        if output.loss is not None:
            output.loss = output.loss + module.router_aux_loss_coef * (output.aux_loss - own)
        return output

    def _balance_loss(self, module: Any, logits: Any, mask: Any) -> Any:
        """Fedus et al., "Switch Transformers" (2021), equations (4) to (6), over the tokens of all ranks.

        In float32, as transformers takes it.
        """
        total: Any = 0.0
        for each in logits:
            shares = each.softmax(-1)
            chosen = torch.zeros_like(shares).scatter_(1, shares.topk(module.num_experts_per_tok).indices, 1.0)
            terms = torch.cat([chosen, shares, torch.ones_like(shares[:, :1])], 1).float()
            total = total + (terms if mask is None else terms * mask.reshape(-1, 1)).sum(0, keepdim=True)
        world = self._mesh.world
        # A sum that each rank uses: so is that of its gradients.
        total = moved(moved(total, Reduce(world)), Copy(world))[0]
        chosen, shares, tokens = total.split([module.num_experts, module.num_experts, 1])
        return module.num_experts * (chosen / tokens * (shares / tokens)).sum()
