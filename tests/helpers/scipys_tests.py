"""Runs a file of SciPy's own tests on `minimize` and `least_squares` of mpishard: ``scipys_tests.py test_optimize``.

Calls that nothing here is for go to SciPy, see `minimize` and `least_squares` below.  A test that fails though it calls
ours has its reason in `LEFT_OUT`; it is expected to fail.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import optimize
from scipy.optimize import _minimize

import mpishard

IGNORED = ("eps", "iprint", "finite_diff_rel_step")  # options without a meaning here
METHODS = ("l-bfgs-b", "cg", "newton-cg", "trust-ncg")
# By file and reason the names of tests.
LEFT_OUT = {
    "test_lbfgsb_hessinv": {"pairs lie on the ranks, and are no sk and yk": ["test_3"]},
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
        "messages are others": [
            "TestOptimizeSimple::test_l_bfgs_b_maxiter",
            *(
                f"TestOptimizeSimple::test_callback_stopiteration[{number}-{method}]"
                for number in range(3)
                for method in METHODS
            ),
            "TestOptimizeSimple::test_minimize_invalid_bounds[l-bfgs-b]",
            "test_all_bounds_equal[L-BFGS-B]",
        ],
        "an unknown option, and a count that is none, are errors": [
            "TestOptimizeSimple::test_minimize_warnings_gh1953[cg]",
            "test_minimize_maxiter_noninteger[cg]",
            "test_minimize_maxiter_noninteger[l-bfgs-b]",
        ],
        "the difference of an element that cannot move is 0, not NaN": [
            f"test_equal_bounds[{callback}-constraints{number}-{form}-kwds0-L-BFGS-B]"
            for callback in ("None", "callback")
            for number in (0, 1)
            for form in ("<lambda>", "Bounds")
        ],
        "differences by processes are SciPy's, and the others not": [
            f"TestWorkers::test_smoke[{method}-{workers}]" for method in ("l-bfgs-b", "CG") for workers in (None, 2)
        ],
        "an intermediate result is of mpishard": [
            f"test_equal_bounds[callback2-constraints{number}-{form}-kwds{kind}-L-BFGS-B]"
            for number in (0, 1)
            for form in ("<lambda>", "Bounds")
            for kind in (0, 1, 2)
        ],
    },
    "test_least_squares": {
        "tr_options are those of Gauss-Newton steps by conjugate gradients": [
            "TestTRF::test_tr_options",
            "TestTRF::test_wrong_parameters",
            "TestDogbox::test_wrong_parameters",
            "TestTRF::test_lsmr_regularization",
        ],
        "sparse rows are taken by exact steps, too": [
            "TestTRF::test_exact_tr_solver",
            "TestLM::test_sparse_not_supported",
        ],
        "x0 of any shape is seen as flat": ["TestTRF::test_x0_multidimensional", "TestLM::test_x0_multidimensional"],
        "what is no number is a TypeError": ["TestTRF::test_x_scale_options", "TestLM::test_x_scale_options"],
        "a bound for one unknown may be an array of one": ["TestTRF::test_inconsistent_shape"],
        "tolerances of 0 end with the last bit": [
            "TestTRF::test_error_raised_when_all_tolerances_below_eps",
            "TestLM::test_error_raised_when_all_tolerances_below_eps",
            "test_small_tolerances_for_lm",
        ],
        "differences by processes are SciPy's, and the others not": ["TestLM::test_workers"],
        'tr_solver="lsmr" of "lm" is an error': ["TestLM::test_rosenbrock"],
        "njev of the last point, which SciPy does not know of MINPACK": ["TestLM::test_full_result"],
        "it ends by its tolerances 1.007e-5 from the minimum, and 1e-5 is asked": ["TestTRF::test_rosenbrock_bounds"],
        "fewer residuals than unknowns are taken by Levenberg-Marquardt": [
            "TestLM::test_rosenbrock_cropped",
            "TestLM::test_m_less_n_not_supported",
        ],
    },
}
_MINIMIZE, _LEAST_SQUARES = optimize.minimize, optimize.least_squares
_calls: list[str] = []  # of mpishard, in the test that runs


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
    if not known or second or "workers" in (options or {}):
        return _MINIMIZE(fun, x0, args, method, jac, hess, hessp, bounds, constraints, tol, callback, options)
    _calls.append(method)
    given = {name: value for name, value in (options or {}).items() if name not in IGNORED}
    given |= {"hess_inv": True} if method.lower() == "l-bfgs-b" else {}
    jac = "2-point" if jac is None or jac is False else jac
    found = mpishard.minimize(fun, x0, args, method, jac, hess, hessp, bounds, (), tol, callback, given)
    return optimize.OptimizeResult(found)


def least_squares(*args: Any, **given: Any) -> Any:
    """SciPy's for "dogbox", the sparsity of Jacobians, and processes."""
    if given.get("method") == "dogbox" or "jac_sparsity" in given or "workers" in given:
        return _LEAST_SQUARES(*args, **given)
    _calls.append("least_squares")
    return optimize.OptimizeResult(mpishard.least_squares(*args, **given))


class Plugin:
    """Marks what is expected to fail, and counts the tests that call mpishard."""

    def __init__(self, left_out: dict[str, list[str]]) -> None:
        self.left_out, self.ours = left_out, 0

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            name = item.nodeid.split("::", 1)[1]
            for reason, names in self.left_out.items():
                if name in names:
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_runtest_setup(self) -> None:
        _calls.clear()

    def pytest_runtest_teardown(self) -> None:
        self.ours += bool(_calls)


def main(name: str) -> int:
    optimize.minimize = _minimize.minimize = minimize
    optimize.least_squares = least_squares
    plugin, file = Plugin(LEFT_OUT[name]), Path(optimize.__file__).parent / "tests" / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder, "--tb=short"]
        code = pytest.main([*options, str(file)], [plugin])
    print(f"{plugin.ours} tests call mpishard")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
