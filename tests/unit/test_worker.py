"""The script of a job as `mpishard run` starts it, and its tracebacks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard.launch.job_notes import Ended, JobNotes, Notes
from mpishard.launch.script import RUNNER, describe, with_runner, without_runner

# The runner of scripts: nothing differs from what Python itself does with them, and it knows how they end.

PACKAGE = str(Path(mpishard.__file__).parents[1])
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(mpishard._STARTED_BY)}
ENVIRONMENT["PYTHONPATH"] = PACKAGE
ENVIRONMENT.pop("PYTHONSAFEPATH", None)  # of these tests; a script under -P is one of the cases
ADDRESS = re.compile("0x[0-9a-f]+")
SEEN = """
'''What a script sees.'''
from __future__ import annotations
import sys
def function(): pass
value: int = 1
print(sys.argv, sys.path, __name__, __doc__, __package__, __spec__, type(__loader__), __builtins__, __annotations__)
print(__file__, __cached__, function.__module__, function.__code__.co_filename)
print(sorted(globals()), sys.modules["__main__"].function is function)
print(sys.exit, sys.excepthook, sys.gettrace(), sys.flags, {"mpishard", "mpi4py"} & set(sys.modules))
"""


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=ENVIRONMENT | environment, **options)


def both(*words: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """What Python does, and what it does with the runner."""
    with contextlib.chdir(cwd):
        command = with_runner(["python", *words])[1:]
    assert RUNNER in command
    return run(*words, cwd=cwd), run(*command, cwd=cwd)


@pytest.mark.parametrize(
    "words",
    [
        "script.py",
        "link.py --flag",
        "-P script.py",
        "-Iu -X dev -W error script.py",
        "-m script x y",
        "-m package -v",
        "-Bm package.module",
        "package -v",
        "-P package",
        "archive x",
    ],
)
def test_a_script_sees_what_it_sees_without(words: str, tmp_path: Path) -> None:
    for name in ("script.py", "folder/other.py", "package/module.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SEEN)
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "link.py").symlink_to("folder/other.py")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", SEEN)
    plain, runs = both(*words.split(), cwd=tmp_path)
    assert plain.returncode == 0 == runs.returncode, plain.stderr + runs.stderr
    assert ADDRESS.sub("", runs.stdout) == ADDRESS.sub("", plain.stdout)


ENDS = [
    ("pass", 0),
    ("sys.exit(-1)", 255),
    ("sys.exit('no data')", 1),
    ("def f():\n    sys.exit(5)\nf()", 5),
    ("try:\n    sys.exit(6)\nexcept SystemExit:\n    pass", 0),
    ("thread = threading.Thread(target=sys.exit, args=(7,))\nthread.start()\nthread.join()", 0),
    ("threading.Timer(0.01, lambda: None).start()", 0),
    ("1 / 0", None),
    (
        "def f():\n    raise ValueError('bad')\ntry:\n    f()\nexcept ValueError as e:\n    raise KeyError(2) from e",
        None,
    ),
    ("import json\njson.loads('{')", None),
    ("import no_such_module", None),
    ("x = = 1", None),
    ("x = '\\udc00\\x00", None),
    ("raise KeyboardInterrupt", None),
    ("class Stop(BaseException): pass\nraise Stop(1)", None),
    ("sys.excepthook = lambda *e: print(e, e[2].tb_frame.f_code, e[2].tb_next, sys.excepthook)\n1 / 0", None),
    ("os._exit(8)", None),
    ("os.kill(os.getpid(), 15)", None),
]


# Lets a script print what its runner knows, at its end.
BEGIN = """import atexit, os, sys, threading
def tell():
    worker = sys.modules.get("mpishard.launch.worker")
    print("exit code", worker and worker.Script.this.code)
atexit.register(tell)
"""
CODE = "exit code .*\n"


@pytest.mark.parametrize(("end", "code"), ENDS)
def test_a_script_ends_as_without(end: str, code: int | None, tmp_path: Path) -> None:
    """With the same exit code and output, which a traceback belongs to; the runner knows the code."""
    (tmp_path / "script.py").write_text(BEGIN + end)
    plain, runs = both("script.py", "argument", cwd=tmp_path)
    assert runs.returncode == plain.returncode
    assert runs.stderr == plain.stderr
    told, out = re.findall(CODE, runs.stdout), re.sub(CODE, "", runs.stdout)
    assert ADDRESS.sub("", out) == ADDRESS.sub("", re.sub(CODE, "", plain.stdout))
    assert told in ([f"exit code {code}\n"], [] if code is None else None)


def test_where_a_process_is_said_without_the_runner(tmp_path: Path) -> None:
    """By the watchdog and by ``mpishard why``."""
    (tmp_path / "script.py").write_text("""
