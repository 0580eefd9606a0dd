"""LoRA of peft beside layers that tensor ranks divide by a plan."""

from __future__ import annotations

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
from torch_plans import PLAN, RULE, Transformer, adamw, fresh, loss_of, take_steps, tensor_size, words_of  # noqa: E402

TARGETS = ["q", "v", "o", "up", "down", "gates", "mix", "thin"]
STEPS = 4


def adapted(seed=0, **options):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, init_lora_weights=False, **options)
    return fresh(seed, lambda: peft.get_peft_model(Transformer(), config))


@pytest.mark.parametrize("zero", [1, *variants.full(0, 3)])
def test_steps_are_those_of_one_process(comm, zero):
    whole, module = adapted(), adapted(seed=comm.rank)
    expected = take_steps(whole, adamw(whole), range(STEPS))
    with Mesh(comm, tensor=tensor_size(comm), debug=True) as mesh:
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero, plan=PLAN)
        losses = take_steps(module, optimizer, range(STEPS), mesh.data)
        means = mesh.data.all_reduce(np.array(losses)) / mesh.data.size
        np.testing.assert_allclose(means, expected, rtol=0, atol=1e-12)
        with mpishard.torch.summon_full_parameters(module):
            saved = peft.get_peft_model_state_dict(module)
            for name, values in peft.get_peft_model_state_dict(whole).items():
                torch.testing.assert_close(saved[name], values, rtol=0, atol=1e-11)
        optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_layers_beside_adapters_share_the_sum_of_their_gradient(comm):
    """The inputs of B are entered by themselves, so that keys and values share the entry of queries."""
    with Mesh(comm, tensor=tensor_size(comm)) as mesh:
        module = adapted()
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, plan=PLAN, check_plan=False)
        mesh.ledger.clear()
        loss_of(module, words_of(0)).backward()
        entries = mesh.ledger.summary()["tensor.all_reduce activation gradients"]["calls"]
        # Of the input of the first attention no gradient is wanted; the head comes last.
        of_layers, of_adapters = 2 * 4 - 1, 2 * 5
        assert entries == of_layers + of_adapters + 1
        optimizer.zero_grad()
        optimizer.close()


@pytest.mark.mpi(min_size=2)
def test_other_adapters_are_refused_by_name(comm):
    with Mesh(comm, tensor=tensor_size(comm)) as mesh:
        with pytest.raises(ValueError, match="'layers.0.q' is wrapped by .*Dora"):
            mpishard.torch.as_distributed(adapted(use_dora=True), mesh, RULE, plan=PLAN)
        config = peft.IA3Config(target_modules=["q", "v"], feedforward_modules=[])
        module = fresh(kind=lambda: peft.get_peft_model(Transformer(), config))
        with pytest.raises(ValueError, match="'layers.0.q' is wrapped by .*ia3"):
            mpishard.torch.as_distributed(module, mesh, RULE, plan=PLAN)
