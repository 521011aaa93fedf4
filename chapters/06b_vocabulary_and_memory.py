# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 6b. The vocabulary, the plan and memory
#
# **How is a whole model cut over $t$ ranks, and what does each of them keep?**
#
# [Chapter 6](06_tensor_parallel.ipynb) cut one layer. The largest matrix of GPT-2 is in no layer: the token embedding
# has 50,257 rows, almost a third of the model's 124 million parameters, and the output head is the same matrix. Its
# result is the largest activation: the logits of 8,192 tokens take 1.6 GB in float32. If eight ranks have an eighth of
# each row, and gather the rows to compute the loss, each of them sends 1.4 GB. It can send 0.17 MB instead, **8,377
# times less**, and get the same loss. The picture shows how: only three values per token must be known by all ranks.
#
# At the end of this chapter you have a table by which a whole model is cut, the proof that it then computes what one
# device computes, and a table of the bytes that each rank keeps for backward.

# %% tags=["active-ipynb", "setup"]
# from chapters.support.notebook import start
#
# cluster = start(8)

# %% tags=["setup"]
import math

import numpy as np

from chapters.support.ch06.layer_memory import MEASURED, kept_by_a_layer
from chapters.support.ch06.whole_gradients import compare_with_one_device, is_split, whole_gradients
from chapters.support.predict import predict, reveal
from chapters.support.show import printer
from chapters.support.whole_runs import relative_difference
from minipar.comm import DeviceMesh, wire_bytes, world
from minipar.nn import GPT, GPTConfig
from minipar.parallel.placement import Partial, Shard
from minipar.parallel.tensor.plan import tensor_parallel
from minipar.train.data import load_tokens
from minipar.train.flags import parse
from minipar.train.trainer import Trainer

comm = world()
rank, t = comm.rank, comm.size  # this rank, and the number of ranks that compute a layer together
say = printer(rank)  # rank 0 prints and draws; every rank checks
if rank == 0:
    from chapters.support.ch06 import figures
    from chapters.support.show import show, show_source

T = t * math.ceil(16 / t)  # tokens per sample: a multiple of t
a = t * math.ceil(6 / t)  # attention heads: a multiple of t, too
B, h = 2, 8 * a  # samples, elements per token
N = B * T  # tokens
L, V = 2, 257  # layers, and words in the vocabulary: a prime, so that nothing divides it
shape = GPTConfig(vocab_size=V, n_positions=T, n_embd=h, n_layer=L, n_head=a)
random = np.random.default_rng(0)
inputs, targets = random.integers(0, V, (2, B, T))


def all_reduce(x):
    """Return the sum of all ranks' x, over chapter 3's ring."""
    return comm.all_reduce(x.copy(), algorithm="ring")


tokens = load_tokens(None, vocab_size=V, seq_len=T)
FLAGS = f"--layers {L} --hidden {h} --heads {a} --seq-len {T} --vocab-size {V} --dtype float64 --lr 3e-3".split()
FLAGS += "--clip-grad 0.5 --steps 3".split()


