"""How often the host waits for the stand-in of a device, and what it launches there."""

from __future__ import annotations

from typing import Any

import pytest
import standin

from mpishard.backend.array import Kernel


def counted_waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one with each wait for work that is not done, from now on."""
    waits: list[None] = []
    run_to = standin.Stream.run_to

    def counted(self: standin.Stream, number: int) -> None:
        if self.finished < number:
            waits.append(None)
        run_to(self, number)

    monkeypatch.setattr(standin.Stream, "run_to", counted)
    return waits


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the names of CUDA functions and kernels that are launched from now on."""
    names: list[str] = []
    launch_cuda, launch = standin.StandIn.launch_cuda, standin.StandIn.launch

    def cuda(self: Any, function: Any, *arguments: Any) -> None:
        names.append(function.name)
        launch_cuda(self, function, *arguments)

    def kernel(self: Any, function: Kernel, *arguments: Any) -> list[float]:
        names.append(function.name)
        return launch(self, function, *arguments)

    monkeypatch.setattr(standin.StandIn, "launch_cuda", cuda)
    monkeypatch.setattr(standin.StandIn, "launch", kernel)
    return names
