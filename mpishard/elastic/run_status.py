"""The committed step and the decisions of an elastic run's workers as one value, and what a new worker must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mpishard.training.progress import RunProgress


class RunStatus(NamedTuple):
    """The committed step and the decisions of the workers."""

    committed_step: int
    decided_step: int  # the last step after which all workers have decided whether to stop
    stop_reason: str  # empty if the run continues
    saved: bool  # the last checkpoint of the run is written

    @property
    def is_decided(self) -> bool:
        """True if the workers have decided on the last committed step; a death may come between the two."""
        return self.decided_step >= self.committed_step

    @staticmethod
    def newest(survivors: Iterable[RunStatus]) -> RunStatus:
        """The status after a death: what one survivor has committed or decided counts for all."""
        known = list(survivors)
        decided, reason = max((each.decided_step, each.stop_reason) for each in known)
        committed = max(each.committed_step for each in known)
        return RunStatus(committed, decided, reason, all(each.saved for each in known))


class Survivor(NamedTuple):
    """Facts of a process that all others get after a death."""

    status: RunStatus
    has_state: bool  # it has had a part of the run's state; else its status does not count
    request: int  # the last request for workers that it knows all have agreed on
    last_disruption: int  # see `Recruiter`


@dataclass(frozen=True)
class ResizeMetadata:
    """The metadata that the processes of a run get with the arrays of its state when the workers change."""

    optimizer: Mapping[str, Any]  # part of the metadata of a `RunState`, for `OptimizerState.restore`
    progress: RunProgress
    status: RunStatus
    request: int  # the last request for workers that all have agreed on
    discovered: int  # the last number from `discover`
    checkpoints: list[str]  # ids of the run's own checkpoints

    def to_wire(self) -> dict[str, Any]:
        """As metadata of a `RunState`: plain values, and the losses as an array, which `reshard_state` sends as one."""
        progress = asdict(self.progress)
        return {
            **self.optimizer,
            "losses": progress.pop("losses"),
            "progress": progress,
            "status": tuple(self.status),
            "request": self.request,
            "discovered": self.discovered,
            "checkpoints": self.checkpoints,
        }

    @classmethod
    def from_wire(cls, metadata: Mapping[str, Any]) -> ResizeMetadata:
        """The value whose `to_wire` this is."""
        own = {"losses", "progress", "status", "request", "discovered", "checkpoints"}
        return cls(
            optimizer={name: value for name, value in metadata.items() if name not in own},
            progress=RunProgress(losses=metadata["losses"], **metadata["progress"]),
            status=RunStatus(*metadata["status"]),
            request=metadata["request"],
            discovered=metadata["discovered"],
            checkpoints=metadata["checkpoints"],
        )
