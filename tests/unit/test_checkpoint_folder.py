"""The folder of a run: a checkpoint has its name only once it is on the disk, and the newest are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpishard.checkpoint import disk, folder
from mpishard.checkpoint.folder import FileEntry, Manifest, Retained, Retention, hash_file


def save(run, step, keep=None, own=None):
    """A checkpoint as far as its folder is concerned; `keep` counts all of them, or those with these ids."""
    unfinished = folder.begin(run, step)
    (unfinished.path / "index.h5").write_bytes(b"index")
    files = {"index.h5": FileEntry(*hash_file(unfinished.path / "index.h5"))}
    folder.publish(unfinished, Manifest(unfinished.id, unfinished.generation, step, files))
    unfinished.held.close()
    own = unfinished.others if own is None else own
    assert folder.tidy(unfinished.target, keep, own | {unfinished.id}) == []
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


def test_only_its_own_count_and_go(tmp_path):
    save(tmp_path, 1)
    (first,) = folder.candidates(tmp_path)
    save(tmp_path, 2)
    save(tmp_path, 3, 1, own={first.manifest.id})
    assert found(tmp_path) == ["step-00000003", "step-00000002"]
    save(tmp_path, 1, 1, own={first.manifest.id})  # a new one with the name of one that is gone
    save(tmp_path, 4, 1, own={first.manifest.id})
    assert found(tmp_path) == ["step-00000004", "step-00000001", "step-00000003", "step-00000002"]


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
        unfinished.held.close()
        (message,) = folder.tidy(unfinished.target, 1, unfinished.others | {unfinished.id})
        assert "latest does not point to" in message
    assert first.is_dir()


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-00000007").mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, 1)
    # A folder without a manifest may be anybody's: it is reported, and not removed.
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


def test_left_overs_go_when_the_next_begins_and_what_others_write_stays(tmp_path):
    ids = [f"{number:032x}" for number in range(5)]
    # Of a process that is dead; without a lock, of an hour ago and of now; and somebody's.
    dead, old, link, new = (
        tmp_path / f".unfinished-{name}-{id}"
        for name, id in zip(("step-00000001", "step-00000002-2", "latest", "step-00000003"), ids, strict=False)
    )
    for folder_of in (dead, old, new, tmp_path / ".unfinished-business"):
        folder_of.mkdir()
        (folder_of / "pieces-00000.h5").write_bytes(b"half")
    disk.hold(dead / "manifest.json").close()
    link.symlink_to("nowhere")
    for path in (old, old / "pieces-00000.h5", link):
        os.utime(path, (0, time.time() - 3700), follow_symlinks=False)
    first = folder.begin(tmp_path, 3)
    second = folder.begin(tmp_path, 3)
    kept = {".unfinished-business", new.name, first.path.name, second.path.name}
    assert set(names(tmp_path)) == kept
    # They do not get in each other's way when they appear.
    assert [each.target.name for each in (first, second)] == ["step-00000003-2", "step-00000003-3"]
    assert first.path.name == f".unfinished-step-00000003-2-{first.id}"
    first.held.close()
    folder.begin(tmp_path, 3)
    assert not first.path.exists() and second.path.exists()


@pytest.mark.faults
def test_a_dead_process_holds_nothing(tmp_path):
    script = "import sys; from mpishard.checkpoint import folder; import pathlib, os, signal; "
    script += "folder.begin(pathlib.Path(sys.argv[1]), 1); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = names(tmp_path)
    assert left.startswith(".unfinished-step-00000001-")
    assert names(tmp_path) == [left] and folder.begin(tmp_path, 1).path.name != left
    assert left not in names(tmp_path)


def test_left_overs_that_cannot_be_removed_are_in_nobodys_way(tmp_path, monkeypatch):
    held = folder.begin(tmp_path, 1)
    held.held.close()

    def refuse(path):
        raise OSError(16, "Device or resource busy", str(path))

    monkeypatch.setattr(disk, "remove", refuse)
    assert folder.begin(tmp_path, 2).path.is_dir() and held.path.is_dir()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    first, second = folder.begin(tmp_path, 1), folder.begin(tmp_path, 2)
    assert first.path.is_dir()
    for path in (first.path, first.path / "manifest.json"):
        os.utime(path, (0, time.time() - 3700))
    folder.begin(tmp_path, 3)
    assert not first.path.exists() and second.path.exists()


def test_a_checkpoint_is_no_folder_for_others(tmp_path):
    one = save(tmp_path, 1)
    with pytest.raises(ValueError, match="itself a checkpoint"):
        folder.begin(one, 2)
    assert names(one) == ["index.h5", "manifest.json"]


def test_folders_that_cannot_be_synced(tmp_path, monkeypatch):
    """As on some network file systems; a file that cannot be is an error."""

    def refuse(descriptor):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    disk.sync(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Invalid argument.*file"):
        disk.sync(tmp_path / "file")


def test_a_folder_that_can_no_longer_be_listed_is_told_of(tmp_path, monkeypatch):
    """What is published is whole, whatever comes after it."""
    unfinished = folder.begin(tmp_path, 1)
    folder.publish(unfinished, Manifest(unfinished.id, unfinished.generation, 1, {"index.h5": FileEntry(0, "")}))

    def stale(path):
        raise OSError(116, "Stale file handle", str(path))

    monkeypatch.setattr(os, "listdir", stale)
    (message,) = folder.tidy(unfinished.target, 1, {unfinished.id})
    assert "cannot be listed, so what is beyond keep=1 stays: Stale file handle" in message


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(OSError):
        folder.begin(tmp_path / "run", 1)
    with pytest.raises(OSError):
        folder.candidates(tmp_path / "run")


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    save(tmp_path, 1, 1)
    steps = []
    for name in ("make_folder", "hold", "write", "sync", "rename", "replace_link", "remove"):
        action = getattr(disk, name)

        def recorded(path, *rest, name=name, action=action):
            steps.append((name, Path(path.name).name))
            return action(path, *rest)

        monkeypatch.setattr(disk, name, recorded)
    save(tmp_path, 2, 1)
    written = steps[0][1]
    run = tmp_path.name
    assert steps[:7] == [
        ("make_folder", written),
        ("hold", "manifest.json"),
        ("write", "manifest.json.unheld"),  # as it was called when it was made
        ("sync", "manifest.json"),
        ("sync", written),
        ("rename", written),
        ("sync", run),
    ]
    assert steps[7][0] == "replace_link" and steps[7][1].startswith(".unfinished-latest-")
    # An old one loses its name at once, and only then its files.
    assert steps[8:10] == [("sync", run), ("rename", "step-00000001")]
    assert steps[10][0] == "remove" and steps[10][1].startswith(".unfinished-step-00000001-")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda link: None, ""),
        (lambda link: link.symlink_to("step-00000001"), ""),
        (lambda link: link.symlink_to("step-00000002"), "points to 'step-00000002', which is no checkpoint"),
        (lambda link: link.symlink_to("/tmp"), "points to '/tmp'"),
        (lambda link: link.write_text("step-00000001"), "is not a link"),
    ],
)
def test_a_link_to_no_checkpoint(tmp_path, make, message):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    assert message in folder.dangling_links(tmp_path) and bool(message) == bool(folder.dangling_links(tmp_path))


def test_what_keep_counts(tmp_path):
    """Its own checkpoints from the moment when they begin; all others only after `adopt`, and once."""
    retention = Retention(2)

    def beginning(id, *others):
        retention.begin(folder.Unfinished(tmp_path, tmp_path, id, 1, others=frozenset(others)))
        return retention.retained()

    assert beginning("a", "x") == Retained(2, frozenset("a"))
    retention.adopt()
    assert retention.retained() == Retained(2, frozenset("a"))  # what is there when the next save begins
    assert beginning("b", "x", "y") == Retained(2, frozenset("abxy"))
    assert beginning("c", "z") == Retained(2, frozenset("abcxy"))
