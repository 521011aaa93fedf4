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
# **How do $d$ ranks train one model as if they were one device?**
#
# Eight GPUs hold the same model. Each computes the gradient of an eighth of the batch, then they add up their
# gradients, and each takes the same step. A network of 4 GB/s needs 0.400 ms for the sum, and the GPUs wait. If the sum
# is cut into pieces, much of it disappears behind computation that must be done anyway. With the same batch on 64 GPUs
# little is left to hide behind. And there are mistakes with which such a program still learns. At the end of this
# chapter you can write the program, say what it costs, and prove that it is right: it computes the bits of one device
# that adds the same parts in the same order.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import math
from functools import partial

import numpy as np

import minipar as mp
from chapters.support.ch04 import watch
from chapters.support.ch04.sizes import by_size
from chapters.support.instruments import same_bits, same_on_all_ranks
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from chapters.support.whole_runs import relative_difference
from minipar.comm import Network, chunk_bounds, wire_bytes, world
from minipar.parallel.buckets import BackwardHooks
from minipar.parallel.ddp import DistributedDataParallel
from minipar.parallel.loss import global_mean_loss
from minipar.train.data import Batches, load_tokens

if world().rank == 0:
    from chapters.support.ch04 import figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source
    from visualize import plot_timeline

# %%
comm = world()  # a rank is one process; think of one GPU
rank, d = comm.rank, comm.size  # this rank, and the number of ranks
say = printer(rank)  # rank 0 prints and draws; every rank checks
say(f"{d} rank{'s' if d > 1 else ''}")
if rank == 0:
    completed = [("ln_f", 0.9, 0), ("h1.mlp", 3, 0), ("h1.attn", 2, 1), ("h0.mlp", 3, 1), ("h0.attn", 2, 2)]
    show(figures.draw_life_of_buckets([*completed, ("wte", 1.4, 2)], sending=[3.6, 4.4, 2.2]), "04_life_of_a_bucket")

# %% [markdown]
# One training step on one rank, from left to right. Backward computes gradients from the last layer to the first. As
# soon as a *bucket* of them (here two) is complete, it travels, while backward goes on. When backward ends, the
# rank waits (`synchronize`) for what is still under way. Section 4.4 builds this. The sections before it show that the
# sum is right and what it costs. Among the strategies of this course data parallelism stands here:

# %%
if rank == 0:
    show(draw_strategies(["dp"]), "04_here")

# %% [markdown]
# ## 4.1 The gradient of a sum is the sum of the gradients
#
# *Core, 6 minutes.*
#
# Every rank holds a whole copy of the model, a *replica*. A training step works on a *global batch* of samples. Each of
# the $d$ ranks takes $1/d$ of it, its *shard*. Say a rank has $B$ samples of $T$ tokens, so $N = BT$ tokens.
#
# Let token $i$ of the global batch have the loss $\ell_i$. There are $d$ shards of $N$ tokens. Training minimizes the
# mean over all of them, and differentiation is linear:
#
# $$\ell = \frac{1}{dN} \sum_i \ell_i
# \qquad\Longrightarrow\qquad
# \nabla \ell = \sum_{r=0}^{d-1} G_r, \quad G_r = \frac{1}{dN} \sum_{i \text{ in shard } r} \nabla \ell_i .$$
#
# Rank $r$ computes $G_r$: the gradient of the **sum** of its losses, divided by the **global** count $dN$. Then one sum
# over ranks, an *all-reduce*, gives everybody $\nabla \ell$. It does not matter how many tokens each rank holds.
#
# The text is the source of Python's standard library, one token per byte. The model is a GPT-2 of toy size, in float64.

# %%
B, T = 2, 16
N = B * T
config = mp.GPTConfig(vocab_size=256, n_positions=T, n_embd=32, n_layer=2, n_head=4)
text = load_tokens(None, vocab_size=256, seq_len=T)
batches = Batches(text, length=T, global_batch=d * B, order="random", seed=0)


def fresh():
    """The same model on every rank: initial weights are keyed by name, never by rank."""
    return mp.GPT(config, dtype="float64")


def shard(r, step=0):
    """Inputs and targets of rank r, (B, T) each."""
    return batches.batch(step, range(r * B, (r + 1) * B))


def backward(model, inputs, targets, count):
    """Add the gradient of (sum of losses) / count to the model's gradients."""
    loss = model.loss_sum(inputs, targets)
    loss.backward(np.full_like(loss.data, 1 / count))


def flatten(parameters):
    """The gradients of these parameters, one after another, as one flat array."""
    for parameter in parameters:
        parameter.fold_tied_gradients()  # GPT-2's head is its token embedding: two gradients of one matrix
    return np.concatenate([parameter.grad.reshape(-1) for parameter in parameters])


def set_gradient(parameters, flat):
    """Give each of the parameters its part of a flat array as its gradient."""
    stops = np.cumsum([parameter.size for parameter in parameters])
    for parameter, part in zip(parameters, np.split(flat, stops[:-1]), strict=True):
        parameter.grad = part.reshape(parameter.shape)


def gradient(inputs, targets, count, make=fresh):
    """The gradient of a fresh model, flat."""
    model = make()
    backward(model, inputs, targets, count)
    return flatten(model.parameters())


G = [gradient(*shard(r), d * N) for r in range(d)]  # every rank computes all d of them here, to have a reference
whole = gradient(*batches.batch(0, range(d * B)), d * N)
Psi = whole.size
difference = relative_difference(sum(G), whole)
assert difference < 1e-14
say(f"gradient of the whole batch = sum of {d} shards' gradients: {Psi:,} values, relative difference {difference:.1e}")

# %% [markdown]
# Why not exactly zero? The whole batch goes through larger matrix products, which add the same values in another order,
# and floating-point addition is not associative: `(0.1 + 0.2) + 0.3` is `0.6000000000000001`, and `0.1 + (0.2 + 0.3)`
# is `0.6`. So a fair reference must do the same products and the same sums. It is *one device that takes the shards one
# after another and adds their gradients in rank order*, $((G_0 + G_1) + G_2) + \dots$, as gradient accumulation does.
# Each $G_r$ is one flat array here, so that it can be added, or sent, as one.

