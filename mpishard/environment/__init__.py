"""Facts about this MPI, machine and Python, and findings: the facts that cause problems for a run.

Input: the process, its MPI and its machine.
Output: facts, which can be sent between ranks, and findings with the way out.

Read ``facts`` first, then ``findings``.

>>> from mpi4py import MPI
>>> from mpishard.environment import collect, findings
>>> facts = collect(MPI.COMM_WORLD)
>>> [finding.what for finding in findings([facts]) if finding.level == "wrong"]
[]
"""

import mpishard.comm  # noqa: F401  before MPI starts
from mpishard.environment.facts import Blas, Facts, collect
from mpishard.environment.findings import Finding, findings
from mpishard.launch.detection import Launch, launch_of, launches

__all__ = ["Blas", "Facts", "Finding", "Launch", "collect", "findings", "launch_of", "launches"]
