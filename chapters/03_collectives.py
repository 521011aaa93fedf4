# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 3. Collectives
#
# **How do $p$ machines add up an array when each can only send and receive?**
#
# Every parallel strategy in this project ends in the same few calls. Data parallelism adds up gradients: an
# *all-reduce*. ZeRO cuts that in two: a *reduce-scatter* and an *all-gather*. Expert parallelism exchanges tokens: an
# *all-to-all*. These are **collectives**: operations that all processes of a group call together. NCCL and MPI provide
# them as black boxes. Here we open the box, and find loops of a dozen lines.
#
# Words used throughout. A **rank** is one process, numbered $0 \dots p-1$; a **communicator** is the group seen from
# one of them. $n$ is the size of the array in bytes. $\alpha$ is the time that one message costs however short it is
# (latency), $\beta$ the time that each byte costs (the inverse of bandwidth).

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them; as a script, mpirun starts them
# # instead.
# import ipyparallel as ipp
#
# cluster = ipp.Cluster(engines="mpi", n=8, log_level=50)  # quiet: what it logs when it stops is of no interest here
# cluster.start_cluster_sync()
# client = cluster.connect_client_sync()
# client.wait_for_engines(8, interactive=False)
# view = client[:]
# view.block = True
# view.activate()
# %pxconfig --progress-after 600
# %autopx

# %%
import tempfile
import time
from pathlib import Path

from chapters.support.show import printer
from minipar.comm import world

comm = world()  # the ranks of mpirun; one rank without it

import numpy as np

from minipar.bench.collectives import measure
from minipar.comm import (
    ALGORITHMS,
    Network,
    Transport,
    chunk_bounds,
    messages,
    run_local,
    save_chrome_trace,
    start_trace,
    wire_bytes,
)
from minipar.comm.communicator import FEW_STEPS_BELOW, choose
from minipar.comm.gathers import ring_all_gather
from minipar.comm.reductions import (
    ordered_reduce_scatter,
    recursive_doubling_all_reduce,
    recursive_halving_all_reduce,
    ring_all_reduce,
    ring_reduce_scatter,
)
from minipar.errors import CommunicationError

p, rank = comm.size, comm.rank
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:  # only one rank draws: eight imports of matplotlib on two cores take seconds
    from chapters.support.show import show, show_source
    from visualize import picture, plot_bench, plot_bytes, plot_timeline, read_trace, tidy

say(f"{p} rank{'s' if p > 1 else ''}, started by {comm.transport.launcher}")
if p == 1:
    say("with 1 rank a collective has nothing to send: the claims on this rank are trivial, those on threads are not")

# %% [markdown]
# ## 1. Two operations
#
# A rank can start to send an array (`isend`) and start to receive one (`irecv`). Both return at once. What they return
# can be waited for. That is all a machine has to offer; `Transport` states it. One implementation carries the bytes
# between processes (MPI), another between threads of one process (`run_local`), and no algorithm below knows which one
# it runs on.

# %%
if rank == 0:
    show_source(Transport)

# %% [markdown]
# Now the question. Put the ranks in a ring. Each array travels once round; every rank adds up what passes by.


# %%
def first_ring(comm, x):
    """The sum of all ranks' x: whole arrays travel, p-1 times."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    total, travelling, arriving = x.copy(), x.copy(), np.empty_like(x)
    for step in range(comm.size - 1):
        sent = comm.isend(travelling, right, tag=step)
        comm.irecv(arriving, left, tag=step).wait()
        sent.wait()
        total += arriving
        travelling, arriving = arriving, travelling
    return total


def contribution(of, n, dtype=np.float32):
    """The array that rank `of` brings: every rank can compute every other's, so each can check the result by itself."""
    numbers = np.random.default_rng([2, of]).standard_normal(n) * 1000
    return numbers.astype(dtype)


def left_to_right(arrays):
    """((a_0 + a_1) + a_2) + ...: what one device that accumulates would compute."""
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


n = 10_000
comm.traffic.reset()
integers = first_ring(comm, contribution(rank, n, np.int64))
assert np.array_equal(integers, left_to_right([contribution(r, n, np.int64) for r in range(p)]))
sent = comm.traffic.bytes("send")
assert sent == (p - 1) * integers.nbytes
say(f"the sum of {p} arrays is right on every rank; each rank sent {p - 1} messages, {sent:,} bytes")

# %% [markdown]
# It is right, and it has three faults.
#
# **It sends too much**: $(p-1)\,n$ bytes from each rank. Section 2 shows that $2n(p-1)/p$ suffice: less than $2n$,
# however many ranks there are.
#
# **The ranks disagree.** Rank $r$ adds in the order $r, r-1, r-2, \dots$, and floating-point addition is commutative
# but not associative. With integers nobody sees it. With floats the replicas of a model drift apart, one last bit at a
# time:

