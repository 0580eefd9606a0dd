"""Runs SciPy's own tests on `minimize`, `least_squares` and `ReverseCommunication`: ``scipys_tests.py [-k NAMES]``.

``mpirun -n 2 scipys_tests.py mesh`` makes all calls on a mesh of the ranks: all of them run each test, and what fails
on one has failed.  Of a least-squares problem each rank has its part of the rows.

Calls that nothing here is for go to SciPy, see `minimize` and `least_squares` below.  Tests that are not run have their
reason in `why_not_run`.  A test that fails though it calls ours has its reason in `LEFT_OUT`; it is expected to fail.
"""

from __future__ import annotations

import inspect
import os
import random
import re
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize, sparse
from scipy.optimize import _lbfgsb, _minimize

import mpishard

Array = Any
IGNORED = ("eps", "iprint", "finite_diff_rel_step")  # options without a meaning here
METHODS = ("l-bfgs-b", "cg", "newton-cg", "trust-ncg")
# By file and reason the names of tests.
LEFT_OUT: dict[str, dict[str, list[str]]] = {
    "test_lbfgsb_hessinv": {"pairs lie on the ranks, and are no sk and yk": ["test_3"]},
    "test_lbfgsb_setulb": {},
    "test_trustregion": {},
    "test_optimize": {
        "these are the steps of Hager and Zhang": [
            "TestOptimizeWrapperDisp::test_cg",
            "TestOptimizeWrapperNoDisp::test_cg",
            "TestOptimizeSimple::test_initial_step_scaling",
        ],
        "nfev counts points, not the calls for their finite differences": [
            "TestOptimizeSimple::test_minimize_l_bfgs_b",
            "TestOptimizeSimple::test_respect_maxiter[CG]",
            "TestOptimizeSimple::test_respect_maxiter[L-BFGS-B]",
        ],
        "messages are others, and a limit that is reached is no warning": [
            "TestOptimizeSimple::test_minimize_invalid_bounds[l-bfgs-b]",
            "TestOptimizeSimple::test_minimize_warnings_gh1953[cg]",
            "test_all_bounds_equal[L-BFGS-B]",
        ],
        "a count that is no whole number is an error": [
            "test_minimize_maxiter_noninteger[cg]",
            "test_minimize_maxiter_noninteger[l-bfgs-b]",
        ],
        "the difference of an element that cannot move is 0, not NaN": [
            f"test_equal_bounds[{callback}-constraints{number}-{form}-kwds0-L-BFGS-B]"
            for callback in ("None", "callback", "callback2")
            for number in (0, 1)
            for form in ("<lambda>", "Bounds")
        ],
    },
    "test_least_squares": {
        "tr_options are those of Gauss-Newton steps by conjugate gradients": [
            "TestTRF::test_tr_options",
            "TestTRF::test_wrong_parameters",
            "TestTRF::test_lsmr_regularization",
        ],
        "steps by conjugate gradients are not solved for as exact ones": ["TestTRF::test_numerical_jac"],
        "sparse rows are taken by exact steps, too": [
            "TestTRF::test_exact_tr_solver",
            "TestLM::test_sparse_not_supported",
        ],
        "x0 of any shape is seen as flat": ["TestTRF::test_x0_multidimensional", "TestLM::test_x0_multidimensional"],
        "a bound for one unknown may be an array of one": ["TestTRF::test_inconsistent_shape"],
        "tolerances of 0 end with the last bit": [
            "TestTRF::test_error_raised_when_all_tolerances_below_eps",
            "TestLM::test_error_raised_when_all_tolerances_below_eps",
            "test_small_tolerances_for_lm",
        ],
        "njev of the last point, which SciPy does not know of MINPACK": ["TestLM::test_full_result"],
        "it ends by its tolerances 1.007e-5 from the minimum, and 1e-5 is asked": ["TestTRF::test_rosenbrock_bounds"],
        "fewer residuals than unknowns are taken by Levenberg-Marquardt": [
            "TestLM::test_rosenbrock_cropped",
            "TestLM::test_m_less_n_not_supported",
        ],
    },
}
LEFT_OUT_ON_RANKS: dict[str, dict[str, list[str]]] = {
    "test_optimize": {
        "ranks share the calls of differences, and so a value that counts them is another on each": [
            f"TestOptimizeSimple::test_nan_values[{method}]" for method in ("cg", "l-bfgs-b")
        ],
    },
}
# What SciPy's tests expect in messages, by what ours begin with.
MESSAGES = {
    "stopped: the callback": "`callback` raised `StopIteration`",
    "stopped: the number of iterations": "STOP: TOTAL NO. OF ITERATIONS REACHED LIMIT",
}
_START, _NEW_X, _VALUE, _END = 0, 1, 3, 4  # of SciPy's `setulb`
_MINIMIZE, _LEAST_SQUARES, _SETULB = optimize.minimize, optimize.least_squares, _lbfgsb.setulb
_calls: list[str] = []  # of mpishard, in the test that runs
_loops: dict[int, mpishard.ReverseCommunication] = {}  # of `setulb`, by the address of its memory
_mesh: Any = None  # of all ranks


