"""Claims about expert parallelism: one device's bits, its bytes, every other axis, checkpoints, memory, mistakes."""

import re
from functools import cache, partial

import numpy as np
import pytest
from combinations import TEXT, VOCAB, differences, run_steps
from routing import ep_bytes
from training import Proxy, bits, config_for, on_each_rank, ranks_of, trainer_for, verdicts

from chapters.support.whole_runs import bound, relative_difference
from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, run_local, serial
from minipar.compare.differences import compare
from minipar.errors import UsageError
from minipar.memory import MemoryLedger
from minipar.nn import SGD, AdamW, Mixtral, MixtralConfig, MoE
from minipar.parallel.expert import expert_parallel
from minipar.parallel.grad_norm import clip_grad_norm
from minipar.parallel.memory import FLOAT64, model_state
from minipar.parallel.parallelize import shard
from minipar.parallel.traffic import predicted_traffic
from minipar.parallel.zero_optimizer import ZeroOptimizer
from minipar.train.from_config import step_layout
from minipar.train.one_device import OneDevice
from minipar.train.recording import Recorder
from minipar.train.trainer import Trainer

pytestmark = pytest.mark.sampled(3)

E, H, F = 12, 8, 10  # a layer: experts, hidden, inner size
RANKS = [1, 2, 3, 4, 6]


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", RANKS)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("ranks", RANKS[1:])
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


# ---- training: with every other axis ---------------------------------------------------------------------------------

SHAPE = f"--model mixtral --layers 3 --hidden 16 --heads 4 --kv-heads 2 --ffn 12 --seq-len 8 --vocab-size {VOCAB}"
RUN = "--experts 6 --top-k 2 --dtype float64 --eps 1e-5 --steps 2 --reduction ordered --weight-decay 0.3"
LAYOUTS = [
    "--dp 2 --ep 2 --global-batch 4",
    "--dp 3 --ep 3 --global-batch 6 --clip-grad 0.5",
    "--dp 4 --ep 2 --global-batch 4 --zero-stage 1 --clip-grad 0.5 --reduction ring",
    "--dp 4 --ep 2 --global-batch 8 --zero-stage 2 --microbatches 2",
    "--dp 4 --ep 2 --global-batch 8 --zero-stage 3 --microbatches 2 --clip-grad 0.5 --sync-every-microbatch",
    "--dp 6 --ep 3 --global-batch 6 --zero-stage 3 --clip-grad 0.5",
    "--dp 2 --tp 2 --ep 2 --global-batch 4 --clip-grad 0.5",
    "--dp 2 --tp 2 --ep 2 --global-batch 4 --sequence-parallel --zero-stage 3",
    "--dp 2 --pp 2 --ep 2 --global-batch 8 --microbatches 2 --clip-grad 0.5",
    "--dp 2 --pp 2 --ep 2 --global-batch 8 --microbatches 4 --schedule zb-h1 --zero-stage 2 --recompute full",
    "--dp 2 --pp 3 --ep 2 --global-batch 8 --microbatches 4 --zero-stage 3 --recompute full --clip-grad 0.5",
    "--dp 2 --pp 2 --ep 2 --global-batch 4 --microbatches 2 --schedule interleaved-1f1b --layers 4 --zero-stage 1",
    "--cp 2 --ep 2 --global-batch 4 --zero-stage 3",
    "--dp 2 --cp 2 --ep 4 --experts 8 --global-batch 4 --context-parallel ulysses --recompute full",
    "--dp 2 --cp 2 --ep 2 --tp 2 --global-batch 4 --zero-stage 1 --sequence-parallel --clip-grad 0.5",
    "--dp 3 --ep 3 --experts 30 --top-k 1 --global-batch 6 --microbatches 2",  # most experts have no tokens
    "--dp 2 --ep 2 --top-k 6 --global-batch 4 --zero-stage 2",  # k = E
]


def config_of(layout):
    return config_for(f"{SHAPE} {RUN} {layout}")


@cache
def on_one_device(config):
    return run_steps(OneDevice(config, TEXT))[:2]


