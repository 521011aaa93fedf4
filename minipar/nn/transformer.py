"""The common part of GPT-2 and Llama: the sizes that others read, and the parts that run one after another.

Each strategy changes some things of a serial model. Tensor parallelism replaces layers by parallel
ones, divides each attention's heads, and replaces the two functions that see the whole vocabulary,
`project` and `criterion`. Where several layers read one input, their block calls `enter` first, and
a layer of experts ends with `leave`: both are `identity` until tensor parallelism fills them.
Context parallelism replaces each `attention`, and `positions`. Both give `mask_slices` to each
Dropout that sees a part of an activation. Pipeline parallelism runs a range of `parts` on each
rank. A tied token embedding may then be on two ranks, so the head has a leaf of its own
(`head_weight`), whose gradient is added before the step. Data parallelism and ZeRO move all
parameters into flat storage and add gradient hooks. ZeRO stage 3 wraps the `run` of each part, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar

from minipar.autograd import Tensor, causal_attention, checkpoint, cross_entropy_sum, linear
from minipar.backend import Array, xp
from minipar.errors import check_memory
from minipar.nn.guards import array_of, check_config, check_size, check_tokens, float_dtype
from minipar.nn.layers import Init
from minipar.nn.module import Module, Part
from minipar.nn.parameter import Parameter


class TransformerConfig:
    """The sizes of a model under GPT-2's names, whatever their names in its config.json."""

    model_type: ClassVar[str]  # as in config.json
    vocab_size: int
    n_positions: Any  # the longest sequence
    n_embd: Any
    n_layer: Any
    n_head: Any
    n_kv_head: Any  # heads of keys and of values
    n_inner: Any  # the MLP's inner size
    num_local_experts: Any  # only a Mixtral has experts
    tie_word_embeddings: Any  # whether the head is the token embedding
    layer_matrices: Any  # elements of a layer's matrices
    parameters: Any  # elements of all parameters
    build: Any  # build(**options) makes the model of this shape

    def __post_init__(self: Any) -> None:
        for field in fields(self):
            value = vars(self)[field.name]
            if type(field.default) is int and value is not None:
                check_size(field.name, value)
        if self.n_embd % self.n_head:
            raise ValueError(f"hidden {self.n_embd} is not divisible by heads {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"heads {self.n_head} are not divisible by kv-heads {self.n_kv_head}")

    def part_flops(self, length: int) -> list[int]:
        """Return the operations per token of each part, in sequences of `length`, as `forward_flops` counts them."""
        block = 2 * self.layer_matrices + 4 * length * self.n_embd
        return [0, *[block] * self.n_layer, 2 * self.n_embd * self.vocab_size]

    def forward_flops(self, batch: int, length: int) -> int:
        """Return the operations of forward's matrix products (Narayanan et al. 2021); backward takes twice as many."""
        return batch * length * sum(self.part_flops(length))

    def check_memory(self, nbytes: int, shares: int = 1) -> None:
        """Raise UsageError if one of `shares` of `nbytes` bytes per parameter is more than this machine's memory."""
        count = Decimal(self.parameters)
        sizes = f"vocabulary {self.vocab_size}, {self.n_positions} positions, {self.n_layer} layers of hidden "
        sizes += f"{self.n_embd} and ffn {self.n_inner}"
        check_memory(count * nbytes / shares, f"{sizes}: {count:.6g} parameters * {nbytes} bytes / {shares}")


def identity(x: Tensor) -> Tensor:
    """Return x, as a seam of the model does that no strategy has filled."""
    return x


class SelfAttention(Module):
    """The base of the models' attention layers: the sizes and the function that strategies change.

    `heads` of q, and `kv_heads` of k and of v, are computed here. `attention` is `causal_attention`
    of these heads.
    """

    heads: int
    kv_heads: int
    attention: Callable[..., Tensor]


class LanguageModel(Module):
    """A decoder-only Transformer: tokens (B, T) -> logits (B, T, V). The base class of GPT and Llama.

    `seed` and the parameters' names determine the initial weights (see layers.py). `recompute=True`
    keeps only each block's input and runs the block again in backward. With `deferred=True` the
    parameters have no values yet. `attention` is a method of `causal_attention`, `dtype` is NumPy's
    name or bf16, fp16, fp32 or fp64. A subclass has a `config_type`, makes its layers, and then
    calls `assemble`.
    """

    config_type: type[TransformerConfig]
    token_embedding: Any  # the Parameter (V, h) in which tokens are looked up
    lm_head: Any  # the layer of the output matrix, if it is not the token embedding
    head_weight: Tensor | None = None  # else the head's leaf of the token embedding
    embed: Any  # embed(tokens): integers (B, T) -> (B, T, h)

    def __init__(
        self, config: Any, seed: int = 0, dtype: str = "float32", recompute: bool = False, deferred: bool = False,
        attention: str = "auto",
    ) -> None:  # fmt: skip
        check_config(type(self).__name__, self.config_type, config)
        dtype = float_dtype(type(self).__name__, dtype)
        if not deferred:
            config.check_memory(xp.dtype(dtype).itemsize)
        self.config, self.dtype, self.recompute, self.deferred = config, dtype, recompute, deferred
        # All layers are made with deferred parameters; `assemble` computes their values.
        self.init: Init = {"seed": seed, "dtype": dtype, "std": config.initializer_range, "deferred": True}
        self.attention: Callable[..., Tensor] = partial(causal_attention, method=attention)
        self.positions: Callable[[int], Array] = lambda length: xp.arange(length)  # where a rank's tokens are
        self.project: Callable[[Tensor, Tensor], Tensor] = partial(linear, transposed=True)  # (B, T, h), (V, h)
        self.criterion: Callable[[Tensor, Array], Tensor] = cross_entropy_sum

    def assemble(self, embedding: list[Parameter], blocks: Mapping[str, Module], norm: Module) -> None:
        """List the parts; `embedding` are the parameters that the first part reads, `norm` is the last norm."""
        if self.config.tie_word_embeddings:
            self.head_weight = self.token_embedding.tie()
        head = self.token_embedding if self.head_weight is not None else self.lm_head.weight
        self.parts = [
            Part("embedding", self.embed, embedding, reads_in_backward=False),
            *(Part(name, partial(self.run_block, block), block.parameters()) for name, block in blocks.items()),
            Part("head", partial(self.head, norm), [head, *norm.parameters()], is_last=True),
        ]
        if not self.deferred:
            self.materialize()

    def run_block(self, block: Module, x: Tensor) -> Tensor:
        """Run one block, (B, T, h) -> (B, T, h); with `recompute`, backward runs it again."""
        return checkpoint(block, x, parameters=block.parameters()) if self.recompute else block(x)

    def head(self, norm: Module, x: Tensor) -> Tensor:
        """Multiply norm(x) with the token embedding if the head is tied, else with `lm_head`: (B, T, V)."""
        if self.head_weight is None:
            return self.project(norm(x), self.lm_head.weight)
        self.head_weight.data = self.token_embedding.data  # follows the parameter if its storage has moved
        return self.project(norm(x), self.head_weight)

    def forward(self, tokens: Array) -> Tensor:
        x: Any = array_of("tokens", tokens)
        check_tokens(x)
        for part in self.parts:
            x = part.run(x)
        return x

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return the cross-entropy in nats of tokens x (B, T), summed over the targets y that are not -100."""
        return self.criterion(self(x), y)
