"""Units of a model in closed form, beyond the papers' models: plain and gated MLPs, copies, and the ends."""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.errors import UsageError
from minipar.plan.cluster import GPUS, Assumptions, Cluster, fetch_seconds, gather_seconds
from minipar.plan.compute import unit_times
from minipar.plan.gpu_time import gpu_compute
from minipar.plan.layout import LLAMA_3, MEGATRON_2021, MINIPAR, NANOTRON, check_layout
from minipar.plan.model import ModelShape, find_model
from minipar.plan.rank_bytes import layer_activations, memory, rank_parameters

GPT2 = find_model("gpt2")
LLAMA = find_model("llama-2-70b")
MIXTRAL = find_model("mixtral-8x7b")
LENGTH = 1024
KEEPING = {"llama-3": LLAMA_3, "megatron-2021": MEGATRON_2021, "nanotron": NANOTRON}

# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_gated_mlp_with_biases_has_those_of_two_products():
    """It has f biases for gate and up each, and h for the way back. Here h is 8, f 12, V 10, with one head of keys."""
    model = ModelShape(1, 8, 2, 10, kv_heads=1, ffn=12, gated=True)
    attention = 8 * (8 + 2 * 4) + (8 + 2 * 4) + 8 * 8 + 8
    mlp = 3 * 8 * 12 + 2 * 12 + 8
    norms = 3 * 2 * 8
    assert model.parameters == 10 * 8 + attention + mlp + norms
    assert replace(model, biases=False).parameters == model.parameters - (16 + 8 + 2 * 12 + 8)
    assert replace(model, norm_biases=False).parameters == model.parameters - 3 * 8


@pytest.mark.parametrize(
    ("model", "qkv", "inner", "hidden"),
    [(LLAMA, 8192 + 2 * 1024, 28672, 8192), (MIXTRAL, 4096 + 2 * 1024, 2 * 14336, 4096)],
    ids=["llama", "mixtral"],
)
def test_column_layers_have_their_share_of_the_matrices(model, qkv, inner, hidden):
    """They are q, k and v, and the MLP's first two products, of as many experts as a token passes."""
    whole = qkv + 2 * inner + hidden + inner
    assert model.column_shares == (qkv / whole, 2 * inner / whole)


