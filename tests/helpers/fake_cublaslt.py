"""A double of ``nvmath.bindings.cublasLt``: products with bias and GELU at raw addresses, on the stand-in's stream.

Names, enumerations and the dtypes of attributes are those of nvmath-python 1.0, see ``test_epilogues.py``.  What
cuBLASLt's documentation rules out is refused.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import standin


class Epilogue(enum.IntEnum):
    GELU_AUX_BIAS = 164


class MatmulDescAttribute(enum.IntEnum):
    EPILOGUE, BIAS_POINTER, EPILOGUE_AUX_POINTER, EPILOGUE_AUX_LD = 7, 8, 11, 12


class MatmulPreferenceAttribute(enum.IntEnum):
    MAX_WORKSPACE_BYTES = 1
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES, MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = 5, 6, 7, 8


class cuBLASLtError(Exception):
    pass


DESC_DTYPES = {7: np.uint32, 8: np.int64, 11: np.int64, 12: np.int64}
PREFERENCE_DTYPES = {1: np.uint64, 5: np.uint32, 6: np.uint32, 7: np.uint32, 8: np.uint32}
HALVES: dict[int, Any] = {2: np.float16, 14: ml_dtypes.bfloat16}
_FIELDS = [("workspace_size", "<u8"), ("state", "<i4"), ("waves_count", "<f4"), ("reserved", "<i4", (4,))]
matmul_heuristic_result_dtype = np.dtype([("algo", [("data_", "<u8", (8,))]), *_FIELDS])
MARK = 0xA160  # of a kernel that was chosen
WORKSPACE = 100
# What was executed, in order.
executed: list[Epilogue] = []
_objects: dict[int, Any] = {}
_numbers = itertools.count(1)


class MatmulHeuristicResult:
    def __init__(self, size: int = 1) -> None:
        self._data = np.zeros(size, matmul_heuristic_result_dtype)

    @property
    def ptr(self) -> int:
        return self._data.ctypes.data

    @property
    def workspace_size(self) -> int:
        return int(self._data["workspace_size"][0])

    @property
    def state(self) -> int:
        return int(self._data["state"][0])


def _made(kind: str, **fields: Any) -> int:
    number = next(_numbers)
    _objects[number] = SimpleNamespace(kind=kind, attributes={}, **fields)
    return number


def _known(number: int, kind: str) -> Any:
    assert type(number) is int and _objects[number].kind == kind
    return _objects[number]


def create() -> int:
    return _made("handle")


def matmul_desc_create(compute_type: int, scale_type: int) -> int:
    assert (compute_type, scale_type) == (68, 0)
    return _made("product")


def matmul_preference_create() -> int:
    return _made("preference")


def matmul_preference_destroy(pref: int) -> None:
    _known(pref, "preference")
    del _objects[pref]


def matrix_layout_create(type: int, rows: int, cols: int, ld: int) -> int:
    assert ld >= rows > 0 < cols
    return _made("layout", type=type, rows=rows, cols=cols, ld=ld)


def get_matmul_desc_attribute_dtype(attr: int) -> Any:
    return DESC_DTYPES[attr]


def get_matmul_preference_attribute_dtype(attr: int) -> Any:
    return PREFERENCE_DTYPES[attr]


def _set(found: Any, dtypes: dict[int, Any], attr: int, buf: int, size_in_bytes: int) -> None:
    assert size_in_bytes == np.dtype(dtypes[attr]).itemsize
    found.attributes[attr] = int(np.frombuffer(ctypes.string_at(buf, size_in_bytes), dtypes[attr])[0])


def matmul_desc_set_attribute(matmul_desc: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _set(_known(matmul_desc, "product"), DESC_DTYPES, attr, buf, size_in_bytes)


def matmul_preference_set_attribute(pref: int, attr: int, buf: int, size_in_bytes: int) -> None:
    _set(_known(pref, "preference"), PREFERENCE_DTYPES, attr, buf, size_in_bytes)


def _extents(desc: int, layouts: tuple[int, ...]) -> tuple[Any, list[Any], int]:
    """The product, its layouts and its inner extent, which fit together."""
    product = _known(desc, "product")
    a, b, c, d = found = [_known(each, "layout") for each in layouts]
    asked = {MatmulDescAttribute(each): value for each, value in product.attributes.items()}
    m, k = a.rows, a.cols
    assert (b.rows, d.rows, d.cols) == (k, m, b.cols)
    assert (c.rows, c.cols, c.ld) == (d.rows, d.cols, d.ld)
    # "Must be divisible by 8 and be no less than the number of rows in the output matrix."
    leading = asked[MatmulDescAttribute.EPILOGUE_AUX_LD]
    pointers = [asked[each] for each in (MatmulDescAttribute.BIAS_POINTER, MatmulDescAttribute.EPILOGUE_AUX_POINTER)]
    if leading % 8 or leading < m or not all(pointers) or len({each.type for each in found}) > 1:
        raise cuBLASLtError("CUBLAS_STATUS_INVALID_VALUE (7)")
    return product, found, k


def matmul_algo_get_heuristic(
    light_handle: int, operation_desc: int, adesc: int, bdesc: int, cdesc: int, ddesc: int, preference: int,
    requested_algo_count: int, heuristic_results_array: int, return_algo_count: int,
) -> None:  # fmt: skip
    _known(light_handle, "handle")
    _extents(operation_desc, (adesc, bdesc, cdesc, ddesc))
    assert _known(preference, "preference").attributes[1] >= WORKSPACE and requested_algo_count == 1
    memory: Any = (ctypes.c_char * matmul_heuristic_result_dtype.itemsize).from_address(heuristic_results_array)
    result = np.ndarray(1, matmul_heuristic_result_dtype, memory)
    result["algo"]["data_"], result["workspace_size"] = MARK, WORKSPACE
    ctypes.c_int.from_address(return_algo_count).value = 1


def matmul(
    light_handle: int, compute_desc: int, alpha: int, a: int, adesc: int, b: int, bdesc: int, beta: int, c: int,
    cdesc: int, d: int, ddesc: int, algo: int, workspace: int, workspace_size_in_bytes: int, stream: int,
) -> None:  # fmt: skip
    _known(light_handle, "handle")
    product, (left, right, _, result), _ = _extents(compute_desc, (adesc, bdesc, cdesc, ddesc))
    assert [ctypes.c_float.from_address(each).value for each in (alpha, beta)] == [1, 0]
    assert ctypes.c_uint64.from_address(algo).value == MARK and stream == standin.current_stream().ptr
    assert standin.array_at(workspace, (workspace_size_in_bytes,), np.uint8).size >= WORKSPACE
    asked, half = product.attributes, HALVES[result.type]

    def columns(address: int, rows: int, cols: int, leading: int) -> Any:
        assert address % 16 == 0, "misaligned"
        return standin.array_at(address, (rows, cols), half, (2, 2 * leading))

    epilogue = Epilogue(asked[MatmulDescAttribute.EPILOGUE])
    aux = asked[MatmulDescAttribute.EPILOGUE_AUX_POINTER], asked[MatmulDescAttribute.EPILOGUE_AUX_LD]
    operands = [
        columns(a, left.rows, left.cols, left.ld),
        columns(b, right.rows, right.cols, right.ld),
        columns(asked[MatmulDescAttribute.BIAS_POINTER], result.rows, 1, result.rows),
        columns(aux[0], result.rows, result.cols, aux[1]),
        columns(d, result.rows, result.cols, result.ld),
    ]
    executed.append(epilogue)

    def work(a: np.ndarray, b: np.ndarray, bias: np.ndarray, aux: np.ndarray, d: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            values = a.astype(np.float32) @ b.astype(np.float32) + bias.astype(np.float32)
            aux[...] = values.astype(half)
            # The tanh form.
            t = np.tanh(np.float32(np.sqrt(2 / np.pi)) * (values + np.float32(0.044715) * values**3))
            d[...] = (values / 2 * (1 + t)).astype(half)

    standin.current_stream().launch(work, *operands)
