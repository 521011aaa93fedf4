# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 5. Tensor and sequence parallelism
#
# **How do $t$ ranks compute one layer together?**
#
# Data parallelism (chapter 3) and ZeRO (chapter 4) give each rank its own samples. Every rank still computes whole
# layers, and needs a whole layer's parameters and activations while it does. When one layer is too large or too slow
# for one device, the layer itself must be cut: each rank holds a part of every matrix and computes a part of every
# product, on the *same* samples. That is tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053: Megatron-LM).
#
# Its price is communication in the middle of every layer, in forward and in backward, that everybody waits for. So this
# chapter is about cutting a Transformer such that as little as possible has to be sent: two sums per layer in forward,
# two in backward. Then it proves the result equal to one device, counts the bytes, divides what is still whole
# (sequence parallelism), and finds the link on which tensor parallelism stops paying.
#
# Run it as `mpirun -n 8 python chapters/05_tensor_parallel.py`, with any number of ranks. With one rank a "part" is the
# whole, nothing is sent, and the claims say little.

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
from chapters.show import printer
from minipar.comm import world

comm = world()
rank, t = comm.rank, comm.size
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.figures import plot_activations, plot_cuts, plot_links
    from chapters.show import show, show_source
    from visualize import parse_trace, plot_bytes, plot_timeline
say(f"{t} rank{'s' if t > 1 else ''}")

# %% [markdown]
# The model is a GPT-2 of toy size. Its heads and its sequence must be divisible by $t$, so we choose both as small
# multiples of it. The vocabulary is prime, so that nothing divides it. Throughout: $B$ samples of $T$ tokens, $N = BT$
# tokens in all, hidden size $h$, vocabulary $V$, $L$ layers.

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
# ## 5.1 Columns, then rows
#
# The MLP of a Transformer is $Z = \mathrm{gelu}(XA)\,B$, with $X$ of $N \times h$, $A$ of $h \times 4h$ and $B$ of
# $4h \times h$. Cut $A$ by **columns** and $B$ by **rows**:
#
# $$A = [\,A_1 \mid A_2\,], \qquad B = \begin{bmatrix} B_1 \\ B_2 \end{bmatrix}, \qquad
# XA = [\,XA_1 \mid XA_2\,].$$
#
# Two facts. gelu works element by element, so it works on blocks of columns: $Y = \mathrm{gelu}(XA) =
# [\,\mathrm{gelu}(XA_1) \mid \mathrm{gelu}(XA_2)\,] = [\,Y_1 \mid Y_2\,]$. And a product of a row of blocks with a
# column of blocks is the sum of the blocks' products:
#
# $$Z = YB = Y_1 B_1 + Y_2 B_2 .$$
#
# Rank $r$ computes $Y_r B_r$ from $X$, without asking anybody. One sum at the end, one all-reduce, gives $Z$. Here it
# is with plain arrays, all blocks in one process:

# %%
from minipar.autograd import Tensor, gelu

random = np.random.default_rng(0)
X, A, bottom = random.normal(size=(N, h)), random.normal(size=(h, 4 * h)), random.normal(size=(4 * h, h))
BLOCKS = max(t, 2)


def act(x):
    """gelu of an array."""
    return gelu(Tensor(x)).data


def off(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())


Z = act(X @ A) @ bottom
columns, rows = np.array_split(A, BLOCKS, axis=1), np.array_split(bottom, BLOCKS, axis=0)
parts = [act(X @ a) @ b for a, b in zip(columns, rows, strict=True)]
assert off(sum(parts), Z) < 1e-13
say(f"columns, then rows: the sum of {BLOCKS} ranks' Y_r B_r is Z; relative difference {off(sum(parts), Z):.1e}")

# %% [markdown]
# The other order, $A$ by rows and $B$ by columns, needs $X$ cut by columns. Each rank then has a *partial sum* $X_r
# A_r$ of the same elements, and
#
# $$\mathrm{gelu}(X_1 A_1 + X_2 A_2) \neq \mathrm{gelu}(X_1 A_1) + \mathrm{gelu}(X_2 A_2).$$
#
# So the ranks must sum before the gelu ($4h$ columns wide, four times the bytes), and then gather the columns of $Z$.