# %% [markdown]
# ## 4.2 Naive: one all-reduce after backward
#
# *Core, 8 minutes.*
#
# Each rank runs backward on its own shard. Then one all-reduce sums the whole flat gradient over the ranks. Chapter 3
# has two all-reduces that matter here. Both cut the array into $d$ *chunks*, one per rank, sum each, and gather the
# results. They differ in the order of additions:
#
# - `ordered` brings all contributions to a chunk's owner, who adds them in rank order $0, 1, \dots, d-1$. It should
#   give the reference's bits.
#
# - `ring` lets a partial sum travel once round the ring. Chunk $r$ starts at rank $r+1$, so it is added in the order
#   $r+1, r+2, \dots, r$ (modulo $d$). It should agree with the reference except in the last bits. And one device can
#   predict its bits, chunk by chunk.
#
# **Predict**: one chunk of the ring's sum has the reference's bits exactly. Which one?


# %%
predict("the chunk without a difference", ...)  # replace the dots by a number from 0 to d - 1


# %%
def left_to_right(arrays):
    """((a_0 + a_1) + a_2) + ...: one device that accumulates."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


expected = left_to_right(G)
ordered = comm.all_reduce(G[rank].copy(), algorithm="ordered")  # this line is data parallelism
ring = comm.all_reduce(G[rank].copy(), algorithm="ring")

predicted = np.empty(Psi)
for r, (start, stop) in enumerate(chunk_bounds(Psi, d)):
    predicted[start:stop] = left_to_right([G[(r + k) % d][start:stop] for k in range(1, d + 1)])

assert same_bits(ordered, expected)
assert same_bits(ring, predicted) and same_bits(ring[start:stop], expected[start:stop])  # the last chunk
assert relative_difference(ring, expected) < 1e-15 * d
assert same_on_all_ranks(comm, ring)
unequal = [int((ring[a:b] != expected[a:b]).sum()) for a, b in chunk_bounds(Psi, d)]
say(f"ordered: {d} ranks = 1 device, bit for bit, in all {Psi:,} gradients")
say(f"ring:    within {relative_difference(ring, expected):.1e}; {sum(unequal):,} gradients differ in their last bits")
say("ring:    its bits are those of its order of sums, the same on all ranks")
if d > 2:
    reveal("the chunk without a difference", unequal.index(0), say)
if rank == 0:
    show(figures.plot_differing(unequal), "04_differing")

# %% [markdown]
# Chunk $d-1$ is added in the order $0, 1, \dots, d-1$, as on one device. (With two ranks there are no two orders:
# $a + b = b + a$ holds in floating point too.)
#
# That every rank holds the *same* bits is what keeps replicas equal over thousands of steps. It holds because each
# chunk is summed once, by one rank, and then copied.
#
# Around that line a training loop needs what joins the gradients of all parameters to one array, and what gives each
# parameter its part of the sum. This is naive data parallelism, whole:


# %%
def all_reduce_gradients(model):
    """After backward, sum the whole gradient over the ranks in one all-reduce."""
    total = comm.all_reduce(flatten(model.parameters()), algorithm="ordered")
    set_gradient(model.parameters(), total)


replica = fresh()
backward(replica, *shard(rank), count=d * N)
all_reduce_gradients(replica)
assert same_bits(flatten(replica.parameters()), expected)
say("a replica's backward and one all-reduce: the gradients of one device, bit for bit")

# %% [markdown]
# ## 4.3 What it costs on the wire
#
# *Core, 3 minutes.*
#
# With $\Psi$ parameters a chunk has $\Psi/d$ elements. In either algorithm a rank sends $d-1$ chunks in the first half,
# the reduce-scatter, and $d-1$ in the second, the all-gather:
#
# $$2 \Psi \frac{d-1}{d} \text{ elements},$$
#
# which is the least that any all-reduce can do (Patarasuk and Yuan 2009). Between two ranks it is $\Psi$; it grows with
# $d$ and stays below $2\Psi$. From 8 ranks to 1,024 it grows by 14 % only. That is why data parallelism scales so far.
# ($\Psi$ is seldom divisible by $d$. `wire_bytes` is the formula with the true sizes of the chunks, so the comparison
# can be `==`.)

# %%
comm.traffic.reset()
comm.all_reduce(G[rank].copy(), algorithm="ring")
sent = comm.traffic.bytes("all_reduce")
assert sent == wire_bytes("all_reduce", "ring", Psi, 8, d, rank)
assert int(comm.all_reduce(np.array([sent]))[0]) == 2 * Psi * (d - 1) * 8
say(f"rank 0 sent {sent:,} bytes; 2 Psi (d-1)/d * 8 = {2 * Psi * (d - 1) / d * 8:,.1f}")
say(f"all ranks together sent {2 * Psi * (d - 1) * 8:,} = 2 Psi (d-1) * 8 bytes")

# %% [markdown]
# ## 4.4 Overlap: communicate while backward still runs
#
# *Core, 14 minutes.*
#
# The naive form leaves the wire idle during backward, and then the processor idle during the all-reduce. But backward
# completes gradients one by one, from the last layer to the first. The last layer's could travel while the first
# layer's are still being computed.
#
# Here is the idea on three plain arrays. Backward completes gradient 0, then 2, then 1, and calls `complete` each time.
# With `async_op=True` an all-reduce only starts, so backward goes on, and the rank waits at the end. The sum then
# stands in the array that was given. Collectives match by order: the first that rank 0 starts is added to the first
# that rank 1 starts. So the gradients leave in the order 0, 1, 2 on every rank, whatever the order in which they are
# completed: gradient 2 waits for gradient 1.

# %%
gradients = [np.full(4, float(rank)) for _ in range(3)]
completed = set()
under_way = []  # the all-reduces that have left
leaves = []  # (a gradient, the one whose completion lets it leave)


def complete(number):
    """Note that this gradient is complete, and start all that may leave now."""
    completed.add(number)
    while len(under_way) in completed:  # the next to leave has this number
        leaves.append((len(under_way), number))
        under_way.append(comm.all_reduce(gradients[len(under_way)], algorithm="ordered", async_op=True))


for number in (0, 2, 1):  # backward
    complete(number)
for work in under_way:
    assert (work.wait() == sum(range(d))).all()
for leaving, number in leaves:
    say(f"gradient {leaving} leaves when gradient {number} is complete")
assert leaves == [(0, 0), (1, 1), (2, 1)]

# %% [markdown]
# One all-reduce per parameter would pay the *latency* $\alpha$, the time of an empty message, $2(d-1)$ times for each.
# PyTorch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704, section 3.2) therefore groups neighbouring
# parameters into *buckets*:
#
# 1. Buckets are cut in **reverse parameter order**, which is about the order in which backward completes gradients.
#
# 2. A **hook** on each parameter fires when its gradient is complete. The last one in a bucket starts that bucket's
# all-reduce, asynchronously.
#
# 3. Buckets start **strictly in order**, even if a later one is complete first. If rank 0 started bucket 3 and rank 1
# bucket 4, they would add up different parameters. If the buckets' lengths differ, minipar reports it (3.10).
# Where lengths are not checked, a rank can wait for messages that no other rank sends: a hang. If the lengths happen to
# be equal, nothing is reported and the sums are wrong.
#
# 4. When backward ends, `synchronize` waits for what is still under way.
#
# The chapter's first picture shows rules 1, 2 and 4. There bucket 2 is full when backward ends, but the wire is still
# busy with bucket 1, and `synchronize` waits for both.
#
# How does a parameter know that its gradient is complete? Before backward starts, the engine counts how often each
# parameter is used. It counts down with each contribution, and at zero it calls the parameter's hooks
# ([chapter 1](01_autograd.ipynb)). A bucket does the same one level higher: it counts its parameters down, and at zero
# it leaves.
#
# Buckets change *when* things are sent. They must not change what arrives: with `ordered`, the reference's bits for any
# bucket size, and all ranks together send not one byte more than by the formula of 4.3. **[Exercise
# 4](exercises/e04_ddp_bucket.py)** asks for one bucket: `make exercises PYTEST="-k e04"`. The model here is a small
# Llama (Meta's open model), whose parameters are used once each.


# %%
def cut(parameters, elements):
    """Group parameters in reverse order into buckets of `elements` or more."""
    buckets = [[]]
    for parameter in reversed(parameters):
        if sum(member.size for member in buckets[-1]) >= elements:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def backward_with_buckets(model, elements):
    """Backward on this rank's shard, with overlap. Return for each bucket when it left and its size."""
    buckets = cut(model.parameters(), elements)
    missing = [len(bucket) for bucket in buckets]
    under_way = []  # of each bucket that has left: its flat array, and the all-reduce
    completed = []
    log = []

    def hook(number, parameter):  # backward calls it when the parameter's gradient is complete
        completed.append(parameter)
        missing[number] -= 1
        while len(under_way) < len(buckets) and missing[len(under_way)] == 0:  # strictly in order
            flat = flatten(buckets[len(under_way)])
            under_way.append((flat, comm.all_reduce(flat, algorithm="ordered", async_op=True)))
            log.append((len(completed), flat.size))

    for number, bucket in enumerate(buckets):
        for parameter in bucket:
            parameter.register_post_accumulate_grad_hook(partial(hook, number))
    backward(model, *shard(rank), d * N)
    for bucket, (flat, work) in zip(buckets, under_way, strict=True):  # synchronize
        work.wait()
        set_gradient(bucket, flat)
    return log


