"""The state of a minimisation on one process as bytes: an HDF5 file image, checked before HDF5 opens it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import h5py

from mpishard.arguments import printable
from mpishard.backend import array as arrays
from mpishard.io import hdf5
from mpishard.io.hdf5 import USER_BLOCK, FileImage
from mpishard.minimizers.method import Method

Array = Any
_IMAGE = FileImage(b"mpishard minimisation\0", 1, "minimisation state")


def encode(method: str, point: Array, rows: Mapping[str, Array], metadata: Mapping[str, Any]) -> bytes:
    """Encode a state as an HDF5 file image.

    `method` is the name of its class, `point` that of the next evaluation, and `rows` the vectors of the method by
    slot.
    """
    file = io.BytesIO()
    with h5py.File(file, "w", userblock_size=USER_BLOCK) as h5:
        h5.attrs["format"], h5.attrs["version"] = "mpishard minimisation", 1
        h5.attrs["method"] = method
        h5.create_dataset("minimizer", data=json.dumps(dict(metadata), sort_keys=True), dtype=h5py.string_dtype())
        h5.create_dataset("point", data=arrays.to_host(point))
        for slot, row in rows.items():
            h5.create_dataset(f"slots/{slot}", data=arrays.to_host(row))
    return _IMAGE.seal(file.getvalue())


def decode(data: bytes, method: Method, like: Array) -> tuple[Array, dict[str, Array], dict[str, Any]]:
    """The point, the vectors by slot and the metadata from `encode`, for a method and unknowns like these.

    Raises TypeError if `data` is not bytes; ValueError if it is no such state, is damaged, or is of another method or
    other unknowns.
    """
    _IMAGE.check(data)
    try:
        with h5py.File(io.BytesIO(data), "r") as h5:
            found = hdf5.attribute(h5, "method")
            metadata = json.loads(_text(h5, "minimizer"))
            point = hdf5.open_plain(h5, "point")
            if found != type(method).__name__:
                raise ValueError(f"it is of the method {found}, but this is {type(method).__name__}")
            if (point.shape, point.dtype) != (like.shape, like.dtype):
                raise ValueError(
                    f"it is of {point.size} unknowns of {point.dtype}, but these are {like.size} of {like.dtype}"
                )
            if not isinstance(metadata, dict):
                raise ValueError("the numbers of its method are no table")
            slots = sorted(h5["slots"]) if "slots" in h5 else []
            if slots != sorted(method.slots):
                raise ValueError(
                    f"it has {len(slots)} vectors and the method {len(method.slots)}; give the method the options "
                    "with which it was saved"
                )
            values = {slot: _values(h5, f"slots/{slot}", like) for slot in slots}
            return arrays.on_device_of(point[()], like), values, metadata
    except Exception as error:  # h5py raises errors of many kinds for invalid content
        raise ValueError(f"this state cannot be used: {printable(str(error) or type(error).__name__)}") from None


def _text(h5: h5py.File, name: str) -> str:
    dataset = hdf5.open_plain(h5, name)
    if dataset.shape != () or h5py.check_string_dtype(dataset.dtype) is None:
        raise ValueError(f"{name} is {dataset.dtype} {dataset.shape}, not one text")
    text: str = dataset[()].decode()
    return text


def _values(h5: h5py.File, path: str, like: Array) -> Array:
    group, _, name = path.partition("/")
    hdf5.check_hard_link(h5, group)
    dataset = hdf5.open_plain(h5[group], name)
    if (dataset.shape, dataset.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{path} is {dataset.dtype} {dataset.shape}, not {like.dtype} {like.shape}")
    return arrays.on_device_of(dataset[()], like)
