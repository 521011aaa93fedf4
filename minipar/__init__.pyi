"""The public names; lazy_loader reads this file, and so do editors and type checkers."""

from .autograd import Tensor as Tensor
from .autograd import causal_attention as causal_attention
from .autograd import checkpoint as checkpoint
from .autograd import concatenate as concatenate
from .autograd import cross_entropy_sum as cross_entropy_sum
from .autograd import gelu as gelu
from .autograd import no_grad as no_grad
from .autograd import relu as relu
from .autograd import softmax as softmax
from .autograd import stack as stack
from .autograd import where as where
from .backend import use_device as use_device
from .comm.communicator import Communicator as Communicator
from .comm.launch import launch as launch
from .comm.mesh import DeviceMesh as DeviceMesh
from .errors import CommunicationError as CommunicationError
from .errors import UsageError as UsageError
from .more.casting import CastingComm as CastingComm
from .more.context.blockwise import use_blockwise as use_blockwise
from .more.context.context_parallel import context_parallel as context_parallel
from .more.experts.expert_parallel import expert_parallel as expert_parallel
from .more.experts.mixtral import Mixtral as Mixtral
from .more.experts.mixtral import MixtralConfig as MixtralConfig
from .more.hybrid import HybridComm as HybridComm
from .more.llama import Llama as Llama
from .more.llama import LlamaConfig as LlamaConfig
from .more.llama import RMSNorm as RMSNorm
from .nn.gpt import GPT as GPT
from .nn.gpt import GPTConfig as GPTConfig
from .nn.layers import Embedding as Embedding
from .nn.layers import LayerNorm as LayerNorm
from .nn.layers import Linear as Linear
from .nn.module import Module as Module
from .nn.optim import SGD as SGD
from .nn.optim import AdamW as AdamW
from .nn.parameter import Parameter as Parameter
from .parallel.ddp import DistributedDataParallel as DistributedDataParallel
from .parallel.fsdp import FullyShardedDataParallel as FullyShardedDataParallel
from .parallel.grad_norm import clip_grad_norm as clip_grad_norm
from .parallel.pipeline.module import PipelineModule as PipelineModule
from .parallel.placement_table import placements as placements
from .parallel.state import gather_state as gather_state
from .parallel.tensor.plan import tensor_parallel as tensor_parallel
from .parallel.tensor.user_layers import ColumnParallelLinear as ColumnParallelLinear
from .parallel.tensor.user_layers import RowParallelLinear as RowParallelLinear
from .parallel.tensor.user_layers import VocabParallelEmbedding as VocabParallelEmbedding
from .parallel.tensor.vocabulary import (
    vocab_parallel_cross_entropy_sum as vocab_parallel_cross_entropy_sum,
)
from .parallel.wrap import fully_shard as fully_shard
from .parallel.wrap import shard as shard
from .parallel.zero_optimizer import ZeroOptimizer as ZeroOptimizer
from .train.pretrained import load_pretrained as load_pretrained
from .train.pretrained import save_pretrained as save_pretrained

__version__: str
