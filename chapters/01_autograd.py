# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 1. A gradient engine and a GPT, with nothing hidden
#
# *What is a gradient engine, and what is a GPT, when nothing is hidden?*
#
# Every later chapter takes this model apart: it splits the batch, the optimizer state, the matrices, the layers. Each
# claims that the parts together still compute the same thing. So the whole must be known exactly first: each formula
# and its derivative, each parameter, each multiplication, each byte kept for backward, and the order in which values
# are added.
#
# This chapter answers, in order:
#
# 1. what backward is, how it runs without recursion, and how we know that it is right;
# 2. what GPT-2 is made of, and where its parameters and its arithmetic are;
# 3. what it learns in a few dozen steps;
# 4. why every rank starts from the same bits;
# 5. what recompute keeps and what it costs;
# 6. how a weight gradient can be put off, which pipelines will need.
#
# Nothing here is parallel yet. A *rank* is one of the processes that `mpirun` started. Here every rank trains the same
# model on the same data, and section 4 compares the bits. With one rank that comparison is trivial; the rest is not.

# %% tags=["active-ipynb"]
# # Eight MPI ranks for this notebook. From here on every cell runs on all of them; as a script, mpirun starts them
# # instead.
# import ipyparallel as ipp
#
# cluster = ipp.Cluster(engines="mpi", n=8, log_level=40)  # errors only
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
say = printer(comm.rank)  # rank 0 prints and draws; every rank checks

# %%
import hashlib
import math
import time
import tracemalloc

import numpy as np

from minipar import nn
from minipar.autograd import (
    DeferredGradients,
    Function,
    LazyGradient,
    Tensor,
    causal_attention,
    checkpoint,
    cross_entropy,
    defer_weight_gradients,
    fused,
    gelu,
    layer_norm,
    linear,
)
from minipar.autograd.backward import reachable, run_backward
from minipar.autograd.gradcheck import gradcheck
from minipar.backend import using
from minipar.nn.layers import generator, normal
from minipar.train.data import Batches, load_tokens

if comm.rank == 0:  # the one that draws
    from chapters.support.figures_gpt import plot_graph, plot_memory, plot_shares
    from chapters.support.show import show, show_source
    from visualize import plot_loss

random = np.random.Generator(np.random.Philox(1))
say(f"{comm.size} rank(s)")

# %% [markdown]
# ## 1. A gradient engine
#
# ### Forward next to backward
#
# Let $y = f(x)$ be one operation, $L$ the loss, and $J = \partial y / \partial x$ the Jacobian. Backward receives
# $w = \partial L / \partial y$ and returns $\partial L / \partial x = J^\top w$, a *vector-Jacobian product* (vjp).
# $J$ itself is never formed: for a LayerNorm over a batch it would have $(B T h)^2$ entries. What we write by hand is
# the *adjoint* of the derivative: the linear map $J^\top$, computed with about the work of forward.
#
# A `Function` keeps the two side by side. LayerNorm (Ba et al. 2016, arXiv 1607.06450) normalizes a row $x$ of $h$
# values and then scales and shifts it:
#
# $$\hat x = r\,(x - \bar x), \qquad r = \frac{1}{\sqrt{\mathrm{var}(x) + \epsilon}}, \qquad
# y = \hat x \odot \gamma + \beta .$$
#
# Let $w$ be the gradient of $y$ and $g = w \odot \gamma$ that of $\hat x$. The mean and $r$ depend on $x$ too, so three
# paths lead back to $x$: directly, through $\bar x$, and through $r$. Together (bars are means over the row)
#
# $$\frac{\partial L}{\partial x} = r \left( g - \bar g - \hat x \, \overline{g \hat x} \right), \qquad
# \frac{\partial L}{\partial \gamma} = \sum_{\text{rows}} w \odot \hat x, \qquad
# \frac{\partial L}{\partial \beta} = \sum_{\text{rows}} w .$$
#
# Step by step: let $c = x - \bar x$, so that $\hat x = r c$ and $r = (\overline{c^2} + \epsilon)^{-1/2}$.
#
# - Directly: $\hat x$ is $c$ times $r$, so $c$ receives $r\,g$. - Through $r$: $\partial r / \partial c_j = -r^3 c_j /
# h$, and $r$ receives $\sum_i g_i c_i = h\, \overline{g \hat x} / r$. So $c$ receives $-r^2 c\; \overline{g \hat x} =
# -r\, \hat x\, \overline{g \hat x}$. - Through $\bar x$: $c = x - \bar x$, so $x$ receives what $c$ has received, less
# its mean. The mean of the first line is $r \bar g$; that of the second is 0, because $\hat x$ has the mean 0.
#
# The code is these lines, with as few temporary arrays as possible. It keeps $\hat x$ and $r$, not $x$.

# %%
if comm.rank == 0:
    show_source(fused._LayerNorm)

# %% [markdown]
# `apply` runs `forward` and records a *node*: the function's instance, and for each input an *edge* to the node that
# made it (or to the *leaf*, a tensor that nothing computed, such as a parameter).

# %%
if comm.rank == 0:
    show_source(Function.apply)

# %% [markdown]
# ### How do we know that a backward is right?
#
# For any $u$ and $w$, the adjoint satisfies $\langle J^\top w, u\rangle = \langle w, J u\rangle$. The left side is what
# our backward computes. The right side needs only forward: $J u$ is the derivative of $f$ along $u$, and a central
# difference gives it:
#
# $$\langle J^\top w, u\rangle \;=\;
# \Big\langle w, \frac{f(x + \varepsilon u) - f(x - \varepsilon u)}{2 \varepsilon} \Big\rangle + O(\varepsilon^2).$$
#
# Draw $u$ and $w$ at random. If the backward is off by a matrix $E \ne 0$, then $w^\top E\, u = 0$ has probability 0:
# one random direction sees every element, at the price of two forwards. Element by element it would take two forwards
# for each input number. In float64 with $\varepsilon = 10^{-6}$, truncation and rounding leave about $10^{-10}$, so the
# default tolerance of $10^{-7}$ has room on both sides.

# %%
rows, gain, bias = random.standard_normal((2, 3, 16)), random.standard_normal(16), random.standard_normal(16)
error = gradcheck(layer_norm, [rows, gain, bias])
assert error < 1e-8
say(f"layer_norm: backward agrees with the difference quotient; largest relative error {error:.1e}")

