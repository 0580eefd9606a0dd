"""Problems of the machine and the MPI that follow from the facts of some ranks, with remedies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpishard.arguments import listed
from mpishard.backend.gemm.choice import VARIABLE, Choice
from mpishard.backend.gemm.libraries import NUMPY
from mpishard.environment.facts import Facts
from mpishard.launch.detection import OPEN_MPI, SLURM, Launch, launch_of
from mpishard.launch.launchers import Launcher

WRONG, WARNING, NOTE = "wrong", "warning", "note"

# Bytes of shared memory that must be free for each rank.  Open MPI 5 creates a file of 16 MiB for each rank, and fills
# it as the rank sends.  MPICH 5 takes 5 MB when a rank starts, before the rank looks what is free; where 3 MiB were
# left after that, all-reduces of 8 MB crashed.
_SHARED_MEMORY_WANTED, _SHARED_MEMORY_NEEDED = 16 * 2**20, 4 * 2**20
# Network cards and GPUs need locked buffers; most systems allow 8 MiB by default.
_LOCKED_MEMORY = 2**30
_EXTRAS = (13, 12)  # cuda13x and cuda12x: the versions of CUDA for which an extra brings CuPy


@dataclass(frozen=True)
class Finding:
    """One finding: a problem, or a possible improvement.

    Parameters
    ----------
    level : {"wrong", "warning", "note"}
        Runs will fail; runs will be slow or less safe; a possible improvement.
    about : str
        The topic, in one word: ``launch``, ``versions``, ``threads``, ``cores``, ``blas``, ``products``, ``hdf5``,
        ``memory``, ``gpu`` or ``death``.
    what : str
        The problem in one sentence, without the point.
    way_out : str
        The remedy, as an imperative.
    """

    level: str
    about: str
    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}; {self.way_out}"


def findings(facts: Sequence[Facts]) -> list[Finding]:
    """The findings from the facts of all ranks; the most serious come first.

    Not collective.

    Parameters
    ----------
    facts : sequence of Facts
        In order of ranks, at least one.

    Returns
    -------
    list of Finding
        Empty if nothing is wrong.
    """
    found = [
        finding
        for look in (_launch, _versions, _threads, _cores, _blas, _products, _hdf5, _memory, _gpus, _deaths)
        for finding in look(facts)
    ]
    return sorted(found, key=lambda finding: (WRONG, WARNING, NOTE).index(finding.level))


def nodes(facts: Sequence[Facts]) -> list[list[Facts]]:
    """The ranks' facts, grouped by node; nodes in the order of their first ranks."""
    found: dict[int, list[Facts]] = {}
    for each in facts:
        found.setdefault(each.process.node, []).append(each)
    return list(found.values())


def cores_of(node: Sequence[Facts]) -> int:
    """Number of cores of a node's ranks together, at least 1; a quota of CPU time limits it, rounded down."""
    seen = len({core for each in node for core in each.processor.cores})
    quotas = [each.processor.cpu_quota for each in node if each.processor.cpu_quota is not None]
    return min(seen, max(1, int(max(quotas)))) if len(quotas) == len(node) else seen


def limit_of(node: Sequence[Facts]) -> str:
    """A note for messages if a quota of CPU time limits the cores of a node, else empty."""
    fewer = cores_of(node) < len({core for each in node for core in each.processor.cores})
    return " (by a quota of CPU time)" if fewer else ""


