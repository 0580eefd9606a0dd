"""What compression costs: the loss that a small GPT reaches, with each setting that sends less than plain DDP.

    python benchmarks/quality.py [--kinds ddp int8 ...] [--seeds 0 1 2] [--steps N] [--compress-after N] [--nodes N]

The byte-level GPT of examples/train_gpt.py with its settings (width 128, 2 layers, context 64, 64 windows a step, AdamW
with a warm-up and a cosine, gradients clipped to a norm of 1), 300 steps on 4 ranks of one machine.  Each seed makes
other initial values and another order of the samples, the same for all kinds, which take turns.  Printed are nats per
byte, held out and in the last 10 steps of training, as means over the seeds; by how much the held-out loss is above
that of DDP with the same seed; and the bytes a step that a rank sends by the ledger, as a mean over the ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import children
from slow_link import KINDS, blas, optimizer_of

RANKS = 4
STEPS = 300
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 256, 64, 128, 2, 4
BATCH = 64
LEARNING_RATE, WARM_UP, BETAS, CLIP = 3e-3, 20, (0.9, 0.95), 1.0
HELD_OUT = 256  # windows
COMPRESSED = ("float16", "bfloat16", "int8", "sign", "top-k", "power-sgd", "power-sgd-16")
TIME_LIMIT = 600


def train(kind: str, seed: int, steps: int, settings: dict[str, Any]) -> None:
    """One rank; the first one prints the result as a line of JSON."""
    import mpishard
    from mpishard.data.text import standard_library_text, windows

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from train_gpt import held_out_loss

    with mpishard.Mesh() as mesh:
        text, held_out = windows(standard_library_text(), CONTEXT).split(0.05)
        model = mpishard.nn.GPT(
            vocabulary_size=VOCABULARY,
            context_length=CONTEXT,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            seed=seed,
            mesh=mesh,
        )
        rate = mpishard.cosine(LEARNING_RATE, steps=steps, warmup=min(WARM_UP, steps // 5), floor=LEARNING_RATE / 20)
        optimizer = optimizer_of(kind, mpishard.AdamW(lr=rate, betas=BETAS), mesh, max_gradient_norm=CLIP, **settings)
        problem = mpishard.OptimizationProblem.for_model(
            model,
            text.batch,
            samples=len(text),
            batch_size=BATCH,
            steps=steps,
            tokens_per_sample=CONTEXT,
            seed=seed,
        )
        result = optimizer.optimize(problem, progress=False)
        sent = statistics.fmean(mesh.world.allgather_object(mesh.ledger.sent()))
        measured = {
            "held_out": held_out_loss(mesh, model, held_out, HELD_OUT),
            "training": float(result.loss_history[-10:].mean()),
            "bytes": sent / steps,
            "seconds": result.seconds,
            "blas": blas(),
        }
        if mesh.rank == 0:
            print(json.dumps(measured), flush=True)


def launch(kind: str, seed: int, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    own = [sys.executable, __file__, "--child", kind, str(seed), str(steps), json.dumps(settings)]
    return children.run_on_ranks(kind, own, RANKS, TIME_LIMIT)


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    def mean(kind: str, name: str) -> float:
        return statistics.fmean(run[name] for run in found[kind])

    print(f"{'':36}{'held out':>10}{'training':>10}{'above DDP (range)':>28}{'kB/step':>10}{'of DDP':>9}")
    for kind, runs in found.items():
        above_ddp = share = "-"
        if "ddp" in found:
            above = [100 * (a["held_out"] / b["held_out"] - 1) for a, b in zip(runs, found["ddp"], strict=True)]
            above_ddp = f"{statistics.fmean(above):+.2f} % ({min(above):+.2f} to {max(above):+.2f})"
            share = f"{100 * mean(kind, 'bytes') / mean('ddp', 'bytes'):.2f} %"
        print(
            f"{KINDS[kind]:36}{mean(kind, 'held_out'):10.4f}{mean(kind, 'training'):10.4f}{above_ddp:>28}"
            f"{mean(kind, 'bytes') / 1e3:10,.1f}{share:>9}"
        )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, seed, count, settings = sys.argv[2:]
        train(kind, int(seed), int(count), json.loads(settings))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = f"of {', '.join(KINDS)} (default all)"
    parser.add_argument("--kinds", nargs="+", choices=KINDS, metavar="KIND", help=listed)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--compress-after", type=int, default=0, help="compress_after of those that compress gradients")
    parser.add_argument("--nodes", type=int, default=0, help="ranks that count as a node: `hierarchical` of all")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error("--steps must be at least 10")
    kinds = list(dict.fromkeys(options.kinds or KINDS))
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for seed in options.seeds:
        for kind in kinds:
            settings = {"hierarchical": options.nodes} if options.nodes else {}
            if options.compress_after and kind in COMPRESSED:
                settings["compress_after"] = options.compress_after
            run = launch(kind, seed, options.steps, settings)
            found[kind].append(run)
            print(
                f"seed {seed}, {kind}: held out {run['held_out']:.4f}, training {run['training']:.4f}, "
                f"{run['seconds']:.0f} s; {run['blas']}",
                flush=True,
            )
    print(f"{options.steps} steps on {RANKS} ranks, nats per byte, {len(options.seeds)} seed(s):")
    table(found)


if __name__ == "__main__":
    main()
