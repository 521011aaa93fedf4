"""Mixtral (Jiang et al. 2024, arXiv 2401.04088), as Hugging Face's MixtralForCausalLM: function and files.

A Llama in which each layer has E MLPs, the experts, and a router that sends each token to k of
them. A token's result is their mean, weighted by the router's probabilities. No token is dropped.
Shapes: N = B T tokens, M rows that this rank's experts multiply: N k, or what other ranks send
(expert parallelism). An assignment is a (token, slot): a token and one of its k experts.

Seams of the core: those of Llama. A layer of experts has some of its own (`MoE`).
"""

# What is a field of one config is a property of another.
# mypy: disable-error-code="override"

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minipar.autograd.fused import concatenate, embedding
from minipar.autograd.rules import Gradients
from minipar.autograd.tensor import Function, Tensor
from minipar.backend import Array, from_host, to_host, xp
from minipar.comm.communicator import Communicator
from minipar.more.llama import PLAN as LLAMA_PLAN
from minipar.more.llama import (
    Attention,
    Inside,
    Llama,
    LlamaConfig,
    identity,
    inside_columns,
    norm_of,
    projection,
    swiglu,
)  # fmt: skip
from minipar.nn.layers import Linear
from minipar.nn.module import Module
from minipar.parallel.tensor.layers import Border, RowLinear
from minipar.parallel.tensor.plan import Split


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
    output_router_logits: bool = False  # whether training adds the auxiliary loss
    router_aux_loss_coef: float = 0.001

    model_type = "mixtral"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.num_local_experts:
            k = self.num_experts_per_tok
            raise ValueError(f"top-k {k} is more than experts {self.num_local_experts}")

    @property
    def aux_coefficient(self) -> float:
        return self.router_aux_loss_coef if self.output_router_logits else 0.0

    @property
    def layer_matrices(self) -> int:
        # Attention's, the router's h E elements, and 3 h f in each of k experts.
        experts = 3 * (self.num_experts_per_tok - 1) * self.n_inner  # Llama counts one
        return super().layer_matrices + self.n_embd * (experts + self.num_local_experts)

    def build(self, **options: Any) -> "Mixtral":
        return Mixtral(self, **options)


class Expert(Module):
    """One expert, a gated MLP: (M, h) -> (M, f) -> (M, h).

    w1 is the gate, w3 the up and w2 the down projection.
    """

    def __init__(self, model: "Mixtral", name: str) -> None:
        h = model.config.n_embd
        f = model.config.n_inner
        self.w1 = projection(model, h, f, f"{name}.w1")
        self.w2 = projection(model, f, h, f"{name}.w2")
        self.w3 = projection(model, h, f, f"{name}.w3")

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class Balance(Function):
    """The identity on a router's probabilities (N, E), whose backward balances the experts.

    Backward adds the auxiliary loss's gradient. A forward may be run for evaluation, or twice
    (recompute); the backward of a batch runs once.
    NB: Megatron's MoEAuxLossAutoScaler also adds the gradient in backward.
    """

    def forward(self, probabilities: Array, layer: "MoE", loads: np.ndarray) -> Array:
        self.layer = layer
        if self.needs[0]:
            self.save_for_backward(loads=loads)
        return probabilities

    def backward(self, grad: Array, loads: np.ndarray) -> Gradients:
        layer = self.layer
        if layer.token_comm is not None:
            loads = layer.token_comm.all_reduce(loads, algorithm="ordered")
        auxiliary = auxiliary_gradient(loads, len(grad), layer.aux_loss)
        return grad + from_host(auxiliary.astype(grad.dtype)), None, None