# %%
floats = first_ring(comm, contribution(rank, n))
everyone = comm.all_gather_bytes(floats.tobytes())
of_rank_0 = np.frombuffer(everyone[0], np.float32)
others = [int((np.frombuffer(data, np.float32) != of_rank_0).sum()) for data in everyone]
say("0.1 + 0.2 + 0.3 =", 0.1 + 0.2 + 0.3, "    0.3 + 0.2 + 0.1 =", 0.3 + 0.2 + 0.1)
say(f"first_ring, float32: of {n:,} sums, this many differ from rank 0's, rank by rank: {others}")
assert (max(others) > 0) == (p >= 3)  # with two ranks there is one order only: a + b is b + a

# %% [markdown]
# **It is one line from a deadlock.** A send is complete when its array may be changed again. For a small message MPI
# copies the bytes aside and reports completion at once (the *eager* protocol); for a large one it waits until the
# receiver has asked for it (*rendezvous*). So this looks natural, works with small arrays, and hangs with large ones,
# when every rank waits for its neighbour to begin to receive. The limit was 4 KiB with Open MPI and 8 KiB with MPICH on
# the machine where this project was written.
#
# Never find that out in production. `run_local` completes a send only when it has been received, so it deadlocks for
# *any* size. And as it sees all ranks, it can tell that nobody is left to move.


