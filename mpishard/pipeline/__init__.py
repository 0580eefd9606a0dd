"""Pipeline parallelism: schedules as data, and the runtime that executes them.

Input: a schedule, a table of actions for each rank, and the stages of a model.
Output: losses, and gradients in the parameters; activations have travelled between the stages.

Read ``schedule/`` first, which needs no MPI, then ``runtime``.
"""
