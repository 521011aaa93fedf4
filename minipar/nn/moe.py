"""Mixtral (Jiang et al. 2024, arXiv 2401.04088), exactly: the function and files of Hugging Face's MixtralForCausalLM.

A Llama in which each layer has E MLPs, the experts, and a router that sends each token to k of them. A token's result
is their mean, weighted by the router's probabilities. No token is dropped, unless experts are given a capacity. Shapes:
N = B T tokens, M rows that this rank's experts multiply: N k, or what other ranks send (expert parallelism). An
assignment is a (token, slot): a token and one of its k experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from minipar.autograd import Gradient, Tensor, concatenate, embedding, operation, swiglu
from minipar.backend import Array, from_host, to_host, xp
from minipar.nn.llama import Attention, Block, Llama, LlamaConfig
from minipar.nn.module import Module
from minipar.nn.transformer import identity


@dataclass(frozen=True)
class MixtralConfig(LlamaConfig):
    """The shape of a Mixtral, under the names of Hugging Face's config.json. Defaults are Mixtral 8x7B."""

    intermediate_size: int = 14336  # of each expert
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
        self.w1 = model.make_linear(h, f, name=f"{name}.w1")
        self.w2 = model.make_linear(f, h, name=f"{name}.w2")
        self.w3 = model.make_linear(h, f, name=f"{name}.w3")

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


@operation
def balanced(probabilities: Any, layer: "MoE", loads: np.ndarray) -> Any:
    """Return a router's probabilities (N, E). Backward counts the loads (B, E), and adds the auxiliary loss's gradient.

    A sample's auxiliary loss in a layer is E sum_e f_e P_e (Fedus et al. 2021, arXiv 2101.03961): f_e is the share of
    its T k assignments that expert e gets, a constant, and P_e the mean of its T tokens' probabilities. A token's
    gradient is therefore E f_e / T. NB: Megatron's MoEAuxLossAutoScaler also adds it in backward.
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


class MoE(Module):
    """A layer of experts: (B, T, h) -> (B, T, h).

    `load` (E,) counts this rank's assignments to each expert, in all backward passes until it is set to zero.
    `aux_loss` is the auxiliary loss's coefficient in the mean loss / (layers x tokens of the global batch). `bias` (E,)
    is added to the probabilities where experts are chosen, and only there (Wang et al. 2024, arXiv 2408.15664). With a
    `capacity_factor` an expert gets `capacity` rows of each forward pass; `dropped` counts the others, as `load` does.

    Expert parallelism keeps some of the `experts` and replaces `run_experts`. Tensor parallelism replaces `enter` and
    `leave`, context parallelism `sum_loads`, with which samples get all their tokens' loads.
    """

    def __init__(self, model: "Mixtral", name: str) -> None:
        count = model.config.num_local_experts
        self.top_k = model.config.num_experts_per_tok
        self.gate = model.make_linear(model.config.n_embd, count, name=f"{name}.gate")
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

        The probabilities are a softmax over all experts. The weights are those of the k, divided by their sum.
        """
        logits = self.gate(x)  # (N, E)
        powers = (logits - logits.data.max(axis=-1, keepdims=True)).exp()
        probabilities = powers / powers.sum(-1, keepdims=True)
        scores = probabilities.data + from_host(self.bias)
        indices = xp.argsort(-scores, axis=-1, kind="stable")[:, : self.top_k]
        loads = np.zeros((samples, len(self.load)), np.int64)  # (B, E)
        by_sample = np.split(to_host(indices), samples) if samples else []
        for load, experts in zip(loads, by_sample, strict=True):
            load += np.bincount(experts.reshape(-1), minlength=len(load))
        probabilities = balanced(probabilities, self, loads)
        chosen = probabilities[xp.arange(len(indices))[:, None], indices]
        return indices, chosen / chosen.sum(-1, keepdims=True)

    def capacity(self, tokens: int) -> int:
        """Return the most rows that an expert takes of this many tokens: ceil(factor N k / E), or all N."""
        return ceil(min(tokens, (self.capacity_factor or np.inf) * tokens * self.top_k / len(self.load)))

    def compute(self, x: Tensor, indices: Array, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts, the most probable one's first: (N, h).

        With a capacity C each expert gets C rows: of the tokens in their order whose first choice it is, then of those
        whose second choice it is, and so on. What is beyond C counts as zero; the weights of a token's other experts
        stay, as in the Switch Transformer. Rows that are not used hold token 0, and nobody reads their results.
        """
        (n, k), experts = indices.shape, len(self.load)
        if self.capacity_factor is None:
            order = xp.argsort(indices.reshape(-1), kind="stable")  # of (token, slot): by expert and then by token
            counts = to_host(xp.bincount(indices.reshape(-1), minlength=experts))
            rows, places = order // k, xp.argsort(order).reshape(n, k)  # (N k,), (N, k)
        else:
            order = xp.argsort(indices.T.reshape(-1), kind="stable")  # of (slot, token): by expert, slot and token
            expert, room = indices.T.reshape(-1)[order], self.capacity(n)
            place = xp.arange(n * k) - xp.searchsorted(expert, expert)  # among the expert's
            kept, place = order[place < room], (expert * room + place)[place < room]
            rows, places, is_kept = (xp.zeros(size, dtype=int) for size in (experts * room, n * k, n * k))
            rows[place], places[kept], is_kept[kept] = kept % n, place, 1
            counts, places = np.full(experts, room), places.reshape(k, n).T  # (E,), (N, k)
            weights = weights * is_kept.reshape(k, n).T.astype(weights.dtype)
        results = self.run_experts(embedding(x, rows), counts)  # (N k or E C, h), one product per expert
        by_token = embedding(results, places)  # (N, k, h)
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
        self.input_layernorm = model.make_norm()
        self.post_attention_layernorm = model.make_norm()


class Mixtral(Llama):
    """The language model: tokens (B, T) -> logits (B, T, V). `options` are Llama's."""

    config_type = MixtralConfig
    block = MixtralBlock
