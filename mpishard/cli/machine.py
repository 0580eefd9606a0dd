"""The machine for which ``mpishard estimate`` predicts, from the options that describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mpishard.estimate import TYPICAL, MachineProfile


@dataclass(frozen=True)
class Speeds:
    """The speeds of a rank: in a file, or each by an option; without any, those of a typical machine."""

    profile: Path | None = None
    flops: float | None = None
    bandwidth: float | None = None
    latency: float | None = None
    memory_bandwidth: float | None = None

    def machine(self) -> MachineProfile:
        """The machine with these speeds; ValueError if the options do not go together."""
        given = {"--flops": self.flops, "--bandwidth": self.bandwidth, "--latency": self.latency}
        if self.profile is not None:
            if any(value is not None for value in (*given.values(), self.memory_bandwidth)):
                raise ValueError(
                    "--profile brings all speeds: give it, or --flops, --bandwidth and --latency, not both"
                )
            if not self.profile.is_file():
                what = "is no file" if self.profile.exists() else "is not there"
                raise ValueError(f"--profile {self.profile} {what}; make one: mpirun -n N mpishard bench --output FILE")
            return MachineProfile.load(self.profile)
        if all(value is None for value in given.values()):
            if self.memory_bandwidth is not None:
                raise ValueError("--memory-bandwidth goes with --flops, --bandwidth and --latency")
            return TYPICAL
        if missing := [name for name, value in given.items() if value is None]:
            raise ValueError(f"a machine given by hand needs {' and '.join(missing)} too")
        assert self.flops is not None and self.bandwidth is not None and self.latency is not None
        memory_bandwidth = math.inf if self.memory_bandwidth is None else self.memory_bandwidth
        return MachineProfile.given(self.flops, self.bandwidth, self.latency, memory_bandwidth)


@dataclass(frozen=True)
class Network:
    """The network between nodes: all of it or, for one that the profile has or for none, nothing."""

    ranks_per_node: int | None = None
    bandwidth: float | None = None
    latency: float | None = None

    def between(self, machine: MachineProfile) -> MachineProfile:
        """The machine, with this network between its nodes; ValueError if a part of it is missing."""
        given = {
            "--ranks-per-node": self.ranks_per_node,
            "--network-bandwidth": self.bandwidth,
            "--network-latency": self.latency,
        }
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return machine
        if missing:
            raise ValueError(f"a network between nodes needs {' and '.join(missing)} too")
        assert self.ranks_per_node is not None and self.bandwidth is not None and self.latency is not None
        return machine.with_network(self.latency, self.bandwidth, int(self.ranks_per_node))