# %%
slices, rows_first = np.array_split(X, BLOCKS, axis=1), np.array_split(A, BLOCKS, axis=0)
partial_sums = [x @ a for x, a in zip(slices, rows_first, strict=True)]
early = sum(act(part) for part in partial_sums) @ bottom  # gelu on partial sums
late = act(sum(partial_sums)) @ bottom  # an all-reduce of N x 4h elements first
assert off(early, Z) > 0.1 and off(late, Z) < 1e-13
say(f"rows, then columns, gelu before the sum: off by {off(early, Z):.0%}; after it: {off(late, Z):.1e}")

# %% [markdown]
# ## 5.2 The two ends of a pair: f and g
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
# $[I\; I]$; backward multiplies by the transpose.) As autograd Functions:

# %%
from minipar.parallel.tensor import TensorGroup, copy_to, mappings, reduce_from

if rank == 0:
    show_source(mappings._CopyTo, mappings._ReduceFrom)

group = TensorGroup(comm)  # who shares the layers, and the algorithm of their sums: "ring" or "ordered"
A_r, B_r = (columns[rank], rows[rank]) if t > 1 else (A, bottom)


def mlp(x, a, b, into, out_of):
    """gelu(x a) b between two mappings; returns (z, the three gradients of (z*z).sum()/2)."""
    x, a, b = (Tensor(array, requires_grad=True) for array in (x, a, b))
    z = out_of(gelu(into(x) @ a) @ b)
    z.backward(z.data)
    return z.data, x.grad, a.grad, b.grad


comm.traffic.reset()
z, dx, da, db = mlp(X, A_r, B_r, lambda x: copy_to(x, group), lambda x: reduce_from(x, group))
sent = comm.traffic.bytes()
z1, dx1, da1, db1 = mlp(X, A, bottom, lambda x: x, lambda x: x)  # one device

cut = slice(rank * 4 * h // t, (rank + 1) * 4 * h // t)
for mine, whole in ((z, z1), (dx, dx1), (da, da1[:, cut]), (db, db1[cut])):
    assert off(mine, whole) < 1e-12
say(f"MLP over {t} ranks = one device: Z, dX, dA and dB within {off(dx, dx1):.1e}; rank 0 sent {sent:,} bytes")

# %% [markdown]
# The weights' gradients need no communication at all. That is the other half of the idea: a rank's part of the
# parameters, of their gradients and of the optimizer's state is its own.
#
# minipar has four such mappings; the last two cut and join along a dim. Each says what it sends. With $n$ elements in
# the whole activation, an all-reduce sends $2n\frac{t-1}{t}$ per rank, an all-gather or reduce-scatter half of that
# (chapter 2). Let us count:

# %%
from minipar.parallel.tensor import all_gather, reduce_scatter

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
# ## 5.3 A layer of each kind
#
# `ColumnParallelLinear` begins with $f$, `RowParallelLinear` ends with $g$. (`column_linear` is $f$ and the product in
# one node; 5.11 says why.)

# %%
from minipar.parallel.tensor import ColumnParallelLinear, RowParallelLinear

if rank == 0:
    show_source(ColumnParallelLinear.forward, RowParallelLinear.forward)

# %% [markdown]
# Mind the biases. A column layer's bias belongs to its columns and is cut with them. A row layer's bias belongs to the
# sum: it must be added **once**, so after the all-reduce, by everybody alike. Added before, on every rank, it would
# count $t$ times (exercise 1).
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
    held = [names[Shard(rank=r, ranks=2, dim=0, size=12, groups=groups).part(np.arange(12))] for r in range(2)]
    say(f"{label:<21} rank 0: {' '.join(held[0])}    rank 1: {' '.join(held[1])}")
assert [name[1] for name in held[0]] == ["0", "1"] * 3

# %% [markdown]
# The first is useless: rank 0 has the queries of four heads and no value. In the second each of $q$, $k$, $v$ is cut
# separately, and a rank has all of its heads. In the plan this is `(1, 3)`: dim 1, in 3 groups.
#
# ## 5.4 The plan
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
        "05_cuts",
    )

