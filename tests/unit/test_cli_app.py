"""What all commands have in common, and those of checkpoints and schedules."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from sources import FACTS, SHAPES, Arrays, write

from mpishard.checkpoint.pieces import CheckpointReader
from mpishard.checkpoint.verify import newest_whole
from mpishard.cli import main
from mpishard.cli.app import _COMMANDS
from mpishard.launch.detection import MPI4PY, explain_old_mpi4py, explain_unloadable
from mpishard.version import VERSION

# What all commands have in common.


def test_no_summary_is_cut(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    commands = shown.partition("Commands:\n")[2].splitlines()
    assert len(commands) == 20 and all(line.endswith(".") and "..." not in line for line in commands)
    assert max(map(len, shown.splitlines())) <= 80


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpishard {VERSION}\n"


@pytest.mark.parametrize(
    ("typed", "expected"), [("mpishard in", ["info", "inspect"]), ("mpishard inspect --t", ["--tensor"])]
)
def test_the_tab_key_completes(typed, expected, capsys, environ):
    environ(_MPISHARD_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as exit:
        main([])
    assert exit.value.code == 0 and capsys.readouterr().out.split() == expected


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("inspct", "did you mean inspect? Or see"),
        ("Run", "did you mean run? Or see"),
        ("in", "did you mean info or inspect? Or see"),
        ("frobnicate", "see"),
    ],
)
def test_a_misspelt_command_gets_the_nearest(typed, shown, capsys):
    assert main([typed, "--some", "option"]) == 2
    said = f"mpishard: error: unknown command '{typed}'; {shown} mpishard --help"
    assert " ".join(capsys.readouterr().err.split()) == said


def test_completion_is_of_the_shell_that_is_named(tmp_path, capsys, environ):
    environ(HOME=str(tmp_path))
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


def test_an_error_does_not_steer_the_terminal(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "a\x1b[2J\udc80")]) == 2
    assert r"a\x1b[2J\udc80 does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "to", "code"),
    [
        ("inspect", ">&-", 0),
        ("verify", "", 141),
        ("run -n 1 python -c 'import mpishard'", ">&- 2>&-", 0),
        ("run --min-workers 2 -n 1 true", "2>/dev/full", 2),
    ],
)
def test_what_nobody_reads_is_no_damage(name, to, code, tmp_path):
    """With a closed output, and with a pipe that nobody reads any more."""
    checkpoint = write(Arrays(), tmp_path / "a")
    command = ["bash", "-c", f"exec {sys.executable} -m mpishard {name} {checkpoint} {to}"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        finished = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert finished.returncode == code and "Traceback" not in finished.stderr, finished


def test_mpi_starts_where_no_home_is_known():
    """That of Open MPI does not without HOME, which is missing in cron jobs and containers."""
    command = [sys.executable, "-c", "import mpishard, os; mpishard.Mesh(); print(os.environ['HOME'])"]
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0 and Path(finished.stdout.strip()).is_dir(), finished


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_list_begins_as_what_commands_say_of_themselves(name, capsys):
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


def test_commands_that_need_no_mpi_do_not_start_it(tmp_path):
    """Open MPI leaves files behind where it was started without its mpirun."""
    write(Arrays(), tmp_path / "step", 2, generation=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "starts.jsonl").write_text("{}\n")
    typed = [
        *(f"{name} --help" for name in _COMMANDS),
        "estimate --ranks 4 --parameters 1e9",
        "info run",
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


def test_a_program_that_does_not_exist_is_refused_before_a_start(capsys):
    assert main(["run", "--elastic", "-n", "2", "trian"]) == 2
    assert "'trian' cannot be executed: the program does not exist" in capsys.readouterr().err


def test_run_says_where_it_cannot_write():
    command = [sys.executable, "-m", "mpishard", "run", "--folder", "/sys/notes", "-n", "1", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("mpishard: error: /sys/notes: "), done.stderr
    assert "give --folder a path" in done.stderr


def test_a_script_means_this_python(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import mpishard, sys; print(*sys.argv[1:])")
    command = [sys.executable, "-m", "mpishard", "run", "-n", "1", str(script), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "--steps 3\n"), done.stderr


WITHOUT = """
import sys

