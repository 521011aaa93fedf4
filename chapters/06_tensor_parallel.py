# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 6. Tensor and sequence parallelism
#
# **How do $t$ ranks compute one layer together?**
#
# One layer of GPT-3 has 1.8 billion parameters. To train it with Adam takes 29 GB of model state ([chapter
# 5](05_zero.ipynb)), and each sample adds 2.9 GB of activations (by the paper's count of 6.9). Data parallelism and
# ZeRO give each rank its own samples, but every rank still computes whole layers. When one layer is too large or too
# slow for one device, the layer itself must be cut. Each rank then holds a part of every matrix and computes a part of
# every product, on the *same* samples. That is tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053: Megatron-LM).
#
# The price is time spent waiting: in every layer, in forward and in backward, all ranks stop until a sum has arrived.
# Over some links eight devices compute a layer faster than one, and over others they are *slower than one*. At the end
# of this chapter you can cut a Transformer so that as little as possible is sent, and say over which link it pays.

# %% tags=["active-ipynb"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %%
from chapters.support.show import printer
from minipar.comm import world

comm = world()
rank, t = comm.rank, comm.size  # this rank, and the number of ranks that compute a layer together
say = printer(rank)  # rank 0 prints and draws; every rank checks
say(f"{t} rank{'s' if t > 1 else ''}")
# A block's matrices: rows, columns, the dim that is cut, and the number of equal stretches that are cut one by one.
MATRICES = {
    "attn.c_attn": (64, 192, 1, 3),
    "attn.c_proj": (64, 64, 0, 1),
    "mlp.c_fc": (64, 256, 1, 1),
    "mlp.c_proj": (256, 64, 0, 1),
}
if rank == 0:
    from chapters.support.ch06 import figures
    from chapters.support.show import show, show_source

    show(figures.plot_cuts([(name, *cut) for name, cut in MATRICES.items()], ranks=4), "06_cuts")

# %% [markdown]
# The picture shows the four matrices of a block, cut over four ranks. Digits and colours are the ranks. An activation
# passes the matrices from left to right, in two pairs: attention's and the MLP's. The first matrix of a pair is cut by
# columns, the second by rows. This chapter shows why that order needs only one sum per pair. (`c_attn` holds three
# matrices, of queries, keys and values; each is cut by itself.)
#
# Among the strategies of this course tensor parallelism stands here:

# %%
if rank == 0:
    from chapters.support.overview import draw_strategies

    show(draw_strategies(["tp"]), "06_here")

# %% [markdown]
# ## 6.1 Columns, then rows
#
# *Core, 8 minutes.*
#
# The MLP of a Transformer is $Z = \mathrm{gelu}(XA)\,D$, with $X$ of $N \times h$ ($N$ tokens, $h$
# elements for each), $A$ of $h \times 4h$ and $D$ of
# $4h \times h$ (its biases come in 6.2). Cut $A$ by **columns** and $D$ by **rows**:
#
# $$A = [\,A_1 \mid A_2\,], \qquad D = \begin{bmatrix} D_1 \\ D_2 \end{bmatrix}, \qquad
# XA = [\,XA_1 \mid XA_2\,].$$
#
# Two facts make this work. gelu works element by element, so it works on blocks of columns: $Y = \mathrm{gelu}(XA) =
# [\,\mathrm{gelu}(XA_1) \mid \mathrm{gelu}(XA_2)\,] = [\,Y_1 \mid Y_2\,]$. And a product of a row of blocks with a
# column of blocks is the sum of the blocks' products:
#
# $$Z = YD = Y_1 D_1 + Y_2 D_2 .$$
#
# Rank $r$ computes $Y_r D_r$ from $X$ alone. One sum at the end, one all-reduce, gives $Z$.
#
# The other order, $A$ by rows and $D$ by columns, needs $X$ cut by columns. Each rank then has a *partial sum* $X_r
# A_r$ of the same elements, and $\mathrm{gelu}(X_1 A_1 + X_2 A_2) \neq \mathrm{gelu}(X_1 A_1) + \mathrm{gelu}(X_2
# A_2)$. So the ranks must sum before the gelu ($4h$ columns wide, four times the bytes), and then gather the columns of
# $Z$. Both orders on plain arrays, all blocks in one process:

# %%
import math

import numpy as np

from chapters.support.ch06.plain import gelu_array
from chapters.support.whole_runs import relative_difference

T = t * math.ceil(16 / t)  # tokens per sample: a multiple of t
a = t * math.ceil(6 / t)  # attention heads: a multiple of t, too
B = 2  # samples
h = 8 * a  # elements per token
N = B * T  # tokens
random = np.random.default_rng(0)
X = random.normal(size=(N, h))
A = random.normal(size=(h, 4 * h))
D = random.normal(size=(4 * h, h))
blocks = max(t, 2)

Z = gelu_array(X @ A)[0] @ D
columns = np.split(A, blocks, axis=1)
rows = np.split(D, blocks)
parts = [gelu_array(X @ A_r)[0] @ D_r for A_r, D_r in zip(columns, rows, strict=True)]
assert relative_difference(sum(parts), Z) < 1e-13

partial_sums = [x @ A_r for x, A_r in zip(np.split(X, blocks, axis=1), np.split(A, blocks), strict=True)]
early = sum(gelu_array(part)[0] for part in partial_sums) @ D  # gelu on partial sums
late = gelu_array(sum(partial_sums))[0] @ D  # an all-reduce of N x 4h elements first
assert relative_difference(early, Z) > 0.1 and relative_difference(late, Z) < 1e-13
say(f"columns, then rows: off by {relative_difference(sum(parts), Z):.1e}")
say(f"rows, then columns: off by {relative_difference(early, Z):.0%} with gelu before the sum")

# %% [markdown]
# ## 6.2 The two ends of a pair: f and g
#
# *Core, 12 minutes.*
#
# Where the pair of products begins, $X$ is the same on all ranks, and each uses it with other columns. Where it ends,
# each rank has a partial result, and all need the sum. What must backward send?
#
# Let $\mathcal L$ be the loss. It depends on $X$ through every rank's columns, so its gradient is a sum over ranks:
# $\partial \mathcal L / \partial X = \sum_r (\partial \mathcal L / \partial XA_r)\, A_r^\top$. At the other end
# $Z = \sum_r Z_r$, so $\partial \mathcal L / \partial Z_r = \partial \mathcal L / \partial Z$, which every rank has.
#
# | | forward | backward | sent per rank, $n = Nh$ elements |
# | --- | --- | --- | --- |
# | $f$, `copy_to` | identity | all-reduce | $2n\frac{t-1}{t}$ in backward |
# | $g$, `reduce_from` | all-reduce | identity | $2n\frac{t-1}{t}$ in forward |
#
# They are *conjugate*: the backward of one is the forward of the other. (A copy is the matrix $[I\; I]^\top$, a sum is
# $[I\; I]$; backward multiplies by the transpose.)
#
# Here are both layers on plain arrays. $f$ and $g$ are the two places where `all_reduce` stands. A column layer's bias
# belongs to its columns and is cut with them. A row layer's bias belongs to the sum: every rank adds it **once**, after
# the all-reduce. Added before the sum, on every rank, it would count $t$ times (mistake 1 of 6.12).
#
# [Exercise 8](exercises/e08_column_row_layers.py) asks for these four functions: `make exercises PYTEST="-k e08"`.
# Write them before you open the next cell.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def all_reduce(x):
    """Return the sum of all ranks' x, over chapter 3's ring."""
    return comm.all_reduce(x.copy(), algorithm="ring")


