"""Experts in the planner: bytes and memory of real runs, and time on the modelled clock."""

from dataclasses import replace
from fractions import Fraction

import pytest
from combinations import TEXT
from planning import a100s, layout
from routing import ep_bytes
from training import config_for, ranks_of, trainer_for

from minipar.bench.layouts import RECORDED, framework_of, layout_of, modelled_step, shape_of
from minipar.bench.pipeline import random_tokens
from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.parallel.memory import elements_placed
from minipar.plan.cluster import GPUS, AlphaBeta, Cluster, model_clock_cluster
from minipar.plan.compute import expert_seconds, unit_times
from minipar.plan.gpu_time import gpu_compute
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import layer_activations, memory, rank_buckets, rank_parameters, volume
from minipar.plan.step_time import step_time
from minipar.train.from_config import step_layout

pytestmark = pytest.mark.sampled(3)

MIXTRAL = find_model("mixtral-8x7b")
H100S = Cluster(GPUS["h100"], 64)

# ---- bytes and memory of runs ----------------------------------------------------------------------------------------

SIZES = "--model mixtral --layers 4 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --seq-len 32 --vocab-size 64"
EVEN = "--global-batch 8 --experts 4 --top-k 4"  # each token goes to all experts: routing is uniform, exactly
RUNS = [
    "--dp 2 --ep 2",
    "--dp 4 --ep 4 --zero-stage 1",
    "--dp 4 --ep 2 --zero-stage 2 --microbatches 2",
    "--dp 4 --ep 2 --zero-stage 3",
    "--dp 2 --cp 2 --ep 4 --zero-stage 3 --microbatches 2",
    "--cp 2 --ep 2 --context-parallel ulysses",
    "--dp 2 --tp 2 --ep 2",
    "--dp 2 --tp 2 --ep 2 --sequence-parallel --zero-stage 1",
    "--dp 2 --ep 2 --recompute full",
    "--dp 2 --pp 2 --ep 2 --microbatches 4",
    "--dp 2 --pp 2 --ep 2 --microbatches 4 --schedule zb-h1 --zero-stage 1",
    "--dp 2 --pp 2 --ep 2 --microbatches 2 --recompute full --zero-stage 2",
    "--dp 2 --tp 2 --etp 1 --ep 2 --sequence-parallel",
    "--dp 2 --tp 2 --etp 1 --ep 4 --sequence-parallel --zero-stage 1 --microbatches 2",
    "--tp 4 --etp 2 --ep 2 --sequence-parallel --microbatches 2",
    "--cp 2 --tp 2 --etp 1 --ep 4 --sequence-parallel --zero-stage 3",
    "--tp 2 --pp 2 --etp 1 --ep 2 --sequence-parallel --microbatches 4",
]


def bytes_of_a_step(config, axis):
    """What each rank sends."""

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        comm.traffic.reset()
        trainer.step(0)
        return comm.traffic.bytes(axis=axis)

    return run_local(ranks_of(config), rank)


def volume_of(config):
    return volume(shape_of(config), layout_of(config), config.model.seq_len, framework_of(config))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", RUNS)
