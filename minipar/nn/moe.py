"""Mixtral (Jiang et al. 2024, arXiv 2401.04088), exactly: the function and files of Hugging Face's MixtralForCausalLM.

A Llama in which each layer has E MLPs, the experts, and a router that sends each token to k of
them. A token's result is their mean, weighted by the router's probabilities. No token is dropped,
unless experts are given a capacity. Shapes: N = B T tokens, M rows that this rank's experts
multiply: N k, or what other ranks send (expert parallelism). An assignment is a (token, slot): a
token and one of its k experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from minipar.autograd import Gradient, Tensor, concatenate, embedding, operation, swiglu
from minipar.backend import Array, from_host, to_host, xp
from minipar.nn.llama import Attention, Block, Llama, LlamaConfig, norm_of, projection
from minipar.nn.module import Module
from minipar.nn.transformer import identity


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The shape of a Mixtral, under the names of Hugging Face's config.json. Defaults are Mixtral 8x7B."""

    intermediate_size: int = 14336  # each expert's inner size
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    model_type = "mixtral"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(f"top-k {self.num_experts_per_tok} is more than experts {self.num_local_experts}")

    @property
    def layer_matrices(self) -> int:
        """Those that a token is multiplied with: attention's, the router's h E elements, and 3 h f in each of k."""
        experts = 3 * (self.num_experts_per_tok - 1) * self.n_inner  # Llama counts one
        return super().layer_matrices + self.n_embd * (experts + self.num_local_experts)

    @property
    def active_parameters(self) -> int:
        """Those that one token uses: all, but for the experts that it is not sent to."""
        return super().parameters

    @property
    def parameters(self) -> int:
        idle = self.num_local_experts - self.num_experts_per_tok
        return self.active_parameters + self.n_layer * idle * 3 * self.n_embd * self.n_inner

    def build(self, **options: Any) -> "Mixtral":
        return Mixtral(self, **options)


class Expert(Module):
    """One expert, a gated MLP: (M, h) -> (M, f) -> (M, h). w1 is the gate, w3 the up and w2 the down projection."""

    def __init__(self, model: "Mixtral", name: str) -> None:
        h, f = model.config.n_embd, model.config.n_inner
        self.w1 = projection(h, f, f"{name}.w1", model.init)
        self.w2 = projection(f, h, f"{name}.w2", model.init)
        self.w3 = projection(h, f, f"{name}.w3", model.init)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


