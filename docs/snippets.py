"""Runs what the pages and docstrings show: ``python docs/snippets.py`` and ``mpirun -n 2 python docs/snippets.py``.

All ``python`` blocks of a page are one program.  It runs in an empty folder, which all ranks share.  Names of pages as
arguments: only these.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import linecache
import os
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

import mpishard
from mpishard import Mesh

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Pages that need what mpishard does not.
NEEDS = {
    "how-to/from-tao-rol-scipy.md": "scipy",
    "how-to/jax.md": "optax",  # which needs JAX
    "how-to/long-sequences.md": "transformers",  # which needs PyTorch
    "how-to/pyadjoint.md": "pyadjoint",
    "how-to/pytorch.md": "torch",
    "how-to/slurm.md": "torch",
    "tutorials/jax-function.md": "jax",
    "how-to/torch-checkpoints.md": "torch",
    "how-to/torch-experts.md": "transformers",
    "how-to/torch-optimizers.md": "torch",
    "how-to/torch-pipelines.md": "torch",
    "how-to/torch-plans.md": "torch",
    "how-to/torch-precision.md": "torch",
    "how-to/torch-zero3.md": "torch",
    "tutorials/pytorch.md": "torch",
}


def program(page: Path) -> str:
    """The blocks of a page, each in its own lines, so that a traceback has the line numbers of the page."""
    text = page.read_text("utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines()):
            lines[first + number] = line
    return "\n".join(lines) + "\n" if BLOCK.search(text) else ""


def run(page: Path, source: str) -> str:
    """Run a program as a separate script; returns what went wrong."""
    main = type(sys)("__main__")
    main.__dict__["__file__"] = str(page)
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    # Sources of functions are looked up in the page.
    linecache.cache[str(page)] = (len(source), None, source.splitlines(keepends=True), str(page))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            exec(compile(source, str(page), "exec"), main.__dict__)
    except BaseException:
        return out.getvalue() + traceback.format_exc()
    finally:
        sys.modules["__main__"] = before
    return ""


def run_docstrings() -> list[str]:
    """What goes wrong in the examples of docstrings."""
    package = Path(mpishard.__file__).parent
    wrong = []
    for file in sorted(package.rglob("*.py")):
        if ">>> " not in file.read_text("utf-8"):
            continue
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            failed = doctest.testmod(module).failed
        if failed:
            wrong.append(said.getvalue())
    return wrong


def main(names: list[str]) -> int:
    failures = 0
    with Mesh() as mesh:
        world, first = mesh.world, mesh.rank == 0
        if mesh.size == 1 and not names:
            for wrong in run_docstrings():
                failures += 1
                print(wrong)
        for page in sorted(DOCS.rglob("*.md")):
            name = page.relative_to(DOCS).as_posix()
            source = program(page)
            if not source or "_build" in page.parts or (names and name not in names):
                continue
            needed = NEEDS.get(name, "mpishard")
            if importlib.util.find_spec(needed) is None:
                print(f"{name}: skipped, there is no {needed}") if first else None
                continue
            began = time.perf_counter()
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory()) if first else ""
                os.chdir(world.allgather_object(folder)[0])
                wrong = run(page, source)
                errors = world.allgather_object(wrong)
                os.chdir(DOCS)
                world.barrier()
            if first:
                print(
                    f"{name}: {'failed' if any(errors) else 'ok'}, {time.perf_counter() - began:.1f} s",
                    flush=True,
                )
                for rank, text in enumerate(errors):
                    if text:
                        print(f"on rank {rank}:\n{text}", flush=True)
            failures += any(errors)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