@pytest.mark.parametrize(("recompute", "core", "third"), [("none", 0, 0), ("selective", 1, 0), ("full", 0, 1)])
def test_operations_by_each_convention_are_exact(recompute, core, third):
    cores = 12 * 4 * LENGTH**2 * 768
    plain = 6 * LENGTH * 124_439_808
    with_attention = plain + 3 * cores
    assert GPT2.counted_flops(LENGTH, recompute) == {
        "6N": plain,
        "6N + attention": with_attention,
        "causal attention": plain + 3 * cores // 2,
        "with recompute": with_attention + core * cores + third * (with_attention // 3),
    }


def test_an_unknown_recomputation_is_refused():
    with pytest.raises(UsageError, match="^recompute all: expected one of none, selective, full$"):
        GPT2.hardware_flops(LENGTH, "all")


def test_a_rank_has_a_head_of_keys_at_least():
    assert [LLAMA.rank_heads(tp) for tp in (1, 2, 8, 16, 64)] == [(64, 8), (32, 4), (8, 1), (4, 1), (1, 1)]


def test_copies_give_each_rank_its_own_head_of_keys():
    assert [LLAMA.with_copies(tp).groups for tp in (1, 4, 8, 16, 64)] == [8, 8, 8, 16, 64]
    assert GPT2.with_copies(12) == GPT2
    assert GPT2.with_copies(24) == GPT2


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_plain_mlp_keeps_what_each_program_says():
    """Each of four programs keeps a multiple of h for each token, in 16 bits, with flash attention and without tp."""
    tokens = 2 * LENGTH * 768
    one = layout(attention="flash")
    kept = {name: layer_activations(GPT2, one, LENGTH, each.kept) / tokens for name, each in KEEPING.items()}
    # Both norms' inputs and more; q, k, v; attention's output; an MLP's product, once or more, of 4 h.
    assert kept == {"llama-3": 2 + 3 + 1 + 4, "megatron-2021": 5 + 3 + 1 + 8, "nanotron": 5 + 2 + 3 + 1 + 8}
    rows = 2 / 768  # two values for each token
    own = layer_activations(GPT2, one, LENGTH, MINIPAR.kept) / tokens
    assert own == pytest.approx(2 + 2 + rows + 3 + 1 + 12, rel=1e-12)


def test_a_gated_mlp_keeps_what_each_program_says():
    """It keeps multiples of h, queries and fewer keys, and two or four arrays of the MLP's inner size."""
    one = layout(attention="flash")
    qkv, hidden, inner = 8192 + 2 * 1024, 8192, 28672
    kept = {name: layer_activations(LLAMA, one, LENGTH, each.kept) for name, each in KEEPING.items()}
    elements = {
        "llama-3": 3 * hidden + 2 * inner,
        "megatron-2021": 6 * hidden + 4 * inner,
        "nanotron": 8 * hidden + 4 * inner,
    }
    assert kept == {name: 2 * LENGTH * (qkv + count) for name, count in elements.items()}


def test_the_libraries_buffers_are_held_beside_all_else():
    one = layout(dp=2, zero=1)
    none = memory(GPT2, one, LENGTH, replace(NANOTRON, overhead=0.0)).buffers
    assert memory(GPT2, one, LENGTH, NANOTRON).buffers == pytest.approx(none + 0.38e9, rel=1e-12)


def test_a_short_ring_finds_room_where_the_mlp_was():
    """What it holds for a moment is less than the MLP's activations, which backward has freed by then."""
    llama = find_model("llama-3-8b")
    tokens = 2 * 32
    logits = 2 * tokens * 4096 + 3 * tokens * 128256
    assert memory(llama, layout(cp=2, attention="flash"), 64).buffers == logits
    gathered = memory(llama, layout(cp=64, attention="flash", context_parallel="all-gather"), 64).buffers
    moment = 2 * (4 * 64 * 1024) - 2 * 4 * 14336
    assert gathered == logits / 32 + moment
    halves = memory(llama, layout(cp=64, tp=2, attention="flash", context_parallel="all-gather"), 64).buffers
    assert halves == 2 * 2 * 4096 + 3 * 2 * 128256 / 2 + moment / 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_second_copy_of_gradients_is_sharded_with_them(zero):
    one = layout(dp=4, zero=zero)
    copied = memory(GPT2, one, LENGTH, MEGATRON_2021).gradients - memory(GPT2, one, LENGTH).gradients
    assert copied == 4 * rank_parameters(GPT2, one) / (4 if zero >= 2 else 1)


# ---- the ends, and sums over tp --------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_ends_send_their_own_parameters_and_no_more(pp, zero):
    """Without a pipeline, those of both ends travel together. None of them are summed over tp."""
    cluster = a100s(16)
    one = layout(dp=4, tp=2, pp=pp, microbatches=2, zero=zero)
    units = unit_times(GPT2, one, cluster, LENGTH)
    table = 50257 * 768 // 2
    norm = 2 * 768
    first = table + 1024 * 768 + (norm if pp == 1 else 0)
    gathered = fetch_seconds(cluster, first * 2, 2, 4)
    reduced = gather_seconds(cluster, first * 2, 2, 4)
    ends = units.embedding
    assert ends.gather == pytest.approx(gathered if zero == 3 else 0, rel=1e-12)
    assert ends.refresh == pytest.approx(gathered if zero in (1, 2) else 0, rel=1e-12)
    assert ends.reduce == pytest.approx(reduced if zero else 2 * reduced, rel=1e-12)
    head = gather_seconds(cluster, norm * 2, 2, 4) if pp == 2 else 0.0
    assert units.head.reduce == pytest.approx(head if zero else 2 * head, rel=1e-12)
    for unit in (units.embedding, units.layer, units.head):
        assert (unit.partial, unit.across, unit.cp, unit.ep) == (0, 0, 0, 0)


def test_a_router_is_summed_over_tp_in_any_case():
    cluster = a100s(8)
    summed = 2 * gather_seconds(cluster, 4096 * 8 * 2, 1, 4)
    assert unit_times(MIXTRAL, layout(dp=2, tp=4), cluster, LENGTH).layer.partial == pytest.approx(summed, rel=1e-12)


def test_ranks_with_copies_of_a_head_are_neighbours():
    """With 2 heads of keys on 8 ranks, 4 in a host, a sum over 4 copies stays inside."""
    cluster = Cluster(GPUS["a100"], 8, 4)
    model = replace(find_model("llama-3-8b"), kv_heads=2)
    partial = unit_times(model, layout(tp=8), cluster, LENGTH).layer.partial
    elements = 2 * 4096 * 128
    expected = 2 * (3 * cluster.inside.alpha + elements * 2 * 3 / 4 * cluster.inside.beta)
    assert partial == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 1), ("full", 4 / 3)])
