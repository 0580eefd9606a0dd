"""Which library multiplies what in this process."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from mpishard.backend.products.libraries import MKL, NUMPY, TAKES
from mpishard.backend.products.shapes import KINDS

VARIABLE = "MPISHARD_PRODUCTS"


@dataclass(frozen=True)
class Choice:
    """Libraries by what they multiply.

    Parameters
    ----------
    libraries : mapping of str to str
        By dtype and kind, such as ``"float32.plain"``, the name of a library; for all others NumPy's.
    """

    libraries: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def has_bfloat16(self) -> bool:
        """Whether libraries multiply all matrices of bfloat16; a model would be slower in a kind that is left."""
        return all(f"bfloat16.{kind}" in self.libraries for kind in KINDS["bfloat16"])

    @classmethod
    def parse(cls, text: str) -> Choice:
        """The choice that a text tells: a library for all, or as `str` gives it.

        Not collective.

        Parameters
        ----------
        text : str
            Such as ``"mkl"`` or ``"float32.plain=mkl,bfloat16.plain=onednn"``.

        Returns
        -------
        Choice
            Of libraries that need not be there.

        Raises
        ------
        ValueError
            If the text cannot be read.
        """
        names = [f"{dtype}.{kind}" for dtype, kinds in KINDS.items() for kind in kinds]
        if "=" in text:
            pairs = [each.partition("=") for each in text.split(",")]
            found = {name.strip(): library.strip() for name, _, library in pairs}
            if len(found) < len(pairs):
                raise ValueError(f"{VARIABLE}={text}: a kind of product is named twice")
        else:
            found = {name: text for name in names if name.partition(".")[0] in TAKES.get(text, KINDS)}
        for name, library in found.items():
            if name not in names:
                raise ValueError(f"{VARIABLE}={text}: {name!r} is none of {', '.join(names)}")
            if library not in (NUMPY, *TAKES):
                raise ValueError(
                    f"{VARIABLE}={text}: there is no library {library!r}; choose from {', '.join((NUMPY, *TAKES))}, or "
                    f"kind by kind, as float32.plain={MKL}"
                )
            if library != NUMPY and name.partition(".")[0] not in TAKES[library]:
                raise ValueError(f"{VARIABLE}={text}: {library} multiplies {' and '.join(TAKES[library])} only")
        return cls({name: library for name, library in found.items() if library != NUMPY})

    def __str__(self) -> str:
        return ",".join(f"{name}={library}" for name, library in sorted(self.libraries.items())) or NUMPY

    def limited_to(self, libraries: Collection[str], *, bfloat16: bool = True) -> Choice:
        """This choice, with NumPy's library in place of others.

        Not collective.

        Parameters
        ----------
        libraries : collection of str
            The names of those that may stay.
        bfloat16 : bool
            Whether they may stay for products of bfloat16.

        Returns
        -------
        Choice
            For no more products than this one.
        """
        return Choice(
            {
                name: library
                for name, library in self.libraries.items()
                if library in libraries and (bfloat16 or not name.startswith("bfloat16."))
            }
        )


@dataclass(frozen=True)
class Common:
    """What all ranks of a mesh can multiply by.

    Parameters
    ----------
    libraries : frozenset of str
        Those that all have, in one version.
    bfloat16 : bool
        Whether the processors of all have instructions for it.
    """

    libraries: frozenset[str] = frozenset()
    bfloat16: bool = False

    def allows(self, choice: Choice) -> bool:
        """Whether all ranks can do as this choice says.

        Not collective.

        Parameters
        ----------
        choice : Choice
            For any products.

        Returns
        -------
        bool
            The same on all ranks of the mesh.
        """
        return choice == choice.limited_to(self.libraries, bfloat16=self.bfloat16)


class Status(Enum):
    """How far the choice of this process is; a mesh brings it forward, never back."""

    UNDECIDED = "no mesh was made yet: NumPy's library multiplies all"
    FOR_NOW = "agreed with processes that will join a run, as this one will; the run's choice will take its place"
    MADE = "agreed with all ranks of a mesh; ranks that join them take it"


@dataclass
class _Process:
    """The choice of this process, and how far it is.

    It is one for all meshes: functions without a mesh multiply, too.  So the ranks of a mesh may come to differ, where
    another mesh that has only some of them brought those another choice.  That is as on nodes with different
    processors, whose BLAS differs as well: products are rounded otherwise, and all ranks still exchange the same.  A
    reproducible optimizer compares the choices of its ranks, and raises.
    """

    choice: Choice = field(default_factory=Choice)
    status: Status = Status.UNDECIDED


_process = _Process()


def in_force() -> Choice:
    """The choice of this process; NumPy's library for all, before a mesh was made.  Not collective."""
    return _process.choice


def is_made() -> bool:
    """Whether ranks that join this process are to take its choice.  Not collective."""
    return _process.status is Status.MADE


def put_in_force(
    choice: Choice, libraries: Collection[str] = (), *, bfloat16: bool = True, status: Status = Status.MADE
) -> None:
    """Multiply by these libraries from now on.

    Not collective; all ranks of a mesh do it.

    Parameters
    ----------
    choice : Choice
        What is not possible with `libraries` is left to NumPy's.
    libraries : collection of str
        Those that all ranks have.
    bfloat16 : bool
        Whether all have processors that multiply it.
    status : Status
        Of the choice.
    """
    _process.choice, _process.status = choice.limited_to(libraries, bfloat16=bfloat16), status


def take_saved(text: str, common: Common) -> None:
    """Multiply as a saved run did, where all ranks can and the user has not chosen.

    Not collective; all ranks of a mesh do it with the same text, and to the same effect.

    Parameters
    ----------
    text : str
        The saved choice.
    common : Common
        What all ranks of the mesh can multiply by.
    """
    if os.environ.get(VARIABLE):
        return
    try:
        saved = Choice.parse(text)
    except ValueError:  # of another release
        return
    if common.allows(saved):
        _process.choice = saved
