"""mpishard: train models sharded over MPI ranks, with NumPy or CuPy.

>>> import mpishard
>>> mesh = mpishard.Mesh()
>>> optimizer = mpishard.as_distributed(mpishard.AdamW(lr=1e-3), mesh)
"""

from mpishard import nn
from mpishard.checkpoint import Checkpoints
from mpishard.collectives import Axis
from mpishard.distributed import (
    HybridShardedModel,
    ShardedModel,
    as_distributed,
    as_distributed_for_high_bandwidth,
    as_distributed_for_low_bandwidth,
)
from mpishard.elastic.completion import watch_script
from mpishard.elastic.optimizer import ElasticOptimizer
from mpishard.elastic.signals import Signals
from mpishard.guard import abort_on_exception
from mpishard.lane import CollectiveMismatchError
from mpishard.layout import ParameterSpec
from mpishard.mesh import Mesh
from mpishard.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    DDPOptimizer,
    HybridShardedOptimizer,
    Lion,
    LocalSGDOptimizer,
    RMSprop,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.optim.schedules import constant, cosine, inverse_square_root, linear, warmup
from mpishard.parameters import FlatParameters
from mpishard.pending import Pending
from mpishard.record import RunRecord
from mpishard.reshard import reshard_state
from mpishard.saving import load_checkpoint, save_checkpoint
from mpishard.training import OptimizationProblem, OptimizationResult, TrainingState
from mpishard.version import VERSION

__version__ = VERSION

abort_on_exception()
watch_script()

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Axis",
    "Checkpoints",
    "CollectiveMismatchError",
    "DDPOptimizer",
    "ElasticOptimizer",
    "FlatParameters",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "Lion",
    "LocalSGDOptimizer",
    "Mesh",
    "OptimizationProblem",
    "OptimizationResult",
    "ParameterSpec",
    "Pending",
    "RMSprop",
    "RunRecord",
    "ShardedModel",
    "ShardingConfiguration",
    "Signals",
    "TrainingState",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "constant",
    "cosine",
    "inverse_square_root",
    "linear",
    "load_checkpoint",
    "nn",
    "reshard_state",
    "save_checkpoint",
    "warmup",
]
