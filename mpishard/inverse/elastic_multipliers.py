"""The outer loop of `augmented_lagrangian` in an elastic run, whose state it is part of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.method_state import Stages
from mpishard.inverse.corrections import MULTIPLIERS, NUMBERS, Corrections, Course, Verdict
from mpishard.inverse.elastic_minimization import ElasticMinimization
from mpishard.inverse.functions import Callback, Functions
from mpishard.inverse.result import LoopOptions, OptimizeResult
from mpishard.minimizers.method import Method, Minimizer, Wanted

_CONSTRAINTS, _NUMBERS_AT_BEST = "constraints", "augmented_lagrangian_best.json"  # facts about the best iterate


class ElasticOuterLoop(Stages):
    """Minimises and corrects in turns, by ranks that come and go. Collective over the mesh, its creation too.

    All minimisations are one run: a correction is part of the step that has ended a minimisation, and is taken back
    with it. Multipliers, penalty and the constraints at the best iterate are the same on all workers, and travel with
    the numbers of the method.
    """

    def __init__(
        self,
        corrections: Corrections,
        method: Method,
        mesh: Mesh,
        options: dict[str, Any],
        callback: Callback,
        loop: LoopOptions,
    ) -> None:
        self._corrections, self._function = corrections, corrections.function
        self._world, self._retries = mesh.world, loop.retries
        self._optimality = math.nan  # at the end of the last minimisation
        inner = Functions(self._function.value_and_gradient, True, self._function.product, ())
        unknowns = self._function.unknowns
        self._run = ElasticMinimization(inner, unknowns, method, mesh, None, None, options, callback, loop)

    def run(
        self, multipliers: Any, penalty: float | None, checkpoints: Any, resume: bool, record: Any
    ) -> OptimizeResult:
        """Minimise until the method has converged, or something else ends it."""
        run, corrections, function, world = self._run, self._corrections, self._function, self._world
        run.continue_by(self, lambda: corrections.intermediate(corrections.course))
        with raised_on_all(world):
            function.begin(lambda: run.minimizer.progress, world, multipliers, penalty, self._retries)
        corrections.course = replace(corrections.course, penalty=function.penalty)
        ended = run.run(checkpoints, resume, record)
        minimizer, optimality = run.minimizer, self._optimality
        progress, message = minimizer.progress, ended.result.message
        if progress.evaluations:
            verdict, optimality = corrections.verdict(progress, ended.reason, message), progress.projected_norm
        else:  # it was stopped between two minimisations
            function.measure(again=True)
            verdict = Verdict(corrections.course, ended.reason, message)
        gradient = function.unknowns.like_x0(run.gather(minimizer.gradient))
        return corrections.result(verdict, optimality, minimizer.added_at(minimizer.best), gradient, ended.result)

    def told(self, minimizer: Minimizer) -> None:
        self._function.note_best()
        if minimizer.wanted is not Wanted.NOTHING:
            return
        verdict = self._corrections.verdict(minimizer.progress, minimizer.stop_reason, "")
        if not verdict.reason:
            self._optimality = minimizer.progress.projected_norm
            self._corrections.go_on(verdict.course)
            minimizer.method = replace(minimizer.method, gtol=self._corrections.tolerance)
            minimizer.begin()

    # -- in the state of the run --------------------------------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, Any]:
        best = self._function.best
        if best is None:
            return {}
        numbers = {"value": best.value, "optimality": self._optimality}
        return {**self._corrections.facts(), _CONSTRAINTS: best.constr, _NUMBERS_AT_BEST: numbers}

    def check(self, facts: Mapping[str, Any]) -> None:
        self._corrections.check(facts)
        best, found, numbers = self._function.best, facts.get(_CONSTRAINTS), facts.get(_NUMBERS_AT_BEST)
        if not (isinstance(found, np.ndarray) and isinstance(numbers, Mapping)):
            raise ValueError("the checkpoint is of a run that was not elastic: leave elastic= out, or resume=False")
        assert best is not None
        if not facts[NUMBERS].size == found.size == best.constr.size:
            raise ValueError(
                f"the checkpoint has multipliers of {facts[NUMBERS].size} constraints, and these are "
                f"{best.constr.size}; give the constraints of then, or resume=False"
            )

    def restore(self, facts: Mapping[str, Any]) -> None:
        corrections, minimizer, numbers = self._corrections, self._run.minimizer, facts[_NUMBERS_AT_BEST]
        corrections.course = course = Course(**facts[MULTIPLIERS])
        self._optimality = float(numbers["optimality"])
        minimizer.method = replace(minimizer.method, gtol=corrections.tolerance)
        at_best = minimizer.progress.evaluations == 0
        self._function.continue_from(
            course.penalty, facts[NUMBERS], float(numbers["value"]), facts[_CONSTRAINTS], at_best
        )
        if minimizer.wanted is Wanted.NOTHING:  # with other tolerances it may go on
            self.told(minimizer)
