"""Detects which launcher or elastic run has started this process, and whether a launcher belongs to another MPI.

MPI need not be initialised for this.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpishard.launch.processes import process_facts

OPEN_MPI, MPICH, SLURM = "Open MPI", "MPICH", "Slurm"
MPI4PY = (4, 1)  # the oldest, as in pyproject.toml
# Only the first rank prints the error: the others wait this long, and the launcher ends them once the first has ended.
_FIRST_S = 1.0
_TEXT_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH; that of Open MPI is 256


# Python's -X option of processes that an elastic run has spawned; its value is the run's tensor x pipeline sizes.
CELL_OPTION = "mpishard_joining"


@dataclass(frozen=True)
class Launch:
    """The facts that a launcher has passed to this process, whatever MPI the process uses.

    Parameters
    ----------
    launcher : str
        Its name, such as ``"mpirun of MPICH"``.
    family : str
        ``"Open MPI"``, ``"Slurm"``, or ``"MPICH"`` for all libraries with its launcher, Hydra.
    rank, ranks : int
        The rank of this process, and the number of processes that were started with it.
    """

    launcher: str
    family: str
    rank: int
    ranks: int


def launches(environment: Mapping[str, str]) -> tuple[Launch, ...]:
    """All launchers with variables in an environment; a launcher inside another leaves those of both.

    MPI launchers come first: under Slurm they start one process per host by ``srun``, whose variables reach the ranks.

    Parameters
    ----------
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    tuple of Launch
        Empty for a process that was started without a launcher.
    """

    def number(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)

    found = []
    rank, ranks = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
    if rank is not None and ranks is not None:
        found.append(Launch("mpirun of Open MPI", OPEN_MPI, rank, ranks))
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE too, but never the variables of Hydra.
    rank, ranks = number("PMI_RANK"), number("PMI_SIZE")
    in_step = number("SLURM_STEP_ID") is not None
    if rank is not None and ranks is not None and (not in_step or "MPI_LOCALNRANKS" in environment):
        whose = "Intel MPI" if "I_MPI_HYDRA_UUID" in environment else MPICH
        found.append(Launch(f"mpirun of {whose}", MPICH, rank, ranks))
    # SLURM_NTASKS belongs to the whole job, whose batch script is one process; a step has its own variable.
    rank, ranks = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if in_step and rank is not None and ranks is not None:
        found.append(Launch("srun", SLURM, rank, ranks))
    return tuple(found)


def name_of_job(launch: Launch | None, environment: Mapping[str, str]) -> str:
    """A name, fit for a file, that the ranks of one start of a job have in common with no other start.

    It needs no MPI: it is the number that the launcher has given to the job.  Processes of MPI_Comm_spawn have a name
    of their own; under Hydra those of all spawns share one.  Without a launcher it is that of this process.

    Parameters
    ----------
    launch : Launch or None
        The launcher of this process; None for a process that was started without one.
    environment : mapping of str to str
        Such as ``os.environ``.

    Returns
    -------
    str
        ``"job"`` for a launcher that numbers no jobs.
    """
    if launch is None:
        name = f"{os.uname().nodename}-{os.getpid()}"
    elif launch.family == OPEN_MPI:
        name = environment.get("PMIX_NAMESPACE", "")
    elif launch.family == SLURM:
        ids = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        name = ".".join(environment[each] for each in ids if environment.get(each))
    else:
        name = environment.get("I_MPI_HYDRA_UUID") or _control_port()
        name += "-spawned" if environment.get("PMI_SPAWNED") == "1" else ""
    return re.sub(r"[^\w.@-]", "-", name) or "job"


def _control_port() -> str:
    """Where the proxy of Hydra that has started this process, or the shell around it, reaches the launcher."""
    number = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):  # not every system tells
        while number > 1:
            words = Path(f"/proc/{number}/cmdline").read_text(errors="replace").split("\0")
            if "--control-port" in words:
                return words[words.index("--control-port") + 1]
            number = int(process_facts(number)[1])
    return ""


def launch_of(found: Sequence[Launch], ranks: int) -> Launch | None:
    """The launcher that made a world of `ranks` ranks.

    Parameters
    ----------
    found : sequence of Launch
        What `launches` has found.
    ranks : int
        Size of ``MPI_COMM_WORLD``.

    Returns
    -------
    Launch or None
        If none fits, the first one; None if `found` is empty.
    """
    return next((launch for launch in found if launch.ranks == ranks), found[0] if found else None)


def foreign_launch(found: Sequence[Launch], library: str) -> Launch | None:
    """The first of the launches that is the mpirun of another MPI than `library`, the MPI of mpi4py; else None."""
    families = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "Intel MPI": MPICH}
    of_mpi = [launch for launch in found if launch.family != SLURM]
    own = families.get(library)
    if own is None or not of_mpi or any(launch.family == own for launch in of_mpi):
        return None
    return of_mpi[0]


def explain_foreign(launch: Launch, library: str) -> str:
    """One line that says what a launcher of another MPI has done, and which launcher to use."""
    right = _own_mpirun() or f"the mpirun of the {library} that it is bound to"
    ranks = "a rank" if launch.ranks == 1 else f"{launch.ranks} ranks"
    return f"the {launch.launcher} started {ranks}, but mpi4py is bound to {library}; use {right}"


def _own_mpirun() -> str:
    """The path of the mpirun next to this Python if it belongs to its MPI; else empty."""
    mpirun = Path(sys.executable).with_name("mpirun")
    return str(mpirun) if mpirun.exists() and any((Path(sys.prefix) / "lib").glob("libmpi*.so*")) else ""


def explain_alone(launch: Launch, library: str) -> str:
    """One line that says that a rank is alone in its world although its launcher started several, and the remedies."""
    way = f"use {_own_mpirun() or f'the mpirun of the {library} that mpi4py is bound to'}"
    if launch.family == SLURM:
        mpi = "pmix" if library == OPEN_MPI else "pmi2"
        way = f"use srun --mpi={mpi}, or the mpirun of {library} in a script for sbatch"
    return (
        f"this rank is alone in its MPI_COMM_WORLD: {launch.launcher} started {launch.ranks} ranks, and {library}, "
        f"which it does not fit, made a world of each; {way}; copies that are to train each for itself take "
        "Mesh(MPI.COMM_SELF)"
    )


def explain_unloadable(error: BaseException) -> str:
    """One line for what mpi4py raises where it can load no MPI library, and the remedies; empty for another error.

    Its wheel looks for a libmpi when it is imported, and raises RuntimeError without one.  Its extension module then
    wants the libmpi of one family by number, and ImportError says which.
    """
    said = str(error).partition("\n")[0]
    if isinstance(error, ModuleNotFoundError) or not ("libmpi" in said or said == "cannot load MPI library"):
        return ""
    return (
        f"mpi4py can load no MPI library ({said}); load the module of your MPI, or name the folder of its libmpi.so in "
        "LD_LIBRARY_PATH; where there are several, MPI4PY_MPIABI=openmpi or mpich (Intel MPI too) chooses; where there "
        "is none, pip install 'mpishard[mpich]' brings one"
    )


def explain_old_mpi4py(version: str, path: str) -> str:
    """One line for an mpi4py that is too old, and the remedy; empty for another, or if its version says nothing.

    A module of a cluster may put its own before that of the environment, by PYTHONPATH.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2 or numbers >= MPI4PY:
        return ""
    least = ".".join(map(str, MPI4PY))
    return (
        f"mpi4py {version} of {os.path.dirname(path)} is too old, mpishard needs {least}; take it off PYTHONPATH if it "
        f"is there, and pip install 'mpi4py>={least}' in this environment"
    )


