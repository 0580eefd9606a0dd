"""python benchmarks/adamw.py

AdamW on one core, against PyTorch's fused AdamW on the same core and the same kind of memory, step by step in turn.
The ratio is PyTorch's time over mpishard's: above 1, mpishard is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from mpishard.optim.rules import AdamW


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(torch: object, size: int, repeats: int) -> tuple[float, float, float]:
    """Median seconds of a step: (mpishard, PyTorch), and the median of their paired ratios."""
    rng = np.random.default_rng(0)
    initial, gradient = (rng.standard_normal(size, dtype=np.float32) for _ in range(2))

    rule, parameters = AdamW(lr=1e-3), initial.copy()
    slots = [np.zeros(size, np.float32) for _ in rule.slots]
    steps = iter(range(1, 1_000_000))

    # PyTorch works on memory that NumPy allocated, as mpishard does: the kind of pages decides much of the speed.
    peer = torch.nn.Parameter(torch.from_numpy(initial))  # type: ignore[attr-defined]
    peer.grad = torch.from_numpy(gradient)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW([peer], lr=1e-3, fused=True)  # type: ignore[attr-defined]
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        own = np.zeros(size, np.float32)
        own[:] = optimizer.state[peer][name].numpy()
        optimizer.state[peer][name] = torch.from_numpy(own)  # type: ignore[attr-defined]

    def ours() -> None:
        rule.update(parameters, gradient, slots, next(steps))

    ours()
    pairs = [(seconds(ours), seconds(optimizer.step)) for _ in range(repeats)]
    difference = np.abs(parameters - peer.detach().numpy()).max()
    assert difference < 1e-5, f"the two ended {difference} apart"
    own_times, peer_times = zip(*pairs, strict=True)
    ratio = statistics.median(theirs / own for own, theirs in pairs)
    return statistics.median(own_times), statistics.median(peer_times), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4_000_000, 40_000_000], help="numbers of parameters")
    parser.add_argument("--repeats", type=int, default=21, help="steps of each, in turn")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("this compares with PyTorch, which is not installed: pip install torch")
    torch.set_num_threads(1)
    where = "one core"
    if hasattr(os, "sched_setaffinity"):
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        where = f"core {core} alone"
    print(f"AdamW, float32, {where}, {arguments.repeats} steps of each in turn, medians; PyTorch {torch.__version__}")
    print(f"{'values':>12} {'mpishard ms':>12} {'PyTorch ms':>12} {'ratio':>7}")
    for size in arguments.sizes:
        ours, theirs, ratio = compare(torch, size, arguments.repeats)
        print(f"{size:12,d} {ours * 1e3:12.2f} {theirs * 1e3:12.2f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