# %% [markdown]
# ## 5.5 The vocabulary
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
# token needs only three values of its row: with $m = \max_v z_v$,
#
# $$\ell = \log \sum_v e^{z_v - m} - (z_{\text{target}} - m).$$
#
# Why the maximum? Without it $e^{z_v}$ overflows, in float32 for every logit above 88.7, and the loss is infinite. To
# subtract a constant $m$ from all logits of a row and add it again behind the logarithm changes nothing in exact
# arithmetic. With the largest logit as $m$, no term is above 1 and one of them is 1.
#
# Why must all ranks use the *same* $m$? Rank $r$ adds up $e^{z_v - m_r}$ over its own tokens. Two such sums with
# different $m_r$ are in different units, $e^{-m_r}$, and cannot be added. (One could multiply each by $e^{m_r - m}$
# first, but that needs $m$ as well.) So the maximum over all ranks comes first.
#
# A maximum over ranks, a sum of exponentials over ranks, and the target's logit from the one rank that has it. Two
# small all-reduces: $N$ maxima; then $2N$ sums. Backward, $\mathrm{softmax} - \mathrm{onehot}$, is local.

# %%
from minipar.parallel.tensor import VocabParallelEmbedding, layers

if rank == 0:
    show_source(VocabParallelEmbedding.forward, layers._VocabParallelCrossEntropy)

# %% [markdown]
# $V = 257$ is not divisible. The matrix gets rows of zeros up to the next multiple, and their logits are set to
# $-\infty$, so that their $e^z$ is 0 in every softmax: the loss does not change, and no gradient reaches them.

# %%
from minipar.autograd import cross_entropy_sum
from minipar.comm import wire_bytes

inputs, targets = random.integers(0, V, (2, B, T))

logits = model(inputs)  # (B, T, V/t)
comm.traffic.reset()
loss = model.criterion(logits, targets)
small = comm.traffic.bytes()
assert small == sum(wire_bytes("all_reduce", "ring", k * N, 8, t, rank) for k in (1, 2))

comm.traffic.reset()
gathered = np.concatenate(list(comm.all_gather(logits.data, algorithm="ring").reshape(t, B, T, -1)), axis=-1)
large = comm.traffic.bytes()
one_loss = cross_entropy_sum(Tensor(gathered[..., :V].copy()), targets)
assert off(loss.data, one_loss.data) < 1e-14
assert np.isneginf(gathered[..., V:]).all() and np.isfinite(gathered[..., :V]).all()
say(f"rows of wte: {V}, padded to {gathered.shape[-1]}; the {gathered.shape[-1] - V} new logits are -inf")
say(f"the loss, with the logits gathered or not, within {off(loss.data, one_loss.data):.1e}")
say(f"sent by rank 0 for the loss: {small:,} bytes; gathering the logits would take {large:,}")
if t > 1:
    everyone = [float(comm.all_reduce(np.array([float(x)]))[0]) for x in (small, large)]
    assert everyone[0] == 6 * N * 8 * (t - 1) and everyone[1] == gathered.size * 8 * (t - 1)
    say(f"over all ranks {everyone[1] / everyone[0]:.0f} times as much, about V/6; for GPT-2's V: {50257 / 6:,.0f}")

