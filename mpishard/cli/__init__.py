"""The ``mpishard`` command."""

import mpishard.comm  # noqa: F401  before MPI starts, here or in a job
from mpishard.cli.app import main

__all__ = ["main"]
