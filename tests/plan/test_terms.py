"""Each term of a step's communication by itself, as the papers' program has it (MEGATRON), in closed form.

Messages have no latency here, so that a collective takes its bytes' time, and a sum of collectives that of their bytes.
"""

from dataclasses import replace

import pytest

from minipar.plan import time as plan_time
from minipar.plan.communication import gather_seconds, volume
from minipar.plan.layout import PRECISIONS, Layout
from minipar.plan.machine import GPUS, Assumptions, Cluster
from minipar.plan.memory import rank_parameters
from minipar.plan.model import find_model
from minipar.plan.overlap import Work, run
from minipar.plan.parts import parts
from minipar.plan.program import MEGATRON, MINIPAR
from minipar.plan.stages import Stages, layers_of_stages
from minipar.plan.time import hop_seconds, step_time, tied_seconds

GPT2, GPT3, LLAMA = (find_model(name) for name in ("gpt2", "gpt3-175b", "llama-2-70b"))
LENGTH = 1024


def wires(gpus=8, slower=1, contention=0.0, program=MEGATRON):
    """One host of A100s; links `slower` by a factor."""
    gpu = replace(GPUS["a100"], inside=GPUS["a100"].inside / slower)
    return Cluster(gpu, gpus, gpus, Assumptions(alpha_inside=0, alpha_between=0, contention=contention), program)


def stages(model, layout, cluster):
    return Stages(model, layout, cluster, LENGTH, hop=0.0)


