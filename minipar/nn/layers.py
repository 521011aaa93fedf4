"""Linear, Embedding, LayerNorm: parameters and one call each. Weights come in as arrays or as Deferred numbers;
gpt.py decides which numbers they start with.
"""

from __future__ import annotations

from minipar.autograd import Tensor, embedding, layer_norm, linear
from minipar.backend import Array
from minipar.nn.module import Deferred, Module, Parameter


class Linear(Module):
    """x @ weight + bias: (..., in) -> (..., out).

    NB: weight is (in, out), as in GPT-2's checkpoints (Hugging Face calls the layer Conv1D); torch.nn.Linear stores
    (out, in).
    """

    def __init__(self, weight: Array | Deferred, bias: Array | Deferred) -> None:
        self.weight = Parameter(weight)
        self.bias = Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of weight (V, h) by token: integers (...,) -> (..., h)."""

    def __init__(self, weight: Array | Deferred) -> None:
        self.weight = Parameter(weight)

    def forward(self, index: Array) -> Tensor:
        return embedding(self.weight, index)


class LayerNorm(Module):
    """LayerNorm over the last dim with a gain and a bias: (..., h) -> (..., h)."""

    def __init__(self, weight: Array | Deferred, bias: Array | Deferred, eps: float = 1e-5) -> None:
        self.weight = Parameter(weight)
        self.bias = Parameter(bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
