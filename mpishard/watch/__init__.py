"""Watches runs, and any program of mpi4py: where each rank is, and why none goes on.  No MPI.

Input: a run with a record, a program that imports nothing of mpishard, run by ``python -m mpishard.watch``, or
processes seen from outside.
Output: a file of each rank in a folder, and from these files the likely cause of a hang.

Read ``sampler`` first, what a rank notes of itself, with ``calls``: which call of MPI a frame is in; then ``folder``:
who asks, and what the files say; ``diagnosis``: what follows from it; ``guard``, the process that ends a job after its
time limit; ``outside`` for processes that were not started so.
"""