def auxiliary_gradient(loads: np.ndarray, tokens: int, coefficient: float) -> np.ndarray:
    """Return `coefficient` times the auxiliary loss's gradient: loads (B, E) -> (N, E).

    A sample's auxiliary loss in a layer is E sum_e f_e P_e (Fedus et al. 2021, arXiv 2101.03961):
    f_e is the share of its T k assignments that expert e gets, a constant, and P_e the mean of its
    T tokens' probabilities. A token's gradient is therefore E f_e / T; the 1/T is in `coefficient`.
    """
    samples, experts = loads.shape
    f = loads / loads.sum(axis=1, keepdims=True)
    by_token = f.repeat(tokens // max(samples, 1), axis=0)  # (N, E)
    return coefficient * experts * by_token


def count_loads(indices: Array, samples: int, experts: int) -> np.ndarray:
    """Count the assignments of each of B samples to each of E experts: indices (N, k) -> (B, E)."""
    loads = np.zeros((samples, experts), np.int64)
    if samples:
        for load, chosen in zip(loads, np.split(to_host(indices), samples), strict=True):
            load += np.bincount(chosen.reshape(-1), minlength=experts)
    return loads


class MoE(Module):
    """A layer of experts: (B, T, h) -> (B, T, h).

    `aux_loss` is the auxiliary loss's coefficient in the mean loss / (layers x tokens of the global
    batch). It counts each sample's assignments: `token_comm` are the ranks that share its tokens, if
    several do.

    Expert parallelism keeps some of the `experts` and replaces `run_experts`. Tensor parallelism
    replaces `enter` and `leave`.
    """

    def __init__(self, model: "Mixtral", name: str) -> None:
        self.num_experts = model.config.num_local_experts  # E, of which this rank may hold some
        self.top_k = model.config.num_experts_per_tok
        self.gate = projection(model, model.config.n_embd, self.num_experts, f"{name}.gate")
        self.experts = [Expert(model, f"{name}.experts.{e}") for e in range(self.num_experts)]
        self.enter: Callable[[Tensor], Tensor] = identity
        self.leave: Callable[[Tensor], Tensor] = identity
        self.aux_loss = 0.0
        self.token_comm: Communicator | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)  # the router and the experts read it
        tokens = x.reshape(-1, x.shape[-1])  # (N, h)
        indices, weights = self.route(tokens, x.shape[0])
        return self.leave(self.compute(tokens, indices, weights).reshape(*x.shape))

    def route(self, x: Tensor, samples: int = 1) -> tuple[Array, Tensor]:
        """Return each token's k most probable experts and their weights; both (N, k).

        Of equally probable ones the first comes first. The probabilities are a softmax over all
        experts. The weights are those of the k, divided by their sum.
        """
        logits = self.gate(x)  # (N, E)
        powers = (logits - logits.data.max(axis=-1, keepdims=True)).exp()
        probabilities = powers / powers.sum(-1, keepdims=True)
        indices = xp.argsort(-probabilities.data, axis=-1, kind="stable")[:, : self.top_k]
        if self.aux_loss:
            loads = count_loads(indices, samples, self.num_experts)
            probabilities = Balance.apply(probabilities, self, loads)
        token = xp.arange(len(indices))[:, None]
        chosen = probabilities[token, indices]
        return indices, chosen / chosen.sum(-1, keepdims=True)

    def compute(self, x: Tensor, indices: Array, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts: (N, h).

        The most probable expert's comes first.
        """
        n, k = indices.shape
        # Each assignment gets a row, sorted by expert and then by token.
        chosen = indices.reshape(-1)  # (N k,)
        assignment = xp.argsort(chosen, kind="stable")  # the one in each row
        counts = to_host(xp.bincount(chosen, minlength=self.num_experts))  # (E,)
        row_of = xp.argsort(assignment).reshape(n, k)
        # The rows (M, h) have no name here, so that they are freed when the experts have run.
        results = self.run_experts(embedding(x, assignment // k), counts)  # (M, h)
        by_token = embedding(results, row_of)  # (N, k, h)
        return (by_token * weights.reshape(n, k, 1)).sum(1)

    def run_experts(self, xs: Tensor, counts: np.ndarray) -> Tensor:
        """Run expert e on its counts[e] rows of xs (M, h), which are sorted by expert: (M, h).

        An expert without rows gets a gradient of zeros, so that its weights decay like all others.
        """
        results = []
        for expert, stop, count in zip(self.experts, np.cumsum(counts), counts, strict=True):
            results.append(expert(xs[stop - count : stop]))
        return concatenate(results)


def moe_layers(model: Module) -> list[Any]:
    """List a model's layers of experts."""
    return [module for _, module in model.named_modules() if isinstance(module, MoE)]


def scale_auxiliary_loss(model: Any, factor: float, token_comm: Communicator | None = None) -> None:
    """Let the passes from now on add the model's auxiliary loss, the mean over its layers, times `factor`.

    The ranks of `token_comm` share the tokens of each sample (`mesh.cp`). Then each layer sums B E
    counts over them in backward. A model without experts has no such loss.
    """
    moes = moe_layers(model)
    for moe in moes:
        moe.aux_loss = model.config.aux_coefficient * factor / len(moes)
        moe.token_comm = token_comm


class MixtralBlock(Module):
    """Llama's layer with experts in the place of its MLP."""

    def __init__(self, model: "Mixtral", name: str) -> None:
        self.self_attn = Attention(model, f"{name}.self_attn")
        self.block_sparse_moe = MoE(model, f"{name}.block_sparse_moe")
        self.input_layernorm = norm_of(model)
        self.post_attention_layernorm = norm_of(model)

    @property
    def mlp(self) -> MoE:
        return self.block_sparse_moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def inside_rows(layer: Linear, border: Border) -> RowLinear:
    """Make a rank's rows of a layer whose block leaves for it."""
    return RowLinear(layer, Inside(border.group))


# The router, `gate`, is whole on every rank, but its gradient comes from this rank's part of the experts' results, or
# from its own tokens. The experts themselves do not leave: the results of a token's k experts are added up on each rank
# first, and then the ranks' results are summed, by MoE's `leave`.
PLAN = LLAMA_PLAN | {
    "gate": Split(None, 1, None, adds_terms=True),
    "w1": Split(0, 1, inside_columns),
    "w3": Split(0, 1, inside_columns),
    "w2": Split(1, 1, inside_rows),
}


class Mixtral(Llama):
    """The language model: tokens (B, T) -> logits (B, T, V). The arguments are Llama's."""

    config: MixtralConfig
    tensor_plan = PLAN

    def make_block(self, name: str) -> MixtralBlock:
        return MixtralBlock(self, name)
