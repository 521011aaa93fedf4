"""The planner's bytes, memory and seconds of a step are those of the program that runs it."""

from fractions import Fraction
from functools import cache

import pytest
from planning import layout
from training import config_for, ranks_of, trainer_for

from chapters.support.ch10.runs import modelled_step
from chapters.support.training import step_layout
from minipar.bench.layouts import RECORDED, framework_of, layout_of, shape_of
from minipar.bench.pipeline import random_tokens
from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.parallel.predicted_memory import elements_placed
from minipar.plan.cluster import AlphaBeta, model_clock_cluster
from minipar.plan.rank_bytes import memory, rank_parameters, volume
from minipar.plan.step_time import step_time

# ---- bytes and memory ------------------------------------------------------------------------------------------------

SHAPE = "--layers 4 --hidden 64 --heads 8 --seq-len 32 --vocab-size 64 --global-batch 16"
LLAMA = "--model llama --kv-heads 4 --ffn 96"
EXPERTS = "--model mixtral --kv-heads 4 --ffn 96 --experts 4 --top-k 4"  # each token goes to all: routing is uniform
RUNS = [
    "--dp 4 --zero-stage 3",
    "--tp 4 --sequence-parallel",
    "--dp 2 --tp 2 --pp 2 --zero-stage 1 --microbatches 4",
    "--cp 4",
    "--cp 2 --seq-len 256 --global-batch 2",  # the program's attention keeps no scores
    "--cp 4 --context-parallel all-gather",
    "--dp 2 --cp 2 --tp 2 --context-parallel ulysses",
    "--dp 2 --cp 2 --zero-stage 3 --microbatches 2",
    "--cp 2 --pp 2 --recompute full --zero-stage 2 --microbatches 2",
    f"--cp 2 --tp 2 --context-parallel ulysses {LLAMA}",
    f"--dp 4 --ep 4 --zero-stage 1 {EXPERTS}",
    f"--dp 2 --cp 2 --ep 4 --zero-stage 3 --microbatches 2 {EXPERTS}",
    f"--dp 2 --tp 2 --ep 2 --sequence-parallel --zero-stage 1 {EXPERTS}",
    f"--dp 2 --pp 2 --ep 2 --microbatches 2 --recompute full --zero-stage 2 {EXPERTS}",
    f"--dp 2 --tp 2 --ep 2 --sequence-parallel --microbatches 2 {EXPERTS}",
]


