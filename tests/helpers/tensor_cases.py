"""What the tests of tensor parallelism share: shapes, one forward and backward, a training, and one device."""

from functools import cache

import numpy as np
import training
from training import joined, trainer_for

from minipar.comm import run_local
from minipar.nn import GPT, GPTConfig, Linear
from minipar.parallel.placement import Shard
from minipar.parallel.tensor.layers import shard_parameter
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.train.data import Tokens

# heads and sequence length for each number of ranks; 13 tokens are never a multiple of it.
SHAPES = {1: (6, 8), 2: (6, 8), 3: (6, 9), 4: (12, 8), 8: (8, 8)}
# AdamW's first update of an element is lr*g/(|g| + eps). Where g is smaller than eps, by chance or because softmax does
# not see the keys' bias, it is g's rounding error times 1/eps: with the usual 1e-8 as much as 7e-12 of a bias that was
# zero (measured, in 8 of 192 runs more than 1e-12). A larger eps leaves in the first steps what is to be compared.
EPS = 1e-6
VOCAB, HIDDEN, LAYERS = 13, 24, 2
RANDOM = np.random.Generator(np.random.Philox(51))
ROWS = RANDOM.integers(0, VOCAB, (3, 10))
TEXT = Tokens(RANDOM.integers(0, VOCAB, 500).astype(np.uint8), "a random text")


def close(a, b, bound=1e-13):
    return a.shape == b.shape and np.abs(a - b).max() <= bound * np.abs(b).max()


def bound(steps, dtype="float64"):
    """The largest relative difference after so many steps, 1e-12 after one: AdamW divides a gradient by its size."""
    return 4500 * float(np.finfo(dtype).eps) * (5 * steps - 4)


def split_along(weight, group, dim):
    """Leave this rank its part of a parameter."""
    shard_parameter(weight, Shard(group.rank, group.size, dim, weight.shape[dim]))


def model_of(tp, dropout=0.0, recompute=False, layers=LAYERS, dtype="float64"):
    heads, length = SHAPES[tp]
    config = GPTConfig(VOCAB, length, HIDDEN, layers, heads)
    return GPT(config, seed=4, dtype=dtype, recompute=recompute, dropout=dropout)


def loss_and_backward(model):
    length = model.config.n_positions
    targets = ROWS[:, 1 : length + 1].copy()
    targets[0, 2] = -100
    loss = model.loss_sum(ROWS[:, :length], targets)
    loss.backward()
    for parameter in model.parameters():
        parameter.fold_tied_gradients()
    return loss.item()


@cache
def serial(tp):
    """Loss, gradients and weights of the serial model in the shape that tp ranks share."""
    model = model_of(tp)
    weights = model.state_dict()
    return loss_and_backward(model), {name: p.grad for name, p in model.named_parameters()}, weights


def parallel(comm, sequence, recompute=False):
    """A rank's loss; gradients and weights made whole; and its own gradients of the parameters that all have."""
    model = model_of(comm.size, recompute=recompute)
    tensor = tensor_parallel(model, comm, sequence=sequence)
    loss = loss_and_backward(model)
    tensor.sum_partial(model.parameters())
    named = list(model.named_parameters())
    gradients, weights = ({name: joined(comm, p, getattr(p, of)) for name, p in named} for of in ("grad", "data"))
    replicated = {name: p.grad.tobytes() for name, p in named if not isinstance(p.placement.tp, Shard)}
    return loss, gradients, weights, replicated


def config_for(flags, size, tp):
    heads, length = SHAPES[tp]
    shape = f"--layers {LAYERS} --hidden {HIDDEN} --heads {heads} --seq-len {length} --vocab-size {VOCAB}"
    return training.config_for(f"{shape} --dtype float64 --tp {tp} --eps {EPS} {flags}", size)


def train(flags, dp=1, tp=1, sequence=False, verified=True):
    """Each rank's (parameters from state_dict, step results, verdict, own replicated parameters)."""
    args = config_for(flags + (" --sequence-parallel" if sequence else ""), dp * tp, tp)

    def rank(comm):
        # `verify` compares with the usual eps, so it has a trainer of its own.
        verdict = training.verified(trainer_for(args, TEXT, comm))[1] if verified else None
        trainer = trainer_for(args, TEXT, comm)
        results = list(trainer.train())
        replicated = {}
        if args.zero_stage < 3:
            named = trainer.model.named_parameters()
            replicated = {name: p.data.tobytes() for name, p in named if not isinstance(p.placement.tp, Shard)}
        return trainer.state_dict(), results, verdict, replicated

    return run_local(dp * tp, rank)


@cache
def one_device(flags, tp, dp=1):
    """Parameters, losses and gradient norms of one device instead of dp x tp ranks."""
    trainer = training.one_device(config_for(flags, dp * tp, tp), TEXT)
    results = list(trainer.train())
    return trainer.state_dict(), [r.loss for r in results], [r.grad_norm for r in results]


FLAGS = "--global-batch 2 --clip-grad 0.5"


def linear_of(weight, bias):
    """A layer with copies of these values."""
    layer = Linear(*weight.shape, name="layer", dtype="float64")
    layer.weight.data, layer.bias.data = weight.copy(), bias.copy()
    return layer
