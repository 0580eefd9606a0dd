"""Arrays of two kinds, formulas and functions compiled for them, random numbers, and the threads of BLAS.  No MPI."""
