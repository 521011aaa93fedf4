"""Claims about `predicted_traffic`: what a step sends on each axis, known before it runs, == what every rank counts.

tests/train/test_combinations.py asserts the same of each of its combinations, on every rank; here are the cases that it
has not, and the formulas of the papers.
"""

from dataclasses import replace

import pytest
import tensor_cases
import training
from combinations import TEXT, VOCAB
from tensor_cases import HIDDEN, LAYERS, SHAPES
from training import ranks_of, trainer_for

from chapters.support.training import step_traffic
from minipar.comm import run_local, wire_bytes
from minipar.more.context.context_traffic import cp_bytes
from minipar.more.llama import LlamaConfig
from minipar.nn import GPTConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.predicted_traffic import end_gathers, pp_bytes, predicted_traffic, tp_bytes
from minipar.train.pretrained import save_pretrained
from minipar.train.trainer import make_model

AXES = ("dp", "cp", "tp", "pp")
SHAPE = f"--layers 5 --hidden 20 --heads 4 --seq-len 8 --vocab-size {VOCAB}"


def config_for(flags, ranks):
    return training.config_for(f"{SHAPE} {flags}", ranks)


def counted(config):
    """Each rank's bytes by axis in the second step, and whether anything went over another axis."""

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        sent = {axis: comm.traffic.bytes(axis=axis) for axis in AXES}
        assert sum(sent.values()) == comm.traffic.bytes()
        return sent

    return run_local(ranks_of(config), rank)


