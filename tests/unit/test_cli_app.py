"""What all commands have in common."""

from __future__ import annotations

import os
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
    shown = capsys.readouterr().out
    commands = shown.partition("Commands:\n")[2].splitlines()
    assert len(commands) == 16 and all(line.endswith(".") and "..." not in line for line in commands)
    assert max(map(len, shown.splitlines())) <= 80


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
    shown = capsys.readouterr().err
    assert shown.startswith("mpishard: error: ") and shown.endswith("--unheard; see mpishard plot --help\n")


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("inspct", "unknown command 'inspct'; did you mean inspect?  Or see"),
        ("Run", "unknown command 'Run'; did you mean run?  Or see"),
        ("est", "unknown command 'est'; did you mean estimate?  Or see"),
        ("in", "unknown command 'in'; did you mean info or inspect?  Or see"),
        ("frobnicate", "unknown command 'frobnicate'; see"),
    ],
)
def test_a_misspelt_command_gets_the_nearest(typed: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "--some", "option"]) == 2
    assert " ".join(capsys.readouterr().err.split()) == f"mpishard: error: {' '.join(shown.split())} mpishard --help"


def test_completion_is_of_the_shell_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for option in ("--install-completion", "--show-completion"):
        assert main([option, "foo"]) == 2
        shown = capsys.readouterr()
        assert "has no shell 'foo'; choose one of bash, zsh, fish, powershell, pwsh" in shown.err and not shown.out
    assert not list(tmp_path.iterdir())
    assert main(["--show-completion", "zsh"]) == 0
    assert "compdef _mpishard_completion mpishard" in capsys.readouterr().out
    assert main(["--install-completion", "fish"]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert (tmp_path / ".config/fish/completions/mpishard.fish").exists()


def test_a_file_that_is_not_there_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path / "absent.npz"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"mpishard: error: {tmp_path}/absent.npz: No such file or directory\n"


def test_an_error_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "a\x1b[2J\udc80")]) == 2
    assert r"a\x1b[2J\udc80 does not exist" in capsys.readouterr().err


def test_mpi_starts_where_no_home_is_known() -> None:
    """That of Open MPI does not without HOME, which is missing in cron jobs and containers."""
    program = "import mpishard, os; mpishard.Mesh(); print(os.environ['HOME'])"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0 and Path(finished.stdout.strip()).is_dir(), finished


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_list_begins_as_what_commands_say_of_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert _COMMANDS[name][1].removesuffix(".").partition(":")[0] in shown


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


def test_a_program_that_does_not_exist_is_refused_before_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--elastic", "-n", "2", "trian"]) == 2
    assert "'trian' cannot be executed: the program does not exist" in capsys.readouterr().err


def test_a_script_means_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import mpishard, sys; print(*sys.argv[1:])")
    command = [sys.executable, "-m", "mpishard", "run", "-n", "1", str(script), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "--steps 3\n"), done.stderr
