"""NumPy and CuPy arrays, formulas and functions compiled for them, random numbers, and BLAS threads.  No MPI.

Input: NumPy or CuPy arrays, and formulas of one element written in Python or CUDA C++.
Output: results in arrays that the caller owns, with the same bits in any layout where a file says so, and one compiled
function a formula and dtype.

Read ``array`` first, the interface that all rooms use, with ``kinds``, its two implementations; then ``elementwise``,
``jit_function`` and ``numba_cache``: how a formula becomes a kernel; ``exact_norms``, and ``exact`` with
``exact_rows``, ``exact_gram`` and ``sparse_rows``: sums without rounding; the rest by name.
"""
