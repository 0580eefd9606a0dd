"""Communication: the mesh and its axes, collectives on flat buffers, and what ends a job when a rank fails.

A package that imports mpi4py imports this one first: importing mpi4py.MPI starts MPI.
"""

import os

# Open MPI does not start without it, and cron jobs and containers have none; "/" where nobody knows the user.
os.environ.setdefault("HOME", os.path.expanduser("~").replace("~", "/"))
