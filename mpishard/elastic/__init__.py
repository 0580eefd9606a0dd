"""Runs that survive the loss of workers.

Enters: an optimizer, a problem, a number of workers, and requests to change it.
Leaves: the parameters of an undisturbed run, with its bits, on the workers that are left.

Read ``phases`` first, the states of a process; then ``optimizer``, ``loop`` and ``transactions``: a step;
``membership``, ``resizing``, ``requests`` and ``spawning``: a change of the workers; ``mesh_choice`` and
``auto_layouts``: their mesh; ``control``: who asks.

Within a job: `ElasticOptimizer`, its loop (transactions, healing, resizing), the processes of the run and those that
are spawned for it, the committed state and its copies, and requests from outside.  Around a job: the supervisor, which
starts the job again.

These deaths end a job, which must be started again from its newest checkpoint: of a process and of its buddy at once;
of any process if there is only one worker, which has no buddy; and of any process before `optimize` has begun to train.
A spawned process that is stopped (SIGSTOP) before it has joined the run is not watched.  A death while spawned
processes and the run connect, which takes milliseconds, costs two seconds, since nothing wakes the others there.
"""

import mpishard.comm  # noqa: F401  before MPI starts
