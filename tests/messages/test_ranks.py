"""Claims about models, meshes and messages that ranks cannot share: every rank raises an error with the equation."""

import numpy as np
import pytest
from refusals import refused, refused_on_every_rank, run_script, shown
from training import MLP, text

import minipar as mp
from minipar.comm import DeviceMesh, run_local
from minipar.errors import CommunicationError, UsageError
from minipar.nn import SGD, AdamW, Linear, Module
from minipar.parallel.pipeline.actions import Schedule
from minipar.parallel.pipeline.schedules import SCHEDULES
from minipar.parallel.wrap import shard

ROPE = (11, 16, 12, 2, 4, 2, 8)  # vocabulary, hidden, MLP, layers, heads, heads of keys, positions


def gpt(n_head=4, **options):
    config = mp.GPTConfig(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=n_head)
    return mp.GPT(config, **options)


def mixtral(experts=4):
    return mp.Mixtral(mp.MixtralConfig(*ROPE, num_local_experts=experts, num_experts_per_tok=2))


def llama():
    return mp.Llama(mp.LlamaConfig(16, 16, 16, 1, 4, 2))


class Stage(Module):
    """A stage of two weights, whose names begin with `name`."""

    def __init__(self, name="", tp=None):
        if tp is None:
            self.up, self.down = Linear(4, 6, name=f"{name}up"), Linear(6, 4, name=f"{name}down")
        else:
            self.up = mp.ColumnParallelLinear(4, 6, tp, name=f"{name}up")
            self.down = mp.RowParallelLinear(6, 4, tp, name=f"{name}down")

    def forward(self, x):
        return self.down(mp.gelu(self.up(x)))

    def loss_sum(self, x, y):
        return ((self(x) - y) ** 2.0).sum()


def pipeline(mesh, names="ab", microbatches=2):
    """Make a pipeline of a stage for each letter."""
    stages = [lambda mesh, name=name: Stage(name, mesh.tp) for name in names]
    return mp.PipelineModule(stages, mesh, num_microbatches=microbatches)


DRAW = np.random.Generator(np.random.Philox(31)).standard_normal
X, Y = DRAW((8, 4)), DRAW((8, 4))
NAMES = {"DeviceMesh": DeviceMesh, "gpt": gpt, "mixtral": mixtral, "llama": llama, "MLP": MLP, "Stage": Stage}
NAMES |= {"pipeline": pipeline, "shard": shard, "Linear": Linear}
NAMES |= {"AdamW": AdamW, "SGD": SGD, "ZeroOptimizer": mp.ZeroOptimizer, "X": X, "Y": Y}
NAMES["tokens"], NAMES["targets"] = text(range(3), vocab=11)


def check(row, **names):
    """Check one row of a table: the number of ranks, what they run, the error, and what it shows."""
    size, script, error, *values = row
    refused_on_every_rank(size, error, *values, by=lambda world: run_script(script, world=world, **names, **NAMES))


# ---- a wrapper of a model that other axes share ----------------------------------------------------------------------