# %% [markdown]
# ## 5.6 The proof
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
# Data parallelism could promise the bits of one device (chapter 3). Here it cannot. One device computes an element of
# $YB$ in one go, as $((y_1 b_1 + y_2 b_2) + y_3 b_3) + \dots$ over all $4h$ terms. With the terms split over ranks each
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
# ## 5.7 The bytes
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
# Compare data parallelism: $2\Psi\frac{p-1}{p}$ elements per *step*, whatever the batch. A layer has $12h^2$
# parameters, so there it is $24h^2$ per layer, here $8BTh$ per layer and *microbatch*. Tensor parallelism sends more as
# soon as a rank processes more than $3h$ tokens, and it does so within the layer, where everybody waits.
#
# ## 5.8 Dropout
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
# ## 5.9 Sequence parallelism
#
# What is not divided yet? LayerNorm, dropout and the residual stream: all ranks do the same work on the same $N \times
# h$ values, and all keep the same inputs for backward. They work on each token separately, so they can be divided
# along the **sequence** (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2): between the pairs, rank $r$ has
# $T/t$ tokens with all of their $h$ elements; inside a pair all tokens with $1/t$ of the columns.
#
# The borders are chapter 2's identity, *all-reduce = reduce-scatter + all-gather*. Where a row layer all-reduced, it
# now reduce-scatters: the sum, and of it the own tokens. Where a column layer copied, it now all-gathers. Backward
# mirrors it. So a layer has four all-gathers and four reduce-scatters in the place of four all-reduces: **the same
# bytes**.

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
    show(plot_bytes(bars), "05_bytes")

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
# and $w$ bytes for each token and LayerNorm, the reciprocal deviation. Now measure: the ledger of chapter 4 counts what
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
    show(plot_activations(bars, paper), "05_activations")

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
# ## 5.10 With data parallelism and ZeRO
#
# The mesh (chapter 7) has tp as its fastest axis: the ranks of one tensor group are neighbours, on one machine. Ranks
# with the same part of the model form a dp group, and data parallelism or ZeRO runs over it, unchanged: it sees a model
# with smaller parameters. One thing must know of both, the gradient norm for clipping. It is a loop over the
# parameters' placements: the squares of split parameters are summed over tp; replicated ones count once.

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
# ## 5.11 What it costs: the link
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
# ### A model in scale 1:64
#
# We run the *real program* on the `model` clock of chapter 3, where products cost operations / speed and messages
# $\alpha + \beta n$. Our NumPy model is small, but we can set the clock as for a large one: every length ($T$, $h$,
# $V$) stands for one 64 times as long. Then every matrix product stands for one with $64^3$ times the operations, and
# every activation for one with $64^2$ times the bytes (halved: 16 bit for float32). So a model of $h = 96$, $T = 32$ is
# a scale model of $h = 6144$, $T = 2048$, about the width of a 20-billion-parameter GPT; two layers are enough, more
# would add the same again.
#
# A function in the place of `matmul` charges each product to the clock of the rank that runs in its thread. LayerNorm,
# gelu and the optimizer cost nothing here.
#
# The numbers. **Speed**: $4\cdot10^{14}$ operations/s, an *assumption*: 40 % of the 989 TFLOP/s that NVIDIA's data
# sheet gives for an H100 (dense bfloat16). **Bandwidth**, per direction: the same sheet gives NVLink 4 900 GB/s in both
# directions together, so 450; the nominal rates of NDR InfiniBand, 400 Gb/s = 50 GB/s, and of 100-gigabit Ethernet,
# 12.5 GB/s.
# **Latency**: 3, 5 and 30 microseconds per message are *assumptions* about their order of magnitude.

# %%
from contextvars import ContextVar
from unittest.mock import patch

from minipar.autograd import linear
from minipar.backend import xp
from minipar.comm import Network

SCALE, SPEED, LAYERS = 64, 400e12, 2
MODEL = GPTConfig(vocab_size=480, n_positions=32, n_embd=96, n_layer=LAYERS, n_head=24)
LINKS = {
    "NVLink 4, 450 GB/s": (3e-6, 450e9),
    "InfiniBand NDR, 50 GB/s": (5e-6, 50e9),
    "Ethernet 100 Gb/s, 12.5 GB/s": (30e-6, 12.5e9),
}
NVLINK, INFINIBAND, ETHERNET = LINKS
simulated = ContextVar("simulated", default=None)  # the communicator of the rank that this thread plays
product = xp.matmul


def charged_matmul(a, b, **options):
    """The product, with its operations charged to the clock, as a slice of the timeline."""
    result, comm = product(a, b, **options), simulated.get()
    if comm is not None:
        weight = a.ndim == 2 and "out" in options  # LazyGradients of weights are written into a given place
        with comm.tracer.region("weight gradient" if weight else comm.phase, 2 * a.shape[-1] * result.size):
            pass
    return result


def one_step(comm, sequence=False, config=MODEL):
    """Forward and backward of one sample on a model clock: (seconds of the full-size model, trace events)."""
    comm.clock.flops_per_second = SPEED / SCALE**3
    model, ids = GPT(config), np.zeros((1, config.n_positions), int)
    tensor_parallel(model, comm, "ring", sequence)
    comm.tracer.enabled, comm.phase = True, "forward"
    simulated.set(comm)
    loss = model.loss_sum(ids, ids)
    comm.phase = "backward"
    loss.backward(np.full_like(loss.data, 1))
    return comm.clock.now(), comm.tracer.chrome_events(comm.rank)


def plain_column_linear(x, weight, bias, group, sequence, transposed=False):
    """column_linear as two nodes: what 5.2 says, and nothing at the same time as anything else."""
    return linear(layers.enter(x, group, sequence), weight, bias, transposed)


