"""Claims about tokens and targets: an id outside the vocabulary is refused by name in every model, split or whole."""

import numpy as np
import pytest
import strict_array
from training import using

import minipar as mp
from minipar.autograd import IGNORE_INDEX
from minipar.backend import from_host
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import Embedding

V = 11
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt():
    return mp.GPT(mp.GPTConfig(vocab_size=V, n_positions=4, n_embd=8, n_layer=1, n_head=2))


def llama():
    return mp.Llama(mp.LlamaConfig(vocab_size=V, **SIZES))


def mixtral():
    return mp.Mixtral(mp.MixtralConfig(vocab_size=V, num_key_value_heads=2, num_local_experts=2, **SIZES))


class Own(mp.Module):
    """A user's model of parallel parts, on one rank too; 2 divides its 12 tokens."""

    def __init__(self, comm):
        self.embedding = mp.VocabParallelEmbedding(12, 8, comm, name="embedding")
        self.head = mp.ColumnParallelLinear(8, 12, comm, name="head")
        self.group = comm

    def loss_sum(self, x, y):
        return mp.vocab_parallel_cross_entropy_sum(self.head(self.embedding(x)), y, self.group)


MODELS = {"gpt": gpt, "llama": llama, "mixtral": mixtral, "own": Own}
LAYOUTS = [(name, ranks) for name in MODELS for ranks in (0, 1, 2) if (name, ranks) != ("own", 0)]


def make(name, comm, ranks):
    """Make a model; with 1 or 2 ranks a tensor-parallel one, of which 2 do not divide 11 tokens."""
    if name == "own":
        return Own(comm)
    model = MODELS[name]()
    if ranks:
        mp.tensor_parallel(model, comm)
    return model


def batch(token=None, target=None):
    x = np.arange(8).reshape(2, 4)
    y = x + 1
    if token is not None:
        x[1, 2] = token
    if target is not None:
        y[1, 2] = target
    return x, y


def loss_of(name, ranks, x, y):
    return run_local(max(1, ranks), lambda comm: make(name, comm, ranks).loss(x, y).item())


@pytest.mark.parametrize("token", [-1, V, V + 1, 999, IGNORE_INDEX])
@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_a_token_outside_the_vocabulary_is_refused(name, ranks, token):
    size = 12 if name == "own" else V
    if token == V and name == "own":
        return  # it has 12
    says = rf"token {token} at \[1, 2\] is not below vocab_size {size}"
    if token < 0:
        says = rf"token {token} at \[1, 2\] is negative: tokens are 0 to {size - 1}"
    with pytest.raises(UsageError, match=says):
        loss_of(name, ranks, *batch(token=token))


@pytest.mark.parametrize("target", [-1, V, V + 1, 999, -101])
@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_a_target_outside_the_vocabulary_is_refused(name, ranks, target):
    size = 12 if name == "own" else V
    if target == V and name == "own":
        return
    says = rf"target {target} at \[1, 2\] is not below vocab_size {size}"
    if target < 0:
        says = rf"target {target} at \[1, 2\] is negative: targets are 0 to {size - 1}.* or -100 to be ignored"
    with pytest.raises(UsageError, match=says):
        loss_of(name, ranks, *batch(target=target))


@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_the_first_and_last_id_and_ignored_targets_are_fine(name, ranks):
    last = 11 if name == "own" else V - 1
    for token, target in ((0, 0), (last, last), (None, IGNORE_INDEX)):
        assert all(np.isfinite(loss_of(name, ranks, *batch(token, target))))


def test_an_ignored_target_does_not_count_as_torch_has_it():
    x, y = batch(target=IGNORE_INDEX)
    model = gpt()
    rows = -np.log(np.exp(model(x).data) / np.exp(model(x).data).sum(-1, keepdims=True))
    each = np.take_along_axis(rows, np.where(y < 0, 0, y)[..., None], -1)[..., 0][y >= 0]
    assert model.loss(x, y).item() == pytest.approx(each.mean(), rel=1e-6)


@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_targets_of_another_shape_are_refused(name, ranks):
    x, y = batch()
    for wrong in (y.T, y[:, :-1], y[:1], y[..., None], y.reshape(4, 2), y.reshape(1, 8)):
        with pytest.raises(UsageError, match=r"targets of shape .* for logits of \(2, 4\) tokens: expected \(2, 4\)"):
            loss_of(name, ranks, x, wrong)
    assert loss_of(name, ranks, x, y.reshape(-1)) == loss_of(name, ranks, x, y)


@pytest.mark.parametrize(("name", "ranks"), LAYOUTS)
def test_ids_that_are_not_integers_are_refused(name, ranks):
    x, y = batch()
    for dtype in (bool, np.float32):
        with pytest.raises(UsageError, match="targets of dtype .*: expected integers"):
            loss_of(name, ranks, x, y.astype(dtype))
        with pytest.raises(UsageError, match="tokens of .*: expected integers"):
            loss_of(name, ranks, x.astype(dtype), y)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
def test_ids_of_any_integer_dtype_give_the_same_loss(dtype):
    x, y = batch()
    assert gpt().loss(x.astype(dtype), y.astype(dtype)).item() == gpt().loss(x, y).item()


def test_the_first_of_several_wrong_ids_is_named():
    x, y = batch()
    x[0, 3], x[1, 0] = V, -1
    with pytest.raises(UsageError, match=rf"token {V} at \[0, 3\]"):
        gpt().loss(x, y)


def test_an_embedding_names_itself():
    with pytest.raises(UsageError, match=r"token 5 at \[0\] is not below vocab_size 5 of positions"):
        Embedding(5, 2, name="positions")(np.array([5]))


def test_ids_on_a_device_are_checked_too():
    with using(strict_array):
        model = gpt()
        x, y = (from_host(ids) for ids in batch())
        assert np.isfinite(model.loss(x, y).item())
        for kind, wrong in (("token", batch(token=-1)), ("target", batch(target=V))):
            with pytest.raises(UsageError, match=rf"{kind} (-1|11) at \[1, 2\]"):
                model.loss(*(from_host(ids) for ids in wrong))
