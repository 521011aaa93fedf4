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
# Data parallelism (chapter 4) and ZeRO (chapter 5) give each rank its own samples. Every rank still computes whole
# layers, and needs a whole layer's parameters and activations while it does. When one layer is too large or too slow
# for one device, the layer itself must be cut: each rank holds a part of every matrix and computes a part of every
# product, on the *same* samples. That is tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053: Megatron-LM).
#
# Its price is communication in the middle of every layer, in forward and in backward, that everybody waits for. So this
# chapter is about cutting a Transformer such that as little as possible has to be sent: two sums per layer in forward,
# two in backward. Then it proves the result equal to one device, counts the bytes, divides what is still whole
# (sequence parallelism), and finds the link on which tensor parallelism stops paying.
#
# Run it as `mpirun -n 8 python chapters/06_tensor_parallel.py`, with any number of ranks. With one rank a "part" is the
# whole, nothing is sent, and the claims say little.
#
# Letters: $t$ tensor-parallel ranks, $r$ one of them; $B$ samples of $T$ tokens, $N = BT$; $h$ elements per token, $L$
# layers, $V$ words in the vocabulary; $\alpha$ and $\beta$ seconds per message and per byte; $w$ bytes per element.

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
rank, t = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.figures_tensor import plot_activations, plot_cuts, plot_links
    from chapters.support.show import show, show_source
    from visualize import parse_trace, plot_bytes, plot_timeline
say(f"{t} rank{'s' if t > 1 else ''}")

# %% [markdown]
# The model is a GPT-2 of toy size. Its heads and its sequence must be divisible by $t$, so we choose both as small
# multiples of it. The vocabulary is prime, so that nothing divides it.

# %%
import numpy as np

from minipar.nn import GPT, GPTConfig

