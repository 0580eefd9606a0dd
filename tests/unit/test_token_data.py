"""Token data and texts, reading ahead, and the files of Megatron-LM, HDF5 and Zarr."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zipfile

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import SGD, DDPOptimizer, Evaluation, Mesh, OptimizationProblem, nn
from mpishard.data import (
    HDF5Tokens,
    MegatronFile,
    Mixture,
    ReadAhead,
    TextFile,
    TokenData,
    TokenFile,
    ZarrTokens,
    token_files,
)
from mpishard.data.text import LEAST, sources_of, standard_library_text, windows
from mpishard.data.token_data import SampleMap, apportioned

# Tokens from files: what is read, how sources are mixed, and what is wrong with a file.


def token_file(path, values, dtype="<u2", header=b""):
    path.write_bytes(header + np.asarray(values).astype(dtype).tobytes())
    return TokenFile(path, dtype, len(header))


@pytest.mark.parametrize(("dtype", "header"), [("<u2", b""), (">u4", bytes(10)), ("i8", bytes(10))])
def test_windows_are_those_of_the_stream(tmp_path, dtype, header):
    stream = np.random.default_rng(0).integers(0, 30_000, 1000)
    data = TokenData(token_file(tmp_path / "a.bin", stream, dtype, header), 50)
    assert len(data) == 19 and data.tokens_per_sample == 50
    inputs, targets = data.batch(np.array([18, 0, 7]))
    for row, window in enumerate([18, 0, 7]):
        assert np.array_equal(inputs[row], stream[50 * window : 50 * window + 50])
        assert np.array_equal(targets[row], stream[50 * window + 1 : 50 * window + 51])
    assert data.batch(np.empty(0, np.int64))[1].shape == (0, 50)


def test_nothing_is_read_at_the_end_of_a_file_of_whole_pages(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(2 * mmap.PAGESIZE))
    array = token_files.MappedArray(tmp_path / "a.bin", np.dtype("u1"), 0, 2 * mmap.PAGESIZE)
    assert array[2 * mmap.PAGESIZE : 2 * mmap.PAGESIZE].size == 0


def test_what_a_map_has_read_is_let_go_of(tmp_path, monkeypatch):
    """And read again where it is wanted again."""
    monkeypatch.setattr(token_files, "RESIDENT", 10_000)
    asked = []
    monkeypatch.setattr(token_files.MappedArray, "_advise", lambda self, advice, *extent: asked.append(advice))
    stream = np.arange(60_000)
    data = TokenData(token_file(tmp_path / "a.bin", stream), 100)
    assert np.array_equal(data.batch(np.arange(599))[0].ravel(), stream[:59_900])
    assert asked[0] == "MADV_RANDOM" and asked.count("MADV_DONTNEED") == asked.count("MADV_WILLNEED") == 599


def test_several_files_have_each_window_once(tmp_path):
    data = TokenData([token_file(tmp_path / f"{n}.bin", np.arange(n)) for n in (101, 55)], 10)
    assert len(data) == 15
    assert data.batch(np.arange(15))[0][:, 0].tolist() == [*range(0, 100, 10), *range(0, 50, 10)]


def test_a_mixture_has_its_fractions_and_every_window(tmp_path):
    large, small = np.arange(1001), np.arange(2000, 2041)
    sources = [token_file(tmp_path / f"{len(each)}.bin", each) for each in (large, small)]
    data = TokenData(Mixture(sources, [0.8, 0.2]), 10)
    starts = data.batch(np.arange(len(data)))[0][:, 0]
    assert sorted(starts[starts < 2000].tolist()) == list(range(0, 1000, 10))  # once, as few samples as can be
    again = starts[starts >= 2000]
    assert len(again) == 25 and len(data) == 125
    for turn in range(6):  # of a source that comes several times, each window in each round, in another order
        assert sorted(again[4 * turn : 4 * turn + 4].tolist()) == [2000, 2010, 2020, 2030]
    assert len({tuple(again[4 * turn : 4 * turn + 4]) for turn in range(6)}) > 1


def test_a_mixture_of_fewer_samples_and_its_seed(tmp_path):
    sources = [token_file(tmp_path / f"{n}.bin", np.arange(1001)) for n in "ab"]
    mixtures = [TokenData(Mixture(sources, [0.6, 0.4], samples=40, seed=seed), 10) for seed in (1, 2)]
    starts = [data.batch(np.arange(40))[0][:, 0] for data in mixtures]
    assert all(len(set(found[:24].tolist())) == 24 and len(set(found[24:].tolist())) == 16 for found in starts)
    assert not np.array_equal(*starts)


def test_sample_by_sample_is_as_all_together():
    samples = SampleMap((7, 3, 1), (10, 3, 5), seed=4)
    together = np.empty((18, 2), int)
    for source, places, cuts in samples.parts(np.arange(18)):
        together[places] = np.stack([np.full(len(cuts), source), cuts], 1)
    for sample in range(18):
        ((source, _, cuts),) = samples.parts(np.array([sample]))
        assert together[sample].tolist() == [source, *cuts]


def gpt(vocabulary=50, context=10):
    return nn.GPT(vocabulary_size=vocabulary, context_length=context, width=8, layers=1, heads=2)


def training(batch, samples=20, model=None):
    return OptimizationProblem.for_model(model or gpt(), batch, samples=samples, batch_size=4, steps=1)


def evaluated(problem, batch, samples):
    with Mesh(MPI.COMM_SELF) as mesh:
        evaluate = batch and Evaluation.for_model(batch, samples, every=1)
        DDPOptimizer(SGD(lr=0.1), mesh).optimize(problem, progress=False, evaluate=evaluate)


@pytest.mark.parametrize("mixed", [False, True])
def test_samples_that_are_not_there(tmp_path, mixed):
    """Whatever the sources are; and a problem that has more is refused before it is run."""
    sources = [token_file(tmp_path / f"{name}.bin", np.arange(101) % 50) for name in "ab"]
    data = TokenData(Mixture(sources, [0.6, 0.4], samples=20) if mixed else sources, 10)
    for sample in (20, -1, 10**6):
        with pytest.raises(IndexError, match=f"sample {sample} .*0 to 19"):
            data.batch(np.array([3, sample]))
    assert [rows.shape for rows in data.batch([])] == [(0, 10)] * 2
    for samples in (np.array([0.5]), 3, np.array([[1]]), np.array([True])):
        with pytest.raises(TypeError, match="array of sample indices"):
            data.batch(samples)
    message = "samples=21, .*has 20"
    for batch in (data.batch, ReadAhead(data.batch), windows(np.zeros(201, np.uint8), 10).batch):
        with pytest.raises(ValueError, match=message):
            training(batch, 21)
    with pytest.raises(ValueError, match="samples=21, .*has 20"):
        evaluated(training(data.batch), data.batch, 21)


def test_a_batch_that_is_none_is_named():
    rows = np.zeros((20, 11), np.int64)
    good = training(lambda samples: (rows[samples, :-1], rows[samples, 1:]))
    for problem, batch in ((training(lambda samples: None), None), (good, lambda samples: None)):
        with pytest.raises(TypeError, match=r"\(tokens, targets\), got None"):
            evaluated(problem, batch, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((50, 9), "context_length=10 .*context_length is 9"),
        ((49, 10), "vocabulary_size=50, .*49"),
    ],
)
def test_data_that_a_model_cannot_take(tmp_path, sizes, message):
    """It is refused before training begins, also as a validation set."""
    data = TokenData(token_file(tmp_path / "a.bin", np.arange(1000) % 50), 10, vocabulary_size=50)
    for batch in (data.batch, ReadAhead(data.batch)):
        with pytest.raises(ValueError, match=message):
            training(batch, model=gpt(*sizes))
    problem = training(lambda samples: (np.zeros((len(samples), 2), int),) * 2, model=gpt(*sizes))
    with pytest.raises(ValueError, match=message):
        evaluated(problem, data.batch, len(data))


@pytest.mark.parametrize("total", [0, 1, 7, 100, 10**13 + 1])
def test_parts_sum_to_the_whole(total):
    parts = apportioned(total, [0.5, 0.3, 0.1, 0.1])
    assert sum(parts) == total
    assert all(abs(part - total * weight) < 1.01 for part, weight in zip(parts, [0.5, 0.3, 0.1, 0.1], strict=True))


FILES = [TokenFile("a"), TokenFile("b")]


@pytest.mark.parametrize(
    ("sources", "weights", "kind", "message"),
    [
        (FILES, [0.5, 0.6], ValueError, r"sum to 1.1, .*\[0.4545, 0.5455\]"),
        (FILES, [1.5, -0.5], ValueError, r"weights\[1\]=-0.5"),
        (FILES, [1.0, 0.0], ValueError, r"weights\[1\]=0.0"),
        (FILES, [1.0, float("nan")], ValueError, r"weights\[1\]=nan"),
        (FILES, [1.0], ValueError, "1 weights for 2 sources"),
        (FILES, None, TypeError, "weights=None .*list: Mixture"),
        (FILES[0], [1.0], TypeError, "sources=TokenFile.*list: Mixture"),
    ],
)
def test_wrong_mixtures(sources, weights, kind, message):
    with pytest.raises(kind, match=message):
        Mixture(sources, weights)


@pytest.mark.skipif(os.name != "posix", reason="the file of a map cannot be cut short")
def test_a_file_that_is_cut_short_while_it_is_read(tmp_path):
    data = TokenData(token_file(tmp_path / "a.bin", np.arange(5000), header=bytes(10)), 10)
    os.truncate(tmp_path / "a.bin", 2010)
    with pytest.raises(OSError, match=r"a\.bin .*2010 bytes, .*10010"):
        data.batch(np.array([450]))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda at: TokenData(TokenFile(at / "none.bin"), 10), FileNotFoundError, "none.bin does not exist"),
        (lambda at: TokenData(TokenFile(at), 10), IsADirectoryError, "is a folder"),
        (lambda at: TokenData(TokenFile(at / "odd.bin"), 10), ValueError, "2001 bytes of tokens"),
        (lambda at: TokenData(TokenFile(at / "odd.bin", offset=2001), 10), ValueError, "has 2001 bytes, so no token"),
        (lambda at: TokenData(TokenFile(at / "odd.bin", offset=2004), 10), ValueError, "has 2001 bytes, so no token"),
        (lambda at: TokenData(TokenFile(at / "empty.bin"), 10), ValueError, "empty.bin has 0 bytes"),
        (lambda at: TokenData([TokenFile(at / "short.bin")], 10), ValueError, "10 tokens: .*11"),
        (lambda at: TokenData(str(at / "odd.bin"), 10), TypeError, "must be such as TokenFile"),
        (lambda at: TokenData([at / "odd.bin"], 10), TypeError, "is no source of tokens"),
        (lambda at: TokenData([], 10), ValueError, "sources is empty"),
        (lambda at: TokenData(TokenFile(at / "short.bin"), 9, mesh=3), TypeError, "mesh=3"),
        (lambda at: TokenData(TokenFile(at / "short.bin"), 9, vocabulary_size=0), ValueError, "vocabulary_size=0"),
        (lambda at: TokenData(TokenFile(at / "short.bin"), 9, padding=0), ValueError, "bin has no index of documents"),
        (lambda at: TokenFile("a.bin", "float32"), TypeError, "dtype='float32'"),
        (lambda at: TokenFile(3), TypeError, "path=3"),
        (lambda at: TokenFile("a.bin", offset=-1), ValueError, "offset=-1"),
    ],
)
def test_wrong_files(tmp_path, make, kind, message):
    for name, size in (("odd.bin", 2001), ("empty.bin", 0), ("short.bin", 20)):
        (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(kind, match=message):
        make(tmp_path)


@pytest.mark.parametrize(("dtype", "wrong"), [("u2", 50), ("i4", -1), ("u8", 2**63)])
@pytest.mark.parametrize("check", [True, False])
def test_tokens_outside_of_the_vocabulary(tmp_path, dtype, wrong, check):
    values = np.full(500, 49, dtype)
    values[321] = wrong
    source = token_file(tmp_path / "a.bin", values, dtype)
    with pytest.raises(ValueError, match=f"token {wrong} at position 321, .*vocabulary_size=50"):
        TokenData(source, 10, vocabulary_size=50, check=check).batch(np.array([3, 32]))


# The text data set: the standard library's source, and windows over a text.


def test_standard_library_is_text_and_repeats():
    text = standard_library_text(500_000)
    assert text.dtype == np.uint8 and text.shape == (500_000,)
    assert np.array_equal(text, standard_library_text(500_000))
    assert np.array_equal(text[:1000], standard_library_text(1000))
    source = text.tobytes().decode("utf-8", "replace")
    assert "import " in source and "def __init__(self" in source


def test_order_is_by_path_and_skips_what_is_not_library(tmp_path):
    for name in ("b.py", "a/z.py", "a/b/c.py", "test/x.py", "a/tests/y.py", "site-packages/p/q.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name};")
    with pytest.raises(FileNotFoundError, match="21 bytes .*100000"):
        sources_of([tmp_path])
    assert sources_of([tmp_path], least=1).tobytes() == b"a/b/c.py;a/z.py;b.py;"


def test_zipped_library(tmp_path):
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        for name, text in (("b.py", "b" * LEAST), ("a/test/t.py", "t"), ("a/a.py", "a"), ("c.pyc", "c")):
            archive.writestr(name, text)
    places = [tmp_path / "missing", tmp_path / "library.zip"]
    assert sources_of(places).tobytes() == b"a" + b"b" * LEAST
    assert sources_of(places, 3).tobytes() == b"abb"


def test_windows_are_views_shifted_by_one():
    text = np.arange(23, dtype=np.uint8)
    cut = windows(text, 5)
    assert len(cut) == 4
    assert np.array_equal(cut.inputs.ravel(), np.arange(20)) and np.array_equal(cut.targets, cut.inputs + 1)
    assert np.shares_memory(cut.inputs, text) and not cut.inputs.flags.writeable and text.flags.writeable
    assert len(windows(text, 22)) == 1 and len(windows(text, 1)) == 22
    train, held_out = windows(np.arange(101, dtype=np.uint8), 10).split(0.25)
    assert (len(train), len(held_out)) == (8, 2) and held_out.inputs[0, 0] == 80
    inputs, targets = train.batch(np.array([7, 2]))
    assert inputs[:, 0].tolist() == [70, 20] and targets[:, -1].tolist() == [80, 30]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: windows(np.zeros(10, np.uint8), 0), ValueError, "windows of 0 .*text of 10"),
        (lambda: windows(np.zeros(10, np.uint8), 10), ValueError, "windows of 10 .*text of 10"),
        (lambda: windows(np.zeros((2, 2)), 1), TypeError, "uint8, not 2-D of float64"),
        (lambda: windows(np.zeros(10, np.uint8), 1).split(1.0), ValueError, "9 windows"),
        (lambda: standard_library_text(0), ValueError, "limit_bytes is 0"),
        (lambda: ReadAhead(3), TypeError, "batch=3"),
        (lambda: ReadAhead(lambda samples: (), max_bytes=-1), ValueError, "max_bytes=-1"),
        (lambda: TextFile("a.txt", 3), TypeError, "tokenize=3"),
        (lambda: TextFile("a.txt", list, ""), ValueError, "separator is empty"),
    ],
)
def test_bad_arguments(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


# Micro-batches that a thread reads ahead: what is read, how much of it waits, and errors.

MICRO = [np.arange(4 * n, 4 * n + 4) for n in range(10)]
BYTES = 4 * 1000


class Source:
    """Reads a kilobyte for a sample, and counts."""

    def __init__(self):
        self.read, self.threads, self.done = [], set(), threading.Condition()

    def __call__(self, samples):
        if samples[0] == 36:
            raise ValueError("sample 36 is corrupt")
        with self.done:
            self.read.append(int(samples[0]) // 4)
            self.threads.add(threading.current_thread().name)
            self.done.notify_all()
        return np.repeat(samples[:, None].astype(np.uint8), 500, 1), np.zeros((len(samples), 500), np.uint8)

    def wait_for(self, count):
        with self.done:
            assert self.done.wait_for(lambda: len(self.read) >= count, timeout=60)


def test_what_is_expected_is_read_ahead_within_the_bound():
    source = Source()
    with ReadAhead(source, max_bytes=3 * BYTES) as batch:
        batch.expect(MICRO[:9])
        source.wait_for(3)
        limit = time.monotonic() + 60
        while batch.most_bytes < 3 * BYTES and time.monotonic() < limit:  # what was read last is not counted yet
            time.sleep(0.001)
        for number in range(9):
            assert np.array_equal(batch(MICRO[number])[0][:, 0], MICRO[number])
            source.wait_for(min(9, number + 4))
    assert source.read == list(range(9)) and source.threads == {"mpishard read ahead"}
    assert batch.most_bytes == 3 * BYTES and batch.calls == 9


def test_a_step_that_changes_its_mind_reads_what_it_asks_for():
    source = Source()
    with ReadAhead(source, max_bytes=2 * BYTES) as batch:
        batch.expect(MICRO[:4])
        source.wait_for(2)
        assert batch(MICRO[7])[0][0, 0] == 28  # nobody expected it
        batch.expect(MICRO[5:7])  # so that the others are dropped, and make room
        source.wait_for(5)
        assert [batch(MICRO[number])[0][0, 0] for number in (6, 5)] == [24, 20]
    assert source.read == [0, 1, 7, 5, 6]


def test_nothing_is_read_ahead_that_has_no_room():
    with ReadAhead(Source(), max_bytes=BYTES - 1) as batch:
        for _ in range(3):
            for number in range(3):
                batch.expect(MICRO[number : number + 3])
                assert batch(MICRO[number])[0][0, 0] == 4 * number
    assert batch.most_bytes in (0, BYTES)  # the first is read before its size is known
    assert batch.calls == 9


def test_arrays_within_dictionaries_and_lists_count():
    reads = threading.Event()

    def tree(samples):
        reads.set()
        return {"x": np.zeros(8)}, [np.zeros(2), (np.zeros(1),)]

    with ReadAhead(tree) as batch:
        batch.expect(MICRO[:1])
        assert reads.wait(timeout=60)
    assert batch.most_bytes == 88


def test_an_error_is_raised_where_the_samples_are_asked_for():
    source = Source()
    with ReadAhead(source) as batch:
        batch.expect([MICRO[0], MICRO[9], MICRO[1]])
        source.wait_for(2)
        assert batch(MICRO[0])[0][0, 0] == 0
        with pytest.raises(ValueError, match="sample 36 is corrupt"):
            batch(MICRO[9])
        assert batch(MICRO[1])[0][0, 0] == 4
    assert batch(MICRO[2])[0][0, 0] == 8  # closed: read at once
    assert threading.current_thread().name in source.threads


class Panic(BaseException):
    """As that of extensions in Rust, such as tokenizers."""


@pytest.mark.parametrize("error", [SystemExit(3), Panic()])
def test_what_is_no_exception_is_raised_where_the_samples_are_asked_for(error):
    reads, found = threading.Event(), []

    def leave(samples):
        reads.set()
        raise error

    def ask():
        try:
            batch(MICRO[0])
        except type(error) as caught:
            found.append(caught)

    with ReadAhead(leave) as batch:
        batch.expect(MICRO[:1])
        assert reads.wait(timeout=60)
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(timeout=60)
    assert found == [error]


# Tokens of Megatron-LM, HDF5, Zarr and texts, documents as samples, and what is wrong with such files.

LENGTHS = [3, 0, 12, 5, 1]
DOCUMENTS = [0, 1, 2, 4, 5]  # the fourth has two sequences
STREAM = np.arange(21)


def megatron(folder, code=8, dtype="<u2", **parts):
    """Files as Megatron-LM writes them; `parts` replaces some of them."""
    lengths, documents = np.array(parts.get("lengths", LENGTHS)), parts.get("documents", DOCUMENTS)
    places = parts.get("places", (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize)
    header = parts.get("magic", b"MMIDIDX\x00\x00") + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    index = [lengths.astype("<i4"), np.asarray(places, "<i8"), np.asarray(documents, "<i8")]
    (folder / "m.idx").write_bytes((header + b"".join(part.tobytes() for part in index))[: parts.get("cut")])
    (folder / "m.bin").write_bytes(STREAM.astype(dtype).tobytes()[: parts.get("short")])
    return folder / "m"


MEGATRON = [(8, "<u2", ""), (4, "<i4", ".bin"), (1, "u1", ".idx"), (5, "<i8", "")]


@pytest.mark.parametrize(("code", "dtype", "ending"), MEGATRON)
def test_megatron_packed_and_by_document(tmp_path, code, dtype, ending):
    source = MegatronFile(str(megatron(tmp_path, code, dtype)) + ending)
    packed = TokenData(source, 10)
    assert np.array_equal(packed.batch(np.array([1, 0]))[1], [STREAM[11:21], STREAM[1:11]])
    each = TokenData(source, 4, vocabulary_size=100, padding=99)
    inputs, targets = each.batch(np.arange(4))
    assert inputs.tolist() == [[0, 1, 2, 99], [99] * 4, [3, 4, 5, 6], [20, 99, 99, 99]]
    assert targets.tolist() == [[1, 2, 99, 99], [99] * 4, [4, 5, 6, 7], [99] * 4]
    with pytest.raises(ValueError, match="padding=50 .*vocabulary_size=50"):
        TokenData(source, 4, vocabulary_size=50, padding=50)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"magic": b"MMIDIDX\x00\x01"}, r"m\.idx is no index of Megatron-LM"),
        ({"cut": 20}, r"m\.idx has 20 bytes: .*header"),
        ({"cut": -1}, r"m\.idx has 133 bytes, .*take 134"),
        ({"short": -2}, r"m\.bin has 40 bytes, .*m\.idx is of 42"),
        ({"code": 7}, "version 1 with dtype code 7"),
        ({"places": [0, 6, 8, 30, 40]}, r"m\.idx: sequence 2"),
        ({"lengths": [3, -1, 13, 5, 1]}, r"m\.idx: sequence 1"),
        ({"documents": [0, 1, 2, 4]}, r"m\.idx: its documents .*5 sequences"),
        ({"documents": [0, 2, 1, 5]}, "its documents are not"),
        ({"documents": []}, "it is cut short or corrupt"),
    ],
)
def test_wrong_megatron_files(tmp_path, parts, message):
    with pytest.raises(ValueError, match=message):
        TokenData(MegatronFile(megatron(tmp_path, **parts)), 4)


@pytest.mark.parametrize("name", ["m.bin", "m.idx"])
def test_absent_megatron_files(tmp_path, name):
    path = megatron(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        TokenData(MegatronFile(path), 4)


def hdf5(folder, values):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("group/ids", data=values, chunks=True, compression="gzip")
    return HDF5Tokens(folder / "a.h5", "group/ids")


def zarr_array(folder, values):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra: zarr)")
    values = np.asarray(values)
    zarr.create_array(str(folder / "a.zarr"), shape=values.shape, dtype=values.dtype)[...] = values
    return ZarrTokens(folder / "a.zarr")


@pytest.mark.parametrize("make", [hdf5, zarr_array])
def test_arrays_on_disk(tmp_path, make):
    stream = np.random.default_rng(0).integers(0, 50, 5000)
    source = make(tmp_path, stream.astype(np.uint16))
    data = TokenData(source, 100, vocabulary_size=50)
    inputs, targets = data.batch(np.array([48, 3]))
    assert np.array_equal(inputs, [stream[4800:4900], stream[300:400]]) and targets[0, 0] == stream[4801]
    largest = int(stream.max())
    message = f"token {largest} at position {stream.argmax()}, .*vocabulary_size={largest}"
    with pytest.raises(ValueError, match=message):
        TokenData(source, 100, vocabulary_size=largest)
    with pytest.raises(ValueError, match="no index of documents"):
        TokenData(source, 100, padding=0)


@pytest.mark.parametrize("make", [hdf5, zarr_array])
@pytest.mark.parametrize("values", [np.ones(5), np.ones((2, 3), int)], ids=["float", "matrix"])
def test_arrays_that_are_no_tokens(tmp_path, make, values):
    with pytest.raises(ValueError, match="one-dimensional array of integers"):
        TokenData(make(tmp_path, values), 2)


@pytest.mark.parametrize(
    ("file", "name", "kind", "message"),
    [
        ("a.h5", "ids", ValueError, r"'ids' .*/ids is missing; .*\['group'\]"),
        ("a.h5", "group", ValueError, "'group' of tokens: it is a group"),
        ("a.h5", "group/ids/x", ValueError, "'group/ids/x' of tokens"),
        ("a.h5", "", ValueError, "data set ''"),
        ("b.h5", "ids", OSError, "no HDF5 file"),
        ("c.h5", "ids", FileNotFoundError, "does not exist"),
        ("d.h5", "group/ids", ValueError, "'group/ids' of tokens: .*; the file is damaged"),
    ],
)
def test_wrong_hdf5_files(tmp_path, file, name, kind, message):
    h5py = pytest.importorskip("h5py")
    data = hdf5(tmp_path, [1, 2]).path.read_bytes()
    (tmp_path / "b.h5").write_bytes(data[:700])
    heap = data.index(b"HEAP") + 16  # of the names, and its list of free bytes
    (tmp_path / "d.h5").write_bytes(data[:heap] + b"\xaa" * 8 + data[heap + 8 :])
    with pytest.raises(kind, match=rf"{file} .*{message}") as caught:
        TokenData(HDF5Tokens(tmp_path / file, name), 1)
    with h5py.File(tmp_path / file, "w"):  # which HDF5 refuses while it is open
        assert caught.value.__traceback__ is not None


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (2**40, {"chunks": (2**28,)}, "536870912 bytes; .*67108864"),
        (2**40, {"chunks": (2**16,)}, "1 of its 16777216 chunks"),
        (2**40, {}, "never written"),
        (10, {"external": [("/dev/zero", 0, 20)]}, "in a file outside"),
        (10, "virtual", "virtual data set"),
        (10, "link", "link to elsewhere"),
    ],
)
def test_hdf5_tokens_are_all_in_their_file(tmp_path, size, options, message):
    """And not too far apart, elsewhere, or nowhere."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if options == "virtual":
            layout = h5py.VirtualLayout((size,), np.uint16)
            layout[:] = h5py.VirtualSource("other.h5", "tokens", (size,))
            file.create_virtual_dataset("tokens", layout)
        elif options == "link":
            file["tokens"] = h5py.ExternalLink("other.h5", "tokens")
        else:
            tokens = file.create_dataset("tokens", (size,), np.uint16, **options)
            if options == {"chunks": (2**16,)}:
                tokens[:10] = 1
    with pytest.raises(ValueError, match=rf"a\.h5 .*'tokens' .*{message}"):
        TokenData(HDF5Tokens(tmp_path / "a.h5"), 4)


