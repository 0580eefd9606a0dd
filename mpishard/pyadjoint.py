"""`minimize` for reduced functionals of pyadjoint, whose controls many ranks may share.

Input: a ``ReducedFunctional``, and bounds and the like as fields like its controls.
Output: a result whose point is of the kind of the controls.

pyadjoint is imported by those who call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard import inverse
from mpishard.adapters.adapter import adapter_of
from mpishard.arguments import kind_of, shown
from mpishard.inverse.functions import Callback, opening
from mpishard.inverse.result import OptimizeResult

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.minimizers.method import Method
    from mpishard.record import RunRecord

Array = Any
Arrays = dict[str, Array]  # this rank's values by the number of the control

__all__ = ["minimize"]


def minimize(
    reduced: Any,
    method: str | Method = "L-BFGS-B",
    bounds: Any = None,
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    riesz: bool = False,
    mesh: Mesh | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
    **elements: Any,
) -> OptimizeResult:
    """Minimise a reduced functional of pyadjoint, from the values of its controls on the tape.

    Collective over the ranks that share the controls, none of which gets more than its part of them.  Controls that are
    numbers are those of each process, unless there is a mesh.

    Parameters
    ----------
    reduced : pyadjoint.ReducedFunctional
        It has the same value on all ranks, as ``assemble_scalar`` of dolfinx-adjoint returns it.  Its controls are all
        numbers, or all fields: those that `mpishard.Partition.of` takes, or that pyadjoint turns into vectors of PETSc.
    method : str or Method
        As for `mpishard.minimize`.  Newton methods use ``reduced.hessian``.
    bounds : pair, optional
        ``(lower, upper)``: each None, a number for all elements, a field like the control, an array of this rank's
        values, or a list of these with one for each control.
    tol : float, optional
        As for `mpishard.minimize`.
    callback : callable, optional
        As for `mpishard.minimize`; the point is of the kind of the controls.
    options : dict, optional
        As for `mpishard.minimize`.
    riesz : bool
        Precondition by the Riesz map of each control, as ``Control(m, riesz_map=...)`` names it.  Without bounds, for
        ``"L-BFGS"``, ``"CG"`` and the Newton methods.
    mesh : Mesh, optional
        Whose tensor axis has the ranks that share the controls; needed with `checkpoints` and `record`.  Default: one
        is made of their communicator, and freed in the end.
    checkpoints, resume, record : object, optional
        As for `mpishard.minimize`.
    **elements
        ``fixed``, ``inner_product``, ``preconditioner``: in the form of a bound, or a function, as for
        `mpishard.minimize`.

    Returns
    -------
    OptimizeResult
        Its ``x`` is a control like that of `reduced`, or a list of them; ``jac`` has this rank's arrays of partial
        derivatives by the number of the control.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or controls are of other ranks than the mesh; on all ranks of the mesh.
    Exception
        What `reduced` raises.
    """
    from pyadjoint import stop_annotating

    with opening(mesh, "mpishard.pyadjoint.minimize"):
        if not (hasattr(reduced, "controls") and hasattr(reduced, "derivative")):
            raise TypeError(f"reduced={shown(reduced)} must be a ReducedFunctional of pyadjoint")
        if mesh is None and (checkpoints is not None or record is not None):
            raise ValueError("checkpoints and record are of a mesh: give it, mesh=mesh")
        functional = getattr(reduced, "rf", reduced)  # that of a ReducedFunctionalNumPy
        _check_kinds(functional.controls)
        watcher = Callback(callback)
    with stop_annotating(), _mesh_of(functional.controls, mesh) as ranks:
        controls = _Controls(functional, ranks)
        with opening(ranks, "mpishard.pyadjoint.minimize"):
            pairs = controls.bounds(bounds)
            known = {name: controls.option(value) for name, value in elements.items()}

        def seen(intermediate_result: OptimizeResult) -> bool:
            intermediate_result["x"] = controls.given(intermediate_result.x)
            return watcher(lambda: intermediate_result)

        if riesz:
            known["preconditioner"] = controls.riesz
        result = inverse.minimize(
            controls.value_and_gradient,
            controls.start,
            method=method,
            hessp=controls.product,
            bounds=pairs,
            tol=tol,
            callback=seen if watcher.is_given else None,
            options=options,
            mesh=ranks,
            checkpoints=checkpoints,
            resume=resume,
            record=record,
            **known,
        )
        result["x"] = controls.given(result.x)
    return result


def _check_kinds(controls: Any) -> None:
    """Raise ValueError if some controls are numbers, and others are fields."""
    numbers = [f"{k}" for k, control in enumerate(controls) if isinstance(control.control, Real)]
    if 0 < len(numbers) < len(controls):
        raise ValueError(
            f"{len(numbers)} of {len(controls)} controls ({', '.join(numbers)}) are numbers, and the others fields: "
            "give numbers alone, or fields alone"
        )


def _mesh_of(controls: Any, mesh: Mesh | None) -> AbstractContextManager[Mesh | None]:
    """The mesh of the ranks that share the controls; None for numbers."""
    shared = [control.control for control in controls if not isinstance(control.control, Real)]
    if mesh is not None or not shared:
        return nullcontext(mesh)
    from mpishard.comm.mesh import Mesh  # with MPI, which numbers do not need

    comm = adapter_of(shared[0]).communicator(shared[0])
    return Mesh(comm, tensor=comm.size)


class _Controls:
    """The controls of a functional, as arrays by their numbers."""

    def __init__(self, reduced: Any, mesh: Mesh | None) -> None:
        self._reduced, self._controls = reduced, {f"{k}": control for k, control in enumerate(reduced.controls)}
        self._parts: dict[str, Any] = {}  # of those that are fields
        self.start: dict[str, Any] = {}
        for name, control in self._controls.items():
            value = control.tape_value()
            if isinstance(value, Real):
                self.start[name] = float(value)
            else:
                from mpishard.parameters.partition import Partition  # with MPI, which numbers do not need

                assert mesh is not None
                self.start[name] = self._parts[name] = Partition.of(value, mesh)

    def _fields(self, x: Arrays) -> list[Any]:
        """New controls with these values."""
        found = []
        for name, control in self._controls.items():
            if name in self._parts:
                found.append(self._parts[name].put(x[name], control.copy_data()))
            else:
                found.append(control.control._ad_init_object(float(x[name])))
        return found

    def _arrays(self, fields: Any) -> Arrays:
        each = dict(zip(self._controls, self._listed(fields), strict=True))
        return {name: self._array(name, field) for name, field in each.items()}

    def _array(self, name: str, field: Any) -> Array:
        return self._parts[name].get(field) if name in self._parts else np.float64(field)

    def _listed(self, given: Any) -> list[Any]:
        """One of each control, of a list, or of one for all."""
        found = list(given) if isinstance(given, list | tuple) else [given] * len(self._controls)
        if len(found) != len(self._controls):
            raise ValueError(f"got {len(found)} fields for {len(self._controls)} controls: give one for each, or one")
        return found

    def given(self, x: Arrays) -> Any:
        """The controls as the user has given them: one, or a list."""
        return self._reduced.controls.delist(self._fields(x))

    def value_and_gradient(self, x: Arrays) -> tuple[float, Arrays]:
        value = float(self._reduced(self._fields(x)))
        return value, self._arrays(self._reduced.derivative(apply_riesz=False))

    def product(self, x: Arrays, direction: Arrays) -> Arrays:
        self._reduced(self._fields(x))
        self._reduced.derivative(apply_riesz=False)  # the Hessian is that of adjoints on the tape
        return self._arrays(self._reduced.hessian(self._fields(direction), apply_riesz=False))

    def riesz(self, gradient: Arrays) -> Arrays:
        """The Riesz map of each control."""
        found = dict(gradient)
        for name, part in self._parts.items():
            control = self._controls[name]
            dual = part.put(gradient[name], control.adj_value)  # which the last derivative has left there
            found[name] = part.get(control.control._ad_convert_riesz(dual, riesz_map=control.riesz_map))
        return found

    def option(self, given: Any) -> Any:
        """An option of elements by the numbers of controls, of fields or arrays; numbers and functions stay."""
        if not isinstance(given, list | tuple | np.ndarray):
            try:
                adapter_of(given)
            except TypeError:
                return given
        each = zip(self._controls, self._listed(given), strict=True)
        return {
            name: value if value is None or isinstance(value, Real | np.ndarray) else self._array(name, value)
            for name, value in each
        }

    def bounds(self, given: Any) -> Any:
        """Pairs by the numbers of controls."""
        if given is None:
            return None
        if not isinstance(given, list | tuple) or len(given) != 2:
            raise ValueError(f"bounds={kind_of(given)} must be (lower, upper), each one for all controls or a list")
        lower, upper = (self.option(self._listed(side)) for side in given)
        return {name: (lower[name], upper[name]) for name in self._controls}
