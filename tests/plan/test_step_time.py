"""Each term of a step's communication by itself, as the papers' framework has it (MEGATRON), in closed form.

Messages have no latency here, so that a collective takes its bytes' time, and a sum of collectives that of their bytes.
"""

from dataclasses import replace

import pytest
from planning import a100s, layout

from minipar.plan import step_time as step_times
from minipar.plan.cluster import GPUS, Assumptions, Cluster, gather_seconds, scalar_seconds
from minipar.plan.compute import unit_times
from minipar.plan.layout import MEGATRON, MINIPAR, PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.overlap import UnitPass, overlapped
from minipar.plan.rank_bytes import rank_parameters, volume
from minipar.plan.stages import Stages, hop_seconds, layers_of_stages
from minipar.plan.step_time import step_time, tied_seconds  # fmt: skip

GPT2, GPT3, LLAMA = (find_model(name) for name in ("gpt2", "gpt3-175b", "llama-2-70b"))
LENGTH = 1024


def wires(gpus=8, slower=1, contention=0.0, framework=MEGATRON):
    """One host of A100s; links `slower` by a factor."""
    gpu = replace(GPUS["a100"], inside=GPUS["a100"].inside / slower)
    return Cluster(gpu, gpus, gpus, Assumptions(alpha_inside=0, alpha_between=0, contention=contention), framework)


def stages(model, one, cluster):
    """Stages whose messages nobody waits for."""
    own = Stages(model, one, cluster, LENGTH)
    own.hop_wait = 0.0
    return own


# ---- data parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", [MEGATRON, MINIPAR], ids=["megatron", "minipar"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["tied", "a head of its own"])
def test_collectives_over_dp_take_the_time_of_their_bytes(model, zero, precision, framework):
    for one in (layout(dp=8, microbatches=3, zero=zero), layout(dp=2, tp=4, microbatches=3, zero=zero)):
        one, cluster = replace(one, precision=PRECISIONS[precision]), wires(framework=framework)
        rank = stages(model, one, cluster)
        sent = float(volume(model, one, LENGTH, framework).dp)
        assert rank.dp_seconds([0]) + rank.refresh_seconds() == pytest.approx(sent * cluster.inside.beta, rel=1e-12)


