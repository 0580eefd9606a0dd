"""Files of optimizer state: whatever is done to their bytes, they are refused with ValueError or read as they were."""

from __future__ import annotations

import io

import h5py
import numpy as np
import pytest

from mpishard.data_parallel import full_state
from mpishard.data_parallel.full_state import FullState, decode, encode
from mpishard.layout.tensors import ParameterSpec

SPECS = (ParameterSpec("a/b", (3, 5)), ParameterSpec("none", (0, 2)), ParameterSpec(".", ()))


def state(**changes):
    slots = {"exp_avg": np.linspace(-1, 1, 16), "exp_avg_sq": np.linspace(0, 1, 16)}
    facts = {"rule": "AdamW", "configuration": {"lr": 0.1}, "steps": 7, "skipped_steps": 1, "loss_scale": (2.0, 3)}
    facts |= {"outer_rule": "SGD", "outer_steps": 2, "others": {"outer/momentum_buffer": np.linspace(2, 3, 16)}}
    return FullState(**{**facts, "specs": SPECS, "dtype": np.dtype(np.float64), "slots": slots, **changes})


def same(one, other):
    plain = ("rule", "configuration", "steps", "skipped_steps", "dtype", "loss_scale", "specs", "outer_rule")
    return all(getattr(one, name) == getattr(other, name) for name in (*plain, "outer_steps")) and all(
        mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in ((one.slots, other.slots), (one.others, other.others))
    )


def mutated(data, other, random):
    """The bytes with a mutation: flips, runs of noise or zeros, cuts, repeats, swaps, or parts of another image."""
    data = bytearray(data)
    start, stop = sorted(int(place) for place in random.integers(0, len(data) + 1, 2))
    length = min(int(random.integers(1, 64)), len(data) - start)
    match int(random.integers(8)):
        case 0:
            for place in random.integers(0, len(data), random.integers(1, 9)):
                data[place] ^= 1 << int(random.integers(8))
        case 1:
            data[start : start + length] = random.bytes(length)
        case 2:
            data[start:stop] = bytes(stop - start)
        case 3:
            del data[start:]
        case 4:
            del data[start:stop]
        case 5:
            data[start:start] = data[start:stop]
        case 6:
            middle = (start + stop) // 2
            data[start:stop] = data[middle:stop] + data[start:middle]
        case 7:
            data[start:stop] = other[start:stop]
    return bytes(data)


def test_mutated_images_are_refused_or_read_as_they_were():
    whole = state()
    data = encode(whole)
    changed = {which: {name: -slot for name, slot in getattr(whole, which).items()} for which in ("slots", "others")}
    other = encode(state(steps=8, **changed))
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(10_000):
        try:
            assert same(decode(mutated(data, other, random)), whole)
        except ValueError:
            refused += 1
    assert refused > 9_000


def forged(change):
    """An image whose content was changed by somebody who knows how to sign it."""
    data = encode(state())
    file = io.BytesIO(data)
    with h5py.File(file, "r+") as h5:
        change(h5)
    return full_state._IMAGE.seal(file.getvalue())


def replace(name, **options):
    def change(h5):
        del h5[name]
        if options:
            h5.create_dataset(name, **options)

    return change


def set_attribute(name, value):
    def change(h5):
        h5.attrs[name] = value

    return change


def linked(path, target):
    def change(h5):
        del h5[path]
        h5[path] = target

    return change


def virtual(h5):
    layout = h5py.VirtualLayout((3, 5), np.float64)
    layout[...] = h5py.VirtualSource("/elsewhere.h5", "x", (3, 5))
    del h5["slots/exp_avg/a%2Fb"]
    h5.create_virtual_dataset("slots/exp_avg/a%2Fb", layout)