HEADS = t * -(-6 // t)  # the smallest multiple of t from 6 on
T = t * -(-16 // t)  # from 16 on
B, L, h, V = 2, 2, 8 * HEADS, 257
N = B * T
shape = GPTConfig(vocab_size=V, n_positions=T, n_embd=h, n_layer=L, n_head=HEADS)
say(f"h = {h}, {HEADS} heads, T = {T}, V = {V}")

# %% [markdown]
# ## 6.1 Columns, then rows
#
# The MLP of a Transformer is $Z = \mathrm{gelu}(XA)\,D$, with $X$ of $N \times h$, $A$ of $h \times 4h$ and $D$ of
# $4h \times h$ (its biases come in 6.2). Cut $A$ by **columns** and $D$ by **rows**:
#
# $$A = [\,A_1 \mid A_2\,], \qquad D = \begin{bmatrix} D_1 \\ D_2 \end{bmatrix}, \qquad
# XA = [\,XA_1 \mid XA_2\,].$$
#
# Two facts. gelu works element by element, so it works on blocks of columns: $Y = \mathrm{gelu}(XA) =
# [\,\mathrm{gelu}(XA_1) \mid \mathrm{gelu}(XA_2)\,] = [\,Y_1 \mid Y_2\,]$. And a product of a row of blocks with a
# column of blocks is the sum of the blocks' products:
#
# $$Z = YD = Y_1 D_1 + Y_2 D_2 .$$
#
# Rank $r$ computes $Y_r D_r$ from $X$, without asking anybody. One sum at the end, one all-reduce, gives $Z$. Here it
# is with plain arrays, all blocks in one process:

# %%
random = np.random.default_rng(0)
X, A, D = random.normal(size=(N, h)), random.normal(size=(h, 4 * h)), random.normal(size=(4 * h, h))
BLOCKS = max(t, 2)


def gelu_array(x):
    """GPT-2's gelu of an array, x (1 + tanh u) / 2 with u = s (x + c x^3), and its slope."""
    c, s = 0.044715, np.sqrt(2 / np.pi)
    tanh = np.tanh((x * x * c + 1) * x * s)
    slope = ((x * x * (3 * c * s) + s) * x * (1 - tanh) + 1) * (2 - (1 - tanh)) * 0.5
    return (tanh + 1) * x * 0.5, slope


def act(x):
    return gelu_array(x)[0]


def off(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())


Z = act(X @ A) @ D
columns, rows = np.array_split(A, BLOCKS, axis=1), np.array_split(D, BLOCKS, axis=0)
parts = [act(X @ a) @ d for a, d in zip(columns, rows, strict=True)]
assert off(sum(parts), Z) < 1e-13
say(f"columns, then rows: the sum of {BLOCKS} ranks' Y_r D_r is Z; relative difference {off(sum(parts), Z):.1e}")

# %% [markdown]
# The other order, $A$ by rows and $D$ by columns, needs $X$ cut by columns. Each rank then has a *partial sum* $X_r
# A_r$ of the same elements, and
#
# $$\mathrm{gelu}(X_1 A_1 + X_2 A_2) \neq \mathrm{gelu}(X_1 A_1) + \mathrm{gelu}(X_2 A_2).$$
#
# So the ranks must sum before the gelu ($4h$ columns wide, four times the bytes), and then gather the columns of $Z$.

# %%
slices, rows_first = np.array_split(X, BLOCKS, axis=1), np.array_split(A, BLOCKS, axis=0)
partial_sums = [x @ a for x, a in zip(slices, rows_first, strict=True)]
early = sum(act(part) for part in partial_sums) @ D  # gelu on partial sums
late = act(sum(partial_sums)) @ D  # an all-reduce of N x 4h elements first
assert off(early, Z) > 0.1 and off(late, Z) < 1e-13
say(f"rows, then columns, gelu before the sum: off by {off(early, Z):.0%}; after it: {off(late, Z):.1e}")

# %% [markdown]
# ## 6.2 The two ends of a pair: f and g
#
# Where the pair of products begins, $X$ is the same on all ranks, and each uses it with other columns. Where it ends,
# each rank has a partial result, and all need the sum. What must backward send?
#
# Let $\mathcal L$ be the loss. It depends on $X$ through every rank's columns, so its gradient is a sum over ranks:
# $\partial \mathcal L / \partial X = \sum_r (\partial \mathcal L / \partial XA_r)\, A_r^\top$. At the other end
# $Z = \sum_r Z_r$, so $\partial \mathcal L / \partial Z_r = \partial \mathcal L / \partial Z$, which everybody has. The
# two ends mirror each other:
#
# | | forward | backward |
# | --- | --- | --- |
# | $f$, `copy_to` | identity | all-reduce |
# | $g$, `reduce_from` | all-reduce | identity |
#
# They are *conjugate*: the backward of one is the forward of the other. (A copy is the matrix $[I\; I]^\top$, a sum is
# $[I\; I]$; backward multiplies by the transpose.)
#
# The two layers are a few lines each on plain arrays. Each has a backward, and $f$ and $g$ are the two places where
# `all_reduce` stands. Mind the biases. A column layer's bias belongs to its columns and is cut with them. A row
# layer's bias belongs to the sum: it must be added **once**, so after the all-reduce, by everybody alike. Added before
# the sum, on every rank, it would count $t$ times (mistake 1 of 6.12).

# %%
from minipar.comm import wire_bytes


def all_reduce(x):
    """Return the sum of all ranks' x, over chapter 3's ring."""
    return comm.all_reduce(x.copy(), algorithm="ring")


def column_forward(x, w, b):  # x (N, i) is whole; w (i, o/t) and b (o/t,) are this rank's columns
    return x @ w + b  # (N, o/t); f sends nothing


def column_backward(x, w, dy):  # dy (N, o/t) -> the gradients of x, w and b
    return all_reduce(dy @ w.T), x.T @ dy, dy.sum(axis=0)  # f: every rank has a term of x's gradient


def row_forward(x, w, b):  # x (N, i/t) and w (i/t, o) are this rank's; b (o,) is whole
    return all_reduce(x @ w) + b  # (N, o); g: every rank has a term of the result


def row_backward(x, w, dz):  # dz (N, o) is whole
    return dz @ w.T, x.T @ dz, dz.sum(axis=0)  # g sends nothing


bias_a, bias_d, dZ = random.normal(size=4 * h), random.normal(size=h), random.normal(size=(N, h))
mine = slice(rank * 4 * h // t, (rank + 1) * 4 * h // t)  # this rank's columns of A and rows of D
A_r, bias_r, D_r = A[:, mine].copy(), bias_a[mine], D[mine]

comm.traffic.reset()
y, slope = gelu_array(column_forward(X, A_r, bias_r))
z = row_forward(y, D_r, bias_d)
sent_forward = comm.traffic.bytes()
dy, dD_r, dbias_d = row_backward(y, D_r, dZ)
dXA_r = dy * slope
dX, dA_r, dbias_r = column_backward(X, A_r, dXA_r)
sent_backward = comm.traffic.bytes() - sent_forward

Y, Slope = gelu_array(X @ A + bias_a)  # one device
dXA = dZ @ D.T * Slope
for what, part, whole in (
    ("Z", z, Y @ D + bias_d),
    ("dX", dX, dXA @ A.T),
    ("dA", dA_r, (X.T @ dXA)[:, mine]),
    ("dD", dD_r, (Y.T @ dZ)[mine]),
    ("bias of A", dbias_r, dXA.sum(axis=0)[mine]),
    ("bias of D", dbias_d, dZ.sum(axis=0)),
):
    assert off(part, whole) < 1e-12, what
assert (
    sent_forward == sent_backward == wire_bytes("all_reduce", "ring", N * h, 8, t, rank) == 2 * N * h * (t - 1) // t * 8
)
say(f"MLP over {t} ranks = one device, with all gradients: dX within {off(dX, dXA @ A.T):.1e}")
say(f"each rank sent {sent_forward:,} bytes in forward, {sent_backward:,} in backward: 2 N h (t-1)/t elements each")

# %% [markdown]
# The weights' gradients need no communication at all. That is the other half of the idea: a rank's part of the
# parameters, of their gradients and of the optimizer's state is its own.
#
# In the library $f$ and $g$ are autograd Functions:

# %%
from minipar.parallel.tensor import TensorGroup, all_gather, copy_to, mappings, reduce_from, reduce_scatter

if rank == 0:
    show_source(mappings._CopyTo, mappings._ReduceFrom)

# %% [markdown]
# A `TensorGroup` is the communicator and the algorithm of its sums, `ring` or `ordered`. As Functions $f$ and $g$ can
# stand between any operations, and autograd calls their backward. minipar has four such mappings, of which the last two
# cut and join along a dim (6.9 needs them). With $n$ elements in the whole activation, an all-reduce sends
# $2n\frac{t-1}{t}$ per rank, an all-gather or reduce-scatter half of that (chapter 3):

# %%
from minipar.autograd import Tensor

group = TensorGroup(comm)
n = t * N * h
whole, part = np.ones((t, N, h)), np.ones((1, N, h))
unit = n * (t - 1) // t * 8  # bytes of an all-gather or a reduce-scatter
say("mapping           sent in forward   in backward   (bytes per rank)")
for mapping, x, forward, backward in (
    (copy_to, whole, 0, 2),
    (reduce_from, whole, 2, 0),
    (all_gather, part, 1, 1),
    (reduce_scatter, whole, 1, 1),
):
    dim = () if mapping in (copy_to, reduce_from) else (0,)
    comm.traffic.reset()
    y = mapping(Tensor(x, requires_grad=True), group, *dim)
    there = comm.traffic.bytes()
    y.backward(np.ones_like(y.data))
    back = comm.traffic.bytes() - there
    assert (there, back) == (forward * unit, backward * unit)
    say(f"{mapping.__name__:<16} {there:>16,} {back:>13,}")

# %% [markdown]
# ## 6.3 A layer of each kind
#
# `ColumnParallelLinear` begins with $f$, `RowParallelLinear` ends with $g$. With the weights of 6.2 they must give the
# bits of 6.2.

# %%
from minipar.autograd import gelu
from minipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear

if rank == 0:
    show_source(ColumnParallelLinear.forward, RowParallelLinear.forward)

up = ColumnParallelLinear(h, 4 * h, comm, name="up", dtype="float64")
down = RowParallelLinear(4 * h, h, comm, name="down", dtype="float64")
for p, value in ((up.weight, A_r), (up.bias, bias_r), (down.weight, D_r), (down.bias, bias_d)):
    p.data[...] = value
x_library = Tensor(X[None], requires_grad=True)  # (1, N, h)
z_library = down(gelu(up(x_library)))
z_library.backward(dZ[None])
assert np.array_equal(z_library.data[0], z) and np.array_equal(x_library.grad[0], dX)
assert np.array_equal(up.weight.grad, dA_r) and np.array_equal(down.weight.grad, dD_r)
assert off(up.bias.grad, dbias_r) < 1e-12 and off(down.bias.grad, dbias_d) < 1e-12
say("the library's layers give the bits of the plain functions: Z, dX, dA, dD")

# %% [markdown]
# What does the library add? A layer's weights are Parameters that know which part of the serial model they are (6.4).
# `column_linear` is $f$ and the product in one node, so that backward can send while it computes (6.11). And with
# `sequence` the two ends, `enter` and `leave`, become the mappings of sequence parallelism (6.9).
#
# ### Heads
#
# Attention is the same pattern. The columns of the query, key and value matrices are grouped in heads, and heads do not
# interact before the output projection: softmax works on each head separately. So heads play the part of gelu's
# columns. Rank $r$ computes $1/t$ of the heads, whole, and `c_proj` is a row layer.
#
# One thing needs care. GPT-2 stores $q$, $k$ and $v$ side by side in one matrix `c_attn` of $h \times 3h$. Cut straight
# into $t$ parts, two ranks would get this:

# %%
from minipar.parallel.placement import Shard

names = np.array([f"{which}{head}" for which in "qkv" for head in range(4)])  # the columns of 4 heads, one for each
for label, groups in (("cut straight", 1), ("a cut of 3 stretches", 3)):
    held = [np.concatenate([np.split(stretch, 2)[r] for stretch in np.split(names, groups)]) for r in range(2)]
    say(f"{label:<21} rank 0: {' '.join(held[0])}    rank 1: {' '.join(held[1])}")
assert [name[1] for name in held[0]] == ["0", "1"] * 3
assert [list(Shard(r, 2, dim=0, size=12, groups=3).part(names)) for r in range(2)] == [list(part) for part in held]

# %% [markdown]
# The first is useless: rank 0 has the queries of four heads and no value. In the second each of $q$, $k$, $v$ is cut
# separately, and a rank has all of its heads. In the plan this is `(1, 3)`: dim 1, in 3 groups.
#
# ## 6.4 The plan
#
# That is the whole table: the parameters of the serial model that are cut, each with the dim along which it is cut and
# the number of its groups. `Shard` is the record of one rank's part; it is kept in the parameter's *placement*, as
# `p.placement.tp`.

# %%
from minipar.parallel.tensor import PLAN, tensor_parallel

if rank == 0:
    for name, (dim, groups) in PLAN.items():
        print(f"{name:<20} dim {dim}, groups {groups}")
    show_source(Shard.part, tensor_parallel)

# %% [markdown]
# Applying it replaces serial layers by parallel ones, and leaves each rank its part of *the very values* that the
# serial model has. Initial weights are keyed by name, never by rank, so a run on 8 ranks starts where a run on 1 does.
# The model's own files (`nn/`) know nothing of ranks. What is not in the table (LayerNorm, `wpe`, the biases of row
# layers) stays whole on every rank: its placement is `Replicate`.

# %%


def same_bits(a, b):
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def is_split(p):
    """Whether tensor parallelism has cut this parameter."""
    return isinstance(p.placement.tp, Shard)


def whole_of(p, array):
    """The serial array of which `array` is this rank's part: gathered from all ranks and joined."""
    if not is_split(p):
        return array
    parts = comm.all_gather(np.ascontiguousarray(array)).reshape(t, *array.shape)
    return p.placement.tp.join(list(parts))


serial = GPT(shape, dtype="float64")
model = GPT(shape, dtype="float64")
tensor_parallel(model, comm)

theirs = dict(serial.named_parameters())
for name, p in model.named_parameters():
    data = theirs[name].data
    assert same_bits(p.data, p.placement.tp.part(data) if is_split(p) else data)
    assert same_bits(whole_of(p, p.data), data)  # joined again
psi, local = (sum(p.size for p in m.parameters()) for m in (serial, model))
replicated = sum(p.size for p in model.parameters() if not is_split(p))
say(f"{psi:,} parameters, {local:,} on each rank, of which {replicated:,} are replicated")
say("every rank holds its part of the serial model's own bits, and the parts join to the whole")

# %%
if rank == 0:
    shown = ("h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_fc", "h.0.mlp.c_proj", "wte")
    cuts = {name: p.placement.tp for name, p in model.named_parameters() if is_split(p)}
    show(
        plot_cuts(
            [
                (name.removeprefix("h.0."), *theirs[f"{name}.weight"].shape, cut.dim, cut.groups)
                for name in shown
                for cut in [cuts[f"{name}.weight"]]
            ],
            t,
        ),
        "06_cuts",
    )

# %% [markdown]
# ## 6.5 The vocabulary
#
# GPT-2's token embedding has $V = 50\,257$ rows, almost a third of its 124 million parameters, and the output head is
# the same matrix. It is cut by rows: rank $r$ holds the tokens from $r V/t$ on.
#
# **Embedding.** Each rank looks up the tokens that it holds, writes zeros for the others, and an all-reduce adds. (That
# sum is exact: all terms but one are zero.)
#
# **Head.** Logits are $x W^\top$; the rows of $W$ are the columns of $W^\top$: a column layer. Each rank gets the
# logits of its tokens.
#
# **Loss.** One could gather the logits, $N V$ values, by far the largest activation of the model. But the loss of a
# token needs only three values of its row: with $\mu = \max_v z_v$,
#
# $$\ell = \log E - (z_{\text{target}} - \mu), \qquad E = \sum_v e^{z_v - \mu}.$$
#
# Why the maximum? Without it $e^{z_v}$ overflows, in float32 for every logit above 88.7, and the loss is infinite. To
# subtract a constant $\mu$ from all logits of a row and add it again behind the logarithm changes nothing in exact
# arithmetic, because $\log\sum_v e^{z_v} = \log\big(e^\mu \sum_v e^{z_v-\mu}\big) = \mu + \log E$. With the largest
# logit as $\mu$, no term is above 1 and one of them is 1.
#
# Why must all ranks use the *same* $\mu$? Rank $r$ adds up $e^{z_v - \mu_r}$ over its own tokens. Two such sums with
# different $\mu_r$ are in different units, $e^{-\mu_r}$, and cannot be added. (One could multiply each by $e^{\mu_r -
# \mu}$ first, but that needs $\mu$ as well.) So the maximum over all ranks comes first. One token with four logits:

# %%
z4 = np.array([100, 20, 99, 5], np.float32)  # rank 0 has the first two, rank 1 the others
true = 100 + np.log(1 + np.exp(-80.0) + np.exp(-1.0) + np.exp(-95.0))  # log of the sum of exponentials, in float64
with np.errstate(over="ignore"):
    plain = np.log(np.exp(z4).sum())
    assert np.isfinite(np.exp(np.float32(88.7))) and np.isinf(np.exp(np.float32(88.8)))
one_maximum = z4.max() + np.log(np.exp(z4 - z4.max()).sum())
tops = z4.reshape(2, 2).max(axis=1)
sums = np.exp(z4.reshape(2, 2) - tops[:, None]).sum(axis=1)  # each rank's with its own maximum
two_maxima = z4.max() + np.log(sums.sum())
rescaled = z4.max() + np.log((sums * np.exp(tops - z4.max())).sum())
assert np.isinf(plain) and abs(one_maximum - true) < 1e-4 and abs(rescaled - true) < 1e-4
assert round(float(true), 3) == 100.313 and round(float(two_maxima), 3) == 100.693
say(f"log sum exp in float64       {true:.3f}")
say(f"float32, without the maximum {plain}\nwith it                      {one_maximum:.3f}")
say(f"each rank its own maximum    {two_maxima:.3f}\nthe same, sums rescaled      {rescaled:.3f}")

# %% [markdown]
# The sum without the maximum is infinite. With two different maxima it is 100.693 where 100.313 is right, and the error
# looks harmless.
#
# So the ranks need a maximum over ranks, a sum of exponentials over ranks, and the target's logit from the one rank
# that has it. These are two small all-reduces: $N$ maxima; then $2N$ sums. **Backward** sends nothing:
#
# $$\frac{\partial \ell}{\partial z_v} = \frac{\partial \log E}{\partial z_v} - [v = \text{target}] =
# \frac{e^{z_v - \mu}}{E} - [v = \text{target}],$$
#
# because $\mu$ cancels in $\ell$. A rank knows $\mu$ and $E$ of each token since forward. In one cell, on plain arrays;
# here the vocabulary is cut as evenly as it can be:


# %%
def split_loss(logits, targets, first):
    """Cross entropy of this rank's logits (N, V/t), whose first token is `first`: (sum over N, gradient)."""
    row = np.arange(len(logits))
    top = comm.all_reduce(logits.max(axis=1), op="max", algorithm="ring")  # (N,)
    exponentials = np.exp(logits - top[:, None])  # (N, V/t)
    own = (targets >= first) & (targets < first + logits.shape[1])
    column = np.where(own, targets - first, 0)
    sums = np.stack([exponentials.sum(axis=1), np.where(own, logits[row, column] - top, 0)])  # (2, N)
    sums = comm.all_reduce(sums, algorithm="ring")
    gradient = exponentials / sums[0][:, None]
    gradient[row, column] -= own  # softmax - onehot
    return (np.log(sums[0]) - sums[1]).sum(), gradient


z_whole, goal = random.normal(0, 5, (N, V)), random.integers(0, V, N)
words = np.array_split(np.arange(V), t)[rank]
comm.traffic.reset()
loss, gradient = split_loss(z_whole[:, words], goal, words[0])
assert comm.traffic.bytes() == sum(wire_bytes("all_reduce", "ring", k * N, 8, t, rank) for k in (1, 2))

total = np.exp(z_whole).sum(axis=1, keepdims=True)  # one device; logits below 25 do not overflow in float64
one_loss = (np.log(total[:, 0]) - z_whole[np.arange(N), goal]).sum()
one_gradient = np.exp(z_whole) / total - np.eye(V)[goal]
assert abs(loss / one_loss - 1) < 1e-13 and off(gradient, one_gradient[:, words]) < 1e-13
say(f"split loss = the whole one, its gradient within {off(gradient, one_gradient[:, words]):.1e}")
say(f"rank 0 sent {comm.traffic.bytes():,} bytes: N maxima and 2 N sums, and nothing in backward")

# %% [markdown]
# The library's embedding, and the forward of its loss:

# %%
from minipar.parallel.tensor import VocabParallelEmbedding, layers

if rank == 0:
    show_source(VocabParallelEmbedding.forward, layers._VocabParallelCrossEntropy.forward)

# %% [markdown]
# What does the library's version add? Targets that do not count (`IGNORE_INDEX`) have the loss 0. The exponentials
# overwrite the logits' copy, so that only one array of $N \times V/t$ is kept for backward. And every rank has as many
# rows: as $V = 257$ is not divisible, the matrix gets rows of zeros up to the next multiple, and their logits are set
# to $-\infty$, so that their $e^z$ is 0 in every softmax. The loss does not change, and no gradient reaches them. On
# the library's logits the plain function gives the library's bits, and gathering the logits would send about $V/6$
# times as many bytes.

# %%
from minipar.autograd import cross_entropy_sum

inputs, targets = random.integers(0, V, (2, B, T))

logits = model(inputs)  # (B, T, V/t)
comm.traffic.reset()
loss = model.criterion(logits, targets)
small = comm.traffic.bytes()
assert small == sum(wire_bytes("all_reduce", "ring", k * N, 8, t, rank) for k in (1, 2))
local = logits.data.reshape(N, -1)
assert split_loss(local, targets.reshape(-1), rank * local.shape[1])[0] == loss.item()

comm.traffic.reset()
gathered = np.concatenate(list(comm.all_gather(logits.data, algorithm="ring").reshape(t, B, T, -1)), axis=-1)
large = comm.traffic.bytes()
one_loss = cross_entropy_sum(Tensor(gathered[..., :V].copy()), targets)
assert off(loss.data, one_loss.data) < 1e-14
assert np.isneginf(gathered[..., V:]).all() and np.isfinite(gathered[..., :V]).all()
say(f"rows of wte: {V}, padded to {gathered.shape[-1]}; the {gathered.shape[-1] - V} new logits are -inf")
say(f"the loss, with the logits gathered or not, within {off(loss.data, one_loss.data):.1e}")
say(f"sent by rank 0 for the loss: {small:,} bytes; gathering the logits would take {large:,}")
assert large == wire_bytes("all_gather", "ring", gathered.size, 8, t, rank)

# %% [markdown]
# ## 6.6 The proof
#
# One forward and backward over $t$ ranks, and the same on one device. Every split gradient is gathered and every
# parameter's gradient compared. We do it without dropout first, and keep the option for later.

# %%
from contextlib import nullcontext

from minipar.nn import DropoutKeys, dropping
from minipar.train.verify import relative_difference

KEYS = DropoutKeys(seed=0, step=0, samples=range(B))


def step(parallel=True, sequence=False, dropout=0.0, reduction="ordered"):
    """Loss and whole gradients by name, from a fresh model; bytes sent in forward, backward and after."""
    model = GPT(shape, dtype="float64", dropout=dropout)
    tensor = tensor_parallel(model, comm, reduction, sequence) if parallel else None
    comm.traffic.reset()
    with dropping(KEYS) if dropout else nullcontext():
        loss = model.loss_sum(inputs, targets)
    loss.backward(np.full_like(loss.data, 1 / N))
    traffic = {op: counted["bytes"] for op, counted in comm.traffic.as_dict().get("world", {}).items()}
    for p in model.parameters():
        p.fold_tied_gradients()  # the tied head's gradient joins that of wte
    if tensor is None:
        return loss.item(), {name: p.grad for name, p in model.named_parameters()}, traffic
    tensor.sum_partial(model.parameters())  # of sequence parallelism: 5.9
    return loss.item(), {name: whole_of(p, p.grad) for name, p in model.named_parameters()}, traffic


def worst(gradients, reference):
    """(largest relative difference, of which parameter)"""
    return max((relative_difference(gradients[name], reference[name]), name) for name in reference)


one_loss, one, _ = step(parallel=False)
many_loss, many, traffic = step()
assert abs(many_loss / one_loss - 1) < 1e-14
difference, where = worst(many, one)
assert difference < 1e-12
equal = [name for name in one if same_bits(many[name], one[name])]
say(f"loss: {many_loss!r} on {t} ranks, {one_loss!r} on one")
say(f"{len(one)} gradients equal within {difference:.1e} (worst: {where}); {len(equal)} of them bit for bit")

# %% [markdown]
# ### Why not bit for bit?
#
# Data parallelism could promise the bits of one device (chapter 4). Here it cannot. One device computes an element of
# $YD$ in one go, as $((y_1 d_1 + y_2 d_2) + y_3 d_3) + \dots$ over all $4h$ terms. With the terms split over ranks each
# sums its own, then the ranks' sums are added: $(a+b)+(c+d)$ against $((a+b)+c)+d$. One device could be made to sum in
# blocks too, but it would then no longer be the plain matrix product that everybody calls.
#
# Where does it begin? Walk through the first layer, join what is cut, and compare bits with one device:

# %%
from minipar.autograd import causal_attention

model = GPT(shape, dtype="float64")
tensor_parallel(model, comm, "ordered")


def joined(x, groups):
    """Columns of all ranks: (B, T, width/t) -> (B, T, width)."""
    parts = comm.all_gather(np.ascontiguousarray(x)).reshape(t, *x.shape)
    return Shard(rank, t, dim=2, size=x.shape[2] * t, groups=groups).join(list(parts))


def walk(model, join):
    """(what, its values) through the first attention."""
    attention = model.h[0].attn
    x = model.embed(inputs)
    yield "embedding, summed over the ranks", x.data
    x = model.h[0].ln_1(x)
    yield "ln_1", x.data
    x = attention.c_attn(x)
    yield "c_attn: columns", join(x.data, 3)
    x = causal_attention(x, attention.heads)
    yield "attention: heads", join(x.data, 1)
    x = attention.c_proj(x)
    yield "c_proj: rows, summed over the ranks", x.data


seen = {}
for (what, parallel), (_, alone) in zip(walk(model, joined), walk(serial, lambda x, groups: x), strict=True):
    seen[what] = parallel
    unequal = np.mean(parallel != alone)
    say(f"{what:<37} {unequal:>4.0%} of the values differ, by at most {relative_difference(parallel, alone):.1e}")
    assert relative_difference(parallel, alone) < 1e-13
assert same_bits(seen["embedding, summed over the ranks"], serial.embed(inputs).data)

# %% [markdown]
# The embedding has the same bits, and so has ln_1. Columns and heads *may* have them: each element is the same sum over
# $h$, but the library's product of a narrower matrix may group it differently. The row layer splits the sum itself. Is
# that the whole cause? Then one device that adds the same blocks in the same order must get the ranks' exact bits:

# %%
y, c_proj = seen["attention: heads"], serial.h[0].attn.c_proj
predicted = None
for r in range(t):
    block = slice(r * h // t, (r + 1) * h // t)
    product = np.ascontiguousarray(y[..., block]).reshape(N, -1) @ c_proj.weight.data[block].copy()
    predicted = product if predicted is None else predicted + product
predicted = predicted.reshape(B, T, h) + c_proj.bias.data
assert same_bits(predicted, seen["c_proj: rows, summed over the ranks"])
say(f"c_proj over {t} ranks = one device that adds {t} blocks in rank order, bit for bit")

# %% [markdown]
# So the difference is the order of additions and nothing else. The bound that `--verify` uses is 1e-12 relative after
# one training step in float64, 1e-10 after twenty (`minipar.train.verify.bound`).
#
# ## 6.7 The bytes
#
# Per layer: an all-reduce of $Nh$ elements after attention and one after the MLP in forward, and one before each in
# backward. Four times $2Nh\frac{t-1}{t}$:
#
# $$8\,B\,T\,h\,\frac{t-1}{t} \text{ elements per layer, rank and microbatch,}$$
#
# and it does not fall with $t$. The embedding adds one all-reduce (forward), the head one (backward), the loss its two
# small ones.

# %%
layer = 4 * wire_bytes("all_reduce", "ordered", N * h, 8, t, rank)
ends = 2 * wire_bytes("all_reduce", "ordered", N * h, 8, t, rank)
losses = sum(wire_bytes("all_reduce", "ordered", k * N, 8, t, rank) for k in (1, 2))
assert layer * t == 8 * N * h * (t - 1) * 8
assert sum(traffic.values()) == L * layer + ends + losses
say(f"a layer: 8 B T h (t-1)/t = {layer // 8:,} elements = {layer:,} bytes")
say(f"the step: {sum(traffic.values()):,} bytes counted = {L} layers + embedding and head {ends:,} + loss {losses:,}")

# %% [markdown]
# Compare data parallelism over $d$ ranks: $2\Psi\frac{d-1}{d}$ elements per *step*, whatever the batch. A layer has
# $12h^2$ parameters, so there it is $24h^2$ per layer, here $8BTh$ per layer and *microbatch*. Tensor
# parallelism sends more as soon as a rank processes more than $3h$ tokens, and it does so within the layer, where
# everybody waits.
#
# ## 6.8 Dropout
#
# Dropout multiplies by a random mask. Two kinds of place: after a row layer's sum the activation is replicated, so all
# ranks must draw the *same* mask, else they would go on with different values. Between column and row layer (on the
# attention probabilities) each rank has other heads and must draw *different* masks. Megatron keeps two random states
# per rank for this. minipar's masks are keyed by layer name, step and sample, never by rank; a rank with a part takes
# its part of the one mask, its *mask slice*:

# %%
from minipar.nn import Dropout, MaskSlice

if rank == 0:
    show_source(Dropout.keep)

every, own = Dropout("h.0.attn.attn_dropout", 0.3), Dropout("h.0.attn.attn_dropout", 0.3)
own.mask_slice = MaskSlice(dim=1, index=rank, count=t)
with dropping(KEYS):
    whole, part = every.keep((B, HEADS, T, T)), own.keep((B, HEADS // t, T, T))
assert same_bits(part, np.split(whole, t, axis=1)[rank].copy())

one_loss, one, _ = step(parallel=False, dropout=0.3)
many_loss, many, _ = step(dropout=0.3)
assert worst(many, one)[0] < 1e-12
say(f"with dropout 0.3: loss {many_loss:.6f} on {t} ranks, {one_loss:.6f} on one")
say(f"gradients within {worst(many, one)[0]:.1e}")

# %% [markdown]
# The cost: each rank draws the whole mask and keeps its part. Random numbers are cheap enough for us.
#
# ## 6.9 Sequence parallelism
#
# What is not divided yet? LayerNorm, dropout and the residual stream: all ranks do the same work on the same $N \times
# h$ values, and all keep the same inputs for backward. They work on each token separately, so they can be divided
# along the **sequence** (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between the pairs, rank $r$ has
# $T/t$ tokens with all of their $h$ elements; inside a pair all tokens with $1/t$ of the columns.
#
# The borders are chapter 3's identity, *all-reduce = reduce-scatter + all-gather*. Where a row layer all-reduced, it
# now reduce-scatters: the sum, and of it the own tokens. Where a column layer copied, it now all-gathers. Backward
# mirrors it. So a layer has four all-gathers and four reduce-scatters in the place of four all-reduces: **the same
# bytes**. The MLP of 6.2 once more on plain arrays, where each rank begins and ends with its own $N/t$ rows:


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
dz = gather(dZ[own])
dx_own = sum_part(dz @ D_r.T * slope @ A_r.T)
assert comm.traffic.bytes() == sent_forward + sent_backward  # of 5.2
assert off(z_own, z[own]) < 1e-12 and off(dx_own, dX[own]) < 1e-12
dbias_own = dZ[own].sum(axis=0)  # the bias's gradient covers this rank's tokens only
assert off(all_reduce(dbias_own), dbias_d) < 1e-12
say(f"each rank's {N // t} of {N} tokens as in 5.2, with the same {sent_forward + sent_backward:,} bytes")

# %% [markdown]
# The library's mappings, and the two functions that choose between them. They add the dim to cut along and autograd's
# backward; the rest of the layers does not change.

# %%
if rank == 0:
    show_source(mappings._AllGather, mappings._ReduceScatter, layers.enter, layers.leave)

one_loss, one, _ = step(parallel=False, dropout=0.3)
many_loss, many, traffic_sequence = step(sequence=True, dropout=0.3)
assert abs(many_loss / one_loss - 1) < 1e-14 and worst(many, one)[0] < 1e-12
assert sum(traffic_sequence.values()) == sum(traffic.values())
for op in ("all_gather", "reduce_scatter"):
    assert traffic_sequence.get(op, 0) == (4 * L + 2) * wire_bytes("reduce_scatter", "ordered", N * h, 8, t, rank)
say(f"sequence parallel = one device, dropout included: gradients within {worst(many, one)[0]:.1e}")
say(f"bytes: {sum(traffic_sequence.values()):,} as before, now {traffic_sequence}")

# %%
if rank == 0:
    half = (4 * L + 2) * wire_bytes("reduce_scatter", "ordered", N * h, 8, t, rank)
    bars = [
        {"op": "tensor: all-reduce", "bytes": traffic.get("all_reduce", 0), "expected": L * layer + ends + losses},
        *(
            {"op": f"+ sequence: {op.replace('_', '-')}", "bytes": traffic_sequence.get(op, 0), "expected": expected}
            for op, expected in (("all_gather", half), ("reduce_scatter", half), ("all_reduce", losses))
        ),
    ]
    show(plot_bytes(bars), "06_bytes")

# %% [markdown]
# ### Gradients of the replicated parameters
#
# A LayerNorm's gain is the same on every rank, but now each rank applies it to its own tokens only. Its gradient on a
# rank covers these tokens; the whole is the **sum over tp**. That holds for both LayerNorms, the row layers' biases,
# `wpe` and `ln_f`: their placement is `Partial`. Without sequence parallelism each rank has seen all tokens, and there
# is nothing to sum (summing would count $t$ times).

# %%
from minipar.parallel.placement import Partial
from minipar.parallel.tensor import TensorParallel

if rank == 0:
    show_source(TensorParallel.sum_partial)

model = GPT(shape, dtype="float64")
tensor_parallel(model, comm, "ordered", sequence=True)
partial = [p for p in model.parameters() if isinstance(p.placement.tp, Partial)]
per_layer = sum(p.size for p in model.h[0].parameters() if p in set(partial))
assert per_layer == 6 * h
say(f"{len(partial)} parameters are replicated, 6h = {per_layer} elements in a layer: an all-reduce per step,")
say("not per microbatch, and small beside 8 B T h")

# %% [markdown]
# ### Fewer activations
#
# What does a layer keep for backward? Count arrays of $sbh$ elements ($s$ is $T$, $b$ is $B$, $a$ the heads; the
# paper's letters). With elements of $w$ bytes, and masks of one byte where dropout is on ($\delta = 1$):
#
# | kept | bytes | divided by tp | and by sequence |
# | --- | --- | --- | --- |
# | two LayerNorms: normalized input | $2w\,sbh$ | no | yes |
# | inputs of the two column layers | $2w\,sbh$ | no | no |
# | two dropout masks | $2\delta\,sbh$ | no | yes |
# | $q,k,v$; attention's output | $4w\,sbh$ | yes | yes |
# | MLP: gelu's input, its tanh, its output | $12w\,sbh$ | yes | yes |
# | attention probabilities, their mask | $(w + \delta)\,as^2b$ | yes | yes |
#
# and $w$ bytes for each token and LayerNorm, the reciprocal deviation. Now measure: the ledger of chapter 5 counts what
# is really alive after forward. A model of two layers less a model of one layer is one layer.

# %%
import json

from minipar.comm import run_local
from minipar.memory import MemoryLedger


def kept(comm, layers, sequence, dropout):
    """Bytes of activations alive after forward."""
    config = GPTConfig(64, 16, 64, layers, 8)
    model = GPT(config, dropout=dropout)
    tensor_parallel(model, comm, "ring", sequence)
    ledger = MemoryLedger()
    ids = np.zeros((2, 16), int)
    with ledger.recording(), dropping(DropoutKeys(0, 0, range(2))):
        loss = model.loss_sum(ids, ids)  # keeps the graph alive while we look
        held = ledger.held["activations"]
    assert loss.size == 1
    return held


def formula(t, sequence, w, delta, s, b, h, a):
    """Bytes that a layer of minipar keeps: (what only sequence parallelism divides, column inputs, what tp divides)."""
    around = (2 * w + 2 * delta) * s * b * h + 2 * s * b * w
    inside = 16 * w * s * b * h + (w + delta) * a * s * s * b
    return around / (t if sequence else 1), 2 * w * s * b * h, inside / t


def deal(jobs, work):
    """work(job) for each job, dealt out to the ranks like cards; everybody gets all results, in order."""
    mine = json.dumps([work(*job) for job in jobs[rank::t]]).encode()
    hands = [json.loads(data) for data in comm.all_gather_bytes(mine)]
    return [hands[i % t][i // t] for i in range(len(jobs))]


def layer_alone(ranks, sequence, dropout):
    one, two = (run_local(ranks, kept, layers, sequence, dropout)[0] for layers in (1, 2))
    return two - one


jobs = [(1, False, 0.0), *((ranks, sequence, 0.1) for ranks in (1, 2, 4, 8) for sequence in (False, True)[:ranks])]
for (ranks, sequence, p), measured in zip(jobs, deal(jobs, layer_alone), strict=True):
    assert measured == sum(formula(ranks, sequence, 4, int(p > 0), s=16, b=2, h=64, a=8))  # float32: w = 4
    how = f"{'tensor + sequence' if sequence else 'tensor'}, dropout {p}"
    say(f"t = {ranks}, {how:<30} {measured:>8,} bytes kept per layer = the formula")

# %% [markdown]
# The formula is exact, so we may trust it where we cannot run: GPT-3's layer ($s = 2048$, $h = 12\,288$, $a = 96$) in
# 16-bit values. The paper (Table 2) has, in bytes per $sbh$,
#
# $$34 + 5\tfrac{as}{h} \;\text{ alone}, \qquad 10 + \tfrac{24}{t} + 5\tfrac{as}{ht} \;\text{ with tensor}, \qquad
# \tfrac{34}{t} + 5\tfrac{as}{ht} \;\text{ with sequence parallelism too}.$$

# %%
s, b, H, a = 2048, 1, 12288, 96
bars, paper = {}, {}
for ranks, sequence in ((1, False), (2, False), (2, True), (8, False), (8, True)):
    name = f"t = {ranks}{', tensor' if ranks > 1 else ''}{' + sequence' if sequence else ''}"
    around, into, inside = (x / (s * b * H) for x in formula(ranks, sequence, 2, 1, s, b, H, a))
    bars[name] = {"LayerNorm, masks": around, "inputs of column layers": into, "inside the pairs": inside}
    scores = 5 * a * s / (H * ranks)
    paper[name] = scores + (34 / ranks if sequence else 10 + 24 / ranks)
    say(f"{name:<26} minipar {around + into + inside:>6.2f}   the paper {paper[name]:>6.2f}   bytes per s b h")
if rank == 0:
    show(plot_activations(bars, paper), "06_activations")

# %% [markdown]
# The shape is the paper's; three constants are not, and each is a choice:
#
# - **$w$.** NumPy has no bfloat16: we run with $w = 4$ or $8$, and masks stay one byte. Above we put $w = 2$.
#
# - **Inside.** We keep gelu's tanh ($4w$, that is $32/t$ for $24/t$) to save computing it again. Of the attention
# probabilities we keep one copy and the mask, and multiply again in backward: $3as/h$ for the paper's $5as/h$.
#
# - **The inputs of the column layers.** Sequence parallelism cannot divide them here: the gathered $N \times h$ input
# is kept whole, because the weight's gradient needs it. Megatron keeps only the own tokens and gathers a **second time
# in backward**, hidden behind a product. So its bytes on the wire are higher than ours by $2Nh\frac{t-1}{t}$ per layer,
# and its memory falls as $34/t$ where ours stops at $2w$, the middle part of the bars. Recomputing each layer
# (`--recompute full`, chapter 1) keeps one input of $w\,sbh$ per layer, and sends forward's bytes twice.
#
# ## 6.10 With data parallelism and ZeRO
#
# The mesh (chapter 8) has tp as its fastest axis: the ranks of one tensor group are neighbours, on one machine. Ranks
# with the same part of the model form a dp group, and data parallelism or ZeRO runs over it, unchanged: it sees a model
# with smaller parameters. One thing must know of both, the gradient norm for clipping. It is a loop over the
# parameters' placements: the squares of split parameters are summed over tp; replicated ones count once.


# %%
def squares(*arrays):
    return sum(float((array * array).sum()) for array in arrays)


norm = np.sqrt(all_reduce(np.array([squares(dA_r, dbias_r, dD_r)]))[0] + squares(dbias_d))  # of the MLP of 5.2
one_norm = np.sqrt(squares(X.T @ dXA, dXA.sum(axis=0), Y.T @ dZ, dZ.sum(axis=0)))
assert abs(norm / one_norm - 1) < 1e-13
say(f"the norm of 5.2's gradients: {norm:.6f} on {t} ranks, {one_norm:.6f} on one device")

# %% [markdown]
# The library's loop does the same for each parameter's placement, and knows dp and pp as well:

# %%
from minipar.parallel import grad_norm

if rank == 0:
    show_source(grad_norm.clip_grad_norm, grad_norm._squared_norm)

# %% [markdown]
# `verify` trains the same steps on one device and compares. About `--eps 1e-6`: the bias of the keys has the gradient
# 0, because softmax does not see a constant added to a row. In floating point it is noise of about $10^{-19}$. AdamW
# divides each gradient by its own size plus eps, so this noise is enlarged by 1/eps, for the default $10^{8}$ times. It
# hurts nothing, but it would be the largest difference to one device, and we want to see the others.

# %%
from minipar.comm import DeviceMesh
from minipar.train.config import parse, resolve
from minipar.train.data import load_tokens
from minipar.train.trainer import Trainer
from minipar.train.verify import verify

tokens = load_tokens(None, vocab_size=V, seq_len=T)
TP = max((k for k in range(2, t) if t % k == 0), default=t)  # the largest divisor that leaves something for dp
FLAGS = f"--layers {L} --hidden {h} --heads {HEADS} --seq-len {T} --vocab-size {V} --dtype float64 --lr 3e-3".split()
FLAGS += "--clip-grad 0.5 --eps 1e-6".split()


def make_trainer(tp, *flags, steps):
    batch = str(4 * (t // tp))
    config = resolve(parse([*FLAGS, "--tp", str(tp), "--global-batch", batch, "--steps", str(steps), *flags], rank), t)
    return Trainer(config, DeviceMesh(comm, dp=t // tp, tp=tp), tokens)


say(f"{t} ranks: tp {TP} x dp {t // TP}")
for flags in ([], ["--sequence-parallel", "--zero-stage", "1"], ["--sequence-parallel", "--zero-stage", "3"]):
    flags = [flag for flag in flags if TP > 1 or flag != "--sequence-parallel"] + ["--dropout", "0.1"]
    trainer = make_trainer(TP, *flags, steps=3)
    results = list(trainer.train())
    verdict = verify(trainer, results, tokens)
    assert verdict.passed, verdict.line
    say(f"{' '.join(flags)}\n  {verdict.line}")

# %% [markdown]
# (A prime number of ranks leaves nothing for dp; then tp takes them all.) The losses, the gradient norms and every
# parameter agree, dropout, clipping, ZeRO and sequence parallelism included.
#
# ## 6.11 What it costs: the link
#
# An all-reduce of $M$ bytes over a ring takes $2(t-1)(\alpha + \beta M/t)$. The computation is $C/t$. Forward has
# nothing to hide the communication behind: the sum of a row layer is needed, all of it, by the LayerNorm that comes
# next. (One could cut the batch in two and compute one half while the other half's sum is under way: twice the
# messages, smaller products.) So per layer the time is about
#
# $$\frac{C}{t} + 4 \cdot 2(t-1)\left(\alpha + \beta\frac{M}{t}\right), \qquad M = 2\,BTh \text{ bytes in 16 bit.}$$
#
# The first term falls as $1/t$. The second tends to $8\beta M$ plus a latency that grows. Which wins depends on the
# link.
#
# ### The program on a clock
#
# Before we trust a formula, we compare it with the *real program* on the `model` clock of chapter 4, where products
# cost operations / speed and messages $\alpha + \beta n$ (`tensor_clock.py` next to this chapter charges the products).
# LayerNorm, gelu and the optimizer cost nothing here. As our NumPy model is small, so are the clock's speeds.

# %%
from chapters.support.tensor_clock import simulate

SMALL = GPTConfig(vocab_size=480, n_positions=32, n_embd=96, n_layer=2, n_head=24)
SMALL_SPEED, SMALL_LINK = 1.5e9, (5e-6, 25e6)  # operations/s; seconds per message and bytes/s

# %% [markdown]
# ### Hiding backward's half
#
# In backward there is something to hide behind. At a column layer the gradient of the input must be summed over ranks,
# and everything further down waits for it. But the gradient of the *weight*, $X^\top \mathrm{d}Y_r$, needs nothing
# from others. So: start the all-reduce of $\mathrm{d}X$, compute the weight's gradient, then wait. On plain arrays
# these are three lines. The library leaves both to a `LazyGradient`, and autograd computes the weight's gradient before
# it waits for the input's.

# %%
work = comm.all_reduce(dXA_r @ A_r.T, algorithm="ring", async_op=True)
dA_meanwhile = X.T @ dXA_r
assert np.array_equal(work.wait(), dX) and np.array_equal(dA_meanwhile, dA_r)  # the bits of 5.2
if rank == 0:
    show_source(layers._ColumnLinear.backward)

# %% [markdown]
# That is why `column_linear` is one node: as a product after a copy, $f$'s backward would begin when the product's,
# weight gradient included, has ended. The picture
# shows one layer over two ranks each way. (The embedding begins the step, head and loss are in the middle.)

# %%
if rank == 0:
    one_layer = GPTConfig(vocab_size=48, n_positions=32, n_embd=96, n_layer=1, n_head=24)
    events, durations, begin = [], [], 0.0
    for overlap in (False, True):
        results = simulate(one_layer, 2, SMALL_SPEED, SMALL_LINK, overlap=overlap)
        durations.append(results[0][0])
        for _, mine in results:
            events += [event | ({"ts": event["ts"] + begin} if "ts" in event else {}) for event in mine]
        begin += 1.03e6 * durations[-1]
    slices = [event for event in events if event["ph"] in "MX"]
    figure = plot_timeline(parse_trace({"traceEvents": slices, "otherData": {"clock": "model"}}))
    figure.axes[0].set_title("one layer, forward and backward; left: plain, right: overlapped", loc="left", fontsize=10)
    figure.axes[0].axvline(1.015e3 * durations[0], color="black", linewidth=1.5)
    show(figure, "06_timeline")
    assert [round(seconds * 1e3, 1) for seconds in durations] == [10.8, 9.7]
    say(f"plain {durations[0] * 1e3:.2f} ms, overlapped {durations[1] * 1e3:.2f} ms")

# %% [markdown]
# On the left backward's sums (light blue) stand alone, as in forward. On the right they lie under the grey products of
# the weight gradients: 9.7 ms instead of 10.8. Of each all-reduce as much is hidden as the product takes, at most all
# of it. The rest is exposed:
#
# $$\text{exposed} = \max\left(0,\; 2(t-1)\left(\alpha + \beta\tfrac{M}{t}\right) - \frac{2N h\, h_{\text{out}}}{t\, S}
# \right), \qquad h_{\text{out}} = 3h, 4h, V,$$
#
# with $S$ the operations per second. Under sequence parallelism the reduce-scatter of a column layer's backward is
# hidden like this; the all-gather of a row layer's backward is not. As a function, compared with the clock:


# %%
def predicted(config, t, speed, link, w, sequence=False, overlap=True):
    """Seconds of one sample's step, of its communication (hidden or not) and of its computation; w bytes per value."""
    alpha, bandwidth = link
    tokens, hidden, count = config.n_positions, config.n_embd, config.n_layer
    reduce, *loss = (2 * (t - 1) * (alpha + w * n / t / bandwidth) for n in (tokens * hidden, tokens, 2 * tokens))
    hideable = reduce / 2 if sequence else reduce
    hidden_time = 0.0
    for out, products in ((3 * hidden, count), (4 * hidden, count), (config.vocab_size, 1)):
        hidden_time += products * min(hideable, 2 * tokens * hidden * out / t / speed) * overlap
    computation = 3 * config.forward_flops(1, tokens) / speed / t
    communication = (4 * count + 2) * reduce + sum(loss)
    return computation + communication - hidden_time, communication, computation


jobs = [(q, sequence, overlap) for q in (1, 2, 4, 8) for sequence in (False, True)[:q] for overlap in (False, True)]
for job, measured in zip(
    jobs, deal(jobs, lambda *how: simulate(SMALL, how[0], SMALL_SPEED, SMALL_LINK, *how[1:])[0][0]), strict=True
):
    q, *how = job
    assert abs(measured / predicted(SMALL, q, SMALL_SPEED, SMALL_LINK, 4, *how)[0] - 1) < 1e-9, job
say(f"{len(jobs)} steps of the program on the clock = the formula")

# %% [markdown]
# ### A large model on three links
#
# So the formula may be used for sizes that we cannot run: $h = 6144$, $T = 2048$, about the width of a
# 20-billion-parameter GPT; two layers are enough, more would add the same again.
#
# **Speed**: $4\cdot10^{14}$ operations/s, an *assumption*: 40 % of the 989 TFLOP/s that NVIDIA's data sheet gives for
# an H100 (dense bfloat16). **Bandwidth**, per direction: the same sheet gives NVLink 4 900 GB/s in both directions
# together, so 450; the nominal rates of NDR InfiniBand, 400 Gb/s = 50 GB/s, and of 100-gigabit Ethernet, 12.5 GB/s.
# **Latency**: 3, 5 and 30 microseconds per message are *assumptions* about their order of magnitude.

# %%
SPEED = 400e12
LARGE = GPTConfig(vocab_size=30720, n_positions=2048, n_embd=6144, n_layer=2, n_head=24)
LINKS = {
    "NVLink 4, 450 GB/s": (3e-6, 450e9),
    "InfiniBand NDR, 50 GB/s": (5e-6, 50e9),
    "Ethernet 100 Gb/s, 12.5 GB/s": (30e-6, 12.5e9),
}
NVLINK, INFINIBAND, ETHERNET = LINKS


def large(t, link, **how):
    """`predicted` of the large model in 16 bit."""
    return predicted(LARGE, t, SPEED, LINKS[link], 2, **how)


say("InfiniBand            plain     overlapped    hidden")
for sequence in (False, True):
    for q in (2, 4, 8):
        plain, overlapped = (large(q, INFINIBAND, sequence=sequence, overlap=o)[0] for o in (False, True))
        hidden = (plain - overlapped) / large(q, INFINIBAND)[1]
        how = "+ sequence" if sequence else ""
        say(f"t = {q} {how:<11} {plain * 1e3:>8.2f} ms {overlapped * 1e3:>8.2f} ms    {hidden:>4.0%} of communication")
        assert overlapped < plain
        assert sequence or round(100 * hidden) == {2: 50, 4: 23, 8: 10}[q]

# %% [markdown]
# Half of the all-reduces are in backward at a column layer. With two ranks the weight gradients last longer than they
# do, and all of that half is hidden: 50 % of communication. With more ranks the products become shorter and the
# all-reduces do not; eight ranks hide 10 %. (Sequence
# parallelism can hide only the reduce-scatters, which are half of those bytes. At $t = 8$ the product is shorter than
# the reduce-scatter and than the all-reduce, so both ways hide the same time.)
#
# ### The crossover
#
# Now time against $t$ for the three links.


# %%
def crossing(link):
    """The t at which communication (hidden or not) takes as long as computation."""
    return next(q for q in np.geomspace(1, 64, 400) if large(q, link)[1] > large(q, link)[2])


MEASURED = (1, 2, 4, 8)
say(f"{'':<30}" + "".join(f"t = {q:<7}" for q in MEASURED) + "crossover")
for link in LINKS:
    row = "".join(f"{large(q, link)[0] * 1e3:>6.2f} ms  " for q in MEASURED)
    say(f"{link:<30}{row}t = {crossing(link):.1f}")
    _, communication, computation = large(8, link)
    say(f"{'':<30}at t = 8: computation {computation * 1e3:.2f} ms, communication {communication * 1e3:.2f} ms")
alone = large(1, NVLINK)[0]
assert large(8, ETHERNET)[0] > alone > 4 * large(8, NVLINK)[0]
assert [round(crossing(link), 1) for link in LINKS] == [16.3, 4.3, 1.8]
assert [round(large(8, link)[0] * 1e3, 1) for link in LINKS] == [5.2, 13.1, 43.8] and round(alone * 1e3, 1) == 35.2
if rank == 0:
    curves = {
        link: {
            "points": {q: large(q, link)[0] for q in MEASURED},
            "curve": {q: large(q, link)[0] for q in range(1, 65)},
            "crossing": crossing(link),
        }
        for link in LINKS
    }
    show(plot_links(curves, {q: large(q, NVLINK)[2] for q in range(1, 65)}), "06_links")

# %% [markdown]
# One device takes 35.2 ms. On NVLink eight take 5.2 ms, and communication is as long as computation at $t = 16.3$ only.
# On InfiniBand they take 13.1 ms, and little is gained past the crossover at 4.3. On Ethernet eight devices together
# are *slower than one*, 43.8 ms: the crossover is at 1.8. Hence the rule of Narayanan et al. (2021, arXiv 2104.04473,
# takeaway 1): tensor parallelism up to the number of GPUs in a server, pipelines and data parallelism between servers.
#
# The ratio of communication to computation is, without latency, $\approx \frac{16\,(t-1)\,S\beta}{72\,h}$: a layer
# sends $8Nh\frac{t-1}{t}$ elements of 2 bytes, and has $3 \cdot 2N \cdot 12h^2/t$ operations. The batch cancels, the
# hidden size helps. A wider model carries a larger tp.
#
# ## 6.12 Exercises: break it, and see what notices
#
# Five mistakes, with tp over all ranks. Instruments:
#
# - **loss**: is the last loss off by more than 5 %?
#
# - **ranks**: do all ranks hold the same replicated parameters?
#
# - **bytes**: does the counter agree with the formula?
#
# - **step 1**: one device after one step: parameters, loss, gradient norm.
#
# - **step 3**: the same after three.
#
# Which catches which?
#
# 1. **Bias on every rank**: a row layer adds its bias before the sum.
#
# 2. **A forgotten all-reduce**: a column layer's backward does not sum the input's gradient ($f$ is missing).
#
# 3. **The norm** counts replicated parameters $t$ times.
#
# 4. **A softmax with each rank's own maximum**, not the maximum of all.
#
# 5. **Sequence parallelism without the sum** of replicated parameters' gradients.


# %%
from unittest.mock import patch

from minipar.autograd import linear
from minipar.nn import clip_grad_norm, squared_norm


class BiasEverywhere(RowParallelLinear):
    """Mistake 1."""

    def forward(self, x):
        return layers.leave(linear(x, self.weight, self.bias), self.group, self.sequence)


def no_f(x, weight, bias, group, sequence, transposed=False):
    """Mistake 2: a column layer without f."""
    return linear(x, weight, bias, transposed)


def counts_again(parameters, max_norm, units, dp, tp, pp):
    """Mistake 3: the squares of replicated parameters are summed over tp, too."""
    squares = np.array([squared_norm([p.grad for p in parameters])])
    tp.all_reduce(squares, algorithm="ordered")
    return clip_grad_norm(parameters, max_norm, norm=float(np.sqrt(squares[0])))


class OwnMaximum:
    """Mistake 4: a communicator that leaves out the maximum over ranks."""

    def __init__(self, comm):
        self.comm = comm

    def all_reduce(self, x, op="sum", **options):
        return x if op == "max" else self.comm.all_reduce(x, **options)


def own_maximum(logits, targets, group):
    alone = TensorGroup(group.comm, group.reduction)
    alone.comm = OwnMaximum(group.comm)
    return layers.vocab_parallel_cross_entropy_sum(logits, targets, alone)


PLACE = "minipar.parallel.tensor.plan."
MISTAKES = {
    "nothing broken": ([], nullcontext),
    "1. bias on every rank": ([], lambda: patch(PLACE + "RowParallelLinear", BiasEverywhere)),
    "2. no all-reduce in backward": ([], lambda: patch.object(layers, "column_linear", no_f)),
    "3. norm counts t times": ([], lambda: patch("minipar.train.trainer.clip_grad_norm", counts_again)),
    "4. own maximum": ([], lambda: patch(PLACE + "vocab_parallel_cross_entropy_sum", own_maximum)),
    "5. no sum of partial gradients": (
        ["--sequence-parallel"] if t > 1 else [],
        lambda: patch.object(TensorParallel, "sum_partial", lambda self, parameters: None),
    ),
}
STEPS = 3

# %% [markdown]
# One device trains once, for one step and for three; then every variant runs.

# %%
from minipar.train import verify as checks


def bytes_per_step(trainer):
    """What a right step sends over tp: layers, embedding, head, loss, one float64 of the norm; replicated gradients."""
    tokens = trainer.samples_per_microbatch * T
    expected = (4 * L + 2) * wire_bytes("all_reduce", "ring", tokens * h, 8, t, rank)
    expected += sum(wire_bytes("all_reduce", "ring", k * tokens, 8, t, rank) for k in (1, 2))
    expected += wire_bytes("all_reduce", "ordered", 1, 8, t, rank)
    if trainer.config.mesh.sequence_parallel:
        for bucket in trainer.ddp.buckets:
            kept_whole = sum(p.size for p in bucket.parameters if not is_split(p))
            expected += wire_bytes("all_reduce", "ring", kept_whole, 8, t, rank)
    return expected


def examine(name, flags, mistake):
    """Train with the mistake; {instrument: whether it noticed}, the same on every rank."""
    with mistake():
        trainer = make_trainer(t, *flags, steps=STEPS)
        comm.traffic.reset()
        results = [trainer.step(0)]
        moved = comm.traffic.bytes(axis="tp")
        states = [trainer.state_dict()]
        results += [trainer.step(k) for k in range(1, STEPS)]
        states.append(trainer.state_dict())
    alike = b"".join(p.data.tobytes() for p in trainer.model.parameters() if not is_split(p))
    seen = {"loss": abs(results[-1].loss / reference[STEPS][1][-1].loss - 1) > 0.05 if rank == 0 else False}
    seen["ranks"] = len(set(comm.all_gather_bytes(alike))) > 1
    seen["bytes"] = moved != bytes_per_step(trainer)
    for state, count in zip(states, (1, STEPS), strict=True):
        if rank == 0:
            single, single_steps = reference[count]
            verdict = checks.compare(
                state, single, results[:count], single_steps, exact=False, ranks=t, dtype="float64"
            )
            seen[f"step {count}"] = not verdict.passed
            lines[name] = verdict.line
    everyones = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(seen).encode())]
    seen = {eye: any(one.get(eye) for one in everyones) for eye in everyones[0]}
    eyes = "  ".join(f"{eye} {'CAUGHT' if caught else '-':<6}" for eye, caught in seen.items())
    say(f"{name:<31} loss {results[-1].loss:.3f}   {eyes}")
    return {eye for eye, caught in seen.items() if caught}


lines, reference = {}, {}
if rank == 0:
    for count in (1, STEPS):
        config = resolve(parse([*FLAGS, "--global-batch", "4", "--steps", str(count)]), 1)
        reference[count] = checks.train_on_one_device(config, tokens)
caught = {name: examine(name, *what) for name, what in MISTAKES.items()}
for name, line in lines.items():
    say(f"\n{name}\n  {'caught: ' if 'FAILED' in line else ''}{line}")
nothing = {name: set() for name in MISTAKES}
catching = {
    "1. bias on every rank": {"step 3"},
    "2. no all-reduce in backward": {"ranks", "bytes", "step 1", "step 3"},
    "3. norm counts t times": {"step 1", "step 3"},
    "4. own maximum": {"bytes", "step 1", "step 3"},
    "5. no sum of partial gradients": {"ranks", "bytes", "step 1", "step 3"},
}
for name, eyes in (nothing | catching if t > 1 else nothing).items():  # with one rank there is nothing to forget
    assert caught[name] - {"loss"} == eyes, (name, caught[name])

# %% [markdown]
# Four lessons.
#
# **A test at initialization is not enough.** Biases start at zero, so mistake 1 is invisible in the first step: the
# loss, every gradient and every updated parameter are right. A test must train a few steps, or begin with biases that
# are not zero.
#
# **Replicated parameters must stay replicated.** Mistakes 2 and 5 give each rank another gradient for its LayerNorms.
# From then on the ranks hold different models, which no longer are parts of one. Comparing the copies is cheap and
# needs no second run.
#
# **The norm needs a test of its own.** Mistake 3 changes nothing but the reported norm, and how strongly gradients are
# clipped. AdamW divides by the gradient's size, and hides most of it.
#
# **A wrong softmax can look reasonable.** In mistake 4 the maxima of the ranks are close to one another at first, and
# so is the loss to the right one.
#
# ### PyTorch's names
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
# | `MaskSlice` | DTensor's random number tracker | `get_cuda_rng_tracker().fork()` |
#
# ### Worked problems
#
# 1. A GPU has $B = 4$ samples of $T = 2048$ tokens, $h = 4096$ and $t = 8$. How many bytes does a rank send per layer
# in 16 bit, and how long does that take on NVLink (450 GB/s) without latency?
#
# 2. How many bytes does the loss of $N = 8192$ tokens send per rank in float32 over $t = 8$ ranks? How many does a rank
# send to gather the logits of GPT-2's vocabulary, padded to 50,264?
#
# 3. From which hidden size on is communication over InfiniBand (50 GB/s, $S = 4 \cdot 10^{14}$) with $t = 8$ at most as
# long as computation, without latency?
#
# 4. How many bytes of activations does one layer of GPT-3 ($s = 2048$, $b = 1$, $h = 12\,288$, $a = 96$) keep on each
# rank by the paper's formulas: alone, with $t = 8$, and with sequence parallelism too?

# %%
elements = 8 * 4 * 2048 * 4096 * 7 // 8
assert elements * 2 == 469_762_048
say(f"1. {elements * 2:,} bytes, {elements * 2 / 450e9 * 1e3:.2f} ms: four all-reduces of 2 N h 7/8 elements each.")
for_loss, for_logits = (n * 7 // 8 * 4 for n in (6 * 8192, 8192 * 50_264))
assert (for_loss, for_logits) == (172_032, 1_441_169_408)
say(f"2. {for_loss:,} and {for_logits:,} bytes, {for_logits / for_loss:,.0f} times as many: V/6, whatever N and t are.")
width = 16 * 7 * 4e14 / 50e9 / 72
assert round(width) == 12_444
say(f"3. h = {width:,.0f}, about GPT-3's: the ratio is 1 where h = 16 (t-1) S beta / 72.")
sbh, scores = 2048 * 12_288, 5 * 96 * 2048 / 12_288
kept_bytes = [round(sbh * c) for c in (34 + scores, 10 + (24 + scores) / 8, (34 + scores) / 8)]
assert kept_bytes == [2_868_903_936, 578_813_952, 358_612_992]
say(f"4. {', '.join(f'{x:,}' for x in kept_bytes)} bytes: with tp alone, 10 of the 34 bytes per value are not divided.")

# %% [markdown]
# ### For you
#
# 1. A row layer's bias could also be added before the sum on rank 0 only. Is that right in forward? What is its
# gradient on each rank, with and without sequence parallelism, and what would the optimizer do to the copies on the
# others?
#
# 2. Let `_ColumnLinear` keep its own tokens only and gather again in backward, as Megatron does. Which product could
# hide that all-gather? What do the ledger and the counter say before and after? (6.9 has both formulas.)
#
# 3. Cut the batch in two halves and let forward compute one while the other is being summed. On which of the three
# links does it help, and what does the latency $\alpha$ take back?
#
# 4. Tensor parallelism needs $t \le$ heads, and a fast link to all $t$ ranks. To use more devices: cut the model
# *between* layers. What has to be sent then, and who waits for whom? (That is the pipeline: Huang et al. 2019, arXiv
# 1811.06965.)
#
# ### Answers
#
# 1. Forward is right: the sum contains the bias once. Without sequence parallelism rank 0 gets the whole gradient and
# the others get 0, because they do not use theirs. The optimizer then changes the copy on rank 0 alone, and the copies
# are no longer equal. With sequence parallelism rank 0 also gets the whole gradient, because backward gathers all
# tokens before it; the sum of `Partial` gradients hands it to every rank, and the copies stay equal.
#
# 2. The product $\mathrm{d}Y_r A_r^\top$, which gives $\mathrm{d}X$, does not need $X$ and can hide the all-gather. The
# ledger sees $2w\,sbh/t$ instead of $2w\,sbh$ per layer. The counter sees two more all-gathers of $Nh\frac{t-1}{t}$
# elements each.
#
# 3. It helps most where both take about as long, which here is InfiniBand. On NVLink there is little to hide, and on
# Ethernet the computation is too short to hide much. Each half needs its own messages: forward pays $2 \cdot
# 2(t-1)\alpha$ more per layer.
#
# 4. At each cut the activations of a microbatch, $BTh$ elements, are sent forward once, and as many elements of their
# gradient back once, from one rank to one other. A stage waits for the one before it in forward, and for the one
# after it in backward; chapter 7 keeps them busy with many microbatches.

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