# %%
def blocking_ring(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = np.ones(1)
    comm.isend(x, right).wait()  # blocks: the neighbour is here too
    return comm.irecv(np.empty(1), left).wait()


def caught(expected, run):
    """Run something that must fail, and show how."""
    try:
        run()
    except expected as error:
        print(f"caught: {error}\n")
    else:
        raise AssertionError(f"no {expected.__name__}: the mistake went unnoticed")


if rank == 0:
    caught(CommunicationError, lambda: run_local(3, blocking_ring))

# %% [markdown]
# The cure is the order of the lines in `first_ring`: *start* the send, start the receive, and only then wait for both.
# Every algorithm in the library does that in one `yield`.
#
# ## 2. All-reduce = reduce-scatter + all-gather
#
# Cut the array into $p$ **chunks**, one for each rank (when $p$ does not divide it, the first ones are longer by one
# element).
#
# - **reduce-scatter**: chunk $r$ of the sum arrives on rank $r$.
# - **all-gather**: every rank's chunk arrives on every rank.
#
# One after the other they are an **all-reduce**: the whole sum on every rank. In a ring each of the two takes $p-1$
# steps, and in each step each rank sends one chunk, $n/p$ bytes:
#
# $$ 2\,(p-1)\,\frac{n}{p} = 2n\,\frac{p-1}{p} \ \text{ bytes per rank.} $$
#
# **No algorithm sends less.** Look at one element, and put all receives of messages about it in the order in which they
# happen. Some rank is the first to know its sum. Until then each of the other $p-1$ ranks must have sent at least one
# message that was received: without it, its contribution would be missing. After that each of the other $p-1$ ranks
# must still receive at least one. That makes $2(p-1)$ messages for each element, so $2(p-1)\,n$ bytes over all ranks,
# and some rank sends at least the average, $2n(p-1)/p$. (Patarasuk and Yuan 2009 prove it for whole arrays. The
# argument assumes that a message about an element is as long as the element: gradient compression escapes it, by giving
# up the exact sum.)
#
# The ring meets the bound. Here it is, as it stands in the library. An algorithm is a *generator*: it starts messages
# and yields those that must be done before it can go on. Whoever drives it decides how to wait. `link` is a
# communicator's view of one operation; the last argument of its two operations is the step, which gives every message a
# tag of its own.

# %%
if rank == 0:
    show_source(ring_reduce_scatter, ring_all_gather, ring_all_reduce)

# %% [markdown]
# To watch it, let rank $r$ bring the number $2^r$ in each chunk. Then the binary digits of a partial sum say who is in
# it. We drive the generator by hand on four ranks, over a link of our own (`Wire`: there is no magic in it), and give
# it a `combine` that remembers what it has added.


# %%
class Wire:
    """What an algorithm needs of a link, made of the two operations of section 1."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def isend(self, array, dest, step):
        return self.comm.isend(array, dest, tag=step)

    def irecv(self, array, source, step):
        return self.comm.irecv(array, source, tag=step)

    def scratch(self, count, dtype):
        return np.empty(count, dtype)


def watched_ring(comm):
    """After each step of a ring all-reduce: the best sum that this rank has of each chunk, as bits."""
    p, r = comm.size, comm.rank
    x = np.full(p, 1 << r)
    best = x.copy()
    frames = [x.copy()]

    def remember(received, own, out):
        np.add(received, own, out=out)
        best[(r - len(frames) - 1) % p] = out[0]
        frames.append(best.copy())

    for step, requests in enumerate(ring_all_reduce(Wire(comm), x, remember)):
        for request in requests:
            request.wait()
        if step >= p - 1:  # the all-gather writes into x itself
            best[x == (1 << p) - 1] = (1 << p) - 1
            frames.append(best.copy())
    return frames


if rank == 0:
    size = 4
    frames = np.array(run_local(size, watched_ring))  # (rank, step, chunk)
    assert frames.shape == (size, 2 * size - 1, size)
    assert (frames[:, -1] == (1 << size) - 1).all()
    for r in range(size):  # after the reduce-scatter each rank has the whole sum of its own chunk and of no other
        whole = frames[r, size - 1] == (1 << size) - 1
        assert whole[r] and whole.sum() == 1
    figure = picture(11.0, 2.4)
    panels = figure.subplots(1, 2 * size - 1)
    for step, axes in enumerate(panels):
        known = np.bitwise_count(frames[:, step])
        axes.imshow(known, cmap="Blues", vmin=0, vmax=size + 2)
        for r in range(size):
            for c in range(size):
                bits = int(frames[r, step, c])
                who = "Σ" if bits == (1 << size) - 1 else "".join(str(k) for k in range(size) if bits >> k & 1)
                axes.text(c, r, who, ha="center", va="center", fontsize=11 if who == "Σ" else 8)
        title = (
            "at first" if step == 0 else f"reduce-scatter {step}" if step < size else f"all-gather {step - size + 1}"
        )
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(size), [f"c{c}" for c in range(size)], fontsize=8)
        axes.set_yticks(range(size), [f"rank {r}" for r in range(size)] if step == 0 else [], fontsize=8)
        axes.tick_params(length=0)
    show(figure, "03_ring")
    say("digits: the ranks whose contributions are in the sum; Σ: all of them. Each step fills one cell on each rank.")

# %% [markdown]
# The ring needs $2(p-1)$ messages one after the other. For a small array that is what counts, and there are ways with
# fewer.
#
# **Recursive doubling**: in step $k$ ranks at distance $2^k$ exchange *everything* and both add. $\lg p$ messages, but
# $n$ bytes each time.
#
# **Recursive halving and doubling** (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005): pairs at distance $p/2$,
# then $p/4$, ... split what they still share: each sends one half and adds up the other. That is a reduce-scatter in
# $\lg p$ messages. Then the same backwards as an all-gather. $2\lg p$ messages and only $2n(p-1)/p$ bytes.
#
# When $p$ is not a power of two, the extra ranks first hand their data to a neighbour and wait for the result (`fold`).
#
# **Ordered**: no ring at all. Each rank sends each other rank that one's chunk directly, everything at once, and adds
# what arrives in rank order. Then it sends its finished chunk to all others. As many messages and bytes as the ring, in
# two rounds of waiting instead of $2(p-1)$, but room for a second array. What else its order is good for we shall see.

# %%
if rank == 0:
    show_source(recursive_doubling_all_reduce, recursive_halving_all_reduce, ordered_reduce_scatter)

# %% [markdown]
# **Proof.** Integers first: their sum is exact in any order, so every algorithm must give the same values as NumPy,
# `==`. The lengths include one that $p$ does not divide, one shorter than $p$, and zero. MPI's own collective
# (`algorithm="mpi"`) is one of those compared, where mpirun has started us.

# %%
native = comm.transport.launcher == "mpirun"
names = [name for name in ALGORITHMS["all_reduce"] if name != "mpi" or native]
lengths = (1000 * p, 1003, 3, 1, 0)
for length in lengths:
    expected = left_to_right([contribution(r, length, np.int64) for r in range(p)])
    for name in names:
        x = contribution(rank, length, np.int64)
        assert np.array_equal(comm.all_reduce(x, algorithm=name), expected)
        bounds = chunk_bounds(length, p)
        if name in ALGORITHMS["reduce_scatter"]:
            start, stop = bounds[rank]
            x = contribution(rank, length, np.int64)
            assert np.array_equal(comm.reduce_scatter(x, algorithm=name), expected[start:stop])
say(f"all_reduce and reduce_scatter, {', '.join(names)}: equal to NumPy at lengths {lengths} on {p} ranks")

# %% [markdown]
# **Bits.** Now floats. The docstring of the ring says in which order it adds: chunk $c$ in the order
# $c+1, c+2, \dots, c$. If that is true, NumPy can repeat it and gets the same bits. `ordered` claims the order
# $0, 1, \dots, p-1$: the same bits as one device that accumulates. And every algorithm must leave the *same* bits on
# all ranks, or replicas drift.
#
# Why does it hold? In the ring, each chunk is added up on one path and then only copied. In recursive doubling two
# ranks add the same two values, one as $a+b$ and the other as $b+a$: floating-point addition is commutative.

# %%
n = 10_000
everybody = [contribution(r, n) for r in range(p)]
expected = left_to_right(everybody)
results = {}
for name in names:
    results[name] = comm.all_reduce(contribution(rank, n), algorithm=name)
    assert len(set(comm.all_gather_bytes(results[name].tobytes()))) == 1 or name == "mpi"  # MPI promises less
    np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-2)

ring_order = np.empty_like(expected)
for c, (start, stop) in enumerate(chunk_bounds(n, p)):
    ring_order[start:stop] = left_to_right([everybody[(c + 1 + k) % p][start:stop] for k in range(p)])
assert np.array_equal(results["ordered"], expected)
assert np.array_equal(results["ring"], ring_order)
say(f"ordered = left to right in NumPy, ring = its own order in NumPy: bit for bit, {n:,} float32 sums over {p} ranks")
for name in names:
    differing = int((results[name] != expected).sum())
    worst = float(np.abs(results[name] - expected).max())
    say(f"  {name:20} {differing:6,} sums differ from left to right; the largest difference is {worst:.1e}")
assert p <= 2 or not np.array_equal(results["ring"], expected)

# %% [markdown]
# None of these orders is more accurate than the others; they are only different. What matters for training is that the
# replicas agree, and that a run can be repeated. A *proof* that two programs train equally needs more: the same order
# in both. That is what `ordered` is for (`--reduction ordered` in the trainer).
#
# ## 3. What moves is counted
#
# Every message and every byte is counted where it is sent. `wire_bytes` and `messages` are the closed forms, in
# elements and chunk lengths, so that they hold for any length. They must agree with the counter with `==`, on every
# rank, for every algorithm of every collective. No "about".

# %%
comm.traffic.reset()
calls = {
    "all_reduce": lambda x, name: comm.all_reduce(x, algorithm=name),
    "reduce_scatter": lambda x, name: comm.reduce_scatter(x, algorithm=name),
    "all_gather": lambda x, name: comm.all_gather(x[slice(*chunk_bounds(x.size, p)[rank])], x.copy(), algorithm=name),
    "all_to_all": lambda x, name: comm.all_to_all(x),
    "broadcast": lambda x, name: comm.broadcast(x),
    "barrier": lambda x, name: comm.barrier(),
}
checked, rows = 0, []
for op, call in calls.items():
    for name in ALGORITHMS[op]:
        if name == "mpi":  # the library does not say what it sends
            continue
        for length in (1000 * p, 1003, 3):
            before = comm.traffic.messages(op), comm.traffic.bytes(op)
            call(np.ones(length), name)
            counted = comm.traffic.messages(op) - before[0], comm.traffic.bytes(op) - before[1]
            formula = messages(op, name, p, rank), wire_bytes(op, name, length, 8, p, rank)
            assert counted == formula, f"{op} {name}, {length} elements: {counted} != {formula}"
            checked += 1
            if length == 1000 * p and op != "barrier":
                rows.append({"op": f"{op}, {name}", "bytes": counted[1], "expected": formula[1]})
say(f"counted messages and bytes == formula on each of {p} ranks: {checked} cases")
if p > 1 and rank == 0:
    show(plot_bytes(rows), "03_bytes")
    say(f"bytes that rank 0 sends for an array of {8000 * p:,} bytes over {p} ranks")

# %% [markdown]
# And the bound of section 2? Rank $r$ sends $2n$ minus the chunks $r$ and $r+1$. Summed over the ranks that is
# $2pn - 2n = 2(p-1)n$, for *any* length, divisible or not: exactly the least possible.

# %%
for length in (1000 * p, 1003, 3):
    sent = sum(wire_bytes("all_reduce", "ring", length, 8, p, r) for r in range(p))
    assert sent == 2 * (p - 1) * length * 8
say(f"ring, all {p} ranks together: 2(p-1)n bytes, the lower bound, also where {p} does not divide n")

# %% [markdown]
# ## 4. What it costs: $\alpha$ and $\beta$
#
# Say that a message of $m$ bytes takes $\alpha + \beta m$ (Thakur et al. 2005, section 3; they add $\gamma$ for each
# byte added up, which we leave out). Then a ring all-reduce takes
#
# $$ T_\text{ring} = 2(p-1)\left(\alpha + \frac{n}{p}\beta\right), \qquad
#    T_\text{doubling} = \lg p\,(\alpha + n\beta), \qquad
#    T_\text{halving} = 2\lg p\;\alpha + 2n\,\frac{p-1}{p}\,\beta. $$
#
# We need not believe it. On the `model` **clock** a rank's time advances only by what the cost model says. A rank's
# messages leave one after the other; each carries its sender's time, and the receiver continues at the later of the two
# plus $\alpha + \beta m$. Ranks are threads here, so 32 of them are no trouble. The prices are powers of two: sums of
# them are exact in binary, and simulated time equals the formula with `==`.

# %%
ALPHA, BETA = 2.0**-16, 2.0**-30  # 15 microseconds per message, 1.07 GB/s
FORMULAS = {
    "ring": lambda p, n: 2 * (p - 1) * (ALPHA + n / p * BETA),
    "recursive_doubling": lambda p, n: np.log2(p) * (ALPHA + n * BETA),
    "recursive_halving": lambda p, n: 2 * np.log2(p) * ALPHA + 2 * n * (p - 1) / p * BETA,
}


def simulate(comm, cases):
    """The time on the model clock of an all-reduce, for each (algorithm, bytes)."""
    times = []
    for algorithm, nbytes in cases:
        start = comm.clock.now()
        comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm=algorithm)
        times.append(comm.clock.now() - start)
    return times


if rank == 0:
    network = Network(ALPHA, BETA)
    for size in (2, 3, 5, 8, 32):
        cases = [("ring", 1024 * size), ("ring", 24 * size)]
        times = run_local(size, simulate, cases, clock="model", network=network)
        formula = [FORMULAS[name](size, nbytes) for name, nbytes in cases]
        assert times == [formula] * size  # on every rank
        microseconds = formula[0] * 1e6
        say(f"ring, {size:2} ranks, {1024 * size:6,} bytes: {microseconds:8.2f} us == 2(p-1)(alpha + n/p beta)")

# %% [markdown]
# Few messages or few bytes: which is better depends on $n$. Doubling and ring cost the same at
#
# $$ n^* = \frac{\alpha}{\beta}\cdot\frac{2(p-1) - \lg p}{\lg p - 2(p-1)/p}, $$
#
# and doubling and halving at $n^* = \frac{\alpha}{\beta}\cdot\frac{\lg p}{\lg p - 2(p-1)/p}$. The ratio $\alpha/\beta$
# is the number of bytes that a message could carry in the time it takes to get started: 16 KiB with our prices. (Both
# formulas are for $p = 2^k$ above 2. With two ranks doubling sends as few bytes as the ring, in half as many messages:
# it is always better, and the denominators are zero.) Lines are the formulas; each dot is a run of the library's code
# on 16 simulated ranks.

# %%
if rank == 0:
    size = 16
    lengths = [1 << k for k in range(10, 22, 2)]
    cases = [(name, nbytes) for name in FORMULAS for nbytes in lengths]
    every = run_local(size, simulate, cases, clock="model", network=network)
    times = every[0]
    assert every == [times] * size
    assert times == [FORMULAS[name](size, nbytes) for name, nbytes in cases]
    steps, share = np.log2(size), 2 * (size - 1) / size
    against_ring = ALPHA / BETA * (2 * (size - 1) - steps) / (steps - share)
    against_halving = ALPHA / BETA * steps / (steps - share)
    assert np.isclose(FORMULAS["ring"](size, against_ring), FORMULAS["recursive_doubling"](size, against_ring))
    figure = picture(7.0, 4.0)
    axes = figure.add_subplot()
    fine = np.geomspace(lengths[0], lengths[-1], 200)
    for k, (name, colour) in enumerate(zip(FORMULAS, ("#0072B2", "#D55E00", "#009E73"), strict=True)):
        axes.plot(fine, FORMULAS[name](size, fine) * 1e3, color=colour, label=name)
        axes.plot(lengths, np.array(times[k * len(lengths) : (k + 1) * len(lengths)]) * 1e3, "o", color=colour)
    for crossing, other in ((against_ring, "the ring"), (against_halving, "halving")):
        axes.axvline(crossing, color="#999999", linestyle=":")
        note = f" {crossing / 1024:.0f} KiB: {other}\n overtakes doubling"
        axes.text(crossing, 0.06 if other == "the ring" else 3.4, note, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{nbytes // 1024} KiB" for nbytes in lengths])
    axes.set_xlabel(f"size of the array, {size} ranks; lines: formulas, dots: simulated")
    axes.set_ylabel("time of an all-reduce (ms)")
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.95))
    tidy(axes)
    show(figure, "03_crossover")
    say(f"{len(cases)} simulated times == formulas on {size} ranks")

# %% [markdown]
# On this model recursive halving beats the ring everywhere. Then why does everyone speak of rings? The model says that
# messages do not slow one another down. In a real network they do: halving starts with half of the array sent to the
# far end of the machine, through links that all pairs share, where a ring only talks to neighbours. Also, halving needs
# a power of two: otherwise the extra ranks send and receive whole arrays. NCCL has rings and trees for such reasons.
#
# The rule of this library is in one function, and it follows the model only in part. Where ranks share cores, each
# *wait* costs more than $\alpha$: a rank that has nothing to do must give its core away and get it back. So large
# arrays take the way with the fewest rounds of waiting. On another machine another rule would be right, which is why
# MPI and NCCL carry tables of measured thresholds. `"auto"` is for callers who want speed; a caller who needs stated
# bits names the algorithm.

# %%
if rank == 0:
    show_source(choose)
say(f"few steps below {FEW_STEPS_BELOW // 1024} KiB, few bytes from there on")

# %% [markdown]
# ## 5. Against MPI's own, on the watch
#
# Now real time. Ours and `MPI_Allreduce` take turns in the same run; each time is the median over batches, of the
# slowest rank. Times are printed and not asserted: they belong to the machine and the moment.
#
# A time says little without the bandwidth it amounts to. nccl-tests defines two. With $S$ the bytes of the array and
# $t$ the time, **algbw** is $S/t$. But an all-reduce moves more than $S$, and how much depends on $p$. **busbw**
# $= \text{algbw}\cdot 2(p-1)/p$ is the rate at which each rank sends in the best algorithm, so it can be compared with
# the hardware's, whatever $p$.
#
# NB: several ranks share two cores and one memory here, so busbw is the speed of copying and adding, not of a network.

# %%
rows = []
for algorithm in ("auto", "ring") if p > 1 else ():
    for nbytes in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
        rows.append(measure(comm, "all_reduce", algorithm, nbytes, np.dtype(np.float32)))
if rows and rank == 0:
    say("     bytes  algorithm                     ours   MPI's own  ratio   algbw    busbw (GB/s)")
    for row in rows:
        algbw = row["bytes"] / row["seconds"] / 1e9
        label = row["algorithm"] if row["algorithm"] == row["runs"] else f"{row['algorithm']}: {row['runs']}"
        say(
            f"{row['bytes']:10,}  {label:24} {row['seconds'] * 1e6:7.0f} us {row['mpi_seconds'] * 1e6:8.0f} us"
            f"  {row['ratio']:5.2f}  {algbw:6.3f}   {algbw * 2 * (p - 1) / p:6.3f}"
        )
    show(plot_bench(rows), "03_against_mpi")

# %% [markdown]
# In the left picture each curve has a dotted one of the same colour: MPI's own, measured in turns with it.
#
# Every message costs some microseconds of interpreter. For small arrays nothing else counts: `auto` sends $\lg p$
# messages and the ring $2(p-1)$, and it shows. For megabytes the time goes into copying and adding bytes, and `np.add`
# does that as fast as MPI's C. `python -m minipar.bench collectives` measures all operations at more sizes.
#
# ## 6. Computing while it travels
#
# With `async_op=True` a collective returns a `Work` at once; `work.wait()` gives the result. Operations of one
# communicator run in the order in which they were issued, like kernels on a CUDA stream.
#
# First the time line of a single ring all-reduce. Rank 2 computes half as long again. On the model clock, with arrows
# from sender to receiver: the others exchange what they can, and gain nothing by it. A ring takes its full time from
# the moment when the *last* rank begins; everyone else waits. In a profile such a wait looks like a slow network. It is
# a slow rank (a *straggler*).


# %%
def draw(ranks, program, *args, name, arrows=True):
    """Run under a trace on the model clock, draw it, and return each rank's value."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")

        def traced(comm):
            start_trace(comm)
            comm.clock.resume(0.0)  # the time of start_trace's own barrier does not interest us
            value = program(comm, *args)
            save_chrome_trace(path, comm)
            return value

        values = run_local(ranks, traced, clock="model", network=network)
        show(plot_timeline(read_trace(path), arrows=arrows), name)
    return values


MILLISECOND = 2.0**-10  # nearly; a power of two keeps sums exact
FLOPS = 1e12 * MILLISECOND  # what the model clock's machine computes in that time


def late_rank(comm, nbytes):
    with comm.tracer.region("backward", flops=FLOPS * (1.5 if comm.rank == 2 else 1.0)):
        pass  # the model clock takes the time that the FLOPs say
    comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm="ring")
    return comm.clock.now()


