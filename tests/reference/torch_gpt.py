"""GPT-2 as a plain torch module under minipar's names, and the two ways between minipar's arrays and its parameters.

torch's parallel layers take `nn.Linear`, whose weight is (outputs, inputs), so matrices of blocks are transposed. They
give each tensor-parallel rank consecutive rows, so the rows of `c_attn` are ordered by head: q, k and v of head 0, then
those of head 1. Attention then works on whichever heads a rank has.
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head causal self-attention: (B, T, h) -> (B, T, h)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)

    def forward(self, x):
        qkv = self.c_attn(x).unflatten(-1, (-1, 3, self.head_size))  # (B, T, heads/t, 3, head size)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # (B, heads/t, T, head size) each
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # (B, T, h/t) inside


class MLP(nn.Module):
    """Two linear layers with a GELU between them: (B, T, h) -> (B, T, h)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.c_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.c_proj(gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One Transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.ln_2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The blocks `layers` of a GPT with minipar's `weights`; with the embedding if first, with the head if last.

    Tokens (B, T), or activations (B, T, h) if it is not the first stage, -> logits (B, T, V), or activations. The head
    is tied to the token embedding if both are here; else it has a copy of the weights, `head.weight`.
    """

    def __init__(self, weights, heads: int, layers=None, first: bool = True, last: bool = True) -> None:
        super().__init__()
        (vocab, hidden), positions = weights["wte.weight"].shape, len(weights["wpe.weight"])
        if layers is None:
            layers = range(layers_of(weights))
        self.heads = heads
        self.wte = nn.Embedding(vocab, hidden) if first else None
        self.wpe = nn.Embedding(positions, hidden) if first else None
        self.h = nn.ModuleDict({str(i): Block(hidden, heads) for i in layers})
        self.ln_f = nn.LayerNorm(hidden) if last else None
        self.head = nn.Linear(hidden, vocab, bias=False) if last else None
        self.double()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.tensor(from_minipar(name, weights[minipar_name(name)], heads)))
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the token embedding's, if both are here."""
        if self.wte is not None and self.head is not None:
            self.head.weight = self.wte.weight

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))  # (B, T, h)
        for block in self.h.values():
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def mean_loss(logits, targets):
    """Return the mean cross-entropy: (B, T, V) and (B, T) -> ()."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))


def layers_of(weights) -> int:
    return len({name.split(".")[1] for name in weights if name.startswith("h.")})


def minipar_name(name: str) -> str:
    """Return minipar's name of a parameter; an untied head holds a copy of the token embedding."""
    return "wte.weight" if name == "head.weight" else name


def is_matrix(name: str) -> bool:
    return name.startswith("h.") and ".ln_" not in name and name.endswith(".weight")


def from_minipar(name: str, array: np.ndarray, heads: int) -> np.ndarray:
    """Convert minipar's array of a parameter, or of its gradient, to this module's."""
    array = array.T if is_matrix(name) else array
    if ".c_attn." in name:  # (q, k, v; head; element of the head; ...) -> (head; q, k, v; ...)
        return array.reshape(3, heads, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    return array


def to_minipar(name: str, array: np.ndarray, heads: int) -> np.ndarray:
    """Convert this module's array of a parameter, or of its gradient, to minipar's."""
    if ".c_attn." in name:
        array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    return array.T if is_matrix(name) else array
