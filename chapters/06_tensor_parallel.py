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
# 5](05_zero.ipynb)), and each sample adds 2.9 GB of activations ([6b.5](06b_vocabulary_and_memory.ipynb)). Data
# parallelism and ZeRO give each rank its own samples, but every rank still computes whole layers. When one layer is too
# large or too slow for one device, the layer itself must be cut. Each rank then holds a part of every matrix and
# computes a part of every product, on the *same* samples. That is tensor parallelism (Shoeybi et al. 2019, arXiv
# 1909.08053: Megatron-LM).
#
# The price is time spent waiting: in every layer, in forward and in backward, all ranks stop until a sum has arrived.
# Over some links eight devices compute a layer faster than one, and over others they are *slower than one*. At the end
# of this chapter you can cut a layer so that as little as possible is sent, and say over which link it pays. [Chapter
# 6b](06b_vocabulary_and_memory.ipynb) cuts the rest of the model, and counts what each rank keeps.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import math

import numpy as np

from chapters.support.ch06.plain import attention_array, gelu_array
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from chapters.support.whole_runs import relative_difference
from minipar.comm import Network, world

comm = world()
rank, t = comm.rank, comm.size  # this rank, and the number of ranks that compute a layer together
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch06 import figures
    from chapters.support.show import show, show_file, show_source

layer_of_gpt3 = 12 * 12288**2  # parameters of its matrices; Adam needs 16 bytes for each
assert round(layer_of_gpt3 / 1e9, 1) == 1.8 and round(16 * layer_of_gpt3 / 1e9) == 29

# %%
say(f"{t} rank{'s' if t > 1 else ''}")
# A block's matrices: rows, columns, the dim that is cut, and the number of equal stretches that are cut one by one.
MATRICES = {
    "attn.c_attn": (64, 192, 1, 3),
    "attn.c_proj": (64, 64, 0, 1),
    "mlp.c_fc": (64, 256, 1, 1),
    "mlp.c_proj": (256, 64, 0, 1),
}
if rank == 0:
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
# The MLP of a Transformer is $Z = \mathrm{gelu}(XA)\,D$. $X$ is $N \times h$: $N$ tokens, with $h$ elements each.
# $A$ is $h \times 4h$ and $D$ is $4h \times h$. (The biases come in 6.2.) Cut $A$ by **columns** and $D$ by **rows**:
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
# *Core, 11 minutes.*
#
# Every rank has the whole input $X$ and multiplies it by its own columns $A_r$. At the end of the pair every rank has
# one term $Z_r = Y_r D_r$ of the result, and all ranks need the sum of these terms. What must backward send?
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
# the all-reduce. Added before the sum, on every rank, it would count $t$ times (mistake 1 of 6b.7).
#
# [Exercise 8](exercises/e08_column_row_layers.py) asks for these four functions: `make exercises PYTEST="-k e08"`.
# Write them before you open the next cell.


# %% tags=["hide-input"]
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

# %% [markdown]
# ## 6.3 Attention, and a block
#
# *Core, 9 minutes.*
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
# **Predict.** The MLP's matrices have $8h^2$ elements, those of attention have $4h^2$, and the scores of attention grow
# with the square of the sequence's length. The MLP sent two sums, one in forward and one in backward. How many times as
# many bytes does attention send?

# %%
predict("bytes of attention / bytes of the MLP", ...)  # replace the dots by a number

# %% [markdown]
# Attention on plain arrays uses the four functions of 6.2. A rank's columns of $q$, $k$ and $v$ are cut from each of
# the three matrices by itself, so that they belong to the same heads:

# %%
W_qkv, bias_qkv = random.normal(size=(h, 3 * h)) / math.sqrt(h), random.normal(size=3 * h)
W_o, bias_o = random.normal(size=(h, h)), random.normal(size=h)


def own_columns(array):
    """Return this rank's columns of q, k and v, which stand side by side in the array's last dim."""
    return np.concatenate([np.split(part, t, axis=-1)[rank] for part in np.split(array, 3, axis=-1)], axis=-1)


W_r, W_o_r = own_columns(W_qkv), np.split(W_o, t)[rank]

