"""Claims about expert parallelism: one device's bits, its bytes, every other axis, checkpoints and memory."""

from functools import partial

import numpy as np
import pytest
from combinations import TEXT, VOCAB, check_config
from routing import ep_bytes
from tensor_cases import bound
from training import Proxy, bits, clip, config_for, on_each_rank, ranks_of, reports, trainer_for, verdicts, whole_state

from chapters.support.training import step_layout
from chapters.support.whole_runs import relative_difference
from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, run_local
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.more.experts.expert_parallel import expert_parallel
from minipar.more.experts.mixtral import Mixtral, MixtralConfig, MoE
from minipar.nn import SGD
from minipar.parallel.predicted_memory import FLOAT64, model_state
from minipar.parallel.wrap import shard
from minipar.train import checkpoint
from minipar.train.trainer import Trainer

E, H, F = 12, 8, 10  # a layer: experts, hidden, inner size


# ---- a layer: one device's bits, and its bytes -----------------------------------------------------------------------


def layer():
    config = MixtralConfig(VOCAB, H, F, 1, 2, 1, 8, num_local_experts=E, num_experts_per_tok=2)
    return Mixtral(config, dtype="float64", seed=3).model.layers[0].block_sparse_moe


def random(rank):
    return np.random.Generator(np.random.Philox(70 + rank))


# Which experts each of n tokens of a rank is sent to: (n, k).
ROUTINGS = {
    "at random": lambda rank, n: np.argsort(random(rank).random((n, E)), axis=1)[:, :2],
    "experts without tokens": lambda rank, n: np.argsort(random(rank).random((n, 3)), axis=1)[:, :2] + 5,
    "all tokens on one expert": lambda rank, n: np.full((n, 1), 4),
    "k = E": lambda rank, n: np.argsort(random(rank).random((n, E)), axis=1),
}


def shares(rank, routing):
    """A rank's tokens, their experts and weights, and the gradient of its result. Ranks have 7, 8, 9, 7, ... tokens."""
    n = 7 + rank % 3
    indices = ROUTINGS[routing](rank, n)
    x, weights, dy = (random(10 + rank).standard_normal(shape) for shape in ((n, H), indices.shape, (n, H)))
    return x, indices, weights, dy


def passed(moe, x, indices, weights, dy):
    """The result, the gradients of tokens and weights, and of every expert that `moe` holds, in its order."""
    x, weights = Tensor(x, requires_grad=True), Tensor(weights, requires_grad=True)
    moe.top_k = indices.shape[1]
    y = moe.compute(x, indices, weights)
    y.backward(dy)
    return y.data, x.grad, weights.grad, [p.grad for expert in moe.experts for p in expert.parameters()]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_bits_are_those_of_one_device_in_one_pass(ranks, routing):
    """The one device takes the ranks' tokens one rank after another."""
    whole = passed(layer(), *map(np.concatenate, zip(*(shares(r, routing) for r in range(ranks)), strict=True)))

    def program(comm):
        moe = layer()
        expert_parallel(moe, comm, comm)
        return passed(moe, *shares(comm.rank, routing))

    parts = run_local(ranks, program)
    for i in range(3):
        assert np.concatenate([part[i] for part in parts]).tobytes() == whole[i].tobytes()
    gradients = [gradient for part in parts for gradient in part[3]]
    assert len(gradients) == len(whole[3]) == 3 * E
    assert all(a.tobytes() == b.tobytes() for a, b in zip(gradients, whole[3], strict=True))