def make_trainer(tp, *flags):
    """Return a trainer with this tp, and dp over the other ranks, of four samples per replica."""
    batch = str(4 * (t // tp))
    args = parse([*FLAGS, "--tp", str(tp), "--global-batch", batch, *flags], t)
    return Trainer(args, DeviceMesh(comm, dp=t // tp, tp=tp), tokens)


# %%
say(f"{t} rank{'s' if t > 1 else ''}")
gpt2_tokens, gpt2_words, padded = 8192, 50_257, 50_264  # the vocabulary is padded to a multiple of 8
gathered = gpt2_tokens * padded * 4 * 7 // 8  # bytes that each of 8 ranks sends to gather the logits
for_the_loss = 2 * 3 * gpt2_tokens * 4 * 7 // 8  # all-reduces of three values per token
assert (gathered, for_the_loss, round(gathered / for_the_loss)) == (1_441_169_408, 172_032, 8377)
assert round(gpt2_tokens * gpt2_words * 4 / 1e9, 1) == 1.6 and 0.3 < gpt2_words * 768 / 124e6 < 1 / 3
if rank == 0:
    show(figures.draw_split_loss(tokens=4, columns=9, ranks=3), "06b_split_loss")

# %% [markdown]
# In the picture a row is a token, and each of three ranks has a third of its $V$ logits. Two small all-reduces give all
# ranks the grey columns, from which each computes the loss. Section 6b.2 explains what these are.

# %% [markdown]
# ## 6b.1 The plan
#
# *Core, 7 minutes.*
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
# Here is the whole table for a block of GPT-2. What it does not name (LayerNorm, the biases of row layers, the
# embedding of positions) stays whole on every rank. A column layer's bias is cut with its columns. The library's
# `tensor_parallel` goes through such a table and leaves each rank its part of *the very values* that the serial model
# has. (Initial weights are keyed by name, never by rank, so a run on 8 ranks starts where a run on 1 does.)

# %%
CUTS = {"attn.c_attn": (1, 3), "attn.c_proj": (0, 1), "mlp.c_fc": (1, 1), "mlp.c_proj": (0, 1)}  # (dim, groups)
serial = GPT(shape, dtype="float64")
model = GPT(shape, dtype="float64")
tensor_parallel(model, comm)
theirs = dict(serial.h[0].named_parameters())
for name, parameter in model.h[0].named_parameters():
    layer, kind = name.rsplit(".", 1)
    expected = theirs[name].data
    if layer in CUTS and kind == "weight":
        expected = rank_part(expected, *CUTS[layer], rank, t)
    elif layer in ("attn.c_attn", "mlp.c_fc"):  # the biases of the column layers
        expected = rank_part(expected, 0, CUTS[layer][1], rank, t)
    assert np.array_equal(parameter.data, expected)
psi, held = (sum(p.size for p in m.parameters()) for m in (serial, model))
say(f"{psi:,} parameters, {held:,} on each rank, each with the serial model's value")

# %% [markdown]
# ### In the library
#
# *Deeper, 8 minutes.*

# %% [markdown]
# `PLAN` is the library's table for GPT-2. Beside dim and groups it names the class that replaces the serial layer.
# Llama and Mixtral, a Llama with experts (chapter 12), whose matrices are (out, in), bring tables of their own
# (`more/llama.py`, `more/experts/mixtral.py`). Where several of their layers read one input ($q$, $k$, $v$;
# `gate_proj`, `up_proj`), the block calls `enter` once for all of them, and they do not cross the border.
#
# `tensor_parallel(model, comm)` replaces serial layers by parallel ones. The model's own file (`nn/gpt.py`) knows
# nothing of ranks. (In Llama's a block's `enter` returns its input until a strategy replaces it.)

# %%
from minipar.parallel.tensor import layers
from minipar.parallel.tensor.plan import PLAN, tensor_placement

for name, row in PLAN.items():
    say(f"{name:<12} dim {row.dim!s:<4}  groups {row.groups}  {row.layer.__name__}")
if rank == 0:
    show_source(tensor_placement, layers.shard_parameter)

by_plan = {}
for name, parameter in theirs.items():
    placement = tensor_placement(PLAN, name, parameter.shape, rank, t, sequence=False)
    if isinstance(placement, Shard):
        by_plan[name] = placement.dim, placement.groups
for name, parameter in model.h[0].named_parameters():
    expected = rank_part(theirs[name].data, *by_plan[name], rank, t) if name in by_plan else theirs[name].data
    assert is_split(parameter) == (name in by_plan and t > 1) and np.array_equal(parameter.data, expected)
assert {name: by_plan[f"{name}.weight"] for name in CUTS} == CUTS

# %% [markdown]
# `Shard` records one rank's part and is kept in the parameter's *placement*, as `parameter.placement.tp`. What stays
# whole has the placement `Replicate`. Unlike `rank_part`, `Shard` pads a dim that $t$ does not divide, which the
# vocabulary needs.

# %% [markdown]
# ## 6b.2 The vocabulary
#
# *Core, 14 minutes.*
#
# The token embedding is cut by rows: rank $r$, counted from 0, holds the $V/t$ tokens from $r V/t$ on ($V$ is padded to
# a multiple of $t$).
#
# **Embedding.** Each rank looks up the tokens that it holds, writes zeros for the others, and an all-reduce adds. (That
# sum is exact: all terms but one are zero.)
#
# **Head.** The logits are $X$ times the transposed matrix, whose columns are cut: a column layer. Each rank gets the
# logits of its tokens.
#
# **Loss.** One could gather the logits, $N V$ values. But the loss of a token needs only three values of its row, and
# each is a maximum or a sum over the row. They are the grey columns of the picture above. With $\mu = \max_v z_v$ the
# loss is
#
# $$\ell = \log E - (z_{\text{target}} - \mu), \qquad E = \sum_v e^{z_v - \mu}.$$
#
# Why the maximum? Without it $e^{z_v}$ overflows, in float32 for every logit above 88.7, and the loss is infinite.
# Subtracting a constant $\mu$ from all logits changes nothing in exact arithmetic, because $\log\sum_v e^{z_v} =
# \log\big(e^\mu \sum_v e^{z_v-\mu}\big) = \mu + \log E$. With the largest logit as $\mu$, no term is above 1.
#
# Why must all ranks use the *same* $\mu$? Rank $r$ adds up $e^{z_v - \mu_r}$ over its own tokens. Two such sums with
# different $\mu_r$ have different factors $e^{-\mu_r}$, and cannot be added. So the maximum over all ranks comes first.
# One token with four logits, two on each rank:

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


# %% tags=["hide-input"]
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
# Gathering the logits would send $NV\frac{t-1}{t}$ elements, $V/6$ times as many as the $6N\frac{t-1}{t}$ here,
# whatever $N$ and $t$ are.

# %% [markdown]
# ### In the library
#
# *Deeper, 4 minutes.*

# %% [markdown]
# The library's embedding, and the forward of its loss:

# %%
from minipar.parallel.tensor import vocabulary
from minipar.parallel.tensor.user_layers import VocabParallelEmbedding

if rank == 0:
    show_source(VocabParallelEmbedding.forward, vocabulary._VocabParallelCrossEntropy.forward)

own_logits = model(inputs)  # (B, T, V/t)
plain_loss, _ = split_loss(own_logits.data.reshape(N, -1), targets.reshape(-1), rank * own_logits.shape[-1])
assert abs(model.criterion(own_logits, targets).item() / plain_loss - 1) < 1e-13

# %% [markdown]
# What does the library add? Targets that do not count (`IGNORE_INDEX`) have the loss 0. The exponentials overwrite the
# logits' copy, so that only one array of $N \times V/t$ is kept for backward. And every rank has as many rows: as
# $V = 257$ is not divisible, the matrix gets rows of zeros up to the next multiple, and their logits are set to
# $-\infty$, so that their $e^z$ is 0 in every softmax.

# %% [markdown]
# ## 6b.3 The proof
#
# *Core, 7 minutes.*
#
# One forward and backward over $t$ ranks, and the same on one device. Every split gradient is gathered and joined, and
# every parameter's gradient compared (`chapters/support/ch06/whole_gradients.py`). The counter must show what chapter 6
# says: four sums of $Nh$ elements per layer, one of the embedding in forward, one of the head in backward, and the
# loss's two small ones.

# %%
worst, traffic = compare_with_one_device(comm, shape, (inputs, targets))
assert worst < 1e-12
small = sum(wire_bytes("all_reduce", "ordered", n, 8, t, rank) for n in (N, 2 * N))
assert sum(traffic.values()) == (4 * L + 2) * 2 * N * h * (t - 1) // t * 8 + small
say(f"the loss and all gradients are those of one device, within {worst:.1e}")
say(f"counted: {sum(traffic.values()):,} bytes, of which {small:,} for the loss")

worst, traffic_sequence = compare_with_one_device(comm, shape, (inputs, targets), sequence=True)
assert worst < 1e-12 and sum(traffic_sequence.values()) == sum(traffic.values())
with_sequence = GPT(shape, dtype="float64")
tensor_parallel(with_sequence, comm, sequence=True)
partial = [p.size for p in with_sequence.h[0].parameters() if isinstance(p.placement.tp, Partial)]
assert sum(partial) == (6 * h if t > 1 else 0)
say(f"sequence parallel = one device: gradients within {worst:.1e}; bytes as before")

# %% [markdown]
# The last assertion counts the parameters of a block whose gradients sequence parallelism sums: two biases and two
# LayerNorms, $6h$ elements.
#
# The results are equal within $10^{-12}$ and not bit for bit. A row layer splits the sum that is *inside* a product, so
# its terms are added in another order than on one device. The bits are equal, too, if one device adds the same parts in
# the same tree as the ranks. [Trees in tensor parallelism](more/trees_in_tensor_parallel.ipynb) shows where the bits
# begin to differ, and the tree.

# %% [markdown]
# ## 6b.4 Dropout
#
# *Core, 4 minutes.*

# %% [markdown]
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
# ## 6b.5 Memory: what a layer keeps
#
# *Core, 9 minutes.*
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

# %% [markdown]
# **Predict.** GPT-3 has $h = 12\,288$ and $a = 96$ heads. With one sample of $T = 2048$ tokens in 16 bit ($w = 2$) and
# dropout ($\delta = 1$), a layer keeps 90 bytes for each of the $Nh$ elements on one device: 6 between the pairs, 4 for
# the inputs of the column layers, 80 inside the pairs. How many does each of eight ranks keep, without and with
# sequence parallelism?

# %%
predict("bytes per element with t = 8", ...)  # replace the dots by a number
predict("bytes per element with sequence parallelism", ...)

# %%
layouts = {"one device": (1, False), "t = 8": (8, False), "t = 8, sequence": (8, True)}
bars = {name: layer_activations(*layout, 2, 1, **GPT3) for name, layout in layouts.items()}
per_element = {name: round(sum(parts) / (2048 * 12288), 2) for name, parts in bars.items()}
assert list(per_element.values()) == [90.0, 20.0, 14.75]
assert [round(part / (2048 * 12288), 2) for part in bars["one device"]] == [6.0, 4.0, 80.0]
reveal("bytes per element with t = 8", per_element["t = 8"], say)
reveal("bytes per element with sequence parallelism", per_element["t = 8, sequence"], say)
if rank == 0:
    show(figures.plot_kept(bars, KINDS), "06b_kept")

# %% [markdown]
# On eight ranks the blue part, which is by far the largest, becomes an eighth. Half of the 20 bytes that are left is
# not divided by tensor parallelism. Sequence parallelism divides the yellow part of it.

# %% [markdown]
# ### The paper's table
#
# *Deeper, 5 minutes.*

# %% [markdown]
# The paper (Table 2) has, in bytes per $Nh$,
#
# $$34 + 5\tfrac{aT}{h} \;\text{ alone}, \qquad 10 + \tfrac{24}{t} + 5\tfrac{aT}{ht} \;\text{ with tensor}, \qquad
# \tfrac{34}{t} + 5\tfrac{aT}{ht} \;\text{ with sequence parallelism too}.$$
#
# For a layer of GPT-3 these are 114, 23 and 14.25 bytes; minipar's are 90, 20 and 14.75:

# %%
for (ranks, sequence), ours, paper in zip(layouts.values(), per_element.values(), (114, 23, 14.25), strict=True):
    scores = 5 * 96 * 2048 / 12288 / ranks
    assert paper == scores + (34 / ranks if sequence else 10 + 24 / ranks)
    say(f"GPT-3, t = {ranks}, sequence {sequence!s:<5}: {ours:>5.2f} bytes per N h; the paper has {paper}")
assert round(114 * 2048 * 12288 / 1e9, 1) == 2.9  # GB: the activations of chapter 6's first paragraph

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

# %% [markdown]
# ## 6b.6 With data parallelism and ZeRO
#
# *Core, 6 minutes.*
#
# The mesh (chapter 9) numbers the ranks of one tensor group consecutively, so that they are on one machine. Ranks
# with the same part of the model form a dp group, and data parallelism or ZeRO runs over it, unchanged: it sees a model
# with smaller parameters.
#
# One function must know of both: the **gradient norm** for clipping. The squares of all gradients are added up, each
# element *once*. A split gradient has other elements on each rank, so its squares are summed over tp. A replicated
# gradient is the same on all ranks. Each rank adds its squares after the sum over tp, so that they count once. Take two
# ranks with the parts 3 and 4 of a split gradient, and a replicated gradient of 12 on both. The norm is $\sqrt{3^2 +
# 4^2 + 12^2} = 13$. A sum of everything over both ranks has $12^2$ twice and gives 17.7 (mistake 3 of 6b.7). For all
# gradients of the model of 6b.1:


# %%
def squares(arrays):
    return sum(float((array * array).sum()) for array in arrays)


def gradient_norm(split, replicated):
    """Return the norm of the whole gradient; `split` are this rank's parts, `replicated` are the same on each rank."""
    split_squares = all_reduce(np.array([squares(split)]))[0]
    return np.sqrt(split_squares + squares(replicated))


loss = model.loss_sum(inputs, targets)
loss.backward(np.full_like(loss.data, 1 / N))
for p in model.parameters():
    p.fold_tied_gradients()  # the tied head's gradient joins that of the embedding
norm = gradient_norm(
    split=[p.grad for p in model.parameters() if is_split(p)],
    replicated=[p.grad for p in model.parameters() if not is_split(p)],
)
_, one_device_gradients, _ = whole_gradients(comm, shape, (inputs, targets), parallel=False)
assert abs(norm / np.sqrt(squares(one_device_gradients.values())) - 1) < 1e-13
assert round(math.sqrt(3**2 + 4**2 + 2 * 12**2), 1) == 17.7
say(f"the norm over {t} ranks is one device's: {norm:.6f}")

# %% [markdown]
# ### In the library
#
# *Deeper, 8 minutes.*

# %% [markdown]
# The library's version is a loop over the parameters' placements. It knows dp and pp as well, which come together in
# [chapter 9](09_3d_parallel.ipynb):

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
from minipar.train.verify import verify

TP = max((k for k in range(2, t) if t % k == 0), default=t)  # the largest divisor that leaves something for dp
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

# %% [markdown]
# ## 6b.7 Mistakes, and what notices them
#
# *Core, 9 minutes.*
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
    show(figures.draw_caught(caught, CHECKS), "06b_caught")

# %% tags=["hide-input"]
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
# **To remember.** A table names each cut, and the rest stays whole. The loss needs three values per token from all
# ranks, and the maximum is that of all ranks. Sequence parallelism divides what lies between the pairs, for the same
# bytes. Elements that several ranks hold count once in the norm. And the proof is a training of a few steps beside one
# device, with losses, norms and every parameter.

# %% [markdown]
# ## 6b.8 PyTorch's names
#
# *Deeper, 2 minutes.*

# %% [markdown]
# | minipar | PyTorch | Megatron-LM |
# | --- | --- | --- |
# | `tensor_parallel(model, comm)`, `PLAN` | `parallelize_module(model, mesh, plan)` | built into its model |
# | `VocabParallelEmbedding` | `RowwiseParallel` of `nn.Embedding` | `VocabParallelEmbedding` |
# | `vocab_parallel_cross_entropy_sum` | `loss_parallel()` | `vocab_parallel_cross_entropy` |
# | a mask of all heads (6b.4) | DTensor's random number tracker | `get_cuda_rng_tracker().fork()` |
#
# `parallelize_module` with a plan is in [chapters/pytorch/ch06.py](pytorch/ch06.py), which
# [6.7](06_tensor_parallel.ipynb) shows.

# %% [markdown]
# ## 6b.9 Problems
#
# *Deeper, 20 minutes.*

# %% [markdown]
# 1. How many bytes does the loss of $N = 8192$ tokens send per rank in float32 over $t = 8$ ranks? How many does a rank
# send to gather, also in float32, the logits of Llama 3's vocabulary of 128,256? By which factor is that more?
# 2. How many bytes of activations does one layer of GPT-3 ($T = 2048$, $B = 1$, $h = 12\,288$, $a = 96$) keep on each
# rank by the paper's formulas: alone, with $t = 8$, and with sequence parallelism too?
# 3. Let `ColumnLinear` keep its own tokens only and gather again in backward, as Megatron does. Backward has two
# products (6.5, 6.6). Which of them can run during that all-gather, and why not the other? Per layer, what do the
# ledger (after forward) and the counter say before and after?

# %% [markdown]
# ## 6b.10 Answers
#
# *Deeper, 5 minutes.*

# %% tags=["hide-input"]
llama3 = 8192 * 128_256 * 4 * 7 // 8
assert llama3 == 3_677_356_032 and llama3 == 21_376 * for_the_loss and 128_256 // 6 == 21_376
paper_bytes = [int(per * 2048 * 12288) for per in (114, 23, 14.25)]
assert paper_bytes == [2_868_903_936, 578_813_952, 358_612_992]

# %% [markdown]
# <details><summary>Answers</summary>
#
# 1. 172,032 and 3,677,356,032 bytes, 21,376 times as many: $V/6$, whatever $N$ and $t$ are.
# 2. 2,868,903,936, 578,813,952 and 358,612,992 bytes. With tp alone 10 of the 34 bytes per value are not divided.
# 3. The product $\mathrm{d}Y_r A_r^\top$, which gives $\mathrm{d}X$, does not need $X$ and can run during the
# all-gather. The other, $X^\top \mathrm{d}Y_r$, needs what is being gathered. For the inputs of the column layers the
# ledger sees $2w\,Nh/t$ instead of $2w\,Nh$ per layer. The counter sees two more all-gathers of $Nh\frac{t-1}{t}$
# elements each.
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
