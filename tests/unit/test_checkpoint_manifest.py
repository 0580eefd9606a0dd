"""Manifests: every flipped bit is noticed, and every damaged file is named with what is wrong with it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xxhash

from mpishard.checkpoint.folder import (
    FileEntry,
    Manifest,
    decode_manifest,
    hash_file,
    manifest_problems,
    read_manifest,
    share_of_files,
)
from mpishard.checkpoint.pieces import pieces_file

ID = "0123456789abcdef" * 2
OTHER = "f" * 32


def label(what, id):
    return f"mpishard {what} {id}".encode() + (b"\n" if what == "index" else b" 00000\n")


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a manifest and two files."""
    for name, start in (("index.h5", label("index", ID)), ("pieces-00000.h5", label("pieces", ID))):
        (tmp_path / name).write_bytes(start.ljust(512, b"\0") + bytes(range(256)) * 40)
    files = {name: FileEntry(*hash_file(tmp_path / name)) for name in ("index.h5", "pieces-00000.h5")}
    manifest = Manifest(ID, 7, 50, files)
    (tmp_path / "manifest.json").write_bytes(manifest.encode())
    return tmp_path, manifest


def test_hash_of_a_file_of_several_blocks(tmp_path):
    data = np.random.default_rng(0).bytes(2**22 + 12345)
    (tmp_path / "file").write_bytes(data)
    assert hash_file(tmp_path / "file") == (len(data), xxhash.xxh3_128(data).hexdigest())


def test_a_manifest_is_json_that_reads_back(checkpoint):
    folder, manifest = checkpoint
    data = manifest.encode()
    assert decode_manifest(data) == read_manifest(folder) == manifest
    said = json.loads(data)
    assert (said["format"], said["version"], said["generation"], said["step"]) == ("mpishard checkpoint", 1, 7, 50)
    assert said["files"]["index.h5"]["size"] == 512 + 256 * 40


def test_every_flipped_bit_is_noticed(checkpoint):
    data = bytearray(checkpoint[1].encode())
    for place in range(8 * len(data)):
        data[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError):
            decode_manifest(bytes(data))
        data[place // 8] ^= 1 << place % 8
    assert decode_manifest(bytes(data)) == checkpoint[1]


def test_every_truncation_is_noticed(checkpoint):
    data = checkpoint[1].encode()
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode_manifest(data[:length])
    with pytest.raises(ValueError):
        decode_manifest(data + b"\n")


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
        {"generation": "7"},
        {"generation": -1},
        {"generation": True},
        {"step": 1.5},
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


def test_a_later_version_says_so(checkpoint):
    with pytest.raises(ValueError, match="of version 2; this mpishard reads version 1"):
        decode_manifest(resigned(checkpoint[1], version=2))


@pytest.mark.parametrize("data", [b"", b"null", b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b'{"format": 1}'])
def test_bytes_that_are_no_manifest(data):
    with pytest.raises(ValueError):
        decode_manifest(data)


def test_a_missing_manifest(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read: it is a link, which is not followed"):
        read_manifest(tmp_path)


def test_whole_files_have_no_problems(checkpoint):
    assert manifest_problems(*checkpoint) == []


def flipped(path):
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)


def stale(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(ID.encode(), OTHER.encode()))


def linked(path):
    target = path.rename(path.parent / "elsewhere")
    path.symlink_to(target)


def exchanged(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b" 00000\n", b" 00001\n"))


def replaced_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut short: 10751 bytes of 10752"),
        (lambda path: path.write_bytes(b""), "cut short: 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "too long"),
        (flipped, "altered"),
        (stale, f"stale: it belongs to the checkpoint {OTHER}, this one is {ID}"),
        (linked, "a link that may lead elsewhere"),
        (exchanged, "exchanged: it holds the pieces of rank 1"),
        (replaced_by_folder, "no file"),
    ],
)
def test_a_damaged_file_is_named(checkpoint, change, message):
    folder, manifest = checkpoint
    change(folder / "pieces-00000.h5")
    (problem,) = manifest_problems(folder, manifest)
    assert message in problem and str(folder / "pieces-00000.h5") in problem
    assert manifest_problems(folder, manifest, ["index.h5"]) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 20])
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