if rank == 0:
    size, nbytes = 5, 5 << 16
    times = draw(size, late_rank, nbytes, name="03_late_rank")
    late, R = 1.5 * MILLISECOND, FORMULAS["ring"](size, nbytes)
    assert times == [late + R] * size
    ends = times[0] * 1e3
    say(f"rank 2 begins at {late * 1e3:.3f} ms; every rank ends at {ends:.3f} ms == that + 2(p-1)(alpha + n/p beta)")

# %% [markdown]
# Now a backward pass of $L$ layers, each taking $C$, each leaving a gradient whose all-reduce takes $R$. One after the
# other: $L(C + R)$. Asynchronously, an all-reduce travels while the layers before compute: the first starts at $C$, and
# then either computation or communication is the bottleneck:
#
# $$ \max(LC + R,\; C + LR). $$
#
# This is all there is to the overlap in PyTorch's DDP (Li et al. 2020, section 3.2.3); chapter 4 builds it.


# %%
def backward(comm, layers, nbytes, async_op):
    works = []
    for _ in range(layers):
        with comm.tracer.region("backward", flops=FLOPS):
            pass
        work = comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm="ring", async_op=async_op)
        works += [work] if async_op else []
    for work in works:
        work.wait()
    return comm.clock.now()


if rank == 0:
    size, layers, C = 4, 4, MILLISECOND
    for nbytes in (1 << 18, 1 << 20):
        R = FORMULAS["ring"](size, nbytes)
        one_by_one = run_local(size, backward, layers, nbytes, False, clock="model", network=network)
        overlapped = run_local(size, backward, layers, nbytes, True, clock="model", network=network)
        assert one_by_one == [layers * (C + R)] * size
        assert overlapped == [max(layers * C + R, C + layers * R)] * size
        ms = one_by_one[0] * 1e3, overlapped[0] * 1e3
        say(f"{nbytes:9,} bytes a layer: {ms[0]:.3f} ms one by one, {ms[1]:.3f} ms overlapped; == formulas")
    draw(size, backward, layers, 1 << 18, False, name="03_one_by_one", arrows=False)
    draw(size, backward, layers, 1 << 18, True, name="03_overlapped", arrows=False)