def minimize(
    fun: Any,
    x0: Any,
    args: Any = (),
    method: Any = None,
    jac: Any = None,
    hess: Any = None,
    hessp: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: Any = None,
    callback: Any = None,
    options: Any = None,
) -> Any:
    """SciPy's for methods that are not here, for finite differences of Hessians, and for processes."""
    known = isinstance(method, str) and method.lower() in METHODS and not constraints
    second = known and method.lower() in METHODS[2:] and not (callable(hess) or callable(hessp))
    if not known or second:
        return _MINIMIZE(fun, x0, args, method, jac, hess, hessp, bounds, constraints, tol, callback, options)
    _calls.append(method)
    given = {name: value for name, value in (options or {}).items() if name not in IGNORED}
    given |= {"hess_inv": True} if method.lower() == "l-bfgs-b" else {}
    jac = "2-point" if jac is None or jac is False else jac
    arguments = args, method, jac, hess, hessp, bounds, (), tol, callback, given
    found = mpishard.minimize(fun, x0, *arguments, mesh=_mesh)
    for ours, theirs in MESSAGES.items():
        if found.message.startswith(ours):
            found.message = theirs
    return found


def least_squares(fun: Any, x0: Any, jac: Any = "2-point", *args: Any, **given: Any) -> Any:
    """SciPy's for "dogbox"."""
    if given.get("method") == "dogbox":
        return _LEAST_SQUARES(fun, x0, jac, *args, **given)
    _calls.append("least_squares")
    if _mesh is None:
        return mpishard.least_squares(fun, x0, jac, *args, **given)
    if given.get("jac_sparsity") is not None:
        given["jac_sparsity"] = _own_rows(given["jac_sparsity"], 2)
    rows = (lambda *at, **more: _own_rows(jac(*at, **more), 2)) if callable(jac) else jac
    found = mpishard.least_squares(
        lambda *at, **more: _own_rows(fun(*at, **more), 1), x0, rows, *args, mesh=_mesh, **given
    )
    parts = _mesh.world.comm.allgather((found.fun, found.jac))
    found.fun = np.concatenate([residuals for residuals, _ in parts])
    if not isinstance(found.jac, _RowsOfOperator):
        stack = sparse.vstack if sparse.issparse(found.jac) else np.vstack
        found.jac = stack([jacobian for _, jacobian in parts])
    return found


def _own_rows(found: Any, dimensions: int) -> Any:
    """This rank's rows of residuals, or of a Jacobian of two dimensions; what is neither as it is."""
    if isinstance(found, sparse.linalg.LinearOperator):
        return _RowsOfOperator(found, _own(found.shape[0]))
    if sparse.issparse(found):
        found = found.tocsr()
    else:
        found = np.atleast_1d(found) if dimensions == 1 else np.atleast_2d(found)
    return found[_own(found.shape[0])] if found.ndim == dimensions else found