# %% [markdown]
# A checker that never fails proves nothing. Here is the commonest mistake in a hand-written LayerNorm: the mean and the
# standard deviation are treated as constants, so two of the three paths are missing. `caught` runs a check that must
# fail, and fails itself if the check lets the mistake through. The chapter uses it to the end.


# %%
class ConstantStatistics(fused._LayerNorm):
    """LayerNorm with the right forward, and a backward that forgets that mean and deviation depend on x."""

    def backward(self, grad):
        _, dweight, dbias, _ = super().backward(grad)
        return grad * self.gain() * self.rstd, dweight, dbias, None


def caught(mistake, check):
    """Run `check`, which must raise AssertionError, and print what it says."""
    try:
        check()
    except AssertionError as failure:
        say(f"caught: {mistake}\n        {failure}")
        return
    raise AssertionError(f"not caught: {mistake}")


def forgetful_norm(x, weight, bias):
    return ConstantStatistics.apply(x, weight, bias, 1e-5)


caught("statistics taken for constants", lambda: gradcheck(forgetful_norm, [rows, gain, bias]))

# %% [markdown]
# The checker names input 0, which is $x$: the gradients of gain and bias are right.
#
# ### Backward without recursion
#
# Backward may visit a node only when the gradient of its output is complete, that is, after all users of that output.
# An order in which every user comes before what it used is a *topological order*, and textbooks find it by a recursive
# depth-first search. Here no search is needed. Nodes are numbered as they are made, and an operation cannot use what
# does not exist yet:
#
# > Every edge leads from a node to one with a smaller number. So going through the numbers from large to small visits
# > every user before what it used.
#
# Backward is then a plain loop. `reachable` collects nodes with a stack of its own and sorts them by number.
# (NB: PyTorch's engine numbers its nodes too, `sequence_nr`, and prefers the largest among those that are ready.)
#
# A *leaf*, such as a parameter, is no node and has no number. How does it know that its gradient is complete? While
# `reachable` collects the nodes, it counts the edges that lead to each leaf: its *uses*. Backward takes one off for
# each contribution that it sends to the leaf. At zero the gradient is complete, and the leaf's hooks run. Chapter 4
# needs exactly this moment: a gradient may be sent to other ranks as soon as no contribution to it is missing.

# %%
if comm.rank == 0:
    show_source(reachable, run_backward)

# %% [markdown]
# Python's stack allows about 1000 nested calls. A recursive search dies on the graph of a long sum; the loop does not
# notice. (Rank 0 alone builds the long chain: nothing about it depends on the rank.)


# %%
def recursive_order(node, order, seen):
    """The textbook's topological sort."""
    seen.add(node)
    for edge in node.edges:
        if isinstance(edge, Function) and edge not in seen:
            recursive_order(edge, order, seen)
    order.append(node)
    return order


def chain(length):
    """x + 1 + 1 + ...: a graph of `length` nodes, each using the one before."""
    x = Tensor(np.array(0.0), requires_grad=True)
    y = x
    for _ in range(length):
        y = y + 1.0
    return x, y


x, y = chain(100)
assert recursive_order(y.node, [], set()) == reachable(y.node)[0]  # the same order, where recursion manages

if comm.rank == 0:
    x, y = chain(100_000)
    try:
        recursive_order(y.node, [], set())
        raise AssertionError("not caught: recursion")
    except RecursionError as failure:
        say(f"caught: recursion over 100,000 additions\n        RecursionError: {failure}")
    begin = time.perf_counter()
    y.backward()
    assert x.grad == 1.0 and y.item() == 100_000
    say(f"the loop: 100,000 nodes in {time.perf_counter() - begin:.2f} s, gradient {x.grad}")
del x, y

# %% [markdown]
# ## 2. GPT-2, block by block
#
# GPT-2 (Radford et al. 2019) predicts the next token from those before it. A *token* here is a byte: the vocabulary has
# $V = 256$ entries, and no tokenizer stands between the text and the model. Letters: $B$ samples in a batch, $T$ tokens
# in each, $N = B T$ rows, width $h$, $a$ heads of size $d = h/a$, $l$ blocks, $s$ the longest sequence it knows.
#
# `GPT.forward` is: embed, run $l$ blocks, apply the head. Written out with every shape, it is the next cell. A block
# adds to its input twice: $x \leftarrow x + \mathrm{attention}(\mathrm{norm}(x))$, then
# $x \leftarrow x + \mathrm{mlp}(\mathrm{norm}(x))$. The sum that runs through all blocks is the *residual stream*.
#
# *Causal attention*: each token makes a query $q$, a key $k$ and a value $v$ of size $d$ in each head; token $i$ takes
# the mean of the values $v_j$, $j \le i$, with weights $\mathrm{softmax}_j(q_i \cdot k_j / \sqrt d)$. It is the only
# place where one token sees another.

# %%
config = nn.GPTConfig(vocab_size=256, n_positions=96, n_embd=64, n_layer=2, n_head=4)
B, T, V, s, h, a, l = 4, 48, config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer  # noqa: E741
N = B * T
model = nn.GPT(config, seed=0, dtype="float64")
tokens = load_tokens(None, vocab_size=V, seq_len=s)  # the source text of Python's standard library
inputs, targets = Batches(tokens, seq_len=T, global_batch=B, order="random", seed=0).batch(step=0, samples=range(B))

shapes = []


def note(name, y):
    shapes.append(f"{name:<24} {y.shape}")
    return y


x = note("wte[tokens] + wpe", model.wte(inputs) + model.wpe(np.arange(T)))
for i, block in enumerate(model.h):
    y = note(f"h.{i}.ln_1", layer_norm(x, block.ln_1.weight, block.ln_1.bias))
    y = note(f"h.{i}.attn.c_attn   q|k|v", linear(y, block.attn.c_attn.weight, block.attn.c_attn.bias))
    y = note(f"h.{i} attention", causal_attention(y, a))  # scores (B, a, T, T) inside
    x = x + note(f"h.{i}.attn.c_proj", linear(y, block.attn.c_proj.weight, block.attn.c_proj.bias))
    y = note(f"h.{i}.ln_2", layer_norm(x, block.ln_2.weight, block.ln_2.bias))
    y = note(f"h.{i}.mlp.c_fc", linear(y, block.mlp.c_fc.weight, block.mlp.c_fc.bias))
    y = note(f"h.{i} gelu", gelu(y))
    x = x + note(f"h.{i}.mlp.c_proj", linear(y, block.mlp.c_proj.weight, block.mlp.c_proj.bias))