# ---- data parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [MEGATRON, MINIPAR], ids=["megatron", "minipar"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["tied", "a head of its own"])
def test_what_dp_sends_takes_its_bytes_time(model, zero, precision, program):
    for layout in (Layout(8, 1, 1, 1, 3, zero), Layout(2, 4, 1, 1, 3, zero)):
        layout, cluster = replace(layout, precision=PRECISIONS[precision]), wires(program=program)
        found = stages(model, layout, cluster)
        sent = float(volume(model, layout, LENGTH, program).dp)
        assert found.over_dp([0]) + found.refresh() == pytest.approx(sent * cluster.inside.beta, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_zero_a_rank_updates_its_part(zero):
    whole = stages(GPT2, Layout(1, 1, 1, 1, 3), wires()).update
    assert stages(GPT2, Layout(8, 1, 1, 1, 3, zero), wires()).update == pytest.approx(whole / (8 if zero else 1))


def test_the_rank_with_the_embeddings_gathers_longest_what_was_updated():
    layout, cluster = Layout(4, 1, 2, 1, 4, zero=1), wires()
    expected = gather_seconds(cluster, rank_parameters(GPT2, layout) * 2, 1, 4)
    assert stages(GPT2, layout, cluster).refresh() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_but_the_ends_hides_and_a_hidden_second_costs_a_fifth(zero):
    """Behind large products nothing is left but the gradients of the embeddings and of the first layer, since the
    embeddings take no time, and with ZeRO-3 the parameters of both. Updated ones hide behind the next forward.
    """
    layout, cluster = Layout(8, 1, 1, 16, 1, zero), wires()
    time = step_time(GPT2, layout, cluster, LENGTH)
    ends = GPT2.parameters - GPT2.layers * GPT2.layer_parameters
    late = (2 if zero in (0, 3) else 1) * (ends + GPT2.layer_parameters)
    assert time.dp == pytest.approx(gather_seconds(cluster, late * 2, 1, 8), rel=1e-9)
    sent = float(volume(GPT2, layout, LENGTH).dp) * cluster.inside.beta
    busy = step_time(GPT2, layout, wires(contention=0.2), LENGTH).dp
    assert busy == pytest.approx(time.dp + 0.2 * (sent - time.dp), rel=1e-9)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_over_slow_links_a_step_is_no_shorter_than_what_it_sends(zero):
    layout, cluster = Layout(8, 1, 1, 1, 3, zero), wires(slower=1000)
    sent = float(volume(GPT2, layout, LENGTH).dp) * cluster.inside.beta
    time = step_time(GPT2, layout, cluster, LENGTH)
    assert sent <= time.total <= sent + time.compute + time.optimizer


@pytest.mark.parametrize("zero", [2, 3])
def test_in_a_pipeline_a_backward_is_no_shorter_than_the_gradients_that_it_sends(zero):
    layout = Layout(4, 1, 2, 1, 4, zero)
    found = stages(GPT2, layout, wires(slower=1000))
    own = found.of(0)
    sent = sum(part.reduce + part.gather * (zero == 3) for part in own)
    time = found.time(own)
    assert time.backward_input + time.backward_weight == pytest.approx(sent, rel=1e-12)


def test_where_backward_is_split_gradients_of_inputs_need_the_parameters():
    layout = Layout(4, 1, 2, 1, 4, 3, "zb-h1")
    once = replace(MEGATRON, every_microbatch=False)
    found = stages(GPT2, layout, wires(slower=1000, program=once))
    own = found.of(0)
    time, gathers = found.time(own), sum(part.gather for part in own)
    assert time.backward_input == pytest.approx(gathers + own[0].backward_input, rel=1e-3)
    assert time.backward_weight == sum(part.backward_weight for part in own)


@pytest.mark.parametrize(("zero", "exact"), [(0, False), (1, False), (2, False), (2, True), (3, True)])
def test_after_a_pipeline_the_last_layers_gradients_are_waited_for(zero, exact):
    """In closed form, and where everything before them went with its microbatch."""
    layout, cluster = Layout(4, 1, 2, 16, 8, zero), wires()
    found = stages(GPT2, layout, cluster)
    (last,) = found.busiest()
    waits = 8 * (found.time(found.of(last)).seconds - sum(part.seconds for part in found.of(last)))
    assert last == 1 and (waits > 1e-6) == (zero == 3)
    expected = found.parts.layer.reduce + waits
    assert step_time(GPT2, layout, cluster, LENGTH, exact).dp == pytest.approx(expected, rel=1e-6)


def test_a_pass_beside_its_stream():
    """Gathers: the next unit's is on its way when a unit begins. Reductions: one after the other; with few gradients a
    unit waits until the last but one has gone.
    """
    forward = [Work(1.0, gather=2.0)] * 3
    assert run(forward) == (7.0, 6.0)
    assert run(forward, now=10.0, stream=3.0) == (17.0, 16.0)
    assert run(forward, now=10.0, stream=15.0) == (22.0, 21.0)
    assert run([Work(3.0, gather=2.0)] * 3, now=1.0) == (12.0, 8.0)
    backward = [Work(1.0, reduce=3.0)] * 4
    assert run(backward) == (4.0, 13.0)
    assert run(backward, few_gradients=True) == (8.0, 13.0)
    assert run(backward, stream=5.0, few_gradients=True) == (12.0, 17.0)
    assert run([Work(3.0, reduce=1.0)] * 4, few_gradients=True) == run([Work(3.0, reduce=1.0)] * 4) == (12.0, 13.0)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_what_waits_for_tensor_parallelism_at_the_ends_of_the_model(sequence):
    """Embedding: an all-reduce, or a reduce-scatter there and an all-gather back. Head: an all-gather of its input if
    that is cut, and three numbers of each token (maximum, sum, the target's logit), at least 32 bits wide. The gradient
    of its input hides behind its weight's.
    """
    cluster, layout = wires(), Layout(1, 8, 1, 2, 1, sequence_parallel=sequence)
    found = parts(GPT3, layout, cluster, LENGTH)
    gather = gather_seconds(cluster, 2 * LENGTH * GPT3.hidden * 2, 1, 8)
    loss = 2 * gather_seconds(cluster, 2 * LENGTH * 3 * 4, 1, 8)
    assert found.embedding.tp == pytest.approx(2 * gather, rel=1e-12)
    assert found.head.tp == pytest.approx(sequence * gather + loss, rel=1e-12)
    assert found.embedding.seconds == found.embedding.tp


def test_full_recomputation_sends_forward_once_more():
    cluster = wires(contention=0.2)
    none, full = (
        parts(GPT3, Layout(1, 8, 1, 1, 1, recompute=kind), cluster, LENGTH).layer for kind in ("none", "full")
    )
    gather = gather_seconds(cluster, LENGTH * GPT3.hidden * 2, 1, 8)
    assert full.tp - none.tp == pytest.approx(4 * gather, rel=1e-9)
    assert full.seconds - none.seconds == pytest.approx(none.forward, rel=1e-9)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("pp", [1, 2])
def test_sequence_parallelism_sums_the_gradients_that_every_rank_has(pp, precision):
    """Of them each rank has its tokens' share: norms, positions, row layers' biases; as many as t ranks hold more than
    one.
    """
    layout = Layout(1, 8, pp, 1, 1, sequence_parallel=True, precision=PRECISIONS[precision])
    cluster = wires(8 * pp)
    found = parts(GPT3, layout, cluster, LENGTH)
    again = 8 * rank_parameters(GPT3, layout) - rank_parameters(GPT3, replace(layout, tp=1))
    first = found.embedding.partial + layout.layers_per_rank(GPT3) * found.layer.partial
    width = layout.precision.gradients
    assert first == pytest.approx(2 * gather_seconds(cluster, again / 7 * width, 1, 8), rel=1e-9)
    norm = 0 if pp == 1 else GPT3.norm_parameters  # without a pipeline it is with the embeddings
    assert found.head.partial == pytest.approx(2 * gather_seconds(cluster, norm * width, 1, 8), rel=1e-12)


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "v"), [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 5)])
@pytest.mark.parametrize("slower", [1, 100])
def test_the_search_takes_the_simulators_time(schedule, v, slower):
    """With every message waited for, where nothing is sent over dp."""
    layout, cluster = Layout(1, 1, 8, 1, 16, 0, schedule, v), wires(slower=slower)
    exact, closed = (step_time(LLAMA, layout, cluster, LENGTH, exact) for exact in (True, False))
    assert exact.exact and not closed.exact
    assert closed.total == pytest.approx(exact.total, rel=1e-9)
    own = stages(LLAMA, layout, cluster)
    assert exact.compute == pytest.approx(16 * sum(p.seconds for s in own.ranks[7] for p in own.of(s)), rel=1e-12)