def simulate(ranks, link, sequence=False, overlap=True, config=MODEL):
    """`one_step` on `ranks` threads: what each returned."""
    alpha, bandwidth = LINKS[link]
    network = Network(alpha, SCALE**2 * (2 / 4) / bandwidth)
    column = layers.column_linear if overlap else plain_column_linear
    with patch.object(xp, "matmul", charged_matmul), patch.object(layers, "column_linear", column):
        return run_local(ranks, one_step, sequence, config, clock="model", network=network)


# %% [markdown]
# ### Hiding backward's half
#
# In backward there is something to hide behind. At a column layer the gradient of the input must be summed over ranks,
# and everything further down waits for it. But the gradient of the *weight*, $X^\top \mathrm{d}Y_r$, needs nothing
# from others. So: start the all-reduce of $\mathrm{d}X$, compute the weight's gradient, then wait.

# %%
if rank == 0:
    show_source(layers._ColumnLinear.backward)

# %% [markdown]
# That is why `column_linear` is one node: as a product after a copy, $f$'s backward would begin when the product's,
# weight gradient included, has ended. `plain_column_linear` above is that composition. One layer over two ranks, each
# way, on InfiniBand. (The embedding begins the step, head and loss are in the middle.)

# %%
if rank == 0:
    one_layer = GPTConfig(vocab_size=48, n_positions=32, n_embd=96, n_layer=1, n_head=24)
    events, durations, begin = [], [], 0.0
    for overlap in (False, True):
        results = simulate(2, INFINIBAND, overlap=overlap, config=one_layer)
        durations.append(results[0][0])
        for _, mine in results:
            events += [event | ({"ts": event["ts"] + begin} if "ts" in event else {}) for event in mine]
        begin += 1.03e6 * durations[-1]
    slices = [event for event in events if event["ph"] in "MX"]
    figure = plot_timeline(parse_trace({"traceEvents": slices, "otherData": {"clock": "model"}}))
    figure.axes[0].set_title("one layer, forward and backward; left: plain, right: overlapped", loc="left", fontsize=10)
    figure.axes[0].axvline(1.015e3 * durations[0], color="black", linewidth=1.5)
    show(figure, "05_timeline")
    say(f"plain {durations[0] * 1e3:.2f} ms, overlapped {durations[1] * 1e3:.2f} ms")

# %% [markdown]
# On the left the purple of backward stands alone, as in forward. On the right it lies under the grey products of the
# weight gradients. Of each all-reduce as much is hidden as the product takes, at most all of it. The rest is exposed:
#
# $$\text{exposed} = \max\left(0,\; 2(t-1)\left(\alpha + \beta\tfrac{M}{t}\right) - \frac{2N h\, h_{\text{out}}}{t\, S}
# \right), \qquad h_{\text{out}} = 3h, 4h, V,$$
#
# with $S$ the speed. Under sequence parallelism the reduce-scatter of a column layer's backward is hidden like this;
# the all-gather of a row layer's backward is not. As a function, to be compared with the clock:


# %%
def predicted(t, link, sequence=False, overlap=True):
    """(seconds of a step, seconds of its communication hidden or not, seconds of its computation)"""
    alpha, bandwidth = LINKS[link]
    tokens, hidden, vocabulary = (SCALE * x for x in (MODEL.n_positions, MODEL.n_embd, MODEL.vocab_size))
    reduce = 2 * (t - 1) * (alpha + 2 * tokens * hidden / t / bandwidth)
    # The loss's two all-reduces, of N and 2N elements. The clock prices them as activations: 64 times too high.
    loss = sum(2 * (t - 1) * (alpha + 2 * k * SCALE * tokens / t / bandwidth) for k in (1, 2))
    hideable = reduce / 2 if sequence else reduce
    hidden_time = 0.0
    for out, count in ((3 * hidden, LAYERS), (4 * hidden, LAYERS), (vocabulary, 1)):
        hidden_time += count * min(hideable, 2 * tokens * hidden * out / t / SPEED) * overlap
    computation = 3 * MODEL.forward_flops(1, MODEL.n_positions) * SCALE**3 / SPEED / t
    communication = (4 * LAYERS + 2) * reduce + loss
    return computation + communication - hidden_time, communication, computation


MEASURED = (1, 2, 4, 8)
jobs = [(q, link, False, True) for link in LINKS for q in MEASURED]
jobs += [(q, INFINIBAND, sequence, False) for q in (2, 4, 8) for sequence in (False, True)]
jobs += [(q, INFINIBAND, True, True) for q in (2, 4, 8)]
seconds = dict(zip(jobs, deal(jobs, lambda *job: simulate(*job)[0][0]), strict=True))
for job, measured in seconds.items():
    assert abs(measured / predicted(*job)[0] - 1) < 1e-9, job
