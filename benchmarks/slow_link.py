"""Time until a small GPT reaches a loss, on two hosts with a slow link, with each setting that sends less.

    python benchmarks/slow_link.py [--kinds ddp low-bandwidth torch-ddp ...] [--repeats N] [--target LOSS]

Two hosts made of network namespaces, two ranks of one thread on each.  What a host sends to the other leaves it at 100
Mbit/s and arrives 5 ms later; on one host ranks are as near as ever.  What the link really does is measured first: the
round trip of 64 bytes by UDP, and a transfer of 12.5 MB by TCP each way.

It trains a byte-level GPT as in examples/train_gpt.py (width 256, 4 layers, 8 heads, context 64, 8 windows a step,
3.3 million float32 parameters, AdamW, gradients clipped to a norm of 1), always on the same samples from the same
seed, until the mean training loss over all samples of the last 20 steps is at most the target.  A step has 13 MB of
gradients, for which the link needs a second.  The clock starts at the end of the first step, in which connections are
made.  Plain DDP and most kinds have the settings that a user gets without asking for any.  PyTorch trains the same
architecture on the same samples, over gloo.  Kinds take turns; figures are medians, with the range over the repeats.
Bytes are those of rank 0 by the ledger, which counts as if all-reduces went around a ring, and those that its host
really sent over the link.  Needs root, as tests/helpers/namespaces.py does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import children

HOSTS, RANKS_A_HOST = 2, 2
RANKS = HOSTS * RANKS_A_HOST
RATE_MBIT, DELAY_MS = 100.0, 5.0
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 256, 64, 256, 4, 8
BATCH = 8  # windows a step, over all ranks
LEARNING_RATE, WARM_UP, BETAS = 3e-3, 20, (0.9, 0.95)
AVERAGED = 20  # steps
CLIP = 1.0
COMPILING = 10  # steps; more than from one exchange to the next of any kind
SYNC_EVERY = 8
TIME_LIMIT = 300
PORT = 29500
DEVICE = "eth0"

KINDS = {
    "ddp": "DDP",
    "low-bandwidth": "as_distributed_for_low_bandwidth",
    "float16": "DDP, float16",
    "bfloat16": "DDP, bfloat16",
    "int8": "DDP, int8",
    "sign": "DDP, signs",
    "top-k": "DDP, top 1 %",
    "power-sgd": "DDP, PowerSGD of rank 4",
    "power-sgd-16": "DDP, PowerSGD of rank 16",
    "local-sgd": f"LocalSGD, every {SYNC_EVERY} steps",
    "diloco": f"DiLoCo, every {SYNC_EVERY} steps",
}
TORCH_KINDS = {
    "torch-ddp": "PyTorch DDP (gloo)",
    "torch-float16": "PyTorch DDP, fp16_compress_hook",
    "torch-power-sgd": "PyTorch DDP, powerSGD_hook of rank 4",
}


def optimizer_of(kind: str, rule: Any, mesh: Any, **options: Any) -> Any:
    """The optimizer of a kind; `options` are of the ShardingConfiguration."""
    import mpishard
    from mpishard import compression

    if kind == "low-bandwidth":
        return mpishard.as_distributed_for_low_bandwidth(rule, mesh, **options)
    if kind in ("local-sgd", "diloco"):
        outer = mpishard.SGD(lr=0.7, momentum=0.9, nesterov=True) if kind == "diloco" else None
        config = mpishard.ShardingConfiguration(mesh, **options)
        return mpishard.LocalSGDOptimizer(rule, config, sync_every=SYNC_EVERY, outer=outer)
    compressors: dict[str, Any] = {
        "ddp": lambda: None,
        "float16": lambda: compression.Float16Compressor(),
        "bfloat16": lambda: compression.BFloat16Compressor(),
        "int8": lambda: compression.Int8Compressor(),
        "sign": lambda: compression.SignCompressor(),
        "top-k": lambda: compression.TopKCompressor(0.01),
        "power-sgd": lambda: compression.PowerSGDCompressor(rank=4),
        "power-sgd-16": lambda: compression.PowerSGDCompressor(rank=16),
    }
    config = mpishard.ShardingConfiguration(mesh, gradient_compressor=compressors[kind](), **options)
    return mpishard.DDPOptimizer(rule, config)


def blas() -> str:
    """Which BLAS kernels this process runs, on how many threads."""
    import threadpoolctl

    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    # SciPy, where it is there, brings an OpenBLAS of its own.
    found = {
        f"{pool['internal_api']} {pool.get('architecture', '')}, {pool['num_threads']} thread(s)" for pool in pools
    }
    return "; ".join(sorted(found))


def sent_over_link() -> int:
    """Bytes that this host has sent over the link so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == DEVICE:
            return int(figures.split()[8])
    return 0  # a run of one host


