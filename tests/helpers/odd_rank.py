"""Public collective calls with another argument on one rank: the pages that name them, and what must come of them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"
# Longer than any call here takes, with what it compiles, and much shorter than what ranks wait by default.
LIMIT_S = 60.0
_DIRECTIVE = re.compile(r"\.\. auto(?:class|function|exception):: (\S+)\n((?: +:\S+:.*\n)*)")
_ALL_METHODS = re.compile(r"\b([Ee]very method|[Aa]ll methods|the methods) [^.]*\bcollective\b")
_NOT = re.compile(r"\b([Nn]ot|[Nn]o method is|[Nn]othing is) collective\b")


def collective_names(pages: Sequence[str]) -> set[str]:
    """What these pages of the reference name, and what calls itself collective, with the members that they show."""
    found: set[str] = set()
    for page in pages:
        for name, options in _DIRECTIVE.findall((PAGES / f"{page}.md").read_text("utf-8")):
            documented = _resolve(name)
            text = inspect.getdoc(documented) or ""
            if _says_so(text):
                found.add(name)
            if inspect.isclass(documented) and ":members:" in options:
                inherited = ":inherited-members:" in options
                found |= {f"{name}.{each}" for each in _collective_members(documented, text, inherited)}
    return found


def _collective_members(documented: type, text: str, inherited: bool) -> Iterator[str]:
    all_methods = _ALL_METHODS.search(text) is not None
    members = dict(inspect.getmembers(documented)) if inherited else vars(documented)
    for name, member in members.items():
        if name.startswith("_") or not inspect.isroutine(member):
            continue
        own = inspect.getdoc(member) or ""
        if _says_so(own) or (all_methods and not _NOT.search(own)):
            yield name


def _says_so(text: str) -> bool:
    return re.search(r"\bcollective\b", _NOT.sub("", text), re.IGNORECASE) is not None


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


@dataclass(frozen=True)
class Made:
    """An argument that all ranks make, by a function of the place, though one rank alone gives it."""

    by: Callable[[Any], Any]


@dataclass(frozen=True)
class Odd:
    """A call, and what one rank gives it in addition, or in place of the others' arguments.

    `name` is that in the reference.  `words` are in the message; default: the first argument's name.
    """

    name: str
    call: Callable[..., Any]
    other: Mapping[str, Any]
    words: str = ""

    def __str__(self) -> str:
        plain = (bool, int, float, str)
        shown = (f"{name}={value}" if isinstance(value, plain) else name for name, value in self.other.items())
        return f"{self.name.removeprefix('mpishard.')}-{','.join(shown)}"


def odd(name: str, call: Callable[..., Any], *others: Mapping[str, Any] | tuple[Mapping[str, Any], str]) -> list[Odd]:
    """Cases of one call; each of `others` may have its words with it."""
    return [Odd(name, call, *(each if isinstance(each, tuple) else (each,))) for each in others]


def assert_raised_on_all(case: Odd, place: Any, mesh: Any) -> None:
    """Make the call, on the last rank with its other arguments: each rank raises an error of its own, none of MPI."""
    other = {name: value.by(place) if isinstance(value, Made) else value for name, value in case.other.items()}
    with pytest.raises((ValueError, TypeError, OSError, RuntimeError), match=case.words or next(iter(other))) as found:
        case.call(place, **(other if mesh.rank == mesh.size - 1 else {}))
    assert not isinstance(found.value, MPI.Exception)
