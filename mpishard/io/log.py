"""The messages of mpishard about a run: by `logging`, under the name ``mpishard``, on stderr as ``mpishard: text``.

Handlers that a script adds to ``logging.getLogger("mpishard")`` before the first message replace the one here.
``setLevel(logging.WARNING)`` leaves out how a run goes.
"""

from __future__ import annotations

import logging

from mpishard.arguments import printable
from mpishard.io.terminal import say

LOGGER = logging.getLogger("mpishard")


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say("mpishard: " + "\n".join(map(printable, record.getMessage().split("\n"))))


def inform(text: str) -> None:
    """Log how a run goes, in one line; callers choose the rank that logs."""
    _prepared().info("%s", text)


def warn(text: str) -> None:
    """Log what a user should look at, though the run continues; callers choose the rank that logs."""
    _prepared().warning("%s", text)


def _prepared() -> logging.Logger:
    """The logger, with a handler, unless the script has given it one."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_ToStderr())
        LOGGER.propagate = False  # or a script with handlers for all loggers would show each message twice
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    return LOGGER
