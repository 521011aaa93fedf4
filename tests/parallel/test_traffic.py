"""Claims about `predicted_traffic`: what a step sends on each axis, known before it runs, == what every rank counts.

tests/train/test_combinations.py asserts the same of each of its combinations, on every rank; here are the cases that it
has not, and the formulas of the papers.
"""

from dataclasses import replace

import pytest
import training
from combinations import TEXT, VOCAB, Combination
from training import ranks_of, trainer_for

from minipar.comm import run_local
from minipar.nn import GPTConfig, LlamaConfig
from minipar.nn.pretrained import save_pretrained
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.schedule_file import save_csv
from minipar.parallel.pipeline.schedules import SCHEDULES, make
from minipar.parallel.tensor.mappings import TensorGroup
from minipar.parallel.traffic import bucket_elements, dp_bytes, end_gathers, pp_bytes, predicted_traffic, tp_bytes
from minipar.train.config import schedule_of
from minipar.train.from_config import make_model, step_layout

pytestmark = pytest.mark.sampled(3)

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
    "reduced after every microbatch": (4, "--dp 2 --tp 2 --zero-stage 2 --microbatches 3 --global-batch 12 "
        "--sync-every-microbatch --sequence-parallel --dtype float64"),
    "sharded, reduced after every microbatch": (6, "--dp 3 --tp 2 --zero-stage 3 --microbatches 2 --global-batch 12 "
        "--sync-every-microbatch --recompute full --reduction ordered"),
    "five replicas, which divide nothing": (5, "--zero-stage 2 --global-batch 10 --microbatches 2"),
    "seven stages of nine layers": (7, "--pp 7 --layers 9 --microbatches 5 --global-batch 5 --schedule zb-h2"),
    "pairs of a forward and a backward": (4, "--dp 2 --pp 2 --layers 4 --schedule dualpipev --microbatches 4 "
        "--zero-stage 3 --global-batch 8"),
    "three stages per rank": (6, "--pp 2 --dp 3 --layers 7 --schedule interleaved-1f1b --virtual-stages 3 "
        "--microbatches 4 --global-batch 12 --zero-stage 3"),
    "sums as trees": (8, "--dp 4 --tp 2 --sequence-parallel --zero-stage 3 --reduction tree --global-batch 4 "
        "--vocab-size 16"),
    "sums as trees, in a pipeline": (8, "--dp 2 --tp 2 --pp 2 --schedule zb-h1 --sequence-parallel --reduction tree "
        "--global-batch 4 --vocab-size 16 --recompute full --zero-stage 1"),
    "sums as trees, of a Llama": (8, "--dp 2 --tp 4 --model llama --reduction tree --global-batch 4 "
        "--vocab-size 16 --hidden 24"),
    "sums as trees, of a Llama's own tokens": (8, "--pp 2 --tp 4 --model llama --reduction tree "
        "--global-batch 4 --vocab-size 16 --hidden 24 --sequence-parallel --recompute full"),
    "heads of keys on two ranks each": (8, "--dp 2 --tp 4 --model llama --kv-heads 2 --hidden 24 --zero-stage 2 "
        "--sequence-parallel --microbatches 2 --sync-every-microbatch"),
    "one head of keys": (8, "--pp 2 --tp 4 --model llama --kv-heads 1 --hidden 24 --clip-grad 1"),
    "a long vocabulary": (8, "--tp 4 --pp 2 --vocab-size 259 --microbatches 2 --sequence-parallel --zero-stage 3"),
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_sends_on_each_axis_what_was_predicted(name):
    ranks, flags = CASES[name]
    config = config_for(flags, ranks)
    assert counted(config) == [predicted_traffic(step_layout(config), rank) for rank in range(ranks)]


def test_a_rank_with_both_ends_gathers_their_embedding():
    ranks, flags = CASES["pairs of a forward and a backward"]
    config = config_for(flags, ranks)
    assert counted(config) == [predicted_traffic(step_layout(config), rank) for rank in range(ranks)]


def test_each_rank_sends_the_head_of_keys_that_it_copies_over_cp():
    flags = "--tp 4 --cp 2 --model llama --kv-heads 2 --hidden 24 --context-parallel"
    for method in ("ring", "all-gather"):
        config = config_for(f"{flags} {method}", 8)
        assert counted(config) == [predicted_traffic(step_layout(config), rank) for rank in range(8)]


