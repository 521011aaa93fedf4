"""Claims about mistakes of a user's program: each is one line that shows the values and the remedy, on every rank."""

import re

import numpy as np
import pytest
from training import MLP, small_gpt, text

import minipar as mp
from minipar.comm import run_local

X, Y = text(range(4))  # (4, 8)
STAGES = [0, 1, 2, 3]


class FromTorch:
    """A tensor of torch as minipar sees it: NumPy can read it, and its `size` and `dtype` are torch's own."""

    def __init__(self, array):
        self.array = array
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, "torch.int64"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def size(self):
        return self.array.shape


class TorchModule:
    """A model of torch: it has parameters and can be called, but is no mp.Module."""

    def parameters(self):
        return iter([FromTorch(np.zeros(3))])

    def __call__(self, x):
        return x


def wrapped(world, stage=0, **options):
    return mp.shard(small_gpt(layers=1), world, stage, **options)


def twice(world, stage):
    return mp.shard(wrapped(world, stage), world, stage)


def two_wrappers(world, stage):
    model = small_gpt(layers=1)
    mp.shard(model, world, stage)
    return mp.shard(model, world, 3 - stage)


def row_of_whole(world, stage):
    return mp.RowParallelLinear(8, 3, world, name="row")(np.zeros((2, 8)))


def full_loss_of_split_logits(world, stage):
    logits = mp.ColumnParallelLinear(5, 12, world, name="head")(np.zeros((3, 5)))
    return mp.cross_entropy_sum(logits, np.arange(3))  # all targets are below 12/2


def states(**changes):
    """A state of the model of `wrapped`, with names taken away or added."""
    return {name: array for name, array in (small_gpt(layers=1).state_dict() | changes).items() if array is not None}


BATCHES = {  # x, y, the line
    "tokens of one dim": (X[0], Y[0], r"tokens of shape \(8,\): expected \(samples, tokens\), as tokens\[None\]"),
    "tokens in a list": (X.tolist(), Y, r"tokens are a list: give an array, as np.array\(tokens\)"),
    "tokens that are floats": (X * 1.0, Y, r"tokens of float64: expected integers, as tokens.astype\(int\)"),
    "targets in a list": (X, Y.tolist(), r"targets are a list: give an array, as np.array\(targets\)"),
    "targets that are a Tensor": (X, mp.Tensor(Y), r"targets are a Tensor: give its array, targets.data"),
    "targets that are missing": (X, None, r"targets are a NoneType: give an array"),
    "targets one column short": (
        X,
        Y[:, 1:],
        r"targets of shape \(4, 7\) for logits of \(4, 8\) tokens: .* flat \(32,\)",
    ),
    "targets of fewer samples": (X, Y[1:], r"targets of shape \(3, 8\) for logits of \(4, 8\) tokens"),
}
MISTAKES = {  # program(world, stage), the line
    "no learning rate": (
        lambda world, stage: mp.AdamW(wrapped(world, stage).parameters(), lr=None),
        "lr = None: expected a finite number, 0 or larger",
    ),
    "a learning rate in a text": (
        lambda world, stage: mp.AdamW(wrapped(world, stage).parameters(), lr="1e-3"),
        "lr = '1e-3': expected a finite number, 0 or larger",
    ),
    "torch's module": (
        lambda world, stage: mp.shard(TorchModule(), world, stage),
        r"TorchModule is no mp.Module: write the model with mp.Module, mp.Linear",
    ),
    "a wrapper wrapped again": (twice, "the model is a wrapper already, .*: wrap the model itself, once"),
    "two wrappers of a model": (two_wrappers, "the model has a wrapper already, .*: use that one, or make a new model"),
    "a state for the wrapper": (
        lambda world, stage: wrapped(world, stage).load_state_dict({}),
        r"load the state before wrapping: model.load_state_dict\(state\), then",
    ),
    "a row layer of a whole input": (
        row_of_whole,
        "RowParallelLinear: x has 8 columns, but n_in/tp = 8/2 = 4 are this rank's: .* of a ColumnParallelLinear",
    ),
    "the whole loss of split logits": (
        full_loss_of_split_logits,
        "the logits are this rank's 6 of 12 columns: .* mp.vocab_parallel_cross_entropy_sum",
    ),
}


