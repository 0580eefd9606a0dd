"""The recipes in ``packaging/`` ask for what the package asks for."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpishard.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CONDA, SPACK, EASYBUILD, APPTAINER = "conda/recipe.yaml", "spack/package.py", "easybuild/mpishard.eb", "apptainer.def"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
# What conda calls by other names than PyPI, or more than one package there.
OF_CONDA = {"python-xxhash": "xxhash", "matplotlib-base": "matplotlib", "pytorch": "torch", "cupy": "cupy-cuda12x"}
# Modules of EasyBuild: by other names, and with several packages.
OF_EASYBUILD = {"python-xxhash": "xxhash"}
BUNDLES = {
    ("Python-bundle-PyPI", "2025.07"): {"threadpoolctl": "3.6.0", "rich": "14.1.0"},
    ("SciPy-bundle", "2025.07"): {"numpy": "2.3.2"},
}


def recipe(name: str) -> str:
    return (PACKAGING / name).read_text("utf-8")


def bounds(requirements: list[str]) -> dict[str, str]:
    """Names and lower bounds, such as those of ``numpy>=2``; with a marker such as ``; platform_machine`` too."""
    found = {}
    for each in requirements:
        match = re.fullmatch(r"([\w.-]+) ?>=([\d.]+)(?: *;.*)?", each)
        assert match, each
        found[match[1].replace("_", "-")] = match[2]
    return found


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# What pip brings with mpishard[cli]: the tests of the recipes run a command.
WANTED = {"python": PROJECT["requires-python"].removeprefix(">="), **bounds([*PROJECT["dependencies"], *EXTRAS["cli"]])}
BUILD = bounds(PYPROJECT["build-system"]["requires"])


def of_conda(text: str, section: str) -> dict[str, str]:
    found = yaml.safe_load(text)
    lines = [line for line in found["requirements"][section] if line not in ("__linux", "pip")]
    minimum = found["context"]["python_min"]
    lines = [
        line.replace("${{ python_min }}.*", f">={minimum}").replace("${{ python_min }}", minimum) for line in lines
    ]
    return {OF_CONDA.get(name, name): bound for name, bound in bounds(lines).items()}


def of_spack(text: str, kind: str) -> dict[str, str]:
    """Those of a kind of dependency, ``run`` or ``build``; a block gives it for all that stand in it."""
    found = {}
    for block in ast.walk(ast.parse(text)):
        for node in block.body if isinstance(block, ast.ClassDef | ast.With) else []:
            call = node.value if isinstance(node, ast.Expr) else None
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "depends_on":
                continue
            around = ast.unparse(block.items[0]) if isinstance(block, ast.With) else ""
            kinds = around + "".join(ast.unparse(each.value) for each in call.keywords if each.arg == "type")
            spec = ast.literal_eval(call.args[0])
            if spec == "mpi":  # pip has no name for it
                continue
            match = re.fullmatch(r"(?:py-)?([\w-]+)@([\d.]+):", spec)
            assert match, spec
            if f"'{kind}'" in kinds:
                found[match[1]] = match[2]
    return found


def of_easybuild(text: str) -> dict[str, str]:
    """The versions that it names, those in bundles included."""
    names: dict[str, Any] = {}
    exec(text, names)
    found: dict[str, str] = {}
    for name, version in [*names["dependencies"], *(each[:2] for each in names["exts_list"])]:
        known = OF_EASYBUILD.get(name, name).lower().replace("_", "-")
        found |= BUNDLES.get((name, version), {known: version})
    assert found.pop("mpishard") == names["version"]
    return found


def differences(name: str, text: str) -> set[str]:
    """The packages that a recipe lacks, asks for without need, or with another lower bound."""
    if name == EASYBUILD:
        found = of_easybuild(text)
        wrong = {each for each in {*WANTED} & {*found} if number(found[each]) < number(WANTED[each])}
        return wrong | ({*WANTED} ^ {*found})
    run = of_conda(text, "run") if name == CONDA else of_spack(text, "run")
    build = of_conda(text, "host") if name == CONDA else of_spack(text, "build")
    # What is needed to build, besides Python and what is needed to run.
    built_by = {each: bound for each, bound in build.items() if each not in WANTED}
    apart = (run.items() ^ WANTED.items()) | (built_by.items() ^ BUILD.items())
    return {each for each, _ in apart} | ({"python"} if build["python"] != WANTED["python"] else set())


@pytest.mark.parametrize("name", [CONDA, SPACK, EASYBUILD])
def test_dependencies_are_those_of_the_package(name: str) -> None:
    assert len(WANTED) == 12
    assert differences(name, recipe(name)) == set()


@pytest.mark.parametrize(
    ("name", "old", "new", "wrong"),
    [
        (CONDA, "    - tqdm >=4.60\n", "", "tqdm"),
        (CONDA, "numba >=0.60", "numba >=0.59", "numba"),
        (CONDA, "setuptools >=77", "setuptools >=61", "setuptools"),
        (CONDA, "    - tqdm", "    - scipy >=1\n    - tqdm", "scipy"),
        (CONDA, 'python_min: "3.11"', 'python_min: "3.12"', "python"),
        (SPACK, '        depends_on("py-tqdm@4.60:")\n', "", "tqdm"),
        (SPACK, "py-numba@0.60:", "py-numba@0.61:", "numba"),
        (SPACK, "py-setuptools@77:", "py-setuptools@61:", "setuptools"),
        (EASYBUILD, "    ('tqdm', '4.67.1'),\n", "", "tqdm"),
        (EASYBUILD, "('mpi4py', '4.1.0')", "('mpi4py', '4.0.3')", "mpi4py"),
        (EASYBUILD, "    ('tqdm', ", "    ('dask', '2025.5.1'),\n    ('tqdm', ", "dask"),
    ],
)
def test_other_dependencies_are_found(name: str, old: str, new: str, wrong: str) -> None:
    assert old in recipe(name)
    assert differences(name, recipe(name).replace(old, new)) == {wrong}


def test_conda_constrains_what_is_optional_as_the_extras_do() -> None:
    optional = {}
    for extra in ("cuda12x", "torch", "jax", "weights"):
        optional |= bounds(EXTRAS[extra])
    assert of_conda(recipe(CONDA), "run_constraints") == optional


def test_a_container_has_what_pip_brings() -> None:
    text = recipe(APPTAINER)
    assert re.findall(r"pip install (?:--\S+ )*(.*)", text) == [f"'/opt/mpishard-{VERSION}.tar.gz[cli]'"]
    assert f"dist/mpishard-{VERSION}.tar.gz /opt/mpishard-{VERSION}.tar.gz\n" in text
    image = re.search(r"^From: python:([\d.]+)-slim$", text, re.MULTILINE)
    assert image and number(image[1]) >= number(WANTED["python"])
    assert "--bind /opt/mpich:/host/mpi " in text and "LD_LIBRARY_PATH=/host/mpi/lib\n" in text


@pytest.mark.parametrize("name", [CONDA, SPACK, EASYBUILD, APPTAINER])
def test_recipes_are_of_this_version_and_test_what_they_install(name: str) -> None:
    text = recipe(name)
    assert VERSION in text and not re.search(r"https?:", text)
    assert PROJECT["description"] in text or name == APPTAINER
    assert re.search(r"mpiexec\W{1,2}-n\W+2\b.*selftest", text)


@pytest.mark.parametrize("home", ["", "https://example.org/mpishard"])
def test_marks_are_filled_for_an_sdist(home: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fill", PACKAGING / "fill.py")
    assert spec is not None and spec.loader is not None
    fill = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fill)
    sdist = tmp_path / f"mpishard-{VERSION}.tar.gz"
    sdist.write_bytes(b"an archive")
    folder = f"{home}/releases/download/v{VERSION}" if home else tmp_path.as_uri()
    assert sorted(fill.RECIPES) == sorted([CONDA, SPACK, EASYBUILD, APPTAINER])
    for name in (CONDA, SPACK, EASYBUILD):
        text = fill.filled(recipe(name), sdist, home)
        assert folder in text and hashlib.sha256(b"an archive").hexdigest() in text
        assert f"'{home or folder}'" in text.replace('"', "'")
        assert not re.search(r"@[A-Z]", text)
    with pytest.raises(ValueError, match="@NOTHING@"):
        fill.filled(f"{VERSION} @NOTHING@", sdist, home)
    with pytest.raises(ValueError, match="9.9.9"):
        fill.filled(recipe(CONDA), sdist.rename(tmp_path / "mpishard-9.9.9.tar.gz"), home)
