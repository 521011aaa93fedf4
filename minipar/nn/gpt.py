"""GPT-2 (Radford et al. 2019), exactly: the same function, the same names and shapes as Hugging Face's GPT2LMHeadModel.

Pre-LayerNorm blocks, learned positions, tanh GELU, scores scaled by 1/sqrt(head size), output head tied to the token
embedding. Shapes: B samples, T tokens per sample, h hidden, V vocabulary.

This model is serial. Each strategy changes these things of it, on every rank. Tensor parallelism replaces the Linear
and Embedding layers by parallel ones, divides `attn.heads`, and replaces the two functions that see the whole
vocabulary, `project` and `criterion`. It also gives a `mask_slice` to each Dropout that sees a slice of an activation.
Pipeline parallelism runs a consecutive range of `parts` on each rank. The token embedding may then be on two ranks, so
the head has a leaf of its own (`head_weight`), whose gradient is added to that of `wte` before the step. Data
parallelism and ZeRO move all parameters into flat storage and add gradient hooks. ZeRO stage 3 also replaces the `run`
of each part by one that gathers the part's parameters before and frees them after.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from minipar.autograd import Tensor, causal_attention, checkpoint, cross_entropy_sum, gelu, linear
from minipar.backend import Array, xp
from minipar.errors import check_memory
from minipar.nn.layers import Dropout, Embedding, LayerNorm, Linear
from minipar.nn.module import Module, Part


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, under the names of Hugging Face's config.json. Defaults are GPT-2 small."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, expected at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"hidden {self.n_embd} is not divisible by heads {self.n_head}")

    def forward_flops(self, batch: int, length: int) -> int:
        """Return the operations of forward's matrix products (Narayanan et al. 2021); backward takes twice as many.

        Attention counts the whole square of scores; in blocks it skips nearly half, and backward computes them again.
        """
        tokens, h = batch * length, self.n_embd
        return self.n_layer * (24 * tokens * h * h + 4 * tokens * length * h) + 2 * tokens * h * self.vocab_size

    def check_memory(self, nbytes: int, shares: int = 1) -> None:
        """Raise UsageError if one of `shares` of `nbytes` bytes per parameter is more than this machine's memory."""
        h = self.n_embd
        count = Decimal((self.vocab_size + self.n_positions) * h + self.n_layer * (12 * h * h + 13 * h) + 2 * h)
        sizes = f"vocabulary {self.vocab_size}, {self.n_positions} positions, {self.n_layer} layers of hidden {h}"
        check_memory(count * nbytes / shares, f"{sizes}: {count:.6g} parameters * {nbytes} bytes / {shares}")


class _Layers:
    """The layers of one GPT: they share its config, seed, dtype and dropout. All parameters are deferred.

    Matrices start from N(0, std), biases from 0 and gains from 1 (GPT-2 paper, section 2.3). The residual stream adds
    2 n_layer outputs: their projections start smaller by the square root of that.
    """

    def __init__(self, config: GPTConfig, seed: int, dtype: str, dropout: float, attention: str) -> None:
        self.config = config
        h, std = config.n_embd, config.initializer_range
        self.linear = partial(Linear, seed=seed, dtype=dtype, std=std, deferred=True)
        self.projection = partial(self.linear, std=std / math.sqrt(2 * config.n_layer))
        self.embedding = partial(Embedding, dim=h, seed=seed, dtype=dtype, std=std, deferred=True)
        self.layer_norm = partial(LayerNorm, h, config.layer_norm_epsilon, dtype, deferred=True)
        self.dropout = partial(Dropout, p=dropout)
        self.attention = partial(causal_attention, method=attention)


class Attention(Module):
    """Multi-head causal self-attention: (B, T, h) -> (B, T, h)."""

    def __init__(self, layers: _Layers, name: str) -> None:
        h = layers.config.n_embd
        self.heads = layers.config.n_head
        self.attention: Callable[..., Tensor] = layers.attention  # with the arguments of causal_attention
        self.c_attn = layers.linear(h, 3 * h, name=f"{name}.c_attn")
        self.c_proj = layers.projection(h, h, name=f"{name}.c_proj")
        self.attn_dropout = layers.dropout(f"{name}.attn_dropout")
        self.resid_dropout = layers.dropout(f"{name}.resid_dropout")

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.c_attn(x)  # (B, T, 3h)
        batch, length = qkv.shape[:2]
        keep = self.attn_dropout.keep((batch, self.heads, length, length))
        y = self.attention(qkv, self.heads, None, keep, self.attn_dropout.p)  # (B, T, h)
        return self.resid_dropout(self.c_proj(y))  # (B, T, h)


