"""python benchmarks/least_squares.py [--shift S] [--points P]

Final costs and numbers of evaluations of `mpishard.least_squares` and of SciPy's, with the same arguments: on the
problems of Moré, Garbow and Hillstrom by both methods, on a curve with outliers by all losses, on a coefficient of a
PDE between bounds, and on a bundle adjustment of P points with sparse rows, where SciPy's steps are those of LSMR.

A cost is as good as SciPy's if it is at most 1e-7 of it, ten times `ftol`, or 1e-16 above.  Where both end in different
local minima, that is marked; evaluations are compared where they end in the same one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mpishard


class Case(NamedTuple):
    """A problem with its arguments."""

    name: str
    residuals: Callable[[Any], Any]
    jacobian: Callable[[Any], Any]
    start: Any
    arguments: dict[str, Any]


def mgh_cases(method: str, shift: float) -> Iterator[Case]:
    """The problems of Moré, Garbow and Hillstrom; of "lm" those with as many residuals as unknowns."""
    from mgh import PROBLEMS

    for problem in PROBLEMS:
        pair = problem.residuals
        start = problem.start + shift
        if method == "trf" or len(pair(start)[0]) >= start.size:
            arguments = {"method": method, "max_nfev": 3000}
            yield Case(problem.name, lambda x, f=pair: f(x)[0], lambda x, f=pair: f(x)[1], start, arguments)


def further_cases(shift: float) -> Iterator[Case]:
    """Outliers, and bounds."""
    from residual_problems import Curve, Diffusion

    curve, field = Curve(), Diffusion()
    for loss in ("linear", "soft_l1", "huber", "cauchy", "arctan"):
        arguments = {"loss": loss, "f_scale": 0.1, "bounds": ([-1, 0, 0, -1], [1, 5, 2, 1])}
        yield Case(f"curve with outliers, {loss}", curve.residuals, curve.jacobian, curve.start + shift, arguments)
    bounds = field.lower, field.upper
    for scale in (1.0, "jac"):
        arguments = {"bounds": bounds, "x_scale": scale}
        yield Case(f"coefficient, x_scale={scale}", field.residuals, field.jacobian, field.start + shift, arguments)


def bundle_cases(points: int) -> Iterator[Case]:
    """Many unknowns."""
    from residual_problems import Bundle

    bundle = Bundle(points=points)
    for arguments in ({}, {"x_scale": "jac"}, {"loss": "soft_l1", "f_scale": 1e-3, "x_scale": "jac"}):
        name = f"bundle, {', '.join(map(str, arguments.values())) or 'linear'}"
        yield Case(name, bundle.residuals, bundle.sparse, bundle.start, arguments)


def compare(title: str, cases: Iterator[Case]) -> bool:
    """Print a line a problem and the sums; whether all costs are as good and the evaluations within 1.2."""
    from scipy.optimize import least_squares

    print(f"\n{title}\n{'problem':36}{'cost':>18}{'SciPy':>18}{'evals':>7}{'SciPy':>7}{'Jacobians':>10}")
    total, worse, count = np.zeros(2, int), [], 0
    for case in cases:
        with np.errstate(all="ignore"):
            mine = mpishard.least_squares(case.residuals, case.start, case.jacobian, **case.arguments)
            peer = least_squares(case.residuals, case.start, case.jacobian, **case.arguments)
        apart = abs(mine.cost - peer.cost) > 1e-3 * max(mine.cost, peer.cost, 1e-8)
        bad = mine.cost - peer.cost > max(1e-7 * peer.cost, 1e-16)
        mark = "HIGHER" if bad else "lower" if apart else ""
        total += (0, 0) if apart else (mine.nfev, peer.nfev)
        count += 1
        worse += [case.name] if bad else []
        print(
            f"{case.name:36}{mine.cost:18.10e}{peer.cost:18.10e}{mine.nfev:7d}{peer.nfev:7d}{mine.njev:10d}  "
            f"{mine.status}, {peer.status} {mark}"
        )
    ratio = total[0] / total[1]
    print(
        f"{count} problems: where both end in the same minimum {total[0]} evaluations, SciPy {total[1]}, ratio "
        f"{ratio:.3f}; costs higher: {', '.join(worse) or 'none'}"
    )
    return not worse and ratio <= 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000, help="of the bundle")
    parser.add_argument("--shift", type=float, default=0.0, help="is added to all starts")
    given = parser.parse_args()
    try:
        import scipy
    except ImportError:
        sys.exit("this benchmark compares with SciPy, which is not installed: pip install scipy")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
    print(f"SciPy {scipy.__version__}, NumPy {np.__version__}")
    good = [
        compare("method='trf'", mgh_cases("trf", given.shift)),
        compare("method='lm'", mgh_cases("lm", given.shift)),
        compare("outliers and bounds", further_cases(given.shift)),
        compare(f"bundle of {given.points} points", bundle_cases(given.points)),
    ]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
