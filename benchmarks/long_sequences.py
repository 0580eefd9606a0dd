"""The context that fits on 1, 2 and 4 ranks at the same memory a rank, of models whose sequences these divide.

    python benchmarks/long_sequences.py [--models gpt llama transformers] [--ranks 2 4] [--context 1024]
        [--steps 2]

gpt and llama: our own on tensor ranks with ``sequence_parallel=True``; transformers: its Llama under
``plan="sequence"``.  4 layers of width 512 with 8 heads, a vocabulary of 1024, float32, AdamW, one sequence a step;
ranks of one thread each.

The budget is the largest resident memory of one rank with --context tokens, the interpreter and the model included.
Memory grows evenly with the context: from two of them follows the one that fits, which is run and printed with its own
largest resident memory of any rank, and the seconds of a step.  The tokens must weigh more than what a run's memory
varies by, some MiB: with a --context below about 512 the printed memory is not the budget.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import children

TIME_LIMIT = 1800
SIZES = {"layers": 4, "width": 512, "heads": 8, "vocabulary": 1024}
ROUNDED_TO = 64  # tokens


def own_model(mesh: Any, words: Any, steps: int, llama: bool) -> list[float]:
    """When steps of our GPT or Llama began and ended."""
    import mpishard

    nn = mpishard.nn
    sizes: dict[str, Any] = dict(vocabulary_size=SIZES["vocabulary"], context_length=words.shape[1] - 1)
    sizes |= dict(width=SIZES["width"], layers=SIZES["layers"], heads=SIZES["heads"])
    model = (nn.Llama if llama else nn.GPT)(**sizes, mesh=mesh, sequence_parallel=True)
    optimizer = mpishard.DDPOptimizer(mpishard.AdamW(lr=1e-3), mesh)
    problem = mpishard.OptimizationProblem.for_model(
        model, lambda samples: (words[samples, :-1], words[samples, 1:]), samples=1, batch_size=1, steps=steps
    )
    ends = [time.perf_counter()]
    optimizer.optimize(problem, progress=False, callback=lambda _: ends.append(time.perf_counter()))
    return ends


def of_transformers(mesh: Any, words: Any, steps: int) -> list[float]:
    """The same of the Llama of transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import mpishard

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZES["vocabulary"],
        hidden_size=SIZES["width"],
        intermediate_size=4 * SIZES["width"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        max_position_embeddings=words.shape[1],
    )
    model = LlamaForCausalLM(config)
    optimizer = mpishard.torch.as_distributed(model, mesh, mpishard.AdamW(lr=1e-3), plan="sequence", check_plan=False)
    tokens = torch.from_numpy(words[:, :-1])
    ends = [time.perf_counter()]
    for _ in range(steps):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def child(name: str, context: int, steps: int) -> None:
    """What one rank does; rank 0 prints the seconds of its last step and the largest resident memory of any rank."""
    import numpy as np

    import mpishard

    with mpishard.Mesh(tensor=-1, data=1) as mesh:
        words = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (1, context + 1))
        if name == "transformers":
            ends = of_transformers(mesh, words, steps)
        else:
            ends = own_model(mesh, words, steps, name == "llama")
        resident = children.peak_bytes() / 2**20
        most = mesh.world.all_reduce(np.array([resident]), op="max")
        if mesh.rank == 0:
            print(json.dumps({"mib": float(most[0]), "seconds": ends[-1] - ends[-2]}))


def measured(name: str, ranks: int, context: int, steps: int) -> tuple[float, float]:
    """MiB and seconds of a step."""
    own = [sys.executable, __file__, f"--as-child={json.dumps([name, context, steps])}"]
    found = children.run_on_ranks(f"{name} of {context} tokens on {ranks} ranks", own, ranks, TIME_LIMIT)
    return found["mib"], found["seconds"]


def fitting(budget: float, mib: dict[int, float], least: int) -> int:
    """The tokens whose memory is the budget, by that of two numbers of tokens; `least` tokens fit in any case.

    At most four times the larger number: the memory of few tokens is lost in the noise.
    """
    fewer, more = sorted(mib)
    grown = max(mib[more] - mib[fewer], 1e-9)
    fits = more + (budget - mib[more]) * (more - fewer) / grown
    return int(max(min(fits, 4 * more), least, ROUNDED_TO)) // ROUNDED_TO * ROUNDED_TO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "llama", "transformers"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="the last one is timed")
    parser.add_argument("--as-child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_child:
        child(*given.as_child)
        return
    for name in given.models:
        budget, seconds = measured(name, 1, given.context, given.steps)
        print(f"{name}: {given.context} tokens on 1 rank: {budget:.0f} MiB a rank, {seconds:.1f} s a step", flush=True)
        for ranks in given.ranks:
            more, fewer = given.context * ranks, given.context * ranks // 2
            most, least = (measured(name, ranks, each, given.steps)[0] for each in (more, fewer))
            context = fitting(budget, {fewer: least, more: most}, given.context)
            mib, seconds = measured(name, ranks, context, given.steps)
            times = context / given.context
            print(
                f"{name}: {context} tokens on {ranks} ranks, {times:.2f} times as many: {mib:.0f} MiB a rank, "
                f"{seconds:.1f} s a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