@pytest.mark.parametrize(
    "change",
    [
        replace("names"),
        replace("names", data=[1, 2, 3]),
        replace("names", data=["a/b"], dtype=h5py.string_dtype()),
        replace("shapes", data=["[3, 5]", "[0, 2]", "null"], dtype=h5py.string_dtype()),
        replace("shapes", data=["[3, 5]", "[0, 2]", "[-1]"], dtype=h5py.string_dtype()),
        replace("shapes", data=["[1000000, 10000000000]", "[0, 2]", "[]"], dtype=h5py.string_dtype()),
        replace("slots", data=1.0),
        replace("others", data=1.0),
        replace("others/outer%2Fmomentum_buffer/a%2Fb", data=np.zeros((5, 3))),
        replace("slots/exp_avg", data=1.0),
        replace("slots/exp_avg/%2E"),
        replace("slots/exp_avg/a%2Fb", data=np.zeros((5, 3))),
        replace("slots/exp_avg/a%2Fb", data=np.zeros((3, 5), np.float32)),
        replace("slots/exp_avg/a%2Fb", shape=(3, 5), dtype=np.float64, external=[("/dev/zero", 0, 120)]),
        linked("slots/exp_avg/a%2Fb", h5py.SoftLink("/slots/exp_avg_sq/a%2Fb")),
        linked("slots/exp_avg/a%2Fb", h5py.ExternalLink("/elsewhere.h5", "x")),
        virtual,
        replace("names", shape=(3,), dtype="S8", external=[("/dev/zero", 0, 24)]),
        replace("names", data=h5py.Empty(h5py.string_dtype())),
        replace("names", data=["a/b" * 1000, "none", "."], dtype=h5py.string_dtype(), chunks=(1,)),
        replace("shapes", shape=(2**46,), dtype=h5py.string_dtype(), chunks=(1024,)),
        replace("shapes", shape=(2**46,), dtype=h5py.string_dtype()),
        replace("shapes", data=["[" * 100_000, "[0, 2]", "[]"], dtype=h5py.string_dtype()),
        replace("shapes", data=[str([1] * 100_000), "[0, 2]", "[]"], dtype=h5py.string_dtype()),
        replace("shapes", data=["[3, 5.5]", "[0, 2]", "[]"], dtype=h5py.string_dtype()),
        linked("names", h5py.ExternalLink("/elsewhere.h5", "x")),
        linked("slots", h5py.SoftLink("/others")),
        linked("slots/exp_avg", h5py.ExternalLink("/elsewhere.h5", "x")),
        replace("slots/exp_avg/a%2Fb", data=np.zeros((3, 5)), chunks=(1, 5)),
        set_attribute("steps", -5),
        set_attribute("steps", np.inf),
        set_attribute("steps", 2**60),
        set_attribute("skipped_steps", 0.5),
        set_attribute("loss_scale", np.nan),
        set_attribute("loss_scale", -1.0),
        set_attribute("good_steps", -1),
        set_attribute("outer_steps", -1),
        set_attribute("dtype", "object"),
        set_attribute("dtype", "no dtype"),
        set_attribute("steps", "seven"),
        set_attribute("steps", np.arange(3)),
        set_attribute("outer_steps", "two"),
        set_attribute("loss_scale", "large"),
        set_attribute("configuration", "{"),
        lambda h5: h5.attrs.__delitem__("rule"),
        lambda h5: h5.attrs.__delitem__("good_steps"),
    ],
)
def test_forged_images_are_refused(change):
    with pytest.raises(ValueError, match="no optimizer state that this mpishard understands") as caught:
        decode(forged(change))
    assert len(str(caught.value)) < 1000


def test_texts_that_are_one_long_text_again_and_again_are_refused():
    """A megabyte of references to a megabyte of text would take 60 GB."""
    data = bytearray(forged(replace("names", data=["x" * 2**16, *[""] * 99], dtype=h5py.string_dtype())))
    with h5py.File(io.BytesIO(data)) as h5:
        start = h5["names"].id.get_offset()
    data[start : start + 1600] = data[start : start + 16] * 100
    with pytest.raises(ValueError, match="names is longer than the image"):
        decode(full_state._IMAGE.seal(bytes(data)))


def test_an_image_that_was_only_signed_anew_is_read():
    assert same(decode(forged(lambda h5: None)), state())
