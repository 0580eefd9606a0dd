"""CUDA sources, and each fault in a CUDA function of its own that ``cuda_checks.cpp`` must find."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_on_host
import layer_formulas
import numpy as np
import pytest
from cuda_functions import SOURCE

from mpishard.backend.cuda_source import CudaFunction, CudaSource
from mpishard.backend.kinds import backend_of
from mpishard.nn import device_kernels

needs_compiler = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
needs_checks = pytest.mark.skipif(not cuda_on_host.checked, reason="runs with --cuda-checks")
each_order = pytest.mark.parametrize("backwards", ["", "1"])

# CUDA sources: what their signatures say, and the compiler for the host that the other tests rest on.  What
# CUDA functions compute is in `test_array.py`, on GPUs too.


@pytest.fixture
def source(tmp_path: Path) -> CudaSource:
    path = tmp_path / "some.cu"
    path.write_text(SOURCE)
    return CudaSource(path)


def on_host(function: Any, blocks: int, threads: int, *arguments: Any) -> None:
    cuda_on_host.run(function, blocks, threads, function.converted(arguments))


@needs_compiler
def test_signatures(source: CudaSource) -> None:
    assert list(source.functions)[:4] == ["block_sums", "largest_of_warp", "convert", "without_barrier"]
    function = source.function("block_sums", REAL=np.float64, STORED=np.uint16)
    found = [(each.name, each.type, each.is_array) for each in function.parameters]
    assert found == [("x", "bfloat16", True), ("sums", "double", True), ("count", "long long", False)]
    assert function is source.function("block_sums", REAL=np.float64, STORED=np.uint16)
    assert function.options == ("-std=c++17", "-DREAL=double", "-DSTORED=bfloat16")


@needs_compiler
def test_arguments_are_checked_and_converted(source: CudaSource) -> None:
    function = source.function("block_sums", REAL=np.float32, STORED=np.float32)
    x = np.zeros(3, np.float32)
    *_, count = function.converted((x, x, 3))
    assert type(count) is np.int64
    with pytest.raises(TypeError, match="x, sums, count, got 2"):
        function.converted((x, x))
    with pytest.raises(TypeError, match="sums as float32, got float64"):
        function.converted((x, np.zeros(3), 3))


@needs_compiler
@each_order
def test_barriers_and_shuffles(source: CudaSource, backwards: str, environ: Callable[..., None]) -> None:
    environ(MPISHARD_CUDA_BACKWARDS=backwards or None)
    x, sums, top = np.random.default_rng(0).standard_normal(1000), np.zeros(4), np.zeros(64)
    on_host(source.function("block_sums", REAL=np.float64, STORED=np.float64), 4, 256, x, sums, x.size)
    np.testing.assert_allclose(sums, [x[start : start + 256].sum() for start in range(0, 1000, 256)], rtol=1e-13)
    on_host(source.function("largest_of_warp", REAL=np.float64, STORED=np.float64), 1, 64, x[:64], top)
    assert np.array_equal(top, np.repeat([x[:32].max(), x[32:64].max()], 32))


@needs_compiler
def test_a_missing_barrier_shows(
    source: CudaSource, environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_on_host, "checked", False)  # which would end at the fault
    function = source.function("without_barrier", REAL=np.float32, STORED=np.float32)
    forwards, backwards = np.zeros((2, 64), np.int32)
    on_host(function, 1, 64, forwards)
    environ(MPISHARD_CUDA_BACKWARDS="1")
    on_host(function, 1, 64, backwards)
    assert not np.array_equal(forwards, backwards)


@needs_compiler
def test_threads_at_different_barriers_end_the_process(source: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_host, "checked", False)
    function = source.function("two_barriers", REAL=np.float32, STORED=np.float32)
    arguments = function, 1, 64, np.zeros(64, np.int32)
    child = multiprocessing.get_context("fork").Process(target=on_host, args=arguments, daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGABRT


# What a GPU would punish and fibers hide is found, each fault in a CUDA function of its own: ``cuda_checks.cpp``.

# By name: the body of a function, and what is found.  It has 4 blocks of 64 threads, `int* x` of as many numbers, and
# `int* y` of `count + 1`; `i` is the thread, `at` its element of x.  Those that name them have the
# arrays `shown` or `places` in shared memory.
RACE = r"race: (write, and read|read, and write)"
NOT_WRITTEN = "memory that nobody has written"
DIVERGENT, LEFT = "threads wait at different barriers or shuffles", "a barrier or shuffle of threads that are not there"
COPY = "begin_copy(places + i, x + at / 4 * 4);\n "
SHOW = "if ({}) shown[i] = i;\n __syncthreads();\n x[at] = shown[i];"
MEMORY = {"shown": "__shared__ int shown[64];\n", "places": "extern __shared__ Pack<int> places[];\n"}
FAULTS = {
    "no_barrier_after_the_stores": (
        "shown[i] = i;\n x[at] = shown[63 - i];",
        r"race: \w+, and \w+\n.*shown\[i\] = i|shown\[63 - i\]",
    ),
    "no_barrier_before_memory_is_used_again": (
        "for (int j = 0; j < 2; j++) {\n shown[i] = i;\n __syncthreads();\n x[at] = shown[63 - i];\n }",
        RACE,
    ),
    "shuffles_order_no_memory": ("shown[i] = i;\n int sum = warp_sum(i);\n x[at] = sum + shown[i ^ 1];", "race: "),
    "blocks_share_an_element": ("x[i] = 1;", r"race: write, and write"),
    "blocks_read_what_others_write": ("x[at] = x[(blockIdx.x + 1) % gridDim.x * blockDim.x + i];", r"race: "),
    "atomic_and_plain": ("atomicAdd(x, 1); if (i == 0) x[at] = *x;", r"atomic access"),
    "behind_the_end": ("if (i < count + 2) x[at] = y[i];", r"read outside of all arrays\n +if \(i < count \+ 2\)"),
    "before_the_begin": ("y[i < count ? i - 1 : 0] = 1;", "write outside of all arrays"),
    "behind_shared_memory": ("int* const all = shown;\n all[i + 1] = i;", "write outside of all arrays"),
    "outside_of_an_array_of_a_thread": (
        "int own[4] = {i, i, i, i};\n own[i % 5] = 1;\n x[at] = own[0] + own[3];",
        "index outside of a fixed array",
    ),
    "misaligned": ("if (i == 1) x[at] = ((Pack<int>*)(x + 1))->of[2];", "misaligned pointer"),
    "overflow": ("if (i == 0) x[at] = (count + 2147483647) / 2;", "overflow of +"),
    "nobody_has_written": (SHOW.format("i > 0"), NOT_WRITTEN),
    "left_by_another_block": (SHOW.format("blockIdx.x == 0"), NOT_WRITTEN),
    "copies_that_nobody_waits_for": (COPY + "y[count] = places[i].of[0];", NOT_WRITTEN),
    "copies_of_other_threads": (COPY + "end_copies();\n if (places[i ^ 1].of[0] == 5) atomicAdd(y + count, 1);", RACE),
    "behind_the_shared_memory_of_a_launch": ("places[i + 1].of[0] = i;", "write outside of all arrays"),
    "divergent_barriers": ("if (i < 32) __syncthreads();\n else __syncthreads();\n x[at] = 1;", DIVERGENT),
    "different_kinds_of_barriers": (
        "if (i == 0) __syncthreads();\n else __syncwarp();\n x[at] = 1;",
        "different barriers",
    ),
    "barrier_after_a_return": ("if (i == 5) return;\n __syncthreads();\n x[at] = 1;", LEFT),
    "shuffle_after_a_return": ("if (i == 5) return;\n x[at] = warp_sum(1);", LEFT),
    "divergent_shuffles": (
        "if (i < 7) x[at] = __shfl_sync(EVERY_LANE, i, 0);\n else x[at] = __shfl_sync(EVERY_LANE, i, 1);",
        DIVERGENT,
    ),
    "mask_without_the_lane": ("x[at] = __shfl_sync(1, i, 0);", "a mask without the lane itself"),
    "from_a_lane_outside_of_the_mask": (
        "if (i % 32 < 16) x[at] = __shfl_sync(0xffff, i, 20);\n else x[at] = __shfl_sync(0xffff0000u, i, 20);",
        "a lane that its mask does not name",
    ),
}
SOUND = """
    __shared__ int sums[2];
    for (int round = 0; round < 3; round++) {
        __syncthreads();
        shown[i] = i + round;
        __syncthreads();
        int sum = warp_sum(shown[63 - i]);
        if (i % WARP == 0) sums[i / WARP] = sum;
        __syncthreads();
        if (i < 9) x[at] = sums[0] + sums[1] + y[i];
    }
    __syncthreads();
    shown[i] = i;
    __syncwarp();
    shown[i ^ 1] += 1;
    atomicAdd(y + count, shown[i ^ 1]);
    if (i % 4 == 0) *(Pack<int>*)(x + at) = *(Pack<int>*)(x + at);
    begin_copy(places + i, y);
    end_copies();
    __syncthreads();
    if (places[i ^ 1].of[0] == 5) x[at] = 1;