import sys
from mpishard.launch.script import innermost
def f():
    frame = sys._getframe()
    print([each.name for each in innermost(frame, 1) + innermost(frame, 9)])
f()
""")
    for done in both("script.py", cwd=tmp_path):
        assert done.stdout == "['f', 'f', '<module>']\n", done.stderr


@pytest.mark.parametrize("module", ["failing", "package", "package.absent", "absent"])
def test_a_module_that_fails(module: str, tmp_path: Path) -> None:
    """The frames of runpy, which Python shows before those of the module, are left out."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    for name in ("failing.py", "package/__main__.py"):
        (tmp_path / name).write_text("def f():\n    1 / 0\nf()\n")
    plain, runs = both("-m", module, cwd=tmp_path)
    assert runs.returncode == plain.returncode == 1
    assert runs.stderr == re.sub('  File "<frozen runpy>.*\n', "", plain.stderr) != ""


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    """As on another host."""
    runs = run(RUNNER, "absent.py", cwd=tmp_path)
    assert runs.returncode == 2 and f"can't open file '{tmp_path}/absent.py': [Errno 2]" in runs.stderr
    for words in ([RUNNER], [RUNNER, "-m"]):
        assert "usage: worker.py SCRIPT" in run(*words, cwd=tmp_path).stderr


MAIN = """
import multiprocessing, pickle, sys
from dataclasses import dataclass

@dataclass
class Point:
    x: int

def twice(point):
    return Point(2 * point.x), sys.argv, __name__

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(twice)) is twice
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    assert MPI.pickle.loads(MPI.pickle.dumps([twice, Point(3)])) == [twice, Point(3)]
    assert world.bcast((twice, Point)) == (twice, Point)
    for method in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            (found,) = pool.map(twice, [Point(3)])
        assert found == (Point(6), sys.argv, "__main__" if method == "fork" else "__mp_main__"), found
    print("done")
"""


@pytest.mark.parametrize("words", ["script.py 1", "-m script 1"])
def test_main_is_found_by_pickle_and_by_processes_that_it_starts(words: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAIN)
    for done in both(*words.split(), cwd=tmp_path):
        assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    ("words", "end", "ended"),
    [
        ([RUNNER, "script.py"], "raise SystemExit(3)", Ended(3)),
        ([RUNNER, "script.py"], "from mpishard.launch.exit_codes import note_run; note_run(True)", Ended(130)),
        ([RUNNER, "script.py"], "raise ArithmeticError", None),
        ([RUNNER, "script.py"], "sys.last_value = ValueError()\nsys.exit(3)", Ended(3)),  # as pytest for a failed test
        ([RUNNER, "-m", "script"], "sys.exit(75)", Ended(75)),
        (["-m", "mpishard.launch.worker", "script.py"], "raise SystemExit(3)", Ended(3)),
        (["script.py"], "sys.exit(3)", Ended(3)),  # by the hook
        (["script.py"], "raise SystemExit(3)", Ended(None)),
    ],
)
def test_what_the_supervisor_hears(words: list[str], end: str, ended: Ended | None, tmp_path: Path) -> None:
    hooked = words == ["script.py"]
    begin = f"import sys\nbefore = sys.exit\nimport mpishard\nassert (sys.exit is before) == {not hooked}\n"
    (tmp_path / "script.py").write_text(begin + end)
    folder = JobNotes.create(tmp_path / "run")
    done = run(*words, cwd=tmp_path, **folder.environment())
    assert folder.notes.ended == ended, done.stderr
    assert (folder.notes.failure is None) == (ended is not None) and folder.notes.started, done.stderr


def test_an_exit_code_that_could_be_a_signal_is_noted_before_mpishard_is_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(10)")
    folder = JobNotes.create(tmp_path / "run")
    done = run(RUNNER, "script.py", cwd=tmp_path, **folder.environment())
    assert (done.returncode, folder.notes) == (10, Notes(given_up=Ended(10))), done.stderr


