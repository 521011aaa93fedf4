"""Claims about chapters/pytorch: what each twin prints is what minipar computes from the same values.

The twins run torch.distributed over gloo, in processes of their own; minipar's ranks are threads. Integers, orders,
shapes and promised bits are compared with ==. Other figures may differ by TOLERANCE: torch's products and functions
round otherwise than NumPy's.
"""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import minipar as mp
from chapters.support.ch13.train import MODEL, OverflowingTrainer
from chapters.support.pipeline_runs import gradients_on_one_device
from chapters.support.whole_runs import relative_difference
from minipar.autograd import Tensor
from minipar.comm import DeviceMesh, chunk_bounds, run_local, wire_bytes
from minipar.more.context.context_parallel import RingAttention, block_attention
from minipar.more.context.token_order import ContextParallel
from minipar.parallel.pipeline.actions import Schedule, parse_action, simulate
from minipar.parallel.pipeline.check import check
from minipar.parallel.pipeline.schedules import make
from minipar.plan.layout import MEGATRON, Layout
from minipar.plan.model import find_model
from minipar.plan.rank_bytes import layer_activations, memory
from minipar.train.data import load_tokens
from minipar.train.flags import parse

TWINS = Path(__file__).parents[2] / "chapters" / "pytorch"
DEADLINE = 400  # seconds of one twin; most of them go into importing torch
TOLERANCE = 1e-12  # relative, of a sum or a dot product with cosines, in float64


def printed(chapter):
    """Run a twin and return what it prints: {name: value}."""
    command = [sys.executable, str(TWINS / f"ch{chapter:02}.py")]
    job = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = job.communicate(timeout=DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, stderr
    lines = [line.split(": ", 1) for line in stdout.splitlines()]
    return {name: value if name.startswith("actions") else ast.literal_eval(value) for name, value in lines}


def about(value):
    return pytest.approx(value, rel=TOLERANCE)


def checksum(array):
    """Compute what `checksum` of the twins does."""
    values = np.asarray(array, dtype=np.float64).reshape(-1)
    return about(values @ np.cos(np.arange(values.size)))


def crc32(array):
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8))


class Layers(mp.Module):
    """Linear layers with a function between them, whose sum of losses is given."""

    def __init__(self, layers, between, loss_sum):
        for i, layer in enumerate(layers):
            setattr(self, f"layer_{i}", layer)
        self.count, self.between, self.loss_of = len(layers), between, loss_sum

    def forward(self, x):
        for i in range(self.count):
            x = self.between(i, getattr(self, f"layer_{i}")(x))
        return x

    def loss_sum(self, x, y):
        return self.loss_of(self(x), y)


def test_ch03_a_ring_all_reduce_has_torchs_bits():
    def contribution(rank):
        return (np.random.default_rng([2, rank]).standard_normal(10_000) * 1000).astype(np.float32)

    (total, sent), _ = run_local(
        2, lambda comm: (comm.all_reduce(contribution(comm.rank), algorithm="ring"), comm.traffic.bytes())
    )
    names = ("ring", "all_reduce", "reduce_scatter, all_gather")
    assert sent == wire_bytes("all_reduce", "ring", 10_000, 4, 2, 0)
    # Two ranks have one order only, a + b, so all algorithms have the same bits.
    assert printed(3) == {"bytes sent by each process": sent} | {f"bits of the sum, {n}": crc32(total) for n in names}


def test_ch04_unequal_counts_have_one_gradient():
    targets = [32, 16]

    def model():
        layers = [mp.Linear(8, 16, name="a", dtype="float64", transposed=True)]
        layers.append(mp.Linear(16, 10, name="b", dtype="float64", transposed=True))
        model = Layers(layers, lambda i, x: x.tanh() if i == 0 else x, mp.cross_entropy_sum)
        weights = np.random.default_rng(0)
        for p in model.parameters():
            p.data[...] = weights.normal(size=p.shape) / 4
        return model

    def share(rank):
        random = np.random.default_rng([4, rank])
        x, y = random.normal(size=(32, 8)), random.integers(0, 10, 32)
        y[targets[rank] :] = -100
        return x, y

    def gradient(model):
        return np.concatenate([p.grad.reshape(-1) for p in model.parameters()])

    def with_ddp(comm):
        ddp = mp.DistributedDataParallel(model(), comm)
        loss = ddp.loss(*share(comm.rank))
        loss.backward()
        return loss.item(), gradient(ddp.model), sum(bucket.size for bucket in ddp.buckets)

    def alone(rank):
        one = model()
        loss = one.loss_sum(*share(rank))
        loss.backward(np.full_like(loss.data, 1 / targets[rank]))
        return gradient(one)

    (loss, right, elements), _ = run_local(2, with_ddp)
    assert printed(4) == {
        "loss": about(loss),
        "checksum of the gradient": checksum(right),
        "bytes of gradients all-reduced": 8 * elements,
        "a mean of means is off by": about(relative_difference((alone(0) + alone(1)) / 2, right)),
    }


