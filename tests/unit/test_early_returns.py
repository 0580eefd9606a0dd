"""No test returns early: one that has nothing to do skips, and says why, since what returns counts as passed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]


def returns(source: str) -> Iterator[str]:
    """``test_name, line N`` of each return in a test function; functions inside of one may return."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            inside: list[ast.AST] = [*node.body]
            while inside:
                each = inside.pop()
                if isinstance(each, ast.Return):
                    yield f"{node.name}, line {each.lineno}"
                elif not isinstance(each, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                    inside.extend(ast.iter_child_nodes(each))


def test_no_test_returns_early() -> None:
    found = {
        str(path.relative_to(TESTS)): list(returns(path.read_text("utf-8")))
        for path in sorted(TESTS.rglob("test_*.py"))
    }
    assert len(found) > 80
    assert {name: places for name, places in found.items() if places} == {}


def test_a_return_is_found() -> None:
    source = """
def test_a(mesh):
    def helper():
        return 1
    if mesh.size == 1:
        with mesh:
            return
    assert helper()

class TestB:
    def test_c(self):
        return None

def helper():
    return
"""
    assert list(returns(source)) == ["test_a, line 7", "test_c, line 12"]
