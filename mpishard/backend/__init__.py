"""NumPy and CuPy arrays, formulas and functions compiled for them, random numbers, and BLAS threads.  No MPI."""
