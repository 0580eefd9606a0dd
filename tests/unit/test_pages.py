"""What README, docs and tests/README.md name is there: files, links, modules, variables, functions of walks."""

from __future__ import annotations

import ast
import functools
import importlib
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpishard import OptimizationResult

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "packaging/README.md", "tests/README.md", "slurm/README.md"]
PAGES += sorted(str(each.relative_to(ROOT)) for each in (ROOT / "docs").rglob("*.md") if "_build" not in each.parts)
WALKS = [page for page in PAGES if page.startswith("docs/contributing/walk-")]
PACKAGE = ROOT / "mpishard"
MAP = "docs/contributing/map.md"

FILE = re.compile(r"(?<![\w/.-])((?:mpishard|tests|benchmarks|examples|packaging|slurm|docs)/(?!_build)[\w/.-]*\w)")
FILE_ALONE = re.compile(r"`((?:\w+/)*\w+\.py)`")  # in the map from mpishard/ on, in tests/README.md below tests/
MODULE = re.compile(r"`(mpishard(?:\.\w+)+)")
NAME = re.compile(r"`(\w+(?:\.\w+)*)`")
# A hop of a walk, with a number or a dash: "3. `file`, `Class.method`, `function`: what happens there".
HOP = re.compile(r"^(?:\d+\.|-) `(mpishard/[\w/]+\.py)`((?:,\s+`[\w.]+`)+):", re.MULTILINE)
CLASS_OR_MEMBER = re.compile(r"`([A-Z]\w*(?:\.\w+)?)`")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)  # in which no link is one
CHECKPOINTS = "docs/reference/checkpoint-format.md"
FACT = re.compile(r'"(?!config)(\w+)\.json"')  # of a checkpoint; config.json is of published weights
EXIT_CODES = "docs/reference/exit-codes.md"
VARIABLES = "docs/reference/environment-variables.md"
# A row of its table: the variables in the first column, and the files that read them in the last.
VARIABLE_ROW = re.compile(r"^\| (`[A-Z].*?) \|.*\| (`[\w/]+\.py`[^|]*) \|$", re.MULTILINE)
OWN_VARIABLE = re.compile(r"""["'](MPISHARD_[A-Z_]+)["']""")
BATCH_VARIABLE = re.compile(r"\$\{((?!SLURM_)[A-Z_]+):?-")
# "`function` in `file`", and of several "`a`, `b` and `c` in `file`".
NAMES_IN_FILE = re.compile(r"((?:`[\w.]+`(?:,| and)?\s+)+)in\s+`(mpishard/[\w/]+\.py)`")


@functools.cache
def defined_in(path: Path) -> frozenset[str]:
    """Functions, constants, classes and their members in a file of Python, as ``name`` and as ``Class.name``."""
    found: set[str] = set()

    def look(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
            found.update(names, (owner + name for name in names))
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{node.name}.")

    look(ast.parse(path.read_text("utf-8")).body if path.is_file() else [], "")
    return frozenset(found)


def has_module(name: str) -> bool:
    """Whether ``mpishard.a.b`` is a module, or a name in one, or a member of such a name."""
    try:
        return pydoc.locate(name) is not None
    except (ModuleNotFoundError, pydoc.ErrorDuringImport):  # what the name needs is not installed; its package knows it
        _, package, member, *_ = name.split(".")
        return member in dir(importlib.import_module(f"mpishard.{package}"))


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"(?m)^#+ (.+)$", text)
    return frozenset(re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles)


def broken_links(page: str, text: str) -> Iterator[str]:
    """Links to files that are not there, or to places that are not in them."""
    for path, anchor in LINK.findall(CODE.sub("", text)):
        target = (ROOT / page).parent / path if path else ROOT / page
        # Pages of the API are made by the build, which checks the links to them.
        made = "reference/api/" in path or page.startswith("docs/reference/api/")
        there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        reported = FILE.fullmatch(path) and not target.exists()  # `FILE` has those that begin at the root
        if not (made or there or reported):
            yield path + (f"#{anchor}" if anchor else "")


def wrong_variables(text: str) -> Iterator[str]:
    """Environment variables that no file reads where the page says so, and those of mpishard that it does not have."""
    for names, paths in VARIABLE_ROW.findall(text):
        code = "".join((PACKAGE / path).read_text("utf-8") for path in FILE_ALONE.findall(paths))
        yield from (f"{name} in {paths}" for name in NAME.findall(names) if name not in code)
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from (name for name in OWN_VARIABLE.findall(path.read_text("utf-8")) if f"`{name}`" not in text)
    scripts = "".join(path.read_text("utf-8") for path in (ROOT / "slurm").glob("*.sbatch"))
    yield from sorted(name for name in {*BATCH_VARIABLE.findall(scripts)} if f"`{name}`" not in text)


def unnamed_facts(text: str) -> Iterator[str]:
    """Facts of checkpoints that a page leaves out."""
    packages = ("data_parallel", "inverse", "nn", "torch", "training")
    paths = [path for package in packages for path in (PACKAGE / package).glob("*.py")]
    names = {name for path in paths for name in FACT.findall(path.read_text("utf-8"))}
    yield from sorted(name for name in names if f"`{name}`" not in text)


