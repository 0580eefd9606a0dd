"""Least-squares problems besides those of `mgh`: a curve with outliers, a coefficient of a PDE, a bundle adjustment."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray


class Curve:
    """``a + b exp(-c t) + d sin(t)`` through 200 points, every tenth of which is an outlier."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.t = np.linspace(0, 10, 200)
        self.truth = np.array([0.5, 2.0, 0.7, 0.3])
        self.y = self.model(self.truth) + 0.05 * random.normal(size=200)
        self.y[::10] += random.choice([-1, 1], 20) * random.uniform(1, 5, 20)
        self.start = np.array([0.1, 1.0, 0.1, 1.0])

    def model(self, x: Array) -> Array:
        return x[0] + x[1] * np.exp(-x[2] * self.t) + x[3] * np.sin(self.t)

    def residuals(self, x: Array, own: Any = slice(None)) -> Array:
        return (self.model(x) - self.y)[own]

    def jacobian(self, x: Array, own: Any = slice(None)) -> Array:
        decay = np.exp(-x[2] * self.t)
        return np.stack([np.ones(200), decay, -x[1] * self.t * decay, np.sin(self.t)], axis=1)[own]

    jacobian_rows = jacobian


class Diffusion:
    """The coefficient k of ``-(k u')' = 1`` on 20 cells, u = 0 at both ends, from u at all nodes; its roughness counts.

    Residuals: of u at the 39 inner nodes, then the differences of neighbouring coefficients, weighted.
    """

    cells, inner = 20, 39

    def __init__(self) -> None:
        self.width = 1 / (self.inner + 1)
        self.truth = np.where(np.arange(self.cells) < 8, 1.0, 3.0)
        noise = 1e-4 * np.random.default_rng(3).normal(size=self.inner)
        self.observed = self.solve(self.truth) + noise
        self.start = np.full(self.cells, 2.0)
        self.lower, self.upper = np.full(self.cells, 0.5), np.full(self.cells, 2.9)

    def _matrix(self, k: Array) -> Array:
        edges = np.repeat(k, 2) / self.width**2
        return np.diag(edges[:-1] + edges[1:]) - np.diag(edges[1:-1], 1) - np.diag(edges[1:-1], -1)

    def solve(self, k: Array) -> Array:
        return np.linalg.solve(self._matrix(k), np.ones(self.inner))

    def residuals(self, k: Array, own: Any = slice(None)) -> Array:
        return np.concatenate([100 * (self.solve(k) - self.observed), 0.01 * np.diff(k)])[own]

    def jacobian(self, k: Array, own: Any = slice(None)) -> Array:
        u = np.concatenate([[0], self.solve(k), [0]])
        slopes = np.diff(u) / self.width**2
        right = np.zeros((self.inner, self.cells))
        for edge, slope in enumerate(slopes):  # from node edge - 1 to node edge
            if edge < self.inner:
                right[edge, edge // 2] -= slope
            if edge > 0:
                right[edge - 1, edge // 2] += slope
        # d(A u)/dk = -(what the changed fluxes add), so that A du = -dA u.
        of_u = 100 * np.linalg.solve(self._matrix(k), right)
        return np.concatenate([of_u, 0.01 * np.diff(np.eye(self.cells), axis=0)])[own]

    jacobian_rows = jacobian


@dataclass(frozen=True)
class Bundle:
    """Points seen by cameras on a circle: 6 unknowns a camera, 3 a point, 2 residuals an observation.

    The first two cameras are known, or the whole could move, turn and grow.
    """

    points: int = 1000
    cameras: int = 10
    views: int = 5  # of a point
    outliers: float = 0.0
    random: Any = field(default_factory=lambda: np.random.default_rng(11), repr=False)

    @cached_property
    def data(self) -> tuple[Array, Array, Array, Array, Array]:
        """Numbers of the camera and the point of each observation, what is observed, all true unknowns, the start."""
        random = self.random
        points = random.uniform(-1, 1, (self.points, 3))
        angles = np.linspace(0, 1.5, self.cameras)
        cameras = np.zeros((self.cameras, 6))
        cameras[:, 1], cameras[:, 5] = angles, 5.0
        cameras[:, 3:5] = random.normal(scale=0.1, size=(self.cameras, 2))
        point = np.repeat(np.arange(self.points), self.views)
        camera = np.concatenate([random.permutation(self.cameras)[: self.views] for _ in range(self.points)])
        truth = np.concatenate([cameras.reshape(-1), points.reshape(-1)])
        seen = self._project(cameras[camera], points[point])
        seen += 1e-3 * random.normal(size=seen.shape)
        start = truth + np.concatenate([np.zeros(12), 0.02 * random.normal(size=truth.size - 12)])
        return camera, point, seen, truth, start

    @property
    def start(self) -> Array:
        return self.data[4][12:]

    def _project(self, cameras: Array, points: Array) -> Array:
        vector = cameras[:, :3]
        angle = np.sqrt((vector**2).sum(axis=1, keepdims=True) + 1e-30)
        axis = vector / angle
        along = (axis * points).sum(axis=1, keepdims=True)
        turned = np.cos(angle) * points + np.sin(angle) * np.cross(axis, points) + (1 - np.cos(angle)) * along * axis
        moved = turned + cameras[:, 3:]
        return moved[:, :2] / moved[:, 2:]

    def _parts(self, x: Array, samples: Array) -> tuple[Array, Array, Array, Array]:
        camera, point, *_ = self.data
        known = np.concatenate([self.data[3][:12], x]) if x.size < self.data[3].size else x
        cameras, points = known[: 6 * self.cameras].reshape(-1, 6), known[6 * self.cameras :].reshape(-1, 3)
        return camera[samples], point[samples], cameras[camera[samples]], points[point[samples]]

    @property
    def observations(self) -> int:
        return self.points * self.views

    def residuals(self, x: Array, samples: Any = slice(None)) -> Array:
        _, _, cameras, points = self._parts(x, samples)
        return (self._project(cameras, points) - self.data[2][samples]).reshape(-1)

    def rows(self, x: Array, samples: Any = slice(None)) -> tuple[Array, Array]:
        """The values of each row of the Jacobian, (rows, 9), and their columns; negative for known unknowns."""
        camera, point, cameras, points = self._parts(x, samples)
        values = np.empty((len(camera), 2, 9))
        step = 1e-6
        for k in range(9):
            moves = [(cameras.copy(), points.copy()) for _ in range(2)]
            for (c, p), sign in zip(moves, (1, -1), strict=True):
                (c if k < 6 else p)[:, k % 6 if k < 6 else k - 6] += sign * step
            values[:, :, k] = (self._project(*moves[0]) - self._project(*moves[1])) / (2 * step)
        columns = np.concatenate(
            [6 * camera[:, None] + np.arange(6), 6 * self.cameras + 3 * point[:, None] + np.arange(3)], axis=1
        )
        return values.reshape(-1, 9), np.repeat(columns - 12, 2, axis=0)

    def jacobian(self, x: Array, samples: Any = slice(None)) -> Rows:
        values, columns = self.rows(x, samples)
        return Rows(np.where(columns < 0, 0.0, values), np.maximum(columns, 0), x.size)

    def jacobian_rows(self, x: Array, samples: Any = slice(None)) -> Array:
        """The same as an array."""
        rows = self.jacobian(x, samples)
        whole = np.zeros(rows.shape)
        np.add.at(whole, (np.arange(len(rows.values))[:, None], rows.columns), rows.values)
        return whole

    def sparse(self, x: Array, samples: Any = slice(None)) -> Any:
        """The same as a matrix of SciPy."""
        from scipy.sparse import csr_array

        rows = self.jacobian(x, samples)
        starts = np.arange(0, rows.values.size + 1, 9)
        return csr_array((rows.values.reshape(-1), rows.columns.reshape(-1), starts), shape=rows.shape)


@dataclass(frozen=True)
class Rows:
    """An operator of the shape of SciPy's: a Jacobian with as many elements in each row."""

    values: Array
    columns: Array
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), self.size

    def matvec(self, v: Array) -> Array:
        return (self.values * v[self.columns]).sum(axis=1)

    def rmatvec(self, u: Array) -> Array:
        return np.bincount(self.columns.reshape(-1), (self.values * u[:, None]).reshape(-1), self.size)
