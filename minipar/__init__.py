"""minipar: how large Transformers are trained across many machines, in Python one can read.

The public names, in one place. Each is imported from its file when it is first used, so `import minipar` is quick and
changes nothing in the process. Packages, each of which imports only from those below it:

    bench      benchmarks                                                  compare two recorded runs
    train      the trainer, its command line, checkpoints, `--verify`      plan    the planner
    parallel   strategies applied to a serial model: ddp, zero, fsdp, tensor, pipeline
    comm       isend and irecv, and every collective written from them; knows no model
    nn         modules, GPT-2, optimizers; knows no rank
    autograd   Tensor, and operations with forward next to backward
    backend    NumPy or CuPy
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "autograd": ["Tensor", "causal_attention", "checkpoint", "cross_entropy_sum", "gelu", "no_grad"],
        "comm.communicator": ["Communicator", "DeviceMesh"],
        "comm.launch": ["launch"],
        "errors": ["CommunicationError", "UsageError"],
        "nn.gpt": ["GPT", "GPTConfig"],
        "nn.layers": ["Embedding", "LayerNorm", "Linear"],
        "nn.module": ["Module", "Parameter"],
        "nn.optim": ["SGD", "AdamW"],
        "parallel.ddp": ["DistributedDataParallel"],
        "parallel.fsdp": ["FullyShardedDataParallel"],
        "parallel.pipeline.module": ["PipelineModule"],
        "parallel.stages": ["fully_shard", "shard"],
        "parallel.tensor.layers": [
            "ColumnParallelLinear",
            "RowParallelLinear",
            "VocabParallelEmbedding",
            "vocab_parallel_cross_entropy_sum",
        ],
        "parallel.tensor.plan": ["tensor_parallel"],
        "parallel.zero": ["ZeroOptimizer"],
    },
)
