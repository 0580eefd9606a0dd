"""mpishard: train models sharded over MPI ranks, with NumPy or CuPy.

>>> import mpishard
>>> mesh = mpishard.Mesh()
>>> optimizer = mpishard.as_distributed(mpishard.AdamW(lr=1e-3), mesh)
"""

import os
import stat
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpishard.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from mpishard import nn
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.axis import Axis
    from mpishard.comm.call_matching import CollectiveMismatchError
    from mpishard.comm.channel import Request
    from mpishard.comm.mesh import Mesh
    from mpishard.comm.reshard import reshard_state
    from mpishard.data.evaluation import EarlyStopping, Evaluation
    from mpishard.data_parallel.configuration import ShardingConfiguration
    from mpishard.data_parallel.local_sgd import LocalSGDOptimizer
    from mpishard.data_parallel.models import (
        HybridShardedModel,
        ShardedModel,
        as_distributed,
        as_distributed_for_high_bandwidth,
        as_distributed_for_low_bandwidth,
    )
    from mpishard.data_parallel.optimizers import (
        DDPOptimizer,
        HybridShardedOptimizer,
        ZeRO1Optimizer,
        ZeRO2Optimizer,
        ZeRO3Optimizer,
    )
    from mpishard.elastic.auto_layouts import AutoLayouts
    from mpishard.elastic.optimizer import ElasticOptimizer
    from mpishard.inverse import (
        L1,
        BiLaplacianPrior,
        DiagonalPrior,
        EvaluationFailed,
        GroupL1,
        OperatorPrior,
        OptimizeResult,
        Prior,
        ReverseCommunication,
        SmoothedTotalVariation,
        Tikhonov,
        TotalVariation,
        augmented_lagrangian,
        backward_in_time,
        cgls,
        check_adjoint,
        check_gradient,
        covariance,
        l_curve,
        laplace,
        least_squares,
        lsqr,
        map_runs,
        minimize,
        regularized,
    )
    from mpishard.launch.signals import Signals
    from mpishard.layout.tensors import ParameterSpec
    from mpishard.minimizers import LBFGS, LBFGSB, NonlinearCG, RieszMap, TruncatedNewton
    from mpishard.optim import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Muon, ParameterGroup, RMSprop
    from mpishard.optim.lr_schedules import constant, cosine, inverse_square_root, linear, warmup
    from mpishard.parameters.flat import FlatParameters
    from mpishard.parameters.partition import Partition
    from mpishard.record import RunRecord
    from mpishard.training import OptimizationProblem, OptimizationResult, TrainingState
    from mpishard.training.saving import load_checkpoint, save_checkpoint

__all__ = [
    "L1",
    "LAMB",
    "LBFGS",
    "LBFGSB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AutoLayouts",
    "Axis",
    "BiLaplacianPrior",
    "Checkpoints",
    "CollectiveMismatchError",
    "DDPOptimizer",
    "DiagonalPrior",
    "EarlyStopping",
    "ElasticOptimizer",
    "Evaluation",
    "EvaluationFailed",
    "FlatParameters",
    "GroupL1",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "Lion",
    "LocalSGDOptimizer",
    "Mesh",
    "Muon",
    "NonlinearCG",
    "OperatorPrior",
    "OptimizationProblem",
    "OptimizationResult",
    "OptimizeResult",
    "ParameterGroup",
    "ParameterSpec",
    "Partition",
    "Prior",
    "RMSprop",
    "Request",
    "ReverseCommunication",
    "RieszMap",
    "RunRecord",
    "ShardedModel",
    "ShardingConfiguration",
    "Signals",
    "SmoothedTotalVariation",
    "Tikhonov",
    "TotalVariation",
    "TrainingState",
    "TruncatedNewton",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "augmented_lagrangian",
    "backward_in_time",
    "cgls",
    "check_adjoint",
    "check_gradient",
    "constant",
    "cosine",
    "covariance",
    "inverse_square_root",
    "l_curve",
    "laplace",
    "least_squares",
    "linear",
    "load_checkpoint",
    "lsqr",
    "map_runs",
    "minimize",
    "nn",
    "regularized",
    "reshard_state",
    "save_checkpoint",
    "warmup",
]

