"""Part of gpu.py: device memory by its address through MPI, beside arrays that are staged through the host.

Without a GPU the stand-in plays memory that MPI takes; with NumPy both ways are the same.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import children
import gpu_trace
from gpu_launcher import Failed, Launcher
from gpu_machine import Setting, median_ratio, model_sizes, timed

KINDS = ("calls", "training", "minimize and torch", "copies")  # a process each: what one does may crash it
SIZES = tuple(2**power for power in (10, 14, 18, 22, 26, 28))  # bytes of an all-reduce
STEPS = 3
TRIALS: tuple[dict[str, str], ...] = (
    {},
    {"I_MPI_OFFLOAD_FAST_MEMCPY": "0"},
    {"I_MPI_OFFLOAD_IPC": "0"},
    {"I_MPI_OFFLOAD_PIPELINE": "0", "I_MPI_DEBUG": "5"},
)


def trials(launcher: Launcher) -> tuple[bool, str]:
    """Whether the trial of `mpishard.comm.capabilities` succeeds in a process of its own, and what it prints.

    Where it fails it is tried without one after the other of Intel MPI's ways to copy; later children of the launcher
    go without them, too.
    """
    program = "from mpishard.comm import capabilities; exec(capabilities._DEVICE_PROBE)"
    texts = []
    for variables in TRIALS:
        launcher.environment.update(variables)
        code, text = launcher.run(["-c", program], 0, 60)
        texts.append(f"{variables or 'as it is'}: {text.strip()[-2000:]}, exit code {code}")
        if code == 0 and text.split().count("True") == 2:
            return True, texts[-1]
    return False, "\n".join(texts)


def module_of_pointers(setting: Setting, mesh: Any) -> tuple[Any, bool]:
    """The module of arrays, and whether MPI gets their addresses where that is not withheld."""
    from mpishard.backend import array as arrays
    from mpishard.comm import staging
    from mpishard.comm.capabilities import probe

    module = setting.use_device(mesh)
    if setting.module == "standin":
        import standin

        found = replace(probe(), device_buffers=True)
        staging.probe = lambda device=False: found  # type: ignore[assignment]
        return arrays.module_of(standin.empty(1, kind=standin.AwareArray)), True
    return module, setting.module == "cupy" and probe(device=True).device_buffers


def stage(mesh: Any, staged: bool) -> None:
    """Let the axes of a mesh stage device arrays, or hand their addresses to MPI."""
    for axis in (mesh.world, mesh.data, mesh.tensor, mesh.pipeline, mesh.node):
        axis.withhold_device_buffers(staged)


# -- the time of an all-reduce -----------------------------------------------------------------------------------------


def child_all_reduce(setting: Setting) -> dict[str, Any] | None:
    """An all-reduce by size, staged and by addresses, beside the copies and the host's MPI that staging is made of."""
    import mpishard

    mesh = mpishard.Mesh()
    module, direct = module_of_pointers(setting, mesh)
    sizes = SIZES[:2] if setting.small else SIZES
    found = {str(nbytes): _times(setting, mesh, module, direct, nbytes) for nbytes in sizes}
    return None if mesh.rank else {"ranks": mesh.size, "sizes": found}


def _times(setting: Setting, mesh: Any, module: Any, direct: bool, nbytes: int) -> dict[str, Any]:
    """Seconds of the slowest rank, from a common start; and the staged way beside its parts."""
    import numpy as np

    from mpishard.backend import array as arrays

    axis, size = mesh.data, nbytes // 4
    buffer = module.zeros(size, np.float32)
    host = arrays.pinned_empty(size, np.float32, like=buffer)
    host.fill(0)
    plain = np.zeros(size, np.float32)
    seconds = np.zeros(1)
    calls = 10 if nbytes < 2**20 else 1

    def on_all(work: Callable[[], Any], staged: bool = True) -> Callable[[], float]:
        def measured() -> float:
            stage(mesh, staged)
            axis.barrier()
            seconds[0] = timed(buffer, work, calls)
            return float(axis.all_reduce(seconds, op="max")[0])

        return measured

    works = {
        "staged": on_all(lambda: axis.all_reduce(buffer)),
        "copy to the host": on_all(lambda: arrays.copy_to_host(buffer, host)),
        "MPI on the host": on_all(lambda: axis.all_reduce(plain)),
        "copy to the device": on_all(lambda: arrays.copy_to_device(host, buffer)),
    }
    if direct:
        works["by address"] = on_all(lambda: axis.all_reduce(buffer), staged=False)
    found = children.in_turns(works, setting.repeats)
    parts = [found[name] for name in ("copy to the host", "MPI on the host", "copy to the device")]
    return {
        "seconds": {name: statistics.median(each) for name, each in found.items()},
        "to_largest_part": median_ratio(found["staged"], [max(turn) for turn in zip(*parts, strict=True)]),
        "to_sum_of_parts": median_ratio(found["staged"], [sum(turn) for turn in zip(*parts, strict=True)]),
    }


