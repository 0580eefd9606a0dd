"""Makes an exit of this process a death by a signal, of which ULFM informs the other ranks.

At an exit with a code other than 0, the launcher of Open MPI 5 reports PMIX_ERR_EXIT_NONZERO_TERM.  MPI does not listen
to that event, so survivors that share memory with the rank wait for ever.  The launcher also counts the rank twice, and
ends the job once it has counted as many ended ranks as there were (5.0.11).  MPI does listen to the event of a rank
that a signal kills, and that is counted once.

Covered are ``os._exit``, and C's ``exit``, which libraries call, as does Fortran's ``STOP``.  C's ``_exit`` is not.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import ClassVar, NoReturn

_SIG_DFL, _SIG_IGN = 0, 1  # <signal.h>


def die_at_exit(wanted: bool) -> None:
    """Set whether an exit of this process is a death by a signal; forks of it exit as usual."""
    if wanted and not isinstance(os._exit, _Exit):
        os._exit = _Exit()
    elif not wanted and isinstance(os._exit, _Exit):
        os._exit = os._exit.really_exit
    if wanted != _CExit.is_deadly and hasattr(signal, "SIGRTMIN"):  # macOS has none
        _CExit.make_deadly(wanted)


class _Exit:
    """Replaces ``os._exit``."""

    def __init__(self) -> None:
        self._rank, self.really_exit = os.getpid(), os._exit

    def __call__(self, status: int) -> NoReturn:
        if os.getpid() == self._rank:
            os.kill(self._rank, signal.SIGKILL)
        self.really_exit(status)


class _CExit:
    """C's ``exit`` raises a signal, which ends this process unless it is ignored.

    C calls ``raise`` without Python: the interpreter may have ended.
    """

    is_deadly: ClassVar[bool] = False
    _raises: ClassVar[bool] = False

    @classmethod
    def make_deadly(cls, deadly: bool) -> None:
        library, number = ctypes.CDLL(None), signal.SIGRTMIN + 6
        # Python's own function is for the main thread only.
        library.signal(number, ctypes.c_void_p(_SIG_DFL if deadly else _SIG_IGN))
        cls.is_deadly = deadly
        if not cls._raises:
            cls._raises = True
            os.register_at_fork(after_in_child=lambda: cls.make_deadly(False))
            library["__cxa_atexit"](ctypes.cast(library["raise"], ctypes.c_void_p), ctypes.c_void_p(number), None)
