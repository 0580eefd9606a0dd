"""Facts of the environment: their JSON, and their old names and arguments."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
from facts import GOOD

from mpishard import deprecated
from mpishard.environment import Facts

# What ``mpishard info --json`` prints for these facts; a new fact comes at the end.
PRINTED = (
    '{"rank": 0, "ranks": 1, "host": "n1", "node": 0, "launches": [], "versions": {"mpishard": "1.0", "Python": '
    '"3.11.7", "NumPy": "2.4", "mpi4py": "4.1.2", "h5py": "3.16", "HDF5": "2.0.0"}, "mpi": {"library": "Open MPI", '
    '"version": "5.0.11", "standard": [3, 1], "threads": true, "large_counts": false, "device_buffers": false}, '
    '"mpi_text": "Open MPI v5.0.11", "thread_level": "MPI_THREAD_MULTIPLE", "heals": true, "could_heal": true, '
    '"without_han": true, "mpirun": {"path": "/opt/bin/mpirun", "family": "Open MPI"}, "mpirun_on_path": null, '
    '"h5py_mpi": false, "h5py_lacks": [], "blas": [{"library": "openblas", "version": "0.3.31", "kernels": "Haswell", '
    '"threads": 4}], "blas_chosen": "", "cores": [0, 1, 2, 3], "cpu_quota": null, "products": "", '
    '"products_chosen": "", "gpus": 0, "pins_memory": false, "locked_memory": 8388608, '
    '"shared_memory": 68719476736, "shared_memory_free": 34359738368, "gpu_list": [], "gpu_of_rank": null, '
    '"driver_cuda": "", "cupy_cuda": "", "device_libraries": {}, "claims_device_buffers": false, '
    '"cupy_packages": []}'
)


def test_what_is_printed_as_json_stays() -> None:
    assert json.dumps(GOOD.flat()) == PRINTED


def test_facts_have_their_old_names_for_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecated, "_warned", set())
    with pytest.warns(DeprecationWarning, match=r"Facts\.heals is called Facts\.mpi_setup\.heals now"):
        assert getattr(GOOD, "heals")  # noqa: B009
    with pytest.warns(DeprecationWarning):
        assert {name: getattr(GOOD, name) for name in json.loads(PRINTED)}.keys() == GOOD.flat().keys()
    with pytest.raises(AttributeError, match="'Facts' object has no attribute 'heels'"):
        getattr(GOOD, "heels")  # noqa: B009
    assert pickle.loads(pickle.dumps(GOOD)) == GOOD


def test_facts_are_made_without_groups_for_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, in their order, and by `dataclasses.replace`."""
    groups = ("process", "mpi_setup", "h5py", "processor", "memory", "devices")
    old: dict[str, Any] = {}
    for field in fields(GOOD):
        value = getattr(GOOD, field.name)
        old |= vars(value) if field.name in groups else {field.name: value}
    assert list(old) == list(GOOD.flat())
    for made in (lambda: Facts(**old), lambda: Facts(*old.values()), lambda: replace(GOOD, rank=0)):
        monkeypatch.setattr(deprecated, "_warned", set())
        with pytest.warns(DeprecationWarning, match=r"Facts\(rank=\.\.\., \.\.\.\) is called Facts\(process=Process"):
            assert made() == GOOD
    with pytest.raises(TypeError, match="'host'"):
        Facts(**{name: value for name, value in old.items() if name != "host"})
    with pytest.raises(TypeError):
        Facts(*old.values(), 1)
