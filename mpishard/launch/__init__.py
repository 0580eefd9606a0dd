"""Launching jobs and how they end: launchers, hosts, the supervisor that restarts jobs, Ctrl-C and signals.  No MPI.

Input: a command line, the environment of a launcher, signals.
Output: a job that has ended or was started again, and an exit code that says why.

Read ``supervisor`` first, with ``supervisor_main``, the program, ``restart_policy``, its decisions, and ``launchers``,
its command lines; then a process of the job: ``worker``, ``script``, ``exit_codes``, ``job_notes``, ``signals``,
``lease``; ``detection`` and ``processes`` last.
"""