comm.traffic.reset()
heads, heads_backward = attention_array(column_forward(X, W_r, own_columns(bias_qkv)), a // t, T)  # (N, h/t)
z_attention = row_forward(heads, W_o_r, bias_o)
d_heads, dW_o_r, dbias_o = row_backward(heads, W_o_r, dZ)
dX_attention, dW_r, dbias_qkv_r = column_backward(X, W_r, heads_backward(d_heads))
sent_attention = comm.traffic.bytes()

all_heads, all_backward = attention_array(X @ W_qkv + bias_qkv, a, T)  # one device
d_qkv = all_backward(dZ @ W_o.T)
for part, whole in (
    (z_attention, all_heads @ W_o + bias_o),
    (dX_attention, d_qkv @ W_qkv.T),
    (dW_r, own_columns(X.T @ d_qkv)),
    (dbias_qkv_r, own_columns(d_qkv.sum(axis=0))),
    (dW_o_r, np.split(all_heads.T @ dZ, t)[rank]),
):
    assert relative_difference(part, whole) < 1e-12
say(f"{a} heads over {t} ranks = one device, with all gradients")
assert sent_attention == sent  # of the MLP
reveal("bytes of attention / bytes of the MLP", sent_attention / sent if t > 1 else 1.0, say)  # one rank sends nothing

# %% [markdown]
# **As many**: attention, too, begins and ends with $N \times h$ elements, and only these two ends send. What lies
# between them, four times as wide in the MLP and $T \times T$ scores per head in attention, stays on its rank.

# %% [markdown]
# ### In the library
#
# *Deeper, 6 minutes.*

# %% [markdown]
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
# What does the library add? A layer's weights are Parameters that know which part of the serial model they are
# ([6b.1](06b_vocabulary_and_memory.ipynb)). What enters and leaves the part of a layer where the ranks differ crosses a
# *border*. Its `enter` is $f$, its `leave` is $g$. Sequence parallelism is a border with two other mappings (6.5);
# `SEQUENCE` is the dim of the tokens, 1.
#
# Many models since Llama 2 70B have fewer heads of keys and values than of queries. [Grouped
# queries](more/grouped_queries.ipynb) shows how these are cut.

# %% [markdown]
# ## 6.4 The bytes
#
# *Core, 4 minutes.*
#
# Per layer: an all-reduce of $Nh$ elements after attention and one after the MLP in forward, and one before each in
# backward. Four times $2Nh\frac{t-1}{t}$:
#
# $$8\,N\,h\,\frac{t-1}{t} \text{ elements per layer, rank and microbatch,}$$
#
# and it does not fall with $t$. The two halves above are a layer:

# %%
sent_layer = sent + sent_attention  # bytes of float64
assert sent_layer * t == 8 * N * h * (t - 1) * 8
say(f"one layer, forward and backward: {sent_layer:,} bytes per rank = 8 N h (t-1)/t elements")

# %% [markdown]
# The embedding adds one all-reduce (forward), the head one (backward), and the loss two small ones. [Chapter
# 6b](06b_vocabulary_and_memory.ipynb) counts them on a whole model.
#
# **Against data parallelism.** Data parallelism over $d$ ranks sends $2\Psi\frac{d-1}{d}$ elements per *step*, whatever
# the batch. A layer has $12h^2$ parameters, so these are about $24h^2$ elements per layer. Tensor parallelism sends
# $8Nh$ per layer and *microbatch* (both times $\frac{d-1}{d}$ or $\frac{t-1}{t}$, which are equal on as many ranks).
# With one microbatch per step the two send the same if it has $N = 3h$ tokens, and tensor parallelism sends more if it
# has more. With four microbatches per step they send the same if each has $N = 3h/4$ tokens. And tensor parallelism
# sends within the layer, where every rank waits.

# %% [markdown]
# ## 6.5 Sequence parallelism
#
# *Core, 11 minutes.*
#
# What is not divided yet? LayerNorm, dropout and the residual stream: all ranks do the same work on the same $N \times
# h$ values, and all keep the same inputs for backward. They work on each token separately, so they can be divided
# along the **sequence** (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between the pairs, rank $r$ has
# $T/t$ of a sample's $T$ tokens with all of their $h$ elements; inside a pair all tokens with $1/t$ of the columns.
#
# So a rank must send at other places. Where the row layer ends, it needs the sum of its own tokens only. Where the next
# column layer begins, it needs all tokens again. Backward mirrors both. In forward and backward together a layer sent
# at four places, and now it sends at eight.
#
# **Predict.** What does a rank send for the MLP of 6.2 in this way, divided by what it sent there?

# %%
predict("bytes with sequence parallelism / bytes without", ...)  # replace the dots by a number

# %% [markdown]
# Two of the eight do together what one did before. It is chapter 3's identity, *all-reduce = reduce-scatter +
# all-gather*. Where a row layer all-reduced, it now reduce-scatters: of the sum a rank gets its own tokens. Where a
# column layer copied, it now all-gathers:

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
reveal("bytes with sequence parallelism / bytes without", sent_sequence / sent if t > 1 else 1.0, say)

# %% [markdown]
# **The same bytes**, because an all-reduce over a ring *is* a reduce-scatter and an all-gather. But between the pairs a
# rank now computes, and keeps for backward, a $t$-th of the tokens. [6b.5](06b_vocabulary_and_memory.ipynb) counts the
# memory that this saves.
#
# There is one new duty. Look at `dbias_own`: every rank has the same bias, but a rank has seen its own tokens only, so
# its gradient covers these tokens only. The whole gradient is the **sum over the ranks**. This concerns all parameters
# that work between the pairs: in a layer the biases of the two row layers ($2h$ elements) and both LayerNorms ($4h$),
# outside the layers the positions' embedding and the last LayerNorm. Their gradients are summed once per step. (Without
# sequence parallelism each rank has seen all tokens, and summing would count $t$ times.)

# %% [markdown]
# ### In the library
#
# *Deeper, 3 minutes.*

# %% [markdown]
# The border of 6.3 chooses the mappings. The placement `Partial` marks the parameters whose gradients are summed, and
# `sum_partial` sums them together. ([6b.3](06b_vocabulary_and_memory.ipynb) compares a whole model with one device.)

# %%
from minipar.parallel.tensor.plan import TensorParallel, sum_together

if rank == 0:
    show_source(layers.Border.enter, layers.Border.leave, TensorParallel.sum_partial, sum_together)

# %% [markdown]
# ## 6.6 What it costs: the link
#
# *Core, 6 minutes.*
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

LINK = Network(alpha=5e-6, beta=4e-8)


def ring_seconds(n, ranks, link):
    return 2 * (ranks - 1) * (link.alpha + link.beta * n / ranks)


if rank == 0:
    seconds = seconds_on_the_clock(LINK, layers=2, tokens=32, width=96)
    formula = (4 * 2 + 2) * ring_seconds(4 * 32 * 96, 4, LINK) + sum(ring_seconds(4 * n, 4, LINK) for n in (32, 64))
    assert abs(seconds / formula - 1) < 1e-9
    say(f"two layers, embedding, head and loss over 4 ranks: {seconds * 1e3:.2f} ms of sums on the clock = the formula")

# %% [markdown]
# ### Three links
#
# *Core, 9 minutes.*
#
# $h = 6144$ and $N = 2048$ in 16 bit, about the width of a 20-billion-parameter GPT. **Speed**: $S = 4\cdot10^{14}$, an
# *assumption*: 40 % of the 989 TFLOP/s that NVIDIA's data sheet gives for an H100 (dense bfloat16). **Bandwidth**, per
# direction: the same sheet gives NVLink 4 900 GB/s in both directions together, so 450; the nominal rates of NDR
# InfiniBand, 400 Gb/s = 50 GB/s, and of 100-gigabit Ethernet, 12.5 GB/s. **Latency**: 3, 5 and 30 microseconds per
# message are *assumptions* about their order of magnitude.
#
# In backward a sum can be hidden: it can travel while the rank computes a weight's gradient, for which it needs nothing
# from others (the next section shows how). The time that counts is the computation and what is not hidden of the sums.
#
# One device computes a layer, forward and backward, in 13.9 ms. How long do eight take on each link?

# %%
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
# 15.8 ms on Ethernet. From 16 ranks on, further ones gain nothing on any link.
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
# **To remember.** Columns, then rows, with one sum per pair. Four sums of $Nh$ elements per layer and microbatch, for
# which every rank waits. Sequence parallelism sends the same, and divides the work between the pairs as well. All of it
# belongs on the fastest link.

# %% [markdown]
# ### Hiding backward's half
#
# *Deeper, 4 minutes.*

# %% [markdown]
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

# %% [markdown]
# ## 6.7 PyTorch's names
#
# *Deeper, 4 minutes.*

# %% [markdown]
# | minipar | PyTorch | Megatron-LM |
# | --- | --- | --- |
# | `copy_to`, $f$ | DTensor: `Replicate()` input, `Partial()` gradient | `copy_to_tensor_model_parallel_region` |
# | `reduce_from`, $g$ | `redistribute` from `Partial()` to `Replicate()` | `reduce_from_tensor_model_parallel_region` |
# | `ColumnParallelLinear` | `ColwiseParallel` | `ColumnParallelLinear` |
# | `RowParallelLinear` | `RowwiseParallel` | `RowParallelLinear` |
# | `sequence=True` | `SequenceParallel` | `--sequence-parallel` |
#
# The same in PyTorch, the MLP of 6.2 on two processes: [chapters/pytorch/ch06.py](pytorch/ch06.py).

# %%
if rank == 0:
    show_file("chapters/pytorch/ch06.py")

# %% [markdown]
# ## 6.8 Problems
#
# *Deeper, 15 minutes.*

# %% [markdown]
# 1. A GPU has $B = 4$ samples of $T = 2048$ tokens, $h = 4096$ and $t = 8$. How many bytes does a rank send per layer
# in 16 bit, forward and backward together? How long does that take on NVLink (450 GB/s) without latency?
# 2. From which hidden size on is communication in 16 bit over InfiniBand (50 GB/s, $S = 4 \cdot 10^{14}$) with $t = 8$
# at most as long as computation, without latency and with nothing hidden?
# 3. A row layer's bias could also be added before the sum on rank 0 only. Is that right in forward? What is its
# gradient on each rank before the sum of `Partial` gradients, with and without sequence parallelism? What would the
# optimizer, without weight decay and clipping, do to the copies on the others? (A copy that is not used has the
# gradient 0.)

# %% [markdown]
# ## 6.9 Answers
#
# *Deeper, 4 minutes.*

# %% tags=["hide-input"]
bytes_of_1 = 4 * 2 * 4 * 2048 * 4096 * 7 // 8 * 2
assert bytes_of_1 == 469_762_048 and round(bytes_of_1 / 450e9 * 1e3, 2) == 1.04
assert math.ceil(16 * 7 * S / 50e9 / 72) == 12_445  # the hidden size at which the ratio is 1 is between two integers

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. 469,762,048 bytes, 1.04 ms: four all-reduces of $2Nh\frac78$ elements each.
# 2. $h = 12\,445$, about GPT-3's: the ratio is 1 where $h = 16\,(t-1)\,S\beta/72$, which is 12,444.4.
# 3. Forward is right: the sum contains the bias once. Without sequence parallelism rank 0 gets the whole gradient and
# the others get 0, because they do not use theirs. Without weight decay a gradient of 0 changes nothing, so the
# optimizer changes the copy on rank 0 alone, and the copies are no longer equal. With sequence parallelism rank 0 also
# gets the whole gradient, because backward gathers all tokens before it; the sum of `Partial` gradients hands it to
# every rank, and the copies stay equal.
#
# </details>
#
# A layer is cut. The rest of the model is not yet: the vocabulary is cut by rows, and its loss must not gather the
# logits. [Chapter 6b](06b_vocabulary_and_memory.ipynb) cuts it, proves the whole model equal to one device, and counts
# the memory. [Chapter 7](07_pipeline.ipynb) cuts *between* the layers. It needs only what stands above.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
