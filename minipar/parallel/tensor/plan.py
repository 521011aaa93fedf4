"""The plan of tensor parallelism: a table of the layers that are split, and what applies it.

A transformer layer is two pairs of products. The first product of a pair is split by columns, the
second by rows. The operation between them (the heads' attention, the MLP's GELU or SwiGLU) works on
a rank's own columns, so the only communication of forward is one sum at the end of each pair
(Shoeybi et al. 2019, section 3). With sequence parallelism a pair begins with an all-gather, and
its sum is a reduce-scatter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from minipar.backend import Array, xp
from minipar.comm.communicator import Communicator
from minipar.errors import UsageError, check_divides
from minipar.nn.gpt import LanguageModel, SelfAttention
from minipar.nn.module import Module
from minipar.nn.parameter import Owner, Parameter
from minipar.parallel import placement
from minipar.parallel.agreement import check_parameters_alike
from minipar.parallel.placement import Partial, Replicate, Shard, TensorPlacement, placement_of
from minipar.parallel.split_guards import check_split, note_split
from minipar.parallel.tensor import layers, vocabulary
from minipar.parallel.tensor.layers import Border, ColumnLinear, RowLinear, VocabEmbedding
from minipar.parallel.tensor.mappings import TensorGroup


@dataclass(frozen=True)
class Split:
    """The way in which a layer is split, and the class that replaces the serial one.

    The weight is split along `dim`; it is whole if `dim` is None. Each of the `groups` equal
    stretches of `dim` is split by itself. Of a layer that `adds_terms` each rank computes a term of
    the gradient. `layer(serial, border)` makes the parallel layer; None if the serial one stays.
    """

    dim: int | None
    groups: int
    layer: Callable[..., Module] | None
    splits_bias: bool = False
    adds_terms: bool = False


Plan = Mapping[str, Split]

# GPT-2's plan. The keys are the last parts of the layers' names, and the matrices are (in, out). The
# bias of a column layer is split as its columns are, and the bias of a row layer is whole. c_attn
# holds the columns of q, of k and of v next to each other. Each of the three is split by itself, so
# that a rank gets whole heads. Another model brings its own plan, as `tensor_plan`.
PLAN = {
    "wte": Split(0, 1, VocabEmbedding),
    "wpe": Split(None, 1, layers.PositionEmbedding),
    "c_attn": Split(1, 3, ColumnLinear, splits_bias=True),
    "c_fc": Split(1, 1, ColumnLinear, splits_bias=True),
    "c_proj": Split(0, 1, RowLinear),
}


def plan_of(model: Module) -> Plan:
    """Return the model's own plan, if it has one, else GPT-2's."""
    return getattr(model, "tensor_plan", PLAN)


def tensor_placement(
    plan: Plan, name: str, shape: Sequence[int], rank: int, ranks: int, sequence: bool
) -> TensorPlacement:
    """Return what tensor parallelism does to the serial model's parameter of this name and shape.

    A rank has a part of a Shard. It has the whole of a Partial or a Replicate. The ranks' gradients
    of a Partial are terms of a sum. Those of a Replicate are equal.
    """
    layer, kind = name.split(".")[-2:]  # such as c_attn and weight
    split = plan.get(layer)
    if split is not None:
        dim = split.dim
        if kind == "bias":
            dim = 0 if split.splits_bias else None
        if dim is not None:
            return Shard(rank, ranks, dim, shape[dim], split.groups)
    if sequence or (split is not None and split.adds_terms):
        return Partial(rank, ranks)
    return Replicate(rank, ranks)


class TensorParallel(Owner):
    """The group over which a model is split, and the sum of gradients of which each rank has a term.

    A step sums these gradients one time. Data parallelism does so if it was given
    `before_reduce=tensor.sum_partial`. Otherwise the optimizer that holds the parameters does so
    when it steps.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.partial: list[Parameter] = []
        self.is_summed = False  # whether this step has summed them

    def check_sum(self, parameters: Sequence[Parameter], group: Communicator, is_complete: bool) -> None:
        """Raise UsageError if data parallelism would sum a gradient before its terms are added over tp."""
        if not is_complete:
            name = placement_of(self.partial[0]).name
            raise UsageError(
                f"the gradient of {name} covers a part of the tokens, columns or heads on each rank of "
                "tp: write tensor = mp.tensor_parallel(...), then "
                "mp.shard(..., before_reduce=tensor.sum_partial)"
            )

    def before_step(self, parameters: Sequence[Parameter]) -> None:
        """Sum these gradients over the ranks, unless data parallelism has done so before."""
        if not self.is_summed:
            self.sum_partial(self.partial)

    def after_step(self) -> None:
        self.is_summed = False

    def forget_gradients(self) -> None:
        self.is_summed = False

    def sum_partial(self, parameters: Sequence[Parameter]) -> None:
        """Sum those gradients of these parameters of which each rank has a term, each in place.

        With sequence parallelism a rank's gradient of a LayerNorm or a row bias covers only its own
        tokens, and a router's gradient always covers only its own columns of the experts. Both are
        summed over tp. Sends one all-reduce of these gradients' elements.
        """
        self.is_summed = True
        gradients = []
        for p in parameters:
            if isinstance(placement_of(p).tp, Partial) and p.grad is not None:
                gradients.append(p.grad)
        if gradients:
            sum_together(self.group, gradients)


