"""Runs that outlive the loss of workers.

Within a job: `ElasticOptimizer`, its loop (transactions, healing, resizing), the crew of processes and those who are
spawned for it, the committed state and its copies, and what asks for changes from outside.  Around a job: the
supervisor, which starts it again.
"""
