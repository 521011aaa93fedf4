"""Tensors with gradients: read rules.py, tensor.py, backward.py, fused.py, attention.py in turn."""

from minipar.autograd import rules
from minipar.autograd.attention import METHODS, causal_attention
from minipar.autograd.backward import DeferredGradients, defer_weight_gradients, queue_callback
from minipar.autograd.checks import IGNORE_INDEX, check_ids, check_targets
from minipar.autograd.fused import (
    concatenate,
    cross_entropy_sum,
    dropout,
    embedding,
    flop_counter,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    stack,
)
from minipar.autograd.mapping import mapping
from minipar.autograd.modes import grad_enabled, no_grad, randomness
from minipar.autograd.recompute import checkpoint
from minipar.autograd.rules import Gradient, LazyGradient
from minipar.autograd.tensor import Function, Tensor, operation

relu = Tensor.relu  # functions, as in torch.nn.functional
softmax = Tensor.softmax
where = operation(rules.where)

__all__ = [
    "DeferredGradients",
    "Function",
    "Gradient",
    "IGNORE_INDEX",
    "LazyGradient",
    "METHODS",
    "Tensor",
    "causal_attention",
    "check_ids",
    "check_targets",
    "checkpoint",
    "concatenate",
    "cross_entropy_sum",
    "defer_weight_gradients",
    "dropout",
    "embedding",
    "flop_counter",
    "gelu",
    "grad_enabled",
    "layer_norm",
    "linear",
    "mapping",
    "no_grad",
    "operation",
    "queue_callback",
    "randomness",
    "relu",
    "rms_norm",
    "softmax",
    "stack",
    "where",
]