@pytest.mark.parametrize("framework", [MEGATRON, MINIPAR], ids=["megatron", "minipar"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_over_replicas_take_the_time_of_their_bytes(zero, framework):
    one, cluster = layout(dp=8, zero=zero, zero_replicas=2, microbatches=3), wires(framework=framework)
    rank = stages(GPT2, one, cluster)
    sent = float(volume(GPT2, one, LENGTH, framework).dp)
    assert rank.dp_seconds([0]) + rank.refresh_seconds() == pytest.approx(sent * cluster.inside.beta, rel=1e-12)


def test_sums_over_replicas_travel_next_to_reduce_scatters():
    one = UnitPass(seconds=1.0, reduce=2.0, across=3.0)
    assert overlapped([one, one]) == (2.0, 9.0)  # 1 + 2, then 3 + 3 behind the second reduce-scatter
    assert overlapped([replace(one, reduce=0.0)]) == (1.0, 4.0)
    assert overlapped([one, replace(one, across=0.0)]) == (2.0, 6.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_zero_a_rank_updates_its_shard(zero):
    whole = stages(GPT2, layout(microbatches=3), wires()).units.update
    assert stages(GPT2, layout(dp=8, microbatches=3, zero=zero), wires()).units.update == pytest.approx(
        whole / (8 if zero else 1)
    )


def test_the_gather_after_the_update_is_the_first_ranks():
    one, cluster = layout(dp=4, pp=2, microbatches=4, zero=1), wires()
    expected = gather_seconds(cluster, rank_parameters(GPT2, one) * 2, 1, 4)
    assert stages(GPT2, one, cluster).refresh_seconds() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_but_the_ends_hides_and_hiding_costs_a_fifth(zero):
    """Behind large products nothing is left but the gradients of the embeddings and of the first layer, since the
    embeddings take no time, and with ZeRO-3 the parameters of both. Updated ones hide behind the next forward.
    """
    one, cluster = layout(dp=8, microbatch=16, zero=zero), wires()
    time = step_time(GPT2, one, cluster, LENGTH)
    ends = GPT2.parameters - GPT2.layers * GPT2.layer_parameters
    late = (2 if zero in (0, 3) else 1) * (ends + GPT2.layer_parameters)
    assert time.dp == pytest.approx(gather_seconds(cluster, late * 2, 1, 8), rel=1e-9)
    sent = float(volume(GPT2, one, LENGTH).dp) * cluster.inside.beta
    busy = step_time(GPT2, one, wires(contention=0.2), LENGTH).dp
    assert busy == pytest.approx(time.dp + 0.2 * (sent - time.dp), rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_over_slow_links_a_step_takes_what_it_sends(zero):
    one, cluster = layout(dp=8, microbatches=3, zero=zero), wires(slower=1000)
    sent = float(volume(GPT2, one, LENGTH).dp) * cluster.inside.beta
    time = step_time(GPT2, one, cluster, LENGTH)
    assert sent <= time.total <= sent + time.compute + time.optimizer


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_over_slow_cards_a_step_takes_its_sums_over_replicas(zero):
    """Each replica of the shards is in one host, so that nothing else goes over the cards."""
    fast = wires()
    cluster = replace(fast, per_host=2, gpu=replace(fast.gpu, between=fast.gpu.inside / 1e6))
    one = layout(dp=8, zero=zero, zero_replicas=4, microbatches=3)
    rank = stages(GPT2, one, cluster)
    summed = 3 if rank.reduces_each_microbatch else 1
    across = summed * sum(unit.across for unit in rank.units_of(0))
    assert step_time(GPT2, one, cluster, LENGTH).total == pytest.approx(across, rel=1e-2)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_stages_backward_takes_at_least_its_reductions(zero):
    one = layout(dp=4, pp=2, microbatches=4, zero=zero)
    rank = stages(GPT2, one, wires(slower=1000))
    own = rank.units_of(0)
    sent = sum(unit.reduce + unit.gather for unit in own)
    time = rank.stage_time(own)
    assert time.backward_input + time.backward_weight == pytest.approx(sent, rel=1e-12)


def test_a_split_backward_gathers_for_its_input_gradients():
    one = layout(dp=4, pp=2, microbatches=4, zero=3, schedule="zb-h1")
    once = replace(MEGATRON, every_microbatch=False)
    rank = stages(GPT2, one, wires(slower=1000, framework=once))
    own = rank.units_of(0)
    time, gathers = rank.stage_time(own), sum(unit.gather for unit in own)
    assert time.backward_input == pytest.approx(gathers + own[0].backward_input, rel=1e-3)
    assert time.backward_weight == sum(unit.backward_weight for unit in own)


@pytest.mark.parametrize(("zero", "exact"), [(0, False), (1, False), (2, False), (2, True), (3, True)])
def test_after_a_pipeline_the_last_layer_is_reduced(zero, exact):
    """In closed form, and where everything before them went with its microbatch."""
    one, cluster = layout(dp=4, pp=2, microbatch=16, microbatches=8, zero=zero), wires()
    rank = stages(GPT2, one, cluster)
    (last,) = rank.busiest_rank()
    waits = 8 * (rank.stage_time(rank.units_of(last)).seconds - sum(unit.seconds for unit in rank.units_of(last)))
    assert last == 1 and (waits > 1e-6) == (zero == 3)
    expected = rank.units.layer.reduce + waits
    assert step_time(GPT2, one, cluster, LENGTH, exact).dp == pytest.approx(expected, rel=1e-6)


def test_gathers_and_reductions_next_to_a_pass():
    """The next unit's gather runs while a unit computes. Few gradients: it waits for the last reduction but one."""
    forward = [UnitPass(1.0, gather=2.0)] * 3
    assert overlapped(forward) == (7.0, 6.0)
    assert overlapped(forward, start=10.0, stream=3.0) == (17.0, 16.0)
    assert overlapped(forward, start=10.0, stream=15.0) == (22.0, 21.0)
    assert overlapped([UnitPass(3.0, gather=2.0)] * 3, start=1.0) == (12.0, 8.0)
    backward = [UnitPass(1.0, reduce=3.0)] * 4
    assert overlapped(backward) == (4.0, 13.0)
    assert overlapped(backward, few_gradients=True) == (8.0, 13.0)
    assert overlapped(backward[:3], few_gradients=True) == (5.0, 10.0)
    assert overlapped(backward, stream=5.0, few_gradients=True) == (12.0, 17.0)
    for few in (False, True):
        assert overlapped([UnitPass(3.0, reduce=1.0)] * 4, few_gradients=few) == (12.0, 13.0)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_sums_of_embedding_and_head(sequence):
    """Embedding: an all-reduce, or a reduce-scatter and in backward an all-gather. Head: an all-gather of its input
    under sequence parallelism, and three values of each token (maximum, sum, the target's logit) in 32 bits at least.
    The gradient of its input hides behind its weight's.
    """
    cluster, one = wires(), layout(tp=8, microbatch=2, sequence_parallel=sequence)
    units = unit_times(GPT3, one, cluster, LENGTH)
    gather = gather_seconds(cluster, 2 * LENGTH * GPT3.hidden * 2, 1, 8)
    loss = 2 * gather_seconds(cluster, 2 * LENGTH * 3 * 4, 1, 8)
    assert units.embedding.tp == pytest.approx(2 * gather, rel=1e-12)
    assert units.head.tp == pytest.approx(sequence * gather + loss, rel=1e-12)
    assert units.embedding.seconds == units.embedding.tp


def test_full_recomputation_repeats_forwards_sums():
    cluster = wires(contention=0.2)
    none, full = (unit_times(GPT3, layout(tp=8, recompute=kind), cluster, LENGTH).layer for kind in ("none", "full"))
    gather = gather_seconds(cluster, LENGTH * GPT3.hidden * 2, 1, 8)
    assert full.tp - none.tp == pytest.approx(4 * gather, rel=1e-9)
    assert full.seconds - none.seconds == pytest.approx(none.forward, rel=1e-9)


def test_the_gradients_of_copied_heads_are_summed():
    """With 2 heads of keys on 8 ranks, 4 ranks have copies of one: of keys and of values, h x h/a elements each."""
    model = replace(find_model("llama-3-8b"), kv_heads=2)
    one = layout(tp=8)
    cluster = wires(8)
    elements = 2 * model.hidden * (model.hidden // model.heads)
    summed = 2 * gather_seconds(cluster, elements * one.precision.gradients, 1, 4)
    assert unit_times(model, one, cluster, LENGTH).layer.partial == pytest.approx(summed, rel=1e-12)
    assert unit_times(replace(model, kv_heads=8), one, cluster, LENGTH).layer.partial == 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("pp", [1, 2])
def test_sequence_parallel_sums_replicated_gradients(pp, precision):
    """Norms, positions and row layers' biases: those that t ranks hold more often than one rank does."""
    one = layout(tp=8, pp=pp, sequence_parallel=True, precision=PRECISIONS[precision])
    cluster = wires(8 * pp)
    units = unit_times(GPT3, one, cluster, LENGTH)
    again = 8 * rank_parameters(GPT3, one) - rank_parameters(GPT3, replace(one, tp=1))
    first = units.embedding.partial + one.layers_per_rank(GPT3) * units.layer.partial
    width = one.precision.gradients
    assert first == pytest.approx(2 * gather_seconds(cluster, again / 7 * width, 1, 8), rel=1e-9)
    norm = 0 if pp == 1 else GPT3.norm_parameters  # without a pipeline it is with the embeddings
    assert units.head.partial == pytest.approx(2 * gather_seconds(cluster, norm * width, 1, 8), rel=1e-12)


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "v"), [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 5)])
@pytest.mark.parametrize("slower", [1, 100])
def test_the_closed_form_of_a_step_is_the_simulators_time(schedule, v, slower):
    """With every message waited for, where nothing is sent over dp."""
    one, cluster = layout(pp=8, microbatches=16, schedule=schedule, virtual_stages=v), wires(slower=slower)
    exact, closed = (step_time(LLAMA, one, cluster, LENGTH, exact) for exact in (True, False))
    assert exact.exact and not closed.exact
    assert closed.total == pytest.approx(exact.total, rel=1e-9)
    own = stages(LLAMA, one, cluster)
    assert exact.compute == pytest.approx(16 * sum(p.seconds for s in own.ranks[7] for p in own.units_of(s)), rel=1e-12)


def test_unequal_stages_count_as_the_fullest_in_closed_form():
    one, cluster = layout(pp=5, microbatches=10), wires(5, framework=MINIPAR)
    assert len(set(stages(GPT2, one, cluster).layers)) > 1
    exact, closed = (step_time(GPT2, one, cluster, LENGTH, exact).total for exact in (True, False))
    assert exact <= closed < 1.5 * exact


@pytest.mark.parametrize(("head", "busiest"), [(0.0, [0]), (1.5, [0]), (2.5, [2])])
def test_the_busiest_rank_counts_seconds_of_layers_and_ends(head, busiest):
    """Ranks of 3, 2 and 1 layers of a second each; the last has the head, too."""
    own = stages(GPT2, layout(pp=3, microbatches=3), wires(3))
    second = replace(own.units.layer, forward=1.0, backward_input=0.0, backward_weight=0.0)
    own.layers = [3, 2, 1]
    own.units = replace(
        own.units, layer=second, embedding=replace(second, forward=0.0), head=replace(second, forward=head)
    )
    assert own.busiest_rank() == busiest
    own.units = replace(own.units, layer=replace(second, forward=2.0), head=replace(second, forward=3.5))
    assert own.busiest_rank() == [0]


def test_a_tp_rank_sends_its_part_or_all_to_the_next_stage():
    """Megatron cuts it in any case (Narayanan et al. 2021, section 4.1), minipar where it is cut already."""
    nbytes = LENGTH * GPT3.hidden * 2
    for framework, sequence, pieces in ((MEGATRON, 0, 8), (MEGATRON, 1, 8), (MINIPAR, 0, 1), (MINIPAR, 1, 8)):
        cluster = wires(16, framework=framework)
        one = layout(tp=8, pp=2, microbatches=6, sequence_parallel=bool(sequence))
        assert hop_seconds(GPT3, one, cluster, LENGTH) == pytest.approx(nbytes / pieces * cluster.inside.beta)
        assert volume(GPT3, one, LENGTH, framework).pp == 2 * 6 * nbytes // pieces


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_tied_embeddings_gradient_goes_to_the_first_stage(precision):
    cluster, one = wires(16), layout(tp=8, pp=2, precision=PRECISIONS[precision])
    nbytes = GPT3.vocab_size * GPT3.hidden / 8 * one.precision.gradients
    assert tied_seconds(GPT3, one, cluster) == pytest.approx(nbytes * cluster.inside.beta, rel=1e-12)
    assert tied_seconds(LLAMA, one, cluster) == tied_seconds(GPT3, replace(one, pp=1), cluster) == 0


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


@pytest.mark.parametrize("zero", [0, 1])
def test_loss_and_norm_are_summed_over_the_axes_that_need_it(zero, monkeypatch):
    """The loss is summed over pp and dp, the norm over tp and pp, and over dp where gradients are cut."""
    one = layout(dp=2, tp=4, pp=2, microbatches=4, zero=zero)
    cluster = wires(16)
    before = step_time(GPT3, one, cluster, LENGTH)
    assert before.tp > 0
    seconds = {(1, 4): 1e3, (4, 2): 2e3, (8, 2): 3e3}  # stride and size of tp, dp, pp
    monkeypatch.setattr(step_times, "scalar_seconds", lambda _, stride, size: seconds[stride, size])
    after = step_time(GPT3, one, cluster, LENGTH)
    more = [getattr(after, axis) - getattr(before, axis) for axis in ("tp", "dp", "pp")]
    assert more == pytest.approx([1e3, (2 if zero else 1) * 2e3, 2 * 3e3], rel=1e-9)


def test_without_balance_every_stage_has_the_most_layers():
    assert layers_of_stages(find_model("megatron-18b"), layout(pp=4, microbatches=4), False, LENGTH) == [10] * 4
    interleaved = layout(pp=4, microbatches=4, schedule="interleaved-1f1b", virtual_stages=3)
    assert layers_of_stages(find_model("megatron-18b"), interleaved, False, LENGTH) == [4] * 12
    assert layers_of_stages(GPT2, layout(pp=5, microbatches=5), False, LENGTH) == [3] * 5


def test_a_rank_waits_for_every_message_between_stages():
    cluster = a100s(64)  # Llama's head is a matrix of its own: nothing else goes over pp
    hop = cluster.between.alpha + 2048 * LLAMA.hidden * 2 / 8 * cluster.between.beta
    for schedule, v in (("1f1b", 1), ("interleaved-1f1b", 5)):
        one = layout(tp=8, pp=8, microbatches=32, schedule=schedule, virtual_stages=v, sequence_parallel=True)
        expected = 32 * 2 * v * hop + 2 * scalar_seconds(cluster, 8, 8)
        assert step_time(LLAMA, one, cluster, 2048).pp == pytest.approx(expected)


def test_zero_3_pays_for_every_microbatch():
    model = find_model("megatron-7.5b")
    cluster = a100s(128)
    one_microbatch = layout(dp=128, microbatch=4, microbatches=1, zero=3)
    four_microbatches = layout(dp=128, microbatch=1, microbatches=4, zero=3)
    few = step_time(model, one_microbatch, cluster, 2048).dp
    many = step_time(model, four_microbatches, cluster, 2048).dp
    none = step_time(model, replace(four_microbatches, zero=0), cluster, 2048).dp
    assert many > 3 * few > 0 and many > none
