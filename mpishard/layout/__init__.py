"""The pieces of global tensors that ranks hold: specs, boxes, transfers, and the state of a run.  No MPI.

Input: names, shapes, and cuts of tensors over ranks.
Output: boxes: which rank has which part, and which part goes where between two layouts.

Read ``boxes`` first, the algebra, then ``tensors`` and ``run_state``, which use it.
"""