def trained(layout, kind=Trainer):
    """Each rank's (parameters after each step, what each step reported, bytes of each step by axis, trainer)."""
    config = config_of(layout)

    def program(comm):
        trainer = trainer_for(config, TEXT, comm, kind)
        return *run_steps(trainer), trainer

    return config, run_local(ranks_of(config), program)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_one_device_and_sends_what_is_predicted(layout):
    config, ranks = trained(layout)
    assert differences(*ranks[0][:2], on_one_device(config), exact=False) == []
    for rank, (_, reported, sent, _) in enumerate(ranks):
        assert reported == ranks[0][1]
        assert sent == [predicted_traffic(step_layout(config), rank)] * len(sent)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["--dp 4 --ep 2", "--dp 6 --ep 3", "--dp 6 --ep 2", "--dp 3 --cp 2 --ep 6"])
def test_every_zero_stage_has_the_bits_of_plain_dp(mesh):
    layout = f"{mesh} --global-batch 12 --clip-grad 0.3 --reduction ring --zero-stage"
    runs = [trained(f"{layout} {stage}")[1][0] for stage in range(4)]
    for states, reported, *_ in runs[1:]:
        assert reported == runs[0][1]
        assert [bits(state) for state in states] == [bits(state) for state in runs[0][0]]


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        "--dp 3 --ep 3 --global-batch 6 --microbatches 2 --clip-grad 0.5",
        "--dp 2 --cp 2 --ep 2 --global-batch 4 --zero-stage 3",
        "--dp 2 --tp 2 --pp 3 --ep 2 --global-batch 4 --microbatches 2 --sequence-parallel",
        "--dp 4 --ep 2 --global-batch 4 --recompute full --zero-stage 2",
        "--dp 2 --tp 4 --etp 2 --ep 2 --global-batch 4 --sequence-parallel --clip-grad 0.5",
    ],
)
def test_a_steps_bytes_over_ep_are_those_of_its_routing(layout):
    config = config_of(layout)

    def program(comm):
        trainer = trainer_for(config, TEXT, comm, Routed)
        trainer.step(0)
        sent, ep = comm.traffic.bytes(axis="ep"), trainer.mesh.ep
        counts = trainer.counts[:3] if config.run.recompute == "full" else trainer.counts
        rows = [[int(n) for n in each.reshape(ep.size, -1).sum(axis=1)] for each in counts]
        everyone = [eval(text) for text in ep.all_gather_bytes(repr(rows).encode())]  # by rank, then by layer
        return sent, ep_bytes(step_layout(config), ep.rank, list(zip(*everyone, strict=True)))

    for sent, expected in run_local(ranks_of(config), program):
        assert sent == expected > 0


