"""Claims about dropout: right gradients, and the same masks in every layout, whoever computes them and when."""

import itertools

import numpy as np
import pytest
from training import verified

from minipar.autograd import Tensor, causal_attention, dropout
from minipar.autograd.gradcheck import gradcheck
from minipar.comm import DeviceMesh, run_local
from minipar.nn import GPT, Dropout, DropoutKeys, GPTConfig, MaskSlice, dropping
from minipar.nn.layers import generator
from minipar.train import trainer as trainer_module
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.one_device import train_on_one_device
from minipar.train.trainer import Trainer

RANDOM = np.random.Generator(np.random.Philox(31))
CONFIG = GPTConfig(vocab_size=13, n_positions=8, n_embd=12, n_layer=2, n_head=3)
BATCH = RANDOM.integers(0, 13, (3, 9))
KEYS = DropoutKeys(seed=3, step=5, samples=[4, 0, 9])
SHAPE = "--layers 1 --hidden 12 --heads 3 --seq-len 8 --steps 3 --dtype float64 --dropout 0.2"
TOKENS = load_tokens(None, vocab_size=256, seq_len=8)


def mask(shape, keys=KEYS, name="h.0.attn.attn_dropout", p=0.4, windows=()):
    layer = Dropout(name, p)
    layer.mask_slices += windows
    with dropping(keys):
        return layer.mask(shape)


# ---- the two operations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_backward_is_the_adjoint_of_forward(probability):
    keep = RANDOM.random((2, 3, 4)) >= probability
    gradcheck(lambda x: dropout(x, keep, probability), [RANDOM.standard_normal((2, 3, 4))])


@pytest.mark.parametrize(("heads", "length", "probability"), [(1, 1, 0.5), (1, 5, 0.1), (3, 4, 0.5), (2, 6, 0.9)])
def test_attention_with_dropout_has_the_gradient_of_its_forward(heads, length, probability):
    keep = RANDOM.random((2, heads, length, length)) >= probability
    keep[0, 0, -1] = False  # a position that sees nothing at all
    gradcheck(
        lambda x: causal_attention(x, heads, None, keep, probability), [RANDOM.standard_normal((2, length, 6 * heads))]
    )


def test_dropout_zeroes_what_is_not_kept_and_scales_the_rest():
    x, keep = RANDOM.standard_normal((4, 50)), RANDOM.random((4, 50)) >= 0.25
    y = dropout(Tensor(x), keep, 0.25).data
    assert np.array_equal(y, np.where(keep, x * (1 / 0.75), 0))


def test_attention_drops_probabilities_after_the_softmax():
    """Kept probabilities are not normalized again: with v = 1, a row's output is the scaled sum of those it kept."""
    qkv = RANDOM.standard_normal((1, 6, 12))
    qkv[..., 8:] = 1
    keep = RANDOM.random((1, 2, 6, 6)) >= 0.5
    q, k = (qkv[0, :, i : i + 4].reshape(6, 2, 2).transpose(1, 0, 2) for i in (0, 4))
    scores = np.where(np.tril(np.ones((6, 6), bool)), q @ k.swapaxes(1, 2) / np.sqrt(2), -np.inf)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    rows = (p * keep[0] * 2).sum(-1)  # (heads, T)
    expected = np.repeat(rows.T, 2, axis=1)
    np.testing.assert_allclose(causal_attention(Tensor(qkv), 2, None, keep, 0.5).data[0], expected, rtol=1e-12)


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_window_sees_its_slice_of_the_one_mask(dim, count):
    shape = [3, 5, 7, 6]
    shape[dim] = 2 * count
    whole = mask(tuple(shape))
    shape[dim] = 2
    parts = [mask(tuple(shape), windows=[window(dim, index, count)]) for index in range(count)]
    assert np.array_equal(np.concatenate(parts, axis=dim), whole)
    assert count == 1 or not np.array_equal(parts[0], parts[1])


