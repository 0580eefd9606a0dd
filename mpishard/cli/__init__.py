"""The ``mpishard`` command.

Input: command lines, and what runs have left on disk: records, checkpoints, profiles.
Output: text or a picture on the terminal or in a file, and an exit code; errors are one line on stderr.

Read ``app`` first, the list of commands; each command is a file of its name, and ``checkpoint`` has six of them;
``output`` has the tables and pictures that they share.

The parameters of a command's function are its options; inside, options that belong together are one value.
"""

import sys
from collections.abc import Sequence

try:
    import mpishard.comm  # noqa: F401  before MPI starts, here or in a job
    from mpishard.cli.app import main
except ImportError as error:
    if error.name not in ("typer", "mpi4py"):
        raise
    _said = "the commands need the package typer: pip install 'mpishard[cli]'" if error.name == "typer" else str(error)

    def main(arguments: Sequence[str] | None = None) -> int:
        """Say what to install, as an error of the command line; returns its exit code."""
        print(f"mpishard: error: {_said}", file=sys.stderr)
        return 2


__all__ = ["main"]