class Without:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Without())
from mpishard.cli import main
sys.exit(main({words}))
"""


@pytest.mark.parametrize(
    ("missing", "words", "said"),
    [
        (("typer", "rich", "matplotlib"), ["info"], "the commands need the package typer: pip install 'mpishard[cli]'"),
        (("rich",), ["inspect", "step"], "needs the package rich: pip install 'mpishard[cli]'"),
        (
            ("matplotlib",),
            ["schedule", "1f1b", "--stages=2", "--microbatches=4", "--png=x.png"],
            "needs the package matplotlib: pip install 'mpishard[cli]'",
        ),
        (
            ("safetensors",),
            ["import", "x.safetensors", "y"],
            "needs the package safetensors: pip install 'mpishard[weights]'",
        ),
        (("safetensors",), ["import", "x.npz", "y"], ""),
    ],
)
def test_a_command_says_which_extra_it_needs(missing, words, said, tmp_path, saved):
    write(Arrays(), tmp_path / "step")
    assert main(["export", str(saved), str(tmp_path / "x.npz")]) == 0
    assert main(["export", str(saved), str(tmp_path / "x.safetensors")]) == 0
    command = [sys.executable, "-c", WITHOUT.format(missing=missing, words=words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr and done.stderr.count("\n") == bool(said), done.stderr


@pytest.mark.skipif(Path(MPI.__file__).name.count(".") < 3, reason="this mpi4py looks for one MPI alone")
@pytest.mark.parametrize(("launcher", "code"), [({}, 2), ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 1)])
def test_where_no_mpi_library_is_one_line_says_how_to_get_one(launcher, code):
    command = [sys.executable, "-m", "mpishard", "info"]
    environment = {**os.environ, **launcher, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}

    def run(**variables):
        every = {**environment, **variables}
        return subprocess.run(command, env=every, capture_output=True, text=True, timeout=60, check=False)

    done = run()
    assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("mpishard: error: mpi4py can load no MPI library"), done.stderr
    assert "MPI4PY_MPIABI" in done.stderr and "pip install 'mpishard[mpich]'" in done.stderr, done.stderr
    if launcher:  # the first rank has said it
        done = run(PMI_RANK="1")
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("libmpi.so.12: cannot open shared object file: No such file"), "(libmpi.so.12: cannot open"),
        (RuntimeError("cannot load MPI library\n/a/libmpi.so: cannot open\n/a/libmpi.so.12: ..."), "library)"),
        (OSError("libmpi.so.40: cannot open shared object file"), "(libmpi.so.40: cannot open"),
        (ImportError("libhdf5.so.310: cannot open shared object file"), ""),
        (ModuleNotFoundError("No module named 'libmpi'"), ""),
        (RuntimeError("another"), ""),
    ],
)
def test_errors_of_mpi4py_without_a_library(error, said):
    text = explain_unloadable(error)
    assert said in text and bool(said) is bool(text) and "\n" not in text


@pytest.mark.parametrize(("launcher", "code"), [({}, 2), ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 1)])
def test_an_mpi4py_that_is_too_old_is_named(launcher, code, tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("__version__ = '3.1.4'")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])  # as a module of a cluster sets it
    command = [sys.executable, "-m", "mpishard", "info"]
    every = {**os.environ, **launcher, "PYTHONPATH": path}
    done = subprocess.run(command, env=every, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr
    assert f"mpi4py 3.1.4 of {tmp_path / 'mpi4py'} is too old, mpishard needs 4.1" in done.stderr, done.stderr


@pytest.mark.parametrize("version", ["4.1.0", "4.2.0rc1", "5.0", "unknown", ""])
def test_an_mpi4py_that_is_new_enough(version):
    assert not explain_old_mpi4py(version, "/a/mpi4py/__init__.py")


def test_the_oldest_mpi4py_is_that_of_the_package():
    dependencies = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"mpi4py>={'.'.join(map(str, MPI4PY))}" in dependencies


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_examples_are_listed_with_a_line_each(capsys, environ):
    environ(COLUMNS="1000")
    assert main(["example"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert sorted(rows) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert rows["digits"].startswith("The smallest complete script") and max(map(len, rows.values())) < 300


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_is_written_with_what_it_needs(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["example", name]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    said = capsys.readouterr().out
    assert f"{name}.py" in written and f" python {name}.py" in said and "examples/" not in said
    others = {path.name for path in EXAMPLES.iterdir() if path.suffix != ".png"} - written
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert text == (EXAMPLES / path.name).read_text()
        # Modules by what imports them, other files by their names.
        needed = set(re.findall(r"^from (\w+) import|^import (\w+)$", text, re.MULTILINE))
        assert not {f"{module}.py" for pair in needed for module in pair} & others
        assert not [other for other in others if not other.endswith(".py") and other in text]
    # Not written over, and nothing is written if one of its files is there.
    kept = tmp_path / max(written)
    for path in tmp_path.iterdir():
        path.unlink()
    kept.write_text("mine")
    assert main(["example", name]) == 2
    assert f"{kept.name} would be written over" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [kept] and kept.read_text() == "mine"


def test_an_example_is_not_left_in_parts(tmp_path):
    """The file that a full disk has cut would be in the way of the next try."""
    code = "import mpishard.cli, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    code += "raise SystemExit(mpishard.cli.main(['example', 'train_gpt']))"
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2 and "cannot write train_gpt.py" in finished.stderr, finished
    assert not list(tmp_path.iterdir())


def test_an_example_that_is_not_there(capsys):
    assert main(["example", "../setup"]) == 2
    assert "no example is called '../setup'" in capsys.readouterr().err


def test_a_batch_script_has_what_it_is_given(capsys):
    assert (
        main(["script", "slurm", "--nodes", "2", "--ntasks=8", "--time", "1-12:00:00", "--mail-type", "END,FAIL"]) == 0
    )
    printed = capsys.readouterr().out.splitlines()
    own = (Path(__file__).parents[2] / "slurm" / "train.sbatch").read_text().splitlines()
    given = ["--nodes=2", "--ntasks=8", "--time=1-12:00:00", "--mail-type=END,FAIL"]
    assert [f"#SBATCH {each}" in printed for each in given] == [True] * 4
    head = [line for line in printed if line.startswith("#SBATCH")]
    assert head == printed[1 : len(head) + 1] and len(head) == 10
    # Elsewhere it differs in how it calls itself, and in who has printed it.
    assert {line for line in printed if line not in own and "train.sbatch" not in line} - set(head) == {
        f"# Printed by mpishard script slurm of mpishard {VERSION}."
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Slurm"], "script is 'Slurm'; choose one of slurm, array, elastic"),
        (["slurm", "--array", "0-3"], "--array 0-3 is for a sweep"),
        (["slurm", "--nodes", "5"], "5 nodes for 4 tasks; give --ntasks"),
        (["slurm", "--account", "a\n#SBATCH --exclusive"], "--account"),
        (["slurm", "--time", "banana"], "--time is 'banana'; Slurm takes 30 (minutes), 12:00:00, 1-00:00:00"),
        (["slurm", "--time", "1:2:3:4"], "--time is '1:2:3:4'"),
        (["slurm", "--mail-type", "END,bogus"], "--mail-type is 'END,bogus'; Slurm takes words such as END,FAIL"),
        (["slurm", "--nodes", "banana"], "--nodes"),
        (["array", "--array", "0..3"], "--array is '0..3'; Slurm takes 0-3"),
        (["array", "--array", "0-1,3-2"], "--array is 0-1,3-2"),
        (["slurm", "--", "python"], "must begin with a training script"),
        (["slurm", "--", "-m", "train"], "must begin with a training script"),
    ],
)
def test_a_batch_script_that_cannot_be(words, said, capsys):
    assert main(["script", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--time", ["30", "12:00", "1-0", "1-0:30", "1-00:00:00", "UNLIMITED", "infinite", "-1"]),
        ("--mail-type", ["end", "TIME_LIMIT_80,FAIL"]),
        ("--array", ["0-3", "1,4,8-9", "0-15:4%2"]),
    ],
)
def test_a_batch_script_has_what_slurm_takes(option, values, capsys):
    for value in values:
        assert main(["script", "array", f"{option}={value}"]) == 0
        assert f"#SBATCH {option}={value}\n" in capsys.readouterr().out


def test_each_rank_has_a_file_of_its_output(tmp_path):
    """What is in a file stays; the terminal has what the supervisor says."""
    script, logs = tmp_path / "train.py", tmp_path / "logs" / "first"
    script.write_text(
        "import mpishard, sys; mesh = mpishard.Mesh()\nfor f in sys.stdout, sys.stderr: print(mesh.rank, file=f)"
    )
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("before\n")
    options = ["--log-dir", "logs/first", "-n", "2"]
    command = [sys.executable, "-m", "mpishard", "run", *options, "python", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "") and f"{logs}/rank-0.log" in done.stderr, done.stderr
    assert {path.name: path.read_text().split() for path in logs.iterdir()} == {
        "rank-0.log": ["0", "0"],
        "rank-1.log": ["before", "1", "1"],
    }


def test_a_command_of_many_words_reaches_the_launcher(tmp_path):
    """Also one of more than 128 KiB, which is what Linux takes in one argument."""
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\necho $#\n")
    launcher.chmod(0o700)
    words = ["x" * 1000] * 200
    command = [sys.executable, "-m", "mpishard", "run", "--launcher", str(launcher), "-n", "1", "true", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["203"], done.stderr[-1000:]


def test_a_folder_of_output_that_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["run", "--log-dir", str(tmp_path / "file" / "logs"), "-n", "1", "true"]) == 2
    assert f"{tmp_path}/file/logs: Not a directory" in capsys.readouterr().err


# ``mpishard inspect``, ``verify``, ``convert``, ``export``, ``import`` and ``diff`` as a user calls them.


@pytest.fixture(autouse=True)
def plain_terminal(environ):
    environ(COLUMNS="120", NO_COLOR="1")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A run with two checkpoints; not to be changed."""
    run = tmp_path_factory.mktemp("saved") / "run"
    run.mkdir()
    later = Arrays(1)
    later.facts["step"] = 10
    write(Arrays(), run / "step-00000005", 3, generation=1)
    write(later, run / "step-00000010", 2, generation=2)
    (run / "latest").symlink_to("step-00000010")
    return run


