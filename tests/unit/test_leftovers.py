"""What the supervisor removes after a job: what is certainly the job's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpishard.launch.processes import Leftovers

pytestmark = pytest.mark.faults

MAP = """
import mmap, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
kept = [mmap.mmap(file.fileno(), 0) for file in files]
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in a folder")
def test_segments_that_a_dead_process_of_the_job_had(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unique = f"{os.getpid()}_{time.monotonic_ns()}"
    names = (f"mpich_shm_{unique}", f"sm_segment.host.{unique}", f"users_{unique}", f"mpich_shm_other_{unique}")
    mpich, open_mpi, users, others = paths = [Path("/dev/shm") / name for name in names]
    (tmp_path / "ompi.77").mkdir()
    (tmp_path / "ompi.78").mkdir()
    try:
        for path in paths:
            path.write_bytes(bytes(4096))
        mapped = [sys.executable, "-I", "-S", "-c", MAP, *map(str, (mpich, open_mpi, users))]
        leftovers = Leftovers()
        leftovers._next = 0.0
        with subprocess.Popen(mapped, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            leftovers.look()
            leftovers.remove(0)
            assert all(path.exists() for path in paths)
            process.kill()
        leftovers.remove(77)
        assert [path.exists() for path in paths] == [False, False, True, True]
        assert [path.name for path in tmp_path.iterdir()] == ["ompi.78"]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
