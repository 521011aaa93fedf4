# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 4. Data parallelism
#
# **How do $p$ ranks train one model as if they were one device?**
#
# A *rank* is one process; think of one GPU. In data parallelism every rank holds a whole copy of the model, a
# *replica*. A training step works on a *global batch* of samples. Each rank takes $1/p$ of it, its *shard*, runs
# forward and backward, and then the ranks add up their gradients. Every optimizer then sees the same gradient and takes
# the same step, so the replicas stay equal without ever exchanging a weight.
#
# "As if" is a claim, and this chapter proves it: the same gradient as one device, bit for bit where the order of a sum
# can be kept, within rounding where it cannot. Then it counts the bytes, hides the time they take, and breaks the
# method in four ways to see which check notices.
#
# Run it as `mpirun -n 8 python chapters/04_data_parallel.py`, with any number of ranks. With one rank every sum has one
# term and nothing is sent: all claims hold, and say little. Letters: $p$ ranks, of which this one is $r$; $N$ tokens of
# the global batch, $T$ tokens per sample; $\Psi$ parameters; an array of $n$ bytes; $\alpha$ seconds per message,
# $\beta$ seconds per byte.

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them; as a script, mpirun starts them
# # instead.
# import ipyparallel as ipp
#
# cluster = ipp.Cluster(engines="mpi", n=8, log_level=40)
# cluster.start_cluster_sync()
# client = cluster.connect_client_sync()
# client.wait_for_engines(8, interactive=False)
# view = client[:]
# view.block = True
# view.activate()
# %pxconfig --progress-after 600
# %autopx

# %%
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, p = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.figures_data_parallel import plot_bucket_sizes
    from chapters.support.show import show, show_source
    from visualize import parse_trace, plot_bytes, plot_loss, plot_timeline, read_trace
say(f"{p} rank{'s' if p > 1 else ''}")

# %% [markdown]
# ## 4.1 The gradient of a sum is the sum of the gradients
#
# Let token $i$ of the global batch have the loss $\ell_i(\theta)$, and let there be $N$ tokens. Training minimizes
# their mean. Cut the batch into shards $S_0, \dots, S_{p-1}$ and use that differentiation is linear:
#
# $$L = \frac1N \sum_{i=1}^{N} \ell_i
# \qquad\Longrightarrow\qquad
# \nabla L = \sum_{r=0}^{p-1} g_r, \quad g_r = \frac1N \sum_{i \in S_r} \nabla \ell_i .$$
#
# That is all of the mathematics. Rank $r$ computes $g_r$: the gradient of the **sum** of its losses, divided by the
# **global** count $N$. Then one sum over ranks, an *all-reduce*, gives everybody $\nabla L$. It does not matter how
# many tokens each rank holds.
#
# The text is the source of Python's standard library, one token per byte. The model is a GPT-2 of toy size, in float64.

# %%
import math

import numpy as np

from minipar.nn import GPT, GPTConfig
from minipar.train.data import Batches, load_tokens
from minipar.train.verify import relative_difference

SHARD, T = 2, 16  # samples per rank; tokens per sample
N = p * SHARD * T
shape = GPTConfig(vocab_size=256, n_positions=T, n_embd=32, n_layer=2, n_head=4)
tokens = load_tokens(None, vocab_size=256, seq_len=T)
batches = Batches(tokens, seq_len=T, global_batch=p * SHARD, order="random", seed=0)


def fresh():
    """The same model on every rank: initial weights are keyed by name, never by rank."""
    return GPT(shape, dtype="float64")


def shard(r):
    """Inputs and targets of rank r, (SHARD, T) each."""
    return batches.batch(0, range(r * SHARD, (r + 1) * SHARD))


def backward(model, inputs, targets, count):
    """Add the gradient of (sum of losses) / count to the model's gradients."""
    loss = model.loss_sum(inputs, targets)
    loss.backward(np.full_like(loss.data, 1 / count))


def flat_gradient(model):
    """The gradients of all parameters, one after another, as one flat array."""
    for parameter in model.parameters():
        parameter.fold_tied_gradients()  # the output head is the token embedding: two gradients of one matrix
    return np.concatenate([parameter.grad.reshape(-1) for parameter in model.parameters()])


def gradient(inputs, targets, count):
    """That gradient for a fresh model."""
    model = fresh()
    backward(model, inputs, targets, count)
    return flat_gradient(model)


g = [gradient(*shard(r), N) for r in range(p)]  # every rank computes all p shards here, to have something to check with
whole = gradient(*batches.batch(0, range(p * SHARD)), N)
Psi = whole.size

difference = relative_difference(sum(g), whole)
assert difference < 1e-14
say(f"gradient of the whole batch = sum of {p} shards' gradients: {Psi:,} values, relative difference {difference:.1e}")

# %% [markdown]
# Why not exactly zero? The whole batch goes through larger matrix products, which add the same values in another
# order. Floating-point addition is not associative:

# %%
say(f"(0.1 + 0.2) + 0.3 = {(0.1 + 0.2) + 0.3!r}")
say(f"0.1 + (0.2 + 0.3) = {0.1 + (0.2 + 0.3)!r}")
assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)

# %% [markdown]
# So a fair reference must do the same products and the same sums. It is *one device that takes the shards one after
# another and adds their gradients in rank order*, $((g_0 + g_1) + g_2) + \dots$, as gradient accumulation does.
#
# Each $g_r$ is one flat array here, so that it can be added, or sent, as one.


