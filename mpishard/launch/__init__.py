"""Launching jobs and how they end: launchers, hosts, the supervisor that restarts jobs, Ctrl-C and signals.  No MPI."""
