"""Which tests plain `tox` leaves out or shortens: those beside other packages, and those that take `short`."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

# Packages that only `tox -e full` installs, from MPISHARD_PEERS.
PEERS = re.compile(
    r"""(importorskip\(['"](torch|jax|optax)|(importorskip|find_spec)\(['"]transformers)\b"""
    r"""|libraries\.installed\(\)|nvrtc\(\) is None"""
)

# A file that skips as a whole where such a package is missing.
WHOLE = re.compile(r"""^(\w+ = )?pytest\.importorskip\(['"](torch|jax|optax|transformers)\b""", re.MULTILINE)


def _names(node: ast.AST) -> set[str]:
    """All names that a function or a statement mentions, fixtures and their names in strings among them."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return found | {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and type(each.value) is str}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return [each.id for each in names] if isinstance(node, ast.Assign | ast.AnnAssign) else []


def tests_in(source: str, short: bool = True) -> frozenset[str]:
    """Names of the test functions and classes in a file that use such a package, or `short`, directly or by helpers.

    A file that skips as a whole where a package is missing has them all.  ``short=False``: by packages alone.
    """
    if not PEERS.search(source) and not (short and re.search(r"\bshort\b", source)):
        return frozenset()
    body = ast.parse(source).body
    uses = {name: _names(node) for node in body for name in _defined(node)}
    found = {name for node in body for name in _defined(node) if PEERS.search(ast.unparse(node))}
    if short:
        found |= {name for name, mentioned in uses.items() if "short" in mentioned}
    while more := {name for name, mentioned in uses.items() if name not in found and mentioned & found}:
        found |= more
    functions = {name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) for name in _defined(node)}
    every = "pytestmark" in found or WHOLE.search(source) is not None
    return frozenset(name for name in functions if name.startswith(("test", "Test")) and (every or name in found))


@functools.cache
def is_skipped_whole(path: Path) -> bool:
    """Whether a file skips as a whole where a package is missing, which its import imports."""
    return WHOLE.search(path.read_text("utf-8")) is not None


@functools.cache
def tests_of(path: Path, short: bool = True) -> frozenset[str]:
    """`tests_in` of a file."""
    return tests_in(path.read_text("utf-8"), short)