def window(dim, index, count):
    """The `index`-th of `count` equal parts."""
    return MaskSlice(dim, count, lambda whole: np.split(whole, count)[index])


def test_windows_along_several_dims_and_one_inside_another():
    """As a rank's heads, its queries by position, all keys; and a tensor-parallel rank's share of a rank's tokens."""
    whole = mask((3, 4, 6, 6))
    rows, every = MaskSlice(2, 3, lambda whole: whole[[1, 4]]), MaskSlice(3, 3, np.asarray)
    assert np.array_equal(mask((3, 2, 2, 2), windows=[rows, window(1, 1, 2), every]), whole[:, 2:, [1, 4]])
    whole = mask((3, 12, 5))
    outer = MaskSlice(1, 3, lambda whole: whole[[0, 1, 10, 11]])
    assert np.array_equal(mask((3, 2, 5), windows=[outer, window(1, 1, 2)]), whole[:, [10, 11]])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (3, 5, 3), (2, 11)])
def test_masks_are_what_numpy_draws_by_name(shape, p):
    keys = DropoutKeys(3, 5, KEYS.samples[: shape[0]])
    streams = [generator(3, f"dropout drop 5 {sample}") for sample in keys.samples]
    whole = np.stack([stream.random(shape[1:], np.float32) >= p for stream in streams])
    assert np.array_equal(mask(shape, keys, "drop", p), whole)


def test_an_element_stays_where_its_number_is_p_itself():
    numbers = generator(3, "dropout drop 5 4").random(6, np.float32)
    for p in numbers.tolist():
        assert np.array_equal(mask((1, 6), DropoutKeys(3, 5, [4]), "drop", p)[0], numbers >= np.float32(p))


def test_a_samples_mask_is_its_own_whatever_batch_it_is_in():
    three = mask((3, 6, 10))
    for row, sample in enumerate(KEYS.samples):
        assert np.array_equal(mask((1, 6, 10), DropoutKeys(3, 5, [sample])), three[row : row + 1])
    assert np.array_equal(mask((2, 6, 10), DropoutKeys(3, 5, range(9, 11)))[0], three[2])


def test_layer_step_sample_and_seed_all_make_another_mask():
    masks = [
        mask((1, 6, 10), DropoutKeys(seed, step, [sample]), name)
        for seed, step, sample, name in itertools.product((0, 1), (0, 11), (1, 111), ("h.0.drop", "h.1.drop"))
    ]
    masks.append(mask((1, 6, 10), DropoutKeys(0, 0, [11]), "h.0.drop"))
    masks.append(mask((1, 6, 10), DropoutKeys(0, 1, [1]), "h.0.drop"))
    assert len({m.tobytes() for m in masks}) == len(masks) == 18


def test_every_dropout_of_the_gpt_has_a_name_of_its_own():
    model = GPT(CONFIG, dropout=0.1)
    layers = [model.drop]
    for block in model.h:
        layers += [block.attn.attn_dropout, block.attn.resid_dropout, block.mlp.dropout]
    assert len({layer.name for layer in layers}) == 1 + 3 * CONFIG.n_layer


def test_a_forward_drops_where_gpt2_does(monkeypatch):
    """After the embedding; on the attention probabilities; after attention and after the MLP, before the sum."""
    asked, right = [], Dropout.mask

    def mask(self, shape):
        asked.append((self.name, shape))
        return right(self, shape)

    monkeypatch.setattr(Dropout, "mask", mask)
    gradients()
    stream, probabilities = (3, 8, 12), (3, 3, 8, 8)
    expected = [("drop", stream)]
    for i in range(CONFIG.n_layer):
        expected += [(f"h.{i}.attn.attn_dropout", probabilities), (f"h.{i}.attn.resid_dropout", stream)]
        expected += [(f"h.{i}.mlp.dropout", stream)]
    assert asked == expected


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_stay_with_probability_1_minus_p(p):
    n = 4 * 300 * 100
    keep = mask((4, 300, 100), DropoutKeys(0, 0, range(4)), p=p)
    assert abs(keep.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / n)
    for neighbour in (keep[:, 1:] == keep[:, :-1], keep[..., 1:] == keep[..., :-1], keep[1:] == keep[:-1]):
        assert abs(neighbour.mean() - (p * p + (1 - p) ** 2)) < 0.01  # independent of one another
    y = dropout(Tensor(np.ones(keep.shape)), keep, p).data
    assert abs(y.mean() - 1) < 5 * np.sqrt(p / (1 - p) / n)