# -- the same bits, and no copy to the host ----------------------------------------------------------------------------


def child_pointers(setting: Setting, kind: str) -> dict[str, Any] | None:
    """By case how far results by addresses are from staged ones, the farthest rank's; of "copies" what the GPU copied.

    `exact`: MPI's order of sums cannot matter, so that bits are equal.  Sums of whole numbers are exact, those of two
    ranks have one order, and on more ranks models are trained reproducibly.
    """
    import numpy as np

    import mpishard

    with mpishard.Mesh() as mesh:
        module, direct = module_of_pointers(setting, mesh)
        if setting.module == "cupy" and not direct:
            raise RuntimeError("this MPI was not seen to take device pointers")
        if kind == "copies":
            own = _copies(setting, mesh, module)
            every = mesh.world.allgather_object(tuple(own.items()))
            return None if mesh.rank else {"by rank": [dict(each) for each in every]}
        exact = mesh.size <= 2 or kind != "minimize and torch"
        apart: dict[str, float] = {}
        for name, work in _cases(setting, kind, mesh, module):
            staged, direct_results = work(True), work(False)
            apart[name] = max(map(_apart, staged, direct_results), default=0.0)
        values = np.array(list(apart.values()))
        mesh.world.all_reduce(values, op="max")
        rank = mesh.rank
    return None if rank else {"exact": exact, "apart": dict(zip(apart, values.tolist(), strict=True))}


def _apart(one: Any, other: Any) -> float:
    """The largest difference in parts of the largest value; 0 for equal bits, and 1 where values are not finite."""
    import numpy as np

    if one.tobytes() == other.tobytes():
        return 0.0
    difference = np.abs(one.astype(np.float64) - other)
    return float(np.nan_to_num(difference.max() / (np.abs(one).max() or 1.0), nan=1.0, posinf=1.0)) or 1e-300


Case = tuple[str, Callable[[bool], list[Any]]]  # a name, and what computes it, staged or not


def _cases(setting: Setting, kind: str, mesh: Any, module: Any) -> Iterator[Case]:
    if kind == "calls":
        for started in (False, True):
            yield from _calls(setting, mesh, module, started)
    elif kind == "training":
        for shape in ({}, *_shapes(mesh.size)):
            for zero in (0, 3) if setting.small else range(4):
                name = ", ".join([f"zero={zero}", *(f"{axis}={size}" for axis, size in shape.items())])
                yield name, functools.partial(_steps, setting, module, shape, zero)
    else:
        for method in ("L-BFGS", "L-BFGS-B", "CG"):
            yield method, functools.partial(_minimized, setting, mesh, module, method)
        for zero in range(4) if setting.module != "standin" else ():  # of which PyTorch has no tensors
            yield f"zero={zero}", functools.partial(_module_steps, setting, mesh, zero)


def _shapes(ranks: int) -> list[dict[str, int]]:
    """Hybrid layouts of an even number of ranks."""
    shapes = [{"tensor": 2}, {"pipeline": 2}] if ranks % 2 == 0 else []
    return [*shapes, {"tensor": 2, "pipeline": 2}] if ranks % 4 == 0 else shapes


