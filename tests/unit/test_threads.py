"""What limits the number of threads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mpishard.threads import cpu_quota


def system(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


CGROUP, V1 = "proc/self/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({CGROUP: "0::/\n"}, math.inf),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({CGROUP: "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 50000\n"}, 2.0),
        ({CGROUP: "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({CGROUP: "0::/\n", "sys/fs/cgroup/cpu.max": "what is this\n"}, math.inf),
        (
            {
                CGROUP: "4:memory:/a\n3:cpu,cpuacct:/a\n",
                f"{V1}/a/cpu.cfs_quota_us": "300000\n",
                f"{V1}/a/cpu.cfs_period_us": "100000\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
            },
            3.0,
        ),
    ],
)
def test_quota_of_cpu_time(files: dict[str, str], quota: float, tmp_path: Path) -> None:
    assert cpu_quota(system(tmp_path, files)) == quota
