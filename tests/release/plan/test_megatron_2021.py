"""What Narayanan et al. 2021 (arXiv 2104.04473) say of their measurements, and what the planner says of the same runs.

Table 2 and figures 11 to 18, as `megatron-2021` and `deepspeed-2021` predict them: A100s, every layer recomputed, in
TFLOP/s per GPU. The table's values are printed. The figures have none: those here were read off, to some 3 %. A miss is
an expected failure, and has to fail.
"""

from dataclasses import replace

import pytest
from planning import layout

from minipar.plan.cluster import GPUS, Cluster
from minipar.plan.model import ModelShape, find_model
from minipar.plan.programs import PROGRAMS
from minipar.plan.search import judge

PROGRAM, DEEPSPEED = PROGRAMS["megatron-2021"], PROGRAMS["deepspeed-2021"]
TODAY = PROGRAMS["megatron"]
BOTH = pytest.mark.parametrize("program", [PROGRAM, TODAY], ids=["2021", "today"])
WHOLE = replace(PROGRAM, framework=replace(PROGRAM.framework, scattered_hops=False))


def gpt(layers, hidden, heads):
    return ModelShape(layers, hidden, heads, 51200, positions=2048)


GPT3, B530 = find_model("gpt3-175b"), find_model("megatron-530b")
B6, B91, B145, B162 = gpt(32, 3840, 32), gpt(72, 10240, 80), find_model("megatron-145b"), gpt(32, 20480, 128)


def judged(model, gpus, batch, tp=1, pp=1, b=1, v=1, program=PROGRAM, **given):
    dp = gpus // tp // pp
    schedule = "interleaved-1f1b" if v > 1 else "1f1b"
    one = layout(dp=dp, tp=tp, pp=pp, microbatch=b, microbatches=batch // dp // b, virtual_stages=v, schedule=schedule)
    cluster = Cluster(GPUS["a100"], gpus, framework=program.framework, assumptions=program.assumptions)
    return judge(model, replace(one, **({"recompute": "full"} | given)), cluster, batch, 2048)


def tflops(*args, **given):
    return judged(*args, **given).tflops


def near(predicted, printed, part):
    return all(abs(p / q - 1) < part for p, q in zip(predicted, printed, strict=True))


# ---- table 2: ZeRO-3 without model parallelism, and 3D parallelism ---------------------------------------------------

# GPUs, batch, microbatch, TFLOP/s: GPT-3 with 175B parameters, then 530B.
ZERO_3 = [(GPT3, 384, 1536, 4, 144), (GPT3, 768, 1536, 2, 88), (GPT3, 1536, 1536, 1, 44)]
ZERO_3 += [(B530, 640, 2560, 4, 138), (B530, 1120, 2240, 2, 98), (B530, 2240, 2240, 1, 48)]
# GPUs, batch, stages, TFLOP/s: tp 8, microbatches of one.
IN_3D = [(GPT3, 384, 1536, 12, 153), (GPT3, 768, 1536, 12, 149), (GPT3, 1536, 1536, 12, 141)]
IN_3D += [(B530, 560, 2240, 35, 171), (B530, 1120, 2240, 35, 167), (B530, 2240, 2240, 35, 159)]


def zero_3(program=DEEPSPEED):
    return [tflops(model, gpus, batch, b=b, zero=3, program=program) for model, gpus, batch, b, _ in ZERO_3]


def in_3d():
    return [tflops(model, gpus, batch, 8, pp) for model, gpus, batch, pp, _ in IN_3D]


def test_table_2_3d_parallelism_beats_zero_3_in_every_row():
    """By 6 and 24 % as printed, by 69 and 70 % on twice as many GPUs, by factors of 3.2 and 3.3 on four times."""
    ratios = [ours / zero for ours, zero in zip(in_3d(), zero_3(), strict=True)]
    assert near(ratios, (1.06, 1.69, 3.20, 1.24, 1.70, 3.31), 0.08) and min(ratios) > 1.05


def test_table_2_3d_rows_within_4_percent():
    assert near(in_3d(), [row[-1] for row in IN_3D], 0.04)


def test_table_2_zero_3_rows_within_10_percent():
    assert near(zero_3(), [row[-1] for row in ZERO_3], 0.10)


# ---- figures 11 to 14: pipelines -------------------------------------------------------------------------------------


@BOTH
def test_figure_11_large_batches_scale_better(program):
    """Three layers to a stage, 1 to 8 stages: 53 % are left with 8 samples, 92 % with 128."""
    eight, many = (
        [tflops(gpt(3 * p, 20480, 128), 8 * p, batch, 8, p, program=program) for p in (1, 2, 4, 8)]
        for batch in (8, 128)
    )
    assert eight == sorted(eight, reverse=True) and many == sorted(many, reverse=True)
    assert eight[-1] / eight[0] == pytest.approx(0.53, abs=0.03) and many[-1] / many[0] == pytest.approx(0.92, abs=0.03)


BATCHES = (12, 24, 36, 48, 60)


def test_figure_12_interleaving_gains_less_with_larger_batches():
    """Four stages on each GPU: with two, the bubble alone would be too long for the first point."""
    default, interleaved = ([tflops(GPT3, 96, batch, 8, 12, v=v) for batch in BATCHES] for v in (1, 4))
    gains = [ours / plain for ours, plain in zip(interleaved, default, strict=True)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.3 and 1.05 < gains[-1] < 1.15
    assert near(default, (82, 109, 122, 130, 135), 0.04) and near(interleaved, (119, 134, 142, 144, 147), 0.08)


@pytest.mark.xfail(strict=True, reason="whole messages cost 9 % here, and interleaving stays 3 % ahead")
def test_figure_12_without_scattering_interleaving_loses():
    """For large batches, as the text says; the figure does not show it."""
    assert tflops(GPT3, 96, 60, 8, 12, v=4, program=WHOLE) < tflops(GPT3, 96, 60, 8, 12)


MESHES_13 = ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))


