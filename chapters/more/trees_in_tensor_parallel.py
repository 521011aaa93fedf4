# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Trees in tensor parallelism: the same bits on any number of ranks
#
# **Why do tp 1 and tp 2 give different losses, and can they be the same, bit for bit?**
#
# Data parallelism could promise the bits of one device that adds the same parts in the same order ([chapter
# 4](../04_data_parallel.ipynb)). Tensor parallelism cannot, because its parts are inside a product. An element of $YD$
# is a sum of $4h$ terms. One device leaves it to BLAS, the library that multiplies matrices, which adds in an order of
# its own: in blocks, and several terms at once. On $t$ ranks BLAS adds the $4h/t$ terms of each rank, and then the
# ranks' sums are added: $(a+b)+(c+d)$, say, where one device has $((a+b)+c)+d$.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import math

import numpy as np

from chapters.support.ch06.plain import differing, in_leaves, in_one_product
from chapters.support.ch06.whole_gradients import walk_through_attention
from chapters.support.show import printer
from chapters.support.whole_runs import relative_difference
from minipar.comm import world
from minipar.more.tree.tree_sums import tree_sum
from minipar.nn import GPT, GPTConfig
from minipar.parallel.tensor.plan import tensor_parallel

comm = world()
rank, t = comm.rank, comm.size  # this rank, and the number of ranks that compute a layer together
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.show import show_source

T = t * math.ceil(16 / t)  # tokens per sample: a multiple of t
a = t * math.ceil(6 / t)  # attention heads: a multiple of t, too
B, h = 2, 8 * a  # samples, elements per token
N = B * T  # tokens
random = np.random.default_rng(0)
X, A, D = (random.normal(size=size) for size in ((N, h), (h, 4 * h), (4 * h, h)))
inputs = random.integers(0, 257, (B, T))
shape = GPTConfig(vocab_size=257, n_positions=T, n_embd=h, n_layer=2, n_head=a)

# %% [markdown]
# ## Where the bits begin to differ
#
# *Core, 5 minutes.*
#
# Walk through the first attention of a model that is cut, join what is cut, and compare bits with one device:

# %%
serial, model = GPT(shape, dtype="float64"), GPT(shape, dtype="float64")
tensor_parallel(model, comm, "ordered")
parallel = dict(walk_through_attention(model, inputs, comm))
for what, alone in walk_through_attention(serial, inputs):
    unequal = np.mean(parallel[what] != alone)
    say(f"{what:<21} {unequal:>4.0%} of the values differ, by at most {relative_difference(parallel[what], alone):.1e}")
    most = 0 if what in ("embedding, summed", "ln_1") else 1e-13
    assert relative_difference(parallel[what], alone) <= most

y = parallel["attention: heads"]
c_proj = serial.h[0].attn.c_proj
predicted = 0.0
for block in (slice(r * h // t, (r + 1) * h // t) for r in range(t)):  # one device adds the same blocks in rank order
    predicted += np.ascontiguousarray(y[..., block]).reshape(N, -1) @ c_proj.weight.data[block].copy()
assert np.array_equal(predicted.reshape(B, T, h) + c_proj.bias.data, parallel["c_proj: rows, summed"])
say(f"c_proj over {t} ranks = one device that adds {t} blocks in rank order, bit for bit")

# %% [markdown]
# The embedding has the same bits, and so has ln_1. Columns and heads can have the same bits, but need not: each element
# is the same sum over $h$, and BLAS may add it in another order when the matrix is narrower. The row layer splits the
# sum itself, and one device that adds the same blocks in the same order gets the ranks' exact bits. So the difference
# is the order of additions and nothing else.

# %% [markdown]
# ## A tree
#
# *Core, 5 minutes.*
#
# **A tree** is an order that no number of ranks changes. Cut the columns of $Y$ and the rows of $D$ into 8 equal
# *leaves*. Compute each leaf's product $p_k = Y_k D_k$ separately, always with the same shape. Then BLAS adds *inside*
# a product in the same order, whoever computes it. And add the products in fixed pairs:
#
# $$\big((p_0 + p_1) + (p_2 + p_3)\big) + \big((p_4 + p_5) + (p_6 + p_7)\big).$$
#
# Rank $r$ of $t$ has $8/t$ neighbouring leaves. It multiplies them one by one and adds them in pairs, a whole subtree
# (`tree_sum`). The sum over the ranks must then be the rest of the tree. Chapter 3's recursive doubling is exactly
# that: first the subtrees of neighbours are added, then those of pairs, and so on. (The two ranks of a pair add $a+b$
# and $b+a$, which have the same bits.) Both numbers are powers of two, so that each rank has a whole subtree, and 8
# leaves serve up to 8 ranks. Here are 1, 2, 4 and 8 ranks, as threads, first without leaves:

# %%
if rank == 0:
    show_source(in_one_product, in_leaves, tree_sum)
    for compute in (in_one_product, in_leaves):
        shares = [differing(compute, ranks, X, A, D) for ranks in (2, 4, 8)]
        assert compute is in_one_product or shares == [0, 0, 0]
        say(f"{compute.__name__} on 2, 4, 8 ranks: part of the values that differ from one's: {np.round(shares, 2)}")

# %% [markdown]
# ## In a training
#
# *Core, 2 minutes.*
#
# `--reduction tree` uses leaves with every sum of a training step. A column layer is cut into leaves as well, so that
# its products have one shape, and in backward its input's gradient is a tree over them. For gradients and losses the
# microbatches of all replicas are leaves. The norm's squares are added without any rounding, so that no order shows.
# The price is computation, in smaller products: in [our
# measurements](../../docs/combinations.md#the-same-bits-in-all-layouts) 1.4 to 1.8 times the time on one rank. With
# GPT-2 the bytes stay the same, but gradients travel after backward, not during it.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
