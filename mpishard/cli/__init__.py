"""The ``mpishard`` command.

Input: command lines, and what runs have left on disk: records, checkpoints, profiles.
Output: text or a picture on the terminal or in a file, and an exit code; errors are one line on stderr.

Read ``app`` first, the list of commands; each command is a file of its name, and ``checkpoint`` has six of them;
``output`` has the tables and pictures that they share.

The parameters of a command's function are its options; inside, options that belong together are one value.
"""

import sys
from collections.abc import Sequence

import mpishard.comm  # noqa: F401  before MPI starts, here or in a job

try:
    from mpishard.cli.app import main
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise

    def main(arguments: Sequence[str] | None = None) -> int:
        """Say what to install, as an error of the command line; returns its exit code."""
        print("mpishard: error: the commands need the package typer: pip install 'mpishard[cli]'", file=sys.stderr)
        return 2


__all__ = ["main"]