def test_uniform_routing_sends_the_published_bytes():
    """4 k N h (P-1)/P elements per layer: dispatch and combine, forward and backward."""
    layout = step_layout(config_of("--dp 2 --ep 2 --global-batch 2 --zero-stage 1"))
    n, k, h, counts = layout.tokens, 2, 16, 6 // 2 * 8
    assert ep_bytes(layout, 1, [[[n * k // 2] * 2] * 2]) == 8 * 4 * k * n * h // 2 + counts


# ---- what a rank holds -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", range(4))
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
        placements = layout.placements(dp=rank)
        assert {p.placement for bucket in trainer.ddp.buckets for p in bucket.parameters} == set(placements)
        psi, own = sum(p.dp.size for p in placements), sum(len(p.dp.own) for p in placements)
        expected = model_state(psi, own, stage, FLOAT64)
        assert list(held.values()) == [expected.parameters, expected.gradients, expected.optimizer]
        model = config_of("--dp 1").model
        experts = 3 * model.layers * model.experts * model.hidden * model.ffn
        assert psi == trainer.size - experts + experts // 2


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--dp 2 --ep 2", "--dp 4 --ep 1 --zero-stage 1"),
        ("--dp 4 --ep 2 --zero-stage 3", "--dp 3 --ep 3"),
        ("--dp 2", "--dp 2 --tp 2 --ep 2 --zero-stage 2"),
        ("--dp 2 --tp 2 --ep 2", "--dp 6 --ep 6"),
        ("--dp 2 --pp 3 --ep 2", "--cp 2 --ep 2"),
    ],
)
def test_a_checkpoint_moves_between_sizes_of_ep(tmp_path, before, after):
    common = f"{SHAPE} {RUN} --steps 4 --clip-grad 0.5 --global-batch 12"
    state = on_each_rank(config_for(f"{common} {before}"), TEXT, lambda trainer, results: trainer.state_dict())[0]
    half = config_for(f"{common} {before} --steps 2")
    on_each_rank(half, TEXT, lambda trainer, results: trainer.save(tmp_path, 2))
    rest = config_for(f"{common} {after} --resume {tmp_path}")
    resumed = on_each_rank(rest, TEXT, lambda trainer, results: trainer.state_dict())[0]
    assert list(resumed) == list(state)
    for name, array in state.items():
        assert relative_difference(resumed[name], array) <= bound("float64", 4)


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "--dp 3 --ep 2 --global-batch 3": r"dp*cp*tp/(ep*etp) = 3*1*1/(2*1) is not a whole number: edp*ep*etp are",
    "--dp 2 --cp 2 --ep 3 --global-batch 2": r"dp*cp*tp/(ep*etp) = 2*2*1/(3*1) is not a whole number",
    "--dp 4 --ep 4 --global-batch 4": r"experts/ep = 6/4 is not a whole number: each rank holds whole experts",
    "--dp 4 --ep 2 --zero-stage 1 --zero-replicas 2 --global-batch 4": "shards of experts have no replicas",
    "--dp 2 --ep 0 --global-batch 2": r"--ep 0 is outside [1, inf)",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", REFUSED)
def test_sizes_that_do_not_fit_are_refused(layout):
    with pytest.raises(UsageError, match=re.escape(REFUSED[layout])):
        run_local(ranks_of(config := config_of(layout)), lambda comm: trainer_for(config, TEXT, comm))


def test_other_models_have_no_experts_to_share():
    with pytest.raises(UsageError, match="--ep 2 is for --model mixtral"):
        config_for("--dp 2 --ep 2 --global-batch 2")


def model_on(mesh):
    """Return a model whose experts the ranks of mesh.ep share, and the groups for data parallelism over mesh.dp_cp."""
    config = MixtralConfig(VOCAB, 16, 12, 2, 4, 2, 8, num_local_experts=6, num_experts_per_tok=2)
    model = Mixtral(config, dtype="float64")
    return model, expert_parallel(model, mesh.ep, mesh.edp)


def test_experts_need_a_wrapper_that_sums_their_gradients():
    def program(world):
        mesh = DeviceMesh(world, ep=2)
        model, _ = model_on(mesh)
        AdamW(model.parameters())

    with pytest.raises(ValueError, match=r"nobody sums over their ranks; wrap the model first.*groups="):
        run_local(2, program)
    with pytest.raises(ValueError, match=r"use mp.shard\(model, comm, 1, groups="):
        run_local(2, lambda world: ZeroOptimizer(model_on(DeviceMesh(world, ep=2))[0].parameters(), AdamW, world))


@pytest.mark.sampled(1)
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
        norm = wrapper.clip_grad_norm(0.5)
        optimizer.step()
        return norm, wrapper.state_dict()

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
    with pytest.raises(ValueError, match="the ranks hold different parameters"):
        run_local(4, program, 1)


# ---- mistakes that others shipped ------------------------------------------------------------------------------------


class ExpertGradientsTimesP(Trainer):
    """PyTorch issue 160285: summed over the ranks of dp, though the tokens of ep are in them already."""

    def multiply(self):
        for p in self.ddp.parameters():
            if p.placement.ep is not None:
                p.grad *= self.mesh.ep.size

    def _clip_grad_norm(self, max_norm):
        self.multiply()
        return super()._clip_grad_norm(max_norm)


class NormWithoutExperts(Trainer):
    """Megatron-LM pull request 5916: the norm is that of all else."""

    def _clip_grad_norm(self, max_norm):
        dense = [p for p in self.ddp.parameters() if p.placement.ep is None]
        return clip_grad_norm(dense, max_norm, self.mesh.dp_cp)


class NormOfOwnExperts(Trainer):
    """Each rank adds its own experts to the norm of all else."""

    def _clip_grad_norm(self, max_norm):
        return clip_grad_norm(self.ddp.parameters(), max_norm, serial())


class RouterNotSummed(Trainer):
    """torchtitan issue 2387: each tp rank has a part of the router's gradient."""

    def __init__(self, *args):
        super().__init__(*args)
        summed = self.ddp.before_reduce
        routers = {p for name, p in self.model.named_parameters() if "gate" in name}
        self.ddp.before_reduce = lambda parameters: summed([p for p in parameters if p not in routers])


class IdleExpertsDoNotDecay(Trainer):
    """An expert without tokens keeps no gradient, and AdamW passes over it."""

    def _clip_grad_norm(self, max_norm):
        for p in self.ddp.parameters():
            p.decays = p.ndim >= 2 and bool(p.grad.any())
        return super()._clip_grad_norm(max_norm)


MISTAKES = {
    ExpertGradientsTimesP: ("--dp 2 --ep 2 --global-batch 4", "gradient norm"),
    NormWithoutExperts: ("--dp 2 --ep 2 --global-batch 4", "gradient norm"),
    NormOfOwnExperts: ("--dp 2 --ep 2 --global-batch 4", "gradient norm"),
    RouterNotSummed: ("--dp 2 --tp 2 --ep 2 --global-batch 4", "block_sparse_moe.gate.weight by"),
    IdleExpertsDoNotDecay: ("--dp 2 --ep 2 --experts 40 --top-k 1 --global-batch 2", r"experts.\d+.w\d.weight by"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_that_others_shipped_are_found(mistake):
    layout, found = MISTAKES[mistake]
    config, ranks = trained(layout, mistake)
    wrong = differences(*ranks[0][:2], on_one_device(config), exact=False)
    assert any(re.search(found, line) for line in wrong), wrong
    config, ranks = trained(layout)
    assert differences(*ranks[0][:2], on_one_device(config), exact=False) == []


def test_compare_names_expert_gradients_times_p(tmp_path):
    config = config_of("--dp 2 --ep 2 --global-batch 4")

    class Mistaken(Trainer):
        def _forward_backward(self, step):
            loss = super()._forward_backward(step)
            ExpertGradientsTimesP.multiply(self)
            return loss

    for kind in (Trainer, Mistaken):

        def program(comm, kind=kind):
            trainer = trainer_for(config, TEXT, comm, kind)
            Recorder(trainer, str(tmp_path / kind.__name__))
            trainer.step(0)

        run_local(2, program)
    first = compare(tmp_path / "Trainer", tmp_path / "Mistaken").differences[0]
    assert (first.quantity, first.group, first.ratio) == ("gradient", "the experts", pytest.approx(2))
    assert any("summed over ep" in cause for cause in first.causes)


def test_verify_compares_with_one_device():
    config = config_of("--dp 2 --ep 2 --global-batch 4")
    assert {verdict.passed for verdict in verdicts(config, TEXT)} == {True}
    assert {verdict.passed for verdict in verdicts(config, TEXT, ExpertGradientsTimesP)} == {False}


def test_ranks_are_neighbours_and_replicas_lie_p_apart():
    def program(world):
        mesh = DeviceMesh(world, dp=2, cp=3, tp=2, ep=3)
        return mesh.ep.ranks, mesh.edp.ranks, mesh.ep.axis, mesh.edp.axis

    for rank, (ep, edp, *axes) in enumerate(run_local(12, program)):
        place = rank // 2  # in dp x cp
        assert ep == [2 * r + rank % 2 for r in range(place - place % 3, place - place % 3 + 3)]
        assert edp == [2 * r + rank % 2 for r in (place % 3, place % 3 + 3)]
        assert axes == ["ep", "dp"]
