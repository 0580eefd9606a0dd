"""The ``mpishard`` command.

The parameters of a command's function are its options; inside, options that belong together are one value.
"""

import mpishard.comm  # noqa: F401  before MPI starts, here or in a job
from mpishard.cli.app import main

__all__ = ["main"]
