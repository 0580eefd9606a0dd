"""Updates ask a rule one question: whether it is based on norms of whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from mpishard import DDPOptimizer, FlatParameters, Mesh, ParameterSpec
from mpishard.optim import Rule, formulas


@dataclass(frozen=True)
class Lars(Rule):
    """Each tensor moves by `lr` times its own norm (You et al. 2017, without momentum)."""

    norm_based: ClassVar[bool] = True
    slots = ()
    kernel = formulas.lamb_direction

    def scalars(self, step: int) -> tuple[float, ...]:
        return ()

    def direction(
        self,
        parameters: Any,
        gradients: Any,
        slots: Sequence[Any],
        step: int,
        *,
        divisor: float,
        clip: float,
        out: Any,
    ) -> None:
        out[...] = gradients / divisor * clip

    def trust_ratio(self, parameter_norm: float, direction_norm: float) -> float:
        return parameter_norm / direction_norm

    def apply(self, parameters: Any, direction: Any, step: int, ratio: float) -> None:
        parameters -= self.learning_rate(step) * ratio * direction


def test_a_norm_based_rule_of_ones_own_sees_whole_tensors() -> None:
    with Mesh(MPI.COMM_SELF) as mesh:
        parameters = FlatParameters([ParameterSpec("a", (2,)), ParameterSpec("b", (2,))], np.float64)
        parameters["a"][...], parameters["b"][...] = (3, 4), (0, 2)
        DDPOptimizer(Lars(lr=0.5), mesh).step(parameters, np.array([0.0, 7, 5, 0]))
        np.testing.assert_array_equal(parameters["a"], [3, 1.5])  # 0.5 * 5 along the unit vector
        np.testing.assert_array_equal(parameters["b"], [-1, 2])