# Each schedule and each stage, and in `make long` each with each.
SIXTEEN = [(zero, schedule) for zero in range(4) for schedule in ("1f1b", "interleaved-1f1b", "zbv")]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("zero", "schedule"), SIXTEEN)
def test_16_ranks_in_three_dimensions(schedule, zero):
    config = Combination((2, 4, 2), schedule, zero % 2 == 1, 4, zero, recompute=zero > 1).config()
    assert counted(config) == [predicted_traffic(step_layout(config), rank) for rank in range(16)]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_with_more_positions_than_the_sequence(tmp_path, zero):
    """GPT-2's directory has positions of its own, which travel with the gradients."""
    model = make_model(config_for("--seq-len 20", 1))
    model.materialize()
    save_pretrained(model, tmp_path)
    flags = f"--tp 2 --pp 2 --sequence-parallel --zero-stage {zero} --microbatches 2 --init-from {tmp_path}"
    config = training.config_for(f"--seq-len 8 {flags}", 8)
    shape = replace(config.model, layers=5, hidden=20, heads=4, vocab_size=VOCAB)
    config = replace(config, model=shape)
    assert counted(config) == [predicted_traffic(step_layout(config, model.config), rank) for rank in range(8)]


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "schedule.csv"
    flags = "--pp 3 --dp 2 --zero-stage 3 --microbatches 4 --global-batch 8 --schedule"
    save_csv(schedule_of(config_for(f"{flags} zb-h1", 6)), path)
    config = config_for(f"{flags} {path}", 6)
    assert counted(config) == [predicted_traffic(step_layout(config), rank) for rank in range(6)]


# ---- the formulas of the papers --------------------------------------------------------------------------------------

B, T, H, L, M = 2, 8, 24, 4, 3
N = B * T * H
SERIAL = StepLayout(GPTConfig(16, T, H, L, 8), T, B, M, itemsize=1)
PSI = L * (12 * H * H + 13 * H) + (16 + T + 2) * H


def summed(layout, axis):
    return sum(predicted_traffic(layout, rank)[axis] for rank in range(layout.dp * layout.tp * layout.pp))


def test_one_device_sends_nothing():
    assert predicted_traffic(SERIAL, 0) == dict.fromkeys(AXES, 0)


@pytest.mark.parametrize("d", [2, 4, 8])
def test_zero_sends_2_2_2_and_3_psi_and_2_per_more_microbatch(d):
    """Rajbhandari et al. 2020, section 7.2, per rank: Psi (d-1)/d times that. And the float64s of loss and norm."""
    for stage, volume in enumerate((2, 2, 2, 2 * M + 1)):
        layout = replace(SERIAL, dp=d, zero_stage=stage)
        scalars = (1 if stage == 0 else 2) * 2 * (d - 1) * 8
        assert summed(layout, "dp") == volume * PSI * (d - 1) + scalars
    assert summed(replace(SERIAL, dp=d, zero_stage=3, microbatches=1), "dp") == 3 * PSI * (d - 1) + 2 * 2 * (d - 1) * 8


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("t", [2, 4, 8])
def test_a_layer_adds_8_bsh_per_microbatch_and_12_recomputed(t, sequence, recompute):
    layouts = [
        replace(SERIAL, model=GPTConfig(16, T, H, layers, 8), tp=t, sequence_parallel=sequence, recompute=recompute)
        for layers in (1, 2)
    ]
    for rank in range(t):
        one, two = (tp_bytes(layout, rank, 0) for layout in layouts)
        replicated = 2 * 6 * H * (t - 1) // t if sequence else 0
        assert two - one == M * (12 if recompute else 8) * N * (t - 1) // t + replicated


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("c", [1, 2, 4])
@pytest.mark.parametrize("method", ["ring", "all-gather", "ulysses"])
def test_attention_sends_the_published_elements_over_cp(method, c, recompute):
    """Of a layer and microbatch; of 4 heads two share one of keys. Gradients travel in 4 bytes where the rest has 2."""
    model = LlamaConfig(16, 24, 8, 3, 4, 2, 32)
    u, h, h_kv = 5 * 32 // c, 24, 12
    layout = StepLayout(model, 32, samples=5, microbatches=2, itemsize=2, reduce_itemsize=4, cp=c)
    layout = replace(layout, context_parallel=method, recompute=recompute)
    forwards = 2 if recompute else 1
    hops = {"ring": c, "all-gather": c - 1, "ulysses": 0}[method] if c > 1 else 0
    moved = 2 * (h + h_kv) * u * (c - 1) // c if method == "ulysses" else 2 * (c - 1) * u * h_kv
    expected = 2 * 3 * ((forwards + 1) * moved * 2 + 2 * hops * u * h_kv * 4)
    assert [predicted_traffic(layout, rank)["cp"] for rank in range(c)] == [expected] * c


