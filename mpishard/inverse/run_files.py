"""The files of a minimisation on a mesh: checkpoints, from which it resumes, and its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpishard.comm.supervisor_reports import take_restart
from mpishard.inverse.corrections import MULTIPLIERS, Corrections
from mpishard.inverse.mesh_run import MeshRanks
from mpishard.inverse.run_arguments import RunArguments
from mpishard.io import log
from mpishard.launch.exit_codes import note_run
from mpishard.layout.run_state import brief
from mpishard.minimizers.least_squares import SAME_FUNCTION

_START = "start.json"  # the fact about the start
LOOP_NUMBERS = "least_squares.json"  # the fact about a method with a loop of its own; named after the first of these


class RunFiles:
    """Saves a minimisation after evaluations, and records them. Collective over the mesh, its creation too.

    It saves as often as ``checkpoints.every`` says, and at the end. The arguments have passed `files_given`, and are
    those of all ranks. `outer` are those of the loop whose minimisation this is, if there is one. Raises ValueError on
    all ranks if the checkpoint is of another minimisation, OSError if a folder cannot be used.
    """

    def __init__(self, ranks: MeshRanks, run: RunArguments, outer: Corrections | None = None) -> None:
        self._ranks = ranks
        self._outer = outer
        self._optimizer = ranks.optimizer
        self._began = ranks.optimizer.clock  # above 0 where the optimizer has begun again
        self._checkpoints: Any = run.checkpoints
        self._record = run.record
        self._start = self._norm_of_start()
        self._value = math.nan  # at the best iterate of the checkpoint
        self.resumed: Mapping[str, Any] = {}  # the facts of the checkpoint
        # The checkpoint may be of another function: the run had ended, or began elsewhere.
        self.needs_check: bool = False
        if self._checkpoints is not None:
            self._checkpoints.rehearse()
            if run.resume:
                self._resume()
        if ranks.mesh.rank == 0 and not run.resume and not self._optimizer.clock and take_restart():
            call = ranks.minimizer.method.call
            log.warn(f"this job was started again, and {call} begins from x0 again; {self._how_to_resume}")
        if run.record is not None:
            parameters = ranks.parameters
            run.record.begin(
                {
                    "optimizer": ranks.minimizer.method.call,
                    "rule": self._optimizer.rule.configuration(),
                    "configuration": self._optimizer.config,
                    "parameters": sum(spec.size for spec in parameters.specs),
                    "dtype": str(parameters.dtype),
                    "resumed_steps": self._steps,
                    "checkpoints": None if self._checkpoints is None else str(self._checkpoints.folder),
                },
                stage=True,
            )

    def _resume(self) -> None:
        state = self._optimizer.state
        found = self._checkpoints.load(state.capture(), check=self._check)
        if found is not None:
            state.report_changes(found.facts)
            state.restore(found.facts)
            self.resumed = found.facts
            report_resumed(found, self._checkpoints)
            saved = found.facts["minimizer.json"]
            self._value = float(saved["progress"]["value"])
            begun = found.facts.get(_START, {}).get("norm", self._start)
            elsewhere = bool(saved["stop_reason"]) or begun != self._start or self._outer is not None
            self.needs_check = not math.isnan(self._value) and elsewhere

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError unless these are the facts of a checkpoint of this minimisation."""
        if isinstance(numbers := facts.get(LOOP_NUMBERS), Mapping):
            raise ValueError(
                f"the checkpoint in {self._checkpoints.folder} is of {brief(numbers.get('method'))}, and this is "
                f"{self._call}; give each its own folder, or resume=False"
            )
        self._optimizer.state.check(facts)
        if self._outer is not None:
            self._outer.check(facts)
        else:
            expect_no_constraints(facts, self._checkpoints.folder)

    @property
    def _steps(self) -> int:
        """The evaluations of this minimisation, with those before a resume."""
        return self._optimizer.clock - self._began

    @property
    def _call(self) -> str:
        """The public function whose run this is."""
        return self._ranks.minimizer.method.call if self._outer is None else "augmented_lagrangian"

    @property
    def _how_to_resume(self) -> str:
        """A sentence on how to continue."""
        if self._checkpoints is None:
            return "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can resume"
        return f"{self._call}(..., resume=True) resumes from the checkpoint in {self._checkpoints.folder}"

    def _norm_of_start(self) -> float:
        """The 2-norm of the start, which identifies it on any number of ranks. Collective over the mesh."""
        minimizer = self._ranks.minimizer
        (top,) = minimizer.space.largest(minimizer.point)
        (square,) = minimizer.space.dots([(minimizer.point, minimizer.point)], [top * top])
        return math.sqrt(square)

    def check_function(self, value: float, gradient: Any, problem: BaseException | None) -> None:
        """Raise ValueError unless the resumed minimisation is of the function at hand.

        This rank's `value` and `gradient` are at the best iterate of the checkpoint.
        """
        saved, self.needs_check = self._value, False
        found = self._ranks.combined("the gradient", value, gradient, problem)
        assert found is not None
        minimizer = self._ranks.minimizer
        expect_same_function(found[1] + minimizer.added_at(minimizer.best), saved, self._checkpoints.folder)

    def evaluated(self, ended: bool) -> None:
        """Record an evaluation or a product, and save if that is due. The parameters are the next point.

        If the minimisation has `ended`, `end` saves.
        """
        progress, steps = self._ranks.minimizer.progress, self._steps
        if self._record is not None:
            self._record.step(
                steps,
                loss=self._ranks.value,
                learning_rate=progress.step_length,
                gradient_norm=progress.projected_norm,
                iteration=progress.iterations,
                accepted_loss=progress.value,
            )
        if not ended and self._checkpoints is not None and self._checkpoints.due(steps):
            self._save()

    def end(self, reason: str) -> None:
        """Save at the end, and record its reason: as for the result, or "signal" after Ctrl-C."""
        if self._checkpoints is not None:
            self._save()
            self._checkpoints.wait()
        hint = self._how_to_resume if reason == "signal" else ""
        if hint and self._ranks.mesh.rank == 0:
            log.inform(f"stopped after step {self._steps}; {hint}")
        if self._record is not None:
            self._record.end(self._steps, reason, hint)
        note_run(stopped=reason == "signal")

    def _save(self) -> None:
        if self._record is not None:
            self._record.flush()  # no later run repeats the evaluations before a checkpoint
        self._ranks.publish(self._ranks.minimizer.point)
        self._optimizer.state.consolidate()
        outer = {} if self._outer is None else self._outer.facts()
        self._checkpoints.save(self._optimizer.state.capture().with_facts({_START: {"norm": self._start}, **outer}))


def expect_same_function(value: float, saved: float, folder: Any) -> None:
    """Raise ValueError if the best iterate of the checkpoint in a folder had another value than this function has."""
    if not abs(value - saved) <= SAME_FUNCTION * max(abs(value), abs(saved)):
        raise ValueError(
            f"the checkpoint in {folder} is of another function: its best iterate had the value {saved:.12g}, and this "
            f"function is {value:.12g} there; give each function its own folder, or resume=False"
        )


def expect_no_constraints(facts: Mapping[str, Any], folder: Any) -> None:
    """Raise ValueError if the facts of the checkpoint in a folder are of a minimisation under constraints."""
    if MULTIPLIERS in facts:
        raise ValueError(
            f"the checkpoint in {folder} is of augmented_lagrangian, and this is a minimisation without constraints; "
            "give each its own folder, or resume=False"
        )


def report_resumed(found: Any, checkpoints: Any) -> None:
    """Say on the first rank from which checkpoint a minimisation resumes."""
    if checkpoints.mesh.rank == 0:
        log.inform(f"resumes from step {found.facts['step']} of {checkpoints.folder}")