def sum_together(group: TensorGroup, gradients: Sequence[Array]) -> None:
    """Sum these arrays over the ranks, each in place, by one all-reduce."""
    total = group.sum(xp.concatenate([gradient.reshape(-1) for gradient in gradients]))
    offset = 0
    for gradient in gradients:
        summed = total[offset : offset + gradient.size]
        gradient[...] = summed.reshape(gradient.shape)
        offset += gradient.size


def tensor_parallel(
    model: LanguageModel,
    comm: Communicator,
    reduction: str = "ring",
    sequence: bool = False,
    *,
    plan: Plan | None = None,
) -> TensorParallel:
    """Split `model` over `comm` by the plan (default: the model's own), in place.

    Parameters keep their names and become this rank's part of their values. UsageError if tp does
    not divide the heads (of keys), if the model has dropout, or if the ranks' models have different
    values; sends a checksum of each parameter as control data. Sums travel in float32 at least, in
    the order `reduction`.

    A rank sends 8 B T h (t-1)/t elements per layer and microbatch: 2 all-reduces in forward and 2
    in backward or, with `sequence`, 2 all-gathers and 2 reduce-scatters in each. The embedding and
    the head add 2 B T h (t-1)/t each. The loss all-reduces B T and then 2 B T elements.
    """
    check_split(model, "tensor_parallel", comm)
    reason = "each tensor-parallel rank has whole heads"
    check_divides("heads/tp", model.config.n_kv_head, comm.size, reason)
    placement.attach_placements(model)
    what = "tensor_parallel: the ranks' models start from different values"
    check_parameters_alike(
        comm, model.parameters(), what, "give all ranks the same seed, and load the same state"
    )
    note_split(model, "tensor_parallel", comm)
    if plan is None:
        plan = plan_of(model)
    group = TensorGroup(comm, reduction)
    tensor = TensorParallel(group)
    for name, p in model.named_parameters():
        if comm.size == 1:
            break  # the layers are those of several ranks, but nothing is split
        own = tensor_placement(plan, name, p.shape, comm.rank, comm.size, sequence)
        if isinstance(own, Shard):
            layers.shard_parameter(p, own)
        else:
            placement.update(p, tp=own)
        if isinstance(own, Partial):
            p.owners.append(tensor)
            tensor.partial.append(p)
    border = Border(group, sequence)
    replace_layers(model, plan, border)
    fill_seams(model, border)
    return tensor


def replace_layers(model: LanguageModel, plan: Plan, border: Border) -> None:
    """Replace the serial layers of the plan by parallel ones, which hold the same Parameters."""
    for name, layer in list(model.named_modules()):
        split = plan.get(name.split(".")[-1])
        if split is not None and split.layer is not None:
            model.set_submodule(name, split.layer(layer, border))


def fill_seams(model: LanguageModel, border: Border) -> None:
    """Give the model's seams what tensor parallelism does there; gpt.py lists them."""
    group = border.group
    size = model.config.vocab_size
    model.project = partial(vocabulary.vocab_parallel_head, vocab_size=size, border=border)
    loss = vocabulary.vocab_parallel_cross_entropy_sum
    model.criterion = partial(loss, group=group, vocab_size=size)
    for _, module in model.named_modules():
        if hasattr(module, "enter"):  # a block that crosses the border for several of its layers
            module.enter = border.enter
        if hasattr(module, "leave"):
            module.leave = border.leave
        if isinstance(module, SelfAttention):
            module.heads //= group.size
            module.kv_heads //= group.size
