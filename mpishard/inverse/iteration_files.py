"""The files of a method with a loop of its own, whose state are vectors and numbers: checkpoints and its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.comm.mesh import Mesh
from mpishard.comm.supervisor_reports import take_restart
from mpishard.data_parallel.validation import name_of_kind
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.run_files import LOOP_NUMBERS, report_resumed
from mpishard.io import log
from mpishard.launch.exit_codes import note_run
from mpishard.layout.run_state import PARAMETERS, RunState, Shard, brief
from mpishard.layout.tensors import WHOLE, LocalLayout, ParameterSpec

Array = Any
Saved = tuple[dict[str, Any], Sequence[Array]]  # the numbers of an iterate, and its vectors


@dataclass(frozen=True)
class Vectors:
    """The vectors that are saved, as tensors, and what this rank has of them, end to end.

    Those of the unknowns are whole on all ranks, or this rank's parts; those of rows are this rank's rows.
    """

    specs: tuple[ParameterSpec, ...]
    holding: LocalLayout
    counted: LocalLayout

    @classmethod
    def whole(cls, mesh: Mesh, sizes: Mapping[str, int]) -> Vectors:
        """Vectors that all ranks have, by name."""
        specs = tuple(ParameterSpec(name, (size,)) for name, size in sizes.items())
        holding = WHOLE.holding(specs)
        return cls(specs, holding, holding if mesh.rank == 0 else ())


class IterationFiles:
    """Saves a method after iterations, and records them. Collective over the mesh, its creation too.

    A step is an iteration. `call` is the public function, `name` that of its method, which resumes no other. The
    arguments have passed `files_given`. Raises as `RunFiles`.
    """

    def __init__(self, run: RunArguments, call: str, name: str, vectors: Vectors) -> None:
        self._checkpoints: Any = run.checkpoints
        self._record, self._resumes = run.record, run.resume
        self._call, self._name = call, name
        self._vectors = vectors
        if self._checkpoints is not None:
            self._checkpoints.rehearse()
        if run.mesh is not None and run.mesh.rank == 0 and not run.resume and take_restart():
            log.warn(f"this job was started again, and {call} begins from x0 again; resume=True continues")

    def load(self, take: Callable[[Mapping[str, Any]], None]) -> Array | None:
        """Give `take` the numbers of the newest checkpoint, and return its vectors, end to end.

        None without a checkpoint, or if the run is not to resume. `take` raises ValueError if they are of another
        problem, KeyError or TypeError if they are damaged; no vector has been read then.
        """
        if not self._resumes:
            return None
        flat = np.zeros(sum(piece.size for piece in self._vectors.holding))
        found = self._checkpoints.load(self._state(flat, {}), check=lambda facts: self._check(facts, take))
        if found is None:
            return None
        report_resumed(found, self._checkpoints)
        return flat

    def _check(self, facts: Mapping[str, Any], take: Callable[[Mapping[str, Any]], None]) -> None:
        """Raise ValueError unless these are the facts of a checkpoint of this method."""
        found = facts.get(LOOP_NUMBERS)
        numbers = dict(found) if isinstance(found, Mapping) else {}
        method = numbers.pop("method", name_of_kind(facts.get("rule", "another function")))
        folder = self._checkpoints.folder
        if method != self._name:
            raise ValueError(
                f"the checkpoint in {folder} is of {brief(method)}, and this is {self._name}; give each its own "
                "folder, or resume=False"
            )
        try:
            take(numbers)
        except (KeyError, TypeError):
            raise ValueError(f"the checkpoint in {folder} has damaged numbers: {brief(numbers)}") from None

    def begin_record(self, steps: int, options: Mapping[str, Any]) -> None:
        """Begin the record of a run that resumes after so many steps."""
        if self._record is not None:
            unknowns = self._vectors.specs[0]
            facts = {"optimizer": self._call, "rule": {"rule": self._call, **options}, "parameters": unknowns.size}
            facts |= {"dtype": "float64", "resumed_steps": steps}
            facts["checkpoints"] = None if self._checkpoints is None else str(self._checkpoints.folder)
            self._record.begin(facts, stage=True)

    def recorded(self, step: int, **metrics: float) -> None:
        """Record an iteration."""
        if self._record is not None:
            self._record.step(step, **metrics)

    def iterated(self, step: int, saved: Callable[[], Saved]) -> None:
        """Save after an iteration, if that is due."""
        if self._checkpoints is not None and self._checkpoints.due(step):
            self._save(step, *saved())

    def end(self, step: int, saved: Callable[[], Saved], reason: str = "", stopped: bool = False) -> None:
        """Save the last state, and record the reason of the end; `stopped`: by Ctrl-C, or the end of the job."""
        if self._checkpoints is not None:
            self._save(step, *saved())
            self._checkpoints.wait()
        if self._record is not None:
            self._record.end(step, reason)
        note_run(stopped)

    def _save(self, step: int, numbers: Mapping[str, Any], vectors: Sequence[Array]) -> None:
        if self._record is not None:
            self._record.flush()  # no later run repeats the iterations before a checkpoint
        facts = {"step": step, "optimizer": self._call, LOOP_NUMBERS: {**numbers, "method": self._name}}
        self._checkpoints.save(self._state(np.concatenate(vectors), facts))

    def _state(self, flat: Array, facts: Mapping[str, Any]) -> RunState:
        shard = Shard(PARAMETERS, flat, self._vectors.holding, self._vectors.counted)
        return RunState(self._vectors.specs, (shard,), facts)