@pytest.fixture
def run(saved, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(saved, tmp_path / "run", symlinks=True)


@pytest.fixture
def shell(capsys):
    def shell(*arguments):
        """Exit code, and lines of stdout and of stderr."""
        code = main([str(each) for each in arguments])
        shown = capsys.readouterr()
        lines = shown.out.splitlines()
        stripped = [line.rstrip() for line in lines]
        assert arguments[0] != "inspect" or lines == stripped  # no line ends with blanks
        return code, stripped, shown.err.splitlines()

    return shell


def flip(path, place=300):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_inspect_a_run(saved, shell):
    code, lines, errors = shell("inspect", saved)
    assert (code, errors) == (0, [])
    assert [line.split()[:3] for line in lines[1:3]] == [["step-00000010", "10", "2"], ["step-00000005", "5", "1"]]
    assert lines[1].endswith("whole") and lines[2].endswith("whole")
    assert lines[4].startswith(f"{saved / 'step-00000010'}: whole; 3 files, ")
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in lines}
    for expected in (
        *("step 10", "rule (settings) betas=[0.9, 0.99], lr=0.1", "losses 2 numbers, the last 2"),
        *("tensors 6 of 52 elements", "files of pieces 2", "parameters float64 9 416 B"),
        *("table.weight 7 x 3 float32/float64 2 2 252 B", "gain scalar float32/float64 2 2 12 B"),
    ):
        assert expected in rows.values()
    assert rows["none"].endswith(" 0 -") and set(SHAPES) <= rows.keys()


