"""``mpishard inspect``, ``verify``, ``convert``, ``export``, ``import`` and ``diff`` as a user calls them."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest
from sources import SHAPES, Arrays, write

from mpishard.checkpoint.archives import Stored
from mpishard.checkpoint.verify import newest_whole
from mpishard.cli import main


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


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
        return code, [line.rstrip() for line in shown.out.splitlines()], shown.err.splitlines()

    return shell


def flip(path, place=300):
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def test_no_line_ends_with_blanks(saved, capsys):
    for command in (["inspect", saved], ["inspect", saved, "--tensor", "table.weight"]):
        assert main([str(each) for each in command]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 5 and lines == [line.rstrip() for line in lines]


def test_inspect_a_run(saved, shell):
    code, lines, errors = shell("inspect", saved)
    assert (code, errors) == (0, [])
    assert [line.split()[:3] for line in lines[1:3]] == [["step-00000010", "10", "2"], ["step-00000005", "5", "1"]]
    assert lines[1].endswith("whole") and lines[2].endswith("whole")
    assert lines[4].startswith(f"{saved / 'step-00000010'}: whole; 3 files, ")
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["step"] == ["step", "10"]
    assert rows["rule (settings)"] == ["rule", "(settings)", "betas=[0.9,", "0.99],", "lr=0.1"]
    assert rows["losses"][1:] == ["2", "numbers,", "the", "last", "2"]
    assert rows["tensors"][1:] == ["6", "of", "52", "elements"]
    assert rows["files of pieces"][-1] == "2"
    assert rows["parameters"] == ["parameters", "float64", "9", "416", "B"]
    assert rows["table.weight"] == ["table.weight", "7", "x", "3", "float32/float64", "2", "2", "252", "B"]
    assert rows["gain"] == ["gain", "scalar", "float32/float64", "2", "2", "12", "B"]
    assert rows["none"][-2:] == ["0", "-"]
    assert set(SHAPES) <= rows.keys()


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
    assert code == 0 and lines[0] == f"{run}: taking step-00000005"
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
    (newest / file).unlink()
    code, lines, _ = shell("verify", newest)
    assert code == 1 and lines[1] == f"  {newest / file} is missing"
    code, lines, _ = shell("diff", run, run / "step-00000005")
    assert code == 0 and lines[0] == f"{run}: taking step-00000005"


def test_an_index_of_another_checkpoint(run, shell):
    newest, older = run / "step-00000010", run / "step-00000005"
    shutil.copy(older / "index.h5", newest / "index.h5")
    code, lines, _ = shell("verify", newest)
    assert code == 1 and "index.h5" in lines[1]


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


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_export_and_import(suffix, saved, tmp_path, shell):
    file, target = tmp_path / f"x.{suffix}", tmp_path / "step-00000010-2"
    assert shell("export", saved, file, "--optimizer")[0] == 0
    code, lines, _ = shell("import", file, target)
    assert (code, lines) == (0, [f"written to {target}: 6 tensors, parameters, optimizer/exp_avg"])
    assert shell("diff", saved, target)[0] == 0
    examined = newest_whole(target)
    assert examined.contents.facts["step"] == examined.manifest.step == 10
    assert examined.contents.facts["rule"] == "Adam" and examined.manifest.generation == 1
    # the newest of the folder it goes into
    assert shell("import", file, tmp_path / "step-00000004", "--step", 4)[0] == 0
    examined = newest_whole(tmp_path)
    assert examined.folder.name == "step-00000004" and examined.manifest.step == 4
    with Stored(examined.contents) as stored:
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
        (["inspect", "{empty}/absent"], "absent does not exist; "),
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
        (["import", "{empty}/absent.npz", "{empty}/x"], "absent.npz"),
        (["import", "{empty}/absent.safetensors", "{empty}/x"], "absent.safetensors"),
        (["convert", "{run}", "{empty}/step-00000077", "--files", "2"], "give step-00000010"),
        (["import", "{file}", "{empty}/x", "--step", "-1"], "--step is -1"),
        (["diff", "{run}", "{run}", "--tolerance", "nan"], "--tolerance is nan"),
        (["diff", "{run}", "{empty}"], "no checkpoint in"),
    ],
)
def test_errors_are_one_line(arguments, message, saved, tmp_path, shell):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.npz").write_bytes(b"nothing")
    names = {"run": saved / "latest", "empty": tmp_path / "empty", "file": tmp_path / "file.npz"}
    names |= {"above": saved.parent, "others": tmp_path / "others"}
    for number in range(7):
        (tmp_path / "others" / f"a{number}").mkdir(parents=True)
    code, _, errors = shell(*(each.format(**names) for each in arguments))
    assert code == 2 and len(errors) == 1 and errors[0].startswith("mpishard: error: ") and message in errors[0]
    assert not list((tmp_path / "empty").iterdir())
