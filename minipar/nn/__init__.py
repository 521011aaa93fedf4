"""The serial model: modules, GPT-2, optimizers. Nothing here depends on the number of ranks."""

from minipar.nn.gpt import GPT, GPTConfig, Part
from minipar.nn.layers import Dropout, DropoutKeys, Embedding, LayerNorm, Linear, MaskSlice, dropping
from minipar.nn.module import Deferred, Module, Owner, Parameter, placeholder
from minipar.nn.optim import SGD, AdamW, Optimizer, clip_grad_norm, learning_rate, squared_norm

__all__ = [
    "GPT",
    "SGD",
    "AdamW",
    "Deferred",
    "Dropout",
    "DropoutKeys",
    "Embedding",
    "GPTConfig",
    "LayerNorm",
    "Linear",
    "MaskSlice",
    "Module",
    "Optimizer",
    "Owner",
    "Parameter",
    "Part",
    "clip_grad_norm",
    "dropping",
    "learning_rate",
    "placeholder",
    "squared_norm",
]
