"""minipar: how large Transformers are trained across many machines, in Python one can read.

The public names, in one place. They are imported when they are first used, so `import minipar` is quick and changes
nothing in the process. Packages, each of which imports only from those below it:

    train      the trainer, its command line, checkpoints, `--verify`      plan, bench    planner and benchmarks
    parallel   strategies applied to a serial model: ddp, zero, fsdp, tensor, pipeline
    comm       isend and irecv, and every collective written from them; knows no model
    nn         modules, GPT-2, optimizers; knows no rank
    autograd   Tensor, and operations with forward next to backward
    backend    NumPy or CuPy
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from minipar.autograd import Tensor as Tensor
    from minipar.autograd import causal_attention as causal_attention
    from minipar.autograd import checkpoint as checkpoint
    from minipar.autograd import cross_entropy_sum as cross_entropy_sum
    from minipar.autograd import gelu as gelu
    from minipar.autograd import no_grad as no_grad
    from minipar.comm import Communicator as Communicator
    from minipar.comm import DeviceMesh as DeviceMesh
    from minipar.comm.launch import launch as launch
    from minipar.errors import CommunicationError as CommunicationError
    from minipar.errors import UsageError as UsageError
    from minipar.nn import GPT as GPT
    from minipar.nn import SGD as SGD
    from minipar.nn import AdamW as AdamW
    from minipar.nn import Embedding as Embedding
    from minipar.nn import GPTConfig as GPTConfig
    from minipar.nn import LayerNorm as LayerNorm
    from minipar.nn import Linear as Linear
    from minipar.nn import Module as Module
    from minipar.nn import Parameter as Parameter
    from minipar.parallel.ddp import DistributedDataParallel as DistributedDataParallel
    from minipar.parallel.fsdp import FullyShardedDataParallel as FullyShardedDataParallel
    from minipar.parallel.pipeline.module import PipelineModule as PipelineModule
    from minipar.parallel.stages import fully_shard as fully_shard
    from minipar.parallel.stages import shard as shard
    from minipar.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from minipar.parallel.tensor import RowParallelLinear as RowParallelLinear
    from minipar.parallel.tensor import VocabParallelEmbedding as VocabParallelEmbedding
    from minipar.parallel.tensor import tensor_parallel as tensor_parallel
    from minipar.parallel.tensor import vocab_parallel_cross_entropy_sum as vocab_parallel_cross_entropy_sum
    from minipar.parallel.zero import ZeroOptimizer as ZeroOptimizer

_HOMES = {
    "minipar.autograd": ("Tensor", "causal_attention", "checkpoint", "cross_entropy_sum", "gelu", "no_grad"),
    "minipar.comm": ("Communicator", "DeviceMesh"),
    "minipar.comm.launch": ("launch",),
    "minipar.errors": ("CommunicationError", "UsageError"),
    "minipar.nn": ("GPT", "SGD", "AdamW", "Embedding", "GPTConfig", "LayerNorm", "Linear", "Module", "Parameter"),
    "minipar.parallel.ddp": ("DistributedDataParallel",),
    "minipar.parallel.fsdp": ("FullyShardedDataParallel",),
    "minipar.parallel.pipeline.module": ("PipelineModule",),
    "minipar.parallel.stages": ("fully_shard", "shard"),
    "minipar.parallel.tensor": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "tensor_parallel",
        "vocab_parallel_cross_entropy_sum",
    ),
    "minipar.parallel.zero": ("ZeroOptimizer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'minipar' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
