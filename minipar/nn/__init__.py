"""The serial model: modules, GPT-2, optimizers. Nothing here knows of ranks."""

from minipar.nn.gpt import GPT, GPTConfig
from minipar.nn.layers import Embedding, LayerNorm, Linear
from minipar.nn.module import Module, Parameter
from minipar.nn.optim import SGD, AdamW, clip_grad_norm, learning_rate

__all__ = [
    "GPT",
    "SGD",
    "AdamW",
    "Embedding",
    "GPTConfig",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "clip_grad_norm",
    "learning_rate",
]
