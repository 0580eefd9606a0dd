"""CUDA sources compiled for the host, see ``cuda_on_host.h``: their values, where there is no GPU."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from mpishard.backend.cuda_source import FUNCTION, CudaFunction, parse_parameters

COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
HEADER = Path(__file__).with_name("cuda_on_host.h")
# The wider optimisations would contract a * b + c, which NVRTC is told not to.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC"]
C_HEADERS = "-nostdinc++"  # those of C++ take most of the time of a compilation
CHECKS = Path(__file__).with_name("cuda_checks.cpp")
# What calls the functions of CHECKS.  The library is linked without, or it would get those of the compiler.
SANITIZED = "thread,alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift"
CHECKED = f"-g1 -DMPISHARD_CHECKED -fsanitize={SANITIZED}"
CAN_CHECK = COMPILER is not None and Path(COMPILER).name == "g++" and shutil.which("addr2line") is not None
# The most threads of a block, and without __launch_bounds__: each of them may then take 255 of 65536 registers.
MOST_THREADS, MOST_UNBOUNDED = 1024, 256
MOST_SHARED = 232448  # bytes of a block on an H100
EXTERN = re.compile(r"extern __shared__ ([^;]+) (\w+)\[\];")
DECLARATION = re.compile(r"__shared__\s[^;]*?(\w+)(?:\[[^;]*)?;")

# Whether every run is checked for what a GPU would punish: the option ``--cuda-checks`` of pytest sets it.
checked = False


class Fault(AssertionError):
    """What a GPU would punish, and where."""


def run(
    function: CudaFunction,
    blocks: int,
    threads: int,
    arguments: Sequence[Any],
    reached: Sequence[np.ndarray] = (),
    first_block: int = 0,
    shared: int = 0,
) -> None:
    """Run a CUDA function on NumPy arrays in the place of device arrays, and scalars of the right types.

    `arguments` are as `CudaFunction.converted` returns them, `reached` those besides that it touches by addresses in an
    array, `shared` the bytes of its ``extern __shared__`` array for each block.  Before `first_block` no block
    runs, nor are accesses to arrays checked for races then.

    Raises `Fault` for a launch that a GPU refuses, and where `checked` is set for what ``cuda_checks.cpp`` finds.
    """
    _check_launch(function, blocks, threads, shared)
    cells = [np.array([each.ctypes.data if isinstance(each, np.ndarray) else each]) for each in arguments]
    pointers = (ctypes.c_void_p * len(cells))(*(cell.ctypes.data for cell in cells))
    library = _loaded(function.code, tuple(o for o in function.options if o.startswith("-D")), checked)
    if checked:
        regions = _regions([each for each in (*arguments, *reached) if isinstance(each, np.ndarray)])
        columns = [(ctypes.c_size_t * len(regions))(*column) for column in zip(*regions, strict=True)]
        library.checks_begin(ctypes.c_size_t(len(regions)), *columns, ctypes.c_int(first_block == 0))
    numbers = (ctypes.c_uint(each) for each in (blocks, threads, first_block, shared))
    getattr(library, f"host_{function.name}")(*numbers, pointers)
    if checked:
        _raise_faults(function, library)


def _check_launch(function: CudaFunction, blocks: int, threads: int, shared: int) -> None:
    bounds = re.search(rf"__launch_bounds__\((\d+)[^)]*\) {function.name}\(", function.code)
    most = min(int(bounds[1]), MOST_THREADS) if bounds else MOST_UNBOUNDED
    if not (0 < threads <= most and 0 < blocks < 2**31):
        raise Fault(f"{function.name} of {blocks} blocks of {threads} threads, of at most 2**31 - 1 and {most}")
    if shared > MOST_SHARED:
        raise Fault(f"{function.name} with {shared} bytes of shared memory, of at most {MOST_SHARED}")


def _regions(arrays: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
    """Where memory of the arrays begins, its bytes, and those of an element; arrays that overlap as one."""
    regions: list[tuple[int, int, int]] = []
    for first, end, size in sorted((*byte_bounds(each), each.itemsize) for each in arrays if each.size):
        if regions and first < sum(regions[-1][:2]):
            start, bytes_, least = regions.pop()
            regions.append((start, max(end - start, bytes_), min(size, least)))
        else:
            regions.append((first, end - first, size))
    return regions


def _raise_faults(function: CudaFunction, library: ctypes.CDLL) -> None:
    library.checks_finding.restype = ctypes.c_char_p
    numbers, lines = itertools.count(), []
    for text in iter(lambda: library.checks_finding(ctypes.c_size_t(next(numbers))), None):
        place, other, what, who = text.decode().split("\t")
        lines.append(f"{who}: {what}\n    {_line(library, int(place))}")
        if int(other):
            lines.append(f"    and {_line(library, int(other))}")
    if lines:
        raise Fault(f"{function.name}:\n" + "\n".join(lines))


def _line(library: ctypes.CDLL, place: int) -> str:
    """The lines of source at a place of a library: those of functions within each other."""
    command = ["addr2line", "-i", "-e", library._name, hex(place)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    source = Path(library._name).with_suffix(".cpp").read_text("utf-8").splitlines()
    numbers = [int(found) for found in re.findall(r":(\d+)", output)]
    return "\n      in ".join(source[number - 1].strip() for number in numbers)


@functools.cache
def _loaded(code: str, defines: tuple[str, ...], checked: bool) -> ctypes.CDLL:
    return ctypes.CDLL(str(_library(code, defines, checked)))


def _library(code: str, defines: tuple[str, ...], checked: bool) -> Path:
    """The compiled library, in a folder that all processes of a user share; beside one with checks lies its source."""
    if COMPILER is None:
        pytest.skip("no C++ compiler, which the stand-in needs for CUDA functions")
    code = EXTERN.sub(r"\1* const \2 = (\1*)host::shared_memory(sizeof(\1));", code)
    if checked:
        size_of_element = r"sizeof(typename checks::ElementOf<decltype(\1)>::Type)"
        code = DECLARATION.sub(rf"\g<0> checks::share(&\1, sizeof(\1), {size_of_element});", code)
    text = "\n".join([HEADER.read_text("utf-8"), code, *_entries(code)])
    parts = [COMPILER, C_HEADERS, *FLAGS, *defines, text, *((CHECKED, CHECKS.read_text("utf-8")) if checked else ())]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"mpishard-cuda-on-host-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        # Ranks and workers of pytest come here together: one compiles, the others wait for it.
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _make(text, defines, library, checked)
    return library


def _make(text: str, defines: tuple[str, ...], library: Path, checked: bool) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        source, made = Path(work) / "source.cpp", Path(work) / "made.so"
        source.write_text(text, "utf-8")
        if checked:
            compiled = Path(work) / "compiled.o"
            _compile(C_HEADERS, *CHECKED.split(), *defines, "-c", str(source), "-o", str(compiled))
            _compile("-Wl,-Bsymbolic", str(compiled), str(CHECKS), "-o", str(made))
            os.replace(source, library.with_suffix(".cpp"))
        else:
            _compile(C_HEADERS, *defines, str(source), "-o", str(made))
        os.replace(made, library)


def _compile(*options: str) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *FLAGS, *options], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} refuses CUDA source for the host:\n{done.stderr[:4000]}")


def _entries(code: str) -> list[str]:
    """For each CUDA function one that gets pointers to its arguments."""
    entries = []
    for name, text in FUNCTION.findall(code):
        types = [each.type + " *" * each.is_array for each in parse_parameters(text)]
        values = [f"*({each} *)given[{number}]" for number, each in enumerate(types)]
        entries.append(
            f"static void call_{name}(void** given) {{ checks::call({', '.join([name, *values])}); }}\n"
            f'extern "C" void host_{name}(unsigned int blocks, unsigned int threads, unsigned int first, '
            f"unsigned int shared, void** given) {{ host::run(blocks, threads, first, shared, call_{name}, given); }}"
        )
    return entries
