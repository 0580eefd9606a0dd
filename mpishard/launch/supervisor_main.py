"""The supervisor as a program that never loads MPI: ``python -I supervisor_main.py JSON COMMAND...``.

JSON has the other fields of `Job`.  The words of the command are arguments of their own, since Linux takes 128 KiB in
one at most.

A process that has initialised MPI must not start jobs and outlive them, and importing any part of mpishard initialises
it.  So an empty module replaces the package `mpishard`.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import ModuleType


def main() -> int:
    here = Path(__file__).resolve().parent
    package = ModuleType("mpishard")
    package.__path__ = [str(here.parent)]
    sys.modules["mpishard"] = package

    from mpishard.io.terminal import say
    from mpishard.launch.launchers import HostSettings
    from mpishard.launch.restart_policy import Policy, ProgressLimits
    from mpishard.launch.supervisor import Job, Supervisor

    fields = json.loads(sys.argv[1])
    groups = {"hosts": HostSettings, "policy": Policy, "limits": ProgressLimits}
    parts = {name: group(**fields[name]) for name, group in groups.items()}
    try:
        return Supervisor(Job(tuple(sys.argv[2:]), **{**fields, **parts})).run()
    except ValueError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message += "; give --folder a path for the run's notes that can be written, and that all hosts see"
    say(f"mpishard: error: {message}")
    return 2


if __name__ == "__main__":
    code = main()
    sys.stderr = None  # Python would make 120 of the code for what could not be written, as on a full disk
    sys.exit(code)
