# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Trees: sums in few steps
#
# **How is a large array added up in few steps, whatever the number of ranks?**
#
# In [chapter 3](../03_collectives.ipynb) the ring sends the fewest bytes, in a number of steps that grows with $p$.
# Recursive doubling needs $\lg p = \log_2 p$ steps and sends whole arrays. A tree needs about $2\lg p$ steps for any
# number of ranks. In pieces, and as a pair of trees, it sends no more than the ring.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

import minipar.more.tree.tree_collectives  # noqa: F401 adds the algorithm "tree"
from chapters.support.show import printer
from minipar.comm import run_local, wire_bytes, world

comm = world()
p, rank = comm.size, comm.rank
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch03 import figures
    from chapters.support.show import show

# %% [markdown]
# ## Up and down
#
# *Core, 4 minutes.*
#
# In a binary tree the leaves send their arrays up, each inner rank adds, and the sum comes back down. Rank 0 is the
# root, and below rank $r$ are the ranks $2r+1$ and $2r+2$.

# %%
if rank == 0:
    show(figures.draw_tree(levels=3), "trees")


# %%
def tree_all_reduce(comm, x, number):
    """Set x = the sum over all ranks. number: this rank's place in the tree; its own inverse gives a place's rank."""
    place = number(comm.rank)
    below = [number(child) for child in (2 * place + 1, 2 * place + 2) if child < comm.size]
    above = number((place - 1) // 2)
    for child in below:  # up
        x += comm.irecv(np.empty_like(x), child).wait()
    if place > 0:
        comm.isend(x, above).wait()
        comm.irecv(x, above).wait()
    for child in below:  # down
        comm.isend(x, child).wait()


def one_tree(comm):
    """Return the multiples of n that this rank sends in one tree."""
    x = np.full(100, comm.rank)
    tree_all_reduce(comm, x, lambda rank: rank)
    assert (x == sum(range(comm.size))).all()
    return comm.traffic.bytes("send") / x.nbytes


if rank == 0:
    sent = run_local(7, one_tree)
    assert sent == [2, 3, 3, 1, 1, 1, 1]  # the root, two inner ranks, four leaves
    say(f"multiples of n that each of 7 ranks sends: {sent}")

# %% [markdown]
# A message of $n$ bytes takes $\alpha + n\beta$ seconds: $\alpha$ is the time of an empty message and $\beta$ that of a
# byte ([3.7](../03_collectives.ipynb)). If whole arrays travel, the tree takes about $2\lg p\,(\alpha + n\beta)$.
#
# Now cut the array into $k$ pieces. The first piece takes $2\lg p$ steps, and the others follow one step apart. If a
# rank's messages do not slow one another down, that is about $(2\lg p + k)(\alpha + \frac{n}{k}\beta)$: few steps, and
# nearly $n\beta$. But an inner rank sends each piece three times, once up and twice down, so $3n$ bytes over its link,
# and a leaf only $n$.

# %% [markdown]
# ## Two trees, each for half of the array
#
# *Core, 3 minutes.*
#
# NCCL's tree is a pair of trees, each for half of the array. A leaf of one is an inner rank of the other. So a rank
# sends at most $1.5n + 0.5n = 2n$ bytes, as in the ring, within a number of steps that grows with $\lg p$. Here the
# second tree is the first one with its ranks in reverse order.


# %%
def two_trees(comm):
    """Return the multiples of n that this rank sends in two trees."""
    x = np.full(100, comm.rank)
    first, second = np.split(x, 2)
    tree_all_reduce(comm, first, lambda rank: rank)
    tree_all_reduce(comm, second, lambda rank: comm.size - 1 - rank)
    assert (x == sum(range(comm.size))).all()
    return comm.traffic.bytes("send") / x.nbytes


if rank == 0:
    for ranks in (8, 16, 32):
        sent = run_local(ranks, two_trees)
        assert max(sent) == 2 and sum(sent) == 2 * (ranks - 1)
        say(f"{ranks:2} ranks: each sends at most {max(sent):.0f} n, all together {sum(sent):.0f} n")

# %% [markdown]
# All ranks together send $2(p-1)\,n$ bytes, which is the least possible
# ([3.3](../03_collectives.ipynb)). The library sends along a tree in `broadcast` only.

# %% [markdown]
# ## The algorithm `tree`
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The library's `algorithm="tree"` is another thing. Only its additions have the order of a tree. It sends what
# `ordered` sends: each rank's chunk $j$ goes to rank $j$ directly. Rank $j$ adds the contributions in pairs, $((a_0 +
# a_1) + (a_2 + a_3)) + \dots$. These are the bits of recursive doubling with the bytes of the ring.
# [Trees in tensor parallelism](trees_in_tensor_parallel.ipynb) needs this order: with it 1, 2, 4
# and 8 ranks have the same bits.


# %%
def contribution(of):
    """Return the float32 values that rank `of` brings."""
    return (np.random.default_rng([2, of]).standard_normal(10_000) * 1000).astype(np.float32)


def in_pairs(arrays):
    """Return the sum in pairs: ((a_0 + a_1) + (a_2 + a_3)) + ..."""
    while len(arrays) > 1:
        pairs = [arrays[i : i + 2] for i in range(0, len(arrays), 2)]
        arrays = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return arrays[0]


comm.traffic.reset()
by_tree = comm.all_reduce(contribution(rank), algorithm="tree")
assert comm.traffic.bytes() == wire_bytes("all_reduce", "ordered", by_tree.size, 4, p, rank)
assert np.array_equal(by_tree, in_pairs([contribution(r) for r in range(p)]))
if p & (p - 1) == 0:
    assert np.array_equal(by_tree, comm.all_reduce(contribution(rank), algorithm="recursive_doubling"))
say(f"tree on {p} ranks: the bits of a sum in pairs, the bytes of ordered")

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