# %% [markdown]
# Three sizes of buckets, from one parameter in each to one bucket for all:


# %%
def llama():
    """A small Llama, the same on every rank. Its head has a matrix of its own."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return mp.Llama(mp.LlamaConfig(vocab_size=256, max_position_embeddings=T, **sizes), dtype="float64")


right = left_to_right([gradient(*shard(r), d * N, llama) for r in range(d)])  # one device
for elements in (1, right.size, 4096):
    model = llama()
    comm.traffic.reset()
    log = backward_with_buckets(model, elements)
    assert same_bits(flatten(model.parameters()), right)
    formula = sum(wire_bytes("all_reduce", "ordered", size, 8, d, rank) for _, size in log)
    assert comm.traffic.bytes("all_reduce") == formula and sum(size for _, size in log) == right.size
    buckets = "bucket" if len(log) == 1 else "buckets"
    say(f"{len(log):>2} {buckets}: the bits of one device, and {formula:,} bytes sent by rank 0 as the formula says")
for number, (complete, size) in enumerate(log):
    say(f"bucket {number}: {size:>6,} values, left when {complete:>2} of {log[-1][0]} gradients were complete")
if rank == 0:
    show(figures.plot_departures(log), "04_departures")

# %% [markdown]
# Bucket 0, the head, leaves at once, and bucket 6, the embedding, with the last gradient. Buckets 3, 4 and 5 leave
# together. Bucket 3 holds the first norm of layer 0. Llama lists a layer's norms after its matrices, and backward
# completes this one last in the layer. The other two wait for their turn: buckets start strictly in order.
#
# If a parameter is used several times, these buckets leave too early. **[Exercise 23](exercises/e23_early_hook.py)**
# asks you to find that in a log and to mend it: `make exercises PYTEST="-k e23"`. Try it before you read on.

# %% [markdown]
# ### A matrix that is used twice
#
# *Deeper, 3 minutes.*

# %% [markdown]
# GPT-2's output head and its token embedding share one matrix. Each use collects its
# gradient in a *leaf* of its own, and the second leaf is in `parameter.ties`. A bucket must wait for both. Three lines
# change (`flatten` adds up the two gradients already):
#
# ```python
# missing = [sum(1 + len(parameter.ties) for parameter in bucket) for bucket in buckets]
# ...
#         for leaf in (parameter, *parameter.ties):
#             leaf.register_post_accumulate_grad_hook(partial(hook, number))
# ```
#
# So the token embedding's bucket, the last one, waits for the lookup, although the head's part was complete first.
# The library's buckets below do the same, with GPT-2.

# %% [markdown]
# ### In the library
#
# *Deeper, 4 minutes.*

# %% [markdown]
# The library's version adds three things to ours. The gradients of a bucket lie in one flat array, `bucket.gradient`,
# so backward writes straight into what is sent and nothing is copied. It serves many steps: `synchronize` sends zeros
# for what the loss did not use, and starts again. And each hook calls `progress`, which moves the messages under way
# while backward goes on.
#
# The hook is `BackwardHooks.on_gradient`, a helper that the ZeRO stages use, too (chapter 5). Instead of a count,
# `incomplete` has for each bucket the set of leaves that are missing. A gradient for a bucket that has been sent is an
# error: it would be added to an array that is being summed.

# %%
if rank == 0:
    show_source(BackwardHooks.on_gradient)

# %% [markdown]
# `send` is `ddp.reduce`, which starts the all-reduce of a bucket's flat array, in place. Before that
# `bucket.complete()` folds the ties and writes the zeros. `synchronize`, which every stage of ZeRO has too, waits for
# the all-reduces. All of it is in `minipar/parallel/ddp.py` and `buckets.py`.
#
# Two details. Arrays that $d$ does not divide have uneven chunks. They fall differently in many small buckets than in a
# large one, so the bytes of one rank may vary by a few elements with the size of the buckets; those of all ranks
# together do not. And with `ring` the *bits* depend on the size of the buckets: it decides in which chunk an element
# lies, and so in which order it is summed.

# %% [markdown]
# ### Seeing it
#
# *Core, 4 minutes.*
#
# To see time we need a clock that shows what 8 devices on a real network would do, not what 8 processes on this machine
# do. minipar's `model` clock is one (chapter 3). Computation moves it by floating-point operations divided by a speed;
# a message of $n$ bytes arrives $\alpha + \beta n$ after it was sent. The program that runs is the real one, with real
# buckets and real messages. Only its durations come from the model, so they are exact and repeatable.
#
# `simulate` runs 8 devices as threads of rank 0. Each does $10^{12}$ operations per second. The network is slow for
# that: $\alpha = 1\,\mu s$, $1/\beta = 4$ GB/s. Forward costs what its matrix products cost, backward twice that,
# charged as each parameter's gradient is completed: 0.50 ms. The model is a GPT-2 of 220,544 float32 parameters. First
# the naive step, then one with 7 buckets of about 128 KiB.
#
# **Predict**: the naive step waits 0.400 ms for its all-reduce. The last bucket holds 9 % of the bytes and can leave
# only when backward ends; each bucket costs $2(d-1)\alpha = 14\,\mu s$ of latency. Which share of the 0.400 ms do the
# buckets hide?

# %%
predict("share of the all-reduce that 7 buckets hide", ...)  # replace the dots by a value from 0 to 1

# %%
if rank == 0:
    run = watch.simulate([128 * 1024])
    naive, overlapped = run.steps
    figure = plot_timeline(run.trace)
    figure.axes[0].set_title("left: one all-reduce after backward; right: buckets of 128 KiB", loc="left", fontsize=10)
    show(figure, "04_overlap")

    exposed = naive.seconds - watch.COMPUTATION
    assert abs(exposed - watch.all_reduce_seconds(watch.ELEMENTS, 8)) < 1e-12
    hidden = (naive.seconds - overlapped.seconds) / exposed
    assert [round(s * 1e3, 3) for s in (naive.seconds, exposed, overlapped.seconds)] == [1.155, 0.400, 0.830]
    assert overlapped.buckets == 7 and round(hidden, 2) == 0.81
    assert round(watch.bucket_shares(128 * 1024)[-1], 2) == 0.09
    say(f"naive {naive.seconds * 1e3:.3f} ms, of which the all-reduce {exposed * 1e3:.3f} ms")
    say(f"{overlapped.buckets} buckets: {overlapped.seconds * 1e3:.3f} ms")
    reveal("share of the all-reduce that 7 buckets hide", round(hidden, 2), say)

# %% [markdown]
# A hatched piece says that the rank waits for messages which have not left their senders yet. All ranks enter the naive
# all-reduce together, but the seven messages of a sender leave one after the other. So the hatched pieces are time of
# the wire, too: no rank is late.
#
# One all-reduce after backward exposes 0.400 ms of 1.155 ms, which is $2(d-1)(\alpha + \beta n/d)$. With 7 buckets a
# step takes 0.830 ms, and 81 % of the all-reduce is hidden: on the right most of it lies under backward. What sticks
# out is the *tail*: the rest of the bucket that is under way when backward ends, and the whole last bucket, which
# cannot start before. The last bucket consists almost only of the first two parameters, the token and the position
# embedding. Backward reaches them last, and the output head, which is tied to the token embedding, waits with them. In
# the real GPT-2 (124 million parameters) the token embedding is almost a third of all bytes, which nothing hides.

# %% [markdown]
# ### How large should a bucket be?
#
# *Deeper, 6 minutes.*

# %% [markdown]
# With $k$ buckets of $n/k$ bytes, the ring needs in all
#
# $$2(d-1)\left(k\,\alpha + \frac{n}{d}\,\beta\right) \text{ seconds}.$$
#
# The bytes cost the same, the latency $k$ times as much. With 22 buckets, the most below, communication takes 0.69 ms,
# of which 0.31 ms are latency. Backward, which is to hide it, takes 0.50 ms. A single huge bucket
# starts when backward ends, and nothing is hidden. In between there is a best size.

# %%
if rank == 0:
    naive, *steps = watch.simulate([1024, *(2**k for k in range(15, 21))]).steps
    show(
        figures.plot_bucket_sizes(map(vars, steps), naive=naive.seconds, computation=watch.COMPUTATION),
        "04_bucket_size",
    )
    best = min(steps, key=lambda step: step.seconds)
    assert best.bucket_bytes == 128 * 1024 and steps[-1].buckets == 1
    assert abs(steps[-1].seconds - naive.seconds) < 1e-12  # one bucket is the naive form
    assert [round(step.seconds * 1e3, 3) for step in (best, steps[0], steps[-1])] == [0.830, 0.983, 1.155]
    latency = 14 * steps[0].buckets * watch.NETWORK.alpha
    on_the_wire = watch.all_reduce_seconds(watch.ELEMENTS, 8) + latency * (1 - 1 / steps[0].buckets)
    to_hide_it = watch.COMPUTATION * 2 / 3
    assert [round(seconds * 1e3, 2) for seconds in (on_the_wire, latency, to_hide_it)] == [0.69, 0.31, 0.50]

# %% [markdown]
# Here 128 KiB are best: 7 buckets and 0.830 ms. The smallest buckets take 0.983 ms, one bucket 1.155 ms, exactly the
# naive form.
#
# **A rule.** The last bucket leaves when backward ends, so the time of its bytes, $2\frac{d-1}{d}\frac{n\beta}{k}$, is
# exposed. As long as the wire is busy, the latency of all buckets, $2(d-1)\,k\,\alpha$, delays this last one. The sum
# of the two is least where both are equal:
#
# $$ k = \sqrt{\frac{n\,\beta}{d\,\alpha}} \text{ buckets, whatever the model computes.} $$
#
# We hold it against the simulation on five networks, with the seven sizes of above. `step_of` computes a step without
# threads: a bucket starts when it is complete and the wire is free.


# %%
def step_of(shares, network):
    """Return the seconds of a step. shares: the part of all gradients that each bucket has, in order of backward."""
    now = wire = watch.COMPUTATION / 3  # forward
    for share in shares:
        now += share * watch.COMPUTATION * 2 / 3  # backward
        wire = max(wire, now) + watch.all_reduce_seconds(round(share * watch.ELEMENTS), 8, network)
    return wire


if rank == 0:
    tried = [watch.bucket_shares(step.bucket_bytes) for step in steps]
    for shares, step in zip(tried, steps, strict=True):
        assert abs(step_of(shares, watch.NETWORK) - step.seconds) < 1e-12
    longer = []
    say("alpha (us)   GB/s   buckets: the rule, nearest tried, best   a step is longer than the best by")
    for alpha, speed in ((1e-6, 4e9), (4e-6, 4e9), (0.25e-6, 4e9), (1e-6, 8e9), (1e-6, 2e9)):
        k = math.sqrt(4 * watch.ELEMENTS / speed / (8 * alpha))
        network = Network(alpha, 1 / speed)
        nearest = min(tried, key=lambda shares: abs(math.log(len(shares) / k)))
        best = min(tried, key=lambda shares: step_of(shares, network))
        longer.append(step_of(nearest, network) / step_of(best, network) - 1)
        numbers = f"{k:17.1f} {len(nearest):13} {len(best):5}"
        say(f"{alpha * 1e6:10} {speed / 1e9:6.0f} {numbers} {longer[-1]:35.1%}")
    assert round(max(longer), 3) == 0.070

# %% [markdown]
# A step with the number of buckets nearest to the rule's is at most 7.0 % longer than the best of those tried. Where
# backward hides all latency, more buckets than the rule's are a little better, because the last one gets shorter.
#
# PyTorch's default is 25 MiB, and 1 MiB for the first bucket so that the wire starts early. Those sizes fit its GPUs
# and models of hundreds of MiB; Li et al. (section 5.3) measure a curve of the same shape. minipar's default is one
# bucket for each block of the model.

# %% [markdown]
# ## 4.5 Gradient accumulation and `no_sync`
#
# *Core, 6 minutes.*
#
# If a shard does not fit in memory, cut it into $m$ *microbatches* and let their gradients add up locally before the
# ranks talk. Nothing needs to travel before the last one. In the hook of 4.4 that is one more line, `if not
# self.enabled: return`. `no_sync` clears this flag for the backward passes inside its block. The last microbatch runs
# *outside* the block, so that its hooks start the buckets.
#
# Each loss is divided by the number of targets **of the whole step, on all ranks**. So the loop counts first, before
# the first backward. (A target that does not count is marked with -100, as in PyTorch.)
#
# `ddp.loss` divides by that count itself, and the wrapper refuses a backward of any other loss: its gradients would not
# be those of the global mean, and training would go on without a sign of it. Here we divide ourselves, and the block
# `with ddp.scaled_backward()` says so. Each sample is a microbatch: $m = B$.


# %%
def samples(shard):
    """A rank's shard, one sample at a time."""
    inputs, targets = shard
    return [(inputs[i : i + 1], targets[i : i + 1]) for i in range(B)]