def test_a_damaged_hdf5_file_is_named(tmp_path):
    """Before the training: all tokens are read to compare them with the vocabulary."""
    h5py = pytest.importorskip("h5py")
    source = hdf5(tmp_path, np.random.default_rng(0).integers(0, 50, 5000))
    with h5py.File(source.path) as file:
        place = file[source.dataset].id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[place : place + 64] = bytes(64)
    (tmp_path / "a.h5").write_bytes(data)
    with pytest.raises(OSError, match=r"a\.h5:group/ids .*0 to 5000"):
        TokenData(source, 100, vocabulary_size=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": (2**28,)}, "536870912 bytes; .*67108864"),
        ({"chunks": (2**20,)}, "1 of its 1048576 files"),
        ({"chunks": (2**20,), "shards": (2**24,)}, "1 of its 65536 files"),
    ],
)
def test_zarr_tokens_are_all_in_their_folder(tmp_path, options, message):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra: zarr)")
    zarr.create_array(str(tmp_path / "a.zarr"), shape=(2**40,), dtype="u2", **options)
    with pytest.raises(ValueError, match=rf"a\.zarr: .*{message}"):
        TokenData(ZarrTokens(tmp_path / "a.zarr"), 4)
    with pytest.raises(ValueError, match="is no Zarr array"):
        TokenData(ZarrTokens(tmp_path), 1)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        TokenData(ZarrTokens(tmp_path / "none"), 1)


