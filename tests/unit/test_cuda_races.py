"""What a GPU would punish and fibers hide is found, each fault in a CUDA function of its own: ``cuda_checks.cpp``."""

from __future__ import annotations

from typing import Any

import cuda_on_host
import numpy as np
import pytest

from mpishard.backend.cuda_source import CudaFunction, CudaSource
from mpishard.backend.kinds import backend_of
from mpishard.nn import device_kernels, formulas

# By name: the body of a function, and what is found.  It has 4 blocks of 64 threads, `int* x` of as many numbers, and
# `int* y` of `count + 1`; `i` is the thread, `at` its element of x.
FAULTS = {
    "no_barrier_after_the_stores": (
        """__shared__ int shown[64];
        shown[i] = i;
        x[at] = shown[63 - i];""",
        r"race: \w+, and \w+\n.*shown\[i\] = i|shown\[63 - i\]",
    ),
    "no_barrier_before_memory_is_used_again": (
        """__shared__ int shown[64];
        for (int round = 0; round < 2; round++) {
            shown[i] = i;
            __syncthreads();
            x[at] = shown[63 - i];
        }""",
        r"race: (write, and read|read, and write)",
    ),
    "shuffles_order_no_memory": (
        """__shared__ int shown[64];
        shown[i] = i;
        int sum = warp_sum(i);
        x[at] = sum + shown[i ^ 1];""",
        "race: ",
    ),
    "blocks_share_an_element": ("x[i] = 1;", r"race: write, and write"),
    "blocks_read_what_others_write": (
        "x[at] = x[(blockIdx.x + 1) % gridDim.x * blockDim.x + i];",
        r"race: ",
    ),
    "atomic_and_plain": ("atomicAdd(x, 1); if (i == 0) x[at] = *x;", r"atomic access"),
    "behind_the_end": ("if (i < count + 2) x[at] = y[i];", r"read outside of all arrays\n +if \(i < count \+ 2\)"),
    "before_the_begin": ("y[i < count ? i - 1 : 0] = 1;", "write outside of all arrays"),
    "behind_shared_memory": (
        """__shared__ int shown[64];
        int* const all = shown;
        all[i + 1] = i;""",
        "write outside of all arrays",
    ),
    "outside_of_an_array_of_a_thread": (
        """int own[4] = {i, i, i, i};
        own[i % 5] = 1;
        x[at] = own[0] + own[3];""",
        "index outside of a fixed array",
    ),
    "misaligned": ("if (i == 1) x[at] = ((Pack<int>*)(x + 1))->of[2];", "misaligned pointer"),
    "overflow": ("if (i == 0) x[at] = (count + 2147483647) / 2;", "overflow of +"),
    "nobody_has_written": (
        """__shared__ int shown[64];
        if (i > 0) shown[i] = i;
        __syncthreads();
        x[at] = shown[i];""",
        "read of shared memory that nobody has written",
    ),
    "left_by_another_block": (
        """__shared__ int shown[64];
        if (blockIdx.x == 0) shown[i] = i;
        __syncthreads();
        x[at] = shown[i];""",
        "read of shared memory that nobody has written",
    ),
    "copies_that_nobody_waits_for": (
        """extern __shared__ Pack<int> places[];
        begin_copy(places + i, x + at / 4 * 4);
        y[count] = places[i].of[0];""",
        "read of shared memory that nobody has written",
    ),
    "copies_of_other_threads": (
        """extern __shared__ Pack<int> places[];
        begin_copy(places + i, x + at / 4 * 4);
        end_copies();
        if (places[i ^ 1].of[0] == 5) atomicAdd(y + count, 1);""",
        r"race: (write, and read|read, and write)",
    ),
    "behind_the_shared_memory_of_a_launch": (
        """extern __shared__ Pack<int> places[];
        places[i + 1].of[0] = i;""",
        "write outside of all arrays",
    ),
    "divergent_barriers": (
        "if (i < 32) __syncthreads();\n else __syncthreads();\n x[at] = 1;",
        "threads wait at different barriers or shuffles",
    ),
    "different_kinds_of_barriers": (
        "if (i == 0) __syncthreads();\n else __syncwarp();\n x[at] = 1;",
        "threads of a block wait for each other at different barriers",
    ),
    "barrier_after_a_return": (
        "if (i == 5) return;\n __syncthreads();\n x[at] = 1;",
        "a barrier or shuffle of threads that are not there",
    ),
    "shuffle_after_a_return": (
        "if (i == 5) return;\n x[at] = warp_sum(1);",
        "a barrier or shuffle of threads that are not there",
    ),
    "divergent_shuffles": (
        """if (i < 7) x[at] = __shfl_sync(EVERY_LANE, i, 0);
        else x[at] = __shfl_sync(EVERY_LANE, i, 1);""",
        "threads wait at different barriers or shuffles",
    ),
    "mask_without_the_lane": ("x[at] = __shfl_sync(1, i, 0);", "a mask without the lane itself"),
    "from_a_lane_outside_of_the_mask": (
        "if (i % 32 < 16) x[at] = __shfl_sync(0xffff, i, 20);\n else x[at] = __shfl_sync(0xffff0000u, i, 20);",
        "a shuffle from a lane that its mask does not name",
    ),
}
SOUND = """
    __shared__ int shown[64];
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
    extern __shared__ Pack<int> places[];
    begin_copy(places + i, y);
    end_copies();
    __syncthreads();
    if (places[i ^ 1].of[0] == 5) x[at] = 1;
"""
pytestmark = pytest.mark.skipif(not cuda_on_host.checked, reason="runs with --cuda-checks")
BLOCKS, THREADS, COUNT = 4, 64, 9


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    """All in one source, which is compiled once."""
    path = tmp_path_factory.mktemp("cuda") / "faults.cu"
    texts = [
        f'extern "C" __global__ void {name}(int* x, int* y, int count) {{\n'
        f"const int i = threadIdx.x, at = blockIdx.x * blockDim.x + i;\n{body}\n}}\n"
        for name, body in [*((name, body) for name, (body, _) in FAULTS.items()), ("sound", SOUND)]
    ]
    path.write_text("".join(texts))
    return CudaSource(path)


