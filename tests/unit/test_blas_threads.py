"""The number of BLAS threads: what limits it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mpishard.backend import process
from mpishard.backend.process import cpu_quota


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


@pytest.mark.parametrize(
    ("a", "b", "given"),
    [
        ((64, 64), (64, 64), [1, 4]),
        ((9, 64, 64), (9, 64, 64), [1, 4]),  # each of them is small
        ((64,), (64, 64), [1, 4]),
        ((512, 256), (256, 256), []),
    ],
)
def test_small_products_have_one_thread(
    a: tuple[int, ...], b: tuple[int, ...], given: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(process, "_openblas", lambda: (lambda: 4, set_to.append))
    assert np.array_equal(process.matmul(np.ones(a), np.ones(b)), np.matmul(np.ones(a), np.ones(b)))
    assert set_to == given


def test_the_number_of_threads_is_what_it_was_after_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "chosen_by_user", lambda: None)
    process._openblas.cache_clear()
    found = process._openblas()
    if found is None:
        pytest.skip("NumPy has another BLAS here")
    get_threads, _ = found
    with threadpool_limits(2):
        with pytest.raises(ValueError):
            process.matmul(np.ones((2, 3)), np.ones((2, 3)))
        assert get_threads() == 2
    process._openblas.cache_clear()


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
def test_a_choice_of_the_user_stands(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    process._openblas.cache_clear()
    assert process._openblas() is None
    process._openblas.cache_clear()


def test_xla_gets_as_many_threads_where_the_user_chose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "7")
    process._limit_xla(2)
    assert os.environ["NPROC"] == "7"
    monkeypatch.delenv("NPROC")
    process._limit_xla(2)
    assert os.environ["NPROC"] == "2"
    monkeypatch.setattr(process, "chosen_by_user", lambda: None)
    with threadpool_limits(2):
        process.fix_blas_threads()
    assert os.environ["NPROC"] == "1"
