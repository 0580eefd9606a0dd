"""``mpishard compile``: the kernels for processors, compiled once for all who use an installation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from mpishard.backend import array, exact, exact_gram, exact_norms, exact_rows, numba_cache, sparse_rows
from mpishard.backend.array import Kernel
from mpishard.backend.dual_sweeps import DualField, dual_sweeps
from mpishard.backend.grid_sweeps import chebyshev_sweep
from mpishard.backend.jit_function import compile_expected
from mpishard.backend.row_sums import add_by_tree
from mpishard.cli.output import size
from mpishard.compression import (
    BFloat16Compressor,
    Float16Compressor,
    Int8Compressor,
    PieceCompressor,
    SignCompressor,
    TopKCompressor,
    compressor,
)
from mpishard.minimizers import bounds, orthants
from mpishard.minimizers import formulas as steps
from mpishard.nn import kernels as layers
from mpishard.nn.kernel_groups import arguments_of
from mpishard.optim import formulas as rules

# The modules with formulas.  None that is imported here needs an MPI library: a container may have that of its host.
_FORMULAS = (array, rules, steps, bounds, orthants, compressor)
_MASKS = ("free",)  # arrays of formulas that are of bool
_COMPRESSORS = (Float16Compressor(), BFloat16Compressor(), Int8Compressor(), SignCompressor(), TopKCompressor())
# Kernels of layers whose results may be the bits of bfloat16.
_ROUNDING = ("layer_norm", "rms_norm", "gelu", "swiglu")


def compile(
    into: Annotated[
        Path | None,
        typer.Option(help="A folder; default: MPISHARD_KERNELS, or a folder of the installation, found by itself."),
    ] = None,
) -> None:
    """Compile the kernels once for all who use this installation.

    \b
    mpishard compile

    For whoever installs mpishard where its users cannot write, such as a module of a cluster or a container: what is
    found there is not compiled again by each user.  Run it once on each kind of node.  It compiles for the processor
    that it runs on; on another one a process compiles for itself.

    Where the installation is not to be written to, --into names a folder.  Name the same in MPISHARD_KERNELS then, and
    let nobody write to it whom its users do not trust: they run what is in it.
    """
    folder = numba_cache.kernels_folder() if into is None else into.absolute()
    try:  # before anything is compiled
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        remedy = "--into FOLDER names another" if into is None else "name another"
        raise OSError(f"no kernels can be written to {folder} ({error.strerror}); {remedy}") from error
    found = numba_cache.compile_into(folder)
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        _compile_formulas(dtype)
        _compile_sums(dtype)
        _compile_layers(dtype)
        _compile_compressors(dtype)
    _compile_least_squares()
    cell = np.ones((1, 1, 1))
    chebyshev_sweep(cell, cell.copy(), cell.copy(), (0.0, 0.0, 0.0), 1.0)
    dual = cell.reshape(1, 1, 1, 1)
    dual_sweeps(DualField(dual.copy(), dual.copy(), dual, cell), cell.copy(), cell, (cell, cell), 1.0, 1.0, 1.0, 1)
    files = list(found.rglob("*.nbc"))
    typer.echo(f"{len(files)} kernels, {size(sum(file.stat().st_size for file in files))}, in {found}")
    if folder != numba_cache.kernels_folder():
        typer.echo(f"found by export MPISHARD_KERNELS={folder}")


# The arguments of each kernel have the types of a real call, for which Numba compiles; arrays are empty or small.


def _compile_formulas(dtype: np.dtype) -> None:
    for module in _FORMULAS:
        for kernel in vars(module).values():
            if isinstance(kernel, Kernel):
                kernel.expect(np.empty(0, dtype), _MASKS)
    compile_expected()


def _compile_sums(dtype: np.dtype) -> None:
    own, received, out = np.ones(1, dtype), np.ones(1, dtype), np.empty(1, dtype)
    exact_norms.expect_norms(out, squares=True)
    exact.expect_dots(out)
    exact_rows.expect(out)
    exact_rows.expect_changes(out)
    compile_expected()
    add_by_tree(own, received, (-1, 0), (0, 1), out)


def _compile_layers(dtype: np.dtype) -> None:
    for function in [*vars(layers).values()]:
        annotations: dict[str, Any] = getattr(function, "__annotations__", {})
        if "Array" in annotations.values() and hasattr(function, "__wrapped__"):
            arrays, scalars = arguments_of(annotations, dtype)
            function(*arrays, *scalars)
            if function.__name__ in _ROUNDING and dtype == np.float32:
                result = list(annotations).index("y_nc")
                arrays[result] = arrays[result].view(np.uint16)
                function(*arrays, *scalars)


def _compile_compressors(dtype: np.dtype) -> None:
    values, rest = np.ones(8, dtype), np.empty(8, dtype)
    each: PieceCompressor
    for each in _COMPRESSORS:
        wire = np.zeros(each.nbytes(values.size, dtype), np.uint8)
        each.split(values, wire, rest)
        each.add(wire, rest)


def _compile_least_squares() -> None:
    for index in (np.uint32, np.uint64):
        rows = sparse_rows.SparseRows.of(np.eye(2))
        rows = rows._replace(columns=rows.columns.astype(index), starts=rows.starts.astype(index))
        tops = rows.divided(np.ones(2)).tops(rows.times(np.ones(2)))
        sparse_rows.values(rows.words(np.ones(2), sparse_rows.units(tops)), np.ones(1))
    matrix = exact_gram.ExactGram(np.eye(2), np.zeros((2, 2)))
    exact_gram.solve(matrix, (np.ones(2), np.zeros(2)))
    matrix.form(np.ones(2), np.ones(2))
