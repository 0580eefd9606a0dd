"""Around a job: which launcher started it, and the supervisor that starts it again.  No MPI."""
