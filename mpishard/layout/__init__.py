"""The pieces of global tensors that ranks hold: specs, boxes, transfers, and the state of a run.  No MPI.

Enters: names, shapes, and cuts of tensors over ranks.
Leaves: boxes: which rank has which part, and which part goes where between two layouts.

Read ``boxes`` first, the algebra, then ``tensors`` and ``run_state``, which use it.
"""