@BOTH
@pytest.mark.parametrize(("batch", "read"), [(32, 142), (128, 165)])
def test_figure_13_tp_of_a_whole_host_is_the_best(batch, read, program):
    """Neither tp nor pp alone comes near, and the peak is at tp 8."""
    found = [tflops(B162, 64, batch, tp, pp, program=program) for pp, tp in MESHES_13]
    assert max(found) == found[2] and max(found[0], found[-1]) < 0.9 * found[2]
    assert program is TODAY or found[2] == pytest.approx(read, rel=0.08)


@BOTH
def test_figure_14_pipelines_lose_to_replicas(program):
    found = {
        batch: [tflops(B6, 64, batch, 1, p, program=program) for p in (2, 4, 8, 16, 32)] for batch in (32, 128, 512)
    }
    assert all(row == sorted(row, reverse=True) for row in found.values())
    assert all(a < b < c for a, b, c in zip(*found.values(), strict=True))
    ends = [found[32][0], found[32][-1], found[512][0], found[512][-1]]
    assert program is TODAY or near(ends, (62, 42, 148, 90), 0.06)


# ---- figure 15: tensor and data parallelism --------------------------------------------------------------------------

TP_15 = (2, 4, 8, 16, 32)


@BOTH
@pytest.mark.parametrize("batch", [32, 128, 512])
def test_figure_15_tp_loses_to_replicas(batch, program):
    """Most where it leaves the host, and there the batch no longer matters."""
    found = [tflops(B6, 64, batch, tp, program=program) for tp in TP_15]
    assert found == sorted(found, reverse=True) and found[3] < 0.7 * found[2] and found[4] < 0.6 * found[3]
    assert found[-1] == pytest.approx(tflops(B6, 64, 512, 32, program=program), rel=0.08)


@pytest.mark.parametrize(("batch", "read", "part"), [(512, 128, 0.10), (128, 103, 0.22)])
def test_figure_15_at_tp_2_with_several_microbatches(batch, read, part):
    """With today's program 25 and 48 % too fast."""
    assert (
        tflops(B6, 64, batch, 2) == pytest.approx(read, rel=part)
        and tflops(B6, 64, batch, 2, program=TODAY) > 1.2 * read
    )


@pytest.mark.xfail(strict=True, reason="57 % too fast: the gradients took as long as over one card, in figure 14 not")
def test_figure_15_at_tp_2_with_one_microbatch():
    assert tflops(B6, 64, 32, 2) == pytest.approx(58, rel=0.20)