@pytest.mark.parametrize(("path", "step"), [("step-00000005", "5"), ("latest", "10")])
def test_inspect_one(path, step, saved, shell):
    code, lines, _ = shell("inspect", saved / path)
    assert code == 0 and lines[0].startswith(f"{(saved / path).resolve()}: whole")
    assert [line.split() for line in lines if line.startswith("step ")] == [["step", step]]


def test_inspect_a_tensor(saved, shell):
    values = Arrays(1).values["parameters", "table.weight"]
    code, lines, _ = shell("inspect", saved, "--tensor", "table.weight")
    assert code == 0 and "table.weight: 7 x 3" in lines
    (row,) = (line.split() for line in lines if line.startswith("parameters  "))
    numbers = [values.min(), values.max(), values.mean(), np.sqrt(np.mean(values**2))]
    assert row == ["parameters", "float64", *(f"{number:.6g}" for number in numbers), "0", "0"]
    assert "parameters, the first entries" in lines
    place = lines.index("parameters, the first entries") + 1
    shown = np.array(" ".join(lines[place : place + 6]).replace("[", "").replace("]", "").split(), float)
    assert np.abs(shown - values[:6].ravel()).max() < 1e-8
    code, lines, _ = shell("inspect", saved, "--tensor", "none")
    assert code == 0 and any(line.split()[2:6] == ["nan"] * 4 for line in lines)