def test_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc\n\ndefgh\n\n\n\ni")

    def tokenize(text):
        return [ord(letter) - 97 for letter in text]

    packed = TokenData(TextFile(path, tokenize, separator="\n\n"), 8)
    assert packed.batch(np.array([0]))[0].tolist() == [list(range(8))]
    each = TokenData(TextFile(path, tokenize, separator="\n\n"), 4, padding=30)
    assert each.batch(np.arange(3))[0].tolist() == [[0, 1, 2, 30], [3, 4, 5, 6], [8, 30, 30, 30]]
    assert len(TokenData(TextFile(path, lambda text: list(text.encode())), 4, padding=0)) == 1
    with pytest.raises(ValueError, match="token -87 at position 3"):
        TokenData(TextFile(path, tokenize), 4, vocabulary_size=26)
    for data, kind, message in (
        (b"abc\xff", ValueError, r"a\.txt is no text in UTF-8"),
        (b"abc", TypeError, r"tokenize returned array.*a\.txt"),
        (b"", ValueError, r"a\.txt has no token"),
    ):
        path.write_bytes(data)
        with pytest.raises(kind, match=message):
            TokenData(TextFile(path, list), 1)


@pytest.mark.parametrize("separator", ["\r\n\r\n", "\n\n"])
@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_ends_of_lines_are_those_of_any_system(tmp_path, end, separator):
    (tmp_path / "a.txt").write_bytes(b"ab" + 2 * end + b"cd")
    data = TokenData(TextFile(tmp_path / "a.txt", lambda text: list(text.encode()), separator), 2, padding=0)
    assert data.batch(np.arange(len(data)))[0].tolist() == [[97, 98], [99, 100]]
