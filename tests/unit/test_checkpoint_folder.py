"""The folder of a run: a checkpoint has its name only once it is on the disk, and the newest are kept."""

from __future__ import annotations

import os

import pytest

from mpishard.checkpoint import disk, folder
from mpishard.checkpoint.manifest import FileEntry, Manifest, hash_file


def save(run, step, keep=None):
    """A checkpoint as far as its folder is concerned."""
    unfinished = folder.begin(run, step)
    (unfinished.path / "index.h5").write_bytes(b"index")
    files = {"index.h5": FileEntry(*hash_file(unfinished.path / "index.h5"))}
    folder.publish(unfinished, Manifest(unfinished.id, unfinished.generation, step, files))
    assert folder.tidy(unfinished.target, keep) == []
    return unfinished.target


def names(run):
    return sorted(entry.name for entry in run.iterdir())


def found(run):
    return [candidate.path.name for candidate in folder.candidates(run)]


def test_newest_first_by_generation_not_by_step(tmp_path):
    run = tmp_path / "a" / "run"
    assert found(run) == []
    for step in (10, 20, 5, 10):
        save(run, step)
    assert found(run) == ["step-00000010-2", "step-00000005", "step-00000020", "step-00000010"]
    assert [candidate.manifest.generation for candidate in folder.candidates(run)] == [4, 3, 2, 1]
    assert os.readlink(run / "latest") == "step-00000010-2"
    assert found(run / "latest") == ["latest"]
    assert folder.candidates(run / "step-00000020")[0].manifest.step == 20


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for step in range(1, 6):
        save(tmp_path, step, keep)
    assert found(tmp_path) == [f"step-0000000{step}" for step in (5, 4, 3)[:keep]]
    assert names(tmp_path) == ["latest", *sorted(found(tmp_path))]


def test_the_one_that_latest_names_is_kept(tmp_path, monkeypatch):
    """Where no link can be made, `latest` goes on to name an older one, which must not go."""
    first = save(tmp_path, 1, 1)

    def refuse(link, target):
        raise OSError(1, "no links here", str(link))

    monkeypatch.setattr(disk, "make_link", refuse)
    for step in (2, 3):
        unfinished = folder.begin(tmp_path, step)
        folder.publish(unfinished, Manifest(unfinished.id, unfinished.generation, step, {"index.h5": FileEntry(0, "")}))
        (told,) = folder.tidy(unfinished.target, 1)
        assert "latest does not point to" in told
    assert first.is_dir()


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-00000007").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, 1)
    # A folder without a manifest may be anybody's: told of, and not removed.
    assert found(tmp_path) == ["step-00000003", "step-00000007"]
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003", "step-00000007", "step-notes"]
    assert "manifest.json is missing" in folder.candidates(tmp_path)[-1].problem


def test_a_damaged_one_counts_neither_as_kept_nor_as_newest(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "manifest.json").write_bytes(b"{}")
    assert found(tmp_path) == ["step-00000001", "step-00000002"]
    assert folder.begin(tmp_path, 3).generation == 2
    assert first.is_dir()


def test_a_manifest_of_another_step_is_stale(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
    assert [bool(candidate.problem) for candidate in folder.candidates(tmp_path)] == [False, True]
    assert "stale: it belongs to a checkpoint of step 1" in folder.candidates(second)[0].problem


def test_left_overs_go_when_the_next_begins(tmp_path):
    (tmp_path / ".unfinished-step-00000001-0").mkdir()
    (tmp_path / ".unfinished-step-00000001-0" / "pieces-00000.h5").write_bytes(b"half")
    (tmp_path / ".unfinished-latest").symlink_to("nowhere")
    unfinished = folder.begin(tmp_path, 2)
    assert names(tmp_path) == [unfinished.path.name]
    assert unfinished.path.name.startswith(".unfinished-step-00000002-") and unfinished.id in unfinished.path.name


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(OSError):
        folder.begin(tmp_path / "run", 1)
    with pytest.raises(OSError):
        folder.candidates(tmp_path / "run")


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    save(tmp_path, 1, 1)
    steps = []
    for name in ("make_folder", "write", "sync", "rename", "replace_link", "remove"):
        action = getattr(disk, name)

        def recorded(path, *rest, name=name, action=action):
            steps.append((name, path.name))
            return action(path, *rest)

        monkeypatch.setattr(disk, name, recorded)
    save(tmp_path, 2, 1)
    written = steps[0][1]
    run = tmp_path.name
    assert steps[:7] == [
        ("make_folder", written),
        ("write", "manifest.json"),
        ("sync", "manifest.json"),
        ("sync", written),
        ("rename", written),
        ("sync", run),
        ("remove", ".unfinished-latest"),
    ]
    assert steps[7:9] == [("replace_link", ".unfinished-latest"), ("sync", run)]
    # An old one loses its name at once, and only then its files.
    assert steps[9] == ("rename", "step-00000001")
    assert steps[10][0] == "remove" and steps[10][1].startswith(".unfinished-step-00000001-")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda link: None, ""),
        (lambda link: link.symlink_to("step-00000001"), ""),
        (lambda link: link.symlink_to("step-00000002"), "points to 'step-00000002', which is no checkpoint"),
        (lambda link: link.symlink_to("/tmp"), "points to '/tmp'"),
        (lambda link: link.write_text("step-00000001"), "is not a link"),
    ],
)
def test_a_link_that_went_astray(tmp_path, make, told):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    assert told in folder.astray(tmp_path) and bool(told) == bool(folder.astray(tmp_path))
