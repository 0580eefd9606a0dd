"""The folder of checkpoints, their manifests, the threads that read their files, and when and how they are written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import standin
import xxhash
from hypothesis import given
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.checkpoint import disk, folder
from mpishard.checkpoint.checkpoints import Measured, Pace, save_interval
from mpishard.checkpoint.folder import Candidate, FileEntry, Manifest, decode_manifest, hash_file, read_manifest
from mpishard.checkpoint.pieces import ReadThreads, pieces_file, read_into
from mpishard.checkpoint.save import Snapshot
from mpishard.checkpoint.verify import examine, share_of_files
from mpishard.comm import json_exchange
from mpishard.comm.channel import Request
from mpishard.comm.ledger import Ledger
from mpishard.layout.run_state import Shard
from mpishard.layout.tensors import Piece

# The folder of a run: a checkpoint has its name only once it is on the disk, and the newest are kept.


def save(run, step, keep=None, own=None, message=None):
    """A checkpoint as far as its folder is concerned; `keep` counts all of them, or those with these ids."""
    unfinished = folder.begin(run, step)
    (unfinished.path / "index.h5").write_bytes(b"index")
    files = {"index.h5": FileEntry(*hash_file(unfinished.path / "index.h5"))}
    folder.publish(unfinished, Manifest(unfinished.id, unfinished.generation, step, files))
    unfinished.held.close()
    own = unfinished.others if own is None else own
    messages = folder.tidy(unfinished.target, keep, own | {unfinished.id})
    assert len(messages) == bool(message) and all(message in each for each in messages)
    return unfinished.target


def failing(number):
    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    return fail


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
    own = {folder.candidates(tmp_path)[0].manifest.id}
    save(tmp_path, 2)
    save(tmp_path, 3, 1, own)
    assert found(tmp_path) == ["step-00000003", "step-00000002"]
    save(tmp_path, 1, 1, own)  # a new one with the name of one that is gone
    save(tmp_path, 4, 1, own)
    assert found(tmp_path) == ["step-00000004", "step-00000001", "step-00000003", "step-00000002"]
    save(tmp_path, 5, 3)
    assert found(tmp_path) == ["step-00000005", "step-00000004", "step-00000001"]
    assert names(tmp_path) == ["latest", *sorted(found(tmp_path))]


def test_the_one_that_latest_names_is_kept(tmp_path, monkeypatch):
    """Where no link can be made, `latest` goes on to name an older one, which must not go."""
    first = save(tmp_path, 1, 1)
    monkeypatch.setattr(disk, "make_link", failing(1))
    for step in (2, 3):
        save(tmp_path, step, 1, message="latest does not point to")
    assert first.is_dir()


@pytest.mark.parametrize("target", ["step-00000001/", "./step-00000001", "{run}/step-00000001"])
def test_the_one_that_a_link_of_the_users_names_is_kept(tmp_path, target):
    first = save(tmp_path, 1)
    (tmp_path / "best").symlink_to(target.format(run=tmp_path))
    for step in (2, 3):
        save(tmp_path, step, 1)
    assert first.is_dir() and found(tmp_path) == ["step-00000003", "step-00000001"]
    assert ("best points to" in folder.dangling_links(tmp_path)) == target.startswith("{run}")


def test_a_folder_in_the_place_of_latest_stays(tmp_path):
    """As `cp -rL` leaves it; and no link for each save."""
    (tmp_path / "latest").mkdir()
    save(tmp_path, 1, message="latest does not point to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


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


def test_a_stale_or_damaged_one_counts_neither_as_kept_nor_as_newest(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (second / "manifest.json").write_bytes((first / "manifest.json").read_bytes())
    assert [bool(candidate.problem) for candidate in folder.candidates(tmp_path)] == [False, True]
    assert "stale: it belongs to a checkpoint of step 1" in folder.candidates(second)[0].problem
    (second / "manifest.json").write_bytes(b"{}")
    assert found(tmp_path) == ["step-00000001", "step-00000002"]
    assert folder.begin(tmp_path, 3).generation == 2 and first.is_dir()


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
    first, second = folder.begin(tmp_path, 3), folder.begin(tmp_path, 3)
    assert set(names(tmp_path)) == {".unfinished-business", new.name, first.path.name, second.path.name}
    # They do not get in each other's way when they appear.
    assert [each.target.name for each in (first, second)] == ["step-00000003-2", "step-00000003-3"]
    assert first.path.name == f".unfinished-step-00000003-2-{first.id}"
    first.held.close()
    folder.begin(tmp_path, 3)
    assert not first.path.exists() and second.path.exists()


def test_a_dead_process_holds_nothing(tmp_path):
    script = "import sys; from mpishard.checkpoint import folder; import pathlib, os, signal; "
    script += "folder.begin(pathlib.Path(sys.argv[1]), 1); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = names(tmp_path)
    assert left.startswith(".unfinished-step-00000001-") and folder.begin(tmp_path, 1).path.name != left
    assert left not in names(tmp_path)


def test_left_overs_that_cannot_be_removed_are_in_nobodys_way(tmp_path, monkeypatch):
    held = folder.begin(tmp_path, 1)
    held.held.close()
    monkeypatch.setattr(disk, "remove", failing(16))
    assert folder.begin(tmp_path, 2).path.is_dir() and held.path.is_dir()


def test_file_systems_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.fcntl, "flock", failing(95))
    first, second = folder.begin(tmp_path, 1), folder.begin(tmp_path, 2)
    for path in (first.path, first.path / "manifest.json"):
        os.utime(path, (0, time.time() - 3700))
    folder.begin(tmp_path, 3)
    assert not first.path.exists() and second.path.exists()


def test_folders_that_cannot_be_synced_or_no_longer_be_listed(tmp_path, monkeypatch):
    """As on some network file systems; a file that cannot be synced is an error."""
    monkeypatch.setattr(os, "fsync", failing(22))
    disk.sync(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Invalid argument.*file"):
        disk.sync(tmp_path / "file")
    monkeypatch.undo()
    saved = save(tmp_path, 1)  # what is published is whole, whatever comes after it
    monkeypatch.setattr(os, "listdir", failing(116))
    (message,) = folder.tidy(saved, 1, frozenset())
    assert "cannot be listed, so what is beyond keep=1 stays: Stale file handle" in message


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").write_text("in the way")
    for call in (lambda run: folder.begin(run, 1), folder.candidates):
        with pytest.raises(OSError):
            call(tmp_path / "run")


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
    written, run = steps[0][1], tmp_path.name
    assert steps[:7] == [
        *(("make_folder", written), ("hold", "manifest.json")),
        ("write", "manifest.json.unheld"),  # as it was called when it was made
        *(("sync", "manifest.json"), ("sync", written), ("rename", written), ("sync", run)),
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
    retention = folder.Retention(2)

    def beginning(id, *others):
        retention.begin(folder.Unfinished(tmp_path, tmp_path, id, 1, others=frozenset(others)))
        return retention.retained()

    assert beginning("a", "x") == folder.Retained(2, frozenset("a"))
    retention.adopt()
    assert retention.retained() == folder.Retained(2, frozenset("a"))  # what is there when the next save begins
    assert beginning("b", "x", "y") == folder.Retained(2, frozenset("abxy"))
    assert beginning("c", "z") == folder.Retained(2, frozenset("abcxy"))


# Manifests: every flipped bit is noticed, and every damaged file is named with what is wrong with it.

ID, OTHER = "0123456789abcdef" * 2, "f" * 32


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a manifest and two files."""
    files = {}
    for name, start in (("index.h5", f"mpishard index {ID}\n"), ("pieces-00000.h5", f"mpishard pieces {ID} 00000\n")):
        (tmp_path / name).write_bytes(start.encode().ljust(512, b"\0") + bytes(range(256)) * 40)
        files[name] = FileEntry(*hash_file(tmp_path / name))
    manifest = Manifest(ID, 7, 50, files)
    (tmp_path / "manifest.json").write_bytes(manifest.encode())
    return tmp_path, manifest