def test_where_stages_are_not_equal_the_search_takes_the_fullest_for_all():
    layout, cluster = Layout(1, 1, 5, 1, 10), wires(5, program=MINIPAR)
    assert len(set(stages(GPT2, layout, cluster).layers)) > 1
    exact, closed = (step_time(GPT2, layout, cluster, LENGTH, exact).total for exact in (True, False))
    assert exact <= closed < 1.5 * exact


def test_a_message_between_stages_is_whole_or_each_tp_ranks_part():
    """Megatron cuts it in any case (Narayanan et al. 2021, section 4.1), minipar where it is cut already."""
    nbytes = LENGTH * GPT3.hidden * 2
    for program, sequence, pieces in ((MEGATRON, 0, 8), (MEGATRON, 1, 8), (MINIPAR, 0, 1), (MINIPAR, 1, 8)):
        cluster = wires(16, program=program)
        layout = Layout(1, 8, 2, 1, 6, sequence_parallel=bool(sequence))
        assert hop_seconds(GPT3, layout, cluster, LENGTH) == pytest.approx(nbytes / pieces * cluster.inside.beta)
        assert volume(GPT3, layout, LENGTH, program).pp == 2 * 6 * nbytes // pieces


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_tied_embeddings_gradient_goes_from_the_last_stage_to_the_first(precision):
    cluster, layout = wires(16), Layout(1, 8, 2, 1, 1, precision=PRECISIONS[precision])
    nbytes = GPT3.vocab_size * GPT3.hidden / 8 * layout.precision.gradients
    assert tied_seconds(GPT3, layout, cluster) == pytest.approx(nbytes * cluster.inside.beta, rel=1e-12)
    assert tied_seconds(LLAMA, layout, cluster) == tied_seconds(GPT3, replace(layout, pp=1), cluster) == 0


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_goes_over_pp(zero):
    """Two messages of each microbatch, if they are waited for; the tied embedding's gradient; in minipar its new value
    comes back, for which ZeRO-3 gathers it once more.
    """
    layout = Layout(4, 1, 2, 1, 4, zero)
    for program in (MEGATRON, MINIPAR):
        cluster = wires(program=program)
        hop, tied = hop_seconds(GPT2, layout, cluster, LENGTH), tied_seconds(GPT2, layout, cluster)
        table = parts(GPT2, layout, cluster, LENGTH).embedding.gather
        more = 4 * 2 * hop if program is MEGATRON else table * (zero == 3)
        assert step_time(GPT2, layout, cluster, LENGTH).pp == pytest.approx(tied + more, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_loss_and_a_norm_go_over_the_axes_that_have_parts_of_them(zero, monkeypatch):
    """The loss over pp and dp; the norm over tp and pp, and over dp where gradients are cut."""
    layout, cluster = Layout(2, 4, 2, 1, 4, zero), wires(16)
    before = step_time(GPT3, layout, cluster, LENGTH)
    assert before.tp > 0
    numbers = {(1, 4): 1e3, (4, 2): 2e3, (8, 2): 3e3}  # stride and size of tp, dp, pp
    monkeypatch.setattr(plan_time, "number_seconds", lambda _, stride, size: numbers[stride, size])
    after = step_time(GPT3, layout, cluster, LENGTH)
    more = [getattr(after, axis) - getattr(before, axis) for axis in ("tp", "dp", "pp")]
    assert more == pytest.approx([1e3, (2 if zero else 1) * 2e3, 2 * 3e3], rel=1e-9)


def test_every_stage_counts_as_the_fullest():
    assert layers_of_stages(find_model("megatron-18b"), Layout(1, 1, 4, 1, 4), False, LENGTH) == [10] * 4
    interleaved = Layout(1, 1, 4, 1, 4, 0, "interleaved-1f1b", 3)
    assert layers_of_stages(find_model("megatron-18b"), interleaved, False, LENGTH) == [4] * 12
    assert layers_of_stages(GPT2, Layout(1, 1, 5, 1, 5), False, LENGTH) == [3] * 5


# ---- collectives between hosts ---------------------------------------------------------------------------------------


def test_a_ring_whose_last_host_is_not_full_and_one_with_a_rank_on_each():
    cluster, n = Cluster(replace(GPUS["a100"], inside=1e9), 24, 4), 1e6
    inside, between = cluster.inside, cluster.between
    assert inside.beta > between.beta
    six = gather_seconds(cluster, n, 1, 6)  # four and two
    assert six == pytest.approx(4 * inside.alpha + between.alpha + n * 5 / 6 * inside.beta, rel=1e-12)
    assert gather_seconds(cluster, n, 4, 6) == pytest.approx(5 * between.alpha + n * 5 / 6 * between.beta, rel=1e-12)
