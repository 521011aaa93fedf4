"""Claims about the fused operations: right values (against plain NumPy), right gradients (against the checker)."""

import math

import numpy as np
import pytest

from minipar.autograd import (
    Tensor,
    causal_attention,
    cross_entropy_sum,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    rms_norm,
)
from minipar.autograd.gradcheck import gradcheck
from minipar.more.llama import rotary, swiglu

RANDOM = np.random.Generator(np.random.Philox(2))
TARGETS = np.array([[0, 4, -100], [2, 2, 1]])


def normal(*shape):
    return RANDOM.standard_normal(shape)


WEIGHT = normal(4, 5)
KEEP = RANDOM.random((2, 3, 4, 4)) >= 0.25
OPERATIONS = {
    "linear": (lambda x, w, b: linear(x, w, b), [normal(2, 3, 4), normal(4, 5), normal(5)]),
    "linear without bias": (lambda x, w: linear(x, w), [normal(3, 4), normal(4, 5)]),
    "linear, transposed weight": (lambda x, w: linear(x, w, transposed=True), [normal(2, 3, 4), normal(5, 4)]),
    "linear, a weight that is computed": (lambda x, w: linear(x, w * 2.0), [normal(3, 4), normal(4, 5)]),
    "linear, a constant weight": (lambda x: linear(x, Tensor(WEIGHT)), [normal(3, 4)]),
    "layer_norm, a gain that is computed": (lambda x, w: layer_norm(x, w.exp(), w), [normal(3, 8), normal(8)]),
    "embedding, repeated tokens": (lambda w: embedding(w, np.array([[1, 3, 1], [1, 0, 3]])), [normal(5, 2)]),
    "embedding, no tokens": (lambda w: embedding(w, np.zeros((0,), int)) + w[:0], [normal(5, 2)]),
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b), [normal(2, 3, 8), normal(8), normal(8)]),
    "rms_norm": (lambda x, w: rms_norm(x, w), [normal(2, 3, 8), normal(8)]),
    "swiglu": (swiglu, [normal(3, 5) * 2, normal(3, 5)]),
    "rotary": (
        lambda q, k, v: rotary(q, k, v, np.array([0, 7, 3]), 4),
        [normal(2, 3, 16), normal(2, 3, 8), normal(2, 3, 8)],
    ),
    "gelu": (gelu, [normal(4, 5) * 2]),
    "attention, 1 head": (lambda x: causal_attention(x, 1), [normal(2, 5, 12)]),
    "attention, 3 heads": (lambda x: causal_attention(x, 3), [normal(2, 4, 18)]),
    "attention, one position": (lambda x: causal_attention(x, 2), [normal(2, 1, 12)]),
    "attention, 4 heads on 2": (lambda x: causal_attention(x, 4, 2), [normal(2, 4, 24)]),
    "attention, dropout": (lambda x: causal_attention(x, 3, None, KEEP, 0.25), [normal(2, 4, 18)]),
    "dropout": (lambda x: dropout(x, KEEP[0], 0.25), [normal(3, 4, 4)]),
    "cross_entropy_sum": (lambda x: cross_entropy_sum(x, TARGETS), [normal(2, 3, 5)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_backward_is_the_adjoint_of_forward(name):
    function, inputs = OPERATIONS[name]
    gradcheck(function, inputs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_float32(name):
    function, inputs = OPERATIONS[name]
    leaves = [Tensor(array.astype("float32"), requires_grad=True) for array in inputs]
    y = function(*leaves)
    y.backward(np.ones(y.shape, "float32"))
    float64 = function(*[Tensor(array) for array in inputs]).data
    np.testing.assert_allclose(y.data, float64, rtol=1e-4, atol=1e-5)
    if name != "linear, a constant weight":
        assert y.dtype == np.float32 and {leaf.grad.dtype for leaf in leaves} == {np.dtype("float32")}


def test_layer_norm_normalizes_with_the_biased_variance():
    x, w, b = normal(3, 8), normal(8), normal(8)
    y = layer_norm(Tensor(x), Tensor(w), Tensor(b)).data
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b
    np.testing.assert_allclose(y, expected, rtol=1e-13, atol=1e-13)


def test_gelu_is_the_tanh_approximation():
    x = normal(100) * 3
    expected = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x]
    np.testing.assert_allclose(gelu(Tensor(x)).data, expected, rtol=1e-13, atol=1e-15)


def test_swiglu_of_large_inputs_neither_overflows_nor_is_nan():
    x = np.array([-1000.0, 0.0, 1000.0])
    with np.errstate(all="raise"):
        assert swiglu(Tensor(x), Tensor(np.ones(3))).data.tolist() == [0.0, 0.0, 1000.0]


def test_rotary_turns_pairs_by_position_times_frequency():
    q, k, v = normal(1, 3, 8), normal(1, 3, 4), normal(1, 3, 4)
    positions = np.array([5, 0, 2])
    packed = rotary(Tensor(q), Tensor(k), Tensor(v), positions, size=4, theta=100.0).data
    assert packed.shape == (1, 3, 16) and np.array_equal(packed[..., 12:], v)
    for t, position in enumerate(positions):
        for head, start in [(q[0, t, :4], 0), (q[0, t, 4:], 4), (k[0, t], 8)]:
            for i in range(2):
                turned = complex(head[i], head[i + 2]) * np.exp(1j * position * 100 ** (-2 * i / 4))
                assert abs(turned - complex(packed[0, t, start + i], packed[0, t, start + i + 2])) < 1e-14


def test_grouped_heads_share_keys_and_values_in_order():
    qkv = normal(2, 5, 24)  # 4 heads of q, 2 of k and of v, of 3 elements
    q, k, v = np.split(qkv, (12, 18), axis=-1)
    repeated = [np.repeat(x.reshape(2, 5, 2, 3), 2, axis=2).reshape(2, 5, 12) for x in (k, v)]
    expected = causal_attention(Tensor(np.concatenate([q, *repeated], axis=-1)), 4).data
    np.testing.assert_allclose(causal_attention(Tensor(qkv), 4, 2).data, expected, rtol=1e-13)


def naive_attention(qkv, heads):
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    d, out = width // heads, np.zeros((qkv.shape[0], length, width))
    for b in range(batch):
        for n in range(heads):
            q, k, v = (qkv[b, :, part * width + n * d : part * width + (n + 1) * d] for part in range(3))
            for t in range(length):
                s = q[t] @ k[: t + 1].T / math.sqrt(d)
                p = np.exp(s - s.max())
                out[b, t, n * d : (n + 1) * d] = (p / p.sum()) @ v[: t + 1]
    return out


@pytest.mark.parametrize(("heads", "length"), [(1, 1), (2, 5), (4, 7)])
def test_attention_is_softmax_over_the_past_for_each_head(heads, length):
    qkv = normal(2, length, 3 * 8)
    np.testing.assert_allclose(causal_attention(Tensor(qkv), heads).data, naive_attention(qkv, heads), atol=1e-13)


def test_attention_never_looks_ahead():
    qkv = normal(1, 6, 12)
    changed = qkv.copy()
    changed[:, 4:] = normal(1, 2, 12)
    before, after = (causal_attention(Tensor(x), 2).data for x in (qkv, changed))
    assert np.array_equal(before[:, :4], after[:, :4]) and not np.array_equal(before[:, 4:], after[:, 4:])


def test_each_row_subtracts_its_own_maximum():
    """With one maximum for all rows, the small row's exponentials underflow to 0/0."""
    qkv = np.zeros((2, 2, 3))
    qkv[0, :, 0] = qkv[0, :, 1] = 100.0  # scores of 10,000 in the first sample, 0 in the second
    qkv[:, :, 2] = 1.0
    assert np.array_equal(causal_attention(Tensor(qkv), 1).data, np.ones((2, 2, 1)))
    logits = np.array([[5000.0, 0.0], [0.0, 0.0]])
    assert cross_entropy_sum(Tensor(logits), np.array([0, 1])).item() == pytest.approx(math.log(2))


def test_ignored_targets_neither_count_nor_get_a_gradient():
    x = Tensor(normal(2, 3, 5), requires_grad=True)
    loss = cross_entropy_sum(x, TARGETS)
    loss.backward()
    logits = x.data.reshape(6, 5)
    rows = [i for i, t in enumerate(TARGETS.reshape(-1)) if t != -100]
    logs = [np.log(np.exp(logits[i]).sum()) - logits[i, TARGETS.reshape(-1)[i]] for i in rows]
    assert loss.item() == pytest.approx(np.sum(logs), rel=1e-13)
    assert not x.grad[0, 2].any() and x.grad[0, 1].any()


@pytest.mark.parametrize(("vocabulary", "targets"), [(5, [-100, -100, -100]), (1, [0, -100, 0])])
def test_without_a_choice_loss_and_gradient_are_zero(vocabulary, targets):
    x = Tensor(normal(3, vocabulary), requires_grad=True)
    loss = cross_entropy_sum(x, np.array(targets))
    loss.backward()
    assert loss.item() == 0.0 and not x.grad.any()


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    x, w = 1e-3 * normal(3, 8), normal(8)  # as small as the root of epsilon, which is Llama's
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w
    np.testing.assert_allclose(rms_norm(Tensor(x), Tensor(w)).data, expected, rtol=1e-13)


def test_a_mask_alone_drops_without_scaling():
    x = Tensor(normal(2, 4, 18))
    everything = np.ones((2, 3, 4, 4), bool)
    assert np.array_equal(causal_attention(x, 3, keep=everything).data, causal_attention(x, 3).data)


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_tokens_gradient_has_the_same_bits_among_other_tokens(least):
    """Its rows are added in their order, also into a buffer that holds other values."""
    index = RANDOM.integers(least, 3, 200)
    weights = normal(200, 4)

    def gradient(rows, buffer=None):
        table = Tensor(np.zeros((5, 4)), requires_grad=True)
        table.grad_buffer = buffer
        embedding(table, index[rows]).backward(weights[rows])
        return table.grad

    alone = sum(gradient(index == token) for token in range(5))
    everything = np.ones(200, bool)
    for whole in (gradient(everything), gradient(everything, np.full((5, 4), 7.0))):
        assert np.array_equal(whole, alone) and not whole[3:].any()
    np.testing.assert_allclose(alone[least], weights[index == least].sum(0), rtol=1e-12)
