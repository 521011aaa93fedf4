"""Shared by the tests of pipelines: a step executed on one rank, and the same microbatches on one device."""

from contextlib import contextmanager
from functools import cache

import numpy as np

from minipar.comm import run_local
from minipar.nn import GPT, DropoutKeys, GPTConfig, dropping
from minipar.parallel.pipeline.model import balanced_cuts, cut
from minipar.parallel.pipeline.stage import PipelineExecutor, PipelineStage

B, T, H, V = 2, 5, 8, 13  # samples per microbatch, sequence, hidden, vocabulary: no two sizes alike
TEXT = np.random.Generator(np.random.Philox(11)).integers(0, V, (16, B, T + 1))
SCALE = np.array(0.1)  # what the loss's gradient begins with


def gpt(layers, recompute=False, dropout=0.1):
    config = GPTConfig(vocab_size=V, n_positions=T, n_embd=H, n_layer=layers, n_head=2)
    return GPT(config, dtype="float64", recompute=recompute, dropout=dropout)


def keys(microbatch):
    """Each sample has dropout masks of its own, wherever it is computed."""
    return dropping(DropoutKeys(1, 0, [B * microbatch, B * microbatch + 1]))


def gradients(model):
    """Every leaf's gradient: the parameters', and the tied head's own."""
    leaves = {}
    for name, p in model.named_parameters():
        leaves[name] = p.grad
        for i, leaf in enumerate(p.ties):
            leaves[f"{name} tied {i}"] = leaf.grad
    return leaves


@cache
def one_device(layers, m, recompute=False, dropout=0.1):
    model = gpt(layers, recompute, dropout)
    for i in range(m):
        with keys(i):
            loss = model.loss_sum(TEXT[i, :, :T], TEXT[i, :, 1:])
        loss.backward(SCALE)
    return gradients(model)


class Run:
    """What one rank of `execute` leaves behind; `peak_alive` is the most activations that it has held."""

    def __init__(self, comm, model, stages, peak_alive):
        self.comm, self.model, self.stages, self.peak_alive = comm, model, stages, peak_alive
        self.gradients = gradients(model)


def execute_rank(comm, schedule, layers, counts=None, recompute=False, dropout=0.1, watch=None):
    """One rank's part of a step. `counts`: parts per stage, else balanced; `watch(executor, action)` is called as each
    action begins.
    """
    model = gpt(layers, recompute, dropout)
    runs = cut(model, counts or balanced_cuts(model.config.segment_flops(T), schedule.stages))
    stages = {s: PipelineStage(runs[s]) for s, rank in schedule.home.items() if rank == comm.rank}
    executor = PipelineExecutor(schedule, comm, stages, (B, T, H), np.dtype("float64"))

    alive = []

    @contextmanager
    def around(action):
        if watch is not None:
            watch(executor, action)
        with keys(action.microbatch):
            yield
        alive.append(sum(len(stage.alive) for stage in stages.values()))

    executor.run(
        tokens=lambda i: TEXT[i, :, :T].copy(),
        loss=lambda i, logits: model.criterion(logits, TEXT[i, :, 1:]),
        scale=float(SCALE),
        around=around,
    )
    return Run(comm, model, stages, max(alive))


def execute(schedule, layers, **options):
    return run_local(len(schedule.ranks), execute_rank, schedule, layers, **options)


def differing(runs, expected):
    """The leaves whose gradient is not on exactly one rank, or has other bits than one device's."""
    wrong = []
    for name, gradient in expected.items():
        found = [run.gradients[name] for run in runs if run.gradients[name] is not None]
        if len(found) != 1 or found[0].tobytes() != gradient.tobytes():
            wrong.append(name)
    return wrong
