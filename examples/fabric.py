"""mpirun -n 3 python examples/fabric.py [--zero 1] [--seed 0]

A loop of Lightning Fabric over MPI ranks: `MPIStrategy` is a strategy for it, by its public interface, and the loop is
the same with and without.  It trains a classifier of handwritten digits; next to it Fabric on one rank, with the whole
batch.  Needs torch, lightning, and scikit-learn for data.
"""

import argparse
import sys
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import Strategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpishard.torch

BATCH, EPOCHS = 96, 3


class MPIStrategy(Strategy):
    """Data parallelism and ZeRO of mpishard: `Fabric.setup` of one module and one optimizer makes it distributed."""

    def __init__(self, mesh: mpishard.Mesh, zero: int = 0) -> None:
        super().__init__()
        self.mesh, self.zero = mesh, zero
        self.global_rank, self.world_size = mesh.rank, mesh.size
        self.distributed_sampler_kwargs = {"num_replicas": mesh.data.size, "rank": mesh.data.rank}

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return self.mesh.rank == 0

    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    def setup_module_and_optimizers(self, module: Any, optimizers: Any, scheduler: Any = None) -> Any:
        (optimizer,) = optimizers
        return module, [mpishard.torch.as_distributed(module, self.mesh, optimizer, zero=self.zero)], scheduler

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Any:
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return torch.stack([torch.as_tensor(each) for each in self.mesh.world.allgather_object(tensor.tolist())])

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        total = self.all_gather(torch.as_tensor(tensor)).sum(0)
        return total / self.mesh.size if reduce_op == "mean" else total

    def barrier(self, name: str | None = None) -> None:
        self.mesh.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.mesh.world.allgather_object(obj)[src]


def trained(fabric: Fabric, given: DataLoader, seed: int) -> np.ndarray:
    """The loop.  Returns the loss of each step, its mean over ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 10))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    loader: Any = fabric.setup_dataloaders(given)  # which gives each rank its part
    history = []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            history.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    return np.array(history)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--zero", type=int, default=1, choices=(0, 1, 2), help="what ranks divide (default 1)")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
images, labels = (torch.from_numpy(array[: 18 * BATCH]) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
here = LightningEnvironment()  # mpirun has started the processes, so Fabric starts none

with mpishard.Mesh() as mesh:
    if BATCH % mesh.size:
        sys.exit(f"{mesh.size} ranks do not divide a batch of {BATCH}: take 1, 2, 3, 4, 6 or 8")
    fabric = Fabric(accelerator="cpu", strategy=MPIStrategy(mesh, options.zero), plugins=[here])
    fabric.launch()
    history = trained(fabric, DataLoader(data, BATCH // mesh.size, shuffle=True), options.seed)
    passed = False
    if mesh.rank == 0:
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, 1, 0))  # the samples of all ranks
        expected = trained(Fabric(accelerator="cpu", devices=1, plugins=[here]), loader, options.seed)
        worst = float(np.max(np.abs(history / expected - 1)))
        passed = worst < 1e-5 and history[-1] < history[0] / 2
        print(f"{len(history)} steps, zero={options.zero}, {mesh.size} ranks", end=": ")
        print(f"loss {history[0]:.4f} -> {history[-1]:.4f}; Fabric alone {expected[-1]:.4f}")
        print(f"{'PASS' if passed else 'FAIL'}: losses differ by at most {worst:.1e} of them; wanted: below 1e-5")
    passed = mesh.world.allgather_object(passed)[0]
sys.exit(0 if passed else 1)
