"""Facts of the environment as JSON."""

from __future__ import annotations

import json

from facts import GOOD

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
