"""Memory and traffic of a rank in a layout: the papers' formulas, with nothing rounded."""

from fractions import Fraction

import pytest
from planning import layout

from minipar.more.llama import LlamaConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.pipeline.actions import peak_live
from minipar.parallel.pipeline.schedules import make
from minipar.parallel.predicted_traffic import tp_bytes
from minipar.plan.layout import MEGATRON, MINIPAR, PRECISIONS
from minipar.plan.model import ModelShape, find_model
from minipar.plan.rank_bytes import in_flight, layer_activations, layer_state, memory, rank_parameters, volume

GPT3 = find_model("gpt3-175b")


@pytest.mark.parametrize(("name", "tp", "microbatch"), [("gpt2", 1, 1), ("megatron-22b", 2, 4), ("gpt3-175b", 8, 1)])
def test_korthikantis_activation_formulas(name, tp, microbatch):
    model, s = find_model(name), 2048
    h, a, t = model.hidden, model.heads, tp
    sbh = s * microbatch * h

    def kept(**given):
        return layer_activations(model, layout(tp=tp, microbatch=microbatch, **given), s)

    assert kept() == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)), rel=1e-12)
    assert kept(sequence_parallel=True) == pytest.approx(sbh * (34 + 5 * a * s / h) / t, rel=1e-12)
    assert kept(sequence_parallel=True, recompute="selective") == pytest.approx(34 * sbh / t, rel=1e-12)
    assert kept(recompute="full") == 2 * sbh
    assert kept(recompute="full", sequence_parallel=True) == 2 * sbh / t
    for sequence in (False, True):
        # Flash attention keeps no scores, as selective recomputation.
        flash = kept(sequence_parallel=sequence, attention="flash")
        assert flash == kept(sequence_parallel=sequence, recompute="selective")


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zbv"])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 4), (8, 32)])
def test_microbatches_in_flight_are_the_schedules_own(name, p, m):
    v = 2 if name in ("interleaved-1f1b", "zbv") else 1
    schedule = make(name, p, m, v if name == "interleaved-1f1b" else None)
    expected = Fraction(max(peak_live(actions) for actions in schedule.ranks), v)
    counted = in_flight(layout(pp=p, microbatches=m, schedule=name, virtual_stages=v))
    assert counted == expected


@pytest.mark.parametrize(("stage", "own", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)])
@pytest.mark.parametrize("dp", [1, 64])
def test_model_state_follows_the_zero_paper(stage, own, shared, dp):
    one = layout(dp=dp, zero=stage, microbatches=4)
    psi = rank_parameters(GPT3, one)
    held = memory(GPT3, one, 2048)
    total = held.parameters + held.gradients + held.optimizer
    assert psi == GPT3.parameters
    assert total == pytest.approx(own * psi + shared * psi / dp, rel=1e-12)


@pytest.mark.parametrize(("s", "q"), [(8, 64), (2, 4), (1, 8)])
def test_hybrid_sharding_holds_and_sends_its_formulas(s, q):
    """16 psi/s bytes; inside 2 psi, or (2m+1) psi at stage 3, times (s-1)/s; across 2 (psi/s)(q-1)/q elements."""
    for zero, inside in ((1, 2), (2, 2), (3, 2 * 3 + 1)):
        one = layout(dp=s * q, zero=zero, zero_replicas=q, microbatches=3)
        psi, held = rank_parameters(GPT3, one), memory(GPT3, one, 2048, MINIPAR)
        assert held.optimizer == pytest.approx(12 * psi / s, rel=1e-12)
        if zero == 3:
            assert memory(GPT3, one, 2048).parameters == pytest.approx(2 * psi / s, rel=1e-12)
        across = Fraction(2 * psi * (q - 1), s * q)
        assert volume(GPT3, one, 2048, MINIPAR).dp == 2 * (Fraction(inside * psi * (s - 1), s) + across)
    every = layout(dp=s * q, zero=3, zero_replicas=q, microbatches=3)  # Megatron's program reduces each microbatch
    assert volume(GPT3, every, 2048).dp == 2 * (Fraction(9 * psi * (s - 1), s) + 3 * across)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (1, 8), (4, 12)])