def run(function: CudaFunction) -> None:
    memory = np.zeros(BLOCKS * THREADS + 64, np.int32)
    first = -memory.ctypes.data // 4 % 4
    x, y = memory[first : first + BLOCKS * THREADS], memory[-32 : -32 + COUNT + 1]  # faults end in `memory`, too
    cuda_on_host.run(function, BLOCKS, THREADS, function.converted((x, y, COUNT)), shared=16 * THREADS)


@pytest.mark.parametrize("backwards", ["", "1"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, backwards: str, functions: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    if backwards:
        monkeypatch.setenv("MPISHARD_CUDA_BACKWARDS", backwards)
    with pytest.raises(cuda_on_host.Fault, match=FAULTS[name][1]) as fault:
        run(functions.function(name))
    print(fault.value)


def test_sound_functions_pass(functions: CudaSource) -> None:
    run(functions.function("sound"))


def test_launches_that_a_gpu_refuses(functions: CudaSource) -> None:
    function = functions.function("sound")
    for blocks, threads in ((1, 288), (2**31, 64), (1, 0)):
        with pytest.raises(cuda_on_host.Fault, match="of at most"):
            cuda_on_host.run(function, blocks, threads, [])
    with pytest.raises(cuda_on_host.Fault, match="300000 bytes of shared memory, of at most 232448"):
        cuda_on_host.run(function, 1, 64, [], shared=300000)


def mostly_empty(shape: tuple[int, ...], dtype: Any, last_rows: np.ndarray) -> np.ndarray:
    """Zeros that take memory only where they are written."""
    array = np.zeros(shape, dtype)
    array[-len(last_rows) :] = last_rows
    return array


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
        ("exponentials", ["nc", "targets", "n", "n", "n"], [0]),
        ("lookup", ["table", "targets", "nc"], [0]),
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
    small, large = [], []
    for shape in shapes:
        given = random.standard_normal(
            {"nc": (few, columns), "c": columns, "n": few, "table": (9, columns)}.get(shape, few)
        )
        given = np.arange(few) if shape == "targets" else given.astype(np.float32)
        small.append(given)
        has_rows = shape in ("nc", "n", "targets")
        large.append(mostly_empty((rows, *given.shape[1:]), given.dtype, given) if has_rows else given.copy())
    getattr(formulas, name)(*small, *scalars)
    getattr(device_kernels, name)(*large, *scalars)
    for one, other in zip(small, large, strict=True):
        np.testing.assert_allclose(other[-few:] if len(other) == rows else other, one, rtol=1e-5, atol=1e-5)
