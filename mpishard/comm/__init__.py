"""Communication: the mesh and its axes, collectives on flat buffers, and what ends a job when a rank fails.

Input: flat buffers and MPI_COMM_WORLD.
Output: buffers with sums or copies, a note of each call in the ledger, and an error on every rank, or the end of the
job, where a rank fails.

Read ``mesh``, with ``mesh_checks``, and ``axis`` first, what users hold; then a call in its order, ``communicator``,
``channel``, ``collectives``, ``staged_collectives``, ``staging`` and ``deferred`` for devices; ``errors`` and
``agreement`` for errors and settings; ``ledger``, ``watchdog``, ``call_matching``, ``abort`` and ``supervisor_reports``
for what goes wrong, ``messages`` for what may come at any time; ``capabilities`` of this MPI; ``reshard`` for a new
layout, ``json_exchange`` for waits without a limit, ``work_queue`` for groups of ranks.

A package that imports mpi4py imports this one first: importing mpi4py.MPI starts MPI.
"""

import os

try:
    import mpi4py
except (ImportError, OSError, RuntimeError):
    pass  # what has no mesh does without; what has one imports it again, and the error says how to get it
else:
    from mpishard.launch.detection import explain_old_mpi4py

    if _said := explain_old_mpi4py(mpi4py.__version__, mpi4py.__file__):
        raise ImportError(_said, name="mpi4py")

# Open MPI does not start without it, and cron jobs and containers have none; "/" where nobody knows the user.
os.environ.setdefault("HOME", os.path.expanduser("~").replace("~", "/"))