class MLP(Module):
    """Two linear layers with a GELU between them: (B, T, h) -> (B, T, 4h) -> (B, T, h)."""

    def __init__(self, layers: _Layers, name: str) -> None:
        h = layers.config.n_embd
        self.c_fc = layers.linear(h, 4 * h, name=f"{name}.c_fc")
        self.c_proj = layers.projection(4 * h, h, name=f"{name}.c_proj")
        self.dropout = layers.dropout(f"{name}.dropout")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))  # (B, T, 4h) inside


class Block(Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layers: _Layers, name: str) -> None:
        self.ln_1 = layers.layer_norm()
        self.attn = Attention(layers, f"{name}.attn")
        self.ln_2 = layers.layer_norm()
        self.mlp = MLP(layers, f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(Module):
    """The language model: tokens (B, T) -> logits (B, T, V).

    `seed` and the parameters' names determine the initial weights (see layers.py). `recompute=True` keeps only each
    block's input and runs the block again in backward. `dropout` is the probability everywhere GPT-2 has it: after the
    embedding, on the attention probabilities, after attention and after the MLP. It acts only inside `dropping`. With
    `deferred=True` the parameters have no values yet. `attention` is a method of `causal_attention`. ValueError for a
    sequence longer than `n_positions`.
    """

    def __init__(
        self,
        config: GPTConfig,
        seed: int = 0,
        dtype: str = "float32",
        recompute: bool = False,
        deferred: bool = False,
        dropout: float = 0.0,
        attention: str = "auto",
    ) -> None:
        if not deferred:
            config.check_memory(xp.dtype(dtype).itemsize)
        layers = _Layers(config, seed, dtype, dropout, attention)
        self.config = config
        self.recompute = recompute
        self.wte = layers.embedding(config.vocab_size, name="wte")
        self.wpe = layers.embedding(config.n_positions, name="wpe")
        self.drop = layers.dropout("drop")
        self.h = [Block(layers, f"h.{i}") for i in range(config.n_layer)]
        self.ln_f = layers.layer_norm()
        self.head_weight = self.wte.weight.tie()
        self.project: Callable[[Tensor, Tensor], Tensor] = partial(linear, transposed=True)  # (B, T, h), (V, h)
        self.criterion: Callable[[Tensor, Array], Tensor] = cross_entropy_sum
        self.parts = [
            Part("embedding", self.embed, [self.wte.weight, self.wpe.weight], reads_in_backward=False),
            *(Part(f"h.{i}", partial(self.run_block, block), block.parameters()) for i, block in enumerate(self.h)),
            Part("head", self.head, [self.wte.weight, *self.ln_f.parameters()], is_last=True),
        ]
        if not deferred:
            self.materialize()

    def embed(self, tokens: Array) -> Tensor:
        """Add the embeddings of tokens and positions: integers (B, T) -> (B, T, h)."""
        length = tokens.shape[1]
        if length > self.config.n_positions:
            raise ValueError(f"sequence of {length} tokens, but the model has {self.config.n_positions} positions")
        return self.drop(self.wte(tokens) + self.wpe(xp.arange(length)))

    def run_block(self, block: Block, x: Tensor) -> Tensor:
        """Run one block, (B, T, h) -> (B, T, h); with `recompute`, backward runs it again."""
        return checkpoint(block, x, parameters=block.parameters()) if self.recompute else block(x)

    def head(self, x: Tensor) -> Tensor:
        """Apply the last LayerNorm and multiply with the token embedding: (B, T, h) -> (B, T, V)."""
        self.head_weight.data = self.wte.weight.data  # follows the parameter if its storage has moved
        return self.project(self.ln_f(x), self.head_weight)

    def forward(self, tokens: Array) -> Tensor:
        x: Any = tokens
        for part in self.parts:
            x = part.run(x)
        return x

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return the cross-entropy in nats of tokens x (B, T), summed over the targets y that are not -100."""
        return self.criterion(self(x), y)