ALL, SHARDED = [0, 1, 2, 3], [1, 2, 3]
ON_CP = "mesh = DeviceMesh(world, dp=2, cp=2); model = gpt(); mp.context_parallel(model, mesh.cp);"
ON_TP = "mesh = DeviceMesh(world, dp=2, tp=2); model = gpt(); tensor = mp.tensor_parallel(model, mesh.tp);"
ON_EP = """mesh = DeviceMesh(world, dp=2, cp=2, ep=2); model = mixtral()
experts = mp.expert_parallel(model, mesh.ep, mesh.edp); groups = experts.groups
"""
BOTH = "ddp = shard(model, mesh.dp, stage, before_reduce=tensor.sum_partial);"
WRAPPERS = {  # the script, at these stages, the error, and what it shows
    "tokens that cp shares": (f"{ON_CP} shard(model, mesh.dp, stage)", ALL, UsageError, "mesh.dp_cp"),
    "partial gradients": (
        f"{ON_TP.replace('mesh.tp)', 'mesh.tp, sequence=True)')} shard(model, mesh.dp, stage)", ALL, UsageError,
        "tensor.sum_partial"),
    "experts without groups": (f"{ON_EP}shard(model, mesh.dp_cp, stage)", ALL, UsageError, "experts.groups(mesh.dp_cp"),
    "experts over edp": (
        f"{ON_EP}shard(model, mesh.edp, stage, groups=groups(mesh.edp))", ALL, UsageError, "mesh.dp_cp"),
    "experts over dp": (
        f"{ON_EP}shard(model, mesh.dp, stage, groups=groups(mesh.dp))", ALL, UsageError, "mesh.dp_cp"),
    "replicas of experts": (
        f"{ON_EP}shard(model, mesh.dp_cp, stage, groups=groups(mp.HybridComm(mesh.dp_cp, 2)))", SHARDED, UsageError,
        "1"),
    "a norm over dp alone": (
        f"{ON_TP} {BOTH} mp.clip_grad_norm(ddp.parameters(), 1.0, mesh.dp)", ALL, UsageError, "mesh.tp"),
    "a wrapped model split": (
        "model = gpt(); shard(model, world, stage); mp.tensor_parallel(model, world)", ALL, UsageError,
        "tensor_parallel"),
    "replicas of shards": ("shard(MLP(), mp.HybridComm(world, 3), stage)", SHARDED, UsageError, "replicas", "4/3"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_that_would_sum_wrongly_is_refused(name):
    script, stages, error, *values = WRAPPERS[name]
    for stage in stages:
        check((4, script, error, *values), stage=stage)


# ---- splitting a model -----------------------------------------------------------------------------------------------

EP = "mesh = DeviceMesh(world, ep=2);"
CUT = "cut = tokens[world.rank : world.rank + 2];"
STEP = "model.loss(tokens, targets).backward(); optimizer.step();"
RANKS = ("1", "0")
SPLITS = {  # the number of ranks, the script, the error, and what it shows
    "a column layer": (2, "mp.ColumnParallelLinear(4, 9, world, name='up')", UsageError, "up", "9/2"),
    "its groups": (2, "mp.ColumnParallelLinear(4, 9, world, name='up', groups=3)", UsageError, "up", "9/6"),
    "a row layer": (2, "mp.RowParallelLinear(9, 4, world, name='down')", UsageError, "down", "9/2"),
    "heads and tp": (2, "mp.tensor_parallel(gpt(n_head=3), world)", UsageError, "3/2"),
    "fewer heads than tp": (8, "mp.tensor_parallel(llama(), world)", UsageError, "2/8"),
    "experts and ep": (2, f"{EP} mp.expert_parallel(mixtral(experts=3), mesh.ep, mesh.edp)", UsageError, "3/2"),
    "no experts": (2, f"{EP} mp.expert_parallel(gpt(), mesh.ep, mesh.edp)", UsageError, "GPT", "mp.Mixtral"),
    "experts that nobody sums": (
        2, f"{EP} model = mixtral(); mp.expert_parallel(model, mesh.ep, mesh.edp); AdamW(model.parameters()).step()",
        ValueError, "experts.groups(mesh.dp_cp"),
    "tp twice": (
        2, "model = gpt(); [mp.tensor_parallel(model, world) for _ in '12']", UsageError, "tensor_parallel"),
    "cp twice": (
        2, "model = gpt(); [mp.context_parallel(model, world) for _ in '12']", UsageError, "context_parallel"),
    "ep twice": (
        2, f"{EP} model = mixtral(); [mp.expert_parallel(model, mesh.ep, mesh.edp) for _ in '12']", UsageError,
        "expert_parallel"),
    "tp and cp of one axis": (
        2, "model = gpt(); mp.tensor_parallel(model, world); mp.context_parallel(model, world)", UsageError, "mesh.tp",
        "mesh.cp"),
    "cp and tp of one axis": (
        2, "model = gpt(); mp.context_parallel(model, world); mp.tensor_parallel(model, world)", UsageError, "mesh.tp",
        "mesh.cp"),
    "tp and ep of one axis": (
        2, f"{EP} model = mixtral(); mp.tensor_parallel(model, world); mp.expert_parallel(model, mesh.ep, mesh.edp)",
        UsageError, "expert_parallel", "tensor_parallel"),
    "dropout under cp": (2, "mp.context_parallel(gpt(dropout=0.1), world)", UsageError, "0.1"),
    "dropout under tp": (2, "mp.tensor_parallel(gpt(dropout=0.1), world)", UsageError, "0.1"),
    "other seeds": (2, "mp.tensor_parallel(gpt(seed=world.rank), world)", UsageError, "wte.weight", *RANKS),
    "other states": (
        2, "model = gpt(); model.ln_f.bias.data[-1] += 1e-9 * world.rank; mp.tensor_parallel(model, world)",
        UsageError, "ln_f.bias", *RANKS),
    "other tokens": (2, f"{CUT} model = gpt(); mp.tensor_parallel(model, world); model(cut)", UsageError, *RANKS),
    "fewer tokens": (
        2, "model = gpt(); mp.tensor_parallel(model, world); model(tokens[world.rank :])", UsageError, *RANKS),
    "other tokens of one's own layers": (
        2, f"{CUT} mp.VocabParallelEmbedding(11, 4, world, name='e')(cut)", UsageError, *RANKS),
    "an optimizer made before": (
        2, f"model = gpt(); optimizer = AdamW(model.parameters()); mp.tensor_parallel(model, world); {STEP}",
        ValueError),
    "a forgotten zero_grad": (
        2, f"model = gpt(); mp.tensor_parallel(model, world); optimizer = AdamW(model.parameters()); {STEP} {STEP}",
        RuntimeError, "zero_grad()"),
    "gradients of a rank's tokens": (
        2, "model = gpt(); context = mp.context_parallel(model, world); optimizer = AdamW(model.parameters()); "
        "model.loss(context.part(tokens), context.part(targets)).backward(); optimizer.step()",
        UsageError, "wte.weight", "1"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_a_model_that_ranks_cannot_share_is_refused(name):
    check(SPLITS[name])


def test_a_strategy_that_was_refused_has_split_nothing():
    """The remedy may follow in the same program, on the same model."""

    def rank(world):
        model = gpt()
        refused(UsageError, "rings", by=lambda: mp.context_parallel(model, world, method="rings"))
        mp.context_parallel(model, world, method="ulysses")
        odd = gpt(n_head=3)
        for _ in range(2):
            refused(UsageError, "3/2", by=lambda: mp.tensor_parallel(odd, world))

    run_local(2, rank)


# ---- pipelines -------------------------------------------------------------------------------------------------------

PP = "mesh = DeviceMesh(world, pp=2);"
ON_8 = "mesh = DeviceMesh(world, dp=2, tp=2, pp=2); model = pipeline(mesh);"
PIPELINES = {
    "stages and ranks": (2, f"{PP} pipeline(mesh, 'abc')", UsageError, "1f1b", "3/2"),
    "one name on two ranks": (2, f"{PP} pipeline(mesh, 'aa')", UsageError, "aup.weight"),
    "one name on one rank": (1, "pipeline(DeviceMesh(world), 'aa')", UsageError, "aup.weight"),
    "backward again": (2, f"{PP} pipeline(mesh)(X, Y).backward()", ValueError, "PipelineModule"),
    "a pipeline split": (2, f"{PP} mp.tensor_parallel(pipeline(mesh), mesh.dp)", UsageError, "tensor_parallel"),
    "x cut by tp": (8, f"{ON_8} model(X[mesh.tp.rank :: 2], Y[:4])", ValueError, "x", "mesh.dp"),
    "y cut by tp": (8, f"{ON_8} model(X[:4], Y[mesh.tp.rank :: 2])", ValueError, "y", "mesh.dp"),
    "x cut by pp": (8, f"{ON_8} model(X[mesh.pp.rank :: 2], Y[:4])", ValueError, "x", "mesh.dp"),
    "y cut by the world": (8, f"{ON_8} model(X[:2], Y[world.rank // 2 * 2 :][:2])", ValueError, "y", "mesh.dp"),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_that_would_train_wrongly_is_refused(name):
    check(PIPELINES[name])


def test_a_schedule_that_lacks_something_is_refused(monkeypatch):
    whole = SCHEDULES["1f1b"]
    without_last = [row[:-1] for row in whole(2, 2).ranks]
    for mine, words in (Schedule.of("mine", without_last), ["0B1"]), (whole(2, 1), ["1", "2"]):
        monkeypatch.setitem(SCHEDULES, "mine", lambda p, m, mine=mine: mine)
        check((2, "mp.PipelineModule([Stage, Stage], DeviceMesh(world, pp=2), 2, 'mine')", UsageError, *words))


# ---- ZeroOptimizer ---------------------------------------------------------------------------------------------------

ON_DP = """mesh = DeviceMesh(world); model = pipeline(mesh, 'a', 1)
optimizer = ZeroOptimizer(model.parameters(), SGD, mesh.dp, lr=0.1)
x, y = X[mesh.dp.rank :: mesh.dp.size], Y[mesh.dp.rank :: mesh.dp.size]
"""
MLPS = "model = MLP(); optimizer = ZeroOptimizer(model.parameters(), SGD, world);"
OVER = "model = pipeline(mesh, 'ab'[: mesh.pp.size], 1); ZeroOptimizer(model.parameters(), AdamW, {})"
ZERO = {
    "a forgotten zero_grad": (2, f"{ON_DP}model(x, y); optimizer.step(); model(x, y)", RuntimeError,
        "zero_grad()"),
    "two steps": (2, f"{ON_DP}model(x, y); optimizer.step(); optimizer.step()", RuntimeError, "backward"),
    "no gradients": (2, f"{ON_DP}optimizer.step()", RuntimeError, "step()"),
    "no gradients any more": (
        2, f"{ON_DP}model(x, y); optimizer.step(); optimizer.zero_grad(); optimizer.step()", RuntimeError, "step()"),
    "the ranks' means": (
        3, f"{MLPS} model.loss(np.ones((2, 3)), np.ones((2, 1))).backward(); optimizer.step()", RuntimeError, "3",
        "model.loss_sum"),
    "an axis of tp": (
        4, f"mesh = DeviceMesh(world, dp=2, tp=2); {OVER.format('mesh.tp')}", ValueError, "tp", "mesh.dp"),
    "an axis of pp": (
        4, f"mesh = DeviceMesh(world, dp=2, pp=2); {OVER.format('mesh.pp')}", ValueError, "pp", "mesh.dp"),
    "an axis of one rank": (2, f"mesh = DeviceMesh(world); {OVER.format('mesh.tp')}", ValueError, "tp", "mesh.dp"),
    "the world of a mesh": (
        4, f"mesh = DeviceMesh(world, dp=2, tp=2); {OVER.format('world')}", ValueError, "[0, 1, 2, 3]", "mesh.dp"),
    "ranks of other parameters": (
        2, "ZeroOptimizer(mp.ColumnParallelLinear(4, 6, world, name='up').parameters(), AdamW, world)", ValueError,
        "world", *RANKS),
    "one rank of another seed": (
        3, "ZeroOptimizer(Linear(4, 4, name='x', seed=world.rank // 2).parameters(), SGD, world)", ValueError,
        "2", "0"),
    "a wrapper's model": (
        2, "model = MLP(); shard(model, world, 0); ZeroOptimizer(model.parameters(), AdamW, world)", ValueError,
        "wrapper"),
    "a second one": (2, f"{MLPS} ZeroOptimizer(model.parameters(), AdamW, world)", ValueError, "step()"),
    "another optimizer, too": (2, f"{MLPS} AdamW(model.parameters()).step()", ValueError, "step()"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZERO)
def test_a_zero_optimizer_that_would_train_wrongly_is_refused(name):
    check(ZERO[name])


# ---- messages and meshes ---------------------------------------------------------------------------------------------

MESSAGES = {
    "counts of more elements": (
        2,
        "world.all_to_all(np.ones(3), counts=([2, 2], [2, 2]))",
        CommunicationError,
        "3",
        "4",
    ),
    "a mesh and its ranks": (2, "DeviceMesh(world, dp=3)", UsageError, "3", "2"),
    "a mesh of three axes": (8, "DeviceMesh(world, dp=2, tp=2, pp=3)", UsageError, "12", "8"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_ranks_cannot_send_is_refused(name):
    check(MESSAGES[name])


WRAPPED = "ddp = shard(MLP(), world, 1); ddp.loss(np.ones((2, 3)), np.ones((2, 1))).backward();"
APART = {  # what rank 1 calls, what rank 0 calls, and what the first error shows of the two
    "operations": ("world.barrier()", "world.all_reduce(np.ones(100))", "barrier", "all_reduce"),
    "dtypes": ("world.all_reduce(np.ones(8, int))", "world.all_reduce(np.ones(8))", "int64", "float64"),
    "counts": ("world.all_reduce(np.ones(8))", "world.all_reduce(np.ones(9))", "all_reduce"),
    "an evaluation of one rank": ("world.rank", "shard(gpt(), world, 3).loss(tokens, targets)", "1"),
    "a state of one rank": (WRAPPED, f"{WRAPPED} mp.gather_state(ddp.model, ddp.parameters(), world)", "1"),
    "a norm of one rank": (WRAPPED, f"{WRAPPED} mp.clip_grad_norm(ddp.parameters(), 1.0, world)", "1"),
}


@pytest.mark.parametrize("name", APART)
def test_ranks_that_call_something_else_do_not_wait(name):
    one, other, *values = APART[name]

    def rank(world):
        run_script(one if world.rank else other, world=world, **NAMES)

    with pytest.raises((CommunicationError, UsageError)) as caught:
        run_local(2, rank)
    assert [value for value in values if not shown(str(caught.value), value)] == []