@cache
def measured(flags):
    """Return each rank's bytes by axis in a step, and the most bytes that the ledger of any rank shows."""
    args = config_for(f"{SHAPE} {flags}")

    def rank(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = trainer_for(args, random_tokens(args), comm)
            comm.traffic.reset()
            trainer.step(0)
            sent = {axis: comm.traffic.bytes(axis=axis) for axis in ("dp", "cp", "tp", "ep")}
            for step in range(1, RECORDED):
                trainer.step(step)
        return sent, ledger.peak

    sent, peaks = zip(*run_local(ranks_of(args), rank), strict=True)
    return sent, max(peaks)


def planned(flags):
    """Return (model, layout, length, framework) of a run."""
    args = config_for(f"{SHAPE} {flags}")
    return shape_of(args), layout_of(args), args.seq_len, framework_of(args)


@pytest.mark.parametrize("flags", RUNS)
def test_bytes_over_cp_and_ep_and_the_peak_are_a_runs(flags):
    sent, peak = measured(flags)
    predicted = volume(*planned(flags))
    assert [(rank["cp"], rank["ep"]) for rank in sent] == [(predicted.cp, predicted.ep)] * len(sent)
    assert (predicted.cp > 0) == ("--cp" in flags) and (predicted.ep > 0) == ("--ep" in flags)
    assert memory(*planned(flags)).total == pytest.approx(peak, rel=0.10)


@pytest.mark.parametrize("zero", range(4))
def test_gradients_travel_over_dp_and_cp_together(zero):
    """As a run counts them, but for the loss and the norm: an all-reduce of 8 bytes each takes 7/8 n, both ways."""
    flags = f"--dp 4 --cp 2 --zero-stage {zero} --microbatches 2"
    model, one, length, framework = planned(flags)
    predicted = volume(model, one, length, framework).dp
    counted = Fraction(sum(rank["dp"] for rank in measured(flags)[0]), 8)
    assert predicted < counted <= predicted + 2 * 2 * 7 * 8
    alone = layout(dp=8, microbatches=2, zero=zero, precision=one.precision)
    assert predicted == volume(model, alone, length, framework).dp


CUT = "--dp 4 --tp 2 --ep 2 --sequence-parallel"


@pytest.mark.parametrize(("mesh", "zero"), [("--dp 4 --ep 2", 0), ("--dp 2 --cp 2 --ep 2", 2), (CUT, 1), (CUT, 3)])
def test_experts_are_summed_over_the_ranks_that_hold_them(mesh, zero):
    """As a run counts them, with an all-reduce of 8 bytes each for the loss and the norm: 2 * 8 * 3/4 on average.

    The formula gathers the ends 2m times at stage 3. A run gathers them m times: they are not tied.
    """
    flags = f"{EXPERTS} {mesh} --zero-stage {zero} --microbatches 2"
    args = config_for(f"{SHAPE} {flags}")
    counted = Fraction(sum(rank["dp"] for rank in measured(flags)[0]), ranks_of(args))
    ends = 2 * (2 * 64 * 64 // args.tp + 64) * 4 * Fraction(3, 4) if zero == 3 else 0
    assert counted == volume(*planned(flags)).dp - ends + 2 * (2 * 8 * Fraction(3, 4))
    # What a rank holds and updates is what the program places there.
    psi, own = elements_placed(step_layout(args).placements(), rank=0)
    held = memory(*planned(flags))
    assert rank_parameters(*planned(flags)[:2]) == psi
    assert held.optimizer == 8 * (own if zero else psi) and held.parameters == 4 * (own if zero == 3 else psi)


# ---- seconds on the `model` clock ------------------------------------------------------------------------------------

INSIDE, BETWEEN = AlphaBeta(3e-6, 1 / 2e9), AlphaBeta(14e-6, 1 / 0.5e9)
TIMED = "--layers 4 --hidden 32 --heads 8 --seq-len 64 --vocab-size 64"
GPT = "--layers 8 --hidden 32 --heads 4 --seq-len 16 --vocab-size 64 --microbatches 4"
ROUTED = f"{TIMED} --model mixtral --ffn 64 --experts 4 --top-k 4"
STEPS = [  # bound, FLOP/s, flags; the faster a rank computes, the more of a step are messages
    (1e-9, 1e10, f"{GPT} --recompute full"),
    (1e-3, 1e10, f"{GPT} --dp 8 --zero-stage 2"),
    (1e-3, 1e10, f"{GPT} --dp 8 --zero-stage 3 --zero-replicas 2"),
    (1e-4, 1e10, f"{GPT} --tp 4 --sequence-parallel"),
    (1e-3, 1e10, f"{GPT} --pp 4 --schedule naive"),
    (1e-3, 1e10, f"{GPT} --pp 4 --schedule gpipe --microbatches 8"),
    (1e-3, 1e10, f"{GPT} --pp 4 --schedule interleaved-1f1b --virtual-stages 2 --microbatches 8"),
    (5e-3, 1e10, f"{GPT} --pp 4 --schedule zb-h1 --microbatches 8"),
    (1e-3, 1e10, f"{GPT} --pp 4 --schedule zbv --microbatches 8"),
    (1e-3, 1e10, f"{GPT} --dp 2 --tp 2 --pp 2"),
    (3e-2, 1e10, f"{GPT} --dp 2 --pp 4 --zero-stage 3"),
    (3e-4, 3e11, f"{TIMED} --cp 8"),
    (3e-4, 3e11, f"{TIMED} --cp 4 --context-parallel all-gather"),
    (3e-4, 1e10, f"{TIMED} --cp 4 --context-parallel ulysses"),
    (3e-2, 3e11, f"{TIMED} --cp 8 --model llama --kv-heads 2 --ffn 64"),  # its head has a bucket of its own
    (3e-4, 3e11, f"{TIMED} --dp 2 --cp 2 --tp 2 --zero-stage 1 --sequence-parallel"),
    (2e-2, 1e9, f"{ROUTED} --dp 4 --ep 4"),
    (2e-2, 3e11, f"{ROUTED} --dp 4 --ep 2 --zero-stage 3 --microbatches 2"),
    (2e-2, 3e11, f"{ROUTED} --dp 2 --pp 2 --ep 2 --microbatches 4 --schedule zb-h1"),
    (6e-2, 3e11, f"{ROUTED} --dp 2 --tp 2 --ep 2"),  # the planner hides backward's sums over tp, a run does not
]


def compared(flops, flags, per_host=8):
    """Return the seconds of one step of the program on a modelled cluster, measured and predicted."""
    args = config_for(f"{flags} --global-batch 512")
    args.global_batch = args.dp * args.microbatches
    cluster = model_clock_cluster(ranks_of(args), flops, INSIDE, BETWEEN, min(per_host, ranks_of(args)))
    predicted = step_time(shape_of(args), layout_of(args), cluster, args.seq_len)
    return modelled_step(args, cluster), predicted.total


@pytest.mark.parametrize(("bound", "flops", "flags"), STEPS)
def test_a_step_takes_the_predicted_time(bound, flops, flags):
    measured, predicted = compared(flops, flags)
    assert predicted == pytest.approx(measured, rel=bound)


@pytest.mark.parametrize(
    ("bound", "per_host", "flags"),
    [
        (0.11, 2, f"{TIMED} --cp 4"),  # the planner lets every step of a ring wait for the slow link
        (0.02, 2, f"{TIMED} --cp 4 --context-parallel all-gather"),
        (0.02, 2, f"{ROUTED} --dp 4 --ep 4"),
        (0.04, 2, f"{ROUTED} --dp 4 --ep 2"),
        (0.02, 4, f"{ROUTED} --dp 4 --tp 2 --ep 4"),
    ],
)
def test_over_two_hosts_steps_are_predicted_less_well(bound, per_host, flags):
    measured, predicted = compared(3e11, flags, per_host)
    assert predicted == pytest.approx(measured, rel=bound)


def test_uneven_routing_takes_longer_than_predicted():
    """An untrained router's: the clock waits for the fullest rank, the planner spreads tokens evenly."""
    measured, predicted = compared(1e9, f"{TIMED} --model mixtral --ffn 64 --experts 4 --top-k 2 --dp 4 --ep 4")
    assert 0.8 < predicted / measured < 0.9
