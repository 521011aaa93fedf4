"""Claims about hybrid sharding: its bits are one device's in nested order; its bytes and memory are the formulas."""

from dataclasses import replace

import numpy as np
import pytest
import training
from summing_orders import in_the_order_of
from training import MLP, bits, reports, small_gpt, trainer_for

from chapters.support.training import step_layout
from minipar.comm import Network, run_local, start_trace, wire_bytes
from minipar.errors import CommunicationError, UsageError
from minipar.memory import KINDS, MemoryLedger
from minipar.more.hybrid import HybridComm
from minipar.more.hybrid_traffic import replica_bytes
from minipar.nn import AdamW, GPTConfig
from minipar.parallel.layout import StepLayout
from minipar.parallel.predicted_memory import MIXED, OF_DTYPE, elements_placed, model_state
from minipar.parallel.predicted_traffic import dp_bytes
from minipar.parallel.wrap import fully_shard
from minipar.train.data import load_tokens

# Buckets of 3,497 = 13*269 elements and 2,197 = 13^3, which no number of ranks divides.
SHAPE = "--layers 1 --hidden 13 --heads 1 --seq-len 11 --dtype float64 --weight-decay 0.1 --steps 3 --clip-grad 0.5"
TOKENS = load_tokens(None, vocab_size=256, seq_len=11)
SHARDED = [1, 2, 3]


def config_for(ranks, flags):
    return training.config_for(f"{SHAPE} --global-batch {6 * ranks} {flags}", ranks)


def train(ranks, flags):
    return training.trained(config_for(ranks, flags), TOKENS)


def one_device(ranks, flags):
    trainer = in_the_order_of(config_for(ranks, flags), TOKENS)
    results = list(trainer.train())
    return bits(trainer.state_dict()), reports(results)


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "replicas", "flags"), [(4, 2, "--microbatches 3"), (6, 3, ""), (8, 2, ""), (3, 3, "")]
)
def test_every_stage_trains_one_devices_bits_in_the_nested_order(ranks, replicas, flags):
    """The order of more than two replicas gives other bits than rank after rank."""
    flags = f"{flags} --reduction ordered --zero-replicas {replicas}"
    expected = one_device(ranks, f"{flags} --zero-stage 1")
    for stage in SHARDED:
        assert train(ranks, f"{flags} --zero-stage {stage}") == expected, f"stage {stage}"


@pytest.mark.parametrize("stage", [2, 3])
def test_every_microbatch_may_be_summed_over_the_replicas(stage):
    flags = f"--microbatches 3 --reduction ordered --zero-stage {stage} --sync-every-microbatch --zero-replicas 2"
    assert train(6, flags) == one_device(6, flags)


@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (6, 3)])
def test_in_a_ring_all_stages_train_the_same_bits(ranks, replicas):
    runs = [train(ranks, f"--zero-stage {stage} --zero-replicas {replicas}") for stage in SHARDED]
    assert runs[0] == runs[1] == runs[2]


def points(rank):
    random = np.random.default_rng(rank)
    return random.standard_normal((3, 3)), random.standard_normal((3, 1))


