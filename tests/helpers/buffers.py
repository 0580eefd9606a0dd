"""What tests of collectives send: small whole numbers, cut into pieces, in device memory that is late."""

from __future__ import annotations

import numpy as np
import standin

from mpishard.backend import array as arrays

# The two forms of a collective: ``call(axis, name, *arguments)``.
FORMS = {
    "blocking": lambda axis, name, *given, **options: getattr(axis, name)(*given, **options),
    "started": lambda axis, name, *given, **options: getattr(axis, f"start_{name}")(*given, **options).wait(),
}


def numbers(rank, size, dtype=np.float64):
    """Small whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, size]).integers(-8, 9, size).astype(dtype)


def uneven(size, ranks):
    """Counts that leave the first rank empty-handed and give the last the rest."""
    each = size // ranks // 2
    return [0] + [each] * (ranks - 2) + [size - each * (ranks - 2)] if ranks > 1 else [size]


def lengths(size, ranks, cut):
    """Counts for all ranks by the name of the cut, "even" or "uneven"."""
    if cut == "even":
        return [len(part) for part in np.array_split(np.zeros(size), ranks)]
    return uneven(size, ranks)


def late(values, kind=standin.DeviceArray):
    """A device array whose content is there only after its stream was waited for."""
    device = standin.empty(values.shape, values.dtype, kind=kind)
    staged = standin.empty(values.shape, values.dtype, kind=kind)
    arrays.copy_to_device(values, staged)
    device[...] = staged
    return device


def read(array):
    """The content of a device array as a kernel sees it that is queued now, without waiting for anything before."""
    seen = standin.empty(array.shape, array.dtype, kind=type(array))
    seen[...] = array
    return arrays.to_host(seen)
