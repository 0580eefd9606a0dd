"""What all commands have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from sources import Arrays, write

from mpishard.cli import main
from mpishard.cli.app import _COMMANDS
from mpishard.version import VERSION


def test_no_summary_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    commands = told.partition("Commands:\n")[2].splitlines()
    assert len(commands) == 16 and all(line.endswith(".") and "..." not in line for line in commands)
    assert max(map(len, told.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpishard {VERSION}\n"


@pytest.mark.parametrize(
    ("typed", "expected"), [("mpishard in", ["info", "inspect"]), ("mpishard inspect --t", ["--tensor"])]
)
def test_the_tab_key_completes(
    typed: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "_MPISHARD_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 0 and capsys.readouterr().out.split() == expected


def test_wrong_usage_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--unheard"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("mpishard: error: ") and told.endswith("--unheard; see mpishard plot --help\n")


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_list_begins_as_what_commands_say_of_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert _COMMANDS[name][1].removesuffix(".").partition(":")[0] in told


COMMANDS_WITHOUT_MPI = """
import sys
from mpishard.cli import main

for typed in sys.argv[1:]:
    sys.argv = ["mpishard", *typed.split()]
    assert main() == 0, typed
mpi = sys.modules.get("mpi4py.MPI")
assert mpi is None or not mpi.Is_initialized(), sys.argv
"""


def test_commands_that_need_no_mpi_do_not_start_it(tmp_path: Path) -> None:
    """Open MPI leaves files behind where it was started without its mpirun."""
    write(Arrays(), tmp_path / "step", 2, generation=1)
    typed = [
        *(f"{name} --help" for name in _COMMANDS),
        "estimate --ranks 4 --parameters 1e9",
        "inspect step",
        "verify step",
        "diff step step",
        "convert step other --files 1",
        "export step model.npz",
        "import model.npz another",
    ]
    command = [sys.executable, "-c", COMMANDS_WITHOUT_MPI, *typed]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
