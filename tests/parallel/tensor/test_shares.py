"""Claims about tensor parallelism's plan: what a rank has of every parameter, and which gradients it sums once."""

from types import SimpleNamespace

import numpy as np
import pytest

from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import GPTConfig, LlamaConfig, MixtralConfig, Parameter
from minipar.parallel.placement import Partial, Placement, Replicate, Shard
from minipar.parallel.tensor.plan import TensorParallel, check_shape, kv_copies, tensor_parallel, tensor_placement

GPT = GPTConfig(vocab_size=13, n_positions=8, n_embd=24, n_layer=1, n_head=6)
LLAMA = LlamaConfig(13, 24, 28, 1, 12, 4)


def shown(config, rank, ranks, sequence=False, etp=None):
    """Return what a rank has of each parameter of a model of one block, by the parameter's name."""
    model = config.build(deferred=True)
    found = {}
    for name, p in model.named_parameters():
        placement = tensor_placement(name, p.shape, config.n_kv_head, rank, ranks, sequence, etp)
        found[name] = (str(placement), placement.rank, placement.ranks)
    return found


COLUMN = ("Shard(1)", 1, 3)
ROW = ("Shard(0)", 1, 3)


@pytest.mark.parametrize(("sequence", "kind"), [(False, "Replicate"), (True, "Partial")])
def test_a_rank_has_these_parts_of_a_gpt(sequence, kind):
    whole = (kind, 1, 3)
    assert shown(GPT, 1, 3, sequence) == {
        "wte.weight": ROW,
        "wpe.weight": whole,
        "h.0.ln_1.weight": whole,
        "h.0.ln_1.bias": whole,
        "h.0.attn.c_attn.weight": ("Shard(1, groups=3)", 1, 3),
        "h.0.attn.c_attn.bias": ("Shard(0, groups=3)", 1, 3),
        "h.0.attn.c_proj.weight": ROW,
        "h.0.attn.c_proj.bias": whole,
        "h.0.ln_2.weight": whole,
        "h.0.ln_2.bias": whole,
        "h.0.mlp.c_fc.weight": COLUMN,
        "h.0.mlp.c_fc.bias": ROW,
        "h.0.mlp.c_proj.weight": ROW,
        "h.0.mlp.c_proj.bias": whole,
        "ln_f.weight": whole,
        "ln_f.bias": whole,
    }


def test_a_rank_has_these_parts_of_a_llama():
    """Rank 5 of 8, where two ranks copy each head of keys and of values."""
    layer = "model.layers.0"
    first = ("Shard(0)", 5, 8)
    second = ("Shard(1)", 5, 8)
    copied = ("Shard(0, copies=2)", 2, 4)
    assert shown(LlamaConfig(16, 32, 24, 1, 8, 4), 5, 8) == {
        "model.embed_tokens.weight": first,
        f"{layer}.input_layernorm.weight": ("Replicate", 5, 8),
        f"{layer}.self_attn.q_proj.weight": first,
        f"{layer}.self_attn.k_proj.weight": copied,
        f"{layer}.self_attn.v_proj.weight": copied,
        f"{layer}.self_attn.o_proj.weight": second,
        f"{layer}.post_attention_layernorm.weight": ("Replicate", 5, 8),
        f"{layer}.mlp.gate_proj.weight": first,
        f"{layer}.mlp.up_proj.weight": first,
        f"{layer}.mlp.down_proj.weight": second,
        "model.norm.weight": ("Replicate", 5, 8),
        "lm_head.weight": first,
    }


@pytest.mark.parametrize(
    ("etp", "first", "second"),
    [
        (None, ("Shard(0)", 3, 4), ("Shard(1)", 3, 4)),
        (2, ("Shard(0)", 1, 2), ("Shard(1)", 1, 2)),
        (1, ("whole", 0, 1), ("whole", 0, 1)),
    ],
)
def test_a_rank_has_its_part_of_each_expert_and_the_whole_router(etp, first, second):
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    config = MixtralConfig(vocab_size=16, hidden_size=16, intermediate_size=12, **sizes)
    found = shown(config, 3, 4, etp=etp)
    experts = {name.split(".experts.")[1]: part for name, part in found.items() if ".experts." in name}
    assert experts == {
        "0.w1.weight": first,
        "0.w2.weight": second,
        "0.w3.weight": first,
        "1.w1.weight": first,
        "1.w2.weight": second,
        "1.w3.weight": first,
    }
    routers = [part for name, part in found.items() if name.endswith("gate.weight")]
    assert routers == [("Partial", 3, 4)]


def test_more_ranks_than_heads_of_keys_have_copies():
    assert [kv_copies(4, ranks) for ranks in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]


