"""Context parallelism in the planner: bytes and memory of real runs, time on the modelled clock, and the search."""

from dataclasses import replace
from fractions import Fraction

import pytest
from combinations import TEXT
from planning import a100s, layout
from training import config_for, ranks_of, trainer_for

from minipar.bench.layouts import RECORDED, framework_of, layout_of, modelled_step, shape_of
from minipar.bench.pipeline import random_tokens
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.parallel.context import METHODS
from minipar.parallel.token_order import ORDERS
from minipar.plan.cluster import GPUS, AlphaBeta, Cluster, model_clock_cluster
from minipar.plan.compute import context_seconds, ring_seconds, unit_times
from minipar.plan.gpu_time import attention_squares
from minipar.plan.layout import MINIPAR, PRECISIONS
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import context_buffer, layer_activations, memory, rank_parameters, volume
from minipar.plan.search import judge, plan
from minipar.plan.space import LEAST_TOKENS, SearchSpace, layouts
from minipar.plan.stages import hop_seconds
from minipar.plan.step_time import step_time, tied_seconds
from minipar.train.from_config import step_layout

pytestmark = pytest.mark.sampled(3)

LLAMA = find_model("llama-3-8b")
LONG = 131_072


# ---- bytes and memory of runs ----------------------------------------------------------------------------------------

SHAPE = "--layers 4 --hidden 64 --heads 8 --seq-len 32 --vocab-size 64 --global-batch 8"
RUNS = [
    *(f"--cp 4 --context-parallel {method} --cp-order {order}" for method in METHODS for order in ORDERS),
    "--cp 2 --recompute full",
    "--dp 2 --cp 2 --zero-stage 3 --microbatches 2",
    "--cp 2 --tp 2 --sequence-parallel --zero-stage 1",
    "--cp 2 --pp 2 --microbatches 4",
    "--cp 2 --pp 2 --recompute full --zero-stage 2 --microbatches 2",
    "--dp 2 --cp 2 --tp 2 --context-parallel ulysses",
    "--cp 4 --model llama --kv-heads 4 --ffn 96",
    "--cp 2 --tp 2 --model llama --kv-heads 4 --context-parallel ulysses",
]


def bytes_of_a_step(config, axis):
    """What each rank sends."""

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        comm.traffic.reset()
        trainer.step(0)
        return comm.traffic.bytes(axis=axis)

    return run_local(ranks_of(config), rank)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", RUNS)