def _put(module: Any, host: Any) -> Any:
    from mpishard.backend import array as arrays

    array = module.empty(host.shape, host.dtype)
    arrays.copy_to_device(host, array)
    return array


def _calls(setting: Setting, mesh: Any, module: Any, started: bool) -> Iterator[Case]:
    """Every collective of the data axis, and messages round the ring, of whole numbers."""
    import numpy as np

    from mpishard.backend import array as arrays

    axis = mesh.data
    ranks, rank = axis.size, axis.rank

    def call(name: str, *arguments: Any, **options: Any) -> Any:
        if started:
            return getattr(axis, f"start_{name}")(*arguments, **options).wait()
        return getattr(axis, name)(*arguments, **options)

    def ring(buffer: Any, out: Any) -> Any:
        arriving = axis.start_recv(out, (rank - 1) % ranks)
        if started:
            axis.start_send(buffer, (rank + 1) % ranks).wait()
        else:
            axis.send(buffer, (rank + 1) % ranks)
        return arriving.wait()

    # In float32 the larger is twice the piece in which arrays are staged.
    for size in (700,) if setting.small else (700, 2**21):
        counts = [size + each for each in range(ranks)]
        makers: dict[str, tuple[int, int, Callable[..., Any]]] = {
            "all_reduce": (size, 0, lambda buffer, out: call("all_reduce", buffer)),
            "all_reduce, out": (size, size, lambda buffer, out: call("all_reduce", buffer, out)),
            "all_reduce, max": (size, 0, lambda buffer, out: call("all_reduce", buffer, op="max")),
            "reduce_scatter": (
                sum(counts),
                counts[rank],
                lambda buffer, out, counts=counts: call("reduce_scatter", buffer, out, counts),
            ),
            "all_gather": (
                counts[rank],
                sum(counts),
                lambda buffer, out, counts=counts: call("all_gather", out, buffer, counts),
            ),
            "all_to_all": (size * ranks, size * ranks, lambda buffer, out: call("all_to_all", buffer, out)),
            "broadcast": (size, 0, lambda buffer, out: call("broadcast", buffer, ranks - 1)),
            "messages": (size, size, ring),
        }
        for dtype in ("float32", "float64", "int64"):
            for name, (given, made, work) in makers.items():

                def both(
                    staged: bool, given: int = given, made: int = made, work: Any = work, dtype: Any = dtype
                ) -> Any:
                    stage(mesh, staged)
                    buffer = _put(module, (np.arange(given) % 1000 + rank).astype(dtype))
                    out = module.zeros(made, dtype) if made else None
                    return [arrays.to_host(work(buffer, out)).copy()]

                yield f"{'start_' if started else ''}{name} of {size} {dtype}", both


def _steps(setting: Setting, module: Any, shape: dict[str, int], zero: int, staged: bool) -> list[Any]:
    """The loss of each step of a GPT, the parameters after it, and the state of AdamW."""
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    sizes = {"vocabulary": 1000, "context": 64, "width": 256, "layers": 2, "heads": 4}
    if setting.small:
        sizes |= {"vocabulary": 101, "context": 16, "width": 24}
    strategies = (mpishard.DDPOptimizer, mpishard.ZeRO1Optimizer, mpishard.ZeRO2Optimizer, mpishard.ZeRO3Optimizer)
    with mpishard.Mesh(**shape) as mesh:
        stage(mesh, staged)
        options = {"sharded_parameters": zero == 3, "shards": 2}
        model = mpishard.nn.GPT(**model_sizes(sizes), mesh=mesh, module=module, **options)
        config = mpishard.ShardingConfiguration(mesh, reproducible=mesh.size > 2)
        optimizer: Any = strategies[zero](mpishard.AdamW(lr=1e-2), config)
        tokens = np.random.default_rng(mesh.data.rank).integers(0, sizes["vocabulary"], (4, sizes["context"] + 1))
        losses = []
        for _ in range(STEPS):
            losses.append(model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:]))
            optimizer.step(model.parameters, count=1000)
        held = [model.parameters.held, *optimizer.state.on_rank.slots.values()]
        return [np.array(losses), *(arrays.to_host(each).copy() for each in held)]


