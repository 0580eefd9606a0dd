"""Checkpoints: the state of a run on disk, which any layout can load.

Input: the arrays of a run, each with its layout, and facts; or the folder of a run.
Output: a folder a checkpoint, published by a rename, and arrays filled from it in any layout; errors before anything in
memory changes.

Read ``checkpoints`` first, the interface of a run; then a save in its order, ``save``, ``pieces``, ``index``,
``folder``, ``disk``; then ``load`` with ``verify``; ``archives`` is for checkpoints without a run.
"""

from mpishard.checkpoint.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