def refused(line, call):
    with pytest.raises(mp.UsageError) as caught:
        call()
    message = str(caught.value)
    assert re.search(line, message) and "\n" not in message and len(message) < 250, message


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(name, stage):
    program, line = MISTAKES[name]
    run_local(2, lambda world: refused(line, lambda: program(world, stage)))


@pytest.mark.parametrize("stage", [None, *STAGES])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_makes_no_sense_is_one_line(name, stage):
    x, y, line = BATCHES[name]

    def rank(world):
        model = small_gpt(layers=1) if stage is None else wrapped(world, stage)
        refused(line, lambda: model.loss(x, y))
        return model.loss(X, Y).item()  # the next batch is right

    run_local(2, rank)


@pytest.mark.parametrize("name", [name for name in BATCHES if "Tensor" not in name])
def test_split_logits_ask_for_the_same_batches(name):
    x, y, line = BATCHES[name]

    def rank(world):
        model = small_gpt(layers=1, attention="full")
        mp.tensor_parallel(model, world)
        refused(line, lambda: model.loss(x, y))

    run_local(1, rank)


@pytest.mark.parametrize("replicas", [3, 5, 0, -1])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_that_do_not_divide_the_ranks_are_named(stage, replicas):
    with pytest.raises(mp.UsageError, match=f"replicas = (4/)?{replicas}( is not|: expected)"):
        run_local(4, lambda world: wrapped(world, stage, replicas=replicas))


@pytest.mark.parametrize("stage", STAGES)
def test_a_tensor_of_torch_is_read_as_targets_and_tokens(stage):
    def rank(world, convert):
        ddp = wrapped(world, stage)
        return ddp.loss(convert(X), convert(Y)).item()

    assert run_local(2, rank, FromTorch) == run_local(2, rank, np.asarray)


def test_the_whole_loss_of_whole_logits_stays_right():
    """One rank's columns are all of them, and the result of an all-gather is no part either."""

    def rank(world):
        logits = mp.ColumnParallelLinear(5, 12, world, name="head")(np.ones((3, 5)))
        return mp.cross_entropy_sum(logits, np.arange(3)).item()

    serial = mp.Linear(5, 12, name="head")
    assert run_local(1, rank) == [mp.cross_entropy_sum(serial(np.ones((3, 5))), np.arange(3)).item()]


def test_a_layer_names_a_wrong_number_of_columns():
    with pytest.raises(mp.UsageError, match=r"Linear of 3 inputs: x has the shape \(2, 4\)"):
        MLP()(np.zeros((2, 4)))
    with pytest.raises(mp.UsageError, match=r"Linear of 3 inputs: x has the shape \(\)"):
        MLP()(np.zeros(()))


def test_a_foreign_state_names_what_is_unexpected_first():
    with pytest.raises(ValueError, match=r"^unexpected foo; missing 16 names: wte.weight, wpe.weight, ") as caught:
        small_gpt(layers=1).load_state_dict({"foo": np.zeros(3)})
    assert str(caught.value).endswith(", ...") and len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=r"^missing wpe.weight$"):
        small_gpt(layers=1).load_state_dict(states(**{"wpe.weight": None}))
    with pytest.raises(ValueError, match=r"^wpe.weight has shape \(2,\), expected \(8, 13\); unexpected a, b$"):
        small_gpt(layers=1).load_state_dict(states(**{"wpe.weight": np.zeros(2), "a": np.ones(1), "b": np.ones(1)}))


def test_shards_are_shown_in_one_short_line():
    def rank(world):
        return repr(mp.shard(MLP(), world, 3).parameters())

    first, second = run_local(2, rank)
    assert first == "[ParameterShard(first.weight[0:13], float64)]"
    assert second.startswith("[ParameterShard(first.weight[13:15], float64), ParameterShard(first.bias[0:5], float64)")