class Counted(Proxy):
    """A communicator that notes the bytes that each all-to-all sends."""

    def all_to_all(self, x, **options):
        before = self.comm.traffic.bytes("all_to_all", "ep")
        result = self.comm.all_to_all(x, **options)
        self.sent.append(self.comm.traffic.bytes("all_to_all", "ep") - before)
        return result


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_all_to_all_sends_the_rows_that_leave(ranks, routing):
    rows = np.zeros((ranks, ranks), int)  # n_rj
    for r in range(ranks):
        np.add.at(rows[r], shares(r, routing)[1].reshape(-1) * ranks // E, 1)

    def program(world):
        moe, comm = layer(), Counted(DeviceMesh(world, ep=ranks).ep)
        comm.sent = []
        expert_parallel(moe, comm, world)
        passed(moe, *shares(comm.rank, routing))
        return comm.sent

    for r, sent in enumerate(run_local(ranks, program)):
        there, back = (8 * H * (sum(each) - each[r]) for each in (rows[r], rows[:, r]))
        assert sent == [8 * E * (ranks - 1) // ranks, there, back, there, back]  # the last two are backward's


# ---- the mesh --------------------------------------------------------------------------------------------------------


def groups_of(world, **sizes):
    mesh = DeviceMesh(world, **sizes)
    return [comm.ranks for comm in (mesh.ep, mesh.edp)]


def test_ranks_of_ep_are_neighbours_and_replicas_lie_apart():
    for rank, (ep, edp) in enumerate(run_local(12, groups_of, dp=2, cp=3, tp=2, ep=3)):
        place = rank // 2  # in dp x cp
        assert ep == [2 * r + rank % 2 for r in range(place - place % 3, place - place % 3 + 3)]
        assert edp == [2 * r + rank % 2 for r in (place % 3, place % 3 + 3)]


# ---- training: with every other axis ---------------------------------------------------------------------------------

SHAPE = f"--model mixtral --layers 3 --hidden 16 --heads 4 --kv-heads 2 --ffn 12 --seq-len 8 --vocab-size {VOCAB}"
RUN = "--experts 12 --top-k 2 --dtype float64 --eps 1e-4 --steps 2 --reduction ordered --weight-decay 0.3"
LAYOUTS = [
    "--dp 3 --ep 3 --global-batch 6 --clip-grad 0.5",
    "--dp 4 --ep 2 --global-batch 4 --zero-stage 1 --clip-grad 0.5 --reduction ring",
    "--dp 4 --ep 2 --global-batch 8 --zero-stage 3 --microbatches 2 --clip-grad 0.5 --sync-every-microbatch",
    "--dp 2 --tp 2 --ep 2 --global-batch 4 --clip-grad 0.5",
    "--dp 2 --pp 2 --ep 2 --global-batch 8 --microbatches 4 --schedule zb-h1 --zero-stage 2 --recompute full",
    "--dp 2 --pp 3 --ep 2 --global-batch 8 --microbatches 4 --zero-stage 3 --recompute full --clip-grad 0.5",
    "--dp 2 --cp 2 --ep 4 --global-batch 4 --context-parallel ulysses --recompute full",
    "--dp 2 --cp 2 --ep 2 --tp 2 --global-batch 4 --zero-stage 1 --sequence-parallel --clip-grad 0.5",
    "--dp 3 --ep 3 --experts 30 --top-k 1 --global-batch 6 --microbatches 2",  # most experts have no tokens
    "--dp 2 --ep 2 --top-k 12 --global-batch 4 --zero-stage 2",  # k = E
    "--dp 2 --tp 2 --sequence-parallel --ep 2 --global-batch 4 --aux-loss 0.5 --recompute full",
]


def config_of(layout):
    return config_for(f"{SHAPE} {RUN} {layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_one_device_and_sends_what_is_predicted(layout):
    config = config_of(layout)
    assert run_local(ranks_of(config), check_config, config) == [[]] * ranks_of(config)


def state_and_reports(trainer, results):
    return bits(trainer.state_dict()), reports(results)


@pytest.mark.parametrize("mesh", ["--dp 4 --ep 2", "--dp 3 --cp 2 --ep 6", "--dp 2 --tp 2 --ep 2"])
def test_every_zero_stage_has_the_bits_of_plain_dp(mesh):
    layout = f"{mesh} --global-batch 12 --clip-grad 0.3 --reduction ring --zero-stage"
    runs = [on_each_rank(config_of(f"{layout} {stage}"), TEXT, state_and_reports)[0] for stage in range(4)]
    assert runs[1:] == [runs[0]] * 3


class Routed(Trainer):
    """A trainer that notes how many rows each layer sends to each expert, first in forward."""

    def __init__(self, *args):
        super().__init__(*args)
        self.counts = []
        for _, module in self.model.named_modules():
            if isinstance(module, MoE):
                module.run_experts = partial(self.noted, module.run_experts)

    def noted(self, run, xs, counts):
        self.counts.append(counts)
        return run(xs, counts)


@pytest.mark.parametrize(
    "layout",
    [
        "--dp 3 --ep 3 --global-batch 6 --microbatches 2 --clip-grad 0.5",
        "--dp 4 --ep 2 --global-batch 4 --recompute full --zero-stage 2",
        "--dp 2 --tp 2 --ep 2 --global-batch 4 --sequence-parallel --clip-grad 0.5",
    ],
)
def test_a_steps_bytes_over_ep_are_those_of_its_routing(layout):
    config = config_of(layout)

    def program(comm):
        trainer = trainer_for(config, TEXT, comm, Routed)
        trainer.step(0)
        sent, ep = comm.traffic.bytes(axis="ep"), trainer.mesh.ep
        counts = trainer.counts[:3] if config.recompute == "full" else trainer.counts
        own = np.array([each.reshape(ep.size, -1).sum(axis=1) for each in counts])  # (layers, ranks of ep)
        everyone = ep.all_gather(own, algorithm="pairwise").reshape(ep.size, *own.shape)
        return sent, ep_bytes(step_layout(config), ep.rank, everyone.swapaxes(0, 1).tolist())

    for sent, expected in run_local(ranks_of(config), program):
        assert sent == expected > 0


def test_uniform_routing_sends_the_published_bytes():
    """4 k N h (P-1)/P elements per layer: dispatch and combine, forward and backward."""
    layout = step_layout(config_of("--dp 2 --ep 2 --global-batch 2 --zero-stage 1"))
    n, k, h, counts = layout.tokens, 2, 16, 12 // 2 * 8
    assert ep_bytes(layout, 1, [[[n * k // 2] * 2] * 2]) == 8 * 4 * k * n * h // 2 + counts


# ---- what a rank holds, and checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_holds_all_but_experts_and_its_share_of_them(stage):
    config = config_of(f"--dp 4 --ep 2 --global-batch 4 --zero-stage {stage}")

    def program(comm):
        ledger = MemoryLedger()
        with ledger.recording():
            trainer = trainer_for(config, TEXT, comm)
            trainer.step(0)
        held = ledger.held
        return trainer, {kind: held[kind] for kind in ("parameters", "gradients", "optimizer")}

    layout = step_layout(config)
    for rank, (trainer, held) in enumerate(run_local(4, program)):
        placed = layout.placements(dp=rank)
        psi, own = sum(p.dp.size for p in placed), sum(len(p.dp.own) for p in placed)
        expected = model_state(psi, own, stage, FLOAT64)
        assert list(held.values()) == [expected.parameters, expected.gradients, expected.optimizer]
        experts = 3 * 3 * 12 * 16 * 12  # three matrices of each expert
        assert psi == sum(trainer.sizes.values()) - experts + experts // 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--dp 4 --ep 2 --zero-stage 3", "--dp 3 --ep 3"),
        ("--dp 2 --pp 3 --ep 2", "--dp 2 --tp 2 --sequence-parallel --ep 2 --zero-stage 3"),
        ("--tp 2 --sequence-parallel", ""),
    ],
)
def test_a_checkpoint_moves_between_meshes_of_experts(tmp_path, before, after):
    common = "--steps 4 --clip-grad 0.5 --global-batch 12"
    whole = on_each_rank(config_of(f"{common} {before}"), TEXT, lambda trainer, results: trainer.state_dict())[0]
    half = config_of(f"{common} {before} --steps 2")
    on_each_rank(half, TEXT, lambda trainer, results: checkpoint.save(trainer, str(tmp_path), 2))
    rest = config_of(f"{common} {after} --resume {tmp_path}")
    resumed = on_each_rank(rest, TEXT, lambda trainer, results: trainer.state_dict())[0]
    assert list(resumed) == list(whole)
    for name, array in whole.items():
        assert relative_difference(resumed[name], array) <= bound(4)


# ---- scripts, and what is refused ------------------------------------------------------------------------------------

REFUSED = {
    "--dp 2 --cp 2 --ep 3 --global-batch 2": "4/3",
    "--dp 8 --ep 8 --global-batch 8": "12/8",
    "--dp 4 --ep 2 --zero-stage 1 --zero-replicas 2 --global-batch 4": "replicas",
}


@pytest.mark.parametrize("layout", REFUSED)
def test_sizes_that_do_not_fit_are_refused_on_each_rank(layout):
    def program(comm):
        with pytest.raises(UsageError) as caught:
            trainer_for(config_of(layout), TEXT, comm)
        return REFUSED[layout] in str(caught.value)

    assert set(run_local(int(layout.split()[1]) * (2 if "--cp 2" in layout else 1), program)) == {True}


def model_on(mesh):
    """Return a model whose experts the ranks of mesh.ep share, and the groups for data parallelism over mesh.dp_cp."""
    config = MixtralConfig(VOCAB, 16, 12, 2, 4, 2, 8, num_local_experts=6, num_experts_per_tok=2)
    model = Mixtral(config, dtype="float64")
    return model, expert_parallel(model, mesh.ep, mesh.edp)


@pytest.mark.parametrize("stage", range(4))
def test_a_script_of_ones_own_clips_and_saves_as_one_device(stage):
    tokens = TEXT.ids[: 4 * 9].astype(np.int64).reshape(4, 9)

    def program(world):
        mesh = DeviceMesh(world, ep=min(2, world.size))
        model, experts = model_on(mesh)
        wrapper = shard(model, mesh.dp_cp, stage, groups=experts.groups(mesh.dp_cp))
        rows = np.array_split(tokens, world.size)[world.rank]
        optimizer = SGD(wrapper.parameters(), lr=0.1)
        wrapper.loss(rows[:, :-1], rows[:, 1:]).backward()
        norm = clip(wrapper, 0.5)
        optimizer.step()
        return norm, whole_state(wrapper)

    (expected, single), (norm, state) = run_local(1, program)[0], run_local(4, program)[0]
    assert norm == pytest.approx(expected, rel=1e-12) and state.keys() == single.keys()
    assert all(relative_difference(state[name], single[name]) <= 1e-12 for name in single)


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_hold_the_same_experts_must_start_alike(stage):
    def program(world, difference):
        mesh = DeviceMesh(world, ep=2)
        model, experts = model_on(mesh)
        if world.rank == 2:  # which holds what rank 0 holds
            model.model.layers[1].block_sparse_moe.experts[0].w2.weight.data[0, 0] += difference
        tokens = TEXT.ids[:9].astype(np.int64)[None]
        wrapper = shard(model, mesh.dp_cp, stage, groups=experts.groups(mesh.dp_cp))
        return wrapper.loss(tokens[:, :-1], tokens[:, 1:]).item()

    assert len(set(run_local(4, program, 0))) == 1
    with pytest.raises(ValueError):
        run_local(4, program, 1)


class ExpertGradientsTimesP(Trainer):
    """PyTorch issue 160285: summed over the ranks of dp, though the tokens of ep are in them already."""

    def clip_grad_norm(self, max_norm):
        for p in self.ddp.parameters():
            if p.placement.ep is not None:
                p.grad *= self.mesh.ep.size
        return super().clip_grad_norm(max_norm)


@pytest.mark.parametrize("kind", [Trainer, ExpertGradientsTimesP])
def test_verify_compares_with_one_device(kind):
    config = config_of("--dp 2 --ep 2 --global-batch 4")
    assert {verdict.passed for verdict in verdicts(config, TEXT, kind)} == {kind is Trainer}
