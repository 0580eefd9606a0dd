"""Text for stderr, which may be a full disk, a terminal that is gone, or closed: no run ends because of that."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write lines to the present `sys.stderr`, in one piece, so that those of ranks do not mix."""
    with contextlib.suppress(Exception):  # a stream of the user's may raise anything, and one that is None has no write
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()
