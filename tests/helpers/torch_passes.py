"""Random loops of backward passes, drops, changes and steps, on ranks and beside what DistributedDataParallel defines.

`draw` makes a loop, `largest_difference` takes it: on the ranks of a mesh, and in each process by the gradients that
all ranks would have under DistributedDataParallel, of which a pass outside of ``no_sync`` makes the mean.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import torch

import mpishard

RATE, MOMENTUM = 0.05, 0.9
HEADS = ("first", "second", "third")
# Ways to drop all gradients, and to change those of some parameters.
DROPS = ("optimizer", "optimizer, to zero", "module", "module, to zero")
CHANGES = ("drop", "multiply", "assign")


class Heads(torch.nn.Module):
    """Layers that a pass uses or not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(4, 4)
        for head in HEADS:
            setattr(self, head, torch.nn.Linear(4, 3))

    def forward(self, x: Any, used: tuple[str, ...]) -> Any:
        if "trunk" in used:
            x = torch.tanh(self.trunk(x))
        return sum(getattr(self, head)(x).square().mean() for head in used if head != "trunk")


class Pass(NamedTuple):
    """A backward pass of all ranks; a context of ``no_sync`` may have the next one, too."""

    used: list[tuple[str, ...]]  # by rank
    syncs: bool
    stays_open: bool


class Drop(NamedTuple):
    """Drops all gradients."""

    how: str
    ranks: list[int]


class Change(NamedTuple):
    """Changes the gradients of some parameters."""

    how: str
    names: list[str]
    ranks: list[int]


class Step(NamedTuple):
    """A step, along clipped gradients or not."""

    clips: bool
    count: float | None


def make() -> Heads:
    torch.manual_seed(11)
    return Heads().double()


def draw(seed: int, zero: int, ranks: int) -> list[Any]:
    """A loop of two to four windows, each of some passes and, unless it is skipped, a step."""
    random = np.random.default_rng([seed, zero, ranks])
    names, everyone = [name for name, _ in make().named_parameters()], [*range(ranks)]
    stays = zero < 2  # gradients stay with the loop, which may change them

    def some(of: list[Any]) -> list[Any]:
        return [each for each in of if random.random() < 0.5] or [of[random.integers(len(of))]]

    def used() -> tuple[str, ...]:
        return (*["trunk"] * int(random.integers(2)), *some([*HEADS]))

    def drop(summed: bool) -> Drop:
        alone = stays and not summed and random.random() < 0.5
        return Drop(DROPS[random.integers(len(DROPS))], some(everyone) if alone else everyone)

    loop: list[Any] = []
    summed = False
    for _ in range(random.integers(2, 5)):
        passes = int(random.integers(1, 4))
        for number in range(passes):
            last = number == passes - 1
            # Once sums are in ``p.grad``, ``no_sync`` refuses to add to them.
            summed = summed or (bool(random.random() < (0.8 if last else 0.4)) and (stays or last))
            by_rank = [used()] * ranks if zero == 3 else [used() for _ in everyone]
            # Under zero=2 ranks must use the same layers in passes within one ``no_sync``.
            loop.append(Pass(by_rank, summed, not (summed or last or zero == 2) and random.random() < 0.3))
            kind = random.random()
            if not last and kind < 0.25:
                loop.append(drop(summed))
                summed = stays and summed and loop[-1].how == "module, to zero"
            elif stays and kind < (0.25 if last and not summed else 0.6):
                how = CHANGES[1 + random.integers(2) if last else random.integers(3)]
                loop.append(Change(how, some(names), everyone if summed else some(everyone)))
        if random.random() < 0.7:
            loop.append(Step(random.random() < 0.3, None if random.random() < 0.7 else 5.0))
            summed = False
        elif summed or random.random() < 0.7:
            loop.append(Drop(DROPS[random.integers(len(DROPS))], everyone))
            summed = stays and summed and loop[-1].how == "module, to zero"
    return [*loop, Pass([used()] * ranks, True, False), Step(False, None)]