# %% [markdown]
# **Who moves the bytes while this rank computes?** On a GPU the copy engines and NCCL's kernels do. Here there is
# nobody: an operation goes on whenever its rank is inside *some* communication call, and `comm.progress()` is the one
# that does nothing else. A collective of many steps that is issued and then ignored stands still after its first. DDP
# here calls `progress` from its gradient hooks. Below, sleeping stands in for computing.


# %%
def finished_while_away(progress):
    """How many ranks find their all-reduce finished when they come back from 40 ms of something else."""
    comm.barrier()
    x = np.ones(1 << 14)
    work = comm.all_reduce(x, algorithm="ring", async_op=True)
    for _ in range(80):
        time.sleep(0.0005)
        if progress:
            comm.progress()
    done = np.array([float(work.done)])
    work.wait()
    assert (x == p).all()
    return int(comm.all_reduce(done)[0])


for progress in (False, True):
    ready = finished_while_away(progress)
    say(f"{'with' if progress else 'without'} progress(): finished on {ready} of {p} ranks before wait()")

# %% [markdown]
# ## Exercises: break it, and see what catches it
#
# **1. An index off by one.** In the ring's reduce-scatter, receive chunk $r - s - 1$ in step $s$ where it should be
# $r - s - 2$. All chunks have the same length when $p$ divides $n$, so every message arrives and nothing complains.
# Every rank's contribution is in every sum, too: it is only another chunk's. What catches it is the comparison with
# NumPy, and only if the values differ *from chunk to chunk*. A test in which each rank brings its rank number is the
# usual one, and it passes.