def test_names_do_not_steer_the_terminal(tmp_path, shell):
    write(Arrays(shapes={"a\x1b[2Jb\nc": (2,)}, facts={"notes": "x\x1b[31m[bold]"}), tmp_path / "one")
    code, lines, _ = shell("inspect", tmp_path / "one")
    assert code == 0 and not any("\x1b" in line for line in lines)
    assert any(line.startswith(r"a\x1b[2Jb\nc ") for line in lines)
    assert any(line.split() == ["notes", r"x\x1b[31m[bold]"] for line in lines)


def test_verify(saved, shell):
    code, lines, errors = shell("verify", saved)
    assert (code, errors) == (0, []) and len(lines) == 2
    assert all(line.endswith("6 tensors, all values finite") for line in lines)


def test_damage_is_named(run, shell):
    newest = run / "step-00000010"
    flip(newest / "pieces-00001.h5")
    code, lines, _ = shell("verify", run)
    assert code == 1
    assert lines[:2] == [
        f"{newest}: bad",
        f"  {newest / 'pieces-00001.h5'} is altered: its hash differs from the one in the manifest",
    ]
    assert lines[2].startswith(f"{run / 'step-00000005'}: good")
    # what is whole is taken, what is damaged is shown as far as it goes
    code, lines, _ = shell("inspect", run)
    assert code == 0 and lines[1].endswith("damaged") and lines[4].startswith(f"{run / 'step-00000005'}: whole")
    code, lines, _ = shell("inspect", newest)
    assert code == 0 and lines[0] == f"{newest}: damaged" and "pieces-00001.h5 is altered" in lines[1]
    assert any(line.startswith("table.weight") for line in lines)
    code, _, errors = shell("inspect", newest, "--tensor", "gain")
    assert code == 2 and "is damaged" in errors[0]
    code, lines, _ = shell("export", run, run / "x.npz")
    assert (
        code == 0
        and lines[0].startswith(f"{run}: taking step-00000005, since")
        and "pieces-00001.h5 is altered" in lines[0]
    )
    code, _, errors = shell("export", newest, run / "y.npz")
    assert code == 2 and "no whole checkpoint" in errors[0] and "pieces-00001.h5 is altered" in errors[0]


@pytest.mark.parametrize("file", ["index.h5", "manifest.json"])
def test_damage_of_what_tells_the_rest(file, run, shell):
    newest = run / "step-00000010"
    flip(newest / file)
    assert shell("verify", run)[0] == 1
    code, lines, _ = shell("inspect", newest)
    assert code == 0 and lines[0] == f"{newest}: damaged" and file in lines[1] and len(lines) == 2
    code, _, errors = shell("inspect", newest, "--tensor", "gain")
    assert code == 2 and "cannot be read" in errors[0]
    code, lines, _ = shell("diff", run, run / "step-00000005")
    assert code == 0 and lines[0].startswith(f"{run}: taking step-00000005, since") and file in lines[0]
    (newest / file).unlink()
    code, lines, _ = shell("verify", newest)
    assert code == 1 and lines[1] == f"  {newest / file} is missing"
    code, lines, _ = shell("diff", run, run / "step-00000005")
    assert code == 0 and lines[0].startswith(f"{run}: taking step-00000005")