# ---- figures 16 to 18 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [128, 512])
def test_figure_16_microbatches_of_two_are_as_good_as_any(batch):
    """Of 91B with tp 8 and pp 8 (72 layers are our guess): 155, 158, 140, 120 and 163, 172, 160, 155."""
    found = [tflops(B91, 64, batch, 8, 8, b) for b in (1, 2, 4, 8)]
    assert found[1] > 0.999 * max(found) and found[3] < 0.97 * found[1]
    read = {128: (155, 158, 140, 120), 512: (163, 172, 160, 155)}[batch]
    assert near(found, read, 0.11)


def sequences(batch, recompute):
    """Sequences per second of 145B with tp 8 and pp 16, and whether the planner lets it fit."""
    plan = judged(B145, 128, batch, 8, 16, recompute=recompute)
    return batch / plan.time.total, plan.memory.total < 0.92 * GPUS["a100"].memory


def test_figure_17_recomputing_costs_a_quarter_of_small_batches():
    """Up to 33 % as printed; 3 and 4 sequences per second with eight."""
    for batch in (1, 2, 4, 8):
        assert 0.24 < 1 - sequences(batch, "full")[0] / sequences(batch, "none")[0] < 0.33
    assert near([sequences(8, "full")[0], sequences(8, "none")[0]], (3.0, 4.0), 0.05)


def test_figure_17_a_large_recomputed_batch_is_twice_as_fast():
    """As the best without, which was a batch of eight: 7.8 sequences per second."""
    large, fits = sequences(256, "full")
    assert fits and large == pytest.approx(7.8, rel=0.05) and 1.9 < large / sequences(8, "none")[0] < 2.1


@pytest.mark.xfail(strict=True, reason="71.8 GB of the 73.6 that can be used; 66 GB without what 2021 held in addition")
def test_figure_17_sixteen_samples_do_not_fit_without():
    assert sequences(8, "none")[1] and not sequences(16, "none")[1]


def test_figure_18_scattered_messages_gain_a_tenth():
    """Up to 11 % as printed."""
    gains = [tflops(GPT3, 96, n, 8, 12, v=4) / tflops(GPT3, 96, n, 8, 12, v=4, program=WHOLE) - 1 for n in BATCHES]
    assert 0.08 < min(gains) and 0.09 < max(gains) < 0.12


def points_read_off():
    """Predicted over read-off speeds of every point that was read off figures 11 to 18."""
    for batch, ends in ((8, (165, 88)), (128, (178, 163))):
        yield from (tflops(gpt(3 * p, 20480, 128), 8 * p, batch, 8, p) / q for p, q in zip((1, 8), ends, strict=True))
    for v, program, read in (
        (1, PROGRAM, (82, 109, 122, 130, 135)),
        (4, PROGRAM, (119, 134, 142, 144, 147)),
        (4, WHOLE, (107, 120, 127, 130, 131)),
    ):
        yield from (tflops(GPT3, 96, n, 8, 12, v=v, program=program) / q for n, q in zip(BATCHES, read, strict=True))
    yield from (tflops(B162, 64, n, 8, 8) / q for n, q in ((32, 142), (128, 165)))
    yield from (tflops(B6, 64, n, 1, p) / q for n, p, q in ((32, 2, 62), (32, 32, 42), (512, 2, 148), (512, 32, 90)))
    yield from (tflops(B6, 64, n, 2) / q for n, q in ((32, 58), (128, 103), (512, 128)))
    for n, read in ((128, (155, 158, 140, 120)), (512, (163, 172, 160, 155))):
        yield from (tflops(B91, 64, n, 8, 8, b) / q for b, q in zip((1, 2, 4, 8), read, strict=True))
    yield from (sequences(n, kind)[0] / q for n, kind, q in ((8, "full", 3), (8, "none", 4), (256, "full", 7.8)))


def test_of_39_points_34_are_within_10_percent():
    """And 37 within 14 %. `PROGRAMS` says so to the user, next to the 16 printed runs within 4 %."""
    off = sorted(abs(ratio - 1) for ratio in points_read_off())
    assert len(off) == 39 and off[33] < 0.10 < off[34] and off[36] < 0.14
    assert "10 % in 34 of 39" in PROGRAM.evidence and PROGRAM.spread == 0.10
