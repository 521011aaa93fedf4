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
# Eight GPUs each hold a gradient of a gigabyte, and each needs the sum. The obvious program sends every gradient to
# everybody. It sends four times as many bytes as necessary, the GPUs end with *different* sums, and with two lines in
# the wrong order it hangs for large arrays. The picture below shows an algorithm without these faults, on four ranks.
# At the end of this chapter you can write it in two loops of four lines, prove that nothing sends less, and say when it
# is the wrong choice: on 16 ranks it needs 30 messages one after the other, and another algorithm only 4 larger ones.
#
# ![Ring all-reduce on four ranks](../visualize/gallery/ring_all_reduce.gif)
#
# Each row of boxes is a rank's array, cut into *chunks*. Digits are the ranks whose contributions a chunk sums, and
# Σ is the sum of all. Red frames are messages. Three rounds add up, three rounds hand out the sums.
#
# An operation like this, which all ranks of a group call together, is a **collective**. NCCL and MPI provide
# collectives as black boxes. Every strategy of this course sends with them, except pipelines and the ring of chapter
# 11, which send to neighbours.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
from functools import partial

import numpy as np

import minipar.more.tree.tree_collectives  # noqa: F401 adds the algorithm "tree"
from chapters.support.caught import catcher
from chapters.support.ch03 import watch
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from minipar.comm import ALGORITHMS, Network, chunk_bounds, run_local, wire_bytes, world
from minipar.comm.algorithms import (
    ordered_reduce_scatter,
    recursive_doubling_all_reduce,
    ring_all_gather,
    ring_reduce_scatter,
)
from minipar.comm.communicator import FEW_STEPS_BELOW
from minipar.errors import CommunicationError

if world().rank == 0:  # only one rank imports matplotlib: eight imports on two cores take seconds
    from chapters.support.ch03 import figures
    from chapters.support.overview import draw_strategies
    from chapters.support.show import show, show_file, show_source

# %%
comm = world()  # a communicator: a group of ranks, seen from one of them. A rank is one process; think of one GPU
p, rank = comm.size, comm.rank
say = printer(rank)  # rank 0 prints and draws; every rank checks
say(f"{p} rank{'s' if p > 1 else ''}, started by {comm.transport.launcher}")
if rank == 0:
    show(draw_strategies(), "03_strategies")

# %% [markdown]
# The column "each device sends" is what this chapter builds. Data parallelism adds up gradients: an *all-reduce*. ZeRO
# divides that into a *reduce-scatter* and an *all-gather*. Expert parallelism exchanges tokens: an *all-to-all*.

# %% [markdown]
# ## 3.1 Six collectives from two operations
#
# *Core, 6 minutes.*
#
# Each rank brings an array, which is cut into *chunks*, one for each rank.
#
# - **broadcast**: rank 0's array arrives on every rank. PyTorch's DDP sends its first weights with it.
# - **reduce**: the sum of all arrays arrives on rank 0. It is the first half of a sum over a [tree](more/trees.ipynb).
# - **all-reduce**: the sum arrives on every rank. Chapter 4 sums gradients with it, and chapter 6 activations.
# - **reduce-scatter**: chunk $r$ of the sum arrives on rank $r$. ZeRO sums gradients with it (chapter 5).
# - **all-gather**: each rank has one chunk, and all chunks arrive on every rank. ZeRO collects parameters with it.
# - **all-to-all**: chunk $j$ of every rank arrives on rank $j$. It brings tokens to their experts (chapter 12).
#
# Write the arrays of all ranks as a matrix with one row for each rank. Then each collective is one line of NumPy. The
# cell compares these lines with what the library's collectives leave on four ranks.

# %%
x = np.array([[1 << 4 * r + c for c in range(4)] for r in range(4)])  # one bit for rank r's chunk c: sums show them
nothing = np.zeros_like(x)
total = x.sum(axis=0)
definitions = {  # what all ranks have before and after
    "broadcast": (np.vstack([x[:1], nothing[1:]]), np.tile(x[0], (4, 1))),
    "reduce": (x, np.vstack([total, nothing[1:]])),
    "all-reduce": (x, np.tile(total, (4, 1))),
    "reduce-scatter": (x, np.diag(total)),
    "all-gather": (np.diag(x.diagonal()), np.tile(x.diagonal(), (4, 1))),
    "all-to-all": (x, x.T),
}
if rank == 0:
    for name, found in watch.six_collectives(x).items():
        assert np.array_equal(found, definitions[name][1]), name
    show(figures.draw_collectives(definitions), "03_collectives")

# %% [markdown]
# (MPI has more. A *gather* brings all chunks to one rank, and a *scatter* hands them out from there. A *barrier*
# carries no data: it returns when every rank has called it.)
#
# All of these are made of two operations. A rank can start to send an array (`isend`) and start to receive one
# (`irecv`). Both return at once, and what they return can be waited for. The commonest pattern has a name: start a
# send, start a receive, and only then wait for both (MPI calls it *sendrecv*).


# %%
def exchange(comm, leaving, dest, source, like=None):
    """Send one array and, at the same time, receive another. Return the one that arrived, which is shaped as `like`."""
    arriving = np.empty_like(leaving if like is None else like)
    sent = comm.isend(leaving, dest)
    received = comm.irecv(arriving, source)
    sent.wait()
    return received.wait()


right = (rank + 1) % p
left = (rank - 1) % p
assert exchange(comm, np.array([rank]), right, left) == left
say("every rank has received its left neighbour's rank")

# %% [markdown]
# The library carries the bytes between processes (MPI) or between threads of one process (`run_local`). No algorithm
# knows which of the two it runs on: both are a `Transport`, with the same `isend` and `irecv`.

# %% [markdown]
# ## 3.2 A first all-reduce and its three faults
#
# *Core, 8 minutes.*
#
# Put the ranks in a ring. Each array travels once round the ring, and every rank adds up what passes by.
#
# **Predict**: an array has $n$ bytes. How many bytes does each of the $p$ ranks send? In which order does rank 0 add
# the arrays of the ranks, and in which order does rank 1? So do all ranks get the same bits if the values are floats?


# %%
predict("bytes that each rank sends, in multiples of n", ...)  # replace the dots by a number
predict("all ranks get the same bits", ...)  # replace the dots by True or False


