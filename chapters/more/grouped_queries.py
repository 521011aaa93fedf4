# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Grouped queries: fewer heads of keys than of queries
#
# **How does tensor parallelism cut attention if several heads of queries read one head of keys?**
#
# Many models since Llama 2 70B have fewer heads of keys and values than of queries: $a$ heads of $q$ in $G$ groups, and
# each group reads *one* head of $k$ and one of $v$. Llama 3 8B has $a = 32$ and $G = 8$: a quarter of the keys and
# values, to compute and to keep. [Chapter 6](../06_tensor_parallel.ipynb) gives each rank whole heads. On 8 ranks each
# gets one head of keys. On 16 ranks there are not enough.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import numpy as np

from chapters.support.ch06.copies import copies_sum_to_the_gradient
from chapters.support.ch06.plain import grouped_attention
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from chapters.support.whole_runs import relative_difference
from minipar.comm import world

comm = world()
rank, t = comm.rank, comm.size  # this rank, and the number of ranks that compute a layer together
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch06 import figures
    from chapters.support.show import show

# %%
if rank == 0:
    show(figures.draw_groups(heads=8, kv_heads=4, rank_counts=(4, 8)), "grouped_queries")

# %% [markdown]
# The picture shows 8 heads of $q$ in 4 groups. A frame is a rank, a colour is a group. On 4 ranks each has a group. On
# 8 ranks two of them need the same head of $k$ and $v$.

# %% [markdown]
# ## Whole groups
#
# *Core, 6 minutes.*
#
# A rank must have the keys and values that its queries read, so it gets **whole groups**. [Exercise
# 25](../exercises/e25_grouped_queries.py) asks for that and for more ranks than groups:
# `make exercises PYTEST="-k e25"`. Try it before you read on.
#
# As long as $t$ divides $G$ nothing new is sent. Rank $r$ takes the $r$-th part of the columns of all three matrices,
# $a/t$ heads of $q$ and $G/t$ of $k$ and $v$, and these belong together, because query head $i$ reads head
# $\lfloor iG/a \rfloor$. Only the three stretches have different widths now, so they can no longer be one matrix with 3
# *equal* groups ([6b.1](../06b_vocabulary_and_memory.ipynb)). In Llama they are three matrices, `q_proj`, `k_proj` and
# `v_proj`, each cut in one group. Here every rank computes two query heads and the one head of $k$ and $v$ that both
# read:

# %%
size = 4  # of a head
T = 16  # tokens
random = np.random.default_rng(0)
tokens_in = random.normal(size=(T, 8))
q_k_v = [random.normal(size=(8, heads * size)) for heads in (2 * t, t, t)]
d_heads = random.normal(size=(T, 2 * t * size))
whole_y, whole_d = grouped_attention(tokens_in, q_k_v, 2 * t, t, d_heads)
own = [np.split(weight, t, axis=1)[rank] for weight in q_k_v]  # this rank's columns of q, k and v
own_y, d_own = grouped_attention(tokens_in, own, 2, 1, np.split(d_heads, t, axis=1)[rank])
assert relative_difference(own_y, np.split(whole_y, t, axis=1)[rank]) < 1e-13
for part, whole in zip(d_own, whole_d, strict=True):
    assert relative_difference(part, np.split(whole, t, axis=1)[rank]) < 1e-12
say(f"{2 * t} query heads in {t} groups over {t} ranks = one device, with the gradients of q, k and v")

# %% [markdown]
# The gain stays the same on each rank: $a/G$ times fewer keys and values to compute and to keep.

# %% [markdown]
# ## More ranks than groups
#
# *Core, 8 minutes.*
#
# With more ranks than groups (the lower part of the picture) several ranks need the *same* head of $k$ and $v$. minipar
# refuses it: tp divides the heads of keys, so that a rank has a part of each matrix that no other rank has. What would
# have to happen?
#
# Llama 3 8B has $h = 4096$, 32 layers, 32 heads of $q$ and $G = 8$ of $k$ and $v$, each of 128 elements. Let $t = 16$.
# Which part of `k_proj` and `v_proj` does a rank hold, and how many ranks hold the same? What does each of them know of
# the gradient, and what must be done with it? How many bytes does a rank send for that per step in float32, and how
# many in a layer of 8,192 tokens in 16 bit for the sums of [6.4](../06_tensor_parallel.ipynb)? What happens if it is
# forgotten? How often does the norm count these gradients?

# %%
predict("bytes per step for the copies' gradients, 32 layers", ...)  # replace the dots by a number
predict("bytes of one layer's four sums", ...)

# %% tags=["hide-input"]
copied = 2 * 128 * 4096  # elements of a rank's k_proj and v_proj
for_copies = 32 * copied * 4  # an all-reduce over 2 ranks sends as many elements as it sums
for_sums = 8 * 8192 * 4096 * 15 // 16 * 2
assert (copied, 4 * copied, for_copies, for_sums) == (1_048_576, 4_194_304, 134_217_728, 503_316_480)
reveal("bytes per step for the copies' gradients, 32 layers", for_copies, say)
reveal("bytes of one layer's four sums", for_sums, say)
assert copies_sum_to_the_gradient(grouped_attention, tokens_in, ranks=4, heads=8, kv_heads=2, size=size)
say("the gradient of a copied head is the sum of its copies' gradients, and no copy has it alone")

# %% [markdown]
# <details><summary>Answers</summary>
#
# A rank has 2 heads of $q$ and needs one head of $k$ and $v$: $128 \times 4096$ elements of each matrix. $t/G = 2$
# ranks hold the same copy. Each has seen only its own 2 of the 4 query heads that read it, so its gradient is a term:
# the gradient of the matrix is the **sum of the copies' gradients** (the cell above asserts it for four ranks). It is
# summed over each *pair* of ranks, once per step. An all-reduce over 2 ranks sends as many elements as it sums:
# 1,048,576 per layer, which are 4,194,304 bytes, and 134,217,728 bytes in 32 layers. Beside the 503,316,480 bytes that
# *one* layer sends for its sums in one microbatch, that is little. If it is forgotten the copies get different
# gradients and drift apart, like LayerNorms with mistake 5 of 6b.7, and the check "ranks" would see it. The norm counts
# the summed gradient once, not twice. The price is memory and work: $k$ and $v$, their matrices, gradients and
# optimizer state are there $t/G$ times. (In inference there are no gradients. There vLLM copies the heads so.)
#
# </details>

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