def test_dropout_is_the_identity_at_p_0_and_outside_of_dropping():
    x = Tensor(RANDOM.standard_normal((3, 4)), requires_grad=True)
    assert Dropout("a", 0.5)(x) is x
    with dropping(KEYS):
        assert Dropout("a", 0.0)(x) is x
        assert Dropout("a", 0.5)(x) is not x
        with pytest.raises(KeyError), dropping(DropoutKeys(0, 0, [])):
            raise KeyError
        assert mask((3, 4)) is not None
    assert Dropout("a", 0.5)(x) is x  # the block is over, whatever happened in it


@pytest.mark.parametrize("shape", [(2, 4), (4, 4)])
def test_a_wrong_number_of_keys_is_an_error(shape):
    with pytest.raises(ValueError, match=f"dropout drop: {shape[0]} samples, but keys for 3"):
        mask(shape, name="drop")


# ---- the model -------------------------------------------------------------------------------------------------------


def gradients(recompute=False, p=0.3, keys=KEYS, backward_in=None, samples=slice(None)):
    """The loss and every gradient, as bits, of the GPT; backward outside of `dropping` or inside of another one's."""
    model = GPT(CONFIG, dtype="float64", recompute=recompute, dropout=p)
    rows = BATCH[samples]
    if keys is None:
        loss = model.loss_sum(rows[:, :8], rows[:, 1:])
    else:
        with dropping(keys):
            loss = model.loss_sum(rows[:, :8], rows[:, 1:])
    if backward_in is None:
        loss.backward()
    else:
        with dropping(backward_in):
            loss.backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    return loss.item(), {name: p.grad.tobytes() for name, p in model.named_parameters()}


def test_dropout_off_is_the_model_without_it_bit_for_bit():
    plain = gradients(p=0.0, keys=None)
    assert gradients(p=0.0) == plain and gradients(p=0.3, keys=None) == plain
    assert gradients(p=0.3)[0] != plain[0]


@pytest.mark.parametrize("backward_in", [None, DropoutKeys(8, 1, [7, 7, 7]), DropoutKeys(8, 1, [])])
def test_recompute_draws_the_masks_of_the_first_forward(backward_in):
    assert gradients(recompute=True, backward_in=backward_in) == gradients(recompute=False)


def test_the_gpts_gradients_with_dropout_are_those_of_its_loss():
    model = GPT(CONFIG, dtype="float64", dropout=0.3)

    def loss_at(direction, step):
        for parameter, d in zip(model.parameters(), direction, strict=True):
            parameter.data += step * d
        with dropping(KEYS):
            loss = model.loss_sum(BATCH[:, :8], BATCH[:, 1:])
        for parameter, d in zip(model.parameters(), direction, strict=True):
            parameter.data -= step * d
        return loss

    direction = [RANDOM.standard_normal(p.shape) for p in model.parameters()]
    loss_at(direction, 0).backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True))
    numeric = (loss_at(direction, 1e-6).item() - loss_at(direction, -1e-6).item()) / 2e-6
    assert numeric == pytest.approx(slope, rel=1e-6)