@pytest.mark.parametrize("make", [MLP, lambda: small_gpt()], ids=["MLP", "GPT"])
def test_a_script_shards_within_replicas_with_one_argument(make):
    """`fully_shard(model, HybridComm(world, 2))` on four ranks trains what it does on one device, and holds a half."""

    def script(comm, replicas):
        ddp = fully_shard(make(), HybridComm(comm, replicas), "ordered")
        optimizer = AdamW(ddp.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            share = points(0) if make is MLP else training.text([0, 1])  # the same for all: 1, 2 and 4 times it is one
            loss = ddp.loss(*share)
            loss.backward()
            losses.append((loss.item(), training.clip(ddp, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return sum(p.size for p in ddp.parameters()), losses, training.whole_state(ddp)

    (psi, losses, state), *_ = run_local(1, script, 1)
    halves = run_local(4, script, 2)
    assert [half for half, *_ in halves[:2]] == [half for half, *_ in halves[2:]]
    assert sum(half for half, *_ in halves) == 2 * psi
    np.testing.assert_allclose([losses for _, losses, _ in halves], [losses] * 4, rtol=1e-11)
    for name, array in state.items():
        np.testing.assert_allclose(halves[0][2][name], array, rtol=1e-9, atol=1e-9, err_msg=name)


# ---- bytes -----------------------------------------------------------------------------------------------------------

# Every chunk of a chunk is whole: blocks of 12 h^2 + 13 h = 7,224 elements, 624 at the ends.
EVEN = "--layers 4 --hidden 24 --heads 8 --seq-len 8 --vocab-size 16 --dtype float32"
PSI = 4 * 7224 + 624
TEXT = training.Tokens(np.arange(500, dtype=np.uint8) % 16, "a text")


def counted(ranks, flags):
    """Each rank's bytes of the second step on dp, by operation."""
    config = training.config_for(f"{EVEN} --global-batch {6 * ranks} {flags}", ranks)

    def rank(comm):
        trainer = trainer_for(config, TEXT, comm)
        trainer.step(0)
        comm.traffic.reset()
        trainer.step(1)
        assert comm.traffic.bytes(axis="dp") == comm.traffic.bytes()
        return {op: comm.traffic.bytes(op) for op in ("reduce_scatter", "all_gather", "all_reduce")}

    return config, run_local(ranks, rank)


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(("s", "q", "m"), [(2, 3, 3), (4, 2, 1), (1, 4, 1)])
def test_bytes_inside_and_across_are_the_formulas(s, q, stage, m):
    """Inside 2 Psi (s-1)/s, at stage 3 (2m+1) Psi (s-1)/s; across 2 (Psi/s)(q-1)/q whatever m is. And float64s."""
    config, sent = counted(s * q, f"--zero-stage {stage} --zero-replicas {q} --microbatches {m}")
    for rank, bytes_of in enumerate(sent):
        inside, across = bytes_of["reduce_scatter"] + bytes_of["all_gather"], bytes_of["all_reduce"]
        assert inside == 4 * (2 * m + 1 if stage == 3 else 2) * PSI * (s - 1) // s
        scalars = wire_bytes("all_reduce", "ordered", 1, 8, s * q, rank)  # the loss, of all ranks
        scalars += wire_bytes("all_reduce", "ordered", 1, 8, s, rank % s)  # the norm: replicas hold the same shards
        assert across - scalars == 4 * 2 * (PSI // s) * (q - 1) // q == replica_bytes(step_layout(config), rank, 0)
        assert dp_bytes(step_layout(config), rank, 0) == inside + scalars


def test_replicas_on_hosts_divide_what_crosses_between_them():
    """On 64 hosts of 8 GPUs, a ring of all 512 sends (2m+1) Psi over every card, hybrid sharding about 2 Psi/8."""
    layout = StepLayout(GPTConfig(16, 8, 24, 4, 8), 8, 8, 4, 4, 4, dp=512, zero_stage=3)
    hybrid = replace(layout, chunk_ranks=8)
    assert replica_bytes(layout, 0, 0) == 0
    assert replica_bytes(hybrid, 0, 0) * 30 < dp_bytes(layout, 0, 0)


def test_a_state_is_gathered_from_one_replica_alone():
    def sent(comm):
        training.whole_state(fully_shard(small_gpt(), HybridComm(comm, 2)))
        return comm.traffic.bytes("send")

    _, half, *others = run_local(4, sent)
    assert half > 0 and others == [0, 0]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", SHARDED)
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 2), (6, 3)])
def test_model_state_is_that_of_s_ranks_at_every_moment(ranks, replicas, stage):
    """Not of all: 16 Psi/s bytes at stage 3 in float32, or in mixed precision."""
    config = config_for(ranks, f"--dtype float32 --zero-stage {stage} --zero-replicas {replicas}")

    def rank(comm):
        with (ledger := MemoryLedger()).recording():
            trainer = trainer_for(config, TOKENS, comm)
            for _ in trainer.train():
                pass
        placed = elements_placed(step_layout(config).placements(dp=comm.rank), trainer.ddp.comm.chunk_comm.rank)
        return list(ledger.moments), placed

    results = run_local(ranks, rank)
    s, psi = ranks // replicas, results[0][1][0]
    for moments, (_, own) in results:
        state = model_state(psi, own, stage, OF_DTYPE["float32"])
        assert {held[: KINDS.index("optimizer") + 1] for _, held in moments} == {
            (state.parameters, state.gradients, state.optimizer)
        }
    assert [own for _, (_, own) in results[:s]] * replicas == [own for _, (_, own) in results]
    assert sum(own for _, (_, own) in results) == replicas * psi
    assert model_state(s * psi, psi, 3, MIXED).total == 16 * psi


# ---- when the sums start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 2])
def test_the_sum_over_replicas_hides_behind_backward(ranks):
    """It begins when the bucket's reduce-scatter ends, whenever the program notices: a model clock repeats it. On two
    ranks a replica has one rank, whose reduce-scatter is done at once."""
    network = Network(alpha=1.0, beta=0.125)

    def program(comm):
        start_trace(comm)
        start = comm.clock.now()
        inside, across = comm.split_into(2)
        later = []
        work = inside.reduce_scatter(np.ones(32), out=(out := np.zeros(64 // ranks)), algorithm="ring", async_op=True)
        work.then(lambda: later.append(across.all_reduce(out, algorithm="ring", async_op=True)))
        comm.clock.advance(1000.0)
        work.wait()
        assert (later[0].wait() == ranks).all()
        slices = {event["name"]: event for event in comm.tracer.events if event.get("cat") == "communication"}
        first, second = slices["reduce_scatter"], slices["all_reduce"]
        return comm.clock.now() - start, second["ts"] - first["ts"] - first["dur"], second["dur"] / 1e6

    share = 64 / ranks * 8
    for now, gap, seconds in run_local(ranks, program, clock="model", network=network):
        assert now == 1000.0 and gap == 0
        assert seconds == 2 * (1.0 + share / 2 * 0.125)


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_replicas_that_do_not_fit_are_refused():
    with pytest.raises((UsageError, CommunicationError), match="4/3"):
        run_local(4, lambda comm: HybridComm(comm, 3))