def accumulate(ddp, microbatches):
    """Leave the gradient of the mean loss over all targets of the step, on all ranks."""
    own_count = sum(int((targets != -100).sum()) for _, targets in microbatches)
    count = int(comm.all_reduce(np.array([own_count]), algorithm="ordered")[0])  # all targets of the step: count first
    *firsts, last = microbatches
    with ddp.scaled_backward():  # each loss below is divided by the count of all ranks
        with ddp.no_sync():
            for inputs, targets in firsts:
                backward(ddp.model, inputs, targets, count)
        backward(ddp.model, *last, count)
    ddp.synchronize()


model = fresh()
ddp = DistributedDataParallel(model, comm, "ordered")
comm.traffic.reset()
accumulate(ddp, samples(shard(rank)))
once = comm.traffic.bytes("all_reduce")

references = []
for r in range(d):  # one device: each replica's microbatches add up in a model
    replica = fresh()
    for inputs, targets in samples(shard(r)):
        backward(replica, inputs, targets, d * N)
    references.append(flatten(replica.parameters()))
accumulated = left_to_right(references)
assert same_bits(flatten(model.parameters()), accumulated)
values = wire_bytes("all_reduce", "ordered", 1, 8, d, rank)  # the count
assert once == values + sum(wire_bytes("all_reduce", "ordered", bucket.size, 8, d, rank) for bucket in ddp.buckets)
say(f"{B} microbatches on {d} ranks = 1 device, bit for bit; {once:,} bytes sent, the gradients once per step")