def _minimized(setting: Setting, mesh: Any, module: Any, method: str, staged: bool) -> list[Any]:
    """The point after some iterations, where a function is a sum of one of each rank, and its value."""
    import numpy as np

    import mpishard
    from mpishard.backend import array as arrays

    stage(mesh, staged)
    size = 500 if setting.small else 2**21
    wanted = _put(module, np.sin(np.arange(size)) * (1 + mesh.data.rank))

    def function(x: Any) -> tuple[float, Any]:
        r = x - wanted
        return float((0.5 * r**2 + 0.25 * r**4).sum()), r + r**3

    given = {"bounds": (-0.5, 1.5)} if method == "L-BFGS-B" else {}
    given |= {"mesh": mesh, "reduction": "sum", "options": {"maxiter": 6}}
    found = mpishard.minimize(function, module.zeros(size, np.float64), method=method, **given)
    return [np.array([found.fun]), arrays.to_host(found.x).copy()]


def _module_steps(setting: Setting, mesh: Any, zero: int, staged: bool) -> list[Any]:
    """The loss of each step of a module of PyTorch."""
    import numpy as np
    import torch

    import mpishard

    stage(mesh, staged)
    place = "cpu" if setting.module == "numpy" else "cuda"
    torch.manual_seed(0)
    width = 16 if setting.small else 512
    layers = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
    module = torch.nn.Sequential(torch.nn.LayerNorm(width), *layers).to(place)
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.AdamW(lr=1e-2), zero=zero)
    x = torch.randn(2, 8, width, generator=torch.Generator().manual_seed(mesh.data.rank)).to(place)
    losses = []
    for _ in range(STEPS + 1):
        loss = (module(x[0]) - x[1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [np.array(losses)]


def _copies(setting: Setting, mesh: Any, module: Any) -> dict[str, Any]:
    """By size of an all-reduce by addresses the copies that the GPU made, in each direction; staged ones beside it."""
    import numpy as np

    found: dict[str, Any] = {}
    for nbytes in (2**12,) if setting.small else (2**12, 2**18, 2**26):
        buffer = module.zeros(nbytes // 4, np.float32)
        for staged in (True, False):
            stage(mesh, staged)
            mesh.data.all_reduce(buffer)
            if setting.module == "cupy":
                there = replace(setting, output=str(Path(setting.output, f"copies-{mesh.rank}")))
                Path(there.output).mkdir(exist_ok=True)
                spans, _, _ = gpu_trace.profiled(there, "copies", lambda buffer=buffer: mesh.data.all_reduce(buffer))
            else:
                mesh.data.all_reduce(buffer)
                spans = []
            directions = {"to the host": "dtoh", "to the device": "htod"}
            numbers = {name: sum(word in span["name"].lower() for span in spans) for name, word in directions.items()}
            found[f"{nbytes} bytes, {'staged' if staged else 'by address'}"] = tuple(numbers.items())
    return found


def part_pointers(launcher: Launcher, setting: Setting, so_far: Callable[[dict[str, Any]], None], of_kind: Any) -> Any:
    """All kinds on 2 and 4 ranks; nothing but the trial where that does not succeed."""
    result: dict[str, Any] = {"trial": "none, without a GPU", "ranks": {}, "failures": {}}
    if setting.module == "cupy":
        succeeds, result["trial"] = trials(launcher)
        if not succeeds:
            raise Failed(f"this MPI takes no device pointers; trials of them printed:\n{result['trial']}")
    for ranks in (2,) if setting.small else (2, 4):
        of_ranks = result["ranks"][str(ranks)] = {}
        for kind in KINDS:
            found, failed = of_kind(launcher, "pointers", setting, kind, ranks)
            of_ranks |= found
            result["failures"] |= {f"{kind} on {ranks} ranks": why for why in failed.values()}
            result["failures"] |= {
                f"{kind} on {ranks} ranks, {case}": f"apart by {apart:.1e}"
                for case, apart in found.get(kind, {}).get("apart", {}).items()
                if apart > (0.0 if found[kind]["exact"] else 1e-5)
            }
            so_far(result)
    return result