REFUSED = [
    (GPT, {"tp": 4}, "heads/tp = 6/4 is not a whole number: each tensor-parallel rank has whole heads"),
    (
        LLAMA,
        {"tp": 6},
        "tp/kv-heads = 6/4 is not a whole number: as many tensor-parallel ranks copy each head of k and v",
    ),
    (
        LLAMA,
        {"tp": 3},
        "kv-heads/tp = 4/3 is not a whole number: each tensor-parallel rank has whole heads of k and v, "
        "or copies of one",
    ),
    (
        LlamaConfig(13, 24, 30, 1, 12, 4),
        {"tp": 4},
        "ffn/tp = 30/4 is not a whole number: each tensor-parallel rank has whole columns",
    ),
    (
        LlamaConfig(13, 24, 30, 1, 12, 4),
        {"tp": 4, "etp": 4},
        "ffn/etp = 30/4 is not a whole number: each rank of etp has whole columns of an expert",
    ),
    (
        GPT,
        {"tp": 3, "tokens": 8},
        "tokens/tp = 8/3 is not a whole number: --sequence-parallel splits seq-len/cp evenly",
    ),
]


@pytest.mark.parametrize(("config", "sizes", "line"), REFUSED)
def test_a_size_that_does_not_divide_is_this_line(config, sizes, line):
    with pytest.raises(UsageError) as caught:
        check_shape(config, **sizes)
    assert str(caught.value) == line


def test_the_columns_of_an_expert_are_divided_by_etp_alone():
    check_shape(LlamaConfig(13, 24, 30, 1, 12, 4), 4, etp=2)
    check_shape(GPT, 2, tokens=0)


# ---- gradients that are terms of a sum -------------------------------------------------------------------------------


class SameGradients:
    """A group of ranks that all have the same gradients; it notes how many elements each sum has."""

    def __init__(self, size):
        self.size = size
        self.sums = []

    def sum(self, x):
        self.sums.append(x.size)
        return x * self.size


def parameters():
    """Return parameters of every placement, with gradients of ones; the last has none."""
    placements = [
        Replicate(0, 4),
        Partial(0, 4),
        Shard(0, 4, 0, 8),
        Shard(0, 2, 0, 8, copies=2),
        Partial(0, 4),
        Partial(0, 4),
    ]
    made = []
    for placement in placements:
        p = Parameter(np.zeros((2, 3)))
        p.placement = Placement("", (2, 3), placement)
        p.grad = np.ones((2, 3))
        made.append(p)
    made[-1].grad = None
    return made


def test_each_group_sums_its_terms_in_one_message():
    every = SameGradients(4)
    copies = SameGradients(2)
    given = parameters()
    *others, without = given
    gradients = [p.grad for p in others]
    TensorParallel(every, copies).sum_partial(given)
    assert (every.sums, copies.sums) == ([12], [6])
    assert [p.grad.tolist() for p in others] == [[[factor] * 3] * 2 for factor in (1.0, 4.0, 1.0, 2.0, 4.0)]
    assert all(p.grad is gradient for p, gradient in zip(others, gradients, strict=True)), "in place"
    assert without.grad is None


def test_a_step_sums_what_data_parallelism_has_not():
    group = SameGradients(4)
    tensor = TensorParallel(group)
    tensor.partial = parameters()
    optimizer = SimpleNamespace()
    tensor.sum_partial(tensor.partial)  # as data parallelism does
    tensor.before_step(optimizer, tensor.partial)
    assert group.sums == [12]
    for forget in (tensor.after_step, tensor.forget_gradients):
        forget()
        group.sums.clear()
        tensor.before_step(optimizer, tensor.partial)
        tensor.before_step(optimizer, tensor.partial)
        assert group.sums == [12]


def test_without_terms_nothing_is_sent():
    group = SameGradients(4)
    alone = SameGradients(1)
    TensorParallel(group).sum_partial(parameters()[2:4])
    TensorParallel(alone).sum_partial(parameters()[:3])
    assert group.sums == alone.sums == []


def names_of_terms(model, comm, **options):
    tensor = tensor_parallel(model, comm, **options)
    names = {p: name for name, p in model.named_parameters()}
    assert [p for p in names if tensor in p.owners] == tensor.partial
    return [names[p] for p in tensor.partial]


@pytest.mark.parametrize("sequence", [False, True])
def test_an_optimizer_sums_those_gradients_that_are_terms(sequence):
    def rank(comm):
        gpt = names_of_terms(GPT.build(), comm, sequence=sequence)
        llama = names_of_terms(LlamaConfig(16, 16, 12, 1, 4, 1).build(), comm)
        return gpt, llama

    norms = [f"h.0.{name}" for name in ("ln_1.weight", "ln_1.bias", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias")]
    whole = ["wpe.weight", *norms, "h.0.mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"]
    copied = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv"]
    assert run_local(2, rank) == [(whole if sequence else [], copied)] * 2
