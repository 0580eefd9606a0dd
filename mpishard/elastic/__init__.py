"""Runs that outlive the loss of workers.

Within a job: `ElasticOptimizer`, its loop (transactions, healing, resizing), the crew of processes, the committed state
and its copies, and what asks for changes from outside.  Around a job: the supervisor, which starts it again.

Not here yet: a worker spawned in the place of a dead one by itself; a death while workers are being spawned.
"""