y = note("ln_f", layer_norm(x, model.ln_f.weight, model.ln_f.bias))
logits = note("head: y @ wte^T", linear(y, model.wte.weight, transposed=True))
loss = note("cross_entropy", cross_entropy(logits, targets))

assert np.array_equal(logits.data, model(inputs).data)
say("\n".join(shapes[:9] + ["..."] + shapes[-3:]))
say(f"\nwritten out = GPT.forward, bit for bit: {logits.data.size:,} logits")

# %% [markdown]
# ### Backward of softmax, cross-entropy and attention
#
# *Softmax.* Let $p = \mathrm{softmax}(z)$. From $p_i = e^{z_i} / \sum_j e^{z_j}$ follows $\partial p_i / \partial z_j =
# p_i (\delta_{ij} - p_j)$. So with $g$ the gradient of $p$, that of $z$ is $p \odot (g - \sum_j p_j g_j)$.
#
# *Cross-entropy.* The loss of a token with target $y$ is $-\log p_y = \log \sum_j e^{z_j} - z_y$. Its gradient is
# $\partial / \partial z = p - e_y$, where $e_y$ is 1 at the target and 0 elsewhere. To compute it safely, subtract the
# row's maximum $m$ from all logits first: $\log \sum_j e^{z_j - m} - (z_y - m)$ is the same value, and no term of the
# sum is above 1. Without that, $e^z$ overflows, in float32 from $z = 88.8$ on.
#
# *Attention* of one head, with $S = Q K^\top / \sqrt d$, $P = \mathrm{softmax}(S)$ row by row, $O = P V$, and $G$ the
# gradient of $O$. Products of matrices give $dV = P^\top G$ and $dP = G V^\top$. Softmax gives $dS = P \odot (dP - D)$
# with $D_i = \sum_j P_{ij}\, dP_{ij}$, the same for a whole row. It need not be computed from two $T \times T$
# matrices: $D_i = \sum_j P_{ij}\, (G_i \cdot V_j) = G_i \cdot O_i$. At last $dQ = dS\, K / \sqrt d$ and $dK = dS^\top Q
# / \sqrt d$.
#
# On plain arrays, and compared with the library's operations:


# %%
def attention_by_hand(q, k, v, g):
    """The output of one head, (T, d), and the gradients of q, k and v for the output's gradient g."""
    length, d = q.shape
    scores = q @ k.T / math.sqrt(d) + np.triu(np.full((length, length), -np.inf), 1)  # (T, T); no later tokens
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    output = p @ v
    dscores = p * (g @ v.T - (g * output).sum(axis=1, keepdims=True))
    return output, dscores @ k / math.sqrt(d), dscores.T @ q / math.sqrt(d), p.T @ g


def cross_entropy_by_hand(z, y):
    """The summed loss of logits (N, V) with targets (N,), and its gradient."""
    z = z - z.max(axis=1, keepdims=True)
    total, each = np.exp(z).sum(axis=1, keepdims=True), np.arange(len(y))
    gradient = np.exp(z) / total
    gradient[each, y] -= 1
    return (np.log(total[:, 0]) - z[each, y]).sum(), gradient


d, draw = h // a, np.random.Generator(np.random.Philox(2))
qkv, upstream = Tensor(draw.standard_normal((1, T, 3 * d)), requires_grad=True), draw.standard_normal((1, T, d))
output = causal_attention(qkv, heads=1)
output.backward(upstream)
by_hand = attention_by_hand(*np.split(qkv.data[0], 3, axis=1), upstream[0])
assert np.allclose(by_hand[0], output.data[0], rtol=1e-12, atol=1e-14)
assert np.allclose(np.concatenate(by_hand[1:], axis=1), qkv.grad[0], rtol=1e-11, atol=1e-14)

some_logits = Tensor(draw.standard_normal((N, V)), requires_grad=True)
total_loss = cross_entropy(some_logits, targets.reshape(-1))
total_loss.backward()
expected_loss, expected_gradient = cross_entropy_by_hand(some_logits.data, targets.reshape(-1))
assert math.isclose(total_loss.item(), expected_loss / N, rel_tol=1e-12)
assert np.allclose(some_logits.grad, expected_gradient / N, rtol=1e-12, atol=1e-16)
with np.errstate(over="ignore"):
    assert np.isinf(np.exp(np.float32(88.8))) and np.isfinite(np.exp(np.float32(88.7)))
say("attention and cross-entropy by hand = the library's, forward and backward, within rounding")

# %% [markdown]
# The graph that such lines record, for a GPT of one block. Each row is a node with its number and the parameters it
# uses. The thick arcs are the skip paths of the residual stream: the sum is used twice, so its gradient is a sum of
# two. Forward runs down, backward up; every arc joins a node to one above it: the topological order of section 1.

# %%
small = nn.GPT(nn.GPTConfig(vocab_size=V, n_positions=s, n_embd=h, n_layer=1, n_head=a))
names = {id(p): name for name, p in small.named_parameters()} | {id(small.head_weight): "wte.weight (head)"}
nodes, uses = reachable(small.loss(inputs, targets).node)
place = {node: i for i, node in enumerate(nodes)}
edges = [(place[node], place[edge]) for node in nodes for edge in node.edges if isinstance(edge, Function)]
assert all(used < user for user, used in edges)
assert sorted(names[id(leaf)] for leaf in uses) == sorted(names.values())  # every parameter is reached

if comm.rank == 0:
    labels = []
    for node in nodes:
        used = [names[id(edge)] for edge in node.edges if isinstance(edge, Tensor)]
        labels.append(", ".join([*used[:1], *(name.split(".")[-1] for name in used[1:])]))
        labels[-1] += f"  {type(node).__name__.strip('_')}"
    show(plot_graph(labels, edges), "01_graph")
del nodes, uses, place

# %% [markdown]
# ### Where the parameters are
#
# In a block: `c_attn` has $3h^2 + 3h$, `attn.c_proj` $h^2 + h$, `c_fc` $4h^2 + 4h$, `mlp.c_proj` $4h^2 + h$, and the
# two LayerNorms $4h$. That is $12 h^2 + 13 h$. Add the embeddings $(V + s) h$ and the last LayerNorm $2h$:
#
# $$P = 12\, l h^2 \left(1 + \frac{13}{12 h}\right) + (V + s)\, h + 2h .$$
#
# (Narayanan et al. 2021, arXiv 2104.04473, equation 2, leaves out the last $2h$.)


# %%
def parameter_count(c):
    return (
        12 * c.n_layer * c.n_embd**2
        + 13 * c.n_layer * c.n_embd
        + (c.vocab_size + c.n_positions) * c.n_embd
        + 2 * c.n_embd
    )