def _own(rows: int) -> slice:
    return slice(rows * _mesh.rank // _mesh.size, rows * (_mesh.rank + 1) // _mesh.size)


class _RowsOfOperator:
    """Some rows of an operator."""

    def __init__(self, whole: Any, own: slice) -> None:
        self._whole, self._own = whole, own
        self.shape = own.stop - own.start, whole.shape[1]

    def matvec(self, v: Array) -> Array:
        return self._whole.matvec(v)[self._own]

    def rmatvec(self, u: Array) -> Array:
        padded = np.zeros(self._whole.shape[0])
        padded[self._own] = u
        return self._whole.rmatvec(padded)


def setulb(
    m: int, x: Array, lower: Array, upper: Array, nbd: Array, f: float, g: Array, factr: float, pgtol: float, *more: Any
) -> None:
    """A turn of SciPy's loop of L-BFGS-B in bounds: it begins, takes f and g at x, or leaves an iterate."""
    wa, _, task, _, _, _, maxls, _ = more
    if task[0] == _START:
        assert (nbd == 2).all()
        _calls.append("setulb")
        options = {"maxcor": m, "ftol": factr * np.finfo(float).eps, "gtol": pgtol, "maxls": maxls}
        bounds = list(zip(lower, upper, strict=True))
        _loops[id(wa)] = mpishard.ReverseCommunication("L-BFGS-B", x, bounds=bounds, options=options, mesh=_mesh)
    loop = _loops[id(wa)]
    if task[0] == _VALUE:
        loop.tell(f, g)
        if loop.progress.accepted:
            task[0] = _NEW_X
            return
    request = loop.ask()
    task[0] = _END if request is None else _VALUE
    if request is not None:
        x[...] = request.x


def why_not_run(item: Any) -> str:
    """The reason for which a test is not run, or nothing."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    method = given.get("method", getattr(item.cls, "method", None))
    if isinstance(method, str) and method.lower() not in (*METHODS, "trf", "lm"):
        return "there is no such method"
    if "workers" in given or item.originalname == "test_workers":
        return "processes compute differences, for which ours has ranks"
    return "" if _calls_ours(item.function) else "it calls nothing of ours"


@cache
def _calls_ours(test: Any) -> bool:
    return re.search(r"\b(minimize|least_squares|setulb)\b", inspect.getsource(test)) is not None


class Plugin:
    """Leaves out tests, marks what is expected to fail, and counts the tests that call mpishard."""

    def __init__(self) -> None:
        self.ours: Counter[str] = Counter()  # by file
        self.not_run: Counter[str] = Counter()  # by reason

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if _mesh is not None:
            from one_outcome import Agreement

            config.pluginmanager.register(Agreement(config, _mesh.world.comm), "agreement")
            if _mesh.rank > 0:
                config.pluginmanager.unregister(name="terminalreporter")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        reasons = [why_not_run(item) for item in items]
        self.not_run.update(filter(None, reasons))
        items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
        for item in items:
            file, name = item.path.stem, item.nodeid.split("::", 1)[1]
            left_out = LEFT_OUT[file] | ({} if _mesh is None else LEFT_OUT_ON_RANKS.get(file, {}))
            for reason, names in left_out.items():
                if name in names:
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_setup(self, item: Any) -> None:
        _lbfgsb.setulb = setulb if item.path.stem == "test_lbfgsb_setulb" else _SETULB
        _calls.clear()
        random.seed(0)  # the same on all ranks
        np.random.seed(0)  # noqa: NPY002 - what tests may draw from

    def pytest_runtest_teardown(self, item: Any) -> None:
        self.ours[item.path.stem] += bool(_calls)


def main(arguments: list[str]) -> int:
    global _mesh
    if "mesh" in arguments:
        os.environ.setdefault("MPISHARD_TIMEOUT", "60")
        _mesh = mpishard.Mesh()
        arguments.remove("mesh")
    is_first = _mesh is None or _mesh.rank == 0
    optimize.minimize = _minimize.minimize = minimize
    optimize.least_squares = least_squares
    plugin, tests = Plugin(), Path(optimize.__file__).parent / "tests"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "--tb=short"]
        code = pytest.main([*options, *(str(tests / f"{file}.py") for file in LEFT_OUT), *arguments], [plugin])
    if _mesh is not None:
        _mesh.free()
    if is_first:
        for reason, count in plugin.not_run.items():
            print(f"{count} tests are not run: {reason}")
        for file, count in plugin.ours.items():
            print(f"{file}: {count} tests call mpishard")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