# %%
def left_to_right(arrays):
    """((a_0 + a_1) + a_2) + ...: one device that accumulates."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def same_bits(a, b):
    return a.tobytes() == b.tobytes()


def everywhere(ok):
    """Whether `ok` holds on every rank."""
    return all(one == b"1" for one in comm.all_gather_bytes(b"1" if ok else b"0"))


expected = left_to_right(g)

# %% [markdown]
# ## 4.2 Naive: one all-reduce after backward
#
# Each rank runs backward on its own shard. Then one all-reduce over the whole flat gradient:

# %%
assert everywhere(same_bits(comm.all_reduce(g[rank].copy(), algorithm="ordered"), expected))
say(f"one all-reduce of the shards' gradients: one device's gradient on all {p} ranks, bit for bit")

# %% [markdown]
# That line is data parallelism. The library's function adds what lies around it: it joins the gradients of all
# parameters to one array, counts a parameter that the loss did not use as zero, and writes the sum back.

# %%
from minipar.parallel.ddp import all_reduce_gradients

if rank == 0:
    show_source(all_reduce_gradients)


def naive(algorithm):
    model = fresh()
    backward(model, *shard(rank), N)
    all_reduce_gradients(model, comm, algorithm)
    return flat_gradient(model)


# %% [markdown]
# Chapter 3 has two all-reduces that matter here. Both cut the array into $p$ *chunks*, one per rank, reduce each, and
# gather the results. They differ in the order of additions:
#
# - `ordered` brings all contributions to a chunk's owner, who adds them in rank order $0, 1, \dots, p-1$.
# - `ring` lets a partial sum travel once round the ring. Chunk $c$ starts at rank $c+1$, so it is added in the order
#   $c+1, c+2, \dots, c$ (modulo $p$).
#
# The first should give the reference's bits. The second should not, quite.

# %%
import hashlib


def same_on_all_ranks(array):
    return len(set(comm.all_gather_bytes(hashlib.sha256(array.tobytes()).digest()))) == 1


ordered, ring = naive("ordered"), naive("ring")

assert same_bits(ordered, expected)
say(f"ordered: {p} ranks = 1 device, bit for bit, in all {Psi:,} gradients")

difference = relative_difference(ring, expected)
assert difference < 1e-15 * p
assert same_on_all_ranks(ring)
unequal = int((ring != expected).sum())
say(
    f"ring:    {p} ranks = 1 device within {difference:.1e}; {unequal:,} of {Psi:,} gradients differ in their last bits"
)
say("ring:    every rank holds the same bits as every other")

# %% [markdown]
# Is the order of sums really the whole cause? Then we can predict the ring's bits on one device: add the shards'
# gradients chunk by chunk in the ring's order. And chunk $p-1$, whose order is $0, 1, \dots, p-1$, must agree with the
# reference exactly.

# %%
from minipar.comm import chunk_bounds

predicted = np.empty_like(ring)
for c, (start, stop) in enumerate(chunk_bounds(Psi, p)):
    total = g[(c + 1) % p][start:stop].copy()
    for k in range(2, p + 1):
        total += g[(c + k) % p][start:stop]
    predicted[start:stop] = total
    count = int((ring[start:stop] != expected[start:stop]).sum())
    say(f"chunk {c}: {count:>5,} of {stop - start:,} differ from rank order")

assert same_bits(predicted, ring)
assert same_bits(ring[start:stop], expected[start:stop])  # the last chunk
say("the ring's bits are exactly those of its order of sums, predicted on one device; the last chunk is in rank order")

# %% [markdown]
# (With two ranks there are no two orders: $a + b = b + a$ holds in floating point too. One rank has nothing to add.)
#
# That every rank holds the *same* bits is what keeps replicas equal over thousands of steps. It holds because each
# chunk is summed once, by one rank, and then copied. An all-reduce in which each rank summed for itself in its own
# order would let the replicas drift apart.
#
# ## 4.3 What it costs on the wire
#
# Either algorithm sends each chunk's contribution once, and its result once, $p - 1$ times in all. With $\Psi$
# parameters a rank sends
#
# $$2 \Psi \frac{p-1}{p} \text{ elements},$$
#
# which is the least that any all-reduce can do (Patarasuk and Yuan 2009). It hardly depends on $p$: between two ranks
# it is $\Psi$, among a thousand just under $2\Psi$. That is why data parallelism scales so far. ($\Psi$ is seldom
# divisible by $p$. `wire_bytes` is the formula with the true sizes of the chunks, so the comparison can be `==`.)

# %%
from minipar.comm import wire_bytes

comm.traffic.reset()
naive("ring")
sent = comm.traffic.bytes("all_reduce")
formula = wire_bytes("all_reduce", "ring", Psi, 8, p, rank)
naive_sent = sent
assert naive_sent == formula
total = int(comm.all_reduce(np.array([sent]))[0])
assert total == 2 * Psi * (p - 1) * 8
say(f"rank 0 sent {sent:,} bytes; the formula says {formula:,}; 2 Psi (p-1)/p * 8 = {2 * Psi * (p - 1) / p * 8:,.1f}")
say(f"all ranks together sent {total:,} = 2 Psi (p-1) * 8 bytes")

# %% [markdown]
# And the time? Next to MPI's own all-reduce, on an array of 1 MiB. (Here the ranks share a few cores, and messages are
# copies in memory. The times say how good the code is, not how fast a network is.)

# %%
import time


def seconds(algorithm, array, repeat=5):
    """Median over a few calls of the time until the slowest rank is done."""
    times = []
    for _ in range(repeat):
        comm.barrier()
        start = time.perf_counter()
        comm.all_reduce(array, algorithm=algorithm)
        times.append(float(comm.all_reduce(np.array([time.perf_counter() - start]), op="max")[0]))
    return float(np.median(times))


if p > 1:
    array = np.zeros(2**18, np.float32)
    ring_seconds, auto, mpi = (seconds(algorithm, array) for algorithm in ("ring", "auto", "mpi"))
    say(
        f"all-reduce of 1 MiB over {p} ranks: "
        f"ring {ring_seconds * 1e3:.2f} ms, the best of chapter 3 {auto * 1e3:.2f} ms, MPI's own {mpi * 1e3:.2f} ms"
    )

# %% [markdown]
# ## 4.4 Overlap: communicate while backward still runs
#
# The naive form leaves the wire idle during backward, and then the processor idle during the all-reduce. But backward
# completes gradients one by one, from the last layer to the first. The last layer's could travel while the first
# layer's are still being computed.
#
# One all-reduce per parameter would pay the *latency* $\alpha$, the time of an empty message, $2(p-1)$ times for each.
# PyTorch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704, section 3.2) therefore groups neighbouring
# parameters into *buckets*:
#
# 1. Buckets are cut in **reverse parameter order**, which is about the order in which backward completes gradients.
#
# 2. A **hook** on each parameter fires when its gradient is complete. The last one in a bucket starts that bucket's
# all-reduce, asynchronously.
#
# 3. Buckets start **strictly in order**, even if a later one is complete first. Collectives match by order: if rank 0
# started bucket 3 and rank 1 bucket 4, they would add up different parameters.
#
# 4. When backward ends, `synchronize` waits for what is still under way.
#
# How does a parameter know that its gradient is complete? Before backward starts, the engine counts how often each
# parameter is used. It counts down with each contribution, and at zero it calls the parameter's hooks (chapter 1). A
# bucket does the same one level higher: it counts its parameters down, and at zero it leaves. Here are buckets and
# their hook on plain arrays. (The output head is tied to the token embedding: `ties` are such leaves with a gradient of
# their own. A bucket is complete only with them, and `fold_tied_gradients` adds them up.)

# %%
from functools import partial


def cut(parameters, elements):
    """Group parameters in reverse order into buckets of `elements` or more."""
    buckets = [[]]
    for parameter in reversed(parameters):
        if sum(member.size for member in buckets[-1]) >= elements:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def backward_with_buckets(elements):
    """Backward on this rank's shard, with overlap; the model, and for each bucket when it left and its size."""
    model = fresh()
    buckets = cut(model.parameters(), elements)
    leaves = [{leaf for member in bucket for leaf in (member, *member.ties)} for bucket in buckets]
    missing, under_way, completed, log = [len(some) for some in leaves], [], 0, []

    def hook(number, leaf):  # backward calls it when the gradient of `leaf` is complete
        nonlocal completed
        completed += 1
        missing[number] -= 1
        while len(under_way) < len(buckets) and missing[len(under_way)] == 0:  # strictly in order
            bucket = buckets[len(under_way)]
            for member in bucket:
                member.fold_tied_gradients()
            flat = np.concatenate([member.grad.reshape(-1) for member in bucket])
            under_way.append((flat, comm.all_reduce(flat, algorithm="ordered", async_op=True)))
            log.append((completed, flat.size))

    for number, some in enumerate(leaves):
        for leaf in some:
            leaf.register_post_accumulate_grad_hook(partial(hook, number))
    backward(model, *shard(rank), N)
    assert len(under_way) == len(buckets) and completed == sum(map(len, leaves))
    for bucket, (flat, work) in zip(buckets, under_way, strict=True):
        work.wait()
        stops = np.cumsum([member.size for member in bucket])
        for member, part in zip(bucket, np.split(flat, stops[:-1]), strict=True):
            member.grad[...] = part.reshape(member.shape)
    return model, log


