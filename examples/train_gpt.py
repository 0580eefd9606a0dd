"""mpirun -n 8 python examples/train_gpt.py [--tensor 2] [--pipeline 2] [--optimizer zero3] [--resume]

Train a byte-level GPT on the source of Python's standard library, from a loss of ln 256 = 5.5 nats per byte down to
where it has learned what Python looks like. Writes a plot of the loss, a sample of its writing and checkpoints, from
which --resume continues, with the same or another number of ranks and in the same or another layout.  On SIGUSR1 or
SIGTERM it saves one more, and leaves with exit code 75.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import mpishard
from mpishard import nn
from mpishard.data.text import Windows, standard_library_text, windows
from mpishard.pipeline.schedule import SCHEDULES

OPTIMIZERS = {
    "ddp": mpishard.DDPOptimizer,
    "zero1": mpishard.ZeRO1Optimizer,
    "zero2": mpishard.ZeRO2Optimizer,
    "zero3": mpishard.ZeRO3Optimizer,
}
# Windows of held-out text at a time.
CHUNK = 32
# Steps after which it has learned more than how frequent bytes are.
ENOUGH = 50


def unigram_loss(train: Windows, held_out: Windows) -> float:
    """Nats per byte of `held_out` for a model that knows only how frequent each byte is in `train`."""
    frequencies = (np.bincount(train.targets.ravel(), minlength=256) + 1) / (train.targets.size + 256)
    return -float(np.mean(np.log(frequencies)[held_out.targets]))


def held_out_loss(mesh: mpishard.Mesh, model: nn.GPT, held_out: Windows, count: int) -> float:
    """Nats per byte over `count` windows spread over `held_out`, each data rank taking its share. Collective."""
    samples = np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int)
    total = np.zeros(2)
    for start in range(0, len(samples), CHUNK * mesh.data.size):
        share = samples[start : start + CHUNK * mesh.data.size][mesh.data.rank :: mesh.data.size]
        inputs, targets = held_out.batch(share)
        total += model.loss(inputs, targets), targets.size
    mesh.data.all_reduce(total)
    return float(total[0] / total[1])


def checkpoint_is_readable(checkpoint: Path, model: nn.GPT, flat: np.ndarray) -> bool:
    """Whether plain h5py finds the model's tensors in a checkpoint, whole and by name, whichever ranks wrote them."""
    sizes = [spec.size for spec in model.parameters.specs]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    with h5py.File(checkpoint / "index.h5") as file:
        return all(
            np.array_equal(file[f"parameters/{spec.name}"], part.reshape(spec.shape))
            for spec, part in zip(model.parameters.specs, parts, strict=True)
        )