def test_values_that_are_not_finite(tmp_path, shell):
    source = Arrays()
    source.values["parameters", "gain"] = np.array(np.nan)
    source.values["optimizer/exp_avg", "table.weight"][1:3, 0] = np.inf
    write(source, tmp_path / "one", 2)
    code, lines, _ = shell("verify", tmp_path / "one")
    assert code == 1 and lines[1:] == [
        "  parameters gain has 1 NaN and 0 infinite values",
        "  optimizer/exp_avg table.weight has 0 NaN and 2 infinite values",
    ]


def test_a_link_that_leads_astray(run, shell):
    (run / "latest").unlink()
    (run / "latest").symlink_to("step-00000077")
    code, lines, _ = shell("verify", run)
    assert code == 1 and "step-00000077" in lines[0] and lines[1].startswith(f"{run / 'step-00000010'}: good")
    code, _, errors = shell("inspect", run / "latest")
    assert code == 2 and "step-00000077" in errors[0]


def test_convert(saved, tmp_path, shell):
    code, lines, _ = shell("convert", saved, tmp_path / "five", "--files", 5)
    assert code == 0 and lines == [f"{saved}: taking step-00000010", f"written to {tmp_path / 'five'}"]
    assert len(list((tmp_path / "five").glob("pieces-*.h5"))) == 5
    assert shell("diff", saved / "latest", tmp_path / "five")[0] == 0
    assert shell("verify", tmp_path / "five")[0] == 0
    assert shell("convert", saved / "step-00000005", tmp_path / "plain.h5", "--plain")[0] == 0
    with h5py.File(tmp_path / "plain.h5") as plain:
        assert np.array_equal(plain["parameters/table.weight"], Arrays().values["parameters", "table.weight"])


def test_an_export_names_the_buffers_that_it_leaves_out(tmp_path, shell):
    write(Arrays(facts={**FACTS, "buffer.1.running_mean": np.zeros(4)}), tmp_path / "one")
    code, lines, _ = shell("export", tmp_path / "one", tmp_path / "x.npz")
    left_out = "without the buffers of the module: 1.running_mean"
    assert (code, lines[-1]) == (0, f"written to {tmp_path / 'x.npz'}, {left_out}")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_export_and_import(suffix, saved, tmp_path, shell):
    file, target = tmp_path / f"x.{suffix}", tmp_path / "step-00000010-2"
    assert shell("export", saved, file, "--optimizer")[0] == 0
    code, lines, _ = shell("import", file, target)
    assert (code, lines) == (0, [f"written to {target}: 6 tensors, parameters, optimizer/exp_avg"])
    assert shell("diff", saved, target)[0] == 0
    examined, _ = newest_whole(target)
    assert examined.contents.facts["step"] == examined.manifest.step == 10
    assert examined.contents.facts["rule"] == "Adam" and examined.manifest.generation == 1
    # the newest of the folder it goes into
    assert shell("import", file, tmp_path / "step-00000004", "--step", 4)[0] == 0
    examined, _ = newest_whole(tmp_path)
    assert examined.folder.name == "step-00000004" and examined.manifest.step == 4
    with CheckpointReader(examined.contents) as stored:
        assert Arrays(1).same(stored)


def test_import_of_parameters_alone(saved, tmp_path, shell):
    assert shell("export", saved, tmp_path / "x.npz")[0] == 0
    assert shell("import", tmp_path / "x.npz", tmp_path / "one")[0] == 0
    code, lines, _ = shell("diff", saved, tmp_path / "one")
    assert code == 1 and "optimizer/exp_avg is only in the first" in lines
    assert lines[-1] == "6 of 6 arrays are equal to the last bit"


