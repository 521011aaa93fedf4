"""Claims about tokens and targets: one outside the vocabulary is refused with its place, in every model and layout."""

import numpy as np
import pytest
import strict_array
from refusals import refused, refused_on_every_rank
from training import using

import minipar as mp
from minipar.autograd import IGNORE_INDEX
from minipar.backend import from_host
from minipar.comm import run_local
from minipar.errors import UsageError
from minipar.nn import Embedding

V = 11
LLAMA = mp.LlamaConfig(V, 8, 12, 1, 2)
MIXTRAL = mp.MixtralConfig(V, 8, 12, 1, 2, 2, num_local_experts=2)
X = np.arange(8).reshape(2, 4)
Y = X + 1


def gpt():
    return mp.GPT(mp.GPTConfig(vocab_size=V, n_positions=4, n_embd=8, n_layer=1, n_head=2))


class Own(mp.Module):
    """A user's model of parallel parts; it has 12 tokens."""

    def __init__(self, comm):
        self.embedding = mp.VocabParallelEmbedding(12, 8, comm, name="embedding")
        self.head = mp.ColumnParallelLinear(8, 12, comm, name="head")

    def loss_sum(self, x, y):
        return mp.vocab_parallel_cross_entropy_sum(self.head(self.embedding(x)), y, self.head.group)


def split(model, comm):
    mp.tensor_parallel(model, comm)
    return model


LAYOUTS = {  # how a rank makes the model, on how many ranks, and its number of tokens; 2 do not divide 11
    "gpt": (lambda comm: gpt(), 1, V),
    "llama": (lambda comm: mp.Llama(LLAMA), 1, V),
    "mixtral": (lambda comm: mp.Mixtral(MIXTRAL), 1, V),
    "gpt, split over 1": (lambda comm: split(gpt(), comm), 1, V),
    "gpt, split over 2": (lambda comm: split(gpt(), comm), 2, V),
    "llama, split over 2": (lambda comm: split(mp.Llama(LLAMA), comm), 2, V),
    "mixtral, split over 2": (lambda comm: split(mp.Mixtral(MIXTRAL), comm), 2, V),
    "a user's own over 1": (Own, 1, 12),
    "a user's own over 2": (Own, 2, 12),
    "gpt, ZeRO 0": (lambda comm: mp.shard(gpt(), comm, 0), 2, V),
    "gpt, ZeRO 1": (lambda comm: mp.shard(gpt(), comm, 1), 2, V),
    "gpt, ZeRO 2": (lambda comm: mp.shard(gpt(), comm, 2), 2, V),
    "gpt, ZeRO 3": (lambda comm: mp.shard(gpt(), comm, 3), 2, V),
}


def refuses(layout, x, y, *values):
    """Check that a batch is refused on every rank, which then takes the next one."""
    make, size, _ = LAYOUTS[layout]

    def program(comm):
        model = make(comm)
        try:
            model.loss(x, y)
        finally:
            assert np.isfinite(model.loss(X, Y).item())

    refused_on_every_rank(size, UsageError, *values, by=program)


def with_id(array, value):
    """Return the array with this id at [1, 2]."""
    changed = array.copy()
    changed[1, 2] = value
    return changed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_outside_the_vocabulary_is_named_with_its_place(layout):
    count = LAYOUTS[layout][-1]
    for wrong in (count, 999):
        refuses(layout, with_id(X, wrong), Y, "token", str(wrong), "[1, 2]", str(count - 1))
        refuses(layout, X, with_id(Y, wrong), "target", str(wrong), "[1, 2]", str(count - 1))
    for wrong in (-1, -101):
        refuses(layout, with_id(X, wrong), Y, "token", str(wrong), "[1, 2]", str(count - 1))
        refuses(layout, X, with_id(Y, wrong), "target", str(wrong), "[1, 2]", str(count - 1), str(IGNORE_INDEX))
    refuses(layout, with_id(X, IGNORE_INDEX), Y, "token", str(IGNORE_INDEX), "[1, 2]")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_of_another_shape_or_dtype_are_refused(layout):
    for y in (Y.T, Y[:, :-1], Y[:1], Y[..., None], Y.reshape(1, 8)):
        refuses(layout, X, y, str(y.shape), "(2, 4)")
    refuses(layout, X, Y.astype(np.float32), "float32")
    refuses(layout, X.astype(np.float32), Y, "float32")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bounds_and_ignored_and_flat_targets_are_taken(layout):
    make, size, count = LAYOUTS[layout]

    def losses(x, y):
        return run_local(size, lambda comm: make(comm).loss(x, y).item())

    for token, target in ((0, 0), (count - 1, count - 1), (2, IGNORE_INDEX)):
        assert np.isfinite(losses(with_id(X, token), with_id(Y, target))).all()
    assert losses(X, Y.reshape(-1)) == losses(X, Y)
    if "own" not in layout:  # whose embedding is given the tokens as they are
        assert losses(X.tolist(), Y.tolist()) == losses(X, Y)  # lists are copied into arrays


def test_a_tensor_is_no_batch():
    refused(TypeError, ".data", by=lambda: gpt().loss(mp.Tensor(X), Y))
    refused(TypeError, ".data", by=lambda: gpt().loss(X, mp.Tensor(Y)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64])
def test_ids_of_any_integer_dtype_give_the_same_loss(dtype):
    assert gpt().loss(X.astype(dtype), Y.astype(dtype)).item() == gpt().loss(X, Y).item()


def test_the_first_of_several_wrong_ids_is_named():
    x = X.copy()
    x[0, 3], x[1, 0] = V, -1
    refused(UsageError, str(V), "[0, 3]", by=lambda: gpt().loss(x, Y))
    refused(UsageError, "5", "[0]", "positions", by=lambda: Embedding(5, 2, name="positions")(np.array([5])))


def test_ids_on_a_device_are_checked_too():
    with using(strict_array):
        model = gpt()

        def loss(x, y):
            return model.loss(from_host(x), from_host(y)).item()

        assert np.isfinite(loss(X, Y))
        refused(UsageError, "-1", "[1, 2]", by=lambda: loss(with_id(X, -1), Y))
        refused(UsageError, "11", "[1, 2]", by=lambda: loss(X, with_id(Y, V)))