# Where public names come from; a module is imported when one of its names is first asked for.
_MODULES = {
    "checkpoint": "Checkpoints",
    "comm.axis": "Axis",
    "comm.call_matching": "CollectiveMismatchError",
    "comm.mesh": "Mesh",
    "comm.channel": "Request",
    "comm.reshard": "reshard_state",
    "data.evaluation": "EarlyStopping Evaluation",
    "data_parallel.configuration": "ShardingConfiguration",
    "data_parallel.local_sgd": "LocalSGDOptimizer",
    "data_parallel.models": "HybridShardedModel ShardedModel as_distributed as_distributed_for_high_bandwidth "
    "as_distributed_for_low_bandwidth",
    "data_parallel.optimizers": "DDPOptimizer HybridShardedOptimizer ZeRO1Optimizer ZeRO2Optimizer ZeRO3Optimizer",
    "elastic.auto_layouts": "AutoLayouts",
    "elastic.optimizer": "ElasticOptimizer",
    "launch.signals": "Signals",
    "inverse": "BiLaplacianPrior DiagonalPrior EvaluationFailed GroupL1 L1 OperatorPrior OptimizeResult Prior "
    "ReverseCommunication SmoothedTotalVariation Tikhonov TotalVariation augmented_lagrangian backward_in_time cgls "
    "check_adjoint check_gradient covariance l_curve laplace least_squares lsqr map_runs minimize regularized",
    "layout.tensors": "ParameterSpec",
    "minimizers": "LBFGS LBFGSB NonlinearCG RieszMap TruncatedNewton",
    "optim": "Adagrad Adam AdamW LAMB Lion Muon ParameterGroup RMSprop SGD",
    "optim.lr_schedules": "constant cosine inverse_square_root linear warmup",
    "parameters.flat": "FlatParameters",
    "parameters.partition": "Partition",
    "record": "RunRecord",
    "training": "OptimizationProblem OptimizationResult TrainingState",
    "training.saving": "load_checkpoint save_checkpoint",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

# What launchers and the supervisor leave in the environment of the processes that they start.
_STARTED_BY = (
    "PMI",
    "OMPI_COMM_",
    "PRTE_LAUNCHED",
    "SLURM_STEP_",
    "MPI_LOCAL",
    "PALS_",
    "FLUX_",
    "JSM_",
    "MV2_COMM_",
    "MPISHARD_RUN",
)


if not TYPE_CHECKING:  # a type checker has the names from above, and shall know no others

    def __getattr__(name: str) -> Any:
        where = f"{__name__}.{_MODULE_OF.get(name, name)}"
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = import_module(where)
        except ModuleNotFoundError as error:
            if error.name != where:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        value = globals()[name] = getattr(module, name) if name in _MODULE_OF else module
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# The rank and the process that it is, under PMIx, for those that this process starts.
_RANK = "MPISHARD_RANK"


def _rank_of_pmix() -> str:
    return f"{os.environ.get('PMIX_NAMESPACE')} {os.environ.get('PMIX_RANK')}"


def _is_child_of_rank() -> bool:
    """Return True if this process is known to be no rank, though it has the variables of the one that started it.

    MPI_Init of it would fail: of workers of multiprocessing, by spawn or a fork server, and of other processes where
    the socket to MPICH's launcher was closed, whose number may be that of another file now.  Under PMIx it would wait
    for the other ranks.
    """
    rank, _, process = os.environ.get(_RANK, "").rpartition(" ")
    if rank == _rank_of_pmix() and process != str(os.getpid()):
        return True
    servers = ("from multiprocessing.spawn ", "from multiprocessing.forkserver ")
    if any(word.startswith(servers) for word in sys.orig_argv):
        return True
    try:
        return not stat.S_ISSOCK(os.fstat(int(os.environ.get("PMI_FD", ""))).st_mode)
    except ValueError:
        return False
    except OSError:
        return True


def _runs_distributed() -> bool:
    """Return True if a launcher or the supervisor has started this process; some leave nothing in the environment."""
    if sys.argv[:1] == ["-m"] and "mpishard.watch" in sys.orig_argv:  # the program that it runs starts MPI, or nobody
        return False
    if _is_child_of_rank():
        return False
    if any(name.startswith(_STARTED_BY) for name in os.environ):
        return True
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return mpi.COMM_WORLD.size > 1 or mpi.Comm.Get_parent() != mpi.COMM_NULL


# A rank may fail before it has a mesh, and the others must hear of it: ranks start MPI here, and it ends the job.
# In a program that does not run distributed nothing is replaced: neither hooks nor handlers nor the environment.
if _runs_distributed():
    from mpishard.launch.signals import ctrl_c_deferred, restore_sigusr1

    with ctrl_c_deferred():
        from mpishard.launch.detection import check_before_mpi

        check_before_mpi()

        from mpishard.comm.abort import abort_on_exception, start_mpi

        start_mpi()
        if "PMIX_RANK" in os.environ:
            os.environ[_RANK] = f"{_rank_of_pmix()} {os.getpid()}"
        from mpishard.comm.supervisor_reports import watch_script

        abort_on_exception()
        restore_sigusr1()
        watch_script()