def count(number: int, what: str) -> str:
    """A number with what it counts, such as ``1 rank`` or ``2 ranks``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def fits(launcher: Launcher, library: str) -> bool:
    """Return True if a launcher is of the family of an MPI library; all libraries but Open MPI are of one family."""
    return (launcher.family == OPEN_MPI) == (library == OPEN_MPI)


def _launch(facts: Sequence[Facts]) -> Iterator[Finding]:
    first = facts[0]
    library = first.mpi.library
    ranks, setup = first.process.ranks, first.mpi_setup
    launch = launch_of(first.process.launches, ranks)
    if launch is not None and launch.ranks != ranks:
        size = "is alone in" if ranks == 1 else "is in"
        what = (
            f"{launch.launcher} started {launch.ranks} ranks, but each {size} an MPI_COMM_WORLD of size {ranks}: "
            f"mpi4py is bound to {library} {first.mpi.version}"
        )
        yield Finding(WRONG, "launch", what, _right_launcher(first, launch))
        return
    # Ranks that are already in one MPI_COMM_WORLD do not need mpirun.
    level = WRONG if launch is None else WARNING
    for launcher, where in ((setup.mpirun, "that mpishard run takes"), (setup.mpirun_on_path, "on the PATH")):
        if launcher is not None and not fits(launcher, library):
            what = f"the mpirun {where} is of {launcher.family} ({launcher.path}), but mpi4py is bound to {library}"
            yield Finding(level, "launch", f"{what}: ranks would be worlds of size 1, or fail", _right_launcher(first))


def _right_launcher(facts: Facts, launch: Launch | None = None) -> str:
    library, setup = facts.mpi.library, facts.mpi_setup
    if launch is not None and launch.family == SLURM:
        # In this order: srun --mpi=pmi2 may fail on data from MPICH's ranks (see docs/how-to/slurm.md).
        return (
            f"use mpirun of {library} in a script for sbatch, or srun --mpi={'pmix' if library == OPEN_MPI else 'pmi2'}"
        )
    right = next((each for each in (setup.mpirun, setup.mpirun_on_path) if each and fits(each, library)), None)
    if right is None:
        return (
            f"use the mpirun of the {library} that mpi4py has loaded, by mpishard run --launcher PATH too; "
            "or have mpi4py load the other MPI, by MPI4PY_MPIABI"
        )
    if launch is not None and (launch.family == OPEN_MPI) == (library == OPEN_MPI):
        return f"if that was the mpirun of another installation, use {right.path}"
    return f"use {right.path}"


def _versions(facts: Sequence[Facts]) -> Iterator[Finding]:
    of_mpi = [{"MPI": f"{each.mpi.library} {each.mpi.version}"} | each.versions for each in facts]
    for name in dict.fromkeys(name for versions in of_mpi for name in versions):
        hosts: dict[str, list[str]] = {}
        for each, versions in zip(facts, of_mpi, strict=True):
            hosts.setdefault(versions.get(name, "none"), []).append(each.process.host)
        if len(hosts) > 1:
            what = ", ".join(f"{version} on {listed(dict.fromkeys(where), 3)}" for version, where in hosts.items())
            level = WRONG if name in ("MPI", "mpishard") else WARNING
            yield Finding(level, "versions", f"{name} differs: {what}", "give all hosts the same environment")


def _threads(facts: Sequence[Facts]) -> Iterator[Finding]:
    if poor := [each for each in facts if not each.mpi.threads]:
        level = poor[0].mpi_setup.thread_level
        what = f"this MPI was started with {level}: collectives have no time limit, checkpoints are not "
        way_out = "leave MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.threads alone, or build the MPI with MPI_THREAD_MULTIPLE"
        yield Finding(WARNING, "threads", f"{what}written in the background, and no workers are spawned", way_out)


def _cores(facts: Sequence[Facts]) -> Iterator[Finding]:
    crowded = [node for node in nodes(facts) if len(node) > cores_of(node)]
    if crowded:
        worst = max(crowded, key=lambda node: len(node) / cores_of(node))
        more = f" (and {count(len(crowded) - 1, 'more host')} like it)" if len(crowded) > 1 else ""
        cores = f"{count(cores_of(worst), 'core')} of {worst[0].process.host}{limit_of(worst)}{more}"
        what = f"{len(worst)} ranks share {cores}, and MPI waits busily"
        yield Finding(
            WARNING, "cores", what, f"start at most {count(cores_of(worst), 'rank')} there, or expect slow steps"
        )


def _blas(facts: Sequence[Facts]) -> Iterator[Finding]:
    for node in nodes(facts):
        processors = [each.processor for each in node]
        threads = sum(max((blas.threads for blas in each.blas), default=1) for each in processors if each.blas_chosen)
        cores = max(cores_of(node), len(node))  # more ranks than cores is a separate finding
        if threads > cores:
            variable = next(each.blas_chosen for each in processors if each.blas_chosen)
            what = f"{variable} gives {count(len(node), 'rank')} of {node[0].process.host} {threads} BLAS threads"
            what += f" on {count(cores_of(node), 'core')}"
            yield Finding(WARNING, "blas", what, "unset it, and a mesh gives each rank its share of the cores")
            return


def _products(facts: Sequence[Facts]) -> Iterator[Finding]:
    chosen = [(rank, each.processor.products_chosen) for rank, each in enumerate(facts)]
    (first, text), *others = [each for each in chosen if each[1]] or [(0, NUMPY)]
    for rank, other in others:
        if other != text:
            what = f"{VARIABLE} is {text} on rank {first} and {other} on rank {rank}"
            yield Finding(
                WRONG, "products", what, "set the same on all ranks, with the launcher's option for variables"
            )
            return
    try:
        wanted = {*Choice.parse(text).libraries.values()}
    except ValueError as error:
        yield Finding(WRONG, "products", str(error), f"or unset {VARIABLE}")
        return
    for name in sorted(wanted):
        if lacking := [each for each in facts if name not in each.versions]:
            what = f"{VARIABLE}={text} wants {name}, which {lacking[0].process.host} lacks"
            yield Finding(WRONG, "products", what, f"pip install 'mpishard[{name}]' there, or unset {VARIABLE}")


def _hdf5(facts: Sequence[Facts]) -> Iterator[Finding]:
    for poor in facts:
        if poor.h5py.h5py_lacks:
            lacks = " and no ".join(poor.h5py.h5py_lacks)
            what = f"HDF5 {poor.versions['HDF5']} of h5py on {poor.process.host} has no {lacks}"
            what += ": checkpoints compressed with it cannot be written or read"
            yield Finding(WARNING, "hdf5", what, "install h5py as a wheel: pip install --force-reinstall h5py")
            return


def _memory(facts: Sequence[Facts]) -> Iterator[Finding]:
    for node in nodes(facts):
        host = node[0].process.host
        free, wanted = node[0].memory.shared_memory_free, len(node) * _SHARED_MEMORY_WANTED
        if free is not None and free < wanted:
            level = WRONG if free < len(node) * _SHARED_MEMORY_NEEDED else WARNING
            what = f"/dev/shm of {host} has {free >> 20} MiB left, and MPI may take {wanted >> 20} MiB there for "
            way_out = "remove what killed jobs have left in it, or give a container more of it (docker run --shm-size)"
            yield Finding(level, "memory", f"{what}{count(len(node), 'rank')}, or die of a bus error", way_out)
            return


def _gpus(facts: Sequence[Facts]) -> Iterator[Finding]:
    with_gpus = [each for each in facts if each.memory.gpus]
    if not with_gpus:
        return
    first = with_gpus[0]
    devices = first.devices
    where = f"{first.process.host} has {count(first.memory.gpus, 'GPU')}"
    limits = [each.memory.locked_memory for each in with_gpus if each.memory.locked_memory is not None]
    if limits and min(limits) < _LOCKED_MEMORY:
        what = (
            f"{where}, but a process may lock {min(limits) / 2**20:.2g} MiB of memory, which network cards need more of"
        )
        yield Finding(
            WARNING, "gpu", what, "allow more: ulimit -l unlimited, or LimitMEMLOCK=infinity of slurmd or sshd"
        )
    if "CuPy" not in first.versions:
        what = f"{where}, but this Python has no CuPy"
        yield Finding(NOTE, "gpu", what, f"to compute there, {cupy_for(devices.driver_cuda)}")
        return
    mixed = next((each.devices for each in with_gpus if len(each.devices.cupy_packages) > 1), None)
    if mixed is not None:
        what = f"{' and '.join(mixed.cupy_packages)} are installed at once, and each overwrites files of the other"
        way_out = f"pip uninstall {' '.join(mixed.cupy_packages)}, then {cupy_for(mixed.driver_cuda)}"
        yield Finding(WARNING, "gpu", what, way_out)
    older = [each for each in with_gpus if _is_too_new(each)]
    if older:
        poor = older[0].devices
        what = f"CuPy {first.versions['CuPy']} is for CUDA {poor.cupy_cuda}, but the driver of {older[0].process.host}"
        way_out = cupy_for(poor.driver_cuda)
        if way_out.startswith("pip"):
            way_out = f"pip uninstall cupy-cuda{poor.cupy_cuda}x, then {way_out}, or update the driver"
        yield Finding(WRONG, "gpu", f"{what} takes CUDA {poor.driver_cuda} at most", way_out)
        return
    if not all(each.memory.pins_memory for each in with_gpus):
        what = f"{where}, but CuPy {first.versions['CuPy']} cannot pin host memory, through which its arrays travel"
        yield Finding(WRONG, "gpu", what, "see what cupy.cuda.alloc_pinned_memory(1) raises")
    lying = [each for each in with_gpus if each.devices.claims_device_buffers and not each.mpi.device_buffers]
    if lying:
        what = f"{first.mpi.library} says that it takes device pointers, but a trial of it on {lying[0].process.host}"
        way_out = "build the MPI with the CUDA and the UCX of this machine, or leave it: results are right either way"
        yield Finding(WARNING, "gpu", f"{what} failed: arrays travel through pinned host memory", way_out)
    elif not all(each.mpi.device_buffers for each in with_gpus):
        what = f"{where}, but this {first.mpi.library} was not seen to take device pointers"
        yield Finding(
            NOTE, "gpu", f"{what}: arrays travel through the host", "an MPI built with CUDA sends them directly"
        )


def _is_too_new(facts: Facts) -> bool:
    """Return True if CuPy is known to be for a newer CUDA than the driver takes; drivers take older ones."""
    devices = facts.devices
    known = devices.cupy_cuda and devices.driver_cuda and len(devices.cupy_packages) < 2
    return bool(known) and int(devices.cupy_cuda) > int(_major(devices.driver_cuda))


def cupy_for(driver_cuda: str) -> str:
    """How to get a CuPy that a driver takes: drivers take older versions of CUDA than their own, none newer.

    `driver_cuda` is the newest CUDA that the driver takes; empty if it is not known.
    """
    fitting = [major for major in _EXTRAS if not driver_cuda or major <= int(_major(driver_cuda))]
    if not fitting:
        return f"update its driver, which takes CUDA {driver_cuda} at most, to one for CUDA {_EXTRAS[-1]} or later"
    if not driver_cuda:
        return f"pip install 'mpishard[{' or '.join(f'cuda{major}x' for major in fitting)}]', as its driver needs"
    return f"pip install 'mpishard[cuda{fitting[0]}x]', as its driver needs"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _deaths(facts: Sequence[Facts]) -> Iterator[Finding]:
    mpi, setup = facts[0].mpi, facts[0].mpi_setup
    if setup.heals and not setup.without_han:
        what = "deaths are healed in place, but the collectives of coll/han crash after one"
        yield Finding(WARNING, "death", what, "start with mpirun --with-ft ulfm --mca coll ^han")
    elif not setup.heals and setup.could_heal:
        what = "a rank that dies ends the job"
        way_out = "to heal in place, start with mpirun --with-ft ulfm --mca coll ^han, or with mpishard run --elastic"
        yield Finding(NOTE, "death", what, way_out)
    elif not setup.heals:
        what = f"a rank that dies ends the job: {mpi.library} {mpi.version} does not heal in place"
        way_out = "mpishard run --elastic resumes from the newest checkpoint; Open MPI 5 loses no step"
        yield Finding(NOTE, "death", what, way_out)
