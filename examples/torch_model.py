"""mpirun -n 4 python examples/torch_model.py [--seed 0]

A PyTorch module trained by ZeRO-2 over MPI ranks: its parameters, and the gradients that autograd adds to, are views
into flat arrays of mpishard. Beside it its original, PyTorch alone on one rank. Needs torch, and scikit-learn for data.
"""

import argparse
import copy
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import mpishard
from mpishard.data.sampling import Sampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--seed", type=int, default=0)
seed = parser.parse_args().seed
torch.manual_seed(seed)  # all ranks draw the same bits
module = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Tanh(), torch.nn.Linear(48, 10))
original = copy.deepcopy(module)
images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
images = images.float() / 16

with mpishard.Mesh() as mesh:
    torch.set_num_threads(mesh.blas_threads)
    parameters = mpishard.FlatParameters.of({name: p.detach() for name, p in module.named_parameters()})
    for name, p in module.named_parameters():
        p.data = torch.from_numpy(parameters[name])
        # What autograd is done with is reduced during the rest of the backward pass.
        p.register_post_accumulate_grad_hook(lambda _, name=name: parameters.mark_ready(name))

    def loss_and_gradient(parameters: mpishard.FlatParameters, samples: np.ndarray, gradients: object) -> float:
        for name, p in module.named_parameters():
            view, accumulate = parameters.gradient(name)  # under ZeRO-2 other memory in every pass
            p.grad = torch.from_numpy(view) if accumulate else torch.from_numpy(view).zero_()
        loss = cross_entropy(module(images[samples]), labels[samples], reduction="sum")
        loss.backward()
        return loss.item()

    optimizer = mpishard.ZeRO2Optimizer(mpishard.AdamW(lr=1e-3), mesh)
    problem = mpishard.OptimizationProblem(loss_and_gradient, parameters, len(images), 128, steps=200, seed=seed)
    history, worst, alone = optimizer.optimize(problem).loss_history, 0.0, []
    if mesh.rank == 0:
        adamw = torch.optim.AdamW(original.parameters(), lr=1e-3)
        for step in range(1, 201):
            samples = Sampler(len(images), 128, seed).batch(step)
            loss = cross_entropy(original(images[samples]), labels[samples])
            adamw.zero_grad()
            loss.backward()
            adamw.step()
            alone.append(loss.item())
        worst = np.max(np.abs(history / alone - 1))
        print(f"loss {history[0]:.3f} -> {history[-1]:.3f} on {mesh.size} ranks; PyTorch alone: {alone[-1]:.3f}")
        print(f"{'PASS' if worst < 1e-6 else 'FAIL'}: losses differ by at most {worst:.1e}; wanted: below 1e-6")
sys.exit(0 if worst < 1e-6 else 1)