counted = sum(p.size for p in model.parameters())
assert counted == parameter_count(config)
assert parameter_count(nn.GPTConfig()) == 124_439_808  # GPT-2 small, "124M"
say(f"this model: {counted:,} parameters counted = formula")
say(f"GPT-2 small: {parameter_count(nn.GPTConfig()):,} by the same formula")

# %% [markdown]
# ### Where the arithmetic is
#
# A product of an $n \times k$ and a $k \times m$ matrix takes $2nkm$ floating-point operations (FLOPs): a multiply and
# an add each. Per block: the four projections $2N \cdot 12h^2$; attention's two products, scores and weighted values,
# $2 \cdot 2 B T^2 h$. The head: $2 N h V$. Together
#
# $$F = l \left( 24 N h^2 + 4 N T h \right) + 2 N h V .$$
#
# (`forward_flops`; Narayanan et al. 2021, appendix. Attention counts the whole $T \times T$ square, as this code and
# most others compute it, though the mask throws away almost half.) Everything else, such as LayerNorm and GELU, is of
# order $N h$.
#
# Do we do just these? `minipar.backend.using` exchanges the array module. We put one in that counts.


# %%
class CountingNumPy:
    """NumPy, with the FLOPs of its matrix products counted."""

    def __init__(self):
        self.flops = 0

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, out=None):
        result = np.matmul(a, b, out=out)
        self.flops += 2 * result.size * a.shape[-1]
        return result


def count(work):
    """FLOPs of the matrix products in `work()`, and what it returns."""
    counting = CountingNumPy()
    with using(counting):
        result = work()
    return counting.flops, result


forward, loss = count(lambda: model.loss(inputs, targets))
backward, _ = count(lambda: loss.backward())
assert forward == config.forward_flops(B, T)
assert backward == 2 * forward
say(f"forward {forward:,} FLOPs counted = forward_flops; backward {backward:,} = 2 x forward")

# %% [markdown]
# Backward takes exactly twice forward: each product $Y = XW$ has two inputs, hence two gradients,
# $dX = dY\, W^\top$ and $dW = X^\top dY$, each as large as the forward product. Keep this in mind for section 6.
#
# The picture shows where both are. The MLP holds and does the most, twice the attention's projections. In GPT-2 small
# the embeddings hold 32 % of the parameters, and the head does 27 % of the FLOPs. Attention's two products have no
# parameters at all, and their share grows with $T$.


# %%
def anatomy(c, length):
    width, rest = c.n_embd, c.n_layer
    held = {
        "attention projections": rest * 4 * width**2,
        "attention scores": 0,
        "MLP": rest * 8 * width**2,
        "embeddings, head": (c.vocab_size + c.n_positions) * width,
        "biases, norms": rest * 13 * width + 2 * width,
    }
    done = {
        "attention projections": rest * 8 * length * width**2,
        "attention scores": rest * 4 * length**2 * width,
        "MLP": rest * 16 * length * width**2,
        "embeddings, head": 2 * length * width * c.vocab_size,
    }
    assert sum(held.values()) == parameter_count(c) and sum(done.values()) == c.forward_flops(1, length)
    return held, done


ours, gpt2 = anatomy(config, T), anatomy(nn.GPTConfig(), 1024)
if comm.rank == 0:
    labels = (
        f"parameters, here (h = {h})",
        f"FLOPs, here (T = {T})",
        "parameters, GPT-2 small",
        "FLOPs, GPT-2 small (T = 1024)",
    )
    figure = plot_shares(dict(zip(labels, (*ours, *gpt2), strict=True)))
    show(figure, "01_anatomy")

# %% [markdown]
# ### One table, two gradients
#
# GPT-2's head uses the token embedding `wte` again (it is *tied*): `logits = y @ wte.T`. So `wte` gets two gradients.
#
# - As **input**, only the rows of tokens in the batch get anything.
# - As **head**, every row gets some: each of the $V$ logits has a gradient, softmax minus target.
#
# Autograd would simply add the second to the first as it comes. `minipar` does not: `Parameter.tie()` makes a second
# leaf, with the same values and a gradient of its own, and the two are added once, when the optimizer steps.

# %%
if comm.rank == 0:
    show_source(nn.Parameter.tie, nn.Parameter.fold_tied_gradients)

# %%
as_input, as_head = model.wte.weight.grad.copy(), model.head_weight.grad.copy()
touched = int(as_input.any(axis=1).sum())
assert touched == len(np.unique(inputs)) and as_head.any(axis=1).all()
say(f"gradient as input: {touched} of {V} rows are not zero, for {len(np.unique(inputs))} different bytes in the batch")
say(f"gradient as head:  {int(as_head.any(axis=1).sum())} of {V} rows")

# %% [markdown]
# Why apart? In a pipeline, the first rank holds the input embedding and the last rank the head. A batch is cut into
# *microbatches*, whose gradients are accumulated. The first rank sums its contributions $a_1 + a_2 + a_3$, the last
# $b_1 + b_2 + b_3$, and only then do they meet. One device that adds as they come computes
# $((((b_1 + a_1) + b_2) + a_2) + \dots)$. Addition of floating-point numbers is not associative, so the bits differ.
# The later chapters compare bits; so one device, too, keeps the two apart until the step.


# %%
def embedding_gradient(fold_each_time):
    """Accumulate over four microbatches of one sample; the two gradients meet at the end, or after each."""
    model.zero_grad()
    for i in range(B):
        model.loss(inputs[i : i + 1], targets[i : i + 1]).backward()
        if fold_each_time:
            model.wte.weight.fold_tied_gradients()
    model.wte.weight.fold_tied_gradients()
    return model.wte.weight.grad.copy()


apart, mixed = embedding_gradient(False), embedding_gradient(True)
different = int((apart != mixed).sum())
assert different > 0 and np.allclose(apart, mixed, rtol=0, atol=1e-14)
largest = np.abs(apart - mixed).max()
say(f"{different:,} of {apart.size:,} elements differ between the two orders, by at most {largest:.1e}")

# %% [markdown]
# ### The whole model, checked along one direction
#
# The checker's idea works for all parameters at once. Move all of them along one random direction $u$ of length 1, and
# compare $\langle \nabla L, u \rangle$ with the slope of the loss.