def absent(page: str, text: str) -> Iterator[str]:
    """What a page names and is not there."""
    yield from (path for path in FILE.findall(text) if not (ROOT / path).exists())
    yield from (name for name in MODULE.findall(text) if not has_module(name))
    yield from broken_links(page, text)
    for names, path in NAMES_IN_FILE.findall(text):
        yield from (f"{name} in {path}" for name in NAME.findall(names) if name not in defined_in(ROOT / path))
    if page == VARIABLES:
        yield from wrong_variables(text)
    if page == CHECKPOINTS:
        yield from unnamed_facts(text)
    if page == EXIT_CODES:
        reasons = set(re.findall(r'``"([a-z ]+)"``', OptimizationResult.__doc__ or ""))
        yield from sorted(reasons ^ set(re.findall(r'`"([a-z ]+)"`', text)))
    if page == MAP:
        at = (ROOT, PACKAGE)
        yield from (path for path in FILE_ALONE.findall(text) if not any((root / path).exists() for root in at))
        packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
        yield from (f"a line with {package}/" for package in packages if f"\n| `{package}/` |" not in text)
        rows = re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE)
        yield from (f"{package}/" for package in rows if not (PACKAGE / package).is_dir())
    if page == "tests/README.md":
        helpers = {path.name for folder in ("helpers", "soak") for path in (ROOT / "tests" / folder).glob("*.py")}
        yield from sorted(f"a line with {name}" for name in helpers if f"`{name}`" not in text)
        yield from (path for path in FILE_ALONE.findall(text) if not any((ROOT / "tests").rglob(Path(path).name)))
    if page in WALKS:
        named = [(path, name) for path, names in HOP.findall(text) for name in NAME.findall(names)]
        yield from (f"{name} in {path}" for path, name in named if name not in defined_in(ROOT / path))
        anywhere = frozenset().union(*(defined_in(path) for path in PACKAGE.rglob("*.py")))
        yield from (name for name in CLASS_OR_MEMBER.findall(text) if name not in anywhere)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    assert list(absent(page, (ROOT / page).read_text("utf-8"))) == []


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_a_room_says_what_enters_and_leaves_and_how_to_read_it(room: str) -> None:
    said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))) or ""
    assert "\nInput: " in said and "\nOutput: " in said
    (order,) = re.findall(r"^Read .*?(?=\n\n|\Z)", said, re.MULTILINE | re.DOTALL)
    files = re.findall(r"``([\w/]+)``", order)
    at = PACKAGE / room
    assert files and [name for name in files if not ((at / f"{name}.py").is_file() or (at / name).is_dir())] == []


@pytest.mark.parametrize("page", WALKS)
def test_a_walk_has_hops(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    numbered = [hop for hop in HOP.finditer(text) if hop[0][0] != "-"]
    assert len(numbered) == len(re.findall(r"^\d+\. ", text, re.MULTILINE)) > 5


MESH, NO, VERSION = "mpishard/comm/mesh.py", "mpishard/comm/no.py", "mpishard/version.py"


@pytest.mark.parametrize(
    ("page", "text", "wrong"),
    [
        ("README.md", "see `tests/nowhere.py` and [this](docs/nowhere.md)", "tests/nowhere.py, docs/nowhere.md"),
        ("README.md", "`python examples/train_gpt.py`, https://example.org/docs/nowhere, `mpishard.nn.GPT`", ""),
        ("README.md", "[a](docs/how-to/gpus.md#no), [b](docs/how-to/gpus.md#a-script)", "docs/how-to/gpus.md#no"),
        ("docs/index.md", "[a](how-to/no.md), `[b](no.md)`, [c](https://no)", "how-to/no.md"),
        ("docs/index.md", "[a](how-to/gpus.md#a-script), [b](how-to/gpus.md#no), [c](#no)", "how-to/gpus.md#no, #no"),
        ("docs/index.md", "`mpishard.Mesh.none()`, `mpishard.nothing`", "mpishard.Mesh.none, mpishard.nothing"),
        (WALKS[0], f"1. `{MESH}`, `Mesh.rebind`, `nothing`: `latest`", f"nothing in {MESH}"),
        (WALKS[0], f"1. `{MESH}`,\n   `Axis.nothing`: x", f"Axis.nothing in {MESH}, Axis.nothing"),
        (WALKS[0], f"1. `{NO}`, `f`: x", f"{NO}, f in {NO}"),
        (WALKS[0], f"`Mesh.nothing`, `f` in `{VERSION}`", f"Mesh.nothing in {VERSION}, f in {VERSION}, Mesh.nothing"),
    ],
)
def test_what_is_not_there_is_found(page: str, text: str, wrong: str) -> None:
    assert ", ".join(absent(page, text)) == wrong


@pytest.mark.parametrize(
    ("page", "old", "new", "wrong"),
    [
        ("tests/README.md", "`standin.py`", "`nowhere.py`", "a line with standin.py, nowhere.py"),
        (VARIABLES, "`MPISHARD_TRACEBACK`", "`MPISHARD_BUG`", "MPISHARD_BUG in `launch/script.py`, MPISHARD_TRACEBACK"),
        (VARIABLES, "`LOG_DIR`", "`LOGS`", "LOG_DIR"),
        (CHECKPOINTS, "`local_sgd`", "`nothing`", "local_sgd"),
        (EXIT_CODES, '`"wall"`', '`"fence"`', "fence, wall"),
        (MAP, "| `comm/` |", "`nowhere.py`\n| `talk/` |", "nowhere.py, a line with comm/, talk/"),
    ],
    ids=["a helper", "a variable", "of a batch script", "a fact", "a reason", "a package"],
)
def test_a_table_without_one_is_found(page: str, old: str, new: str, wrong: str) -> None:
    assert ", ".join(absent(page, (ROOT / page).read_text("utf-8").replace(old, new))) == wrong
