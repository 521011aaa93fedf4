"""Claims about `--pack`: documents in samples, each trained as alone; resumed and evaluated in another layout.

test_combinations.py and test_tree.py have the layouts.
"""

import numpy as np
import pytest
from training import bits, config_for, on_each_rank, ranks_of, run_until, trained, trainer_for

from minipar.autograd import IGNORE_INDEX
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.train.config import shape_of
from minipar.train.data import Batches, Tokens, document_positions, hold_out, targets_in_documents
from minipar.train.evaluate import validation_loss
from minipar.train.one_device import OneDevice

VOCAB, SEPARATOR = 16, 5
LETTERS = np.random.Generator(np.random.Philox(91)).integers(0, VOCAB, 1200)
LETTERS[100:124] = SEPARATOR  # samples without any target
TEXT = Tokens(LETTERS.astype(np.uint8), "random text", VOCAB)
SHAPE = f"--layers 4 --hidden 32 --heads 4 --seq-len 24 --vocab-size {VOCAB} --global-batch 8 --steps 2"
FLAGS = f"{SHAPE} --pack {SEPARATOR} --dtype float64 --eps 1e-5 --reduction ordered"


def config_of(flags):
    return config_for(f"{FLAGS} {flags}")


# ---- documents in samples --------------------------------------------------------------------------------------------


def test_a_document_ends_with_its_separator():
    inputs = np.array([[1, 2, 9, 3, 9, 9, 4], [9, 1, 2, 3, 4, 5, 6]])
    targets = np.array([[2, 9, 3, 9, 9, 4, 7], [1, 2, 3, 4, 5, 6, 9]])
    assert document_positions(inputs, 9).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    ignored = [[2, 9, -100, 9, -100, -100, 7], [-100, 2, 3, 4, 5, 6, 9]]
    assert targets_in_documents(inputs, targets, 9).tolist() == ignored
    assert document_positions(inputs, None) is None and targets_in_documents(inputs, targets, None) is targets


@pytest.mark.parametrize("order", ["random", "sequential"])
def test_samples_are_those_without_pack_and_targets_are_counted(order):
    options = {"seq_len": 24, "global_batch": 8, "order": order, "seed": 3}
    plain, packs = Batches(TEXT, **options), Batches(TEXT, **options, separator=SEPARATOR)
    for step in range(3):
        x, y = packs.batch(step, range(8))
        assert np.array_equal(x, plain.batch(step, range(8))[0])
        assert packs.target_count(step) == (y != IGNORE_INDEX).sum() < plain.target_count(step) == y.size
        assert np.array_equal(packs.position_ids(step, [5, 2]), document_positions(x[[5, 2]], SEPARATOR))
        assert plain.position_ids(step, [5, 2]) is None


def test_a_step_has_the_mean_gradient_of_its_documents_alone():
    """Each document by itself, in the model without `packed`: the sums over all targets, divided by their number."""
    trainer = trainer_for(config_of(""), TEXT)
    loss = trainer.compute_gradient(0)
    gradient = trainer.state_dict(gradients=True)
    single = shape_of(config_of("").model).build(dtype="float64")
    x, y = trainer.batches.batch(0, range(8))
    ids = trainer.batches.position_ids(0, range(8))
    total, count = 0.0, 0
    for inputs, targets, places in zip(x, y, ids, strict=True):
        starts = np.flatnonzero(places == 0)
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            own = single.loss_sum(inputs[None, start:end], targets[None, start:end])
            own.backward()
            total += own.item()
            count += int((targets[start:end] != IGNORE_INDEX).sum())
    assert loss == pytest.approx(total / count, rel=1e-13)
    for name, p in single.named_parameters():
        p.fold_tied_gradients()
        np.testing.assert_allclose(gradient[name], p.grad / count, rtol=0, atol=1e-13, err_msg=name)


def test_replicas_with_few_targets_count_as_on_one_device():
    """A replica without any target, and another with all: not a mean of the replicas' means."""
    ids = LETTERS.copy()
    ids[ids == SEPARATOR] = 0
    ids[:24] = SEPARATOR
    text = Tokens(ids.astype(np.uint8), "a text", VOCAB)
    config = config_of("--dp 2 --global-batch 2 --order sequential")
    batches = trainer_for(config_of("--global-batch 2 --order sequential"), text).batches
    counts = [(batches.batch(0, [i])[1] != IGNORE_INDEX).sum() for i in range(2)]
    assert counts == [0, 24] and batches.target_count(0) == 24
    single = OneDevice(config, text)
    expected = [(result.loss, result.grad_norm) for result in single.train()]
    assert trained(config, text) == (bits(single.state_dict()), expected)


