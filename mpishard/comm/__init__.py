"""Communication: the mesh and its axes, collectives on flat buffers, and what ends a job when a rank fails."""