def check_before_mpi(environment: Mapping[str, str] = os.environ) -> None:
    """End this process with a message of one line if MPI cannot start.

    That is where mpi4py is too old, where it can load no MPI library, and where MPI_Init would abort: MPICH under a
    launcher with PMIx only.  Other launchers of another MPI make worlds of one rank, which a mesh rejects.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    found = launches(environment)
    mpi4py = importlib.import_module("mpi4py")
    if said := explain_old_mpi4py(mpi4py.__version__, mpi4py.__file__ or ""):
        _end(found[0] if found else None, said)
    try:
        library = _library()
    except (ImportError, OSError, RuntimeError) as error:
        if said := explain_unloadable(error):
            _end(found[0] if found else None, said)
        raise
    launch = foreign_launch(found, MPICH)
    if "PMIX_RANK" not in environment or launch is None:
        return
    text = _version_text(library)
    if text.startswith("MPICH") and "pmix" not in text.lower():
        _end(launch, explain_foreign(launch, MPICH))


def _end(launch: Launch | None, why: str) -> NoReturn:
    """End this process; of those that were started together the first says why."""
    if launch is None or launch.rank == 0:
        sys.exit(f"mpishard: error: {why}")
    time.sleep(_FIRST_S)
    sys.exit(1)


def _library() -> ctypes.CDLL:
    """The extension module of mpi4py, and by that the MPI library that it is linked with; this does not start MPI."""
    spec = importlib.util.find_spec("mpi4py.MPI")
    assert spec is not None and spec.origin is not None
    return ctypes.CDLL(spec.origin)


def _version_text(library: ctypes.CDLL) -> str:
    """The version text of an MPI library; available before MPI is initialised."""
    text, length = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.c_int()
    library.MPI_Get_library_version(text, ctypes.byref(length))
    return text.value.decode(errors="replace")


def spawned_cell() -> tuple[int, int] | None:
    """Tensor and pipeline size of the elastic run that has spawned this process; None if none has."""
    sizes = sys._xoptions.get(CELL_OPTION)
    if sizes is None:
        return None
    tensor, _, pipeline = str(sizes).partition("x")
    return int(tensor), int(pipeline)
