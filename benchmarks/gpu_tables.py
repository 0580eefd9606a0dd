"""The results of gpu.py as tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from gpu_graph import KINDS as KINDS_OF_GRAPH
from gpu_machine import peak_tflops
from gpu_training import KINDS


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def gpu_of(results: dict[str, Any]) -> str:
    """The name of the GPU; empty if the facts have none."""
    found = results.get("facts", {})
    gpus, of_cupy = found.get("gpus") or [], found.get("cupy")
    if gpus:
        return str(gpus[0].get("name", ""))
    return str(of_cupy.get("device", "")) if isinstance(of_cupy, dict) else ""


def facts(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [(f"GPU {index}", ", ".join(gpu.values())) for index, gpu in enumerate(found["gpus"])]
    for name in ("cupy", "mpi", "torch"):
        value = found.get(name)
        if isinstance(value, dict):
            rows += [(f"{name}: {key}", each) for key, each in value.items()]
        elif value:
            rows.append((name, value))
    rows += [(name, found[name]) for name in ("mpirun", "processor", "cores", "python")]
    rows += list(found["versions"].items())
    return table(("fact", "value"), rows)


def tests(found: dict[str, Any], results: dict[str, Any]) -> str:
    names = sorted({name for each in found["total"].values() for name in each})
    rows = [(where, *(each.get(name, 0) for name in names)) for where, each in found["total"].items()]
    failures = "".join(f"\n- {line}" for line in found["failures"])
    return table(("where", *names), rows) + (f"\n{failures}" if failures else "\n\nNo test failed.")


def training(found: dict[str, Any], results: dict[str, Any]) -> str:
    peak = peak_tflops(gpu_of(results))
    measured = (found.get("measured_peak") or {}).get("flops")
    rows = []
    for kind, rate in found["tokens_per_second"].items():
        flops = rate * found["flops_of_token"]
        each = [turn[kind] for turn in found["turns"] if kind in turn]
        rows.append(
            (
                KINDS[kind],
                f"{rate:,.0f}",
                f"{1e3 * statistics.median(t for turn in each for t in turn['seconds']):.1f}",
                f"{flops / 1e12:.1f}",
                f"{flops / peak / 1e12:.1%}" if peak else "unknown",
                f"{flops / measured:.1%}" if measured else "unknown",
                f"{found['mpishard_to'][kind]:.3f}" if kind in found["mpishard_to"] else "",
                f"{max(turn['memory'] for turn in each) / 1e9:.1f}",
                f"{each[-1]['losses'][0]:.3f} to {each[-1]['losses'][-1]:.3f}",
            )
        )
    header = ("kind", "tokens/s", "ms a step", "Tflop/s", "MFU", "of a product", "mpishard to it", "GB", "loss")
    text = table(header, rows)
    text += f"\n\nFlops of a token are 6 N + 12 layers context width, N = {found['parameters']:,}. "
    text += f"MFU is of {peak:g} Tflop/s, the data sheet's. " if peak else "The peak of this GPU is not known. "
    if not found.get("has_torch", True):
        text += "PyTorch is not installed: nothing to compare with. "
    if measured:
        size = found["measured_peak"]["size"]
        text += f"A product of {size} x {size} matrices in float16 reached {measured / 1e12:.1f} Tflop/s."
    return text


def trace(found: dict[str, Any], results: dict[str, Any]) -> str:
    texts = []
    for kind, each in found["kinds"].items():
        text = f"{KINDS[kind]}: a step of {1e3 * each['seconds']:.1f} ms, {each['launches']} kernels and copies, "
        text += f"the GPU busy for {1e3 * each['busy']:.1f} ms and idle for {1e3 * each['idle']:.1f} ms between them "
        text += f"({each['how']})\n\n"
        text += table(("class", "ms"), [(name, f"{1e3 * value:.2f}") for name, value in each["classes"].items()])
        rows = [(kernel["name"], kernel["calls"], f"{1e3 * kernel['seconds']:.2f}") for kernel in each["kernels"][:12]]
        texts.append(text + "\n\n" + table(("kernel", "calls", "ms"), rows))
    if found["picture"]:
        texts.append(f"![one step]({found['picture']})")
    return "\n\n".join(texts)


def bandwidth(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [
        (name, f"{each['bytes'] / 1e6:,.1f}", f"{each['bytes_per_second'] / 1e9:,.1f}", f"{each['to_copy']:.2f}")
        for name, each in found.items()
        if isinstance(each, dict)
    ]
    return table(("kernel", "MB at the least", "GB/s", "to the copy"), rows)


def all_reduce(found: dict[str, Any], results: dict[str, Any]) -> str:
    names = list(next(iter(found["sizes"].values()))["seconds"])
    rows = [
        (
            f"{int(nbytes):,}",
            *(f"{1e3 * each['seconds'][name]:.3f}" for name in names),
            f"{each['to_largest_part']:.2f}",
        )
        for nbytes, each in found["sizes"].items()
    ]
    text = table((f"bytes, {found['ranks']} ranks", *(f"{name}, ms" for name in names), "staged to largest part"), rows)
    return text + "\n\nThe largest part is the bound of the staged all-reduce with overlap."


def pointers(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows, copies = [], []
    for ranks, kinds in found["ranks"].items():
        for kind, each in kinds.items():
            if kind == "copies":
                every = [
                    (ranks, rank, name, *dict(numbers).values())
                    for rank, own in enumerate(each["by rank"])
                    for name, numbers in own.items()
                ]
                copies += every
                continue
            apart = each["apart"].values()
            equal, most = sum(not value for value in apart), max(apart, default=0.0)
            rows.append(
                (ranks, kind, len(apart), equal, f"{most:.1e}" if most else "", "yes" if each["exact"] else "no")
            )
    text = table(("ranks", "what", "cases", "equal in bits", "farthest apart", "must be equal"), rows)
    text += "\n\n" + table(("ranks", "rank", "all-reduce of", "copies to the host", "to the device"), copies)
    return text + f"\n\nCopies by the processor itself are not seen.  The trial printed: {found['trial']}"


def graph(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = []
    for kind, each in found["kinds"].items():
        times = [
            f"{1e3 * each['seconds'][way]:.2f}" if way in each.get("seconds", {}) else "" for way in ("eager", "graph")
        ]
        equal = {None: "", True: "yes", False: "no"}[each.get("equal")]
        rows.append((KINDS_OF_GRAPH[kind], *times, equal, each.get("error", "")[:200], each.get("where", "")))
    text = table(("what", "eager, ms", "graph, ms", "equal in bits", "error", "where, innermost first"), rows)
    waits = {kind: dict.fromkeys(each["waits"]) for kind, each in found["kinds"].items() if each["waits"]}
    for kind, sites in waits.items():
        text += f"\n\n{KINDS_OF_GRAPH[kind]}, where the host waits:" + "".join(f"\n- {site}" for site in sites)
    return text


def inverse(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [(kind, f"{each['apart']:.1e}") for kind, each in found["kinds"].items()]
    return table(("of 2 ranks", "from the host's, in parts of the largest value"), rows)


def sanitizer(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [(name, "no summary" if faults is None else faults) for name, faults in sorted(found["faults"].items())]
    return table(("tool, model, dtype of products", "faults"), rows)


def memory(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = []
    for ranks, kinds in found["ranks"].items():
        for kind, each in kinds.items():
            rows.append((ranks, kind, *(f"{each[name] / 1e6:,.0f}" for name in ("used", "peak", "held"))))
    text = table(("ranks", "strategy", "MB in use after a step", "MB at the peak", "MB held by the pool"), rows)
    text += f"\n\nThe largest of the ranks.  N = {found['parameters']:,}: parameters, gradients and the two slots of "
    return text + f"AdamW are {16 * found['parameters'] / 1e6:,.0f} MB in float32."


def checkpoint(found: dict[str, Any], results: dict[str, Any]) -> str:
    names = {"save": "stall of an asynchronous save", "copy": "copy to pinned memory", "whole": "save that waits"}
    rows = [(names[name], f"{1e3 * seconds:.1f}") for name, seconds in found["seconds"].items()]
    text = table((f"{found['bytes'] / 1e6:,.0f} MB", "ms"), rows)
    return text + f"\n\nThe stall is {found['stall_to_copy']:.2f} of the copy."


def minimize(found: dict[str, Any], results: dict[str, Any]) -> str:
    rows = [(f"{percent} %", f"{1e3 * seconds:.1f}") for percent, seconds in found["seconds"].items()]
    return table((f"of {found['unknowns']:,} unknowns at a bound", "ms an iteration"), rows)


def parity(found: dict[str, Any], results: dict[str, Any]) -> str:
    if not found["has_torch"]:
        return "PyTorch is not installed: nothing to compare with."
    rows = []
    for kind, each in found["cases"].items():
        model, _, dtype = kind.partition("/")
        pairs = [
            " / ".join(f"{each[who][name]:.1e}" if who in each else "none" for who in ("ours", "theirs"))
            for name in ("loss", "median", "largest")
        ]
        worst = (f"{each['ratio']:.2f}", each["worst"]) if "worst" in each else ("", "")
        rows.append((model, dtype, each["attention"], f"{found['losses'][model]:.3f}", *pairs, *worst))
    header = ("model", "dtype", "attention", "loss", "its error", "of gradients, median", "largest", "ratio", "worst")
    text = table(header, rows)
    text += "\n\nErrors are relative to PyTorch in float64, mpishard's / PyTorch's; those of gradients are norms of "
    text += "differences, over all tensors.  The ratio is the largest of mpishard's to PyTorch's of one tensor, the "
    text += "worst.  PyTorch computes in half precision by autocast, and in float32 without TF32."
    warned = dict.fromkeys(warning for each in found["cases"].values() for warning in each["warnings"])
    return text + "".join(f"\n\nIt warned: {warning}" for warning in warned)


TABLES: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "facts": facts,
    "tests": tests,
    "training": training,
    "trace": trace,
    "graph": graph,
    "bandwidth": bandwidth,
    "all_reduce": all_reduce,
    "pointers": pointers,
    "inverse": inverse,
    "sanitizer": sanitizer,
    "memory": memory,
    "checkpoint": checkpoint,
    "minimize": minimize,
    "parity": parity,
}


def table_of(name: str, results: dict[str, Any]) -> str:
    """The table of a part, with what failed in it."""
    found = results[name]
    if "failed" in found:
        return f"## {name}\n\nfailed: {found['failed']}\n"
    text = f"## {name}\n\n{TABLES[name](found, results)}\n"
    if found.get("unfinished"):
        text += f"\n{name} did not come to its end.\n"
    failures = found.get("failures")
    if isinstance(failures, dict):
        text += "".join(f"\n{kind} failed: {why}\n" for kind, why in failures.items())
    return text


def all_tables(results: dict[str, Any]) -> str:
    """All parts that ran."""
    setting = results["setting"]
    title = f"# {gpu_of(results) or 'no GPU'}\n\n"
    if setting["module"] != "cupy" or setting["small"]:
        title += f"Arrays of {setting['module']}{', tiny sizes' if setting['small'] else ''}: figures mean nothing.\n\n"
    return title + "\n".join(table_of(name, results) for name in TABLES if name in results)
