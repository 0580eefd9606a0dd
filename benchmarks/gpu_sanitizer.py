"""Part of gpu.py: training steps under each tool of compute-sanitizer, which comes with the CUDA toolkit."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_launcher import LIMIT, Launcher, OutOfTime
from gpu_machine import Setting, model_sizes

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASES = tuple(f"{model}/{dtype}" for dtype in ("float32", "bfloat16") for model in ("GPT", "Llama"))
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
SIZES = {"vocabulary": 1000, "context": 64, "width": 128, "layers": 2, "heads": 2}  # heads that cuDNN takes


def child(setting: Setting, kind: str) -> dict[str, Any]:
    """Two steps of a small model, "GPT/float32" for one."""
    import numpy as np

    import mpishard

    name, _, dtype = kind.partition("/")
    mesh = mpishard.Mesh()
    module = setting.use_device(mesh)
    if setting.module == "cupy":
        module.cuda.set_allocator(None)  # each array has memory of its own, behind which an access is seen
    options = {} if name == "GPT" else {"key_value_heads": 1}
    options |= {} if dtype == "float32" else {"compute_dtype": dtype}
    model = getattr(mpishard.nn, name)(**model_sizes(SIZES), mesh=mesh, module=module, **options)
    optimizer = mpishard.DDPOptimizer(mpishard.AdamW(lr=1e-3), mesh)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (2, SIZES["context"] + 1))
    losses = []
    for _ in range(2):
        losses.append(float(model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])))
        optimizer.step(model.parameters, count=tokens.size)
    return {"losses": losses}


def part_sanitizer(launcher: Launcher, setting: Setting, so_far: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every case under every tool, several at once: how many faults each has named; their texts are in files."""
    path = os.pathsep.join([launcher.environment.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    if setting.module == "cupy" and sanitizer is None:
        raise RuntimeError("compute-sanitizer of the CUDA toolkit is not on the PATH, nor in /usr/local/cuda/bin")
    folder = Path(setting.output) / "sanitizer"
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"faults": {}, "failures": {}}

    def one(job: tuple[str, str]) -> None:
        tool, case = job
        name = f"{tool}, {case}"
        under = [str(sanitizer), "--tool", tool, "--print-limit", "20"] if setting.module == "cupy" else []
        try:
            code, text = launcher.run(launcher.of_child("sanitizer", setting, case), 0, LIMIT["sanitizer"], under)
        except OutOfTime as error:
            result["failures"][name] = str(error)
            return
        (folder / f"{tool}-{case.replace('/', '-')}.txt").write_text(text)
        found = SUMMARY.findall(text)
        result["faults"][name] = int(found[-1]) if found else None
        if code is None:
            result["failures"][name] = "no end within the time limit"
        elif code or '{"losses"' not in text or (under and result["faults"][name] != 0):
            result["failures"][name] = f"ended with code {code}: {text[-300:].strip()}"
        so_far(result)

    jobs = [(tool, case) for case in (CASES[:1] if setting.small else CASES) for tool in TOOLS]
    with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)) // 2))) as pool:
        list(pool.map(one, jobs))
    return result