def test_ch05_fully_shard_trains_the_same_weights():
    layers, width, steps = 4, 9, 3

    def train(comm):
        own = [mp.Linear(width, width, name=f"{i}", bias=False, dtype="float64") for i in range(layers)]
        for i, layer in enumerate(own):
            layer.weight.data[...] = np.random.default_rng([1, i]).normal(0, 0.3, (width, width))
        # The wrapper divides by the number of targets; the twin, as 5.4, adds up.
        model = Layers(own, lambda i, x: x.tanh(), lambda x, y: (x * x).sum() * (y.size * comm.size / 2))
        fsdp = mp.fully_shard(model, comm)
        optimizer = mp.AdamW(fsdp.parameters(), lr=1e-3)
        for step in range(steps):
            x = np.random.default_rng([2, step, comm.rank]).normal(size=(5, width))
            fsdp.loss(x, np.zeros_like(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = sum(array.nbytes for array in (*optimizer.exp_avg, *optimizer.exp_avg_sq))
        whole = mp.gather_state(model, fsdp.parameters(), comm)
        return whole, sum(p.data.nbytes for p in fsdp.parameters()), state

    ranks = run_local(2, train)
    weights = np.concatenate([ranks[0][0][f"layer_{i}.weight"].reshape(-1) for i in range(layers)])
    parameters, state = [rank[1] for rank in ranks], [rank[2] for rank in ranks]
    values = layers * width**2
    assert (sum(parameters), sum(state)) == (8 * values, 16 * values) and 2 * parameters[0] == state[0]
    rows = [8 * layers * width * (stop - start) for start, stop in chunk_bounds(width, 2)]  # torch cuts by rows
    assert printed(5) == {
        "bytes of parameters, process by process": rows,
        "bytes of optimizer state, process by process": [2 * nbytes for nbytes in rows],
        "checksum of the weights": checksum(weights),
    }
    assert sum(rows) == sum(parameters)


def test_ch06_columns_and_rows_compute_torchs_mlp():
    n, h = 32, 48

    def mlp(comm):
        random = np.random.default_rng(0)
        x, a, d = random.normal(size=(n, h)), random.normal(size=(h, 4 * h)), random.normal(size=(4 * h, h))
        bias_a, bias_d, dz = random.normal(size=4 * h), random.normal(size=h), random.normal(size=(n, h))
        up = mp.ColumnParallelLinear(h, 4 * h, comm, name="up", dtype="float64")
        down = mp.RowParallelLinear(4 * h, h, comm, name="down", dtype="float64")
        own = slice(comm.rank * 2 * h, (comm.rank + 1) * 2 * h)
        for p, value in ((up.weight, a[:, own]), (up.bias, bias_a[own]), (down.weight, d[own]), (down.bias, bias_d)):
            p.data[...] = value
        x = Tensor(x[None], requires_grad=True)
        comm.traffic.reset()
        z = down(mp.gelu(up(x)))
        forward = comm.traffic.bytes(), comm.traffic.messages()
        z.backward(dz[None])
        assert (comm.traffic.bytes(), comm.traffic.messages()) == (2 * forward[0], 2 * forward[1])
        return forward, list(up.weight.shape), z.data, x.grad, up.weight.grad

    ((sent, messages), shape, z, dx, da), _ = run_local(2, mlp)
    assert printed(6) == {
        "all-reduces in forward, in backward": [messages // 2, messages // 2],  # a ring of two: two messages each
        "bytes sent by each process in forward": sent,
        "shape of this process's part of A": shape,
        "checksum of Z": checksum(z),
        "checksum of dX": checksum(dx),
        "checksum of this process's dA": checksum(da),
    }


def test_ch07_torchs_1f1b_is_our_list():
    weights = np.random.default_rng(5).normal(size=(2, 16, 16)) / 4
    batch = np.random.default_rng(6).normal(size=(4, 8, 16))
    schedule, expected = make("1f1b", 2, 4), {}
    for r, gradient in enumerate(gradients_on_one_device(weights, batch)):
        expected[f"actions of process {r}"] = " ".join(map(str, schedule.ranks[r]))
        expected[f"activations alive at most on process {r}"] = simulate(schedule).peak_activations[r]
        expected[f"checksum of the gradient of process {r}"] = checksum(gradient)
    assert printed(7) == expected


def test_ch08_torchs_interleaved_lists_are_ours():
    weights = np.random.default_rng(5).normal(size=(4, 16, 16)) / 4
    batch = np.random.default_rng(6).normal(size=(4, 8, 16))
    gradients, found = gradients_on_one_device(weights, batch), printed(8)
    ours = [" ".join(map(str, actions)) for actions in make("interleaved-1f1b", 2, 4).ranks]
    whole, halves = "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"
    assert [found.pop(f"actions of process {r}, {whole}") for r in range(2)] == ours
    split = [found.pop(f"actions of process {r}, {halves}").split() for r in range(2)]
    check(Schedule.of("torch's", [[parse_action(action) for action in actions] for actions in split]))
    for actions, interleaved in zip(split, ours, strict=True):
        backwards = [each.replace("B", "I") for each in interleaved.split() if "B" in each]
        assert [each for each in actions if "I" in each] == backwards, "I in the order of B"
    assert found == {
        f"checksums of the gradients of process {r}, {kind}": [checksum(gradients[s]) for s in (r, 2 + r)]
        for kind in (whole, halves)
        for r in range(2)
    }


def test_ch09_three_layouts_have_one_loss_curve():
    h = 16

    def train(comm, dp, tp):
        mesh = DeviceMesh(comm, dp=dp, tp=tp)
        up = mp.ColumnParallelLinear(h, 4 * h, mesh.tp, name="up", dtype="float64")
        down = mp.RowParallelLinear(4 * h, h, mesh.tp, name="down", dtype="float64")
        weights, batches, found = np.random.default_rng(8), np.random.default_rng(80), []
        own = np.array_split(np.arange(4 * h), tp)[mesh.tp.rank]
        # torch's order and shapes: weight (out, in), then bias, of each layer
        up.weight.data[...] = (weights.normal(size=(4 * h, h)) / 4)[own].T
        up.bias.data[...] = (weights.normal(size=4 * h) / 4)[own]
        down.weight.data[...] = (weights.normal(size=(h, 4 * h)) / 4)[:, own].T
        down.bias.data[...] = weights.normal(size=h) / 4

        def squares(x, y):
            return ((x - y) * (x - y)).sum()

        fsdp = mp.fully_shard(Layers([up, down], lambda i, x: x.tanh(), squares), mesh.dp)
        optimizer = mp.AdamW(fsdp.parameters(), lr=1e-2)
        for p in fsdp.parameters():
            p.decays = True  # torch decays biases, too
        for _ in range(3):
            x, y = np.split(batches.normal(size=(2, 8, h)), dp, axis=1)[mesh.dp.rank]
            loss = fsdp.loss(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, list(mesh.tp.ranks), list(mesh.dp.ranks)

    expected = {}
    for dp, tp in ((4, 1), (1, 4), (2, 2)):
        ranks = run_local(4, train, dp, tp)
        rows = [
            [row for i, row in enumerate(each) if row not in each[:i]] for each in list(zip(*ranks, strict=True))[1:]
        ]
        expected[f"losses with dp {dp}, tp {tp}"] = about(ranks[0][0])
        expected[f"rows of tp, rows of dp with dp {dp}, tp {tp}"] = rows
    assert printed(9) == expected


def test_ch10_torch_counts_what_the_planner_counts():
    model = find_model("megatron-7.5b")
    layout = Layout(dp=2, tp=1, pp=1, microbatch=1, microbatches=1, zero=3)
    held = memory(model, layout, 2048)
    # Without dropout: no masks (two of half an element each, and one of the scores), and softmax's result is kept once.
    # Each of two norms keeps its mean and its deviation for each token.
    kept = replace(MEGATRON.kept, sliced=MEGATRON.kept.sliced - 1, scores=1, rows=4)
    elements = layer_activations(model, layout, 2048, kept) / layout.precision.parameters
    assert printed(10) == {
        "parameters": model.parameters,
        "operations of a sample, forward and backward": model.model_flops(2048),
        "elements that a layer keeps for (2048, 4096)": elements,
        "bytes of model state on each process, ZeRO-3": held.parameters + held.gradients + held.optimizer,
    }


def test_ch11_ring_attention_over_torchs_kernel():
    heads, length, width = 4, 24, 4
    arrays = np.random.default_rng(11).normal(size=(4, 1, heads, length, width))

    def columns(x):  # (1, heads, T, width) -> (1, T, heads * width)
        return x.swapaxes(1, 2).reshape(1, length, -1)

    def by_head(x):  # (1, T/c, heads * width) -> (1, heads, T/c, width)
        return x.reshape(1, -1, heads, width).swapaxes(1, 2)

    def attend(comm):
        context = ContextParallel(comm, "contiguous")
        *qkv, dout = (context.part(columns(x)) for x in arrays)
        own = Tensor(np.concatenate(qkv, axis=2), requires_grad=True)
        result = block_attention(RingAttention(context), own, heads)
        result.backward(dout)
        parts = (result.data, *np.split(own.grad, 3, axis=2))
        return [by_head(part) for part in parts], comm.traffic.bytes()

    ranks = run_local(2, attend)
    expected = {
        f"checksums of out, dq, dk, dv of process {r}": [checksum(part) for part in parts]
        for r, (parts, _) in enumerate(ranks)
    }
    assert {sent for _, sent in ranks} == {(6 * 2 - 4) * length // 2 * heads * width * 8}  # 11.5's (6c - 4) u h_kv
    assert printed(11) == expected | {"bytes sent by each process": ranks[0][1]}


def test_ch12_all_to_alls_move_the_same_rows():
    experts, h, f, tokens = 8, 8, 10, [7, 8]

    def layer(comm):
        random = np.random.default_rng(12)
        (x, dy), router = random.normal(size=(2, sum(tokens), h)), random.normal(size=(experts, h))
        matrices = random.normal(size=(experts, 3, f, h))
        config = mp.MixtralConfig(64, h, f, 1, 2, 1, 16, num_local_experts=experts, num_experts_per_tok=2)
        model = mp.Mixtral(config, dtype="float64")
        moe = model.model.layers[0].block_sparse_moe
        moe.gate.weight.data[...] = router
        for expert, (gate, up, down) in zip(moe.experts, matrices, strict=True):
            expert.w1.weight.data[...], expert.w3.weight.data[...] = gate, up
            expert.w2.weight.data[...] = down.T
        mesh = DeviceMesh(comm, dp=2, ep=2)
        mp.expert_parallel(model, mesh.ep, mesh.edp)
        own = slice(sum(tokens[: comm.rank]), sum(tokens[: comm.rank + 1]))
        comm.traffic.reset()
        inputs = Tensor(x[own], requires_grad=True)
        chosen, weights = moe.route(inputs)
        y = moe.compute(inputs, chosen, weights)
        y.backward(dy[own])
        gradients = [np.stack([e.w1.weight.grad, e.w3.weight.grad, e.w2.weight.grad.T]) for e in moe.experts]
        rows = np.bincount(np.asarray(chosen).reshape(-1), minlength=experts).tolist()
        return rows, comm.traffic.bytes(), [checksum(each) for each in (y.data, inputs.grad, np.stack(gradients))]

    expected = {}
    for r, (rows, sent, sums) in enumerate(run_local(2, layer)):
        expected[f"rows for each expert from process {r}"] = rows
        expected[f"bytes sent by process {r}"] = sent
        expected[f"checksums of y, dx and the experts' gradients on process {r}"] = sums
    assert printed(12) == expected


def test_ch13_precision_rounds_and_skips_alike():
    bf16 = np.dtype(ml_dtypes.bfloat16)

    def total(comm):
        return comm.all_reduce(np.random.default_rng([13, comm.rank]).normal(size=1001).astype(np.float32).astype(bf16))

    def overflow(comm):
        args = parse(f"{MODEL} --steps 3 --dtype float16 --global-batch 2".split(), 2)
        trainer = OverflowingTrainer(args, DeviceMesh(comm, dp=2), load_tokens(None, 256, 32))
        return [trainer.optimizer.steps for _ in trainer.train()], trainer.scale.factor

    weight, master = np.ones(1, bf16), np.ones(1, np.float32)
    for _ in range(24):
        weight = (weight + np.array(2**-9, bf16)).astype(bf16)
        master += np.float32(2**-9)
    taken, scales = zip(*run_local(2, overflow), strict=True)
    assert printed(13) == {
        "after 24 steps of 2^-9, in bfloat16 and with a master": [float(weight[0]), float(master.astype(bf16)[0])],
        "bits of the sum in bfloat16": crc32(run_local(2, total)[0]),
        "updates after each step, process by process": list(taken),
        "loss scale in the end, process by process": list(scales),
    }
