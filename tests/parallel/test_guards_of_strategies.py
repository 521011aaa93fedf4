"""Claims about what strategies refuse of one another, and when: only what would train something else."""

import numpy as np
import pytest
from training import text

import minipar as mp
from minipar.comm import DeviceMesh, run_local, serial
from minipar.errors import UsageError
from minipar.nn import SGD, Linear, Module
from minipar.parallel import step_guard
from minipar.parallel.context import context_parallel
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.expert import expert_parallel
from minipar.parallel.split_guards import EXPERTS, check_expert_ranks, check_split, note_split
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.parallel.zero_optimizer import ZeroOptimizer

CONFIG = mp.GPTConfig(vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2)


class Axis:
    """An axis of a mesh, seen from one of its ranks."""

    def __init__(self, ranks, rank=0):
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = rank


def split_over(**ranks):
    """Return a model that strategies have split over these ranks of the world."""
    model = Module()
    model.split_over = tuple(ranks.items())
    return model


TP, CP, EP = "tensor_parallel", "context_parallel", "expert_parallel"
NOTED = {TP: (0, 1, 2, 3), EXPERTS: (0, 1)}  # of four ranks of tp two have parts of one expert


@pytest.mark.parametrize(
    ("noted", "strategy", "ranks", "refused_for"),
    [
        ({TP: (0, 1)}, CP, (0, 2), None),  # they share one rank, as two axes do
        ({TP: (0, 1)}, CP, (0, 1), TP),
        ({TP: (0, 1)}, EP, (0, 1, 2, 3), TP),
        ({CP: (0, 1)}, TP, (0, 1), CP),
        ({CP: (0, 1)}, EP, (0, 1), None),  # ranks of cp route different tokens
        ({EP: (0, 1)}, CP, (0, 1), None),
        ({EP: (0, 1)}, TP, (0, 1), EP),
        (NOTED, EP, (0, 2), None),  # which hold different experts
        (NOTED, EP, (0, 1), EXPERTS),
        (NOTED, EP, (0, 1, 2, 3), EXPERTS),
        (NOTED, CP, (0, 1, 2, 3), TP),
        (NOTED, CP, (0, 2), TP),
        (NOTED, CP, (0, 4), None),
        (NOTED, TP, (0, 4), "already"),
    ],
)
def test_two_strategies_share_ranks_only_where_they_may(noted, strategy, ranks, refused_for):
    model = split_over(**noted)
    if refused_for is None:
        check_split(model, strategy, Axis(ranks))
        return
    with pytest.raises(UsageError) as caught:
        check_split(model, strategy, Axis(ranks))
    if refused_for == "already":
        assert str(caught.value) == f"{TP} has split this model already: call it once, or make a new model"
        return
    assert str(caught.value) == (
        f"{strategy} over ranks {list(ranks)}: {refused_for} has split this model over ranks "
        f"{list(noted[refused_for])} already; give each its own axis, such as mesh.tp and mesh.cp of "
        "mp.DeviceMesh(comm, tp=2, cp=2)"
    )


def test_what_has_split_a_model_is_noted_in_order():
    model = Module()
    note_split(model, CP, Axis([0, 2]))
    note_split(model, TP, Axis([0, 1]))
    assert model.split_over == ((CP, (0, 2)), (TP, (0, 1)))


def test_experts_are_cut_by_neighbours_of_tp():
    tp = [Axis([4, 5, 6, 7], rank) for rank in range(4)]
    for rank in range(4):
        check_expert_ranks(Module(), tp[rank], Axis([[4, 5], [6, 7]][rank // 2], rank % 2), True)
        check_expert_ranks(Module(), tp[rank], Axis([4 + rank]), True)
        check_expert_ranks(Module(), tp[rank], tp[rank], False)  # without sequences all of tp cut each expert
    with pytest.raises(UsageError) as caught:
        check_expert_ranks(Module(), tp[3], Axis([5, 7], 1), True)
    assert str(caught.value) == (
        "experts over ranks [5, 7], tensor_parallel over ranks [4, 5, 6, 7]: experts are split over neighbours of tp; "
        "give experts=mesh.etp"
    )
    with pytest.raises(UsageError) as caught:
        check_expert_ranks(Module(), tp[3], Axis([6, 7], 1), False)
    assert str(caught.value) == (
        "tp = 4 with etp = 2: each rank of tp routes its own tokens, which it has with sequence parallelism; give "
        "sequence=True (--sequence-parallel)"
    )
    with pytest.raises(UsageError) as caught:
        check_expert_ranks(split_over(**{EP: (0, 1)}), tp[3], Axis([7]), True)
    assert str(caught.value) == (
        "tp = 4 with etp = 1: expert_parallel comes after tensor_parallel, which says where experts are"
    )


def test_zero_optimizer_over_the_samples_alone_is_refused():
    """The ranks of cp have different tokens, and so part in the first step."""

    def rank(comm):
        mesh = DeviceMesh(comm, cp=2)
        model = mp.GPT(CONFIG)
        context = context_parallel(model, mesh.cp)
        optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
        x, y = text(range(2))
        (model.loss_sum(context.part(x), context.part(y)) / y.size).backward()
        with pytest.raises(UsageError, match="the gradients of cp, each of a rank's own tokens, were not summed"):
            optimizer.step()

    run_local(2, rank)


def test_ranks_of_cp_are_compared_after_the_first_step_alone(monkeypatch):
    compared = []

    def note(comm, arrays, what, remedy):
        compared.append([name for name, _ in arrays])

    monkeypatch.setattr(step_guard, "check_alike", note)
    model = Linear(3, 1, name="layer", dtype="float64")
    step_guard.ContextGuard(serial(), model)
    other = Linear(3, 1, name="other", dtype="float64")
    optimizer = SGD([*other.parameters(), *model.parameters()], lr=0.1)
    for _ in range(3):
        (model(np.ones((1, 3))) + other(np.ones((1, 3)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compared == [["weight", "bias"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_experts_on_one_rank_of_ep_is_left_alone(ranks):
    """Each rank holds all experts, which a wrapper sums as all else."""

    def rank(comm):
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        model = mp.Mixtral(mp.MixtralConfig(vocab_size=17, hidden_size=8, intermediate_size=12, **sizes))
        mesh = DeviceMesh(comm, dp=ranks)
        experts = expert_parallel(model, mesh.ep, mesh.edp)
        assert not experts.experts and all(p.placement is None for p in model.parameters())
        groups = experts.groups(mesh.dp_cp)
        held = [p for group in groups for p in group.parameters]
        assert len(held) == len(set(held)) == len(model.parameters())
        assert all(group.comm is mesh.dp_cp for group in groups)
        DistributedDataParallel(model, mesh.dp_cp, groups=groups)
        return model.split_over

    assert run_local(ranks, rank) == [((EP, (r,)),) for r in range(ranks)]


def test_a_serial_model_needs_no_experts_for_one_rank_of_ep():
    model = mp.GPT(CONFIG)
    expert_parallel(model, serial(), serial())
    tensor_parallel(mp.GPT(CONFIG), serial())
    assert model.split_over == ((EP, (0,)),)