# %%
def check_slope(model, tolerance=1e-7, step=1e-4, seed=3):
    """Assert that <gradient, u> is the slope of the loss along a random unit vector u over all parameters."""
    directions = np.random.Generator(np.random.Philox(seed))
    parameters = model.parameters()
    model.zero_grad()
    model.loss(inputs, targets).backward()
    along = [directions.standard_normal(p.shape) for p in parameters]
    length = math.sqrt(sum(float((u * u).sum()) for u in along))
    analytic = 0.0
    for p, u in zip(parameters, along, strict=True):
        p.fold_tied_gradients()
        u /= length
        analytic += float((p.grad * u).sum())
    start, losses = [p.data.copy() for p in parameters], []
    for sign in (1, -1):
        for p, u, p0 in zip(parameters, along, start, strict=True):
            p.data[...] = p0 + sign * step * u
        losses.append(model.loss(inputs, targets).item())
    for p, p0 in zip(parameters, start, strict=True):
        p.data[...] = p0
    numeric = (losses[0] - losses[1]) / (2 * step)
    error = abs(numeric - analytic) / max(abs(numeric), 0.01)
    assert error <= tolerance, (
        f"slope by backward {analytic:.12g}, by differences {numeric:.12g}: relative error {error:.1e}"
    )
    return error


say(f"all {counted:,} parameters along one direction: relative error {check_slope(model):.1e}")

# %% [markdown]
# ## 3. Training it
#
# The data is the source text of the running interpreter's standard library. Two levels to compare the loss with, in
# nats (natural logarithms) for each byte:
#
# - $\ln 256 = 5.545$: a model that finds every byte equally likely;
# - the *unigram entropy* $-\sum_b p_b \ln p_b$ of the byte frequencies: the best a model can do that does not look at
#   what came before. Below it, the model uses context.
#
# A step is five lines: forward, backward, rate, optimizer, and forgetting the gradients.
#
# The optimizer is AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), as in PyTorch. For each parameter $\theta$ it
# keeps two running means, of the gradient $g$ and of its square. In step $t = 1, 2, \dots$
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1)\, g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2, \qquad
# \theta \leftarrow (1 - \eta \lambda)\, \theta - \eta\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} +
# \epsilon}.$$
#
# - Both means start from 0, so after $t$ steps the weights of the gradients in them add up to $1 - \beta^t$ only. The
#   divisions correct that: in step 1 the fraction is $g / (|g| + \epsilon)$, about $\pm 1$.
# - A gradient that is always twice as large gives the same step, up to $\epsilon$. That matters later: a wrong constant
#   factor in a sum over ranks hides behind it.
# - *Decoupled* weight decay shrinks $\theta$ itself, by $\eta \lambda$, and does not pass through $m$ and $v$. It
#   applies to matrices, not to biases and LayerNorms.
# - The update works on each element alone. So a rank may update any part of the parameters if it has that part's $g$,
#   $m$ and $v$: that is what ZeRO uses (chapter 5). The *optimizer state*, $m$ and $v$, is two values per parameter.

