"""The least method of minimisation, and two functions of an array."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from mpishard.minimizers.method import Method, Minimizer, Progress, Wanted


@dataclass(frozen=True, kw_only=True)
class Descent(Method):
    """Projected gradient descent with a fixed step: the least that drives the loop."""

    bounds: object = None
    step: float = 0.1

    @property
    def slots(self):
        return ("base", "base_gradient")

    def make(self, space, vectors, point, limits):
        return DescentMinimizer(self, space, vectors, point, limits)


class DescentMinimizer(Minimizer):
    def __init__(self, method, space, vectors, point, limits):
        super().__init__(method.slots, space, vectors, point, limits)
        self.method = method

    def _project(self):
        before = self.point.copy()
        if self.limits.lower is not None:
            np.clip(self.point, self.limits.lower, self.limits.upper, out=self.point)
        return int((before != self.point).sum())

    def begin(self):
        return self._project()

    def tell(self, value, gradient):
        before, evaluations = self.progress, self.progress.evaluations + 1
        self.progress = replace(before, evaluations=evaluations, accepted=False)
        if not math.isfinite(value):
            return self._end("not finite")
        if value > before.value:
            return self._end("line search")
        self.row("base")[:], self.row("base_gradient")[:] = self.point, gradient
        if self.limits.fixed is not None:
            self.row("base_gradient")[self.limits.fixed] = 0
        (norm,) = self.space.largest(self.row("base_gradient"))
        self.point -= (
            self.method.step * self.row("base_gradient") * (1 if self.limits.scaling is None else self.limits.scaling)
        )
        self._project()
        (moved,) = self.space.largest(self.point - self.row("base"))
        projected = moved / self.method.step
        self.progress = Progress(
            before.iterations + (evaluations > 1), evaluations, 0, value, norm, projected, 0.1, evaluations > 1
        )
        if projected <= self.method.gtol:
            self._end("gradient")
        elif self.progress.iterations >= self.method.maxiter:
            self._end("iterations")
        elif evaluations >= self.method.maxfun:
            self._end("evaluations")

    def _end(self, reason):
        self.stop_reason, self.wanted = reason, Wanted.NOTHING
        if not math.isnan(self.progress.value):
            self.point[:] = self.row("base")

    def to_metadata(self):
        return {"progress": asdict(self.progress), "wanted": self.wanted.value, "stop_reason": self.stop_reason}

    def restore(self, metadata):
        try:
            progress, wanted = Progress(**metadata["progress"]), Wanted(metadata["wanted"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"no state of Descent: {error!r}") from None
        self.progress, self.wanted, self.stop_reason = progress, wanted, metadata["stop_reason"]


CENTER = np.array([1.0, -2.0, 3.0])


def bowl(x, *args):
    return float((x - CENTER) @ (x - CENTER)), 2 * (x - CENTER)


def rosenbrock(x):
    forward, ahead = 1 - x[:-1], x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[:-1] = -2 * forward - 400 * x[:-1] * ahead
    gradient[1:] += 200 * ahead
    return float((forward**2).sum() + 100 * (ahead**2).sum()), gradient


def curvature(x, d):
    """The Hessian of `rosenbrock` times a direction."""
    product = np.zeros_like(x)
    product[:-1] = (2 - 400 * (x[1:] - 3 * x[:-1] ** 2)) * d[:-1] - 400 * x[:-1] * d[1:]
    product[1:] += 200 * d[1:] - 400 * x[:-1] * d[:-1]
    return product