# %% [markdown]
# ### A forgotten `no_sync`
#
# *Deeper, 4 minutes.*

# %% [markdown]
# **The first mistake** of this chapter is to forget `no_sync`. Each backward pass sends everything, so the bytes
# double. And here the gradient is *wrong*: after the first all-reduce the buffer holds the global sum $\Sigma_1$ of the
# first microbatches' gradients. The second pass adds each rank's own gradient and sums again, which gives
# $d\,\Sigma_1{+}\Sigma_2$. (PyTorch averages over ranks instead of summing. There the buffer holds the *average*
# $\Sigma_1 / d$ after the first pass, and the second gives $\frac1d(d \cdot \Sigma_1/d + \Sigma_2) = (\Sigma_1 +
# \Sigma_2)/d$, which is right: the same mistake costs only bytes.) The library refuses the second pass. To see the
# damage, we make it forget that it has summed these gradients. (The opposite mistake is to run the last microbatch
# inside the block, too. Nothing is sent, each rank steps with its own gradient, and the replicas drift apart while each
# loss falls. The library refuses that step.)

# %%
try:
    watch.without_no_sync(fresh(), comm, samples(shard(rank)), forget=False)
    raise AssertionError("the second pass should have been refused")
except RuntimeError as refusal:
    say(f"refused: {refusal}\n")
comm.traffic.reset()
model = watch.without_no_sync(fresh(), comm, samples(shard(rank)), forget=True)
wrong = relative_difference(flatten(model.parameters()), accumulated)
twice = comm.traffic.bytes("all_reduce")
assert twice - B * wire_bytes("all_reduce", "ordered", 2, 8, d, rank) == B * (once - values)  # 2: of each ddp.loss
assert d == 1 or wrong > 0.1
say(f"caught: {twice:,} bytes instead of {once:,}, and the gradient is off by {wrong:.0%}")

# %% [markdown]
# ## 4.6 Ranks with unequal counts
#
# *Core, 6 minutes.*
#
# Padding, documents of different length, a last batch that is not full: often the ranks do not hold equally many
# targets. Let rank $r$ have $N_r$ of them, with losses that add up to $\ell_r$. Then
#
# $$\frac{\sum_r \ell_r}{\sum_r N_r} \;\neq\; \frac1d \sum_r \frac{\ell_r}{N_r} \text{ unless all } N_r \text{ are
# equal.}$$
#
# **The second mistake** is this mean of means. It gives a token on a rank with few of them more weight than a token on
# a rank with many. The remedy is to divide by the global count, for the price of one more value on the wire.
# **[Exercise 5](exercises/e05_token_counts.py)** asks for it without counting first: `make exercises PYTEST="-k e05"`.