@pytest.mark.sampled(1)
@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("p", [2, 4])
def test_a_pipeline_sends_bsh_per_microbatch_cut_and_direction(p, t):
    model = GPTConfig(16, T, H, 8, 8)
    scalars = 2 * (p - 1) * (2 * (8 + 2) + 1) * 8  # the norm's rows and the loss, all-reduced
    for name, cuts in (("1f1b", p - 1), ("interleaved-1f1b", 2 * p - 1), ("zbv", 2 * (p - 1))):
        layout = replace(SERIAL, model=model, pp=p, tp=t, sequence_parallel=t > 1, microbatches=4)
        layout = replace(layout, schedule=make(name, p, 4))
        tied = 0 if name == "zbv" else 2 * (16 // t) * H  # the token embedding and its gradient
        expected = 2 * 4 * cuts * N // t + tied + scalars
        assert sum(pp_bytes(layout, rank) for rank in range(p)) == expected


def test_the_schedule_does_not_change_what_dp_and_tp_send():
    """Summed over the ranks, stages 0 to 2: the same parameters and the same layers, wherever they are."""
    for stage in range(3):
        layouts = [
            replace(SERIAL, dp=2, tp=2, pp=2, microbatches=4, zero_stage=stage, schedule=make(name, 2, 4))
            for name in SCHEDULES
        ]
        assert len({(summed(layout, "dp"), summed(layout, "tp")) for layout in layouts}) == 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_pipelines_buckets_are_on_one_rank_and_are_the_model(name, p):
    layout = replace(SERIAL, model=GPTConfig(16, T, H, 17, 8), pp=p, schedule=make(name, p, 16), zero_stage=3)
    of_rank = [bucket_elements(layout, rank) for rank in range(p)]
    assert sum(some.total() for some in of_rank) == PSI + (17 - L) * (12 * H * H + 13 * H)
    assert sum(len(some) for some in of_rank) == 17 + 2
    assert sum(layout.blocks(rank) for rank in range(p)) == 17


def test_zbv_gathers_the_embedding_for_head_and_lookup_at_once():
    """Between the two, at most once for each; in a pipeline whose ends lie apart, once for each lookup."""
    for m in (1, 2, 4, 8):
        assert end_gathers(make("1f1b", 4, m), head_too=False) == m
        assert m <= end_gathers(make("zbv", 4, m), head_too=True) <= 3 * m


def test_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match=r"rank 8 of dp\*cp\*tp\*pp = 2\*1\*2\*2"):
        predicted_traffic(replace(SERIAL, dp=2, tp=2, pp=2, schedule=make("1f1b", 2, M)), 8)
    assert dp_bytes(SERIAL, 0, 0) == 0


# ---- it can fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_one_sum_too_many_or_too_few_is_seen(sequence, monkeypatch):
    config = Combination((1, 2, 1), sequence=sequence).config()
    expected = [predicted_traffic(step_layout(config), rank) for rank in range(2)]
    assert counted(config) == expected
    right = TensorGroup.start_sum
    monkeypatch.setattr(TensorGroup, "start_sum", lambda self, x: (right(self, x)(), right(self, x))[1])
    assert all(sent["tp"] > predicted["tp"] for sent, predicted in zip(counted(config), expected, strict=True))
    monkeypatch.setattr(TensorGroup, "start_sum", lambda self, x: lambda: x)
    assert all(sent["tp"] < predicted["tp"] for sent, predicted in zip(counted(config), expected, strict=True))
