"""Every CUDA source, generated ones too, compiled by NVIDIA's own compiler where its wheel is installed; no GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from mpishard.backend.array import Kernel, accumulate
from mpishard.backend.cuda_source import DTYPES, PRELUDE, CudaSource
from mpishard.backend.elementwise import sources_of
from mpishard.optim import formulas

PACKAGE = Path(__file__).parents[2] / "mpishard"
SOURCES = sorted(PACKAGE.glob("*/cuda/*.cu"))
# What the names of element types stand for.  A name that is not here is compiled as float.
KINDS = {
    "REAL": ("float", "double"),
    "STORED": ("float", "double", "float16", "bfloat16"),
    "FROM": ("float", "float16", "bfloat16"),
    "TO": ("float", "float16", "bfloat16"),
}
# Files that take nothing but half precision for STORED, whatever they compute in.
HALVES_ONLY = {"compressors.cu"}
# All types for this one; for the others one set of types, since types change little between processors.  Those between
# (7.5, 8.6 and 8.9) have all that their elders have.
ALL_TYPES = 90
PROCESSORS = (70, 80, 100, 120)
# What CuPy adds to the options of every source.
OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")
# Files whose results have the bits of the host, also of float32 below 2^-126, and what they may do with numbers that
# are taken for zero there: compare with large ones or with themselves, negate a large one, and convert to integers.
EXACT = ("compressors.cu", "convert.cu", "exact.cu")
HARMLESS = ("setp.gt", "setp.lt", "setp.num", "setp.nan", "neg", "cvt.rzi", "cvt.rni")
# It warns that later versions will not compile for processors before 7.5.
OLD_PROCESSORS = "nvrtc: warning: Architectures prior to"


@functools.cache
def nvrtc() -> ctypes.CDLL | None:
    """The library of the wheel of NVRTC; None where it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


pytestmark = pytest.mark.skipif(nvrtc() is None, reason="the wheel nvidia-cuda-nvrtc-cu12 is not installed")


def compiled(code: str, options: list[str], ptx: list[str] | None = None) -> tuple[int, str]:
    """NVRTC's result code and its messages; the lines of its PTX are added to a list."""
    library = nvrtc()
    assert library is not None
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"source.cu", 0, None, None) == 0
    encoded = [option.encode() for option in options]
    result = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if ptx is not None and result == 0:
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, text)
        ptx.extend(text.value.decode().splitlines())
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode().strip("\0")


@functools.cache
def known_processors() -> frozenset[int]:
    """Those that this version of NVRTC compiles for."""
    library, count = nvrtc(), ctypes.c_int()
    assert library is not None and library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    known = (ctypes.c_int * count.value)()
    assert library.nvrtcGetSupportedArchs(known) == 0
    return frozenset(known)


def choices_of_types(source: CudaSource) -> list[dict[str, str]]:
    """What the names may stand for together: a file that computes in double stores double, and no other does."""
    # The names of element types in the signatures of a file, which are not types of their own.
    names = sorted({each.type for parameters in source.functions.values() for each in parameters} - set(DTYPES))
    halves_only = source.path.name in HALVES_ONLY
    kinds_of = KINDS | ({"STORED": ("float16", "bfloat16")} if halves_only else {})
    kinds = itertools.product(*(kinds_of.get(name, ("float",)) for name in names))
    choices = [dict(zip(names, each, strict=True)) for each in kinds]
    if halves_only or not {"REAL", "STORED"} <= set(names):
        return choices
    return [each for each in choices if (each["REAL"] == "double") == (each["STORED"] == "double")]


def test_the_sources_are_found() -> None:
    assert [path for path in SOURCES if path.parts[-3] == "nn"]
    assert ALL_TYPES in known_processors()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parts[-3]}/{path.name}")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["two", "every"])
def test_compiles_without_warnings(path: Path, every: bool) -> None:
    """One set of types for the oldest processor, and one for that of all types; or every set, and every processor."""
    source = CudaSource(path)
    assert source.functions
    choices = choices_of_types(source)
    oldest, *newer = [f"compute_{processor}" for processor in PROCESSORS if processor in known_processors()]
    jobs = [(oldest, choices[0]), (f"compute_{ALL_TYPES}", choices[-1])]
    if every:
        jobs += [(f"compute_{ALL_TYPES}", each) for each in choices[:-1]]
        jobs += [(architecture, choices[0]) for architecture in newer]
        # Once down to machine code, which is slow but knows the limits of the processor.
        jobs.append((f"sm_{ALL_TYPES}", choices[0]))
    for architecture, types in jobs:
        assert_compiles(source.code, [*options_of(types), f"-arch={architecture}"])


def options_of(types: dict[str, str]) -> list[str]:
    return ["-std=c++17", *(f"-D{name}={kind}" for name, kind in types.items()), *OF_CUPY]


def assert_compiles(code: str, options: list[str]) -> None:
    result, log = compiled(code, options)
    log = "\n".join(line for line in log.splitlines() if line.strip() and not line.startswith(OLD_PROCESSORS))
    assert result == 0 and not log, f"{options}:\n{log}"


def test_generated_sources_compile_without_warnings() -> None:
    kernels = [accumulate, *(each for each in vars(formulas).values() if isinstance(each, Kernel))]
    made = sources_of(kernels)
    assert len(made) > 30
    for function in made:
        assert_compiles(function.code, [*function.options, *OF_CUPY, f"-arch=compute_{ALL_TYPES}"])
    for processor in PROCESSORS:
        if processor in known_processors():
            assert_compiles(made[0].code, [*made[0].options, *OF_CUPY, f"-arch=compute_{processor}"])


@pytest.mark.parametrize("name", EXACT)
def test_small_numbers_are_not_taken_for_zero(name: str) -> None:
    source = CudaSource(PRELUDE.with_name(name))
    for types in choices_of_types(source):
        ptx: list[str] = []
        options = [*options_of(types), "--fmad=false", f"-arch=compute_{ALL_TYPES}"]
        assert compiled(source.code, options, ptx)[0] == 0 and ptx
        flushing = {found[0] for found in (re.search(r"[a-z0-9.]+\.ftz\S*", line) for line in ptx) if found}
        assert not [instruction for instruction in flushing if not instruction.startswith(HARMLESS)]