# %%
targets_of = [N // (r + 1) for r in range(d)]


def unequal(r):
    """Rank r's shard, of which only the first N/(r+1) targets count."""
    inputs, targets = shard(r)
    flat = targets.reshape(-1).copy()
    flat[targets_of[r] :] = -100
    return inputs, flat.reshape(targets.shape)


everything = [np.concatenate(arrays) for arrays in zip(*(unequal(r) for r in range(d)), strict=True)]
truth = gradient(*everything, sum(targets_of))  # one device, the whole batch at once
right = comm.all_reduce(gradient(*unequal(rank), sum(targets_of)), algorithm="ordered")
means = comm.all_reduce(gradient(*unequal(rank), targets_of[rank]), algorithm="ordered") / d
assert relative_difference(right, truth) < 1e-14
assert d == 1 or relative_difference(means, truth) > 0.01
say(f"targets per rank: {targets_of}; relative difference from one device:")
say(f"global count {relative_difference(right, truth):.1e}, mean of means {relative_difference(means, truth):.2f}")
if rank == 0:
    show(figures.plot_weights(targets_of), "04_weights")

# %% [markdown]
# The bars show how much one token counts on each rank, relative to the right weight. The wrong version trains, and its
# loss falls as usual, but it minimizes another mean. All ranks agree, and only a comparison with one device notices,
# and only because the test used unequal counts.

# %% [markdown]
# ### Losses that are no sums of samples
#
# *Core, 2 minutes.*
#
# All this needs a loss that is a sum over samples, where each term looks at its own sample only. Batch normalization
# divides by the variance of the batch. A contrastive loss compares each sample with all others. The auxiliary loss of
# experts multiplies two means over the batch ([chapter 12](12_experts.ipynb)). None of them is a sum of what the ranks
# compute on their shards:

# %%
own = np.random.default_rng([4, rank]).normal(loc=rank, size=16)  # one activation of 16 samples
n_own, total, squares = comm.all_reduce(np.array([own.size, own.sum(), (own**2).sum()]), algorithm="ordered")
variance = squares / n_own - (total / n_own) ** 2  # of the whole batch
mean_of_variances = comm.all_reduce(np.array([own.var()]), algorithm="ordered")[0] / d
whole_batch = np.concatenate([np.random.default_rng([4, r]).normal(loc=r, size=16) for r in range(d)])
assert abs(variance - whole_batch.var()) < 1e-12 * variance and (d == 1 or mean_of_variances < 0.9 * variance)
say(f"variance of the batch {variance:.2f}, mean of the ranks' variances {mean_of_variances:.2f}")

# %% [markdown]
# Such a model computes something else on $d$ ranks than on one, unless the ranks exchange more than gradients. The
# variance needs three sums over the ranks, in forward and again in backward: that is `SyncBatchNorm`. A contrastive
# loss needs an all-gather of all samples' vectors. LayerNorm looks at one token, so a GPT has no such problem.

# %% [markdown]
# ### The same mistake over microbatches
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Widely used trainers had this mistake until October 2024, when its effect on fine-tuning with padded batches was
# noticed. Of $m$ microbatches with losses $\ell_j$ over $N_j$ tokens, each was divided by its own count: $\frac1m
# \sum_j \ell_j / N_j$ is not $\sum_j \ell_j / \sum_j N_j$. All $N_j$ must be counted before the first backward, as
# `accumulate` of 4.5 does. (Or add up gradients of sums, and divide once at the end.) It is right for these shards,
# too:

# %%
model = fresh()
accumulate(DistributedDataParallel(model, comm, "ordered"), samples(unequal(rank)))
assert relative_difference(flatten(model.parameters()), truth) < 1e-14
say(f"{B} microbatches of unequal counts on {d} ranks: the gradient of one device")

# %% [markdown]
# With one microbatch per step `ddp.loss` counts by itself. It sends the count together with the sum of the losses, as
# two float64:

# %%
if rank == 0:
    show_source(global_mean_loss)
model = fresh()
DistributedDataParallel(model, comm, "ordered").loss(*unequal(rank)).backward()
assert same_bits(flatten(model.parameters()), right)

# %% [markdown]
# ## 4.7 A training run
#
# *Core, 4 minutes.*
#
# Equal gradients must give equal replicas, step after step. A script needs two lines for data parallelism: the wrapper,
# and `ddp.loss`, whose `backward()` sends the buckets and ends with `synchronize`. Here is a whole training loop on the
# ranks, and next to it the loop of one device that takes the shards in rank order.

# %%
STEPS = 20
RATE = 3e-3
BUCKETS = {"nbytes": 32 * 1024, "first": 8 * 1024}


def train(wrapper):
    """Train on the ranks: all parameters, and the losses."""
    model = fresh()
    losses = []
    ddp = wrapper(model, comm, "ordered", groups=by_size(model, comm, **BUCKETS))
    optimizer = mp.AdamW(ddp.parameters(), lr=RATE)
    for step in range(STEPS):
        loss = ddp.loss(*shard(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.data))
    return np.concatenate([parameter.data.reshape(-1) for parameter in model.parameters()]), losses


model = fresh()
optimizer = mp.AdamW(model.parameters(), lr=RATE)
for step in range(STEPS):  # one device
    gradients = []
    for r in range(d):
        backward(model, *shard(r, step), d * N)
        gradients.append(flatten(model.parameters()))
        optimizer.zero_grad()
    set_gradient(model.parameters(), left_to_right(gradients))
    optimizer.step()
    optimizer.zero_grad()

trained, losses = train(DistributedDataParallel)
single = np.concatenate([parameter.data.reshape(-1) for parameter in model.parameters()])
assert same_bits(trained, single) and np.mean(losses[-5:]) < losses[0] - 1
say(f"{STEPS} steps on {d} ranks = 1 device, bit for bit, in all {Psi:,} parameters")
say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte (ln 256 = {math.log(256):.3f})")

# %% [markdown]
# ### Strong and weak scaling
#
# *Core, 6 minutes.*
#
# *Strong scaling* keeps the global batch and adds ranks. If one device computes for $T_1$ seconds per step, then $d$
# devices take
#
# $$\text{at least } \; \frac{T_1}{d} + \text{what is not hidden of } \; 2(d-1)\left(\alpha + \frac{n}{d}\beta\right).$$
#
# The first term falls as $1/d$. The all-reduce in the second does not get shorter: its bytes tend to $2n$, its latency
# grows with $d$. And there is less and less backward to hide it. So the efficiency, $T_1$ divided by $d$ times this
# time, must fall, and the batch per rank runs out in the end. ([5.6](05_zero.ipynb) derives from how many tokens per
# rank on backward hides the whole sum.) *Weak scaling* keeps the batch per rank and lets the global batch grow. Then
# computation stays, and data parallelism scales until the batch is larger than training can use (McCandlish et al.
# 2018, arXiv 1812.06162).
#
# With strong scaling the learning rate stays, since the step is the same. With weak scaling it should not: the mean
# over $d$ times as many samples has less noise, and there are fewer steps for as many tokens. Common rules multiply the
# rate by $d$ for SGD, after a warm-up (Goyal et al. 2017, arXiv 1706.02677), and by about $\sqrt d$ for Adam. Neither
# PyTorch's wrapper nor minipar's does that: `--lr` is the rate that you get.
#
# Take the model and network of 4.4 and a global batch that 8 ranks compute in 0.755 ms each. The gradients have 882 KB,
# $\alpha$ is $1\,\mu s$ and $1/\beta$ 4 GB/s. Backward is two thirds of the computation, and we assume that all of it
# can hide communication (no tail).
#
# **Predict**: with overlap 8 ranks reach an efficiency of 100 %. How much do 64 ranks reach?

# %%
predict("efficiency on 64 ranks with overlap", ...)


# %%
def efficiencies(ranks):
    """Efficiency of the naive form and with overlap, for a global batch that 8 ranks compute in COMPUTATION each."""
    compute = 8 * watch.COMPUTATION / ranks
    reduce = watch.all_reduce_seconds(watch.ELEMENTS, ranks)
    overlapped = compute / 3 + max(compute * 2 / 3, reduce)
    return compute / (compute + reduce), compute / overlapped


assert [round(value, 2) for value in (*efficiencies(8), *efficiencies(64))] == [0.65, 1, 0.14, 0.16]
assert round(watch.COMPUTATION * 1e3, 3) == 0.755 and round(4 * watch.ELEMENTS / 1e3) == 882
reveal("efficiency on 64 ranks with overlap", round(efficiencies(64)[1], 2), say)
if rank == 0:
    show(figures.plot_scaling({ranks: efficiencies(ranks) for ranks in (1, 2, 4, 8, 16, 32, 64)}), "04_scaling")

# %% [markdown]
# On 8 ranks the efficiency is 65 % with the naive form and 100 % with overlap. On 64 ranks it is 14 % and 16 %: there
# is too little backward left to hide behind. Overlap helps only where the two times are alike.

# %% [markdown]
# ## 4.8 Mistakes, and what notices them
#
# *Deeper, 10 minutes.*

# %% [markdown]
# Two mistakes are behind us. Three more, all of them found in real code, are run here on purpose
# (`chapters/support/ch04/watch.py` has them). We look with four instruments:
#
# - **loss**: is the last loss visibly different, by more than 5 %, from the correct run?
#
# - **ranks**: do all ranks hold the same parameters?
#
# - **bytes**: do the counted bytes equal the formula?
#
# - **one device**: does one device get the same parameters, bit for bit?
#
# 3. **Drop one bucket.** Its gradients are never synchronized.
#
# 4. **Divide by the wrong count.** Each rank divides by its own count, then the sum is taken: $d$ times too large.
#
# 5. **All-reduce weights instead of gradients.** Each rank steps on its own gradient, then weights are averaged.
#
# (The library compares the replicas before losses 2, 4, 8, ..., and would refuse mistake 3. We switch this off.)
# **Predict** which instruments notice which mistake:

# %%
predict("3. one bucket not sent", ...)  # replace the dots by a set, such as {"loss", "ranks"}
predict("4. divided by local count", ...)
predict("5. weights, not gradients", ...)

# %%
sizes = [sum(p.size for p in group) for group, _ in by_size(fresh(), comm, **BUCKETS)]
nbytes = STEPS * sum(wire_bytes("all_reduce", "ordered", size, 8, d, rank) for size in (*sizes, 2))  # 2: of ddp.loss
assert not watch.examine(comm, partial(train, DistributedDataParallel), single, losses[-1], nbytes).caught
curves = {"right": losses}
caught = {}
for name, wrapper in (
    ("3. one bucket not sent", watch.DropsABucket),
    ("4. divided by local count", watch.LocalCount),
    ("5. weights, not gradients", watch.KeepsGradients),
):
    seen = watch.examine(comm, partial(train, wrapper), single, losses[-1], nbytes)
    curves[name], caught[name] = seen.losses, seen.caught
    reveal(name, seen.caught or "nothing", say)
    say(f"    parameters off by {seen.difference:.0e}, last loss {seen.losses[-1]:.3f}")
if rank == 0:
    show(figures.plot_losses(curves), "04_losses")

# %% tags=["hide-input"]
if d > 1:  # with one rank there is nothing to forget
    answers = [{"ranks", "bytes", "one device"}, {"one device"}, {"one device"}]
    assert all(answer <= instruments for answer, instruments in zip(answers, caught.values(), strict=True))

# %% [markdown]
# Three lessons.
#
# **The loss curve says little.** All of these runs learn, and on eight ranks no last loss is off by 5 %. The curve of
# mistake 5 lies above the right one on the way. Without the right one beside it, nobody would object to it.
#
# **Mistake 4 is nearly invisible to AdamW.** It divides each gradient by the root of its own running square, so a
# constant factor cancels: the parameters move as they should, up to `eps`. The mistake shows when clipping is turned
# on, or with SGD.
#
# **Mistake 5 would be right with plain SGD.** Let $G_r$ be the gradient of rank $r$'s own mean and all ranks have
# equally many tokens. For an update $-\eta\,G_r$, which is linear in the gradient, averaging the updated weights gives
# the same as one update with the averaged gradient. It is wrong as soon as gradients are clipped, because each rank
# then clips by the norm of its own gradient. And AdamW is not linear: it divides by a root, and the mean of quotients
# is not the quotient of means. Replicas agree, the bytes are right, the loss falls; only the comparison with one device
# objects.
#
# [DiLoCo](more/diloco.ipynb) makes an algorithm of mistake 5: the ranks talk once in $H$ steps, and send $1/H$ of the
# bytes.

# %% [markdown]
# ## 4.9 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch | Megatron-LM, DeepSpeed |
# | --- | --- | --- |
# | `DistributedDataParallel(model, comm)` | `DistributedDataParallel(model)` | the same name in Megatron-LM |
# | `ddp.loss`: the global mean | a local mean; DDP averages over ranks | `calculate_per_token_loss` |
# | `groups`, by default one for each block | `bucket_cap_mb`, 25 MiB | `--ddp-bucket-size`, `reduce_bucket_size` |
# | overlap, always | always | `--overlap-grad-reduce`, `overlap_comm` |
# | `register_post_accumulate_grad_hook` | the same name | |
# | `no_sync` | `no_sync` | `no_sync_func` |
# | zeros for parameters that a loss did not use | `find_unused_parameters=True`, else an error | |
# | initial weights keyed by name | rank 0 broadcasts its own when DDP is made | a seed, or a checkpoint |
# | `batches.batch(step, samples)` by rank | `DistributedSampler(rank=..., num_replicas=...)` | |
# | `Bucket.gradient` | `gradient_as_bucket_view=True` | the contiguous gradient buffer |
# | `all_reduce(..., async_op=True)`, `wait` | the same names in `torch.distributed` | |
#
# The same in PyTorch, with unequal counts on two processes: [chapters/pytorch/ch04.py](pytorch/ch04.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch04.py")

# %% [markdown]
# ## 4.10 Problems
#
# *Deeper, 30 minutes.*

# %% [markdown]
# The answers are in 4.11.
#
# 1. A model has 1.5 billion parameters and fp32 gradients. How many GB does each rank send per step, among 8 ranks and
# among 1,024?
#
# 2. 64 ranks all-reduce 6 GB of gradients; $\alpha = 10\,\mu s$, $1/\beta$ = 25 GB/s. How long do the bytes take? How
# much latency is added with one bucket, and with buckets of 25 MiB? How many equal buckets may there be so that the
# latency is at most 5 % of the bytes' time, and how large is each?
#
# 3. Rank 0 has 100 tokens, whose losses add up to 200. Rank 1 has 28 tokens, whose losses add up to 84. What is the
# mean loss, and what is the mean of the ranks' means?
#
# 4. Four ranks hold $10^{16}$, $1$, $-10^{16}$ and $1$ in every element. Which sum does `ordered` give in float64, and
# which does `ring` give in each of its four chunks? (Float64 values near $10^{16}$ are 2 apart. A sum halfway between
# two of them rounds to the one whose last binary digit is 0, here the multiple of 4; $10^{16}$ is one.)
#
# **For you.** (a) In `on_gradient`, buckets start strictly in order. Let a bucket start as soon as it is complete,
# whatever came before. For this GPT nothing breaks. Which kind of model would break it (think of a path that depends on
# the data), and what would you see: an error, a hang, or wrong values?
#
# (b) In the timeline of 4.4, which two parameters make up nearly all of the last bucket, and how would you shorten the
# tail? (Most rows of an embedding's gradient are 0: those of tokens that the batch does not contain.)
#
# (c) Every rank holds all $\Psi$ parameters, all gradients, both AdamW moments, and after the all-reduce every rank
# takes the very same optimizer step. The all-reduce is a reduce-scatter followed by an all-gather. What could be done
# *between* the two, so that each rank keeps only $1/d$ of the optimizer's state, for the same bytes? (That is ZeRO
# stage 1: Rajbhandari et al. 2020, arXiv 1910.02054.)

# %% [markdown]
# ## 4.11 Answers
#
# *Deeper, 5 minutes.*

# %% tags=["hide-input"]
gigabytes = [2 * 1.5e9 * 4 * (ranks - 1) / ranks / 1e9 for ranks in (8, 1024)]
assert [round(value, 2) for value in gigabytes] == [10.5, 11.99] and round(gigabytes[1] / gigabytes[0], 2) == 1.14
say(f"1. {gigabytes[0]:.1f} GB and {gigabytes[1]:.2f} GB: 128 times as many ranks send 14 % more each")

latency = 2 * 63 * 10e-6  # of one bucket
wire = 2 * 63 / 64 * 6e9 / 25e9  # of all bytes
in_buckets = math.ceil(6e9 / (25 * 2**20)) * latency
at_most = int(0.05 * wire / latency)
assert round(math.sqrt(6e9 / 25e9 / (64 * 10e-6))) == 19
assert [round(1e3 * value, 2) for value in (wire, latency, in_buckets)] == [472.5, 1.26, 288.54] and at_most == 18
say(f"2. bytes {wire * 1e3:.1f} ms; latency {latency * 1e3:.2f} ms, or {in_buckets * 1e3:.1f} ms in 25 MiB buckets;")
say(f"   at most {at_most} equal buckets, of {6e9 / at_most / 1e6:.0f} MB each; the rule of 4.4 says 19")

mean = (200 + 84) / (100 + 28)
of_means = (200 / 100 + 84 / 28) / 2
assert (mean, of_means) == (2.21875, 2.5)
say(f"3. {mean}; the mean of means is {of_means}: a token of rank 0 counts 28/100 as much as one of rank 1")

held = np.array([1e16, 1.0, -1e16, 1.0])
around = [float(left_to_right([*held[r + 1 :], *held[: r + 1]])) for r in range(4)]  # chunk r starts at rank r + 1
assert left_to_right(list(held)) == 1 and around == [0, 1, 0, 1]
say(f"4. ordered 1 everywhere, ring {around}; the exact sum is 2")

# %% [markdown]
# <details><summary>Answer to 4, and to "For you"</summary>
#
# (4: `ordered` adds $((10^{16} + 1) - 10^{16}) + 1 = 1$: the first 1 is lost. In the ring chunk 0 is added in the
# order of ranks 1, 2, 3, 0: $1 - 10^{16}$ and the next sum lose a one each, and adding $10^{16}$ leaves 0.)
#
# (a) A model whose ranks complete gradients in different orders: one whose path depends on the data, such as layers
# that are skipped or experts that some ranks do not use. Then collectives of different buckets meet. Buckets of equal
# size give wrong values without any sign. Of unequal size they give an error where lengths are checked, as here.
# Elsewhere they can hang.
#
# (b) The token and the position embedding, the first parameters. The head's part of the token embedding's gradient is
# complete at the very beginning. It could be summed over the ranks by itself at once, and the lookup's part at the end
# as the few rows of the tokens that occurred. Without a tie, the head's gradient leaves first and only the lookup's is
# late.
#
# (c) After the reduce-scatter rank $r$ has chunk $r$ of the summed gradient. It updates chunk $r$ of the parameters,
# for which alone it keeps AdamW's moments, and the all-gather carries updated parameters. Chapter 5 builds this.
#
# </details>

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
