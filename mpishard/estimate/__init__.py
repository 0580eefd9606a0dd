"""Estimates the cost of a layout without running it: memory per rank, bytes sent, bubble, and time per step.

Input: an architecture, a layout, a batch and the speeds of a machine.
Output: bytes of memory and traffic of each rank, the bubble, and seconds of a step.

Read ``estimates`` first, then ``layouts``, ``memory`` with the ``sizes`` of what a rank holds, and ``times``;
``profile`` has the speeds and ``benchmark`` measures them.

>>> from mpishard.estimate import Layout, Workload, estimate
>>> from mpishard.nn.architecture import Architecture
>>> gpt = Architecture(vocabulary_size=256, context_length=256, width=256, layers=8, heads=8)
>>> estimate(gpt, Layout(pipeline=4), Workload(batch=8, microbatches=8)).stages[0].memory.parameters
6842368
>>> estimate(gpt, pipeline=4, batch=8, microbatches=8).stages[0].memory.parameters  # the same
6842368
"""

import mpishard.comm  # noqa: F401  before MPI starts
from mpishard.estimate.benchmark import measure
from mpishard.estimate.estimates import Estimate, estimate, table
from mpishard.estimate.layouts import Layout, layouts, model_state_bytes
from mpishard.estimate.memory import Memory, StageEstimate
from mpishard.estimate.profile import TYPICAL, Link, MachineProfile
from mpishard.estimate.sizes import BatchShape, Workload

__all__ = [
    "TYPICAL",
    "BatchShape",
    "Estimate",
    "Layout",
    "Link",
    "MachineProfile",
    "Memory",
    "StageEstimate",
    "Workload",
    "estimate",
    "layouts",
    "measure",
    "model_state_bytes",
    "table",
]