@pytest.mark.parametrize(
    ("words", "options", "script"),
    [
        ("python script.py -m a", "", "script.py -m a"),
        ("/usr/bin/python3 ./script.py", "", "./script.py"),
        ("python3.11 -uX dev -Wd script.py", "-uX dev -Wd", "script.py"),
        ("python -um package a", "-u", "-m package a"),
        ("python -mpackage", "", "-m package"),
        ("python --check-hash-based-pycs never script.py", "--check-hash-based-pycs never", "script.py"),
    ],
)
def test_where_the_runner_goes(words: str, options: str, script: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    command = words.split()
    expected = [command[0], *options.split(), RUNNER, *script.split()]
    assert with_runner(command) == expected == with_runner(expected)
    assert without_runner([RUNNER, *script.split()]) == script.split() == without_runner(script.split())
    assert with_runner(command, elsewhere=True) == command
    assert with_runner([sys.executable, *command[1:]], elsewhere=True) == [sys.executable, *expected[1:]]


@pytest.mark.parametrize(
    "words",
    [
        "pytest script.py",
        "pythonic script.py",
        "python",
        "python -ic pass",
        "python -iX dev script.py",
        "python -xu script.py",
        "python -V",
        "python -m",
        "python absent.py",
        "python script.pyc",
        "python -m mpishard.launch.worker script.py",
    ],
)
def test_commands_that_are_left_alone(words: str, tmp_path: Path, monkeypatch) -> None:
    for name in ("script.py", "script.pyc"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert with_runner(words.split()) == words.split()


# Tracebacks show the user's frames, and where mpishard refuses what it was given.


def failing(parameters, samples, gradients):
    raise ArithmeticError("spoilt") from KeyError("its cause")


def train(function, **options):
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        problem = mpishard.OptimizationProblem(function, np.zeros(3), samples=9, batch_size=9, steps=1)
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mesh).optimize(problem, progress=False, **options)


def refused():
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        mpishard.DDPOptimizer(mpishard.SGD(lr=0.1), mesh).step(np.zeros(5), np.zeros(4))


def text_and_files(call, *arguments, **options):
    """The text for the exception of a call, and the files of its frames."""
    try:
        call(*arguments, **options)
    except Exception as error:
        text = describe(error, error.__traceback__)
        return text, re.findall(r'File "([^"]*)", line', text)
    pytest.fail("it did not fail")


def test_of_a_users_function_only_the_users_frames():
    text, files = text_and_files(train, failing)
    assert files == [__file__] * 3
    assert "frames of mpishard are left out; MPISHARD_TRACEBACK=1" in text
    assert text.endswith("ArithmeticError: spoilt\n") and "KeyError: 'its cause'" in text
    # Those of a library that the function calls belong to it.
    _, files = text_and_files(train, lambda parameters, samples, gradients: np.linalg.inv(np.zeros((2, 3))))
    assert files[:3] == [__file__] * 3 and all("numpy" in file for file in files[3:])


def test_of_refused_arguments_the_users_frames_and_who_refuses(environ):
    text, files = text_and_files(refused)
    assert files[:-1] == [__file__] * 2
    assert files[-1].endswith("validation.py")
    assert text.endswith("ValueError: gradients have 4 elements, but parameters have 5\n")
    environ(MPISHARD_TRACEBACK="1")
    text, files = text_and_files(refused)
    assert "left out" not in text and any(file.endswith("settings.py") for file in files)


def test_a_fault_inside_of_mpishard_is_told_whole(monkeypatch):
    monkeypatch.setattr("mpishard.data.sampling.permuted", lambda *arguments: None)
    text, files = text_and_files(train, lambda *arguments: 0.0)
    assert "left out" not in text
    assert len(files) > 5


@pytest.mark.parametrize(
    ("line", "frames"), [("raise ValueError(what)", 1), ("raise ValueError(what[9])", 2), ("what[9]", 2)]
)
def test_a_fault_in_the_words_of_a_refusal_is_told_whole(line, frames, tmp_path, monkeypatch):
    inside, between = tmp_path / "inside.py", tmp_path / "between.py"
    inside.write_text(f"def refuse(what):\n    {line}\n")
    between.write_text("def check(refuse):\n    refuse([])\n")
    monkeypatch.setattr("mpishard.launch.script.PACKAGE", str(tmp_path))
    functions: dict = {}
    for path in (inside, between):
        exec(compile(path.read_text(), path, "exec"), functions)
    _, files = text_and_files(functions["check"], functions["refuse"])
    assert [file for file in files if file.startswith(str(tmp_path))] == [str(between), str(inside)][-frames:]


@pytest.mark.parametrize(
    ("words", "variables", "starts"),
    [
        ("", {}, True),
        ("from multiprocessing.spawn import spawn_main; ", {}, False),
        ("", {"PMI_FD": "99", "PMI_RANK": "0", "PMI_SIZE": "2"}, False),
        ("", {"PMIX_NAMESPACE": "job@1", "PMIX_RANK": "0", "MPISHARD_RANK": "job@1 0 1"}, False),
        ("import os; file = open(os.devnull); os.environ['PMI_FD'] = str(file.fileno()); ", {}, False),
    ],
)
def test_a_process_that_a_rank_starts_starts_no_mpi(words: str, variables: dict[str, str], starts: bool) -> None:
    """Workers of multiprocessing died in MPI_Init, and their pool started others for ever."""
    command = [sys.executable, "-c", f"{words}import sys, mpishard; print('mpi4py.MPI' in sys.modules)"]
    environment = {**os.environ, "MPI_LOCALNRANKS": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{starts}\n"), done.stderr
