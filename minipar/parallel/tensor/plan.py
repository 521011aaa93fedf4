"""The plan of tensor parallelism: tables of the parameters to split and the layers to replace, and what applies them.

A transformer layer is two pairs of products. The first product of a pair is split by columns, the second by rows. The
operation between them (the heads' attention, the MLP's GELU or SwiGLU) works on a rank's own columns, so the only
communication of forward is one sum at the end of each pair (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from minipar.backend import xp
from minipar.comm.communicator import Communicator
from minipar.errors import check_divides
from minipar.nn.layers import Dropout, MaskSlice
from minipar.nn.module import Owner, Parameter
from minipar.nn.transformer import LanguageModel, TransformerConfig
from minipar.parallel.placement import Partial, Replicate, place, placement_of, update
from minipar.parallel.tensor import layers
from minipar.parallel.tensor.mappings import TensorGroup

# (dim, groups) of the parameters that are split, by the end of their names. GPT-2's matrices are (in, out), Llama's and
# Mixtral's (out, in). c_attn holds the columns of q, k and v next to each other. Each of the three is split, so that a
# rank gets whole heads.
PLAN = {
    "wte.weight": (0, 1),  # vocabulary
    "c_attn.weight": (1, 3),  # columns
    "c_attn.bias": (0, 3),
    "c_fc.weight": (1, 1),
    "c_fc.bias": (0, 1),
    "c_proj.weight": (0, 1),  # rows
    **dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (0, 1)),  # vocabulary
    **{f"{name}.weight": (0, 1) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")},
    **dict.fromkeys(("o_proj.weight", "down_proj.weight", "w2.weight"), (1, 1)),  # rows
}
ROUTER = "gate.weight"  # whole; but its gradient comes from this rank's part of the experts' results
# The layers that communicate, by what they replace. Several layers of Llama take a norm's result into the part where
# ranks differ. The norm copies or gathers it once for all of them, so the column layers stay serial ones.
LAYERS: dict[str, Any] = {
    **dict.fromkeys(("wte", "embed_tokens"), layers.VocabParallelEmbedding),
    "wpe": layers.SequenceEmbedding,
    **dict.fromkeys(("c_attn", "c_fc"), layers.ColumnParallelLinear),
    **dict.fromkeys(("c_proj", "o_proj", "down_proj"), layers.RowParallelLinear),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), layers.EnteringNorm),
}


class TensorParallel(Owner):
    """The group over which `tensor_parallel` has split a model, and the sum of its Partial gradients.

    It owns the Partial parameters, so that an optimizer's step sums their gradients first. A data-parallel wrapper that
    is applied to the model afterwards calls `sum_partial` before it reduces a bucket instead.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.partial: list[Parameter] = []

    def before_step(self) -> None:
        """Sum the Partial gradients over the ranks."""
        self.sum_partial(self.partial)

    def sum_partial(self, parameters: Sequence[Parameter]) -> None:
        """Sum the gradients of the Partial parameters among these over the ranks, each in place.

        With sequence parallelism a rank's gradient of a LayerNorm or a row bias covers only its own tokens, and a
        router's always only its own columns of the experts. Sends one all-reduce over tp of these parameters' elements.
        """
        gradients = [p.grad for p in parameters if isinstance(placement_of(p).tp, Partial) and p.grad is not None]
        if gradients:
            total = self.group.sum(xp.concatenate([gradient.reshape(-1) for gradient in gradients]))
            stop = 0
            for gradient in gradients:
                start, stop = stop, stop + gradient.size
                gradient[...] = total[start:stop].reshape(gradient.shape)


def check_shape(model: TransformerConfig, tp: int, tokens: int | None = None) -> None:
    """Raise UsageError if tp does not divide the heads, the MLP's columns, or the tokens of a sequence if given."""
    check_divides("heads/tp", model.n_head, tp, "each tensor-parallel rank has whole heads")
    check_divides("kv-heads/tp", model.n_kv_head, tp, "each tensor-parallel rank has whole heads of k and v")
    check_divides("ffn/tp", model.n_inner, tp, "each tensor-parallel rank has whole columns")
    if tokens is not None:
        check_divides("tokens/tp", tokens, tp, "--sequence-parallel splits seq-len/cp evenly")


def tensor_parallel(
    model: LanguageModel, comm: Communicator, reduction: str = "ring", sequence: bool = False, reduce_dtype: Any = None
) -> TensorParallel:
    """Split `model` over `comm` by the plan, in place.

    Parameters keep their names and become this rank's part of their values. UsageError if tp does not divide the heads.

    Sums travel in `reduce_dtype` (default: float32 at least).
    Sends per layer and microbatch 8 B T h (t-1)/t elements per rank: 4 all-reduces, or with `sequence` 4 all-gathers
    and 4 reduce-scatters. Embedding and head add 2 B T h (t-1)/t each; the loss all-reduces B T and 2 B T elements.
    """
    check_shape(model.config, comm.size)
    place(model)
    group = TensorGroup(comm, reduction, model.dtype, reduce_dtype)
    tensor = TensorParallel(group)
    for name, p in model.named_parameters():
        name = ".".join(name.split(".")[-2:])
        if name in PLAN:
            dim, groups = PLAN[name]
            layers.split(p, group.shard(dim, p.shape[dim], groups))
        elif sequence or name == ROUTER:
            update(p, tp=Partial(comm.rank, comm.size))
            p.owner = tensor
            tensor.partial.append(p)
        else:
            update(p, tp=Replicate(comm.rank, comm.size))
    size = model.config.vocab_size
    model.project = partial(layers.vocab_parallel_head, vocab_size=size, group=group, sequence=sequence)
    model.criterion = partial(layers.vocab_parallel_cross_entropy_sum, group=group)
    modules: dict[str, Any] = dict(model.named_modules())
    for name, module in modules.items():
        parent, _, attribute = name.rpartition(".")
        if attribute in LAYERS:
            setattr(modules[parent], attribute, LAYERS[attribute].from_serial(module, group, sequence))
        elif isinstance(module, Dropout) and (sequence or attribute == "attn_dropout"):
            # Of (B, heads, T, T) or (B, T, h). With context parallelism the T are a rank's, so this cut comes last.
            module.mask_slices.append(MaskSlice(1, group.size, partial(group.part, dim=0)))
        elif hasattr(module, "experts"):  # sums the ranks' results after each token's k, which are k times as many
            module.leave = partial(layers.leave, group=group, sequence=sequence)
        elif hasattr(module, "kv_heads"):
            module.heads //= group.size
            module.kv_heads //= group.size
    return tensor