# %%
def broken_ring_reduce_scatter(link, x, out, combine):
    p, r = link.size, link.rank
    bounds = chunk_bounds(x.size, p)
    right, left = (r + 1) % p, (r - 1) % p
    travelling = x[slice(*bounds[left])].copy()
    for step in range(p - 1):
        start, stop = bounds[(r - step - 1) % p]  # the mistake: 2, not 1
        received = np.empty(stop - start, x.dtype)
        yield link.irecv(received, left, step), link.isend(travelling, right, step)
        travelling = out if step == p - 2 else received
        combine(received, x[start:stop], out=travelling)


def drive(comm, algorithm, x):
    """Run a reduce-scatter that is not in the library's table."""
    start, stop = chunk_bounds(x.size, comm.size)[comm.rank]
    out = np.empty(stop - start, x.dtype)
    for requests in algorithm(Wire(comm), x, out, np.add):
        for request in requests:
            request.wait()
    return out


def reduce_scatter_equals_numpy(algorithm, bring, ranks=4, n=8):
    parts = run_local(ranks, lambda comm: drive(comm, algorithm, bring(comm.rank, n)))
    expected = left_to_right([bring(r, n) for r in range(ranks)])
    assert np.array_equal(np.concatenate(parts), expected), f"{np.concatenate(parts)} is not {expected}"


