"""Runs that outlive the loss of workers.

Within a job: `ElasticOptimizer`, its loop (transactions, healing, resizing), the crew of processes and those who are
spawned for it, the committed state and its copies, and what asks for changes from outside.  Around a job: the
supervisor, which starts it again.

What ends a job, to be started again from its newest checkpoint: the death of a process and of its buddy at once, or of
any where there is one worker, which has no buddy; a death before `optimize` has begun to train.  A newcomer that is
stopped (SIGSTOP) before the run has taken it in is not watched.  A death while newcomers and the run meet, which takes
milliseconds, costs two seconds, since nothing wakes the others there.
"""
