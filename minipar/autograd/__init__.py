"""Tensors that know their gradients. Read tensor.py, ops.py, fused.py, then modes.py, checkpoint.py, gradcheck.py."""

from minipar.autograd.checkpoint import checkpoint
from minipar.autograd.fused import (
    IGNORE_INDEX,
    causal_attention,
    cross_entropy,
    cross_entropy_sum,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
)
from minipar.autograd.gradcheck import gradcheck
from minipar.autograd.modes import (
    DeferredGradients,
    LazyGradient,
    defer_weight_gradients,
    enable_grad,
    metering,
    no_grad,
    queue_callback,
)
from minipar.autograd.ops import concatenate
from minipar.autograd.tensor import Function, Tensor

__all__ = [
    "IGNORE_INDEX",
    "DeferredGradients",
    "Function",
    "LazyGradient",
    "Tensor",
    "causal_attention",
    "checkpoint",
    "concatenate",
    "cross_entropy",
    "cross_entropy_sum",
    "defer_weight_gradients",
    "dropout",
    "embedding",
    "enable_grad",
    "gelu",
    "gradcheck",
    "layer_norm",
    "linear",
    "metering",
    "no_grad",
    "queue_callback",
]
