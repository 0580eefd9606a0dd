"""Tokens of Megatron-LM, HDF5, Zarr and texts, documents as samples, and what is wrong with such files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.data import HDF5Tokens, MegatronFile, TextFile, TokenData, TokenFile, ZarrTokens

LENGTHS = [3, 0, 12, 5, 1]
DOCUMENTS = [0, 1, 2, 4, 5]  # the fourth has two sequences
STREAM = np.arange(21)


def megatron(folder: Path, code: int = 8, dtype: str = "<u2", **parts: Any) -> Path:
    """Files as Megatron-LM writes them; `parts` replaces some of them."""
    lengths, documents = np.array(parts.get("lengths", LENGTHS)), parts.get("documents", DOCUMENTS)
    size = np.dtype(dtype).itemsize
    places = parts.get("places", (np.cumsum(lengths) - lengths) * size)
    header = parts.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    index = [lengths.astype("<i4"), np.asarray(places, "<i8"), np.asarray(documents, "<i8")]
    (folder / "m.idx").write_bytes((header + b"".join(part.tobytes() for part in index))[: parts.get("cut")])
    (folder / "m.bin").write_bytes(STREAM.astype(dtype).tobytes()[: parts.get("short")])
    return folder / "m"


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (1, "u1"), (5, "<i8")])
@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_megatron_packed_and_by_document(tmp_path: Path, code: int, dtype: str, ending: str) -> None:
    source = MegatronFile(str(megatron(tmp_path, code, dtype)) + ending)
    packed = TokenData(source, 10)
    assert np.array_equal(packed.batch(np.array([1, 0]))[1], [STREAM[11:21], STREAM[1:11]])
    each = TokenData(source, 4, vocabulary_size=100, padding=99)
    inputs, targets = each.batch(np.arange(4))
    assert inputs.tolist() == [[0, 1, 2, 99], [99] * 4, [3, 4, 5, 6], [20, 99, 99, 99]]
    assert targets.tolist() == [[1, 2, 99, 99], [99] * 4, [4, 5, 6, 7], [99] * 4]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, r"m\.idx is no index of Megatron-LM"),
        ({"cut": 20}, r"m\.idx has 20 bytes: it is cut short in its header"),
        ({"cut": -1}, r"m\.idx has 133 bytes, but 5 sequences and 5 document entries take 134: it is cut short"),
        ({"short": -2}, r"m\.bin has 40 bytes, but its index m\.idx is of 42: one of them is cut short"),
        ({"code": 7}, "version 1 with dtype code 7; known are"),
        ({"places": [0, 6, 8, 30, 40]}, r"m\.idx: sequence 2 does not begin where the last one ended"),
        ({"lengths": [3, -1, 13, 5, 1]}, r"m\.idx: sequence 1 does not begin"),
        ({"documents": [0, 1, 2, 4]}, r"m\.idx: its documents are not the 5 sequences in their order"),
        ({"documents": [0, 2, 1, 5]}, "its documents are not"),
        ({"documents": []}, "it is cut short or corrupt"),
    ],
)
def test_wrong_megatron_files(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenData(MegatronFile(megatron(tmp_path, **parts)), 4)


def test_absent_megatron_files(tmp_path: Path) -> None:
    path = megatron(tmp_path)
    (tmp_path / "m.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"m\.bin does not exist"):
        TokenData(MegatronFile(path), 4)
    (tmp_path / "m.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"m\.idx does not exist"):
        TokenData(MegatronFile(path), 4)


def hdf5(folder: Path, values: Any) -> HDF5Tokens:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("group/ids", data=values, chunks=True, compression="gzip")
    return HDF5Tokens(folder / "a.h5", "group/ids")


def zarr_array(folder: Path, values: Any) -> ZarrTokens:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra: zarr)")
    zarr.create_array(str(folder / "a.zarr"), data=np.asarray(values))
    return ZarrTokens(folder / "a.zarr")


@pytest.mark.parametrize("make", [hdf5, zarr_array])
def test_arrays_on_disk(tmp_path: Path, make: Callable[[Path, Any], Any]) -> None:
    stream = np.random.default_rng(0).integers(0, 50, 5000)
    source = make(tmp_path, stream.astype(np.uint16))
    data = TokenData(source, 100, vocabulary_size=50)
    inputs, targets = data.batch(np.array([48, 3]))
    assert np.array_equal(inputs, [stream[4800:4900], stream[300:400]]) and targets[0, 0] == stream[4801]
    largest = stream.max()
    with pytest.raises(
        ValueError, match=f"token {largest} at position {stream.argmax()}, but vocabulary_size={largest}"
    ):
        TokenData(source, 100, vocabulary_size=int(largest))
    with pytest.raises(ValueError, match="has no index of documents, so they cannot be samples"):
        TokenData(source, 100, padding=0)


@pytest.mark.parametrize("make", [hdf5, zarr_array])
@pytest.mark.parametrize("values", [np.ones(5), np.ones((2, 3), int)])
def test_arrays_that_are_no_tokens(tmp_path: Path, make: Callable[[Path, Any], Any], values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="tokens are a one-dimensional array of integers"):
        TokenData(make(tmp_path, values), 2)


def test_wrong_hdf5_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.h5 has no data set 'ids' of tokens: /ids is missing; it has \['group'\]"):
        TokenData(HDF5Tokens(hdf5(tmp_path, [1, 2]).path, "ids"), 1)
    for name, message in (("group", "it is a group"), ("group/ids/x", ".*"), ("", ".*")):
        with pytest.raises(ValueError, match=f"a\\.h5 has no data set '{name}' of tokens: {message}; it has"):
            TokenData(HDF5Tokens(tmp_path / "a.h5", name), 1)
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:700])
    with pytest.raises(OSError, match=r"b\.h5 is no HDF5 file, or is cut short"):
        TokenData(HDF5Tokens(tmp_path / "b.h5"), 1)
    with pytest.raises(FileNotFoundError, match=r"c\.h5 does not exist"):
        TokenData(HDF5Tokens(tmp_path / "c.h5"), 1)


def unlike_tokens(file: Any, kind: str) -> None:
    """A data set `tokens` whose values are too far apart, elsewhere, or nowhere."""
    h5py = pytest.importorskip("h5py")
    if kind == "chunks":
        file.create_dataset("tokens", (2**40,), np.uint16, chunks=(2**28,))
    elif kind == "unwritten chunks":
        file.create_dataset("tokens", (2**40,), np.uint16, chunks=(2**16,))[:10] = 1
    elif kind == "unwritten":
        file.create_dataset("tokens", (2**40,), np.uint16)
    elif kind == "virtual":
        layout = h5py.VirtualLayout((10,), np.uint16)
        layout[:] = h5py.VirtualSource("other.h5", "tokens", (10,))
        file.create_virtual_dataset("tokens", layout)
    elif kind == "external":
        file.create_dataset("tokens", (10,), np.uint16, external=[("/dev/zero", 0, 20)])
    else:
        file["tokens"] = h5py.ExternalLink("other.h5", "tokens")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("chunks", "its chunks are 536870912 bytes; this mpishard reads chunks of at most 67108864"),
        ("unwritten chunks", "it has 1 of its 16777216 chunks"),
        ("unwritten", "some of its values were never written"),
        ("virtual", "the values are those of another, virtual data set"),
        ("external", "the values lie in a file outside"),
        ("link", "/tokens is a link to elsewhere"),
    ],
)
def test_hdf5_tokens_are_all_in_their_file(tmp_path: Path, kind: str, message: str) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        unlike_tokens(file, kind)
    with pytest.raises(ValueError, match=rf"a\.h5 has no data set 'tokens' of tokens: {message}"):
        TokenData(HDF5Tokens(tmp_path / "a.h5"), 4)


def test_a_damaged_hdf5_file_is_named(tmp_path: Path) -> None:
    """Before the training: all tokens are read to compare them with the vocabulary."""
    h5py = pytest.importorskip("h5py")
    source = hdf5(tmp_path, np.random.default_rng(0).integers(0, 50, 5000))
    with h5py.File(source.path) as file:
        place = file[source.dataset].id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[place : place + 64] = bytes(64)
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(OSError, match=r"a\.h5:group/ids cannot be read at positions 0 to 5000: "):
        TokenData(source, 100, vocabulary_size=50)


def test_wrong_zarr_folders(tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="zarr is not installed (extra: zarr)")
    with pytest.raises(ValueError, match="is no Zarr array"):
        TokenData(ZarrTokens(tmp_path), 1)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TokenData(ZarrTokens(tmp_path / "none"), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": (2**28,)}, "its chunks are 536870912 bytes; this mpishard reads chunks of at most 67108864"),
        ({"chunks": (2**20,)}, "it has 1 of its 1048576 files of chunks"),
        ({"chunks": (2**20,), "shards": (2**24,)}, "it has 1 of its 65536 files of chunks"),
    ],
)
def test_zarr_tokens_are_all_in_their_folder(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra: zarr)")
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(2**40,), dtype="u2", **options)
    with pytest.raises(ValueError, match=rf"a\.zarr: {message}"):
        TokenData(ZarrTokens(tmp_path / "a.zarr"), 4)


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abc\n\ndefgh\n\n\n\ni")

    def tokenize(text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    packed = TokenData(TextFile(path, tokenize, separator="\n\n"), 8)
    assert packed.batch(np.array([0]))[0].tolist() == [list(range(8))]
    each = TokenData(TextFile(path, tokenize, separator="\n\n"), 4, padding=30)
    assert each.batch(np.arange(3))[0].tolist() == [[0, 1, 2, 30], [3, 4, 5, 6], [8, 30, 30, 30]]
    assert len(TokenData(TextFile(path, lambda text: list(text.encode())), 4, padding=0)) == 1
    with pytest.raises(ValueError, match="token -87 at position 3"):
        TokenData(TextFile(path, tokenize), 4, vocabulary_size=26)


def test_wrong_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"a\.txt is no text in UTF-8"):
        TokenData(TextFile(path, list), 1)
    path.write_bytes(b"abc")
    with pytest.raises(TypeError, match=r"tokenize returned array.* for a text of .*a\.txt, not a list of integers"):
        TokenData(TextFile(path, list), 1)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.txt has no token"):
        TokenData(TextFile(path, list), 1)
    with pytest.raises(TypeError, match="tokenize=3 must be a function"):
        TextFile(path, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="separator is empty"):
        TextFile(path, list, "")


def test_wrong_paddings(tmp_path: Path) -> None:
    source = MegatronFile(megatron(tmp_path))
    with pytest.raises(ValueError, match="padding=50 is no token of vocabulary_size=50"):
        TokenData(source, 4, vocabulary_size=50, padding=50)
    with pytest.raises(ValueError, match=r"m\.bin has no index of documents"):
        TokenData(TokenFile(tmp_path / "m.bin"), 4, padding=0)
