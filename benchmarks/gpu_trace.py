"""Part of gpu.py: what a GPU does in one step, kernel by kernel, as a table and a picture.

The profiler is that of PyTorch, which sees all kernels of the process, CuPy's too.  Without PyTorch, or without a GPU,
there is the time of the whole step only.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

from gpu_machine import Setting
from gpu_training import mpishard_step, torch_step

# The class of a kernel by a part of its name, the first that fits.
CLASSES = {
    "attention": ("flash", "sdpa", "fmha", "cudnn_generated", "attention"),
    "products": ("gemm", "cutlass", "xmma", "cublas", "nvjet", "splitk", "matmul"),
    "softmax and loss": ("softmax", "cross_entropy", "nll_loss", "exponentials", "row_maximum"),
    "norms": ("norm",),
    "activations": ("gelu", "swiglu", "sigmoid", "tanh"),
    "heads and biases": ("split_heads", "merge_heads", "split_with", "add_bias", "rotate"),
    "embedding": ("lookup", "embedding", "_keys", "take", "scatter", "index"),
    "update": ("adam", "update", "ranges", "multi_tensor"),
    "rounding and copies": ("memcpy", "memset", "copy", "convert", "round", "cast", "fill"),
    "sums": ("reduce", "sum"),
}
OTHERS = "others"


def class_of(name: str) -> str:
    """The class of work of a kernel."""
    lower = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(word in lower for word in words)), OTHERS)


def child(setting: Setting, kind: str) -> dict[str, Any]:
    """Trace one step after some others; the spans are in ``spans-KIND.json`` of the output."""
    step, synchronize, *_ = (mpishard_step if kind == "mpishard" else torch_step)(setting, kind)
    for index in range(3):
        step(index)
    synchronize()
    spans, seconds, how = timed_whole(lambda: (step(3), synchronize()))
    if setting.module == "cupy" and importlib.util.find_spec("torch") is not None:
        try:
            found = profiled(setting, kind, lambda: (step(3), synchronize()))
        except Exception as error:  # of the profiler, which some containers do not allow
            how += f"; the profiler failed: {error}"
        else:
            if found[0]:
                spans, seconds, how = found
            else:
                how += "; the profiler saw no kernels"
    (Path(setting.output) / f"spans-{kind}.json").write_text(json.dumps(spans))
    return {"seconds": seconds, "how": how, **summary(spans)}


def profiled(setting: Setting, kind: str, work: Any) -> tuple[list[dict[str, Any]], float, str]:
    """Kernels and copies on the device while `work` runs, with starts and durations in seconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.init()
    for _ in range(2):  # the first may miss kernels, and waits for CUPTI to start
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
    file = Path(setting.output) / f"trace-{kind}.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    return device_spans(events), seconds, "profiler of PyTorch (CUPTI)"


def device_spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans on the device in a trace in Chrome's format, in the order of their starts."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        {
            "name": event["name"],
            "class": class_of(event["name"]),
            "start": event["ts"] / 1e6,
            "seconds": event["dur"] / 1e6,
            "stream": event.get("args", {}).get("stream", event.get("tid", 0)),
        }
        for event in events
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]
    first = min((span["start"] for span in found), default=0.0)
    for span in found:
        span["start"] -= first
    return sorted(found, key=lambda span: span["start"])


def timed_whole(work: Any) -> tuple[list[dict[str, Any]], float, str]:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    whole = {"name": "step", "class": OTHERS, "start": 0.0, "seconds": seconds, "stream": 0}
    return [whole], seconds, "a step as a whole; kernels are seen with PyTorch and a GPU only"


def summary(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds by class and of the kernels that take longest, and how long no kernel ran between the first and last."""
    classes: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for span in spans:
        classes[span["class"]] = classes.get(span["class"], 0.0) + span["seconds"]
        kernels.setdefault(span["name"], []).append(span["seconds"])
    busy = end = 0.0
    for span in spans:
        stop = span["start"] + span["seconds"]
        busy += max(0.0, stop - max(end, span["start"]))
        end = max(end, stop)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "kernels": [{"name": name[:120], "calls": len(each), "seconds": sum(each)} for name, each in longest],
        "launches": len(spans),
        "busy": busy,
        "idle": end - busy,
    }


def draw(folder: Path) -> Path | None:
    """A timeline of all ``spans-KIND.json`` in a folder, a row for each class of work; None without matplotlib."""
    files = sorted(folder.glob("spans-*.json"))
    if not files or importlib.util.find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(len(files), 1, figsize=(14, 3 * len(files)), squeeze=False, sharex=True)
    for file, axes in zip(files, every[:, 0], strict=True):
        spans = json.loads(file.read_text())
        colors = [*CLASSES, OTHERS]
        rows = [name for name in colors if any(span["class"] == name for span in spans)]
        for row, name in enumerate(rows):
            runs = [(1e3 * each["start"], 1e3 * each["seconds"]) for each in spans if each["class"] == name]
            axes.broken_barh(runs, (row - 0.4, 0.8), facecolors=f"C{colors.index(name)}")
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_title(f"{file.stem.partition('-')[2]}: one step", loc="left")
    every[-1, 0].set_xlabel("ms since the first kernel")
    figure.tight_layout()
    target = folder / "trace.png"
    figure.savefig(target, dpi=110)
    return target