def column_forward(x, weight, bias):  # x (N, i) is whole; weight (i, o/t) and bias (o/t,) are this rank's columns
    return x @ weight + bias  # (N, o/t); f sends nothing


def column_backward(x, weight, dy):  # dy (N, o/t) -> the gradients of x, weight and bias
    return all_reduce(dy @ weight.T), x.T @ dy, dy.sum(axis=0)  # f: every rank has a term of x's gradient


def row_forward(x, weight, bias):  # x (N, i/t) and weight (i/t, o) are this rank's; bias (o,) is whole
    return all_reduce(x @ weight) + bias  # (N, o); g: every rank has a term of the result


def row_backward(x, weight, dz):  # dz (N, o) is whole
    return dz @ weight.T, x.T @ dz, dz.sum(axis=0)  # g sends nothing


# %%
bias_a = random.normal(size=4 * h)
bias_d = random.normal(size=h)
dZ = random.normal(size=(N, h))
mine = slice(rank * 4 * h // t, (rank + 1) * 4 * h // t)  # this rank's columns of A and rows of D
A_r = A[:, mine].copy()
bias_r = bias_a[mine]
D_r = D[mine]

comm.traffic.reset()
y, slope = gelu_array(column_forward(X, A_r, bias_r))
z = row_forward(y, D_r, bias_d)
sent_forward = comm.traffic.bytes()
dy, dD_r, dbias_d = row_backward(y, D_r, dZ)
dX, dA_r, dbias_r = column_backward(X, A_r, dy * slope)
sent = comm.traffic.bytes()

Y, slopes = gelu_array(X @ A + bias_a)  # one device
dXA = dZ @ D.T * slopes
for part, whole in (
    (z, Y @ D + bias_d),
    (dX, dXA @ A.T),
    (dA_r, (X.T @ dXA)[:, mine]),
    (dD_r, (Y.T @ dZ)[mine]),
    (dbias_r, dXA.sum(axis=0)[mine]),
):
    assert relative_difference(part, whole) < 1e-12
assert sent_forward * t == 2 * N * h * (t - 1) * 8 and sent == 2 * sent_forward
say(f"MLP over {t} ranks = one device, with all gradients: dX within {relative_difference(dX, dXA @ A.T):.1e}")
say(f"each rank sent {sent_forward:,} bytes in forward and as many in backward: 2 N h (t-1)/t elements each")

# %% [markdown]
# The weights' gradients need no communication at all: a rank's part of the parameters, of their gradients and of the
# optimizer's state is its own.
#
# ## 6.3 The layers, and a block
#
# *Core, 5 minutes.*
#
# Attention is the same pattern. The columns of the query, key and value matrices are grouped in heads, and heads do not
# interact before the output projection: softmax works on each head separately. So a rank can take whole heads here, as
# it takes columns in the MLP. Rank $r$ computes $a/t$ of the $a$ heads, whole, and `c_proj` is a row layer. A block is
# two such pairs:

# %%
if rank == 0:
    show(figures.plot_blocks(False), "06_block")

# %% [markdown]
# Above each edge stands the shape of what one rank has there. After `c_proj` that is a term of the sum; $g$ adds the
# terms.
#
# ### In the library
#
# *Deeper, 6 minutes.*
#
# In the library $f$ and $g$ are operations of autograd, so they can stand between any others.

# %%
from minipar.autograd import Tensor, gelu
from minipar.parallel.tensor import layers, mappings
from minipar.parallel.tensor.user_layers import ColumnParallelLinear, RowParallelLinear

if rank == 0:
    show_source(mappings.mapping, mappings.copy_to, mappings.reduce_from)
    show_source(ColumnParallelLinear.forward, RowParallelLinear.forward)

up = ColumnParallelLinear(h, 4 * h, comm, name="up", dtype="float64")
down = RowParallelLinear(4 * h, h, comm, name="down", dtype="float64")
for parameter, value in ((up.weight, A_r), (up.bias, bias_r), (down.weight, D_r), (down.bias, bias_d)):
    parameter.data[...] = value
x_library = Tensor(X[None], requires_grad=True)  # (1, N, h)
z_library = down(gelu(up(x_library)))
z_library.backward(dZ[None])
for library, plain in ((z_library.data[0], z), (x_library.grad[0], dX), (up.weight.grad, dA_r)):
    assert relative_difference(library, plain) < 1e-12
say("the library's layers = the plain functions, with their gradients")

# %% [markdown]
# What does the library add? A layer's weights are Parameters that know which part of the serial model they are (6.4).
# What enters and leaves the part of a layer where the ranks differ crosses a *border*. Its `enter` is $f$, its `leave`
# is $g$. Sequence parallelism is a border with two other mappings (6.9); `SEQUENCE` is the dim of the tokens, 1.
#
# ## 6.4 The plan
#
# *Core, 6 minutes.*
#
# To cut a whole model we need a table: for each layer that is cut, the dim of its weight along which it is cut. One
# layer needs a second entry. GPT-2 stores $q$, $k$ and $v$ side by side in one matrix `c_attn` of $h \times 3h$. If it
# were cut straight into two parts, rank 0 would have the queries of all heads and no value. So each of the three
# stretches $q$, $k$, $v$ is cut separately. The table says so with `(1, 3)`: dim 1, in 3 groups. With four heads on two
# ranks:


# %%
def rank_part(array, dim, groups, r, ranks):
    """Return rank r's part: the r-th piece of each of `groups` equal stretches along dim."""
    stretches = np.split(array, groups, axis=dim)
    return np.concatenate([np.split(stretch, ranks, axis=dim)[r] for stretch in stretches], axis=dim)


c_attn_columns = np.array([f"{which}{head}" for which in "qkv" for head in range(4)])
for groups in (1, 3):
    parts = [" ".join(rank_part(c_attn_columns, 0, groups, r, 2)) for r in (0, 1)]
    say(f"groups {groups}: rank 0 has {parts[0]}, rank 1 has {parts[1]}")

# %% [markdown]
# The whole table for a block of GPT-2 is `MATRICES` of the first page. What it does not name (LayerNorm, the biases of
# row layers, the embedding of positions) stays whole on every rank. A column layer's bias is cut with its columns.
#
# ### Grouped queries
#
# *Core, 6 minutes.*
#
# Many models since Llama 2 70B have fewer heads of keys and values than of queries: $a$ heads of $q$ in $G$ groups, and
# each group reads *one* head of $k$ and one of $v$. (Llama 3 8B: $a = 32$, $G = 8$.) How are these cut? A rank must
# have the keys and values that its queries read, so it gets **whole groups**. **[Exercise
# 25](exercises/e25_grouped_queries.py)** asks for that and for more ranks than groups:
# `make exercises PYTEST="-k e25"`. Try it before you read on.

# %%
if rank == 0:
    show(figures.draw_groups(heads=8, kv_heads=4, rank_counts=(4, 8)), "06_groups")

# %% [markdown]
# As long as $t$ divides $G$ nothing new is sent. Rank $r$ takes the $r$-th part of the columns of all three matrices,
# $a/t$ heads of $q$ and $G/t$ of $k$ and $v$, and these belong together, because query head $i$ reads head
# $\lfloor iG/a \rfloor$. Only the three stretches have different widths now, so they can no longer be one matrix with 3
# *equal* groups. In Llama they are three matrices, `q_proj`, `k_proj` and `v_proj`, each cut in one group. Here
# every rank computes two query heads and the one head of $k$ and $v$ that both read:

# %%
from chapters.support.ch06.plain import grouped_attention

size = 4  # of a head
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
# The gain stays the same on each rank: $a/G$ times fewer keys and values to compute and to keep. With more ranks than
# groups (the lower part of the picture) several ranks need the *same* head of $k$ and $v$. Problem 7 asks what must
# happen then. (minipar refuses it: tp divides the heads of keys.)
#
# ### In the library
#
# *Deeper, 10 minutes.*
#
# `PLAN` is the library's table for GPT-2. Beside dim and groups it names the class that replaces the serial layer.
# Llama and Mixtral, a Llama with experts (chapter 12), whose matrices are (out, in), bring tables of their own
# (`more/llama.py`, `more/experts/mixtral.py`). Where several of their layers read one input ($q$, $k$, $v$;
# `gate_proj`, `up_proj`), the block calls `enter` once for all of them, and they do not cross the border.
#
# `tensor_parallel(model, comm)` goes through the table. It replaces serial layers by parallel ones, and leaves each
# rank its part of *the very values* that the serial model has. (Initial weights are keyed by name, never by rank, so a
# run on 8 ranks starts where a run on 1 does.) What stays whole has the placement `Replicate`. The model's own file
# (`nn/gpt.py`) knows nothing of ranks. (In Llama's a block's `enter` returns its input until a strategy replaces it.)

# %%
from chapters.support.ch06.whole_gradients import compare_with_one_device, is_split
from minipar.nn import GPT, GPTConfig
from minipar.parallel.placement import Partial, Shard
from minipar.parallel.tensor.plan import PLAN, TensorParallel, sum_together, tensor_parallel, tensor_placement

if rank == 0:
    for name, row in PLAN.items():
        print(f"{name:<12} dim {row.dim!s:<4}  groups {row.groups}  {row.layer.__name__}")
    show_source(tensor_placement, layers.shard_parameter)

L, V = 2, 257  # layers, and words in the vocabulary: a prime, so that nothing divides it
shape = GPTConfig(vocab_size=V, n_positions=T, n_embd=h, n_layer=L, n_head=a)
serial = GPT(shape, dtype="float64")
model = GPT(shape, dtype="float64")
tensor_parallel(model, comm)
theirs = dict(serial.h[0].named_parameters())
cuts = {}
for name, parameter in theirs.items():
    placement = tensor_placement(PLAN, name, parameter.shape, rank, t, sequence=False)
    if isinstance(placement, Shard):
        cuts[name] = placement.dim, placement.groups
for name, parameter in model.h[0].named_parameters():
    expected = rank_part(theirs[name].data, *cuts[name], rank, t) if name in cuts else theirs[name].data
    assert is_split(parameter) == (name in cuts and t > 1) and np.array_equal(parameter.data, expected)
assert all(cuts[f"{name}.weight"] == cut[2:] for name, cut in MATRICES.items())
psi, held = (sum(p.size for p in m.parameters()) for m in (serial, model))
say(f"{psi:,} parameters, {held:,} on each rank, each with the serial model's value")

# %% [markdown]
# `Shard` records one rank's part and is kept in the parameter's *placement*, as `parameter.placement.tp`. Unlike
# `rank_part` it pads a dim that $t$ does not divide, which the vocabulary needs.
#
# ## 6.5 The vocabulary
#
# *Deeper, 12 minutes.*
#
# GPT-2's token embedding has $V = 50\,257$ rows, almost a third of its 124 million parameters, and the output head is
# the same matrix. It is cut by rows: rank $r$, counted from 0, holds the $V/t$ tokens from $r V/t$ on ($V$ is padded to
# a multiple of $t$).
#
# **Embedding.** Each rank looks up the tokens that it holds, writes zeros for the others, and an all-reduce adds. (That
# sum is exact: all terms but one are zero.)
#
# **Head.** The logits are $X$ times the transposed matrix, whose columns are cut: a column layer. Each rank gets the
# logits of its tokens.
#
# **Loss.** One could gather the logits, $N V$ values, by far the largest activation of the model. But the loss of a
# token needs only three values of its row, and each is a maximum or a sum over the row:

# %%
if rank == 0:
    show(figures.draw_split_loss(tokens=4, columns=9, ranks=3), "06_split_loss")

# %% [markdown]
# With $\mu = \max_v z_v$ the loss is
#
# $$\ell = \log E - (z_{\text{target}} - \mu), \qquad E = \sum_v e^{z_v - \mu}.$$
#
# Why the maximum? Without it $e^{z_v}$ overflows, in float32 for every logit above 88.7, and the loss is infinite.
# Subtracting a constant $\mu$ from all logits changes nothing in exact arithmetic, because $\log\sum_v e^{z_v} =
# \log\big(e^\mu \sum_v e^{z_v-\mu}\big) = \mu + \log E$. With the largest logit as $\mu$, no term is above 1.
#
# Why must all ranks use the *same* $\mu$? Rank $r$ adds up $e^{z_v - \mu_r}$ over its own tokens. Two such sums with
# different $\mu_r$ are in different units, $e^{-\mu_r}$, and cannot be added. So the maximum over all ranks comes
# first. One token with four logits, two on each rank:

# %%
z4 = np.array([[100, 20], [99, 5]], np.float32)  # a row for each rank
with np.errstate(over="ignore"):
    without = np.log(np.exp(z4).sum())
one_maximum = z4.max() + np.log(np.exp(z4 - z4.max()).sum())
two_maxima = z4.max() + np.log(np.exp(z4 - z4.max(axis=1, keepdims=True)).sum())
assert np.isinf(without) and round(float(one_maximum), 3) == 100.313 and round(float(two_maxima), 3) == 100.693
say(f"log sum exp: without the maximum {without}, with it {one_maximum:.3f}, with two maxima {two_maxima:.3f}")

# %% [markdown]
# With two different maxima the result is 100.693 where 100.313 is right: an error that looks harmless.
#
# So there are two small all-reduces: $N$ maxima; then $2N$ sums, of the exponentials and of the target's logit, which
# one rank has. **Backward** sends nothing:
#
# $$\frac{\partial \ell}{\partial z_v} = \frac{e^{z_v - \mu}}{E} - [v = \text{target}],$$
#
# because $\mu$ cancels in $\ell$, and a rank knows $\mu$ and $E$ of each token since forward. (A target that does not
# count has the loss 0 and a gradient row of zeros.)
#
# [Exercise 9](exercises/e09_vocab_parallel_loss.py) asks for this loss: `make exercises PYTEST="-k e09"`. Write it
# before you open the next cell.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def split_loss(logits, targets, first):
    """Return the cross entropy (sum over N, gradient) of this rank's logits (N, V/t), whose first token is `first`."""
    row = np.arange(len(logits))
    top = comm.all_reduce(logits.max(axis=1), op="max", algorithm="ring")  # (N,)
    exponentials = np.exp(logits - top[:, None])  # (N, V/t)
    own = (targets >= first) & (targets < first + logits.shape[1])
    column = np.where(own, targets - first, 0)
    sums = np.stack([exponentials.sum(axis=1), np.where(own, logits[row, column] - top, 0)])  # (2, N)
    sums = all_reduce(sums)
    gradient = exponentials / sums[0][:, None]
    gradient[row, column] -= own  # softmax - onehot
    return (np.log(sums[0]) - sums[1]).sum(), gradient


# %%
from minipar.comm import wire_bytes

logits = random.normal(0, 5, (N, V))
goal = random.integers(0, V, N)
words = np.array_split(np.arange(V), t)[rank]
comm.traffic.reset()
loss, gradient = split_loss(logits[:, words], goal, words[0])
assert comm.traffic.bytes() == sum(wire_bytes("all_reduce", "ring", n, 8, t, rank) for n in (N, 2 * N))

total = np.exp(logits).sum(axis=1, keepdims=True)  # one device; logits below 25 do not overflow in float64
one_loss = (np.log(total[:, 0]) - logits[np.arange(N), goal]).sum()
one_gradient = np.exp(logits) / total - np.eye(V)[goal]
assert abs(loss / one_loss - 1) < 1e-13 and relative_difference(gradient, one_gradient[:, words]) < 1e-13
say(f"split loss = the whole one; its gradient within {relative_difference(gradient, one_gradient[:, words]):.1e}")

# %% [markdown]
# Gathering the logits would send $NV\frac{t-1}{t}$ elements, $V/6$ times as many as the $6N\frac{t-1}{t}$ here: 8376
# times for GPT-2. The library's embedding, and the forward of its loss:

# %%
from minipar.parallel.tensor import vocabulary
from minipar.parallel.tensor.user_layers import VocabParallelEmbedding

if rank == 0:
    show_source(VocabParallelEmbedding.forward, vocabulary._VocabParallelCrossEntropy.forward)

inputs, targets = random.integers(0, V, (2, B, T))
logits = model(inputs)  # (B, T, V/t)
plain_loss, _ = split_loss(logits.data.reshape(N, -1), targets.reshape(-1), rank * logits.shape[-1])
assert abs(model.criterion(logits, targets).item() / plain_loss - 1) < 1e-13

# %% [markdown]
# What does the library add? Targets that do not count (`IGNORE_INDEX`) have the loss 0. The exponentials overwrite the
# logits' copy, so that only one array of $N \times V/t$ is kept for backward. And every rank has as many rows: as
# $V = 257$ is not divisible, the matrix gets rows of zeros up to the next multiple, and their logits are set to
# $-\infty$, so that their $e^z$ is 0 in every softmax.
#
# ## 6.6 The proof
#
# *Deeper, 8 minutes.*
#
# One forward and backward over $t$ ranks, and the same on one device. Every split gradient is gathered and joined, and
# every parameter's gradient compared (`chapters/support/ch06/whole_gradients.py`).

# %%
worst, traffic = compare_with_one_device(comm, shape, (inputs, targets))
assert worst < 1e-12
say(f"the loss and all gradients are those of one device, within {worst:.1e}")

# %% [markdown]
# ### Why not bit for bit? And a tree that is
#
# *Deeper, 9 minutes.*
#
# Data parallelism could promise the bits of one device that adds the same parts in the same order (chapter 4). Tensor
# parallelism cannot, because its parts are inside a product. An element of $YD$ is a sum of $4h$ terms. One device
# leaves it to BLAS, the library that multiplies matrices, which adds in an order of its own: in blocks, and several
# terms at once. On $t$ ranks BLAS adds the $4h/t$ terms of each rank, and then the ranks' sums are added:
# $(a+b)+(c+d)$, say, where one device has $((a+b)+c)+d$. Where does it begin? Walk through the first attention, join
# what is cut, and compare bits with one device:


# %%
from chapters.support.ch06.whole_gradients import walk_through_attention

model = GPT(shape, dtype="float64")
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
from chapters.support.ch06.plain import differing, in_leaves, in_one_product
from minipar.more.tree.tree_sums import tree_sum

if rank == 0:
    show_source(in_one_product, in_leaves, tree_sum)
    for compute in (in_one_product, in_leaves):
        shares = [differing(compute, ranks, X, A, D) for ranks in (2, 4, 8)]
        assert compute is in_one_product or shares == [0, 0, 0]
        say(f"{compute.__name__} on 2, 4, 8 ranks: part of the values that differ from one's: {np.round(shares, 2)}")

# %% [markdown]
# `--reduction tree` uses leaves with every sum of a training step. A column layer is cut into leaves as well, so that
# its products have one shape, and in backward its input's gradient is a tree over them. For gradients and losses the
# microbatches of all replicas are leaves. The norm's squares are added without any rounding, so that no order shows.
# The price is computation, in smaller products: in [our
# measurements](../docs/combinations.md#the-same-bits-in-all-layouts) 1.4 to 1.8 times the time on one rank. With GPT-2
# the bytes stay the same, but gradients travel after backward, not during it.
#
# ## 6.7 The bytes
#
# *Core, 4 minutes.*
#
# Per layer: an all-reduce of $Nh$ elements after attention and one after the MLP in forward, and one before each in
# backward. Four times $2Nh\frac{t-1}{t}$:
#
# $$8\,N\,h\,\frac{t-1}{t} \text{ elements per layer, rank and microbatch,}$$
#
# and it does not fall with $t$. The embedding adds one all-reduce (forward), the head one (backward), the loss its two
# small ones.

# %%
small = sum(wire_bytes("all_reduce", "ordered", n, 8, t, rank) for n in (N, 2 * N))
assert sum(traffic.values()) == (4 * L + 2) * 2 * N * h * (t - 1) // t * 8 + small
say(f"counted: {sum(traffic.values()):,} bytes, of which {small:,} for the loss")

# %% [markdown]
# Data parallelism over $d$ ranks sends $2\Psi\frac{d-1}{d}$ elements per *step*, whatever the batch. A layer has
# $12h^2$ parameters, so there it is about $24h^2$ per layer, here $8Nh$ per layer and *microbatch*. With one microbatch
# per step tensor parallelism sends more from $N = 3h$ tokens on, with four from $N = 3h/4$ on. And it sends within the
# layer, where every rank waits.
#
# ## 6.8 Dropout
#
# *Deeper, 4 minutes.*
#
# There are two kinds of place. After a row layer's sum the activation is replicated, so all ranks must draw the *same*
# mask, else they would go on with different values. Between column and row layer (on the attention probabilities) each
# rank has other heads and must draw *different* masks. Megatron keeps two random states per rank for this. A generator
# that is keyed by what it draws, never by the rank, needs none: every rank draws the mask of all heads and takes that
# of its own. The sum after `c_proj` is then one device's, mask included:

# %%
alike = np.random.default_rng(6)  # the same key on every rank
whole = alike.random((B, a, T, T)) >= 0.3  # the mask of all heads
probabilities, values = alike.random((B, a, T, T)), alike.random((B, a, T, h // a))
weight = alike.random((h, h))  # of c_proj


def after_attention(p, keep, v, rows):
    """Return (p, dropped) v times these rows of c_proj, for the heads given: (B, n, T, T) -> (B, T, h)."""
    y = (p * keep / 0.7) @ v  # (B, n, T, h/a)
    return y.transpose(0, 2, 1, 3).reshape(B, T, -1) @ rows


own_p, own_keep, own_v = [np.split(x, t, axis=1)[rank] for x in (probabilities, whole, values)]
own_rows = np.split(weight, t)[rank]
summed = all_reduce(after_attention(own_p, own_keep, own_v, own_rows))
worst = relative_difference(summed, after_attention(probabilities, whole, values, weight))
assert worst < 1e-12
say(f"with dropout 0.3 on the probabilities the sum is one device's, within {worst:.1e}")

# %% [markdown]
# The library's `tensor_parallel` leaves this out, and refuses a model with dropout.

# %% [markdown]
# ## 6.9 Sequence parallelism
#
# *Core, 10 minutes.*
#
# What is not divided yet? LayerNorm, dropout and the residual stream: all ranks do the same work on the same $N \times
# h$ values, and all keep the same inputs for backward. They work on each token separately, so they can be divided
# along the **sequence** (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between the pairs, rank $r$ has
# $T/t$ of a sample's $T$ tokens with all of their $h$ elements; inside a pair all tokens with $1/t$ of the columns.
#
# The borders are chapter 3's identity, *all-reduce = reduce-scatter + all-gather*. Where a row layer all-reduced, it
# now reduce-scatters: the sum, and of it the own tokens. Where a column layer copied, it now all-gathers. Backward
# mirrors it:

# %%
if rank == 0:
    show(figures.plot_blocks(False, True), "06_blocks")

# %% [markdown]
# So a layer has four all-gathers and four reduce-scatters in the place of four all-reduces. Here is the MLP of 6.2 once
# more on plain arrays, where each rank begins and ends with its own $N/t$ rows:


# %%
def gather(x):
    """Join the ranks' tokens: (N/t, h) -> (N, h)."""
    return comm.all_gather(np.ascontiguousarray(x), algorithm="ring").reshape(N, -1)


def sum_part(x):
    """Return this rank's tokens of the sum over the ranks: (N, h) -> (N/t, h)."""
    return comm.reduce_scatter(np.ascontiguousarray(x), algorithm="ring").reshape(N // t, -1)


own = slice(rank * N // t, (rank + 1) * N // t)
comm.traffic.reset()
y, slope = gelu_array(gather(X[own]) @ A_r + bias_r)  # (N, 4h/t)
z_own = sum_part(y @ D_r) + bias_d  # (N/t, h)
dX_own = sum_part(gather(dZ[own]) @ D_r.T * slope @ A_r.T)  # (N/t, h)
sent_sequence = comm.traffic.bytes()
assert sent_sequence == sent  # of 6.2
assert relative_difference(z_own, z[own]) < 1e-12 and relative_difference(dX_own, dX[own]) < 1e-12
dbias_own = dZ[own].sum(axis=0)  # the bias's gradient covers this rank's tokens only
assert relative_difference(all_reduce(dbias_own), dbias_d) < 1e-12
say(f"bytes with sequence parallelism: {sent_sequence:,}, and without: {sent:,}")

# %% [markdown]
# **The same bytes**, because an all-reduce over a ring *is* a reduce-scatter and an all-gather.
#
# There is one new duty. Look at `dbias_own`: every rank has the same bias, but a rank has seen its own tokens only, so
# its gradient covers these tokens only. The whole gradient is the **sum over the ranks**. This concerns all parameters
# that work between the pairs: in a layer the biases of the two row layers ($2h$ elements) and both LayerNorms ($4h$),
# outside the layers `wpe` and `ln_f`. Their placement is `Partial`, and they are summed once per step. (Without
# sequence parallelism each rank has seen all tokens, and summing would count $t$ times.) The library's version:

# %%
if rank == 0:
    show_source(layers.Border.enter, layers.Border.leave, TensorParallel.sum_partial, sum_together)

worst, traffic_sequence = compare_with_one_device(comm, shape, (inputs, targets), sequence=True)
assert worst < 1e-12 and sum(traffic_sequence.values()) == sum(traffic.values())
model = GPT(shape, dtype="float64")
tensor_parallel(model, comm, sequence=True)
assert sum(p.size for p in model.h[0].parameters() if isinstance(p.placement.tp, Partial)) == (6 * h if t > 1 else 0)
say(f"sequence parallel = one device: gradients within {worst:.1e}; bytes as before")

# %% [markdown]
# ### Fewer activations
#
# *Deeper, 6 minutes.*
#
# What does a layer keep for backward? With $w$ bytes per value, and one byte per value of a mask where dropout is on
# ($\delta = 1$), there are three kinds. Tensor parallelism divides the last one, sequence parallelism the first:
#
# | | kept | bytes |
# | --- | --- | --- |
# | between the pairs | two LayerNorms (normalized input, reciprocal deviation) | $2w\,N(h + 1)$ |
# | | two dropout masks | $2\delta\,Nh$ |
# | inputs of the column layers | two | $2w\,Nh$ |
# | inside the pairs | $q,k,v$; attention's output | $4w\,Nh$ |
# | | MLP: gelu's input, its tanh, its output | $12w\,Nh$ |
# | | attention probabilities, their mask | $(w + \delta)\,aTN$ |
#
# The ledger of chapter 5 counts what is really alive after forward, and the table is exact (with masks on one device):


# %%
from chapters.support.ch06.layer_memory import MEASURED, kept_by_a_layer

KINDS = ("between the pairs", "inputs of the column layers", "inside the pairs")


def layer_activations(ranks, sequence, w, delta, B, T, h, a):
    """Return the bytes that a layer keeps on each rank, of each of the three kinds."""
    N = B * T
    between = 2 * w * N * (h + 1) + 2 * delta * N * h
    inside = 16 * w * N * h + (w + delta) * a * T * N
    return between / (ranks if sequence else 1), 2 * w * N * h, inside / ranks


GPT3 = {"B": 1, "T": 2048, "h": 12288, "a": 96}
if rank == 0:
    for ranks, sequence, p in ((1, False, 0.1), (2, False, 0.0), (8, False, 0.0), (8, True, 0.0)):
        measured = kept_by_a_layer(ranks, sequence, p)
        assert measured == sum(layer_activations(ranks, sequence, 4, int(p > 0), **MEASURED))
        say(f"t = {ranks}, sequence {sequence!s:<5}, dropout {p}: {measured:>7,} bytes kept per layer = the table's")
    layouts = {"one device": (1, False), "t = 8": (8, False), "t = 8, sequence": (8, True)}
    bars = {name: layer_activations(*layout, 2, 1, **GPT3) for name, layout in layouts.items()}
    show(figures.plot_kept(bars, KINDS), "06_kept")

# %% [markdown]
# The bars are a layer of GPT-3 with one sample of 2,048 tokens in 16 bit. On eight ranks the blue part, which is by far
# the largest, becomes an eighth. Half of what is left is not divided by tensor parallelism. Sequence
# parallelism divides the yellow part of it.
#
# ### The paper's table
#
# *Deeper, 5 minutes.*
#
# The paper (Table 2) has, in bytes per $Nh$,
#
# $$34 + 5\tfrac{aT}{h} \;\text{ alone}, \qquad 10 + \tfrac{24}{t} + 5\tfrac{aT}{ht} \;\text{ with tensor}, \qquad
# \tfrac{34}{t} + 5\tfrac{aT}{ht} \;\text{ with sequence parallelism too}.$$
#
# For a layer of GPT-3 these are 114, 23 and 14.25 bytes; minipar's are 90, 20 and 14.75:

# %%
for ranks, sequence, ours, paper in ((1, False, 90.0, 114), (8, False, 20.0, 23), (8, True, 14.75, 14.25)):
    per_element = sum(layer_activations(ranks, sequence, 2, 1, **GPT3)) / (2048 * 12288)
    scores = 5 * 96 * 2048 / 12288 / ranks
    assert round(per_element, 2) == ours and paper == scores + (34 / ranks if sequence else 10 + 24 / ranks)
    say(f"GPT-3, t = {ranks}, sequence {sequence!s:<5}: {per_element:>5.2f} bytes per N h; the paper has {paper}")

# %% [markdown]
# Three things differ.
#
# - Attention probabilities: we keep one copy and the mask, $3aT/h$ for the paper's $5aT/h$.
# - gelu: we keep its tanh as well, $32/t$ for the paper's $24/t$.
# - The inputs of the column layers: here the gathered $N \times h$ input is kept whole, because the weight's gradient
# needs it. Megatron keeps only the own tokens and gathers a **second time in backward**. It sends one all-gather more
# for each of the two column layers, $2Nh\frac{t-1}{t}$ elements per layer. So its memory falls as $34/t$ where ours
# stops at $2w$. The second all-gather runs while $\mathrm{d}Y_r A_r^\top$ is computed, the gradient of the column
# layer's input ($\mathrm{d}Y_r$ is the gradient of its result).
#
# ## 6.10 With data parallelism and ZeRO
#
# *Deeper, 5 minutes.*
#
# The mesh (chapter 9) numbers the ranks of one tensor group consecutively, so that they are on one machine. Ranks
# with the same part of the model form a dp group, and data parallelism or ZeRO runs over it, unchanged: it sees a model
# with smaller parameters.
#
# One function must know of both: the **gradient norm** for clipping. The squares of all gradients are added up, each
# element *once*. A split gradient has other elements on each rank, so its squares are summed over tp. A replicated
# gradient is the same on all ranks. Each rank adds its squares after the sum over tp, so that they count once. Take two
# ranks with the parts 3 and 4 of a split gradient, and a replicated gradient of 12 on both. The norm is $\sqrt{3^2 +
# 4^2 + 12^2} = 13$. A sum of everything over both ranks has $12^2$ twice and gives 17.7 (mistake 3 of 6.12). For the
# MLP of 6.2, where only the last bias is replicated:


# %%
def squares(arrays):
    return sum(float((array * array).sum()) for array in arrays)


def gradient_norm(split, replicated):
    """Return the norm of the whole gradient; `split` are this rank's parts, `replicated` are the same on each rank."""
    split_squares = all_reduce(np.array([squares(split)]))[0]
    return np.sqrt(split_squares + squares(replicated))


norm = gradient_norm(split=[dA_r, dbias_r, dD_r], replicated=[dbias_d])
one_norm = np.sqrt(squares([X.T @ dXA, dXA.sum(axis=0), Y.T @ dZ, dZ.sum(axis=0)]))
assert abs(norm / one_norm - 1) < 1e-13
say(f"the norm over {t} ranks is one device's: {norm:.1f}")

# %% [markdown]
# ### In the library
#
# *Deeper, 8 minutes.*
#
# The library's version is a loop over the parameters' placements. It knows dp and pp as well. [Exercise
# 12](exercises/e12_gradient_norm.py) asks for it (`make exercises PYTEST="-k e12"`); write it before you read the next
# output:

# %%
from minipar.parallel import grad_norm

if rank == 0:
    show_source(grad_norm.clip_grad_norm)

# %% [markdown]
# `verify` takes the same steps on one device, and compares the loss and the gradient norm of each step, and in the end
# every parameter. (How near must they be? The bias of the keys has the gradient 0, because softmax does not see a
# constant added to a row. In floating point it is noise of about $10^{-19}$. AdamW divides each gradient by its own
# size plus eps $= 10^{-8}$, so a training enlarges this noise $10^8$ times, and each step adds to it. A mistake changes
# far more. In float64 the two are many digits apart, so one bound decides: $10^{-9}$ of an array's largest value.)

# %%
from minipar.comm import DeviceMesh
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer
from minipar.train.verify import verify

tokens = load_tokens(None, vocab_size=V, seq_len=T)
TP = max((k for k in range(2, t) if t % k == 0), default=t)  # the largest divisor that leaves something for dp
FLAGS = f"--layers {L} --hidden {h} --heads {a} --seq-len {T} --vocab-size {V} --dtype float64 --lr 3e-3".split()
FLAGS += "--clip-grad 0.5 --steps 3".split()


def make_trainer(tp, *flags):
    batch = str(4 * (t // tp))
    args = parse([*FLAGS, "--tp", str(tp), "--global-batch", batch, *flags], t)
    return Trainer(args, DeviceMesh(comm, dp=t // tp, tp=tp), tokens)


with_zero_3 = ["--zero-stage", "3"]
if TP > 1:
    with_zero_3.append("--sequence-parallel")
for flags in (["--zero-stage", "0"], with_zero_3):
    trainer = make_trainer(TP, *flags)
    verdict = verify(trainer, list(trainer.train()))
    assert verdict.passed, verdict.line
    say(f"tp {TP} x dp {t // TP} {' '.join(flags)}\n  {verdict.line}")

# %% [markdown]
# (A prime number of ranks leaves nothing for dp; then tp takes them all.) The losses, the gradient norms and every
# parameter agree, clipping, ZeRO and sequence parallelism included.
#
# ## 6.11 What it costs: the link
#
# *Core, 5 minutes.*
#
# An all-reduce of $n$ bytes over a ring takes $2(t-1)(\alpha + \beta n/t)$ (chapter 3). A layer's products with its
# matrices have $24 Nh^2$ operations in forward, 2 for each token and each of $12h^2$ parameters, and twice as many in
# backward. (Attention's own products are left out.) So a layer takes about
#
# $$\frac{72Nh^2}{tS} + 4 \cdot 2(t-1)\left(\alpha + \beta\frac{n}{t}\right), \qquad n = wNh.$$
#
# $S$ is the number of operations per second of one device. The first term falls as $1/t$. The second tends to $8\beta
# n$ plus a latency that grows. One check that the program sends what the formula says: on chapter 3's `model` clock,
# where products here cost nothing.

# %%
from chapters.support.ch06.clock import seconds_on_the_clock
from minipar.comm import Network

LINK = Network(alpha=5e-6, beta=4e-8)


def ring_seconds(n, ranks, link):
    return 2 * (ranks - 1) * (link.alpha + link.beta * n / ranks)


if rank == 0:
    seconds = seconds_on_the_clock(LINK, layers=2, tokens=32, width=96)
    formula = (4 * 2 + 2) * ring_seconds(4 * 32 * 96, 4, LINK) + sum(ring_seconds(4 * n, 4, LINK) for n in (32, 64))
    assert abs(seconds / formula - 1) < 1e-9
    say(f"two layers, embedding, head and loss over 4 ranks: {seconds * 1e3:.2f} ms of sums on the clock = the formula")

# %% [markdown]
# ### Hiding backward's half
#
# *Deeper, 4 minutes.*
#
# In forward no computation of the same samples can hide the sums: the LayerNorm that comes next needs the whole sum.
# (With the microbatch cut in two halves, one could compute while the other's sums travel.) In backward, at a column
# layer, everything further down waits for the summed gradient of the input. But the gradient of the *weight*, $X^\top
# \mathrm{d}Y_r$, needs nothing from others. So: start the all-reduce, compute the weight's gradient, then wait. On
# plain arrays these are three lines. The library does not do it: between processes on one machine nothing was gained.
# (Megatron-LM does, as `async_tensor_model_parallel_allreduce`.)

# %%
work = comm.all_reduce(dy * slope @ A_r.T, algorithm="ring", async_op=True)
dA_meanwhile = X.T @ (dy * slope)
assert relative_difference(work.wait(), dX) < 1e-12 and relative_difference(dA_meanwhile, dA_r) < 1e-12

# %% [markdown]
# Each of these sums is hidden for as long as the weight's product takes. If the sum takes longer, the rest is exposed:
#
# $$\text{exposed} = \max\left(0,\; 2(t-1)\left(\alpha + \beta\tfrac{n}{t}\right) - \frac{2N h\, h_{\text{out}}}{t\, S}
# \right), \qquad h_{\text{out}} = 3h \text{ or } 4h.$$
#
# (Sequence parallelism hides the reduce-scatter of a column layer like this; the all-gathers stay exposed.)
#
# ### Three links
#
# *Core, 6 minutes.*
#
# $h = 6144$ and $N = 2048$ in 16 bit, about the width of a 20-billion-parameter GPT. **Speed**: $S = 4\cdot10^{14}$, an
# *assumption*: 40 % of the 989 TFLOP/s that NVIDIA's data sheet gives for an H100 (dense bfloat16). **Bandwidth**, per
# direction: the same sheet gives NVLink 4 900 GB/s in both directions together, so 450; the nominal rates of NDR
# InfiniBand, 400 Gb/s = 50 GB/s, and of 100-gigabit Ethernet, 12.5 GB/s. **Latency**: 3, 5 and 30 microseconds per
# message are *assumptions* about their order of magnitude.
#
# One device computes a layer, forward and backward, in 13.9 ms. How long do eight take on each link?

# %%
from chapters.support.predict import predict, reveal

S = 4e14  # operations per second of a device
WIDTH = 6144  # elements per token
BATCH = 2048  # tokens
LINKS = {
    "NVLink": Network(3e-6, 1 / 450e9),
    "InfiniBand": Network(5e-6, 1 / 50e9),
    "Ethernet": Network(30e-6, 1 / 12.5e9),
}
predict("milliseconds on eight devices", ...)  # replace the dots by a list for NVLink, InfiniBand, Ethernet


# %%
def layer_seconds(ranks, link):
    """Return the seconds of a layer's forward and backward: (computation, sums, what is hidden of the sums)."""
    computation = 72 * BATCH * WIDTH**2 / ranks / S
    reduce = ring_seconds(2 * BATCH * WIDTH, ranks, link)
    weight_products = [2 * BATCH * WIDTH * out / ranks / S for out in (3 * WIDTH, 4 * WIDTH)]
    hidden = sum(min(reduce, seconds) for seconds in weight_products)
    return computation, 4 * reduce, hidden


bars = {}
lines = {}
for name, link in LINKS.items():
    computation, sums, hidden = (1e3 * seconds for seconds in layer_seconds(8, link))
    bars[name] = computation, sums - hidden
    say(f"{name:<10} computation {computation:.1f} ms, sums {sums:>4.1f}, of which hidden {hidden:.1f}")
    counts = (1, 2, 4, 8, 16, 32)
    each = [layer_seconds(count, link) for count in counts]
    lines[name] = counts, [1e3 * (computation + sums - hidden) for computation, sums, hidden in each]
alone = lines["NVLink"][1][0]
reveal("milliseconds on eight devices", [round(sum(bar), 1) for bar in bars.values()], say)
assert [round(sum(bar), 1) for bar in bars.values()] == [2.0, 5.2, 17.2] and round(alone, 1) == 13.9
if rank == 0:
    show(figures.plot_links(bars, lines, alone), "06_links")

# %% [markdown]
# Eight devices take 2.0 ms on NVLink and 5.2 ms on InfiniBand. On Ethernet eight devices together are *slower than
# one*: 17.2 ms. Weight gradients hide 0.3 ms of sums on each link: that is half of 0.6 ms on NVLink, and little of the
# 15.8 ms on Ethernet. From 16 ranks on, further ones gain nothing on any
# link.
#
# Without latency the ratio of communication to computation is
#
# $$\frac{8\,wNh\,\beta\,(t-1)/t}{72\,Nh^2/(tS)} = \frac{16\,(t-1)\,S\beta}{72\,h} \quad (w = 2),$$
#
# which is 1 at $t = 1 + 4.5\,h/(S\beta)$: 32 ranks on NVLink, 4.5 on InfiniBand, 1.9 on Ethernet. The batch cancels.
# The ratio falls as the hidden size grows, so a wider model can use a larger $t$. Hence the rule of Narayanan et al.
# (2021, arXiv 2104.04473, takeaway 1): tensor parallelism up to the number of GPUs in a server, pipelines and data
# parallelism between servers.
#
# ## 6.12 Mistakes, and what notices them
#
# *Deeper, 8 minutes.*
#
# Five mistakes, with tp over all ranks. Which check catches which? **Ranks**: do all ranks hold the same replicated
# parameters? **Bytes**: does the counter agree with the formula? **Step 1**, **step 3**: are parameters, losses and
# gradient norms those of one device after so many steps?
#
# 1. **Bias on every rank**: a row layer adds its bias before the sum.
# 2. **A forgotten all-reduce**: a column layer's backward does not sum the input's gradient ($f$ is missing).
# 3. **The norm** counts replicated parameters $t$ times.
# 4. **A softmax with each rank's own maximum**, not the maximum of all.
# 5. **Sequence parallelism without the sum** of replicated parameters' gradients.

# %%
from chapters.support.ch06.mistakes import MISTAKES, examine
from minipar.train.verify import one_device

CHECKS = ("ranks", "bytes", "step 1", "step 3")
predict("1. bias on every rank", ...)  # replace the dots by a list of checks, such as ["ranks", "bytes"]
predict("2. no all-reduce in backward", ...)
predict("3. norm counts t times", ...)
predict("4. own maximum", ...)
predict("5. no sum of partial gradients", ...)

# %%
single = {}
for steps in (1, 3) if rank == 0 else ():
    alone = one_device(parse([*FLAGS, "--global-batch", "4", "--steps", str(steps)]), tokens)
    results = list(alone.train())
    single[steps] = alone.state_dict(), results
caught = {}
losses = {}
for name in MISTAKES:
    flags = ["--sequence-parallel"] if name[0] == "5" and t > 1 else []
    with MISTAKES[name]():
        caught[name], losses[name] = examine(make_trainer(t, *flags), single)
    say(f"{name:<31} loss {losses[name]:.3f}")
for name in list(MISTAKES)[1:]:
    reveal(name, [check for check in CHECKS if check in caught[name]], say)
if rank == 0:
    show(figures.draw_caught(caught, CHECKS), "06_caught")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from chapters.support.ch06.mistakes import CATCHING

for name, noticed in caught.items():
    assert noticed == (CATCHING[name] if t > 1 else set())  # with one rank there is nothing to forget
    assert losses[name] < np.log(V) and (name[0] == "4" or abs(losses[name] / losses["nothing broken"] - 1) < 0.03)

# %% [markdown]
# **A falling loss proves little.** With mistakes 1, 2, 3 and 5 the third loss is within three percent of the right one.
# With mistake 4 the reported loss falls too, though it is itself computed with the mistake: the maxima of the ranks are
# close to one another at first, so the gradient is nearly right.
#
# **A test at initialization is not enough.** Biases start at zero, so mistake 1 is invisible in the first step. A test
# must train a few steps, or begin with biases that are not zero.
#
# **Replicated parameters must stay replicated.** Mistakes 2 and 5 give each rank another gradient for its LayerNorms.
# From then on the ranks hold different models. Comparing the copies is cheap and needs no second run.
#
# **The norm needs a test of its own.** Mistake 3 changes only the reported norm, and how strongly gradients are
# clipped. AdamW divides by the gradient's size, and hides most of it.
#
# ## 6.13 PyTorch's names
#
# *Deeper, 2 minutes.*
#
# | minipar | PyTorch | Megatron-LM |
# | --- | --- | --- |
# | `copy_to`, $f$ | DTensor: `Replicate()` input, `Partial()` gradient | `copy_to_tensor_model_parallel_region` |
# | `reduce_from`, $g$ | `redistribute` from `Partial()` to `Replicate()` | `reduce_from_tensor_model_parallel_region` |
# | `ColumnParallelLinear` | `ColwiseParallel` | `ColumnParallelLinear` |
# | `RowParallelLinear` | `RowwiseParallel` | `RowParallelLinear` |
# | `VocabParallelEmbedding` | `RowwiseParallel` of `nn.Embedding` | `VocabParallelEmbedding` |
# | `vocab_parallel_cross_entropy_sum` | `loss_parallel()` | `vocab_parallel_cross_entropy` |
# | `tensor_parallel(model, comm)`, `PLAN` | `parallelize_module(model, mesh, plan)` | built into its model |
# | `sequence=True` | `SequenceParallel` | `--sequence-parallel` |
# | a mask of all heads (6.8) | DTensor's random number tracker | `get_cuda_rng_tracker().fork()` |
#
# The same in PyTorch: `chapters/pytorch/ch06.py`.
#
# ## 6.14 Problems
#
# *Deeper, 40 minutes.*
#
# 1. A GPU has $B = 4$ samples of $T = 2048$ tokens, $h = 4096$ and $t = 8$. How many bytes does a rank send per layer
# in 16 bit, forward and backward together? How long does that take on NVLink (450 GB/s) without latency?
# 2. How many bytes does the loss of $N = 8192$ tokens send per rank in float32 over $t = 8$ ranks? How many does a rank
# send to gather, also in float32, the logits of GPT-2's vocabulary, padded to 50,264?
# 3. From which hidden size on is communication in 16 bit over InfiniBand (50 GB/s, $S = 4 \cdot 10^{14}$) with $t = 8$
# at most as long as computation, without latency and with nothing hidden?
# 4. How many bytes of activations does one layer of GPT-3 ($T = 2048$, $B = 1$, $h = 12\,288$, $a = 96$) keep on each
# rank by the paper's formulas: alone, with $t = 8$, and with sequence parallelism too?
# 5. A row layer's bias could also be added before the sum on rank 0 only. Is that right in forward? What is its
# gradient on each rank before the sum of `Partial` gradients, with and without sequence parallelism? What would the
# optimizer, without weight decay and clipping, do to the copies on the others? (A copy that is not used has the
# gradient 0.)
# 6. Let `ColumnLinear` keep its own tokens only and gather again in backward, as Megatron does. Backward has two
# products (6.9, 6.11). Which of them can run during that all-gather, and why not the other? Per layer, what do the
# ledger (after forward) and the counter say before and after?
# 7. Llama 3 8B has $h = 4096$, 32 layers, 32 heads of $q$ and $G = 8$ of $k$ and $v$, each of 128 elements. Let
# $t = 16$. Which part of `k_proj` and `v_proj` does a rank hold, and how many ranks hold the same? What does each of
# them know of the gradient, and what must be done with it? How many bytes does a rank send for that per step in
# float32, and how many in a layer of 8,192 tokens in 16 bit for the sums of 6.7? What happens if it is forgotten? How
# often does the norm count these gradients?
#
# ## 6.15 Answers
#
# *Deeper, 10 minutes.*

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from chapters.support.ch06.copies import copies_sum_to_the_gradient

assert copies_sum_to_the_gradient(grouped_attention, tokens_in, ranks=4, heads=8, kv_heads=2, size=size)

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. 469,762,048 bytes, 1.04 ms: four all-reduces of $2Nh\frac78$ elements each.
# 2. 172,032 and 1,441,169,408 bytes, 8,377 times as many: $V/6$, whatever $N$ and $t$ are.
# 3. $h = 12\,444$, about GPT-3's: the ratio is 1 where $h = 16\,(t-1)\,S\beta/72$.
# 4. 2,868,903,936, 578,813,952 and 358,612,992 bytes. With tp alone 10 of the 34 bytes per value are not divided.
# 5. Forward is right: the sum contains the bias once. Without sequence parallelism rank 0 gets the whole gradient and
# the others get 0, because they do not use theirs. Without weight decay a gradient of 0 changes nothing, so the
# optimizer changes the copy on rank 0 alone, and the copies are no longer equal. With sequence parallelism rank 0 also
# gets the whole gradient, because backward gathers all tokens before it; the sum of `Partial` gradients hands it to
# every rank, and the copies stay equal.
# 6. The product $\mathrm{d}Y_r A_r^\top$, which gives $\mathrm{d}X$, does not need $X$ and can run during the
# all-gather. The other, $X^\top \mathrm{d}Y_r$, needs what is being gathered. For the inputs of the column layers the
# ledger sees $2w\,Nh/t$ instead of $2w\,Nh$ per layer. The counter sees two more all-gathers of $Nh\frac{t-1}{t}$
# elements each.
# 7. A rank has 2 heads of $q$ and needs one head of $k$ and $v$: $128 \times 4096$ elements of each matrix. $t/G = 2$
# ranks hold the same copy. Each has seen only its own 2 of the 4 query heads that read it, so its gradient is a term:
# the gradient of the matrix is the **sum of the copies' gradients** (the cell above asserts it for four ranks). It is
# summed over each *pair* of ranks, once per step. An all-reduce over 2 ranks sends as many elements as it sums:
# 1,048,576 per layer, which are 4,194,304 bytes, and 134,217,728 bytes in 32 layers. Beside the 503,316,480 bytes that
# *one* layer sends for its sums in one microbatch, that is little. If it is forgotten the copies get different
# gradients and drift apart, like LayerNorms with mistake 5 of 6.12, and the check "ranks" would see it. The norm counts
# the summed gradient once, not twice. The price is memory and work: $k$ and $v$, their matrices, gradients and
# optimizer state are there $t/G$ times. (In inference there are no gradients. There vLLM copies the heads so.)
# minipar refuses $t > G$, so that a rank has a part of each matrix that no other rank has.
#
# </details>
#
# Tensor parallelism needs $t \le a$ heads, and a fast link to all $t$ ranks. To use more devices, cut the model
# *between* layers. At each cut one rank sends the activations of a microbatch, $Nh$ elements, to one other rank, and
# gets as many elements of their gradient back. A stage waits for the one before it in forward and for the one after it
# in backward. [Chapter 7](07_pipeline.ipynb) keeps the stages busy with many microbatches.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