# %%
theta, gradient_1 = draw.standard_normal((3, 4)), draw.standard_normal((3, 4))
parameter = nn.Parameter(theta.copy())
adamw = nn.AdamW([parameter], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
m_mean, v_mean = np.zeros_like(theta), np.zeros_like(theta)
for t in (1, 2, 3):
    g_t = gradient_1 * t
    m_mean, v_mean = 0.9 * m_mean + 0.1 * g_t, 0.999 * v_mean + 0.001 * g_t**2
    update = m_mean / (1 - 0.9**t) / (np.sqrt(v_mean / (1 - 0.999**t)) + 1e-8)
    theta = (1 - 0.01 * 0.1) * theta - 0.01 * update
    parameter.grad = g_t.copy()
    adamw.step()
    if t == 1:
        assert np.allclose(np.abs(update), 1, atol=1e-6)
assert np.allclose(parameter.data, theta, rtol=1e-13)
say("AdamW by hand = nn.AdamW for three steps, within rounding; the first step moves every element by about lr")

# %%
STEPS, BATCH, LENGTH, RATE = 50, 8, 32, 4e-3


def train(model, steps=STEPS):
    """Train with AdamW, warm-up and cosine; returns the loss of each step."""
    batches = Batches(tokens, seq_len=LENGTH, global_batch=BATCH, order="random", seed=0)
    optimizer = nn.AdamW(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model.loss(*batches.batch(step, range(BATCH)))  # (B, T) inputs and targets
        loss.backward()
        optimizer.lr = nn.learning_rate(step, lr=RATE, schedule="cosine", warmup_steps=5, total_steps=STEPS)
        optimizer.step()
        losses.append(loss.item())
    return losses


frequency = np.bincount(tokens.ids[: 2**20], minlength=256) / 2**20
unigram = -float((frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum())

trained = nn.GPT(config, seed=0)  # float32
begin = time.perf_counter()
losses = train(trained)
seconds = time.perf_counter() - begin
last = sum(losses[-10:]) / 10
assert last < unigram < losses[0]
say(f"{STEPS} steps of {BATCH * LENGTH} bytes in {seconds:.1f} s")
say(f"loss: {losses[0]:.3f} at first, {last:.3f} over the last 10 steps")
say(f"ln 256 = {math.log(256):.3f}, unigram entropy {unigram:.3f}")

# %%
if comm.rank == 0:
    curve = [{"step": step, "loss": value} for step, value in enumerate(losses)]
    figure = plot_loss({"GPT": curve}, unigram, "unigram entropy")
    axes = figure.axes[0]
    axes.axhline(math.log(256), color="black", linestyle=":", linewidth=1.5, label=f"ln 256 = {math.log(256):.3f}")
    axes.legend(frameon=False)
    show(figure, "01_loss")

# %% [markdown]
# The first loss is usually *below* $\ln 256$, before any training. Not luck: the head is tied. The residual stream of
# an untrained model is little more than the input byte's own embedding $e$ plus a position vector, values of deviation
# $\sigma = 0.02$ each; ln_f divides their sum by its deviation $\sigma\sqrt 2$. So the logit of the input byte itself
# is about $z = |e|^2 / (\sigma \sqrt 2) = \sigma h / \sqrt 2$, and the others are about 0, with variance $\sigma^2 h$.
# An untrained GPT-2 predicts that the byte is repeated, and source text repeats many (indentation). With $f$ the share
# of bytes that equal the one before, the loss is about $\ln(255\, e^{\sigma^2 h/2} + e^{z}) - f z$.

# %%
first_inputs, first_targets = Batches(tokens, seq_len=LENGTH, global_batch=BATCH, order="random", seed=0).batch(
    step=0, samples=range(BATCH)
)
sigma, repeated = config.initializer_range, float((first_inputs == first_targets).mean())
z = sigma * h / math.sqrt(2)
expected = math.log(255 * math.exp(sigma**2 * h / 2) + math.exp(z)) - repeated * z
assert abs(losses[0] - expected) < 0.15
say(
    f"{repeated:.1%} of the first batch repeats the byte before: expected loss {expected:.3f}, measured {losses[0]:.3f}"
)

# %% [markdown]
# ## 4. The same bits on every rank
#
# Parallel training will be compared with one device by its bits, so both must start from the same values. Two habits
# make that impossible: one random generator from which the layers draw in turn (a rank that builds only some layers
# draws other values), and seeds that depend on the rank.
#
# Here each parameter has a generator of its own. *Counter-based* (Philox, Salmon et al. 2011): its $i$-th number is a
# function of a key and $i$, with no state to carry along. The key is a hash of the seed and the parameter's name.

# %%
if comm.rank == 0:
    show_source(generator, normal)

# %% [markdown]
# Every rank computes a *digest* (a hash) of what it has, and all compare. One wrong bit anywhere would change it. Then
# each rank makes one matrix alone, without the rest of the model, as a pipeline stage or a tensor-parallel rank will:
# rank $r$ the one of block $r \bmod l$. It must be the one in the whole model.


# %%
def digest(arrays):
    h = hashlib.sha256()
    for array in arrays:
        h.update(np.ascontiguousarray(array).tobytes())
    return h.digest()


def same_everywhere(what, digest_here):
    everyone = comm.all_gather_bytes(digest_here)
    assert len(set(everyone)) == 1, f"{what}: {len(set(everyone))} different digests on {comm.size} ranks"
    say(f"{what:<24} {everyone[0].hex()[:16]} on {len(everyone)} rank(s)")


fresh = nn.GPT(config, seed=0)
same_everywhere("initial weights", digest(fresh.state_dict().values()))
same_everywhere(f"{STEPS} losses", digest([np.array(losses)]))
same_everywhere("trained weights", digest(trained.state_dict().values()))

name = f"h.{comm.rank % l}.mlp.c_fc.weight"
alone = normal(0, name, (h, 4 * h), config.initializer_range).astype(np.float32)
assert np.array_equal(alone, fresh.state_dict()[name])
say(f"a rank that makes only {name} gets the numbers of the whole model")


# %% [markdown]
# The same with one generator for all, drawn in order. A rank that holds only the last block gets other values:


# %%
def drawn_in_turn(held):
    stream = np.random.default_rng(0)
    return {name: stream.standard_normal(8) for name in held}


def partial_equals_whole():
    whole, part = drawn_in_turn(["h.0.w", "h.1.w"]), drawn_in_turn(["h.1.w"])
    assert np.array_equal(whole["h.1.w"], part["h.1.w"]), "h.1.w drawn by a rank that holds only block 1 differs"


caught("one generator for all parameters", partial_equals_whole)

# %% [markdown]
# The bits agree because all ranks run the same arithmetic in the same order. Between machines with different processors
# they may not: BLAS chooses its kernels by processor, and so the order of its sums.
#
# ## 5. Activation memory, and recompute
#
# Forward keeps arrays for backward: the *activations*. In elements, a block keeps
#
# | kept by | what | elements |
# |---|---|---|
# | ln_1, ln_2 | $\hat x$ and $r$ | $2 N h + 2N$ |
# | c_attn, c_fc | their input | $2 N h$ |
# | attention | $q, k, v$; its output (also the input of c_proj) | $4 N h$ |
# | attention | the probabilities | $a B T^2$ |
# | gelu | its input and the tanh | $8 N h$ |
# | mlp.c_proj | its input | $4 N h$ |
#
# Together $20 N h + a B T^2 + 2N$. (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, count for 16-bit values
# $34\, s b h + 5\, a s^2 b$ bytes. Without dropout and its masks that is $16 N h$ elements; we keep the tanh besides.)
# The last norm, the head and the loss keep $2 N h + N + N V$.
#
# *Recompute* (activation checkpointing; Chen et al. 2016, arXiv 1604.06174) keeps only a block's input, $N h$ elements,
# and runs the block's forward again when backward reaches it. Then one block's activations live at a time. So with $l$
# blocks the peak falls from $l\,(20 N h + a B T^2 + 2N)$ to
#
# $$l\, N h + (20 N h + a B T^2 + 2 N)$$
#
# elements, and what the head keeps. The gradients on their way, a few $N h$, come on top.

# %%
if comm.rank == 0:
    show_source(checkpoint, nn.GPT.run_block)

# %% [markdown]
# We count twice. First exactly: go through the graph after forward and add up every floating-point array that a node
# holds (each piece of storage once, parameters aside). Then from outside: `tracemalloc` knows what NumPy has allocated.
# A `Probe` is a `Function` that changes nothing and notes the memory as forward, and later backward, passes it.


# %%
class Probe(Function):
    """The identity; notes held and peak memory in `log` when forward and backward pass."""

    def forward(self, x, log, name):
        self.log, self.name = log, name
        note_memory(log, f"forward {name}")
        return x

    def backward(self, grad):
        note_memory(self.log, f"backward {self.name}")
        return grad, None, None


def note_memory(log, name):
    held, peak = tracemalloc.get_traced_memory()
    log.append((name, held - log[0][1], peak - log[0][1]) if log else (name, held, peak))
    tracemalloc.reset_peak()


class ProbedGPT(nn.GPT):
    def run_block(self, block, x):
        return Probe.apply(super().run_block(block, x), self.log, f"h.{self.h.index(block)}")


def saved_bytes(loss, model):
    """Bytes of the floating-point arrays that the graph below `loss` keeps, parameters aside."""

    def storage(array):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array

    weights = {id(storage(p.data)) for p in model.parameters()}
    kept = {}
    for node in reachable(loss.node)[0]:
        for value in vars(node).values():
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 1:
                    kept[id(storage(array))] = storage(array).nbytes
    return sum(size for key, size in kept.items() if key not in weights)


deep = nn.GPTConfig(vocab_size=V, n_positions=s, n_embd=h, n_layer=6, n_head=a)
per_block, per_input, per_head = 20 * N * h + a * B * T**2 + 2 * N, N * h, 2 * N * h + N + N * V
gradients, flops, memory = {}, {}, {}
for run, kept_per_block in (("no recompute", per_block), ("recompute", per_input)):
    probed = ProbedGPT(deep, seed=0, dtype="float64", recompute=run == "recompute")
    for leaf in (*probed.parameters(), probed.head_weight):
        leaf.grad_buffer = np.empty_like(leaf.data)  # gradients have their place before the measurement starts
    probed.log = log = []
    tracemalloc.start()
    note_memory(log, "start")
    flops_forward, loss = count(lambda model=probed: model.loss(inputs, targets))
    note_memory(log, "loss")
    held = log[-1][1]
    formula = 8 * (deep.n_layer * kept_per_block + per_head)
    assert saved_bytes(loss, probed) == formula
    assert formula <= held <= 1.02 * formula + 2**17, f"{held} bytes held, formula {formula}"
    flops_backward, _ = count(loss.backward)
    note_memory(log, "end")
    tracemalloc.stop()
    memory[run] = [("start", 0, 0), *log[1:]]
    gradients[run] = digest(p.grad for p in (*probed.parameters(), probed.head_weight))
    flops[run] = flops_forward + flops_backward
    say(f"{run:<12}: kept for backward {formula:,} bytes counted = formula; tracemalloc sees {held:,}")

# %%
assert gradients["no recompute"] == gradients["recompute"]
F, F_head = deep.forward_flops(B, T), 2 * N * h * V
assert flops["no recompute"] == 3 * F and flops["recompute"] == 4 * F - F_head
peaks = {run: max(peak for _, _, peak in log) for run, log in memory.items()}
ratio = peaks["recompute"] / peaks["no recompute"]
assert ratio < 0.5
least = 8 * (deep.n_layer * N * h + per_block)  # bytes: all inputs, and one block made again
assert least < peaks["recompute"] < 1.5 * (least + 8 * per_head)
for log in memory.values():  # a node's arrays are gone as soon as backward has passed it
    falling = [held for name, held, _ in log if name.startswith("backward")]
    assert falling == sorted(falling, reverse=True)
say("gradients with and without recompute: the same bits")
say(f"peak {peaks['no recompute']:,} bytes without, {peaks['recompute']:,} with: {ratio:.2f} of it")
say(f"FLOPs 3 F = {flops['no recompute']:,} without, 4 F - F_head = {flops['recompute']:,} with, counted")
if comm.rank == 0:
    show(plot_memory(memory, turn="loss"), "01_memory")

# %% [markdown]
# Without recompute, memory climbs by a block's activations at each block and falls as backward consumes the graph
# (`vars(node).clear()` frees a node as soon as it is done). With it, the climb is $N h$ a block, and backward shows one
# block's activations at a time, made again and dropped. The price is a second forward through the blocks: FLOPs go from
# $3F$ to $4F$ less the head's. The gradients are the same bits because the second forward does the same arithmetic on
# the same values.
#
# ## 6. Weight gradients can wait
#
# Backward of $Y = X W$ is two products. $dX = dY\, W^\top$ is needed at once: the block below waits for it, in a
# pipeline on another rank. $dW = X^\top dY$ is needed by nobody until the optimizer steps. So an idle rank can put off
# the second and fill its pipeline bubble with it later: the idea of Zero Bubble (Qi et al. 2023, arXiv 2401.10241,
# section 2.1). It calls the first part B; `minipar` says `I` (input gradient) and `W` (weight gradient).
#
# The seam is small. A weight gradient is not an array but a recipe, a `LazyGradient`; the backward loop either runs it
# or, inside `defer_weight_gradients`, puts it in a queue.

# %%
if comm.rank == 0:
    show_source(LazyGradient, DeferredGradients, defer_weight_gradients)

# %%
leaves = [*model.parameters(), model.head_weight]
model.zero_grad()
model.loss(inputs, targets).backward()
at_once = digest(p.grad for p in leaves)

model.zero_grad()
loss = model.loss(inputs, targets)
with defer_weight_gradients() as queue:
    flops_I, _ = count(loss.backward)
waiting, still_none = len(queue), sum(p.grad is None for p in leaves)
flops_W, _ = count(queue.run)

# Four linears with weight and bias in each block, the head's weight, and the two embeddings.
assert waiting == still_none == 8 * l + 3
assert digest(p.grad for p in leaves) == at_once
F, F_attention = config.forward_flops(B, T), l * 4 * N * T * h
assert flops_I == F + F_attention and flops_W == F - F_attention
say(f"after I: {waiting} of {len(leaves)} gradients wait; after W: the same bits as a backward in one go")
say(f"FLOPs: I {flops_I:,} = F + F_attention, W {flops_W:,} = F - F_attention, together 2 F")

# %% [markdown]
# Attention has no weights, so both gradients of its two products belong to `I`. That is why $T_W < T_B$ in Zero
# Bubble's tables. LayerNorm's gain and bias are not put off: they come almost free with $dx$.
#
# ## Exercises: break it, and see which check notices
#
# Each mistake below was found in real code. Change it, or write your own, and run the cell again.
#
# **1. The forgotten residual.** Backward of a hand-written block returns the gradient of the branch and drops that of
# the skip path. Forward is right, so the first loss is the same *bit for bit*. And a small model trains almost as well.


# %%
class ForgottenResidual(nn.GPT):
    """A block's skip paths carry the values but not the gradient."""

    def run_block(self, block, x):
        x = x.detach() + block.attn(block.ln_1(x))
        return x.detach() + block.mlp(block.ln_2(x))


broken = ForgottenResidual(config, seed=0)
broken_losses = train(broken, 20)
assert broken_losses[0] == losses[0]  # the loss of the first step does not notice
assert broken_losses[-1] < losses[0] - 0.5  # nor does a glance at the curve: it falls
say(f"first loss {losses[0]:.6f} right, {broken_losses[0]:.6f} without the skip gradient: equal bits")
say(f"loss of step 20: {losses[19]:.3f} right, {broken_losses[19]:.3f} without")

wrong = ForgottenResidual(config, seed=0, dtype="float64")
caught("skip path dropped, whole model", lambda: check_slope(wrong))
stream = random.standard_normal((2, 5, h))
gradcheck(wrong.h[0], [stream])  # the block itself is right
caught("skip path dropped, one block", lambda: gradcheck(lambda x: wrong.run_block(wrong.h[0], x), [stream]))

# %% [markdown]
# **2. The derivative of the other GELU.** There are two: $x\,\Phi(x)$ with the normal distribution function $\Phi$, and
# GPT-2's tanh approximation of it (Hendrycks and Gimpel 2016, arXiv 1606.08415). They differ by less than 0.001, and
# their derivatives by little more. Forward with one and backward with the other trains without a visible difference.
# A check in float32 with a tolerance of 1 % passes it. The checker in float64 does not.


# %%
class OtherGelu(fused._Gelu):
    """Forward: tanh approximation. Backward: the derivative of x Phi(x), which is Phi(x) + x phi(x)."""

    def backward(self, grad):
        x = self.x
        distribution = 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return grad * (distribution + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


points = random.standard_normal((4, 50))
gradcheck(gelu, [points])
say(f"with a tolerance of 1e-2 it passes: error {gradcheck(OtherGelu.apply, [points], tolerance=1e-2):.1e}")
caught("the derivative of the other GELU", lambda: gradcheck(OtherGelu.apply, [points]))

# %% [markdown]
# **3. Same shape, same weights.** Key the generator by the shape instead of the name, or reset a seed in a layer's
# constructor, and layers of one shape start equal. No gradient is wrong, so the checker stays silent, and the loss
# looks normal. The check is another one: no two matrices may have the same digest. (Its parallel form is worse: two
# tensor-parallel ranks with one seed hold equal halves of a matrix, and the model is as wide as one half.)


# %%
def matrices_differ(model):
    seen = {}
    for name, value in model.state_dict().items():
        if value.ndim >= 2:
            twin = seen.setdefault(digest([value]), name)
            assert twin == name, f"{name} holds the same numbers as {twin}"


matrices_differ(nn.GPT(config, seed=0))
twins = nn.GPT(config, seed=0, dtype="float64")
for parameter in twins.parameters():
    if parameter.ndim >= 2:
        parameter.data[...] = normal(0, str(parameter.shape), parameter.shape, config.initializer_range)
check_slope(twins)  # nothing wrong with its gradients
caught("weights keyed by shape", lambda: matrices_differ(twins))

# %% [markdown]
# ### For you
#
# 1. From which $T$ on do the attention probabilities take more memory than all else in a block ($a B T^2 = 20 N h$)?
#    What would it save to recompute only attention, and what would it cost in FLOPs? Compare with Korthikanti et al.,
#    section 5.
# 2. Between `I` and `W`, the queue holds arrays. Which ones, and how many bytes for one block? Who would have freed
#    them otherwise? (Zero Bubble's ZB-H1 is built so that this stays within the memory of 1F1B.)
# 3. `run_backward` adds gradients that meet at a node in the order in which their users were visited. Does that order
#    depend on anything but the program? Then why do two GPUs of one kind sometimes disagree?
# 4. What if softmax subtracted the maximum of the whole score matrix instead of each row's? For which scores would
#    forward and the gradient checker both be happy, and which input would show the mistake?

# %% [markdown]
# ### Answers
#
# 1. $a B T^2 = 20 N h$ at $T = 20 h / a$, twenty times the size of a head: 1280 tokens for GPT-2. Recomputing only
#    attention's core saves $a B T^2$ elements a block, and costs its forward once more, $4 B T^2 h$ operations. That is
#    $T / (6h + T)$ of the block's forward: little while $T$ is below $h$.
# 2. The inputs $X$ and the gradients $dY$ of the four products: $(1 + 1 + 1 + 4) N h$ and $(3 + 1 + 4 + 1) N h$, so
#    $16 N h$ elements a block. Backward itself would have freed them as it passed each node.
# 3. The order depends on the numbers of the nodes, so on the program alone. GPUs disagree because a kernel may add in
#    the order in which its threads finish (atomics), and because libraries choose among kernels by measuring them.
# 4. Both are happy while all rows have similar maxima: softmax does not change when a constant is subtracted. A row
#    whose largest score is some 750 below the matrix's maximum shows it, in float64: all its exponentials are 0, and
#    0 / 0 is NaN.
#
# ### Worked problems
#
# 1. GPT-3 has 96 blocks, $h = 12288$, 50257 tokens and 2048 positions. How many parameters, and how many bytes are
#    parameters, gradients and AdamW's means in float32?
# 2. GPT-2 small trains on 8 samples of 1024 tokens in float32. How many bytes do the blocks keep for backward, and how
#    many with recompute?
# 3. How many operations does the forward of GPT-3 take for each token of a sequence of 2048, and how far is the rule
#    "two per parameter" from that?

# %%
gpt3 = nn.GPTConfig(vocab_size=50257, n_positions=2048, n_embd=12288, n_layer=96, n_head=96)
parameters = parameter_count(gpt3)
assert 174.5e9 < parameters < 175.5e9
say(f"1. {parameters / 1e9:.1f} billion parameters; 4 + 4 + 8 = 16 bytes each: {16 * parameters / 1e12:.2f} TB")

c, samples, length = nn.GPTConfig(), 8, 1024
elements = 20 * samples * length * c.n_embd + c.n_head * samples * length**2 + 2 * samples * length
kept, with_recompute = 4 * c.n_layer * elements, 4 * (c.n_layer * samples * length * c.n_embd + elements)
assert 10.8e9 < kept < 10.9e9 and 1.1e9 < with_recompute < 1.3e9
say(f"2. {kept / 1e9:.2f} GB, with recompute {with_recompute / 1e9:.2f} GB: a block at a time, and 12 inputs")

per_token = gpt3.forward_flops(1, 2048) / 2048
assert abs(per_token / (2 * parameters) - 1) < 0.03
say(f"3. {per_token / 1e9:.0f} billion operations, {per_token / (2 * parameters):.3f} of 2 per parameter")

# %% [markdown]
# ### PyTorch's names
#
# | minipar | PyTorch |
# | --- | --- |
# | `Function.forward`, `backward`, `apply` | `torch.autograd.Function` |
# | `gradcheck` | `torch.autograd.gradcheck` (with `fast_mode=True`, which also uses random directions) |
# | `register_post_accumulate_grad_hook` | the same name, on `torch.Tensor` |
# | `queue_callback` | `Variable._execution_engine.queue_callback` |
# | `checkpoint` | `torch.utils.checkpoint.checkpoint` |
# | `GPT`, `load_gpt2` | `transformers.GPT2LMHeadModel`, with the same names of parameters |
# | `AdamW` | `torch.optim.AdamW` |
# | I and W of a backward | `stage_backward_input`, `stage_backward_weight` in `torch.distributed.pipelining` |

# %% tags=["active-ipynb"]
# %autopx

# %% tags=["active-ipynb"]
# # Back in one process: stop the eight.
# cluster.stop_cluster_sync()
