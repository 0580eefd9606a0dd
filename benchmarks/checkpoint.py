"""Checkpoints of a model of 85 million float32 parameters and two slots of AdamW, 1.02 GB, against plain files.

    python benchmarks/checkpoint.py [--repeats R] [--folder F] [--no-torch] [--tensors T]

save: 2 ranks, ZeRO-1, to the disk of the folder (default: here), against `numpy.tofile` plus fsync of the same bytes
from the same ranks, and against `torch.distributed.checkpoint` of the same tensors, sharded over the ranks.
stall: how long a save that goes on in the background keeps a rank, against a copy of what it copies.
load: what 8 ranks wrote, by 3 ranks and by 1, against as many that read the same files as they are; both from the page
cache.

With --tensors, instead: seconds of 1 and 2 ranks to save and to load so many tensors of 40 parameters.

All kinds run in turns, in the same processes, so that a machine or disk that slows down slows all; the disk is idle
before each, and what the one before wrote is removed.  Figures are bandwidths by the slowest rank; those that count are
the medians of their ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import children

WIDTH, LAYERS = 768, 12
SAVERS, WRITERS, READERS = 2, 8, (3, 1)
TIME_LIMIT = 900
BLOCK = 2**24


def specs(tensors: int = 0) -> list[Any]:
    """The blocks of GPT-2 small, or so many small tensors."""
    from mpishard import ParameterSpec

    if tensors:
        return [ParameterSpec(f"blocks.{i}.weight", (8, 5)) for i in range(tensors)]
    shapes = {
        "norm1.weight": (WIDTH,),
        "norm1.bias": (WIDTH,),
        "qkv.weight": (3 * WIDTH, WIDTH),
        "qkv.bias": (3 * WIDTH,),
        "output.weight": (WIDTH, WIDTH),
        "output.bias": (WIDTH,),
        "norm2.weight": (WIDTH,),
        "norm2.bias": (WIDTH,),
        "expand.weight": (4 * WIDTH, WIDTH),
        "expand.bias": (4 * WIDTH,),
        "contract.weight": (WIDTH, 4 * WIDTH),
        "contract.bias": (WIDTH,),
    }
    return [ParameterSpec(f"blocks.{i}.{name}", shape) for i in range(LAYERS) for name, shape in shapes.items()]


def state_of(mesh: Any, tensors: int = 0) -> Any:
    """The state of a run with ZeRO-1 and AdamW, filled with noise."""
    import numpy as np

    import mpishard

    parameters = mpishard.FlatParameters(specs(tensors))
    parameters.flat[:] = np.random.default_rng(0).standard_normal(parameters.size, np.float32)
    optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), mesh)
    optimizer.bind(parameters)
    state = optimizer.state.capture()
    for shard in state.shards[1:]:
        shard.array[:] = np.random.default_rng(mesh.rank).standard_normal(shard.array.size, np.float32)
    return state


def timed(mesh: Any, work: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, from a common start with an idle disk."""
    import numpy as np

    if mesh.rank == 0:
        os.sync()
    mesh.world.barrier()
    start = time.perf_counter()
    work()
    seconds = np.array([time.perf_counter() - start])
    return float(mesh.world.all_reduce(seconds, op="max")[0])


def counted_bytes(state: Any) -> int:
    return sum(piece.size * shard.array.itemsize for shard in state.shards for piece in shard.counted)


def child_save(folder: Path, repeats: int, with_torch: bool) -> dict[str, Any] | None:
    import numpy as np

    import mpishard

    with mpishard.Mesh() as mesh:
        state = state_of(mesh)
        total = int(mesh.world.all_reduce(np.array([counted_bytes(state)]))[0])
        # What a rank writes, as few large arrays: parameters and slots.
        own = [
            np.concatenate([shard.array[piece.start : piece.start + piece.size] for piece in shard.counted])
            for shard in state.shards
        ]
        copy = [np.zeros_like(array) for array in own]

        def plain() -> None:
            with open(folder / f"plain-{mesh.rank}", "wb") as file:
                for array in own:
                    array.tofile(file)
                os.fsync(file.fileno())

        works: dict[str, Callable[[], Any]] = {"plain": plain}
        checkpoints = mpishard.Checkpoints(folder / "run", mesh, keep=None)
        works["save"] = lambda: checkpoints.save(state)
        if with_torch:
            works["torch"] = torch_save(folder, mesh, total)
        works["stall"] = lambda: checkpoints.save(state, asynchronous=True)
        works["copy"] = lambda: [np.copyto(into, array) for into, array in zip(copy, own, strict=True)]

        def removed(work: Callable[[], Any]) -> float:
            seconds = timed(mesh, work)
            checkpoints.wait()
            if mesh.rank == 0:
                for written in (folder / "run", folder / "torch", *folder.glob("plain-*")):
                    shutil.rmtree(written) if written.is_dir() else written.unlink(missing_ok=True)
            return seconds

        # The first of each also makes its buffers.
        found = children.in_turns({name: partial(removed, work) for name, work in works.items()}, repeats)
        checkpoints.close()
        return {"seconds": found, "bytes": total} if mesh.rank == 0 else None


def torch_save(folder: Path, mesh: Any, total: int) -> Callable[[], Any]:
    """The same number of bytes by torch.distributed.checkpoint: three sharded tensors for each parameter."""
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=mesh.rank, world_size=mesh.size)
    device_mesh = init_device_mesh("cpu", (mesh.size,))
    torch.manual_seed(0)
    state = {
        f"{kind}.{spec.name}": distribute_tensor(torch.randn(spec.shape), device_mesh, [Shard(0)])
        for kind in ("parameters", "exp_avg", "exp_avg_sq")
        for spec in specs()
    }
    assert sum(tensor.numel() * 4 for tensor in state.values()) == total
    return lambda: checkpoint.save(state, checkpoint_id=str(folder / "torch"))