say(f"{len(jobs)} simulated steps = the formula")
say("InfiniBand            plain     overlapped    hidden")
for sequence in (False, True):
    for q in (2, 4, 8):
        plain, overlapped = (seconds[q, INFINIBAND, sequence, overlap] for overlap in (False, True))
        hidden = (plain - overlapped) / predicted(q, INFINIBAND)[1]
        how = "+ sequence" if sequence else ""
        say(f"t = {q} {how:<11} {plain * 1e3:>8.2f} ms {overlapped * 1e3:>8.2f} ms    {hidden:>4.0%} of communication")
        assert overlapped < plain

# %% [markdown]
# Half of the all-reduces are in backward at a column layer. With two ranks the weight gradients last longer than they
# do, and all of that half is hidden. With more ranks the products become shorter and the all-reduces do not. (Sequence
# parallelism can hide only the reduce-scatters, which are half of those bytes. At $t = 8$ the product is shorter than
# the reduce-scatter and than the all-reduce, so both ways hide the same time.)
#
# ### The crossover
#
# Now time against $t$ for the three links. Points are the simulated program, lines the formula, which goes on where we
# have no ranks.


# %%
def crossing(link):
    """The t at which communication (hidden or not) takes as long as computation."""
    return next(q for q in np.geomspace(1, 64, 400) if predicted(q, link)[1] > predicted(q, link)[2])


say(f"{'':<30}" + "".join(f"t = {q:<7}" for q in MEASURED) + "crossover")
for link in LINKS:
    row = "".join(f"{seconds[q, link, False, True] * 1e3:>6.2f} ms  " for q in MEASURED)
    say(f"{link:<30}{row}t = {crossing(link):.1f}")
    tail = predicted(8, link)
    say(f"{'':<30}at t = 8: computation {tail[2] * 1e3:.2f} ms, communication {tail[1] * 1e3:.2f} ms")
alone = seconds[1, NVLINK, False, True]
assert seconds[8, ETHERNET, False, True] > alone > 4 * seconds[8, NVLINK, False, True]
assert crossing(ETHERNET) < crossing(INFINIBAND) < 8 < crossing(NVLINK)
if rank == 0:
    curves = {
        link: {
            "points": {q: seconds[q, link, False, True] for q in MEASURED},
            "curve": {q: predicted(q, link)[0] for q in range(1, 65)},
            "crossing": crossing(link),
        }
        for link in LINKS
    }
    show(plot_links(curves, {q: predicted(q, NVLINK)[2] for q in range(1, 65)}), "05_links")

# %% [markdown]
# Three different pictures. On NVLink tensor parallelism pays up to eight ranks and beyond. On InfiniBand it gains
# little past the crossover. On Ethernet eight devices together are *slower than one*: the activations' trip takes
# longer than the whole computation. Hence the rule of Narayanan et al. (2021, arXiv 2104.04473, takeaway 1): tensor
# parallelism up to the number of GPUs in a server, pipelines and data parallelism between servers.
#
# The ratio of communication to computation is, without latency, $\approx \frac{16\,(t-1)\,S\beta}{72\,h}$: the batch
# cancels, the hidden size helps. A wider model carries a larger tp.
#
# ## 5.12 Exercises: break it, and see what notices
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
# ### For you
#
# 1. A row layer's bias could also be added before the sum on rank 0 only. Is that right in forward? What is its
# gradient on each rank, with and without sequence parallelism, and what would the optimizer do to the copies on the
# others?
#
# 2. Let `_ColumnLinear` keep its own tokens only and gather again in backward, as Megatron does. Which product could
# hide that all-gather? What do the ledger and the counter say before and after? (5.9 has both formulas.)
#
# 3. Cut the batch in two halves and let forward compute one while the other is being summed. On which of the three
# links does it help, and what does the latency $\alpha$ take back?
#
# 4. Tensor parallelism needs $t \le$ heads, and a fast link to all $t$ ranks. To use more devices: cut the model
# *between* layers. What has to be sent then, and who waits for whom? (That is the pipeline: Huang et al. 2019, arXiv
# 1811.06965.)

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
