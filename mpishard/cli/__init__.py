"""The ``mpishard`` command."""

from mpishard.cli.app import main

__all__ = ["main"]
