"""A pytest plugin for tests that run on several ranks: a failure on one is a failure on all."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

AFTER_FAILURE = 20.0  # seconds that the other ranks get to reach the agreement once one has failed
QUIET = 2.0  # seconds after which a failed rank that is still alone says so itself


class Agreement:
    """A pytest plugin for runs on several ranks: each phase of a test has one outcome, the worst of all."""

    def __init__(self, config: pytest.Config, world: Any) -> None:
        from mpishard.comm import abort
        from mpishard.comm.abort import DeathMonitor

        self.world = world.Dup()  # a communicator of its own: a test's leftovers cannot match its messages
        self.rank, self.size = world.rank, world.size
        # Messages of each to each have one round; a collective has several, and each waits until ranks look again.
        self.failed = np.zeros(self.size, dtype=np.int8)
        flags = [self.failed[rank : rank + 1] for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.requests = [self.world.Recv_init(flags[rank], rank) for rank in others]
        self.requests += [self.world.Send_init(flags[self.rank], rank) for rank in others]
        self.limit = float(config.getini("faulthandler_timeout") or 120)
        self.collection_errors: list[str] = []
        self.death_monitor = DeathMonitor.over(world)  # one for all meshes of these ranks
        # The true stderr; later, pytest captures file descriptor 2.
        self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")
        abort._print = self.say_last

    def say(self, text: str) -> None:
        self.stderr.write("".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines()))
        self.stderr.flush()

    def say_last(self, text: str) -> None:
        """Say why mpishard ends the job, which would be lost with all that pytest has captured."""
        self.say(text)
        time.sleep(0.2)  # launchers drop what is still in the pipe

    def exchange(self, where: str, failure: str | None) -> dict[int, str]:
        """Failures by rank; ends the job if the others stay away.

        Polls, because a blocked MPI call can be neither timed out nor interrupted.
        """
        from mpi4py import MPI

        self.failed[self.rank] = failure is not None
        MPI.Prequest.Startall(self.requests)
        start, reported = time.monotonic(), False
        limit = self.limit if failure is None else AFTER_FAILURE
        while not MPI.Prequest.Testall(self.requests):
            waited = time.monotonic() - start
            if failure is not None and not reported and waited > QUIET:
                self.say(f"failed in {where}:\n{failure}")
                reported = True
            if waited > limit:
                self.say(f"{where}: other ranks did not follow within {limit:.0f} s; ending the job")
                self.world.Abort(1)
            time.sleep(0.0005)
        if not self.failed.any():
            return {}
        texts = self.world.allgather(failure)
        return {rank: text for rank, text in enumerate(texts) if text is not None}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        error = "\n".join(self.collection_errors) or None
        others = self.exchange("collection", error)
        if others and error is None:
            rank, text = next(iter(others.items()))
            pytest.exit(f"collection failed on rank {rank}:\n{text}", returncode=2)
        tests = hashlib.sha256("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
        if not others and len(set(self.world.allgather(tests))) > 1:
            pytest.exit("ranks collected different tests; parameters must not depend on the rank", 2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        own = (report.longreprtext or f"{report.when} failed") if report.failed else None
        others = self.exchange(f"{item.nodeid} ({report.when})", own)
        others.pop(self.rank, None)
        if others:
            rank, text = next(iter(others.items()))
            if own is not None:
                report.sections.append((f"also failed on ranks {sorted(others)}; rank {rank}", text))
            else:
                report.outcome = "failed"
                report.longrepr = f"failed on ranks {sorted(others)}; rank {rank}:\n{text}"
        return report

    def pytest_unconfigure(self) -> None:
        # Open MPI ends the job at the first rank that exits with an error: let rank 0 have its say first.
        sys.stdout.flush()
        self.death_monitor.dismiss()
        request, start = self.world.Ibarrier(), time.monotonic()
        while not request.Test() and time.monotonic() - start < AFTER_FAILURE:
            time.sleep(0.001)