CASES = {
    "float32": (8, "--dp 2 --tp 2 --pp 2 --zero-stage 1 --microbatches 2 --sequence-parallel --clip-grad 1"),
    "float32, parameters sharded": (6, "--dp 3 --pp 2 --zero-stage 3 --microbatches 2 --global-batch 12"),
    "sharded, reduced after every microbatch": (6, "--dp 3 --tp 2 --zero-stage 3 --microbatches 2 --global-batch 12 "
        "--sync-every-microbatch --recompute full --reduction ordered"),
    "five replicas, which divide nothing": (5, "--zero-stage 2 --global-batch 10 --microbatches 2"),
    "pairs of a forward and a backward": (4, "--dp 2 --pp 2 --layers 4 --schedule dualpipev --microbatches 4 "
        "--zero-stage 3 --global-batch 8"),
    "three stages per rank": (6, "--pp 2 --dp 3 --layers 7 --schedule interleaved-1f1b --virtual-stages 3 "
        "--microbatches 4 --global-batch 12 --zero-stage 3"),
    "sums as trees, in a pipeline": (8, "--dp 2 --tp 2 --pp 2 --schedule zb-h1 --sequence-parallel --reduction tree "
        "--global-batch 4 --vocab-size 16 --recompute full --zero-stage 1"),
    "sums as trees, of a Llama's own tokens": (8, "--pp 2 --tp 4 --model llama --reduction tree "
        "--global-batch 4 --vocab-size 16 --hidden 24 --sequence-parallel --recompute full"),
    "16 ranks": (16, "--dp 2 --tp 4 --pp 2 --schedule interleaved-1f1b --sequence-parallel --microbatches 4 "
        "--global-batch 8 --zero-stage 3 --recompute full"),
    "a long vocabulary": (8, "--tp 4 --pp 2 --vocab-size 259 --microbatches 2 --sequence-parallel --zero-stage 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sends_on_each_axis_what_was_predicted(name):
    ranks, flags = CASES[name]
    config = config_for(flags, ranks)
    assert counted(config) == [step_traffic(config, rank) for rank in range(ranks)]


def test_a_model_with_more_positions_than_the_sequence(tmp_path):
    """GPT-2's directory has positions of its own, which travel with the gradients."""
    model = make_model(config_for("--seq-len 20", 1))
    save_pretrained(model, tmp_path)
    flags = f"--tp 2 --pp 2 --sequence-parallel --zero-stage 3 --microbatches 2 --init-from {tmp_path}"
    config = training.config_for(f"--seq-len 8 {flags}", 8)
    assert config.shape.n_positions == 20
    assert counted(config) == [step_traffic(config, rank) for rank in range(8)]


# ---- tensor parallelism, written out ---------------------------------------------------------------------------------


def closed_form(tp, rank, sequence, reduction, microbatches, recompute):
    """Return what one step sends over tp, in bytes of float64: see `tensor_parallel`.

    n = B T h elements travel: per layer and microbatch twice forward and twice backward, after the embedding once
    forward, before the head once backward. Each time as an all-reduce; with sequence parallelism as a reduce-scatter
    where partial results are summed and an all-gather where the whole is needed, one of them in each direction: forward
    and backward of embedding and head then send one of each. Recompute runs each layer's forward again. The loss adds
    all-reduces of N = B T maxima and 2N sums. The norm adds a number. Sequence parallelism
    adds, once per step and bucket, the gradients of what is replicated: 6h for a layer (two LayerNorms, two biases),
    (T + 2) h for positions and last LayerNorm.
    """
    length = tokens = SHAPES[tp][1]  # of one sample
    n = length * HIDDEN

    def wire(op, elements, algorithm=reduction):
        if op == "all_gather":
            algorithm = {"ring": "ring", "ordered": "pairwise"}[reduction]
        return wire_bytes(op, algorithm, elements, 8, tp, rank)

    pair = wire("all_gather", n) + wire("reduce_scatter", n)
    whole = pair if sequence else wire("all_reduce", n)
    per_layer = (6 if recompute else 4) * whole
    loss = wire("all_reduce", tokens) + wire("all_reduce", 2 * tokens)
    total = microbatches * (LAYERS * per_layer + 2 * whole + loss)
    if sequence:
        total += LAYERS * wire("all_reduce", 6 * HIDDEN) + wire("all_reduce", (length + 2) * HIDDEN)
    return total + wire("all_reduce", 1, "ordered")


@pytest.mark.parametrize(
    ("tp", "sequence", "microbatches", "reduction", "recompute"),
    [(2, False, 1, "ring", False), (3, True, 3, "ordered", False), (4, True, 2, "ring", True)],
)
def test_a_step_over_tp_sends_what_the_closed_form_says(tp, sequence, microbatches, reduction, recompute):
    flags = f"--global-batch {microbatches} --microbatches {microbatches} --reduction {reduction} --steps 2"
    flags += " --recompute full" * recompute + " --sequence-parallel" * sequence
    config = tensor_cases.config_for(flags, tp, tp)

    def rank(comm):
        trainer = trainer_for(config, tensor_cases.TEXT, comm)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        return comm.traffic.bytes(axis="tp"), comm.traffic.bytes()

    for r, (over_tp, everything) in enumerate(run_local(tp, rank)):
        assert over_tp == everything == closed_form(tp, r, sequence, reduction, microbatches, recompute)


# ---- the formulas of the papers --------------------------------------------------------------------------------------

B, T, H, L, M = 2, 8, 24, 4, 3
N = B * T * H
SERIAL = StepLayout(GPTConfig(16, T, H, L, 8), T, B * T, M, itemsize=1, reduce_itemsize=1)
PSI = L * (12 * H * H + 13 * H) + (16 + T + 2) * H


def summed(layout, axis):
    return sum(predicted_traffic(layout, rank)[axis] for rank in range(layout.dp * layout.tp * layout.pp))


def test_one_device_sends_nothing():
    assert predicted_traffic(SERIAL, 0) == {"dp": 0, "tp": 0, "pp": 0}


@pytest.mark.parametrize("d", [2, 8])
def test_zero_sends_2_2_2_and_3_psi_and_2_per_more_microbatch(d):
    """Rajbhandari et al. 2020, section 7.2, per rank: Psi (d-1)/d times that. And the float64s of loss and norm."""
    for stage, volume in enumerate((2, 2, 2, 2 * M + 1)):
        layout = replace(SERIAL, dp=d, zero_stage=stage)
        scalars = (1 if stage == 0 else 2) * 2 * (d - 1) * 8
        assert summed(layout, "dp") == volume * PSI * (d - 1) + scalars
    assert summed(replace(SERIAL, dp=d, zero_stage=3, microbatches=1), "dp") == 3 * PSI * (d - 1) + 2 * 2 * (d - 1) * 8


@pytest.mark.parametrize(("t", "sequence", "recompute"), [(2, False, False), (4, True, False), (8, True, True)])
def test_a_layer_adds_8_bsh_per_microbatch_and_12_recomputed(t, sequence, recompute):
    layouts = [
        replace(SERIAL, model=GPTConfig(16, T, H, layers, 8), tp=t, sequence_parallel=sequence, recompute=recompute)
        for layers in (1, 2)
    ]
    for rank in range(t):
        one, two = (tp_bytes(layout, rank, 0) for layout in layouts)
        replicated = 2 * 6 * H * (t - 1) // t if sequence else 0
        assert two - one == M * (12 if recompute else 8) * N * (t - 1) // t + replicated


@pytest.mark.parametrize(("c", "recompute"), [(1, False), (2, True), (4, False)])
@pytest.mark.parametrize("method", ["ring", "all-gather", "ulysses"])
def test_attention_sends_the_published_elements_over_cp(method, c, recompute):
    """Of a layer and microbatch; of 4 heads two share one of keys. Gradients travel in 4 bytes where the rest has 2."""
    model = LlamaConfig(16, 24, 8, 3, 4, 2, 32)
    u, h, h_kv = 5 * 32 // c, 24, 12
    layout = StepLayout(model, 32, 5 * 32 // c, microbatches=2, itemsize=2, reduce_itemsize=4, recompute=recompute)
    forwards = 2 if recompute else 1
    hops = {"ring": c, "all-gather": c - 1, "ulysses": 0}[method] if c > 1 else 0
    moved = 2 * (h + h_kv) * u * (c - 1) // c if method == "ulysses" else 2 * (c - 1) * u * h_kv
    expected = 2 * 3 * ((forwards + 1) * moved * 2 + 2 * hops * u * h_kv * 4)
    assert cp_bytes(layout, method, c, 0) == expected


@pytest.mark.parametrize(("p", "t"), [(2, 4), (4, 1)])
def test_a_pipeline_sends_bsh_per_microbatch_cut_and_direction(p, t):
    model = GPTConfig(16, T, H, 8, 8)
    scalars = 2 * (p - 1) * (2 * (8 + 2) + 1) * 8  # the norm's rows and the loss, all-reduced
    for name, cuts in (("1f1b", p - 1), ("interleaved-1f1b", 2 * p - 1), ("zbv", 2 * (p - 1))):
        layout = replace(SERIAL, model=model, pp=p, tp=t, sequence_parallel=t > 1, microbatches=4)
        layout = replace(layout, schedule=make(name, p, 4))
        tied = 0 if name == "zbv" else 2 * (16 // t) * H  # the token embedding and its gradient
        expected = 2 * 4 * cuts * N // t + tied + scalars
        assert sum(pp_bytes(layout, rank) for rank in range(p)) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 8])
def test_a_pipelines_buckets_are_on_one_rank_and_are_the_model(name, p):
    layout = replace(SERIAL, model=GPTConfig(16, T, H, 17, 8), pp=p, schedule=make(name, p, 16), zero_stage=3)
    of_rank = [layout.buckets(pp=rank) for rank in range(p)]
    elements = sum(bucket[0].dp.bucket_size for buckets in of_rank for bucket in buckets)
    assert elements == PSI + (17 - L) * (12 * H * H + 13 * H)
    assert sum(len(some) for some in of_rank) == 17 + 2
    assert sum(layout.blocks(rank) for rank in range(p)) == 17


def test_zbv_gathers_the_embedding_for_head_and_lookup_at_once():
    """Between the two, at most once for each; in a pipeline whose ends lie apart, once for each lookup."""
    for m in (1, 2, 4, 8):
        assert end_gathers(make("1f1b", 4, m), head_too=False) == m
        assert m <= end_gathers(make("zbv", 4, m), head_too=True) <= 3 * m
