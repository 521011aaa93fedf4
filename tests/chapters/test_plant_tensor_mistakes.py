"""Claims about chapter 6's modules: a mistake lasts as long as its context, and checks measure what they say."""

import functools

import numpy as np
import pytest

from chapters.support.ch06.layer_memory import kept_by_a_layer
from chapters.support.ch06.mistakes import MISTAKES, bytes_per_step, examine
from chapters.support.ch06.whole_gradients import compare_with_one_device, whole_gradients
from minipar.comm import DeviceMesh, run_local
from minipar.nn import GPTConfig
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.one_device import train_on_one_device
from minipar.train.trainer import Trainer

FLAGS = "--layers 1 --hidden 16 --heads 2 --seq-len 8 --vocab-size 257 --dtype float64 --lr 3e-3 --steps 3".split()
FLAGS += "--global-batch 4 --clip-grad 0.5 --eps 1e-6".split()
SHAPE = GPTConfig(vocab_size=17, n_positions=8, n_embd=16, n_layer=1, n_head=2)
BATCH = tuple(np.random.Generator(np.random.Philox(1)).integers(0, 17, (2, 2, 8)))


@functools.cache
def tokens():
    return load_tokens(None, vocab_size=257, seq_len=8)


def make_trainer(comm, *flags):
    config = resolve(parse([*FLAGS, "--tp", "2", *flags], comm.rank), 2)
    return Trainer(config, DeviceMesh(comm, tp=2), tokens())


def checks_that_notice(name, *flags):
    single = {n: train_on_one_device(resolve(parse([*FLAGS, "--steps", str(n)]), 1), tokens()) for n in (1, 3)}

    def rank(comm):
        return examine(make_trainer(comm, *flags), single if comm.rank == 0 else {})

    with MISTAKES[name]():
        (noticed, _), (same, _) = run_local(2, rank)
    assert noticed == same
    return noticed


def test_a_correct_step_is_noticed_by_no_check():
    assert checks_that_notice("nothing broken") == set()
    assert checks_that_notice("nothing broken", "--sequence-parallel") == set()


def test_a_sum_that_is_missing_is_noticed_by_all_checks():
    assert checks_that_notice("5. no sum of partial gradients", "--sequence-parallel") == {
        "ranks",
        "bytes",
        "step 1",
        "step 3",
    }


def test_bytes_of_a_step_are_the_closed_form():
    bytes_of_rank = run_local(2, lambda comm: bytes_per_step(make_trainer(comm)))
    n = 4 * 8  # tokens; an all-reduce over 2 ranks sends as many elements as the array has
    assert bytes_of_rank == [8 * (6 * n * 16 + 3 * n + 1)] * 2


@pytest.mark.parametrize("name", [name for name in MISTAKES if name[0] in "1245"])
def test_a_mistake_lasts_as_long_as_its_context(name):
    def gradients(comm):
        return whole_gradients(comm, SHAPE, BATCH, sequence=name[0] == "5")

    def same(a, b):
        return a[0] == b[0] and a[2] == b[2] and all(np.array_equal(a[1][key], b[1][key]) for key in a[1])

    before = run_local(2, gradients)[0]
    with MISTAKES[name]():
        wrong = run_local(2, gradients)[0]
    assert same(run_local(2, gradients)[0], before)
    assert same(wrong, before) == (name[0] == "1")  # biases are zero at first


def test_the_difference_to_one_device_is_rounding_unless_broken():
    worst, traffic = run_local(2, compare_with_one_device, SHAPE, BATCH)[0]
    assert worst < 1e-12 and list(traffic) == ["all_reduce"]
    with MISTAKES["2. no all-reduce in backward"]():
        assert run_local(2, compare_with_one_device, SHAPE, BATCH)[0][0] > 1e-3


def test_sequence_parallelism_keeps_less_and_dropout_more():
    plain, dropped, divided = (kept_by_a_layer(2, *how) for how in ((False, 0.0), (False, 0.1), (True, 0.1)))
    assert divided < plain < dropped


def test_the_answers_of_chapter_6_are_the_formulas_values():
    sent_per_layer = 8 * 4 * 2048 * 4096 * 7 // 8 * 2
    assert (sent_per_layer, round(sent_per_layer / 450e9 * 1e3, 2)) == (469_762_048, 1.04)
    for_loss, for_logits = (n * 7 // 8 * 4 for n in (6 * 8192, 8192 * 50_264))
    assert (for_loss, for_logits, round(for_logits / for_loss)) == (172_032, 1_441_169_408, 8377)
    assert round(16 * 7 * 4e14 / 50e9 / 72) == 12_444
    crossovers = [round(1 + 4.5 * 6144 / (4e14 / bandwidth), 1) for bandwidth in (450e9, 50e9, 12.5e9)]
    assert crossovers == [32.1, 4.5, 1.9]  # ranks at which sums take as long as computation (6.11)
    kept = [round(2048 * 12_288 * per_element) for per_element in (114, 23, 14.25)]
    assert kept == [2_868_903_936, 578_813_952, 358_612_992]
    head = 2 * 4096 * 128  # elements of one head's k and v matrices; an all-reduce over 2 ranks sends as many
    assert (4 * head, 32 * 4 * head) == (4_194_304, 134_217_728)
    assert 8 * 8192 * 4096 * 15 // 16 * 2 == 503_316_480
