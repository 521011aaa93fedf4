"""Claims about what ranks refuse: the whole line, which says what is wrong, on which rank, and what to do."""

import numpy as np
import pytest
from training import MLP

import minipar as mp
from minipar.comm import run_local, serial
from minipar.errors import UsageError
from minipar.nn import SGD, AdamW, Linear, Parameter
from minipar.parallel import guards
from minipar.parallel.parallelize import shard
from minipar.parallel.placement import Partial, Placement, Shard
from minipar.parallel.zero_optimizer import ZeroOptimizer


class Ranks:
    """Ranks 4 and 6 of a world, on an axis of their own; the other one holds what it is told to."""

    axis = "dp"
    size = 2
    ranks = (4, 6)
    rank = 0

    def __init__(self, other=b"[]"):
        self.other = other

    def all_gather_bytes(self, own):
        return [own, self.other]


def named(p):
    """Give the parameter a name, and return it."""
    p.placement = Placement("up.weight", p.shape)
    return p


def split():
    """Return a model whose tokens ranks 4 and 5 share."""
    model = MLP()
    model.split_over = (("context_parallel", (4, 5)),)
    return model


def frozen():
    """Return a model with a parameter that is not trained."""
    model = MLP()
    model.first.bias.requires_grad = False
    return model


P = Parameter(np.zeros(3))
REFUSED = {
    "a class of torch": (
        lambda: guards.check_wrapping(3, serial(), "ring"),
        "int is no mp.Module: write the model with mp.Module, mp.Linear, mp.Embedding, ... "
        "(a wrapper of torch is for torch's)",
    ),
    "a wrapper": (
        lambda: guards.check_wrapping(shard(MLP(), serial(), 1), serial(), "ring"),
        "the model is a wrapper already, ZeroStage1: wrap the model itself, once",
    ),
    "a model that has one": (
        lambda: guards.check_wrapping(shard(MLP(), serial(), 2).model, serial(), "ring"),
        "the model has a wrapper already, ZeroStage2: use that one, or make a new model",
    ),
    "a frozen parameter": (
        lambda: guards.check_wrapping(frozen(), serial(), "ring"),
        "first.bias.requires_grad is False, but a wrapper trains all parameters: train a part of a model without a "
        "wrapper, or keep its values outside of the model's parameters",
    ),
    "an algorithm": (
        lambda: guards.check_wrapping(MLP(), serial(), "auto"),
        'algorithm "auto": expected ring, ordered or tree',
    ),
    "a number of replicas": (
        lambda: guards.check_wrapping(MLP(), Ranks(), "ordered", 3),
        "ranks/replicas = 2/3 is not a whole number: each replica of the shards has as many ranks",
    ),
    "no replicas": (lambda: guards.check_wrapping(MLP(), Ranks(), "tree", -2), "replicas = -2: expected at least 1"),
    "replicas of nothing": (
        lambda: guards.refuse_replicas(2),
        "replicas = 2: ZeRO stage 0 shards nothing; give stage 1, 2 or 3",
    ),
    "what is no communicator": (
        lambda: guards.check_communicator(3),
        "int is no Communicator: give world, as main(world) gets it, or an axis such as mesh.dp",
    ),
    "two dtypes": (
        lambda: guards.check_one_dtype([P, Parameter(np.zeros(1, np.float32))]),
        "flat storage needs parameters of one dtype, but there are ['float32', 'float64']",
    ),
    "no parameters": (
        lambda: guards.check_one_dtype([]),
        "flat storage needs parameters of one dtype, but there are none",
    ),
    "an expert among the others": (
        lambda: guards.check_summed(Placement("w1.weight", (3,), ep=1), True, print),
        "w1.weight is an expert's, and the ranks of ep hold different experts and different tokens: write experts = "
        "mp.expert_parallel(...), then mp.shard(..., groups=experts.groups(mesh.dp_cp))",
    ),
    "a part of a gradient": (
        lambda: guards.check_summed(Placement("ln.weight", (3,), Partial(1, 2)), True, None),
        "the gradient of ln.weight covers a part of the tokens, columns or heads on each rank of tp: write tensor = "
        "mp.tensor_parallel(...), then mp.shard(..., before_reduce=tensor.sum_partial)",
    ),
    "ranks left out": (
        lambda: guards.check_context(split(), Ranks()),
        "a wrapper over ranks (4, 6): context_parallel has shared each sample's tokens among ranks [4, 5]; wrap it "
        "over mesh.dp_cp, which has all",
    ),
    "rows of another layer": (
        lambda: guards.check_row_input((2, 5), 3, 4),
        "RowParallelLinear: x has 5 columns, but n_in/tp = 12/4 = 3 are this rank's: give it the result of a "
        "ColumnParallelLinear",
    ),
    "another start": (
        lambda: guards.check_start(Ranks(), [1, 2]),
        "the ranks hold different parameters, and no wrapper copies one rank's to the others: draw initial values by "
        "name (mp.Linear(..., name=...)) or from one seed, and load the same state on all ranks",
    ),
    "no replicas of one another": (
        lambda: guards.check_is_replica(Ranks(b'[["up.weight", 3]]'), [named(Parameter(np.zeros(3)))]),
        "ZeroOptimizer over dp, whose ranks are no replicas: up.weight of rank 6 is not that of rank 4; give the axis "
        "of the data-parallel replicas, such as mesh.dp, and draw or load the same values on all of them",
    ),
    "more parameters on another rank": (
        lambda: guards.check_parted(Ranks(b'[["b", 0]]'), []),
        "the ranks' parameters have parted: their number of rank 6 is not that of rank 4; every rank must do the same "
        "in every step: a clip_grad_norm() or a step() on one rank alone parts them",
    ),
    "values that would be lost": (
        lambda: guards.check_freed([named(Parameter(np.zeros(3)))]),
        "up.weight.data was replaced after the model was wrapped: call model.load_state_dict(state) before mp.shard",
    ),
    "a late state": (
        lambda: shard(MLP(), serial(), 1).load_state_dict({}),
        "load the state before wrapping: model.load_state_dict(state), then mp.shard(model, ...)",
    ),
    "a tree without leaves": (
        lambda: guards.check_tree("tree", 0, 1),
        'reduction "tree" with tree_leaves = 0: give reduction="tree" and tree_leaves=leaf_count(model.config, '
        "length), or neither",
    ),
    "one leaf without a tree": (
        lambda: guards.check_tree("ring", 1, 1),
        'reduction "ring" with tree_leaves = 1: give reduction="tree" and tree_leaves=leaf_count(model.config, '
        "length), or neither",
    ),
    "three leaves": (
        lambda: guards.check_tree("tree", 3, 1),
        "tree_leaves = 3 is no power of two: a balanced tree needs one",
    ),
    "fewer leaves than ranks": (
        lambda: guards.check_tree("tree", 2, 4),
        "tree_leaves/tp = 2/4 is not a whole number: each rank has as many leaves",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_this_line(name):
    refuse, line = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        refuse()
    assert str(caught.value) == line


def test_what_fits_is_not_refused():
    guards.check_tree("tree", 1, 1)
    guards.check_tree("ordered", 0, 3)
    guards.check_wrapping(MLP(), Ranks(), "tree", 2)
    guards.check_summed(Placement("w1.weight", (3,), ep=1), False, print)
    guards.check_summed(Placement("up.weight", (3,), Shard(0, 2, 0, 3)), True, None)
    guards.check_row_input((2, 3), 3, 4)
    guards.check_context(MLP(), Ranks())
    powers = [count for count in range(-9, 9) if guards.is_power_of_two(count)]
    assert powers == [1, 2, 4, 8]


def test_names_drawn_twice_say_where():
    layers = [Linear(2, 2, name="up", bias=False, seed=5), Linear(2, 2, name="down", bias=False, seed=5)]
    parameters = [layer.weight for layer in layers]
    guards.check_names_over(Ranks(b'[[5, "right.weight"], [4, "up.weight"]]'), parameters)
    with pytest.raises(UsageError) as caught:
        guards.check_names_over(Ranks(b'[[4, "down.weight"], [5, "down.weight"]]'), parameters)
    assert str(caught.value) == (
        'two parameters on the pipeline\'s ranks 0 and 1 are drawn by the name "down.weight" and seed 5, and so start '
        "from the same values: give each layer a name of its own"
    )


def refusal_of(rank):
    """Return the line of the error that each of two ranks raises."""

    def program(comm):
        with pytest.raises(RuntimeError) as caught:
            rank(comm)
        return str(caught.value)

    return run_local(2, program)[1]


def test_a_step_too_early_says_what_is_missing():
    def rank(comm):
        ddp = shard(MLP(), comm, 1)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        with ddp.scaled_backward():
            ddp.model.loss_sum(np.ones((1, 3)), np.ones((1, 1))).backward()
        optimizer.step()

    assert refusal_of(rank) == (
        "optimizer.step() before the gradients were summed over the ranks: run the backward pass of the last "
        "microbatch outside `no_sync` (after scaled_backward: call wrapper.synchronize())"
    )


def test_a_mean_of_means_says_what_to_divide():
    def rank(comm):
        model = MLP()
        ZeroOptimizer(model.parameters(), SGD, comm, lr=0.1)
        model.loss(np.ones((1, 3)), np.ones((1, 1))).backward()

    assert refusal_of(rank) == (
        "ZeroOptimizer would add up the gradients of 2 ranks' means: divide model.loss_sum(x, y) by the targets of all "
        "ranks, or model.loss(x, y) by the ranks if each has as many targets"
    )


@pytest.mark.parametrize("good_steps", [0, 1, 2])
def test_an_unscaled_backward_says_by_how_much_it_is_wrong(good_steps):
    def rank(comm):
        ddp = mp.DistributedDataParallel(MLP(), comm)
        optimizer = SGD(ddp.parameters(), lr=0.1)
        for _ in range(good_steps):
            ddp.loss(np.ones((1, 3)), np.ones((1, 1))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ddp.model.loss(np.ones((1, 3)), np.ones((1, 1))).backward()

    assert refusal_of(rank) == (
        "backward() of a loss that was not divided by the global count of targets: over 2 ranks the gradients would "
        "add up to 2 times too much. Use wrapper.loss(x, y) instead of model.loss(x, y), or scale the loss and run "
        "backward inside `with wrapper.scaled_backward():`"
    )


def test_ranks_of_zero_optimizer_are_compared_less_and_less():
    """They are compared after 1, 2, 4, 8, ... steps, as a wrapper's are."""

    def rank(comm):
        model = MLP()
        optimizer = ZeroOptimizer(model.parameters(), SGD, comm, lr=0.1)
        compared = []
        for step in range(20):
            before = comm.traffic.bytes("control")
            (model.loss(np.ones((1, 3)), np.ones((1, 1))) / comm.size).backward()
            optimizer.step()
            optimizer.zero_grad()
            if comm.traffic.bytes("control") > before:
                compared.append(step)
        return compared

    assert run_local(2, rank) == [[1, 2, 4, 8, 16]] * 2


def test_after_a_resume_the_first_step_is_compared():
    """The ranks may have loaded states of other numbers of steps."""

    def after_a_step(comm, state):
        model = MLP()
        optimizer = ZeroOptimizer(model.parameters(), AdamW, comm, lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        (model.loss(np.ones((1, 3)), np.ones((1, 1))) / comm.size).backward()
        optimizer.step()
        return optimizer.state_dict()

    def rank(comm):
        state = after_a_step(comm, None)
        for moments in state["state"].values():
            moments["step"] += comm.rank
        after_a_step(comm, state)

    with pytest.raises(ValueError, match="the number of steps of rank 1 is not that of rank 0"):
        run_local(2, rank)
