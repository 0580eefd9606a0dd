"""Runs that survive the loss of workers.

Input: an optimizer, a problem, a number of workers, and requests to change it.
Output: the parameters of an undisturbed run, with its bits, on the workers that are left.

Read ``phases`` first, the states of a process; then ``optimizer``, ``run``, ``loop`` and ``transactions``: a step;
``membership``, ``roles``, ``stopped_peers``, ``resizing``, ``healing``, ``requests`` and ``spawning``: a change of the
workers; ``mesh_choice``, ``mesh_limits`` and ``auto_layouts``: their mesh; ``control``: who asks.

All of it is within a job.  Around a job is the supervisor (`mpishard.launch`).  Failures that end the job, which
`mpishard run` then starts again from its newest checkpoint:

- of a process and of its buddy at once;
- of any process where there is one worker only, which has no buddy;
- of any process before `optimize` has begun to train.

A spawned process that is stopped (SIGSTOP) before it has joined the run is not watched.  A failure while spawned
processes and the run connect, which takes milliseconds, costs two seconds, since nothing wakes the others there.
"""

import mpishard.comm  # noqa: F401  before MPI starts