def test_bytes_over_cp_are_those_that_a_run_counts(flags):
    config = config_for(f"{SHAPE} {flags}")
    sent = volume(shape_of(config), layout_of(config), config.model.seq_len, framework_of(config)).cp
    assert bytes_of_a_step(config, "cp") == [sent] * ranks_of(config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_travel_over_dp_and_cp_together(zero):
    """As a run counts them, but for the loss and the norm: an all-reduce of 8 bytes each takes 7/8 n, both ways."""
    config = config_for(f"{SHAPE} --dp 4 --cp 2 --zero-stage {zero} --microbatches 2")
    sent = volume(shape_of(config), layout_of(config), config.model.seq_len, framework_of(config)).dp
    counted = Fraction(sum(bytes_of_a_step(config, "dp")), 8)
    assert sent < counted <= sent + 2 * 2 * 7 * 8
    one = layout(dp=8, microbatches=2, zero=zero, precision=layout_of(config).precision)
    assert sent == volume(shape_of(config), one, config.model.seq_len, framework_of(config)).dp


@pytest.mark.sampled(9)
@pytest.mark.parametrize("length", [32, pytest.param(256, marks=pytest.mark.long)])
@pytest.mark.parametrize("flags", RUNS)
def test_memory_is_within_10_percent_of_the_ledger(flags, length):
    """At 256 tokens the program's attention keeps no scores, with whatever method."""
    batch = 16 if length == 32 else 4
    config = config_for(f"{SHAPE} --seq-len {length} --global-batch {batch} {flags}")

    def peak(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = trainer_for(config, random_tokens(config), comm)
            for step in range(RECORDED):
                trainer.step(step)
        return ledger.peak

    predicted = memory(shape_of(config), layout_of(config), length, framework_of(config)).total
    assert predicted == pytest.approx(max(run_local(ranks_of(config), peak)), rel=0.10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_has_the_parameters_of_the_program(model, tp):
    """Of Llama too: its groups of heads, its MLP, and a head of its own."""
    flags = " --model llama --kv-heads 4 --ffn 96" if model == "llama" else ""
    config = config_for(f"{SHAPE} --tp {tp} --cp 2{flags}")
    placed = sum(placement.dp.size for placement in step_layout(config).placements())
    assert rank_parameters(shape_of(config), layout_of(config)) == placed


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


# ---- time ------------------------------------------------------------------------------------------------------------

INSIDE, BETWEEN = AlphaBeta(3e-6, 1 / 2e9), AlphaBeta(14e-6, 1 / 0.5e9)
TIMED = "--layers 4 --hidden 32 --heads 8 --seq-len 64 --vocab-size 64"
ONE_HOST = [
    "--cp 2",
    *(f"--cp 4 --context-parallel {method} --cp-order {order}" for method in METHODS for order in ORDERS),
    "--cp 8",
    "--cp 2 --recompute full",
    "--dp 2 --cp 2 --zero-stage 1",
    "--dp 2 --cp 2 --zero-stage 3",
    "--cp 2 --tp 2 --sequence-parallel",
    "--cp 2 --pp 2 --microbatches 4",
    "--dp 2 --cp 2 --tp 2 --zero-stage 1 --sequence-parallel",
    "--cp 8 --model llama --kv-heads 2 --ffn 64",
]


def compared(flops, flags, per_host=8):
    """(measured, predicted) seconds of one step of the program on a modelled cluster."""
    parsed = config_for(f"{TIMED} {flags}")
    batch = parsed.mesh.dp * parsed.data.microbatches
    config = config_for(f"{TIMED} {flags} --global-batch {batch}")
    cluster = model_clock_cluster(ranks_of(config), flops, INSIDE, BETWEEN, min(per_host, ranks_of(config)))
    predicted = step_time(shape_of(config), layout_of(config), cluster, config.model.seq_len)
    return modelled_step(config, cluster), predicted.total


def bounds(flags):
    """(least, most) of predicted / measured time.

    Where all ranks do the same, the prediction is the measured time. In contiguous order the planner lets every rank
    work as long as the busiest one, and never predicts too little. Llama's untied head has a bucket of its own, which
    the planner sends with the embedding's.
    """
    if "contiguous" in flags and "ulysses" not in flags:
        return 1, 1.03
    if "llama" in flags:
        return 0.97, 1.03
    return 1 - 3e-4, 1 + 3e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", ONE_HOST)
def test_steps_of_mostly_messages_take_the_predicted_time(flags):
    measured, predicted = compared(3e11, flags)
    least, most = bounds(flags)
    assert least * measured <= predicted <= most * measured


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("flops", "flags"), [(flops, flags) for flops in (1e9, 1e10) for flags in ONE_HOST])
def test_steps_that_hide_messages_take_the_predicted_time(flags, flops):
    measured, predicted = compared(flops, flags)
    least, most = bounds(flags)
    assert least * measured <= predicted <= most * measured


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("flags", "per_host", "bound"),
    [
        ("--cp 4", 2, 0.11),
        ("--tp 2 --cp 8", 8, 0.19),
        ("--cp 4 --context-parallel all-gather", 2, 0.02),
        ("--cp 4 --context-parallel ulysses", 2, 0.08),
    ],
)
def test_over_two_hosts_steps_are_predicted_less_well(flags, per_host, bound):
    """The planner lets every step of a ring wait for the slow link. On the clock a late message delays a rank once."""
    measured, predicted = compared(3e11, flags, per_host)
    assert predicted == pytest.approx(measured, rel=bound)


def test_a_ring_takes_the_longer_of_products_and_messages():
    assert ring_seconds([2, 2, 2], 1, gradients=False) == 6
    assert ring_seconds([2, 2, 2], 5, gradients=False) == 12
    # Gradients: every step sends two messages over one link, and the last one comes home after all products.
    assert ring_seconds([2, 2, 2], 1, gradients=True) == 7
    assert ring_seconds([1, 1, 1], 5, gradients=True) == 25
    assert ring_seconds([1, 1, 1], 5, gradients=True, one_link=False) == 16


@pytest.mark.parametrize("cp", [2, 4, 16])
def test_contiguous_order_wastes_half_zigzag_nothing(cp):
    """Lock-step efficiency c/(2c-1), and 1; the time of attention's products in a step follows."""
    for order, efficiency in (("zigzag", Fraction(1)), ("contiguous", Fraction(cp, 2 * cp - 1))):
        squares = attention_squares(layout(cp=cp, cp_order=order))
        assert Fraction(cp) / Fraction(sum(squares)) == efficiency
    # minipar's clock counts what is computed: whole squares of a rank's own, half or all of the others.
    seen = {order: sum(attention_squares(layout(cp=cp, cp_order=order), MINIPAR)) for order in ORDERS}
    assert seen == {"zigzag": (cp + 1) / 2, "contiguous": cp}
    assert attention_squares(layout(cp=cp, context_parallel="ulysses", cp_order="contiguous")) == [cp]


def test_the_slower_link_of_a_ring_counts():
    """tp 4 and cp 2 fill a host of 8; cp 4 crosses to the next one."""
    cluster = a100s(64)

    def waiting(cp, tokens):
        one = layout(dp=64 // 4 // cp, tp=4, cp=cp)
        return context_seconds(LLAMA, one, cluster, tokens * cp)[0] / (cp - 1)

    assert waiting(4, 64) > 3 * waiting(2, 64)
    assert waiting(4, LONG) < cluster.between.seconds(2 * LONG * 256 * 2) / 4  # hidden, but for what hiding costs


def test_the_next_stage_is_beyond_the_ranks_of_cp():
    """tp 4 and cp 2 fill a host of 8."""
    cluster, one = a100s(16), layout(tp=4, cp=2, pp=2, sequence_parallel=True)
    nbytes = LONG / 2 * LLAMA.hidden / 4 * 2
    assert hop_seconds(LLAMA, one, cluster, LONG) == cluster.between.seconds(nbytes)
    assert (
        tied_seconds(replace(LLAMA, tied=True), one, cluster) > cluster.between.seconds(0) > cluster.inside.seconds(0)
    )


def test_a_unit_waits_for_cp_and_so_does_the_step():
    one, cluster = layout(cp=8, context_parallel="all-gather", attention="flash"), a100s(8)
    forward, backward = context_seconds(LLAMA, one, cluster, LONG)
    assert backward == 2 * forward > 0
    units = unit_times(LLAMA, one, cluster, LONG)
    assert units.layer.cp == forward + backward and units.head.cp == 0
    assert step_time(LLAMA, one, cluster, LONG).cp == pytest.approx(32 * (forward + backward), rel=1e-12)
    again = unit_times(LLAMA, replace(one, recompute="full"), cluster, LONG)
    assert again.layer.cp == 2 * forward + backward


# ---- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("length", "space", "sizes"),
    [
        (LEAST_TOKENS, SearchSpace(), [1]),
        (2 * LEAST_TOKENS - 2, SearchSpace(), [1]),
        (2 * LEAST_TOKENS, SearchSpace(), [1, 2]),
        (LONG, SearchSpace(), [1, 2, 4, 8, 16]),
        (LONG + 1, SearchSpace(), [1]),
        (3 * LEAST_TOKENS, SearchSpace(), [1, 2, 3]),
        (1024, SearchSpace(cp=8), [8]),
        (1024, SearchSpace(cp=(4, 1, 4)), [1, 4]),
        (1023, SearchSpace(cp=1), [1]),
    ],
)
def test_cp_leaves_a_rank_8192_tokens_unless_it_is_given(length, space, sizes):
    assert space.context_sizes(length) == sizes and LEAST_TOKENS == 8192


def test_a_microbatch_that_is_cut_has_one_sample_unless_given():
    cluster = Cluster(GPUS["h100"], 8)
    of_size = {}
    for cp, space in ((None, SearchSpace()), (2, SearchSpace(cp=2)), (None, SearchSpace(microbatch=2))):
        found = list(layouts(find_model("llama-3-8b"), cluster, 8, space, 4 * LEAST_TOKENS))
        of_size[cp, space.microbatch] = {one.microbatch for one in found if one.cp > 1}
    assert of_size == {(None, None): {1}, (2, None): {1, 2, 4, 8}, (None, 2): {2}}


def test_every_layout_with_cp_divides():
    every = list(layouts(LLAMA, a100s(64), 16, SearchSpace(attention="flash"), LONG))
    assert len(set(every)) == len(every) and {one.gpus for one in every} == {64}
    assert {one.cp for one in every} == {1, 2, 4, 8, 16} and {one.context_parallel for one in every} == set(METHODS)
    assert {one.context_parallel for one in every if one.cp == 1} == {"ring"}
    assert {one.microbatch for one in every if one.cp > 1} == {1} < {one.microbatch for one in every}
    for one in every:
        judge(LLAMA, one, a100s(64), 16, LONG, exact=False)  # refuses what does not divide
        assert one.zero == 0 or one.replicas > 1
    assert {one.zero for one in every if one.dp == 1 and one.cp > 1} == {0, 1, 2, 3}
    heads = {(one.tp, one.cp) for one in every if one.context_parallel == "ulysses" and one.cp > 1}
    assert heads == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}, "cp divides the 8 / tp heads of keys"
    scores = {one.recompute for one in layouts(LLAMA, a100s(64), 16, SearchSpace(cp=4, context_parallel="ring"))}
    assert scores == {"none", "full"}, "a ring keeps no scores that could be recomputed"