def test_diff(tmp_path, shell):
    other = Arrays()
    other.values["parameters", "gain"] = other.values["parameters", "gain"] + 0.5
    other.values["parameters", ".."] = other.values["parameters", ".."] + 0.125
    one, two = write(Arrays(), tmp_path / "one", 2), write(other, tmp_path / "two", 3)
    assert shell("diff", one, one)[:2] == (0, ["12 of 12 arrays are equal to the last bit"])
    code, lines, _ = shell("diff", one, two)
    assert code == 1
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["parameters", "gain", "5.000e-01"],
        ["parameters", "..", "1.250e-01"],
    ]
    assert lines[3] == "10 of 12 arrays are equal to the last bit"
    code, lines, _ = shell("diff", one, two, "--tolerance", 0.25)
    assert code == 1 and lines[-1] == "1 of the others are within 0.25"
    assert shell("diff", one, two, "--tolerance", 0.75)[0] == 0
    assert shell("diff", one, two, "--tolerance", 0)[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{empty}"], "empty; it is empty"),
        (["inspect", "{above}"], "; there are some in "),
        (["inspect", "{above}/absent/latest"], "latest does not exist; there are some in"),
        (["inspect", "{others}"], "; it holds a0, a1, a2, a3, a4 and 2 more"),
        (["inspect", "{run}/index.h5"], "give that folder"),
        (["verify", "{file}"], "is a file; give the folder"),
        (["inspect", "{run}", "--tensor", "nothing"], "no tensor 'nothing'"),
        (["convert", "{run}", "{empty}/x"], "give either --files N"),
        (["convert", "{run}", "{empty}/x", "--files", "2", "--plain"], "give either --files N"),
        (["convert", "{run}", "{empty}/x", "--files", "0"], "at least 1 file"),
        (["convert", "{run}", "{empty}", "--files", "2"], "exists already"),
        (["convert", "{run}", "{empty}/a/b", "--plain"], "does not exist"),
        (["export", "{run}", "{empty}/x.pt"], "name it *.safetensors or *.npz"),
        (["export", "{run}", "{file}"], "exists already"),
        (["import", "{file}", "{empty}/x"], "cannot be read as npz: File is not a zip file"),
        (["import", "{empty}/absent.npz", "{empty}/x"], "error: {empty}/absent.npz: No such file or directory"),
        (["import", "{empty}/absent.safetensors", "{empty}/x"], "absent.safetensors"),
        (["convert", "{run}", "{empty}/step-00000077", "--files", "2"], "give step-00000010"),
        (["import", "{file}", "{empty}/x", "--step", "-1"], "--step is -1"),
        (["diff", "{run}", "{run}", "--tolerance", "nan"], "--tolerance is nan"),
        (["diff", "{run}", "{empty}"], "no checkpoint in"),
        (["plot", "--unheard"], "--unheard; see mpishard plot --help"),
        ("schedule 1f1b --stages 2".split(), "Missing option '--microbatches'"),
        ("schedule 1f1b --stages two --microbatches 2".split(), "--stages"),
        ("schedule 1f1b --stages 0 --microbatches 2".split(), "stages must be at least 1, got 0"),
        ("schedule 1f1b --stages 2 --microbatches 2 --chunks 2".split(), "schedule '1f1b' has 1 chunk a rank, got 2"),
        ("schedule other --stages 2 --microbatches 2".split(), "unknown schedule 'other'; choose one of"),
        ("schedule zb-h1 --stages 2 --microbatches 2 --backward 2".split(), "'zb-h1' does not use --backward"),
        ("schedule 1f1b --stages 2 --microbatches 2 --forward 1;2".split(), "--forward takes a number, or numbers"),
        ("schedule 1f1b --stages 2 --microbatches 2 --forward 1,2,3".split(), "forward has 3 times for 2 virtual"),
        ("schedule 1f1b --stages 1000000 --microbatches 8".split(), "1000000 stages of 1 chunks with 8"),
        ("schedule 1f1b --stages 2 --microbatches 2 --forward 1e308".split(), "the times add up to more"),
        ("schedule 1f1b --stages 2 --microbatches 2 --png /no/folder/x.png".split(), "/no/folder/x.png"),
    ],
)
def test_errors_are_one_line(arguments, message, saved, tmp_path, shell):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.npz").write_bytes(b"nothing")
    names = {"run": saved / "latest", "empty": tmp_path / "empty", "file": tmp_path / "file.npz"}
    names |= {"above": saved.parent, "others": tmp_path / "others"}
    for number in range(7):
        (tmp_path / "others" / f"a{number}").mkdir(parents=True)
    code, lines, errors = shell(*(each.format(**names) for each in arguments))
    assert (code, len(errors)) == (2, 1) and errors[0].startswith("mpishard: error: ")
    assert arguments[0] != "schedule" or not lines
    assert message.format(**names) in errors[0]
    assert not list((tmp_path / "empty").iterdir())