def test_documents_are_another_training():
    """What is compared above is not the training without `--pack`."""
    assert trained(config_of("--dp 2"), TEXT) != trained(config_for(FLAGS.replace("--pack 5", "") + " --dp 2"), TEXT)


# ---- resumed and evaluated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [5, 0])
def test_a_resumed_run_goes_on_with_the_same_documents(separator, tmp_path):
    """In another layout, and with `--pack` from the checkpoint."""

    def config_of(flags):
        return config_for(f"{FLAGS} --steps 4 --dp 2 {flags}".replace("--pack 5", f"--pack {separator}"))

    whole, reports = run_until(TEXT, config_of(""))
    run_until(TEXT, config_of(""), save_to=tmp_path / "new" / "directory", stop=2)
    resumed, later = run_until(TEXT, config_of(f"--zero-stage 3 --resume {tmp_path / 'new' / 'directory'}"))
    assert bits(resumed) == bits(whole) and later == reports[2:]


def test_a_resumed_run_cannot_change_the_separator(tmp_path):
    run_until(TEXT, config_of("--steps 4"), save_to=tmp_path, stop=2)
    for other in ("6", None):
        flags = FLAGS.replace("--pack 5", "" if other is None else f"--pack {other}")
        with pytest.raises(UsageError, match=r"--pack 5.* --pack (6|None)"):
            trainer_for(config_for(f"{flags} --steps 4 --resume {tmp_path}"), TEXT)


EVALUATED = ["--dp 3 --global-batch 6", "--pp 2 --microbatches 2 --global-batch 6", "--cp 2 --tp 2 --global-batch 6"]


def validation(flags):
    config = config_of(f"--eval-every 1 --steps 1 {flags}")
    tokens, evaluation = hold_out(config, TEXT)

    def rank(comm):
        trainer = trainer_for(config, tokens, comm)
        trainer.step(0)
        return validation_loss(trainer, evaluation)

    return set(run_local(ranks_of(config), rank)), evaluation


def test_every_layout_has_one_validation_loss():
    losses, _ = validation("--global-batch 6")
    for flags in EVALUATED:
        assert validation(flags)[0] == losses


def test_the_validation_loss_is_the_mean_over_documents():
    config = config_of("--eval-every 1")
    tokens, evaluation = hold_out(config, TEXT)
    trainer = trainer_for(config, tokens, serial())
    windows = evaluation.tokens.read(evaluation.starts[:, None] + np.arange(25))
    total = count = 0
    for window in windows:
        starts = [0, *(np.flatnonzero(window[:-2] == SEPARATOR) + 1)]
        for start, end in zip(starts, [*starts[1:], 24], strict=True):
            targets = window[None, start + 1 : end + 1].copy()
            targets[window[None, start:end] == SEPARATOR] = IGNORE_INDEX
            total += trainer.model.loss_sum(window[None, start:end], targets).item()
            count += int((targets != IGNORE_INDEX).sum())
    assert validation_loss(trainer, evaluation) == pytest.approx(total / count, rel=1e-9)


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_documents_are_dealt_evenly_unless_an_order_is_given():
    for flags, order in {
        "--cp 2": "documents",
        "--cp 2 --context-parallel all-gather": "documents",
        "--cp 2 --cp-order contiguous": "contiguous",
        "--cp 2 --context-parallel ulysses": "zigzag",
        "": "zigzag",
    }.items():
        assert config_of(flags).mesh.cp_order == order
    assert config_for(f"{SHAPE} --cp 2").mesh.cp_order == "zigzag"


def test_a_text_that_is_all_separators_trains_on_nothing():
    """No target: the loss and the gradient are 0, and nothing is divided by 0."""
    text = Tokens(np.full(100, SEPARATOR, np.uint8), "separators", VOCAB)
    ((loss, norm),) = on_each_rank(config_of("--steps 1"), text, lambda _, steps: (steps[0].loss, steps[0].grad_norm))
    assert (loss, norm) == (0, 0)