def rank_number(of, n):
    return np.full(n, of + 1)


def different(of, n):
    return 10**of * np.arange(1, n + 1)


if rank == 0:
    reduce_scatter_equals_numpy(ring_reduce_scatter, different)
    reduce_scatter_equals_numpy(broken_ring_reduce_scatter, rank_number)  # passes!
    say("a test in which rank r brings r+1 in all places passes the broken ring\n")
    caught(AssertionError, lambda: reduce_scatter_equals_numpy(broken_ring_reduce_scatter, different))

# %% [markdown]
# Try a length that $p$ does not divide: then the chunks differ in length, and the very first wrong message is noticed.

# %%
if rank == 0:
    caught(CommunicationError, lambda: reduce_scatter_equals_numpy(broken_ring_reduce_scatter, different, n=9))

# %% [markdown]
# **2. A message of the wrong size.** One rank's array is shorter. MPI delivers a short message silently into a longer
# buffer, and leaves the rest as it was. The library checks the count that arrived.


# %%
def shorter_on_rank_1(comm):
    return comm.all_reduce(np.ones(99 if comm.rank == 1 else 100), algorithm="recursive_doubling")


if rank == 0:
    caught(CommunicationError, lambda: run_local(4, shorter_on_rank_1))

# %% [markdown]
# **3. One rank does something else.** Rank 2 calls `reduce_scatter` where the others call `all_reduce`. The first half
# of the messages is the same, so it even gets a result and leaves. Rank 3 never reaches the call at all (`if loss >
# threshold: ...` on one rank only is the classic). On threads it is known at once. Over MPI nobody sees all ranks.
# There, two ranks that disagree are noticed by the size of a message, if the sizes differ. Otherwise, and where a rank
# never comes, the others wait for `MINIPAR_TIMEOUT` seconds. The error names the operation and the missing message.


