"""Reverse communication: whoever owns the loop asks a minimisation what it wants next.

`ReverseCommunication` is every minimisation, that of `minimize` too. Its ranks are one of two: `OneProcess`, or those
of a mesh, `mpishard.inverse.mesh_run.MeshRanks`, which alone needs MPI.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishard.arguments import reject_unknown, shown
from mpishard.comm.errors import CaughtError
from mpishard.inverse.functions import number_of, opening
from mpishard.inverse.one_process import OneProcess
from mpishard.inverse.result import OptimizeResult, make_method, result_of
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.method import Method, Progress, Wanted

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.mesh_run import MeshRanks

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
    x0 : array, FlatParameters, Partition, or dict, list or tuple of arrays or of Partitions
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
        with opening(mesh, "ReverseCommunication") as same:
            known = {name: elements.pop(name, None) for name in ("fixed", "inner_product", "preconditioner")}
            reject_unknown("ReverseCommunication", elements)
            unknowns = Unknowns.of(x0)
            chosen, loop = make_method(method, options, None, unknowns.total, **unknowns.options(bounds, **known))
            loop.expect_no_more_results("ReverseCommunication")
            same |= {"method": type(chosen), "reduction": reduction}
        self._ranks: OneProcess | MeshRanks
        if mesh is None:
            if reduction is not None:
                unknowns.check_not_split()
                raise ValueError(f"reduction={shown(reduction)} is for functions on a mesh; give mesh=mpishard.Mesh()")
            self._ranks = OneProcess(chosen, unknowns)
        else:
            from mpishard.inverse.mesh_run import MeshRanks  # with MPI: only for those who have a mesh

            self._ranks = MeshRanks(chosen, unknowns, mesh, reduction)
        self._method, self._unknowns, self._mesh = chosen, unknowns, mesh
        self._end = ""  # why the caller's loop has ended before the method
        self._is_published = False  # the unknowns are the point
        self._is_asked = False  # the caller has a request that was not answered
        self._result: OptimizeResult | None = None  # once it has ended

    # -- the loop -----------------------------------------------------------------------------------------------------

    def ask(self) -> EvaluationRequest | None:
        """The next evaluation that is wanted.

        Returns
        -------
        EvaluationRequest or None
            None if the minimisation has ended.  Asked again before `tell`, it is the same.
        """
        ranks, minimizer, unknowns = self._ranks, self._ranks.minimizer, self._unknowns
        if self.has_ended:
            return None
        if not self._is_published:
            ranks.publish(minimizer.point)
            self._is_published = True
        self._is_asked = True
        if minimizer.wanted is Wanted.GRADIENT:
            return EvaluationRequest(unknowns.point())
        direction = ranks.gather(minimizer.direction).copy()
        return EvaluationRequest(unknowns.point(), unknowns.like_x0(direction))

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
        plain = 0.0
        with CaughtError() as caught:
            self._check_wanted(Wanted.GRADIENT, "value and gradient")
            plain = number_of(value)
        self.tell_outcome(plain, gradient, caught.error)

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
        with CaughtError() as caught:
            self._check_wanted(Wanted.PRODUCT, "a Hessian product")
        self.tell_outcome(0.0, product, caught.error)

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
        minimizer = self._ranks.minimizer
        is_product = minimizer.wanted is Wanted.PRODUCT
        self._ranks.tell("the Hessian product" if is_product else "the gradient", value, vector, problem)
        self._is_asked = False
        # Between two products of a method the point stays where it is.
        self._is_published = is_product and minimizer.wanted is Wanted.PRODUCT
        if minimizer.wanted is Wanted.NOTHING:
            self.gather_result()

    def _check_wanted(self, given: Wanted, what: str) -> None:
        wanted = Wanted.NOTHING if self._end else self._ranks.minimizer.wanted
        if wanted is not given:
            names = {Wanted.GRADIENT: "value and gradient (tell)", Wanted.PRODUCT: "a Hessian product (tell_product)"}
            raise RuntimeError(f"{what} was told, but {names.get(wanted, 'nothing')} is wanted; ask() says what")

    def stop(self, reason: str = "callback") -> None:
        """End the loop here: `ask` returns None, and the result is the best iterate.

        Parameters
        ----------
        reason : str
            For the message of the result; the same on all ranks.

        Raises
        ------
        ValueError
            On all ranks, if it differs between ranks.
        """
        with opening(self._mesh, "ReverseCommunication.stop") as same:
            same["reason"] = reason
        self._end = reason
        self.gather_result()

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True when nothing is wanted any more."""
        return bool(self._end) or self._ranks.minimizer.wanted is Wanted.NOTHING

    @property
    def stop_reason(self) -> str:
        """The reason for the end, in a word; empty until then."""
        return self._end or self._ranks.minimizer.stop_reason

    @property
    def progress(self) -> Progress:
        """The progress of the minimisation."""
        return self._ranks.minimizer.progress

    @property
    def ranks(self) -> OneProcess | MeshRanks:
        """The ranks that take part, and their parts of the vectors."""
        return self._ranks

    @property
    def result(self) -> OptimizeResult:
        """The best iterate, with the fields of SciPy's result; not collective.

        On several ranks it is there when the minimisation has ended; until then `gather_result` brings it together.

        Raises
        ------
        RuntimeError
            On several ranks, before the end.
        """
        if self._result is None and not isinstance(self._ranks, OneProcess) and self._ranks.world.size > 1:
            raise RuntimeError(
                "the minimisation has not ended, and its best iterate is divided over the ranks; call gather_result() "
                "on all of them"
            )
        return self.gather_result() if self._result is None else self._result

    def gather_result(self) -> OptimizeResult:
        """The best iterate so far, as `result` has it at the end; with a mesh collective.

        A FlatParameters then has its values; while a request waits for its answer, ``x`` is a copy.

        Returns
        -------
        OptimizeResult
            With the fields of SciPy's result.
        """
        ranks, minimizer, unknowns = self._ranks, self._ranks.minimizer, self._unknowns
        if self._is_asked and not self.has_ended:
            x = unknowns.copy_of(ranks.gather(self._best))
        else:
            ranks.publish(self._best)
            self._is_published = False
            x = unknowns.point()
        gradient, at_reference = ranks.gather(minimizer.gradient).copy(), minimizer.at_reference
        hint = ranks.culprits or unknowns.gradient_hint(self.stop_reason)
        about = self._method, minimizer.progress, hint, at_reference, minimizer.duality_gap
        result = result_of(x, gradient, self.stop_reason, *about)
        result["jac"] = unknowns.like_x0(gradient)
        self._result = result if self.has_ended else None
        return result

    @property
    def _best(self) -> Array:
        """The last iterate, or the start where no value was finite."""
        minimizer = self._ranks.minimizer
        return minimizer.point if math.isnan(self.progress.value) else minimizer.row("base")

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
        return self._one_process().serialize()

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
        self._one_process().deserialize(data)
        self._forget_loop()

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
        path = self._mesh_ranks().save(folder)
        if self.has_ended:
            self.gather_result()  # the checkpoint has the next point
        return path

    def load(self, folder: str | Path) -> None:
        """Continue from the newest checkpoint in a folder; with a mesh only.

        Parameters
        ----------
        folder : path
            As for `mpishard.load_checkpoint`.
        """
        self._mesh_ranks().load(folder)
        self._forget_loop()

    def _forget_loop(self) -> None:
        """Forget what was asked, and how it ended: the minimizer has another state. With a mesh collective."""
        self._end, self._is_published, self._is_asked, self._result = "", False, False, None
        if self.has_ended:
            self.gather_result()

    def _one_process(self) -> OneProcess:
        if not isinstance(self._ranks, OneProcess):
            raise ValueError("on a mesh save(folder) writes a checkpoint, which any number of ranks can load()")
        return self._ranks

    def _mesh_ranks(self) -> MeshRanks:
        if isinstance(self._ranks, OneProcess):
            raise ValueError("checkpoints need a mesh: give mesh=mpishard.Mesh(), or keep the bytes of serialize()")
        return self._ranks


def begin_again(optimizer: ReverseCommunication, gtol: float) -> None:
    """Minimise anew from the last iterate, to another tolerance, a function that may be another one.

    Collective over the mesh. What was learned of the curvature is kept.
    """
    set_tolerance(optimizer, gtol)
    optimizer._ranks.minimizer.begin()  # after which it has not ended
    optimizer._forget_loop()


def set_tolerance(optimizer: ReverseCommunication, gtol: float) -> None:
    """Let the minimisation that is under way end at another `gtol`."""
    optimizer._method = optimizer._ranks.minimizer.method = replace(optimizer._method, gtol=gtol)
