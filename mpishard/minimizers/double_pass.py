"""The dominant eigenpairs of a Hessian beside the precision of a prior, by a randomised double pass of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import integer
from mpishard.backend import exact
from mpishard.minimizers import small
from mpishard.minimizers.method import Limits, Method, Minimizer, Progress, Wanted
from mpishard.minimizers.space import Space

Array = Any

_EXHAUSTED = 2.0**5  # in units of rounding: what is left of an image, beside the largest one, when there are no more
_NEGLIGIBLE = 1e-11  # the norm of what is left of an image of prior noise, whose eigenvalues are about as large
_DOUBTFUL = 2.0**8  # in units of the root of rounding: what is left, beside the image, may be errors of the solves
_NEGATIVE = 1e-4  # the cosine of a vector and its product with the precision, below 0, which is not from errors
_APART = 1e-2  # the relative difference of two numbers that are equal where the operators of a prior belong together
_SAME = 1e-6  # the relative difference by which a point and a prior may differ from those of a checkpoint
_OPTIONS = ("rank", "oversampling", "power_iterations", "seed")
_BLOCK = 1 << 12  # elements of the basis that are turned at once


@dataclass(frozen=True, kw_only=True)
class DoublePass(Method):
    """The dominant eigenpairs of ``H u = lambda R u``, H the Hessian at the start and R the inner product.

    The point does not move, and all that is wanted are products.  The first pass multiplies random directions; the
    inverse of R times the products, orthonormal in the inner product of R, is a basis.  Power iterations multiply the
    basis, and make another one of the products, nearer to the eigenvectors wanted (Halko, algorithm 4.4: as the inverse
    of R times H is self-adjoint, one product a vector).  The second pass multiplies the last basis, and so gives H in
    it, whose eigenpairs are those wanted.  Where the products of new directions lie in the basis already, but for
    errors, the first pass ends before its time.

    Parameters
    ----------
    inner_product : RieszMap
        R and its inverse.
    rank : int
        How many eigenpairs are kept: those whose eigenvalues are the largest in size.
    oversampling : int
        How many more directions there are; with `rank` at most as many as elements.
    power_iterations : int
        How often the basis is multiplied and made again.
    seed : int
        Of the directions.
    factor : callable or None
        L of the inverse L L' of R.  Directions are L times white noise, as the theory of the randomised range finder
        wants it; None for white noise itself.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid.

    References
    ----------
    N. Halko, P. G. Martinsson, J. A. Tropp: Finding structure with randomness.  SIAM Review 53, 217-288 (2011).
    A. K. Saibaba, J. Lee, P. K. Kitanidis: Randomized algorithms for generalized Hermitian eigenvalue problems with
    application to computing Karhunen-Loève expansion.  Numerical Linear Algebra with Applications 23, 314-339 (2016).
    U. Villa, N. Petra, O. Ghattas: hIPPYlib.  ACM Transactions on Mathematical Software 47, 16 (2021).
    """

    needs_products: ClassVar[bool] = True
    call: ClassVar[str] = "laplace"

    rank: int = 100
    oversampling: int = 10
    power_iterations: int = 0
    seed: int = 0
    factor: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("rank", 1), ("oversampling", 0), ("power_iterations", 0), ("seed", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))

    @property
    def most_products(self) -> int:
        """The most Hessian products that are wanted."""
        return (2 + self.power_iterations) * (self.rank + self.oversampling)

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(f"basis{index}" for index in range(self.rank + self.oversampling))

    def make(self, space: Space, vectors: Array, point: Array, limits: Limits) -> DoublePassMinimizer:
        return DoublePassMinimizer(self, space, vectors, point, limits)


@dataclass(frozen=True)
class _Course:
    """How far the passes have come, as plain numbers."""

    power: int = 0  # power iterations that have begun
    second: bool = False  # in the second pass
    next: int = 0  # the number of the vector whose product is wanted, in its row
    end: int = 0  # of the vectors whose products this pass wants
    count: int = 0  # vectors of the basis that is made, or has been made
    largest: float = 0.0  # the norm of the largest image of this pass
    identity: tuple[float, ...] = ()  # sums over the point and the prior, which tell them from others; after `begin`


class DoublePassMinimizer(Minimizer):
    """The passes.  Methods are collective over the ranks of the space.

    A row has a direction, then a vector of the basis that is made of products, and at the end an eigenvector, in the
    order of `eigenvalues`; rows behind these are 0. A power iteration makes a basis in the rows of the one before.
    """

    method: DoublePass

    def __init__(self, method: DoublePass, space: Space, vectors: Array, point: Array, limits: Limits) -> None:
        super().__init__(method.slots, space, vectors, point, limits)
        self.method = method
        self.versions = [0] * len(vectors)
        self.eigenvalues: list[float] = []  # after the end: those kept, from the top, then the others by size
        self._course = _Course()
        self._tops: list[float] = []  # the largest elements of the vectors of the basis
        self._columns: list[list[float]] = []  # each image of a pass in the basis; then those of the Hessian in it

    @property
    def direction(self) -> Array:
        return self.vectors[self._course.next]

    @property
    def best(self) -> Array:
        return self.point

    @property
    def gradient(self) -> Array:
        """The point itself, as no gradient is known."""
        return self.point

    @property
    def kept(self) -> int:
        """The number of eigenpairs after the end."""
        return min(self._course.count, self.method.rank)

    @property
    def is_complete(self) -> bool:
        """Return True if there are no directions without a product."""
        return self._course.count < len(self.vectors) or self._course.count == self.space.total

    def begin(self) -> int:
        self.progress, self.stop_reason, self.wanted = Progress(), "", Wanted.PRODUCT
        self.eigenvalues, self._tops, self._columns = [], [], []
        self.vectors[...] = 0
        self.note_written()
        self._course = _Course(end=len(self.vectors), identity=self._check_prior())
        self._draw()
        return 0

    def _check_prior(self) -> tuple[float, float]:
        """Try the operators of the prior on white noise, and return the sums over the point and the prior.

        Raises ValueError unless R is symmetric, positive definite, and the inverse of the solve and of L L'.
        """
        noise, other = (self.space.white_noise(0, name) for name in ("identity", "symmetry"))
        weighted = self.point * (1 + abs(noise))
        product, crossed = self._apply(noise).copy(), self._apply(other)
        point, energy, one, two, square, solved = self.space.measured_dots(
            (self.point, weighted),
            (noise, product),
            (other, product),
            (noise, crossed),
            (product, product),
            (product, self._solve(product)),
        )
        if not energy > 0:
            raise ValueError(f"the prior's precision R must be positive definite, but v'R v = {energy:g} for some v")
        if not abs(one - two) <= _APART * math.sqrt(square):  # that is about how large they are
            raise ValueError(
                f"the prior's precision R must be symmetric, but u'R v = {one:.6g} and v'R u = {two:.6g} for some u, v"
            )
        if not abs(solved - energy) <= _APART * energy:
            raise ValueError(
                f"the prior's solve must be the inverse of its precision R, but with w = R v, w'solve(w) = "
                f"{solved:.6g} and v'R v = {energy:.6g} for some v: give functions of the same operator"
            )
        if self.limits.factor is not None:
            draw = self.limits.factor(other).copy()
            found, expected = self.space.measured_dots((draw, self._apply(draw)), (other, other))
            if not abs(found - expected) <= _APART * expected:
                raise ValueError(
                    f"the prior's factor L must have L L' = the inverse of its precision R, but with u = L v, "
                    f"u'R u = {found:.6g} and v'v = {expected:.6g} for some v: give L, not its transpose or inverse"
                )
        return point, energy

    def _draw(self) -> None:
        """Put the next random direction into its row."""
        number = self._course.next
        noise = self.space.white_noise(self.method.seed, f"direction {number}")
        self.vectors[number] = noise if self.limits.factor is None else self.limits.factor(noise)
        self.note_written(number)

    def tell(self, value: float, gradient: Array) -> None:
        raise ValueError("DoublePass wants Hessian products only, and was told a value and a gradient")

    def tell_product(self, product: Array) -> None:
        if self.wanted is Wanted.NOTHING:
            raise ValueError(f"this minimisation has ended ({self.stop_reason}); begin() starts another at its point")
        self.progress = replace(self.progress, products=self.progress.products + 1)
        if not math.isfinite(self.space.largest(product)[0]):
            self._end("not finite")
        elif self._course.second:
            self._project(product)
        else:
            self._extend(product)

    def _extend(self, product: Array) -> None:
        """Make of a product the next vector of the basis, orthonormal to the others, if anything is left of it."""
        course, image = self._course, self._solve(product)
        norm = whole = self._norm(image, product)
        self._course = course = replace(course, largest=max(course.largest, whole))
        least = max(_EXHAUSTED * self.epsilon * course.largest, 0.0 if self.limits.factor is None else _NEGLIGIBLE)
        column, left, dual, turns, before = np.zeros(course.count), image.copy(), product, 0, math.inf
        # A vector that a turn has shortened has errors along the basis.  The solve has errors, too: at least two turns.
        while norm > least and (turns < 2 or norm < 0.5 * before):
            before = norm
            coefficients = self.space.row_dots(self.vectors[: course.count], self._tops, dual, norm)
            column += coefficients
            exact.combine(self.vectors, range(course.count), [-each for each in coefficients], left, 1.0, left)
            dual, turns = self._apply(left), turns + 1
            norm = self._norm(left, dual)
        if least < norm < _DOUBTFUL * math.sqrt(self.epsilon) * whole:
            least = max(least, self._error_left(product, image, whole, column))
        if not math.isfinite(norm):
            self._end("not finite")
        elif norm == 0 and self._is_negative(left, dual):
            self._end("indefinite")
        elif norm > least:
            row = self.vectors[course.count]
            exact.combine(self.vectors, [], [], left, 1 / norm, row)
            self._tops += self.space.largest(row)
            self._columns.append([*column.tolist(), norm])
            self.note_written(course.count)
            self._course = replace(course, count=course.count + 1)
            self._go_on()
        elif course.power:
            self._go_on()
        else:  # of other directions nothing is left, either
            self._turn()

    def _error_left(self, product: Array, image: Array, whole: float, column: np.ndarray) -> float:
        """How large what is left of an image is by errors of the solve and by rounding alone, about.

        `column` is the image in the basis, so that what is left is the image less multiples of those before. All have
        an error as large as this one, beside their norms: that of the solve, by its residual.
        """
        residual = product - self._apply(image)
        error = self._norm(self._solve(residual), residual)
        count = len(self._columns)
        images = np.zeros((count, count))
        for number, each in enumerate(self._columns):
            images[: number + 1, number] = each
        multiples = small.solve_lower(images[::-1, ::-1], column[::-1, None])[::-1, 0]
        norms = [math.sqrt(small.dot(each, each)) / whole for each in self._columns]
        return error * (1 + small.dot(abs(multiples).tolist(), norms))

    def _go_on(self) -> None:
        """Want the next product of this pass, or turn to the next pass."""
        course = self._course
        if course.next + 1 == course.end:
            self._turn()
            return
        self._course = replace(course, next=course.next + 1)
        if not course.power:
            self._draw()

    def _norm(self, vector: Array, dual: Array) -> float:
        """The norm of a vector from its product with the precision."""
        (square,) = self.space.measured_dots((vector, dual))
        return math.sqrt(max(square, 0.0))

    def _is_negative(self, vector: Array, dual: Array) -> bool:
        """Whether a vector's product with the precision is below 0, beyond what errors of a solve explain."""
        product, *squares = self.space.measured_dots((vector, dual), (vector, vector), (dual, dual))
        return product < -_NEGATIVE * math.sqrt(squares[0]) * math.sqrt(squares[1])

    def _turn(self) -> None:
        """Begin the next pass, if there is a basis."""
        course = self._course
        if course.count < course.end:
            self.vectors[course.count :] = 0
            self.note_written()
        self._course = course = replace(course, next=0, end=course.count)
        if not course.count:
            self._end("rank")
        elif course.power < self.method.power_iterations:
            self._course = replace(course, power=course.power + 1, count=0, largest=0.0)
            self._tops, self._columns = [], []
        else:
            self._course, self._columns = replace(course, second=True), []

    def _project(self, product: Array) -> None:
        """Take the Hessian times a vector of the basis."""
        course = self._course
        (square,) = self.space.measured_dots((self.direction, product))
        basis = self.vectors[: course.count]
        self._columns.append(self.space.row_dots(basis, self._tops, product, abs(square)))
        if course.next + 1 < course.end:
            self._course = replace(course, next=course.next + 1)
        elif np.isfinite(self._columns).all():
            self._find_eigenpairs()
            self._end("rank")
        else:
            self._end("not finite")

    def _find_eigenpairs(self) -> None:
        """Replace the basis by eigenvectors."""
        count, found = self._course.count, np.array(self._columns)
        largest = float(abs(found).max())
        if largest > 0:
            self.progress = replace(self.progress, asymmetry=float(abs(found - found.T).max()) / largest)
        values, vectors = small.eigenpairs(0.5 * (found + found.T))
        by_size = np.argsort(-abs(values), kind="stable")
        kept, rest = by_size[: self.kept], by_size[self.kept :]
        kept = kept[np.argsort(-values[kept], kind="stable")]
        self.eigenvalues = values[[*kept, *rest]].tolist()
        for start in range(0, self.space.size, _BLOCK):
            part = self.vectors[:, start : start + _BLOCK]
            before = part[:count].copy()
            part[...] = 0
            for row, number in zip(part, kept.tolist(), strict=False):
                exact.combine(before, range(count), vectors[number].tolist(), row.copy(), 0.0, row)
        self.note_written()

    def _end(self, reason: str) -> None:
        self.wanted, self.stop_reason = Wanted.NOTHING, reason

    # -- the inner product --------------------------------------------------------------------------------------------

    def _solve(self, dual: Array) -> Array:
        """The inverse of the precision times a vector, as a new array."""
        assert self.limits.solve is not None
        return self.limits.solve(dual).copy()

    def _apply(self, vector: Array) -> Array:
        assert self.limits.apply is not None
        return self.limits.apply(vector)

    # -- saving -------------------------------------------------------------------------------------------------------

    def to_metadata(self) -> dict[str, Any]:
        return {
            **{name: getattr(self.method, name) for name in _OPTIONS},
            "wanted": self.wanted.value,
            "stop_reason": self.stop_reason,
            "progress": asdict(self.progress),
            "course": asdict(self._course),
            "tops": list(self._tops),
            "columns": [list(column) for column in self._columns],
            "eigenvalues": list(self.eigenvalues),
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        try:
            wanted, reason = Wanted(metadata["wanted"]), str(metadata["stop_reason"])
            progress, course = Progress(**metadata["progress"]), _Course(**metadata["course"])
            tops, eigenvalues = ([float(each) for each in metadata[name]] for name in ("tops", "eigenvalues"))
            columns = [[float(each) for each in column] for column in metadata["columns"]]
            identity = tuple(map(float, course.identity))
            options = {name: int(metadata[name]) for name in _OPTIONS}
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"DoublePass: the saved state cannot be restored: {error!r}") from None
        for name, value in options.items():
            if value != getattr(self.method, name):
                ours = getattr(self.method, name)
                raise ValueError(
                    f"the saved state is of {name}={value}, and this is {ours}: give the same, or start anew"
                )
        for what, own, saved in zip(("x", "prior"), self._course.identity, identity, strict=False):
            if not abs(own - saved) <= _SAME * max(abs(own), abs(saved)):
                raise ValueError(f"the checkpoint is of another {what}: give each its own folder, or resume=False")
        self.wanted, self.stop_reason, self.progress = wanted, reason, progress
        self._course, self._tops, self._columns = replace(course, identity=identity), tops, columns
        self.eigenvalues = eigenvalues