class Alone:
    """The gradients of all ranks under DistributedDataParallel, and their steps."""

    def __init__(self, ranks: int) -> None:
        self.module = make()
        self.parameters = dict(self.module.named_parameters())
        self.gradients: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self._velocity = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def take(self, each: Any, x: Any) -> None:
        if isinstance(each, Pass):
            for own, used, samples in zip(self.gradients, each.used, x, strict=True):
                loss, trained = self.module(samples, used), list(self.parameters.values())
                found = torch.autograd.grad(loss, trained, allow_unused=True)
                for name, gradient in zip(self.parameters, found, strict=True):
                    if gradient is not None:
                        own[name] = own[name] + gradient if name in own else gradient
            if each.syncs:
                self._synchronize()
        elif isinstance(each, Drop):
            for rank in each.ranks:
                self.gradients[rank].clear()
        elif isinstance(each, Change):
            for own in (self.gradients[rank] for rank in each.ranks):
                for name in own.keys() & set(each.names):
                    own[name] = torch.zeros_like(own[name]) if each.how == "drop" else 2 * own[name]
        else:
            self._step(each)

    def _synchronize(self) -> None:
        ranks = len(self.gradients)
        for name, p in self.parameters.items():
            mean = sum((own[name] for own in self.gradients if name in own), torch.zeros_like(p)) / ranks
            for own in self.gradients:
                own[name] = mean

    def _step(self, step: Step) -> None:
        self._synchronize()
        means, ranks = self.gradients[0], len(self.gradients)
        norm = torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in means.values()]))
        factor = min(1.0, CLIP / (norm.item() + 1e-6)) if step.clips else 1.0
        factor *= 1.0 if step.count is None else ranks / step.count
        with torch.no_grad():
            for name, p in self.parameters.items():
                self._velocity[name].mul_(MOMENTUM).add_(means[name], alpha=factor)
                p.sub_(RATE * self._velocity[name])
        for own in self.gradients:
            own.clear()


CLIP = 0.1


def _change(change: Change, parameters: dict[str, Any]) -> None:
    for p in (parameters[name] for name in change.names):
        if change.how == "drop":
            p.grad = None
        elif p.grad is not None and change.how == "multiply":
            p.grad.mul_(2)
        elif p.grad is not None:
            p.grad = 2 * p.grad


def largest_difference(mesh: mpishard.Mesh, seed: int, zero: int) -> float:
    """That of all parameters after each step of a loop.  Collective over the mesh."""
    alone, module = Alone(mesh.size), make()
    config = mpishard.ShardingConfiguration(mesh, minimum_parameter_group_size=16)
    units = {"shard_units": torch.nn.Linear} if zero == 3 else {}
    rule = mpishard.SGD(lr=RATE, momentum=MOMENTUM)
    optimizer = mpishard.torch.as_distributed(module, config, rule, zero=zero, **units)
    parameters, largest = dict(module.named_parameters()), 0.0
    with contextlib.ExitStack() as within:
        for number, each in enumerate(draw(seed, zero, mesh.size)):
            random = torch.Generator().manual_seed(1000 * seed + number)
            x = torch.randn(mesh.size, 2, 4, generator=random, dtype=torch.float64)
            alone.take(each, x)
            if isinstance(each, Pass):
                if not each.syncs:
                    within.enter_context(optimizer.no_sync())
                module(x[mesh.rank], each.used[mesh.rank]).backward()
                if not each.stays_open:
                    within.pop_all().close()
            elif isinstance(each, Drop) and mesh.rank in each.ranks:
                owner: Any = optimizer if each.how.startswith("optimizer") else module
                owner.zero_grad(set_to_none=not each.how.endswith("to zero"))
            elif isinstance(each, Change) and mesh.rank in each.ranks:
                _change(each, parameters)
            elif isinstance(each, Step):
                if each.clips:
                    optimizer.clip_grad_norm_(CLIP)
                optimizer.step(count=each.count)
                wanted = torch.cat([p.detach().reshape(-1) for p in alone.parameters.values()])
                difference = float(np.abs(optimizer.parameters.gather() - wanted.numpy()).max())
                largest = max(largest, difference)
    optimizer.close()
    return largest