def test_a_manifest_is_json_that_reads_back(checkpoint):
    folder, manifest = checkpoint
    data = manifest.encode()
    assert decode_manifest(data) == read_manifest(folder) == manifest
    said = json.loads(data)
    assert (said["format"], said["version"], said["generation"], said["step"]) == ("mpishard checkpoint", 1, 7, 50)
    assert said["files"]["index.h5"]["size"] == 512 + 256 * 40
    blocks = np.random.default_rng(0).bytes(2**22 + 12345)
    (folder / "file").write_bytes(blocks)
    assert hash_file(folder / "file") == (len(blocks), xxhash.xxh3_128(blocks).hexdigest())


def test_every_flipped_bit_and_truncation_is_noticed(checkpoint):
    data = checkpoint[1].encode()
    damaged = [data + b"\n", *(data[:length] for length in range(len(data)))]
    damaged += [b"null", b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b'{"format": 1}']
    for place in range(8 * len(data)):
        damaged.append(bytearray(data))
        damaged[-1][place // 8] ^= 1 << place % 8
    for each in damaged:
        with pytest.raises(ValueError):
            decode_manifest(bytes(each))
    assert decode_manifest(data) == checkpoint[1]


def resigned(manifest, **changes):
    """The manifest with other content, and a hash that fits it."""
    said = {**json.loads(manifest.encode()), **changes}
    del said["xxh3_128"]
    text = json.dumps(said, sort_keys=True, indent=1) + "\n"
    said["xxh3_128"] = xxhash.xxh3_128(text.encode()).hexdigest()
    return (json.dumps(said, sort_keys=True, indent=1) + "\n").encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "../" + ID},
        {"id": 3},
        {"generation": -1},
        {"generation": True},
        {"step": float("nan")},
        {"files": {}},
        {"files": []},
        {"files": {"../index.h5": {"size": 1, "xxh3_128": ID}}},
        {"files": {"index.h5": {"size": 1, "xxh3_128": "short"}}},
        {"files": {"index.h5": {"size": 1}}},
        {"surplus": 1},
        {"format": "something else"},
    ],
)
def test_content_that_nobody_writes_is_refused(checkpoint, changes):
    assert decode_manifest(resigned(checkpoint[1])) == checkpoint[1]
    with pytest.raises(ValueError, match="damaged"):
        decode_manifest(resigned(checkpoint[1], **changes))
    with pytest.raises(ValueError, match="version 2.*version 1"):
        decode_manifest(resigned(checkpoint[1], version=2))


