"""Memory per rank for each stage of ZeRO, from the number of parameters alone.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), figure 1 and table 1.
"""

from __future__ import annotations

import math

STAGES = (0, 1, 2, 3)


def model_state_bytes(
    parameters: float,
    ranks: int,
    zero_stage: int,
    *,
    parameter_bytes: float = 2,
    gradient_bytes: float = 2,
    state_bytes: float = 12,
) -> float:
    """Bytes per rank for parameters, gradients and optimizer state, without activations and buffers.

    With P parameters, N ranks and 2, 2 and 12 bytes (half precision, and a float32 copy, momentum and variance) these
    are 16 P, 4 P + 12 P / N, 2 P + 14 P / N and 16 P / N for the stages 0 to 3.

    Not collective.

    Parameters
    ----------
    parameters : float
        Number of parameters.
    ranks : int
        Data-parallel ranks.
    zero_stage : int
        0: nothing is sharded, 1: optimizer state, 2: gradients too, 3: parameters too.
    parameter_bytes, gradient_bytes, state_bytes : float
        Bytes per parameter of each kind.

    Returns
    -------
    float
        Bytes on each rank, for shares that are all equal.

    Raises
    ------
    ValueError
        For counts that are not positive, or another stage.
    """
    if not 0 < parameters < math.inf:
        raise ValueError(f"the number of parameters is {parameters:g}; it must be finite and above 0")
    if ranks < 1:
        raise ValueError(f"the number of ranks is {ranks}; it must be at least 1")
    if zero_stage not in STAGES:
        raise ValueError(f"there is no ZeRO stage {zero_stage!r}; choose one of 0, 1, 2, 3")
    shares = [1 / ranks if zero_stage >= stage else 1 for stage in (3, 2, 1)]
    return parameters * (parameter_bytes * shares[0] + gradient_bytes * shares[1] + state_bytes * shares[2])
