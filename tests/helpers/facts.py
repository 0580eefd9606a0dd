"""Facts of ranks on hosts, as `mpishard info` collects them, without ranks and hosts."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from mpishard.comm.capabilities import Capabilities
from mpishard.environment import Blas, Facts, Finding, findings
from mpishard.environment.facts import H5py, Memory, MpiSetup, Process, Processor
from mpishard.launch.launchers import Launcher

MPICH = Capabilities("MPICH", "5.0.2", (5, 0), True, True, False)
OPEN_MPI = Capabilities("Open MPI", "5.0.11", (3, 1), True, False, False)
VERSIONS = {"mpishard": "1.0", "Python": "3.11.7", "NumPy": "2.4", "mpi4py": "4.1.2", "h5py": "3.16", "HDF5": "2.0.0"}
GOOD = Facts(
    process=Process(rank=0, ranks=1, host="n1", node=0, launches=()),
    versions=VERSIONS,
    mpi=OPEN_MPI,
    mpi_setup=MpiSetup(
        mpi_text="Open MPI v5.0.11",
        thread_level="MPI_THREAD_MULTIPLE",
        heals=True,
        could_heal=True,
        without_han=True,
        mpirun=Launcher("/opt/bin/mpirun", "Open MPI"),
        mpirun_on_path=None,
        mpi_path="/opt/lib/libmpi.so.40",
    ),
    h5py=H5py(h5py_mpi=False, h5py_lacks=()),
    processor=Processor(
        blas=(Blas("openblas", "0.3.31", "Haswell", 4),),
        blas_chosen="",
        cores=(0, 1, 2, 3),
        cpu_quota=None,
        kernels="/opt/kernels/znver3",
    ),
    memory=Memory(
        gpus=0,
        pins_memory=False,
        locked_memory=8 * 2**20,
        shared_memory=2**36,
        shared_memory_free=2**35,
    ),
)
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
PRTE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}


def changed(facts: Facts, **values: Any) -> Facts:
    """The facts with other values, which are named without their groups."""
    for group in fields(facts):
        whole = getattr(facts, group.name)
        if is_dataclass(whole) and group.name != "mpi":
            own = {field.name: values.pop(field.name) for field in fields(whole) if field.name in values}
            facts = replace(facts, **{group.name: replace(whole, **own)})
    return replace(facts, **values)


def job(*ranks_on_hosts: int, **changes: Any) -> list[Facts]:
    """Good facts of a number of ranks on each of several hosts, with changes."""
    found: list[Facts] = []
    for host, ranks in enumerate(ranks_on_hosts):
        node = len(found)
        for _ in range(ranks):
            place = {"rank": len(found), "ranks": sum(ranks_on_hosts), "host": f"n{host + 1}", "node": node}
            found.append(changed(GOOD, **{**place, **changes}))
    return found


def only(facts: list[Facts]) -> Finding:
    (finding,) = findings(facts)
    return finding
