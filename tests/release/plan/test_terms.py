"""Terms of the planner's memory and seconds that few layouts have, each by itself in closed form.

Messages have no latency on `wires`: a collective takes its bytes' time.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
from plan.test_compute import GPT3
from plan.test_step_time import GPT2, LENGTH, stages, wires
from planning import a100s, layout

from minipar.more.context.token_order import METHODS
from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import make
from minipar.plan.cluster import GPUS, Cluster, gather_seconds
from minipar.plan.compute import expert_seconds, ring_seconds, unit_times
from minipar.plan.layout import MEGATRON, MINIPAR
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import (
    context_buffer,
    in_flight,
    in_flight_last,
    layer_activations,
    memory,
    rank_buckets,
    volume,
)
from minipar.plan.space import SearchSpace, layouts
from minipar.plan.stages import hop_seconds
from minipar.plan.step_time import step_time, tied_seconds

LLAMA, MIXTRAL, B7 = find_model("llama-3-8b"), find_model("mixtral-8x7b"), find_model("megatron-7.5b")
LONG = 131_072


@pytest.mark.parametrize("zero", [1, 3])
def test_over_slow_cards_a_step_takes_its_sums_over_replicas(zero):
    """Each replica of the shards is in one host, so that nothing else goes over the cards."""
    fast = wires()
    cluster = replace(fast, per_host=2, gpu=replace(fast.gpu, between=fast.gpu.inside / 1e6))
    one = layout(dp=8, zero=zero, zero_replicas=4, microbatches=3)
    rank = stages(GPT2, one, cluster)
    summed = 3 if rank.reduces_each_microbatch else 1
    across = summed * sum(unit.across for unit in rank.units_of(0))
    assert step_time(GPT2, one, cluster, LENGTH).total == pytest.approx(across, rel=1e-2)


def test_the_gradients_of_copied_heads_are_summed():
    """With 2 heads of keys on 8 ranks, 4 ranks have copies of one: of keys and of values, h x h/a elements each."""
    model = replace(find_model("llama-3-8b"), kv_heads=2)
    one = layout(tp=8)
    cluster = wires(8)
    elements = 2 * model.hidden * (model.hidden // model.heads)
    summed = 2 * gather_seconds(cluster, elements * one.precision.gradients, 1, 4)
    assert unit_times(model, one, cluster, LENGTH).layer.partial == pytest.approx(summed, rel=1e-12)
    assert unit_times(replace(model, kv_heads=8), one, cluster, LENGTH).layer.partial == 0


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_pp_has_messages_and_the_tied_embedding(zero):
    """Two blocking messages of each microbatch; in minipar ZeRO-3 gathers the updated embedding to send it back."""
    one = layout(dp=4, pp=2, microbatches=4, zero=zero)
    for framework in (MEGATRON, MINIPAR):
        cluster = wires(framework=framework)
        hop, tied = hop_seconds(GPT2, one, cluster, LENGTH), tied_seconds(GPT2, one, cluster)
        table = unit_times(GPT2, one, cluster, LENGTH).embedding.gather
        more = 4 * 2 * hop if framework is MEGATRON else table
        assert step_time(GPT2, one, cluster, LENGTH).pp == pytest.approx(tied + more, rel=1e-12)


def test_a_ring_whose_last_host_is_not_full():
    cluster, n = Cluster(replace(GPUS["a100"], inside=1e9), 24, 4), 1e6
    inside, between = cluster.inside, cluster.between
    six = gather_seconds(cluster, n, 1, 6)  # four and two
    assert six == pytest.approx(4 * inside.alpha + between.alpha + n * 5 / 6 * inside.beta, rel=1e-12)
    assert gather_seconds(cluster, n, 4, 6) == pytest.approx(5 * between.alpha + n * 5 / 6 * between.beta, rel=1e-12)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_interleaved_stages_hold_what_the_schedule_holds(v):
    """The first rank holds most and the last least, also where each rank has a single stage."""
    one = layout(pp=4, microbatches=16, schedule="interleaved-1f1b", virtual_stages=v)
    live = [peak_live(actions) for actions in make("interleaved-1f1b", 4, 16, v).ranks]
    assert (in_flight(one) * v, in_flight_last(one) * v) == (live[0], live[-1])
    few = layout(pp=4, microbatches=2, schedule="interleaved-1f1b", virtual_stages=v)
    assert (in_flight(few), in_flight_last(few)) == (2, min(2, 4 - Fraction(3, v)))


@pytest.mark.parametrize(("schedule", "v", "ends"), [("1f1b", 1, 1), ("gpipe", 1, 2), ("interleaved-1f1b", 3, 5)])
def test_a_stage_of_minipar_keeps_its_input_and_its_output(schedule, v, ends):
    """The model's first stage has no input to keep. GPipe's other ranks hold as many microbatches: they keep both."""
    one = layout(tp=8, pp=4, microbatches=8, schedule=schedule, virtual_stages=v, sequence_parallel=True)
    layers = 24 * layer_activations(GPT3, one, 2048, MINIPAR.kept)
    kept = memory(GPT3, one, 2048, MINIPAR).activations
    assert kept == pytest.approx(float(in_flight(one)) * (layers + ends * 2 * 2048 * GPT3.hidden / 8), rel=1e-12)
    assert memory(GPT3, one, 2048).activations == pytest.approx(
        float(in_flight(one)) * 24 * layer_activations(GPT3, one, 2048), rel=1e-12
    )


def test_hybrid_sharding_is_for_many_hosts_with_one_card_each():
    """Stage 3 on 64 hosts whose ring is one card wide: what crosses falls by the 8 GPUs of a host, and time with it."""
    space = SearchSpace(tp=1, pp=1, zero=3, recompute="full", microbatch=1)
    few = replace(a100s(512), framework=replace(MINIPAR, ring_per_card=False))
    one, many = (next(layouts(B7, few, 512, replace(space, zero_replicas=(q,)))) for q in (1, 64))
    assert step_time(B7, many, few, 2048).total < 0.7 * step_time(B7, one, few, 2048).total


@pytest.mark.parametrize("given", [{}, {"recompute": "full"}, {"tp": 8, "sequence_parallel": True}])
def test_activations_and_messages_are_divided_by_cp(given):
    whole = layout(pp=4, microbatches=8, attention="flash", **given)
    for cp in (2, 16):
        part = replace(whole, cp=cp)
        assert layer_activations(LLAMA, part, LONG) == layer_activations(LLAMA, whole, LONG) / cp
        sent, undivided = volume(LLAMA, part, LONG), volume(LLAMA, whole, LONG)
        assert (sent.tp, sent.pp) == (undivided.tp / cp, undivided.pp / cp)
        assert undivided.cp == undivided.dp == 0 < min(sent.cp, sent.dp)


def test_ring_and_all_gather_keep_no_scores_ulysses_does():
    stored, flash = (layer_activations(LLAMA, layout(attention=kind), LONG) for kind in ("stored", "flash"))
    kept = {m: layer_activations(LLAMA, layout(cp=4, context_parallel=m), LONG) for m in METHODS}
    assert kept == {"ring": flash / 4, "all-gather": flash / 4, "ulysses": stored / 4}


def test_an_all_gather_holds_everyones_keys_for_a_moment():
    """And their gradients. Of the published formulas' elements: 2 c u h_kv each, with u = T/c."""
    held = {m: context_buffer(LLAMA, layout(cp=8, context_parallel=m), LONG) for m in METHODS}
    u, h, h_kv = LONG // 8, LLAMA.hidden, 1024
    assert held == {"ring": 8 * u * h_kv, "all-gather": 4 * LONG * h_kv, "ulysses": 2 * u * (h + 2 * h_kv)}


