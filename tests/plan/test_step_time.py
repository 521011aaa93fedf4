"""Each term of a step's communication by itself, as the papers' framework has it (MEGATRON), in closed form.

Messages have no latency here, so that a collective takes its bytes' time, and a sum of collectives that of their bytes.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
from planning import a100s, layout

from minipar.plan.cluster import GPUS, Assumptions, Cluster, gather_seconds, scalar_seconds
from minipar.plan.compute import unit_times
from minipar.plan.gpu_time import attention_squares
from minipar.plan.layout import MEGATRON, MINIPAR, PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.overlap import UnitPass, overlapped
from minipar.plan.rank_bytes import rank_parameters, volume
from minipar.plan.stages import Stages, hop_seconds
from minipar.plan.step_time import step_time, tied_seconds

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
@pytest.mark.parametrize(
    ("model", "zero", "precision"),
    [
        (GPT2, 0, "fp16"),
        (GPT2, 1, "bf16"),
        (GPT2, 3, "fp16"),
        (LLAMA, 0, "bf16"),
        (LLAMA, 2, "fp16"),
        (LLAMA, 3, "bf16"),
    ],
)
def test_collectives_over_dp_take_the_time_of_their_bytes(model, zero, precision, framework):
    base = layout(dp=8, microbatches=3, zero=zero)
    replicas = [replace(base, zero_replicas=2)] if zero else []
    for one in (base, replace(base, dp=2, tp=4), *replicas):
        one, cluster = replace(one, precision=PRECISIONS[precision]), wires(framework=framework)
        rank = stages(model, one, cluster)
        sent = float(volume(model, one, LENGTH, framework).dp)
        assert rank.dp_seconds([0]) + rank.refresh_seconds() == pytest.approx(sent * cluster.inside.beta, rel=1e-12)


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


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_over_slow_links_a_step_takes_what_it_sends(zero):
    one, cluster = layout(dp=8, microbatches=3, zero=zero), wires(slower=1000)
    sent = float(volume(GPT2, one, LENGTH).dp) * cluster.inside.beta
    time = step_time(GPT2, one, cluster, LENGTH)
    assert sent <= time.total <= sent + time.compute + time.optimizer


def test_gathers_and_reductions_next_to_a_pass():
    """The next unit's gather runs while a unit computes. Few gradients: it waits for the last reduction but one."""
    forward = [UnitPass(1.0, gather=2.0)] * 3
    assert overlapped(forward) == (7.0, 6.0)
    assert overlapped(forward, start=10.0, stream=15.0) == (22.0, 21.0)
    assert overlapped([UnitPass(3.0, gather=2.0)] * 3, start=1.0) == (12.0, 8.0)
    one = UnitPass(seconds=1.0, reduce=2.0, across=3.0)  # a sum over replicas travels next to reduce-scatters
    assert overlapped([one, one]) == (2.0, 9.0)  # 1 + 2, then 3 + 3 behind the second reduce-scatter
    backward = [UnitPass(1.0, reduce=3.0)] * 4
    assert overlapped(backward) == (4.0, 13.0)
    assert overlapped(backward, few_gradients=True) == (8.0, 13.0)
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


@pytest.mark.parametrize(("pp", "precision"), [(1, "fp16"), (2, "bf16")])
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


def test_a_tp_rank_sends_its_part_or_all_to_the_next_stage():
    """Megatron cuts it in any case (Narayanan et al. 2021, section 4.1), minipar where it is cut already."""
    nbytes = LENGTH * GPT3.hidden * 2
    for framework, sequence, pieces in ((MEGATRON, 0, 8), (MEGATRON, 1, 8), (MINIPAR, 0, 1), (MINIPAR, 1, 8)):
        cluster = wires(16, framework=framework)
        one = layout(tp=8, pp=2, microbatches=6, sequence_parallel=bool(sequence))
        assert hop_seconds(GPT3, one, cluster, LENGTH) == pytest.approx(nbytes / pieces * cluster.inside.beta)
        assert volume(GPT3, one, LENGTH, framework).pp == 2 * 6 * nbytes // pieces


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_tied_embeddings_gradient_goes_to_the_first_stage(precision):
    cluster, one = wires(16), layout(tp=8, pp=2, precision=PRECISIONS[precision])
    nbytes = GPT3.vocab_size * GPT3.hidden / 8 * one.precision.gradients
    assert tied_seconds(GPT3, one, cluster) == pytest.approx(nbytes * cluster.inside.beta, rel=1e-12)
    assert tied_seconds(LLAMA, one, cluster) == tied_seconds(GPT3, replace(one, pp=1), cluster) == 0


def test_a_rank_waits_for_every_message_between_stages():
    cluster = a100s(64)  # Llama's head is a matrix of its own: nothing else goes over pp
    hop = cluster.between.alpha + 2048 * LLAMA.hidden * 2 / 8 * cluster.between.beta
    for schedule, v in (("1f1b", 1), ("interleaved-1f1b", 5)):
        one = layout(tp=8, pp=8, microbatches=32, schedule=schedule, virtual_stages=v, sequence_parallel=True)
        expected = 32 * 2 * v * hop + 2 * scalar_seconds(cluster, 8, 8)
        assert step_time(LLAMA, one, cluster, 2048).pp == pytest.approx(expected)


@pytest.mark.parametrize("cp", [2, 4, 16])
def test_contiguous_order_wastes_half_zigzag_nothing(cp):
    """The lock-step efficiency of a ring's products is c/(2c-1), or 1."""
    for order, efficiency in (("zigzag", Fraction(1)), ("contiguous", Fraction(cp, 2 * cp - 1))):
        squares = attention_squares(layout(cp=cp, cp_order=order))
        assert Fraction(cp) / Fraction(sum(squares)) == efficiency
