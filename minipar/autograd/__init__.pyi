"""The names of this package; lazy_loader reads this file, and so do editors and type checkers."""

from .attention import causal_attention as causal_attention
from .backward import DeferredGradients as DeferredGradients
from .backward import defer_weight_gradients as defer_weight_gradients
from .backward import queue_callback as queue_callback
from .checks import IGNORE_INDEX as IGNORE_INDEX
from .fused import concatenate as concatenate
from .fused import cross_entropy_sum as cross_entropy_sum
from .fused import dropout as dropout
from .fused import embedding as embedding
from .fused import flop_counter as flop_counter
from .fused import gelu as gelu
from .fused import layer_norm as layer_norm
from .fused import linear as linear
from .fused import rms_norm as rms_norm
from .fused import stack as stack
from .recompute import checkpoint as checkpoint
from .rules import Gradient as Gradient
from .rules import LazyGradient as LazyGradient
from .tensor import Function as Function
from .tensor import Tensor as Tensor
from .tensor import mapping as mapping
from .tensor import no_grad as no_grad
from .tensor import operation as operation
from .tensor import relu as relu
from .tensor import softmax as softmax
from .tensor import where as where