def child_write(folder: Path) -> dict[str, Any] | None:
    import mpishard

    with mpishard.Mesh() as mesh:
        with mpishard.Checkpoints(folder / "eight", mesh) as checkpoints:
            checkpoints.save(state_of(mesh))
        return {} if mesh.rank == 0 else None


def child_small(folder: Path, repeats: int, tensors: int) -> dict[str, Any] | None:
    import mpishard

    with mpishard.Mesh() as mesh:
        state = state_of(mesh, tensors)
        with mpishard.Checkpoints(folder / "small", mesh, keep=1) as checkpoints:
            works: dict[str, Callable[[], float]] = {
                "save": partial(timed, mesh, lambda: checkpoints.save(state)),
                "load": partial(timed, mesh, lambda: checkpoints.load(state)),
            }
            found = children.in_turns(works, repeats)
        files = (folder / "small" / "latest").iterdir()
        return {"seconds": found, "bytes": sum(file.stat().st_size for file in files)} if mesh.rank == 0 else None


def child_load(folder: Path, repeats: int) -> dict[str, Any] | None:
    import numpy as np

    import mpishard

    with mpishard.Mesh() as mesh:
        state = state_of(mesh)
        files = sorted((folder / "eight" / "latest").glob("pieces-*.h5"))
        total = sum(file.stat().st_size for file in files)
        sizes = [file.stat().st_size for file in files]
        cuts = [total * rank // mesh.size for rank in range(mesh.size + 1)]
        buffer = np.zeros(cuts[mesh.rank + 1] - cuts[mesh.rank], np.uint8)

        def plain() -> None:
            """An even share of all bytes."""
            begin = place = 0
            for file, size in zip(files, sizes, strict=True):
                first, last = max(cuts[mesh.rank], begin), min(cuts[mesh.rank + 1], begin + size)
                if first < last:
                    with open(file, "rb", buffering=0) as stream:
                        stream.seek(first - begin)
                        while place < last - cuts[mesh.rank]:
                            place += stream.readinto(buffer[place : last - cuts[mesh.rank]]) or 0
                begin += size

        checkpoints = mpishard.Checkpoints(folder / "eight", mesh)
        load = partial(timed, mesh, lambda: checkpoints.load(state))
        found = children.in_turns({"plain": partial(timed, mesh, plain), "load": load}, repeats)
        checkpoints.close()
        return {"seconds": found, "bytes": total} if mesh.rank == 0 else None


def launch(what: str, ranks: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, "--folder", str(folder)]
    command += ["--repeats", str(options.repeats), "--tensors", str(options.tensors)]
    if options.no_torch:
        command.append("--no-torch")
    return children.run_on_ranks(what, command, ranks, TIME_LIMIT)


def report(result: dict[str, Any], names: dict[str, str], pairs: list[tuple[str, str]]) -> None:
    """Medians of each kind, and of the ratio of the bandwidths of each pair."""
    seconds = result["seconds"]
    for name in seconds:
        rate = result["bytes"] / statistics.median(seconds[name]) / 1e9
        print(f"  {names[name]:40s}{rate:8.2f} GB/s, {statistics.median(seconds[name]):.3f} s")
    for one, other in pairs:
        if other in seconds:
            ratios = [theirs / ours for ours, theirs in zip(seconds[one], seconds[other], strict=True)]
            spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{names[one]} to {names[other]}: {statistics.median(ratios):.2f} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to write (default: here)")
    parser.add_argument("--no-torch", action="store_true", help="leave torch.distributed.checkpoint out")
    parser.add_argument("--tensors", type=int, default=0, help="save and load so many small tensors instead")
    parser.add_argument("--child", choices=["save", "write", "load", "small"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.child:
        result = {
            "save": lambda: child_save(options.folder, options.repeats, not options.no_torch),
            "write": lambda: child_write(options.folder),
            "load": lambda: child_load(options.folder, options.repeats),
            "small": lambda: child_small(options.folder, options.repeats, options.tensors),
        }[options.child]()
        if result is not None:
            print(json.dumps(result), flush=True)
        return
    if not options.tensors and not options.no_torch and importlib.util.find_spec("torch") is None:
        sys.exit(
            "this benchmark compares with PyTorch, which is not installed: pip install torch==2.13.0, or --no-torch"
        )
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-benchmark-") as name:
        folder = Path(name).resolve()
        if options.tensors:
            for ranks in (1, 2):
                result = launch("small", ranks, folder, options)
                print(f"{options.tensors} tensors, {ranks} ranks, {result['bytes'] / 1e6:.1f} MB on disk:")
                for what, seconds in result["seconds"].items():
                    print(f"  {what}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
            return
        result = launch("save", SAVERS, folder, options)
        print(f"{result['bytes'] / 1e9:.2f} GB from {SAVERS} ranks, medians of {options.repeats}:")
        names = {
            "plain": "numpy.tofile and fsync",
            "save": "mpishard, ZeRO-1",
            "torch": "torch.distributed.checkpoint",
            "stall": "stall of an asynchronous save",
            "copy": "copy of the same bytes in memory",
        }
        report(result, names, [("save", "plain"), ("save", "torch"), ("copy", "stall")])
        shutil.rmtree(folder / "run", ignore_errors=True)
        launch("write", WRITERS, folder, options)
        for readers in READERS:
            result = launch("load", readers, folder, options)
            print(f"{result['bytes'] / 1e9:.2f} GB written by {WRITERS} ranks, read by {readers}:")
            report(result, {"plain": "plain read", "load": "mpishard, ZeRO-1"}, [("load", "plain")])


if __name__ == "__main__":
    main()