# ``mpishard schedule``: the picture, the figures below it, and errors of one line.

PICTURE = """\
1f1b: 2 stages, 3 micro-batches

time    |0             |5             |10
stage 0 F0 F1 ......B0--- F2 B1--- ...B2---
stage 1 ...F0 B0--- F1 B1--- F2 B2--- ......

(F forward, B backward, with the micro-batch; . idle)

time       12
bubble     25.0% of the time; 33.3% of the time computing
peak live  2 1 activations by stage (micro-batches of one chunk)
deadlock   none: with synchronous, non-blocking sends every stage ends its program, whatever the timing
"""


def schedule(*arguments):
    return main(["schedule", *map(str, arguments)])


def test_picture(capsys):
    assert schedule("1f1b", "--stages", 2, "--microbatches", 3) == 0
    output = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in output.split("\n")) == PICTURE


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ("interleaved", "--stages", 4, "--microbatches", 6, "--chunks", 3),
        ("1f1b", "--stages", 12, "--microbatches", 100),
        ("1f1b", "--stages", 3, "--microbatches", 4, "--forward", "1,0.0001,2"),
        ("zb-h1", "--stages", 3, "--microbatches", 20, "--transfer", 0.3),
    ],
)
def test_pictures_keep_to_the_width(arguments, columns, environ, capsys):
    environ(COLUMNS=str(columns))
    assert schedule(*arguments) == 0
    _, ruler_and_stages, *_ = capsys.readouterr().out.split("\n\n")
    ruler, *stages = ruler_and_stages.split("\n")
    assert len(stages) == arguments[2] and ruler.startswith("time ")
    assert len({len(line) for line in stages}) == 1 and len(stages[0]) <= columns


def test_a_picture_without_colours(environ, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for variables, colours in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, False)):
        environ(**{"NO_COLOR": "", "TERM": "xterm"} | variables)
        assert schedule("1f1b", "--stages", 2, "--microbatches", 3) == 0
        assert ("\x1b" in capsys.readouterr().out) == colours, variables


def test_long_pictures_say_what_is_left_out(capsys):
    schedule("1f1b", "--stages", 4, "--microbatches", 100)
    output = capsys.readouterr().out
    assert "(micro-batch numbers do not fit into 120 columns; --png FILE draws them)" in output
    # 112 columns of 309: 55, the mark of the cut, and 54
    assert "(the time from 55 to 255 is left out)" in output
    (first,) = (line for line in output.split("\n") if line.startswith("stage 0"))
    assert first.startswith("stage 0 FFFF......B-FB-FB-F") and first.endswith("FB-.B-.B-.B-") and " ~ " in first


def test_json(capsys):
    assert schedule("1f1b", "--stages", 4, "--microbatches", 8, "--json", "--blocking-sends") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["peak_live"] == [4, 3, 2, 1] and figures["deadlock"] is None
    assert (figures["bubble_fraction"], figures["makespan"]) == (3 / 11, 33)
    assert "waits until rank 3 takes it in F1" in figures["deadlock_blocking_sends"]
    assert len(figures["events"]) == 4 * 8 * 2
    assert figures["events"][-1] == {"rank": 3, "kind": "B", "microbatch": 7, "chunk": 0, "start": 25.0, "stop": 27.0}


def test_blocking_sends(capsys):
    for name, said in (("gpipe", "no deadlock with blocking sends either"), ("1f1b", "schedule '1f1b' deadlocks with")):
        schedule(name, "--stages", 2, "--microbatches", 2, "--blocking-sends")
        assert f"blocking   {said}" in capsys.readouterr().out


def test_png(tmp_path, capsys):
    file = tmp_path / "picture.png"
    assert schedule("interleaved", "--stages", 2, "--microbatches", 3, "--png", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(file) in capsys.readouterr().out


def test_few_microbatches(capsys):
    assert schedule("1f1b", "--stages", 4, "--microbatches", 2) == 0
    errors = capsys.readouterr().err
    assert errors.startswith("mpishard: warning: 2 micro-batches for 4 pipeline stages") and errors.count("\n") == 1