def test_bytes_over_ep_are_those_that_a_run_counts(flags):
    config = config_for(f"{SIZES} {EVEN} {flags}")
    assert bytes_of_a_step(config, "ep") == [volume_of(config).ep] * ranks_of(config) != [0] * ranks_of(config)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uniform_routing_sends_the_published_bytes(k, ranks):
    """4 k N h (P-1)/P elements per layer and microbatch, and the counts. ep_bytes says the same of such rows."""
    config = config_for(f"{SIZES} --global-batch 8 --experts 4 --top-k {k} --dp {ranks} --ep {ranks}")
    sent, n = volume_of(config).ep, 8 // ranks * 32
    counts = 8 * 4 * Fraction(ranks - 1, ranks)
    assert sent == 4 * (4 * 4 * k * n * 64 * Fraction(ranks - 1, ranks) + counts)
    rows = [[[n * k // ranks] * ranks] * ranks] * 4
    assert [ep_bytes(step_layout(config), rank, rows) for rank in range(ranks)] == [sent] * ranks


def test_an_untrained_router_sends_what_uniform_routing_does():
    """On average over the ranks, to 5 %."""
    config = config_for(f"{SIZES} --global-batch 32 --experts 8 --top-k 2 --dp 4 --ep 4")
    counted = bytes_of_a_step(config, "ep")
    assert len(set(counted)) > 1
    assert sum(counted) / 4 == pytest.approx(float(volume_of(config).ep), rel=0.05)


APART = ["--dp 4 --tp 2 --ep 2 --etp 1 --sequence-parallel", "--dp 2 --cp 2 --tp 2 --ep 4 --etp 1 --sequence-parallel"]
MESHES = ["--dp 4 --ep 2", "--dp 4 --ep 4", "--dp 2 --cp 2 --ep 2", "--dp 4 --tp 2 --ep 2", *APART]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mesh", "zero"), [(mesh, zero) for mesh in MESHES for zero in range(4)])
def test_experts_are_summed_over_the_ranks_that_hold_them(mesh, zero):
    """As a run counts them, with an all-reduce of 8 bytes each for the loss and the norm: 2 * 8 * 3/4 on average.

    The formula gathers the ends 2m times at stage 3. A run gathers them m times: they are not tied.
    """
    config = config_for(f"{SIZES} {EVEN} {mesh} --zero-stage {zero} --microbatches 2")
    counted = Fraction(sum(bytes_of_a_step(config, "dp")), ranks_of(config))
    ends = 2 * (2 * 64 * 64 // config.mesh.tp + 64) * 4 * Fraction(3, 4) if zero == 3 else 0
    assert counted == volume_of(config).dp - ends + 2 * (2 * 8 * Fraction(3, 4))


@pytest.mark.parametrize("more", ["", "--recompute full", "--microbatches 2 --dp 2 --zero-stage 1"])
@pytest.mark.parametrize("etp", [1, 2])
def test_whole_experts_save_what_a_run_counts_over_tp(etp, more):
    config, cut = (
        config_for(f"{SIZES} {EVEN} --tp 4 --sequence-parallel {more} --ep {4 // etp} --etp {etp}") for etp in (etp, 4)
    )
    saved = sum(bytes_of_a_step(cut, "tp")) - sum(bytes_of_a_step(config, "tp"))
    assert saved == ranks_of(config) * (volume_of(cut).tp - volume_of(config).tp) > 0


@pytest.mark.parametrize("given", [{}, {"tp": 8, "sequence_parallel": True}, {"recompute": "full", "cp": 2}])
def test_experts_change_no_bytes_of_the_other_axes(given):
    one = layout(dp=8, pp=4, microbatches=8, **given)
    dense = replace(MIXTRAL, experts=None, top_k=1)
    (sent, other) = (volume(model, replace(one, ep=ep), 4096) for model, ep in ((MIXTRAL, 8), (dense, 1)))
    assert (sent.tp, sent.pp, sent.cp) == (other.tp, other.pp, other.cp) and sent.ep > 0 == other.ep
    assert volume(MIXTRAL, one, 4096).ep == 0


UNEVEN = "--global-batch 32 --experts 8 --top-k 2"  # as an untrained router sends them


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("flags", "length", "routing"),
    [(flags, length, EVEN) for length in (32, 256) for flags in RUNS] + [(flags, 32, UNEVEN) for flags in RUNS[::3]],
)
def test_memory_is_within_10_percent_of_the_ledger(flags, length, routing):
    """At 256 tokens the program's attention keeps no scores."""
    config = config_for(f"{SIZES} {routing} --seq-len {length} {flags}")

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
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("mesh", ["--dp 4", "--dp 4 --ep 2", "--dp 4 --ep 4", "--dp 2 --cp 2 --tp 2 --ep 4", *APART])
def test_a_rank_holds_and_updates_what_the_program_places(mesh, zero):
    config = config_for(f"{SIZES} {EVEN} {mesh} --zero-stage {zero}")
    one, shape = layout_of(config), shape_of(config)
    psi, own = elements_placed(step_layout(config).placements(), rank=0)
    assert rank_parameters(shape, one) == psi
    held = memory(shape, one, 32, framework_of(config))
    parts = [held.parameters, held.gradients, held.optimizer]
    assert parts == [4 * (own if zero == 3 else psi), 4 * (own if zero >= 2 else psi), 8 * (own if zero else psi)]


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


# ---- time ------------------------------------------------------------------------------------------------------------

INSIDE, BETWEEN = AlphaBeta(3e-6, 1 / 2e9), AlphaBeta(14e-6, 1 / 0.5e9)
TIMED = "--model mixtral --layers 4 --hidden 32 --heads 8 --ffn 64 --seq-len 64 --vocab-size 64"
ONE_HOST = [
    "--dp 2 --ep 2",
    "--dp 4 --ep 4",
    "--dp 4 --ep 2",
    "--dp 4 --ep 2 --zero-stage 1",
    "--dp 4 --ep 2 --zero-stage 3 --microbatches 2",
    "--dp 2 --cp 2 --ep 4",
    "--dp 2 --ep 2 --recompute full",
    "--dp 2 --pp 2 --ep 2 --microbatches 4",
    "--dp 2 --pp 2 --ep 2 --microbatches 4 --schedule zb-h1",
]


def compared(flops, flags, per_host=8, routing="--experts 4 --top-k 4"):
    """(measured, predicted) seconds of one step of the program on a modelled cluster."""
    parsed = config_for(f"{TIMED} {routing} {flags}")
    batch = parsed.mesh.dp * parsed.data.microbatches
    config = config_for(f"{TIMED} {routing} {flags} --global-batch {batch}")
    cluster = model_clock_cluster(ranks_of(config), flops, INSIDE, BETWEEN, min(per_host, ranks_of(config)))
    predicted = step_time(shape_of(config), layout_of(config), cluster, config.model.seq_len)
    return modelled_step(config, cluster), predicted.total


@pytest.mark.sampled(7)
@pytest.mark.parametrize("flops", [1e9, 1e10, 3e11])
@pytest.mark.parametrize("flags", ONE_HOST)
def test_steps_take_the_predicted_time(flags, flops):
    measured, predicted = compared(flops, flags)
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "per_host", "bound"),
    [
        ("--dp 4 --ep 4", 2, 0.02),
        ("--dp 8 --ep 4", 2, 0.02),
        ("--dp 4 --ep 2", 2, 0.04),
        ("--dp 4 --tp 2 --ep 4", 4, 0.02),
        ("--dp 2 --tp 2 --ep 4 --etp 1 --sequence-parallel", 2, 0.02),
    ],
)
def test_all_to_alls_over_two_hosts_take_the_predicted_time(flags, per_host, bound):
    """Where ep stays in a host, the sum of gradients crosses hosts, which the clock shows 4 % longer."""
    measured, predicted = compared(3e11, flags, per_host)
    assert predicted == pytest.approx(measured, rel=bound)


def test_with_tp_steps_are_predicted_as_well_as_llamas():
    """Backward's sums of a Llama do not hide on minipar's clock. The planner hides them."""
    meshes = ["--dp 2 --tp 2 --ep 2", "--dp 2 --tp 4 --ep 2 --etp 2 --sequence-parallel", APART[1]]
    for flags in ("--dp 2 --tp 2 --ep 2 --sequence-parallel", *meshes):
        measured, predicted = compared(3e11, flags)
        assert 0.94 < predicted / measured < 1


@pytest.mark.parametrize(("flops", "least", "most"), [(1e10, 0.98, 1.02), (3e11, 1, 1.1)])
def test_sums_over_tp_delay_the_experts_gradients_in_the_planner(flops, least, most):
    """On minipar's clock they do not: where messages take all the time, the prediction is too long by a tenth."""
    measured, predicted = compared(flops, APART[0])
    assert least < predicted / measured < most


def test_uneven_routing_takes_longer_than_predicted():
    """An untrained router's: the clock waits for the fullest rank, the planner spreads tokens evenly."""
    measured, predicted = compared(1e9, "--dp 4 --ep 4", routing="--experts 4 --top-k 2")
    assert 0.8 < predicted / measured < 0.9


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


def test_a_unit_waits_for_ep_and_so_does_the_step():
    one = layout(dp=8, ep=8, microbatches=3, attention="flash")
    forward, backward = expert_seconds(MIXTRAL, one, H100S, 4096)
    units = unit_times(MIXTRAL, one, H100S, 4096)
    assert units.layer.ep == forward + backward > 0 == units.head.ep == units.embedding.ep
    time = step_time(MIXTRAL, one, H100S, 4096)
    assert time.ep == pytest.approx(3 * 32 * (forward + backward), rel=1e-12)
    assert unit_times(MIXTRAL, replace(one, recompute="full"), H100S, 4096).layer.ep == 2 * forward + backward
    for pp in (1, 4):
        parts = step_time(MIXTRAL, replace(one, pp=pp, microbatches=8), H100S, 4096)
        assert parts.ep == pytest.approx(8 * 32 / pp * (forward + backward), rel=1e-12)


def test_fewer_experts_on_a_rank_are_larger_products():
    """Each product costs half_work more: 16 and 2 of a layer's experts, and two of attention."""

    def forward(ep):
        one = layout(dp=8, ep=ep, attention="flash")
        return gpu_compute(MIXTRAL, one, 4096, 0, H100S).forward

    a = H100S.assumptions
    assert forward(1) - forward(8) == pytest.approx(14 * a.half_work / H100S.product_rate, rel=1e-9)
