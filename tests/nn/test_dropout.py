"""Claims about dropout: right gradients, and the same masks in every layout, whoever computes them and when."""

import numpy as np
import pytest
from training import config_for, on_each_rank, trainer_for, verified

from minipar.autograd import Tensor, causal_attention, dropout
from minipar.autograd.gradcheck import gradcheck
from minipar.comm import run_local
from minipar.nn import GPT, Dropout, DropoutKeys, GPTConfig, dropping
from minipar.nn.layers import generator
from minipar.train import trainer as trainer_module
from minipar.train.data import load_tokens

RANDOM = np.random.Generator(np.random.Philox(31))
CONFIG = GPTConfig(vocab_size=13, n_positions=8, n_embd=12, n_layer=2, n_head=3)
BATCH = RANDOM.integers(0, 13, (3, 9))
KEYS = DropoutKeys(seed=3, step=5, samples=[4, 0, 9])
SHAPE = "--layers 1 --hidden 12 --heads 3 --seq-len 8 --steps 3 --dtype float64 --dropout 0.2"
TOKENS = load_tokens(None, 256, 8)


def mask(shape, keys=KEYS, name="h.0.attn.attn_dropout", p=0.4):
    with dropping(keys):
        return Dropout(name, p).mask(shape)


# ---- the two operations ----------------------------------------------------------------------------------------------


def test_dropout_zeroes_what_is_not_kept_and_scales_the_rest():
    x, keep = RANDOM.standard_normal((4, 50)), RANDOM.random((4, 50)) >= 0.25
    assert np.array_equal(dropout(Tensor(x), keep, 0.25).data, np.where(keep, x * (1 / 0.75), 0))


@pytest.mark.parametrize(("heads", "length", "probability"), [(1, 1, 0.5), (3, 4, 0.5), (2, 6, 0.9)])
def test_attention_with_dropout_has_the_gradient_of_its_forward(heads, length, probability):
    keep = RANDOM.random((2, heads, length, length)) >= probability
    keep[0, 0, -1] = False  # a position that sees nothing at all
    gradcheck(
        lambda x: causal_attention(x, heads, None, keep, probability), [RANDOM.standard_normal((2, length, 6 * heads))]
    )


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


@pytest.mark.parametrize(
    ("seed", "step", "name", "p"), [(3, 5, "drop", 0.1), (0, 11, "h.1.mlp.drop", 0.5), (8, 0, "drop", 0.999)]
)
@pytest.mark.parametrize("shape", [(2, 3, 7, 5), (3, 5, 3), (2, 11)])
def test_masks_are_what_numpy_draws_by_name(shape, seed, step, name, p):
    """By seed, layer, step and global sample, and so whatever batch a sample is in."""
    keys = DropoutKeys(seed, step, KEYS.samples[: shape[0]])
    streams = [generator(seed, f"dropout {name} {step} {sample}") for sample in keys.samples]
    whole = np.stack([stream.random(shape[1:], np.float32) >= p for stream in streams])
    assert np.array_equal(mask(shape, keys, name, p), whole)


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
    with pytest.raises(ValueError):
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


def test_a_batch_is_the_sum_of_its_samples_with_dropout_too():
    losses = [gradients(keys=DropoutKeys(3, 5, [s]), samples=[row])[0] for row, s in enumerate(KEYS.samples)]
    assert sum(losses) == pytest.approx(gradients()[0], rel=1e-13)
    shuffled = gradients(keys=DropoutKeys(3, 5, [9, 4, 0]), samples=[2, 0, 1])[0]
    assert shuffled == pytest.approx(gradients()[0], rel=1e-13)
    assert gradients(keys=DropoutKeys(3, 5, [9, 4, 0]))[0] != pytest.approx(gradients()[0], rel=1e-9)


# ---- training --------------------------------------------------------------------------------------------------------


def train(size, flags):
    """Each rank's (step results, verdict)."""
    args = config_for(f"{SHAPE} {flags}", size)
    return run_local(size, lambda comm: verified(trainer_for(args, TOKENS, comm)))


def losses(results):
    return [(r.loss, r.grad_norm) for r in results]


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, "--microbatches 1"),
        (3, "--microbatches 2"),
        (2, "--microbatches 2 --zero-stage 1 --order sequential"),
        (3, "--microbatches 2 --zero-stage 2 --clip-grad 0.5"),
        (2, "--microbatches 2 --zero-stage 3 --recompute full --clip-grad 0.5"),
    ],
)
def test_ordered_ranks_with_dropout_train_one_devices_bits(size, flags):
    outcomes = train(size, f"--global-batch {size * 4} --reduction ordered {flags}")
    for results, verdict in outcomes:
        assert losses(results) == losses(outcomes[0][0])
        assert verdict.passed and "bit for bit" in verdict.line, verdict.line


@pytest.mark.parametrize(("size", "flags"), [(1, ""), (1, "--microbatches 3"), (2, "--microbatches 3"), (3, "")])
def test_a_run_draws_one_mask_per_seed_step_and_global_sample(size, flags, monkeypatch):
    """Forward and backward have the same keys. No comparison of layouts sees the same masks in every step or seed."""
    drawn = []

    def record(seed, step, samples):
        drawn.extend((seed, step, sample) for sample in samples)
        return DropoutKeys(seed, step, samples)

    monkeypatch.setattr(trainer_module, "DropoutKeys", record)
    args = config_for(f"{SHAPE} --global-batch 6 --seed 11 {flags}", size)
    on_each_rank(args, TOKENS, lambda trainer, results: None)
    expected = [(11, step, sample) for step in range(3) for sample in range(6)]
    assert sorted(drawn) == sorted(2 * expected)
