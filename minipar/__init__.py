"""minipar: how large Transformers are trained across many machines, in Python one can read.

The public names, in one place. Each is imported from its file when it is first used, so `import minipar` is quick and
changes nothing in the process. Each package imports only from those after it: bench, then train and plan, parallel
(strategies applied to a serial model), nn and comm, which do not know each other, autograd, backend.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "autograd": [
            "Tensor",
            "causal_attention",
            "checkpoint",
            "concatenate",
            "cross_entropy_sum",
            "gelu",
            "no_grad",
            "relu",
            "softmax",
        ],
        "comm.communicator": ["Communicator"],
        "comm.launch": ["launch"],
        "comm.mesh": ["DeviceMesh"],
        "errors": ["CommunicationError", "UsageError"],
        "nn.gpt": ["GPT", "GPTConfig"],
        "nn.layers": ["Embedding", "LayerNorm", "Linear", "RMSNorm"],
        "nn.llama": ["Llama", "LlamaConfig"],
        "nn.module": ["Module", "Parameter"],
        "nn.moe": ["Mixtral", "MixtralConfig"],
        "nn.optim": ["AdamW"],
        "parallel.context": ["context_parallel"],
        "parallel.ddp": ["DistributedDataParallel"],
        "parallel.expert": ["expert_parallel"],
        "parallel.fsdp": ["FullyShardedDataParallel"],
        "parallel.pipeline.module": ["PipelineModule"],
        "parallel.parallelize": ["fully_shard", "shard"],
        "parallel.placement": ["placements"],
        "parallel.tensor.plan": ["tensor_parallel"],
        "parallel.tensor.user_layers": ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"],
        "parallel.tensor.vocabulary": ["vocab_parallel_cross_entropy_sum"],
        "parallel.zero_optimizer": ["ZeroOptimizer"],
    },
)
