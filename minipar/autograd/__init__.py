"""Tensors that know their gradients: read tensor.py, backward.py, fused.py and attention.py, in this order."""

# ruff: noqa: F401 (imported for others)

from minipar.autograd.attention import METHODS, causal_attention
from minipar.autograd.backward import DeferredGradients, LazyGradient, defer_weight_gradients, queue_callback
from minipar.autograd.fused import (
    IGNORE_INDEX,
    concatenate,
    cross_entropy_sum,
    dropout,
    embedding,
    flop_counter,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    rotary,
    swiglu,
)
from minipar.autograd.tensor import Function, Tensor, checkpoint, grad_enabled, mapping, no_grad, operation, randomness
