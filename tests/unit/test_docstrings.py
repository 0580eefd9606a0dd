"""Docstrings of all that is public have the sections of numpydoc.

Public to users are the names in the directives of docs/reference and in the ``__all__`` of packages, and of public
classes, and of their bases in this package, all methods and properties whose names begin without an underscore.  A
method that overrides one and has no docstring has that of what it overrides.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import mpishard

pytest.importorskip("numpydoc", reason="numpydoc is not installed (extra: test)")

# What numpydoc checks, by its codes: unknown sections, and their order; a docstring, with a summary that is one line
# and ends in a period; parameters that are missing, unknown, out of order, or without a type or a description; returns
# and yields.
CODES = set("GL06 GL07 GL08 SS01 SS03 SS06 PR01 PR02 PR03 PR04 PR07 PR10 RT01 RT03 YD01".split())

DOCS = Path(__file__).parents[2] / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|exception):: ([\w.]+)$", re.MULTILINE)
CHECKS = {"integer", "number", "flag"}  # functions that raise TypeError and ValueError


def names() -> Iterator[str]:
    """Dotted names of what is public by itself, and can be imported."""
    found = [name for page in sorted(DOCS.rglob("*.md")) for name in DIRECTIVE.findall(page.read_text("utf-8"))]
    root = Path(mpishard.__file__).parent
    for file in sorted(root.rglob("__init__.py")):
        package = ".".join(file.parent.relative_to(root.parent).parts)
        found += (f"{package}.{name}" for name in getattr(importlib.import_module(package), "__all__", ()))
    lacking = tuple(f"mpishard.{name}." for name in ("jax", "torch") if importlib.util.find_spec(name) is None)
    yield from (name for name in found if not name.startswith(lacking))


def public() -> dict[str, tuple[Any, type | None]]:
    """Classes, functions, methods and properties, each with the class that defines it, by name."""
    found: dict[str, tuple[Any, type | None]] = {}
    for dotted in names():
        module, _, name = dotted.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found[f"{thing.__module__}.{thing.__qualname__}"] = thing, None
        for kind in getattr(thing, "__mro__", ()):
            for name, value in vars(kind).items() if kind.__module__.startswith("mpishard.") else ():
                if not name.startswith("_") and inspect.isfunction(bare(value)):
                    found[f"{kind.__module__}.{kind.__qualname__}.{name}"] = value, kind
    return found


def bare(thing: Any) -> Any:
    """The function of a method, class method or property."""
    if isinstance(thing, property | cached_property):
        thing = thing.fget if isinstance(thing, property) else thing.func
    return inspect.unwrap(getattr(thing, "__func__", thing))


def inherits(name: str, thing: Any, owner: type | None) -> bool:
    """Whether it has the docstring of what it overrides."""
    bases = [vars(base) for base in owner.__mro__[1:]] if owner and not bare(thing).__doc__ else []
    name = name.rpartition(".")[2]
    return any(bare(base[name]).__doc__ for base in bases if name in base)


def raised(thing: Any) -> set[str]:
    """Names of the exceptions that the body of a function, or of the constructor of a class, raises by itself."""
    if inspect.isclass(thing):
        makers = [vars(thing).get(name) for name in ("__init__", "__post_init__")]
        # Those that a dataclass makes have no source.
        written = [maker for maker in makers if maker and Path(bare(maker).__code__.co_filename).is_file()]
        return {name for maker in written for name in raised(maker)}
    found = set()
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(bare(thing))))))
    checks = CHECKS - {node.name for node in nodes[2:] if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            if isinstance(node, ast.Raise):
                found.add(call.func.id)
            elif call.func.id in checks:
                found.add("TypeError")
    return {name for name in found if name.endswith("Error")}


def complaints(where: str, thing: Any, owner: type | None = None) -> list[str]:
    """What is wrong with a docstring."""
    from numpydoc.docscrape import NumpyDocString
    from numpydoc.validate import validate

    if inherits(where, thing, owner):
        return []
    wrong = [f"{code} {what}" for code, what in validate(where)["errors"] if code in CODES]
    if inspect.isclass(thing) and (issubclass(thing, Enum) or getattr(thing, "_is_protocol", False)):
        # Nobody calls it to make an instance.
        return [f"{where}: {what}" for what in wrong if not what.startswith("PR01")]
    sections = NumpyDocString(inspect.getdoc(thing) or "")["Raises"]
    told = {name for entry in sections for name in entry.type.split(", ")}
    wrong += [f"raises {name}, and does not say when" for name in sorted(raised(thing) - told)]
    return [f"{where}: {what}" for what in wrong]


def test_docstrings_of_public_names_have_all_sections() -> None:
    found = public()
    assert len({name.split(".")[1] for name in found}) > 15  # fewer without PyTorch or JAX
    wrong = [what for name, (thing, owner) in found.items() for what in complaints(name, thing, owner)]
    assert not wrong, "\n".join(wrong)


def test_a_docstring_that_lacks_something_is_found() -> None:
    found = complaints(f"{__name__}.halved", halved)
    assert [what.split()[1] for what in found] == ["PR01", "RT01", "raises"]


def halved(number: float) -> float:
    """Half of it."""
    if not number:
        raise ValueError("zero")
    return number / 2