comm.traffic.reset()
model, log = backward_with_buckets(4096)
assert same_bits(flat_gradient(model), expected)
formula = sum(wire_bytes("all_reduce", "ordered", size, 8, p, rank) for _, size in log)
assert comm.traffic.bytes("all_reduce") == formula and sum(size for _, size in log) == Psi
for number, (completed, size) in enumerate(log):
    say(f"bucket {number}: {size:>6,} values, left when {completed:>2} of {log[-1][0]} gradients were complete")
say(f"the bits of one device, and {formula:,} bytes sent by rank 0 as the formula says")

# %% [markdown]
# The library's version adds three things. All parameters move into one flat array and all gradients into another
# (`FlatBuffers`), of which a bucket is a slice, so backward writes straight into what is sent and nothing is copied. It
# serves many steps: `synchronize` fills the counts again, and sends zeros for what the loss did not use. And each hook
# calls `progress`, which moves the messages under way while backward goes on.

# %%
from minipar.parallel.buckets import FlatBuffers, by_size, by_unit
from minipar.parallel.ddp import DistributedDataParallel

if rank == 0:
    show_source(by_size, FlatBuffers.__init__)
    show_source(DistributedDataParallel._on_gradient, DistributedDataParallel._start)
    show_source(DistributedDataParallel.synchronize)

# %% [markdown]
# A script that uses it has two lines. `ddp.loss` is the mean over the tokens of all ranks: it sums two values over the
# ranks, the losses and the count (4.6). Its `backward()` sends the buckets and ends with `synchronize`.
#
# Buckets change *when* things are sent. They must not change what arrives: with `ordered`, the reference's bits for any
# bucket size, and in backward not one byte more on the wire.

