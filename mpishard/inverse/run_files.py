"""The files of a minimisation on a mesh: checkpoints, from which it resumes, and its record."""

from __future__ import annotations

import math
from typing import Any

from mpishard.arguments import flag, shown
from mpishard.comm.supervisor_reports import take_restart
from mpishard.inverse.mesh_run import MeshRun
from mpishard.inverse.run import MinimizationRun
from mpishard.io import log
from mpishard.launch.script import note_run
from mpishard.record import RunRecord

_START = "start.json"  # the fact about the start
# Values of one function at one point differ by less, relatively, where ranks sum in different orders.
_SAME = 1e-6


class RunFiles:
    """Saves a minimisation after evaluations, and records them. Collective over the mesh, its creation too.

    It saves as often as ``checkpoints.every`` says, and at the end. Raises ValueError or TypeError on all ranks if an
    argument is invalid or the checkpoint is of another minimisation, OSError if a folder cannot be used.
    """

    def __init__(self, run: MinimizationRun, checkpoints: Any, resume: bool, record: RunRecord | None) -> None:
        assert isinstance(run, MeshRun)
        self._run = run
        self._optimizer = run.optimizer
        self._checkpoints = checkpoints
        self._record = record
        self._resumes = resume
        run.raise_if_any(self._problem())
        given = {"checkpoints": checkpoints is not None, "record": record is not None, "resume": resume}
        self._optimizer.settings.agree({name: str(value) for name, value in given.items()})
        self._start = self._norm_of_start()
        self._value = math.nan  # at the best iterate of the checkpoint
        # The checkpoint may be of another function: the run had ended, or began elsewhere.
        self.doubtful: bool = False
        if checkpoints is not None:
            checkpoints.rehearse()
            if resume:
                self._resume()
        if run.speaks and not resume and not self._optimizer.clock and take_restart():
            log.warn(f"this job was started again, and the minimization begins from x0 again; {self._way_on}")
        if record is not None:
            parameters = run.parameters
            record.begin(
                {
                    "optimizer": "minimize",
                    "rule": run.method.configuration(),
                    "configuration": self._optimizer.config,
                    "parameters": sum(spec.size for spec in parameters.specs),
                    "dtype": str(parameters.dtype),
                    "resumed_steps": self._optimizer.clock,
                    "checkpoints": None if checkpoints is None else str(checkpoints.folder),
                },
                stage=True,
            )

    def _problem(self) -> Exception | None:
        checkpoints, record, world = self._checkpoints, self._record, self._run.mesh.world
        try:
            if flag("resume", self._resumes) and checkpoints is None:
                raise ValueError("resume=True needs to know from where; give checkpoints=Checkpoints(folder, mesh)")
            if not (checkpoints is None or hasattr(checkpoints, "due")):
                raise TypeError(f"checkpoints={shown(checkpoints)} must be Checkpoints(folder, mesh)")
            if checkpoints is not None and checkpoints.mesh.world is not world:
                raise ValueError("the checkpoints are of another mesh; make them with the mesh of minimize")
            if not (record is None or isinstance(record, RunRecord)):
                raise TypeError(f"record={shown(record)} must be RunRecord(folder, mesh)")
        except (TypeError, ValueError) as error:
            return error
        return None

    def _resume(self) -> None:
        state = self._optimizer.state
        found = self._checkpoints.load(state.capture(), check=state.check)
        if found is not None:
            state.report_changes(found.facts)
            state.restore(found.facts)
            saved = found.facts["minimizer.json"]
            self._value = float(saved["progress"]["value"])
            begun = found.facts.get(_START, {}).get("norm", self._start)
            self.doubtful = not math.isnan(self._value) and bool(saved["stop_reason"] or begun != self._start)

    @property
    def _way_on(self) -> str:
        """A sentence on how to continue."""
        if self._checkpoints is None:
            return "nothing is saved: checkpoints=Checkpoints(folder, mesh), resume=True makes a run that can resume"
        return f"minimize(..., resume=True) resumes from the checkpoint in {self._checkpoints.folder}"

    def _norm_of_start(self) -> float:
        """The 2-norm of the start, which identifies it on any number of ranks. Collective over the mesh."""
        minimizer = self._run.minimizer
        (top,) = minimizer.space.largest(minimizer.point)
        (square,) = minimizer.space.dots([(minimizer.point, minimizer.point)], [top * top])
        return math.sqrt(square)

    def check_function(self, value: float) -> None:
        """Raise ValueError unless the resumed minimisation is of the function at hand.

        `value` is that at the best iterate of the checkpoint; the same on all ranks.
        """
        saved = self._value
        if not abs(value - saved) <= _SAME * max(abs(value), abs(saved)):
            raise ValueError(
                f"the checkpoint in {self._checkpoints.folder} is of another function: its best iterate had the value "
                f"{saved:.12g}, and this function is {value:.12g} there; give each function a folder of its own, or "
                "resume=False"
            )

    def evaluated(self, goes_on: bool) -> None:
        """Record an evaluation or a product, and save if that is due. The parameters are the next point.

        If none follows, `end` saves.
        """
        progress, clock = self._run.minimizer.progress, self._optimizer.clock
        if self._record is not None:
            self._record.step(
                clock,
                loss=self._run.value,
                learning_rate=progress.step_length,
                gradient_norm=progress.projected_norm,
                iteration=progress.iterations,
                accepted_loss=progress.value,
            )
        if goes_on and self._checkpoints is not None and self._checkpoints.due(clock):
            self._save()

    def end(self, reason: str) -> None:
        """Save at the end, and record its reason: as for the result, or "signal" after Ctrl-C."""
        if self._checkpoints is not None:
            self._save()
            self._checkpoints.wait()
        way_on = self._way_on if reason == "signal" else ""
        if way_on and self._run.speaks:
            log.inform(f"stopped after step {self._optimizer.clock}; {way_on}")
        if self._record is not None:
            self._record.end(self._optimizer.clock, reason, way_on)
        note_run(stopped=reason == "signal")

    def _save(self) -> None:
        if self._record is not None:
            self._record.flush()  # no later run repeats the evaluations before a checkpoint
        self._run.publish(self._run.minimizer.point)
        self._optimizer.state.consolidate()
        self._checkpoints.save(self._optimizer.state.capture().with_facts({_START: {"norm": self._start}}))