class Record:
    """What one rank notes of its run: after each step its loss, the time, and what was sent."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.losses: list[float] = []
        self.times: list[float] = []
        self.link: list[int] = []
        self.ledger: list[int] = []

    def note(self, loss: float, ledger: int = 0) -> None:
        self.losses.append(loss)
        self.times.append(time.perf_counter())
        self.link.append(sent_over_link())
        self.ledger.append(ledger)

    def is_reached(self, steps: int) -> bool:
        return steps >= AVERAGED and statistics.fmean(self.losses[steps - AVERAGED : steps]) <= self.target

    def result(self) -> dict[str, Any]:
        """Up to the step that reaches the target; without one, up to the last."""
        steps = next((n for n in range(1, len(self.losses) + 1) if self.is_reached(n)), len(self.losses))
        last, timed = steps - 1, max(1, steps - 1)
        return {
            "reached": self.is_reached(steps),
            "steps": steps,
            "loss": statistics.fmean(self.losses[max(0, steps - AVERAGED) : steps]),
            "seconds": self.times[last] - self.times[0],
            "ledger": (self.ledger[last] - self.ledger[0]) / timed,
            "link": (self.link[last] - self.link[0]) / timed,
        }


def train(kind: str, steps: int, target: float, group_size: int) -> None:
    """One rank of ours; the first one prints the result as a line of JSON."""
    import mpishard
    from mpishard.data.text import standard_library_text, windows

    with mpishard.Mesh() as mesh:
        text = windows(standard_library_text(), CONTEXT)
        model = mpishard.nn.GPT(
            vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS, mesh=mesh
        )
        rule = mpishard.AdamW(lr=mpishard.warmup(LEARNING_RATE, WARM_UP), betas=BETAS)
        problem = mpishard.OptimizationProblem.for_model(
            model, text.batch, samples=len(text), batch_size=BATCH, steps=steps, tokens_per_sample=CONTEXT
        )
        options: dict[str, Any] = {"max_gradient_norm": CLIP}
        if group_size:
            options["minimum_parameter_group_size"] = group_size
        optimizer = optimizer_of(kind, rule, mesh, **options)
        record = Record(target)
        mesh.world.barrier()
        # Between averages a rank hears of its own losses only: whether the target is reached is found afterwards.
        knows = not isinstance(optimizer, mpishard.LocalSGDOptimizer)

        def note(state: Any) -> bool:
            record.note(state.loss, mesh.ledger.sent())
            return knows and record.is_reached(len(record.losses))

        record.losses = optimizer.optimize(problem, callback=note, progress=False).loss_history.tolist()
        if mesh.rank == 0:
            print(json.dumps(record.result() | {"blas": blas()}), flush=True)


def write_batches(folder: str, steps: int) -> None:
    """The samples of each step, for a program without our sampler: a file of bytes, (steps, BATCH, CONTEXT + 1)."""
    import numpy as np

    from mpishard.data.sampling import Sampler
    from mpishard.data.text import standard_library_text, windows

    text = windows(standard_library_text(), CONTEXT)
    sampler = Sampler(len(text), BATCH)
    pairs = [text.batch(sampler.batch(step)) for step in range(1, steps + 1)]
    np.save(Path(folder, "batches.npy"), [np.hstack([inputs, targets[:, -1:]]) for inputs, targets in pairs])


def serve() -> None:
    """The other end of `measure`: sends datagrams back, and a byte once all of a transfer is there."""
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", PORT))

    def answer() -> None:
        while True:
            datagram, sender = echo.recvfrom(2000)
            echo.sendto(datagram, sender)

    threading.Thread(target=answer, daemon=True).start()
    with socket.create_server(("", PORT)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                left = int.from_bytes(connection.recv(8), "big")
                while left > 0 and (block := connection.recv(2**20)):
                    left -= len(block)
                connection.sendall(b".")


def measure(address: str) -> None:
    """Print the milliseconds of a round trip and the Mbit/s of a transfer to where `serve` runs."""
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ping:
        ping.settimeout(5)
        for _ in range(20):
            began = time.perf_counter()
            ping.sendto(bytes(64), (address, PORT))
            ping.recv(2000)
            times.append(time.perf_counter() - began)
    size = 12_500_000
    with socket.create_connection((address, PORT)) as connection:
        began = time.perf_counter()
        connection.sendall(size.to_bytes(8, "big") + bytes(size))
        connection.recv(1)
        rate = 8e-6 * size / (time.perf_counter() - began)
    print(json.dumps([1e3 * statistics.median(times), rate]))


def own(*arguments: object) -> list[str]:
    return [sys.executable, __file__, "--child", *map(str, arguments)]


def report_link(hosts: Sequence[Any]) -> None:
    for here, there in (hosts, hosts[::-1]):
        server = subprocess.Popen(there.command(own("serve")), stdin=subprocess.DEVNULL)
        try:
            time.sleep(1)  # it comes up
            (text,) = children.run("the link", [(here.command(own("measure", there.name)), {})], 60)
        finally:
            there.kill_processes("--child serve")
            server.wait()
        ping, rate = json.loads(text)
        print(f"{here.name} to {there.name}: ping {ping:.1f} ms, TCP {rate:.0f} Mbit/s", flush=True)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"asked for: {RATE_MBIT:g} Mbit/s each way, {DELAY_MS:g} ms one way; TCP's congestion control is {control}")


def launch(hosts: Sequence[Any], kind: str, folder: str, steps: int, target: float, group_size: int) -> dict[str, Any]:
    """One run; on no hosts it is one of this machine without a link."""
    ours = own("train", kind, steps, target, group_size)
    if kind in TORCH_KINDS:
        script = [sys.executable, str(Path(__file__).with_name("slow_link_torch.py")), kind, folder]
        script += [str(steps), str(target)]
        settings = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(PORT), "WORLD_SIZE": str(RANKS)}
        settings["GLOO_SOCKET_IFNAME"] = DEVICE
        commands = [
            (hosts[rank // RANKS_A_HOST].command(script, folder), settings | {"RANK": str(rank)})
            for rank in range(RANKS)
        ]
    elif hosts:
        from mpishard.launch.launchers import Host, find_launcher

        launcher = find_launcher()
        environment = launcher.environment(children.environment(), RANKS, RANKS)
        slots = [Host(host.name, RANKS_A_HOST) for host in hosts]
        words = launcher.command(ours, RANKS, hosts=slots, environment=environment)
        commands = [(hosts[0].command(words, folder), environment)]
    else:
        commands = [(children.mpirun(RANKS, ours), {})]
    return children.result(kind, children.run(kind, commands, TIME_LIMIT))


def ratios(found: dict[str, list[dict[str, Any]]], kind: str, other: str | None) -> str:
    """How many times as fast a kind came to the target as another."""
    if other is None or not all(run["reached"] for run in found[kind] + found[other]):
        return "-"
    return (
        f"{statistics.median(b['seconds'] / a['seconds'] for a, b in zip(found[kind], found[other], strict=True)):.2f}"
    )


def table(found: dict[str, list[dict[str, Any]]]) -> None:
    def median(kind: str, name: str) -> float:
        return statistics.median(run[name] for run in found[kind])

    there = [kind for kind in found if kind in TORCH_KINDS and all(run["reached"] for run in found[kind])]
    peer = min(there, key=lambda kind: median(kind, "seconds"), default=None)
    plain = "ddp" if "ddp" in found else None
    columns = f"{'steps':>7}{'seconds (range)':>24}{'ms/step':>9}{'ledger':>10}{'link':>10}{'to DDP':>8}{'to peer':>9}"
    print(f"{'':38}{columns}")
    for kind, runs in found.items():
        seconds = [run["seconds"] for run in runs]
        if all(run["reached"] for run in runs):
            time_to = f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"
        else:
            time_to = f"not reached: {median(kind, 'loss'):.2f}"
        step = 1e3 * statistics.median(run["seconds"] / max(1, run["steps"] - 1) for run in runs)
        ledger = "-" if kind in TORCH_KINDS else f"{median(kind, 'ledger') / 1e3:,.1f}"
        print(
            f"{(KINDS | TORCH_KINDS)[kind]:38}{median(kind, 'steps'):7.0f}{time_to:>24}{step:9.0f}{ledger:>10}"
            f"{median(kind, 'link') / 1e3:10,.1f}{ratios(found, kind, plain):>8}{ratios(found, kind, peer):>9}"
        )
    print("ledger: kB a step that rank 0 sent; link: kB a step that its host sent to the other")
    print(
        f"to DDP, to peer: times as fast as DDP and as {TORCH_KINDS[peer] if peer else 'PyTorch'}, the fastest of its"
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, *words = sys.argv[2:]
        if name == "train":
            train(words[0], int(words[1]), float(words[2]), int(words[3]))
        else:
            {"serve": serve, "measure": measure}[name](*words)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*KINDS, *TORCH_KINDS]
    parser.add_argument(
        "--kinds", nargs="+", choices=every, metavar="KIND", help=f"of {', '.join(every)} (default all)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument(
        "--group-size", type=int, default=0, help="minimum_parameter_group_size of ours, but for the preset"
    )
    parser.add_argument("--target", type=float, default=2.8, help="nats per byte (default 2.8)")
    parser.add_argument("--most-steps", type=int, default=150, help="a run ends after these in any case (default 150)")
    options = parser.parse_args()
    if options.repeats < 1 or options.most_steps < 1 or options.group_size < 0:
        parser.error("--repeats and --most-steps must be at least 1, --group-size at least 0")
    kinds = list(dict.fromkeys(options.kinds or every))
    if set(kinds) & set(TORCH_KINDS) and importlib.util.find_spec("torch") is None:
        sys.exit("this benchmark compares with PyTorch, which is not installed: pip install torch==2.13.0")
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "tests" / "helpers")]
    import namespaces

    if reason := namespaces.missing():
        sys.exit(reason)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        write_batches(folder, options.most_steps)
        for kind in kinds:
            if kind in KINDS:
                launch((), kind, folder, COMPILING, 0.0, options.group_size)  # fills the cache of compiled kernels
        with namespaces.hosts(HOSTS, rate_mbit=RATE_MBIT, delay_ms=DELAY_MS) as hosts:
            report_link(hosts)
            for repeat in range(options.repeats):
                for kind in kinds:
                    run = launch(hosts, kind, folder, options.most_steps, options.target, options.group_size)
                    found[kind].append(run)
                    note = f"; {run['blas']}" if repeat == 0 else ""
                    reached = "" if run["reached"] else ", target not reached"
                    print(
                        f"{kind}: {run['steps']} steps, {run['seconds']:.1f} s, loss {run['loss']:.3f}{reached}{note}",
                        flush=True,
                    )
    print(f"to a loss of {options.target:g}, {options.repeats} repeat(s), {os.cpu_count()} cores:")
    table(found)


if __name__ == "__main__":
    main()
