"""The serial model: modules, GPT-2, optimizers. Nothing here knows of ranks."""

from minipar.nn.dropout import Dropout, DropoutKeys, Window, dropping
from minipar.nn.gpt import GPT, GPTConfig, Part
from minipar.nn.layers import Embedding, LayerNorm, Linear
from minipar.nn.module import Deferred, Module, Owner, Parameter, stand_in
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
    "Module",
    "Optimizer",
    "Owner",
    "Parameter",
    "Part",
    "Window",
    "clip_grad_norm",
    "dropping",
    "learning_rate",
    "squared_norm",
    "stand_in",
]