@operation
def balanced(probabilities: Any, layer: "MoE", loads: np.ndarray) -> Any:
    """Return a router's probabilities (N, E). Backward counts the loads (B, E), and adds the auxiliary loss's gradient.

    A sample's auxiliary loss in a layer is E sum_e f_e P_e (Fedus et al. 2021, arXiv 2101.03961):
    f_e is the share of its T k assignments that expert e gets, a constant, and P_e the mean of its
    T tokens' probabilities. A token's gradient is therefore E f_e / T. NB: Megatron's
    MoEAuxLossAutoScaler also adds it in backward.
    """

    def gradient(g: Array, loads: np.ndarray) -> Array:
        load = loads.sum(axis=0)
        layer.load += load
        layer.dropped += int(np.maximum(load - layer.capacity(len(g)), 0).sum())
        if not layer.aux_loss:
            return g
        sums = layer.sum_loads(loads)
        f = sums / sums.sum(axis=1, keepdims=True)
        each = layer.aux_loss * f.shape[1] * f.repeat(len(g) // max(len(f), 1), axis=0)  # (N, E)
        return g + from_host(each.astype(g.dtype))

    return probabilities, Gradient(gradient, loads=loads)


def count_loads(indices: Array, samples: int, experts: int) -> np.ndarray:
    """Count the assignments of each of B samples to each of E experts: indices (N, k) -> (B, E)."""
    loads = np.zeros((samples, experts), np.int64)
    if samples:
        for load, chosen in zip(loads, np.split(to_host(indices), samples), strict=True):
            load += np.bincount(chosen.reshape(-1), minlength=experts)
    return loads


@dataclass(frozen=True)
class Rows:
    """The rows that experts multiply, which are sorted by expert, and where each token finds its results."""

    tokens: Array  # (M,): the token in each row
    counts: np.ndarray  # (E,): the rows of each expert
    places: Array  # (N, k): the row of each assignment
    is_kept: Array  # (N, k): 0 where an expert's capacity leaves no row for it, else 1


def rows_by_expert(indices: Array, experts: int) -> Rows:
    """Give each assignment a row, sorted by expert and then by token. `indices` (N, k) are the tokens' experts."""
    chosen = indices.reshape(-1)  # (N k,)
    order = xp.argsort(chosen, kind="stable")  # the assignment in each row
    counts = to_host(xp.bincount(chosen, minlength=experts))
    places = xp.argsort(order).reshape(indices.shape)
    return Rows(tokens=order // indices.shape[1], counts=counts, places=places, is_kept=xp.ones_like(indices))


def rows_within_capacity(indices: Array, experts: int, capacity: int) -> Rows:
    """Give each expert `capacity` rows.

    They are for the tokens in their order whose first choice the expert is, then for those whose
    second choice it is, and so on. Rows that are left over hold token 0, and nobody reads their
    results.
    """
    n, k = indices.shape
    chosen = indices.T.reshape(-1)  # (k N,): all first choices, then all second choices
    order = xp.argsort(chosen, kind="stable")  # by expert, then by choice, then by token
    expert = chosen[order]
    number = xp.arange(n * k) - xp.searchsorted(expert, expert)  # counts each expert's assignments from 0
    fits = number < capacity
    kept = order[fits]
    row = (expert * capacity + number)[fits]
    tokens = xp.zeros(experts * capacity, dtype=int)
    tokens[row] = kept % n
    places = xp.zeros(n * k, dtype=int)
    places[kept] = row
    is_kept = xp.zeros(n * k, dtype=int)
    is_kept[kept] = 1
    counts = np.full(experts, capacity)
    return Rows(tokens=tokens, counts=counts, places=places.reshape(k, n).T, is_kept=is_kept.reshape(k, n).T)


class MoE(Module):
    """A layer of experts: (B, T, h) -> (B, T, h).

    `load` (E,) counts this rank's assignments to each expert, in all backward passes until it is
    set to zero. `aux_loss` is the auxiliary loss's coefficient in the mean loss / (layers x tokens
    of the global batch). `bias` (E,) is added to the probabilities where experts are chosen, and
    only there (Wang et al. 2024, arXiv 2408.15664). With a `capacity_factor` an expert gets
    `capacity` rows of each forward pass; `dropped` counts the others, as `load` does.

    Expert parallelism keeps some of the `experts` and replaces `run_experts`. Tensor parallelism
    replaces `enter` and `leave`, context parallelism `sum_loads`, with which samples get all their
    tokens' loads.
    """

    def __init__(self, model: "Mixtral", name: str) -> None:
        count = model.config.num_local_experts
        self.top_k = model.config.num_experts_per_tok
        self.gate = projection(model.config.n_embd, count, f"{name}.gate", model.init)
        self.experts = [Expert(model, f"{name}.experts.{e}") for e in range(count)]
        self.enter: Callable[[Tensor], Tensor] = identity
        self.leave: Callable[[Tensor], Tensor] = identity
        self.load, self.dropped, self.bias, self.aux_loss = np.zeros(count, np.int64), 0, np.zeros(count), 0.0
        self.capacity_factor: float | None = None
        self.sum_loads: Any = lambda loads: loads

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)  # the router and the experts read it
        tokens = x.reshape(-1, x.shape[-1])  # (N, h)
        indices, weights = self.route(tokens, x.shape[0])
        return self.leave(self.compute(tokens, indices, weights).reshape(*x.shape))

    def route(self, x: Tensor, samples: int = 1) -> tuple[Array, Tensor]:
        """Return each token's k most probable experts, the first of equals first, and their weights; both (N, k).

        The probabilities are a softmax over all experts. The weights are those of the k, divided by
        their sum.
        """
        logits = self.gate(x)  # (N, E)
        powers = (logits - logits.data.max(axis=-1, keepdims=True)).exp()
        probabilities = powers / powers.sum(-1, keepdims=True)
        scores = probabilities.data + from_host(self.bias)
        indices = xp.argsort(-scores, axis=-1, kind="stable")[:, : self.top_k]
        probabilities = balanced(probabilities, self, count_loads(indices, samples, len(self.load)))
        chosen = probabilities[xp.arange(len(indices))[:, None], indices]
        return indices, chosen / chosen.sum(-1, keepdims=True)

    def capacity(self, tokens: int) -> int:
        """Return the most rows that an expert takes of this many tokens: ceil(factor N k / E), or all N."""
        return ceil(min(tokens, (self.capacity_factor or np.inf) * tokens * self.top_k / len(self.load)))

    def compute(self, x: Tensor, indices: Array, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts, the most probable one's first: (N, h).

        What is beyond an expert's capacity counts as zero; the weights of a token's other experts
        stay, as in the Switch Transformer.
        """
        n, k = indices.shape
        if self.capacity_factor is None:
            rows = rows_by_expert(indices, len(self.load))
        else:
            rows = rows_within_capacity(indices, len(self.load), self.capacity(n))
            weights = weights * rows.is_kept.astype(weights.dtype)
        results = self.run_experts(embedding(x, rows.tokens), rows.counts)  # (M, h), one product per expert
        by_token = embedding(results, rows.places)  # (N, k, h)
        return (by_token * weights.reshape(n, k, 1)).sum(1)

    def run_experts(self, xs: Tensor, counts: np.ndarray) -> Tensor:
        """Run expert e on the e-th stretch, of counts[e] rows, of xs (M, h), which are sorted by expert: (M, h).

        An expert without rows gets a gradient of zeros, so that its weights decay like all others.
        """
        stretches = zip(self.experts, np.cumsum(counts), counts, strict=True)
        return concatenate([expert(xs[stop - count : stop]) for expert, stop, count in stretches])


def moe_layers(model: Module) -> list[Any]:
    """List a model's layers of experts."""
    return [module for _, module in model.named_modules() if isinstance(module, MoE)]


class MixtralBlock(Block):
    """Llama's layer with experts in the place of its MLP."""

    mlp: Any = property(lambda self: self.block_sparse_moe)

    def __init__(self, model: "Mixtral", name: str) -> None:
        self.self_attn = Attention(model, f"{name}.self_attn")
        self.block_sparse_moe = MoE(model, f"{name}.block_sparse_moe")
        self.input_layernorm = norm_of(model)
        self.post_attention_layernorm = norm_of(model)


class Mixtral(Llama):
    """The language model: tokens (B, T) -> logits (B, T, V). The arguments are Llama's."""

    config_type = MixtralConfig
    block = MixtralBlock
