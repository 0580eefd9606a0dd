"""Reverse communication: the caller owns the loop, and asks a minimisation what it wants next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishard.arguments import reject_unknown, shown
from mpishard.inverse.functions import Unknowns, number_of
from mpishard.inverse.result import OptimizeResult, make_method, result_of
from mpishard.inverse.run import LocalRun, MinimizationRun
from mpishard.minimizers.method import Method, Progress, Wanted

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any


@dataclass(frozen=True)
class EvaluationRequest:
    """The next evaluation that a minimisation wants.

    Parameters
    ----------
    x : 1-D array, FlatParameters, or dict, list or tuple of arrays
        The point: a copy, or the parameters themselves, to be read only.
    direction : 1-D array, or dict, list or tuple of arrays, or None
        None: value and gradient at the point are wanted.  Else the Hessian at the point times this direction is.
    """

    x: Any
    direction: Any = None


class ReverseCommunication:
    """A minimisation whose loop is the caller's.

    ::

        optimizer = ReverseCommunication("L-BFGS-B", x0, bounds=(0, None))
        while (request := optimizer.ask()) is not None:
            optimizer.tell(*value_and_gradient(request.x))
        print(optimizer.result)

    With a mesh all methods are collective over it, and so is the creation; without one nothing is.  Between `ask` and
    `tell` nothing happens: a state that is saved there resumes with the same request.

    Parameters
    ----------
    method : str or Method
        As for `minimize`.
    x0 : array, FlatParameters, or dict, list or tuple of arrays
        The start, as for `minimize`.  A FlatParameters is changed in place, others are copied.
    bounds : optional
        As for `minimize`.
    options : mapping, optional
        Of the method, as for `minimize`.
    mesh : Mesh, optional
        The ranks that minimise together.
    reduction : {None, "sum"}
        What `tell` is given on a mesh, as for `minimize`.
    **elements
        ``fixed``, ``inner_product``, ``preconditioner``: as for `minimize`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid; with a mesh on all ranks.
    """

    def __init__(
        self,
        method: str | Method,
        x0: Any,
        *,
        bounds: Any = None,
        options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        reduction: str | None = None,
        **elements: Any,
    ) -> None:
        problem: Exception | None = None
        try:
            known = {name: elements.pop(name, None) for name in ("fixed", "inner_product", "preconditioner")}
            reject_unknown("ReverseCommunication", elements)
            unknowns = Unknowns.of(x0)
            chosen, _ = make_method(method, options, None, unknowns.total, **unknowns.options(bounds, **known))
        except (TypeError, ValueError) as error:
            problem = error
        self._run: MinimizationRun
        if mesh is None:
            if problem is not None:
                raise problem
            if reduction is not None:
                raise ValueError(f"reduction={shown(reduction)} is for functions on a mesh; give mesh=mpishard.Mesh()")
            self._run = LocalRun(chosen, unknowns)
        else:
            from mpishard.inverse.mesh_run import MeshRun, agreed  # with MPI: only for those who have a mesh

            agreed(mesh, problem)
            self._run = MeshRun(chosen, unknowns, mesh, reduction)
        self._end = ""  # why the caller's loop has ended before the method
        self._is_published = False  # whether the unknowns are the point
        self._is_asked = False  # whether the caller has a request that was not answered

    # -- the loop -----------------------------------------------------------------------------------------------------

    def ask(self) -> EvaluationRequest | None:
        """The next evaluation that is wanted.

        Returns
        -------
        EvaluationRequest or None
            None if the minimisation has ended.  Asked again before `tell`, it is the same.
        """
        run, minimizer = self._run, self._run.minimizer
        if self.has_ended:
            return None
        if not self._is_published:
            run.publish(minimizer.point)
            self._is_published = True
        self._is_asked = True
        if minimizer.wanted is Wanted.GRADIENT:
            return EvaluationRequest(run.unknowns.shown_to_user())
        direction = run.whole(minimizer.direction).copy()
        return EvaluationRequest(run.unknowns.shown_to_user(), run.unknowns.like_x0(direction))

    def tell(self, value: Any, gradient: Any) -> None:
        """Give the value and the gradient at the point that was asked for.

        Parameters
        ----------
        value : float
            Of the function; NaN or infinite where it is not defined.
        gradient : array, mapping, list or tuple
            Like `x0`, or by tensor name; only read.

        Raises
        ------
        TypeError, ValueError
            If they do not fit; with a mesh on all ranks.  The state is unchanged then.
        RuntimeError
            If they were not asked for, or were given before; with a mesh on all ranks.
        """
        self._check_wanted(Wanted.GRADIENT, "value and gradient")
        problem: Exception | None = None
        plain = 0.0
        try:
            plain = number_of(value)
        except TypeError as error:
            problem = error
        self.tell_outcome(plain, gradient, problem)

    def tell_product(self, product: Any) -> None:
        """Give the Hessian at the point, times the direction that was asked for.

        Parameters
        ----------
        product : array, mapping, list or tuple
            Like `x0`, or by tensor name; only read.

        Raises
        ------
        TypeError, ValueError
            If it does not fit; with a mesh on all ranks.  The state is unchanged then.
        RuntimeError
            If it was not asked for, or was given before; with a mesh on all ranks.
        """
        self._check_wanted(Wanted.PRODUCT, "a Hessian product")
        self.tell_outcome(0.0, product, None)

    def tell_outcome(self, value: float, vector: Any, problem: BaseException | None) -> None:
        """As `tell` or `tell_product`, or the error that came instead of an answer; it is raised on all ranks.

        Parameters
        ----------
        value : float
            Of the function.
        vector : array or mapping
            The gradient or the product.
        problem : Exception or None
            What the user's function raised on this rank.
        """
        if not self._is_asked:
            problem = problem or RuntimeError(
                "told, but not asked for since the last answer; ask() gives the next point"
            )
        told_product = self._run.minimizer.wanted is Wanted.PRODUCT
        if told_product:
            self._run.tell_product(vector, problem)
        else:
            self._run.tell(value, vector, problem)
        self._is_asked = False
        # Between two products of a method the point stays where it is.
        self._is_published = told_product and self._run.minimizer.wanted is Wanted.PRODUCT
        if self._run.minimizer.wanted is Wanted.NOTHING:
            self._run.publish(self._run.minimizer.point)

    def _check_wanted(self, told: Wanted, what: str) -> None:
        wanted = Wanted.NOTHING if self._end else self._run.minimizer.wanted
        if wanted is not told:
            names = {Wanted.GRADIENT: "value and gradient (tell)", Wanted.PRODUCT: "a Hessian product (tell_product)"}
            raise RuntimeError(f"{what} was told, but {names.get(wanted, 'nothing')} is wanted; ask() says what")

    def stop(self, reason: str = "callback") -> None:
        """End the loop here: `ask` returns None, and the result is the best iterate.

        Parameters
        ----------
        reason : str
            For the message of the result; the same on all ranks.
        """
        self._end = reason
        self._run.publish(self._best)

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True when nothing is wanted any more."""
        return bool(self._end) or self._run.minimizer.wanted is Wanted.NOTHING

    @property
    def stop_reason(self) -> str:
        """The reason for the end, in a word; empty until then."""
        return self._end or self._run.minimizer.stop_reason

    @property
    def progress(self) -> Progress:
        """The progress of the minimisation."""
        return self._run.minimizer.progress

    @property
    def run(self) -> MinimizationRun:
        """The minimisation and its ranks."""
        return self._run

    @property
    def result(self) -> OptimizeResult:
        """The best iterate so far, with the fields of SciPy's result.

        A FlatParameters then has its values; while a request waits for its answer, ``x`` is a copy.
        """
        run, minimizer = self._run, self._run.minimizer
        if self._is_asked and not self.has_ended:
            x = run.unknowns.copy_of(run.whole(self._best))
        else:
            run.publish(self._best)
            self._is_published = False
            x = run.unknowns.shown_to_user()
        gradient = run.whole(minimizer.row("base_gradient")).copy()
        culprits = run.culprits or run.unknowns.doubt(self.stop_reason)
        result = result_of(x, gradient, self.stop_reason, run.method, minimizer.progress, culprits)
        result["jac"] = run.unknowns.like_x0(gradient)
        return result

    @property
    def _has_iterate(self) -> bool:
        """Return True if there was a finite value."""
        return not math.isnan(self.progress.value)

    @property
    def _best(self) -> Array:
        """The last iterate, or the start."""
        minimizer = self._run.minimizer
        return minimizer.row("base") if self._has_iterate else minimizer.point

    # -- saving -------------------------------------------------------------------------------------------------------

    def serialize(self) -> bytes:
        """Everything that it knows, the point included, as an HDF5 file image; without a mesh only.

        Returns
        -------
        bytes
            For `deserialize`.

        Raises
        ------
        ValueError
            With a mesh, where `save` writes a checkpoint.
        """
        return self._run.serialize()

    def deserialize(self, data: bytes) -> None:
        """Continue where `serialize` was called, with the same evaluation.

        The method, its options, bounds and the like are those of this object.

        Parameters
        ----------
        data : bytes
            From `serialize`.

        Raises
        ------
        ValueError, TypeError
            If these are not the bytes of such a minimisation; nothing has changed then.
        """
        self._run.deserialize(data)
        self._end, self._is_published, self._is_asked = "", False, False

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint that any number of ranks can load; with a mesh only.

        Parameters
        ----------
        folder : path
            As for `mpishard.save_checkpoint`.

        Returns
        -------
        Path
            The folder of the checkpoint.
        """
        return self._run.save(folder)

    def load(self, folder: str | Path) -> None:
        """Continue from the newest checkpoint in a folder; with a mesh only.

        Parameters
        ----------
        folder : path
            As for `mpishard.load_checkpoint`.
        """
        self._run.load(folder)
        self._end, self._is_published, self._is_asked = "", False, False
