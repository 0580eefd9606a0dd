"""The pieces of global tensors that ranks hold: specs, boxes, transfers, and the state of a run.  No MPI."""
