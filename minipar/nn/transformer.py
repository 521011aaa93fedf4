"""The common part of GPT-2 and Llama: the sizes that others read, and the segments of the model.

Tensor parallelism replaces layers by parallel ones, divides each attention's heads, and replaces
the two functions that see the whole vocabulary, `project` and `criterion`. Where several layers
read one input, their block calls `enter` first, and a layer of experts ends with `leave`: both are
`identity` until tensor parallelism fills them. Context parallelism replaces each `attention`, and
`positions`. Both give `mask_slices` to each Dropout that sees a part of an activation. Pipeline
parallelism runs a range of `segments` on each rank. A tied token embedding may then be on two
ranks, so the head has a leaf of its own (`head_weight`), whose gradient is added before the step.
Data parallelism and ZeRO move all parameters into flat storage and add gradient hooks. ZeRO stage 3
wraps the `run` of each segment, too.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any, ClassVar

from minipar.autograd import Tensor, causal_attention, checkpoint, cross_entropy_sum, linear
from minipar.backend import Array, xp
from minipar.nn.guards import array_of, check_config, check_size, check_tokens, float_dtype
from minipar.nn.layers import Init, Linear
from minipar.nn.module import Module, Segment
from minipar.nn.parameter import Parameter


class TransformerConfig(ABC):
    """The shape of a model, which other code reads under GPT-2's names.

    Each model's config is a frozen dataclass, whose fields have the names of its config.json.
    """

    model_type: ClassVar[str]  # as in config.json
    vocab_size: int
    initializer_range: float
    tie_word_embeddings: bool  # whether the head is the token embedding
    num_local_experts: int  # only a Mixtral has experts
    aux_coefficient = 0.0  # the auxiliary loss's factor

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """Return the length of the longest sequence."""

    @property
    @abstractmethod
    def n_embd(self) -> int:
        """Return the hidden size h."""

    @property
    @abstractmethod
    def n_layer(self) -> int:
        """Return the number of blocks."""

    @property
    @abstractmethod
    def n_head(self) -> int:
        """Return the number of heads of queries."""

    @property
    @abstractmethod
    def n_kv_head(self) -> int:
        """Return the number of heads of keys, and of values."""

    @property
    @abstractmethod
    def n_inner(self) -> int:
        """Return the MLP's inner size."""

    @property
    @abstractmethod
    def layer_matrices(self) -> int:
        """Return the elements of a layer's matrices that a token is multiplied with."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the elements of all parameters."""

    @abstractmethod
    def build(self, **options: Any) -> "LanguageModel":
        """Make the model of this shape; `options` are the other arguments of its class."""

    def __post_init__(self: Any) -> None:
        values = self.to_dict()
        for field in fields(self):
            value = values[field.name]
            if type(field.default) is int and value is not None:
                check_size(field.name, value)
        if self.n_embd % self.n_head:
            raise ValueError(f"hidden {self.n_embd} is not divisible by heads {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"heads {self.n_head} are not divisible by kv-heads {self.n_kv_head}")

    def to_dict(self: Any) -> dict[str, Any]:
        """Return the fields by their names, which are those of config.json."""
        return asdict(self)

    def segment_flops(self, length: int) -> list[int]:
        """Return the operations per token of each segment, in sequences of `length`.

        They are counted as `forward_flops` counts them.
        """
        block = 2 * self.layer_matrices + 4 * length * self.n_embd
        return [0, *[block] * self.n_layer, 2 * self.n_embd * self.vocab_size]

    def forward_flops(self, batch: int, length: int) -> int:
        """Return the operations of forward's matrix products; backward takes twice as many.

        Source: Narayanan et al. 2021.
        """
        return batch * length * sum(self.segment_flops(length))


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


def all_positions(length: int) -> Array:
    """Return the positions of a sequence's tokens, where a rank has them all: (T,)."""
    return xp.arange(length)


class LanguageModel(Module):
    """A decoder-only Transformer: tokens (B, T) -> logits (B, T, V). The base class of GPT and Llama.

    `seed` and the parameters' names determine the initial weights (see layers.py). `recompute=True`
    keeps only each block's input and runs the block again in backward. With `deferred=True` the
    parameters have no values yet. `attention` is a method of `causal_attention`, `dtype` is NumPy's
    name or bf16, fp16, fp32 or fp64. A subclass has a `config_type`, makes its layers, and then
    calls `assemble`.
    """

    config_type: type[TransformerConfig]
    lm_head: Linear  # the layer of the output matrix, if it is not the token embedding
    head_weight: Tensor | None = None  # else the head's leaf of the token embedding

    def __init__(
        self,
        config: TransformerConfig,
        seed: int,
        dtype: str,
        recompute: bool,
        deferred: bool,
        attention: str,
    ) -> None:
        check_config(type(self).__name__, self.config_type, config)
        self.dtype = float_dtype(type(self).__name__, dtype)
        self.config = config
        self.recompute = recompute
        self.deferred = deferred
        # All layers are made with deferred parameters; `assemble` computes their values.
        self.init = Init(seed=seed, dtype=self.dtype, std=config.initializer_range, deferred=True)
        # What strategies replace.
        self.attention: Callable[..., Tensor] = partial(causal_attention, method=attention)
        self.positions: Callable[[int], Array] = all_positions
        self.project: Callable[[Tensor, Tensor], Tensor] = partial(linear, transposed=True)
        self.criterion: Callable[[Tensor, Array], Tensor] = cross_entropy_sum

    @property
    def token_embedding(self) -> Parameter:
        """Return the matrix (V, h) in which tokens are looked up."""
        raise TypeError(f"{type(self).__name__} does not define token_embedding")

    def embed(self, tokens: Array) -> Tensor:
        """Return what the first block reads: integers (B, T) -> (B, T, h)."""
        raise TypeError(f"{type(self).__name__} does not define embed")

    def assemble(
        self, embedding: list[Parameter], blocks: Mapping[str, Module], norm: Module
    ) -> None:  # fmt: skip
        """List the segments of the model, and compute the parameters unless they are deferred.

        `embedding` are the parameters that the first segment reads, `norm` is the last norm.
        """
        if self.config.tie_word_embeddings:
            self.head_weight = self.token_embedding.tie()
            head_matrix = self.token_embedding
        else:
            head_matrix = self.lm_head.weight
        self.segments = [Segment("embedding", self.embed, embedding, reads_in_backward=False)]
        for name, block in blocks.items():
            run = partial(self.run_block, block)
            self.segments.append(Segment(name, run, block.parameters()))
        read_by_head = [head_matrix, *norm.parameters()]
        self.segments.append(Segment("head", partial(self.head, norm), read_by_head, is_last=True))
        if not self.deferred:
            self.materialize()

    def run_block(self, block: Module, x: Tensor) -> Tensor:
        """Run one block, (B, T, h) -> (B, T, h); with `recompute`, backward runs it again."""
        if self.recompute:
            return checkpoint(block, x, parameters=block.parameters())
        return block(x)

    def head(self, norm: Module, x: Tensor) -> Tensor:
        """Multiply norm(x) with the output matrix, (B, T, h) -> (B, T, V).

        It is the token embedding if the head is tied, else `lm_head`.
        """
        if self.head_weight is None:
            return self.project(norm(x), self.lm_head.weight)
        # The leaf follows the parameter, whose storage may have moved.
        self.head_weight.data = self.token_embedding.data
        return self.project(norm(x), self.head_weight)

    def forward(self, tokens: Array) -> Tensor:
        x: Array | Tensor = array_of("tokens", tokens)
        check_tokens(x)
        for segment in self.segments:
            x = segment.run(x)
        return x

    def loss_sum(self, x: Array, y: Array) -> Tensor:
        """Return the cross-entropy in nats of tokens x (B, T), summed over the targets y.

        Targets of -100 do not count.
        """
        return self.criterion(self(x), y)
