"""Fields that other packages have distributed over ranks, as partitions: a file for each package.

Input: an array, a function or a vector of such a package.
Output: this rank's values of it, where they are in the whole field, and values written back.

Read ``adapter`` first: what is asked of a package, and how its file is found.  The other files have the names of
packages, such as ``pylops_mpi``.  Each is imported when an object of its package is given, and imports no package.
"""
