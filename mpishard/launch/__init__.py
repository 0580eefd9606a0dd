"""Launching jobs: which launcher started this process, and the supervisor that restarts jobs.  No MPI."""
