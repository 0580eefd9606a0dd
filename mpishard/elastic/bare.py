"""The supervisor as a program that never loads MPI: ``python -I bare.py JSON``, where JSON are the fields of `Job`.

A process that has initialised MPI must not start jobs and outlive them, and importing anything of mpishard does that;
so this takes the place of the packages that the supervisor's modules are in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType


def main() -> int:
    here = Path(__file__).resolve().parent
    for name, folder in (("mpishard", here.parent), ("mpishard.elastic", here)):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package

    from mpishard.elastic.course import Limits
    from mpishard.elastic.policy import Policy
    from mpishard.elastic.supervisor import Job, Supervisor

    fields = json.loads(sys.argv[1])
    parts = {"policy": Policy(**fields["policy"]), "limits": Limits(**fields["limits"])}
    try:
        return Supervisor(Job(**{**fields, **parts})).run()
    except ValueError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
    print(f"mpishard: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