def test_the_ranks_together_hold_the_model(tp, pp):
    """tp ranks of every stage add up to the model and what all of them have: norms, row layers' biases, positions."""
    first = rank_parameters(GPT3, layout(tp=tp, pp=pp))
    h, layers = GPT3.hidden, GPT3.layers // pp
    again = (tp - 1) * (layers * 6 * h + 2048 * h + (2 * h if pp == 1 else 0))
    rest = (pp - 1) * layers * GPT3.layer_parameters + (2 * h if pp > 1 else 0)
    assert first * tp - again + rest == GPT3.parameters


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_bytes_of_tensor_parallelism(tp, sequence_parallel):
    one = layout(tp=tp, microbatch=4, microbatches=6, sequence_parallel=sequence_parallel)
    n = 4 * 2048 * GPT3.hidden * 2
    assert volume(GPT3, one, 2048).tp == Fraction(8 * n * (tp - 1), tp) * 6 * 96
    full = layout(tp=tp, microbatch=4, microbatches=6, recompute="full")
    assert volume(GPT3, full, 2048).tp == volume(GPT3, one, 2048).tp * 3 / 2


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (4, 4), (8, 8)])
def test_ranks_hold_and_send_what_training_does(tp, kv_heads):
    """A layer's elements on a rank, and the bytes that it adds, are those of the placements and of the closed form."""
    model = ModelShape(1, 64, 8, 16, kv_heads=kv_heads, ffn=48, gated=True, tied=False, biases=False, norm_biases=False)
    one, two = (StepLayout(LlamaConfig(16, 64, 48, layers, 8, kv_heads, 8), 8, 8, 1, 2, 2, tp=tp) for layers in (1, 2))
    held = [p.dp.size for p in one.placements() if ".layers." in p.name]
    assert layer_state(model, layout(tp=tp)) == sum(held)
    sent = volume(model, layout(tp=tp, precision=PRECISIONS["fp16"]), 8).tp
    assert sent == tp_bytes(two, 0, 0) - tp_bytes(one, 0, 0)


def test_bytes_of_zero_with_one_microbatch_and_with_several():
    one = Fraction(2 * GPT3.parameters * 63, 64)
    for microbatches, passes in ((1, [2, 2, 2, 3]), (5, [2, 2, 6, 15])):
        layouts = [layout(dp=64, zero=stage, microbatches=microbatches) for stage in range(4)]
        assert [volume(GPT3, each, 2048).dp for each in layouts] == [n * one for n in passes]


@pytest.mark.parametrize(("schedule", "v", "times"), [("1f1b", 1, 1), ("interleaved-1f1b", 3, 3), ("zbv", 1, 2)])
def test_bytes_between_stages(schedule, v, times):
    one = layout(tp=8, pp=4, microbatch=2, microbatches=8, schedule=schedule, virtual_stages=v)
    assert volume(GPT3, one, 2048).pp == Fraction(2 * 2 * 2048 * GPT3.hidden * 2 * 8 * times, 8)
    assert volume(GPT3, layout(), 2048).pp == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("framework", [MEGATRON, MINIPAR], ids=["megatron", "minipar"])
def test_buffers_hold_logits_gradients_and_gathered_units(framework, sequence_parallel):
    """With ZeRO the units that compute and travel; with recomputation one layer's activations."""
    given = {"dp": 4, "tp": 8, "sequence_parallel": sequence_parallel}
    hidden = 2 * 2048 * GPT3.hidden
    sliced = hidden / (8 if sequence_parallel else 1)
    moving = 2 * sliced + (3 if framework is MEGATRON else 2) * 2 * 2048 * GPT3.vocab_size / 8
    moving += 0 if framework is MEGATRON else 2 * sliced + hidden
    one, whole = layer_state(GPT3, layout(tp=8)), layer_activations(GPT3, layout(**given), 2048, framework.kept)
    for zero, units in ((0, 0), (1, 0), (2, 2), (3, 4)):
        assert memory(GPT3, layout(zero=zero, **given), 2048, framework).buffers == moving + units * 2 * one
        full = memory(GPT3, layout(zero=zero, recompute="full", **given), 2048, framework).buffers
        assert full == pytest.approx(moving + units * 2 * one + whole, rel=1e-12)
    wide = memory(GPT3, layout(zero=2, precision=PRECISIONS["bf16"], **given), 2048, framework).buffers
    assert wide == moving + 2 * 4 * one


@pytest.mark.parametrize("pp", [1, 2])
def test_the_rank_with_the_logits_may_be_the_fullest(pp):
    """2 s b h bytes of norm and of head (Korthikanti et al. 2022, section 4.3), the logits in 16 bits and their softmax
    in 32.
    """
    one = layout(tp=8, pp=pp)
    held = memory(GPT3, one, 2048)
    logits = 2048 * (2 * 2 * GPT3.hidden + (4 + 2) * GPT3.vocab_size / 8)
    expected = one.layers_per_rank(GPT3) * layer_activations(GPT3, one, 2048) + logits
    assert held.activations + held.buffers == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("microbatch", [1, 3])
def test_a_layer_of_minipar_keeps_what_the_program_counts(microbatch):
    """20 N + A + 2 B T elements, N = B T h, A = B a T^2."""
    given = layout(microbatch=microbatch, precision=PRECISIONS["bf16"])
    n, scores = microbatch * 2048 * GPT3.hidden, microbatch * GPT3.heads * 2048**2
    kept = layer_activations(GPT3, given, 2048, MINIPAR.kept)
    assert kept == 2 * (20 * n + scores + 2 * microbatch * 2048)
