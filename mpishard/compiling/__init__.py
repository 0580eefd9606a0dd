"""Numba functions for NumPy arrays: how they are compiled, and how the ranks of a node share the result.

Numba is imported when the first of them is called: its import takes as long as that of everything else.
"""

from mpishard.compiling.functions import HostFunction, before_compiling, prepare

__all__ = ["HostFunction", "before_compiling", "prepare"]
