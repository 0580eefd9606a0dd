"""An error of some rank while a checkpoint is written, in a form in which every rank can raise it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpishard.checkpoint import disk

_WAYS_OUT = {
    (
        errno.ENOSPC,
        errno.EDQUOT,
    ): "make room there, keep fewer checkpoints (keep=...), or give a folder on another disk",
    (errno.EROFS, errno.EACCES, errno.EPERM): "give a folder that all ranks may write to",
    (errno.ENOENT, errno.ESTALE): "all ranks must see one and the same folder, and it must stay while they write",
    (errno.ENOTEMPTY,): "another run saves into it at this moment; give each run a folder of its own",
    (errno.ENOTDIR, errno.EEXIST, errno.EISDIR): "give the path of a folder",
}
# Errors of the caller, which keep their class.
_KNOWN = {error.__name__: error for error in (ValueError, TypeError, MemoryError)}
_OTHER_WAY_OUT = "see to that disk, or give a folder on another one"


@dataclass(frozen=True)
class Fault:
    """An error of one rank.

    Parameters
    ----------
    rank : int
    path : str
        The file or folder of the error.
    text : str
        The text of the error.
    kind : str
        Name of its class; ``"OSError"`` for all its subclasses.
    errno : int or None
        Of an OSError.
    others : int
        Number of other ranks with an error.
    """

    rank: int
    path: str
    text: str
    kind: str
    errno: int | None = None
    others: int = 0

    @classmethod
    def of(cls, error: Exception, rank: int, path: Path) -> Fault:
        """The fault of an exception; `path` is used if the exception has none."""
        if not isinstance(error, OSError):
            return cls(rank, str(path), str(error), type(error).__name__)
        named = path if error.filename is None else Path(str(error.filename))
        text = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = disk.free_bytes(named)
            text += "" if free is None else f" ({free / 1e6:.1f} MB are free)"
        return cls(rank, str(named), text, OSError.__name__, error.errno)

    @classmethod
    def first(cls, plain_faults: Sequence[Any]) -> Fault | None:
        """The fault of the lowest rank, from the `plain` values of all ranks; None if there is none."""
        faults = [cls(**fault) for fault in plain_faults if fault is not None]
        return cls(**{**asdict(faults[0]), "others": len(faults) - 1}) if faults else None

    @property
    def plain(self) -> dict[str, Any]:
        """The fault as a value for JSON."""
        return asdict(self)

    def error(self, step: int | None) -> Exception:
        """The exception to raise on every rank; without a step, of a run that has not saved any yet."""
        more = f", and {self.others} more failed" if self.others else ""
        what = "checkpoints cannot be saved" if step is None else f"the checkpoint of step {step} was not saved"
        what += f": rank {self.rank} failed at {self.path}: {self.text}{more}"
        if self.kind != OSError.__name__:
            return _KNOWN.get(self.kind, RuntimeError)(what)
        way_out = next((way for numbers, way in _WAYS_OUT.items() if self.errno in numbers), _OTHER_WAY_OUT)
        message = f"{what}; {way_out}"
        if step is not None:
            message += ". Checkpoints before it are untouched"
        return OSError(message) if self.errno is None else OSError(self.errno, message)
