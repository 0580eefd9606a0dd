"""Runs that outlive the loss of workers.

Within a job: `ElasticOptimizer`, its loop (transactions, healing, resizing), the crew of processes, the committed state
and its copies, and what asks for changes from outside.  Around a job: the supervisor, which starts it again.

Not here yet: tensor and pipeline ranks in an elastic run; a worker spawned in the place of a dead one by itself; a
death while workers are being spawned; healing in place when ranks of several hosts die, which the supervisor covers by
a new start; the policy by which the learning rate follows the number of workers; checkpoints by a share of time.
"""
