"""Llama (Touvron et al. 2023), exactly: the function, names and shapes of Hugging Face's LlamaForCausalLM.

Blocks with RMSNorm before each half, rotary positions, SwiGLU, several heads of q for each head of
k and v, and no biases. Shapes: B samples, T tokens per sample, h hidden, a heads of q and n heads
of k and v of d = h/a elements each, f the MLP's inner size, V vocabulary. Matrices are (out, in).
gpt.py says what strategies change.

Seams of the core: the model's functions and `segments`, and a plan, `tensor_plan`.
"""

# What is a field of one config is a property of another.
# mypy: disable-error-code="override"

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minipar.autograd.fused import rms_norm
from minipar.autograd.rules import Gradient, Result
from minipar.autograd.tensor import Tensor, operation
from minipar.backend import Array, xp
from minipar.nn.gpt import LanguageModel, SelfAttention, TransformerConfig
from minipar.nn.layers import Embedding, Linear, constant
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter
from minipar.parallel.tensor.layers import Border, ColumnLinear, RowLinear, VocabEmbedding
from minipar.parallel.tensor.plan import Split


@dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The shape of a Llama, under the names of Hugging Face's config.json. Defaults are Llama 7B."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: as many as num_attention_heads
    max_position_embeddings: int = 2048  # the longest sequence; no parameter depends on it
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    model_type = "llama"

    @property
    def n_positions(self) -> int:
        return self.max_position_embeddings

    @property
    def n_embd(self) -> int:
        return self.hidden_size

    @property
    def n_layer(self) -> int:
        return self.num_hidden_layers

    @property
    def n_head(self) -> int:
        return self.num_attention_heads

    @property
    def n_kv_head(self) -> int:
        heads = self.num_key_value_heads
        return self.n_head if heads is None else heads

    @property
    def n_inner(self) -> int:
        return self.intermediate_size

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.n_embd % self.n_head:
            raise ValueError(f"hidden {self.n_embd} is not divisible by heads {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"heads {self.n_head} are not divisible by kv-heads {self.n_kv_head}")
        if self.head_size % 2:
            quotient = f"hidden/heads = {self.n_embd}/{self.n_head}"
            raise ValueError(f"{quotient} is odd, but rotary positions rotate pairs")

    @property
    def layer_matrices(self) -> int:
        # q, o: h^2 elements each; k, v: h n d each; gate, up, down: h f each.
        h = self.n_embd
        return h * (2 * h + 2 * self.n_kv_head * self.head_size + 3 * self.n_inner)

    def build(self, **options: Any) -> "Llama":
        return Llama(self, **options)


@operation
def swiglu(gate: Array, up: Array) -> Result:
    """Compute silu(gate) * up with silu(x) = x / (1 + exp(-x)) (Shazeer 2020); both (..., f)."""
    sigmoid = 0.5 + 0.5 * xp.tanh(0.5 * gate)  # exp(-x) would overflow
    silu = gate * sigmoid

    def dgate(g: Array, up: Array, sigmoid: Array, silu: Array) -> Array:
        # d silu / dx = s + x s (1 - s) = s + silu (1 - s)
        return g * up * (sigmoid + silu * (1 - sigmoid))

    def dup(g: Array, silu: Array) -> Array:
        return g * silu

    of_gate = Gradient(dgate, up=up, sigmoid=sigmoid, silu=silu)
    of_up = Gradient(dup, silu=silu)
    return silu * up, of_gate, of_up


def _rotate(x: Array, angles: Array) -> Array:
    """Rotate the pairs (x_i, x_(i + d/2)) of each head of x (B, T, heads d), by angles."""
    out = xp.empty(x.shape, dtype=x.dtype)
    half = angles.shape[-1]
    shape = (*x.shape[:-1], x.shape[-1] // (2 * half), 2, half)
    pairs = x.reshape(shape)  # (B, T, heads, 2, d/2)
    rotated = out.reshape(shape)  # a view of out
    first = pairs[..., 0, :]  # (B, T, heads, d/2)
    second = pairs[..., 1, :]
    cos = xp.cos(angles)[..., None, :].astype(x.dtype)  # (T, 1, d/2), or (B, T, 1, d/2)
    sin = xp.sin(angles)[..., None, :].astype(x.dtype)
    rotated[..., 0, :] = first * cos - second * sin
    rotated[..., 1, :] = second * cos + first * sin
    return out


@operation
def rotary(q: Array, k: Array, v: Array, positions: Array, size: int, theta: float = 10000.0) -> Result:
    """Rotate the heads of q and k by their tokens' positions (Su et al. 2021), and join q, k and v.

    (B, T, a d), (B, T, n d), (B, T, n d), integer positions (T,)
    -> (B, T, (a + 2n) d) for `causal_attention`, with heads of d = `size` elements. Elements i and
    i + d/2 are a pair, as in Hugging Face's code (in Meta's, 2i and 2i+1); at position p it is
    rotated by the angle p theta^(-2i/d).
    """
    frequencies = theta ** (xp.arange(0, size, 2) / -size)  # (d/2,), float64 whatever the dtype
    angles = positions[:, None] * frequencies  # (T, d/2)
    start_k = q.shape[-1]
    start_v = start_k + k.shape[-1]

    def dq(g: Array, angles: Array) -> Array:
        return _rotate(g[..., :start_k], -angles)

    def dk(g: Array, angles: Array) -> Array:
        return _rotate(g[..., start_k:start_v], -angles)

    def dv(g: Array) -> Array:
        return g[..., start_v:]

    joined = xp.concatenate([_rotate(q, angles), _rotate(k, angles), v], axis=-1)
    return joined, Gradient(dq, angles=angles), Gradient(dk, angles=angles), dv


def identity(x: Tensor) -> Tensor:
    """Return x, as a seam of the model does that no strategy has filled."""
    return x


def projection(model: "Llama", n_in: int, n_out: int, name: str) -> Linear:
    """Make a Linear as Llama has it: without a bias, and with a weight (out, in)."""
    return Linear(
        n_in, n_out, name=name, bias=False, transposed=True,
        seed=model.seed, dtype=model.dtype, std=model.config.initializer_range,
    )  # fmt: skip


class RMSNorm(Module):
    """RMSNorm over the last dim with a gain: (..., size) -> (..., size)."""

    def __init__(self, size: int, eps: float = 1e-6, dtype: str = "float32") -> None:
        self.weight = constant(1, size, dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def norm_of(model: "Llama") -> RMSNorm:
    """Make an RMSNorm over the hidden dim."""
    return RMSNorm(model.config.n_embd, model.config.rms_norm_eps, model.dtype)


class Attention(SelfAttention):
    """Causal self-attention with grouped heads and rotary positions: (B, T, h) -> (B, T, h)."""

    def __init__(self, model: "Llama", name: str) -> None:
        config = model.config
        h = config.n_embd
        kv = config.n_kv_head * config.head_size
        self.heads = config.n_head
        self.kv_heads = config.n_kv_head

        def positions(length: int) -> Array:
            return model.positions(length)  # context parallelism replaces the model's

        self.positions = positions
        self.enter: Callable[[Tensor], Tensor] = identity
        self.rotary = partial(rotary, size=config.head_size, theta=config.rope_theta)
        self.q_proj = projection(model, h, h, f"{name}.q_proj")
        self.k_proj = projection(model, h, kv, f"{name}.k_proj")
        self.v_proj = projection(model, h, kv, f"{name}.v_proj")
        self.o_proj = projection(model, h, h, f"{name}.o_proj")

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)  # three layers read it
        q = self.q_proj(x)  # (B, T, h)
        k = self.k_proj(x)  # (B, T, n d)
        v = self.v_proj(x)  # (B, T, n d)
        qkv = self.rotary(q, k, v, self.positions(q.shape[1]))  # (B, T, (a + 2n) d)
        return self.o_proj(self.attention(qkv, self.heads, self.kv_heads))  # (B, T, h)


class MLP(Module):
    """A gated MLP: (B, T, h) -> (B, T, f) -> (B, T, h)."""

    def __init__(self, model: "Llama", name: str) -> None:
        h = model.config.n_embd
        f = model.config.n_inner
        self.enter: Callable[[Tensor], Tensor] = identity
        self.gate_proj = projection(model, h, f, f"{name}.gate_proj")
        self.up_proj = projection(model, h, f, f"{name}.up_proj")
        self.down_proj = projection(model, f, h, f"{name}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)  # two layers read it
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # (B, T, f) inside


class Block(Module):
    """One Transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: "Llama", name: str) -> None:
        self.self_attn = Attention(model, f"{name}.self_attn")
        self.mlp = MLP(model, f"{name}.mlp")
        self.input_layernorm = norm_of(model)
        self.post_attention_layernorm = norm_of(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(Module):
    """All of a Llama but the head. Hugging Face's name of it is `model`."""

    def __init__(self, model: "Llama", names: Sequence[str]) -> None:
        config = model.config
        self.embed_tokens = Embedding(
            config.vocab_size, config.n_embd, name="model.embed_tokens",
            seed=model.seed, dtype=model.dtype, std=config.initializer_range,
        )  # fmt: skip
        self.layers = [model.make_block(name) for name in names]
        self.norm = norm_of(model)


class Inside(Border):
    """The border of layers that do not cross it: their block enters or leaves for several of them.

    They send nothing.
    """

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


def inside_columns(layer: Linear, border: Border) -> ColumnLinear:
    """Make a rank's columns of a layer whose block has entered for it."""
    return ColumnLinear(layer, Inside(border.group))


# Llama's plan of tensor parallelism. Its matrices are (out, in). Blocks enter for several layers together.
PLAN = {
    "embed_tokens": Split(0, 1, VocabEmbedding),
    "q_proj": Split(0, 1, inside_columns),
    "k_proj": Split(0, 1, inside_columns),
    "v_proj": Split(0, 1, inside_columns),
    "o_proj": Split(1, 1, RowLinear),
    "gate_proj": Split(0, 1, inside_columns),
    "up_proj": Split(0, 1, inside_columns),
    "down_proj": Split(1, 1, RowLinear),
    "lm_head": Split(0, 1, ColumnLinear),  # the model gives its weight to `project`
}


class Llama(LanguageModel):
    """The language model: tokens (B, T) -> logits (B, T, V).

    The arguments are GPT's. Matrices start from N(0, initializer_range), gains from 1, as in
    Hugging Face's code.
    """

    config: LlamaConfig
    tensor_plan = PLAN

    def __init__(
        self, config: LlamaConfig, seed: int | None = 0, dtype: str = "float32", recompute: bool = False
    ) -> None:
        super().__init__(config, dtype, recompute)
        self.seed = seed
        names = [f"model.layers.{i}" for i in range(config.n_layer)]
        self.model = Body(self, names)
        if config.tie_word_embeddings:
            self.head_weight = self.token_embedding.tie()
            matrix = self.token_embedding
        else:
            self.lm_head = projection(self, config.n_embd, config.vocab_size, "lm_head")
            matrix = self.lm_head.weight
        self.segments = [
            Segment("embedding", self.embed, [self.token_embedding], reads_in_backward=False)
        ]
        for name, block in zip(names, self.model.layers, strict=True):
            run = partial(self.run_block, block)
            self.segments.append(Segment(name, run, block.parameters()))
        read_by_head = [matrix, *self.model.norm.parameters()]
        self.segments.append(Segment("head", self.head, read_by_head, is_last=True))

    def make_block(self, name: str) -> Module:
        """Make a layer. Mixtral makes one with experts."""
        return Block(self, name)

    @property
    def token_embedding(self) -> Parameter:
        return self.model.embed_tokens.weight

    def embed(self, tokens: Array) -> Tensor:
        """Look up the tokens: integers (B, T) -> (B, T, h)."""
        return self.model.embed_tokens(tokens)

    def head(self, x: Tensor) -> Tensor:
        """Multiply the normalized rows with the output matrix, (B, T, h) -> (B, T, V)."""
        x = self.model.norm(x)
        if self.head_weight is None:
            return self.project(x, self.lm_head.weight)
        self.head_weight.data = self.token_embedding.data  # its storage may have moved
        return self.project(x, self.head_weight)
