"""A formula of one element as a loop that Numba compiles, and as CUDA functions.

There are CUDA functions for many ranges in one launch, and with largest absolute values.  The formula stands in their
source as the text that `Formula` has made of it, so that its bits are those of the host and of a launch for each range.
CuPy compiles with ``-ftz=true``, though: on a GPU a float32 below 2^-126 counts as zero in a formula, as in all kernels
of CuPy.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from mpishard.backend.cuda_source import CudaFunction, CudaSource, launch
from mpishard.backend.kinds import backend_of
from mpishard.backend.ranges import Ranges

Array = Any


FUNCTIONS = {"sqrt": 1, "abs": 1, "exp": 1, "log": 1, "tanh": 1, "copysign": 2, "min": 2, "max": 2}
_OPERATORS: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


class Formula(ast.NodeTransformer):
    """The two translations of a formula: Python source of a loop for Numba, and a C body for a CUDA kernel.

    Names that begin with an underscore belong to the loop (``_p`` is the array of the elements ``p``), names that end
    with one to the C body; a formula may use neither. Every constant becomes a value of the arrays' dtype, since a
    Python number would promote float32 to float64.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
            # From Python 3.13 on the source of a function that `exec` has made may be the command line.
            if getattr(tree, "name", "<lambda>") != function.__code__.co_name:
                raise OSError("its source is that of something else")
        except (OSError, SyntaxError) as error:
            raise TypeError(f"{function!r}: an element-wise formula must be a function in a file") from error
        if not isinstance(tree, ast.FunctionDef):
            raise TypeError("an element-wise formula is a plain function written with def")
        signature = tree.args
        if signature.vararg or signature.kwarg or signature.kwonlyargs or signature.defaults:
            self._refuse(tree, "parameters without defaults, stars or keywords")
        self.name: str = tree.name
        self.arrays: tuple[str, ...] = tuple(a.arg for a in signature.posonlyargs)
        self.scalars: tuple[str, ...] = tuple(a.arg for a in signature.args)
        self.constants: dict[str, float] = {}
        self._known = {*self.arrays, *self.scalars}
        for name in self._known:
            self._check_name(tree, name)
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        if not self.arrays or not body or not isinstance(body[-1], ast.Return):
            self._refuse(tree, "arrays before a `/` and end by returning the arrays that it changes")
        self.written, self.largest = self._returned(body[-1])
        statements = [self._statement(node) for node in body[:-1]]
        self.loop: str = self._loop([ast.unparse(node) for node in statements])
        self.c_body: str = self._c_body(statements)
        for name in self.largest:
            if name not in self._known:
                self._refuse(body[-1], f"names in largest() that it has assigned; `{name}` is none")

    def _refuse(self, node: ast.AST, wanted: str) -> NoReturn:
        code = self.function.__code__
        line = code.co_firstlineno + getattr(node, "lineno", 1) - 1
        raise TypeError(
            f"{code.co_name} (line {line} of {code.co_filename}): an element-wise formula may only have "
            f"{wanted}; found `{ast.unparse(node).splitlines()[0]}`"
        )

    def _check_name(self, node: ast.AST, name: str) -> None:
        if name.startswith("_") or name.endswith("_") or name in (*FUNCTIONS, "range"):
            self._refuse(node, "names that neither begin nor end with an underscore nor name a function")

    def _returned(self, node: ast.stmt) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The arrays that are changed, and the names of which the largest absolute values are wanted."""
        value = node.value if isinstance(node, ast.Return) else None
        names: list[str] = []
        largest: list[str] = []
        for item in value.elts if isinstance(value, ast.Tuple) else [value]:
            match item:
                case ast.Name(id=name) if name in self.arrays:
                    names.append(name)
                case ast.Call(func=ast.Name(id="largest"), args=[ast.Name(id=name)], keywords=[]):
                    largest.append(name)
                case _:
                    self._refuse(node, "a return of the names of arrays, each once, and of largest(name)")
        if len(set(names)) != len(names):
            self._refuse(node, "a return of the names of arrays, each once, and of largest(name)")
        return tuple(names), tuple(largest)

    # Checks, and rewrites into the subset common to both translations.

    def _statement(self, node: ast.stmt) -> ast.Assign:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            node = ast.copy_location(ast.Assign([node.target], value), node)
            ast.fix_missing_locations(node)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                self._check_name(node, name)
            case _:
                self._refuse(node, "assignments `name = expression`")
        if name in self.scalars:
            self._refuse(node, f"assignments to arrays and new names (`{name}` is the same for all elements)")
        value = self.visit(node.value)
        self._known.add(name)
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value, lineno=node.lineno), node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        self._refuse(node, f"+ - * /, conditional expressions and calls of {', '.join(FUNCTIONS)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._known:
            self._refuse(node, "names of its own parameters and of what it has assigned before")
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, int | float) or not math.isfinite(node.value):
            self._refuse(node, "finite numbers as constants")
        value = float(node.value)
        name = next((n for n, v in self.constants.items() if v == value), f"__c{len(self.constants)}")
        self.constants[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) not in _OPERATORS:
            self._refuse(node, "the operators + - * /")
        return ast.copy_location(ast.BinOp(self.visit(node.left), node.op, self.visit(node.right)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if not isinstance(node.op, ast.USub):
            self._refuse(node, "the operators + - * /")
        return ast.copy_location(ast.UnaryOp(node.op, self.visit(node.operand)), node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        test = node.test
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in _OPERATORS:
            self._refuse(node, "conditional expressions that compare two values")
        test = ast.Compare(self.visit(test.left), test.ops, [self.visit(test.comparators[0])])
        return ast.copy_location(ast.IfExp(test, self.visit(node.body), self.visit(node.orelse)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name is None or node.keywords or FUNCTIONS.get(name) != len(node.args):
            self._refuse(node, "calls of " + ", ".join(f"{n} (of {k})" for n, k in FUNCTIONS.items()))
        arguments = [self.visit(argument) for argument in node.args]
        if name in ("min", "max"):
            # Python's own meaning, NaN included; the libraries' fmin and fmax differ.
            first, second = arguments
            order = ast.Compare(second, [ast.Lt() if name == "min" else ast.Gt()], [first])
            return ast.copy_location(ast.IfExp(order, second, first), node)
        return ast.copy_location(ast.Call(node.func, arguments, []), node)

    # The two outputs.

    def _loop(self, statements: Sequence[str]) -> str:
        lines = [
            f"def {self.name}({', '.join('_' + name for name in (*self.arrays, *self.scalars))}):",
            f"    __real = _{self.arrays[0]}.dtype.type",
            *(f"    {name} = __real(_{name})" for name in self.scalars),
            *(f"    {name} = __real({value!r})" for name, value in self.constants.items()),
            f"    for __i in range(_{self.arrays[0]}.size):",
            *(f"        {name} = _{name}[__i]" for name in self.arrays),
            *(f"        {statement}" for statement in statements),
            *(f"        _{name}[__i] = {name}" for name in self.written),
        ]
        if self.largest:
            # Without their sign, floating-point numbers order like the integers of the same bits, NaN on top.
            at = next(number for number, line in enumerate(lines) if "range(" in line)
            for number, name in enumerate(self.largest):
                lines.insert(at, f"    __top{number} = __int64(0)")
                lines.append(f"        __bits{number} = __float64({name}).view(__int64) & __int64({2**63 - 1})")
                lines.append(f"        __top{number} = max(__top{number}, __bits{number})")
            lines.append(f"    return ({''.join(f'__top{number}, ' for number in range(len(self.largest)))})")
        return "\n".join(lines) + "\n"

    def _c_body(self, statements: Sequence[ast.Assign]) -> str:
        lines = [f"T {name}_ = array_{name};" for name in self.arrays]
        declared = set(self.arrays)
        for statement in statements:
            name = ast.unparse(statement.targets[0])
            lines.append(f"{'' if name in declared else 'T '}{name}_ = {self._c(statement.value)};")
            declared.add(name)
        lines += [f"array_{name} = {name}_;" for name in self.written]
        return "\n".join(lines)

    def _c(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return f"(T){self.constants[name]!r}" if name in self.constants else f"{name}_"
            case ast.BinOp(left=left, op=sign, right=right):
                return f"({self._c(left)} {_OPERATORS[type(sign)]} {self._c(right)})"
            case ast.Compare(left=left, ops=[order], comparators=[right]):
                return f"({self._c(left)} {_OPERATORS[type(order)]} {self._c(right)})"
            case ast.UnaryOp(operand=operand):
                return f"(-{self._c(operand)})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self._c(test)} ? {self._c(body)} : {self._c(orelse)})"
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return f"{'fabs' if name == 'abs' else name}({', '.join(map(self._c, arguments))})"
        raise AssertionError(ast.dump(node))

    def as_function(self) -> Callable[..., Any]:
        """The loop as a Python function ``(*arrays, *scalars)``, ready to be compiled by Numba."""
        # Numba keys its cache by file, line and qualified name, and checks the file's content.  The loop is
        # compiled as if it were at the lines of its formula, so that it is cached there and goes stale with it.
        # A cached function is rebuilt in the module it names, which must be one that any process can import.
        code = self.function.__code__
        namespace: dict[str, Any] = {"__name__": __name__}
        namespace |= {"__int64": np.int64, "__float64": np.float64}
        namespace |= {name: getattr(math, name) for name in FUNCTIONS if hasattr(math, name)}
        exec(compile("\n" * (code.co_firstlineno - 1) + self.loop, code.co_filename, "exec"), namespace)
        function = namespace[self.name]
        function.__qualname__ = f"{self.function.__qualname__}.loop"
        return function


# CUDA functions of formulas.

Kernel = Any  # of `mpishard.backend.array`
# Contracting a * b + c would give other bits than the host.
OPTIONS = ("--fmad=false",)
CHUNK = 4096  # elements of a block: 4 packs of float32 for each thread
_THREADS = 256
_MOST_BLOCKS = 1024


class FormulaSource:
    """The CUDA functions of one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._sources: dict[tuple[str, ...], CudaSource] = {}  # by the arrays that are masks

    def function(self, dtype: Any, masks: tuple[str, ...] = ()) -> CudaFunction:
        """The function for arrays of a dtype; those called `masks` are of bool."""
        source = self._sources.get(masks)
        if source is None:
            source = self._sources[masks] = CudaSource(None, OPTIONS, _source(self._kernel, masks))
        return source.function(_name(self._kernel), REAL=dtype)

    def over_ranges(self, rows: Sequence[Sequence[Array]], ranges: Ranges, scalars: Sequence[Sequence[float]]) -> None:
        """Queue the formula for all ranges: one launch.  Arguments as of `Kernel.over_ranges`, checked."""
        first = rows[0][0]
        launch(
            self.function(first.dtype),
            ranges.blocks(CHUNK),
            _THREADS,
            ranges.table(rows, CHUNK),
            ranges.scalars(scalars, first),
            len(ranges),
            CHUNK,
            reached=[array for row in rows for array in row],
        )

    def with_largest(self, arrays: Sequence[Array], scalars: Sequence[float]) -> list[float]:
        """Queue the formula for whole arrays, and wait for the largest absolute values."""
        first, count = arrays[0], len(self._kernel.largest)
        backend = backend_of(first)
        tops = backend.zeros(count, np.uint64, first)
        blocks = min(_MOST_BLOCKS, -(-first.size // _THREADS))
        named = zip(self._kernel.arrays, arrays, strict=True)
        masks = tuple(name for name, array in named if array.dtype == np.bool_)
        launch(self.function(first.dtype, masks), blocks, _THREADS, *arrays, *scalars, first.size, tops)
        found = np.empty(count, np.uint64)
        backend.to_host(tops, found)
        return [top if math.isfinite(top) else math.inf for top in found.view(np.float64).tolist()]


def sources_of(kernels: Iterable[Kernel]) -> list[CudaFunction]:
    """The generated functions of kernels, for float32 and for float64, in their order."""
    return [FormulaSource(kernel).function(dtype) for kernel in kernels for dtype in (np.float32, np.float64)]


def _name(kernel: Kernel) -> str:
    return f"{kernel.name}_{'with_largest' if kernel.largest else 'over_ranges'}"


def _source(kernel: Kernel, masks: Sequence[str] = ()) -> str:
    arrays = [f"{'' if name in kernel.written else 'const '}REAL" for name in kernel.arrays]
    parameters = [f"{kind}& array_{name}" for kind, name in zip(arrays, kernel.arrays, strict=True)]
    parameters += [f"const REAL {name}_" for name in kernel.scalars]
    parameters += [f"REAL& largest{number}" for number in range(len(kernel.largest))]
    found = [f"largest{number} = fabs({name}_);" for number, name in enumerate(kernel.largest)]
    element = [
        f"__device__ __forceinline__ void element({', '.join(parameters)}) {{",
        "typedef REAL T;",
        kernel.c_body,
        *found,
        "}",
    ]
    return "\n".join([*element, *(_with_largest(kernel, masks) if kernel.largest else _over_ranges(kernel)), ""])


def _over_ranges(kernel: Kernel) -> list[str]:
    """A block has one chunk of one range; see `Ranges.table`."""
    numbered = list(enumerate(kernel.arrays))
    scalars = [f"own[{number}]" for number in range(len(kernel.scalars))]
    const = {name: "" if name in kernel.written else "const " for name in kernel.arrays}
    aligned = " && ".join(f"is_aligned(all{number})" for number, _ in numbered)
    return [
        f'extern "C" __global__ void {_name(kernel)}('
        "const long long* table, const double* scalars, int ranges, int chunk) {",
        "const long long *sizes = table + ranges + 1, *choices = sizes + ranges, *addresses = choices + ranges;",
        "const int range = range_of(table, ranges, blockIdx.x);",
        "const long long begin = (blockIdx.x - table[range]) * chunk, left = sizes[range] - begin;",
        "const int size = left < chunk ? (int)left : chunk, width = sizeof(Pack<REAL>) / sizeof(REAL);",
        *(
            f"{const[name]}REAL* all{number} = ({const[name]}REAL*)addresses[{number}LL * ranges + range] + begin;"
            for number, name in numbered
        ),
        *_own_scalars(len(scalars)),
        f"const int packed = {aligned} ? size / width * width : 0;",
        "for (int i = threadIdx.x * width; i < packed; i += blockDim.x * width) {",
        *(f"Pack<REAL> pack{number} = *(const Pack<REAL>*)(all{number} + i);" for number, _ in numbered),
        "for (int j = 0; j < width; j++)",
        f"element({', '.join([*(f'pack{number}.of[j]' for number, _ in numbered), *scalars])});",
        *(f"*(Pack<REAL>*)(all{number} + i) = pack{number};" for number, name in numbered if not const[name]),
        "}",
        "for (int i = packed + threadIdx.x; i < size; i += blockDim.x)",
        f"element({', '.join([*(f'all{number}[i]' for number, _ in numbered), *scalars])});",
        "}",
    ]


def _own_scalars(count: int) -> list[str]:
    if not count:
        return []
    own = f"own[i] = (REAL)scalars[choices[range] * {count} + i];"
    return [f"REAL own[{count}];", f"for (int i = 0; i < {count}; i++) {own}"]


def _with_largest(kernel: Kernel, masks: Sequence[str]) -> list[str]:
    """Without their sign, floating-point numbers order like the integers of the same bits, NaN on top."""
    kinds = {name: "bool" if name in masks else "REAL" for name in kernel.arrays}
    arrays = [f"{'' if name in kernel.written else 'const '}{kinds[name]}* all_{name}" for name in kernel.arrays]
    numbers = range(len(kernel.largest))
    # The formula writes a mask as a number.
    given = [f"mask_{name}" if name in masks else f"all_{name}[i]" for name in kernel.arrays]
    given += [f"(REAL){name}_" for name in kernel.scalars]
    parameters = [*arrays, *(f"double {name}_" for name in kernel.scalars), "long long count"]
    return [
        f'extern "C" __global__ void {_name(kernel)}({", ".join([*parameters, "unsigned long long* tops"])}) {{',
        *(f"unsigned long long top{number} = 0;" for number in numbers),
        "for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; "
        "i += (long long)gridDim.x * blockDim.x) {",
        *(f"REAL largest{number};" for number in numbers),
        *(f"REAL mask_{name} = all_{name}[i];" for name in masks),
        f"element({', '.join([*given, *(f'largest{number}' for number in numbers)])});",
        *(f"all_{name}[i] = mask_{name} != 0;" for name in masks),
        *(
            line
            for number in numbers
            for line in (
                f"const unsigned long long bits{number} = __double_as_longlong((double)largest{number});",
                f"top{number} = bits{number} > top{number} ? bits{number} : top{number};",
            )
        ),
        "}",
        *(f"top{number} = warp_max(top{number});" for number in numbers),
        "if (threadIdx.x % WARP == 0) {",
        *(f"atomicMax(tops + {number}, top{number});" for number in numbers),
        "}",
        "}",
    ]
