"""The command line with which a joining process runs the script of the run."""

from __future__ import annotations

import pytest

from mpishard.comm.mesh import CELL_OPTION
from mpishard.elastic.spawning import BOOT, command
from mpishard.launch.script import RUNNER


@pytest.mark.parametrize(
    ("arguments", "options", "script"),
    [
        (["train.py", "-m", "x"], [], ["train.py", "-m", "x"]),
        (["-O", "-X", "dev", "train.py"], ["-O", "-X", "dev"], ["train.py"]),
        (["-Xdev", "-Werror", "train.py", "--", "-c"], ["-Xdev", "-Werror"], ["train.py", "--", "-c"]),
        (["-uW", "error", "-m", "package.train", "--steps", "3"], ["-uW", "error"], None),
        (["-um", "package.train", "--steps", "3"], ["-u"], ["-m", "package.train", "--steps", "3"]),
        (["-mpackage.train"], [], ["-m", "package.train"]),
        (["-c", "import mpishard\nrun()", "a"], [], ["-c", "import mpishard\nrun()", "a"]),
        (["--check-hash-based-pycs", "never", "train.py"], ["--check-hash-based-pycs", "never"], ["train.py"]),
    ],
)
def test_the_script_runs_with_its_options(arguments, options, script):
    script = script or ["-m", "package.train", "--steps", "3"]
    expected = ["-X", f"{CELL_OPTION}=2x1", *options, "-c", BOOT, *script]
    assert command(["python", *arguments], (2, 1)) == expected
    assert command(["python", *expected], (2, 1)) == expected, "a spawned process spawns others"
    for runner in ([RUNNER], ["-m", "mpishard.launch.worker"]):  # the runner of `mpishard run`; spawning has its own
        assert command(["python", *options, *runner, *script], (2, 1)) == expected


@pytest.mark.parametrize("arguments", [[], ["-"], ["-u", "-"], ["-i"]])
def test_no_script_is_refused(arguments):
    with pytest.raises(ValueError, match="standard input"):
        command(["python", *arguments], (1, 1))