def test_a_batch_is_the_sum_of_its_samples_with_dropout_too():
    losses = [gradients(keys=DropoutKeys(3, 5, [s]), samples=[row])[0] for row, s in enumerate(KEYS.samples)]
    assert sum(losses) == pytest.approx(gradients()[0], rel=1e-13)
    shuffled = gradients(keys=DropoutKeys(3, 5, [9, 4, 0]), samples=[2, 0, 1])[0]
    assert shuffled == pytest.approx(gradients()[0], rel=1e-13)
    assert gradients(keys=DropoutKeys(3, 5, [9, 4, 0]))[0] != pytest.approx(gradients()[0], rel=1e-9)


# ---- training --------------------------------------------------------------------------------------------------------


def train(size, flags):
    """Each rank's (step results, verdict)."""
    config = resolve(parse(f"{SHAPE} {flags}".split()), size)

    def rank(comm):
        trainer = Trainer(config, DeviceMesh(comm), TOKENS)
        return verified(trainer)

    return run_local(size, rank)


def losses(results):
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_ordered_ranks_with_dropout_train_one_devices_bits(size):
    flags = f"--global-batch {size * 2} --reduction ordered --microbatches {1 + size % 2}"
    outcomes = train(size, flags)
    for results, verdict in outcomes:
        assert losses(results) == losses(outcomes[0][0])
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line


@pytest.mark.sampled(5)
@pytest.mark.parametrize("extra", ["", "--microbatches 2 --recompute full", "--microbatches 2 --sync-every-microbatch"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_zero_stages_with_dropout_train_one_devices_bits(size, stage, extra):
    if stage == 1:
        extra = extra.replace("--sync-every-microbatch", "--order sequential")
    outcomes = train(
        size, f"--global-batch {size * 4} --reduction ordered --zero-stage {stage} --clip-grad 0.5 {extra}"
    )
    for _, verdict in outcomes:
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line


LAYOUTS = [
    (1, ""),
    (1, "--microbatches 6"),
    (2, "--microbatches 3 --reduction ordered"),
    (3, ""),
    (6, "--recompute full"),
]


def losses_of_layouts():
    return [[r.loss for r in train(size, f"--global-batch 6 {flags}")[0][0]] for size, flags in LAYOUTS]


def test_the_layout_changes_rounding_but_not_the_masks():
    first, *others = losses_of_layouts()
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-12)


def test_masks_keyed_by_index_in_the_microbatch_are_caught(monkeypatch):
    """Comparing one layout with one device hides this mistake, because one device makes it too."""
    monkeypatch.setattr(
        trainer_module, "DropoutKeys", lambda seed, step, samples: DropoutKeys(seed, step, range(len(samples)))
    )
    first, *others = losses_of_layouts()
    for other in others:
        assert np.abs(np.array(other) - first).max() > 1e-6


@pytest.mark.parametrize(("size", "flags"), [(1, ""), (1, "--microbatches 3"), (2, "--microbatches 3"), (3, "")])
def test_a_run_draws_one_mask_per_seed_step_and_global_sample(size, flags, monkeypatch):
    """No comparison of layouts sees the same masks in every step, or in runs of every seed."""
    drawn = []

    def record(seed, step, samples):
        drawn.extend((seed, step, sample) for sample in samples)
        return DropoutKeys(seed, step, samples)

    monkeypatch.setattr(trainer_module, "DropoutKeys", record)
    config = resolve(parse(f"{SHAPE} --global-batch 6 --seed 11 {flags}".split()), size)
    run_local(size, lambda comm: len(list(Trainer(config, DeviceMesh(comm), TOKENS).train())))
    assert sorted(drawn) == [(11, step, sample) for step in range(3) for sample in range(6)]


def test_dropout_changes_the_training_and_the_seed_the_masks():
    runs = [
        losses(train_on_one_device(resolve(parse(f"{SHAPE} --global-batch 2 {flags}".split()), 1), TOKENS)[1])
        for flags in ("", "--dropout 0", "--dropout 0.1", "")
    ]
    assert runs[0] == runs[3] and len({str(run) for run in runs}) == 3
