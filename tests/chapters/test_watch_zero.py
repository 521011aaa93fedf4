"""The instruments of the chapter on ZeRO."""

from dataclasses import replace

import numpy as np

from chapters.support.ch05 import watch
from minipar.comm import run_local
from minipar.memory import MemoryLedger
from minipar.nn import GPT, AdamW, GPTConfig
from minipar.parallel.parallelize import shard

CONFIG = GPTConfig(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2)


def runs(comm, stages):
    def train(stage):
        wrapper = shard(GPT(CONFIG, dtype="float64", deferred=True), comm, stage, "ordered")
        optimizer = AdamW(wrapper.parameters())
        loss = wrapper.loss(np.full((1, 8), comm.rank), np.full((1, 8), 3))
        loss.backward()
        norm = wrapper.clip_grad_norm(1.0)
        optimizer.step()
        return wrapper, optimizer, [float(loss.data)], [norm]

    watched = []
    for stage in stages:
        comm.traffic.reset()
        watched.append(watch.watch(lambda stage=stage: train(stage)))
    return watched


def test_bytes_of_each_stage_are_the_closed_form():
    def check(comm):
        watched = runs(comm, range(4))
        assert all(run.sent == watch.expected_bytes(run.wrapper) for run in watched)
        assert all(run.bits.tobytes() == watched[0].bits.tobytes() for run in watched)
        assert set(watched[3].sent) == {"all_reduce", "all_gather", "reduce_scatter"}
        return [run.model_state for run in watched]

    for states in run_local(2, check):
        assert states == sorted(states, reverse=True) and len(set(states)) == 4


def test_each_instrument_objects_to_its_own_mistake():
    def check(comm):
        (right,) = runs(comm, [1])
        other = right.bits.copy()
        other[0] += 1e-9 * (comm.rank == 1)
        ledger = MemoryLedger()
        changed = {
            "loss": replace(right, losses=[2 * right.losses[0]]),
            "bytes": replace(right, sent={}),
            "ledger": replace(right, ledger=ledger),
            "ranks, bits": replace(right, bits=other),
        }
        return {name: watch.examine(run, right, right) for name, run in changed.items()}

    for seen in run_local(2, check):
        assert seen == {name: set(name.split(", ")) for name in seen}