def test_cp_wins_where_a_sequence_does_not_fit_without():
    cluster = replace(a100s(64), gpu=replace(a100s(64).gpu, memory=80e9))
    space = SearchSpace(attention="flash")
    with pytest.raises(UsageError, match=r"nothing fits .* What would fit: --cp 2 \(dp 1, cp 2 \(ring\), tp 8"):
        plan(LLAMA, cluster, 8, 8 * LONG, replace(space, cp=1))
    best, *_ = plan(LLAMA, cluster, 8, 8 * LONG, space).plans
    assert best.layout.cp > 1 and best.memory.total < cluster.usable_memory


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("length", "mesh", "recompute", "gigabytes", "seconds"),
    [
        (2**13, (64, 1, 1, 1), "none", 72, 9.0),
        (2**15, (16, 4, 1, 1), "none", 72, 17.3),
        (2**17, (4, 16, 1, 1), "none", 73, 51.7),
        (2**20, (2, 8, 4, 1), "full", 54, 466.2),
    ],
)
def test_choices_printed_in_chapter_11(length, mesh, recompute, gigabytes, seconds):
    space = SearchSpace(attention="flash", precision=PRECISIONS["bf16"])
    best, *_ = plan(LLAMA, Cluster(GPUS["h100"], 64), 2**22 // length, length, space, top=1).plans
    assert best.layout.mesh == mesh and best.layout.recompute == recompute
    assert best.layout.context_parallel == ("all-gather" if length == 2**17 else "ring")
    assert (round(best.memory.total / 1e9), round(best.time.total, 1)) == (gigabytes, seconds)


def test_without_cp_a_sequence_may_have_any_length():
    assert judge(LLAMA, layout(dp=2), a100s(2), 2, 7) is not None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "length", "words"),
    [
        ({"cp": 4}, LONG, r"dp\*cp\*tp\*pp = 2\*4\*1\*1 = 8, but the cluster has 4 GPUs"),
        ({"cp": 2}, 6, r"seq-len/\(2\*cp\) = 6/4 is not a whole number"),
        ({"cp": 2, "cp_order": "contiguous"}, 7, "seq-len/cp = 7/2 is not a whole number"),
        ({"cp": 2, "tp": 8, "dp": 1, "context_parallel": "ulysses"}, LONG, "kv-heads/cp = 1/2 is not a whole number"),
        ({"cp": 2, "context_parallel": "rings"}, LONG, "'rings': expected ring, all-gather, ulysses"),
        ({"cp": 2, "cp_order": "striped"}, LONG, "'striped': expected zigzag, contiguous"),
        ({"cp": 0, "dp": 8}, LONG, "cp 0: expected at least 1"),
    ],
)
def test_a_layout_whose_cp_does_not_fit_is_refused(given, length, words):
    one = layout(**{"dp": 2, **given})
    with pytest.raises(UsageError, match=words):
        judge(LLAMA, one, a100s(4 if given["cp"] in (0, 4) else one.gpus), one.dp, length)