"""
BLOCKS, THREADS, COUNT = 4, 64, 9


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    """All in one source, which is compiled once."""
    path = tmp_path_factory.mktemp("cuda") / "faults.cu"
    texts = [
        f'extern "C" __global__ void {name}(int* x, int* y, int count) {{\n'
        f"const int i = threadIdx.x, at = blockIdx.x * blockDim.x + i;\n"
        f"{''.join(text for array, text in MEMORY.items() if array in body)}{body}\n}}\n"
        for name, body in [*((name, body) for name, (body, _) in FAULTS.items()), ("sound", SOUND)]
    ]
    path.write_text("".join(texts))
    return CudaSource(path)


def run(function: CudaFunction) -> None:
    memory = np.zeros(BLOCKS * THREADS + 64, np.int32)
    first = -memory.ctypes.data // 4 % 4
    x, y = memory[first : first + BLOCKS * THREADS], memory[-32 : -32 + COUNT + 1]  # faults end in `memory`, too
    cuda_on_host.run(function, BLOCKS, THREADS, function.converted((x, y, COUNT)), shared=16 * THREADS)


@needs_checks
@each_order
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, backwards: str, functions: CudaSource, environ: Callable[..., None]) -> None:
    environ(MPISHARD_CUDA_BACKWARDS=backwards or None)
    with pytest.raises(cuda_on_host.Fault, match=FAULTS[name][1]) as fault:
        run(functions.function(name))
    print(fault.value)


@needs_checks
def test_sound_functions_pass_and_launches_that_a_gpu_refuses_do_not(functions: CudaSource) -> None:
    function = functions.function("sound")
    run(function)
    for blocks, threads in ((1, 288), (2**31, 64), (1, 0)):
        with pytest.raises(cuda_on_host.Fault, match="of at most"):
            cuda_on_host.run(function, blocks, threads, [])
    with pytest.raises(cuda_on_host.Fault, match="300000 bytes .*232448"):
        cuda_on_host.run(function, 1, 64, [], shared=300000)


@needs_checks
@pytest.mark.parametrize("columns", [1000, 1001])
@pytest.mark.parametrize(
    "name, shapes, scalars",
    [
        ("add_bias", ["nc", "c", "nc"], []),
        ("gelu", ["nc", "c", "nc"], []),
        ("swiglu", ["nc", "nc", "nc"], []),
        ("swiglu_backward", ["nc", "nc", "nc"], []),
        ("rms_norm", ["nc", "c", "nc", "n"], [1e-5]),
        ("cross_entropy", ["nc", "targets"], []),
        ("row_maximum", ["nc", "n"], []),
        ("exponentials", ["nc", "targets", "n", "n", "n"], [0, 1000]),
        ("lookup", ["table", "targets", "nc"], [0, 9]),
    ],
)
def test_more_elements_than_an_int_counts(
    name: str, shapes: list[str], scalars: list[float], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rows of matrices of more than 2**31 elements, of which only the last blocks run."""

    def launch_cuda(self, function, blocks, threads, arguments, reached=(), shared=0):
        cuda_on_host.run(function, blocks, threads, arguments, reached, max(0, blocks - 16), shared)

    monkeypatch.setattr(type(backend_of(np.zeros(1))), "launch_cuda", launch_cuda)
    monkeypatch.setattr(device_kernels, "PendingNumber", lambda total: float(total[0]))
    random, few, rows = np.random.default_rng(0), 4, 2**31 // columns + 10
    extents = {"nc": (few, columns), "c": columns, "table": (9, columns)}
    small, large = [], []
    for shape in shapes:
        given = random.standard_normal(extents.get(shape, few))
        small.append(np.arange(few) if shape == "targets" else given.astype(np.float32))
        large.append(small[-1].copy())
        if shape in ("nc", "n", "targets"):  # zeros take memory only where they are written
            large[-1] = np.zeros((rows, *given.shape[1:]), small[-1].dtype)
            large[-1][-few:] = small[-1]
    getattr(layer_formulas, name)(*small, *scalars)
    getattr(device_kernels, name)(*large, *scalars)
    for one, other in zip(small, large, strict=True):
        np.testing.assert_allclose(other[-few:] if len(other) == rows else other, one, rtol=1e-5, atol=1e-5)