def test_a_missing_manifest(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"manifest\.json .*a link"):
        read_manifest(tmp_path)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (rewritten(lambda data: data[:-1]), "cut short: 10751 bytes of 10752"),
        (rewritten(lambda data: data + b"\0"), "too long"),
        (rewritten(lambda data: data[:-1] + b"\0"), "altered"),
        (rewritten(lambda data: data.replace(ID.encode(), OTHER.encode())), f"checkpoint {OTHER}, this one is {ID}"),
        (lambda path: path.symlink_to(path.rename(path.parent / "elsewhere")), "a link that may lead elsewhere"),
        (rewritten(lambda data: data.replace(b" 00000\n", b" 00001\n")), "exchanged: it holds the pieces of rank 1"),
        (lambda path: path.unlink() or path.mkdir(), "no file"),
    ],
)
def test_a_damaged_file_is_named(checkpoint, change, message):
    folder, manifest = checkpoint
    change(folder / "pieces-00000.h5")
    problem = examine(Candidate(folder, manifest)).problems[0]
    assert message in problem and str(folder / "pieces-00000.h5") in problem


@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_each_file_is_checked_by_one_rank_which_is_that_of_its_writer(ranks):
    entry = FileEntry(1000, "0" * 32)
    files = {pieces_file(writer): entry for writer in range(10)} | {"index.h5": FileEntry(10, "0" * 32)}
    manifest = Manifest("0" * 32, 1, 1, files)
    shares = [share_of_files(manifest, rank, ranks) for rank in range(ranks)]
    assert sorted(sum(shares, [])) == sorted(files)
    pieces = [[name for name in names if name != "index.h5"] for names in shares]
    assert sum(pieces, []) == [pieces_file(writer) for writer in range(10)]
    assert max(map(len, pieces)) <= -(-10 // ranks)
    empty = Manifest("0" * 32, 1, 1, {"index.h5": FileEntry(0, "0" * 32)})
    assert sum((share_of_files(empty, rank, ranks) for rank in range(ranks)), []) == ["index.h5"]


# Files are read whole, by several threads where there are many bytes.


@pytest.mark.parametrize("cores", [1, 3, 100])
def test_many_bytes_are_shared_by_the_threads(cores):
    names: dict[int, str] = {}

    def note(item):
        assert item not in names
        names[item] = threading.current_thread().name

    with ReadThreads(processes=2, cores=2 * cores, least=100) as reading:
        for sizes in ([50] * 40, [1] * 99, [10**6, 1, 1], [1, 1, 10**6], [0, 0], []):
            names.clear()
            reading.share(note, range(len(sizes)), sizes)
            assert sorted(names) == list(range(len(sizes)))
            assert len(sizes) != 40 or len(set(names.values())) <= min(cores, 8)
        assert reading.map(abs, [-1, 2, -3]) == [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            reading.share(lambda item: 1 // item, range(40), [50] * 40)


def test_no_thread_goes_on_when_another_has_failed():
    failed, ended = threading.Event(), threading.Event()

    def read(item):
        if item == 0:
            failed.set()
            raise OSError("the disk")
        failed.wait(120)
        time.sleep(0.1)  # in which a map that did not wait would have raised
        ended.set()

    with ReadThreads(cores=2, least=1) as reading:
        with pytest.raises(OSError, match="the disk"):
            reading.map(read, [0, 1])
        assert ended.is_set()


@pytest.mark.parametrize("count", [2, 8])
def test_equal_items_are_shared_evenly(count):
    names = []
    both = threading.Barrier(2)

    def note(item):
        if item in (0, count // 2):  # the first of each thread
            both.wait(120)
        names.append(threading.current_thread().name)

    with ReadThreads(cores=2, least=1) as reading:
        reading.share(note, range(count), [10] * count)
    assert sorted(map(names.count, set(names))) == [count // 2, count // 2]


def test_a_file_that_ends_too_early_is_told_of(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    file = os.open(tmp_path / "file", os.O_RDONLY)
    out = np.zeros(60, np.uint8)
    read_into(file, 40, out)
    assert out.tolist() == list(range(40, 100))
    with pytest.raises(OSError, match="byte 100, 2 bytes"):
        read_into(file, 42, out)
    os.close(file)


# When saves are due that may take a share of the time, on clocks of the tests' own.


class Ranks:
    """Ranks with a clock each, which take steps and save when it is due."""

    def __init__(self, share, clocks):
        self.now = list(clocks)
        self.paces = [Pace(share, lambda rank=rank: self.now[rank]) for rank in range(len(clocks))]
        self.asked, self.saved = [], []

    def due(self, step):
        asks = {pace.asks(step) for pace in self.paces}
        assert len(asks) == 1  # else some would wait for the others
        if not asks.pop():
            return False
        self.asked.append(step)
        all_measured = [pace.measured(step) for pace in self.paces]
        answers = {pace.decide(step, all_measured) for pace in self.paces}
        assert len(answers) == 1
        return answers.pop()

    def step(self, step, seconds, stalls):
        """Take a step, and save if that is due, which keeps each rank for so long."""
        self.now = [now + seconds for now in self.now]
        if self.due(step):
            began = list(self.now)
            self.now = [now + stall for now, stall in zip(self.now, stalls, strict=True)]
            for pace, moment in zip(self.paces, began, strict=True):
                pace.note(step, moment)
            self.saved.append(step)
            assert not self.due(step)  # never twice


def test_the_first_save_follows_the_first_step_and_the_slowest_rank_counts():
    ranks = Ranks(0.25, [0.0, 100.0, -7.0])
    for step in range(1, 41):
        ranks.step(step, 1.0, [0.5, 1.5, 1.0])
    # After a save of 1.5 s at 0.25 six seconds have to pass: the next one is due in the fifth or sixth step, by the
    # clock of the rank that waited least.
    assert ranks.saved == list(range(1, 41, 6))


def test_saves_that_take_longer_are_fewer():
    ranks = Ranks(0.1, [0.0])
    for step in range(1, 201):
        ranks.step(step, 1.0, [0.4 if step < 50 else 2.0])
    gaps = np.diff(ranks.saved).tolist()
    assert gaps[:12] == [4] * 12 and set(gaps[13:]) == {18}  # 18 steps and a save are 20 s


def test_ranks_ask_each_other_seldom_and_notice_slow_steps():
    ranks = Ranks(0.02, [0.0, 5.0])
    for step in range(1, 15001):
        ranks.step(step, 1 / 64, [2.0, 1.0])  # every 100 s, 99 of them for steps on the rank that waits least
    assert ranks.saved == [1, 6337, 12673]
    assert len(ranks.asked) < 180
    ranks = Ranks(0.02, [0.0])
    for step in range(1, 1001):
        ranks.step(step, 0.01 if step < 300 else 1.0, [1.0])
    # Of the 50 s that had to pass, fast steps were 3; the ranks did not ask each other in between.
    assert 345 < ranks.saved[1] <= 402


@given(
    st.sampled_from([0.01, 0.02, 0.1, 0.5, 0.9]),
    st.lists(st.tuples(st.floats(1e-3, 2), st.floats(1e-3, 5), st.floats(1e-3, 5)), min_size=1, max_size=300),
)
def test_all_saves_but_the_last_take_no_more_than_the_share(share, history):
    ranks = Ranks(share, [0.0, 1000.0])
    stalls = []
    for step, (seconds, one, other) in enumerate(history, 1):
        before = len(ranks.saved)
        ranks.step(step, seconds, [one, other])
        if len(ranks.saved) > before:
            stalls.append(max(one, other))
    run = min(ranks.now[0], ranks.now[1] - 1000)
    assert ranks.saved[0] == 1
    assert sum(stalls[:-1]) <= share * run * (1 + 1e-9)


def test_other_ranks_than_before():
    """Those who were in no save follow those who were, and if nobody was, the next step is saved."""
    old, new = Pace(0.5, lambda: 10.0), Pace(0.5, lambda: 3.0)
    old.note(7, began=8.0)
    assert not old.asks(7) and new.asks(8)
    old.ranks_changed()
    new.ranks_changed()
    all_measured = [new.measured(8), old.measured(8)]
    assert all_measured == [None, Measured(stall=2.0, elapsed=2.0, step=0.0)]
    assert [pace.decide(8, all_measured) for pace in (new, old)] == [False, False]
    assert [pace.asks(9) for pace in (new, old)] == [True, True]
    assert new.decide(8, [None, None])
    assert old.decide(3, [Measured(2.0, 4.0, 1.0)]) and not old.decide(3, [Measured(2.0, 3.999, 1.0)])


def test_another_run_of_the_loop_counts_its_steps_from_the_beginning():
    ranks = Ranks(0.25, [0.0])
    for step in range(1, 100):
        ranks.step(step, 1.0, [1.5])
    before, ranks.saved = ranks.saved[-1], []
    for step in range(1, 20):
        ranks.step(step, 1.0, [1.5])
    assert ranks.saved == [step for step in range(1, 20) if (99 - before + step) % 5 == 0]


def test_steps_between_saves_need_no_communication():
    assert [step for step in range(10) if save_interval(3).due(step, None)] == [3, 6, 9]
    assert not any(save_interval(None).due(step, None) for step in range(10))
    for every in (0, -1, 1.0, 0.0, -0.5, float("nan"), True, "2"):
        with pytest.raises(ValueError, match=f"every={every!r}"):
            save_interval(every)


# Waiting asleep for what ranks tell each other, though some of them die.


class Lost:
    """The request of a message whose other end has died, as Open MPI 5 has it: `Get_status` never sees that."""

    def Get_status(self, status=None):
        return False

    def Test(self, status=None):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)

    Wait = Test


def pending(*requests):
    ledger = Ledger()
    call = ledger.begin("checkpoint", 1, "recv", np.dtype(np.uint8), 1, "", (0, 1))
    return Request(ledger, call, 0, requests, lambda: "arrived")


def test_a_message_of_the_dead_is_not_waited_for():
    raised = []

    def wait():
        try:
            json_exchange.finish(pending(Lost()))
        except MPI.Exception as error:
            raised.append(error.Get_error_class())

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(120)
    assert raised == [MPI.ERR_PROC_FAILED]


def test_of_several_messages_one_may_end_before_another():
    out, heard = np.arange(4.0), np.empty(4)
    comm = MPI.COMM_SELF
    receives = [comm.Irecv(heard[2:], 0, 2), comm.Irecv(heard[:2], 0, 1)]
    message = pending(*receives)
    assert not message.test()
    comm.Send(out[2:], 0, 2)
    while receives[0]:
        assert not message.test()
    comm.Send(out[:2], 0, 1)
    assert json_exchange.finish(message) == "arrived" and message.wait() == "arrived"
    assert np.array_equal(heard, out)
    with pytest.raises(MPI.Exception):
        pending(Lost()).wait()


# What a save copies of device arrays: all of it after their computation, to memory that is kept.


def shards(place, factor):
    pieces = [Piece("a", ((0, 4),), 0), Piece("b", ((0, 3),), 6)]  # with a gap between them
    made = [place(np.arange(9.0)), place(np.arange(9, dtype=np.float32))]
    for each in made:
        each *= each.dtype.type(factor)  # on a device it is computed late
    return [Shard(f"kind {number}", each, tuple(pieces), tuple(pieces)) for number, each in enumerate(made)]


def content(parts):
    return {(part.kind, part.name): part.values.tolist() for part in parts}


def test_device_arrays_are_saved_as_host_arrays_are(monkeypatch):
    snapshot, kept, released = Snapshot(), None, []
    monkeypatch.setattr(standin.StandIn, "release_pinned", lambda self: released.append(True))
    for factor in (2, 3):
        given = shards(standin.on_device, factor)
        parts = snapshot.take(given)
        found = content(parts)
        for shard in given:
            shard.array.fill(0)
            arrays.ready(shard.array)
        assert content(parts) == found == content(Snapshot().take(shards(np.copy, factor)))
        addresses = [part.values.ctypes.data for part in parts]
        assert kept in (None, addresses)
        kept = addresses
    assert not released
    # Pinned memory of another size goes back to the system.
    piece = (Piece("a", ((0, 5),), 0),)
    snapshot.take([Shard("kind 0", standin.on_device(np.arange(5.0)), piece, piece)])
    assert released and list(snapshot._buffers) == ["kind 0"]
