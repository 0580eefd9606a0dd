"""What mpishard asks of the objects of another package, and which file answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from mpishard.arguments import kind_of

Array = Any
_PACKAGES = "pylops_mpi", "devito", "dolfinx", "petsc4py", "pyadjoint"


class Adapter(ABC):
    """The objects of one package, each a field that ranks share."""

    package: str
    what: str  # the field, in messages
    remedy: str  # how a field is made on the ranks of a mesh

    @abstractmethod
    def communicator(self, field: Any) -> Any:
        """The communicator of the ranks that share the field; None where each rank has a field of its own.

        Raises TypeError or ValueError if the field is not cut into parts.
        """

    @abstractmethod
    def numbering(self, field: Any) -> dict[str, Any]:
        """Where this rank's values are in the whole field, as arguments of a Partition.  Collective over its ranks.

        Raises ValueError on all of them if that is not known.
        """

    @abstractmethod
    def values(self, field: Any) -> Array:
        """This rank's values, without copies of those of other ranks; perhaps a view.  Not collective."""

    @abstractmethod
    def put(self, values: Array, field: Any) -> None:
        """Make them this rank's values, and bring them to their copies on other ranks; perhaps collective."""


def package_of(field: Any) -> str:
    """The package that has made an object, if it is one with an adapter; else empty."""
    packages = (kind.__module__.partition(".")[0] for kind in type(field).__mro__)
    return next((package for package in packages if package in _PACKAGES), "")


def expect_no_field(what: str, given: Any, remedy: str) -> None:
    """Raise TypeError, with `what` and the way out, if an object of such a package is given where arrays belong."""
    if package := package_of(given):
        raise TypeError(f"{what} is a {type(given).__name__} of {package}: give {remedy}")


def adapter_of(field: Any) -> Adapter:
    """The adapter of the package that has made an object.  Raises TypeError if there is none."""
    if package := package_of(field):
        found = import_module(f"mpishard.adapters.{package}").ADAPTER
        assert isinstance(found, Adapter)
        return found
    raise TypeError(
        f"{kind_of(field)} is no field of {', '.join(_PACKAGES)}: give Partition(local, mesh) the values of this rank"
    )