def test_full_recomputation_launches_forward_once_more(recompute, times):
    """A host that is slower than the GPU launches three passes of as many kernels, or four."""
    slow = Cluster(GPUS["a100"], 2, 2, Assumptions(host_layer=3.0, host_ends=5.0))
    units = unit_times(GPT2, layout(dp=2, recompute=recompute), slow, LENGTH)
    assert units.layer.seconds == pytest.approx(3.0 * times, rel=1e-12)
    assert units.head.seconds == pytest.approx(5.0, rel=1e-12)
    quick = unit_times(GPT2, layout(dp=2, recompute=recompute), Cluster(GPUS["a100"], 2, 2), LENGTH)
    assert units.layer.forward / units.layer.seconds == pytest.approx(quick.layer.forward / quick.layer.seconds)
    assert units.layer.backward_weight / units.layer.backward_input == pytest.approx(
        quick.layer.backward_weight / quick.layer.backward_input
    )


def test_each_expert_has_two_products_of_its_own():
    """Each product takes the time of `half_work` more. A layer has two of attention, and two of each of 4 experts."""
    one = layout(dp=2, ep=2, attention="flash")
    cluster = a100s(2)
    more_work = replace(cluster.assumptions, half_work=cluster.assumptions.half_work + 1e12)
    seconds = gpu_compute(MIXTRAL, one, LENGTH, 0, cluster).backward_weight
    slower = gpu_compute(MIXTRAL, one, LENGTH, 0, replace(cluster, assumptions=more_work)).backward_weight
    assert slower - seconds == pytest.approx((2 + 2 * 4) * 1e12 / cluster.product_rate, rel=1e-9)


# ---- a layout's equations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 4, "ep": 8, "etp": 2, "dp": 2}, r"^dp\*cp\*tp/\(ep\*etp\) = 8/16 is not a whole number: edp\*ep\*etp"),
        ({"tp": 2, "cp": 3, "ep": 4, "dp": 1}, r"^dp\*cp\*tp/\(ep\*etp\) = 6/8 is not a whole number"),
        ({"tp": 5, "dp": 1}, "^tp 5 does not divide 32 heads, 8 of keys and values$"),
        ({"pp": 33, "dp": 1}, "^pp 33, but the model has 32 layers$"),
        ({"microbatch": 0, "dp": 1}, "^microbatch 0: expected at least 1$"),
    ],
)
def test_an_equation_that_does_not_hold_is_shown(given, words):
    one = layout(sequence_parallel=True, **given)
    with pytest.raises(UsageError, match=words):
        check_layout(MIXTRAL, one, one.gpus, one.samples, 3072)


@pytest.mark.parametrize(
    "given",
    [
        {"dp": 2, "cp": 2, "tp": 2, "ep": 8, "etp": 1},
        {"dp": 4, "cp": 2, "tp": 4, "ep": 8, "etp": 4},
        {"dp": 4, "ep": 4, "zero": 3},
        {"dp": 8, "zero": 1, "zero_replicas": 8},
        {"pp": 32},
    ],
)
def test_an_equation_that_holds_is_accepted(given):
    one = layout(sequence_parallel=True, **given)
    check_layout(MIXTRAL, one, one.gpus, one.samples, 4096)