# %%
for bucket_bytes in (1, 32 * 1024, 25 * 2**20):
    model = fresh()
    ddp = DistributedDataParallel(model, comm, "ordered", bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    loss = ddp.loss(*shard(rank))
    comm.traffic.reset()
    loss.backward()
    sent = comm.traffic.bytes("all_reduce")
    assert same_bits(flat_gradient(model), expected)
    assert sent == sum(wire_bytes("all_reduce", "ordered", bucket.size, 8, p, rank) for bucket in ddp.buckets)
    say(f"buckets of {bucket_bytes:>10,} bytes or more: {len(ddp.buckets):>2} buckets, same bits, {sent:,} bytes sent")

# %% [markdown]
# (The bytes of rank 0 vary by a few elements, because the uneven chunks of many small arrays fall differently; summed
# over the ranks they are $2\Psi(p-1)$ each time. And with `ring` the *bits* depend on the bucket size: it decides in
# which chunk an element lies, and so in which order it is summed. Comparing two `ring` runs bit for bit needs equal
# buckets.)
#
# ### Seeing it
#
# To see time we need a clock that shows what 8 devices on a real network would do, not what 8 processes on this machine
# do. minipar's `model` clock is one (chapter 3): a logical clock per rank. Computation moves it by floating-point
# operations / speed; a message of $n$ bytes arrives $\alpha + \beta n$ after it was sent. The program that runs is the
# real one, with real buckets and real messages. Only its durations come from the model, so they are exact and
# repeatable.
#
# Our devices do $10^{12}$ operations per second. The network is slow for that: $\alpha = 1\,\mu s$, $1/\beta = 4$ GB/s.
# Forward costs what its matrix products cost, backward twice that, charged as each parameter's gradient is completed.
#
# `ddp.loss` would send its two values in the picture, too. So we do what the trainer does, which knows how many tokens
# the global batch has: it scales the loss by itself, and says so with `scaled_backward`. Without that, `backward()` is
# an error, because a loss divided by the local count gives gradients that are $p$ times too large. After it,
# `synchronize` is ours to call.

# %%
from contextlib import nullcontext

from minipar.comm import Network, run_local

DEVICES, SPEED = 8, 1e12  # the model clock's default speed: operations per second
NETWORK = Network(alpha=1e-6, beta=1 / 4e9)
big = GPTConfig(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4)
FORWARD = big.forward_flops(batch=8, length=64)


def simulate(comm, bucket_sizes, trace=False):
    """One step with one all-reduce after backward, then one for each bucket size; seconds of each, and the trace."""
    model = GPT(big)
    big_psi = sum(parameter.size for parameter in model.parameters())
    for parameter in model.parameters():  # first: these hooks run before those that start the buckets
        cost = 2 * FORWARD * parameter.size / big_psi / SPEED
        parameter.register_post_accumulate_grad_hook(lambda leaf, cost=cost: comm.clock.advance(cost))
    a_few = np.zeros((1, 4), int)  # what is really computed; the clock is charged for 8 samples of 64 tokens

    def step(bucket_bytes):
        ddp = None
        if bucket_bytes is not None:
            ddp = DistributedDataParallel(model, comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
        model.zero_grad()
        start = comm.clock.now()
        with comm.tracer.region("forward", flops=FORWARD):
            loss = model.loss_sum(a_few, a_few)
        with ddp.scaled_backward() if ddp else nullcontext(), comm.tracer.region("backward"):
            loss.backward(np.full_like(loss.data, 1.0))
        if ddp:
            ddp.synchronize()
        else:
            all_reduce_gradients(model, comm)
        seconds = comm.clock.now() - start
        with comm.tracer.region("optimizer", flops=12 * big_psi):
            pass
        if ddp:
            ddp.detach()
        return {"bucket_bytes": bucket_bytes, "buckets": len(ddp.buckets) if ddp else 1, "seconds": seconds}

    comm.tracer.enabled = trace
    rows = [step(bucket_bytes) for bucket_bytes in (None, *bucket_sizes)]
    return rows, comm.tracer.chrome_events(comm.rank), big_psi


# %% [markdown]
# First the naive step, then a step with buckets of 128 KiB, in one picture. `run_local` runs the 8 simulated ranks as
# threads of rank 0's process, so this picture is the same whatever `mpirun -n` says. An all-reduce takes the time that
# its messages spend on the wire; it would be hatched where it waits for a rank that has not sent yet, but here all
# ranks compute at the same speed.

# %%
COMPUTATION = 3 * FORWARD / SPEED
if rank == 0:
    results = run_local(DEVICES, simulate, [128 * 1024], trace=True, clock="model", network=NETWORK)
    (after, during), _, big_psi = results[0]
    events = [event for _, rank_events, _ in results for event in rank_events]
    figure = plot_timeline(parse_trace({"traceEvents": events, "otherData": {"clock": "model"}}))
    figure.axes[0].set_title("left: one all-reduce after backward; right: buckets of 128 KiB", loc="left", fontsize=10)
    show(figure, "04_overlap")

    message = 4 * max(stop - start for start, stop in chunk_bounds(big_psi, DEVICES))
    predicted = COMPUTATION + 2 * (DEVICES - 1) * NETWORK.seconds(message)
    assert abs(after["seconds"] - predicted) < 1e-12
    assert COMPUTATION < during["seconds"] < after["seconds"]
    hidden = (after["seconds"] - during["seconds"]) / (after["seconds"] - COMPUTATION)
    assert [round(s * 1e3, 3) for s in (after["seconds"], COMPUTATION, during["seconds"])] == [1.155, 0.755, 0.830]
    assert during["buckets"] == 7 and round(hidden, 2) == 0.81
    say(f"naive:   {after['seconds'] * 1e3:.3f} ms = forward + backward {COMPUTATION * 1e3:.3f} + all-reduce")
    say(f"         as 2(p-1)(alpha + beta n/p) predicts: {predicted * 1e3:.3f} ms")
    say(f"buckets: {during['seconds'] * 1e3:.3f} ms with {during['buckets']} buckets: {hidden:.0%} is hidden")

# %% [markdown]
# One all-reduce after backward exposes 0.400 ms of 1.155 ms. With 7 buckets a step takes 0.830 ms, and 81 % of that
# time is hidden: on the right most of the purple lies under the orange. What sticks out is the *tail*: the last bucket
# cannot start before backward ends. In GPT-2 it holds the token embedding. That is the first parameter, and because the
# output head is tied to it, its gradient is complete only at the very end. In the real GPT-2 (124 million parameters)
# it is almost a third of all bytes, which nothing hides.
#
# ### How large should a bucket be?
#
# With $k$ buckets of $n/k$ bytes, the ring needs in all
#
# $$T_{\text{comm}}(k) = 2(p-1)\left(k\,\alpha + \frac{n}{p}\,\beta\right).$$
#
# The bytes cost the same, the latency $k$ times as much. Many small buckets: latency wins, and communication takes
# longer than the backward that was to hide it. One huge bucket: it starts when backward ends, and nothing is hidden. In
# between there is a best size.

# %%
if rank == 0:
    sizes = [1024, *(2**k for k in range(15, 21))]
    rows, _, _ = run_local(DEVICES, simulate, sizes, clock="model", network=NETWORK)[0]
    none, *rows = rows
    show(plot_bucket_sizes(rows, naive=none["seconds"], computation=COMPUTATION), "04_bucket_size")
    best = min(rows, key=lambda row: row["seconds"])
    assert rows[0]["seconds"] > best["seconds"] < rows[-1]["seconds"]
    assert rows[-1]["buckets"] == 1 and abs(rows[-1]["seconds"] - none["seconds"]) < 1e-12
    assert [round(row["seconds"] * 1e3, 3) for row in (best, rows[0], rows[-1])] == [0.830, 0.983, 1.155]
    assert best["bucket_bytes"] == 128 * 1024
    say(f"best: {best['bucket_bytes'] // 1024} KiB ({best['buckets']} buckets), {best['seconds'] * 1e3:.3f} ms")
    say(f"smallest: {rows[0]['buckets']} buckets, {rows[0]['seconds'] * 1e3:.3f} ms: latency")
    say(f"largest: 1 bucket, {rows[-1]['seconds'] * 1e3:.3f} ms: exactly the naive form")

# %% [markdown]
# Here 128 KiB are best: 7 buckets and 0.830 ms. The smallest buckets take 0.983 ms, one bucket 1.155 ms.
#
# PyTorch's default is 25 MiB, and 1 MiB for the first bucket so that the wire starts early. Those sizes fit its GPUs
# and models of hundreds of MiB; Li et al. (section 5.3) measure the same bowl. minipar has the same defaults. For a toy
# model of 0.8 MiB they mean one bucket.
#
# ## 4.5 Gradient accumulation and `no_sync`
#
# If a shard does not fit in memory, cut it into *microbatches* and let their gradients add up locally before the ranks
# talk. Nothing needs to travel before the last one. `no_sync` says so:

# %%
if rank == 0:
    show_source(DistributedDataParallel.no_sync)

SMALL = {"bucket_bytes": 32 * 1024, "first_bucket_bytes": 8 * 1024}


def microbatches(r):
    """Rank r's shard, one sample at a time."""
    return [batches.batch(0, [sample]) for sample in range(r * SHARD, (r + 1) * SHARD)]


def accumulated():
    """One synchronized step over all microbatches of this rank; (gradients, bytes sent)."""
    model = fresh()
    ddp = DistributedDataParallel(model, comm, "ordered", **SMALL)
    comm.traffic.reset()
    *firsts, last = microbatches(rank)
    with ddp.no_sync(), ddp.scaled_backward():
        for inputs, targets in firsts:
            backward(model, inputs, targets, N)
    assert comm.traffic.bytes() == 0
    with ddp.scaled_backward():
        backward(model, *last, N)
    ddp.synchronize()
    once = sum(wire_bytes("all_reduce", "ordered", bucket.size, 8, p, rank) for bucket in ddp.buckets)
    assert comm.traffic.bytes("all_reduce") == once
    return flat_gradient(model), once


def one_replica(r):
    """The gradient of rank r's shard, its microbatches added up in the model."""
    model = fresh()
    for inputs, targets in microbatches(r):
        backward(model, inputs, targets, N)
    return flat_gradient(model)


result, once = accumulated()
in_microbatches = left_to_right([one_replica(r) for r in range(p)])
assert same_bits(result, in_microbatches)
say(f"{SHARD} microbatches on {p} ranks = 1 device, bit for bit; {once:,} bytes sent, once per step")

# %% [markdown]
# What happens without `no_sync`? Each backward pass sends everything, so the bytes double. And here the gradient is
# *wrong*: after the first all-reduce the buffer holds the global sum $G_1$. The second pass adds each rank's own $g_2$
# and sums again, which gives $p\,G_1 + G_2$. (PyTorch averages over ranks instead of summing. There the buffer holds
# the global *average* $\bar G_1$ after the first pass, and the second gives $\frac1p(p\,\bar G_1 + G_2) = \bar G_1 +
# \bar G_2$, which is right: the same mistake costs only bytes.) The library refuses the second pass. To see the damage,
# we make it forget that it has summed these gradients.


# %%
def without_no_sync(forget):
    """All microbatches of this rank, each synchronized; (gradients, bytes sent)."""
    model = fresh()
    ddp = DistributedDataParallel(model, comm, "ordered", **SMALL)
    comm.traffic.reset()
    for inputs, targets in microbatches(rank):
        if forget:
            ddp.forget_gradients()  # the optimizer's zero_grad calls it, and sets the gradients to None as well
        with ddp.scaled_backward():
            backward(model, inputs, targets, N)
        ddp.synchronize()
    return flat_gradient(model), comm.traffic.bytes("all_reduce")


try:
    without_no_sync(forget=False)
    raise AssertionError("the second pass should have been refused")
except RuntimeError as refusal:
    say(f"refused: {refusal}\n")
wrong_gradient, twice = without_no_sync(forget=True)
wrong = relative_difference(wrong_gradient, in_microbatches)
assert twice == SHARD * once
if p > 1:
    assert wrong > 0.1
    say(f"caught: {twice:,} bytes instead of {once:,}, and the gradient is off by {wrong:.0%}")

# %%
naive_bytes = wire_bytes("all_reduce", "ring", Psi, 8, p, rank)
if rank == 0:
    buckets = len(by_size(fresh().parameters(), **SMALL))
    bars = [
        {"op": "one all-reduce", "bytes": naive_sent, "expected": naive_bytes},
        {"op": f"{buckets} buckets, {SHARD} microbatches, no_sync", "bytes": once, "expected": once},
        {"op": "the same without no_sync", "bytes": twice, "expected": once},
    ]
    show(plot_bytes(bars), "04_bytes")

# %% [markdown]
# ## 4.6 Ranks with unequal counts
#
# Padding, documents of different length, a last batch that is not full: often the ranks do not hold equally many
# targets. (minipar marks a target that does not count with -100, as PyTorch does.) Rank $r$ has $n_r$ of them, and the
# sum of their losses is $s_r$. Then
#
# $$\frac{\sum_r s_r}{\sum_r n_r} \;\neq\; \frac1p \sum_r \frac{s_r}{n_r} \text{ unless all } n_r \text{ are equal.}$$
#
# The mean of means gives a token on a rank with few of them more weight than a token on a rank with many. The remedy is
# to divide by the global count, for the price of one integer on the wire. `ddp.loss` sends it together with the sum of
# the losses, as two float64:

# %%
from minipar.parallel.wrapper import global_mean

if rank == 0:
    show_source(global_mean, DistributedDataParallel.loss)


def unequal(r):
    """Rank r's shard, of which only the first SHARD*T/(r+1) targets count."""
    inputs, targets = shard(r)
    flat = targets.copy().reshape(-1)
    flat[SHARD * T // (r + 1) :] = -100
    return inputs, flat.reshape(targets.shape)


inputs, targets = unequal(rank)
own_count = int((targets != -100).sum())
count = int(comm.all_reduce(np.array([own_count]))[0])
assert count == sum(SHARD * T // (r + 1) for r in range(p))

everything = [np.concatenate(parts) for parts in zip(*(unequal(r) for r in range(p)), strict=True)]
truth = gradient(*everything, count)  # one device, the whole batch at once

right = comm.all_reduce(gradient(inputs, targets, count), algorithm="ordered")
means = comm.all_reduce(gradient(inputs, targets, own_count), algorithm="ordered") / p

assert relative_difference(right, truth) < 1e-14
model = fresh()
ddp = DistributedDataParallel(model, comm, "ordered")
ddp.loss(inputs, targets).backward()
assert same_bits(flat_gradient(model), right)
say(f"targets per rank: {[SHARD * T // (r + 1) for r in range(p)]}, together {count}")
say(f"sum of losses / global count: relative difference from one device {relative_difference(right, truth):.1e}")
say(f"mean of the ranks' means:     relative difference from one device {relative_difference(means, truth):.2f}")

# %% [markdown]
# The wrong version trains. Its loss falls, its curve looks like a loss curve. It just minimizes something else. The
# same mistake over *microbatches* stood in widely used trainers until October 2024, when its effect on fine-tuning with
# padded batches was noticed. Of $m$ microbatches with losses $s_i$ over $n_i$ tokens, each was divided by its own
# count: $\frac1m \sum_i s_i / n_i$ is not $\sum_i s_i / \sum_i n_i$. All $n_i$ must be counted before the first
# backward.
#
# ## 4.7 The real trainer
#
# `minipar.train` is the command-line trainer; a script can use its parts. The configuration is parsed from the same
# flags. `Trainer` runs the same code for one device and for many; only the mesh differs. We train in float64 with
# `--reduction ordered`, and then let `verify` train the same steps on one device and compare every parameter, every
# loss and every gradient norm.

# %%
from minipar.comm import DeviceMesh
from minipar.train.config import parse, resolve
from minipar.train.trainer import Trainer
from minipar.train.verify import OneDevice, verify

if rank == 0:
    show_source(Trainer.step, Trainer._forward_backward, Trainer.backward_microbatch)

BATCH = p * max(1, 8 // p)  # about 8 samples, whatever p is
FLAGS = f"--layers 2 --hidden 64 --heads 4 --seq-len 32 --global-batch {BATCH}"
FLAGS = f"{FLAGS} --seed 3 --lr 3e-3 --dtype float64".split()


def train(*flags, steps=30, kind=Trainer):
    """Train with these flags on all ranks: (trainer, what each step reported)."""
    config = resolve(parse([*FLAGS, "--steps", str(steps), *flags], rank), p)
    trainer = kind(config, DeviceMesh(comm, dp=p), tokens)
    return trainer, list(trainer.train())


trainer, steps = train("--reduction", "ordered")
verdict = verify(trainer, steps, tokens)
assert verdict.passed
say(verdict.line)

# %% [markdown]
# The one device (`OneDevice`) is a trainer that computes all replicas, one after another, and adds their gradients as
# `left_to_right` did in 4.1:

# %%
if rank == 0:
    show_source(OneDevice.accumulate)

# %% [markdown]
# With `ring` the sums have another order. The ranks still hold the same bits as one another, and stay within the stated
# bound of one device. (`show_source(minipar.train.verify.bound)` says where the bound comes from.)

# %%
ring_trainer, ring_steps = train("--reduction", "ring", steps=5)
verdict = verify(ring_trainer, ring_steps, tokens)
assert verdict.passed
say(verdict.line)

# %%
from dataclasses import asdict

frequency = np.bincount(tokens.ids, minlength=256) / len(tokens.ids)
entropy = float(-sum(f * np.log(f) for f in frequency if f > 0))
if rank == 0:
    runs = {f"{p} ranks": [asdict(step) for step in steps]}
    show(plot_loss(runs, entropy, "entropy of single bytes"), "04_loss")
assert steps[-1].loss < steps[0].loss - 1
say(
    f"loss {steps[0].loss:.3f} -> {steps[-1].loss:.3f} nats per byte in {len(steps)} steps (ln 256 = {np.log(256):.3f})"
)

# %% [markdown]
# (We chose seed 3 for a quiet picture. Of seeds 0 to 4, two have a spike of one step, to 6.0 and to 5.2 nats, with a
# batch of 8 samples. One device takes the same batch and has the same spike.)
#
# ### The timeline of the real run
#
# The `cpu` clock advances by each rank's own CPU time between communication calls, and messages carry their sender's
# clock. So it shows what `p` devices of this speed would do, although they share a few cores here. Two steps, on the
# network of 4.4: computation is measured, messages are priced. At this size the all-reduce is short next to the noise
# of computation; the hatching is ranks waiting for a slower one, which no bucket can hide.

# %%
import tempfile
from pathlib import Path

from minipar.comm import Communicator, save_chrome_trace, start_trace

timed = Communicator(comm.transport, clock="cpu", network=NETWORK)
config = resolve(parse([*FLAGS, "--steps", "4"], rank), p)
timed_trainer = Trainer(config, DeviceMesh(timed, dp=p), tokens)
timed_trainer.step(0)  # the first step allocates
start_trace(timed)
for step in (1, 2):
    timed_trainer.step(step)
with tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder) / "trace.json")
    save_chrome_trace(path, timed)
    if rank == 0:
        figure = plot_timeline(read_trace(path))
        figure.axes[0].set_title("two steps of the real trainer", loc="left", fontsize=10)
        show(figure, "04_timeline")

# %% [markdown]
# ### Strong and weak scaling
#
# *Strong scaling* keeps the global batch and adds ranks. If one device computes for $C$ seconds per step,
#
# $$T(p) \;\ge\; \frac{C}{p} + \text{what is not hidden of } 2(p-1)\left(\alpha + \frac{n}{p}\beta\right).$$
#
# The first term falls as $1/p$. The second does not fall at all: its bytes tend to $2n$, its latency grows with $p$. So
# efficiency $C / (p\,T(p))$ must fall, and the batch per rank runs out in the end. *Weak scaling* keeps the batch per
# rank and lets the global batch grow. Then computation stays, and data parallelism scales until the batch is larger
# than training can use (McCandlish et al. 2018, arXiv 1812.06162). Naive all-reduce on the cluster of 4.4, a global
# batch of 64 samples:

# %%
if rank == 0:
    C, n = 3 * big.forward_flops(batch=64, length=64) / SPEED, 4 * big_psi
    say("ranks  computation  all-reduce  efficiency, nothing hidden  at best (all hidden behind backward)")
    for q in (1, 2, 4, 8, 16, 32, 64):
        compute, reduce = C / q, 2 * (q - 1) * NETWORK.seconds(n / q)
        best = compute / 3 + max(compute * 2 / 3, reduce)
        efficiency = f"{C / q / (compute + reduce):>14.0%} {C / q / best:>22.0%}"
        say(f"{q:>5}  {compute * 1e3:>8.2f} ms {reduce * 1e3:>8.2f} ms {efficiency}")

# %% [markdown]
# ## 4.8 Exercises: break it, and see what notices
#
# Four mistakes, all of them found in real code. Each is made here on purpose and run. We look with four instruments:
#
# - **loss**: is the last loss visibly different, by more than 5 %, from the correct run?
# - **ranks**: do all ranks hold the same parameters?
# - **bytes**: do the counted bytes equal the formula?
# - **verify**: does one device get the same parameters, losses and gradient norms?
#
# Before you read on: which instrument catches which mistake?
#
# 1. **Drop one bucket.** Its gradients are never synchronized.
#
# 2. **Divide by the wrong count.** Each rank divides by its own count, then the sum is taken: $p$ times too large.
#
# 3. **All-reduce weights instead of gradients.** Each rank steps on its own gradient, then weights are averaged.
#
# 4. **Average the ranks' means** with unequal counts (4.6).

# %%
from minipar.comm import serial


class DropsABucket(DistributedDataParallel):
    """Mistake 1: the first bucket is "summed" over this rank alone."""

    def _start(self, bucket):
        comm = self.comm
        if bucket is self.buckets[0]:
            self.comm = serial()
        super()._start(bucket)
        self.comm = comm


class LocalCount(DistributedDataParallel):
    """Mistake 2: as if each rank had divided its summed loss by its own count, N/p, and not by N."""

    def synchronize(self):
        super().synchronize()
        self.buffers.gradients *= self.comm.size


class KeepsGradients(DistributedDataParallel):
    """For mistake 3: gradients stay where they are, as if each rank were alone."""

    def __init__(self, model, comm, algorithm, groups):
        super().__init__(model, serial(), algorithm, groups=groups)


def with_ddp(ddp_class):
    """A Trainer that uses `ddp_class`, with the trainer's own buckets: one for each block, one for the rest."""

    class Broken(Trainer):
        def __init__(self, config, mesh, tokens):
            super().__init__(config, mesh, tokens)
            self.ddp.detach()
            self.ddp = ddp_class(self.model, mesh.dp, config.run.reduction, groups=by_unit(self.model))

    return Broken


class AveragesWeights(with_ddp(KeepsGradients)):
    """Mistake 3."""

    def step(self, step):
        result = super().step(step)
        for bucket in self.ddp.buckets:
            weights = self.ddp.buffers.parameters[bucket.start : bucket.stop]
            self.mesh.dp.all_reduce(weights, algorithm="ordered")
            weights /= self.mesh.dp.size
        return result


# %% [markdown]
# Trained for 5 steps each, next to the correct trainer.

# %%
from minipar.train import verify as checks

STEPS = 5


def examine(name, kind):
    """Train, then read the four instruments; the same answer on every rank."""
    comm.traffic.reset()
    trainer, run = train("--reduction", "ordered", steps=STEPS, kind=kind)
    sent = comm.traffic.bytes("all_reduce", "dp")
    per_step = sum(wire_bytes("all_reduce", "ordered", b.size, 8, p, rank) for b in trainer.ddp.buckets)
    per_step += wire_bytes("all_reduce", "ordered", 1, 8, p, rank)  # the loss
    seen = {
        "loss": abs(run[-1].loss / correct - 1) > 0.05,
        "ranks": not checks.same_on_all_ranks(trainer),
        "bytes": not everywhere(sent == STEPS * per_step),
    }
    verdict = verify(trainer, run, tokens)
    seen["verify"] = not verdict.passed
    eyes = "  ".join(f"{eye} {'CAUGHT' if caught else '-':<6}" for eye, caught in seen.items())
    say(f"{name:<28} loss {run[-1].loss:.4f} after {STEPS} steps   {eyes}")
    return seen, verdict.line


correct = steps[STEPS - 1].loss  # of the right run, in 3.7
fine, _ = examine("nothing broken", with_ddp(DistributedDataParallel))
assert not any(fine.values())

lines = {}
for name, kind, catching in (
    ("1. one bucket not sent", with_ddp(DropsABucket), {"ranks", "bytes", "verify"}),
    ("2. divided by local count", with_ddp(LocalCount), {"verify"}),
    ("3. weights, not gradients", AveragesWeights, {"verify"}),
):
    seen, lines[name] = examine(name, kind)
    if p > 1:  # with one rank there is nothing to forget
        assert catching <= {eye for eye, caught in seen.items() if caught}, (name, seen)

for name, line in lines.items():
    say(f"\n{name}\n  {'caught: ' if 'FAILED' in line else ''}{line}")

# %% [markdown]
# Three lessons.
#
# **The loss curve is a poor witness.** All of these runs learn.
#
# **Mistake 2 is nearly invisible to AdamW.** It divides each gradient by the root of its own running square, so a
# constant factor cancels: the parameters move as they should, up to `eps`. Only the gradient *norm*, which `verify`
# compares too, is $p$ times too large. The mistake shows when clipping is turned on, or with SGD.
#
# **Mistake 3 would be right with plain SGD.** For $\theta \leftarrow \theta - \eta\, g$ the average of the updated
# weights is the update with the averaged gradient. It is wrong as soon as gradients are clipped, because each rank then
# clips by the norm of its own gradient. And AdamW is not linear in $g$: the mean of $g_r/\sqrt{v_r}$ is not
# $\bar g/\sqrt{\bar v}$. Replicas agree, the bytes are right, the loss falls; only the comparison with one device
# objects.
#
# Mistake 4 needs unequal counts to exist at all:

# %%
equal_truth = gradient(*batches.batch(0, range(p * SHARD)), N)
equal_means = comm.all_reduce(gradient(*shard(rank), SHARD * T), algorithm="ordered") / p
equal_difference, unequal_difference = relative_difference(equal_means, equal_truth), relative_difference(means, truth)
assert equal_difference < 1e-14
assert same_on_all_ranks(means)
say(f"4. mean of means, equal counts:   {equal_difference:.1e} from one device: nothing to see")
if p > 1:
    assert unequal_difference > 0.01
    say(f"4. mean of means, unequal counts: {unequal_difference:.2f} from one device")
    say("caught: by the comparison with one device, and only because the test used unequal counts")

# %% [markdown]
# ## 4.9 PyTorch's names, problems and answers
#
# ### PyTorch's names
#
# | minipar | PyTorch | Megatron-LM, DeepSpeed |
# | --- | --- | --- |
# | `DistributedDataParallel(model, comm)` | `DistributedDataParallel(model)` | the same name in Megatron-LM |
# | `ddp.loss`: the global mean | a local mean; DDP averages over ranks | `calculate_per_token_loss` |
# | `bucket_bytes`, 25 MiB | `bucket_cap_mb`, 25 | `--ddp-bucket-size`, `reduce_bucket_size` |
# | overlap, always | always | `--overlap-grad-reduce`, `overlap_comm` |
# | `register_post_accumulate_grad_hook` | the same name | |
# | `no_sync` | `no_sync` | `no_sync_func` |
# | `FlatBuffers` | `gradient_as_bucket_view=True` | the contiguous gradient buffer |
# | `all_reduce(..., async_op=True)`, `wait` | the same names in `torch.distributed` | |
#
# ### Worked problems
#
# 1. A model has 1.5 billion parameters and fp32 gradients. How many GB does each rank send per step, among 8 ranks and
# among 1,024?
#
# 2. 64 ranks all-reduce 6 GB of gradients; $\alpha = 10\,\mu s$, $1/\beta$ = 25 GB/s. How long do the bytes take? How
# much latency is added with one bucket, and with buckets of 25 MiB? How large must a bucket be so that the latency is
# at most 5 % of the bytes' time?
#
# 3. Rank 0 has 100 tokens, whose losses add up to 200. Rank 1 has 28 tokens, whose losses add up to 84. What is the
# mean loss, and what is the mean of the ranks' means?
#
# 4. Four ranks hold $10^{16}$, $1$, $-10^{16}$ and $1$ in every element. Which sum does `ordered` give in float64, and
# which does `ring` give in each of its four chunks?

# %%
gigabytes = [2 * 1.5e9 * 4 * (q - 1) / q / 1e9 for q in (8, 1024)]
assert [round(value, 2) for value in gigabytes] == [10.5, 11.99]
say(f"1. {gigabytes[0]:.1f} GB and {gigabytes[1]:.2f} GB: 128 times as many ranks send 14 % more each")

latency, wire = 2 * 63 * 10e-6, 2 * 63 / 64 * 6e9 / 25e9  # of one bucket; of all bytes
in_buckets = math.ceil(6e9 / (25 * 2**20)) * latency
at_most = int(0.05 * wire / latency)
assert [round(1e3 * value, 2) for value in (wire, latency, in_buckets)] == [472.5, 1.26, 288.54] and at_most == 18
say(f"2. bytes {wire * 1e3:.1f} ms; latency {latency * 1e3:.2f} ms, or {in_buckets * 1e3:.1f} ms in 25 MiB buckets;")
say(f"   at most {at_most} buckets, so {6e9 / at_most / 1e6:.0f} MB or more in each")

mean, of_means = (200 + 84) / (100 + 28), (200 / 100 + 84 / 28) / 2
assert (mean, of_means) == (2.21875, 2.5)
say(f"3. {mean}; the mean of means is {of_means}: a token of rank 1 counts 100/28 times as much as one of rank 0")


def sums(comm):
    array = np.full(4, [1e16, 1.0, -1e16, 1.0][comm.rank])
    return [comm.all_reduce(array.copy(), algorithm=algorithm).tolist() for algorithm in ("ordered", "ring")]


if rank == 0:
    in_order, around = run_local(4, sums)[0]
    assert in_order == [1, 1, 1, 1] and around == [0, 1, 0, 1]
    say(f"4. ordered {in_order}, ring {around}; the exact sum is 2. Chunk 0 is added in the order of ranks 1, 2, 3, 0:")
    say("   1 - 1e16 and the next sum lose a one each, since float64 values near 1e16 are 2 apart; 1e16 then leaves 0")

# %% [markdown]
# ### For you
#
# 1. In `_on_gradient`, buckets start strictly in order. Let a bucket start as soon as it is complete, whatever came
# before. For this GPT nothing breaks. Which kind of model would break it, and what would you see: an error, a hang, or
# wrong values?
#
# 2. In the picture of 4.4, which two parameters make the tail, and how would you shorten it?
#
# 3. Every rank holds all $\Psi$ parameters, all gradients, both AdamW moments, and after the all-reduce every rank
# takes the very same optimizer step. The all-reduce is a reduce-scatter followed by an all-gather. What could be done
# *between* the two, so that each rank keeps only $1/p$ of the optimizer's state, for the same bytes? (That is ZeRO
# stage 1: Rajbhandari et al. 2020, arXiv 1910.02054.)
#
# ### Answers
#
# 1. A model whose ranks complete gradients in different orders: one whose path depends on the data, such as layers that
# are skipped or experts that some ranks do not use. Then collectives of different buckets meet. Buckets of equal size
# give wrong values without any sign. Of unequal size they give an error where lengths are checked, and a hang
# elsewhere.
#
# 2. The token and the position embedding, the first parameters. The head's part of the token embedding's gradient is
# complete at the very beginning. It could be summed over the ranks by itself at once, and the lookup's part at the end
# as the few rows of the tokens that occurred. Without a tie, the head's gradient leaves first and only the lookup's is
# late.
#
# 3. After the reduce-scatter rank $r$ has chunk $r$ of the summed gradient. It updates chunk $r$ of the parameters, for
# which alone it keeps AdamW's moments, and the all-gather carries updated parameters. Chapter 5 builds this.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