# %%
def another_collective_on_rank_2(comm):
    if comm.rank == 2:
        return comm.reduce_scatter(np.ones(8), algorithm="ring")
    return comm.all_reduce(np.ones(8), algorithm="ring")


def no_call_on_rank_3(comm):
    return comm.all_reduce(np.ones(8), algorithm="ring") if comm.rank != 3 else None


if rank == 0:
    caught(CommunicationError, lambda: run_local(4, another_collective_on_rank_2))
    caught(CommunicationError, lambda: run_local(4, no_call_on_rank_3))

# %% [markdown]
# **4. A mean divided twice.** The gradient is divided by $p$ before the all-reduce, and by $p$ once more after it. The
# loss still falls, only more slowly, and Adam, which is nearly blind to the scale of gradients, hides even that. A
# check needs no training: *the mean of equal arrays is the array*. With one rank it can catch nothing; test on at least
# two.


# %%
def mean(comm, x):
    return comm.all_reduce(x / comm.size)


def mean_divided_twice(comm, x):
    return comm.all_reduce(x / comm.size) / comm.size


def mean_of_equal_arrays_is_the_array(mean, ranks):
    x = np.arange(1.0, 5.0)
    for result in run_local(ranks, lambda comm: mean(comm, x)):
        assert np.allclose(result, x, rtol=1e-12), f"on {ranks} ranks the mean of equal {x} became {result}"


if rank == 0:
    for ranks in (1, 2, 3, 4):
        mean_of_equal_arrays_is_the_array(mean, ranks)
    mean_of_equal_arrays_is_the_array(mean_divided_twice, 1)
    say("one rank notices nothing\n")
    caught(AssertionError, lambda: mean_of_equal_arrays_is_the_array(mean_divided_twice, 4))

# %% [markdown]
# **Questions without an answer here**
#
# - Let one rank pass `op="max"` and the others `op="sum"`. Nothing above catches it: sizes and number of messages
#   agree. What would a check cost, in messages and bytes, and when would you switch it on?
# - Divide before the all-reduce or after it? When $p$ is a power of two the bits are the same. Why? And in float16,
#   which one would you choose, and against what danger?
# - Eight machines of eight GPUs each, fast links inside and slow ones between. Build an all-reduce from the collectives
#   of two communicators (`comm.split`). How many bytes cross the slow links, for each machine? Can you get below a flat
#   ring?

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
