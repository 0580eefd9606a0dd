"""Public names that have changed: the old ones go on working for one release, and say what they are called now.

No MPI.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

_warned: set[str] = set()


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn that a name is old: once a process, on rank 0 of a job.  Not collective.

    Parameters
    ----------
    old, new : str
        As users write them, such as ``"mpishard.Pending"``.
    stacklevel : int
        As in `warnings.warn`, counted from the caller.
    """
    if old in _warned:
        return
    _warned.add(old)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.rank == 0:
        text = f"{old} is called {new} now; the old name goes with the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel + 1)


def renamed_method(owner: str, old: str, new: str) -> Callable[..., Any]:
    """A method that warns, and calls the one that has the new name.

    Parameters
    ----------
    owner : str
        The class, as users write it.
    old, new : str
        Names of methods; the new one may have dots, as ``layout.gradient_runs``.

    Returns
    -------
    callable
        The method to put under the old name.
    """

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        warn_renamed(f"{owner}.{old}", f"{owner}.{new}")
        return attrgetter(new)(self)(*arguments, **options)

    method.__name__ = old
    method.__qualname__ = f"{owner}.{old}"
    method.__doc__ = f"Deprecated: `{new}` under its old name."
    return method


def renamed_attribute(instance: Any, owner: str, name: str, renamed: Mapping[str, str]) -> Any:
    """What ``instance.__getattr__(name)`` returns where attributes have new names; it warns.

    Parameters
    ----------
    instance : object
        What was asked for the attribute.
    owner : str
        The name of its class, for the warning.
    name : str
        Of the attribute.
    renamed : mapping
        The new names by the old ones; a new name may have dots, as ``state.restore``.

    Returns
    -------
    object
        The attribute of the new name.

    Raises
    ------
    AttributeError
        If `name` is none of the old names.
    """
    if name not in renamed:
        raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r}")
    warn_renamed(f"{owner}.{name}", f"{owner}.{renamed[name]}", stacklevel=3)
    return attrgetter(renamed[name])(instance)