def test_a_ring_takes_the_longer_of_products_and_messages():
    assert ring_seconds([2, 2, 2], 1, gradients=False) == 6
    assert ring_seconds([2, 2, 2], 5, gradients=False) == 12
    # Gradients: every step sends two messages over one link, and the last one comes home after all products.
    assert ring_seconds([2, 2, 2], 1, gradients=True) == 7
    assert ring_seconds([1, 1, 1], 5, gradients=True) == 25
    assert ring_seconds([1, 1, 1], 5, gradients=True, one_link=False) == 16


def test_experts_are_divided_by_ep_and_their_state_by_the_rest():
    """45.1 of Mixtral's 46.7 billion parameters are experts. ZeRO-1's 12 bytes each are 1/64, with whatever ep."""
    experts = 32 * 8 * 3 * 4096 * 14336
    assert round(experts / 1e9, 1) == 45.1
    for ep in (2, 4, 8):
        one = layout(dp=64, ep=ep, zero=1)
        (_, shards), own = rank_buckets(MIXTRAL, one)
        assert own == (experts / ep, 64 / ep) and shards == 64
        held = memory(MIXTRAL, one, 4096)
        assert held.parameters == 2 * (MIXTRAL.parameters - experts + experts / ep)
        assert held.optimizer == 12 * MIXTRAL.parameters / 64


def test_a_layer_keeps_the_rows_of_its_experts():
    """For each token and expert three arrays of f and the gated one, its row and its result; 4 values for the router.

    What all else keeps is a Llama's. ep changes nothing where routing is uniform.
    """
    one = layout(attention="flash")
    without = layer_activations(replace(MIXTRAL, experts=None, top_k=1), one, 4096)
    kept = layer_activations(MIXTRAL, one, 4096)
    assert kept - without == 4096 * 2 * (4 * 14336 + 2 * 2 * 4096 + 4 * 8)
    assert layer_activations(MIXTRAL, replace(one, dp=8, ep=8), 4096) == kept


def test_an_all_to_all_in_a_host_is_priced_by_its_links():
    """k N h elements, of which each message has 1/P; forward dispatches and combines, and counts go ahead."""
    cluster, rows, counts = a100s(64), 2 * 2 * 4096 * 4096, 8 * 8
    near = expert_seconds(MIXTRAL, layout(dp=8, ep=8), cluster, 4096)
    message, ahead = (cluster.inside.seconds(nbytes / 8) for nbytes in (rows, counts))
    assert near == pytest.approx((7 * ahead + 2 * 7 * message, 2 * 7 * message), rel=1e-12)
    assert expert_seconds(MIXTRAL, layout(dp=8), cluster, 4096) == (0, 0)


def test_beyond_tp_ranks_ep_crosses_hosts():
    """tp 4 leaves room for two ranks of ep in a host of 8. Of eight, a rank finds one near and six far."""
    cluster, rows = a100s(64), 2 * 2 * 4096 * 4096
    far = expert_seconds(MIXTRAL, layout(dp=8, tp=4, ep=8), cluster, 4096)[1]
    expected = 2 * (cluster.inside.seconds(rows / 8) + 6 * cluster.between.seconds(rows / 8))
    assert far == pytest.approx(expected, rel=1e-12)
    steps = expert_seconds(MIXTRAL, layout(dp=8, tp=4, ep=8), a100s(64, "minipar"), 4096)[1]
    assert steps == pytest.approx(2 * 7 * cluster.between.seconds(rows / 8), rel=1e-12)
