"""The choice, in this process, of the libraries that multiply."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mpishard.backend.gemm.libraries import KINDS, MKL, NUMPY, ONEDNN, TAKES, Offer

VARIABLE = "MPISHARD_PRODUCTS"
# By dtype the names of what libraries are chosen for.
_NAMES = {dtype: [f"{dtype}.{kind}" for kind in sorted(KINDS[dtype])] for dtype in sorted(KINDS)}


@dataclass(frozen=True)
class Choice:
    """Libraries by what they multiply."""

    # Names by dtype and kind, such as ``"float32.plain"``; NumPy's for all others.
    libraries: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def has_bfloat16(self) -> bool:
        """Return True if libraries multiply all matrices of bfloat16; one kind left out makes a model slower."""
        return all(f"bfloat16.{kind}" in self.libraries for kind in KINDS["bfloat16"])

    @classmethod
    def parse(cls, text: str) -> Choice:
        """The choice in a text such as ``"mkl"`` or ``"float32=mkl,bfloat16.plain=onednn"``; also what `str` gives.

        It names a library for all, or libraries by dtype or kind, which need not be installed. Raises ValueError if the
        text cannot be read.
        """
        names = [name for of in _NAMES.values() for name in of]
        if "=" in text:
            sides = [[side.strip() for side in each.partition("=")] for each in text.split(",")]
            pairs = [(name, library) for of, _, library in sides for name in _NAMES.get(of, [of])]
            found = dict(pairs)
            if len(found) < len(pairs):
                raise ValueError(f"{VARIABLE}={text}: a kind of product is named twice")
        else:
            found = {name: text for name in names if name.partition(".")[0] in TAKES.get(text, KINDS)}
        for name, library in found.items():
            if name not in names:
                raise ValueError(f"{VARIABLE}={text}: {name!r} is none of {', '.join((*_NAMES, *names))}")
            if library not in (NUMPY, *TAKES):
                raise ValueError(
                    f"{VARIABLE}={text}: there is no library {library!r}; choose from {', '.join((NUMPY, *TAKES))}, or "
                    f"kind by kind, as float32.plain={MKL}"
                )
            if library != NUMPY and name.partition(".")[0] not in TAKES[library]:
                raise ValueError(f"{VARIABLE}={text}: {library} multiplies {' and '.join(TAKES[library])} only")
        return cls({name: library for name, library in found.items() if library != NUMPY})

    def __str__(self) -> str:
        found = []
        for dtype, names in _NAMES.items():
            of = {name: self.libraries[name] for name in names if name in self.libraries}
            whole = len(of) == len(names) and len(set(of.values())) == 1
            found += [f"{dtype}={of[names[0]]}"] if whole else [f"{name}={library}" for name, library in of.items()]
        return ",".join(found) or NUMPY

    def limited_to(self, libraries: Collection[str], *, bfloat16: bool = True) -> Choice:
        """This choice, with NumPy's library in place of those not in `libraries`, for bfloat16 maybe of all."""
        return Choice(
            {
                name: library
                for name, library in self.libraries.items()
                if library in libraries and (bfloat16 or not name.startswith("bfloat16."))
            }
        )


def fastest_of(offer: Offer) -> Choice:
    """The libraries on offer that are known to be faster than NumPy's on such a processor.

    On a Xeon a step of a GPT was 1.12 times as fast by MKL; on an EPYC MKL multiplies half as fast as OpenBLAS.
    Products of bfloat16 are fastest by oneDNN on both.
    """
    found = dict.fromkeys((name for dtype in TAKES[MKL] for name in _NAMES[dtype]), MKL if offer.intel else NUMPY)
    if ONEDNN in offer.versions:
        found |= dict.fromkeys(_NAMES["bfloat16"], ONEDNN)
    return Choice(found).limited_to(offer.versions, bfloat16=offer.bfloat16)


_active = Choice()


def active() -> Choice:
    """The choice of this process; NumPy's library for all, before a mesh was made.

    It is one for all meshes: functions without a mesh multiply, too.  So the ranks of a mesh may come to differ, where
    another mesh that has only some of them has other libraries in common.  That is as on nodes with different
    processors, whose BLAS differs as well: products are rounded otherwise, and all ranks still exchange the same.
    Whoever promises bits compares the choices of the ranks, and comes back to what they agreed on by `activate`.
    """
    return _active


def activate(choice: Choice) -> None:
    """Multiply by these libraries from now on; all ranks of a mesh call it."""
    global _active
    _active = choice


def chosen_by_variable() -> str:
    """The value of MPISHARD_PRODUCTS; empty if it is not set."""
    return os.environ.get(VARIABLE, "").strip()
