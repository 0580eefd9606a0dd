"""Who holds which piece of which global tensor: specs, boxes, transfers, and the state of a run.  No MPI."""