# %%
def first_ring(comm, x):
    """Return the sum of all ranks' x: whole arrays travel, p-1 times."""
    total = x.copy()
    travelling = x.copy()
    for _ in range(comm.size - 1):
        travelling = exchange(comm, travelling, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        total += travelling
    return total


def contribution(of, n, dtype=np.float32):
    """Return the n values that rank `of` brings. Every rank can compute every other's, and so check the result."""
    return (np.random.default_rng([2, of]).standard_normal(n) * 1000).astype(dtype)


def left_to_right(arrays):
    """Return ((a_0 + a_1) + a_2) + ...: the sum as one device computes it that accumulates."""
    return sum(arrays[1:], start=arrays[0])


n = 10_000
comm.traffic.reset()
integers = first_ring(comm, contribution(rank, n, np.int64))
assert np.array_equal(integers, left_to_right([contribution(r, n, np.int64) for r in range(p)]))
assert comm.traffic.bytes("send") == (p - 1) * integers.nbytes
floats = first_ring(comm, contribution(rank, n))
everyone = [np.frombuffer(data, np.float32) for data in comm.all_gather_bytes(floats.tobytes())]
differing = [int((of_rank != everyone[0]).sum()) for of_rank in everyone]
assert (max(differing) > 0) == (p >= 3)  # two ranks have one order only: a + b is b + a
assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
say(f"integers: the sum is right on {p} ranks")
reveal("bytes that each rank sends, in multiples of n", p - 1, say)
reveal("all ranks get the same bits", max(differing) == 0, say)
say(f"of {n:,} sums of floats, those that differ from rank 0's, for each rank: {differing}")

# %% [markdown]
# The sum of integers is right, and the algorithm has three faults.
#
# **It sends too much**: $(p-1)\,n$ bytes from each rank. Section 3.3 shows that $2n(p-1)/p$ suffice, less than $2n$
# however many ranks there are. On 8 ranks that is $1.75\,n$ instead of $7n$: a quarter.
#
# **The ranks disagree.** Rank $r$ adds in the order $r, r-1, r-2, \dots$. Floating-point addition is commutative but
# not associative: $0.1 + 0.2 + 0.3 \ne 0.3 + 0.2 + 0.1$. With integers nobody sees it. With floats the replicas of a
# model drift apart ([chapter 14](14_my_run_is_wrong.ipynb) measures drift).
#
# **The order of two lines decides whether it hangs.** A send is complete when its array may be changed again. For a
# small message MPI copies the bytes aside and reports completion at once (the *eager* protocol); for a large one it
# waits until the receiver has asked for it (*rendezvous*). If you wait for the send *before* you start the receive, the
# program works with small arrays and hangs with large ones: every rank waits for its neighbour to begin to receive. The
# limit was 4 KiB with Open MPI and 8 KiB with MPICH on the machine where this project was written.
#
# `run_local` completes a send only when it has been received, so it deadlocks for *any* size. And as it sees all ranks,
# it can tell that none of them can move.


# %%
caught = catcher(say)  # runs a check that must fail, and prints what it says


def blocking_ring(comm):
    comm.isend(np.ones(1), (comm.rank + 1) % comm.size).wait()  # every rank blocks here
    return comm.irecv(np.empty(1), (comm.rank - 1) % comm.size).wait()


if rank == 0:
    caught("every rank sends first", lambda: run_local(3, blocking_ring), CommunicationError)

# %% [markdown]
# ## 3.3 All-reduce = reduce-scatter + all-gather
#
# *Core, 12 minutes.*
#
# A **reduce-scatter** and an **all-gather**, one after the other, are an **all-reduce**: chunk $r$ of the sum arrives
# on rank $r$, and then all chunks arrive everywhere. (If $p$ does not divide the array, the first chunks are longer by
# one element.) In a ring each of the two takes $p-1$ steps, and in each step each rank sends one chunk, $n/p$ bytes, to
# its right. In the reduce-scatter a rank *adds* what arrives to its own part of that chunk and sends the sum on. In the
# all-gather it *keeps* what arrives and sends it on.
#
# This is the animation on the first page: red blocks are *added* in the first three rounds and *kept* in the others.
# [Exercise 1](exercises/e01_ring_reduce_scatter.py) asks for the reduce-scatter and
# [exercise 2](exercises/e02_all_reduce.py) for the all-gather. Write them before you open the next cell:
# `make exercises PYTEST="-k e01"`, then `-k e02`. In the cell `after_step` lets us watch.


# %% tags=["hide-input"]
def ring_reduce_scatter_in_place(comm, x, after_step=lambda: None):
    """Leave chunk r of the sum in chunk r of x. The other chunks end with partial sums."""
    p, r = comm.size, comm.rank
    chunks = np.array_split(x, p)  # views of x
    for step in range(p - 1):
        leaving = chunks[(r - 1 - step) % p]
        growing = chunks[(r - 2 - step) % p]
        growing += exchange(comm, leaving, (r + 1) % p, (r - 1) % p, like=growing)  # in the next step it leaves
        after_step()


def ring_all_gather_in_place(comm, x, after_step=lambda: None):
    """Fill x with all ranks' chunks: at first each rank has chunk r."""
    p, r = comm.size, comm.rank
    chunks = np.array_split(x, p)
    for step in range(p - 1):
        leaving = chunks[(r - step) % p]
        missing = chunks[(r - 1 - step) % p]
        missing[...] = exchange(comm, leaving, (r + 1) % p, (r - 1) % p, like=missing)
        after_step()


def ring(comm, x, after_step=lambda: None):
    """Set x = the sum over all ranks."""
    ring_reduce_scatter_in_place(comm, x, after_step)
    ring_all_gather_in_place(comm, x, after_step)


for length in (1000 * p, 1003, 3, 0):  # also where p does not divide it
    x = contribution(rank, length, np.int64)
    comm.traffic.reset()
    ring(comm, x)
    assert np.array_equal(x, left_to_right([contribution(r, length, np.int64) for r in range(p)]))
    assert comm.traffic.messages() == 2 * (p - 1)
    assert comm.traffic.bytes() == wire_bytes("all_reduce", "ring", length, 8, p, rank)  # 2n(p-1)/p if p divides n
say(f"the ring's sum is right on {p} ranks, with {2 * (p - 1)} messages and 2n(p-1)/p bytes per rank")

# %% [markdown]
# The reduce-scatter in four lines, for a rank $r$: cut `x` into $p$ chunks; in step $k = 0 \dots p-2$ send chunk
# $r - 1 - k$ to the right, receive into room for chunk $r - 2 - k$ from the left, and add it.
#
# To watch it, `watch_blocks` lets rank $r$ bring the value $2^r$ in each chunk. Then the binary digits of a partial sum
# say whose contributions are in it. This is the memory of four ranks after each step:

# %%
if rank == 0:
    titles = [f"{half} {step}" for half in ("reduce-scatter", "all-gather") for step in (1, 2, 3)]
    panels = watch.watch_blocks(4, ring, "at first", *titles)
    complete = panels[3][1] == 0b1111  # (rank, chunk)
    assert np.array_equal(complete, np.eye(4)) and (panels[-1][1] == 0b1111).all()
    show(figures.plot_blocks([panels[:4], panels[3:]]), "03_ring")

# %% [markdown]
# Into each framed block went a message from the rank above it (into rank 0's from rank 3). Follow chunk 0: its sum
# starts on rank 1, goes to rank 2 and rank 3, and is complete on rank 0. Then the complete chunk goes round once more.
# After 3 steps rank $r$ has the whole sum of chunk $r$ and of no other; after 6 steps every rank has all of it.

# %% [markdown]
# ### No algorithm sends less
#
# *Deeper, 4 minutes.*

# %% [markdown]
# Look at one element, and put all receives of messages about it in the order in which they happen. Some rank is the
# first to know its sum. Until then each of the other $p-1$ ranks must have sent at least one message that was received:
# without it, its contribution would be missing. After that each of the other $p-1$ ranks must still receive at least
# one. That makes $2(p-1)$ messages for each element, so $2(p-1)\,n$ bytes over all ranks, and some rank sends at least
# the average, $2n(p-1)/p$. The ring sends exactly that. (Patarasuk and Yuan 2009 prove it for whole arrays. The
# argument assumes that a message about an element is as long as the element, and that only ranks add. With gradient
# compression, which gives up the exact sum, ranks send less; so they do where the network's switches add, as in
# NVIDIA's SHARP.)

# %% [markdown]
# ### In the library
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The library's two halves are the two loops above, written as generators (3.9). `link` is a communicator's view of one
# operation: it counts each message and gives it a tag that says what this rank is doing (section 3.10). The library
# adds three things: a reduce-scatter's input keeps its values, because the partial sums travel in scratch memory (of
# the collectives, only `all_reduce` and `broadcast` overwrite their input, and `all_gather` fills its `out`); `combine`
# may be a maximum instead of a sum; and the order in which a chunk is added up is a promise (section 3.5).

# %%
x = contribution(rank, n)
ring(comm, x)
assert np.array_equal(x, comm.all_reduce(contribution(rank, n), algorithm="ring"))
say("our sum and the library's have the same bits")
if rank == 0:
    show_source(ring_reduce_scatter, ring_all_gather)

# %% [markdown]
# ## 3.4 Fewer messages: recursive doubling and halving
#
# *Core, 8 minutes.*
#
# The ring needs $2(p-1)$ messages one after the other. For a small array that is what counts, and fewer are enough.
#
# **Recursive doubling**: at distance $1, 2, 4, \dots$ pairs of ranks exchange *everything*, and both add. That takes
# $\lg p = \log_2 p$ messages of $n$ bytes each.
#
# ![Recursive doubling on four ranks](../visualize/gallery/recursive_doubling.gif)
#
# Each message carries all chunks, with all contributions that its sender has so far.
#
# **Recursive halving and doubling** (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005): at distance $p/2, p/4,
# \dots, 1$ the two ranks of a pair are still responsible for the same part of the array, at first for all of it. Each
# sends the half that its partner will keep, and adds what arrives to the half that it keeps itself. After $\lg p$
# messages that is a reduce-scatter. The way back is an all-gather: $2\lg p$ messages, and only $2n(p-1)/p$ bytes.
#
# ![Reduce-scatter by recursive halving on four ranks](../visualize/gallery/reduce_scatter.gif)
#
# This is the way there: two chunks go to the rank at distance 2, then one chunk goes to the rank at distance 1.
# [Exercise 3](exercises/e03_recursive_doubling.py) asks for doubling, for any number of ranks (`make exercises
# PYTEST="-k e03"`). Write it before you open the next cell.


# %% tags=["hide-input"]
def doubling(comm, x, after_step=lambda: None):
    """Set x = the sum over p = 2^k ranks."""
    distance = 1
    while distance < comm.size:
        x += exchange(comm, x, comm.rank ^ distance, comm.rank ^ distance)
        after_step()
        distance *= 2


# %%
def halving(comm, x, after_step=lambda: None, distance=None):
    """Set x = the sum over p = 2^k ranks; p divides the length of x."""
    distance = distance or comm.size // 2
    partner = comm.rank ^ distance  # the rank whose number differs in one binary digit
    kept, given = np.split(x, 2)
    if comm.rank & distance:  # the lower rank keeps the lower half, its partner the upper one
        kept, given = given, kept
    kept += exchange(comm, given, partner, partner)
    after_step()
    if distance > 1:
        halving(comm, kept, after_step, distance // 2)  # the whole sum of the kept half ...
    given[...] = exchange(comm, kept, partner, partner)  # ... for the whole sum of the other half
    after_step()


def run_and_count(comm, algorithm):
    x = np.full(800, comm.rank)
    algorithm(comm, x)
    assert (x == sum(range(comm.size))).all()
    return comm.traffic.messages("send"), comm.traffic.bytes("send") / x.nbytes


if rank == 0:
    counts = {algorithm.__name__: run_local(8, run_and_count, algorithm)[0] for algorithm in (ring, doubling, halving)}
    assert counts == {"ring": (14, 1.75), "doubling": (3, 3.0), "halving": (6, 1.75)}
    titles = ["halving,\ndistance 2", "halving,\ndistance 1", "back,\ndistance 1", "back,\ndistance 2"]
    rows = [watch.watch_blocks(4, doubling, "at first", "doubling,\ndistance 1", "doubling,\ndistance 2")]
    rows += [watch.watch_blocks(4, halving, "at first", *titles)]
    show(figures.plot_blocks(rows), "03_doubling_and_halving")
    say(f"messages and multiples of n sent by each of 8 ranks: {counts}")
    show_source(recursive_doubling_all_reduce)

# %% [markdown]
# | all-reduce on 8 ranks | messages one after the other | bytes sent per rank |
# | --- | --- | --- |
# | ring | 14 | $1.75\,n$ |
# | recursive doubling | 3 | $3\,n$ |
# | recursive halving and doubling | 6 | $1.75\,n$ |
#
# In the picture, halving leaves rank $r$ with chunk $r$ of the sum, and each step exchanges half of the bytes of the
# step before.
#
# The library's version, shown above, takes any number of ranks. Where $p$ is not a power of two, each extra rank hands
# its array to a neighbour (`fold`) and waits for the result (`unfold`). `virtual` is a rank's number among the others.
# NCCL gets by with few steps in another way: [trees](more/trees.ipynb).

# %% [markdown]
# ### Hierarchical all-reduce
#
# *Core, 4 minutes.*
#
# Let $p$ ranks sit on hosts of $g$ GPUs each. Inside a host messages are fast, between hosts they are slow. So work in
# three phases. Here are four ranks on two hosts, ranks 0 and 1 on the first:

# %%
if rank == 0:
    titles = ["1. reduce-scatter\ninside each host", "2. all-reduce\nbetween hosts", "3. all-gather\ninside each host"]
    panels = watch.watch_blocks(4, watch.hierarchical, "at first", *titles)
    show(figures.plot_blocks([panels]), "03_hierarchical")

# %% [markdown]
# 1. A reduce-scatter inside each host. Each rank has its host's sum of $n/g$ bytes.
# 2. An all-reduce between the ranks with the same place in their hosts. Only this phase leaves a host.
# 3. An all-gather inside each host.
#
# What leaves a host? In phase 2 a rank all-reduces $n/g$ bytes among $p/g$ hosts, so it sends $2\frac{n}{g}(1 - g/p)$
# bytes. A host has $g$ such ranks, which send $2n(1 - g/p)$ bytes in all, in $2(p/g - 1)$ steps. In a flat ring one
# rank of each host sends to another host: $2n(1 - 1/p)$ bytes, in $2(p-1)$ steps. With many hosts the bytes are nearly
# the same, and with two hosts little more than half. The number of steps on the slow network is always smaller, and
# each GPU can use a network card of its own.
#
# **Its bits.** All ranks hold the same, because each chunk is summed once and then copied. But the sum is *nested*:
# first inside each host, then over the hosts, as in $(a_0 + a_1) + (a_2 + a_3)$. These are not the bits of one device
# that accumulates, nor those of a flat ring. Another number of GPUs per host gives other bits. Problem 5 proves it.
#
# `comm.split_into(groups, axis)` makes such groups. Every rank calls it, and gets two communicators: of its own group,
# which are neighbours, and of the ranks that have the same place in theirs. `axis` is a name under which the messages
# inside the groups are counted.

# %% [markdown]
# ## 3.5 All-to-all, and the order of a sum
#
# *Core, 8 minutes.*
#
# In an **all-to-all** every rank sends chunk $j$ to rank $j$: all chunks but its own, $n(p-1)/p$ bytes.
#
# The code below is the *pairwise* algorithm: at distance 1, 2, ..., $p-1$ each rank sends to the rank that far to its
# right, and receives from the one that far to its left. No chunk passes through a third rank.
#
# It is also half of another all-reduce. If each rank sends chunk $j$ to rank $j$ directly, rank $j$ holds all $p$
# contributions to its chunk and can add them **in rank order**. The library calls this algorithm `ordered`.


# %%
def all_to_all(comm, x):
    """Send chunk j of x to rank j. Return the chunks that arrive here, one row for each rank that sent one."""
    p, r = comm.size, comm.rank
    chunks = np.split(x, p)
    arrived = np.empty((p, x.size // p), x.dtype)
    arrived[r] = chunks[r]
    for distance in range(1, p):
        dest = (r + distance) % p
        source = (r - distance) % p
        arrived[source] = exchange(comm, chunks[dest], dest, source)
    return arrived


x = contribution(rank, 100 * p)
assert np.array_equal(all_to_all(comm, x).ravel(), comm.all_to_all(x))
assert np.array_equal(left_to_right(all_to_all(comm, x)), comm.reduce_scatter(x, algorithm="ordered"))
say("reduce-scatter in rank order = an all-to-all and a sum from left to right: the library's bits")

# %% [markdown]
# Now the claim about bits. The ring says that it adds up chunk $j$ in the order $j+1, j+2, \dots, j$ (modulo $p$). If
# that is true, NumPy can repeat it and gets the same bits. `ordered` claims $0, 1, \dots, p-1$: the bits of one device
# that accumulates. And every algorithm must leave the *same* bits on all ranks. In the ring each chunk is added up on
# one path and then only copied. In recursive doubling the two ranks of a pair add the same two values, one as $a+b$ and
# the other as $b+a$.
#
# Doubling and halving add in pairs, in two orders. On 8 ranks doubling begins with the neighbour, halving with the rank
# at distance 4:
#
# $$\text{doubling: } ((a_0 + a_1) + (a_2 + a_3)) + ((a_4 + a_5) + (a_6 + a_7)), \qquad
# \text{halving: } ((a_0 + a_4) + (a_2 + a_6)) + ((a_1 + a_5) + (a_3 + a_7)).$$
#
# `tree` sends what `ordered` sends, but each chunk's owner adds in the pairs of doubling: the bits of doubling with the
# bytes of the ring. ([Chapter 6](06_tensor_parallel.ipynb) uses it.)

# %%
everybody = [contribution(r, n) for r in range(p)]
expected = left_to_right(everybody)
names = list(ALGORITHMS["all_reduce"])
if comm.transport.launcher == "mpirun":
    names.append("mpi")  # MPI's own, called with mpi4py
results = {}
differing = {}
for name in names:
    x = contribution(rank, n)
    results[name] = watch.mpis_own_all_reduce(comm, x) if name == "mpi" else comm.all_reduce(x, algorithm=name)
    assert len(set(comm.all_gather_bytes(results[name].tobytes()))) == 1 or name == "mpi"  # MPI does not promise it
    assert np.abs(results[name] - expected).max() < 1e-5 * np.abs(expected).max()
    differing[name] = int((results[name] != expected).sum())

ring_order = np.empty_like(expected)
for j, (start, stop) in enumerate(chunk_bounds(n, p)):
    ring_order[start:stop] = left_to_right([everybody[(j + 1 + k) % p][start:stop] for k in range(p)])
assert np.array_equal(results["ordered"], expected) and np.array_equal(results["ring"], ring_order)


def in_pairs(arrays, distances):
    """Add up in pairs: at each distance every array becomes its own sum with that of its partner."""
    for distance in distances:
        arrays = [arrays[r] + arrays[r ^ distance] for r in range(p)]
    return arrays[0]


distances = [2**k for k in range(p.bit_length() - 1)]
if p == 2 ** len(distances):
    assert np.array_equal(results["recursive_doubling"], in_pairs(everybody, distances))
    assert np.array_equal(results["recursive_halving"], in_pairs(everybody, distances[::-1]))
say("each algorithm's bits are those of its order, added up in NumPy")
if rank == 0:
    show(figures.plot_orders(differing, n), "03_orders")

# %% [markdown]
# None of these orders is more accurate than the others; they are different, and each changes with $p$. What matters for
# training is that the replicas agree, and that a run can be repeated. A *proof* that two programs train equally needs
# more: the same order in both. That is what `ordered` is for (`--reduction ordered` in the trainer, `python -m
# minipar.train`).

# %% [markdown]
# ### In the library: all messages at once
#
# *Deeper, 2 minutes.*

# %% [markdown]
# The library's `ordered` starts all messages at once and waits only where it needs the next contribution. It sends as
# many messages and bytes as the ring, but none of them depends on an earlier one. So ranks wait for one another once
# instead of $p-1$ times. That counts where ranks share cores: a rank that waits gives its core to another, and comes
# back when it is its turn again. The price is scratch memory for a second array.

# %%
if rank == 0:
    show_source(ordered_reduce_scatter)

# %% [markdown]
# ## 3.6 Every message is counted
#
# *Deeper, 3 minutes.*

# %% [markdown]
# Every message and every byte is counted where it is sent. `messages` and `wire_bytes` are the closed forms, exact for
# any length. The counter must agree with `==`, on every rank, for every algorithm of every collective.

# %%
for length in (1003, 3, 1000 * p):
    rows = watch.count_calls(comm, length)
    assert all((row["messages"], row["bytes"]) == (row["expected_messages"], row["expected"]) for row in rows)
assert wire_bytes("all_reduce", "ring", 8000, 8, 8, 0) == 112_000
assert wire_bytes("all_to_all", "pairwise", 8000, 8, 8, 0) == 56_000
say(f"counted messages and bytes == formulas on each of {p} ranks, {len(rows)} algorithms at three lengths")
if p > 1 and rank == 0:
    from visualize import plot_bytes

    show(plot_bytes(rows), "03_bytes")

# %% [markdown]
# With 8 ranks and 64,000 bytes a ring all-reduce sends 112,000 bytes per rank; a reduce-scatter, an all-gather and an
# all-to-all send 56,000 each. A broadcast's bytes depend on the rank: the root of its binomial tree sends up to
# $n \lg p$, a leaf sends nothing.

# %% [markdown]
# ## 3.7 What it costs: latency and bandwidth
#
# *Core, 8 minutes.*
#
# Say that a message of $n$ bytes takes $\alpha + \beta n$ (Thakur et al. 2005, section 3; they add $\gamma$ for each
# byte added up, which we leave out). Then an all-reduce takes
#
# $$ T_\text{ring} = 2(p-1)\left(\alpha + \frac{n}{p}\beta\right), \qquad
#    T_\text{doubling} = \lg p\,(\alpha + n\beta), \qquad
#    T_\text{halving} = 2\lg p\;\alpha + 2n\,\frac{p-1}{p}\,\beta. $$
#
# On the `model` **clock** a rank's time advances only by what the cost model says. A rank's messages leave one after
# the other, and each carries the time at which it left. The receiver continues at
# $\max(\text{its own time}, \text{that time} + \alpha + \beta n)$. The ranks are threads here, so 32 of them are no
# trouble. The prices are powers of two: sums of them are exact in binary, and the simulated time equals the formula
# with `==`.

# %%
ALPHA = 2.0**-16  # 15 microseconds per message
BETA = 2.0**-30  # 1.07 GB/s
network = Network(ALPHA, BETA)
FORMULAS = {
    "ring": lambda p, n: 2 * (p - 1) * (ALPHA + n / p * BETA),
    "recursive_doubling": lambda p, n: np.log2(p) * (ALPHA + n * BETA),
    "recursive_halving": lambda p, n: 2 * np.log2(p) * ALPHA + 2 * n * (p - 1) / p * BETA,
}


def simulate(comm, algorithm, nbytes):
    comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm=algorithm)
    return comm.clock.now()


if rank == 0:
    for ranks in (3, 5, 32):
        times = run_local(ranks, simulate, "ring", 1024 * ranks, clock="model", network=network)
        assert times == [FORMULAS["ring"](ranks, 1024 * ranks)] * ranks
    say("ring: simulated time == formula on each of 3, 5 and 32 ranks")

# %% [markdown]
# Few messages or few bytes: which is better depends on $n$ and $\alpha/\beta$. That ratio is the number of bytes that a
# message could carry in the time it takes to get started: 16 KiB with our prices.
#
# **Predict**: on 16 ranks doubling needs 4 messages one after the other, the ring 30. From which size on is the ring
# faster?

# %%
predict("the ring overtakes doubling at", ...)  # replace the dots by KiB

# %%
if rank == 0:
    ranks = 16
    steps = 4
    share = 2 * 15 / 16
    times = {(name, 1 << k): FORMULAS[name](ranks, 1 << k) for name in FORMULAS for k in range(10, 22, 2)}
    for (name, nbytes), seconds in times.items():
        assert run_local(ranks, simulate, name, nbytes, clock="model", network=network) == [seconds] * ranks
    crossings = {
        "halving overtakes doubling": ALPHA / BETA * steps / (steps - share),
        "the ring overtakes doubling": ALPHA / BETA * (2 * (ranks - 1) - steps) / (steps - share),
    }
    assert [round(nbytes / 1024) for nbytes in crossings.values()] == [30, 196]
    assert [round(times[name, 1 << 20] * 1e3, 2) for name in FORMULAS] == [2.29, 3.97, 1.95]
    reveal("the ring overtakes doubling at", round(crossings["the ring overtakes doubling"] / 1024), say, "KiB")
    formulas = {name: partial(FORMULAS[name], ranks) for name in FORMULAS}
    show(figures.plot_crossover(times, formulas, crossings), "03_crossover")
assert FEW_STEPS_BELOW == 256 * 1024

# %% [markdown]
# Set $T_\text{ring} = T_\text{doubling}$ and solve for $n$:
#
# $$ n^* = \frac{\alpha}{\beta}\cdot\frac{2(p-1) - \lg p}{\lg p - 2(p-1)/p}. $$
#
# Above $n^*$ the ring wins. In the same way halving wins against doubling above $n^* =
# \frac{\alpha}{\beta}\cdot\frac{\lg p}{\lg p - 2(p-1)/p}$. (Both formulas are for $p = 2^k$ above 2. With two ranks
# doubling is always better, and the denominators are zero.) Each mark is a run of the library's code on 16 simulated
# ranks: halving overtakes doubling at 30 KiB and the ring overtakes it at 196 KiB. For 1 MiB the ring takes 2.29 ms,
# doubling 3.97 ms and halving 1.95 ms.

# %% [markdown]
# ### Why rings all the same?
#
# *Deeper, 2 minutes.*

# %% [markdown]
# On this model recursive halving beats the ring for every $p = 2^k$ above 2. Why are rings used all the same? The model
# says that messages do not slow one another down. In a real network they do. In the first step of halving every rank
# sends half of the array to a distant rank, through links that all pairs share. In a ring a rank sends to a neighbour
# only. And halving needs a power of two: otherwise the extra ranks send and receive whole arrays.
#
# In this library `algorithm="auto"` takes recursive doubling for an all-reduce below 256 KiB, and `ordered` from there
# on: as few bytes as the ring, and two rounds of waiting. On another machine another rule would be right, which is why
# MPI and NCCL carry tables of measured thresholds. A caller who needs certain bits names the algorithm.

# %% [markdown]
# ## 3.8 algbw and busbw
#
# *Deeper, 3 minutes.*

# %% [markdown]
# A measured time says little without the bandwidth it amounts to. nccl-tests defines two. **algbw** is the size of the
# array divided by the time. But an all-reduce moves more than its array, and how much depends on $p$. **busbw** $=
# \text{algbw}\cdot 2(p-1)/p$ is the rate at which each rank sends in the best algorithm, so it can be compared with the
# hardware's, whatever $p$. For a reduce-scatter, an all-gather or an all-to-all the factor is $(p-1)/p$.

# %%
for ranks in (2, 16, 128):
    nbytes = 1 << 30
    algbw = nbytes / FORMULAS["ring"](ranks, nbytes) / 1e9
    busbw = algbw * 2 * (ranks - 1) / ranks
    say(f"1 GiB, {ranks:3} ranks: algbw {algbw:.2f} GB/s, busbw {busbw:.2f} GB/s; a link has {1e-9 / BETA:.2f} GB/s")
    assert 0.99 < busbw * 1e9 * BETA < 1

# %% [markdown]
# [Measured collectives](more/measured_collectives.ipynb) has the library's times on this machine beside MPI's own.

# %% [markdown]
# ## 3.9 Computing while it travels
#
# *Core, 6 minutes.*
#
# `exchange` blocks until its messages are done. With `async_op=True` a collective starts its first messages and returns
# a `Work` at once. The rank computes, and later `work.wait()` runs the collective to its end and gives the result.
# Operations of one communicator run in the order in which they were issued, like kernels on a CUDA stream.
#
# **Who moves the bytes while this rank computes?** On a GPU the copy engines and NCCL's kernels do. Here an operation
# goes on only while its rank is inside *some* communication call. A ring that is issued and then ignored stands still
# after its first step. `comm.progress()` is a call that only moves operations on; data parallelism makes it from its
# gradient hooks. On the model clock messages travel by themselves, as on a GPU.
#
# What can be hidden? Take a backward pass of $L$ layers. Each takes $T_B$ and leaves a gradient whose all-reduce takes
# $T_\text{ring}$. One after the other: $L(T_B + T_\text{ring})$. Asynchronously, an all-reduce travels while the layers
# before it compute. If computation takes longer, the last all-reduce starts at $L\,T_B$. If communication takes longer,
# all $L$ of them run back to back from $T_B$ on, when the first gradient is there. So the pass takes
#
# $$ \max(L\,T_B + T_\text{ring},\; T_B + L\,T_\text{ring}). $$
#
# This is the overlap in PyTorch's DDP (Li et al. 2020, section 3.2.3); chapter 4 builds it.

# %%
T_B = 2.0**-10  # seconds of a layer's backward pass: nearly 1 ms, and a power of two keeps sums exact


def backward(comm, layers, nbytes, async_op):
    works = []
    for _ in range(layers):
        with comm.tracer.region("backward", flops=1e12 * T_B):
            pass  # the model clock of a device with 1e12 floating-point operations per second advances by T_B
        work = comm.all_reduce(np.zeros(nbytes, np.uint8), algorithm="ring", async_op=async_op)
        works += [work] if async_op else []
    for work in works:
        work.wait()
    return comm.clock.now()


if rank == 0:
    for nbytes, milliseconds in ((1 << 20, [10.13, 7.2, 1.56]), (1 << 18, [5.74, 4.36, 0.46])):
        T_ring = FORMULAS["ring"](4, nbytes)
        one_by_one, figure = watch.timeline(4, backward, 4, nbytes, False, network=network)
        overlapped, figure_overlapped = watch.timeline(4, backward, 4, nbytes, True, network=network)
        assert one_by_one == [4 * (T_B + T_ring)] * 4
        assert overlapped == [max(4 * T_B + T_ring, T_B + 4 * T_ring)] * 4
        assert [round(seconds * 1e3, 2) for seconds in (one_by_one[0], overlapped[0], T_ring)] == milliseconds
        say(f"{nbytes >> 10} KiB per layer: {milliseconds[0]} ms one by one, {milliseconds[1]} ms overlapped")
    watch.on_one_axis({"one by one, 4 ranks": figure, "overlapped, 4 ranks": figure_overlapped})
    show(figure, "03_one_by_one")
    show(figure_overlapped, "03_overlapped")

# %% [markdown]
# With 256 KiB per layer the overlap shortens the pass from 5.74 ms to 4.36 ms, and only the last layer's all-reduce
# (0.46 ms) is exposed. With 1 MiB per layer communication is the bottleneck: 7.20 ms instead of 10.13 ms.

# %% [markdown]
# ### How an operation stops and goes on
#
# *Deeper, 4 minutes.*

# %% [markdown]
# If a rank is to compute while an operation is under way, the algorithm must be able to stop and to continue later. In
# Python that is a *generator*: it starts messages, and yields those that must be done before it can go on. Its caller
# decides how to wait. This is the ring's second half:


# %%
def ring_all_gather_steps(comm, x):
    """Do as ring_all_gather_in_place does, but yield the messages of each step instead of waiting for them."""
    p, r = comm.size, comm.rank
    chunks = np.array_split(x, p)
    for step in range(p - 1):
        leaving = chunks[(r - step) % p]
        missing = chunks[(r - 1 - step) % p]
        yield comm.isend(leaving, (r + 1) % p), comm.irecv(missing, (r - 1) % p)


x = contribution(rank, n)
ring_reduce_scatter_in_place(comm, x)
for requests in ring_all_gather_steps(comm, x):
    # The messages of one step are on their way. Here the rank could compute.
    for request in requests:
        request.wait()
assert np.array_equal(x, comm.all_reduce(contribution(rank, n), algorithm="ring"))
say("the generator gives the ring's bits")

# %% [markdown]
# The `Work` of an asynchronous collective keeps such a generator, and `wait` runs it to its end.

# %% [markdown]
# ## 3.10 Mistakes, and what catches them
#
# *Deeper, 8 minutes.*

# %% [markdown]
# **1. Off by one chunk.** Start the ring with chunk $r$ instead of $r-1$. All sums are right, but rank $r$ ends with
# the sum of chunk $r+1$. (Some descriptions of the ring do it this way; their all-gather starts there too.) If the
# function then returns chunk $r+1$ as its result, all messages arrive and nothing complains. A test in which each rank
# brings its rank in all places is the usual one, and it passes: all chunks of the sum are equal. The values must differ
# *from chunk to chunk*.


# %%
def off_by_one(comm, x):
    """The reduce-scatter of 3.3, started with chunk r instead of r - 1."""
    p, r = comm.size, comm.rank
    chunks = np.array_split(x, p)
    for step in range(p - 1):
        leaving = chunks[(r - step) % p]
        growing = chunks[(r - 1 - step) % p]
        growing += exchange(comm, leaving, (r + 1) % p, (r - 1) % p, like=growing)


def check(reduce_scatter, chunk_of, values):
    """Compare a reduce-scatter on four ranks with NumPy. Rank r brings values(r), and returns chunk chunk_of(r)."""

    def returned(comm):
        x = values(comm.rank)
        reduce_scatter(comm, x)
        return np.split(x, 4)[chunk_of(comm.rank)]

    result = np.concatenate(run_local(4, returned))
    expected = sum(values(r) for r in range(4))
    assert np.array_equal(result, expected), f"{result} is not {expected}"


def its_rank_everywhere(r):
    return np.full(8, r + 1)


def other_values_in_each_place(r):
    return 10**r * np.arange(1, 9)


if rank == 0:
    check(ring_reduce_scatter_in_place, lambda r: r, other_values_in_each_place)
    check(off_by_one, lambda r: (r + 1) % 4, its_rank_everywhere)
    say("a test in which rank r brings r + 1 in all places does not see the mistake\n")
    caught("chunk r + 1", lambda: check(off_by_one, lambda r: (r + 1) % 4, other_values_in_each_place))

# %% [markdown]
# **2. A message of the wrong size.** One rank's array is shorter. MPI delivers a short message silently into a longer
# buffer, and leaves the rest as it was. The library checks the count that arrived. A message of the right size can be
# wrong, too: `float64` and `int64` have the same number of bytes. So the tag of each message holds the operation and
# its number, the dtype and the number of elements (modulo 1024), and the receiver compares it with its own. That adds
# no byte. The tag does not *select* a message:
# messages between the same two ranks arrive in the order in which they were sent. MPI guarantees this order, and every
# algorithm here relies on it. The tag only *detects* that a message is not the expected one.
#
# **3. One rank does not call** (`if loss > threshold: ...`). On threads it is known at once. Over MPI a rank that ends
# its program tells the others, which then name it. A rank that only computes, or waits for something else, is named
# in one line after 30 seconds, and in an error after `MINIPAR_TIMEOUT` seconds.
#
# A mean that is divided by $p$ twice, before the all-reduce and after it, is harder to see: the loss still falls, and
# Adam is nearly blind to the scale of gradients. A check needs no training, only two ranks: *the mean of equal arrays
# is the array*.


# %%
def shorter_on_rank_1(comm):
    return comm.all_reduce(np.ones(99 if comm.rank == 1 else 100), algorithm="recursive_doubling")


def integers_on_rank_1(comm):
    return comm.all_reduce(np.ones(100, int if comm.rank == 1 else float), algorithm="ring")


def no_call_on_rank_3(comm):
    return comm.all_reduce(np.ones(8), algorithm="ring") if comm.rank != 3 else None


if rank == 0:
    caught("99 elements on rank 1", lambda: run_local(4, shorter_on_rank_1), CommunicationError)
    caught("integers on rank 1", lambda: run_local(4, integers_on_rank_1), CommunicationError)
    caught("no call on rank 3", lambda: run_local(4, no_call_on_rank_3), CommunicationError)

# %% [markdown]
# ## 3.11 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | here | `torch.distributed` | NCCL |
# | --- | --- | --- |
# | a communicator `comm` | `ProcessGroup` | `ncclComm_t` |
# | `comm.rank`, `comm.size` | `get_rank(group)`, `get_world_size(group)` | `ncclCommUserRank`, `ncclCommCount` |
# | `comm.new_group(ranks, axis)` | `new_group(ranks)`, `DeviceMesh` | `ncclCommSplit` |
# | `isend`, `irecv`, `exchange` | `isend`, `irecv`, `batch_isend_irecv` | `ncclSend`, `ncclRecv` in a group call |
# | `all_reduce(x)` | `all_reduce(x)` | `ncclAllReduce` |
# | `reduce_scatter(x, out)` | `reduce_scatter_tensor(out, x)` | `ncclReduceScatter` |
# | `all_gather(chunk, out)` | `all_gather_into_tensor(out, chunk)` | `ncclAllGather` |
# | `all_to_all(x, out)` | `all_to_all_single(out, x)` | `ncclSend`, `ncclRecv` in a group call |
# | `broadcast(x, root)` | `broadcast(x, src)` | `ncclBroadcast` |
# | `async_op=True`, `Work`, `work.wait()` | the same names | kernels on a CUDA stream |
# | `algorithm="ring"` | | `NCCL_ALGO=Ring`, `Tree`, ... in the environment |
# | `mpirun -n 8 python x.py` | `torchrun --nproc-per-node 8 x.py` | |
# | `MINIPAR_TIMEOUT` | `init_process_group(timeout=...)` | |
# | `python -m minipar.bench collectives` | | nccl-tests: `all_reduce_perf`, `alltoall_perf`, ... |
#
# Three differences. PyTorch's tensor collectives want chunks of one size, so FSDP pads; here the first chunks may be
# longer. On CUDA, PyTorch's `work.wait()` makes the current *stream* wait and not the CPU. And NCCL does not document
# in which order it adds; it may change with the number of ranks, the algorithm and the size.
#
# The same in PyTorch, a ring all-reduce in two processes: [chapters/pytorch/ch03.py](pytorch/ch03.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch03.py")

# %% [markdown]
# ## 3.12 Problems
#
# *Deeper, 40 minutes.*

# %% [markdown]
# The answers are in 3.13.
#
# 1. The gradient of 7 billion parameters in 16 bits is added up over 64 GPUs with a ring. Each link carries 50 GB/s in
#    each direction, and a message costs 15 µs. How many bytes does each GPU send? How long does it take, which part of
#    that is $\alpha$, and what are algbw and busbw without that part?
# 2. On the 64 GPUs of problem 1, from which array size on is the ring better than recursive doubling?
# 3. Four ranks bring, in all four elements of a float32 array, the values $1$, $2^{24}$, $-2^{24}$ and $1$. (Float32
#    holds every integer up to $\pm 2^{24}$, and from there to $\pm 2^{25}$ only the even ones. $2^{24} + 1$ rounds to
#    $2^{24}$.) What does `ordered` give, and what does `ring` give in each element?
# 4. Four of five ranks call a ring all-reduce of 320 KiB at time 0, with the prices of section 3.7; rank 2 calls
#    $T_B/2$ (0.49 ms) later. When is each rank done? (Each message leaves at least $\alpha + \beta n$ after the one
#    before.) What does a profiler show on rank 0? (It counts the time that a rank waits in a call as time of that
#    call.)
# 5. Build the hierarchical all-reduce of section 3.4 for 8 ranks on 2 hosts, ranks 0 to 3 on the first, from the
#    library's collectives and `comm.split_into`. (`all_gather(chunk, out)` puts all chunks into `out`.) How many bytes
#    leave each host, how many with a flat ring? What are they for 64 ranks on 8 hosts? In which order does your sum add
#    the eight contributions if both levels use `ordered`? Prove it with random float32 values.
#
# **For you.** (a) One rank passes `op="max"` and the others `op="sum"`, to a library that has no tags to compare, such
# as MPI's own collectives. Sizes and number of messages agree. What would a check by another collective cost? (Hint:
# values are equal on all ranks if their maximum is their minimum, and one all-reduce with `max` can find both.) (b) A
# mean can be divided by $p$ before the all-reduce or after it. When do both give the same bits? What can go wrong with
# each in float16? (A float is a fraction times a power of two. In float16 the powers go from $2^{-14}$ to $2^{15}$, so
# the largest value is 65,504; below $2^{-14}$ values lose digits and are called *subnormal*.)

# %% [markdown]
# ## 3.13 Answers
#
# *Deeper, 10 minutes.*

# %% tags=["hide-input"]
each = 2 * 14e9 * 63 / 64  # 1. bytes sent by each GPU
latency = 2 * 63 * 15e-6
transfer = each / 50e9
assert round(each / 1e9, 2) == 27.56 and round(latency * 1e3, 2) == 1.89 and round(transfer, 3) == 0.551
assert round(14 / transfer, 1) == 25.4 and round(each / 1e9 / transfer, 1) == 50.0  # algbw, busbw in GB/s
assert round(15e-6 * 50e9 * (126 - 6) / (6 - 126 / 64) / 1e6, 1) == 22.3  # 2. megabytes


def hierarchical_all_reduce(comm, x, g, algorithm="ring"):
    inside, across = comm.split_into(comm.size // g, "inside")
    chunk = across.all_reduce(inside.reduce_scatter(x, algorithm=algorithm), algorithm=algorithm)
    inside.all_gather(chunk, x, algorithm="ring")
    return x, comm.traffic.bytes("all_reduce")


def hierarchical_time(comm, nbytes, g):
    hierarchical_all_reduce(comm, np.zeros(nbytes, np.uint8), g)
    return comm.clock.now()


def sum_of(comm, algorithm):
    return comm.all_reduce(np.full(4, [1, 2**24, -(2**24), 1][comm.rank], np.float32), algorithm=algorithm).tolist()


if rank == 0:
    assert run_local(4, sum_of, "ordered") == [[1, 1, 1, 1]] * 4  # 3.
    assert run_local(4, sum_of, "ring") == [[2, 2, 2, 1]] * 4
    assert round((T_B / 2 + FORMULAS["ring"](5, 5 << 16)) * 1e3, 2) == 1.1  # 4.
    results = run_local(8, lambda comm: hierarchical_all_reduce(comm, np.full(1000, comm.rank + 1.0), g=4))  # 5.
    assert [sent for _, sent in results] == [2 * 8000 * (1 - 4 / 8) / 4] * 8  # each of a host's four sends a quarter
    results = run_local(8, lambda comm: hierarchical_all_reduce(comm, contribution(comm.rank, n), 4, "ordered"))
    eight = [contribution(r, n) for r in range(8)]
    nested = left_to_right(eight[:4]) + left_to_right(eight[4:])
    assert all(np.array_equal(x, nested) for x, _ in results) and not np.array_equal(nested, left_to_right(eight))
    assert 2 * (1 - 8 / 64) == 1.75 and round(2 * (1 - 1 / 64), 2) == 1.97
    two_hosts = Network(ALPHA / 8, BETA / 8, between=network, per_host=4)
    times = run_local(8, hierarchical_time, 1 << 16, 4, clock="model", network=two_hosts)
    inside_hosts = 2 * 3 * (ALPHA / 8 + (1 << 16) / 4 * BETA / 8)
    assert max(times) == inside_hosts + 2 * 1 * (ALPHA + (1 << 16) / 8 * BETA)
say("the answers are right")

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. $2 \cdot 14 \cdot 63/64 = 27.56$ GB. It takes 0.551 s for the bytes and 1.89 ms for 126 messages. algbw is 25.4
#    GB/s and busbw 50 GB/s, the link's speed.
# 2. $\alpha/\beta = 750$ KB, and $750 \cdot (126 - 6)/(6 - 126/64)$ KB is 22.3 MB.
# 3. `ordered` adds $((1 + 2^{24}) - 2^{24}) + 1 = 1$ everywhere: the first 1 is lost. `ring` adds chunk 0 in the order
#    1, 2, 3, 0, which is 2; chunk 1 in the order 2, 3, 0, 1, which is 2; chunk 2 in the order 3, 0, 1, 2, which is 2;
#    chunk 3 in rank order, which is 1. Every rank gets the same four values.
# 4. All at 0.49 ms + $T_\text{ring}$ = 1.10 ms: a ring takes its full time from the moment when the *last* rank begins.
#    On rank 0 the all-reduce seems to take 1.10 ms, as if the network were slow. The cause is a slow rank (a
#    *straggler*).
# 5. $2n(1 - 4/8) = n$ bytes from each host, against $1.75\,n$ in a flat ring. For 64 ranks on 8 hosts $1.75\,n$ against
#    $1.97\,n$. That is the least possible: with hosts in the place of ranks it is the bound of section 3.3. The order
#    is $(((a_0 + a_1) + a_2) + a_3) + (((a_4 + a_5) + a_6) + a_7)$. All ranks have these bits. One device that
#    accumulates has others.
#
#    Its time with rings, with $\alpha$, $\beta$ inside a host and $\alpha'$, $\beta'$ between hosts, is
#    $2(g-1)\left(\alpha + \frac{n}{g}\beta\right) + 2\left(\frac{p}{g} - 1\right)\left(\alpha' +
#    \frac{n}{p}\beta'\right)$. In a flat ring each of the $2(p-1)$ steps waits for the slow link: $2(p-1)(\alpha' +
#    \frac{n}{p}\beta')$. There are at least $g$ times fewer slow steps, and the price is about $2n\frac{g-1}{g}\beta$
#    inside the hosts.
#
# (a) Every rank computes a hash of operation, algorithm, dtype and shape. An all-reduce with `max` of two values, the
# hash and its negative, gives the hashes' maximum and minus their minimum; all hashes are equal if the two add up to 0.
# That is $\lg p$ messages of 16 bytes. For a small array it doubles the time. So it is switched on to look for a
# mistake: PyTorch's `TORCH_DISTRIBUTED_DEBUG=DETAIL` makes such a check of operation, shapes and dtypes.
#
# (b) When $p$ is a power of two: dividing by it changes the exponent only, so it commutes with rounding (as long as
# nothing overflows or becomes subnormal). In float16 the largest value is 65,504, and eight gradients of 16,000 have an
# infinite sum: divide before. The danger is then at the other end: small gradients divided by a large $p$ become
# subnormal or zero. PyTorch's DDP divides before; FSDP can divide by about $\sqrt p$ before and by the rest after.
#
# </details>

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