def plot(path: Path, losses: np.ndarray, held_out: float, unigram: float) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(np.arange(1, len(losses) + 1), losses, lw=1, label="training")
    axis.axhline(unigram, color="0.6", ls=":", label=f"byte frequencies alone: {unigram:.2f}")
    axis.plot(len(losses), held_out, "o", color="C3", label=f"held out: {held_out:.2f}")
    axis.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def steps_or_share(text: str) -> float:
    every = int(text) if text.isdecimal() else float(text)
    if not (every >= 1 if isinstance(every, int) else 0 < every < 1):
        raise argparse.ArgumentTypeError("must be a whole number of at least 1, or a share between 0 and 1")
    return every


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, default: object, text: str) -> None:
        parser.add_argument(name, type=type(default), default=default, help=f"{text} (default {default})")

    option("--steps", 600, "optimizer steps")
    option("--batch", 64, "windows of text a step, over all ranks")
    option("--context", 64, "bytes in a window")
    option("--layers", 2, "transformer blocks")
    option("--width", 128, "channels")
    option("--heads", 4, "attention heads")
    option("--lr", 3e-3, "peak learning rate; warms up, then falls along a cosine")
    option("--tensor", 1, "ranks over which each layer is split")
    option("--pipeline", 1, "ranks over which the layers are divided; the other ranks are data-parallel")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (default 1f1b)")
    option("--chunks", 1, "runs of layers a pipeline rank; the interleaved schedule needs 2 or more")
    parser.add_argument(
        "--microbatches", type=int, help="parts of a data rank's batch in a pipeline (default 4 a stage)"
    )
    parser.add_argument(
        "--workers", type=int, help="train elastically, with at most this many replicas; ranks beyond those are spares"
    )
    option("--seed", 0, "of initial values, sample order and generated text")
    option("--sample", 400, "bytes of text to generate at the end")
    option("--output", Path("train-gpt-output"), "folder for plot, sample and checkpoints")
    parser.add_argument(
        "--checkpoint-every",
        type=steps_or_share,
        default=100,
        help="steps from one checkpoint to the next, or the share of the time that saving may take, as 0.02; there is "
        "one at the end too (default 100)",
    )
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --output")
    parser.add_argument("--sequence-parallel", action="store_true", help="split norms and residuals over --tensor too")
    parser.add_argument("--tied", action="store_true", help="one table for input and output embedding")
    parser.add_argument("--recompute", action="store_true", help="compute blocks twice instead of keeping activations")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="zero1", help="how state is sharded (default zero1)")
    parser.add_argument(
        "--trace", type=int, nargs=2, metavar=("FIRST", "LAST"), help="steps of which to note all, for mpishard trace"
    )
    options = parser.parse_args()
    for name, least in (("steps", 1), ("sample", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    return options


def main() -> int:
    options = arguments()
    with mpishard.Signals() as asked_to_leave, mpishard.Mesh(tensor=options.tensor, pipeline=options.pipeline) as mesh:
        train, held_out = windows(standard_library_text(), options.context).split(0.05)
        model = nn.GPT(
            vocabulary_size=256,
            context_length=options.context,
            width=options.width,
            layers=options.layers,
            heads=options.heads,
            seed=options.seed,
            mesh=mesh,
            tied=options.tied,
            sequence_parallel=options.sequence_parallel,
            schedule=options.schedule,
            chunks=options.chunks,
            microbatches=options.microbatches,
            recompute=options.recompute,
            sharded_parameters=options.optimizer == "zero3",
        )
        first = mesh.rank == 0
        if first:
            options.output.mkdir(parents=True, exist_ok=True)  # before the work, in case it cannot be
            size = sum(spec.size for spec in model.parameters.specs)
            shape = " x ".join(f"{axis}={count}" for axis, count in mesh.shape.items())
            print(
                f"{size:,} parameters, {train.targets.size:,} bytes of text, "
                f"ranks: {mesh.size} ({shape}), BLAS threads of each: {mesh.blas_threads}",
                flush=True,
            )

        warmup = min(20, options.steps // 5)
        rule = mpishard.AdamW(
            lr=mpishard.cosine(options.lr, steps=options.steps, warmup=warmup, floor=options.lr / 20),
            betas=(0.9, 0.95),
        )
        elastic = options.workers is not None
        config = mpishard.ShardingConfiguration.create_for_high_bandwidth(
            mesh, max_gradient_norm=1.0, reproducible=elastic
        )
        optimizer: Any = OPTIMIZERS[options.optimizer](rule, config)
        if elastic:
            optimizer = mpishard.ElasticOptimizer(optimizer, max_workers=options.workers)
        problem = mpishard.OptimizationProblem.for_model(
            model,
            train.batch,
            samples=len(train),
            batch_size=options.batch,
            steps=options.steps,
            tokens_per_sample=options.context,
            seed=options.seed,
        )
        folder = options.output / "checkpoints"
        record = mpishard.RunRecord(options.output, mesh, trace=options.trace)
        with mpishard.Checkpoints(
            folder, mesh, every=options.checkpoint_every, asynchronous=True, virtual=True
        ) as checkpoints:
            result = optimizer.optimize(
                problem, callback=asked_to_leave, checkpoints=checkpoints, resume=options.resume, record=record
            )
        first = mesh.rank == 0  # not who it was, if that one has died
        if result.stop_reason in ("callback", "signal"):
            if first:
                print(f"left after step {result.steps}, as asked; --resume continues from there", flush=True)
            return os.EX_TEMPFAIL

        loss = held_out_loss(mesh, model, held_out, count=256)
        parameters = mpishard.as_distributed(model, mesh).gather_full_parameters()
        tokens = None
        if mesh.data.rank == 0 or options.optimizer == "zero3":  # all ranks that hold parts of one model take part
            tokens = model.generate(list(b"def "), options.sample, temperature=0.7, seed=options.seed)
        unigram = unigram_loss(train, held_out)
        finite = bool(np.isfinite(result.loss_history).all()) and math.isfinite(loss)
        readable = True
        if first:
            plot(options.output / "loss.png", result.loss_history, loss, unigram)
            assert tokens is not None
            text = bytes(tokens.astype(np.uint8)).decode("utf-8", "replace")
            (options.output / "sample.txt").write_text(text, "utf-8")
            readable = checkpoint_is_readable(folder / "latest", model, parameters)
            print(f"a sample of what it writes now:\n{'-' * 60}\n{text}\n{'-' * 60}")
            steps = result.steps - result.resumed_steps
            earlier = f", after {result.resumed_steps} before the checkpoint" if result.resumed_steps else ""
            speed = steps * options.batch * options.context / result.seconds
            print(f"{steps} steps in {result.seconds:.0f} s{earlier}; {speed:,.0f} bytes of text a second")
            print(f"loss: {result.loss_history[0]:.2f} -> {result.loss_history[-10:].mean():.2f} nats per byte")
            print(f"written to {options.output}: loss.png, sample.txt, checkpoints/latest, and the record of the run:")
            print(f"mpishard plot {options.output} draws speed, workers, time by phase and bytes by axis")
        # Too few steps to learn more than that some bytes are frequent show that all parts work together.
        limit, what = (unigram, "byte frequencies") if options.steps >= ENOUGH else (math.log(256), "equal bytes")
        passed = finite and readable and loss < limit
        if first:
            verdict = "PASS" if passed else "FAIL"
            print(
                f"{verdict}: {loss:.2f} nats per byte on held-out text, below the {limit:.2f} of {what}: "
                f"{loss < limit}; finite: {finite}; checkpoint readable: {readable}"
            )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
